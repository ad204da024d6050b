"""Commands with --device cuda, on the stand-in for a GPU: the answers of the CPU."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import ok
from helpers.graphs import write_graph
from helpers.serving import served
from helpers.standin import StandIn

from llmcond.cli import run
from llmcond.runs.embedder import load_embedder
from llmcond.serving.model import ServedModel

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("--set", "epochs=2", "batch_size=16", "dropout=0")


def on_both(capsys: Any, *command: object) -> list[Any]:
    """Return what a command answers on the CPU, and on a GPU."""
    found = [ok(capsys, *command, "--device", "cpu")]
    with StandIn() as gpu:
        found.append(ok(capsys, *command, "--device", "cuda"))
        assert gpu.n_launches > 0
    return found


def close(first: Any, second: Any, apart: float = 1e-3) -> bool:
    """Return whether two answers are the same but for rounding, times and what computed."""
    if isinstance(first, dict):
        both = first.keys() == second.keys()
        timed = ("seconds", "device", "runtime")
        keys = [key for key in first if not any(word in key for word in timed)]
        return both and all(close(first[key], second[key], apart) for key in keys)
    if isinstance(first, list):
        return len(first) == len(second) and all(
            close(*pair, apart) for pair in zip(first, second, strict=True)
        )
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) <= apart
    return first == second


@pytest.fixture
def fitted(tiny_run: Path, tmp_path: Path, capsys: Any) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    ok(capsys, "fit-head", "--run", folder, "--head", "linear", "--device", "cpu", *SMALL)
    return folder


@pytest.mark.parametrize("precision", [("--dtype", "float32"), ()])
def test_features_heads_and_scores(
    tmp_path: Path,
    capsys: Any,
    tiny_checkpoint: Callable[..., Path],
    small_rows: Any,
    write_rows: Any,
    precision: tuple[str, ...],
) -> None:
    data, model = write_rows(small_rows), tiny_checkpoint("mistral")
    scores = []
    for device in ("cpu", "cuda"):
        run = ("--run", tmp_path / device)
        with StandIn() as gpu:
            encoder = ("--model", model, "--data", data, "--pooling", "mean", *precision)
            prompts = ("--prompt", "concat-sent-cond", "separate")
            ok(capsys, "extract", *run, *encoder, *prompts, "--device", device)
            assert bool(gpu.n_launches) == (device == "cuda")
            fit = ("fit-head", *run, "--device", device, *SMALL)
            ok(capsys, *fit, "--head", "mlp", "--dim", "16", "--prompt", "concat-sent-cond")
            ok(capsys, *fit, "rank=4", "--head", "hypernet", "--prompt", "separate")
            if device == "cuda":
                assert not [one for one in gpu.unpinned if "heads/batches" in one], gpu.report()
                waits = [one for one in gpu.waits if "heads/conditioned" in one]
                assert [one.partition(",")[0] for one in waits] == ["to(cpu)"], gpu.report()
        scores.append(ok(capsys, "evaluate", *run)["results"])
    assert len(scores[0]) == len(scores[1]) >= 3
    if precision:
        for mine, theirs in zip(*scores, strict=True):
            assert mine["spearman"] == pytest.approx(theirs["spearman"], abs=0.05)


def test_similarity_and_embeddings(fitted: Path, tmp_path: Path, capsys: Any) -> None:
    texts = ("two men play in the park", "two dogs sit in the park")
    condition = ("--condition", "the place")
    mine, theirs = on_both(capsys, "similarity", *texts, *condition, "--run", fitted)
    assert close(mine, theirs)


def test_an_index_is_made_and_searched(fitted: Path, tmp_path: Path, capsys: Any) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("two men play in the park\nchildren sit at the beach\ndogs in the rain\n")
    found = []
    for device in ("cpu", "cuda"):
        place = tmp_path / device
        with StandIn():
            own = ("--run", fitted, "--device", device)
            ok(capsys, "index", texts, "--out", place, *own)
            query = ("search", place, "dogs at the beach", "--condition", "the place")
            found.append(ok(capsys, *query, "-k", "3", "--device", device)["results"])
    assert close(*found)


def test_a_server_answers(fitted: Path) -> None:
    texts = ["two men play in the park", "children sit at the beach"]
    body = {"input": texts, "condition": "the place"}
    answers = []
    for device in ("cpu", "cuda"):
        with StandIn() as gpu:
            model = ServedModel(load_embedder(fitted, device=device))
            with served(model, max_client_batch_size=50, payload_limit=20_000) as (client, _):
                gpu.reset()
                found = client.post("/v1/embeddings", body).json["data"]
                answers.append([one["embedding"] for one in found])
            assert bool(gpu.n_launches) == (device == "cuda")
    np.testing.assert_allclose(*answers, atol=1e-4)


def test_a_graph_is_fitted_and_completed(
    tmp_path: Path, capsys: Any, tiny_checkpoint: Callable[..., Path]
) -> None:
    graph, model = write_graph(tmp_path / "graph"), tiny_checkpoint()
    found = []
    for device in ("cpu", "cuda"):
        run = ("--run", tmp_path / device, "--device", device)
        with StandIn():
            data = ("--task", "kgc", "--model", model, "--data", graph, "--pooling", "mean")
            ok(capsys, "extract", *data, *run, "--dtype", "float32")
            ok(capsys, "fit-head", *run, "--head", "hypernet-full", *SMALL)
            query = ("--head-entity", "p00", "--relation", "_is_at", "-k", "3")
            found.append(ok(capsys, "complete", *query, *run))
    assert close(*found, apart=2e-2)


def test_a_dialogue_is_replied_to(dialogue_run: Path, tmp_path: Path, capsys: Any) -> None:
    replies = tmp_path / "replies.txt"
    replies.write_text("the park on red\nsad\ntwo men play in the street\n")
    command = ("reply", "two men ?", "in the park .", "--candidates", replies)
    mine, theirs = on_both(capsys, *command, "--run", dialogue_run, "--head", "weighted")
    assert close(mine, theirs)


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_adapters_are_trained(
    tmp_path: Path,
    capsys: Any,
    tiny_checkpoint: Callable[..., Path],
    small_rows: Any,
    write_rows: Any,
    quantize: str,
) -> None:
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    data, model = write_rows(small_rows), tiny_checkpoint("mistral")
    command = ("train-lora", "--model", model, "--data", data, "--pooling", "mean", "--head")
    command = (*command, "linear", "--prompt", "concat-sent-cond", "--rank", "4")
    command = (*command, "--epochs", "2", "--batch-size", "16", "--learning-rate", "1e-3")
    with StandIn() as gpu:
        own = ("--quantize", quantize, "--device", "cuda")
        ok(capsys, *command, *own, "--run", tmp_path / "cuda")
        assert gpu.n_launches > 0
    account = json.loads((tmp_path / "cuda/training.json").read_text())
    assert account["made_of"]["encoder"]["quantize"] == quantize


@pytest.mark.parametrize(
    ("level", "precisions", "n_checks"),
    [("none", ["bfloat16"], 0), ("quick", ["bfloat16", "8bit", "4bit"], 6)],
)
def test_bench_times_every_precision_and_checks_as_it_is_asked(
    capsys: Any, tmp_path: Path, level: str, precisions: list[str], n_checks: int
) -> None:
    pytest.importorskip("bitsandbytes")
    page = tmp_path / "bench.md"
    command = ("bench", "--quick", "--checks", level, "--shape", "qwen2-7b", "--device", "cuda")
    command = (*command, "--quantize", *(p.replace("bfloat16", "none") for p in precisions))
    with StandIn() as gpu:
        result = ok(capsys, *command, "--out", page)
        assert gpu.n_launches > 0
    assert not result["skipped"]
    assert {row["precision"] for row in result["speeds"]} == set(precisions)
    assert all(check["passed"] for check in result["checks"])
    assert len(result["checks"]) == n_checks
    assert ("## Checks" in page.read_text()) == (level == "quick")


def test_a_bench_that_is_killed_leaves_its_checks(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcond.benchmark import checks
    from llmcond.workflows import bench

    def killed(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    def only(given: checks.CheckEnvironment) -> Any:
        yield (
            "folded",
            1e-4,
            lambda: checks._compare_encoders(given, "nv-embed-v2", fold_latents=False),
        )

    monkeypatch.setattr(checks, "_list_checks", only)
    monkeypatch.setattr(bench, "run_encoder", killed)
    page = tmp_path / "bench.md"
    command = ["bench", "--quick", "--shape", "minilm", "--device", "cpu", "--out", str(page)]
    assert run(command) == 130
    assert "| folded " in page.read_text()
