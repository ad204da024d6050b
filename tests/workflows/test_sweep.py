"""Sweeps: each combination is fitted once, no fit is lost, and scores match single fits."""

import json
import os
import shutil
import statistics
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from pathlib import Path

import pytest
from helpers.commands import run_json, run_rejected
from helpers.processes import Command
from helpers.waiting import wait_until

import llmcond
from llmcond import extract, sweep
from llmcond.base.errors import UserError
from llmcond.base.package import bundled_folder
from llmcond.base.run_log import read_log
from llmcond.cli import run

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp")

#: The modules whose functions the tests count or replace.
TRIALS, FITS = (import_module(f"llmcond.runs.{name}") for name in ("trials", "rated"))

JOINT, SEPARATE = "concat-sent-cond", "separate"
BOTH = f"{JOINT}+{SEPARATE}"
ENCODER = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
DIMS = ("--head", "small.toml", "--vary", "dim=2,4", "--seeds", "2")


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with a small recipe."""
    monkeypatch.chdir(tmp_path)
    recipe = (bundled_folder("heads") / "mlp.toml").read_text()
    lines = [line for line in recipe.splitlines() if line.split(" ")[0] not in ("hidden", "epochs")]
    Path("small.toml").write_text("\n".join([*lines, "hidden = 8", "epochs = 2", ""]))
    return tmp_path


@pytest.fixture(scope="module")
def two_prompts(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path, one_thread: None) -> Path:
    """The tiny run with separate features as well. Copy it before changing it."""
    folder = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("sweeps") / "run"))
    model = json.loads((folder / "run.json").read_text())["encoder"]["model"]
    extract(model=model, **ENCODER, run=folder, prompt=[SEPARATE])
    return folder


@pytest.fixture
def folder(two_prompts: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(two_prompts, tmp_path / "own"))


class Fits(list):
    """The recipe, size and seed of every fit of a sweep in this process; ``errors`` are raised.

    The keys of ``errors`` are numbers of fits from 0, or pairs of size and seed.
    """

    def __init__(self):
        super().__init__()
        self.errors = {}


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Fits:
    calls, fit = Fits(), FITS.fit_recipe

    def count_fit(recipe, pairs, dev, seed, *others):
        calls.append((recipe.name, recipe.dim, seed))
        for key in (len(calls) - 1, (recipe.dim, seed)):
            if key in calls.errors:
                raise calls.errors.pop(key)
        return fit(recipe, pairs, dev, seed, *others)

    monkeypatch.setattr(FITS, "fit_recipe", count_fit)
    return calls


def sweep_arguments(folder, *arguments, prompt=JOINT, workers=1):
    options = ("--run", folder, "--workers", workers, "--prompt", prompt)
    return [*map(str, ("sweep", *options, *arguments))]


def run_sweep(capsys, folder, *arguments, **options):
    """Run a sweep with ``--json``, and return its rows and its messages."""
    assert run([*sweep_arguments(folder, *arguments, **options), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)["results"], captured.err


def load_fits(folder):
    """Return the stored record of each fit with its scores, by file."""
    records = {path: json.loads(path.read_text()) for path in (folder / "sweep").glob("*.json")}
    return {path: {**record["scores"][0], **record} for path, record in records.items()}


# -- what is fitted ----------------------------------------------------------------------------


def test_every_combination_is_fitted_once_with_a_log(capsys, folder, fits):
    vary = ("--vary", "dim=2,4", "learning_rate=0.001,0.01", "--seeds", 2)
    heads = ("--head", "small.toml", "linear", "--set", "epochs=2")
    rows, messages = run_sweep(capsys, folder, *heads, *vary)
    assert "16 fits, 0 of them already done" in messages
    assert len(fits) == len(load_fits(folder)) == 16
    combinations = {
        (row["name"], row["settings"]["dim"], row["settings"]["learning_rate"]) for row in rows
    }
    assert len(combinations) == len(rows) == 8
    for row in rows:
        assert row["name"] == f"{row['head']}@{JOINT}"
        assert row["dim"] == row["settings"]["dim"]
        assert (row["seeds"], row["split"], row["subtract"]) == ([0, 1], "test", True)
        assert [len(curve) for curve in row["curves"]] == [2, 2]
    scores = [row["spearman"] for row in rows if row["spearman"] is not None]
    assert scores == sorted(scores, reverse=True)
    assert [row["spearman"] for row in rows[: len(scores)]] == scores
    report = json.loads((folder / "sweep.json").read_text())
    assert report["results"] == rows
    assert report["data"] == json.loads((folder / "run.json").read_text())["data"]
    assert "torch" in report["versions"]

    logs = {path.stem: read_log(path) for path in (folder / "logs/sweep").iterdir()}
    assert logs.keys() == {path.stem for path in load_fits(folder)}
    logged = [str(record["dev_spearman"]) for log in logs.values() for record in log[1:-1]]
    curves = [curve for row in rows for curve in row["curves"]]
    scores = [str(epoch["dev_spearman"]) for curve in curves for epoch in curve]
    assert sorted(logged) == sorted(scores)
    dims = [log[0]["config"]["recipe"]["settings"]["dim"] for log in logs.values()]
    assert sorted(dims) == [2] * 8 + [4] * 8


def test_repeated_sweep_fits_only_what_has_no_record(capsys, folder, fits):
    compare = ("compare", f"{folder}:none@{JOINT}", f"{folder}:mlp")
    assert "of a sweep" not in run_rejected(capsys, *compare)
    first, _ = run_sweep(capsys, folder, *DIMS)
    assert len(fits) == 4
    before = {path: path.stat().st_mtime_ns for path in load_fits(folder)}
    repeated, messages = run_sweep(capsys, folder, *DIMS)
    assert "4 fits, 4 of them already done" in messages
    assert len(fits) == 4
    assert repeated == first
    assert {path: path.stat().st_mtime_ns for path in load_fits(folder)} == before

    deleted, damaged = sorted(before)[1:3]
    records = {path: json.loads(path.read_text()) for path in (deleted, damaged)}
    deleted.unlink()
    damaged.write_text('{"scores": {}}')
    repeated, messages = run_sweep(capsys, folder, *DIMS)
    assert "4 fits, 2 of them already done" in messages
    assert "The fit is repeated." in messages
    (first_row,), (second_row,) = (record["scores"] for record in records.values())
    expected = [("small", row["dim"], row["seed"]) for row in (first_row, second_row)]
    assert sorted(fits[4:]) == sorted(expected)
    assert repeated == first
    for path, record in records.items():
        assert {**json.loads(path.read_text()), "created": 0} == {**record, "created": 0}
    # The fits of a sweep are not heads of the run.
    message = run_rejected(capsys, *compare)
    assert "has no fitted head 'mlp' (none is fitted yet). The fits of a sweep are" in message
    assert f"Fit it: llmcond fit-head --head mlp --run {folder}" in message


def test_fits_are_keyed_by_all_that_affects_results(capsys, monkeypatch, folder, fits):
    run_sweep(capsys, folder, *DIMS)
    for changes, n_new in (
        (["--split", "dev"], 4),
        (["--no-subtract"], 4),
        (["--set", "dropout=0.1"], 4),
        (["--set", "dropout=0.15"], 0),  # the value of the recipe
        (["--head", "linear", "--set", "epochs=2"], 4),
        (["--prompt", SEPARATE, BOTH], 4 + 4),
    ):
        before = len(fits)
        run_sweep(capsys, folder, *DIMS, *changes)
        assert len(fits) - before == n_new, changes
    before = len(fits)
    run_sweep(capsys, folder, *DIMS[:-1], "3")
    assert fits[before:] == [("small", 2, 2), ("small", 4, 2)]
    assert len(load_fits(folder)) == len(fits)
    current = TRIALS.provenance()
    versions = {**current["versions"], "torch": "0.0"}
    monkeypatch.setattr(TRIALS, "provenance", lambda: {**current, "versions": versions})
    before = len(fits)
    run_sweep(capsys, folder, *DIMS)
    assert len(fits) - before == 4


# -- results -----------------------------------------------------------------------------------


def test_results_match_single_fits(capsys, folder):
    rows, _ = run_sweep(capsys, folder, *DIMS, prompt=BOTH)
    records = list(load_fits(folder).values())
    assert len(records) == 4
    for dim in (2, 4):
        singles = []
        for seed in (0, 1):
            settings = {"seed": seed, "dim": dim, "name": "single"}
            llmcond.fit_head(run=folder, head="small.toml", prompt=BOTH, **settings)
            evaluate = ("evaluate", "--run", folder, "--head", "single")
            single = run_json(capsys, *evaluate)["results"][-1]
            record = json.loads((folder / "heads/single/head.json").read_text())
            (match,) = (r for r in records if (r["seed"], r["dim"]) == (seed, dim))
            # Intervals of a sweep are computed over all seeds.
            single |= {"name": match["name"], **{key: match[key] for key in single if "_ci" in key}}
            assert {key: match[key] for key in single} == single
            assert match["spearman_ci"] == [None, None]
            assert (match["fit"], match["recipe"]) == (record["fit"], record["recipe"])
            singles.append(single)
        (row,) = (row for row in rows if row["dim"] == dim)
        for score in ("spearman", "accuracy"):
            values = [single[score] for single in singles]
            mean = None if None in values else pytest.approx(statistics.fmean(values))
            assert row[score] == mean


def test_several_processes_give_equal_results(capsys, two_prompts, folder, tmp_path):
    """The recipe and the metric are files, named by relative paths."""
    Path("mine.py").write_text("def size(prediction, rating, group):\n    return len(prediction)\n")
    arguments = (*DIMS, "--set", "epochs=2", "--metric", "mine.py:size")
    single, _ = run_sweep(capsys, folder, *arguments)
    run_copy = shutil.copytree(two_prompts, tmp_path / "other")
    threads = os.environ.get("OMP_NUM_THREADS")
    parallel, _ = run_sweep(capsys, run_copy, *arguments, workers=2)
    assert os.environ.get("OMP_NUM_THREADS") == threads
    assert {path.name for path in load_fits(run_copy)} == {path.name for path in load_fits(folder)}
    for rows in (single, parallel):
        rows.sort(key=lambda row: row["dim"])
    for row, other in zip(single, parallel, strict=True):
        for key in ("name", "settings", "seeds", "best_epochs", "size", "size_sd", "size_ci"):
            assert row[key] == other[key]
        assert row["size"] == 12
        losses = [[epoch["loss"] for curve in r["curves"] for epoch in curve] for r in (row, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_killed_process_reports_one_line(capsys, monkeypatch, folder):
    def lose_process(futures, *_):
        raise BrokenProcessPool("A process was terminated abruptly")

    monkeypatch.setattr(TRIALS, "wait", lose_process)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run(sweep_arguments(folder, *DIMS, workers=2)) == 1
    err = capsys.readouterr().err
    assert err.count("llmcond: error: ") == 1
    assert "Completed fits are saved" in err
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_fits_that_ended_before_a_process_was_killed_are_saved(capsys, monkeypatch, folder):
    broken = Future()
    broken.set_exception(BrokenProcessPool("A process was terminated abruptly"))
    monkeypatch.setattr(TRIALS, "wait", lambda futures, *_: ([broken, *wait(futures).done], set()))
    assert run(sweep_arguments(folder, *DIMS, workers=2)) == 1
    assert "Completed fits are saved" in capsys.readouterr().err
    assert len(load_fits(folder)) == 4


# -- invalid sweeps ----------------------------------------------------------------------------

INVALID = [
    ("--seeds 1 --vary dim=4,4 dropout=0.1", "there is nothing to vary"),
    ("--vary dim=2 --vary dim=4", "--vary repeats dim. Give all of its values together."),
    ("--vary dmi=2,4", "Did you mean 'dim'"),
    (f"--prompt {JOINT} {SEPARATE} --no-subtract", "the condition would be ignored"),
    (f"--head hypernet --prompt {JOINT}", "--prompt separate"),
    ("--head small.toml copy/small.toml", "the head small was given 2 times"),
    ("--plot x.png --plot-steps x.png", "--plot-steps and --plot both write x.png. Give one"),
    ("--plot x.png --plot-steps x.svg", "--plot-steps and --plot both write x-data.csv."),
]


def test_invalid_sweep_is_rejected_before_first_fit(capsys, folder, fits):
    Path("copy").mkdir()
    shutil.copy("small.toml", "copy")
    before = sorted(Path().rglob("*"))
    for text, expected in INVALID:
        options = text.split() if "--head" in text else [*text.split(), "--head", "small.toml"]
        assert expected in run_rejected(capsys, "sweep", "--run", folder, *options), text
    with pytest.raises(UserError):
        sweep(run=folder, head=["linear"], vary={"dim": []}, seeds=1, workers=1)
    assert not fits
    assert sorted(Path().rglob("*")) == before


# -- failed fits and interrupted sweeps --------------------------------------------------------


def test_failed_fit_is_reported_and_repeated(capsys, folder, fits):
    fits.errors[4, 1] = RuntimeError("out of memory")
    arguments = (*DIMS[:-1], "3")
    rows, messages = run_sweep(capsys, folder, *arguments)
    line = f"small@{JOINT} dim=4 seed=1: RuntimeError: out of memory"
    assert f"failed: {line}" in messages
    assert messages.count("failed") == 1
    assert json.loads((folder / "sweep.json").read_text())["failures"] == [line]
    assert {row["dim"]: row["seeds"] for row in rows} == {2: [0, 1, 2], 4: [0, 2]}
    fits.clear()
    rows, messages = run_sweep(capsys, folder, *arguments)
    assert "6 fits, 5 of them already done" in messages
    assert fits == [("small", 4, 1)]
    assert {tuple(row["seeds"]) for row in rows} == {(0, 1, 2)}


def test_dim_that_is_set_is_not_lowered(capsys, folder):
    options = ("--run", str(folder), "--head", "small.toml", "--set", "dim=1024", "--seeds", "2")
    assert run(["sweep", *options]) == 1
    assert "dim is 1024, but the features have" in capsys.readouterr().err


def test_sweep_fails_only_if_there_is_no_fit(capsys, folder):
    arguments = ("--head", "small.toml", "--seeds", "1", "--vary")
    assert run(sweep_arguments(folder, *arguments, "dim=33,34")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    message = f"error: every fit failed. The first failure: small@{JOINT} dim=33 seed=0"
    assert message in captured.err
    assert not load_fits(folder)
    assert not (folder / "sweep.json").exists()
    # Sizes above that of the features fail, but not the others, even if these have been fitted.
    for n_done in (0, 1):
        rows, messages = run_sweep(capsys, folder, *arguments, "dim=33,4")
        assert f"2 fits, {n_done} of them already done" in messages
        assert "dim=33 seed=0: dim is 33, but the features have 32" in messages
        assert [row["dim"] for row in rows] == [4]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (OSError("gone"), 1)])
def test_interrupted_sweep_loses_no_fit(capsys, two_prompts, folder, fits, tmp_path, error, code):
    expected, _ = run_sweep(capsys, shutil.copytree(two_prompts, tmp_path / "whole"), *DIMS)
    fits.errors[6] = error
    assert run(sweep_arguments(folder, *DIMS)) == code
    assert "results are kept" in capsys.readouterr().err
    assert len(load_fits(folder)) == 2
    rows, messages = run_sweep(capsys, folder, *DIMS)
    assert "4 fits, 2 of them already done" in messages
    assert len(fits) == 4 + 3 + 2
    assert rows == expected


def test_killed_sweep_keeps_complete_fits_and_resumes(capsys, folder, fits):
    vary = ("--head", "small.toml", "--vary", "dim=2,4", "--seeds", "8", "--set", "epochs=20")
    process = Command(folder.parent / "printed", sweep_arguments(folder, *vary)).process
    try:
        wait_until(lambda: len(list((folder / "sweep").glob("*.json"))) >= 2)
    finally:
        process.kill()
        process.join()
    n_done = len(load_fits(folder))
    assert 2 <= n_done < 16
    assert all(result["n"] == 12 for result in load_fits(folder).values())
    rows, messages = run_sweep(capsys, folder, *vary)
    assert f"16 fits, {n_done} of them already done" in messages
    assert len(fits) == 16 - n_done
    assert [len(row["seeds"]) for row in rows] == [8, 8]


# -- plots -------------------------------------------------------------------------------------


def test_curves_of_test_are_scored_only_for_their_plot(capsys, folder, fits):
    before, _ = run_sweep(capsys, folder, *DIMS, "--split", "test")
    assert all("test_spearman" not in epoch for row in before for epoch in row["curves"][0])
    plots = ("--split", "test", "--plot", "dim.svg", "--plot-steps", "steps.svg")
    rows, messages = run_sweep(capsys, folder, *DIMS, *plots)
    # Only the learning curves are new: scoring test does not influence the fits.
    assert "4 fits, 0 of them already done" in messages
    for row, other in zip(rows, before, strict=True):
        assert {**row, "curves": None} == {**other, "curves": None}
    for fit in load_fits(folder).values():
        best = fit["fit"]["curve"][fit["fit"]["best_epoch"] - 1]
        assert best["test_spearman"] == pytest.approx(fit["spearman"], abs=1e-6)
        assert best["dev_spearman"] == pytest.approx(fit["dev_score"], abs=1e-6)
    # Records with the score on test serve sweeps without it, too.
    _, messages = run_sweep(capsys, folder, *DIMS, "--plot-steps", "dev.svg")
    assert "4 fits, 4 of them already done" in messages
    for file, label in (("dim", "dim"), ("steps", "Spearman on test"), ("dev", "Spearman on dev")):
        assert label in Path(f"{file}.svg").read_text()
    assert len(fits) == 8
