"""Sweeps: every combination once, nothing lost, and the same figures as one fit after another."""

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
from helpers.commands import ok, refused
from helpers.processes import Command
from helpers.waiting import PATIENCE, wait_until

import llmcond.config
from llmcond import compare_prompts, extract, sweep
from llmcond.cli import run
from llmcond.encoders import EncoderOptions
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.results import RowCounts, SweptResult
from llmcond.metrics import Estimate
from llmcond.report import sweeps

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp")

#: The module, which the package's function of that name hides.
MODULE, FITS = (import_module(f"llmcond.runs.{name}") for name in ("trials", "rated"))

J, S = "concat-sent-cond", "separate"
BOTH = f"{J}+{S}"
#: Of Student's distribution, the 97.5 % quantile for 2 and 3 values.


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with small recipes of two names."""
    monkeypatch.chdir(tmp_path)
    bundled = (llmcond.bundled.bundled_folder("heads") / "mlp.toml").read_text()
    lines = [
        line for line in bundled.splitlines() if line.split(" ")[0] not in ("hidden", "epochs")
    ]
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
    extract(model=model, **vars(options), run=folder, prompt=[S])
    return folder


@pytest.fixture
def own(two_prompts: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(two_prompts, tmp_path / "own"))


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, int]]:
    """Every fit of a sweep in this process, by its recipe, size and seed."""
    made: list[tuple[str, int | None, int]] = []
    fit = FITS.fit_recipe

    def counted(recipe, pairs, dev, seed, *others):
        made.append((recipe.name, recipe.dim, seed))
        return fit(recipe, pairs, dev, seed, *others)

    monkeypatch.setattr(FITS, "fit_recipe", counted)
    return made


def swept(capsys, folder, *arguments, prompt=J, workers=1):
    """Sweep with --json; return the rows, and what was told."""
    options = ["--run", str(folder), "--workers", str(workers), "--json", "--prompt", prompt]
    assert run(["sweep", *options, *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)["results"], captured.err


def kept(folder):
    """Return what is kept of each fit, by the file."""
    return {path: json.loads(path.read_text()) for path in (folder / "sweep").glob("*.json")}


DIMS = ("--head", "small.toml", "--vary", "dim=2,4", "--seeds", 2)
DIMS_TEXT = [str(part) for part in DIMS]


# -- what is fitted ----------------------------------------------------------------------------


def test_every_combination_is_fitted_once(capsys, own, fits):
    vary = ("--vary", "dim=2,4", "learning_rate=0.001,0.01", "--seeds", 2)
    heads = ("--head", "small.toml", "linear", "--set", "epochs=2", "--prompt", BOTH)
    rows, told = swept(capsys, own, *heads, *vary)
    assert "32 fits, 0 of them already done" in told
    assert len(fits) == len(kept(own)) == 32
    assert len(set(fits)) == 2 * 2 * 2
    found = {
        (row["head"], row["prompt"], row["settings"]["dim"], row["settings"]["learning_rate"])
        for row in rows
    }
    assert len(found) == len(rows) == 16
    for row in rows:
        assert row["name"] == f"{row['head']}@{row['prompt']}"
        assert row["dim"] == row["settings"]["dim"]
        assert (row["seeds"], row["split"], row["subtract"]) == ([0, 1], "test", True)
        assert [len(curve) for curve in row["curves"]] == [2, 2]
    scores = [row["spearman"] for row in rows if row["spearman"] is not None]
    assert scores == sorted(scores, reverse=True)
    assert [row["spearman"] for row in rows[: len(scores)]] == scores
    report = json.loads((own / "sweep.json").read_text())
    assert report["results"] == rows
    assert report["data"] == json.loads((own / "run.json").read_text())["data"]
    assert "torch" in report["versions"]


def test_the_same_sweep_fits_nothing_again(capsys, own, fits):
    first, _ = swept(capsys, own, *DIMS)
    assert len(fits) == 4
    before = {path: path.stat().st_mtime_ns for path in kept(own)}
    again, told = swept(capsys, own, *DIMS)
    assert "4 fits, 4 of them already done" in told
    assert len(fits) == 4
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in kept(own)} == before

    gone = sorted(before)[1]
    known = json.loads(gone.read_text())
    gone.unlink()
    again, told = swept(capsys, own, *DIMS)
    assert "4 fits, 3 of them already done" in told
    assert fits[4:] == [("small", known["dim"], known["seed"])]
    assert again == first
    assert {**json.loads(gone.read_text()), "created": 0} == {**known, "created": 0}


def test_sweeps_share_the_fits_that_they_have_in_common(capsys, own, fits):
    swept(capsys, own, *DIMS)
    swept(capsys, own, "--head", "small.toml", "--vary", "dim=4,6", "--seeds", 3)
    assert fits[4:] == [("small", 4, 2), *(("small", 6, seed) for seed in range(3))]
    # The same settings, said in another way.
    dims = ("--vary", "dim=6,4", "--set", "hidden=8", "epochs=2", "--seeds", 3)
    rows, told = swept(capsys, own, "--head", "small.toml", *dims)
    assert "6 fits, 6 of them already done" in told
    assert len(fits) == 8
    assert {row["dim"] for row in rows} == {4, 6}


def test_fits_are_told_apart_by_all_that_decides_their_results(capsys, own, fits):
    swept(capsys, own, *DIMS)
    for changes, fresh in (
        (["--split", "dev"], 4),
        (["--no-subtract"], 4),
        (["--set", "dropout=0.1"], 4),
        (["--set", "dropout=0.15"], 0),
        (["--seeds", "3"], 2),
        (["--head", "linear", "--set", "epochs=2"], 4),
        (["--prompt", S], 4),  # beside those of the other prompt
        (["--prompt", S, BOTH], 4),  # of the latter alone
    ):
        before = len(fits)
        swept(capsys, own, *DIMS, *changes, prompt=J)
        assert len(fits) - before == fresh, changes
    assert len(kept(own)) == len(fits)


def test_another_version_of_a_library_fits_again(capsys, monkeypatch, own, fits):
    swept(capsys, own, *DIMS)
    now = MODULE.provenance()
    versions = {**now["versions"], "torch": "0.0"}
    monkeypatch.setattr(MODULE, "provenance", lambda: {**now, "versions": versions})
    swept(capsys, own, *DIMS)
    assert len(fits) == 8


def test_the_prompt_that_a_head_needs_goes_unsaid(capsys, own, fits):
    options = ("--run", own, "--workers", 1, "--seeds", 1, "--set", "epochs=1", "dim=4")
    rows = ok(capsys, "sweep", "--head", "hypernet", "--vary", "rank=1,2,0", *options)["results"]
    assert {row["name"] for row in rows} == {"hypernet@separate"}
    assert {row["settings"]["rank"] for row in rows} == {0, 1, 2}
    assert len(fits) == 3


# -- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "prompt", "settings", "vary"),
    [
        ("small.toml", BOTH, (), "dim=2,4"),
        ("hypernet", S, ("epochs=2", "dim=4"), "rank=2,0"),
        ("hypernet-joint", J, ("epochs=2", "dim=6", "rank=2"), "activation=none,tanh"),
        ("pca", J, (), "dim=3,5"),
    ],
)
def test_results_are_those_of_single_fits(capsys, own, head, prompt, settings, vary):
    options = ("--set", *settings) if settings else ()
    rows, _ = swept(
        capsys, own, "--head", head, "--vary", vary, "--seeds", 2, *options, prompt=prompt
    )
    key, _, texts = vary.partition("=")
    found = list(kept(own).values())
    assert len(found) == 4
    for text in texts.split(","):
        by_seed = {}
        for seed in (0, 1):
            fit = ("fit-head", "--run", own, "--head", head, "--prompt", prompt, "--seed", seed)
            chosen = ("--name", "single", "--set", *settings, f"{key}={text}")
            fitted = ok(capsys, *fit, *chosen)
            single = ok(capsys, "evaluate", "--run", own, "--head", "single")["results"][-1]
            record = json.loads((own / "heads/single/head.json").read_text())
            (same,) = (
                result
                for result in found
                if result["seed"] == seed and str(result["recipe"]["settings"][key]) == text
            )
            # Those of a sweep are computed of all seeds.
            single |= {"name": same["name"], **{key: same[key] for key in single if "_ci" in key}}
            assert {key: same[key] for key in single} == single
            assert same["spearman_ci"] == [None, None]
            assert same["fit"] == record["fit"]
            assert same["recipe"] == record["recipe"]
            by_seed[seed] = single
        (row,) = (row for row in rows if str(row["settings"][key]) == text)
        assert row["dim"] == fitted["dim"]
        for score in ("spearman", "accuracy"):
            values = [by_seed[seed][score] for seed in row["seeds"]]
            mean = None if None in values else pytest.approx(statistics.fmean(values))
            assert row[score] == mean


def test_several_processes_give_the_same(capsys, two_prompts, own, tmp_path):
    """Also of a recipe and of a metric in files, by relative paths."""
    Path("mine.py").write_text("def size(prediction, rating, group):\n    return len(prediction)\n")
    arguments = ("--head", "small.toml", "linear", "--vary", "dim=2,4", "--seeds", 2)
    arguments = (*arguments, "--set", "epochs=2", "--metric", "mine.py:size")
    alone, _ = swept(capsys, own, *arguments, prompt=BOTH)
    other = shutil.copytree(two_prompts, tmp_path / "other")
    threads = os.environ.get("OMP_NUM_THREADS")
    together, told = swept(capsys, other, *arguments, prompt=BOTH, workers=2)
    assert os.environ.get("OMP_NUM_THREADS") == threads
    assert "8 fits, 0 of them already done" in told
    assert {path.name for path in kept(other)} == {path.name for path in kept(own)}
    for path, result in kept(own).items():
        same = json.loads((other / "sweep" / path.name).read_text())
        assert same["spearman"] == pytest.approx(result["spearman"], abs=1e-6, nan_ok=True)
        assert same["fit"]["best_epoch"] == result["fit"]["best_epoch"]
        losses = [epoch["loss"] for epoch in result["fit"]["curve"]]
        assert [epoch["loss"] for epoch in same["fit"]["curve"]] == pytest.approx(losses, rel=1e-5)
    key = ("name", "settings", "seeds", "best_epochs", "dim")
    by_name = sorted(str([row[k] for k in key]) for row in alone)
    assert sorted(str([row[k] for k in key]) for row in together) == by_name
    for row in together:
        assert (row["size"], row["size_sd"], row["size_ci"]) == (12, 0, [None, None])
    _, told = swept(capsys, other, *arguments[:-2], prompt=BOTH)
    assert "8 fits, 8 of them already done" in told


def test_figures_are_those_of_a_comparison(capsys, own):
    """Means over seeds, with intervals over sentence pairs and seeds."""
    few = ("--seeds", "3", "--workers", "1", "--json")
    assert run(["sweep", "--run", str(own), "--head", "small.toml", "--prompt", J, *few]) == 0
    (alone,) = json.loads(capsys.readouterr().out)["results"]
    manifest = json.loads((own / "run.json").read_text())["encoder"]
    options = replace(EncoderOptions.of(manifest["identity"]), device="cpu")
    compared = compare_prompts(
        model=manifest["model"],
        run=own,
        prompts=[J],
        heads=["small.toml"],
        seeds=3,
        workers=1,
        **vars(options),
    ).to_json()
    (same,) = (row for row in compared["results"] if row["head"] == "small")
    for metric in ("spearman", "pearson", "accuracy"):
        for key in (metric, f"{metric}_ci", f"{metric}_sd"):
            assert alone[key] == same[key]
    low, high = alone["spearman_ci"]
    assert low < alone["spearman"] < high


def test_a_table_says_what_its_intervals_are(capsys, own):
    arguments = ["sweep", "--run", str(own), "--workers", "1", "--prompt", J, "--no-subtract"]
    assert run([*arguments, *DIMS_TEXT]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "own, test: 12 rated rows of 6 sentence pairs." in text
    assert (
        "95 % confidence intervals over sentence pairs and, with several fits, over seeds." in text
    )
    assert "Epochs were chosen on dev." in text
    # Two seeds have a deviation, and no interval.
    (line,) = (part for part in text.split("small ")[1:] if part.startswith(f"{J} no dim=2 2 2 "))
    assert line.split()[7] == "–"


# -- what cannot be ----------------------------------------------------------------------------


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
        (["--prompt", f"{J}+{J}"], "names a prompt twice"),
        (["--prompt", J, S, "--no-subtract"], "the condition would be ignored"),
        (["--head", "hypernet", "--prompt", J], "--prompt separate"),
        (["--head", "mpl"], "Did you mean 'mlp'"),
        (["--head", "hadamard", "--vary", "dim=2,4"], "has no setting 'dim'"),
        (["--split", "tset"], "Did you mean 'test'"),
        (["--vary", "dim=2,4", "--plot", "x.JPG"], "name a .png or .svg file"),
        (["--vary", "dim=2,4", "--plot-steps", "x"], "has no suffix"),
        (["--vary", "dim=2,4", "--plot", "own"], "has no suffix"),
        (["--vary", "dim=2,4", "--plot", "small.toml/x.png"], "cannot write"),
    ],
)
def test_sweeps_that_cannot_be_are_refused_before_the_first_fit(
    capsys, own, fits, arguments, expected
):
    before = sorted(Path().rglob("*"))
    given = arguments if "--head" in arguments else [*arguments, "--head", "small.toml"]
    assert expected in refused(capsys, "sweep", "--run", own, *given)
    assert not fits
    assert sorted(Path().rglob("*")) == before


def test_a_place_that_cannot_be_written_is_told_before_the_first_fit(capsys, own, fits):
    Path("folder.png").mkdir()
    line = refused(capsys, "sweep", "--run", own, *DIMS, "--plot", "folder.png")
    assert "is a folder" in line
    assert not fits


def test_no_seeds_and_no_heads(own):
    with pytest.raises(UserError, match="Name one or more"):
        sweep(run=own, head=[], vary={"dim": ["2", "4"]})
    with pytest.raises(UserError):
        sweep(run=own, head=["small.toml"], vary={"dim": ["2", "4"]}, seeds=0)


def test_a_split_without_ratings_is_refused(capsys, own, fits):
    rows = own / "rows.parquet"
    import pyarrow.parquet as pq

    table = pq.read_table(rows)
    ratings = [
        float("nan") if split == "test" else rating
        for split, rating in zip(*(table[c].to_pylist() for c in ("split", "rating")), strict=True)
    ]
    place = table.schema.get_field_index("rating")
    pq.write_table(table.set_column(place, "rating", [ratings]), rows)
    assert "nothing to score" in refused(capsys, "sweep", "--run", own, *DIMS, "--split", "test")
    assert not fits


# -- fits that fail, and sweeps that are cut short ---------------------------------------------


def failing(monkeypatch, when, error):
    """Let fits fail; ``when`` is told their number from 0, their recipe and their seed."""
    fit, made = FITS.fit_recipe, []

    def fails(recipe, pairs, dev, seed, *others):
        made.append(seed)
        if when(len(made) - 1, recipe, seed):
            raise error
        return fit(recipe, pairs, dev, seed, *others)

    monkeypatch.setattr(FITS, "fit_recipe", fails)
    return made


def test_a_fit_that_fails_is_told_and_the_others_are_kept(capsys, monkeypatch, own):
    wrong = UserError("the loss became nan in epoch 3.")
    with monkeypatch.context() as patched:
        failing(patched, lambda number, recipe, seed: (recipe.dim, seed) == (4, 1), wrong)
        rows, told = swept(capsys, own, "--head", "small.toml", "--vary", "dim=2,4", "--seeds", 3)
    assert f"failed: small@{J} dim=4 seed=1: {wrong}" in told
    assert told.count("failed") == 1
    assert {row["dim"]: row["seeds"] for row in rows} == {2: [0, 1, 2], 4: [0, 2]}
    assert len(kept(own)) == 5
    # What failed is fitted again, nothing else.
    made = failing(monkeypatch, lambda *_: False, wrong)
    rows, told = swept(capsys, own, "--head", "small.toml", "--vary", "dim=2,4", "--seeds", 3)
    assert "6 fits, 5 of them already done" in told
    assert made == [1]
    assert {tuple(row["seeds"]) for row in rows} == {(0, 1, 2)}


def test_sizes_above_that_of_the_features_fail_by_themselves(capsys, own):
    rows, told = swept(capsys, own, "--head", "small.toml", "--vary", "dim=33,4", "--seeds", 2)
    assert told.count("the features have 32") == 2
    assert [row["dim"] for row in rows] == [4]


def test_nothing_but_failures_is_an_error(capsys, own):
    arguments = ["sweep", "--run", str(own), "--workers", "1", "--head", "small.toml", "--json"]
    assert run([*arguments, "--vary", "dim=33,34", "--seeds", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"error: every fit failed. The first failure: small@{J} dim=33 seed=0" in captured.err
    assert "Traceback" not in captured.err
    assert not kept(own)
    assert not (own / "sweep.json").exists()
    with pytest.raises(LlmcondError, match="every fit failed"):
        sweep(
            run=own, head=["small.toml"], vary={"dim": ["33", "34"]}, seeds=1, prompt=[J], workers=1
        )


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError("too much")])
def test_a_fit_that_runs_out_of_memory_is_one_that_fails(capsys, monkeypatch, own, error):
    failing(monkeypatch, lambda number, *_: number == 1, error)
    assert run(["sweep", "--run", str(own), "--workers", "1", "--prompt", J, *DIMS_TEXT]) == 0
    line = f"small@{J} dim=2 seed=1: {type(error).__name__}: {error}"
    assert f"failed: {line}" in capsys.readouterr().err
    report = json.loads((own / "sweep.json").read_text())
    assert report["failures"] == [line]
    assert [row["seeds"] for row in report["results"] if row["dim"] == 2] == [[0]]


def test_failures_beside_fits_of_before_are_no_error(capsys, own):
    swept(capsys, own, "--head", "small.toml", "--vary", "dim=2,4", "--seeds", 1)
    rows, told = swept(capsys, own, "--head", "small.toml", "--vary", "dim=2,33", "--seeds", 1)
    assert [row["dim"] for row in rows] == [2]
    assert "dim=33 seed=0" in told


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("gone"), ValueError("a bug")])
def test_what_ends_a_sweep_loses_no_fit(capsys, monkeypatch, two_prompts, own, tmp_path, error):
    whole, _ = swept(capsys, shutil.copytree(two_prompts, tmp_path / "whole"), *DIMS)
    with monkeypatch.context() as patched:
        failing(patched, lambda number, *_: number == 2, error)
        arguments = ["sweep", "--run", str(own), "--workers", "1", "--prompt", J, *DIMS_TEXT]
        if isinstance(error, ValueError):
            with pytest.raises(ValueError, match="a bug"):
                run(arguments)
        else:
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            assert run(arguments) == code
            assert "results are kept" in capsys.readouterr().err
    assert len(kept(own)) == 2
    made = failing(monkeypatch, lambda *_: False, error)
    rows, told = swept(capsys, own, *DIMS)
    assert "4 fits, 2 of them already done" in told
    assert len(made) == 2
    assert rows == whole


def test_a_killed_sweep_keeps_complete_fits_and_goes_on(capsys, own, fits):
    vary = ("--head", "small.toml", "--vary", "dim=2,4", "--seeds", "8", "--set", "epochs=20")
    arguments = ("sweep", "--run", str(own), "--prompt", J, "--workers", "1", *vary)
    process = Command(own.parent / "printed", arguments).process
    try:
        wait_until(lambda: len(list((own / "sweep").glob("*.json"))) >= 2)
    finally:
        process.kill()
        process.join()
    done = len(kept(own))
    assert 2 <= done < 16
    assert all(result["n"] == 12 for result in kept(own).values())
    rows, told = swept(capsys, own, *vary)
    assert f"16 fits, {done} of them already done" in told
    assert len(fits) == 16 - done
    assert [len(row["seeds"]) for row in rows] == [8, 8]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="it looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_ends_takes_its_processes_with_it(own, number):
    """Those that are in the midst of a long fit, too."""
    epochs = ("--vary", "epochs=1,1000000", "--set", "patience=1000000", "dim=4", "--seeds", "2")
    arguments = ("sweep", "--run", str(own), "--prompt", J, "--head", "small.toml", *epochs)
    process = subprocess.Popen(
        [sys.executable, "-m", "llmcond", *arguments, "--workers", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_until(lambda: len(kept(own)) == 2)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(listed) >= 2
        process.send_signal(number)
        _, told = process.communicate(timeout=PATIENCE)
        wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in listed))
    finally:
        process.kill()
    assert len(kept(own)) == 2
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "results are kept" in told
        assert "Traceback" not in told


# -- pictures ----------------------------------------------------------------------------------


def is_whole(path: Path) -> bool:
    if path.suffix.lower() == ".svg":
        return ET.parse(path).getroot().tag.endswith("svg")
    from matplotlib.image import imread

    picture, content = imread(path), path.read_bytes()
    starts, ends = content.startswith(b"\x89PNG\r\n\x1a\n"), content.endswith(b"IEND\xaeB`\x82")
    return starts and ends and len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 2


def test_pictures_are_whole_files(capsys, own):
    plots = ("--plot", "pictures/dim.png", "--plot-steps", "steps.SVG")
    _, told = swept(capsys, own, *DIMS, *plots)
    assert told.count("picture -> ") == 2
    assert is_whole(Path("pictures/dim.png"))
    assert is_whole(Path("steps.SVG"))
    assert [path.name for path in Path("pictures").iterdir()] == ["dim.png"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What is drawn, instead of drawing it."""
    made: list[SimpleNamespace] = []

    def plot_curve(series, path, xlabel, ylabel, log_x=False, band=""):
        lines = {
            name: [list(map(float, column)) for column in zip(*sorted(set(points)), strict=True)]
            for name, points in series.items()
        }
        picture = {"path": path, "x": xlabel, "y": ylabel, "log": log_x, "band": band}
        made.append(SimpleNamespace(lines=lines, **picture))

    monkeypatch.setattr(sweeps, "plot_curve", plot_curve)
    return made


