"""The feature store: vectors are stored once, and survive killed processes and storage errors."""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from types import SimpleNamespace

import lance
import numpy as np
import psutil
import pytest
from filelock import FileLock, Timeout
from helpers.buckets import ACCESS_KEY, SECRET_KEY, Proxy
from helpers.identities import IDENTITY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcond.base import stores as lance_io
from llmcond.base.errors import DiskFullError, LlmcondError, UserError
from llmcond.encoders import EncoderInput
from llmcond.encoders.spec import Encoded
from llmcond.features import store as location_module
from llmcond.features import store as store_module
from llmcond.features.extract import count_missing, merge_counts
from llmcond.features.store import BucketLocation, FeatureStore, resolve_store_uri
from llmcond.features.view import KeyIndex

N = 600
INPUTS = [EncoderInput("", f"text {i}") for i in range(N)]
VECTORS = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)

#: Settings that merge after every few commits, and that keep no old version.
EAGER = {"_MERGED_FRAGMENTS": 4, "_LARGEST_PART": 2, "_FULL_ROWS": 60, "_RETAINED_VERSIONS": 1}


def merge_eagerly(set_attribute):
    for name, value in EAGER.items():
        set_attribute(lance_io if hasattr(lance_io, name) else store_module, name, value)


@pytest.fixture
def eager_merging(monkeypatch):
    merge_eagerly(monkeypatch.setattr)


@pytest.fixture(params=["folder", "bucket"])
def root(request, tmp_path):
    return tmp_path if request.param == "folder" else request.getfixturevalue("bucket")


def open_store(root, dtype="float32", **options):
    return FeatureStore(root, IDENTITY, dtype, **options)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def add_rows(store, indices, vectors=VECTORS):
    """Add some of the inputs. Every third one is marked as truncated."""
    indices = list(indices)
    n_tokens = np.array(indices, dtype=np.int32)
    encoded = Encoded(vectors[indices], n_tokens, n_tokens % 3 == 0)
    return store.append([INPUTS[i] for i in indices], encoded)


def open_dataset(store):
    location = store._location
    return lance.dataset(location.uri, storage_options=location.options)


def check_contents(store, indices, *, once=True):
    """Check that the store holds exactly these inputs, at the right positions.

    With ``once``, each has a single row.
    """
    indices = sorted(indices)
    inputs = [INPUTS[i] for i in indices]
    assert sorted(set(range(N)) - set(store.missing(INPUTS))) == indices
    np.testing.assert_array_equal(store.lookup(inputs).read(), VECTORS[indices])
    assert store.count_truncated_at(store.positions(inputs)) == sum(i % 3 == 0 for i in indices)
    rows = open_dataset(store).to_table(columns=["key", "n_tokens"])
    assert rows["n_tokens"].take(store.positions(inputs)).to_pylist() == indices
    assert set(rows["key"].to_pylist()) == {item.key for item in inputs}
    assert len(rows) == len(store)
    assert len(rows) == len(indices) or not once


def list_files(store, kind="."):
    return sorted(path for path in (store.folder / kind).rglob("*") if path.is_file())


# -- reading and writing ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_vectors_are_stored_once_and_read_back_in_any_order(root, dtype):
    store = open_store(root, dtype)
    assert store.missing(INPUTS[:3]) == [0, 1, 2]
    assert add_rows(store, [7, 3]) == 2
    # The first vector of an input stays.
    assert add_rows(store, [3, 11, 0, 7], VECTORS + 1) == 2
    assert add_rows(store, [0, 3]) == 0
    expected = np.where(np.isin(np.arange(N), [11, 0])[:, None], VECTORS + 1, VECTORS)
    for handle in (store, open_store(root, dtype)):
        assert len(handle) == 4
        assert handle.missing(INPUTS[:5]) == [1, 2, 4]
        assert handle.missing([]) == []
        indices = [0, 7, 3, 11, 7]
        inputs = [INPUTS[i] for i in indices]
        assert handle.positions([INPUTS[1], *inputs]).tolist() == [-1, 3, 0, 1, 2, 0]
        assert handle.positions([]).tolist() == []
        read = handle.lookup(inputs).read()
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, expected[indices].astype(dtype).astype(np.float32))
        assert handle.count_truncated_at(handle.positions(inputs)) == 2
        assert handle.count_truncated_at(handle.positions([])) == 0
        handle.check_writable()
    assert len(open_dataset(store).to_table()) == 4


