"""The feature store: vectors are stored once, come back unchanged, and are never mixed up."""

import json
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import lance
import numpy as np
import pytest
from filelock import FileLock, Timeout
from helpers.identities import IDENTITY
from helpers.stored import INPUTS, VECTORS, append
from helpers.waiting import PATIENCE

from llmcond import lance_io
from llmcond.encoders import EncoderInput
from llmcond.encoders.spec import Encoded
from llmcond.errors import DiskFullError, LlmcondError, UserError
from llmcond.features import location as location_module
from llmcond.features import store as store_module
from llmcond.features.store import FeatureStore

SPAWNING = multiprocessing.get_context("spawn")


@pytest.fixture
def store(tmp_path):
    return FeatureStore(tmp_path, IDENTITY, "float32")


def test_float32_vectors_come_back_bit_for_bit(store):
    append(store)
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)


def test_float16_vectors_are_rounded_to_float16(tmp_path):
    store = FeatureStore(tmp_path, IDENTITY, "float16")
    append(store)
    read = store.lookup(INPUTS).read()
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, VECTORS.astype(np.float16).astype(np.float32))
    assert np.abs(read - VECTORS).max() > 0


def test_vectors_are_read_in_the_requested_order(store):
    append(store, [7, 3, 11])
    append(store, [0, 19])
    indices = [19, 3, 0, 7, 3, 11, 19]
    np.testing.assert_array_equal(
        store.lookup([INPUTS[i] for i in indices]).read(), VECTORS[indices]
    )


def test_reading_in_blocks_changes_nothing(store, monkeypatch):
    monkeypatch.setattr("llmcond.features.store._READ_ROWS", 3)
    append(store)
    np.testing.assert_array_equal(store.lookup(INPUTS[::-1]).read(), VECTORS[::-1])


def test_an_input_appended_twice_is_stored_once(store):
    assert append(store, range(12)) == 12
    assert append(store, range(12)) == 0
    assert append(store, range(8, 20)) == 8
    assert len(store) == 20
    keys = lance.dataset(str(store.folder / "vectors.lance")).to_table()["key"].to_pylist()
    assert sorted(keys) == sorted(item.key for item in INPUTS[:20])


def test_the_first_vector_of_an_input_stays(store):
    append(store)
    append(store, vectors=VECTORS + 1)
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)


def test_missing_inputs_are_named_by_position(store):
    assert store.missing(INPUTS[:3]) == [0, 1, 2]
    append(store, [1, 4])
    assert store.missing(INPUTS[:6]) == [0, 2, 3, 5]
    assert store.missing([]) == []


def test_reading_missing_features_advises_to_extract_again(store):
    append(store, range(15))
    with pytest.raises(UserError, match=r"5 of 20 features.*Run the same `llmcond extract` again"):
        store.lookup(INPUTS).read()


def test_reading_an_empty_store_advises_to_extract(store):
    with pytest.raises(UserError, match="llmcond extract"):
        store.lookup(INPUTS[:1]).read()


def test_key_distinguishes_instruction_from_text(store):
    append(store)
    assert store.missing([EncoderInput("text", " 0"), EncoderInput("text 0", "")]) == [0, 1]


def test_truncated_inputs_are_counted(store):
    append(store)
    assert store.count_truncated_at(store.positions(INPUTS)) == 7
    assert store.count_truncated_at(store.positions([INPUTS[0], INPUTS[1], INPUTS[0]])) == 2
    assert store.count_truncated_at(store.positions([])) == 0


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"pooling": "cls"}, {"weights": "x"}])
def test_different_encoders_do_not_share_vectors(tmp_path, store, change):
    append(store)
    other = FeatureStore(tmp_path, replace(IDENTITY, **change), "float32")
    assert other.missing(INPUTS) == list(range(20))
    append(other, vectors=-VECTORS)
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)
    np.testing.assert_array_equal(other.lookup(INPUTS).read(), -VECTORS)


def test_store_types_do_not_share_vectors(tmp_path, store):
    append(store)
    assert FeatureStore(tmp_path, IDENTITY, "float16").missing(INPUTS) == list(range(20))