def row(settings, spearman, interval=(nan, nan), name="mlp@p", dim=32, fits=()):
    return SweptResult(
        name=name,
        head="mlp",
        prompts=("p",),
        subtract=True,
        split="dev",
        counts=RowCounts(n=12),
        metrics={"spearman": Estimate(nan if spearman is None else spearman, *interval)},
        dim=dim,
        fits=tuple(fits),
        settings=settings,
    )


def test_scores_are_drawn_against_the_setting_with_intervals(drawn):
    rows = [
        row({"rank": 16, "bias": True}, 0.5, (0.4, 0.6)),
        row({"rank": 4, "bias": True}, 0.4, (0.3, 0.45)),
        row({"rank": 4, "bias": False}, 0.2),
        row({"rank": 16, "bias": False}, None),
        row({"rank": 4, "bias": True}, 0.1, (0.1, 0.1), name="linear@p+c"),
    ]
    sweeps.plot_settings(rows, Path("x.png"))
    (picture,) = drawn
    assert (picture.x, picture.y, picture.log) == ("rank", "Spearman x 100", False)
    assert (
        picture.band == "line: mean over seeds; band: 95 % confidence interval over rows and seeds"
    )
    assert picture.lines == {
        "mlp@p bias=True": [[4, 16], [40, 50], [30, 40], [45, 60]],
        "mlp@p bias=False": [[4], [20], [20], [20]],
        "linear@p+c bias=True": [[4], [10], [10], [10]],
    }


