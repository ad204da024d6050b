"""Packed inputs get the vectors that padded ones and single ones get, and memory may run out."""

import random
import shutil
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.cases import CASES, MAX_LENGTH, TASKS, WORDS, mix
from helpers.kernels import kernel
from helpers.vectors import near
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from llmcond.encoders import MODELS, EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.engine import attention, engine, varlen
from llmcond.errors import LlmcondError, UserError

# What is this small is done before a second thread has woken up.
pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder, case, **options):
    fixed = {"dtype": "float32", "device": "cpu", "runtime": "torch", "max_length": MAX_LENGTH}
    options = {**fixed, **options}
    return load_encoder(str(folder), like=case.like, **case.options, **options)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A maker of a case's folder, each made once."""
    made = {}

    def folder(name):
        case = CASES[name]
        key = case.kind, *case.made.items(), *case.config.items()
        if key not in made:
            path = tmp_path_factory.mktemp("made") / "model"
            made[key] = checkpoints.make(case.kind, path, **case.made).folder
            checkpoints.change_json(path / "config.json", **case.config)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def loaded(make):
    """A loader of a case's encoder, each loaded once."""
    encoders = {}

    def encoder(name):
        if name not in encoders:
            encoders[name] = load(make(name), CASES[name])
        return encoders[name]

    return encoder


@pytest.fixture(scope="module", params=CASES)
def name(request):
    return request.param


