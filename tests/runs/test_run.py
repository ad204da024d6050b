"""Runs with damaged records: a one-line error names the file, without a traceback."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json

from llmcond.cli import run
from llmcond.errors import LlmcondError
from llmcond.runs import open_run


def change_record(path, keys, value):
    record = json.loads(path.read_text())
    parent = record
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] = value
    path.write_text(json.dumps(record))


def failure_message(capsys, *arguments):
    """Return the one-line error message of a command that fails."""
    assert run([str(argument) for argument in arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.startswith("llmcond: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("format",), 0),
        (("format",), -1),
        (("format",), True),
        (("task",), 3),
        (("encoder",), []),
        (("encoder", "name"), None),
        (("encoder", "model"), 3),
        (("encoder", "revision"), {}),
        (("encoder", "default_prompt"), None),
        (("encoder", "identity"), "x"),
        (("encoder", "identity", "max_length"), "64"),
        (("encoder", "identity", "dtype"), "float99"),
        (("encoder", "identity", "more"), 1),
        (("store_dtype",), "int8"),
        (("data",), {}),
        (("data", "rows"), ["train"]),
        (("data", "rows"), {"train": 3}),
        (("data", "columns"), {"label": 1}),
        (("data", "scale", "low"), "1"),
        (("data", "split_seed"), None),
        (("data", "unrated"), None),
        (("prompts",), []),
        (("prompts", "concat-sent-cond"), None),
        (("prompts", "concat-sent-cond", "prompt"), []),
        (("prompts", "concat-sent-cond", "prompt", "conditional"), 3),
        (("prompts", "concat-sent-cond", "prompt", "name"), "\x1b[31mx"),
    ],
)
def test_damaged_manifest_is_reported(capsys, run_copy, keys, value):
    change_record(run_copy / "run.json", keys, value)
    line = failure_message(capsys, "fit-head", "--head", "pca", "--dim", "4", "--run", run_copy)
    assert str(run_copy) in line


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("recipe",), None),
        (("recipe", "name"), 3),
        (("encoder",), []),
        (("encoder", "identity"), {}),
        (("prompts",), {}),
        (("prompts",), [3]),
        (("prompts",), []),
        (("fit",), None),
        (("zero_shot",), 3),
        (("fit", "trained_on"), "dev"),
        (("subtract",), "yes"),
        (("store_dtype",), None),
    ],
)
@pytest.mark.parametrize("named", [(), ("--head", "pca")])
def test_damaged_head_is_reported(capsys, run_copy, keys, value, named):
    run_json(capsys, "fit-head", "--head", "pca", "--dim", "4", "--name", "p", "--run", run_copy)
    change_record(run_copy / "heads/p/head.json", keys, value)
    assert str(run_copy) in failure_message(capsys, "evaluate", "--run", run_copy, *named)


@pytest.mark.parametrize("table", [{"a": [1]}, {"split": [None]}, None])
def test_damaged_rows_are_reported(capsys, run_copy, table):
    path = run_copy / "rows.parquet"
    if table is None:
        pq.write_table(pq.read_table(path).slice(3), path)
    else:
        pq.write_table(pa.table(table), path)
    assert str(path) in failure_message(capsys, "evaluate", "--run", run_copy)


def test_damaged_store_error_says_what_to_delete(capsys, run_copy):
    (store,) = run_copy.glob("features/*")
    for file in store.glob("vectors.lance/data/*"):
        content = bytearray(file.read_bytes())
        content[-200:] = bytes(200)
        file.write_bytes(content)
    line = failure_message(capsys, "evaluate", "--run", run_copy)
    assert f"{store / 'vectors.lance'} cannot be read" in line
    assert f"delete {store} and run" in line
    (store / "store.json").write_text('{"format": true}')
    with pytest.raises(LlmcondError, match="states no format"):
        open_run(run_copy).store()


def test_lance_panic_over_damaged_store_manifest_is_reported(capsys, run_copy):
    (store,) = run_copy.glob("features/*")
    for file in store.glob("vectors.lance/_versions/*.manifest"):
        content = file.read_bytes()
        file.write_bytes(content[:40] + content[80:])
    assert "cannot be read" in failure_message(capsys, "evaluate", "--run", run_copy)


def test_damaged_fit_of_sweep_is_repeated(capsys, run_copy):
    arguments = (
        "sweep",
        "--run",
        run_copy,
        "--head",
        "linear",
        "--set",
        "epochs=1",
        "--seeds",
        "2",
    )
    arguments = (*arguments, "--workers", "1")
    results = run_json(capsys, *arguments)["results"]
    first, second = sorted((run_copy / "sweep").iterdir())
    for content in ("{", "[]", None):
        if content is None:
            change_record(first, ("fit",), {"curve": 3})
            change_record(second, ("dev_score",), "0.5")
        else:
            first.write_text(content)
            second.write_text(json.dumps({**json.loads(second.read_text()), "recipe": None}))
        assert run([str(argument) for argument in (*arguments, "--json")]) == 0
        captured = capsys.readouterr()
        assert captured.err.count(" The fit is repeated.") == 2
        assert json.loads(captured.out)["results"] == results