def test_encoders_types_and_instructions_do_not_share_vectors(tmp_path, store):
    add_rows(store, range(20))
    assert store.missing([EncoderInput("text", " 0"), EncoderInput("text 0", "")]) == [0, 1]
    assert open_store(tmp_path, "float16").missing(INPUTS[:20]) == list(range(20))
    for change in ({"dtype": "bfloat16"}, {"pooling": "cls"}, {"weights": "x"}):
        other = FeatureStore(tmp_path, replace(IDENTITY, **change), "float32")
        assert other.missing(INPUTS[:20]) == list(range(20))
        add_rows(other, range(20), -VECTORS)
        np.testing.assert_array_equal(other.lookup(INPUTS[:20]).read(), -VECTORS[:20])
    check_contents(store, range(20))


def test_handles_see_rows_of_others_after_refresh(tmp_path, store):
    first, second = open_store(tmp_path), open_store(tmp_path)
    # Opening writes nothing.
    assert list(tmp_path.iterdir()) == []
    add_rows(store, range(5))
    assert len(first) == 0
    first.refresh()
    check_contents(first, range(5))
    # A handle that has not been refreshed stores no duplicates.
    assert add_rows(second, range(9)) == 4
    check_contents(second, range(9))


def test_store_describes_its_encoder_and_format(root, monkeypatch):
    store = open_store(root)
    add_rows(store, [0])
    description = json.loads(open_dataset(store).schema.metadata[b"llmcond"])
    assert description == {"format": 1, "dtype": "float32", "encoder": IDENTITY.to_json()}
    monkeypatch.setattr(store_module, "FORMAT", 0)
    with pytest.raises(UserError, match=r"newer version of llmcond.*Upgrade llmcond"):
        open_store(root)


def test_rows_of_workers_are_read_once(root):
    """Workers do not look whether the store has an input already."""
    store = open_store(root)
    workers = [open_store(root, only_write=True) for _ in range(2)]
    assert (add_rows(workers[0], range(12)), add_rows(workers[1], range(8))) == (12, 8)
    assert add_rows(workers[0], range(10, 20)) == 10
    store.merge()
    assert add_rows(store, range(20)) == 0
    check_contents(store, range(20), once=False)
    assert len(store) == 30


# -- keys, and counts of inputs that a store lacks ------------------------------------------------

#: There are only a few halves, so that keys repeat or differ in one half only.
HALVES = st.sampled_from([b"\0" * 8, b"\0" * 7 + b"\1", b"\1" + b"\0" * 7, b"\xff" * 8])
KEYS = st.builds(bytes.__add__, HALVES, HALVES) | st.binary(min_size=16, max_size=16)
KEY_LISTS = st.lists(KEYS, max_size=12)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(chunks=st.lists(KEY_LISTS, max_size=12), queries=KEY_LISTS)
def test_find_returns_first_position_of_each_key(chunks, queries):
    index = KeyIndex()
    for chunk in chunks:
        index.add(b"".join(chunk))
    added = [key for chunk in chunks for key in chunk]
    for keys in (queries, added):
        positions = [added.index(key) if key in added else -1 for key in keys]
        assert index.find(b"".join(keys)).tolist() == positions


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_stored_and_repeated_inputs_are_not_missing(store, window):
    add_rows(store, range(10))
    counts = count_missing(store, iter([*INPUTS[5:30], *INPUTS[:25]]), window)
    characters = sum(len(item.text) for item in INPUTS[10:30])
    assert (counts.n_inputs, counts.n_missing, counts.n_characters) == (30, 20, characters)
    assert list(counts.sample) == INPUTS[10:30]
    # Inputs that two prompts share are encoded for the first, so the second lacks none of them.
    seen = KeyIndex()
    parts = [count_missing(store, INPUTS[10:30], window, seen) for _ in range(2)]
    assert [(part.n_inputs, part.n_missing) for part in parts] == [(20, 20), (0, 0)]
    assert merge_counts(parts).n_missing == 20


