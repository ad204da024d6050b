"""Heads that are fitted on dev as well: the rows, the folds, and where they are scored."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers.commands import ok, refused

from llmcond import cli
from llmcond.data.rows import join_rows
from llmcond.evaluation.dev_gain import CrossValidatedGain
from llmcond.features.view import FeatureView
from llmcond.files import digest_file
from llmcond.heads import load_recipe
from llmcond.metrics import METRICS, finite_or_none, spearman
from llmcond.report.format import dev_gain_text
from llmcond.runs import open_run
from llmcond.runs.dev_fit import DevFit
from llmcond.runs.features import RowFeatures

FIT = "--head mlp --dim 4 --set epochs=4 batch_size=16"


@pytest.fixture
def run(tiny_run, tmp_path):
    """A run of a tiny encoder, without heads."""
    return shutil.copytree(tiny_run, tmp_path / "run")


def fit(capsys, run, *given, command=ok):
    return command(capsys, "fit-head", "--run", run, *FIT.split(), *given)


def test_rows_of_dev_are_taken_as_often_as_its_weight(run):
    opened = open_run(run)
    recipe = load_recipe("mlp").with_settings({"dim": 4, "epochs": 3, "batch_size": 16}, "test")
    view = FeatureView((opened.prompt(None),), True)
    train, dev = (opened.rows(split).take(opened.rows(split).rated) for split in ("train", "dev"))
    expected = RowFeatures(join_rows([train, dev, dev]), opened.store()).pairs(view)
    seen = []
    both = DevFit(opened, recipe, view, 0, "cpu", 2, lambda *args: seen.append(args[0]))
    head = both.fit()
    assert len(expected) == len(train) + 2 * len(dev)
    assert [epoch for epoch in seen if epoch == int(epoch)] == [1, 2, 3]
    assert head.fit.record["steps_per_epoch"] == -(-len(expected) // 16)
    assert head.fit.record["best_epoch"] == 3
    assert head.fit.record["trained_on"] == ["train", "dev"]


def test_a_fold_is_predicted_by_heads_that_have_not_seen_it(run):
    """Ratings of dev that mean nothing are predicted by what has seen them only."""
    opened = open_run(run)
    recipe = load_recipe("mlp").with_settings(
        {"dim": 16, "epochs": 20, "batch_size": 16, "dropout": 0.0, "learning_rate": 1e-2}, "test"
    )
    dev = opened.rows("dev")
    drawn = np.random.default_rng(0).permutation(dev.rating)
    opened.data.splits["dev"] = dev = replace(dev, rating=drawn)
    both = DevFit(
        opened, recipe, FeatureView((opened.prompt(None),), True), 0, "cpu", 8, lambda *_: None
    )
    folded = both.folds(3)
    assert (folded.folds, folded.gain.n, folded.gain.n_pairs) == (3, 12, 6)
    seen = spearman(both._predict(both.fit(), dev), drawn)
    assert seen > folded.gain.trained.value + 0.3


def test_the_same_command_gives_the_same_bits_and_says_dev(run, capsys):
    done = fit(capsys, run, "--with", "dev", "--weight", 2, "--folds", 3, "--name", "both")
    assert (done["trained_on"], done["weight"], done["n_dev"]) == (["train", "dev"], 2, 12)
    assert done["dev_spearman"] is None
    assert done["best_epoch"] == 4
    folds = done["folds"]
    gain = folds["trained"]["spearman"] - folds["without"]["spearman"]
    assert folds["difference"]["spearman"] == pytest.approx(gain)
    weights = [digest_file(next((run / "heads" / "both").glob("*.safetensors")))]
    again = fit(capsys, run, "--with", "dev", "--weight", 2, "--folds", 3, "--name", "both")
    assert again["folds"] == folds
    weights.append(digest_file(next((run / "heads" / "both").glob("*.safetensors"))))
    assert weights[0] == weights[1]
    fit(capsys, run, "--with", "dev", "--weight", 3, "--name", "both")
    assert digest_file(next((run / "heads" / "both").glob("*.safetensors"))) != weights[0]


def test_it_is_never_scored_on_dev(run, capsys):
    fit(capsys, run, "--with", "dev", "--name", "both")
    assert ok(capsys, "heads", "--run", run)["heads"][0]["taken"] == "fitted last, on dev too"
    fit(capsys, run)
    plain = next(path.name for path in (run / "heads").glob("mlp*"))
    heads = {own["name"]: own for own in ok(capsys, "heads", "--run", run)["heads"]}
    assert heads["both"]["dev_spearman"] is None
    assert "fitted on dev, so without a dev score: both" in heads[plain]["taken"]
    # By default the usual split, where it is scored.
    rows = ok(capsys, "evaluate", "--run", run, "--head", "both")["results"]
    assert {own["split"] for own in rows} == {"test"}
    said = refused(capsys, "evaluate", "--run", run, "--head", "both", "--split", "dev")
    assert "the head both was fitted on dev" in said
    names = {
        own["name"] for own in ok(capsys, "evaluate", "--run", run, "--split", "dev")["results"]
    }
    assert plain in names
    assert "both" not in names
    assert cli.run(["evaluate", "--run", str(run)]) == 0
    assert "Also trained on dev: both" in " ".join(capsys.readouterr().out.split())


def test_pairs_of_dev_in_other_rows_are_warned_of(run, write_rows, small_rows, capsys, caplog):
    data = write_rows(small_rows)
    fit(capsys, run, "--with", "dev", "--name", "both")
    ok(capsys, "evaluate", "--run", run, "--head", "both", "--data", data, "--split", "test")
    assert "in the run's dev split, which was trained on" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
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
def test_bad_input_is_refused_in_one_line(run, capsys, given, said):
    assert said in fit(capsys, run, *given.split(), command=refused)
    assert not (run / "heads").exists()


def test_a_head_without_ratings_is_refused(run, capsys):
    given = "--head pca --dim 4 --with dev"
    said = refused(capsys, "fit-head", "--run", run, *given.split())
    assert "the head pca does not learn from ratings" in said


def test_a_run_without_ratings_is_refused(dialogue_run, capsys):
    given = ("--head", "rank", "--name", "both", "--with", "dev")
    said = refused(capsys, "fit-head", "--run", dialogue_run, *given)
    assert "--with dev is for rated pairs" in said
    assert not (dialogue_run / "heads" / "both").exists()


@pytest.mark.parametrize(
    "metric", [METRICS["spearman"], METRICS["accuracy"]], ids=["spearman", "accuracy"]
)
def test_rows_of_new_conditions_are_told_apart(run, metric):
    train, dev = (open_run(run).rows(split) for split in ("train", "dev"))
    new = np.arange(len(dev)) % 3 == 0
    texts = [f"new {text}" if own else text for text, own in zip(dev.condition, new, strict=True)]
    without, trained = np.random.default_rng(0).random((2, len(dev)))
    folded = CrossValidatedGain.of(
        2, without, trained, replace(dev, condition=texts), train, metric
    )
    assert folded.gain.trained.value == pytest.approx(metric(trained, dev.rating, dev.pair))
    assert f"{metric.heading} {metric.format(folded.gain.trained.value)}" in dev_gain_text(folded)
    for name, rows in (("seen", ~new), ("unseen", new)):
        gain = folded.by_condition[name]
        assert gain.n == rows.sum()
        expected = metric(without[rows], dev.rating[rows], dev.pair[rows])
        assert gain.without.value == pytest.approx(expected, nan_ok=True)
        assert gain.to_json()["without"][metric.name] == finite_or_none(gain.without.value)
