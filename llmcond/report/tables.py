"""The tables of results, and the words and figures that all reports share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcond.base.errors import escape_control_characters, format_count, shortened_repr
from llmcond.base.files import format_bytes
from llmcond.base.metrics import (
    METRICS,
    Estimate,
    Metric,
    finite_or_none,
    format_number,
    get_metric,
)
from llmcond.base.output import Column, Table, line_limit, print_sentences
from llmcond.evaluation.paired import MIN_PAIRS, PairedDifference
from llmcond.evaluation.results import Result, Subset, estimate_text, format_settings, interval_text

if TYPE_CHECKING:
    from llmcond.evaluation.analyses import Agreement

MINUS = "\N{MINUS SIGN}"
#: The sentence of a title that says what the intervals are.
INTERVAL_NOTE = "95 % confidence intervals over {groups} and, with several fits, over seeds."
#: The note on p-values of several comparisons, for titles.
CORRECTION_NOTE = (
    "p and the verdict are after Holm's correction, and intervals are not: an interval without 0 "
    "may have no evidence."
)
#: With fewer sentence pairs than this, only large differences are significant.
FEW_PAIRS = 30
#: Up to this many prompts without evidence of a difference are named; more are only counted.
_MAX_NAMED = 3
#: The width of an interval's bar in characters.
_BAR_WIDTH = 21
#: The subsets of rated rows that have columns.
_PARTS = (
    ("sentences", "unseen_sentences", "on rows that share no sentence with the training data"),
    ("sentences", "shared_sentences", "on rows that share a sentence with the training data"),
    ("conditions", "seen", "on rows whose condition occurs in the training data"),
    ("conditions", "unseen", "on rows whose condition does not occur in the training data"),
)
_CORRECTED = "after Holm's correction for the number of systems compared"
#: Pairs of query subsets that share a column; ``--json`` has all subsets.
_SUBSET_PAIRS = (("forward", "backward"), ("reversible", "rest"))
#: The number of conditions in the table of an agreement; ``--json`` has all.
_MAX_CONDITIONS = 10


# -- figures in words --------------------------------------------------------------------------


def head_text(name: str) -> str:
    """Return the name of a head for readers: zero-shot embeddings have no head."""
    return "no head" if name.partition("@")[0] == "none" else name


def with_minus_signs(text: str) -> str:
    """Replace hyphens by minus signs."""
    return text.replace("-", MINUS)


def p_value_text(p: float) -> str:
    """Format a p-value with three decimals, or as ``< 0.001``."""
    return "< 0.001" if p < 0.001 else format_number(p, 3)


def dev_gain_text(record: Mapping[str, Any]) -> str:
    """Summarise in one line the record of ``cross_validated_gain``."""
    metric = get_metric(next(iter(record["trained"])))
    parts = [
        f"; {name} conditions ({gain['n']:,} rows) {metric.format(gain['trained'][metric.name])}, "
        f"without dev {metric.format(gain['without'][metric.name])}"
        for name, gain in record["by_condition"].items()
    ]
    difference = recorded_estimate(record["difference"], metric)
    signed = metric.format(difference.value, signed=True)
    return (
        f"{record['folds']} folds of dev, each predicted by a fit on the other folds "
        f"({record['n']:,} rows): {metric.heading} "
        f"{estimate_text(metric, recorded_estimate(record['trained'], metric))}; without dev "
        f"{estimate_text(metric, recorded_estimate(record['without'], metric))}; difference "
        f"{signed} {interval_text(metric, difference)}{''.join(parts)}"
    )


def recorded_estimate(record: Mapping[str, Any], metric: Metric) -> Estimate:
    """Return the figure of a metric in the JSON of results."""
    return Estimate.from_json(record[metric.name], record[f"{metric.name}_ci"])


def highest_or_lowest(metric: Metric) -> str:
    """Return "Highest" or "Lowest", the word for a best score that may not be significant."""
    return "Highest" if metric.higher_is_better else "Lowest"


def axis_label(metric: Metric, suffix: str = "") -> str:
    """Return the label of an axis with a metric in its display unit."""
    factor = "" if metric.factor == 1 else f" × {metric.factor:g}"
    return f"{metric.heading}{suffix}{factor}"


def interval_notes(results: Sequence[Result]) -> str:
    """Return the notes for a title: what the intervals are, or why there are none.

    The notes also name the role of dev: whether epochs were chosen, or heads trained, on it.
    """
    first = results[0]
    n_groups = first.counts.n_resampled
    selected_on_dev = any(
        fit.get("selected_on") == "dev" for result in results for fit in result.fits
    )
    text = INTERVAL_NOTE.format(groups=first.counts.resampled)
    if n_groups < MIN_PAIRS:
        text = (
            f"No intervals: {n_groups:,} {first.counts.resampled} are too few, they need at least "
            f"{MIN_PAIRS}."
        )
    if selected_on_dev and first.split == "dev":
        text = f"{text} The epochs of fitted heads were chosen on dev: their figures are optimistic"
        if any(result.held_out for result in results):
            return (
                f"{text}. Held-out figures are not: each tenth of dev is predicted by the epoch "
                "that the rest of dev chooses (early stopping uses all of dev)."
            )
        return f"{text}."
    text = f"{text} Epochs were chosen on dev." if selected_on_dev else text
    with_dev = [
        result.name
        for result in results
        if any("dev" in fit.get("trained_on", ()) for fit in result.fits)
    ]
    return f"{text} Also trained on dev: {', '.join(with_dev)}." if with_dev else text


def sentences_text(result: Result) -> str:
    """Say how many rows share a sentence with the training data; empty if that is not scored."""
    new = result.part("sentences", "unseen_sentences")
    if new is None:
        return ""
    n, n_new = result.counts.n, new.n
    return f"{n - n_new:,} rows share a sentence with training, {n_new:,} do not. "


def factors_text(metrics: Sequence[Metric]) -> str:
    """Return the sentence of a title that says by what the figures are multiplied."""
    factors = {metric.factor for metric in metrics} - {1.0}
    if not factors:
        return ""
    if len(factors) == 1:
        unscaled = ", ".join(metric.heading for metric in metrics if metric.factor == 1.0)
        return f"Times {factors.pop():g}{f', except {unscaled}' if unscaled else ''}. "
    parts = (f"{metric.heading} times {metric.factor:g}" for metric in metrics)
    return f"{', '.join(parts)}. "


# -- the table of results ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """The bar of an interval, in positions from 0 to 100 on the axis that a column's rows share.

    Attributes:
        value: the position of the figure.
        low, high: the positions of the ends of its interval; None if there is none.
        reference: the position of the baseline's figure, or of 0 for differences; None if there is
            none.
    """

    value: float
    low: float | None
    high: float | None
    reference: float | None

    def __str__(self) -> str:
        """Return the bar as a line of characters."""
        low, value, high = (
            round((_BAR_WIDTH - 1) * (self.value if position is None else position) / 100)
            for position in (self.low, self.value, self.high)
        )
        return f"{' ' * low}{'─' * (value - low)}●{'─' * (high - value)}"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table. Terminals and documents show its texts in one line, without the bar.

    Attributes:
        text: the text.
        sort: the sort key; None comes last in either direction.
        detail: a smaller text below.
        tags: texts in small boxes next to the text.
        verdict: the verdict on a difference; empty if there is none.
        bar: the bar of the figure's interval.
    """

    text: str
    sort: float | str | None = None
    detail: str = ""
    tags: tuple[str, ...] = ()
    verdict: str = ""
    bar: Bar | None = None

    def __str__(self) -> str:
        """Return the cell's texts in one line."""
        tags = (f"({tag})" for tag in self.tags)
        return " ".join(filter(None, (self.text, self.detail, *tags, self.verdict)))


