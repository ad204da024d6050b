"""Embedding of texts that do not fit in memory: output, resuming, and invalid input."""

import json
import os
import re
import resource
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected
from helpers.processes import Command
from helpers.units import KilledOnce, embed_command, kill_at, text_table

import llmcond
from llmcond import progress
from llmcond.cli import run
from llmcond.data import streams
from llmcond.quantization import quantize_embeddings
from llmcond.scale import outputs
from llmcond.workflows import embed_stream

OUTPUTS = ["out", "out.lance"]
#: Files of Lance that remain if the process is killed during a commit.
STAGED = [("_transactions", ".tmp5iRQOd"), ("_versions", "18446744073709551614.manifest#1")]


def write_source(folder):
    """Write three files in nested folders below a folder."""
    for name, start, stop in (("a/1", 0, 100), ("a/2", 100, 130), ("b", 130, 250)):
        path = folder / "src" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(text_table(start, stop), path, row_group_size=30)
    (folder / "src" / "_SUCCESS").touch()
    (folder / "src" / "read.me").write_text("not read")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Three files in nested folders below the current folder, with work units of 40 rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embed_stream, "UNIT_ROWS", 40)
    write_source(tmp_path)
    return Path("src")


def read_output(out):
    """Return the output as any reader of such a folder or dataset sees it."""
    if str(out).endswith(".lance"):
        return lance.dataset(str(out)).to_table()
    return pq.read_table(out)


def stack_vectors(table):
    return np.stack(table["embedding"].to_numpy())


def embed_one_file(capsys, run_folder, *options):
    """Return the output of ``llmcond embed`` for all rows in one file."""
    pq.write_table(text_table(0, 250), "all.parquet")
    run_json(
        capsys, *embed_command("all-embedded.parquet", run_folder, *options, source="all.parquet")
    )
    return pq.read_table("all-embedded.parquet")


# -- output ------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("head", ["linear", "none"])
def test_embeddings_match_those_of_one_file(capsys, fitted, source, out, head):
    summary = run_json(capsys, *embed_command(out, fitted, "--head", head))
    actual, expected = read_output(out), embed_one_file(capsys, fitted, "--head", head)
    assert summary["rows"] == len(actual) == 250
    assert summary["dim"] == stack_vectors(actual).shape[1]
    assert actual.column_names == ["id", "url", "sentence", "condition", "embedding"]
    assert actual["id"].to_pylist() == list(range(250))
    assert actual.drop(["id", "url", "embedding"]).equals(expected.drop(["embedding"]))
    np.testing.assert_allclose(stack_vectors(actual), stack_vectors(expected), atol=2e-4)
    assert np.allclose(np.linalg.norm(stack_vectors(actual), axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("precision", ["int8", "ubinary"])
def test_units_have_one_precision_with_recorded_ranges(
    capsys, fitted, source, monkeypatch, out, precision
):
    monkeypatch.setattr(embed_stream, "CALIBRATION_ROWS", 30)
    full = stack_vectors(embed_one_file(capsys, fitted))
    options = ("--precision", precision, "--truncate-dim", 3)
    summary = run_json(capsys, *embed_command(out, fitted, *options))
    assert (summary["dim"], summary["precision"]) == (3, precision)
    truncated = full[:, :3] / np.linalg.norm(full[:, :3], axis=1, keepdims=True)
    record = outputs.open_output(out).read_record()
    assert ("ranges" in record) == (precision == "int8")
    ranges = np.array(record["ranges"], np.float32) if "ranges" in record else None
    if ranges is not None:
        lowest, highest = truncated[:30].min(axis=0), truncated[:30].max(axis=0)
        np.testing.assert_allclose(ranges, [lowest, highest], atol=2e-3)
    codes = stack_vectors(read_output(out))
    expected = quantize_embeddings(truncated, precision, ranges)
    assert codes.dtype == expected.dtype
    # Embeddings of other batches differ by rounding.
    assert (np.abs(codes.astype(int) - expected) <= 1).mean() > 0.95
    pq.write_table(text_table(0, 40), "src/c.parquet")
    assert run_json(capsys, *embed_command(out, fitted, *options))["rows"] == 290
    extended = stack_vectors(read_output(out))
    np.testing.assert_array_equal(extended[:250], codes)
    assert (np.abs(extended[250:].astype(int) - codes[:40]) <= 1).mean() > 0.95


def test_progress_rate_excludes_model_loading(capsys, caplog, monkeypatch, fitted, source):
    load_seconds, load = [], embed_stream.StreamModel.load

    def load_slowly(*args, **options):
        load_seconds.append(10_000)
        return load(*args, **options)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(load_seconds))
    monkeypatch.setattr(embed_stream.StreamModel, "load", load_slowly)
    monkeypatch.setattr(embed_stream, "time", clock)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0)
    caplog.set_level("INFO", "llmcond")
    run_json(capsys, *embed_command("out", fitted))
    matches = re.findall(r"embedding: (\d+)/250 rows, ([\d,]+) tokens/s", caplog.text)
    assert [int(rows) for rows, _ in matches] == [40, 80, 100, 130, 170, 210, 250]
    assert load_seconds == [10_000]
    assert all(int(rate.replace(",", "")) > 1 for _, rate in matches)


