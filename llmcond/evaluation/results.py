"""Results: the scores of systems on rows, as typed values, as JSON and as a pandas table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows
from llmcond.display import Displayed, make_frame
from llmcond.errors import UserError
from llmcond.evaluation.conditions import Subset
from llmcond.evaluation.paired import (
    RESAMPLES,
    BootstrapMetrics,
    PairedDifference,
    bootstrap_metrics,
)
from llmcond.metrics import (
    DEFAULT_METRICS,
    Estimate,
    Metric,
    comparisons,
    estimates_json,
    finite_or_none,
    get_metric,
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
        by_condition: The score on rows whose condition occurs in training (``seen``), and on the
            other rows (``unseen``). Only for fitted heads, and only if both occur.
        new_sentences: The score on rows that share no sentence with the training rows; None if no
            row shares a sentence with them.
        shared_sentences: The score on the other rows, which share a sentence with the training
            rows; None if ``new_sentences`` is.
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
    by_condition: Mapping[str, Subset] = field(default_factory=dict)
    new_sentences: Result | None = None
    shared_sentences: Result | None = None
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

    def identity_json(self) -> dict[str, Any]:
        """Return the JSON of the fields that identify the result, with the counts of rows.

        Returns:
            ``name``, ``head``, ``prompt``, ``subtract``, ``split``, ``task``, the counts, ``dim``.
        """
        values = {
            key: getattr(self, key) for key in ("name", "head", "prompt", "subtract", "split")
        }
        return {**values, "task": self.task, **self.counts.to_json(), "dim": self.dim}

    def metrics_json(self) -> dict[str, Any]:
        """Return the JSON of the metrics.

        Returns:
            For each metric its value, its interval (``METRIC_ci``) and its standard deviation over
            seeds (``METRIC_sd``).
        """
        figures: dict[str, Any] = {}
        for name, estimate in self.metrics.items():
            figures |= estimates_json({name: estimate})
            figures[f"{name}_sd"] = finite_or_none(self.seed_sd.get(name))
        return figures

    def scored_json(self, **about: Any) -> dict[str, Any]:
        """Return the JSON of the result of a single fit.

        Args:
            **about: Further values to include after the identity.

        Returns:
            The identity, ``about``, the metrics with intervals, ``seed`` and ``selected_on``.
        """
        return {
            **self.identity_json(),
            **about,
            **estimates_json(self.metrics),
            "seed": self.seeds[0] if self.seeds else None,
            "selected_on": self.fits[0].get("selected_on") if self.fits else None,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``evaluate`` for this result.

        Returns:
            The identity, metrics with intervals, the seed, and the scores by condition and on new
            sentences if there are any.
        """
        return {
            **self.scored_json(),
            **self._held_out_json(),
            **{
                name: {"n": part.n, self.primary.name: finite_or_none(part.score.value)}
                for name, part in self.by_condition.items()
            },
            **self._new_sentences_json(),
        }

    def _new_sentences_json(self) -> dict[str, Any]:
        parts = {"unseen": self.new_sentences, "shared": self.shared_sentences}
        values: dict[str, Any] = {}
        for name, part in parts.items():
            if part is not None:
                figures = {"n_pairs": part.counts.n_pairs, **estimates_json(part.metrics)}
                values |= {f"n_{name}_sentences": part.counts.n, f"{name}_sentences": figures}
        return values

    def _held_out_json(self) -> dict[str, Any]:
        if self.held_out is None:
            return {}
        return estimates_json({f"held_out_{self.primary.name}": self.held_out})


def difference_json(difference: PairedDifference) -> dict[str, Any]:
    """Return a difference as a JSON object, with None for undefined figures."""
    return {
        key: finite_or_none(value) if isinstance(value, float) else value
        for key, value in asdict(difference).items()
    }


