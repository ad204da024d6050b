"""Training an encoder and a head together: order, exact resumption, results, invalid input."""

import json
import resource
import shutil
import signal
import socket
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags
from helpers.processes import Command
from helpers.training import build_trainer, kill_in_step, resume_training, stop_after
from safetensors.torch import load_file
from transformers import AutoModel

import llmcond
from llmcond import plugins
from llmcond.bundled import bundled_names
from llmcond.cli import run
from llmcond.encoders import EncoderOptions, resolve
from llmcond.errors import UserError
from llmcond.files import digest_file
from llmcond.finetune.loop import BEST, STATE, BatchSchedule, TrainingState
from llmcond.finetune.settings import TuneSettings, describe_differences
from llmcond.heads import load_recipe
from llmcond.heads.objectives import contrast_groups
from llmcond.heads.settings import learning_rate_factor
from llmcond.prompts import load_prompt
from llmcond.run_log import TRAINING, log_path, read_log
from llmcond.workflows.extract import _choose_default_prompt
from llmcond.workflows.train_job import build_tune_settings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def train(tiny_bert, data, tmp_path, monkeypatch, capsys):
    """Return a function that runs ``train-lora`` on small rows and returns its output."""
    monkeypatch.chdir(tmp_path)
    defaults = "--pooling mean --normalize --dtype float32 --epochs 2 --batch-size 16 --rank 4"

    def call(folder, *arguments, command=run_json):
        options = ["--model", tiny_bert, "--data", data, "--run", folder, *defaults.split()]
        return command(capsys, "train-lora", *change_flags(options, *arguments))

    return call


# -- steps and their rows ----------------------------------------------------------------------


def test_epoch_has_each_row_once_and_keeps_contrastive_pairs_together():
    group = contrast_groups(np.array([0, 0, 1, 2, 3, 3, 2, 0, 0, 4]))
    settings = TuneSettings(batch_size=4, gradient_accumulation_steps=2)
    schedule = BatchSchedule(group, settings, seed=3, processes=1)
    assert schedule.steps == 3
    epochs = [schedule.epoch(number) for number in (0, 1)]
    for epoch in epochs:
        assert len(epoch) == schedule.steps
        assert all(len(step) == 2 for step in epoch)
        parts = [part for step in epoch for part in step]
        assert sorted(np.concatenate(parts).tolist()) == list(range(10))
        for part in parts:
            complete_groups = [
                np.flatnonzero(group == group_id) for group_id in np.unique(group[part])
            ]
            assert sorted(np.concatenate(complete_groups).tolist()) == sorted(part.tolist())
            # The rows of a contrastive pair keep their order, and so the positive its position.
            assert all(np.diff(part)[np.diff(group[part]) == 0] > 0)
    first, second = ([row for step in epoch for part in step for row in part] for epoch in epochs)
    assert first != second
    repeated = BatchSchedule(group, settings, seed=3, processes=1)
    assert str(repeated.epoch(1)) == str(epochs[1])


def test_steps_have_similar_sizes():
    schedule = BatchSchedule(np.arange(101), TuneSettings(batch_size=25), seed=0, processes=1)
    assert {len(part) for step in schedule.epoch(0) for part in step} <= {20, 21}
    assert schedule.steps == 5


def test_step_with_fewer_rows_than_processes_is_rejected():
    with pytest.raises(UserError, match="has 2 rows, too few for 3 processes"):
        BatchSchedule(np.arange(10), TuneSettings(batch_size=2), seed=0, processes=3)


def test_learning_rate_follows_schedule():
    linear = [TuneSettings(warmup=0.2).learning_rate_factor(step, 10) for step in range(10)]
    assert linear[:2] == pytest.approx([1 / 3, 2 / 3])
    assert linear[2:] == pytest.approx([1 - i / 8 for i in range(8)])
    assert learning_rate_factor(9, 10, 0, "constant") == 1