def test_samples_are_random_with_equal_sampling_rates(store):
    """Every eighth text is short, as conditions are. The sample must keep this share."""
    items = [EncoderInput("", f"{n}" if n % 8 == 0 else f"a text {n}") for n in range(40_000)]
    many, few = (count_missing(store, part, 1_000) for part in (items, INPUTS))
    assert 1_024 <= len(many.sample) <= 2_048
    short = sum(item.text.isdigit() for item in many.sample) / len(many.sample)
    assert short == pytest.approx(1 / 8, abs=0.03)
    assert list(few.sample) == INPUTS
    for whole in (merge_counts([few, many]), merge_counts([many, few])):
        share = sum(item.text.startswith("text") for item in whole.sample) / len(whole.sample)
        assert share == pytest.approx(N / (N + 40_000), abs=0.012)
        assert len(whole.sample) == pytest.approx((N + 40_000) / whole.every, rel=0.1)


# -- lookups ---------------------------------------------------------------------------------------

LOOKUP_INDICES = [19, 3, 0, 7, 3, 11, 19, 19, 5]


def check_lookup(store, indices=LOOKUP_INDICES):
    """Check that a lookup reads each distinct vector once, and return their table."""
    rows = store.lookup([INPUTS[i] for i in indices])
    table, index = rows.table.array, rows.index
    assert table.dtype == np.dtype(store.dtype)
    assert len({row.tobytes() for row in table}) == len(table) == len(set(indices))
    np.testing.assert_array_equal(table[index], VECTORS[indices].astype(store.dtype))
    return table


@pytest.mark.parametrize("block_size", [1, 2, 65_536])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_tables_are_memory_maps_of_unnamed_files(tmp_path, monkeypatch, dtype, block_size):
    monkeypatch.setattr(store_module, "_READ_ROWS", block_size)
    store = open_store(tmp_path, dtype)
    add_rows(store, [7, 3, 11, 0])
    add_rows(store, [19, 5])
    size = 6 * VECTORS.shape[1] * np.dtype(dtype).itemsize
    monkeypatch.setattr(store_module, "_MAX_TABLE_BYTES", size - 1)
    check_lookup(store, [5] * 7)
    files, process = list_files(store), psutil.Process()
    n_opened = process.num_fds()
    table = check_lookup(store)
    assert isinstance(table, np.memmap)
    assert list_files(store) == files
    del table
    assert process.num_fds() <= n_opened
    monkeypatch.setattr(store_module, "_MAX_TABLE_BYTES", size)
    assert not isinstance(check_lookup(store), np.memmap)


def test_failed_lookup_leaves_no_file(store, monkeypatch):
    add_rows(store, range(20))
    files = list_files(store)
    monkeypatch.setattr(store_module, "_READ_ROWS", 2)
    with pytest.raises(UserError, match=r"2 of 5 features.*Run the same `llmcond extract` again"):
        store.lookup([INPUTS[i] for i in (3, 21, 4, 20, 5)])
    monkeypatch.setattr(store_module, "_MAX_TABLE_BYTES", 0)
    results = iter([store._read_vectors(np.array([0, 3]))])

    def fail_after_first_call(_):
        if (result := next(results, None)) is None:
            raise OSError("gone")
        return result

    store._read_vectors = fail_after_first_call
    with pytest.raises(OSError, match="gone"):
        store.lookup([INPUTS[i] for i in LOOKUP_INDICES])
    assert list_files(store) == files


# -- many commits ----------------------------------------------------------------------------------


