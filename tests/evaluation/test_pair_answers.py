"""Sampled pairs of texts, and how well rankings agree with answers and with labels."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from llmcond.evaluation.analyses import MOST_TEXTS, sample_texts
from llmcond.evaluation.pair_answers import (
    CUTS,
    order_pairs,
    pair_positions,
    rank_pairs,
    score_answers,
    score_labels,
    score_ranking,
)


def sample_groups(n, groups, noise, dim=16, seed=0):
    """Return (n, dim) vectors around the centres of some groups, and their groups."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % groups
    return rng.normal(size=(groups, dim))[labels] + noise * rng.normal(size=(n, dim)), labels


def answers_of(labels):
    first, second = pair_positions(len(labels))
    return labels[first] == labels[second]


def test_sampled_texts_are_distinct_and_depend_on_seed():
    texts = [f"text {i}" for i in range(MOST_TEXTS)]
    assert sample_texts([*texts, *texts]) == list(range(MOST_TEXTS))
    assert sample_texts(["a", "a", "b", "a"]) == [0, 2]
    sample = sample_texts([*texts, "one more", *texts], seed=1)
    assert len(sample) == len(set(sample)) == MOST_TEXTS
    assert sample == sorted(sample) == sample_texts([*texts, "one more", *texts], seed=1)
    assert sample != sample_texts([*texts, "one more"], seed=2)


def test_ranks_are_those_of_cosines_with_mean_ranks_of_ties():
    vectors = np.array([[1.0, 0], [2, 0], [0, 1], [1, 1]])
    first, second = pair_positions(4)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (unit[first] * unit[second]).sum(axis=1).round(6)
    expected = (stats.rankdata(cosines) - 0.5) / 6
    np.testing.assert_allclose(rank_pairs(vectors), expected)


def test_every_beginning_of_the_order_has_pairs_of_all_groups():
    under, without = (rank_pairs(sample_groups(60, 4, 1, seed=seed)[0]) for seed in (1, 2))
    order = order_pairs(under, without)
    assert sorted(order) == list(range(len(under)))
    np.testing.assert_array_equal(order, order_pairs(under, without))
    assert list(order[:20]) != list(order_pairs(under, without, seed=1)[:20])
    n_groups = 2 * (len(CUTS) + 1)
    level = np.searchsorted(CUTS, under[order])
    for start in range(0, 5 * n_groups, n_groups):
        assert np.bincount(level[start : start + n_groups]).tolist() == [2, 2, 2, 2]
    near = order[: 5 * n_groups][level[: 5 * n_groups] == 3]
    alike = without[near] > np.median(without[under > CUTS[-1]])
    assert alike.sum() == 5


def test_scores_of_known_answers_are_auc_and_best_balanced_accuracy():
    vectors, labels = sample_groups(50, 3, 1.5)
    ranks, same = rank_pairs(vectors), answers_of(labels)
    auc, accuracy = (float(figure[0]) for figure in score_ranking(same[None].astype(float), ranks))
    assert auc == pytest.approx(roc_auc_score(same, ranks), abs=1e-6)
    thresholds = np.unique(ranks)[:, None]
    balanced = ((ranks >= thresholds)[:, same].mean(1) + (ranks < thresholds)[:, ~same].mean(1)) / 2
    assert accuracy == pytest.approx(balanced.max(), abs=1e-6)
    (score,) = score_labels([ranks], labels)
    assert (score.auc.value, score.accuracy.value) == pytest.approx((auc, accuracy), abs=1e-6)
    assert score.auc.low < auc < score.auc.high


def test_scores_of_ties_do_not_depend_on_the_order_of_texts():
    ranks, same = np.full(20 * 19 // 2, 0.5), answers_of(labels := np.arange(20) // 10)
    (auc,), (accuracy,) = score_ranking(same[None].astype(float), ranks)
    (score,) = score_labels([ranks], labels)
    assert [auc, accuracy, score.auc.value, score.accuracy.value] == [0.5] * 4
    coarse = rank_pairs(sample_groups(20, 2, 1.5)[0]).round(1)
    (score,) = score_labels([coarse], labels)
    assert score.auc.value == pytest.approx(roc_auc_score(same, coarse), abs=1e-6)


def test_answers_without_contradiction_allow_a_perfect_ranking():
    vectors, labels = sample_groups(60, 3, 0.01)
    without = rank_pairs(sample_groups(60, 3, 100)[0])
    ranks, same = rank_pairs(vectors), answers_of(labels)
    pairs = order_pairs(ranks, without)[:20]
    model, chance = score_answers([ranks, without], pairs, same[pairs])
    assert model.auc.high == model.accuracy.high == 1
    assert model.auc.low > 0.7
    assert not model.is_behind
    assert chance.is_behind
    assert chance.auc.low < 0.5 < chance.auc.high
    assert score_answers([ranks, without], pairs, same[pairs]) == [model, chance]


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "noise"), [(5, 0.8), (2, 2.0)])
def test_intervals_contain_the_truth(groups, noise):
    hits = []
    for user in range(60):
        vectors, labels = sample_groups(80, groups, noise, seed=user)
        ranks, same = rank_pairs(vectors), answers_of(labels)
        without = rank_pairs(vectors + 3 * sample_groups(80, 1, 1, seed=1000 + user)[0])
        pairs = order_pairs(ranks, without, user)[:20]
        for score, ranking in zip(
            score_answers([ranks, without], pairs, same[pairs], user), (ranks, without), strict=True
        ):
            hits.append(score.auc.low <= roc_auc_score(same, ranking) <= score.auc.high)
    assert 0.88 <= np.mean(hits) <= 1
