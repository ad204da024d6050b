"""Files and output of commands: inputs are kept, and control characters are escaped."""

import csv
import ctypes
import io
import json
import os
import shutil
import stat
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected
from helpers.processes import Command

from llmcond.cli import run

pytestmark = pytest.mark.usefixtures("in_tmp")

CONDITION = ("--condition-text", "the place")


# -- files -------------------------------------------------------------------------------------


def test_predictions_do_not_overwrite_inputs(capsys, run_copy, write_rows, small_rows):
    data = write_rows(small_rows, "my.csv")
    write_rows(small_rows, "d/my-test.csv")
    Path("link.csv").symlink_to(data)
    evaluate = ("evaluate", "--run", run_copy, "--data")
    for source, out in (
        (data, "my.csv"),
        ("my.csv", "d/../my.csv"),
        (data, "link.csv"),
        (f"file://{data}", data),
        ("d", "d/my-test.csv"),
    ):
        assert "is an input of the same command" in run_rejected(
            capsys, *evaluate, source, "--predictions", out
        )
    for out in ("run_copy/run.json", "run_copy/rows.parquet", "p.txt"):
        assert "name a .csv file" in run_rejected(
            capsys, "evaluate", "--run", run_copy, "--predictions", out
        )
    # The data that the run was extracted from.
    recorded = Path(json.loads((run_copy / "run.json").read_text())["data"]["source"])
    before = recorded.read_bytes()
    run_rejected(capsys, "evaluate", "--run", run_copy, "--predictions", recorded)
    assert recorded.read_bytes() == before
    run_json(capsys, *evaluate, data, "--predictions", "run_copy/p.csv")
    run_json(capsys, *evaluate, data, "--predictions", "run_copy/p.csv")


def test_embeddings_do_not_overwrite_inputs(capsys, run_copy):
    pq.write_table(pa.table({"sentence": ["two men"]}), "t.parquet")
    Path("d").mkdir()
    for source, out in (("t.parquet", "d/../t.parquet"), (f"file://{Path.cwd()}/t.parquet",) * 2):
        flags = ("--out", out.removeprefix("file://"), "--run", run_copy)
        line = run_rejected(capsys, "embed", source, *CONDITION, *flags)
        assert "is an input of the same command" in line
    line = run_rejected(
        capsys,
        "embed",
        "t.parquet",
        *CONDITION,
        "--out",
        run_copy / "rows.parquet",
        "--run",
        run_copy,
    )
    assert "is an input of the same command" in line


def test_carriage_return_in_text_is_quoted(capsys, run_copy, write_rows):
    texts = ["two men\rplay", "a\r\nb", 'a "dog", "cat"', "\r", "plain"]
    rows = [(f"{text} x", "a dog", "the place", 1 + i) for i, text in enumerate(texts)]
    data = write_rows(rows)
    run_json(capsys, "evaluate", "--run", run_copy, "--data", data, "--predictions", "p.csv")
    content = Path("p.csv").read_bytes().decode()
    records = list(csv.DictReader(io.StringIO(content, newline="")))
    assert [row["sentence1"] for row in records] == [f"{text} x" for text in texts]
    assert content.endswith("\n")
    assert not content.endswith("\r\n")
    assert "plain x,a dog" in content


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_folders_respect_umask(capsys, tiny_run, write_rows, small_rows, umask):
    model = json.loads((tiny_run / "run.json").read_text())["encoder"]["model"]
    data = write_rows(small_rows)
    previous_umask = os.umask(umask)
    try:
        # A relative name with a colon, which Arrow would take for a file system.
        run_json(capsys, "extract", "--model", model, "--data", data, "--run", "a:b/r")
        run_json(capsys, "fit-head", "--head", "pca", "--dim", "4", "--name", "p", "--run", "a:b/r")
        pq.write_table(pa.table({"sentence": ["two men"]}), "t.parquet")
        out = ("--out", "a:b/v.parquet")
        run_json(capsys, "embed", "t.parquet", *CONDITION, *out, "--run", "a:b/r")
    finally:
        os.umask(previous_umask)
    for name in ("a:b/r", "a:b/r/heads", "a:b/r/heads/p"):
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o777 & ~umask


