"""Ratings by a language model: a real server that speaks the chat protocol, and its faults."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers.commands import read_csv, run_json, run_rejected
from helpers.flags import change_flags
from helpers.model_server import JSON_HEADERS, RETRY_AT_ONCE, ChatServer, Fault
from helpers.processes import Command

from llmcond.cli import run
from llmcond.data.datasets import read_rows
from llmcond.workflows.question_runner import Journal

SECRET = "sk-never-to-be-seen-0123456789"
#: Rows that the server rates 5, 3, 1 and ill-defined, by the words that they share.
ROWS = [
    ("a man rides", "a man rides", "the activity", 5),
    ("a man rides", "a man walks", "the activity", 2),
    ("a man rides", "two dogs sleep", "the place", 1),
    ("a man rides", "two dogs sleep", "some nonsense", -1),
]


# -- the server --------------------------------------------------------------------------------


def question_texts(body):
    """Return the sentences and the condition of a question, by their labels."""
    return dict(re.findall(r"^([A-Z]\w+(?: \d)?): (.*)$", body["messages"][-1]["content"], re.M))


def answer(body):
    """Return a rating from the share of common words as JSON, or a proposal."""
    texts = question_texts(body)
    if "Others:" in body["messages"][-1]["content"]:
        alike, different = f"the words of {texts['Sentence'][:9]}", "the length"
        return json.dumps({"partner": 1, "alike": alike, "different": different})
    if "nonsense" in texts["Condition"]:
        return json.dumps({"rating": "ill-defined"})
    first, second = (set(texts[f"Sentence {i}"].lower().split()) for i in (1, 2))
    return json.dumps({"rating": str(1 + round(4 * len(first & second) / len(first | second)))})


# -- set-up ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    """Work in an empty folder, without a key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def pairs(write_rows):
    return write_rows(ROWS, "pairs.csv")


def make_command(source, server, *options):
    url = server if isinstance(server, str) else server.url
    command = ("annotate", source, "--endpoint", url, "--model", "rater", "--out", "rated.csv")
    return [str(part) for part in change_flags(command, *options)]


@pytest.fixture
def write_many(write_rows):
    """Return a function that writes unrated rows whose first sentences end in their number."""

    def write(n):
        rows = [(f"a man rides horse {i}", f"a man walks dog {i}", "the animal") for i in range(n)]
        return write_rows(rows, "many.csv", "sentence1,sentence2,condition")

    return write


def row_number(body):
    return int(question_texts(body)["Sentence 1"].split()[-1])


# -- rows and output ---------------------------------------------------------------------------


def test_rows_are_rated_once_and_read_back(pairs, capsys):
    with ChatServer(answer) as server:
        prices = ("--price-in", "2", "--price-out", "10")
        result = run_json(capsys, *make_command(pairs, server, *prices))
    before = read_csv("rated.csv")
    assert [row["label"] for row in before] == ["5", "3", "1", "-1"]
    assert [row["human"] for row in before] == ["5", "2", "1", "-1"]
    counts = ("rows", "ill_defined", "unanswered", "questions")
    assert [result[key] for key in counts] == [4, 1, 0, 4]
    cost = (2 * result["tokens_in"] + 10 * result["tokens_out"]) / 1e6
    assert result["cost"] == pytest.approx(cost)
    agreement = result["agreement"]
    assert (agreement["n"], agreement["spearman"]) == (3, pytest.approx(1))
    assert [agreement["confusion"][i][j] for i, j in ((4, 4), (1, 2), (0, 0), (5, 5))] == [1] * 4
    expected = {"condition": "the activity", "n": 2, "human": 3.5, "model": 4}
    assert agreement["by_condition"][0] == {**expected, "spearman": pytest.approx(1)}
    Path("rated.csv").unlink()  # no server listens any more, so the stored answers are used
    assert run(make_command(pairs, server)) == 0
    output = capsys.readouterr().out
    assert "3 rows that both rated" in output
    assert "the activity" in output
    assert read_csv("rated.csv") == before
    # The stored answers are not read as a file of the split.
    for suffix in ("csv", "answers"):
        Path(f"rated.{suffix}").rename(f"train.{suffix}")
    rows, _ = read_rows(".", "train")
    assert rows.rating[:3].tolist() == [1, 0.5, 0]
    assert not rows.rated[3]


