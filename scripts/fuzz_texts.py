"""Inputs of ``fuzz.py`` with texts as users have them, and the rows that must come out.

``texts``: files in several formats, encodings, line ends, delimiters and quotings, with odd cells
and odd names of columns, for the commands that read texts. ``tables``: the same rows as objects of
pandas, polars, Arrow, Hugging Face and NumPy, for the functions that take texts.

An input passes if the rows that come out are those that went in without the empty ones that
``--skip-empty`` leaves out. It also passes if a row cannot be used, one message says so, and no
output is left.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

from fuzz_changes import Base, Command, Input

CONDITION: Final = "the place"
#: Cells that are texts, whatever they look like.
ODD_TEXTS: Final = (
    '"Stop it, she said.',
    'home."',
    '"Best" monitor',
    'a "quoted" word',
    '"',
    '""',
    "'",
    "it's; fine, a|b",
    "=1+2",
    "-",
    "#comment",
    "null",
    "NaN",
    "None",
    "N/A",
    "True",
    "007",
    "1e5",
    "a < b and x <- y",
    "<p>Fish &amp; chips</p>",
    "C:\\temp\\new",
    "{sentence} %s",
    "[1, 2]",
    "cafe\u0301 déjà",
    "naïve – “quotes” …",
    "東京は雨です",
    "हिन्दी में एक वाक्य",
    "שלום עולם",
    "\U0001f600\U0001f3fd",
    "zero\u200bwidth \u00a0space",
    "soft\u00adhyphen",
    "word " * 400,
    "  spaces around  ",
)
#: Odd texts with characters that some formats use to end a line or a field.
BREAKING_TEXTS: Final = ("one\ttab", "two\nlines", "line\u2028separator\u0085next", "a\x0bb\x0cc")
EMPTY: Final = ("", " ", "\t", "\u00a0")
#: Cells that no command can use.
INVALID: Final = ("half \ud83d pair", "nul \0 byte")
NAMES: Final = (
    *("text", "text", "text", "my text", "Text ", "a.b", "_text", "größe", "テキスト", 'say "x"'),
    *("x;y", "select", "embedding ", "0", "condition text"),
)
EXTRA_NAMES: Final = ("id", "my id", "a.b", "größe", "_row", "vector", "text2", "select", "")
DELIMITERS: Final = (",", ";", "\t", "|")
ENDINGS: Final = ("\n", "\r\n", "\r")
#: Encodings, each with the value of ``--encoding``; empty: it is recognised.
ENCODINGS: Final = (
    ("utf-8", ""),
    ("utf-8", ""),
    ("utf-8-sig", ""),
    ("utf-16", ""),
    ("utf-16-le", "utf-16-le"),
    ("cp1252", "cp1252"),
    ("latin-1", "latin-1"),
    ("gb18030", "gb18030"),
    ("utf-8", "utf8"),
)


@dataclass(frozen=True)
class Texts:
    """Rows of texts with one extra column, and how they are written.

    Attributes:
        texts: the n texts.
        extra: the n values of the other column.
        name: name of the column of texts.
        extra_name: name of the other column.
        skip_empty: whether empty texts are to be left out.
    """

    texts: Sequence[str | None]
    extra: Sequence[Any]
    name: str
    extra_name: str
    skip_empty: bool

    @property
    def is_valid(self) -> bool:
        """Whether all texts that are not left out can be used."""
        cells = [text for text in self.texts if not (self.skip_empty and is_empty(text))]
        invalid = re.compile("[\0\ud800-\udfff]")
        return bool(cells) and not any(is_empty(t) or invalid.search(t or "") for t in cells)

    @property
    def expected(self) -> list[tuple[str, Any]]:
        """The rows that must come out."""
        rows = zip(self.texts, self.extra, strict=True)
        return [(text, extra) for text, extra in rows if text is not None and not is_empty(text)]


def is_empty(text: str | None) -> bool:
    """Return whether a cell is no text."""
    return text is None or not text.strip()


def draw_texts(chance: Random, more: Sequence[str | None] = ()) -> Texts:
    """Draw rows: mostly valid ones, sometimes with empty or invalid cells."""
    count = chance.randrange(3, 9)
    texts: list[str | None] = [f"two men play {i}" for i in range(count)]
    for _ in range(chance.randrange(count)):
        texts[chance.randrange(count)] = chance.choice(ODD_TEXTS)
    if chance.random() < 0.25:
        texts[chance.randrange(count)] = chance.choice((*EMPTY, *more))
    if chance.random() < 0.1:
        texts[chance.randrange(count)] = chance.choice(INVALID)
    # Clusters need two different texts.
    texts += ["children read", "it rains"]
    extra = [f"k{i}" for i in range(len(texts))]
    if chance.random() < 0.2:
        extra[0] = chance.choice(ODD_TEXTS[:20])
    name, extra_name = chance.choice(NAMES), chance.choice(EXTRA_NAMES)
    if extra_name == name:
        extra_name = "id"
    return Texts(texts, extra, name, extra_name, skip_empty=chance.random() < 0.5)


# -- files -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextFile:
    """A written file with the options that read it.

    Attributes:
        path: the file.
        rows: the rows in it.
        options: options of the command line without the column of texts.
        has_columns: whether the file has named columns.
        strips: whether spaces around a text do not belong to it.
    """

    path: Path
    rows: Texts
    options: Sequence[str] = ()
    has_columns: bool = True
    strips: bool = False


def write_csv_file(chance: Random, rows: Texts, work: Path) -> TextFile:
    """Write rows as .csv, with any delimiter, quoting, line end, encoding and compression."""
    delimiter, end = chance.choice(DELIMITERS), chance.choice(ENDINGS)
    if chance.random() < 0.3:
        texts = [*rows.texts[:-1], chance.choice(BREAKING_TEXTS)]
        rows = replace(rows, texts=texts)
    rows = _without(rows, "half")
    quoting: Any = chance.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC))
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter, quoting=quoting, lineterminator="\r\n")
    writer.writerow([rows.extra_name, rows.name])
    writer.writerows(zip(rows.extra, rows.texts, strict=True))
    # The line ends within quoted fields belong to the texts.
    text = stream.getvalue().replace("\r\n", end)
    options = ["--delimiter", delimiter] if chance.random() < 0.5 else []
    return _write_text(chance, rows, work / "texts.csv", text, options)


def write_tsv_file(chance: Random, rows: Texts, work: Path) -> TextFile:
    """Write rows as .tsv, in which every line is a row and quotes are characters."""
    rows = _without(rows, "half", "\t", "\n")
    quoted = re.compile('"(?:[^"]|"")*"')
    # A field that is quoted as a whole loses its quotes, so it is no test of plain fields.
    texts = ["x" if quoted.fullmatch(text or "") else text for text in rows.texts]
    extra = ["x" if quoted.fullmatch(value) else value for value in rows.extra]
    names = [name.strip('"') for name in (rows.extra_name, rows.name)]
    rows = replace(rows, texts=texts, extra=extra, extra_name=names[0], name=names[1])
    lines = [
        "\t".join(names),
        *("\t".join(map(str, row)) for row in zip(extra, texts, strict=True)),
    ]
    end = chance.choice(ENDINGS)
    return _write_text(chance, rows, work / "texts.tsv", end.join([*lines, ""]), [])


def write_txt_file(chance: Random, rows: Texts, work: Path) -> TextFile:
    """Write texts as .txt, one per line."""
    rows = _without(rows, "half", "\n")
    end = chance.choice(ENDINGS)
    lines = [text or "" for text in rows.texts]
    text = end.join([*lines, ""] if chance.random() < 0.5 else lines)
    written = _write_text(chance, rows, work / "texts.txt", text, [])
    return replace(written, has_columns=False, strips=True)


def write_json_file(chance: Random, rows: Texts, work: Path) -> TextFile:
    """Write rows as .json or .jsonl, either of which may hold a list or a row per line."""
    records = [
        {rows.extra_name: extra, rows.name: text}
        for extra, text in zip(rows.extra, rows.texts, strict=True)
    ]
    if chance.random() < 0.3:  # a key that one row lacks is null
        del records[-1][rows.extra_name]
        rows = replace(rows, extra=[*rows.extra[:-1], None])
    plain = chance.random() < 0.5
    dump = partial(json.dumps, ensure_ascii=plain)
    if not plain:
        rows = _without(rows, "half")
        records = [
            {**record, rows.name: text} for record, text in zip(records, rows.texts, strict=True)
        ]
    end = chance.choice(ENDINGS[:2])
    text = dump(records) if chance.random() < 0.4 else end.join([*map(dump, records), ""])
    path = work / chance.choice(("texts.json", "texts.jsonl"))
    return _write_text(chance, rows, path, text, [])


def write_parquet_file(chance: Random, rows: Texts, work: Path) -> TextFile:
    """Write rows as .parquet, with extra values of any type."""
    import pyarrow.parquet as pq

    rows = _with_typed_values(chance, _without(rows, "half"))
    pq.write_table(_arrow_table(chance, rows), work / "texts.parquet")
    return TextFile(work / "texts.parquet", rows)


def write_xlsx_file(chance: Random, rows: Texts, work: Path) -> TextFile:
    """Write rows as .xlsx."""
    from openpyxl import Workbook

    rows = _without(rows, "half", "nul")
    texts = [text if text is None or not text.startswith("=") else "x" for text in rows.texts]
    extra = ["x" if value.startswith("=") else value for value in rows.extra]
    rows = replace(rows, texts=texts, extra=extra)
    workbook = Workbook()
    workbook.active.append([rows.extra_name, rows.name])
    for row in zip(extra, texts, strict=True):
        workbook.active.append(row)
    workbook.save(work / "texts.xlsx")
    return TextFile(work / "texts.xlsx", rows)


def _without(rows: Texts, *parts: str) -> Texts:
    """Return rows in which texts that contain one of the parts are replaced."""
    texts = ["x y" if text and any(part in text for part in parts) else text for text in rows.texts]
    return replace(rows, texts=texts)


def _write_text(
    chance: Random, rows: Texts, path: Path, text: str, options: Sequence[str]
) -> TextFile:
    """Write a file in an encoding that has all of its characters, sometimes compressed."""
    encoding, stated = chance.choice(ENCODINGS)
    try:
        content = text.encode(encoding)
    except UnicodeEncodeError:
        content, stated = text.encode("utf-8"), ""
    if chance.random() < 0.15:
        path, content = path.with_name(f"{path.name}.gz"), gzip.compress(content)
    path.write_bytes(content)
    return TextFile(path, rows, [*options, *(["--encoding", stated] if stated else [])])


FORMATS: Final[Mapping[str, Callable[[Random, Texts, Path], TextFile]]] = {
    "csv": write_csv_file,
    "tsv": write_tsv_file,
    "txt": write_txt_file,
    "json": write_json_file,
    "parquet": write_parquet_file,
    "xlsx": write_xlsx_file,
}


# -- objects -----------------------------------------------------------------------------------


def _with_typed_values(chance: Random, rows: Texts) -> Texts:
    """Return rows whose extra values have a type that tables in files and memory have."""
    from datetime import date, datetime, time, timedelta
    from decimal import Decimal

    n = len(rows.texts)
    makers: Sequence[Callable[[int], Any]] = (
        lambda i: f"k{i}",
        lambda i: i,
        lambda i: i / 4,
        lambda i: i % 2 == 0,
        lambda i: date(2020, 1, 1 + i),
        lambda i: datetime(2020, 1, 1 + i, 12),
        lambda i: time(12, i),
        lambda i: timedelta(hours=i),
        lambda i: Decimal(i) / 4,
        lambda i: None if i % 3 else f"k{i}",
    )
    return replace(rows, extra=[*map(chance.choice(makers), range(n))])


def _arrow_table(chance: Random, rows: Texts) -> Any:
    """Return rows as an Arrow table whose texts have one of Arrow's types of text."""
    import pyarrow as pa

    types = (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))
    texts = pa.array(rows.texts, pa.string()).cast(chance.choice(types))
    return pa.table({rows.extra_name: pa.array(rows.extra), rows.name: texts})


