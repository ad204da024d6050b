"""Dialogues by the commands, on a few of them and a small encoder."""

import csv
import json
import shutil

import numpy as np
import pytest
from helpers.commands import embedded, ok, refused
from helpers.dialogues import dialogue, write_dialogues

import llmcond
from llmcond import cli
from llmcond.report.card import heads_card
from llmcond.runs import open_any_run

ENCODER = ("--dtype", "float32", "--device", "cpu", "--pooling", "mean", "--normalize")
FEW = ("--set", "epochs=2", "batch_size=64")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dialogues(tmp_path_factory.mktemp("dialogues") / "data")


@pytest.fixture
def own(dialogue_run, tmp_path):
    return shutil.copytree(dialogue_run, tmp_path / "own")


def test_each_distinct_utterance_is_encoded_once(capsys, data, dialogue_run, model, tmp_path):
    command = ("extract", "--data", data, "--model", model, *ENCODER)
    texts = {turn for number in range(72) for turn in dialogue(number)}
    new = ("--task", "dialogue", "--run", tmp_path / "run")
    done = ok(capsys, *command, *new)["prompts"]
    assert list(done) == ["separate"]
    assert done["separate"]["n_inputs"] == done["separate"]["n_computed"] == len(texts)
    assert ok(capsys, *command, "--run", tmp_path / "run")["prompts"]["separate"]["n_computed"] == 0
    manifest = json.loads((dialogue_run / "run.json").read_text())
    assert (manifest["kind"], manifest["task"]) == ("dialogue", "dialogue")


def test_no_router_is_for_utterances(capsys, data, model, tmp_path):
    command = ("extract", "--data", data, "--model", model, *ENCODER, "--run", tmp_path / "run")
    said = refused(capsys, *command, "--task", "dialogue", "--router", "csr")
    assert "encodes utterances, which have none. Leave out --router." in said


def test_a_run_is_of_one_data_set_read_in_one_way(capsys, data, model, own, tmp_path):
    command = ("extract", "--model", model, "--run", own, *ENCODER)
    assert "run of the task dialogue, not kgc" in refused(capsys, *command, "--task", "kgc")
    assert "with other options" in refused(capsys, *command, "--drop-leaks")
    few = tmp_path / "few"
    shutil.copytree(data, few)
    lines = (data / "test.txt").read_text().splitlines()
    (few / "dev.txt").write_text("\n".join(lines[:4]) + "\nsad __eou__ happy __eou__\n")
    new = ("extract", "--task", "dialogue", "--data", few, "--model", model, *ENCODER)
    kept = ok(capsys, *new, "--run", tmp_path / "kept")
    assert ok(capsys, *new, "--run", tmp_path / "kept") != kept  # nothing is encoded again
    ok(capsys, *new, "--run", tmp_path / "dropped", "--drop-leaks")
    rows = [
        json.loads((tmp_path / name / "run.json").read_text())["data"]["rows"]["dev"]
        for name in ("kept", "dropped")
    ]
    assert rows == [5, 1]
    # The run remembers how its data was read.
    ok(capsys, *new, "--run", tmp_path / "dropped")
    rated = ("extract", "--model", model, "--run", tmp_path / "new", *ENCODER, "--drop-leaks")
    assert "--drop-leaks is for dialogues" in refused(capsys, *rated)
    assert "--drop-leaks is for dialogues" in refused(capsys, *rated, "--task", "kgc")


@pytest.mark.parametrize(
    "command",
    [
        ("similarity", "a", "b", "--condition", "c"),
        ("analyse",),
        ("complete", "--relation", "r", "--head-entity", "e"),
    ],
)
def test_commands_of_other_tasks_refuse_such_a_run(capsys, dialogue_run, command):
    said = refused(capsys, *command, "--run", dialogue_run)
    assert "run of the task dialogue" in said


def test_prompts_must_encode_an_utterance_by_itself(capsys, data, model, tmp_path):
    command = ("extract", "--task", "dialogue", "--data", data, "--model", model, *ENCODER)
    for prompt, words in (
        ("concat-sent-cond", "encodes no sentence without its condition"),
        ("control-no-condition", "control for conditions"),
    ):
        said = refused(capsys, *command, "--prompt", prompt, "--run", tmp_path / "run")
        assert words in said
        assert not (tmp_path / "run").exists()


