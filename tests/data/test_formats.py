"""Files of texts: rows in equal rows out, or one line says what is left out or what is wrong."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpyxl import Workbook

from llmcond.data.datasets import (
    open_collection,
    read_candidates,
    read_collection,
    read_rows,
)
from llmcond.data.formats import ReadOptions
from llmcond.data.readers import Source, read_records
from llmcond.errors import UserError

SKIP = ReadOptions(skip_empty=True)
#: Texts without an encoding error, of which some are quoted, and none is blank.
TEXTS = st.text(st.sampled_from("ab\",;\t|'é "), min_size=1, max_size=8).filter(str.strip)


def read(
    source: Any, options: ReadOptions | None = None, column: str | None = None, keep: str = ""
) -> list[str]:
    """Read texts as the commands do; with ``keep``, a column that is kept."""
    opened = open_collection(source, options or ReadOptions(), column)
    collection = read_collection(opened, column, [keep] if keep else [])
    return collection.columns[keep] if keep else collection.texts


def lines(*texts: str) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


#: Files whose every row is read: the name, the content, the options, and the texts.
READABLE: dict[str, tuple[str, bytes, ReadOptions, list[str]]] = {
    "unpaired quotes in a .tsv": (
        "a.tsv",
        lines("id\ttext", '1\t"Stop it, she said.', "2\tfine", '3\the went home."', "4\tbye"),
        ReadOptions(),
        ['"Stop it, she said.', "fine", 'he went home."', "bye"],
    ),
    "quotes within a field of a .tsv": (
        "a.tsv",
        lines("text\tid", '"Best" monitor\t1', 'the "best"\t2', '"yes" or "no"\t3', '"\t4'),
        ReadOptions(),
        ['"Best" monitor', 'the "best"', '"yes" or "no"', '"'],
    ),
    "quoted fields of a .tsv": (
        "a.tsv",
        lines('"id"\t"text"', '1\t"a ""b"" c"', '2\t"one\ttab"', '"3"\tplain', '4\t" "" "'),
        ReadOptions(),
        ['a "b" c', "one\ttab", "plain", ' " '],
    ),
    "a .tsv with one column": (
        "a.tsv",
        lines("text", 'a, "b', 'c" d'),
        ReadOptions(),
        ['a, "b', 'c" d'],
    ),
    "line breaks in a .csv": (
        "a.csv",
        lines("id,text", '1,"one', 'two"', '2,"say ""hi"""'),
        ReadOptions(),
        ["one\ntwo", 'say "hi"'],
    ),
    "CR LF": ("a.csv", b"id,text\r\n1,a\r\n2,b\r\n", ReadOptions(), ["a", "b"]),
    "CR only": ("a.csv", b"id,text\r1,a\r2,b\r", ReadOptions(), ["a", "b"]),
    "CR only, text": ("a.txt", b"a\rb\r", ReadOptions(), ["a", "b"]),
    "CR only, TSV": ("a.tsv", b"id\ttext\r1\ta\r2\tb", ReadOptions(), ["a", "b"]),
    "U+2028 in text": (
        "a.txt",
        lines("a\u2028b\u0085c", "d\u2029\x0ce"),
        ReadOptions(),
        ["a\u2028b\u0085c", "d\u2029\x0ce"],
    ),
    "U+2028 in JSON Lines": (
        "a.jsonl",
        lines('{"text": "a\u2028b"}', '{"text": "c"}'),
        ReadOptions(),
        ["a\u2028b", "c"],
    ),
    "U+2028 in a .tsv": ("a.tsv", lines("id\ttext", "1\ta\u2028b"), ReadOptions(), ["a\u2028b"]),
    "no line break at the end": ("a.txt", b"a\nb", ReadOptions(), ["a", "b"]),
    "blank lines at the end": ("a.txt", b"a\nb\n\n \n", ReadOptions(), ["a", "b"]),
    "blank lines at the end of a .csv": ("a.csv", b"text\na\nb\n\n\n", ReadOptions(), ["a", "b"]),
    "blank lines at the end of JSON Lines": (
        "a.jsonl",
        b'{"text": "a"}\n\n \n',
        ReadOptions(),
        ["a"],
    ),
    "blank lines before the header": ("a.csv", b"\n\nid,text\n1,a\n", ReadOptions(), ["a"]),
    "spaces around the header": ("a.csv", b"id, text ,n\n1,a,2\n", ReadOptions(), ["a"]),
    "mark and spaces in the header": (
        "a.csv",
        b"\xef\xbb\xbf text,id\na,1\n",
        ReadOptions(),
        ["a"],
    ),
    "mark within concatenated files": ("a.txt", b"a\n\xef\xbb\xbfb\n", ReadOptions(), ["a", "b"]),
    "mark within concatenated JSON Lines": (
        "a.jsonl",
        b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n',
        ReadOptions(),
        ["a", "b"],
    ),
    "sep=;": ("a.csv", b"sep=;\r\nid;text\r\n1;a, b\r\n", ReadOptions(), ["a, b"]),
    "quoted sep=": ("a.csv", b'"sep=\t"\nid\ttext\n1\ta\n', ReadOptions(), ["a"]),
    "semicolons": ("a.csv", b"id;text\n1;a, b\n", ReadOptions(), ["a, b"]),
    "delimiter": ("a.csv", b"id#text\n1#a, b\n", ReadOptions(delimiter="#"), ["a, b"]),
    "delimiter of a .tsv": ("a.tsv", b"id;text\n1;a\n", ReadOptions(delimiter=";"), ["a"]),
    "delimiter of a .txt": ("a.txt", b"id|text\n1|a\n", ReadOptions(delimiter="|"), ["a"]),
    "no suffix": ("texts", b"a\nb\n", ReadOptions(), ["a", "b"]),
    "JSON Lines in .json": ("a.json", b'{"text": "a"}\n{"text": "b"}\n', ReadOptions(), ["a", "b"]),
    "one line of JSON in .json": ("a.json", b'{"text": "a"}', ReadOptions(), ["a"]),
    "array in .jsonl": ("a.jsonl", b' [{"text": "a"},\n {"text": "b"}]', ReadOptions(), ["a", "b"]),
    "one record without the key": ("a.jsonl", b'{"n": 1}\n{"text": "a"}\n', SKIP, ["a"]),
    "cp1252": (
        "a.csv",
        "text\n“café” – 5 €\n".encode("cp1252"),
        ReadOptions(encoding="cp1252"),
        ["“café” – 5 €"],
    ),
    "Latin-1": ("a.txt", b"caf\xe9\n", ReadOptions(encoding="latin-1"), ["café"]),
    "UTF-16 without a mark": (
        "a.txt",
        "é\nb\n".encode("utf-16-le"),
        ReadOptions(encoding="utf-16-le"),
        ["é", "b"],
    ),
    "UTF-16 with a mark": ("a.txt", "é\nb\n".encode("utf-16"), ReadOptions(), ["é", "b"]),
    "UTF-32 with a mark": ("a.csv", "text\né\n".encode("utf-32"), ReadOptions(), ["é"]),
    "UTF-16-LE with a mark": (
        "a.txt",
        b"\xff\xfe" + "é\n".encode("utf-16-le"),
        ReadOptions(encoding="utf-16-le"),
        ["é"],
    ),
    "UTF-8 with a mark": ("a.txt", b"\xef\xbb\xbfa\n", ReadOptions(encoding="utf-8"), ["a"]),
    "Shift-JIS, compressed": (
        "a.txt.gz",
        gzip.compress("日本\n".encode("shift_jis"), mtime=0),
        ReadOptions(encoding="shift_jis"),
        ["日本"],
    ),
    "empty texts left out": ("a.csv", b"id,text\n1,a\n2,\n3, \n4,b\n", SKIP, ["a", "b"]),
    "blank lines left out": ("a.txt", b"a\n\n \nb\n", SKIP, ["a", "b"]),
    "blank lines of a .csv left out": ("a.csv", b"text\na\n\nb\n", SKIP, ["a", "b"]),
    "null left out": ("a.jsonl", b'{"text": null}\n\n{"text": "a"}\n{"text": NaN}\n', SKIP, ["a"]),
    "HTML": (
        "a.txt",
        b"<p>caf&eacute; <b>b</b>ar</p>\na < b\n<br>\n",
        ReadOptions(skip_empty=True, strip_html=True),
        ["café bar", "a < b"],
    ),
}


