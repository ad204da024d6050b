"""Sources and outputs in an object store: a server that speaks S3's protocol, on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import lance
import pyarrow.parquet as pq
import pytest
from helpers.commands import ok
from helpers.processes import Command
from helpers.units import embed, killed_at, texts

from llmcond.cli import run
from llmcond.data.places import open_place
from llmcond.workflows import embed_stream


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("s3") / "log").open("w")
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    for _ in range(600):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    """A bucket with three files, of which units take 40 rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embed_stream, "UNIT_ROWS", 40)
    given = {
        "AWS_ACCESS_KEY_ID": "key-of-a-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": server,
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    name = tmp_path.name.replace("_", "-")[:60]
    filesystem, _ = open_place(f"s3://{name}")
    type(filesystem)(
        endpoint_override=server.removeprefix("http://"),
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    ).create_dir(name)
    for file, start, stop in (("a/1", 0, 100), ("a/2", 100, 130), ("b", 130, 250)):
        pq.write_table(texts(start, stop), f"{name}/src/{file}.parquet", filesystem=filesystem)
    return f"s3://{name}"


def table(uri):
    if uri.endswith(".lance"):
        return lance.dataset(uri).to_table()
    filesystem, path = open_place(uri)
    return pq.read_table(path, filesystem=filesystem)


@pytest.mark.parametrize(
    ("out", "point"),
    [("out", "half sent"), ("out", "written"), ("out.lance", "not committed")],
)
def test_what_a_killed_call_left_in_a_bucket_is_gone_on_with(
    capsys,
    fitted,
    bucket,
    tmp_path,
    out,
    point,
):
    given = embed(f"{bucket}/{out}", fitted, source=f"{bucket}/src")
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    killed = Command(tmp_path / "killed", given, aws, partial(killed_in_bucket, point))
    assert killed.finish()[0] == -signal.SIGKILL
    told = ok(capsys, *given)
    assert (told["out"], told["rows"]) == (f"{bucket}/{out}", 250)
    ok(capsys, *embed("here", fitted, source=f"{bucket}/src"))
    assert table(f"{bucket}/{out}").equals(pq.read_table("here"))
    again = embed("again.lance", fitted, source=f"{bucket}/{out}")
    again = [{"text": "sentence", "topic": "condition"}.get(one, one) for one in again]
    ok(capsys, *again, "--keep", "id")
    assert table("again.lance")["id"].to_pylist() == list(range(250))
    filesystem, path = open_place(f"{bucket}/{out}")
    record = filesystem.open_input_file(f"{path}/_llmcond.json").read().decode()
    assert "of-a-test" not in record


def killed_in_bucket(point):
    if point != "half sent":
        killed_at(point, 3)
        return
    from llmcond.scale import outputs

    original, seen = outputs.Output._put, []

    def half(self, name, content):
        seen.append(name)
        if len(seen) == 4:
            stream = self._filesystem.open_output_stream(f"{self._root}/{name}")
            stream.write(memoryview(content)[:1000])
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, name, content)

    embed_stream.UNIT_ROWS = 40
    outputs.Output._put = half


@pytest.mark.parametrize(
    ("source", "out", "said"),
    [
        ("s3://no-such-bucket/src", "out", "s3://no-such-bucket/src does not exist"),
        ("s3://no-such-bucket/src.lance", "out", "src.lance cannot be read: "),
        ("src", "s3://no-such-bucket/out", "NO_SUCH_BUCKET"),
        ("src", "s3://no-such-bucket/out.lance", "NO_SUCH_BUCKET"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(capsys, fitted, bucket, source, out, said):
    source = source if "://" in source else f"{bucket}/{source}"
    assert run([str(argument) for argument in embed(out, fitted, source=source)]) in (1, 2)
    err = capsys.readouterr().err
    assert said in err.splitlines()[-1]
    assert not any(word in err for word in ("of-a-test", "Traceback", "http://"))


def test_a_server_that_is_gone_is_told_in_a_line(capsys, fitted, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    assert run([str(argument) for argument in embed("out", fitted, source=f"{bucket}/src")]) == 1
    assert "NETWORK_CONNECTION" in capsys.readouterr().err.splitlines()[-1]
