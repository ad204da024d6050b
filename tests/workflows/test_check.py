"""``llmcond check-condition``: alike conditions, and answers of people, models and labels."""

import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest
from helpers.commands import read_csv, run_json, run_rejected
from helpers.model_server import ModelServer

import llmcond
from llmcond.base.errors import UserError
from llmcond.cli import run
from llmcond.data.datasets import read_rows

#: Captions that differ in the number of people and in the place.
NUMBERS = ("A man", "A woman", "Two men", "Two girls", "Five people", "A crowd of people")
SCENES = ("at the beach", "in a kitchen", "on the street", "in the park", "on a boat", "at a desk")
CAPTIONS = [(f"{who} {where}.", who, where) for who in NUMBERS for where in SCENES]
TEXTS = [text for text, _, _ in CAPTIONS]
SCENE_OF = {text: where for text, _, where in CAPTIONS}


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def captions(tmp_path):
    path = tmp_path / "captions.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("text", "who", "where"), *CAPTIONS])
    return path


@pytest.fixture
def command(captions, tiny_run):
    common = ("--run", tiny_run, "--device", "cpu", "--condition", "the place")
    return ["check-condition", *map(str, (captions, *common))]


def same_scene(first, second, condition):
    assert condition == "the place"
    return SCENE_OF[first] == SCENE_OF[second]


class Terminal(io.StringIO):
    """A terminal; the line ``^C`` interrupts."""

    def isatty(self):
        return True

    def readline(self, *arguments):
        line = super().readline(*arguments)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


@pytest.fixture
def type_lines(monkeypatch):
    """Return a function that lets a terminal type lines, and returns what it shows."""

    def start(*lines):
        monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))
        shown = Terminal()
        monkeypatch.setattr(sys, "stderr", shown)
        return shown

    return start


# -- without answers ---------------------------------------------------------------------------


