"""Whether embeddings follow conditions: paired triples, nearest neighbours and clusters of texts.

What ignores the condition is right under exactly one condition of each paired triple, so that it
has an accuracy of exactly 50 %, and is never right under both.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy
from scipy.stats import t as student

from llmcond.data.aspects import AspectSample
from llmcond.evaluation.paired import LEVEL, MIN_PAIRS, ROUNDING, bootstrap_metrics
from llmcond.metrics import Estimate, Floats, Indices, Metric, estimates_json, finite_or_none

#: Conditions that are clustered have values of so many texts each, and so many such values.
LEAST_TEXTS, LEAST_VALUES, MOST_VALUES = 8, 3, 10
#: Texts of a condition, and conditions of a set, that are clustered at most.
MOST_TEXTS, MOST_CONDITIONS = 240, 6
#: K-means runs of each condition, from one start each.
RUNS = 3
#: Texts without a label that there must be, to score what labels bring.
LEAST_SCORED = 20

#: Cosines this near to each other are equal: they differ by the rounding of float32.
_TIE = 1e-7
_DRAWS = 1_000

Row = tuple[int, str]


class ConditionedVectors:
    """The vectors of texts under conditions, scaled to unit length; zero vectors stay zero."""

    def __init__(self, rows: Sequence[Row], vectors: NDArray[Any]) -> None:
        """Take (n, d) vectors of n rows, each a text's position and a condition."""
        self._place = {row: i for i, row in enumerate(rows)}
        self._vectors = _unit(np.asarray(vectors, dtype=np.float64))

    def under(self, condition: str, positions: Iterable[int]) -> Floats:
        """Return (k, d) the vectors of k texts under a condition."""
        return self._vectors[[self._place[position, condition] for position in positions]]


def _unit(vectors: Floats) -> Floats:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Floats = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > ROUNDING)
    return unit


class ClusterTexts(NamedTuple):
    """Texts that are clustered under a condition: their positions and values, n of both."""

    positions: list[int]
    values: list[str]


