"""``llmcond bench``: what this machine does with an encoder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, verb
from llmcond.errors import LlmcondError
from llmcond.workflows.options.encoding import BenchOptions

if TYPE_CHECKING:
    from llmcond.workflows.bench import Benchmark


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions, Command):
    """Check and time encoders on this machine: 16, 8 and 4 bit, against their peers."""

    position = 250
    example = "llmcond bench --shape nv-embed-v2 --out nv-embed.md"

    def execute(self) -> Benchmark:
        """Check, then time."""
        from llmcond.workflows.bench import bench

        return bench(self)

    def show(self, result: Benchmark, form: str) -> None:
        """Print the page."""
        sys.stdout.write(result.to_markdown())

    def failed(self, result: Benchmark) -> LlmcondError | None:
        """Return which checks failed, after all have been run and printed."""
        failed = result.failed
        if not failed:
            return None
        return LlmcondError(
            f"{len(failed)} of {len(result.checks)} checks failed: {'; '.join(failed)}."
        )


bench = verb(Bench)
