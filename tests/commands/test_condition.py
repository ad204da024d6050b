"""``llmcond check-condition`` and the check that other commands print, and ``llmcond explain``."""

import csv
import json
import shutil

import pytest
from helpers.commands import run_json, run_rejected
from helpers.pages import ParsedPage

import llmcond
from llmcond.cli import run
from llmcond.evaluation.analyses import INDICATORS, Calibration
from llmcond.search import Index

#: Captions that differ in the number of people and in the place.
NUMBERS = ("A man", "A woman", "Two men", "Two girls", "Five people", "A crowd of people")
SCENES = ("at the beach", "in a kitchen", "on the street", "in the park", "on a boat", "at a desk")
CAPTIONS = [f"{who} {where}." for who in NUMBERS for where in SCENES]


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


def test_relevant_condition_has_higher_indicators_than_nonsense(captions, capsys):
    conditions = ["--condition", "the number of people", "--condition", "the flavour of a warranty"]
    flags = ["--model", "minilm-csts", "--device", "cpu", *conditions]
    number, nonsense = run_json(capsys, "check-condition", captions, *flags)["checks"]
    assert number["indicators"].keys() == INDICATORS.keys()
    for name in INDICATORS:
        assert number["indicators"][name] > nonsense["indicators"][name]
    assert number["texts"] == len(CAPTIONS)


def test_verdict_is_printed_with_its_calibration(captions, tiny_run, capsys):
    arguments = ["check-condition", str(captions), "--run", str(tiny_run), "--device", "cpu"]
    assert run([*arguments, "--condition", "the place", "--values", "beach, park"]) == 0
    printed = capsys.readouterr()
    words = " ".join(printed.out.split())
    assert all(text in words for text in ("the place: ", "predicted accuracy", "nearest"))
    assert "calibrated on minilm-conditions and not on this model" in words
    result = llmcond.check_condition(texts=CAPTIONS, condition="the place", run=tiny_run)
    (check,) = result.checks
    assert check.expected.low <= check.expected.value <= check.expected.high
    assert result.to_json()["calibration"]["of_this_model"] is False
    assert "checks=<1 row>" in repr(result)
    texts = CAPTIONS[:10] * 5
    (check,) = llmcond.check_condition(texts=texts, condition="the place", run=tiny_run).checks
    assert (check.verdict, check.expected, check.n_texts) == ("too few texts to tell", None, 10)


def test_cluster_and_search_print_condition_check(captions, calibrated_run, tmp_path, capsys):
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
    index = ("index", captions, "--out", tmp_path / "index", "--run", calibrated_run)
    run_json(capsys, *index, "--device", "cpu")
    assert run(["search", str(tmp_path / "index"), "A dog", "--condition", "the place"]) == 0
    sentence = Index.open(tmp_path / "index", device="cpu").check("the place").sentence()
    assert f"the place: {sentence}" in capsys.readouterr().err


def test_calibration_at_chance_level_is_not_trusted(captions, calibrated_run, capsys):
    path = calibrated_run / "conditions.json"
    path.write_text(path.read_text().replace('"low": 0.4', '"low": -0.1'))
    common = [str(captions), "--run", str(calibrated_run), "--condition", "the place"]
    assert run(["check-condition", *common]) == 0
    assert "do not rely on the verdicts" in capsys.readouterr().err
    assert run(["cluster", *common, "--clusters", "3"]) == 0
    assert "predicted accuracy" not in capsys.readouterr().err


# -- explain -----------------------------------------------------------------------------------

SENTENCE = "three women sit on the beach"


def test_output_of_command_is_that_of_function(tiny_run, capsys, tmp_path):
    condition = llmcond.Condition("the place", ["beach", "park"])
    options = {"condition": [condition], "run": tiny_run, "device": "cpu", "to": "two dogs sit"}
    explanation = llmcond.explain(sentence=SENTENCE, out=tmp_path / "a.html", **options)
    assert (tmp_path / "a.html").is_file()
    assert (tmp_path / "a-data.csv").is_file()
    command = ("explain", SENTENCE, "--run", tiny_run, "--device", "cpu", "--to", "two dogs sit")
    flags = ("--condition", "the place", "--values", "beach, park")
    result = run_json(capsys, *command, *flags)
    assert result == explanation.to_json()
    assert (result["sentence"], result["to"]) == (SENTENCE, "two dogs sit")
    assert (result["method"], result["prompt"]) == ("leave-one-out", "concat-sent-cond")
    (explained,) = result["explanations"]
    assert (explained["condition"], explained["values"]) == ("the place", ["beach", "park"])
    assert [token["token"] for token in explained["tokens"]] == SENTENCE.split()
    first = explained["tokens"][0]
    assert first.keys() == {"token", "start", "end", "special", "contribution"}
    assert (first["start"], first["end"], first["special"]) == (0, 5, False)
    assert run([*map(str, command), *flags]) == 0
    assert "the place" in capsys.readouterr().out


def test_cross_encoder_explains_similarities_only(tiny_bert, data, tmp_path, capsys):
    folder = tmp_path / "cross"
    settings = {"pooling": "mean", "dtype": "float32", "epochs": 1, "rank": 4, "device": "cpu"}
    llmcond.train_cross(model=str(tiny_bert), data=str(data), run=folder, **settings)
    line = ["explain", SENTENCE, "--condition", "the place", "--run", folder, "--device", "cpu"]
    assert "Give a second sentence (--to SENTENCE)" in run_rejected(capsys, *line)
    result = run_json(capsys, *line, "--to", "two dogs sit")
    cross = llmcond.load_cross_encoder(folder, device="cpu")
    texts = [SENTENCE, SENTENCE.removeprefix("three ")]
    whole, without = cross.similarity(texts, ["two dogs sit"] * 2, "the place")
    (explained,) = result["explanations"]
    assert explained["similarity"] == pytest.approx(whole, abs=1e-5)
    assert explained["tokens"][0]["contribution"] == pytest.approx(whole - without, abs=1e-5)
