"""Every command as a user runs it: in a new process where start-up matters, else in this one."""

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.checkpoints import change_json
from helpers.commands import run_json, run_rejected
from helpers.paths import ROOT
from helpers.processes import Command
from safetensors import safe_open

import llmcond
from llmcond.cli import run
from llmcond.data.datasets import sample_folder

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
    assert (mlp["split"], mlp["n"]) == ("test", 100)
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
    people, _, location = (row["similarity"] for row in result["similarities"])
    assert people > location
    # The home page states the figures without a head; in bfloat16 the digits differ.
    result = run_json(capsys, "similarity", *pair, *options, "--head", "none")
    page = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    figures = re.search(r"the three are (\S+), (\S+) and (\S+)\.", page)
    similarities = [row["similarity"] for row in result["similarities"]]
    assert similarities == pytest.approx([float(figure) for figure in figures.groups()], abs=0.02)


def test_embed_keeps_order_and_columns_and_matches_api(capsys, run_copy, write_rows):
    run_json(capsys, "fit-head", "--head", "linear", "--run", run_copy, "--set", "epochs=3")
    texts = [f"two men play in the park {i}" for i in range(30)]
    rows = [(text, "the place", i) for i, text in enumerate(texts)]
    data = write_rows(rows, header="sentence,condition,id")
    embed = ("embed", data, "--run", run_copy)
    run_json(capsys, *embed, "--out", "v.parquet", "--keep", "id")
    table = pq.read_table("v.parquet")
    assert table.column_names == ["id", "sentence", "condition", "embedding"]
    assert table["sentence"].to_pylist() == texts
    assert table["id"].to_pylist() == [str(i) for i in range(30)]
    embedder = llmcond.load_embedder(run_copy, head="linear")
    stored = np.stack(table["embedding"].to_numpy())
    np.testing.assert_allclose(stored, embedder.encode(texts, "the place"), atol=2e-3)

    assert run([*map(str, embed), "--out", "again.npy"]) == 0
    assert "nothing to encode" in capsys.readouterr().err
    assert np.array_equal(stored, np.load("again.npy"))
    for flags, message in (
        (("v.npy", "--keep", "id"), "holds vectors only"),
        (("w.parquet", "--keep", "ID"), "no column 'ID'"),
        (("w.parquet", "--keep", "sentence"), "'sentence' is written anyway"),
    ):
        assert message in run_rejected(capsys, *embed, "--out", *flags)


def test_seed_determines_head_and_is_recorded(capsys, run_copy):
    fit = ("fit-head", "--head", "mlp", "--run", run_copy, "--set", "epochs=2")
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        run_json(capsys, *fit, "--name", name, "--seed", seed)
    digests = [next(run_copy.glob(f"heads/{name}/head-*")).name for name in "abc"]
    assert digests[0] == digests[1] != digests[2]
    rows = run_json(capsys, "evaluate", "--run", run_copy)["results"]
    assert sorted(row["seed"] for row in rows if row["head"] == "mlp") == [7, 7, 8]
    record = json.loads((run_copy / "heads/a/head.json").read_text())
    assert record["seed"] == 7
    assert record["recipe"]["settings"]["epochs"] == 2
    assert record["encoder"]["identity"]["weights"].startswith("sha256:")
    assert record["prompts"][0]["conditional"]["text"] == "{sentence} {condition}"
    assert len(record["data"]["digest"]) == 32
    assert record["versions"]["llmcond"] == llmcond.__version__
    assert len(record["fit"]["curve"]) == 2


def test_splits_without_scores(capsys, tiny, write_rows, small_rows):
    """Equal ratings on dev keep the last epoch; an unrated test split can only be predicted."""
    write_rows(small_rows, "d/train.csv")
    write_rows([(*row[:3], 3) for row in small_rows[:6]], "d/dev.csv")
    write_rows([(*row[:3], -1) for row in small_rows[:6]], "d/test.csv")
    run_json(capsys, "extract", "--model", tiny, "--data", "d")
    fitted = run_json(capsys, "fit-head", "--head", "mlp", "--set", "epochs=4")
    assert (fitted["best_epoch"], fitted["selected_on"], fitted["dev_spearman"]) == (4, None, None)
    assert run_json(capsys, "evaluate")["results"][0]["split"] == "dev"
    test = ("evaluate", "--split", "test", "--head", "none")
    assert "there is nothing to score" in run_rejected(capsys, *test)
    rows = run_json(capsys, *test, "--predictions", "p.csv")["results"]
    assert [(row["n"], row["spearman"]) for row in rows] == [(0, None), (0, None)]
    assert len(Path("p.csv").read_text().splitlines()) == 7