def text_column(heading: str, texts: Sequence[str], hint: str = "") -> Column:
    """Return a column of texts, which are sorted alphabetically."""
    return Column(heading, [Cell(text, text) for text in texts], hint=hint)


def number_column(
    heading: str,
    values: Sequence[float | None],
    form: Callable[[Any], str] = "{:,}".format,
    hint: str = "",
) -> Column:
    """Return a column of numbers, with dashes for those that are missing."""
    cells = [Cell("–" if v is None else form(v), finite_or_none(v)) for v in values]
    return Column(heading, cells, "figures", hint)


def interval_column(
    heading: str,
    metric: Metric,
    figures: Sequence[Estimate | PairedDifference | None],
    references: Sequence[float | None] = (),
    hint: str = "",
) -> Column:
    """Return figures with their intervals, whose bars are on a common axis.

    Args:
        heading: the heading.
        metric: the metric of the figures.
        figures: the figures; None shows a dash. The axis of differences includes 0.
        references: the figures of the baselines, for the bars of figures that are no differences.
        hint: an explanation of the heading.
    """
    differ = any(isinstance(figure, PairedDifference) for figure in figures)
    references = references or [0.0 if differ else None] * len(figures)
    ends = [end for f in figures if f for end in (f.value, f.low, f.high)] + [0.0] * differ
    defined = [end for end in ends if finite_or_none(end) is not None] or [0.0, 1.0]
    room = 0.04 * (max(defined) - min(defined))
    least, most = min(defined) - room, max(defined) + room

    def position_of(value: float | None) -> float | None:
        if value is None or finite_or_none(value) is None:
            return None
        return round(100 * (value - least) / (most - least), 2) if most > least else 50.0

    cells = []
    for figure, reference in zip(figures, references, strict=True):
        position = position_of(figure.value if figure else None)
        if figure is None or position is None:
            cells.append(Cell("undefined" if figure else "–"))
            continue
        interval = interval_text(metric, figure)
        low, high = (position_of(end) if interval else None for end in (figure.low, figure.high))
        verdict = figure.verdict if isinstance(figure, PairedDifference) else ""
        text, bar = (
            metric.format(figure.value, differ),
            Bar(position, low, high, position_of(reference)),
        )
        cells.append(Cell(text, figure.value, interval, verdict=verdict, bar=bar))
    return Column(heading, cells, "figures", hint)


