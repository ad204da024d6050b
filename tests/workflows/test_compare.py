"""Comparison of prompts: equal rows, seeds and heads, paired evidence, and reuse of fits."""

import csv
import json
import re
import shutil
from dataclasses import replace
from importlib import import_module
from math import nan
from pathlib import Path

import numpy as np
import pytest

import llmcond
from llmcond.cli import run
from llmcond.data.datasets import sample_folder
from llmcond.evaluation.paired import PairedDifference, holm
from llmcond.evaluation.results import Result, RowCounts
from llmcond.metrics import Estimate
from llmcond.report.tables import comparison_table, summary
from llmcond.runs import open_run
from llmcond.runs.extraction import LazyEncoder

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp")

#: The module whose fits the tests count or replace.
FITS = import_module("llmcond.runs.rated")
SENT_COND, COND_SENT, PAIR_COND = "concat-sent-cond", "concat-cond-sent", "pair-cond"
SHUFFLED, LEFT_OUT = "control-shuffled", "control-no-condition"
ENCODER = ("--dtype", "float32", "--pooling", "mean", "--normalize", "--device", "cpu")


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """Run in a folder with a small recipe."""
    monkeypatch.chdir(tmp_path)
    recipe = (llmcond.bundled.bundled_folder("heads") / "linear.toml").read_text()
    Path("quick.toml").write_text(recipe.replace("epochs = 200", "epochs = 2"))
    return tmp_path


@pytest.fixture(scope="module")
def model(tiny_run):
    return str(json.loads((tiny_run / "run.json").read_text())["encoder"]["model"])


@pytest.fixture
def call(capsys, run_copy, model):
    """Return a function that compares prompts and returns the captured output."""

    def compare(*options, folder=run_copy, code=0, workers=1):
        fixed = ("--model", model, "--run", folder, "--heads", "quick.toml", "--workers", workers)
        arguments = ["compare-prompts", *fixed, *ENCODER, *options]
        assert run([str(argument) for argument in arguments]) == code
        return capsys.readouterr()

    return compare


def parse_json(captured):
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def forbid(*_, **__):
    raise AssertionError("a finished step was repeated")


def write_template(name, text, unconditional="{condition}"):
    lines = ['description = "Mine."', 'source = "mine"', "[conditional]", f'text = "{text}"']
    Path(name).write_text("\n".join([*lines, "[unconditional]", f'text = "{unconditional}"', ""]))
    return name


# -- results -----------------------------------------------------------------------------------


def test_prompts_are_compared_with_baseline_of_their_head(call, run_copy):
    prompts = (
        "--prompts",
        SENT_COND,
        COND_SENT,
        SHUFFLED,
        "--baseline",
        COND_SENT,
        "--seeds",
        2,
        "--plain",
    )
    report = parse_json(call(*prompts, "--json"))
    results = report["results"]
    assert report["baseline"] == COND_SENT
    keys = {(r["prompt"], r["head"], r["seeds"] == [0, 1], r["name"]) for r in results}
    assert len(results) == len(keys) == 3 * 2 * 2
    assert {r["control"] for r in results if r["prompt"] == SHUFFLED} == {"shuffled"}
    base = {(r["head"], r["subtract"]): r for r in results if r["prompt"] == COND_SENT}
    families = {control: {"spearman": [], "accuracy": []} for control in (False, True)}
    for row in results:
        if row["prompt"] == COND_SENT:
            assert row["difference"] is None
            continue
        for measure, p_values in families[bool(row["control"])].items():
            baseline_score = base[row["head"], row["subtract"]][measure]
            difference = row["difference"][measure]
            assert difference["value"] == pytest.approx(row[measure] - baseline_score, abs=1e-9)
            assert difference["low"] <= difference["value"] <= difference["high"]
            p_values.append((difference["p"], difference["p_holm"]))
    # Controls do not cost the other prompts power.
    for family in families.values():
        for pairs in family.values():
            p, corrected = np.array(pairs).T
            np.testing.assert_allclose(corrected, holm(p))
    spearman = [row["spearman"] for row in results]
    assert spearman == sorted(spearman, reverse=True)
    for row in results:
        if len(row["seeds"]) == 2:  # two seeds are too few for an interval
            assert row["spearman_ci"] == [None, None]
        else:
            assert row["spearman_ci"][0] < row["spearman"] < row["spearman_ci"][1]
        assert (row["spearman_sd"] is None) == (row["head"] == "none")
    saved = json.loads((run_copy / "compare-prompts.json").read_text())
    assert saved["results"] == results
    assert "torch" in saved["versions"]


