"""Packed, padded and single inputs get equal vectors, also after running out of memory."""

import random
import shutil
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.cases import CASES, MAX_LENGTH, TASKS, WORDS, sample_inputs
from helpers.kernels import reference_attention
from helpers.vectors import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from llmcond.encoders import MODELS, EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.engine import attention, engine
from llmcond.errors import LlmcondError, UserError

# Networks this small finish before a second thread would have started.
pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder, case, **options):
    fixed = {"dtype": "float32", "device": "cpu", "runtime": "torch", "max_length": MAX_LENGTH}
    options = {**fixed, **options}
    return load_encoder(str(folder), like=case.like, **case.options, **options)


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory):
    """A function that returns the checkpoint folder of a case and creates it on first use."""
    folders = {}

    def folder(name):
        case = CASES[name]
        key = case.kind, *case.checkpoint_options.items(), *case.config.items()
        if key not in folders:
            path = tmp_path_factory.mktemp("checkpoint") / "model"
            folders[key] = checkpoints.build_checkpoint(
                case.kind, path, **case.checkpoint_options
            ).folder
            checkpoints.change_json(path / "config.json", **case.config)
        return folders[key]

    return folder


@pytest.fixture(scope="module")
def get_encoder(make_folder):
    """A function that returns the encoder of a case and loads it on first use."""
    encoders = {}

    def encoder(name):
        if name not in encoders:
            encoders[name] = load(make_folder(name), CASES[name])
        return encoders[name]

    return encoder


@pytest.fixture(scope="module", params=CASES)
def name(request):
    return request.param


