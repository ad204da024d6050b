"""The tables of a page: cells with what they show and what they are sorted by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval as drawn: places from 0 to 100 on the axis that a column's rows share.

    Attributes:
        value: the figure; None where undefined.
        low, high: the ends of its interval; None where there is none.
        reference: the baseline's figure, or 0 for differences; None to draw none.
    """

    value: float | None
    low: float | None
    high: float | None
    reference: float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it says.
        sort: what its column is sorted by; None comes last either way.
        detail: said smaller, below.
        verdict: one of the verdicts, or empty.
        tags: said in small boxes beside the text.
        bar: an interval, drawn.
    """

    text: str
    sort: float | str | None
    detail: str = ""
    verdict: str = ""
    tags: tuple[str, ...] = ()
    bar: Bar | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, what the heading means, and whether it holds figures."""

    label: str
    hint: str = ""
    numeric: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows of cells; the positions of the rows that others are compared with."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    baselines: frozenset[int] = frozenset()


def hundred(value: float | None, signed: bool = False) -> str:
    """Return a figure times 100 with one decimal; a dash where it is undefined."""
    return figure(None if value is None else 100 * value, ".1f", signed)


def figure(value: float | None, form: str, signed: bool = False) -> str:
    """Return a figure with a real minus sign; a dash where it is undefined."""
    if value is None or not math.isfinite(value):
        return "–"
    text = format(value, form)
    if not any(digit in text for digit in "123456789"):
        # No sign before what is shown as 0.
        return text.lstrip("-")
    return text.replace("-", "\N{MINUS SIGN}") if not signed or value < 0 else f"+{text}"


def interval(bounds: Sequence[float | None] | None, signed: bool = False) -> str:
    """Return an interval times 100 as its two ends; nothing where it is undefined."""
    low, high = known(bounds)
    if low is None or high is None:
        return ""
    return f"{hundred(low, signed)} to {hundred(high, signed)}"


def known(bounds: Sequence[float | None] | None) -> tuple[float | None, float | None]:
    """Return both ends of an interval, or None twice unless both are defined."""
    if bounds is None or any(bound is None or not math.isfinite(bound) for bound in bounds):
        return None, None
    low, high = bounds
    return low, high


@dataclass(frozen=True, slots=True)
class Baselines:
    """Which results the others are compared with.

    Attributes:
        named: the page's baseline; None where nothing is compared.
        all: by name, every result that others name by ``against``, and the page's baseline.
    """

    named: Result | None
    all: Mapping[str, Result]

    @classmethod
    def of(cls, results: Sequence[Result], name: str | None) -> Baselines:
        """Find them among results."""
        by_name = {str(result["name"]): result for result in results}
        if name is None or name not in by_name:
            return cls(None, {})
        named = {str(r["against"]) for r in results if r["difference"]} | {name}
        return cls(by_name[name], {other: by_name[other] for other in named})

    def beside(self, result: Result) -> Result | None:
        """Return what a result is compared with; None where it is not compared."""
        return self.all.get(str(result["against"])) if result["difference"] else None


def main_table(results: Sequence[Result], baselines: Baselines) -> Table:
    """Return the results, a row each, with the columns that say something about any of them."""
    parts: list[tuple[Column, Callable[[Result], Cell]]] = [
        (Column("head", "none compares features as they are", numeric=False), _head),
        (Column("template", numeric=False), _template),
        (
            Column("minus c", "whether the unconditional vector is subtracted", numeric=False),
            _minus,
        ),
    ]
    for key in ("spearman", "accuracy"):
        axis = _axis([(r[key], *known(r[f"{key}_ci"])) for r in results])
        parts.append((Column(_LABEL[key], _HINT[key]), _score(key, axis, baselines)))
        if baselines.named is not None:
            bounds = [_bounds(difference_of(r, key)) for r in results]
            heading = f"{_LABEL[key]} against the baseline"
            parts.append((Column(heading), _difference(key, _axis([*bounds, (0.0,)]))))
    parts.append((Column("Pearson"), lambda r: _plain(r["pearson"], hundred(r["pearson"]))))
    if any(r["spearman_sd"] is not None for r in results):
        hint = "standard deviation of Spearman over seeds"
        parts.append((Column("sd over seeds", hint), _deviation))
    if any(r["seeds"] for r in results):
        parts.append((Column("seeds", "how many fits are averaged"), _seeds))
    if any(r["dim"] is not None for r in results):
        parts.append((Column("dim", "size of a vector"), _dim))
    if len({(r["split"], r["n"]) for r in results}) > 1:
        parts.append((Column("rows"), lambda r: Cell(f"{r['n']:,}", r["n"], r["split"])))
    rows = tuple(tuple(cell(result) for _, cell in parts) for result in results)
    places = frozenset(i for i, result in enumerate(results) if result["name"] in baselines.all)
    return Table(tuple(column for column, _ in parts), rows, places)


_LABEL = {"spearman": "Spearman", "accuracy": "accuracy"}
_HINT = {
    "spearman": "rank correlation of predictions and ratings",
    "accuracy": "how often the right one of a pair's two conditions is predicted more alike",
}


