"""Runs with damaged records: a one-line error names the file, without a traceback."""

import json
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json

from llmcond.base.errors import LlmcondError
from llmcond.cli import run
from llmcond.runs import open_run


@contextmanager
def changed_record(path, keys, value):
    """Change a value of a JSON file, whose nested keys are separated by dots."""
    before = path.read_text()
    record = json.loads(before)
    *parents, name = keys.split(".")
    parent = record
    for key in parents:
        parent = parent[key]
    parent[name] = value
    path.write_text(json.dumps(record))
    yield
    path.write_text(before)


@pytest.fixture
def read_error(capsys, run_copy):
    """Return a function that returns the one-line error of a command that fails with the run."""

    def fail(*arguments):
        assert run([*map(str, arguments), "--run", str(run_copy)]) in (1, 2)
        captured = capsys.readouterr()
        assert captured.err.startswith("llmcond: error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return fail


def test_damaged_manifest_is_reported(run_copy, read_error):
    for keys, value in (
        ("format", True),
        ("task", 3),
        ("encoder.name", None),
        ("encoder.identity.max_length", "64"),
        ("encoder.identity.dtype", "float99"),
        ("store_dtype", "int8"),
        ("data.scale.low", "1"),
        ("prompts.concat-sent-cond.prompt.conditional", 3),
        ("prompts.concat-sent-cond.prompt.name", "\x1b[31mx"),
    ):
        with changed_record(run_copy / "run.json", keys, value):
            assert str(run_copy) in read_error("fit-head", "--head", "pca", "--dim", "4"), keys


def test_damaged_head_is_reported(capsys, run_copy, read_error):
    run_json(capsys, "fit-head", "--head", "pca", "--dim", "4", "--name", "p", "--run", run_copy)
    for keys, value in (
        ("recipe.name", 3),
        ("encoder.identity", {}),
        ("prompts", [3]),
        ("fit.trained_on", "dev"),
        ("subtract", "yes"),
        ("store_dtype", None),
    ):
        with changed_record(run_copy / "heads/p/head.json", keys, value):
            for options in ((), ("--head", "pca")):
                assert str(run_copy) in read_error("evaluate", *options), keys


def test_damaged_rows_are_reported(run_copy, read_error):
    path = run_copy / "rows.parquet"
    for table in (pq.read_table(path).slice(3), pa.table({"a": [1]}), pa.table({"split": [None]})):
        pq.write_table(table, path)
        assert str(path) in read_error("evaluate")


def test_damaged_store_error_says_what_to_delete(run_copy, read_error):
    (store,) = run_copy.glob("features/*")
    for file in store.glob("vectors.lance/data/*"):
        content = bytearray(file.read_bytes())
        content[-200:] = bytes(200)
        file.write_bytes(content)
    line = read_error("evaluate")
    assert f"{store / 'vectors.lance'} cannot be read" in line
    assert f"delete {store} and run" in line
    changed = changed_record(store / "store.json", "format", True)
    with changed, pytest.raises(LlmcondError, match="states no format"):
        open_run(run_copy).store()
    for file in store.glob("vectors.lance/_versions/*.manifest"):
        content = file.read_bytes()
        file.write_bytes(content[:40] + content[80:])  # Lance panics
    assert "cannot be read" in read_error("evaluate")
