"""Sources and outputs in an object store, with a local server of S3's protocol."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import lance
import pyarrow.parquet as pq
import pytest
from helpers.buckets import ACCESS_KEY, SECRET_KEY, Proxy, s3_environment
from helpers.commands import run_json
from helpers.processes import Command
from helpers.units import embed_command, kill_at, text_table

from llmcond.base.stores import lance_options, open_filesystem
from llmcond.cli import run
from llmcond.features import outputs
from llmcond.workflows import embed_stream


@pytest.fixture
def source(bucket, tmp_path, monkeypatch):
    """Three files in a bucket, which are read in units of 40 rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embed_stream, "UNIT_ROWS", 40)
    monkeypatch.setattr(outputs, "_COMMIT_FRAGMENTS", 2)
    filesystem, path = open_filesystem(bucket)
    for file, start, stop in (("a/1", 0, 100), ("a/2", 100, 130), ("b", 130, 250)):
        pq.write_table(text_table(start, stop), f"{path}/src/{file}.parquet", filesystem=filesystem)
    return f"{bucket}/src"


@pytest.fixture
def proxy(s3_port, source, monkeypatch):
    """A proxy between the next command and the server."""
    proxy_server = Proxy(s3_port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy_server.port}")
    yield proxy_server
    proxy_server.close()


def read_table(uri):
    if uri.endswith(".lance"):
        return lance.dataset(uri, storage_options=lance_options(uri)).to_table()
    filesystem, path = open_filesystem(uri)
    return pq.read_table(path, filesystem=filesystem)


@pytest.mark.parametrize(("out", "point"), [("out", "half sent"), ("out.lance", "not committed")])
def test_killed_command_is_resumed_in_bucket(
    capsys, fitted, bucket, source, s3_port, tmp_path, out, point
):
    arguments = embed_command(f"{bucket}/{out}", fitted, source=source)
    variables = s3_environment(s3_port)
    killed = Command(tmp_path / "killed", arguments, variables, partial(kill_in_bucket, point))
    assert killed.finish()[0] == -signal.SIGKILL
    summary = run_json(capsys, *arguments)
    assert (summary["out"], summary["rows"]) == (f"{bucket}/{out}", 250)
    run_json(capsys, *embed_command("here", fitted, source=source))
    assert read_table(f"{bucket}/{out}").equals(pq.read_table("here"))
    filesystem, path = open_filesystem(f"{bucket}/{out}")
    record = filesystem.open_input_file(f"{path}/_llmcond.json").read().decode()
    assert not any(secret in record for secret in (ACCESS_KEY, SECRET_KEY, "127.0.0.1"))


def kill_in_bucket(point):
    if point != "half sent":
        kill_at(point, 3)
        return
    original, names = outputs.Output._write_file, []

    def write_half(self, name, content):
        names.append(name)
        if len(names) == 4:
            stream = self._filesystem.open_output_stream(f"{self._root}/{name}")
            stream.write(memoryview(content)[:1000])
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, name, content)

    embed_stream.UNIT_ROWS = 40
    outputs.Output._write_file = write_half


def test_busy_server_is_retried(capsys, fitted, bucket, proxy, monkeypatch):
    original = outputs.Output._check_room

    def limit_rate(self, size):
        proxy.answer, proxy.most = (503, "SlowDown"), 5
        original(self, size)

    monkeypatch.setattr(outputs.Output, "_check_room", limit_rate)
    run_json(capsys, *embed_command(f"{bucket}/out.lance", fitted, source=f"{bucket}/src"))
    assert proxy.refused == 5
    assert len(read_table(f"{bucket}/out.lance")) == 250


def test_retried_commit_does_not_duplicate_rows(capsys, fitted, bucket, proxy):
    """The server writes the version but its answer is lost; Lance retries and finds the version."""
    proxy.answer, proxy.only, proxy.loses_answers = (503, "SlowDown"), ("PUT", "_versions/"), True
    proxy.most = 1
    run_json(capsys, *embed_command(f"{bucket}/out.lance", fitted, source=f"{bucket}/src"))
    assert proxy.refused
    assert read_table(f"{bucket}/out.lance")["id"].to_pylist() == list(range(250))


def test_missing_bucket_is_reported_in_one_line(capsys, fitted, source):
    missing = "s3://no-such-bucket"
    for source_uri, out, message in (
        (f"{missing}/src", "out", f"{missing}/src does not exist"),
        (f"{missing}/src.lance", "out", "src.lance cannot be read: "),
        (source, f"{missing}/out.lance", "NO_SUCH_BUCKET"),
    ):
        arguments = embed_command(out, fitted, source=source_uri)
        assert run([str(argument) for argument in arguments]) in (1, 2)
        check_error(capsys.readouterr().err, message)
    assert not Path("out").exists()


def check_error(err, message):
    """Check the last line of an error, and that it reveals no secrets."""
    assert re.search(message, err.splitlines()[-1]), err
    assert not any(word in err for word in (ACCESS_KEY, SECRET_KEY, "Traceback", "http://"))


def test_denied_access_and_lost_connection_are_reported_in_one_line(
    capsys, fitted, bucket, source, proxy
):
    pq.write_table(text_table(0, 50), "src.parquet")
    arguments = embed_command(f"{bucket}/out.lance", fitted, source="src.parquet")
    proxy.answer, proxy.only = (403, "AccessDenied"), ("P", "out.lance")
    assert run([str(argument) for argument in arguments]) == 1
    check_error(capsys.readouterr().err, "cannot be written or read: .*credentials")
    proxy.close()
    assert run([str(argument) for argument in arguments]) == 1
    check_error(capsys.readouterr().err, "cannot be written or read: .*NETWORK_CONNECTION")
