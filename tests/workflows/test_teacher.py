"""Distilling: rows that a teacher rates, what is kept of them, and what is said."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import ok, refused

import llmcond
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.errors import UserError
from llmcond.files import digest_file
from llmcond.runs.embedder import Embedder
from llmcond.workflows import teacher as teachers
from llmcond.workflows.teacher import find_teacher, sample_unrated_rows

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "--head none --pooling mean --dtype float32 --rank 2 --batch-size 16 --epochs 1"


@pytest.fixture(scope="module")
def made(tiny_checkpoint, small_rows, tmp_path_factory) -> Path:
    """A folder with small rows, a run with a linear head, and one with a head fitted on dev too."""
    folder = tmp_path_factory.mktemp("teacher")
    lines = ["sentence1,sentence2,condition,label"]
    # One of the two conditions each, so that the other one is left to be rated.
    rows = [small_rows[2 * i + i % 2] for i in range(40)]
    lines += [",".join(str(value) for value in row) for row in rows]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = tiny_checkpoint()
    given = ["--model", model, "--data", folder / "rows.csv", "--run", folder / "frozen"]
    options = "--pooling mean --normalize --dtype float32 --prompt concat-sent-cond"
    assert run([str(own) for own in ("extract", *given)] + options.split()) == 0
    shutil.copytree(folder / "frozen", folder / "with-dev")
    fit = "--head linear --dim 4 --set epochs=2"
    assert run(["fit-head", "--run", str(folder / "frozen"), *fit.split()]) == 0
    fit += " --with dev"
    assert run(["fit-head", "--run", str(folder / "with-dev"), *fit.split()]) == 0
    (folder / "model").symlink_to(model)
    return folder


@pytest.fixture
def train(made, tmp_path, capsys):
    """Train with a teacher."""

    def call(folder, teacher, *given, command=ok):
        arguments = ["--model", (made / "model").resolve(), "--data", made / "rows.csv"]
        arguments += ["--run", tmp_path / folder, "--teacher", made / teacher]
        return command(capsys, "train-lora", *arguments, *PLAIN.split(), *given)

    return call


def test_rows_have_conditions_that_their_pairs_lack(made):
    rows = read_dataset(str(made / "rows.csv")).splits["train"]
    found = sample_unrated_rows(rows, 12, seed=3)
    assert len(found) == 12
    assert np.isnan(found.rating).all()
    known = set(zip(rows.sentence1, rows.sentence2, rows.condition, strict=True))
    drawn = set(zip(found.sentence1, found.sentence2, found.condition, strict=True))
    assert len(drawn) == 12
    assert not drawn & known
    assert {own[:2] for own in drawn} <= {own[:2] for own in known}
    assert set(found.condition) <= set(rows.condition)
    assert sample_unrated_rows(rows, 12, seed=3).texts == found.texts
    assert sample_unrated_rows(rows, 12, seed=4).texts != found.texts
    with pytest.raises(UserError, match="28 new combinations of sentence pairs and conditions"):
        sample_unrated_rows(rows, 15, seed=3)


def test_what_is_rated_is_trained_on_and_recorded(train, made, tmp_path):
    summary = train("taught", "frozen", "--teacher-rows", 12)
    assert summary["teacher"]["rows"] == 12
    assert summary["teacher"]["head"].startswith("linear@")
    # 28 rows of train, and 12 more: three steps instead of two.
    assert summary["steps"] == 3
    account = json.loads((tmp_path / "taught" / "training.json").read_text())
    head = json.loads(next((made / "frozen" / "heads").glob("*/head.json")).read_text())
    assert account["made_of"]["teacher"]["head"] == head["weights_sha256"]
    card = " ".join((tmp_path / "taught" / "README.md").read_text().split())
    model = (made / "model").resolve()
    assert f"trained on 12 rows that another model, `{model.name}` with the head `linear@" in card
    assert [own["split"] for own in summary["scores"]] == ["dev", "test"]
    said = train("taught", "frozen", "--teacher-rows", 11, command=refused)
    assert "teacher.rows: 11, not 12" in said
    assert not (tmp_path / "taught" / "training").exists()


def test_the_ratings_are_those_of_the_teacher_and_a_kill_loses_none(
    made, tmp_path, monkeypatch, caplog
):
    dataset = read_dataset(str(made / "rows.csv"))
    teacher = find_teacher(made / "frozen", 12, dataset)
    monkeypatch.setattr(teachers, "_BLOCK", 5)
    similarity, calls = Embedder.similarity, []

    def killed(self, *given, **options):
        calls.append(len(given[0]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return similarity(self, *given, **options)

    monkeypatch.setattr(Embedder, "similarity", killed)
    train = dataset.splits["train"]
    with pytest.raises(KeyboardInterrupt):
        teacher.rate(train, 0, tmp_path, "cpu")
    rows = teacher.rate(train, 0, tmp_path, "cpu")
    assert calls == [5, 5, 5, 2]
    expected = llmcond.load_embedder(made / "frozen").similarity(
        list(rows.sentence1), list(rows.sentence2), list(rows.condition)
    )
    np.testing.assert_allclose(rows.rating, expected.clip(0, 1), atol=1e-5)
    # Once rated, they are read.
    assert teacher.rate(train, 0, tmp_path, "cpu").rating.tolist() == rows.rating.tolist()
    assert len(calls) == 5


def test_a_teacher_that_knows_dev_leaves_it_no_say(train, tmp_path, capsys):
    summary = train("taught", "with-dev", "--teacher-rows", 12)
    assert summary["trained_on"] == ["train", "dev"]
    assert summary["dev_spearman"] is None
    assert [own["split"] for own in summary["scores"]] == ["test"]
    said = refused(capsys, "evaluate", "--run", tmp_path / "taught", "--split", "dev")
    assert "was trained on dev" in said
    said = train("b", "with-dev", *"--teacher-rows 5 --then dev --folds 2".split(), command=refused)
    assert "so folds of dev would measure nothing" in said


def test_the_same_seed_gives_the_same_bits(train, tmp_path):
    for name in ("one", "two"):
        train(name, "frozen", "--teacher-rows", 6)
    one, two = (
        digest_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two")
    )
    assert one == two


def test_a_cross_encoder_teaches(made, train, tmp_path, capsys):
    given = ["--model", (made / "model").resolve(), "--data", made / "rows.csv"]
    given += ["--run", tmp_path / "cross", *PLAIN.split()[2:]]
    ok(capsys, "train-cross", *given)
    summary = train("taught", tmp_path / "cross", "--teacher-rows", 6)
    assert summary["teacher"]["head"] == "cross"
    model = (made / "model").resolve()
    assert summary["teacher"]["base"] == str(model)
    card = (tmp_path / "taught" / "README.md").read_text()
    assert f"an adapter of `{model.name}` with the head `cross`, rated" in " ".join(card.split())


@pytest.mark.parametrize(
    ("teacher", "given", "said"),
    [
        ("frozen", "--teacher-rows 0", "--teacher-rows is 0"),
        ("frozen", "--teacher-rows 15", "at most half of them, 14"),
        ("nowhere", "", "there is no run at"),
        ("frozen", "--task kgc", "--teacher is for rated pairs"),
    ],
)
def test_bad_input_is_refused_in_one_line(train, tmp_path, teacher, given, said):
    assert said in train("bad", teacher, *given.split(), command=refused)
    assert not (tmp_path / "bad").exists()


def test_features_alone_and_ranks_are_no_ratings(made, train, tmp_path, capsys):
    bare = shutil.copytree(made / "frozen", tmp_path / "bare")
    shutil.rmtree(bare / "heads")
    assert "has no fitted head" in train("bad", bare, command=refused)
    ok(capsys, "fit-head", "--run", bare, *"--head linear --set mse=0 cosent=1 epochs=1".split())
    assert "on another scale" in train("bad", bare, command=refused)
