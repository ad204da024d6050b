"""From token vectors to one vector a text."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcond.encoders.spec import Pooling


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool the token vectors of right-padded texts.

    Args:
        hidden: (rows, tokens, dim), of any floating type.
        mask: (rows, tokens), True at the tokens that count; every row has one at least.
        pooling: ``cls`` the first token, ``mean`` and ``latent`` the mean of those that count,
            ``last`` the last token that counts. (``pooler`` is a layer of the model's own.)

    Returns:
        (rows, dim) in float32. The sum of a mean is taken in float32 too: pooling in bfloat16
        costs more accuracy than the whole encoder does.
    """
    if pooling == "cls":
        return hidden[:, 0].float()
    if pooling == "last":
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, positions, -1).amax(dim=1)
        return hidden[torch.arange(len(hidden), device=hidden.device), last].float()
    weights = mask.unsqueeze(-1).float()
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)