def test_reopened_store_holds_the_same_vectors(tmp_path, store):
    append(store)
    reopened = FeatureStore(tmp_path, IDENTITY, "float32")
    assert len(reopened) == 20
    np.testing.assert_array_equal(reopened.lookup(INPUTS).read(), VECTORS)


def test_other_handle_sees_rows_after_refresh(tmp_path, store):
    append(store, range(5))
    other = FeatureStore(tmp_path, IDENTITY, "float32")
    append(store, range(5, 9))
    assert len(other) == 5
    other.refresh()
    np.testing.assert_array_equal(other.lookup(INPUTS[:9]).read(), VECTORS[:9])


def test_handle_opened_before_first_row_sees_it_after_refresh(tmp_path, store):
    other = FeatureStore(tmp_path, IDENTITY, "float32")
    append(store)
    other.refresh()
    assert other.missing(INPUTS) == []


def test_stale_handle_stores_no_duplicates(tmp_path, store):
    stale = FeatureStore(tmp_path, IDENTITY, "float32")
    append(store, range(10))
    assert append(stale) == 10
    assert len(stale) == 20


def test_opening_writes_nothing(tmp_path, store):
    assert len(store) == 0
    assert list(tmp_path.iterdir()) == []


def test_store_describes_its_encoder(store):
    append(store)
    description = json.loads((store.folder / "store.json").read_text())
    assert description == {"format": 1, "dtype": "float32", "encoder": IDENTITY.to_json()}


