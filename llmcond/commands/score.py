"""Commands that score, compare and explain heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, REUSES_VECTORS, Command, as_function
from llmcond.workflows.options.scoring import (
    AnalyseOptions,
    ComparePromptsOptions,
    CompareSystemsOptions,
    EvaluateOptions,
)

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results
    from llmcond.workflows.analyse import AnalysisResult
    from llmcond.workflows.compare import Comparison, SystemComparison


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluateOptions, Command):
    """Score a run's heads, with zero-shot for comparison."""

    example = "llmcond evaluate --head mlp --split dev --json"
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> Results:
        """Score the heads.

        Returns:
            ``Results``, one ``Result`` for each head and for zero-shot: its metrics, with 95 %
            confidence intervals.

        Raises:
            UserError: there is no such run, head or split, or the data has no rated rows.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> results = llmcond.evaluate(split="train")
            >>> [(result.head, result.subtract) for result in results]
            [('none', False), ('none', True)]
        """
        from llmcond.workflows.evaluate import evaluate

        return evaluate(self)

    def show(self, result: Results, form: str) -> None:
        """Print a table."""
        from llmcond.report.tables import results_table

        results_table(result, self.run).print(form)


evaluate = as_function(Evaluate)


@dataclass(frozen=True, kw_only=True)
class Compare(CompareSystemsOptions, Command):
    """Compare heads, encoders or runs on the same rows, with paired statistics.

    The runs must have the same task and the same rows in the scored split.
    """

    example = "llmcond compare runs/default:linear runs/default:mlp --split dev --report page.html"
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> SystemComparison:
        """Compare the systems.

        Returns:
            A ``SystemComparison`` with one ``Result`` for each system: its metrics, and their
            difference to the baseline with a confidence interval.

        Raises:
            UserError: a run or head does not exist, the heads of a system differ in more than their
                seed, or the runs have different tasks or rows.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(20)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> prompts = ["concat-sent-cond", "routed"]
            >>> extracted = llmcond.extract(model="minilm", data=rows, run="pets", prompt=prompts)
            >>> comparison = llmcond.compare(
            ...     systems=["pets:none@concat-sent-cond", "pets:none@routed"], split="train"
            ... )
            >>> comparison.baseline
            'pets:none@concat-sent-cond'
        """
        from llmcond.workflows.compare import compare_systems

        return compare_systems(self)

    def show(self, result: SystemComparison, form: str) -> None:
        """Print a summary in words, then a table, and a table of subsets."""
        from llmcond.display import print_sentences
        from llmcond.report.tables import (
            subset_differences_table,
            systems_summary,
            systems_table,
        )

        print_sentences(systems_summary(result.results, result.baseline), form)
        systems_table(result.results, result.baseline).print(form)
        if result.results[0].subsets["subsets"]:
            subset_differences_table(result.results, result.baseline).print(form)


compare = as_function(Compare)


@dataclass(frozen=True, kw_only=True)
class Analyse(AnalyseOptions, Command):
    """Explain heads: isotropy, condition clusters, unseen conditions, norms and changed rows.

    With --answers, also compare given sentences and answer words before and after each head.
    """

    example = "llmcond analyse --head mlp --what clusters --conditions 4 --out pictures"
    formats = True

    def execute(self) -> AnalysisResult:
        """Run the analyses.

        Returns:
            An ``AnalysisResult``, a dictionary: the rows of each analysis by its name, the
            ``split``, and ``n``, the number of rated rows.

        Raises:
            UserError: there is no such run or head, or the split has no rated rows.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> analysis = llmcond.analyse(what=["isotropy"], split="train")
            >>> analysis["n"]
            16
        """
        from llmcond.workflows.analyse import analyse

        return analyse(self)

    def show(self, result: AnalysisResult, form: str) -> None:
        """Print one table per analysis."""
        from llmcond.report.analyses import analysis_tables

        for table in analysis_tables(result, self.run):
            table.print(form)


analyse = as_function(Analyse)


@dataclass(frozen=True, kw_only=True)
class ComparePrompts(ComparePromptsOptions, Command):
    """Compare prompts on the same rows, splits, seeds and heads, with paired statistics."""

    example = (
        "llmcond compare-prompts --model minilm --prompts my/*.toml --heads mlp --report page.html"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> Comparison:
        """Compare the prompts.

        Returns:
            A ``Comparison`` with one ``Result`` for each prompt, head and subtraction: its
            metrics, and their difference to the baseline with a confidence interval.

        Raises:
            UserError: an option or the data is invalid, a prompt makes rows of different conditions
                equal, or the report cannot be written.
            LlmcondError: every fit failed.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> comparison = llmcond.compare_prompts(
            ...     model="minilm",
            ...     data=rows,
            ...     prompts=["concat-sent-cond", "pair-sent"],
            ...     heads=["none"],
            ... )
            >>> comparison.baseline
            'concat-sent-cond'
        """
        from llmcond.workflows.compare import compare_prompts

        return compare_prompts(self)

    def show(self, result: Comparison, form: str) -> None:
        """Print a summary in words, then a table."""
        from llmcond.display import print_sentences
        from llmcond.report.tables import comparison_table, summary

        print_sentences(summary(result.results, result.baseline), form)
        bars = form == "table"  # In other formats the characters of bars do not line up.
        comparison_table(result.results, result.baseline, self.run, bars=bars).print(form)


compare_prompts = as_function(ComparePrompts)
