"""Runs, heads and adapters written by commit 100d9ab load and give the same results.

``record.py`` describes how ``legacy/`` was recorded. Intervals, p values and the accuracy of ties
are compared by key alone, because all commands have computed them by a new rule since then.
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

#: Keys whose values may differ besides intervals (*_ci): times, and figures with a new rule.
VARIABLE_KEYS = frozenset(
    "seconds run folder out accuracy accuracy_sd n_compared "
    "n_tied low high seed_error p p_holm minimum verdict n_computed n_tokens".split()
)


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the recorded folder whose files name the encoder of the copy."""
    folder = Path(shutil.copytree(LEGACY, tmp_path_factory.mktemp("golden") / "legacy"))
    for path in folder.rglob("*.json"):
        path.write_text(path.read_text().replace('"/legacy/', f'"{folder}/'))
    return folder


@pytest.fixture(autouse=True)
def in_legacy(legacy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(legacy)


def run_command(capsys: pytest.CaptureFixture[str], *command: str) -> dict:
    assert run([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def read_recorded(name: str) -> dict:
    return json.loads((LEGACY / "outputs" / f"{name}.json").read_text())


def read_predictions(path: Path) -> dict[str, np.ndarray]:
    """Return a column of similarities for each predictor, in the order of the rows."""
    rows = sorted(csv.DictReader(path.open()), key=lambda row: int(row["row"]))
    names = [name for name in rows[0] if "@" in name]
    return {name: np.array([float(row[name]) for row in rows]) for name in names}


def assert_same(actual: object, expected: object, where: str = "", tolerance: float = 1e-4) -> None:
    """Check that all keys of ``expected`` still exist, with equal values unless they may differ."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), where
        assert expected.keys() <= actual.keys(), (where, sorted(expected.keys() - actual.keys()))
        for key in {
            key for key in expected if key not in VARIABLE_KEYS and not key.endswith("_ci")
        }:
            assert_same(actual[key], expected[key], f"{where}.{key}", tolerance)
    elif isinstance(expected, list):
        assert isinstance(actual, list), where
        assert len(actual) == len(expected), where
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where}[{i}]", tolerance)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=tolerance), where
    else:
        assert actual == expected, where


def sort_results(output: dict) -> dict:
    """Return an output with its results sorted by name, because ties have no defined order."""
    return {**output, "results": sorted(output["results"], key=lambda row: row["name"])}


@pytest.mark.parametrize("name", ["evaluate", "evaluate-tuned"])
def test_old_heads_give_the_same_scores_and_predictions(capsys, tmp_path, name):
    out = tmp_path / "predictions.csv"
    actual = run_command(capsys, *COMMANDS[name], "--predictions", str(out))
    assert_same(sort_results(actual), sort_results(read_recorded(name)))
    expected = read_predictions(LEGACY / "outputs" / f"{name}.csv")
    for system, values in read_predictions(out).items():
        np.testing.assert_allclose(values, expected.pop(system), atol=2e-6, err_msg=system)
    assert not expected


@pytest.mark.parametrize(("folder", "head"), [("run", "none"), ("run", "mlp"), ("tuned", "linear")])
def test_old_runs_and_adapters_still_encode(legacy, folder, head):
    rows = list(csv.DictReader((legacy / "rows.csv").open()))
    prompt = "concat-sent-cond" if head == "none" else None
    embedder = llmcond.load_embedder(folder, head=head, prompt=prompt, device="cpu")
    sentences, conditions = [r["sentence1"] for r in rows], [r["condition"] for r in rows]
    actual = embedder.encode(sentences, conditions, normalize=False)
    expected = np.load(LEGACY / "outputs" / f"embed-{folder}-{head}.npy")
    # The recorded vectors were computed from float16 features.
    np.testing.assert_allclose(actual, expected, atol=2e-3 * float(np.abs(expected).max()))


@pytest.mark.parametrize(("folder", "head"), [("run", "mlp"), ("tuned", "linear")])
def test_embed_uses_old_features(capsys, legacy, folder, head):
    name = f"embed-{folder}-{head}"
    words = [word for word in COMMANDS[name] if not word.startswith("outputs/")]
    actual = run_command(capsys, *words, "x.npy", "--no-normalize")
    assert_same(actual, read_recorded(name))
    expected = np.load(LEGACY / "outputs" / f"{name}.npy")
    np.testing.assert_allclose(np.load(legacy / "x.npy"), expected, atol=1e-6)


def test_old_features_are_complete(capsys):
    actual = run_command(capsys, *COMMANDS["extract"])
    assert_same(actual, read_recorded("extract"))
    assert {prompt["n_computed"] for prompt in actual["prompts"].values()} == {0}


def test_similarity_is_the_same(capsys):
    assert_same(run_command(capsys, *COMMANDS["similarity"]), read_recorded("similarity"))


def test_refits_on_old_features_are_the_same(capsys, tmp_path):
    """Predictions of towers have a larger tolerance, which is explained below."""
    folder = shutil.copytree("run", tmp_path / "run", ignore=shutil.ignore_patterns("heads"))
    for head in FITS:
        fit = COMMANDS[f"fit-{head}"]
        actual = run_command(capsys, *(str(folder) if word == "run" else word for word in fit))
        expected = read_recorded(f"fit-{head}")
        if head == "towers":
            actual, expected = (
                {k: v for k, v in output.items() if k != "members"} for output in (actual, expected)
            )
        assert_same(actual, expected)
    out = tmp_path / "predictions.csv"
    run_command(capsys, "evaluate", "--run", str(folder), "--predictions", str(out))
    expected = read_predictions(LEGACY / "outputs" / "evaluate.csv")
    for system, values in read_predictions(out).items():
        # Towers divide a few ReLU units by their norm, which is nearly 0 for some texts, so a
        # rounding difference of 1e-7 between processors becomes 1e-3.
        atol = 2e-3 if system.startswith("towers") else 1e-5
        np.testing.assert_allclose(values, expected.pop(system), atol=atol, err_msg=system)
    assert not expected


@pytest.mark.parametrize("name", ["sweep", "compare-prompts"])
def test_sweep_and_comparison_are_the_same(capsys, name):
    assert_same(
        sort_results(run_command(capsys, *COMMANDS[name])), sort_results(read_recorded(name))
    )


def test_analyse_is_the_same(capsys):
    assert_same(run_command(capsys, *COMMANDS["analyse"]), read_recorded("analyse"))


def test_training_again_gives_the_same_scores(capsys, tmp_path):
    command = [
        str(tmp_path / "tuned") if word == "tuned" else word for word in COMMANDS["train-lora"]
    ]
    assert_same(run_command(capsys, *command), read_recorded("train-lora"))
