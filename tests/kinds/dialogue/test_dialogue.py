"""Dialogue commands with a small encoder on a few dialogues."""

import csv
import json
import shutil

import numpy as np
import polars as pl
import pytest
from helpers.commands import read_page_data, run_json, run_rejected
from helpers.dialogues import make_dialogue, write_dialogues

import llmcond
from llmcond import cli
from llmcond.report.card import heads_card
from llmcond.runs import open_any_run

ENCODER = ("--dtype", "float32", "--device", "cpu", "--pooling", "mean", "--normalize")
FAST_FIT = ("--set", "epochs=2", "batch_size=64")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dialogues(tmp_path_factory.mktemp("dialogues") / "data")


@pytest.fixture
def run(dialogue_run, tmp_path):
    return shutil.copytree(dialogue_run, tmp_path / "copy")


def test_each_distinct_utterance_is_encoded_once(capsys, data, dialogue_run, model, tmp_path):
    command = ("extract", "--data", data, "--model", model, *ENCODER)
    texts = {turn for number in range(72) for turn in make_dialogue(number)}
    new_run = ("--task", "dialogue", "--run", tmp_path / "run")
    prompts = run_json(capsys, *command, *new_run)["prompts"]
    assert list(prompts) == ["separate"]
    assert prompts["separate"]["n_inputs"] == prompts["separate"]["n_computed"] == len(texts)
    assert (
        run_json(capsys, *command, "--run", tmp_path / "run")["prompts"]["separate"]["n_computed"]
        == 0
    )
    manifest = json.loads((dialogue_run / "run.json").read_text())
    assert (manifest["kind"], manifest["task"]) == ("dialogue", "dialogue")


def test_router_is_rejected_for_utterances(capsys, data, model, tmp_path):
    command = ("extract", "--data", data, "--model", model, *ENCODER, "--run", tmp_path / "run")
    message = run_rejected(capsys, *command, "--task", "dialogue", "--router", "csr")
    assert "encodes utterances, which have none. Leave out --router." in message


def test_run_rejects_other_data_and_options(capsys, data, model, run, tmp_path):
    command = ("extract", "--model", model, "--run", run, *ENCODER)
    assert "run of the task dialogue, not kgc" in run_rejected(capsys, *command, "--task", "kgc")
    assert "with other options" in run_rejected(capsys, *command, "--drop-leaks")
    small_data = tmp_path / "few"
    shutil.copytree(data, small_data)
    lines = (data / "test.txt").read_text().splitlines()
    (small_data / "dev.txt").write_text("\n".join(lines[:4]) + "\nsad __eou__ happy __eou__\n")
    new_run = ("extract", "--task", "dialogue", "--data", small_data, "--model", model, *ENCODER)
    first = run_json(capsys, *new_run, "--run", tmp_path / "kept")
    # The results differ because the second call encodes nothing.
    assert run_json(capsys, *new_run, "--run", tmp_path / "kept") != first
    run_json(capsys, *new_run, "--run", tmp_path / "dropped", "--drop-leaks")
    rows = [
        json.loads((tmp_path / name / "run.json").read_text())["data"]["rows"]["dev"]
        for name in ("kept", "dropped")
    ]
    assert rows == [5, 1]
    # The run remembers how its data was read.
    run_json(capsys, *new_run, "--run", tmp_path / "dropped")
    rated_run = ("extract", "--model", model, "--run", tmp_path / "new", *ENCODER, "--drop-leaks")
    assert "--drop-leaks is for dialogues" in run_rejected(capsys, *rated_run)
    assert "--drop-leaks is for dialogues" in run_rejected(capsys, *rated_run, "--task", "kgc")


@pytest.mark.parametrize(
    "command",
    [
        ("similarity", "a", "b", "--condition", "c"),
        ("complete", "--relation", "r", "--head-entity", "e"),
    ],
)
def test_commands_of_other_tasks_reject_dialogue_run(capsys, dialogue_run, command):
    message = run_rejected(capsys, *command, "--run", dialogue_run)
    assert "run of the task dialogue" in message
    assert message.endswith("compare-prompts, heads and reply.") or command[0] == "complete"


