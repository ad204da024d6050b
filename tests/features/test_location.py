"""Feature stores in a bucket, on a server that speaks the S3 protocol."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import lance
import numpy as np
import pytest
from helpers.buckets import ACCESS_KEY, SECRET_KEY, Proxy, S3Server, s3_environment
from helpers.identities import IDENTITY
from helpers.processes import FORK_CONTEXT
from helpers.stored import INPUTS, TRUNCATED, VECTORS, append

from llmcond import lance_io, object_stores
from llmcond.encoders import EncoderInput
from llmcond.encoders.spec import Encoded
from llmcond.errors import LlmcondError, UserError
from llmcond.features import store as store_module
from llmcond.features.location import BucketLocation, resolve_store_uri
from llmcond.features.store import FeatureStore

MANY = [EncoderInput("", f"one of many {i}") for i in range(300)]
MANY_VECTORS = np.random.default_rng(1).normal(size=(300, 6)).astype(np.float32)


@pytest.fixture
def store(bucket):
    return FeatureStore(bucket, IDENTITY, "float32")


@pytest.fixture
def other_machine(monkeypatch, tmp_path, bucket):
    """The same store as another machine sees it, with separate locks."""
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
        return FeatureStore(bucket, IDENTITY, "float32")


@pytest.fixture
def proxy(s3_server, store, monkeypatch):
    """A proxy between the server and the handles that are opened from now on."""
    server_proxy = Proxy(s3_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server_proxy.port}")
    yield server_proxy
    server_proxy.close()


def add_rows(store, indices):
    indices = list(indices)
    n_tokens = np.array(indices, dtype=np.int32)
    encoded = Encoded(MANY_VECTORS[indices], n_tokens, n_tokens % 3 == 0)
    return store.append([MANY[i] for i in indices], encoded)


def open_dataset(store):
    location = store._location
    return lance.dataset(location.uri, storage_options=dict(location.options))


def check_contents(store, indices, *, once=True):
    """Check that the store holds exactly these of the many inputs, at the right positions.

    With ``once``, each has a single row.
    """
    indices = sorted(indices)
    inputs = [MANY[i] for i in indices]
    assert sorted(set(range(len(MANY))) - set(store.missing(MANY))) == indices
    np.testing.assert_array_equal(store.lookup(inputs).read(), MANY_VECTORS[indices])
    rows = open_dataset(store).to_table(columns=["key", "n_tokens"])
    assert sorted(set(rows["n_tokens"].to_pylist())) == indices
    assert rows["n_tokens"].take(store.positions(inputs)).to_pylist() == indices
    assert len(set(rows["key"].to_pylist())) == len(indices)
    assert len(rows) == len(store)
    assert len(rows) == len(indices) or not once


def test_vectors_are_read_back_from_a_bucket(bucket, store):
    assert store.missing(INPUTS) == list(range(20))
    assert append(store, range(12)) == 12
    assert append(store) == 8
    reopened = FeatureStore(bucket, IDENTITY, "float32")
    assert reopened.missing(INPUTS) == []
    np.testing.assert_array_equal(reopened.lookup(INPUTS).read(), VECTORS)
    assert reopened.count_truncated_at(reopened.positions(INPUTS)) == TRUNCATED.sum()
    assert FeatureStore(bucket, IDENTITY, "float16").missing(INPUTS) == list(range(20))
    reopened.check_writable()


def test_rows_of_workers_are_read_once(bucket, store):
    """Workers do not look whether the store has an input already."""
    workers = [FeatureStore(bucket, IDENTITY, "float32", only_write=True) for _ in range(2)]
    assert [append(worker, range(n)) for worker, n in zip(workers, (12, 8), strict=True)] == [12, 8]
    assert append(workers[0], range(10, 20), VECTORS) == 10
    store.merge()
    assert append(store) == 0
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)
    assert len(open_dataset(store).to_table()) == len(store) == 30


def test_bucket_contains_the_description_of_the_store(bucket, store, monkeypatch):
    append(store)
    assert store._location.description(store._dataset) == {
        "format": 1,
        "dtype": "float32",
        "encoder": IDENTITY.to_json(),
    }
    monkeypatch.setattr(store_module, "FORMAT", 0)
    with pytest.raises(UserError, match=r"s3://.*newer version of llmcond"):
        FeatureStore(bucket, IDENTITY, "float32")


def test_two_machines_lose_no_rows(store, other_machine, monkeypatch):
    monkeypatch.setattr(store_module, "_MERGED_FRAGMENTS", 4)
    monkeypatch.setattr(store_module, "_LARGEST_PART", 2)
    assert store.folder != other_machine.folder

    def add_in_random_order(handle, seed):
        order = np.random.default_rng(seed).permutation(len(MANY))
        for start in range(0, len(order), 20):
            add_rows(handle, order[start : start + 20])

    with ThreadPoolExecutor(2) as pool:
        for task in [
            pool.submit(add_in_random_order, handle, seed)
            for seed, handle in enumerate((store, other_machine))
        ]:
            task.result()
    for handle in (store, other_machine):
        handle.refresh()
        check_contents(handle, range(len(MANY)), once=False)


def test_commit_on_an_outdated_version_is_repeated(store, other_machine, monkeypatch):
    add_rows(store, range(10))
    other_machine.refresh()
    commit, n_added_by_other = lance_io.commit_rows, []

    def commit_after_other(*arguments):
        monkeypatch.setattr(store_module, "commit_rows", commit)
        n_added_by_other.append(add_rows(other_machine, range(5, 20)))
        return commit(*arguments)

    monkeypatch.setattr(store_module, "commit_rows", commit_after_other)
    assert add_rows(store, range(30)) == 20
    assert n_added_by_other == [10]
    check_contents(store, range(30), once=False)


def test_dataset_is_created_only_once(store, other_machine, monkeypatch):
    create, n_added_by_other = lance_io.commit_first, []

    def create_after_other(*arguments):
        monkeypatch.setattr(store_module, "commit_first", create)
        n_added_by_other.append(add_rows(other_machine, range(5)))
        return create(*arguments)

    monkeypatch.setattr(store_module, "commit_first", create_after_other)
    assert add_rows(store, range(8)) == 8
    assert n_added_by_other == [5]
    check_contents(store, range(8), once=False)


def test_merging_preserves_row_positions(bucket, store, monkeypatch):
    for name, value in (("_MERGED_FRAGMENTS", 4), ("_LARGEST_PART", 2), ("_FULL_ROWS", 60)):
        monkeypatch.setattr(store_module, name, value)
    monkeypatch.setattr(lance_io, "_RETAINED_VERSIONS", 2)
    order = np.random.default_rng(2).permutation(100).tolist()
    add_rows(store, order[:5])
    old = FeatureStore(bucket, IDENTITY, "float32")
    for start in range(5, 100, 5):
        add_rows(store, order[start : start + 5])
    assert store.positions([MANY[i] for i in order]).tolist() == list(range(100))
    assert len(open_dataset(store).get_fragments()) < 10
    # The files of the version that the old handle has opened are gone.
    np.testing.assert_array_equal(
        old.lookup([MANY[i] for i in order[:5]]).read(), MANY_VECTORS[order[:5]]
    )
    check_contents(store, range(100))


# -- errors ----------------------------------------------------------------------------------------


def catch_message(attempt):
    """Return the message of an error, after checking that it is one line without secrets."""
    with pytest.raises(LlmcondError) as caught:
        attempt()
    message = str(caught.value)
    assert "\n" not in message
    assert ACCESS_KEY not in message
    assert SECRET_KEY not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    return message


def test_missing_bucket_is_reported(bucket):
    message = catch_message(lambda: FeatureStore("s3://nobody/here", IDENTITY, "float32"))
    assert re.match(
        r"there is no bucket s3://nobody\. Create it, or check AWS_.*AWS_REGION", message
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((403, "AccessDenied"), r"access was denied \(AccessDenied\).*AWS_SECRET_ACCESS_KEY"),
        ((503, "SlowDown"), "the store answered with SlowDown.*Run the same command again later"),
    ],
)
def test_requests_that_the_storage_denies_are_reported(
    bucket, store, proxy, answer, expected, monkeypatch
):
    monkeypatch.setattr(object_stores, "_PATIENCE", {"client_max_retries": "0"})
    proxied = FeatureStore(bucket, IDENTITY, "float32")
    proxy.answer = answer
    for attempt in (lambda: FeatureStore(bucket, IDENTITY, "float32"), lambda: append(proxied)):
        assert re.search(f"^{bucket}/.*{expected}", catch_message(attempt))
    assert re.search(expected, catch_message(proxied.check_writable))


@pytest.mark.parametrize(
    ("uri", "text", "expected"),
    [
        (
            "s3://b/x",
            "Generic S3 error: Server returned non-2xx status code: 403 Forbidden: <?xml?><Error>"
            "<Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>KEY</AWSAccessKeyId></Error>",
            "s3://b/x: access was denied (SignatureDoesNotMatch). Set AWS_ACCESS_KEY_ID,",
        ),
        (
            "s3://b/x",
            "status code: 400 Bad Request: <Error><Code>ExpiredToken</Code><Token>KEY</Token>",
            "s3://b/x: access was denied (ExpiredToken).",
        ),
        (
            "s3://b/x",
            "Generic N/A error: Failed to get AWS credentials: ProviderError(ProviderError { KEY",
            "s3://b/x: no credentials were found. Set AWS_ACCESS_KEY_ID,",
        ),
        (
            "s3://b/x",
            "Generic S3 error: Failed to resolve region for bucket 'b'",
            "s3://b/x: the region of the bucket is unknown.",
        ),
        (
            "gs://b/x",
            "Generic GCS error: Error performing token request: Error performing GET http://KEY",
            "gs://b/x: no credentials were found. Set GOOGLE_APPLICATION_CREDENTIALS (",
        ),
        (
            "az://b/x",
            "Unable to find object store prefix: no Azure account name in URI, and no storage",
            "az://b/x: no credentials were found. Set AZURE_STORAGE_ACCOUNT_NAME and",
        ),
        (
            "az://b/x",
            "status code: 404 Not Found: <Error><Code>ContainerNotFound</Code> ?sig=KEY",
            "there is no bucket az://b. Create it, or check AZURE_STORAGE_ACCOUNT_NAME",
        ),
    ],
)
def test_storage_errors_are_reported_without_secrets(uri, text, expected):
    """The texts are abridged from Lance's errors; KEY stands for secrets."""
    with pytest.raises(UserError) as caught:
        BucketLocation(uri).raise_unreachable(OSError(text))
    assert str(caught.value).startswith(expected)
    assert "KEY" not in str(caught.value).replace("ACCESS_KEY", "").replace("ACCOUNT_KEY", "")