@pytest.mark.parametrize("name", bundled_names("heads"))
def test_training_settings_of_bundled_recipes_are_valid(name):
    recipe = load_recipe(name)
    settings = build_tune_settings({}, recipe)
    assert set(recipe.finetune) <= set(settings.to_json())
    if name.startswith("hypercl"):
        assert (settings.full, settings.max_grad_norm, settings.batch_size) == (True, 0.0, 32)
        assert settings.learning_rate == recipe.settings.learning_rate
        assert recipe.settings.ties == "keep"
        assert recipe.settings.info_nce_form == "acl"


# -- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ema_decay", "first_stop"), [(0.0, 1), (0.9, 2)])
def test_resumed_training_is_bit_equal_to_uninterrupted_training(
    tiny_bert, data, tmp_path, ema_decay, first_stop
):
    settings = {
        "epochs": 2,
        "ema_decay": ema_decay,
        "adapter_dropout": 0.1,
        "gradient_accumulation_steps": 2,
    }
    uninterrupted = build_trainer(tiny_bert, data, tmp_path / "whole", **settings)
    uninterrupted.run(lambda *_: None)
    expected = {
        name: value.clone() for name, value in uninterrupted.model.trained_parameters().items()
    }
    assert uninterrupted.steps == 8

    for stop in range(first_stop, uninterrupted.steps + 1, 2):
        folder = tmp_path / str(stop)
        resumed_trainer = resume_training(
            partial(build_trainer, tiny_bert, data, folder, **settings), stop
        )
        assert resumed_trainer.progress.step == max(s for s in (0, 3, 4, 6) if s < stop)
        resumed_trainer.run(lambda *_: None)
        assert resumed_trainer.progress.curve == uninterrupted.progress.curve
        for name, value in resumed_trainer.model.trained_parameters().items():
            assert torch.equal(value, expected[name]), (stop, name)
        assert digest_file(folder / BEST) == digest_file(tmp_path / "whole" / BEST)


def test_dropout_and_order_follow_seed(tiny_bert, data, tmp_path):
    losses = []
    for name, dropout in (("a", 0.0), ("b", 0.0), ("c", 0.5)):
        seen = []
        trainer = build_trainer(
            tiny_bert,
            data,
            tmp_path / name,
            epochs=1,
            adapter_dropout=dropout,
            encoder_dropout=False,
        )
        trainer.run(lambda _, steps, entry, seen=seen: seen.append(entry["loss"]))
        losses.append(seen)
    assert losses[0] == losses[1]
    # Adapters start as zero maps, so that dropout has an effect from the second step on.
    assert losses[0][0] == losses[2][0]
    assert losses[0][1:] != losses[2][1:]