def padded(encoder, items):
    """Encode without packing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder.engine, "packs", False)
        return encoder.encode_counted(items)


def at_budget(encoder, budget, items):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder.engine, "budget", budget)
        return encoder.encode_counted(items)


def computed_alone(encoder, encoded):
    """Return the tokens that inputs have when nothing is filled up and nothing is shared."""
    return int(np.minimum(encoded.n_tokens, encoder.identity.max_length).sum())


# -- packed is padded is alone -----------------------------------------------------------------


def test_every_known_architecture_has_a_case():
    likes = {case.like for case in CASES.values()}
    covered = {model.architecture["model_type"] for model in MODELS if model.repo in likes}
    known = {model.architecture["model_type"] for model in MODELS}
    assert covered == known - {"nvembed"}


def test_every_case_is_packed(name, loaded):
    assert loaded(name).engine.packs == (CASES[name].window > 0)
    assert loaded(name).engine.shares_prefixes == CASES[name].shares


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [1, 150, 100_000])
def test_packed_inputs_get_the_vectors_of_padded_ones(name, loaded, budget):
    encoder = loaded(name)
    items = mix(encoder, seed=budget)
    found, expected = at_budget(encoder, budget, items), padded(encoder, items)
    near(found.vectors, expected.vectors)
    assert found.n_tokens.tolist() == expected.n_tokens.tolist()
    assert found.truncated.any()


@pytest.mark.matrix
def test_packed_inputs_get_the_vectors_of_single_ones(name, loaded):
    encoder = loaded(name)
    items = mix(encoder, seed=1, n_inputs=20)
    alone = np.concatenate([encoder.encode_counted([item]).vectors for item in items])
    near(encoder.encode_counted(items).vectors, alone)
    single = np.concatenate([padded(encoder, [item]).vectors for item in items])
    near(alone, single)


@pytest.mark.matrix
@settings(deadline=None, max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=25),
    task=st.sampled_from(TASKS[1:]),
    budget=st.sampled_from([60, 1_000]),
)
def test_inputs_of_any_lengths_are_packed_alike(name, loaded, lengths, task, budget):
    encoder = loaded(name)
    task = task if encoder.identity.instruction_format else ""
    least = int(encoder.identity.pool_over == "text")
    texts = [" ".join(WORDS[at : at + max(least, n)]) for at, n in enumerate(lengths)]
    items = [EncoderInput(task if at % 3 else "", text) for at, text in enumerate(texts)]
    near(at_budget(encoder, budget, items).vectors, padded(encoder, items).vectors)


def test_nothing_is_filled_up(name, loaded):
    encoder = loaded(name)
    if not encoder.engine.packs:
        pytest.skip("it is padded")
    items = mix(encoder, seed=2)
    if CASES[name].window < MAX_LENGTH:
        items = [EncoderInput("", text) for text in ("", "dogs", "a", "")]
    found, expected = encoder.encode_counted(items), padded(encoder, items)
    if CASES[name].shares:
        assert found.n_computed < computed_alone(encoder, found)
    else:
        assert found.n_computed == computed_alone(encoder, found)
    assert expected.n_computed > computed_alone(encoder, found)


def test_inputs_beyond_a_window_are_padded_beside_packed_ones(loaded):
    encoder, window = loaded("gemma-wider"), CASES["gemma-wider"].window
    forwards = []
    hook = encoder.engine.model.network.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(("packed" in kwargs, kwargs["input_ids"])),
        with_kwargs=True,
    )
    items = [EncoderInput("", " ".join(WORDS[at : at + at % 9])) for at in range(40)]
    found = encoder.encode_counted(items)
    hook.remove()
    assert {packed for packed, _ in forwards} == {False, True}
    assert all(ids.shape[1] > window for packed, ids in forwards if not packed)
    narrow = sum(ids.numel() for packed, ids in forwards if packed)
    assert narrow == sum(n for n in found.n_tokens if n <= window)
    near(found.vectors, padded(encoder, items).vectors)


@pytest.mark.parametrize("name", ["e5-xlm-r", "bge-m3", "simcse-roberta", "roberta-mean"])
def test_text_that_holds_the_padding_token_itself_is_packed_alike(loaded, name):
    """Their positions leave it out, wherever it stands."""
    encoder = loaded(name)
    texts = ["the <pad> dogs <pad><pad> run", "<pad>", "run", "<pad> a man <pad>", "two dogs"]
    items = [EncoderInput("", text) for text in texts]
    rows = encoder._tokenizer(items)
    assert any(row.ids[1:-1].count(1) > 1 for row in rows)
    found = encoder.encode_counted(items).vectors
    near(found, padded(encoder, items).vectors)
    near(found, np.concatenate([encoder.encode_counted([item]).vectors for item in items]))


def test_pairs_are_packed_with_their_token_types(make):
    case = CASES["simcse-bert"]
    # Without --like: SimCSE's own pooling takes no pairs.
    encoder = load_encoder(
        str(make("simcse-bert")),
        dtype="float32",
        device="cpu",
        max_length=60,
        pooling="mean",
        runtime="torch",
    )
    assert case.kind == "simcse-bert"
    assert encoder.engine.packs
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(1, 30))) for _ in range(30)]
    items = [
        EncoderInput("", text, chance.choice([None, "", "the color", text, "dogs " * 60]))
        for text in texts
    ]
    types = []
    hook = encoder.engine.model.network.register_forward_pre_hook(
        lambda module, args, kwargs: types.append(kwargs.get("token_type_ids")), with_kwargs=True
    )
    found = at_budget(encoder, 200, items)
    hook.remove()
    assert any(given is not None and 0 < given.float().mean() < 1 for given in types)
    near(found.vectors, padded(encoder, items).vectors)
    near(found.vectors, np.concatenate([encoder.encode_counted([item]).vectors for item in items]))
    untyped = encoder.encode_counted([EncoderInput("", item.text) for item in items])
    assert np.abs(untyped.vectors - found.vectors).max() > 0.01


@pytest.mark.parametrize("name", ["sfr", "causal-mean"])
def test_pairs_of_a_decoder_are_packed_alike(make, name):
    pooling = {"sfr": "last", "causal-mean": "mean"}[name]
    encoder = load_encoder(
        str(make(name)),
        dtype="float32",
        device="cpu",
        pooling=pooling,
        attention="causal",
        special_tokens="tokenizer",
    )
    assert encoder.engine.shares_prefixes == (pooling == "last")
    contexts = [None, "", "the color of the dress", "the color of the sky"]
    items = [EncoderInput("", text, context) for text in WORDS[:8] for context in contexts]
    found = encoder.encode_counted(items).vectors
    near(found, padded(encoder, items).vectors)
    near(found, np.concatenate([encoder.encode_counted([item]).vectors for item in items]))


def test_minilm_packs_to_its_own_vectors():
    minilm = load_encoder("minilm", dtype="float32", device="cpu", runtime="torch")
    assert minilm.engine.packs
    items = mix(minilm, seed=3, n_inputs=12)
    found = minilm.encode_counted(items)
    near(found.vectors, padded(minilm, items).vectors)
    assert found.n_computed == computed_alone(minilm, found)


def test_many_inputs_come_back_in_their_order(loaded):
    """More than one thread takes at a time."""
    encoder = loaded("simcse-bert")
    texts = [f"{WORDS[at % 60]} {WORDS[at % 7]} {at}" for at in range(600)]
    items = [EncoderInput("", text) for text in texts]
    found = encoder.encode_counted(items).vectors
    near(found, at_budget(encoder, 100_000, items).vectors)
    for at in (0, 255, 256, 599):
        near(found[[at]], encoder.encode_counted([items[at]]).vectors)


# -- shared prefixes ---------------------------------------------------------------------------


def prompts(n_texts=12):
    """What several inputs of a causal encoder have in common: the task, and the text's start."""
    return [
        EncoderInput(task, f"{text} {end}")
        for task in ("retrieve the color of the dress", "retrieve the number of people")
        for text in WORDS[:n_texts]
        for end in ("run over the wet grass", "run over the river", "play")
    ]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shares])
