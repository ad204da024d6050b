"""Texts that do not fit in memory: what is written, what a kill leaves, and what is refused."""

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
from helpers.commands import ok, refused
from helpers.processes import Command
from helpers.units import DiesOnce, embed, killed_at, texts

import llmcond
from llmcond import progress
from llmcond.cli import run
from llmcond.data import streams
from llmcond.scale import outputs
from llmcond.workflows import embed_stream

OUTPUTS = ["out", "out.lance"]
#: Files of Lance that a kill within a commit leaves.
STAGED = [("_transactions", ".tmp5iRQOd"), ("_versions", "18446744073709551614.manifest#1")]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Three files in a folder of folders, of which units take 40 rows, and the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embed_stream, "UNIT_ROWS", 40)
    for name, start, stop in (("a/1", 0, 100), ("a/2", 100, 130), ("b", 130, 250)):
        path = tmp_path / "src" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(texts(start, stop), path, row_group_size=30)
    (tmp_path / "src" / "_SUCCESS").touch()
    (tmp_path / "src" / "read.me").write_text("not read")
    return Path("src")


def table(out):
    """Return what was written, as any reader of such a folder or dataset sees it."""
    if str(out).endswith(".lance"):
        return lance.dataset(str(out)).to_table()
    return pq.read_table(out)


def vectors(found):
    return np.stack(found["embedding"].to_numpy())


def of_one_file(capsys, run_folder, *others):
    """Return what ``llmcond embed`` writes of all rows in one file."""
    pq.write_table(texts(0, 250), "all.parquet")
    ok(capsys, *embed("all-embedded.parquet", run_folder, *others, source="all.parquet"))
    return pq.read_table("all-embedded.parquet")


# -- what is written ---------------------------------------------------------------------------


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("head", ["linear", "none"])
def test_embeddings_are_those_of_one_file(capsys, fitted, source, out, head):
    told = ok(capsys, *embed(out, fitted, "--head", head))
    found, expected = table(out), of_one_file(capsys, fitted, "--head", head)
    assert told["rows"] == len(found) == 250
    assert told["dim"] == vectors(found).shape[1]
    assert found.column_names == ["id", "url", "sentence", "condition", "embedding"]
    assert found["id"].to_pylist() == list(range(250))
    assert found.drop(["id", "url", "embedding"]).equals(expected.drop(["embedding"]))
    np.testing.assert_allclose(vectors(found), vectors(expected), atol=2e-4)
    assert np.allclose(np.linalg.norm(vectors(found), axis=1), 1, atol=1e-5)


def test_progress_has_a_rate_that_leaves_loading_out(capsys, caplog, monkeypatch, fitted, source):
    loading, load = [], embed_stream.make_embedder

    def load_slowly(*args):
        loading.append(10_000)
        return load(*args)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(loading))
    monkeypatch.setattr(embed_stream, "make_embedder", load_slowly)
    monkeypatch.setattr(embed_stream, "time", clock)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0)
    caplog.set_level("INFO", "llmcond")
    ok(capsys, *embed("out", fitted))
    shown = re.findall(r"embedding: (\d+)/250 rows, ([\d,]+) tokens/s", caplog.text)
    assert [int(rows) for rows, _ in shown] == [40, 80, 100, 130, 170, 210, 250]
    assert loading == [10_000]
    assert all(int(rate.replace(",", "")) > 1 for _, rate in shown)


def test_outputs_are_equal_and_units_are_files(capsys, fitted, source):
    for out in OUTPUTS:
        ok(capsys, *embed(out, fitted))
    assert table("out").equals(table("out.lance"))
    names = sorted(path.name for path in Path("out").glob("*.parquet"))
    assert names == [f"part-{i:06}.parquet" for i in range(3 + 1 + 3)]


def test_a_lance_dataset_is_read_at_one_version(capsys, fitted, source):
    for start in range(0, 250, 90):
        lance.write_dataset(texts(start, min(start + 90, 250)), "src.lance", mode="append")
    lance.dataset("src.lance").delete("id = 7 or id = 200")
    ok(capsys, *embed("out.lance", fitted, source="src.lance"))
    assert table("out.lance")["id"].to_pylist() == [i for i in range(250) if i not in (7, 200)]
    ok(capsys, *embed("out", fitted, source="src.lance"))
    assert table("out").equals(table("out.lance"))


