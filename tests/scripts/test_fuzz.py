"""Damaged inputs of every kind with fixed seeds; ``python scripts/fuzz.py`` tries more of them."""

import fuzz
import fuzz_services as services
import pytest


@pytest.mark.slow
def test_inputs_of_each_kind_cause_no_failures(capsys):
    code = fuzz.main(["--count", "24"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.count("| 2 | 0 |") == len(fuzz.KINDS) == 12


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
    monkeypatch.setitem(fuzz.KINDS, "none", lambda *_: fuzz.Command(["evaluate"]))
    failure = fuzz.try_input("none", 0, fuzz.Base(tmp_path))
    assert failure
    assert expected in failure


def test_filters_match_as_in_sqlite_and_wrong_hits_are_failures():
    years = {row["id"] for row in services.TEXT_ROWS if (row["year"] or 0) > 2020}
    assert services.matching_ids("year > 2020") == years
    for scores, searched, expected in (
        ((0.9, 0.8), 2, ""),
        ((None, None), 2, "not finite numbers"),
        ((0.8, 0.9), 2, "scores [0.8, 0.9]"),
        ((0.9,), 2, "1 hits of 2 searched"),
        ((0.9, 0.8), 3, "3 texts pass the filter, not 2"),
    ):
        hits = [{"id": f"t{i}", "score": score} for i, score in enumerate(scores, 1)]
        problem = services.check_hits({"results": hits, "searched": searched}, 2, {"t1", "t2"})
        assert bool(problem) == bool(expected)
        assert expected in problem
