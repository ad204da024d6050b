"""Results: the scores of systems on rows as values, JSON and pandas, and ranks of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import Array, MatrixLike, Positions, as_matrix
from llmcond.base.errors import UserError
from llmcond.base.files import as_json
from llmcond.base.metrics import (
    DEFAULT_METRICS,
    Estimate,
    Floats,
    Metric,
    comparisons,
    estimates_json,
    finite_or_none,
    get_metric,
)
from llmcond.base.options import Ties
from llmcond.base.output import Displayed, make_frame
from llmcond.data.rows import KnownAnswers, Rows
from llmcond.evaluation.paired import (
    RESAMPLES,
    BootstrapMetrics,
    PairedDifference,
    bootstrap_metrics,
    paired_differences,
)
from llmcond.tasks import DEFAULT_TASK


@dataclass(frozen=True)
class RankedQueries:
    """Queries whose right answers were ranked, so that they are scored by ranks alone.

    Attributes:
        pair: (n,) the number of each query's example; a triple has two queries.
        unit: The noun for the examples in messages.
        stratum: (n,) the stratum of each query, such as a dialogue's history length, for metrics
            that are means over strata; None: all queries are in one stratum.
        crossed: Two kinds of clusters to which each query's example belongs, (n,) each, such as its
            head and its tail entity; empty if examples are independent.
        clusters: The noun for the crossed clusters in messages.
    """

    pair: NDArray[np.int64]
    unit: str = "examples"
    stratum: NDArray[np.int64] | None = None
    crossed: tuple[NDArray[np.int64], ...] = ()
    clusters: str = ""

    @property
    def rated(self) -> NDArray[np.bool_]:
        """A mask of the queries to score, (n,): all of them."""
        return np.ones(len(self.pair), dtype=np.bool_)

    @property
    def rating(self) -> NDArray[np.float64]:
        """The strata, (n,), which metrics of ranks get instead of ratings."""
        stratum = np.zeros(len(self.pair)) if self.stratum is None else self.stratum
        return stratum.astype(np.float64)


#: Examples that predictions are scored on. The bootstrap resamples the examples of a pair together.
Scored = Rows | RankedQueries


def take_scored(rows: Scored, mask: NDArray[np.bool_]) -> Scored:
    """Select examples by a mask, (n,)."""
    if isinstance(rows, Rows):
        return rows.take(mask)
    return replace(
        rows,
        pair=rows.pair[mask],
        stratum=None if rows.stratum is None else rows.stratum[mask],
        crossed=tuple(clusters[mask] for clusters in rows.crossed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """The numbers of rows that figures are computed on.

    Attributes:
        n: Rated rows, which all metrics are computed on.
        n_dropped: Unrated rows.
        n_pairs: Sentence pairs of the rated rows, which the bootstrap resamples.
        n_compared: Comparisons of two conditions on one sentence pair that accuracy counts.
        n_tied: Comparisons that accuracy leaves out because their ratings are equal.
        unit: For queries, the noun for their examples in messages, whose number is ``n_pairs``;
            empty for rated rows.
        clusters: The noun for crossed clusters that the bootstrap resamples; empty: it resamples
            the sentence pairs or examples.
        n_clusters: The number of crossed clusters, of the kind that has fewer; 0: there are none.
    """

    n: int = 0
    n_dropped: int = 0
    n_pairs: int = 0
    n_compared: int = 0
    n_tied: int = 0
    unit: str = ""
    clusters: str = ""
    n_clusters: int = 0

    @property
    def n_resampled(self) -> int:
        """The number of groups that the bootstrap resamples, which intervals depend on."""
        return self.n_clusters if self.clusters else self.n_pairs

    @classmethod
    def of(cls, rows: Scored) -> RowCounts:
        """Count rows, or queries."""
        if isinstance(rows, RankedQueries):
            groups = [len(np.unique(ids)) for ids in (rows.pair, *rows.crossed)]
            return cls(
                n=len(rows.pair),
                n_pairs=groups[0],
                unit=rows.unit,
                clusters=rows.clusters,
                n_clusters=min(groups),
            )
        rated = rows.rated
        pair = rows.pair[rated]
        sizes = np.unique(pair, return_counts=True)[1]
        n_compared = len(comparisons(rows.rating[rated], pair)[0])
        return cls(
            n=len(pair),
            n_dropped=int((~rated).sum()),
            n_pairs=len(sizes),
            n_compared=n_compared,
            n_tied=int((sizes * (sizes - 1) // 2).sum()) - n_compared,
        )

    @property
    def groups(self) -> str:
        """The noun in messages for the groups that rows or queries belong to."""
        return self.unit or "sentence pairs"

    @property
    def resampled(self) -> str:
        """The noun in messages for what the bootstrap resamples."""
        return self.clusters or self.groups

    @property
    def text(self) -> str:
        """The counts in one phrase, for titles."""
        what = "queries" if self.unit else "rated rows"
        return f"{self.n:,} {what} of {self.n_pairs:,} {self.groups}"

    @property
    def details(self) -> str:
        """The counts in one phrase, with the rated rows that were left out."""
        if self.unit:
            return self.text
        return (
            f"{self.n:,} rows of {self.n_pairs:,} {self.groups}, {self.n_dropped:,} unrated "
            f"dropped; accuracy over {self.n_compared:,} comparisons, {self.n_tied:,} tied left out"
        )

    def to_json(self) -> dict[str, int]:
        """Return the counts in the JSON of results."""
        counts = {key: value for key, value in asdict(self).items() if key.startswith("n")}
        del counts["n_clusters"]
        return {"n": self.n} if self.unit else counts


@dataclass(frozen=True, slots=True)
class Subset:
    """The figures of a system on a subset of rows or queries.

    Attributes:
        n: The number of rows or queries.
        metrics: The metrics by name with 95 % intervals; NaN if there are no rows.
        about: Further numbers of the subset, such as ``n_pairs``, by name.
        difference: The difference to the baseline in the first metric, not corrected; None if it is
            not compared.

    Examples:
        >>> from llmcond import Estimate, Subset
        >>> unseen = Subset(410, {"spearman": Estimate(0.39, 0.30, 0.47)}, {"n_pairs": 230})
        >>> unseen.metrics["spearman"].value
        0.39
    """

    n: int
    metrics: Mapping[str, Estimate]
    about: Mapping[str, int] = field(default_factory=dict)
    difference: PairedDifference | None = None

    @property
    def main(self) -> Estimate:
        """The figure of the first metric."""
        return next(iter(self.metrics.values()))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the figures."""
        return {"n": self.n, **self.about, **estimates_json(self.metrics)}


