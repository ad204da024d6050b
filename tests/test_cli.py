"""Every command as a user runs it: in a new process where start-up matters, else in this one."""

import csv
import importlib.metadata
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import checkpoints
from helpers.commands import run_json, run_rejected
from helpers.paths import ROOT
from helpers.processes import Command
from helpers.waiting import wait_until

import llmcond
import llmcond.benchmark.machine
import llmcond.config
from llmcond.cli import run
from llmcond.data.datasets import sample_folder
from llmcond.features.extract import order_inputs
from llmcond.prompts.inputs import SplitInputs
from llmcond.runs import open_run

pytestmark = pytest.mark.usefixtures("in_tmp")


@pytest.fixture
def tiny(tiny_run: Path) -> str:
    """The checkpoint folder of the tiny run."""
    return str(json.loads((tiny_run / "run.json").read_text())["encoder"]["model"])


# -- workflows ---------------------------------------------------------------------------------


@pytest.fixture
def small_sample(tmp_path, monkeypatch):
    """Replace the bundled sample by a sixth of it."""
    folder = tmp_path / "sample"
    folder.mkdir()
    for file in sample_folder().glob("*.csv"):
        lines = file.read_text().splitlines(keepends=True)
        (folder / file.name).write_text("".join(lines[: 1 + len(lines) // 12 * 2]))
    monkeypatch.setattr("llmcond.data.datasets.sample_folder", lambda: folder)


def test_sample_from_extract_to_similarity(capsys, small_sample):
    first = run_json(capsys, "extract", "--model", "minilm")
    assert first["prompts"]["routed"]["n_computed"] > 500
    second = run_json(capsys, "extract", "--model", "minilm")
    assert second["prompts"]["routed"]["n_computed"] == 0

    fitted = run_json(capsys, "fit-head", "--head", "mlp", "--dim", "128", "--set", "epochs=25")
    assert (fitted["dim"], fitted["selected_on"], fitted["subtract"]) == (128, "dev", True)
    rows = run_json(capsys, "evaluate")["results"]
    by_head = {(row["head"], row["subtract"]): row for row in rows}
    assert set(by_head) == {("none", False), ("none", True), ("mlp", True)}
    mlp, zero_shot = by_head["mlp", True], by_head["none", True]
    assert mlp["split"] == "test"
    assert mlp["n"] == 100
    # A sixth of the sample generalises little, but its rows are learnt.
    rows = run_json(capsys, "evaluate", "--split", "train")["results"]
    on_train = {row["head"]: row["spearman"] for row in rows if row["subtract"]}
    assert on_train["mlp"] > on_train["none"] + 0.5
    assert mlp["spearman"] > zero_shot["spearman"] + 0.1
    low, high = mlp["spearman_ci"]
    assert low < mlp["spearman"] < high

    conditions = ["the number of people", "the activity", "the place"]
    options = [word for text in conditions for word in ("--condition", text)]
    options += ["--run", "runs/default"]
    pair = ("Two women read a book at the beach.", "Two women cook at night.")
    result = run_json(capsys, "similarity", *pair, *options)
    assert (result["head"], result["fitted_on"]) == ("mlp@routed", "the bundled sample")
    people, _, place = (row["similarity"] for row in result["similarities"])
    assert people > place
    # The home page states the figures without a head; in bfloat16 the digits differ.
    result = run_json(capsys, "similarity", *pair, *options, "--head", "none")
    page = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    figures = re.search(r"the three are (\S+), (\S+) and (\S+)\.", page)
    assert figures is not None
    similarities = [row["similarity"] for row in result["similarities"]]
    assert similarities == pytest.approx([float(figure) for figure in figures.groups()], abs=0.02)


def test_single_file_is_split_by_pair_and_compared(capsys, tiny, write_rows, small_rows):
    data = write_rows(small_rows)
    recipe_path = Path("quick.toml")
    recipe = (llmcond.bundled.bundled_folder("heads") / "linear.toml").read_text()
    recipe_path.write_text(recipe.replace("epochs = 200", "epochs = 3"))
    results = run_json(
        capsys,
        "compare-prompts",
        "--model",
        tiny,
        "--data",
        data,
        "--heads",
        recipe_path,
        "pca",
        "--prompts",
        "concat-sent-cond",
        "concat-cond-sent",
        "pair-cond",
        "pair-sent",
        "--seeds",
        "1",
        "--plain",
        "--workers",
        "1",
        "--device",
        "cpu",
        "--run",
        "runs/compare",
    )["results"]
    keys = {(row["prompt"], row["head"], row["subtract"]) for row in results}
    assert len(results) == len(keys) == 4 * 3 * 2
    assert {row["prompt"] for row in results} == {
        "concat-sent-cond",
        "concat-cond-sent",
        "pair-cond",
        "pair-sent",
    }
    assert len({(row["n"], row["n_pairs"], row["split"]) for row in results}) == 1
    spearman = [row["spearman"] for row in results]
    assert spearman == sorted(spearman, reverse=True)
    assert json.loads(Path("runs/compare/compare-prompts.json").read_text())["results"] == results


def test_embed_keeps_order_and_matches_api(capsys, run_copy, write_rows):
    run_json(capsys, "fit-head", "--head", "linear", "--run", run_copy, "--set", "epochs=3")
    texts = [(f"two men play in the park {i}", "the place") for i in range(30)]
    data = write_rows(texts, header="sentence,condition")
    run_json(capsys, "embed", data, "--out", "v.parquet", "--run", run_copy)
    run_json(
        capsys, "embed", data, "--out", "v.npy", "--run", run_copy, "--condition-text", "the mood"
    )
    table = pq.read_table("v.parquet")
    assert table["sentence"].to_pylist() == [sentence for sentence, _ in texts]

    embedder = llmcond.load_embedder(run_copy, head="linear")
    expected = embedder.encode([s for s, _ in texts], "the place")
    stored = np.stack(table["embedding"].to_numpy())
    assert np.allclose(stored, expected, atol=2e-3)
    mood_vectors = np.load("v.npy")
    assert np.allclose(mood_vectors, embedder.encode([s for s, _ in texts], "the mood"), atol=2e-3)
    assert not np.allclose(mood_vectors, stored, atol=2e-3)


def test_keep_adds_columns_to_embeddings(capsys, run_copy, write_rows):
    rows = [("two men", "the place", 7, "x"), ("children", "the place", 3, "")]
    data = write_rows(rows, header="sentence,condition,id,note")
    embed = ("embed", data, "--run", run_copy, "--keep", "id", "note")
    run_json(capsys, *embed, "--out", "v.parquet")
    table = pq.read_table("v.parquet")
    assert table.column_names == ["id", "note", "sentence", "condition", "embedding"]
    assert table["id"].to_pylist() == ["7", "3"]
    assert "holds vectors only" in run_rejected(capsys, *embed, "--out", "v.npy")
    assert "no column 'ID'" in run_rejected(capsys, *embed[:-2], "ID", "--out", "w.parquet")
    assert "'sentence' is written anyway" in run_rejected(
        capsys, *embed[:-2], "sentence", "--out", "w.parquet"
    )
    objects = [{"sentence": "a", "condition": "b", "id": value} for value in (1, "z")]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, objects)))
    run_json(capsys, "embed", "t.jsonl", "--run", run_copy, "--keep", "id", "--out", "u.parquet")
    assert pq.read_table("u.parquet")["id"].to_pylist() == ["1", "z"]


