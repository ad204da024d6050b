"""Replies to dialogues, by the command and from Python."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.commands import ok, refused
from helpers.dialogues import PLACES, dialogue

import llmcond


@pytest.fixture(scope="module")
def replies(tmp_path_factory):
    path = tmp_path_factory.mktemp("replies") / "replies.txt"
    path.write_text("the park on red\n\nsad\ntwo men play in the street\n")
    return path


def test_a_reply_is_the_best_of_the_candidates(capsys, dialogue_run, replies):
    command = (
        "reply",
        "two men ?",
        "in the park .",
        "--candidates",
        replies,
        "--run",
        dialogue_run,
    )
    found = ok(capsys, *command, "--head", "weighted", "-k", "2")
    assert (found["head"], found["score"]) == ("weighted@separate", "weighted")
    assert [row["rank"] for row in found["results"]] == [1, 2]
    assert found["results"][0]["score"] >= found["results"][1]["score"]
    goal = ok(capsys, *command, "--goal", "the park on red", "-k", "9")
    assert goal["score"] == "plan"
    assert len(goal["results"]) == goal["n_candidates"] == 3


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("sad", " "), "turn 2 is empty"),
        (("sad", "--goal", " "), "goal 1 is empty"),
        (("sad", "-k", "0"), "at least 1"),
        (("sad", "--score", "x"), "unknown score 'x'"),
        (("sad", "--score", "weighted", "--head", "rank"), "needs a head with learned weights"),
        (
            ("sad", "--goal", "happy", "--score", "bi"),
            "planning for --goal has its own score. Leave one of them out",
        ),
        (("sad", "--head", "ccl"), "no fitted head 'ccl'"),
    ],
)
def test_what_cannot_be_replied_to_is_told(capsys, dialogue_run, replies, asked, words):
    command = ("reply", *asked, "--candidates", replies, "--run", dialogue_run)
    assert words in refused(capsys, *command)


def test_candidates_come_from_a_readable_file_of_two_at_least(capsys, dialogue_run, tmp_path):
    path = tmp_path / "one.txt"
    command = ("reply", "sad", "--run", dialogue_run, "--candidates", path)
    assert "is not a file" in refused(capsys, *command)
    path.write_text("only one\n\n")
    assert "contains 1 candidates; a choice needs at least 2" in refused(capsys, *command)
    path.write_bytes(b"caf\xe9\nsad\n")
    assert "not UTF-8: byte 0xe9" in refused(capsys, *command)
    table = tmp_path / "replies.csv"
    table.write_text("text,score\nsad,1\nhappy,2\n")
    assert ok(capsys, *command[:-1], table)["n_candidates"] == 2
    table.write_text('text\nsad\n" "\nhappy\n')
    assert "row 2 of" in refused(capsys, *command[:-1], table)


def test_only_dialogues_are_replied_to(capsys, tiny_run, replies):
    said = refused(capsys, "reply", "sad", "--candidates", replies, "--run", tiny_run)
    assert "which has no dialogues" in said


@pytest.mark.parametrize("score", ["average", "last:2", "bi", "neighbours", "maxsim", "weighted"])
def test_a_talk_scores_as_all_its_turns_at_once(dialogue_run, score):
    model = llmcond.load_dialogue(dialogue_run, "weighted", score=score, device="cpu")
    pool = model.candidates([f"{place} ride" for place in PLACES])
    turns = dialogue(4)
    talk = model.start(turns[:1])
    for turn in turns[1:]:
        talk = talk.add(turn)
    assert talk.turns == tuple(turns)
    whole = model.start(turns)
    np.testing.assert_allclose(model.score(talk, pool), model.score(whole, pool), atol=1e-5)


def test_a_talk_is_shared_by_threads(dialogue_run):
    model = llmcond.load_dialogue(dialogue_run, "rank", device="cpu")
    pool = model.candidates(["sad", "happy", "the park on red"])
    talk = model.start(["two men ?", "in the park ."])
    before = model.score(talk, pool)
    further = [f"{place} ride" for place in PLACES]
    expected = [model.score(talk.add(turn), pool) for turn in further]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda turn: model.score(talk.add(turn), pool), further * 4))
    for one, other in zip(found, expected * 4, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    np.testing.assert_array_equal(model.score(talk, pool), before)


def test_candidates_are_saved_and_are_of_one_model(dialogue_run, tmp_path):
    model = llmcond.load_dialogue(dialogue_run, "rank", device="cpu")
    pool = model.candidates(["sad", "happy \U0001f600", "sad"])
    pool.save(tmp_path / "pool.safetensors")
    loaded = llmcond.Candidates.load(tmp_path / "pool.safetensors")
    assert loaded.texts == pool.texts
    talk = model.start(["two men ?"])
    np.testing.assert_array_equal(model.score(talk, loaded), model.score(talk, pool))
    best = model.top(talk, loaded, 2)
    assert [one.rank for one in best] == [1, 2]
    other = llmcond.load_dialogue(dialogue_run, "weighted", device="cpu")
    with pytest.raises(
        llmcond.UserError, match="vectors of the candidates come from another model"
    ):
        other.score(other.start(["two men ?"]), loaded)
    with pytest.raises(llmcond.UserError, match="vectors of the dialogue come from another model"):
        other.score(talk, other.candidates(["sad", "happy"]))
    with pytest.raises(llmcond.UserError, match="no utterance yet"):
        model.score(model.start(), pool)
    (tmp_path / "pool.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(llmcond.UserError, match="holds no candidates"):
        llmcond.Candidates.load(tmp_path / "pool.safetensors")
