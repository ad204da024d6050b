"""The bundled model is taken where there is no run, and can be made again by its command."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
from helpers.commands import ok, refused
from helpers.paths import ROOT

import llmcond
from llmcond.bundled import DEFAULT_MODEL, bundled_folder, pretrained_folder
from llmcond.cli import run
from llmcond.evaluation.condition_checks import CALIBRATION
from llmcond.files import digest_file
from llmcond.runs.open import resolve_run

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp")


def files():
    return {str(path): path.stat().st_mtime_ns for path in bundled_folder("models").rglob("*")}


@pytest.mark.parametrize(("name", "size"), [("minilm-conditions", 12), ("minilm-csts", 5)])
def test_its_files_are_small_and_belong_together(name, size):
    folder = pretrained_folder(name)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < size * 2**20
    (head,) = (folder / "heads").iterdir()
    record = json.loads((head / "head.json").read_text())
    assert record["weights_sha256"] == digest_file(head / "head.safetensors")
    # What the adapter's weights are called is made of their digest.
    assert (
        llmcond.load_embedder(name).encoder.identity.weights
        == (json.loads((folder / "run.json").read_text())["encoder"]["identity"]["weights"])
    )


def test_without_a_run_it_compares_and_embeds(capsys, tmp_path):
    before = files()
    texts = ["Two women read a book at the beach.", "Two women cook at night."]
    compared = ok(
        capsys, "similarity", *texts, "--condition", "the number of people", "--condition",
        "the activity", "--condition", "the place",
    )  # fmt: skip
    found = [row["similarity"] for row in compared["similarities"]]
    # The README has these figures; in bfloat16 the digits differ.
    told = re.findall(r"^  the [a-z ]+ +(0\.\d+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert found == pytest.approx([float(figure) for figure in told], abs=0.02)
    Path("texts.csv").write_text("sentence\n" + "\n".join(texts), encoding="utf-8")
    out = tmp_path / "vectors.npy"
    ok(capsys, "embed", "texts.csv", "--condition-text", "the activity", "--out", out)
    named = llmcond.load_embedder(DEFAULT_MODEL).similarity(*texts, "the activity")
    assert named == pytest.approx(found[1], abs=1e-5)
    assert files() == before


def messages(capsys, *more):
    """Compare two texts, and return the similarity and the lines on standard error."""
    arguments = ["similarity", "a man", "a dog", "--condition", "size", "--json", *more]
    assert run(arguments) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out)["similarities"][0]["similarity"], printed.err.splitlines()


BUNDLED = f"model: {DEFAULT_MODEL} (bundled), prompt concat-cond-sent"


def test_one_line_says_which_model_is_used(capsys):
    assert messages(capsys)[1] == [BUNDLED]
    zero_shot = f"model: {DEFAULT_MODEL} (bundled), zero-shot, prompt concat-cond-sent"
    assert messages(capsys, "--head", "none")[1] == [zero_shot]


def extract(data, folder, dtype="float32"):
    options = ["--dtype", dtype, "--prompt", "concat-cond-sent", "--run", folder]
    arguments = ["extract", "--model", "minilm", *options, *(["--data", data] if data else [])]
    assert run([str(argument) for argument in arguments]) == 0


def test_a_default_run_of_the_sample_is_not_used_for_other_texts(
    capsys, write_rows, small_rows, monkeypatch
):
    """Whoever tried the README's commands on the sample gets the bundled model afterwards."""
    sample = Path("part") / "train.csv"
    sample.parent.mkdir()
    shutil.copy(write_rows(small_rows), sample)
    monkeypatch.setattr("llmcond.data.datasets.sample_folder", lambda: sample.parent)
    by_bundled, _ = messages(capsys)
    extract(None, "runs/default")
    ok(capsys, "fit-head", "--head", "pca", "--dim", "4")
    similarity, lines = messages(capsys)
    assert similarity == by_bundled
    assert lines == [
        "runs/default was created from the bundled sample, so the bundled model is used (--run "
        "runs/default to use that run)",
        BUNDLED,
    ]
    assert llmcond.load_embedder().encoder.name == DEFAULT_MODEL
    # What is about the run's own data still takes it, and so does who names it.
    assert {row["head"] for row in ok(capsys, "evaluate")["results"]} == {"none", "pca"}
    similarity, lines = messages(capsys, "--run", "runs/default")
    assert similarity != by_bundled
    assert re.fullmatch(
        r"model: runs/default, encoder minilm, head pca@concat-cond-sent \(best on dev, Spearman "
        r".*\), prompt concat-cond-sent, fitted on the bundled sample",
        lines[0],
    )