def test_shared_prefixes_change_no_vector_and_save_tokens(make, loaded, name):
    sharing = loaded(name)
    apart = load(make(name), CASES[name], share_prefixes=False)
    assert sharing.engine.shares_prefixes
    assert not apart.engine.shares_prefixes
    for items in (prompts(), mix(sharing, seed=4)):
        found, expected = sharing.encode_counted(items), apart.encode_counted(items)
        near(found.vectors, expected.vectors)
        assert found.n_tokens.tolist() == expected.n_tokens.tolist()
        assert expected.n_computed == computed_alone(apart, expected)
        assert found.n_computed < expected.n_computed
    assert sharing.encode_counted(prompts()).n_computed < 0.6 * expected.n_tokens.sum()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.shares])
def test_encoder_that_cannot_share_exactly_never_does(make, loaded, name):
    apart = load(make(name), CASES[name], share_prefixes=False)
    items = [
        EncoderInput(item.instruction if apart.identity.instruction_format else "", item.text)
        for item in prompts(3)
    ]
    assert not loaded(name).engine.shares_prefixes
    found, expected = loaded(name).encode_counted(items), apart.encode_counted(items)
    assert found.n_computed == expected.n_computed
    near(found.vectors, expected.vectors)


# -- what cannot be packed ---------------------------------------------------------------------

#: Each direction, with rotary positions and with learnt ones.
REFUSING = ["e5-mistral", "gte-qwen2", "e5-xlm-r", "simcse-bert", "nv-embed"]


def unpacked(make, name, monkeypatch):
    """Load a case that is to be padded, and compare it with the packed one."""
    encoder = load(make(name), CASES[name])
    assert not encoder.engine.packs
    items = mix(encoder, seed=5, n_inputs=15)
    found = encoder.encode_counted(items)
    monkeypatch.undo()
    near(found.vectors, load(make(name), CASES[name]).encode_counted(items).vectors)
    return found


def open_attention(module, query, key, value, mask, scaling=None, packed=None, **options):
    """Let the texts of a packed row see each other."""
    return attention.sdpa_attention_forward(
        module, query, key, value, mask, scaling=scaling, **options
    )


def later_attention(module, query, key, value, mask, scaling=None, packed=None, **options):
    """As transformers' own, let texts see those that stand before them."""
    if packed is not None:
        mask = torch.full((query.shape[2],) * 2, float("-inf")).triu(1)[None, None]
    return open_attention(module, query, key, value, mask, scaling, None, **options)


@pytest.mark.matrix
@pytest.mark.parametrize("leak", [open_attention, later_attention])
@pytest.mark.parametrize("name", REFUSING)
def test_encoder_whose_texts_would_see_each_other_is_padded(make, monkeypatch, name, leak):
    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, leak)
    unpacked(make, name, monkeypatch)


@pytest.mark.parametrize("name", ["e5-xlm-r", "bge-m3", "simcse-roberta"])
def test_encoder_whose_positions_would_be_wrong_is_padded(make, monkeypatch, name):
    monkeypatch.setattr(engine, "skipped_id", lambda network: None)
    unpacked(make, name, monkeypatch)


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, TypeError, KeyError])
def test_encoder_that_fails_on_a_packed_row_is_padded(make, monkeypatch, error):
    honest = attention._compute_attention

    def failing(*states, packed=None, **options):
        if packed is not None:
            raise error("not in a packed row")
        return honest(*states, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, failing)
    unpacked(make, "e5-mistral", monkeypatch)


