"""The index of keys: what a dict would say, in a fraction of its memory."""

import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcond.features.keys import KeyIndex

#: Few of them, so that keys repeat, and differ in one half only.
HALVES = st.sampled_from([b"\0" * 8, b"\0" * 7 + b"\1", b"\1" + b"\0" * 7, b"\xff" * 8])
KEYS = st.builds(bytes.__add__, HALVES, HALVES) | st.binary(min_size=16, max_size=16)
LISTS = st.lists(KEYS, max_size=12)


def index_of(chunks):
    index = KeyIndex()
    for chunk in chunks:
        index.add(b"".join(chunk))
    return index


@given(chunks=st.lists(LISTS, max_size=12), wanted=LISTS)
def test_places_are_those_of_a_dict(chunks, wanted):
    index = index_of(chunks)
    added = [key for chunk in chunks for key in chunk]
    places = {}
    for place, key in enumerate(added):
        places.setdefault(key, place)
    assert len(index) == len(added)
    for keys in (wanted, added):
        assert index.find(b"".join(keys)).tolist() == [places.get(key, -1) for key in keys]


def test_keys_that_share_their_first_half_are_told_apart():
    keys = [b"8 bytes." + i.to_bytes(8, "little") for i in range(300)]
    index = index_of([keys[:200:2], keys[1:200:2]])
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


def test_a_key_takes_24_bytes():
    index = KeyIndex()
    for _ in range(10):
        index.add(os.urandom(16 * 1_000))
    columns = [column for run in index._runs for column in (run.first, run.second, run.positions)]
    assert sum(column.nbytes for column in columns) == 24 * len(index)
    # A view would keep a larger array alive.
    assert all(column.base is None for column in columns)
