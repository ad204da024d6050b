"""Unsupervised heads: PCA, ICA, whitening and random projection (CASE, section 4, figure 4)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from llmcond.arrays import Array, as_matrix
from llmcond.errors import UserError
from llmcond.heads.module import HeadModule
from llmcond.heads.pairs import Fit, PairArrays
from llmcond.heads.settings import IcaSettings, ProjectionSettings

#: Directions with less than this share of the widest one's spread are rounding, not signal.
_RANK_TOLERANCE = 1e-6


class Projection(HeadModule):
    """Z = components (e - mean), fitted in closed form; rank-deficient features give fewer rows."""

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
        """Load tensors of a fitted projection, of as many components as it has."""
        self.components = torch.empty(len(state_dict["components"]), self.dim_in)
        return super().load_state_dict(state_dict, strict, assign)

    def _set(self, mean: Any, components: Any) -> None:
        self.mean = torch.from_numpy(np.ascontiguousarray(mean, dtype=np.float32))
        self.components = torch.from_numpy(np.ascontiguousarray(components, dtype=np.float32))

    def _training_vectors(self, pairs: PairArrays) -> Array:
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

    def solve(self, pairs: PairArrays, seed: int) -> Fit:
        """See :class:`HeadModule`."""
        from sklearn.decomposition import PCA

        features = self._training_vectors(pairs)
        dim = self.settings.dim
        model = PCA(n_components=dim, svd_solver="full", random_state=seed).fit(features)
        self._set(model.mean_, model.components_)
        explained = float(model.explained_variance_ratio_.sum())
        return Fit({"selected_on": None, "explained_variance": explained})


class Ica(Projection):
    """Independent components, by FastICA."""

    Settings = IcaSettings

    def solve(self, pairs: PairArrays, seed: int) -> Fit:
        """See :class:`HeadModule`."""
        from sklearn.decomposition import FastICA
        from sklearn.exceptions import ConvergenceWarning

        settings = self.settings
        # Whitening divides by each direction's spread, which float32 cannot tell from nothing.
        features = self._training_vectors(pairs).astype(np.float64)
        rank = int(np.linalg.matrix_rank(features - features.mean(axis=0), rtol=_RANK_TOLERANCE))
        notes = []
        if rank < settings.dim:
            notes.append(
                f"ICA: {rank} components instead of {settings.dim}: the training vectors span no "
                "more directions"
            )
        model = FastICA(
            n_components=min(settings.dim, rank),
            whiten="unit-variance",
            max_iter=settings.max_iterations,
            tol=settings.tolerance,
            random_state=seed,
        )
        with warnings.catch_warnings():
            # It is noted below, with what to do.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(features)
        converged = bool(model.n_iter_ < settings.max_iterations)
        if not converged:
            notes.append(
                f"ICA had not converged after {settings.max_iterations} iterations "
                f"(max_iterations={2 * settings.max_iterations}, or a smaller dim)"
            )
        self._set(model.mean_, model.components_)
        record = {"selected_on": None, "iterations": int(model.n_iter_), "converged": converged}
        return Fit(record, tuple(notes))


class Whitening(Projection):
    """The directions of largest variance, each scaled to variance 1."""

    def solve(self, pairs: PairArrays, seed: int) -> Fit:
        """See :class:`HeadModule`."""
        from sklearn.decomposition import PCA

        # Division by a direction's spread: float32 cannot tell the least of them from nothing.
        features, wanted = self._training_vectors(pairs).astype(np.float64), self.settings.dim
        model = PCA(n_components=wanted, svd_solver="full", random_state=seed).fit(features)
        spread = np.sqrt(model.explained_variance_)
        dim = int((spread > _RANK_TOLERANCE * spread[0]).sum())
        self._set(model.mean_, model.components_[:dim] / spread[:dim, None])
        explained = float(model.explained_variance_ratio_[:dim].sum())
        few = f"whitening: {dim} directions instead of {wanted}: the training vectors span no more"
        record = {"selected_on": None, "explained_variance": explained}
        return Fit(record, (few,) if dim < wanted else ())


class Random(Projection):
    """A Gaussian random projection, which needs no training and is what others must beat."""

    def solve(self, pairs: PairArrays, seed: int) -> Fit:
        """See :class:`HeadModule`."""
        from sklearn.random_projection import GaussianRandomProjection

        model = GaussianRandomProjection(n_components=self.settings.dim, random_state=seed)
        model.fit(np.zeros((1, self.dim_in), dtype=np.float32))
        self._set(np.zeros(self.dim_in), model.components_)
        return Fit({"selected_on": None})