def test_merging_preserves_row_positions(eager_merging, root):
    store = open_store(root)
    order = np.random.default_rng(2).permutation(100).tolist()
    add_rows(store, order[:4])
    old, other = open_store(root), open_store(root)
    start, size = 4, 1
    while start < 100:
        add_rows(store, order[start : start + size])
        start, size = start + size, size % 5 + 1
    assert store.positions([INPUTS[i] for i in order]).tolist() == list(range(100))
    assert len(open_dataset(store).get_fragments()) < 10
    # The files of the version that the old handles have opened are gone.
    with pytest.raises((OSError, ValueError)):
        old._dataset.to_table()
    np.testing.assert_array_equal(
        old.lookup([INPUTS[i] for i in order[3::-1]]).read(), VECTORS[order[3::-1]]
    )
    assert add_rows(other, range(105)) == 5
    for handle in (other, open_store(root)):
        check_contents(handle, range(105))


def test_files_of_a_killed_merge_are_removed(eager_merging, store):
    add_rows(store, [0])
    leftover = store.folder / "vectors.lance" / "data" / ("01" * 12 + "a" * 26 + ".lance")
    leftover.write_bytes(b"half a file")
    for i in range(1, 8):
        add_rows(store, [i])
    assert not leftover.exists()
    check_contents(store, range(8))