#: The kinds of subsets whose figures lie at the top level of a result's JSON.
_TOP_LEVEL = ("conditions", "sentences", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Displayed):
    """The scores of one system, a fitted head or zero-shot, on the rows of a split.

    Attributes:
        name: The name, unique among results.
        head: The recipe of the head; ``none`` is zero-shot.
        prompts: The names of the prompts whose features the system uses.
        subtract: Whether unconditional features are subtracted.
        split: The name of the scored split.
        counts: The numbers of rows.
        metrics: The metrics by name with 95 % intervals, the main metric first.
        about: Further facts about the system by their names in JSON: ``settings`` of a sweep;
            ``control`` of compared prompts; ``heads`` (the run and the name of each head) and
            ``encoder`` of compared systems; ``ties``, ``score`` and others of rankings.
        variant: The kind and the name of the variant, if a head and prompt have several results.
        subsets: The figures of subsets of rows or queries, by the kind of subset and by its name.
            ``conditions``: ``seen`` and ``unseen`` in training. ``sentences``: rows that share no
            sentence with the training rows (``unseen_sentences``), and the others
            (``shared_sentences``). ``parts``, ``by_category``, ``by_relation``, ``by_history`` and
            ``cells`` of rankings. ``subsets`` of compared systems.
        difference: The difference to the baseline by metric; None if it is not compared.
        against: The name of the baseline's result; None if it is not compared.
        held_out: The score on dev if the epoch is chosen on nine tenths of dev, and the remaining
            tenth is predicted; None if dev is not scored, or did not choose the epoch.
        seed_sd: The standard deviation over seeds by metric; None for a single seed.
        dim: The size of the embeddings; None: the size of the features.
        seeds: The seeds of the fits that figures are means of; empty for zero-shot.
        fits: The record of each fit.
        task: The task of the rows.

    Examples:
        >>> from llmcond import Estimate, Result
        >>> result = Result(
        ...     name="linear@routed", head="linear", prompts=("routed",), subtract=True,
        ...     split="test", metrics={"spearman": Estimate(0.50, 0.45, 0.55)},
        ... )
        >>> result.main
        Estimate(value=0.5, low=0.45, high=0.55)
    """

    name: str
    head: str
    prompts: tuple[str, ...]
    subtract: bool
    split: str
    counts: RowCounts = RowCounts()
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    variant: tuple[str, str] = ("", "")
    subsets: Mapping[str, Mapping[str, Subset]] = field(default_factory=dict)
    difference: Mapping[str, PairedDifference] | None = None
    against: str | None = None
    held_out: Estimate | None = None
    seed_sd: Mapping[str, float | None] = field(default_factory=dict)
    dim: int | None = None
    seeds: tuple[int, ...] = ()
    fits: tuple[Mapping[str, Any], ...] = ()
    task: str = DEFAULT_TASK

    @property
    def prompt(self) -> str:
        """The names of the prompts, joined by ``+``."""
        return "+".join(self.prompts)

    @property
    def title(self) -> str:
        """The name that the user gave to the head, otherwise the name of its recipe."""
        is_default_name = self.name in (
            default_name(self.head, self.prompts, plain) for plain in (False, True)
        )
        return self.head if is_default_name else self.name

    @property
    def primary(self) -> Metric:
        """The metric that determines the best result."""
        return get_metric(next(iter(self.metrics)))

    @property
    def main(self) -> Estimate:
        """The figure of the primary metric."""
        return self.metrics[self.primary.name]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that a sweep varies, with their values; empty for other results."""
        settings: Mapping[str, Any] = self.about.get("settings", {})
        return settings

    def part(self, kind: str, name: str) -> Subset | None:
        """Return the figures of a subset; None if the result has no such subset.

        Args:
            kind: The kind of subset.
            name: The name of the subset.
        """
        return self.subsets.get(kind, {}).get(name)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the result.

        Returns:
            ``name``, ``head``, ``prompt``, ``subtract``, ``split``, ``task``, the counts, ``dim``,
            and what ``about`` holds; for each metric its value and its interval (``METRIC_ci``);
            the held-out score; the subsets. Of ``evaluate`` also ``seed`` and ``selected_on``, of
            sweeps and comparisons each metric's standard deviation over seeds (``METRIC_sd``) and
            ``seeds``, of comparisons also ``difference`` and ``against``.
        """
        identity = ("name", "head", "prompt", "subtract", "split", "task")
        values: dict[str, Any] = {
            **{key: getattr(self, key) for key in identity},
            **self.counts.to_json(),
            "dim": self.dim,
            **self.about,
            **estimates_json(self.metrics),
        }
        if self.held_out is not None:
            values |= estimates_json({f"held_out_{self.primary.name}": self.held_out})
        is_compared = "control" in self.about
        if is_compared or "settings" in self.about:
            deviations = {name: self.seed_sd.get(name) for name in self.metrics}
            values |= {f"{name}_sd": finite_or_none(sd) for name, sd in deviations.items()}
            values["seeds"] = list(self.seeds)
        else:
            values["seed"] = self.seeds[0] if self.seeds else None
            values["selected_on"] = self.fits[0].get("selected_on") if self.fits else None
        if is_compared:
            values |= {"difference": as_json(self.difference), "against": self.against}
        for kind, parts in self.subsets.items():
            figures = {name: part.to_json() for name, part in parts.items()}
            if kind == "conditions":
                main = self.primary.name
                figures = {
                    name: {"n": part["n"], main: part[main]} for name, part in figures.items()
                }
            if kind == "sentences":
                values |= {f"n_{name}": part.pop("n") for name, part in figures.items()}
            if kind == "subsets":
                for name, part in parts.items():
                    figures[name]["difference"] = as_json(part.difference)
            values |= figures if kind in _TOP_LEVEL else {kind: figures}
        return values