def test_heads_are_chosen_by_the_lowest_average_rank(capsys, own):
    rows = {row["name"]: row for row in ok(capsys, "heads", "--run", own)["heads"]}
    assert list(rows) == ["rank@separate", "weighted@separate"]
    scores = {name: row["dev_average_rank"] for name, row in rows.items()}
    (taken,) = (name for name, row in rows.items() if row["taken"])
    assert scores[taken] == min(scores.values())
    ok(capsys, "heads", "--run", own, "--default", taken)
    card = heads_card(open_any_run(own))  # as it is pushed where the encoder is the hub's
    assert f"`load_dialogue` uses `{taken}`" in card
    assert f"| no | 32 | {scores[taken]:.1f} |" in card
    again = ok(capsys, "fit-head", "--run", own, "--head", "rank", *FEW, "--name", "again")
    assert (again["n_train"], again["n_dev"]) == (40, 16)
    assert again["dev_average_rank"] == scores["rank@separate"]
    record = json.loads((own / "heads/again/head.json").read_text())
    best = min(entry["dev_score"] for entry in record["fit"]["curve"])
    assert best == pytest.approx(again["dev_average_rank"])


def test_zero_shot_by_several_scores_stands_beside_heads(capsys, dialogue_run):
    rows = ok(capsys, "evaluate", "--run", dialogue_run)["results"]
    assert [(row["head"], row["score"]) for row in rows] == [
        *(("none", score) for score in ("last:2", "average", "bi", "maxsim")),
        ("rank", "average"),
        ("weighted", "weighted"),
    ]
    assert len({row["name"] for row in rows}) == len(rows)
    lengths = [len(dialogue(number)) for number in range(56, 72)]
    # Of one dialogue alone the answer is the only candidate: nothing to rank.
    asked = [h for h in range(2, 11) if sum(n > h for n in lengths) > 1]
    for row in rows:
        assert (row["task"], row["split"], row["candidates"]) == ("dialogue", "test", "same-depth")
        assert row["ties"] == "realistic"
        by_history = row["by_history"]
        assert list(by_history) == [str(h) for h in asked]
        assert [own["n"] for own in by_history.values()] == [
            sum(n > h for n in lengths) for h in asked
        ]
        ranks = [own["average_rank"] for own in by_history.values()]
        assert row["average_rank"] == pytest.approx(np.mean(ranks))
        low, high = row["average_rank_ci"]
        assert low <= row["average_rank"] <= high
        micro = sum(own["n"] * own["average_rank"] for own in by_history.values()) / row["n"]
        assert row["average_rank_micro"] == pytest.approx(micro)
        assert row["hits@1"] <= row["hits@5"] <= row["hits@10"] <= 1 <= row["median_rank"]


def test_pools_ties_and_histories_are_chosen(capsys, dialogue_run, tmp_path):
    command = ("evaluate", "--run", dialogue_run, "--head", "rank", "--history", "2,4")
    (same,) = ok(capsys, *command, "--score", "bi", "maxsim")["results"][2:3]
    assert (same["head"], same["score"], same["name"]) == ("rank", "bi", "rank@separate bi")
    assert list(same["by_history"]) == ["2", "4"]
    (every,) = ok(capsys, *command, "--score", "bi", "--candidates", "all")["results"][1:]
    assert every["average_rank"] > same["average_rank"]
    ties = {
        rule: ok(capsys, *command, "--score", "bi", "--ties", rule)["results"][1]["average_rank"]
        for rule in ("optimistic", "realistic", "pessimistic")
    }
    assert ties["realistic"] == pytest.approx((ties["optimistic"] + ties["pessimistic"]) / 2)
    assert ties["optimistic"] < ties["pessimistic"]
    # A file of the same texts, each once, and one that nobody has said.
    pool = tmp_path / "pool.txt"
    answers = {dialogue(i)[h] for i in range(56, 72) for h in (2, 4) if len(dialogue(i)) > h}
    pool.write_text("\n".join([*sorted(answers), "children ride in the rain"]))
    (own,) = ok(capsys, *command, "--score", "bi", "--candidates", pool)["results"][1:]
    assert own["candidates"] == str(pool)
    assert own["average_rank"] <= every["average_rank"]
    pool.write_text("sad\nhappy\n")
    said = refused(capsys, *command, "--candidates", pool)
    assert "the candidates lack" in said


