"""Knowledge-graph completion commands with a small encoder on a small graph."""

import csv
import shutil

import numpy as np
import pytest
from helpers.commands import read_page_data, run_json, run_rejected
from helpers.graphs import write_graph

import llmcond
from llmcond import cli

ENCODER = ("--dtype", "float32", "--device", "cpu", "--pooling", "mean", "--normalize")


@pytest.fixture(scope="module")
def fitted(graph, model, tmp_path_factory):
    """A run with a head of each kind of features. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    command = ["extract", "--task", "kgc", "--data", graph, "--model", model, "--run", folder]
    command += [*ENCODER, "--prompt", "separate", "concat-sent-cond"]
    assert cli.run([str(argument) for argument in command]) == 0
    for head, name in (("hypernet-full", "separate"), ("linear", "concat-sent-cond+c")):
        settings = {"epochs": 3, "batch_size": 16}
        result = llmcond.fit_head(run=folder, head=head, set=settings).to_json()
        assert (result["name"], result["n_train"], result["n_dev"]) == (f"{head}@{name}", 42, 7)
        assert 0 < result["dev_mrr"] <= 1
    return folder


# -- extraction and fitting ---------------------------------------------------------------------


def test_each_text_is_encoded_once(capsys, graph, model, tmp_path):
    folder = tmp_path / "run"
    command = ("extract", "--data", graph, "--model", model, "--run", folder, *ENCODER)
    # Entities are sentences and candidates at once; relations have two directions.
    separate = run_json(capsys, *command, "--task", "kgc")["prompts"]["separate"]
    assert separate["n_inputs"] == separate["n_computed"] == 24 + 6
    joint = run_json(capsys, *command, "--prompt", "concat-sent-cond")["prompts"]
    joint = joint["concat-sent-cond"]
    assert joint["n_inputs"] - joint["n_computed"] == 24 + 6
    assert run_json(capsys, *command)["prompts"]["separate"]["n_computed"] == 0


# -- evaluation ---------------------------------------------------------------------------------


def test_evaluate_lists_zero_shot_rule_and_heads(capsys, fitted):
    rows = {row["name"]: row for row in run_json(capsys, "evaluate", "--run", fitted)["results"]}
    assert list(rows) == [
        "none@separate",
        "none@concat-sent-cond+c",
        "none@concat-sent-cond",
        "rule:reverse",
        "hypernet-full@separate",
        "linear@concat-sent-cond+c",
    ]
    for row in rows.values():
        assert (row["task"], row["split"], row["n"]) == ("kgc", "test", 14)
        assert (row["ties"], row["rerank"], row["exclude_head"]) == ("realistic", None, False)
        assert 0 <= row["mrr_ci"][0] <= row["mrr"] <= row["mrr_ci"][1] <= 1
        assert 0 <= row["hits@1"] <= row["hits@3"] <= row["hits@10"] <= 1 <= row["mean_rank"]
        forward, backward = row["forward"], row["backward"]
        assert forward["n"] == backward["n"] == 7
        assert row["mrr"] == pytest.approx((forward["mrr"] + backward["mrr"]) / 2)
        assert row["reversible"]["n"] + row["rest"]["n"] == 14
        assert row["unseen"]["n"] == 0
    # Zero-shot on separate features ignores the relation. A head entity is nearest to itself,
    # which is never the answer.
    assert rows["none@separate"]["hits@1"] == 0
    assert rows["rule:reverse"]["reversible"]["mrr"] == 1
    assert rows["rule:reverse"]["head"] == "rule:reverse"
    assert rows["hypernet-full@separate"]["selected_on"] == "dev"


def test_graph_options_are_recorded_in_results(capsys, fitted):
    command = ("evaluate", "--run", fitted, "--head", "hypernet-full", "--split", "dev")
    (plain,) = (r for r in run_json(capsys, *command)["results"] if r["head"] == "hypernet-full")
    options = ("--rerank", "1:0.2:no-head", "--exclude-head", "--reverse", "--by-relation")
    rows = run_json(capsys, *command, *options, "--ties", "pessimistic")["results"]
    assert [row["head"] for row in rows] == ["none", "rule:reverse", "hypernet-full"]
    for row in (rows[0], rows[2]):
        assert (row["ties"], row["rerank"]) == ("pessimistic", "1:0.2:no-head")
        assert (row["exclude_head"], row["reverse"]) == (True, True)
        assert set(row["by_relation"]) == {"_is_at", "_does", "_sits_with"}
        assert sum(part["n"] for part in row["by_category"].values()) == row["n"]
    assert rows[2]["mrr"] != plain["mrr"]


def test_predictions_and_report_list_each_query(capsys, fitted, tmp_path):
    files = ("--predictions", tmp_path / "ranks.csv", "--report", tmp_path / "page.html")
    results = run_json(capsys, "evaluate", "--run", fitted, "--by-relation", *files)["results"]
    with (tmp_path / "ranks.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    about = ["row", "direction", "head", "relation", "answer"]
    texts = ["head_text", "relation_text", "answer_text"]
    assert list(rows[0]) == [*about, *texts, *(result["name"] for result in results)]
    queries = [[row[key] for key in (*about[1:], "relation_text")] for row in (rows[0], rows[7])]
    assert queries == [
        ["forward", "p05", "_sits_with", "p01", "people"],
        ["backward", "p01", "_sits_with", "p05", "inverse people"],
    ]
    data = read_page_data(tmp_path / "page.html")
    ranks = {system["name"]: system["rank"] for system in data["systems"]}
    by_relation = data["conditions"]
    position = [data["texts"][i] for i in by_relation["text"]].index("inverse people")
    for number, result in enumerate(sorted(results, key=lambda result: -result["mrr"])):
        row_ranks = np.array([float(row[result["name"]]) for row in rows])
        assert (1 / row_ranks).mean() == pytest.approx(result["mrr"])
        assert ranks[result["name"]] == row_ranks.tolist()
        selected = [row["relation_text"] == "inverse people" for row in rows]
        expected = 100 * (1 / row_ranks[selected]).mean()
        assert by_relation["figure"][number][position] == pytest.approx(expected, abs=0.051)


def test_triples_of_file_rank_like_those_of_run(capsys, graph, fitted, tmp_path):
    run = shutil.copytree(fitted, tmp_path / "copy")
    command = ("evaluate", "--run", run, "--exclude-head", "--reverse")
    expected = run_json(capsys, *command)
    assert run_json(capsys, *command, "--data", graph / "test.tsv") == expected
    assert run_json(capsys, *command, "--data", graph) == expected
    # No split asks where activities are: bi-encoders need new inputs, and both tails are answers.
    path = tmp_path / "new.tsv"
    path.write_text("d0\t_is_at\tl0\nd0\t_is_at\tl1\nd0\t_is_at\tl1\np00\t_is_at\tl0\n")
    results = run_json(capsys, *command, "--data", path)["results"]
    assert {row["n"] for row in results} == {6}
    assert all(row["mrr"] > 0 for row in results)
    assert cli.run([str(argument) for argument in (*command, "--data", path)]) == 0
    log = capsys.readouterr().err
    assert "new.tsv: duplicate triples, counted once: 1" in log
    assert "warning: 1 of 3 triples of new.tsv are in the run's train split" in log
    path.write_text("d0\t_is_at\tl9\np77\t_is_at\tl0\n")
    message = run_rejected(capsys, *command, "--data", path)
    assert "entities that the run's graph lacks, 2 in all: 'l9', 'p77' (triples: 2" in message


def test_invalid_arguments_are_rejected(capsys, fitted, graph, model, tiny_run, tmp_path):
    other = write_graph(tmp_path / "other")
    (other / "relations.tsv").write_text("_is_at\there\n_does\tdoes\n_sits_with\twith\n")
    extract = ("extract", "--model", model, *ENCODER, "--data", other)
    complete, one = ("complete", "--relation", "_is_at"), ("--head-entity", "p01")
    for run, command, message in (
        (fitted, extract, "has other examples"),
        (fitted, ("similarity", "a", "b", "--condition", "c"), "needs rated pairs"),
        (fitted, ("evaluate", "--rerank", "0:1"), "expected HOPS:ALPHA"),
        (fitted, ("evaluate", "--rating-range", "1", "5"), "the task kgc has none"),
        (fitted, ("evaluate", "--data", graph, "--drop-leaks"), "there is no --drop-leaks"),
        (fitted, (*complete, "--head-entity", "p99"), "no entity 'p99'. Did you mean 'p0"),
        (fitted, (*complete, *one, "--tail-entity", "p02"), "give either --head-entity or"),
        (tiny_run, (*complete, *one), "has no knowledge graph"),
        (tiny_run, ("evaluate", "--exclude-head"), "is for knowledge graphs"),
    ):
        assert message in run_rejected(capsys, *command, "--run", run)


def test_page_of_a_comparison_averages_metrics_over_seeds(capsys, fitted, tmp_path):
    run = shutil.copytree(fitted, tmp_path / "copy")
    for seed in range(3):
        fit = ("fit-head", "--head", "concat", "--seed", seed, "--name", f"h{seed}")
        run_json(capsys, *fit, "--run", run)
    systems, page = (f"{run}:none@separate", f"{run}:concat"), tmp_path / "page.html"
    results = run_json(capsys, "compare", *systems, "--report", page)["results"]
    data = read_page_data(page)
    for result, system in zip(results, data["systems"], strict=True):
        assert system["name"] == result["name"]
        assert dict(system["hits"])[1] == pytest.approx(result["hits@1"], abs=1e-4)
    assert any(rank % 1 for system in data["systems"] for rank in system["rank"])


def test_compare_needs_equal_candidates_and_known_answers(capsys, fitted, graph, model, tmp_path):
    systems = (f"{fitted}:none@separate", f"{fitted}:hypernet-full")
    (row,) = (r for r in run_json(capsys, "compare", *systems)["results"] if r["difference"])
    (*_, evaluated, _) = run_json(capsys, "evaluate", "--run", fitted)["results"]
    assert evaluated["head"] == "hypernet-full"
    assert row["mrr_ci"] == pytest.approx(evaluated["mrr_ci"])
    assert set(row["difference"]) == {"mrr", "hits@1", "hits@10"}
    other = shutil.copytree(graph, tmp_path / "other")
    triples = (other / "train.tsv").read_text().splitlines()
    (other / "train.tsv").write_text("\n".join(triples[1:]) + "\n")
    extract = ("extract", "--task", "kgc", "--model", model, *ENCODER, "--data", other)
    run_json(capsys, *extract, "--run", tmp_path / "run")
    message = run_rejected(capsys, "compare", systems[0], f"{tmp_path / 'run'}:none")
    assert "rank other candidates, or leave out other known answers" in message


# -- completion ---------------------------------------------------------------------------------


def test_triple_is_completed_by_name_or_id(capsys, fitted):
    command = ("complete", "--run", fitted, "--head", "hypernet-full")
    head = (*command, "--head-entity", "p01", "--relation", "_is_at")
    result = run_json(capsys, *head, "-k", "3", "--no-filtered")
    assert result["head"] == "hypernet-full@separate"
    rows = result["results"]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    assert rows[0]["score"] >= rows[1]["score"] >= rows[2]["score"]
    assert "p01" not in {row["id"] for row in rows}
    by_name = (*command, "--head-entity", "two men, red coat", "--relation", "_sits_with")
    all_rows = run_json(capsys, *by_name, "-k", "99", "--no-filtered")["results"]
    assert {row["id"] for row in all_rows if row["known"]} == {"p04"}
    assert len(all_rows) == 23
    unknown = run_json(capsys, *by_name, "-k", "99")["results"]
    assert {row["id"] for row in all_rows} - {row["id"] for row in unknown} == {"p04"}


@pytest.mark.parametrize("head", ["hypernet-full", "linear"])
def test_completer_ranks_like_evaluate(capsys, fitted, graph, head):
    rows = [line.split("\t") for line in (graph / "test.tsv").read_text().splitlines()]
    completer = llmcond.load_completer(fitted, head, exclude_head=False, reverse=True)
    ranks = completer.rank(rows)
    (row,) = (
        row
        for row in run_json(capsys, "evaluate", "--run", fitted, "--reverse")["results"]
        if row["head"] == head
    )
    for column, side in enumerate(("forward", "backward")):
        assert (1 / ranks[:, column]).mean() == pytest.approx(row[side]["mrr"])
    best = completer.top(head=rows[0][0], relation=rows[0][1], k=24, filtered=False)
    assert best[0].score == max(match.score for match in best)
