"""Heads: small modules fitted on cached features. They know arrays, nothing of encoders or rows."""

from llmcond.arrays import Concatenated, Difference, Gathered, Matrix, MatrixLike
from llmcond.heads.base import FittedHead, cosine
from llmcond.heads.module import HeadModule
from llmcond.heads.pairs import PairArrays
from llmcond.heads.queries import FittedQueryHead, QueryArrays, QueryFeatures, joint_keys
from llmcond.heads.query_fit import fit_queries
from llmcond.heads.recipes import Recipe, fit_recipe, load_recipe
from llmcond.heads.settings import SizedSettings, TrainingSettings
from llmcond.heads.storage import load_head, load_query_head, save_head

__all__ = [
    "Concatenated",
    "Difference",
    "FittedHead",
    "FittedQueryHead",
    "Gathered",
    "HeadModule",
    "Matrix",
    "MatrixLike",
    "PairArrays",
    "QueryArrays",
    "QueryFeatures",
    "Recipe",
    "SizedSettings",
    "TrainingSettings",
    "cosine",
    "fit_queries",
    "fit_recipe",
    "joint_keys",
    "load_head",
    "load_query_head",
    "load_recipe",
    "save_head",
]