@pytest.mark.parametrize(
    ("asked", "words"),
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
        (("--distance", "1-2"), "--distance is for planning"),
        (("--samples", "5"), "--samples is for planning"),
        (("--plan", "random", "--samples", "5"), "--samples needs --generate"),
        (("--plan", "random", "--score", "bi"), "--score is for ranking next turns"),
        (("--plan", "random", "--generate", "x"), "Leave one of them out"),
        (("--plan", "random"), "need dialogues of 10 turns"),
        (("--plan", "nowhere.jsonl"), "'nowhere.jsonl'; expected retrieved"),
        (("--exclude-head",), "--exclude-head is for knowledge graphs"),
        (
            ("--generate", "x", "--data", "DATA"),
            "--generate saves candidates for the dialogues of the run",
        ),
        (("--rating-range", "1", "5"), "for rated rows, and the task dialogue has none"),
        (("--data", "DATA/train.jsonl", "--history", "9"), "a history of 9 turns"),
        (("--split", "train2"), "Legal: train, dev, test"),
        (("--head", "c3l-released"), "no fitted head 'c3l-released'"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, data, dialogue_run, asked, words):
    asked = [text.replace("DATA", str(data)) for text in asked]
    assert words in refused(capsys, "evaluate", "--run", dialogue_run, *asked)


def test_options_of_dialogues_are_of_dialogues_only(capsys, tiny_run):
    said = refused(capsys, "evaluate", "--run", tiny_run, "--history", "2-4")
    assert "--history is for dialogues" in said
    assert "--plan is for dialogues" in refused(
        capsys, "evaluate", "--run", tiny_run, "--plan", "random"
    )


def test_each_query_is_told_with_its_ranks(capsys, dialogue_run, tmp_path):
    ranks, page = tmp_path / "ranks.csv", tmp_path / "page.html"
    command = ("evaluate", "--run", dialogue_run, "--head", "rank", "--predictions", ranks)
    results = ok(capsys, *command, "--history", "1-3", "--report", page)["results"]
    with ranks.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["row"] for row in rows] == [str(i) for i in range(1, results[0]["n"] + 1)]
    first = next(row for row in rows if row["history"] == "3")
    number = 56 + int(first["dialogue"]) - 1
    assert [first[key] for key in ("turn_before", "last_turn", "answer")] == dialogue(number)[1:4]
    assert {row["turn_before"] for row in rows if row["history"] == "1"} == {""}
    data = embedded(page)
    assert data["texts"][data["rows"]["heading"][rows.index(first)]] == (
        f"dialogue {first['dialogue']}, history 3"
    )
    for one in results:
        own = [float(row[one["name"]]) for row in rows]
        assert np.mean(own) == pytest.approx(one["average_rank_micro"])
        assert {own["name"]: own["rank"] for own in data["systems"]}[one["name"]] == own
    plan = (*command, "--plan", "same-depth", "--history", "2", "--distance", "2")
    (_, _, _, goal) = ok(capsys, *plan, "--report", page)["results"]
    with ranks.open() as stream:
        rows = list(csv.DictReader(stream))
    assert np.mean([float(row[goal["name"]]) <= 5 for row in rows]) == goal["hits@5"]
    number = 56 + int(rows[0]["dialogue"]) - 1
    assert (rows[0]["distance"], rows[0]["goal"]) == ("2", dialogue(number)[4])
    assert "By turns before + turns to the goal" in page.read_text()


