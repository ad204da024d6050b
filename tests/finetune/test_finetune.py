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
from transformers import AutoModel, AutoTokenizer

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

PLAIN = "--pooling mean --normalize --dtype float32 --epochs 2 --batch-size 16 --rank 4"


@pytest.fixture
def train(tiny_bert, data, tmp_path, monkeypatch, capsys):
    """Return a function that runs ``train-lora`` on small rows and returns its output."""
    monkeypatch.chdir(tmp_path)

    def call(folder, *arguments, command=run_json):
        options = ["--model", tiny_bert, "--data", data, "--run", folder, *PLAIN.split()]
        return command(capsys, "train-lora", *change_flags(options, *arguments))

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
    linear = [TuneSettings(warmup=0.2).learning_rate_factor(step, 10) for step in range(10)]
    assert linear[:2] == pytest.approx([1 / 3, 2 / 3])
    assert linear[2:] == pytest.approx([1 - i / 8 for i in range(8)])
    assert learning_rate_factor(9, 10, 0, "constant") == 1


def test_training_settings_of_bundled_recipes_are_valid():
    for name in bundled_names("heads"):
        recipe = load_recipe(name)
        settings = build_tune_settings({}, recipe)
        assert set(recipe.finetune) <= set(settings.to_json())
        if name.startswith("hypercl"):
            assert (settings.full, settings.max_grad_norm, settings.batch_size) == (True, 0.0, 32)
            assert settings.learning_rate == recipe.settings.learning_rate
            assert (recipe.settings.ties, recipe.settings.info_nce_form) == ("keep", "acl")


def test_dropout_and_order_follow_seed(tiny_bert, data, tmp_path):
    losses = []
    for name, dropout in (("a", 0.0), ("b", 0.0), ("c", 0.5)):
        settings = {"epochs": 1, "adapter_dropout": dropout, "encoder_dropout": False}
        trainer = build_trainer(tiny_bert, data, tmp_path / name, **settings)
        losses.append([])
        trainer.run(lambda _, steps, entry: losses[-1].append(entry["loss"]))
    assert losses[0] == losses[1]
    # Adapters start as zero maps, so that dropout has an effect from the second step on.
    assert losses[0][0] == losses[2][0]
    assert losses[0][1:] != losses[2][1:]


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
    old = {"a": 1, "b": {"c": [1], "d": 2}, "gone": None, "old": 3}
    new = {"a": 1, "b": {"c": (2,), "d": 2}, "new": 4}
    differences = ["b.c: [2], not [1]", "old: None, not 3", "new: 4, not None"]
    assert describe_differences(old, new) == differences


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
def tuned(tiny_bert, small_rows, tmp_path_factory) -> Path:
    """A trained run, with LoRA under an MLP head."""
    folder = tmp_path_factory.mktemp("tuned")
    data = folder / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = f"train-lora --model {tiny_bert} --data {data} --run {folder / 'run'} --head mlp"
    command += " --pooling cls --dtype float32 --epochs 3 --batch-size 8 --rank 4 --dim 8"
    assert run([*command.split(), "--set", "dropout=0"]) == 0
    return folder / "run"


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


def test_moved_run_works_without_data(tuned, tmp_path, capsys):
    moved = Path(shutil.copytree(tuned, tmp_path / "moved"))
    first, second = ["two men play in the park"], ["two dogs sit at the beach"]
    expected = llmcond.load_embedder(tuned).similarity(first, second, "the place")
    (moved / "rows.parquet").unlink()
    shutil.rmtree(moved / "features")
    arguments = (*first, *second, "--condition", "the place", "--run", moved)
    output = run_json(capsys, "similarity", *arguments)
    assert output["similarities"][0]["similarity"] == pytest.approx(float(expected[0]), abs=1e-5)
    assert output["head"] == "mlp@concat-sent-cond+c"


@pytest.mark.parametrize(
    ("names", "bundled", "expected"),
    [
        (["concat-cond-sent", "separate"], True, "concat-cond-sent"),
        (["concat-cond-sent"], False, "concat-sent-cond"),
        (["mine"], False, "concat-sent-cond"),
    ],
)
def test_extraction_uses_first_prompt_of_training(
    tuned, tmp_path, caplog, names, bundled, expected
):
    caplog.set_level("INFO", "llmcond")
    folder = Path(shutil.copytree(tuned, tmp_path / "copy"))
    record = json.loads((folder / "training.json").read_text())
    digests = {name: load_prompt(name).digest if bundled else "0" for name in names}
    record["made_of"]["prompts"] = digests
    (folder / "training.json").write_text(json.dumps(record))
    resolved = resolve(str(folder), EncoderOptions(device="cpu"))
    assert _choose_default_prompt(resolved).name == expected
    assert (f"name the file of {names[0]} with --prompt" in caplog.text) != bundled


