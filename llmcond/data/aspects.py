"""Texts with several attributes, the conditions that ask for them, and paired triples of both.

A set is one JSON file: ``{"texts": [{"text", "attrs": {condition id: value}, "group"}], "conds":
{condition id: {"text", "question", "para": [...]}}, "same_group": false}``. The keys ``group``,
``question``, ``para`` and ``same_group`` are optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcond.errors import UserError, brief, listed, nearest
from llmcond.files import read_json


@dataclass(frozen=True, slots=True)
class AspectText:
    """A text with the values of its attributes by condition; only these are asked of it."""

    text: str
    attributes: Mapping[str, str]
    group: str = ""


@dataclass(frozen=True, slots=True)
class ConditionWordings:
    """Ways to say a condition: a noun phrase, a question (may be empty), other noun phrases."""

    text: str
    question: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Triple:
    """A paired triple, by the positions of its texts.

    Under ``condition`` the first text is the nearer one to the anchor: it has the anchor's value of
    ``condition``, and not of ``other``. Under ``other`` it is the second, which has the reverse.
    """

    anchor: int
    first: int
    second: int
    condition: str
    other: str


@dataclass(frozen=True, slots=True)
class AspectSample:
    """Texts that are measured, with conditions and paired triples (none where none exist).

    Attributes:
        values: for each condition, values that no text of the sample has, the commonest first;
            filled by ``scripts/aspect_samples.py``.
    """

    name: str
    texts: Sequence[AspectText]
    conditions: Mapping[str, ConditionWordings]
    triples: Sequence[Triple] = ()
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)


# -- reading -----------------------------------------------------------------------------------


def set_files(folder: Path) -> dict[str, Path]:
    """Return the file of each set of a folder by its name; a UserError if there is none."""
    found = {path.stem: path for path in sorted(folder.glob("*.json"))}
    if not found:
        raise UserError(
            f"{folder} holds no data set. Name a folder that has one file NAME.json a set: "
            '{"texts": [{"text", "attrs"}], "conds": {ID: {"text"}}}'
        )
    return found


def read_sets(folder: Path) -> list[AspectSample]:
    """Read all sets of a folder with all of their texts; errors as of :func:`parse_sample`."""
    files = set_files(folder).items()
    return [parse_sample(read_json(path), name, str(path)) for name, path in files]


def parse_sample(values: Mapping[str, Any], name: str, source: str) -> AspectSample:
    """Check what a file holds, and return it; ``source`` is what messages call the file.

    Raises:
        UserError: it is not in the format, or one of its triples is not valid.
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
    asked = {key for text in texts for key in text.attributes}
    if not asked & set(conditions):
        raise UserError(
            f"{source}: no text has an attribute that a condition asks for. Attributes: "
            f"{listed(sorted(asked), 5)}; conditions: {listed(sorted(conditions), 5)}."
        )
    triples = [
        _parse_triple(item, texts, conditions, f"{source}: triples[{i}]")
        for i, item in enumerate(values.get("triples") or [])
    ]
    return AspectSample(name, texts, conditions, triples)


_KINDS: Mapping[type, str] = {str: "a text", list: "a list", dict: "an object"}


def _get(values: Any, key: str, kind: type, source: str) -> Any:
    """Return what a JSON object holds under a key; a UserError where that is of another kind."""
    if not isinstance(values, dict):
        raise UserError(f"{source} is {brief(values)}; expected an object.")
    if not isinstance(values.get(key), kind):
        got = brief(values[key]) if key in values else "missing"
        raise UserError(f"{source}: {key!r} is {got}; expected {_KINDS[kind]}.")
    return values[key]


def _parse_text(item: Any, source: str) -> AspectText:
    text, attributes = _get(item, "text", str, source), _get(item, "attrs", dict, source)
    if not text.strip():
        raise UserError(f"{source} is empty; leave it out.")
    for key, value in attributes.items():
        if isinstance(value, list | dict):
            raise UserError(
                f"{source}: attrs[{key!r}] is {brief(value)}; expected one value: a text or number."
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
        raise UserError(f"{source} is {brief(item)}; expected [a, x, y, c, d].")
    positions, asked = item[:3], [str(key) for key in item[3:]]
    for position in positions:
        if type(position) is not int or not 0 <= position < len(texts):
            raise UserError(
                f"{source} names the text {brief(position)}; expected a position from 0 to "
                f"{len(texts) - 1:,}."
            )
    for key in asked:
        if key not in conditions:
            raise UserError(f"{source} asks for {brief(key)}. {nearest(key, conditions)}")
    triple = Triple(*positions, *asked)
    if not is_valid(triple, texts):
        raise UserError(
            f"{source} is no paired triple: x must have a's value of c and not of d, and y a's "
            "value of d and not of c."
        )
    return triple


def is_valid(triple: Triple, texts: Sequence[AspectText]) -> bool:
    """Return whether each of the two other texts has just one of the anchor's two values."""
    anchor, first, second = (
        [texts[i].attributes.get(key) for key in (triple.condition, triple.other)]
        for i in (triple.anchor, triple.first, triple.second)
    )
    shared = anchor[0] == first[0] and anchor[1] == second[1]
    return None not in anchor and shared and anchor[1] != first[1] and anchor[0] != second[0]
