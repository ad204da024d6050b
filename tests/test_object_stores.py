"""Sources and outputs in an object store: a server that speaks S3's protocol, on this machine."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import lance
import pyarrow.parquet as pq
import pytest
from helpers.buckets import ACCESS_KEY, SECRET_KEY, Proxy, environment
from helpers.commands import ok
from helpers.processes import Command
from helpers.units import embed, killed_at, texts

from llmcond.cli import run
from llmcond.object_stores import lance_options, open_filesystem
from llmcond.scale import outputs
from llmcond.workflows import embed_stream


@pytest.fixture
def source(bucket, tmp_path, monkeypatch):
    """Three files in a bucket, of which units take 40 rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embed_stream, "UNIT_ROWS", 40)
    monkeypatch.setattr(outputs, "_COMMIT_FRAGMENTS", 2)
    filesystem, path = open_filesystem(bucket)
    for file, start, stop in (("a/1", 0, 100), ("a/2", 100, 130), ("b", 130, 250)):
        pq.write_table(texts(start, stop), f"{path}/src/{file}.parquet", filesystem=filesystem)
    return f"{bucket}/src"


@pytest.fixture
def proxy(s3_server, source, monkeypatch):
    """What stands between the next command and the server."""
    found = Proxy(s3_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found.port}")
    yield found
    found.close()


def table(uri):
    if uri.endswith(".lance"):
        return lance.dataset(uri, storage_options=lance_options(uri)).to_table()
    filesystem, path = open_filesystem(uri)
    return pq.read_table(path, filesystem=filesystem)


@pytest.mark.parametrize(
    ("out", "point"),
    [("out", "half sent"), ("out", "written"), ("out.lance", "not committed")],
)
def test_what_a_killed_call_left_in_a_bucket_is_gone_on_with(
    capsys, fitted, bucket, source, s3_server, tmp_path, out, point
):
    given = embed(f"{bucket}/{out}", fitted, source=source)
    own = environment(s3_server.port)
    killed = Command(tmp_path / "killed", given, own, partial(killed_in_bucket, point))
    assert killed.finish()[0] == -signal.SIGKILL
    told = ok(capsys, *given)
    assert (told["out"], told["rows"]) == (f"{bucket}/{out}", 250)
    ok(capsys, *embed("here", fitted, source=source))
    assert table(f"{bucket}/{out}").equals(pq.read_table("here"))
    again = embed("again.lance", fitted, source=f"{bucket}/{out}")
    again = [{"text": "sentence", "topic": "condition"}.get(one, one) for one in again]
    ok(capsys, *again, "--keep", "id")
    assert table("again.lance")["id"].to_pylist() == list(range(250))
    filesystem, path = open_filesystem(f"{bucket}/{out}")
    record = filesystem.open_input_file(f"{path}/_llmcond.json").read().decode()
    assert not any(secret in record for secret in (ACCESS_KEY, SECRET_KEY, "127.0.0.1"))


def killed_in_bucket(point):
    if point != "half sent":
        killed_at(point, 3)
        return
    original, seen = outputs.Output._write_object, []

    def half(self, name, content):
        seen.append(name)
        if len(seen) == 4:
            stream = self._filesystem.open_output_stream(f"{self._root}/{name}")
            stream.write(memoryview(content)[:1000])
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, name, content)

    embed_stream.UNIT_ROWS = 40
    outputs.Output._write_object = half


@pytest.mark.parametrize("out", ["out", "out.lance"])
def test_a_server_under_load_is_asked_again(capsys, fitted, bucket, proxy, monkeypatch, out):
    original = outputs.Output._check_room

    def busy(self, size):
        proxy.answer, proxy.most = (503, "SlowDown"), 5
        original(self, size)

    monkeypatch.setattr(outputs.Output, "_check_room", busy)
    monkeypatch.setattr(outputs.ParquetOutput, "add_unit", lambda self, *_: busy(self, 0))
    ok(capsys, *embed(f"{bucket}/{out}", fitted, source=f"{bucket}/src"))
    assert proxy.refused == 5
    assert len(table(f"{bucket}/{out}")) == 250


def test_a_commit_whose_answer_is_lost_doubles_nothing(capsys, fitted, bucket, proxy):
    """The server has written the version, Lance asks again, and is told that it is there."""
    proxy.answer, proxy.only, proxy.loses_answers = (503, "SlowDown"), ("PUT", "_versions/"), True
    proxy.most = 1
    ok(capsys, *embed(f"{bucket}/out.lance", fitted, source=f"{bucket}/src"))
    assert proxy.refused
    assert table(f"{bucket}/out.lance")["id"].to_pylist() == list(range(250))


@pytest.mark.parametrize(
    ("where", "out", "said"),
    [
        ("s3://no-such-bucket/src", "out", "s3://no-such-bucket/src does not exist"),
        ("s3://no-such-bucket/src.lance", "out", "src.lance cannot be read: "),
        ("src", "s3://no-such-bucket/out", "NO_SUCH_BUCKET"),
        ("src", "s3://no-such-bucket/out.lance", "NO_SUCH_BUCKET"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(capsys, fitted, bucket, source, where, out, said):
    given = embed(out, fitted, source=where if "://" in where else source)
    assert run([str(argument) for argument in given]) in (1, 2)
    check(capsys.readouterr().err, said)
    assert not Path("out").exists()


def check(err, said):
    """Check that an error is one line that gives nothing away."""
    assert re.search(said, err.splitlines()[-1]), err
    assert not any(word in err for word in (ACCESS_KEY, SECRET_KEY, "Traceback", "http://"))


@pytest.mark.parametrize("out", ["out", "out.lance"])
def test_a_server_that_refuses_or_is_gone_is_told_in_a_line(
    capsys, fitted, bucket, source, proxy, out
):
    given = [str(argument) for argument in embed(f"{bucket}/{out}", fitted, source="src.parquet")]
    pq.write_table(texts(0, 50), "src.parquet")
    proxy.answer, proxy.only = (403, "AccessDenied"), ("P", out)
    assert run(given) == 1
    check(capsys.readouterr().err, f"{out} cannot be written or read: .*credentials")
    proxy.close()
    assert run(given) == 1
    check(capsys.readouterr().err, f"{out} cannot be written or read: .*NETWORK_CONNECTION")
