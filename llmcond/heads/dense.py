"""Heads that read no conditions: none, dense layers, projections, and the head of cross-encoders.

Both sentences share the weights of dense layers (CASE, section 3.2). Projections (PCA, ICA,
whitening, random projection) learn nothing from ratings (CASE, section 4, figure 4).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor
from torch.nn import init
from typing_extensions import override

from llmcond.arrays import Array, as_matrix
from llmcond.config import STRICT
from llmcond.errors import UserError
from llmcond.heads.module import ACTIVATIONS, HeadModule
from llmcond.heads.numpy_heads import DENSE_KINDS, DenseLayer
from llmcond.heads.pairs import FitReport, PairArrays
from llmcond.heads.settings import (
    IcaSettings,
    MlpSettings,
    NoSettings,
    ProjectionSettings,
    SizedSettings,
)

#: Directions whose spread is less than this share of the largest spread are rounding errors, not
#: signal.
_RANK_TOLERANCE = 1e-6


class Identity(HeadModule):
    """The zero-shot head: z = e, the unchanged features."""

    Settings = NoSettings
    supervised = False
    is_identity = True

    @override
    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        return FitReport({"selected_on": None})

    def forward(self, x: Tensor, condition: Tensor | None = None, which: Any = None) -> Tensor:
        """Return the features."""
        return x


class _Dense(HeadModule):
    """Dense layers as ``DENSE_KINDS`` describes them."""

    kind: ClassVar[str]
    multiplies_in_bfloat16 = True

    def __init__(self, settings: Any, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.specs = DENSE_KINDS[self.kind][1](settings, dim_in)
        for spec in self.specs:
            self.add_layer(spec.name, spec.size_out, spec.size_in, bias=False)

    def dense_layers(self, condition: Tensor | None) -> list[DenseLayer[Tensor]]:
        return [spec.layer(self.state_dict()) for spec in self.specs]

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        for spec in self.specs:
            x = ACTIVATIONS[spec.activation](self.affine(spec.name, x))
            x = self.dropout(x) if spec.dropout else x
        return x


class Linear(_Dense):
    """Z = Dropout(W e) (CASE, equation 3)."""

    kind, Settings = "linear", SizedSettings

    @override
    def start_at_identity(self) -> None:
        init.eye_(self.get_parameter("weight"))


class Mlp(_Dense):
    """H = Dropout(ReLU(W1 e)), z = Dropout(ReLU(W2 h)) (CASE, equations 4 and 5)."""

    kind, Settings = "mlp", MlpSettings

    def start_at_identity(self) -> None:
        """Initialise f(x) - f(-x) = x, which holds for ReLU and GELU, if there are enough units."""
        settings = self.settings
        fits = (settings.hidden or settings.dim) >= 2 * self.dim_in
        suits = settings.last == "none" and settings.activation in {"relu", "gelu"}
        if settings.depth != 2 or not fits or not suits:
            return
        first, second = self.get_parameter("weight1"), self.get_parameter("weight2")
        n = self.dim_in
        with torch.no_grad():
            # The other units keep their random weights, but do not contribute yet.
            second.zero_()
            for start, sign in ((0, 1.0), (n, -1.0)):
                first[start : start + n] = sign * torch.eye(n)
                second[:, start : start + n] = sign * torch.eye(settings.dim, n)


class Projection(HeadModule):
    """A projection z = components (e - mean), fitted in closed form.

    If the features are rank-deficient, it has fewer components than its settings say.
    """

    Settings: ClassVar[type[Any]] = ProjectionSettings
    supervised = False

    def __init__(self, settings: ProjectionSettings, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.register_buffer("mean", torch.zeros(dim_in))
        self.register_buffer("components", torch.zeros(settings.dim, dim_in))

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        """Return embeddings, (m, components)."""
        return (x - self.get_buffer("mean")) @ self.get_buffer("components").T

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the tensors of a fitted projection, which determine its number of components."""
        self.components = torch.empty(len(state_dict["components"]), self.dim_in)
        return super().load_state_dict(state_dict, strict, assign)

    def _set_parameters(self, mean: Any, components: Any) -> None:
        self.mean = torch.from_numpy(np.ascontiguousarray(mean, dtype=np.float32))
        self.components = torch.from_numpy(np.ascontiguousarray(components, dtype=np.float32))

    def _read_training_vectors(self, pairs: PairArrays) -> Array:
        features: Array = np.concatenate(
            [as_matrix(side).read() for side in (pairs.first, pairs.second)]
        )
        dim = self.settings.dim
        if dim > len(features):
            raise UserError(
                f"{type(self).__name__.lower()} with dim {dim} needs at least {dim} training "
                f"vectors; there are {len(features)}. Lower dim to {len(features)}."
            )
        return features


