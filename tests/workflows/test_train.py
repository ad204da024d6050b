"""Ensembles of adapters, and distillation: rows that a teacher rates."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected, write_pairs
from helpers.flags import change_flags

import llmcond
from llmcond.base.errors import UserError
from llmcond.base.files import digest_file
from llmcond.base.package import pretrained_folder
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.encoders.inspect import describe
from llmcond.heads import FittedHead
from llmcond.prompts import load_prompt
from llmcond.runs.embedder import Embedder
from llmcond.workflows import train_job as teachers
from llmcond.workflows.train_job import find_teacher, sample_unrated_rows

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = "--pooling mean --dtype float32 --rank 2 --batch-size 16 --epochs 1"
ENSEMBLE = "--ensemble 2 --seed 4 --then dev --then-share 0.5".split()
TEXTS = [llmcond.EncoderInput(instruction="", text=f"two men number {i}") for i in range(5)]


@pytest.fixture(scope="module")
def workspace(small_rows, model, tmp_path_factory) -> Path:
    """A folder with small rows, a run with a linear head, and a run whose head knows dev."""
    folder = tmp_path_factory.mktemp("teacher")
    # Each pair keeps one of its two conditions, so that the teacher can rate the other one.
    rows = [small_rows[2 * i + i % 2] for i in range(40)]
    data = write_pairs(folder / "rows.csv", rows)
    options = {"pooling": "mean", "normalize": True, "dtype": "float32"}
    options |= {"model": model, "data": data, "prompt": ["concat-sent-cond"]}
    llmcond.extract(run=folder / "frozen", **options)
    shutil.copytree(folder / "frozen", folder / "with-dev")
    for name, options in (("frozen", ()), ("with-dev", ("--with", "dev"))):
        command = ("fit-head", "--run", str(folder / name), "--head", "linear", "--dim", "4")
        assert run([*command, "--set", "epochs=2", *options]) == 0
    return folder


# -- ensembles ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(model, tiny_run) -> list[str]:
    """The command that trains a tiny BERT on small rows."""
    arguments = ["train-lora", "--model", model, "--data", str(tiny_run.parent / "rows.csv")]
    arguments += ["--head", "none", "--normalize", *OPTIONS.split()]
    return [*arguments, "--learning-rate", "1e-2", "--checkpoint-steps", "1"]


@pytest.fixture(scope="module")
def ensemble(command, tmp_path_factory) -> Path:
    """An ensemble of two adapters, with a stage on dev."""
    folder = tmp_path_factory.mktemp("ensemble") / "run"
    assert run([*command, *ENSEMBLE, "--run", str(folder)]) == 0
    return folder


def load_encoder(folder: Path) -> llmcond.Encoder:
    return llmcond.load_encoder(folder, dtype="float32")


def test_vectors_concatenate_those_of_members(ensemble, tmp_path):
    members = [ensemble / f"adapter-{i}" for i in (0, 1)]
    combined, (first, second) = load_encoder(ensemble), map(load_encoder, members)
    vectors, parts = combined.encode(TEXTS), [first.encode(TEXTS), second.encode(TEXTS)]
    assert vectors.shape == (5, combined.dim) == (5, 64)
    whole, part = (describe(encoder.resolved) for encoder in (combined, first))
    assert [whole[name] / part[name] for name in ("width", "n_parameters")] == [2, 2]
    for size, share in zip(whole["memory"], part["memory"], strict=True):
        assert size["weights"] == 2 * share["weights"]
    np.testing.assert_allclose(vectors, np.hstack(parts) / np.sqrt(2), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert np.abs(parts[0] - parts[1]).max() > 1e-3
    assert len({encoder.identity.fingerprint for encoder in (combined, first, second)}) == 3
    sentences = ["two men play in the park"], ["two dogs sit at the beach"], "the place"
    similarities = [llmcond.load_embedder(member).similarity(*sentences) for member in members]
    similarity = llmcond.load_embedder(ensemble).similarity(*sentences)
    np.testing.assert_allclose(similarity, np.mean(similarities, axis=0), atol=1e-5)
    # The identity depends on every member, but not on the folder.
    copy = Path(shutil.copytree(ensemble, tmp_path / "moved"))
    assert load_encoder(copy).identity.fingerprint == combined.identity.fingerprint
    name = "adapter_model.safetensors"
    shutil.copy(copy / "adapter-0" / name, copy / "adapter-1" / name)
    assert load_encoder(copy).identity.fingerprint != combined.identity.fingerprint


def test_ensemble_is_run_with_record_and_card(ensemble, command, capsys, tmp_path):
    summary = json.loads((ensemble / "training.json").read_text())["summary"]
    assert [member["seed"] for member in summary["members"]] == [4, 5]
    assert summary["trained_on"] == ["train", "dev"]
    assert summary["steps"] == sum(member["steps"] for member in summary["members"])
    assert [score["split"] for score in summary["scores"]] == ["test"]
    rows = {row["name"]: row for row in run_json(capsys, "evaluate", "--run", ensemble)["results"]}
    assert rows[summary["head"]]["spearman"] == summary["scores"][0]["spearman"]
    message = run_rejected(capsys, "push", "me/mine", "--run", ensemble)
    assert "is an ensemble of 2 adapters" in message
    # A member equals a single training with its seed.
    folder = tmp_path / "alone"
    assert run([*command, "--seed", "5", *ENSEMBLE[4:], "--run", str(folder)]) == 0
    name = "adapter_model.safetensors"
    assert digest_file(folder / name) == digest_file(ensemble / "adapter-1" / name)


# -- teachers ----------------------------------------------------------------------------------


@pytest.fixture
def train(workspace, model, tmp_path, capsys):
    """Return a function that trains with a teacher."""

    def call(folder, teacher, *options, command=run_json):
        arguments = ["--model", model, "--data", workspace / "rows.csv", *OPTIONS.split()]
        named = teacher if pretrained_folder(teacher) else workspace / teacher
        arguments += ["--run", tmp_path / folder, "--teacher", named]
        return command(capsys, "train-lora", "--head", "none", *arguments, *options)

    return call


def test_sampled_rows_pair_texts_with_new_conditions(workspace):
    rows = read_dataset(str(workspace / "rows.csv")).splits["train"]
    sampled = sample_unrated_rows(rows, 12, seed=3)
    assert np.isnan(sampled.rating).all()
    known = set(zip(rows.sentence1, rows.sentence2, rows.condition, strict=True))
    combinations = set(zip(sampled.sentence1, sampled.sentence2, sampled.condition, strict=True))
    assert len(sampled) == len(combinations) == 12
    assert not combinations & known
    assert {row[:2] for row in combinations} <= {row[:2] for row in known}
    assert set(sampled.condition) <= set(rows.condition)
    assert sample_unrated_rows(rows, 12, seed=3).texts == sampled.texts
    assert sample_unrated_rows(rows, 12, seed=4).texts != sampled.texts
    with pytest.raises(UserError, match="28 new combinations of sentence pairs and conditions"):
        sample_unrated_rows(rows, 15, seed=3)


def test_rated_rows_are_trained_on_and_recorded(train, workspace, tmp_path):
    summary = train("student", "frozen", "--teacher-rows", 12)
    assert summary["teacher"]["rows"] == 12
    assert summary["teacher"]["head"].startswith("linear@")
    # With 28 rows of train and 12 rated rows, there are three steps instead of two.
    assert summary["steps"] == 3
    assert [score["split"] for score in summary["scores"]] == ["dev", "test"]
    record = json.loads((tmp_path / "student" / "training.json").read_text())
    head = json.loads(next((workspace / "frozen" / "heads").glob("*/head.json")).read_text())
    assert record["made_of"]["teacher"]["head"] == head["weights_sha256"]
    message = train("student", "frozen", "--teacher-rows", 11, command=run_rejected)
    assert "teacher.rows: 11, not 12" in message
    assert not (tmp_path / "student" / "training").exists()
    # The same seed gives identical weights.
    train("again", "frozen", "--teacher-rows", 12)
    first, second = (
        tmp_path / folder / "adapter_model.safetensors" for folder in ("student", "again")
    )
    assert digest_file(first) == digest_file(second)


def test_bundled_model_is_teacher(train, tmp_path, monkeypatch):
    devices, resolve = [], teachers.resolve

    def resolve_trained(folder, options, **others):
        devices.append(options.device)
        return resolve(folder, options, **others)

    monkeypatch.setattr(teachers, "resolve", resolve_trained)
    summary = train("student", "minilm-csts", "--teacher-rows", 12)
    # A single GPU of several might not have enough memory for the trained encoder.
    assert devices == ["auto"]
    assert summary["teacher"]["encoder"] == "minilm-csts"
    record = json.loads((tmp_path / "student" / "training.json").read_text())
    prompt = load_prompt("concat-cond-sent")
    expected = {"prompts": [prompt.digest], "subtract": False}
    assert expected.items() <= record["made_of"]["teacher"].items()
    assert "there is no run at" in train("other", "x" * 300, command=run_rejected)


def test_ratings_match_teacher_and_survive_interruption(workspace, tmp_path, monkeypatch):
    dataset = read_dataset(str(workspace / "rows.csv"))
    teacher = find_teacher(workspace / "frozen", 12, dataset)
    monkeypatch.setattr(teachers, "_BLOCK", 5)
    predict, calls = Embedder.predict, []

    def interrupt_second_call(self, rows):
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return predict(self, rows)

    monkeypatch.setattr(Embedder, "predict", interrupt_second_call)
    train = dataset.splits["train"]
    with pytest.raises(KeyboardInterrupt):
        teacher.rate(train, 0, tmp_path, "cpu")
    rows = teacher.rate(train, 0, tmp_path, "cpu")
    assert calls == [5, 5, 5, 2]
    columns = (list(rows.sentence1), list(rows.sentence2), list(rows.condition))
    expected = llmcond.load_embedder(workspace / "frozen").similarity(*columns)
    np.testing.assert_allclose(rows.rating, expected.clip(0, 1), atol=1e-5)
    # As in training, a condition with | is one text.
    model, piped = teacher.load_embedder("cpu"), replace(rows, condition=["a | b"] * len(rows))
    worded = model.similarity(*columns[:2], "a | b")
    assert abs(model.predict(piped) - worded).max() > 1e-3
    # Ratings that exist are read.
    assert teacher.rate(train, 0, tmp_path, "cpu").rating.tolist() == rows.rating.tolist()
    assert len(calls) == 5


def test_dev_is_not_scored_if_teacher_was_fitted_on_it(train, tmp_path, capsys):
    summary = train("student", "with-dev", "--teacher-rows", 12)
    assert (summary["trained_on"], summary["dev_spearman"]) == (["train", "dev"], None)
    assert [score["split"] for score in summary["scores"]] == ["test"]
    message = run_rejected(capsys, "evaluate", "--run", tmp_path / "student", "--split", "dev")
    assert "was trained on dev" in message
    options = "--teacher-rows 5 --then dev --folds 2".split()
    message = train("b", "with-dev", *options, command=run_rejected)
    assert "so folds of dev would measure nothing" in message


def test_invalid_options_report_one_line(command, workspace, train, tmp_path, capsys, monkeypatch):
    for options, message in (
        ("--ensemble 2 --head mlp", "an ensemble cannot have the head mlp"),
        ("--ensemble 2 --no-normalize", "Add --normalize"),
        ("--ensemble 2 --prompt routed", "name a --prompt such as"),
        ("--head linear --dim 33", "dim is 33, but the features have 32"),
        ("--head linear --set dim=33", "dim is 33, but the features have 32"),
    ):
        changed = change_flags(command, *options.split())
        assert message in run_rejected(capsys, *changed, "--run", tmp_path / "bad")
    bare = shutil.copytree(workspace / "frozen", tmp_path / "bare")
    shutil.rmtree(bare / "heads")
    other_scale = Path(shutil.copytree(bare, tmp_path / "other"))
    changes = {"mse": "0", "cosent": "1", "epochs": "1"}
    llmcond.fit_head(run=other_scale, head="linear", set=changes)
    cosines = [*command[: command.index("--data")], "--data", str(workspace / "rows.csv")]
    run_json(
        capsys, *cosines, *"--head none --set mse=0 cosent=1 --epochs 1 --run".split(),
        tmp_path / "cosines",
    )  # fmt: skip
    for teacher, options, message in (
        ("frozen", "--teacher-rows 15", "Give --teacher-rows 14, or fewer"),
        ("frozen", "--task kgc", "--teacher is for rated pairs"),
        (bare, "", "has no fitted head"),
        (other_scale, "", "on another scale"),
        (tmp_path / "cosines", "", "on another scale"),
    ):
        assert message in train("bad", teacher, *options.split(), command=run_rejected)
    (head,) = (workspace / "with-dev" / "heads").iterdir()
    changed = [*command[: command.index("--head")], "--start", head, *OPTIONS.split()]
    assert "was fitted on dev as well" in run_rejected(capsys, *changed, "--run", tmp_path / "bad")
    dataset = read_dataset(str(workspace / "rows.csv"))
    one_side = replace(dataset.splits["train"], conditioned=(True, False))
    with pytest.raises(UserError, match="the task encodes only one so"):
        find_teacher(workspace / "frozen", 5, replace(dataset, splits={"train": one_side}))
    monkeypatch.setattr(FittedHead, "compares_by_cosine", False)
    with pytest.raises(UserError, match="does not compare embeddings by cosine"):
        find_teacher(workspace / "frozen", 0, dataset)
    assert not (tmp_path / "bad").exists()
