"""Comparing prompts: the same rows, seeds and heads, paired evidence, and nothing done twice."""

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
from llmcond.evaluation.results import ComparedResult, RowCounts
from llmcond.metrics import Estimate
from llmcond.report.comparisons import comparison_table, summary
from llmcond.runs import open_run
from llmcond.runs.extraction import LazyEncoder

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp")

#: By their full names: the package has functions of these names.
FITS = import_module("llmcond.runs.rated")
J, K, P = "concat-sent-cond", "concat-cond-sent", "pair-cond"
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
def call(capsys, own, model):
    """Compare prompts; return what was printed, and what was told."""

    def compared(*options, folder=own, code=0):
        fixed = ("--model", model, "--run", folder, "--heads", "quick.toml", "--workers", 1)
        arguments = ["compare-prompts", *fixed, *ENCODER, *options]
        assert run([str(argument) for argument in arguments]) == code
        return capsys.readouterr()

    return compared


def in_json(captured):
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def forbid(*_, **__):
    raise AssertionError("this was done before")


def write_template(name, text, unconditional="{condition}"):
    lines = ['description = "Mine."', 'source = "mine"', "[conditional]", f'text = "{text}"']
    Path(name).write_text("\n".join([*lines, "[unconditional]", f'text = "{unconditional}"', ""]))
    return name


# -- results -----------------------------------------------------------------------------------


def test_every_prompt_is_compared_with_the_baseline_of_its_head(call, own):
    prompts = ("--prompts", J, K, SHUFFLED, "--baseline", K, "--seeds", 2, "--plain")
    found = in_json(call(*prompts, "--json"))
    results = found["results"]
    assert found["baseline"] == K
    ways = {(r["prompt"], r["head"], r["seeds"] == [0, 1], r["name"]) for r in results}
    assert len(results) == len(ways) == 3 * 2 * 2
    assert {r["control"] for r in results if r["prompt"] == SHUFFLED} == {"shuffled"}
    base = {(r["head"], r["subtract"]): r for r in results if r["prompt"] == K}
    family = {"spearman": [], "accuracy": []}
    for row in results:
        if row["prompt"] == K:
            assert row["difference"] is None
            continue
        for measure, tested in family.items():
            own_base = base[row["head"], row["subtract"]][measure]
            difference = row["difference"][measure]
            assert difference["value"] == pytest.approx(row[measure] - own_base, abs=1e-9)
            assert difference["low"] <= difference["value"] <= difference["high"]
            tested.append((difference["p"], difference["p_holm"]))
    for pairs in family.values():
        p, corrected = np.array(pairs).T
        np.testing.assert_allclose(corrected, holm(p))
    spearman = [row["spearman"] for row in results]
    assert spearman == sorted(spearman, reverse=True)
    for row in results:
        if len(row["seeds"]) == 2:  # whose deviation says next to nothing
            assert row["spearman_ci"] == [None, None]
        else:
            assert row["spearman_ci"][0] < row["spearman"] < row["spearman_ci"][1]
        assert (row["spearman_sd"] is None) == (row["head"] == "none")
    kept = json.loads((own / "compare-prompts.json").read_text())
    assert kept["results"] == results
    assert "torch" in kept["versions"]


def test_figures_are_the_means_of_single_fits(capsys, call, own):
    rows = in_json(call("--prompts", J, "--seeds", 2, "--json"))["results"]
    (row,) = (row for row in rows if row["head"] == "quick")
    scores = []
    for seed in (0, 1):
        fit = ["fit-head", "--run", own, "--head", "quick.toml", "--seed", seed, "--name", seed]
        assert run([*map(str, fit), "--prompt", J]) == 0
        capsys.readouterr()
        assert run(["evaluate", "--run", str(own), "--head", str(seed), "--json"]) == 0
        scores.append(in_json(capsys.readouterr())["results"][-1]["spearman"])
    assert row["spearman"] == pytest.approx(np.mean(scores))
    assert row["spearman_sd"] == pytest.approx(np.std(scores, ddof=1))
    assert open_run(own).head_names() == ["0", "1"]


MINE = """
def error(prediction, rating, group):
    return abs(prediction - rating).mean()
"""