def test_store_of_newer_version_is_rejected(tmp_path, store):
    append(store)
    (store.folder / "store.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match=r"newer version of llmcond.*Upgrade llmcond"):
        FeatureStore(tmp_path, IDENTITY, "float32")


def test_store_without_format_is_rejected(tmp_path, store):
    append(store)
    (store.folder / "store.json").write_text("{}")
    with pytest.raises(LlmcondError, match="no format version"):
        FeatureStore(tmp_path, IDENTITY, "float32")


def test_part_is_claimed_by_one_handle_at_a_time(tmp_path, store):
    other = FeatureStore(tmp_path, IDENTITY, "float32")
    with store.claim("part") as mine:
        assert mine
        with other.claim("part") as theirs, other.claim("another") as another:
            assert not theirs
            assert another
    with other.claim("part") as later:
        assert later


def test_positions_follow_the_order_of_addition(store):
    append(store, [7, 3])
    append(store, [3, 11])
    assert store.positions([INPUTS[i] for i in (11, 0, 7, 3, 7)]).tolist() == [2, -1, 0, 1, 0]
    assert store.positions([]).tolist() == []
    assert store.count_truncated_at(store.positions([INPUTS[3], INPUTS[7]])) == 1
    assert store.count_truncated_at(store.positions([])) == 0


# -- many commits ----------------------------------------------------------------------------------

MANY = [EncoderInput("", f"one of many {i}") for i in range(600)]
MANY_VECTORS = np.random.default_rng(1).normal(size=(600, 6)).astype(np.float32)


#: Settings that merge after every few commits, and that keep no old version.
EAGER = {"_MERGED_FRAGMENTS": 4, "_LARGEST_PART": 2, "_FULL_ROWS": 60, "_RETAINED_VERSIONS": 1}


def merge_eagerly(set_attribute):
    for name, value in EAGER.items():
        set_attribute(lance_io if hasattr(lance_io, name) else store_module, name, value)


@pytest.fixture
def eager_merging(monkeypatch):
    merge_eagerly(monkeypatch.setattr)


def add_rows(store, indices):
    """Add some of the many inputs. No test adds them in ascending order."""
    indices = list(indices)
    n_tokens = np.array(indices, dtype=np.int32)
    encoded = Encoded(MANY_VECTORS[indices], n_tokens, n_tokens % 3 == 0)
    return store.append([MANY[i] for i in indices], encoded)


def check_contents(store, indices):
    """Check that the store holds exactly these of the many inputs, each complete and once."""
    indices = sorted(indices)
    inputs = [MANY[i] for i in indices]
    assert set(range(len(MANY))) - set(store.missing(MANY)) == set(indices)
    assert len(store) == len(indices)
    np.testing.assert_array_equal(store.lookup(inputs).read(), MANY_VECTORS[indices])
    assert store.count_truncated_at(store.positions(inputs)) == sum(i % 3 == 0 for i in indices)
    table = lance.dataset(str(store.folder / "vectors.lance")).to_table()
    keys = [item.key for item in inputs]
    assert store.positions(inputs).tolist() == [table["key"].to_pylist().index(key) for key in keys]
    assert sorted(table["n_tokens"].to_pylist()) == indices


def list_files(store, kind):
    return list((store.folder / "vectors.lance" / kind).iterdir())


def test_merging_preserves_row_positions(eager_merging, tmp_path, store):
    order = np.random.default_rng(2).permutation(300)
    add_rows(store, order[:2])
    opened_before = FeatureStore(tmp_path, IDENTITY, "float32")
    opened_within = None
    block_size, start = 0, 2
    while start < 300:
        block_size = block_size % 5 + 1
        add_rows(store, order[start : start + block_size])
        start += block_size
        if start > 100 and opened_within is None:
            opened_within = FeatureStore(tmp_path, IDENTITY, "float32")
        inputs = [MANY[i] for i in order[:start]]
        assert store.positions(inputs).tolist() == list(range(min(start, 300)))
    check_contents(store, range(300))
    for other in (opened_before, opened_within):
        other.refresh()
        check_contents(other, range(300))
    check_contents(FeatureStore(tmp_path, IDENTITY, "float32"), range(300))


def test_old_handle_can_read_after_its_files_are_removed(eager_merging, tmp_path, store):
    for i in range(3):
        add_rows(store, [2 * i, 2 * i + 1])
    old = FeatureStore(tmp_path, IDENTITY, "float32")
    old_files = list_files(store, "data")
    for i in range(6, 20):
        add_rows(store, [i])
    assert not any(path.exists() for path in old_files)
    indices = [5, 0, 3]
    assert len(old) == 6
    np.testing.assert_array_equal(
        old.lookup([MANY[i] for i in indices]).read(), MANY_VECTORS[indices]
    )
    stale = FeatureStore(tmp_path, IDENTITY, "float32")
    for i in range(20, 40):
        add_rows(store, [i])
    assert stale.count_truncated_at(stale.positions([MANY[i] for i in indices])) == 2
    assert add_rows(stale, range(45)) == 5
    check_contents(stale, range(45))


def test_number_of_files_and_versions_stays_small(tmp_path):
    store = FeatureStore(tmp_path, IDENTITY, "float32")
    peaks = {"data": 0, "_versions": 0, "_transactions": 0}
    for i in range(300):
        add_rows(store, [2 * i, 2 * i + 1])
        peaks = {kind: max(n, len(list_files(store, kind))) for kind, n in peaks.items()}
    # There were 300 commits. Merging leaves the old files in place for a while.
    assert len(lance.dataset(store._location.uri).get_fragments()) < 45
    assert all(n < 110 for n in peaks.values())
    check_contents(store, range(600))


def test_files_of_a_killed_merge_are_removed(eager_merging, store):
    add_rows(store, [0])
    leftover = store.folder / "vectors.lance" / "data" / ("01" * 12 + "a" * 26 + ".lance")
    leftover.write_bytes(b"half a file")
    for i in range(1, 8):
        add_rows(store, [i])
    assert not leftover.exists()
    check_contents(store, range(8))


def test_nothing_is_merged_on_a_full_disk(eager_merging, store, monkeypatch):
    usage = SimpleNamespace(free=1_000)
    monkeypatch.setattr(store_module, "SPARE_BYTES", 0)
    monkeypatch.setattr(location_module.shutil, "disk_usage", lambda _: usage)
    for i in range(60):
        add_rows(store, [i])
    # A row has 6 numbers of 4 bytes, and merging needs the space of the merged rows twice.
    assert 20 < len(lance.dataset(store._location.uri).get_fragments()) <= 60
    check_contents(store, range(60))


def test_append_raises_on_a_full_disk(store, monkeypatch):
    add_rows(store, [0])
    usage = SimpleNamespace(free=100)
    monkeypatch.setattr(location_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskFullError, match="the 1 features already stored are kept"):
        add_rows(store, [1])
    check_contents(store, range(1))


def test_only_the_last_fragments_are_mergeable():
    many, full = store_module._MERGED_FRAGMENTS, store_module._FULL_ROWS
    mergeable = partial(store_module.mergeable, row_bytes=788)
    assert mergeable([]) == 0
    assert mergeable([512] * (many - 1)) == 0
    assert mergeable([512] * many) == many
    assert mergeable([full] * 100) == 0
    assert mergeable([full] * 3 + [512] * many) == many
    assert mergeable([512] * 9 + [full] + [512] * (many - 1)) == 0
    # Merged fragments are merged again only when several times as many rows have been added.
    assert mergeable([512 * many] + [512] * (many - 1)) == 0
    assert mergeable([512 * many] * 7 + [512] * many) == many + 7
    # With 4,096 dimensions, these fragments have 84 MB and 8 MB each.
    assert store_module.mergeable([10_240] * 100, row_bytes=8_212) == 0
    assert store_module.mergeable([1_024] * many, row_bytes=8_212) == many


def test_rows_are_rewritten_few_times():
    rows, rewritten = [], 0
    for _ in range(4_000):
        rows.append(512)
        if count := store_module.mergeable(rows, row_bytes=788):
            rows[-count:] = [sum(rows[-count:])]
            rewritten += rows[-1]
        assert len(rows) < 60
    assert rewritten <= 2.1 * sum(rows)


# -- concurrency -----------------------------------------------------------------------------------


def add_rows_in_random_order(store, seed, added):
    order = np.random.default_rng(seed).permutation(200)
    for start in range(0, 200, 7):
        indices = order[start : start + 7]
        if store.missing([MANY[i] for i in indices]):
            added.append(add_rows(store, indices))


def read_until(done, store):
    while not done.is_set():
        store.refresh()
        stored = sorted(set(range(200)) - set(store.missing(MANY[:200])))
        inputs = [MANY[i] for i in stored]
        if stored:
            np.testing.assert_array_equal(store.lookup(inputs).read(), MANY_VECTORS[stored])
        assert store.count_truncated_at(store.positions(inputs)) == sum(i % 3 == 0 for i in stored)


def test_threads_add_each_input_once(eager_merging, tmp_path, store):
    """Some threads share an object, others only a folder, while two threads read."""
    second, third = (FeatureStore(tmp_path, IDENTITY, "float32") for _ in range(2))
    added, done = [], threading.Event()
    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read_until, done, handle) for handle in (store, third)]
        writers = [
            pool.submit(add_rows_in_random_order, handle, seed, added)
            for seed, handle in enumerate((store, store, store, second))
        ]
        wait(writers)
        done.set()
    for task in readers + writers:
        task.result()
    assert sum(added) == 200
    for handle in (store, second):
        handle.refresh()
        check_contents(handle, range(200))


