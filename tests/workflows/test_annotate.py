"""Ratings by a language model: a real server that speaks the protocol, and all that it may do."""

import csv
import json
import os
import signal
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from helpers.chat import ChatServer, Fault, answer, texts_of
from helpers.commands import ok, refused
from helpers.processes import Command

import llmcond
from llmcond.cli import run
from llmcond.data.datasets import read_rows

SECRET = "sk-never-to-be-seen-0123456789"
#: Rows whose ratings by shared words are 5, 3, 1, and ill-defined.
ROWS = [
    ("a man rides", "a man rides", "the activity", 5),
    ("a man rides", "a man walks", "the activity", 2),
    ("a man rides", "two dogs sleep", "the place", 1),
    ("a man rides", "two dogs sleep", "some nonsense", -1),
]
#: What a server says with an error so that it is asked again at once.
SOON = {"Retry-After": "0.01"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    """Work in an empty folder, without a key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def pairs(write_rows):
    return write_rows(ROWS, "pairs.csv")


def arguments(source, server, *more):
    url = server if isinstance(server, str) else server.url
    return "annotate", source, "--endpoint", url, "--model", "rater", "--out", "rated.csv", *more


def written(path="rated.csv"):
    with Path(path).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture
def many(write_rows):
    """A writer of unrated rows, whose first sentences end in their number."""

    def write(n):
        rows = [(f"a man rides horse {i}", f"a man walks dog {i}", "the animal") for i in range(n)]
        return write_rows(rows, "many.csv", "sentence1,sentence2,condition")

    return write


def number_of(body):
    return int(texts_of(body)["Sentence 1"].split()[-1])


# -- rows, and what is written -----------------------------------------------------------------


def test_rows_are_rated_and_read_again_and_asked_once(pairs, capsys):
    with ChatServer() as server:
        found = ok(capsys, *arguments(pairs, server, "--price-in", "2", "--price-out", "10"))
    assert [row["label"] for row in written()] == ["5", "3", "1", "-1"]
    assert [row["human"] for row in written()] == ["5", "2", "1", "-1"]
    Path("rated.csv").rename("train.csv")
    Path("rated.answers").rename("train.answers")
    rows, _ = read_rows(".", "train")  # what is stored beside it is no file of a split
    Path("train.csv").rename("rated.csv")
    Path("train.answers").rename("rated.answers")
    assert rows.rating[:3].tolist() == [1, 0.5, 0]
    assert not rows.rated[3]
    assert {key: found[key] for key in ("rows", "ill_defined", "unanswered", "questions")} == {
        "rows": 4,
        "ill_defined": 1,
        "unanswered": 0,
        "questions": 4,
    }
    cost = (2 * found["tokens_in"] + 10 * found["tokens_out"]) / 1e6
    assert found["cost"] == pytest.approx(cost)
    agreed = found["agreement"]
    assert (agreed["n"], agreed["spearman"]) == (3, pytest.approx(1))
    assert [agreed["confusion"][i][j] for i, j in ((4, 4), (1, 2), (0, 0), (5, 5))] == [1] * 4
    assert agreed["by_condition"][0] == {
        "condition": "the activity",
        "n": 2,
        "human": 3.5,
        "model": 4,
        "spearman": pytest.approx(1),
    }
    before = written()
    Path("rated.csv").unlink()  # what was answered is not asked again: nobody listens any more
    again = ok(capsys, *arguments(pairs, server))
    assert (again["questions"], written()) == (0, before)
    assert run([str(one) for one in arguments(pairs, server)]) == 0
    shown = capsys.readouterr().out
    assert "3 rows that both rated" in shown
    assert "the activity" in shown


def test_another_model_prompt_seed_or_request_is_another_question(pairs, capsys):
    with ChatServer(models=("rater", "other")) as server:
        for more in (
            (),
            ("--seed", 1),
            ("--prompt", "answer-then-compare"),
            ("--request", "temperature=0.5", "top_p=1"),
            ("--model", "other"),
        ):
            assert ok(capsys, *arguments(pairs, server, *more))["questions"] == 4
        bodies = server.bodies
    assert len({body["seed"] for body in bodies}) == 2
    assert bodies[-8]["temperature"] == 0.5
    schema = bodies[9]["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == ["answer1", "answer2", "rating"]
    assert "ill-defined" in schema["properties"]["rating"]["enum"]


def test_samples_are_averaged_and_most_of_them_say_what_is_ill_defined(write_rows, capsys):
    said = {"first": ["4", "5", "ill-defined"], "second": ["ill-defined", "2", "ill-defined"]}
    seeds = {}

    def by_sample(body):
        own = seeds.setdefault(texts_of(body)["Sentence 1"], {})
        sample = own.setdefault(body["seed"], len(own))
        return json.dumps({"rating": said[texts_of(body)["Sentence 1"]][sample]})

    rows = [("first", "x", "c"), ("second", "x", "c")]
    path = write_rows(rows, "plain.csv", "sentence1,sentence2,condition")
    with ChatServer(by_sample) as server:
        found = ok(capsys, *arguments(path, server, "--samples", 3, "--concurrency", 1))
    assert found["agreement"] is None
    assert [row["label"] for row in written()] == ["4.5", "-1"]
    assert written()[1]["answers"] == "-1 2 -1"
    assert "human" not in written()[0]


def test_from_python_rows_in_memory_are_rated(monkeypatch):
    names = ("sentence1", "sentence2", "condition")
    table = [dict(zip(names, row, strict=False)) for row in ROWS]
    with ChatServer() as server:
        found = llmcond.annotate(data=table, endpoint=server.url, model="rater", out="rated.csv")
        few = llmcond.annotate(
            data=table, endpoint=server.url, model="rater", out="few.csv", rows=2, seed=3
        )
    assert (found.rows, found.out.name, found.agreement) == (4, "rated.csv", None)
    assert (few.rows, len(written("few.csv"))) == (2, 2)


# -- servers that fail -------------------------------------------------------------------------


def test_failures_that_pass_are_tried_again(many, capsys):
    faults = {
        0: Fault(500, headers=SOON),
        2: Fault(429, headers={"Retry-After": "0.8"}),
        4: Fault(0),
        6: Fault(200, seconds=5),
        8: Fault(503, headers=SOON),
    }
    path = many(5)
    with ChatServer(trouble=lambda _, number: faults.get(number)) as server:
        more = ("--concurrency", 1, "--timeout", 2)
        found = ok(capsys, *arguments(path, server, *more))
        asked = server.times
    assert (found["rows"], found["unanswered"]) == (5, 0)
    assert len(asked) >= 10
    assert asked[3] - asked[2] >= 0.8


def test_a_server_that_breaks_down_loses_no_answer(many, capsys):
    path, broken = many(20), Fault(500, headers=SOON)
    with ChatServer(trouble=lambda _, number: broken if number >= 12 else None) as server:
        code = run([str(one) for one in arguments(path, server, "--retries", 1)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 1
    assert "fails (--retries 1, --timeout 60)" in error
    assert "the same command resumes" in error
    assert not Path("rated.csv").exists()
    with ChatServer() as server:
        assert ok(capsys, *arguments(path, server))["questions"] == len(server.bodies) == 8
    assert len(written()) == 20


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(200, body="<html>A page</html>"), "<html>A page"),
        (Fault(200, body='{"choices": [', headers=JSON), "a text that is not JSON"),
        (Fault(200, body='{"choices": []}', headers=JSON), "does not answer in the chat protocol"),
        (Fault(200, body='{"error": {"message": "no quota"}}', headers=JSON), "no quota"),
        (Fault(429, headers={"Retry-After": "500"}), "It asks to wait 500 s."),
        (Fault(418, text="a teapot"), "a teapot"),
        (Fault(200, body="[" * 100_000, headers=JSON), "a text that is not JSON"),
        (Fault(200, without_end=b" " * 2**20), "has more than 8,388,608 bytes"),
        (
            Fault(200, body="x", headers={"Content-Encoding": "gzip"}),
            "compresses its answer (gzip)",
        ),
    ],
)
def test_what_is_no_answer_is_not_kept_as_one(pairs, capsys, fault, words):
    with ChatServer(trouble=lambda *_: fault) as server:
        assert run([str(one) for one in arguments(pairs, server)]) == 1
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not Path("rated.answers").exists()


@pytest.mark.parametrize("in_headers", [False, True])
def test_an_answer_has_a_deadline_however_slowly_it_comes(pairs, capsys, in_headers):
    slow = Fault(200, without_end=b" ", pause=0.05, in_headers=in_headers)
    with ChatServer(trouble=lambda *_: slow) as server:
        more = ("--timeout", 0.4, "--retries", 1)
        assert run([str(one) for one in arguments(pairs, server, *more)]) == 1
        assert len(server.bodies) == 2
    assert "--timeout 0.4): Request timed out" in capsys.readouterr().err.splitlines()[-1]


def test_redirects_are_not_followed(pairs, capsys):
    with ChatServer() as other:
        target = f"{other.url}/chat/completions"
        moved = Fault(307, body=" ", headers={"Location": target})
        with ChatServer(trouble=lambda *_: moved) as server:
            line = refused(capsys, *arguments(pairs, server))
        assert not other.bodies
    assert f"redirects to '{target}'. Redirects are not followed" in line


def test_huge_stored_answers_are_read_at_once(pairs, capsys):
    thoughts = "<think>" + "so " * 2**20

    def ramble(body):
        rambles = texts_of(body)["Condition"] == "some nonsense"
        return thoughts if rambles else answer(body)

    with ChatServer(ramble) as server:
        assert ok(capsys, *arguments(pairs, server))["unanswered"] == 1
        began = time.process_time()
        assert ok(capsys, *arguments(pairs, server))["questions"] == 0
    assert time.process_time() - began < 5


def test_nonsense_is_asked_again_and_left_out_where_there_is_nothing_else(many, capsys):
    def mumble(body):
        number = number_of(body)
        asked[number] = asked.get(number, 0) + 1
        bad = number == 7 or (number == 5 and asked[number] == 1)
        return "I would rather not say." if bad else answer(body)

    asked, path = {}, many(9)
    with ChatServer(mumble) as server:
        found = ok(capsys, *arguments(path, server))
        seeds = [body["seed"] for body in server.bodies if number_of(body) == 7]
        assert ok(capsys, *arguments(path, server))["questions"] == 0
    assert (found["rows"], found["unanswered"]) == (8, 1)
    assert (asked[5], asked[7], len(set(seeds))) == (2, 3, 3)
    assert len(written()) == 8


def test_a_model_that_says_nothing_readable_is_stopped_at_once(many, capsys):
    with ChatServer(lambda body: "<html>") as server:
        line = refused(capsys, *arguments(many(50), server))
        assert len(server.bodies) == 9
    assert "'<html>'" in line


@pytest.mark.parametrize(
    "fault", [Fault(400, text="no response_format here"), Fault(500, headers=SOON)]
)
def test_a_server_without_schemas_is_asked_in_plain_text(pairs, capsys, fault):
    def plain(body, _):
        return fault if "response_format" in body else None

    def prose(body):
        return f"Let me think {{about}} it.\n\n**Rating:** {json.loads(answer(body))['rating']}"

    with ChatServer(prose, plain) as server:
        ok(capsys, *arguments(pairs, server, "--retries", 0))
        bodies = server.bodies
    assert [row["label"] for row in written()] == ["5", "3", "1", "-1"]
    assert sum("response_format" in body for body in bodies) == 1
    assert "one JSON object" in bodies[-1]["messages"][-1]["content"]


def test_one_question_that_is_refused_stops_no_other(many, capsys):
    def long(body, _):
        return Fault(400, text="too long") if number_of(body) == 6 else None

    with ChatServer(trouble=long) as server:
        found = ok(capsys, *arguments(many(8), server))
    assert (found["rows"], found["unanswered"]) == (7, 1)


def test_requests_keep_to_a_limit(many, capsys):
    with ChatServer() as server:
        ok(capsys, *arguments(many(5), server, "--per-minute", 600))
        times = server.times
    assert times[-1] - times[0] >= 0.35


def test_killed_it_goes_on_where_it_was(many, tmp_path, capsys):
    path = many(40)
    slow = Fault(200, seconds=60)
    with ChatServer(trouble=lambda _, number: slow if number >= 20 else None) as server:
        command = Command(tmp_path / "killed", arguments(path, server, "--timeout", 60))
        journal = tmp_path / "rated.answers"
        while command.process.is_alive():  # until four questions wait, and all else is stored
            time.sleep(0.01)
            stored = journal.read_text().count("\n") if journal.exists() else 0
            if len(server.bodies) == 24 and stored == 20:
                break
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.join()
    with journal.open("a") as stream:
        stream.write('{"key": "half a li')
    with ChatServer() as server:
        assert ok(capsys, *arguments(path, server))["questions"] == 20
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines) == 40
    assert len(written()) == 40


# -- keys, addresses and other input -----------------------------------------------------------


def test_the_key_is_sent_and_nowhere_else(pairs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)

    def echo(body):
        return f"You said {SECRET}. {answer(body)}"

    with ChatServer(echo) as server:
        ok(capsys, *arguments(pairs, server))
        assert set(server.keys) == {f"Bearer {SECRET}"}
    said = []
    for status in (401, 403, 404, 429, 500):
        fault = Fault(status, text=f"Incorrect key {SECRET} or sk-never...6789", headers=SOON)
        with ChatServer(trouble=lambda *_, fault=fault: fault) as server:
            assert run([str(one) for one in arguments(pairs, server, "--seed", 9, "--retries", 1)])
        captured = capsys.readouterr()
        said.append(captured.err + captured.out)
    assert "rejects the key in OPENAI_API_KEY" in said[0]
    assert "***" in said[0]
    for text in (*said, *(path.read_text() for path in tmp_path.rglob("*") if path.is_file())):
        assert "sk-never" not in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--endpoint http://me:secret@localhost/v1", "contains a user name, a password or a query"),
        (
            "--endpoint http://localhost/v1?key=secret",
            "contains a user name, a password or a query",
        ),
        ("--endpoint localhost:8000", "expected an address such as http"),
        ("--endpoint http://127.0.0.1:9/v1", "no server answers at http://127.0.0.1:9/v1"),
        ("--samples 0", "--samples is 0"),
        ("--concurrency 0", "--concurrency is 0"),
        ("--rows 0", "--rows is 0"),
        ("--timeout 0", "--timeout is 0"),
        ("--per-minute -1", "--per-minute is -1"),
        ("--retries -1", "--retries is -1"),
        ("--price-in -1", "--price-in is -1"),
        ("--seed -1", "--seed is -1"),
        ("--request seed=3", "--request has 'seed'"),
        ("--prompt rat", "unknown prompt 'rat'. Did you mean 'rate'"),
        ("--prompt propose", "is of the kind 'propose'"),
        ("--text column", "--text needs --propose. Add it"),
        ("--out rated.txt", "name a .csv file"),
        ("--out pairs.csv", "is an input of the same command"),
        ("--columns label=stars", "has no column 'stars'"),
        ("--columns condition=aspect", "has no column 'aspect'"),
        ("--propose 3 --rows 2", "--rows is for existing rows"),
    ],
)
def test_wrong_input_is_one_line(pairs, capsys, more, words):
    line = refused(capsys, *arguments(pairs, "http://127.0.0.1:9/v1", *more.split()))
    assert words in line
    assert "secret" not in line


def test_an_unknown_model_is_told_with_those_that_are_there(pairs, capsys):
    with ChatServer(models=("rater-7b",)) as server:
        assert "Did you mean 'rater-7b'?" in refused(capsys, *arguments(pairs, server))


def test_many_questions_are_agreed_to(many, capsys, monkeypatch):
    path = many(10)
    monkeypatch.setattr("llmcond.workflows.annotate._MAX_UNCONFIRMED", 5)
    with ChatServer() as server:
        line = refused(capsys, *arguments(path, server))
        assert "7 questions remain" in line
        terminal = StringIO("n\ny\n")
        terminal.isatty = sys.stderr.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", terminal)
        assert run([str(one) for one in arguments(path, server)]) == 2
        assert "Continue? [y/N] llmcond: error: not confirmed" in capsys.readouterr().err
        assert len(server.bodies) == 3
        assert ok(capsys, *arguments(path, server))["questions"] == 7
        assert ok(capsys, *arguments(path, server, "--seed", 1, "--yes"))["questions"] == 10


def test_two_processes_do_not_write_one_file(pairs, capsys):
    from llmcond.annotation.journal import Journal

    with Journal(pairs.with_name("rated.answers")), ChatServer() as server:
        assert "another process writes" in refused(capsys, *arguments(pairs, server))


def test_a_damaged_answer_is_named(pairs, capsys):
    with ChatServer() as server:
        ok(capsys, *arguments(pairs, server))
        for bad in ('{"key": 3}', "nonsense", "[]"):
            with Path("rated.answers").open("a") as stream:
                stream.write(f"{bad}\n")
            assert run([str(one) for one in arguments(pairs, server)]) == 1
            assert "rated.answers line 5" in capsys.readouterr().err


# -- texts without pairs -----------------------------------------------------------------------


def test_pairs_and_conditions_are_proposed_and_rated(tmp_path, capsys):
    texts = [f"a man rides horse {i}" for i in range(6)] + ["", "a man rides horse 0"]
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    with ChatServer() as server:
        found = ok(capsys, *arguments("texts.txt", server, "--propose", 11))
        asked = [body for body in server.bodies if "Others:" in body["messages"][-1]["content"]]
        again = ok(capsys, *arguments("texts.txt", server, "--propose", 11))
    assert (found["rows"], len(asked), again["questions"]) == (11, 6, 0)
    rows = written()
    assert {row["sentence1"] for row in rows} == set(texts[:6])
    assert all(row["sentence1"] != row["sentence2"] for row in rows)
    assert {row["condition"] for row in rows} == {"the words of a man rid", "the length"}
    assert all(row["label"] in "12345" for row in rows)
    with ChatServer() as server:
        line = refused(capsys, *arguments("texts.txt", server, "--propose", 13))
    assert "6 distinct texts give at most 12 rows" in line


def test_texts_are_a_column_and_a_list_too(write_rows):
    texts = [f"a dog sleeps {i} times" for i in range(12)]
    path = write_rows([(text,) for text in texts], "t.csv", "body")
    with ChatServer() as server:
        own = {"endpoint": server.url, "model": "rater", "propose": 26, "out": "rated.csv"}
        first = llmcond.annotate(data=path, text="body", **own)
        before = written()
        again = llmcond.annotate(data=texts, **own)
    assert (first.rows, first.questions, again.questions) == (26, 13 + 26, 0)
    assert written() == before
    # One text has met the eight most like it, and then meets the next ones.
    assert max(sum(row["sentence1"] == text for row in before) for text in texts) == 4


def test_texts_that_a_model_does_not_pair_give_fewer_rows(write_rows, capsys):
    def choosy(body):
        if "Others:" not in body["messages"][-1]["content"]:
            return answer(body)
        number = int(texts_of(body)["Sentence"].split()[-1])
        return answer(body) if number < most else '{"partner": 0, "alike": "", "different": ""}'

    path = write_rows([(f"a dog sleeps in bed {i}",) for i in range(8)], "t.csv", "text")
    most = 3
    with ChatServer(choosy) as server:
        found = ok(capsys, *arguments(path, server, "--propose", 16))
    assert (found["rows"], found["questions"]) == (6, 8 + 6)
    most = 0
    with ChatServer(choosy) as server:
        line = refused(capsys, *arguments(path, server, "--propose", 16, "--seed", 1))
    assert "rater paired none of the texts" in line
