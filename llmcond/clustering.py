"""Clusters of texts: finding, scoring, describing and drawing them, and their HTML page."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import scale_to_unit_norm
from llmcond.base.errors import format_count
from llmcond.base.files import as_json
from llmcond.base.metrics import Estimate, Floats, Indices, Metric, estimates_json
from llmcond.base.output import Column, Displayed, Table, log, make_frame
from llmcond.base.package import __version__
from llmcond.base.text import Condition, condition_json, condition_key, condition_text, shorten
from llmcond.data.datasets import is_missing
from llmcond.evaluation.analyses import STARTS, kmeans
from llmcond.evaluation.paired import LEVEL, MIN_PAIRS, ROUNDING
from llmcond.evaluation.results import interval_text
from llmcond.report.figures import MapPanel, plot_maps
from llmcond.report.page import write_html
from llmcond.report.tables import INTERVAL_NOTE, factors_text, head_text
from llmcond.runs.similarity import count_foreign_texts, read_frequent_words

Vectors = NDArray[np.float32]
Labels = NDArray[np.int64]

#: Label of texts that HDBSCAN assigns to no cluster.
NOISE = -1
#: Number of texts that K is chosen on; computing the silhouette takes every pair of them.
SAMPLE_SIZE = 2_000
#: Mean silhouette up to which there is no substantial structure (Kaufman and Rousseeuw, 1990).
CLEAR_SILHOUETTE = 0.25
#: Number of starts of K-means when choosing K.
_STARTS_OF_CHOICE = 2
#: Number of principal components that HDBSCAN works on.
_COMPONENTS = 5


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
    candidates = list(range(2, 13))
    while candidates[-1] <= 80:
        candidates.append(candidates[-1] * 5 // 4)
    candidates = [k for k in candidates if k == 2 or 10 * k <= len(points)]
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
        base_name: title of the vectors to compare with, such as ``minilm, no condition``.
        metrics: for each metric, its value for the clusters, for clusters of the vectors to compare
            with (by the same method; K-means finds the same number), and the difference on the same
            texts, each with a 95 % interval over texts.
    """

    column: str
    n: int
    classes: int
    base_name: str
    metrics: Mapping[str, tuple[Estimate, Estimate, Estimate]]

    @property
    def is_poor(self) -> bool:
        """Whether the clusters agree little with the labels."""
        return self.metrics["v_measure"][0].value < _MIN_V_MEASURE

    def to_json(self) -> dict[str, Any]:
        """Return the scores as ``--json`` prints them."""
        values: dict[str, Any] = {"column": self.column, "n": self.n, "classes": self.classes}
        values["base"] = self.base_name
        for name, figures in self.metrics.items():
            for prefix, figure in zip(("", "base_", "minus_base_"), figures, strict=True):
                values |= estimates_json({f"{prefix}{name}": figure})
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
    figures = {}
    for metric in METRICS:
        first, second = (
            _MeasuredMetric.of(metric, assigned[has_label], truth) for assigned in (clusters, base)
        )
        ends, width = (metric.least, metric.most), metric.most - metric.least
        difference = first.minus(second).estimate(-width, width)
        figures[metric.name] = first.estimate(*ends), second.estimate(*ends), difference
    return LabelAgreement(column, len(truth), len(classes), base_name, figures)


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


#: Number of characters at the beginning of a text that words are taken from.
_MAX_TEXT = 10_000
#: Number of characters from which a sequence without a space is data or an address, and no word.
_MAX_WORD = 50

