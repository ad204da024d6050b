"""Unsupervised heads: PCA and ICA of the training vectors (CASE, section 4, figure 4), and beside.

Whitening, and a random projection, which needs no training at all and is what others must beat.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from llmcond.arrays import Array, Matrix, rows_of
from llmcond.config import STRICT
from llmcond.errors import UserError
from llmcond.heads.base import Family, Fit, OnEpoch, PairArrays, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSettings:
    """The settings of PCA.

    Attributes:
        dim: number of components.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dim: int

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        if self.dim < 1:
            raise ValueError("dim must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class IcaSettings(ProjectionSettings):
    """The settings of FastICA.

    Attributes:
        max_iterations: at most.
        tolerance: change of the unmixing matrix at which it has converged.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    max_iterations: int
    tolerance: float

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        # Not super(): a dataclass with slots is a new class, which super() does not know.
        ProjectionSettings.__post_init__(self)
        if self.max_iterations < 1:
            raise ValueError("max_iterations must be at least 1")
        if not self.tolerance > 0:
            raise ValueError("tolerance must be above 0")


def _fit_pca(
    pairs: PairArrays, dev: PairArrays | None, settings: Any, seed: int, on_epoch: OnEpoch
) -> Fit:
    from sklearn.decomposition import PCA

    features = _training_vectors(pairs, settings.dim, "pca")
    model = PCA(n_components=settings.dim, svd_solver="full", random_state=seed).fit(features)
    explained = float(model.explained_variance_ratio_.sum())
    return Fit(_tensors(model), {"selected_on": None, "explained_variance": explained})


def _fit_ica(
    pairs: PairArrays, dev: PairArrays | None, settings: Any, seed: int, on_epoch: OnEpoch
) -> Fit:
    from sklearn.decomposition import FastICA
    from sklearn.exceptions import ConvergenceWarning

    # Whitening divides by each direction's spread, which float32 cannot tell from nothing.
    features = _training_vectors(pairs, settings.dim, "ica").astype(np.float64)
    rank = int(np.linalg.matrix_rank(features - features.mean(axis=0), rtol=_RANK_TOLERANCE))
    dim = min(settings.dim, rank)
    notes = (_low_rank(settings.dim, rank),) if dim < settings.dim else ()
    model = FastICA(
        n_components=dim,
        whiten="unit-variance",
        max_iter=settings.max_iterations,
        tol=settings.tolerance,
        random_state=seed,
    )
    with warnings.catch_warnings():
        # It is reported below, with what to do.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(features)
    converged = bool(model.n_iter_ < settings.max_iterations)
    notes = notes if converged else (*notes, _not_converged(settings))
    record = {"selected_on": None, "iterations": int(model.n_iter_), "converged": converged}
    return Fit(_tensors(model), record, notes)


#: Directions with less than this share of the widest one's spread are rounding, not signal.
_RANK_TOLERANCE = 1e-6


def _low_rank(dim: int, rank: int) -> str:
    return f"ICA: {rank} components instead of {dim}: the training vectors span no more directions"


def _not_converged(settings: IcaSettings) -> str:
    more = 2 * settings.max_iterations
    return (
        f"ICA had not converged after {settings.max_iterations} iterations "
        f"(max_iterations={more}, or a smaller dim)"
    )


def _training_vectors(pairs: PairArrays, dim: int, kind: str) -> Array:
    features: Array = np.concatenate(
        [rows_of(side, slice(None)) for side in (pairs.first, pairs.second)]
    )
    if dim > len(features):
        raise UserError(
            f"{kind} with dim {dim} needs at least {dim} training vectors; there are "
            f"{len(features)}. Lower dim to {len(features)}."
        )
    return features


def _tensors(model: Any) -> Tensors:
    return {
        "mean": np.ascontiguousarray(model.mean_, dtype=np.float32),
        "components": np.ascontiguousarray(model.components_, dtype=np.float32),
    }


def _fit_whitening(
    pairs: PairArrays, dev: PairArrays | None, settings: Any, seed: int, on_epoch: OnEpoch
) -> Fit:
    from sklearn.decomposition import PCA

    # Division by a direction's spread: float32 cannot tell the least of them from nothing.
    features = _training_vectors(pairs, settings.dim, "whitening").astype(np.float64)
    model = PCA(n_components=settings.dim, svd_solver="full", random_state=seed).fit(features)
    spread = np.sqrt(model.explained_variance_)
    dim = int((spread > _RANK_TOLERANCE * spread[0]).sum())
    notes: tuple[str, ...] = ()
    if dim < settings.dim:
        notes = (
            f"whitening: {dim} directions instead of {settings.dim}: the training vectors span no "
            "more",
        )
    tensors = {
        "mean": np.ascontiguousarray(model.mean_, dtype=np.float32),
        "components": (model.components_[:dim] / spread[:dim, None]).astype(np.float32),
    }
    explained = float(model.explained_variance_ratio_[:dim].sum())
    return Fit(tensors, {"selected_on": None, "explained_variance": explained}, notes)


def _fit_random(
    pairs: PairArrays, dev: PairArrays | None, settings: Any, seed: int, on_epoch: OnEpoch
) -> Fit:
    from sklearn.random_projection import GaussianRandomProjection

    model = GaussianRandomProjection(n_components=settings.dim, random_state=seed)
    model.fit(np.zeros((1, pairs.dim), dtype=np.float32))
    components = np.ascontiguousarray(model.components_, dtype=np.float32)
    mean = np.zeros(pairs.dim, dtype=np.float32)
    return Fit({"mean": mean, "components": components}, {"selected_on": None})


def _project(tensors: Tensors, settings: Any, features: Array, condition: Matrix | None) -> Array:
    centred = features - tensors["mean"]
    return np.asarray(centred @ tensors["components"].T, dtype=np.float32)


PCA = Family("pca", ProjectionSettings, _fit_pca, _project)
ICA = Family("ica", IcaSettings, _fit_ica, _project)
WHITENING = Family("whitening", ProjectionSettings, _fit_whitening, _project)
RANDOM = Family("random", ProjectionSettings, _fit_random, _project)
