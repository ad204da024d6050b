"""Whether embeddings follow conditions: samples of texts, triples, neighbours and clusters.

Embeddings that ignore the condition are right under exactly one condition of each paired triple.
Their accuracy is therefore exactly 50 %, and they are never right under both conditions.

Next to the file of a set, ``triples/NAME.json`` may contain a sample of the texts with its paired
triples. Without that file, this module draws a sample.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy
from scipy.stats import t as student
from sklearn.exceptions import ConvergenceWarning

from llmcond.base.errors import UserError, nearest
from llmcond.base.files import read_json
from llmcond.base.metrics import Estimate, Floats, Indices, Metric, estimates_json, finite_or_none
from llmcond.data.guides import (
    AspectSample,
    ConditionWordings,
    Triple,
    dataset_files,
    parse_sample,
    read_triples,
)
from llmcond.evaluation.analyses import kmeans
from llmcond.evaluation.paired import LEVEL, MIN_PAIRS, ROUNDING, bootstrap_metrics

# -- samples -----------------------------------------------------------------------------------

Wording = Literal["text", "question", "para", "short"]
WORDINGS: tuple[Wording, ...] = get_args(Wording)

#: Maximum numbers of texts of a sample, and of paired triples among them.
SAMPLE_TEXTS, SAMPLE_TRIPLES = 350, 600
#: Texts with this many characters or more are not sampled.
_LONGEST_TEXT = 600
#: Number of attempts per triple; many attempts find no valid triple.
_ATTEMPTS = 40
#: Maximum number of texts with the anchor's value that are tried.
_CANDIDATES = 40
#: Example values are among the 400 most frequent ones, and have fewer than 40 characters.
_COMMONEST, _LONGEST_VALUE = 400, 40


def say(wordings: ConditionWordings, wording: Wording) -> str:
    """Return a condition in a wording, or its noun phrase if it has no such wording."""
    if wording == "question":
        return wordings.question or wordings.text
    if wording == "para":
        return (*wordings.others, wordings.text)[0]
    texts = (wordings.text, *wordings.others)
    return min(texts, key=len) if wording == "short" else wordings.text


def read_samples(folder: Path, names: Sequence[str] = (), seed: int = 0) -> list[AspectSample]:
    """Read the samples of the sets in a folder.

    Args:
        folder: folder with NAME.json of each set, and optionally triples/NAME.json.
        names: sets to read; by default all, in alphabetical order.
        seed: random seed of the samples of sets without a file of triples.

    Raises:
        UserError: The folder or a set does not exist, or a file has an invalid format.
    """
    known = dataset_files(folder)
    for name in names:
        if name not in known:
            raise UserError(f"{folder} has no set {name!r}. {nearest(name, known)}")
    return [read_sample(known[name], seed) for name in names or known]


def read_sample(path: Path, seed: int = 0) -> AspectSample:
    """Read the sample of one set, as ``read_samples`` does."""
    values = read_json(path)
    whole = parse_sample(values, path.stem, str(path))
    sample = read_triples(path, values)
    if sample is None:
        sample = draw_sample(whole, bool(values.get("same_group")), seed=seed)
    return replace(sample, values=_unseen_values(whole, sample))


def _unseen_values(whole: AspectSample, sample: AspectSample) -> dict[str, list[str]]:
    """Return the values of the whole set that no text of the sample has, by condition."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for text in whole.texts:
        for key, value in text.attributes.items():
            counts[key][value] += 1
    examples = {}
    for key in sample.conditions:
        seen = {text.attributes.get(key) for text in sample.texts}
        commonest = [value for value, _ in counts[key].most_common(_COMMONEST)]
        unseen = [v for v in commonest if v not in seen and 0 < len(v) < _LONGEST_VALUE]
        # Some datasets have JSON values: quoted texts are valid examples, objects are not.
        examples[key] = [v.strip('"').replace("_", " ") for v in unseen if v[0] not in "{["]
    return examples