def test_one_condition_for_all_and_columns_that_are_kept(capsys, fitted, source):
    given = (
        "embed",
        "src",
        "--out",
        "out",
        "--run",
        fitted,
        "--sentence",
        "text",
        "--no-normalize",
    )
    ok(capsys, *given, "--condition-text", "the place", "--keep", "url")
    found = table("out")
    assert found.column_names == ["url", "sentence", "condition", "embedding"]
    assert set(found["condition"].to_pylist()) == {"the place"}
    assert not np.allclose(np.linalg.norm(vectors(found), axis=1), 1, atol=1e-2)


def test_every_condition_gets_the_same_values(capsys, fitted, source):
    given = ("--values", "Rome, Paris", "--head", "none")
    ok(capsys, *embed("out", fitted, *given))
    found, expected = table("out"), of_one_file(capsys, fitted, *given)
    assert found["condition"].equals(expected["condition"])
    assert set(found["condition"].to_pylist()) == {"the place", "the number of people"}
    np.testing.assert_allclose(vectors(found), vectors(expected), atol=2e-4)
    rows = found.slice(0, 4).to_pydict()
    conditions = [llmcond.Condition(text, ["Rome", "Paris"]) for text in rows["condition"]]
    embedder = llmcond.load_embedder(fitted, head="none", device="cpu")
    wanted = embedder.encode(rows["sentence"], conditions)
    np.testing.assert_allclose(rows["embedding"], wanted, atol=5e-3)
    plain = embedder.encode(rows["sentence"], rows["condition"])
    assert np.abs(plain - wanted).max() > 5e-2


def test_one_large_file_and_types_of_all_kinds(capsys, fitted, source):
    own = texts(0, 95)
    own = own.set_column(1, "text", own["text"].dictionary_encode())
    own = own.set_column(2, "topic", own["topic"].cast(pa.large_string()))
    own = own.append_column("more", pa.array([{"a": [i]} for i in range(95)]))
    pq.write_table(own, "one.parquet", row_group_size=1000)
    for out in OUTPUTS:
        ok(capsys, *embed(out, fitted, source="one.parquet"))
        assert table(out)["more"].to_pylist() == own["more"].to_pylist()
        assert table(out)["sentence"].to_pylist() == own["text"].to_pylist()


def test_types_that_hold_all_parts_and_what_paths_say(capsys, fitted, source):
    Path("hive/lang=en").mkdir(parents=True)
    Path("hive/lang=d%C3%A9").mkdir()
    first, second = texts(0, 3), texts(3, 5)
    first = first.set_column(3, "url", pa.nulls(3))
    first = first.set_column(0, "id", first["id"].cast(pa.int16()))
    pq.write_table(second, "hive/lang=en/x.parquet")
    pq.write_table(first, "hive/lang=d%C3%A9/x.parquet")
    pq.write_table(first.slice(0, 0), "hive/lang=en/none.parquet")
    ok(capsys, *embed("out", fitted, source="hive"))
    found = table("out").to_pydict()
    assert found["lang"] == ["dé"] * 3 + ["en"] * 2
    assert found["url"] == [None] * 3 + second["url"].to_pylist()
    assert found["id"] == list(range(5))


def test_each_file_is_read_once_wherever_links_lead(capsys, fitted, source):
    Path("src/again").symlink_to(Path("src").absolute())
    Path("src/0.parquet").symlink_to("b.parquet")
    Path("other").mkdir()
    pq.write_table(texts(250, 260), "other/x.parquet")
    Path("src/other").symlink_to(Path("other").absolute())
    Path("src/twice").symlink_to(Path("other").absolute())
    assert ok(capsys, *embed("out", fitted))["rows"] == 260
    assert sorted(table("out")["id"].to_pylist()) == list(range(260))


def test_rows_that_are_skipped_are_read_forward(source):
    files = streams.open_texts("src")
    columns = streams.StreamColumns("text", None, pa.schema([("id", pa.int64())]))
    for start, stop in ((0, 10), (35, 95), (95, 100), (5, 31), (31, 31), (99, 100)):
        found = files.read("a/1.parquet", start, stop, columns)
        assert found["id"].to_pylist() == list(range(start, stop))


# -- going on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("out", OUTPUTS)
def test_the_same_call_again_does_nothing(capsys, fitted, source, out, monkeypatch):
    ok(capsys, *embed(out, fitted))
    before = table(out)
    monkeypatch.setattr(embed_stream.UnitEmbedder, "work", None)
    told = ok(capsys, *embed(out, fitted))
    assert (told["rows"], told["dim"]) == (250, vectors(before).shape[1])
    assert table(out).equals(before)


