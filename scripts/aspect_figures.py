"""Whether embeddings follow conditions: samples of texts, wordings, triples and clusters.

Embeddings that ignore the condition are right under exactly one condition of each paired triple.
Their accuracy is therefore exactly 50 %, and they are never right under both conditions.

Next to the file of a set, ``triples/NAME.json`` may contain a sample of the texts with its paired
triples. Without that file, this module draws a sample.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy
from scipy.stats import t as student
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_mutual_info_score, roc_auc_score, v_measure_score
from typing_extensions import override

from llmcond.base.errors import UserError, nearest
from llmcond.base.files import read_json
from llmcond.base.metrics import Estimate, Floats, Indices, Metric, estimates_json, finite_or_none
from llmcond.data.guides import (
    AspectSample,
    AspectText,
    ConditionWordings,
    Triple,
    dataset_files,
    parse_sample,
    read_triples,
)
from llmcond.evaluation.analyses import kmeans
from llmcond.evaluation.paired import LEVEL, MIN_PAIRS, ROUNDING, bootstrap_metrics
from llmcond.heads.guide import Guide, fit_ignoring

# -- samples -----------------------------------------------------------------------------------

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


#: Further wordings of a condition; the noun phrase may also be a clause, as in "how urgent it is".
_TEMPLATES = (
    "{bare}",
    "what the text says about {text}",
    "in terms of {text}",
    "{text} in the text",
    "grouped by {text}",
)


def list_wordings(wordings: ConditionWordings, n: int) -> list[str]:
    """Return the first n different wordings of a condition.

    The noun phrases of the set come first, then its question, then what templates add.

    Raises:
        UserError: The condition has fewer wordings.
    """
    bare = wordings.text.removeprefix("the ")
    added = [template.format(text=wordings.text, bare=bare) for template in _TEMPLATES]
    texts = [wordings.text, *wordings.others, wordings.question, *added]
    texts = list(dict.fromkeys(filter(None, texts)))
    if len(texts) < n:
        raise UserError(
            f"the condition {wordings.text!r} has only {len(texts)} wordings, fewer than {n}. "
            "Lower --wordings."
        )
    return texts[:n]


def read_samples(folder: Path, names: Sequence[str] = (), seed: int = 0) -> list[AspectSample]:
    """Read the samples of the sets in a folder.

    Args:
        folder: folder with NAME.json of each set, and optionally triples/NAME.json.
        names: sets to read; by default all, in alphabetical order.
        seed: random seed of the samples of sets without a file of triples.

    Raises:
        UserError: The folder or a set does not exist, or a file has an invalid format.
    """
    return [read_sample(path, seed) for path in _find_sets(folder, names)]


def read_sets(folder: Path, names: Sequence[str] = ()) -> list[AspectSample]:
    """Read whole sets, as ``read_samples`` does their samples."""
    paths = _find_sets(folder, names)
    return [parse_sample(read_json(path), path.stem, str(path)) for path in paths]


def _find_sets(folder: Path, names: Sequence[str]) -> list[Path]:
    known = dataset_files(folder)
    for name in names:
        if name not in known:
            raise UserError(f"{folder} has no set {name!r}. {nearest(name, known)}")
    return [known[name] for name in names or known]


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
    return replace(whole, texts=texts, triples=moved)


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
#: Number of nearest texts whose values are compared.
NEIGHBOURS = 10
#: Two conditions whose values have this adjusted mutual information are not ignored for each other.
_REDUNDANT = 0.15

#: Cosines that differ by no more than this, which is the rounding of float32, are ties.
_TIE = 1e-7
#: Bootstrap samples of the interval of the V-measure.
_DRAWS = 300

Row = tuple[int, str]
#: The conditions that are ignored under a condition, and the (k, d) vectors of k texts.
Version = tuple[tuple[str, ...], Floats]


class ConditionedVectors:
    """The vectors of texts under conditions, scaled to unit length; zero vectors stay zero."""

    def __init__(self, rows: Sequence[Row], vectors: NDArray[Any]) -> None:
        """Normalise and index the vectors.

        Args:
            rows: n pairs of a text's position and a condition.
            vectors: (n, d) vectors of these rows.
        """
        self.rows = rows
        self.unit = _unit(np.asarray(vectors, dtype=np.float64))
        self._row_indices = {row: i for i, row in enumerate(rows)}

    def under(self, condition: str, positions: Iterable[int], other: str = "") -> Floats:
        """Return the (k, d) vectors of k texts under a condition.

        Args:
            condition: the condition.
            positions: the k positions of texts.
            other: the condition with which ``condition`` is compared in a triple.
        """
        return self.unit[[self._row_indices[position, condition] for position in positions]]

    def versions(self, condition: str, positions: Sequence[int]) -> list[Version]:
        """Return the (k, d) vectors of k texts under a condition, once for each way to ignore."""
        return [((), self.under(condition, positions))]

    def without_general(self, general: Floats) -> ConditionedVectors:
        """Subtract the (texts, d) vectors of all texts under no or general conditions."""
        positions = [position for position, _ in self.rows]
        return ConditionedVectors(self.rows, self.unit - _unit(general)[positions])


def _unit(vectors: Floats) -> Floats:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Floats = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > ROUNDING)
    return unit


def average_wordings(wordings: Sequence[ConditionedVectors]) -> ConditionedVectors:
    """Return the mean of the unit vectors under several wordings of the conditions."""
    return ConditionedVectors(wordings[0].rows, np.mean([each.unit for each in wordings], axis=0))


class IgnoringVectors(ConditionedVectors):
    """Vectors under conditions that ignore others, fitted on all texts without any labels."""

    def __init__(self, sample: AspectSample, vectors: ConditionedVectors, at_once: bool) -> None:
        """Prepare the vectors; maps are fitted when they are needed.

        Args:
            sample: the texts, with the conditions to ignore.
            vectors: the vectors of all texts under all conditions.
            at_once: whether all others are ignored at once, instead of one at a time.
        """
        super().__init__(vectors.rows, vectors.unit)
        self._unchanged = vectors
        self._positions = range(len(sample.texts))
        self._at_once = at_once
        self._others = {
            condition: [
                other
                for other in sorted(sample.conditions)
                if other != condition and not is_redundant(sample, condition, other)
            ]
            for condition in sample.conditions
        }
        self._maps: dict[tuple[str, tuple[str, ...]], Guide] = {}

    @override
    def under(self, condition: str, positions: Iterable[int], other: str = "") -> Floats:
        others = self._others[condition]
        ignored = others if self._at_once else [each for each in others if each == other]
        return self._ignore(condition, positions, tuple(ignored))

    @override
    def versions(self, condition: str, positions: Sequence[int]) -> list[Version]:
        others = self._others[condition]
        ways = [tuple(others)] if self._at_once or not others else [(each,) for each in others]
        return [(ignored, self._ignore(condition, positions, ignored)) for ignored in ways]

    def _ignore(self, condition: str, positions: Iterable[int], ignored: tuple[str, ...]) -> Floats:
        vectors = self._unchanged.under(condition, positions)
        if not ignored:
            return vectors
        if (condition, ignored) not in self._maps:
            keys = condition, *ignored
            under = {key: self._unchanged.under(key, self._positions) for key in keys}
            self._maps[condition, ignored] = fit_ignoring(under.pop(condition), under, {})
        return self._maps[condition, ignored].transform(vectors).astype(np.float64)


def is_redundant(sample: AspectSample, condition: str, other: str) -> bool:
    """Return whether the values of two conditions go together, so that none can be ignored."""
    both = [t.attributes for t in sample.texts if {condition, other} <= t.attributes.keys()]
    if not both:
        return False
    values = ([attributes[key] for attributes in both] for key in (condition, other))
    return bool(adjusted_mutual_info_score(*values) > _REDUNDANT)


def limit_conditions(sample: AspectSample, n: int) -> AspectSample:
    """Return a sample with n conditions at most, and the triples between them.

    Conditions that are clustered come first. Then each turn adds the condition with the most
    triples with the others.
    """
    limited = list(cluster_texts(sample))[:n]
    while len(limited) < min(n, len(sample.conditions)):
        gains: Counter[str] = Counter()
        for triple in sample.triples:
            new = {triple.condition, triple.other} - {*limited}
            # A triple between two new conditions counts less than any with one new condition.
            gains.update(dict.fromkeys(new, len(sample.triples) if len(new) == 1 else 1))
        limited.append(max(sorted(set(sample.conditions) - {*limited}), key=gains.__getitem__))
    conditions = {key: sample.conditions[key] for key in sample.conditions if key in limited}
    triples = [t for t in sample.triples if {t.condition, t.other} <= {*limited}]
    return replace(sample, conditions=conditions, triples=triples)


def cluster_texts(sample: AspectSample) -> dict[str, list[int]]:
    """Return the positions of the texts to cluster by condition.

    These are the texts of 3 to 10 values with at least 8 texts. A condition with more values is
    reduced to its ten commonest ones. Each of n values has at most 240 / n of its texts. Of more
    than six conditions, those with the most texts are clustered.
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