def test_equal_rows_without_html_are_one_question(write_rows, capsys):
    first, second = "<p>A man runs.</p>", "A man <b>walks</b>."
    path = write_rows([(first, second, "the activity", 3)] * 3, "html.csv")
    with ChatServer(answer) as server:
        result = run_json(capsys, *make_command(path, server, "--strip-html"))
    assert (result["rows"], result["questions"]) == (3, 1)
    assert {(row["sentence1"], row["sentence2"]) for row in read_csv("rated.csv")} == {
        ("A man runs.", "A man walks.")
    }


def test_model_prompt_seed_and_request_identify_question(pairs, capsys):
    with ChatServer(answer, models=("rater", "other")) as server:
        for options in (
            (),
            ("--seed", 1),
            ("--prompt", "answer-then-compare"),
            ("--request", "temperature=0.5", "top_p=1"),
            ("--model", "other"),
        ):
            assert run_json(capsys, *make_command(pairs, server, *options))["questions"] == 4
        bodies = server.bodies
    assert len({body["seed"] for body in bodies}) == 2
    assert bodies[-8]["temperature"] == 0.5
    schema = bodies[9]["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == ["answer1", "answer2", "rating"]
    assert "ill-defined" in schema["properties"]["rating"]["enum"]


def test_samples_are_averaged_and_majority_decides_ill_defined(write_rows, capsys):
    replies = {"first": iter(["4", "5", "ill-defined"]), "second": iter(["ill-defined", "2", -1])}

    def answer_by_sample(body):
        return json.dumps({"rating": next(replies[question_texts(body)["Sentence 1"]])})

    rows = [("first", "x", "c"), ("second", "x", "c")]
    path = write_rows(rows, "plain.csv", "sentence1,sentence2,condition")
    with ChatServer(answer_by_sample) as server:
        result = run_json(capsys, *make_command(path, server, "--samples", 3, "--concurrency", 1))
    assert result["agreement"] is None
    assert [row["label"] for row in read_csv("rated.csv")] == ["4.5", "-1"]
    assert read_csv("rated.csv")[1]["answers"] == "-1 2 -1"
    assert "human" not in read_csv("rated.csv")[0]


# -- servers that fail -------------------------------------------------------------------------


def test_temporary_failures_are_retried(write_many, capsys):
    faults = {
        0: Fault(500, headers=RETRY_AT_ONCE),
        2: Fault(429, headers={"Retry-After": "0.8"}),
        4: Fault(0),
        6: Fault(200, seconds=5),
        8: Fault(503, headers=RETRY_AT_ONCE),
    }
    path = write_many(5)
    with ChatServer(answer, find_fault=lambda _, number: faults.get(number)) as server:
        options = ("--concurrency", 1, "--timeout", 2)
        result = run_json(capsys, *make_command(path, server, *options))
        times = server.times
    assert (result["rows"], result["unanswered"]) == (5, 0)
    assert len(times) >= 10
    assert times[3] - times[2] >= 0.8


def test_invalid_answer_is_not_stored(pairs, capsys):
    protocol = "does not answer in the chat protocol"
    for fault, expected in (
        (Fault(200, body="<html>A page</html>"), "<html>A page"),
        (Fault(200, body='{"choices": [', headers=JSON_HEADERS), "a text that is not JSON"),
        (Fault(200, body="[" * 100_000, headers=JSON_HEADERS), "a text that is not JSON"),
        (Fault(200, body='{"choices": {"a": 1}}', headers=JSON_HEADERS), protocol),
        (Fault(200, body='{"error": {"message": "no quota"}}', headers=JSON_HEADERS), "no quota"),
        (Fault(429, headers={"Retry-After": "500"}), "It asks to wait 500 s."),
        (Fault(418, text="a teapot"), "a teapot"),
        (Fault(200, without_end=b" " * 2**20), "has more than 16,777,216 bytes"),
        (Fault(200, body="x", headers={"Content-Encoding": "gzip"}), "compresses its answer"),
        (Fault(200, without_end=b" ", pause=0.05), "--timeout 0.4): Request timed out"),
    ):
        options = ("--timeout", "0.4", "--retries", 0) if fault.pause else ()
        with ChatServer(answer, find_fault=lambda *_, fault=fault: fault) as server:
            assert run(make_command(pairs, server, *options)) == 1
        assert expected in capsys.readouterr().err.splitlines()[-1]
    assert not Path("rated.answers").exists()


def test_redirects_are_not_followed(pairs, capsys):
    with ChatServer(answer) as other:
        target = f"{other.url}/chat/completions"
        moved = Fault(307, body=" ", headers={"Location": target})
        with ChatServer(answer, find_fault=lambda *_: moved) as server:
            line = run_rejected(capsys, *make_command(pairs, server))
        assert not other.bodies
    assert f"redirects to '{target}'. Redirects are not followed" in line


def test_unreadable_answer_is_retried_then_left_out(write_many, capsys):
    def answer_badly(body):
        number = row_number(body)
        counts[number] = counts.get(number, 0) + 1
        bad = number == 7 or (number == 5 and counts[number] == 1)
        return "<think>" + "so " * 2**20 if bad else answer(body)

    counts, path = {}, write_many(9)
    with ChatServer(answer_badly) as server:
        result = run_json(capsys, *make_command(path, server))
        seeds = [body["seed"] for body in server.bodies if row_number(body) == 7]
        start = time.process_time()  # long answers are read quickly
        assert run_json(capsys, *make_command(path, server))["questions"] == 0
    assert time.process_time() - start < 5
    assert (result["rows"], result["unanswered"]) == (8, 1)
    assert (counts[5], counts[7], len(set(seeds))) == (2, 3, 3)
    assert len(read_csv("rated.csv")) == 8
    with ChatServer(lambda body: "<html>") as server:
        line = run_rejected(capsys, *make_command(write_many(50), server, "--seed", 1))
        assert len(server.bodies) == 9  # it stops early
    assert "'<html>'" in line


def test_server_without_schemas_gets_plain_text_prompt(pairs, capsys):
    def reject_schema(body, _):
        return Fault(400, text="no response_format") if "response_format" in body else None

    def answer_in_prose(body):
        return f"Let me think {{about}} it.\n\n**Rating:** {json.loads(answer(body))['rating']}"

    with ChatServer(answer_in_prose, reject_schema) as server:
        run_json(capsys, *make_command(pairs, server, "--retries", 0))
        bodies = server.bodies
    assert [row["label"] for row in read_csv("rated.csv")] == ["5", "3", "1", "-1"]
    assert sum("response_format" in body for body in bodies) == 1
    assert "one JSON object" in bodies[-1]["messages"][-1]["content"]


def test_killed_command_resumes(write_many, tmp_path, capsys):
    path = write_many(40)
    slow = Fault(200, seconds=60)
    with ChatServer(answer, find_fault=lambda _, number: slow if number >= 20 else None) as server:
        command = Command(tmp_path / "killed", make_command(path, server, "--timeout", 60))
        journal = tmp_path / "rated.answers"
        # Four questions wait, and all other answers are stored, before the command is killed.
        while command.process.is_alive():
            time.sleep(0.01)
            stored = journal.read_text().count("\n") if journal.exists() else 0
            if len(server.bodies) == 24 and stored == 20:
                break
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.join()
    with journal.open("a") as stream:
        stream.write('{"key": "half a li')
    with ChatServer(answer) as server:
        assert run_json(capsys, *make_command(path, server))["questions"] == 20
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines) == 40
    assert len(read_csv("rated.csv")) == 40