def test_far_apart_sizes_are_drawn_on_a_logarithmic_scale(drawn):
    rows = [row({"dim": dim}, 0.5, dim=min(dim, 1_000)) for dim in (64, 512, 1_024)]
    sweeps.plot_settings(rows, Path("x.png"))
    # No further than the embeddings' size.
    assert drawn[0].lines["mlp@p"][0] == [64, 512, 1_000]
    assert drawn[0].log
    sweeps.plot_settings(rows[:2], Path("x.png"))
    assert not drawn[1].log
    sweeps.plot_settings([row({"margin": m}, 0.5) for m in (0, 1, 100)], Path("x.png"))
    assert not drawn[2].log


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row({}, 0.5), row({}, 0.4)], "no numeric setting was varied"),
        ([row({"bias": flag}, 0.5) for flag in (True, False)], "no numeric setting was varied"),
        ([row({"ties": text}, 0.5) for text in ("drop", "keep")], "no numeric setting was varied"),
        ([row({"dim": 4}, 0.5)], "no numeric setting was varied"),
        ([row({"dim": dim}, None) for dim in (4, 8)], "no score is defined"),
    ],
)
def test_what_cannot_be_drawn_is_told(capsys, drawn, rows, why):
    sweeps.plot_settings(rows, Path("x.png"))
    assert not drawn
    assert f"x.png was not written: {why}" in capsys.readouterr().err


