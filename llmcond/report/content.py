"""The content of a page of results, gathered from a run, and its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import as_matrix
from llmcond.base.errors import UserError
from llmcond.base.metrics import Estimate, Metric, finite_or_none, format_number, get_metric
from llmcond.base.output import Column, Table
from llmcond.base.system import provenance
from llmcond.data.rows import QueryRows, Rows
from llmcond.evaluation.analyses import MAX_VECTORS, measure_isotropy
from llmcond.evaluation.paired import PairedDifference
from llmcond.evaluation.results import Result, Subset
from llmcond.prompts import Prompt
from llmcond.report.tables import MINUS, new_sentences_heading, p_value_text, range_text
from llmcond.runs import Run
from llmcond.runs.examples import RowFeatures, zero_shot_heads

#: The kinds of subsets of queries in results, and what they are called on the page.
_SUBSET_TITLES = {
    "parts": "part",
    "by_category": "category of relations",
    "by_relation": "relation",
    "by_history": "number of turns before",
    "cells": "turns before + turns to the goal",
}


@dataclass(frozen=True)
class Page:
    """The content of a page of results.

    Attributes:
        title: the page's title.
        summary: sentences in plain words, the most important first.
        results: one result for each system, best first. All have the same metrics, and unique
            names.
        rows: the n scored rows: rated rows, or queries whose answers were ranked.
        scale: the lowest and the highest rating on the data's scale.
        similarity: (n,) predictions by the result's name, averaged over seeds; NaN where a row has
            none. For queries they are ranks.
        isotropy: name, head, prompt, subtract, mean_cosine, std_cosine and partition_ratio of each
            set of vectors, and ``cosines``, those of its vectors to their mean, (m,).
        provenance: the provenance of the page, as nested JSON.
        baseline: the name of the first of the results that others are compared with; None if
            nothing is compared.
        variants: a heading, and each result's value under it, which distinguish results of the
            same head and prompt; None if there is nothing to distinguish.
        subsets: the scores of each result on subsets of the rows, by the kind of subset.
        dev_metric: the metric by which heads are selected on dev.

    Raises:
        UserError: two results have the same name.
    """

    title: str
    summary: Sequence[str]
    results: Sequence[Result]
    rows: Rows | QueryRows
    scale: tuple[float, float] = (0.0, 1.0)
    similarity: Mapping[str, NDArray[np.floating]] = field(default_factory=dict)
    isotropy: Sequence[Mapping[str, Any]] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None
    variants: tuple[str, Sequence[str]] | None = None
    subsets: Mapping[str, Sequence[Mapping[str, Subset]]] = field(default_factory=dict)
    dev_metric: str = "spearman"

    def __post_init__(self) -> None:
        # Recipes of the same name may come from different folders.
        names = Counter(result.name for result in self.results)
        repeated = [name for name, count in names.items() if count > 1]
        if repeated:
            raise UserError(
                f"{len(repeated)} names of results occur more than once, such as {repeated[0]!r}. "
                "Each result needs its own name."
            )

    @property
    def ranked(self) -> bool:
        """Whether the rows are queries whose answers were ranked, instead of rated rows."""
        return isinstance(self.rows, QueryRows)

    @property
    def subtracts(self) -> bool:
        """Whether the page shows if the unconditional vector is subtracted."""
        return not self.ranked or any(result.subtract for result in self.results)

    @cached_property
    def systems(self) -> list[str]:
        """The names of the results that have predictions, in the order of the results."""
        return [r.name for r in self.results if len(self.similarity.get(r.name, ()))]

    @cached_property
    def baselines(self) -> Mapping[str, Result]:
        """The results that others are compared with, by name, the page's baseline first."""
        if self.baseline is None:
            return {}
        by_name = {result.name: result for result in self.results}
        against = (result.against for result in self.results if result.against)
        return {name: by_name[name] for name in (self.baseline, *against)}

    def initial_systems(self) -> tuple[str, str | None]:
        """Return the two systems selected at first: the best, and the baseline or the next best.

        The second is None if only one system has predictions.
        """
        known = [result for result in self.results if result.name in self.systems]
        # The results are sorted, best first; controls are moved to the end.
        ranked = [
            r.name for r in sorted(known, key=lambda result: bool(result.about.get("control")))
        ]
        others = (self.baseline, *ranked[1:])
        second = (name for name in others if name in self.systems and name != ranked[0])
        return ranked[0], next(second, None)


