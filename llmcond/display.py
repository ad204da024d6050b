"""Representations of results: one line in a terminal, and tables in notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from html import escape
from pathlib import Path
from typing import Any

from llmcond.errors import LlmcondError, format_count, shortened_repr

#: Largest numbers of characters of a value (in a line or a cell), and of a line in a terminal.
_VALUE, _LINE = 60, 240
#: Largest number of rows of a table in a notebook.
_ROWS = 20


class Displayed:
    """A base class of results that displays the values of ``_displayed``."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Prevent ``dataclass`` from generating __repr__, and __eq__, which fails for arrays."""
        super().__init_subclass__()
        cls.__repr__ = Displayed.__repr__  # type: ignore[method-assign]
        if not issubclass(cls, dict):
            cls.__eq__ = are_equal  # type: ignore[method-assign]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``--json`` prints: the fields and their values."""
        return {name: _as_json(value) for name, value in vars(self).items()}

    def _displayed(self) -> Mapping[str, Any]:
        """Return the displayed values and tables by name; a table is a sequence of rows."""
        return self.to_json()

    def __repr__(self) -> str:
        """Return the values, and the sizes of the tables, in one line."""
        facts, tables = _split(self._displayed())
        parts = [f"{name}={shortened_repr(value, _VALUE)}" for name, value in facts.items()]
        parts += [f"{name}=<{format_count(len(rows), 'row')}>" for name, rows in tables.items()]
        while parts[1:] and len(", ".join(parts)) > _LINE:
            parts = [*parts[: -2 if parts[-1] == "…" else -1], "…"]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return the values in a line and the tables below it, for notebooks."""
        facts, tables = _split(self._displayed())
        line = ", ".join(f"{name} {_cell(value)}" for name, value in facts.items())
        title = type(self).__name__
        heading = f"<p><b>{title}</b> {escape(line)}</p>"
        # The only table of Results needs no caption "results".
        return heading + "".join(
            _html("" if name == title.lower() else name, rows) for name, rows in tables.items()
        )


class DisplayedDict(Displayed, dict[str, Any]):
    """A result that is itself the dictionary that ``--json`` prints."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``--json`` prints."""
        return dict(self)


def make_frame(data: Any) -> Any:
    """Return a ``pandas.DataFrame`` of columns by name, or of rows.

    Raises:
        LlmcondError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise LlmcondError("to_pandas() needs pandas: pip install pandas") from error
    return pd.DataFrame(data)


def are_equal(first: Any, second: Any) -> bool:
    """Compare results and their values, also if they contain arrays, in which NaN equals NaN."""
    if first is second:
        return True
    if hasattr(first, "dtype") and hasattr(second, "dtype"):
        import numpy as np

        both_floats = first.dtype.kind == second.dtype.kind == "f"
        return np.array_equal(first, second, equal_nan=both_floats)
    if is_dataclass(first) and type(first) is type(second):
        names = [field.name for field in fields(first) if field.compare]
        return all(are_equal(getattr(first, name), getattr(second, name)) for name in names)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            are_equal(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        return len(first) == len(second) and all(map(are_equal, first, second))
    return not is_dataclass(first) and bool(first == second)


def _as_json(value: Any) -> Any:
    """Return a field's value as JSON: results and dataclasses as objects, paths as text."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _split(
    values: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Sequence[Mapping[str, Any]]]]:
    """Split displayed values into single values and tables, and drop empty values.

    A mapping whose values are rows becomes a table with the column ``name``.
    """
    facts: dict[str, Any] = {}
    tables: dict[str, Sequence[Mapping[str, Any]]] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and _all_rows(value.values()):
            tables[name] = [{"name": key, **row} for key, row in value.items()]
        elif isinstance(value, Sequence) and _all_rows(value):
            tables[name] = value
        elif value is not None and value != "":
            facts[name] = value
    return facts, tables


def _all_rows(values: Any) -> bool:
    return bool(values) and all(isinstance(value, Mapping) for value in values)


def _html(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    from tabulate import tabulate

    columns = list(dict.fromkeys(key for row in rows[:_ROWS] for key in row))
    cells = [[_cell(row.get(key)) for key in columns] for row in rows[:_ROWS]]
    table = tabulate(cells, columns, "html", disable_numparse=True)
    more = f" (the first {_ROWS} of {format_count(len(rows), 'row')})" if len(rows) > _ROWS else ""
    caption = f"<p>{escape(name)}{more}</p>" if name or more else ""
    return f"{caption}{table}"


def _cell(value: Any) -> str:
    """Return a value as text on one line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_cell(inner)}" for key, inner in value.items())[: 2 * _VALUE]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value))[: 2 * _VALUE]
    return "" if value is None else " ".join(str(value).split())
