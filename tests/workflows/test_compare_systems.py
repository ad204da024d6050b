"""Comparison of heads and runs: paired differences, seeds, references, and invalid input."""

import json
import shutil

import numpy as np
import pytest
from helpers.commands import read_page_data, run_json, run_rejected

import llmcond
from llmcond.cli import run
from llmcond.runs import open_run
from llmcond.workflows.compare import _parse_reference

pytestmark = pytest.mark.usefixtures("one_thread")

ENCODER = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}


@pytest.fixture(scope="module")
def seeded(fitted, tmp_path_factory):
    """The run with two further seeds of its head, and a head of other settings."""
    folder = tmp_path_factory.mktemp("seeded") / "run"
    shutil.copytree(fitted, folder)
    fit = {"run": folder, "head": "linear", "device": "cpu"}
    for seed in (1, 2):
        llmcond.fit_head(**fit, seed=seed, name=f"seed{seed}", set={"epochs": "2"})
    return folder


def test_heads_are_compared_with_baseline(capsys, seeded):
    system, baseline = f"{seeded}:linear@concat-sent-cond", f"{seeded}:none"
    report = run_json(capsys, "compare", system, baseline, "--baseline", baseline)
    assert report["baseline"] == f"{seeded}:none@concat-sent-cond"
    rows = {row["head"]: row for row in report["results"]}
    assert rows["none"]["difference"] is None
    difference = rows["linear"]["difference"]["spearman"]
    value = rows["linear"]["spearman"] - rows["none"]["spearman"]
    assert difference["value"] == pytest.approx(value)
    assert difference["low"] <= value <= difference["high"]
    assert rows["linear"]["heads"] == [{"run": str(seeded), "head": "linear@concat-sent-cond"}]
    evaluated = run_json(capsys, "evaluate", "--run", seeded, "--head", "linear@concat-sent-cond")
    (scored,) = (row for row in evaluated["results"] if row["head"] == "linear")
    assert rows["linear"]["spearman_ci"] == pytest.approx(scored["spearman_ci"])
    assert "torch" in report["versions"]


def test_recipe_stands_for_heads_of_all_seeds(capsys, seeded):
    report = run_json(capsys, "compare", f"{seeded}:none", f"{seeded}:linear")
    (row,) = (row for row in report["results"] if row["difference"])
    assert row["name"] == f"{seeded}:linear, 3 seeds"
    assert sorted(row["seeds"]) == [0, 1, 2]
    heads = run_json(capsys, "evaluate", "--run", seeded)["results"]
    scores = [head["spearman"] for head in heads if head["head"] == "linear"]
    assert row["spearman"] == pytest.approx(np.mean(scores))
    assert row["spearman_sd"] == pytest.approx(np.std(scores, ddof=1))
    assert row["difference"]["spearman"]["seed_error"] > 0


def test_seeds_of_a_system_may_be_named_one_by_one_and_in_several_runs(seeded, tmp_path):
    other = shutil.copytree(seeded, tmp_path / "a:b")
    first, second = f"{seeded}:seed1,seed2", f"{seeded}:seed1,{other}:seed2"
    comparison = llmcond.compare(systems=[f"{seeded}:none", first, second])
    one, two = (r for r in comparison.results if r.difference)
    assert one.main == two.main
    heads = [[(part["run"], part["head"]) for part in r.about["heads"]] for r in (one, two)]
    assert sorted(heads) == sorted(
        [
            [(str(seeded), "seed1"), (str(seeded), "seed2")],
            [(str(seeded), "seed1"), (str(other), "seed2")],
        ]
    )
    table = comparison.to_pandas()
    assert set(table["metric"]) == {"spearman", "accuracy"}
    assert len(table) == 6
    assert set(zip(table["system"], table["seeds"], strict=True)) == {
        (comparison.baseline, 0),
        (f"{first}, 2 seeds", 2),
        (f"{second}, 2 seeds", 2),
    }
    assert table.loc[table["system"] == comparison.baseline, "difference_value"].isna().all()
    row = table[(table["system"] == one.name) & (table["metric"] == "spearman")].iloc[0]
    assert row["value"] == one.main.value
    assert {"low", "high", "difference_p_holm"} <= set(table)
    assert set(table["baseline"]) == {f"{seeded}:none@concat-sent-cond"}


