"""Separate processes that start quickly, forked by a server that has imported everything."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from helpers.waiting import PATIENCE
from llmcond.base.system import process_context

FORK_CONTEXT = process_context(
    "lance",
    "peft",
    "scipy.stats",
    "llmcond.encoders.encoder",
    "llmcond.finetune.loop",
    "llmcond.runs.trials",
    "transformers.models.bert.modeling_bert",
)


class Command:
    """A command that runs in a separate process with one thread.

    The process calls ``setup`` before the command.

    Attributes:
        process: process of the command, to wait for or to kill.
        stdout, stderr: files in ``folder`` with its output.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[object],
        environment: Mapping[str, str] = {},
        setup: Callable[[], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        self.stderr.touch()
        values = [str(argument) for argument in arguments]
        run_arguments = (values, dict(environment), setup, self.stdout, self.stderr)
        self.process = FORK_CONTEXT.Process(target=_run, args=run_arguments)
        self.process.start()

    def finish(self) -> tuple[int | None, str, str]:
        """Wait for the end; return the exit status, standard output and standard error."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, "the command did not end"
        out, err = (file.read_text(encoding="utf-8") for file in (self.stdout, self.stderr))
        return self.process.exitcode, out, err


def _run(
    arguments: list[str],
    environment: dict[str, str],
    setup: Callable[[], None] | None,
    out: Path,
    err: Path,
) -> None:
    import torch

    from llmcond.cli import run

    os.environ.update(environment)
    torch.set_num_threads(1)
    for file, number in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if setup is not None:
        setup()
    sys.exit(run(arguments))
