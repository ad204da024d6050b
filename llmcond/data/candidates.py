"""Texts from files that are not datasets: candidates to rank, and texts to embed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcond.data.datasets import condition_column, read_columns, unread_columns
from llmcond.data.readers import (
    SUFFIXES,
    TEXT_COLUMNS,
    TEXT_FILES,
    TEXT_SUFFIXES,
    MissingColumnError,
    open_source,
    read_lines,
    read_records,
    suffix_of,
)
from llmcond.errors import UserError
from llmcond.log import log
from llmcond.text import cell_text


def read_candidates(path: Path) -> list[str]:
    """Read candidates with ``read_text_file``; repeated ones are kept, and their number is logged.

    Raises:
        UserError: as ``read_text_file``, or there are fewer than two texts.
    """
    texts = read_text_file(path, "candidates")
    if len(texts) < 2:
        raise UserError(f"{path} contains {len(texts)} candidates; a choice needs at least 2.")
    repeats = len(texts) - len(set(texts))
    if repeats:
        log.info(
            f"{path}: {repeats:,} of {len(texts):,} candidates repeat an earlier one; all are kept"
        )
    return texts


def read_text_file(path: Path, what: str, column: str = "text") -> list[str]:
    """Read the texts of a file: one per line, or those of a table's column.

    Blank lines are skipped.

    Args:
        path: the file.
        what: name of the texts in messages.
        column: the column of a table.

    Raises:
        UserError: there is no such file, it is not UTF-8, or a text in a table is empty; or as
            ``is_text_file``.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(
            f"{path} is not a file. Expected {what}: a .txt file with one per line, or a table "
            f"with a column {column}."
        )
    if not is_text_file(path):
        source = open_source(str(path))
        (texts,) = read_columns(source, source.files, [(column, cell_text)])
        return [text.strip() for text in texts]
    source = open_source(str(path), TEXT_SUFFIXES)
    lines = read_lines(source, source.files[0])
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise UserError(f"{path} is empty: all of its lines are blank.")
    return texts


def is_text_file(data: Any) -> bool:
    """Return whether ``data`` is the path of an existing file with one text per line.

    Raises:
        UserError: it is a file whose suffix is neither that of text files nor that of tables.
    """
    if not isinstance(data, str | Path):
        return False
    path = Path(data).expanduser()
    suffix = suffix_of(str(path))
    if suffix in SUFFIXES or not path.is_file():
        return False
    if suffix not in TEXT_SUFFIXES:
        raise UserError(f"{path} ends in {suffix}. Expected {TEXT_FILES}.")
    return True


def _is_text_list(data: Any) -> bool:
    return isinstance(data, list | tuple) and all(isinstance(text, str) for text in data)


def has_column(data: Any, name: str) -> bool:
    """Return whether a file or a table in memory has a column; False for plain texts.

    Raises:
        UserError: the file does not exist, or its first row cannot be read.
    """
    if is_text_file(data) or _is_text_list(data):
        return False
    source = open_source(data)
    if source.splits is not None:
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
    """

    texts: list[str]
    file: str
    columns: Mapping[str, list[Any]] = field(default_factory=dict)


def read_collection(data: Any, column: str = "text", others: Sequence[str] = ()) -> Collection:
    """Read texts from a file or from memory, with further columns.

    Args:
        data: path of a table or of a text file with one text per line; or, in memory, a table or a
            list of texts.
        column: the column of a table that contains the texts.
        others: further columns of the table.

    Raises:
        UserError: as ``read_text_file``, or ``data`` is a folder, or further columns are requested
            from a text file.
        MissingColumnError: the table lacks a column.
    """
    if _is_text_list(data):
        data = [{column: text} for text in data]
    elif isinstance(data, str | Path) and not str(data).startswith("hf://"):
        path = Path(data).expanduser()
        if is_text_file(path):
            if others:
                raise UserError(
                    f"{path} is a text file with one text per line, so it has no column "
                    f"{others[0]!r}. Name a table."
                )
            return Collection(read_text_file(path, "texts"), path.name)
    source = open_source(data)
    if source.splits is not None:
        raise UserError(f"{source.name} is a folder; name a single file.")
    columns = [(column, cell_text), *unread_columns(others)]
    try:
        texts, *other_values = read_columns(source, source.files, columns)
    except MissingColumnError as error:
        advice = "Name one of its columns (--text COL for the texts)."
        raise MissingColumnError(error.finding, advice, error.column) from error
    return Collection(
        texts, Path(source.files[0]).name, dict(zip(others, other_values, strict=True))
    )
