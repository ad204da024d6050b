"""Processes of their own, which start at once: a server that has imported everything forks them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from helpers.waiting import PATIENCE
from llmcond.system import process_context

FORKING = process_context(
    "lance",
    "llmcond.encoders.encoder",
    "llmcond.runs.trials",
    "transformers.models.bert.modeling_bert",
)


class Command:
    """A command that runs in a process of its own, on one thread.

    ``first`` is called there before the command. What it prints goes into files in ``folder``.

    Attributes:
        process: that it runs in, to wait for and to kill.
        stdout, stderr: the files that it prints into.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[object],
        environment: Mapping[str, str] = {},
        first: Callable[[], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        self.stderr.touch()
        values = [str(argument) for argument in arguments]
        given = (values, dict(environment), first, self.stdout, self.stderr)
        self.process = FORKING.Process(target=_run, args=given)
        self.process.start()

    def finish(self) -> tuple[int | None, str, str]:
        """Wait for its end; return exit status, standard output and standard error."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, "the command does not end"
        out, err = (file.read_text(encoding="utf-8") for file in (self.stdout, self.stderr))
        return self.process.exitcode, out, err


def _run(
    arguments: list[str],
    environment: dict[str, str],
    first: Callable[[], None] | None,
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
    if first is not None:
        first()
    sys.exit(run(arguments))