def curve(*scores):
    return [{"epoch": i, "loss": 1.0, "dev_spearman": score} for i, score in enumerate(scores, 1)]


def test_learning_curves_are_drawn_by_steps_as_far_as_every_seed_went(capsys, drawn):
    three = [curve(0.1, 0.2, 0.5), curve(0.3, 0.2), curve(0.2, 0.5, 0.6)]
    rows = [
        row({"dim": 4}, 0.5, fits=[{"curve": own, "steps_per_epoch": 7} for own in three]),
        row({"dim": 8}, 0.5, fits=[{"curve": curve(None, 0.4), "steps_per_epoch": 7}]),
        row({"dim": 2}, 0.5, fits=[{}, {}]),
        row({"dim": 3}, 0.5, fits=[{"curve": curve(None), "steps_per_epoch": 7}]),
    ]
    sweeps.plot_steps(rows, Path("x.png"))
    (picture,) = drawn
    assert (picture.x, picture.y, picture.log) == ("steps", "Spearman on dev x 100", False)
    assert picture.band == "line: mean over seeds; band: range over seeds"
    assert set(picture.lines) == {"mlp@p dim=4", "mlp@p dim=8"}
    steps, *scores = picture.lines["mlp@p dim=4"]
    assert steps == [7, 14]
    np.testing.assert_allclose(scores, [[20, 30], [10, 20], [30, 50]])
    assert picture.lines["mlp@p dim=8"] == [[14], [40], [40], [40]]
    sweeps.plot_steps(rows[2:], Path("y.png"))
    assert len(drawn) == 1
    message = (
        "y.png was not written: no head of the sweep is trained in steps, or there is no dev split"
    )
    assert message in capsys.readouterr().err


