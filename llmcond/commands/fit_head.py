"""``llmcond fit-head``: fit a head on a run's training features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, verb
from llmcond.workflows.options.fitting import FitHeadOptions

if TYPE_CHECKING:
    from llmcond.workflows.fit import FittedResult


@dataclass(frozen=True, kw_only=True)
class FitHead(FitHeadOptions, Command):
    """Fit a head on a run's training features, and keep it in the run."""

    position = 20
    example = "llmcond fit-head --head mlp --dim 256 --set epochs=50"

    def execute(self) -> FittedResult:
        """Fit and save."""
        from llmcond.workflows.fit import fit_head

        return fit_head(self)


fit_head = verb(FitHead)