@pytest.mark.parametrize("case", READABLE)
def test_every_row_of_a_file_is_read(tmp_path: Path, case: str):
    name, content, options, expected = READABLE[case]
    (tmp_path / name).write_bytes(content)
    assert read(str(tmp_path / name), options) == expected
    assert read(tmp_path / name, options, keep="text") if name.endswith("csv") else True


#: Files that are refused: the name, the content, the options, and words of the message.
REFUSED: dict[str, tuple[str, bytes, ReadOptions, list[str]]] = {
    "line break in a .tsv": (
        "a.tsv",
        lines("id\ttext", '1\t"one', 'two"'),
        ReadOptions(),
        ["a.tsv line 3 has 1 field, but its header has 2", "every line is a row", ".jsonl"],
    ),
    "tab too many": ("a.tsv", lines("id\ttext", "1\ta\tb"), ReadOptions(), ["line 2 has 3 fields"]),
    "open quote": (
        "a.csv",
        lines("id,text", "1,a", '2,"b', "3,c"),
        ReadOptions(),
        ["a.csv line 3", "before it is closed"],
    ),
    "text after a quote": (
        "a.csv",
        lines("id,text", '1,"Best" monitor'),
        ReadOptions(),
        ["line 2 is malformed", "twice"],
    ),
    "comma in one column": (
        "a.csv",
        lines("text", "a, b"),
        ReadOptions(),
        ["line 2 has 2 fields", "name it .txt"],
    ),
    "blank line": (
        "a.txt",
        b"a\n\nb\n",
        ReadOptions(),
        ["line 2 of a.txt: text is empty", "--skip-empty"],
    ),
    "blank line of a .csv": (
        "a.csv",
        b"text\na\n\nb\n",
        ReadOptions(),
        ["data row 2 of a.csv: text is empty", "--skip-empty"],
    ),
    "blank line of JSON": (
        "a.jsonl",
        b'{"text": "a"}\n\n{"text": "b"}\n',
        ReadOptions(),
        ["row 2 of a.jsonl", "--skip-empty"],
    ),
    "only blank lines": ("a.txt", b"\n \n", ReadOptions(), ["a.txt is empty: it has no rows"]),
    "all empty": (
        "a.txt",
        b"<br>\n<p>\n",
        ReadOptions(skip_empty=True, strip_html=True),
        ["texts of all 2 rows are empty"],
    ),
    "whole line": (
        "a.csv",
        b"id;Text\n1;a\n2;b\n",
        ReadOptions(),
        ["no column 'text'; it has 'id', 'Text'", "Did you mean 'Text'"],
    ),
    "two columns of one name": ("a.csv", b"text,text\na,b\n", ReadOptions(), ["'text' twice"]),
    "key twice": (
        "a.jsonl",
        b'{"text": "a", "text": "b"}\n',
        ReadOptions(),
        ["'text' occurs twice"],
    ),
    "key that no row has": (
        "a.jsonl",
        b'{"a": 1}\n{"b": 2}\n',
        ReadOptions(),
        ["no column 'text'; it has 'a', 'b'"],
    ),
    "formatted object": (
        "a.json",
        b'{\n "text": "a"\n}\n',
        ReadOptions(),
        ["line 1 is not valid JSON", "each object in one line"],
    ),
    "bad line": (
        "a.json",
        b'{"text": "a"}\n{oops\n',
        ReadOptions(),
        ["a.json line 2 is not valid JSON"],
    ),
    "NUL": (
        "a.txt",
        b"hello world\na\0b\n",
        ReadOptions(),
        ["line 2 of a.txt: text contains a NUL"],
    ),
    "UTF-16 without a mark": (
        "a.csv",
        "text\nhello\n".encode("utf-16-le"),
        ReadOptions(),
        ["a.csv seems to be UTF-16", "--encoding utf-16-le"],
    ),
    "UTF-16-BE, Cyrillic": (
        "a.txt",
        "привет мир\nда\n".encode("utf-16-be"),
        ReadOptions(),
        ["--encoding utf-16-be"],
    ),
    "UTF-16, Chinese": (
        "a.txt",
        "你好，世界\n一\n".encode("utf-16-le"),
        ReadOptions(),
        ["--encoding utf-16-le"],
    ),
    "UTF-32": ("a.txt", "hello\n".encode("utf-32-be"), ReadOptions(), ["--encoding utf-32-be"]),
    "curly quotes of Windows": (
        "a.csv",
        b"text\n\x93hi\x94\n",
        ReadOptions(),
        ["0x93 in line 2", "Windows-1252", "--encoding cp1252"],
    ),
    "Latin-1": (
        "a.jsonl",
        b'{"text": "caf\xe9"}\n',
        ReadOptions(),
        ["0xe9 in line 1", "--encoding cp1252"],
    ),
    "another language": (
        "a.txt",
        "こんにちは世界\n".encode("shift_jis"),
        ReadOptions(),
        ["in line 1", "--encoding"],
    ),
    "UTF-8 with one bad line": (
        "a.txt",
        "café\n".encode() + b"caf\xe9\n",
        ReadOptions(),
        ["0xe9 in line 2", "Earlier lines are UTF-8"],
    ),
    "wrong encoding": (
        "a.txt",
        b"a\x81\n",
        ReadOptions(encoding="cp1252"),
        ["is not cp1252: byte 0x81"],
    ),
    "mark of another encoding": (
        "a.txt",
        "a".encode("utf-16"),
        ReadOptions(encoding="cp1252"),
        ["mark of UTF-16", "Leave out --encoding"],
    ),
    "cut UTF-16": ("a.txt", "abc\n".encode("utf-16")[:-1], ReadOptions(), ["is not UTF-16"]),
    "gzip": (
        "a.csv",
        gzip.compress(b"text\na\n", mtime=0),
        ReadOptions(),
        ["compressed with gzip", ".gz"],
    ),
    "workbook": (
        "a.csv",
        b"PK\x03\x04\x14\0\x06\0",
        ReadOptions(),
        ["ZIP archive or an Excel workbook"],
    ),
    "old workbook": ("a.txt", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", ReadOptions(), ["old Excel"]),
    "Parquet": ("a.txt", b"PAR1\x15\x04\xff\0PAR1", ReadOptions(), ["is a Parquet file"]),
    "SQLite": ("a.csv", b"SQLite format 3\0\x10\0", ReadOptions(), ["SQLite database"]),
    "PDF": ("a.txt", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", ReadOptions(), ["is a PDF"]),
    "delimiter of Parquet": (
        "a.parquet",
        b"",
        ReadOptions(delimiter=";"),
        ["--delimiter is for .csv, .tsv and .txt files, and not for a.parquet"],
    ),
    "encoding of Excel": (
        "a.xlsx",
        b"",
        ReadOptions(encoding="cp1252"),
        ["--encoding is for", "not for a.xlsx"],
    ),
    "delimiter of JSON": ("a.jsonl", b"{}", ReadOptions(delimiter=";"), ["not for a.jsonl"]),
    "unknown suffix": ("a.pdf", b"", ReadOptions(), ["a.pdf ends in .pdf. Expected"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_file_is_refused_in_one_line(tmp_path: Path, case: str):
    name, content, options, words = REFUSED[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(str(tmp_path / name), options)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


#: Texts that are read with a message: the name, the content, the options, the texts, and its words.
REPORTED: dict[str, tuple[str, bytes, ReadOptions, int, list[str]]] = {
    "swallowed rows": (
        "a.csv",
        lines("id,text", '1,"Stop it, she said.', "2,fine", "3,ok", '4,he went home."', "5,bye"),
        ReadOptions(),
        2,
        ["a.csv lines 2 to 5", "look like rows", "rows are missing"],
    ),
    "a quotation mark over lines of a .tsv": (
        "a.tsv",
        lines("text", '"Stop it, she said.', "fine", 'he went home."'),
        ReadOptions(),
        3,
        ["a.tsv lines 2 to 4", "every line is a row"],
    ),
    "left out": (
        "a.csv",
        b"id,text\n1,a\n2,\n3,\n",
        SKIP,
        1,
        ["a.csv: left out 2 of 3, whose text is empty: data rows 2, 3"],
    ),
    "header of a text file": ("a.txt", b"Text\na\n", ReadOptions(), 2, ["first line, 'Text'"]),
    "UTF-8 read as another encoding": (
        "read as cp1252.txt",
        "café\n".encode(),
        ReadOptions(encoding="cp1252"),
        1,
        ["valid UTF-8", "leave out --encoding"],
    ),
}


@pytest.mark.parametrize("case", REPORTED)
def test_what_may_be_wrong_is_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
):
    name, content, options, n, words = REPORTED[case]
    (tmp_path / name).write_bytes(content)
    with caplog.at_level("INFO", "llmcond"):
        assert len(read(str(tmp_path / name), options)) == n
    assert any(all(word in line for word in words) for line in caplog.messages), caplog.messages
    assert len(caplog.messages) == 1


def test_multiline_texts_with_commas_are_not_suspected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "a.csv").write_bytes(lines("id,text", '1,"Dear all', "please call", 'Bye"'))
    with caplog.at_level("INFO", "llmcond"):
        assert read(str(tmp_path / "a.csv")) == ["Dear all\nplease call\nBye"]
    assert not caplog.messages


@given(st.lists(TEXTS, min_size=1, max_size=5), st.booleans())
def test_rows_of_pandas_files_are_read_as_they_were(texts: list[str], tabs: bool):
    table = pd.DataFrame({"n": range(len(texts)), "text": texts})
    content = table.to_csv(index=False, sep="\t" if tabs else ",")
    assert read_bytes("a.tsv" if tabs else "a.csv", content.encode()) == texts


@given(st.lists(TEXTS.filter(lambda text: "\t" not in text), min_size=1, max_size=5))
def test_every_line_of_a_plain_tsv_is_a_row(texts: list[str]):
    content = "".join(f"{i}\t{text}\n" for i, text in enumerate(texts))
    rows = read_bytes("a.tsv", f"n\ttext\n{content}".encode(), keep="text")
    assert len(rows) == len(texts)
    unquoted = [text[1:-1].replace('""', '"') for text in texts]
    assert all(row in pair for row, *pair in zip(rows, texts, unquoted, strict=True))


def read_bytes(name: str, content: bytes, keep: str = "") -> list[Any]:
    """Read a file of the given content; blank texts are left out unless they are kept cells."""
    source = Source(name, None, [name], None, read=ReadOptions(), content=content, format=name[1:])
    records = read_records(source, name, ["text"])
    return [record["text"] for record in records]


@pytest.mark.parametrize("keep", ["", "label"])
def test_delimiter_is_recognised_by_columns_and_rows(tmp_path: Path, keep: str):
    path = tmp_path / "a.csv"
    path.write_bytes(lines("id;Text;label", "1;a, b;x", "2;c, d;y"))
    assert read(path, column="Text", keep=keep) == (["x", "y"] if keep else ["a, b", "c, d"])
    with pytest.raises(UserError, match=r"separated by ';'.*'id', 'Text', 'label'.*--delimiter"):
        read(path, column="id;Text;label")
    path.write_bytes(lines("a;b", "no delimiter"))
    assert read(path, column="a;b") == ["no delimiter"]
    path.write_bytes(lines("\ttext", "1\ta", "2\tb"))
    assert read(path, column="text") == ["a", "b"]


# --- Standard input ---------------------------------------------------------------------------


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    def send(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return send


@pytest.mark.parametrize(
    ("content", "options", "column", "expected"),
    [
        (b"a\nb, c\n", {}, None, ["a", "b, c"]),
        (b"id,text\n1,a\n", {}, None, ["a"]),
        (b"id\ttext\n1\ta\n", {}, None, ["a"]),
        (b"text\na\n", {}, None, ["a"]),
        (b"sentence;id\na, b;1\n", {}, None, ["a, b"]),
        (b'{"text": "a"}\n{"text": "b"}\n', {}, None, ["a", "b"]),
        (b'[{"text": "a"},\n{"text": "b"}]', {}, None, ["a", "b"]),
        (b"[a list\n{brace\n", {}, None, ["[a list", "{brace"]),
        (b"id,body\n1,a\n", {}, "body", ["a"]),
        (b'{"body": "a"}\n', {}, "body", ["a"]),
        (b"id|body\n1|a\n", {"delimiter": "|"}, "body", ["a"]),
        (b"caf\xe9\n", {"encoding": "cp1252"}, None, ["café"]),
        (b"a\n\nb\n\n", {"skip_empty": True}, None, ["a", "b"]),
        (b"<b>a</b>\n", {"strip_html": True}, None, ["a"]),
        ("a\n".encode("utf-16"), {}, None, ["a"]),
    ],
)
def test_standard_input_is_texts_or_a_table(
    pipe: Any, content: bytes, options: dict[str, Any], column: str | None, expected: list[str]
):
    pipe(content)
    assert read("-", ReadOptions(**options), column) == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "standard input is empty, or was read before"),
        (b" \n\n", "standard input is empty"),
        (b"caf\xe9\n", "standard input is not UTF-8.*--encoding cp1252"),
        (gzip.compress(b"a", mtime=0), "standard input is not text: it is compressed with gzip"),
        (b"a\n\nb\n", "line 2 of standard input: text is empty.*--skip-empty"),
        ("ab\n".encode("utf-16-le"), "standard input seems to be UTF-16.*utf-16-le"),
    ],
)
def test_unreadable_standard_input_is_refused(pipe: Any, content: bytes, words: str):
    pipe(content)
    with pytest.raises(UserError, match=words):
        read("-")


def test_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    terminal = io.TextIOWrapper(io.BytesIO(b"a\n"))
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(UserError, match=r"which is a terminal.*- < texts.txt"):
        read("-")


def test_rated_rows_are_read_from_standard_input(pipe: Any):
    pipe(b"sentence1,sentence2,condition,label\na,b,c,3\n")
    rows, _ = read_rows("-")
    assert (rows.sentence1, rows.file) == (["a"], "standard input")


# --- Kept columns -----------------------------------------------------------------------------


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".xlsx":
        book = Workbook()
        names = list(dict.fromkeys(name for row in rows for name in row))
        for values in (names, *([row.get(name) for name in names] for row in rows)):
            book.active.append(values)
        book.save(path)
    else:
        dumped = [json.dumps(row) for row in rows]
        path.write_text(
            f"[{','.join(dumped)}]" if path.suffix == ".json" else "\n".join(dumped), "utf-8"
        )
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".xlsx", "list"])
def test_key_that_some_rows_lack_is_null(tmp_path: Path, suffix: str):
    rows = [{"text": "a"}, {"text": "b", "year": 2020}, {"text": "c"}]
    source: Any = rows if suffix == "list" else write_rows(tmp_path / f"a{suffix}", rows)
    assert read(source, keep="year") == [None, 2020, None]
    with pytest.raises(UserError, match="no column 'month'; it has 'text', 'year'"):
        read(source, keep="month")


