"""Fits that start from the parameters of a fitted head."""

import json
import shutil

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.run_log import log_path, read_log
from llmcond.runs import open_any_run
from llmcond.runs.examples import load_examples

#: Settings with which a fit hardly changes its initial parameters.
STILL = ("--set", "epochs=1", "learning_rate=1e-9", "dropout=0")


@pytest.fixture
def run(fitted, tmp_path):
    return shutil.copytree(fitted, tmp_path / "run")


@pytest.fixture
def dialogues(dialogue_run, tmp_path):
    return shutil.copytree(dialogue_run, tmp_path / "dialogues")


def tensors_of(run, name):
    return open_any_run(run).load_head(name).head.tensors


def assert_equal_tensors(first, second, **tolerance):
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(value, second[name], rtol=0, atol=tolerance.get("atol", 0))


def test_fit_starts_from_parameters_of_head(capsys, run):
    command = ("fit-head", "--run", run, "--head", "linear", "--seed", "7")
    start = ("--start", "linear@concat-sent-cond")
    run_json(capsys, *command, *start, "--name", "still", *STILL)
    assert_equal_tensors(
        tensors_of(run, "still"), tensors_of(run, "linear@concat-sent-cond"), atol=1e-5
    )
    record = json.loads((run / "heads/still/head.json").read_text())
    start_record = json.loads((run / "heads/linear@concat-sent-cond/head.json").read_text())
    assert record["start"] == {
        "name": "linear@concat-sent-cond",
        "weights_sha256": start_record["weights_sha256"],
    }
    assert "start" not in start_record
    assert record["recipe"]["settings"]["learning_rate"] == 1e-9  # of --head, not of the start


def test_same_start_and_seed_give_same_head(capsys, run):
    command = ("fit-head", "--run", run, "--head", "linear", "--set", "epochs=2")
    start = ("--start", run / "heads/linear@concat-sent-cond")
    for name in ("first", "second"):
        run_json(capsys, *command, *start, "--name", name)
    run_json(capsys, *command, "--name", "new")
    first, second, new = (tensors_of(run, name) for name in ("first", "second", "new"))
    assert_equal_tensors(first, second)
    assert not np.array_equal(first["weight"], new["weight"])


def evaluations(run, name):
    """Return the learning curves of a fit's log, by stage."""
    curves = {}
    for record in read_log(log_path(run, name)):
        if record["event"] == "evaluation":
            stage = record.get("stage", "")
            entry = {k: v for k, v in record.items() if k not in ("event", "time", "stage")}
            curves.setdefault(stage, []).append(entry)
    return curves


def test_log_has_learning_curve_of_each_fit(capsys, run):
    command = ("fit-head", "--run", run, "--head", "linear", "--dim", "4")
    result = run_json(capsys, *command, "--name", "one", "--set", "epochs=2")
    fit = json.loads((run / "heads/one/head.json").read_text())["fit"]
    assert evaluations(run, "one") == {"": fit["curve"]}
    assert fit["curve"][1]["step"] == 2 * fit["steps_per_epoch"]
    start, *_, end = read_log(log_path(run, "one"))
    assert (start["config"]["recipe"]["settings"]["dim"], start["config"]["seed"]) == (4, 0)
    assert end["dev_spearman"] == result["dev_spearman"]
    assert end["best_epoch"] == result["best_epoch"]

    run_json(capsys, *command, "--name", "two", "--set", "epochs=1", "members=2")
    fit = json.loads((run / "heads/two/head.json").read_text())["fit"]
    curves = [member["curve"] for member in fit["members"]]
    assert evaluations(run, "two") == {"member-0": curves[0], "member-1": curves[1]}

    on_dev = ("--with", "dev", "--folds", "2", "--set", "epochs=1")
    run_json(capsys, *command, "--name", "dev", *on_dev)
    assert [*evaluations(run, "dev")] == ["without-dev", "fold-0", "fold-1", ""]