def test_evaluate_and_a_comparison_give_the_same_figures(capsys, call, own):
    """To the last digit, for zero-shot, for a head with one seed, and for a metric of one's own."""
    Path("mine.py").write_text(MINE)
    metric = ("--metric", "mine.py:error", "--json")
    compared = in_json(call("--prompts", J, LEFT_OUT, "--seeds", 1, *metric))["results"]
    fit = ["fit-head", "--run", str(own), "--head", "quick.toml", "--prompt"]
    for prompt in (J, LEFT_OUT):
        assert run([*fit, prompt]) == 0
    capsys.readouterr()
    assert run(["evaluate", "--run", str(own), *metric]) == 0
    evaluated = {row["name"]: row for row in in_json(capsys.readouterr())["results"]}
    assert {row["name"] for row in compared} == set(evaluated)
    for row in compared:
        other = evaluated[row["name"]]
        shared = set(row) & set(other)
        assert {"n", "n_tied", "dim", "task", "accuracy_ci", "error", "error_ci"} <= shared
        assert {key: row[key] for key in shared} == {key: other[key] for key in shared}
        assert row["error_ci"][0] < row["error"] < row["error_ci"][1]
        assert row["difference"] is None or "error" in row["difference"]


def test_nothing_is_done_twice_and_a_new_prompt_costs_its_own_only(call, monkeypatch):
    first = in_json(call("--prompts", J, K, "--seeds", 2, "--json"))
    with monkeypatch.context() as patch:
        patch.setattr(FITS, "fit_recipe", forbid)
        patch.setattr(LazyEncoder, "__call__", forbid)
        again = call("--prompts", J, K, "--seeds", 2, "--json")
    assert in_json(again) == first
    assert "nothing is encoded" in again.err
    assert "4 fits, 4 of them already done" in again.err
    more = call("--prompts", J, K, P, "--seeds", 2, "--json")
    assert "6 fits, 4 of them already done" in more.err
    told = re.search(r"to encode: (\d+) of (\d+) inputs", more.err)
    assert 0 < int(told[1]) < int(told[2])


def test_several_processes_give_the_same(call, tiny_run, tmp_path):
    options = ("--prompts", J, K, "--seeds", 2, "--json")
    alone = in_json(call(*options))
    other = shutil.copytree(tiny_run, tmp_path / "other")
    assert in_json(call(*options, "--workers", 2, folder=other)) == alone


def test_without_names_every_prompt_that_goes_is_compared(call):
    found = in_json(call("--heads", "none", "--json"))
    prompts = {row["prompt"] for row in found["results"]}
    assert len(prompts) >= 8
    assert {J, K, P, SHUFFLED, LEFT_OUT} <= prompts
    assert found["baseline"] == "routed"
    assert "takes none" in found["left_out"]["cond"]
    assert "separate features" in found["left_out"]["separate"]


def test_settings_of_heads_can_be_changed(call):
    found = in_json(
        call("--prompts", J, "--seeds", 1, "--set", "dim=3", "--heads", "pca", "--json")
    )
    assert {row["dim"] for row in found["results"]} == {None, 3}


def test_fits_that_fail_are_told_and_the_rest_is_compared(call, monkeypatch):
    fit = FITS.fit_recipe

    def fails(recipe, pairs, dev, seed, *others):
        if seed == 1:
            raise RuntimeError("out of memory")
        return fit(recipe, pairs, dev, seed, *others)

    monkeypatch.setattr(FITS, "fit_recipe", fails)
    found = in_json(call("--prompts", J, K, "--seeds", 2, "--json"))
    assert len(found["failures"]) == 2
    assert "seed=1: RuntimeError: out of memory" in found["failures"][0]
    assert {tuple(row["seeds"]) for row in found["results"]} == {(), (0,)}