class Pca(Projection):
    """The directions of largest variance."""

    @override
    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        from sklearn.decomposition import PCA

        features = self._read_training_vectors(pairs)
        dim = self.settings.dim
        model = PCA(n_components=dim, svd_solver="full", random_state=seed).fit(features)
        self._set_parameters(model.mean_, model.components_)
        explained = float(model.explained_variance_ratio_.sum())
        return FitReport({"selected_on": None, "explained_variance": explained})


class Ica(Projection):
    """Independent components, by FastICA."""

    Settings = IcaSettings

    @override
    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        from sklearn.decomposition import FastICA
        from sklearn.exceptions import ConvergenceWarning

        settings = self.settings
        # Whitening divides by the spread of each direction. In float32 the smallest spreads cannot
        # be distinguished from zero.
        features = self._read_training_vectors(pairs).astype(np.float64)
        rank = int(np.linalg.matrix_rank(features - features.mean(axis=0), rtol=_RANK_TOLERANCE))
        notes = []
        if rank < settings.dim:
            notes.append(
                f"ICA: {rank} components instead of {settings.dim}, as the training vectors span "
                "no more directions"
            )
        model = FastICA(
            n_components=min(settings.dim, rank),
            whiten="unit-variance",
            max_iter=settings.max_iterations,
            tol=settings.tolerance,
            random_state=seed,
        )
        with warnings.catch_warnings():
            # A note below reports it, with advice.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(features)
        converged = bool(model.n_iter_ < settings.max_iterations)
        if not converged:
            notes.append(
                f"ICA had not converged after {settings.max_iterations} iterations "
                f"(try max_iterations={2 * settings.max_iterations}, or a smaller dim)"
            )
        self._set_parameters(model.mean_, model.components_)
        record = {"selected_on": None, "iterations": int(model.n_iter_), "converged": converged}
        return FitReport(record, tuple(notes))


class Whitening(Projection):
    """The directions of largest variance, each scaled to variance 1."""

    @override
    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        from sklearn.decomposition import PCA

        # Whitening divides by the spread of each direction. In float32 the smallest spreads cannot
        # be distinguished from zero.
        features, requested = (
            self._read_training_vectors(pairs).astype(np.float64),
            self.settings.dim,
        )
        model = PCA(n_components=requested, svd_solver="full", random_state=seed).fit(features)
        spread = np.sqrt(model.explained_variance_)
        dim = int((spread > _RANK_TOLERANCE * spread[0]).sum())
        self._set_parameters(model.mean_, model.components_[:dim] / spread[:dim, None])
        explained = float(model.explained_variance_ratio_[:dim].sum())
        note = f"whitening: {dim} directions instead of {requested}, as the vectors span no more"
        record = {"selected_on": None, "explained_variance": explained}
        return FitReport(record, (note,) if dim < requested else ())


class Random(Projection):
    """A Gaussian random projection, the baseline without training."""

    @override
    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        from sklearn.random_projection import GaussianRandomProjection

        model = GaussianRandomProjection(n_components=self.settings.dim, random_state=seed)
        model.fit(np.zeros((1, self.dim_in), dtype=np.float32))
        self._set_parameters(np.zeros(self.dim_in), model.components_)
        return FitReport({"selected_on": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionSettings:
    """Settings of the head of a cross-encoder.

    Attributes:
        dropout: share of the vector's units dropped in training.
        learning_rate: learning rate of the head in AdamW.
        weight_decay: weight decay of the head in AdamW.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    learning_rate: Annotated[float, Gt(0), Le(100)] = 1e-3
    weight_decay: Annotated[float, Ge(0), Le(1_000_000)] = 0.01


class Regression(HeadModule):
    """A linear regression y = w^T Dropout(e) + b on the vector e of two texts and a condition."""

    Settings = RegressionSettings
    no_recipe = (
        "is the head of a cross-encoder, which has no embeddings; llmcond train-cross trains it"
    )

    def __init__(self, settings: RegressionSettings, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_layer("weight", 1, dim_in, bias=True)

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        """Return the predicted similarity, (m, 1)."""
        return self.affine("weight", self.dropout(x))
