"""Candidates of a user's own: texts that are ranked, from a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from llmcond.data.datasets import cell_text, condition_column, read_columns, unread_columns
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


def read_candidates(path: Path) -> list[str]:
    """Return the texts of a file, as :func:`text_file` does. Repeats are kept, and told.

    Raises:
        UserError: as of that function, or fewer than two texts.
    """
    texts = text_file(path, "candidates")
    if len(texts) < 2:
        raise UserError(
            f"{path} holds {len(texts)} candidates; at least 2 are needed to choose between."
        )
    repeats = len(texts) - len(set(texts))
    if repeats:
        log.info(f"{path}: {repeats:,} of {len(texts):,} candidates repeat an earlier one; kept")
    return texts


def text_file(path: Path, what: str, column: str = "text") -> list[str]:
    """Return the texts of a file: one a line, or those of a table's column.

    Lines without a text are left out. ``what`` is what messages call the texts.

    Raises:
        UserError: no such file, not UTF-8, or an empty text in a table; as of
            :func:`is_text_file`.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(
            f"{path} is no file. Expected {what}: a .txt file, one a line, or a table with a "
            f"column {column}."
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


def is_text_file(given: Any) -> bool:
    """Return whether there is a file of one text a line, by its name.

    Raises:
        UserError: its name is neither that of such a file nor that of a table.
    """
    if not isinstance(given, str | Path):
        return False
    path = Path(given).expanduser()
    suffix = suffix_of(str(path))
    if suffix in SUFFIXES or not path.is_file():
        return False
    if suffix not in TEXT_SUFFIXES:
        raise UserError(f"{path} ends in {suffix}. Expected {TEXT_FILES}.")
    return True


def _are_texts(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(one, str) for one in given)


def has_column(given: Any, name: str) -> bool:
    """Return whether a file or rows in memory have a column; texts without a table have none.

    Raises:
        UserError: nothing there, or its first row cannot be read.
    """
    if is_text_file(given) or _are_texts(given):
        return False
    source = open_source(given)
    if source.splits is not None:
        return False
    try:
        with closing(read_records(source, source.files[0], [name])) as records:
            next(records, None)
    except MissingColumnError:
        return False
    return True


def text_column(has: Callable[[str], bool], named: str | None = None) -> str:
    """Return the column that texts are in: the one that was named, else text, else sentence.

    ``has`` is whether there is a column of a name.
    """
    if named is not None:
        return named
    first, second = TEXT_COLUMNS
    if not has(first):
        return second if has(second) else first
    if has(second):
        log.info(f"the texts are in the column {first}; --text {second} takes the other one")
    return first


def condition_source(
    has: Callable[[str], bool], condition: str | None, condition_text: str | None = None
) -> tuple[str | None, str | None]:
    """Return the column that conditions are in, or the one text that is every row's condition.

    ``condition`` names a column where there is one of that name (as ``has`` says), and is else the
    text, which a message says. Neither given: the column called condition.

    Raises:
        UserError: both are given, or an empty text.
    """
    if condition is None or condition_text is not None:
        return condition_column(condition, condition_text), condition_text
    if has(condition):
        log.info(f"conditions: the column {condition!r}")
        return condition, None
    condition_column(None, condition)
    log.info(f"condition: {condition!r} for every row, as there is no column of that name")
    return None, condition


def is_missing(value: Any) -> bool:
    """Return whether a cell of a table holds nothing: None, NaN, or blanks."""
    if isinstance(value, Real):
        return math.isnan(value)
    return value is None or not str(value).strip()


@dataclass(frozen=True, slots=True)
class Collection:
    """Texts, with further columns as they are, and the name of the file for messages."""

    texts: list[str]
    file: str
    columns: Mapping[str, list[Any]] = field(default_factory=dict)


def read_collection(given: Any, column: str = "text", others: Sequence[str] = ()) -> Collection:
    """Return the texts of a file or of rows in memory, with further columns.

    Args:
        given: a table, a text file, one a line, or in memory a table or a list of texts.
        column: where the texts of a table are.
        others: further columns of it.

    Raises:
        UserError: as of :func:`text_file`, a folder, or further columns of a text file.
        MissingColumnError: no such column.
    """
    if _are_texts(given):
        given = [{column: text} for text in given]
    elif isinstance(given, str | Path) and not str(given).startswith("hf://"):
        path = Path(given).expanduser()
        if is_text_file(path):
            if others:
                raise UserError(
                    f"{path} is read as a text file, one text a line, and has no column "
                    f"{others[0]!r}. Name a table."
                )
            return Collection(text_file(path, "texts"), path.name)
    source = open_source(given)
    if source.splits is not None:
        raise UserError(f"{source.name} is a folder; name one file.")
    wanted = [(column, cell_text), *unread_columns(others)]
    try:
        texts, *found = read_columns(source, source.files, wanted)
    except MissingColumnError as error:
        advice = "Name one of them (--text COL for the texts)."
        raise MissingColumnError(error.found, advice) from error
    return Collection(texts, Path(source.files[0]).name, dict(zip(others, found, strict=True)))
