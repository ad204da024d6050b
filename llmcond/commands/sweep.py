"""``llmcond sweep``: fit heads for every combination of settings and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import RESUMES, verb
from llmcond.commands.shared import InRun, WithDevice
from llmcond.errors import UserError
from llmcond.options import option
from llmcond.workflows.options import WithMetrics, WithSplit, WithTrials

if TYPE_CHECKING:
    from llmcond.workflows.sweep import SweepResult


@dataclass(frozen=True, kw_only=True)
class Sweep(InRun, WithSplit, WithMetrics, WithTrials, WithDevice):
    """Fit heads for every combination of settings and seeds; resumes, in one table."""

    example: ClassVar[str] = (
        "llmcond sweep --head mlp linear --vary dim=64,128,256 --seeds 3 --plot dim.png"
    )
    formats: ClassVar[bool] = True
    if_interrupted: ClassVar[str] = RESUMES

    head: Sequence[str] = option(metavar="NAME_OR_FILE", help="recipes")
    vary: Mapping[str, str] | None = option(
        None,
        metavar="KEY=V,V",
        help="a setting of the recipe (dim, rank, learning_rate, temperature, ...) and its values",
    )
    prompt: Sequence[str] = option(
        (), metavar="NAME", help="whose features; a+b takes both (default: the only one)"
    )
    subtract: bool | None = option(
        None,
        help="subtract the unconditional embedding (default: yes; where candidates are ranked, no)",
    )
    plot: str | Path | None = option(
        None,
        metavar="FILE",
        help="picture of the main metric against the first setting of several numbers (.png, .svg)",
    )
    plot_steps: str | Path | None = option(
        None, metavar="FILE", help="picture of the score on dev against training steps (.png, .svg)"
    )

    def execute(self) -> SweepResult:
        """Fit and score all combinations."""
        from llmcond.report.sweeps import check_plot, plot_settings, plot_steps
        from llmcond.workflows.sweep import sweep

        vary = {
            key: values.split(",") if isinstance(values, str) else [str(one) for one in values]
            for key, values in (self.vary or {}).items()
        }
        several = [self.head, self.prompt, *vary.values()]
        if self.seeds == 1 and all(len(set(values)) <= 1 for values in several):
            raise UserError(
                "there is nothing to vary. Give several values (--vary dim=64,128,256), heads, "
                "prompts or --seeds."
            )
        plots = [Path(path) for path in (self.plot, self.plot_steps) if path is not None]
        if len({path.absolute() for path in plots}) < len(plots):
            raise UserError(f"--plot and --plot-steps both name {plots[0]}. Name two files.")
        for path in plots:
            check_plot(path)
        swept = self.call(
            sweep,
            run_folder=self.run,
            heads=self.head,
            vary=vary,
            prompts=self.prompt or (None,),
            changes=self.set,
            metrics=self.metric,
        )
        if self.plot is not None:
            plot_settings(swept.results, Path(self.plot))
        if self.plot_steps is not None:
            plot_steps(swept.results, Path(self.plot_steps))
        return swept

    def show(self, result: SweepResult, form: str) -> None:
        """Print a table."""
        from llmcond.report.sweeps import sweep_table
        from llmcond.report.terminal import show

        show(sweep_table(result.results, self.run), form)


sweep = verb(Sweep)
