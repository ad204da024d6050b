"""Run commands in this process, as a user would."""

import json
import re
from pathlib import Path

import pytest

from llmcond.cli import run


def ok(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    """Run a command that must succeed with --json, and return its one object."""
    assert run([str(argument) for argument in arguments] + ["--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must be refused as wrong input, and return its one line."""
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("llmcond: error: ")]
    assert captured.out == ""
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0].removeprefix("llmcond: error: ")


def embedded(page: Path) -> dict:
    """Return what a page of results holds for its script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    return json.loads(found[1])
