"""Batches that keep groups of rows together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond.heads.fit import entries_since_best
from llmcond.heads.fitted import GroupSampler
from llmcond.metrics import METRICS

GROUPS = st.lists(st.integers(0, 6), min_size=1, max_size=30).map(np.array)


@settings(deadline=None)
@given(GROUPS, st.integers(1, 12), st.integers(0, 9))
def test_batches_have_each_row_once_and_split_no_group(group, size, seed):
    sampler = GroupSampler(group)
    permutation = np.random.default_rng(seed).permutation(len(sampler))
    batches = list(sampler.batches(permutation, size))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(group)))
    for batch in batches:
        assert len(batch) <= size or len(set(group[batch])) == 1
    assert sum(len(set(group[batch])) for batch in batches) == len(set(group))


@settings(deadline=None)
@given(GROUPS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
def test_even_batches_balance_groups_across_shares(group, count, shares, seed):
    sampler = GroupSampler(group)
    if len(sampler) < count * shares:
        return
    permutation = np.random.default_rng(seed).permutation(len(sampler))
    steps = sampler.even_batches(permutation, count, shares)
    assert [len(step) for step in steps] == [shares] * count
    rows = np.concatenate([part for step in steps for part in step])
    np.testing.assert_array_equal(rows, sampler.order(permutation)[0])
    sizes = [len(set(group[part])) for step in steps for part in step]
    assert max(sizes) - min(sizes) <= 2
    assert sum(sizes) == len(set(group))


@pytest.mark.parametrize(
    ("scores", "best_index"),
    [
        ([0.1, 0.3, 0.2], 1),
        ([0.3, 0.3], 0),
        ([None, None], 1),
        ([None, 0.1, None], 1),
        ([0.2, None, 0.1], 0),
        ([-0.1], 0),
    ],
)
def test_best_score_is_first_of_equals_and_never_undefined(scores, best_index):
    curve = [{"dev": score} for score in scores]
    assert entries_since_best(curve, "dev", METRICS["spearman"]) == len(scores) - 1 - best_index
    # If lower is better, the negated scores have the same best entry.
    curve = [{"dev": score and -score} for score in scores]
    assert entries_since_best(curve, "dev", METRICS["mean_rank"]) == len(scores) - 1 - best_index
