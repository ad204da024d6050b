"""Arguments of a wrong type or value: one line that says what is expected, before any work."""

import numpy as np
import pytest

import llmcond
from llmcond.encoders import EncoderInput
from llmcond.errors import UserError

TEXTS = ["a man", "two dogs"]


@pytest.fixture(scope="module")
def embedder():
    return llmcond.load_embedder(device="cpu")


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
        ({"normalize": "no"}, "normalize is 'no'; expected True or False"),
        ({"show_progress": 2}, "show_progress is 2; expected True or False"),
        ({"convert_to_tensor": "no"}, "convert_to_tensor is 'no'; expected True or False"),
        ({"convert_to_numpy": None}, "convert_to_numpy is None; expected True or False"),
        ({"show_progress_bar": "no"}, "show_progress_bar is 'no'; expected True or False"),
        ({"normalize_embeddings": 1}, "normalize_embeddings is 1; expected True or False"),
        ({"precision": None}, "precision is None. Legal: float32, int8"),
        ({"precision": 8}, "precision is 8. Legal: float32, int8"),
        ({"precision": ["int8"]}, r"precision is \['int8'\]. Did you mean"),
    ],
)
def test_invalid_options_of_encode_are_rejected_before_encoding(
    minilm, embedder, monkeypatch, options, message
):
    for encoder in (minilm, embedder.encoder):
        monkeypatch.setattr(encoder.engine, "run", None)
    with pytest.raises(UserError, match=message):
        minilm.encode(TEXTS, **options)
    with pytest.raises(UserError, match=message):
        embedder.encode(TEXTS, "the place", **options)


@pytest.mark.parametrize("texts", [None, 7, 1.5, np.array("abc"), np.array(7), b"abc", object()])
def test_what_is_not_a_list_of_texts_is_rejected(minilm, embedder, texts):
    for use in (
        minilm.encode,
        minilm.encode_with_counts,
        minilm.encode_joined,
        minilm.queries,
        lambda texts: embedder.encode(texts, "the place"),
        lambda texts: embedder.similarity(texts, TEXTS, "the place"),
    ):
        with pytest.raises(UserError, match=r"expected a list for \w+, not the"):
            use(texts)


@pytest.mark.parametrize("item", [None, 7, "a", ["a"], {"a": 1}])
def test_what_is_not_an_input_is_rejected(minilm, item):
    for use in (minilm.token_weights, minilm.format):
        with pytest.raises(UserError, match=r"the input at position 0 is .*, not a text or an Enc"):
            use(item)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"text": None}, "the text at position 0 is None, not a text"),
        ({"context": 7}, "the context at position 0 is 7, not a text"),
        ({"context": 0}, "the context at position 0 is 0, not a text"),
        ({"instruction": None}, "the instruction at position 0 is None, not a text"),
        ({"router": "the place"}, "the router at position 0 is 'the place', not a Router"),
        ({"sentence": 7}, "the sentence at position 0 is 7; expected spans"),
        ({"sentence": ("text",)}, r"the sentence at position 0 is \('text',\); expected spans"),
    ],
)
def test_parts_of_inputs_of_another_type_are_rejected(minilm, parts, message):
    with pytest.raises(UserError, match=message):
        minilm.encode([EncoderInput(**{"instruction": "", "text": "a man", **parts})])


@pytest.mark.parametrize("row", [None, 7, "abc", ("a", "b"), ("a", "b", None)])
def test_rows_of_cross_encoders_have_three_texts(minilm, row):
    with pytest.raises(UserError, match=r"expected two texts and a condition|is None, not a text"):
        minilm.encode_joined([row])


@pytest.mark.parametrize("model", [None, 7, ["minilm"], b"minilm", {"a": 1}])
def test_what_does_not_name_a_model_is_rejected(model):
    with pytest.raises(UserError, match=r"model is .*; expected a name or a folder"):
        llmcond.load_encoder(model)


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
