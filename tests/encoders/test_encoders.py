"""Vectors compared with sentence-transformers and with hidden states, in any batch."""

import json
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from helpers.vectors import cosines

from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.engine.forward import mean_pooling
from llmcond.encoders.spec import Router
from llmcond.errors import LlmcondError, UserError

FORMAT = "Instruct: {instruction}\nQuery: {text}"
TEXTS = [
    "",
    "A man plays the guitar.",
    "Two dogs 🐕🐕 run across a field 🌾!",
    "東京は日本の首都です。今日は雨が降っています。",
    " ".join(f"word{i % 97} sentence" for i in range(1_000)),
    "the number of people",
    "A café in Zürich – naïve, isn't it?",
    "Three children read a book in the kitchen while it rains outside.",
    "\n\t  spaces \u00a0 and {braces} \n",
]


def plain_inputs(texts):
    return [EncoderInput("", text) for text in texts]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint):
    return load_encoder(str(tiny_checkpoint()), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tiny_mistral(tiny_checkpoint):
    folder = str(tiny_checkpoint("mistral"))
    return load_encoder(folder, dtype="float32", device="cpu", pooling="last")


@pytest.fixture(scope="module")
def minilm_vectors(minilm):
    with pytest.warns(UserWarning, match="1 of 9 inputs are longer than the 256 tokens"):
        return minilm.encode(plain_inputs(TEXTS))


def test_vectors_match_sentence_transformers(minilm, minilm_vectors):
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(minilm.resolved.checkpoint.folder), device="cpu").float()
    expected = peer.encode(TEXTS, convert_to_numpy=True)
    assert cosines(minilm_vectors, expected).min() >= 0.99999
    np.testing.assert_allclose(minilm_vectors, expected, atol=1e-5)