def test_prompt_must_encode_utterance_alone(capsys, data, model, tmp_path):
    command = ("extract", "--task", "dialogue", "--data", data, "--model", model, *ENCODER)
    for prompt, expected in (
        ("concat-sent-cond", "encodes no sentence without its condition"),
        ("control-no-condition", "control for conditions"),
    ):
        message = run_rejected(capsys, *command, "--prompt", prompt, "--run", tmp_path / "run")
        assert expected in message
        assert not (tmp_path / "run").exists()


def test_default_head_has_lowest_average_rank(capsys, run):
    rows = {row["name"]: row for row in run_json(capsys, "heads", "--run", run)["heads"]}
    assert list(rows) == ["rank@separate", "weighted@separate"]
    scores = {name: row["dev_average_rank"] for name, row in rows.items()}
    (default_name,) = (name for name, row in rows.items() if row["taken"])
    assert scores[default_name] == min(scores.values())
    run_json(capsys, "heads", "--run", run, "--default", default_name)
    card = heads_card(open_any_run(run))  # as pushed if the encoder is from the Hub
    assert f"`load_dialogue` uses `{default_name}`" in card
    assert f"| no | 32 | {scores[default_name]:.1f} |" in " ".join(card.split())
    refitted = run_json(
        capsys, "fit-head", "--run", run, "--head", "rank", *FAST_FIT, "--name", "again"
    )
    assert (refitted["n_train"], refitted["n_dev"]) == (40, 16)
    assert refitted["dev_average_rank"] == scores["rank@separate"]
    record = json.loads((run / "heads/again/head.json").read_text())
    best = min(entry["dev_score"] for entry in record["fit"]["curve"])
    assert best == pytest.approx(refitted["dev_average_rank"])


def test_evaluate_lists_zero_shot_scores_and_heads(capsys, dialogue_run):
    rows = run_json(capsys, "evaluate", "--run", dialogue_run)["results"]
    assert [(row["head"], row["score"]) for row in rows] == [
        *(("none", score) for score in ("last:2", "average", "bi", "maxsim")),
        ("rank", "average"),
        ("weighted", "weighted"),
    ]
    assert len({row["name"] for row in rows}) == len(rows)
    lengths = [len(make_dialogue(number)) for number in range(56, 72)]
    # With a single dialogue the answer is the only candidate, so there is nothing to rank.
    histories = [h for h in range(2, 11) if sum(n > h for n in lengths) > 1]
    for row in rows:
        assert (row["task"], row["split"], row["candidates"]) == ("dialogue", "test", "same-depth")
        assert row["ties"] == "realistic"
        by_history = row["by_history"]
        assert list(by_history) == [str(h) for h in histories]
        assert [part["n"] for part in by_history.values()] == [
            sum(n > h for n in lengths) for h in histories
        ]
        ranks = [part["average_rank"] for part in by_history.values()]
        assert row["average_rank"] == pytest.approx(np.mean(ranks))
        low, high = row["average_rank_ci"]
        assert low <= row["average_rank"] <= high
        micro = sum(part["n"] * part["average_rank"] for part in by_history.values()) / row["n"]
        assert row["average_rank_micro"] == pytest.approx(micro)
        assert row["hits@1"] <= row["hits@5"] <= row["hits@10"] <= 1 <= row["median_rank"]


def test_candidates_ties_and_histories_can_be_set(capsys, dialogue_run, tmp_path):
    command = ("evaluate", "--run", dialogue_run, "--head", "rank", "--history", "2,4")
    (same_depth,) = run_json(capsys, *command, "--score", "bi", "maxsim")["results"][2:3]
    assert (same_depth["head"], same_depth["score"], same_depth["name"]) == (
        "rank",
        "bi",
        "rank@separate bi",
    )
    assert list(same_depth["by_history"]) == ["2", "4"]
    (all_answers,) = run_json(capsys, *command, "--score", "bi", "--candidates", "all")["results"][
        1:
    ]
    assert all_answers["average_rank"] > same_depth["average_rank"]
    ties = {
        rule: run_json(capsys, *command, "--score", "bi", "--ties", rule)["results"][1][
            "average_rank"
        ]
        for rule in ("optimistic", "realistic", "pessimistic")
    }
    assert ties["realistic"] == pytest.approx((ties["optimistic"] + ties["pessimistic"]) / 2)
    assert ties["optimistic"] < ties["pessimistic"]
    # The file holds each of these texts once, and one text that occurs in no dialogue.
    pool = tmp_path / "pool.txt"
    answers = {
        make_dialogue(i)[h] for i in range(56, 72) for h in (2, 4) if len(make_dialogue(i)) > h
    }
    pool.write_text("\n".join([*sorted(answers), "children ride in the rain"]))
    (from_file,) = run_json(capsys, *command, "--score", "bi", "--candidates", pool)["results"][1:]
    assert from_file["candidates"] == str(pool)
    assert from_file["average_rank"] <= all_answers["average_rank"]
    pool.write_text("sad\nhappy\n")
    message = run_rejected(capsys, *command, "--candidates", pool)
    assert "the candidates lack" in message


