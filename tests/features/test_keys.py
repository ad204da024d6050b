"""``KeyIndex``: the results of a dict in a fraction of its memory."""

import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcond.features.keys import KeyIndex

#: There are only a few halves, so that keys repeat or differ in one half only.
HALVES = st.sampled_from([b"\0" * 8, b"\0" * 7 + b"\1", b"\1" + b"\0" * 7, b"\xff" * 8])
KEYS = st.builds(bytes.__add__, HALVES, HALVES) | st.binary(min_size=16, max_size=16)
KEY_LISTS = st.lists(KEYS, max_size=12)


def build_index(chunks):
    index = KeyIndex()
    for chunk in chunks:
        index.add(b"".join(chunk))
    return index


@given(chunks=st.lists(KEY_LISTS, max_size=12), queries=KEY_LISTS)
def test_find_returns_positions_like_a_dict(chunks, queries):
    index = build_index(chunks)
    added = [key for chunk in chunks for key in chunk]
    expected = {}
    for position, key in enumerate(added):
        expected.setdefault(key, position)
    assert len(index) == len(added)
    for keys in (queries, added):
        assert index.find(b"".join(keys)).tolist() == [expected.get(key, -1) for key in keys]


def test_keys_with_equal_first_half_are_distinguished():
    keys = [b"8 bytes." + i.to_bytes(8, "little") for i in range(300)]
    index = build_index([keys[:200:2], keys[1:200:2]])
    stored = keys[:200:2] + keys[1:200:2]
    assert index.find(b"".join(stored)).tolist() == list(range(200))
    assert set(index.find(b"".join(keys[200:])).tolist()) == {-1}


@pytest.mark.parametrize("size", [1, 7, 256])
def test_many_small_additions_leave_few_runs(size):
    keys = os.urandom(16 * 4_096)
    index = KeyIndex()
    for start in range(0, len(keys), 16 * size):
        index.add(keys[start : start + 16 * size])
        lengths = [len(run.first) for run in index._runs]
        assert all(a >= 2 * b for a, b in pairwise(lengths))
    np.testing.assert_array_equal(index.find(keys), np.arange(4_096))


def test_key_takes_24_bytes():
    index = KeyIndex()
    for _ in range(10):
        index.add(os.urandom(16 * 1_000))
    columns = [column for run in index._runs for column in (run.first, run.second, run.positions)]
    assert sum(column.nbytes for column in columns) == 24 * len(index)
    # A view would keep a larger array alive.
    assert all(column.base is None for column in columns)
