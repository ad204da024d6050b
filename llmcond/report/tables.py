"""The tables of results, and the words and figures that all reports share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmcond.base.errors import escape_control_characters, format_count
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
from llmcond.evaluation.results import CrossValidatedGain, Result, SettingsChoice, Subset

if TYPE_CHECKING:
    from rich.console import Group

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
#: Pairs of query subsets that share a column; ``--json`` has all subsets.
_SUBSET_PAIRS = (("forward", "backward"), ("reversible", "rest"))
#: The number of conditions in the table of an agreement; ``--json`` has all.
_MAX_CONDITIONS = 10


# -- figures in words --------------------------------------------------------------------------


def head_text(name: str) -> str:
    """Return the name of a head for readers: zero-shot embeddings have no head."""
    return "no head" if name.partition("@")[0] == "none" else name


def estimate_text(metric: Metric, estimate: Estimate) -> str:
    """Format a figure with its interval, if it has one: ``58.7 [55.5, 61.9]``."""
    if finite_or_none(estimate.value) is None:
        return "undefined"
    if finite_or_none(estimate.low) is None:
        return metric.format(estimate.value)
    return _interval_text(metric, estimate)


def _interval_text(metric: Metric, figure: Estimate | PairedDifference) -> str:
    value = metric.format(figure.value, signed=isinstance(figure, PairedDifference))
    return f"{value} [{metric.format(figure.low)}, {metric.format(figure.high)}]"


def range_text(metric: Metric, low: float, high: float, signed: bool = False) -> str:
    """Format an interval as ``55.5 to 61.9``; empty if it is undefined."""
    if finite_or_none(low) is None or finite_or_none(high) is None:
        return ""
    return f"{metric.format(low, signed)} to {metric.format(high, signed)}"


def p_value_text(p: float) -> str:
    """Format a p-value with three decimals, or as ``< 0.001``."""
    return "< 0.001" if p < 0.001 else format_number(p, 3)


def dev_gain_text(cross_validated: CrossValidatedGain) -> str:
    """Summarise in one line how much training on dev improves the score, estimated by folds."""
    metric, gain = cross_validated.gain.metric, cross_validated.gain
    parts = [
        f"; {name} conditions ({gain.n:,} rows) {metric.format(gain.trained.value)}, without dev "
        f"{metric.format(gain.without.value)}"
        for name, gain in cross_validated.by_condition.items()
    ]
    return (
        f"{cross_validated.folds} folds of dev, each predicted by a fit on the other folds "
        f"({gain.n:,} rows): {metric.heading} {estimate_text(metric, gain.trained)}; without dev "
        f"{estimate_text(metric, gain.without)}; difference "
        f"{metric.format(gain.difference.value, signed=True)} "
        f"({range_text(metric, gain.difference.low, gain.difference.high, signed=True)})"
        f"{''.join(parts)}"
    )


def highest_or_lowest(metric: Metric) -> str:
    """Return "Highest" or "Lowest", the word for a best score that may not be significant."""
    return "Highest" if metric.higher_is_better else "Lowest"


def axis_label(metric: Metric, suffix: str = "") -> str:
    """Return the label of an axis with a metric in its display unit."""
    factor = "" if metric.factor == 1 else f" x {metric.factor:g}"
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


def new_sentences_heading(result: Result) -> str:
    """Return the heading of the score on rows that share no sentence with the training data."""
    return f"{result.primary.heading}, unseen sentences"


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


# -- one row for each result -------------------------------------------------------------------


def results_table(results: Sequence[Result], run: object) -> Table:
    """Return the table of an evaluation of any kind, with a row for each result.

    The note says what all results have in common: the rows scored, dropped and tied.
    """
    first, primary = results[0], results[0].primary
    if "ties" in first.about:
        return _rankings_table(results, run)
    metrics = [get_metric(name) for name in first.metrics]
    columns = _identity_columns(results, [result.title for result in results])
    columns += _estimate_columns(metrics, results)
    if any(result.held_out for result in results):
        columns.append(Column(f"{primary.heading}, held-out", _held_out(results), "figures"))
    if any("conditions" in result.subsets for result in results):
        scores = [
            " / ".join(
                primary.format(part.main.value)
                for part in result.subsets.get("conditions", {}).values()
            )
            for result in results
        ]
        heading = f"{primary.heading} by condition: seen / unseen"
        columns.append(Column(heading, scores, "figures"))
    columns += _new_sentences_columns(results)
    if "sentences" in first.subsets:
        shared = [
            estimate_text(primary, part.main)
            if (part := result.part("sentences", "shared_sentences"))
            else ""
            for result in results
        ]
        columns.append(Column("shared sentences", shared, "figures"))
    return Table(
        columns,
        f"{run}, {first.split}: {first.counts.details}. {sentences_text(first)}"
        f"{factors_text(metrics)}{interval_notes(results)}",
    )


def _rankings_table(results: Sequence[Result], run: object) -> Table:
    first, primary = results[0], results[0].primary
    description, further = _describe_ranking(first)
    subtracts = "neighbours" in first.about
    metrics = _main_metrics(first)
    # The results of one system have a common prefix; the variant column distinguishes them.
    names = [r.name if subtracts else r.name.partition(" ")[0] for r in results]
    titles = [replace(r, name=name).title for r, name in zip(results, names, strict=True)]
    columns = [
        *_identity_columns(results, titles)[: 2 + subtracts],
        Column(first.variant[0], [result.variant[1] for result in results]),
        *_estimate_columns([primary], results),
        *_value_columns(metrics[1:], results),
        *(
            Column(heading, [format_cell(result) for result in results], "figures")
            for heading, format_cell in further.items()
        ),
    ]
    note = f"{run}, {first.split}: {first.counts.text}{description} {factors_text(metrics)}"
    return Table(columns, f"{note}{interval_notes(results)}")


def _describe_ranking(first: Result) -> tuple[str, Mapping[str, Callable[[Any], str]]]:
    """Return how the queries were ranked, for the note, and the columns after the metrics."""
    primary = first.primary

    def join_scores(parts: Mapping[str, Subset], names: Sequence[str]) -> str:
        return " / ".join(primary.format(parts[name].metrics[primary.name].value) for name in names)

    about, ties = first.about, f"tied ranks: {first.about['ties']}."
    if "by_history" in first.subsets:
        histories = list(first.subsets["by_history"])
        ends = list(dict.fromkeys((histories[0], histories[-1])))
        return f" after {' to '.join(ends)} turns, candidates: {about['candidates']}, {ties}", {
            "median rank": lambda result: f"{result.about['median_rank']:.0f}",
            f"{primary.heading} after {' / '.join(ends)}": lambda result: join_scores(
                result.subsets["by_history"], ends
            ),
        }
    if "cells" in first.subsets:
        n_cells = len(first.subsets["cells"])
        cells = f"Means over {n_cells} pairs of turns before + turns to the goal."
        return f", candidates: {about['plan']}, {ties} {cells}", {}
    subsets = first.subsets.get("parts", {})
    return f", filtered, {ties}", {
        f"{primary.heading}: {' / '.join(pair)}": lambda result, pair=pair: join_scores(
            result.subsets["parts"], pair
        )
        for pair in _SUBSET_PAIRS
        if all(name in subsets for name in pair)
    }


def sweep_table(results: Sequence[Result], run: object) -> Table:
    """Return a table of a sweep's results, with one row per combination of settings."""
    first, primary = results[0], results[0].primary
    metrics = _main_metrics(first)
    has_held_out = any(result.held_out for result in results)
    main = [result.main for result in results]
    columns = [
        *_identity_columns(results, [result.head for result in results]),
        Column("settings", [settings_text(result.settings) for result in results]),
        Column("dim", [result.dim for result in results], "figures"),
        Column("seeds", [len(result.seeds) for result in results], "figures"),
        *_value_columns([primary], results),
        Column("sd", [primary.format(r.seed_sd[primary.name]) for r in results], "figures"),
        Column("interval", [range_text(primary, e.low, e.high) or "–" for e in main], "figures"),
        *([Column("held-out", _held_out(results), "figures")] if has_held_out else []),
        *_value_columns(metrics[1:], results),
    ]
    return Table(
        columns,
        f"{run}, {first.split}: {first.counts.text}. {factors_text(metrics)}Mean over seeds, "
        f"with the standard deviation over seeds (sd). {interval_notes(results)}",
    )


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings on one line: ``dropout=0.1 dim=64``."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def choice_sentence(choice: SettingsChoice) -> str:
    """Say what the choice of the best row of a sweep costs."""
    metric, score = choice.metric, estimate_text(choice.metric, choice.score)
    return (
        f"Choosing the best of these rows on nine tenths of dev, and predicting the remaining "
        f"tenth, gives {metric.heading} {score}; the score of the best row is optimistic."
    )