def test_scores_are_means_over_single_fits(capsys, call, run_copy):
    rows = parse_json(call("--prompts", SENT_COND, "--seeds", 2, "--json"))["results"]
    (row,) = (row for row in rows if row["head"] == "quick")
    scores = []
    for seed in (0, 1):
        fit = [
            "fit-head",
            "--run",
            run_copy,
            "--head",
            "quick.toml",
            "--seed",
            seed,
            "--name",
            seed,
        ]
        assert run([*map(str, fit), "--prompt", SENT_COND]) == 0
        capsys.readouterr()
        assert run(["evaluate", "--run", str(run_copy), "--head", str(seed), "--json"]) == 0
        scores.append(parse_json(capsys.readouterr())["results"][-1]["spearman"])
    assert row["spearman"] == pytest.approx(np.mean(scores))
    assert row["spearman_sd"] == pytest.approx(np.std(scores, ddof=1))
    assert open_run(run_copy).head_names() == ["0", "1"]


METRIC_CODE = """
def error(prediction, rating, group):
    return abs(prediction - rating).mean()
"""


def test_evaluate_and_comparison_give_equal_scores(capsys, call, run_copy):
    """Scores are equal to the last digit, for zero-shot, a fitted head and a custom metric."""
    Path("mine.py").write_text(METRIC_CODE)
    metric = ("--metric", "mine.py:error", "--json")
    compared = parse_json(call("--prompts", SENT_COND, LEFT_OUT, "--seeds", 1, *metric))["results"]
    fit = ["fit-head", "--run", str(run_copy), "--head", "quick.toml", "--prompt"]
    for prompt in (SENT_COND, LEFT_OUT):
        assert run([*fit, prompt]) == 0
    capsys.readouterr()
    assert run(["evaluate", "--run", str(run_copy), *metric]) == 0
    evaluated = {row["name"]: row for row in parse_json(capsys.readouterr())["results"]}
    assert {row["name"] for row in compared} == set(evaluated)
    for row in compared:
        evaluated_row = evaluated[row["name"]]
        shared = set(row) & set(evaluated_row)
        assert {"n", "n_tied", "dim", "task", "accuracy_ci", "error", "error_ci"} <= shared
        assert {key: row[key] for key in shared} == {key: evaluated_row[key] for key in shared}
        assert row["error_ci"][0] < row["error"] < row["error_ci"][1]
        assert row["difference"] is None or "error" in row["difference"]


def test_finished_fits_are_reused_when_prompt_is_added(call, monkeypatch):
    first = parse_json(call("--prompts", SENT_COND, COND_SENT, "--seeds", 2, "--json"))
    with monkeypatch.context() as patch:
        patch.setattr(FITS, "fit_recipe", forbid)
        patch.setattr(LazyEncoder, "__call__", forbid)
        second = call("--prompts", SENT_COND, COND_SENT, "--seeds", 2, "--json")
    assert parse_json(second) == first
    assert "nothing is encoded" in second.err
    assert "4 fits, 4 of them already done" in second.err
    extended = call("--prompts", SENT_COND, COND_SENT, PAIR_COND, "--seeds", 2, "--json")
    assert "6 fits, 4 of them already done" in extended.err
    match = re.search(r"to encode: (\d+) of (\d+) inputs", extended.err)
    assert 0 < int(match[1]) < int(match[2])


