"""Fragments: files of rows that other processes write and that are added to a store later."""

import threading

import lance
import numpy as np
import pytest
from helpers.identities import IDENTITY
from helpers.stored import INPUTS, N_TOKENS, TRUNCATED, VECTORS, append

from llmcond.encoders.spec import Encoded
from llmcond.errors import DiskFullError
from llmcond.features.store import FeatureStore


@pytest.fixture
def store(tmp_path):
    return FeatureStore(tmp_path, IDENTITY, "float32")


def write_fragment_rows(store, indices):
    indices = list(indices)
    inputs = [INPUTS[i] for i in indices]
    encoded = Encoded(VECTORS[indices], N_TOKENS[indices], TRUNCATED[indices])
    return store.write_fragment(inputs, encoded)


def read_keys(store):
    return lance.dataset(str(store.folder / "vectors.lance")).to_table()["key"].to_pylist()


def list_data_files(store):
    return {path.name for path in (store.folder / "vectors.lance" / "data").iterdir()}


def check_complete(store, count=20):
    keys = read_keys(store)
    assert len(keys) == len(set(keys)) == len(store) == count
    np.testing.assert_array_equal(store.lookup(INPUTS[:count]).read(), VECTORS[:count])


def test_fragments_are_visible_once_added(tmp_path, store):
    actor = FeatureStore(tmp_path, IDENTITY, "float32")
    with store.fragment_writer_claim():
        fragments = [write_fragment_rows(actor, range(8)), write_fragment_rows(actor, range(8, 20))]
        assert store.missing(INPUTS) == list(range(20))
        assert store.add_fragments(fragments) == 20
    check_complete(store)
    check_complete(FeatureStore(tmp_path, IDENTITY, "float32"))
    assert store.count_truncated_at(np.arange(20)) == TRUNCATED.sum()


def test_rows_stored_meanwhile_are_not_added_again(store):
    with store.fragment_writer_claim():
        first, overlapping, contained = (
            write_fragment_rows(store, indices) for indices in (range(8), range(4, 12), range(2, 6))
        )
        append(store, [0, 1])  # Another process adds these rows meanwhile.
        assert store.add_fragments([first, overlapping, contained]) == 10
        assert store.add_fragments([first, overlapping, contained]) == 0
        assert store.add_fragments([write_fragment_rows(store, range(11, 20))]) == 8
    check_complete(store)


def test_merging_keeps_files_of_active_writers(store, monkeypatch):
    monkeypatch.setattr("llmcond.features.fragments._MERGED_FRAGMENTS", 3)
    monkeypatch.setattr("llmcond.lance_io._RETAINED_VERSIONS", 1)
    other = FeatureStore(store.folder.parent, IDENTITY, "float32")
    with store.fragment_writer_claim(), other.fragment_writer_claim():
        fragment, files_of_writer = write_fragment_rows(store, range(8, 20)), list_data_files(store)
        for i in range(8):
            append(other, [i])
        assert len(other._dataset.get_fragments()) < 8  # Some fragments were merged.
        assert files_of_writer <= list_data_files(store)
        assert store.add_fragments([fragment]) == 12
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)


def test_next_writer_removes_files_of_a_killed_writer(store):
    append(store, range(8))
    committed = list_data_files(store)
    with store.fragment_writer_claim():
        write_fragment_rows(store, range(8, 20))
    assert len(list_data_files(store)) == len(committed) + 1
    dataset = store.folder / "vectors.lance"
    staged = [dataset / "_transactions" / ".tmp5iRQOd", dataset / "_versions" / "9.manifest#1"]
    for path in staged:
        path.touch()
    with store.fragment_writer_claim():
        assert list_data_files(store) == committed
        assert [path for path in staged if path.exists()] == []
    check_complete(store, 8)
    assert list((store.folder / "claims").glob("*.lock")) == []


def test_writer_waits_while_another_process_removes_files(store):
    append(store, range(8))
    started = threading.Event()

    def write():
        with FeatureStore(store.folder.parent, IDENTITY, "float32").fragment_writer_claim():
            started.set()

    thread = threading.Thread(target=write)
    with store._committing():
        thread.start()
        assert not started.wait(0.1)
    thread.join()
    assert started.is_set()


def test_write_fragment_raises_on_full_disk(store, monkeypatch):
    append(store, range(8))
    monkeypatch.setattr("llmcond.features.store.SPARE_BYTES", 2**60)
    with pytest.raises(DiskFullError, match="the 8 features already stored are kept"):
        write_fragment_rows(store, range(8, 20))