def cluster_texts(sample: AspectSample) -> dict[str, ClusterTexts]:
    """Return the texts to cluster by condition: those of 3 to 10 values of 8 or more texts.

    Of more values the ten commonest are taken, of more than 240 texts as many of each value, and
    of more than six conditions those with the most texts.
    """
    found = {}
    for condition in sorted(sample.conditions):
        by_value = _by_value(sample, condition).values()
        large = [positions for positions in by_value if len(positions) >= LEAST_TEXTS]
        large = sorted(large, key=len, reverse=True)[:MOST_VALUES]
        if len(large) < LEAST_VALUES:
            continue
        rng = random.Random(0)  # nothing is secret here
        most = max(LEAST_TEXTS, MOST_TEXTS // len(large))
        taken = [rng.sample(own, most) if len(own) > most else own for own in large]
        positions = sorted(position for own in taken for position in own)
        values = [sample.texts[position].attributes[condition] for position in positions]
        found[condition] = ClusterTexts(positions, values)
    largest = sorted(found, key=lambda condition: -len(found[condition].positions))
    return {condition: found[condition] for condition in largest[:MOST_CONDITIONS]}


def _by_value(sample: AspectSample, condition: str) -> dict[str, list[int]]:
    """Return the positions of the texts that have each value of a condition."""
    found: dict[str, list[int]] = defaultdict(list)
    for position, text in enumerate(sample.texts):
        if condition in text.attributes:
            found[text.attributes[condition]].append(position)
    return found


def _neighbourhoods(sample: AspectSample) -> dict[str, list[int]]:
    """Return the positions of all texts that have a condition in which a neighbour can be right."""
    found = {}
    for condition in sorted(sample.conditions):
        by_value = _by_value(sample, condition)
        if len(by_value) > 1 and max(map(len, by_value.values())) > 1:
            found[condition] = sorted(i for own in by_value.values() for i in own)
    return found


def needed_rows(sample: AspectSample) -> list[Row]:
    """Return every text and condition whose vector the figures of a sample need, sorted."""
    rows: set[Row] = set()
    for triple in sample.triples:
        for position in (triple.anchor, triple.first, triple.second):
            rows |= {(position, triple.condition), (position, triple.other)}
    # Texts that are clustered under a condition are among those whose neighbours are looked for.
    for condition, positions in _neighbourhoods(sample).items():
        rows |= {(position, condition) for position in positions}
    return sorted(rows)


# -- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AspectFigures:
    """How well embeddings of one set follow its conditions; fractions with 95 % intervals.

    Attributes:
        accuracy: share of right judgements of paired triples, two each; ties count one half.
        both: share of triples that are right under both conditions.
        nearest: share of texts whose nearest other text has the same value of the condition.
        chance: what ``nearest`` would be with neighbours drawn at random.
        v_measure: mean over the conditions that are clustered.
        counts: triples, their anchors, neighbours looked for, and conditions clustered.
        conditions: the figures of each condition.
    """

    accuracy: Estimate
    both: Estimate
    nearest: Estimate
    chance: float
    v_measure: Estimate
    counts: Mapping[str, int]
    conditions: Mapping[str, Mapping[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON has them; null where one is undefined."""
        figures = estimates_json({name: getattr(self, name) for name in FIGURES})
        return {**figures, "chance": finite_or_none(self.chance), **self.counts}


#: The names of the figures that have intervals.
FIGURES = ("accuracy", "both", "nearest", "v_measure")


def measure(sample: AspectSample, vectors: ConditionedVectors, seed: int = 0) -> AspectFigures:
    """Compute all figures of a sample; undefined ones are NaN.

    Args:
        sample: texts, conditions and triples.
        vectors: those of :func:`needed_rows`.
        seed: random seed of K-means and of the bootstrap.
    """
    judged = judge_triples(sample, vectors)
    anchors = np.array([triple.anchor for triple in sample.triples], dtype=np.int64)
    neighbours = find_neighbours(sample, vectors)
    clusters = cluster(sample, vectors, seed)
    by_condition: dict[str, dict[str, float]] = defaultdict(dict)
    found: dict[str, list[float]] = defaultdict(list)
    for triple, (first, second) in zip(sample.triples, judged.tolist(), strict=True):
        found[triple.condition].append(first)
        found[triple.other].append(second)
    for condition, own in found.items():
        by_condition[condition] |= {"accuracy": float(np.mean(own)), "n_judged": len(own)}
    for condition, _, right, chance in neighbours:
        hits = {"nearest": float(right.mean()), "chance": float(chance.mean())}
        by_condition[condition] |= {**hits, "n_nearest": len(right)}
    for clustering in clusters:
        by_condition[clustering.condition]["v_measure"] = float(clustering.v_measure().mean())
    texts, hit, chances = (
        np.concatenate([np.empty(0), *(own[column] for own in neighbours)]) for column in (1, 2, 3)
    )
    # Whatever ignores the condition has these two figures on any triples: they have no error.
    is_blind = len(judged) > 0 and bool((judged.sum(axis=1) == 1).all())
    both = (judged == 1).all(axis=1).astype(np.float64)
    return AspectFigures(
        accuracy=_BLIND[0] if is_blind else _share(judged.mean(axis=1), anchors, seed),
        both=_BLIND[1] if is_blind else _share(both, anchors, seed),
        nearest=_share(hit, texts, seed),
        chance=float(chances.mean()) if len(chances) else math.nan,
        v_measure=_mean_v_measure(clusters, len(sample.texts), seed),
        counts={
            "n_triples": len(judged),
            "n_anchors": len(np.unique(anchors)),
            "n_nearest": len(hit),
            "n_clustered": len(clusters),
        },
        conditions=dict(sorted(by_condition.items())),
    )


#: Accuracy, and the share that is right under both conditions, of what ignores them.
_BLIND = Estimate(0.5, 0.5, 0.5), Estimate(0.0, 0.0, 0.0)

_SHARE = Metric("share", lambda v, _, __: float(v.mean()), least=0, most=1, by_row=lambda v: v)


def _share(values: Floats, groups: Indices, seed: int) -> Estimate:
    """Return the mean of values between 0 and 1, with an interval by resampling their groups."""
    if not len(values):
        return Estimate(math.nan)
    found = bootstrap_metrics([values[None]], np.zeros(len(values)), groups, [_SHARE], seed=seed)
    return found.estimates(0)["share"]


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over data sets, whose errors are independent; undefined ones are left out."""
    defined = [own for own in estimates if not math.isnan(own.value)]
    if not defined:
        return Estimate(math.nan)
    value = float(np.mean([own.value for own in defined]))
    # The longer side: the other may have been cut at the least or the most that is possible.
    half = [max(own.high - own.value, own.value - own.low) for own in defined]
    error = float(np.linalg.norm(half)) / len(half)
    return Estimate(value, max(value - error, 0.0), min(value + error, 1.0))


# -- triples and neighbours --------------------------------------------------------------------


def judge_triples(sample: AspectSample, vectors: ConditionedVectors) -> Floats:
    """Return (n, 2) whether each triple is right under its condition, and under the other one.

    1 is right, 0 is wrong, and one half is a tie.
    """
    judged = np.empty((len(sample.triples), 2))
    for i, triple in enumerate(sample.triples):
        positions = triple.anchor, triple.first, triple.second
        for j, condition in enumerate((triple.condition, triple.other)):
            anchor, first, second = vectors.under(condition, positions)
            nearer = float((anchor * first).sum() - (anchor * second).sum())
            judged[i, j] = 0.5 if abs(nearer) <= _TIE else float((nearer > 0) == (j == 0))
    return judged


class Neighbours(NamedTuple):
    """Nearest other texts under a condition, of the texts whose value others have as well.

    Attributes:
        positions: (n,) of these texts.
        right: (n,) whether the nearest other text has the same value; the share of those that do
            where several are equally near.
        chance: (n,) the share of all other texts that have the same value.
    """

    condition: str
    positions: Indices
    right: Floats
    chance: Floats


def find_neighbours(sample: AspectSample, vectors: ConditionedVectors) -> list[Neighbours]:
    """Look for the nearest other text under each condition that two or more values have."""
    found = []
    for condition, positions in _neighbourhoods(sample).items():
        values = np.array([sample.texts[i].attributes[condition] for i in positions], dtype=object)
        points = vectors.under(condition, positions)
        cosines = points @ points.T
        np.fill_diagonal(cosines, -np.inf)
        nearest = cosines >= cosines.max(axis=1, keepdims=True) - _TIE
        same = values[:, None] == values
        np.fill_diagonal(same, False)
        shares = same.any(axis=1)
        right = (nearest & same).sum(axis=1) / nearest.sum(axis=1)
        chance = same.sum(axis=1) / (len(values) - 1)
        found.append(
            Neighbours(condition, np.array(positions)[shares], right[shares], chance[shares])
        )
    return found


# -- clusters ----------------------------------------------------------------------------------


class Clustering(NamedTuple):
    """Texts clustered under a condition: (n,) positions and values, (runs, n) clusters."""

    condition: str
    positions: Indices
    values: Indices
    clusters: NDArray[np.int64]

    def v_measure(self, weights: Floats | None = None) -> Floats:
        """Return the mean over runs of the V-measure, for each of b rows of weights of texts.

        ``weights``, (b, n), say how often each text counts; None: once, which gives one figure.
        """
        if weights is None:
            weights = np.ones((1, len(self.values)))
        runs = []
        for clusters in self.clusters:
            cells = clusters * (self.values.max() + 1) + self.values
            both, of_clusters, of_values = (
                _entropy(weights, labels) for labels in (cells, clusters, self.values)
            )
            total = of_clusters + of_values
            shared = 2 * (total - both)
            runs.append(np.divide(shared, total, out=np.ones_like(total), where=total > ROUNDING))
        return np.asarray(np.mean(runs, axis=0))


def _entropy(weights: Floats, labels: Indices) -> Floats:
    """Return (b,) the entropies in nats of (n,) labels, for (b, n) weights."""
    _, columns = np.unique(labels, return_inverse=True)
    counts = weights @ np.eye(columns.max() + 1)[columns]
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.asarray(-xlogy(shares, shares).sum(axis=1))


def cluster(sample: AspectSample, vectors: ConditionedVectors, seed: int = 0) -> list[Clustering]:
    """Cluster centred and normalised vectors by K-means, with K the number of values."""
    found = []
    for condition, texts in cluster_texts(sample).items():
        points = vectors.under(condition, texts.positions)
        points = _unit(points - points.mean(axis=0))
        values = np.unique(texts.values, return_inverse=True)[1]
        runs = [_kmeans(points, int(values.max()) + 1, seed + run) for run in range(RUNS)]
        found.append(Clustering(condition, np.array(texts.positions), values, np.array(runs)))
    return found


def _kmeans(points: Floats, k: int, seed: int) -> NDArray[np.int64]:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    # So few vectors are clustered fastest by one thread.
    with threadpool_limits(1), warnings.catch_warnings():
        # Equal vectors leave clusters empty, which the V-measure shows.
        warnings.simplefilter("ignore", ConvergenceWarning)
        labels = KMeans(n_clusters=k, n_init=1, random_state=seed).fit_predict(points)
    return np.asarray(labels, dtype=np.int64)


def _mean_v_measure(clusters: Sequence[Clustering], n_texts: int, seed: int) -> Estimate:
    """Return the mean over conditions, with an interval over texts whose clusters stay as found."""
    if not clusters:
        return Estimate(math.nan)
    value = float(np.mean([own.v_measure() for own in clusters]))
    n = len({position for own in clusters for position in own.positions.tolist()})
    if n < MIN_PAIRS:
        return Estimate(value)
    drawn = np.random.default_rng(seed).multinomial(n_texts, np.full(n_texts, 1 / n_texts), _DRAWS)
    weights = drawn.astype(np.float64)
    sampled = np.mean([own.v_measure(weights[:, own.positions]) for own in clusters], axis=0)
    half = float(student.ppf(1 - LEVEL / 2, n - 1) * sampled.std(ddof=1))
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))


# -- a few labelled texts ----------------------------------------------------------------------


class LabelFitted(NamedTuple):
    """What was learnt from labels: of n texts predicted labels, clusters, and (n, d) vectors.

    ``vectors`` are None where neighbours are not looked for.
    """

    predicted: Sequence[Any] | NDArray[Any]
    clusters: Sequence[Any] | NDArray[Any]
    vectors: NDArray[Any] | None = None


#: From (n, d) vectors, (m,) positions of those with a label and (m,) labels to what is learnt.
LabelFit = Callable[[Floats, Indices, Sequence[str]], LabelFitted]


class LabelFigures(NamedTuple):
    """What ``n_labels`` labelled texts bring, on the texts without a label, of how many conditions.

    Figures are means over conditions and draws, NaN where no condition has enough texts.
    ``deviation`` is the standard deviation of the accuracy over draws. ``nearest`` is the share of
    texts without a label whose nearest other one has the same value, NaN without vectors.
    """

    n_labels: int
    n_conditions: int
    accuracy: float
    deviation: float
    v_measure: float
    nearest: float = math.nan


def measure_labels(
    sample: AspectSample,
    vectors: ConditionedVectors,
    sizes: Sequence[int],
    fit: LabelFit,
    draws: int = 5,
    seed: int = 0,
) -> list[LabelFigures]:
    """Measure accuracy and V-measure against the number of labelled texts.

    Args:
        sample: whose conditions with 3 to 10 values are taken.
        vectors: those of :func:`needed_rows`.
        sizes: numbers of labelled texts; conditions with fewer than 20 other texts are left out.
        fit: what learns from labels.
        draws: draws of labelled texts, which are the same for whatever is measured.
        seed: random seed of the draws.
    """
    from sklearn.metrics import v_measure_score

    found = []
    for size in sizes:
        scores = []
        for condition, texts in cluster_texts(sample).items():
            if len(texts.positions) < size + LEAST_SCORED:
                continue
            points, values = vectors.under(condition, texts.positions), np.array(texts.values)
            by_draw = []
            for draw in range(draws):
                labelled = _draw_labels(texts.values, size, f"{seed} {draw} {condition}")
                fitted = fit(points, labelled, values[labelled].tolist())
                rest = np.setdiff1d(np.arange(len(values)), labelled)
                right = np.asarray(fitted.predicted)[rest] == values[rest]
                agreement = v_measure_score(values[rest], np.asarray(fitted.clusters)[rest])
                nearest = math.nan
                if fitted.vectors is not None:
                    nearest = _share_nearest(fitted.vectors[rest], values[rest])
                by_draw.append((right.mean(), agreement, nearest))
            scores.append(by_draw)
        means = np.mean(scores, axis=0) if scores else np.full((draws, 3), math.nan)
        accuracy, agreement, nearest = means.mean(axis=0).tolist()
        deviation = float(means[:, 0].std(ddof=1)) if draws > 1 else math.nan
        found.append(LabelFigures(size, len(scores), accuracy, deviation, agreement, nearest))
    return found


def _share_nearest(vectors: NDArray[Any], values: NDArray[Any]) -> float:
    """Return the share of n texts whose nearest other text by cosine has the same value."""
    points = _unit(np.asarray(vectors, dtype=np.float64))
    cosines = points @ points.T
    np.fill_diagonal(cosines, -np.inf)
    return float((values[cosines.argmax(axis=1)] == values).mean())


def _draw_labels(values: Sequence[str], size: int, seed: str) -> Indices:
    """Return the positions of labelled texts, which have two different labels at least."""
    order = list(range(len(values)))
    random.Random(seed).shuffle(order)  # nothing is secret here
    labelled, rest = order[:size], order[size:]
    if len({values[i] for i in labelled}) == 1:
        labelled[-1] = next(i for i in rest if values[i] != values[labelled[0]])
    return np.array(labelled)
