"""``llmcond fit-head``: fit a head on a run's training features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import verb
from llmcond.commands.shared import InRun, WithDevice
from llmcond.options import option
from llmcond.workflows.options import DevOptions

if TYPE_CHECKING:
    from llmcond.workflows.fit import FittedResult


@dataclass(frozen=True, kw_only=True)
class FitHead(InRun, WithDevice, DevOptions):
    """Fit a head on a run's training features, and keep it in the run."""

    example: ClassVar[str] = "llmcond fit-head --head mlp --dim 256 --set epochs=50"

    head: str = option(
        metavar="NAME_OR_FILE", help="a recipe (`llmcond heads` lists the bundled ones)"
    )
    dim: int | None = option(
        None,
        metavar="K",
        help="size of the embeddings (default: the recipe's, at most the features')",
    )
    prompt: str | None = option(
        None, metavar="NAME", help="whose features; a+b takes both (default: the only one)"
    )
    subtract: bool | None = option(
        None,
        help="subtract the unconditional embedding (default: yes; where candidates are ranked, no)",
    )
    seed: int = option(0, metavar="S", help="seed of everything random")
    set: Mapping[str, str] | None = option(
        None, metavar="KEY=VALUE", help="other settings of the recipe"
    )
    name: str | None = option(
        None, metavar="NAME", help="of the head in the run (default: RECIPE@PROMPT)"
    )

    def execute(self) -> FittedResult:
        """Fit and save."""
        from llmcond.workflows.fit import fit_head

        dev = self.part(DevOptions)
        return self.call(fit_head, run_folder=self.run, changes=self.set, with_dev=dev)


fit_head = verb(FitHead)
