"""Training an encoder and a head together: order, resumption, results, last stage, attributes."""

import itertools
import json
import math
import shutil
import signal
import socket
from collections import Counter
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags
from helpers.processes import Command
from helpers.training import (
    ON_CPU,
    Stopped,
    build_trainer,
    kill_in_step,
    resume_training,
    stop_after,
)
from safetensors.torch import load_file
from scipy.special import softmax
from transformers import AutoModel, AutoTokenizer

import llmcond
from llmcond.base.errors import UserError
from llmcond.base.files import digest_file
from llmcond.base.output import FitBar
from llmcond.base.package import bundled_names
from llmcond.base.run_log import TRAINING, log_path, read_log
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.data.guides import AspectText, ConditionWordings, read_aspect_datasets
from llmcond.data.rows import fold_of_pair
from llmcond.encoders import resolve
from llmcond.finetune.encoder import prepare_accelerator
from llmcond.finetune.loop import BEST, STATE, BatchSchedule, Trainer, TrainingState, stage_rows
from llmcond.finetune.model import (
    SHAPES,
    AspectSampler,
    classify_values,
    contrast_conditions,
    match_neighbours,
    supervised_contrast,
)
from llmcond.finetune.settings import AspectSettings, StageSettings, TuneSettings
from llmcond.heads import load_recipe
from llmcond.heads.module import contrast_groups
from llmcond.heads.settings import learning_rate_factor
from llmcond.workflows.train import build_tune_settings

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "--pooling mean --normalize --dtype float32 --epochs 2 --batch-size 16 --rank 4"


@pytest.fixture(scope="module")
def rows_file(tiny_run) -> Path:
    """The forty pairs of the tiny run."""
    return tiny_run.parent / "rows.csv"


@pytest.fixture(scope="module")
def command(tiny_bert, rows_file) -> list[str]:
    """A command that trains a tiny BERT, without --head and --run."""
    return ["train-lora", "--model", str(tiny_bert), "--data", str(rows_file), *PLAIN.split()]


@pytest.fixture
def train(command, tmp_path, monkeypatch, capsys):
    """Return a function that runs ``train-lora`` on small rows and returns its output."""
    monkeypatch.chdir(tmp_path)

    def call(folder, *arguments, command=run_json, base=command):
        return command(capsys, *change_flags([*base, "--run", folder], *arguments))

    return call


# -- steps and their rows ----------------------------------------------------------------------


def test_epoch_has_each_row_once_and_keeps_contrastive_pairs_together():
    group = contrast_groups(np.array([0, 0, 1, 2, 3, 3, 2, 0, 0, 4]))
    settings = TuneSettings(batch_size=4, gradient_accumulation_steps=2)
    schedule = BatchSchedule(group, settings, seed=3, processes=1)
    epochs = [schedule.epoch(number) for number in (0, 1)]
    for epoch in epochs:
        assert [len(step) for step in epoch] == [2] * schedule.steps == [2] * 3
        parts = [part for step in epoch for part in step]
        assert sorted(np.concatenate(parts).tolist()) == list(range(10))
        for part in parts:
            whole = np.flatnonzero(np.isin(group, group[part]))
            assert whole.tolist() == sorted(part.tolist())
            # The rows of a contrastive pair keep their order, and so the positive its position.
            assert all(np.diff(part)[np.diff(group[part]) == 0] > 0)
    first, second = ([row for step in epoch for part in step for row in part] for epoch in epochs)
    assert first != second
    repeated = BatchSchedule(group, settings, seed=3, processes=1)
    assert str(repeated.epoch(1)) == str(epochs[1])
    schedule = BatchSchedule(np.arange(101), TuneSettings(batch_size=25), seed=0, processes=1)
    assert sorted(len(part) for step in schedule.epoch(0) for part in step) == [20] * 4 + [21]
    with pytest.raises(UserError, match="has 2 rows, too few for 3 processes"):
        BatchSchedule(np.arange(10), TuneSettings(batch_size=2), seed=0, processes=3)


def test_learning_rate_follows_schedule():
    linear = [learning_rate_factor(step, 10, 0.2) for step in range(10)]
    assert linear[:2] == pytest.approx([1 / 3, 2 / 3])
    assert linear[2:] == pytest.approx([1 - i / 8 for i in range(8)])
    assert learning_rate_factor(9, 10, 0, "constant") == 1


def test_training_settings_of_bundled_recipes_are_valid():
    for name in bundled_names("heads"):
        recipe = load_recipe(name)
        settings = build_tune_settings({}, recipe)
        assert set(recipe.finetune) <= set(asdict(settings))
        if name.startswith("hypercl"):
            assert (settings.full, settings.max_grad_norm, settings.batch_size) == (True, 0.0, 32)
            assert settings.learning_rate == recipe.settings.learning_rate
            assert (recipe.settings.ties, recipe.settings.info_nce_form) == ("keep", "acl")