def test_reference_without_head_means_default_head(seeded, tiny_run):
    default, _ = open_run(seeded).default_head()
    comparison = llmcond.compare(systems=[str(tiny_run), str(seeded)])
    names = {f"{seeded}:{default}", f"{tiny_run}:none@concat-sent-cond"}
    assert {result.name for result in comparison.results} == names


def test_same_rows_in_another_order_are_matched(seeded, tmp_path, data):
    lines = data.read_text().splitlines()
    order = np.random.default_rng(0).permutation(len(lines) - 1)
    shuffled = tmp_path / "shuffled.csv"
    shuffled.write_text("\n".join([lines[0], *(lines[1 + i] for i in order), ""]))
    model = json.loads((seeded / "run.json").read_text())["encoder"]["model"]
    llmcond.extract(
        model=model, data=shuffled, run=tmp_path / "run", prompt=["concat-sent-cond"], **ENCODER
    )
    systems = [f"{seeded}:none", f"{tmp_path / 'run'}:none"]
    _, other = llmcond.compare(systems=systems, split="train").results
    for difference in other.difference.values():
        assert difference.value == pytest.approx(0, abs=1e-6)


def test_differences_on_subsets_of_rows_are_reported(
    capsys, small_rows, write_rows, model, tmp_path
):
    # Half of the dev rows share a sentence, and half a condition, with train.
    shared = [(row[0], *row[1:]) for row in small_rows[:24]]
    new = [(f"{a} again", f"{b} again", f"{c} now", r) for a, b, c, r in small_rows[24:48]]
    write_rows(small_rows, "data/train.csv")
    data = write_rows([*shared, *new], "data/dev.csv").parent
    prompts = ["concat-sent-cond", "concat-cond-sent"]
    llmcond.extract(model=model, data=data, run=tmp_path / "run", prompt=prompts, **ENCODER)
    systems = [f"{tmp_path / 'run'}:none@{prompt}" for prompt in prompts]
    message = run_rejected(capsys, "compare", systems[0], f"{tmp_path / 'run'}:none")
    assert "so that :none is ambiguous" in message
    assert systems[1] in message
    results = llmcond.compare(systems=systems).results
    (compared,) = (result for result in results if result.difference)
    assert {name: part.n for name, part in compared.subsets["subsets"].items()} == {
        "condition in training": 24,
        "condition not in training": 24,
        "sentence shared with training": 24,
        "no sentence shared with training": 24,
    }
    (baseline,) = (result for result in results if result is not compared)
    for name, part in compared.subsets["subsets"].items():
        value = part.main.value - baseline.subsets["subsets"][name].main.value
        assert part.difference.value == pytest.approx(value)
        assert baseline.subsets["subsets"][name].difference is None


def test_report_shows_differences(capsys, seeded, tmp_path):
    page = tmp_path / "page.html"
    run_json(capsys, "compare", f"{seeded}:none", f"{seeded}:linear", "--report", page)
    data = read_page_data(page)
    datasets = data["charts"]["differences"]["datasets"].values()
    (row,) = (row for rows in datasets for row in rows if "label" in row)
    assert row["label"].startswith("linear, 3 seeds\nrun")
    assert {system["name"] for system in data["systems"]} == {
        f"{seeded}:none@concat-sent-cond",
        f"{seeded}:linear, 3 seeds",
    }
    assert "Differences in Spearman from the baseline" in page.read_text()