def make_page(
    run: Run,
    rows: Rows | QueryRows,
    results: Sequence[Result],
    similarity: Mapping[str, NDArray[np.floating]],
    *,
    title: str,
    summary: Sequence[str],
    settings: Mapping[str, Any],
) -> Page:
    """Gather the page of some results of a run.

    Args:
        run: the run; its store has the features of rated rows.
        rows: the scored rows.
        results: the results, best first.
        similarity: the predictions by the result's name, as in ``Page``.
        title: the page's title.
        summary: the sentences of the summary.
        settings: the settings of the evaluation, for the page's provenance.

    Raises:
        UserError: two results have the same name.
    """
    names = dict.fromkeys(name for result in results for name in result.prompts)
    prompts = [run.prompt(name) for name in names]
    manifest = run.manifest
    ranked = [result for result in results if "ties" in result.about]
    variants = [result.variant[1] for result in ranked]
    return Page(
        title=title,
        summary=summary,
        results=results,
        rows=rows,
        scale=run.rating_range,
        similarity=similarity,
        isotropy=_measure_isotropy(run, prompts, rows) if isinstance(rows, Rows) else (),
        provenance={
            "encoder": manifest["encoder"],
            "store_dtype": manifest["store_dtype"],
            "data": manifest["data"],
            "settings": settings,
            "prompts": {prompt.name: prompt.to_json() for prompt in prompts},
            **provenance(),
        },
        variants=(ranked[0].variant[0], variants) if any(variants) else None,
        subsets={
            title: [result.subsets[kind] for result in ranked]
            for kind, title in _SUBSET_TITLES.items()
            if ranked and kind in ranked[0].subsets
        },
        dev_metric=run.dev_metric,
    )


def _measure_isotropy(run: Run, prompts: Sequence[Prompt], rows: Rows) -> list[dict[str, Any]]:
    """Measure the isotropy of every prompt's features, with and without subtraction."""
    rated, store = np.flatnonzero(rows.rated)[:MAX_VECTORS], run.store()
    measurements = []
    for prompt in prompts:
        # New features for each prompt, so that memory holds one prompt's features at a time.
        features = RowFeatures(rows, store)
        for zeroshot in zero_shot_heads(run, prompt):
            pairs = features.pairs(zeroshot.view).take(rated)
            sides = [as_matrix(side).read() for side in (pairs.first, pairs.second)]
            identity = {"head": "none", "prompt": prompt.name, "subtract": zeroshot.view.subtracts}
            figures, cosines = measure_isotropy(zeroshot.name, np.concatenate(sides))
            measurements.append({**figures, **identity, "cosines": cosines})
    return measurements


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


def with_minus_signs(text: str) -> str:
    """Replace hyphens by minus signs."""
    return text.replace("-", MINUS)


def interval_ends(low: float, high: float) -> tuple[float | None, float | None]:
    """Return both ends of an interval, or None twice unless both are finite."""
    ends = finite_or_none(low), finite_or_none(high)
    return (None, None) if None in ends else ends


def main_table(page: Page) -> Table:
    """Return the results, one row each, with the columns that apply to any of them."""
    results, baselines = page.results, page.baselines
    columns = [
        Column(
            "head",
            _head_cells(page),
            hint="the head that compares the features; none: zero-shot, without a head",
        ),
        _text_column("template", [result.prompt or "–" for result in results]),
    ]
    if page.subtracts:
        cells = ["yes" if result.subtract else "no" for result in results]
        hint = "whether the unconditional vector is subtracted"
        columns.append(_text_column("minus c", cells, hint))
    if page.variants:
        kind, texts = page.variants
        columns.append(_text_column(kind, [text or "–" for text in texts]))
    metrics = [get_metric(name) for name in results[0].metrics]
    compared_with = [baselines.get(r.against or "") for r in results]
    # Secondary metrics come last.
    for metric in sorted(metrics, key=lambda metric: metric.secondary):
        name, hint = metric.name, metric.description
        estimates = [r.metrics[name] for r in results]
        if metric.secondary:
            values = [estimate.value for estimate in estimates]
            columns.append(_figure_column(metric.heading, metric, values, hint))
            continue
        references = [r.metrics[name].value if r else None for r in compared_with]
        columns.append(_interval_column(metric.heading, metric, estimates, references, hint=hint))
        if baselines:
            differences = [(r.difference or {}).get(name) for r in results]
            heading, zeros = f"{metric.heading} against the baseline", [0.0] * len(results)
            columns.append(_interval_column(heading, metric, differences, zeros, signed=True))
    primary = results[0].primary
    columns += _subset_columns(results, compared_with)
    deviations = [r.seed_sd.get(primary.name) for r in results]
    if any(sd is not None for sd in deviations):
        hint = f"standard deviation of {primary.heading} over seeds"
        columns.append(_figure_column("sd over seeds", primary, deviations, hint))
    # Zero-shot results have no seeds.
    seeds = [len(r.seeds) or None for r in results]
    if any(seeds):
        columns.append(_count_column("seeds", seeds, "number of fits averaged"))
    if any(r.dim is not None for r in results):
        columns.append(_count_column("dim", [r.dim for r in results], "dimensions of an embedding"))
    if len({(r.split, r.counts.n) for r in results}) > 1:
        counts = [Cell(f"{r.counts.n:,}", r.counts.n, r.split) for r in results]
        columns.append(Column("rows", counts, "figures"))
    baseline_rows = frozenset(i for i, r in enumerate(results) if r.name in baselines)
    return Table(columns, baselines=baseline_rows)


