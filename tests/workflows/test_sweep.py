"""Sweeps: each combination is fitted once, no fit is lost, and scores match single fits."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib import import_module
from math import nan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.processes import Command
from helpers.waiting import PATIENCE, wait_until

import llmcond.config
from llmcond import compare_prompts, extract, sweep
from llmcond.cli import run
from llmcond.encoders import EncoderOptions
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.results import Result, RowCounts
from llmcond.metrics import Estimate
from llmcond.report import figures
from llmcond.run_log import read_log

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp")

#: The modules whose functions the tests count or replace.
TRIALS, FITS = (import_module(f"llmcond.runs.{name}") for name in ("trials", "rated"))

JOINT, SEPARATE = "concat-sent-cond", "separate"
BOTH = f"{JOINT}+{SEPARATE}"


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with small recipes of two names."""
    monkeypatch.chdir(tmp_path)
    recipe = (llmcond.bundled.bundled_folder("heads") / "mlp.toml").read_text()
    lines = [line for line in recipe.splitlines() if line.split(" ")[0] not in ("hidden", "epochs")]
    for name, hidden in (("small", 8), ("smaller", 4)):
        text = "\n".join([*lines, f"hidden = {hidden}", "epochs = 2", ""])
        Path(f"{name}.toml").write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def two_prompts(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path, one_thread: None) -> Path:
    """The tiny run with separate features as well. Copy it before changing it."""
    folder = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("sweeps") / "run"))
    model = json.loads((folder / "run.json").read_text())["encoder"]["model"]
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=True)
    extract(model=model, **vars(options), run=folder, prompt=[SEPARATE])
    return folder


@pytest.fixture
def folder(two_prompts: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(two_prompts, tmp_path / "own"))


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, int]]:
    """The recipe, size and seed of every fit of a sweep in this process."""
    calls: list[tuple[str, int | None, int]] = []
    fit = FITS.fit_recipe

    def count_fit(recipe, pairs, dev, seed, *others):
        calls.append((recipe.name, recipe.dim, seed))
        return fit(recipe, pairs, dev, seed, *others)

    monkeypatch.setattr(FITS, "fit_recipe", count_fit)
    return calls


