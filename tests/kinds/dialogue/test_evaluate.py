"""Dialogue commands with a small encoder on a few dialogues."""

import csv
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import polars as pl
import pytest
import torch
from helpers.commands import read_page_data, run_json, run_rejected
from helpers.dialogues import LOCATIONS, make_dialogue
from helpers.flags import change_flags
from helpers.vectors import normalize
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import llmcond
from llmcond import cli
from llmcond.kinds.dialogue.examples import DialogueExamples
from llmcond.runs import open_any_run


@pytest.fixture
def run(dialogue_run, tmp_path):
    return shutil.copytree(dialogue_run, tmp_path / "copy")


def test_default_head_and_epoch_have_lowest_average_rank(capsys, dialogue_run):
    rows = run_json(capsys, "heads", "--run", dialogue_run)["heads"]
    (taken,) = (row["dev_average_rank"] for row in rows if row["taken"])
    assert taken == min(row["dev_average_rank"] for row in rows)
    fit = json.loads((dialogue_run / "heads" / rows[0]["name"] / "head.json").read_text())["fit"]
    best = min(entry["dev_score"] for entry in fit["curve"])
    assert best == pytest.approx(rows[0]["dev_average_rank"])


# -- ranking -----------------------------------------------------------------------------------


def test_evaluate_lists_zero_shot_scores_and_heads(capsys, dialogue_run):
    rows = run_json(capsys, "evaluate", "--run", dialogue_run)["results"]
    assert [(row["head"], row["score"]) for row in rows] == [
        *(("none", score) for score in ("last:2", "average", "bi", "maxsim")),
        ("rank", "average"),
        ("weighted", "weighted"),
    ]
    lengths = [len(make_dialogue(number)) for number in range(56, 72)]
    n_by_history = {str(h): sum(n > h for n in lengths) for h in range(2, 7)}
    for row in rows:
        assert (row["task"], row["split"], row["candidates"]) == ("dialogue", "test", "same-depth")
        assert row["ties"] == "realistic"
        parts = row["by_history"]
        assert {h: part["n"] for h, part in parts.items()} == n_by_history
        ranks = [part["average_rank"] for part in parts.values()]
        assert row["average_rank"] == pytest.approx(np.mean(ranks))
        micro = np.average(ranks, weights=list(n_by_history.values()))
        assert row["average_rank_micro"] == pytest.approx(micro)
        low, high = row["average_rank_ci"]
        assert low <= row["average_rank"] <= high
        assert row["hits@1"] <= row["hits@5"] <= row["hits@10"] <= 1 <= row["median_rank"]
    by_number = llmcond.evaluate(run=dialogue_run, head=["none"], score=["bi"], history=3)
    assert list(by_number.to_json()["results"][0]["by_history"]) == ["3"]


def test_candidates_ties_and_scores_can_be_set(capsys, dialogue_run):
    command = ("evaluate", "--run", dialogue_run, "--head", "rank", "--history", "2,4")

    def evaluate(*arguments):
        return run_json(capsys, *command, *arguments)["results"][-1]

    same_depth = evaluate("--score", "bi")
    assert (same_depth["head"], same_depth["name"]) == ("rank", "rank@separate bi")
    assert list(same_depth["by_history"]) == ["2", "4"]
    all_answers = evaluate("--score", "bi", "--candidates", "all")
    assert all_answers["average_rank"] > same_depth["average_rank"]
    ranks = [
        evaluate("--score", "bi", "--ties", rule)["average_rank"]
        for rule in ("optimistic", "realistic", "pessimistic")
    ]
    assert ranks[0] < ranks[2]
    assert ranks[1] == pytest.approx((ranks[0] + ranks[2]) / 2)


