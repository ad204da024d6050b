"""Packed, padded and single inputs get equal vectors, also after running out of memory."""

import random
import shutil
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.cases import CASES, MAX_LENGTH, WORDS, sample_inputs
from helpers.kernels import reference_attention
from helpers.vectors import assert_close
from transformers import AttentionInterface

from llmcond.base.errors import LlmcondError, UserError
from llmcond.encoders import EncoderInput
from llmcond.encoders.torch import attention, engine

# Networks this small finish before a second thread would have started.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory):
    """A function that returns the checkpoint folder of a case and creates it on first use."""
    folders = {}

    def folder(name):
        case = CASES[name]
        key = case.kind, *case.checkpoint_options.items(), *case.config.items()
        if key not in folders:
            folders[key] = case.build(tmp_path_factory.mktemp("checkpoint"))
        return folders[key]

    return folder


@pytest.fixture
def load_case(make_folder):
    """A function that loads the encoder of a case."""
    return lambda name, **options: CASES[name].load(make_folder(name), **options)


def encode(encoder, items, **changes):
    """Encode with changed attributes of the engine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(encoder.engine, name, value)
        return encoder.encode_with_counts(items)


def check_vectors(encoder, items):
    """Check that packed, padded and single inputs get equal vectors; return the packed result."""
    encoded = encoder.encode_with_counts(items)
    for changes in ({"packs": False}, {"budget": 1}, {"budget": 150}):
        other = encode(encoder, items, **changes)
        assert_close(other.vectors, encoded.vectors)
        assert other.n_tokens.tolist() == encoded.n_tokens.tolist()
    alone = [encoder.encode_with_counts([item]).vectors for item in items[:15]]
    assert_close(np.concatenate(alone), encoded.vectors[:15])
    return encoded


def count_unshared_tokens(encoder, encoded):
    """Return the number of tokens without padding and without shared prefixes."""
    return int(np.minimum(encoded.n_tokens, encoder.identity.max_length).sum())


# -- packed, padded and single inputs ----------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_vectors_do_not_depend_on_packing_or_batch(name, load_case):
    case, encoder = CASES[name], load_case(name)
    assert encoder.engine.packs == (case.window > 0)
    assert encoder.engine.shares_prefixes == case.shares_prefixes
    items = sample_inputs(encoder, seed=1)
    encoded = check_vectors(encoder, items)
    assert encoded.truncated.any()
    unshared = count_unshared_tokens(encoder, encoded)
    if case.window == MAX_LENGTH:
        assert (encoded.n_computed < unshared) == case.shares_prefixes
        assert case.shares_prefixes or encoded.n_computed == unshared
        assert encode(encoder, items, packs=False).n_computed > unshared


@pytest.mark.parametrize("name", ["e5-xlm-r", "simcse-roberta"])
def test_text_with_padding_token_is_packed_correctly(load_case, name):
    """Position ids skip the padding token, wherever it occurs."""
    encoder = load_case(name)
    texts = ["the <pad> dogs <pad><pad> run", "<pad>", "run", "<pad> a man <pad>", "two dogs"]
    items = [EncoderInput("", text) for text in texts]
    assert any(row.ids[1:-1].count(1) > 1 for row in encoder._tokenizer(items))
    check_vectors(encoder, items)


@pytest.mark.parametrize(("name", "pooling"), [("simcse-bert", "mean"), ("sfr", "last")])
def test_pairs_are_packed_with_their_token_types(make_folder, name, pooling):
    # There is no ``like``, because the pooling of SimCSE does not support pairs.
    options = {"like": None, "max_length": 60, "special_tokens": "tokenizer", "pooling": pooling}
    encoder = CASES[name].load(make_folder(name), **options)
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(1, 30))) for _ in range(30)]
    contexts = [None, "", "the color", "the color of the sky", "dogs " * 60]
    items = [EncoderInput("", text, generator.choice(contexts)) for text in texts]
    typed = []
    encoder.engine.model.network.register_forward_pre_hook(
        lambda module, args, kwargs: typed.append("token_type_ids" in kwargs), with_kwargs=True
    )
    check_vectors(encoder, items)
    assert any(typed) == (name == "simcse-bert")


# -- what cannot be packed ---------------------------------------------------------------------


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


def fail_if_packed(*states, packed=None, **options):
    if packed is not None:
        raise KeyError("not in a packed row")
    return attention._compute_attention(*states, **options)


@pytest.mark.parametrize(
    ("name", "flawed"),
    [
        ("e5-mistral", leak_to_all),
        ("simcse-bert", leak_to_all),
        ("nv-embed", leak_to_earlier),
        ("e5-mistral", fail_if_packed),
    ],
)
def test_encoder_is_padded_if_packing_changes_vectors(load_case, monkeypatch, name, flawed):
    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, flawed)
    encoder = load_case(name)
    assert not encoder.engine.packs
    items = sample_inputs(encoder, seed=5, n_inputs=15)
    padded = encoder.encode_with_counts(items)
    monkeypatch.undo()
    assert_close(padded.vectors, load_case(name).encode_with_counts(items).vectors)


def test_encoder_with_wrong_positions_is_padded(load_case, monkeypatch):
    monkeypatch.setattr(engine, "skipped_id", lambda network: None)
    assert not load_case("simcse-roberta").engine.packs
    assert load_case("simcse-bert").engine.packs


@pytest.mark.weights
@pytest.mark.usefixtures("native_16_bit")
def test_coarse_rounding_does_not_prevent_packing(real_checkpoint):
    folder = real_checkpoint("embeddinggemma-300m")
    assert checkpoints.load_on_cpu(folder, dtype="bfloat16").engine.packs


def test_token_without_embedding_is_allowed_as_padding_only(tmp_path, make_folder, load_case):
    folder = shutil.copytree(make_folder("gte-qwen2"), tmp_path / "model")
    checkpoints.change_json(folder / "tokenizer_config.json", pad_token="[NEWPAD]")
    encoder, other = load_case("gte-qwen2"), CASES["gte-qwen2"].load(folder)
    n_ids = len(other.engine.model.network.get_input_embeddings().weight)
    assert other._tokenizer.pad_id == n_ids  # one after the last embedding
    items = sample_inputs(encoder, seed=8, n_inputs=15)
    expected = encoder.encode_with_counts(items).vectors
    assert_close(encode(other, items, packs=False).vectors, expected)
    with pytest.raises(UserError, match=f"token id {n_ids},.*embeddings for the ids 0 to"):
        other.encode([EncoderInput("", "dogs [NEWPAD]")])


# -- kernels for variable lengths --------------------------------------------------------------


def attend_like_flash_attn(*arguments, softmax_scale, causal):
    """Attend with the signature of the library flash-attn."""
    window = (-1, 0) if causal else (-1, -1)
    return reference_attention(*arguments, scale=softmax_scale, window_size=window, enable_gqa=True)


def align_first(query, key, value, ends, key_ends, max_queries, max_keys, **options):
    """Align the first query with the first key, as older kernels did."""
    parts = []
    bounds = zip(pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True)
    for (start, stop), (first, last) in bounds:
        n_keys = min(last - first, stop - start)
        cu_lengths = torch.tensor([[0, stop - start], [0, n_keys]], dtype=torch.int32)
        states = query[start:stop], *(x[first : first + n_keys] for x in (key, value))
        parts.append(reference_attention(*states, *cu_lengths, max_queries, max_keys, **options))
    return torch.cat(parts)


def raise_error(*arguments, **options):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize("name", ["e5-mistral", "nv-embed", "simcse-bert"])
def test_varlen_kernels_give_the_same_vectors(load_case, monkeypatch, name):
    encoder = load_case(name)
    items = sample_inputs(encoder, seed=7, n_inputs=15)
    expected = encoder.encode_with_counts(items).vectors
    # The first kernel that is correct is used.
    kernels = [[align_first, reference_attention], [raise_error]]
    kernels.append([raise_error, attention._adapt_flash_attn(attend_like_flash_attn)])
    # The first would align shared prefixes wrongly.
    first = "reference_attention" if encoder.engine.shares_prefixes else "align_first"
    names = [first, "scaled_dot_product_attention", "flash_attn"]
    for listed, used in zip(kernels, names, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(attention, "varlen_kernels", lambda device, dtype, k=listed: [*k])
            encoder = load_case(name)
        assert encoder.engine.packs
        assert encoder.engine.kernel_name == used
        assert_close(encoder.encode_with_counts(items).vectors, expected)


# -- out of memory -----------------------------------------------------------------------------


def cuda_error(tokens):
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tokens} MiB.")


def cpu_error(tokens):
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate "
        f"memory: you tried to allocate {tokens} bytes. Error code 12 (Cannot allocate memory)"
    )


class LimitedMemory:
    """Let a network run out of memory beyond a number of tokens, and count the failed batches."""

    def __init__(self, encoder, limit, error=cuda_error):
        self._network, self._limit, self._error = encoder.engine.model.network, limit, error
        self.errors, self._lock = 0, threading.Lock()

    def __enter__(self):
        self._hook = self._network.register_forward_pre_hook(self._check, with_kwargs=True)
        return self

    def __exit__(self, *_):
        self._hook.remove()

    def _check(self, module, args, kwargs):
        tokens = kwargs["input_ids"].numel()
        if tokens > self._limit:
            with self._lock:
                self.errors += 1
            assert self.errors < 1_000
            raise self._error(tokens)


@pytest.mark.parametrize(
    ("name", "packs", "error"),
    [
        ("simcse-bert", True, cuda_error),
        ("simcse-bert", False, lambda _: RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")),
        ("simcse-bert", False, lambda _: RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")),
        ("simcse-bert", True, lambda _: RuntimeError("CUDA error: out of memory")),
        ("e5-mistral", True, cpu_error),
        ("gemma-wider", True, lambda tokens: MemoryError()),
    ],
)
def test_batches_are_halved_until_they_fit(load_case, monkeypatch, name, packs, error):
    encoder = load_case(name, max_tokens_per_batch=3_000)
    items = sample_inputs(encoder, seed=8)
    expected = encoder.encode_with_counts(items).vectors
    monkeypatch.setattr(encoder.engine, "packs", packs)
    with LimitedMemory(encoder, MAX_LENGTH, error) as memory:
        assert_close(encoder.encode_with_counts(items).vectors, expected)
        assert memory.errors > 0
        errors, budget = memory.errors, encoder.engine.budget
        assert 1 <= budget < 3_000
        assert_close(encoder.encode_with_counts(items).vectors, expected)
        assert (memory.errors, encoder.engine.budget) == (errors, budget)


@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_begun_ahead_are_yielded_in_order(load_case, ahead):
    """GPUs begin batches ahead; here the fourth batch runs out of memory at its first attempt."""
    encoder = load_case("simcse-bert", max_tokens_per_batch=150)
    items = sample_inputs(encoder, seed=10)
    expected = encoder.encode_with_counts(items).vectors
    engine, batch_sizes, limits = encoder.engine, [], []

    def begin(module, args, kwargs):
        batch_sizes.append(kwargs["input_ids"].numel())
        if len(batch_sizes) == 4:
            raise cuda_error(batch_sizes[-1])

    engine.batches_ahead = ahead
    engine.model.network.register_forward_pre_hook(begin, with_kwargs=True)
    rows = encoder._tokenizer(items)
    order, vectors = [], np.empty((len(items), engine.dim), dtype=np.float32)
    for pooled in engine.run(rows):
        limits.append((len(batch_sizes), engine.budget))
        order += pooled.inputs
        vectors[list(pooled.inputs)] = pooled.vectors
    # A batch is yielded after ``ahead`` more have begun. The first three are yielded before the
    # budget is halved. Each input is yielded once, the longest first.
    assert limits[0] == (ahead + 1, 150)
    assert [budget for _, budget in limits][:4] == [150, 150, 150, batch_sizes[3] // 2]
    assert sorted(order) == list(range(len(items)))
    lengths = [len(rows[index].ids) for index in order]
    assert lengths == sorted(lengths, reverse=True)
    assert_close(vectors, expected)


def test_out_of_memory_in_several_threads_loses_no_input(load_case):
    items = [
        EncoderInput("", f"{' '.join(WORDS[index % 70 : index % 70 + index % 19])} {index}")
        for index in range(700)
    ]
    expected = load_case("simcse-bert").encode_with_counts(items).vectors
    torch.set_num_threads(3)
    encoder = load_case("simcse-bert", max_tokens_per_batch=3_000)
    torch.set_num_threads(1)
    assert encoder.concurrency.threads == 3
    with LimitedMemory(encoder, 120) as memory:
        assert_close(encoder.encode(items), expected)
        assert memory.errors > 0


def test_inputs_beyond_memory_report_their_length(load_case):
    encoder = load_case("simcse-bert")
    items = [EncoderInput("", "dogs"), EncoderInput("", "dogs " * 48), EncoderInput("", "a man")]
    message = (
        f"{encoder.name}.* out of memory on cpu with a single input of 50 tokens. Reduce "
        "max_length.* llmcond models --check"
    )
    for packs in (True, False):
        with LimitedMemory(encoder, 40), pytest.raises(LlmcondError, match=message):
            encode(encoder, items, packs=packs)
    # Equal inputs share their tokens, so all of them fit.
    encoder = load_case("qwen3")
    with LimitedMemory(encoder, 70) as memory:
        encoder.encode_with_counts([EncoderInput("", "the dogs " * 12)] * 50)
        assert memory.errors == 0


def test_other_errors_are_not_treated_as_out_of_memory(load_case):
    encoder, error = load_case("simcse-bert"), RuntimeError("mat1 and mat2 shapes differ")
    with (
        LimitedMemory(encoder, 0, lambda _: error) as memory,
        pytest.raises(RuntimeError) as raised,
    ):
        encoder.encode_with_counts([EncoderInput("", "dogs"), EncoderInput("", "a man")])
    assert (raised.value, memory.errors) == (error, 1)
