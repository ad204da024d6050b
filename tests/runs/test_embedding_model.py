"""A run with one of its heads as one value, and zero-shot as one of these heads."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

import llmcond
from llmcond.arrays import as_matrix, cosine
from llmcond.errors import UserError
from llmcond.evaluation.results import Result
from llmcond.heads.numpy_heads import ZERO_SHOT
from llmcond.runs import open_run
from llmcond.runs.embedder import Embedder
from llmcond.runs.embedding_model import EmbeddingModel
from llmcond.runs.predictors import predict, result_without_metrics, zero_shot_heads
from llmcond.runs.rated import RatedExamples


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    folder = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("model") / "run"))
    llmcond.fit_head(run=folder, head="linear", dim=4, set={"epochs": "1"}, name="mine")
    return folder


def test_identity_and_reference_tell_zero_shot_from_a_fitted_head(fitted: Path):
    mine, plain = (EmbeddingModel.find(fitted, head) for head in ("mine", "none"))
    assert mine.head.is_fitted
    assert not plain.head.is_fitted
    assert (mine.head.reference, plain.head.reference) == ("mine", "none")
    assert list(plain.identity) == ["encoder", "prompt", "subtraction", "head"]
    assert plain.identity["head"] is None
    assert mine.identity["head"] == mine.run.head_record("mine")["weights_sha256"]
    assert {**mine.identity, "head": None} == plain.identity


def test_one_line_says_what_was_found_unless_quiet(fitted: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "llmcond")
    EmbeddingModel.find(fitted, "none", quiet=True)
    assert not caplog.records
    EmbeddingModel.find(fitted, "none")
    assert [record.getMessage() for record in caplog.records if "zero-shot" in record.message]


def test_a_head_is_not_found_by_another_prompt(fitted: Path):
    with pytest.raises(UserError, match="was fitted on the prompt"):
        EmbeddingModel.find(fitted, "mine", "separate")


def test_zero_shot_predicts_the_cosines_of_features(fitted: Path):
    run = open_run(fitted)
    (prompt, *_), features = run.prompts().values(), RatedExamples(run)
    for zeroshot in zero_shot_heads(run, prompt):
        pairs = features.pairs(zeroshot.view, "dev")
        sides = (as_matrix(pairs.first)[:], as_matrix(pairs.second)[:])
        np.testing.assert_array_equal(predict(zeroshot, pairs), cosine(*sides))
        result = result_without_metrics(Result, zeroshot, "dev")
        assert (result.head, result.dim, result.seeds, result.fits) == ("none", None, (), ())
        assert zeroshot.trained_on == ()
        assert not pickle.loads(pickle.dumps(zeroshot)).is_fitted


def test_an_embedder_without_a_head_gives_the_features(fitted: Path):
    embedder = llmcond.load_embedder(fitted, "none")
    assert embedder.head is ZERO_SHOT
    assert (embedder.name, embedder.dim, embedder.fitted_on) == ("none", embedder.encoder.dim, "")
    bare = Embedder(embedder.encoder, embedder.view)
    texts = ["two men play in the park", "children in the rain"]
    np.testing.assert_array_equal(
        bare.encode(texts, "the place"), embedder.encode(texts, "the place")
    )