def test_invalid_arguments_are_rejected(capsys, dialogue_run, tiny_run, causal_model, tmp_path):
    pickled = shutil.copytree(causal_model, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("only one\n\n")
    two.write_text("sad\nhappy\n")
    for run, command, message in (
        (dialogue_run, "evaluate --history 5-2", "5-2 is not an ascending range"),
        (dialogue_run, "evaluate --score weighted --head none", "a head with learned weights"),
        (dialogue_run, "evaluate --plan random --samples 5", "--samples needs --generate"),
        (dialogue_run, "evaluate --plan random", "need dialogues of 10 turns"),
        (
            dialogue_run,
            f"evaluate --generate {pickled} --history 3 --distance 1",
            "weights in safetensors",
        ),
        (dialogue_run, f"evaluate --history 2 --candidates {two}", "the candidates lack"),
        (dialogue_run, f"reply sad --candidates {two} --score weighted --head rank", "learned we"),
        (dialogue_run, f"reply sad --candidates {two} --goal x --score bi", "--goal cannot be"),
        (dialogue_run, f"reply sad --candidates {one}", "contains 1 candidates; a choice needs"),
        (tiny_run, f"reply sad --candidates {two}", "which has no dialogues"),
    ):
        assert message in run_rejected(capsys, *command.split(), "--run", run)
    reply = ("reply", "sad", " ", "--candidates", two, "--run", dialogue_run)
    assert "turn 2 is empty" in run_rejected(capsys, *reply)


def test_predictions_and_report_list_each_query(capsys, dialogue_run, tmp_path):
    ranks, page = tmp_path / "ranks.csv", tmp_path / "page.html"
    command = ("evaluate", "--run", dialogue_run, "--head", "rank", "--predictions", ranks)
    ranks.write_text("sad\nhappy\n")
    line = run_rejected(capsys, *command, "--candidates", ranks)
    assert "is an input of the same command" in line
    ranks.unlink()
    results = run_json(capsys, *command, "--history", "1-3", "--report", page)["results"]
    with ranks.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["row"] for row in rows] == [str(i) for i in range(1, results[0]["n"] + 1)]
    example = next(row for row in rows if row["history"] == "3")
    turns = make_dialogue(55 + int(example["dialogue"]))
    assert [example[key] for key in ("turn_before", "last_turn", "answer")] == turns[1:4]
    assert {row["turn_before"] for row in rows if row["history"] == "1"} == {""}
    page_ranks = {system["name"]: system["rank"] for system in read_page_data(page)["systems"]}
    for result in results:
        row_ranks = [float(row[result["name"]]) for row in rows]
        assert np.mean(row_ranks) == pytest.approx(result["average_rank_micro"])
        assert page_ranks[result["name"]] == row_ranks
    plan = (*command, "--plan", "same-depth", "--history", "2", "--distance", "2")
    goal = run_json(capsys, *plan)["results"][3]
    with ranks.open() as stream:
        rows = list(csv.DictReader(stream))
    assert np.mean([float(row[goal["name"]]) <= 5 for row in rows]) == goal["hits@5"]


def test_other_dialogues_are_encoded_and_ranked(capsys, dialogue_run, run, tmp_path):
    test_file = ("--data", dialogue_run.parent / "data/test.txt")
    for options in ("--history 2-4", "--history 2 --distance 1 --plan retrieved"):
        command = ("evaluate", "--run", run, *options.split())
        assert run_json(capsys, *command, *test_file) == run_json(capsys, *command)
    path = tmp_path / "new.jsonl"
    dialogues = [[*make_dialogue(0)[:2], "hat", "coat"], ["two men walk", "sad", "red hat"]]
    rows = [{"utterances": turns} for turns in (*dialogues, make_dialogue(4))]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pool = tmp_path / "pool.txt"
    pool.write_text("hat\ncoat\nred hat\nblue hat\n" + "\n".join(make_dialogue(4)))
    other = ["evaluate", "--run", run, "--data", path, "--candidates", pool]
    assert cli.run([*map(str, other), "--split", "dev"]) == 0
    log = capsys.readouterr().err
    assert "separate: 5 of 42 inputs encoded" in log
    assert f"warning: 1 of 3 dialogues of {path} are in the run's train split" in log
    assert "ranking 5 next turns of dev" in log
    results = llmcond.evaluate(run=run, data=pl.DataFrame(rows[:2]), history="1-2")
    assert results.to_json()["results"][0]["n"] == 4


