"""Labelled texts that guide embeddings: a table of texts, labels and conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmcond.conditions import condition_text
from llmcond.data.candidates import has_column, is_missing, read_collection, text_column
from llmcond.data.readers import MissingColumnError
from llmcond.errors import UserError, brief, listed, plural
from llmcond.files import digest_text
from llmcond.log import log

#: How messages call labelled texts that are from no file.
PYTHON = "the guide"


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Distinct texts with labels under one condition.

    Attributes:
        condition: None: the texts by themselves.
        texts: (m,) different from each other.
        labels: (m,) two different ones at least.
        source: name of the file that they are from, or :data:`PYTHON`.
    """

    condition: str | None
    texts: Sequence[str]
    labels: Sequence[str]
    source: str

    @property
    def digest(self) -> str:
        """Identify the texts with their labels and their condition, whatever their order."""
        pairs = sorted(zip(self.texts, self.labels, strict=True))
        return digest_text(str(self.condition or ""), *(part for pair in pairs for part in pair))


def check_labelled(
    condition: str | None,
    texts: Iterable[str],
    labels: Iterable[Any],
    source: str = PYTHON,
    numbers: Iterable[int] | None = None,
) -> LabelledTexts:
    """Return labelled texts, each once, and log how many texts have how many labels.

    ``numbers`` are those of their rows in the source, counted from 1; None: all rows.

    Raises:
        UserError: texts and labels that are not equally many, an empty text or label, a text with
            two labels, or fewer than two labels.
    """
    texts, labels = list(texts), list(labels)
    if len(texts) != len(labels):
        raise UserError(
            f"there are {plural(len(texts), 'text')} and {plural(len(labels), 'label')}; give one "
            "label for each text."
        )
    found: dict[str, str] = {}
    for number, text, value in zip(numbers or range(1, len(texts) + 1), texts, labels, strict=True):
        row = f"row {number} of {source}"
        if is_missing(value):
            raise UserError(f"{row}: label is empty. Mend or remove it and try again.")
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{row}: text is empty. Mend or remove it and try again.")
        label = str(value).strip()
        if found.setdefault(text, label) != label:
            raise UserError(
                f"{row}: {brief(text)} is labelled {brief(label)}, and {brief(found[text])} "
                "before. Keep one of them."
            )
    counts = Counter(found.values())
    named = "" if condition is None else f" under {condition_text(condition)!r}"
    if len(counts) < 2:
        has = f"one label{named}, {brief(next(iter(counts)))}" if counts else f"no texts{named}"
        raise UserError(
            f"{source} has {has}; a guide shows what sets texts apart, by texts of two labels at "
            "least."
        )
    log.info(
        f"{source}: {plural(len(found), 'text')} of {len(counts)} labels guide embeddings{named}"
    )
    single = [label for label, count in counts.items() if count == 1]
    if single:
        log.info(f"{source}: only one text each has {listed(single, 5)}; give more of them")
    return LabelledTexts(condition, list(found), list(found.values()), source)


def read_guide(
    given: Any, text: str | None, conditions: Sequence[str | None], *, closed: bool = True
) -> list[LabelledTexts]:
    """Read the labelled texts of a guide, for each condition that it names.

    Args:
        given: a table with a column for the texts, ``label`` and, optionally, ``condition``.
        text: column of the texts; None: text, or else sentence.
        conditions: those that texts are embedded under. Where the table has no column
            ``condition``, there must be one only. None stands for texts by themselves.
        closed: whether the guide can name no others.

    Raises:
        UserError: the table cannot be read, several conditions and no column for them, a condition
            that is not asked for, or as of :func:`check_labelled`.
    """
    has = partial(has_column, given)
    column = text_column(has, text)
    by_condition = has("condition")
    others = ["label", *(["condition"] if by_condition else [])]
    try:
        table = read_collection(given, column, others)
    except MissingColumnError as error:
        advice = f"A guide has the columns {column} and label."
        raise UserError(f"{error.found} {advice}") from error
    source = table.file if isinstance(given, str | Path) else PYTHON
    labels = table.columns["label"]
    if not by_condition:
        if len(conditions) != 1:
            raise UserError(
                f"{source} has no column condition, and there are {len(conditions)} conditions. "
                "Add the column, which names the condition of each label, or give one condition."
            )
        return [check_labelled(conditions[0], table.texts, labels, source)]
    known = {name: one for one in conditions if one for name in (str(one), condition_text(one))}
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(table.columns["condition"]):
        name = "" if is_missing(value) else str(value).strip()
        if not name:
            raise UserError(f"row {row + 1} of {source}: condition is empty. Name it.")
        if closed and name not in known:
            asked = listed([condition_text(one) for one in conditions if one], 5)
            raise UserError(
                f"row {row + 1} of {source}: no texts are embedded under the condition "
                f"{brief(name)}; those that are asked for: {asked}."
            )
        rows.setdefault(known.get(name, name), []).append(row)
    found = []
    for condition, own in rows.items():
        texts, named = ([values[row] for row in own] for values in (table.texts, labels))
        numbers = [row + 1 for row in own]
        found.append(check_labelled(condition, texts, named, source, numbers))
    return found