def run_sweep(capsys, folder, *arguments, prompt=JOINT, workers=1):
    """Run a sweep with ``--json``, and return its rows and its messages."""
    options = ["--run", str(folder), "--workers", str(workers), "--json", "--prompt", prompt]
    assert run(["sweep", *options, *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)["results"], captured.err


def load_fits(folder):
    """Return the stored record of each fit with its scores, by file."""
    records = {path: json.loads(path.read_text()) for path in (folder / "sweep").glob("*.json")}
    return {path: {**record["scores"][0], **record} for path, record in records.items()}


DIMS = ("--head", "small.toml", "--vary", "dim=2,4", "--seeds", 2)
DIMS_TEXT = [str(part) for part in DIMS]


# -- what is fitted ----------------------------------------------------------------------------


def test_every_combination_is_fitted_once(capsys, folder, fits):
    vary = ("--vary", "dim=2,4", "learning_rate=0.001,0.01", "--seeds", 2)
    heads = ("--head", "small.toml", "linear", "--set", "epochs=2", "--prompt", BOTH)
    rows, messages = run_sweep(capsys, folder, *heads, *vary)
    assert "32 fits, 0 of them already done" in messages
    assert len(fits) == len(load_fits(folder)) == 32
    assert len(set(fits)) == 2 * 2 * 2
    combinations = {
        (row["head"], row["prompt"], row["settings"]["dim"], row["settings"]["learning_rate"])
        for row in rows
    }
    assert len(combinations) == len(rows) == 16
    for row in rows:
        assert row["name"] == f"{row['head']}@{row['prompt']}"
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


def test_every_fit_has_a_log(folder):
    swept = sweep(run=folder, head=["small.toml"], prompt=JOINT, vary={"dim": [4, 8]}, seeds=1)
    logs = [read_log(path) for path in sorted((folder / "logs/sweep").glob("*.jsonl"))]
    names = {path.stem for path in (folder / "sweep").glob("*.json")}
    assert {path.stem for path in (folder / "logs/sweep").iterdir()} == names
    scores = [record["dev_spearman"] for log in logs for record in log[1:-1]]
    curves = [epoch for row in swept.to_json()["results"] for epoch in row["curves"][0]]
    assert sorted(scores) == sorted(epoch["dev_spearman"] for epoch in curves)
    dims = [log[0]["config"]["recipe"]["settings"]["dim"] for log in logs]
    assert sorted(dims) == [4, 8]


def test_repeated_sweep_fits_nothing(capsys, folder, fits):
    first, _ = run_sweep(capsys, folder, *DIMS)
    assert len(fits) == 4
    before = {path: path.stat().st_mtime_ns for path in load_fits(folder)}
    repeated, messages = run_sweep(capsys, folder, *DIMS)
    assert "4 fits, 4 of them already done" in messages
    assert len(fits) == 4
    assert repeated == first
    assert {path: path.stat().st_mtime_ns for path in load_fits(folder)} == before

    deleted = sorted(before)[1]
    record = json.loads(deleted.read_text())
    deleted.unlink()
    repeated, messages = run_sweep(capsys, folder, *DIMS)
    assert "4 fits, 3 of them already done" in messages
    (row,) = record["scores"]
    assert fits[4:] == [("small", row["dim"], row["seed"])]
    assert repeated == first
    assert {**json.loads(deleted.read_text()), "created": 0} == {**record, "created": 0}


def test_fits_of_sweep_are_no_heads_of_run(capsys, folder):
    arguments = ("compare", f"{folder}:none@{JOINT}", f"{folder}:mlp")
    assert "of a sweep" not in run_rejected(capsys, *arguments)
    run_sweep(capsys, folder, *DIMS)
    message = run_rejected(capsys, *arguments)
    assert "has no fitted head 'mlp' (none is fitted yet). The fits of a sweep are" in message
    assert f"Fit it: llmcond fit-head --head mlp --run {folder}" in message


def test_sweeps_share_common_fits(capsys, folder, fits):
    run_sweep(capsys, folder, *DIMS)
    run_sweep(capsys, folder, "--head", "small.toml", "--vary", "dim=4,6", "--seeds", 3)
    assert fits[4:] == [("small", 4, 2), *(("small", 6, seed) for seed in range(3))]
    # The settings are the same, but written in another way.
    dims = ("--vary", "dim=6,4", "--set", "hidden=8", "epochs=2", "--seeds", 3)
    rows, messages = run_sweep(capsys, folder, "--head", "small.toml", *dims)
    assert "6 fits, 6 of them already done" in messages
    assert len(fits) == 8
    assert {row["dim"] for row in rows} == {4, 6}


def test_fits_are_keyed_by_all_that_affects_results(capsys, folder, fits):
    run_sweep(capsys, folder, *DIMS)
    for changes, n_new in (
        (["--split", "dev"], 4),
        (["--no-subtract"], 4),
        (["--set", "dropout=0.1"], 4),
        (["--set", "dropout=0.15"], 0),
        (["--seeds", "3"], 2),
        (["--head", "linear", "--set", "epochs=2"], 4),
        (["--prompt", SEPARATE], 4),  # in addition to those of the other prompt
        (["--prompt", SEPARATE, BOTH], 4),  # of the second prompt only
    ):
        before = len(fits)
        dims = DIMS[:-2] if "--seeds" in changes else DIMS
        run_sweep(capsys, folder, *dims, *changes, prompt=JOINT)
        assert len(fits) - before == n_new, changes
    assert len(load_fits(folder)) == len(fits)


def test_new_library_version_fits_again(capsys, monkeypatch, folder, fits):
    run_sweep(capsys, folder, *DIMS)
    current = TRIALS.provenance()
    versions = {**current["versions"], "torch": "0.0"}
    monkeypatch.setattr(TRIALS, "provenance", lambda: {**current, "versions": versions})
    run_sweep(capsys, folder, *DIMS)
    assert len(fits) == 8


def test_required_prompt_of_head_is_default(capsys, folder, fits):
    options = ("--run", folder, "--workers", 1, "--seeds", 1, "--set", "epochs=1", "dim=4")
    rows = run_json(capsys, "sweep", "--head", "hypernet", "--vary", "rank=1,2,0", *options)[
        "results"
    ]
    assert {row["name"] for row in rows} == {"hypernet@separate"}
    assert {row["settings"]["rank"] for row in rows} == {0, 1, 2}
    assert len(fits) == 3


# -- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "prompt", "settings", "vary"),
    [
        ("small.toml", BOTH, (), "dim=2,4"),
        ("hypernet", SEPARATE, ("epochs=2", "dim=4"), "rank=2,0"),
        ("hypernet-joint", JOINT, ("epochs=2", "dim=6", "rank=2"), "activation=none,tanh"),
        ("pca", JOINT, (), "dim=3,5"),
    ],
)
def test_results_match_single_fits(capsys, folder, head, prompt, settings, vary):
    options = ("--set", *settings) if settings else ()
    rows, _ = run_sweep(
        capsys, folder, "--head", head, "--vary", vary, "--seeds", 2, *options, prompt=prompt
    )
    key, _, texts = vary.partition("=")
    records = list(load_fits(folder).values())
    assert len(records) == 4
    for text in texts.split(","):
        by_seed = {}
        for seed in (0, 1):
            fit = ("fit-head", "--run", folder, "--head", head, "--prompt", prompt, "--seed", seed)
            changes = ("--name", "single", "--set", *settings, f"{key}={text}")
            fitted = run_json(capsys, *fit, *changes)
            single = run_json(capsys, "evaluate", "--run", folder, "--head", "single")["results"][
                -1
            ]
            record = json.loads((folder / "heads/single/head.json").read_text())
            (match,) = (
                result
                for result in records
                if result["seed"] == seed and str(result["recipe"]["settings"][key]) == text
            )
            # Intervals of a sweep are computed over all seeds.
            single |= {"name": match["name"], **{key: match[key] for key in single if "_ci" in key}}
            assert {key: match[key] for key in single} == single
            assert match["spearman_ci"] == [None, None]
            assert match["fit"] == record["fit"]
            assert match["recipe"] == record["recipe"]
            by_seed[seed] = single
        (row,) = (row for row in rows if str(row["settings"][key]) == text)
        assert row["dim"] == fitted["dim"]
        for score in ("spearman", "accuracy"):
            values = [by_seed[seed][score] for seed in row["seeds"]]
            mean = None if None in values else pytest.approx(statistics.fmean(values))
            assert row[score] == mean


