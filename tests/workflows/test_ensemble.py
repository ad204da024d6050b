"""Ensembles of adapters: their vectors, their files, going on, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import ok, refused

import llmcond
from llmcond.cli import run
from llmcond.files import digest_file
from llmcond.finetune.state import STATE
from llmcond.progress import TrainBar

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "--head none --pooling mean --dtype float32 --rank 2 --batch-size 16 --epochs 1"
TEXTS = [llmcond.EncoderInput(instruction="", text=f"two men number {i}") for i in range(5)]


@pytest.fixture(scope="module")
def command(tiny_checkpoint, small_rows, tmp_path_factory) -> list[str]:
    """Train a tiny BERT on small rows."""
    data = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = ["train-lora", "--model", str(tiny_checkpoint()), "--data", str(data), "--normalize"]
    return [*given, *PLAIN.split(), "--learning-rate", "1e-2", "--checkpoint-steps", "1"]


@pytest.fixture(scope="module")
def ensemble(command, tmp_path_factory) -> Path:
    """Two adapters, and a stage on dev."""
    folder = tmp_path_factory.mktemp("ensemble") / "run"
    given = "--ensemble 2 --seed 4 --then dev --then-share 0.5"
    assert run([*command, *given.split(), "--run", str(folder)]) == 0
    return folder


def encoder_of(folder: Path) -> llmcond.Encoder:
    return llmcond.load_encoder(folder, dtype="float32")


def test_its_vectors_are_those_of_its_members_side_by_side(ensemble):
    whole = encoder_of(ensemble)
    one, two = (encoder_of(ensemble / f"adapter-{i}") for i in (0, 1))
    vectors, parts = whole.encode(TEXTS), [own.encode(TEXTS) for own in (one, two)]
    assert vectors.shape == (5, whole.dim) == (5, 64)
    np.testing.assert_allclose(vectors, np.hstack(parts) / np.sqrt(2), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert np.abs(parts[0] - parts[1]).max() > 1e-3
    identities = {own.identity.fingerprint for own in (whole, one, two)}
    assert len(identities) == 3
    embedder = llmcond.load_embedder(ensemble)
    assert embedder.dim == 64
    sentences = ["two men play in the park"], ["two dogs sit at the beach"], "the place"
    each = [llmcond.load_embedder(ensemble / f"adapter-{i}").similarity(*sentences) for i in (0, 1)]
    np.testing.assert_allclose(embedder.similarity(*sentences), np.mean(each, axis=0), atol=1e-5)


def test_a_member_is_what_training_with_its_seed_gives(command, ensemble, tmp_path):
    given = "--seed 5 --then dev --then-share 0.5"
    assert run([*command, *given.split(), "--run", str(tmp_path / "alone")]) == 0
    name = "adapter_model.safetensors"
    assert digest_file(tmp_path / "alone" / name) == digest_file(ensemble / "adapter-1" / name)


def test_its_identity_is_that_of_all_members(ensemble, tmp_path):
    moved = Path(shutil.copytree(ensemble, tmp_path / "moved"))
    before = encoder_of(moved).identity
    assert before.fingerprint == encoder_of(ensemble).identity.fingerprint
    one, two = (moved / f"adapter-{i}" / "adapter_model.safetensors" for i in (0, 1))
    two.write_bytes(one.read_bytes())
    assert encoder_of(moved).identity.fingerprint != before.fingerprint


def test_it_is_a_run_and_says_what_it_is(ensemble, tmp_path, capsys):
    summary = json.loads((ensemble / "training.json").read_text())["summary"]
    assert [own["seed"] for own in summary["members"]] == [4, 5]
    assert summary["trained_on"] == ["train", "dev"]
    assert summary["steps"] == sum(own["steps"] for own in summary["members"])
    assert [own["split"] for own in summary["scores"]] == ["test"]
    rows = ok(capsys, "evaluate", "--run", ensemble)["results"]
    row = next(own for own in rows if own["name"] == summary["head"])
    assert row["spearman"] == summary["scores"][0]["spearman"]
    card = " ".join((ensemble / "README.md").read_text().split())
    assert "fine-tuned as an ensemble of 2 members, each with LoRA of rank 2 and the head" in card
    assert not list(ensemble.glob("adapter-*/features"))
    assert "is an ensemble of 2 adapters" in refused(capsys, "push", "me/mine", "--run", ensemble)
    folder = shutil.copytree(ensemble, tmp_path / "run")
    done = ok(capsys, "fit-head", "--run", folder, *"--head linear --dim 4".split())
    assert done["dim_in"] == 64


class Stopped(Exception):  # noqa: N818 - it stands for a kill
    pass


def test_stopped_in_a_member_it_goes_on_there(command, ensemble, tmp_path, monkeypatch, capsys):
    folder, seen = tmp_path / "run", []
    on_step = TrainBar.on_step

    def stopping(self, done, steps, loss):
        on_step(self, done, steps, loss)
        seen.append(done.step)
        if len(seen) == 10:
            raise Stopped

    monkeypatch.setattr(TrainBar, "on_step", stopping)
    given = [*command, *"--ensemble 2 --seed 4 --then dev --then-share 0.5".split()]
    with pytest.raises(Stopped):
        run([*given, "--run", str(folder)])
    assert (folder / "adapter-0" / "training.json").is_file()
    assert (folder / "adapter-1" / "training" / STATE).is_file()
    assert run([*given, "--run", str(folder)]) == 0
    assert encoder_of(folder).identity.weights == encoder_of(ensemble).identity.weights
    n_steps = len(seen)
    assert run([*given, "--run", str(folder)]) == 0
    assert len(seen) == n_steps
    said = refused(capsys, *command, "--ensemble", 3, "--seed", 4, "--run", folder)
    assert "ensemble: 3, not 2" in said


@pytest.mark.parametrize(
    ("given", "said"),
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
def test_bad_input_is_refused_in_one_line(command, tmp_path, capsys, given, said):
    assert said in refused(capsys, *command, *given.split(), "--run", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
