"""Tables: every format gives the same rows, every folder its splits, every fault its line."""

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

from llmcond.data import readers
from llmcond.data.datasets import Columns, read_dataset, read_rows, read_texts
from llmcond.data.rows import Rows
from llmcond.errors import LlmcondError, UserError

NAMES = ("sentence1", "sentence2", "condition", "label")
HEADER = b"sentence1,sentence2,condition,label\n"
LINE = b'{"sentence1": "a", "sentence2": "b", "condition": "c", "label": 1}\n'
TRICKY = [
    ('He said "no", twice', "one\ttab, one comma", "line one\nline two", 1),
    ("café – 日本語 🙂", "  spaces stay  ", "{sentence}", 2.5),
    ("a", "b", "c\r\nd", 5),
]


def rows_of(*arguments: Any, **options: Any) -> Rows:
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
    for row in rows:  # carriage returns as Excel writes them
        book.active.append([v.replace("\r", "_x000D_") if isinstance(v, str) else v for v in row])
    for title in titles:
        book.create_sheet(title)
    book.save(path)


def columns(rows: Rows) -> list[tuple[Any, ...]]:
    texts = zip(rows.sentence1, rows.sentence2, rows.condition, strict=True)
    return [(*text, 1 + 4 * rating) for text, rating in zip(texts, rows.rating, strict=True)]


def numbered(first: int, last: int) -> list[tuple[str, str, str, int]]:
    return [(f"a{i}", f"b{i}", "c", 1 + i % 5) for i in range(first, last)]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx", ".CSV"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str):
    rows = rows_of(write_table(tmp_path / f"rows{suffix}", TRICKY))
    assert columns(rows) == TRICKY
    assert rows.number.tolist() == [1, 2, 3]


def test_the_first_sheet_of_a_workbook_is_read(tmp_path: Path):
    path = tmp_path / "rows.xlsx"
    empty, more = (None,) * 5, (("a", "b", "c\n\rd", 2.5, "note"), (1, "b", "c", 5))
    write_sheet(path, [empty, (*NAMES, None), more[0], empty, (), ("", None)], "Other")
    rows = rows_of(str(path))
    assert columns(rows) == [("a", "b", "c\n\rd", 2.5)]
    write_sheet(path, [NAMES, *more])
    with pytest.raises(UserError, match=r"row 2 of rows.xlsx: sentence1 is 1, not a text"):
        rows_of(str(path))
    write_sheet(path, [NAMES, ("a", "b", "c", datetime(2026, 5, 1))])
    with pytest.raises(UserError, match=r"row 1 of rows.xlsx: label is '2026-.*, not a number"):
        rows_of(str(path))
    write_sheet(path, [("sentence1", "b"), ("a", "b")])
    with pytest.raises(UserError, match=r"rows.xlsx \(sheet 'Sheet'\) has no column 'sentence2'"):
        rows_of(str(path))
    write_sheet(path, [NAMES, empty])
    with pytest.raises(UserError, match=r"rows.xlsx is empty"):
        rows_of(str(path))


def test_without_openpyxl_there_is_a_way_to_get_it(monkeypatch, tmp_path: Path):
    path = write_table(tmp_path / "rows.xlsx", TRICKY)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(UserError, match=r"rows.xlsx needs .*pip install '\.\[excel\]'"):
        rows_of(path)