def _head_cells(page: Page) -> list[Cell]:
    cells = []
    variants = page.variants[1] if page.variants else [""] * len(page.results)
    for result, variant in zip(page.results, variants, strict=True):
        # The column of the variants already shows the variant, with which a name may end.
        title = replace(result, name=result.name.removesuffix(f" {variant}")).title
        recipe = "" if result.head == title else result.head
        tags = (f"control: {result.about['control']}",) if result.about.get("control") else ()
        cells.append(Cell(title, title, recipe, tags=tags))
    return cells


def _subset_columns(
    results: Sequence[Result], compared_with: Sequence[Result | None]
) -> list[Column]:
    """Return columns of the primary metric on unseen sentences, and on (un)seen conditions."""
    first, primary = results[0], results[0].primary
    columns: list[Column] = []
    if "sentences" in first.subsets:
        for part, heading, verb in (
            ("unseen_sentences", new_sentences_heading(first), "share no sentence with"),
            ("shared_sentences", f"{primary.heading}, shared sentences", "share one with"),
        ):
            scores, others = (
                [
                    subset.main if r and (subset := r.part("sentences", part)) else None
                    for r in group
                ]
                for group in (results, compared_with)
            )
            references = [estimate.value if estimate else None for estimate in others]
            hint = f"on rows that {verb} the training data"
            columns.append(_interval_column(heading, primary, scores, references, hint=hint))
    if any(r.held_out for r in results):
        heading = f"{primary.heading}, held-out"
        hint = "on tenths of dev, each predicted by the epoch that the rest of dev chooses"
        figures = [r.held_out for r in results]
        columns.append(
            _interval_column(heading, primary, figures, [None] * len(results), hint=hint)
        )
    for kind, verb in (("seen", "occurs"), ("unseen", "does not occur")):
        subsets = [r.part("conditions", kind) for r in results]
        if any(subsets):
            hint = f"on rows whose condition {verb} in the training data"
            values = [subset.main.value if subset else None for subset in subsets]
            heading = f"{primary.heading}, {kind} conditions"
            columns.append(_figure_column(heading, primary, values, hint))
    return columns


def _text_column(heading: str, texts: Sequence[str], hint: str = "") -> Column:
    return Column(heading, [Cell(text, text) for text in texts], hint=hint)


def _figure_column(
    heading: str,
    metric: Metric,
    values: Sequence[float | None],
    hint: str = "",
    signed: bool = False,
) -> Column:
    cells = [Cell(with_minus_signs(metric.format(v, signed)), finite_or_none(v)) for v in values]
    return Column(heading, cells, "figures", hint)


def _count_column(heading: str, counts: Sequence[int | None], hint: str = "") -> Column:
    cells = [Cell("–" if n is None else f"{n:,}", n) for n in counts]
    return Column(heading, cells, "figures", hint)


def _p_column(heading: str, values: Sequence[float], hint: str = "") -> Column:
    cells = [Cell(p_value_text(value), finite_or_none(value)) for value in values]
    return Column(heading, cells, "figures", hint)


def _interval_column(
    heading: str,
    metric: Metric,
    estimates: Sequence[Estimate | PairedDifference | None],
    references: Sequence[float | None],
    *,
    hint: str = "",
    signed: bool = False,
) -> Column:
    """Return figures with interval bars on a common axis, which includes 0 if they are signed."""
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
    return Column(heading, cells, "figures", hint)


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


