"""What the benchmarks share: options, processes that take turns, inputs, models and ONNX files."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from common import Options
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig

from llmcond.benchmark.shapes import make_tokenizer
from llmcond.benchmark.speeds import product_peak
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.loading import build_on_meta, load_config
from llmcond.encoders.settings import KnownModel, find_model
from llmcond.encoders.spec import ARCHITECTURES
from llmcond.heads import FittedHead, PairArrays, fit_recipe, load_recipe

T = TypeVar("T")
#: Rows of the matrices whose product is measured on a CPU; four times as many on a GPU.
PRODUCT = 2_048


# -- options -----------------------------------------------------------------------------------


class BenchOptions(Options):
    """The options of a benchmark, all of which have ``--json``."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(doc)
        self.option("--json", False, "print one JSON value on the last line")

    def rounds(self, default: int = 3) -> None:
        """Add the number of turns."""
        self.option("--rounds", default, "number of turns, whose medians are printed")

    def compute(self, dtype: str, **settings: Any) -> None:
        """Add the data type and the device of an encoder, and its batches."""
        self.option("--dtype", dtype, "data type of computation", **settings)
        self.option("--device", "auto", "device, such as cpu or cuda")
        budget = "token budget of a batch of llmcond"
        self.option("--max-tokens-per-batch", int, budget, "chosen automatically")

    def sizes(self) -> None:
        """Add what a checkpoint with random weights is built from."""
        sizes = "other sizes of the architecture, such as num_hidden_layers=8; with random weights"
        self.option("--set", [], sizes, metavar="KEY=N")
        folder = "folder that random checkpoints are saved in and read from"
        self.option("--folder", Path, folder, "llmcond-bench in the temporary folder")


# -- time and processes ------------------------------------------------------------------------


def timed(function: Callable[..., T], *arguments: Any) -> tuple[T, float, float]:
    """Call a function; return its result, the wall seconds and the processor seconds."""
    start, processor = time.perf_counter(), time.process_time()
    result = function(*arguments)
    return result, time.perf_counter() - start, time.process_time() - processor


def machine_peak(device: str, dtype: torch.dtype) -> float:
    """Measure the speed of a matrix product at this moment, in FLOP/s."""
    return product_peak(device, dtype, PRODUCT if device == "cpu" else 4 * PRODUCT)


def set_threads(threads: int) -> None:
    """Set the number of threads of the processes that are started from now on."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(threads)


def run_in_process(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a new process and return its result.

    The peak memory of that process is then the memory that this call alone needs.

    Raises:
        BrokenProcessPool: the process was killed, for example because memory ran out.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def _take_turns(
    connection: Connection,
    load: Callable[[dict[str, Any]], Callable[[], dict[str, Any]]],
    task: dict[str, Any],
) -> None:
    """Load a way, then run a turn for each message ``go``."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    turn = load(task)
    connection.send("ready")
    while connection.recv() == "go":
        connection.send(turn())


def measure(
    tasks: Mapping[str, dict[str, Any]],
    rounds: int,
    load: Callable[[dict[str, Any]], Callable[[], dict[str, Any]]],
) -> dict[str, list[dict[str, Any]]]:
    """Run all ways in turn, each in a separate process.

    Args:
        tasks: the settings of each way, by name.
        rounds: number of turns of each way.
        load: function that loads a way from its settings, in the way's process, and returns the
            function that runs a turn and returns its figures.

    Returns:
        The figures of each turn, by way.

    Raises:
        SystemExit: a way could not be loaded.
    """
    context = multiprocessing.get_context("spawn")
    workers = {}
    for name, task in tasks.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=_take_turns, args=(theirs, load, task), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process raises EOFError below
        try:
            ours.recv()
        except EOFError:
            raise SystemExit(f"{name} could not be loaded; see its error above.") from None
        workers[name] = ours
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, connection in workers.items():
            connection.send("go")
            turns[name].append(connection.recv())
    for connection in workers.values():
        connection.send("stop")
    return turns


