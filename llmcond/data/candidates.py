"""Candidates of a user's own: texts that are ranked, from a file."""

from __future__ import annotations

from pathlib import Path

from llmcond.data.datasets import Problems
from llmcond.data.readers import SUFFIXES, open_source, read_lines, read_records, suffix_of
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
        UserError: no such file, not UTF-8, or an empty text in a table.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(
            f"{path} is no file. Expected {what}: a text file, one a line, or a table with a "
            f"column {column}."
        )
    return _column(path, column) if suffix_of(str(path)) in SUFFIXES else _lines(path)


def _lines(path: Path) -> list[str]:
    # Whatever its name ends in: a list of texts has no format to tell.
    source = open_source(str(path), (suffix_of(str(path)),))
    lines = read_lines(source, source.files[0])
    return [line.strip() for line in lines if line.strip()]


def _column(path: Path, name: str) -> list[str]:
    source, problems = open_source(str(path)), Problems(str(path))
    rows = read_records(source, source.files[0], [name])
    texts = [problems.text(number, name, row[name]) for number, row in enumerate(rows, 1)]
    problems.raise_if_any()
    return [text.strip() for text in texts]
