"""Comparison of prompts, and of heads and runs: equal rows, paired evidence, and reuse of fits."""

import json
import re
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import read_csv, read_page_data, run_json, run_rejected

import llmcond
from llmcond.base.metrics import Estimate
from llmcond.cli import run
from llmcond.evaluation.paired import PairedDifference, holm
from llmcond.evaluation.results import Result, RowCounts
from llmcond.report.tables import summary
from llmcond.runs import trials
from llmcond.runs.open import LazyEncoder
from llmcond.workflows.compare import _parse_reference

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp")

#: The module whose fits the tests count or replace.
FITS = import_module("llmcond.runs.rated")
SENT_COND, COND_SENT, PAIR_COND = "concat-sent-cond", "concat-cond-sent", "pair-cond"
SHUFFLED, LEFT_OUT = "control-shuffled", "control-no-condition"
FLAGS = ("--dtype", "float32", "--pooling", "mean", "--normalize", "--device", "cpu")
ENCODER = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """Run in a folder with a small recipe."""
    monkeypatch.chdir(tmp_path)
    recipe = (llmcond.base.package.bundled_folder("heads") / "linear.toml").read_text()
    Path("quick.toml").write_text(recipe.replace("epochs = 200", "epochs = 2"))
    return tmp_path


@pytest.fixture
def call(capsys, run_copy, model):
    """Return a function that compares prompts and returns the captured output."""

    def compare(*options, folder=run_copy, code=0):
        fixed = ("--model", model, "--run", folder, "--heads", "quick.toml", "--workers", "1")
        arguments = ["compare-prompts", *fixed, *FLAGS, "--prompts", *options]
        assert run([str(argument) for argument in arguments]) == code
        return capsys.readouterr()

    return compare


def forbid(*_, **__):
    raise AssertionError("a finished step was repeated")


# -- prompts -----------------------------------------------------------------------------------


def test_prompts_are_compared_with_baseline_of_their_head(call, run_copy):
    prompts = (SENT_COND, COND_SENT, SHUFFLED, "--baseline", COND_SENT, "--plain")
    report = json.loads(call(*prompts, "--seeds", 2, "--json").out)
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
        # Two seeds are too few for an interval.
        assert (row["spearman_ci"] == [None, None]) == (len(row["seeds"]) == 2)
        assert (row["spearman_sd"] is None) == (row["head"] == "none")
    saved = json.loads((run_copy / "compare-prompts.json").read_text())
    assert saved["results"] == results
    assert "torch" in saved["versions"]


def test_evaluate_and_comparison_give_equal_scores(capsys, call, run_copy):
    """Scores are equal to the last digit, for zero-shot, a fitted head and a custom metric."""
    code = "def error(prediction, rating, group):\n    return abs(prediction - rating).mean()\n"
    Path("mine.py").write_text(code)
    metric = ("--metric", "mine.py:error")
    options = (SENT_COND, LEFT_OUT, "--seeds", 1, *metric, "--json")
    compared = json.loads(call(*options).out)["results"]
    for prompt in (SENT_COND, LEFT_OUT):
        llmcond.fit_head(run=run_copy, head="quick.toml", prompt=prompt)
    results = run_json(capsys, "evaluate", "--run", run_copy, *metric)["results"]
    evaluated = {row["name"]: row for row in results}
    assert {row["name"] for row in compared} == set(evaluated)
    for row in compared:
        other = evaluated[row["name"]]
        shared = set(row) & set(other)
        assert {"n", "n_tied", "dim", "task", "accuracy_ci", "error", "error_ci"} <= shared
        assert {key: row[key] for key in shared} == {key: other[key] for key in shared}
        assert row["error_ci"][0] < row["error"] < row["error_ci"][1]