def test_vectors_are_float32_with_unit_norm(minilm, minilm_vectors):
    assert minilm_vectors.dtype == np.float32
    assert minilm_vectors.shape == (len(TEXTS), minilm.dim)
    np.testing.assert_allclose(np.linalg.norm(minilm_vectors, axis=1), 1, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*inputs are longer")
def test_minilm_vector_does_not_depend_on_batch(minilm, minilm_vectors):
    alone = np.concatenate([minilm.encode(plain_inputs([text])) for text in TEXTS])
    np.testing.assert_allclose(alone, minilm_vectors, atol=1e-5)


def test_last_token_vector_does_not_depend_on_batch(tiny_mistral):
    texts = ["red", "two dogs play in the park at night", "", "the colour of the hat", "rain ."]
    together = tiny_mistral.encode(plain_inputs(texts))
    alone = np.concatenate([tiny_mistral.encode(plain_inputs([text])) for text in texts])
    np.testing.assert_allclose(alone, together, atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 0.01


@pytest.mark.filterwarnings("ignore:.*inputs are longer")
def test_vectors_are_in_input_order(minilm, minilm_vectors):
    np.testing.assert_allclose(
        minilm.encode(plain_inputs(TEXTS[::-1])), minilm_vectors[::-1], atol=1e-5
    )


def test_vector_does_not_depend_on_the_token_budget(tiny, tiny_checkpoint):
    texts = ["red " * n for n in (3, 1, 9, 4, 1, 20)]
    small = load_encoder(
        str(tiny_checkpoint()), dtype="float32", device="cpu", max_tokens_per_batch=1
    )
    np.testing.assert_allclose(
        small.encode(plain_inputs(texts)), tiny.encode(plain_inputs(texts)), atol=1e-5
    )


def test_repeated_texts_get_equal_vectors(tiny):
    vectors = tiny.encode(plain_inputs(["red hat", "two dogs", "red hat", "red hat"]))
    np.testing.assert_array_equal(vectors[[2, 3]], vectors[[0, 0]])
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01


def test_inputs_of_equal_tokens_get_equal_vectors_in_any_batch(tiny_checkpoint):
    # In bfloat16, rounding depends on the batch.
    encoder = load_encoder(
        str(tiny_checkpoint()), dtype="bfloat16", device="cpu", max_tokens_per_batch=64
    )
    spaces = [f"{' ' * n}red hat" for n in range(300)]  # different lengths, so in two work units
    rest = [" ".join(["dog"] * (n % 40 + 1)) for n in range(300)]
    vectors = encoder.encode(plain_inputs([*spaces, *rest]))
    assert len(np.unique(vectors[:300], axis=0)) == 1
    assert len(np.unique(vectors[300:], axis=0)) == 40


def test_inputs_of_equal_tokens_with_different_routers_differ(tiny):
    settings = [("red", 1.0), ("red", 0.5), ("dog", 1.0), ("red", 1.0)]
    routers = [Router(text, temperature, False, True) for text, temperature in settings]
    texts = ["a red hat", "a red hat", "a red hat", " a  red hat"]
    items = [
        EncoderInput("", text, router=router) for text, router in zip(texts, routers, strict=True)
    ]
    vectors = tiny.encode(items)
    np.testing.assert_array_equal(vectors[0], vectors[3])
    assert len(np.unique(vectors, axis=0)) == 3


def test_no_inputs_give_an_empty_array(tiny):
    vectors = tiny.encode([])
    assert vectors.shape == (0, tiny.dim)
    assert vectors.dtype == np.float32


@pytest.mark.processor
@pytest.mark.usefixtures("native_16_bit")
@pytest.mark.filterwarnings("ignore:.*inputs are longer")
def test_bfloat16_is_close_to_float32(minilm_vectors):
    encoder = load_encoder("minilm", dtype="bfloat16", device="cpu", runtime="torch")
    vectors = encoder.encode(plain_inputs(TEXTS))
    assert vectors.dtype == np.float32
    assert cosines(vectors, minilm_vectors).min() >= 0.999
    assert np.abs(vectors - minilm_vectors).max() > 1e-4  # it was in fact computed in bfloat16


@pytest.mark.parametrize("kind", ["bert", "mistral"])
@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("cls", lambda hidden: hidden[0]),
        ("mean", lambda hidden: hidden.mean(dim=0)),
        ("last", lambda hidden: hidden[-1]),
    ],
)
def test_pooling_matches_hidden_states_of_transformers(tiny_checkpoint, kind, pooling, expected):
    from transformers import AutoModel, AutoTokenizer

    folder = tiny_checkpoint(kind)
    encoder = load_encoder(
        str(folder), dtype="float32", device="cpu", pooling=pooling, normalize=False
    )
    texts = ["two dogs play in the rain", "red", "the number of people at the beach ."]
    vectors = encoder.encode(plain_inputs(texts))
    model, tokenizer = (
        AutoModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    for text, vector in zip(texts, vectors, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(vector, expected(hidden).numpy(), atol=1e-5)


def test_mean_is_summed_in_float32():
    # bfloat16 cannot represent 257, the sum of these ones.
    hidden = torch.ones(1, 257, 1, dtype=torch.bfloat16)
    assert mean_pooling(hidden, torch.ones(1, 257, dtype=torch.bool), [257]).item() == 1


@pytest.fixture(scope="module")
def short_encoder(tiny_checkpoint):
    return load_encoder(str(tiny_checkpoint()), dtype="float32", device="cpu", max_length=8)


def test_truncated_inputs_are_counted(short_encoder):
    encoded = short_encoder.encode_with_counts(
        plain_inputs(["red hat", "red " * 20, "red " * 6, "red " * 7])
    )
    assert encoded.n_tokens.tolist() == [4, 22, 8, 9]  # [CLS] and [SEP] included
    assert encoded.truncated.tolist() == [False, True, False, True]


def test_truncated_text_keeps_its_special_tokens(short_encoder):
    truncated = short_encoder.encode_with_counts(
        plain_inputs(["red green blue hat coat rain sun dogs people"])
    ).vectors
    whole = short_encoder.encode_with_counts(plain_inputs(["red green blue hat coat rain"])).vectors
    np.testing.assert_array_equal(truncated, whole)


def test_encode_warns_about_truncation_and_counts_it(short_encoder):
    with pytest.warns(UserWarning, match="2 of 3 inputs are longer than the 8 tokens"):
        short_encoder.encode(plain_inputs(["red", "red " * 20, "red " * 9]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_of_windows_are_averaged(short_encoder, normalize):
    folder = str(short_encoder.resolved.checkpoint.folder)
    options = {"dtype": "float32", "device": "cpu", "max_length": 8, "normalize": normalize}
    encoder = load_encoder(folder, **options, long_texts="windows")
    windows = ["red green blue hat", "coat rain sun dogs people", "two three men women children"]
    encoded = encoder.encode_with_counts(plain_inputs(["red hat", " ".join(windows)]))
    assert (encoded.n_tokens.tolist(), encoded.truncated.any()) == ([4, 16], False)
    expected = encoder.encode(plain_inputs(windows)).mean(axis=0)
    if normalize:
        expected /= np.linalg.norm(expected)
    np.testing.assert_allclose(encoded.vectors[1], expected, atol=1e-6)
    assert encoder.identity.fingerprint != short_encoder.identity.fingerprint


@pytest.mark.filterwarnings("error")
def test_encode_does_not_warn_without_truncation(short_encoder):
    short_encoder.encode(plain_inputs(["red", "red " * 6]))


def test_empty_text_without_special_tokens_gets_vector(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    encoder = load_encoder(str(folder), dtype="float32", device="cpu")
    encoded = encoder.encode_with_counts(plain_inputs(["", "red hat"]))
    assert encoded.n_tokens.tolist() == [0, 2]
    np.testing.assert_allclose(np.linalg.norm(encoded.vectors, axis=1), 1, atol=1e-5)


def test_instruction_format_is_applied(tiny_checkpoint):
    encoder = load_encoder(
        str(tiny_checkpoint()), dtype="float32", device="cpu", instruction_format=FORMAT
    )
    item = EncoderInput("retrieve the colour", "red hat")
    assert encoder.format(item) == "Instruct: retrieve the colour\nQuery: red hat"
    formatted = EncoderInput("", "Instruct: retrieve the colour\nQuery: red hat")
    np.testing.assert_array_equal(encoder.encode([item]), encoder.encode([formatted]))


def test_braces_in_instruction_and_text_are_literal(tiny_checkpoint):
    encoder = load_encoder(str(tiny_checkpoint()), device="cpu", instruction_format=FORMAT)
    item = EncoderInput("find {text} }{ {0}", "{instruction} {{x}}")
    assert encoder.format(item) == "Instruct: find {text} }{ {0}\nQuery: {instruction} {{x}}"


def test_input_without_instruction_is_not_formatted(tiny_checkpoint):
    encoder = load_encoder(str(tiny_checkpoint()), device="cpu", instruction_format=FORMAT)
    assert encoder.format(EncoderInput("", "red hat")) == "red hat"


def test_encoder_without_format_rejects_instruction(tiny):
    with pytest.raises(UserError, match=r"takes no instruction.*--instruction-format"):
        tiny.encode([EncoderInput("retrieve", "red hat")])


@pytest.mark.parametrize(
    "template",
    [
        "{instruction}",
        "{text}",
        "{text} {text} {instruction}",
        "{instruction} {text} {other}",
        "{instruction} {text",
        "{instruction} text}",
        "{instruction.x} {text}",
        "{} {}",
        "no names",
    ],
)
def test_invalid_instruction_format_is_rejected(tiny_checkpoint, template):
    with pytest.raises(UserError, match="instruction format"):
        load_encoder(str(tiny_checkpoint()), device="cpu", instruction_format=template)


def test_checkpoint_with_missing_weights_is_rejected(tiny_checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LlmcondError, match=r"lacks 1 weights.*encoder\.layer\.1\.output\.dense"):
        load_encoder(str(folder), device="cpu")


@pytest.mark.parametrize("quantize", ["8bit", "4bit"])
def test_quantised_vectors_are_close_to_full_precision(tiny_checkpoint, quantize):
    pytest.importorskip("bitsandbytes")
    folder = str(tiny_checkpoint(hidden=64))
    texts = plain_inputs(["two dogs play", "a red hat", "rain"])
    full = load_encoder(folder, dtype="float32", device="cpu").encode(texts)
    encoder = load_encoder(folder, dtype="float32", device="cpu", quantize=quantize)
    vectors = encoder.encode(texts)
    assert np.isfinite(vectors).all()
    assert cosines(vectors, full).min() > 0.95
    assert np.abs(vectors - full).max() > 1e-5  # the weights were in fact quantised


def test_benchmark_does_not_import_optional_libraries(tiny_checkpoint):
    """The benchmark runs where storage and settings libraries are not installed."""
    script = textwrap.dedent("""
        import sys
        for name in ("lance", "pyarrow", "pydantic", "annotated_types", "bitsandbytes"):
            sys.modules[name] = None  # importing them raises
        import llmcond.cli
        import llmcond.commands.encode
        import llmcond.workflows.bench
        from llmcond.encoders.encoder import load_encoder
        from llmcond.errors import UserError
        try:
            load_encoder(sys.argv[1], device="cpu", quantize="8bit")
        except UserError as error:
            assert "pip install 'llmcond[quantize]'" in str(error), error
        else:
            raise AssertionError("loaded")
    """)
    subprocess.run([sys.executable, "-c", script, str(tiny_checkpoint())], check=True)