def comparison_table(
    results: Sequence[Result], baseline: str, run: object, *, bars: bool = True
) -> Table:
    """Return the table of a comparison, with one row per prompt, head and subtraction.

    Args:
        results: the compared results, best first.
        baseline: the name of the baseline prompt.
        run: the name of the run, for the note.
        bars: whether to add a column that shows the intervals as bars.
    """
    first, primary = results[0], results[0].primary
    metrics = _main_metrics(first)
    remarks = [" (control)" if result.about.get("control") else "" for result in results]
    columns = [
        *_identity_columns(results, [result.head for result in results], remarks),
        *_estimate_columns([primary], results),
        _deviation_column(results),
        *([_bar_column(results)] if bars else []),
        *_difference_columns(results, [result.prompt == baseline for result in results]),
        *_estimate_columns(metrics[1:], results),
        *_new_sentences_columns(results),
    ]
    return Table(
        columns,
        f"{run}, {first.split}: {first.counts.text}. {sentences_text(first)}{factors_text(metrics)}"
        f"{interval_notes(results)} "
        f"Differences are from {baseline} with the same head. {CORRECTION_NOTE}",
    )


def systems_table(results: Sequence[Result], baseline: str) -> Table:
    """Return the table of a comparison of systems, with one row per system, best first."""
    first, primary = results[0], results[0].primary
    metrics = _main_metrics(first)
    prompts = [result.prompt + (" minus c" if result.subtract else "") for result in results]
    columns = [
        Column("system", [result.name for result in results]),
        Column("encoder", [result.about["encoder"] for result in results]),
        Column("prompt", prompts),
        Column("seeds", [len(result.seeds) or "–" for result in results], "figures"),
        *_estimate_columns([primary], results),
        _deviation_column(results),
        *_difference_columns(results, [result.name == baseline for result in results]),
    ]
    for metric in metrics[1:]:
        differences = [(result.difference or {}).get(metric.name) for result in results]
        cells = ["" if d is None else _interval_text(metric, d) for d in differences]
        columns += [*_estimate_columns([metric], results), Column("difference", cells, "figures")]
    correction = f". {CORRECTION_NOTE}" if len(results) > 2 else "."
    return Table(
        columns,
        f"{first.split}: {first.counts.text}. {factors_text(metrics)}{interval_notes(results)} "
        f"Differences are from {baseline}{correction}",
    )


