"""Files: every row comes back unchanged, and one line says what is left out or what is wrong."""

import csv
import gzip
import io
import json
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry
from hypothesis import given
from hypothesis import strategies as st
from openpyxl import Workbook

from llmcond.base.errors import LlmcondError, UserError
from llmcond.data.datasets import (
    Columns,
    open_collection,
    read_collection,
    read_dataset,
    read_rows,
    strip_html,
)
from llmcond.data.formats import ReadOptions
from llmcond.data.readers import Source, read_records
from llmcond.data.rows import Rows

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


# -- rated rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx", ".CSV"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str):
    path, expected = tmp_path / f"rows{suffix}", tricky_rows(suffix)
    rows = load_rows(write_table(path, expected))
    assert list_rows(rows) == expected
    assert rows.number.tolist() == [1, 2, 3]
    if suffix in (".parquet", ".xlsx"):
        return
    content = path.read_bytes()
    for marked in (b"\xef\xbb\xbf" + content, content.decode().encode("utf-16")):
        if suffix != ".json":
            path.write_bytes(marked)
            assert list_rows(load_rows(str(path))) == expected
    packed = tmp_path / f"rows{suffix}.gz"
    packed.write_bytes(gzip.compress(content))
    assert list_rows(load_rows(str(packed))) == expected
    packed.write_bytes(packed.read_bytes()[:40])
    with pytest.raises(LlmcondError, match=rf"rows{suffix}.gz cannot be read"):
        load_rows(str(packed))


def test_first_sheet_of_a_workbook_is_read(tmp_path: Path, monkeypatch):
    path = tmp_path / "rows.xlsx"
    empty, more = (None,) * 5, (("a", "b\n\rd", "c", 2.5, "note"), (1, "b", "c", 5))
    write_sheet(path, [empty, (*NAMES, None), more[0], empty, (), ("", None)], "Other")
    assert list_rows(load_rows(str(path))) == [("a", "b\n\rd", "c", 2.5)]
    for rows, message in (
        ([NAMES, *more], r"row 2 of rows.xlsx: sentence1 is 1, not a text"),
        ([NAMES, ("a", "b", "c", datetime(2026, 5, 1))], "label is '2026-.*, not a number"),
        ([("sentence1", "b"), ("a", "b")], r"\(sheet 'Sheet'\) has no column 'sentence2'"),
        ([NAMES, empty], "rows.xlsx is empty"),
    ):
        write_sheet(path, rows)
        with pytest.raises(UserError, match=message):
            load_rows(str(path))
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(UserError, match=r"rows.xlsx needs .*pip install 'llmcond\[excel\]'"):
        load_rows(str(path))


@pytest.mark.parametrize(("suffix", "step"), [(".xlsx", 97), (".parquet", 7)])
def test_damaged_file_is_reported_in_one_line(tmp_path: Path, suffix: str, step: int):
    rows = [(f"sentence {i}", "the same", f"condition {i % 3}", 1) for i in range(50)]
    path = Path(write_table(tmp_path / f"rows{suffix}", rows))
    whole, messages = path.read_bytes(), []
    for position in range(0, len(whole), step):
        for rest in (b"", bytes([whole[position] ^ 0x55]) + whole[position + 1 :]):
            path.write_bytes(whole[:position] + rest)
            try:
                load_rows(str(path))
            except LlmcondError as error:
                messages.append(str(error))
    assert len(messages) > 60
    assert all(path.name in message and "\n" not in message for message in messages)


def test_sources_that_are_not_files_are_rejected(tmp_path: Path):
    with pytest.raises(UserError, match=r"nowhere.csv does not exist. Expected a .csv, .tsv"):
        read_dataset(str(tmp_path / "nowhere.csv"))
    with pytest.raises(UserError, match=r"foo://rows.csv cannot be opened"):
        read_dataset("foo://rows.csv")
    rows = [{"sentence1": "a", "sentence2": "b", "condition": "c", "label": 1}]
    with pytest.raises(UserError, match="'train', 'dev', 'validation' name the same split twice"):
        read_dataset({"train": rows, "dev": rows, "validation": rows})
    for name in ("rows.csv", "rows.parquet", "split/train.csv"):
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