def test_several_processes_give_equal_results(call, tiny_run, tmp_path):
    options = ("--prompts", SENT_COND, COND_SENT, "--seeds", 2, "--json")
    expected = parse_json(call(*options))
    other_run = shutil.copytree(tiny_run, tmp_path / "other")
    assert parse_json(call(*options, workers=2, folder=other_run)) == expected


def test_all_usable_prompts_are_compared_by_default(call):
    report = parse_json(call("--heads", "none", "--json"))
    prompts = {row["prompt"] for row in report["results"]}
    assert len(prompts) >= 8
    assert {SENT_COND, COND_SENT, PAIR_COND, SHUFFLED, LEFT_OUT} <= prompts
    assert report["baseline"] == "routed"
    assert "takes none" in report["left_out"]["cond"]
    assert "separate features" in report["left_out"]["separate"]


def test_head_settings_can_be_changed(call):
    report = parse_json(
        call("--prompts", SENT_COND, "--seeds", 1, "--set", "dim=3", "--heads", "pca", "--json")
    )
    assert {row["dim"] for row in report["results"]} == {None, 3}


def test_failed_fits_are_reported_and_others_compared(call, monkeypatch):
    fit = FITS.fit_recipe

    def fail_second_seed(recipe, pairs, dev, seed, *others):
        if seed == 1:
            raise RuntimeError("out of memory")
        return fit(recipe, pairs, dev, seed, *others)

    monkeypatch.setattr(FITS, "fit_recipe", fail_second_seed)
    report = parse_json(call("--prompts", SENT_COND, COND_SENT, "--seeds", 2, "--json"))
    assert len(report["failures"]) == 2
    assert "seed=1: RuntimeError: out of memory" in report["failures"][0]
    assert {tuple(row["seeds"]) for row in report["results"]} == {(), (0,)}


# -- invalid input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--prompts", SENT_COND, SENT_COND], "was given 2 times"),
        (
            ["--prompts", SENT_COND, "copy.toml"],
            f"the prompts {SENT_COND} and copy are the same template",
        ),
        (
            ["--prompts", SENT_COND, "--baseline", COND_SENT],
            f"the baseline {COND_SENT} is not among the prompts",
        ),
        (["--prompts", SENT_COND, "--seeds", "0"], "--seeds is 0"),
        (["--prompts", SENT_COND, "--set", "dmi=3"], "Did you mean 'dim'"),
        (["--prompts", "cond"], "none of the prompts can be used with"),
        (["--prompts", "conc"], "Did you mean"),
        (["--prompts", "glued.toml"], "the prompt glued gives the same input for"),
        (["--prompts", SENT_COND, "--report", "folder.html"], "is a folder"),
        (["--prompts", SENT_COND, "--report", "page.pdf"], "name an .html or .htm file"),
    ],
)
def test_invalid_input_is_rejected_before_encoding(
    call, write_rows, small_rows, monkeypatch, options, expected
):
    rows = [("red hat", "blue hat", "on", 3), ("red", "blue", "hat on", 2), *small_rows]
    monkeypatch.setattr(LazyEncoder, "__call__", forbid)
    shutil.copy(llmcond.bundled.bundled_folder("prompts") / f"{SENT_COND}.toml", "copy.toml")
    write_template("glued.toml", "{sentence}  {condition}".replace("  ", " "))
    data = write_rows(rows)
    Path("folder.html").mkdir()
    captured = call(*options, "--data", data, folder="fresh", code=2)
    assert captured.err.splitlines()[-1].startswith("llmcond: error: ")
    assert expected in captured.err.splitlines()[-1]
    assert not Path("fresh").exists()


def test_unusable_prompts_are_left_out(call):
    captured = call("--prompts", SENT_COND, "cond", "--seeds", 1, "--json")
    assert "cond is left out: it has an instruction" in captured.err
    report = parse_json(captured)
    assert list(report["left_out"]) == ["cond"]
    assert {row["prompt"] for row in report["results"]} == {SENT_COND}