def find_baselines(results: Sequence[Result]) -> dict[str, Result]:
    """Return the results that others are compared with, by name, first that of the best result."""
    against = {result.against for result in results if result.against}
    names = (r.against or r.name for r in results if r.against or r.name in against)
    by_name = {result.name: result for result in results}
    return {name: by_name[name] for name in names if name in by_name}


def results_table(results: Sequence[Result], run: object = "", *, bars: bool = False) -> Table:
    """Return the table of results of any kind, one row each, with the columns that any of them has.

    The note says what all results have in common.

    Args:
        results: the results.
        run: the name of the run, for the note.
        bars: whether to add a column that shows the intervals of the first metric.
    """
    first, baselines = results[0], find_baselines(results)
    columns = [_system_column(results, baselines)]
    columns.append(text_column("prompt", [result.prompt or "–" for result in results]))
    if "ties" not in first.about or any(result.subtract for result in results):
        cells = ["yes" if result.subtract else "no" for result in results]
        hint = "whether the unconditional vector is subtracted"
        columns.append(text_column("minus c", cells, hint))
    encoders = [result.about.get("encoder", "") for result in results]
    for heading, texts in (
        ("encoder", encoders if len(set(encoders)) > 1 else []),
        (first.variant[0], [result.variant[1] for result in results]),
        ("settings", [format_settings(result.settings) for result in results]),
    ):
        if any(texts):
            columns.append(text_column(heading, [text or "–" for text in texts]))
    columns += _metric_columns(results, baselines, bars=bars)
    columns += _subset_columns(results)
    seeds = [len(result.seeds) or None for result in results]
    if any(n is not None and n > 1 for n in seeds):
        columns.append(number_column("seeds", seeds, hint="number of fits averaged"))
    dims = [result.dim for result in results]
    if len(set(dims) - {None}) > 1:
        columns.append(number_column("dim", dims, hint="dimensions of an embedding"))
    return Table(columns, _describe_results(results, run, baselines))