def summarize(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Return the medians of each way's figures over turns.

    ``ratio`` is the median over rounds of the first way's seconds to those of a way.
    """
    first = next(iter(turns.values()))
    return [
        {
            "way": name,
            **{key: statistics.median(turn[key] for turn in of_way) for key in of_way[0]},
            "ratio": median_ratio(first, of_way, "seconds"),
        }
        for name, of_way in turns.items()
    ]


def median_ratio(
    turns: Iterable[Mapping[str, float]], others: Iterable[Mapping[str, float]], key: str
) -> float:
    """Return the median over rounds of a figure's ratio to another way's."""
    return float(statistics.median(a[key] / b[key] for a, b in zip(turns, others, strict=True)))


# -- inputs and checkpoints --------------------------------------------------------------------


def random_checkpoint(known: KnownModel, parent: Path, sizes: Mapping[str, int]) -> Path:
    """Return a checkpoint of an architecture with random weights; create it if it is missing.

    Args:
        known: known model.
        parent: folder in which the checkpoint has its folder.
        sizes: settings of the architecture to change, such as ``num_hidden_layers``.
    """
    names = [known.repo.replace("/", "--"), *(f"{key}-{value}" for key, value in sizes.items())]
    target = parent / "-".join(names)
    if target.is_dir():
        return target
    folder = target.with_name(f"{target.name}.part")
    folder.mkdir(parents=True, exist_ok=True)
    architecture = json.loads(json.dumps(dict(known.architecture)))
    (architecture.get("text_config") or architecture).update(sizes)
    if architecture["model_type"] in ARCHITECTURES:
        # OpenVINO reads config.json directly, so the defaults of transformers have to be in it.
        architecture = AutoConfig.for_model(**architecture).to_dict()
    (folder / "config.json").write_text(json.dumps(architecture))
    make_tokenizer(folder)
    checkpoint = resolve(str(folder), EncoderOptions(like=known.repo), identify=False).checkpoint
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, value in build_on_meta(load_config(checkpoint)).state_dict().items():
        # Weights of norms are near one; all others are as transformers initialises them.
        scales = "norm" in name.lower() and name.endswith("weight") and value.dim() == 1
        weights[name] = (torch.randn(value.shape, generator=generator) * 0.02 + scales).bfloat16()
    save_torch_state_dict(weights, folder, max_shard_size="2GB")
    return folder.rename(target)


def find_checkpoint(options: argparse.Namespace) -> tuple[Path | str, str | None]:
    """Return the checkpoint to measure, and the known model that it is a copy of, if any.

    If the model needs random weights, the checkpoint is created in ``options.folder``.

    Raises:
        SystemExit: there is no such model.
    """
    if Path(options.model).is_dir():
        return options.model, None
    known = find_model(options.model)
    if known is None:
        raise SystemExit(
            f"{options.model} is neither a known model (see llmcond models) nor an existing folder."
        )
    if known.alias == "minilm" and not options.set:
        return "minilm", None
    sizes = {key: int(value) for key, _, value in (pair.partition("=") for pair in options.set)}
    # In a new process, because processes started later inherit the peak memory of this one.
    parent = options.folder or Path(tempfile.gettempdir()) / "llmcond-bench"
    return run_in_process(random_checkpoint, known, parent, sizes), known.repo


def fit_random_head(name: str, dim: int, rank: int | None = None) -> FittedHead:
    """Fit a head for one step on a few random features; its speed does not depend on the fit.

    Args:
        name: name of the recipe.
        dim: number of dimensions of features and embeddings.
        rank: rank of a hypernetwork with a rank; None for that of the recipe.
    """
    rng, n = np.random.default_rng(0), 8
    first, second, condition = rng.standard_normal((3, n, dim), np.float32)
    recipe = load_recipe(name)
    changes: dict[str, Any] = {"epochs": 1}
    if recipe.dim is not None:
        changes["dim"] = dim
    if rank and getattr(recipe.settings, "rank", 0):
        changes["rank"] = rank
    pairs = PairArrays(
        first, second, np.linspace(0, 1, n), condition, pair=np.repeat(np.arange(n // 2), 2)
    )
    recipe = recipe.with_settings(changes, name)
    return fit_recipe(recipe, pairs, None, 0, lambda epoch, epochs, score: None, "cpu")
