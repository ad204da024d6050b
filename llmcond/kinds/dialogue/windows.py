"""Windows of dialogues: what an utterance is predicted from, and that utterance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Positions


def windows(starts: NDArray[np.integer[Any]], size: int, least: int) -> Positions:
    """Return each window of dialogues, (m, size) positions among all turns; its target is last.

    Every turn is a target that has ``least`` others before it, the last one of a dialogue too.
    Where fewer than ``size`` - 1 stand before it, those that are missing are -1, on the left.

    Args:
        starts: (dialogues + 1,) the first turn of each dialogue, and the number of all turns.
        size: turns of a window, the target included.
        least: turns before a target.
    """
    offsets = np.asarray(starts, dtype=np.int64)
    before = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    targets = np.flatnonzero(before >= least)
    back = np.arange(size - 1, -1, -1)
    return np.where(before[targets, None] >= back, targets[:, None] - back, -1)