def difference_table(results: Sequence[Result]) -> Table:
    """Return all differences from the baseline: interval, p-values and detectable difference."""
    compared = [
        (result.name, get_metric(name), difference)
        for result in results
        for name, difference in (result.difference or {}).items()
    ]
    differences = [difference for *_, difference in compared]
    intervals = [
        Cell(
            with_minus_signs(range_text(metric, d.low, d.high, signed=True)) or "–",
            finite_or_none(d.low),
        )
        for _, metric, d in compared
    ]

    def figures(heading: str, key: str, hint: str = "", signed: bool = False) -> Column:
        cells = [
            Cell(with_minus_signs(metric.format(value, signed)), finite_or_none(value))
            for _, metric, difference in compared
            for value in [getattr(difference, key)]
        ]
        return Column(heading, cells, "figures", hint)

    return Table(
        [
            _text_column("system", [name for name, *_ in compared]),
            _text_column("metric", [metric.heading for _, metric, _ in compared]),
            figures("difference", "value", signed=True),
            Column("95 % interval", intervals),
            _p_column("p", [d.p for d in differences]),
            _p_column(
                "p, corrected",
                [d.p_holm for d in differences],
                "after Holm's correction for the number of systems compared",
            ),
            figures(
                "detectable difference",
                "minimum",
                "the smallest true difference that these rows detect with a power of 80 %",
            ),
            Column("verdict", [Cell(d.verdict or "–", d.verdict) for d in differences]),
        ]
    )


def compared_subsets_table(results: Sequence[Result]) -> Table | None:
    """Return the differences on subsets of the rows, one row per subset and system.

    The table is None if the results have no subsets.
    """
    systems = [result for result in results if result.subsets.get("subsets")]
    if not systems:
        return None
    metric = systems[0].primary
    names = [(name, system) for name in systems[0].subsets["subsets"] for system in systems]
    parts = [system.subsets["subsets"][name] for name, system in names]
    no_references, zeros = [None] * len(parts), [0.0] * len(parts)
    differences = _interval_column(
        "difference", metric, [part.difference for part in parts], zeros, signed=True
    )
    return Table(
        [
            _text_column("rows", [name for name, _ in names]),
            _text_column("system", [system.name for _, system in names]),
            _count_column("n", [part.n for part in parts]),
            _interval_column(metric.heading, metric, [part.main for part in parts], no_references),
            # A verdict would need a correction for the number of subsets.
            replace(differences, cells=[replace(c, verdict="") for c in differences.cells]),
            Column(
                "p",
                [
                    Cell(p_value_text(d.p), finite_or_none(d.p)) if d else Cell("baseline", None)
                    for d in (part.difference for part in parts)
                ],
                "figures",
                "not corrected",
            ),
        ]
    )


#: With more subsets than this, the subsets become rows and the systems become columns.
_MAX_SUBSET_COLUMNS = 12


def subsets_table(
    kind: str, results: Sequence[Result], parts: Sequence[Mapping[str, Subset]]
) -> Table:
    """Return the primary metric of each result on subsets of the queries, on a common axis.

    Args:
        kind: the kind of the subsets, such as ``relation``.
        results: the results, each a row, or a column if there are many subsets.
        parts: the scores of each result by the name of the subset.
    """
    metric, first = results[0].primary, parts[0]
    flat = [subsets[name].metrics[metric.name] for subsets in parts for name in first]
    cells = _interval_column("", metric, flat, [None] * len(flat)).cells
    rows = [cells[i : i + len(first)] for i in range(0, len(cells), len(first))]
    if len(first) <= _MAX_SUBSET_COLUMNS:
        figures = zip(first.items(), zip(*rows, strict=True), strict=True)
        return Table(
            [
                _text_column("system", [result.name for result in results]),
                *(
                    Column(name, column, "figures", detail=f"{part.n:,} queries")
                    for (name, part), column in figures
                ),
            ]
        )
    return Table(
        [
            _text_column(kind, list(first)),
            _count_column("queries", [part.n for part in first.values()]),
            *(Column(r.name, row, "figures") for r, row in zip(results, rows, strict=True)),
        ]
    )


def isotropy_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of the isotropy of each system's vectors."""
    headings = {
        "mean_cosine": "mean cosine",
        "std_cosine": "standard deviation",
        "partition_ratio": "partition ratio",
    }
    figures = [
        Column(
            heading,
            [Cell(with_minus_signs(format_number(row[key], 3)), row[key]) for row in rows],
            "figures",
        )
        for key, heading in headings.items()
    ]
    return Table([_text_column("system", [row["name"] for row in rows]), *figures])