def subset_differences_table(results: Sequence[Result], baseline: str) -> Table:
    """Return the differences on subsets of the rows, one row per subset and system."""
    primary = results[0].primary
    (reference,) = (result for result in results if result.name == baseline)
    compared = [
        (name, result.name, part, difference)
        for name in reference.subsets["subsets"]
        for result in results
        if (difference := (part := result.subsets["subsets"][name]).difference) is not None
    ]
    base = [primary.format(reference.subsets["subsets"][name].main.value) for name, *_ in compared]
    columns = [
        Column("rows", [name for name, *_ in compared]),
        Column("system", [system for _, system, *_ in compared]),
        Column("n", [f"{part.n:,}" for *_, part, _ in compared], "figures"),
        Column(
            primary.heading,
            [estimate_text(primary, part.main) for *_, part, _ in compared],
            "figures",
        ),
        Column("baseline", base, "figures"),
        Column("difference", [_interval_text(primary, d) for *_, d in compared], "figures"),
        Column("p", [p_value_text(difference.p) for *_, difference in compared], "figures"),
    ]
    return Table(
        columns,
        f"{primary.heading} on subsets. p is not corrected, so that these are hints for further "
        "experiments.",
    )


def _main_metrics(result: Result) -> list[Metric]:
    """Return the metrics of a result, the primary one first, without secondary ones."""
    return [metric for name in result.metrics if not (metric := get_metric(name)).secondary]