# -- read-only runs ----------------------------------------------------------------------------


@pytest.fixture
def read_only(run_copy):
    """A run whose folders cannot be written."""
    assert (
        run(["fit-head", "--head", "pca", "--dim", "4", "--name", "p", "--run", str(run_copy)]) == 0
    )
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


def test_read_only_run_can_be_used(read_only, tmp_path, write_rows, small_rows):
    data, before = write_rows(small_rows), sorted(read_only.rglob("*"))
    for number, (arguments, message) in enumerate(
        [
            ("analyse --json", "no analyses.json is written, nor pictures"),
            (f"evaluate --data {data} --json", "are not saved: cannot write"),
            (
                f"embed {data} --text sentence1 --out {tmp_path / 'v.npy'} --json",
                "are not saved: cannot write",
            ),
        ]
    ):
        command = [*arguments.split(), "--run", read_only]
        status, out, err = Command(
            tmp_path / str(number), command, setup=drop_root_privileges
        ).finish()
        assert status == 0, err
        assert message in err
        assert json.loads(out)
    assert (tmp_path / "v.npy").is_file()
    assert sorted(read_only.rglob("*")) == before


def test_read_only_folder_is_reported_before_work_starts(
    read_only, tmp_path, write_rows, small_rows
):
    model = json.loads((read_only / "run.json").read_text())["encoder"]["model"]
    data = write_rows(small_rows)
    for number, (arguments, folder) in enumerate(
        [
            (f"train-lora --model {model} --data {data} --head none", read_only / "heads" / "new"),
            ("fit-head --head mlp", read_only),
            ("sweep --head mlp --workers 1", read_only),
        ]
    ):
        command = [*arguments.split(), "--run", folder]
        status, _, err = Command(
            tmp_path / str(number), command, setup=drop_root_privileges
        ).finish()
        assert status == 2, err
        assert f"cannot write {folder}" in err
        assert "steps" not in err


# -- printed text ------------------------------------------------------------------------------


def test_control_characters_are_not_printed(capsys, tiny_run, tmp_path):
    run_copy = shutil.copytree(tiny_run, tmp_path / "a\u202eb[/x]")
    assert run(["fit-head", "--head", "pca", "--dim", "4", "--run", str(run_copy)]) == 0
    for command in ("evaluate", "analyse", "sweep --head pca --set dim=4 --workers 1"):
        for format_flags in ([], ["--format", "markdown"], ["--format", "latex"], ["--json"]):
            assert run([*command.split(), "--run", str(run_copy), *format_flags]) == 0
            captured = capsys.readouterr()
            for text in (captured.out, captured.err):
                assert [c for c in text if not c.isprintable() and c != "\n"] == []


def test_json_escapes_control_characters(capsys, run_copy):
    condition = "the\x9bplace\u202e\U000e0001\x1b"
    arguments = (
        "similarity",
        "two men",
        "a dog",
        "--condition",
        condition,
        "--run",
        str(run_copy),
        "--json",
    )
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert out.rstrip("\n").isprintable()
    assert json.loads(out)["similarities"][0]["condition"] == condition


# -- interrupted runs --------------------------------------------------------------------------


def test_run_without_features_is_reported(capsys, run_copy):
    record = json.loads((run_copy / "run.json").read_text())
    (run_copy / "run.json").write_text(json.dumps({**record, "prompts": {}}))
    assert "has no extracted features yet" in run_rejected(capsys, "analyse", "--run", run_copy)


