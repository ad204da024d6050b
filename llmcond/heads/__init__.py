"""Heads: small modules fitted on cached features. They know arrays, nothing of encoders or rows.

Names that need torch are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcond.arrays import Concatenated, Difference, Gathered, Matrix, MatrixLike, cosine
from llmcond.lazy import lazy_getattr

if TYPE_CHECKING:
    from llmcond.heads.base import FittedHead
    from llmcond.heads.loading import load_head
    from llmcond.heads.module import HeadModule
    from llmcond.heads.pairs import PairArrays
    from llmcond.heads.recipes import Recipe, fit_recipe, load_recipe
    from llmcond.heads.settings import SizedSettings, TrainingSettings
    from llmcond.heads.storage import save_head

__all__ = [
    "Concatenated",
    "Difference",
    "FittedHead",
    "Gathered",
    "HeadModule",
    "Matrix",
    "MatrixLike",
    "PairArrays",
    "Recipe",
    "SizedSettings",
    "TrainingSettings",
    "cosine",
    "fit_recipe",
    "load_head",
    "load_recipe",
    "save_head",
]

_HOMES = {
    "FittedHead": "llmcond.heads.base",
    "HeadModule": "llmcond.heads.module",
    "PairArrays": "llmcond.heads.pairs",
    "Recipe": "llmcond.heads.recipes",
    "SizedSettings": "llmcond.heads.settings",
    "TrainingSettings": "llmcond.heads.settings",
    "fit_recipe": "llmcond.heads.recipes",
    "load_head": "llmcond.heads.loading",
    "load_recipe": "llmcond.heads.recipes",
    "save_head": "llmcond.heads.storage",
}


if not TYPE_CHECKING:  # type checkers would take any name for one of the package
    __getattr__ = lazy_getattr(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