def test_finished_fits_are_reused_when_prompt_is_added(call, monkeypatch):
    options = (SENT_COND, COND_SENT, "--seeds", 2, "--json")
    first = call(*options)
    with monkeypatch.context() as patch:
        patch.setattr(FITS, "fit_recipe", forbid)
        patch.setattr(LazyEncoder, "__call__", forbid)
        second = call(*options)
    assert json.loads(second.out) == json.loads(first.out)
    assert "nothing is encoded" in second.err
    assert "4 fits, 4 of them already done" in second.err
    extended = call(PAIR_COND, *options)
    assert "6 fits, 4 of them already done" in extended.err
    match = re.search(r"to encode: (\d+) of (\d+) inputs", extended.err)
    assert 0 < int(match[1]) < int(match[2])


def test_invalid_input_is_rejected_before_encoding(call, write_rows, small_rows, monkeypatch):
    monkeypatch.setattr(LazyEncoder, "__call__", forbid)
    shutil.copy(llmcond.base.package.bundled_folder("prompts") / f"{SENT_COND}.toml", "copy.toml")
    glued = ['description = "Mine."', 'source = "mine"', "[conditional]"]
    glued += ['text = "{sentence} {condition}"', "[unconditional]", 'text = "{condition}"', ""]
    Path("glued.toml").write_text("\n".join(glued))
    rows = [("red hat", "blue hat", "on", 3), ("red", "blue", "hat on", 2), *small_rows]
    data = write_rows(rows)
    for options, expected in (
        ([SENT_COND, "copy.toml"], f"the prompts {SENT_COND} and copy are the same template"),
        ([SENT_COND, "--baseline", COND_SENT], f"{COND_SENT} is not among the prompts"),
        ([SENT_COND, "--metric", "typo"], "typo"),
        (["cond"], "none of the prompts can be used with"),
        (["glued.toml"], "the prompt glued gives the same input for"),
        ([SENT_COND, "--figure-format", "svg"], "--figure-format needs --figures"),
    ):
        line = call(*options, "--data", data, folder="fresh", code=2).err.splitlines()[-1]
        assert line.startswith("llmcond: error: ")
        assert expected in line
    assert not Path("fresh").exists()


def test_rows_that_can_be_read_once_are_compared(small_rows, model, tmp_path):
    names = ("sentence1", "sentence2", "condition", "label")
    rows = (dict(zip(names, row, strict=True)) for row in small_rows)
    result = llmcond.compare_prompts(
        model=model, like="minilm", data=rows, run=tmp_path / "run", prompts=["concat-sent-cond"],
        heads=["none"],
    )  # fmt: skip
    assert result.baseline == "concat-sent-cond"


def test_page_and_figures_have_the_numbers_of_the_comparison(call):
    prompts = (SENT_COND, COND_SENT, LEFT_OUT, "cond", "--baseline", SENT_COND, "--seeds", 2)
    outputs = ("--figures", "figures", "--figure-format", "svg", "--report", "pages/page.html")
    report = json.loads(call(*prompts, *outputs, "--json").out)
    assert list(report["left_out"]) == ["cond"]
    text = Path("pages/page.html").read_text(encoding="utf-8")
    assert all(words in text for words in (LEFT_OUT, "the number of people", "no evidence"))
    # A prompt without subtraction is compared with the subtracted baseline of its head.
    results = report["results"]
    (bare,) = (row for row in results if (row["prompt"], row["head"]) == (LEFT_OUT, "quick"))
    assert (bare["subtract"], bare["against"]) == (False, f"quick@{SENT_COND}")
    names = ("scores", "differences", "predictions", "isotropy", "steps")
    files = {path.name for path in Path("figures").iterdir()}
    assert files == {f"{name}{end}" for name in names for end in (".svg", "-data.csv")}
    values = [float(row["value"]) for row in read_csv("figures/differences-data.csv")]
    compared = [row["difference"]["spearman"]["value"] for row in results if row["difference"]]
    assert values == pytest.approx([100 * value for value in compared if value is not None])


# -- summaries and tables ----------------------------------------------------------------------