def _identity_columns(
    results: Sequence[Result], heads: Sequence[str], remarks: Sequence[str] = ()
) -> list[Column]:
    """Return the columns that identify a result: head, prompt, and whether c is subtracted."""
    remarks = remarks or [""] * len(results)
    return [
        Column("head", heads),
        Column("prompt", [r.prompt + remark for r, remark in zip(results, remarks, strict=True)]),
        Column("minus c", ["yes" if result.subtract else "no" for result in results], "word"),
    ]


def _estimate_columns(metrics: Sequence[Metric], results: Sequence[Result]) -> list[Column]:
    """Return the column of each metric with its interval."""
    return [
        Column(
            m.heading, [estimate_text(m, result.metrics[m.name]) for result in results], "figures"
        )
        for m in metrics
    ]


def _value_columns(metrics: Sequence[Metric], results: Sequence[Result]) -> list[Column]:
    """Return the column of each metric without its interval."""
    return [
        Column(m.heading, [m.format(result.metrics[m.name].value) for result in results], "figures")
        for m in metrics
    ]


def _held_out(results: Sequence[Result]) -> list[str]:
    """Return the held-out scores on dev; a dash where there is none."""
    return ["–" if r.held_out is None else estimate_text(r.primary, r.held_out) for r in results]


def _new_sentences_columns(results: Sequence[Result]) -> list[Column]:
    """Return the column of the score on new sentences, if there is one."""
    if "sentences" not in results[0].subsets:
        return []
    cells = [
        estimate_text(result.primary, part.main)
        if (part := result.part("sentences", "unseen_sentences"))
        else ""
        for result in results
    ]
    return [Column(new_sentences_heading(results[0]), cells, "figures")]


def _deviation_column(results: Sequence[Result]) -> Column:
    primary = results[0].primary
    cells = [primary.format(result.seed_sd.get(primary.name)) for result in results]
    return Column("seeds ±", cells, "figures")


def _difference_columns(results: Sequence[Result], are_baselines: Sequence[bool]) -> list[Column]:
    """Return the columns of the difference from the baseline: difference, p-value, verdict."""
    differences = [_main_difference(result) for result in results]
    metric = results[0].primary
    verdicts = [
        d.verdict if d else "baseline" if is_baseline else "–"
        for d, is_baseline in zip(differences, are_baselines, strict=True)
    ]
    figures = [_interval_text(metric, d) if d else "" for d in differences]
    return [
        Column("difference", figures, "figures"),
        Column("p", [p_value_text(d.p_holm) if d else "" for d in differences], "figures"),
        Column("verdict", verdicts, "word"),
    ]


