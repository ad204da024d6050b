"""``llmcond fit-head``: fit a head on the features of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, as_function
from llmcond.workflows.options.fitting import FitHeadOptions

if TYPE_CHECKING:
    from llmcond.workflows.fit import FittedResult


@dataclass(frozen=True, kw_only=True)
class FitHead(FitHeadOptions, Command):
    """Fit a head on the training features of a run, and save it in the run."""

    position = 20
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
