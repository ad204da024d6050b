"""Readers of tables: file formats, splits of folders, errors, and datasets of the hub."""

import csv
import gzip
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openpyxl import Workbook

from llmcond.data.datasets import Columns, read_collection, read_dataset, read_rows
from llmcond.data.rows import Rows
from llmcond.errors import LlmcondError, UserError

NAMES = ("sentence1", "sentence2", "condition", "label")
HEADER = b"sentence1,sentence2,condition,label\n"
LINE = b'{"sentence1": "a", "sentence2": "b", "condition": "c", "label": 1}\n'
TRICKY = [
    ('He said "no", twice', "one\ttab, one comma\nline two", "the place", 1),
    ("café – 日本語 🙂", "  spaces stay  ", "{sentence}", 2.5),
    ("a", "b\r\nd", "c", 5),
]


def tricky_rows(suffix: str) -> list[tuple[Any, ...]]:
    """Return rows that a format can hold: in a .tsv, every line is a row."""
    if suffix != ".tsv":
        return TRICKY
    return [
        tuple(" ".join(str(v).splitlines()) if isinstance(v, str) else v for v in row)
        for row in TRICKY
    ]


def load_rows(*arguments: Any, **options: Any) -> Rows:
    return read_rows(*arguments, **options)[0]


def write_table(path: Path, rows: list[tuple[Any, ...]]) -> str:
    records = [dict(zip(NAMES, row, strict=True)) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        floats = [{**record, "label": float(record["label"])} for record in records]
        pq.write_table(pa.Table.from_pylist(floats), path)
    elif path.suffix == ".xlsx":
        write_sheet(path, [NAMES, *rows])
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, NAMES, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(records)
    return str(path)


def write_sheet(path: Path, rows: list[tuple[Any, ...]], *titles: str) -> None:
    """Write rows as the first sheet of a workbook, with empty sheets behind it."""
    book = Workbook()
    for row in rows:  # Excel writes carriage returns like this.
        book.active.append([v.replace("\r", "_x000D_") if isinstance(v, str) else v for v in row])
    for title in titles:
        book.create_sheet(title)
    book.save(path)


def list_rows(rows: Rows) -> list[tuple[Any, ...]]:
    texts = zip(rows.sentence1, rows.sentence2, rows.condition, strict=True)
    return [(*text, 1 + 4 * rating) for text, rating in zip(texts, rows.rating, strict=True)]


def make_rows(first: int, last: int) -> list[tuple[str, str, str, int]]:
    return [(f"a{i}", f"b{i}", "c", 1 + i % 5) for i in range(first, last)]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx", ".CSV"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str):
    rows = load_rows(write_table(tmp_path / f"rows{suffix}", tricky_rows(suffix)))
    assert list_rows(rows) == tricky_rows(suffix)
    assert rows.number.tolist() == [1, 2, 3]


def test_first_sheet_of_a_workbook_is_read(tmp_path: Path):
    path = tmp_path / "rows.xlsx"
    empty, more = (None,) * 5, (("a", "b\n\rd", "c", 2.5, "note"), (1, "b", "c", 5))
    write_sheet(path, [empty, (*NAMES, None), more[0], empty, (), ("", None)], "Other")
    rows = load_rows(str(path))
    assert list_rows(rows) == [("a", "b\n\rd", "c", 2.5)]
    write_sheet(path, [NAMES, *more])
    with pytest.raises(UserError, match=r"row 2 of rows.xlsx: sentence1 is 1, not a text"):
        load_rows(str(path))
    write_sheet(path, [NAMES, ("a", "b", "c", datetime(2026, 5, 1))])
    with pytest.raises(UserError, match=r"row 1 of rows.xlsx: label is '2026-.*, not a number"):
        load_rows(str(path))
    write_sheet(path, [("sentence1", "b"), ("a", "b")])
    with pytest.raises(UserError, match=r"rows.xlsx \(sheet 'Sheet'\) has no column 'sentence2'"):
        load_rows(str(path))
    write_sheet(path, [NAMES, empty])
    with pytest.raises(UserError, match=r"rows.xlsx is empty"):
        load_rows(str(path))


def test_missing_openpyxl_is_reported_with_its_installation(monkeypatch, tmp_path: Path):
    path = write_table(tmp_path / "rows.xlsx", TRICKY)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(UserError, match=r"rows.xlsx needs .*pip install 'llmcond\[excel\]'"):
        load_rows(path)


def damage_workbook(whole: bytes) -> Iterator[bytes]:
    yield b""
    yield HEADER
    yield bytes(range(256)) * 9
    for size in range(100, len(whole), len(whole) // 9):
        yield whole[:size]
    archive = zipfile.ZipFile(io.BytesIO(whole))
    for damaged_part in archive.namelist():
        for content in (None, b"", b"<a/>", archive.read(damaged_part)[:-9]):
            changed = io.BytesIO()
            with zipfile.ZipFile(changed, "w") as copy:
                for part in archive.namelist():
                    text = content if part == damaged_part else archive.read(part)
                    if text is not None:
                        copy.writestr(part, text)
            yield changed.getvalue()


def test_damaged_workbook_is_read_correctly_or_reported_in_one_line(tmp_path: Path):
    path = tmp_path / "rows.xlsx"
    whole, messages = Path(write_table(path, TRICKY[:1])).read_bytes(), []
    for content in damage_workbook(whole):
        path.write_bytes(content)
        try:
            assert list_rows(load_rows(str(path))) == TRICKY[:1]
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 25
    assert all(message.startswith("rows.xlsx ") and "\n" not in message for message in messages)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_byte_order_mark_is_not_part_of_the_text(tmp_path: Path, suffix: str):
    path = tmp_path / f"rows{suffix}"
    expected = tricky_rows(suffix)
    write_table(path, expected)
    content = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + content)
    assert list_rows(load_rows(str(path))) == expected
    path.write_bytes(content.decode().encode("utf-16"))  # Excel writes UTF-16.
    assert list_rows(load_rows(str(path))) == expected


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl"])
def test_text_may_be_compressed(tmp_path: Path, suffix: str):
    path = tmp_path / f"rows{suffix}"
    write_table(path, tricky_rows(suffix))
    packed = tmp_path / f"rows{suffix}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list_rows(load_rows(str(packed))) == tricky_rows(suffix)
    for content in (packed.read_bytes()[:40], path.read_bytes()):
        packed.write_bytes(content)
        with pytest.raises(LlmcondError, match=rf"rows{suffix}.gz cannot be read"):
            load_rows(str(packed))


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_csv_file_may_have_another_delimiter(tmp_path: Path, delimiter: str):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerows([NAMES, *TRICKY])
    assert list_rows(load_rows(str(path))) == TRICKY


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", HEADER + b"a,b,c,1\nd,e,f,2\n\n\n"),
        ("rows.csv", HEADER.replace(b"\n", b"\r\n") + b"a,b,c,1\r\nd,e,f,2\r\n"),
        ("rows.csv", b"id," + HEADER + b"7,a,b,c,1\n8,d,e,f,2"),
        ("rows.csv", b"label,condition,sentence2,sentence1\n1,c,b,a\n2,f,e,d\n"),
        ("rows.jsonl", LINE + LINE.replace(b'"a"', b'"d"') + b"\n \n"),
    ],
    ids=["blank lines at the end", "CRLF", "more columns", "other order", "JSON Lines"],
)
def test_harmless_variations_are_ignored(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    rows = load_rows(str(tmp_path / name))
    assert list(rows.sentence1) == ["a", "d"]
    assert rows.number.tolist() == [1, 2]


@pytest.mark.parametrize(
    "files",
    [
        ["train.csv", "dev.csv", "test.csv"],
        ["train.jsonl", "validation.jsonl", "test.jsonl"],
        ["train.tsv", "val.tsv", "test.tsv"],
        ["csts_train.csv", "csts_valid.csv", "csts_test.csv"],
        ["data/train.parquet", "data/validation.parquet", "data/test.parquet"],
        ["Train.csv", "dev.parquet", "TEST.tsv"],
    ],
    ids=" ".join,
)
def test_splits_of_a_folder_are_recognized_by_file_names(tmp_path: Path, files: list[str]):
    expected = [make_rows(0, 3), make_rows(3, 5), make_rows(5, 6)]
    for name, rows in zip(files, expected, strict=True):
        write_table(tmp_path / name, rows)
    (tmp_path / "README.md").write_text("# train and test\n")
    dataset = read_dataset(str(tmp_path))
    assert list(dataset.splits) == ["train", "dev", "test"]
    assert [list_rows(rows) for rows in dataset.splits.values()] == expected
    assert dataset.notes == ()


def write_shards(folder: Path) -> None:
    write_table(folder / "train-00000-of-00002.parquet", make_rows(0, 2))
    write_table(folder / "train-00001-of-00002.parquet", make_rows(2, 5))
    write_table(folder / "validation-00000-of-00001.parquet", make_rows(5, 6))


def test_shards_are_concatenated_in_order(tmp_path: Path):
    write_shards(tmp_path / "data")
    dataset = read_dataset(str(tmp_path))
    assert list_rows(dataset.splits["train"]) == make_rows(0, 5)
    assert list_rows(dataset.splits["dev"]) == make_rows(5, 6)


def test_row_of_second_shard_is_not_attributed_to_the_first(tmp_path: Path):
    write_shards(tmp_path)
    description = read_dataset(str(tmp_path)).splits["train"].describe(2)
    assert description == "row 3 of train.parquet"


def test_error_in_a_shard_names_its_row_in_the_shard(tmp_path: Path):
    write_shards(tmp_path)
    write_table(tmp_path / "train-00001-of-00002.parquet", [("a", "b", "c", 1), ("", "b", "c", 1)])
    with pytest.raises(UserError, match=r"row 2 of train-00001-of-00002.parquet: sentence1"):
        read_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train.csv", "train.tsv"], "several files for train: train.csv, train.tsv"),
        (["train.csv", "dev.csv", "validation.csv"], "several files for dev"),
        (["notes.csv", "pretrain.csv", "latest.csv"], "without train, dev"),
        (["train.txt"], "without train, dev"),
        ([], "without train, dev"),
        (["test.csv", "dev.csv"], "has no train file; it has dev, test"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_folder_with_ambiguous_or_missing_splits_is_rejected(
    tmp_path: Path, files: list[str], message: str
):
    for name in files:
        write_table(tmp_path / name, make_rows(0, 3))
    with pytest.raises(UserError, match=message):
        read_dataset(str(tmp_path))


def test_single_split_of_a_folder_is_read(tmp_path: Path):
    write_table(tmp_path / "train.csv", make_rows(0, 3))
    write_table(tmp_path / "test.csv", make_rows(3, 5))
    assert list_rows(load_rows(str(tmp_path))) == make_rows(3, 5)
    assert list_rows(load_rows(str(tmp_path), "train")) == make_rows(0, 3)
    with pytest.raises(UserError, match="has no dev file; it has test, train"):
        load_rows(str(tmp_path), "dev")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.csv", "does not exist. Expected a .csv, .tsv, .json, .jsonl, .parquet or .xlsx"),
        ("rows.txt", "ends in .txt. Expected a .csv, .tsv, .json, .jsonl, .parquet or .xlsx file"),
        ("rows", "ends in no suffix. Expected a .csv"),
        ("rows.zip", "ends in .zip. Expected a .csv"),
    ],
)
def test_unreadable_source_is_a_user_error(tmp_path: Path, name: str, message: str):
    if name != "nowhere.csv":
        (tmp_path / name).write_bytes(HEADER + b"a,b,c,1\n")
    with pytest.raises(UserError, match=message):
        read_dataset(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a::b.csv", "ab::c.csv", "C:d.csv", "a:b.csv", "a b.csv"])
def test_name_of_a_file_may_have_colons(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("text\na dog\n")
    for path in (name, Path(name), tmp_path / name):
        assert read_collection(str(path), "text").texts == ["a dog"]


def test_unknown_protocol_is_a_user_error():
    with pytest.raises(UserError, match=r"foo://rows.csv cannot be opened"):
        read_dataset("foo://rows.csv")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", b"", ["rows.csv is empty"]),
        ("rows.csv", b"\xef\xbb\xbf", ["rows.csv is empty"]),
        ("rows.csv", b"\n\n", ["rows.csv is empty"]),
        ("rows.csv", HEADER, ["rows.csv is empty"]),
        ("rows.tsv", HEADER.replace(b",", b"\t"), ["rows.tsv is empty"]),
        ("rows.jsonl", b"", ["rows.jsonl is empty"]),
        ("rows.jsonl", b"\n \n", ["rows.jsonl is empty"]),
        (
            "rows.csv",
            b"sentence1,sentence_2,condition,label\na,b,c,1\n",
            [
                "no column 'sentence2'",
                "'sentence1', 'sentence_2', 'condition', 'label'",
                "Did you mean 'sentence_2'",
                "--columns",
            ],
        ),
        ("rows.csv", b"a,b\n1,2\n", ["no column 'sentence1'; it has 'a', 'b'"]),
        ("rows.tsv", HEADER + b"a,b,c,1\n", ["no column 'sentence1'"]),
        ("rows.csv", b"sentence1," + HEADER + b"a,x,b,c,1\n", ["'sentence1'", "twice"]),
        ("rows.jsonl", LINE + b'{"sentence1": "a"}\n', ["row 2 of rows.jsonl: sentence2 is empty"]),
        ("rows.jsonl", LINE + b"\n" + LINE, ["row 2 of rows.jsonl: sentence1 is empty"]),
        ("rows.csv", HEADER + b"a,b,c,1\n\nd,e,f,2\n", ["row 2 of rows.csv: sentence1 is empty"]),
        ("rows.csv", HEADER + b"a,b,1\n", ["line 2 has 3 fields, but its header has 4"]),
        (
            "rows.csv",
            HEADER + b"a,b,c,1\na,b,c,1,2,3\n",
            ["line 3 has 6 fields, but its header has 4"],
        ),
        ("rows.csv", HEADER + b'a,b,c,1\n"a"x,b,c,1\n', ["line 3 is malformed"]),
        ("rows.csv", HEADER + b'a,b,c,1\n"a,b,c,1\nd,e,f,1\n', ["malformed", "end of data"]),
        ("rows.csv", HEADER + b"caf\xe9,b,c,1\n", ["rows.csv is not UTF-8", "0xe9", "iconv"]),
        ("rows.tsv", b"caf\xe9\tb\n", ["rows.tsv is not UTF-8"]),
        ("rows.jsonl", LINE.replace(b"a", b"\xe9"), ["rows.jsonl is not UTF-8", "0xe9"]),
        ("rows.csv", HEADER.decode().encode("utf-16-le"), ["UTF-16", "iconv -f UTF-16-LE"]),
        ("rows.csv", HEADER.decode().encode("utf-16")[:-1], ["rows.csv is not"]),
        ("rows.json", b"{}", ["rows.json has no column 'sentence1'; it has none"]),
        ("rows.json", b"[1]", ["rows.json item 1 contains a int; expected an object"]),
        ("rows.json", b"[{", ["rows.json is not valid JSON"]),
        ("rows.json", b"[]", ["rows.json is empty"]),
        ("rows.jsonl", LINE + b"\n{oops\n", ["line 3 is not valid JSON"]),
        ("rows.jsonl", LINE + b'["a", "b"]\n', ["line 2 contains a list; expected an object"]),
        ("rows.jsonl", b'"a"\n', ["line 1 contains a str; expected an object"]),
        ("rows.jsonl", b"[" * 100_000 + b"\n", ["rows.jsonl is not valid JSON"]),
        ("rows.parquet", b"", ["rows.parquet is not a Parquet file"]),
        ("rows.parquet", HEADER + b"a,b,c,1\n", ["rows.parquet is not a Parquet file"]),
    ],
)
def test_malformed_file_is_a_user_error_that_names_the_line(
    tmp_path: Path, name: str, content: bytes, words: list[str]
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_rows(str(tmp_path / name))
    assert all(word in str(caught.value) for word in words), caught.value


def test_empty_parquet_table_and_missing_column_are_user_errors(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    table = pa.Table.from_pylist([dict(zip(NAMES, ("a", "b", "c", 1), strict=True))])
    pq.write_table(table.slice(1), path)
    with pytest.raises(UserError, match=r"rows.parquet is empty"):
        load_rows(str(path))
    pq.write_table(table.rename_columns(["sentence1", "sentence2", "cond", "label"]), path)
    with pytest.raises(UserError, match=r"no column 'condition'.*Did you mean 'cond'"):
        load_rows(str(path))


def test_damaged_parquet_file_never_crashes(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    rows = [(f"sentence {i}", "the same", f"condition {i % 3}", 1) for i in range(50)]
    whole = Path(write_table(path, rows)).read_bytes()
    messages = []
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            load_rows(str(path))
        except LlmcondError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all("rows.parquet" in message for message in messages)


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet", "split/train.csv"])
def test_only_regular_files_are_read(tmp_path: Path, name: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/null")  # Reading /dev/random would never end.
    with pytest.raises(UserError, match=f"{name} is not a regular file"):
        read_dataset(str(path if path.parent == tmp_path else path.parent))


UNRELATED = {
    "took": pa.array([1_500_000_001], pa.duration("ns")),
    "long ago": pa.array([-(2**62)], pa.timestamp("us")),
    "elsewhere": pa.array([0], pa.timestamp("s", tz="Nowhere/Town")),
    "not UTF-8": pa.array([b"\xff"]).view(pa.string()),
}


@pytest.mark.parametrize("in_memory", [False, True])
def test_unneeded_columns_are_not_converted(tmp_path: Path, in_memory: bool):
    table = pa.Table.from_pylist([dict(zip(NAMES, ("a", "b", "c", 1.0), strict=True))])
    for name, column in UNRELATED.items():
        table = table.append_column(name, column)
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    source = table if in_memory else str(path)
    assert list_rows(load_rows(source)) == [("a", "b", "c", 1)]
    for name in UNRELATED:
        message = (
            "row 1 .* is datetime" if name == "took" else "contains? values that cannot be read"
        )
        with pytest.raises(UserError, match=message):
            load_rows(source, columns=Columns(condition=name))


def test_condition_of_a_parquet_file_is_a_column_or_a_text(tmp_path: Path):
    path = Path(write_table(tmp_path / "rows.parquet", [("a", "b", "c", 1)]))
    assert read_collection(str(path), "sentence1", conditions=["sentence2"]).conditions == {
        "sentence2": ["b"]
    }


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "names",
    [[f"column {i}" for i in range(3_000)], ["a long text " * 20_000, "sentence11"]],
    ids=["many columns", "row instead of header"],
)
def test_messages_about_columns_stay_short(tmp_path: Path, suffix: str, names: list[str]):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({name: ["a"] for name in names}), path)
    elif suffix == ".jsonl":
        path.write_text(json.dumps(dict.fromkeys(names, "a")) + "\n")
    else:
        separator = "\t" if suffix == ".tsv" else ","
        path.write_text("\n".join([separator.join(names), separator.join("a" for _ in names)]))
    with pytest.raises(UserError, match=r"has no column 'sentence1'; it has '") as caught:
        load_rows(str(path))
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_messages_about_labels_stay_short(tmp_path: Path, suffix: str):
    path = write_table(tmp_path / f"rows{suffix}", [("a", "b", "c", "a long text " * 20_000)])
    with pytest.raises(UserError, match=r"label is 'a long text .*…, not a number") as caught:
        load_rows(path)
    assert len(str(caught.value)) < 1_000


# --- The hub ----------------------------------------------------------------------------------

REPO = "/api/datasets/someone/pairs"
FILES = "/datasets/someone/pairs/resolve/main/"
READ_SCRIPT = """
import json, sys, time
time.sleep = lambda seconds: None  # The hub's client would wait half a minute before it gives up.
from llmcond.data.datasets import read_dataset
from llmcond.errors import LlmcondError
try:
    dataset = read_dataset(sys.argv[1])
except LlmcondError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
else:
    print(json.dumps({name: list(rows.sentence1) for name, rows in dataset.splits.items()}))
"""


class Hub(BaseHTTPRequestHandler):
    """A handler of the requests that the hub gets for a dataset, served from a folder."""

    def __init__(self, *args: Any, folder: Path):
        self.folder = folder
        super().__init__(*args)

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path in {REPO, f"{REPO}/revision/main"}:
            self.reply(json.dumps({"id": "someone/pairs", "sha": "0" * 40}).encode())
        elif path.startswith(f"{REPO}/tree/main"):
            self.reply(json.dumps(self.tree()).encode())
        elif path.startswith(FILES):
            self.send(self.folder / path.removeprefix(FILES))
        else:
            self.reply(b"{}", 404, ("X-Error-Code", "RepoNotFound"))

    def tree(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "directory" if path.is_dir() else "file",
                "path": path.relative_to(self.folder).as_posix(),
                "size": path.stat().st_size,
                "oid": "0" * 40,
            }
            for path in sorted(self.folder.rglob("*"))
        ]

    def send(self, path: Path):
        if path.stem == "train-broken":
            self.close_connection = True
            return
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        self.reply(path.read_bytes()[int(first) : int(last) + 1], 206)

    def reply(self, body: bytes, status: int = 200, *headers: tuple[str, str]):
        self.send_response(status)
        for header in (("Content-Length", str(len(body))), *headers):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any):
        pass