_HAN = r"\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_HIRAGANA = r"\u3041-\u309f"
_KATAKANA = r"\u30a0-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese and Khmer
_WITHOUT_SPACES = re.compile(f"[{_HAN}{_UNSPACED}]")
#: Share of the weight of a candidate that a longer one must have to replace it.
_SAME_WORD = 0.75
#: Numbers of characters in the candidates of unspaced scripts; a mark belongs to its letter.
_HAN_SIZES, _UNSPACED_SIZES = range(1, 5), range(2, 13)
#: Thai and Lao vowels that are written before or after the consonant of their syllable.
_LEADING, _FOLLOWING = (
    "\u0e40\u0e41\u0e42\u0e43\u0e44\u0ec0\u0ec1\u0ec2\u0ec3\u0ec4",
    "\u0e30\u0e32\u0e33\u0e45\u0eb0\u0eb2\u0eb3",
)
#: Chinese characters that mostly have a grammatical function, with which no word begins or ends.
_HAN_FUNCTION = (
    "的了是在我你您他她它们們和与與也都就很这這那吗嗎呢吧啊之不有没沒一个個把被让讓给給请請"
)

_MARKUP = re.compile(
    r"<(script|style)\b[^>]*>.*?</\1\s*>|<!--.*?-->|</?[a-z!][^<>]*>", re.IGNORECASE | re.DOTALL
)
_ADDRESS = re.compile(r"\b(?:https?://|www\.)\S+|(?<![^\s@])[^\s@]+@[^\s@]+\.\S+", re.IGNORECASE)
_APOSTROPHES = str.maketrans("’ʼ＇", "'''")
#: Articles and pronouns of French and Italian that an apostrophe joins to the next word.
_ELIDED = frozenset("l d j qu n c m t s lorsqu jusqu dell all nell sull un".split())  # noqa: SIM905
#: Ends of English words after an apostrophe, as in "it's" and "we'll".
_CONTRACTED = frozenset("s t m re ve ll d".split())  # noqa: SIM905


def clean_text(text: str) -> str:
    """Return the beginning of a text in lower case, without markup, addresses and greetings."""
    text = html.unescape(html.unescape(text[:_MAX_TEXT]))
    text = _ADDRESS.sub(" ", _MARKUP.sub(" ", text)).translate(_APOSTROPHES)
    text = unicodedata.normalize("NFC", text).lower()
    return _formulas().sub(" ", text)


@cache
def _formulas() -> re.Pattern[str]:
    phrases = map(re.escape, read_frequent_words().phrases)
    # Letters of Latin script end a phrase only if a word ends there.
    return re.compile("|".join(rf"(?<![a-z]){phrase}(?![a-z])" for phrase in phrases))


def word_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of a word, with the combining marks that occur in the texts.

    Its groups are named ``han``, ``katakana``, ``hiragana``, ``unspaced`` and ``word``.
    """
    characters: set[str] = set().union(*texts)
    # ``\w`` contains no marks. The joiners, which choose the form of a letter, count as marks.
    marks = "".join(c for c in sorted(characters) if unicodedata.category(c)[0] == "M")
    unspaced = f"{_HAN}{_HIRAGANA}{_KATAKANA}{_UNSPACED}"
    letter, mark = rf"(?:(?![_{unspaced}])\w)", f"[\u200c\u200d{marks}]"
    return re.compile(
        f"(?P<han>[{_HAN}]+)|(?P<katakana>[{_KATAKANA}]+)|(?P<hiragana>[{_HIRAGANA}]+)"
        f"|(?P<unspaced>[{_UNSPACED}\u200c\u200d]+)"
        f"|(?P<word>{letter}(?:{mark}|['·-]?{letter})*)"
    )


def find_words(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the words of a cleaned text, and the candidates of scripts without spaces."""
    for match in pattern.finditer(text):
        if match.lastgroup == "han":
            for candidate in _subsequences(list(match[0]), _HAN_SIZES):
                if candidate[0] not in _HAN_FUNCTION and candidate[-1] not in _HAN_FUNCTION:
                    yield candidate
        elif match.lastgroup == "unspaced":
            for candidate in _subsequences(_split_letters(match[0]), _UNSPACED_SIZES):
                if candidate[0] not in _FOLLOWING and candidate[-1] not in _LEADING:
                    yield candidate
        # Hiragana mostly inflects the word before it, and is left out.
        elif match.lastgroup != "hiragana":
            word = _strip_contraction(match[0])
            if 1 < len(word) <= _MAX_WORD:
                yield word