def test_damaged_file_is_reported_without_signed_urls():
    text = "Not found: x?X-Amz-Signature=KEY <Error><AWSAccessKeyId>KEY, /home/a/b.rs:1:2"
    assert (
        BucketLocation("s3://b/x")
        .damage_message(OSError(text))
        .startswith("s3://b/x/vectors.lance cannot be read: Not found: x. If it is damaged, delete")
    )


def test_unreachable_server_is_reported(bucket, store, proxy):
    proxy.close()
    message = catch_message(lambda: FeatureStore(bucket, IDENTITY, "float32"))
    assert re.search(r"cannot be reached\. Run the same command again.*AWS_ENDPOINT_URL", message)


def test_requests_to_a_busy_server_are_repeated(bucket, store, proxy):
    proxied = FeatureStore(bucket, IDENTITY, "float32")
    proxy.answer, proxy.most = (503, "SlowDown"), 5
    add_rows(proxied, range(30))
    assert proxy.refused == 5
    check_contents(proxied, range(30))


def test_commit_with_lost_response_is_repeated(bucket, store, proxy):
    """The server has written the version, so the client's second request finds that it exists."""
    proxied = FeatureStore(bucket, IDENTITY, "float32")
    add_rows(proxied, range(10))
    proxy.answer, proxy.only, proxy.loses_answers = (503, "SlowDown"), ("PUT", "_versions/"), True
    proxy.most = 1
    assert add_rows(proxied, range(30)) == 20
    assert proxy.refused == 1
    check_contents(proxied, range(30), once=False)