def test_outputs_are_equal_and_each_unit_is_a_file(capsys, fitted, source):
    for out in OUTPUTS:
        run_json(capsys, *embed_command(out, fitted))
    assert read_output("out").equals(read_output("out.lance"))
    names = sorted(path.name for path in Path("out").glob("*.parquet"))
    assert names == [f"part-{i:06}.parquet" for i in range(3 + 1 + 3)]


def test_lance_source_is_read_at_one_version(capsys, fitted, source):
    for start in range(0, 250, 90):
        lance.write_dataset(text_table(start, min(start + 90, 250)), "src.lance", mode="append")
    lance.dataset("src.lance").delete("id = 7 or id = 200")
    run_json(capsys, *embed_command("out.lance", fitted, source="src.lance"))
    assert read_output("out.lance")["id"].to_pylist() == [
        i for i in range(250) if i not in (7, 200)
    ]
    run_json(capsys, *embed_command("out", fitted, source="src.lance"))
    assert read_output("out").equals(read_output("out.lance"))


def test_condition_text_applies_to_all_rows_with_extra_columns(capsys, fitted, source):
    command = (
        "embed",
        "src",
        "--out",
        "out",
        "--run",
        fitted,
        "--text",
        "text",
        "--no-normalize",
    )
    run_json(capsys, *command, "--condition-text", "the place", "--keep", "url")
    output = read_output("out")
    assert output.column_names == ["url", "sentence", "condition", "embedding"]
    assert set(output["condition"].to_pylist()) == {"the place"}
    assert not np.allclose(np.linalg.norm(stack_vectors(output), axis=1), 1, atol=1e-2)


def test_values_apply_to_every_condition(capsys, fitted, source):
    options = ("--values", "Rome, Paris", "--head", "none")
    run_json(capsys, *embed_command("out", fitted, *options))
    output, expected = read_output("out"), embed_one_file(capsys, fitted, *options)
    assert output["condition"].equals(expected["condition"])
    assert set(output["condition"].to_pylist()) == {"the place", "the number of people"}
    np.testing.assert_allclose(stack_vectors(output), stack_vectors(expected), atol=2e-4)
    rows = output.slice(0, 4).to_pydict()
    conditions = [llmcond.Condition(text, ["Rome", "Paris"]) for text in rows["condition"]]
    embedder = llmcond.load_embedder(fitted, head="none", device="cpu")
    reference = embedder.encode(rows["sentence"], conditions)
    np.testing.assert_allclose(rows["embedding"], reference, atol=5e-3)
    without_values = embedder.encode(rows["sentence"], rows["condition"])
    assert np.abs(without_values - reference).max() > 5e-2