def _strip_contraction(word: str) -> str:
    """Return a word without an article before its apostrophe, or a contraction after it."""
    start, apostrophe, rest = word.partition("'")
    if not apostrophe:
        return word
    if start in _ELIDED and rest not in _CONTRACTED:
        return rest
    return "not" if rest == "t" else start if rest in _CONTRACTED else word


def _split_letters(word: str) -> list[str]:
    """Split a word into letters, each with the marks that follow it."""
    letters: list[str] = []
    for character in word:
        if letters and (unicodedata.category(character)[0] == "M" or character in "\u200c\u200d"):
            letters[-1] += character
        else:
            letters.append(character)
    return letters


def _subsequences(letters: list[str], sizes: range) -> Iterator[str]:
    for size in sizes:
        for start in range(len(letters) - size + 1):
            yield "".join(letters[start : start + size])


def is_unspaced(word: str) -> bool:
    """Return whether a word is a candidate of a script without spaces."""
    return _WITHOUT_SPACES.match(word) is not None


def is_number(word: str) -> bool:
    """Return whether a word has no letter, such as a date or the number of an order."""
    return not any(character.isalpha() for character in word)


def select_distinct(terms: Sequence[str], weights: Floats, n_terms: int = 4) -> list[str]:
    """Return at most ``n_terms`` of the terms, none of which overlaps another one.

    Args:
        terms: (n,) words, and candidates of scripts without spaces, in descending order of weight.
        weights: (n,) their weights. A candidate is replaced by the longest one that contains it
            and has nearly the same weight, since it is then a part of a longer word.
        n_terms: largest number of terms.
    """
    selected: list[str] = []
    unspaced = [
        (term, weight) for term, weight in zip(terms, weights, strict=True) if is_unspaced(term)
    ]
    for term, weight in zip(terms, weights, strict=True):
        longest = term
        if is_unspaced(term):
            longer = [t for t, w in unspaced if term in t and w >= _SAME_WORD * weight]
            longest = max(longer, key=len)
        if not any(_overlap(longest, other) for other in selected):
            selected.append(longest)
        if len(selected) == n_terms:
            break
    return selected


def _overlap(first: str, second: str) -> bool:
    """Return whether two candidates of scripts without spaces overlap, or are equal."""
    if not (is_unspaced(first) and is_unspaced(second)):
        return first == second
    if first in second or second in first:
        return True
    sizes = range(2, min(len(first), len(second)))
    return any(first[-n:] == second[:n] or second[-n:] == first[:n] for n in sizes)


#: Numbers of typical texts, and of terms that a cluster's name is selected from.
_TYPICAL, _CANDIDATES = 3, 1_000
#: The candidates of each cluster that are embedded.
_EMBEDDED = 20


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """A cluster, or the texts that are in no cluster (number -1).

    Attributes:
        cluster: number of the cluster; 0 is the largest.
        size: number of texts.
        name: the characteristic terms, separated by commas; empty if there are none.
        typical: the texts nearest to the centre; empty for texts in no cluster.
    """

    cluster: int
    size: int
    name: str
    typical: tuple[str, ...]