def test_log_of_head_in_closed_form_has_its_figures(capsys, run):
    run_json(capsys, "fit-head", "--run", run, "--head", "pca", "--dim", "4")
    start, end = read_log(log_path(run, "pca@concat-sent-cond"))
    assert (start["event"], end["event"]) == ("start", "end")
    assert 0 < end["explained_variance"] <= 1


def test_log_of_failed_fit_shows_its_epochs(capsys, run):
    diverging = ("--set", "epochs=9", "learning_rate=1e30")
    run_rejected(capsys, "fit-head", "--run", run, "--head", "mlp", "--name", "bad", *diverging)
    records = read_log(log_path(run, "bad"))
    assert {record["event"] for record in records} <= {"start", "evaluation"}


def test_start_decides_size_and_subtraction(capsys, run):
    command = ("fit-head", "--run", run, "--head", "linear", "--set", "epochs=1")
    run_json(capsys, *command, "--dim", "8", "--no-subtract", "--name", "small")
    result = run_json(capsys, *command, "--start", "small", "--name", "started")
    assert (result["dim"], result["subtract"]) == (8, False)


def test_each_member_starts_from_same_member(capsys, run):
    command = ("fit-head", "--run", run, "--head", "linear")
    run_json(capsys, *command, "--set", "epochs=1", "members=2", "--name", "two")
    run_json(capsys, *command, "--start", "two", "--name", "still", *STILL, "members=2")
    assert_equal_tensors(tensors_of(run, "still"), tensors_of(run, "two"), atol=1e-5)
    message = run_rejected(capsys, *command, "--start", "two", "--name", "one")
    assert "the head to start from has 2 members, but the new head has 1" in message


def test_both_roles_before_start_from_that_of_bi_encoder(capsys, dialogues):
    command = ("fit-head", "--run", dialogues)
    run_json(capsys, *command, "--head", "ccl", "--set", "epochs=2", "--name", "bi")
    run_json(capsys, *command, "--head", "c3l-paper", "--start", "bi", "--name", "pairs", *STILL)
    bi, pairs = tensors_of(dialogues, "bi"), tensors_of(dialogues, "pairs")
    assert not np.allclose(bi["b1"], bi["b2"], atol=1e-4)
    for role, start_role in (("b1", "b2"), ("b2", "b2"), ("a", "a")):
        np.testing.assert_allclose(pairs[role], bi[start_role], atol=1e-6)
    message = run_rejected(capsys, *command, "--head", "weighted", "--start", "bi")
    assert "of pair_weights, it has none, and the new head has the shape 8x8" in message
    message = run_rejected(
        capsys, *command, "--head", "rank", "--set", "map=mlp", "--start", "bi", "--name", "mlp"
    )
    assert "has other parameters than the new head: of b1, it has the shape 32x32" in message


def test_head_of_graph_starts_from_head_of_other_run(capsys, graph, tiny_bert, tmp_path):
    options = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
    for name in ("first", "second"):
        run = tmp_path / name
        llmcond.extract(model=str(tiny_bert), **options, run=run, data=str(graph), task="kgc")
    changes = {"epochs": "1", "queue": "0"}
    llmcond.fit_head(run=tmp_path / "first", head="hadamard", set=changes)
    command = ("fit-head", "--run", run, "--head", "hadamard", "--name", "still", *STILL, "queue=0")
    run_json(capsys, *command, "--start", tmp_path / "first/heads/hadamard@separate")
    head = tensors_of(tmp_path / "first", "hadamard@separate")
    assert_equal_tensors(tensors_of(run, "still"), head, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear", "--start", "missing"), "missing"),
        (("mlp", "--start", "linear"), "linear@concat-sent-cond is a linear head, and the recipe"),
        (("pca", "--start", "linear"), "the head pca is not fitted by gradient descent"),
        (("none", "--start", "linear"), "the head none is not fitted by gradient descent"),
        (("linear", "--start", "linear"), "the new head would replace linear@concat-sent-cond"),
        (
            ("linear", "--start", "linear", "--name", "n", "--dim", "4"),
            "of weight, it has the shape 32x32, and the new head has the shape 4x32",
        ),
        (
            ("linear", "--start", "linear", "--no-subtract"),
            "reads other features than the new head: concat-sent-cond (joint, minus e(c)), not "
            "concat-sent-cond (joint)",
        ),
        (
            ("linear", "--start", "linear", "--with", "dev"),
            "--with dev measures a fit that starts from new parameters. Leave out --start",
        ),
    ],
)
def test_head_that_cannot_be_start_is_rejected(capsys, fitted, arguments, message):
    assert message in run_rejected(capsys, "fit-head", "--run", fitted, "--head", *arguments)


