"""``llmcond bench``: check and time encoders on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, as_function
from llmcond.errors import LlmcondError
from llmcond.workflows.options.encoding import BenchOptions

if TYPE_CHECKING:
    from llmcond.workflows.bench import Benchmark


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions, Command):
    """Check and time encoders on this machine, in 16, 8 and 4 bit, against other libraries."""

    position = 250
    example = "llmcond bench --shape nv-embed-v2 --out nv-embed.md"

    def execute(self) -> Benchmark:
        """Run the checks, then time the encoders.

        Returns:
            A ``Benchmark``: the machine, the checks, the speed of each encoder, and what was
            skipped and why.

        Raises:
            UserError: a model is unknown, or a device, library or output folder is missing.
            LlmcondError: the hub cannot be reached.

        Examples:
            >>> import llmcond
            >>> result = llmcond.bench(quantize=["none"], checks="none", quick=True)
            >>> result.failed
            []
        """
        from llmcond.workflows.bench import bench

        return bench(self)

    def show(self, result: Benchmark, form: str) -> None:
        """Print the report as Markdown."""
        sys.stdout.write(result.to_markdown())

    def failed(self, result: Benchmark) -> LlmcondError | None:
        """Return an error that names the failed checks, or None if none failed."""
        failed = result.failed
        if not failed:
            return None
        return LlmcondError(
            f"{len(failed)} of {len(result.checks)} checks failed: {'; '.join(failed)}."
        )


bench = as_function(Bench)
