"""Arguments of a wrong type or value: one line that says what is expected, before any work."""

import numpy as np
import pytest

import llmcond
from llmcond.errors import UserError

TEXTS = ["a man", "two dogs"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 1.5}, "batch_size is 1.5; expected a whole number of at least 1"),
        ({"batch_size": True}, "batch_size is True; expected a whole number"),
        ({"batch_size": "8"}, "batch_size is '8'; expected a whole number"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"truncate_dim": True}, "truncate_dim is True; expected a whole number"),
        ({"truncate_dim": 2.0}, "truncate_dim is 2.0; expected a whole number"),
        ({"truncate_dim": "8"}, "truncate_dim is '8'; expected a whole number"),
        ({"truncate_dim": 400}, "truncate_dim is 400, but the embeddings have 384"),
        ({"precision": None}, "precision is None. Legal: float32, int8"),
        ({"precision": 8}, "precision is 8. Legal: float32, int8"),
        ({"precision": ["int8"]}, r"precision is \['int8'\]. Did you mean"),
    ],
)
def test_invalid_options_of_encode_are_rejected_before_encoding(
    minilm, monkeypatch, options, message
):
    monkeypatch.setattr(minilm.engine, "run", None)
    with pytest.raises(UserError, match=message):
        minilm.encode(TEXTS, **options)


@pytest.mark.parametrize("texts", [None, 7, 1.5, np.array("abc"), np.array(7), b"abc", object()])
def test_what_is_not_a_list_of_texts_is_rejected(minilm, texts):
    with pytest.raises(UserError, match="expected a list for inputs, not the"):
        minilm.encode(texts)


@pytest.mark.parametrize("text", [None, 7, 1.5, float("nan"), ["a"], b"a", np.str_("a")])
def test_what_is_not_a_text_is_reported_with_position(minilm, text):
    if isinstance(text, str):
        assert minilm.encode(["a", text]).shape == (2, 384)
        return
    with pytest.raises(UserError, match=r"the input at position 1 is .*, not a text"):
        minilm.encode(["a", text])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": "64"}, "max_length is '64'; expected a whole number"),
        ({"max_length": True}, "max_length is True; expected a whole number"),
        ({"max_length": 64.0}, "max_length is 64.0; expected a whole number"),
        ({"max_length": 3}, "max_length is 3; it must be at least 8"),
        ({"max_tokens_per_batch": 1.5}, "max_tokens_per_batch is 1.5; expected a whole number"),
        ({"normalize": "yes"}, "normalize is 'yes'; expected True or False"),
        ({"share_prefixes": 1}, "share_prefixes is 1; expected True or False"),
        ({"router_strength": "1"}, "router_strength is '1'; expected a number"),
        ({"special_tokens": 3}, "special_tokens is 3; expected a text"),
        ({"revision": 3}, "revision is 3; expected a text"),
        ({"like": ["minilm"]}, r"like is \['minilm'\]; expected a text"),
        ({"device": 0}, "device is 0; expected a text"),
        ({"device": "gpu"}, "device is 'gpu'. Legal: auto, cpu, cuda, cuda:N"),
        ({"dtype": np.float32}, "dtype is <class 'numpy.float32'>. Legal: auto, float32"),
        ({"quantize": 4}, "quantize is 4. Legal: none, 8bit, 4bit"),
        ({"pooling": 3}, "pooling is 3; expected a text"),
    ],
)
def test_invalid_options_of_load_encoder_are_rejected(options, message):
    with pytest.raises(UserError, match=message):
        llmcond.load_encoder("minilm", **options)


def test_numbers_of_numpy_are_accepted_as_options(minilm):
    encoder = llmcond.load_encoder("minilm", device="cpu", max_length=np.int64(64), dtype=None)
    assert encoder.identity.max_length == 64
    assert len(encoder.identity.fingerprint) == 16
    vectors = minilm.encode(TEXTS, batch_size=np.int64(1), truncate_dim=np.int32(8))
    assert vectors.shape == (2, 8)
