"""Stores in a bucket, of a real server that speaks S3's protocol."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import lance
import numpy as np
import pytest
from helpers.buckets import ACCESS_KEY, SECRET_KEY, Proxy, Server, environment
from helpers.identities import IDENTITY
from helpers.processes import FORKING
from helpers.stored import INPUTS, N_TOKENS, TRUNCATED, VECTORS, append

from llmcond import lance_io, object_stores
from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import Encoded
from llmcond.errors import LlmcondError, UserError
from llmcond.features import fragments as fragments_module
from llmcond.features import store as store_module
from llmcond.features.location import BucketLocation, resolve_store_uri
from llmcond.features.store import FeatureStore

MANY = [EncoderInput("", f"one of many {i}") for i in range(300)]
MANY_VECTORS = np.random.default_rng(1).normal(size=(300, 6)).astype(np.float32)


@pytest.fixture
def store(bucket):
    return FeatureStore(bucket, IDENTITY, "float32")


@pytest.fixture
def elsewhere(monkeypatch, tmp_path, bucket):
    """The same store as another machine sees it, with locks of its own."""
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
        return FeatureStore(bucket, IDENTITY, "float32")


@pytest.fixture
def proxy(s3_server, store, monkeypatch):
    """What stands between the store's next handles and the server."""
    found = Proxy(s3_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found.port}")
    yield found
    found.close()


def add(store, chosen):
    chosen = list(chosen)
    n_tokens = np.array(chosen, dtype=np.int32)
    encoded = Encoded(MANY_VECTORS[chosen], n_tokens, n_tokens % 3 == 0)
    return store.append([MANY[i] for i in chosen], encoded)


def dataset_of(store):
    location = store._location
    return lance.dataset(location.uri, storage_options=dict(location.options))


def check(store, chosen):
    """Check that the store holds these of the many inputs, once, each in its place."""
    chosen = sorted(chosen)
    inputs = [MANY[i] for i in chosen]
    assert sorted(set(range(len(MANY))) - set(store.missing(MANY))) == chosen
    np.testing.assert_array_equal(store.lookup(inputs).read(), MANY_VECTORS[chosen])
    rows = dataset_of(store).to_table(columns=["key", "n_tokens"])
    assert sorted(rows["n_tokens"].to_pylist()) == chosen
    assert rows["n_tokens"].take(store.positions(inputs)).to_pylist() == chosen
    assert len(set(rows["key"].to_pylist())) == len(store) == len(chosen)


def test_what_is_put_into_a_bucket_comes_out_of_it(bucket, store):
    assert store.missing(INPUTS) == list(range(20))
    assert append(store, range(12)) == 12
    assert append(store) == 8
    again = FeatureStore(bucket, IDENTITY, "float32")
    assert again.missing(INPUTS) == []
    np.testing.assert_array_equal(again.lookup(INPUTS).read(), VECTORS)
    assert again.count_truncated_at(again.positions(INPUTS)) == TRUNCATED.sum()
    assert FeatureStore(bucket, IDENTITY, "float16").missing(INPUTS) == list(range(20))
    again.check_writable()


def test_fragments_of_others_are_committed(bucket, store):
    actor = FeatureStore(bucket, IDENTITY, "float32", only_write=True)

    def written(chosen):
        chosen = list(chosen)
        encoded = Encoded(VECTORS[chosen], N_TOKENS[chosen], TRUNCATED[chosen])
        return actor.write_fragment([INPUTS[i] for i in chosen], encoded)

    with store.fragment_writer_claim():
        first, some, none = (written(own) for own in (range(8), range(4, 12), range(2, 6)))
        assert store.add_fragments([first, some, none]) == 12
        assert store.add_fragments([first, some, none]) == 0
        late = FeatureStore(bucket, IDENTITY, "float32", only_write=True)
        actor = late  # which knows the dataset
        assert store.add_fragments([written(range(10, 20))]) == 8
    np.testing.assert_array_equal(store.lookup(INPUTS).read(), VECTORS)
    assert sorted(dataset_of(store).to_table()["n_tokens"].to_pylist()) == list(range(20))


def test_a_bucket_says_what_made_the_store(bucket, store, monkeypatch):
    append(store)
    assert store._location.description(store._dataset) == {
        "format": 1,
        "dtype": "float32",
        "encoder": IDENTITY.to_json(),
    }
    monkeypatch.setattr(store_module, "FORMAT", 0)
    with pytest.raises(UserError, match=r"s3://.*newer version of llmcond"):
        FeatureStore(bucket, IDENTITY, "float32")


def test_two_machines_double_nothing(store, elsewhere, monkeypatch, caplog):
    monkeypatch.setattr(fragments_module, "_MERGED_FRAGMENTS", 4)
    monkeypatch.setattr(fragments_module, "_LARGEST_PART", 2)
    assert store.folder != elsewhere.folder
    added = []

    def work(own, seed):
        order = np.random.default_rng(seed).permutation(len(MANY))
        for start in range(0, len(order), 20):
            added.append(add(own, order[start : start + 20]))

    with ThreadPoolExecutor(2) as pool:
        for task in [pool.submit(work, own, seed) for seed, own in enumerate((store, elsewhere))]:
            task.result()
    assert sum(added) == len(MANY)
    for own in (store, elsewhere):
        own.refresh()
        check(own, range(len(MANY)))
    told = [record for record in caplog.messages if "other machines are writing to s3://" in record]
    assert len(told) <= 2


