"""``scripts/calibrate_conditions.py``: the texts that it samples, the fit, and a complete run."""

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


def make_sample(name, n=60):
    rng = random.Random(name)
    rows = [{key: rng.choice(values) for key, values in PARTS.items()} for _ in range(n)]
    texts = [AspectText(f"{' '.join(row.values())} {i}", row) for i, row in enumerate(rows)]
    return AspectSample(name, texts, {key: ConditionWordings(f"the {key}") for key in PARTS})


def test_sampled_triples_are_paired(script):
    sample = make_sample("crossed")
    result = script.sample_condition(sample, "where")
    assert script.sample_condition(sample, "where") == result
    assert len(result.texts) == len(set(result.texts)) == 48  # 16 of each of three values
    texts = [next(item for item in sample.texts if item.text == text) for text in result.texts]
    assert len(result.triples) > 100
    for triple in result.triples:
        others = [Triple(*triple, "where", other) for other in PARTS if other != "where"]
        assert any(is_valid(item, texts) for item in others)


def test_conditions_with_few_texts_or_single_value_are_left_out(script):
    sample = make_sample("few", n=20)
    assert script.sample_condition(sample, "where") is None
    same_value_texts = [AspectText(f"{i}", {"a": "same", "b": str(i % 3)}) for i in range(60)]
    conditions = {key: ConditionWordings(key) for key in "ab"}
    assert script.sample_condition(AspectSample("alike", same_value_texts, conditions), "a") is None


def test_accuracy_counts_nearer_text_and_half_for_ties(script):
    vectors = np.array([[1.0, 0], [1, 0.1], [0, 1], [0, 2]])
    triples = [(0, 1, 2), (0, 2, 1), (0, 2, 3)]  # right, wrong, and a tie
    assert script.accuracy_of(vectors, triples) == 0.5


def make_figures(script, n_sets=4, noise=0.01):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n_sets * 6):
        values = {name: float(rng.normal()) for name in INDICATORS}
        accuracy = 0.6 + 0.05 * sum(values.values())
        accuracy += float(rng.normal()) * noise
        rows.append(script.Figures("m", f"set{i % n_sets}", str(i), "c", 50, 99, accuracy, values))
    return rows


def test_fit_recovers_coefficients_and_predicts_held_out_sets(script):
    calibration = script.calibrate(make_figures(script), {"set0": "a", "set1": "a"}, 0)
    assert calibration.intercept == pytest.approx(0.6, abs=0.02)
    assert [*calibration.coefficients] == [*INDICATORS]
    assert [*calibration.coefficients.values()] == pytest.approx([0.05, 0.05], abs=0.02)
    assert calibration.measured["families"] == ["a", "set2", "set3"]
    for left_out in ("set", "family"):
        estimate = calibration.measured["spearman_left_out"][left_out]
        assert 0.9 < estimate["low"] <= estimate["value"] <= estimate["high"] <= 1
    assert 0.005 < calibration.half_width < 0.05


def test_held_out_set_does_not_affect_its_predictions(script):
    rows = make_figures(script)
    sets = [row.set for row in rows]
    before = script.predict(rows, sets)
    changed = [
        script.Figures(**{**vars(row), "accuracy": 0.0}) if row.set == "set0" else row
        for row in rows
    ]
    after = script.predict(changed, sets)
    in_set = np.array(sets) == "set0"
    assert np.allclose(before[in_set], after[in_set])
    assert not np.allclose(before[~in_set], after[~in_set])


def test_coefficients_are_not_negative(script):
    rows = make_figures(script)
    negated = [script.Figures(**{**vars(row), "accuracy": 1.2 - row.accuracy}) for row in rows]
    assert [*script.fit(negated)[1].values()] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_script_writes_calibration_that_commands_read(script, tiny_run, tmp_path, capsys):
    for name in ("one", "two"):
        sample = make_sample(name)
        texts = [{"text": text.text, "attrs": text.attributes} for text in sample.texts]
        conditions = {key: {"text": wordings.text} for key, wordings in sample.conditions.items()}
        (tmp_path / f"{name}.json").write_text(json.dumps({"texts": texts, "conds": conditions}))
    figures_path, out = tmp_path / "figures.jsonl", tmp_path / "made" / "conditions.json"
    out.parent.mkdir()
    arguments = ["--data", str(tmp_path), "--model", str(tiny_run), "--device", "cpu"]
    arguments += ["--figures", str(figures_path), "--out", str(out)]
    assert script.main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["measured"]["sets"] == {"one": 5, "two": 5}
    assert find_calibration(out.parent).is_of_model
    lines = figures_path.read_text().splitlines()
    assert len(lines) == 10
    assert script.main([*arguments, "--fit-only"]) == 0  # from the figures that were saved
    assert figures_path.read_text().splitlines() == lines
    assert json.loads(capsys.readouterr().out) == printed
    assert script.main([*arguments, "--only", "one"]) == 2
    assert "2 families are needed" in capsys.readouterr().err
