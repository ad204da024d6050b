"""How well similarities agree with the answers to "same in this respect?" for a few pairs of texts.

The pairs are sampled from all pairs of n texts, so that near and far ones under a condition, alike
and unlike ones without it, are all among them. The figures are about all pairs nevertheless: a
Bayesian logistic regression predicts the answer to each pair from the similarities that the sample
depends on, and the figures are computed from its predictions for all pairs. Their intervals have
been checked against texts with known labels (``scripts/simulate_answers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import scale_to_unit_norm
from llmcond.base.metrics import Estimate, Floats

#: The ranks that divide pairs into far, middle, near and nearest ones under the condition.
CUTS = (0.4, 0.75, 0.95)
#: Scale of the Cauchy priors of the intercept and of the slopes, and the centre of the intercept's.
_INTERCEPT, _SLOPE, _CENTRE = 2.0, 1.0, -1.0
#: Standard deviation of the normal prior of the groups of pairs.
_GROUP = 1.0
#: Number of walkers of the sampler, their steps, and the steps whose positions are used.
_WALKERS, _STEPS, _USED = 80, 300, range(240, 300, 10)
#: The largest number of pairs that figures are computed from.
_MOST_PAIRS = 4_000
#: The probability from which on a ranking is behind another one; two-sided, 95 %.
_CERTAIN = 0.975


def pair_positions(n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of both texts of all n (n - 1) / 2 pairs of n texts."""
    first, second = np.triu_indices(n, 1)
    return first, second


def rank_pairs(vectors: NDArray[Any]) -> Floats:
    """Return the ranks of the cosines of all pairs of (n, d) vectors; the nearest pair is near 1.

    The ranks are in the order of ``pair_positions``, and ties have their mean rank.
    """
    unit = scale_to_unit_norm(np.asarray(vectors, dtype=np.float32))
    cosines = (unit @ unit.T)[pair_positions(len(unit))]
    _, position, counts = np.unique(cosines.round(6), return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - counts / 2)[position] / len(cosines))


def order_pairs(under: Floats, without: Floats, seed: int = 0) -> NDArray[np.int64]:
    """Return pairs in a random order, every beginning of which is a stratified sample.

    Pairs are divided by CUTS of their rank under a condition, and each of these groups in half by
    the rank without one. The order takes a random pair of each group in turn.

    Args:
        under: (m,) ranks of the pairs under the condition.
        without: (m,) ranks of the pairs without a condition.
        seed: the random seed.
    """
    rng = np.random.default_rng(seed)
    groups = []
    level = np.searchsorted(CUTS, under)
    for number in range(len(CUTS) + 1):
        members = rng.permutation(np.flatnonzero(level == number))
        if len(members):
            alike = without[members] > np.median(without[members])
            groups += [members[alike], members[~alike]]
    turns = [np.arange(len(group)) + rng.random() for group in groups]
    return np.concatenate(groups)[np.argsort(np.concatenate(turns), kind="stable")]


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """How well one ranking of pairs agrees with answers, over all pairs.

    Attributes:
        auc: The probability that a pair that is the same is nearer than one that is not. 0.5 is
            chance.
        accuracy: The mean of the shares of same and of different pairs that are classified
            correctly, at the best threshold. 0.5 is chance.
        is_behind: Whether the AUC is lower than the highest one, with a probability of 97.5 %.
    """

    auc: Estimate
    accuracy: Estimate
    is_behind: bool


def score_answers(
    ranks: Sequence[Floats], pairs: NDArray[np.int64], answers: Sequence[bool], seed: int = 0
) -> list[AnswerScores]:
    """Estimate how well rankings of all pairs agree with the answers to some of them.

    Args:
        ranks: (m,) ranks of all pairs, by each ranking. The first and the last one are those that
            ``order_pairs`` took.
        pairs: (k,) positions of the pairs that were answered.
        answers: (k,) whether each of them is the same in the respect in question.
        seed: the random seed.
    """
    rng, yes = np.random.default_rng(seed), np.array(answers, dtype=bool)
    matrix = np.stack(ranks)
    subset = np.unique(np.linspace(0, matrix.shape[1] - 1, _MOST_PAIRS).astype(int))
    inputs, log_prior = _make_inputs(matrix)
    seen = inputs[pairs]

    def log_posterior(weights: Floats) -> Floats:
        logits = weights @ seen.T
        likelihood = (yes * logits - np.logaddexp(0, logits)).sum(axis=1)
        return np.asarray(likelihood + log_prior(weights))

    weights = _sample(log_posterior, inputs.shape[1], rng)
    probabilities = 1 / (1 + np.exp(-np.clip(weights @ inputs[subset].T, -50, 50)))
    figures = [score_ranking(probabilities, row[subset]) for row in matrix]
    best = max(figures, key=lambda both: float(np.median(both[0])))[0]
    separated = [  # whether all pairs that are the same are nearer than all others
        bool(yes.any() and not yes.all() and row[pairs[yes]].min() > row[pairs[~yes]].max())
        for row in matrix
    ]
    return [
        AnswerScores(
            _estimate(auc, is_separated),
            _estimate(accuracy, is_separated),
            bool(np.mean(auc < best) > _CERTAIN),
        )
        for is_separated, (auc, accuracy) in zip(separated, figures, strict=True)
    ]