def test_one_file_with_various_column_types(capsys, fitted, source):
    rows = text_table(0, 95)
    rows = rows.set_column(1, "text", rows["text"].dictionary_encode())
    rows = rows.set_column(2, "topic", rows["topic"].cast(pa.large_string()))
    rows = rows.append_column("more", pa.array([{"a": [i]} for i in range(95)]))
    pq.write_table(rows, "one.parquet", row_group_size=1000)
    for out in OUTPUTS:
        run_json(capsys, *embed_command(out, fitted, source="one.parquet"))
        assert read_output(out)["more"].to_pylist() == rows["more"].to_pylist()
        assert read_output(out)["sentence"].to_pylist() == rows["text"].to_pylist()


def test_column_types_are_unified_and_partitions_become_columns(capsys, fitted, source):
    Path("hive/lang=en").mkdir(parents=True)
    Path("hive/lang=d%C3%A9").mkdir()
    first, second = text_table(0, 3), text_table(3, 5)
    first = first.set_column(3, "url", pa.nulls(3))
    first = first.set_column(0, "id", first["id"].cast(pa.int16()))
    pq.write_table(second, "hive/lang=en/x.parquet")
    pq.write_table(first, "hive/lang=d%C3%A9/x.parquet")
    pq.write_table(first.slice(0, 0), "hive/lang=en/none.parquet")
    run_json(capsys, *embed_command("out", fitted, source="hive"))
    columns = read_output("out").to_pydict()
    assert columns["lang"] == ["dé"] * 3 + ["en"] * 2
    assert columns["url"] == [None] * 3 + second["url"].to_pylist()
    assert columns["id"] == list(range(5))


def test_linked_files_are_read_once(capsys, fitted, source):
    Path("src/again").symlink_to(Path("src").absolute())
    Path("src/0.parquet").symlink_to("b.parquet")
    Path("other").mkdir()
    pq.write_table(text_table(250, 260), "other/x.parquet")
    Path("src/other").symlink_to(Path("other").absolute())
    Path("src/twice").symlink_to(Path("other").absolute())
    assert run_json(capsys, *embed_command("out", fitted))["rows"] == 260
    assert sorted(read_output("out")["id"].to_pylist()) == list(range(260))


def test_row_ranges_are_read_in_any_order(source):
    files = streams.open_texts("src")
    columns = streams.StreamColumns("text", (), pa.schema([("id", pa.int64())]))
    for start, stop in ((0, 10), (35, 95), (95, 100), (5, 31), (31, 31), (99, 100)):
        rows = files.read("a/1.parquet", start, stop, columns)
        assert rows["id"].to_pylist() == list(range(start, stop))


# -- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("out", OUTPUTS)
def test_repeated_call_does_nothing(capsys, fitted, source, out, monkeypatch):
    run_json(capsys, *embed_command(out, fitted))
    before = read_output(out)
    monkeypatch.setattr(embed_stream.UnitEmbedder, "work", None)
    summary = run_json(capsys, *embed_command(out, fitted))
    assert (summary["rows"], summary["dim"]) == (250, stack_vectors(before).shape[1])
    assert read_output(out).equals(before)


@pytest.mark.parametrize("out", OUTPUTS)
def test_new_files_are_appended(capsys, fitted, source, out):
    run_json(capsys, *embed_command(out, fitted))
    before = read_output(out)
    pq.write_table(text_table(250, 300), "src/a/0.parquet")
    assert run_json(capsys, *embed_command(out, fitted))["rows"] == 300
    assert read_output(out).slice(0, 250).equals(before)
    assert read_output(out)["id"].to_pylist() == list(range(300))