@pytest.mark.parametrize("name", ["sfr", "gte-qwen2", "gemma", "e5-xlm-r", "simcse-bert"])
def test_padding_token_without_an_embedding_changes_nothing(tmp_path, make, loaded, name):
    encoder = loaded(name)
    folder = shutil.copytree(make(name), tmp_path / "model")
    checkpoints.change_json(folder / "tokenizer_config.json", pad_token="[NEWPAD]")
    other = load(folder, CASES[name])
    rows = len(other.engine.model.network.get_input_embeddings().weight)
    assert other._tokenizer.pad_id == rows  # one behind the last
    items = mix(encoder, seed=8, n_inputs=15)
    near(padded(other, items).vectors, padded(encoder, items).vectors)
    near(other.encode_counted(items).vectors, encoder.encode_counted(items).vectors)
    with pytest.raises(UserError, match=f"token id {rows},.*embeddings for the ids 0 to"):
        other.encode([EncoderInput("", "dogs [NEWPAD]")])


def test_end_without_an_embedding_is_told(tmp_path, make):
    case = CASES["nv-embed"]
    folder = shutil.copytree(make("nv-embed"), tmp_path / "model")
    checkpoints.change_json(folder / "tokenizer_config.json", additional_special_tokens=["[END]"])
    encoder = load(folder, case, special_tokens="<s> {text} [END]")
    with pytest.raises(
        UserError, match=r"produces the token id .*the tokenizer that the model was trained"
    ):
        encoder.encode([EncoderInput("", "dogs")])


def test_encoder_with_eager_attention_is_padded(tmp_path, make):
    made = checkpoints.make("mistral", tmp_path / "model")
    checkpoints.change_json(made.folder / "config.json", attn_implementation="eager")
    encoder = load(made.folder, CASES["e5-mistral"])
    assert encoder.engine.model.network.config._attn_implementation == "eager"
    assert not encoder.engine.packs
    items = mix(encoder, seed=6, n_inputs=15)
    expected = load(make("e5-mistral"), CASES["e5-mistral"]).encode_counted(items)
    near(encoder.encode_counted(items).vectors, expected.vectors)


# -- a kernel for uneven lengths ---------------------------------------------------------------


def with_kernels(make, name, monkeypatch, *chosen):
    monkeypatch.setattr(varlen, "varlen_kernels", lambda device, dtype: [*chosen])
    return load(make(name), CASES[name])


@pytest.mark.matrix
def test_kernel_for_uneven_lengths_gives_the_same_vectors(make, loaded, monkeypatch, name):
    if not CASES[name].window:
        pytest.skip("it is padded")
    encoder = with_kernels(make, name, monkeypatch, kernel)
    assert encoder.engine.packs
    assert encoder.engine._runtime.kernel is kernel
    items = mix(encoder, seed=7, n_inputs=15)
    near(encoder.encode_counted(items).vectors, loaded(name).encode_counted(items).vectors)


def first_aligned(query, key, value, ends, key_ends, longest, longest_keys, **options):
    """As kernels were once: the first query is aligned with the first key."""
    parts = []
    for (start, stop), (first, last) in zip(
        pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True
    ):
        n_keys = min(last - first, stop - start)
        of_one = torch.tensor([[0, stop - start], [0, n_keys]], dtype=torch.int32)
        states = query[start:stop], *(x[first : first + n_keys] for x in (key, value))
        parts.append(kernel(*states, *of_one, longest, longest_keys, **options))
    return torch.cat(parts)


def broken(*arguments, **options):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize("wrong", [first_aligned, broken])
def test_wrong_kernel_is_not_taken(make, loaded, monkeypatch, wrong):
    encoder = with_kernels(make, "e5-mistral", monkeypatch, wrong)
    assert encoder.engine.packs
    assert encoder.engine._runtime.kernel is None
    assert encoder.engine.kernel_name == "scaled_dot_product_attention"
    near(
        encoder.encode_counted(prompts(4)).vectors,
        loaded("e5-mistral").encode_counted(prompts(4)).vectors,
    )
    # The next one is tried.
    encoder = with_kernels(make, "e5-mistral", monkeypatch, wrong, kernel)
    assert encoder.engine._runtime.kernel is kernel


def of_flash_attn(*arguments, softmax_scale, causal):
    """With the signature of the library flash-attn."""
    window = (-1, 0) if causal else (-1, -1)
    return kernel(*arguments, scale=softmax_scale, window_size=window, enable_gqa=True)


def of_torch_2_10(query, key, value, ends, key_ends, most, most_keys, is_causal=False):
    window = (-1, 0) if is_causal else (-1, -1)
    return kernel(query, key, value, ends, key_ends, most, most_keys, window_size=window)