def test_history_is_a_number_in_python(dialogue_run):
    number, text = (
        llmcond.evaluate(run=dialogue_run, head=["none"], score=["bi"], history=history)
        for history in (3, "3")
    )
    assert number.to_json() == text.to_json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--history", "5-2"), "5-2 is not an ascending range"),
        (("--history", "2..5"), "expected a range or numbers"),
        (("--history", "2-30"), "of 16 the longest have 7 and 7 turns"),
        (("--score", "triple"), "unknown score 'triple'"),
        (
            ("--score", "weighted", "--head", "none"),
            "the score weighted needs a head with learned weights",
        ),
        (("--candidates", "nowhere.txt"), "'nowhere.txt'; expected same-depth, all, or a file"),
        (("--distance", "1-2"), "--distance needs --plan POOL or --generate MODEL"),
        (("--samples", "5"), "--samples needs --generate"),
        (("--plan", "random", "--samples", "5"), "--samples needs --generate"),
        (("--plan", "random", "--score", "maxsim"), "--score maxsim is for ranking next turns"),
        (("--score", "joint"), "unknown score 'joint'"),
        (("--plan", "random", "--generate", "x"), "--generate cannot be given with --plan"),
        (("--plan", "random"), "need dialogues of 10 turns"),
        (("--plan", "nowhere.jsonl"), "'nowhere.jsonl'; expected retrieved"),
        (("--exclude-head",), "--exclude-head is for knowledge graphs"),
        (
            ("--generate", "x", "--data", "DATA"),
            "--generate cannot be given with --data",
        ),
        (("--rating-range", "1", "5"), "for rated rows, and the task dialogue has none"),
        (("--data", "DATA/train.jsonl", "--history", "9"), "a history of 9 turns"),
        (("--split", "train2"), "Legal: train, dev, test"),
        (("--head", "c3l-released"), "no fitted head 'c3l-released'"),
    ],
)
def test_invalid_arguments_are_rejected(capsys, data, dialogue_run, arguments, message):
    arguments = [text.replace("DATA", str(data)) for text in arguments]
    assert message in run_rejected(capsys, "evaluate", "--run", dialogue_run, *arguments)


def test_dialogue_options_are_rejected_for_rated_pairs(capsys, tiny_run):
    message = run_rejected(capsys, "evaluate", "--run", tiny_run, "--history", "2-4")
    assert "--history is for dialogues" in message
    assert "--plan is for dialogues" in run_rejected(
        capsys, "evaluate", "--run", tiny_run, "--plan", "random"
    )


def test_predictions_and_report_list_each_query(capsys, dialogue_run, tmp_path):
    ranks, page = tmp_path / "ranks.csv", tmp_path / "page.html"
    command = ("evaluate", "--run", dialogue_run, "--head", "rank", "--predictions", ranks)
    results = run_json(capsys, *command, "--history", "1-3", "--report", page)["results"]
    with ranks.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["row"] for row in rows] == [str(i) for i in range(1, results[0]["n"] + 1)]
    example = next(row for row in rows if row["history"] == "3")
    number = 56 + int(example["dialogue"]) - 1
    assert [example[key] for key in ("turn_before", "last_turn", "answer")] == make_dialogue(
        number
    )[1:4]
    assert {row["turn_before"] for row in rows if row["history"] == "1"} == {""}
    data = read_page_data(page)
    assert data["texts"][data["rows"]["heading"][rows.index(example)]] == (
        f"dialogue {example['dialogue']}, history 3"
    )
    for result in results:
        row_ranks = [float(row[result["name"]]) for row in rows]
        assert np.mean(row_ranks) == pytest.approx(result["average_rank_micro"])
        assert {system["name"]: system["rank"] for system in data["systems"]}[
            result["name"]
        ] == row_ranks
    plan = (*command, "--plan", "same-depth", "--history", "2", "--distance", "2")
    (_, _, _, goal) = run_json(capsys, *plan, "--report", page)["results"]
    with ranks.open() as stream:
        rows = list(csv.DictReader(stream))
    assert np.mean([float(row[goal["name"]]) <= 5 for row in rows]) == goal["hits@5"]
    number = 56 + int(rows[0]["dialogue"]) - 1
    assert (rows[0]["distance"], rows[0]["goal"]) == ("2", make_dialogue(number)[4])
    assert "By turns before + turns to the goal" in page.read_text()


