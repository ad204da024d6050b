"""The bundled model: the default where there is no run, and reproducible by its command."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.commands import run_json, run_rejected
from helpers.paths import ROOT
from huggingface_hub import constants

import llmcond
from llmcond.base.files import digest_file
from llmcond.base.package import DEFAULT_MODEL, bundled_folder, pretrained_folder
from llmcond.cli import run
from llmcond.runs.open import resolve_run

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp")


def modification_times():
    return {str(path): path.stat().st_mtime_ns for path in bundled_folder("models").rglob("*")}


@pytest.mark.parametrize(("name", "size"), [("minilm-conditions", 12), ("minilm-csts", 5)])
def test_bundled_files_are_small_and_consistent(name, size):
    folder = pretrained_folder(name)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < size * 2**20
    (head,) = (folder / "heads").iterdir()
    record = json.loads((head / "head.json").read_text())
    assert record["weights_sha256"] == digest_file(head / "head.safetensors")
    # The identity of the weights contains their digest.
    assert (
        llmcond.load_embedder(name).encoder.identity.weights
        == (json.loads((folder / "run.json").read_text())["encoder"]["identity"]["weights"])
    )


@pytest.mark.weights
def test_larger_model_is_loaded_with_its_base(real_checkpoint, monkeypatch, tmp_path):
    record = json.loads((pretrained_folder("mpnet-conditions") / "encoder.json").read_text())
    base = tmp_path / "hub" / f"models--{record['base'].replace('/', '--')}" / "snapshots"
    base.mkdir(parents=True)
    (base / record["revision"]).symlink_to(real_checkpoint("all-mpnet-base-v2"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    test_bundled_files_are_small_and_consistent("mpnet-conditions", 12)
    texts = ["Great battery, terrible screen.", "The battery is great, but the screen is terrible."]
    other = "The battery lasts two days, and I love the display."
    embedder = llmcond.load_embedder("mpnet-conditions")
    battery, screen = (
        embedder.similarity(texts, [other] * 2, f"the opinion about the {part}")
        for part in ("battery", "screen")
    )
    assert (battery > screen).all()
    assert (battery - screen).mean() > 0.05


def test_bundled_model_compares_and_embeds_without_run(capsys, tmp_path):
    before = modification_times()
    texts = ["Two women read a book at the beach.", "Two women cook at night."]
    compared = run_json(
        capsys, "similarity", *texts, "--condition", "the number of people", "--condition",
        "the activity", "--condition", "the place",
    )  # fmt: skip
    similarities = [row["similarity"] for row in compared["similarities"]]
    # The home page shows these similarities; they differ slightly in bfloat16.
    readme_values = re.findall(
        r"^  the [a-z ]+ +(0\.\d+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE
    )
    assert similarities == pytest.approx([float(figure) for figure in readme_values], abs=0.02)
    Path("texts.csv").write_text("sentence\n" + "\n".join(texts), encoding="utf-8")
    out = tmp_path / "vectors.npy"
    run_json(capsys, "embed", "texts.csv", "--condition-text", "the activity", "--out", out)
    similarity = llmcond.load_embedder(DEFAULT_MODEL).similarity(*texts, "the activity")
    assert similarity == pytest.approx(similarities[1], abs=1e-5)
    assert modification_times() == before


def compare_texts(capsys, *more):
    """Compare two texts, and return the similarity and the lines on standard error."""
    arguments = ["similarity", "a man", "a dog", "--condition", "size", "--json", *more]
    assert run(arguments) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out)["similarities"][0]["similarity"], printed.err.splitlines()


def extract(*data):
    options = ["--dtype", "float32", "--prompt", "concat-cond-sent", "--run", "runs/default"]
    assert run(["extract", "--model", "minilm", *options, *data]) == 0


def test_default_run_of_sample_is_not_used_for_other_texts(
    capsys, write_rows, small_rows, monkeypatch
):
    """The bundled model stays the default after the README's commands were tried on the sample."""
    sample = Path("part") / "train.csv"
    sample.parent.mkdir()
    shutil.copy(write_rows(small_rows), sample)
    monkeypatch.setattr("llmcond.data.datasets.sample_folder", lambda: sample.parent)
    by_bundled, _ = compare_texts(capsys)
    extract()
    run_json(capsys, "fit-head", "--head", "pca", "--dim", "4")
    run_json(capsys, "heads", "--run", "runs/default", "--default", "pca@concat-cond-sent")
    similarity, lines = compare_texts(capsys)
    assert similarity == by_bundled
    assert lines == [
        "runs/default was created from the bundled sample, so the bundled model is used (--run "
        "runs/default to use that run)",
        f"model: {DEFAULT_MODEL} (bundled), prompt concat-cond-sent",
    ]
    assert llmcond.load_embedder().encoder.name == DEFAULT_MODEL
    # Commands on the run's data still use the run, and so does --run.
    assert {row["head"] for row in run_json(capsys, "evaluate")["results"]} == {"none", "pca"}
    similarity, lines = compare_texts(capsys, "--run", "runs/default")
    assert similarity != by_bundled
    assert re.fullmatch(
        r"model: runs/default, encoder minilm, head pca@concat-cond-sent \(the run's default\), "
        r"prompt concat-cond-sent, fitted on the bundled sample",
        lines[0],
    )


def test_default_run_of_user_data_is_used(capsys, write_rows, small_rows):
    """The data may be a folder with the name that records use for the bundled sample."""
    write_rows(small_rows, "sample/train.csv")
    extract("--data", "sample")
    capsys.readouterr()
    zero_shot = "encoder minilm, zero-shot (no head is fitted), prompt concat-cond-sent"
    assert compare_texts(capsys)[1] == [f"model: runs/default, {zero_shot}"]


def test_named_run_or_model_is_resolved(tmp_path, capsys):
    assert resolve_run(None) == resolve_run(DEFAULT_MODEL) == resolve_run(None, DEFAULT_MODEL)
    (tmp_path / DEFAULT_MODEL).mkdir()
    (tmp_path / DEFAULT_MODEL / "run.json").write_text("{}")
    assert resolve_run(DEFAULT_MODEL) == Path(DEFAULT_MODEL)
    default_run = Path("runs/default")
    default_run.mkdir(parents=True)
    assert resolve_run(None) != default_run  # the folder is empty
    (default_run / "run.json").write_text("{}")
    with pytest.raises(llmcond.LlmcondError):
        resolve_run(None)  # a damaged run is not skipped
    arguments = "similarity", "a man", "a dog", "--condition", "size"
    assert "Give only one of them" in run_rejected(
        capsys, *arguments, "--run", "x", "--model", DEFAULT_MODEL
    )
    named_as_run = run_rejected(capsys, *arguments, "--run", "minilm-csts")
    assert "use --model minilm-csts" in named_as_run
    line = run_rejected(capsys, *arguments, "--model", DEFAULT_MODEL, "--head", "mlp")
    assert f"llmcond extract --model {DEFAULT_MODEL}" in line
    assert "fit-head" not in line  # a bundled model cannot be fitted