@pytest.mark.parametrize(
    ("out", "point", "count", "n_existing"),
    [
        ("out", "half written", 1, 0),
        ("out", "half written", 4, 100),
        ("out", "written", 7, 250),
        ("out", "not begun", 1, 0),
        ("out.lance", "written", 1, 0),
        ("out.lance", "written", 6, 130),
        ("out.lance", "not committed", 1, 0),
        ("out.lance", "not committed", 3, 130),
        ("out.lance", "not begun", 6, 130),
    ],
)
def test_killed_call_resumes(capsys, fitted, source, tmp_path, out, point, count, n_existing):
    run_json(capsys, *embed_command(f"whole-{out}", fitted))
    command = Command(
        tmp_path / "killed", embed_command(out, fitted), setup=partial(kill_at, point, count)
    )
    assert command.finish()[0] == -signal.SIGKILL
    if n_existing:
        assert len(read_output(out)) == n_existing
    assert run([str(argument) for argument in embed_command(out, fitted)]) == 0
    assert (f"({n_existing} of them existed)" in capsys.readouterr().err) == bool(n_existing)
    assert read_output(out).equals(read_output(f"whole-{out}"))
    leftovers = [path for path in Path(out).rglob("*") if path.name.startswith(".")]
    assert not leftovers
    if out.endswith(".lance"):
        dataset = lance.dataset(out)
        referenced = {file.path for part in dataset.get_fragments() for file in part.data_files()}
        assert {path.name for path in Path(out, "data").iterdir()} == referenced


@pytest.mark.parametrize("out", OUTPUTS)
def test_partial_record_does_not_prevent_start(capsys, fitted, source, out):
    Path(out).mkdir()
    for name in ("_llmcond.lock", "._llmcond.json.2fdf50ec"):  # a killed process leaves these
        Path(out, name).touch()
    assert run_json(capsys, *embed_command(out, fitted))["rows"] == 250
    assert not Path(out, "._llmcond.json.2fdf50ec").exists()


def test_leftovers_of_killed_commit_are_removed(capsys, fitted, source):
    run_json(capsys, *embed_command("out.lance", fitted))
    staged = [Path("out.lance", *parts) for parts in STAGED]
    for path in staged:
        path.touch()
    assert run_json(capsys, *embed_command("out.lance", fitted))["rows"] == 250
    assert [path for path in staged if path.exists()] == []
    assert len(read_output("out.lance")) == 250


def change_record(out, **changes):
    path = Path(out, "_llmcond.json")
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in record.items() if value != "missing"}))


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"unit_rows": -5}, "'unit_rows' is -5"),
        ({"unit_rows": 0}, "'unit_rows' is 0"),
        ({"unit_rows": "x"}, "'unit_rows' is 'x'"),
        ({"unit_rows": "missing"}, "the key 'unit_rows' is missing"),
        ({"made_of": "missing"}, "the key 'made_of' is missing"),
        ({"made_of": []}, r"'made_of' is \[\]"),
        ({"columns": "!!"}, "its columns cannot be read"),
        ({"columns": "AAAA"}, "its columns cannot be read"),
        ({"columns": 5}, "'columns' is 5"),
        ({"parts": None}, "'parts' is None"),
        ({"parts": [["a"]]}, "parts.0"),
        ({"parts": []}, r"'parts' is \[\]"),
        ({"format": True}, "states no format"),
    ],
)
def test_damaged_record_is_reported(capsys, embedded_run, out, changes, expected):
    change_record(out, **changes)
    check_damage_is_reported(capsys, embedded_run, out, expected)


