"""Ranking: equal to loops and to PyKEEN, whatever the blocks, and told by parts."""

from dataclasses import replace

import numpy as np
import pytest

from llmcond.evaluation.paired import differences, resample
from llmcond.metrics import RANKING, choose_metrics


def test_means_over_rows_are_resampled_as_any_metric_is():
    rng = np.random.default_rng(0)
    systems = [rng.integers(1, 30, size=(seeds, 80)).astype(float) for seeds in (1, 3)]
    pair = np.tile(np.arange(40), 2)
    quick = resample(systems, np.zeros(80), pair, RANKING, 50)
    slow = resample(
        systems, np.zeros(80), pair, [replace(metric, by_row=None) for metric in RANKING], 50
    )

    np.testing.assert_allclose(quick.values, slow.values)
    np.testing.assert_allclose(quick.sampled, slow.sampled)
    lower = differences(quick, {0: [1]})[1]["mean_rank"]
    assert (lower.verdict == "better") == (lower.p_holm <= 0.05 and lower.value < 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mrr", (1 + 1 / 1.5 + 1 / 4 + 1 / 10) / 4), ("hits@1", 0.25), ("hits@3", 0.5),
     ("hits@5", 0.75), ("hits@10", 1), ("mean_rank", 16.5 / 4)],
)  # fmt: skip
def test_metrics_of_ranks(name: str, value: float):
    (metric,) = choose_metrics([name])
    nothing = np.zeros(0)
    assert metric(np.array([1, 1.5, 4, 10]), np.zeros(4), np.zeros(4, dtype=int)) == value
    assert np.isnan(metric(nothing, nothing, nothing.astype(int)))
