"""Routed pooling: its equation, on every architecture, whatever an input is in a batch with."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.cases import CASES, MAX_LENGTH, WORDS
from helpers.identities import IDENTITY

from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import UNIT, load_encoder
from llmcond.encoders.engine import pooling
from llmcond.encoders.engine.interface import Routes
from llmcond.encoders.poolings import ROUTED_POOLINGS
from llmcond.encoders.spec import Router
from llmcond.encoders.threads import Concurrency
from llmcond.errors import UserError
from llmcond.features.extract import Chunking, extract
from llmcond.features.store import FeatureStore

pytestmark = pytest.mark.usefixtures("one_thread")

#: Those whose pooling leaves the tokens' space are refused.
ROUTED = [name for name in CASES if name not in {"simcse-roberta", "simcse-bert"}]
ROUTED = [name for name in ROUTED if not name.startswith("nv-embed")]
CONDITIONS = ["the mood", "dogs", "how far away the man is and what he says of it", "the place"]


def load(name, folder):
    case = CASES[name]
    made = checkpoints.make(case.kind, folder / "model", **case.made).folder
    checkpoints.change_json(made / "config.json", **case.config)
    options = {
        "dtype": "float32",
        "device": "cpu",
        "runtime": "torch",
        "max_length": MAX_LENGTH,
        **case.options,
    }
    return load_encoder(str(made), like=case.like, **options)


@pytest.fixture(scope="module", params=ROUTED)
def encoder(request, tmp_path_factory):
    return load(request.param, tmp_path_factory.mktemp("routed"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return load("e5-xlm-r", tmp_path_factory.mktemp("one"))


def routed(text, condition, temperature=0.1, centre=True, standardize=False):
    router = Router(condition, temperature, centre, standardize)
    return EncoderInput("", text, router=router)


def mixed(seed=0, n=12):
    """Sentences under several conditions each, some plain, one longer than fits."""
    chance = random.Random(seed)
    texts = [" ".join(chance.choices(WORDS, k=k)) for k in chance.choices(range(1, 30), k=n)]
    texts.append("the man " * 80)
    items = [
        routed(text, condition, *settings)
        for text in texts
        for condition in CONDITIONS
        for settings in ((0.1, True), (0.03, False), (0.7, False, True))
    ]
    items += [EncoderInput("", text) for text in [*texts, *CONDITIONS]]
    chance.shuffle(items)
    return items


def states(encoder, text):
    """The states of a text's tokens, and the mean, first or last of them, without the engine."""
    row = encoder._tokenizer([EncoderInput("", text)])[0]
    with torch.inference_mode():
        found = encoder.engine.model.network(
            input_ids=torch.tensor([row.ids]), attention_mask=torch.ones(1, len(row.ids))
        ).last_hidden_state[0]
    pooled = {"cls": found[0], "last": found[row.last - 1]}
    own = found[row.first : row.last]
    return own.float(), pooled.get(encoder.identity.pooling, own.mean(dim=0)).float()


def by_the_equation(encoder, item):
    own, _ = states(encoder, item.text)
    query = states(encoder, item.router.text)[1]
    centred = own - own.mean(dim=0) if item.router.centre else own
    near = torch.cosine_similarity(centred, query[None], dim=1)
    if item.router.standardize and len(own) > 1:
        near = near / near.std(correction=0)
    weights = torch.exp(near / item.router.temperature)
    vector = (weights[:, None] * own).sum(dim=0) / weights.sum()
    vector = encoder.engine.model.dense(vector)
    return (vector / vector.norm() if encoder.identity.normalize else vector).numpy()


@pytest.mark.matrix
def test_a_vector_is_its_equation(encoder):
    items = mixed(n=4)
    found = encoder.encode_counted(items).vectors
    for item, vector in zip(items, found, strict=True):
        if item.router is not None:
            np.testing.assert_allclose(vector, by_the_equation(encoder, item), atol=1e-5)


@pytest.mark.matrix
def test_alone_is_in_any_batch_is_padded(encoder, monkeypatch):
    items = mixed(1)
    found = encoder.encode_counted(items).vectors
    alone = np.concatenate([encoder.encode_counted([item]).vectors for item in items])
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)
    monkeypatch.setattr(encoder.engine, "packs", False)
    np.testing.assert_allclose(encoder.encode_counted(items).vectors, found, rtol=0, atol=1e-5)


def test_gradients_are_finite_where_all_tokens_are_alike():
    own = torch.ones(2, 4, 8, requires_grad=True)
    routes = [Routes(torch.eye(8)[:2], Router("", 0.7, False, True))] * 2
    pooling.pool_routed(own, [(0, 1), (0, 4)], routes).square().sum().backward()
    assert torch.isfinite(own.grad).all()


def test_the_condition_matters_and_a_high_temperature_is_the_mean(one):
    texts = ["two dogs run over wet grass", "the man sits"]
    plain = one.encode([*texts])
    near = one.encode([routed(text, "dogs", 1e6) for text in texts])
    np.testing.assert_allclose(near, plain, atol=1e-5)
    first, second = one.encode([routed(texts[0], text) for text in ("dogs", "the mood")])
    assert np.abs(first - second).max() > 1e-3


def test_a_sentence_and_a_condition_are_encoded_once(one):
    texts = ["two dogs run over wet grass", "the man sits on a bench"]
    conditions = [f"{a} {b}" for a in WORDS[:10] for b in WORDS[10:20]]
    items = [routed(text, condition) for text in texts for condition in set(conditions)]
    random.Random(0).shuffle(items)
    done = one.encode_counted(items, one.queries(conditions))
    alone = one.encode_counted([EncoderInput("", text) for text in texts])
    assert done.n_computed == alone.n_computed
    assert len(done.vectors) == len(items) > 2 * UNIT // 4
    assert (done.n_tokens.reshape(-1) > 0).all()