def test_several_processes_give_equal_results(capsys, two_prompts, folder, tmp_path):
    """The recipe and the metric are files, named by relative paths."""
    Path("mine.py").write_text("def size(prediction, rating, group):\n    return len(prediction)\n")
    arguments = ("--head", "small.toml", "linear", "--vary", "dim=2,4", "--seeds", 2)
    arguments = (*arguments, "--set", "epochs=2", "--metric", "mine.py:size")
    single, _ = run_sweep(capsys, folder, *arguments, prompt=BOTH)
    run_copy = shutil.copytree(two_prompts, tmp_path / "other")
    threads = os.environ.get("OMP_NUM_THREADS")
    parallel, messages = run_sweep(capsys, run_copy, *arguments, prompt=BOTH, workers=2)
    assert os.environ.get("OMP_NUM_THREADS") == threads
    assert "8 fits, 0 of them already done" in messages
    assert {path.name for path in load_fits(run_copy)} == {path.name for path in load_fits(folder)}
    for path, result in load_fits(folder).items():
        other_result = load_fits(run_copy)[run_copy / "sweep" / path.name]
        assert other_result["spearman"] == pytest.approx(result["spearman"], abs=1e-6, nan_ok=True)
        assert other_result["fit"]["best_epoch"] == result["fit"]["best_epoch"]
        losses = [epoch["loss"] for epoch in result["fit"]["curve"]]
        assert [epoch["loss"] for epoch in other_result["fit"]["curve"]] == pytest.approx(
            losses, rel=1e-5
        )
    key = ("name", "settings", "seeds", "best_epochs", "dim")
    by_name = sorted(str([row[k] for k in key]) for row in single)
    assert sorted(str([row[k] for k in key]) for row in parallel) == by_name
    for row in parallel:
        assert (row["size"], row["size_sd"], row["size_ci"]) == (12, 0, [None, None])
    _, messages = run_sweep(capsys, run_copy, *arguments[:-2], prompt=BOTH)
    assert "8 fits, 8 of them already done" in messages


def test_scores_match_those_of_comparison(capsys, folder):
    """Scores are means over seeds, with intervals over sentence pairs and seeds."""
    arguments = ("--seeds", "3", "--workers", "1", "--json")
    assert (
        run(["sweep", "--run", str(folder), "--head", "small.toml", "--prompt", JOINT, *arguments])
        == 0
    )
    (swept_row,) = json.loads(capsys.readouterr().out)["results"]
    manifest = json.loads((folder / "run.json").read_text())["encoder"]
    options = replace(EncoderOptions.of(manifest["identity"]), device="cpu")
    compared = compare_prompts(
        model=manifest["model"],
        run=folder,
        prompts=[JOINT],
        heads=["small.toml"],
        seeds=3,
        workers=1,
        **vars(options),
    ).to_json()
    (compared_row,) = (row for row in compared["results"] if row["head"] == "small")
    for metric in ("spearman", "pearson", "accuracy"):
        for key in (metric, f"{metric}_ci", f"{metric}_sd"):
            assert swept_row[key] == compared_row[key]
    low, high = swept_row["spearman_ci"]
    assert low < swept_row["spearman"] < high