def draw_sample(
    whole: AspectSample,
    same_group: bool = False,
    n_triples: int = SAMPLE_TRIPLES,
    n_texts: int = SAMPLE_TEXTS,
    seed: int = 0,
) -> AspectSample:
    """Draw a sample of paired triples and texts, which depends on the seed only.

    Pairs of conditions take turns. Each turn samples an anchor that has both conditions, and two
    texts that form a valid triple with it. Once the triples have ``n_texts`` texts in total,
    further triples are sampled among these texts. If the triples need fewer texts, the sample is
    filled up with random texts. There are no triples if, for example, each value of one condition
    belongs to a single value of the other.

    Args:
        whole: the set.
        same_group: whether the texts of a triple must belong to one group.
        n_triples: maximum number of triples.
        n_texts: maximum number of texts.
        seed: random seed.
    """
    rng = random.Random(seed)
    short = [i for i, text in enumerate(whole.texts) if len(text.text) < _LONGEST_TEXT]
    triples: dict[Triple, None] = {}
    positions: set[int] = set()
    for is_full in (False, True):
        among = sorted(positions) if is_full else short
        attempts = _draw_triples(whole, among, same_group, rng)
        for triple in islice(attempts, _ATTEMPTS * n_triples):
            if triple is None or len(triples) >= n_triples:
                continue
            more = positions | {triple.anchor, triple.first, triple.second}
            if len(more) <= n_texts:
                positions = more
                triples[triple] = None
    others = [i for i in short if i not in positions]
    filling = rng.sample(others, min(len(others), n_texts - len(positions)))
    ordered = sorted([*positions, *filling])
    indices = {position: i for i, position in enumerate(ordered)}
    moved = [
        replace(t, anchor=indices[t.anchor], first=indices[t.first], second=indices[t.second])
        for t in triples
    ]
    texts = [whole.texts[position] for position in ordered]
    return AspectSample(whole.name, texts, whole.conditions, moved, whole.values)


def _draw_triples(
    whole: AspectSample, positions: Sequence[int], same_group: bool, rng: random.Random
) -> Iterator[Triple | None]:
    """Yield a triple of one pair of conditions after the other, without end.

    It is None if the sampled anchor has none. Nothing is yielded if no text has two conditions.
    """
    texts = whole.texts
    with_value: dict[tuple[str, str], list[int]] = defaultdict(list)
    anchors: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in positions:
        attributes = texts[i].attributes
        conditions = sorted(key for key in attributes if key in whole.conditions)
        for key in conditions:
            with_value[key, attributes[key]].append(i)
        for pair in combinations(conditions, 2):
            anchors[pair].append(i)

    def find(anchor: int, shared: str, different: str) -> int | None:
        """Return the position of a text that shares the anchor's value of one condition only."""
        candidates = with_value[shared, texts[anchor].attributes[shared]]
        for i in rng.sample(candidates, min(len(candidates), _CANDIDATES)):
            value = texts[i].attributes.get(different)
            if value is None or value == texts[anchor].attributes[different]:
                continue
            if not same_group or texts[i].group == texts[anchor].group:
                return i
        return None

    for pair, of_pair in cycle(anchors.items()):
        condition, other = rng.sample(pair, 2)
        anchor = rng.choice(of_pair)
        first, second = find(anchor, condition, other), find(anchor, other, condition)
        if first is None or second is None:
            yield None
        else:
            yield Triple(anchor, first, second, condition, other)


# -- vectors and texts --------------------------------------------------------------------------

#: Minimum number of texts of a value that is clustered, and minimum and maximum number of such
#: values of a condition.
LEAST_TEXTS, LEAST_VALUES, MOST_VALUES = 8, 3, 10
#: Maximum number of clustered texts of a condition, and of clustered conditions of a set.
MOST_TEXTS, MOST_CONDITIONS = 240, 6
#: K-means runs of each condition, with one initialisation each.
RUNS = 3

