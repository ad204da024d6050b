"""``llmcond serve``: its options, and a process that is stopped while it is busy."""

import http.client
import json
import re
import signal
import threading

import pytest
from helpers.commands import refused
from helpers.processes import Command
from helpers.serving import Client
from helpers.waiting import PATIENCE

from llmcond.errors import UserError
from llmcond.serving.settings import read_keys


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--max-batch-tokens 0", "--max-batch-tokens is 0; it must be at least 1"),
        ("--max-concurrent-requests 0", "at least 1"),
        ("--max-client-batch-size -1", "at least 1"),
        ("--payload-limit 0", "at least 1"),
        ("--timeout 0", "it must be above 0 and below 1,000,000"),
        ("--timeout nan", "it must be above 0 and below 1,000,000"),
        ("--port 70000", "at least 0 and at most 65,535"),
        ("--host nowhere.invalid", "cannot listen on nowhere.invalid"),
        ("--condition ''", "--condition is empty"),
        ("--api-key-file none", "cannot be read: No such file"),
        ("--index none --port 0", "none does not exist"),
        ("--run none --port 0", "no run at none"),
    ],
)
def test_wrong_options_are_refused_in_a_line(given, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, "serve", *(word.strip("'") for word in given.split()))


def test_keys_are_read_and_others_who_could_read_them_told_of(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("one\n\n  two  \n")
    file.chmod(0o600)
    assert read_keys(file) == (b"one", b"two")
    assert "chmod" not in caplog.text
    for content, words in (
        (b"\n \n", "holds no key"),
        (b"a b\n", "an HTTP header cannot"),
        (b"\xff", "not a text file"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=words):
            read_keys(file)


def test_a_key_file_that_others_can_read_is_told(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("llmcond.serving.settings.log.warning", told.append)
    file = tmp_path / "keys"
    file.write_text("one")
    file.chmod(0o644)
    read_keys(file)
    assert told == [f"other users can read {file}; protect it: chmod 600 {file}"]


def test_sigterm_under_load_answers_what_was_accepted(tiny_run, tmp_path):
    arguments = ["serve", "--run", tiny_run, "--port", "0", "--device", "cpu", "--json"]
    server = Command(tmp_path, arguments)
    try:
        while not (found := re.search(r"127\.0\.0\.1:(\d+) ", server.stderr.read_text())):
            assert server.process.is_alive()
            server.process.join(0.05)
        client = Client(int(found[1]))
        answers, lost, busy = [], [], threading.Semaphore(0)
        body = {"input": [f"two men {i} play" for i in range(40)], "condition": "the place"}

        def ask():
            while True:
                try:
                    answers.append(client.post("/v1/embeddings", body))
                except (OSError, http.client.HTTPException) as error:
                    lost.append(error)
                    return
                busy.release()

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert busy.acquire(timeout=PATIENCE)
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
    assert all(len(one.json["data"]) == 40 for one in answers if one.status == 200)
    # Whatever had come in got its answer: the server knows of no other than clients do.
    logged = re.findall(r"POST /v1/embeddings (\d+)", err)
    assert sorted(map(int, logged)) == sorted(statuses)
    assert json.loads(out)["requests"] == len(logged)
    assert "Traceback" not in err
    assert signal.Signals.SIGTERM.name not in err
