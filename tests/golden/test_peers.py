"""Metrics and statistics compared with peers: recorded ones, and live scikit-learn and scipy.

``record_peers.py`` recorded the figures of ranx, PyKEEN, arch and statsmodels in ``peers.json``.
"""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond.clustering import methods as cluster_scores
from llmcond.clustering.methods import score_clusters
from llmcond.evaluation import paired
from llmcond.evaluation.analyses import impurity_from_counts
from llmcond.evaluation.paired import (
    bootstrap_metrics,
    combine_errors,
    holm,
    paired_differences,
)
from llmcond.evaluation.ranking import ranks_among, score_rankings
from llmcond.metrics import METRICS, choose_metrics

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


@pytest.mark.parametrize("ties", ["realistic", "optimistic", "pessimistic"])
@pytest.mark.parametrize("name", RANKINGS)
def test_ranks_and_metrics_equal_those_of_pykeen(name, ties):
    case = RANKINGS[name]
    ranks = ranks_among(*arrays_of(case)).resolve_ties(ties)
    assert ranks.tolist() == case["pykeen"]["ranks"][ties]
    queries = np.arange(len(ranks))
    directions = {"forward": queries < len(ranks) // 2, "backward": queries >= len(ranks) // 2}
    for direction, expected in case["pykeen"]["metrics"].items():
        mask = directions.get(direction)
        (subset,) = score_rankings([ranks[None]], queries, choose_metrics(NAMES), 2, mask)
        values = {key: estimate.value for key, estimate in subset.metrics.items()}
        # PyKEEN averages realistic ranks in float32.
        assert values == pytest.approx(expected[ties], rel=1e-6), direction


@pytest.mark.parametrize("name", [name for name, case in RANKINGS.items() if case["ranx"]])
def test_metrics_equal_those_of_ranx(name):
    ranks = ranks_among(*arrays_of(RANKINGS[name])).resolve_ties("realistic")
    group = np.arange(len(ranks))
    values = {key: METRICS[key](ranks, group, group) for key in RANKINGS[name]["ranx"]}
    assert values == pytest.approx(RANKINGS[name]["ranx"], abs=1e-12)


def test_ranx_has_cases_with_and_without_filter():
    assert {"no ties", "filtered", "one candidate", "only the answer remains"} <= {
        name for name, case in RANKINGS.items() if case["ranx"]
    }


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


@pytest.mark.parametrize(
    ("clusters", "labels"),
    [
        ([0], [3]),
        ([0, 0, 0, 0], [1, 1, 1, 1]),
        ([0, 0, 0, 0], [0, 1, 2, 3]),
        ([0, 1, 2, 3], [0, 0, 0, 0]),
        ([0, 1, 2, 3], [3, 1, 0, 2]),
        ([0, 0, 1, 1], [1, 1, 0, 0]),
        ([0, 1, 0, 1], [0, 0, 1, 1]),  # worse than chance
        ([-1, -1, 0, 0, 1], [2, 2, 2, 7, 7]),
    ],
)
def test_cluster_scores_equal_those_of_scikit_learn_in_limits(clusters, labels):
    check_clusters(np.array(clusters), np.array(labels))


def test_cluster_scores_leave_out_texts_without_label():
    clusters = np.array([0, 0, 1, 1, 2, 2, 0, 1])
    labels = ["a", "a", "b", None, "b", math.nan, "c", "b"]
    rows = [i for i, label in enumerate(labels) if isinstance(label, str)]
    agreement = score_clusters(clusters, clusters[::-1], labels, "label", "base")
    for name, peer in PEER_OF.items():
        truth = [labels[i] for i in rows]
        assert agreement.own[name].value == pytest.approx(peer(truth, clusters[rows]))
        assert agreement.base[name].value == pytest.approx(peer(truth, clusters[::-1][rows]))


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_impurity_equals_entropies_of_scipy(counts):
    counts = np.array(counts)
    if counts.sum():
        present = counts[counts.sum(axis=1) > 0]
        weights = present.sum(axis=1) / counts.sum()
        expected = float(weights @ scipy.stats.entropy(present, axis=1))
        assert impurity_from_counts(counts) == pytest.approx(expected, abs=1e-12)


# -- statistics --------------------------------------------------------------------------------


@pytest.fixture
def on_samples_of_arch(monkeypatch):
    """Both systems, and their metrics on the bootstrap samples that arch has drawn."""
    rows = {name: np.array(values) for name, values in PEERS["rows"].items()}
    samples = np.array(PEERS["arch"]["samples"])
    counts = np.stack([np.bincount(sample, minlength=samples.shape[1]) for sample in samples])
    monkeypatch.setattr(paired, "_sample_pairs", lambda *_: iter([counts.astype(float)]))
    systems = [rows["first"][None], rows["second"][None]]
    metrics = choose_metrics(("spearman", "pearson"))
    return bootstrap_metrics(systems, rows["rating"], rows["pair"], metrics, len(samples))


def test_metrics_on_bootstrap_samples_equal_those_of_arch(on_samples_of_arch):
    values = np.array(PEERS["arch"]["values"]).reshape(-1, 2, 2)  # samples, metrics, systems
    np.testing.assert_allclose(
        on_samples_of_arch.sampled, values.transpose(1, 2, 0), rtol=0, atol=1e-12
    )


def test_bootstrap_variances_equal_those_of_arch(on_samples_of_arch):
    samples, pairs = np.array(PEERS["arch"]["samples"]).shape
    # arch divides by the samples, and does not correct for the number of clusters.
    covariance = np.array(PEERS["arch"]["covariance"]) * samples / (samples - 1)
    covariance *= pairs / (pairs - 1)
    for m in range(2):
        block = covariance[2 * m : 2 * m + 2, 2 * m : 2 * m + 2]
        for i in range(2):
            assert on_samples_of_arch.row_variance(m, i) == pytest.approx(block[i, i])
        difference = block[0, 0] + block[1, 1] - 2 * block[0, 1]
        assert on_samples_of_arch.row_variance(m, 0, 1) == pytest.approx(difference)


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


@pytest.mark.parametrize("number", range(len(PEERS["statsmodels"]["p"])))
def test_holm_correction_equals_that_of_statsmodels(number):
    p, expected = (PEERS["statsmodels"][name][number] for name in ("p", "holm"))
    np.testing.assert_allclose(holm(np.array(p)), expected)


@pytest.fixture(scope="module")
def rank_rows():
    """Ranks of two systems on the same queries, (2, n)."""
    rng = np.random.default_rng(4)
    errors = rng.normal([[1], [2]], 2, size=(2, 80))
    return np.maximum(rng.exponential(9, size=80) + errors, 1)


def test_interval_of_mean_is_near_that_of_t_test(rank_rows):
    queries = np.arange(rank_rows.shape[1])
    resampled = bootstrap_metrics(
        [rank_rows[:1]], np.zeros(len(queries)), queries, [METRICS["mean_rank"]], 8_000
    )
    estimate = resampled.estimates(0)["mean_rank"]
    expected = scipy.stats.ttest_1samp(rank_rows[0], 0).confidence_interval()
    assert [estimate.low, estimate.high] == pytest.approx([*expected], abs=0.06)


def test_paired_difference_of_means_is_near_paired_t_test_and_permutation_test(rank_rows):
    queries = np.arange(rank_rows.shape[1])
    systems = [ranks[None] for ranks in rank_rows]
    resampled = bootstrap_metrics(
        systems, np.zeros(len(queries)), queries, [METRICS["mean_rank"]], 8_000
    )
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


def test_standard_error_of_correlation_is_near_that_of_scipy():
    rng = np.random.default_rng(5)
    rating = rng.integers(1, 6, size=90).astype(float)
    predicted = rating + rng.normal(0, 2, size=90)
    rows = np.arange(90)
    resampled = bootstrap_metrics(
        [predicted[None]], rating, rows, [METRICS["spearman"], METRICS["pearson"]], 4_000
    )
    for m, peer in enumerate((scipy.stats.spearmanr, scipy.stats.pearsonr)):
        expected = scipy.stats.bootstrap(
            (predicted, rating), lambda x, y, peer=peer: peer(x, y).statistic, paired=True,
            vectorized=False, n_resamples=600, method="percentile", rng=np.random.default_rng(6),
        )  # fmt: skip
        error = math.sqrt(resampled.row_variance(m, 0) * 89 / 90)
        assert error == pytest.approx(expected.standard_error, rel=0.1)


def test_combined_degrees_of_freedom_equal_those_of_welch_test():
    rng = np.random.default_rng(7)
    first, second = rng.normal(size=12), rng.normal(0.5, 3, size=7)
    expected = scipy.stats.ttest_ind(first, second, equal_var=False)
    variances = [np.array(values.var(ddof=1) / len(values)) for values in (first, second)]
    error, freedom = combine_errors(variances[0], 12, variances[1], 6)
    assert freedom == pytest.approx(expected.df)
    assert (first.mean() - second.mean()) / error == pytest.approx(expected.statistic)


@pytest.mark.filterwarnings(
    "ignore::scipy.stats.ConstantInputWarning", "ignore::scipy.stats.NearConstantInputWarning"
)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2, 3], [3, 2, 1]),
        ([1, 1, 2, 2], [1, 2, 1, 2]),
        ([1e300, -1e300, 0], [1, 2, 3]),
        ([1e-200, 3e-200, 2e-200], [1, 2, 3]),
        ([1, 1 + 1e-12, 1 + 2e-12], [1, 2, 3]),
        ([0.0, -0.0, 1.0], [1, 2, 3]),
        ([2, 2, 2], [1, 2, 3]),
        ([1], [2]),
    ],
)
def test_correlations_equal_those_of_scipy_in_limits(first, second):
    first, second = np.array(first, float), np.array(second, float)
    rows = np.arange(len(first))
    for name, peer in (("spearman", scipy.stats.spearmanr), ("pearson", scipy.stats.pearsonr)):
        expected = peer(first, second).statistic if len(first) > 1 else math.nan
        value = METRICS[name](first, second, rows)
        assert value == pytest.approx(expected, abs=1e-6, nan_ok=True), name