def encode_padded(encoder, items):
    """Encode without packing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder.engine, "packs", False)
        return encoder.encode_with_counts(items)


def encode_with_budget(encoder, budget, items):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder.engine, "budget", budget)
        return encoder.encode_with_counts(items)


def count_unshared_tokens(encoder, encoded):
    """Return the number of tokens without padding and without shared prefixes."""
    return int(np.minimum(encoded.n_tokens, encoder.identity.max_length).sum())


# -- packed, padded and single inputs ----------------------------------------------------------


def test_every_known_architecture_has_a_case():
    likes = {case.like for case in CASES.values()}
    covered = {model.architecture["model_type"] for model in MODELS if model.repo in likes}
    known = {model.architecture["model_type"] for model in MODELS}
    assert covered == known - {"nvembed"}


def test_cases_use_packing_as_expected(name, get_encoder):
    assert get_encoder(name).engine.packs == (CASES[name].window > 0)
    assert get_encoder(name).engine.shares_prefixes == CASES[name].shares_prefixes


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [1, 150, 100_000])
def test_packed_vectors_equal_padded_vectors(name, get_encoder, budget):
    encoder = get_encoder(name)
    items = sample_inputs(encoder, seed=budget)
    packed, expected = encode_with_budget(encoder, budget, items), encode_padded(encoder, items)
    assert_close(packed.vectors, expected.vectors)
    assert packed.n_tokens.tolist() == expected.n_tokens.tolist()
    assert packed.truncated.any()


@pytest.mark.matrix
def test_packed_vectors_equal_vectors_of_single_inputs(name, get_encoder):
    encoder = get_encoder(name)
    items = sample_inputs(encoder, seed=1, n_inputs=20)
    alone = np.concatenate([encoder.encode_with_counts([item]).vectors for item in items])
    assert_close(encoder.encode_with_counts(items).vectors, alone)
    single = np.concatenate([encode_padded(encoder, [item]).vectors for item in items])
    assert_close(alone, single)


@pytest.mark.matrix
@settings(deadline=None, max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=25),
    task=st.sampled_from(TASKS[1:]),
    budget=st.sampled_from([60, 1_000]),
)
def test_packed_vectors_equal_padded_vectors_for_any_lengths(
    name, get_encoder, lengths, task, budget
):
    encoder = get_encoder(name)
    task = task if encoder.identity.instruction_format else ""
    min_words = int(encoder.identity.pool_over == "text")
    texts = [" ".join(WORDS[index : index + max(min_words, n)]) for index, n in enumerate(lengths)]
    items = [EncoderInput(task if index % 3 else "", text) for index, text in enumerate(texts)]
    assert_close(
        encode_with_budget(encoder, budget, items).vectors, encode_padded(encoder, items).vectors
    )


def test_packing_computes_no_padding(name, get_encoder):
    encoder = get_encoder(name)
    if not encoder.engine.packs:
        pytest.skip("this encoder is padded")
    items = sample_inputs(encoder, seed=2)
    if CASES[name].window < MAX_LENGTH:
        items = [EncoderInput("", text) for text in ("", "dogs", "a", "")]
    packed, padded = encoder.encode_with_counts(items), encode_padded(encoder, items)
    if CASES[name].shares_prefixes:
        assert packed.n_computed < count_unshared_tokens(encoder, packed)
    else:
        assert packed.n_computed == count_unshared_tokens(encoder, packed)
    assert padded.n_computed > count_unshared_tokens(encoder, packed)


def test_only_inputs_beyond_the_window_are_padded(get_encoder):
    encoder, window = get_encoder("gemma-wider"), CASES["gemma-wider"].window
    forwards = []
    hook = encoder.engine.model.network.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(("packed" in kwargs, kwargs["input_ids"])),
        with_kwargs=True,
    )
    items = [EncoderInput("", " ".join(WORDS[index : index + index % 9])) for index in range(40)]
    encoded = encoder.encode_with_counts(items)
    hook.remove()
    assert {packed for packed, _ in forwards} == {False, True}
    assert all(ids.shape[1] > window for packed, ids in forwards if not packed)
    narrow = sum(ids.numel() for packed, ids in forwards if packed)
    assert narrow == sum(n for n in encoded.n_tokens if n <= window)
    assert_close(encoded.vectors, encode_padded(encoder, items).vectors)


@pytest.mark.parametrize("name", ["e5-xlm-r", "bge-m3", "simcse-roberta", "roberta-mean"])
def test_text_with_padding_token_is_packed_correctly(get_encoder, name):
    """Position ids skip the padding token, wherever it occurs."""
    encoder = get_encoder(name)
    texts = ["the <pad> dogs <pad><pad> run", "<pad>", "run", "<pad> a man <pad>", "two dogs"]
    items = [EncoderInput("", text) for text in texts]
    rows = encoder._tokenizer(items)
    assert any(row.ids[1:-1].count(1) > 1 for row in rows)
    vectors = encoder.encode_with_counts(items).vectors
    assert_close(vectors, encode_padded(encoder, items).vectors)
    assert_close(
        vectors, np.concatenate([encoder.encode_with_counts([item]).vectors for item in items])
    )


def test_pairs_are_packed_with_their_token_types(make_folder):
    case = CASES["simcse-bert"]
    # There is no ``like``, because the pooling of SimCSE does not support pairs.
    encoder = load_encoder(
        str(make_folder("simcse-bert")),
        dtype="float32",
        device="cpu",
        max_length=60,
        pooling="mean",
        runtime="torch",
    )
    assert case.kind == "simcse-bert"
    assert encoder.engine.packs
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(1, 30))) for _ in range(30)]
    items = [
        EncoderInput("", text, generator.choice([None, "", "the color", text, "dogs " * 60]))
        for text in texts
    ]
    batches = []
    hook = encoder.engine.model.network.register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(kwargs.get("token_type_ids")), with_kwargs=True
    )
    packed = encode_with_budget(encoder, 200, items)
    hook.remove()
    assert any(types is not None and 0 < types.float().mean() < 1 for types in batches)
    assert_close(packed.vectors, encode_padded(encoder, items).vectors)
    assert_close(
        packed.vectors,
        np.concatenate([encoder.encode_with_counts([item]).vectors for item in items]),
    )
    untyped = encoder.encode_with_counts([EncoderInput("", item.text) for item in items])
    assert np.abs(untyped.vectors - packed.vectors).max() > 0.01


@pytest.mark.parametrize("name", ["sfr", "causal-mean"])
def test_pairs_of_a_decoder_are_packed_correctly(make_folder, name):
    pooling = {"sfr": "last", "causal-mean": "mean"}[name]
    encoder = load_encoder(
        str(make_folder(name)),
        dtype="float32",
        device="cpu",
        pooling=pooling,
        attention="causal",
        special_tokens="tokenizer",
    )
    assert encoder.engine.shares_prefixes == (pooling == "last")
    contexts = [None, "", "the color of the dress", "the color of the sky"]
    items = [EncoderInput("", text, context) for text in WORDS[:8] for context in contexts]
    vectors = encoder.encode_with_counts(items).vectors
    assert_close(vectors, encode_padded(encoder, items).vectors)
    assert_close(
        vectors, np.concatenate([encoder.encode_with_counts([item]).vectors for item in items])
    )


def test_minilm_is_packed_without_padding():
    minilm = load_encoder("minilm", dtype="float32", device="cpu", runtime="torch")
    assert minilm.engine.packs
    items = sample_inputs(minilm, seed=3, n_inputs=12)
    packed = minilm.encode_with_counts(items)
    assert_close(packed.vectors, encode_padded(minilm, items).vectors)
    assert packed.n_computed == count_unshared_tokens(minilm, packed)


def test_vectors_of_many_inputs_are_in_input_order(get_encoder):
    """There are more inputs than one thread takes at a time."""
    encoder = get_encoder("simcse-bert")
    texts = [f"{WORDS[index % 60]} {WORDS[index % 7]} {index}" for index in range(600)]
    items = [EncoderInput("", text) for text in texts]
    vectors = encoder.encode_with_counts(items).vectors
    assert_close(vectors, encode_with_budget(encoder, 100_000, items).vectors)
    for index in (0, 255, 256, 599):
        assert_close(vectors[[index]], encoder.encode_with_counts([items[index]]).vectors)


# -- shared prefixes ---------------------------------------------------------------------------


def prompts(n_texts=12):
    """Return inputs that share their instruction and the start of their text."""
    return [
        EncoderInput(task, f"{text} {end}")
        for task in ("retrieve the color of the dress", "retrieve the number of people")
        for text in WORDS[:n_texts]
        for end in ("run over the wet grass", "run over the river", "play")
    ]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shares_prefixes])
def test_shared_prefixes_save_tokens_and_keep_vectors(make_folder, get_encoder, name):
    encoder = get_encoder(name)
    unshared = load(make_folder(name), CASES[name], share_prefixes=False)
    assert encoder.engine.shares_prefixes
    assert not unshared.engine.shares_prefixes
    for items in (prompts(), sample_inputs(encoder, seed=4)):
        shared, expected = encoder.encode_with_counts(items), unshared.encode_with_counts(items)
        assert_close(shared.vectors, expected.vectors)
        assert shared.n_tokens.tolist() == expected.n_tokens.tolist()
        assert expected.n_computed == count_unshared_tokens(unshared, expected)
        assert shared.n_computed < expected.n_computed
    assert encoder.encode_with_counts(prompts()).n_computed < 0.6 * expected.n_tokens.sum()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.shares_prefixes])
def test_encoder_that_cannot_share_prefixes_exactly_does_not(make_folder, get_encoder, name):
    unshared = load(make_folder(name), CASES[name], share_prefixes=False)
    items = [
        EncoderInput(item.instruction if unshared.identity.instruction_format else "", item.text)
        for item in prompts(3)
    ]
    assert not get_encoder(name).engine.shares_prefixes
    encoded, expected = (
        get_encoder(name).encode_with_counts(items),
        unshared.encode_with_counts(items),
    )
    assert encoded.n_computed == expected.n_computed
    assert_close(encoded.vectors, expected.vectors)


# -- what cannot be packed ---------------------------------------------------------------------

#: Causal and bidirectional encoders, with rotary and with learnt positions.
PADDED = ["e5-mistral", "gte-qwen2", "e5-xlm-r", "simcse-bert", "nv-embed"]


def check_padded(make_folder, name, monkeypatch):
    """Check that a case is padded under the patches, and that its vectors equal packed ones."""
    encoder = load(make_folder(name), CASES[name])
    assert not encoder.engine.packs
    items = sample_inputs(encoder, seed=5, n_inputs=15)
    padded = encoder.encode_with_counts(items)
    monkeypatch.undo()
    assert_close(
        padded.vectors, load(make_folder(name), CASES[name]).encode_with_counts(items).vectors
    )
    return padded


def leak_to_all(module, query, key, value, mask, scaling=None, packed=None, **options):
    """Let the texts of a packed row see each other."""
    return attention.sdpa_attention_forward(
        module, query, key, value, mask, scaling=scaling, **options
    )


def leak_to_earlier(module, query, key, value, mask, scaling=None, packed=None, **options):
    """Let texts see the texts before them, as the causal mask of transformers does."""
    if packed is not None:
        mask = torch.full((query.shape[2],) * 2, float("-inf")).triu(1)[None, None]
    return leak_to_all(module, query, key, value, mask, scaling, None, **options)


@pytest.mark.matrix
@pytest.mark.parametrize("leak", [leak_to_all, leak_to_earlier])
@pytest.mark.parametrize("name", PADDED)
def test_encoder_is_padded_if_attention_leaks_between_texts(make_folder, monkeypatch, name, leak):
    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, leak)
    check_padded(make_folder, name, monkeypatch)


@pytest.mark.parametrize("name", ["e5-xlm-r", "bge-m3", "simcse-roberta"])
def test_encoder_is_padded_if_positions_would_be_wrong(make_folder, monkeypatch, name):
    monkeypatch.setattr(engine, "skipped_id", lambda network: None)
    check_padded(make_folder, name, monkeypatch)


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, TypeError, KeyError])
def test_encoder_is_padded_if_packed_row_raises(make_folder, monkeypatch, error):
    original = attention._compute_attention

    def fail_if_packed(*states, packed=None, **options):
        if packed is not None:
            raise error("not in a packed row")
        return original(*states, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, fail_if_packed)
    check_padded(make_folder, "e5-mistral", monkeypatch)


@pytest.mark.parametrize("name", ["sfr", "gte-qwen2", "gemma", "e5-xlm-r", "simcse-bert"])
def test_padding_token_without_embedding_does_not_change_vectors(
    tmp_path, make_folder, get_encoder, name
):
    encoder = get_encoder(name)
    folder = shutil.copytree(make_folder(name), tmp_path / "model")
    checkpoints.change_json(folder / "tokenizer_config.json", pad_token="[NEWPAD]")
    other = load(folder, CASES[name])
    rows = len(other.engine.model.network.get_input_embeddings().weight)
    assert other._tokenizer.pad_id == rows  # one after the last embedding
    items = sample_inputs(encoder, seed=8, n_inputs=15)
    assert_close(encode_padded(other, items).vectors, encode_padded(encoder, items).vectors)
    assert_close(other.encode_with_counts(items).vectors, encoder.encode_with_counts(items).vectors)
    with pytest.raises(UserError, match=f"token id {rows},.*embeddings for the ids 0 to"):
        other.encode([EncoderInput("", "dogs [NEWPAD]")])


def test_end_token_without_embedding_raises(tmp_path, make_folder):
    case = CASES["nv-embed"]
    folder = shutil.copytree(make_folder("nv-embed"), tmp_path / "model")
    checkpoints.change_json(folder / "tokenizer_config.json", additional_special_tokens=["[END]"])
    encoder = load(folder, case, special_tokens="<s> {text} [END]")
    with pytest.raises(
        UserError, match=r"produces the token id .*the tokenizer that the model was trained"
    ):
        encoder.encode([EncoderInput("", "dogs")])


def test_encoder_with_eager_attention_is_padded(tmp_path, make_folder):
    checkpoint = checkpoints.build_checkpoint("mistral", tmp_path / "model")
    checkpoints.change_json(checkpoint.folder / "config.json", attn_implementation="eager")
    encoder = load(checkpoint.folder, CASES["e5-mistral"])
    assert encoder.engine.model.network.config._attn_implementation == "eager"
    assert not encoder.engine.packs
    items = sample_inputs(encoder, seed=6, n_inputs=15)
    expected = load(make_folder("e5-mistral"), CASES["e5-mistral"]).encode_with_counts(items)
    assert_close(encoder.encode_with_counts(items).vectors, expected.vectors)


# -- kernels for variable lengths --------------------------------------------------------------


def load_with_kernels(make_folder, name, monkeypatch, *kernels):
    monkeypatch.setattr(attention, "varlen_kernels", lambda device, dtype: [*kernels])
    return load(make_folder(name), CASES[name])


@pytest.mark.matrix
def test_varlen_kernel_gives_the_same_vectors(make_folder, get_encoder, monkeypatch, name):
    if not CASES[name].window:
        pytest.skip("this encoder is padded")
    encoder = load_with_kernels(make_folder, name, monkeypatch, reference_attention)
    assert encoder.engine.packs
    assert encoder.engine._runtime.kernel is reference_attention
    items = sample_inputs(encoder, seed=7, n_inputs=15)
    assert_close(
        encoder.encode_with_counts(items).vectors,
        get_encoder(name).encode_with_counts(items).vectors,
    )


def align_first(query, key, value, ends, key_ends, max_queries, max_keys, **options):
    """Align the first query with the first key, as older kernels did."""
    parts = []
    for (start, stop), (first, last) in zip(
        pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True
    ):
        n_keys = min(last - first, stop - start)
        cu_lengths = torch.tensor([[0, stop - start], [0, n_keys]], dtype=torch.int32)
        states = query[start:stop], *(x[first : first + n_keys] for x in (key, value))
        parts.append(reference_attention(*states, *cu_lengths, max_queries, max_keys, **options))
    return torch.cat(parts)


def raise_error(*arguments, **options):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize("incorrect", [align_first, raise_error])
def test_incorrect_kernel_is_not_used(make_folder, get_encoder, monkeypatch, incorrect):
    encoder = load_with_kernels(make_folder, "e5-mistral", monkeypatch, incorrect)
    assert encoder.engine.packs
    assert encoder.engine._runtime.kernel is None
    assert encoder.engine.kernel_name == "scaled_dot_product_attention"
    assert_close(
        encoder.encode_with_counts(prompts(4)).vectors,
        get_encoder("e5-mistral").encode_with_counts(prompts(4)).vectors,
    )
    # The next kernel is tried.
    encoder = load_with_kernels(
        make_folder, "e5-mistral", monkeypatch, incorrect, reference_attention
    )
    assert encoder.engine._runtime.kernel is reference_attention


def attend_like_flash_attn(*arguments, softmax_scale, causal):
    """Attend with the signature of the library flash-attn."""
    window = (-1, 0) if causal else (-1, -1)
    return reference_attention(*arguments, scale=softmax_scale, window_size=window, enable_gqa=True)


def attend_like_torch_2_10(
    query, key, value, ends, key_ends, max_queries, max_keys, is_causal=False
):
    window = (-1, 0) if is_causal else (-1, -1)
    return reference_attention(
        query, key, value, ends, key_ends, max_queries, max_keys, window_size=window
    )


def attend_like_torch_2_11(
    query, key, value, ends, key_ends, max_queries, max_keys, *, scale=None, window_size=(-1, -1)
):
    arguments = query, key, value, ends, key_ends, max_queries, max_keys
    return reference_attention(*arguments, scale=scale, window_size=window_size)


@pytest.mark.parametrize("older_kernel", [attend_like_torch_2_10, attend_like_torch_2_11])
@pytest.mark.parametrize("name", ["e5-mistral", "nv-embed", "simcse-bert"])
def test_kernels_of_older_torch_versions_are_used(
    make_folder, get_encoder, monkeypatch, name, older_kernel
):
    encoder = load_with_kernels(
        make_folder, name, monkeypatch, attention._adapt_torch_kernel(older_kernel)
    )
    assert encoder.engine.kernel_name == "varlen_attn"
    items = sample_inputs(encoder, seed=7, n_inputs=15)
    assert_close(
        encoder.encode_with_counts(items).vectors,
        get_encoder(name).encode_with_counts(items).vectors,
    )


@pytest.mark.parametrize("name", ["e5-mistral", "nv-embed", "simcse-bert"])
def test_flash_attn_is_called_with_its_signature(make_folder, get_encoder, monkeypatch, name):
    encoder = load_with_kernels(
        make_folder, name, monkeypatch, attention._adapt_flash_attn(attend_like_flash_attn)
    )
    assert encoder.engine.kernel_name == "flash_attn"
    items = sample_inputs(encoder, seed=7, n_inputs=15)
    assert_close(
        encoder.encode_with_counts(items).vectors,
        get_encoder(name).encode_with_counts(items).vectors,
    )


# -- out of memory -----------------------------------------------------------------------------


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


class LimitedMemory:
    """Let a network run out of memory beyond a number of tokens, and record what its engine yields.

    ``errors`` counts the failed batches; ``runs`` has the order of inputs of each run.
    """

    def __init__(self, encoder, limit, error=cuda_error):
        self.encoder, self.limit, self.error = encoder, limit, error
        self.errors, self.runs = 0, []
        self._lock = threading.Lock()

    def __enter__(self):
        self._run = self.encoder.engine.run
        self._hook = self.encoder.engine.model.network.register_forward_pre_hook(
            self._check, with_kwargs=True
        )
        self.encoder.engine.run = self._record
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

    def _record(self, rows, *arguments, **options):
        inputs = []
        for pooled in self._run(rows, *arguments, **options):
            assert len(pooled.vectors) == len(pooled.inputs)
            inputs += pooled.inputs
            yield pooled
        assert sorted(inputs) == list(range(len(rows)))
        self.runs.append(inputs)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "error", [cuda_error, cublas_error, cpu_error, lambda tokens: MemoryError()]
)
@pytest.mark.parametrize("name", ["e5-mistral", "simcse-bert", "gemma-wider", "nv-embed"])
def test_batches_are_halved_until_they_fit(make_folder, get_encoder, name, error):
    items = sample_inputs(get_encoder(name), seed=8)
    expected = get_encoder(name).encode_with_counts(items).vectors
    for limit in (MAX_LENGTH, 150, 400):
        encoder = load(make_folder(name), CASES[name], max_tokens_per_batch=3_000)
        with LimitedMemory(encoder, limit, error) as memory:
            assert_close(encoder.encode_with_counts(items).vectors, expected)
            assert memory.errors > 0
            assert 1 <= encoder.engine.budget < 3_000
            before, budget = memory.errors, encoder.engine.budget
            assert_close(encoder.encode_with_counts(items).vectors, expected)
            assert memory.errors == before
            assert encoder.engine.budget == budget
            assert len(memory.runs) == 2


def test_padded_batches_are_halved_too(make_folder, get_encoder, monkeypatch):
    items = sample_inputs(get_encoder("e5-mistral"), seed=9)
    expected = get_encoder("e5-mistral").encode_with_counts(items).vectors
    encoder = load(make_folder("e5-mistral"), CASES["e5-mistral"], max_tokens_per_batch=3_000)
    monkeypatch.setattr(encoder.engine, "packs", False)
    with LimitedMemory(encoder, 200) as memory:
        assert_close(encoder.encode_with_counts(items).vectors, expected)
    assert memory.errors > 0


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_batches_begun_ahead_are_yielded_in_order(make_folder, get_encoder, ahead):
    """GPUs begin batches ahead; here the fourth batch runs out of memory at its first attempt."""
    items = sample_inputs(get_encoder("simcse-bert"), seed=10)
    encoder = load(make_folder("simcse-bert"), CASES["simcse-bert"], max_tokens_per_batch=150)
    engine, batch_sizes, limits = encoder.engine, [], []

    def begin(module, args, kwargs):
        batch_sizes.append(kwargs["input_ids"].numel())
        if len(batch_sizes) == 4:
            raise cuda_error(batch_sizes[-1])

    engine.batches_ahead = ahead
    encoder.engine.model.network.register_forward_pre_hook(begin, with_kwargs=True)
    rows = encoder._tokenizer(items)
    order, vectors = [], np.empty((len(items), engine.dim), dtype=np.float32)
    for pooled in engine.run(rows):
        limits.append((len(batch_sizes), engine.budget))
        order += pooled.inputs
        vectors[list(pooled.inputs)] = pooled.vectors
    # A batch is yielded after ``ahead`` more have begun. The first three are yielded before the
    # budget is halved. Each input is yielded once, the longest first.
    assert limits[0] == (min(ahead + 1, 4), 150)
    assert [budget for _, budget in limits][:4] == [150, 150, 150, batch_sizes[3] // 2]
    assert sorted(order) == list(range(len(items)))
    lengths = [len(rows[index].ids) for index in order]
    assert lengths == sorted(lengths, reverse=True)
    assert_close(vectors, get_encoder("simcse-bert").encode_with_counts(items).vectors)


def test_out_of_memory_in_several_threads_loses_no_input(make_folder, get_encoder):
    items = [
        EncoderInput("", f"{' '.join(WORDS[index % 70 : index % 70 + index % 19])} {index}")
        for index in range(700)
    ]
    expected = get_encoder("simcse-bert").encode_with_counts(items).vectors
    torch.set_num_threads(3)
    encoder = load(make_folder("simcse-bert"), CASES["simcse-bert"], max_tokens_per_batch=3_000)
    torch.set_num_threads(1)
    assert encoder.concurrency.threads == 3
    with LimitedMemory(encoder, 120) as memory:
        assert_close(encoder.encode(items), expected)
        assert memory.errors > 0
        assert len(memory.runs) == 3


def test_identical_inputs_fit_into_limited_memory(make_folder, get_encoder):
    items = [EncoderInput("", "the dogs " * 12)] * 50
    encoder = load(make_folder("e5-mistral"), CASES["e5-mistral"], max_tokens_per_batch=3_000)
    expected = get_encoder("e5-mistral").encode_with_counts(items[:1]).vectors
    with LimitedMemory(encoder, 70) as memory:
        assert_close(encoder.encode_with_counts(items).vectors, np.repeat(expected, 50, axis=0))
    assert memory.errors == 0


@pytest.mark.parametrize("error", [cuda_error, cpu_error])
@pytest.mark.parametrize("packs", [True, False])
def test_single_input_beyond_memory_reports_its_length(make_folder, monkeypatch, packs, error):
    encoder = load(make_folder("simcse-bert"), CASES["simcse-bert"])
    monkeypatch.setattr(encoder.engine, "packs", packs)
    items = [EncoderInput("", "dogs"), EncoderInput("", "dogs " * 48), EncoderInput("", "a man")]
    with (
        LimitedMemory(encoder, 40, error),
        pytest.raises(
            LlmcondError,
            match=r"out of memory on cpu with a single input of 50 tokens\. Reduce max_length",
        ) as raised,
    ):
        encoder.encode_with_counts(items)
    assert encoder.name in str(raised.value)
    assert "llmcond models --check" in str(raised.value)


def test_inputs_of_one_token_beyond_memory_raise(make_folder):
    """A row of one token cannot be halved, even if several inputs share it."""
    encoder = load(make_folder("qwen3"), CASES["qwen3"])
    items = [EncoderInput("", "")] * 2
    assert encoder.encode_with_counts(items).n_tokens.tolist() == [1, 1]
    with LimitedMemory(encoder, 0), pytest.raises(LlmcondError, match="out of memory"):
        encoder.encode_with_counts(items)


def test_other_errors_are_not_treated_as_out_of_memory(make_folder):
    encoder = load(make_folder("simcse-bert"), CASES["simcse-bert"])
    budget = encoder.engine.budget
    with (
        LimitedMemory(
            encoder, 0, lambda tokens: RuntimeError("mat1 and mat2 shapes differ")
        ) as memory,
        pytest.raises(RuntimeError, match="mat1 and mat2 shapes differ"),
    ):
        encoder.encode_with_counts([EncoderInput("", "dogs"), EncoderInput("", "a man")])
    assert memory.errors == 1
    assert encoder.engine.budget == budget
