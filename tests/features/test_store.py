"""The feature store: what is put in comes out, once, and never mixed with another's."""

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
from llmcond.encoders.encoder import Encoded
from llmcond.errors import DiskFullError, LlmcondError, UserError
from llmcond.features import fragments as fragments_module
from llmcond.features import location as location_module
from llmcond.features import store as store_module
from llmcond.features.store import FeatureStore
from llmcond.lance_io import DatasetTarget

PROCESSES = multiprocessing.get_context("spawn")


@pytest.fixture
def store(tmp_path):
    return FeatureStore(tmp_path, IDENTITY, "float32")


def test_float32_vectors_come_back_bit_for_bit(store):
    append(store)
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)


def test_float16_vectors_come_back_as_float16_rounds_them(tmp_path):
    store = FeatureStore(tmp_path, IDENTITY, "float16")
    append(store)
    read = store.lookup(INPUTS).read()
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, VECTORS.astype(np.float16).astype(np.float32))
    assert np.abs(read - VECTORS).max() > 0


def test_vectors_are_read_in_the_order_asked_for(store):
    append(store, [7, 3, 11])
    append(store, [0, 19])
    wanted = [19, 3, 0, 7, 3, 11, 19]
    np.testing.assert_array_equal(store.lookup([INPUTS[i] for i in wanted]).read(), VECTORS[wanted])


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
    own = (INPUTS[i].key if i % 3 else INPUTS[i].key_when_cut for i in range(20))
    assert sorted(keys) == sorted(own)


def test_the_first_vector_of_an_input_stays(store):
    append(store)
    append(store, vectors=VECTORS + 1)
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)


def test_missing_inputs_are_named_by_position(store):
    assert store.missing(INPUTS[:3]) == [0, 1, 2]
    append(store, [1, 4])
    assert store.missing(INPUTS[:6]) == [0, 2, 3, 5]
    assert store.missing([]) == []


def test_reading_missing_features_says_to_extract_again(store):
    append(store, range(15))
    with pytest.raises(UserError, match=r"5 of 20 features.*Run the same `llmcond extract` again"):
        store.lookup(INPUTS).read()


def test_reading_an_empty_store_says_to_extract_again(store):
    with pytest.raises(UserError, match="llmcond extract"):
        store.lookup(INPUTS[:1]).read()


def test_instruction_is_part_of_what_a_vector_is_stored_under(store):
    append(store)
    assert store.missing([EncoderInput("text", " 0"), EncoderInput("text 0", "")]) == [0, 1]


def test_what_earlier_versions_cut_is_not_found(store, monkeypatch):
    """They cut whatever came last, such as the condition, and stored it as any other input."""
    with monkeypatch.context() as patch:
        patch.setattr(EncoderInput, "key_when_cut", EncoderInput.key)
        append(store)
    again = FeatureStore(store.folder.parent, IDENTITY, "float32")
    cut = [i for i in range(20) if i % 3 == 0]
    assert again.missing(INPUTS) == cut
    assert append(again, vectors=VECTORS + 1) == len(cut)
    assert again.missing(INPUTS) == []
    expected = VECTORS + (np.arange(20) % 3 == 0)[:, None]
    np.testing.assert_array_equal(again.lookup(INPUTS).read(), expected)


def test_truncated_inputs_are_counted(store):
    append(store)
    assert store.count_truncated_at(store.positions(INPUTS)) == 7
    assert store.count_truncated_at(store.positions([INPUTS[0], INPUTS[1], INPUTS[0]])) == 2
    assert store.count_truncated_at(store.positions([])) == 0


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"pooling": "cls"}, {"weights": "x"}])
def test_encoders_that_differ_do_not_share_vectors(tmp_path, store, change):
    append(store)
    other = FeatureStore(tmp_path, replace(IDENTITY, **change), "float32")
    assert other.missing(INPUTS) == list(range(20))
    append(other, vectors=-VECTORS)
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)
    np.testing.assert_array_equal(other.lookup(INPUTS).read(), -VECTORS)


def test_store_types_do_not_share_vectors(tmp_path, store):
    append(store)
    assert FeatureStore(tmp_path, IDENTITY, "float16").missing(INPUTS) == list(range(20))


def test_a_reopened_store_holds_the_same(tmp_path, store):
    append(store)
    reopened = FeatureStore(tmp_path, IDENTITY, "float32")
    assert len(reopened) == 20
    np.testing.assert_array_equal(reopened.lookup(INPUTS).read(), VECTORS)


