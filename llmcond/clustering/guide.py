"""A few labelled texts that say what clusters are wanted: ridge regression to their labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmcond.clustering.methods import Vectors

#: The penalty of ridge regression on unit vectors.
_ALPHA = 1.0


def guided(vectors: Vectors, guide: Vectors, labels: Sequence[str]) -> Vectors:
    """Return (n, classes) where n vectors lie between the classes of a few labelled ones.

    Ridge regression from the labelled vectors to their labels, one-hot, in closed form; what it
    predicts is the space that is clustered, so that clusters follow the labels, and what they do
    not tell apart is left out. After GSTransform (ACL 2025), whose map is trained.

    Args:
        vectors: (n, d).
        guide: (m, d) of the labelled texts.
        labels: (m,) theirs, two different ones at least.
    """
    from sklearn.linear_model import Ridge

    classes, place = np.unique(np.array(labels, dtype=object), return_inverse=True)
    found = Ridge(alpha=_ALPHA).fit(guide, np.eye(len(classes))[place]).predict(vectors)
    return np.asarray(found, dtype=np.float32)
