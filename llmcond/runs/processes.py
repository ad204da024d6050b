"""Worker processes of an extraction: one a GPU, or a share of the cores each.

Workers do not communicate: each walks the same input list and claims parts with a file lock. So
what is stored does not depend on how many there are, but for rounding, and the part of one that
dies is taken over by the others.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.errors import LlmcondError, UserError
from llmcond.features.extract import extract
from llmcond.log import log, log_to_terminal
from llmcond.plugins import load, loaded
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import SplitInputs
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.run import open_run

_JOIN_SECONDS = 60


def check_workers(workers: int, resolved: ResolvedEncoder) -> None:
    """Refuse a number of processes that this machine has no devices for.

    Raises:
        UserError: too few or too many.
    """
    import torch

    if workers < 1:
        raise UserError(f"workers is {workers}; it must be at least 1.")
    gpus = resolved.device != "cpu"
    count = torch.cuda.device_count() if gpus else torch.get_num_threads()
    if workers > count:
        raise UserError(
            f"workers is {workers}, but PyTorch sees {count} {'GPUs' if gpus else 'cores'} here, "
            "and each worker needs one."
        )


class WorkerProcesses:
    """``workers - 1`` processes that work on the same extraction, as a context.

    They are started when there is something to do; see :meth:`start`.
    """

    def __init__(
        self,
        workers: int,
        model: str,
        options: EncoderOptions,
        resolved: ResolvedEncoder,
        run_folder: Path,
        prompts: Sequence[Prompt],
    ) -> None:
        """Prepare them.

        Args:
            workers: processes, this one included.
            model: of the encoder, as :func:`llmcond.encoders.resolve` takes it.
            options: the same.
            resolved: the encoder of this process, which takes the first device.
            run_folder: a run that exists.
            prompts: what is extracted.
        """
        self._workers, self._model, self._options = workers, model, options
        self._device = resolved.device
        self._run_folder, self._prompts = run_folder, list(prompts)
        self._started: list[Any] = []
        self._threads = 0

    def start(self) -> None:
        """Start them, and leave them their share of the cores."""
        import torch

        if self._started or self._workers == 1:
            return
        self._threads = torch.get_num_threads()
        share = max(1, self._threads // self._workers)
        context = multiprocessing.get_context("spawn")
        for rank in range(1, self._workers):
            options = replace(self._options, device=_device_of(self._device, rank))
            plugins = loaded()
            task = (self._model, options, self._run_folder, self._prompts, share, plugins)
            process: Any = context.Process(target=_work, args=task, daemon=True)
            process.start()
            self._started.append(process)
        if self._device == "cpu":
            torch.set_num_threads(share)

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        import torch

        if not self._started:
            return
        torch.set_num_threads(self._threads)
        for process in self._started:
            if kind is None:
                process.join(_JOIN_SECONDS)
        failed = sum(process.exitcode not in (0, None) for process in self._started)
        for process in self._started:
            process.terminate()
        if failed and kind is None:
            log.warning(f"{failed} of {self._workers} workers failed; the others did their work")


def _device_of(device: str, rank: int) -> str:
    """Return the device of a worker, counted on from that of the first."""
    import torch

    if device == "cpu":
        return device
    first = int(device.partition(":")[2])
    return f"cuda:{(first + rank) % torch.cuda.device_count()}"


class ParentWatch:
    """A progress that shows nothing, and ends this process if its parent has died."""

    def start(self, inputs: int | None, characters: int | None) -> None:
        """Show nothing."""

    def advance(self, inputs: int, characters: int, tokens: int) -> None:
        """Exit without a parent."""
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
    """Extract in a process of its own, recording nothing."""
    import torch

    log_to_terminal()
    if options.device == "cpu":
        torch.set_num_threads(threads)
    try:
        for name in plugins:
            load(name)
        run = open_run(run_folder)
        resolved = resolve(model, options)
        run.check_encoder(resolved)
        encoder = LazyEncoder(resolved)
        for prompt in prompts:
            inputs = SplitInputs([run.rows(name) for name in run.splits], prompt)
            by_prefix = resolved.shares_prefixes
            extract(inputs, run.store(), encoder, ParentWatch(), by_prefix=by_prefix)
    except KeyboardInterrupt:
        raise SystemExit(1) from None
    except LlmcondError as error:
        log.info(f"a worker on {options.device} failed: {error}")
        raise SystemExit(1) from error
