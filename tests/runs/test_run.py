"""Runs whose features are in another folder or a bucket, and runs with damaged files."""

import json
import shutil
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.buckets import ACCESS_KEY, SECRET_KEY
from helpers.checkpoints import change_json
from helpers.commands import run_json, run_rejected

from llmcond.cli import run
from llmcond.runs import open_run

pytestmark = pytest.mark.usefixtures("in_tmp")


@pytest.fixture
def extract(capsys, model, data):
    """Return a function that extracts with a tiny encoder on the CPU into a run."""

    def extract_into(folder, *options, command=run_json):
        flags = "--device cpu --dtype float32 --pooling mean --prompt concat-sent-cond".split()
        arguments = ("--model", model, "--data", data, *flags, "--run", folder, *options)
        return command(capsys, "extract", *arguments)

    return extract_into


def count_computed(result):
    (extracted,) = result["prompts"].values()
    return extracted["n_computed"]


def read_all_files(folder):
    return b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())


def read_vectors(folder):
    """Return the vectors of a run's store by key, after checking that no key occurs twice."""
    location = open_run(Path(folder)).store()._location
    table = lance.dataset(location.uri, storage_options=location.options).to_table()
    keys = table["key"].to_pylist()
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, np.array(table["vector"].to_pylist()), strict=True))


def test_every_command_reads_and_writes_features_in_bucket(capsys, extract, bucket):
    extract("plain")
    planned = extract("elsewhere", "--store", bucket, "--plan")
    assert not Path("elsewhere").exists()
    n_computed = count_computed(extract("elsewhere", "--store", bucket))
    assert planned["n_missing"]["concat-sent-cond"] == n_computed > 100
    assert json.loads(Path("elsewhere/run.json").read_text())["store"] == bucket
    assert not Path("elsewhere/features").exists()
    assert count_computed(extract("elsewhere")) == 0
    scores = []
    for name in ("plain", "elsewhere"):
        settings = ("--set", "epochs=2", "batch_size=16")
        run_json(capsys, "fit-head", "--head", "linear", "--run", name, *settings)
        score = run_json(capsys, "evaluate", "--run", name, "--split", "dev")
        scores.append({**score, "run": None, "created": None})
    assert scores[0] == scores[1]
    plain, elsewhere = read_vectors("plain"), read_vectors("elsewhere")
    assert plain.keys() == elsewhere.keys()
    assert all(np.array_equal(plain[key], elsewhere[key]) for key in plain)
    Path("texts.csv").write_text("sentence,condition\na dog in the rain,the weather\n")
    assert run(["embed", "texts.csv", "--run", "elsewhere", "--out", "x.npy"]) == 0
    assert len(read_vectors("elsewhere")) > len(plain)
    run_json(capsys, "export", "--run", "elsewhere", "--head", "none", "--out", "out")
    assert bucket.encode() not in read_all_files("out")
    secrets = (ACCESS_KEY.encode(), SECRET_KEY.encode())
    assert not any(secret in read_all_files(".") for secret in secrets)


def test_runs_can_share_a_folder_of_features(extract):
    extract("a", "--store", "shared")
    assert json.loads(Path("a/run.json").read_text())["store"] == str(Path("shared").resolve())
    assert count_computed(extract("b", "--store", "shared")) == 0
    shutil.move("a", "moved")
    assert count_computed(extract("moved")) == 0


def test_invalid_or_unreachable_store_is_reported(capsys, extract, bucket, monkeypatch):
    for store, expected in (
        ("s3://nobody/x", "there is no bucket s3://nobody"),
        (f"s3://{ACCESS_KEY}:{SECRET_KEY}@features/x", "recorded nowhere"),
    ):
        message = extract("r", "--store", store, command=run_rejected)
        assert expected in message
        assert SECRET_KEY not in message
        assert not Path("r").exists()
    extract("plain")
    message = extract("plain", "--store", bucket, command=run_rejected)
    assert f"stores features in {Path('plain/features').resolve()}, not in {bucket}." in message
    extract("r", "--store", bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert run(["fit-head", "--head", "linear", "--run", "r"]) == 1
    err = capsys.readouterr().err
    assert "cannot be reached" in err.splitlines()[-1]
    assert "Traceback" not in err


# -- damaged files ------------------------------------------------------------------------------


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