def make_result(prompt, head, spearman, difference=None, control="", **others):
    differences = None
    if difference is not None:
        value, p = difference
        verdict = "no evidence" if p > 0.05 else "better" if value > 0 else "worse"
        interval = (value - 0.05, value + 0.05)
        differences = {"spearman": PairedDifference(value, *interval, 0, p, p, 0.071, verdict)}
    figures = Estimate(spearman, spearman - 0.1, spearman + 0.1)
    accuracy = Estimate(0.5, 0.45, 0.55) if control else Estimate(0.7, 0.6, 0.8)
    fields = {
        "name": f"{head}@{prompt}",
        "subtract": True,
        "counts": RowCounts(n=100, n_pairs=50),
        "metrics": {"spearman": figures, "accuracy": accuracy},
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
    make_result("shuffled", "none", 0.0, (-0.1, 0.3), control="shuffled"),
]
GOOD, *_, CONTROL = RESULTS


def test_summary_describes_comparison():
    text = summary(RESULTS, "base")
    assert text[-1] == (
        "5 prompts, zero-shot and with mlp, on 100 rated rows of 50 sentence pairs of dev."
    )
    (mlp,) = (sentence for sentence in text if sentence.startswith("With mlp"))
    assert "better than base: good by +20.0 [15.0, 25.0]; worse than base: bad" in mlp
    assert "no evidence of a difference from base for same (these rows can detect 7.1" in mlp
    assert any("The controls are at chance" in sentence for sentence in text)
    wrong = replace(CONTROL, metrics=GOOD.metrics)
    many = [make_result(f"p{i}", "mlp", 0.4, (0.0, 0.9)) for i in range(3)]
    few = [replace(row, counts=RowCounts(n=100, n_pairs=12)) for row in RESULTS]
    plain = make_result("plain", "mlp", 0.9, (0.5, 0.01), subtract=False)
    for results, expected in (
        ([*RESULTS, *many], "no evidence of a difference from base for the other 4"),
        ([*RESULTS, plain], "plain (no subtraction) by +50.0"),
        ([*RESULTS[:-1], wrong], "1 are not at chance: zero-shot on shuffled ("),
        (few, "12 sentence pairs are few"),
    ):
        assert expected in " ".join(summary(results, "base"))


# -- heads and runs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeded(fitted, tmp_path_factory):
    """The run with two further seeds of its head, and a head of other settings."""
    folder = Path(shutil.copytree(fitted, tmp_path_factory.mktemp("seeded") / "run"))
    for seed in (1, 2):
        settings = {"head": "linear", "seed": seed, "name": f"seed{seed}", "set": {"epochs": "2"}}
        llmcond.fit_head(run=folder, device="cpu", **settings)
    return folder


def test_head_and_recipe_of_all_seeds_are_compared_with_baseline(capsys, seeded):
    head, recipe, none = (
        f"{seeded}:{name}" for name in ("linear@concat-sent-cond", "linear", "none")
    )
    options = ("--baseline", none, "--report", "page.html")
    report = run_json(capsys, "compare", head, recipe, none, *options)
    assert report["baseline"] == f"{none}@concat-sent-cond"
    rows = {row["name"]: row for row in report["results"]}
    single, several = rows[head], rows[f"{recipe}, 3 seeds"]
    baseline = rows[report["baseline"]]
    assert baseline["difference"] is None
    difference = single["difference"]["spearman"]
    assert difference["value"] == pytest.approx(single["spearman"] - baseline["spearman"])
    assert difference["low"] <= difference["value"] <= difference["high"]
    assert single["heads"] == [{"run": str(seeded), "head": "linear@concat-sent-cond"}]
    heads = {row["name"]: row for row in run_json(capsys, "evaluate", "--run", seeded)["results"]}
    scored = heads["linear@concat-sent-cond"]
    assert single["spearman_ci"] == pytest.approx(scored["spearman_ci"])
    assert sorted(several["seeds"]) == [0, 1, 2]
    scores = [row["spearman"] for row in heads.values() if row["head"] == "linear"]
    assert several["spearman"] == pytest.approx(np.mean(scores))
    assert several["spearman_sd"] == pytest.approx(np.std(scores, ddof=1))
    assert several["difference"]["spearman"]["seed_error"] > 0
    names = {system["name"] for system in read_page_data(Path("page.html"))["systems"]}
    assert names == set(rows)


