"""A last stage of training on dev as well: its rows, its folds, exact resumption, what is said."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import ok, refused

from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.data.rows import fold_of_pair
from llmcond.errors import UserError
from llmcond.files import digest_file
from llmcond.finetune.settings import StageSettings
from llmcond.finetune.stage import stage_rows
from llmcond.finetune.state import STATE
from llmcond.progress import TrainBar
from llmcond.workflows.last_stage import check_stage_settings

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "--head none --pooling mean --dtype float32 --rank 2 --batch-size 16 --epochs 2"
STAGE = "--learning-rate 1e-2 --then dev --then-share 0.5 --folds 2 --checkpoint-steps 1"


@pytest.fixture(scope="module")
def command(tiny_checkpoint, small_rows, tmp_path_factory) -> list[str]:
    """Train a tiny BERT on small rows, with a last stage on dev and two folds."""
    data = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = ["train-lora", "--model", str(tiny_checkpoint()), "--data", str(data)]
    return [*given, *PLAIN.split(), *STAGE.split()]


@pytest.fixture(scope="module")
def staged(command, tmp_path_factory) -> Path:
    """What that leaves."""
    folder = tmp_path_factory.mktemp("staged") / "run"
    assert run([*command, "--run", str(folder)]) == 0
    return folder


def test_a_stage_has_a_share_of_train_by_pairs_and_dev_repeated(command):
    splits = read_dataset(command[command.index("--data") + 1]).splits
    train, dev = splits["train"], splits["dev"]
    stage = StageSettings(then="dev", then_share=0.25, then_weight=3)
    rows = stage_rows(train, dev, stage, seed=1)
    kept = rows.take(np.arange(len(rows) - 3 * len(dev)))
    assert len(kept.pair_keys()) == round(0.25 * len(train.pair_keys()))
    assert set(kept.pair_keys()) < set(train.pair_keys())
    assert len(kept) == 2 * len(kept.pair_keys())
    for copy in range(3):
        part = rows.take(np.arange(len(kept) + copy * len(dev), len(kept) + (copy + 1) * len(dev)))
        assert part.texts == dev.texts
        assert part.rating.tolist() == dev.rating.tolist()
    assert stage_rows(train, dev, stage, seed=1).texts == rows.texts
    assert stage_rows(train, dev, stage, seed=2).texts != rows.texts


def test_folds_keep_pairs_together_and_are_of_like_size(command):
    train = read_dataset(command[command.index("--data") + 1]).splits["train"]
    fold = fold_of_pair(train, 5, seed=0)
    assert all(len(set(fold[train.pair == own])) == 1 for own in np.unique(train.pair))
    assert np.ptp(np.bincount(fold)) <= 2
    assert fold.tolist() != fold_of_pair(train, 5, seed=1).tolist()


class Stopped(Exception):  # noqa: N818 - it stands for a kill
    pass


def test_stopped_in_any_of_its_trainings_it_ends_bit_equal(
    command, staged, tmp_path, monkeypatch, capsys
):
    on_step, stops = TrainBar.on_step, ["training 2", "fold-0 1", "fold-1 2", "then 1", "then 3"]
    names: list[str] = []

    class Bar(TrainBar):
        def __init__(self, *args, name="training", **options):
            super().__init__(*args, name=name, **options)
            names.append(name)

        def on_step(self, done, steps, loss):
            on_step(self, done, steps, loss)
            if stops and f"{names[-1]} {done.step}" == stops[0]:
                stops.pop(0)
                raise Stopped

    monkeypatch.setattr("llmcond.workflows.training.TrainBar", Bar)
    monkeypatch.setattr("llmcond.finetune.stage.TrainBar", Bar)
    folder = tmp_path / "run"
    while stops:
        with pytest.raises(Stopped):
            run([*command, "--run", str(folder)])
    assert (folder / "training" / "then" / STATE).is_file()
    # Another stage than the one that was begun, after the same training.
    said = refused(capsys, *command, "--then-weight", 3, "--run", folder)
    assert "training/fold-0 holds a training that was begun with other settings" in said
    assert "then.then_weight: 3, not 2" in said
    assert run([*command, "--run", str(folder)]) == 0
    files = ["adapter_model.safetensors", "training.json"]
    one, two = ([digest_file(own / name) for name in files[:1]] for own in (folder, staged))
    assert one == two
    records = [json.loads((own / files[1]).read_text())["summary"] for own in (folder, staged)]
    assert records[0]["then"]["folds"] == records[1]["then"]["folds"]
    assert records[0]["scores"] == records[1]["scores"]
    assert not (folder / "training").exists()


def test_the_stage_alone_moves_the_weights_and_starts_where_dev_chose(command, staged, tmp_path):
    """Rates of next to nothing leave what the training without it gives."""
    plain = command[: command.index("--then")]
    assert run([*plain, "--run", str(tmp_path / "plain")]) == 0
    still = [*command, "--then-learning-rate", "1e-12", "--folds", "0"]
    assert run([*still, "--run", str(tmp_path / "still")]) == 0
    before, after, moved = (
        json.loads((folder / "training.json").read_text())["summary"]
        for folder in (tmp_path / "plain", tmp_path / "still", staged)
    )
    assert after["dev_spearman_before"] == before["dev_spearman"] == moved["dev_spearman_before"]
    test = [own["scores"][-1]["spearman"] for own in (before, after, moved)]
    assert test[0] == pytest.approx(test[1], abs=1e-3)
    assert abs(test[2] - test[0]) > 1e-3


def test_everything_says_that_dev_was_trained_on(staged):
    account = json.loads((staged / "training.json").read_text())
    summary = account["summary"]
    assert summary["trained_on"] == ["train", "dev"]
    assert summary["dev_spearman"] is None
    assert [own["split"] for own in summary["scores"]] == ["test"]
    assert summary["then"]["learning_rate"] == pytest.approx(5e-3)
    assert summary["then"]["steps"] == account["then_curve"][-1]["step"]
    folds = summary["then"]["folds"]
    assert (folds["folds"], folds["n"], folds["n_pairs"]) == (2, 12, 6)
    gain = folds["trained"]["spearman"] - folds["without"]["spearman"]
    assert folds["difference"]["spearman"] == pytest.approx(gain)
    head = json.loads(next(staged.glob("heads/*/head.json")).read_text())
    assert head["fit"]["trained_on"] == ["train", "dev"]
    assert json.loads((staged / "run.json").read_text())["trained_on"] == ["train", "dev"]
    card = " ".join((staged / "README.md").read_text().split())
    assert "also trained on dev, each row 2 times, and on 50 % of train," in card
    assert "so dev is no valid test of these weights" in card


def test_nothing_is_scored_or_chosen_on_dev(staged, tmp_path, capsys):
    folder = shutil.copytree(staged, tmp_path / "run")
    assert {own["split"] for own in ok(capsys, "evaluate", "--run", folder)["results"]} == {"test"}
    said = refused(capsys, "evaluate", "--run", folder, "--split", "dev")
    assert "was trained on dev" in said
    fitted = "--head linear --dim 4 --set epochs=3"
    done = ok(capsys, "fit-head", "--run", folder, *fitted.split())
    assert (done["n_dev"], done["dev_spearman"], done["selected_on"]) == (0, None, None)
    assert done["best_epoch"] == 3


def test_its_encoder_is_not_scored_on_dev_in_another_run_either(command, staged, tmp_path, capsys):
    data = command[command.index("--data") + 1]
    given = ["--model", staged, "--data", data, "--run", tmp_path / "other", "--dtype", "float32"]
    ok(capsys, "extract", *given)
    assert "was trained on dev" in refused(
        capsys, "evaluate", "--run", tmp_path / "other", "--split", "dev"
    )
    with Path(data).open() as lines:
        (tmp_path / "rows.csv").write_text("".join(list(lines)[:-4]))
    given[3], given[5] = tmp_path / "rows.csv", tmp_path / "third"
    ok(capsys, "extract", *given)
    ok(capsys, "evaluate", "--run", tmp_path / "third", "--split", "dev")


def test_another_stage_is_another_training(command, staged, capsys):
    said = refused(capsys, *command, "--then-epochs", 2, "--run", staged)
    assert "then.then_epochs: 2, not 1" in said
    said = refused(capsys, *command[: command.index("--then")], "--run", staged)
    assert "then" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "--then dev --folds 7",
            "dev has 6 sentence pairs with ratings, which are too few for 7 folds",
        ),
        ("--then dev --then-share 1.5", "--then-share is 1.5; it must be at least 0 and at most 1"),
        ("--then test", "Legal: dev"),
        ("--folds 5", "--folds needs --then dev. Add it"),
        ("--then dev --task kgc", "is for rated pairs"),
    ],
)
def test_bad_input_is_refused_in_one_line(command, tmp_path, capsys, given, said):
    plain = command[: command.index("--then")]
    assert said in refused(capsys, *plain, *given.split(), "--run", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_one_fold_is_none():
    with pytest.raises(UserError, match="--folds is 1"):
        check_stage_settings(StageSettings(then="dev", folds=1))
