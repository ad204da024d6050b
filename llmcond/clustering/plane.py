"""Places of texts on a map: t-SNE, each map begun from the one before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from llmcond.clustering.methods import Vectors

Places = NDArray[np.float64]

#: Dimensions that are kept of vectors, by principal components, as is usual before t-SNE.
_KEPT = 50
_PERPLEXITY = 30.0


def places(systems: Iterable[Vectors], seed: int) -> list[Places]:
    """Return (n, 2) places of the same n texts for each of several kinds of vectors, in 0 to 1.

    A map begins where the texts lie on the one before, so that what stays together stays in place.
    Fewer than four texts lie on a line, in their order.
    """
    found: list[Places] = []
    for vectors in systems:
        found.append(_places(vectors, found[-1] if found else None, seed))
    return found


def _places(vectors: Vectors, before: Places | None, seed: int) -> Places:
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    n = len(vectors)
    if n < 4:
        return np.stack([np.linspace(0.1, 0.9, n), np.full(n, 0.5)], axis=1)
    kept = min(_KEPT, *vectors.shape)
    if kept < 2:
        vectors = np.repeat(vectors, 2, axis=1)
        kept = 2
    with np.errstate(invalid="ignore"):  # of equal vectors no component explains a share
        points = PCA(kept, random_state=seed).fit_transform(vectors)
    start = points[:, :2] if before is None else before - before.mean(axis=0)
    # As its authors advise: small, so that far-apart points can still pass each other.
    start = 1e-4 * start / (start.std() or 1.0)
    perplexity = min(_PERPLEXITY, (n - 1) / 3)
    reducer = TSNE(2, perplexity=perplexity, init=start.astype(np.float32), random_state=seed)
    found = np.asarray(reducer.fit_transform(points), dtype=np.float64)
    low, high = found.min(axis=0), found.max(axis=0)
    return np.asarray((found - (low + high) / 2) / (float((high - low).max()) or 1.0) + 0.5)