def test_table_explains_its_intervals(capsys, folder):
    arguments = [
        "sweep",
        "--run",
        str(folder),
        "--workers",
        "1",
        "--prompt",
        JOINT,
        "--no-subtract",
    ]
    assert run([*arguments, *DIMS_TEXT]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "own, test: 12 rated rows of 6 sentence pairs." in text
    assert (
        "95 % confidence intervals over sentence pairs and, with several fits, over seeds." in text
    )
    assert "Epochs were chosen on dev." in text
    # Two seeds have a standard deviation, but no interval.
    (line,) = (
        part for part in text.split("small ")[1:] if part.startswith(f"{JOINT} no dim=2 2 2 ")
    )
    assert line.split()[7] == "–"


# -- invalid sweeps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--seeds", "1"], "there is nothing to vary"),
        (["--seeds", "1", "--vary", "dim=4", "dropout=0.1"], "there is nothing to vary"),
        (["--seeds", "1", "--vary", "dim=4,4"], "there is nothing to vary"),
        (["--seeds", "1", "--head", "small.toml", "small.toml"], "there is nothing to vary"),
        (["--vary", "dmi=2,4"], "Did you mean 'dim'"),
        (["--vary", "rank=2,4"], "has no setting 'rank'"),
        (["--set", "dmi=2"], "Did you mean 'dim'"),
        (["--vary", "dim=2,4", "--set", "dim=4"], "dim is both varied and set"),
        (["--vary", "dim=2,four"], "dim is 'four', not int"),
        (["--vary", "dim=2,"], "dim is '', not int"),
        (["--vary", "dim=0,2"], "at least 1"),
        (["--vary", "dim"], "NAME=VALUE"),
        (["--vary", "activation=relu,rely"], "must be one of"),
        (["--workers", "0"], "workers is 0"),
        (["--prompt", "cond"], "no features of the prompt 'cond'"),
        (["--prompt", f"{JOINT}+{JOINT}"], "names a prompt twice"),
        (["--prompt", JOINT, SEPARATE, "--no-subtract"], "the condition would be ignored"),
        (["--head", "hypernet", "--prompt", JOINT], "--prompt separate"),
        (["--head", "mpl"], "Did you mean 'mlp'"),
        (["--head", "hadamard", "--vary", "dim=2,4"], "has no setting 'dim'"),
        (["--split", "tset"], "Did you mean 'test'"),
        (["--vary", "dim=2,4", "--plot", "x.JPG"], "name a .png or .svg or .pdf file"),
        (["--vary", "dim=2,4", "--plot-steps", "x"], "has no suffix"),
        (["--vary", "dim=2,4", "--plot", "own"], "has no suffix"),
        (["--vary", "dim=2,4", "--plot", "small.toml/x.png"], "cannot write"),
    ],
)
def test_invalid_sweep_is_rejected_before_first_fit(capsys, folder, fits, arguments, expected):
    before = sorted(Path().rglob("*"))
    options = arguments if "--head" in arguments else [*arguments, "--head", "small.toml"]
    assert expected in run_rejected(capsys, "sweep", "--run", folder, *options)
    assert not fits
    assert sorted(Path().rglob("*")) == before


def test_unwritable_plot_is_rejected_before_first_fit(capsys, folder, fits):
    Path("folder.png").mkdir()
    line = run_rejected(capsys, "sweep", "--run", folder, *DIMS, "--plot", "folder.png")
    assert "is a folder" in line
    assert not fits


def test_sweep_needs_seeds_and_heads(folder):
    with pytest.raises(UserError, match="Name one or more"):
        sweep(run=folder, head=[], vary={"dim": ["2", "4"]})
    with pytest.raises(UserError):
        sweep(run=folder, head=["small.toml"], vary={"dim": ["2", "4"]}, seeds=0)


def test_split_without_ratings_is_rejected(capsys, folder, fits):
    rows = folder / "rows.parquet"
    import pyarrow.parquet as pq

    table = pq.read_table(rows)
    ratings = [
        float("nan") if split == "test" else rating
        for split, rating in zip(*(table[c].to_pylist() for c in ("split", "rating")), strict=True)
    ]
    index = table.schema.get_field_index("rating")
    pq.write_table(table.set_column(index, "rating", [ratings]), rows)
    assert "nothing to score" in run_rejected(
        capsys, "sweep", "--run", folder, *DIMS, "--split", "test"
    )
    assert not fits


# -- failed fits and interrupted sweeps --------------------------------------------------------


def fail_fits(monkeypatch, should_fail, error):
    """Make fits fail if ``should_fail`` returns true for their number from 0, recipe and seed."""
    fit, seeds = FITS.fit_recipe, []

    def fit_or_fail(recipe, pairs, dev, seed, *others):
        seeds.append(seed)
        if should_fail(len(seeds) - 1, recipe, seed):
            raise error
        return fit(recipe, pairs, dev, seed, *others)

    monkeypatch.setattr(FITS, "fit_recipe", fit_or_fail)
    return seeds