def test_a_commit_on_what_is_not_the_newest_version_is_made_again(store, elsewhere, caplog):
    add(store, range(10))
    elsewhere.refresh()
    commit, raced = lance_io.DatasetTarget.commit, []

    def commit_second(target, fragments, removed=()):
        if not raced:
            raced.append(add(elsewhere, range(5, 20)))
        return commit(target, fragments, removed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lance_io.DatasetTarget, "commit", commit_second)
        patch.setattr(elsewhere, "_target", lambda: _Plain(elsewhere, commit))
        assert add(store, range(30)) == 10
    assert raced == [10]
    check(store, range(30))
    assert sum("other machines are writing to s3://" in record for record in caplog.messages) == 1


class _Plain:
    """A target whose commits nobody forestalls."""

    def __init__(self, store, commit):
        self._target, self._commit = FeatureStore._target(store), commit

    def write(self, rows):
        return self._target.write(rows)

    def commit(self, fragments):
        return self._commit(self._target, fragments)


def test_the_first_commit_is_made_once(store, elsewhere):
    create = lance_io.DatasetTarget.create
    raced = []

    def create_second(target, schema, fragments):
        if not raced:
            raced.append(True)
            raced.append(add(elsewhere, range(5)))
        return create(target, schema, fragments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lance_io.DatasetTarget, "create", create_second)
        assert add(store, range(8)) == 3
    assert raced == [True, 5]
    check(store, range(8))


def test_merging_keeps_every_row_in_its_place(bucket, store, monkeypatch):
    for name, value in (("_MERGED_FRAGMENTS", 4), ("_LARGEST_PART", 2), ("_FULL_ROWS", 60)):
        monkeypatch.setattr(fragments_module, name, value)
    monkeypatch.setattr(lance_io, "_KEPT_VERSIONS", 2)
    order = np.random.default_rng(2).permutation(100).tolist()
    add(store, order[:5])
    old = FeatureStore(bucket, IDENTITY, "float32")
    for start in range(5, 100, 5):
        add(store, order[start : start + 5])
    assert store.positions([MANY[i] for i in order]).tolist() == list(range(100))
    assert len(dataset_of(store).get_fragments()) < 10
    # The files of the version that it knows are gone.
    np.testing.assert_array_equal(
        old.lookup([MANY[i] for i in order[:5]]).read(), MANY_VECTORS[order[:5]]
    )
    check(store, range(100))


# -- what goes wrong -------------------------------------------------------------------------------


def told_by(attempt):
    """Return what an error says; and check that it is one line, and tells no secret."""
    with pytest.raises(LlmcondError) as caught:
        attempt()
    said = str(caught.value)
    assert "\n" not in said
    assert ACCESS_KEY not in said
    assert SECRET_KEY not in said
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    return said


def test_a_bucket_that_is_not_there_is_told(bucket):
    said = told_by(lambda: FeatureStore("s3://nobody/here", IDENTITY, "float32"))
    assert re.match(r"there is no bucket s3://nobody\. Create it, or check AWS_.*AWS_REGION", said)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((403, "AccessDenied"), r"access was denied \(AccessDenied\).*AWS_SECRET_ACCESS_KEY"),
        ((503, "SlowDown"), "the store answered with SlowDown.*Run the same command again later"),
    ],
)
def test_what_the_storage_refuses_is_told(bucket, store, proxy, answer, expected, monkeypatch):
    monkeypatch.setattr(object_stores, "_PATIENCE", {"client_max_retries": "0"})
    proxied = FeatureStore(bucket, IDENTITY, "float32")
    proxy.answer = answer
    for attempt in (lambda: FeatureStore(bucket, IDENTITY, "float32"), lambda: append(proxied)):
        assert re.search(f"^{bucket}/.*{expected}", told_by(attempt))
    assert re.search(expected, told_by(proxied.check_writable))


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
def test_what_storages_say_is_told_without_their_secrets(uri, text, expected):
    """Texts as Lance gives them, cut; KEY stands for what must not be told."""
    with pytest.raises(UserError) as caught:
        BucketLocation(uri).raise_unreachable(OSError(text))
    assert str(caught.value).startswith(expected)
    assert "KEY" not in str(caught.value).replace("ACCESS_KEY", "").replace("ACCOUNT_KEY", "")


def test_a_damaged_file_is_told_without_addresses_of_requests():
    text = "Not found: x?X-Amz-Signature=KEY <Error><AWSAccessKeyId>KEY, /home/a/b.rs:1:2"
    assert (
        BucketLocation("s3://b/x")
        .damage_message(OSError(text))
        .startswith("s3://b/x/vectors.lance cannot be read: Not found: x. If it is damaged, delete")
    )