def test_what_a_sweep_gives_is_what_is_drawn(capsys, own, drawn):
    plots = ("--plot", "dim.png", "--plot-steps", "steps.png", "--set", "batch_size=16")
    rows, _ = swept(capsys, own, *DIMS, *plots)
    by_dim, by_step = drawn
    scores = {row["dim"]: 100 * row["spearman"] for row in rows}
    assert by_dim.lines[f"small@{J}"][:2] == [[2, 4], [scores[2], scores[4]]]
    assert by_step.lines[f"small@{J} dim=4"][0] == [4, 8]
    assert {row["steps_per_epoch"] for row in rows} == {4}


# -- what is the same, and what is not -----------------------------------------------------------


def test_a_value_named_twice_is_one(capsys, own, fits):
    rows, told = swept(capsys, own, "--head", "small.toml", "--seeds", 2, "--vary", "dim=2,2")
    assert len(fits) == 2
    assert len(rows) == 1
    assert "2 fits, 0 of them already done" in told


def test_a_key_that_is_varied_twice_is_refused_or_has_all_values(capsys, own):
    vary = ("--vary", "dim=2", "--vary", "dim=4", "--seeds", "2")
    arguments = ["sweep", "--run", str(own), "--prompt", J, "--head", "small.toml", *vary]
    if run([*arguments, "--workers", "1", "--json"]) == 0:
        found = json.loads(capsys.readouterr().out)["results"]
        assert {row["dim"] for row in found} == {2, 4}


