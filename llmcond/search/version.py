"""One version of an index: its texts, and their vectors under conditions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.log import log
from llmcond.search.model import Model
from llmcond.search.projection import Encode
from llmcond.search.table import VECTOR, Positions, Table, vectors_of
from llmcond.search.views import Segment, View, Views, view_of

#: Views that are kept open.
_OPEN = 64


class Version:
    """The texts as they were when it was opened. Several threads may read it."""

    def __init__(self, table: Table, views: Views, model: Model) -> None:
        self.table, self.model = table, model
        self._views = views
        self._open: OrderedDict[str | None, View] = OrderedDict()
        self._making = threading.Lock()

    def absent(self, condition: str | None) -> Positions:
        """Return the positions of texts that there are no vectors of under a condition."""
        if condition in self._open:
            return np.zeros(0, dtype=np.int64)
        return view_of(self._views.read(condition), self.table)[1]

    def view(self, condition: str | None, encode: Encode | None = None) -> View | None:
        """Return the vectors of all texts under a condition, made where they are not there yet.

        ``encode`` gives the vectors of inputs of texts with the condition; None: nothing does, and
        where these are needed, None is returned.

        Raises:
            DiskFullError, UserError: vectors that were encoded cannot be kept.
        """
        found = self._open.get(condition)
        if found is not None:
            return found
        with self._making:
            found = self._open.get(condition)
            if found is not None:
                return found
            segments: Sequence[Segment] = self._views.read(condition)
            found, absent = view_of(segments, self.table)
            joint = self.model.is_joint(condition)
            if len(absent) and joint and encode is None:
                return None
            if len(absent):
                made = self._made(condition, absent, encode if joint else None)
                segments = self._kept(condition, segments, made, joint)
                found, _ = view_of(segments, self.table)
            self._open[condition] = found
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
            return found

    def _made(self, condition: str | None, absent: Positions, encode: Encode | None) -> Segment:
        project, columns = self.model.projections.of(condition), ["text"] if encode else []
        if self.model.sources.alone:
            columns.append(VECTOR)
        vectors: NDArray[np.float16] = np.zeros((0, 0), dtype=np.float16)
        done = 0
        for part, rows in self.table.blocks(absent, columns):
            texts = rows["text"].to_pylist() if encode else [""] * len(part)
            # PyTorch converts from and to half precision several times faster than NumPy.
            stored = torch.from_numpy(vectors_of(rows).copy()).float().numpy()
            made = project(texts, stored, encode or self.model.projections.encode)
            if not done:
                vectors = np.empty((len(absent), made.shape[1]), dtype=np.float16)
            vectors[done : done + len(part)] = torch.from_numpy(made).half().numpy()
            done += len(part)
        return Segment(self.table.numbers[absent], vectors)

    def _kept(
        self, condition: str | None, segments: Sequence[Segment], made: Segment, joint: bool
    ) -> Sequence[Segment]:
        """Keep a segment on disk; one that costs no encoding also goes without that."""
        try:
            return self._views.add(condition, made, self.table, lasting=joint)
        except (OSError, UserError) as error:
            if joint:
                raise
            log.info(f"the vectors under {condition!r} are not kept for the next time: {error}")
            return [*segments, made]
