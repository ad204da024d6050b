"""Inputs of ``fuzz.py``, and those with texts as users have them, whose rows must come out.

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
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class Input:
    """A command, or a call of a function, that can be tried.

    Attributes:
        name: what is tried, for messages.
        run: function that does it and returns the exit code.
        check: function from the exit code and standard output to what contradicts the input.
    """

    name: str
    run: Callable[[], int]
    check: Callable[[int, str], str] = lambda code, printed: ""

    def failure(self) -> str:
        """Try the input in this process; return what is wrong with how it ended."""
        out, err = io.StringIO(), io.StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = self.run()
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename}:{frame.lineno}"
            return f"{self.name}: {type(error).__name__}: {error} ({where})"
        errors = err.getvalue()
        if code not in (0, 1, 2):
            return f"{self.name}: exit code {code}"
        if "Traceback" in errors or (code and errors.count("llmcond: error: ") != 1):
            return f"{self.name}: {errors[-300:]}"
        wrong = self.check(code, out.getvalue())
        return wrong and f"{self.name}: {wrong} {errors[-300:]}"


def command(arguments: Sequence[str], check: Callable[[int, str], str] | None = None) -> Input:
    """Return a command of llmcond as an input."""
    from llmcond import cli

    run = partial(cli.run, arguments)
    return Input(" ".join(arguments[:2]), run, *([check] if check else []))


def succeed(*arguments: object) -> None:
    """Run a command that prepares inputs; end the process if it fails."""
    words = [*map(str, arguments)]
    if failure := command(words, lambda code, _: f"exit code {code}" if code else "").failure():
        raise SystemExit(f"fuzz: no input was tried, because a preparation failed: {failure}")


# -- texts --------------------------------------------------------------------------------------

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
    def names(self) -> tuple[str, str]:
        """The names of the columns."""
        return self.extra_name, self.name

    @property
    def lines(self) -> list[tuple[Any, Any]]:
        """The names of the columns, and the rows."""
        return [self.names, *zip(self.extra, self.texts, strict=True)]

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

#: What is replaced in the texts of a file, because its format cannot contain it.
UNWRITABLE: Final[Mapping[str, Sequence[str]]] = {
    "csv": ("half",),
    "tsv": ("half", "\t", "\n"),
    "txt": ("half", "\n"),
    "json": (),
    "parquet": ("half",),
    "xlsx": ("half", "nul"),
}
FORMATS: Final = tuple(UNWRITABLE)


@dataclass(frozen=True)
class TextFile:
    """A written file with the rows in it, and the options of the command line that read it."""

    path: Path
    rows: Texts
    options: Sequence[str] = ()


def write_file(chance: Random, form: str, rows: Texts, work: Path) -> TextFile:
    """Write rows in a format, with any delimiter, quoting, line end, encoding and compression."""
    rows, path = _without(rows, *UNWRITABLE[form]), work / f"texts.{form}"
    if form == "parquet":
        rows = _with_typed_values(chance, rows)
        pq.write_table(_arrow_table(chance, rows), path)
        return TextFile(path, rows)
    if form in ("tsv", "xlsx"):
        # A field of .tsv loses quotes around all of it, and one of .xlsx may be a formula.
        special = re.compile('"(?:[^"]|"")*"' if form == "tsv" else "=.*")
        texts = ["x" if special.fullmatch(text or "") else text for text in rows.texts]
        extra = ["x" if special.fullmatch(value) else value for value in rows.extra]
        rows = replace(rows, texts=texts, extra=extra)
    if form == "xlsx":
        write_workbook(path, rows.lines)
        return TextFile(path, rows)
    rows, text, options = _to_text(chance, form, rows)
    if form == "json":  # either may hold a list, or a row per line
        path = path.with_suffix(chance.choice((".json", ".jsonl")))
    encoding, stated = chance.choice(ENCODINGS)
    try:
        content = text.encode(encoding)
    except UnicodeEncodeError:  # the encoding lacks a character
        content, stated = text.encode("utf-8"), ""
    if chance.random() < 0.15:
        path, content = path.with_name(f"{path.name}.gz"), gzip.compress(content)
    path.write_bytes(content)
    return TextFile(path, rows, [*options, *(["--encoding", stated] if stated else [])])


def write_workbook(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Write rows as a workbook."""
    from openpyxl import Workbook

    workbook = Workbook()
    for row in rows:
        workbook.active.append(row)
    workbook.save(path)


