"""Tables of texts, labels and conditions: texts as guides, and paired triples of aspects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt

from llmcond.base.arrays import as_list
from llmcond.base.errors import UserError, format_count, format_list, shortened_repr
from llmcond.base.files import digest_text, read_json
from llmcond.base.output import log
from llmcond.base.records import check_record
from llmcond.base.text import (
    as_condition,
    check_text,
    condition_key,
    condition_text,
    normalise_condition,
)
from llmcond.data.datasets import is_missing, open_collection, read_collection
from llmcond.data.formats import MissingColumnError, ReadOptions

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
        read: how the table is read, as far as its format has these options; None: the command has
            none.

    Raises:
        UserError: the table cannot be read; there are several conditions, but no column for them;
            the guide names a condition that is not among ``conditions``; or as ``check_labelled``.
    """
    opened = open_collection(data, read, text, lenient=True)
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
        return [check_labelled(conditions[0], table.texts, labels, source, table.numbers)]
    named = list(filter(None, conditions))
    known: dict[str, str | None] = {
        condition_key(spelling): name for name in named for spelling in (name, condition_text(name))
    }
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(table.columns["condition"]):
        where = f"row {table.numbers[row]} of {source}"
        if is_missing(value):
            raise UserError(f"{where}: condition is empty. Fill it in.")
        name = as_condition(str(value), f"{where}: condition")
        known.setdefault(condition_key(name), None if closed else name)
        condition = known[condition_key(name)]
        if condition is None:
            expected = format_list(list(map(condition_text, named)), 5)
            advice = f"Use one of these conditions: {expected}" if named else "Add it: --condition"
            raise UserError(
                f"{where}: no texts are embedded under the condition {shortened_repr(name)}. "
                f"{advice}."
            )
        rows.setdefault(condition, []).append(row)
    return [
        check_labelled(
            condition,
            [table.texts[row] for row in indices],
            [labels[row] for row in indices],
            source,
            [table.numbers[row] for row in indices],
        )
        for condition, indices in rows.items()
    ]


@dataclass(frozen=True, slots=True)
class AspectText:
    """A text with its attributes.

    Attributes:
        text: the text.
        attributes: values by condition. The text is not evaluated under other conditions.
        group: name of the group of texts that it belongs to; may be empty.
    """

    text: str
    attributes: Mapping[str, str]
    group: str = ""


@dataclass(frozen=True, slots=True)
class ConditionWordings:
    """Wordings of a condition.

    Attributes:
        text: a noun phrase.
        question: a question; may be empty.
        others: further noun phrases.
        kind: name of the kind of values, which mean the same under all conditions of the kind, as
            "positive" under all opinions; empty: no such kind.
    """

    text: str
    question: str = ""
    others: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Triple:
    """A paired triple of texts, given by their positions.

    The first text has the anchor's value of ``condition`` but not of ``other``, so under
    ``condition`` it is closer to the anchor. The second text has the anchor's value of ``other``
    but not of ``condition``, so under ``other`` it is closer.
    """

    anchor: int
    first: int
    second: int
    condition: str
    other: str


@dataclass(frozen=True, slots=True)
class AspectSample:
    """Texts to evaluate, with conditions and paired triples.

    Attributes:
        name: name of the dataset.
        texts: the texts.
        conditions: wordings of the conditions, by their ids.
        triples: paired triples; may be empty.
        complete: whether texts have all attributes that they mention, so that a text without an
            attribute says nothing about its condition.
        weight: how often training samples from the dataset, relative to others.
        values: for each condition, values that no text of the sample has, the most frequent first;
            filled by ``scripts/aspect_figures.py``.
    """

    name: str
    texts: Sequence[AspectText]
    conditions: Mapping[str, ConditionWordings]
    triples: Sequence[Triple] = ()
    complete: bool = False
    weight: float = 1
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)


# -- reading -----------------------------------------------------------------------------------


def dataset_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder's datasets by name; raises a ``UserError`` if there are none."""
    files = {path.stem: path for path in sorted(folder.glob("*.json"))}
    if not files:
        raise UserError(
            f"{folder} contains no dataset. Name a folder with a file NAME.json for each dataset: "
            '{"texts": [{"text", "attrs"}], "conds": {ID: {"text"}}}'
        )
    return files


def read_aspect_datasets(folder: Path) -> list[AspectSample]:
    """Read all datasets of a folder.

    Raises:
        UserError: as for ``dataset_files`` and ``parse_sample``.
    """
    files = dataset_files(folder).items()
    return [parse_sample(read_json(path), name, str(path)) for name, path in files]


