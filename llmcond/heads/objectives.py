"""What fitting minimises."""

from __future__ import annotations

import torch
from torch import Tensor


def cosine_mse(first: Tensor, second: Tensor, rating: Tensor) -> Tensor:
    """Return the mean of (cos(z1, z2) - r)^2 (CASE, equation 2, as a mean over the batch).

    Args:
        first: (n, k) embeddings of the first sentences.
        second: (n, k) embeddings of the second ones.
        rating: (n,) on 0 to 1.
    """
    return (torch.cosine_similarity(first, second) - rating).square().mean()
