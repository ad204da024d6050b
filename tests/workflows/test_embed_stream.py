"""Embedding of texts that do not fit in memory: output, resuming, workers, and invalid input."""

import json
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from helpers.commands import run_json, run_rejected
from helpers.processes import Command
from helpers.units import KilledOnce, embed_command, kill_at, text_table

import llmcond
from llmcond.base.arrays import quantize_embeddings
from llmcond.cli import run
from llmcond.features import outputs
from llmcond.workflows import embed_stream

OUTPUTS = ["out", "out.lance"]
ON_RAY = ("--scale", "ray", "--actors")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Three files in nested folders below the current folder, with work units of 40 rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embed_stream, "UNIT_ROWS", 40)
    Path("src/a").mkdir(parents=True)
    for name, start, stop in (("a/1", 0, 100), ("a/2", 100, 130), ("b", 130, 250)):
        pq.write_table(text_table(start, stop), f"src/{name}.parquet", row_group_size=30)
    for name in ("_SUCCESS", "read.me"):  # are not read
        Path("src", name).write_text("not read")


@pytest.fixture
def embed(capsys, fitted, source):
    """Return a function that embeds the source."""

    def embed_source(out, *options, command=run_json, **others):
        return command(capsys, *embed_command(out, fitted, *options, **others))

    return embed_source


def read_output(out):
    """Return the output as any reader of such a folder or dataset sees it."""
    if str(out).endswith(".lance"):
        return lance.dataset(str(out)).to_table()
    return pq.read_table(out)


def stack_vectors(table):
    return np.stack(table["embedding"].to_numpy())


def embed_one_file(embed, *options):
    """Return the output of ``llmcond embed`` for all rows in one file."""
    pq.write_table(text_table(0, 250), "all.parquet")
    embed("all-embedded.parquet", *options, source="all.parquet")
    return pq.read_table("all-embedded.parquet")


# -- output ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["linear", "none"])
def test_embeddings_match_those_of_one_file(embed, head):
    for out in OUTPUTS:
        summary = embed(out, "--head", head)
    actual, expected = read_output("out"), embed_one_file(embed, "--head", head)
    assert (summary["rows"], summary["dim"]) == (250, stack_vectors(actual).shape[1])
    assert actual.column_names == ["id", "url", "sentence", "condition", "embedding"]
    assert actual["id"].to_pylist() == list(range(250))
    assert actual.drop(["id", "url", "embedding"]).equals(expected.drop(["embedding"]))
    np.testing.assert_allclose(stack_vectors(actual), stack_vectors(expected), atol=2e-4)
    assert np.allclose(np.linalg.norm(stack_vectors(actual), axis=1), 1, atol=1e-5)
    assert actual.equals(read_output("out.lance"))
    names = sorted(path.name for path in Path("out").glob("*.parquet"))
    assert names == [f"part-{i:06}.parquet" for i in range(3 + 1 + 3)]


def test_units_have_one_precision_with_recorded_ranges(embed, monkeypatch):
    monkeypatch.setattr(embed_stream, "CALIBRATION_ROWS", 30)
    full = stack_vectors(embed_one_file(embed))
    options = ("--precision", "int8", "--truncate-dim", 3)
    summary = embed("out.lance", *options)
    assert (summary["dim"], summary["precision"]) == (3, "int8")
    truncated = full[:, :3] / np.linalg.norm(full[:, :3], axis=1, keepdims=True)
    record = outputs.open_output("out.lance").read_record()
    ranges = np.array(record["ranges"], np.float32)
    lowest, highest = truncated[:30].min(axis=0), truncated[:30].max(axis=0)
    np.testing.assert_allclose(ranges, [lowest, highest], atol=2e-3)
    codes = stack_vectors(read_output("out.lance"))
    expected = quantize_embeddings(truncated, "int8", ranges)
    assert codes.dtype == expected.dtype
    # Embeddings of other batches differ by rounding.
    assert (np.abs(codes.astype(int) - expected) <= 1).mean() > 0.95
    pq.write_table(text_table(0, 40), "src/c.parquet")
    assert embed("out.lance", *options)["rows"] == 290
    extended = stack_vectors(read_output("out.lance"))
    np.testing.assert_array_equal(extended[:250], codes)
    assert (np.abs(extended[250:].astype(int) - codes[:40]) <= 1).mean() > 0.95


