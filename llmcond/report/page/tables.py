"""The tables of a page, whose cells have a text, a sort key and possibly an interval bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmcond.evaluation.paired import PairedDifference
from llmcond.evaluation.ranking import QuerySubset
from llmcond.evaluation.results import ComparedResult, SystemResult
from llmcond.metrics import Estimate, Metric, finite_or_none, format_number, get_metric
from llmcond.report.format import MINUS, new_sentences_heading, p_value_text, range_text
from llmcond.report.page.gather import Page


@dataclass(frozen=True, slots=True)
class Bar:
    """The bar of an interval, in positions from 0 to 100 on the axis that a column's rows share.

    Attributes:
        value: the position of the figure.
        low, high: the positions of the ends of its interval; None if there is none.
        reference: the position of the baseline's figure, or of 0 for differences; None if there is
            none.
    """

    value: float | None
    low: float | None
    high: float | None
    reference: float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: the text.
        sort: the sort key; None comes last in either direction.
        detail: a smaller text below.
        verdict: the verdict on a difference; empty if there is none.
        tags: texts in small boxes next to the text.
        bar: the bar of the figure's interval.
    """

    text: str
    sort: float | str | None
    detail: str = ""
    verdict: str = ""
    tags: tuple[str, ...] = ()
    bar: Bar | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        label: the heading.
        hint: an explanation of the heading, shown below the table.
        detail: a smaller text below the heading.
        numeric: whether the column contains figures.
    """

    label: str
    hint: str = ""
    detail: str = ""
    numeric: bool = True


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table.

    Attributes:
        columns: the columns.
        rows: the cells of each row.
        baselines: the indices of the rows that others are compared with.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    baselines: frozenset[int] = frozenset()


def with_minus_signs(text: str) -> str:
    """Replace hyphens by minus signs."""
    return text.replace("-", MINUS)


def interval_ends(low: float, high: float) -> tuple[float | None, float | None]:
    """Return both ends of an interval, or None twice unless both are finite."""
    ends = finite_or_none(low), finite_or_none(high)
    return (None, None) if None in ends else ends


def main_table(page: Page) -> PageTable:
    """Return the results, one row each, with the columns that apply to any of them."""
    results, baselines = page.results, page.baselines
    subtraction_hint = "whether the unconditional vector is subtracted"
    head_hint = "the head that compares the features; none: zero-shot, without a head"
    columns: list[tuple[Column, Sequence[Cell]]] = [
        (Column("head", head_hint, numeric=False), _head_cells(page)),
        (Column("template", numeric=False), [_text_cell(r.prompt or "–") for r in results]),
    ]
    if page.subtracts:
        cells = [_text_cell("yes" if r.subtract else "no") for r in results]
        columns.append((Column("minus c", subtraction_hint, numeric=False), cells))
    if page.variants:
        kind, texts = page.variants
        columns.append((Column(kind, numeric=False), [_text_cell(text or "–") for text in texts]))
    metrics = [get_metric(name) for name in results[0].metrics]
    compared_with = [baselines.get(r.against or "") for r in results]
    # Secondary metrics come last.
    for metric in sorted(metrics, key=lambda metric: metric.secondary):
        column, name = Column(metric.heading, metric.description), metric.name
        estimates = [r.metrics[name] for r in results]
        if metric.secondary:
            columns.append((column, [_figure_cell(metric, e.value) for e in estimates]))
            continue
        references = [r.metrics[name].value if r else None for r in compared_with]
        columns.append((column, _interval_cells(metric, estimates, references)))
        if baselines:
            differences = [(r.difference or {}).get(name) for r in results]
            column = Column(f"{metric.heading} against the baseline")
            zeros = [0.0] * len(results)
            columns.append((column, _interval_cells(metric, differences, zeros, signed=True)))
    primary = results[0].primary
    columns += _subset_columns(results, compared_with)
    deviations = [r.seed_sd.get(primary.name) for r in results]
    if any(sd is not None for sd in deviations):
        column = Column("sd over seeds", f"standard deviation of {primary.heading} over seeds")
        columns.append((column, [_figure_cell(primary, sd) for sd in deviations]))
    # Zero-shot results have no seeds.
    seeds = [len(r.seeds) or None for r in results]
    if any(seeds):
        columns.append(
            (Column("seeds", "number of fits averaged"), [_count_cell(n) for n in seeds])
        )
    if any(r.dim is not None for r in results):
        columns.append(
            (
                Column("dim", "dimensions of an embedding"),
                [_count_cell(r.dim) for r in results],
            )
        )
    if len({(r.split, r.counts.n) for r in results}) > 1:
        columns.append((Column("rows"), [_count_cell(r.counts.n, r.split) for r in results]))
    headings, cells_by_column = zip(*columns, strict=True)
    baseline_rows = frozenset(i for i, r in enumerate(results) if r.name in baselines)
    return PageTable(headings, list(zip(*cells_by_column, strict=True)), baseline_rows)


def _head_cells(page: Page) -> list[Cell]:
    cells = []
    variants = page.variants[1] if page.variants else [""] * len(page.results)
    for result, variant in zip(page.results, variants, strict=True):
        # The column of the variants already shows the variant, with which a name may end.
        title = replace(result, name=result.name.removesuffix(f" {variant}")).title
        recipe = "" if result.head == title else result.head
        tags = (f"control: {result.control}",) if result.control else ()
        cells.append(Cell(title, title, recipe, tags=tags))
    return cells


def _subset_columns(
    results: Sequence[ComparedResult], compared_with: Sequence[ComparedResult | None]
) -> list[tuple[Column, Sequence[Cell]]]:
    """Return columns of the primary metric on unseen sentences, and on (un)seen conditions."""
    first, primary = results[0], results[0].primary
    columns: list[tuple[Column, Sequence[Cell]]] = []
    if first.new_sentences is not None:
        scores, others = (
            [r.new_sentences.main if r and r.new_sentences else None for r in group]
            for group in (results, compared_with)
        )
        column = Column(
            new_sentences_heading(first), "on rows that share no sentence with the training data"
        )
        references = [estimate.value if estimate else None for estimate in others]
        columns.append((column, _interval_cells(primary, scores, references)))
        column = Column(
            f"{primary.heading}, shared sentences", "on rows that share one with the training data"
        )
        shared, others = (
            [r.shared_sentences.main if r and r.shared_sentences else None for r in group]
            for group in (results, compared_with)
        )
        references = [estimate.value if estimate else None for estimate in others]
        columns.append((column, _interval_cells(primary, shared, references)))
    if any(r.held_out for r in results):
        column = Column(
            f"{primary.heading}, held-out",
            "on tenths of dev, each predicted by the epoch that the rest of dev chooses",
        )
        figures = [r.held_out for r in results]
        columns.append((column, _interval_cells(primary, figures, [None] * len(results))))
    for kind, hint in (("seen", "occurs"), ("unseen", "does not occur")):
        subsets = [r.by_condition.get(kind) for r in results]
        if any(subsets):
            column = Column(
                f"{primary.heading}, {kind} conditions",
                f"on rows whose condition {hint} in the training data",
            )
            values = [subset.score.value if subset else None for subset in subsets]
            columns.append((column, [_figure_cell(primary, value) for value in values]))
    return columns


def _text_cell(text: str) -> Cell:
    return Cell(text, text)


def _figure_cell(metric: Metric, value: float | None, signed: bool = False) -> Cell:
    return Cell(with_minus_signs(metric.format(value, signed)), finite_or_none(value))


def _count_cell(n: int | None, detail: str = "") -> Cell:
    return Cell("–" if n is None else f"{n:,}", n, detail)


def _interval_cells(
    metric: Metric,
    estimates: Sequence[Estimate | PairedDifference | None],
    references: Sequence[float | None],
    signed: bool = False,
) -> list[Cell]:
    """Return cells with figures and interval bars on a common axis, which includes 0 if signed."""
    values = [v for e in estimates if e for v in (e.value, *interval_ends(e.low, e.high))]
    position_of = _make_axis([*values, 0.0] if signed else values)
    cells = []
    for estimate, reference in zip(estimates, references, strict=True):
        if estimate is None or finite_or_none(estimate.value) is None:
            cells.append(Cell("undefined" if estimate else "–", None))
            continue
        low, high = interval_ends(estimate.low, estimate.high)
        bar = Bar(
            position_of(estimate.value), position_of(low), position_of(high), position_of(reference)
        )
        text = with_minus_signs(metric.format(estimate.value, signed))
        detail = with_minus_signs(range_text(metric, estimate.low, estimate.high, signed))
        verdict = estimate.verdict if isinstance(estimate, PairedDifference) else ""
        cells.append(Cell(text, estimate.value, detail, verdict, bar=bar))
    return cells


def _make_axis(values: Iterable[float | None]) -> Callable[[float | None], float | None]:
    """Return a function that maps values to 0 to 100 on an axis of all values, with a margin."""
    defined = [v for value in values if (v := finite_or_none(value)) is not None] or [0.0, 1.0]
    room = 0.04 * (max(defined) - min(defined))
    low, high = min(defined) - room, max(defined) + room

    def position_of(value: float | None) -> float | None:
        if value is None or finite_or_none(value) is None:
            return None
        return round(100 * (value - low) / (high - low), 2) if high > low else 50.0

    return position_of


def difference_table(results: Sequence[ComparedResult]) -> PageTable:
    """Return all differences from the baseline: interval, p-values and detectable difference."""
    columns = (
        Column("system", numeric=False),
        Column("metric", numeric=False),
        Column("difference"),
        Column("95 % interval", numeric=False),
        Column("p"),
        Column("p, corrected", "after Holm's correction for the number of systems compared"),
        Column(
            "detectable difference",
            "the smallest true difference that these rows detect with a power of 80 %",
        ),
        Column("verdict", numeric=False),
    )
    rows = []
    for result in results:
        for name, difference in (result.difference or {}).items():
            metric = get_metric(name)
            interval = (
                with_minus_signs(range_text(metric, difference.low, difference.high, signed=True))
                or "–"
            )
            row = (
                _text_cell(result.name),
                _text_cell(metric.heading),
                _figure_cell(metric, difference.value, signed=True),
                Cell(interval, finite_or_none(difference.low)),
                Cell(p_value_text(difference.p), finite_or_none(difference.p)),
                Cell(p_value_text(difference.p_holm), finite_or_none(difference.p_holm)),
                _figure_cell(metric, difference.minimum),
                Cell(difference.verdict or "–", difference.verdict),
            )
            rows.append(row)
    return PageTable(columns, rows)


def compared_subsets_table(results: Sequence[ComparedResult]) -> PageTable | None:
    """Return the differences on subsets of the rows, one row per subset and system.

    The table is None if the results have no subsets.
    """
    systems = [result for result in results if isinstance(result, SystemResult) and result.subsets]
    if not systems:
        return None
    metric = systems[0].primary
    parts = [
        (name, system.name, system.subsets[name])
        for name in systems[0].subsets
        for system in systems
    ]
    differences = _interval_cells(
        metric, [part.difference for *_, part in parts], [0.0] * len(parts), signed=True
    )
    rows = [
        (
            _text_cell(name),
            _text_cell(system),
            _count_cell(part.n),
            figure,
            # A verdict would need a correction for the number of subsets.
            replace(difference, verdict=""),
            Cell(p_value_text(part.difference.p), finite_or_none(part.difference.p))
            if part.difference
            else Cell("baseline", None),
        )
        for (name, system, part), figure, difference in zip(
            parts,
            _interval_cells(metric, [part.main for *_, part in parts], [None] * len(parts)),
            differences,
            strict=True,
        )
    ]
    columns = (
        Column("rows", numeric=False),
        Column("system", numeric=False),
        Column("n"),
        Column(metric.heading),
        Column("difference"),
        Column("p", "not corrected"),
    )
    return PageTable(columns, rows)


#: With more subsets than this, the subsets become rows and the systems become columns.
_MAX_SUBSET_COLUMNS = 12


def subsets_table(
    kind: str, results: Sequence[ComparedResult], parts: Sequence[Mapping[str, QuerySubset]]
) -> PageTable:
    """Return the primary metric of each result on subsets of the queries, on a common axis.

    Args:
        kind: the kind of the subsets, such as ``relation``.
        results: the results, each a row, or a column if there are many subsets.
        parts: the scores of each result by the name of the subset.
    """
    metric, first = results[0].primary, parts[0]
    flat = [subsets[name].metrics[metric.name] for subsets in parts for name in first]
    cells = _interval_cells(metric, flat, [None] * len(flat))
    rows = [cells[i : i + len(first)] for i in range(0, len(cells), len(first))]
    if len(first) <= _MAX_SUBSET_COLUMNS:
        headings = (Column(name, detail=f"{part.n:,} queries") for name, part in first.items())
        labelled = [(_text_cell(r.name), *row) for r, row in zip(results, rows, strict=True)]
        return PageTable((Column("system", numeric=False), *headings), labelled)
    columns = (Column(kind, numeric=False), Column("queries"), *(Column(r.name) for r in results))
    transposed = zip(first.items(), zip(*rows, strict=True), strict=True)
    return PageTable(
        columns,
        [(_text_cell(name), _count_cell(part.n), *row) for (name, part), row in transposed],
    )


def isotropy_table(rows: Sequence[Mapping[str, Any]]) -> PageTable:
    """Return the table of the isotropy of each system's vectors."""
    keys = ("mean_cosine", "std_cosine", "partition_ratio")
    headings = ("mean cosine", "standard deviation", "partition ratio")
    cells = [
        (
            _text_cell(row["name"]),
            *(Cell(with_minus_signs(format_number(row[key], 3)), row[key]) for key in keys),
        )
        for row in rows
    ]
    return PageTable((Column("system", numeric=False), *map(Column, headings)), cells)