def test_full_disk_stops_merging_before_it_stops_appending(eager_merging, store, monkeypatch):
    usage = SimpleNamespace(free=1_000)
    monkeypatch.setattr(location_module.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(store_module, "SPARE_BYTES", 0)
    for i in range(60):
        add_rows(store, [i])
    # A row has 6 numbers of 4 bytes, and merging needs the space of the merged rows twice.
    assert 20 < len(open_dataset(store).get_fragments()) <= 60
    monkeypatch.setattr(store_module, "SPARE_BYTES", 1_000)
    with pytest.raises(DiskFullError, match="the features already stored are kept"):
        add_rows(store, [60])
    check_contents(store, range(60))


# -- concurrency -----------------------------------------------------------------------------------


def add_rows_in_random_order(store, seed, added):
    order = np.random.default_rng(seed).permutation(200)
    for start in range(0, 200, 7):
        indices = order[start : start + 7]
        if store.missing([INPUTS[i] for i in indices]):
            added.append(add_rows(store, indices))


def read_until(done, store):
    while not done.is_set():
        store.refresh()
        stored = sorted(set(range(200)) - set(store.missing(INPUTS[:200])))
        inputs = [INPUTS[i] for i in stored]
        if stored:
            np.testing.assert_array_equal(store.lookup(inputs).read(), VECTORS[stored])
        assert store.count_truncated_at(store.positions(inputs)) == sum(i % 3 == 0 for i in stored)


def test_threads_add_each_input_once(eager_merging, tmp_path, store):
    """Some threads share an object, others only a folder, while two threads read."""
    second, third = open_store(tmp_path), open_store(tmp_path)
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
    add_rows(store, [0])
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


def test_claims_exclude_other_handles(tmp_path, store):
    other = open_store(tmp_path)
    with store.claim("part") as is_claimed:
        assert is_claimed
        with other.claim("part") as is_claimed_again, other.claim("another") as is_other_claimed:
            assert not is_claimed_again
            assert is_other_claimed
    # A claim may end in another thread.
    block = other.claim("part")
    assert block.__enter__()
    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    with store.claim("part") as is_claimed:
        assert is_claimed


# -- object stores ---------------------------------------------------------------------------------


@pytest.fixture
def bucket_store(bucket):
    return open_store(bucket)


@pytest.fixture
def other_machine(monkeypatch, tmp_path, bucket, bucket_store):
    """The same store as another machine sees it, with separate locks."""
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
        handle = open_store(bucket)
    assert handle.folder != bucket_store.folder
    return handle


@pytest.mark.parametrize("is_first", [True, False])
def test_commit_after_that_of_another_machine_is_repeated(
    bucket_store, other_machine, monkeypatch, is_first
):
    commit, n_added_by_other = lance_io.commit_rows, []

    def commit_after_other(*arguments):
        monkeypatch.setattr(store_module, "commit_rows", commit)
        n_added_by_other.append(add_rows(other_machine, range(5, 15)))
        return commit(*arguments)

    if not is_first:
        add_rows(bucket_store, range(5))
    monkeypatch.setattr(store_module, "commit_rows", commit_after_other)
    assert add_rows(bucket_store, range(5, 20)) == 15
    assert n_added_by_other == [10]
    check_contents(bucket_store, range(5 if is_first else 0, 20), once=False)


def test_storage_without_conditional_writes_is_reported(s3_port, bucket, bucket_store, monkeypatch):
    proxy = Proxy(s3_port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    proxied = open_store(bucket)
    add_rows(proxied, range(10))
    proxy.answer, proxy.only = (412, "PreconditionFailed"), ("PUT", "_versions/")
    with pytest.raises(LlmcondError, match="If-None-Match"):
        add_rows(proxied, range(20))
    bucket_store.refresh()
    check_contents(bucket_store, range(10))
    proxy.close()


def test_storage_errors_are_reported_without_secrets():
    """The texts are abridged from Lance's errors; KEY stands for secrets."""
    denied = (
        "Generic S3 error: Server returned non-2xx status code: 403 Forbidden: <?xml?><Error>"
        "<Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>KEY</AWSAccessKeyId></Error>"
    )
    missing = "status code: 404 Not Found: <Error><Code>ContainerNotFound</Code> ?sig=KEY"
    for uri, text, expected in (
        ("s3://b/x", denied, "s3://b/x: access was denied (SignatureDoesNotMatch). Set AWS_ACCESS"),
        ("az://b/x", missing, "there is no bucket az://b. Create it, or check AZURE_STORAGE_ACCO"),
    ):
        location = BucketLocation(uri)
        with pytest.raises(UserError) as caught:
            location.raise_unreachable(OSError(text))
        assert str(caught.value).startswith(expected)
        assert "KEY" not in str(caught.value).replace("ACCESS_KEY", "").replace("ACCOUNT_KEY", "")
        signed = "Not found: x?X-Amz-Signature=KEY <Error><AWSAccessKeyId>KEY, /home/a/b.rs:1:2"
        message = location.damage_message(OSError(signed))
        assert message.startswith(f"{location.uri} cannot be read: Not found: x. If it is damaged")


# -- store URIs ------------------------------------------------------------------------------------


def test_store_uris_are_normalized(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for uri, expected in {
        "s3://features/": "s3://features",
        "az://features/a": "az://features/a",
        "file:///tmp/../tmp/x": "/tmp/x",
        "a/b": str(tmp_path / "a" / "b"),
    }.items():
        assert resolve_store_uri(uri) == expected
    store = open_store(f"file://{tmp_path}/a%20b")
    add_rows(store, [0])
    assert store.folder.parent == tmp_path / "a b"
    assert (store.folder / "vectors.lance").exists()


def test_invalid_store_uri_is_rejected():
    for uri, expected in (
        ("s4://features/x", "s3://, gs://, az://, file:/// or a folder. Did you mean 's3'"),
        ("s3://features/x#y", "contains credentials or options"),
        (f"s3://{ACCESS_KEY}:{SECRET_KEY}@features/x", "Credentials are read from the environment"),
        ("s3:/features/x", "names no bucket; expected s3://BUCKET/PATH"),
    ):
        with pytest.raises(UserError, match=re.escape(expected)) as caught:
            resolve_store_uri(uri)
        assert SECRET_KEY not in str(caught.value)


def test_folder_of_locks_belongs_to_one_user(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    location = BucketLocation("s3://somewhere/features/store")
    location.prepare()
    lock_folder = location.folder.parent
    assert lock_folder.stat().st_mode & 0o777 == 0o700
    lock_folder.chmod(0o777)
    with pytest.raises(UserError, match=r"other users can write to it.*set TMPDIR"):
        location.prepare()
    lock_folder.chmod(0o755)
    location.prepare()
    with monkeypatch.context() as patch:
        user = os.getuid()
        patch.setattr("os.getuid", lambda: user + 1)
        with pytest.raises(UserError, match="not your folder"):
            location.prepare()
    lock_folder.rename(tmp_path / "taken")
    lock_folder.symlink_to(tmp_path / "taken")
    with pytest.raises(UserError, match="not your folder"):
        location.prepare()
