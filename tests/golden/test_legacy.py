"""Runs, heads and adapters that commit 100d9ab wrote still load, and give what they gave.

``record.py`` says how ``legacy/`` was made. Intervals, p values and the accuracy of ties are
compared by key alone: they follow one rule in every command since.
"""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from record import COMMANDS, FITS

import llmcond
from llmcond.cli import run

LEGACY = Path(__file__).parent / "legacy"

#: What may differ, besides intervals (*_ci): the time, and figures under a newly announced rule.
FREE = frozenset(
    "seconds run folder out accuracy accuracy_sd n_compared "
    "n_tied low high seed_error p p_holm minimum verdict n_computed n_tokens".split()
)


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what was recorded, with the encoder where the copy has it."""
    folder = Path(shutil.copytree(LEGACY, tmp_path_factory.mktemp("golden") / "legacy"))
    for path in folder.rglob("*.json"):
        path.write_text(path.read_text().replace('"/legacy/', f'"{folder}/'))
    return folder


@pytest.fixture(autouse=True)
def in_legacy(legacy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(legacy)


def ran(capsys: pytest.CaptureFixture[str], *command: str) -> dict:
    assert run([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def recorded(name: str) -> dict:
    return json.loads((LEGACY / "outputs" / f"{name}.json").read_text())


def predictions(path: Path) -> dict[str, np.ndarray]:
    """Return a column of similarities for each predictor, in the order of the rows."""
    rows = sorted(csv.DictReader(path.open()), key=lambda row: int(row["row"]))
    names = [name for name in rows[0] if "@" in name]
    return {name: np.array([float(row[name]) for row in rows]) for name in names}


def assert_same(now: object, then: object, where: str = "", tolerance: float = 1e-4) -> None:
    """Check that all keys of ``then`` are still there, with equal values unless they are free."""
    if isinstance(then, dict):
        assert isinstance(now, dict), where
        assert then.keys() <= now.keys(), (where, sorted(then.keys() - now.keys()))
        for key in {key for key in then if key not in FREE and not key.endswith("_ci")}:
            assert_same(now[key], then[key], f"{where}.{key}", tolerance)
    elif isinstance(then, list):
        assert isinstance(now, list), where
        assert len(now) == len(then), where
        for i, pair in enumerate(zip(now, then, strict=True)):
            assert_same(*pair, f"{where}[{i}]", tolerance)
    elif isinstance(then, float):
        assert now == pytest.approx(then, abs=tolerance), where
    else:
        assert now == then, where


def in_order(output: dict) -> dict:
    """Return an output with its results by name: ties in a ranking may come in any order."""
    return {**output, "results": sorted(output["results"], key=lambda row: row["name"])}


@pytest.mark.parametrize("name", ["evaluate", "evaluate-tuned"])
def test_old_heads_give_the_same_scores_and_predictions(capsys, tmp_path, name):
    out = tmp_path / "predictions.csv"
    now = ran(capsys, *COMMANDS[name], "--predictions", str(out))
    assert_same(in_order(now), in_order(recorded(name)))
    then = predictions(LEGACY / "outputs" / f"{name}.csv")
    for system, values in predictions(out).items():
        np.testing.assert_allclose(values, then.pop(system), atol=2e-6, err_msg=system)
    assert not then


@pytest.mark.parametrize(("folder", "head"), [("run", "none"), ("run", "mlp"), ("tuned", "linear")])
def test_old_runs_and_adapters_still_encode(legacy, folder, head):
    rows = list(csv.DictReader((legacy / "rows.csv").open()))
    prompt = "concat-sent-cond" if head == "none" else None
    embedder = llmcond.load_embedder(folder, head=head, prompt=prompt, device="cpu")
    sentences, conditions = [r["sentence1"] for r in rows], [r["condition"] for r in rows]
    now = embedder.encode(sentences, conditions, normalize=False)
    then = np.load(LEGACY / "outputs" / f"embed-{folder}-{head}.npy")
    # The recorded ones went through features in float16.
    np.testing.assert_allclose(now, then, atol=2e-3 * float(np.abs(then).max()))


@pytest.mark.parametrize(("folder", "head"), [("run", "mlp"), ("tuned", "linear")])
def test_embed_takes_old_features(capsys, legacy, folder, head):
    name = f"embed-{folder}-{head}"
    words = [word for word in COMMANDS[name] if not word.startswith("outputs/")]
    now = ran(capsys, *words, "x.npy", "--no-normalize")
    assert_same(now, recorded(name))
    then = np.load(LEGACY / "outputs" / f"{name}.npy")
    np.testing.assert_allclose(np.load(legacy / "x.npy"), then, atol=1e-6)


def test_old_features_are_complete(capsys):
    now = ran(capsys, *COMMANDS["extract"])
    assert_same(now, recorded("extract"))
    assert {prompt["n_computed"] for prompt in now["prompts"].values()} == {0}


def test_similarity_is_the_same(capsys):
    assert_same(ran(capsys, *COMMANDS["similarity"]), recorded("similarity"))


def test_refits_on_old_features_are_the_same(capsys, tmp_path):
    """Those of towers only nearly: see below."""
    folder = shutil.copytree("run", tmp_path / "run", ignore=shutil.ignore_patterns("heads"))
    for head in FITS:
        fit = COMMANDS[f"fit-{head}"]
        now = ran(capsys, *(str(folder) if word == "run" else word for word in fit))
        then = recorded(f"fit-{head}")
        if head == "towers":
            now, then = ({k: v for k, v in own.items() if k != "members"} for own in (now, then))
        assert_same(now, then)
    out = tmp_path / "predictions.csv"
    ran(capsys, "evaluate", "--run", str(folder), "--predictions", str(out))
    then = predictions(LEGACY / "outputs" / "evaluate.csv")
    for system, values in predictions(out).items():
        # Towers divide a few ReLU units by their length, which is nearly 0 for some texts: another
        # processor's rounding, 1e-7, becomes 1e-3.
        atol = 2e-3 if system.startswith("towers") else 1e-5
        np.testing.assert_allclose(values, then.pop(system), atol=atol, err_msg=system)
    assert not then


@pytest.mark.parametrize("name", ["sweep", "compare-prompts"])
def test_old_fits_are_counted_in(capsys, name):
    assert_same(in_order(ran(capsys, *COMMANDS[name])), in_order(recorded(name)))


def test_analyses_are_the_same(capsys):
    assert_same(ran(capsys, *COMMANDS["analyse"]), recorded("analyse"))


def test_training_anew_gives_the_same_adapter(capsys, tmp_path):
    command = [
        str(tmp_path / "tuned") if word == "tuned" else word for word in COMMANDS["train-lora"]
    ]
    assert_same(ran(capsys, *command), recorded("train-lora"))