def default_name(recipe: str, prompts: Sequence[str], plain: bool) -> str:
    """Return the default name of a head: ``RECIPE@PROMPT``, followed by ``+c`` if plain.

    A head is plain if nothing is subtracted from joint features.
    """
    return f"{recipe}@{'+'.join(prompts)}" + ("+c" if plain else "")


class Results(Displayed, tuple[Result, ...]):
    """The results of several systems on the same rows, as a tuple.

    Examples:
        >>> import llmcond
        >>> data = [
        ...     {"sentence1": f"{n} dogs run.", "sentence2": f"{n} cats run.",
        ...      "condition": condition, "label": label}
        ...     for n in range(20)
        ...     for condition, label in (("the animal", 1), ("the action", 5))
        ... ]
        >>> extracted = llmcond.extract(model="minilm", data=data, run="pets")
        >>> results = llmcond.evaluate(run="pets", split="dev")
        >>> [result.head for result in results]
        ['none', 'none']
        >>> results.to_pandas()["spearman"].shape
        (2,)
    """

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of the command.

        Returns:
            A list of results under the key ``results``.
        """
        return {"results": [result.to_json() for result in self]}

    def to_pandas(self) -> Any:
        """Convert the results to a pandas DataFrame with a row for each result.

        Returns:
            A DataFrame whose columns are the keys of ``to_json``, with the columns ``METRIC_low``
            and ``METRIC_high`` for intervals. The names of values in another value start with its
            name: ``settings_dim``, ``unseen_sentences_spearman``.

        Raises:
            LlmcondError: pandas is not installed.
        """
        return make_frame([flatten_json(result.to_json()) for result in self])

    def _displayed(self) -> dict[str, Any]:
        return {"results": [_table_row(result) for result in self]}


def flatten_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a result without nested objects and intervals, for a table's row."""
    row: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            row |= {f"{name}_{key}": item for key, item in flatten_json(value).items()}
        elif name.endswith("_ci"):
            row[f"{name[:-3]}_low"], row[f"{name[:-3]}_high"] = value
        else:
            row[name] = value
    return row