@pytest.mark.parametrize("rows", [10**12, -1, 41])
def test_record_with_wrong_row_counts_is_reported(capsys, embedded_run, rows):
    record = json.loads(Path("out/_llmcond.json").read_text())
    change_record("out", parts=[[*record["parts"][0][:2], rows], *record["parts"][1:]])
    check_damage_is_reported(capsys, embedded_run, "out", "its numbers of rows|'parts.0.2' is -1")


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{", ""])
def test_record_that_is_no_json_object_is_reported(capsys, embedded_run, content):
    Path("out/_llmcond.json").write_text(content)
    check_damage_is_reported(capsys, embedded_run, "out", "out/_llmcond.json is damaged")


@pytest.mark.parametrize("damage", ["junk", "cut", "rows", "columns", "swapped", "pipe"])
def test_damaged_output_file_is_reported(capsys, embedded_run, damage):
    path = Path("out/part-000000.parquet")
    content = path.read_bytes()
    if damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "swapped":
        shutil.copy("out/part-000001.parquet", path)
    elif damage in ("junk", "cut"):
        path.write_bytes(b"junk" if damage == "junk" else content[:-5])
    else:
        rows = pq.read_table(path)
        pq.write_table(rows.slice(1) if damage == "rows" else rows.drop(["embedding"]), path)
    check_damage_is_reported(
        capsys,
        embedded_run,
        "out",
        "part-000000.parquet is damaged: it does not hold the expected 40 emb",
    )
    path.unlink()
    assert run_json(capsys, *embed_command("out", embedded_run))["rows"] == 250


def test_output_file_with_other_columns_is_reported(capsys, embedded_run):
    path = Path("out/part-000000.parquet")
    pq.write_table(pq.read_table(path).drop(["sentence"]), path)
    check_damage_is_reported(capsys, embedded_run, "out", "different dimensions or columns")


def test_record_that_is_a_pipe_does_not_block(capsys, embedded_run):
    Path("out/_llmcond.json").unlink()
    os.mkfifo("out/_llmcond.json")
    assert "out/_llmcond.json is damaged" in run_rejected(
        capsys, *embed_command("out", embedded_run)
    )


@pytest.mark.parametrize("column", ["embedding", "other"])
def test_overwritten_dataset_is_reported(capsys, embedded_run, column):
    lance.write_dataset(pa.table({column: [1] * 250}), "out.lance", mode="overwrite")
    check_damage_is_reported(
        capsys, embedded_run, "out.lance", "has no column embedding of vectors"
    )


def test_dataset_with_missing_file_is_reported(capsys, embedded_run):
    next(Path("out.lance/data").iterdir()).unlink()
    check_damage_is_reported(capsys, embedded_run, "out.lance", "out.lance is damaged: data/")


def test_dataset_with_damaged_metadata_is_reported(capsys, embedded_run):
    file = next(Path("out.lance/data").iterdir())
    content = file.read_bytes()
    file.write_bytes(content[:-40] + b"\xff" * 24 + content[-16:])  # of the same size
    check_damage_is_reported(capsys, embedded_run, "out.lance", "out.lance is damaged: data/")


def test_dataset_with_damaged_manifest_is_reported(capsys, embedded_run):
    for manifest in Path("out.lance/_versions").iterdir():
        content = manifest.read_bytes()
        middle = len(content) // 2
        manifest.write_bytes(content[:middle] + b"rrrr" + content[middle + 4 :])
    check_damage_is_reported(capsys, embedded_run, "out.lance", "out.lance cannot be")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory, fitted):
    """A folder with the source and both outputs, and a copy of it."""
    folder = tmp_path_factory.mktemp("embedded")
    write_source(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(embed_stream, "UNIT_ROWS", 40)
        for out in OUTPUTS:
            assert run([str(argument) for argument in embed_command(out, fitted)]) == 0
    return folder, shutil.copytree(folder, tmp_path_factory.mktemp("copy") / "embedded")


@pytest.fixture
def embedded_run(embedded, fitted, monkeypatch):
    """The run after its embeddings were written to both outputs, which a test may change.

    The folder is the same for all tests, because the outputs record the path of their source.
    """
    folder, copy = embedded
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(embed_stream, "UNIT_ROWS", 40)
    return fitted


def check_damage_is_reported(capsys, run_folder, out, expected):
    before = {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
    assert run([str(argument) for argument in embed_command(out, run_folder)]) in (1, 2)
    captured = capsys.readouterr()
    assert re.search(expected, captured.err.splitlines()[-1]), captured.err
    assert "Traceback" not in captured.err
    assert not captured.out
    assert {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()} == before


def limit_file_size(size):
    embed_stream.UNIT_ROWS = 40
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("out", OUTPUTS)
def test_full_disk_is_reported_and_loses_nothing(capsys, fitted, source, tmp_path, out):
    first = partial(limit_file_size, 4096)
    status, _, err = Command(tmp_path / "full", embed_command(out, fitted), setup=first).finish()
    assert status == 2
    assert "error: the disk is full: " in err.splitlines()[-1]
    assert "Traceback" not in err
    run_json(capsys, *embed_command(out, fitted))
    assert len(read_output(out)) == 250


@pytest.mark.parametrize("out", OUTPUTS)
def test_nearly_full_disk_is_rejected_before_writing(capsys, fitted, source, out, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=2**20 - 1)
    monkeypatch.setattr("llmcond.files.shutil.disk_usage", lambda _: usage)
    assert "the disk is full: " in run_rejected(capsys, *embed_command(out, fitted))


# -- workers -----------------------------------------------------------------------------------

ON_RAY = ("--scale", "ray", "--actors")


@pytest.mark.parametrize(
    ("out", "workers"),
    [("out", ("--workers", "2")), ("out.lance", ("--workers", "2")), ("out.lance", (*ON_RAY, "2"))],
)
def test_workers_write_same_rows_even_if_one_dies(
    capsys, caplog, fitted, source, ray, two_threads, out, workers, monkeypatch
):
    run_json(capsys, *embed_command(f"local-{out}", fitted))
    monkeypatch.setattr(embed_stream, "UnitEmbedder", KilledOnce)
    assert run_json(capsys, *embed_command(out, fitted, *workers))["rows"] == 250
    assert "a worker died" in caplog.text
    assert read_output(out).equals(read_output(f"local-{out}"))
    if out.endswith(".lance"):
        assert len(list(Path(out, "data").iterdir())) == 7


def test_errors_of_actors_report_one_line(capsys, fitted, source, ray, monkeypatch):
    rows = text_table(130, 250).to_pydict()
    rows["topic"][119] = "the place " * 50
    pq.write_table(pa.table(rows), "src/b.parquet")
    line = run_rejected(capsys, *embed_command("out.lance", fitted, *ON_RAY, "1"))
    assert line.startswith("row 120 of b.parquet: ")
    assert Path("out.lance/_llmcond.json").exists()
    assert "--scale needs --out FOLDER" in run_rejected(
        capsys, *embed_command("v.npy", fitted, *ON_RAY, "1")
    )
    assert "--actors needs --scale ray" in run_rejected(
        capsys, *embed_command("o", fitted, "--actors", "1")
    )


@pytest.mark.parametrize("out", OUTPUTS)
def test_output_of_killed_driver_is_finished_without_workers(capsys, fitted, source, tmp_path, out):
    run_json(capsys, *embed_command(f"local-{out}", fitted))
    point = "not committed" if out.endswith(".lance") else "written"
    first = partial(kill_at, point, 2, threads=2)
    command = Command(
        tmp_path / "killed", embed_command(out, fitted, "--workers", "2"), setup=first
    )
    assert command.finish()[0] == -signal.SIGKILL
    run_json(capsys, *embed_command(out, fitted))
    assert read_output(out).equals(read_output(f"local-{out}"))


# -- invalid input -----------------------------------------------------------------------------


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--head", "none"), "started with another head"),
        (("--no-normalize",), "another normalize True, not False"),
        (("--keep", "id"), r"another keep \[\], not \['id'\]"),
        (("--truncate-dim", 2), "another truncate_dim None, not 2"),
        (("--precision", "binary"), "another precision None, not 'binary'"),
        (("--values", "a, b"), r"another values None, not \['a', 'b'\]"),
        (("--condition-text", "the mood"), "condition 'topic', not None; condition_text None"),
    ],
)
def test_started_output_rejects_other_options(capsys, fitted, source, out, options, expected):
    run_json(capsys, *embed_command(out, fitted))
    before = read_output(out)
    arguments = list(embed_command(out, fitted, *options))
    if "--condition-text" in options:
        del arguments[arguments.index("--condition") : arguments.index("--condition") + 2]
    line = run_rejected(capsys, *arguments)
    assert re.search(expected, line), line
    assert line.startswith(f"{out} was started with")
    assert read_output(out).equals(before)