def test_dialogues_of_file_rank_like_those_of_run(capsys, data, run, tmp_path):
    command = ("evaluate", "--run", run, "--history", "2-4")
    expected = run_json(capsys, *command)
    assert run_json(capsys, *command, "--data", data / "test.txt") == expected
    assert run_json(capsys, *command, "--data", data) == expected
    plan = ("evaluate", "--run", run, "--history", "2", "--distance", "1", "--plan", "retrieved")
    assert run_json(capsys, *plan, "--data", data / "test.txt") == run_json(capsys, *plan)
    path = tmp_path / "new.jsonl"
    turns = [
        [*make_dialogue(0)[:2], "hat", "coat"],
        ["two men walk", "sad", "red hat"],
        make_dialogue(4),
    ]
    path.write_text("".join(f"{json.dumps({'utterances': utterances})}\n" for utterances in turns))
    pool = tmp_path / "pool.txt"
    pool.write_text("hat\ncoat\nred hat\nblue hat\n" + "\n".join(make_dialogue(4)))
    assert cli.run([*map(str, command[:3]), "--data", str(path), "--candidates", str(pool)]) == 0
    log = capsys.readouterr().err
    assert "separate: 5 of 5 inputs encoded" in log
    assert f"warning: 1 of 3 dialogues of {path} are in the run's train split" in log
    assert "ranking 5 next turns of test" in log
    assert (
        run_json(capsys, *command[:3], "--data", path, "--split", "dev")["results"][0]["split"]
        == "dev"
    )
    message = run_rejected(capsys, *command, "--data", path)
    assert "of 3 the longest have 7 and 4 turns" in message


@pytest.mark.parametrize("pool", ["retrieved", "same-depth", "random"])
def test_planning_includes_baseline_without_goal(capsys, dialogue_run, pool):
    command = ("evaluate", "--run", dialogue_run, "--plan", pool, "--history", "2,3")
    rows = run_json(capsys, *command, "--distance", "1-2", "--head", "rank")["results"]
    assert [(row["head"], row["goal"], row["score"]) for row in rows] == [
        ("none", False, "last:2"),
        ("none", True, "plan"),
        ("rank", False, "average"),
        ("rank", True, "plan"),
    ]
    for row in rows:
        assert (row["plan"], row["n"]) == (pool, sum(cell["n"] for cell in row["cells"].values()))
        assert list(row["cells"]) == ["2+1", "2+2", "3+1", "3+2"]
        hits = [cell["hits@5"] for cell in row["cells"].values()]
        assert row["hits@5"] == pytest.approx(np.mean(hits))
        assert row["hits@5"] <= row["hits@10"] <= row["hits@25"] <= row["hits@50"] <= 1


def test_goal_can_be_compared_with_candidate_alone(capsys, dialogue_run):
    command = ("evaluate", "--run", dialogue_run, "--plan", "random", "--head", "rank")
    cells = ("--history", "2", "--distance", "1")
    rows = run_json(capsys, *command, *cells, "--score", "bi", "average")["results"]
    assert [(row["goal"], row["score"]) for row in rows[3:]] == [
        (False, "average"),
        (True, "plan-bi"),
        (True, "plan"),
    ]
    assert len({row["name"] for row in rows}) == len(rows)
    plans = {row["name"]: row for row in run_json(capsys, *command, *cells)["results"]}
    assert plans == {row["name"]: row for row in rows if row["score"] != "plan-bi"}