def test_dialogues_from_elsewhere_are_ranked_as_the_runs_own(capsys, data, own, tmp_path):
    command = ("evaluate", "--run", own, "--history", "2-4")
    usual = ok(capsys, *command)
    assert ok(capsys, *command, "--data", data / "test.txt") == usual
    assert ok(capsys, *command, "--data", data) == usual
    plan = ("evaluate", "--run", own, "--history", "2", "--distance", "1", "--plan", "retrieved")
    assert ok(capsys, *plan, "--data", data / "test.txt") == ok(capsys, *plan)
    new = tmp_path / "new.jsonl"
    turns = [[*dialogue(0)[:2], "hat", "coat"], ["two men walk", "sad", "red hat"], dialogue(4)]
    new.write_text("".join(f"{json.dumps({'utterances': one})}\n" for one in turns))
    pool = tmp_path / "pool.txt"
    pool.write_text("hat\ncoat\nred hat\nblue hat\n" + "\n".join(dialogue(4)))
    assert cli.run([*map(str, command[:3]), "--data", str(new), "--candidates", str(pool)]) == 0
    said = capsys.readouterr().err
    assert "separate: 5 of 5 inputs encoded" in said
    assert f"warning: 1 of 3 dialogues of {new} are in the run's train split" in said
    assert "ranking 5 next turns of test" in said
    assert ok(capsys, *command[:3], "--data", new, "--split", "dev")["results"][0]["split"] == "dev"
    said = refused(capsys, *command, "--data", new)
    assert "of 3 the longest have 7 and 4 turns" in said


@pytest.mark.parametrize("pool", ["retrieved", "same-depth", "random"])
def test_planning_has_the_baseline_without_its_goal_beside_it(capsys, dialogue_run, pool):
    command = ("evaluate", "--run", dialogue_run, "--plan", pool, "--history", "2,3")
    rows = ok(capsys, *command, "--distance", "1-2", "--head", "rank")["results"]
    assert [(row["head"], row["goal"], row["score"]) for row in rows] == [
        ("none", False, "last:2"),
        ("none", True, "plan"),
        ("rank", False, "average"),
        ("rank", True, "plan"),
    ]
    for row in rows:
        assert (row["plan"], row["n"]) == (pool, sum(own["n"] for own in row["cells"].values()))
        assert list(row["cells"]) == ["2+1", "2+2", "3+1", "3+2"]
        cells = [own["hits@5"] for own in row["cells"].values()]
        assert row["hits@5"] == pytest.approx(np.mean(cells))
        assert row["hits@5"] <= row["hits@10"] <= row["hits@25"] <= row["hits@50"] <= 1


def test_utterances_have_nothing_to_subtract(capsys, dialogue_run):
    for command in (("fit-head", "--head", "rank"), ("sweep", "--head", "none", "rank")):
        said = refused(capsys, *command, "--subtract", "--run", dialogue_run)
        assert said.endswith("there is nothing to subtract. Leave out --subtract.")
    with pytest.raises(llmcond.UserError, match="nothing to subtract"):
        llmcond.fit_head(run=dialogue_run, head="weighted", subtract=True)


def test_a_sweep_orders_by_the_lowest_rank(capsys, own):
    command = ("sweep", "--run", own, "--head", "rank", "--seeds", "1", *FEW, "--workers", "1")
    command += ("--vary", "learning_rate=0.0001,0.1", "--keep")
    done = ok(capsys, *command)
    ranks = [row["average_rank"] for row in done["results"]]
    assert ranks == sorted(ranks)
    assert ok(capsys, *command)["results"] == done["results"]


def test_prompts_are_compared_over_dialogues(capsys, own, model, tmp_path):
    other = tmp_path / "said.toml"
    other.write_text(
        'description = "d"\nsource = "s"\n[conditional]\ntext = "{sentence} : said"\n'
        '[unconditional]\ntext = "{condition}"\n'
    )
    command = ("compare-prompts", "--model", model, "--run", own, *ENCODER, "--heads", "rank")
    command += ("--seeds", "1", *FEW, "--workers", "1", "--prompts", "separate", other)
    rows = {row["name"]: row for row in ok(capsys, *command)["results"]}
    assert set(rows) == {"none@separate", "none@said", "rank@separate", "rank@said"}
    against = rows["rank@said"]["difference"]["average_rank"]
    assert against["value"] == pytest.approx(
        rows["rank@said"]["average_rank"] - rows["rank@separate"]["average_rank"]
    )
    ok(capsys, *command, "--report", tmp_path / "page.html")
    page = embedded(tmp_path / "page.html")
    # The lowest rank is the best one, and comes first.
    assert page["chosen"] == [
        min(rows, key=lambda name: rows[name]["average_rank"]),
        "none@separate",
    ]
    assert page["conditions"]["better"] == "below"
    said = refused(capsys, *command[:-2], "concat-sent-cond")
    assert said.endswith("in the task dialogue. Prompts that can be used: separate.")