def estimate_text(metric: Metric, figure: Estimate | PairedDifference) -> str:
    """Format a figure with its interval, if it has one: ``58.7 [55.5, 61.9]``."""
    if finite_or_none(figure.value) is None:
        return "undefined"
    value = metric.format(figure.value, signed=isinstance(figure, PairedDifference))
    return f"{value} {interval_text(metric, figure)}".rstrip()


def interval_text(metric: Metric, figure: Estimate | PairedDifference) -> str:
    """Format an interval as ``[55.5, 61.9]``; empty if it is undefined."""
    if finite_or_none(figure.low) is None or finite_or_none(figure.high) is None:
        return ""
    return f"[{metric.format(figure.low)}, {metric.format(figure.high)}]"


def _table_row(result: Result) -> dict[str, Any]:
    """Return the row of a result in a table: the system, its figures and its difference."""
    row: dict[str, Any] = {
        "head": result.title,
        "prompt": result.prompt,
        "minus c": result.subtract,
    }
    for name, estimate in result.metrics.items():
        metric = get_metric(name)
        row[metric.heading] = estimate_text(metric, estimate)
    difference = (result.difference or {}).get(result.primary.name)
    if difference is not None:
        row["difference"] = estimate_text(result.primary, difference)
        row |= {"p": finite_or_none(difference.p_holm), "verdict": difference.verdict}
    return row


@dataclass(frozen=True)
class FittedResults(Displayed):
    """The results of systems, some of which were fitted for this comparison.

    Attributes:
        results: The results, best first.
        failures: One line for each fit that failed. The result lacks this seed.
    """

    results: Results
    failures: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of the command."""
        return {**self.results.to_json(), "failures": list(self.failures)}

    def to_pandas(self) -> Any:
        """Return the results as a pandas DataFrame."""
        return self.results.to_pandas()

    def _displayed(self) -> dict[str, Any]:
        return {**self.results._displayed(), "failures": ", ".join(self.failures)}


def best_first(results: Iterable[Result]) -> Results:
    """Sort results by their primary metric, best first and undefined ones last."""

    def key(result: Result) -> float:
        value = result.main.value
        if math.isnan(value):
            return math.inf
        return -value if result.primary.higher_is_better else value

    return Results(sorted(results, key=key))


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return settings on one line, as they are typed: ``dropout=0.1 matryoshka=64,32``."""
    return " ".join(
        f"{key}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"
        for key, value in settings.items()
    )


_RESERVED = {field.name for field in fields(Result)} | {
    "n", "seed", "prompt", "settings", "control", "heads", "encoder"
}  # fmt: skip


def score_results(
    results: Sequence[Result],
    similarity: Sequence[NDArray[np.floating]],
    rows: Scored,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    resamples: int = RESAMPLES,
) -> list[Result]:
    """Add the figures on rows to results that have none.

    ``similarity`` holds, for each result, the (seeds, n) predictions of all rows, including unrated
    ones. With ``resamples=0`` there are no intervals.

    Raises:
        UserError: Predictions are not finite, or a metric has the name of another column.
    """
    if not rows.rated.any():
        nothing = {metric.name: Estimate(math.nan) for metric in metrics}
        return [replace(result, counts=RowCounts.of(rows), metrics=nothing) for result in results]
    return _add_metrics(
        results, _bootstrap_results(results, similarity, rows, metrics, resamples), rows
    )


def _bootstrap_results(
    results: Sequence[Result],
    similarity: Sequence[NDArray[np.floating]],
    rows: Scored,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    resamples: int = RESAMPLES,
) -> BootstrapMetrics:
    """Compute metrics on bootstrap samples of the rated rows.

    Arguments and errors are those of ``score_results``.
    """
    for metric in metrics:
        if metric.name in _RESERVED:
            raise UserError(
                f"a metric cannot be called {metric.name}, because results have a column of this "
                "name. Choose another name."
            )
    rated = rows.rated
    systems = [predicted[:, rated] for predicted in similarity]
    for result, system in zip(results, systems, strict=True):
        bad = int((~np.isfinite(system)).any(axis=0).sum())
        if bad:
            raise UserError(f"{result.name} predicts NaN or infinity for {bad:,} rated rows.")
    return _bootstrap(systems, take_scored(rows, rated), metrics, resamples)


