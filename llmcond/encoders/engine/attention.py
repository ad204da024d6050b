"""Attention of packed rows, registered with transformers under ``NAME``.

transformers isolates packed texts by their position ids in the causal direction only. In a
bidirectional encoder, packed texts would silently attend to each other. llmcond therefore registers
an attention function of its own, and passes it a plan with each forward pass that says which tokens
attend to which. The keys of a text never include a token of another text, so nothing can leak.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "llmcond_packed"


class AttentionPlan(Protocol):
    """A plan that says which tokens of a packed row attend to which."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of one packed row.

        Args:
            query: (heads, tokens, head_dim).
            key: Like ``query``, with the same number of heads or fewer.
            value: Like ``key``.
            scale: Factor of the scores; None means head_dim ** -0.5.

        Returns:
            (tokens, heads, head_dim).
        """
        ...


def _compute_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: AttentionPlan | None = None,
    router: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer, within a packed row if there is a plan (``packed``).

    Without a plan, this is the scaled dot product attention of transformers. A ``router`` modifies
    the result by another text: its method ``attend`` gets the layer, the queries, keys and values,
    the scale, and a function that computes the attention without the router.
    """

    def attend_without_router() -> Tensor:
        if packed is None:
            output: Tensor = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )[0]
            return output
        for option in ("softcap", "position_bias", "s_aux"):
            if kwargs.get(option) is not None:
                raise NotImplementedError(f"packed attention does not support {option}")
        return packed.attend(query[0], key[0], value[0], scaling)[None]

    if router is None:
        return attend_without_router(), None
    return router.attend(module, query, key, value, scaling, attend_without_router), None


AttentionInterface.register(NAME, _compute_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