def needed_rows(sample: AspectSample) -> list[Row]:
    """Return the sorted pairs of text and condition whose vectors ``measure`` needs."""
    rows: set[Row] = set()
    for triple in sample.triples:
        for position in (triple.anchor, triple.first, triple.second):
            rows |= {(position, triple.condition), (position, triple.other)}
    for condition, positions in cluster_texts(sample).items():
        rows |= {(position, condition) for position in positions}
    return sorted(rows)


# -- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AspectFigures:
    """How well embeddings of one set follow its conditions; fractions with 95 % intervals.

    Attributes:
        accuracy: share of right judgements of paired triples, two each; a tie counts one half.
        both: share of triples that are right under both conditions.
        precision: share of the ten nearest texts that have the same value, P@10; mean over the
            clustered conditions.
        v_measure: mean V-measure over the clustered conditions.
        chance: expected value of ``precision`` for random neighbours.
        counts: numbers of triples, of their anchors, and of clustered conditions.
        conditions: figures by condition.
        pairs: figures by a clustered condition and another one: V-measure and precision if the
            other one is ignored, or if nothing is, with the V-measure of the clusters with the
            values of the other one.
    """

    accuracy: Estimate
    both: Estimate
    precision: Estimate
    v_measure: Estimate
    chance: float
    counts: Mapping[str, int]
    conditions: Mapping[str, Mapping[str, float]]
    pairs: Mapping[tuple[str, str], Mapping[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Return the figures for JSON; undefined ones are None."""
        figures = estimates_json({name: getattr(self, name) for name in FIGURES})
        about = {"chance": finite_or_none(self.chance), **self.counts}
        return {**figures, **about, "conditions": self.conditions}


#: The names of the figures that have intervals.
FIGURES = ("accuracy", "both", "precision", "v_measure")


def measure(sample: AspectSample, vectors: ConditionedVectors, seed: int = 0) -> AspectFigures:
    """Compute all figures of a sample; undefined ones are NaN.

    Args:
        sample: texts, conditions and triples.
        vectors: vectors of the rows that ``needed_rows`` returns.
        seed: random seed of K-means and of the bootstrap.
    """
    judged = judge_triples(sample, vectors)
    anchors = np.array([triple.anchor for triple in sample.triples], dtype=np.int64)
    clusters = cluster(sample, vectors, seed)
    by_condition: dict[str, dict[str, float]] = defaultdict(dict)
    judgements: dict[str, list[float]] = defaultdict(list)
    for triple, (first, second) in zip(sample.triples, judged.tolist(), strict=True):
        judgements[triple.condition].append(first)
        judgements[triple.other].append(second)
    for condition, group in judgements.items():
        by_condition[condition] |= {"accuracy": float(np.mean(group)), "n_judged": len(group)}
    for each in clusters:
        by_condition[each.condition] |= {
            "v_measure": float(each.v_measure().mean()),
            "precision": float(each.precision().mean()),
        }
    # Embeddings that ignore the condition have these two figures on any triples, so that the
    # figures have no sampling error.
    is_blind = len(judged) > 0 and bool((judged.sum(axis=1) == 1).all())
    both = (judged == 1).all(axis=1).astype(np.float64)
    n_texts = len(sample.texts)
    return AspectFigures(
        accuracy=_BLIND[0] if is_blind else _share(judged.mean(axis=1), anchors, seed),
        both=_BLIND[1] if is_blind else _share(both, anchors, seed),
        precision=_mean_over_conditions(clusters, Clustering.precision, n_texts, seed),
        v_measure=_mean_over_conditions(clusters, Clustering.v_measure, n_texts, seed),
        chance=float(np.mean([each.chance() for each in clusters])) if clusters else math.nan,
        counts={
            "n_triples": len(judged),
            "n_anchors": len(np.unique(anchors)),
            "n_clustered": len(clusters),
        },
        conditions=dict(sorted(by_condition.items())),
        pairs={pair: figures for each in clusters for pair, figures in each.pairs(sample)},
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


# -- triples -----------------------------------------------------------------------------------


def judge_triples(sample: AspectSample, vectors: ConditionedVectors) -> Floats:
    """Judge each triple under its condition, and under the other one.

    Returns:
        (n, 2) judgements: 1 is right, 0 is wrong, and 0.5 is a tie.
    """
    judged = np.empty((len(sample.triples), 2))
    for i, triple in enumerate(sample.triples):
        positions = triple.anchor, triple.first, triple.second
        pair = triple.condition, triple.other
        for j, (condition, other) in enumerate((pair, pair[::-1])):
            anchor, first, second = vectors.under(condition, positions, other)
            nearer = float((anchor * first).sum() - (anchor * second).sum())
            judged[i, j] = 0.5 if abs(nearer) <= _TIE else float((nearer > 0) == (j == 0))
    return judged


# -- clusters ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clustering:
    """Clusters and neighbours of n texts under a condition.

    Attributes:
        condition: the condition.
        positions: (n,) positions of the texts.
        values: (n,) numbers of the values.
        ignored: the conditions that each version of the vectors ignores.
        clusters: (versions, runs, n) clusters of each K-means run.
        right: (versions, n) share of the nearest texts that have a text's value.
    """

    condition: str
    positions: Indices
    values: Indices
    ignored: Sequence[tuple[str, ...]]
    clusters: NDArray[np.int64]
    right: Floats

    def v_measure(self, weights: Floats | None = None) -> Floats:
        """Return the (b,) means of the V-measure over versions and runs.

        Args:
            weights: (b, n) number of times that each text counts, for b results; None for a single
                result in which each text counts once.
        """
        if weights is None:
            weights = np.ones((1, len(self.values)))
        runs = []
        for clusters in self.clusters.reshape(-1, len(self.values)):
            cells = clusters * (self.values.max() + 1) + self.values
            both, of_clusters, of_values = (
                _entropy(weights, labels) for labels in (cells, clusters, self.values)
            )
            total = of_clusters + of_values
            shared = 2 * (total - both)
            runs.append(np.divide(shared, total, out=np.ones_like(total), where=total > ROUNDING))
        return np.asarray(np.mean(runs, axis=0))

    def precision(self, weights: Floats | None = None) -> Floats:
        """Return the (b,) means of the precision over versions and texts, as ``v_measure``."""
        right = self.right.mean(axis=0)
        if weights is None:
            return np.array([right.mean()])
        return np.asarray(weights @ right / weights.sum(axis=1))

    def chance(self) -> float:
        """Return the precision that is expected of random neighbours."""
        counts = np.bincount(self.values)
        return float(counts @ (counts - 1) / (len(self.values) * (len(self.values) - 1)))

    def pairs(self, sample: AspectSample) -> Iterator[tuple[tuple[str, str], dict[str, float]]]:
        """Yield the figures of each pair; ``AspectFigures.pairs`` describes them."""
        for i, ignored in enumerate(self.ignored):
            figures = {
                "v_measure": float(self.version(i).v_measure().mean()),
                "precision": float(self.right[i].mean()),
            }
            if len(ignored) == 1:
                yield (self.condition, ignored[0]), figures
        if self.ignored == [()]:
            for other, follows in self._follow_others(sample):
                yield (self.condition, other), {**figures, "v_other": follows}

    def version(self, number: int) -> Clustering:
        """Return the clustering of one version."""
        part = slice(number, number + 1)
        return replace(self, clusters=self.clusters[part], right=self.right[part])

    def _follow_others(self, sample: AspectSample) -> Iterator[tuple[str, float]]:
        """Yield the V-measure of the clusters with the values of each other clustered condition."""
        for other, positions in cluster_texts(sample).items():
            common = np.flatnonzero(np.isin(self.positions, positions))
            values = [sample.texts[i].attributes[other] for i in self.positions[common]]
            if other != self.condition and len(set(values)) > 1:
                runs = [v_measure_score(values, run[common]) for run in self.clusters[0]]
                yield other, float(np.mean(runs))


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
        names = [sample.texts[position].attributes[condition] for position in positions]
        values = np.unique(names, return_inverse=True)[1]
        versions = vectors.versions(condition, positions)
        clusters = [_cluster_points(points, int(values.max()) + 1, seed) for _, points in versions]
        right = [_share_of_neighbours(points, values) for _, points in versions]
        ignored = [others for others, _ in versions]
        numbers = np.array(positions), values
        clusterings.append(
            Clustering(condition, *numbers, ignored, np.array(clusters), np.array(right))
        )
    return clusterings


def _cluster_points(points: Floats, k: int, seed: int) -> list[Indices]:
    centred: Any = _unit(points - points.mean(axis=0))
    with warnings.catch_warnings():
        # Equal vectors leave clusters empty; the V-measure shows this without the warning.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return [kmeans(centred, k, seed + run, starts=1) for run in range(RUNS)]


def _share_of_neighbours(points: Floats, values: Indices) -> Floats:
    """Return the (n,) shares of the nearest other texts that have the same value."""
    cosines = points @ points.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :NEIGHBOURS]
    return np.asarray((values[nearest] == values[:, None]).mean(axis=1))


def _mean_over_conditions(
    clusters: Sequence[Clustering],
    figure: Callable[[Clustering, Floats | None], Floats],
    n_texts: int,
    seed: int,
) -> Estimate:
    """Return the mean of a figure over conditions, with a bootstrap interval over texts.

    The bootstrap resamples the texts with their clusters, without clustering again.
    """
    if not clusters:
        return Estimate(math.nan)
    value = float(np.mean([figure(clustering, None) for clustering in clusters]))
    n = len({position for clustering in clusters for position in clustering.positions.tolist()})
    if n < MIN_PAIRS:
        return Estimate(value)
    counts = np.random.default_rng(seed).multinomial(n_texts, np.full(n_texts, 1 / n_texts), _DRAWS)
    weights = counts.astype(np.float64)
    sampled = np.mean(
        [figure(clustering, weights[:, clustering.positions]) for clustering in clusters], axis=0
    )
    half = float(student.ppf(1 - LEVEL / 2, n - 1) * sampled.std(ddof=1))
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))


# -- texts that do not mention a condition -----------------------------------------------------

#: Minimum number of texts that mention a condition, maximum share of them, and maximum numbers of
#: conditions of a set and of texts of each kind.
_LEAST_MENTIONS, _MOST_MENTIONS, _CONDITIONS, _MENTIONS = 30, 0.6, 12, 50
#: Words of conditions that say nothing.
_EMPTY = frozenset(
    "the a an of for to is it in at or by and on be with from which where what whether has "
    "name type number user used that".split()
)


class Mentions(NamedTuple):
    """Texts that mention a condition, and texts that do not.

    Attributes:
        condition: the condition.
        present: texts that mention it.
        same_topic: texts of the same topic or group that do not.
        any_topic: texts of any topic that do not.
    """

    condition: str
    present: Sequence[str]
    same_topic: Sequence[str]
    any_topic: Sequence[str]


def sample_mentions(whole: AspectSample, seed: int = 0) -> list[Mentions]:
    """Sample texts with and without an attribute, for the commonest conditions of a set.

    Every text must have the attributes that it mentions. Texts that have an attribute with a
    similar name are left out. The topic of an attribute is what precedes the full stop in its id,
    as in ``hotels.date``; without one, the topic of a text is its group.
    """
    texts = [text for text in whole.texts if len(text.text) < _LONGEST_TEXT]
    counts = Counter(key for text in texts for key in text.attributes if key in whole.conditions)
    words = {key: _content_words(key, item) for key, item in whole.conditions.items()}
    samples = []
    for key, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        # Only some texts have an intent, although every request has one.
        if key.endswith("intent") or not _LEAST_MENTIONS <= count <= _MOST_MENTIONS * len(texts):
            continue
        rng = random.Random(seed)  # not used for secrets
        similar = {other for other in counts if words[other] & words[key]}
        absent = [text for text in texts if not similar & text.attributes.keys()]
        having = [text for text in texts if key in text.attributes]
        present = rng.sample(having, min(_MENTIONS, len(having)))
        near = _same_topic(key, present, absent, rng)
        if len(near) >= _LEAST_MENTIONS:
            groups = present, near, rng.sample(absent, min(_MENTIONS, len(absent)))
            samples.append(Mentions(key, *([text.text for text in group] for group in groups)))
        if len(samples) == _CONDITIONS:
            break
    return samples


def _content_words(key: str, wordings: ConditionWordings) -> set[str]:
    texts = (key.rpartition(".")[2], wordings.text, *wordings.others)
    words = {word for text in texts for word in re.findall("[a-z]+", text.lower())}
    return {word for word in words - _EMPTY if len(word) > 2} | {key}


def _same_topic(
    key: str, present: Sequence[AspectText], absent: Sequence[AspectText], rng: random.Random
) -> list[AspectText]:
    """Return texts of ``absent`` with the topic of a condition, or with the groups of texts."""
    topic, stop, _ = key.rpartition(".")
    if stop:
        near = [
            text
            for text in absent
            if any(other.startswith(topic + stop) for other in text.attributes)
        ]
        return rng.sample(near, min(_MENTIONS, len(near)))
    by_group: dict[str, list[AspectText]] = defaultdict(list)
    for text in absent:
        by_group[text.group].append(text)
    for group in by_group.values():
        rng.shuffle(group)
    return [by_group[text.group].pop() for text in present if by_group[text.group]]


def mention_aucs(mentions: Mentions, scores: Mapping[str, float]) -> tuple[float, float]:
    """Return the AUC of scores by text, against texts of the same topic and of any topic."""

    def auc(absent: Sequence[str]) -> float:
        labels = [1] * len(mentions.present) + [0] * len(absent)
        return float(roc_auc_score(labels, [scores[t] for t in (*mentions.present, *absent)]))

    return auc(mentions.same_topic), auc(mentions.any_topic)
