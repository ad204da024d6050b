"""Heads: small modules fitted on cached features. They know arrays, nothing of encoders or rows.

Names that need torch are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcond.arrays import Concatenated, Difference, Gathered, Matrix, MatrixLike, cosine
from llmcond.lazy import lazy_getattr

if TYPE_CHECKING:
    from llmcond.heads.base import FittedHead
    from llmcond.heads.loading import load_head, load_query_head, load_roles_head
    from llmcond.heads.module import HeadModule
    from llmcond.heads.pairs import PairArrays
    from llmcond.heads.queries import FittedQueryHead, QueryArrays, QueryFeatures, joint_keys
    from llmcond.heads.query_fit import fit_queries
    from llmcond.heads.recipes import Recipe, fit_recipe, load_recipe
    from llmcond.heads.settings import SizedSettings, TrainingSettings
    from llmcond.heads.storage import save_head
    from llmcond.heads.turn_fit import FittedRoles, TurnArrays, fit_turns
    from llmcond.heads.turns import Score, State

__all__ = [
    "Concatenated",
    "Difference",
    "FittedHead",
    "FittedQueryHead",
    "FittedRoles",
    "Gathered",
    "HeadModule",
    "Matrix",
    "MatrixLike",
    "PairArrays",
    "QueryArrays",
    "QueryFeatures",
    "Recipe",
    "Score",
    "SizedSettings",
    "State",
    "TrainingSettings",
    "TurnArrays",
    "cosine",
    "fit_queries",
    "fit_recipe",
    "fit_turns",
    "joint_keys",
    "load_head",
    "load_query_head",
    "load_recipe",
    "load_roles_head",
    "save_head",
]

_HOMES = {
    "FittedHead": "llmcond.heads.base",
    "FittedQueryHead": "llmcond.heads.queries",
    "FittedRoles": "llmcond.heads.turn_fit",
    "HeadModule": "llmcond.heads.module",
    "PairArrays": "llmcond.heads.pairs",
    "QueryArrays": "llmcond.heads.queries",
    "QueryFeatures": "llmcond.heads.queries",
    "Recipe": "llmcond.heads.recipes",
    "Score": "llmcond.heads.turns",
    "SizedSettings": "llmcond.heads.settings",
    "State": "llmcond.heads.turns",
    "TrainingSettings": "llmcond.heads.settings",
    "TurnArrays": "llmcond.heads.turn_fit",
    "fit_queries": "llmcond.heads.query_fit",
    "fit_recipe": "llmcond.heads.recipes",
    "fit_turns": "llmcond.heads.turn_fit",
    "joint_keys": "llmcond.heads.queries",
    "load_head": "llmcond.heads.loading",
    "load_query_head": "llmcond.heads.loading",
    "load_recipe": "llmcond.heads.recipes",
    "load_roles_head": "llmcond.heads.loading",
    "save_head": "llmcond.heads.storage",
}


if not TYPE_CHECKING:  # type checkers would take any name for one of the package
    __getattr__ = lazy_getattr(__name__, _HOMES)


def __dir__() -> list[str]:
    return list(__all__)
