"""The dry run of an extraction predicts what the extraction does, and writes nothing."""

import json
import shutil

import lance
import pytest
from helpers.commands import write_pairs
from helpers.identities import IDENTITY

from llmcond import extract
from llmcond.cli import run
from llmcond.encoders.spec import EncoderInput
from llmcond.features.extract import count_missing
from llmcond.features.pool import Workers
from llmcond.features.store import FeatureStore
from llmcond.features.workers import estimate_commits
from llmcond.runs import open_any_run
from llmcond.workflows.extract import _estimate_seconds

FLAGS = ("--pooling", "mean", "--normalize", "--dtype", "float32", "--device", "cpu")
PROMPTS = ("concat-cond-sent", "routed")


@pytest.fixture(scope="module")
def settings(model, tmp_path_factory):
    """Settings with data of 4,002 distinct inputs per prompt, of which a sample is tokenised."""
    rows = []
    for i in range(2_000):
        second = " ".join(["dogs walk", *["on at"] * (i % 9), f"number {i}"])
        rows.append((f"two men play number {i}", second, "the place", 1 + i % 5))
    data = write_pairs(tmp_path_factory.mktemp("data") / "rows.csv", rows)
    encoder = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
    return {"model": model, "data": str(data), **encoder}


@pytest.fixture(scope="module")
def extracted(one_thread, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extracted") / "run"
    return folder, extract(**settings, run=folder, prompt=PROMPTS)


def test_plan_matches_extraction(settings, extracted, tmp_path):
    folder, result = extracted
    plan = extract(plan=True, **settings, run=tmp_path / "run", prompt=PROMPTS, price=2.0)
    assert list(tmp_path.iterdir()) == []
    for name, extraction in result.prompts.items():
        assert plan.n_inputs[name] == plan.n_missing[name] == extraction.n_computed
    tokens = sum(extraction.n_tokens for extraction in result.prompts.values())
    assert plan.tokens.low <= tokens <= plan.tokens.high
    assert plan.tokens.high - plan.tokens.low < 0.1 * tokens
    dataset = open_any_run(folder).store().folder / "vectors.lance"
    size = sum(file.stat().st_size for file in (dataset / "data").iterdir())
    assert size == pytest.approx(plan.n_bytes, rel=0.25)
    assert plan.commits == plan.fragments == lance.dataset(str(dataset)).version == 8
    assert plan.cost.value == pytest.approx(2 * plan.hours.value)
    encoding = plan.tokens.value / plan.tokens_per_second
    assert plan.loading_seconds > 0
    assert 3600 * plan.hours.value == pytest.approx(encoding + plan.workers * plan.loading_seconds)
    assert "loading" in [row["plan"] for row in plan.rows()]


def test_plan_counts_a_sentence_once_for_all_its_conditions(settings, tmp_path):
    pairs = [(f"two men play number {i}", f"dogs walk number {i}") for i in range(100)]
    rows = [(*pair, f"the place {number}", 3) for pair in pairs for number in range(10)]
    options = {**settings, "data": str(write_pairs(tmp_path / "rows.csv", rows))}
    speed = {"model": settings["model"], "precision": "float32", "way": "packed", "inputs": "C-STS"}
    speed |= {"n": 10, "tokens": 100, "tokens_per_second": 1_000.0}
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"machine": {"cpu": "a CPU"}, "speeds": [speed]}))
    plan = extract(plan=True, **options, run=tmp_path / "run", prompt="routed", bench=bench)
    extraction = extract(**options, run=tmp_path / "run", prompt="routed").prompts["routed"]
    assert plan.n_missing == {"routed": extraction.n_computed}
    assert extraction.n_tokens == plan.tokens.value > 2_000 * 5
    # 200 sentences and 10 conditions of at most 8 tokens go through the network.
    assert 3_600 * plan.hours.value < 210 * 8 / 1_000