def _bootstrap(
    systems: Sequence[NDArray[np.floating]],
    rows: Scored,
    metrics: Sequence[Metric],
    resamples: int,
) -> BootstrapMetrics:
    crossed = rows.crossed if isinstance(rows, RankedQueries) else ()
    return bootstrap_metrics(systems, rows.rating, rows.pair, metrics, resamples, crossed=crossed)


def score_subset(
    systems: Sequence[NDArray[np.floating]],
    rows: Scored,
    metrics: Sequence[Metric],
    mask: NDArray[np.bool_] | None = None,
    resamples: int = RESAMPLES,
) -> list[Subset]:
    """Compute the figures of each system on a subset of rows, on the same bootstrap samples.

    Args:
        systems: (seeds, n) the predictions, or the ranks, of each system.
        rows: The n rows or queries.
        metrics: The metrics.
        mask: (n,) mask of the rows to use, of which only rated ones count; None: all.
        resamples: The number of bootstrap samples; with 0 there are no intervals.
    """
    selected = rows.rated if mask is None else rows.rated & mask
    if not selected.any():
        return [Subset(0, {metric.name: Estimate(math.nan) for metric in metrics}) for _ in systems]
    values = [system[:, selected] for system in systems]
    draws = _bootstrap(values, take_scored(rows, selected), metrics, resamples)
    return [Subset(int(selected.sum()), draws.estimates(i)) for i in range(len(systems))]


def add_subsets(
    results: Sequence[Result], parts: Mapping[str, Mapping[str, Sequence[Subset]]]
) -> list[Result]:
    """Add the figures on subsets, by their kind and name and by the position of the result."""
    added = []
    for i, result in enumerate(results):
        new = {
            kind: {name: subsets[i] for name, subsets in named.items()}
            for kind, named in parts.items()
        }
        added.append(replace(result, subsets={**result.subsets, **new}))
    return added


def _add_metrics(results: Sequence[Result], draws: BootstrapMetrics, rows: Scored) -> list[Result]:
    """Add the figures that ``_bootstrap_results`` computed on rows to results."""
    counts = RowCounts.of(rows)
    return [
        replace(result, counts=counts, metrics=draws.estimates(i), seed_sd=draws.deviations(i))
        for i, result in enumerate(results)
    ]


@dataclass(frozen=True, slots=True)
class ComparedSystem:
    """A system that is compared with the baseline of its group.

    Attributes:
        group: The key that it shares with the systems that it is compared with, such as its head.
        result: Its result without figures.
        similarity: (seeds, n) predictions of all rows.
    """

    group: tuple[str, bool]
    result: Result
    similarity: NDArray[np.float32]


def compare_with_baseline(
    systems: Sequence[ComparedSystem],
    baseline: str,
    rows: Scored,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
) -> Results:
    """Compute the figures of each system and its difference to the baseline, best first.

    ``baseline`` is the name of a system, or of the prompt of a system in each group. Holm's
    correction covers the differences of all groups. Controls form another family.
    """
    results = [system.result for system in systems]
    draws = _bootstrap_results(results, [system.similarity for system in systems], rows, metrics)
    groups: dict[int, list[int]] = {}
    for group in dict.fromkeys(system.group for system in systems):
        members = [i for i, system in enumerate(systems) if system.group == group]
        keys = ("name", "prompt")  # a run's folder may have the name of another system's prompt
        matches = (i for key in keys for i in members if getattr(results[i], key) == baseline)
        base = next(matches, None)
        if base is not None:
            groups[base] = [i for i in members if i != base]
    tested = [metric for metric in metrics if not metric.secondary]
    controls = [i for i, result in enumerate(results) if result.about.get("control")]
    compared = paired_differences(draws, groups, tested, controls)
    against = {i: results[base].name for base, others in groups.items() for i in others}
    return best_first(
        replace(result, difference=compared.get(i), against=against.get(i))
        for i, result in enumerate(_add_metrics(results, draws, rows))
    )