def test_keys_hold_the_router_and_those_without_are_as_they_were():
    plain = EncoderInput("", "a text")
    known = {plain.key, plain.key_when_cut}
    settings = ("x", 0.1, True), ("y", 0.1, True), ("x", 0.2, True)
    for router in (Router(*each, False) for each in settings):
        item = replace(plain, router=router)
        assert not known & {item.key, item.key_when_cut}
        known |= {item.key, item.key_when_cut}
    assert Router("x", 0.1, False, False) != Router("x", 0.1, True, False)
    assert Router("x", 0.1, True, True) != Router("x", 0.1, True, False)
    assert plain.key.hex() == "785afe0d0546a202bc779d26f9d5ec54"


@pytest.mark.parametrize("name", ["simcse-bert", "nv-embed"])
def test_a_pooling_that_leaves_the_tokens_space_is_refused(name, tmp_path):
    encoder = load(name, tmp_path)
    assert encoder.identity.pooling not in ROUTED_POOLINGS
    with pytest.raises(UserError, match="--pooling cls or mean or last"):
        encoder.encode([routed("a text", "dogs")])


def test_a_router_that_is_an_input_too_is_not_encoded_again(encoder):
    items = mixed(n=3)
    conditions = [EncoderInput("", text) for text in CONDITIONS]
    queries = encoder.queries(CONDITIONS)
    done, alone = encoder.encode_counted(items, queries), encoder.encode_counted(conditions)
    for condition, vector, n_tokens in zip(conditions, alone.vectors, alone.n_tokens, strict=True):
        np.testing.assert_allclose(done.vectors[items.index(condition)], vector, atol=1e-5)
        assert done.n_tokens[items.index(condition)] == n_tokens
    others = [item for item in items if item not in conditions]
    assert done.n_computed == encoder.encode_counted(others, queries).n_computed
    # What is longer than the encoder takes is cut as any input is.
    long = [EncoderInput("", "the man " * 80), routed("a text", "the man " * 80)]
    assert encoder.encode_counted(long, encoder.queries([long[0].text])).truncated[0]


class Full(Exception):  # noqa: N818 - as a kill
    pass


class Breaking:
    """A real encoder that notes which routers it is asked for, and fails after so many parts."""

    def __init__(self, encoder, left=10_000):
        self.encoder, self.concurrency, self.left, self.asked = encoder, Concurrency(1, 1), left, []

    def queries(self, texts):
        self.asked += texts
        return self.encoder.queries(texts)

    def encode_counted(self, *given):
        self.left -= 1
        if self.left < 0:
            raise Full
        return self.encoder.encode_counted(*given)


def many_routed(n=40):
    """Sentences whose conditions go on from one to the next, so that windows share them."""
    items = mixed(2, n=n)
    return items + [routed(f"the man {i}", f"the mood {i // 3}") for i in range(6 * n)]


@pytest.mark.parametrize("parts", [3, 24])  # some of the first window; all of it, and more
def test_an_extraction_that_goes_on_gets_the_same_bits(one, tmp_path, parts, monkeypatch):
    monkeypatch.setattr("llmcond.features.extract._UNIT_SIZE", 5)
    items = many_routed()
    whole, parted = (FeatureStore(tmp_path / name, IDENTITY, "float32") for name in "ab")
    extract(iter(items), whole, lambda: one, chunking=Chunking(16, 256))
    with pytest.raises(Full):
        extract(iter(items), parted, lambda: Breaking(one, parts), chunking=Chunking(16, 256))
    assert 0 < len(parted) < len(whole)
    extract(iter(items), parted, lambda: one, chunking=Chunking(16, 256))
    distinct = list(dict.fromkeys(items))
    np.testing.assert_array_equal(parted.lookup(distinct).read(), whole.lookup(distinct).read())


def test_an_extraction_computes_a_router_once_until_there_are_too_many(one, tmp_path, monkeypatch):
    items = many_routed()
    texts = {item.router.text for item in items if item.router}
    once, again = Breaking(one), Breaking(one)
    first, second = (FeatureStore(tmp_path / name, IDENTITY, "float32") for name in "ab")
    extract(iter(items), first, lambda: once, chunking=Chunking(64, 64))
    assert len(once.asked) == len(set(once.asked))
    assert set(once.asked) == texts
    monkeypatch.setattr("llmcond.features.extract._MAX_ROUTERS", 20)
    extract(iter(items), second, lambda: again, chunking=Chunking(64, 64))
    assert len(texts) < len(again.asked)
    found = (store.lookup(items).read() for store in (first, second))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5)


def test_a_window_with_too_many_routers_computes_each_once(one, tmp_path, monkeypatch):
    monkeypatch.setattr("llmcond.features.extract._MAX_ROUTERS", 20)
    monkeypatch.setattr("llmcond.features.extract._UNIT_SIZE", 5)
    counted, items = Breaking(one), many_routed()
    store = FeatureStore(tmp_path / "store", IDENTITY, "float32")
    extract(iter(items), store, lambda: counted, chunking=Chunking(16, len(items)))
    assert len(counted.asked) == len(set(counted.asked)) > 20


@pytest.mark.parametrize("temperature", [0, -0.1, float("nan")])
def test_a_temperature_that_is_not_above_0_is_refused(temperature):
    with pytest.raises(UserError, match=r"temperature is .*; it must be above 0"):
        Router("dogs", temperature, True, False)


@pytest.mark.parametrize("text", ["half a \ud83d", 7])
def test_a_router_that_is_no_text_is_refused(one, text):
    with pytest.raises(UserError, match="the router at position 0 is"):
        one.encode([routed("a text", text)])
