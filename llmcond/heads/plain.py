"""Heads of dense layers, applied by NumPy: what embeds texts needs no torch for them.

PyTorch heads use the same descriptions of layers and the same checks of features.
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

#: Vectors transformed at a time, so that memory does not grow with their number.
_BLOCK = 65_536

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
        dropout: whether some outputs are dropped in training.
    """

    name: str
    size_out: int
    size_in: int
    activation: Activation = "none"
    mean: str | None = None
    dropout: bool = True

    def layer(self, tensors: Mapping[str, T]) -> DenseLayer[T]:
        """Return the layer of this form, by the names of tensors."""
        mean = None if self.mean is None else tensors[self.mean]
        return DenseLayer(tensors[self.name], None, self.activation, mean)


def mlp_forms(settings: MlpSettings, dim_in: int) -> list[LayerForm]:
    """Return the layers of the MLP."""
    hidden = settings.hidden or settings.dim
    sizes = pairwise([dim_in, *[hidden] * (settings.depth - 1), settings.dim])
    forms = [
        LayerForm(f"weight{number}", size_out, size_in, settings.activation)
        for number, (size_in, size_out) in enumerate(sizes, start=1)
    ]
    if settings.last == "none":
        forms[-1] = forms[-1]._replace(activation="none", dropout=False)
    return forms


def projection_forms(settings: ProjectionSettings, dim_in: int) -> list[LayerForm]:
    """Return the layer of an unsupervised head, of as many components as could be fitted."""
    return [LayerForm("components", 0, dim_in, mean="mean")]


#: The kinds of heads that are dense layers, whatever the condition: settings and layers of each.
PLAIN_KINDS: Mapping[str, tuple[type[Any], Callable[[Any, int], Sequence[LayerForm]]]] = {
    "none": (NoSettings, lambda settings, dim_in: []),
    "linear": (SizedSettings, lambda settings, dim_in: [LayerForm("weight", settings.dim, dim_in)]),
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


class _Sized(Protocol):
    """A head, as far as its inputs are concerned."""

    @property
    def kind(self) -> str: ...
    @property
    def dim_in(self) -> int: ...  # 0: any
    @property
    def dim_condition(self) -> int: ...  # 0: none


def check_features(head: _Sized, features: MatrixLike, condition: MatrixLike | None) -> None:
    """Check that a head can be applied to features, (n, dim), under conditions, (n or 1, dim_c).

    Raises:
        UserError: features of another size, or conditions that are missing or not wanted.
    """
    kind = head.kind
    if head.dim_in and features.shape[1] != head.dim_in:
        raise UserError(
            f"the features have {features.shape[1]} dimensions; this {kind} head was fitted on "
            f"{head.dim_in}."
        )
    got = 0 if condition is None else int(condition.shape[1])
    if condition is not None and len(condition) not in (1, len(features)):
        raise UserError(
            f"there are {len(features)} sentences and {len(condition)} conditions; they must "
            "be as many, or one condition for all."
        )
    if got == head.dim_condition:
        return
    if not got:
        raise UserError(
            f"this {kind} head takes the features of each condition as well, "
            f"(n, {head.dim_condition}); none were given."
        )
    wanted = f"{head.dim_condition} dimensions" if head.dim_condition else "none"
    raise UserError(
        f"the conditions have {got} dimensions; this {kind} head was fitted on {wanted}."
    )


def transform_blocks(embed: Callable[[slice], Array], n: int) -> Array:
    """Return embeddings of n rows, (n, k), from ``embed``, which gives those of some rows."""
    blocks = [embed(slice(start, start + _BLOCK)) for start in range(0, max(n, 1), _BLOCK)]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


_Layers = Sequence[DenseLayer[Array]]


@dataclass(frozen=True, eq=False)
class PlainHead:
    """A fitted head of a kind in ``PLAIN_KINDS``; see :class:`FittedHead`.

    Attributes:
        kind: its name in recipes and head.json.
        settings: an instance of the kind's settings.
        dim_in: size of the features; 0: any, of a head of kind ``none`` that was not fitted.
        tensors: its parameters, by the names that head.safetensors has.
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
            ValueError: the tensors are not those of a head of these settings.
        """
        forms = PLAIN_KINDS[self.kind][1](self.settings, self.dim_in)
        names = [name for form in forms for name in (form.name, form.mean) if name is not None]
        n = getattr(self.settings, "members", 1)
        prefixes = [f"member{number}." for number in range(n)] if n > 1 else [""]
        differences = self.tensors.keys() ^ {part + name for part in prefixes for name in names}
        if differences:
            raise ValueError(f"missing or unexpected: {', '.join(sorted(differences))}")
        tensors = {name: np.asarray(value, np.float32) for name, value in self.tensors.items()}
        return [
            [_checked_layer(form, {name: tensors[part + name] for name in names}) for form in forms]
            for part in prefixes
        ]

    @property
    def is_identity(self) -> bool:
        """Return whether embeddings are the features as they are."""
        return self.kind == "none"

    @property
    def dim_out(self) -> int:
        """Return the size of the embeddings; 0: that of the features."""
        return sum(len(layers[-1].weight) if layers else self.dim_in for layers in self.members)

    def dense_layers(self, condition: Array | None = None) -> _Layers | None:
        """Return its layers, which are the same under all conditions; None: it is an ensemble."""
        return self.members[0] if len(self.members) == 1 else None

    def transform(self, features: MatrixLike, condition: MatrixLike | None = None) -> Array:
        """Return embeddings, (n, k) float32, of features, (n, dim).

        Raises:
            UserError: features of another size, or conditions.
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
        """Return the cosines of the embeddings of two sets of features, (n,) float32."""
        return self.compare(self.transform(first, condition), self.transform(second, condition))

    def compare(self, first: Array, second: Array) -> Array:
        """Return the cosines of embeddings, (n, k) twice -> (n,)."""
        return cosine(first, second)


#: The head of zero-shot, which was not fitted: embeddings are the features as they are.
ZERO_SHOT = PlainHead("none", NoSettings(), 0, {})


def _checked_layer(form: LayerForm, tensors: Mapping[str, Array]) -> DenseLayer[Array]:
    """Return a layer; a ValueError if its tensors have other shapes."""
    layer = form.layer(tensors)
    shape, size_in = layer.weight.shape, (form.size_in,)
    fits = shape[1:] == size_in and form.size_out in (0, shape[0])
    if not fits or (layer.mean is not None and layer.mean.shape != size_in):
        raise ValueError(f"{form.name} has the shape {shape}, or its mean another one")
    return layer