def _system_column(results: Sequence[Result], baselines: Mapping[str, Result]) -> Column:
    cells = []
    for result in results:
        # The column of the variants already shows the variant, with which a name ends.
        name = result.name.partition(" ")[0] if result.variant[1] else result.name
        title, control = replace(result, name=name).title, result.about.get("control")
        tags = ["baseline"] if result.name in baselines else []
        tags += [f"control: {control}"] if control else []
        recipe = "" if result.head in title else f"({result.head})"
        cells.append(Cell(title, title, recipe, tuple(tags)))
    hint = "the head that compares the features; none: zero-shot, without a head"
    return Column("system" if "heads" in results[0].about else "head", cells, hint=hint)


def _metric_columns(
    results: Sequence[Result], baselines: Mapping[str, Result], *, bars: bool
) -> list[Column]:
    """Return the columns of the metrics and their differences, secondary metrics last."""
    primary, columns = results[0].primary, []
    for metric in sorted(map(get_metric, results[0].metrics), key=lambda metric: metric.secondary):
        estimates = [result.metrics[metric.name] for result in results]
        heading, hint = metric.heading, metric.description
        if metric.secondary:
            values = [estimate.value for estimate in estimates]
            columns.append(number_column(heading, values, metric.format, hint))
            continue
        of_baselines = [baselines.get(result.against or "") for result in results]
        references = [base.metrics[metric.name].value if base else None for base in of_baselines]
        columns.append(interval_column(heading, metric, estimates, references, hint))
        if bars and metric is primary:
            bars_of_cells = [cell.bar or "" for cell in columns[-1].cells]
            columns.append(Column("interval", bars_of_cells, "word"))
        if baselines:
            differences = [(result.difference or {}).get(metric.name) for result in results]
            columns.append(interval_column("difference", metric, differences))
            if metric is primary:
                p_values = [d.p_holm if d else None for d in differences]
                columns.append(number_column("p", p_values, p_value_text, _CORRECTED))
    return columns


def _subset_columns(results: Sequence[Result]) -> list[Column]:
    """Return the columns of the primary metric on parts of the rows, and over seeds."""
    first, primary, columns = results[0], results[0].primary, []
    if any(result.held_out for result in results):
        heading, held_out = f"{primary.heading}, held-out", [r.held_out for r in results]
        hint = "on tenths of dev, each predicted by the epoch that the rest of dev chooses"
        columns.append(interval_column(heading, primary, held_out, hint=hint))
    for kind, name, hint in _PARTS:
        parts = [result.part(kind, name) for result in results]
        if any(parts):
            heading = f"{primary.heading}, {name.removesuffix('_sentences')} {kind}"
            scores = [part.main if part else None for part in parts]
            columns.append(interval_column(heading, primary, scores, hint=hint))
    if "median_rank" in first.about:
        ranks = [result.about["median_rank"] for result in results]
        columns.append(number_column("median rank", ranks, "{:.0f}".format))
    histories = list(first.subsets.get("by_history", ()))
    for kind, names in (
        ("by_history", tuple(dict.fromkeys((*histories[:1], *histories[-1:])))),
        *(("parts", names) for names in _SUBSET_PAIRS),
    ):
        parts_of_results = [[result.part(kind, name) for name in names] for result in results]
        if names and all(map(all, parts_of_results)):
            after = " after" if kind == "by_history" else ":"
            heading = f"{primary.heading}{after} {' / '.join(names)}"
            texts = [
                " / ".join(primary.format(part.main.value) for part in parts if part)
                for parts in parts_of_results
            ]
            columns.append(Column(heading, list(map(Cell, texts)), "figures"))
    deviations = [result.seed_sd.get(primary.name) for result in results]
    if any(sd is not None for sd in deviations):
        hint = f"standard deviation of {primary.heading} over seeds"
        columns.append(number_column("sd over seeds", deviations, primary.format, hint))
    return columns


