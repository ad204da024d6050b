"""Several heads of one recipe as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.heads.module import HeadModule


class Ensemble(HeadModule):
    """Embeddings of several heads, each of length 1, side by side: the cosine is their mean.

    In files the parameters of the i-th head begin with ``member{i}.``.
    """

    def __init__(self, heads: Sequence[HeadModule]) -> None:
        first = heads[0]
        super().__init__(first.settings, first.dim_in, first.dim_condition)
        self._has_cosine = type(first).similarity is HeadModule.similarity
        for number, head in enumerate(heads):
            self.add_module(f"member{number}", head)

    def forward(
        self, x: Tensor, condition: Tensor | None = None, which: Tensor | None = None
    ) -> Tensor:
        """Return embeddings, (m, heads * k)."""
        parts = [head(x, condition, which) for head in self.children()]
        if not self._has_cosine:
            return torch.cat(parts, dim=1)
        embedded: Tensor = torch.cat([normalize(part) for part in parts], dim=1) / len(parts) ** 0.5
        return embedded

    def similarity(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the mean of the heads' similarities, (n,)."""
        if self._has_cosine:
            return torch.cosine_similarity(first, second)
        heads: list[Any] = list(self.children())
        sides = [side.chunk(len(heads), dim=1) for side in (first, second)]
        found = [head.similarity(*own) for head, *own in zip(heads, *sides, strict=True)]
        mean: Tensor = torch.stack(found).mean(dim=0)
        return mean


def members_of(module: HeadModule) -> list[Any]:
    """Return the heads of an ensemble, or a list of the module itself if it is none."""
    return list(module.children()) if isinstance(module, Ensemble) else [module]
