"""Tables of short answers to conditions, which people can edit and encoders can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcond.base.errors import UserError, shortened_repr
from llmcond.base.files import digest_text
from llmcond.base.options import AnswersAs
from llmcond.base.text import (
    check_string,
    condition_flags,
    condition_key,
    condition_text,
    normalise_condition,
)
from llmcond.data.datasets import is_missing, open_collection, read_collection
from llmcond.data.formats import MissingColumnError, ReadOptions
from llmcond.data.readers import read_records
from llmcond.data.rows import write_table

#: What is embedded for a text that does not mention the condition, and the name of such texts.
NOT_MENTIONED = "not mentioned"
#: The columns that every table of answers has.
COLUMNS = ("text", "condition", "answer")


def answer_key(text: str, condition: str) -> tuple[str, str]:
    """Return what a text and a condition are found by.

    Spaces do not count, because spreadsheets change line ends. Values, and what is ignored, are no
    part of the condition's key.
    """
    return normalise_condition(text), condition_key(condition_text(condition))


@dataclass(frozen=True, eq=False)
class AnswerTable:
    """Short answers by text and condition.

    Attributes:
        answers: the answers by ``answer_key``; empty for a text that does not mention the
            condition.
        source: name of their file.
        as_: what the encoder reads: the answer, or both the text and the answer.
    """

    answers: Mapping[tuple[str, str], str]
    source: str = "the answers"
    as_: AnswersAs = "answer"

    @property
    def digest(self) -> str:
        """A digest of the answers and of their use, which does not depend on their order."""
        return digest_text(self.as_, *(f"{key}{self.answers[key]}" for key in sorted(self.answers)))

    def get(self, text: str, condition: str) -> str:
        """Return the answer of a text, or ``NOT_MENTIONED``."""
        return self.answers[answer_key(text, condition)] or NOT_MENTIONED

    def sentences(self, text: str, condition: str) -> list[str]:
        """Return what the encoder reads for a text; the text itself if it has no answer."""
        if answer_key(text, condition) not in self.answers:
            return [text]
        answer = self.get(text, condition)
        return [answer] if self.as_ == "answer" else [text, answer]

    def check(self, rows: Iterable[tuple[str, str]]) -> None:
        """Check that (text, condition) rows have an answer.

        Raises:
            UserError: some have none; the message counts them and names the command to run.
        """
        keys = {answer_key(*row): row for row in rows}
        missing = [row for key, row in keys.items() if key not in self.answers]
        if missing:
            text, condition = missing[0]
            raise UserError(
                f"{len(missing):,} of {len(keys):,} texts have no answer in {self.source}, such as "
                f"{shortened_repr(text)}. Add them: llmcond answers TEXTS "
                f"{condition_flags(condition_text(condition))} --server URL --out {self.source}."
            )


def read_answers(data: Any, as_: AnswersAs = "answer", *, strip_html: bool = False) -> AnswerTable:
    """Read a table of answers.

    Args:
        data: a table with the columns text, condition and answer.
        as_: what the encoder reads.
        strip_html: whether to remove HTML from the texts, as it was from those to be embedded.

    Raises:
        UserError: the table cannot be read, lacks a column, or has two answers to one question.
    """
    source = open_collection(data, ReadOptions(strip_html=strip_html), "text")
    try:
        table = read_collection(source, "text", ["answer"], conditions=["condition"])
    except MissingColumnError as error:
        advice = f"A table of answers has the columns {', '.join(COLUMNS)}."
        raise UserError(f"{error.finding} {advice}") from error
    name = str(data) if isinstance(data, str | Path) else "the answers"
    answers: dict[tuple[str, str], str] = {}
    cells = zip(table.texts, table.conditions["condition"], table.columns["answer"], strict=True)
    for number, (text, condition, value) in enumerate(cells, 1):
        where = f"row {number} of {name}"
        answer = "" if is_missing(value) else " ".join(check_string(str(value), where).split())
        answer = "" if condition_key(answer) == NOT_MENTIONED else answer
        if answers.setdefault(key := answer_key(text, condition), answer) != answer:
            raise UserError(
                f"{where}: {shortened_repr(text)} has the answer {shortened_repr(answer)}, but an "
                f"earlier row has {shortened_repr(answers[key])}. Keep only one of them."
            )
    return AnswerTable(answers, name, as_)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier table of answers with all columns; none if there is no file.

    Raises:
        UserError: as ``read_answers``.
    """
    if not path.exists():
        return []
    read_answers(path)
    source = open_collection(path)
    return list(read_records(source, source.files[0], None))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table of answers, with all columns that a row has."""
    names = dict.fromkeys(name for row in rows for name in row)
    write_table(path, {name: [row.get(name) for row in rows] for name in names})
