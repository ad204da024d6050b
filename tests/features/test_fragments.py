"""Rows written into files first, as by actors of other processes, and added to a store later."""

import threading

import lance
import numpy as np
import pytest
from helpers.identities import IDENTITY
from helpers.stored import INPUTS, N_TOKENS, TRUNCATED, VECTORS, append

from llmcond.encoders.encoder import Encoded
from llmcond.errors import DiskFullError
from llmcond.features.store import FeatureStore


@pytest.fixture
def store(tmp_path):
    return FeatureStore(tmp_path, IDENTITY, "float32")


def written(store, chosen):
    chosen = list(chosen)
    inputs = [INPUTS[i] for i in chosen]
    encoded = Encoded(VECTORS[chosen], N_TOKENS[chosen], TRUNCATED[chosen])
    return store.write_fragment(inputs, encoded)


def stored_keys(store):
    return lance.dataset(str(store.folder / "vectors.lance")).to_table()["key"].to_pylist()


def files(store):
    return {path.name for path in (store.folder / "vectors.lance" / "data").iterdir()}


def check_whole(store, count=20):
    keys = stored_keys(store)
    assert len(keys) == len(set(keys)) == len(store) == count
    np.testing.assert_array_equal(store.lookup(INPUTS[:count]).read(), VECTORS[:count])


def test_fragments_are_seen_once_they_are_added(tmp_path, store):
    actor = FeatureStore(tmp_path, IDENTITY, "float32")
    with store.fragment_writer_claim():
        fragments = [written(actor, range(8)), written(actor, range(8, 20))]
        assert store.missing(INPUTS) == list(range(20))
        assert store.add_fragments(fragments) == 20
    check_whole(store)
    check_whole(FeatureStore(tmp_path, IDENTITY, "float32"))
    assert store.count_truncated_at(np.arange(20)) == TRUNCATED.sum()


def test_rows_that_are_there_by_now_are_not_added_again(store):
    with store.fragment_writer_claim():
        first, some, none = (written(store, own) for own in (range(8), range(4, 12), range(2, 6)))
        append(store, [0, 1])  # another process, in the meantime
        assert store.add_fragments([first, some, none]) == 10
        assert store.add_fragments([first, some, none]) == 0
        assert store.add_fragments([written(store, range(11, 20))]) == 8
    check_whole(store)


def test_files_outlive_merging_while_they_are_being_written(store, monkeypatch):
    monkeypatch.setattr("llmcond.features.fragments._MERGED_FRAGMENTS", 3)
    monkeypatch.setattr("llmcond.lance_io._KEPT_VERSIONS", 1)
    other = FeatureStore(store.folder.parent, IDENTITY, "float32")
    with store.fragment_writer_claim(), other.fragment_writer_claim():
        waiting, lost = written(store, range(8, 20)), files(store)
        for i in range(8):
            append(other, [i])
        assert len(other._dataset.get_fragments()) < 8  # some were merged
        assert lost <= files(store)
        assert store.add_fragments([waiting]) == 12
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)


def test_what_a_kill_left_is_removed_by_the_next_one_that_writes(store):
    append(store, range(8))
    committed = files(store)
    with store.fragment_writer_claim():
        written(store, range(8, 20))
    assert len(files(store)) == len(committed) + 1
    dataset = store.folder / "vectors.lance"
    staged = [dataset / "_transactions" / ".tmp5iRQOd", dataset / "_versions" / "9.manifest#1"]
    for path in staged:
        path.touch()
    with store.fragment_writer_claim():
        assert files(store) == committed
        assert [path for path in staged if path.exists()] == []
    check_whole(store, 8)
    assert list((store.folder / "claims").glob("*.lock")) == []


def test_one_begins_to_write_when_no_one_removes_files(store):
    append(store, range(8))
    begun = threading.Event()

    def begin():
        with FeatureStore(store.folder.parent, IDENTITY, "float32").fragment_writer_claim():
            begun.set()

    thread = threading.Thread(target=begin)
    with store._committing():
        thread.start()
        assert not begun.wait(0.1)
    thread.join()
    assert begun.is_set()


def test_no_fragment_is_written_where_there_is_no_room_for_it(store, monkeypatch):
    append(store, range(8))
    monkeypatch.setattr("llmcond.features.store.SPARE_BYTES", 2**60)
    with pytest.raises(DiskFullError, match="the 8 features already stored are kept"):
        written(store, range(8, 20))