def test_gradient_accumulation_does_not_change_parameters(tiny_bert, data, tmp_path):
    parameters = []
    for accumulation_steps in (1, 2, 4):
        trainer = build_trainer(
            tiny_bert,
            data,
            tmp_path / str(accumulation_steps),
            epochs=1,
            gradient_accumulation_steps=accumulation_steps,
            encoder_dropout=False,
            dropout=0.0,
        )
        # The contrastive loss is a mean over pairs, so each part must have as many of them.
        trainer._train.rating[:] = np.tile([0.25, 0.75], len(trainer._train) // 2)
        trainer.run(lambda *_: None)
        parameters.append(trainer.model.trained_parameters())
    for name, value in parameters[0].items():
        for other in parameters[1:]:
            torch.testing.assert_close(value, other[name], rtol=1e-3, atol=2e-5)


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


def test_changed_settings_are_each_named(train, tmp_path):
    train("tuned", "--head", "linear", "--dim", "8")
    message = train("tuned", "--head", "linear", "--dim", "16", "--seed", "1", command=run_rejected)
    assert "head.dim: 16, not 8" in message
    assert "seed: 1, not 0" in message
    assert "--run" in message


def test_unfinished_training_rejects_changed_settings(tiny_bert, data, tmp_path):
    stop_after(build_trainer(tiny_bert, data, tmp_path / "t", epochs=2), 4)
    with pytest.raises(
        UserError, match=r"settings\.epochs: 3, not 2; settings\.ema_decay: 0\.9, not 0"
    ):
        build_trainer(tiny_bert, data, tmp_path / "t", epochs=3, ema_decay=0.9)


def test_differences_name_nested_and_missing_keys():
    old = {"a": 1, "b": {"c": [1], "d": 2}, "gone": None, "old": 3}
    new = {"a": 1, "b": {"c": [2], "d": 2}, "new": 4}
    assert describe_differences(old, new) == [
        "b.c: [2], not [1]",
        "old: None, not 3",
        "new: 4, not None",
    ]


# -- the trained run ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tiny_bert, small_rows, tmp_path_factory) -> Path:
    """A trained run, with LoRA under an MLP head."""
    folder = tmp_path_factory.mktemp("tuned")
    data = folder / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = (
        f"train-lora --model {tiny_bert} --data {data} --run {folder / 'run'} --head mlp --dim 8 "
    )
    command += "--pooling cls --dtype float32 --epochs 3 --batch-size 8 --rank 4 --set dropout=0"
    assert run(command.split()) == 0
    return folder / "run"


def test_moved_run_works_without_data(tuned, tmp_path, capsys):
    moved = Path(shutil.copytree(tuned, tmp_path / "moved"))
    first, second = ["two men play in the park"], ["two dogs sit at the beach"]
    expected = llmcond.load_embedder(tuned).similarity(first, second, "the place")
    (moved / "rows.parquet").unlink()
    shutil.rmtree(moved / "features")
    embedder = llmcond.load_embedder(moved)
    assert embedder.encoder.identity.pooling == "cls"
    np.testing.assert_array_equal(embedder.similarity(first, second, "the place"), expected)
    output = run_json(
        capsys, "similarity", *first, *second, "--condition", "the place", "--run", moved
    )
    assert output["similarities"][0]["similarity"] == pytest.approx(float(expected[0]), abs=1e-5)
    assert output["head"] == "mlp@concat-sent-cond+c"


@pytest.mark.parametrize(
    ("name", "bundled", "expected"),
    [
        ("concat-cond-sent", True, "concat-cond-sent"),
        ("concat-cond-sent", False, "concat-sent-cond"),
        ("mine", False, "concat-sent-cond"),
    ],
)
def test_extraction_uses_prompt_of_training(tuned, tmp_path, caplog, name, bundled, expected):
    caplog.set_level("INFO", "llmcond")
    folder = Path(shutil.copytree(tuned, tmp_path / "copy"))
    record = json.loads((folder / "training.json").read_text())
    record["made_of"]["prompts"] = {name: load_prompt(name).digest if bundled else "0"}
    (folder / "training.json").write_text(json.dumps(record))
    resolved = resolve(str(folder), EncoderOptions(device="cpu"))
    assert _choose_default_prompt(resolved).name == expected
    assert (f"name the file of {name} with --prompt" in caplog.text) != bundled


@pytest.mark.parametrize("names", [("routed", "separate"), ("separate", "routed")])
def test_extraction_uses_first_of_several_prompts(tuned, tmp_path, names):
    folder = Path(shutil.copytree(tuned, tmp_path / "copy"))
    record = json.loads((folder / "training.json").read_text())
    record["made_of"]["prompts"] = {name: load_prompt(name).digest for name in names}
    (folder / "training.json").write_text(json.dumps(record))
    assert (
        _choose_default_prompt(resolve(str(folder), EncoderOptions(device="cpu"))).name == names[0]
    )


def test_recorded_scores_match_evaluate(tuned, capsys):
    record = json.loads((tuned / "training.json").read_text())
    for scores in record["summary"]["scores"]:
        name, split = scores["name"], scores["split"]
        rows = run_json(capsys, "evaluate", "--run", tuned, "--head", name, "--split", split)[
            "results"
        ]
        assert next(row for row in rows if row["name"] == name) == scores
    dev = next(scores for scores in record["summary"]["scores"] if scores["split"] == "dev")
    # The features are stored in float16 and encoded in other batches.
    assert dev["spearman"] == pytest.approx(record["summary"]["dev_spearman"], abs=0.06)


def test_tuned_run_can_be_encoder_of_another_run(tuned, data, tmp_path, capsys):
    other = tmp_path / "other"
    arguments = ["--model", tuned, "--data", data, "--run", other, "--dtype", "float32"]
    summary = run_json(capsys, "extract", *arguments)
    encoder_record = json.loads((tuned / "run.json").read_text())["encoder"]
    assert summary["fingerprint"] == encoder_record["fingerprint"]
    base = llmcond.load_encoder(
        json.loads((tuned / "encoder.json").read_text())["base"], dtype="float32", pooling="cls"
    )
    assert base.identity.fingerprint != encoder_record["fingerprint"]
    arguments = ["--head", "linear", "--dim", "8", "--run", other, "--set", "epochs=2"]
    assert run_json(capsys, "fit-head", *arguments)["dim_in"] == 32


def test_peft_loads_adapter(tuned, tiny_bert):
    from peft import PeftModel

    text = llmcond.EncoderInput(instruction="", text="two men play in the park")
    ours = llmcond.load_encoder(tuned, dtype="float32").encode([text])[0]
    peft = PeftModel.from_pretrained(
        AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False), tuned
    ).eval()
    base = AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False).eval()
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tiny_bert)([text.text], return_tensors="pt")
    with torch.no_grad():
        theirs, untrained = (
            torch.nn.functional.normalize(model(**tokens).last_hidden_state[:, 0])[0].numpy()
            for model in (peft, base)
        )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.abs(ours - untrained).max() > 1e-3


