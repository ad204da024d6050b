"""Whether conditions work: wordings, indicators of vectors made by hand, and what they predict."""

import json

import numpy as np
import pytest

from llmcond.bundled import PRETRAINED
from llmcond.conditions import Condition
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation import condition_checks
from llmcond.evaluation.condition_checks import (
    INDICATORS,
    Calibration,
    check_conditions,
    find_calibration,
    indicators,
    rewordings,
    sample_texts,
    unrelated,
)

TEXTS = [f"text {i}" for i in range(40)]
#: Predicts 50 % to 100 % from the agreement of rewordings.
CALIBRATION = Calibration(0.5, {"effect_rewordings": 0.5}, 0.1, {})


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("the city", ["What is the city?", "city"]),
        ("city", ["What is the city?", "the city"]),
        ("What is the city?", ["city", "the city"]),
        ("how many people there are", ["How many people there are?", "it says how many people"]),
        ("Where is it?", ["it says where is it", "where is it"]),
        ("A", ["What is the A?", "the A"]),
    ],
)
def test_rewordings_are_two_others(condition, expected):
    made = rewordings(condition)
    assert [one[: len(text)] for one, text in zip(made, expected, strict=True)] == expected
    assert condition not in made


def test_rewordings_have_the_values_of_the_condition():
    made = rewordings(Condition("the cuisine", ["Thai", "Greek"]))
    assert made == ["What is the cuisine, such as Thai, Greek", "cuisine, such as Thai, Greek"]


def test_unrelated_conditions_share_no_word():
    assert len(unrelated("the mood")) == len(unrelated("the colour of the people")) == 3
    assert "the number of people" not in unrelated("the number of guests")


def test_texts_are_sampled_once_each_and_by_the_seed():
    assert sample_texts([*TEXTS, *TEXTS], 40) == TEXTS
    drawn = sample_texts(TEXTS, 30)
    assert drawn == sample_texts(TEXTS, 30) == sorted(drawn, key=TEXTS.index)
    assert drawn != sample_texts(TEXTS, 30, seed=1)


def noise(*words, dim=16):
    return np.random.default_rng([len(words[0]), *map(ord, "".join(words))]).normal(size=dim)


def encode_by(aspect):
    """Vectors of (text, condition) rows: what the text is about, and an aspect where asked for."""

    def encode(rows):
        made = []
        for text, condition in rows:
            asked = "mood" in condition and aspect
            value = noise(str(int(text.split()[1]) % 3)) if asked else 0
            made.append(noise(text) + 0.5 * noise(text, condition) + 3 * value)
        return np.array(made)

    return encode


def test_a_condition_that_brings_out_an_aspect_is_above_one_that_does_not():
    works, fails = (
        check_conditions(TEXTS, ["the mood"], encode_by(aspect), CALIBRATION)[0]
        for aspect in (True, False)
    )
    for name in ("effect", "effect_rewordings", "spread", "spread_above"):
        assert works.indicators[name] > fails.indicators[name] + 0.1
    assert works.indicators["unrelated"] < fails.indicators["unrelated"] - 0.1
    assert works.expected.value > fails.expected.value + 0.2
    assert (works.verdict, fails.verdict) == ("works", "not expected to work")
    assert "give example values (--values)" in fails.sentence()
    assert works.to_json()["expected_accuracy_ci"][0] < works.to_json()["expected_accuracy"]


def test_vectors_that_do_not_vary_have_no_agreement():
    same = np.ones((5, 3))
    assert indicators(same, [same], [same]) == dict.fromkeys(INDICATORS, 0.0)


def test_scale_and_shift_of_vectors_do_not_matter():
    parts = [np.random.default_rng(i).normal(size=(30, 8)) for i in range(5)]
    own, moved = (
        indicators(one[0], one[1:3], one[3:]) for one in (parts, [2 * p + 1 for p in parts])
    )
    assert own == pytest.approx(moved)


def test_expected_accuracy_stays_between_none_and_all():
    expected = CALIBRATION.expect({"effect_rewordings": 1.4})
    assert (expected.low, expected.value, expected.high) == (1, 1, 1)
    assert CALIBRATION.expect({"effect_rewordings": -3}).high == 0


def test_few_texts_are_not_encoded():
    checks = check_conditions(TEXTS[:19] * 2, ["the mood"], None, CALIBRATION)
    assert checks[0].verdict == "too few texts to tell"
    assert checks[0].to_json()["expected_accuracy"] is None
    assert "at least 20" in checks[0].sentence()


def test_calibration_of_a_run_is_read_and_checked(tmp_path, monkeypatch):
    written = CALIBRATION.to_json()
    path = tmp_path / "conditions.json"
    path.write_text(json.dumps(written))
    assert find_calibration(tmp_path) == CALIBRATION
    monkeypatch.setattr(condition_checks, "bundled", lambda _: tmp_path)
    (tmp_path / PRETRAINED).mkdir()
    path.rename(tmp_path / PRETRAINED / "conditions.json")
    assert find_calibration(tmp_path).is_own is False
    assert find_calibration(tmp_path / PRETRAINED).is_own is True
    for damage, message in [
        ({"coefficients": {"luck": 1.0}}, "'luck', no indicator"),
        ({"intercept": "0.5"}, "intercept = '0.5'"),
        ({"format": 2}, "newer version"),
    ]:
        path.write_text(json.dumps(written | damage))
        with pytest.raises(LlmcondError, match=message):
            find_calibration(tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match="not a readable JSON file"):
        find_calibration(tmp_path)


def test_without_any_calibration_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(condition_checks, "bundled", lambda _: tmp_path)
    assert find_calibration(tmp_path / "run") is None