def test_start_on_other_features_is_rejected(capsys, run, dialogues):
    message = run_rejected(
        capsys, "fit-head", "--run", run, "--head", "linear",
        "--start", dialogues / "heads/rank@separate",
    )  # fmt: skip
    assert "was fitted on the prompt separate" in message
    assert "is missing in the run" in message
    record_path = run / "heads/linear@concat-sent-cond/head.json"
    record = json.loads(record_path.read_text())
    record["encoder"]["identity"]["max_length"] = 7
    record_path.write_text(json.dumps(record))
    message = run_rejected(
        capsys, "fit-head", "--run", run, "--head", "linear", "--start", "linear", "--name", "n"
    )
    assert "but the run holds features of" in message


def test_head_that_was_fitted_on_dev_is_no_start(capsys, run):
    command = ("fit-head", "--run", run, "--head", "linear", "--set", "epochs=1")
    run_json(capsys, *command, "--with", "dev", "--name", "both")
    message = run_rejected(capsys, *command, "--start", "both", "--name", "n")
    assert "both was fitted on dev as well, which is to choose the epoch" in message


# -- the default head --------------------------------------------------------------------------


def test_head_that_does_not_beat_zero_shot_is_not_the_default(capsys, caplog, run_copy):
    random = ("fit-head", "--run", run_copy, "--head", "random", "--dim", 2)
    similarity = ("similarity", "a dog", "a cat", "--condition", "the animal", "--run", run_copy)
    with caplog.at_level("INFO", logger="llmcond"):
        worse = run_json(capsys, *random, "--seed", 1, "--name", "worse")
    (line,) = [text for text in caplog.messages if "zero-shot" in text]
    assert line.startswith(
        "worse is not better on dev than zero-shot (none@concat-sent-cond, Spearman -32.5), so it "
        "does not become the default. To use it: --head worse, or llmcond heads --run "
    )
    assert worse["dev_spearman"] < -0.5
    assert run_json(capsys, *similarity)["head"] == "none"
    assert run_json(capsys, *similarity, "--head", "worse")["head"] == "worse"
    assert not any(head["taken"] for head in run_json(capsys, "heads", "--run", run_copy)["heads"])
    better = run_json(capsys, *random, "--seed", 0, "--name", "better")
    assert better["dev_spearman"] > 0
    assert run_json(capsys, *similarity)["head"] == "better"
    run_json(capsys, "heads", "--run", run_copy, "--default", "worse")
    assert run_json(capsys, *similarity)["head"] == "worse"


@pytest.mark.parametrize("kind", ["ranking", "dialogue"])
def test_zero_shot_of_other_tasks_is_scored_on_dev(tmp_path, tiny_bert, graph, dialogue_run, kind):
    folder = dialogue_run
    if kind == "ranking":
        folder = tmp_path / "run"
        llmcond.extract(model=tiny_bert, data=graph, run=folder, task="kgc", device="cpu")
    examples = load_examples(open_any_run(folder))
    view = examples.run.zero_shot_view(examples.run.prompt(None))
    name, score = examples.score_zero_shot_on_dev(view)
    rows = llmcond.evaluate(run=folder, split="dev").to_json()["results"]
    (expected,) = [row for row in rows if row["name"] == name]
    assert score == pytest.approx(expected[examples.run.dev_metric], rel=1e-4)
