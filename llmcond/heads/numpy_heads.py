"""Heads of dense layers, computed with NumPy so that embedding texts needs no torch.

PyTorch heads use the same layer descriptions and the same checks of features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, MatrixLike, as_matrix, cosine, gelu
from llmcond.errors import UserError
from llmcond.heads.settings import (
    Activation,
    IcaSettings,
    MlpSettings,
    NoSettings,
    ProjectionSettings,
    SizedSettings,
)

#: Number of vectors transformed at a time, which bounds the memory.
_BLOCK = 65_536

#: A NumPy array or a torch tensor.
T = TypeVar("T")


#: Activations of NumPy arrays; ``llmcond.heads.module.ACTIVATIONS`` has those of tensors.
ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "none": lambda values: values,
    "relu": lambda values: np.maximum(values, 0),
    "gelu": gelu,
    "tanh": np.tanh,
}


class DenseLayer(NamedTuple, Generic[T]):
    """A linear layer followed by an activation: f((x - mean) W^T + b).

    Attributes:
        weight: (out, in) W.
        bias: (out,) b; None: no bias.
        activation: f.
        mean: (in,) vector subtracted from the inputs; None: nothing is subtracted.
    """

    weight: T
    bias: T | None = None
    activation: Activation = "none"
    mean: T | None = None


class LayerSpec(NamedTuple):
    """Names and sizes of the tensors of a dense layer.

    Attributes:
        name: name of the weight.
        size_out: number of outputs; 0: determined by the weight.
        size_in: number of inputs.
        activation: activation after the linear layer.
        mean: name of the vector subtracted from the inputs; None: nothing is subtracted.
        dropout: whether dropout is applied to the outputs in training.
    """

    name: str
    size_out: int
    size_in: int
    activation: Activation = "none"
    mean: str | None = None
    dropout: bool = True

    def layer(self, tensors: Mapping[str, T]) -> DenseLayer[T]:
        """Return the layer, given its tensors by name."""
        mean = None if self.mean is None else tensors[self.mean]
        return DenseLayer(tensors[self.name], None, self.activation, mean)


def mlp_layers(settings: MlpSettings, dim_in: int) -> list[LayerSpec]:
    """Return the layers of the MLP."""
    hidden = settings.hidden or settings.dim
    sizes = pairwise([dim_in, *[hidden] * (settings.depth - 1), settings.dim])
    specs = [
        LayerSpec(f"weight{number}", size_out, size_in, settings.activation)
        for number, (size_in, size_out) in enumerate(sizes, start=1)
    ]
    if settings.last == "none":
        specs[-1] = specs[-1]._replace(activation="none", dropout=False)
    return specs


def projection_layers(settings: ProjectionSettings, dim_in: int) -> list[LayerSpec]:
    """Return the layer of an unsupervised head; its number of components depends on the data."""
    return [LayerSpec("components", 0, dim_in, mean="mean")]


#: Settings class and layers of each kind of head that consists of dense layers and does not depend
#: on the condition.
DENSE_KINDS: Mapping[str, tuple[type[Any], Callable[[Any, int], Sequence[LayerSpec]]]] = {
    "none": (NoSettings, lambda settings, dim_in: []),
    "linear": (SizedSettings, lambda settings, dim_in: [LayerSpec("weight", settings.dim, dim_in)]),
    "mlp": (MlpSettings, mlp_layers),
    "pca": (ProjectionSettings, projection_layers),
    "ica": (IcaSettings, projection_layers),
    "whitening": (ProjectionSettings, projection_layers),
    "random": (ProjectionSettings, projection_layers),
}


#: Kinds whose embeddings, truncated to k dimensions, are those of the same head with dim k: the
#: components of PCA and whitening are sorted by variance, and those of a random projection are
#: independent. Those of ICA have no order.
ORDERED_KINDS = ("pca", "whitening", "random")


def apply_layers(layers: Sequence[DenseLayer[Array]], values: Array) -> Array:
    """Apply layers to (n, in) float32 inputs; return (n, out) float32."""
    for weight, bias, activation, mean in layers:
        centred: Array = values if mean is None else values - mean
        product: Array = centred @ weight.T
        values = ACTIVATIONS[activation](product if bias is None else product + bias)
    return values


class _FeatureSizes(Protocol):
    """The attributes of a head that describe its inputs."""

    @property
    def kind(self) -> str: ...
    @property
    def dim_in(self) -> int: ...  # 0: any
    @property
    def dim_condition(self) -> int: ...  # 0: none


def check_features(head: _FeatureSizes, features: MatrixLike, condition: MatrixLike | None) -> None:
    """Check that a head can be applied to features, (n, dim), and conditions, (n or 1, dim_c).

    Raises:
        UserError: the features have another size, or conditions are missing or not expected.
    """
    kind = head.kind
    if head.dim_in and features.shape[1] != head.dim_in:
        raise UserError(
            f"the features have {features.shape[1]} dimensions; this {kind} head was fitted on "
            f"{head.dim_in}."
        )
    dim_condition = 0 if condition is None else int(condition.shape[1])
    if condition is not None and len(condition) not in (1, len(features)):
        raise UserError(
            f"there are {len(features)} sentences and {len(condition)} conditions. Give one "
            "condition per sentence, or one for all."
        )
    if dim_condition == head.dim_condition:
        return
    if not dim_condition:
        raise UserError(
            f"this {kind} head also needs the features of each condition, "
            f"(n, {head.dim_condition}); none were given."
        )
    expected = f"{head.dim_condition} dimensions" if head.dim_condition else "none"
    raise UserError(
        f"the conditions have {dim_condition} dimensions; this {kind} head was fitted on "
        f"{expected}."
    )


def transform_blocks(embed: Callable[[slice], Array], n: int) -> Array:
    """Compute embeddings of n rows, (n, k), block by block; ``embed`` returns those of a slice."""
    blocks = [embed(slice(start, start + _BLOCK)) for start in range(0, max(n, 1), _BLOCK)]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


_Layers = Sequence[DenseLayer[Array]]


@dataclass(frozen=True, eq=False)
class NumpyHead:
    """A fitted head of a kind in ``DENSE_KINDS``, with the interface of ``FittedHead``.

    Attributes:
        kind: name of the kind in recipes and in head.json.
        settings: an instance of the kind's settings.
        dim_in: size of the features; 0: any size, for a head of kind ``none`` that was not fitted.
        tensors: parameters by their names in the weights file.
    """

    kind: str
    settings: Any
    dim_in: int
    tensors: Mapping[str, NDArray[Any]]

    dim_condition: ClassVar[int] = 0
    features: ClassVar[str] = "joint"
    conditioned: ClassVar[bool] = False
    generates_matrices: ClassVar[bool] = False
    compares_by_cosine: ClassVar[bool] = True

    @cached_property
    def members(self) -> Sequence[_Layers]:
        """The layers of each head of an ensemble, or of the only head.

        Raises:
            ValueError: the tensors do not belong to a head with these settings.
        """
        specs = DENSE_KINDS[self.kind][1](self.settings, self.dim_in)
        names = [name for spec in specs for name in (spec.name, spec.mean) if name is not None]
        n = getattr(self.settings, "members", 1)
        prefixes = [f"member{number}." for number in range(n)] if n > 1 else [""]
        differences = self.tensors.keys() ^ {part + name for part in prefixes for name in names}
        if differences:
            raise ValueError(f"missing or unexpected: {', '.join(sorted(differences))}")
        tensors = {name: np.asarray(value, np.float32) for name, value in self.tensors.items()}
        return [
            [_build_layer(spec, {name: tensors[part + name] for name in names}) for spec in specs]
            for part in prefixes
        ]

    @property
    def is_identity(self) -> bool:
        """Whether embeddings are the unchanged features."""
        return self.kind == "none"

    @property
    def dim_out(self) -> int:
        """Size of the embeddings; 0: that of the features."""
        return sum(len(layers[-1].weight) if layers else self.dim_in for layers in self.members)

    def dense_layers(self, condition: Array | None = None) -> _Layers | None:
        """Return the layers, which are the same for all conditions; None for an ensemble."""
        return self.members[0] if len(self.members) == 1 else None

    def transform(self, features: MatrixLike, condition: MatrixLike | None = None) -> Array:
        """Compute embeddings, (n, k) float32, of features, (n, dim).

        Raises:
            UserError: the features have another size, or conditions were given.
        """
        check_features(self, features, condition)
        matrix = as_matrix(features)
        return transform_blocks(lambda rows: self._embed(matrix.read(rows)), len(matrix))

    def _embed(self, features: Array) -> Array:
        parts = [apply_layers(layers, features) for layers in self.members]
        if len(parts) == 1:
            return parts[0]
        norms = [np.linalg.norm(part, axis=1, keepdims=True) for part in parts]
        unit = [part / np.maximum(norm, 1e-12) for part, norm in zip(parts, norms, strict=True)]
        joined: Array = np.concatenate(unit, axis=1)
        return joined / np.float32(len(parts) ** 0.5)

    def similarity(
        self, first: MatrixLike, second: MatrixLike, condition: MatrixLike | None = None
    ) -> Array:
        """Compute the cosines of the embeddings of two sets of features, (n,) float32."""
        return self.compare(self.transform(first, condition), self.transform(second, condition))

    def compare(self, first: Array, second: Array) -> Array:
        """Compute the cosines of embeddings: (n, k) twice -> (n,)."""
        return cosine(first, second)


#: The zero-shot head, which was not fitted: embeddings are the unchanged features.
ZERO_SHOT = NumpyHead("none", NoSettings(), 0, {})


def _build_layer(spec: LayerSpec, tensors: Mapping[str, Array]) -> DenseLayer[Array]:
    """Return a layer; raise a ValueError if its tensors have other shapes."""
    layer = spec.layer(tensors)
    shape, size_in = layer.weight.shape, (spec.size_in,)
    fits = shape[1:] == size_in and spec.size_out in (0, shape[0])
    if not fits or (layer.mean is not None and layer.mean.shape != size_in):
        raise ValueError(f"{spec.name} or its mean has an unexpected shape; the weight: {shape}")
    return layer
