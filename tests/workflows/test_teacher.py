"""Distillation: rows that a teacher rates, how they are stored, and error messages."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.errors import UserError
from llmcond.files import digest_file
from llmcond.runs.embedder import Embedder
from llmcond.workflows import train as teachers
from llmcond.workflows.train import find_teacher, sample_unrated_rows

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = "--head none --pooling mean --dtype float32 --rank 2 --batch-size 16 --epochs 1"


@pytest.fixture(scope="module")
def workspace(tiny_checkpoint, small_rows, tmp_path_factory) -> Path:
    """A folder with small rows, a run with a linear head, and a run whose head knows dev."""
    folder = tmp_path_factory.mktemp("teacher")
    lines = ["sentence1,sentence2,condition,label"]
    # Each pair keeps one of its two conditions, so that the teacher can rate the other one.
    rows = [small_rows[2 * i + i % 2] for i in range(40)]
    lines += [",".join(str(value) for value in row) for row in rows]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = tiny_checkpoint()
    arguments = ["--model", model, "--data", folder / "rows.csv", "--run", folder / "frozen"]
    options = "--pooling mean --normalize --dtype float32 --prompt concat-sent-cond"
    assert run([str(argument) for argument in ("extract", *arguments)] + options.split()) == 0
    shutil.copytree(folder / "frozen", folder / "with-dev")
    fit = "--head linear --dim 4 --set epochs=2"
    assert run(["fit-head", "--run", str(folder / "frozen"), *fit.split()]) == 0
    fit += " --with dev"
    assert run(["fit-head", "--run", str(folder / "with-dev"), *fit.split()]) == 0
    (folder / "model").symlink_to(model)
    return folder


@pytest.fixture
def train(workspace, tmp_path, capsys):
    """Return a function that trains with a teacher."""

    def call(folder, teacher, *options, command=run_json):
        arguments = ["--model", (workspace / "model").resolve(), "--data", workspace / "rows.csv"]
        arguments += ["--run", tmp_path / folder, "--teacher", workspace / teacher]
        return command(capsys, "train-lora", *arguments, *OPTIONS.split(), *options)

    return call


def test_sampled_rows_pair_texts_with_new_conditions(workspace):
    rows = read_dataset(str(workspace / "rows.csv")).splits["train"]
    sampled = sample_unrated_rows(rows, 12, seed=3)
    assert len(sampled) == 12
    assert np.isnan(sampled.rating).all()
    known = set(zip(rows.sentence1, rows.sentence2, rows.condition, strict=True))
    combinations = set(zip(sampled.sentence1, sampled.sentence2, sampled.condition, strict=True))
    assert len(combinations) == 12
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
    record = json.loads((tmp_path / "student" / "training.json").read_text())
    head = json.loads(next((workspace / "frozen" / "heads").glob("*/head.json")).read_text())
    assert record["made_of"]["teacher"]["head"] == head["weights_sha256"]
    card = " ".join((tmp_path / "student" / "README.md").read_text().split())
    model = (workspace / "model").resolve()
    assert f"trained on 12 rows that another model, `{model.name}` with the head `linear@" in card
    assert [score["split"] for score in summary["scores"]] == ["dev", "test"]
    message = train("student", "frozen", "--teacher-rows", 11, command=run_rejected)
    assert "teacher.rows: 11, not 12" in message
    assert not (tmp_path / "student" / "training").exists()


def test_ratings_match_teacher_and_survive_interruption(workspace, tmp_path, monkeypatch, caplog):
    dataset = read_dataset(str(workspace / "rows.csv"))
    teacher = find_teacher(workspace / "frozen", 12, dataset)
    monkeypatch.setattr(teachers, "_BLOCK", 5)
    similarity, calls = Embedder.similarity, []

    def interrupt_second_call(self, *texts, **options):
        calls.append(len(texts[0]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return similarity(self, *texts, **options)

    monkeypatch.setattr(Embedder, "similarity", interrupt_second_call)
    train = dataset.splits["train"]
    with pytest.raises(KeyboardInterrupt):
        teacher.rate(train, 0, tmp_path, "cpu")
    rows = teacher.rate(train, 0, tmp_path, "cpu")
    assert calls == [5, 5, 5, 2]
    expected = llmcond.load_embedder(workspace / "frozen").similarity(
        list(rows.sentence1), list(rows.sentence2), list(rows.condition)
    )
    np.testing.assert_allclose(rows.rating, expected.clip(0, 1), atol=1e-5)
    # Ratings that exist are read.
    assert teacher.rate(train, 0, tmp_path, "cpu").rating.tolist() == rows.rating.tolist()
    assert len(calls) == 5


def test_dev_is_not_scored_if_teacher_was_fitted_on_it(train, tmp_path, capsys):
    summary = train("student", "with-dev", "--teacher-rows", 12)
    assert summary["trained_on"] == ["train", "dev"]
    assert summary["dev_spearman"] is None
    assert [score["split"] for score in summary["scores"]] == ["test"]
    message = run_rejected(capsys, "evaluate", "--run", tmp_path / "student", "--split", "dev")
    assert "was trained on dev" in message
    message = train(
        "b", "with-dev", *"--teacher-rows 5 --then dev --folds 2".split(), command=run_rejected
    )
    assert "so folds of dev would measure nothing" in message


def test_same_seed_gives_identical_weights(train, tmp_path):
    for name in ("one", "two"):
        train(name, "frozen", "--teacher-rows", 6)
    first, second = (
        digest_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two")
    )
    assert first == second


def test_cross_encoder_can_be_teacher(workspace, train, tmp_path, capsys):
    arguments = ["--model", (workspace / "model").resolve(), "--data", workspace / "rows.csv"]
    arguments += ["--run", tmp_path / "cross", *OPTIONS.split()[2:]]
    run_json(capsys, "train-cross", *arguments)
    summary = train("student", tmp_path / "cross", "--teacher-rows", 6)
    assert summary["teacher"]["head"] == "cross"
    model = (workspace / "model").resolve()
    assert summary["teacher"]["base"] == str(model)
    card = (tmp_path / "student" / "README.md").read_text()
    assert f"an adapter of `{model.name}` with the head `cross`, rated" in " ".join(card.split())


@pytest.mark.parametrize(
    ("teacher", "options", "message"),
    [
        ("frozen", "--teacher-rows 0", "--teacher-rows is 0"),
        ("frozen", "--teacher-rows 15", "at most half of them, 14"),
        ("nowhere", "", "there is no run at"),
        ("frozen", "--task kgc", "--teacher is for rated pairs"),
    ],
)
def test_invalid_options_report_one_line(train, tmp_path, teacher, options, message):
    assert message in train("bad", teacher, *options.split(), command=run_rejected)
    assert not (tmp_path / "bad").exists()


def test_teacher_needs_head_that_predicts_ratings(workspace, train, tmp_path, capsys):
    run_folder = shutil.copytree(workspace / "frozen", tmp_path / "bare")
    shutil.rmtree(run_folder / "heads")
    assert "has no fitted head" in train("bad", run_folder, command=run_rejected)
    run_json(
        capsys,
        "fit-head",
        "--run",
        run_folder,
        *"--head linear --set mse=0 cosent=1 epochs=1".split(),
    )
    assert "on another scale" in train("bad", run_folder, command=run_rejected)
