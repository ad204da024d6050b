"""Whether conditions work: indicators of vectors made by hand, and what they predict."""

import json

import numpy as np
import pytest
from scipy import stats

from llmcond.bundled import DEFAULT_MODEL
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation import condition_checks
from llmcond.evaluation.condition_checks import (
    INDICATORS,
    MOST_TEXTS,
    Calibration,
    ConditionCheck,
    find_calibration,
    indicators,
    sample_texts,
)

#: Predicts 50 % to 100 % from the cosine with the nearest texts.
CALIBRATION = Calibration(0.5, {"nearest": 0.5}, 0.1, {})


def test_texts_are_sampled_once_each_and_by_the_seed():
    texts = [f"text {i}" for i in range(MOST_TEXTS)]
    assert sample_texts([*texts, *texts]) == list(range(MOST_TEXTS))
    assert sample_texts(["a", "a", "b", "a"]) == [0, 2]
    drawn = sample_texts([*texts, "one more", *texts], seed=1)
    assert len(drawn) == len(set(drawn)) == MOST_TEXTS
    assert drawn == sorted(drawn) == sample_texts([*texts, "one more", *texts], seed=1)
    assert drawn != sample_texts([*texts, "one more"], seed=2)


def grouped(n, groups, noise, dim=16, seed=0):
    """(n, dim) vectors around as many centres."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(groups, dim))[np.arange(n) % groups] + noise * rng.normal(size=(n, dim))


def test_groups_are_above_a_single_cloud():
    works, fails = (
        ConditionCheck.of("the mood", grouped(60, 4, noise), CALIBRATION) for noise in (0.2, 20)
    )
    for name in INDICATORS:
        assert works.indicators[name] > fails.indicators[name] + 0.1
    assert works.expected.value > fails.expected.value + 0.1
    poor = ConditionCheck.of("the mood", grouped(60, 4, 20), Calibration(0.1, {}, 0.1, {}))
    assert (works.verdict, poor.verdict) == ("works", "not expected to work")
    assert "give example values (--values)" in poor.sentence()
    assert works.to_json()["expected_accuracy_ci"][0] < works.to_json()["expected_accuracy"]


def test_indicators_hardly_depend_on_the_number_of_texts():
    few, many = (indicators(grouped(n, 4, 1.0)) for n in (50, 200))
    assert few == pytest.approx(many, rel=0.1)


def test_bimodality_is_sarles_coefficient():
    vectors = grouped(30, 3, 1.0)
    centred = vectors - vectors.mean(axis=0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(30, 1)]
    wanted = (stats.skew(cosines) ** 2 + 1) / stats.kurtosis(cosines, fisher=False)
    assert indicators(vectors)["bimodality"] == pytest.approx(wanted)


def test_vectors_that_do_not_vary_have_no_groups():
    assert indicators(np.ones((5, 3))) == dict.fromkeys(INDICATORS, 0.0)


def test_scale_and_shift_of_vectors_do_not_matter():
    vectors = grouped(30, 3, 0.5)
    assert indicators(vectors) == pytest.approx(indicators(2 * vectors + 1))


def test_expected_accuracy_stays_between_none_and_all():
    expected = CALIBRATION.expect({"nearest": 1.4})
    assert (expected.low, expected.value, expected.high) == (1, 1, 1)
    assert CALIBRATION.expect({"nearest": -3}).high == 0


def test_few_texts_tell_nothing():
    check = ConditionCheck.of("the mood", grouped(19, 3, 0.1), CALIBRATION)
    assert check.verdict == "too few texts to tell"
    assert check.to_json()["expected_accuracy"] is None
    assert "at least 20" in check.sentence()


def test_calibration_of_a_run_is_read_and_checked(tmp_path, monkeypatch):
    written = CALIBRATION.to_json()
    path = tmp_path / "conditions.json"
    path.write_text(json.dumps(written))
    assert find_calibration(tmp_path) == CALIBRATION
    monkeypatch.setattr(condition_checks, "bundled_folder", lambda _: tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()
    path.rename(tmp_path / DEFAULT_MODEL / "conditions.json")
    assert find_calibration(tmp_path).is_of_model is False
    assert find_calibration(tmp_path / DEFAULT_MODEL).is_of_model is True
    for damage, message in [
        ({"coefficients": {"luck": 1.0}}, "'luck', which is not an indicator"),
        ({"intercept": "0.5"}, "'intercept' is '0.5'"),
        ({"format": 2}, "newer version"),
    ]:
        path.write_text(json.dumps(written | damage))
        with pytest.raises(LlmcondError, match=message):
            find_calibration(tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match="not a readable JSON file"):
        find_calibration(tmp_path)


def test_without_any_calibration_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(condition_checks, "bundled_folder", lambda _: tmp_path)
    assert find_calibration(tmp_path / "run") is None