def describe_clusters(
    texts: Sequence[str],
    vectors: Vectors,
    labels: Labels,
    embed: Callable[[Sequence[str]], Vectors] | None = None,
    answers: Sequence[str] | None = None,
) -> list[ClusterSummary]:
    """Describe the clusters of n texts, the largest first, texts in no cluster last.

    Args:
        texts: (n,) the texts.
        vectors: (n, d) the vectors that were clustered.
        labels: (n,) the number of each text's cluster.
        embed: computes the (m, d) vectors of words, as those of the texts. Names then prefer words
            that are near their cluster in the embeddings, which follow the condition.
        answers: (n,) answers, by the most frequent of which clusters are named; None: by words.
    """
    numbers = [*range(int(labels.max()) + 1), *([NOISE] if NOISE in labels else [])]
    frequent = read_frequent_words().greetings
    if count_foreign_texts(texts)[0]:
        frequent |= read_frequent_words().foreign
    cleaned = [clean_text(text) for text in texts]
    pattern = word_pattern(cleaned)
    words = [list(find_words(text, pattern)) for text in cleaned]
    if answers is not None:
        key_of = {answer: condition_key(answer) for answer in set(answers)}
        keys = [key_of[answer] for answer in answers]
        spellings = dict(zip(keys, answers, strict=True))
        names = {n: _frequent_answers(keys, spellings, labels == n) for n in numbers}
    else:
        terms = _find_terms(words, labels, numbers, frequent)
        if embed is not None:
            terms = _prefer_near_terms(terms, vectors, labels, embed)
        names = {number: ", ".join(select_distinct(*terms[number])) for number in numbers}
    clusters = []
    for number in numbers:
        inside = np.flatnonzero(labels == number)
        typical: dict[str, str] = {}
        if number != NOISE:
            centre = vectors[inside].mean(axis=0)
            for i in inside[np.argsort(((vectors[inside] - centre) ** 2).sum(axis=1))].tolist():
                # Texts that differ in case, spaces or punctuation only are typical once.
                key = " ".join(match[0] for match in pattern.finditer(cleaned[i]))
                typical.setdefault(key or condition_key(texts[i]), texts[i])
                if len(typical) == _TYPICAL:
                    break
        summary = ClusterSummary(number, len(inside), names[number], tuple(typical.values()))
        clusters.append(summary)
    return clusters


def _frequent_answers(
    keys: Sequence[str], spellings: Mapping[str, str], inside: NDArray[np.bool_]
) -> str:
    """Return the most frequent answers of a cluster that at least a tenth of its texts share."""
    counts = Counter(keys[i] for i in np.flatnonzero(inside).tolist())
    common = counts.most_common(3)
    frequent = [spellings[key] for key, n in common if 10 * n >= inside.sum()]
    return ", ".join(frequent or [spellings[common[0][0]]])


#: Terms of a cluster, the best first, and their weights.
_Terms = tuple[list[str], Floats]


def _prefer_near_terms(
    terms: Mapping[int, _Terms],
    vectors: Vectors,
    labels: Labels,
    embed: Callable[[Sequence[str]], Vectors],
) -> dict[int, _Terms]:
    """Weight the best terms of each cluster by how much nearer they are to it than to others.

    The parts of words in scripts without spaces keep their weights, by which they are joined.
    """
    near = {number: words[:_EMBEDDED] for number, (words, _) in terms.items() if number != NOISE}
    vocabulary = sorted(set(chain.from_iterable(near.values())))
    if len(near) < 2 or not vocabulary or any(map(is_unspaced, vocabulary)):
        return dict(terms)
    means = np.stack([vectors[labels == number].mean(axis=0) for number in near])
    similarities = scale_to_unit_norm(embed(vocabulary)) @ scale_to_unit_norm(means).T
    nearer = similarities - (similarities.sum(axis=1, keepdims=True) - similarities) / (
        len(near) - 1
    )
    weighted = dict(terms)
    for column, (number, words) in enumerate(near.items()):
        rows = np.searchsorted(vocabulary, words)
        weights = terms[number][1][: len(words)] * nearer[rows, column]
        order = np.argsort(-weights)
        order = order[weights[order] > 0]
        if len(order):
            weighted[number] = [words[i] for i in order], weights[order]
    return weighted