def test_unrated_empty_applies_to_further_data(capsys, tiny, write_rows, small_rows):
    rows = [(*row[:3], "" if i % 5 == 4 else row[3]) for i, row in enumerate(small_rows)]
    data = str(write_rows(rows))
    llmcond.extract(model=tiny, data=data, unrated="empty")
    scored = run_json(capsys, "evaluate", "--data", data)["results"][0]
    assert scored["n_dropped"] == len(small_rows) // 5
    assert "--unrated empty" in run_rejected(capsys, "evaluate", "--data", data, "--unrated", "-1")


def test_head_of_changed_prompt_is_left_out(capsys, run_copy, tiny):
    run_json(capsys, "fit-head", "--head", "pca", "--dim", "4", "--run", run_copy)
    record = json.loads((run_copy / "heads/pca@concat-sent-cond/head.json").read_text())
    prompt = Path("concat-sent-cond.toml")
    bundled = (llmcond.base.package.bundled_folder("prompts") / prompt.name).read_text()
    prompt.write_text(bundled.replace("{sentence} {condition}", "{sentence}: {condition}"))
    extract = ["extract", "--model", tiny, "--run", str(run_copy), "--dtype", "float32"]
    assert run([*extract, "--prompt", str(prompt)]) == 0
    assert "the prompt concat-sent-cond has changed" in capsys.readouterr().err
    assert run(["evaluate", "--run", str(run_copy), "--json"]) == 0
    captured = capsys.readouterr()
    assert "left out: the head pca@concat-sent-cond" in captured.err
    assert {row["head"] for row in json.loads(captured.out)["results"]} == {"none"}
    line = run_rejected(capsys, "evaluate", "--head", "pca", "--run", run_copy)
    assert record["prompts"][0]["digest"] in line


# -- start-up ----------------------------------------------------------------------------------


def test_package_runs_as_module_and_in_a_closed_pipe():
    python = f"{sys.executable} -m llmcond"
    for command, expected in (
        ("--version --verbose", "\nextra lora: installed\n"),
        ("models --json", '"bundled": ["minilm-conditions", "minilm-csts", "mpnet-conditions"]'),
        ("prompts | head -1", "\n"),
        ("prompts | true", ""),
        ("prompts >&-", ""),
        ("--print-completion bash", "_shtab_llmcond_embed___out_COMPGEN=_shtab_compgen_files"),
    ):
        process = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {python} {command}"],
            check=True,
            capture_output=True,
            text=True,
        )
        assert expected in process.stdout
        assert process.stderr == ""


def test_heads_of_every_task_are_listed(capsys):
    rows = run_json(capsys, "heads")["heads"]
    assert {"csts", "kgc", "dialogue"} <= {row["task"] for row in rows}
    assert run(["heads"]) == 0
    out = capsys.readouterr().out
    assert [row["name"] for row in rows if row["name"] not in out] == []


# -- invalid input -----------------------------------------------------------------------------

#: Mistakes that need no run, with a part of the message.
INVALID = {
    "": "COMMAND",
    "extrac": "Did you mean 'extract'",
    "extract": "--model",
    "extract --model minilm --prompt concat": "'concat-sent-cond'",
    "extract --model minilm --columns sentence=x": "Did you mean 'sentence",
    "extract --model minilm --rating-range 5 1": "low must be below high",
    "extract --model minilm --instruction-format {text}": "{instruction}",
    "fit-head --head mlp": "llmcond extract --model",
    "fit-head --head mlp --seeds 3": "It is an option of sweep, sweep-lora",
    "embed x.csv y.csv --out v.npy": "unrecognized arguments: y.csv",
    "extract --model minilm --run=": "--run is empty; expected a path",
}
#: Mistakes in options of a run with the head p, of the kind PCA.
INVALID_FOR_RUN = {
    "fit-head --head mpl": "Did you mean 'mlp'",
    "fit-head --head mlp --dim 33": "the features have 32",
    "fit-head --head mlp --prompt cond": "no features of the prompt 'cond'",
    "fit-head --head mlp --set epoch=3": "Did you mean 'epochs'",
    "fit-head --head mlp --name ../../x": "cannot be called",
    "fit-head --head pca --name none@x": "means zero-shot",
    "evaluate --rating-range 0 10": "and --data was not given",
    "evaluate --head mlp": "fit-head --head mlp",
    "evaluate --head none@cond": "Name zero-shot, under every prompt, as none.",
    "similarity a b --condition c --head p --prompt q": "not q",
    "embed texts.csv --out v.npy": "Name the conditions: --condition COL_OR_TEXT.",
}


def test_invalid_arguments_report_one_line(capsys):
    for arguments, expected in INVALID.items():
        assert expected in run_rejected(capsys, *arguments.split())
    assert not Path("runs").exists()


