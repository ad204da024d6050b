"""No head: the features as they are, which is the zero-shot setting."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llmcond.heads.module import HeadModule
from llmcond.heads.pairs import Fit, PairArrays
from llmcond.heads.settings import NoSettings


class Identity(HeadModule):
    """Z = e."""

    Settings = NoSettings
    supervised = False
    is_identity = True

    def solve(self, pairs: PairArrays, seed: int) -> Fit:
        """Fit nothing."""
        return Fit({"selected_on": None})

    def forward(self, x: Tensor, condition: Tensor | None = None, which: Any = None) -> Tensor:
        """Return the features."""
        return x