def _find_terms(
    words: Sequence[Sequence[str]],
    labels: Labels,
    numbers: Sequence[int],
    frequent: frozenset[str],
) -> dict[int, _Terms]:
    """Return the terms whose mean TF-IDF in a cluster exceeds that in all other texts the most.

    Numbers and ``frequent`` words are only used for a cluster without any other term, and so are
    candidates of scripts without spaces that a single text contains.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer

    def select_terms(text_words: Sequence[str]) -> list[str]:
        return [word for word in text_words if word not in ENGLISH_STOP_WORDS]

    vectorizer = TfidfVectorizer(analyzer=select_terms, sublinear_tf=True, max_features=50_000)
    try:
        weights = vectorizer.fit_transform(words)
    except ValueError:  # no text contains a word, only punctuation or single letters
        return {number: ([], np.zeros(0)) for number in numbers}
    terms, total = vectorizer.get_feature_names_out(), np.asarray(weights.sum(axis=0))[0]
    counts = weights.getnnz(axis=0)
    is_secondary = np.array(
        [
            term in frequent or is_number(term) or (is_unspaced(term) and count == 1)
            for term, count in zip(terms, counts, strict=True)
        ]
    )
    best_terms = {}
    for number in numbers:
        inside = labels == number
        cluster_total, n = np.asarray(weights[inside].sum(axis=0))[0], int(inside.sum())
        excess = cluster_total / n - (total - cluster_total) / max(len(words) - n, 1)
        order = np.lexsort((-excess, is_secondary))
        order = order[excess[order] > 0]
        primary = order[~is_secondary[order]]
        best = (primary if len(primary) else order)[: 0 if number == NOISE else _CANDIDATES]
        best_terms[number] = terms[best].tolist(), excess[best]
    return best_terms


def without_condition(encoder: str) -> str:
    """Return the title of an encoder's vectors without a condition; a path is shortened."""
    return f"{Path(encoder).name}, no condition"


@dataclass(frozen=True)
class Clustering(Displayed):
    """Clusters of texts under one condition.

    Attributes:
        encoder: name of the encoder whose vectors were clustered.
        condition: the condition; None: vectors of the texts without a condition.
        labels: (n,) the number of each text's cluster; -1: in no cluster.
        clusters: the clusters, the largest first; texts in no cluster come last.
        silhouette: mean silhouette, on at most 2,000 texts; None: undefined.
        silhouettes: mean silhouette of every candidate K, if K was chosen.
        scores: agreement with known labels, if there are any.
        guide: number of labelled texts of each label in the guide; None: there is no guide.
        guided: number of texts with each label of the guide, by cluster; None: there is no guide.

    Examples:
        >>> import llmcond
        >>> texts = ["A dog runs.", "Two dogs run.", "A cat sleeps.", "Three cats sleep."]
        >>> result = llmcond.cluster(texts=texts, condition="the activity", clusters=2)
        >>> clustering = result.clusterings[0]
        >>> clustering.k, clustering.title
        (2, 'the activity')
        >>> clustering.labels.tolist()
        [..., ..., ..., ...]
    """

    encoder: str
    condition: str | None
    labels: Labels
    clusters: Sequence[ClusterSummary]
    silhouette: float | None = None
    silhouettes: Mapping[int, float] = field(default_factory=dict)
    scores: LabelAgreement | None = None
    guide: Mapping[str, int] | None = None
    guided: Mapping[int, Mapping[str, int]] | None = None

    @property
    def title(self) -> str:
        """The heading of the clustering in tables and on the page."""
        condition = self.condition
        return without_condition(self.encoder) if condition is None else condition_text(condition)

    @property
    def k(self) -> int:
        """The number of clusters, without the texts that are in none."""
        return sum(cluster.cluster != NOISE for cluster in self.clusters)

    @property
    def noise(self) -> int:
        """The number of texts in no cluster."""
        return int((self.labels == NOISE).sum())

    def to_json(self) -> dict[str, Any]:
        """Convert the clustering to the dictionary that ``--json`` prints.

        Returns:
            The condition, the number of clusters and of texts in none, the clusters, silhouettes,
            scores and guide; not the label of each text.
        """
        guided = {str(k): counts for k, counts in (self.guided or {}).items()} or None
        values = {
            "k": self.k,
            "noise": self.noise,
            "clusters": self.clusters,
            "silhouette": self.silhouette,
            "silhouettes": {str(k): round(score, 4) for k, score in self.silhouettes.items()},
            "scores": self.scores,
            "guide": self.guide,
            "guided": guided,
        }
        return {**condition_json(self.condition), **as_json(values)}

    @override
    def _displayed(self) -> Mapping[str, Any]:
        # The values of a condition are a part of it, and no attribute.
        return {name: value for name, value in self.to_json().items() if name != "values"}


