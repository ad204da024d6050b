"""Metrics: known values, NaN exactly if undefined, and metrics of users."""

from math import isnan, nan

import numpy as np
import pytest

from llmcond.base import metrics
from llmcond.base.errors import UserError
from llmcond.base.metrics import (
    DEFAULT_METRICS,
    Metric,
    accuracy,
    choose_metrics,
    finite_or_none,
    pearson,
    spearman,
)

# Each line is a sentence pair: (similarity, rating) under each condition, and its accuracy.
ACCURACY_CASES = [
    ([(0.9, 5), (0.1, 1)], 1),
    ([(0.1, 5), (0.9, 1)], 0),
    ([(0.1, 1), (0.9, 5)], 1),
    ([(0.5, 2), (0.5, 4)], 0.5),  # equal predictions count one half
    ([(0.2, 3), (0.8, 3)], nan),  # equal ratings are left out
    ([(0.9, 5), (0.5, 3), (0.1, 1)], 1),
    ([(0.9, 5), (0.1, 3), (0.5, 3)], 1),
    ([(0.9, 1), (0.5, 3), (0.7, 5)], 1 / 3),
    ([(0.4, 2)], nan),  # a single condition cannot be compared
]


def test_accuracy_of_pairs():
    for conditions, expected in ACCURACY_CASES:
        similarity, rating = np.array(conditions, dtype=np.float64).T
        actual = accuracy(similarity, rating, np.full(len(rating), 7))
        assert actual == pytest.approx(expected, nan_ok=True), conditions
    table = [(s, r, i) for i, (conditions, _) in enumerate(ACCURACY_CASES) for s, r in conditions]
    np.random.default_rng(0).shuffle(table)
    similarity, rating, pair = np.array(table).T
    assert accuracy(similarity, rating, 1_000 * pair.astype(np.int64)) == pytest.approx(8.5 / 12)


@pytest.mark.filterwarnings("error")
def test_constants_and_single_rows_have_no_correlation():
    for n in (0, 1, 2, 60):
        # The mean of 0.1 repeated is not 0.1 to the last digit.
        constant, rating = np.full(n, 0.1), np.arange(n, dtype=np.float64)
        for correlation in (spearman, pearson):
            assert isnan(correlation(constant, rating))
            assert isnan(correlation(rating, constant))
        assert isnan(accuracy(constant, rating, np.arange(n)))


def test_metric_formats_values():
    show = DEFAULT_METRICS[0].format
    shown = [show(v) for v in (0.5851, -0.0239, 0.0, -0.0001, None, nan)]
    assert shown == ["58.5", "-2.4", "0.0", "0.0", "–", "–"]
    assert [show(v, signed=True) for v in (0.031, -0.031, 0.0001)] == ["+3.1", "-3.1", "0.0"]
    assert Metric("rank", accuracy, factor=1, decimals=2).format(3.14159) == "3.14"
    assert [finite_or_none(v) for v in (nan, None, 0.5)] == [None, None, 0.5]


NAMES = [metric.name for metric in DEFAULT_METRICS]


# -- user-defined metrics ----------------------------------------------------------------------

METRICS_MODULE = """
from scipy.stats import kendalltau
from llmcond.base.metrics import Metric

def kendall(prediction, rating, group):
    return kendalltau(prediction, rating).statistic

def spearman(prediction, rating, group):
    return 0.0

def fails(prediction, rating, group):
    return 1 / 0

mae = Metric("mae", lambda p, r, g: abs(p - r).mean(), factor=1, higher_is_better=False)
number = 3
"""


@pytest.fixture
def metrics_file(tmp_path, monkeypatch):
    (tmp_path / "my_metrics.py").write_text(METRICS_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))


@pytest.mark.usefixtures("metrics_file")
def test_user_metrics_are_added_to_default_metrics():
    result = choose_metrics(NAMES, ["my_metrics.py:kendall", "my_metrics.py:mae", "spearman"])
    assert [metric.name for metric in result] == [*NAMES, "kendall", "mae"]
    rows = np.array([0.1, 0.2, 0.3]), np.array([1.0, 3.0, 2.0]), np.arange(3)
    assert result[3](*rows) == pytest.approx(1 / 3)
    assert metrics.get_metric("mae").factor == 1


@pytest.mark.usefixtures("metrics_file")
def test_invalid_and_failing_metrics_are_rejected():
    for name, message in (
        ("spaerman", "Did you mean 'spearman'"),
        ("my_metrics.py:kendal", "Did you mean 'kendall'"),
        ("my_metrics.py:spearman", "has the name of the bundled metric spearman"),
        ("my_metrics.py:number", "is not a metric; expected a function"),
    ):
        with pytest.raises(UserError, match=message):
            choose_metrics(NAMES, [name])
    with pytest.raises(UserError, match="the metric fails failed: division by zero"):
        choose_metrics(NAMES, ["my_metrics.py:fails"])[-1](np.ones(2), np.ones(2), np.arange(2))
