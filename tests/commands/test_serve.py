"""``llmcond serve``: its options, and shutdown under load."""

import http.client
import json
import re
import signal
import threading

import pytest
from helpers.commands import run_rejected
from helpers.processes import Command
from helpers.serving import Client
from helpers.waiting import PATIENCE

from llmcond.errors import UserError
from llmcond.serving.server import read_keys


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-batch-tokens 0", "--max-batch-tokens is 0; it must be at least 1"),
        ("--max-concurrent-requests 0", "at least 1"),
        ("--max-client-batch-size -1", "at least 1"),
        ("--payload-limit 0", "at least 1"),
        ("--timeout 0", "it must be above 0 and below 1,000,000"),
        ("--timeout nan", "expected a finite number"),
        ("--port 70000", "at least 0 and at most 65,535"),
        ("--host nowhere.invalid", "cannot listen on nowhere.invalid"),
        ("--condition ''", "--condition is empty"),
        ("--api-key-file none", "cannot be read: No such file"),
        ("--cors-origin https://example.org/", "expected scheme and host in lower case"),
        ("--cors-origin example.org", "--cors-origin is 'example.org'; expected scheme"),
        ("--index none --port 0", "none does not exist"),
        ("--run none --port 0", "no run at none"),
    ],
)
def test_invalid_options_are_reported_in_one_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in run_rejected(capsys, "serve", *(word.strip("'") for word in flags.split()))


def test_key_file_is_parsed(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbf0123456789abcdef\r\n\n  two-._~+/==  \n")
    file.chmod(0o600)
    assert read_keys(file) == (b"0123456789abcdef", b"two-._~+/==")
    (warning,) = caplog.messages
    assert "the key in line 3 has 11 characters, and is easy to guess" in warning
    for content in (b"\n \n", b"", b"\xef\xbb\xbf"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"holds no key.*token_urlsafe"):
            read_keys(file)
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not a text file"):
        read_keys(file)


@pytest.mark.parametrize(
    "line",
    [
        *("#prod", "# prod", "; prod", "[prod]", "prod:", "0123456789abcdef # prod", 'KEY="abc"'),
        *(
            "sch\u00fcssel",
            "a\0b",
            "a\x0cb",
            "a\u2028b",
            "a\tb",
            "=",
            "a=b",
            "<key>",
            "a,b",
        ),
    ],
)
def test_line_that_is_no_key_is_rejected(line, tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(f"0123456789abcdef\n{line}\n".encode())
    with pytest.raises(
        UserError, match=r"line 2 is no key\. A key consists of letters, digits and"
    ):
        read_keys(file)


def test_key_file_readable_by_others_gives_warning(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("llmcond.serving.server.log.warning", warnings.append)
    file = tmp_path / "keys"
    file.write_text("0123456789abcdef")
    file.chmod(0o644)
    read_keys(file)
    assert warnings == [f"other users can read {file}; protect it: chmod 600 {file}"]


def test_sigterm_under_load_answers_accepted_requests(tiny_run, tmp_path):
    arguments = ["serve", "--run", tiny_run, "--port", "0", "--device", "cpu", "--json"]
    server = Command(tmp_path, arguments)
    try:
        while not (match := re.search(r"127\.0\.0\.1:(\d+) ", server.stderr.read_text())):
            assert server.process.is_alive()
            server.process.join(0.05)
        client = Client(int(match[1]))
        answers, errors, answered = [], [], threading.Semaphore(0)
        body = {"input": [f"two men {i} play" for i in range(40)], "condition": "the place"}

        def send_requests():
            while True:
                try:
                    answers.append(client.post("/v1/embeddings", body))
                except (OSError, http.client.HTTPException) as error:
                    errors.append(error)
                    return
                answered.release()

        threads = [threading.Thread(target=send_requests) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert answered.acquire(timeout=PATIENCE)
        server.process.terminate()
        for thread in threads:
            thread.join(PATIENCE)
    finally:
        if server.process.is_alive() and not answers:
            server.process.kill()
        code, out, err = server.finish()
    assert code == 0
    statuses = [answer.status for answer in answers]
    assert set(statuses) <= {200, 503}
    assert all(len(answer.json["data"]) == 40 for answer in answers if answer.status == 200)
    # Each accepted request was answered: the server logged the statuses that clients received.
    logged = re.findall(r"POST /v1/embeddings (\d+)", err)
    assert sorted(map(int, logged)) == sorted(statuses)
    assert json.loads(out)["requests"] == len(logged)
    assert "Traceback" not in err
    assert signal.Signals.SIGTERM.name not in err