def test_changed_source_is_rejected(capsys, fitted, source):
    run_json(capsys, *embed_command("out", fitted))
    pq.write_table(text_table(500, 530), "src/a/2.parquet")
    assert "has changed since out was started: 'a/2.parquet' is missing" in run_rejected(
        capsys, *embed_command("out", fitted)
    )
    Path("src/b.parquet").unlink()
    assert "'a/2.parquet', 'b.parquet' are missing" in run_rejected(
        capsys, *embed_command("out", fitted)
    )
    lance.write_dataset(text_table(0, 60), "src.lance")
    run_json(capsys, *embed_command("out.lance", fitted, source="src.lance"))
    lance.dataset("src.lance").delete("id = 3")
    line = run_rejected(capsys, *embed_command("out.lance", fitted, source="src.lance"))
    assert "'fragment 0' is missing or modified" in line
    shutil.copytree("src", "copy")
    assert "another source" in run_rejected(capsys, *embed_command("out", fitted, source="copy"))


@pytest.mark.parametrize("out", OUTPUTS)
def test_invalid_row_is_reported_before_writing(capsys, fitted, source, out):
    rows = text_table(100, 130).to_pydict()
    rows["text"][4], rows["topic"][20], rows["text"][21] = " \t", None, ""
    pq.write_table(pa.table(rows), "src/a/2.parquet")
    line = run_rejected(capsys, *embed_command(out, fitted))
    assert line.startswith("row 5 of a/2.parquet: text is empty (2 more rows are invalid: 21, 22)")
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--out out --text txt", "no column 'txt'; it has 'id'"),
        ("--out out --text text", "a/1.parquet has no column 'condition'"),
        ("--out out --text id --condition topic", "of the type int64; expected texts"),
        ("--out out --text text --condition topic --keep no", "has no column 'no'"),
        ("--out out --text url --condition topic --keep embedding", "has no column 'emb"),
        ("--out out --text text --condition-text c --condition topic", "use only one of them"),
        ("--out out --text text --condition topic --head no", "has no fitted head"),
        ("--out all.txt --text text --condition topic", "name a .parquet or .csv or .npy file"),
        ("--out v.npy --text text --condition topic", "without train, dev"),
        ("--out file --text text --condition topic", "file is a file; name a folder"),
        ("--out foreign --text text --condition topic", "foreign holds other files"),
        ("--out foreign.lance --text text --condition topic", "holds other files"),
        ("--out s3://b/v.npy --text text --condition topic", "on this machine only"),
        ("--out s3://k:s@b/v --text text --condition topic", "contains credentials"),
        ("--out s4://b/v --text text --condition topic", "expected s3://, gs://, az://, file:"),
        ("--out s4://b/v --text text --condition topic", "Did you mean 's3'"),
        ("--out hdfs://b/v --text text --condition topic", "does not support hdfs:// storage"),
        ("--out s3:///v --text text --condition topic", "s3:///v names no bucket"),
    ],
)
def test_invalid_arguments_report_one_line(capsys, fitted, source, arguments, expected):
    Path("file").touch()
    Path("foreign").mkdir()
    Path("foreign/x.txt").touch()
    lance.write_dataset(text_table(0, 3), "foreign.lance")
    line = run_rejected(capsys, "embed", "src", "--run", fitted, *arguments.split())
    assert expected in line
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("source_name", "expected"),
    [
        ("empty", "is a folder without .parquet files"),
        ("none", "is empty: it has no rows"),
        ("damaged", "x.parquet cannot be read: "),
        ("cut.lance", "cut.lance cannot be read"),
        ("texts.pdf", "texts.pdf ends in .pdf. Expected a .csv"),
        ("taken", "x.parquet has a column 'embedding'"),
        ("mixed", "y.parquet and previous parts have different columns: 'url'"),
        ("clash", "y.parquet has a column of another type"),
    ],
)
def test_unreadable_sources_report_one_line(capsys, fitted, source, source_name, expected):
    rows = text_table(0, 3)
    folder = Path(source_name)
    if source_name == "texts.pdf":
        folder.write_text("text,topic\na,b\n")
    else:
        folder.mkdir()
    if source_name == "damaged":
        Path("damaged/x.parquet").write_bytes(Path("src/b.parquet").read_bytes()[:500])
    elif source_name not in ("empty", "cut.lance", "texts.pdf"):
        file_rows = rows.slice(0, 0) if source_name == "none" else rows
        file_rows = (
            file_rows.append_column("embedding", [[1, 2, 3]])
            if source_name == "taken"
            else file_rows
        )
        pq.write_table(file_rows, folder / "x.parquet")
    if source_name == "mixed":
        pq.write_table(rows.drop(["url"]), "mixed/y.parquet")
    if source_name == "clash":
        pq.write_table(rows.set_column(3, "url", rows["id"]), "clash/y.parquet")
    code = run([str(argument) for argument in embed_command("out", fitted, source=source_name)])
    err = capsys.readouterr().err
    assert code in (1, 2)
    assert expected in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not Path("out").exists()