# -- keys, addresses and other input -----------------------------------------------------------


def test_key_is_sent_but_never_stored_or_printed(pairs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with ChatServer(lambda body: f"You said {SECRET}. {answer(body)}") as server:
        run_json(capsys, *make_command(pairs, server))
        assert set(server.keys) == {f"Bearer {SECRET}"}
    outputs = []
    for status in (401, 403, 404, 429, 500):
        text = f"Incorrect key {SECRET} or sk-never...6789"
        fault = Fault(status, text=text, headers=RETRY_AT_ONCE)
        with ChatServer(answer, find_fault=lambda *_, fault=fault: fault) as server:
            assert run(make_command(pairs, server, "--seed", 9, "--retries", 1))
        captured = capsys.readouterr()
        outputs.append(captured.err + captured.out)
    assert "rejects the key in OPENAI_API_KEY" in outputs[0]
    assert "***" in outputs[0]
    for text in (*outputs, *(path.read_text() for path in tmp_path.rglob("*") if path.is_file())):
        assert "sk-never" not in text
    for character in (" ", "\n", "\u00e9", "\udc80"):
        monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}{character}x")
        with ChatServer(answer) as server:
            line = run_rejected(capsys, *make_command(pairs, server, "--seed", 2))
            assert not server.bodies
        assert "OPENAI_API_KEY is no key, because an HTTP header cannot contain it" in line
        assert "sk-never" not in line


