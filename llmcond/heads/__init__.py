"""Heads: small maps fitted on cached features. They know arrays, nothing of encoders or rows."""

from llmcond.arrays import Difference, Joined, Lookup, Matrix
from llmcond.heads.base import FittedHead, PairArrays, cosine
from llmcond.heads.recipes import Recipe, fit_recipe, load_recipe
from llmcond.heads.storage import load_head, save_head

__all__ = [
    "Difference",
    "FittedHead",
    "Joined",
    "Lookup",
    "Matrix",
    "PairArrays",
    "Recipe",
    "cosine",
    "fit_recipe",
    "load_head",
    "load_recipe",
    "save_head",
]