# -- planning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["retrieved", "same-depth", "random"])
def test_planning_includes_baseline_without_goal(capsys, dialogue_run, pool):
    command = ("evaluate", "--run", dialogue_run, "--plan", pool, "--history", "2,3")
    command += ("--distance", "1-2", "--head", "rank", "--score", "bi", "average")
    rows = run_json(capsys, *command)["results"]
    assert [(row["head"], row["goal"], row["score"]) for row in rows] == [
        ("none", False, "last:2"),
        ("none", True, "plan-bi"),
        ("none", True, "plan"),
        ("rank", False, "average"),
        ("rank", True, "plan-bi"),
        ("rank", True, "plan"),
    ]
    for row in rows:
        assert (row["plan"], row["n"]) == (pool, sum(cell["n"] for cell in row["cells"].values()))
        assert list(row["cells"]) == ["2+1", "2+2", "3+1", "3+2"]
        hits = [cell["hits@5"] for cell in row["cells"].values()]
        assert row["hits@5"] == pytest.approx(np.mean(hits))
        assert row["hits@5"] <= row["hits@10"] <= row["hits@25"] <= row["hits@50"] <= 1


@pytest.fixture(scope="module")
def causal_model(tmp_path_factory):
    words = "<eos> [UNK] two three men women children dogs ride play read sit in the park".split()
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    shape = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=len(words), **shape, bos_token_id=0, eos_token_id=0)
    folder = tmp_path_factory.mktemp("causal")
    GPT2LMHeadModel(config).save_pretrained(folder)
    saved_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="[UNK]"
    )
    saved_tokenizer.save_pretrained(folder)
    return folder


def test_generated_candidates_are_stored_and_used_for_planning(capsys, run, causal_model, tmp_path):
    command = ("evaluate", "--run", run, "--generate", causal_model, "--samples", "4")
    command += ("--history", "5", "--distance", "1", "--head", "rank")
    rows = run_json(capsys, *command)["results"]
    systems = [("none", False), ("none", True), ("rank", False), ("rank", True)]
    assert [(row["head"], row["goal"]) for row in rows] == systems
    (path,) = (run / "generated").glob("*.jsonl")
    text = path.read_text()
    samples = [json.loads(line) for line in text.splitlines()]
    long_dialogues = [number for number in range(56, 72) if len(make_dialogue(number)) > 5]
    assert [(row["dialogue"], row["history"]) for row in samples] == [
        (str(number - 55), 5) for number in long_dialogues
    ]
    assert all(1 <= len(row["candidates"]) <= 4 for row in samples)
    # After an interruption within a line, whole lines stay and the rest is generated again.
    lines = text.splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2][:20]]))
    assert run_json(capsys, *command)["results"] == rows
    assert path.read_text() == text
    # The file can be passed to --plan like any other file of samples.
    plan_command = (*command[:3], "--plan", path, *command[7:])
    assert run_json(capsys, *plan_command)["results"][1]["hits@5"] == rows[1]["hits@5"]
    # Another tokenizer has other candidates.
    other = shutil.copytree(causal_model, tmp_path / "other")
    (other / "merges.txt").write_text("#version: 0.2\n")
    run_json(capsys, *change_flags(command, "--generate", other))
    assert len(list((run / "generated").glob("*.jsonl"))) == 2


# -- analyses ----------------------------------------------------------------------------------


def context_terms(b1, b2, context, score):
    """Return the unit vectors of a context's terms, each with the turns that it contains."""
    if score == "bi":
        return [((i,), normalize(b2[u])) for i, u in enumerate(context)]
    return [
        ((i, j), normalize(b1[context[i]] + b2[context[j]]))
        for j in range(len(context))
        for i in range(j)
    ]