def test_size_of_binary_vectors_is_reported_again(capsys, fitted, source, tmp_path):
    run_folder = Path(shutil.copytree(fitted, tmp_path / "copy"))
    llmcond.fit_head(run=run_folder, head="pca", dim=12, name="short")
    command = embed_command("out.lance", run_folder, "--precision", "binary", "--head", "short")
    assert [run_json(capsys, *command)["dim"] for _ in range(2)] == [12, 12]


def test_ranges_come_from_several_small_files(embed, monkeypatch):
    monkeypatch.setattr(embed_stream, "CALIBRATION_ROWS", 30)
    for row in range(4):
        pq.write_table(text_table(row, row + 1), f"src/a/0{row}.parquet")
    embed("full.lance")
    first = stack_vectors(read_output("full.lance"))[:30]
    embed("out.lance", "--precision", "int8")
    ranges = outputs.open_output("out.lance").read_record()["ranges"]
    np.testing.assert_allclose(ranges, [first.min(axis=0), first.max(axis=0)], atol=2e-3)


def test_conditions_ignore_same_directions_after_files_are_added(fitted, source):
    Path("pages").mkdir()
    table = text_table(0, 80).rename_columns(["id", "sentence", "kind", "url"])
    options = {"ignore": ["the mood"], "ignore_column": ["kind"], "condition_text": "the place"}
    first = None
    for number, (start, stop) in enumerate([(0, 60), (60, 70), (70, 80), (80, 80)]):
        if start < stop:
            pq.write_table(table.slice(start, stop - start), f"pages/{number}.parquet")
        llmcond.embed(texts="pages", out="out", run=fitted, keep=["id"], **options)
        vectors = stack_vectors(read_output("out"))
        assert len(vectors) == stop
        first = vectors if first is None else first
        np.testing.assert_array_equal(vectors[:60], first)


def test_lance_source_is_read_at_one_version(embed):
    for start in range(0, 250, 90):
        lance.write_dataset(text_table(start, min(start + 90, 250)), "src.lance", mode="append")
    lance.dataset("src.lance").delete("id = 7 or id = 200")
    for out in OUTPUTS:
        embed(out, source="src.lance")
        ids = read_output(out)["id"].to_pylist()
        assert ids == [i for i in range(250) if i not in (7, 200)]
    lance.dataset("src.lance").delete("id = 3")
    line = embed("out.lance", source="src.lance", command=run_rejected)
    assert "'fragment 0' is missing or modified" in line


def test_column_types_are_unified_and_partitions_become_columns(embed):
    Path("hive/lang=en").mkdir(parents=True)
    Path("hive/lang=d%C3%A9").mkdir()
    first, second = text_table(0, 3), text_table(3, 5)
    first = first.set_column(3, "url", pa.nulls(3))
    first = first.set_column(0, "id", first["id"].cast(pa.int16()))
    pq.write_table(second, "hive/lang=en/x.parquet")
    pq.write_table(first, "hive/lang=d%C3%A9/x.parquet")
    pq.write_table(first.slice(0, 0), "hive/lang=en/none.parquet")
    embed("parts", source="hive")
    columns = read_output("parts").to_pydict()
    assert columns["lang"] == ["dé"] * 3 + ["en"] * 2
    assert columns["url"] == [None] * 3 + second["url"].to_pylist()
    assert columns["id"] == list(range(5))


# -- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("out", OUTPUTS)
def test_repeated_call_embeds_only_new_files(embed, out, monkeypatch):
    Path(out).mkdir()
    for name in ("_llmcond.lock", "._llmcond.json.2fdf50ec"):  # a process killed at its start
        Path(out, name).touch()
    embed(out)
    before = read_output(out)
    assert not Path(out, "._llmcond.json.2fdf50ec").exists()
    with monkeypatch.context() as patch:
        patch.setattr(embed_stream.UnitEmbedder, "work", None)
        summary = embed(out)
    assert (summary["rows"], summary["dim"]) == (250, stack_vectors(before).shape[1])
    assert read_output(out).equals(before)
    pq.write_table(text_table(250, 300), "src/a/0.parquet")
    assert embed(out)["rows"] == 300
    assert read_output(out).slice(0, 250).equals(before)
    assert read_output(out)["id"].to_pylist() == list(range(300))


