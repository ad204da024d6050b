"""The attention of packed rows, as transformers calls it.

transformers isolates packed texts by position ids in the causal direction only; a bidirectional
encoder would let them see each other, silently. So the attention is ours: registered with
transformers under :data:`NAME`, and given, with each forward pass, a plan that says which tokens
attend to which. No token of another text is ever among the keys, so none can leak.
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
    """Which tokens of a packed row attend to which."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend in (heads, tokens, head_dim), keys and values in as many heads or fewer.

        Returns:
            (tokens, heads, head_dim). A scale of None is head_dim ** -0.5.
        """
        ...


def _attention(
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
    """Attend as transformers does by itself, or within a packed row where there is a plan.

    A ``router`` changes what a layer attends to by another text: its method ``attend`` is given the
    layer, queries, keys and values, the scale, and a function for what there would be without it.
    """

    def usual() -> Tensor:
        if packed is None:
            output: Tensor = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )[0]
            return output
        for option in ("softcap", "position_bias", "s_aux"):
            if kwargs.get(option) is not None:
                raise NotImplementedError(f"packed attention has no {option}")
        return packed.attend(query[0], key[0], value[0], scaling)[None]

    if router is None:
        return usual(), None
    return router.attend(module, query, key, value, scaling, usual), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
