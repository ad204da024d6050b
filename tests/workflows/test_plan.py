"""The dry run of an extraction predicts what the extraction does, and writes nothing."""

import json
import random
import shutil

import lance
import pytest
from helpers.identities import IDENTITY

from llmcond import extract
from llmcond.cli import run
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import LlmcondError
from llmcond.features.missing import count_missing
from llmcond.features.store import FeatureStore, row_bytes
from llmcond.runs import open_any_run
from llmcond.scale.extraction import estimate_commits
from llmcond.scale.pool import Workers
from llmcond.workflows.extract import _count_tokens, _estimate_seconds, _estimate_tokens

OPTIONS = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=True)
PROMPTS = ("concat-cond-sent", "routed")


@pytest.fixture(scope="module")
def settings(tiny_checkpoint, tmp_path_factory):
    """Settings with data of 6,002 distinct inputs per prompt, of which a sample is tokenised."""
    data = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    for i in range(3_000):
        second = " ".join(["dogs walk", *["on at"] * (i % 9), f"number {i}"])
        lines.append(f"two men play number {i},{second},the place,{1 + i % 5}")
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"model": str(tiny_checkpoint()), "data": str(data), **vars(OPTIONS)}


@pytest.fixture(scope="module")
def extracted_run(one_thread, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extracted") / "run"
    return folder, extract(**settings, run=folder, prompt=PROMPTS)


def test_plan_matches_extraction(settings, extracted_run, tmp_path):
    folder, result = extracted_run
    plan = extract(plan=True, **settings, run=tmp_path / "run", prompt=PROMPTS, price=2.0)
    for name, extraction in result.prompts.items():
        assert plan.n_inputs[name] == plan.n_missing[name] == extraction.n_computed
    tokens = sum(extraction.n_tokens for extraction in result.prompts.values())
    assert plan.tokens.low <= tokens <= plan.tokens.high
    assert plan.tokens.high - plan.tokens.low < 0.1 * tokens
    files = (open_any_run(folder).store().folder / "vectors.lance" / "data").iterdir()
    assert sum(file.stat().st_size for file in files) == pytest.approx(plan.n_bytes, rel=0.25)
    assert plan.cost.value == pytest.approx(2 * plan.hours.value)
    encoding = plan.tokens.value / plan.tokens_per_second
    assert plan.loading_seconds > 0
    assert 3600 * plan.hours.value == pytest.approx(encoding + plan.workers * plan.loading_seconds)
    assert "loading" in [row["plan"] for row in plan.rows()]
    dataset = lance.dataset(str(open_any_run(folder).store().folder / "vectors.lance"))
    assert plan.commits == plan.fragments == dataset.version == 12
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("task", ["csts", "dialogue", "kgc"])
def test_plan_supports_every_task(settings, task, tmp_path):
    """The feature store is outside the run, and planning does not create it either."""
    options = {**settings, "data": None, "task": task, "store": str(tmp_path / "store")}
    plan = extract(plan=True, **options, run=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    result = extract(**options, run=tmp_path / "run")
    ((name, extraction),) = result.prompts.items()
    assert plan.n_missing == {name: extraction.n_computed}
    finished_run = open_any_run(tmp_path / "run")
    # Truncated inputs would count with their truncated length.
    assert extraction.n_truncated == 0
    assert plan.tokens.low <= extraction.n_tokens <= plan.tokens.high
    assert plan.n_bytes == round(len(finished_run.store()) * row_bytes(plan.dim, "float16"))
    assert finished_run.store().folder.parent == tmp_path / "store"
    second_plan = extract(plan=True, **options, run=tmp_path / "run")
    assert sum(second_plan.n_missing.values()) == 0


def test_token_intervals_cover_actual_count(settings, tmp_path):
    """The data is periodic: each text has two conditions, and a short text precedes it."""
    resolved = resolve(settings["model"], OPTIONS)
    store, n_covered = FeatureStore(tmp_path / "none", resolved.identity, "float16"), 0
    for seed in range(20):
        lengths = random.Random(seed).choices(range(12), k=625)
        texts = [f"{seed} number {i} " + "walk " * n for i, n in enumerate(lengths)]
        long_inputs = [
            EncoderInput("", prefix + text) for text in texts for prefix in ("", "the place ")
        ]
        inputs = [
            item
            for long_input in long_inputs
            for item in (EncoderInput("", f"{long_input.key.hex()[:4]}"), long_input)
        ]
        inputs = list(dict.fromkeys(inputs))
        estimate = _estimate_tokens(resolved, count_missing(store, inputs, 500))
        n_covered += estimate.low <= _count_tokens(resolved, inputs).sum() <= estimate.high
        assert estimate.high - estimate.low > 0
    assert n_covered >= 17


def test_plan_and_extraction_reject_same_options(settings, extracted_run, capsys, tmp_path):
    folder = extracted_run[0]
    other_data = tmp_path / "other.csv"
    rows = [f"a dog {i},a cat {i},the place,{i}" for i in range(1, 6)]
    other_data.write_text("\n".join(["sentence1,sentence2,condition,label", *rows]))
    fixed = ["--pooling", "mean", "--normalize", "--dtype", "float32", "--device", "cpu"]
    command = ["extract", "--plan", "--model", settings["model"], "--run", str(folder), *fixed]
    for options, message in (
        (["--data", str(other_data)], "has other examples"),
        (["--store", str(tmp_path / "store")], "stores features in"),
        (["--store-dtype", "float32"], "stores features as float16"),
        (["--task", "kgc"], "is a run of the task csts"),
    ):
        for arguments in (command, [option for option in command if option != "--plan"]):
            assert run([*arguments, *options]) == 2
            (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
            assert message in line


def test_plan_counts_only_missing_inputs(settings, extracted_run, tmp_path):
    folder = shutil.copytree(extracted_run[0], tmp_path / "run")
    before = {path: path.stat().st_mtime for path in folder.rglob("*")}
    prompts = (*PROMPTS, "concat-sent-cond")
    plan = extract(plan=True, **settings, run=folder, prompt=prompts)
    assert plan.n_missing == {"concat-cond-sent": 0, "routed": 0, "concat-sent-cond": 6_000}
    assert {path: path.stat().st_mtime for path in folder.rglob("*")} == before
    second_plan = extract(plan=True, **settings, run=folder, prompt=PROMPTS)
    assert (second_plan.tokens.value, second_plan.hours, second_plan.fragments) == (0, None, 0)
    assert "time" not in [row["plan"] for row in second_plan.rows()]


def write_benchmark(tmp_path, **changes):
    speed = {"model": "someone", "precision": "float32", "way": "packed", "inputs": "C-STS"}
    speeds = [
        {**speed, "n": 10, "tokens": 100, "tokens_per_second": 1_000.0, **changes},
        {**speed, "n": 10, "tokens": 5_000, "tokens_per_second": 3_000.0, **changes},
        {**speed, "n": 10, "tokens": 100, "tokens_per_second": 9.0, "way": "plain loop"},
    ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"machine": {"cpu": "a CPU"}, "speeds": speeds}))
    return path


def test_hours_follow_speed_of_benchmark(settings, tmp_path):
    bench = write_benchmark(tmp_path, model=settings["model"])
    plan = extract(plan=True, **settings, run=tmp_path / "run", bench=bench, scale="ray", actors=4)
    assert plan.tokens_per_second == 1_000  # the speed with inputs of similar length
    assert plan.rate_of.startswith("a CPU, C-STS")
    assert plan.hours.value == pytest.approx(plan.tokens.value / 1_000 / 3_600)
    assert plan.wall_hours.value == pytest.approx(plan.hours.value / 4)
    assert plan.fragments == 6  # one for each part, because a part takes more than ten seconds
    assert plan.rows()[-1]["plan"] == "time, 4 at a time"


@pytest.mark.parametrize(
    ("hours", "gpus", "expected"),
    [
        (64 * 3.94, 1, 30_644),  # items of 64 parts of 512 rows, except the first one
        (64 * 0.1, 0, 15_385),  # items of 64 parts of 1,024 rows, except the first one
        (10_000, 0, 976_563),  # a part takes longer than ten seconds
    ],
)
def test_sixty_four_actors_commit_every_forty_seconds(hours, gpus, expected):
    workers = Workers(64, "auto", gpus)
    assert estimate_commits(10**9, 3_600 * hours / 64, workers, 64) == expected


def test_invalid_benchmark_is_rejected(settings, tmp_path):
    bench = tmp_path / "bench.json"
    for text, message in (
        ('{"speeds": []}', "the key 'machine' is missing"),
        (
            '{"machine": {}, "speeds": [{"model": "minilm"}]}',
            "the key 'speeds.0.precision' is missing",
        ),
        ("[1]", "holds a JSON list"),
    ):
        bench.write_text(text)
        with pytest.raises(LlmcondError, match=message):
            extract(plan=True, **settings, run=tmp_path / "run", bench=bench)


def test_invalid_plan_options_report_one_line(capsys, settings, tmp_path):
    bench = write_benchmark(tmp_path)
    command = ["extract", "--model", settings["model"], "--run", str(tmp_path / "run")]
    for options, message in (
        (["--price", "1"], "--price needs --plan"),
        (["--plan", "--price", "-1"], "price is -1; it must be at least 0"),
        (["--plan", "--price", "nan"], "price is nan"),
        (["--plan", "--bench", str(bench)], "has no speed of"),
        (
            ["--plan", "--scale", "ray", "--gpus-per-actor", "1", "--dtype", "bfloat16"],
            "no GPU to measure the speed on. Give --bench FILE",
        ),
        (["--plan", "--bench", str(tmp_path / "none.json")], "does not exist"),
    ):
        assert run([*command, *options]) == 2
        (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
        assert message in line
