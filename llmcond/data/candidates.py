"""Texts from files that are not datasets: candidates to rank, and texts to embed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmcond.data.datasets import (
    condition_column,
    read_columns,
    several_splits_error,
    text_reader,
    unread_columns,
)
from llmcond.data.formats import TEXT_COLUMNS, TEXT_SUFFIXES, MissingColumnError, ReadOptions
from llmcond.data.readers import STDIN, SUFFIXES, Source, open_source, read_records
from llmcond.errors import UserError
from llmcond.log import log


def read_candidates(path: Path, read: ReadOptions | None = None) -> list[str]:
    """Read candidates with ``read_text_file``; repeated ones are kept, and their number is logged.

    Raises:
        UserError: as ``read_text_file``, or there are fewer than two texts.
    """
    texts = read_text_file(path, "candidates", read=read)
    if len(texts) < 2:
        raise UserError(f"{path} contains {len(texts)} candidates; a choice needs at least 2.")
    repeats = len(texts) - len(set(texts))
    if repeats:
        log.info(
            f"{path}: {repeats:,} of {len(texts):,} candidates repeat an earlier one; all are kept"
        )
    return texts


def read_text_file(
    path: Path, what: str, column: str = "text", read: ReadOptions | None = None
) -> list[str]:
    """Read the texts of a file, one per line or those of a table's column, without outer spaces.

    Args:
        path: the file, or ``-`` for standard input.
        what: name of the texts in messages.
        column: the column of a table.
        read: how the file is read; None: the command has no such options.

    Raises:
        UserError: there is no such file, it is not text, or a text is empty.
    """
    path = Path(path).expanduser()
    if str(path) != STDIN and not path.is_file():
        raise UserError(
            f"{path} is not a file. Expected {what}: a .txt file with one per line, or a table "
            f"with a column {column}."
        )
    source = open_collection(str(path), read)
    (texts,) = read_columns(source, source.files, [(column, text_reader(source))])
    return [text.strip() for text in texts]


def open_collection(
    data: Any, read: ReadOptions | None = None, column: str | None = None
) -> Source:
    """Open a file of texts, a table, standard input, or texts or a table in memory.

    Args:
        data: as for ``open_source``, or a file with one text per line.
        read: how the texts are read; None: the command has no such options.
        column: column of the texts that the user named, so that standard input is a table.

    Raises:
        UserError: as for ``open_source``.
    """
    columns = () if column else TEXT_COLUMNS
    source = open_source(data, (*SUFFIXES, *TEXT_SUFFIXES), read, columns)
    return replace(source, splits=None) if len(source.tables) == 1 else source


def has_column(data: Any, name: str) -> bool:
    """Return whether a file or a table in memory has a column; False for plain texts.

    Raises:
        UserError: the file does not exist, or its first row cannot be read.
    """
    source = open_collection(data)
    if source.splits is not None or not source.has_columns:
        return False
    try:
        with closing(read_records(source, source.files[0], [name])) as records:
            next(records, None)
    except MissingColumnError:
        return False
    return True


def text_column(column_exists: Callable[[str], bool], requested: str | None = None) -> str:
    """Return the name of the column of texts: the requested one, else text, else sentence.

    Args:
        column_exists: whether there is a column of a name.
        requested: the column that the user named, if any.
    """
    if requested is not None:
        return requested
    first, second = TEXT_COLUMNS
    if not column_exists(first):
        return second if column_exists(second) else first
    if column_exists(second):
        log.info(f"texts: the column {first}; to use the column {second}: --text {second}")
    return first


def resolve_conditions(
    column_exists: Callable[[str], bool], condition: str | None, condition_text: str | None = None
) -> tuple[str | None, str | None]:
    """Decide whether conditions come from a column or are a single text for all rows.

    Args:
        column_exists: whether there is a column of a name.
        condition: name of a column if there is such a column, otherwise the text. Which of the two
            was chosen is logged.
        condition_text: the text.

    Returns:
        The name of the column, or None; and the text, or None. If neither argument is given, the
        column is called condition.

    Raises:
        UserError: both arguments are given, or the text is empty.
    """
    if condition is None or condition_text is not None:
        return condition_column(condition, condition_text), condition_text
    if column_exists(condition):
        log.info(f"conditions: the column {condition!r}")
        return condition, None
    condition_column(None, condition)
    log.info(f"condition: {condition!r} for every row, as there is no column of that name")
    return None, condition


def is_missing(value: Any) -> bool:
    """Return whether a cell of a table is missing: None, NaN, NaT, pandas' NA, or blank."""
    if value is None or isinstance(value, str):
        return value is None or not value.strip()
    try:
        return bool(value != value)  # noqa: PLR0124 - NaN and NaT differ from themselves
    except TypeError:  # NA has no truth value.
        return True
    except ValueError:  # An array has none either, but is not missing.
        return False


@dataclass(frozen=True, slots=True)
class Collection:
    """Texts with further columns.

    Attributes:
        texts: the texts.
        file: name of their file in messages.
        columns: further columns by name, with unconverted values.
        has_types: whether the source has types, so that not all values of columns are texts.
    """

    texts: list[str]
    file: str
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    has_types: bool = True


def read_collection(data: Any, column: str = "text", others: Sequence[str] = ()) -> Collection:
    """Read texts from a file or from memory, with further columns.

    Args:
        data: as for ``open_collection``.
        column: the column of a table that contains the texts.
        others: further columns of the table.

    Raises:
        UserError: as ``read_text_file``, or ``data`` is a folder, or further columns are requested
            from a text file.
        MissingColumnError: the table lacks a column.
    """
    source = open_collection(data)
    if source.splits is not None:
        raise several_splits_error(source)
    if not source.has_columns:
        for name in (*others, column):
            if name not in TEXT_COLUMNS or name in others:
                what = "a list of texts" if source.tables else "read as one text per line"
                raise UserError(
                    f"{source.name} is {what}, so it has no column {name!r}. Name a table."
                )
    columns = [(column, text_reader(source)), *unread_columns(others)]
    try:
        texts, *other_values = read_columns(source, source.files, columns)
    except MissingColumnError as error:
        advice = "Name one of its columns (--text COL for the texts)."
        raise MissingColumnError(error.finding, advice, error.column) from error
    file = source.files[0]
    other_columns = dict(zip(others, other_values, strict=True))
    has_types = source.suffix(file) not in (".csv", ".tsv")
    return Collection(texts, Path(file).name, other_columns, has_types)