INVALID = [
    ("--endpoint http://me:secret@localhost/v1", "contains a user name, a password or a query"),
    ("--endpoint http://127.0.0.1:9/v1", "no server answers at http://127.0.0.1:9/v1"),
    (r'--request user="\ud800"', "--request cannot be sent as JSON: 'utf-8' codec can't"),
    ("--columns label=stars", "has no column 'stars'"),
]


def test_invalid_input_reports_one_line(pairs, capsys):
    for options, expected in INVALID:
        command = make_command(pairs, "http://127.0.0.1:9/v1", *options.split())
        line = run_rejected(capsys, *command)
        assert expected in line
        assert "secret" not in line
    with ChatServer(answer, models=("rater-7b",)) as server:
        assert "Did you mean 'rater-7b'?" in run_rejected(capsys, *make_command(pairs, server))


def test_stored_answers_are_locked_and_checked(pairs, capsys):
    with ChatServer(answer) as server:
        command = make_command(pairs, server)
        with Journal(pairs.with_name("rated.answers")):
            assert "another process writes" in run_rejected(capsys, *command)
        run_json(capsys, *command)
        for damage in ('{"key": 3}', "nonsense", "[]"):
            with Path("rated.answers").open("a") as stream:
                stream.write(f"{damage}\n")
            assert run(command) == 1
            assert "rated.answers line 5" in capsys.readouterr().err


# -- texts without pairs -----------------------------------------------------------------------


def test_pairs_and_conditions_are_proposed_and_rated(capsys):
    texts = [f"a man rides horse {i}" for i in range(6)] + ["", "a man rides horse 0"]
    Path("texts.txt").write_text("\n".join(texts), encoding="utf-8")
    with ChatServer(answer) as server:
        command = make_command("texts.txt", server, "--skip-empty", "--propose")
        result = run_json(capsys, *command, 11)
        proposals = [body for body in server.bodies if "Others:" in body["messages"][-1]["content"]]
        repeated = run_json(capsys, *command, 11)
        line = run_rejected(capsys, *command, 13)
    assert (result["rows"], len(proposals), repeated["questions"]) == (11, 6, 0)
    rows = read_csv("rated.csv")
    assert {row["sentence1"] for row in rows} == set(texts[:6])
    assert all(row["sentence1"] != row["sentence2"] for row in rows)
    assert {row["condition"] for row in rows} == {"the words of a man rid", "the length"}
    assert all(row["label"] in "12345" for row in rows)
    assert "6 distinct texts give at most 12 rows" in line