def test_storage_without_conditional_writes_is_reported(bucket, store, proxy):
    proxied = FeatureStore(bucket, IDENTITY, "float32")
    add_rows(proxied, range(10))
    proxy.answer, proxy.only = (412, "PreconditionFailed"), ("PUT", "_versions/")
    assert "If-None-Match" in catch_message(lambda: add_rows(proxied, range(20)))
    proxy.answer = None
    store.refresh()
    check_contents(store, range(10))


def test_rows_lost_by_a_killed_server_are_written_again(tmp_path, monkeypatch):
    server = S3Server()
    try:
        for name, value in s3_environment(server.port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_stores, "_PATIENCE", {"client_max_retries": "0"})
        uri = f"s3://features/{tmp_path.name}"
        store = FeatureStore(uri, IDENTITY, "float32")
        add_rows(store, range(10))
        server.kill()
        assert "cannot be reached" in catch_message(lambda: add_rows(store, range(20)))
        server.start()  # The server has lost everything, as it keeps objects in memory.
        with pytest.raises(LlmcondError, match="cannot be read"):
            add_rows(store, range(20))
        reopened = FeatureStore(uri, IDENTITY, "float32")
        assert add_rows(reopened, range(20)) == 20
        check_contents(reopened, range(20))
    finally:
        server.kill()


