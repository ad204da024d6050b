"""Ways of predicting similarity from a run's features: a fitted head, or none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import as_matrix
from llmcond.features.view import View
from llmcond.heads import PairArrays, cosine
from llmcond.prompts import Prompt
from llmcond.runs import SavedHead, head_name

#: Rows compared at a time.
_BLOCK = 8_192


@dataclass(frozen=True, slots=True)
class Zeroshot:
    """Features compared as they are."""

    view: View


def zeroshots(prompt: Prompt) -> list[Zeroshot]:
    """Return the ways to compare a prompt's features as they are, with subtraction last."""
    # Separate features without subtraction leave the condition out; a control without it has
    # nothing to subtract.
    ways = (True,) if prompt.separate or not prompt.subtractable else (False, True)
    return [Zeroshot(View((prompt,), subtract)) for subtract in ways]


def label(way: SavedHead | Zeroshot) -> str:
    """Return what results call a way of predicting: a head's name, or none@PROMPT."""
    if isinstance(way, SavedHead):
        return way.name
    return head_name("none", way.view)


def predict(way: SavedHead | Zeroshot, pairs: PairArrays) -> NDArray[np.float32]:
    """Return the predicted similarity of each row, (n,) float32.

    Args:
        way: a head, or none.
        pairs: the rows as it sees them.
    """
    blocks = []
    for start in range(0, len(pairs), _BLOCK):
        block = pairs.take(np.arange(len(pairs))[start : start + _BLOCK])
        if isinstance(way, Zeroshot):
            first, second = as_matrix(block.first), as_matrix(block.second)
            blocks.append(cosine(first[:], second[:]))
        else:
            blocks.append(way.head.similarity(block.first, block.second, block.condition))
    return np.concatenate(blocks)
