"""Finding, scoring and drawing clusters: K-means, HDBSCAN, agreement with labels, t-SNE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llmcond.data.datasets import is_missing
from llmcond.evaluation.paired import LEVEL, MIN_PAIRS, ROUNDING
from llmcond.metrics import Estimate, Floats, Indices, Metric, estimates_json

Vectors = NDArray[np.float32]
Labels = NDArray[np.int64]

#: Label of texts that HDBSCAN assigns to no cluster.
NOISE = -1
#: Number of texts that K is chosen on; computing the silhouette takes every pair of them.
SAMPLE_SIZE = 2_000
#: Mean silhouette up to which there is no substantial structure (Kaufman and Rousseeuw, 1990).
CLEAR_SILHOUETTE = 0.25
#: Number of starts of K-means, of which the tightest clustering is used; fewer when choosing K.
STARTS, _STARTS_OF_CHOICE = 10, 2
#: Number of principal components that HDBSCAN works on.
_COMPONENTS = 5
#: Up to this many vectors are clustered on one thread; ``llmcond.evaluation.analyses`` says why.
_SINGLE_THREAD_ROWS = 2_000


def kmeans(vectors: Vectors, k: int, seed: int, starts: int = STARTS) -> Labels:
    """Cluster n vectors with K-means; return (n,) cluster numbers, 0 for the largest cluster."""
    from sklearn.cluster import KMeans

    with threadpool_limits(1 if len(vectors) <= _SINGLE_THREAD_ROWS else None):
        labels = KMeans(n_clusters=k, n_init=starts, random_state=seed).fit_predict(vectors)
    return number_by_size(labels)


def distinct_vectors(vectors: Vectors) -> Vectors:
    """Return the (m, d) distinct ones of unit vectors, which differ in five decimals."""
    return np.unique(vectors.round(5), axis=0)


def choose_k(vectors: Vectors, seed: int) -> tuple[int, dict[int, float]]:
    """Return the K with the highest mean silhouette, and the silhouettes of all candidates.

    Candidates are 2 to 12, then in steps of a quarter up to 100, as long as there are ten vectors
    per cluster. They are compared on ``SAMPLE_SIZE`` vectors that are sampled with the seed. 2 is
    chosen only if its silhouette is above ``CLEAR_SILHOUETTE``, because for data without clear
    clusters two halves still have the highest silhouette.
    """
    from sklearn.metrics import silhouette_score

    points = distinct_vectors(vectors[sample_indices(len(vectors), SAMPLE_SIZE, seed)])
    candidates = [k for k in _candidate_ks() if k == 2 or 10 * k <= len(points)]
    scores = {}
    for k in candidates:
        # Two points form two clusters, whose silhouette is undefined.
        labels = kmeans(points, k, seed, _STARTS_OF_CHOICE) if len(points) > k else None
        scores[k] = 0.0 if labels is None else float(silhouette_score(points, labels))
    eligible = [k for k in candidates if k > 2 or scores[k] > CLEAR_SILHOUETTE] or candidates
    return max(eligible, key=lambda k: scores[k]), scores


def silhouette(vectors: Vectors, labels: Labels, seed: int) -> float | None:
    """Return the mean silhouette of clusters, on a sample of ``SAMPLE_SIZE`` vectors.

    It is None where it is undefined: for a single cluster, or if each vector is its own cluster.
    """
    from sklearn.metrics import silhouette_score

    sampled = sample_indices(len(vectors), SAMPLE_SIZE, seed)
    sampled = sampled[labels[sampled] != NOISE]
    if not 1 < len(np.unique(labels[sampled])) < len(sampled):
        return None
    return float(silhouette_score(vectors[sampled], labels[sampled]))


def _candidate_ks() -> list[int]:
    candidates = list(range(2, 13))
    while candidates[-1] <= 80:
        candidates.append(candidates[-1] * 5 // 4)
    return candidates


def hdbscan(vectors: Vectors, min_cluster_size: int) -> Labels:
    """Cluster n vectors with HDBSCAN; return (n,) cluster numbers, ``NOISE`` for vectors in none.

    It works on ``_COMPONENTS`` principal components: in hundreds of dimensions hardly any region is
    dense, so that most texts are in no cluster, and 10,000 texts take a minute.

    Args:
        vectors: (n, d).
        min_cluster_size: minimal number of vectors in a cluster.
    """
    from sklearn.cluster import HDBSCAN
    from sklearn.decomposition import PCA

    n_components = min(_COMPONENTS, *vectors.shape)
    with np.errstate(invalid="ignore"):  # equal vectors have no variance to explain
        points = PCA(n_components, random_state=0).fit_transform(vectors)
    return number_by_size(HDBSCAN(min_cluster_size=min_cluster_size, copy=True).fit_predict(points))


def number_by_size(labels: NDArray[Any]) -> Labels:
    """Renumber labels by the size of their clusters, from 0 for the largest; ``NOISE`` remains."""
    values, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(np.where(values == NOISE, 0, -counts), kind="stable")
    order = order[values[order] != NOISE]
    new_labels = np.full(len(values), NOISE)
    new_labels[order] = np.arange(len(order))
    return np.asarray(new_labels[inverse], dtype=np.int64)


def sample_indices(n: int, most: int, seed: int) -> NDArray[np.int64]:
    """Sample at most ``most`` of n indices without replacement; return them in ascending order."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, most, replace=False))


