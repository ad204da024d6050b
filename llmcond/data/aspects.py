"""Texts with several attributes, the conditions that select an attribute, and paired triples.

A dataset is one JSON file: ``{"texts": [{"text", "attrs": {condition id: value}, "group"}],
"conds": {condition id: {"text", "question", "para": [...]}}, "same_group": false}``. The keys
``group``, ``question``, ``para`` and ``same_group`` are optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcond.errors import UserError, format_list, nearest, shortened_repr
from llmcond.files import read_json


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
    """

    text: str
    question: str = ""
    others: tuple[str, ...] = ()


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
        values: for each condition, values that no text of the sample has, the most frequent first;
            filled by ``scripts/aspect_samples.py``.
    """

    name: str
    texts: Sequence[AspectText]
    conditions: Mapping[str, ConditionWordings]
    triples: Sequence[Triple] = ()
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
    inherited = {key: values[key] for key in ("texts", "conds") if key not in content}
    return parse_sample({**content, **inherited}, path.stem, str(triples_path))


def parse_sample(values: Mapping[str, Any], name: str, source: str) -> AspectSample:
    """Check and convert the content of a file.

    Args:
        values: the content.
        name: name of the dataset.
        source: name of the file in messages.

    Raises:
        UserError: the content does not follow the format, or a triple is not valid.
    """
    texts = [
        _parse_text(item, f"{source}: texts[{i}]")
        for i, item in enumerate(_get(values, "texts", list, source))
    ]
    conditions = {
        str(key): _parse_wordings(item, f"{source}: conds[{key!r}]")
        for key, item in _get(values, "conds", dict, source).items()
    }
    if not texts or not conditions:
        raise UserError(f"{source} has no {'conds' if texts else 'texts'}.")
    attributes = {key for text in texts for key in text.attributes}
    if not attributes & set(conditions):
        raise UserError(
            f"{source}: no attribute of a text matches a condition. Attributes: "
            f"{format_list(sorted(attributes), 5)}; conditions: "
            f"{format_list(sorted(conditions), 5)}."
        )
    triples = [
        _parse_triple(item, texts, conditions, f"{source}: triples[{i}]")
        for i, item in enumerate(values.get("triples") or [])
    ]
    return AspectSample(name, texts, conditions, triples)


_KINDS: Mapping[type, str] = {str: "a text", list: "a list", dict: "an object"}


def _get(values: Any, key: str, kind: type, source: str) -> Any:
    """Return the value of a key; raises a ``UserError`` if it is missing or of another type."""
    if not isinstance(values, dict):
        raise UserError(f"{source} is {shortened_repr(values)}; expected an object.")
    if not isinstance(values.get(key), kind):
        actual = shortened_repr(values[key]) if key in values else "missing"
        raise UserError(f"{source}: {key!r} is {actual}; expected {_KINDS[kind]}.")
    return values[key]


def _parse_text(item: Any, source: str) -> AspectText:
    text, attributes = _get(item, "text", str, source), _get(item, "attrs", dict, source)
    if not text.strip():
        raise UserError(f"{source} is empty; leave it out.")
    for key, value in attributes.items():
        if isinstance(value, list | dict):
            raise UserError(
                f"{source}: attrs[{key!r}] is {shortened_repr(value)}; expected one value: a text "
                "or number."
            )
    values = {key: str(value) for key, value in attributes.items() if value is not None}
    return AspectText(text, values, str(item.get("group") or ""))


def _parse_wordings(item: Any, source: str) -> ConditionWordings:
    if isinstance(item, str):
        item = {"text": item}
    text = _get(item, "text", str, source)
    others = item.get("para") or []
    others = [others] if isinstance(others, str) else others
    question = item.get("question") or ""
    if not text.strip():
        raise UserError(f"{source}: 'text' is empty; expected a noun phrase.")
    if not isinstance(others, list) or not all(isinstance(x, str) for x in (question, *others)):
        raise UserError(
            f"{source}: expected a text for 'question', and a list of texts for 'para'."
        )
    return ConditionWordings(text, question, tuple(filter(str.strip, others)))


def _parse_triple(
    item: Any, texts: Sequence[AspectText], conditions: Mapping[str, Any], source: str
) -> Triple:
    keys = ["a", "x", "y", "c", "d"]
    if isinstance(item, dict) and set(keys) <= set(item):
        item = [item[key] for key in keys]
    if not isinstance(item, list) or len(item) != len(keys):
        raise UserError(f"{source} is {shortened_repr(item)}; expected [a, x, y, c, d].")
    positions, condition_ids = item[:3], [str(key) for key in item[3:]]
    for position in positions:
        if type(position) is not int or not 0 <= position < len(texts):
            raise UserError(
                f"{source} names the text {shortened_repr(position)}; expected a position from 0 "
                "to "
                f"{len(texts) - 1:,}."
            )
    for key in condition_ids:
        if key not in conditions:
            raise UserError(
                f"{source} names the unknown condition {shortened_repr(key)}. "
                f"{nearest(key, conditions)}"
            )
    triple = Triple(*positions, *condition_ids)
    if not is_valid(triple, texts):
        raise UserError(
            f"{source} is not a paired triple: x must have the same value of c as a, but not of d; "
            "y must have the same value of d as a, but not of c."
        )
    return triple


def is_valid(triple: Triple, texts: Sequence[AspectText]) -> bool:
    """Return whether each of the other two texts shares exactly one value with the anchor."""
    anchor, first, second = (
        [texts[i].attributes.get(key) for key in (triple.condition, triple.other)]
        for i in (triple.anchor, triple.first, triple.second)
    )
    shared = anchor[0] == first[0] and anchor[1] == second[1]
    return None not in anchor and shared and anchor[1] != first[1] and anchor[0] != second[0]