def test_unneeded_columns_are_not_converted(tmp_path: Path):
    table = pa.Table.from_pylist([dict(zip(NAMES, ("a", "b", "c", 1.0), strict=True))])
    for name, column in UNRELATED.items():
        table = table.append_column(name, column)
    source = str(tmp_path / "rows.parquet")
    pq.write_table(table, source)
    assert list_rows(load_rows(source)) == [("a", "b", "c", 1)]
    for name in UNRELATED:
        message = "row 1 .* is datetime" if name == "took" else "values that cannot be read"
        with pytest.raises(UserError, match=message):
            load_rows(source, columns=Columns(condition=name))


def test_overlong_line_is_rejected(tmp_path: Path):
    for name, start, number in (("rows.csv.gz", b"", 1), ("rows.jsonl.gz", LINE, 2)):
        (tmp_path / name).write_bytes(gzip.compress(start + b" " * (2**24 + 1), 1))
        with pytest.raises(UserError, match=f"{name} line {number} is longer than 16,777,216"):
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


# -- folders with splits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        ["train.jsonl", "validation.jsonl", "test.jsonl"],
        ["csts_train.csv", "csts_valid.csv", "csts_test.csv"],
        ["data/train.parquet", "data/val.parquet", "data/test.parquet"],
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
    write_shards(tmp_path)
    dataset = read_dataset(str(tmp_path))
    assert list_rows(dataset.splits["train"]) == make_rows(0, 5)
    assert list_rows(dataset.splits["dev"]) == make_rows(5, 6)
    # A row of the second shard is not attributed to the first.
    assert dataset.splits["train"].describe(2) == "row 3 of train.parquet"
    write_table(tmp_path / "train-00001-of-00002.parquet", [("a", "b", "c", 1), ("", "b", "c", 1)])
    with pytest.raises(UserError, match=r"row 2 of train-00001-of-00002.parquet: sentence1"):
        read_dataset(str(tmp_path))


def test_folder_with_ambiguous_or_missing_splits_is_rejected(tmp_path: Path):
    for files, message in (
        (["train.csv", "train.tsv"], "several files for train: train.csv, train.tsv"),
        (["notes.csv", "pretrain.csv", "latest.csv"], "without train, dev"),
        (["test.csv", "dev.csv"], "has no train file; it has dev, test"),
    ):
        folder = tmp_path / files[0]
        for name in files:
            write_table(folder / name, make_rows(0, 3))
        with pytest.raises(UserError, match=message):
            read_dataset(str(folder))


# -- files of texts --------------------------------------------------------------------------------


def read(
    source: Any, options: ReadOptions | None = None, column: str | None = None, keep: str = ""
) -> list[str]:
    """Read texts as the commands do; with ``keep``, a column that is kept."""
    opened = open_collection(source, options or ReadOptions(), column)
    collection = read_collection(opened, column, [keep] if keep else [])
    return collection.columns[keep] if keep else collection.texts