# Both metrics depend only on sums over the counts of a contingency table. So the jackknife, which
# needs the metric without each text in turn, works without a loop over texts.


def _v_measure(n: int, cells: Floats, clusters: Floats, labels: Floats) -> Floats:
    """Return the V-measure of n texts from sums of x log x over cells, clusters and labels."""
    joint, cluster_entropy, label_entropy = (
        np.log(n) - total_log / n for total_log in (cells, clusters, labels)
    )
    total = cluster_entropy + label_entropy
    value = np.divide(2 * (total - joint), total, out=np.ones_like(total), where=total > ROUNDING)
    return np.asarray(np.maximum(value, 0.0))


def _rand(n: int, cells: Floats, clusters: Floats, labels: Floats) -> Floats:
    """Return the adjusted Rand index of n texts from sums of x (x - 1)."""
    chance, upper = clusters * labels / max(n * (n - 1), 1), (clusters + labels) / 2
    room = upper - chance
    return np.divide(cells - chance, room, out=np.ones_like(room), where=room > ROUNDING)


_Term = Callable[[Floats], Floats]
_Figure = Callable[[int, Floats, Floats, Floats], Floats]


def _compute_metric(term: _Term, figure: _Figure, counts: Floats) -> float:
    """Compute a metric of a contingency table."""
    sides = counts, counts.sum(axis=1), counts.sum(axis=0)
    return float(figure(int(counts.sum()), *(np.atleast_1d(term(side).sum()) for side in sides))[0])


def _leave_one_out(term: _Term, figure: _Figure, counts: Floats, cells: Indices) -> Floats:
    """Compute (n,) a metric without each of n texts, whose positions in the table are ``cells``."""
    row, column = np.unravel_index(cells, counts.shape)
    sides = counts, counts.sum(axis=1), counts.sum(axis=0)
    each = counts[row, column], sides[1][row], sides[2][column]
    sums = (term(side).sum() - term(x) + term(x - 1) for side, x in zip(sides, each, strict=True))
    return figure(len(cells) - 1, *sums)


def _entropy_term(x: Floats) -> Floats:
    """Return x log x, which is 0 at 0."""
    from scipy.special import xlogy

    return np.asarray(xlogy(x, x))


_PARTS: Mapping[str, tuple[_Term, _Figure]] = {
    "v_measure": (_entropy_term, _v_measure),
    "ari": (lambda x: x * (x - 1), _rand),
}


def _make_metric(name: str, label: str, least: float) -> Metric:
    def function(clusters: Floats, labels: Floats, _: Indices) -> float:
        return _compute_metric(*_PARTS[name], _contingency_table(clusters, labels)[0])

    return Metric(name, function, label, least=least, most=1.0)


#: The V-measure below which clusters are reported to agree little with labels.
_MIN_V_MEASURE = 0.5
METRICS = (_make_metric("v_measure", "V-measure", 0.0), _make_metric("ari", "ARI", -0.5))


def _contingency_table(clusters: Any, labels: Any) -> tuple[Floats, Indices]:
    """Return the contingency table, (clusters, labels), and the position of each text in it."""
    (names, rows), (classes, columns) = (
        np.unique(values, return_inverse=True) for values in (clusters, labels)
    )
    shape = len(names), len(classes)
    cells = np.asarray(rows * shape[1] + columns, dtype=np.int64)
    counts = np.bincount(cells, minlength=math.prod(shape)).reshape(shape)
    return counts.astype(np.float64), cells