@dataclass(frozen=True)
class ClusterResult(Displayed):
    """Clusters of texts under each condition, with the settings that they were computed with.

    Attributes:
        out: the table that was written, or None.
        report: the HTML page that was written, or None.
        map: the picture of the map that was written, or None.
        file: source of the texts.
        texts: number of texts.
        distinct: number of distinct texts.
        encoder: name of the encoder.
        prompt: name of the prompt.
        head: name of the head.
        method: ``kmeans`` or ``hdbscan``.
        seed: random seed.
        clusterings: the clustering under each condition.
        table: the columns that ``out`` contains: the texts, the columns to keep, and the cluster
            and its name under each condition.

    Examples:
        >>> import llmcond
        >>> texts = ["A dog runs.", "Two dogs run.", "A cat sleeps.", "Three cats sleep."]
        >>> conditions = ["the animal", "the activity"]
        >>> result = llmcond.cluster(texts=texts, condition=conditions, clusters=2)
        >>> result.method, result.texts
        ('kmeans', 4)
        >>> [clustering.condition for clustering in result.clusterings]
        ['the animal', 'the activity']
        >>> list(result.to_pandas())[:3]
        ['text', 'cluster (the animal)', 'name (the animal)']
    """

    out: Path | None
    report: Path | None
    map: Path | None
    file: str
    texts: int
    distinct: int
    encoder: str
    prompt: str
    head: str
    method: str
    seed: int
    clusterings: Sequence[Clustering]
    table: Mapping[str, Sequence[Any]]

    def to_json(self) -> dict[str, Any]:
        """Convert the result to the dictionary that ``--json`` prints.

        Returns:
            The attributes but ``table`` as JSON values. The label of each text is included if no
            table was written.
        """
        values = super().to_json()
        del values["table"]
        if self.out is None:
            for clustering, record in zip(self.clusterings, values["clusterings"], strict=True):
                record["labels"] = clustering.labels.tolist()
        return values

    def to_pandas(self) -> Any:
        """Convert ``table`` to a data frame, with one row for each text in the original order.

        Returns:
            A ``pandas.DataFrame`` with the columns of ``out``.

        Raises:
            LlmcondError: pandas is not installed.
        """
        return make_frame(dict(self.table))

    @override
    def _displayed(self) -> Mapping[str, Any]:
        facts = {name: getattr(self, name) for name in ("file", "texts", "encoder", "head", "out")}
        rows = [
            {
                "condition": clustering.title,
                "cluster": cluster.cluster,
                "texts": cluster.size,
                "name": cluster.name,
                "typical": shorten("".join(cluster.typical[:1])),
            }
            for clustering in self.clusterings
            for cluster in clustering.clusters
        ]
        return {**facts, "clusterings": rows}


#: Maximal number of clusters in a table; ``--json`` has all.
_MAX_CLUSTERS = 20


def cluster_tables(result: ClusterResult) -> list[Table]:
    """Return the clusters under each condition, and their agreement with known labels."""
    scored = [(c.title, c.scores) for c in result.clusterings if c.scores is not None]
    tables = [_cluster_table(clustering) for clustering in result.clusterings]
    return [*tables, *([_score_table(scored, starts_text(result))] if scored else [])]


def _cluster_table(clustering: Clustering) -> Table:
    shown = clustering.clusters[:_MAX_CLUSTERS]
    n = len(clustering.clusters)
    note = f", the {len(shown)} largest of {n} shown" if len(shown) < n else ""
    numbers = ["none" if c.cluster == NOISE else c.cluster for c in shown]
    columns = [
        Column("cluster", numbers, "figures"),
        Column("texts", [f"{cluster.size:,}" for cluster in shown], "figures"),
        Column("name", [cluster.name for cluster in shown]),
    ]
    if clustering.guided:
        counts = [clustering.guided.get(cluster.cluster, {}).items() for cluster in shown]
        labels = [", ".join(f"{label} {n:,}" for label, n in pairs) for pairs in counts]
        columns.append(Column("guide labels", labels))
    texts = [shorten("".join(cluster.typical[:1])) for cluster in shown]
    columns.append(Column("a typical text", texts))
    return Table(columns, f"{clustering.title}: {clustering.k} clusters{note}")