def read_triples(path: Path, values: Mapping[str, Any] | None = None) -> AspectSample | None:
    """Read the paired triples of a dataset, from ``triples/NAME.json`` or its own file.

    Args:
        path: file of the dataset. If there is a folder ``triples`` next to it with a file of the
            same name, the triples are read from that file.
        values: content of ``path``, if it is known.

    Returns:
        The sample of the texts with the triples; None if the dataset has none.

    Raises:
        UserError: as for ``parse_sample``.
    """
    values = read_json(path) if values is None else values
    triples_path = path.parent / "triples" / path.name
    if not triples_path.is_file():
        return parse_sample(values, path.stem, str(path)) if values.get("triples") else None
    # A file with triples only refers to the texts of the dataset itself.
    content = read_json(triples_path)
    inherited = {key: values[key] for key in ("texts", "conds") if key in values}
    return parse_sample({**inherited, **content}, path.stem, str(triples_path))


@dataclass(frozen=True, slots=True)
class _WordingsRecord:
    text: str
    question: str | None = None
    para: Sequence[str] | str | None = None
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class _SampleRecord:
    """The content of a dataset's file."""

    texts: Sequence[Any]  # there may be very many
    conds: Mapping[str, str | _WordingsRecord]
    triples: Sequence[Any] | None = None
    complete: bool = False
    weight: Annotated[float, Gt(0)] = 1


def parse_sample(values: Mapping[str, Any], name: str, source: str) -> AspectSample:
    """Check and convert the content of a file.

    Args:
        values: the content.
        name: name of the dataset.
        source: name of the file in messages.

    Raises:
        LlmcondError: the content does not follow the format.
        UserError: a text, its attributes, the text of a condition or a triple is not valid, or no
            attribute matches a condition.
    """
    record = check_record(values, _SampleRecord, source, "Correct the file.")
    texts = [_parse_text(item, f"{source}: texts[{i}]") for i, item in enumerate(record.texts)]
    conditions = {}
    for key, item in record.conds.items():
        wordings = _WordingsRecord(item) if isinstance(item, str) else item
        others = [wordings.para] if isinstance(wordings.para, str) else wordings.para or []
        text = check_text(wordings.text, f"{source}: the text of conds[{key!r}]", "Write a text.")
        conditions[key] = ConditionWordings(
            text,
            (wordings.question or "").strip(),
            tuple(filter(str.strip, others)),
            wordings.kind or "",
        )
    attributes = {key for text in texts for key in text.attributes}
    if not attributes & set(conditions):
        raise UserError(
            f"{source}: no attribute of a text matches a condition. Attributes: "
            f"{format_list(sorted(attributes), 5)}; conditions: "
            f"{format_list(sorted(conditions), 5)}."
        )
    triples = [
        _parse_triple(item, texts, conditions, f"{source}: triples[{i}]")
        for i, item in enumerate(record.triples or [])
    ]
    return AspectSample(name, texts, conditions, triples, record.complete, record.weight)


def _parse_text(item: Any, source: str) -> AspectText:
    attributes: Any = item.get("attrs") if isinstance(item, dict) else None
    is_valid = isinstance(attributes, dict) and not any(
        isinstance(value, list | dict) for value in attributes.values()
    )
    if not is_valid:
        raise UserError(
            f"{source} is {shortened_repr(item)}; expected an object with 'text', and 'attrs' with "
            "one text or number for each key."
        )
    text = check_text(item.get("text"), f"{source}: text", "Write a text, or leave it out.")
    values = {key: str(value) for key, value in attributes.items() if value is not None}
    return AspectText(text, values, str(item.get("group") or ""))


def _parse_triple(
    item: Any, texts: Sequence[AspectText], conditions: Mapping[str, Any], source: str
) -> Triple:
    values = [item.get(key) for key in "axycd"] if isinstance(item, dict) else item
    if isinstance(values, list) and len(values) == 5:
        triple = Triple(values[0], values[1], values[2], str(values[3]), str(values[4]))
        in_range = all(type(i) is int and 0 <= i < len(texts) for i in values[:3])
        known = {triple.condition, triple.other} <= set(conditions)
        if in_range and known and is_valid(triple, texts):
            return triple
    raise UserError(
        f"{source} is {shortened_repr(item)}; expected [a, x, y, c, d]: the positions of three "
        "texts, from 0, and two conditions. x must have the same value of c as a, but not of d; y "
        "must have the same value of d as a, but not of c."
    )


def is_valid(triple: Triple, texts: Sequence[AspectText]) -> bool:
    """Return whether each of the other two texts shares exactly one value with the anchor."""
    anchor, first, second = (
        [texts[i].attributes.get(key) for key in (triple.condition, triple.other)]
        for i in (triple.anchor, triple.first, triple.second)
    )
    shared = anchor[0] == first[0] and anchor[1] == second[1]
    return None not in anchor and shared and anchor[1] != first[1] and anchor[0] != second[0]
