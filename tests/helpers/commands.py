"""Run commands in this process, and read their output."""

import csv
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from llmcond.cli import run


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    """Run a command with --json, check that it succeeds, and return its JSON object."""
    assert run([str(argument) for argument in arguments] + ["--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def run_rejected(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command, check that it reports invalid input, and return its one-line message."""
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("llmcond: error: ")]
    assert captured.out == ""
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0].removeprefix("llmcond: error: ")


def write_pairs(path: str | Path, rows: Iterable[Sequence[object]]) -> Path:
    """Write a CSV file of pairs with the standard columns."""
    lines = ["sentence1,sentence2,condition,label", *(",".join(map(str, row)) for row in rows)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Path(path)


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with Path(path).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def read_page_data(page: Path) -> dict:
    """Return the data that an HTML page contains for its script."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    return json.loads(match[1])
