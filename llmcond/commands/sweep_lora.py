"""``llmcond sweep-lora``: train an encoder with every combination of settings and seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, Command, as_function
from llmcond.workflows.options.training import SweepLoraOptions

if TYPE_CHECKING:
    from llmcond.workflows.sweep_lora import LoraSweepResult


@dataclass(frozen=True, kw_only=True)
class SweepLora(SweepLoraOptions, Command):
    """Train an encoder with every combination of settings and seeds, and keep the best on dev.

    The best encoder is saved in the folder best/ of the run. Finished trainings are not repeated.
    If interrupted, the same command resumes.
    """

    position = 45
    example = (
        "llmcond sweep-lora --model minilm --head none --vary learning_rate=5e-4,1e-3 rank=8,16 "
        "--run runs/search"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> LoraSweepResult:
        """Train and compare all combinations.

        Returns:
            A ``LoraSweepResult`` with one result for each combination: its settings and the means
            of its scores on dev over the seeds, with confidence intervals. The best comes first.

        Raises:
            UserError: an option or the data is invalid, there is no dev split to choose by, nothing
                varies, or the folder holds something else.
            LlmcondError: the encoder cannot be loaded, every training failed, or a process was
                killed.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> swept = llmcond.sweep_lora(
            ...     model="minilm", data=rows, head="none", epochs=1, seeds=1,
            ...     vary={"learning_rate": [1e-4, 1e-3]},
            ... )
            >>> len(swept.results), swept.best.run
            (2, PosixPath('runs/default/best'))
        """
        from llmcond.report.figures import write_plots
        from llmcond.workflows.sweep_lora import sweep_lora

        swept = sweep_lora(self)
        write_plots(swept.results, self.plot, self.plot_steps)
        return swept

    def show(self, result: LoraSweepResult, form: str) -> None:
        """Print a table."""
        from llmcond.report.tables import sweep_table

        sweep_table(result.results, self.run).print(form)


sweep_lora = as_function(SweepLora)
