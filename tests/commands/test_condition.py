"""``llmcond explain``."""

import pytest
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.cli import run

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