def _score_table(scored: Sequence[tuple[str, LabelAgreement]], starts: str) -> Table:
    intervals = INTERVAL_NOTE.format(groups="texts").replace(
        " and, with several fits, over seeds", ""
    )
    base = scored[0][1].base_name
    headings = [text for metric in METRICS for text in (metric.heading, base, "difference")]
    figures = zip(*(agreement_figures(scores) for _, scores in scored), strict=True)
    columns = [
        Column("condition", [name for name, _ in scored]),
        Column("labels", [scores.column for _, scores in scored]),
        Column("texts", [f"{scores.n:,}" for _, scores in scored], "figures"),
        *(
            Column(heading, [" ".join(cell).rstrip() for cell in cells], "figures")
            for heading, cells in zip(headings, figures, strict=True)
        ),
    ]
    note = f"Agreement with known labels. {factors_text(METRICS)}{intervals}{starts}"
    return Table(columns, note)


def quality_text(clustering: Clustering, method: str) -> str:
    """Say how many clusters there are, how well they are separated and agree with labels."""
    text = format_count(clustering.k, "cluster")
    if method == "hdbscan":
        text += f"; {clustering.noise:,} of {len(clustering.labels):,} texts are in no cluster"
    if clustering.silhouette is not None:
        unclear = ", so not clearly separated" if clustering.silhouette <= CLEAR_SILHOUETTE else ""
        text += f"; silhouette {clustering.silhouette:.2f}{unclear}"
    if clustering.scores is not None and clustering.scores.is_poor:
        text += f"; little agreement with the labels {clustering.scores.column}"
    return text


def starts_text(result: ClusterResult) -> str:
    """Return a note for titles on the random starts that K-means depends on."""
    if result.method != "kmeans":
        return ""
    return f" K-means: best of {STARTS} starts, seed {result.seed}; other seeds change the results."


def agreement_figures(scores: LabelAgreement) -> list[tuple[str, str]]:
    """Return each metric of the clusters, of the base's clusters, and the difference.

    Each is a text, and its interval as a text.
    """
    return [
        (metric.format(figure.value, signed=number == 2), interval_text(metric, figure))
        for metric in METRICS
        for number, figure in enumerate(scores.metrics[metric.name])
    ]


_FOLDER = Path(__file__).parent / "report"
_METHODS = {"kmeans": "K-means", "hdbscan": "HDBSCAN"}
#: Maximal number of texts on the map: t-SNE of more takes minutes.
_MAX_TEXTS = 5_000
#: Maximal number of characters of a text on the map.
_MAX_CHARACTERS = 1_000
#: Resolution of the page's map: number of steps from one side to the other.
_STEPS = 2_000


class ClusterMap:
    """A map: clusterings of the same texts, which are sampled if there are many.

    Attributes:
        texts: the texts on the map.
        clusterings: the clusterings, in the order in which they are displayed.
    """

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self._sampled, self._seed = sample_indices(len(texts), _MAX_TEXTS, seed), seed
        self.texts = [shorten(texts[i], _MAX_CHARACTERS) for i in self._sampled.tolist()]
        self.clusterings: list[Clustering] = []
        self._vectors: list[Vectors] = []

    def add(self, clustering: Clustering, vectors: Vectors) -> None:
        """Add a clustering of all texts, and the vectors, (n, d), that were clustered."""
        self.clusterings.append(clustering)
        self._vectors.append(vectors[self._sampled])

    def page_data(self) -> dict[str, Any]:
        """Return the data that the page's script needs, as JSON values."""
        return {
            "texts": self.texts,
            "shown": [
                {
                    "title": clustering.title,
                    "places": np.rint(_STEPS * points).astype(int).ravel().tolist(),
                    "labels": clustering.labels[self._sampled].tolist(),
                    "clusters": [[c.cluster, c.name, c.size] for c in clustering.clusters],
                }
                for clustering, points in zip(self.clusterings, self._positions, strict=True)
            ],
            "steps": _STEPS,
        }

    def plot(self, path: Path) -> None:
        """Draw the map of each clustering as a picture; see ``plot_maps``."""
        panels = [
            MapPanel(
                clustering.title,
                points,
                clustering.labels[self._sampled],
                {
                    c.cluster: f"{'in no cluster' if c.cluster == NOISE else c.cluster}"
                    f"{f'  {c.name}' if c.name else ''} ({c.size:,})"
                    for c in clustering.clusters
                },
            )
            for clustering, points in zip(self.clusterings, self._positions, strict=True)
        ]
        caption = (
            "Similar texts lie close together (t-SNE). Distances between groups, and directions, "
            "mean little."
        )
        plot_maps(panels, self.texts, path, caption)

    @cached_property
    def _positions(self) -> list[MapPositions]:
        log.info(f"drawing a map of {len(self.texts):,} texts")
        return compute_maps(self._vectors, self._seed)