def _pandas_table(chance: Random, rows: Texts) -> Any:
    import pandas as pd

    table = pd.DataFrame({rows.extra_name: rows.extra, rows.name: rows.texts})
    kind = chance.choice(("object", "string", "category", "string[pyarrow]", ""))
    if kind:
        table[rows.name] = table[rows.name].astype(kind)
    if chance.random() < 0.3:
        table.index = [f"row {i}" for i in range(len(table))]
    return table


def _polars_table(chance: Random, rows: Texts) -> Any:
    import polars as pl

    table = pl.DataFrame({rows.extra_name: rows.extra, rows.name: rows.texts})
    kind = chance.choice((pl.String, pl.Categorical))
    return table.with_columns(pl.col(rows.name).cast(kind))


def _hugging_face_table(chance: Random, rows: Texts) -> Any:
    import datasets

    table = datasets.Dataset.from_dict({rows.extra_name: rows.extra, rows.name: rows.texts})
    if chance.random() < 0.3:  # rows that are selected and not copied
        return table.select(range(len(table)))
    return table


#: Objects that have the columns of the rows.
TABLES: Final[Mapping[str, Callable[[Random, Texts], Any]]] = {
    "pandas": _pandas_table,
    "polars": _polars_table,
    "Hugging Face": _hugging_face_table,
    "Arrow": _arrow_table,
    "Arrow batch": lambda chance, rows: _arrow_table(chance, rows).combine_chunks().to_batches()[0],
    "columns": lambda chance, rows: {
        rows.extra_name: list(rows.extra),
        rows.name: list(rows.texts),
    },
    "records": lambda chance, rows: [
        {rows.extra_name: extra, rows.name: text}
        for extra, text in zip(rows.extra, rows.texts, strict=True)
    ],
}


