"""Heads that are fitted on dev too: their rows, folds and scores."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected

from llmcond import cli
from llmcond.data.rows import join_rows
from llmcond.evaluation.results import CrossValidatedGain
from llmcond.features.view import FeatureView
from llmcond.files import digest_file
from llmcond.heads import load_recipe
from llmcond.metrics import METRICS, finite_or_none, spearman
from llmcond.report.tables import dev_gain_text
from llmcond.runs import open_run
from llmcond.runs.examples import RowFeatures
from llmcond.runs.rated import DevFit

FIT = "--head mlp --dim 4 --set epochs=4 batch_size=16"


@pytest.fixture
def run(tiny_run, tmp_path):
    """A run of a tiny encoder, without heads."""
    return shutil.copytree(tiny_run, tmp_path / "run")


def fit(capsys, run, *arguments, command=run_json):
    return command(capsys, "fit-head", "--run", run, *FIT.split(), *arguments)


def test_dev_rows_are_repeated_by_weight(run):
    opened = open_run(run)
    recipe = load_recipe("mlp").with_settings({"dim": 4, "epochs": 3, "batch_size": 16}, "test")
    view = FeatureView((opened.prompt(None),), True)
    train, dev = (opened.rows(split).take(opened.rows(split).rated) for split in ("train", "dev"))
    expected = RowFeatures(join_rows([train, dev, dev]), opened.store()).pairs(view)
    epochs = []
    dev_fit = DevFit(opened, recipe, view, 0, "cpu", 2, lambda *args: epochs.append(args[0]))
    head = dev_fit.fit()
    assert len(expected) == len(train) + 2 * len(dev)
    assert [epoch for epoch in epochs if epoch == int(epoch)] == [1, 2, 3]
    assert head.fit.record["steps_per_epoch"] == -(-len(expected) // 16)
    assert head.fit.record["best_epoch"] == 3
    assert head.fit.record["trained_on"] == ["train", "dev"]


def test_folds_are_predicted_by_heads_fitted_without_them(run):
    """Only heads that were fitted on dev can predict its shuffled ratings."""
    opened = open_run(run)
    recipe = load_recipe("mlp").with_settings(
        {"dim": 16, "epochs": 20, "batch_size": 16, "dropout": 0.0, "learning_rate": 1e-2}, "test"
    )
    dev = opened.rows("dev")
    shuffled = np.random.default_rng(0).permutation(dev.rating)
    opened.data.splits["dev"] = dev = replace(dev, rating=shuffled)
    dev_fit = DevFit(
        opened, recipe, FeatureView((opened.prompt(None),), True), 0, "cpu", 8, lambda *_: None
    )
    cross_validated = dev_fit.folds(3)
    assert (cross_validated.folds, cross_validated.gain.n, cross_validated.gain.n_pairs) == (
        3,
        12,
        6,
    )
    in_sample = spearman(dev_fit._predict(dev_fit.fit(), dev), shuffled)
    assert in_sample > cross_validated.gain.trained.value + 0.3


def test_fit_with_dev_is_reproducible_and_recorded(run, capsys):
    result = fit(capsys, run, "--with", "dev", "--weight", 2, "--folds", 3, "--name", "both")
    assert (result["trained_on"], result["weight"], result["n_dev"]) == (["train", "dev"], 2, 12)
    assert result["dev_spearman"] is None
    assert result["best_epoch"] == 4
    folds = result["folds"]
    gain = folds["trained"]["spearman"] - folds["without"]["spearman"]
    assert folds["difference"]["spearman"] == pytest.approx(gain)
    weights = [digest_file(next((run / "heads" / "both").glob("*.safetensors")))]
    repeated = fit(capsys, run, "--with", "dev", "--weight", 2, "--folds", 3, "--name", "both")
    assert repeated["folds"] == folds
    weights.append(digest_file(next((run / "heads" / "both").glob("*.safetensors"))))
    assert weights[0] == weights[1]
    fit(capsys, run, "--with", "dev", "--weight", 3, "--name", "both")
    assert digest_file(next((run / "heads" / "both").glob("*.safetensors"))) != weights[0]


def test_head_fitted_on_dev_is_not_scored_on_dev(run, capsys):
    fit(capsys, run, "--with", "dev", "--name", "both")
    assert run_json(capsys, "heads", "--run", run)["heads"][0]["taken"] == "fitted last, on dev too"
    fit(capsys, run)
    plain = next(path.name for path in (run / "heads").glob("mlp*"))
    heads = {row["name"]: row for row in run_json(capsys, "heads", "--run", run)["heads"]}
    assert heads["both"]["dev_spearman"] is None
    assert "fitted on dev, so without a dev score: both" in heads[plain]["taken"]
    # By default, the head is scored on the test split.
    rows = run_json(capsys, "evaluate", "--run", run, "--head", "both")["results"]
    assert {row["split"] for row in rows} == {"test"}
    message = run_rejected(capsys, "evaluate", "--run", run, "--head", "both", "--split", "dev")
    assert "the head both was fitted on dev" in message
    names = {
        row["name"]
        for row in run_json(capsys, "evaluate", "--run", run, "--split", "dev")["results"]
    }
    assert plain in names
    assert "both" not in names
    assert cli.run(["evaluate", "--run", str(run)]) == 0
    assert "Also trained on dev: both" in " ".join(capsys.readouterr().out.split())


def test_dev_pairs_in_other_data_cause_warning(run, write_rows, small_rows, capsys, caplog):
    data = write_rows(small_rows)
    fit(capsys, run, "--with", "dev", "--name", "both")
    run_json(capsys, "evaluate", "--run", run, "--head", "both", "--data", data, "--split", "test")
    assert "in the run's dev split, which was trained on" in caplog.text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--weight 2", "--weight needs --with dev. Add it"),
        ("--folds 5", "--folds needs --with dev"),
        ("--with dev --weight 0", "--weight is 0"),
        ("--with dev --folds 1", "--folds is 1"),
        (
            "--with dev --folds 7",
            "dev has 6 sentence pairs with ratings, which are too few for 7 folds",
        ),
        ("--with test", "Legal: dev"),
    ],
)
def test_invalid_options_are_reported_in_one_line(run, capsys, options, expected):
    assert expected in fit(capsys, run, *options.split(), command=run_rejected)
    assert not (run / "heads").exists()


def test_head_that_ignores_ratings_is_rejected(run, capsys):
    arguments = "--head pca --dim 4 --with dev"
    message = run_rejected(capsys, "fit-head", "--run", run, *arguments.split())
    assert "the head pca does not learn from ratings" in message


def test_run_without_ratings_is_rejected(dialogue_run, capsys):
    arguments = ("--head", "rank", "--name", "both", "--with", "dev")
    message = run_rejected(capsys, "fit-head", "--run", dialogue_run, *arguments)
    assert "--with dev is for rated pairs" in message
    assert not (dialogue_run / "heads" / "both").exists()


@pytest.mark.parametrize(
    "metric", [METRICS["spearman"], METRICS["accuracy"]], ids=["spearman", "accuracy"]
)
def test_gain_is_reported_by_seen_and_unseen_conditions(run, metric):
    train, dev = (open_run(run).rows(split) for split in ("train", "dev"))
    new = np.arange(len(dev)) % 3 == 0
    texts = [
        f"new {text}" if is_new else text for text, is_new in zip(dev.condition, new, strict=True)
    ]
    without, trained = np.random.default_rng(0).random((2, len(dev)))
    cross_validated = CrossValidatedGain.of(
        2, without, trained, replace(dev, condition=texts), train, metric
    )
    assert cross_validated.gain.trained.value == pytest.approx(
        metric(trained, dev.rating, dev.pair)
    )
    assert f"{metric.heading} {metric.format(cross_validated.gain.trained.value)}" in dev_gain_text(
        cross_validated
    )
    for name, rows in (("seen", ~new), ("unseen", new)):
        gain = cross_validated.by_condition[name]
        assert gain.n == rows.sum()
        expected = metric(without[rows], dev.rating[rows], dev.pair[rows])
        assert gain.without.value == pytest.approx(expected, nan_ok=True)
        assert gain.to_json()["without"][metric.name] == finite_or_none(gain.without.value)