def test_recipes_of_one_name_are_not_taken_for_seeds_of_one(capsys, own):
    Path("other").mkdir()
    Path("other/small.toml").write_text(
        Path("small.toml").read_text().replace("hidden = 8", "hidden = 16")
    )
    arguments = ["sweep", "--run", str(own), "--prompt", J, "--workers", "1", "--seeds", "2"]
    code = run([*arguments, "--head", "small.toml", "other/small.toml", "--json"])
    captured = capsys.readouterr()
    if code == 0:
        assert [row["seeds"] for row in json.loads(captured.out)["results"]] == [[0, 1]] * 2


def test_recipes_of_equal_settings_have_their_own_names(capsys, own):
    shutil.copy("small.toml", "copy.toml")
    rows, _ = swept(capsys, own, "--head", "small.toml", "copy.toml", "--seeds", 2)
    assert {row["head"] for row in rows} == {"small", "copy"}


def test_a_recipe_that_was_renamed_has_its_new_name(capsys, own):
    swept(capsys, own, "--head", "small.toml", "--seeds", 2)
    Path("small.toml").rename("renamed.toml")
    rows, _ = swept(capsys, own, "--head", "renamed.toml", "--seeds", 2)
    assert [(row["head"], row["name"]) for row in rows] == [("renamed", f"renamed@{J}")]


