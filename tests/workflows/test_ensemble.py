"""Ensembles of adapters: vectors, files, resuming, and rejected options."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags

import llmcond
from llmcond.cli import run
from llmcond.files import digest_file
from llmcond.finetune.loop import STATE
from llmcond.progress import FitBar

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = "--head none --pooling mean --dtype float32 --rank 2 --batch-size 16 --epochs 1"
TEXTS = [llmcond.EncoderInput(instruction="", text=f"two men number {i}") for i in range(5)]


@pytest.fixture(scope="module")
def command(tiny_checkpoint, small_rows, tmp_path_factory) -> list[str]:
    """The command that trains a tiny BERT on small rows."""
    data = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = [
        "train-lora",
        "--model",
        str(tiny_checkpoint()),
        "--data",
        str(data),
        "--normalize",
    ]
    return [*arguments, *OPTIONS.split(), "--learning-rate", "1e-2", "--checkpoint-steps", "1"]


@pytest.fixture(scope="module")
def ensemble(command, tmp_path_factory) -> Path:
    """An ensemble of two adapters, with a stage on dev."""
    folder = tmp_path_factory.mktemp("ensemble") / "run"
    options = "--ensemble 2 --seed 4 --then dev --then-share 0.5"
    assert run([*command, *options.split(), "--run", str(folder)]) == 0
    return folder


def load_encoder(folder: Path) -> llmcond.Encoder:
    return llmcond.load_encoder(folder, dtype="float32")


def test_vectors_concatenate_those_of_members(ensemble):
    combined = load_encoder(ensemble)
    first, second = (load_encoder(ensemble / f"adapter-{i}") for i in (0, 1))
    vectors, parts = combined.encode(TEXTS), [encoder.encode(TEXTS) for encoder in (first, second)]
    assert vectors.shape == (5, combined.dim) == (5, 64)
    np.testing.assert_allclose(vectors, np.hstack(parts) / np.sqrt(2), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert np.abs(parts[0] - parts[1]).max() > 1e-3
    identities = {encoder.identity.fingerprint for encoder in (combined, first, second)}
    assert len(identities) == 3
    embedder = llmcond.load_embedder(ensemble)
    assert embedder.dim == 64
    sentences = ["two men play in the park"], ["two dogs sit at the beach"], "the place"
    similarities = [
        llmcond.load_embedder(ensemble / f"adapter-{i}").similarity(*sentences) for i in (0, 1)
    ]
    np.testing.assert_allclose(
        embedder.similarity(*sentences), np.mean(similarities, axis=0), atol=1e-5
    )


def test_member_equals_single_training_with_its_seed(command, ensemble, tmp_path):
    options = "--seed 5 --then dev --then-share 0.5"
    assert run([*command, *options.split(), "--run", str(tmp_path / "alone")]) == 0
    name = "adapter_model.safetensors"
    assert digest_file(tmp_path / "alone" / name) == digest_file(ensemble / "adapter-1" / name)


def test_identity_depends_on_every_member(ensemble, tmp_path):
    copy = Path(shutil.copytree(ensemble, tmp_path / "moved"))
    before = load_encoder(copy).identity
    assert before.fingerprint == load_encoder(ensemble).identity.fingerprint
    first, second = (copy / f"adapter-{i}" / "adapter_model.safetensors" for i in (0, 1))
    second.write_bytes(first.read_bytes())
    assert load_encoder(copy).identity.fingerprint != before.fingerprint


def test_ensemble_is_run_with_record_and_card(ensemble, tmp_path, capsys):
    summary = json.loads((ensemble / "training.json").read_text())["summary"]
    assert [member["seed"] for member in summary["members"]] == [4, 5]
    assert summary["trained_on"] == ["train", "dev"]
    assert summary["steps"] == sum(member["steps"] for member in summary["members"])
    assert [score["split"] for score in summary["scores"]] == ["test"]
    rows = run_json(capsys, "evaluate", "--run", ensemble)["results"]
    row = next(row for row in rows if row["name"] == summary["head"])
    assert row["spearman"] == summary["scores"][0]["spearman"]
    card = " ".join((ensemble / "README.md").read_text().split())
    assert "fine-tuned as an ensemble of 2 members, each with LoRA of rank 2 and the head" in card
    assert not list(ensemble.glob("adapter-*/features"))
    assert "is an ensemble of 2 adapters" in run_rejected(
        capsys, "push", "me/mine", "--run", ensemble
    )
    folder = shutil.copytree(ensemble, tmp_path / "run")
    fit = run_json(capsys, "fit-head", "--run", folder, *"--head linear --dim 4".split())
    assert fit["dim_in"] == 64


class SimulatedKill(Exception):  # noqa: N818 - it stands for a kill, not an error
    pass


def test_interrupted_training_resumes_within_member(
    command, ensemble, tmp_path, monkeypatch, capsys
):
    folder, step_numbers = tmp_path / "run", []
    on_step = FitBar.on_step

    def stop_at_tenth_step(self, progress, steps, loss):
        on_step(self, progress, steps, loss)
        step_numbers.append(progress.step)
        if len(step_numbers) == 10:
            raise SimulatedKill

    monkeypatch.setattr(FitBar, "on_step", stop_at_tenth_step)
    arguments = [*command, *"--ensemble 2 --seed 4 --then dev --then-share 0.5".split()]
    with pytest.raises(SimulatedKill):
        run([*arguments, "--run", str(folder)])
    assert (folder / "adapter-0" / "training.json").is_file()
    assert (folder / "adapter-1" / "training" / STATE).is_file()
    assert run([*arguments, "--run", str(folder)]) == 0
    assert load_encoder(folder).identity.weights == load_encoder(ensemble).identity.weights
    n_steps = len(step_numbers)
    assert run([*arguments, "--run", str(folder)]) == 0
    assert len(step_numbers) == n_steps
    message = run_rejected(capsys, *command, "--ensemble", 3, "--seed", 4, "--run", folder)
    assert "ensemble: 3, not 2" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ensemble 0", "--ensemble is 0"),
        ("--ensemble 2 --head mlp", "Give --head none"),
        ("--ensemble 2 --merge", "Leave out --merge"),
        ("--ensemble 2 --rank full", "give --rank a number"),
        ("--ensemble 2 --no-normalize", "Add --normalize"),
        ("--ensemble 2 --prompt routed", "does not support routers"),
        ("--ensemble 2 --task kgc", "is for rated pairs"),
    ],
)
def test_invalid_options_report_one_line(command, tmp_path, capsys, options, message):
    changed = change_flags(command, *options.split())
    assert message in run_rejected(capsys, *changed, "--run", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