def _describe_results(
    results: Sequence[Result], run: object, baselines: Mapping[str, Result]
) -> str:
    """Return the note of a table: the rows, the candidates, the intervals and the differences."""
    first = results[0]
    about, scope = first.about, f"{run}, {first.split}" if run else first.split
    text = f"{scope}: {first.counts.details}"
    if "ties" in about:
        histories = list(first.subsets.get("by_history", ()))
        text += f" after {histories[0]} to {histories[-1]} turns" if histories else ""
        pool = about.get("candidates", about.get("plan"))
        text += f", {f'candidates: {pool}' if pool else 'filtered'}, tied ranks: {about['ties']}"
    factors = factors_text([get_metric(name) for name in first.metrics])
    text += f". {sentences_text(first)}{factors}{interval_notes(results)}"
    if "cells" in first.subsets:
        text += f" Means over {len(first.subsets['cells'])} pairs of turns before + turns to goal."
    if baselines:
        base = next(iter(baselines))
        if len(baselines) > 1:
            base = f"{baselines[base].prompt} with the same head"
        text += f" Differences are from {base}. {CORRECTION_NOTE}"
    return text


def choice_sentence(choice: Mapping[str, Any]) -> str:
    """Say what the choice of the best row of a sweep costs."""
    metric = get_metric(next(iter(choice)))
    score = estimate_text(metric, recorded_estimate(choice, metric))
    return (
        "Choosing the best of these rows on nine tenths of dev, and predicting the remaining "
        f"tenth, gives {metric.heading} {score}; the score of the best row is optimistic."
    )


def differences_table(results: Sequence[Result]) -> Table | None:
    """Return the differences from the baselines, on all rows and on subsets, with both p-values.

    The table is None if nothing is compared.
    """
    compared = [
        ("all", r, get_metric(name), Subset(r.counts.n, {name: r.metrics[name]}, {}, difference))
        for r in results
        for name, difference in (r.difference or {}).items()
    ]
    compared += [
        (name, r, r.primary, part)
        for r in results
        for name, part in r.subsets.get("subsets", {}).items()
        if part.difference
    ]
    rows = [
        (
            Cell(name, name),
            Cell(result.name, result.name),
            Cell(metric.heading, metric.heading),
            Cell(estimate_text(metric, difference), finite_or_none(difference.value)),
            Cell(p_value_text(difference.p_holm), finite_or_none(difference.p_holm))
            if name == "all"
            else Cell("–"),
            Cell(p_value_text(difference.p), finite_or_none(difference.p)),
            Cell(estimate_text(metric, part.main), finite_or_none(part.main.value)),
            Cell(f"{part.n:,}", part.n),
            Cell(metric.format(difference.minimum), finite_or_none(difference.minimum)),
        )
        for name, result, metric, part in compared
        if (difference := part.difference)
    ]
    if not rows:
        return None
    headings = {
        "rows": "",
        "system": "",
        "metric": "",
        "difference": "with its 95 % interval",
        "p, corrected": _CORRECTED,
        "p": "not corrected",
        "value": "with its 95 % interval",
        "n": "number of rows or queries",
        "detectable": "the smallest true difference that these rows detect with a power of 80 %",
    }
    columns = zip(headings.items(), zip(*rows, strict=True), strict=True)
    return Table(
        [
            Column(heading, cells, "figures" if i > 2 else "text", hint)
            for i, ((heading, hint), cells) in enumerate(columns)
        ],
        "Differences from the baseline. On parts of the rows p is not corrected, so that these are "
        "hints for further experiments.",
    )


def isotropy_table(rows: Sequence[Mapping[str, Any]], note: str = "") -> Table:
    """Return the table of the isotropy of each system's vectors."""
    columns = [
        text_column("name", [row["name"] for row in rows]),
        text_column("minus c", ["yes" if row["subtract"] else "no" for row in rows]),
    ]
    for key in ("mean_cosine", "std_cosine", "partition_ratio"):
        values, form = [row[key] for row in rows], partial(format_number, decimals=3)
        columns.append(number_column(key.replace("_", " "), values, form))
    zero = [row.get("n_zero", 0) for row in rows]
    if any(zero):
        columns.append(number_column("zero vectors", zero))
    return Table(columns, note)


