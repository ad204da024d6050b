"""What all heads share that make embeddings of features: checks, and blocks of rows.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from llmcond.arrays import Array, MatrixLike
from llmcond.errors import UserError

#: Vectors transformed at a time, so that memory does not grow with their number.
_BLOCK = 65_536


class Sized(Protocol):
    """A head, as far as its inputs are concerned."""

    @property
    def kind(self) -> str:
        """Return the name of its kind."""

    @property
    def dim_in(self) -> int:
        """Return the size of the features; 0: any."""

    @property
    def dim_condition(self) -> int:
        """Return the size of the condition's features; 0 where it takes none."""


def check_features(head: Sized, features: MatrixLike, condition: MatrixLike | None) -> None:
    """Check that a head can be applied to features, (n, dim), under conditions, (n or 1, dim_c).

    Raises:
        UserError: features of another size, or conditions that are missing or not wanted.
    """
    kind = head.kind
    if head.dim_in and features.shape[1] != head.dim_in:
        raise UserError(
            f"the features have {features.shape[1]} dimensions; this {kind} head was fitted on "
            f"{head.dim_in}."
        )
    got = 0 if condition is None else int(condition.shape[1])
    if condition is not None and len(condition) not in (1, len(features)):
        raise UserError(
            f"there are {len(features)} sentences and {len(condition)} conditions; they must "
            "be as many, or one condition for all."
        )
    if got == head.dim_condition:
        return
    if not got:
        raise UserError(
            f"this {kind} head takes the features of each condition as well, "
            f"(n, {head.dim_condition}); none were given."
        )
    wanted = f"{head.dim_condition} dimensions" if head.dim_condition else "none"
    raise UserError(
        f"the conditions have {got} dimensions; this {kind} head was fitted on {wanted}."
    )


def transform_blocks(embed: Callable[[slice], Array], n: int) -> Array:
    """Return embeddings of n rows, (n, k), from ``embed``, which gives those of some rows."""
    blocks = [embed(slice(start, start + _BLOCK)) for start in range(0, max(n, 1), _BLOCK)]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