@pytest.mark.parametrize("suffix", [".json", ".jsonl", "list"])
@pytest.mark.parametrize("value", ["\ud800", "a\0", ["a", "\udfff"], {"\ud800": 1}])
def test_other_cell_with_an_invalid_character_is_refused(tmp_path: Path, suffix: str, value: Any):
    rows = [{"text": "a", "kept": "b"}, {"text": "b", "kept": value}]
    source: Any = rows if suffix == "list" else write_rows(tmp_path / f"a{suffix}", rows)
    with pytest.raises(UserError, match=r"row 2 of .*: kept contains (half|a NUL)"):
        read(source, keep="kept")


def test_blank_rows_of_a_workbook_are_empty_texts(tmp_path: Path):
    path = write_rows(tmp_path / "a.xlsx", [{"text": "a", "n": 1}, {}, {"text": "b"}, {}, {}])
    with pytest.raises(UserError, match=r"data row 2 of a.xlsx: text is empty \(None\)"):
        read(path)
    assert read(path, SKIP) == ["a", "b"]


def test_candidates_keep_their_rows(tmp_path: Path):
    path = tmp_path / "pool.txt"
    path.write_bytes(b"a\n\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"iconv -f WINDOWS-1252 -t UTF-8 pool.txt"):
        read_candidates(path)
    with pytest.raises(UserError, match=r"line 2 of pool.txt: text is empty"):
        read_candidates(path, ReadOptions(encoding="cp1252"))
    options = ReadOptions(encoding="cp1252", skip_empty=True)
    assert read_candidates(path, options) == ["a", "café"]
