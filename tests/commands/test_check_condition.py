"""``llmcond check-condition``, and the check that ``cluster`` and ``search`` print."""

import csv
import json
import shutil

import pytest
from helpers.commands import run_json, run_rejected
from helpers.pages import ParsedPage

import llmcond
from llmcond.cli import run
from llmcond.evaluation.condition_checks import (
    INDICATORS,
    Calibration,
    ConditionCheck,
    find_calibration,
)
from llmcond.search import Index

#: Captions that differ in the number of people and in the place.
NUMBERS = ("A man", "A woman", "Two men", "Two girls", "Five people", "A crowd of people")
PLACES = ("at the beach", "in a kitchen", "on the street", "in the park", "on a boat", "at a desk")
CAPTIONS = [f"{who} {where}." for who in NUMBERS for where in PLACES]


@pytest.fixture
def captions(tmp_path):
    path = tmp_path / "captions.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("text",), *((text,) for text in CAPTIONS)])
    return path


@pytest.fixture
def calibrated_run(tiny_run, tmp_path):
    """A run with its own calibration, which ranked the conditions of other texts well."""
    run_folder = shutil.copytree(tiny_run, tmp_path / "run")
    measured = {"spearman_left_out": {"family": {"value": 0.6, "low": 0.4, "high": 0.7}}}
    calibration = Calibration(0.5, {"nearest": 0.5}, 0.1, measured)
    (run_folder / "conditions.json").write_text(json.dumps(calibration.to_json()))
    return run_folder


@pytest.fixture
def run_check(captions, capsys):
    def run_check(*arguments):
        return run_json(capsys, "check-condition", captions, "--device", "cpu", *arguments)

    return run_check


def test_relevant_condition_has_higher_indicators_than_nonsense(run_check):
    number, nonsense = run_check(
        *("--model", "minilm-csts", "--condition", "the number of people"),
        *("--condition", "the flavour of the warranty"),
    )["checks"]
    assert number["indicators"].keys() == INDICATORS.keys()
    for name in INDICATORS:
        assert number["indicators"][name] > nonsense["indicators"][name]
    assert number["texts"] == len(CAPTIONS)


def test_output_has_verdict_and_calibration(captions, tiny_run, capsys):
    arguments = ["check-condition", str(captions), "--run", str(tiny_run), "--device", "cpu"]
    arguments += ["--condition", "the place", "--values", "beach, park"]
    assert run(arguments) == 0
    printed = capsys.readouterr()
    words = " ".join(printed.out.split())
    assert "the place: " in words
    assert "predicted accuracy" in words
    assert "nearest" in words
    assert "calibrated on minilm-conditions, not on this run" in printed.err


def test_function_checks_texts_in_memory(tiny_run):
    result = llmcond.check_condition(texts=CAPTIONS, condition="the place", run=tiny_run)
    (check,) = result.checks
    assert check.expected.low <= check.expected.value <= check.expected.high
    assert result.to_json()["calibration"]["of_this_model"] is False
    assert "checks=<1 row>" in repr(result)


def test_too_few_distinct_texts_give_no_verdict(tiny_run):
    texts = CAPTIONS[:10] * 5
    (check,) = llmcond.check_condition(texts=texts, condition="the place", run=tiny_run).checks
    assert (check.verdict, check.expected, check.n_texts) == ("too few texts to tell", None, 10)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--condition", " "), "--condition is empty"),
        (("--condition", "a", "--text", "title"), "title"),
        (("--condition", "a", "--seed", "-1"), "seed"),
    ],
)
def test_invalid_input_is_reported_in_one_line(captions, tiny_run, capsys, flags, message):
    assert message in run_rejected(capsys, "check-condition", captions, "--run", tiny_run, *flags)


def test_cluster_prints_and_reports_condition_check(captions, calibrated_run, tmp_path, capsys):
    arguments = ["cluster", str(captions), "--run", str(calibrated_run), "--condition", "the place"]
    page = tmp_path / "page.html"
    arguments += ["--clusters", "3", "--device", "cpu", "--report", str(page)]
    assert run(arguments) == 0
    assert "the place: the texts form clear groups under this" in capsys.readouterr().err
    sentence = "Check without labels: the texts form clear groups under this condition (predicted"
    assert sentence in ParsedPage(page.read_text("utf-8")).visible_text
    assert run([*arguments, "--no-check"]) == 0
    assert "predicted accuracy" not in capsys.readouterr().err
    assert "Check without labels" not in page.read_text("utf-8")


def test_search_prints_condition_check(captions, calibrated_run, tmp_path, capsys):
    out = tmp_path / "index"
    run_json(capsys, "index", captions, "--out", out, "--run", calibrated_run, "--device", "cpu")
    arguments = ["search", str(out), "A dog", "--condition", "the place", "--device", "cpu"]
    assert run(arguments) == 0
    stderr = capsys.readouterr().err
    index = Index.open(out, device="cpu")
    assert f"the place: {index.check('the place').sentence()}" in stderr
    vectors = index.embedder.encode(CAPTIONS, "the place")
    expected = ConditionCheck.of("the place", vectors, find_calibration(calibrated_run))
    assert index.check("the place").indicators == pytest.approx(expected.indicators, abs=0.01)
    assert run([*arguments, "--no-check"]) == 0
    assert "predicted accuracy" not in capsys.readouterr().err


def test_calibration_at_chance_level_is_not_trusted(captions, calibrated_run, capsys):
    path = calibrated_run / "conditions.json"
    path.write_text(path.read_text().replace('"low": 0.4', '"low": -0.1'))
    common = [str(captions), "--run", str(calibrated_run), "--condition", "the place"]
    assert run(["check-condition", *common]) == 0
    assert "do not rely on the verdicts" in capsys.readouterr().err
    assert run(["cluster", *common, "--clusters", "3"]) == 0
    assert "predicted accuracy" not in capsys.readouterr().err
