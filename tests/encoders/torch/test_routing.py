"""Routed pooling and its token weights: the equation, and independence from the batch."""

import random
import threading

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.cases import CASES, WORDS, routed_input, routed_inputs
from helpers.identities import IDENTITY
from helpers.vectors import assert_close

from llmcond.base.errors import UserError
from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import Concurrency, load_encoder
from llmcond.encoders.spec import Router
from llmcond.encoders.tokenizing import Routes, record_weights, recording_weights
from llmcond.encoders.torch.forward import pool_routed
from llmcond.features.extract import extract
from llmcond.features.store import FeatureStore

pytestmark = pytest.mark.usefixtures("one_thread")

CONDITIONS = ["the mood", "dogs", "how far away the man is and what he says of it", "the place"]
SENTENCE = "three women sit on the beach at night"


def load(name, folder):
    return CASES[name].load(CASES[name].build(folder))


@pytest.fixture(scope="module")
def e5_encoder(tmp_path_factory):
    return load("e5-xlm-r", tmp_path_factory.mktemp("one"))


def mixed_inputs(n):
    settings = ((0.1, True), (0.03, False), (0.7, False, True))
    return routed_inputs(n, 30, CONDITIONS, settings)


# -- vectors -------------------------------------------------------------------------------------


def reference_states(encoder, text):
    """Return the hidden states of a text's tokens and their pooled vector, without the engine."""
    row = encoder._tokenizer([EncoderInput("", text)])[0]
    with torch.inference_mode():
        hidden = encoder.engine.model.network(
            input_ids=torch.tensor([row.ids]), attention_mask=torch.ones(1, len(row.ids))
        ).last_hidden_state[0]
    pooled = {"cls": hidden[0], "last": hidden[row.last - 1]}
    states = hidden[row.first : row.last]
    return states, pooled.get(encoder.identity.pooling, states.mean(dim=0))


def reference_vector(encoder, item):
    states, _ = reference_states(encoder, item.text)
    query = reference_states(encoder, item.router.text)[1]
    centred = states - states.mean(dim=0) if item.router.centre else states
    similarities = torch.cosine_similarity(centred, query[None], dim=1)
    if item.router.standardize and len(states) > 1:
        similarities = similarities / similarities.std(correction=0)
    weights = torch.exp(similarities / item.router.temperature)
    vector = (weights[:, None] * states).sum(dim=0) / weights.sum()
    vector = encoder.engine.model.dense(vector)
    return (vector / vector.norm() if encoder.identity.normalize else vector).numpy()


@pytest.mark.processor
@pytest.mark.parametrize("name", ["e5-xlm-r", "bge-m3", "sfr", "gemma", "text-only"])
def test_vectors_match_equation_and_do_not_depend_on_batch(name, tmp_path, monkeypatch):
    encoder, items = load(name, tmp_path), mixed_inputs(3)
    vectors = encoder.encode_with_counts(items).vectors
    for item, vector in zip(items, vectors, strict=True):
        if item.router is not None:
            assert_close(vector, reference_vector(encoder, item))
    alone = np.concatenate([encoder.encode_with_counts([item]).vectors for item in items])
    assert_close(alone, vectors)
    monkeypatch.setattr(encoder.engine, "packs", False)
    assert_close(encoder.encode_with_counts(items).vectors, vectors)


def test_pooling_is_exact_under_autocast():
    generator = torch.Generator().manual_seed(0)
    hidden, queries = (torch.randn(2, n, 8, generator=generator) for n in (9, 3))
    routes = [Routes(each, Router("dogs", 0.1, centre=True, standardize=True)) for each in queries]
    expected = pool_routed(hidden, [(0, 9), (2, 6)], routes)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pool_routed(hidden, [(0, 9), (2, 6)], routes), expected)


def test_sentences_and_conditions_are_encoded_once(e5_encoder):
    conditions = [f"{a} {b}" for a in WORDS[:10] for b in WORDS[10:20]]
    items = [routed_input(text, c) for text in (SENTENCE, "two dogs") for c in set(conditions)]
    random.Random(0).shuffle(items)
    encoded = e5_encoder.encode_with_counts(items, e5_encoder.queries(conditions))
    plain = [EncoderInput("", SENTENCE), EncoderInput("", "two dogs")]
    assert encoded.n_computed == e5_encoder.encode_with_counts(plain).n_computed
    # A router text beyond the maximum length is truncated like any other input.
    long = [EncoderInput("", "the man " * 80), routed_input("a text", "the man " * 80)]
    assert e5_encoder.encode_with_counts(long, e5_encoder.queries([long[0].text])).truncated[0]


def test_invalid_routers_are_rejected(e5_encoder, tmp_path):
    for name in ("simcse-bert", "nv-embed"):
        with pytest.raises(UserError, match="--pooling cls or mean or last"):
            load(name, tmp_path / name).encode([routed_input("a text", "dogs")])
    with pytest.raises(UserError, match=r"temperature is .*; it must be above 0"):
        Router("dogs", float("nan"), True, False)
    with pytest.raises(UserError, match="the router at position 0 is"):
        e5_encoder.encode([routed_input("a text", "half a \ud83d")])


# -- extraction ----------------------------------------------------------------------------------


class FailingEncoder:
    """A real encoder that records the router texts it encodes, and fails after ``left`` calls."""

    def __init__(self, encoder, left=10_000):
        self.encoder, self.concurrency = encoder, Concurrency(1, 1)
        self.left, self.routers = left, []

    def queries(self, texts):
        self.routers += texts
        return self.encoder.queries(texts)

    def encode_with_counts(self, *arguments):
        self.left -= 1
        if self.left < 0:
            raise InterruptedError
        return self.encoder.encode_with_counts(*arguments)