def test_merged_and_unmerged_adapters_give_same_vectors(train, tuned, data, tmp_path):
    arguments = ("--head", "none", "--learning-rate", "1e-2")
    unmerged, merged = (train("unmerged", *arguments), train("merged", *arguments, "--merge"))
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    texts = [llmcond.EncoderInput(instruction="", text=f"two men number {i}") for i in range(5)]
    vectors = [
        llmcond.load_encoder(tmp_path / name, dtype="float32").encode(texts)
        for name in ("unmerged", "merged")
    ]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)
    for first, second in zip(unmerged["scores"], merged["scores"], strict=True):
        assert first["spearman"] == pytest.approx(second["spearman"], abs=0.02)
    assert AutoModel.from_pretrained(tmp_path / "merged").config.model_type == "bert"


@pytest.mark.parametrize("options", [["--merge"], ["--rank", "full"]])
def test_only_links_within_checkpoint_are_copied(train, tiny_bert, data, tmp_path, capsys, options):
    secret, model = tmp_path / "id_rsa", Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    secret.write_text("a secret")
    (model / "x.model").symlink_to(secret)
    message = train("run", *options, "--model", model, "--head", "linear", command=run_rejected)
    assert f"{model / 'x.model'} is a link to {secret}" in message
    assert not list((tmp_path / "run").rglob("*.model"))
    (model / "x.model").unlink()
    (model / "README").write_text("of this folder")
    (model / "vocab.txt").symlink_to("README")
    train("run", *options, "--model", model, "--head", "linear")
    assert (tmp_path / "run" / "vocab.txt").read_text() == "of this folder"


