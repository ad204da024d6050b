"""Linear layers of a CPU in 16 bit, with weights laid out once as its products read them.

What follows a product in the same layer, an activation or the residual's sum, is done to each
tile of it while that is in the cache, and before it is rounded.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from llmcond.encoders.loading.memory import POOLS

#: oneDNN chooses the layout for about so many tokens; any number can be multiplied.
_TOKENS = 1_024
#: Layers whose output goes through an activation and nowhere else, by the names of both.
_ACTIVATED = {"dense": "intermediate_act_fn", "gate_proj": "act_fn"}
#: The activations that oneDNN computes, as it calls them.
_ACTIVATIONS = {"gelu": ("gelu", "none"), "silu": ("swish", "none"), "relu": ("relu", "none")}


class PrepackedLinear(nn.Module):
    """A frozen linear layer for a CPU. Make one with :func:`prepack`.

    Attributes:
        activation: what oneDNN does to its output, and by which algorithm; None: nothing.
    """

    def __init__(self, linear: nn.Linear, activation: tuple[str, str] | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.activation = activation
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
        """Return f(x W^T + b)."""
        name, algorithm = self.activation or ("none", "")
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self.bias, name, [], algorithm
        )
        return y

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return x W^T + b + residual."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._weight, self.bias, "add"
        )
        return y


class PrepackedOutput(nn.Module):
    """BERT's way out of a block: a linear layer, the residual added, and LayerNorm."""

    def __init__(self, dense: nn.Linear, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.dense = PrepackedLinear(dense)
        self.LayerNorm = norm

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Return LayerNorm(x W^T + b + residual)."""
        y: Tensor = self.LayerNorm(self.dense.plus(hidden_states, input_tensor))
        return y


def can_prepack(dtype: torch.dtype) -> bool:
    """Return whether this machine's PyTorch multiplies prepacked weights of a type."""
    present: Any = torch.backends.mkldnn.is_available
    here = present() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.bfloat16 and bool(here)


def prepack(network: nn.Module) -> None:
    """Replace the linear layers of a network on a CPU, one by one, by prepacked ones.

    Not those that pool: they get as many rows as there are texts, or tokens of them, and would be
    prepared for each number anew.
    """
    for name, child in list(network.named_children()):
        if any(part in name for part in POOLS):
            continue
        if _is_output(child):
            setattr(network, name, PrepackedOutput(child.dense, child.LayerNorm))
        # Not of a subclass: quantised layers have weights of their own.
        elif type(child) is nn.Linear:
            setattr(network, name, PrepackedLinear(child, _take_activation(network, name)))
        else:
            prepack(child)


def _is_output(module: nn.Module) -> TypeGuard[Any]:
    """Return whether a module is what :class:`PrepackedOutput` computes."""
    kinds = {name: type(child) for name, child in module.named_children()}
    wanted = {"dense": nn.Linear, "LayerNorm": nn.LayerNorm, "dropout": nn.Dropout}
    takes = list(inspect.signature(module.forward).parameters)
    return kinds == wanted and takes == ["hidden_states", "input_tensor"]


def _take_activation(parent: nn.Module, linear: str) -> tuple[str, str] | None:
    """Take the activation behind a linear layer out of its parent; None if there is none."""
    place = _ACTIVATED.get(linear)
    module = getattr(parent, place, None) if place else None
    for name, known in _ACTIVATIONS.items():
        stock: Any = ACT2FN[name]
        # GELU has variants of one class, told apart by the function inside.
        same = type(module) is type(stock)
        if place and same and getattr(module, "act", None) == getattr(stock, "act", None):
            setattr(parent, place, nn.Identity())
            return known
    return None