def test_alike_conditions_are_named_and_nothing_is_promised(captions, capsys):
    conditions = ["--condition", "the place", "--condition", "the location", "--condition", "who"]
    arguments = [str(captions), "--model", "minilm-csts", "--device", "cpu", *conditions]
    assert run(["check-condition", *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "'the place' and 'the location' are alike in these texts" in printed
    assert "'who' are alike" not in printed
    assert "Whether a condition works cannot be seen from this" in printed
    first, second, who = run_json(capsys, "check-condition", *arguments)["checks"]
    assert first["common_neighbours"]["the location"] > 0.5 > first["common_neighbours"]["who"]
    assert second["common_neighbours"].keys() == {"the place", "who", "no condition"}
    assert len(who["examples"]) == 3
    assert (who["texts"], who["same"], who["rankings"]) == (len(TEXTS), 0, [])
    assert run(["cluster", *arguments, "--clusters", "3"]) == 0
    messages = capsys.readouterr().err
    assert "'the place' and 'the location' are alike in these texts" in messages
    assert "'who' are alike" not in messages


def test_condition_may_have_the_name_of_another_ranking(captions, tiny_run, capsys):
    arguments = [captions, "--run", tiny_run, "--device", "cpu", "--labels", "where"]
    for name in ("no condition", "all wordings | no condition"):
        (check,) = run_json(capsys, "check-condition", *arguments, "--condition", name)["checks"]
        names = [ranking["name"] for ranking in check["rankings"]]
        assert names[0] == name.partition(" | ")[0]
        assert len(names) == (4 if "|" in name else 2)


def test_few_texts_are_not_compared(tiny_run, capsys):
    result = llmcond.check_condition(texts=TEXTS[:10] * 5, condition="the place", run=tiny_run)
    (check,) = result.checks
    assert (check.n_texts, check.common, check.examples) == (10, {}, [])
    assert "checks=[]" in repr(result)


# -- answers -----------------------------------------------------------------------------------


def test_function_answers_and_every_way_to_compare_is_scored(tiny_run, captions):
    calls = []

    def ask(*question):
        calls.append(question)
        return None if len(calls) == 2 else same_scene(*question)

    options = {"texts": captions, "run": tiny_run, "condition": "the place | the scene"}
    (check,) = llmcond.check_condition(**options, ask=ask).checks
    assert len(calls) == len(set(calls)) == 20
    assert check.skipped == 1
    assert check.same + check.different == 19
    assert check.same == sum(
        same_scene(*question) for number, question in enumerate(calls, 1) if number != 2
    )
    names = [ranking.name for ranking in check.rankings]
    assert names == ["the place", "the scene", "all wordings", "no condition"]
    for ranking in check.rankings:
        auc = ranking.scores.auc
        assert 0 <= auc.low < auc.value < auc.high <= 1
    with pytest.raises(UserError, match="ask returned 'yes'; expected True, False or None"):
        llmcond.check_condition(**options, ask=lambda *_: "yes")
    (check,) = llmcond.check_condition(**options, ask=lambda *_: True).checks
    assert (check.same, check.rankings) == (20, [])


def test_stored_answers_are_labelled_pairs_and_are_reused(tiny_run, captions, tmp_path):
    out = tmp_path / "answers.csv"
    options = {"texts": captions, "run": tiny_run, "condition": ["the place"], "out": out}
    first = llmcond.check_condition(**options, ask=same_scene)
    rows, _ = read_rows(out)
    assert len(rows) == 20
    assert {*rows.condition} == {"the place"}
    for one, two, rating in zip(rows.sentence1, rows.sentence2, rows.rating, strict=True):
        assert rating == (SCENE_OF[one] == SCENE_OF[two])
    again = llmcond.check_condition(**options, ask=lambda *_: pytest.fail("asked again"))
    assert again == first
    # Other wordings are compared by the same answers, and more pairs by more answers.
    options["condition"] = ["the place | the scene"]
    other = llmcond.check_condition(**options, ask=lambda *_: pytest.fail("asked again"))
    assert other.checks[0].same == first.checks[0].same
    llmcond.check_condition(**options, ask=same_scene, pairs=24)
    longer, _ = read_rows(out)
    assert list(longer.sentence1)[:20] == list(rows.sentence1)
    assert len(longer) == 24
    # Excel saves other delimiters and encodings.
    semicolons = out.read_text().replace(",", ";")
    for encoding in ("utf-8-sig", "utf-16"):
        out.write_text(semicolons, encoding=encoding)
        assert llmcond.check_condition(**options, ask=same_scene, pairs=24).checks[0].same


def test_terminal_asks_until_the_user_quits(command, type_lines, capsys):
    asks = [*command, "--ask", "--out", "answers.csv"]
    shown = type_lines("y", "No", "what", "s", "q")
    assert run(asks) == 0
    assert [row["label"] for row in read_csv("answers.csv")] == ["5", "1", "-1"]
    text = shown.getvalue()
    assert "the place: pair 4 of 20" in text
    assert text.count("Same in this respect? [y]es/[n]o/[s]kip/[q]uit") == 5
    assert "'what' is no answer" in text
    assert "3 new answers, 3 in all -> answers.csv; the same command continues" in text
    assert "2 pairs, 1 of them the same, and 1 skipped" in " ".join(capsys.readouterr().out.split())
    for end, n in (("^C", 4), (None, 5)):
        shown = type_lines("y", *filter(None, [end]))
        assert run(asks) == 0
        assert f"the place: pair {n} of 20" in shown.getvalue()
        assert len(read_csv("answers.csv")) == n


def test_control_characters_of_texts_do_not_reach_the_terminal(tiny_run, type_lines):
    shown = type_lines("q")
    texts = [f"\x1b[31mtext {n}" for n in range(20)]
    options = {"texts": texts, "condition": "the place", "run": tiny_run, "out": "answers.csv"}
    llmcond.check_condition(**options, ask=True)
    assert r"\x1b[31mtext" in shown.getvalue()
    assert "\x1b[31m" not in shown.getvalue()


def test_labels_answer_for_all_pairs(command, capsys):
    (check,) = run_json(capsys, *command, "--labels", "where")["checks"]
    n = len(TEXTS)
    assert check["same"] == 6 * 15
    assert check["different"] == n * (n - 1) // 2 - 90
    assert [one["name"] for one in check["rankings"]] == ["the place", "no condition"]
    both = [*command, "--condition", "who", "--labels", "where", "who"]
    scene, who = run_json(capsys, *both)["checks"]
    assert scene == check | {"common_neighbours": scene["common_neighbours"]}
    assert who["rankings"] != scene["rankings"]
    assert run(both) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the place: 630 pairs, 90 of them the same. " in printed
    assert "has the highest AUC" in printed


def test_ignored_conditions_are_compared_with_the_condition_alone(tiny_run, captions):
    texts = [
        f"{who} {where} {when}." for _, who, where in CAPTIONS for when in ("today", "at night")
    ]
    table = [{"text": text, "who": text.split()[0]} for text in texts]
    (check,) = llmcond.check_condition(
        texts=table, run=tiny_run, condition="the place", ignore=["who"], labels=["who"]
    ).checks
    names = [ranking.name for ranking in check.rankings]
    assert names == ["the place", "ignoring who", "no condition"]
    figures = [ranking.scores.auc.value for ranking in check.rankings]
    assert len(set(figures)) == 3


# -- a language model --------------------------------------------------------------------------


class Judge(ModelServer):
    """A server whose model knows the places of captions."""

    def __init__(self, answer=None, find_fault=lambda body, number: None):
        super().__init__(("judge",), find_fault)
        self.answer = answer

    def respond(self, body):
        content = body["messages"][-1]["content"]
        first, second = (
            SCENE_OF[text] for text in re.findall(r"^Sentence \d: (.*)$", content, re.M)
        )
        answer = self.answer or json.dumps({"rating": "5" if first == second else "2"})
        message = {"role": "assistant", "content": answer}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        about = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        return {**about, "choices": [choice]}


def test_judge_answers_once(command, capsys):
    with Judge() as server:
        judged = [*command, "--judge", server.url, "--judge-model", "judge", "--out", "judged.csv"]
        (check,) = run_json(capsys, *judged)["checks"]
        n_requests = len(server.bodies)
        assert run_json(capsys, *judged)["checks"] == [check]
        assert len(server.bodies) == n_requests == 20
    rows = read_csv("judged.csv")
    assert check["same"] == sum(
        SCENE_OF[row["sentence1"]] == SCENE_OF[row["sentence2"]] for row in rows
    )
    assert check["same"] + check["different"] == len(rows) == 20


def test_judge_that_cannot_be_reached_is_reported_before_the_texts_are_encoded(
    command, capsys, monkeypatch
):
    monkeypatch.setattr("llmcond.workflows.check.EmbeddingModel.find", None)
    judge = ("--judge", "http://127.0.0.1:9/v1", "--judge-model", "judge", "--out", "judged.csv")
    assert "127.0.0.1:9" in run_rejected(capsys, *command, *judge)
    assert not Path("judged.csv").exists()


def test_answers_that_cannot_be_read_are_reported(command, capsys):
    with Judge("I would rather not say.") as server:
        message = run_rejected(
            capsys, *command, "--judge", server.url, "--judge-model", "judge", "--out", "j.csv"
        )
    assert message.startswith("no answer of judge can be read; j.answers has the questions")
    url = server.url
    message = run_rejected(
        capsys, *command, "--judge", url, "--judge-model", "judge", "--out", "other.csv"
    )
    assert message.startswith(f"no server answers at {url}")
    assert "--judge" in message


# -- invalid input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ask", "--ask needs --out FILE.csv"),
        ("--ask --out answers.csv", "--ask asks in a terminal, and this is none. Use --judge or"),
        ("--ask --out answers.txt", "answers.txt"),
        ("--ask --out captions.csv", "captions.csv"),
        ("--ask --labels where", "--ask cannot be given with --labels"),
        ("--ask --judge http://localhost:1/v1", "--ask cannot be given with --judge"),
        ("--judge http://localhost:1/v1 --labels where", "--judge cannot be given with --labels"),
        ("--judge localhost --judge-model m --out a.csv", "--judge is 'localhost'; expected an"),
        ("--judge http://localhost:1/v1 --out a.csv", "--judge needs --judge-model"),
        ("--judge http://localhost:1/v1 --judge-model m", "--judge needs --out FILE.csv"),
        ("--judge-model m", "--judge-model needs --judge"),
        ("--pairs 30", "--pairs needs --ask or --judge"),
        ("--pairs 3 --ask --out a.csv", "--pairs is 3; it must be at least 4"),
        ("--pairs many --ask --out a.csv", "many"),
        ("--out a.csv", "--out needs --ask or --judge"),
        ("--labels nothing", "'nothing'"),
        ("--labels text text", "--labels names 2 columns for 1 condition"),
        ("--labels constant", "the column 'constant' of table.csv has 1 label; at least 2"),
        ("--labels rare", "table.csv has 4 distinct texts with a label; at least 20 are needed"),
        ("--ignore 'the place'", "'the place' cannot ignore itself"),
        ("--seed -1", "--seed is -1"),
    ],
)
def test_invalid_options_are_rejected(flags, message, tiny_run, capsys, captions, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with Path("table.csv").open("w", newline="") as stream:
        cells = [(*row, 1, row[2] if number < 4 else "") for number, row in enumerate(CAPTIONS)]
        csv.writer(stream).writerows([("text", "who", "where", "constant", "rare"), *cells])
    table = "captions.csv" if "captions" in flags else "table.csv"
    flags = ["--ignore", "the place"] if flags.startswith("--ignore") else flags.split()
    common = (table, "--run", tiny_run, "--device", "cpu", "--condition", "the place")
    assert message in run_rejected(capsys, "check-condition", *common, *flags)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "'sentence1'"),
        ("sentence1,sentence2,condition,label\nx,y,the place,7\n", "label is 7, outside"),
        ("sentence1,sentence2,condition,label\nx,,the place,5\n", "sentence2 is empty"),
        ("", "answers.csv"),
        ("sentence1,sentence2,condition,label\nx,y,the place,4\n", "other columns or labels"),
        ("sentence1,sentence2,condition,label,n\nx,y,the place,5,1\n", "other columns or labels"),
    ],
)
def test_other_files_are_not_overwritten(content, message, tiny_run, captions, tmp_path):
    out = tmp_path / "answers.csv"
    out.write_text(content)
    options = {"texts": captions, "condition": "the place", "run": tiny_run, "out": out}
    with pytest.raises(UserError, match=message):
        llmcond.check_condition(**options, ask=same_scene)
    assert out.read_text() == content


def test_second_process_cannot_write_the_answers(tiny_run, captions, tmp_path):
    out = tmp_path / "answers.csv"
    options = {"texts": captions, "condition": "the place", "run": tiny_run, "out": out}

    def ask(*question):
        with pytest.raises(UserError, match="another process writes"):
            llmcond.check_condition(**options, ask=same_scene)
        return same_scene(*question)

    llmcond.check_condition(**options, ask=ask, pairs=4)
    assert len(read_csv(out)) == 4
