"""Dense layers: which ones a kind of head consists of, and what they compute of NumPy arrays.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from llmcond.arrays import Array, gelu
from llmcond.heads.settings import (
    Activation,
    IcaSettings,
    MlpSettings,
    NoSettings,
    ProjectionSettings,
    SizedSettings,
)

#: An array of NumPy or a tensor of torch.
T = TypeVar("T")


#: What :data:`llmcond.heads.module.ACTIVATIONS` has of tensors.
ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "none": lambda values: values,
    "relu": lambda values: np.maximum(values, 0),
    "gelu": gelu,
    "tanh": np.tanh,
}


class DenseLayer(NamedTuple, Generic[T]):
    """A linear layer with the activation behind it: f((x - mean) W^T + b).

    Attributes:
        weight: (out, in).
        bias: (out,); None: there is none.
        activation: f.
        mean: (in,); None: nothing is subtracted.
    """

    weight: T
    bias: T | None = None
    activation: Activation = "none"
    mean: T | None = None


class LayerForm(NamedTuple):
    """A dense layer of a kind of head, whose tensors have these names and sizes.

    Attributes:
        name: name of the weight.
        size_out: size of the outputs; 0: as the weight has it.
        size_in: size of the inputs.
        mean: name of what is subtracted from the inputs; None: nothing is.
    """

    name: str
    size_out: int
    size_in: int
    activation: Activation = "none"
    mean: str | None = None

    def layer(self, tensors: Mapping[str, T]) -> DenseLayer[T]:
        """Return the layer of this form, by the names of tensors."""
        mean = None if self.mean is None else tensors[self.mean]
        return DenseLayer(tensors[self.name], None, self.activation, mean)


def linear_forms(settings: SizedSettings, dim_in: int) -> list[LayerForm]:
    """Return the layer of the linear head."""
    return [LayerForm("weight", settings.dim, dim_in)]


def mlp_forms(settings: MlpSettings, dim_in: int) -> list[LayerForm]:
    """Return the layers of the MLP."""
    hidden = settings.hidden or settings.dim
    sizes = pairwise([dim_in, *[hidden] * (settings.depth - 1), settings.dim])
    forms = [
        LayerForm(f"weight{number}", size_out, size_in, settings.activation)
        for number, (size_in, size_out) in enumerate(sizes, start=1)
    ]
    if settings.last == "none":
        forms[-1] = forms[-1]._replace(activation="none")
    return forms


def projection_forms(settings: ProjectionSettings, dim_in: int) -> list[LayerForm]:
    """Return the layer of an unsupervised head, of as many components as could be fitted."""
    return [LayerForm("components", 0, dim_in, mean="mean")]


#: The kinds of heads that are dense layers, whatever the condition: settings and layers of each.
PLAIN_KINDS: Mapping[str, tuple[type[Any], Callable[[Any, int], Sequence[LayerForm]]]] = {
    "none": (NoSettings, lambda settings, dim_in: []),
    "linear": (SizedSettings, linear_forms),
    "mlp": (MlpSettings, mlp_forms),
    "pca": (ProjectionSettings, projection_forms),
    "ica": (IcaSettings, projection_forms),
    "whitening": (ProjectionSettings, projection_forms),
    "random": (ProjectionSettings, projection_forms),
}


def apply_layers(layers: Sequence[DenseLayer[Array]], values: Array) -> Array:
    """Return (n, out) float32 of the inputs, (n, in) float32."""
    for weight, bias, activation, mean in layers:
        centred: Array = values if mean is None else values - mean
        product: Array = centred @ weight.T
        values = ACTIVATIONS[activation](product if bias is None else product + bias)
    return values