def test_seeds_of_a_system_may_be_in_several_runs(seeded):
    other = shutil.copytree(seeded, Path("a:b"))
    first, second = f"{seeded}:seed1,seed2", f"{seeded}:seed1,{other}:seed2"
    comparison = llmcond.compare(systems=[f"{seeded}:none", first, second])
    one, two = (result for result in comparison.results if result.difference)
    assert one.main == two.main
    heads = [[(part["run"], part["head"]) for part in r.about["heads"]] for r in (one, two)]
    seed1 = (str(seeded), "seed1")
    expected = [[seed1, (str(seeded), "seed2")], [seed1, (str(other), "seed2")]]
    assert sorted(heads) == sorted(expected)
    systems = set(comparison.to_pandas()["system"])
    assert systems == {comparison.baseline, f"{first}, 2 seeds", f"{second}, 2 seeds"}


def test_differences_on_subsets_of_rows_are_reported(capsys, small_rows, write_rows, model):
    # Half of the dev rows share a sentence, and half a condition, with train.
    new = [(f"{a} again", f"{b} again", f"{c} now", r) for a, b, c, r in small_rows[24:48]]
    write_rows(small_rows, "data/train.csv")
    data = write_rows([*small_rows[:24], *new], "data/dev.csv").parent
    prompts = [SENT_COND, COND_SENT]
    llmcond.extract(model=model, data=data, run="run", prompt=prompts, **ENCODER)
    systems = [f"run:none@{prompt}" for prompt in prompts]
    message = run_rejected(capsys, "compare", systems[0], "run:none")
    assert "so that :none is ambiguous" in message
    results = llmcond.compare(systems=systems).results
    compared, baseline = sorted(results, key=lambda result: not result.difference)
    assert {name: part.n for name, part in compared.subsets["subsets"].items()} == {
        "condition in training": 24,
        "condition not in training": 24,
        "sentence shared with training": 24,
        "no sentence shared with training": 24,
    }
    for name, part in compared.subsets["subsets"].items():
        value = part.main.value - baseline.subsets["subsets"][name].main.value
        assert part.difference.value == pytest.approx(value)
        assert baseline.subsets["subsets"][name].difference is None
    # What another run was trained on is not new, either.
    write_rows([*small_rows, *new[:12]], "other/train.csv")
    other = write_rows([*small_rows[:24], *new], "other/dev.csv").parent
    llmcond.extract(model=model, data=other, run="second", prompt=prompts, **ENCODER)
    result = llmcond.compare(systems=[systems[0], "second:none@" + COND_SENT]).results[0]
    assert 24 < result.subsets["subsets"]["sentence shared with training"].n < 48


def test_rows_of_dev_are_training_for_heads_fitted_with_dev(small_rows, write_rows, model):
    # The rows of test share sentences and conditions with those of dev only.
    new = [(f"{a} again", f"{b} again", f"{c} now", r) for a, b, c, r in small_rows[:20]]
    write_rows(small_rows, "data/train.csv")
    write_rows(new, "data/dev.csv")
    data = write_rows([*new, *small_rows[:10]], "data/test.csv").parent
    llmcond.extract(model=model, data=data, run="run", prompt=SENT_COND, **ENCODER)
    systems, names = [f"run:none@{SENT_COND}"], []
    for number, options in enumerate(({}, {"with_split": "dev"})):
        llmcond.fit_head(
            run="run", head="linear", dim=4, set={"epochs": 1}, name=f"head{number}", **options
        )
        systems.append(f"run:head{number}")
        results = llmcond.compare(systems=systems, split="test").results
        names.append({k: part.n for k, part in results[0].subsets["subsets"].items()})
    assert names == [
        {"condition in training": 10, "condition not in training": 20}
        | {"sentence shared with training": 10, "no sentence shared with training": 20},
        {},  # A subset of all rows is left out.
    ]