def test_repeated_embed_encodes_nothing(capsys, run_copy, write_rows):
    data = write_rows([("two men", "the place")], header="sentence,condition")
    assert run(["embed", str(data), "--out", "a.npy", "--run", str(run_copy)]) == 0
    capsys.readouterr()
    assert run(["embed", str(data), "--out", "b.npy", "--run", str(run_copy)]) == 0
    assert "nothing to encode" in capsys.readouterr().err
    assert np.array_equal(np.load("a.npy"), np.load("b.npy"))


def test_other_data_is_scored_and_predictions_written(capsys, run_copy, write_rows, small_rows):
    run_json(capsys, "fit-head", "--head", "pca", "--dim", "8", "--run", run_copy)
    data = write_rows([*small_rows[:20], ("two dogs", "a hat", "the mood", -1)], "other.csv")
    rows = run_json(
        capsys,
        "evaluate",
        "--run",
        run_copy,
        "--data",
        data,
        "--predictions",
        "p.csv",
        "--head",
        "pca",
    )["results"]
    assert [row["n"] for row in rows] == [20, 20, 20]
    assert [row["n_dropped"] for row in rows] == [1, 1, 1]
    with Path("p.csv").open(encoding="utf-8") as stream:
        predictions = list(csv.DictReader(stream))
    assert len(predictions) == 21
    assert predictions[20]["rating"] == ""
    assert {"none@concat-sent-cond", "none@concat-sent-cond+c", "pca@concat-sent-cond"} < set(
        predictions[0]
    )


def test_heads_of_two_seeds_are_both_evaluated(capsys, run_copy):
    for seed in (0, 1):
        run_json(
            capsys,
            "fit-head",
            "--head",
            "linear",
            "--run",
            run_copy,
            "--seed",
            seed,
            "--name",
            f"linear-{seed}",
            "--set",
            "epochs=2",
        )
    rows = run_json(capsys, "evaluate", "--run", run_copy)["results"]
    assert [row["seed"] for row in rows if row["head"] == "linear"] == [0, 1]


def test_same_seed_gives_identical_head(capsys, run_copy):
    for name in ("a", "b"):
        run_json(
            capsys,
            "fit-head",
            "--head",
            "mlp",
            "--run",
            run_copy,
            "--name",
            name,
            "--set",
            "epochs=3",
        )
    first, second = (run_copy.glob(f"heads/{name}/head-*") for name in ("a", "b"))
    assert next(first).name == next(second).name  # the digest of the weights


@pytest.mark.parametrize("command", ["models", "prompts", "heads"])
def test_listings_print_every_name(capsys, command):
    rows = run_json(capsys, command)[command]
    assert len(rows) >= 2
    assert run([command]) == 0
    out = capsys.readouterr().out
    assert all(row["name"] in out for row in rows)


