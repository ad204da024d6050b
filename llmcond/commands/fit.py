"""Commands that fit heads on the features of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, as_function
from llmcond.errors import UserError
from llmcond.workflows.options.fitting import FitHeadOptions, SweepOptions

if TYPE_CHECKING:
    from llmcond.workflows.fit import FittedResult
    from llmcond.workflows.sweep import SweepResult


@dataclass(frozen=True, kw_only=True)
class FitHead(FitHeadOptions, Command):
    """Fit a head on the training features of a run, and save it in the run."""

    example = "llmcond fit-head --head mlp --dim 256 --set epochs=50"

    def execute(self) -> FittedResult:
        """Fit the head, and save it.

        Returns:
            A ``FittedResult``: the head's name and folder, its dimensions, the numbers of rows
            used, and its scores on dev.

        Raises:
            UserError: there is no such run, recipe or prompt, or a setting is invalid.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> head = llmcond.fit_head(head="linear", dim=64, set={"epochs": 5})
            >>> head.name, head.dim
            ('linear@routed', 64)
        """
        from llmcond.workflows.fit import fit_head

        return fit_head(self)


fit_head = as_function(FitHead)


@dataclass(frozen=True, kw_only=True)
class Sweep(SweepOptions, Command):
    """Fit heads for every combination of settings and seeds, and compare them in one table.

    Fits with the same features and settings are not repeated. If interrupted, the same command
    resumes.
    """

    example = "llmcond sweep --head mlp linear --vary dim=64,128,256 --seeds 3 --plot dim.png"
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> SweepResult:
        """Fit and score all combinations.

        Returns:
            A ``SweepResult`` with one result for each combination: its settings and the means of
            its scores over the seeds, with confidence intervals. The best comes first.

        Raises:
            UserError: there is no such run or recipe, a setting is invalid, or nothing varies.
            LlmcondError: every fit failed, or a process was killed.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> swept = llmcond.sweep(
            ...     head=["linear"], vary={"dim": [8, 16]}, seeds=2, set={"epochs": 5}, workers=1
            ... )
            >>> len(swept.results)
            2
        """
        from llmcond.report.figures import write_plots
        from llmcond.workflows.sweep import sweep

        several = [self.head, self.prompt, *self.varied().values()]
        if self.seeds == 1 and all(len(set(values)) <= 1 for values in several):
            raise UserError(
                "there is nothing to vary. Give several values (--vary dim=64,128,256), heads, "
                "prompts or --seeds."
            )
        swept = sweep(self)
        split = self.curve_split() or "dev"
        write_plots(swept.results, self.plot, self.plot_steps, split)
        return swept

    def show(self, result: SweepResult, form: str) -> None:
        """Print a table, and the held-out score of the choice of the best row."""
        from llmcond.display import print_sentences
        from llmcond.report.tables import choice_sentence, sweep_table

        sweep_table(result.results, self.run).print(form)
        if result.choice is not None:
            print_sentences([choice_sentence(result.choice)], form)


sweep = as_function(Sweep)
