"""What heads that are trained by gradient are written in: parameters, batches, and products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Weights = Mapping[str, Tensor]

_NO_VECTORS, _NO_ROWS = torch.empty(0, 0), torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight that is to be made.

    It is drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), weights and biases alike; fixed here,
    whatever the library's version does.

    Attributes:
        shape: of the tensor.
        fan_in: inputs that each of its outputs sums over.
    """

    shape: tuple[int, ...]
    fan_in: int

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return the first values."""
        bound = 1 / math.sqrt(self.fan_in)
        return torch.empty(self.shape).uniform_(-bound, bound, generator=generator)

    @property
    def size(self) -> int:
        """Return the number of its values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a head is applied to.

    Attributes:
        x: (m, dim) features of sentences.
        c: (u, dim_c) features of the distinct conditions among them; none, (0, 0).
        which: (m,) the condition of each row, where there are any.
    """

    x: Tensor
    c: Tensor = _NO_VECTORS
    which: Tensor = _NO_ROWS


class Ops:
    """What differs between training a head and applying it: dropout, and the type of products.

    Attributes:
        training: whether units are dropped.
    """

    def __init__(
        self, dropout: float = 0.0, masks: np.random.Generator | None = None, half: bool = False
    ) -> None:
        """Take the share that is dropped; ``masks`` draws what. Without it nothing is."""
        self.training = masks is not None
        self._masks, self._half = masks, half
        #: Sixteen bits a unit are drawn: bits for a float of each take longer than the products.
        self._kept = max(1, round((1 - dropout) * 65_536))

    def dropout(self, values: Tensor) -> Tensor:
        """Return values of which some are 0, and the others larger by as much."""
        if self._masks is None or self._kept == 65_536:
            return values
        drawn = self._masks.integers(65_536, size=tuple(values.shape), dtype=np.uint16)
        scale = torch.from_numpy(drawn < self._kept).to(values)
        return values * scale.mul_(65_536 / self._kept)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T."""
        if self._half:
            return (x.bfloat16() @ weight.bfloat16().T).to(weight.dtype)
        return x.to(weight.dtype) @ weight.T

    def batched(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Return x_i M_i for each i: (n, m, a) and (n, a, b) give (n, m, b)."""
        if self._half:
            return torch.bmm(x.bfloat16(), matrices.bfloat16()).to(matrices.dtype)
        return torch.bmm(x.to(matrices.dtype), matrices)


@dataclass(frozen=True, slots=True)
class Network:
    """A head as a function with weights.

    Attributes:
        parameters: (settings, dim, dim_c) -> what is to be made, by name.
        forward: (weights, settings, batch, ops) -> (m, k) embeddings.
    """

    parameters: Callable[[Any, int, int], Mapping[str, Parameter]]
    forward: Callable[[Weights, Any, Batch, Ops], Tensor]


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
}


def by_condition(x: Tensor, which: Tensor, factors: list[Tensor], ops: Ops) -> Tensor:
    """Multiply each row by the matrices of its condition, left to right: ((x F1) F2) ...

    No matrix is copied for each row, and no product of two factors is formed. Rows of a condition
    are multiplied at once, padded to a common number; where a condition has far more rows than
    others, it is cut into several.

    Args:
        x: (m, dim).
        which: (m,) the condition of each row, below u.
        factors: each (u, a, b), the first with a = dim.
        ops: makes the products.

    Returns:
        (m, b) of the last factor.
    """
    count = len(factors[0])
    if not len(x):
        return x.new_empty(0, factors[-1].shape[2], dtype=factors[-1].dtype)
    rows = torch.bincount(which, minlength=count)
    most = max(4, -(-2 * len(x) // max(count, 1)))
    width = int(min(int(rows.max()), most))
    pieces = (rows + width - 1) // width
    order = torch.argsort(which, stable=True)
    ordered = which[order]
    begins = torch.cumsum(rows, 0) - rows
    rank = torch.arange(len(x), device=x.device) - begins[ordered]
    place = (torch.cumsum(pieces, 0) - pieces)[ordered] * width + rank
    total = int(pieces.sum())
    grouped = x.new_zeros(total * width, x.shape[1]).index_copy(0, place, x[order])
    grouped = grouped.view(total, width, -1)
    # As a rule every condition is one piece, and no matrix is copied at all.
    whole = bool((pieces == 1).all())
    owner = torch.repeat_interleave(torch.arange(count, device=x.device), pieces)
    for factor in factors:
        # Not factor[owner]: gradients of an index are added in any order on several threads.
        grouped = ops.batched(grouped, factor if whole else factor.index_select(0, owner))
    back = torch.empty_like(place)
    back[order] = place
    return grouped.reshape(total * width, -1)[back]