def test_bundled_models_are_listed_separately(capsys):
    assert run_json(capsys, "models")["bundled"] == ["minilm-conditions", "minilm-csts"]
    assert run(["models"]) == 0
    assert "minilm-csts" in capsys.readouterr().err


def test_head_records_its_provenance(capsys, run_copy):
    run_json(
        capsys, "fit-head", "--head", "mlp", "--run", run_copy, "--set", "epochs=2", "--seed", "7"
    )
    record = json.loads((run_copy / "heads/mlp@concat-sent-cond/head.json").read_text())
    assert record["seed"] == 7
    assert record["recipe"]["settings"]["epochs"] == 2
    assert record["encoder"]["identity"]["weights"].startswith("sha256:")
    assert record["prompts"][0]["conditional"]["text"] == "{sentence} {condition}"
    assert len(record["data"]["digest"]) == 32
    assert record["versions"]["llmcond"] == llmcond.__version__
    assert len(record["fit"]["curve"]) == 2


def test_names_never_collide(capsys, run_copy, tiny):
    """A prompt cannot have the name of a head without subtraction, nor a head that of zero-shot."""
    bundled = (llmcond.bundled.bundled_folder("prompts") / "concat-sent-cond.toml").read_text()
    Path("x+c.toml").write_text(bundled)
    extract = ("extract", "--model", tiny, "--run", run_copy, "--dtype", "float32")
    assert "cannot be called 'x+c'" in run_rejected(capsys, *extract, "--prompt", "x+c.toml")
    line = run_rejected(capsys, "fit-head", "--head", "pca", "--name", "none@x", "--run", run_copy)
    assert "means zero-shot" in line


def test_none_head_can_be_fitted_and_is_listed_once(capsys, run_copy):
    run_json(capsys, "fit-head", "--head", "none", "--run", run_copy)
    rows = run_json(capsys, "evaluate", "--run", run_copy)["results"]
    assert [(row["head"], row["subtract"]) for row in rows] == [("none", False), ("none", True)]


def test_undefined_dev_score_keeps_last_epoch(capsys, tiny, write_rows, small_rows):
    write_rows(small_rows, "d/train.csv")
    write_rows([(*row[:3], 3) for row in small_rows[:6]], "d/dev.csv")
    run_json(capsys, "extract", "--model", tiny, "--data", "d")
    fitted = run_json(capsys, "fit-head", "--head", "mlp", "--set", "epochs=4")
    assert (fitted["best_epoch"], fitted["selected_on"], fitted["dev_spearman"]) == (4, None, None)


def test_unrated_test_split_is_predicted(capsys, tiny, write_rows, small_rows):
    for split in ("train", "dev"):
        write_rows(small_rows, f"d/{split}.csv")
    write_rows([(*row[:3], -1) for row in small_rows[:6]], "d/test.csv")
    run_json(capsys, "extract", "--model", tiny, "--data", "d")
    assert run_json(capsys, "evaluate")["results"][0]["split"] == "dev"
    assert "there is nothing to score" in run_rejected(capsys, "evaluate", "--split", "test")
    rows = run_json(capsys, "evaluate", "--split", "test", "--predictions", "p.csv")["results"]
    assert [(row["n"], row["spearman"]) for row in rows] == [(0, None), (0, None)]
    assert len(Path("p.csv").read_text().splitlines()) == 7


def test_evaluate_leaves_out_head_with_changed_prompt(capsys, run_copy, tiny):
    run_json(capsys, "fit-head", "--head", "pca", "--dim", "4", "--run", run_copy)
    prompt = Path("concat-sent-cond.toml")
    bundled = (llmcond.bundled.bundled_folder("prompts") / prompt.name).read_text()
    prompt.write_text(bundled.replace("{sentence} {condition}", "{sentence}: {condition}"))
    extract = ["extract", "--model", tiny, "--run", str(run_copy), "--dtype", "float32"]
    assert run([*extract, "--prompt", str(prompt)]) == 0
    assert "the prompt concat-sent-cond has changed" in capsys.readouterr().err
    assert run(["evaluate", "--run", str(run_copy), "--json"]) == 0
    captured = capsys.readouterr()
    assert "left out: the head pca@concat-sent-cond" in captured.err
    assert {row["head"] for row in json.loads(captured.out)["results"]} == {"none"}


def test_repeated_extraction_leaves_run_unchanged(capsys, run_copy, tiny):
    before = (run_copy / "run.json").read_bytes()
    extract = ("extract", "--model", tiny, "--run", run_copy, "--dtype", "float32")
    run_json(capsys, *extract, "--prompt", "concat-sent-cond")
    assert (run_copy / "run.json").read_bytes() == before


def test_moved_checkpoint_is_used_after_extraction(capsys, run_copy, tiny):
    moved = shutil.copytree(tiny, "moved")
    manifest = run_copy / "run.json"
    manifest.write_text(manifest.read_text().replace(tiny, "/gone/checkpoint"))
    similarity = ("similarity", "a", "b", "--condition", "c", "--run", run_copy)
    assert "/gone/checkpoint" in run_rejected(capsys, *similarity)
    run_json(capsys, "extract", "--model", moved, "--run", run_copy, "--dtype", "float32")
    assert run_json(capsys, *similarity)["head"] == "none"