def test_another_handle_sees_rows_after_a_refresh(tmp_path, store):
    append(store, range(5))
    other = FeatureStore(tmp_path, IDENTITY, "float32")
    append(store, range(5, 9))
    assert len(other) == 5
    other.refresh()
    np.testing.assert_array_equal(other.lookup(INPUTS[:9]).read(), VECTORS[:9])


def test_a_handle_opened_before_the_first_row_sees_it_after_a_refresh(tmp_path, store):
    other = FeatureStore(tmp_path, IDENTITY, "float32")
    append(store)
    other.refresh()
    assert other.missing(INPUTS) == []


def test_a_stale_handle_doubles_nothing(tmp_path, store):
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


def test_store_of_a_newer_version_is_refused(tmp_path, store):
    append(store)
    (store.folder / "store.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match=r"newer version of llmcond.*Upgrade llmcond"):
        FeatureStore(tmp_path, IDENTITY, "float32")


def test_store_without_a_format_is_refused(tmp_path, store):
    append(store)
    (store.folder / "store.json").write_text("{}")
    with pytest.raises(LlmcondError, match="no format version"):
        FeatureStore(tmp_path, IDENTITY, "float32")


def test_a_part_is_claimed_by_one_at_a_time(tmp_path, store):
    other = FeatureStore(tmp_path, IDENTITY, "float32")
    with store.claim("part") as mine:
        assert mine
        with other.claim("part") as theirs, other.claim("another") as another:
            assert not theirs
            assert another
    with other.claim("part") as later:
        assert later


def test_places_count_in_the_order_of_adding(store):
    append(store, [7, 3])
    append(store, [3, 11])
    assert store.positions([INPUTS[i] for i in (11, 0, 7, 3, 7)]).tolist() == [2, -1, 0, 1, 0]
    assert store.positions([]).tolist() == []
    assert store.count_truncated_at(store.positions([INPUTS[3], INPUTS[7]])) == 1
    assert store.count_truncated_at(store.positions([])) == 0


# -- many commits ----------------------------------------------------------------------------------

MANY = [EncoderInput("", f"one of many {i}") for i in range(600)]
MANY_VECTORS = np.random.default_rng(1).normal(size=(600, 6)).astype(np.float32)


#: Merge after every few commits, and keep no old version.
EAGER = {"_MERGED_FRAGMENTS": 4, "_LARGEST_PART": 2, "_FULL_ROWS": 60, "_KEPT_VERSIONS": 1}


def merge_eagerly(setting):
    for name, value in EAGER.items():
        setting(lance_io if hasattr(lance_io, name) else fragments_module, name, value)


@pytest.fixture
def merging(monkeypatch):
    merge_eagerly(monkeypatch.setattr)


def add(store, chosen):
    """Add some of the many inputs; the order they are added in is ascending in no test."""
    chosen = list(chosen)
    n_tokens = np.array(chosen, dtype=np.int32)
    encoded = Encoded(MANY_VECTORS[chosen], n_tokens, n_tokens % 3 == 0)
    return store.append([MANY[i] for i in chosen], encoded)


def check(store, chosen):
    """Check that the store holds these of the many inputs, complete and once, and no others."""
    chosen = sorted(chosen)
    inputs = [MANY[i] for i in chosen]
    assert set(range(len(MANY))) - set(store.missing(MANY)) == set(chosen)
    assert len(store) == len(chosen)
    np.testing.assert_array_equal(store.lookup(inputs).read(), MANY_VECTORS[chosen])
    assert store.count_truncated_at(store.positions(inputs)) == sum(i % 3 == 0 for i in chosen)
    table = lance.dataset(str(store.folder / "vectors.lance")).to_table()
    keys = [
        item.key if i % 3 else item.key_when_cut for i, item in zip(chosen, inputs, strict=True)
    ]
    assert store.positions(inputs).tolist() == [table["key"].to_pylist().index(key) for key in keys]
    assert sorted(table["n_tokens"].to_pylist()) == chosen


def files(store, kind):
    return list((store.folder / "vectors.lance" / kind).iterdir())


def test_merging_keeps_every_row_in_its_place(merging, tmp_path, store):
    order = np.random.default_rng(2).permutation(300)
    add(store, order[:2])
    opened_before = FeatureStore(tmp_path, IDENTITY, "float32")
    opened_within = None
    size, start = 0, 2
    while start < 300:
        size = size % 5 + 1
        add(store, order[start : start + size])
        start += size
        if start > 100 and opened_within is None:
            opened_within = FeatureStore(tmp_path, IDENTITY, "float32")
        wanted = [MANY[i] for i in order[:start]]
        assert store.positions(wanted).tolist() == list(range(min(start, 300)))
    check(store, range(300))
    for other in (opened_before, opened_within):
        other.refresh()
        check(other, range(300))
    check(FeatureStore(tmp_path, IDENTITY, "float32"), range(300))


def test_an_old_handle_reads_on_when_its_files_are_gone(merging, tmp_path, store):
    for i in range(3):
        add(store, [2 * i, 2 * i + 1])
    old = FeatureStore(tmp_path, IDENTITY, "float32")
    old_files = files(store, "data")
    for i in range(6, 20):
        add(store, [i])
    assert not any(path.exists() for path in old_files)
    chosen = [5, 0, 3]
    assert len(old) == 6
    np.testing.assert_array_equal(
        old.lookup([MANY[i] for i in chosen]).read(), MANY_VECTORS[chosen]
    )
    stale = FeatureStore(tmp_path, IDENTITY, "float32")
    for i in range(20, 40):
        add(store, [i])
    assert stale.count_truncated_at(stale.positions([MANY[i] for i in chosen])) == 2
    assert add(stale, range(45)) == 5
    check(stale, range(45))


def test_files_and_versions_stay_few(tmp_path):
    store = FeatureStore(tmp_path, IDENTITY, "float32")
    most = {"data": 0, "_versions": 0, "_transactions": 0}
    for i in range(300):
        add(store, [2 * i, 2 * i + 1])
        most = {kind: max(n, len(files(store, kind))) for kind, n in most.items()}
    # Of 300 commits; merged ones leave their old files for a while.
    assert len(lance.dataset(store._location.uri).get_fragments()) < 45
    assert all(n < 110 for n in most.values())
    check(store, range(600))


def test_what_a_killed_merge_left_is_removed(merging, store):
    add(store, [0])
    rubbish = store.folder / "vectors.lance" / "data" / ("01" * 12 + "a" * 26 + ".lance")
    rubbish.write_bytes(b"half a file")
    for i in range(1, 8):
        add(store, [i])
    assert not rubbish.exists()
    check(store, range(8))


def test_nothing_is_merged_where_there_is_no_room_for_it(merging, store, monkeypatch):
    usage = SimpleNamespace(free=1_000)
    monkeypatch.setattr(store_module, "SPARE_BYTES", 0)
    monkeypatch.setattr(location_module.shutil, "disk_usage", lambda _: usage)
    for i in range(60):
        add(store, [i])
    # 6 numbers of 4 bytes each, twice: what is merged and as much again.
    assert 20 < len(lance.dataset(store._location.uri).get_fragments()) <= 60
    check(store, range(60))


def test_nothing_is_added_where_there_is_no_room_for_it(store, monkeypatch):
    add(store, [0])
    usage = SimpleNamespace(free=100)
    monkeypatch.setattr(location_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskFullError, match="the 1 features already stored are kept"):
        add(store, [1])
    check(store, range(1))


def test_merging_is_planned_for_the_last_fragments_alone():
    many, full = fragments_module._MERGED_FRAGMENTS, fragments_module._FULL_ROWS
    mergeable = partial(fragments_module.mergeable, row_bytes=788)
    assert mergeable([]) == 0
    assert mergeable([512] * (many - 1)) == 0
    assert mergeable([512] * many) == many
    assert mergeable([full] * 100) == 0
    assert mergeable([full] * 3 + [512] * many) == many
    assert mergeable([512] * 9 + [full] + [512] * (many - 1)) == 0
    # What was merged is left alone until there is as much again, several times over.
    assert mergeable([512 * many] + [512] * (many - 1)) == 0
    assert mergeable([512 * many] * 7 + [512] * many) == many + 7
    # Of 4,096 dimensions: 84 MB each, and 8.
    assert fragments_module.mergeable([10_240] * 100, row_bytes=8_212) == 0
    assert fragments_module.mergeable([1_024] * many, row_bytes=8_212) == many


def test_a_row_is_rewritten_a_few_times_at_most():
    rows, rewritten = [], 0
    for _ in range(4_000):
        rows.append(512)
        if count := fragments_module.mergeable(rows, row_bytes=788):
            rows[-count:] = [sum(rows[-count:])]
            rewritten += rows[-1]
        assert len(rows) < 60
    assert rewritten <= 2.1 * sum(rows)


# -- several at once -------------------------------------------------------------------------------


def add_in_order_of(store, seed, added):
    order = np.random.default_rng(seed).permutation(200)
    for start in range(0, 200, 7):
        chosen = order[start : start + 7]
        if store.missing([MANY[i] for i in chosen]):
            added.append(add(store, chosen))


def read_until(done, store):
    while not done.is_set():
        store.refresh()
        there = sorted(set(range(200)) - set(store.missing(MANY[:200])))
        inputs = [MANY[i] for i in there]
        if there:
            np.testing.assert_array_equal(store.lookup(inputs).read(), MANY_VECTORS[there])
        assert store.count_truncated_at(store.positions(inputs)) == sum(i % 3 == 0 for i in there)


def test_threads_add_each_input_once(merging, tmp_path, store):
    """Some share an object and some a folder; others read all the while."""
    second, third = (FeatureStore(tmp_path, IDENTITY, "float32") for _ in range(2))
    added, done = [], threading.Event()
    with ThreadPoolExecutor(6) as pool:
        reading = [pool.submit(read_until, done, own) for own in (store, third)]
        adding = [
            pool.submit(add_in_order_of, own, seed, added)
            for seed, own in enumerate((store, store, store, second))
        ]
        wait(adding)
        done.set()
    for task in reading + adding:
        task.result()
    assert sum(added) == 200
    for own in (store, second):
        own.refresh()
        check(own, range(200))


def test_a_read_that_fails_again_is_repeated_where_nothing_is_removed(store):
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


def test_a_claim_may_end_in_another_thread(store):
    block = store.claim("part")
    assert block.__enter__()
    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    with store.claim("part") as mine:
        assert mine


def test_claims_that_a_kill_left_are_removed_and_others_stay(tmp_path, store):
    append(store, [0])
    with store.claim("mine") as mine:
        assert mine
        claims = store.folder / "claims"
        (claims / "left.lock").touch()
        second = FeatureStore(tmp_path, IDENTITY, "float32")
        with second.claim("other") as other:
            assert other
            assert {path.name for path in claims.glob("*.lock")} == {"mine.lock", "other.lock"}
        with second.claim("mine") as again:
            assert not again
    assert list(claims.glob("*.lock")) == []


def test_the_locks_of_others_are_tried_once_whatever_the_number_of_claims(store):
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
    inside, won, crowds = [], [], []

    def claiming(own):
        for _ in range(60):
            with own.claim("part") as mine:
                if mine:
                    inside.append(1)
                    crowds.append(len(inside))
                    won.append(1)
                    inside.pop()

    threads = [threading.Thread(target=claiming, args=(own,)) for own in (store, store, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(crowds) == {1}
    # How often depends on how the threads take turns; the last of them has nobody to wait for.
    assert won
    with store.claim("part") as mine:
        assert mine


def keep_adding(root, seed, connection, killed_in_merge):
    """Add the many inputs in a process of its own, until someone kills it."""
    merge_eagerly(setattr)
    if killed_in_merge:
        commit = DatasetTarget.commit

        def commit_or_die(target, fragments, removed=()):
            if removed:
                os.kill(os.getpid(), signal.SIGKILL)
            return commit(target, fragments)

        DatasetTarget.commit = commit_or_die
    connection.send("ready")
    connection.recv()
    store = FeatureStore(root, IDENTITY, "float32")
    order = np.random.default_rng(seed).permutation(len(MANY))
    for start in range(0, len(order), 3):
        add(store, order[start : start + 3])
    connection.recv()


@pytest.fixture
def adders(tmp_path):
    """Three processes that stand before their first input; the first one dies as it merges."""
    started = []
    for seed in range(3):
        ours, theirs = PROCESSES.Pipe()
        arguments = (tmp_path, seed, theirs, seed == 0)
        process = PROCESSES.Process(target=keep_adding, args=arguments, daemon=True)
        process.start()
        started.append((process, ours))
    assert [connection.recv() for _, connection in started] == ["ready"] * 3
    yield started
    for process, _ in started:
        process.kill()
        process.join()


def test_killed_processes_leave_complete_rows(tmp_path, adders):
    """One dies between making a merged file and committing it, the others wherever they are."""
    (first, word), *others = adders
    word.send("go")
    first.join(PATIENCE)
    watching = FeatureStore(tmp_path, IDENTITY, "float32")
    assert len(watching) == 3 * EAGER["_MERGED_FRAGMENTS"]
    for _, word in others:
        word.send("go")
    for process, _ in others:
        wanted = min(len(watching) + 50, len(MANY))
        while process.is_alive() and len(watching) < wanted:
            watching.refresh()
        process.kill()
        process.join()
    assert [process.exitcode for process, _ in adders] == [-signal.SIGKILL] * 3
    watching.refresh()
    there = set(range(len(MANY))) - set(watching.missing(MANY))
    check(watching, there)
    store = FeatureStore(tmp_path, IDENTITY, "float32")
    check(store, there)
    assert add(store, range(len(MANY))) == len(MANY) - len(there)
    check(store, range(len(MANY)))