def write_cluster_page(result: ClusterResult, drawing: ClusterMap, path: Path) -> None:
    """Write the page of a result.

    Args:
        result: the result.
        drawing: the map of the texts.
        path: the file to write.
    """
    scored = [(c.title, c.scores) for c in result.clusterings if c.scores is not None]
    # Those of the map have no scores; the last may be that of the base encoder.
    shown = [*result.clusterings, *drawing.clusterings[len(result.clusterings) :]]
    values: dict[str, Any] = {
        "result": result,
        "shown": shown,
        "drawn": len(drawing.texts),
        "labelled": sum(sum((c.guide or {}).values()) for c in result.clusterings),
        "noise": NOISE,
        "cross_tables": [_cross_table(a, b) for a, b in combinations(drawing.clusterings, 2)],
        "qualities": [quality_text(c, result.method) for c in shown],
        "method": _METHODS[result.method],
        "scores": [(title, scores, agreement_figures(scores)) for title, scores in scored],
        "metrics": METRICS,
        "base": scored[0][1].base_name if scored else "",
        "starts": starts_text(result),
        "factors": factors_text(METRICS),
        "provenance": _describe_provenance(result),
        "shorten": shorten,
    }
    script, style = (
        (_FOLDER / f"clusters.{suffix}").read_text("utf-8") for suffix in ("js", "css")
    )
    write_html(path, _FOLDER / "clusters.html.j2", [script], style, drawing.page_data(), **values)


def _cross_table(first: Clustering, second: Clustering) -> tuple[Clustering, Clustering, list[Any]]:
    """Return two clusterings, with the number of texts that each pair of their clusters shares.

    Rows and columns are in the order of the clusters.
    """
    rows, columns = ([c.cluster for c in clustering.clusters] for clustering in (first, second))
    counts = np.zeros((len(rows), len(columns)), dtype=np.int64)
    # The label -1 of texts in no cluster indexes the last row or column, which is theirs.
    np.add.at(counts, (first.labels, second.labels), 1)
    return first, second, counts.tolist()


def _describe_provenance(result: ClusterResult) -> dict[str, str]:
    """Return how the page was made, as labelled texts."""
    conditions = [clustering.condition for clustering in result.clusterings]
    parts = {
        f"{name} {condition.text}": ", ".join(part)
        for condition in conditions
        if isinstance(condition, Condition)
        for name, part in (("values of", condition.values), ("ignored under", condition.ignore))
        if part
    }
    guides = {
        f"guide of {c.title}": ", ".join(f"{name}: {n:,}" for name, n in c.guide.items())
        for c in result.clusterings
        if c.guide
    }
    return {
        "texts": f"{result.file}: {result.texts:,} texts, {result.distinct:,} of them distinct",
        **parts,
        "encoder": result.encoder,
        "prompt": result.prompt,
        "head": head_text(result.head),
        "method": _METHODS[result.method],
        **(guides or {"guide": "none"}),
        "seed": str(result.seed),
        "llmcond": __version__,
    }
