"""NOTICE, cards and docs/licences.md have the works in models/credits.toml."""

import runpy
import sys

import pytest
from helpers.paths import ROOT


def run_script(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["make_credits", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts" / "make_credits.py"), run_name="__main__")
    return stopped.value.code


def test_all_credits_are_up_to_date(monkeypatch, capsys):
    assert run_script(monkeypatch, "--check") == 0, capsys.readouterr().out


def test_change_of_a_work_makes_every_text_outdated(monkeypatch, capsys):
    original = runpy.run_path(str(ROOT / "scripts" / "make_credits.py"))
    table = original["read_table"]()
    table["works"][0]["authors"] = "somebody else"
    monkeypatch.setattr("tomllib.loads", lambda text: table)
    assert run_script(monkeypatch, "--check") == 1
    outdated = {line.removesuffix(" is outdated") for line in capsys.readouterr().out.splitlines()}
    models = {f"models/{name}/{file}" for name in table["models"] for file in FILES}
    assert outdated == {"NOTICE", "docs/licences.md", *models}


FILES = ("credits.json", "README.md")