def test_few_pairs_cause_warning(call):
    captured = call("--prompts", SENT_COND, COND_SENT, "--seeds", 1)
    assert re.search(r"warning: \d+ sentence pairs are few", captured.err)
    assert "only large differences can be distinguished from chance" in " ".join(
        captured.out.split()
    )


# -- summaries and tables ----------------------------------------------------------------------


def make_result(prompt, head, spearman, difference=None, accuracy=(0.6, 0.8), control="", **others):
    differences = None
    if difference is not None:
        value, p = difference
        verdict = "no evidence" if p > 0.05 else "better" if value > 0 else "worse"
        differences = {
            "spearman": PairedDifference(value, value - 0.05, value + 0.05, 0, p, p, 0.071, verdict)
        }
    figures = (nan,) if spearman is None else (spearman, spearman - 0.1, spearman + 0.1)
    fields = {
        "name": f"{head}@{prompt}",
        "subtract": True,
        "counts": RowCounts(n=100, n_pairs=50),
        "metrics": {"spearman": Estimate(*figures), "accuracy": Estimate(0.7, *accuracy)},
    }
    return Result(
        head=head,
        prompts=(prompt,),
        split="dev",
        difference=differences,
        about={"control": control},
        **{**fields, **others},
    )


RESULTS = [
    make_result("good", "mlp", 0.6, (0.2, 0.0001)),
    make_result("base", "mlp", 0.4),
    make_result("same", "mlp", 0.41, (0.01, 0.8)),
    make_result("bad", "mlp", 0.2, (-0.2, 0.01)),
    make_result("odd", "none", None, (0.0, 1.0), accuracy=(nan, nan)),
    make_result("shuffled", "none", 0.0, (-0.1, 0.3), control="shuffled", accuracy=(0.45, 0.55)),
]


def test_summary_describes_comparison():
    text = summary(RESULTS, "base")
    assert text[-1] == (
        "6 prompts, zero-shot and with mlp, on 100 rated rows of 50 sentence pairs of dev."
    )
    mlp = next(sentence for sentence in text if sentence.startswith("With mlp"))
    assert "better than base: good by +20.0 [15.0, 25.0]; worse than base: bad" in mlp
    assert (
        "no evidence of a difference from base for same (these rows can detect 7.1 or more)" in mlp
    )
    assert any("The controls are at chance" in sentence for sentence in text)
    many = [*RESULTS, *(make_result(f"p{i}", "mlp", 0.4, (0.0, 0.9)) for i in range(3))]
    assert "no evidence of a difference from base for the other 4" in " ".join(
        summary(many, "base")
    )
    with_unsubtracted = [*RESULTS, make_result("plain", "mlp", 0.9, (0.5, 0.01), subtract=False)]
    assert "plain (no subtraction) by +50.0" in " ".join(summary(with_unsubtracted, "base"))
    off_chance = [make_result("shuffled", "none", 0.0, (-0.1, 0.3), control="shuffled")]
    assert "1 are not at chance: zero-shot on shuffled (" in " ".join(
        summary([*RESULTS, *off_chance], "base")
    )
    few = [replace(row, counts=RowCounts(n=100, n_pairs=12)) for row in RESULTS]
    assert "12 sentence pairs are few" in " ".join(summary(few, "base"))


GOOD, BASE, SAME, BAD, _, CONTROL = RESULTS


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (
            [SAME, BASE, BAD],
            "No prompt is shown to be better than base. Highest: mlp on same, Spearman 41.0 "
            "[31.0, 51.0].",
        ),
        (
            [replace(CONTROL, difference=GOOD.difference), BASE, BAD],
            "No prompt is shown to be better than base. Highest: mlp on base, Spearman 40.0 "
            "[30.0, 50.0].",
        ),
        (
            RESULTS,
            "Highest: mlp on good, Spearman 60.0 [50.0, 70.0], better than base by +20.0 "
            "[15.0, 25.0].",
        ),
        (
            [SAME, BASE, replace(GOOD, head="linear")],
            "Highest: mlp on same, Spearman 41.0 [31.0, 51.0], not shown to be better than base.",
        ),
        (
            [BASE, SAME, replace(GOOD, head="linear")],
            "Highest: mlp on base, Spearman 40.0 [30.0, 50.0], the baseline.",
        ),
        ([BASE], "Highest: mlp on base, Spearman 40.0 [30.0, 50.0]."),
    ],
)
def test_first_sentence_claims_no_more_than_evidence(results, expected):
    assert summary(results, "base")[0] == expected