def test_all_turns_can_be_encoded_as_one_text(capsys, model, run):
    command = ("evaluate", "--run", run, "--head", "rank", "--history", "2", "--score", "joined")
    zero, fitted = run_json(capsys, *command)["results"]
    assert (zero["score"], fitted["score"]) == ("joined", "joined")
    assert fitted["name"] == "rank@separate joined"
    opened = open_any_run(run)
    turns, texts = opened.data.turns_of("test"), opened.data.texts
    encoder = llmcond.load_encoder(
        model, dtype="float32", device="cpu", pooling="mean", normalize=True
    )
    _, contexts, answers = turns.contexts(2)
    inputs = [
        [llmcond.EncoderInput("", text) for text in side]
        for side in ([f"{texts[b]}\n{texts[a]}" for a, b in contexts], [texts[i] for i in answers])
    ]
    queries, candidates = map(encoder.encode, inputs)
    for row, head in ((zero, None), (fitted, opened.load_head("rank@separate").head)):
        first = queries if head is None else head.before(queries)[1]
        scores = first @ (candidates if head is None else head.after(candidates)).T
        answer_scores = np.diag(scores)[:, None]
        ranks = 1 + (scores > answer_scores + 1e-6).sum(axis=1)
        ties = (np.abs(scores - answer_scores) <= 1e-6).sum(axis=1) - 1
        assert row["average_rank"] == pytest.approx((ranks + ties / 2).mean())
    # The vectors are stored, so that a second call encodes nothing.
    n_stored = len(opened.store())
    run_json(capsys, *command)
    assert len(opened.store()) == n_stored > len(texts)


def test_subtract_is_rejected_for_dialogues(capsys, dialogue_run):
    for command in (("fit-head", "--head", "rank"), ("sweep", "--head", "none", "rank")):
        message = run_rejected(capsys, *command, "--subtract", "--run", dialogue_run)
        assert message.endswith("there is nothing to subtract. Leave out --subtract.")
    with pytest.raises(llmcond.UserError, match="nothing to subtract"):
        llmcond.fit_head(run=dialogue_run, head="weighted", subtract=True)


def test_sweep_sorts_by_average_rank(capsys, run, tmp_path):
    command = ("sweep", "--run", run, "--head", "rank", "--seeds", "1", *FAST_FIT, "--workers", "1")
    command += ("--vary", "learning_rate=0.0001,0.1", "--keep")
    steps = tmp_path / "steps.svg"
    result = run_json(capsys, *command, "--split", "test", "--plot-steps", steps)
    for row in result["results"]:
        (curve,), (best,) = row["curves"], row["best_epochs"]
        assert curve[best - 1]["test_score"] == pytest.approx(row["average_rank"])
    ranks = [row["average_rank"] for row in result["results"]]
    assert ranks == sorted(ranks)
    assert run_json(capsys, *command)["results"] == result["results"]


def test_compare_prompts_evaluates_dialogues(capsys, run, model, tmp_path):
    prompt = tmp_path / "said.toml"
    prompt.write_text(
        'description = "d"\nsource = "s"\n[conditional]\ntext = "{sentence} : said"\n'
        '[unconditional]\ntext = "{condition}"\n'
    )
    command = ("compare-prompts", "--model", model, "--run", run, *ENCODER, "--heads", "rank")
    command += ("--seeds", "1", *FAST_FIT, "--workers", "1", "--prompts", "separate", prompt)
    rows = {row["name"]: row for row in run_json(capsys, *command)["results"]}
    assert set(rows) == {"none@separate", "none@said", "rank@separate", "rank@said"}
    difference = rows["rank@said"]["difference"]["average_rank"]
    assert difference["value"] == pytest.approx(
        rows["rank@said"]["average_rank"] - rows["rank@separate"]["average_rank"]
    )
    run_json(capsys, *command, "--report", tmp_path / "page.html")
    page = read_page_data(tmp_path / "page.html")
    # The lowest rank is the best and comes first.
    assert page["chosen"] == [
        min(rows, key=lambda name: rows[name]["average_rank"]),
        "none@separate",
    ]
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "A negative difference means that A ranks answers higher" in text
    message = run_rejected(capsys, *command[:-2], "concat-sent-cond")
    assert message.endswith("in the task dialogue. Prompts that can be used: separate.")


def test_dialogues_in_memory_are_scored_with_a_report(dialogue_run, tmp_path):
    turns = [["two men ?", "in the park .", f"sad {i}"] for i in range(3)]
    table = pl.DataFrame({"utterances": turns})
    report = tmp_path / "report.html"
    results = llmcond.evaluate(run=dialogue_run, data=table, history="1-2", report=report)
    assert results.to_json()["results"][0]["n"]
    assert "rows in memory" in report.read_text("utf-8")