def test_a_server_that_is_not_there_is_told(bucket, store, proxy):
    proxy.close()
    said = told_by(lambda: FeatureStore(bucket, IDENTITY, "float32"))
    assert re.search(r"cannot be reached\. Run the same command again.*AWS_ENDPOINT_URL", said)


def test_a_server_under_load_is_asked_again(bucket, store, proxy):
    proxied = FeatureStore(bucket, IDENTITY, "float32")
    proxy.answer, proxy.most = (503, "SlowDown"), 5
    add(proxied, range(30))
    assert proxy.refused == 5
    check(proxied, range(30))


def test_a_commit_whose_answer_is_lost_doubles_nothing(bucket, store, proxy, caplog):
    """The server has written the version, the client asks again, and is told that it is there."""
    proxied = FeatureStore(bucket, IDENTITY, "float32")
    add(proxied, range(10))
    proxy.answer, proxy.only, proxy.loses_answers = (503, "SlowDown"), ("PUT", "_versions/"), True
    proxy.most = 1
    assert add(proxied, range(30)) == 20
    assert proxy.refused == 1
    check(proxied, range(30))
    assert not caplog.messages


def test_a_storage_without_conditional_writes_is_told(bucket, store, proxy):
    proxied = FeatureStore(bucket, IDENTITY, "float32")
    add(proxied, range(10))
    proxy.answer, proxy.only = (412, "PreconditionFailed"), ("PUT", "_versions/")
    assert "If-None-Match" in told_by(lambda: add(proxied, range(20)))
    proxy.answer = None
    store.refresh()
    check(store, range(10))


def test_a_server_that_was_killed_is_told_and_what_it_lost_is_written_again(tmp_path, monkeypatch):
    server = Server()
    try:
        for name, value in environment(server.port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_stores, "_PATIENCE", {"client_max_retries": "0"})
        uri = f"s3://features/{tmp_path.name}"
        store = FeatureStore(uri, IDENTITY, "float32")
        add(store, range(10))
        server.kill()
        assert "cannot be reached" in told_by(lambda: add(store, range(20)))
        server.start()  # which has nothing in its memory any more
        with pytest.raises(LlmcondError, match="cannot be read"):
            add(store, range(20))
        again = FeatureStore(uri, IDENTITY, "float32")
        assert add(again, range(20)) == 20
        check(again, range(20))
    finally:
        server.kill()


def keep_adding(uri, variables, connection):
    os.environ.update(variables)
    store = FeatureStore(uri, IDENTITY, "float32")
    connection.send("ready")
    for start in range(0, len(MANY), 3):
        add(store, range(start, start + 3))


def test_a_killed_process_leaves_complete_rows(bucket, store, s3_server):
    for wanted in (10, 60, 150):
        ours, theirs = FORKING.Pipe()
        arguments = (bucket, environment(s3_server.port), theirs)
        process = FORKING.Process(target=keep_adding, args=arguments, daemon=True)
        process.start()
        assert ours.recv() == "ready"
        while process.is_alive() and len(store) < wanted:
            store.refresh()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        store.refresh()
        check(store, set(range(len(MANY))) - set(store.missing(MANY)))
    there = len(store)
    assert there >= wanted
    assert add(store, range(len(MANY))) == len(MANY) - there
    check(store, range(len(MANY)))


# -- where -----------------------------------------------------------------------------------------


def test_a_file_uri_is_a_folder(tmp_path):
    store = FeatureStore(f"file://{tmp_path}/a%20b", IDENTITY, "float32")
    append(store)
    assert store.folder.parent == tmp_path / "a b"
    assert (store.folder / "store.json").exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s3://features/", "s3://features"),
        ("gs://features/a/b/", "gs://features/a/b"),
        ("az://features/a", "az://features/a"),
        ("file:///tmp/../tmp/x", "/tmp/x"),
        ("/tmp/x/", "/tmp/x"),
    ],
)
def test_places_are_recorded_so_that_they_are_found_from_anywhere(given, expected):
    assert resolve_store_uri(given) == expected


def test_a_folder_is_recorded_with_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_store_uri("a/b") == str(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    ("given", "expected"),
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
def test_what_names_no_place_is_refused(given, expected):
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        resolve_store_uri(given)
    assert SECRET_KEY not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_locks_are_in_a_folder_that_nobody_else_can_write(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = BucketLocation("s3://somewhere/features/store")
    place.prepare()
    home = place.folder.parent
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o755)  # as earlier versions made it
    place.prepare()
    home.chmod(0o777)
    with pytest.raises(UserError, match=r"other users can write to it.*set TMPDIR"):
        place.prepare()
    home.rename(tmp_path / "taken")
    home.symlink_to(tmp_path / "taken")
    (tmp_path / "taken").chmod(0o700)
    with pytest.raises(UserError, match="not your folder"):
        place.prepare()
    home.unlink()
    home.touch()
    with pytest.raises(UserError, match="cannot be created"):
        place.prepare()


def test_a_folder_of_another_user_is_not_used_for_locks(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: 12_345)
    place = BucketLocation("s3://somewhere/features/store")
    with pytest.raises(UserError, match="not your folder"):
        place.prepare()