def _bar_column(results: Sequence[Result]) -> Column:
    """Return the intervals as lines of characters on a common axis, with the values on them."""
    ends_of_all = [end for r in results for end in (r.main.value, r.main.low, r.main.high)]
    known = [end for end in ends_of_all if finite_or_none(end) is not None] or [0.0, 1.0]
    least, most = min(known), max(known)

    def position_of(figure: float) -> int:
        share = (figure - least) / (most - least) if most > least else 0.5
        return min(_BAR_WIDTH - 1, max(0, round(share * (_BAR_WIDTH - 1))))

    def draw(estimate: Estimate) -> str:
        if finite_or_none(estimate.value) is None:
            return ""
        cells = [" "] * _BAR_WIDTH
        if finite_or_none(estimate.low) is not None and finite_or_none(estimate.high) is not None:
            for position in range(position_of(estimate.low), position_of(estimate.high) + 1):
                cells[position] = "─"
        cells[position_of(estimate.value)] = "●"
        return "".join(cells).rstrip()

    heading = " to ".join(f"{results[0].primary.factor * end:.0f}" for end in (least, most))
    return Column(heading, [draw(result.main) for result in results], "word")


# -- comparisons in sentences ------------------------------------------------------------------


def summary(results: Sequence[Result], baseline: str) -> list[str]:
    """Summarise a comparison in sentences, the verdict first.

    Args:
        results: the compared results, best first.
        baseline: the name of the baseline prompt.
    """
    prompts = {result.prompt for result in results}
    heads = sorted({result.head for result in results} - {"none"})
    with_heads = f" and with {_join_names(heads)}" if heads else ""
    sentences = _summarise_best(
        [result for result in results if not result.about.get("control")], baseline
    )
    for head in ["none", *heads]:
        sentences += _summarise_verdicts([r for r in results if r.head == head], head, baseline)
    return [
        *sentences,
        *_warn_of_few_pairs(results[0]),
        *_summarise_controls(results),
        f"{format_count(len(prompts), 'prompt')}, zero-shot{with_heads}, on "
        f"{results[0].counts.text} of {results[0].split}.",
    ]


def _summarise_best(results: Sequence[Result], baseline: str) -> list[str]:
    """Name the best score, and say whether any prompt is significantly better than the baseline."""
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
        return [f"No prompt is shown to be better than {baseline}. {top}."]
    if margin is None:
        return [f"{top}, the baseline." if first.prompt == baseline else f"{top}."]
    if margin.verdict == "better":
        return [f"{top}, better than {baseline} by {_interval_text(metric, margin)}."]
    return [f"{top}, not shown to be better than {baseline}."]


def _main_difference(result: Result) -> PairedDifference | None:
    return (result.difference or {}).get(result.primary.name)


def _summarise_verdicts(results: Sequence[Result], head: str, baseline: str) -> list[str]:
    """Say how the prompts compare with the baseline under one head."""
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
            f"{name} by {_interval_text(metric, difference)}"
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
    start = "Zero-shot" if head == "none" else f"With {head}"
    return [f"{start}: {'; '.join(parts)}."]


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


def _warn_of_few_pairs(first: Result) -> list[str]:
    if first.counts.n_pairs >= FEW_PAIRS:
        return []
    return [
        f"{first.counts.n_pairs:,} {first.counts.groups} are few: only large differences can be "
        "distinguished from chance."
    ]


def _name_system(result: Result) -> str:
    return f"{'zero-shot' if result.head == 'none' else result.head} on {_name_prompt(result)}"


