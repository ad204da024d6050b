"""Results: what a system scores on rows, as typed values, as JSON and as a pandas table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows
from llmcond.display import Displayed
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.conditions import Subset
from llmcond.evaluation.paired import RESAMPLES, Difference, Resampled, resample
from llmcond.metrics import (
    DEFAULT,
    Estimate,
    Metric,
    comparisons,
    estimates_json,
    finite,
    metric_of,
)
from llmcond.tasks import DEFAULT_TASK


@dataclass(frozen=True)
class Queries:
    """Queries whose right answers were ranked, so that ranks alone score them.

    Attributes:
        pair: (n,) the number of the example that asks each; a triple asks twice.
        unit: what messages call the examples.
        stratum: (n,) what metrics take means over, such as a dialogue's history length; None: one
            of all.
    """

    pair: NDArray[np.int64]
    unit: str = "examples"
    stratum: NDArray[np.int64] | None = None

    @property
    def rated(self) -> NDArray[np.bool_]:
        """Return (n,) that all count."""
        return np.ones(len(self.pair), dtype=np.bool_)

    @property
    def rating(self) -> NDArray[np.float64]:
        """Return (n,) the strata as metrics take them: ranks are compared with nothing."""
        stratum = np.zeros(len(self.pair)) if self.stratum is None else self.stratum
        return stratum.astype(np.float64)


#: Examples that predictions are compared with; the bootstrap draws those of one pair together.
Scored = Rows | Queries


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The rows behind figures.

    Attributes:
        n: rated rows, which all metrics are computed on.
        n_dropped: unrated rows.
        n_pairs: sentence pairs of the rated rows, which the bootstrap resamples.
        n_compared: comparisons of two conditions on one sentence pair that accuracy counts.
        n_tied: comparisons left out of it, their ratings being equal.
        unit: of queries, what messages call the examples that ask them, ``n_pairs`` in number;
            empty for rated rows.
    """

    n: int = 0
    n_dropped: int = 0
    n_pairs: int = 0
    n_compared: int = 0
    n_tied: int = 0
    unit: str = ""

    @classmethod
    def of(cls, rows: Scored) -> Counts:
        """Count rows, or queries."""
        if isinstance(rows, Queries):
            n_pairs = len(np.unique(rows.pair))
            return cls(n=len(rows.pair), n_pairs=n_pairs, unit=rows.unit)
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
        """Return what messages call the groups that the bootstrap resamples."""
        return self.unit or "sentence pairs"

    @property
    def text(self) -> str:
        """Return what figures are computed on, for titles."""
        what = "queries" if self.unit else "rated rows"
        return f"{self.n:,} {what} of {self.n_pairs:,} {self.groups}"

    @property
    def details(self) -> str:
        """Return what figures are computed on, and of rated rows what was left out."""
        if self.unit:
            return self.text
        return (
            f"{self.n:,} rows of {self.n_pairs:,} {self.groups}, {self.n_dropped:,} unrated "
            f"dropped; accuracy over {self.n_compared:,} comparisons, {self.n_tied:,} tied left out"
        )

    def to_json(self) -> dict[str, int]:
        """Return what results have as JSON."""
        counts = asdict(self)
        del counts["unit"]
        return {"n": self.n} if self.unit else counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Displayed):
    """What one system (a head, or features as they are) scores on the rows of a split.

    Attributes:
        name: label, unique among results.
        head: recipe; ``none`` is zero-shot.
        prompts: names of the prompts whose features it takes.
        subtract: whether unconditional features are subtracted.
        split: what was scored.
        counts: its rows.
        metrics: name -> figure with its 95 % interval, the most important first.
        by_condition: rows whose condition training had (``seen``) and had not (``unseen``); of
            fitted heads, where both occur.
        new_sentences: the score on rows that share no sentence with what was trained on; None
            where no row shares one.
        seed_sd: metric -> standard deviation over seeds; None for a single seed.
        dim: size of the embeddings; None: that of the features.
        seeds: of the fits that figures are means of; none for zero-shot.
        fits: what is recorded of each fit.
        task: that the rows belong to.
    """

    name: str
    head: str
    prompts: tuple[str, ...]
    subtract: bool
    split: str
    counts: Counts = Counts()
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    by_condition: Mapping[str, Subset] = field(default_factory=dict)
    new_sentences: Result | None = None
    seed_sd: Mapping[str, float | None] = field(default_factory=dict)
    dim: int | None = None
    seeds: tuple[int, ...] = ()
    fits: tuple[Mapping[str, Any], ...] = ()
    task: str = DEFAULT_TASK

    @property
    def prompt(self) -> str:
        """Return the names of the prompts, joined by +."""
        return "+".join(self.prompts)

    @property
    def title(self) -> str:
        """Return the head's own name if the user gave it one, else its recipe's."""
        own = self.name in (default_name(self.head, self.prompts, plain) for plain in (False, True))
        return self.head if own else self.name

    @property
    def primary(self) -> Metric:
        """Return the metric that decides which result is best."""
        return metric_of(next(iter(self.metrics)))

    @property
    def main(self) -> Estimate:
        """Return the figure of the primary metric."""
        return self.metrics[self.primary.name]

    def identity_json(self) -> dict[str, Any]:
        """Return what a result is of, as JSON."""
        own = {key: getattr(self, key) for key in ("name", "head", "prompt", "subtract", "split")}
        return {**own, "task": self.task, **self.counts.to_json(), "dim": self.dim}

    def metrics_json(self) -> dict[str, Any]:
        """Return the metrics as JSON, with their intervals and standard deviations over seeds."""
        found: dict[str, Any] = {}
        for name, one in self.metrics.items():
            found |= estimates_json({name: one})
            found[f"{name}_sd"] = finite(self.seed_sd.get(name))
        return found

    def scored_json(self, **about: Any) -> dict[str, Any]:
        """Return the result of a single fit as JSON: its identity, ``about``, and its metrics."""
        return {
            **self.identity_json(),
            **about,
            **estimates_json(self.metrics),
            "seed": self.seeds[0] if self.seeds else None,
            "selected_on": self.fits[0].get("selected_on") if self.fits else None,
        }

    def to_json(self) -> dict[str, Any]:
        """Return it as ``evaluate --json`` prints it."""
        return {
            **self.scored_json(),
            **{
                name: {"n": part.n, self.primary.name: finite(part.score.value)}
                for name, part in self.by_condition.items()
            },
            **self._new_sentences_json(),
        }

    def _new_sentences_json(self) -> dict[str, Any]:
        part = self.new_sentences
        if part is None:
            return {}
        figures = {"n_pairs": part.counts.n_pairs, **estimates_json(part.metrics)}
        return {"n_unseen_sentences": part.counts.n, "unseen_sentences": figures}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedResult(Result):
    """A result compared with that of a baseline.

    Attributes:
        control: which control its prompt is; empty for none.
        difference: metric -> difference to the baseline; None where it is not compared.
        against: name of the result that it is a difference to.
    """

    control: str = ""
    difference: Mapping[str, Difference] | None = None
    against: str | None = None

    @classmethod
    def of(cls, result: Result) -> ComparedResult:
        """Return a result that is not compared with anything."""
        return cls(**{own.name: getattr(result, own.name) for own in fields(Result)})

    def to_json(self) -> dict[str, Any]:
        """Return it as ``compare-prompts --json`` prints it."""
        differences = {
            name: {
                key: finite(value) if isinstance(value, float) else value
                for key, value in asdict(one).items()
            }
            for name, one in (self.difference or {}).items()
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
class SweptResult(Result):
    """A result of one point of a grid: means over seeds.

    Attributes:
        settings: what the grid varies, and its values here.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``sweep --json`` prints it."""
        return {
            **self.identity_json(),
            **self.metrics_json(),
            "settings": dict(self.settings),
            "seeds": list(self.seeds),
            "best_epochs": [fit.get("best_epoch") for fit in self.fits],
            "curves": [fit.get("curve") for fit in self.fits],
            "steps_per_epoch": self.fits[0].get("steps_per_epoch"),
        }


def default_name(recipe: str, prompts: Sequence[str], plain: bool) -> str:
    """Return the name of a head that the user gives none: ``RECIPE@PROMPT``, ``+c`` if plain."""
    return f"{recipe}@{'+'.join(prompts)}" + ("+c" if plain else "")


R_co = TypeVar("R_co", bound=Result, covariant=True)
R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Results(Displayed, Sequence[R_co], Generic[R_co]):
    """Results of several systems on the same rows."""

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
        """Return what ``--json`` prints."""
        return {"results": [result.to_json() for result in self.rows]}

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame, a row for each result; an LlmcondError without pandas."""
        try:
            import pandas as pd  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise LlmcondError("to_pandas() needs pandas: pip install pandas") from error
        rows = [result.to_json() for result in self.rows]
        for row, result in zip(rows, self.rows, strict=True):
            for name in result.metrics:
                row[f"{name}_low"], row[f"{name}_high"] = row.pop(f"{name}_ci")
        return pd.DataFrame(rows)

    def _displayed(self) -> dict[str, Any]:
        return {"results": [_row(result) for result in self.rows]}


def _row(result: Result) -> dict[str, str]:
    """Return what a table shows of a result: what it is of, and its figures."""
    figures = {}
    for name, one in result.metrics.items():
        metric = metric_of(name)
        interval = f"[{metric.show(one.low)}, {metric.show(one.high)}]"
        figures[metric.heading] = f"{metric.show(one.value)} {interval}"
    subtracted = "yes" if result.subtract else "no"
    return {"head": result.title, "prompt": result.prompt, "minus c": subtracted, **figures}


@dataclass(frozen=True)
class FittedResults(Displayed, Generic[R_co]):
    """Results of systems, heads among them that were fitted to be scored.

    Attributes:
        results: best first.
        failures: a line for each fit that failed; its result lacks that seed.
    """

    results: Results[R_co]
    failures: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {**self.results.to_json(), "failures": list(self.failures)}

    def to_pandas(self) -> Any:
        """Return the results as a pandas DataFrame."""
        return self.results.to_pandas()

    def _displayed(self) -> dict[str, Any]:
        return {**self.results._displayed(), "failures": ", ".join(self.failures)}


def best_first(results: Iterable[R]) -> Results[R]:
    """Return results by their primary metric, undefined ones last."""

    def key(result: R) -> float:
        value = result.main.value
        if math.isnan(value):
            return math.inf
        return -value if result.primary.higher_is_better else value

    return Results(tuple(sorted(results, key=key)))


_RESERVED = {field.name for kind in (ComparedResult, SweptResult) for field in fields(kind)}


def score(
    results: Sequence[R],
    similarity: Sequence[NDArray[np.floating]],
    rows: Scored,
    metrics: Sequence[Metric] = DEFAULT,
    resamples: int = RESAMPLES,
) -> list[R]:
    """Return results, given without figures, with their figures on some rows.

    ``similarity`` are for each (seeds, n) predictions of all rows, unrated ones included. With 0
    ``resamples`` of the bootstrap there are no intervals.

    Raises:
        UserError: predictions that are not finite, or a metric with the name of another column.
    """
    if not rows.rated.any():
        nothing = {metric.name: Estimate(math.nan) for metric in metrics}
        return [replace(one, counts=Counts.of(rows), metrics=nothing) for one in results]
    return with_figures(results, resampled(results, similarity, rows, metrics, resamples), rows)


def resampled(
    results: Sequence[Result],
    similarity: Sequence[NDArray[np.floating]],
    rows: Scored,
    metrics: Sequence[Metric] = DEFAULT,
    resamples: int = RESAMPLES,
) -> Resampled:
    """Compute metrics on draws of the rated rows; arguments and errors as in :func:`score`."""
    for metric in metrics:
        if metric.name in _RESERVED | {"n", "seed", "prompt"}:
            raise UserError(f"a metric cannot be called {metric.name}: results have a column so.")
    rated = rows.rated
    systems = [predicted[:, rated] for predicted in similarity]
    for result, own in zip(results, systems, strict=True):
        bad = int((~np.isfinite(own)).any(axis=0).sum())
        if bad:
            raise UserError(f"{result.name} predicts NaN or infinity for {bad:,} rated rows.")
    return resample(systems, rows.rating[rated], rows.pair[rated], metrics, resamples)


def with_figures(results: Sequence[R], found: Resampled, rows: Scored) -> list[R]:
    """Return results with the figures that :func:`resampled` found on some rows."""
    counts = Counts.of(rows)
    return [
        replace(one, counts=counts, metrics=found.estimates(i), seed_sd=found.deviations(i))
        for i, one in enumerate(results)
    ]
