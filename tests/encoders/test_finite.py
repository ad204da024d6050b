"""Vectors with NaN or infinity: every way to encode names the text and says what to do."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import llmcond
from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.spec import NotFiniteError, Router
from llmcond.errors import UserError

MESSAGE = r"returned NaN or infinity for 'two dogs'.*(Compute in another type|Compute in float32)"


@pytest.fixture(scope="module")
def damaged(tiny_checkpoint, tmp_path_factory):
    """An encoder with NaN in the embedding of a token that only some texts have."""
    folder = shutil.copytree(tiny_checkpoint(), tmp_path_factory.mktemp("nan") / "model")
    weights = load_file(folder / "model.safetensors")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    weights[name][vocabulary["dogs"]] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("runtime", ["openvino", "torch"])
@pytest.mark.parametrize(
    "encode",
    [
        lambda encoder: encoder.encode(["a man", "two dogs"]),
        lambda encoder: encoder.encode(["two dogs"], precision="ubinary", normalize=True),
        lambda encoder: encoder.encode_with_counts(
            [EncoderInput("", "a man"), EncoderInput("", "two dogs")]
        ),
        lambda encoder: encoder.encode_joined(
            [("a man", "a horse", "the place"), ("two dogs", "a man", "the place")]
        ),
        lambda encoder: encoder.token_weights(
            EncoderInput("", "two dogs", router=Router("man", 1.0, centre=False, standardize=False))
        ),
    ],
)
def test_encoder_rejects_vectors_that_are_not_finite(damaged, runtime, encode):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    encoder = load_encoder(damaged, device="cpu", dtype="float32", runtime=runtime)
    assert np.isfinite(encoder.encode(["a man"])).all()
    with pytest.raises(UserError, match=MESSAGE) as raised:
        encode(encoder)
    assert "\n" not in str(raised.value)


def test_error_has_the_other_vectors(damaged):
    encoder = load_encoder(damaged, device="cpu", dtype="float32")
    texts = ["a man", "two dogs", "a woman", "dogs"]
    with pytest.raises(NotFiniteError, match="for 'two dogs' and 1 more") as raised:
        encoder.encode_with_counts([EncoderInput("", text) for text in texts])
    finite = np.isfinite(raised.value.encoded.vectors).all(axis=1)
    assert finite.tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    "use",
    [
        lambda run: llmcond.load_embedder(run, head="none").encode(["two dogs"], "the place"),
        lambda run: llmcond.load_embedder(run, head="none").encode_with_counts(
            [("two dogs", "the place")]
        ),
        lambda run: llmcond.load_embedder(run, head="none").similarity(
            "two dogs", "a man", "the place"
        ),
        lambda run: llmcond.Index.build(
            run.parent / "index", ["two dogs"], run=run, conditions=["the place"]
        ),
    ],
)
def test_models_reject_vectors_that_are_not_finite(damaged, tmp_path, write_rows, use):
    rows = [(f"men {i}", f"women {i}", "the place", 1 + i % 5) for i in range(20)]
    run = tmp_path / "run"
    llmcond.extract(
        model=str(damaged), data=str(write_rows(rows)), run=run, device="cpu", dtype="float32",
        prompt=["concat-cond-sent"],
    )  # fmt: skip
    with pytest.raises(UserError, match=r"returned NaN or infinity for '.*two dogs"):
        use(run)


def test_head_that_is_not_finite_is_rejected(minilm):
    embedder = llmcond.load_embedder("minilm-csts", device="cpu")

    class Broken:
        compares_by_cosine, kind, dim_out, dim_in, is_identity = True, "linear", 4, 384, False
        generates_matrices = False

        def transform(self, features, condition):
            return np.full((features.shape[0], 4), np.nan, dtype=np.float32)

    with pytest.raises(UserError, match=r"the head broken returned NaN .* Fit the head again"):
        replace(embedder, head=Broken(), name="broken").encode(["a man"], "the place")
