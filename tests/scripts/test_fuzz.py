"""Damaged files of every kind, by fixed seeds; the whole number is `python scripts/fuzz.py`."""

import random
from importlib import import_module

import pytest
from helpers.paths import ROOT


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("fuzz")


def test_some_inputs_of_each_kind(fuzz, capsys):
    code = fuzz.main(["--count", "60"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "| store | 10 | 0 |" in out


def test_a_seed_gives_the_same_input(fuzz):
    text = '{"a": {"b": [1, 2, {"c": null}]}, "d": "x"}'
    changed = [fuzz.change_json(random.Random(seed), text) for seed in range(60)]
    assert changed == [fuzz.change_json(random.Random(seed), text) for seed in range(60)]
    assert len(set(changed)) > 30


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("return 3", "exit code 3"),
        ("sys.stderr.write('Traceback (most')", "Traceback (most"),
        ("return 1", ""),  # without a word
    ],
)
def test_what_is_a_failure(fuzz, monkeypatch, tmp_path, body, said):
    names = {"sys": __import__("sys")}
    exec(f"def run(command):\n    {body}\n    return 0", names)
    monkeypatch.setattr("llmcond.cli.run", names["run"])
    monkeypatch.setitem(fuzz.KINDS, "none", lambda *_: ["evaluate"])
    assert said in fuzz.try_one("none", 0, fuzz.Base(tmp_path))
    assert fuzz.try_one("none", 0, fuzz.Base(tmp_path))


def test_an_input_that_hangs_and_one_that_kills_its_process(fuzz, monkeypatch, tmp_path):
    monkeypatch.setattr(fuzz, "LIMIT_SECONDS", -1)
    worker = fuzz.Worker(tmp_path)
    try:
        worker.give("data", 0)
        assert worker.answer() == "no end after -1 s"
        monkeypatch.setattr(fuzz, "LIMIT_SECONDS", 60)
        worker.pipe.send(("no such kind", 0))
        worker.asked, worker.until = ("no such kind", 0), float("inf")
        worker.pipe.poll(60)
        assert worker.answer() == "the process died (1)"
    finally:
        worker.end()
