"""The tables of a page: cells with what they show and what they are sorted by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcond.evaluation.paired import Difference
from llmcond.evaluation.results import ComparedResult
from llmcond.metrics import Estimate, Metric, finite, metric_of, number
from llmcond.report.format import MINUS, probability, range_text


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


def minus(text: str) -> str:
    """Return text with real minus signs."""
    return text.replace("-", MINUS)


def known(low: float, high: float) -> tuple[float | None, float | None]:
    """Return both ends of an interval, or None twice unless both are defined."""
    ends = finite(low), finite(high)
    return (None, None) if None in ends else ends


@dataclass(frozen=True, slots=True)
class Baselines:
    """Which results the others are compared with.

    Attributes:
        named: the page's baseline; None where nothing is compared.
        all: by name, every result that others name by ``against``, and the page's baseline.
    """

    named: ComparedResult | None
    all: Mapping[str, ComparedResult]

    @classmethod
    def of(cls, results: Sequence[ComparedResult], name: str | None) -> Baselines:
        """Find them among results."""
        by_name = {result.name: result for result in results}
        if name is None or name not in by_name:
            return cls(None, {})
        named = {result.against for result in results if result.against} | {name}
        return cls(by_name[name], {other: by_name[other] for other in named})

    def against(self, result: ComparedResult) -> ComparedResult | None:
        """Return what a result is compared with; None where it is not compared."""
        return self.all.get(result.against) if result.against else None


_Cells = Callable[[ComparedResult], Cell]


def main_table(results: Sequence[ComparedResult], baselines: Baselines) -> Table:
    """Return the results, a row each, with the columns that say something about any of them."""
    parts: list[tuple[Column, _Cells]] = [
        (Column("head", "none compares features as they are", numeric=False), _head),
        (Column("template", numeric=False), lambda r: Cell(r.prompt, r.prompt)),
        (
            Column("minus c", "whether the unconditional vector is subtracted", numeric=False),
            _minus,
        ),
    ]
    metrics = [metric_of(name) for name in results[0].metrics]
    for metric in (one for one in metrics if not one.secondary):
        heading = Column(metric.heading, metric.description)
        estimates = [result.metrics[metric.name] for result in results]
        axis = _axis([(finite(e.value), *known(e.low, e.high)) for e in estimates])
        parts.append((heading, _score(metric, axis, baselines)))
        if baselines.named is not None:
            found = [difference_of(result, metric) for result in results]
            bounds = [(finite(d.value), *known(d.low, d.high)) for d in found if d]
            column = Column(f"{metric.heading} against the baseline")
            parts.append((column, _difference(metric, _axis([*bounds, (0.0,)]))))
    parts += [
        (Column(metric.heading, metric.description), _plain(metric))
        for metric in metrics
        if metric.secondary
    ]
    primary = results[0].primary
    if any(result.seed_sd.get(primary.name) is not None for result in results):
        hint = f"standard deviation of {primary.heading} over seeds"
        parts.append((Column("sd over seeds", hint), _deviation(primary)))
    if any(result.seeds for result in results):
        parts.append((Column("seeds", "how many fits are averaged"), _seeds))
    if any(result.dim is not None for result in results):
        parts.append((Column("dim", "size of a vector"), _dim))
    if len({(result.split, result.counts.n) for result in results}) > 1:
        rows = Column("rows")
        parts.append((rows, lambda r: Cell(f"{r.counts.n:,}", r.counts.n, r.split)))
    cells = tuple(tuple(cell(result) for _, cell in parts) for result in results)
    places = frozenset(i for i, result in enumerate(results) if result.name in baselines.all)
    return Table(tuple(column for column, _ in parts), cells, places)


def _head(result: ComparedResult) -> Cell:
    name = result.title
    tags = (f"control: {result.control}",) if result.control else ()
    return Cell(name, name, "" if result.head == name else result.head, tags=tags)


def _minus(result: ComparedResult) -> Cell:
    text = "yes" if result.subtract else "no"
    return Cell(text, text)


def _plain(metric: Metric) -> _Cells:
    def cell(result: ComparedResult) -> Cell:
        value = result.metrics[metric.name].value
        return Cell(minus(metric.show(value)), finite(value))

    return cell


def _deviation(metric: Metric) -> _Cells:
    def cell(result: ComparedResult) -> Cell:
        value = result.seed_sd.get(metric.name)
        return Cell(metric.show(value), finite(value))

    return cell


def _seeds(result: ComparedResult) -> Cell:
    # What is not fitted has no seed.
    n = len(result.seeds)
    return Cell(str(n) if n else "–", n or None)


def _dim(result: ComparedResult) -> Cell:
    return Cell("–" if result.dim is None else f"{result.dim:,}", result.dim)


def _score(metric: Metric, axis: _Axis, baselines: Baselines) -> _Cells:
    def cell(result: ComparedResult) -> Cell:
        found = result.metrics[metric.name]
        if finite(found.value) is None:
            return Cell("undefined", None)
        other = baselines.against(result)
        line = None if other is None else axis.place(other.metrics[metric.name].value)
        detail = minus(range_text(metric, found.low, found.high))
        bar = axis.bar(found, line)
        return Cell(minus(metric.show(found.value)), found.value, detail, bar=bar)

    return cell


def difference_of(result: ComparedResult, metric: Metric) -> Difference | None:
    """Return a result's difference from the baseline in a metric; None where it has none."""
    return result.difference.get(metric.name) if result.difference else None