@dataclass(frozen=True, slots=True)
class _MeasuredMetric:
    """A metric of clusters, and the figures that its interval is computed from.

    Attributes:
        value: the metric.
        corrected: the metric without its expected value by chance, which is above 0 for the
            V-measure of few texts in many clusters.
        influence: (n,) the influence of each text, by the jackknife.
        astray: the loss from one more text in a wrong cluster, which the sample may lack by chance.
    """

    value: float
    corrected: float
    influence: Floats
    astray: float

    @classmethod
    def of(cls, metric: Metric, clusters: Labels, labels: Indices) -> _MeasuredMetric:
        from sklearn.metrics import adjusted_mutual_info_score

        parts, (counts, cells) = _PARTS[metric.name], _contingency_table(clusters, labels)
        value = _compute_metric(*parts, counts)
        # Adjusted mutual information is the V-measure corrected for chance.
        adjusts = metric.name == "v_measure"
        corrected = float(adjusted_mutual_info_score(labels, clusters)) if adjusts else value
        influence = (len(labels) - 1) * (value - _leave_one_out(*parts, counts, cells))
        moved = np.vstack([counts, np.zeros(counts.shape[1])])
        row, column = np.unravel_index(np.argmax(counts), counts.shape)
        moved[row, column] -= 1
        moved[(row + 1) % len(moved), column] += 1
        return cls(value, corrected, influence, abs(value - _compute_metric(*parts, moved)))

    def minus(self, other: _MeasuredMetric) -> _MeasuredMetric:
        """Return the difference to other clusters of the same texts; 0 for equal clusters."""
        influence = self.influence - other.influence
        is_equal = np.abs(influence).max() < ROUNDING
        return _MeasuredMetric(
            self.value - other.value,
            self.corrected - other.corrected,
            influence,
            0.0 if is_equal else max(self.astray, other.astray),
        )

    def estimate(self, least: float, most: float) -> Estimate:
        """Return the metric with its 95 % interval, clipped to ``least`` and ``most``."""
        n = len(self.influence)
        if not self.astray and not self.influence.any():
            return Estimate(self.value, self.value, self.value)
        if n < MIN_PAIRS:
            return Estimate(self.value)
        from scipy.stats import t as student

        error = math.sqrt(float(self.influence.var(ddof=1)) / n + self.astray**2)
        half = float(student.ppf(1 - LEVEL / 2, n - 1)) * error
        ends = sorted((self.value, self.corrected))
        return Estimate(self.value, max(ends[0] - half, least), min(ends[1] + half, most))


@dataclass(frozen=True)
class LabelAgreement:
    """Agreement of clusters with known labels.

    Attributes:
        column: column of the labels.
        n: number of texts that have a label.
        classes: number of distinct labels.
        own: for each metric, its value for the clusters, with a 95 % interval over texts.
        base_name: title of the vectors to compare with, such as ``minilm, no condition``.
        base: the metrics for clusters of those vectors, found by the same method with the same
            number of clusters.
        difference: for each metric, own minus base, on the same texts.
    """

    column: str
    n: int
    classes: int
    own: Mapping[str, Estimate]
    base_name: str
    base: Mapping[str, Estimate]
    difference: Mapping[str, Estimate]

    @property
    def is_poor(self) -> bool:
        """Whether the clusters agree little with the labels."""
        return self.own["v_measure"].value < _MIN_V_MEASURE

    def to_json(self) -> dict[str, Any]:
        """Return the scores as ``--json`` prints them."""
        values: dict[str, Any] = {"column": self.column, "n": self.n, "classes": self.classes}
        values["base"] = self.base_name
        kinds = {"": self.own, "base_": self.base, "minus_base_": self.difference}
        for name, (prefix, estimates) in product(self.own, kinds.items()):
            values |= estimates_json({f"{prefix}{name}": estimates[name]})
        return values