def cross_validated_gain(
    folds: int,
    without: NDArray[np.floating],
    trained: NDArray[np.floating],
    dev: Rows,
    train: Rows,
    metric: Metric,
) -> dict[str, Any]:
    """Compare scores without and with training on dev, measured by folds of dev.

    Args:
        folds: The number of folds. All rows of a sentence pair are in one fold.
        without: (n,) predictions without training on dev.
        trained: (n,) predictions, each with training on all folds except the row's own.
        dev: The n rated rows of dev.
        train: The rows of the train split, which determine the seen conditions.
        metric: The metric of the scores.

    Returns:
        The JSON value in records: ``folds``; ``n`` and ``n_pairs``; the scores ``without``,
        ``trained``, and their ``difference``, with intervals; its ``p``; and ``by_condition`` the
        same for rows whose condition occurs in train (``seen``), and for the others (``unseen``),
        if there are any.
    """

    def compare(selected: NDArray[np.bool_]) -> dict[str, Any]:
        rows = dev.take(selected)
        predicted = [without[None, selected], trained[None, selected]]
        resampled = bootstrap_metrics(predicted, rows.rating, rows.pair, [metric])
        difference = paired_differences(resampled, {0: [1]})[1][metric.name]
        gain = Estimate(difference.value, difference.low, difference.high)
        return {
            "n": len(rows),
            "n_pairs": len(rows.pair_keys()),
            "without": estimates_json(resampled.estimates(0)),
            "trained": estimates_json(resampled.estimates(1)),
            "difference": estimates_json({metric.name: gain}),
            "p": finite_or_none(difference.p),
        }

    known = set(train.take(train.rated).condition)
    seen = np.array([text in known for text in dev.condition], dtype=np.bool_)
    parts = {
        name: compare(rows) for name, rows in (("seen", seen), ("unseen", ~seen)) if rows.any()
    }
    return {"folds": folds, **compare(np.ones_like(seen)), "by_condition": parts}


def check_fold_count(dev: Rows, count: int) -> None:
    """Raise a UserError if the rated dev rows have fewer sentence pairs than folds."""
    if len(dev.pair_keys()) < count:
        raise UserError(
            f"dev has {len(dev.pair_keys())} sentence pairs with ratings, which are too few for "
            f"{count} folds. Lower --folds."
        )


Numbers = NDArray[np.integer[Any]]

#: The numbers of queries and of candidates that are scored at once; their scores take 64 MiB at
#: most.
BLOCK, TILE = 256, 65_536

#: Added scores in coordinate format: (k,) the query, (k,) the entity, (k,) the added score. Each
#: pair of query and entity occurs once.
Added = tuple[Positions, Positions, Array]


#: Returns the scores added to entities for m queries: heads (m,) and relations (m,), r or r + R. It
#: does not get the answers.
Term = Callable[[Numbers, Numbers], Added]


@dataclass(frozen=True)
class Ranks:
    """The ranks of right answers, from 1.

    Attributes:
        optimistic: (m,) ranks if the answer comes before all candidates with the same score.
        pessimistic: (m,) ranks if the answer comes after all candidates with the same score.
    """

    optimistic: Floats
    pessimistic: Floats

    def resolve_ties(self, ties: Ties = "realistic") -> Floats:
        """Return the ranks, (m,). Realistic ranks are the mean of the other two, as in PyKEEN."""
        if ties == "realistic":
            return (self.optimistic + self.pessimistic) / 2
        return self.optimistic if ties == "optimistic" else self.pessimistic


def rank(
    queries: MatrixLike,
    candidates: MatrixLike,
    triples: Numbers,
    known: KnownAnswers | None,
    terms: Sequence[Term] = (),
    exclude_head: bool = False,
) -> Ranks:
    """Rank the answer of each query among all entities.

    Memory is bounded by the scores of ``BLOCK`` queries and ``TILE`` candidates. Candidates on disk
    are read a tile at a time, once for each block of queries.

    Args:
        queries: (m, k) vectors.
        candidates: (n, k) vectors of all entities. With k = 0 scores are the terms alone.
        triples: (m, 3) head, relation (r or r + R) and answer of each query.
        known: The known answers, which are left out except for the right one; None: no answers are
            left out.
        terms: The terms that are added to scores.
        exclude_head: Whether a query's head is not a candidate, unless it is the answer.

    Raises:
        UserError: A vector is not finite.
    """
    pool = CandidatePool(candidates, known, terms, exclude_head)
    return rank_each(queries, pool, triples, ())[0]


