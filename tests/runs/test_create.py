"""Runs that store their features in another folder, or in a bucket."""

import json
import os
import shutil
import signal
from pathlib import Path

import lance
import numpy as np
import pytest
from helpers.buckets import ACCESS_KEY, SECRET_KEY, Proxy
from helpers.commands import run_json, run_rejected
from helpers.processes import Command
from helpers.waiting import wait_until

from llmcond.cli import run
from llmcond.runs import open_run
from llmcond.runs.embedder import load_embedder

pytestmark = pytest.mark.usefixtures("in_tmp")


@pytest.fixture(scope="module")
def rows(tmp_path_factory, small_rows):
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def extract(tiny_checkpoint, rows):
    """The arguments of an extraction with a tiny encoder on the CPU."""
    arguments = ["extract", "--model", tiny_checkpoint(), "--data", rows, "--device", "cpu"]
    return [*arguments, "--dtype", "float32", "--pooling", "mean", "--prompt", "concat-sent-cond"]


def read_all_files(folder):
    return b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())


def aws_variables():
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def read_vectors(folder):
    """Return the vectors of a run's store by key, after checking that no key occurs twice."""
    location = open_run(Path(folder)).store()._location
    table = lance.dataset(location.uri, storage_options=location.options).to_table()
    keys = table["key"].to_pylist()
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, np.array(table["vector"].to_pylist()), strict=True))


def test_every_command_reads_features_from_bucket(capsys, extract, bucket):
    run_json(capsys, *extract, "--run", "plain")
    summary = run_json(capsys, *extract, "--run", "elsewhere", "--store", bucket)
    assert summary["prompts"]["concat-sent-cond"]["n_computed"] > 100
    assert json.loads(Path("elsewhere/run.json").read_text())["store"] == bucket
    assert not Path("elsewhere/features").exists()
    assert (
        run_json(capsys, *extract, "--run", "elsewhere")["prompts"]["concat-sent-cond"][
            "n_computed"
        ]
        == 0
    )
    small, scores = ["--set", "epochs=2", "batch_size=16"], []
    for name in ("plain", "elsewhere"):
        run_json(capsys, "fit-head", "--head", "linear", "--run", name, *small)
        scores.append(run_json(capsys, "evaluate", "--run", name, "--split", "dev"))
    results = [{k: v for k, v in score.items() if k not in ("run", "created")} for score in scores]
    assert results[0] == results[1]
    plain, elsewhere = read_vectors("plain"), read_vectors("elsewhere")
    assert plain.keys() == elsewhere.keys()
    assert all(np.array_equal(plain[key], elsewhere[key]) for key in plain)
    secrets = (ACCESS_KEY.encode(), SECRET_KEY.encode())
    assert not any(secret in read_all_files(".") for secret in secrets)


def test_features_of_other_texts_are_stored_in_bucket(capsys, extract, bucket, rows):
    run_json(capsys, *extract, "--run", "r", "--store", bucket)
    before = len(open_run(Path("r")).store())
    Path("texts.csv").write_text("sentence,condition\na dog in the rain,the weather\n")
    embed = ["embed", "texts.csv", "--run", "r", "--head", "none", "--out", "x.npy"]
    assert run(embed) == 0
    assert len(open_run(Path("r")).store()) > before
    assert load_embedder("r", "none", device="cpu").encode("a dog", "the place").shape == (32,)


def test_killed_extraction_into_bucket_is_resumed(capsys, extract, bucket, s3_server):
    """The process is killed at its first commits, and again at a later one behind a slow proxy."""
    for count in (1, 60):
        proxy = Proxy(s3_server.port)
        environment = {**aws_variables(), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        chunked = Command(
            Path("killed"),
            [*extract, "--run", "r", "--store", bucket],
            environment,
            use_small_chunks,
        )
        wait_until(lambda count=count, proxy=proxy: proxy.passed["PUT"] >= count)
        os.kill(chunked.process.pid, signal.SIGKILL)
        assert chunked.finish()[0] == -signal.SIGKILL
        proxy.close()
    n_stored = len(read_vectors("r"))
    summary = run_json(capsys, *extract, "--run", "r")["prompts"]["concat-sent-cond"]
    assert 0 < summary["n_computed"] == summary["n_inputs"] - n_stored
    run_json(capsys, *extract, "--run", "plain")
    plain, killed = read_vectors("plain"), read_vectors("r")
    assert plain.keys() == killed.keys()
    for key, vector in plain.items():
        np.testing.assert_allclose(killed[key], vector, atol=2e-3)


def use_small_chunks():
    from llmcond.features import extract

    extract.Chunking.__init__.__defaults__ = (8, extract.WINDOW, False)


def test_runs_can_share_a_folder_of_features(capsys, extract):
    run_json(capsys, *extract, "--run", "a", "--store", "shared")
    assert json.loads(Path("a/run.json").read_text())["store"] == str(Path("shared").resolve())
    summary = run_json(capsys, *extract, "--run", "b", "--store", "shared")
    assert summary["prompts"]["concat-sent-cond"]["n_computed"] == 0
    shutil.move("a", "moved")
    assert (
        run_json(capsys, *extract, "--run", "moved")["prompts"]["concat-sent-cond"]["n_computed"]
        == 0
    )


def test_plan_counts_features_in_shared_store(capsys, extract, bucket):
    run_json(capsys, *extract, "--run", "a", "--store", bucket)
    planned = run_json(capsys, *extract, "--run", "b", "--store", bucket, "--plan")
    assert planned["n_inputs"]["concat-sent-cond"] > planned["n_missing"]["concat-sent-cond"] == 0
    assert not Path("b").exists()


def test_store_of_existing_run_cannot_change(capsys, extract, bucket):
    run_json(capsys, *extract, "--run", "r")
    message = run_rejected(capsys, *extract, "--run", "r", "--store", bucket)
    assert f"stores features in {Path('r/features').resolve()}, not in {bucket}." in message
    run_json(capsys, *extract, "--run", "r", "--store", "r/features")


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ("s3://nobody/x", "there is no bucket s3://nobody"),
        ("s4://features/x", "Did you mean 's3'"),
        (f"s3://{ACCESS_KEY}:{SECRET_KEY}@features/x", "recorded nowhere"),
    ],
)
def test_invalid_store_is_reported_before_run_is_created(capsys, extract, bucket, store, expected):
    message = run_rejected(capsys, *extract, "--run", "r", "--store", store)
    assert expected in message
    assert SECRET_KEY not in message
    assert not Path("r").exists()


def test_unreachable_store_is_reported(capsys, extract, bucket, monkeypatch):
    run_json(capsys, *extract, "--run", "r", "--store", bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert run(["fit-head", "--head", "linear", "--run", "r"]) == 1
    err = capsys.readouterr().err
    assert "cannot be reached" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_export_does_not_contain_store_uri(capsys, extract, bucket):
    run_json(capsys, *extract, "--run", "r", "--store", bucket)
    run_json(
        capsys,
        "export",
        "--run",
        "r",
        "--head",
        "none",
        "--out",
        "out",
    )
    assert bucket.encode() not in read_all_files("out")