@pytest.fixture
def read_from_hub(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """A reader of ``hf://`` addresses from a local hub that serves ``tmp_path/hub``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder=tmp_path / "hub"))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def read(source: str, port: int = server.server_port) -> dict[str, Any]:
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        process = subprocess.run(
            [sys.executable, "-c", READ_SCRIPT, source],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    yield read
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "source", ["hf://datasets/someone/pairs", "hf://datasets/someone/pairs@main"]
)
def test_hub_dataset_is_read_like_a_folder(
    tmp_path: Path, read_from_hub: Callable[..., dict[str, Any]], source: str
):
    write_shards(tmp_path / "hub" / "data")
    (tmp_path / "hub" / "README.md").write_text("# Pairs\n")
    assert read_from_hub(source) == {"train": ["a0", "a1", "a2", "a3", "a4"], "dev": ["a5"]}


def test_single_file_of_a_hub_dataset_is_read_like_a_file(
    tmp_path: Path, read_from_hub: Callable[..., dict[str, Any]]
):
    write_table(tmp_path / "hub" / "pairs.csv", make_rows(0, 20))
    splits = read_from_hub("hf://datasets/someone/pairs/pairs.csv")
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 14,
        "dev": 3,
        "test": 3,
    }
    sentences = {sentence for split in splits.values() for sentence in split}
    assert sentences == {row[0] for row in make_rows(0, 20)}


@pytest.mark.parametrize(
    "source", ["hf://datasets/someone/nothing", "hf://datasets/someone/pairs/nothing.csv"]
)
def test_missing_hub_dataset_is_a_user_error(
    tmp_path: Path, read_from_hub: Callable[..., dict[str, Any]], source: str
):
    write_table(tmp_path / "hub" / "train.csv", make_rows(0, 20))
    result = read_from_hub(source)
    assert result["error"] == "UserError"
    assert f"{source} does not exist" in result["message"]


def test_unreachable_hub_is_not_a_user_error(
    read_from_hub: Callable[..., dict[str, Any]],
):
    result = read_from_hub("hf://datasets/someone/pairs", port=1)
    assert result["error"] == "LlmcondError"
    assert "cannot be reached" in result["message"]


def test_lost_connection_to_the_hub_names_the_file(
    tmp_path: Path, read_from_hub: Callable[..., dict[str, Any]]
):
    write_table(tmp_path / "hub" / "train-broken.csv", make_rows(0, 20))
    result = read_from_hub("hf://datasets/someone/pairs")
    assert result["error"] == "LlmcondError"
    assert "train-broken.csv" in result["message"]


LONG = "a" * (2**24 + 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv.gz", f"{HEADER.decode()}{LONG},b,c,1\n", "rows.csv.gz line 2 is longer than"),
        ("rows.csv.gz", LONG, "rows.csv.gz line 1 is longer than 16,777,216 characters"),
        ("rows.tsv", f"sentence1\tsentence2\tcondition\tlabel\n{LONG}", "rows.tsv line 2 is"),
        ("rows.jsonl.gz", f"{LINE.decode()}{' ' * (2**24 + 1)}", "rows.jsonl.gz line 2 is longer"),
        (
            "rows.csv",
            HEADER.decode() + '"' + "a\n" * (2**23 + 1) + '",b,c,1\n',
            "a field of rows.csv line .* is longer than 16,777,216",
        ),
    ],
)
def test_overlong_line_or_field_is_rejected(tmp_path, name, content, message):
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    with pytest.raises(UserError, match=message):
        load_rows(str(tmp_path / name))


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz", "rows.xlsx"])
def test_files_read_as_a_whole_have_a_size_limit(monkeypatch, tmp_path, name):
    path = tmp_path / name
    write_table(tmp_path / name.removesuffix(".gz"), [("a" * 50_000, "b", "c", 1)] * 3)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress((tmp_path / "rows.json").read_bytes()))
    assert len(load_rows(str(path))) == 3
    monkeypatch.setattr("llmcond.data.formats.MAX_FILE_BYTES", 40_000)
    with pytest.raises(UserError, match=f"{name} contains more than .* MiB.*as .csv, .jsonl or"):
        load_rows(str(path))


def test_lack_of_memory_is_not_reported_as_damage(monkeypatch, tmp_path):
    path = write_table(tmp_path / "rows.parquet", [("a", "b", "c", 1)])
    monkeypatch.setattr("llmcond.data.formats.to_python", lambda _: pa.allocate_buffer(2**60))
    with pytest.raises(MemoryError):
        load_rows(path)


def test_names_of_columns_may_have_spaces_and_must_not_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text(", text ,id \n0,a,1\n", encoding="utf-8")
    assert read_collection(str(path), "text", ["id"]).columns == {"id": ["1"]}
    assert read_collection(str(path), " text ", ["id "]).texts == ["a"]
    with pytest.raises(UserError, match="has no column ''; it has '', 'text', 'id'"):
        read_collection(str(path), "text", [""])
