"""``llmcond serve``: its options, and shutdown under load."""

import http.client
import json
import re
import threading

import pytest
from helpers.commands import run_rejected
from helpers.processes import Command
from helpers.serving import Client
from helpers.waiting import PATIENCE, wait_until

from llmcond.base.errors import UserError
from llmcond.serving.server import read_keys


def test_invalid_options_are_reported_in_one_line(capsys, in_tmp):
    for flags, message in (
        ("--timeout 0", "it must be above 0 and below 1,000,000"),
        ("--host nowhere.invalid", "cannot listen on nowhere.invalid"),
        ("--api-key-file none", "cannot be read: No such file"),
        ("--cors-origin https://example.org/", "expected scheme and host in lower case"),
        ("--index none --port 0", "none does not exist"),
    ):
        assert message in run_rejected(capsys, "serve", *flags.split())


def test_key_file_is_parsed(tmp_path, caplog, monkeypatch):
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbf0123456789abcdef\r\n\n  two-._~+/==  \n")
    file.chmod(0o600)
    assert read_keys(file) == (b"0123456789abcdef", b"two-._~+/==")
    (warning,) = caplog.messages
    assert "the key in line 3 has 11 characters, and is easy to guess" in warning
    file.chmod(0o644)
    file.write_text("0123456789abcdef")
    warnings = []
    monkeypatch.setattr("llmcond.serving.server.log.warning", warnings.append)
    read_keys(file)
    assert warnings == [f"other users can read {file}; protect it: chmod 600 {file}"]


def test_file_that_holds_no_keys_is_rejected(tmp_path):
    for content, message in (
        ("\n \n", r"holds no key.*token_urlsafe"),
        ("0123456789abcdef\n# prod", r"line 2 is no key\. A key consists of letters"),
        ("a\0b", "line 1 is no key"),
    ):
        (tmp_path / "keys").write_text(content)
        with pytest.raises(UserError, match=message):
            read_keys(tmp_path / "keys")


def test_sigterm_under_load_answers_accepted_requests(tiny_run, tmp_path):
    # The host is a short form of 127.0.0.1.
    arguments = ["serve", "--run", tiny_run, "--port", "0", "--device", "cpu", "--json"]
    arguments += ["--host", "127.1"]
    server = Command(tmp_path, arguments)
    try:
        wait_until(lambda: re.search(r"127\.0\.0\.1:(\d+) ", server.stderr.read_text()))
        match = re.search(r"127\.0\.0\.1:(\d+) ", server.stderr.read_text())
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