def test_only_extraction_suggests_to_read_windows(capsys, tiny, write_rows):
    long, short = "the park " * 200, "two dogs"
    data = write_rows([(f"{n} {long}", short, "place", n) for n in (1, 3, 5)])
    assert run(["extract", "--model", str(tiny), "--data", str(data), "--run", "run"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "3 inputs (a text counts once for each condition) are longer than 64 tokens" in err
    assert "use a run that was extracted with --long-texts windows" in err
    with pytest.warns(UserWarning, match=r"use whole sentences, split long texts\.$"):
        assert run(["similarity", long, short, "--condition", "place", "--run", "run"]) == 0


@pytest.mark.parametrize("name", ["exp:1", "r[/x]", "with space"])
def test_run_folder_may_have_any_name(capsys, tiny, write_rows, small_rows, name):
    data = write_rows(small_rows)
    run_json(capsys, "extract", "--model", tiny, "--data", data, "--run", name)
    assert run(["evaluate", "--run", name]) == 0


def test_prefix_sharing_does_not_change_vectors(capsys, write_rows, small_rows):
    model = checkpoints.build_checkpoint("mistral", Path("model")).folder
    data = write_rows(small_rows)
    causal = ("--like", "intfloat/e5-mistral-7b-instruct", "--dtype", "float32", "--device", "cpu")
    vectors = []
    for option in ("--share-prefixes", "--no-share-prefixes"):
        extract = ("extract", "--model", model, "--data", data, "--run", option[2:], *causal)
        run_json(capsys, *extract, "--store-dtype", "float32", option)
        saved_run = open_run(Path(option[2:]))
        rows = [saved_run.rows(split) for split in saved_run.splits]
        inputs = SplitInputs(rows, saved_run.prompt(None))
        # The store keeps the order of encoding: by prefix, or the longest input first.
        keys = lance.dataset(str(saved_run.store().folder / "vectors.lance")).to_table()["key"]
        expected = order_inputs(inputs, by_prefix=option == "--share-prefixes")
        assert keys.to_pylist() == [item.key for item in expected]
        vectors.append(saved_run.store().lookup(order_inputs(inputs)).read())
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-3)


# -- start-up ----------------------------------------------------------------------------------


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from llmcond.cli import run\n"
        "try: run(['extract', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'lance', 'rich', 'sklearn'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "command",
    [
        "extract --model minilm --data no.csv",
        "train-lora --model minilm --head none --data no.csv",
        "compare-prompts --model minilm --data no.csv",
        "evaluate --data no.csv",
        "embed no.csv --out v.npy",
    ],
)
def test_missing_file_is_reported_before_heavy_imports(command):
    code = (
        "import sys; from llmcond.cli import run\n"
        f"assert run({command.split()}) == 2\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'lance', 'rich', 'sklearn', 'scipy'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert process.stderr.startswith("llmcond: error: no.csv does not exist. Expected a .csv")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["fit-head", "--help"], ["models", "--json"]]
)
def test_package_runs_as_module(arguments):
    process = subprocess.run(
        [sys.executable, "-m", "llmcond", *arguments], check=True, capture_output=True, text=True
    )
    assert process.stdout
    assert process.stderr == ""


@pytest.mark.parametrize("arguments", [["--version", "--verbose"], ["--verbose", "--version"]])
def test_verbose_version_describes_installation(arguments, capsys):
    assert run(arguments) == 0
    facts = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert facts["llmcond"] == llmcond.__version__
    assert facts["python"].endswith(f"({sys.executable})")
    assert facts["torch"] == importlib.metadata.version("torch")
    assert facts["package"] == str(Path(llmcond.__file__).parent)
    assert facts["device"] in ("cpu", "cuda:0")
    assert facts["extra lora"] == "installed"
    assert "extra all" not in facts


