"""Comparison of two recordings of the commands' JSON."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "golden.py"


@pytest.fixture(scope="module")
def golden():
    spec = importlib.util.spec_from_file_location("golden", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_records(folder, **records):
    folder.mkdir()
    for name, value in records.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_records_that_differ_only_in_times_are_equal(golden, tmp_path):
    old = write_records(tmp_path / "old", evaluate={"mrr": 0.5, "nan": float("nan"), "seconds": 1})
    new = write_records(tmp_path / "new", evaluate={"mrr": 0.5, "nan": float("nan"), "seconds": 2})
    assert golden.compare(old, new) == 0


def test_each_difference_is_listed(golden, tmp_path, capsys):
    old = write_records(tmp_path / "old", evaluate={"results": [{"mrr": 0.5, "n": 3}]}, sweep={})
    new = write_records(tmp_path / "new", evaluate={"results": [{"mrr": 0.25, "k": 3}]})
    assert golden.compare(old, new) == 4
    output = capsys.readouterr().out
    assert "evaluate.results[0].mrr: 0.5 -> 0.25" in output
    assert "evaluate.results[0].n: only in the old record" in output
    assert "evaluate.results[0].k: only in the new record" in output
    assert "sweep: missing" in output
