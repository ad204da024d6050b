"""Knowledge-graph completion by the commands, on a small graph and a small encoder."""

import csv
import json
import shutil

import numpy as np
import pytest
from helpers.commands import embedded, ok, refused
from helpers.graphs import write_graph

import llmcond
from llmcond import cli

ENCODER = ("--dtype", "float32", "--device", "cpu", "--pooling", "mean", "--normalize")


@pytest.fixture(scope="module")
def extracted(graph, model, tmp_path_factory):
    """A run with features of both kinds. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    command = ["extract", "--task", "kgc", "--data", graph, "--model", model, "--run", folder]
    command += [*ENCODER, "--prompt", "separate", "concat-sent-cond"]
    assert cli.run([str(one) for one in command]) == 0
    return folder


@pytest.fixture
def own(extracted, tmp_path):
    return shutil.copytree(extracted, tmp_path / "own")


def test_each_text_is_encoded_once(capsys, graph, model, tmp_path):
    folder = tmp_path / "run"
    command = ("extract", "--data", graph, "--model", model, "--run", folder, *ENCODER)
    done = ok(capsys, *command, "--task", "kgc")["prompts"]
    # Entities are sentences and candidates at once; relations have two directions.
    assert list(done) == ["separate"]
    assert done["separate"]["n_inputs"] == done["separate"]["n_computed"] == 24 + 6
    joint = ok(capsys, *command, "--prompt", "concat-sent-cond")["prompts"]["concat-sent-cond"]
    assert joint["n_inputs"] - joint["n_computed"] == 24 + 6
    assert ok(capsys, *command)["prompts"]["separate"]["n_computed"] == 0


def test_a_router_has_something_to_route(capsys, graph, model, tmp_path):
    """Without a prompt named, the one that routes; separate features leave a router idle."""
    folder = tmp_path / "run"
    command = ("extract", "--data", graph, "--model", model, "--run", folder, *ENCODER)
    routed = (*command, "--task", "kgc", "--router", "csr", "--router-layers", "2")
    said = refused(capsys, *routed, "--prompt", "separate")
    assert "--router csr would have no effect" in said
    assert not folder.exists()
    assert list(ok(capsys, *routed)["prompts"]) == ["routed"]
    said = refused(capsys, *routed[:-4], "--router-mode", "heavy", "--run", tmp_path / "mode")
    assert "Add --router csr" in said


def test_a_run_is_of_one_task_and_one_graph(capsys, own, graph, model, tmp_path):
    command = ("extract", "--model", model, "--run", own, *ENCODER)
    assert "run of the task kgc, not csts" in refused(capsys, *command, "--task", "csts")
    other = write_graph(tmp_path / "other")
    (other / "relations.tsv").write_text("_is_at\there\n_does\tdoes\n_sits_with\twith\n")
    assert "has other examples" in refused(capsys, *command, "--data", other)
    assert "with other options" in refused(capsys, *command, "--columns", "label=x")
    named = refused(capsys, *command, "--data", graph, "--split-seed", "1")
    assert "--split-seed splits a single file" in named


@pytest.mark.parametrize(
    "command",
    [
        ("similarity", "a", "b", "--condition", "c"),
        ("analyse",),
        ("embed", "FILE", "--out", "x.npy"),
    ],
)
def test_commands_for_pairs_refuse_such_a_run(capsys, own, graph, command):
    command = [graph / "entities.tsv" if word == "FILE" else word for word in command]
    said = refused(capsys, *command, "--run", own)
    assert "this command needs rated pairs" in said


def test_a_damaged_run_is_told_in_a_line(capsys, own):
    manifest = json.loads((own / "run.json").read_text())
    triples = (own / "triples.parquet").read_bytes()
    (own / "triples.parquet").write_bytes(triples[:-9])
    assert "cannot be read" in refused(capsys, "evaluate", "--run", own)
    del manifest["data"]["digest"]
    (own / "run.json").write_text(json.dumps(manifest))
    assert cli.run(["evaluate", "--run", str(own)]) == 1
    assert "was damaged: the key 'data.digest' is missing" in capsys.readouterr().err


def test_a_run_says_of_which_kind_it_is(capsys, own):
    manifest = json.loads((own / "run.json").read_text())
    assert manifest.pop("kind") == "ranking"
    # As written before kinds had names.
    (own / "run.json").write_text(json.dumps({**manifest, "ranking": True}))
    assert ok(capsys, "evaluate", "--run", own, "--head", "none")["results"][0]["task"] == "kgc"
    (own / "run.json").write_text(json.dumps({**manifest, "kind": "odd"}))
    assert cli.run(["evaluate", "--run", str(own)]) == 1
    error = capsys.readouterr().err
    assert "has kind = 'odd': there is no kind of task 'odd'." in error
    assert "dialogue, ranking, rated" in error


def test_heads_are_fitted_and_chosen_on_dev(capsys, own):
    fit = ("fit-head", "--run", own, "--set", "epochs=3", "batch_size=16")
    full = ok(capsys, *fit, "--head", "hypernet-full")
    assert full["name"] == "hypernet-full@separate"
    assert (full["n_train"], full["n_dev"], full["subtract"]) == (42, 7, False)
    assert 0 < full["dev_mrr"] <= 1
    linear = ok(capsys, *fit, "--head", "linear")
    assert linear["name"] == "linear@concat-sent-cond+c"
    again = ok(capsys, *fit, "--head", "hypernet-full", "--name", "again")
    assert again["dev_mrr"] == full["dev_mrr"]
    listed = ok(capsys, "heads", "--run", own)["heads"]
    assert {row["name"]: row["dev_mrr"] for row in listed} == {
        row["name"]: row["dev_mrr"] for row in (full, linear, again)
    }


def test_a_score_of_a_sample_of_dev_is_named_so(capsys, monkeypatch, own):
    monkeypatch.setattr("llmcond.kinds.ranking.examples._DEV_QUERIES", 2)
    monkeypatch.setattr("llmcond.progress.EVERY_SECONDS", 0)
    command = ("fit-head", "--run", own, "--head", "hadamard", "--set", "epochs=2")
    assert cli.run([str(one) for one in command]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(" of 2, dev MRR on 2 queries " in line for line in lines)
    assert " chosen on 2 queries of dev; dev MRR " in lines[-1]


@pytest.fixture(scope="module")
def fitted(extracted, tmp_path_factory):
    """A run with a head of each kind of features."""
    folder = shutil.copytree(extracted, tmp_path_factory.mktemp("fitted") / "run")
    for head in ("hypernet-full", "linear"):
        command = ["fit-head", "--run", str(folder), "--head", head, "--set", "epochs=3"]
        assert cli.run([*command, "batch_size=16"]) == 0
    return folder


def test_zero_shot_and_the_rule_stand_beside_heads(capsys, fitted):
    rows = {row["name"]: row for row in ok(capsys, "evaluate", "--run", fitted)["results"]}
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
    # The relation is ignored there: a head entity is next to itself, which answers nothing.
    assert rows["none@separate"]["hits@1"] == 0
    assert rows["rule:reverse"]["reversible"]["mrr"] == 1
    assert rows["rule:reverse"]["head"] == "rule:reverse"
    assert rows["hypernet-full@separate"]["selected_on"] == "dev"


def test_what_the_graph_tells_is_named_in_every_row(capsys, fitted):
    command = ("evaluate", "--run", fitted, "--head", "hypernet-full", "--split", "dev")
    (plain,) = (r for r in ok(capsys, *command)["results"] if r["head"] == "hypernet-full")
    asked = ("--rerank", "1:0.2:no-head", "--exclude-head", "--reverse", "--by-relation")
    rows = ok(capsys, *command, *asked, "--ties", "pessimistic")["results"]
    assert [row["head"] for row in rows] == ["none", "rule:reverse", "hypernet-full"]
    for row in (rows[0], rows[2]):
        assert (row["ties"], row["rerank"]) == ("pessimistic", "1:0.2:no-head")
        assert (row["exclude_head"], row["reverse"]) == (True, True)
        assert set(row["by_relation"]) == {"_is_at", "_does", "_sits_with"}
        assert sum(part["n"] for part in row["by_category"].values()) == row["n"]
    assert rows[2]["mrr"] != plain["mrr"]


def test_each_query_is_told_with_its_ranks(capsys, fitted, tmp_path):
    files = ("--predictions", tmp_path / "ranks.csv", "--report", tmp_path / "page.html")
    results = ok(capsys, "evaluate", "--run", fitted, "--by-relation", *files)["results"]
    with (tmp_path / "ranks.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    about = ["row", "direction", "head", "relation", "answer"]
    texts = ["head_text", "relation_text", "answer_text"]
    assert list(rows[0]) == [*about, *texts, *(one["name"] for one in results)]
    asked = [[row[key] for key in (*about[1:], "relation_text")] for row in (rows[0], rows[7])]
    assert asked == [
        ["forward", "p05", "_sits_with", "p01", "people"],
        ["backward", "p01", "_sits_with", "p05", "inverse people"],
    ]
    data = embedded(tmp_path / "page.html")
    ranks = {one["name"]: one["rank"] for one in data["systems"]}
    by_relation = data["conditions"]
    place = [data["texts"][i] for i in by_relation["text"]].index("inverse people")
    for number, one in enumerate(sorted(results, key=lambda one: -one["mrr"])):
        own = np.array([float(row[one["name"]]) for row in rows])
        assert (1 / own).mean() == pytest.approx(one["mrr"])
        assert ranks[one["name"]] == own.tolist()
        mine = [row["relation_text"] == "inverse people" for row in rows]
        expected = 100 * (1 / own[mine]).mean()
        assert by_relation["figure"][number][place] == pytest.approx(expected, abs=0.051)
    said = (tmp_path / "page.html").read_text()
    for heading in ("By part", "By category of relations", "By relation", "inverse people"):
        assert heading in said


def test_triples_from_elsewhere_are_ranked_as_the_runs_own(capsys, graph, own, tmp_path):
    fit = ("fit-head", "--run", own, "--head", "linear", "--set", "epochs=1", "batch_size=16")
    ok(capsys, *fit)
    command = ("evaluate", "--run", own, "--exclude-head", "--reverse")
    usual = ok(capsys, *command)
    assert ok(capsys, *command, "--data", graph / "test.tsv") == usual
    assert ok(capsys, *command, "--data", graph) == usual
    assert ok(capsys, *command, "--data", graph, "--split", "dev") == ok(
        capsys, *command, "--split", "dev"
    )
    # Nobody asked before where activities are: bi-encoders need new inputs, and both are answers.
    new = tmp_path / "new.tsv"
    new.write_text("d0\t_is_at\tl0\nd0\t_is_at\tl1\nd0\t_is_at\tl1\np00\t_is_at\tl0\n")
    results = ok(capsys, *command, "--data", new)["results"]
    assert {row["n"] for row in results} == {6}
    assert all(row["mrr"] > 0 for row in results)
    assert cli.run([str(one) for one in (*command, "--data", new)]) == 0
    said = capsys.readouterr().err
    assert "new.tsv: duplicate triples, counted once: 1" in said
    assert "warning: 1 of 3 triples of new.tsv are in the run's train split" in said
    new.write_text("d0\t_is_at\tl9\np77\t_is_at\tl0\n")
    said = refused(capsys, *command, "--data", new)
    assert "entities that the run's graph lacks, 2 in all: 'l9', 'p77' (triples: 2" in said


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--rerank", "5"), "expected HOPS:ALPHA"),
        (("--rerank", "0:1"), "expected HOPS:ALPHA"),
        (("--rerank", "1:0.1:head"), "expected HOPS:ALPHA"),
        (("--ties", "kind"), "Legal: realistic, optimistic, pessimistic"),
        (("--split", "train2"), "Legal: train, dev, test"),
        (("--head", "mlp"), "no fitted head 'mlp'"),
        (("--predictions", "x.txt"), "has the suffix .txt"),
        (("--report", "x.csv"), "name an .html or .htm file"),
        (("--rating-range", "1", "5"), "for rated rows, and the task kgc has none"),
        (
            ("--data", "GRAPH", "--rating-range", "1", "5"),
            "for rated rows, and the task kgc has none",
        ),
        (("--data", "GRAPH/entities.tsv"), "2 columns; expected head, relation and tail"),
        (("--data", "GRAPH", "--drop-leaks"), "there is no --drop-leaks"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, fitted, graph, asked, words):
    asked = [text.replace("GRAPH", str(graph)) for text in asked]
    assert words in refused(capsys, "evaluate", "--run", fitted, *asked)


def test_rankings_are_asked_of_rankings_only(capsys, tiny_run):
    said = refused(capsys, "evaluate", "--run", tiny_run, "--exclude-head")
    assert "--exclude-head is for knowledge graphs" in said
    said = refused(capsys, "evaluate", "--run", tiny_run, "--ties", "optimistic")
    assert "--ties is for tasks that rank candidates" in said


def test_a_sweep_ranks_and_resumes(capsys, own, tmp_path):
    command = ("sweep", "--run", own, "--head", "concat", "hadamard", "--seeds", "2")
    command += ("--vary", "learning_rate=0.001,0.01", "--set", "epochs=2", "batch_size=16")
    done = ok(capsys, *command, "--workers", "1", "--plot-steps", tmp_path / "steps.svg")
    assert "MRR on dev" in (tmp_path / "steps.svg").read_text()
    rows = done["results"]
    assert len(rows) == 4
    assert done["failures"] == []
    assert [row["mrr"] for row in rows] == sorted((row["mrr"] for row in rows), reverse=True)
    assert all(row["n"] == 14 and "spearman" not in row for row in rows)
    assert ok(capsys, *command) == done


def test_prompts_are_compared_over_queries(capsys, own, model, tmp_path):
    command = ("compare-prompts", "--model", model, "--run", own, *ENCODER, "--heads", "linear")
    command += ("--prompts", "concat-sent-cond", "concat-cond-sent", "control-no-condition")
    command += ("--seeds", "1", "--set", "epochs=2", "batch_size=16", "--workers", "1")
    found = ok(capsys, *command, "--baseline", "concat-sent-cond", "--keep")
    rows = {row["name"]: row for row in found["results"]}
    assert rows["linear@concat-cond-sent+c"]["against"] == "linear@concat-sent-cond+c"
    difference = rows["linear@concat-cond-sent+c"]["difference"]["mrr"]
    assert difference["low"] <= difference["value"] <= difference["high"]
    assert "dev_mrr" in ok(capsys, "heads", "--run", own)["heads"][0]
    page = tmp_path / "page.html"
    assert ok(capsys, *command, "--baseline", "concat-sent-cond", "--report", page) == found
    data = embedded(page)
    assert {one["name"] for one in data["systems"]} == set(rows)
    said = page.read_text()
    assert "Each system is compared with the baseline" in said
    assert "Scores by subset" not in said  # figures of parts are evaluate's


def test_a_triple_is_completed_by_name_or_id(capsys, fitted):
    command = ("complete", "--run", fitted, "--head", "hypernet-full")
    head = (*command, "--head-entity", "p01", "--relation", "_is_at")
    found = ok(capsys, *head, "-k", "3", "--no-filtered")
    assert found["head"] == "hypernet-full@separate"
    rows = found["results"]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    assert rows[0]["score"] >= rows[1]["score"] >= rows[2]["score"]
    assert "p01" not in {row["id"] for row in rows}
    by_name = (*command, "--head-entity", "two men, red coat", "--relation", "_sits_with")
    every = ok(capsys, *by_name, "-k", "99", "--no-filtered")["results"]
    assert {row["id"] for row in every if row["known"]} == {"p04"}
    assert len(every) == 23
    left = ok(capsys, *by_name, "-k", "99")["results"]
    assert {row["id"] for row in every} - {row["id"] for row in left} == {"p04"}
    tail = ok(capsys, *command, "--tail-entity", "l1", "--relation", "_is_at", "--no-filtered")
    known = {row["id"] for row in tail["results"] if row["known"]}
    assert known <= {f"p{i:02}" for i in range(1, 16, 4)}


@pytest.mark.parametrize("head", ["hypernet-full", "linear"])
def test_a_completer_ranks_as_evaluate_does(capsys, fitted, graph, head):
    rows = [line.split("\t") for line in (graph / "test.tsv").read_text().splitlines()]
    completer = llmcond.load_completer(fitted, head, exclude_head=False, reverse=True)
    ranks = completer.rank(rows)
    (row,) = (
        row
        for row in ok(capsys, "evaluate", "--run", fitted, "--reverse")["results"]
        if row["head"] == head
    )
    for column, side in enumerate(("forward", "backward")):
        assert (1 / ranks[:, column]).mean() == pytest.approx(row[side]["mrr"])
    best = completer.top(head=rows[0][0], relation=rows[0][1], k=24, filtered=False)
    assert best[0].score == max(one.score for one in best)


def test_a_query_that_no_split_asks_is_encoded(fitted):
    completer = llmcond.load_completer(fitted, "linear", device="cpu")
    # Activities have no place in any split.
    found = completer.top(head="d0", relation="_is_at", k=3)
    assert len(found) == 3
    joint = llmcond.load_completer(fitted, "none", prompt="concat-sent-cond", device="cpu")
    asked = joint.top(head="p00", relation="_is_at", k=24, filtered=False)
    vector = joint._encode_joint(np.array([[joint.graph.entities.ids.index("p00"), 0]]))
    stored = joint._examples.features(joint._predictor.view)
    key = joint.graph.entities.ids.index("p00") * 6
    place = int(np.searchsorted(stored.arrays.joint_input_keys, key))
    assert stored.arrays.joint_input_keys[place] == key
    np.testing.assert_allclose(vector.read()[0], stored.arrays.joint[place], atol=2e-3)
    assert len(asked) == 23


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--head-entity", "p99"), "the graph has no entity 'p99'. Did you mean 'p0"),
        (
            ("--head-entity", "p01", "--tail-entity", "p02"),
            "give either --head-entity or --tail-entity",
        ),
        ((), "give either --head-entity or --tail-entity"),
        (("--head-entity", "p01", "-k", "0"), "at least 1"),
        (("--head-entity", "p01", "--head", "mlp"), "no fitted head 'mlp'"),
        (("--head-entity", "p01", "--rerank", "x"), "expected HOPS:ALPHA"),
    ],
)
def test_what_cannot_be_completed_is_told(capsys, fitted, asked, words):
    command = ("complete", "--run", fitted, "--relation", "_is_at")
    assert words in refused(capsys, *command, *asked)


def test_only_a_graph_can_be_completed(capsys, tiny_run):
    command = ("complete", "--run", tiny_run, "--head-entity", "a", "--relation", "b")
    assert "has no knowledge graph" in refused(capsys, *command)


def test_without_data_a_graph_of_our_own_is_completed(capsys, model, tmp_path):
    folder = tmp_path / "run"
    command = ("extract", "--task", "kgc", "--model", model, "--run", folder, *ENCODER)
    assert ok(capsys, *command)["prompts"]["separate"]["n_inputs"] == 270 + 2 * 9
    rows = ok(capsys, "evaluate", "--run", folder, "--exclude-head")["results"]
    assert [(row["head"], row["n"]) for row in rows] == [("none", 720), ("rule:reverse", 720)]
    # Of a thing all nine relations are asked, so what ignores the relation is at chance.
    assert rows[0]["hits@1"] < 0.1
