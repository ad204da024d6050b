"""``llmcond compare``: find out whether systems differ by more than chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import REUSES_VECTORS, Command, as_function
from llmcond.workflows.options.scoring import CompareSystemsOptions

if TYPE_CHECKING:
    from llmcond.workflows.compare import SystemComparison


@dataclass(frozen=True, kw_only=True)
class Compare(CompareSystemsOptions, Command):
    """Compare heads, encoders or runs on the same rows, with paired statistics.

    The runs must have the same task and the same rows in the scored split.
    """

    position = 75
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