@pytest.mark.parametrize("out", OUTPUTS)
def test_parts_that_are_new_are_embedded_behind_the_others(capsys, fitted, source, out):
    ok(capsys, *embed(out, fitted))
    before = table(out)
    pq.write_table(texts(250, 300), "src/a/0.parquet")
    assert ok(capsys, *embed(out, fitted))["rows"] == 300
    assert table(out).slice(0, 250).equals(before)
    assert table(out)["id"].to_pylist() == list(range(300))


@pytest.mark.parametrize(
    ("out", "point", "count", "there"),
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
def test_a_killed_call_goes_on(capsys, fitted, source, tmp_path, out, point, count, there):
    ok(capsys, *embed(f"whole-{out}", fitted))
    own = Command(tmp_path / "killed", embed(out, fitted), first=partial(killed_at, point, count))
    assert own.finish()[0] == -signal.SIGKILL
    if there:
        assert len(table(out)) == there
    assert run([str(argument) for argument in embed(out, fitted)]) == 0
    assert (f"({there} of them existed)" in capsys.readouterr().err) == bool(there)
    assert table(out).equals(table(f"whole-{out}"))
    left = [path for path in Path(out).rglob("*") if path.name.startswith(".")]
    assert not left
    if out.endswith(".lance"):
        dataset = lance.dataset(out)
        named = {file.path for own in dataset.get_fragments() for file in own.data_files()}
        assert {path.name for path in Path(out, "data").iterdir()} == named


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_record_that_was_only_half_written_is_no_hindrance(capsys, fitted, source, out):
    Path(out).mkdir()
    for name in ("_llmcond.lock", "._llmcond.json.2fdf50ec"):  # what a kill leaves
        Path(out, name).touch()
    assert ok(capsys, *embed(out, fitted))["rows"] == 250
    assert not Path(out, "._llmcond.json.2fdf50ec").exists()


def test_what_a_kill_left_of_a_commit_is_removed(capsys, fitted, source):
    ok(capsys, *embed("out.lance", fitted))
    staged = [Path("out.lance", *own) for own in STAGED]
    for path in staged:
        path.touch()
    assert ok(capsys, *embed("out.lance", fitted))["rows"] == 250
    assert [path for path in staged if path.exists()] == []
    assert len(table("out.lance")) == 250


def change_record(out, **changes):
    path = Path(out, "_llmcond.json")
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: own for key, own in record.items() if own != "gone"}))


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unit_rows": -5}, "'unit_rows' is -5"),
        ({"unit_rows": 0}, "'unit_rows' is 0"),
        ({"unit_rows": "x"}, "'unit_rows' is 'x'"),
        ({"unit_rows": "gone"}, "the key 'unit_rows' is missing"),
        ({"made_of": "gone"}, "the key 'made_of' is missing"),
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
def test_a_damaged_record_is_told_in_a_line(capsys, begun, out, changes, said):
    change_record(out, **changes)
    check_refused_as_damaged(capsys, begun, out, said)