def lines(*texts: str) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def test_every_row_of_a_file_is_read(tmp_path: Path):
    for name, content, options, expected in (
        # In a .tsv, every line is a row, whatever its quotation marks are.
        (
            "a.tsv",
            lines('"id"\t"text"', '1\t"a ""b"" c"', '2\t"one\ttab"', '"3"\tplain', '4\t" "" "'),
            {},
            ['a "b" c', "one\ttab", "plain", ' " '],
        ),
        # Line breaks, blank lines and byte order marks.
        ("a.csv", b"id,text\r1,a\r2,b\r", {}, ["a", "b"]),
        (
            "a.txt",
            lines("a\u2028b\u0085c", "d\u2029\x0ce"),
            {},
            ["a\u2028b\u0085c", "d\u2029\x0ce"],
        ),
        ("a.jsonl", lines('{"text": "a\u2028b"}', '{"text": "c"}'), {}, ["a\u2028b", "c"]),
        ("a.csv", b"\xef\xbb\xbf text,id\na,1\n", {}, ["a"]),
        # Delimiters and formats.
        ("a.csv", b"sep=;\r\nid;text\r\n1;a, b\r\n", {}, ["a, b"]),
        ("a.txt", b"id|text\n1|a\n", {"delimiter": "|"}, ["a"]),
        ("a.jsonl", b' [{"text": "a"},\n {"text": "b"}]', {}, ["a", "b"]),
        # Encodings.
        ("a.csv", "text\n“5 €”\n".encode("cp1252"), {"encoding": "cp1252"}, ["“5 €”"]),
        (
            "a.txt.gz",
            gzip.compress("日本\n".encode("shift_jis"), mtime=0),
            {"encoding": "shift_jis"},
            ["日本"],
        ),
        # Rows that are left out, and HTML.
        ("a.txt", b"a\n\n \nb\n", {"skip_empty": True}, ["a", "b"]),
        (
            "a.txt",
            b"<p>caf&eacute; <b>b</b>ar</p>\na < b\n<br>\n",
            {"skip_empty": True, "strip_html": True},
            ["café bar", "a < b"],
        ),
    ):
        (tmp_path / name).write_bytes(content)
        assert read(str(tmp_path / name), ReadOptions(**options)) == expected
        if name.endswith(("csv", "tsv")):
            assert read(tmp_path / name, ReadOptions(**options), keep="text") == expected


def test_file_is_rejected_in_one_line(tmp_path: Path):
    for name, content, options, words in (
        (
            "a.tsv",
            lines("id\ttext", '1\t"one', 'two"'),
            {},
            ["a.tsv line 3 has 1 field, but its header has 2", "every line is a row", ".jsonl"],
        ),
        ("rows.csv", HEADER, {}, ["rows.csv is empty"]),
        (
            "rows.csv",
            b"sentence1,sentence_2,condition,label\na,b,c,1\n",
            {},
            ["no column 'sentence2'", "'label'", "Did you mean 'sentence_2'", "--columns"],
        ),
        ("rows.jsonl", LINE + b'{"sentence1": "a"}\n', {}, ["row 2 of rows.jsonl: sentence2 is"]),
        ("rows.csv", HEADER + b"a,b,c,1\na,b\n", {}, ["line 3 has 2 fields, but its header has 4"]),
        ("rows.csv", HEADER + b'a,b,c,1\n"a"x,b,c,1\n', {}, ["line 3 is malformed"]),
        (
            "rows.jsonl",
            LINE + b'["a", "b"]\n',
            {},
            ["line 2 contains ['a', 'b']; expected an object"],
        ),
        ("a.csv", lines("id,text", '2,"b', "3,c"), {}, ["a.csv line 2", "before it is closed"]),
        ("a.txt", b"a\n\nb\n", {}, ["line 2 of a.txt: text is empty", "--skip-empty"]),
        ("a.csv", "text\nhi\n".encode("utf-16-le"), {}, ["a.csv seems", "--encoding utf-16-le"]),
        # A space in Chinese, which is a control byte in both halves of UTF-16.
        ("a.txt", "你好 世界\n另一行\n".encode("utf-16-le"), {}, ["--encoding utf-16-le"]),
        ("a.txt", "😀\n".encode("utf-32-le"), {}, ["--encoding utf-32-le"]),
        ("a.txt", "caf\xe9\0\nol\xe9\n".encode("cp1252"), {}, ["is not UTF-8", "cp1252"]),
        ("a.csv", b"text\n\x93hi\x94\n", {}, ["0x93 in line 2", "Windows-1252", "cp1252"]),
        ("a.txt", "こんにちは世界\n".encode("shift_jis"), {}, ["in line 1", "--encoding"]),
        ("a.txt", "é\n".encode() + b"\xe9\n", {}, ["0xe9 in line 2", "Earlier lines are UTF-8"]),
        ("a.txt", b"a\x81\n", {"encoding": "cp1252"}, ["is not cp1252: byte 0x81"]),
        ("a.txt", "a".encode("utf-16"), {"encoding": "cp1252"}, ["mark of UTF-16", "Leave out"]),
        ("a.parquet", b"", {"delimiter": ";"}, ["--delimiter is for .csv, .tsv and .txt files"]),
    ):
        (tmp_path / name).write_bytes(content)
        read_texts = partial(read, options=ReadOptions(**options))
        with pytest.raises(UserError) as caught:
            (load_rows if name.startswith("rows") else read_texts)(str(tmp_path / name))
        message = str(caught.value)
        assert "\n" not in message
        assert all(word in message for word in words), message