def score_clusters(
    clusters: Labels, base: Labels, labels: Sequence[Any], column: str, base_name: str
) -> LabelAgreement:
    """Compare two clusterings of n texts with known labels.

    Texts in no cluster count as one cluster. Intervals are Student's t intervals with the
    jackknife's standard error, to which the loss from one more text in a wrong cluster is added.
    Intervals of the V-measure extend to the value corrected for chance.

    Args:
        clusters: (n,) cluster numbers under a condition.
        base: (n,) cluster numbers of the vectors to compare with.
        labels: (n,) known labels; texts without a label (None, NaN) are ignored.
        column: column of the labels.
        base_name: title of the vectors to compare with.
    """
    has_label = np.array([not is_missing(label) for label in labels])
    classes, truth = np.unique(
        np.array([str(label) for label in labels if not is_missing(label)]), return_inverse=True
    )
    estimates, base_estimates, difference = {}, {}, {}
    for metric in METRICS:
        first, second = (
            _MeasuredMetric.of(metric, assigned[has_label], truth) for assigned in (clusters, base)
        )
        estimates[metric.name] = first.estimate(metric.least, metric.most)
        base_estimates[metric.name] = second.estimate(metric.least, metric.most)
        width = metric.most - metric.least
        difference[metric.name] = first.minus(second).estimate(-width, width)
    return LabelAgreement(
        column, len(truth), len(classes), estimates, base_name, base_estimates, difference
    )


MapPositions = NDArray[np.float64]

#: Number of principal components that vectors are reduced to, as is customary before t-SNE.
_MAP_COMPONENTS = 50
_PERPLEXITY = 30.0
#: Early exaggeration: how strongly the first map's clusters are pulled together at the start, by
#: scikit-learn's default. A map that starts from another map already has its clusters, and pulling
#: would undo their arrangement.
_EXAGGERATION, _NO_EXAGGERATION = 12.0, 1.0


def compute_maps(systems: Iterable[Vectors], seed: int) -> list[MapPositions]:
    """Return positions, (n, 2) in 0 to 1, of the same n texts for each of several sets of vectors.

    t-SNE has many equally good solutions, and rounding decides between them. So that maps can be
    compared, and look alike on every processor, each map starts from the previous one, which is
    already a solution if the vectors are the same, and is then rotated, mirrored, moved and scaled
    to fit onto it. Fewer than four texts are placed on a line, in their order.
    """
    maps: list[MapPositions] = []
    for vectors in systems:
        previous = maps[-1] if maps else None
        points = _compute_map(vectors, previous, seed)
        maps.append(points if previous is None else _align(points, previous))
    all_points = np.concatenate(maps)
    low, high = all_points.min(axis=0), all_points.max(axis=0)
    width = float((high - low).max()) or 1.0
    return [(points - (low + high) / 2) / width + 0.5 for points in maps]


def _compute_map(vectors: Vectors, previous: MapPositions | None, seed: int) -> MapPositions:
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    n = len(vectors)
    if n < 4:
        return np.stack([np.arange(n, dtype=np.float64), np.zeros(n)], axis=1)
    n_components = min(_MAP_COMPONENTS, *vectors.shape)
    if n_components < 2:
        vectors, n_components = np.repeat(vectors, 2, axis=1), 2
    with np.errstate(invalid="ignore"):  # equal vectors have no variance to explain
        components = PCA(n_components, random_state=seed).fit_transform(vectors)
    # The initial map is small, as the authors of t-SNE advise, so that distant points can still
    # pass each other.
    small = 1e-4 * components[:, :2] / (components[:, :2].std() or 1.0)
    start = small if previous is None else previous
    reducer = TSNE(
        2,
        perplexity=min(_PERPLEXITY, (n - 1) / 3),
        early_exaggeration=_EXAGGERATION if previous is None else _NO_EXAGGERATION,
        init=start.astype(np.float32),
        random_state=seed,
    )
    return np.asarray(reducer.fit_transform(components), dtype=np.float64)


def _align(points: MapPositions, onto: MapPositions) -> MapPositions:
    """Rotate, mirror, move and scale a map so that its points are nearest to those of another.

    The scale makes both maps equally wide. The scale with the smallest distances would shrink a map
    the more, the less the two have in common.
    """
    from scipy.linalg import orthogonal_procrustes

    centred, target = points - points.mean(axis=0), onto - onto.mean(axis=0)
    rotation, _ = orthogonal_procrustes(centred, target)
    scale = np.linalg.norm(target) / (float(np.linalg.norm(centred)) or 1.0)
    return np.asarray(scale * centred @ rotation + onto.mean(axis=0))