def score_labels(
    ranks: Sequence[Floats], labels: NDArray[Any], seed: int = 0, samples: int = 200
) -> list[AnswerScores]:
    """Measure how well rankings of all pairs of n texts agree with labels of the texts.

    The intervals are of a bootstrap over texts.

    Args:
        ranks: (m,) ranks of all pairs, by each ranking.
        labels: (n,) labels; two texts are the same if their labels are.
        seed: the random seed.
        samples: the number of bootstrap samples.
    """
    rng, n = np.random.default_rng(seed), len(labels)
    first, second = pair_positions(n)
    same = labels[first] == labels[second]
    counts = rng.multinomial(n, np.full(n, 1 / n), size=samples)
    weights = np.vstack([np.ones(len(same)), counts[:, first] * counts[:, second]])
    figures = []
    for row in ranks:
        order = np.argsort(-row, kind="stable")
        hits = np.cumsum((weights * same)[:, order], axis=1)
        misses = np.cumsum((weights * ~same)[:, order], axis=1)
        # The pairs of a tie are retrieved together, so the curve connects the ends of ties.
        end = np.append(np.diff(row[order]) != 0, True)
        with np.errstate(invalid="ignore"):  # A bootstrap sample may lack equal labels.
            recall, fallout = hits[:, end] / hits[:, -1:], misses[:, end] / misses[:, -1:]
        height = recall - np.diff(recall, axis=1, prepend=0) / 2
        auc = (np.diff(fallout, axis=1, prepend=0) * height).sum(axis=1)
        figures.append((auc, 0.5 + 0.5 * np.maximum((recall - fallout).max(axis=1), 0)))
    best = max(figures, key=lambda both: float(both[0][0]))[0]
    return [
        AnswerScores(
            _bootstrap_estimate(auc),
            _bootstrap_estimate(accuracy),
            bool(np.nanmean(auc[1:] < best[1:]) > _CERTAIN),
        )
        for auc, accuracy in figures
    ]


def _bootstrap_estimate(values: Floats) -> Estimate:
    """Return the first value with the interval of the others."""
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high))


def _make_inputs(ranks: Floats) -> tuple[Floats, Callable[[Floats], Floats]]:
    """Return (m, inputs) inputs of the regression for m pairs, and the log density of its prior.

    The inputs are a constant, the normal scores of each ranking, how far the score under the
    condition exceeds 1, and the groups by CUTS. The latter two are needed because the nearest pairs
    often are the same, whatever the order of the others.
    """
    from scipy.special import ndtri

    scores, level = ndtri(ranks), np.searchsorted(CUTS, ranks[0])
    groups = level == np.arange(len(CUTS) + 1)[:, None]
    inputs = np.vstack([np.ones(ranks.shape[1]), *scores, np.maximum(scores[0] - 1, 0), *groups]).T
    n_slopes = len(ranks) + 1
    centre = np.array([_CENTRE] + [0.0] * n_slopes)
    scale = np.array([_INTERCEPT] + [_SLOPE] * n_slopes)

    def log_prior(weights: Floats) -> Floats:
        slopes, effects = weights[:, : len(scale)], weights[:, len(scale) :]
        cauchy = -np.log1p(((slopes - centre) / scale) ** 2).sum(axis=1)
        return np.asarray(cauchy - 0.5 * ((effects / _GROUP) ** 2).sum(axis=1))

    return inputs, log_prior


def _sample(log_density: Callable[[Floats], Floats], dim: int, rng: np.random.Generator) -> Floats:
    """Return (samples, dim) samples of a density, by the stretch move of Goodman and Weare (2010).

    The sampler has no step size, and does not depend on the scales of the dimensions.
    """
    walkers = 0.5 * rng.normal(size=(_WALKERS, dim))
    density, samples, half = log_density(walkers), [], _WALKERS // 2
    for step in range(_STEPS):
        order = rng.permutation(_WALKERS)
        for moved, others in ((order[:half], order[half:]), (order[half:], order[:half])):
            stretch = (1 + rng.random(half)) ** 2 / 2
            origin = walkers[rng.choice(others, half)]
            proposal = origin + stretch[:, None] * (walkers[moved] - origin)
            proposed = log_density(proposal)
            gain = (dim - 1) * np.log(stretch) + proposed - density[moved]
            accepted = np.log(rng.random(half)) < gain
            walkers[moved[accepted]] = proposal[accepted]
            density[moved[accepted]] = proposed[accepted]
        if step in _USED:
            samples.append(walkers.copy())
    return np.concatenate(samples)


def score_ranking(probabilities: Floats, ranks: Floats) -> tuple[Floats, Floats]:
    """Return (s,) AUCs and accuracies of (m,) ranks for (s, m) probabilities of "same"."""
    order = np.argsort(-ranks, kind="stable")
    same = probabilities[:, order]
    n_same, n = same.sum(axis=1), same.shape[1]
    mean_rank = same @ ranks[order] / n_same
    # The AUC is 1/2 plus the difference of the mean ranks, because ranks are uniform.
    other_rank = (ranks.sum() - same @ ranks[order]) / (n - n_same)
    hits = np.cumsum(same, axis=1)
    misses = np.arange(1, n + 1) - hits
    end = np.append(np.diff(ranks[order]) != 0, True)  # as in ``score_labels``
    gain = (hits / n_same[:, None] - misses / (n - n_same)[:, None])[:, end]
    return 0.5 + mean_rank - other_rank, 0.5 + 0.5 * np.maximum(gain.max(axis=1), 0)


def _estimate(samples: Floats, is_separated: bool) -> Estimate:
    """Return the median with its interval. If no answer contradicts the ranking, it ends at 1."""
    low, middle, high = np.quantile(samples, [0.025, 0.5, 0.975])
    return Estimate(float(middle), float(low), 1.0 if is_separated else float(high))