def test_what_may_be_wrong_is_reported_in_one_line(tmp_path: Path, caplog):
    caplog.set_level("INFO", "llmcond")
    unpaired = ('1,"Stop it, she said.', "2,fine", "3,ok", '4,he went home."', "5,bye")
    for name, content, skip_empty, n, words in (
        ("a.csv", lines("id,text", *unpaired), False, 2, ["a.csv lines 2 to 5", "look like rows"]),
        ("a.tsv", lines("text", '"one', 'two"'), False, 2, ["a.tsv lines 2 to 3: .* every line"]),
        (
            "a.csv",
            b"id,text\n1,a\n2,\n3,\n",
            True,
            1,
            ["left out 2 of 3, .* empty: data rows 2, 3"],
        ),
        # Texts with commas on several lines are not suspected.
        ("a.csv", lines("id,text", '1,"Dear all', "please call", 'Bye"'), False, 1, []),
    ):
        caplog.clear()
        (tmp_path / name).write_bytes(content)
        assert len(read(str(tmp_path / name), ReadOptions(skip_empty=skip_empty))) == n
        assert len(caplog.messages) == bool(words)
        assert all(re.search(word, caplog.messages[0]) for word in words)


#: Texts without an encoding error, of which some are quoted, and none is blank.
TEXTS = st.text(st.sampled_from("ab\",;\t|'é "), min_size=1, max_size=8).filter(str.strip)


def read_bytes(name: str, content: bytes) -> list[Any]:
    source = Source(name, None, [name], None, read=ReadOptions(), content=content, format=name[1:])
    return [record["text"] for record in read_records(source, name, ["text"])]


@given(st.lists(TEXTS, min_size=1, max_size=5), st.booleans())
def test_rows_of_pandas_files_are_read_as_they_were(texts: list[str], tabs: bool):
    table = pd.DataFrame({"n": range(len(texts)), "text": texts})
    content = table.to_csv(index=False, sep="\t" if tabs else ",")
    assert read_bytes("a.tsv" if tabs else "a.csv", content.encode()) == texts