@dataclass(frozen=True, slots=True)
class ComparedSubset:
    """The primary metric of a system on a subset of rows or queries.

    Attributes:
        n: The number of rows or queries.
        main: The figure with its interval.
        difference: The difference to the baseline; None for the baseline.
    """

    n: int
    main: Estimate
    difference: PairedDifference | None

    def to_json(self, metric: Metric) -> dict[str, Any]:
        """Return the JSON value in the output of ``compare``."""
        difference = self.difference and difference_json(self.difference)
        return {"n": self.n, **estimates_json({metric.name: self.main}), "difference": difference}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedResult(Result):
    """A result that is compared with the result of a baseline.

    It has the attributes of ``Result``, and:

    Attributes:
        control: The kind of control of its prompt; empty if the prompt is not a control.
        difference: The difference to the baseline by metric; None if it is not compared.
        against: The name of the baseline's result; None if it is not compared.

    Examples:
        >>> from llmcond import ComparedResult, Estimate, Result
        >>> result = Result(
        ...     name="none@cond", head="none", prompts=("cond",), subtract=True, split="dev",
        ...     metrics={"spearman": Estimate(0.25)},
        ... )
        >>> compared = ComparedResult.of(result)
        >>> compared.main.value, compared.difference
        (0.25, None)
    """

    control: str = ""
    difference: Mapping[str, PairedDifference] | None = None
    against: str | None = None

    @classmethod
    def of(cls, result: Result) -> ComparedResult:
        """Convert a result to one that is not compared with a baseline.

        Args:
            result: The result.

        Returns:
            The result with the same fields, and without a difference.
        """
        return cls(
            **{
                result_field.name: getattr(result, result_field.name)
                for result_field in fields(Result)
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``compare-prompts`` for this result.

        Returns:
            The identity, metrics with intervals and deviations, the seeds, and the difference.
        """
        differences = {
            name: difference_json(difference)
            for name, difference in (self.difference or {}).items()
        }
        return {
            **self.identity_json(),
            **self.metrics_json(),
            "seeds": list(self.seeds),
            "control": self.control,
            "difference": None if self.difference is None else differences,
            "against": self.against,
            **self._new_sentences_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult(ComparedResult):
    """A result of one of several systems, which may come from different runs.

    It has the attributes of ``ComparedResult``, and:

    Attributes:
        heads: The run and the name of each head that the system consists of, one for each seed.
        encoder: The name of the encoder.
        subsets: The figures of subsets of rows or queries, by the name of the subset: the number of
            rows, the primary metric, and its difference to the baseline (not corrected).

    Examples:
        >>> from llmcond import Estimate, SystemResult
        >>> result = SystemResult(
        ...     name="runs/a:mlp@routed", head="mlp", prompts=("routed",), subtract=True,
        ...     split="dev", metrics={"spearman": Estimate(0.6)},
        ...     heads=(("runs/a", "mlp@routed"),), encoder="minilm",
        ... )
        >>> result.title
        'runs/a:mlp@routed'
    """

    heads: tuple[tuple[str, str], ...] = ()
    encoder: str = ""
    subsets: Mapping[str, ComparedSubset] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``compare`` for this result.

        Returns:
            The JSON of a compared result, the heads, the encoder and the subsets.
        """
        return {
            **ComparedResult.to_json(self),
            "heads": [{"run": run, "head": head} for run, head in self.heads],
            "encoder": self.encoder,
            "subsets": {name: part.to_json(self.primary) for name, part in self.subsets.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptResult(Result):
    """The result of one point of a grid, as means over seeds.

    It has the attributes of ``Result``, and:

    Attributes:
        settings: The settings that the grid varies, with their values at this point.

    Examples:
        >>> from llmcond import Estimate, SweptResult
        >>> result = SweptResult(
        ...     name="linear@routed", head="linear", prompts=("routed",), subtract=True,
        ...     split="dev", metrics={"spearman": Estimate(0.5)}, settings={"dropout": 0.1},
        ... )
        >>> result.settings["dropout"], result.main.value
        (0.1, 0.5)
    """

    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``sweep`` for this result.

        Returns:
            The identity, metrics with intervals and deviations, the settings and seeds, and the
            best epoch, the curve and the number of steps of the fits.
        """
        return {
            **self.identity_json(),
            **self.metrics_json(),
            **self._held_out_json(),
            "settings": dict(self.settings),
            "seeds": list(self.seeds),
            "best_epochs": [fit.get("best_epoch") for fit in self.fits],
            "curves": [fit.get("curve") for fit in self.fits],
            "steps_per_epoch": self.fits[0].get("steps_per_epoch"),
        }


@dataclass(frozen=True, slots=True)
class SettingsChoice:
    """The held-out score of the choice of the best settings and epoch on dev.

    Attributes:
        metric: The metric that chooses.
        score: The score on dev if settings and epochs are chosen on nine tenths of dev, and the
            remaining tenth is predicted.
        folds: How many of the tenths each result was chosen for, by the name and the settings.
    """

    metric: Metric
    score: Estimate
    folds: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value in the output of ``sweep``."""
        return {**estimates_json({self.metric.name: self.score}), "folds": dict(self.folds)}


def default_name(recipe: str, prompts: Sequence[str], plain: bool) -> str:
    """Return the default name of a head: ``RECIPE@PROMPT``, followed by ``+c`` if plain.

    A head is plain if nothing is subtracted from joint features.
    """
    return f"{recipe}@{'+'.join(prompts)}" + ("+c" if plain else "")


R_co = TypeVar("R_co", bound=Result, covariant=True)
R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Results(Displayed, Sequence[R_co], Generic[R_co]):
    """The results of several systems on the same rows, as a sequence.

    Attributes:
        rows: The results.

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

    rows: tuple[R_co, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> R_co: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[R_co, ...]: ...

    def __getitem__(self, index: int | slice) -> R_co | tuple[R_co, ...]:
        return self.rows[index]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of the command.

        Returns:
            A list of results under the key ``results``.
        """
        return {"results": [result.to_json() for result in self.rows]}

    def to_pandas(self) -> Any:
        """Convert the results to a pandas DataFrame with a row for each result.

        Returns:
            A DataFrame whose columns are the keys of ``to_json``, with the columns ``METRIC_low``
            and ``METRIC_high`` for intervals. The names of values in another value start with its
            name: ``settings_dim``, ``unseen_sentences_spearman``.

        Raises:
            LlmcondError: pandas is not installed.
        """
        return make_frame([flatten_json(result.to_json()) for result in self.rows])

    def _displayed(self) -> dict[str, Any]:
        return {"results": [_table_row(result) for result in self.rows]}


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


def _table_row(result: Result) -> dict[str, Any]:
    """Return the row of a result in a table: head, prompt, subtraction and figures."""
    figures = {}
    for name, estimate in result.metrics.items():
        metric = get_metric(name)
        interval = f"[{metric.format(estimate.low)}, {metric.format(estimate.high)}]"
        figures[metric.heading] = f"{metric.format(estimate.value)} {interval}"
    subtracted = "yes" if result.subtract else "no"
    identity = {"head": result.title, "prompt": result.prompt, "minus c": subtracted}
    return {**identity, **figures, **_difference_cells(result)}


def _difference_cells(result: Result) -> dict[str, Any]:
    """Return the difference of a compared result to the baseline; nothing for other results."""
    metric = result.primary
    differences = result.difference if isinstance(result, ComparedResult) else None
    difference = (differences or {}).get(metric.name)
    if difference is None:
        return {}
    interval = f"[{metric.format(difference.low)}, {metric.format(difference.high)}]"
    return {
        "difference": f"{metric.format(difference.value, signed=True)} {interval}",
        "p": finite_or_none(difference.p_holm),
        "verdict": difference.verdict,
    }


@dataclass(frozen=True)
class FittedResults(Displayed, Generic[R_co]):
    """The results of systems, some of which were fitted for this comparison.

    Attributes:
        results: The results, best first.
        failures: One line for each fit that failed. The result lacks this seed.
    """

    results: Results[R_co]
    failures: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of the command."""
        return {**self.results.to_json(), "failures": list(self.failures)}

    def to_pandas(self) -> Any:
        """Return the results as a pandas DataFrame."""
        return self.results.to_pandas()

    def _displayed(self) -> dict[str, Any]:
        return {**self.results._displayed(), "failures": ", ".join(self.failures)}


def best_first(results: Iterable[R]) -> Results[R]:
    """Sort results by their primary metric, best first and undefined ones last."""

    def key(result: R) -> float:
        value = result.main.value
        if math.isnan(value):
            return math.inf
        return -value if result.primary.higher_is_better else value

    return Results(tuple(sorted(results, key=key)))


_RESERVED = {field.name for kind in (SystemResult, SweptResult) for field in fields(kind)}


def score_results(
    results: Sequence[R],
    similarity: Sequence[NDArray[np.floating]],
    rows: Scored,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    resamples: int = RESAMPLES,
) -> list[R]:
    """Add the figures on rows to results that have none.

    ``similarity`` holds, for each result, the (seeds, n) predictions of all rows, including unrated
    ones. With ``resamples=0`` there are no intervals.

    Raises:
        UserError: Predictions are not finite, or a metric has the name of another column.
    """
    if not rows.rated.any():
        nothing = {metric.name: Estimate(math.nan) for metric in metrics}
        return [replace(result, counts=RowCounts.of(rows), metrics=nothing) for result in results]
    return add_metrics(
        results, bootstrap_results(results, similarity, rows, metrics, resamples), rows
    )


def bootstrap_results(
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
        if metric.name in _RESERVED | {"n", "seed", "prompt"}:
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
    crossed = rows.crossed if isinstance(rows, RankedQueries) else ()
    return bootstrap_metrics(
        systems, rows.rating[rated], rows.pair[rated], metrics, resamples, crossed=crossed
    )


def add_metrics(results: Sequence[R], draws: BootstrapMetrics, rows: Scored) -> list[R]:
    """Add the figures that ``bootstrap_results`` computed on rows to results."""
    counts = RowCounts.of(rows)
    return [
        replace(result, counts=counts, metrics=draws.estimates(i), seed_sd=draws.deviations(i))
        for i, result in enumerate(results)
    ]
