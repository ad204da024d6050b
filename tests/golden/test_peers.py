"""Metrics and statistics compared with peers: recorded ones, and live scikit-learn and scipy.

``record_peers.py`` recorded the figures of PyKEEN, arch and statsmodels in ``peers.json``.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond import clustering as cluster_scores
from llmcond.base.metrics import METRICS, choose_metrics
from llmcond.evaluation import paired
from llmcond.evaluation.analyses import impurity_from_counts
from llmcond.evaluation.paired import bootstrap_metrics, combine_errors, holm, paired_differences
from llmcond.evaluation.results import ranks_among

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text(encoding="utf-8"))
RANKINGS = PEERS["rankings"]
NAMES = ("mrr", "hits@1", "hits@3", "hits@5", "hits@10", "mean_rank")


def arrays_of(case):
    return (
        np.array(case["scores"], np.float32),
        np.array(case["answer"]),
        np.array(case["left_out"], bool),
    )


# -- rankings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RANKINGS)
def test_ranks_and_metrics_equal_those_of_pykeen(name):
    case = RANKINGS[name]
    rankings = ranks_among(*arrays_of(case))
    for ties in ("realistic", "optimistic", "pessimistic"):
        ranks = rankings.resolve_ties(ties)
        assert ranks.tolist() == case["pykeen"]["ranks"][ties]
        queries = np.arange(len(ranks))
        directions = {"forward": queries < len(ranks) // 2, "backward": queries >= len(ranks) // 2}
        for direction, expected in case["pykeen"]["metrics"].items():
            selected = ranks[directions.get(direction, slice(None))]
            values = {
                metric.name: metric(selected, np.zeros(len(selected)), queries)
                for metric in choose_metrics(NAMES)
            }
            # PyKEEN averages realistic ranks in float32.
            assert values == pytest.approx(expected[ties], rel=1e-6), direction


def test_average_rank_equals_grouped_means_of_pandas():
    rng = np.random.default_rng(0)
    ranks, history = rng.integers(1, 50, size=80).astype(float), rng.integers(2, 11, size=80)
    by_history = pd.Series(ranks).groupby(history).mean()
    group = np.arange(80)
    assert METRICS["average_rank"](ranks, history, group) == pytest.approx(by_history.mean())
    assert METRICS["average_rank_micro"](ranks, history, group) == pytest.approx(ranks.mean())


# -- clusters ----------------------------------------------------------------------------------

LABELINGS = st.integers(1, 14).flatmap(
    lambda n: st.tuples(
        *(st.lists(st.integers(0, 4), min_size=n, max_size=n).map(np.array) for _ in range(2))
    )
)
PEER_OF = {
    "v_measure": sklearn.metrics.v_measure_score,
    "ari": sklearn.metrics.adjusted_rand_score,
}
LIMITS = [
    ([0], [3]),
    ([0, 0, 0, 0], [1, 1, 1, 1]),
    ([0, 0, 0, 0], [0, 1, 2, 3]),
    ([0, 1, 2, 3], [0, 0, 0, 0]),
    ([0, 1, 2, 3], [3, 1, 0, 2]),
    ([0, 1, 0, 1], [0, 0, 1, 1]),  # worse than chance
    ([-1, -1, 0, 0, 1], [2, 2, 2, 7, 7]),
]


def check_clusters(clusters, labels):
    n = len(labels)
    for metric in cluster_scores.METRICS:
        peer = PEER_OF[metric.name]
        value = metric(clusters, labels, np.arange(n))
        assert value == pytest.approx(peer(labels, clusters), abs=1e-9), metric.name
        if n > 1:
            without = [peer(np.delete(labels, i), np.delete(clusters, i)) for i in range(n)]
            measured = cluster_scores._MeasuredMetric.of(metric, clusters, labels)
            expected = (n - 1) * (value - np.array(without))
            np.testing.assert_allclose(measured.influence, expected, atol=1e-7)


@given(LABELINGS)
@settings(max_examples=25, deadline=None)
def test_cluster_scores_and_jackknife_equal_those_of_scikit_learn(labelings):
    check_clusters(*labelings)


def test_cluster_scores_equal_those_of_scikit_learn_in_limits():
    for clusters, labels in LIMITS:
        check_clusters(np.array(clusters), np.array(labels))


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_impurity_equals_entropies_of_scipy(counts):
    counts = np.array(counts)
    if counts.sum():
        present = counts[counts.sum(axis=1) > 0]
        weights = present.sum(axis=1) / counts.sum()
        expected = float(weights @ scipy.stats.entropy(present, axis=1))
        assert impurity_from_counts(counts) == pytest.approx(expected, abs=1e-12)


# -- correlations ------------------------------------------------------------------------------

#: Few distinct values, so that most examples have ties.
PAIRED = st.integers(3, 40).flatmap(
    lambda n: st.lists(st.tuples(*[st.integers(-5, 5)] * 2), min_size=n, max_size=n)
)
EXTREME = [
    ([1e300, -1e300, 0], [1, 2, 3]),
    ([1e-200, 3e-200, 2e-200], [1, 2, 3]),
    ([1, 1 + 1e-12, 1 + 2e-12], [1, 2, 3]),
    ([0.0, -0.0, 1.0], [1, 2, 3]),
    ([2, 2, 2], [1, 2, 3]),
]


def check_correlations(first, second, tolerance):
    first, second = np.array(first, float), np.array(second, float)
    for name, peer in (("spearman", scipy.stats.spearmanr), ("pearson", scipy.stats.pearsonr)):
        expected = peer(first, second).statistic
        value = METRICS[name](first, second, np.arange(len(first)))
        assert value == pytest.approx(expected, abs=tolerance, nan_ok=True), name


@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
@given(PAIRED)
def test_correlations_equal_those_of_scipy(values):
    check_correlations(*zip(*values, strict=True), 1e-9)


@pytest.mark.filterwarnings(
    "ignore::scipy.stats.ConstantInputWarning", "ignore::scipy.stats.NearConstantInputWarning"
)
def test_correlations_equal_those_of_scipy_in_limits():
    for first, second in EXTREME:
        check_correlations(first, second, 1e-6)


# -- statistics --------------------------------------------------------------------------------


def test_bootstrap_equals_that_of_arch(monkeypatch):
    """Both compute the metrics of two systems on the samples that arch has drawn."""
    rows = {name: np.array(values) for name, values in PEERS["rows"].items()}
    samples = np.array(PEERS["arch"]["samples"])
    n_samples, pairs = samples.shape
    counts = np.stack([np.bincount(sample, minlength=pairs) for sample in samples])
    monkeypatch.setattr(paired, "_sample_pairs", lambda *_: iter([counts.astype(float)]))
    systems = [rows["first"][None], rows["second"][None]]
    metrics = choose_metrics(("spearman", "pearson"))
    resampled = bootstrap_metrics(systems, rows["rating"], rows["pair"], metrics, n_samples)
    values = np.array(PEERS["arch"]["values"]).reshape(-1, 2, 2)  # samples, metrics, systems
    np.testing.assert_allclose(resampled.sampled, values.transpose(1, 2, 0), rtol=0, atol=1e-12)
    # arch divides by the samples, and does not correct for the number of clusters.
    covariance = np.array(PEERS["arch"]["covariance"]) * n_samples / (n_samples - 1)
    covariance *= pairs / (pairs - 1)
    for m in range(2):
        block = covariance[2 * m : 2 * m + 2, 2 * m : 2 * m + 2]
        for i in range(2):
            assert resampled.row_variance(m, i) == pytest.approx(block[i, i])
        difference = block[0, 0] + block[1, 1] - 2 * block[0, 1]
        assert resampled.row_variance(m, 0, 1) == pytest.approx(difference)


def test_variance_of_two_kinds_of_clusters_is_near_that_of_statsmodels():
    """statsmodels computes it in closed form, and the bootstrap has an error of 3 %."""
    recorded = PEERS["statsmodels"]
    ranks, heads, tails = (np.array(recorded[name]) for name in ("ranks", "heads", "tails"))
    both = np.unique(np.stack([heads, tails]), axis=1, return_inverse=True)[1]
    resampled = bootstrap_metrics(
        [ranks[None]], np.zeros(len(ranks)), both, [METRICS["mean_rank"]], 4_000,
        crossed=[heads, tails],
    )  # fmt: skip
    variances = [resampled.row_variance(0, 0)]
    variances += [part.row_variance(0, 0) for part in resampled.crossed]
    assert variances == pytest.approx(recorded["variance"], rel=0.1)


def test_holm_correction_equals_that_of_statsmodels():
    recorded = PEERS["statsmodels"]
    for p, expected in zip(recorded["p"], recorded["holm"], strict=True):
        np.testing.assert_allclose(holm(np.array(p)), expected)


def test_intervals_and_p_values_are_near_those_of_t_tests_and_permutation_test():
    rng = np.random.default_rng(4)
    errors = rng.normal([[1], [2]], 2, size=(2, 80))
    rank_rows = np.maximum(rng.exponential(9, size=80) + errors, 1)  # two systems, same queries
    queries = np.arange(80)
    systems = [ranks[None] for ranks in rank_rows]
    resampled = bootstrap_metrics(systems, np.zeros(80), queries, [METRICS["mean_rank"]], 8_000)
    estimate = resampled.estimates(0)["mean_rank"]
    expected = scipy.stats.ttest_1samp(rank_rows[0], 0).confidence_interval()
    assert [estimate.low, estimate.high] == pytest.approx([*expected], abs=0.06)
    difference = paired_differences(resampled, {1: [0]})[0]["mean_rank"]
    expected = scipy.stats.ttest_rel(*rank_rows)
    interval = expected.confidence_interval()
    assert [difference.low, difference.high] == pytest.approx([*interval], abs=0.03)
    assert difference.p == pytest.approx(expected.pvalue, rel=0.25)
    permuted = scipy.stats.permutation_test(
        (rank_rows[0] - rank_rows[1],), lambda x, axis: x.mean(axis=axis), vectorized=True,
        permutation_type="samples", n_resamples=9_999, rng=np.random.default_rng(0),
    )  # fmt: skip
    assert difference.p == pytest.approx(permuted.pvalue, abs=0.01)


def test_combined_degrees_of_freedom_equal_those_of_welch_test():
    rng = np.random.default_rng(7)
    first, second = rng.normal(size=12), rng.normal(0.5, 3, size=7)
    expected = scipy.stats.ttest_ind(first, second, equal_var=False)
    variances = [np.array(values.var(ddof=1) / len(values)) for values in (first, second)]
    error, freedom = combine_errors(variances[0], 12, variances[1], 6)
    assert freedom == pytest.approx(expected.df)
    assert (first.mean() - second.mean()) / error == pytest.approx(expected.statistic)
