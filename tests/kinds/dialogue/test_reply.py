"""Replies to dialogues from the command line and from Python."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.dialogues import LOCATIONS

import llmcond


@pytest.fixture(scope="module")
def replies(tmp_path_factory):
    path = tmp_path_factory.mktemp("replies") / "replies.txt"
    path.write_text("the park on red\nsad\ntwo men play in the street\n")
    return path


def test_reply_ranks_candidates(capsys, dialogue_run, replies):
    command = (
        "reply",
        "two men ?",
        "in the park .",
        "--candidates",
        replies,
        "--run",
        dialogue_run,
    )
    result = run_json(capsys, *command, "--head", "weighted", "-k", "2")
    assert (result["head"], result["score"]) == ("weighted@separate", "weighted")
    assert [row["rank"] for row in result["results"]] == [1, 2]
    assert result["results"][0]["score"] >= result["results"][1]["score"]
    planned = run_json(capsys, *command, "--goal", "the park on red", "-k", "9")
    assert planned["score"] == "plan"
    assert len(planned["results"]) == planned["n_candidates"] == 3


def test_invalid_arguments_are_rejected(capsys, dialogue_run, tiny_run, replies, tmp_path):
    for arguments, message in (
        (("sad", " "), "turn 2 is empty"),
        (("sad", "--score", "weighted", "--head", "rank"), "needs a head with learned weights"),
        (("sad", "--goal", "happy", "--score", "bi"), "--goal cannot be given with --score"),
    ):
        command = ("reply", *arguments, "--candidates", replies, "--run", dialogue_run)
        assert message in run_rejected(capsys, *command)
    message = run_rejected(capsys, "reply", "sad", "--candidates", replies, "--run", tiny_run)
    assert "which has no dialogues" in message
    for name, content, message in (
        ("one.txt", b"only one\n\n", "contains 1 candidates; a choice needs at least 2"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        command = ("reply", "sad", "--candidates", path, "--run", dialogue_run)
        assert message in run_rejected(capsys, *command)


def test_dialogue_state_is_shared_by_threads(dialogue_run):
    model = llmcond.load_dialogue(dialogue_run, "rank", device="cpu")
    pool = model.candidates(["sad", "happy", "the park on red"])
    state = model.start(["two men ?", "in the park ."])
    before = model.score(state, pool)
    next_turns = [f"{place} ride" for place in LOCATIONS]
    expected = [model.score(state.add(turn), pool) for turn in next_turns]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda turn: model.score(state.add(turn), pool), next_turns * 4))
    for actual, reference in zip(results, expected * 4, strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-6)
    np.testing.assert_array_equal(model.score(state, pool), before)


def test_candidates_are_saved_and_bound_to_one_model(dialogue_run, tmp_path):
    model = llmcond.load_dialogue(dialogue_run, "rank", device="cpu")
    pool = model.candidates(["sad", "happy \U0001f600", "sad"])
    pool.save(tmp_path / "pool.safetensors")
    loaded = llmcond.Candidates.load(tmp_path / "pool.safetensors")
    assert loaded.texts == pool.texts
    state = model.start(["two men ?"])
    np.testing.assert_array_equal(model.score(state, loaded), model.score(state, pool))
    best = model.top(state, loaded, 2)
    assert [match.rank for match in best] == [1, 2]
    other = llmcond.load_dialogue(dialogue_run, "weighted", device="cpu")
    with pytest.raises(
        llmcond.UserError, match="vectors of the candidates come from another model"
    ):
        other.score(other.start(["two men ?"]), loaded)
    with pytest.raises(llmcond.UserError, match="vectors of the dialogue come from another model"):
        other.score(state, other.candidates(["sad", "happy"]))
    (tmp_path / "pool.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(llmcond.UserError, match="holds no candidates"):
        llmcond.Candidates.load(tmp_path / "pool.safetensors")
