"""The dry run of an extraction says what the extraction then does, and writes nothing."""

import json
import shutil

import pytest

from llmcond.cli import run
from llmcond.data.datasets import DataOptions
from llmcond.encoders import EncoderOptions
from llmcond.runs import open_any_run
from llmcond.scale.pool import Cluster
from llmcond.workflows.extract import extract
from llmcond.workflows.plan import plan

OPTIONS = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=True)
PROMPTS = ("concat-cond-sent", "routed")


@pytest.fixture(scope="module")
def given(tiny_checkpoint, tmp_path_factory):
    """Rows of 6,002 distinct inputs under a prompt, of which some are tokenised."""
    data = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    for i in range(3_000):
        second = " ".join(["dogs walk", *["on at"] * (i % 9), f"number {i}"])
        lines.append(f"two men play number {i},{second},the place,{1 + i % 5}")
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"model": str(tiny_checkpoint()), "options": OPTIONS, "data": DataOptions(str(data))}


@pytest.fixture(scope="module")
def extracted(given, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extracted") / "run"
    return folder, extract(**given, run_folder=folder, prompts=PROMPTS)


def test_what_is_planned_is_done(given, extracted, tmp_path):
    folder, done = extracted
    found = plan(**given, run_folder=tmp_path / "run", prompts=PROMPTS, price=2.0)
    for name, extraction in done.prompts.items():
        assert found.n_inputs[name] == found.n_missing[name] == extraction.n_computed
    tokens = sum(extraction.n_tokens for extraction in done.prompts.values())
    assert found.tokens.low <= tokens <= found.tokens.high
    assert found.tokens.high - found.tokens.low < 0.1 * tokens
    files = (open_any_run(folder).store().folder / "vectors.lance" / "data").iterdir()
    assert sum(file.stat().st_size for file in files) == pytest.approx(found.n_bytes, rel=0.25)
    assert found.cost.value == pytest.approx(2 * found.hours.value)
    assert found.commits == 12
    assert list(tmp_path.iterdir()) == []


def test_only_what_a_run_lacks_is_planned(given, extracted, tmp_path):
    folder = shutil.copytree(extracted[0], tmp_path / "run")
    before = {path: path.stat().st_mtime for path in folder.rglob("*")}
    prompts = (*PROMPTS, "concat-sent-cond")
    found = plan(**given, run_folder=folder, prompts=prompts)
    assert found.n_missing == {"concat-cond-sent": 0, "routed": 0, "concat-sent-cond": 6_000}
    assert {path: path.stat().st_mtime for path in folder.rglob("*")} == before
    done = plan(**given, run_folder=folder, prompts=PROMPTS)
    assert (done.tokens.value, done.hours, done.fragments) == (0, None, 0)
    assert "hours" not in [row["plan"] for row in done.rows()]


def record(tmp_path, **changes):
    speed = {"model": "someone", "precision": "float32", "way": "packed", "inputs": "C-STS"}
    speeds = [
        {**speed, "n": 10, "tokens": 100, "tokens_per_second": 1_000.0, **changes},
        {**speed, "n": 10, "tokens": 5_000, "tokens_per_second": 3_000.0, **changes},
        {**speed, "n": 10, "tokens": 100, "tokens_per_second": 9.0, "way": "plain loop"},
    ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"machine": {"cpu": "a CPU"}, "speeds": speeds}))
    return path


def test_hours_are_those_of_a_recorded_machine(given, tmp_path):
    bench = record(tmp_path, model=given["model"])
    found = plan(**given, run_folder=tmp_path / "run", bench=bench, cluster=Cluster(actors=4))
    assert found.tokens_per_second == 1_000  # of inputs that are about as long
    assert found.rate_of.startswith("a CPU, C-STS")
    assert found.hours.value == pytest.approx(found.tokens.value / 1_000 / 3_600)
    assert found.wall_hours.value == pytest.approx(found.hours.value / 4)
    assert found.fragments == 6  # of a part each: that takes more than ten seconds
    assert found.rows()[-1] == {"plan": "fragments, commits", "": f"6, {found.commits}"}


def test_wrong_choices_are_one_line(capsys, given, tmp_path):
    bench = record(tmp_path)
    command = ["extract", "--model", given["model"], "--run", str(tmp_path / "run")]
    for options, words in (
        (["--price", "1"], "--price is for --plan"),
        (["--plan", "--price", "-1"], "price is -1; it must be at least 0"),
        (["--plan", "--bench", str(bench)], "has no speed of"),
        (
            ["--plan", "--scale", "ray", "--gpus-per-actor", "1", "--dtype", "bfloat16"],
            "no GPU to try the speed on. Give --bench FILE",
        ),
        (["--plan", "--bench", str(tmp_path / "none.json")], "does not exist"),
    ):
        assert run([*command, *options]) == 2
        (line,) = [own for own in capsys.readouterr().err.splitlines() if "error" in own]
        assert words in line