def of_torch_2_11(
    query, key, value, ends, key_ends, most, most_keys, *, scale=None, window_size=(-1, -1)
):
    given = query, key, value, ends, key_ends, most, most_keys
    return kernel(*given, scale=scale, window_size=window_size)


@pytest.mark.parametrize("older", [of_torch_2_10, of_torch_2_11])
@pytest.mark.parametrize("name", ["e5-mistral", "nv-embed", "simcse-bert"])
def test_kernels_of_older_versions_of_torch_are_taken(make, loaded, monkeypatch, name, older):
    encoder = with_kernels(make, name, monkeypatch, varlen._adapt_torch_kernel(older))
    assert encoder.engine.kernel_name == "varlen_attn"
    items = mix(encoder, seed=7, n_inputs=15)
    near(encoder.encode_counted(items).vectors, loaded(name).encode_counted(items).vectors)


@pytest.mark.parametrize("name", ["e5-mistral", "nv-embed", "simcse-bert"])
def test_flash_attn_is_called_as_its_library_has_it(make, loaded, monkeypatch, name):
    encoder = with_kernels(make, name, monkeypatch, varlen._adapt_flash_attn(of_flash_attn))
    assert encoder.engine.kernel_name == "flash_attn"
    items = mix(encoder, seed=7, n_inputs=15)
    near(encoder.encode_counted(items).vectors, loaded(name).encode_counted(items).vectors)


# -- memory that runs out ----------------------------------------------------------------------


def cuda_error(tokens):
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tokens} MiB.")


def cpu_error(tokens):
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate "
        f"memory: you tried to allocate {tokens} bytes. Error code 12 (Cannot allocate memory)"
    )


def cublas_error(tokens):
    return RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )


class Memory:
    """A network that takes so many tokens at a time, and what its engine gave."""

    def __init__(self, encoder, limit, error=cuda_error):
        self.encoder, self.limit, self.error = encoder, limit, error
        self.errors, self.runs = 0, []
        self._lock = threading.Lock()

    def __enter__(self):
        self._run = self.encoder.engine.run
        self._hook = self.encoder.engine.model.network.register_forward_pre_hook(
            self._check, with_kwargs=True
        )
        self.encoder.engine.run = self._noted
        return self

    def __exit__(self, *_):
        self._hook.remove()
        del self.encoder.engine.run

    def _check(self, module, args, kwargs):
        tokens = kwargs["input_ids"].numel()
        if tokens > self.limit:
            with self._lock:
                self.errors += 1
            assert self.errors < 1_000
            raise self.error(tokens)

    def _noted(self, rows, *arguments, **options):
        given = []
        for pooled in self._run(rows, *arguments, **options):
            assert len(pooled.vectors) == len(pooled.inputs)
            given += pooled.inputs
            yield pooled
        assert sorted(given) == list(range(len(rows)))
        self.runs.append(given)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "error", [cuda_error, cublas_error, cpu_error, lambda tokens: MemoryError()]
)
@pytest.mark.parametrize("name", ["e5-mistral", "simcse-bert", "gemma-wider", "nv-embed"])
def test_batches_are_halved_until_they_fit(make, loaded, name, error):
    items = mix(loaded(name), seed=8)
    expected = loaded(name).encode_counted(items).vectors
    for limit in (MAX_LENGTH, 150, 400):
        encoder = load(make(name), CASES[name], max_tokens_per_batch=3_000)
        with Memory(encoder, limit, error) as memory:
            near(encoder.encode_counted(items).vectors, expected)
            assert memory.errors > 0
            assert 1 <= encoder.engine.budget < 3_000
            before, budget = memory.errors, encoder.engine.budget
            near(encoder.encode_counted(items).vectors, expected)
            assert memory.errors == before
            assert encoder.engine.budget == budget
            assert len(memory.runs) == 2