def test_full_fine_tuning_changes_every_weight(train, tiny_bert, tmp_path):
    summary = train("full", "--head", "none", "--rank", "full")
    before = load_file(tiny_bert / "model.safetensors")
    after = load_file(tmp_path / "full" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    # No text uses the second type or 64 tokens, so weight decay alone changes those embeddings.
    assert changed == set(before)
    assert summary["weights"]["trained"] == summary["weights"]["of"]
    assert summary["head"] == "none@concat-sent-cond+c"


@pytest.mark.parametrize("rank", ["2", "full"])
def test_encoder_with_dense_layers_is_trained_in_16_bit(data, tmp_path, capsys, rank):
    checkpoint = checkpoints.build_checkpoint("gemma", tmp_path / "gemma").folder
    checkpoints.change_json(checkpoint / "tokenizer_config.json", pad_token="[NEWPAD]")
    options = "--dtype bfloat16 --epochs 1 --head none --prompt concat-sent-cond"
    result = run_json(
        capsys, "train-lora", "--model", checkpoint, "--data", data, "--run", tmp_path / "run",
        "--rank", rank, *options.split(),
    )  # fmt: skip
    # The score is that of the encoder at inference, when its dense layers are in float32.
    spearman = result["scores"][0]["spearman"]
    assert result["dev_spearman"] == pytest.approx(spearman, abs=0.02)


@pytest.mark.parametrize("options", ["", "--router csr --router-layers 2"])
def test_routed_inputs_are_trained_in_16_bit(tiny_bert, data, tmp_path, capsys, options):
    base_options = "--pooling mean --dtype bfloat16 --epochs 1 --head none --prompt routed"
    result = run_json(
        capsys, "train-lora", "--model", tiny_bert, "--data", data, "--run", tmp_path / "run",
        *base_options.split(), *options.split(),
    )  # fmt: skip
    assert result["dev_spearman"] == pytest.approx(result["scores"][0]["spearman"], abs=0.05)


def test_training_starts_from_head_fitted_on_frozen_features(
    train, tiny_bert, data, capsys, tmp_path
):
    settings = ["--pooling", "mean", "--normalize", "--dtype", "float32"]
    settings += ["--prompt", "concat-sent-cond"]
    run_json(capsys, "extract", "--model", tiny_bert, "--data", data, "--run", "frozen", *settings)
    options = "--head mlp --dim 8 --run frozen --set dropout=0 epochs=60"
    fitted = run_json(capsys, "fit-head", *options.split())
    arguments = ("--start", fitted["folder"], "--learning-rate", "1e-9")
    arguments += ("--set", "learning_rate=1e-9")
    summary = train("tuned", *arguments)
    # Both heads subtract e(c), and the learning rate is too small to change the weights notably.
    assert summary["head"] == "mlp@concat-sent-cond"
    dev = next(scores for scores in summary["scores"] if scores["split"] == "dev")
    assert dev["spearman"] == pytest.approx(fitted["dev_spearman"], abs=0.02)
    message = train("other", *arguments, "--dim", "4", command=run_rejected)
    assert "--start" in message
    (tmp_path / "frozen" / "heads").rename(tmp_path / "gone")
    assert "does not exist" in train("third", *arguments, command=run_rejected)


CUSTOM_HEAD = """
import torch

from llmcond.heads import HeadModule, SizedSettings


class Gated(HeadModule):
    Settings = SizedSettings

    def __init__(self, settings, dim_in, dim_condition=0):
        super().__init__(settings, dim_in, dim_condition)
        self.value = torch.nn.Linear(dim_in, settings.dim)
        self.gate = torch.nn.Linear(dim_in, settings.dim)

    def forward(self, x, condition=None, which=None):
        return self.dropout(self.value(x) * torch.sigmoid(self.gate(x)))
"""


def test_custom_head_is_trained_from_its_file(train, tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    monkeypatch.setattr(plugins, "_LOADED", [])
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "my_heads.py").write_text(CUSTOM_HEAD)
    (tmp_path / "own" / "gated.toml").write_text(
        'kind = "my_heads.py:Gated"\ndescription = "d"\nsource = "s"\ndim = 8\ndropout = 0.1\n'
        "learning_rate = 1e-2\nbatch_size = 8\nepochs = 1\npatience = 1\n"
    )
    arguments = ("--head", tmp_path / "own" / "gated.toml", "--set", "cosent=0.1")
    summary = train("tuned", *arguments)
    assert summary["head"] == "gated@concat-sent-cond+c"
    assert summary["weights"]["head"] == 2 * (32 * 8 + 8)
    assert train("tuned", *arguments) == summary
    embedder = llmcond.load_embedder(tmp_path / "tuned")
    assert embedder.encode(["two men play in the park"], "the place").shape == (1, 8)
    record = json.loads((tmp_path / "tuned/heads/gated@concat-sent-cond+c/head.json").read_text())
    assert record["kind"] == "my_heads.py:Gated"
    # --start alone names the head, so that --head is not needed.
    continued = train("again", "--start", tmp_path / "tuned/heads/gated@concat-sent-cond+c")
    assert continued["head"] == summary["head"]


def test_template_with_extra_column_is_trained_on(train, write_rows, small_rows, data, tmp_path):
    (tmp_path / "noted.toml").write_text(
        'description = "d"\nsource = "s"\nfields = ["note"]\n'
        '[conditional]\ntext = "{note} {sentence} {condition}"\n'
        '[unconditional]\ntext = "{condition}"\n'
    )
    arguments = ("--head", "none", "--prompt", tmp_path / "noted.toml")
    assert "note" in train("without", *arguments, command=run_rejected)
    header = "sentence1,sentence2,condition,label,note"
    write_rows([(*row, "children") for row in small_rows], data.name, header)
    summary = train("noted", *arguments)
    assert summary["prompt"] == "noted"
    assert [scores["n"] for scores in summary["scores"]] == [12, 12]
    write_rows([(*row, f"number {row[3]}") for row in small_rows], data.name, header)
    assert train("other", *arguments)["dev_spearman"] != summary["dev_spearman"]


def test_finished_training_is_not_repeated(train, tmp_path):
    first = train("tuned", "--head", "none")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "tuned").rglob("*")}
    assert train("tuned", "--head", "none") == first
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "tuned").rglob("*")}