# -- comparisons in sentences ------------------------------------------------------------------


def summary(results: Sequence[Result], baseline: str) -> list[str]:
    """Summarise a comparison of prompts or systems in sentences, the verdict first.

    Args:
        results: the compared results, best first.
        baseline: the name of the baseline, a prompt or a system.
    """
    first, groups = results[0], {"": results}
    has_systems = "heads" in first.about
    if has_systems:
        compared = f"{len(results):,} systems"
    else:
        heads = sorted({result.head for result in results} - {"none"})
        groups = {
            f"With {head}" if head != "none" else "Zero-shot": [
                r for r in results if r.head == head
            ]
            for head in ["none", *heads]
        }
        n_prompts = len({result.prompt for result in results})
        with_heads = f" and with {_join_names(heads)}" if heads else ""
        compared = f"{format_count(n_prompts, 'prompt')}, zero-shot{with_heads}"
    sentences = _summarise_best([r for r in results if not r.about.get("control")], baseline)
    for start, group in groups.items():
        sentences += _summarise_verdicts(group, start, baseline)
    if first.counts.n_pairs < FEW_PAIRS:
        sentences.append(
            f"{first.counts.n_pairs:,} {first.counts.groups} are few: only large differences can "
            "be distinguished from chance."
        )
    single = [result.name for result in results if has_systems and len(result.seeds) == 1]
    if single:
        sentences.append(
            f"{_join_names(single)}: one fit, so that the result holds for this seed only. Fit "
            "several seeds to include their variance."
        )
    sentences += _summarise_controls(results)
    return [*sentences, f"{compared}, on {first.counts.text} of {first.split}."]


def _summarise_best(results: Sequence[Result], baseline: str) -> list[str]:
    """Name the best score, and say whether anything is significantly better than the baseline."""
    if not results or finite_or_none(results[0].main.value) is None:
        return []
    first, metric = results[0], results[0].primary
    figure = estimate_text(metric, first.main)
    top = f"{highest_or_lowest(metric)}: {_name_system(first)}, {metric.heading} {figure}"
    differences = [_main_difference(result) for result in results]
    margin = differences[0]
    if not any(differences):
        return [f"{top}."]
    if not any(difference.verdict == "better" for difference in differences if difference):
        noun = "system" if "heads" in first.about else "prompt"
        return [f"No {noun} is shown to be better than {baseline}. {top}."]
    if margin is None:
        return [f"{top}, the baseline." if baseline in (first.prompt, first.name) else f"{top}."]
    if margin.verdict == "better":
        return [f"{top}, better than {baseline} by {estimate_text(metric, margin)}."]
    return [f"{top}, not shown to be better than {baseline}."]


def _main_difference(result: Result) -> PairedDifference | None:
    return (result.difference or {}).get(result.primary.name)


def _summarise_verdicts(results: Sequence[Result], start: str, baseline: str) -> list[str]:
    """Say how systems, or the prompts under one head, compare with the baseline."""
    compared = [
        (_name_prompt(result), difference)
        for result in results
        if (difference := _main_difference(result)) is not None and not result.about.get("control")
    ]
    if not compared:
        return []
    metric, parts = results[0].primary, []
    for verdict in ("better", "worse"):
        named = [
            f"{name} by {estimate_text(metric, difference)}"
            for name, difference in compared
            if difference.verdict == verdict
        ]
        if named:
            parts.append(f"{verdict} than {baseline}: {_join_names(named)}")
    uncertain = [pair for pair in compared if pair[1].verdict == "no evidence"]
    if uncertain:
        minima = [low for _, diff in uncertain if (low := finite_or_none(diff.minimum)) is not None]
        detectable = (
            f" (these rows can detect {metric.format(max(minima))} or more)" if minima else ""
        )
        few = len(uncertain) <= _MAX_NAMED
        names = _join_names([n for n, _ in uncertain]) if few else f"the other {len(uncertain)}"
        parts.append(f"no evidence of a difference from {baseline} for {names}{detectable}")
    text = "; ".join(parts)
    return [f"{start}: {text}." if start else f"{text[0].upper()}{text[1:]}."]


