"""``llmcond answers``: questions to a server, the table of answers, and commands that embed it."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import read_csv, run_json, run_rejected
from helpers.flags import change_flags
from helpers.model_server import ChatServer, Fault
from helpers.processes import Command

import llmcond
from llmcond.base.arrays import scale_to_unit_norm
from llmcond.cli import run
from llmcond.data.answers import NOT_MENTIONED

LOCATION, PEOPLE = ("--condition", "the place"), ("--condition", "the number of people")
WHERE = ("park", "beach", "street")
TEXTS = [f"{who} play {at}" for who in ("two men", "a dog") for at in ("in the park", "at a beach")]
TEXTS += ["three women play", "children play on the street\nat night"]


def texts_of(body):
    """Return the kind of a question, its text and its condition."""
    content = body["messages"][-1]["content"]
    text = re.search(r"^Text: (.*?)\n\nAnswer with", content, re.MULTILINE | re.DOTALL)[1]
    condition = "the place" if "the place" in content else "the number of people"
    return "presence" if "mentioned" in content else "value", text, condition


def answer(body):
    """Return the first known word of a text; a text without one does not mention the condition."""
    kind, text, condition = texts_of(body)
    words = WHERE if condition == "the place" else ("two", "three", "children")
    word = next((word for word in words if word in text), "")
    presence = {"mentioned": "yes" if word else "no"}
    return json.dumps(presence if kind == "presence" else {"answer": word})


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch, write_rows):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    pq.write_table(pa.table({"text": TEXTS}), "texts.parquet")
    return "texts.parquet"


def make_command(server, *options, source="texts.parquet"):
    url = server if isinstance(server, str) else server.url
    return [str(part) for part in ("answers", source, "--server", url, *options)]


def test_key_that_is_a_word_stays_in_answers(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "park")
    with ChatServer(answer) as server:
        run_json(capsys, *make_command(server, *LOCATION, "--out", "answers.csv"))
    assert "park" in {row["answer"] for row in read_csv("answers.csv")}


# -- asking ------------------------------------------------------------------------------------


def test_each_text_is_answered_under_each_condition(capsys):
    with ChatServer(answer) as server:
        result = run_json(capsys, *make_command(server, *LOCATION, *PEOPLE, "--concurrency", 1))
    rows = read_csv("answers.csv")
    assert list(rows[0]) == ["text", "condition", "answer", "model", "prompt"]
    assert [row["text"] for row in rows] == TEXTS * 2
    locations = ["park", "beach", "park", "beach", "", "street"]
    assert [row["answer"] for row in rows] == [
        *locations,
        "two",
        "two",
        "",
        "",
        "three",
        "children",
    ]
    assert {(row["model"], row["prompt"]) for row in rows} == {("rater", "answer")}
    assert result["counts"]["the place"] == {"park": 2, "beach": 2, "": 1, "street": 1}
    # Presence is asked of all texts, and the value of those that mention the condition.
    assert (result["questions"], result["unanswered"], result["previous"]) == (12 + 9, 0, 0)
    kinds = [texts_of(body)[0] for body in server.bodies]
    assert (kinds.count("presence"), kinds.count("value")) == (12, 9)


def test_without_presence_the_value_alone_is_requested(capsys):
    with ChatServer(answer) as server:
        result = run_json(capsys, *make_command(server, *LOCATION, "--no-presence"))
    assert {texts_of(body)[0] for body in server.bodies} == {"value"}
    assert result["questions"] == 6
    assert [row["answer"] for row in read_csv("answers.csv")][3:] == ["beach", "", "street"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_only_missing_answers_are_requested_and_edits_stay(capsys, name):
    with ChatServer(answer) as server:
        run_json(capsys, *make_command(server, *LOCATION, "--out", name))
        table = llmcond.data.answers.read_rows(Path(name))
        table[0] |= {"answer": "meadow", "note": "checked"}
        llmcond.data.answers.write_rows(Path(name), table[:-1])
        Path("a.answers").unlink()
        result = run_json(capsys, *make_command(server, *LOCATION, *PEOPLE, "--out", name))
        assert (result["previous"], result["questions"]) == (5, 7 + 5)
        assert run(make_command(server, *LOCATION, "--out", name)) == 0
    printed = capsys.readouterr()
    assert "6 of 6 answers are in" in printed.err
    assert "meadow" in printed.out
    rows = llmcond.data.answers.read_rows(Path(name))
    assert len(rows) == 12
    assert (rows[0]["answer"], rows[0]["note"]) == ("meadow", "checked")


def test_examples_precede_the_question(capsys, write_rows):
    rows = [("a man in a wood", "The  Place", "wood"), ("a man", "the place", "")]
    rows += [(f"man {i}", "the place", "home") for i in range(9)]
    examples = write_rows(rows, "examples.csv", "text,condition,answer")
    with ChatServer(answer) as server:
        run_json(capsys, *make_command(server, *LOCATION, *PEOPLE, "--examples", examples))
        bodies = server.bodies
    shown = {texts_of(body)[::2]: body["messages"] for body in bodies}
    presence, value = shown["presence", "the place"], shown["value", "the place"]
    assert [message["role"] for message in presence[1:5]] == ["user", "assistant"] * 2
    assert json.loads(presence[4]["content"]) == {"mentioned": "no"}
    assert json.loads(value[2]["content"]) == {"answer": "wood"}
    assert json.loads(value[4]["content"]) == {"answer": "home"}
    assert len(presence) == len(value) == 1 + 2 * 8 + 1
    assert len(shown["value", "the number of people"]) == 2
    with ChatServer(answer) as server:  # other examples make other questions
        Path("answers.csv").unlink()
        assert run_json(capsys, *make_command(server, *LOCATION))["questions"] == 6 + 5


def test_unusable_answers_are_requested_again_then_left_out(capsys):
    bad = {TEXTS[0]: "I'm sorry, but I cannot help.", TEXTS[1]: "so " * 99, TEXTS[2]: "{"}

    def answer_badly(body):
        kind, text, _ = texts_of(body)
        if kind == "presence" or text not in bad:
            return answer(body)
        counts[text] = counts.get(text, 0) + 1
        third = text == TEXTS[2] and counts[text] == 3
        return answer(body) if third else bad[text]

    counts = {}
    with ChatServer(answer_badly) as server:
        rest = "texts2.parquet"
        pq.write_table(pa.table({"text": TEXTS[::-1]}), rest)
        result = run_json(capsys, *make_command(server, *LOCATION, source=rest))
    assert (result["unanswered"], result["questions"]) == (2, 6 + 3 + 3 * 3)
    assert len(read_csv("answers.csv")) == 4
    # Texts without an answer, which come first now, do not keep others from being asked.
    with ChatServer(answer_badly) as server:
        result = run_json(capsys, *make_command(server, *LOCATION))
    assert (result["unanswered"], result["questions"]) == (2, 0)
    with ChatServer(lambda body: "{") as server:
        line = run_rejected(capsys, *make_command(server, *PEOPLE))
    assert "no answer of rater to the first 3 questions can be read" in line
    with ChatServer(answer) as server:  # another seed asks only for what is missing
        result = run_json(capsys, *make_command(server, *LOCATION, "--seed", 1))
    assert (result["questions"], len(read_csv("answers.csv"))) == (2 + 2, 6)


@pytest.mark.parametrize("start", ["two men", "a dog"])  # the first texts, and later ones
def test_error_of_a_server_is_no_answer(capsys, start):
    def reject_dogs(body, _number):
        return Fault(413, text="too long") if texts_of(body)[1].startswith(start) else None

    prices = ("--price-in", "1", "--price-out", "1", "--budget", "1")
    with ChatServer(answer, reject_dogs) as server:
        result = run_json(capsys, *make_command(server, *LOCATION, "--no-presence", *prices))
    assert result["unanswered"] == 2
    assert result["tokens_in"] > 0  # a rejected question has none
    assert not any("too long" in row["answer"] for row in read_csv("answers.csv"))


def test_rows_that_are_edited_meanwhile_stay(capsys):
    table, edited = Path("answers.csv"), f"text,condition,answer\n{TEXTS[0]},the place,mine\n"

    def edit(_body, _number):
        table.write_text(edited)

    with ChatServer(answer, edit) as server:
        result = run_json(capsys, *make_command(server, *LOCATION, "--no-presence"))
    rows = read_csv(table)
    assert [row["answer"] for row in rows[:2]] == ["mine", "beach"]
    assert (len(rows), result["unanswered"]) == (len(TEXTS), 0)


def test_killed_command_resumes(capsys, tmp_path):
    source = tmp_path / "many.txt"
    source.write_text("\n".join(f"{i} dogs in the park" for i in range(40)))
    slow = Fault(200, seconds=60)
    with ChatServer(answer, lambda _, number: slow if number >= 21 else None) as server:
        words = make_command(server, *LOCATION, "--model", "rater", source=source)
        command = Command(tmp_path / "killed", words)
        journal = tmp_path / "answers.answers"
        while command.process.is_alive():
            time.sleep(0.01)
            stored = journal.read_text().count("\n") if journal.exists() else 0
            if stored >= 15 and len(server.bodies) >= 21:
                break
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.join()
    assert not Path("answers.csv").exists()
    stored = journal.read_text().count("\n")
    with ChatServer(answer) as server:
        words = make_command(server, *LOCATION, source=source)
        assert run_json(capsys, *words)["questions"] == 80 - stored
    assert len(read_csv("answers.csv")) == 40


def test_budget_is_checked_before_and_during_the_questions(capsys):
    prices = ("--price-in", 1e6, "--price-out", 1e6, "--concurrency", 1)
    with ChatServer(answer) as server:
        command = make_command(server, *LOCATION, *prices)
        line = run_rejected(capsys, *command, "--out", "b.csv", "--budget", 150)
        assert re.match(r"the cost of \d+ reaches --budget 150. Raise it", line)
        assert len(server.bodies) < 6
        line = run_rejected(capsys, *command, "--budget", 800)
        assert "to come reaches --budget 800" in line
        result = run_json(capsys, *command, "--budget", 1e4)
        line = run_rejected(capsys, *make_command(server, *LOCATION, "--budget", 1))
    assert result["questions"] == 6 + 5 - 6
    assert 0 < result["cost"] < 1e4
    assert "--budget needs --price-in or --price-out" in line


def test_invalid_input_is_one_line(capsys, write_rows):
    Path("bad.csv").write_text("text,answer\na,b\n")
    write_rows(
        [("a", "the place", "x"), ("a", "The place", "y")], "two.csv", "text,condition,answer"
    )
    write_rows([("a", "the colour", "x")], "other.csv", "text,condition,answer")
    nowhere = "http://127.0.0.1:9/v1"
    for options, expected in (
        ((), "no server answers at http://127.0.0.1:9/v1: "),
        (("--out", "bad.csv"), "A table of answers has the columns text, condition, answer."),
        (("--out", "two.csv"), "'a' has the answer 'y', but an earlier row has 'x'"),
        (("--examples", "other.csv"), "other.csv has no example of 'the place'"),
        (("--examples", "none.csv"), "none.csv"),
        (("--prompt", "rate"), "expected the kind 'answer', such as answer"),
        (("--out", "a.txt"), "name a .csv or .jsonl or .parquet file"),
    ):
        assert expected in run_rejected(capsys, *make_command(nowhere, *LOCATION, *options))
    assert "correct --server" in run_rejected(capsys, *make_command(nowhere, *LOCATION))
    with ChatServer(answer, models=("a", "b")) as server:
        line = run_rejected(capsys, *make_command(server, *LOCATION))
    assert "has 'a', 'b'. Name the model: --model NAME." in line


# -- embedding ---------------------------------------------------------------------------------


@pytest.fixture
def table(write_rows):
    """A table of answers of which one is empty."""
    answers = ["park", "beach", "park", "beach", "", "street"]
    texts = (text.replace("\n", " ") for text in TEXTS)  # spaces do not count
    rows = zip(texts, ["the place"] * len(answers), answers, strict=True)
    return write_rows(list(rows), "table.csv", "text,condition,answer")


def embed(out, run_copy, *options, texts="texts.parquet", condition="the place"):
    words = (
        "embed",
        texts,
        "--condition-text",
        condition,
        "--out",
        out,
        "--run",
        run_copy,
        *options,
    )
    assert run([str(word) for word in words]) == 0


@pytest.mark.parametrize("condition", ["the place", "the place | where it is"])
def test_answer_is_embedded_instead_of_the_text(run_copy, table, write_rows, condition):
    if "|" in condition:
        table.write_text(table.read_text().replace("the place", condition))
    answers = ["park", "beach", "park", "beach", NOT_MENTIONED, "street"]
    Path("plain.txt").write_text("\n".join(answers))
    embed("plain.npy", run_copy, texts="plain.txt", condition=condition)
    embed("text.npy", run_copy, condition=condition)
    embed("answer.npy", run_copy, "--answers", table, condition=condition)
    embed("both.npy", run_copy, "--answers", table, "--answers-as", "both", condition=condition)
    plain, text, answer, both = (
        np.load(f"{name}.npy") for name in ("plain", "text", "answer", "both")
    )
    np.testing.assert_allclose(answer, plain, atol=1e-5)
    if "|" not in condition:
        np.testing.assert_allclose(both, scale_to_unit_norm(text + answer), atol=1e-3)
    assert abs(both - text).max() > 0.01


def test_part_by_part_output_equals_that_of_a_file(capsys, run_copy, table, two_threads):
    embed("file.parquet", run_copy, "--answers", table, "--answers-as", "both")
    embed("folder", run_copy, "--answers", table, "--answers-as", "both", "--workers", 2)
    embed("folder", run_copy, "--answers", table, "--answers-as", "both")  # resumes
    file, folder = (
        np.array(pq.read_table(name)["embedding"].to_pylist())
        for name in ("file.parquet", "folder")
    )
    np.testing.assert_allclose(file, folder, atol=2e-3)
    command = ("embed", "texts.parquet", "--condition-text", "the place", "--out", "folder")
    assert "started with another answers" in run_rejected(capsys, *command, "--run", run_copy)


def test_texts_with_html_find_their_answers(run_copy, write_rows):
    texts = ["Use &lt;b&gt; here", "<p>two men</p>"]
    stripped = ["Use <b> here", "two men"]
    write_rows([(text,) for text in texts], "html.csv", "text")
    for name, keys in (("raw", texts), ("stripped", stripped)):
        rows = [(text, "the place", where) for text, where in zip(keys, ("a", "b"), strict=True)]
        answers = write_rows(rows, f"{name}.csv", "text,condition,answer")
        options = ("--strip-html", "--answers", answers)
        embed(f"{name}.npy", run_copy, *options, texts="html.csv")
    np.testing.assert_array_equal(np.load("raw.npy"), np.load("stripped.npy"))


def test_missing_answers_are_counted(capsys, run_copy, table):
    lines = table.read_text().splitlines()
    table.write_text("\n".join(lines[:-2]))
    common = ("--run", run_copy, "--answers", table)
    for command in (
        ("embed", "texts.parquet", "--condition-text", "the place", "--out", "v.npy"),
        ("embed", "texts.parquet", "--condition-text", "the place", "--out", "v"),
        ("cluster", "texts.parquet", "--condition", "the place"),
    ):
        line = run_rejected(capsys, *command, *common)
        assert "2 of 6 texts have no answer in" in line
        assert "Add them: llmcond answers TEXTS --condition 'the place' --server URL --out" in line
    line = run_rejected(capsys, "cluster", "texts.parquet", *PEOPLE, *common)
    assert "6 of 6 texts have no answer" in line
    line = run_rejected(capsys, "cluster", "texts.parquet", *LOCATION, "--answers-as", "both")
    assert "--answers-as needs --answers" in line


def test_index_holds_answers_with_their_texts(capsys, run_copy, table):
    command = ("index", "texts.parquet", "--out", "index", "--answers", table, "--run", run_copy)
    assert run_json(capsys, *command, *LOCATION)["added"] == 6
    assert run_json(capsys, *command, *LOCATION)["unchanged"] == 6
    hits = run_json(capsys, "search", "index", "park", *LOCATION, "-k", 2)["results"]
    assert [(hit["text"], hit["score"]) for hit in hits] == [
        ("park", pytest.approx(1, abs=1e-3))
    ] * 2
    assert {hit["original"] for hit in hits} == {text for text in TEXTS if "park" in text}
    for options, message in (
        ((*LOCATION, "--answers-as", "both"), "an index holds the answers to one condition"),
        ((*LOCATION, *PEOPLE), "an index holds the answers to one condition"),
        (PEOPLE, "6 of 6 texts have no answer in"),
        ((*LOCATION, "--answers", "none.csv"), "none.csv does not exist"),
    ):
        assert message in run_rejected(capsys, *change_flags(command, "--out", "other", *options))
    assert not Path("other").exists()
    without = ("index", "texts.parquet", "--out", "index", *LOCATION)
    message = run_rejected(capsys, *without)
    assert "index has a column 'original', as indexes of answers have" in message


def test_clusters_are_named_by_their_answers(capsys, run_copy, table):
    command = ("cluster", "texts.parquet", *LOCATION, "--run", run_copy, "--answers", table)
    result = run_json(capsys, *command, "--clusters", 4, "--out", "clusters.csv")
    names = {cluster["name"]: cluster["size"] for cluster in result["clusterings"][0]["clusters"]}
    assert names == {"park": 2, "beach": 2, NOT_MENTIONED: 1, "street": 1}
    assert {row["text"]: row["name"] for row in read_csv("clusters.csv")}[TEXTS[4]] == NOT_MENTIONED
