"""Files and output of commands: inputs are kept, and control characters are escaped."""

import csv
import ctypes
import json
import os
import shutil
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected
from helpers.processes import Command

from llmcond.cli import run

pytestmark = pytest.mark.usefixtures("in_tmp")

CONDITION = ("--condition-text", "the place")


# -- files -------------------------------------------------------------------------------------


def test_outputs_do_not_overwrite_inputs(capsys, run_copy, write_rows, small_rows):
    data = write_rows(small_rows, "my.csv")
    Path("link.csv").symlink_to(data)
    # The data that the run was extracted from.
    recorded = Path(json.loads((run_copy / "run.json").read_text())["data"]["source"])
    before = recorded.read_bytes()
    evaluate = ("evaluate", "--run", run_copy)
    pq.write_table(pa.table({"sentence": ["two men"]}), "t.parquet")
    embed = ("embed", "t.parquet", *CONDITION, "--run", run_copy)
    for command in (
        (*evaluate, "--data", "my.csv", "--predictions", "run_copy/../my.csv"),
        (*evaluate, "--data", data, "--predictions", "link.csv"),
        (*evaluate, "--data", f"file://{data}", "--predictions", data),
        (*evaluate, "--predictions", recorded),
        (*embed, "--out", run_copy / "rows.parquet"),
    ):
        assert "is an input of the same command" in run_rejected(capsys, *command)
    assert recorded.read_bytes() == before
    for _ in range(2):  # an earlier output is no input
        run_json(capsys, *evaluate, "--data", data, "--predictions", "run_copy/p.csv")


def test_leftovers_of_interrupted_commands_are_removed_after_an_hour(capsys, run_copy):
    recent, old = run_copy / ".run.json.0123abcd", run_copy / ".run.json.4567abcd"
    user_file, folder = run_copy / ".run.json.backups", run_copy.parent / ".new.89abcdef"
    folder.mkdir()
    for path in (recent, old, user_file, folder / "rows.parquet"):
        path.touch()
    for path in (old, user_file, folder):
        os.utime(path, (0, 0))
    encoder = json.loads((run_copy / "run.json").read_text())["encoder"]["model"]
    extract = ("extract", "--model", encoder, "--prompt", "concat-cond-sent", "--dtype", "float32")
    for run_folder in (run_copy, run_copy.parent / "new"):
        run_json(capsys, *extract, "--run", run_folder)
    assert [path.exists() for path in (recent, user_file, old)] == [True, True, False]
    assert not folder.exists()


# -- read-only runs ----------------------------------------------------------------------------


@pytest.fixture
def read_only(run_copy):
    """A run whose folders cannot be written."""
    fit = ["fit-head", "--head", "pca", "--dim", "4", "--name", "p", "--run", str(run_copy)]
    assert run(fit) == 0
    folders = [path for path in (run_copy, *run_copy.rglob("*")) if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    yield run_copy
    for path in folders:
        path.chmod(0o755)


def drop_root_privileges():
    """Drop the capabilities that let root write everywhere."""
    if os.geteuid() == 0:
        header = struct.pack("Ii", 0x20080522, 0)
        assert ctypes.CDLL(None).capset(header, bytes(24)) == 0


def test_read_only_run_can_be_used_but_not_fitted(read_only, tmp_path, write_rows, small_rows):
    data, before = write_rows(small_rows), sorted(read_only.rglob("*"))
    out, page = tmp_path / "v.npy", tmp_path / "p.html"
    for number, (arguments, expected, message) in enumerate(
        [
            ("analyse --json", 0, "no analyses.json is written, nor pictures"),
            (f"evaluate --data {data} --json --report {page}", 0, "are not saved: cannot write"),
            (f"embed {data} --text sentence1 --out {out} --json", 0, "are not saved: cannot write"),
            ("fit-head --head mlp", 2, f"cannot write {read_only}"),
            ("sweep --head mlp --workers 1", 2, f"cannot write {read_only}"),
        ]
    ):
        words = [*arguments.split(), "--run", read_only]
        command = Command(tmp_path / str(number), words, setup=drop_root_privileges)
        status, printed, err = command.finish()
        assert status == expected, err
        assert message in err
        assert json.loads(printed) if status == 0 else "steps" not in err
    assert out.is_file()
    assert page.is_file()
    assert sorted(read_only.rglob("*")) == before


# -- printed text ------------------------------------------------------------------------------


def test_control_characters_are_not_printed(capsys, tiny_run, tmp_path):
    run_copy = str(shutil.copytree(tiny_run, tmp_path / "a\u202eb[/x]"))
    assert run(["fit-head", "--head", "pca", "--dim", "4", "--run", run_copy]) == 0
    for command in ("evaluate", "evaluate --format latex", "evaluate --json", "analyse"):
        assert run([*command.split(), "--run", run_copy]) == 0
        captured = capsys.readouterr()
        for text in (captured.out, captured.err):
            assert [c for c in text if not c.isprintable() and c != "\n"] == []
    condition = "the\x9bplace\u202e\U000e0001\x1b"
    arguments = ["similarity", "two men", "a dog", "--condition", condition, "--run", run_copy]
    assert run([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.rstrip("\n").isprintable()
    assert json.loads(out)["similarities"][0]["condition"] == condition


# -- columns of texts and conditions -----------------------------------------------------------


def test_condition_names_column_if_it_exists(capsys, tiny_run, tmp_path):
    source, out = tmp_path / "texts.csv", tmp_path / "out.csv"
    source.write_text("text,topic\ntwo men ride,play\nthree dogs sit,sit\n")

    def embed_conditions(*flags):
        assert run(["embed", str(source), "--out", str(out), "--run", str(tiny_run), *flags]) == 0
        with out.open(newline="", encoding="utf-8") as stream:
            return [row["condition"] for row in csv.DictReader(stream)], capsys.readouterr().err

    values, stderr = embed_conditions("--condition", "topic")
    assert (values, "conditions: the column 'topic'\n" in stderr) == (["play", "sit"], True)
    values, stderr = embed_conditions("--condition", "the topic")
    assert values == ["the topic"] * 2
    assert "condition: 'the topic' for every row, as there is no column of that name\n" in stderr
    assert embed_conditions("--condition-text", "topic")[0] == ["topic"] * 2
