"""Worker processes of an extraction: one per GPU, or each with a share of the cores.

Workers do not communicate. Each iterates over the same inputs and claims chunks with a file lock.
So the stored vectors do not depend on the number of workers, except for rounding. If a worker exits
early, the others take over its chunk.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.errors import LlmcondError, UserError
from llmcond.features.extract import Chunking, extract
from llmcond.log import log, log_to_terminal
from llmcond.plugins import load, loaded_names
from llmcond.prompts import Prompt
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.open import open_any_run
from llmcond.system import process_context

_JOIN_SECONDS = 60


def check_workers(workers: int, resolved: ResolvedEncoder) -> None:
    """Raise a UserError if this machine has fewer devices than workers."""
    import torch

    gpus = resolved.device != "cpu"
    count = torch.cuda.device_count() if gpus else torch.get_num_threads()
    if workers > count:
        raise UserError(
            f"workers is {workers}, but each worker needs one of the {count} "
            f"{'GPUs' if gpus else 'cores'} that PyTorch finds. Lower --workers."
        )


@contextmanager
def worker_processes(
    workers: int,
    model: str,
    options: EncoderOptions,
    resolved: ResolvedEncoder,
    run_folder: Path,
    prompts: Sequence[Prompt],
) -> Iterator[Callable[[], None]]:
    """Yield a function that starts ``workers - 1`` processes, which share an extraction.

    ``model`` and ``options`` are those that ``resolved`` was resolved from. This process uses the
    first device.
    """
    import torch

    threads, device = torch.get_num_threads(), resolved.device
    share = max(1, threads // workers)
    context = process_context("llmcond.encoders.encoder")
    started: list[Any] = []

    def start() -> None:
        for rank in range(1, workers):
            worker_device = device
            if device != "cpu":
                first = int(device.partition(":")[2])
                worker_device = f"cuda:{(first + rank) % torch.cuda.device_count()}"
            worker_options = replace(options, device=worker_device)
            task = (model, worker_options, run_folder, list(prompts), share, loaded_names())
            process: Any = context.Process(target=_work, args=task, daemon=True)
            process.start()
            started.append(process)
        if started and device == "cpu":
            torch.set_num_threads(share)

    try:
        yield start
        for process in started:
            process.join(_JOIN_SECONDS)
        failed = sum(process.exitcode not in (0, None) for process in started)
        if failed:
            log.warning(f"{failed} of {workers} workers failed; the others completed their work")
    finally:
        for process in started:
            process.terminate()
        if started:
            torch.set_num_threads(threads)


class ParentWatch:
    """A progress that shows nothing, and ends this process if its parent has ended."""

    def start(self, inputs: int | None, characters: int | None) -> None:
        """Show nothing."""

    def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
        """End this process if its parent has ended."""
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise SystemExit(1)


def _work(
    model: str,
    options: EncoderOptions,
    run_folder: Path,
    prompts: Sequence[Prompt],
    threads: int,
    plugins: Sequence[str],
) -> None:
    """Extract in a worker process, which does not write to run.json."""
    import torch

    log_to_terminal()
    if options.device == "cpu":
        torch.set_num_threads(threads)
    try:
        for name in plugins:
            load(name)
        run, resolved = open_any_run(run_folder), resolve(model, options)
        run.check_encoder(resolved)
        encoder, by_prefix = LazyEncoder(resolved), resolved.shares_prefixes
        for prompt in prompts:
            inputs = iter(run.task.inputs(run.data, prompt))
            extract(inputs, run.store(), encoder, ParentWatch(), Chunking(by_prefix=by_prefix))
    except KeyboardInterrupt:
        raise SystemExit(1) from None
    except LlmcondError as error:
        log.info(f"a worker on {options.device} failed: {error}")
        raise SystemExit(1) from error
