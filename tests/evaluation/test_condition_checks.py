"""Condition checks: indicators of synthetic vectors, and the accuracy that they predict."""

import json

import numpy as np
import pytest
from scipy import stats

from llmcond.base.errors import LlmcondError
from llmcond.base.package import DEFAULT_MODEL
from llmcond.base.text import Condition
from llmcond.evaluation import analyses as condition_checks
from llmcond.evaluation.analyses import (
    INDICATORS,
    MOST_TEXTS,
    Calibration,
    ConditionCheck,
    find_calibration,
    indicators,
    sample_texts,
)

#: Predicts an accuracy of 50 % to 100 % from the cosine with the nearest texts.
CALIBRATION = Calibration(0.5, {"nearest": 0.5}, 0.1, {})


def test_sampled_texts_are_distinct_and_depend_on_seed():
    texts = [f"text {i}" for i in range(MOST_TEXTS)]
    assert sample_texts([*texts, *texts]) == list(range(MOST_TEXTS))
    assert sample_texts(["a", "a", "b", "a"]) == [0, 2]
    sample = sample_texts([*texts, "one more", *texts], seed=1)
    assert len(sample) == len(set(sample)) == MOST_TEXTS
    assert sample == sorted(sample) == sample_texts([*texts, "one more", *texts], seed=1)
    assert sample != sample_texts([*texts, "one more"], seed=2)


def sample_groups(n, groups, noise, dim=16, seed=0):
    """Return (n, dim) vectors around the centres of some groups."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(groups, dim))[np.arange(n) % groups] + noise * rng.normal(size=(n, dim))


def test_clustered_vectors_score_higher_than_single_cloud():
    clustered, scattered = (
        ConditionCheck.of("the mood", sample_groups(60, 4, noise), CALIBRATION)
        for noise in (0.2, 20)
    )
    for name in INDICATORS:
        assert clustered.indicators[name] > scattered.indicators[name] + 0.1
    assert clustered.expected.value > scattered.expected.value + 0.1
    check_json = clustered.to_json()
    assert (check_json["verdict"], check_json["texts"]) == ("clear groups", 60)
    assert check_json["expected_accuracy_ci"][0] < check_json["expected_accuracy"]


def test_verdicts_promise_nothing_and_advise_values_only_where_they_help():
    vectors, values = sample_groups(20, 4, 1.0), Condition("the mood", "happy, sad")
    for accuracy, half_width, verdict in (
        (0.70, 0.3, "clear groups"),
        (0.58, 0.3, "some groups"),
        (0.41, 0.3, "unclear"),
        (0.41, 0.28, "hardly any groups"),
    ):
        calibration = Calibration(accuracy, {}, half_width, {})
        check = ConditionCheck.of("the mood", vectors, calibration)
        assert check.verdict == check.to_json()["verdict"] == verdict
        assert "works" not in check.sentence()
        assert "(--guide of cluster, index and embed)" in check.sentence()
        assert ("--values" in check.sentence()) == (verdict == "hardly any groups")
        assert "--values" not in ConditionCheck.of(values, vectors, calibration).sentence()


def test_indicators_match_their_definitions():
    vectors = sample_groups(30, 3, 1.0)
    centred = vectors - vectors.mean(axis=0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    matrix = unit @ unit.T
    cosines = matrix[np.triu_indices(30, 1)]
    others = [np.delete(row, i) for i, row in enumerate(matrix)]
    expected = {
        "nearest": np.mean([np.quantile(row, 0.98) for row in others]),
        "bimodality": (stats.skew(cosines) ** 2 + 1) / stats.kurtosis(cosines, fisher=False),
    }
    assert indicators(vectors) == pytest.approx(expected)
    assert indicators(2 * vectors + 1) == pytest.approx(expected)
    assert indicators(np.ones((5, 3))) == dict.fromkeys(INDICATORS, 0.0)


def test_calibration_ranks_conditions_if_it_does_on_unseen_families():
    for low, ranks in ((0.1, True), (0.0, False)):
        measured = {"spearman_left_out": {"family": {"low": low}}}
        assert Calibration(0.5, {}, 0.1, measured).ranks_conditions is ranks
    assert CALIBRATION.ranks_conditions is False


def test_too_few_texts_give_no_verdict():
    check = ConditionCheck.of("the mood", sample_groups(19, 3, 0.1), CALIBRATION)
    assert check.verdict == "too few texts to tell"
    assert check.to_json()["expected_accuracy"] is None
    assert "at least 20" in check.sentence()


def test_calibration_is_read_and_validated(tmp_path, monkeypatch):
    monkeypatch.setattr(condition_checks, "bundled_folder", lambda _: tmp_path)
    bundled = tmp_path / DEFAULT_MODEL
    bundled.mkdir()
    assert find_calibration(tmp_path / "run") is None
    record = CALIBRATION.to_json()
    path = bundled / "conditions.json"
    path.write_text(json.dumps(record))
    assert find_calibration(bundled) == CALIBRATION
    assert find_calibration(tmp_path / "run").is_of_model is False
    for damage, message in (
        ({"coefficients": {"luck": 1.0}}, "'luck', which is not an indicator"),
        ({"intercept": "0.5"}, "'intercept' is '0.5'"),
        ({"format": 2}, "newer version"),
    ):
        path.write_text(json.dumps(record | damage))
        with pytest.raises(LlmcondError, match=message):
            find_calibration(bundled)