# -- what cannot be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--prompts", J, J], "was given 2 times"),
        (["--prompts", J, "copy.toml"], f"the prompts {J} and copy are the same template"),
        (["--prompts", J, "--baseline", K], f"the baseline {K} is not among the prompts"),
        (["--prompts", J, "--seeds", "0"], "--seeds is 0"),
        (["--prompts", J, "--set", "dmi=3"], "Did you mean 'dim'"),
        (["--prompts", "cond"], "none of the prompts can be used with"),
        (["--prompts", "conc"], "Did you mean"),
        (["--prompts", "glued.toml"], "the prompt glued gives the same input for"),
        (["--prompts", J, "--report", "folder.html"], "is a folder"),
        (["--prompts", J, "--report", "page.pdf"], "name an .html or .htm file"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_encoded(
    call, write_rows, small_rows, monkeypatch, options, expected
):
    rows = [("red hat", "blue hat", "on", 3), ("red", "blue", "hat on", 2), *small_rows]
    monkeypatch.setattr(LazyEncoder, "__call__", forbid)
    shutil.copy(llmcond.bundled.bundled_folder("prompts") / f"{J}.toml", "copy.toml")
    write_template("glued.toml", "{sentence}  {condition}".replace("  ", " "))
    data = write_rows(rows)
    Path("folder.html").mkdir()
    captured = call(*options, "--data", data, folder="fresh", code=2)
    assert captured.err.splitlines()[-1].startswith("llmcond: error: ")
    assert expected in captured.err.splitlines()[-1]
    assert not Path("fresh").exists()


def test_prompts_that_the_encoder_cannot_use_are_left_out_and_the_rest_is_done(call):
    captured = call("--prompts", J, "cond", "--seeds", 1, "--json")
    assert "cond is left out: it has an instruction" in captured.err
    found = in_json(captured)
    assert list(found["left_out"]) == ["cond"]
    assert {row["prompt"] for row in found["results"]} == {J}


def test_few_pairs_are_compared_with_a_warning(call):
    captured = call("--prompts", J, K, "--seeds", 1)
    assert re.search(r"warning: \d+ sentence pairs are few", captured.err)
    assert "only large differences can be distinguished from chance" in " ".join(
        captured.out.split()
    )


# -- words and tables --------------------------------------------------------------------------


def result(prompt, head, spearman, difference=None, accuracy=(0.6, 0.8), **others):
    found = None
    if difference is not None:
        value, p = difference
        verdict = "no evidence" if p > 0.05 else "better" if value > 0 else "worse"
        found = {
            "spearman": PairedDifference(value, value - 0.05, value + 0.05, 0, p, p, 0.071, verdict)
        }
    figures = (nan,) if spearman is None else (spearman, spearman - 0.1, spearman + 0.1)
    known = {
        "name": f"{head}@{prompt}",
        "subtract": True,
        "counts": RowCounts(n=100, n_pairs=50),
        "metrics": {"spearman": Estimate(*figures), "accuracy": Estimate(0.7, *accuracy)},
    }
    return ComparedResult(
        head=head, prompts=(prompt,), split="dev", difference=found, **{**known, **others}
    )


RESULTS = [
    result("good", "mlp", 0.6, (0.2, 0.0001)),
    result("base", "mlp", 0.4),
    result("same", "mlp", 0.41, (0.01, 0.8)),
    result("bad", "mlp", 0.2, (-0.2, 0.01)),
    result("odd", "none", None, (0.0, 1.0), accuracy=(nan, nan)),
    result("shuffled", "none", 0.0, (-0.1, 0.3), control="shuffled", accuracy=(0.45, 0.55)),
]


def test_a_comparison_is_told_in_plain_words():
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
    many = [*RESULTS, *(result(f"p{i}", "mlp", 0.4, (0.0, 0.9)) for i in range(3))]
    assert "no evidence of a difference from base for the other 4" in " ".join(
        summary(many, "base")
    )
    kept = [*RESULTS, result("plain", "mlp", 0.9, (0.5, 0.01), subtract=False)]
    assert "plain (no subtraction) by +50.0" in " ".join(summary(kept, "base"))
    off = [result("shuffled", "none", 0.0, (-0.1, 0.3), control="shuffled")]
    assert "1 are not at chance: zero-shot on shuffled (" in " ".join(
        summary([*RESULTS, *off], "base")
    )
    few = [replace(row, counts=RowCounts(n=100, n_pairs=12)) for row in RESULTS]
    assert "12 sentence pairs are few" in " ".join(summary(few, "base"))


GOOD, BASE, SAME, BAD, _, CONTROL = RESULTS


@pytest.mark.parametrize(
    ("results", "said"),
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
def test_the_first_sentence_says_no_more_than_is_shown(results, said):
    assert summary(results, "base")[0] == said


def test_the_table_has_the_evidence_and_draws_intervals(capsys):
    from llmcond.report.terminal import print_table

    table = comparison_table(RESULTS, "base", "runs/[/x]")
    print_table(table)
    out = capsys.readouterr().out
    assert "runs/[/x]" in out
    lines = {line.split()[1]: line for line in out.splitlines() if "mlp" in line}
    assert "+20.0 [15.0, 25.0]" in lines["good"]
    assert "< 0.001" in lines["good"]
    assert "better" in lines["good"]
    assert "baseline" in lines["base"]
    assert "worse" in lines["bad"]
    assert "0.800" in lines["same"]
    # The same scale for all: what is better lies further to the right.
    places = [lines[name].index("●") for name in ("bad", "base", "good")]
    assert places == sorted(places)
    assert len(set(places)) == 3


@pytest.mark.parametrize("form", ["markdown", "latex"])
def test_tables_come_for_other_documents(capsys, form):
    from llmcond.report.terminal import print_table

    rows = [*RESULTS, result("50%_[bold]|x", "mlp", 0.1, (-0.1, 0.5))]
    print_table(comparison_table(rows, "base", "runs/x", bars=False), form)
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
    """The bundled sample, whose ratings turn on the condition: no other row's tells anything."""
    Path("rows").mkdir()
    lines = (sample_folder() / "test.csv").read_text().splitlines(keepends=True)
    Path("rows/dev.csv").write_text("".join(lines[:161]))
    # Nothing is fitted.
    Path("rows/train.csv").write_text("".join([lines[0], *lines[-20:]]))
    options = ("--prompts", J, SHUFFLED, LEFT_OUT, "--heads", "none", "--data", "rows", "--json")
    assert run(["compare-prompts", "--model", "minilm", "--device", "cpu", *options]) == 0
    rows = in_json(capsys.readouterr())["results"]
    controls = [row for row in rows if row["control"]]
    assert len(controls) == 3
    for row in controls:
        low, high = row["accuracy_ci"]
        assert low <= 0.5 <= high
    (left_out,) = (row for row in controls if row["prompt"] == LEFT_OUT)
    assert left_out["accuracy"] == 0.5


# -- pages -------------------------------------------------------------------------------------


def test_a_comparison_is_written_as_a_page(call, own):
    prompts = ("--prompts", J, K, SHUFFLED, LEFT_OUT, "--seeds", 2)
    captured = call(*prompts, "--report", "pages/page.html", "--json")
    assert "report -> pages/page.html" in captured.err
    text = Path("pages/page.html").read_text(encoding="utf-8")
    for words in ("control-shuffled", "the number of people", "quick", "digest"):
        assert words in text
    assert "no evidence" in text
    results = in_json(captured)["results"]
    # What nothing is subtracted from is compared with what heads are fitted on.
    (bare,) = (r for r in results if (r["prompt"], r["head"]) == (LEFT_OUT, "quick"))
    assert (bare["subtract"], bare["against"]) == (False, f"quick@{J}")
    for row in results:
        assert (row["against"] is None) == (row["difference"] is None)
    assert [path.name for path in Path("pages").iterdir()] == ["page.html"]


def test_an_evaluation_is_written_as_a_page(capsys, own, write_rows):
    options = ["--run", str(own), "--head", "quick.toml", "--name", "q", "--prompt", J]
    assert run(["fit-head", *options]) == 0
    evaluate = ["evaluate", "--run", str(own), "--json", "--report"]
    assert run([*evaluate, "page.html"]) == 0
    assert "the place" in Path("page.html").read_text(encoding="utf-8")
    bad = "<script>alert(1)</script>"
    rows = [(f"{bad} {i}", f"dogs {i}", c, 1 + i % 5) for i in range(8) for c in ("place", "mood")]
    data = str(write_rows(rows, name="other.csv"))
    assert run([*evaluate, "other.html", "--data", data]) == 0
    text = Path("other.html").read_text(encoding="utf-8")
    assert "alert(1)" in text
    assert bad not in text
    capsys.readouterr()
    assert run([*evaluate, "page.txt"]) == 2
    assert "name an .html or .htm file" in capsys.readouterr().err