def test_encoder_is_trained_for_truncated_embeddings(train, tmp_path):
    options = ("--head", "none", "--epochs", "1", "--set", "matryoshka=4,8")
    first = train("small", *options)
    assert llmcond.load_embedder(tmp_path / "small").matryoshka_dims == [8, 4]
    assert train("small", *options) == first  # the recorded settings are the same


def test_training_record_and_card_store_configuration(tuned):
    record = json.loads((tuned / "training.json").read_text())
    assert record["made_of"]["encoder"]["weights"].startswith("sha256:")
    assert record["versions"]["peft"]
    assert record["made_of"]["settings"]["rank"] == 4
    assert [entry["epoch"] for entry in record["curve"]] == [1, 2, 3]
    assert record["summary"]["weights"]["trained"] > 0
    card = (tuned / "README.md").read_text()
    assert card.startswith("---\n")
    assert "library_name: peft" in card
    assert f"| dev | {record['summary']['scores'][0]['n']} |" in " ".join(card.split())
    assert str(tuned.parent) not in card.split("## Use")[1]


# -- invalid input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head", "none", "--target", "q_proj"], "Legal: auto, attention, mlp, attention.self"),
        (["--head", "none", "--rank", "0"], "expected a whole number of at least 1, or full"),
        (["--head", "none", "--rank", "full", "--quantize", "4bit"], "cannot be trained"),
        (["--head", "none", "--merge", "--quantize", "4bit"], "Leave out --merge"),
        (["--head", "pca"], "not fitted by gradients"),
        ([], "Give --head"),
        (["--head", "towers", "--set", "members=3"], "members=1"),
        (["--head", "none", "--set", "dropout=0.1"], "no head has no setting 'dropout'"),
        (
            ["--head", "none", "--learning-rate", "0"],
            "'learning_rate' is 0.0: it must be above 0",
        ),
        (["--head", "none", "--prompt", "control-no-condition"], "is a control"),
        (["--head", "hadamard", "--prompt", "cond"], "instruction"),
        (["--head", "none", "--batch-size", "2", "--gradient-accumulation-steps", "4"], "too few"),
        (["--head", "none", "--seed", "-1"], "at least 0"),
    ],
)
def test_invalid_options_are_rejected_in_one_line(train, tmp_path, arguments, message):
    assert message in train("bad", *arguments, command=run_rejected)
    assert not (tmp_path / "bad").exists()


def test_data_without_ratings_is_rejected(tiny_bert, write_rows, small_rows, capsys, tmp_path):
    data = write_rows([(*row[:3], -1) for row in small_rows])
    arguments = ["--model", tiny_bert, "--data", data, "--run", tmp_path / "r", "--head", "none"]
    message = run_rejected(capsys, "train-lora", *arguments)
    assert "0 rated rows" in message
    assert "rows.csv" in message


def test_training_does_not_overwrite_frozen_run(train, tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "frozen")
    assert "frozen" in train("frozen", "--head", "none", command=run_rejected)


def test_training_adapter_on_adapter_is_rejected(tuned, data, capsys, tmp_path):
    arguments = ["--model", tuned, "--data", data, "--run", tmp_path / "r", "--head", "none"]
    message = run_rejected(capsys, "train-lora", *arguments)
    assert "--merge" in message


