"""Commands that encode a dataset, and that check and time encoders."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from llmcond.base.errors import LlmcondError
from llmcond.commands.base import RESUMES, Command, as_function
from llmcond.options.encoding import BenchOptions, ExtractOptions

if TYPE_CHECKING:
    from llmcond.workflows.bench import Benchmark
    from llmcond.workflows.extract import ExtractionPlan, ExtractResult


@dataclass(frozen=True, kw_only=True)
class Extract(ExtractOptions, Command):
    """Encode the texts of a dataset under prompts, and store their vectors in a run.

    Vectors that the run has already stored are not computed again. If interrupted, the same command
    resumes where it stopped.
    """

    example = "llmcond extract --model minilm --data my.csv --prompt concat-sent-cond"
    if_interrupted = RESUMES

    def execute(self) -> ExtractResult | ExtractionPlan:
        """Extract the features, or plan the extraction.

        Returns:
            An ``ExtractResult``: the run's folder, the encoder and, for each prompt, the numbers of
            inputs and tokens. With ``plan`` an ``ExtractionPlan``: the numbers of inputs and
            tokens, bytes, hours and cost.

        Raises:
            UserError: an option is invalid, or the model, a prompt or the data cannot be read.
            LlmcondError: the hub cannot be reached.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> result.run, list(result.prompts)
            (PosixPath('runs/default'), ['routed'])
        """
        if self.plan:
            from llmcond.workflows.extract import plan

            return plan(self)
        from llmcond.workflows.extract import extract

        return extract(self)

    def show(self, result: ExtractResult | ExtractionPlan, form: str) -> None:
        """Print a plan; progress messages have already reported an extraction."""
        if self.plan:
            from llmcond.base.output import Table

            Table.of_rows(cast("ExtractionPlan", result).rows()).print(form)


extract = as_function(Extract)


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions, Command):
    """Check and time encoders on this machine, in 16, 8 and 4 bit, against other libraries."""

    example = "llmcond bench --shape nv-embed-v2 --out nv-embed.md"

    def execute(self) -> Benchmark:
        """Run the checks, then time the encoders.

        Returns:
            A ``Benchmark``: the machine, the checks, and the speed of each encoder.

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