def test_failed_fit_is_reported_and_others_are_saved(capsys, monkeypatch, folder):
    error = UserError("the loss became nan in epoch 3.")
    with monkeypatch.context() as patched:
        fail_fits(patched, lambda number, recipe, seed: (recipe.dim, seed) == (4, 1), error)
        rows, messages = run_sweep(
            capsys, folder, "--head", "small.toml", "--vary", "dim=2,4", "--seeds", 3
        )
    assert f"failed: small@{JOINT} dim=4 seed=1: {error}" in messages
    assert messages.count("failed") == 1
    assert {row["dim"]: row["seeds"] for row in rows} == {2: [0, 1, 2], 4: [0, 2]}
    assert len(load_fits(folder)) == 5
    # Only the failed fit is repeated.
    seeds = fail_fits(monkeypatch, lambda *_: False, error)
    rows, messages = run_sweep(
        capsys, folder, "--head", "small.toml", "--vary", "dim=2,4", "--seeds", 3
    )
    assert "6 fits, 5 of them already done" in messages
    assert seeds == [1]
    assert {tuple(row["seeds"]) for row in rows} == {(0, 1, 2)}


def test_only_sizes_above_that_of_features_fail(capsys, folder):
    rows, messages = run_sweep(
        capsys, folder, "--head", "small.toml", "--vary", "dim=33,4", "--seeds", 2
    )
    assert messages.count("the features have 32") == 2
    assert [row["dim"] for row in rows] == [4]


def test_sweep_fails_if_every_fit_fails(capsys, folder):
    arguments = ["sweep", "--run", str(folder), "--workers", "1", "--head", "small.toml", "--json"]
    assert run([*arguments, "--vary", "dim=33,34", "--seeds", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        f"error: every fit failed. The first failure: small@{JOINT} dim=33 seed=0" in captured.err
    )
    assert "Traceback" not in captured.err
    assert not load_fits(folder)
    assert not (folder / "sweep.json").exists()
    with pytest.raises(LlmcondError, match="every fit failed"):
        sweep(
            run=folder,
            head=["small.toml"],
            vary={"dim": ["33", "34"]},
            seeds=1,
            prompt=[JOINT],
            workers=1,
        )


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError("too much")])
def test_fit_out_of_memory_counts_as_failed(capsys, monkeypatch, folder, error):
    fail_fits(monkeypatch, lambda number, *_: number == 1, error)
    assert (
        run(["sweep", "--run", str(folder), "--workers", "1", "--prompt", JOINT, *DIMS_TEXT]) == 0
    )
    line = f"small@{JOINT} dim=2 seed=1: {type(error).__name__}: {error}"
    assert f"failed: {line}" in capsys.readouterr().err
    report = json.loads((folder / "sweep.json").read_text())
    assert report["failures"] == [line]
    assert [row["seeds"] for row in report["results"] if row["dim"] == 2] == [[0]]


def test_failures_are_no_error_if_earlier_fits_exist(capsys, folder):
    run_sweep(capsys, folder, "--head", "small.toml", "--vary", "dim=2,4", "--seeds", 1)
    rows, messages = run_sweep(
        capsys, folder, "--head", "small.toml", "--vary", "dim=2,33", "--seeds", 1
    )
    assert [row["dim"] for row in rows] == [2]
    assert "dim=33 seed=0" in messages


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("gone"), ValueError("a bug")])
def test_interrupted_sweep_loses_no_fit(capsys, monkeypatch, two_prompts, folder, tmp_path, error):
    expected, _ = run_sweep(capsys, shutil.copytree(two_prompts, tmp_path / "whole"), *DIMS)
    with monkeypatch.context() as patched:
        fail_fits(patched, lambda number, *_: number == 2, error)
        arguments = ["sweep", "--run", str(folder), "--workers", "1", "--prompt", JOINT, *DIMS_TEXT]
        if isinstance(error, ValueError):
            with pytest.raises(ValueError, match="a bug"):
                run(arguments)
        else:
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            assert run(arguments) == code
            assert "results are kept" in capsys.readouterr().err
    assert len(load_fits(folder)) == 2
    seeds = fail_fits(monkeypatch, lambda *_: False, error)
    rows, messages = run_sweep(capsys, folder, *DIMS)
    assert "4 fits, 2 of them already done" in messages
    assert len(seeds) == 2
    assert rows == expected


def test_killed_sweep_keeps_complete_fits_and_resumes(capsys, folder, fits):
    vary = ("--head", "small.toml", "--vary", "dim=2,4", "--seeds", "8", "--set", "epochs=20")
    arguments = ("sweep", "--run", str(folder), "--prompt", JOINT, "--workers", "1", *vary)
    process = Command(folder.parent / "printed", arguments).process
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


