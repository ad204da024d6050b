"""Routed pooling: its equation on every architecture, and independence from the batch."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.cases import CASES, MAX_LENGTH, WORDS
from helpers.identities import IDENTITY

from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import UNIT, Concurrency, load_encoder
from llmcond.encoders.engine import forward
from llmcond.encoders.engine.interface import Routes
from llmcond.encoders.spec import ROUTED_POOLINGS, Router
from llmcond.errors import UserError
from llmcond.features.extract import Chunking, extract
from llmcond.features.store import FeatureStore

pytestmark = pytest.mark.usefixtures("one_thread")

#: Encoders whose pooling leaves the space of the token vectors are rejected.
ROUTABLE = [name for name in CASES if name not in {"simcse-roberta", "simcse-bert"}]
ROUTABLE = [name for name in ROUTABLE if not name.startswith("nv-embed")]
CONDITIONS = ["the mood", "dogs", "how far away the man is and what he says of it", "the place"]


def load(name, folder):
    case = CASES[name]
    path = checkpoints.build_checkpoint(
        case.kind, folder / "model", **case.checkpoint_options
    ).folder
    checkpoints.change_json(path / "config.json", **case.config)
    options = {
        "dtype": "float32",
        "device": "cpu",
        "runtime": "torch",
        "max_length": MAX_LENGTH,
        **case.options,
    }
    return load_encoder(str(path), like=case.like, **options)


@pytest.fixture(scope="module", params=ROUTABLE)
def encoder(request, tmp_path_factory):
    return load(request.param, tmp_path_factory.mktemp("routed"))


@pytest.fixture(scope="module")
def e5_encoder(tmp_path_factory):
    return load("e5-xlm-r", tmp_path_factory.mktemp("one"))


def routed_input(text, condition, temperature=0.1, centre=True, standardize=False):
    router = Router(condition, temperature, centre, standardize)
    return EncoderInput("", text, router=router)


def mixed_inputs(seed=0, n=12):
    """Return sentences under several conditions, some without router, one longer than fits."""
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(WORDS, k=k)) for k in generator.choices(range(1, 30), k=n)]
    texts.append("the man " * 80)
    items = [
        routed_input(text, condition, *settings)
        for text in texts
        for condition in CONDITIONS
        for settings in ((0.1, True), (0.03, False), (0.7, False, True))
    ]
    items += [EncoderInput("", text) for text in [*texts, *CONDITIONS]]
    generator.shuffle(items)
    return items


def reference_states(encoder, text):
    """Return the hidden states of a text's tokens and their pooled vector, without the engine."""
    row = encoder._tokenizer([EncoderInput("", text)])[0]
    with torch.inference_mode():
        hidden = encoder.engine.model.network(
            input_ids=torch.tensor([row.ids]), attention_mask=torch.ones(1, len(row.ids))
        ).last_hidden_state[0]
    pooled = {"cls": hidden[0], "last": hidden[row.last - 1]}
    states = hidden[row.first : row.last]
    return states.float(), pooled.get(encoder.identity.pooling, states.mean(dim=0)).float()


def reference_vector(encoder, item):
    token_states, _ = reference_states(encoder, item.text)
    query = reference_states(encoder, item.router.text)[1]
    centred = token_states - token_states.mean(dim=0) if item.router.centre else token_states
    similarities = torch.cosine_similarity(centred, query[None], dim=1)
    if item.router.standardize and len(token_states) > 1:
        similarities = similarities / similarities.std(correction=0)
    weights = torch.exp(similarities / item.router.temperature)
    vector = (weights[:, None] * token_states).sum(dim=0) / weights.sum()
    vector = encoder.engine.model.dense(vector)
    return (vector / vector.norm() if encoder.identity.normalize else vector).numpy()


@pytest.mark.matrix
def test_vectors_match_equation(encoder):
    items = mixed_inputs(n=4)
    vectors = encoder.encode_with_counts(items).vectors
    for item, vector in zip(items, vectors, strict=True):
        if item.router is not None:
            np.testing.assert_allclose(vector, reference_vector(encoder, item), atol=1e-5)