def test_plan_counts_only_missing_inputs(settings, extracted, tmp_path):
    folder = shutil.copytree(extracted[0], tmp_path / "run")
    before = {path: path.stat().st_mtime for path in folder.rglob("*")}
    plan = extract(plan=True, **settings, run=folder, prompt=(*PROMPTS, "concat-sent-cond"))
    assert plan.n_missing == {"concat-cond-sent": 0, "routed": 0, "concat-sent-cond": 4_000}
    assert {path: path.stat().st_mtime for path in folder.rglob("*")} == before
    plan = extract(plan=True, **settings, run=folder, prompt=PROMPTS)
    assert (plan.tokens.value, plan.hours, plan.fragments) == (0, None, 0)
    assert "time" not in [row["plan"] for row in plan.rows()]


def test_speed_excludes_warmup_and_outliers(tmp_path):
    """The first call takes ten minutes, and every third call is seven seconds slower."""
    inputs = [EncoderInput("", f"text {number:04d}") for number in range(4_000)]
    missing = count_missing(FeatureStore(tmp_path / "none", IDENTITY, "float16"), inputs, 500)
    calls = []

    def encode(items):
        calls.append(len(items))
        disturbance = 600 if len(calls) == 1 else 7 * (len(calls) % 3 == 0)
        return disturbance + sum(item.size for item in items) / 9_000

    assert _estimate_seconds(missing, encode) == pytest.approx(4)
    assert max(calls) > 500  # samples grow until a call takes half a second


def test_hours_follow_speed_of_benchmark(settings, tmp_path):
    speed = {"model": settings["model"], "precision": "float32", "way": "packed", "inputs": "C-STS"}
    speeds = [
        {**speed, "n": 10, "tokens": 100, "tokens_per_second": 1_000.0},
        {**speed, "n": 10, "tokens": 5_000, "tokens_per_second": 3_000.0},
        {**speed, "n": 10, "tokens": 100, "tokens_per_second": 9.0, "way": "plain loop"},
    ]
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"machine": {"cpu": "a CPU"}, "speeds": speeds}))
    options = {**settings, "prompt": "concat-sent-cond", "bench": bench}
    plan = extract(plan=True, **options, run=tmp_path / "run", scale="ray", actors=4)
    assert plan.tokens_per_second == 1_000  # the speed with inputs of similar length
    assert plan.rate_of.startswith("a CPU, C-STS")
    assert plan.hours.value == pytest.approx(plan.tokens.value / 1_000 / 3_600)
    assert plan.wall_hours.value == pytest.approx(plan.hours.value / 4)
    assert plan.rows()[-1]["plan"] == "time, 4 at a time"


def test_sixty_four_actors_commit_every_forty_seconds():
    for hours, gpus, expected in (
        (64 * 3.94, 1, 30_644),  # items of 64 parts of 512 rows, except the first one
        (64 * 0.1, 0, 15_385),  # items of 64 parts of 1,024 rows, except the first one
        (10_000, 0, 976_563),  # a part takes longer than ten seconds
    ):
        workers = Workers(64, "auto", gpus)
        assert estimate_commits(10**9, 3_600 * hours / 64, workers, 64) == expected


def test_invalid_options_report_one_line(capsys, settings, extracted, write_rows, tmp_path):
    other = write_rows([(f"a dog {i}", "a cat", "the place", i) for i in range(1, 6)])
    empty = tmp_path / "bench.json"
    empty.write_text('{"machine": {"cpu": "a CPU"}, "speeds": []}')
    on_gpus = ("--scale", "ray", "--gpus-per-actor", "1", "--dtype", "bfloat16")
    new, plan = ("--run", tmp_path / "run"), "--plan"
    old = ("--run", extracted[0], *FLAGS)
    for options, message in (
        ((*new, plan, "--bench", empty), "has no speed of"),
        ((*new, plan, *on_gpus), "no GPU to measure the speed on. Give --bench FILE"),
        ((*old, plan, "--data", other), "has other examples"),
        ((*old, "--data", other), "has other examples"),
        ((*old, plan, "--store", tmp_path / "store"), "stores features in"),
    ):
        arguments = ("extract", "--model", settings["model"], *options)
        assert run([str(argument) for argument in arguments]) == 2
        (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
        assert message in line
