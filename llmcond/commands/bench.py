"""``llmcond bench``: what this machine does with an encoder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmcond.benchmark.shapes import Level, Shape
from llmcond.commands.base import verb
from llmcond.commands.shared import WithDevice
from llmcond.encoders.spec import Quantize
from llmcond.errors import LlmcondError
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.bench import Benchmark


@dataclass(frozen=True, kw_only=True)
class Bench(WithDevice):
    """Check and time encoders on this machine: 16, 8 and 4 bit, against their peers."""

    example: ClassVar[str] = "llmcond bench --shape nv-embed-v2 --out nv-embed.md"

    model: Sequence[str] = option(
        (), metavar="NAME_OR_PATH", help="encoders with their own weights (`llmcond models`)"
    )
    shape: Sequence[Shape] = option(
        (),
        help="architectures at their true size with random weights, of which no file is made "
        "(default, without --model: minilm)",
    )
    quantize: Sequence[Quantize] = option(
        (), help="weights as they are, or in 8 or 4 bit (default: all that go here)"
    )
    checks: Level = option(
        "all",
        help="checks to run: none, quick (only those of each timed encoder) or all (also those of "
        "small random encoders of every architecture)",
    )
    quick: bool = option(False, help="small shapes and few inputs: checks rather than speeds")
    profile: bool = option(False, help="also list the kernels that take longest")
    out: str | Path | None = option(
        None, metavar="FILE.md", help="write the page to a file as well"
    )

    def execute(self) -> Benchmark:
        """Check, then time."""
        from llmcond.workflows.bench import bench

        return self.call(bench, models=self.model, shapes=self.shape)

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
