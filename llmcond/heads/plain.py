"""A fitted head of dense layers, applied by NumPy: what embeds texts needs no torch for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from llmcond.arrays import Array, MatrixLike, as_matrix, cosine
from llmcond.config import build
from llmcond.heads.layers import (
    PLAIN_KINDS,
    DenseLayer,
    LayerForm,
    apply_layers,
    check_features,
    transform_blocks,
)
from llmcond.heads.settings import NoSettings
from llmcond.heads.storage import HeadFiles, damaged_weights, read_head

if TYPE_CHECKING:
    from llmcond.heads.base import FittedHead

#: A head that makes embeddings of features.
EmbeddingHead: TypeAlias = "FittedHead | PlainHead"
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


def load_embedding_head(folder: Path) -> tuple[EmbeddingHead, dict[str, Any]]:
    """Return the head of a folder that embeds texts, and everything that its head.json records.

    A head of dense layers is always a :class:`PlainHead`, so that embeddings do not depend on what
    else is installed. Any other one is loaded by torch.

    Raises:
        UserError, LlmcondError: as :func:`llmcond.heads.base.load_head`.
    """
    files = read_head(folder)
    if files.description["kind"] in PLAIN_KINDS:
        return _plain_head(files), files.description
    from llmcond.heads.base import FittedHead, restore_head

    return restore_head(files, FittedHead), files.description


def _plain_head(files: HeadFiles) -> PlainHead:
    description = files.description
    kind = description["kind"]
    settings = build(PLAIN_KINDS[kind][0], description["settings"], str(files.source))
    try:
        tensors = load_tensors(files.weights)
        head = PlainHead(kind, settings, description["dim_in"], tensors)
        _ = head.members  # checks the tensors
    except (KeyError, SafetensorError, ValueError) as error:
        raise damaged_weights(files.path, kind, error) from error
    return head


def _checked_layer(form: LayerForm, tensors: Mapping[str, Array]) -> DenseLayer[Array]:
    """Return a layer; a ValueError if its tensors have other shapes."""
    layer = form.layer(tensors)
    shape, size_in = layer.weight.shape, (form.size_in,)
    fits = shape[1:] == size_in and form.size_out in (0, shape[0])
    if not fits or (layer.mean is not None and layer.mean.shape != size_in):
        raise ValueError(f"{form.name} has the shape {shape}, or its mean another one")
    return layer