def _summarise_controls(results: Sequence[Result]) -> list[str]:
    """Say whether the accuracy of the controls is at chance."""
    metric = METRICS["accuracy"]
    controls = [
        (result, estimate)
        for result in results
        if result.about.get("control")
        and (estimate := result.metrics.get(metric.name)) is not None
        and finite_or_none(estimate.low) is not None
    ]
    if not controls:
        return []
    off_chance = [
        f"{_name_system(result)} ({estimate_text(metric, estimate)})"
        for result, estimate in controls
        if not estimate.low <= 0.5 <= estimate.high
    ]
    if not off_chance:
        return [
            "The controls are at chance, as they should be: the interval of each accuracy contains "
            f"{metric.format(0.5)}."
        ]
    return [
        f"Of {format_count(len(controls), 'control')}, {len(off_chance)} are not at chance: "
        f"{_join_names(off_chance)}. One in twenty is expected; more mean that something other "
        "than the condition predicts which of two rows is rated higher."
    ]


def _name_system(result: Result) -> str:
    if "heads" in result.about:
        return result.name
    return f"{'zero-shot' if result.head == 'none' else result.head} on {_name_prompt(result)}"


def _name_prompt(result: Result) -> str:
    if "heads" in result.about:
        return result.name
    return result.prompt + ("" if result.subtract else " (no subtraction)")


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# -- agreement of raters -----------------------------------------------------------------------


def show_agreement(agreement: Agreement, model: str, form: str = "table") -> None:
    """Print how well a model's ratings agree with those of people.

    Args:
        agreement: the agreement of the two raters.
        model: the model's name.
        form: the format of the tables: table, markdown or latex.
    """
    from llmcond.evaluation.analyses import STEPS

    sentence = f"{model} and people: {agreement.n:,} rows that both rated."
    if agreement.n:
        figures = (
            f"{get_metric(name).heading} {estimate_text(get_metric(name), estimate)}"
            for name, estimate in agreement.metrics.items()
        )
        sentence += (
            f" {', '.join(figures)}, times 100, with 95 % confidence intervals over sentence pairs."
        )
    print_sentences([sentence], form)
    names = [*map(str, range(1, STEPS + 1)), "ill-defined"]
    confusion = [
        {"people": name, **dict(zip(names, counts, strict=True))}
        for name, counts in zip(names, agreement.confusion.tolist(), strict=True)
    ]
    note = "Number of rows by people's rating (rows) and the model's (columns)"
    Table.of_rows(confusion, note=note).print(form)
    subsets = agreement.to_json()["by_condition"]
    if subsets:
        n = min(len(subsets), _MAX_CONDITIONS)
        note = f"By condition, with mean ratings: the {n:,} most frequent of {len(subsets):,}"
        Table.of_rows(subsets[:n], note=note).print(form)


# -- the check of an encoder -------------------------------------------------------------------