def damaged_workbooks(whole: bytes) -> Iterator[bytes]:
    yield b""
    yield HEADER
    yield bytes(range(256)) * 9
    for size in range(100, len(whole), len(whole) // 9):
        yield whole[:size]
    archive = zipfile.ZipFile(io.BytesIO(whole))
    for gone in archive.namelist():
        for content in (None, b"", b"<a/>", archive.read(gone)[:-9]):
            changed = io.BytesIO()
            with zipfile.ZipFile(changed, "w") as copy:
                for part in archive.namelist():
                    text = content if part == gone else archive.read(part)
                    if text is not None:
                        copy.writestr(part, text)
            yield changed.getvalue()


def test_a_workbook_damaged_anywhere_is_one_message_or_read_rightly(tmp_path: Path):
    path = tmp_path / "rows.xlsx"
    whole, said = Path(write_table(path, TRICKY[:1])).read_bytes(), []
    for content in damaged_workbooks(whole):
        path.write_bytes(content)
        try:
            assert columns(rows_of(str(path))) == TRICKY[:1]
        except UserError as error:
            said.append(str(error))
    assert len(said) > 25
    assert all(message.startswith("rows.xlsx ") and "\n" not in message for message in said)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, suffix: str):
    path = tmp_path / f"rows{suffix}"
    write_table(path, TRICKY)
    content = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + content)
    assert columns(rows_of(str(path))) == TRICKY
    path.write_bytes(content.decode().encode("utf-16"))  # as Excel writes it
    assert columns(rows_of(str(path))) == TRICKY


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl"])
def test_text_may_be_compressed(tmp_path: Path, suffix: str):
    path = tmp_path / f"rows{suffix}"
    write_table(path, TRICKY)
    packed = tmp_path / f"rows{suffix}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert columns(rows_of(str(packed))) == TRICKY
    for content in (packed.read_bytes()[:40], path.read_bytes()):
        packed.write_bytes(content)
        with pytest.raises(LlmcondError, match=rf"rows{suffix}.gz cannot be read"):
            rows_of(str(packed))


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_csv_file_may_have_another_delimiter(tmp_path: Path, delimiter: str):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerows([NAMES, *TRICKY])
    assert columns(rows_of(str(path))) == TRICKY


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", HEADER + b"a,b,c,1\n\nd,e,f,2\n"),
        ("rows.csv", HEADER.replace(b"\n", b"\r\n") + b"a,b,c,1\r\nd,e,f,2\r\n"),
        ("rows.csv", b"id," + HEADER + b"7,a,b,c,1\n8,d,e,f,2"),
        ("rows.csv", b"label,condition,sentence2,sentence1\n1,c,b,a\n2,f,e,d\n"),
        ("rows.jsonl", LINE + b"\n" + LINE.replace(b'"a"', b'"d"')),
    ],
    ids=["blank line", "CRLF", "more columns", "other order", "blank line in JSONL"],
)
def test_what_does_not_matter_is_passed_over(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    rows = rows_of(str(tmp_path / name))
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
def test_a_folder_has_its_splits_from_its_files(tmp_path: Path, files: list[str]):
    expected = [numbered(0, 3), numbered(3, 5), numbered(5, 6)]
    for name, rows in zip(files, expected, strict=True):
        write_table(tmp_path / name, rows)
    (tmp_path / "README.md").write_text("# train and test\n")
    dataset = read_dataset(str(tmp_path))
    assert list(dataset.splits) == ["train", "dev", "test"]
    assert [columns(rows) for rows in dataset.splits.values()] == expected
    assert dataset.notes == ()


def write_shards(folder: Path) -> None:
    write_table(folder / "train-00000-of-00002.parquet", numbered(0, 2))
    write_table(folder / "train-00001-of-00002.parquet", numbered(2, 5))
    write_table(folder / "validation-00000-of-00001.parquet", numbered(5, 6))


def test_shards_are_one_split_in_their_order(tmp_path: Path):
    write_shards(tmp_path / "data")
    dataset = read_dataset(str(tmp_path))
    assert columns(dataset.splits["train"]) == numbered(0, 5)
    assert columns(dataset.splits["dev"]) == numbered(5, 6)


def test_a_row_of_the_second_shard_is_not_said_to_be_in_the_first(tmp_path: Path):
    write_shards(tmp_path)
    description = read_dataset(str(tmp_path)).splits["train"].describe(2)
    assert "train-00000" not in description


def test_a_fault_in_a_shard_is_named_with_its_row_there(tmp_path: Path):
    write_shards(tmp_path)
    write_table(tmp_path / "train-00001-of-00002.parquet", [("a", "b", "c", 1), ("", "b", "c", 1)])
    with pytest.raises(UserError, match=r"row 2 of train-00001-of-00002.parquet: sentence1"):
        read_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "words"),
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
def test_a_folder_that_does_not_say_which_file_is_what(
    tmp_path: Path, files: list[str], words: str
):
    for name in files:
        write_table(tmp_path / name, numbered(0, 3))
    with pytest.raises(UserError, match=words):
        read_dataset(str(tmp_path))


def test_one_split_of_a_folder_is_read_alone(tmp_path: Path):
    write_table(tmp_path / "train.csv", numbered(0, 3))
    write_table(tmp_path / "test.csv", numbered(3, 5))
    assert columns(rows_of(str(tmp_path))) == numbered(3, 5)
    assert columns(rows_of(str(tmp_path), "train")) == numbered(0, 3)
    with pytest.raises(UserError, match="has no dev file; it has test, train"):
        rows_of(str(tmp_path), "dev")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.csv", "does not exist. Expected a .csv, .tsv, .json, .jsonl, .parquet or .xlsx"),
        ("rows.txt", "is not a .csv, .tsv, .json, .jsonl, .parquet or .xlsx file"),
        ("rows", "is not a .csv"),
        ("rows.zip", "is not a .csv"),
    ],
)
def test_a_source_that_cannot_be_read_is_a_user_error(tmp_path: Path, name: str, words: str):
    if name != "nowhere.csv":
        (tmp_path / name).write_bytes(HEADER + b"a,b,c,1\n")
    with pytest.raises(UserError, match=words):
        read_dataset(str(tmp_path / name))