def _to_text(chance: Random, form: str, rows: Texts) -> tuple[Texts, str, list[str]]:
    """Return the rows of a file, its text, and the options that read it."""
    end = chance.choice(ENDINGS)
    if form == "csv":
        if chance.random() < 0.3:
            rows = replace(rows, texts=[*rows.texts[:-1], chance.choice(BREAKING_TEXTS)])
        delimiter, stream = chance.choice(DELIMITERS), io.StringIO()
        quoting: Any = chance.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC))
        csv.writer(stream, delimiter=delimiter, quoting=quoting).writerows(rows.lines)
        # The line ends within quoted fields belong to the texts.
        text = stream.getvalue().replace("\r\n", end)
        return rows, text, ["--delimiter", delimiter] if chance.random() < 0.5 else []
    if form == "tsv":
        names = [name.strip('"') for name in rows.names]
        rows = replace(rows, extra_name=names[0], name=names[1])
        return rows, "".join("\t".join(map(str, line)) + end for line in rows.lines), []
    if form == "txt":
        text = end.join(text or "" for text in rows.texts)
        return rows, text + chance.choice((end, "")), []
    if not (escapes := chance.random() < 0.5):
        rows = _without(rows, "half")
    records = [dict(zip(rows.names, line, strict=True)) for line in rows.lines[1:]]
    if chance.random() < 0.3:  # a key that one row lacks is null
        del records[-1][rows.extra_name]
        rows = replace(rows, extra=[*rows.extra[:-1], None])
    dump, end = partial(json.dumps, ensure_ascii=escapes), chance.choice(ENDINGS[:2])
    text = dump(records) if chance.random() < 0.4 else end.join([*map(dump, records), ""])
    return rows, text, []


def _without(rows: Texts, *parts: str) -> Texts:
    """Return rows in which texts that contain one of the parts are replaced."""
    texts = ["x y" if text and any(part in text for part in parts) else text for text in rows.texts]
    return replace(rows, texts=texts)


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
    types = (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))
    texts = pa.array(rows.texts, pa.string()).cast(chance.choice(types))
    return pa.table({rows.extra_name: pa.array(rows.extra), rows.name: texts})


def _pandas_table(chance: Random, table: Any) -> Any:
    frame = table.to_pandas()
    if kind := chance.choice(("object", "string", "category", "string[pyarrow]", "")):
        frame["text"] = frame["text"].astype(kind)
    if chance.random() < 0.3:
        frame.index = [f"row {i}" for i in range(len(frame))]
    return frame


def _library(name: str, function: str) -> Callable[[Random, Any], Any]:
    """Return a form that a function of a library makes of a table or a list."""
    return lambda chance, values: attrgetter(function)(import_module(name))(values)


#: Objects that have the columns of an Arrow table, and objects that are lists of texts.
TABLES: Final[Mapping[str, Callable[[Random, Any], Any]]] = {
    "pandas": _pandas_table,
    "polars": _library("polars", "from_arrow"),
    "Hugging Face": _library("datasets", "Dataset"),
    "Arrow": lambda chance, table: table,
    "Arrow batch": lambda chance, table: table.combine_chunks().to_batches()[0],
    "columns": lambda chance, table: table.to_pydict(),
    "records": lambda chance, table: table.to_pylist(),
}
LISTS: Final[Mapping[str, Callable[[Random, Any], Any]]] = {
    "list": lambda chance, texts: list(texts),
    "tuple": lambda chance, texts: tuple(texts),
    # NumPy's type of text drops NUL at the end of a text.
    "NumPy": lambda chance, texts: np.array(
        texts, dtype=object if None in texts or chance.random() < 0.5 else str
    ),
    "pandas series": _library("pandas", "Series"),
    "polars series": _library("polars", "Series"),
    "Arrow array": _library("pyarrow", "array"),
    "Arrow chunks": lambda chance, texts: pa.chunked_array([texts[:1], texts[1:]], pa.string()),
}


# -- commands and functions --------------------------------------------------------------------


def find_difference(
    rows: Texts, texts: Sequence[Any], extra: Sequence[Any] | None = None, strips: bool = False
) -> str:
    """Return how rows that came out differ from those that went in; empty if they do not.

    With ``strips``, spaces around a text do not belong to it.
    """
    went_in = [text.strip() if strips else text for text, _ in rows.expected]
    if list(texts) != went_in:
        return f"the texts are {list(texts)!r:.300}, not {went_in!r:.300}"
    values = [value for _, value in rows.expected]
    if extra is not None and [*map(_plain, extra)] != [*map(_plain, values)]:
        return f"the extra values are {list(extra)!r:.300}, not {values!r:.300}"
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
    return dict(pq.read_table(path).to_pydict())


COMMANDS: Final = ("embed", "cluster", "index", "check-condition")