def test_verbose_version_describes_broken_installation(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises an ImportError
    find_version = llmcond.benchmark.machine.version

    def find_all_but_peft(name):
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return find_version(name)

    monkeypatch.setattr("llmcond.benchmark.machine.version", find_all_but_peft)
    assert run(["--version", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "device: import of torch halted" in out
    assert "extra lora: lacks peft\n" in out


def test_verbose_without_version_is_rejected(capsys):
    line = run_rejected(capsys, "--verbose", "models")
    assert "only the version has a verbose form" in line


def test_bash_completes_commands_flags_and_values(capsys):
    with pytest.raises(SystemExit):
        run(["--print-completion", "bash"])
    script = f"""{capsys.readouterr().out}
complete_words() {{
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_llmcond
    echo "${{COMPREPLY[*]}}"
}}
complete_words llmcond fit
complete_words llmcond extract --qu
complete_words llmcond extract --quantize ""
complete_words llmcond prompts s"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["fit-head", "--quantize", "none 8bit 4bit", "show"]


def test_help_of_extract_lists_speed_options(capsys):
    with pytest.raises(SystemExit):
        run(["extract", "--help"])
    out = capsys.readouterr().out
    assert "--workers N" in out
    assert "--share-prefixes, --no-share-prefixes" in out
    with pytest.raises(SystemExit):
        run(["embed", "--help"])
    assert "--workers" not in capsys.readouterr().out


def test_closed_pipe_is_no_error():
    command = f"{sys.executable} -m llmcond prompts | head -1"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in process.stderr


# -- invalid input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["extrac"], "Did you mean 'extract'"),
        (
            ["similarity", "a", "b", "--conditon", "c"],
            "there is no --conditon. Did you mean '--cond",
        ),
        (["heads", "--rum", "x"], "See `llmcond heads --help`"),
        (["prompts", "show", "x", "--dta", "y"], "See `llmcond prompts show --help`"),
        ([], "COMMAND"),
        (["extract"], "--model"),
        (["extract", "--model", "mini-lm"], "Did you mean 'minilm'"),
        (["extract", "--model", "minilm", "--prompt", "concat"], "'concat-sent-cond'"),
        (["extract", "--model", "minilm", "--prompt", "mine.toml"], "does not exist"),
        (["extract", "--model", "minilm", "--prompt", "cond"], "takes none"),
        (["extract", "--model", "minilm", "--prompt", "sent", "sent"], "2 times"),
        (["extract", "--model", "minilm", "--dtype", "fp16"], "float16"),
        (["extract", "--model", "minilm", "--data", "missing.csv"], "does not exist"),
        (["extract", "--model", "minilm", "--columns", "sentence=x"], "Did you mean 'sentence"),
        (["extract", "--model", "minilm", "--columns", "sentence1"], "NAME=VALUE"),
        (["extract", "--model", "minilm", "--rating-range", "5", "1"], "low must be below high"),
        (["extract", "--model", "minilm", "--unrated", "none"], "expected a number, or empty"),
        (["extract", "--model", "minilm", "--max-tokens-per-batch", "0"], "at least 1"),
        (["extract", "--model", "minilm", "--instruction-format", "{text}"], "{instruction}"),
        (["fit-head", "--head", "mlp"], "llmcond extract --model"),
        (["evaluate"], "llmcond extract --model"),
        (["similarity", "a", "b", "--condition", "c", "--run", "x"], "llmcond extract --model"),
        (["embed", "x.csv", "--out", "x.npy"], "x.csv does not exist"),
        (["evaluate", "--data", "x.csv"], "x.csv does not exist"),
        (["fit-head", "--head", "mlp", "--seeds", "3"], "It is an option of sweep, sweep-lora"),
        (["sweep", "--head", "mlp", "--seeds", "0", "1"], "takes one value, not 0 1: number of"),
        (["embed", "x.csv", "--report", "x.html"], "It is an option of evaluate, compare,"),
    ],
)
def test_invalid_arguments_report_one_line(capsys, arguments, expected):
    assert expected in run_rejected(capsys, *arguments)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"sentence1,sentence2,condition,label\n", "is empty"),
        (b"sentence1,sentence2,cond,label\na,b,c,1\n", "no column 'condition'"),
        (
            b"sentence1,sentence2,condition,label\na,b,c,1\n ,b,c,1\n",
            "row 2 of rows.csv: sentence1",
        ),
        (b"sentence1,sentence2,condition,label\na,b,,1\n", "condition is empty"),
        (b"sentence1,sentence2,condition,label\na,b,c,6\n", "outside the rating range"),
        (b"sentence1,sentence2,condition,label\na,b,c,good\n", "not a number"),
        ("sentence1,sentence2,condition,label\ncafé,b,c,1\n".encode("latin-1"), "not UTF-8"),
        (b"sentence1,sentence2,condition,label\na,b,c\n", "3 fields, but its header has 4"),
    ],
)
def test_invalid_rows_are_rejected_before_writing(capsys, tiny, content, expected):
    Path("rows.csv").write_bytes(content)
    assert expected in run_rejected(capsys, "extract", "--model", tiny, "--data", "rows.csv")
    assert not Path("runs").exists()


def test_folder_without_run_is_rejected(capsys, tiny):
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("precious")
    for command in (["extract", "--model", tiny], ["fit-head", "--head", "mlp"], ["evaluate"]):
        assert "is not a run" in run_rejected(capsys, *command, "--run", "mine")
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]


def test_run_of_other_encoder_is_rejected(capsys, run_copy, tiny_checkpoint):
    line = run_rejected(
        capsys,
        "extract",
        "--model",
        tiny_checkpoint(seed=1),
        "--run",
        run_copy,
        "--dtype",
        "float32",
    )
    assert "holds features of" in line
    assert "weights: " in line


@pytest.mark.usefixtures("native_16_bit")
def test_run_with_other_dtype_is_rejected(capsys, run_copy, tiny):
    line = run_rejected(
        capsys, "extract", "--model", tiny, "--run", run_copy, "--dtype", "bfloat16"
    )
    assert "dtype: 'bfloat16', not 'float32'" in line


def test_run_of_other_data_is_rejected(capsys, run_copy, tiny, write_rows, small_rows):
    data = write_rows(small_rows[:30])
    line = run_rejected(
        capsys, "extract", "--model", tiny, "--run", run_copy, "--dtype", "float32", "--data", data
    )
    assert "holds the data" in line


def test_newer_run_or_store_is_rejected(capsys, run_copy):
    store = next(run_copy.glob("features/*/store.json"))
    store.write_text(json.dumps({**json.loads(store.read_text()), "format": 99}))
    assert "newer version" in run_rejected(capsys, "fit-head", "--head", "mlp", "--run", run_copy)
    manifest = run_copy / "run.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    assert "newer version" in run_rejected(capsys, "evaluate", "--run", run_copy)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--head", "mpl"], "Did you mean 'mlp'"),
        (["--head", "mlp", "--dim", "33"], "the features have 32"),
        (["--head", "pca", "--dim", "0"], "at least 1"),
        (["--head", "none", "--dim", "3"], "Leave out --dim"),
        (["--head", "mlp", "--prompt", "cond"], "no features of the prompt 'cond'"),
        (["--head", "mlp", "--set", "epoch=3"], "Did you mean 'epochs'"),
        (["--head", "mlp", "--set", "epochs=many"], "not int"),
        (["--head", "mlp", "--set", "dropout=1"], "below 1"),
        (["--head", "mlp", "--name", "../../x"], "cannot be called"),
    ],
)
def test_invalid_fit_options_are_rejected(capsys, run_copy, arguments, expected):
    assert expected in run_rejected(capsys, "fit-head", *arguments, "--run", run_copy)
    assert not (run_copy / "heads").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["evaluate", "--rating-range", "0", "10"], "and --data was not given"),
        (["evaluate", "--head", "mpl"], "Did you mean 'mlp'"),
        (["similarity", "a", "b", "--condition", " "], "--condition is empty"),
        (["similarity", "a", "b", "--condition", "c", "--head", "p", "--prompt", "q"], "not q"),
        (["embed", "texts.csv", "--out", "v.npy"], "Name the conditions: --condition COL_OR_TEXT."),
        (
            ["embed", "texts.csv", "--out", "v.npy", "--text", "t", "--condition", "c"],
            "Name the column of the texts: --text COL.",
        ),
        (["embed", "texts.csv", "--out", "x.txt"], ".parquet or .csv or .npy"),
        (["embed", "texts.csv", "--out", "no/v.npy", "--text", "x"], "no column 'x'"),
        (
            ["embed", "t.parquet", "--out", "t.parquet", "--condition-text", "c"],
            "is an input of the same command",
        ),
        (["fit-head", "--head", "ica", "--seed", "-1"], "--seed is -1"),
        (["fit-head", "--head", "mlp", "--set", "hidden=10000000000"], "at most 65,536"),
    ],
)
def test_options_that_do_not_fit_run_are_rejected(
    capsys, run_copy, write_rows, arguments, expected
):
    write_rows([("two men", "park")], "texts.csv", "sentence,place")
    pq.write_table(pa.table({"sentence": ["two men"]}), "t.parquet")
    run_json(capsys, "fit-head", "--head", "pca", "--dim", "4", "--name", "p", "--run", run_copy)
    assert expected in run_rejected(capsys, *arguments, "--run", run_copy)
    assert not Path("no").exists()


def test_other_data_options_are_rejected_for_existing_run(capsys, run_copy, tiny):
    extract = ("extract", "--model", tiny, "--run", run_copy, "--dtype", "float32")
    assert "with other options" in run_rejected(capsys, *extract, "--split-seed", "9")
    assert "with other options" in run_rejected(capsys, *extract, "--rating-range", "0", "10")


def test_unloadable_encoder_leaves_no_run(capsys, tiny, write_rows, small_rows):
    broken = Path(shutil.copytree(tiny, "broken"))
    weights = (broken / "model.safetensors").read_bytes()
    data = write_rows(small_rows)
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert run(["extract", "--model", "broken", "--data", str(data)]) == 1
    assert "cannot be loaded" in capsys.readouterr().err
    (broken / "model.safetensors").write_bytes(weights)
    (broken / "tokenizer.json").unlink()
    assert "no tokenizer" in run_rejected(capsys, "extract", "--model", "broken", "--data", data)
    assert not Path("runs/default").exists()


@pytest.mark.parametrize("file", ["run.json", "heads/p/head.json"])
def test_damaged_record_reports_one_line(capsys, run_copy, file):
    run_json(capsys, "fit-head", "--head", "pca", "--dim", "4", "--name", "p", "--run", run_copy)
    (run_copy / file).write_text('{"format": 1}')
    assert run(["evaluate", "--run", str(run_copy)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("llmcond: error: ")
    assert err.count("\n") == 1


def test_unrated_empty_applies_to_further_data(capsys, tiny, write_rows, small_rows):
    rows = [(*row[:3], "" if i % 5 == 4 else row[3]) for i, row in enumerate(small_rows)]
    data = str(write_rows(rows))
    llmcond.extract(model=tiny, data=data, unrated="empty")
    scored = run_json(capsys, "evaluate", "--data", data)["results"][0]
    assert scored["n_dropped"] == len(small_rows) // 5
    assert "--unrated empty" in run_rejected(capsys, "evaluate", "--data", data, "--unrated", "-1")


def test_single_distinct_rating_is_rejected(capsys, tiny, write_rows, small_rows):
    data = write_rows([(*row[:3], 3) for row in small_rows])
    run_json(capsys, "extract", "--model", tiny, "--data", data)
    assert "1 distinct ratings" in run_rejected(capsys, "fit-head", "--head", "linear")


def test_contrastive_pairs_do_not_depend_on_row_order(capsys, tiny, write_rows, small_rows):
    shuffled = [row for start in range(3) for row in small_rows[start::3]]
    fit = ("fit-head", "--head", "linear", "--set", "info_nce=1", "epochs=1")
    run_json(capsys, "extract", "--model", tiny, "--data", write_rows(shuffled))
    fitted = run_json(capsys, *fit)
    pairs = {tuple(row[:2]) for row in small_rows}
    assert fitted["n_contrastive_pairs"] == fitted["n_train"] // 2 > 0.6 * len(pairs)
    single = write_rows(list({row[:2]: row for row in small_rows}.values()), "single.csv")
    run_json(capsys, "extract", "--model", tiny, "--data", single, "--run", "single")
    assert "no sentence pair has two rated rows" in run_rejected(capsys, *fit, "--run", "single")


def test_unfitted_head_is_rejected(capsys, run_copy):
    assert "fit-head --head mlp" in run_rejected(
        capsys, "evaluate", "--head", "mlp", "--run", run_copy
    )


def test_head_of_other_prompt_or_encoder_is_rejected(capsys, run_copy, tiny, tiny_checkpoint):
    run_json(capsys, "fit-head", "--head", "pca", "--dim", "4", "--run", run_copy)
    record = run_copy / "heads/pca@concat-sent-cond/head.json"
    original = json.loads(record.read_text())
    identity = {**original["encoder"]["identity"], "pooling": "cls"}
    record.write_text(
        json.dumps({**original, "encoder": {**original["encoder"], "identity": identity}})
    )
    line = run_rejected(capsys, "evaluate", "--head", "pca", "--run", run_copy)
    assert "pooling: 'cls', not 'mean'" in line

    record.write_text(json.dumps(original))
    prompt = Path("concat-sent-cond.toml")
    bundled = llmcond.bundled.bundled_folder("prompts") / prompt.name
    prompt.write_text(
        bundled.read_text().replace("{sentence} {condition}", "{sentence}: {condition}")
    )
    run_json(
        capsys,
        "extract",
        "--model",
        tiny,
        "--run",
        run_copy,
        "--dtype",
        "float32",
        "--prompt",
        prompt,
    )
    line = run_rejected(capsys, "evaluate", "--head", "pca", "--run", run_copy)
    assert original["prompts"][0]["digest"] in line


def test_missing_features_are_reported(capsys, run_copy):
    shutil.rmtree(next(run_copy.glob("features/*/vectors.lance")))
    assert "it resumes" in run_rejected(capsys, "fit-head", "--head", "mlp", "--run", run_copy)


def test_ambiguous_head_name_is_rejected(capsys, run_copy):
    for extra in ([], ["--no-subtract"]):
        run_json(capsys, "fit-head", "--head", "pca", "--dim", "4", "--run", run_copy, *extra)
    line = run_rejected(
        capsys, "similarity", "a", "b", "--condition", "c", "--head", "pca", "--run", run_copy
    )
    assert "pca@concat-sent-cond, pca@concat-sent-cond+c" in line
    assert run_json(
        capsys,
        "similarity",
        "a",
        "b",
        "--condition",
        "c",
        "--run",
        run_copy,
        "--head",
        "pca@concat-sent-cond",
    )["subtract"]


def limit_file_size():
    """Limit the size of files to one memory page, as if the disk were full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_full_disk_loses_nothing(run_copy, tiny, tmp_path):
    """A limit on file size stands in for a full disk: the write fails at the same point."""
    before = sorted(path for path in run_copy.rglob("*") if "claims" not in path.parts)
    arguments = f"extract --model {tiny} --run {run_copy} --dtype float32 --prompt concat-cond-sent"
    command = Command(tmp_path / "printed", arguments.split(), setup=limit_file_size)
    status, _, message = command.finish()
    assert status == 2
    assert "the disk is full" in message
    assert "Traceback" not in message
    assert set(before) <= set(run_copy.rglob("*"))
    assert run(["fit-head", "--head", "pca", "--dim", "4", "--run", str(run_copy)]) == 0
    assert run(arguments.split()) == 0


@pytest.mark.parametrize(
    ("allocate", "expected"),
    [
        (lambda: np.empty(2**60, np.int8), " (Unable to allocate 1.00 EiB"),
        (lambda: pa.allocate_buffer(2**60), " (malloc of size 1152921504606846976 failed)."),
        (lambda: [None] * 2**60, ". Free some, or split the input. Stored results are kept."),
    ],
)
def test_out_of_memory_reports_one_line(capsys, monkeypatch, allocate, expected):
    """Allocate more than any machine can address: native libraries may crash at a memory limit."""
    monkeypatch.setattr("llmcond.cli.run_command", lambda *_: allocate())
    assert run(["heads"]) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"llmcond: error: there is not enough memory{expected}")
    assert line.count("\n") == 1


def test_nan_is_reported_with_its_row(capsys, tiny_checkpoint, write_rows, small_rows):
    from safetensors.torch import load_file, save_file

    checkpoint = tiny_checkpoint(seed=5)
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(checkpoint / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][vocabulary["rain"]] = float("nan")
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    rows = [("two men play", "a dog", "the mood", 1 + i % 5) for i in range(5)]
    rows = [(f"{a} {i}", b, c, r) for i, (a, b, c, r) in enumerate(rows)]
    rows[3] = ("men sit in the rain", *rows[3][1:])
    for split in ("train", "dev"):
        write_rows(rows if split == "train" else rows[:2], f"d/{split}.csv")
    line = run_rejected(
        capsys, "extract", "--model", checkpoint, "--data", "d", "--dtype", "float32"
    )
    assert line.startswith("row 4 of train.csv")
    assert "NaN or infinity" in line


def test_long_condition_is_reported_with_its_row(capsys, tiny, write_rows, small_rows):
    rows = [*small_rows[:4], (*small_rows[4][:2], "the place " * 50, 3)]
    for split in ("train", "dev"):
        write_rows(rows, f"d/{split}.csv")
    line = run_rejected(capsys, "extract", "--model", tiny, "--data", "d", "--device", "cpu")
    assert line.startswith("row 5 of train.csv")
    assert "too long without its sentence" in line


@pytest.mark.parametrize(
    ("signal_number", "code", "expected"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_interrupt_reports_one_line(signal_number, code, expected, tmp_path):
    command = Command(tmp_path / "printed", ["extract", "--model", "minilm"])
    wait_until(lambda: command.stderr.read_text().count("\n") >= 2)
    os.kill(command.process.pid, signal_number)
    status, _, err = command.finish()
    first, second, *last = err.splitlines()
    assert first.startswith("data: the bundled sample")
    assert second.startswith("minilm in ")
    assert status == code
    assert last == [
        f"llmcond: error: {expected}; stored results are kept, and the same command resumes."
    ]


@pytest.mark.parametrize(
    ("name", "code", "command", "resumes"),
    [
        ("SIGINT", 130, "sweep --head mlp", True),
        ("SIGTERM", 143, "sweep --head mlp", True),
        ("SIGINT", 130, "fit-head --head mlp", False),
        ("SIGTERM", 143, "fit-head --head mlp", False),
    ],
)
def test_signal_sets_exit_code_and_message(name, code, command, resumes):
    """With ``-m``, Python ends by SIGINT if its KeyboardInterrupt has passed through ``exec``."""
    statement = f"import os, signal, time; os.kill(os.getpid(), signal.{name}); time.sleep(60)"
    Path("ended.py").write_text(
        "import sys, llmcond.cli as cli\n"
        f"cli.run_command = lambda *_: exec({statement!r})\n"
        f"sys.exit(cli.run({command.split()!r}))\n"
    )
    python = [sys.executable, "-m", "ended"]
    process = subprocess.run(python, check=False, capture_output=True, text=True)
    assert process.returncode == code
    assert process.stderr.count("\n") == 1
    assert ("resumes" in process.stderr) == resumes
    assert ("starts from the beginning" in process.stderr) != resumes


def test_public_names_can_be_imported():
    for name in llmcond.__all__:
        assert getattr(llmcond, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        llmcond.nothing  # noqa: B018


def test_workflows_on_features_do_not_import_transformers():
    code = (
        "import sys\n"
        "from llmcond.kinds.ranking import complete\n"
        "from llmcond.workflows import evaluate, fit, sweep\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "shift_jis", "utf-8"])
@pytest.mark.parametrize("form", ["--json", "table", "markdown", "latex"])
def test_characters_that_a_stream_lacks_are_escaped(monkeypatch, tiny_run, encoding, form):
    condition, command = "é 中 ☕ 😀", ["similarity", "a dog", "ein Häuschen 中"]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    form_flags = [form] if form == "--json" else ["--format", form]
    assert run([*command, "--condition", condition, "--run", str(tiny_run), *form_flags]) == 0
    assert run(["embed", "☕.csv", "--out", "x.csv"]) == 2
    for stream in (out, err):
        stream.flush()
    printed, messages = (stream.buffer.getvalue().decode(encoding) for stream in (out, err))
    if form == "--json":
        assert condition in str(json.loads(printed))
    else:
        assert "é" in printed or r"\u00e9" in printed
    assert ("☕.csv does not exist" in messages) == (encoding == "utf-8")
    assert (r"\u2615.csv does not exist" in messages) == (encoding != "utf-8")