@pytest.mark.parametrize("score", ["bi", "average"])
def test_similarities_match_loops_over_candidates(dialogue_run, score):
    result = llmcond.analyse(run=dialogue_run, head=["rank"], what=["similarity", "turns"])
    opened = open_any_run(dialogue_run)
    turns, saved = opened.data.turns_of("test"), opened.load_head("rank@separate")
    features = DialogueExamples(opened).features(saved.view).read(slice(None))
    (b1, b2), after = saved.head.before(features), saved.head.after(features)
    correct, random, by_turn = [], [], []
    subsets = [(h, *turns.contexts(h)[1:]) for h in range(2, 9)]
    subsets = [subset for subset in subsets if len(set(subset[2].tolist())) > 1]
    last_history = subsets[-1][0]
    for h, contexts, answers in subsets:
        for context, answer in zip(contexts, answers, strict=True):
            terms = context_terms(b1, b2, context, score)
            others = [other for other in answers if other != answer]
            cosines = {turn: (v @ after[answer], np.mean(v @ after[others].T)) for turn, v in terms}
            correct.append(np.mean([first for first, _ in cosines.values()]))
            random.append(np.mean([second for _, second in cosines.values()]))
            if h == last_history:
                by_turn.append(
                    [
                        np.mean([a - b for parts, (a, b) in cosines.items() if turn in parts])
                        for turn in range(h)
                    ]
                )
    about = {"name": "rank@separate", "score": score}
    row, turn_row = (
        next(row for row in result[what] if about.items() <= row.items())
        for what in ("similarity", "turns")
    )
    assert result["n"] == len(correct)
    assert row["correct"] == pytest.approx(np.mean(correct), abs=1e-5)
    assert row["random"] == pytest.approx(np.mean(random), abs=1e-5)
    assert row["difference"] == pytest.approx(row["correct"] - row["random"], abs=1e-6)
    assert row["difference_ci"][0] < row["difference"] < row["difference_ci"][1]
    assert (turn_row["history"], turn_row["n"]) == (last_history, len(by_turn))
    assert [turn["turn"] for turn in turn_row["turns"]] == list(range(1, last_history + 1))
    differences = [turn["difference"] for turn in turn_row["turns"]]
    np.testing.assert_allclose(differences, np.mean(by_turn, axis=0), atol=1e-5)


# -- replies -----------------------------------------------------------------------------------


def test_reply_ranks_candidates(capsys, dialogue_run, tmp_path):
    context, replies = ("two men ?", "in the park ."), tmp_path / "replies.txt"
    replies.write_text("the park on red\nsad\ntwo men play in the street\n")
    command = ("reply", *context, "--candidates", replies, "--run", dialogue_run)
    result = run_json(capsys, *command, "--head", "weighted", "-k", "2")
    assert (result["head"], result["score"]) == ("weighted@separate", "weighted")
    assert [row["rank"] for row in result["results"]] == [1, 2]
    assert result["results"][0]["score"] >= result["results"][1]["score"]
    planned = run_json(capsys, *command, "--goal", "the park on red", "-k", "9")
    assert planned["score"] == "plan"
    assert len(planned["results"]) == planned["n_candidates"] == 3


def test_dialogue_state_is_shared_by_threads(dialogue_run):
    model = llmcond.load_dialogue(dialogue_run, "rank", device="cpu")
    pool = model.candidates(["sad", "happy", "the park on red"])
    state = model.start(["two men ?", "in the park ."])
    assert state.turns == model.start(["two men ?"]).add("in the park .").turns
    assert state.turns == model.start(iter(state.turns)).turns
    assert model.add_turns(state, "sad").turns == (*state.turns, "sad")
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
    pool.after[:] = np.nan
    with pytest.raises(llmcond.UserError, match="the head returned NaN or infinity for 'sad'"):
        model.top(state, pool)
    (tmp_path / "pool.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(llmcond.UserError, match="holds no candidates"):
        llmcond.Candidates.load(tmp_path / "pool.safetensors")