def test_table_and_summary_name_the_verdict(capsys, seeded):
    assert run(["compare", f"{seeded}:none", f"{seeded}:seed1", "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert "| verdict" in out
    assert "baseline" in out
    assert run(["compare", f"{seeded}:none", f"{seeded}:seed1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "one fit, so that the result holds for this seed only" in out


def test_dialogues_are_compared(capsys, dialogue_run):
    report = run_json(capsys, "compare", f"{dialogue_run}:none", f"{dialogue_run}:rank")
    (row,) = (row for row in report["results"] if row["difference"])
    assert "average_rank" in row["difference"]
    assert any(name.startswith("after 2 turns") for name in row["subsets"])


def test_cross_encoder_is_compared_with_embeddings(capsys, seeded, model, data, tmp_path):
    cross = tmp_path / "cross"
    llmcond.train_cross(model=model, data=data, run=cross, epochs=1, device="cpu")
    report = run_json(capsys, "compare", cross, f"{seeded}:linear", "--split", "dev")
    assert report["baseline"] == str(cross)
    assert {row["n"] for row in report["results"]} == {report["results"][0]["n"]}
    message = run_rejected(capsys, "compare", f"{cross}:mlp", f"{seeded}:linear", "--split", "dev")
    assert "holds a cross-encoder, which has no head 'mlp'" in message


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("runs/a", [("runs/a", None)]),
        ("runs/a:mlp", [("runs/a", "mlp")]),
        ("runs/a:b:none@routed+c", [("runs/a:b", "none@routed+c")]),
        (r"C:\runs\a", [(r"C:\runs\a", None)]),
        (r"C:\runs\a:mlp", [(r"C:\runs\a", "mlp")]),
        ("runs/a:x,y,runs/b:z", [("runs/a", "x"), ("runs/a", "y"), ("runs/b", "z")]),
        ("runs/a,runs/b", [("runs/a", None), ("runs/b", None)]),
    ],
)
def test_references_are_parsed_from_the_right(reference, parts):
    assert _parse_reference(reference) == parts


def test_colon_in_path_of_run_is_not_a_head(tmp_path):
    folder = tmp_path / "a:b"
    folder.mkdir()
    assert _parse_reference(str(folder)) == [(str(folder), None)]


def test_invalid_systems_are_rejected(capsys, seeded, dialogue_run, tmp_path, write_rows, model):
    def rejected(*systems):
        return run_rejected(capsys, "compare", *systems)

    none, linear = f"{seeded}:none", f"{seeded}:linear"
    assert "1 system is named" in rejected(none)
    assert "has no fitted head 'mpl'" in rejected(none, f"{seeded}:mpl")
    assert "is not a system" in rejected(none, f"{seeded}:")
    assert "there is no run at" in rejected(none, tmp_path / "missing")
    assert "is named twice" in rejected(none, none)
    assert "Did you mean" in rejected(none, f"{seeded}:none@concat-sent-con")
    assert "have different tasks" in rejected(none, f"{dialogue_run}:none")
    message = rejected(none, linear, "--baseline", f"{seeded}:mlp")
    assert "is not among the systems" in message
    message = rejected(none, f"{seeded}:seed1,seed1")
    assert "were not fitted with different seeds" in message
    rows = [(f"a dog {i}", "a cat", "the place", 1 + i % 5) for i in range(40)]
    other = write_rows(rows, "other.csv")
    prompt = ["concat-sent-cond"]
    llmcond.extract(model=model, data=other, run=tmp_path / "other", prompt=prompt, **ENCODER)
    message = rejected(none, f"{tmp_path / 'other'}:none", "--split", "dev")
    assert "have different rows in dev" in message


def test_heads_that_differ_in_settings_are_no_system(capsys, fitted, tmp_path):
    folder = shutil.copytree(fitted, tmp_path / "run")
    changed = {"epochs": "1", "dropout": "0.5"}
    llmcond.fit_head(run=folder, head="linear", set=changed, seed=1, name="other", device="cpu")
    message = run_rejected(capsys, "compare", f"{folder}:none", f"{folder}:linear")
    assert "differ in more than their seed" in message
    system = f"{folder}:linear@concat-sent-cond"
    assert "differ in dropout (0.2 or 0.5), epochs (2 or 1). Name" in message
    assert message.rstrip().endswith(f"separated by commas: {system}")