def test_leftover_files_are_removed_after_an_hour(capsys, run_copy):
    recent, old = run_copy / ".run.json.0123abcd", run_copy / ".run.json.4567abcd"
    user_file = run_copy / ".run.json.backups"
    for path in (recent, old, user_file):
        path.touch()
    for path in (old, user_file):
        os.utime(path, (0, 0))
    folder = run_copy.parent / ".new.89abcdef"
    folder.mkdir()
    (folder / "rows.parquet").touch()
    os.utime(folder, (0, 0))
    encoder = json.loads((run_copy / "run.json").read_text())["encoder"]["model"]
    extract = ("extract", "--model", encoder, "--prompt", "concat-cond-sent", "--dtype", "float32")
    run_json(capsys, *extract, "--run", run_copy)
    assert recent.exists()
    assert user_file.exists()
    assert not old.exists()
    run_json(capsys, *extract, "--run", run_copy.parent / "new")
    assert not folder.exists()


# -- columns of texts and conditions -----------------------------------------------------------


@pytest.mark.parametrize("name", ["text", "sentence"])
def test_text_column_is_named_text_or_sentence(capsys, tiny_run, tmp_path, name):
    """Commands that read texts accept both names, and ``--text`` for other columns."""
    source, run_flags = tmp_path / "texts.csv", ("--run", tiny_run)
    rows = [("two men ride", "play"), ("three dogs sit", "sit"), ("children walk", "walk")]
    for column in (name, "body"):
        source.write_text("\n".join([f"{column},topic", *map(",".join, rows)]) + "\n")
        flag = () if column == name else ("--text", column)
        out = tmp_path / column
        embed = ("embed", source, *flag, *run_flags, "--condition", "the place")
        assert run_json(capsys, *embed, "--out", f"{out}.parquet")["rows"] == 3
        assert (
            run_json(capsys, "index", source, *flag, *run_flags, "--out", f"{out}.index")["texts"]
            == 3
        )
        cluster = (
            "cluster",
            source,
            *flag,
            *run_flags,
            "--condition",
            "the place",
            "--clusters",
            2,
        )
        assert run_json(capsys, *cluster, "--out", f"{out}.csv")["texts"] == 3
        table = pq.read_table(f"{out}.parquet")
        assert table["sentence"].to_pylist() == [text for text, _ in rows]
        assert set(table["condition"].to_pylist()) == {"the place"}


@pytest.mark.parametrize("command", ["embed", "index", "cluster"])
@pytest.mark.parametrize(
    ("name", "problem"), [("texts.cvs", "ends in .cvs."), ("none.csv", "does not exist.")]
)
def test_invalid_text_file_is_reported_with_supported_formats(
    capsys, tiny_run, tmp_path, command, name, problem
):
    (tmp_path / "texts.cvs").write_text("text\ntwo men ride\nthree dogs sit\n")
    condition_flags = () if command == "index" else ("--condition", "the place")
    out = ("--out", tmp_path / "out.parquet", "--run", tiny_run)
    message = run_rejected(capsys, command, tmp_path / name, *condition_flags, *out)
    assert f"{name} {problem} Expected a .csv, " in message
    assert message.endswith(", a .txt file with one text per line, or - for standard input.")
    assert not (tmp_path / "out.parquet").exists()


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


def test_csv_embeddings_equal_npy_embeddings(capsys, tiny_run, tmp_path):
    source = tmp_path / "texts.txt"
    source.write_text("two men ride\n=three dogs sit\n")
    embed = ("embed", source, "--run", tiny_run)
    assert "one condition for every row: --condition TEXT" in run_rejected(
        capsys, *embed, "--out", tmp_path / "v.csv"
    )
    for suffix in ("csv", "npy"):
        run_json(capsys, *embed, "--condition", "the place", "--out", tmp_path / f"v.{suffix}")
    with (tmp_path / "v.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["sentence"] for row in rows] == ["two men ride", "=three dogs sit"]
    vectors = np.array([json.loads(row["embedding"]) for row in rows], np.float32)
    np.testing.assert_array_equal(vectors, np.load(tmp_path / "v.npy"))