#: Cosines that differ by no more than this, which is the rounding of float32, are ties.
_TIE = 1e-7
#: Bootstrap samples of the interval of the V-measure.
_DRAWS = 1_000

Row = tuple[int, str]


class ConditionedVectors:
    """The vectors of texts under conditions, scaled to unit length; zero vectors stay zero."""

    def __init__(self, rows: Sequence[Row], vectors: NDArray[Any]) -> None:
        """Normalise and index the vectors.

        Args:
            rows: n pairs of a text's position and a condition.
            vectors: (n, d) vectors of these rows.
        """
        self._row_indices = {row: i for i, row in enumerate(rows)}
        self._vectors = _unit(np.asarray(vectors, dtype=np.float64))

    def under(self, condition: str, positions: Iterable[int]) -> Floats:
        """Return the (k, d) vectors of k texts under a condition."""
        return self._vectors[[self._row_indices[position, condition] for position in positions]]


def _unit(vectors: Floats) -> Floats:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Floats = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > ROUNDING)
    return unit


def cluster_texts(sample: AspectSample) -> dict[str, list[int]]:
    """Return the positions of the texts to cluster by condition.

    These are the texts of 3 to 10 values with at least 8 texts. A condition with more values is
    reduced to its ten commonest ones, and one with more than 240 texts to equally many texts per
    value. Of more than six conditions, those with the most texts are clustered.
    """
    texts = {}
    for condition in sorted(sample.conditions):
        by_value = _positions_by_value(sample, condition).values()
        large = [positions for positions in by_value if len(positions) >= LEAST_TEXTS]
        large = sorted(large, key=len, reverse=True)[:MOST_VALUES]
        if len(large) < LEAST_VALUES:
            continue
        rng = random.Random(0)  # not used for secrets
        most = max(LEAST_TEXTS, MOST_TEXTS // len(large))
        sampled = [rng.sample(group, most) if len(group) > most else group for group in large]
        texts[condition] = sorted(position for group in sampled for position in group)
    largest = sorted(texts, key=lambda condition: -len(texts[condition]))
    return {condition: texts[condition] for condition in largest[:MOST_CONDITIONS]}


def _positions_by_value(sample: AspectSample, condition: str) -> dict[str, list[int]]:
    """Return the positions of the texts by their value of a condition."""
    by_value: dict[str, list[int]] = defaultdict(list)
    for position, text in enumerate(sample.texts):
        if condition in text.attributes:
            by_value[text.attributes[condition]].append(position)
    return by_value


def _positions_by_condition(sample: AspectSample) -> dict[str, list[int]]:
    """Return the positions of texts by condition, for conditions with two values or more.

    Conditions without any two texts of the same value are left out, because no neighbour could be
    right.
    """
    by_condition = {}
    for condition in sorted(sample.conditions):
        by_value = _positions_by_value(sample, condition)
        if len(by_value) > 1 and max(map(len, by_value.values())) > 1:
            by_condition[condition] = sorted(i for group in by_value.values() for i in group)
    return by_condition


def needed_rows(sample: AspectSample) -> list[Row]:
    """Return the sorted pairs of text and condition whose vectors ``measure`` needs."""
    rows: set[Row] = set()
    for triple in sample.triples:
        for position in (triple.anchor, triple.first, triple.second):
            rows |= {(position, triple.condition), (position, triple.other)}
    # Texts that are clustered under a condition are among those whose neighbours are searched.
    for condition, positions in _positions_by_condition(sample).items():
        rows |= {(position, condition) for position in positions}
    return sorted(rows)


# -- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AspectFigures:
    """How well embeddings of one set follow its conditions; fractions with 95 % intervals.

    Attributes:
        accuracy: share of right judgements of paired triples, two each; a tie counts one half.
        both: share of triples that are right under both conditions.
        nearest: share of texts whose nearest other text has the same value of the condition.
        chance: expected value of ``nearest`` for random neighbours.
        v_measure: mean V-measure over the clustered conditions.
        counts: numbers of triples, of their anchors, of searches for a neighbour, and of clustered
            conditions.
        conditions: figures by condition.
    """

    accuracy: Estimate
    both: Estimate
    nearest: Estimate
    chance: float
    v_measure: Estimate
    counts: Mapping[str, int]
    conditions: Mapping[str, Mapping[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Return the figures for JSON; undefined ones are None."""
        figures = estimates_json({name: getattr(self, name) for name in FIGURES})
        return {**figures, "chance": finite_or_none(self.chance), **self.counts}


#: The names of the figures that have intervals.
FIGURES = ("accuracy", "both", "nearest", "v_measure")


def measure(sample: AspectSample, vectors: ConditionedVectors, seed: int = 0) -> AspectFigures:
    """Compute all figures of a sample; undefined ones are NaN.

    Args:
        sample: texts, conditions and triples.
        vectors: vectors of the rows that ``needed_rows`` returns.
        seed: random seed of K-means and of the bootstrap.
    """
    judged = judge_triples(sample, vectors)
    anchors = np.array([triple.anchor for triple in sample.triples], dtype=np.int64)
    neighbours = find_neighbours(sample, vectors)
    clusters = cluster(sample, vectors, seed)
    by_condition: dict[str, dict[str, float]] = defaultdict(dict)
    judgements: dict[str, list[float]] = defaultdict(list)
    for triple, (first, second) in zip(sample.triples, judged.tolist(), strict=True):
        judgements[triple.condition].append(first)
        judgements[triple.other].append(second)
    for condition, group in judgements.items():
        by_condition[condition] |= {"accuracy": float(np.mean(group)), "n_judged": len(group)}
    for condition, (_, right, chance) in neighbours.items():
        hits = {"nearest": float(right.mean()), "chance": float(chance.mean())}
        by_condition[condition] |= {**hits, "n_nearest": len(right)}
    for clustering in clusters:
        by_condition[clustering.condition]["v_measure"] = float(clustering.v_measure().mean())
    texts, hit, chances = (
        np.concatenate([np.empty(0), *(arrays[column] for arrays in neighbours.values())])
        for column in range(3)
    )
    # Embeddings that ignore the condition have these two figures on any triples, so that the
    # figures have no sampling error.
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


#: Accuracy, and share of triples right under both conditions, of embeddings that ignore conditions.
_BLIND = Estimate(0.5, 0.5, 0.5), Estimate(0.0, 0.0, 0.0)

_SHARE = Metric("share", lambda v, _, __: float(v.mean()), least=0, most=1, by_row=lambda v: v)


def _share(values: Floats, groups: Indices, seed: int) -> Estimate:
    """Return the mean of values between 0 and 1, with an interval by resampling their groups."""
    if not len(values):
        return Estimate(math.nan)
    resampled = bootstrap_metrics(
        [values[None]], np.zeros(len(values)), groups, [_SHARE], seed=seed
    )
    return resampled.estimates(0)["share"]


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over datasets with independent errors; undefined estimates are left out."""
    defined = [estimate for estimate in estimates if not math.isnan(estimate.value)]
    if not defined:
        return Estimate(math.nan)
    value = float(np.mean([estimate.value for estimate in defined]))
    # The longer side of each interval, because the shorter one may have been clipped to 0 or 1.
    half = [
        max(estimate.high - estimate.value, estimate.value - estimate.low) for estimate in defined
    ]
    error = float(np.linalg.norm(half)) / len(half)
    return Estimate(value, max(value - error, 0.0), min(value + error, 1.0))


# -- triples and neighbours --------------------------------------------------------------------


def judge_triples(sample: AspectSample, vectors: ConditionedVectors) -> Floats:
    """Judge each triple under its condition, and under the other one.

    Returns:
        (n, 2) judgements: 1 is right, 0 is wrong, and 0.5 is a tie.
    """
    judged = np.empty((len(sample.triples), 2))
    for i, triple in enumerate(sample.triples):
        positions = triple.anchor, triple.first, triple.second
        for j, condition in enumerate((triple.condition, triple.other)):
            anchor, first, second = vectors.under(condition, positions)
            nearer = float((anchor * first).sum() - (anchor * second).sum())
            judged[i, j] = 0.5 if abs(nearer) <= _TIE else float((nearer > 0) == (j == 0))
    return judged


def find_neighbours(
    sample: AspectSample, vectors: ConditionedVectors
) -> dict[str, tuple[Indices, Floats, Floats]]:
    """Find the nearest other text of each text, under each condition with two or more values.

    Returns:
        By condition, of the n texts whose value other texts have, too: (n,) their positions; (n,)
        whether the nearest other text has the same value, 1 or 0, and with several equally near
        texts the share of them that does; and (n,) the share of all other texts that do.
    """
    neighbours = {}
    for condition, positions in _positions_by_condition(sample).items():
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
        neighbours[condition] = (np.array(positions)[shares], right[shares], chance[shares])
    return neighbours


# -- clusters ----------------------------------------------------------------------------------


class Clustering(NamedTuple):
    """Clusters of n texts under a condition.

    Attributes:
        condition: the condition.
        positions: (n,) positions of the texts.
        values: (n,) numbers of the values.
        clusters: (runs, n) clusters of each K-means run.
    """

    condition: str
    positions: Indices
    values: Indices
    clusters: NDArray[np.int64]

    def v_measure(self, weights: Floats | None = None) -> Floats:
        """Return the (b,) means of the V-measure over runs.

        Args:
            weights: (b, n) number of times that each text counts, for b results; None for a single
                result in which each text counts once.
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
    """Return the (b,) entropies in nats of (n,) labels, for (b, n) weights."""
    _, columns = np.unique(labels, return_inverse=True)
    counts = weights @ np.eye(columns.max() + 1)[columns]
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.asarray(-xlogy(shares, shares).sum(axis=1))


def cluster(sample: AspectSample, vectors: ConditionedVectors, seed: int = 0) -> list[Clustering]:
    """Cluster the centred and normalised vectors by K-means, with K the number of values."""
    clusterings = []
    for condition, positions in cluster_texts(sample).items():
        points: Any = vectors.under(condition, positions)
        points = _unit(points - points.mean(axis=0))
        names = [sample.texts[position].attributes[condition] for position in positions]
        values = np.unique(names, return_inverse=True)[1]
        k = int(values.max()) + 1
        with warnings.catch_warnings():
            # Equal vectors leave clusters empty; the V-measure shows this without the warning.
            warnings.simplefilter("ignore", ConvergenceWarning)
            runs = [kmeans(points, k, seed + run, starts=1) for run in range(RUNS)]
        clusterings.append(Clustering(condition, np.array(positions), values, np.array(runs)))
    return clusterings


def _mean_v_measure(clusters: Sequence[Clustering], n_texts: int, seed: int) -> Estimate:
    """Return the mean over conditions, with a bootstrap interval over texts.

    The bootstrap resamples the texts with their clusters, without clustering again.
    """
    if not clusters:
        return Estimate(math.nan)
    value = float(np.mean([clustering.v_measure() for clustering in clusters]))
    n = len({position for clustering in clusters for position in clustering.positions.tolist()})
    if n < MIN_PAIRS:
        return Estimate(value)
    counts = np.random.default_rng(seed).multinomial(n_texts, np.full(n_texts, 1 / n_texts), _DRAWS)
    weights = counts.astype(np.float64)
    sampled = np.mean(
        [clustering.v_measure(weights[:, clustering.positions]) for clustering in clusters], axis=0
    )
    half = float(student.ppf(1 - LEVEL / 2, n - 1) * sampled.std(ddof=1))
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))
