"""The dry run of an extraction says what the extraction then does, and writes nothing."""

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
from llmcond.features.fragments import row_bytes
from llmcond.features.missing import count_missing
from llmcond.features.store import FeatureStore
from llmcond.runs import open_any_run
from llmcond.scale.extraction import estimate_commits
from llmcond.scale.pool import RayCluster
from llmcond.workflows.plan import _count_tokens, _estimate_seconds, _estimate_tokens

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
    return {"model": str(tiny_checkpoint()), "data": str(data), **vars(OPTIONS)}


@pytest.fixture(scope="module")
def extracted(one_thread, given, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extracted") / "run"
    return folder, extract(**given, run=folder, prompt=PROMPTS)


def test_what_is_planned_is_done(given, extracted, tmp_path):
    folder, done = extracted
    found = extract(plan=True, **given, run=tmp_path / "run", prompt=PROMPTS, price=2.0)
    for name, extraction in done.prompts.items():
        assert found.n_inputs[name] == found.n_missing[name] == extraction.n_computed
    tokens = sum(extraction.n_tokens for extraction in done.prompts.values())
    assert found.tokens.low <= tokens <= found.tokens.high
    assert found.tokens.high - found.tokens.low < 0.1 * tokens
    files = (open_any_run(folder).store().folder / "vectors.lance" / "data").iterdir()
    assert sum(file.stat().st_size for file in files) == pytest.approx(found.n_bytes, rel=0.25)
    assert found.cost.value == pytest.approx(2 * found.hours.value)
    dataset = lance.dataset(str(open_any_run(folder).store().folder / "vectors.lance"))
    assert found.commits == found.fragments == dataset.version == 12
    assert list(tmp_path.iterdir()) == []


def test_the_speed_is_that_of_a_warm_model(tmp_path):
    """The first call takes ten minutes, and every third one is disturbed."""
    inputs = [EncoderInput("", f"text {number:04d}") for number in range(4_000)]
    missing = count_missing(FeatureStore(tmp_path / "none", IDENTITY, "float16"), inputs, 500)
    calls = []

    def encode(items):
        calls.append(len(items))
        disturbance = 600 if len(calls) == 1 else 7 * (len(calls) % 3 == 0)
        return disturbance + sum(item.size for item in items) / 9_000

    assert _estimate_seconds(missing, encode) == pytest.approx(4)
    assert max(calls) > 500  # so many that they take half a second


@pytest.mark.parametrize("task", ["csts", "dialogue", "kgc"])
def test_every_task_is_planned(given, task, tmp_path):
    """Of the bundled samples, with a store elsewhere, that is not made either."""
    asked = {**given, "data": None, "task": task, "store": str(tmp_path / "store")}
    found = extract(plan=True, **asked, run=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    done = extract(**asked, run=tmp_path / "run")
    ((name, extraction),) = done.prompts.items()
    assert found.n_missing == {name: extraction.n_computed}
    made = open_any_run(tmp_path / "run")
    # Truncated ones are counted as they are cut.
    assert extraction.n_truncated == 0
    assert found.tokens.low <= extraction.n_tokens <= found.tokens.high
    assert found.n_bytes == round(len(made.store()) * row_bytes(found.dim, "float16"))
    assert made.store().folder.parent == tmp_path / "store"
    again = extract(plan=True, **asked, run=tmp_path / "run")
    assert sum(again.n_missing.values()) == 0


def test_intervals_hold_what_they_say(given, tmp_path):
    """Of data with a rhythm: each text comes under two conditions, and behind a short one."""
    resolved = resolve(given["model"], OPTIONS)
    store, right = FeatureStore(tmp_path / "none", resolved.identity, "float16"), 0
    for part in range(20):
        lengths = random.Random(part).choices(range(12), k=625)
        texts = [f"{part} number {i} " + "walk " * n for i, n in enumerate(lengths)]
        own = [EncoderInput("", also + text) for text in texts for also in ("", "the place ")]
        inputs = [one for item in own for one in (EncoderInput("", f"{item.key.hex()[:4]}"), item)]
        inputs = list(dict.fromkeys(inputs))
        found = _estimate_tokens(resolved, count_missing(store, inputs, 500))
        right += found.low <= _count_tokens(resolved, inputs).sum() <= found.high
        assert found.high - found.low > 0
    assert right >= 17


def test_what_the_extraction_would_refuse_is_refused(given, extracted, capsys, tmp_path):
    folder = extracted[0]
    other = tmp_path / "other.csv"
    rows = [f"a dog {i},a cat {i},the place,{i}" for i in range(1, 6)]
    other.write_text("\n".join(["sentence1,sentence2,condition,label", *rows]))
    fixed = ["--pooling", "mean", "--normalize", "--dtype", "float32", "--device", "cpu"]
    command = ["extract", "--plan", "--model", given["model"], "--run", str(folder), *fixed]
    for options, words in (
        (["--data", str(other)], "has other examples"),
        (["--store", str(tmp_path / "store")], "stores features in"),
        (["--store-dtype", "float32"], "stores features as float16"),
        (["--task", "kgc"], "is a run of the task csts"),
    ):
        for planned in (command, [own for own in command if own != "--plan"]):
            assert run([*planned, *options]) == 2
            (line,) = [own for own in capsys.readouterr().err.splitlines() if "error" in own]
            assert words in line


def test_only_what_a_run_lacks_is_planned(given, extracted, tmp_path):
    folder = shutil.copytree(extracted[0], tmp_path / "run")
    before = {path: path.stat().st_mtime for path in folder.rglob("*")}
    prompts = (*PROMPTS, "concat-sent-cond")
    found = extract(plan=True, **given, run=folder, prompt=prompts)
    assert found.n_missing == {"concat-cond-sent": 0, "routed": 0, "concat-sent-cond": 6_000}
    assert {path: path.stat().st_mtime for path in folder.rglob("*")} == before
    done = extract(plan=True, **given, run=folder, prompt=PROMPTS)
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
    found = extract(plan=True, **given, run=tmp_path / "run", bench=bench, scale="ray", actors=4)
    assert found.tokens_per_second == 1_000  # of inputs that are about as long
    assert found.rate_of.startswith("a CPU, C-STS")
    assert found.hours.value == pytest.approx(found.tokens.value / 1_000 / 3_600)
    assert found.wall_hours.value == pytest.approx(found.hours.value / 4)
    assert found.fragments == 6  # of a part each: that takes more than ten seconds
    assert found.rows()[-1] == {"plan": "fragments, commits", "": f"6, {found.commits}"}


@pytest.mark.parametrize(
    ("hours", "gpus", "expected"),
    [
        (64 * 3.94, 1, (93_128, 5_821)),  # items of 21 parts of 512 rows
        (64 * 0.1, 0, (15_385, 962)),  # of 64 parts of 1,024, but for the first
        (10_000, 0, (976_563, 61_036)),  # a part takes longer than ten seconds
    ],
)
def test_fragments_are_what_actors_write_in_ten_seconds(hours, gpus, expected):
    cluster = RayCluster(actors=64, gpus_per_actor=gpus)
    assert estimate_commits(10**9, 3_600 * hours / 64, cluster, 64) == expected


def test_records_that_are_none_are_one_line(given, tmp_path):
    bench = tmp_path / "bench.json"
    for text, words in (
        ('{"speeds": []}', "the key 'machine' is missing"),
        (
            '{"machine": {}, "speeds": [{"model": "minilm"}]}',
            "the key 'speeds.0.precision' is missing",
        ),
        ("[1]", "holds a JSON list"),
    ):
        bench.write_text(text)
        with pytest.raises(LlmcondError, match=words):
            extract(plan=True, **given, run=tmp_path / "run", bench=bench)


def test_wrong_choices_are_one_line(capsys, given, tmp_path):
    bench = record(tmp_path)
    command = ["extract", "--model", given["model"], "--run", str(tmp_path / "run")]
    for options, words in (
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
        (line,) = [own for own in capsys.readouterr().err.splitlines() if "error" in own]
        assert words in line
