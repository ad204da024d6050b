"""Embedding models: a run with a fitted head or with the zero-shot head."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

import llmcond
from llmcond.arrays import as_matrix, cosine
from llmcond.errors import UserError
from llmcond.heads.numpy_heads import ZERO_SHOT
from llmcond.runs import open_run
from llmcond.runs.embedder import Embedder, EmbeddingModel
from llmcond.runs.examples import predict, result_without_metrics, zero_shot_heads
from llmcond.runs.rated import RatedExamples


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    folder = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("model") / "run"))
    llmcond.fit_head(run=folder, head="linear", dim=4, set={"epochs": "1"}, name="mine")
    return folder


def test_identity_and_reference_differ_for_zero_shot_and_fitted_head(fitted: Path):
    fitted_model, zero_shot_model = (EmbeddingModel.find(fitted, head) for head in ("mine", "none"))
    assert fitted_model.head.is_fitted
    assert not zero_shot_model.head.is_fitted
    assert (fitted_model.head.reference, zero_shot_model.head.reference) == ("mine", "none")
    assert list(zero_shot_model.identity) == ["encoder", "prompt", "subtraction", "head"]
    assert zero_shot_model.identity["head"] is None
    assert fitted_model.identity["head"] == fitted_model.run.head_record("mine")["weights_sha256"]
    assert {**fitted_model.identity, "head": None} == zero_shot_model.identity


def test_model_is_logged_in_one_line_unless_quiet(fitted: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "llmcond")
    EmbeddingModel.find(fitted, "none", quiet=True)
    assert not caplog.records
    EmbeddingModel.find(fitted, "none")
    assert [record.getMessage() for record in caplog.records if "zero-shot" in record.message]


def test_head_of_another_prompt_is_rejected(fitted: Path):
    with pytest.raises(UserError, match="was fitted on the prompt"):
        EmbeddingModel.find(fitted, "mine", "separate")


def test_zero_shot_head_predicts_cosines_of_features(fitted: Path):
    run = open_run(fitted)
    (prompt, *_), features = run.prompts().values(), RatedExamples(run)
    for model in zero_shot_heads(run, prompt):
        pairs = features.pairs(model.view, "dev")
        sides = (as_matrix(pairs.first)[:], as_matrix(pairs.second)[:])
        np.testing.assert_array_equal(predict(model, pairs), cosine(*sides))
        result = result_without_metrics(model, "dev")
        assert (result.head, result.dim, result.seeds, result.fits) == ("none", None, (), ())
        assert model.trained_on == ()
        assert not pickle.loads(pickle.dumps(model)).is_fitted


def test_embedder_without_head_returns_features(fitted: Path):
    embedder = llmcond.load_embedder(fitted, "none")
    assert embedder.head is ZERO_SHOT
    assert (embedder.name, embedder.dim, embedder.fitted_on) == ("none", embedder.encoder.dim, "")
    bare = Embedder(embedder.encoder, embedder.view)
    texts = ["two men play in the park", "children in the rain"]
    np.testing.assert_array_equal(
        bare.encode(texts, "the place"), embedder.encode(texts, "the place")
    )