def test_locked_or_foreign_output_is_rejected(capsys, fitted, source):
    from filelock import FileLock

    run_json(capsys, *embed_command("out", fitted))
    with FileLock("out/_llmcond.lock"):
        assert "another llmcond embed is writing to out" in run_rejected(
            capsys, *embed_command("out", fitted)
        )
    Path("out/foreign.parquet").touch()
    assert "out holds foreign.parquet, which does not belong to these" in run_rejected(
        capsys, *embed_command("out", fitted)
    )
    run_json(capsys, *embed_command("out.lance", fitted))
    lance.dataset("out.lance").delete("id = 3")
    assert "249 rows, but no work unit ends there" in run_rejected(
        capsys, *embed_command("out.lance", fitted)
    )


@pytest.mark.parametrize("change", ["delete", "append", "unit"])
def test_concurrent_writer_of_dataset_is_detected(capsys, fitted, source, monkeypatch, change):
    monkeypatch.setattr(outputs, "_COMMIT_FRAGMENTS", 2)
    original, calls = outputs.LanceOutput.add_unit, []

    def add(self, *args):
        original(self, *args)
        calls.append(args)
        if len(calls) == 3 and change == "delete":
            lance.dataset("out.lance").delete("id = 3")
        elif len(calls) == 3 and change == "append":
            lance.write_dataset(read_output("out.lance").slice(0, 1), "out.lance", mode="append")
        elif len(calls) == 3:
            other = outputs.open_output("out.lance")
            other._dataset, other._schema = other._latest(), args[2]
            other._rows, other._ready = 80, [json.loads(args[1])]
            other._commit()

    monkeypatch.setattr(outputs.LanceOutput, "add_unit", add)
    assert run([str(argument) for argument in embed_command("out.lance", fitted)]) == 1
    assert "another program has written to out.lance in the meantime" in capsys.readouterr().err
    ids = read_output("out.lance")["id"].to_pylist()
    assert change != "unit" or ids == list(range(100))


def test_long_condition_is_reported_with_its_row(capsys, fitted, source):
    rows = text_table(130, 250).to_pydict()
    rows["topic"][45] = "the place " * 50
    pq.write_table(pa.table(rows), "src/b.parquet")
    line = run_rejected(capsys, *embed_command("out", fitted))
    assert line.startswith("row 46 of b.parquet: ")
    assert len(read_output("out")) == 170


def test_nan_is_reported_with_its_row(capsys, fitted, source, monkeypatch):
    from llmcond.encoders.encoder import Encoder

    original = Encoder.encode_with_counts

    def encode_with_nan(self, inputs, *args, **kwargs):
        encoded = original(self, inputs, *args, **kwargs)
        for index, item in enumerate(inputs):
            if "number 21" in f"{item.context} {item.text}":
                encoded.vectors[index] = np.nan
        return encoded

    monkeypatch.setattr(Encoder, "encode_with_counts", encode_with_nan)
    line = run_rejected(capsys, *embed_command("out.lance", fitted))
    assert re.match(r"row (22|59|96) of a/1.parquet: .* NaN or infinity", line)
