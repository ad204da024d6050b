"""Models with one condition: their vectors, and the settings that programs store."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

import llmcond
from llmcond.integrations.conditioned import ConditionedModel
from llmcond.runs import open_run
from llmcond.runs.embedder import EmbeddingModel
from llmcond.runs.run import zero_shot_head

TEXTS = ["Two women read a book at the beach.", "Two women cook at night."]
CUISINE = llmcond.Condition("the cuisine | the kitchen", ["Italian", "Thai"])


def test_vectors_are_those_of_the_embedder():
    model = ConditionedModel("the  activity", truncate_dim=64)
    expected = llmcond.load_embedder(truncate_dim=64).encode(TEXTS, "the activity")
    np.testing.assert_array_equal(model.embed(TEXTS), expected)
    assert model.embed([]).shape == (0, 64)
    # One encoder is loaded for both.
    assert ConditionedModel(CUISINE).embedder.encoder is model.embedder.encoder


@pytest.mark.parametrize("condition", ["the activity", CUISINE])
def test_stored_settings_give_the_same_model(condition):
    model = ConditionedModel(condition, truncate_dim=64)
    restored = ConditionedModel.from_json(model.to_json())
    assert restored.condition == model.condition
    assert restored.to_json() == model.to_json()
    model.embed(TEXTS)
    assert len(pickle.dumps(model)) < 1000  # no weights
    assert pickle.loads(pickle.dumps(model)) == model


def test_head_that_was_fitted_again_is_loaded_again(tiny_run, tmp_path):
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    first = ConditionedModel("the activity", run, "linear")
    fingerprints = set()
    for seed in (0, 1):
        settings = {"epochs": "1", "batch_size": "16"}
        llmcond.fit_head(run=run, head="linear", dim=4, set=settings, seed=seed)
        vectors = ConditionedModel("the activity", run, "linear").embed(TEXTS)
        expected = llmcond.load_embedder(run, "linear").encode(TEXTS, "the activity")
        np.testing.assert_array_equal(vectors, expected)
        fingerprints.add(first.fingerprint)  # of its vectors, which stay those of the first head
    assert len(fingerprints) == 1
    assert first.fingerprint != ConditionedModel("the activity", run, "linear").fingerprint
    assert not np.array_equal(first.embed(TEXTS), expected)


def test_zero_shot_with_and_without_subtraction_is_selected_again(tiny_run):
    run = open_run(tiny_run)
    models = [
        EmbeddingModel(run, zero_shot_head(view))
        for prompt in run.prompts().values()
        for view in run.zero_shot_views(prompt)
    ]
    assert len(models) > len(run.prompts())
    for model in models:
        assert EmbeddingModel.find(**model.find_arguments).identity == model.identity
        stored = ConditionedModel("the activity", tiny_run, model.head.name).to_json()
        assert ConditionedModel.from_json(stored).to_json() == stored


def test_fingerprints_differ_where_vectors_do():
    models = [
        ConditionedModel("the activity"),
        ConditionedModel("the place"),
        ConditionedModel("the activity", truncate_dim=64),
        ConditionedModel("the activity", model="minilm-csts"),
        ConditionedModel(llmcond.Condition("the activity", ["reading", "cooking"])),
    ]
    assert len({model.fingerprint for model in models}) == len(models)
    same = ConditionedModel("the activity", model="minilm-conditions", device="cpu")
    assert same.fingerprint == models[0].fingerprint


def test_invalid_settings_are_reported():
    stored = ConditionedModel("the activity").to_json()
    ignoring = llmcond.Condition("the problem", ignore=["the product"])
    for create, message in (
        (lambda: ConditionedModel(""), "the condition is empty"),
        (lambda: ConditionedModel(ignoring), "what the product is must be found from all texts"),
        (lambda: ConditionedModel.from_json({}), "are not those of an llmcond model"),
        (lambda: ConditionedModel.from_json({**stored, "size": 3}), "are not those of an llmcond"),
        (lambda: ConditionedModel.from_json({**stored, "model": "minilm-csts"}), "another model"),
        (lambda: ConditionedModel("a", model="unknown").embed(TEXTS), "no run or model unknown"),
    ):
        with pytest.raises(llmcond.UserError, match=message):
            create()