@pytest.mark.processor
@pytest.mark.matrix
def test_vectors_do_not_depend_on_batch_or_packing(encoder, monkeypatch):
    items = mixed_inputs(1)
    vectors = encoder.encode_with_counts(items).vectors
    alone = np.concatenate([encoder.encode_with_counts([item]).vectors for item in items])
    np.testing.assert_allclose(vectors, alone, rtol=0, atol=1e-5)
    monkeypatch.setattr(encoder.engine, "packs", False)
    np.testing.assert_allclose(
        encoder.encode_with_counts(items).vectors, vectors, rtol=0, atol=1e-5
    )


def test_gradients_are_finite_for_identical_tokens():
    token_states = torch.ones(2, 4, 8, requires_grad=True)
    routes = [Routes(torch.eye(8)[:2], Router("", 0.7, False, True))] * 2
    forward.pool_routed(token_states, [(0, 1), (0, 4)], routes).square().sum().backward()
    assert torch.isfinite(token_states.grad).all()


def test_condition_changes_vector_and_high_temperature_gives_mean(e5_encoder):
    texts = ["two dogs run over wet grass", "the man sits"]
    plain = e5_encoder.encode([*texts])
    routed = e5_encoder.encode([routed_input(text, "dogs", 1e6) for text in texts])
    np.testing.assert_allclose(routed, plain, atol=1e-5)
    first, second = e5_encoder.encode(
        [routed_input(texts[0], text) for text in ("dogs", "the mood")]
    )
    assert np.abs(first - second).max() > 1e-3


def test_sentences_and_conditions_are_encoded_once(e5_encoder):
    texts = ["two dogs run over wet grass", "the man sits on a bench"]
    conditions = [f"{a} {b}" for a in WORDS[:10] for b in WORDS[10:20]]
    items = [routed_input(text, condition) for text in texts for condition in set(conditions)]
    random.Random(0).shuffle(items)
    encoded = e5_encoder.encode_with_counts(items, e5_encoder.queries(conditions))
    alone = e5_encoder.encode_with_counts([EncoderInput("", text) for text in texts])
    assert encoded.n_computed == alone.n_computed
    assert len(encoded.vectors) == len(items) > 2 * UNIT // 4
    assert (encoded.n_tokens.reshape(-1) > 0).all()


def test_key_includes_router_and_is_stable_without_router():
    plain = EncoderInput("", "a text")
    keys = {plain.key}
    settings = ("x", 0.1, True), ("y", 0.1, True), ("x", 0.2, True)
    for router in (Router(*arguments, False) for arguments in settings):
        item = replace(plain, router=router)
        assert item.key not in keys
        keys.add(item.key)
    assert Router("x", 0.1, False, False) != Router("x", 0.1, True, False)
    assert Router("x", 0.1, True, True) != Router("x", 0.1, True, False)
    assert plain.key.hex() == "785afe0d0546a202bc779d26f9d5ec54"


@pytest.mark.parametrize("name", ["simcse-bert", "nv-embed"])
def test_unsupported_poolings_are_rejected(name, tmp_path):
    encoder = load(name, tmp_path)
    assert encoder.identity.pooling not in ROUTED_POOLINGS
    with pytest.raises(UserError, match="--pooling cls or mean or last"):
        encoder.encode([routed_input("a text", "dogs")])


def test_router_text_that_is_also_an_input_is_encoded_once(encoder):
    items = mixed_inputs(n=3)
    conditions = [EncoderInput("", text) for text in CONDITIONS]
    queries = encoder.queries(CONDITIONS)
    encoded, alone = (
        encoder.encode_with_counts(items, queries),
        encoder.encode_with_counts(conditions),
    )
    for condition, vector, n_tokens in zip(conditions, alone.vectors, alone.n_tokens, strict=True):
        np.testing.assert_allclose(encoded.vectors[items.index(condition)], vector, atol=1e-5)
        assert encoded.n_tokens[items.index(condition)] == n_tokens
    others = [item for item in items if item not in conditions]
    assert encoded.n_computed == encoder.encode_with_counts(others, queries).n_computed
    # A router text beyond the maximum length is truncated like any other input.
    long = [EncoderInput("", "the man " * 80), routed_input("a text", "the man " * 80)]
    assert encoder.encode_with_counts(long, encoder.queries([long[0].text])).truncated[0]