def test_extraction_encodes_each_router_once_and_resumes(e5_encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("llmcond.features.extract._UNIT_SIZE", 5)
    items = mixed_inputs(30)
    # These conditions recur in later inputs, so that windows share them.
    items += [routed_input(f"the man {i}", f"the mood {i // 3}") for i in range(180)]
    texts = {item.router.text for item in items if item.router}

    def run(name, window, left=10_000):
        encoder = FailingEncoder(e5_encoder, left)
        store = FeatureStore(tmp_path / name, IDENTITY, "float32")
        try:
            extract(iter(items), store, lambda: encoder, chunk=16, window=window)
        except InterruptedError:
            assert 0 < len(store) < len(set(items))
        else:
            encoder.vectors = store.lookup(items).read()
        return encoder

    whole = run("whole", 256)
    assert set(whole.routers) == texts
    assert len(whole.routers) == len(texts)
    for left in (3, 24):  # within the first window, and beyond it
        run(f"resumed {left}", 256, left)
        np.testing.assert_array_equal(run(f"resumed {left}", 256).vectors, whole.vectors)
    monkeypatch.setattr("llmcond.features.extract._MAX_ROUTERS", 20)
    limited = run("limited", 64)
    assert len(limited.routers) > len(texts)
    assert_close(limited.vectors, whole.vectors)
    # A window with more routers than the limit still encodes each once.
    assert sorted(run("one window", len(items)).routers) == sorted(texts)


# -- token weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
@pytest.mark.parametrize("pool_over", ["all", "text"])
def test_weighted_states_give_vector(tiny_bert, runtime, pool_over):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    options = {"dtype": "float32", "device": "cpu", "pooling": "mean", "pool_over": pool_over}
    encoder = load_encoder(str(tiny_bert), runtime=runtime, normalize=True, **options)
    item = routed_input(SENTENCE, "the time", 0.7, centre=False, standardize=True)
    weighted = encoder.token_weights(item)
    reference = load_encoder(str(tiny_bert), runtime="torch", **options)
    states = reference_states(reference, SENTENCE)[0].numpy()
    assert_close(weighted.states, states)
    pooled = weighted.weights[0] @ states
    assert_close(pooled / np.linalg.norm(pooled), weighted.vector)
    assert weighted.weights.sum() == pytest.approx(1, abs=1e-6)
    assert weighted.layers == []
    names = [token.text for token in weighted.tokens]
    expected = SENTENCE.split()
    assert names == (expected if pool_over == "text" else ["[CLS]", *expected, "[SEP]"])
    # The weights are those of the same input among others.
    others = [routed_input("men ride", "the place"), routed_input("the rain", "the time")]
    assert_close(encoder.encode([item, *others])[0], weighted.vector)


@pytest.mark.parametrize("kind", ["simcse-roberta", "xlm-r", "qwen"])
def test_tokens_have_characters_of_sentence(kind, tmp_path):
    checkpoints.build_checkpoint(kind, tmp_path / "model")
    text = "  two dogs, running\tover the café"
    tokens = load_encoder(str(tmp_path / "model"), device="cpu").tokenize(text)
    spans = [(token.start, token.end) for token in tokens if token.start is not None]
    assert spans == sorted(spans)
    covered = {index for span in spans for index in range(*span)}
    assert covered == {index for index, letter in enumerate(text) if not letter.isspace()}
    special = [position for position, token in enumerate(tokens) if token.special]
    assert special == ([] if kind == "qwen" else [0, len(tokens) - 1])


def test_positions_count_from_sentence_in_every_template(tiny_bert):
    tokenizer = load_encoder(str(tiny_bert), device="cpu")._tokenizer
    item = EncoderInput("", "the place: two dogs", sentence=(("text", 11, 19),))
    tokens = tokenizer.describe(item, tokenizer([item])[0])
    spans = [(token.start, token.end) for token in tokens]
    assert spans == [*[(None, None)] * 4, (0, 3), (4, 8), (None, None)]


def test_long_texts_have_weights_of_their_beginning_or_none(tiny_bert):
    options = {"dtype": "float32", "device": "cpu", "pooling": "mean", "max_length": 8}
    item = routed_input(SENTENCE, "the time")
    with pytest.warns(UserWarning, match="its end has no weights"):
        weighted = load_encoder(str(tiny_bert), **options).token_weights(item)
    assert [t.text for t in weighted.tokens] == ["[CLS]", *SENTENCE.split()[:6], "[SEP]"]
    assert weighted.weights.shape == (1, 8)
    encoder = load_encoder(str(tiny_bert), long_texts="windows", **options)
    with pytest.raises(UserError, match="10 tokens, more than the 8"):
        encoder.token_weights(item)
    with pytest.raises(UserError, match="has no router"):
        encoder.token_weights(EncoderInput("", SENTENCE))


def test_weights_of_other_threads_are_not_recorded(e5_encoder):
    with recording_weights() as recording:
        item = routed_input("two dogs", "the time")
        thread = threading.Thread(target=e5_encoder.encode, args=([item],))
        thread.start()
        thread.join()
        assert recording.weights == []
        record_weights(np.ones((1, 2)))
    record_weights(np.zeros((1, 2)))
    np.testing.assert_array_equal(recording.weights, [[1, 1]])
