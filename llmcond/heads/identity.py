"""No head: the features as they are, which is the zero-shot setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llmcond.arrays import Array, Matrix
from llmcond.config import STRICT
from llmcond.heads.base import Family, Fit, OnEpoch, PairArrays, Tensors


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Nothing to set."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


def _fit(
    pairs: PairArrays, dev: PairArrays | None, settings: Any, seed: int, on_epoch: OnEpoch
) -> Fit:
    return Fit({}, {"selected_on": None})


def _transform(tensors: Tensors, settings: Any, features: Array, condition: Matrix | None) -> Array:
    return features


NONE = Family("none", NoSettings, _fit, _transform)
