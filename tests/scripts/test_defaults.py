"""Every script runs as its docstring shows, here with tiny sizes."""

import csv
import json
import os
from importlib import import_module
from multiprocessing.dummy import Pipe
from threading import Thread
from types import SimpleNamespace

import pytest
from helpers.paths import ROOT

from llmcond import evaluate, extract, fit_head
from llmcond.encoders import EncoderOptions

pytestmark = pytest.mark.usefixtures("one_thread")

#: The arguments of each script, with tiny sizes, and an excerpt of its output.
ARGUMENTS_AND_OUTPUT = {
    "bench_aspects": (
        "--model {tiny} --data {aspects} --values 0 2 --labels 4 --draws 2 --json",
        "| mean of 2 |",
    ),
    "bench_cache": (
        "--model {tiny} --data {rows} --sample 2 --out {tmp}/costs.md",
        "| tri-encoder, hyper-cl |",
    ),
    "bench_clusters": (
        "--model {tiny} --data {classes} --guides 6 --seeds 1",
        "| minilm-csts | language |",
    ),
    "bench_encoders": ("--inputs 2 --layers 1 --folder {tmp}", "| plain loop |"),
    "bench_extract": ("--model {tiny} --inputs 2 --rounds 1", "| llmcond, PyTorch, packed |"),
    "bench_first": ("--rounds 1 --imports", "| json |"),
    "bench_fit": (
        "--rows 32 --epochs 1 --rounds 1 --pairs 64 --steps 1 --sentences 2 --conditions 2",
        "| hypernet-full-mse |",
    ),
    "bench_routed": (
        "--model {tiny} --data {rows} --sentences 2 --conditions 1 2 --rows 4 --rounds 1",
        "| routed |",
    ),
    "bench_search": (
        "--run {run} --head hypernet --sizes 40 --conditions 2 --queries 2 --no-peers",
        "| 40 | 64 | hypernet | llmcond |",
    ),
    "bench_serve": (
        "--model {tiny} --data {rows} --texts 4 --clients 2 --sizes 1 --malformed 40 --requests 20",
        "| llmcond, one call |",
    ),
    "bench_store": ("{tmp}/store --rows 8 --part 3", "8 vectors of 384, 3 a commit: "),
    "bench_train": ("--batch-size 2 --steps 1 --rounds 1", "| llmcond |"),
    "demo": ("--data {rows} --run {tmp}/run", '"spearman_zero_shot"'),
    "golden": ("record {tmp}/golden --only prompts models", "models: exit 0"),
    "make_tickets": ("{tmp}/tickets.csv", "tickets.csv: 360 tickets"),
    "make_weights": ("--out {tmp}", "SHA-256"),
}
#: The additional library that a script's peer needs.
PEER_LIBRARIES = {"bench_serve": "sentence_transformers"}
#: Scripts with separate tests, and modules that scripts import.
OTHER_SCRIPTS = {
    *(
        "fuzz",
        "make_docs",
        "notebooks",
        "prose",
        "bench",
        "common",
        "reproduce",
        "reproduced",
    ),
    *(
        "calibrate_conditions",
        "check_install",
        "release",
        "fuzz_changes",
        "fuzz_services",
        "fuzz_texts",
    ),
    *("make_aspects", "manners", "aspect_figures", "aspect_samples", "pictures"),
    *("make_sample", "make_sample_graph", "make_dialogues", "make_pretrained", "memory_table"),
    "make_credits",
}
#: Scripts that need data that is not in the repository.
PAPER_SCRIPTS = {
    *("reproduce_case", "reproduce_csr", "reproduce_graphs", "reproduce_hypercl"),
    "reproduce_triple",
}


def test_every_script_is_listed():
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert scripts == {*ARGUMENTS_AND_OUTPUT, *OTHER_SCRIPTS, *PAPER_SCRIPTS}


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint):
    return str(tiny_checkpoint(hidden=64))  # the smallest size that all heads of the scripts allow


