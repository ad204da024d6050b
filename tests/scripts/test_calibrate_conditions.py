"""``scripts/calibrate_conditions.py``: the texts it draws, the fit, and a whole run of it."""

import json
import random
from importlib import import_module

import numpy as np
import pytest
from helpers.paths import ROOT

from llmcond.data.aspects import AspectSample, AspectText, ConditionWordings, Triple, is_valid
from llmcond.evaluation.condition_checks import INDICATORS, find_calibration

pytestmark = pytest.mark.script("calibrate_conditions")

PARTS = {
    "who": ("men", "women", "children"),
    "where": ("beach", "park", "street"),
    "colour": ("red", "green", "blue"),
    "when": ("morning", "night", "rain"),
    "what": ("ride", "play", "read"),
}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("calibrate_conditions")


def made_set(name, n=60):
    rng = random.Random(name)
    rows = [{key: rng.choice(values) for key, values in PARTS.items()} for _ in range(n)]
    texts = [AspectText(f"{' '.join(row.values())} {i}", row) for i, row in enumerate(rows)]
    return AspectSample(name, texts, {key: ConditionWordings(f"the {key}") for key in PARTS})


def test_triples_that_are_drawn_are_paired(script):
    sample = made_set("crossed")
    drawn = script.sample_condition(sample, "where")
    assert script.sample_condition(sample, "where") == drawn
    assert len(drawn.texts) == len(set(drawn.texts)) == 48  # 16 of each of three values
    texts = [next(one for one in sample.texts if one.text == text) for text in drawn.texts]
    assert len(drawn.triples) > 100
    for triple in drawn.triples:
        others = [Triple(*triple, "where", other) for other in PARTS if other != "where"]
        assert any(is_valid(one, texts) for one in others)


def test_conditions_with_few_texts_or_one_value_are_left_out(script):
    sample = made_set("few", n=20)
    assert script.sample_condition(sample, "where") is None
    alike = [AspectText(f"{i}", {"a": "same", "b": str(i % 3)}) for i in range(60)]
    conditions = {key: ConditionWordings(key) for key in "ab"}
    assert script.sample_condition(AspectSample("alike", alike, conditions), "a") is None


def test_accuracy_is_that_of_the_nearer_text(script):
    vectors = np.array([[1.0, 0], [1, 0.1], [0, 1], [0, 2]])
    triples = [(0, 1, 2), (0, 2, 1), (0, 2, 3)]  # right, wrong, and a tie
    assert script.accuracy_of(vectors, triples) == 0.5


def figures(script, n_sets=4, noise=0.01):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n_sets * 6):
        values = {name: float(rng.normal()) for name in INDICATORS}
        accuracy = 0.6 + 0.05 * sum(values.values())
        accuracy += float(rng.normal()) * noise
        rows.append(script.Figures("m", f"set{i % n_sets}", str(i), "c", 50, 99, accuracy, values))
    return rows


def test_the_fit_finds_coefficients_and_predicts_sets_that_are_left_out(script):
    calibration = script.calibrate(figures(script), {"set0": "a", "set1": "a"}, 0)
    assert calibration.intercept == pytest.approx(0.6, abs=0.02)
    assert [*calibration.coefficients] == [*INDICATORS]
    assert [*calibration.coefficients.values()] == pytest.approx([0.05, 0.05], abs=0.02)
    assert calibration.measured["families"] == ["a", "set2", "set3"]
    for left_out in ("set", "family"):
        found = calibration.measured["spearman_left_out"][left_out]
        assert 0.9 < found["low"] <= found["value"] <= found["high"] <= 1
    assert 0.005 < calibration.half_width < 0.05


def test_a_set_that_is_left_out_does_not_change_its_own_predictions(script):
    rows = figures(script)
    sets = [row.set for row in rows]
    before = script.predict(rows, sets)
    changed = [
        script.Figures(**{**vars(row), "accuracy": 0.0}) if row.set == "set0" else row
        for row in rows
    ]
    after = script.predict(changed, sets)
    same = np.array(sets) == "set0"
    assert np.allclose(before[same], after[same])
    assert not np.allclose(before[~same], after[~same])


def test_no_coefficient_is_negative(script):
    rows = figures(script)
    turned = [script.Figures(**{**vars(row), "accuracy": 1.2 - row.accuracy}) for row in rows]
    assert [*script.fit(turned)[1].values()] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_the_script_writes_what_the_commands_read(script, tiny_run, tmp_path, capsys):
    for name in ("one", "two"):
        sample = made_set(name)
        texts = [{"text": text.text, "attrs": text.attributes} for text in sample.texts]
        conditions = {key: {"text": own.text} for key, own in sample.conditions.items()}
        (tmp_path / f"{name}.json").write_text(json.dumps({"texts": texts, "conds": conditions}))
    kept, out = tmp_path / "figures.jsonl", tmp_path / "made" / "conditions.json"
    out.parent.mkdir()
    given = ["--data", str(tmp_path), "--model", str(tiny_run), "--device", "cpu"]
    given += ["--figures", str(kept), "--out", str(out)]
    assert script.main(given) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["measured"]["sets"] == {"one": 5, "two": 5}
    assert find_calibration(out.parent).is_of_model
    lines = kept.read_text().splitlines()
    assert len(lines) == 10
    assert script.main([*given, "--fit-only"]) == 0  # from what was kept
    assert kept.read_text().splitlines() == lines
    assert json.loads(capsys.readouterr().out) == printed
    assert script.main([*given, "--only", "one"]) == 2
    assert "2 families are needed" in capsys.readouterr().err