class Broken:
    """An executor whose processes were killed, as where memory runs out."""

    def __init__(self, *_, **__):
        pass

    def submit(self, *_):
        future = Future()
        future.set_exception(BrokenProcessPool("A process was terminated abruptly"))
        return future

    def shutdown(self, **_):
        pass


@pytest.mark.parametrize("threads", ["3", None])
def test_a_process_that_is_killed_is_one_line(capsys, monkeypatch, own, threads):
    monkeypatch.setattr(MODULE, "ProcessPoolExecutor", Broken)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    arguments = ["sweep", "--run", str(own), "--prompt", J, "--workers", "2"]
    assert run([*arguments, *DIMS_TEXT]) == 1
    err = capsys.readouterr().err
    assert err.count("llmcond: error: ") == 1
    assert "Completed fits are saved" in err
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_a_refused_sweep_leaves_no_folder_for_its_pictures(capsys, own):
    refused(capsys, "sweep", "--run", own, *DIMS, "--set", "dmi=2", "--plot", "pictures/x.png")
    assert not Path("pictures").exists()


def test_two_pictures_are_not_drawn_into_one_file(capsys, own, drawn):
    plots = ("--plot", "x.png", "--plot-steps", "x.png", "--workers", 1)
    refused(capsys, "sweep", "--run", own, *DIMS, *plots)


def test_no_seeds_are_refused_by_their_own_name(capsys, own):
    vary = ("--vary", "dim=2,4", "--seeds", "0")
    assert "-1" not in refused(capsys, "sweep", "--run", own, "--head", "small.toml", *vary)


def test_a_setting_without_values_is_refused(own):
    with pytest.raises(UserError):
        sweep(run=own, head=["small.toml"], vary={"dim": []}, seeds=1, workers=1)