def test_gradient_accumulation_does_not_change_parameters(tiny_bert, data, tmp_path):
    parameters = []
    for n_parts in (1, 4):
        trainer = build_trainer(
            tiny_bert, data, tmp_path / str(n_parts), dropout=0.0, encoder_dropout=False,
            epochs=1, gradient_accumulation_steps=n_parts,
        )  # fmt: skip
        # The contrastive loss is a mean over pairs, so each part must have as many of them.
        trainer._train.rating[:] = np.tile([0.25, 0.75], len(trainer._train) // 2)
        trainer.run(lambda *_: None)
        parameters.append(trainer.model.trained_parameters())
    for name, value in parameters[0].items():
        torch.testing.assert_close(value, parameters[1][name], rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_two_processes_match_two_accumulation_steps(tiny_bert, data, tmp_path):
    """Each of two processes takes its share of every step, and pairs stay together."""
    arguments = f"train-lora --model {tiny_bert} --data {data} --head hypernet --dim 8 --epochs 2"
    arguments += " --set rank=2 info_nce=1 dropout=0 --no-encoder-dropout --batch-size 16 --rank 4"
    arguments += " --pooling mean --dtype float32 --json --run"
    one, two = tmp_path / "one", tmp_path / "two"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # torchrun and accelerate launch set these variables.
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        Command(
            tmp_path / rank,
            [*arguments.split(), two],
            {**environment, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]
    (status, out, err), other = (process.finish() for process in processes)
    assert (status, *other[:2]) == (0, 0, ""), err + other[2]
    assert run([*arguments.split(), str(one), "--gradient-accumulation-steps", "2"]) == 0
    distributed = json.loads(out)
    single = json.loads((one / "training.json").read_text())["summary"]
    for key in ("steps", "best_step"):
        assert distributed[key] == single[key]
    records = read_log(log_path(two, TRAINING))
    steps = [record["step"] for record in records if record["event"] == "step"]
    assert steps == list(range(1, single["steps"] + 1))  # one process writes the log
    for name in ("adapter_model.safetensors", f"heads/{single['head']}/head-*.safetensors"):
        expected, actual = (load_file(next(folder.glob(name))) for folder in (one, two))
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-5)


def test_accelerator_has_device_of_encoder_and_waits_for_scores(tiny_bert):
    PartialState().device = torch.device("meta")  # of an earlier training in the process
    accelerator = prepare_accelerator(resolve(str(tiny_bert), ON_CPU))
    assert accelerator.device.type == "cpu"
    assert accelerator.init_handler.timeout > timedelta(days=1)


def test_average_ignores_skipped_steps(tiny_bert, data, tmp_path, monkeypatch):
    """In float16, steps with infinite gradients update nothing."""
    trainer = build_trainer(tiny_bert, data, tmp_path / "t", epochs=1, ema_decay=0.9)
    before = {name: value.clone() for name, value in trainer._average.items()}
    for skipped in (True, False):
        monkeypatch.setattr(type(trainer._optimiser), "step_was_skipped", skipped)
        stop_after(trainer, 1 if skipped else 2)
        changed = [not torch.equal(value, before[name]) for name, value in trainer._average.items()]
        assert any(changed) != skipped


# -- resuming ----------------------------------------------------------------------------------


def test_resumed_training_is_bit_equal_to_uninterrupted_training(tiny_bert, data, tmp_path):
    settings = {"epochs": 2, "adapter_dropout": 0.1, "gradient_accumulation_steps": 2}
    settings["ema_decay"] = 0.9
    expected = build_trainer(tiny_bert, data, tmp_path / "whole", **settings)
    expected.run(lambda *_: None)
    assert expected.steps == 8
    for stop, saved in ((2, 0), (5, 4), (8, 6)):
        folder = tmp_path / str(stop)
        resumed = resume_training(partial(build_trainer, tiny_bert, data, folder, **settings), stop)
        assert resumed.progress.step == saved
        resumed.run(lambda *_: None)
        assert resumed.progress.curve == expected.progress.curve
        weights = expected.model.trained_parameters()
        for name, value in resumed.model.trained_parameters().items():
            assert torch.equal(value, weights[name]), (stop, name)
        assert digest_file(folder / BEST) == digest_file(tmp_path / "whole" / BEST)
    path = folder / STATE
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(llmcond.LlmcondError, match="start again"):
        build_trainer(tiny_bert, data, folder, **settings)


def test_checkpoint_is_due_after_some_time(tiny_bert, data, tmp_path, monkeypatch):
    monkeypatch.setattr("llmcond.finetune.loop._CHECKPOINT_SECONDS", 0)
    start = partial(build_trainer, tiny_bert, data, tmp_path / "t", epochs=1)
    # The step that is interrupted is not saved.
    assert resume_training(start, 2).progress.step == 1


def test_killed_training_resumes_bit_equal(tiny_bert, data, tmp_path):
    command = ["train-lora", "--model", tiny_bert, "--data", data, "--head", "mlp", "--dim", "8"]
    command += "--epochs 2 --pooling mean --batch-size 8 --checkpoint-steps 5 --rank 4".split()

    def start(folder, setup=None):
        printed = tmp_path / f"{folder.name}-printed"
        return Command(printed, [*command, "--run", folder], setup=setup)

    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    # An epoch has seven steps, so that the training ends in its second epoch.
    assert start(killed, partial(kill_in_step, 13)).finish()[0] == -signal.SIGKILL
    assert (killed / "training" / STATE).is_file()
    assert not (killed / "training.json").exists()
    for folder in (killed, uninterrupted):
        status, _, log = start(folder).finish()
        assert status == 0, log
        assert ("from step 10" in log) == (folder is killed)
    for name in ("adapter_model.safetensors", "heads/mlp@concat-sent-cond+c/head-*.safetensors"):
        (killed_file,), (uninterrupted_file,) = killed.glob(name), uninterrupted.glob(name)
        assert digest_file(killed_file) == digest_file(uninterrupted_file)
    assert not (uninterrupted / "training").exists()


def test_changed_settings_are_each_named(tiny_bert, data, tmp_path):
    stop_after(build_trainer(tiny_bert, data, tmp_path / "t", epochs=2), 4)
    with pytest.raises(UserError, match=r"epochs: 3, not 2; settings\.ema_decay: 0\.9, not 0"):
        build_trainer(tiny_bert, data, tmp_path / "t", epochs=3, ema_decay=0.9)


def test_finished_training_is_not_repeated(train, tmp_path):
    options = ("--head", "none", "--epochs", "1", "--set", "matryoshka=4,8")
    first = train("tuned", *options)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "tuned").rglob("*")}
    assert train("tuned", *options) == first
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "tuned").rglob("*")}
    message = train("tuned", *options, "--seed", "1", command=run_rejected)
    assert "seed: 1, not 0" in message
    assert llmcond.load_embedder(tmp_path / "tuned").matryoshka_dims == [8, 4]


