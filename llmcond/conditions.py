"""Conditions with example values, and functions that parse and format them."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, Self

from llmcond.errors import UserError, format_list, shortened_repr
from llmcond.log import log
from llmcond.text import check_string, check_text, condition_key, normalise_condition

#: Largest number of example values per condition; the encoder would cut longer lists.
MAX_VALUES = 64


class Condition(str):
    """A condition with example values, which can be used like any condition that is a string.

    As a string it is the text that the encoder reads, such as ``the cuisine, such as Italian,
    Thai``. Two conditions with the same text are equal, so that they share stored vectors. Text
    and values are in a normal form: composed characters (NFC), single spaces, and none around the
    text. Tables and reports show ``text`` only. A condition cannot be changed.

    Args:
        text: the condition, such as ``the cuisine``.
        values: at most 64 example values: a list, or a text such as ``Italian, Thai``, in which
            double quotes surround a value that contains a comma, as in CSV. Spaces around a value,
            empty values and repetitions, which may differ in case, are removed.

    Raises:
        UserError: the text is not a string or has values already, the text of values is empty, or a
            value is not a string, or there are too many values.

    Attributes:
        text: the condition without its values.
        values: the example values; empty if there are none.

    Examples:
        >>> import llmcond
        >>> condition = llmcond.Condition("the cuisine", values=["Italian", "Thai"])
        >>> print(condition)
        the cuisine, such as Italian, Thai
        >>> condition.values
        ('Italian', 'Thai')
    """

    __slots__ = ("text", "values")

    text: str
    values: tuple[str, ...]

    def __new__(cls, text: str, values: str | Iterable[str] = ()) -> Self:
        """Create a condition; see the class."""
        if not isinstance(text, str) or isinstance(text, Condition):
            expected = "its text and all values" if isinstance(text, str) else "a string"
            raise UserError(
                f"the condition is the {type(text).__name__} {shortened_repr(text)}; expected "
                f"{expected}."
            )
        text = normalise_condition(check_string(text, "the condition"))
        cleaned = example_values(values)
        if cleaned and not text:
            raise UserError(
                f"the values {', '.join(cleaned)} belong to an empty condition. Name the condition."
            )
        rendered = f"{text}, such as {', '.join(cleaned)}" if cleaned else text
        condition = super().__new__(cls, rendered)
        str.__setattr__(condition, "text", text)
        str.__setattr__(condition, "values", cleaned)
        return condition

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"a Condition cannot be changed; create a new Condition with another {name}"
        )

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[str, ...]]]:
        """Copy and pickle a condition by its text and values."""
        return type(self), (self.text, self.values)


def example_values(values: str | Iterable[object]) -> tuple[str, ...]:
    """Return example values in their normal form, without empty values and repetitions.

    ``Condition`` describes the argument and the errors.
    """
    unique: dict[str, str] = {}
    if hasattr(values, "to_pylist"):  # An Arrow array yields Arrow scalars.
        values = values.to_pylist()
    if not isinstance(values, Iterable) or isinstance(values, bytes | Mapping):
        raise UserError(
            f"the example values are {shortened_repr(values)}; expected a list, or a text such as "
            "'Italian, Thai'."
        )
    for value in read_values(values) if isinstance(values, str) else values:
        if not isinstance(value, str):
            raise UserError(
                f"the example value {shortened_repr(value)} is not a string; expected strings."
            )
        check_string(value, "the example value")
        unique.setdefault(condition_key(value), normalise_condition(value))
    unique.pop("", None)
    if len(unique) > MAX_VALUES:
        raise UserError(
            f"one condition has {len(unique):,} example values; give at most {MAX_VALUES}."
        )
    return tuple(unique.values())


def read_values(text: str) -> list[str]:
    """Parse a text such as ``a, b, "c, d"`` as CSV, and return its values.

    Raises:
        UserError: a quote is not closed, or is within a value.
    """
    # The csv module does not allow spaces after a closing quote.
    tidy = re.sub(r'"[ \t]+(?=,|$)', '"', text)
    rows = csv.reader(io.StringIO(tidy), skipinitialspace=True, strict=True)
    try:
        return list(chain.from_iterable(rows))
    except csv.Error as error:
        raise UserError(
            f"the values {shortened_repr(text)} cannot be read: {error}. Separate values by "
            "commas, and put "
            'double quotes around a value that contains a comma: Rome, "Paris, Texas".'
        ) from error


def as_condition(condition: object, name: str = "the condition") -> str:
    """Return a condition in the form in which it is encoded, stored and compared.

    All conditions of users pass this function or ``Condition``. Equal conditions in another Unicode
    form or with other white space become equal texts.

    Args:
        condition: a text, or a ``Condition``, which is returned unchanged.
        name: name of the condition in messages.

    Raises:
        UserError: it is empty or not a text, or contains an invalid character.
    """
    text = check_text(condition, name, "Give a text, such as 'the topic'.")
    return condition if isinstance(condition, Condition) else normalise_condition(text)


def distinct_conditions(conditions: Iterable[str]) -> list[str]:
    """Return conditions without those that differ from an earlier one in form or case only."""
    unique: dict[str, str] = {}
    for condition in conditions:
        unique.setdefault(condition_key(condition), condition)
    return list(unique.values())


def condition_flags(condition: str) -> str:
    """Return the command-line options that stand for a condition."""
    if not isinstance(condition, Condition):
        return f"--condition {shortened_repr(condition)}"
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(condition.values)
    return f"--condition {shortened_repr(condition.text)} --values {line.getvalue()!r}"


def combine_values(conditions: Sequence[str], values: Sequence[str]) -> list[str]:
    """Combine the arguments of ``--condition`` and ``--values``, in their order.

    Without ``--values``, the conditions are texts in their normal form. An empty text gives its
    condition no values. A single condition gets the values of every ``--values``. A condition that
    differs from an earlier one in form or case only is left out, with a line in the log.

    Raises:
        UserError: a condition is empty, the numbers of conditions and values differ, or
            ``Condition`` raises it.
    """
    combined = _combine_values([as_condition(text, "--condition") for text in conditions], values)
    distinct = distinct_conditions(combined)
    if len(distinct) < len(combined):
        counts = Counter(map(condition_key, combined))
        repeated = [condition_text(text) for text in distinct if counts[condition_key(text)] > 1]
        log.info(
            f"--condition {format_list(repeated, 5)} is given more than once and counts once; case "
            "and spacing make no difference"
        )
    return distinct


def _combine_values(conditions: Sequence[str], values: Sequence[str]) -> list[str]:
    if len(conditions) == 1 and values:
        return [Condition(conditions[0], [value for text in values for value in read_values(text)])]
    if values and len(values) != len(conditions):
        raise UserError(
            f"there are {len(values)} --values and {len(conditions)} --condition. Give --values "
            "once for each --condition, in the same order, with all values of the condition in one "
            "text: --values 'Italian, Thai' ('' for a condition without values)."
        )
    if not values:
        return list(conditions)
    return [Condition(*pair) for pair in zip(conditions, values, strict=True)]


def condition_text(condition: str) -> str:
    """Return a condition without its values, as tables and reports show it."""
    return condition.text if isinstance(condition, Condition) else condition


def condition_titles(conditions: Sequence[str]) -> list[str]:
    """Return a distinct title for each condition: its text, with values if texts are repeated."""
    texts = list(map(condition_text, conditions))
    return texts if len(set(texts)) == len(texts) else list(map(str, conditions))


def condition_json(condition: str | None) -> dict[str, Any]:
    """Return a condition as JSON: its text, and its values if it has any."""
    if not isinstance(condition, Condition):
        return {"condition": condition}
    values = {"values": list(condition.values)} if condition.values else {}
    return {"condition": condition.text, **values}


def add_values(conditions: Sequence[str], values: str | Sequence[str] | None) -> list[str]:
    """Return conditions in their normal form, each with the same values if there are any."""
    combined = {
        condition: as_condition(condition) if values is None else Condition(condition, values)
        for condition in dict.fromkeys(conditions)
    }
    return [combined[condition] for condition in conditions]