def test_device_is_that_of_the_command(call, monkeypatch):
    devices = []

    def choose(device):
        devices.append(device)
        return "cpu"

    monkeypatch.setattr(trials, "choose_device", choose)
    call(SENT_COND, "--keep")
    assert set(devices) == {"cpu"}


def test_other_kinds_of_models_are_compared(capsys, seeded, dialogue_run, model, data):
    report = run_json(capsys, "compare", f"{dialogue_run}:none", f"{dialogue_run}:rank")
    (row,) = (row for row in report["results"] if row["difference"])
    assert "average_rank" in row["difference"]
    assert any(name.startswith("after 2 turns") for name in row["subsets"])
    llmcond.train_cross(model=model, data=data, run="cross", epochs=1, device="cpu")
    report = run_json(capsys, "compare", "cross", f"{seeded}:linear", "--split", "dev")
    assert (report["baseline"], report["results"][0]["n"]) == ("cross", 12)
    message = run_rejected(capsys, "compare", "cross:mlp", f"{seeded}:linear", "--split", "dev")
    assert "holds a cross-encoder, which has no head 'mlp'" in message
    # The head of an encoder that was trained alone has the name of zero-shot, and a seed.
    tuned = [f"tuned-{seed}" for seed in (0, 1)]
    for seed, folder in enumerate(tuned):
        options = {"head": "none", "prompt": [SENT_COND], "epochs": 1, "device": "cpu"}
        llmcond.train_lora(model=model, data=data, run=folder, seed=seed, **options)
    report = run_json(capsys, "compare", ",".join(tuned), f"{seeded}:linear", "--split", "dev")
    assert {tuple(sorted(row["seeds"])) for row in report["results"]} == {(0, 1), (0, 1, 2)}


def test_references_are_parsed_from_the_right():
    Path("c:d").mkdir()
    for reference, parts in (
        ("runs/a", [("runs/a", None)]),
        ("runs/a:b:none@routed+c", [("runs/a:b", "none@routed+c")]),
        (r"C:\runs\a", [(r"C:\runs\a", None)]),
        (r"C:\runs\a:mlp", [(r"C:\runs\a", "mlp")]),
        ("runs/a:x,y,runs/b:z", [("runs/a", "x"), ("runs/a", "y"), ("runs/b", "z")]),
        ("runs/a,runs/b", [("runs/a", None), ("runs/b", None)]),
        ("c:d", [("c:d", None)]),  # a folder that exists
    ):
        assert _parse_reference(reference) == parts


def test_invalid_systems_are_rejected(capsys, seeded, dialogue_run, write_rows, model):
    rows = [(f"a dog {i}", "a cat", "the place", 1 + i % 5) for i in range(40)]
    data = write_rows(rows, "other.csv")
    llmcond.extract(model=model, data=data, run="other", prompt=[SENT_COND], **ENCODER)
    changed = {"epochs": "1", "dropout": "0.5"}
    folder = shutil.copytree(seeded, Path("changed"))
    llmcond.fit_head(run=folder, head="linear", set=changed, seed=3, name="new", device="cpu")
    none = f"{seeded}:none"
    for systems, message in (
        ([none, f"{dialogue_run}:none"], "have different tasks"),
        ([none, f"{seeded}:seed1,seed1"], "were not fitted with different seeds"),
        ([none, "other:none", "--split", "dev"], "have different rows in dev"),
        ([none, "changed:linear"], "differ in dropout (0.2 or 0.5), epochs (2 or 1). Name"),
    ):
        assert message in run_rejected(capsys, "compare", *systems)