@pytest.mark.parametrize(
    ("out", "point", "count", "n_existing"),
    [
        ("out", "half written", 4, 100),
        ("out", "written", 7, 250),
        ("out.lance", "written", 6, 130),
        ("out.lance", "not committed", 1, 0),
        ("out.lance", "not committed", 3, 130),
    ],
)
def test_killed_call_resumes(capsys, embed, fitted, out, point, count, n_existing):
    embed(f"whole-{out}")
    arguments, setup = embed_command(out, fitted), partial(kill_at, point, count)
    assert Command(Path("killed"), arguments, setup=setup).finish()[0] == -signal.SIGKILL
    if n_existing:
        assert len(read_output(out)) == n_existing
    assert run([str(argument) for argument in arguments]) == 0
    assert (f"({n_existing} of them existed)" in capsys.readouterr().err) == bool(n_existing)
    assert read_output(out).equals(read_output(f"whole-{out}"))
    assert not [path for path in Path(out).rglob("*") if path.name.startswith(".")]
    if out.endswith(".lance"):
        fragments = lance.dataset(out).get_fragments()
        referenced = {file.path for part in fragments for file in part.data_files()}
        assert {path.name for path in Path(out, "data").iterdir()} == referenced
        # Lance leaves such files if the process is killed during a commit.
        staged = ("_transactions/.tmp5iRQOd", "_versions/18446744073709551614.manifest#1")
        for name in staged:
            Path(out, name).touch()
        assert embed(out)["rows"] == 250
        assert not [name for name in staged if Path(out, name).exists()]


# -- damaged output ----------------------------------------------------------------------------


def run_failed(_, *arguments):
    return run([str(argument) for argument in arguments])


def read_files(out):
    return {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}


def test_damaged_output_is_reported_and_left(capsys, embed):
    for out in OUTPUTS:
        embed(out)

    def check_damage(out, expected):
        before = read_files(out)
        assert embed(out, command=run_failed) in (1, 2)
        captured = capsys.readouterr()
        assert re.search(expected, captured.err.splitlines()[-1]), captured.err
        assert (captured.out, "Traceback" in captured.err) == ("", False)
        assert read_files(out) == before

    record_path, part = Path("out/_llmcond.json"), Path("out/part-000000.parquet")
    text, rows = record_path.read_text(), pq.read_table(part)
    first, *others = json.loads(text)["parts"]
    for changes, expected in (
        ({"columns": "AAAA"}, "its columns cannot be read"),
        ({"parts": [[*first[:2], 41], *others]}, "its numbers of rows"),
        ({"format": True}, "states no format"),
    ):
        record_path.write_text(json.dumps({**json.loads(text), **changes}))
        check_damage("out", expected)
    record_path.write_text(text)
    damaged = "part-000000.parquet is damaged: it does not hold the expected 40 emb"
    for content in (b"junk", Path("out/part-000001.parquet").read_bytes()):
        part.write_bytes(content)
        check_damage("out", damaged)
    for table, expected in (
        (rows.slice(1), damaged),
        (rows.drop(["embedding"]), damaged),
        (rows.drop(["sentence"]), "different dimensions or columns"),
    ):
        pq.write_table(table, part)
        check_damage("out", expected)
    part.unlink()
    assert embed("out")["rows"] == 250
    (path, *_) = Path("out.lance/data").iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-40] + b"\xff" * 24 + content[-16:])  # of the same size
    check_damage("out.lance", "out.lance is damaged: data/")
    for manifest in Path("out.lance/_versions").iterdir():
        content, middle = manifest.read_bytes(), manifest.stat().st_size // 2
        manifest.write_bytes(content[:middle] + b"rrrr" + content[middle + 4 :])
    check_damage("out.lance", "out.lance cannot be")