class Killed(Exception):  # noqa: N818 - simulates a kill
    pass


class FailingEncoder:
    """A real encoder that records the router texts it encodes, and fails after ``left`` calls."""

    def __init__(self, encoder, left=10_000):
        self.encoder, self.concurrency, self.left, self.routers = (
            encoder,
            Concurrency(1, 1),
            left,
            [],
        )

    def queries(self, texts):
        self.routers += texts
        return self.encoder.queries(texts)

    def encode_with_counts(self, *arguments):
        self.left -= 1
        if self.left < 0:
            raise Killed
        return self.encoder.encode_with_counts(*arguments)


def many_routed_inputs(n=40):
    """Return inputs whose conditions recur in later inputs, so that windows share them."""
    items = mixed_inputs(2, n=n)
    return items + [routed_input(f"the man {i}", f"the mood {i // 3}") for i in range(6 * n)]


@pytest.mark.parametrize("n_calls", [3, 24])  # within the first window, and beyond it
def test_resumed_extraction_gives_identical_vectors(e5_encoder, tmp_path, n_calls, monkeypatch):
    monkeypatch.setattr("llmcond.features.extract._UNIT_SIZE", 5)
    items = many_routed_inputs()
    whole, resumed = (FeatureStore(tmp_path / name, IDENTITY, "float32") for name in "ab")
    extract(iter(items), whole, lambda: e5_encoder, chunking=Chunking(16, 256))
    with pytest.raises(Killed):
        extract(
            iter(items),
            resumed,
            lambda: FailingEncoder(e5_encoder, n_calls),
            chunking=Chunking(16, 256),
        )
    assert 0 < len(resumed) < len(whole)
    extract(iter(items), resumed, lambda: e5_encoder, chunking=Chunking(16, 256))
    distinct = list(dict.fromkeys(items))
    np.testing.assert_array_equal(resumed.lookup(distinct).read(), whole.lookup(distinct).read())


def test_extraction_encodes_each_router_once_within_limit(e5_encoder, tmp_path, monkeypatch):
    items = many_routed_inputs()
    texts = {item.router.text for item in items if item.router}
    unlimited, limited = FailingEncoder(e5_encoder), FailingEncoder(e5_encoder)
    first, second = (FeatureStore(tmp_path / name, IDENTITY, "float32") for name in "ab")
    extract(iter(items), first, lambda: unlimited, chunking=Chunking(64, 64))
    assert len(unlimited.routers) == len(set(unlimited.routers))
    assert set(unlimited.routers) == texts
    monkeypatch.setattr("llmcond.features.extract._MAX_ROUTERS", 20)
    extract(iter(items), second, lambda: limited, chunking=Chunking(64, 64))
    assert len(texts) < len(limited.routers)
    vectors = (store.lookup(items).read() for store in (first, second))
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-5)


def test_window_with_too_many_routers_encodes_each_once(e5_encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("llmcond.features.extract._MAX_ROUTERS", 20)
    monkeypatch.setattr("llmcond.features.extract._UNIT_SIZE", 5)
    recording, items = FailingEncoder(e5_encoder), many_routed_inputs()
    store = FeatureStore(tmp_path / "store", IDENTITY, "float32")
    extract(iter(items), store, lambda: recording, chunking=Chunking(16, len(items)))
    assert len(recording.routers) == len(set(recording.routers)) > 20


@pytest.mark.parametrize("temperature", [0, -0.1, float("nan")])
def test_temperature_not_above_0_is_rejected(temperature):
    with pytest.raises(UserError, match=r"temperature is .*; it must be above 0"):
        Router("dogs", temperature, True, False)


@pytest.mark.parametrize("text", ["half a \ud83d", 7])
def test_router_that_is_not_text_is_rejected(e5_encoder, text):
    with pytest.raises(UserError, match="the router at position 0 is"):
        e5_encoder.encode([routed_input("a text", text)])