@pytest.mark.parametrize("data", ["rows.csv", "sample"])
def test_a_default_run_of_own_data_is_used(capsys, write_rows, small_rows, data):
    """Also where that data is a folder whose name records give to the bundled sample."""
    write_rows(small_rows, data if data.endswith(".csv") else f"{data}/train.csv")
    extract(data, "runs/default")
    capsys.readouterr()
    zero_shot = "encoder minilm, zero-shot (no head is fitted), prompt concat-cond-sent"
    assert messages(capsys)[1] == [f"model: runs/default, {zero_shot}"]


def test_what_is_named_is_what_is_taken(tmp_path, capsys):
    assert resolve_run(None) == resolve_run(DEFAULT_MODEL) == resolve_run(None, DEFAULT_MODEL)
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert resolve_run(DEFAULT_MODEL) == Path(DEFAULT_MODEL)
    own = Path("runs/default")
    own.mkdir(parents=True)
    assert resolve_run(None) != own  # nothing is in it
    (own / "run.json").write_text("{}")
    with pytest.raises(llmcond.LlmcondError):
        resolve_run(None)  # a run that is damaged is not passed over
    asked = "similarity", "a man", "a dog", "--condition", "size"
    assert "Give only one of them" in refused(
        capsys, *asked, "--run", "x", "--model", DEFAULT_MODEL
    )
    assert "llmcond extract --model minilm" in refused(capsys, *asked, "--model", "minilm")
    assert "there is no run at x" in refused(capsys, *asked, "--run", "x")


def test_it_can_be_trained_and_laid_out_again(
    write_rows, small_rows, monkeypatch, capsys, tmp_path
):
    data, made, note = write_rows(small_rows[:48]), tmp_path / "again", tmp_path / "note.md"
    note.write_text("## Data and licences\n\nMine.\n")
    trained = ok(
        capsys, "train-lora", "--model", "minilm", "--dtype", "bfloat16", "--data", data, "--head",
        "none", "--prompt", "concat-cond-sent", "--rank", "1", "--epochs", "1", "--then", "dev",
        "--run", made,
    )  # fmt: skip
    monkeypatch.setattr(
        "sys.argv",
        ["make_pretrained", str(made), "--note", str(note), "--out", str(tmp_path / "out")],
    )
    runpy.run_path(str(ROOT / "scripts" / "make_pretrained.py"), run_name="__main__")
    there = tmp_path / "out" / DEFAULT_MODEL
    assert {path.name for path in there.iterdir()} == {
        # What check-condition is calibrated by is written by a script of its own.
        path.name
        for path in pretrained_folder(DEFAULT_MODEL).iterdir()
        if path.name != CALIBRATION
    }
    assert (there / "README.md").read_text().endswith(f"```\n\n{note.read_text()}")
    assert "licences" not in (made / "README.md").read_text()
    embedder = llmcond.load_embedder(there)
    assert embedder.name == trained["head"]
    assert embedder.encoder.resolved.identity.dtype == "float32"
    assert str(tmp_path) not in "".join(path.read_text() for path in there.rglob("*.json"))


def test_nobody_is_sent_to_fit_a_head_into_it(capsys):
    given = ("--model", DEFAULT_MODEL, "--head", "mlp", "--condition", "the place")
    line = refused(capsys, "similarity", "a man", "a dog", *given)
    assert f"llmcond extract --model {DEFAULT_MODEL}" in line
    assert "fit-head" not in line