def show_checkup(report: Mapping[str, Any]) -> None:
    """Print the facts, the sample inputs with their pooled tokens, and the memory of a check.

    Args:
        report: the check as JSON.
    """
    from rich.console import Console

    describe = _describe_server if "server_models" in report else _describe_encoder
    facts = [{"property": key, "value": value} for key, value in describe(report)]
    Table.of_rows(facts).print()
    if "memory" not in report:
        return
    console = Console(highlight=False, markup=False, width=line_limit() or 120)
    for sample in report["samples"]:
        title = f"sample input, {sample['label']} (prompt {report['prompt']})"
        if sample["label"] == "no instruction":
            title = "sample input without an instruction"
        lines = token_lines(sample, console.width - 4)
        console.print(
            f" {title}; ^ marks pooled tokens", *(f"   {line}" for line in lines), sep="\n"
        )
    memory: Sequence[Mapping[str, Any]] = report["memory"]
    rows = [
        {
            "precision": row["dtype"]
            if row["quantize"] == "none"
            else f"{row['quantize']} ({row['dtype']})",
            "weights": format_bytes(row["weights"]),
            "while loading": format_bytes(row["loading"]),
            f"+ batch of {memory[0]['batch_tokens']:,} tokens": format_bytes(row["batch"]),
            "fits": row["fits"],
        }
        for row in memory
    ]
    note = f"memory; {format_bytes(report['free'])} free on {report['device']}"
    columns = Table.of_rows(rows).columns
    sizes = [replace(column, kind="figures") for column in columns[1:]]
    Table([columns[0], *sizes], note).print()


def _describe_encoder(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from llmcond.encoders.settings import POOLED_TOKENS

    licence = f", {report['licence']}" if report["licence"] else ""
    gated = ", gated" if report["gated"] else ""
    yield "model", f"{report['name']} ({report['source']}{licence}{gated})"
    yield (
        "architecture",
        f"{report['architecture']}, {report['layers']} layers of {report['width']}, "
        f"{report['n_parameters'] / 1e9:.2f} B parameters; no code from the model's repository "
        "is run",
    )
    yield "attention", report["attention"]
    others = f" (or {', '.join(report['other_poolings'])})" if report["other_poolings"] else ""
    yield "pooling", f"{report['pooling']}{others}, over {POOLED_TOKENS[report['pool_over']]}"
    yield "norm", {True: "unit L2", False: "none", None: "as in its files"}[report["normalize"]]
    yield "instruction", report["instruction_format"].replace("\n", "\\n") or "not supported"
    names_of = dict[str, list[str]]()
    for name, text in report["prompts"].items():
        names_of.setdefault(text, []).append(name)
    for text, names in names_of.items():
        tasks = escape_control_characters(", ".join(names))
        yield "its prompt", f"{shortened_repr(text, 100)} ({tasks})"
    yield (
        "special tokens",
        report["special_tokens"].replace("tokenizer", "as added by its tokenizer"),
    )
    yield "padding", f"{report['padding_side']}, masked"
    yield "length", f"{report['max_length']} tokens" if report["max_length"] else "as in its files"
    if report["dtype"]:
        weights = "" if report["quantize"] == "none" else f", weights in {report['quantize']}"
        yield "computed in", f"{report['dtype']} on {report['device']}{weights}"
    if report["no_float16"]:
        yield "no float16", report["no_float16"]
    for sentence in report["assumed"]:
        yield "assumed", sentence


def _describe_server(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", f"{report['name']}, behind a server"
    yield "models of the server", ", ".join(report["server_models"]) or "not listed"
    yield "dimensions", f"{report['dim']:,}"
    yield "norm", "unit L2" if report["normalize"] else "none"
    yield "instruction", report["instruction_format"].replace("\n", "\\n") or "not supported"
    for sample in report["samples"]:
        yield f"sample text, {sample['label']} (prompt {report['prompt']})", repr(sample["text"])
    for sentence in report["assumed"]:
        yield "assumed", sentence


def token_lines(sample: Mapping[str, Any], width: int) -> list[str]:
    """Return lines of a sample's tokens, each followed by a line that marks pooled tokens."""
    from rich.cells import cell_len

    lines: list[str] = []
    tokens, marks = "", ""
    for text, pooled in zip(sample["tokens"], sample["pooled"], strict=True):
        # A token may be a line break, which would shift the marks under the wrong tokens.
        token = escape_control_characters(text).replace("\n", "\\n")
        size = cell_len(token)
        if tokens and cell_len(tokens) + size + 1 > width:
            lines += [tokens, marks]
            tokens, marks = "", ""
        tokens += token + " "
        marks += ("^" if pooled else " ") * size + " "
    return [*lines, tokens, marks]
