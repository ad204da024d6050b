"""Positions of texts on comparable maps: t-SNE, where each map is aligned with the previous one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from llmcond.clustering.methods import Vectors

MapPositions = NDArray[np.float64]

#: Number of principal components that vectors are reduced to, as is customary before t-SNE.
_COMPONENTS = 50
_PERPLEXITY = 30.0
#: Early exaggeration: how strongly the first map's clusters are pulled together at the start, by
#: scikit-learn's default. A map that starts from another map already has its clusters, and pulling
#: would undo their arrangement.
_EXAGGERATION, _NO_EXAGGERATION = 12.0, 1.0


def compute_maps(systems: Iterable[Vectors], seed: int) -> list[MapPositions]:
    """Return positions, (n, 2) in 0 to 1, of the same n texts for each of several sets of vectors.

    t-SNE has many equally good solutions, and rounding decides between them. So that maps can be
    compared, and look alike on every processor, each map starts from the previous one, which is
    already a solution if the vectors are the same, and is then rotated, mirrored, moved and scaled
    to fit onto it. Fewer than four texts are placed on a line, in their order.
    """
    maps: list[MapPositions] = []
    for vectors in systems:
        previous = maps[-1] if maps else None
        points = _compute_map(vectors, previous, seed)
        maps.append(points if previous is None else _align(points, previous))
    all_points = np.concatenate(maps)
    low, high = all_points.min(axis=0), all_points.max(axis=0)
    width = float((high - low).max()) or 1.0
    return [(points - (low + high) / 2) / width + 0.5 for points in maps]


def _compute_map(vectors: Vectors, previous: MapPositions | None, seed: int) -> MapPositions:
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    n = len(vectors)
    if n < 4:
        return np.stack([np.arange(n, dtype=np.float64), np.zeros(n)], axis=1)
    n_components = min(_COMPONENTS, *vectors.shape)
    if n_components < 2:
        vectors, n_components = np.repeat(vectors, 2, axis=1), 2
    with np.errstate(invalid="ignore"):  # equal vectors have no variance to explain
        components = PCA(n_components, random_state=seed).fit_transform(vectors)
    # The initial map is small, as the authors of t-SNE advise, so that distant points can still
    # pass each other.
    small = 1e-4 * components[:, :2] / (components[:, :2].std() or 1.0)
    start = small if previous is None else previous
    reducer = TSNE(
        2,
        perplexity=min(_PERPLEXITY, (n - 1) / 3),
        early_exaggeration=_EXAGGERATION if previous is None else _NO_EXAGGERATION,
        init=start.astype(np.float32),
        random_state=seed,
    )
    return np.asarray(reducer.fit_transform(components), dtype=np.float64)


def _align(points: MapPositions, onto: MapPositions) -> MapPositions:
    """Rotate, mirror, move and scale a map so that its points are nearest to those of another.

    The scale makes both maps equally wide. The scale with the smallest distances would shrink a map
    the more, the less the two have in common.
    """
    from scipy.linalg import orthogonal_procrustes

    centred, target = points - points.mean(axis=0), onto - onto.mean(axis=0)
    rotation, _ = orthogonal_procrustes(centred, target)
    scale = np.linalg.norm(target) / (float(np.linalg.norm(centred)) or 1.0)
    return np.asarray(scale * centred @ rotation + onto.mean(axis=0))