def test_nearly_full_disk_is_rejected_before_writing(capsys, fitted, source, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=2**20 - 1)
    monkeypatch.setattr("llmcond.base.files.shutil.disk_usage", lambda _: usage)
    for out in OUTPUTS:
        assert "the disk is full: " in run_rejected(capsys, *embed_command(out, fitted))


# -- workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "workers"),
    [
        ("out", ("--workers", "2")),
        ("out.lance", ("--workers", "2")),
        pytest.param("out.lance", (*ON_RAY, "2"), marks=pytest.mark.slow),
    ],
)
def test_workers_write_same_rows_even_if_one_dies(
    request, embed, caplog, two_threads, out, workers, monkeypatch
):
    request.getfixturevalue("ray" if "ray" in workers else "actors_import_helpers")
    embed(f"local-{out}")
    monkeypatch.setattr(embed_stream, "UnitEmbedder", KilledOnce)
    assert embed(out, *workers)["rows"] == 250
    assert "a worker died" in caplog.text
    assert read_output(out).equals(read_output(f"local-{out}"))
    if out.endswith(".lance"):
        assert len(list(Path(out, "data").iterdir())) == 7


def test_error_of_worker_reports_one_line(embed, two_threads):
    rows = text_table(130, 250).to_pydict()
    rows["topic"][119] = "the place " * 50
    pq.write_table(pa.table(rows), "src/b.parquet")
    line = embed("out.lance", "--workers", "2", command=run_rejected)
    assert line.startswith("row 120 of b.parquet: ")
    assert Path("out.lance/_llmcond.json").exists()
    for out, options, message in (
        ("v.npy", (*ON_RAY, "1"), "--scale needs --out FOLDER"),
        ("o", ("--actors", "1"), "--actors needs --scale ray"),
    ):
        assert message in embed(out, *options, command=run_rejected)


@pytest.mark.parametrize("out", OUTPUTS)
def test_output_of_killed_driver_is_finished_without_workers(embed, fitted, out):
    embed(f"local-{out}")
    # There may be only one commit: units that wait for the first one are committed with it.
    point, count = ("not committed", 1) if out.endswith(".lance") else ("written", 2)
    arguments = embed_command(out, fitted, "--workers", "2")
    command = Command(Path("killed"), arguments, setup=partial(kill_at, point, count, threads=2))
    assert command.finish()[0] == -signal.SIGKILL
    embed(out)
    assert read_output(out).equals(read_output(f"local-{out}"))


@pytest.mark.parametrize("change", ["append", "unit"])
def test_concurrent_writer_of_dataset_is_detected(capsys, embed, monkeypatch, change):
    monkeypatch.setattr(outputs, "_COMMIT_FRAGMENTS", 2)
    original, calls = outputs.LanceOutput.add_unit, []

    def add(self, *args):
        original(self, *args)
        calls.append(args)
        if len(calls) == 3 and change == "append":
            lance.write_dataset(read_output("out.lance").slice(0, 1), "out.lance", mode="append")
        elif len(calls) == 3:
            other = outputs.open_output("out.lance")
            other._dataset, other._schema = other._latest(), args[2]
            other._rows, other._ready = 80, [json.loads(args[1])]
            other._commit()

    monkeypatch.setattr(outputs.LanceOutput, "add_unit", add)
    assert embed("out.lance", command=run_failed) == 1
    assert "another program has written to out.lance in the meantime" in capsys.readouterr().err
    ids = read_output("out.lance")["id"].to_pylist()
    assert change != "unit" or ids == list(range(100))


# -- invalid input -----------------------------------------------------------------------------


def test_started_output_rejects_other_options(capsys, embed, fitted):
    embed("out")
    before = read_output("out")
    for options, expected in (
        (("--head", "none"), "started with another head"),
        (("--precision", "binary"), "another precision None, not 'binary'"),
        (
            ("--values", "a, b"),
            "another conditions [{'source': 'topic'}], not [{'source': 'topic', 'values': ['a',",
        ),
    ):
        line = embed("out", *options, command=run_rejected)
        assert line.startswith("out was started with")
        assert expected in line
    command = ("embed", "src", "--out", "out", "--run", fitted, "--text", "text")
    line = run_rejected(capsys, *command, "--condition-text", "the mood")
    assert "another conditions [{'source': 'topic'}], not [{'text': 'the mood'}]" in line
    assert read_output("out").equals(before)


