"""Heads that are fitted on dev too: their rows, folds and scores."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected

from llmcond import cli
from llmcond.base.files import digest_file
from llmcond.base.metrics import METRICS, finite_or_none, spearman
from llmcond.data.rows import join_rows
from llmcond.evaluation.results import cross_validated_gain
from llmcond.features.view import FeatureView
from llmcond.heads import load_recipe
from llmcond.report.tables import dev_gain_text
from llmcond.runs import open_run
from llmcond.runs.examples import RowFeatures
from llmcond.runs.rated import DevFit

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"dim": 4, "epochs": 3, "batch_size": 16}


@pytest.fixture
def fit(capsys, run_copy):
    """Return a function that fits a head on the copy of the run."""

    def fit_head(*arguments, command=run_json):
        fixed = "--head mlp --dim 4 --set epochs=4 batch_size=16".split()
        return command(capsys, "fit-head", "--run", run_copy, *fixed, *arguments)

    return fit_head


def make_dev_fit(opened, weight, on_epoch=lambda *_: None, **settings):
    recipe = load_recipe("mlp").with_settings({**SETTINGS, **settings}, "test")
    view = FeatureView((opened.prompt(None),), True)
    return DevFit(opened, recipe, view, 0, "cpu", weight, on_epoch)


def test_dev_rows_are_repeated_by_weight(run_copy):
    opened, epochs = open_run(run_copy), []
    train, dev = (opened.rows(split).take(opened.rows(split).rated) for split in ("train", "dev"))
    dev_fit = make_dev_fit(opened, 2, lambda *args: epochs.append(args[0]))
    view = FeatureView((opened.prompt(None),), True)
    expected = RowFeatures(join_rows([train, dev, dev]), opened.store()).pairs(view)
    record = dev_fit.fit().fit.record
    assert len(expected) == len(train) + 2 * len(dev)
    assert [epoch for epoch in epochs if epoch == int(epoch)] == [1, 2, 3]
    assert record["steps_per_epoch"] == -(-len(expected) // 16)
    assert (record["best_epoch"], record["trained_on"]) == (3, ["train", "dev"])


def test_folds_are_predicted_by_heads_fitted_without_them(run_copy):
    """Only heads that were fitted on dev can predict its shuffled ratings."""
    opened = open_run(run_copy)
    dev = opened.rows("dev")
    shuffled = np.random.default_rng(0).permutation(dev.rating)
    opened.data.splits["dev"] = dev = replace(dev, rating=shuffled)
    settings = {"dim": 16, "epochs": 20, "dropout": 0.0, "learning_rate": 1e-2}
    dev_fit = make_dev_fit(opened, 8, **settings)
    result = dev_fit.folds(3)
    assert [result[key] for key in ("folds", "n", "n_pairs")] == [3, 12, 6]
    in_sample = spearman(dev_fit._predict(dev_fit.fit(), dev), shuffled)
    assert in_sample > result["trained"]["spearman"] + 0.3


def test_fit_with_dev_is_reproducible_and_recorded(fit, run_copy):
    def digest():
        return digest_file(next((run_copy / "heads" / "both").glob("*.safetensors")))

    options = ("--with", "dev", "--name", "both", "--weight")
    result = fit(*options, 2, "--folds", 3)
    first = digest()
    assert (result["trained_on"], result["weight"], result["n_dev"]) == (["train", "dev"], 2, 12)
    assert (result["dev_spearman"], result["best_epoch"]) == (None, 4)
    folds = result["folds"]
    gain = folds["trained"]["spearman"] - folds["without"]["spearman"]
    assert folds["difference"]["spearman"] == pytest.approx(gain)
    assert fit(*options, 2, "--folds", 3)["folds"] == folds
    assert digest() == first
    fit(*options, 3)
    assert digest() != first


def test_conditions_of_dev_are_seen_by_a_head_that_knows_dev(
    capsys, write_rows, small_rows, model, tmp_path
):
    rows = [(*row[:2], f"the {n % 3}", row[3]) for n, row in enumerate(small_rows)]
    train, dev = [row for row in rows[:36] if row[2] != "the 2"], rows[2:36:3]
    for name, part in (("train", train), ("dev", dev), ("test", rows[36:])):
        write_rows(part, f"data/{name}.csv")
    options = ("--model", model, "--data", tmp_path / "data", "--pooling", "mean", "--run")
    folder = tmp_path / "run"
    run_json(capsys, "extract", *options, folder, "--dtype", "float32")
    fit = ("fit-head", "--run", folder, "--head", "linear", "--dim", 4, "--set", "epochs=1")
    unseen = {}
    for name, extra in (("plain", ()), ("both", ("--with", "dev"))):
        run_json(capsys, *fit, "--name", name, *extra)
        command = ("--run", folder, "--head", name, "--split", "test")
        *_, result = run_json(capsys, "evaluate", *command)["results"]
        *_, row = run_json(capsys, "analyse", *command, "--what", "conditions")["conditions"]
        assert (result["name"], row["name"]) == (name, name)
        unseen[name] = (result.get("unseen", {"n": 0})["n"], row["n_unseen"])
    n = sum(row[2] == "the 2" for row in rows[36:])
    assert unseen == {"plain": (n, n), "both": (0, 0)}


def test_head_fitted_on_dev_is_not_scored_on_dev(
    fit, run_copy, capsys, caplog, write_rows, small_rows
):
    def command(name, *options):
        return run_json(capsys, name, "--run", run_copy, *options)

    fit("--with", "dev", "--name", "both")
    assert command("heads")["heads"][0]["taken"] == "fitted last, on dev too"
    fit("--name", "plain")
    heads = {row["name"]: row for row in command("heads")["heads"]}
    assert heads["both"]["dev_spearman"] is None
    assert "fitted on dev, so without a dev score: both" in heads["plain"]["taken"]
    # By default, the head is scored on the test split.
    rows = command("evaluate", "--head", "both")["results"]
    assert {row["split"] for row in rows} == {"test"}
    on_dev = ("evaluate", "--run", run_copy, "--split", "dev")
    message = run_rejected(capsys, *on_dev, "--head", "both")
    assert "the head both was fitted on dev" in message
    names = {row["name"] for row in run_json(capsys, *on_dev)["results"]}
    assert "plain" in names
    assert "both" not in names
    assert cli.run(["evaluate", "--run", str(run_copy)]) == 0
    assert "Also trained on dev: both" in " ".join(capsys.readouterr().out.split())
    # Other data with pairs of dev cause a warning.
    command("evaluate", "--head", "both", "--data", write_rows(small_rows), "--split", "test")
    assert "in the run's dev split, which was trained on" in caplog.text


def test_invalid_options_are_reported_in_one_line(fit, run_copy, dialogue_run, capsys):
    for options, expected in (
        ("--weight 2", "--weight needs --with dev. Add it"),
        ("--with dev --folds 7", "dev has 6 sentence pairs with ratings, which are too few for 7"),
    ):
        assert expected in fit(*options.split(), command=run_rejected)
    assert not (run_copy / "heads").exists()
    for folder, head, expected in (
        (run_copy, "pca", "the head pca does not learn from ratings"),
        (dialogue_run, "rank", "--with dev is for rated pairs"),
    ):
        arguments = ("fit-head", "--run", folder, "--head", head, "--name", "x", "--with", "dev")
        assert expected in run_rejected(capsys, *arguments)


@pytest.mark.parametrize("name", ["spearman", "accuracy"])
def test_gain_is_reported_by_seen_and_unseen_conditions(run_copy, name):
    metric = METRICS[name]
    train, dev = (open_run(run_copy).rows(split) for split in ("train", "dev"))
    new = np.arange(len(dev)) % 3 == 0
    texts = [f"new {c}" if is_new else c for c, is_new in zip(dev.condition, new, strict=True)]
    without, trained = np.random.default_rng(0).random((2, len(dev)))
    changed = replace(dev, condition=texts)
    result = cross_validated_gain(2, without, trained, changed, train, metric)
    score = result["trained"][name]
    assert score == pytest.approx(metric(trained, dev.rating, dev.pair))
    assert f"{metric.heading} {metric.format(score)}" in dev_gain_text(result)
    for part, rows in (("seen", ~new), ("unseen", new)):
        gain = result["by_condition"][part]
        assert gain["n"] == rows.sum()
        expected = finite_or_none(metric(without[rows], dev.rating[rows], dev.pair[rows]))
        assert gain["without"][name] == pytest.approx(expected)
