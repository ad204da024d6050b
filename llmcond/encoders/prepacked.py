"""Linear layers of a CPU in 16 bit, with weights laid out once as its products read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llmcond.encoders.memory import POOLS

#: oneDNN chooses the layout for about so many tokens; any number can be multiplied.
_TOKENS = 1_024


class PrepackedLinear(nn.Module):
    """A frozen linear layer for a CPU. Make one with :func:`prepack`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # The operators that torch.compile puts for linear layers on a CPU: eager PyTorch would lay
        # the weight out anew at each call.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TOKENS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """Return a copy of W, for code that looks at it."""
        weight: Tensor = self._weight.to_dense()
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return y


def can_prepack(dtype: torch.dtype) -> bool:
    """Tell whether this machine's PyTorch multiplies prepacked weights of a type."""
    present: Any = torch.backends.mkldnn.is_available
    return (
        dtype == torch.bfloat16
        and bool(present())
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def prepack(network: nn.Module) -> None:
    """Replace the linear layers of a network on a CPU, one by one, by prepacked ones.

    Not those that pool: they get as many rows as there are texts, or tokens of them, and would be
    prepared for each number anew.
    """
    found: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for prefix, parent in network.named_modules()
        for name, child in parent.named_children()
        # Not of a subclass: quantised layers have weights of their own.
        if type(child) is nn.Linear and not any(part in f"{prefix}.{name}" for part in POOLS)
    ]
    for parent, name, linear in found:
        setattr(parent, name, PrepackedLinear(linear))
