"""Heads: small modules fitted on cached features. They know arrays, nothing of encoders or rows."""

from llmcond.arrays import Concatenated, Difference, Gathered, Matrix, MatrixLike
from llmcond.heads.base import FittedHead, cosine
from llmcond.heads.module import HeadModule
from llmcond.heads.pairs import PairArrays
from llmcond.heads.queries import FittedQueryHead, QueryArrays, QueryFeatures, joint_keys
from llmcond.heads.query_fit import fit_queries
from llmcond.heads.recipes import Recipe, fit_recipe, load_recipe
from llmcond.heads.settings import SizedSettings, TrainingSettings
from llmcond.heads.storage import load_head, load_query_head, load_roles_head, save_head
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
