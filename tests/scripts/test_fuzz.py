"""Damaged inputs of every kind with fixed seeds; ``python scripts/fuzz.py`` tries more of them."""

import fuzz
import pytest


@pytest.mark.slow
def test_inputs_of_each_kind_cause_no_failures(capsys):
    code = fuzz.main(["--count", "16"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.count("| 2 | 0 |") == len(fuzz.KINDS) == 8


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("return 3", "exit code 3"),
        ("sys.stderr.write('Traceback (most')", "Traceback (most"),
        ("return 1", ""),  # without an error message
    ],
)
def test_exceptions_tracebacks_and_silent_errors_are_failures(
    monkeypatch, tmp_path, body, expected
):
    names = {"sys": __import__("sys")}
    exec(f"def run(command):\n    {body}\n    return 0", names)
    monkeypatch.setattr("llmcond.cli.run", names["run"])
    monkeypatch.setitem(fuzz.FILES, "none", lambda *_: ["evaluate"])
    failure = fuzz.try_input("none", 0, tmp_path)
    assert failure
    assert expected in failure