def test_read_that_fails_twice_is_repeated_under_the_lock(store):
    append(store)
    locked = []

    def attempt():
        try:
            FileLock(store.folder / "commit.lock").acquire(blocking=False).lock.release()
            locked.append(False)
        except Timeout:
            locked.append(True)
        if len(locked) < 3:
            raise OSError("Not found")
        return "read"

    assert store._read_safely(attempt) == "read"
    assert locked == [False, False, True]


def test_claim_may_end_in_another_thread(store):
    block = store.claim("part")
    assert block.__enter__()
    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    with store.claim("part") as mine:
        assert mine


def test_claims_of_killed_processes_are_removed(tmp_path, store):
    append(store, [0])
    with store.claim("mine") as mine:
        assert mine
        claims = store.folder / "claims"
        (claims / "left.lock").touch()
        second = FeatureStore(tmp_path, IDENTITY, "float32")
        with second.claim("other") as other:
            assert other
            assert {path.name for path in claims.glob("*.lock")} == {"mine.lock", "other.lock"}
        with second.claim("mine") as claimed_again:
            assert not claimed_again
    assert list(claims.glob("*.lock")) == []


def test_locks_of_other_processes_are_tried_only_once(store):
    with store.claim("first"):
        abandoned = store.folder / "claims" / "abandoned.lock"
        abandoned.touch()
        with store.claim("second"):
            assert abandoned.exists()