def test_table_shows_evidence_and_intervals(capsys):
    table = comparison_table(RESULTS, "base", "runs/[/x]")
    table.print()
    out = capsys.readouterr().out
    assert "runs/[/x]" in out
    lines = {line.split()[1]: line for line in out.splitlines() if "mlp" in line}
    assert "+20.0 [15.0, 25.0]" in lines["good"]
    assert "< 0.001" in lines["good"]
    assert "better" in lines["good"]
    assert "baseline" in lines["base"]
    assert "worse" in lines["bad"]
    assert "0.800" in lines["same"]
    # All rows share one scale, so better prompts lie further right.
    positions = [lines[name].index("●") for name in ("bad", "base", "good")]
    assert positions == sorted(positions)
    assert len(set(positions)) == 3


@pytest.mark.parametrize("form", ["markdown", "latex"])
def test_table_is_rendered_for_documents(capsys, form):
    rows = [*RESULTS, make_result("50%_[bold]|x", "mlp", 0.1, (-0.1, 0.5))]
    comparison_table(rows, "base", "runs/x", bars=False).print(form)
    out = capsys.readouterr().out
    assert "●" not in out
    if form == "markdown":
        table = [line for line in out.splitlines() if line.startswith("|")]
        assert len(table) == len(rows) + 2
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
        assert r"50%_[bold]\|x" in out
    else:
        assert r"50\%\_[bold]" in out
        assert out.count(r"\\") == len(rows) + 1
        assert r"\toprule" in out
        assert out.startswith("% ")


# -- controls ----------------------------------------------------------------------------------


def test_controls_are_at_chance_on_real_texts(capsys):
    """Ratings of the bundled sample depend on the condition, so other conditions do not help."""
    Path("rows").mkdir()
    lines = (sample_folder() / "test.csv").read_text().splitlines(keepends=True)
    Path("rows/dev.csv").write_text("".join(lines[:161]))
    # The training split may be tiny, because nothing is fitted.
    Path("rows/train.csv").write_text("".join([lines[0], *lines[-20:]]))
    options = (
        "--prompts",
        SENT_COND,
        SHUFFLED,
        LEFT_OUT,
        "--heads",
        "none",
        "--data",
        "rows",
        "--json",
    )
    assert run(["compare-prompts", "--model", "minilm", "--device", "cpu", *options]) == 0
    rows = parse_json(capsys.readouterr())["results"]
    controls = [row for row in rows if row["control"]]
    assert len(controls) == 3
    for row in controls:
        low, high = row["accuracy_ci"]
        assert low <= 0.5 <= high
    (left_out,) = (row for row in controls if row["prompt"] == LEFT_OUT)
    assert left_out["accuracy"] == 0.5


# -- pages -------------------------------------------------------------------------------------


def test_comparison_is_written_as_page(call, run_copy):
    prompts = ("--prompts", SENT_COND, COND_SENT, SHUFFLED, LEFT_OUT, "--seeds", 2)
    captured = call(*prompts, "--report", "pages/page.html", "--json")
    assert "report -> pages/page.html" in captured.err
    text = Path("pages/page.html").read_text(encoding="utf-8")
    for words in ("control-shuffled", "the number of people", "quick", "digest"):
        assert words in text
    assert "no evidence" in text
    results = parse_json(captured)["results"]
    # A prompt without subtraction is compared with the subtracted baseline of its head.
    (bare,) = (r for r in results if (r["prompt"], r["head"]) == (LEFT_OUT, "quick"))
    assert (bare["subtract"], bare["against"]) == (False, f"quick@{SENT_COND}")
    for row in results:
        assert (row["against"] is None) == (row["difference"] is None)
    assert [path.name for path in Path("pages").iterdir()] == ["page.html"]


