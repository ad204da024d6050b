"""Fits that start from the parameters of a fitted head, their logs, and the default head."""

import json
import shutil

import numpy as np
import pytest
from helpers.checkpoints import change_json
from helpers.commands import run_json, run_rejected

from llmcond.base.run_log import log_path, read_log
from llmcond.runs import open_any_run

pytestmark = pytest.mark.usefixtures("one_thread")

#: Settings with which a fit hardly changes its initial parameters.
STILL = ("--set", "epochs=1", "learning_rate=1e-9", "dropout=0")
LINEAR = "linear@concat-sent-cond"


@pytest.fixture
def run(fitted, tmp_path):
    return shutil.copytree(fitted, tmp_path / "run")


@pytest.fixture
def fit(capsys, run):
    """Return a function that fits a linear head on the run."""

    def fit_head(*options, head="linear", folder=run, command=run_json):
        return command(capsys, "fit-head", "--run", folder, "--head", head, *options)

    return fit_head


def tensors_of(run, name):
    return open_any_run(run).load_head(name).head.tensors


def assert_close_tensors(first, second, atol=1e-5):
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(value, second[name], rtol=0, atol=atol)


def test_fit_starts_from_parameters_of_head(fit, run):
    fit("--seed", "7", "--start", LINEAR, "--name", "still", *STILL)
    assert_close_tensors(tensors_of(run, "still"), tensors_of(run, LINEAR))
    record, start_record = (
        json.loads((run / f"heads/{name}/head.json").read_text()) for name in ("still", LINEAR)
    )
    assert record["start"] == {"name": LINEAR, "weights_sha256": start_record["weights_sha256"]}
    assert "start" not in start_record
    assert record["recipe"]["settings"]["learning_rate"] == 1e-9  # of --head, not of the start
    for name in ("first", "second"):
        fit("--set", "epochs=2", "--start", run / "heads" / LINEAR, "--name", name)
    fit("--set", "epochs=2", "--name", "new")
    assert_close_tensors(tensors_of(run, "first"), tensors_of(run, "second"), atol=0)
    assert not np.array_equal(tensors_of(run, "first")["weight"], tensors_of(run, "new")["weight"])
    # The start decides the size and the subtraction.
    fit("--set", "epochs=1", "--dim", "8", "--no-subtract", "--name", "small")
    result = fit("--set", "epochs=1", "--start", "small", "--name", "started")
    assert (result["dim"], result["subtract"]) == (8, False)


def test_both_roles_before_start_from_that_of_bi_encoder(fit, dialogue_run, tmp_path):
    folder = shutil.copytree(dialogue_run, tmp_path / "dialogues")
    fit("--set", "epochs=2", "--name", "bi", head="ccl", folder=folder)
    fit("--start", "bi", "--name", "pairs", *STILL, head="c3l-paper", folder=folder)
    bi, pairs = tensors_of(folder, "bi"), tensors_of(folder, "pairs")
    assert not np.allclose(bi["b1"], bi["b2"], atol=1e-4)
    for role, start_role in (("b1", "b2"), ("b2", "b2"), ("a", "a")):
        np.testing.assert_allclose(pairs[role], bi[start_role], atol=1e-6)
    for head, options, expected in (
        ("weighted", (), "of pair_weights, it has none, and the new head has the shape 8x8"),
        ("rank", ("--set", "map=mlp", "--name", "m"), "of b1, it has the shape 32x32"),
    ):
        start = ("--start", "bi", *options)
        assert expected in fit(*start, head=head, folder=folder, command=run_rejected)


def test_head_that_cannot_be_start_is_rejected(fit, run, dialogue_run):
    fit("--set", "epochs=1", "--with", "dev", "--name", "both")
    descent = "is not fitted by gradient descent"
    rank = dialogue_run / "heads/rank@separate"
    for head, start, options, message in (
        ("mlp", "linear", (), f"{LINEAR} is a linear head, and the recipe"),
        ("pca", "linear", (), f"the head pca {descent}"),
        ("linear", LINEAR, (), f"the new head would replace {LINEAR}"),
        ("linear", LINEAR, ("--dim", "4"), "the shape 32x32, and the new head has the shape 4x32"),
        ("linear", LINEAR, ("--with", "dev"), "starts from new parameters. Leave out --start"),
        ("linear", "both", ("--name", "n"), "both was fitted on dev as well, which is to choose"),
        ("linear", rank, (), "was fitted on the prompt separate"),
    ):
        name = ("--name", "new") if "--dim" in options else ()
        assert message in fit("--start", start, *options, *name, head=head, command=run_rejected)
    path = run / "heads" / LINEAR / "head.json"
    encoder = json.loads(path.read_text())["encoder"]
    change_json(path, encoder={**encoder, "identity": {**encoder["identity"], "max_length": 9}})
    message = fit("--start", LINEAR, "--name", "n", command=run_rejected)
    assert "but the run holds features of" in message


# -- logs --------------------------------------------------------------------------------------


def read_curves(run, name):
    """Return the learning curves of a fit's log, by stage."""
    curves = {}
    for record in read_log(log_path(run, name)):
        if record["event"] == "evaluation":
            entry = {k: v for k, v in record.items() if k not in ("event", "time", "stage")}
            curves.setdefault(record.get("stage", ""), []).append(entry)
    return curves


def test_log_has_learning_curve_of_each_fit(fit, run):
    result = fit("--dim", "4", "--name", "one", "--set", "epochs=2")
    record = json.loads((run / "heads/one/head.json").read_text())["fit"]
    assert read_curves(run, "one") == {"": record["curve"]}
    assert record["curve"][1]["step"] == 2 * record["steps_per_epoch"]
    start, *_, end = read_log(log_path(run, "one"))
    assert (start["config"]["recipe"]["settings"]["dim"], start["config"]["seed"]) == (4, 0)
    assert end["dev_spearman"] == result["dev_spearman"]
    assert end["best_epoch"] == result["best_epoch"]

    fit("--name", "two", "--set", "epochs=1", "members=2")
    members = json.loads((run / "heads/two/head.json").read_text())["fit"]["members"]
    expected = {f"member-{i}": member["curve"] for i, member in enumerate(members)}
    assert read_curves(run, "two") == expected
    fit("--name", "dev", "--with", "dev", "--folds", "2", "--set", "epochs=1")
    assert [*read_curves(run, "dev")] == ["without-dev", "fold-0", "fold-1", ""]

    fit("--dim", "4", head="pca")
    start, end = read_log(log_path(run, "pca@concat-sent-cond"))
    assert (start["event"], end["event"]) == ("start", "end")
    assert 0 < end["explained_variance"] <= 1
    # The log of a failed fit has no end.
    diverging = ("--set", "epochs=9", "learning_rate=1e30")
    fit("--name", "bad", *diverging, head="mlp", command=run_rejected)
    events = {record["event"] for record in read_log(log_path(run, "bad"))}
    assert events <= {"start", "evaluation"}


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
    better = run_json(capsys, *random, "--seed", 0, "--name", "better")
    assert better["dev_spearman"] > 0
    assert run_json(capsys, *similarity)["head"] == "better"
    run_json(capsys, "heads", "--run", run_copy, "--default", "worse")
    assert run_json(capsys, *similarity)["head"] == "worse"
