"""No head: the features as they are, which is the zero-shot setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from llmcond.config import STRICT
from llmcond.heads.module import HeadModule
from llmcond.heads.pairs import Fit, PairArrays


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Nothing to set."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


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
