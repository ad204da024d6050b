"""Commands with --device cuda, on the stand-in for a GPU: same results as on the CPU."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import run_json
from helpers.graphs import write_graph
from helpers.serving import serve
from helpers.standin import StandIn

from llmcond.cli import run
from llmcond.runs.embedder import load_embedder
from llmcond.serving.model import ServedModel

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("--set", "epochs=2", "batch_size=16", "dropout=0")


def run_on_both_devices(capsys: Any, *command: object) -> list[Any]:
    """Return the results of a command on the CPU and on a GPU."""
    results = [run_json(capsys, *command, "--device", "cpu")]
    with StandIn() as gpu:
        results.append(run_json(capsys, *command, "--device", "cuda"))
        assert gpu.n_launches > 0
    return results


def are_close(first: Any, second: Any, tolerance: float = 1e-3) -> bool:
    """Return whether two results are equal, except for rounding, times, devices and runtimes."""
    if isinstance(first, dict):
        same_keys = first.keys() == second.keys()
        ignored = ("seconds", "device", "runtime")
        keys = [key for key in first if not any(word in key for word in ignored)]
        return same_keys and all(are_close(first[key], second[key], tolerance) for key in keys)
    if isinstance(first, list):
        return len(first) == len(second) and all(
            are_close(*pair, tolerance) for pair in zip(first, second, strict=True)
        )
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) <= tolerance
    return first == second


@pytest.fixture
def fitted_run(tiny_run: Path, tmp_path: Path, capsys: Any) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    run_json(capsys, "fit-head", "--run", folder, "--head", "linear", "--device", "cpu", *SMALL)
    return folder


@pytest.mark.parametrize("precision", [("--dtype", "float32"), ()])
def test_extract_fit_and_evaluate_match_cpu(
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
            run_json(capsys, "extract", *run, *encoder, *prompts, "--device", device)
            assert bool(gpu.n_launches) == (device == "cuda")
            fit = ("fit-head", *run, "--device", device, *SMALL)
            run_json(capsys, *fit, "--head", "mlp", "--dim", "16", "--prompt", "concat-sent-cond")
            run_json(capsys, *fit, "rank=4", "--head", "hypernet", "--prompt", "separate")
            if device == "cuda":
                assert not [line for line in gpu.unpinned if "heads/batches" in line], gpu.report()
                waits = [line for line in gpu.waits if "heads/conditioned" in line]
                assert [line.partition(",")[0] for line in waits] == ["to(cpu)"], gpu.report()
        scores.append(run_json(capsys, "evaluate", *run)["results"])
    assert len(scores[0]) == len(scores[1]) >= 3
    if precision:
        for cpu_score, gpu_score in zip(*scores, strict=True):
            assert cpu_score["spearman"] == pytest.approx(gpu_score["spearman"], abs=0.05)


def test_similarity_matches_cpu(fitted_run: Path, tmp_path: Path, capsys: Any) -> None:
    texts = ("two men play in the park", "two dogs sit in the park")
    condition = ("--condition", "the place")
    on_cpu, on_gpu = run_on_both_devices(
        capsys, "similarity", *texts, *condition, "--run", fitted_run
    )
    assert are_close(on_cpu, on_gpu)


def test_index_and_search_match_cpu(fitted_run: Path, tmp_path: Path, capsys: Any) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("two men play in the park\nchildren sit at the beach\ndogs in the rain\n")
    results = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        with StandIn():
            options = ("--run", fitted_run, "--device", device)
            run_json(capsys, "index", texts, "--out", folder, *options)
            query = ("search", folder, "dogs at the beach", "--condition", "the place")
            results.append(run_json(capsys, *query, "-k", "3", "--device", device)["results"])
    assert are_close(*results)


def test_server_embeddings_match_cpu(fitted_run: Path) -> None:
    texts = ["two men play in the park", "children sit at the beach"]
    body = {"input": texts, "condition": "the place"}
    embeddings = []
    for device in ("cpu", "cuda"):
        with StandIn() as gpu:
            model = ServedModel(load_embedder(fitted_run, device=device))
            with serve(model, max_client_batch_size=50, payload_limit=20_000) as (client, _):
                gpu.reset()
                data = client.post("/v1/embeddings", body).json["data"]
                embeddings.append([item["embedding"] for item in data])
            assert bool(gpu.n_launches) == (device == "cuda")
    np.testing.assert_allclose(*embeddings, atol=1e-4)


def test_graph_completion_matches_cpu(
    tmp_path: Path, capsys: Any, tiny_checkpoint: Callable[..., Path]
) -> None:
    graph, model = write_graph(tmp_path / "graph"), tiny_checkpoint()
    results = []
    for device in ("cpu", "cuda"):
        run = ("--run", tmp_path / device, "--device", device)
        with StandIn():
            data = ("--task", "kgc", "--model", model, "--data", graph, "--pooling", "mean")
            run_json(capsys, "extract", *data, *run, "--dtype", "float32")
            run_json(capsys, "fit-head", *run, "--head", "hypernet-full", *SMALL)
            query = ("--head-entity", "p00", "--relation", "_is_at", "-k", "3")
            results.append(run_json(capsys, "complete", *query, *run))
    assert are_close(*results, tolerance=2e-2)


def test_dialogue_reply_matches_cpu(dialogue_run: Path, tmp_path: Path, capsys: Any) -> None:
    replies = tmp_path / "replies.txt"
    replies.write_text("the park on red\nsad\ntwo men play in the street\n")
    command = ("reply", "two men ?", "in the park .", "--candidates", replies)
    on_cpu, on_gpu = run_on_both_devices(
        capsys, *command, "--run", dialogue_run, "--head", "weighted"
    )
    assert are_close(on_cpu, on_gpu)


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_lora_training_runs_on_gpu(
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
        options = ("--quantize", quantize, "--device", "cuda")
        run_json(capsys, *command, *options, "--run", tmp_path / "cuda")
        assert gpu.n_launches > 0
    record = json.loads((tmp_path / "cuda/training.json").read_text())
    assert record["made_of"]["encoder"]["quantize"] == quantize


@pytest.mark.parametrize(
    ("level", "precisions", "n_checks"),
    [("none", ["bfloat16"], 0), ("quick", ["bfloat16", "8bit", "4bit"], 6)],
)
def test_bench_measures_every_precision_and_runs_requested_checks(
    capsys: Any, tmp_path: Path, level: str, precisions: list[str], n_checks: int
) -> None:
    pytest.importorskip("bitsandbytes")
    page = tmp_path / "bench.md"
    command = ("bench", "--quick", "--checks", level, "--shape", "qwen2-7b", "--lengths", "32")
    quantize = [name.replace("bfloat16", "none") for name in precisions]
    command = (*command, "--device", "cuda", "--quantize", *quantize)
    with StandIn() as gpu:
        result = run_json(capsys, *command, "--out", page)
        assert gpu.n_launches > 0
    assert not result["skipped"]
    assert {row["precision"] for row in result["speeds"]} == set(precisions)
    assert all(check["passed"] for check in result["checks"])
    assert len(result["checks"]) == n_checks
    assert ("## Checks" in page.read_text()) == (level == "quick")


def test_interrupted_bench_saves_its_checks(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcond.benchmark import checks
    from llmcond.workflows import bench

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    def list_single_check(environment: checks.CheckEnvironment) -> Any:
        yield (
            "folded",
            1e-4,
            lambda: checks._compare_encoders(environment, "nv-embed-v2", fold_latents=False),
        )

    monkeypatch.setattr(checks, "_list_checks", list_single_check)
    monkeypatch.setattr(bench, "run_encoder", interrupt)
    page = tmp_path / "bench.md"
    command = ["bench", "--quick", "--shape", "minilm", "--device", "cpu", "--out", str(page)]
    assert run(command) == 130
    assert "| folded " in page.read_text()