def test_tuned_run_can_be_encoder_of_another_run(tuned, data, tmp_path, capsys):
    arguments = ["--model", tuned, "--data", data, "--run", tmp_path / "other"]
    summary = run_json(capsys, "extract", *arguments, "--dtype", "float32")
    record = json.loads((tuned / "run.json").read_text())["encoder"]
    assert summary["fingerprint"] == record["fingerprint"]
    message = run_rejected(capsys, "train-lora", *arguments, "--head", "none")
    assert "--merge" in message  # an adapter cannot be trained on an adapter


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


@pytest.mark.parametrize(
    "options",
    [
        "--model gemma --rank 2 --prompt concat-sent-cond",
        "--model bert --pooling mean --prompt routed --router csr --router-layers 2",
    ],
)
def test_encoder_is_trained_in_16_bit(data, tiny_bert, tmp_path, capsys, options):
    gemma = checkpoints.build_checkpoint("gemma", tmp_path / "gemma").folder
    options = options.replace("gemma", str(gemma)).replace("bert", str(tiny_bert), 1).split()
    options += "--dtype bfloat16 --epochs 1 --head none".split()
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
    summary = train("tuned", "--head", tmp_path / "own" / "gated.toml", "--set", "cosent=0.1")
    assert summary["head"] == "gated@concat-sent-cond+c"
    assert summary["weights"]["head"] == 2 * (32 * 8 + 8)
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
    arguments = ("--head", "none", "--prompt", tmp_path / "noted.toml", "--epochs", "1")
    assert "note" in train("without", *arguments, command=run_rejected)
    header, scores = "sentence1,sentence2,condition,label,note", []
    for folder, note in (("noted", "children"), ("other", "number {}")):
        rows = [(*row, note.format(row[3])) for row in small_rows]
        write_rows(rows, data.name, header)
        scores.append(train(folder, *arguments)["dev_spearman"])
    assert scores[0] != scores[1]


# -- invalid input -----------------------------------------------------------------------------


def test_only_links_within_checkpoint_are_copied(train, tiny_bert, tmp_path):
    secret, model = tmp_path / "id_rsa", Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    secret.write_text("a secret")
    (model / "x.model").symlink_to(secret)
    options = ("--model", model, "--head", "none", "--epochs", "1")
    for option in (["--merge"], ["--rank", "full"]):
        message = train("run", *options, *option, command=run_rejected)
        assert f"{model / 'x.model'} is a link to {secret}" in message
    assert not list((tmp_path / "run").rglob("*.model"))
    (model / "x.model").unlink()
    (model / "README").write_text("of this folder")
    (model / "vocab.txt").symlink_to("README")
    summary = train("run", *options, "--rank", "full")
    assert summary["weights"]["trained"] == summary["weights"]["of"]
    assert (tmp_path / "run" / "vocab.txt").read_text() == "of this folder"


def test_invalid_options_are_rejected_in_one_line(train, write_rows, small_rows, tmp_path):
    for arguments, message in (
        ("--head none --target q_proj", "Legal: auto, attention, mlp, attention.self"),
        ("--head none --rank 0", "expected a whole number of at least 1, or full"),
        ("--head none --rank full --quantize 4bit", "cannot be trained"),
        ("--head none --merge --quantize 4bit", "Leave out --merge"),
        ("--head pca", "not fitted by gradients"),
        ("", "Give --head"),
        ("--head towers --set members=3", "members=1"),
        ("--head none --set dropout=0.1", "no head has no setting 'dropout'"),
        ("--head none --learning-rate 0", "'learning_rate' is 0.0: it must be above 0"),
        ("--head none --prompt control-no-condition", "is a control"),
        ("--head hadamard --prompt cond", "instruction"),
        ("--head none --batch-size 2 --gradient-accumulation-steps 4", "too few"),
        ("--head none --seed -1", "at least 0"),
    ):
        assert message in train("bad", *arguments.split(), command=run_rejected)
    write_rows([(*row[:3], -1) for row in small_rows])
    assert "rows.csv has 0 rated rows" in train("bad", "--head", "none", command=run_rejected)
    assert not (tmp_path / "bad").exists()


def test_non_finite_loss_stops_training_and_keeps_checkpoint(train, tmp_path):
    options = "--head mlp --dim 8 --set learning_rate=1e38 --max-grad-norm 0 --warmup 0"
    message = train("wild", *options.split(), "--checkpoint-steps", 1, command=run_rejected)
    assert "became" in message
    assert "step 2 of" in message
    assert "the last checkpoint is in wild/training" in message
    assert "--learning-rate" in message
    assert (tmp_path / "wild" / "training" / STATE).is_file()


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
