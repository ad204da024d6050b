"""Conditions with example values: how they are written, read and paired."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NoReturn, Self

from llmcond.errors import UserError, brief

#: Example values of one condition: the encoder would cut many more.
MAX_VALUES = 64


class Condition(str):
    """A condition with example values, usable wherever a condition is a string.

    As a string it is what the encoder reads, such as ``the cuisine, such as Italian, Thai``. Two
    conditions are equal if they read the same, so that stored vectors are found by it. Tables and
    pages show ``text``.

    >>> embedder.encode(reviews, llmcond.Condition("the cuisine", values=["Italian", "Thai"]))

    Attributes:
        text: the condition without its values.
        values: the example values; empty: none.
    """

    __slots__ = ("text", "values")

    text: str
    values: tuple[str, ...]

    def __new__(cls, text: str, values: str | Iterable[str] = ()) -> Self:
        """Make a condition.

        Args:
            text: the condition, such as ``the cuisine``.
            values: at most 64 example values: a list, or a text such as ``Italian, Thai``, in which
                a value that has a comma stands in double quotes, as in CSV. Spaces around a value,
                empty values and repeats are dropped.

        Raises:
            UserError: a text that is empty or has values already, values that are not texts, or
                too many.
        """
        if not isinstance(text, str) or isinstance(text, Condition):
            expected = "give its text, and all values" if isinstance(text, str) else "give a text"
            raise UserError(f"the condition is {type(text).__name__} {brief(text)}; {expected}.")
        cleaned = example_values(values)
        if cleaned:
            text = text.strip()
        if cleaned and not text:
            raise UserError(f"the values {', '.join(cleaned)} have no condition; name one.")
        rendered = f"{text}, such as {', '.join(cleaned)}" if cleaned else text
        condition = super().__new__(cls, rendered)
        str.__setattr__(condition, "text", text)
        str.__setattr__(condition, "values", cleaned)
        return condition

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a Condition cannot be changed; make another with other {name}")

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[str, ...]]]:
        """Copy and pickle it by what it was made of."""
        return type(self), (self.text, self.values)


def example_values(values: str | Iterable[object]) -> tuple[str, ...]:
    """Return example values without the spaces around them, empty ones and repeats.

    Arguments and errors as of :class:`Condition`.
    """
    found: dict[str, None] = {}
    for value in read_values(values) if isinstance(values, str) else values:
        if not isinstance(value, str):
            raise UserError(f"the example value {brief(value)} is not a text; give texts.")
        found[value.strip()] = None
    found.pop("", None)
    if len(found) > MAX_VALUES:
        raise UserError(
            f"there are {len(found):,} example values of one condition; give at most {MAX_VALUES}."
        )
    return tuple(found)


def read_values(text: str) -> list[str]:
    """Return the values of a text such as ``a, b, "c, d"``, read as CSV.

    Raises:
        UserError: a quote that is not closed, or that stands within a value.
    """
    # CSV knows no spaces behind a closing quote.
    tidy = re.sub(r'"[ \t]+(?=,|$)', '"', text)
    rows = csv.reader(io.StringIO(tidy), skipinitialspace=True, strict=True)
    try:
        return list(chain.from_iterable(rows))
    except csv.Error as error:
        raise UserError(
            f"the values {brief(text)} cannot be read: {error}. Separate them by commas, and put a "
            'value that has a comma in double quotes: Rome, "Paris, Texas".'
        ) from error


def condition_flags(condition: str) -> str:
    """Return the options of the command line that give a condition."""
    if not isinstance(condition, Condition):
        return f"--condition {brief(condition)}"
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(condition.values)
    return f"--condition {brief(condition.text)} --values {line.getvalue()!r}"


def with_values(conditions: Sequence[str], values: Sequence[str]) -> list[str]:
    """Return conditions with the values of as many ``--values``, in their order.

    Without ``--values`` conditions stay as they are; an empty one gives its condition no values.
    A single condition has the values of all of them.

    Raises:
        UserError: other numbers of both, or as of :class:`Condition`.
    """
    if len(conditions) == 1 and values:
        return [Condition(conditions[0], [value for text in values for value in read_values(text)])]
    if values and len(values) != len(conditions):
        raise UserError(
            f"there are {len(values)} --values and {len(conditions)} --condition; give --values "
            "once for each --condition, in their order, with all values of that condition in one "
            "text: --values 'Italian, Thai' ('' for a condition without values)."
        )
    if not values:
        return list(conditions)
    return [Condition(*pair) for pair in zip(conditions, values, strict=True)]


def condition_text(condition: str) -> str:
    """Return a condition as tables and pages show it, without its values."""
    return condition.text if isinstance(condition, Condition) else condition


def condition_titles(conditions: Sequence[str]) -> list[str]:
    """Return how conditions are shown side by side: their texts, with values where texts repeat."""
    texts = list(map(condition_text, conditions))
    return texts if len(set(texts)) == len(texts) else list(map(str, conditions))


def condition_json(condition: str | None) -> dict[str, Any]:
    """Return a condition as JSON has it: its text, and its values where it has some."""
    if not isinstance(condition, Condition):
        return {"condition": condition}
    values = {"values": list(condition.values)} if condition.values else {}
    return {"condition": condition.text, **values}


def with_same_values(conditions: Sequence[str], values: str | Sequence[str] | None) -> list[str]:
    """Return conditions, each with the same values; None: as they are."""
    if values is None:
        return list(conditions)
    made = {condition: Condition(condition, values) for condition in dict.fromkeys(conditions)}
    return [made[condition] for condition in conditions]
