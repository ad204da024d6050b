"""The tables of a page: cells with what they show and what they are sorted by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcond.evaluation.paired import Difference
from llmcond.evaluation.ranking import Part
from llmcond.evaluation.results import ComparedResult
from llmcond.metrics import Estimate, Metric, finite, metric_of, number
from llmcond.report.format import MINUS, new_sentences_heading, probability, range_text
from llmcond.report.page.gather import Page


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval as drawn: places from 0 to 100 on the axis that a column's rows share.

    Attributes:
        value: the figure.
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

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    baselines: frozenset[int] = frozenset()


def minus(text: str) -> str:
    """Return text with real minus signs."""
    return text.replace("-", MINUS)


def known(low: float, high: float) -> tuple[float | None, float | None]:
    """Return both ends of an interval, or None twice unless both are defined."""
    ends = finite(low), finite(high)
    return (None, None) if None in ends else ends


def main_table(page: Page) -> Table:
    """Return the results, a row each, with the columns that say something about any of them."""
    results, baselines = page.results, page.baselines
    subtracted = "whether the unconditional vector is subtracted"
    tags = [(f"control: {r.control}",) if r.control else () for r in results]
    recipes = ["" if r.head == r.title else r.head for r in results]
    named = zip(results, recipes, tags, strict=True)
    heads = [Cell(r.title, r.title, recipe, tags=own) for r, recipe, own in named]
    columns: list[tuple[Column, Sequence[Cell]]] = [
        (Column("head", "none compares features as they are", numeric=False), heads),
        (Column("template", numeric=False), [_text(r.prompt) for r in results]),
    ]
    if page.subtracts:
        cells = [_text("yes" if r.subtract else "no") for r in results]
        columns.append((Column("minus c", subtracted, numeric=False), cells))
    if page.variants:
        kind, texts = page.variants
        columns.append((Column(kind, numeric=False), [_text(text or "–") for text in texts]))
    metrics = [metric_of(name) for name in results[0].metrics]
    compared_with = [baselines.get(r.against or "") for r in results]
    # Secondary ones come last.
    for metric in sorted(metrics, key=lambda metric: metric.secondary):
        column, name = Column(metric.heading, metric.description), metric.name
        estimates = [r.metrics[name] for r in results]
        if metric.secondary:
            columns.append((column, [_figure(metric, e.value) for e in estimates]))
            continue
        lines = [one.metrics[name].value if one else None for one in compared_with]
        columns.append((column, _intervals(metric, estimates, lines)))
        if baselines:
            found = [(r.difference or {}).get(name) for r in results]
            column = Column(f"{metric.heading} against the baseline")
            zeros = [0.0] * len(results)
            columns.append((column, _intervals(metric, found, zeros, signed=True)))
    primary = results[0].primary
    columns += _columns_of_parts(results, compared_with)
    deviations = [r.seed_sd.get(primary.name) for r in results]
    if any(one is not None for one in deviations):
        column = Column("sd over seeds", f"standard deviation of {primary.heading} over seeds")
        columns.append((column, [_figure(primary, one) for one in deviations]))
    # What is not fitted has no seed.
    seeds = [len(r.seeds) or None for r in results]
    if any(seeds):
        columns.append((Column("seeds", "how many fits are averaged"), [_count(n) for n in seeds]))
    if any(r.dim is not None for r in results):
        columns.append((Column("dim", "size of a vector"), [_count(r.dim) for r in results]))
    if len({(r.split, r.counts.n) for r in results}) > 1:
        columns.append((Column("rows"), [_count(r.counts.n, r.split) for r in results]))
    headings, cells_by_column = zip(*columns, strict=True)
    places = frozenset(i for i, r in enumerate(results) if r.name in baselines)
    return Table(headings, list(zip(*cells_by_column, strict=True)), places)


def _columns_of_parts(
    results: Sequence[ComparedResult], compared_with: Sequence[ComparedResult | None]
) -> list[tuple[Column, Sequence[Cell]]]:
    """Return the primary metric of rows of new sentences, and of known and new conditions."""
    first, primary = results[0], results[0].primary
    columns: list[tuple[Column, Sequence[Cell]]] = []
    if first.new_sentences is not None:
        scores, others = (
            [r.new_sentences.main if r and r.new_sentences else None for r in own]
            for own in (results, compared_with)
        )
        column = Column(
            new_sentences_heading(first), "of rows that share no sentence with training"
        )
        lines = [one.value if one else None for one in others]
        columns.append((column, _intervals(primary, scores, lines)))
    for kind, hint in (("seen", "has"), ("unseen", "lacks")):
        subsets = [r.by_condition.get(kind) for r in results]
        if any(subsets):
            column = Column(
                f"{primary.heading}, {kind} conditions", f"of rows whose condition training {hint}"
            )
            values = [one.score.value if one else None for one in subsets]
            columns.append((column, [_figure(primary, value) for value in values]))
    return columns


def _text(text: str) -> Cell:
    return Cell(text, text)


def _figure(metric: Metric, value: float | None, signed: bool = False) -> Cell:
    return Cell(minus(metric.show(value, signed)), finite(value))


def _count(n: int | None, detail: str = "") -> Cell:
    return Cell("–" if n is None else f"{n:,}", n, detail)


def _intervals(
    metric: Metric,
    found: Sequence[Estimate | Difference | None],
    references: Sequence[float | None],
    signed: bool = False,
) -> list[Cell]:
    """Return figures with their intervals drawn on one axis; on that of signed ones is 0."""
    drawn = [v for one in found if one for v in (one.value, *known(one.low, one.high))]
    place = _axis([*drawn, 0.0] if signed else drawn)
    cells = []
    for one, reference in zip(found, references, strict=True):
        if one is None or finite(one.value) is None:
            cells.append(Cell("undefined" if one else "–", None))
            continue
        low, high = known(one.low, one.high)
        bar = Bar(place(one.value), place(low), place(high), place(reference))
        text = minus(metric.show(one.value, signed))
        detail = minus(range_text(metric, one.low, one.high, signed))
        verdict = one.verdict if isinstance(one, Difference) else ""
        cells.append(Cell(text, one.value, detail, verdict, bar=bar))
    return cells


def _axis(values: Iterable[float | None]) -> Callable[[float | None], float | None]:
    """Return what places values on an axis that holds all, with a little room at both ends."""
    defined = [v for value in values if (v := finite(value)) is not None] or [0.0, 1.0]
    room = 0.04 * (max(defined) - min(defined))
    low, high = min(defined) - room, max(defined) + room

    def place(value: float | None) -> float | None:
        if value is None or finite(value) is None:
            return None
        return round(100 * (value - low) / (high - low), 2) if high > low else 50.0

    return place


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
            interval = minus(range_text(metric, found.low, found.high, signed=True)) or "–"
            row = (
                _text(result.name),
                _text(metric.heading),
                _figure(metric, found.value, signed=True),
                Cell(interval, finite(found.low)),
                Cell(probability(found.p), finite(found.p)),
                Cell(probability(found.p_holm), finite(found.p_holm)),
                _figure(metric, found.minimum),
                Cell(found.verdict or "–", found.verdict),
            )
            rows.append(row)
    return Table(columns, rows)


#: More parts than that are rows, and systems columns.
_MOST_PARTS = 12


def parts_table(
    kind: str, results: Sequence[ComparedResult], parts: Sequence[Mapping[str, Part]]
) -> Table:
    """Return the main figure of each result on some of the rows, all drawn on one axis.

    Args:
        kind: what the parts are.
        results: a row each, or where there are many parts a column.
        parts: of each result its figures by the name of the part.
    """
    metric, first = results[0].primary, parts[0]
    flat = [own[name].metrics[metric.name] for own in parts for name in first]
    cells = _intervals(metric, flat, [None] * len(flat))
    rows = [cells[i : i + len(first)] for i in range(0, len(cells), len(first))]
    if len(first) <= _MOST_PARTS:
        headings = (Column(name, f"{part.n:,} queries") for name, part in first.items())
        named = [(_text(one.name), *own) for one, own in zip(results, rows, strict=True)]
        return Table((Column("system", numeric=False), *headings), named)
    columns = (Column(kind, numeric=False), Column("queries"), *(Column(r.name) for r in results))
    transposed = zip(first.items(), zip(*rows, strict=True), strict=True)
    return Table(columns, [(_text(name), _count(one.n), *own) for (name, one), own in transposed])


def isotropy_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the isotropy of each system's vectors."""
    keys = ("mean_cosine", "std_cosine", "partition_ratio")
    headings = ("mean cosine", "standard deviation", "partition ratio")
    cells = [
        (_text(row["name"]), *(Cell(minus(number(row[key], 3)), row[key]) for key in keys))
        for row in rows
    ]
    return Table((Column("system", numeric=False), *map(Column, headings)), cells)
