"""Labelled texts that guide embeddings: a table of texts, labels and conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcond.arrays import as_list
from llmcond.conditions import as_condition, condition_text
from llmcond.data.datasets import is_missing, open_collection, read_collection
from llmcond.data.formats import MissingColumnError, ReadOptions
from llmcond.errors import UserError, format_count, format_list, shortened_repr
from llmcond.files import digest_text
from llmcond.log import log
from llmcond.text import check_text, condition_key, normalise_condition

#: Name in messages of labelled texts that do not come from a file.
PYTHON = "the guide"


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Distinct texts with labels under one condition.

    Attributes:
        condition: the condition; None: the texts are embedded without one.
        texts: (m,) distinct texts.
        labels: (m,) at least two distinct labels.
        source: name of their file, or ``PYTHON``.
    """

    condition: str | None
    texts: Sequence[str]
    labels: Sequence[str]
    source: str

    @property
    def digest(self) -> str:
        """A digest of texts, labels and condition that does not depend on their order."""
        pairs = sorted(zip(self.texts, self.labels, strict=True))
        return digest_text(str(self.condition or ""), *(part for pair in pairs for part in pair))


def check_labelled(
    condition: str | None,
    texts: Iterable[str],
    labels: Iterable[Any],
    source: str = PYTHON,
    numbers: Iterable[int] | None = None,
) -> LabelledTexts:
    """Check and deduplicate labelled texts, and log the numbers of texts and labels.

    Labels that differ only in case, Unicode form or spacing are one label, which is logged.

    Args:
        condition: the condition of the labels; None: texts without a condition.
        texts: n texts.
        labels: n labels, which are converted to text.
        source: name of the texts in messages.
        numbers: their row numbers in the source, from 1. None: 1 to n.

    Returns:
        The distinct texts with their labels.

    Raises:
        UserError: the numbers of texts and labels differ, a text or a label is empty, a text has
            two labels, or there are fewer than two labels.
    """
    texts, labels = as_list(texts, "texts"), as_list(labels, "labels")
    if len(texts) != len(labels):
        raise UserError(
            f"there are {format_count(len(texts), 'text')} and "
            f"{format_count(len(labels), 'label')}; give one "
            "label for each text."
        )
    label_of: dict[str, str] = {}
    spellings: dict[str, str] = {}
    variants: dict[str, None] = {}
    for number, text, value in zip(numbers or range(1, len(texts) + 1), texts, labels, strict=True):
        row = f"row {number} of {source}"
        for name, cell in (("label", "" if is_missing(value) else str(value)), ("text", text)):
            check_text(cell, f"{row}: {name}", "Correct or remove the row.")
        spelling = normalise_condition(str(value))
        label = spellings.setdefault(condition_key(spelling), spelling)
        if label != spelling:
            variants[f"{spelling!r} as {label!r}"] = None
        if label_of.setdefault(text, label) != label:
            raise UserError(
                f"{row}: {shortened_repr(text)} has the label {shortened_repr(label)}, but an "
                "earlier row has "
                f"{shortened_repr(label_of[text])}. Keep only one of them."
            )
    counts = Counter(label_of.values())
    under_condition = "" if condition is None else f" under {condition_text(condition)!r}"
    if len(counts) < 2:
        what = "one label" if counts else "no texts"
        label = f", {shortened_repr(next(iter(counts)))}" if counts else ""
        raise UserError(
            f"{source} has {what}{under_condition}{label}. A guide needs texts with at least two "
            "labels, to show how they differ."
        )
    log.info(
        f"{source}: {format_count(len(label_of), 'text')} of {len(counts)} labels guide embeddings"
        f"{under_condition}"
    )
    if variants:
        shown, more = list(variants)[:5], len(variants) - 5
        log.info(
            f"{source}: labels that differ only in case or form count as one: {', '.join(shown)}"
            + (f" and {more:,} more" if more > 0 else "")
        )
    rare_labels = [label for label, count in counts.items() if count == 1]
    if rare_labels:
        log.info(
            f"{source}: labels with only one text: {format_list(rare_labels, 5)}; add texts for "
            "them"
        )
    return LabelledTexts(condition, list(label_of), list(label_of.values()), source)


def read_guide(
    data: Any,
    text: str | None,
    conditions: Sequence[str | None],
    *,
    closed: bool = True,
    read: ReadOptions | None = None,
) -> list[LabelledTexts]:
    """Read the labelled texts of a guide, for each of its conditions.

    Args:
        data: a table with the columns of the texts, ``label`` and, optionally, ``condition``.
        text: column of the texts. None: text, or sentence if there is no column text.
        conditions: the conditions that texts are embedded under, or None for texts without a
            condition. If the table has no column ``condition``, there must be exactly one.
        closed: whether the guide may name only these conditions.
        read: how the table is read; None: the command has no such options.

    Raises:
        UserError: the table cannot be read; there are several conditions, but no column for them;
            the guide names a condition that is not among ``conditions``; or as ``check_labelled``.
    """
    opened = open_collection(data, read, text)
    by_condition = opened.has_column("condition")
    try:
        table = read_collection(opened, text, ["label", *["condition"] * by_condition])
    except MissingColumnError as error:
        advice = f"A guide needs the columns {text or 'text'} and label."
        raise UserError(f"{error.finding} {advice}") from error
    source = table.file if isinstance(data, str | Path) else PYTHON
    labels = table.columns["label"]
    if not by_condition:
        if len(conditions) != 1:
            raise UserError(
                f"{source} has no column condition, but there are {len(conditions)} conditions. "
                "Add this column, which names the condition of each label, or give only one "
                "condition."
            )
        return [check_labelled(conditions[0], table.texts, labels, source)]
    named = list(filter(None, conditions))
    known: dict[str, str | None] = {
        condition_key(spelling): name for name in named for spelling in (name, condition_text(name))
    }
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(table.columns["condition"]):
        if is_missing(value):
            raise UserError(f"row {row + 1} of {source}: condition is empty. Fill it in.")
        name = as_condition(str(value), f"row {row + 1} of {source}: condition")
        known.setdefault(condition_key(name), None if closed else name)
        condition = known[condition_key(name)]
        if condition is None:
            expected = format_list(list(map(condition_text, named)), 5)
            raise UserError(
                f"row {row + 1} of {source}: no texts are embedded under the condition "
                f"{shortened_repr(name)}. Use one of these conditions: {expected}."
            )
        rows.setdefault(condition, []).append(row)
    return [
        check_labelled(
            condition,
            [table.texts[row] for row in indices],
            [labels[row] for row in indices],
            source,
            [row + 1 for row in indices],
        )
        for condition, indices in rows.items()
    ]
