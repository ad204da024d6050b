"""Options that commands share: how texts are read, and ``--values`` with ``--condition``."""

import io
import sys
from pathlib import Path

import pytest
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.cli import run

PAIR = ("two men play in the park", "children sit at the beach")
PLACE = ("--condition", "the place")


def test_values_change_similarity_under_condition(tiny_run, capsys):
    command = ("similarity", *PAIR, "--run", tiny_run, "--device", "cpu")
    values = ("--values", 'park, "Paris, Texas"', "--values", "")
    options = (*PLACE, "--condition", "the number of people", *values)
    first, second = run_json(capsys, *command, *options)["similarities"]
    assert (first["condition"], first["values"]) == ("the place", ["park", "Paris, Texas"])
    assert set(second) == {"condition", "similarity"}
    embedder = llmcond.load_embedder(tiny_run, device="cpu")
    condition = llmcond.Condition("the place", ("park", "Paris, Texas"))
    expected = embedder.similarity(*PAIR, condition)
    assert first["similarity"] == pytest.approx(expected, abs=1e-5)
    (without_values,) = run_json(capsys, *command, *PLACE)["similarities"]
    assert abs(without_values["similarity"] - first["similarity"]) > 1e-4
    assert run([str(part) for part in (*command, *PLACE, "--values", "park, beach")]) == 0
    cells = capsys.readouterr().out.split()
    assert cells[:3] == ["condition", "values", "similarity"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("embed", "-", "--out", "v.npy", "--condition-text", "the place"),
        ("embed", "-", "--out", "v.lance", "--condition-text", "the place"),
        ("cluster", "-", *PLACE),
        ("check-condition", "-", *PLACE),
        ("index", "-", "--out", "index"),
        ("annotate", "-", "--endpoint", "http://127.0.0.1:9/v1", "--model", "none",
         "--out", "rated.csv", "--propose", "2"),
        ("answers", "-", *PLACE, "--server", "http://127.0.0.1:9/v1", "--model", "none"),
    ],
)  # fmt: skip
def test_every_command_reads_standard_input_with_the_options(
    in_tmp, capsys, monkeypatch, arguments
):
    html = "line 2 of standard input: text is empty without its HTML"
    for content, options, message in (
        (b"a\ncaf\xe9\n", (), "standard input is not UTF-8: byte 0xe9 in line 2 cannot be read."),
        (b"a\n<br>\n", ("--strip-html",), html),
        (b"text|n\na\n", ("--delimiter", "|"), "standard input line 2 has 1 field"),
        (b"a,b\nc,d\n", ("--text", "x"), "standard input has no column 'x'; it has 'a', 'b'"),
        (b"a\n", ("--encoding", "hex"), "--encoding is 'hex'"),
        (b"a\n", ("--delimiter", ";;"), "--delimiter is ';;'; expected one character, such as"),
        (b"", (), "standard input is empty"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert message in run_rejected(capsys, *arguments, *options)
    assert not any(Path().iterdir())