def _name_prompt(result: Result) -> str:
    return result.prompt + ("" if result.subtract else " (no subtraction)")


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def systems_summary(results: Sequence[Result], baseline: str) -> list[str]:
    """Summarise a comparison of systems in sentences, the verdicts first.

    Args:
        results: the results, best first.
        baseline: the name of the baseline.
    """
    first, sentences = results[0], []
    metric = first.primary
    for result in results:
        difference = _main_difference(result)
        if difference is None:
            continue
        figure = (
            f"{metric.heading} {_interval_text(metric, difference)}, "
            f"p = {p_value_text(difference.p_holm)}".replace("p = <", "p <")
        )
        if difference.verdict != "no evidence":
            sentences.append(f"{result.name} is {difference.verdict} than {baseline}: {figure}.")
            continue
        minimum = finite_or_none(difference.minimum)
        detectable = f" These rows can detect {metric.format(minimum)} or more." if minimum else ""
        sentences.append(
            f"There is no evidence that {result.name} and {baseline} differ: {figure}.{detectable}"
        )
    single = [result.name for result in results if len(result.seeds) == 1]
    if single:
        sentences.append(
            f"{_join_names(single)}: one fit, so that the result holds for this seed only. Fit "
            "several seeds to include their variance."
        )
    systems = f"{len(results):,} systems, on {first.counts.text} of {first.split}."
    return [*sentences, *_warn_of_few_pairs(first), systems]


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
    counts = agreement.confusion.T.tolist()
    columns = [
        Column(name, [f"{count:,}" for count in column], "figures")
        for name, column in zip(names, counts, strict=True)
    ]
    note = "Number of rows by people's rating (rows) and the model's (columns)"
    Table([Column("people", names), *columns], note).print(form)
    subsets = agreement.by_condition[:_MAX_CONDITIONS]
    if subsets:
        means = (
            ("people's mean", [subset.human for subset in subsets]),
            ("model's mean", [subset.model for subset in subsets]),
        )
        scores = [get_metric("spearman").format(subset.spearman) for subset in subsets]
        columns = [
            Column("condition", [subset.condition for subset in subsets]),
            Column("rows", [f"{subset.n:,}" for subset in subsets], "figures"),
            *(Column(name, [format_number(v, 2) for v in vs], "figures") for name, vs in means),
            Column("Spearman", scores, "figures"),
        ]
        note = f"the {len(subsets):,} most frequent of {len(agreement.by_condition):,}"
        Table(columns, f"By condition: {note}").print(form)


# -- the check of an encoder -------------------------------------------------------------------


def show_checkup(report: Mapping[str, Any]) -> None:
    """Print the report of a check."""
    from rich.console import Console

    console = Console(highlight=False, width=line_limit() or 120)
    console.print(render_checkup(report, console.width))


def render_checkup(report: Mapping[str, Any], width: int) -> Group:
    """Return the facts, the sample inputs with their pooled tokens, and the memory of a check.

    Args:
        report: the check as JSON.
        width: the width of a line in characters.
    """
    from rich.console import Group, RenderableType
    from rich.table import Table as RichTable
    from rich.text import Text

    facts = RichTable(box=None, show_header=False, padding=(0, 2, 0, 1))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for key, value in _describe_encoder(report):
        facts.add_row(key, Text(escape_control_characters(value)))
    parts: list[RenderableType] = [facts]
    for sample in report["samples"]:
        title = (
            "sample input without an instruction"
            if sample["label"] == "no instruction"
            else f"sample input, {sample['label']} (prompt {report['prompt']})"
        )
        parts.append(Text(f"\n {title}; ^ marks pooled tokens", style="bold"))
        parts += [Text(f"   {line}") for line in token_lines(sample, width - 4)]
    rows: Sequence[Mapping[str, Any]] = report["memory"]
    sizes = {
        "weights": "weights",
        "loading": "while loading",
        "batch": f"+ batch of {rows[0]['batch_tokens']:,} tokens",
    }
    precisions = [
        row["dtype"] if row["quantize"] == "none" else f"{row['quantize']} ({row['dtype']})"
        for row in rows
    ]
    columns = [
        Column("precision", precisions),
        *(
            Column(heading, [format_bytes(row[key]) for row in rows], "figures")
            for key, heading in sizes.items()
        ),
        Column("fits", ["yes" if row["fits"] else "no" for row in rows], "figures"),
    ]
    memory = Table(columns, f"memory; {format_bytes(report['free'])} free on {report['device']}")
    return Group(*parts, Text(), memory.terminal()[0])


def _describe_encoder(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from llmcond.encoders.settings import pooled_tokens

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
    yield "pooling", f"{report['pooling']}{others}, over {pooled_tokens(report)}"
    yield "norm", {True: "unit L2", False: "none", None: "as in its files"}[report["normalize"]]
    yield "instruction", report["instruction_format"].replace("\n", "\\n") or "not supported"
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