def test_claims_leave_no_files_behind(store):
    held = [store.claim(f"held {i}") for i in range(3)]
    assert all(block.__enter__() for block in held)
    for i in range(50):
        with store.claim(str(i)) as mine:
            assert mine
    locks = store.folder / "claims"
    assert len(list(locks.glob("*.lock"))) == 3
    for block in held:
        block.__exit__(None, None, None)
    assert list(locks.glob("*.lock")) == []


def test_threads_claim_a_part_one_at_a_time(tmp_path, store):
    second = FeatureStore(tmp_path, IDENTITY, "float32")
    inside, claims, counts = [], [], []

    def claim_repeatedly(handle):
        for _ in range(60):
            with handle.claim("part") as mine:
                if mine:
                    inside.append(1)
                    counts.append(len(inside))
                    claims.append(1)
                    inside.pop()

    threads = [
        threading.Thread(target=claim_repeatedly, args=(handle,))
        for handle in (store, store, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(counts) == {1}
    # The number of claims depends on how threads take turns, but the last one always succeeds.
    assert claims
    with store.claim("part") as mine:
        assert mine


def keep_adding(root, seed, connection, killed_in_merge):
    """Add the many inputs in a separate process, until it is killed."""
    merge_eagerly(setattr)
    if killed_in_merge:
        commit = lance_io.commit_rows

        def commit_or_die(dataset, options, fragments, removed=()):
            if removed:
                os.kill(os.getpid(), signal.SIGKILL)
            return commit(dataset, options, fragments)

        lance_io.commit_rows = commit_or_die
    connection.send("ready")
    connection.recv()
    store = FeatureStore(root, IDENTITY, "float32")
    order = np.random.default_rng(seed).permutation(len(MANY))
    for start in range(0, len(order), 3):
        add_rows(store, order[start : start + 3])
    connection.recv()


@pytest.fixture
def adding_processes(tmp_path):
    """Three processes that wait before their first input. The first one dies as it merges."""
    workers = []
    for seed in range(3):
        parent_end, child_end = SPAWNING.Pipe()
        arguments = (tmp_path, seed, child_end, seed == 0)
        process = SPAWNING.Process(target=keep_adding, args=arguments, daemon=True)
        process.start()
        workers.append((process, parent_end))
    assert [connection.recv() for _, connection in workers] == ["ready"] * 3
    yield workers
    for process, _ in workers:
        process.kill()
        process.join()


def test_killed_processes_leave_complete_rows(tmp_path, adding_processes):
    """One dies between writing a merged file and committing it, the others at any point."""
    (first, connection), *others = adding_processes
    connection.send("go")
    first.join(PATIENCE)
    watcher = FeatureStore(tmp_path, IDENTITY, "float32")
    assert len(watcher) == 3 * EAGER["_MERGED_FRAGMENTS"]
    for _, connection in others:
        connection.send("go")
    for process, _ in others:
        n_expected = min(len(watcher) + 50, len(MANY))
        while process.is_alive() and len(watcher) < n_expected:
            watcher.refresh()
        process.kill()
        process.join()
    assert [process.exitcode for process, _ in adding_processes] == [-signal.SIGKILL] * 3
    watcher.refresh()
    stored = set(range(len(MANY))) - set(watcher.missing(MANY))
    check_contents(watcher, stored)
    store = FeatureStore(tmp_path, IDENTITY, "float32")
    check_contents(store, stored)
    assert add_rows(store, range(len(MANY))) == len(MANY) - len(stored)
    check_contents(store, range(len(MANY)))
