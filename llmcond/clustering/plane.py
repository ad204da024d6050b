"""Places of texts on maps that can be compared: t-SNE, each map fitted onto the one before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from llmcond.clustering.methods import Vectors

Places = NDArray[np.float64]

#: Dimensions that are kept of vectors, by principal components, as is usual before t-SNE.
_COMPONENTS = 50
_PERPLEXITY = 30.0
#: How much the first map's clusters are pulled together at the start, scikit-learn's default. A map
#: that continues from another has its clusters already: pulling would undo their arrangement.
_EXAGGERATION, _NO_EXAGGERATION = 12.0, 1.0


def places(systems: Iterable[Vectors], seed: int) -> list[Places]:
    """Return (n, 2) places of the same n texts for each of several kinds of vectors, in 0 to 1.

    t-SNE has many equally good solutions, and rounding decides between them. So that maps can be
    compared on every processor, each map continues from the one before, which is already a solution
    for the same vectors, and is then rotated, mirrored, moved and scaled to fit onto it. Fewer than
    four texts lie on a line, in their order.
    """
    maps: list[Places] = []
    for vectors in systems:
        before = maps[-1] if maps else None
        points = _tsne(vectors, before, seed)
        maps.append(points if before is None else _fit(points, before))
    every = np.concatenate(maps)
    low, high = every.min(axis=0), every.max(axis=0)
    width = float((high - low).max()) or 1.0
    return [(points - (low + high) / 2) / width + 0.5 for points in maps]


def _tsne(vectors: Vectors, before: Places | None, seed: int) -> Places:
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    n = len(vectors)
    if n < 4:
        return np.stack([np.arange(n, dtype=np.float64), np.zeros(n)], axis=1)
    kept = min(_COMPONENTS, *vectors.shape)
    if kept < 2:
        vectors, kept = np.repeat(vectors, 2, axis=1), 2
    with np.errstate(invalid="ignore"):  # of equal vectors no component explains a share
        components = PCA(kept, random_state=seed).fit_transform(vectors)
    # As its authors advise: small, so that far-apart points can still pass each other.
    small = 1e-4 * components[:, :2] / (components[:, :2].std() or 1.0)
    start = small if before is None else before
    reducer = TSNE(
        2,
        perplexity=min(_PERPLEXITY, (n - 1) / 3),
        early_exaggeration=_EXAGGERATION if before is None else _NO_EXAGGERATION,
        init=start.astype(np.float32),
        random_state=seed,
    )
    return np.asarray(reducer.fit_transform(components), dtype=np.float64)


def _fit(points: Places, onto: Places) -> Places:
    """Rotate, mirror, move and scale a map so that its points are nearest to those of another.

    The scale is that which makes them equally wide. The one with the least distances would shrink a
    map the more, the less the two have in common.
    """
    from scipy.linalg import orthogonal_procrustes

    centred, target = points - points.mean(axis=0), onto - onto.mean(axis=0)
    rotation, _ = orthogonal_procrustes(centred, target)
    scale = np.linalg.norm(target) / (float(np.linalg.norm(centred)) or 1.0)
    return np.asarray(scale * centred @ rotation + onto.mean(axis=0))