def test_evaluation_is_written_as_page(capsys, run_copy, write_rows):
    options = ["--run", str(run_copy), "--head", "quick.toml", "--name", "q", "--prompt", SENT_COND]
    assert run(["fit-head", *options]) == 0
    evaluate = ["evaluate", "--run", str(run_copy), "--json", "--report"]
    assert run([*evaluate, "page.html"]) == 0
    assert "the place" in Path("page.html").read_text(encoding="utf-8")
    markup = "<script>alert(1)</script>"
    rows = [
        (f"{markup} {i}", f"dogs {i}", c, 1 + i % 5) for i in range(8) for c in ("place", "mood")
    ]
    data = str(write_rows(rows, name="other.csv"))
    assert run([*evaluate, "other.html", "--data", data]) == 0
    text = Path("other.html").read_text(encoding="utf-8")
    assert "alert(1)" in text
    assert markup not in text
    capsys.readouterr()
    assert run([*evaluate, "page.txt"]) == 2
    assert "name an .html or .htm file" in capsys.readouterr().err


# -- figures -----------------------------------------------------------------------------------


def read_csv(path):
    with Path(path).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_figures_have_the_numbers_of_the_comparison(call):
    prompts = ("--prompts", SENT_COND, COND_SENT, "--baseline", SENT_COND, "--seeds", 2)
    figures = ("--figures", "figures", "--figure-format", "svg")
    results = parse_json(call(*prompts, *figures, "--json"))["results"]
    names = ("scores", "differences", "predictions", "isotropy", "steps")
    files = {path.name for path in Path("figures").iterdir()}
    assert files == {f"{name}{end}" for name in names for end in (".svg", "-data.csv")}

    scores = {(row["label"], row["series"]): row for row in read_csv("figures/scores-data.csv")}
    defined = [result for result in results if result["spearman"] is not None]
    assert len(scores) == len(defined)
    for result in defined:
        minus = "minus c" if result["subtract"] else "no subtraction"
        baseline = ", baseline" if result["prompt"] == SENT_COND else ""
        row = scores[f"{result['prompt']}, {minus}{baseline}", result["head"]]
        assert float(row["value"]) == pytest.approx(100 * result["spearman"])
        # Two seeds give no interval, in the table as in the figure.
        low = result["spearman_ci"][0]
        assert (low is None) == (result["seeds"] == [0, 1])
        expected = nan if low is None else 100 * low
        assert float(row["low"]) == pytest.approx(expected, nan_ok=True)

    svg = Path("figures/scores.svg").read_text(encoding="utf-8")
    assert "two seeds or few rows" in svg
    differences = read_csv("figures/differences-data.csv")
    compared = [r["difference"]["spearman"]["value"] for r in results if r["difference"]]
    assert [float(row["value"]) for row in differences] == pytest.approx(
        [100 * value for value in compared if value is not None]
    )
    assert {row["label"].partition(",")[0] for row in differences} == {COND_SENT}
    assert len({row["system"] for row in read_csv("figures/predictions-data.csv")}) == 2
    assert {row["series"] for row in read_csv("figures/isotropy-data.csv")} == {"minus c", "with c"}
    assert {row["series"] for row in read_csv("figures/steps-data.csv")} == {
        f"quick@{SENT_COND}",
        f"quick@{COND_SENT}",
    }


def test_folder_of_figures_is_checked_before_work(call, monkeypatch):
    monkeypatch.setattr(LazyEncoder, "__call__", forbid)
    Path("taken").write_text("")
    message = call("--prompts", SENT_COND, COND_SENT, "--figures", "taken", code=2).err
    assert "taken" in message.splitlines()[-1]