def _head(result: Result) -> Cell:
    # A head's full name repeats its template, which has a column of its own.
    name = str(result["name"]).removesuffix("+c").removesuffix(f"@{result['prompt']}")
    recipe = str(result["head"])
    tags = (f"control: {result['control']}",) if result["control"] else ()
    return Cell(name, name, "" if recipe == name else recipe, tags=tags)


def _template(result: Result) -> Cell:
    return Cell(str(result["prompt"]), str(result["prompt"]))


def _minus(result: Result) -> Cell:
    text = "yes" if result["subtract"] else "no"
    return Cell(text, text)


def _plain(value: float | None, text: str) -> Cell:
    return Cell(text, value)


def _deviation(result: Result) -> Cell:
    return _plain(result["spearman_sd"], hundred(result["spearman_sd"]))


def _seeds(result: Result) -> Cell:
    # What is not fitted has no seed.
    n = len(result["seeds"])
    return Cell(str(n) if n else "–", n or None)


def _dim(result: Result) -> Cell:
    return _plain(result["dim"], figure(result["dim"], ",d") if result["dim"] is not None else "–")


def _score(key: str, axis: _Axis, baselines: Baselines) -> Callable[[Result], Cell]:
    def cell(result: Result) -> Cell:
        value, bounds = result[key], result[f"{key}_ci"]
        if value is None:
            return Cell("undefined", None)
        low, high = known(bounds)
        other = baselines.beside(result)
        line = None if other is None else axis.place(other[key])
        bar = Bar(axis.place(value), axis.place(low), axis.place(high), line)
        return Cell(hundred(value), value, interval(bounds), bar=bar)

    return cell


def difference_of(result: Result, key: str) -> Mapping[str, Any] | None:
    """Return a result's difference from the baseline in a measure; None where it has none."""
    difference = result["difference"]
    found: Mapping[str, Any] | None = difference.get(key) if difference else None
    return found


def _bounds(difference: Mapping[str, Any] | None) -> tuple[float | None, ...]:
    return tuple(difference[key] for key in ("value", "low", "high")) if difference else ()


def _difference(key: str, axis: _Axis) -> Callable[[Result], Cell]:
    def cell(result: Result) -> Cell:
        difference = difference_of(result, key)
        if difference is None:
            return Cell("–", None)
        value, low, high = _bounds(difference)
        if value is None:
            return Cell("undefined", None)
        bar = Bar(axis.place(value), axis.place(low), axis.place(high), axis.place(0.0))
        verdict = str(difference["verdict"] or "")
        text = hundred(value, signed=True)
        return Cell(text, value, interval((low, high), signed=True), verdict, bar=bar)

    return cell


def difference_table(results: Sequence[Result]) -> Table:
    """Return every difference from the baseline in full: interval, p and what could be shown."""
    columns = (
        Column("way", numeric=False),
        Column("measure", numeric=False),
        Column("difference"),
        Column("95 % interval", numeric=False),
        Column("p"),
        Column("p, corrected", "Holm's correction for the number of ways compared"),
        Column("least that shows", "the least true difference that such rows show 4 times in 5"),
        Column("verdict", numeric=False),
    )
    rows = []
    for result in results:
        for key, label in _LABEL.items():
            found = difference_of(result, key)
            if found is None:
                continue
            low, high = found["low"], found["high"]
            cells = (
                Cell(str(result["name"]), str(result["name"])),
                Cell(label, label),
                Cell(hundred(found["value"], signed=True), found["value"]),
                Cell(interval((low, high), signed=True) or "–", low),
                Cell(probability(found["p"]), found["p"]),
                Cell(probability(found["p_holm"]), found["p_holm"]),
                Cell(hundred(found["minimum"]), found["minimum"]),
                Cell(str(found["verdict"] or "–"), str(found["verdict"] or "")),
            )
            rows.append(cells)
    return Table(columns, tuple(rows))


def probability(value: float | None) -> str:
    """Return a p value with three decimals; a very small one as what it is below."""
    return "< 0.001" if value is not None and value < 0.001 else figure(value, ".3f")


def isotropy_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the isotropy of each way's vectors."""
    columns = (Column("way", numeric=False), *(Column(label) for _, label in ISOTROPY))
    cells = [
        (
            Cell(str(row["name"]), str(row["name"])),
            *(Cell(figure(row[key], ".3f"), row[key]) for key, _ in ISOTROPY),
        )
        for row in rows
    ]
    return Table(columns, tuple(cells))


ISOTROPY = (
    ("mean_cosine", "mean cosine"),
    ("std_cosine", "standard deviation"),
    ("partition_ratio", "partition ratio"),
)


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float

    def place(self, value: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return None
        width = self.high - self.low
        return round(100 * (value - self.low) / width, 2) if width else 50.0


def _axis(values: Sequence[Sequence[float | None]]) -> _Axis:
    """Return the axis that holds all values, with a little room at both ends."""
    found = [v for row in values for v in row if v is not None and math.isfinite(v)]
    if not found:
        return _Axis(0.0, 1.0)
    room = 0.04 * (max(found) - min(found))
    return _Axis(min(found) - room, max(found) + room)