def _numpy_texts(chance: Random, texts: Sequence[Any]) -> Any:
    import numpy as np

    # NumPy's type of text drops NUL at the end of a text.
    return np.array(texts, dtype=object if None in texts or chance.random() < 0.5 else str)


def _series(library: str, texts: Sequence[Any]) -> Any:
    module = __import__(library)
    return module.Series(list(texts))


def _arrow_texts(texts: Sequence[Any], *, chunked: bool) -> Any:
    import pyarrow as pa

    array = pa.array(texts, pa.string())
    return pa.chunked_array([array[:1], array[1:]]) if chunked else array


#: Objects that are lists of texts.
LISTS: Final[Mapping[str, Callable[[Random, Sequence[Any]], Any]]] = {
    "list": lambda chance, texts: list(texts),
    "tuple": lambda chance, texts: tuple(texts),
    "NumPy": _numpy_texts,
    "pandas series": lambda chance, texts: _series("pandas", texts),
    "polars series": lambda chance, texts: _series("polars", texts),
    "Arrow array": lambda chance, texts: _arrow_texts(texts, chunked=False),
    "Arrow chunks": lambda chance, texts: _arrow_texts(texts, chunked=True),
}


# -- commands and functions --------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of a function of llmcond on an object, whose outcome is checked.

    Attributes:
        name: the function and the object, for messages.
        call: calls the function, and returns what contradicts the rows; empty if nothing does.
        valid: whether the call must succeed.
        outputs: files that must not exist after a failure.
    """

    name: str
    call: Callable[[], str]
    valid: bool
    outputs: Sequence[Path] = field(default_factory=list)

    def failure(self) -> str:
        """Call the function; return what is wrong with the outcome, empty if nothing is."""
        from llmcond.base.errors import UserError

        out, err = io.StringIO(), io.StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(err):
                wrong = self.call()
        except UserError as error:
            left = [path.name for path in self.outputs if path.exists()]
            if left:
                return f"{self.name}: left {left} after {error}"
            return f"{self.name}: refused: {error}" if self.valid else ""
        except BaseException as error:
            return f"{self.name}: {type(error).__name__}: {error}"
        if not self.valid and not wrong:
            return f"{self.name}: succeeded with rows that cannot be used"
        return wrong and f"{self.name}: {wrong}"


def _find_difference(
    written: TextFile, texts: Sequence[Any], extra: Sequence[Any] | None = None
) -> str:
    """Return how rows that came out differ from those that went in; empty if they do not."""
    expected = written.rows.expected
    went_in = [text.strip() if written.strips else text for text, _ in expected]
    if list(texts) != went_in:
        return f"the texts are {list(texts)!r:.300}, not {went_in!r:.300}"
    if extra is not None:
        values = [_plain(value) for value in extra]
        if values != [_plain(value) for _, value in expected]:
            return f"the extra values are {values!r:.300}, not {[v for _, v in expected]!r:.300}"
    return ""


def _plain(value: Any) -> Any:
    """Return a value as CSV would show it, so that types of libraries do not matter."""
    if value is None or str(value) in ("nan", "NaT"):
        return ""
    text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    text = re.sub(r"(?<=\d)T(?=\d)", " ", text.strip())
    return re.sub(r"(?<=\d)\.0+$|(?<=[.]\d)0+$|(?<=[.]\d\d)0+$", "", text)


def _read_output(path: Path) -> Mapping[str, Sequence[Any]]:
    """Return the columns of an output."""
    if path.suffix.lower() == ".csv":
        csv.field_size_limit(2**24)
        with path.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.reader(stream))
        return {name: [row[i] for row in rows[1:]] for i, name in enumerate(rows[0])}
    import pyarrow.parquet as pq

    return dict(pq.read_table(path).to_pydict())


COMMANDS: Final = ("embed", "cluster", "index", "check-condition")


def file_input(chance: Random, base: Base, work: Path, form: str = "", command: str = "") -> Input:
    """Return a command that reads a file of texts."""
    form, command = form or chance.choice(list(FORMATS)), command or chance.choice(COMMANDS)
    written = FORMATS[form](chance, draw_texts(chance), work)
    rows, path = written.rows, written.path
    keeps = written.has_columns and command != "check-condition" and chance.random() < 0.5
    reads_stdin = path.suffix == ".txt" and chance.random() < 0.4
    out = work / chance.choice(("out.parquet", "out.csv", "OUT.CSV"))
    arguments = [command, "-" if reads_stdin else str(path), *written.options]
    arguments += ["--run", str(base.folder / "run"), "--condition", CONDITION]
    arguments += ["--skip-empty"] if rows.skip_empty else []
    arguments += [f"--text={rows.name}"] if written.has_columns else []
    arguments += [f"--keep={rows.extra_name}"] if keeps else []
    arguments += {
        "embed": ["--out", str(out)],
        "cluster": ["--out", str(out), "--clusters", "2", "--no-check"],
        "index": ["--out", str(work / "index"), "--json"],
        "check-condition": [],
    }[command]
    # Some names of columns cannot be written, because they are reserved or the format lacks them.
    may_refuse = keeps and (
        command == "cluster" or not re.fullmatch(r"[^\W_][\w ]*", rows.extra_name)
    )
    may_refuse |= keeps and command == "index" and rows.extra_name == "id"

    def check(code: int, printed: str) -> str:
        left = [entry.name for entry in work.iterdir() if entry != path]
        if code:
            refused = "refused" if rows.is_valid and not may_refuse else ""
            return f"left {left} after an error" if left else refused
        if not rows.is_valid:
            return "succeeded with rows that cannot be used"
        return _find_problem(command, written, out, printed, keeps=keeps)

    result = Command(arguments, check)
    return _WithStdin(result, path.read_bytes()) if reads_stdin else result


def _find_problem(command: str, written: TextFile, out: Path, printed: str, *, keeps: bool) -> str:
    """Return how the output of a command contradicts the rows; empty if it does not."""
    rows = written.rows
    if command == "check-condition":
        return ""
    if command == "index":
        added, n = json.loads(printed)["added"], len(rows.expected)
        return "" if added == n else f"{added} rows of {n}"
    columns = _read_output(out)
    name = rows.name if command == "cluster" and written.has_columns else "text"
    texts = columns["sentence" if command == "embed" else name]
    return _find_difference(written, texts, columns[rows.extra_name] if keeps else None)


@dataclass(frozen=True)
class _WithStdin:
    """An input whose command reads standard input."""

    command: Input
    content: bytes

    def failure(self) -> str:
        """Try the input; return what is wrong with the outcome, empty if nothing is."""
        with patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(self.content))):
            return self.command.failure()


def _make_object(chance: Random, form: str) -> tuple[Texts, Any]:
    """Return rows, and an object of a form in ``TABLES`` or ``LISTS`` that holds them."""
    rows = replace(draw_texts(chance, more=[None]), name="text", extra_name="my id")
    if form not in ("columns", "records", "list", "tuple"):
        rows = _without(rows, "half", "nul")
    if form in LISTS:
        return rows, LISTS[form](chance, rows.texts)
    rows = _with_typed_values(chance, rows)
    return rows, TABLES[form](chance, rows)


FUNCTIONS: Final = ("embed", "cluster", "check_condition", "encode", "Index.build")


def object_input(
    chance: Random, base: Base, work: Path, form: str = "", function: str = ""
) -> Input:
    """Return a call of a function on an object in memory."""
    import llmcond

    form = form or chance.choice([*TABLES, *LISTS])
    function = function or chance.choice(FUNCTIONS)
    rows, table = _make_object(chance, form)
    out = work / chance.choice(("out.parquet", "out.csv"))
    keep = () if form in LISTS else (rows.extra_name,)
    options: dict[str, Any] = {"skip_empty": rows.skip_empty, "run": str(base.folder / "run")}
    if function in ("encode", "Index.build"):  # they take lists of texts, and leave nothing out
        rows = replace(rows, skip_empty=False)
        if form == "records":
            table = [row["text"] for row in table]
        elif form in TABLES:
            table = table["text"]

    def write() -> str:
        if function == "embed":
            llmcond.embed(texts=table, out=out, condition=CONDITION, keep=keep, **options)
        else:
            llmcond.cluster(
                texts=table,
                out=out,
                condition=CONDITION,
                keep=keep,
                clusters=2,
                check=False,
                **options,
            )
        columns = _read_output(out)
        texts = columns["sentence" if function == "embed" else "text"]
        return _find_difference(TextFile(work, rows), texts, columns[keep[0]] if keep else None)

    def check() -> str:
        llmcond.check_condition(texts=table, condition=CONDITION, **options)
        return ""

    def count() -> str:
        run = options["run"]
        if function == "encode":
            n = len(llmcond.load_embedder(run).encode(table, CONDITION))
        else:
            n = len(llmcond.Index.build(work / "index", table, run=run))
        return "" if n == len(rows.texts) else f"{n} rows of {len(rows.texts)}"

    call = {"embed": write, "cluster": write, "check_condition": check}.get(function, count)
    return Call(f"{function} of {form}", call, rows.is_valid, [out, work / "index"])


TEXT_INPUTS: Final[dict[str, Callable[[Random, Base, Path], Input]]] = {
    "texts": file_input,
    "tables": object_input,
}