def test_an_unknown_protocol_is_a_user_error():
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
        ("rows.jsonl", LINE + b'{"sentence1": "a"}\n', ["line 2", "no column 'sentence2'"]),
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
        ("rows.csv", HEADER.decode().encode("utf-16-le"), ["no column 'sentence1'"]),
        ("rows.csv", HEADER.decode().encode("utf-16")[:-1], ["rows.csv is not"]),
        ("rows.json", b"{}", ["rows.json contains a dict; expected a list"]),
        ("rows.json", b"[1]", ["rows.json item 1 contains a int; expected an object"]),
        ("rows.json", b"[{", ["rows.json is not valid JSON"]),
        ("rows.json", b"[]", ["rows.json is empty"]),
        ("rows.jsonl", LINE + b"\n{oops\n", ["line 3 is not valid JSON"]),
        ("rows.jsonl", LINE + b'["a", "b"]\n', ["line 2 contains a list; expected an object"]),
        ("rows.jsonl", b'"a"\n', ["line 1 contains a str; expected an object"]),
        ("rows.jsonl", b"[" * 100_000 + b"\n", ["line 1 is not valid JSON"]),
        ("rows.parquet", b"", ["rows.parquet is not a Parquet file"]),
        ("rows.parquet", HEADER + b"a,b,c,1\n", ["rows.parquet is not a Parquet file"]),
    ],
)
def test_a_malformed_file_is_a_user_error_that_names_the_place(
    tmp_path: Path, name: str, content: bytes, words: list[str]
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        rows_of(str(tmp_path / name))
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_empty_parquet_table_and_a_missing_column_are_user_errors(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    table = pa.Table.from_pylist([dict(zip(NAMES, ("a", "b", "c", 1), strict=True))])
    pq.write_table(table.slice(1), path)
    with pytest.raises(UserError, match=r"rows.parquet is empty"):
        rows_of(str(path))
    pq.write_table(table.rename_columns(["sentence1", "sentence2", "cond", "label"]), path)
    with pytest.raises(UserError, match=r"no column 'condition'.*Did you mean 'cond'"):
        rows_of(str(path))


def test_a_parquet_file_damaged_anywhere_is_never_a_crash(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    rows = [(f"sentence {i}", "the same", f"condition {i % 3}", 1) for i in range(50)]
    whole = Path(write_table(path, rows)).read_bytes()
    refused = []
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            rows_of(str(path))
        except LlmcondError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("rows.parquet" in message for message in refused)


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet", "split/train.csv"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, name: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/null")  # /dev/random has no end
    with pytest.raises(UserError, match=f"{name} is not a regular file"):
        read_dataset(str(path if path.parent == tmp_path else path.parent))


UNRELATED = {
    "took": pa.array([1_500_000_001], pa.duration("ns")),
    "long ago": pa.array([-(2**62)], pa.timestamp("us")),
    "elsewhere": pa.array([0], pa.timestamp("s", tz="Nowhere/Town")),
    "no text": pa.array([b"\xff"]).view(pa.string()),
}


@pytest.mark.parametrize("in_memory", [False, True])
def test_columns_that_are_not_needed_are_not_converted(tmp_path: Path, in_memory: bool):
    table = pa.Table.from_pylist([dict(zip(NAMES, ("a", "b", "c", 1.0), strict=True))])
    for name, column in UNRELATED.items():
        table = table.append_column(name, column)
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    given = table if in_memory else str(path)
    assert columns(rows_of(given)) == [("a", "b", "c", 1)]
    for name in UNRELATED:
        what = "contains values that cannot be read" if name == "no text" else "of the type"
        with pytest.raises(UserError, match=what):
            rows_of(given, columns=Columns(condition=name))


def test_a_condition_is_a_column_of_a_parquet_file_or_a_text(tmp_path: Path):
    path = Path(write_table(tmp_path / "rows.parquet", [("a", "b", "c", 1)]))
    assert read_texts(str(path), "sentence1", "sentence2").conditions == ["b"]
    texts = read_texts(str(path), "sentence1", condition_text="the place")
    assert texts.conditions == ["the place"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "names",
    [[f"column {i}" for i in range(3_000)], ["a long text " * 20_000, "sentence11"]],
    ids=["many columns", "a row for the header"],
)
def test_messages_stay_short_whatever_the_columns(tmp_path: Path, suffix: str, names: list[str]):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({name: ["a"] for name in names}), path)
    elif suffix == ".jsonl":
        path.write_text(json.dumps(dict.fromkeys(names, "a")) + "\n")
    else:
        separator = "\t" if suffix == ".tsv" else ","
        path.write_text("\n".join([separator.join(names), separator.join("a" for _ in names)]))
    with pytest.raises(UserError, match=r"has no column 'sentence1'; it has '") as caught:
        rows_of(str(path))
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_messages_stay_short_whatever_a_label_is(tmp_path: Path, suffix: str):
    path = write_table(tmp_path / f"rows{suffix}", [("a", "b", "c", "a long text " * 20_000)])
    with pytest.raises(UserError, match=r"label is 'a long text .*…, not a number") as caught:
        rows_of(path)
    assert len(str(caught.value)) < 1_000


# --- The hub ----------------------------------------------------------------------------------

REPO = "/api/datasets/someone/pairs"
FILES = "/datasets/someone/pairs/resolve/main/"
READ = """
import json, sys, time
time.sleep = lambda seconds: None  # the hub's client waits half a minute before it gives up
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
    """The few endpoints of the hub that reading a dataset asks for, over a folder."""

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
    """A reader of ``hf://`` addresses from a hub on this machine that serves ``tmp_path/hub``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder=tmp_path / "hub"))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def read(source: str, port: int = server.server_port) -> dict[str, Any]:
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", READ, source],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    yield read
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "source", ["hf://datasets/someone/pairs", "hf://datasets/someone/pairs@main"]
)
def test_a_dataset_of_the_hub_is_read_like_a_folder(
    tmp_path: Path, read_from_hub: Callable[..., dict[str, Any]], source: str
):
    write_shards(tmp_path / "hub" / "data")
    (tmp_path / "hub" / "README.md").write_text("# Pairs\n")
    assert read_from_hub(source) == {"train": ["a0", "a1", "a2", "a3", "a4"], "dev": ["a5"]}


