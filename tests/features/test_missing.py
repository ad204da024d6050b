"""The index of keys, and the counts of inputs that a store lacks, reported before encoding."""

import numpy as np
import pytest
from helpers.identities import IDENTITY
from hypothesis import given
from hypothesis import strategies as st

from llmcond.base.output import format_duration
from llmcond.encoders.spec import Encoded, EncoderInput
from llmcond.features.extract import count_missing, merge_counts
from llmcond.features.store import FeatureStore
from llmcond.features.view import KeyIndex

#: There are only a few halves, so that keys repeat or differ in one half only.
HALVES = st.sampled_from([b"\0" * 8, b"\0" * 7 + b"\1", b"\1" + b"\0" * 7, b"\xff" * 8])
KEYS = st.builds(bytes.__add__, HALVES, HALVES) | st.binary(min_size=16, max_size=16)
KEY_LISTS = st.lists(KEYS, max_size=12)


@given(chunks=st.lists(KEY_LISTS, max_size=12), queries=KEY_LISTS)
def test_find_returns_first_position_of_each_key(chunks, queries):
    index = KeyIndex()
    for chunk in chunks:
        index.add(b"".join(chunk))
    added = [key for chunk in chunks for key in chunk]
    assert len(index) == len(added)
    for keys in (queries, added):
        positions = [added.index(key) if key in added else -1 for key in keys]
        assert index.find(b"".join(keys)).tolist() == positions


def make_inputs(numbers):
    return [EncoderInput(instruction="", text=f"text {number:04d}") for number in numbers]


@pytest.fixture
def store(tmp_path):
    return FeatureStore(tmp_path / "store", IDENTITY, "float16")


def add(store, items):
    n = len(items)
    ones = np.ones((n, 4), np.float32)
    store.append(items, Encoded(ones, np.zeros(n, np.int32), np.zeros(n, np.bool_)))


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_stored_and_repeated_inputs_are_not_missing(store, window):
    add(store, make_inputs(range(10)))
    counts = count_missing(store, iter(make_inputs([*range(5, 30), *range(25)])), window)
    assert (counts.n_inputs, counts.n_missing, counts.n_characters) == (30, 20, 20 * 9)
    assert list(counts.sample) == make_inputs(range(10, 30))


def test_counts_of_several_prompts_share_seen_keys(store):
    """Inputs that two prompts share are encoded for the first, so the second lacks none of them."""
    seen = KeyIndex()
    parts = [
        count_missing(store, make_inputs(numbers), 7, seen)
        for numbers in (range(20), range(10, 25), range(5))
    ]
    assert [(part.n_inputs, part.n_missing) for part in parts] == [(20, 20), (5, 5), (0, 0)]
    whole = merge_counts(parts)
    assert (whole.n_inputs, whole.n_missing, whole.n_characters) == (25, 25, 25 * 9)
    assert list(whole.sample) == make_inputs(range(25))


def test_samples_are_random_with_equal_sampling_rates(store, monkeypatch):
    """Every eighth text is short, as conditions are. The sample must keep this share."""
    items = [EncoderInput("", f"{n}" if n % 8 == 0 else f"a text {n}") for n in range(40_000)]
    many = count_missing(store, items, 1_000)
    assert 1_024 <= len(many.sample) <= 2_048
    short = sum(item.text.isdigit() for item in many.sample) / len(many.sample)
    assert short == pytest.approx(1 / 8, abs=0.03)
    few = count_missing(store, make_inputs(range(1_000)), 1_000)
    assert list(few.sample) == make_inputs(range(1_000))
    for whole in (merge_counts([few, many]), merge_counts([many, few])):
        share = sum(item.text.startswith("text") for item in whole.sample) / len(whole.sample)
        assert share == pytest.approx(1 / 41, abs=0.012)
        assert len(whole.sample) == pytest.approx(41_000 / whole.every, rel=0.1)


def test_format_duration_uses_one_or_two_units():
    expected = {0.2: "1 s", 59.2: "59 s", 89: "1 min", 3_540: "59 min", 7_260: "2 h 1 min"}
    assert {seconds: format_duration(seconds) for seconds in expected} == expected