def test_batches_without_packing_are_halved_too(make, loaded, monkeypatch):
    items = mix(loaded("e5-mistral"), seed=9)
    expected = loaded("e5-mistral").encode_counted(items).vectors
    encoder = load(make("e5-mistral"), CASES["e5-mistral"], max_tokens_per_batch=3_000)
    monkeypatch.setattr(encoder.engine, "packs", False)
    with Memory(encoder, 200) as memory:
        near(encoder.encode_counted(items).vectors, expected)
    assert memory.errors > 0


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_batches_that_are_begun_ahead_come_in_their_order(make, loaded, ahead):
    """As on a GPU; the fourth batch does not fit the first time."""
    items = mix(loaded("simcse-bert"), seed=10)
    encoder = load(make("simcse-bert"), CASES["simcse-bert"], max_tokens_per_batch=150)
    engine, begun, limits = encoder.engine, [], []

    def begin(module, args, kwargs):
        begun.append(kwargs["input_ids"].numel())
        if len(begun) == 4:
            raise cuda_error(begun[-1])

    engine.batches_ahead = ahead
    encoder.engine.model.network.register_forward_pre_hook(begin, with_kwargs=True)
    rows = encoder._tokenizer(items)
    order, vectors = [], np.empty((len(items), engine.dim), dtype=np.float32)
    for pooled in engine.run(rows):
        limits.append((len(begun), engine.budget))
        order += pooled.inputs
        vectors[list(pooled.inputs)] = pooled.vectors
    # Batches come so many later than they are begun; those before the fourth come before it is
    # halved, and each input comes once, the longest first.
    assert limits[0] == (min(ahead + 1, 4), 150)
    assert [budget for _, budget in limits][:4] == [150, 150, 150, begun[3] // 2]
    assert sorted(order) == list(range(len(items)))
    lengths = [len(rows[index].ids) for index in order]
    assert lengths == sorted(lengths, reverse=True)
    near(vectors, loaded("simcse-bert").encode_counted(items).vectors)


def test_memory_that_runs_out_in_several_threads_loses_no_input(make, loaded):
    items = [
        EncoderInput("", f"{' '.join(WORDS[at % 70 : at % 70 + at % 19])} {at}")
        for at in range(700)
    ]
    expected = loaded("simcse-bert").encode_counted(items).vectors
    torch.set_num_threads(3)
    encoder = load(make("simcse-bert"), CASES["simcse-bert"], max_tokens_per_batch=3_000)
    torch.set_num_threads(1)
    assert encoder.concurrency.threads == 3
    with Memory(encoder, 120) as memory:
        near(encoder.encode(items), expected)
        assert memory.errors > 0
        assert len(memory.runs) == 3


def test_inputs_that_are_all_alike_fit_alike(make, loaded):
    items = [EncoderInput("", "the dogs " * 12)] * 50
    encoder = load(make("e5-mistral"), CASES["e5-mistral"], max_tokens_per_batch=3_000)
    expected = loaded("e5-mistral").encode_counted(items[:1]).vectors
    with Memory(encoder, 70):
        near(encoder.encode_counted(items).vectors, np.repeat(expected, 50, axis=0))


@pytest.mark.parametrize("error", [cuda_error, cpu_error])
@pytest.mark.parametrize("packs", [True, False])
def test_single_input_that_does_not_fit_is_told(make, monkeypatch, packs, error):
    encoder = load(make("simcse-bert"), CASES["simcse-bert"])
    monkeypatch.setattr(encoder.engine, "packs", packs)
    items = [EncoderInput("", "dogs"), EncoderInput("", "dogs " * 48), EncoderInput("", "a man")]
    with (
        Memory(encoder, 40, error),
        pytest.raises(
            LlmcondError,
            match=r"out of memory on cpu with a single input of 50 tokens\. Reduce max_length",
        ) as raised,
    ):
        encoder.encode_counted(items)
    assert encoder.name in str(raised.value)
    assert "llmcond models --check" in str(raised.value)


def test_inputs_of_one_token_that_do_not_fit_are_told(make):
    """Nothing is left to halve: not even where several of them are one row of one token."""
    encoder = load(make("qwen3"), CASES["qwen3"])
    items = [EncoderInput("", "")] * 2
    assert encoder.encode_counted(items).n_tokens.tolist() == [1, 1]
    with Memory(encoder, 0), pytest.raises(LlmcondError, match="out of memory"):
        encoder.encode_counted(items)


def test_other_errors_are_not_taken_for_memory(make):
    encoder = load(make("simcse-bert"), CASES["simcse-bert"])
    budget = encoder.engine.budget
    with (
        Memory(encoder, 0, lambda tokens: RuntimeError("mat1 and mat2 shapes differ")) as memory,
        pytest.raises(RuntimeError, match="mat1 and mat2 shapes differ"),
    ):
        encoder.encode_counted([EncoderInput("", "dogs"), EncoderInput("", "a man")])
    assert memory.errors == 1
    assert encoder.engine.budget == budget