def file_input(chance: Random, base: Path, work: Path, form: str = "", name: str = "") -> Input:
    """Return a command that reads a file of texts."""
    form, name = form or chance.choice(FORMATS), name or chance.choice(COMMANDS)
    written, has_columns = write_file(chance, form, draw_texts(chance), work), form != "txt"
    rows, path = written.rows, written.path
    keeps = has_columns and name != "check-condition" and chance.random() < 0.5
    reads_stdin = path.suffix == ".txt" and chance.random() < 0.4
    out = work / chance.choice(("out.parquet", "out.csv", "OUT.CSV"))
    arguments = [name, "-" if reads_stdin else str(path), *written.options]
    arguments += ["--run", str(base / "run"), "--condition", CONDITION]
    arguments += ["--skip-empty"] if rows.skip_empty else []
    arguments += [f"--text={rows.name}"] if has_columns else []
    arguments += [f"--keep={rows.extra_name}"] if keeps else []
    arguments += {
        "embed": ["--out", str(out)],
        "cluster": ["--out", str(out), "--clusters", "2"],
        "index": ["--out", str(work / "index"), "--json"],
        "check-condition": [],
    }[name]
    # Some names of columns cannot be written, because they are reserved or the format lacks them.
    may_refuse = keeps and (name == "cluster" or not re.fullmatch(r"[^\W_][\w ]*", rows.extra_name))
    may_refuse |= keeps and name == "index" and rows.extra_name == "id"

    def check(printed: str) -> str:
        if name == "check-condition":
            return ""
        if name == "index":
            added, n = json.loads(printed)["added"], len(rows.expected)
            return "" if added == n else f"{added} rows of {n}"
        columns = _read_output(out)
        texts = columns["sentence" if name == "embed" else rows.name if has_columns else "text"]
        extra = columns[rows.extra_name] if keeps else None
        return find_difference(rows, texts, extra, strips=not has_columns)

    tried = command(arguments, _outcome(rows, work, path, check, may_refuse))
    if not reads_stdin:
        return tried

    def run() -> int:
        with patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes()))):
            return tried.run()

    return replace(tried, run=run)


def _outcome(
    rows: Texts, work: Path, path: Path | None, check: Callable[[str], str], may_refuse: bool
) -> Callable[[int, str], str]:
    """Return a check that rows come out if they can be used, and that errors leave no output.

    Args:
        rows: the rows that went in.
        work: folder of the outputs, and of ``path``.
        path: the file that was read, if there is one.
        check: function from standard output to what contradicts the rows.
        may_refuse: whether rows that can be used may be refused.
    """

    def outcome(code: int, printed: str) -> str:
        if code:
            left = [entry.name for entry in work.iterdir() if entry != path]
            refused = "refused" if rows.is_valid and not may_refuse else ""
            return f"left {left} after an error" if left else refused
        return check(printed) if rows.is_valid else "succeeded with rows that cannot be used"

    return outcome


FUNCTIONS: Final = ("embed", "cluster", "check_condition", "encode", "Index.build")


def object_input(
    chance: Random, base: Path, work: Path, form: str = "", function: str = ""
) -> Input:
    """Return a call of a function on an object in memory."""
    import llmcond
    from llmcond.base.errors import UserError

    form = form or chance.choice([*TABLES, *LISTS])
    function = function or chance.choice(FUNCTIONS)
    rows = replace(draw_texts(chance, more=[None]), name="text", extra_name="my id")
    if form not in ("list", "tuple"):
        rows = _without(rows, "half", *([] if form in ("columns", "records") else ["nul"]))
    values: Any = rows.texts
    if form in TABLES:
        rows = _with_typed_values(chance, rows)
        values = _arrow_table(chance, rows)
    table = {**TABLES, **LISTS}[form](chance, values)
    out = work / chance.choice(("out.parquet", "out.csv"))
    keep = () if form in LISTS else (rows.extra_name,)
    run = str(base / "run")
    if function in ("encode", "Index.build"):  # they take lists of texts, and leave nothing out
        rows = replace(rows, skip_empty=False)
        if form == "records":
            table = [row["text"] for row in table]
        elif form in TABLES:
            table = table["text"]
    options: dict[str, Any] = {"skip_empty": rows.skip_empty, "run": run, "condition": CONDITION}
    written = {**options, "texts": table, "out": out, "keep": keep}
    calls: dict[str, Callable[[], Any]] = {
        "embed": lambda: llmcond.embed(**written),
        "cluster": lambda: llmcond.cluster(clusters=2, **written),
        "check_condition": lambda: llmcond.check_condition(texts=table, **options),
        "encode": lambda: len(llmcond.load_embedder(run).encode(table, CONDITION)),
        "Index.build": lambda: len(llmcond.Index.build(work / "index", table, run=run)),
    }

    def call() -> int:
        try:
            result = calls[function]()
        except UserError as error:
            print(f"llmcond: error: {error}", file=sys.stderr)
            return error.exit_code
        print("\n", result if isinstance(result, int) else "", sep="", end="")
        return 0

    def check(printed: str) -> str:
        if function in ("embed", "cluster"):
            columns = _read_output(out)
            texts = columns["sentence" if function == "embed" else "text"]
            return find_difference(rows, texts, columns[keep[0]] if keep else None)
        n = printed.rpartition("\n")[2] or len(rows.texts)
        return "" if int(n) == len(rows.texts) else f"{n} rows of {len(rows.texts)}"

    return Input(f"{function} of {form}", call, _outcome(rows, work, None, check, may_refuse=False))


TEXT_INPUTS: Final[dict[str, Callable[[Random, Path, Path], Input]]] = {
    "texts": file_input,
    "tables": object_input,
}
