"""Options of command lines, and Markdown tables, for all scripts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


class Options(argparse.ArgumentParser):
    """A parser of a script's options, which shows its docstring and all defaults."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def option(
        self, name: str, default: Any, text: str, unset: str = "", **settings: Any
    ) -> argparse.Action:
        """Add an option or a positional argument.

        Args:
            name: the flag, or the name of a positional argument.
            default: the default, from which the type follows. False makes a flag without a value,
                and a list an option with several values. A type, or a function that parses
                a value, stands for no default.
            text: what the option is.
            unset: the default in words, where its value does not say it.
            settings: further arguments of ``add_argument``.
        """
        if default is False:
            return self.add_argument(name, action="store_true", help=text, **settings)
        kind: Any
        if callable(default):
            kind, default = default, None
        elif isinstance(default, list):
            kind = type(default[0]) if default else str
            settings = {"nargs": "+", **settings}
            unset = unset or " ".join(map(str, default))
        else:
            kind, unset = type(default), unset or str(default)
        if unset and not settings.get("required"):
            text += f" (default: {unset})"
        return self.add_argument(
            name, **{"type": kind, "default": default, "help": text} | settings
        )

    def names(self, name: str, text: str, known: Collection[str]) -> None:
        """Add a positional argument of any number of known names, by default all of them."""

        def parse(value: str) -> str:
            if value not in known:
                expected = ", ".join(known)
                raise argparse.ArgumentTypeError(f"unknown {value!r}. Expected one of: {expected}")
            return value

        text += f", among {', '.join(known)} (default: all)"
        self.add_argument(name, type=parse, nargs="*", metavar="NAME", help=text)


def markdown_table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    cells = [[" ".join(text.split()).replace("|", r"\|") for text in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def format_table(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None
) -> str:
    """Return records as a Markdown table.

    Args:
        rows: the records; a value that is missing or None is an empty cell.
        columns: heading -> key of the value and its format, as in ``seconds:.2f``; None for all
            keys of the first record, with four significant digits.
    """

    def cell(row: Mapping[str, Any], column: str) -> str:
        key, _, digits = column.partition(":")
        value = row.get(key)
        if not digits and isinstance(value, float):
            digits = ",.4g"
        return "" if value is None else format(value, digits) if digits else str(value)

    columns = columns or {key: key for key in rows[0]}
    return markdown_table(columns, ([cell(row, c) for c in columns.values()] for row in rows))


def print_json(options: argparse.Namespace, result: object) -> None:
    """Print a result as JSON in one line, if the command line has ``--json``."""
    if options.json:
        print(json.dumps(result, ensure_ascii=False, allow_nan=False), flush=True)
