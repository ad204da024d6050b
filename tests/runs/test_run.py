"""Runs with damaged records: a one-line error names the file, without a traceback."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.checkpoints import change_json
from helpers.commands import run_json

from llmcond.cli import run


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


def test_damaged_records_and_rows_are_reported(capsys, run_copy, read_error):
    fit = ("fit-head", "--head", "pca", "--dim", "4")
    run_json(capsys, *fit, "--name", "p", "--run", run_copy)
    manifest, head = run_copy / "run.json", run_copy / "heads/p/head.json"
    for path, changes, command in (
        (manifest, {"task": 3}, fit),
        (manifest, {"encoder": {"name": None}}, fit),
        (manifest, {"prompts": {"concat-sent-cond": {"prompt": {"name": "\x1b[31mx"}}}}, fit),
        (head, {"encoder": {"identity": {}}}, ("evaluate",)),
        (head, {"prompts": [3]}, ("evaluate", "--head", "pca")),
    ):
        text = path.read_text()
        change_json(path, **changes)
        assert str(run_copy) in read_error(*command), changes
        path.write_text(text)
    path = run_copy / "rows.parquet"
    for table in (pq.read_table(path).slice(3), pa.table({"a": [1]})):
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
    for file in store.glob("vectors.lance/_versions/*.manifest"):
        content = file.read_bytes()
        file.write_bytes(content[:40] + content[80:])  # Lance panics
    assert "cannot be read" in read_error("evaluate")