def test_options_that_cannot_work_leave_no_record(capsys, embed, fitted):
    np.save("ranges.npy", np.zeros((2, 3)))
    Path("answers.csv").write_text("text,condition,answer\nx,the mood,y\n")
    for options in (
        ("--truncate-dim", 5_000),
        ("--precision", "int8", "--ranges", "ranges.npy"),
        ("--answers", "answers.csv"),
    ):
        embed("out", *options, command=run_rejected)
        assert not Path("out", outputs.RECORD_NAME).exists()
    embed("out", "--keep", "id", "--keep", "id")


def test_changed_source_or_foreign_output_is_rejected(embed):
    embed("out")
    embed("out.lance")
    with FileLock("out/_llmcond.lock"):
        line = embed("out", command=run_rejected)
    assert "another llmcond embed is writing to out" in line
    shutil.copytree("src", "copy")
    assert "another source" in embed("out", source="copy", command=run_rejected)
    pq.write_table(text_table(500, 530), "src/a/2.parquet")
    line = embed("out", command=run_rejected)
    assert "has changed since out was started: 'a/2.parquet' is missing" in line
    Path("src/b.parquet").unlink()
    assert "'a/2.parquet', 'b.parquet' are missing" in embed("out", command=run_rejected)
    shutil.rmtree("src")
    Path("copy").rename("src")
    Path("out/foreign.parquet").touch()
    line = embed("out", command=run_rejected)
    assert "out holds foreign.parquet, which does not belong to these" in line
    lance.dataset("out.lance").delete("id = 3")
    line = embed("out.lance", command=run_rejected)
    assert "249 rows, but no work unit ends there" in line


def test_invalid_row_is_reported_before_writing(embed):
    rows = text_table(100, 130).to_pydict()
    rows["text"][4], rows["topic"][20], rows["text"][21] = " \t", None, ""
    pq.write_table(pa.table(rows), "src/a/2.parquet")
    for out in OUTPUTS:
        line = embed(out, command=run_rejected)
        expected = "row 5 of a/2.parquet: text is empty (2 more rows are invalid: 21, 22)"
        assert line.startswith(expected)
        assert not Path(out).exists()


def test_only_columns_that_are_written_are_reserved(capsys, source, fitted):
    for path in Path("src").rglob("*.parquet"):
        table = pq.read_table(path)
        names = ["embedding (the place)" if n == "id" else n for n in table.column_names]
        names[names.index("topic")] = "condition"
        pq.write_table(table.rename_columns(names), path.with_suffix(".PARQUET"))
        path.unlink()
    two = ["--text", "text", "--condition", "the place", "--condition", "the mood"]
    command = ("embed", "src", "--run", fitted, "--out", "out", *two)
    assert "another column of that name" in run_rejected(capsys, *command)
    assert not Path("out").exists()
    assert run_json(capsys, *command, "--keep", "condition")["rows"] == 250


def test_invalid_arguments_report_one_line(capsys, source, fitted):
    Path("foreign").mkdir()
    Path("foreign/x.txt").touch()
    lance.write_dataset(text_table(0, 3), "foreign.lance")
    topic = "--text text --condition topic"
    for arguments, expected in (
        ("--out out --text text", "a/1.parquet has no column 'condition'"),
        ("--out out --text id --condition topic", "of the type int64; expected texts"),
        (f"--out foreign {topic}", "foreign holds other files"),
        (f"--out src/vectors {topic}", "--out src/vectors is in the source src"),
        (f"--out s3://b/v.npy {topic}", "on this machine only"),
        (f"--out hdfs://b/v {topic}", "does not support hdfs:// storage"),
    ):
        line = run_rejected(capsys, "embed", "src", "--run", fitted, *arguments.split())
        assert expected in line
    assert not Path("out").exists()