@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="the test reads processes from /proc"
)
@pytest.mark.matrix
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_ended_sweep_stops_its_processes(folder, signal_number):
    """Processes in the middle of a long fit stop, too."""
    epochs = ("--vary", "epochs=1,1000000", "--set", "patience=1000000", "dim=4", "--seeds", "2")
    arguments = ("sweep", "--run", str(folder), "--prompt", JOINT, "--head", "small.toml", *epochs)
    process = subprocess.Popen(
        [sys.executable, "-m", "llmcond", *arguments, "--workers", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_until(lambda: len(load_fits(folder)) == 2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        process.send_signal(signal_number)
        _, messages = process.communicate(timeout=PATIENCE)
        wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    finally:
        process.kill()
    assert len(load_fits(folder)) == 2
    if signal_number == signal.SIGINT:
        assert process.returncode == 130
        assert "results are kept" in messages
        assert "Traceback" not in messages


# -- plots -------------------------------------------------------------------------------------


def is_complete_image(path: Path) -> bool:
    if path.suffix.lower() == ".svg":
        return ET.parse(path).getroot().tag.endswith("svg")
    from PIL import Image

    with Image.open(path) as image:
        picture = np.asarray(image)
    content = path.read_bytes()
    starts, ends = content.startswith(b"\x89PNG\r\n\x1a\n"), content.endswith(b"IEND\xaeB`\x82")
    return starts and ends and len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 2


def test_plots_are_complete_files(capsys, folder):
    plots = ("--plot", "pictures/dim.png", "--plot-steps", "steps.SVG")
    _, messages = run_sweep(capsys, folder, *DIMS, *plots)
    assert messages.count("picture -> ") == 2
    assert is_complete_image(Path("pictures/dim.png"))
    assert is_complete_image(Path("steps.SVG"))
    assert {path.name for path in Path("pictures").iterdir()} == {"dim.png", "dim-data.csv"}


@pytest.fixture
def recorded_plots(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """The plots that would be drawn."""
    plots: list[SimpleNamespace] = []

    def plot_curve(series, path, xlabel, ylabel, log_x=False, band=""):
        lines = {
            name: [list(map(float, column)) for column in zip(*sorted(set(points)), strict=True)]
            for name, points in series.items()
        }
        picture = {"path": path, "x": xlabel, "y": ylabel, "log": log_x, "band": band}
        plots.append(SimpleNamespace(lines=lines, **picture))

    monkeypatch.setattr(figures, "plot_curve", plot_curve)
    return plots


def make_row(settings, spearman, interval=(nan, nan), name="mlp@p", dim=32, fits=()):
    return Result(
        name=name,
        head="mlp",
        prompts=("p",),
        subtract=True,
        split="dev",
        counts=RowCounts(n=12),
        metrics={"spearman": Estimate(nan if spearman is None else spearman, *interval)},
        dim=dim,
        fits=tuple(fits),
        about={"settings": settings},
        seeds=(0, 1, 2),
    )


def test_plot_shows_scores_with_intervals_by_setting(recorded_plots):
    rows = [
        make_row({"rank": 16, "bias": True}, 0.5, (0.4, 0.6)),
        make_row({"rank": 4, "bias": True}, 0.4, (0.3, 0.45)),
        make_row({"rank": 4, "bias": False}, 0.2),
        make_row({"rank": 16, "bias": False}, None),
        make_row({"rank": 4, "bias": True}, 0.1, (0.1, 0.1), name="linear@p+c"),
    ]
    figures.plot_settings(rows, Path("x.png"))
    (picture,) = recorded_plots
    assert (picture.x, picture.y, picture.log) == ("rank", "Spearman x 100", False)
    assert (
        picture.band == "line: mean over seeds; band: 95 % confidence interval over rows and seeds;"
        " no band: two seeds or few rows give no interval"
    )
    lines = {
        "mlp@p bias=True": [[4, 16], [40, 50], [30, 40], [45, 60]],
        "mlp@p bias=False": [[4], [20], [nan], [nan]],
        "linear@p+c bias=True": [[4], [10], [10], [10]],
    }
    assert picture.lines.keys() == lines.keys()
    for name, columns in lines.items():
        np.testing.assert_array_equal(picture.lines[name], columns)


@pytest.mark.parametrize(
    ("seeds", "interval", "caption"),
    [
        ((0,), (0.4, 0.6), "line: one seed; band: 95 % confidence interval over rows"),
        (
            (0, 1),
            (nan, nan),
            "line: mean over seeds; no band, because two seeds or few rows give no interval",
        ),
        (
            (0, 1, 2),
            (0.4, 0.6),
            "line: mean over seeds; band: 95 % confidence interval over rows and seeds",
        ),
    ],
)
def test_caption_says_what_band_is(recorded_plots, seeds, interval, caption):
    rows = [replace(make_row({"rank": rank}, 0.5, interval), seeds=seeds) for rank in (4, 8)]
    figures.plot_settings(rows, Path("x.png"))
    assert recorded_plots[0].band == caption


def test_wide_range_of_sizes_has_logarithmic_scale(recorded_plots):
    rows = [make_row({"dim": dim}, 0.5, dim=min(dim, 1_000)) for dim in (64, 512, 1_024)]
    figures.plot_settings(rows, Path("x.png"))
    # Sizes are capped at that of the embeddings.
    assert recorded_plots[0].lines["mlp@p"][0] == [64, 512, 1_000]
    assert recorded_plots[0].log
    figures.plot_settings(rows[:2], Path("x.png"))
    assert not recorded_plots[1].log
    figures.plot_settings([make_row({"margin": m}, 0.5) for m in (0, 1, 100)], Path("x.png"))
    assert not recorded_plots[2].log


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([make_row({}, 0.5), make_row({}, 0.4)], "no numeric setting was varied"),
        (
            [make_row({"bias": flag}, 0.5) for flag in (True, False)],
            "no numeric setting was varied",
        ),
        (
            [make_row({"ties": text}, 0.5) for text in ("drop", "keep")],
            "no numeric setting was varied",
        ),
        ([make_row({"dim": 4}, 0.5)], "no numeric setting was varied"),
        ([make_row({"dim": dim}, None) for dim in (4, 8)], "no score is defined"),
    ],
)
def test_impossible_plot_is_reported(capsys, recorded_plots, rows, reason):
    figures.plot_settings(rows, Path("x.png"))
    assert not recorded_plots
    assert f"x.png was not written: {reason}" in capsys.readouterr().err


def make_curve(*scores):
    return [{"epoch": i, "loss": 1.0, "dev_spearman": score} for i, score in enumerate(scores, 1)]


def test_learning_curves_end_at_shortest_seed(capsys, recorded_plots):
    curves = [make_curve(0.1, 0.2, 0.5), make_curve(0.3, 0.2), make_curve(0.2, 0.5, 0.6)]
    rows = [
        make_row(
            {"dim": 4}, 0.5, fits=[{"curve": epochs, "steps_per_epoch": 7} for epochs in curves]
        ),
        make_row({"dim": 8}, 0.5, fits=[{"curve": make_curve(None, 0.4), "steps_per_epoch": 7}]),
        make_row({"dim": 2}, 0.5, fits=[{}, {}]),
        make_row({"dim": 3}, 0.5, fits=[{"curve": make_curve(None), "steps_per_epoch": 7}]),
    ]
    figures.plot_steps(rows, Path("x.png"))
    (picture,) = recorded_plots
    assert (picture.x, picture.y, picture.log) == ("steps", "Spearman on dev x 100", False)
    assert picture.band == "line: mean over seeds; band: range over seeds"
    assert set(picture.lines) == {"mlp@p dim=4", "mlp@p dim=8"}
    steps, *scores = picture.lines["mlp@p dim=4"]
    assert steps == [7, 14]
    np.testing.assert_allclose(scores, [[20, 30], [10, 20], [30, 50]])
    assert picture.lines["mlp@p dim=8"] == [[14], [40], [40], [40]]
    figures.plot_steps(rows[2:], Path("y.png"))
    assert len(recorded_plots) == 1
    message = "y.png was not written: no head is trained in steps, or there is no dev split"
    assert message in capsys.readouterr().err


def test_plots_show_results_of_sweep(capsys, folder, recorded_plots):
    plots = ("--plot", "dim.png", "--plot-steps", "steps.png", "--set", "batch_size=16")
    rows, _ = run_sweep(capsys, folder, *DIMS, *plots)
    by_dim, by_step = recorded_plots
    scores = {row["dim"]: 100 * row["spearman"] for row in rows}
    assert by_dim.lines[f"small@{JOINT}"][:2] == [[2, 4], [scores[2], scores[4]]]
    assert by_step.lines[f"small@{JOINT} dim=4"][0] == [4, 8]
    assert {row["steps_per_epoch"] for row in rows} == {4}


def test_steps_are_plotted_on_named_split(capsys, folder, fits, recorded_plots):
    before, _ = run_sweep(capsys, folder, *DIMS, "--split", "test")
    assert all("test_spearman" not in epoch for row in before for epoch in row["curves"][0])
    plot = ("--split", "test", "--plot-steps", "steps.pdf")
    rows, messages = run_sweep(capsys, folder, *DIMS, *plot)
    # Only the learning curves are new: scoring test does not influence the fits.
    assert "4 fits, 0 of them already done" in messages
    assert [without_curves(row) for row in rows] == [without_curves(row) for row in before]
    for fit in load_fits(folder).values():
        best = fit["fit"]["curve"][fit["fit"]["best_epoch"] - 1]
        assert best["test_spearman"] == pytest.approx(fit["spearman"], abs=1e-6)
        assert best["dev_spearman"] == pytest.approx(fit["dev_score"], abs=1e-6)
    (picture,) = recorded_plots
    assert picture.y == "Spearman on test x 100"
    (row,) = (row for row in rows if row["dim"] == 4)
    means = np.mean([[e["test_spearman"] for e in curve] for curve in row["curves"]], axis=0)
    np.testing.assert_allclose(picture.lines[f"small@{JOINT} dim=4"][1], 100 * means)

    for options in (plot, ("--split", "test"), ("--plot-steps", "dev.png")):
        _, messages = run_sweep(capsys, folder, *DIMS, *options)
        assert "4 fits, 4 of them already done" in messages
    assert recorded_plots[-1].y == "Spearman on dev x 100"
    assert len(fits) == 8


def without_curves(row):
    return {key: value for key, value in row.items() if key != "curves"}


# -- duplicates and names ------------------------------------------------------------------------


def test_repeated_value_counts_once(capsys, folder, fits):
    rows, messages = run_sweep(
        capsys, folder, "--head", "small.toml", "--seeds", 2, "--vary", "dim=2,2"
    )
    assert len(fits) == 2
    assert len(rows) == 1
    assert "2 fits, 0 of them already done" in messages


def test_key_varied_twice_is_rejected(capsys, folder):
    vary = ("--vary", "dim=2", "--vary", "dim=4", "--seeds", "2", "--workers", "1")
    arguments = ("sweep", "--run", folder, "--prompt", JOINT, "--head", "small.toml", *vary)
    expected = "--vary repeats dim. Give all of its values together."
    assert run_rejected(capsys, *arguments) == expected


def test_recipes_with_equal_names_are_not_merged(capsys, folder):
    Path("other").mkdir()
    Path("other/small.toml").write_text(
        Path("small.toml").read_text().replace("hidden = 8", "hidden = 16")
    )
    heads = ("--head", "small.toml", "other/small.toml", "--seeds", 2)
    rows, _ = run_sweep(capsys, folder, *heads)
    assert [row["seeds"] for row in rows] == [[0, 1]] * 2


def test_recipes_with_equal_settings_keep_their_names(capsys, folder):
    shutil.copy("small.toml", "copy.toml")
    rows, _ = run_sweep(capsys, folder, "--head", "small.toml", "copy.toml", "--seeds", 2)
    assert {row["head"] for row in rows} == {"small", "copy"}


def test_renamed_recipe_has_new_name(capsys, folder):
    run_sweep(capsys, folder, "--head", "small.toml", "--seeds", 2)
    Path("small.toml").rename("renamed.toml")
    rows, _ = run_sweep(capsys, folder, "--head", "renamed.toml", "--seeds", 2)
    assert [(row["head"], row["name"]) for row in rows] == [("renamed", f"renamed@{JOINT}")]


class BrokenExecutor:
    """An executor whose processes were killed, as happens if memory runs out."""

    def __init__(self, *_, **__):
        pass

    def submit(self, *_):
        future = Future()
        future.set_exception(BrokenProcessPool("A process was terminated abruptly"))
        return future

    def shutdown(self, **_):
        pass


@pytest.mark.parametrize("threads", ["3", None])
def test_killed_process_reports_one_line(capsys, monkeypatch, folder, threads):
    monkeypatch.setattr(TRIALS, "ProcessPoolExecutor", BrokenExecutor)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    arguments = ["sweep", "--run", str(folder), "--prompt", JOINT, "--workers", "2"]
    assert run([*arguments, *DIMS_TEXT]) == 1
    err = capsys.readouterr().err
    assert err.count("llmcond: error: ") == 1
    assert "Completed fits are saved" in err
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_rejected_sweep_creates_no_plot_folder(capsys, folder):
    run_rejected(
        capsys, "sweep", "--run", folder, *DIMS, "--set", "dmi=2", "--plot", "pictures/x.png"
    )
    assert not Path("pictures").exists()


def test_two_plots_in_one_file_are_rejected(capsys, folder, recorded_plots):
    plots = ("--plot", "x.png", "--plot-steps", "x.png", "--workers", 1)
    expected = "--plot-steps and --plot both name x.png. Name two files."
    assert run_rejected(capsys, "sweep", "--run", folder, *DIMS, *plots) == expected


def test_zero_seeds_are_rejected(capsys, folder):
    vary = ("--vary", "dim=2,4", "--seeds", "0")
    line = run_rejected(capsys, "sweep", "--run", folder, "--head", "small.toml", *vary)
    assert line == "--seeds is 0; it must be at least 1 and at most 4,294,967,296."


def test_setting_without_values_is_rejected(folder):
    with pytest.raises(UserError):
        sweep(run=folder, head=["small.toml"], vary={"dim": []}, seeds=1, workers=1)