def _difference(metric: Metric, axis: _Axis) -> _Cells:
    def cell(result: ComparedResult) -> Cell:
        found = difference_of(result, metric)
        if found is None:
            return Cell("–", None)
        if finite(found.value) is None:
            return Cell("undefined", None)
        bar = axis.bar(Estimate(found.value, found.low, found.high), axis.place(0.0))
        text = minus(metric.show(found.value, signed=True))
        detail = minus(range_text(metric, found.low, found.high, signed=True))
        return Cell(text, found.value, detail, found.verdict, bar=bar)

    return cell


def difference_table(results: Sequence[ComparedResult]) -> Table:
    """Return every difference from the baseline in full: interval, p and what could be shown."""
    columns = (
        Column("system", numeric=False),
        Column("metric", numeric=False),
        Column("difference"),
        Column("95 % interval", numeric=False),
        Column("p"),
        Column("p, corrected", "Holm's correction for the number of systems compared"),
        Column("least that shows", "the least true difference that such rows show 4 times in 5"),
        Column("verdict", numeric=False),
    )
    rows = []
    for result in results:
        for name, found in (result.difference or {}).items():
            metric = metric_of(name)
            cells = (
                Cell(result.name, result.name),
                Cell(metric.heading, metric.heading),
                Cell(minus(metric.show(found.value, signed=True)), finite(found.value)),
                Cell(
                    minus(range_text(metric, found.low, found.high, signed=True)) or "–",
                    finite(found.low),
                ),
                Cell(probability(found.p), finite(found.p)),
                Cell(probability(found.p_holm), finite(found.p_holm)),
                Cell(metric.show(found.minimum), finite(found.minimum)),
                Cell(found.verdict or "–", found.verdict),
            )
            rows.append(cells)
    return Table(columns, tuple(rows))


def isotropy_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the isotropy of each system's vectors."""
    columns = (Column("system", numeric=False), *(Column(label) for _, label in ISOTROPY))
    cells = [
        (
            Cell(str(row["name"]), str(row["name"])),
            *(Cell(minus(number(row[key], 3)), row[key]) for key, _ in ISOTROPY),
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

    def bar(self, found: Estimate, reference: float | None) -> Bar:
        """Return an interval as drawn; ``reference`` is a place on the axis."""
        low, high = known(found.low, found.high)
        return Bar(self.place(found.value), self.place(low), self.place(high), reference)


def _axis(values: Sequence[Sequence[float | None]]) -> _Axis:
    """Return the axis that holds all values, with a little room at both ends."""
    found = [v for row in values for v in row if v is not None and math.isfinite(v)]
    if not found:
        return _Axis(0.0, 1.0)
    room = 0.04 * (max(found) - min(found))
    return _Axis(min(found) - room, max(found) + room)