def test_columns_and_delimiters_are_recognised(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("C:a.csv")  # The name of a file may have colons.
    path.write_bytes(lines("id;Text;label", "1;a, b;x", "2;c, d;y"))
    for source in (str(path), path, tmp_path / path):
        assert read(source, column="Text", keep="label") == ["x", "y"]
        assert read(source, column="Text") == ["a, b", "c, d"]
    with pytest.raises(UserError, match=r"separated by ';'.*'id', 'Text', 'label'.*--delimiter"):
        read(path, column="id;Text;label")
    path.write_bytes(lines("a;b", "no delimiter"))
    assert read(path, column="a;b") == ["no delimiter"]
    path.write_bytes(lines("\ttext", "1\ta", "2\tb"))
    assert read(path, column="text") == ["a", "b"]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", "list"])
def test_other_values_may_be_missing_but_not_invalid(tmp_path: Path, suffix: str):
    def source(rows: list[dict[str, Any]]) -> Any:
        if suffix == "list":
            return rows
        dumped = [json.dumps(row) for row in rows]
        path = tmp_path / f"a{suffix}"
        path.write_text(f"[{','.join(dumped)}]" if suffix == ".json" else "\n".join(dumped))
        return path

    rows = [{"text": "a"}, {"text": "b", "year": 2020}, {"text": "c"}]
    assert read(source(rows), keep="year") == [None, 2020, None]
    with pytest.raises(UserError, match="no column 'month'; it has 'text', 'year'"):
        read(source(rows), keep="month")
    for value in ("\ud800", "a\0", ["a", "\udfff"], {"\ud800": 1}):
        rows = [{"text": "a", "kept": "b"}, {"text": "b", "kept": value}]
        with pytest.raises(UserError, match=r"row 2 of .*: kept contains (half|a NUL)"):
            read(source(rows), keep="kept")


def test_html_is_removed():
    for text, expected in (
        ("<p>Hello <b>wor</b>ld</p><br/>now", "Hello world now"),
        ("<script>if (a < b) {}</script>a<style>p {}</style>b", "a b"),
        ("<a title='a > b' href=\"x\">link</a> <o:p>word</o:p>", "link word"),
        ("&lt;b&gt; &amp; caf&eacute;&nbsp;&#8211;\n\t&#x41;", "<b> & café – A"),
        ("Dear <name>, <john@doe.org> wrote", "Dear <name>, <john@doe.org> wrote"),
    ):
        assert strip_html(text) == expected
    # The time grows with the length only.
    began = time.process_time()
    for part in ("<!--", "<a x=1", "<script>", "<a x='", "<", "&amp"):
        strip_html(part * 50_000)
    assert time.process_time() - began < 10


# -- standard input --------------------------------------------------------------------------------


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def send(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return send


def test_standard_input_is_texts_or_a_table(pipe):
    for content, options, column, expected in (
        (b"a\nb, c\n", {}, None, ["a", "b, c"]),
        (b"id\ttext\n1\ta\n", {}, None, ["a"]),
        (b"[a list\n{brace\n", {}, None, ["[a list", "{brace"]),
        (b"id|body\n1|a\n", {"delimiter": "|"}, "body", ["a"]),
        (b"caf\xe9\n\n", {"encoding": "cp1252", "skip_empty": True}, None, ["café"]),
    ):
        pipe(content)
        assert read("-", ReadOptions(**options), column) == expected
    for content, words in (
        (b" \n\n", "standard input is empty"),
        (gzip.compress(b"a", mtime=0), "standard input is not text: it is compressed with gzip"),
    ):
        pipe(content)
        with pytest.raises(UserError, match=words):
            read("-")
    pipe(HEADER + b"a,b,c,3\n")
    assert load_rows("-").file == "standard input"
    sys.stdin.isatty = lambda: True  # A terminal is not waited for.
    with pytest.raises(UserError, match=r"which is a terminal.*- < texts.txt"):
        read("-")


# -- the hub ---------------------------------------------------------------------------------------


class HubFiles(LocalFileSystem):
    """Stands in for the hub, whose client raises errors of its HTTP library."""

    protocol, cachable = "hf", False
    folder: Path

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return re.sub("^hf://datasets/someone/pairs(@main)?", str(cls.folder), str(path))

    def info(self, path: Any, **options: Any) -> dict[str, Any]:
        if "offline" in str(path):
            raise RuntimeError("no route to host")
        return super().info(path, **options)

    def open(self, path: Any, *args: Any, **options: Any) -> Any:
        if "broken" in str(path):
            raise RuntimeError("the peer closed the connection")
        return super().open(path, *args, **options)


def test_hub_datasets_are_read_like_folders_and_files(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(_registry, "hf", HubFiles)
    HubFiles.folder = tmp_path
    write_shards(tmp_path / "data")
    (tmp_path / "README.md").write_text("# Pairs\n")
    for name in ("pairs.csv", "broken.csv"):
        write_table(tmp_path / name, make_rows(0, 20))
    for source in ("hf://datasets/someone/pairs", "hf://datasets/someone/pairs@main"):
        splits = read_dataset(source).splits
        assert {name: rows.sentence1 for name, rows in splits.items()} == {
            "train": ["a0", "a1", "a2", "a3", "a4"],
            "dev": ["a5"],
        }
    splits = read_dataset("hf://datasets/someone/pairs/pairs.csv").splits
    assert [len(rows) for rows in splits.values()] == [14, 3, 3]
    # Lost connections are no user errors.
    for name, error, message in (
        ("nothing.csv", UserError, "nothing.csv does not exist"),
        ("broken.csv", LlmcondError, "broken.csv: the Hugging Face hub cannot be reached"),
        ("offline", LlmcondError, "offline: the Hugging Face hub cannot be reached"),
    ):
        with pytest.raises(error, match=message) as caught:
            read_dataset(f"hf://datasets/someone/pairs/{name}")
        assert type(caught.value) is error