@pytest.fixture
def classes(tmp_path, small_rows):
    """A folder of texts with three kinds of class labels."""
    folder = tmp_path / "classes"
    folder.mkdir()
    texts = [row[0] for row in small_rows[:48:2]]
    for step, kind in enumerate(("topic", "style", "language"), 1):
        labels = [i // step % 3 for i in range(len(texts))]
        (folder / f"{kind}-labels.json").write_text(json.dumps({"labels": labels}))
        (folder / f"{kind}-data.json").write_text(json.dumps({"texts": texts}))
    return folder


@pytest.fixture
def aspects(tmp_path):
    """A folder of texts with attributes, one set with crossed conditions and one without."""
    folder = tmp_path / "aspects"
    folder.mkdir()
    people, locations = ("men", "women", "children"), ("beach", "park", "street")
    texts = [
        {"text": f"the {who} at the {where}, {n} of them", "attrs": {"who": who, "where": where}}
        for who in people
        for where in locations
        for n in range(3)
    ]
    conditions = {"who": {"text": "the people"}, "where": {"text": "the place"}}
    crossed = {"name": "crossed", "texts": texts, "conds": conditions}
    (folder / "crossed.json").write_text(json.dumps(crossed))
    single = {"texts": texts, "conds": {"who": conditions["who"]}}
    (folder / "single.json").write_text(json.dumps(single))
    return folder


@pytest.fixture(scope="module")
def run_with_separate(tiny, small_rows, tmp_path_factory):
    """A run with a head on separate features."""
    folder = tmp_path_factory.mktemp("separate")
    with (folder / "rows.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("sentence1", "sentence2", "condition", "label")])
        csv.writer(stream).writerows(small_rows)
    data, options = str(folder / "rows.csv"), EncoderOptions(pooling="mean")
    extract(model=tiny, **vars(options), run=folder / "run", data=data, prompt=["separate"])
    fit_head(run=folder / "run", head="hypernet", set={"epochs": "1", "dim": "8", "rank": "4"})
    evaluate(run=folder / "run", predictions=folder / "run" / "predictions.csv")
    return folder / "run"


@pytest.fixture
def threads_for_processes(monkeypatch, tiny):
    """Replace processes, which would import everything again, by threads."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    threads = SimpleNamespace(get_context=lambda _: SimpleNamespace(Process=Thread, Pipe=Pipe))
    for name in ("bench", "bench_serve"):
        monkeypatch.setattr(import_module(name), "multiprocessing", threads)
    monkeypatch.setattr(import_module("bench"), "PRODUCT", 64)
    monkeypatch.setattr(import_module("bench_first"), "WAYS", {"an empty program": ""})
    monkeypatch.setattr(import_module("bench_first"), "COMMAND", ["-c", "import json"])
    for name, size in (("WIDE", 64), ("NARROW", 8), ("DIM", 64)):
        monkeypatch.setattr(import_module("bench_fit"), name, size)
    for name in ("bench", "bench_encoders", "bench_extract", "bench_fit"):
        monkeypatch.setattr(
            import_module(name), "run_in_process", lambda function, *args: function(*args)
        )


@pytest.mark.usefixtures("threads_for_processes")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.script(name)) for name in ARGUMENTS_AND_OUTPUT]
)
def test_script_runs(
    name,
    tiny,
    tmp_path,
    write_rows,
    small_rows,
    aspects,
    classes,
    run_with_separate,
    monkeypatch,
    capsys,
):
    if name in PEER_LIBRARIES:
        pytest.importorskip(PEER_LIBRARIES[name])
    sizes, expected = ARGUMENTS_AND_OUTPUT[name]
    rows = write_rows(small_rows[:24])
    arguments = sizes.format(
        tmp=tmp_path, tiny=tiny, rows=rows, aspects=aspects, classes=classes, run=run_with_separate
    )
    monkeypatch.setattr("sys.argv", [name, *arguments.split()])
    assert import_module(name).main() in (None, 0)
    assert expected in capsys.readouterr().out


@pytest.mark.usefixtures("threads_for_processes")
@pytest.mark.parametrize("name", sorted(PAPER_SCRIPTS))
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "required: --encoders"),
        ("--encoders minilm --data CSTS_FOLDER", "CSTS_FOLDER does not exist. Expected a "),
    ],
)
def test_missing_arguments_or_data_are_reported(
    name, arguments, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    try:
        code = import_module(name).main(arguments.split())
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert expected in capsys.readouterr().err


def test_measurement_runs_in_new_process(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    run_in_process = import_module("bench").run_in_process
    assert run_in_process(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        run_in_process(divmod, 1, 0)