@pytest.mark.parametrize("rows", [10**12, -1, 41])
def test_parts_that_have_other_rows_than_the_source_are_told(capsys, begun, rows):
    record = json.loads(Path("out/_llmcond.json").read_text())
    change_record("out", parts=[[*record["parts"][0][:2], rows], *record["parts"][1:]])
    check_refused_as_damaged(capsys, begun, "out", "its numbers of rows|'parts.0.2' is -1")


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{", ""])
def test_a_record_that_is_no_object_is_told_in_a_line(capsys, begun, content):
    Path("out/_llmcond.json").write_text(content)
    check_refused_as_damaged(capsys, begun, "out", "out/_llmcond.json is damaged")


@pytest.mark.parametrize("damage", ["junk", "cut", "rows", "columns", "another's", "pipe"])
def test_a_file_that_holds_no_embeddings_is_told_in_a_line(capsys, begun, damage):
    path = Path("out/part-000000.parquet")
    whole = path.read_bytes()
    if damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "another's":
        shutil.copy("out/part-000001.parquet", path)
    elif damage in ("junk", "cut"):
        path.write_bytes(b"junk" if damage == "junk" else whole[:-5])
    else:
        rows = pq.read_table(path)
        pq.write_table(rows.slice(1) if damage == "rows" else rows.drop(["embedding"]), path)
    check_refused_as_damaged(
        capsys, begun, "out", "part-000000.parquet is damaged: it does not hold the expected 40 emb"
    )
    path.unlink()
    assert ok(capsys, *embed("out", begun))["rows"] == 250


def test_a_file_of_other_columns_is_told_in_a_line(capsys, begun):
    path = Path("out/part-000000.parquet")
    pq.write_table(pq.read_table(path).drop(["sentence"]), path)
    check_refused_as_damaged(capsys, begun, "out", "different dimensions or columns")


def test_a_record_that_is_a_pipe_is_not_waited_for(capsys, begun):
    Path("out/_llmcond.json").unlink()
    os.mkfifo("out/_llmcond.json")
    assert "out/_llmcond.json is damaged" in refused(capsys, *embed("out", begun))


@pytest.mark.parametrize("column", ["embedding", "other"])
def test_a_dataset_that_others_wrote_over_is_told_in_a_line(capsys, begun, column):
    lance.write_dataset(pa.table({column: [1] * 250}), "out.lance", mode="overwrite")
    check_refused_as_damaged(capsys, begun, "out.lance", "has no column embedding of vectors")


def test_a_dataset_that_lost_a_file_is_told_in_a_line(capsys, begun):
    next(Path("out.lance/data").iterdir()).unlink()
    check_refused_as_damaged(capsys, begun, "out.lance", "out.lance is damaged: data/")


@pytest.fixture
def begun(capsys, fitted, source):
    """A run whose embeddings are in both outputs."""
    for out in OUTPUTS:
        ok(capsys, *embed(out, fitted))
    return fitted


def check_refused_as_damaged(capsys, run_folder, out, said):
    before = {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
    assert run([str(argument) for argument in embed(out, run_folder)]) in (1, 2)
    captured = capsys.readouterr()
    assert re.search(said, captured.err.splitlines()[-1]), captured.err
    assert "Traceback" not in captured.err
    assert not captured.out
    assert {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()} == before


def let_no_file_grow(size):
    embed_stream.UNIT_ROWS = 40
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_full_disk_is_told_in_a_line_and_loses_nothing(capsys, fitted, source, tmp_path, out):
    first = partial(let_no_file_grow, 4096)
    status, _, err = Command(tmp_path / "full", embed(out, fitted), first=first).finish()
    assert status == 2
    assert "error: the disk is full: " in err.splitlines()[-1]
    assert "Traceback" not in err
    ok(capsys, *embed(out, fitted))
    assert len(table(out)) == 250


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_disk_that_is_nearly_full_is_not_begun_to_write(capsys, fitted, source, out, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=2**20 - 1)
    monkeypatch.setattr("llmcond.files.shutil.disk_usage", lambda _: usage)
    assert "the disk is full: " in refused(capsys, *embed(out, fitted))


# -- by actors ---------------------------------------------------------------------------------

ON_RAY = ("--scale", "ray", "--actors")


@pytest.mark.parametrize("out", OUTPUTS)
def test_actors_write_the_same_also_where_one_dies(
    capsys, caplog, fitted, source, ray, out, monkeypatch
):
    ok(capsys, *embed(f"here-{out}", fitted))
    monkeypatch.setattr(embed_stream, "UnitEmbedder", DiesOnce)
    assert ok(capsys, *embed(out, fitted, *ON_RAY, "2"))["rows"] == 250
    assert "an actor died" in caplog.text
    assert table(out).equals(table(f"here-{out}"))
    if out.endswith(".lance"):
        assert len(list(Path(out, "data").iterdir())) == 7


def test_what_actors_refuse_is_told_in_a_line(capsys, fitted, source, ray, monkeypatch):
    rows = texts(130, 250).to_pydict()
    rows["topic"][119] = "the place " * 50
    pq.write_table(pa.table(rows), "src/b.parquet")
    line = refused(capsys, *embed("out.lance", fitted, *ON_RAY, "1"))
    assert line.startswith("row 120 of b.parquet: ")
    assert Path("out.lance/_llmcond.json").exists()
    assert "--scale needs --out FOLDER" in refused(capsys, *embed("v.npy", fitted, *ON_RAY, "1"))
    assert "--actors needs --scale ray" in refused(capsys, *embed("o", fitted, "--actors", "1"))


@pytest.mark.parametrize("out", OUTPUTS)
def test_what_a_killed_driver_left_is_finished_without_ray(capsys, fitted, source, tmp_path, out):
    ok(capsys, *embed(f"here-{out}", fitted))
    first = partial(killed_at, "not committed" if out.endswith(".lance") else "written", 2)
    killed = Command(tmp_path / "killed", embed(out, fitted, *ON_RAY, "1"), first=first)
    assert killed.finish()[0] == -signal.SIGKILL
    ok(capsys, *embed(out, fitted))
    assert table(out).equals(table(f"here-{out}"))


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize(
    ("others", "said"),
    [
        (("--head", "none"), "started with another head"),
        (("--no-normalize",), "another normalize True, not False"),
        (("--keep", "id"), r"another keep \[\], not \['id'\]"),
        (("--values", "a, b"), r"another values None, not \['a', 'b'\]"),
        (("--condition-text", "the mood"), "condition 'topic', not None; condition_text None"),
    ],
)
def test_what_was_begun_is_not_mixed_with_others(capsys, fitted, source, out, others, said):
    ok(capsys, *embed(out, fitted))
    before = table(out)
    given = list(embed(out, fitted, *others))
    if "--condition-text" in others:
        del given[given.index("--condition") : given.index("--condition") + 2]
    line = refused(capsys, *given)
    assert re.search(said, line), line
    assert line.startswith(f"{out} was started with")
    assert table(out).equals(before)


def test_a_source_that_has_changed_is_refused(capsys, fitted, source):
    ok(capsys, *embed("out", fitted))
    pq.write_table(texts(500, 530), "src/a/2.parquet")
    assert "has changed since out was started: 'a/2.parquet' is missing" in refused(
        capsys, *embed("out", fitted)
    )
    Path("src/b.parquet").unlink()
    assert "'a/2.parquet', 'b.parquet' are missing" in refused(capsys, *embed("out", fitted))
    lance.write_dataset(texts(0, 60), "src.lance")
    ok(capsys, *embed("out.lance", fitted, source="src.lance"))
    lance.dataset("src.lance").delete("id = 3")
    line = refused(capsys, *embed("out.lance", fitted, source="src.lance"))
    assert "'fragment 0' is missing or modified" in line
    shutil.copytree("src", "copy")
    assert "another source" in refused(capsys, *embed("out", fitted, source="copy"))


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_wrong_row_is_named_before_anything_is_written(capsys, fitted, source, out):
    rows = texts(100, 130).to_pydict()
    rows["text"][4], rows["topic"][20], rows["text"][21] = " \t", None, ""
    pq.write_table(pa.table(rows), "src/a/2.parquet")
    line = refused(capsys, *embed(out, fitted))
    assert line.startswith("row 5 of a/2.parquet: text is empty (2 more rows are invalid)")
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--out out --sentence txt", "no column 'txt'; it has 'id'"),
        ("--out out --sentence text", "a/1.parquet has no column 'condition'"),
        ("--out out --sentence id --condition topic", "of the type int64; expected texts"),
        ("--out out --sentence text --condition topic --keep no", "has no column 'no'"),
        ("--out out --sentence url --condition topic --keep embedding", "has no column 'emb"),
        ("--out out --sentence text --condition-text c --condition topic", "use only one of them"),
        ("--out out --sentence text --condition topic --head no", "has no fitted head"),
        ("--out all.txt --sentence text --condition topic", "name a .parquet or .csv or .npy file"),
        ("--out v.npy --sentence text --condition topic", "without train, dev"),
        ("--out file --sentence text --condition topic", "file is a file; name a folder"),
        ("--out foreign --sentence text --condition topic", "foreign holds other files"),
        ("--out foreign.lance --sentence text --condition topic", "holds other files"),
        ("--out s3://b/v.npy --sentence text --condition topic", "on this machine only"),
        ("--out s3://k:s@b/v --sentence text --condition topic", "contains credentials"),
        ("--out s4://b/v --sentence text --condition topic", "expected s3://, gs://, az://, file:"),
        ("--out s4://b/v --sentence text --condition topic", "Did you mean 's3'"),
        ("--out hdfs://b/v --sentence text --condition topic", "does not support hdfs:// storage"),
        ("--out s3:///v --sentence text --condition topic", "s3:///v names no bucket"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(capsys, fitted, source, arguments, said):
    Path("file").touch()
    Path("foreign").mkdir()
    Path("foreign/x.txt").touch()
    lance.write_dataset(texts(0, 3), "foreign.lance")
    line = refused(capsys, "embed", "src", "--run", fitted, *arguments.split())
    assert said in line
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("source_name", "said"),
    [
        ("empty", "is a folder without .parquet files"),
        ("none", "is empty: it has no rows"),
        ("damaged", "x.parquet cannot be read: "),
        ("cut.lance", "cut.lance cannot be read"),
        ("texts.csv", "texts.csv is of another format"),
        ("taken", "x.parquet has a column 'embedding'"),
        ("mixed", "y.parquet and previous parts have different columns: 'url'"),
        ("clash", "y.parquet has a column of another type"),
    ],
)
def test_sources_that_cannot_be_read_are_told_in_a_line(capsys, fitted, source, source_name, said):
    own = texts(0, 3)
    folder = Path(source_name)
    if source_name == "texts.csv":
        folder.write_text("text,topic\na,b\n")
    else:
        folder.mkdir()
    if source_name == "damaged":
        Path("damaged/x.parquet").write_bytes(Path("src/b.parquet").read_bytes()[:500])
    elif source_name not in ("empty", "cut.lance", "texts.csv"):
        mine = own.slice(0, 0) if source_name == "none" else own
        mine = mine.append_column("embedding", [[1, 2, 3]]) if source_name == "taken" else mine
        pq.write_table(mine, folder / "x.parquet")
    if source_name == "mixed":
        pq.write_table(own.drop(["url"]), "mixed/y.parquet")
    if source_name == "clash":
        pq.write_table(own.set_column(3, "url", own["id"]), "clash/y.parquet")
    code = run([str(argument) for argument in embed("out", fitted, source=source_name)])
    err = capsys.readouterr().err
    assert code in (1, 2)
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not Path("out").exists()


def test_nobody_else_writes_meanwhile(capsys, fitted, source):
    from filelock import FileLock

    ok(capsys, *embed("out", fitted))
    with FileLock("out/_llmcond.lock"):
        assert "another llmcond embed is writing to out" in refused(capsys, *embed("out", fitted))
    Path("out/foreign.parquet").touch()
    assert "out holds foreign.parquet, which does not belong to these" in refused(
        capsys, *embed("out", fitted)
    )
    ok(capsys, *embed("out.lance", fitted))
    lance.dataset("out.lance").delete("id = 3")
    assert "249 rows, but no work unit ends there" in refused(capsys, *embed("out.lance", fitted))


@pytest.mark.parametrize("change", ["delete", "append", "unit"])
def test_another_writer_of_the_same_dataset_is_noticed(capsys, fitted, source, monkeypatch, change):
    monkeypatch.setattr(outputs, "_COMMIT_FRAGMENTS", 2)
    original, seen = outputs.LanceOutput.add_unit, []

    def add(self, *args):
        original(self, *args)
        seen.append(args)
        if len(seen) == 3 and change == "delete":
            lance.dataset("out.lance").delete("id = 3")
        elif len(seen) == 3 and change == "append":
            lance.write_dataset(table("out.lance").slice(0, 1), "out.lance", mode="append")
        elif len(seen) == 3:
            other = outputs.open_output("out.lance")
            other._dataset, other._schema = other._latest(), args[2]
            other._rows, other._ready = 80, [json.loads(args[1])]
            other._commit()

    monkeypatch.setattr(outputs.LanceOutput, "add_unit", add)
    assert run([str(argument) for argument in embed("out.lance", fitted)]) == 1
    assert "another program has written to out.lance in the meantime" in capsys.readouterr().err
    found = table("out.lance")["id"].to_pylist()
    assert change != "unit" or found == list(range(100))


def test_a_condition_that_is_too_long_names_the_row(capsys, fitted, source):
    rows = texts(130, 250).to_pydict()
    rows["topic"][45] = "the place " * 50
    pq.write_table(pa.table(rows), "src/b.parquet")
    line = refused(capsys, *embed("out", fitted))
    assert line.startswith("row 46 of b.parquet: ")
    assert len(table("out")) == 170


def test_nan_names_the_row(capsys, fitted, source, monkeypatch):
    from llmcond.encoders.encoder import Encoder

    original = Encoder.encode_counted

    def broken(self, inputs, *args, **kwargs):
        found = original(self, inputs, *args, **kwargs)
        for place, item in enumerate(inputs):
            if "number 21" in f"{item.context} {item.text}":
                found.vectors[place] = np.nan
        return found

    monkeypatch.setattr(Encoder, "encode_counted", broken)
    line = refused(capsys, *embed("out.lance", fitted))
    assert re.match(r"row (22|59|96) of a/1.parquet: .* NaN or infinity", line)