def rank_each(
    queries: MatrixLike,
    pool: CandidatePool,
    triples: Numbers,
    variants: Sequence[Term],
    block: int = BLOCK,
) -> list[Ranks]:
    """Rank as ``rank`` does, and again with each variant as an additional last term.

    Products are computed once, and scores that a variant does not change are compared once.

    Returns:
        The ranks without a variant, followed by the ranks with each variant.
    """
    tile = pool.tile
    head, relation, answer = np.asarray(triples, dtype=np.int64).T
    above, equal = np.zeros((2, 1 + len(variants), len(answer)))
    # Queries whose answers are in the same tile are scored together.
    order = np.argsort(answer // tile, kind="stable")
    for begin in range(0, len(order), block):
        query_indices = order[begin : begin + block]
        rows, block_answers = np.arange(len(query_indices)), answer[query_indices]
        query_block = _QueryBlock(
            pool,
            _read_queries(queries, query_indices),
            head[query_indices],
            relation[query_indices],
        )
        answer_scores = query_block.scores_of(block_answers)
        variant_scores = [
            _VariantScores(
                term(head[query_indices], relation[query_indices]), block_answers, answer_scores
            )
            for term in variants
        ]
        for first in range(0, pool.n, tile):
            scores = query_block.scores(first)
            _exclude(scores, first, rows, block_answers)
            base_counts = _count_above_and_equal(scores, answer_scores)
            for number, (n_above, n_equal) in enumerate(
                [
                    base_counts,
                    *(variant.count(scores, first, *base_counts) for variant in variant_scores),
                ]
            ):
                above[number, query_indices] += n_above
                equal[number, query_indices] += n_equal
    return [Ranks(1 + a, 1 + a + b) for a, b in zip(above, equal, strict=True)]


class _VariantScores:
    """The scores of a block of m queries and of their answers, (m,), with an additional term."""

    def __init__(self, added: Added, answer: Positions, answer_scores: Array) -> None:
        self._added, self._answer_scores = added, answer_scores.copy()
        row, entity, value = added
        is_answer = entity == answer[row]
        self._answer_scores[row[is_answer]] += value[is_answer]
        self._moved = np.flatnonzero(self._answer_scores != answer_scores)

    def count(
        self, scores: Array, first: int, above: Positions, equal: Positions
    ) -> tuple[Positions, Positions]:
        """Count a tile's scores, (m, t), above and equal to each answer's score, (m,) each.

        ``above`` and ``equal`` are the counts without this term.
        """
        row, entity, value = self._added
        inside = (entity >= first) & (entity < first + scores.shape[1])
        row = row[inside]
        before = scores[row, entity[inside] - first]
        after, answer_scores = before + value[inside], self._answer_scores[row]
        counts = []
        moved = _count_above_and_equal(scores[self._moved], self._answer_scores[self._moved])
        for base_count, moved_count, compare in zip(
            (above, equal), moved, (np.greater, np.equal), strict=True
        ):
            count = base_count.copy()
            count[self._moved] = moved_count
            for sign, values in ((1, after), (-1, before)):
                count += sign * np.bincount(
                    row[compare(values, answer_scores)], minlength=len(count)
                )
            counts.append(count)
        return counts[0], counts[1]


def _count_above_and_equal(scores: Array, answer_scores: Array) -> tuple[Positions, Positions]:
    """Count the scores, (m, n), above and equal to each answer's score, (m,) each."""
    thresholds = answer_scores[:, None]
    return np.count_nonzero(scores > thresholds, axis=1), np.count_nonzero(
        scores == thresholds, axis=1
    )


def ranks_among(
    scores: NDArray[np.floating], answer: Positions, left_out: NDArray[np.bool_] | None = None
) -> Ranks:
    """Rank the answer of each query by scores of any kind.

    Args:
        scores: (m, n) the scores of each query's candidates.
        answer: (m,) the column of the right answer.
        left_out: (m, n) mask of candidates that are left out; an answer is never left out.

    Raises:
        UserError: A score that is not left out is not finite.
    """
    answer_scores = np.take_along_axis(scores, answer[:, None], axis=1)[:, 0]
    if left_out is not None:
        scores = np.where(left_out, -np.inf, scores)
        scores[np.arange(len(answer)), answer] = answer_scores
    bad = ~np.isfinite(scores)
    if left_out is not None:
        bad &= ~left_out
        bad[np.arange(len(answer)), answer] = ~np.isfinite(answer_scores)
    if bad.any():
        raise UserError(
            f"scores contain NaN or infinity: {bad.sum():,} in total, the first of query "
            f"{np.flatnonzero(bad.any(axis=1))[0]:,}. Fit the head again with a lower learning "
            "rate, or extract in float32."
        )
    above, equal = (
        counts.astype(np.float64) for counts in _count_above_and_equal(scores, answer_scores)
    )
    return Ranks(1 + above, above + equal)


def top_entities(
    queries: MatrixLike, pool: CandidatePool, head: Numbers, relation: Numbers, k: int
) -> tuple[Positions, Array]:
    """Return the k entities with the best scores for each query, and their scores, (m, k) each.

    Arguments and errors are those of ``rank``, with heads and relations as (m,). Known answers are
    left out. Entities with equal scores keep their order. If fewer than k candidates remain, the
    last scores are -inf.
    """
    rows = np.arange(len(head))
    query_block = _QueryBlock(pool, _read_queries(queries, rows), head, relation)
    entities = np.zeros((len(rows), 0), dtype=np.int64)
    best = np.zeros((len(rows), 0), dtype=np.float32)
    for first in range(0, pool.n, pool.tile):
        scores = query_block.scores(first)
        columns = np.arange(scores.shape[1])
        if scores.shape[1] > k:
            # Only scores that can be among the best k, including ties, are sorted.
            least = np.partition(scores, -k, axis=1)[:, [-k]]
            columns = np.flatnonzero((scores >= least).any(axis=0))
            scores = scores[:, columns]
        entities = np.concatenate(
            [entities, np.broadcast_to(first + columns, scores.shape)], axis=1
        )
        best = np.concatenate([best, scores], axis=1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :k]
        entities = np.take_along_axis(entities, order, axis=1)
        best = np.take_along_axis(best, order, axis=1)
    return entities, best


class CandidatePool:
    """The vectors of all entities, read a tile at a time, with the settings of their scores.

    Arguments are those of ``rank``.
    """

    def __init__(
        self,
        vectors: MatrixLike,
        known: KnownAnswers | None,
        terms: Sequence[Term] = (),
        exclude_head: bool = False,
        tile: int = TILE,
    ) -> None:
        self.vectors, self.n, self.tile = as_matrix(vectors), len(vectors), tile
        self.known, self.terms, self.exclude_head = known, terms, exclude_head
        self._last: tuple[int, Array] | None = None

    def read(self, first: int) -> Array:
        """Return a tile's vectors, (t, k), which stay in memory until another tile is read."""
        if self._last is None or self._last[0] != first:
            # Otherwise, the pages of the previous tile would count as memory in use.
            self.vectors.release()
            self._last = first, self.vectors.read(slice(first, first + self.tile))
        return self._last[1]


class _QueryBlock:
    """A block of queries: (m, k) vectors, heads (m,) and relations (m,)."""

    def __init__(
        self, pool: CandidatePool, vectors: Array, head: Numbers, relation: Numbers
    ) -> None:
        self._pool, self._vectors = pool, vectors
        self._added = [term(head, relation) for term in pool.terms]
        self._left_out = [] if pool.known is None else [pool.known.gather(head, relation)]
        if pool.exclude_head:
            self._left_out.append((np.arange(len(head)), np.asarray(head, dtype=np.int64)))
        self._last: tuple[int, Array] | None = None

    def scores_of(self, answer: Positions) -> Array:
        """Return the score, (m,), of one entity for each query, whether it is left out or not.

        The scores are read from the product that they are compared with. Computed in another way,
        they could differ in the last bit, and ties would be missed.
        """
        tile = self._pool.tile
        answer_scores = np.empty(len(answer), dtype=np.float32)
        for first in np.unique(answer // tile * tile).tolist():
            self._last = first, self._products(first)
            rows = np.flatnonzero(answer // tile * tile == first)
            answer_scores[rows] = self._last[1][rows, answer[rows] - first]
        return answer_scores

    def scores(self, first: int) -> Array:
        """Return the scores of a tile's candidates, (m, t); -inf for those that are left out."""
        if self._last is not None and self._last[0] == first:
            block_scores, self._last = self._last[1], None
        else:
            block_scores = self._products(first)
        for row, entity in self._left_out:
            _exclude(block_scores, first, row, entity)
        return block_scores

    def _products(self, first: int) -> Array:
        products: Array = self._vectors @ self._pool.read(first).T
        # Cheaper than checking all candidates, as the scores of a vector that is not finite are not
        # finite.
        if not np.isfinite(products).all():
            tile = self._pool.read(first)
            _check_finite(tile, np.arange(first, first + len(tile)), "candidate")
        for row, entity, value in self._added:
            inside = (entity >= first) & (entity < first + products.shape[1])
            products[row[inside], entity[inside] - first] += value[inside]
        return products


def _exclude(scores: Array, first: int, row: Positions, entity: Positions) -> None:
    inside = (entity >= first) & (entity < first + scores.shape[1])
    scores[row[inside], entity[inside] - first] = -np.inf


def _read_queries(queries: MatrixLike, rows: Positions) -> Array:
    """Read rows of queries in float32.

    Raises:
        UserError: A vector is not finite.
    """
    vectors = as_matrix(queries).read(rows)
    _check_finite(vectors, rows, "query")
    return vectors


def _check_finite(vectors: Array, rows: Positions, what: str) -> None:
    """Raise a UserError if a vector is not finite; ``rows`` are the numbers of the vectors."""
    bad = rows[~np.isfinite(vectors).all(axis=1)]
    # No score is above NaN, so an answer whose score is NaN would have a perfect rank.
    if len(bad):
        raise UserError(
            f"vectors contain NaN or infinity: {len(bad):,} in total, the first of {what} "
            f"{bad[0]:,}. Fit the head again with a lower learning rate, or extract in float32."
        )