def test_one_file_of_a_dataset_of_the_hub_is_read_like_a_file(
    tmp_path: Path, read_from_hub: Callable[..., dict[str, Any]]
):
    write_table(tmp_path / "hub" / "pairs.csv", numbered(0, 20))
    splits = read_from_hub("hf://datasets/someone/pairs/pairs.csv")
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 14,
        "dev": 3,
        "test": 3,
    }
    found = {sentence for split in splits.values() for sentence in split}
    assert found == {row[0] for row in numbered(0, 20)}


@pytest.mark.parametrize(
    "source", ["hf://datasets/someone/nothing", "hf://datasets/someone/pairs/nothing.csv"]
)
def test_what_the_hub_does_not_have_is_a_user_error(
    tmp_path: Path, read_from_hub: Callable[..., dict[str, Any]], source: str
):
    write_table(tmp_path / "hub" / "train.csv", numbered(0, 20))
    answer = read_from_hub(source)
    assert answer["error"] == "UserError"
    assert f"{source} does not exist" in answer["message"]


def test_a_hub_that_cannot_be_reached_is_no_fault_of_the_user(
    read_from_hub: Callable[..., dict[str, Any]],
):
    answer = read_from_hub("hf://datasets/someone/pairs", port=1)
    assert answer["error"] == "LlmcondError"
    assert "cannot be reached" in answer["message"]


def test_a_connection_lost_while_a_file_is_read_is_an_error_that_names_the_file(
    tmp_path: Path, read_from_hub: Callable[..., dict[str, Any]]
):
    write_table(tmp_path / "hub" / "train-broken.csv", numbered(0, 20))
    answer = read_from_hub("hf://datasets/someone/pairs")
    assert answer["error"] == "LlmcondError"
    assert "train-broken.csv" in answer["message"]


LONG = "a" * (2**24 + 1)


@pytest.mark.parametrize(
    ("name", "content", "said"),
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
def test_a_line_or_field_without_end_is_not_read_into_memory(tmp_path, name, content, said):
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    with pytest.raises(UserError, match=said):
        rows_of(str(tmp_path / name))


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz", "rows.xlsx"])
def test_what_is_read_as_a_whole_has_a_limit(monkeypatch, tmp_path, name):
    path = tmp_path / name
    write_table(tmp_path / name.removesuffix(".gz"), [("a" * 50_000, "b", "c", 1)] * 3)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress((tmp_path / "rows.json").read_bytes()))
    assert len(rows_of(str(path))) == 3
    monkeypatch.setattr("llmcond.data.readers.MAX_FILE_BYTES", 40_000)
    with pytest.raises(UserError, match=f"{name} contains more than .* MiB.*as .csv, .jsonl or"):
        rows_of(str(path))


def test_memory_that_does_not_suffice_is_no_damaged_file():
    schema, batches = pa.schema({"text": pa.string()}), lambda _: [pa.allocate_buffer(2**60)]
    with pytest.raises(MemoryError):
        list(readers._convert_batches(schema, batches, "rows.parquet", ["text"]))