def keep_adding(uri, variables, connection):
    os.environ.update(variables)
    store = FeatureStore(uri, IDENTITY, "float32")
    connection.send("ready")
    for start in range(0, len(MANY), 3):
        add_rows(store, range(start, start + 3))


def test_killed_process_leaves_complete_rows(bucket, store, s3_server):
    for n_expected in (10, 60, 150):
        parent_end, child_end = FORK_CONTEXT.Pipe()
        arguments = (bucket, s3_environment(s3_server.port), child_end)
        process = FORK_CONTEXT.Process(target=keep_adding, args=arguments, daemon=True)
        process.start()
        assert parent_end.recv() == "ready"
        while process.is_alive() and len(store) < n_expected:
            store.refresh()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        store.refresh()
        check_contents(store, set(range(len(MANY))) - set(store.missing(MANY)))
    n_stored = len(store)
    assert n_stored >= n_expected
    assert add_rows(store, range(len(MANY))) == len(MANY) - n_stored
    check_contents(store, range(len(MANY)))


# -- store URIs ------------------------------------------------------------------------------------


def test_file_uri_refers_to_a_folder(tmp_path):
    store = FeatureStore(f"file://{tmp_path}/a%20b", IDENTITY, "float32")
    append(store)
    assert store.folder.parent == tmp_path / "a b"
    assert (store.folder / "store.json").exists()


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://features/", "s3://features"),
        ("gs://features/a/b/", "gs://features/a/b"),
        ("az://features/a", "az://features/a"),
        ("file:///tmp/../tmp/x", "/tmp/x"),
        ("/tmp/x/", "/tmp/x"),
    ],
)
def test_store_uris_are_normalized(uri, expected):
    assert resolve_store_uri(uri) == expected


def test_relative_folder_is_resolved_to_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_store_uri("a/b") == str(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        (
            "s4://features/x",
            "s3://, gs://, az://, file:/// or a folder. Did you mean 's3'",
        ),
        (
            "http://features/x",
            "llmcond does not support http:// storage",
        ),
        ("s3://[features/x", "s3://... is not a valid URI"),
        ("s3://features/x#y", "contains credentials or options"),
        (f"s3://{ACCESS_KEY}:{SECRET_KEY}@features/x", "Credentials are read from the environment"),
        (f"s3://features/x?secret={SECRET_KEY}", "Credentials are read from the environment"),
        ("s3:/features/x", "names no bucket; expected s3://BUCKET/PATH"),
        ("s3:///x", "names no bucket"),
    ],
)
def test_invalid_store_uri_is_rejected(uri, expected):
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        resolve_store_uri(uri)
    assert SECRET_KEY not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_of_locks_must_not_be_writable_for_others(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    location = BucketLocation("s3://somewhere/features/store")
    location.prepare()
    lock_folder = location.folder.parent
    assert lock_folder.stat().st_mode & 0o777 == 0o700
    lock_folder.chmod(0o755)  # Earlier versions created the folder with this mode.
    location.prepare()
    lock_folder.chmod(0o777)
    with pytest.raises(UserError, match=r"other users can write to it.*set TMPDIR"):
        location.prepare()
    lock_folder.rename(tmp_path / "taken")
    lock_folder.symlink_to(tmp_path / "taken")
    (tmp_path / "taken").chmod(0o700)
    with pytest.raises(UserError, match="not your folder"):
        location.prepare()
    lock_folder.unlink()
    lock_folder.touch()
    with pytest.raises(UserError, match="cannot be created"):
        location.prepare()


def test_folder_of_another_user_is_rejected_for_locks(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: 12_345)
    location = BucketLocation("s3://somewhere/features/store")
    with pytest.raises(UserError, match="not your folder"):
        location.prepare()
