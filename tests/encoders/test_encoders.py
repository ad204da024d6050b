"""Vectors of encoders, compared with sentence-transformers and with hidden states; arguments."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.checkpoints import change_json, load_on_cpu
from safetensors.torch import load_file, save_file

import llmcond
from llmcond.base.errors import UserError
from llmcond.encoders import EncoderInput
from llmcond.encoders.spec import NotFiniteError, Router
from llmcond.encoders.torch.forward import mean_pooling

FORMAT = "Instruct: {instruction}\nQuery: {text}"
TEXTS = [
    "",
    "A man plays the guitar.",
    "Two dogs 🐕🐕 run across a field 🌾!",
    "東京は日本の首都です。今日は雨が降っています。",
    " ".join(f"word{i % 97} sentence" for i in range(1_000)),
    "A café in Zürich – naïve, isn't it?",
    "\n\t  spaces \u00a0 and {braces} \n",
]


def plain_inputs(texts):
    return [EncoderInput("", text) for text in texts]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint):
    return load_on_cpu(tiny_checkpoint())


def test_vectors_match_sentence_transformers_in_any_batch(minilm):
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(minilm.resolved.checkpoint.folder), device="cpu").float()
    with pytest.warns(UserWarning, match="1 of 7 inputs are longer than the 256 tokens"):
        vectors = minilm.encode(plain_inputs(TEXTS))
    assert (vectors.dtype, vectors.shape) == (np.float32, (len(TEXTS), minilm.dim))
    np.testing.assert_allclose(vectors, peer.encode(TEXTS, convert_to_numpy=True), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    with pytest.warns(UserWarning, match="inputs are longer"):
        alone = np.concatenate([minilm.encode(plain_inputs([text])) for text in TEXTS[::-1]])
    np.testing.assert_allclose(alone[::-1], vectors, atol=1e-5)


def test_mean_is_summed_in_float32():
    # bfloat16 cannot represent 257, the sum of these ones.
    hidden = torch.ones(1, 257, 1, dtype=torch.bfloat16)
    assert mean_pooling(hidden, torch.ones(1, 257, dtype=torch.bool), [257]).item() == 1


@pytest.mark.usefixtures("native_16_bit")
def test_inputs_of_equal_tokens_get_equal_vectors_in_any_batch(tiny_checkpoint):
    # In bfloat16, rounding depends on the batch.
    encoder = load_on_cpu(tiny_checkpoint(), dtype="bfloat16", max_tokens_per_batch=64)
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


# -- long, empty and formatted inputs ----------------------------------------------------------


@pytest.fixture(scope="module")
def short_encoder(tiny_checkpoint):
    return load_on_cpu(tiny_checkpoint(), max_length=8)


def test_truncated_inputs_are_counted_and_keep_special_tokens(short_encoder):
    texts = ["red hat", "red green blue hat coat rain sun dogs people", "red " * 6, "red " * 7]
    encoded = short_encoder.encode_with_counts(plain_inputs(texts))
    assert encoded.n_tokens.tolist() == [4, 11, 8, 9]  # [CLS] and [SEP] included
    assert encoded.truncated.tolist() == [False, True, False, True]
    whole = short_encoder.encode(plain_inputs(["red green blue hat coat rain"]))
    np.testing.assert_array_equal(encoded.vectors[1:2], whole)
    with pytest.warns(UserWarning, match="2 of 4 inputs are longer than the 8 tokens"):
        short_encoder.encode(plain_inputs(texts))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_of_windows_are_averaged(short_encoder, normalize):
    folder = short_encoder.resolved.checkpoint.folder
    encoder = load_on_cpu(folder, max_length=8, normalize=normalize, long_texts="windows")
    windows = ["red green blue hat", "coat rain sun dogs people", "two three men women children"]
    encoded = encoder.encode_with_counts(plain_inputs(["red hat", " ".join(windows)]))
    assert (encoded.n_tokens.tolist(), encoded.truncated.any()) == ([4, 16], False)
    expected = encoder.encode(plain_inputs(windows)).mean(axis=0)
    if normalize:
        expected /= np.linalg.norm(expected)
    np.testing.assert_allclose(encoded.vectors[1], expected, atol=1e-6)
    assert encoder.identity.fingerprint != short_encoder.identity.fingerprint


def test_empty_inputs(tiny_checkpoint, tiny):
    assert tiny.encode([]).shape == (0, tiny.dim)
    folder = tiny_checkpoint()
    change_json(folder / "tokenizer.json", post_processor=None)
    encoded = load_on_cpu(folder).encode_with_counts(plain_inputs(["", "red hat"]))
    assert encoded.n_tokens.tolist() == [0, 2]
    np.testing.assert_allclose(np.linalg.norm(encoded.vectors, axis=1), 1, atol=1e-5)


def test_instruction_format_is_applied(tiny_checkpoint, tiny):
    encoder = load_on_cpu(tiny_checkpoint(), instruction_format=FORMAT)
    item = EncoderInput("{text} }{ {0}", "{instruction}")
    formatted = encoder.format(item)
    assert formatted == "Instruct: {text} }{ {0}\nQuery: {instruction}"
    first, second = encoder.encode([item, EncoderInput("", formatted)])
    np.testing.assert_array_equal(first, second)
    with pytest.raises(UserError, match=r"takes no instruction.*--instruction-format"):
        tiny.encode([EncoderInput("retrieve", "red hat")])
    for template in ("{instruction}", "{instruction} {text} {other}", "{instruction.x} {text}"):
        with pytest.raises(UserError, match="instruction format"):
            load_on_cpu(tiny_checkpoint(), instruction_format=template)


# -- arguments ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder():
    return llmcond.load_embedder(device="cpu")


def test_invalid_options_of_encode_are_rejected_before_encoding(minilm, embedder, monkeypatch):
    for encoder in (minilm, embedder.encoder):
        monkeypatch.setattr(encoder.engine, "run", None)
    for options, message in (
        ({"batch_size": 1.5}, r"batch_size is 1\.5; expected a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"truncate_dim": 400}, "truncate_dim is 400, but the embeddings have 384"),
        ({"normalize": "no"}, "normalize is 'no'; expected True or False"),
        ({"show_progress": 2}, "show_progress is 2; expected True or False"),
        ({"convert_to_numpy": None}, "convert_to_numpy is None; expected True or False"),
        ({"normalize_embeddings": 1}, "normalize_embeddings is 1; expected True or False"),
        ({"precision": 8}, r"precision is 8\. Legal: float32, int8"),
    ):
        with pytest.raises(UserError, match=message):
            minilm.encode(["a man"], **options)
        with pytest.raises(UserError, match=message):
            embedder.encode(["a man"], "the place", **options)


def test_arguments_of_another_type_are_rejected(minilm, embedder):
    functions = (
        minilm.encode,
        minilm.encode_with_counts,
        minilm.encode_joined,
        minilm.queries,
        lambda texts: embedder.encode(texts, "the place"),
        lambda texts: embedder.similarity(texts, ["a man"], "the place"),
    )
    for texts in (None, np.array("abc"), b"abc"):
        for function in functions:
            with pytest.raises(UserError, match=r"expected a list for \w+, not the"):
                function(texts)
    with pytest.raises(UserError, match="is a single EncoderInput; expected a list"):
        minilm.encode(EncoderInput("", "a"))
    for function in (minilm.token_weights, minilm.format):
        with pytest.raises(UserError, match=r"the input at position 0 is .*, not a text or an"):
            function(["a"])
    for parts, message in (
        ({"text": None}, "the text at position 1 is None, not a text"),
        ({"text": "\ud800"}, "the text at position 1 is .* half of a surrogate pair"),
        ({"instruction": "a\0"}, "the instruction at position 1 is .* a NUL character"),
        ({"context": 0}, "the context at position 1 is 0, not a text"),
        ({"router": "the place"}, "the router at position 1 is 'the place', not a Router"),
        ({"router": Router(7, 1.0, True, False)}, "router at position 1 is 7"),
        ({"sentence": ("text",)}, r"the sentence at position 1 is \('text',\); expected spans"),
    ):
        with pytest.raises(UserError, match=message):
            minilm.encode(["a", EncoderInput(**{"instruction": "", "text": "a man", **parts})])
    for row in ("abc", ("a", "b"), ("a", "b", None)):
        with pytest.raises(UserError, match=r"expected two texts and a condition|is None, not a"):
            minilm.encode_joined([row])
    with pytest.raises(UserError, match="the input at position 1 is 7, not a text"):
        minilm.encode(["a", 7])
    vectors = minilm.encode(["a", np.str_("a")], batch_size=np.int64(1), truncate_dim=np.int32(8))
    assert vectors.shape == (2, 8)


# -- vectors that are not finite ---------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(tiny_checkpoint):
    """An encoder with NaN in the embedding of a token that only some texts have."""
    folder = tiny_checkpoint()
    weights = load_file(folder / "model.safetensors")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    weights[name][vocabulary["dogs"]] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("runtime", ["openvino", "torch"])
def test_vectors_that_are_not_finite_are_rejected(damaged, runtime):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    encoder = load_on_cpu(damaged, runtime=runtime)
    router = Router("man", 1.0, centre=False, standardize=False)
    rows = [("a man", "a horse", "the place"), ("two dogs", "a man", "the place")]
    for encode in (
        lambda: encoder.encode(["a man", "two dogs"]),
        lambda: encoder.encode(["two dogs"], precision="ubinary", normalize=True),
        lambda: encoder.encode_joined(rows),
        lambda: encoder.token_weights(EncoderInput("", "two dogs", router=router)),
    ):
        with pytest.raises(UserError, match=r"returned NaN or .* for 'two dogs'.*Compute in"):
            encode()
    texts = ["a man", "two dogs", "a woman", "dogs"]
    with pytest.raises(NotFiniteError, match="for 'two dogs' and 1 more") as raised:
        encoder.encode_with_counts(plain_inputs(texts))
    finite = np.isfinite(raised.value.encoded.vectors).all(axis=1)
    assert finite.tolist() == [True, False, True, False]


def test_vectors_of_a_head_that_are_not_finite_are_rejected(embedder):
    class Broken:
        compares_by_cosine, kind, dim_out, dim_in, is_identity = True, "linear", 4, 384, False
        generates_matrices = False

        def transform(self, features, condition):
            return np.full((features.shape[0], 4), np.nan, dtype=np.float32)

    class BrokenSimilarity(Broken):
        compares_by_cosine = False

        def transform(self, features, condition):
            return np.ones((features.shape[0], 4), dtype=np.float32)

        def compare(self, first, second):
            return np.full(len(first), np.inf, dtype=np.float32)

    with pytest.raises(UserError, match=r"the head broken returned NaN .* Fit the head again"):
        replace(embedder, head=Broken(), name="broken").encode(["a man"], "the place")
    model = replace(embedder, head=BrokenSimilarity(), name="broken")
    with pytest.raises(UserError, match=r"the head broken returned NaN .*'pair 1' and 1 more"):
        model.similarity(["a man", "a dog"], ["a hat", "a cat"], "the place")


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
        from llmcond.base.errors import UserError
        try:
            load_encoder(sys.argv[1], device="cpu", quantize="8bit")
        except UserError as error:
            assert "pip install 'llmcond[quantize]'" in str(error), error
        else:
            raise AssertionError("loaded")
    """)
    subprocess.run([sys.executable, "-c", script, str(tiny_checkpoint())], check=True)