def test_non_finite_loss_stops_training_and_keeps_checkpoint(train, tmp_path):
    arguments = (
        "--head",
        "mlp",
        "--dim",
        "8",
        "--set",
        "learning_rate=1e38",
        "--max-grad-norm",
        "0",
        "--warmup",
        "0",
        "--checkpoint-steps",
        "1",
    )
    message = train("wild", *arguments, command=run_rejected)
    assert "became" in message
    assert "step 2 of" in message
    assert "the last checkpoint is in wild/training" in message
    assert "--learning-rate" in message
    state = TrainingState(tmp_path / "wild" / "training", {})
    assert (state.folder / STATE).is_file()


def limit_files_from_step_4():
    """Limit the size of files from the second checkpoint on, as a full disk would."""
    save = TrainingState.save

    def save_with_limit(self, progress, tensors):
        if progress.step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        save(self, progress, tensors)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    TrainingState.save = save_with_limit


def test_full_disk_keeps_previous_checkpoint(tiny_bert, data, tmp_path):
    """A limit on the file size stands in for a full disk, because the same write fails."""
    arguments = f"train-lora --model {tiny_bert} --data {data} --run {tmp_path / 'r'} --head none"
    arguments += " --pooling mean --batch-size 8 --checkpoint-steps 2 --epochs 1 --rank 8"
    limited = Command(tmp_path / "printed", arguments.split(), setup=limit_files_from_step_4)
    status, _, log = limited.finish()
    assert status == 2, log
    assert "the disk is full" in log
    assert "Traceback" not in log
    assert sorted(path.name for path in (tmp_path / "r" / "training").iterdir()) == [STATE]
    status, _, log = Command(tmp_path / "printed", arguments.split()).finish()
    assert status == 0, log
    assert "from step 2" in log


def test_damaged_checkpoint_is_reported(tiny_bert, data, tmp_path):
    trainer = build_trainer(tiny_bert, data, tmp_path / "t", epochs=1)
    trainer.run(lambda *_: None)
    path = tmp_path / "t" / STATE
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(llmcond.LlmcondError, match="start again"):
        build_trainer(tiny_bert, data, tmp_path / "t", epochs=1)


# -- several processes -------------------------------------------------------------------------


def test_two_processes_match_two_accumulation_steps(tiny_bert, data, tmp_path):
    """Each of two processes takes its share of every step, and pairs stay together."""
    arguments = f"train-lora --model {tiny_bert} --data {data} --head hypernet --dim 8 --epochs 2"
    arguments += " --set rank=2 info_nce=1 dropout=0 --no-encoder-dropout --batch-size 16 --rank 4"
    arguments += " --pooling mean --dtype float32 --json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # torchrun and accelerate launch set these variables.
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        Command(
            tmp_path / rank,
            [*arguments.split(), "--run", tmp_path / "two"],
            {**environment, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]
    (status, out, err), (other_status, other_out, other_err) = (
        process.finish() for process in processes
    )
    assert (status, other_status) == (0, 0), err + other_err
    assert other_out == ""
    distributed = json.loads(out)
    assert (
        run(
            [
                *arguments.split(),
                "--gradient-accumulation-steps",
                "2",
                "--run",
                str(tmp_path / "one"),
            ]
        )
        == 0
    )
    single = json.loads((tmp_path / "one" / "training.json").read_text())["summary"]
    assert distributed["steps"] == single["steps"], (distributed, single)
    assert distributed["best_step"] == single["best_step"], (distributed, single)
    records = read_log(log_path(tmp_path / "two", TRAINING))
    steps = [record["step"] for record in records if record["event"] == "step"]
    assert steps == list(range(1, single["steps"] + 1))  # one process writes the log
    for name in ("adapter_model.safetensors", f"heads/{single['head']}/head-*.safetensors"):
        single_tensors, distributed_tensors = (
            load_file(next((tmp_path / folder).glob(name))) for folder in ("one", "two")
        )
        for key, value in single_tensors.items():
            torch.testing.assert_close(value, distributed_tensors[key], rtol=1e-3, atol=2e-5)