# -- the trained run ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(command, tmp_path_factory) -> Path:
    """A trained run, with LoRA under an MLP head."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    options = "--head mlp --dim 8 --pooling cls --epochs 3 --batch-size 8 --set dropout=0"
    assert run([*change_flags(command, *options.split()), "--run", str(folder)]) == 0
    return folder


def test_training_record_card_and_scores(tuned, capsys):
    record = json.loads((tuned / "training.json").read_text())
    config, summary = record["made_of"], record["summary"]
    assert config["encoder"]["weights"].startswith("sha256:")
    assert record["versions"]["peft"]
    assert config["settings"]["rank"] == 4
    assert [entry["epoch"] for entry in record["curve"]] == [1, 2, 3]
    assert summary["weights"]["trained"] > 0
    card = (tuned / "README.md").read_text()
    assert card.startswith("---\n")
    assert "library_name: peft" in card
    assert f"| dev | {summary['scores'][0]['n']} |" in " ".join(card.split())
    assert str(tuned.parent) not in card.split("## Use")[1]
    for scores in summary["scores"]:
        options = ("--head", scores["name"], "--split", scores["split"])
        assert scores in run_json(capsys, "evaluate", "--run", tuned, *options)["results"]
    dev = next(scores for scores in summary["scores"] if scores["split"] == "dev")
    # The features are stored in float16 and encoded in other batches.
    assert dev["spearman"] == pytest.approx(summary["dev_spearman"], abs=0.06)


def test_peft_loads_adapter(tuned, tiny_bert):
    from peft import PeftModel

    text = llmcond.EncoderInput(instruction="", text="two men play in the park")
    ours = llmcond.load_encoder(tuned, dtype="float32").encode([text])[0]
    networks = [AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False) for _ in range(2)]
    networks[0] = PeftModel.from_pretrained(networks[0], tuned)
    tokens = AutoTokenizer.from_pretrained(tiny_bert)([text.text], return_tensors="pt")
    with torch.no_grad():
        theirs, untrained = (
            torch.nn.functional.normalize(network.eval()(**tokens).last_hidden_state[:, 0])[0]
            for network in networks
        )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.abs(ours - untrained.numpy()).max() > 1e-3


def test_routed_encoder_is_trained_in_16_bit(data, tiny_bert, tmp_path, capsys):
    options = f"--model {tiny_bert} --pooling mean --prompt routed --router csr --router-layers 2"
    options = [*options.split(), *"--dtype bfloat16 --epochs 1 --head none".split()]
    result = run_json(capsys, "train-lora", "--data", data, "--run", tmp_path / "run", *options)
    # The score is that of the encoder at inference, when its dense layers are in float32.
    assert result["dev_spearman"] == pytest.approx(result["scores"][0]["spearman"], abs=0.05)


def test_training_starts_from_head_fitted_on_frozen_features(
    train, tiny_bert, data, capsys, tmp_path
):
    options = "--run frozen --pooling mean --normalize --dtype float32 --prompt concat-sent-cond"
    run_json(capsys, "extract", "--model", tiny_bert, "--data", data, *options.split())
    options = "--head mlp --dim 8 --run frozen --set dropout=0 epochs=60"
    fitted = run_json(capsys, "fit-head", *options.split())
    arguments = ("--start", fitted["folder"], "--learning-rate", "1e-9")
    arguments += ("--set", "learning_rate=1e-9")
    summary = train("tuned", *arguments)
    # Both heads subtract e(c), and the learning rate is too small to change the weights notably.
    assert summary["head"] == "mlp@concat-sent-cond"
    dev = next(scores for scores in summary["scores"] if scores["split"] == "dev")
    assert dev["spearman"] == pytest.approx(fitted["dev_spearman"], abs=0.02)
    assert "--start" in train("other", *arguments, "--dim", "4", command=run_rejected)
    assert "holds features of" in train("frozen", "--head", "none", command=run_rejected)
    (tmp_path / "frozen" / "heads").rename(tmp_path / "gone")
    assert "does not exist" in train("third", *arguments, command=run_rejected)


# -- the last stage, on train and dev ----------------------------------------------------------

STAGE = "--head none --learning-rate 1e-2 --then dev --then-share 0.5 --folds 2"


@pytest.fixture(scope="module")
def stage_command(command) -> list[str]:
    return [*command, *STAGE.split(), "--checkpoint-steps", "1"]


@pytest.fixture(scope="module")
def staged(stage_command, tmp_path_factory) -> Path:
    """A run with a last stage on dev and two folds."""
    folder = tmp_path_factory.mktemp("staged") / "run"
    assert run([*stage_command, "--run", str(folder)]) == 0
    return folder


def test_stage_rows_are_share_of_train_pairs_and_repeated_dev(rows_file):
    splits = read_dataset(str(rows_file)).splits
    train, dev = splits["train"], splits["dev"]
    stage = StageSettings(then="dev", then_share=0.25, then_weight=3)
    rows = stage_rows(train, dev, stage, seed=1)
    train_rows = rows.take(np.arange(len(rows) - 3 * len(dev)))
    assert len(train_rows.pair_keys()) == round(0.25 * len(train.pair_keys()))
    assert set(train_rows.pair_keys()) < set(train.pair_keys())
    assert len(train_rows) == 2 * len(train_rows.pair_keys())
    for copy in range(3):
        dev_rows = rows.take(
            np.arange(len(train_rows) + copy * len(dev), len(train_rows) + (copy + 1) * len(dev))
        )
        assert dev_rows.texts == dev.texts
        assert dev_rows.rating.tolist() == dev.rating.tolist()
    assert stage_rows(train, dev, stage, seed=1).texts == rows.texts
    assert stage_rows(train, dev, stage, seed=2).texts != rows.texts


def test_stage_does_not_repeat_random_numbers_of_first_steps(tiny_bert, data, tmp_path):
    first, seeds = build_trainer(tiny_bert, data, tmp_path / "first", epochs=1), []
    state, train = TrainingState(tmp_path / "then", {}), first._train
    stage = Trainer(first.model, train, None, first._settings, first._accelerator, state, 0.5)
    forward = first.model.forward
    first.model.forward = lambda *inputs: seeds.append(inputs[-1]) or forward(*inputs)
    for trainer in (first, stage):
        stop_after(trainer, 2)
    assert seeds[:2] == [[5, 0, 0, 0], [5, 1, 0, 0]]
    assert [seed[1:] for seed in seeds[2:]] == [seed[1:] for seed in seeds[:2]]
    assert seeds[2][0] == seeds[3][0] != 5
    assert str(stage._schedule.epoch(0)) != str(first._schedule.epoch(0))


def test_folds_keep_pairs_together_and_have_similar_sizes(rows_file):
    train = read_dataset(str(rows_file)).splits["train"]
    fold = fold_of_pair(train, 5, seed=0)
    assert all(len(set(fold[train.pair == pair])) == 1 for pair in np.unique(train.pair))
    assert np.ptp(np.bincount(fold)) <= 2
    assert fold.tolist() != fold_of_pair(train, 5, seed=1).tolist()


def test_stage_stopped_in_any_training_resumes_bit_equal(
    stage_command, staged, tmp_path, monkeypatch, capsys
):
    on_step, stops = FitBar.on_step, ["training 2", "fold-1 2", "then 3"]
    names: list[str] = []

    class Bar(FitBar):
        def __init__(self, *args, name="training", **options):
            super().__init__(*args, name=name, **options)
            names.append(name)

        def on_step(self, done, steps, loss):
            on_step(self, done, steps, loss)
            if stops and f"{names[-1]} {done.step}" == stops[0]:
                stops.pop(0)
                raise Stopped

    monkeypatch.setattr("llmcond.workflows.train_job.FitBar", Bar)
    monkeypatch.setattr("llmcond.finetune.loop.FitBar", Bar)
    folder = tmp_path / "run"
    while stops:
        with pytest.raises(Stopped):
            run([*stage_command, "--run", str(folder)])
    assert (folder / "training" / "then" / STATE).is_file()
    message = run_rejected(capsys, *stage_command, "--then-weight", 3, "--run", folder)
    assert "training/fold-0 holds a training that was begun with other settings" in message
    assert "then.then_weight: 3, not 2" in message
    assert run([*stage_command, "--run", str(folder)]) == 0
    weights = [digest_file(each / "adapter_model.safetensors") for each in (folder, staged)]
    assert weights[0] == weights[1]
    summaries = [
        json.loads((each / "training.json").read_text())["summary"] for each in (folder, staged)
    ]
    assert summaries[0]["then"]["folds"] == summaries[1]["then"]["folds"]
    assert summaries[0]["scores"] == summaries[1]["scores"]
    assert not (folder / "training").exists()


def test_stage_starts_from_best_checkpoint_and_changes_weights(stage_command, staged, tmp_path):
    """A stage with a learning rate near zero gives the weights of a training without a stage."""
    idle = change_flags(stage_command, "--then-learning-rate", "1e-12", "--folds", "0")
    plain = stage_command[: stage_command.index("--then")]
    summaries = []
    for name, arguments in (("plain", plain), ("idle", idle)):
        assert run([*arguments, "--run", str(tmp_path / name)]) == 0
        summaries.append(json.loads((tmp_path / name / "training.json").read_text())["summary"])
    summaries.append(json.loads((staged / "training.json").read_text())["summary"])
    before = [each["dev_spearman_before"] for each in summaries[1:]]
    assert before == [summaries[0]["dev_spearman"]] * 2
    without_stage, idle_stage, stage = (each["scores"][-1]["spearman"] for each in summaries)
    assert without_stage == pytest.approx(idle_stage, abs=1e-3)
    assert abs(stage - without_stage) > 1e-3


def test_records_and_card_state_training_on_dev(staged):
    record = json.loads((staged / "training.json").read_text())
    summary = record["summary"]
    assert summary["trained_on"] == ["train", "dev"]
    assert summary["dev_spearman"] is None
    assert [scores["split"] for scores in summary["scores"]] == ["test"]
    assert summary["then"]["learning_rate"] == pytest.approx(5e-3)
    assert summary["then"]["steps"] == record["then_curve"][-1]["step"]
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


def test_dev_is_not_used_for_scores_or_selection(rows_file, staged, tmp_path, capsys):
    results = run_json(capsys, "evaluate", "--run", staged)["results"]
    assert {row["split"] for row in results} == {"test"}
    other = tmp_path / "other"
    options = ["--model", staged, "--dtype", "float32"]
    run_json(capsys, "extract", *options, "--data", rows_file, "--run", other)
    for folder in (staged, other):
        message = run_rejected(capsys, "evaluate", "--run", folder, "--split", "dev")
        assert "was trained on dev" in message
    options = "--head linear --dim 4 --set epochs=3"
    summary = run_json(capsys, "fit-head", "--run", other, *options.split())
    assert (summary["n_dev"], summary["dev_spearman"], summary["selected_on"]) == (0, None, None)
    with_dev = ("fit-head", "--run", other, *options.split(), "--with", "dev", "--name", "both")
    assert run_json(capsys, *with_dev)["n_dev"] == 12
    message = run_rejected(capsys, *with_dev, "--folds", 2)
    assert "was trained on dev, so folds of dev would measure nothing" in message


def test_dev_of_earlier_data_is_remembered(
    stage_command, staged, rows_file, write_rows, small_rows, tmp_path, capsys
):
    """Training on dev of other data, and rating as a teacher, do not hide that dev is known."""
    other_rows = write_rows([row for number, row in enumerate(small_rows) if number % 3])
    later, options = tmp_path / "later", ("--model", staged, "--data", other_rows)
    run_json(capsys, *change_flags(stage_command, *options, "--run", later, "--folds", 0))
    records = [json.loads((folder / "encoder.json").read_text()) for folder in (staged, later)]
    first, both = (record["dev_of"].split() for record in records)
    assert set(first) < set(both)
    teacher = ("--teacher", later, "--teacher-rows", 5, "--run", tmp_path / "bad")
    message = run_rejected(capsys, *stage_command, *teacher)
    assert f"the teacher {later} was trained on dev" in message
    # Other splits, conditions and ratings do not hide it either.
    splits = read_dataset(str(rows_file)).splits
    for name in ("train", "dev"):
        pairs = zip(splits[name].sentence2, splits[name].sentence1, strict=True)
        rows = [(*pair, "the place", 1 + n % 5) for n, pair in enumerate(pairs)]
        folder = write_rows(rows, f"without-test/{name}.csv").parent
    run_json(capsys, "extract", "--model", staged, "--data", folder, "--run", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "run.json").read_text())["trained_on"] == [
        "train",
        "dev",
    ]


# -- texts with attributes ---------------------------------------------------------------------

PEOPLE = ["two men", "three women", "children", "two dogs"]
LOCATIONS = ["in the park", "at the beach", "in the kitchen", "on the street"]
VERBS = ["play", "sit", "read", "walk"]


@pytest.fixture(scope="module")
def aspects(tmp_path_factory) -> Path:
    """A folder with one dataset, which has every combination of people, verb and location once."""
    folder = tmp_path_factory.mktemp("aspects")
    texts = [
        {"text": f"{who} {verb} {location}", "attrs": {"who": who, "where": location, "verb": verb}}
        for who, location, verb in itertools.product(PEOPLE, LOCATIONS, VERBS)
    ]
    conditions = {
        "who": {"text": "the number of people", "question": "who", "para": ["people"]},
        "where": {"text": "the place", "para": ["park or street"]},
    }
    (folder / "scenes.json").write_text(json.dumps({"texts": texts, "conds": conditions}))
    return folder


def test_value_numbers_match_attribute_values_in_each_group(aspects):
    settings = AspectSettings(
        aspects=str(aspects), aspects_texts=500, aspects_values=0, aspects_twins=0
    )
    batch = AspectSampler(read_aspect_datasets(aspects), settings, None).sample([0, 1])
    legal_values = {"the number of people": PEOPLE, "who": PEOPLE, "people": PEOPLE}
    legal_values |= {"the place": LOCATIONS, "park or street": LOCATIONS}
    rows = batch.rows
    assert list(rows.sentence1) == list(rows.sentence2)
    assert set(rows.condition) == set(legal_values)
    for group in range(batch.group.max() + 1):
        members = np.flatnonzero(batch.group == group)
        assert len({rows.condition[i] for i in members}) == 1
        assert len({rows.sentence1[i] for i in members}) == len(members)
        group_values = legal_values[rows.condition[members[0]]]
        member_values = [
            next(value for value in group_values if value in rows.sentence1[i]) for i in members
        ]
        for i, j in itertools.combinations(range(len(members)), 2):
            assert (batch.value[members[i]] == batch.value[members[j]]) == (
                member_values[i] == member_values[j]
            )
        sizes = Counter(batch.value[members].tolist())
        assert (len(sizes), sizes[0]) in {(min(n, 4), m) for n, m in SHAPES}


def test_repeated_texts_of_a_set_are_used_once(aspects):
    (sample,) = read_aspect_datasets(aspects)
    silent = [AspectText(f"nobody is {where}", {"where": where}) for where in LOCATIONS]
    # Each text also occurs without attributes, and thus with two values or none.
    bare = [AspectText(text.text, {}) for text in sample.texts]
    settings = AspectSettings(aspects=str(aspects), aspects_texts=300)
    once, repeated = (
        AspectSampler([replace(sample, texts=texts, complete=True)], settings, None).sample([0, 1])
        for texts in ([*sample.texts, *silent], [*sample.texts, *silent, *bare, *silent])
    )
    assert once.rows.texts == repeated.rows.texts
    for name in ("group", "value", "twin"):
        np.testing.assert_array_equal(getattr(once, name), getattr(repeated, name))


def test_first_value_has_texts_that_share_nothing_else(aspects):
    settings = AspectSettings(aspects=str(aspects), aspects_texts=900, aspects_twins=0)
    batch = AspectSampler(read_aspect_datasets(aspects), settings, None).sample([0, 1])
    shared = []
    for group in range(batch.group.max() + 1):
        first = np.flatnonzero((batch.group == group) & (batch.value == 0))
        texts = [str(batch.rows.sentence1[i]) for i in first]
        for pair in itertools.combinations(texts, 2):
            shared.append(sum(all(word in t for t in pair) for word in PEOPLE + LOCATIONS + VERBS))
    # One is the value of the condition; 1.4 would be the mean of pairs at random.
    assert 1 <= np.mean(shared) < 1.15


def test_loss_compares_texts_within_groups_only():
    vectors = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0.6, 0.8], [0.8, 0.6]])
    group, value = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 0, 0])
    loss = supervised_contrast(3 * vectors, group, value, temperature=0.5)
    # The first two are each other's positives and have one negative; the last two have none.
    expected = math.log(math.exp(2) + 1) - 2
    assert float(loss) == pytest.approx(expected * 2 / 4, abs=1e-6)
    # Identical vectors have the loss of a random choice.
    value = torch.tensor([0, 0, 1, 2, 3, 4])
    loss = supervised_contrast(torch.ones(6, 4), torch.zeros(6), value, temperature=0.07)
    assert float(loss) == pytest.approx(math.log(5), abs=1e-5)


def test_similarities_of_teacher_are_compared_within_groups():
    vectors = torch.tensor([[1.0, 0], [0.6, 0.8], [0, 1], [1, 0], [0, 1]])
    group = torch.tensor([0, 0, 0, 1, 1])
    # Only the angles count, not the number or size of dimensions.
    target = torch.hstack([5 * vectors, torch.zeros(5, 3)])
    assert float(match_neighbours(vectors, target, group, 0.5)) == pytest.approx(0, abs=1e-6)
    # The first two texts swap their distributions, and a group of two has only one.
    swapped = match_neighbours(vectors, target[[1, 0, 2, 4, 4]], group, 0.5)
    expected = 0.0
    for student, teacher in (((1.2, 0), (1.2, 1.6)), ((1.2, 1.6), (1.2, 0)), ((0, 1.6), (1.6, 0))):
        shares = [softmax(cosines) for cosines in (teacher, student)]
        expected += sum(p * math.log(p / q) for p, q in zip(*shares, strict=True)) / 5
    assert float(swapped) == pytest.approx(expected, abs=1e-5)


def test_texts_without_the_attribute_are_negatives_of_all_others(aspects):
    """Only in sets whose texts have every attribute that they mention."""
    (sample,) = read_aspect_datasets(aspects)
    silent = [AspectText(f"nobody is {where}", {"where": where}) for where in LOCATIONS]
    settings = AspectSettings(aspects=str(aspects), aspects_texts=900, aspects_absent=1)
    for complete in (False, True):
        mixed = replace(sample, texts=[*sample.texts, *silent], complete=complete)
        batch = AspectSampler([mixed], settings, None).sample([0, 1])
        absent = [i for i, text in enumerate(batch.rows.sentence1) if text.startswith("nobody")]
        people = ("the number of people", "who", "people")
        of_people = [i for i in absent if str(batch.rows.condition[i]).startswith(people)]
        assert bool(of_people) == complete
        for i in of_people:
            same = (batch.group == batch.group[i]) & (batch.value == batch.value[i])
            assert same.sum() == 1
            assert batch.label[i] == -1


def test_twins_are_the_same_texts_under_another_condition(aspects):
    (sample,) = read_aspect_datasets(aspects)
    # Half of the texts say nothing about the place.
    texts = [
        AspectText(text.text, {k: v for k, v in text.attributes.items() if n % 2 or k != "where"})
        for n, text in enumerate(sample.texts)
    ]
    silent = {text.text for text in texts if "where" not in text.attributes}
    for complete, share, absent in itertools.product((False, True), (0, 1), (0, 0.3)):
        settings = AspectSettings(
            aspects=str(aspects),
            aspects_texts=300,
            aspects_twins=share,
            aspects_absent=absent,
            aspects_values=0,
        )
        mixed = replace(sample, texts=texts, complete=complete)
        batch = AspectSampler([mixed], settings, None).sample([0, 1])
        pairs = zip(batch.rows.sentence1, batch.rows.condition, strict=True)
        lacks = [text in silent for text, c in pairs if c in ("the place", "park or street")]
        assert any(lacks) == bool(complete and absent)
        first = np.flatnonzero(batch.twin > np.arange(len(batch.twin)))
        assert bool(len(first)) == bool(share)
        twins = batch.twin[first]
        assert (batch.twin[twins] == first).all()
        changed = dict.fromkeys(batch.group[first], 0)
        for i, j in zip(first, twins, strict=True):
            assert batch.rows.sentence1[i] == batch.rows.sentence1[j]
            assert batch.group[i] != batch.group[j]
        for (i, k), (j, m) in itertools.combinations(zip(first, twins, strict=True), 2):
            assert (batch.group[i] == batch.group[j]) == (batch.group[k] == batch.group[m])
            if batch.group[i] == batch.group[j]:
                agree = batch.value[i] == batch.value[j], batch.value[k] == batch.value[m]
                changed[batch.group[i]] += agree[0] != agree[1]
        assert all(changed.values())


def test_loss_across_conditions_compares_pairs_that_change():
    vectors = torch.tensor([[1.0, 0], [1, 0], [0, 1], [2, 0], [0, 3], [0, 1], [1, 1]])
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    value, twin = torch.tensor([0, 0, 1, 0, 1, 1, 0]), torch.tensor([3, 4, 5, 0, 1, 2, -1])
    # Under the first condition, texts 0 and 1 agree with the cosine 1; under the second, they
    # differ with the cosine 0. For 1 and 2 it is the other way round. 0 and 2 differ under both.
    expected = math.log(1 + math.exp(-1 / 0.07))
    loss = contrast_conditions(vectors, group, value, twin)
    assert float(loss) == pytest.approx(expected, rel=1e-3)
    swapped = contrast_conditions(vectors[[3, 4, 5, 0, 1, 2, 6]], group, value, twin)
    assert float(swapped) == pytest.approx(math.log(1 + math.exp(1 / 0.07)), rel=1e-5)
    assert float(contrast_conditions(vectors, group, value, torch.full((7,), -1))) == 0


def test_conditions_of_a_kind_share_the_prototypes_of_their_values(aspects):
    (sample,) = read_aspect_datasets(aspects)
    settings = AspectSettings(aspects=str(aspects), aspects_texts=300)
    assert AspectSampler([sample], settings, None).classes == []
    values = [
        AspectText(t.text, dict.fromkeys(("a", "b"), t.attributes["who"])) for t in sample.texts
    ]
    conditions = {key: ConditionWordings(f"the {key}", kind="who") for key in ("a", "b")}
    shared = AspectSampler([replace(sample, texts=values, conditions=conditions)], settings, None)
    assert shared.classes == [("who", value) for value in sorted(PEOPLE)]
    batch = shared.sample([0, 1])
    for text, label in zip(batch.rows.sentence1, batch.label, strict=True):
        assert shared.classes[label][1] in text


def test_texts_are_classified_among_values_of_their_kind():
    vectors = torch.tensor([[1.0, 0], [0, 1], [1, 0]])
    prototypes, kinds = torch.tensor([[2.0, 0], [0, 3], [1, 1]]), torch.tensor([0, 0, 1])
    loss = classify_values(vectors, prototypes, kinds, torch.tensor([0, 0, -1]))
    right, wrong = math.log(1 + math.exp(-10)), math.log(1 + math.exp(10))
    assert float(loss) == pytest.approx((right + wrong) / 2, rel=1e-5)
    # The only value of its kind is certain; without labels there is nothing to learn.
    for label in ([2, 2, -1], [-1, -1, -1]):
        prototypes = prototypes.detach().requires_grad_()
        prototypes.grad = None
        loss = classify_values(vectors, prototypes, kinds, torch.tensor(label))
        loss.backward()
        # The optimiser counts the steps of each weight, and leaves out those without a gradient.
        assert (float(loss), prototypes.grad.abs().max()) == (0, 0)


def test_training_on_aspects_is_recorded_and_changes_weights(train, aspects, tmp_path, monkeypatch):
    options = ("--head", "none", "--rank", "full", "--epochs", 1)
    summary = train("run", *options, "--aspects", aspects, "--aspects-texts", 24)
    assert summary["aspects"] == ["scenes"]
    config = json.loads((tmp_path / "run" / "training.json").read_text())["made_of"]["aspects"]
    assert config["aspects"] == {"scenes": digest_file(aspects / "scenes.json")}
    assert config["aspects_texts"] == 24
    fitted_on = llmcond.load_embedder(tmp_path / "run").fitted_on
    assert fitted_on.endswith("rows.csv and texts of 1 dataset")
    train("again", *options, "--aspects", aspects, "--aspects-texts", 24)
    train("without", *options)
    sizes: list[int] = []

    def count(vectors, *_):
        sizes.append(len(vectors))
        return 0.0

    monkeypatch.setattr("llmcond.finetune.model.contrast_conditions", count)
    train("one-condition", *options, "--aspects", aspects, "--aspects-texts", 24)
    assert min(sizes) >= 24
    sizes.clear()
    # Each part of a step has its share of the texts, with one group at least.
    parts = ("--aspects-texts", 24, "--gradient-accumulation-steps", 4)
    train("parts", *options, "--aspects", aspects, *parts)
    assert min(sizes) < 12
    teacher = ("--aspects-teacher", "minilm-conditions")
    summary = train("taught", *options, "--aspects", aspects, "--aspects-texts", 24, *teacher)
    assert summary["aspects_teacher"]["encoder"] == "minilm-conditions"
    assert "also learned the similarities" in (tmp_path / "taught" / "README.md").read_text()
    run_digest, again, *others = (
        digest_file(tmp_path / name / "model.safetensors")
        for name in ("run", "again", "without", "one-condition", "taught")
    )
    assert run_digest == again
    assert len({run_digest, *others}) == 4


def test_training_continues_from_an_adapter(train, command, aspects, tmp_path):
    """It keeps its rank and its base, and its weights are the initial ones."""
    tensors, records, last = [], [], ("--head", "none", "--epochs", 1)
    start = ("--rank", 3, "--alpha", 5, "--target", "attention")
    without_rank = command[:-2]
    for name, options in (
        ("first", start),
        ("second", ("--model", tmp_path / "first", "--learning-rate", 1e-9)),
        ("third", ("--model", tmp_path / "second", "--aspects", aspects)),
    ):
        train(name, *last, *options, base=command if name == "first" else without_rank)
        tensors.append(load_file(tmp_path / name / "adapter_model.safetensors"))
        records.append(json.loads((tmp_path / name / "training.json").read_text()))
    for key, value in tensors[0].items():
        assert torch.allclose(value, tensors[1][key], atol=1e-6)
    assert any((value - tensors[2][key]).abs().max() > 1e-4 for key, value in tensors[1].items())
    for name in ("adapter_config.json", "encoder.json"):
        contents = [json.loads((tmp_path / run / name).read_text()) for run in ("first", "third")]
        for content in contents:
            content.pop("target_modules", None)
        assert contents[0] == contents[1]
    assert records[0]["base"] == records[2]["base"]
    assert records[2]["made_of"]["settings"]["rank"] == 3
    assert records[1]["made_of"]["encoder"]["weights"].endswith(records[0]["base"]["weights"])
    options = ("--model", tmp_path / "first", "--head", "none")
    for rank in (8, "full"):
        message = train("bad", *options, "--rank", rank, command=run_rejected)
        assert f"with rank 3, which is trained further, so --rank cannot be {rank}" in message


# -- invalid input -----------------------------------------------------------------------------


def test_prompt_of_further_columns_cannot_embed_other_texts(
    train, aspects, write_rows, small_rows, tmp_path
):
    (tmp_path / "note.toml").write_text(
        'description = "d"\nsource = "s"\nfields = ["note"]\n'
        '[conditional]\ntext = "{sentence} ({note}) {condition}"\n'
        '[unconditional]\ntext = "{condition}"\n'
    )
    header = "sentence1,sentence2,condition,label,note"
    rows = [(*row, "n") for n, row in enumerate(small_rows) if n % 3]
    options = ("--head", "none", "--epochs", 1, "--data", write_rows(rows, "noted.csv", header))
    message = "the prompt note reads the column 'note', which only the rows of its run have"
    noted = (*options, "--prompt", "note.toml")
    assert message in train("bad", *noted, "--aspects", aspects, command=run_rejected)
    train("run", *noted)
    with pytest.raises(UserError, match=message):
        llmcond.load_embedder(tmp_path / "run")
    teacher = ("--teacher", tmp_path / "run", "--teacher-rows", 5)
    assert message in train("bad", *options, *teacher, command=run_rejected)


def test_only_links_within_checkpoint_are_copied(train, tiny_bert, tmp_path):
    secret, model = tmp_path / "id_rsa", Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    secret.write_text("a secret")
    (model / "x.model").symlink_to(secret)
    options = ("--model", model, "--head", "none", "--epochs", "1")
    for option in (["--merge"], ["--rank", "full"]):
        message = train("run", *options, *option, command=run_rejected)
        assert f"{model / 'x.model'} is a link to {secret}" in message
    assert not list((tmp_path / "run").rglob("*.model"))


def test_invalid_options_are_rejected_in_one_line(train, write_rows, small_rows, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    single = {"texts": [{"text": "a", "attrs": {"c": 1}}], "conds": {"c": "the c"}}
    (tmp_path / "odd" / "one.json").write_text(json.dumps(single))
    for arguments, message in (
        ("--head none --target q_proj", "Legal: auto, attention, mlp, attention.self"),
        ("--head none --rank full --quantize 4bit", "4bit weights cannot be changed"),
        ("--head none --rank full --adapter-dropout 0.1", "--adapter-dropout is a setting of"),
        ("--head hypercl-simcse-base-64 --rank full --alpha 3", "--alpha is a setting of adapters"),
        ("--head pca", "not fitted by gradients"),
        ("", "Give --head"),
        ("--head none --prompt control-no-condition", "is a control"),
        ("--head hadamard --prompt cond", "instruction"),
        ("--head none --batch-size 2 --gradient-accumulation-steps 4", "too few"),
        ("--head none --then dev --folds 7", "dev has 6 sentence pairs with ratings, which"),
        ("--head none --aspects empty", "contains no dataset"),
        ("--head none --aspects odd", "nothing to learn from"),
    ):
        assert message in train("bad", *arguments.split(), command=run_rejected)
    unrated = write_rows([(*row[:3], -1) for row in small_rows])
    message = train("bad", "--head", "none", "--data", unrated, command=run_rejected)
    assert "rows.csv has 0 rated rows" in message
    assert not (tmp_path / "bad").exists()


def test_non_finite_loss_stops_training_and_keeps_checkpoint(train, tmp_path):
    options = "--head mlp --dim 8 --set learning_rate=1e38 --max-grad-norm 0 --warmup 0"
    message = train("wild", *options.split(), "--checkpoint-steps", 1, command=run_rejected)
    assert "became" in message
    assert "step 2 of" in message
    assert "the last checkpoint is in wild/training" in message
    assert "--learning-rate" in message
    assert (tmp_path / "wild" / "training" / STATE).is_file()
    options = "--head mlp --dim 8 --epochs 1 --max-grad-norm 0 --warmup 0 --learning-rate 1e-35"
    options += " --then dev --then-learning-rate 100"
    message = train("stage", *options.split(), command=run_rejected)
    assert "nothing was saved in stage/training/then yet" in message
    assert "Lower --then-learning-rate, to about 0.001." in message