def test_arguments_that_do_not_fit_run_report_one_line(capsys, run_copy, write_rows):
    write_rows([("two men", "park")], "texts.csv", "sentence,place")
    fit = ("fit-head", "--head", "pca", "--dim", "4", "--run", run_copy)
    run_json(capsys, *fit, "--name", "p")
    run_json(capsys, *fit, "--name", "p+c", "--no-subtract")
    for arguments, expected in INVALID_FOR_RUN.items():
        assert expected in run_rejected(capsys, *arguments.split(), "--run", run_copy)
    assert sorted(path.name for path in (run_copy / "heads").iterdir()) == ["p", "p+c"]


def test_folder_without_run_is_rejected(capsys, tiny):
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("precious")
    for command in (["extract", "--model", tiny], ["fit-head", "--head", "mlp"], ["evaluate"]):
        assert "is not a run" in run_rejected(capsys, *command, "--run", "mine")
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]


@pytest.mark.usefixtures("native_16_bit")
def test_run_cannot_be_extracted_with_other_options(
    capsys, run_copy, tiny, tiny_checkpoint, write_rows, small_rows
):
    data = write_rows(small_rows[:30])
    before = (run_copy / "run.json").read_bytes()
    extract = ("extract", "--run", run_copy, "--dtype", "float32", "--model")
    for arguments, messages in (
        ((*extract, tiny_checkpoint(seed=1)), ("holds features of", "weights: ")),
        ((*extract[:-2], "bfloat16", "--model", tiny), ("dtype: 'bfloat16', not 'float32'",)),
        ((*extract, tiny, "--data", data), ("holds the data",)),
        ((*extract, tiny, "--split-seed", "9"), ("with other options",)),
        ((*extract, tiny, "--rating-range", "0", "10"), ("with other options",)),
    ):
        line = run_rejected(capsys, *arguments)
        assert all(message in line for message in messages)
    run_json(capsys, *extract, tiny, "--prompt", "concat-sent-cond")
    assert (run_copy / "run.json").read_bytes() == before


def test_damaged_or_newer_files_of_run_are_reported(capsys, run_copy):
    fit = ("fit-head", "--head", "pca", "--dim", "4", "--run", run_copy)
    run_json(capsys, *fit, "--name", "p")
    manifest = run_copy / "run.json"
    shutil.rmtree(next(run_copy.glob("features/*/vectors.lance")))
    assert "it resumes" in run_rejected(capsys, *fit)
    change_json(manifest, prompts={})
    line = run_rejected(capsys, "analyse", "--run", run_copy)
    assert "has no extracted features yet" in line
    change_json(manifest, format=99)
    assert "newer version" in run_rejected(capsys, "evaluate", "--run", run_copy)


def test_checkpoint_without_tokenizer_leaves_no_run(capsys, tiny):
    broken = Path(shutil.copytree(tiny, "broken"))
    (broken / "tokenizer.json").unlink()
    assert "no tokenizer" in run_rejected(capsys, "extract", "--model", "broken")
    assert not Path("runs/default").exists()


# -- faults of the machine, and signals --------------------------------------------------------


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
    err = capsys.readouterr().err
    assert err.startswith(f"llmcond: error: there is not enough memory{expected}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_panic_of_library_in_rust_reports_one_line(capsys, monkeypatch, tmp_path):
    """safetensors panics if it cannot allocate a tensor, here of a sparse file of 4 TiB."""
    size, path = 2**42, tmp_path / "large.safetensors"
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"large": tensor}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)

    def read(*_):
        with safe_open(path, "numpy") as opened:
            opened.get_tensor("large")

    monkeypatch.setattr("llmcond.cli.run_command", read)
    assert run(["heads"]) == 1
    assert "llmcond: error: there is not enough memory (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "code", "command", "words"),
    [
        ("SIGTERM", 143, "sweep --head mlp", "terminated; stored results are kept, and the same"),
        ("SIGINT", 130, "fit-head --head mlp", "starts from the beginning"),
    ],
)
def test_signal_sets_exit_code_and_message(capsys, monkeypatch, name, code, command, words):
    def wait_for_signal(*_):
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(60)

    monkeypatch.setattr("llmcond.cli.run_command", wait_for_signal)
    assert run(command.split()) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(("encoding", "cup"), [("ascii", r"\u2615"), ("utf-8", "☕")])
def test_characters_that_a_stream_lacks_are_escaped(monkeypatch, tiny_run, encoding, cup):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    similarity = ["similarity", "a dog", "ein Häuschen 中", "--run", str(tiny_run)]
    for form in (["--json"], ["--format", "table"], ["--format", "latex"]):
        assert run([*similarity, "--condition", "é 中 ☕ 😀", *form]) == 0
    assert run(["embed", "☕.csv", "--out", "x.csv"]) == 2
    out.flush()
    err.flush()
    json_line, *tables = out.buffer.getvalue().decode(encoding).splitlines()
    assert "é 中 ☕ 😀" in str(json.loads(json_line))
    assert cup in "".join(tables)
    assert f"{cup}.csv does not exist" in err.buffer.getvalue().decode(encoding)
