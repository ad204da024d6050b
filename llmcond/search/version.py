"""One version of an index: its texts, and their vectors under conditions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.log import log
from llmcond.search.halves import converted
from llmcond.search.model import SearchModel
from llmcond.search.projection import Encode
from llmcond.search.table import VECTOR, Positions, Table, vectors_of
from llmcond.search.views import Segment, View, Views, view_of

#: Views that are kept open.
_OPEN = 64
#: Rows that a guide maps at a time.
_ROWS = 4_096


class Version:
    """The texts and guides as they were when it was opened. Several threads may read it."""

    def __init__(self, table: Table, views: Views, model: SearchModel) -> None:
        self.table, self.model, self.guides = table, model, dict(model.guides)
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
            segments = self._unguided(condition, encode)
            if segments is None:
                return None
            if condition in self.guides:
                segments = self._guided(str(condition), segments)
            found = self._open[condition] = view_of(segments, self.table)[0]
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
            return found

    def _unguided(self, condition: str | None, encode: Encode | None) -> Sequence[Segment] | None:
        """Return the vectors of all texts as the model makes them; None: some are to be encoded."""
        segments: Sequence[Segment] = self._views.read(condition)
        absent = view_of(segments, self.table)[1]
        joint = self.model.is_joint(condition)
        if not len(absent):
            return segments
        if joint and encode is None:
            return None
        made = self._made(condition, absent, encode if joint else None)
        return self._kept(condition, segments, made, joint)

    def _guided(self, condition: str, unguided: Sequence[Segment]) -> Sequence[Segment]:
        """Return what the condition's guide makes of the vectors of all texts."""
        guide = self.guides[condition]
        segments: Sequence[Segment] = self._views.read(condition, guide.digest)
        absent = view_of(segments, self.table)[1]
        if not len(absent):
            return segments
        vectors = np.empty((len(absent), unguided[0].vectors.shape[1]), dtype=np.float16)
        # The last number stands for rows that are not in the table.
        places = np.full(len(self.table) + 1, -1)
        places[absent] = np.arange(len(absent))
        for segment in unguided:
            targets = places[self.table.positions(segment.numbers)]
            wanted = np.flatnonzero(targets >= 0)
            for start in range(0, len(wanted), _ROWS):
                rows = wanted[start : start + _ROWS]
                given = converted(segment.vectors[rows], "float32", vectors.size)
                mapped = guide.transform(given)
                vectors[targets[rows]] = converted(mapped, "float16", vectors.size)
        made = Segment(self.table.numbers[absent], vectors)
        return self._kept(condition, segments, made, False, guide.digest)

    def _made(self, condition: str | None, absent: Positions, encode: Encode | None) -> Segment:
        project, columns = self.model.projections.of(condition), ["text"] if encode else []
        if self.model.sources.alone:
            columns.append(VECTOR)
        vectors: NDArray[np.float16] = np.zeros((0, 0), dtype=np.float16)
        done = 0
        for part, rows in self.table.blocks(absent, columns):
            texts = rows["text"].to_pylist() if encode else [""] * len(part)
            given = vectors_of(rows).copy()
            stored = converted(given, "float32", len(absent) * given.shape[1])
            made = project(texts, stored, encode or self.model.projections.encode)
            if not done:
                vectors = np.empty((len(absent), made.shape[1]), dtype=np.float16)
            vectors[done : done + len(part)] = converted(made, "float16", vectors.size)
            done += len(part)
        return Segment(self.table.numbers[absent], vectors)

    def _kept(
        self,
        condition: str | None,
        segments: Sequence[Segment],
        made: Segment,
        joint: bool,
        guide: str = "",
    ) -> Sequence[Segment]:
        """Keep a segment on disk; one that costs no encoding also goes without that."""
        try:
            return self._views.add(condition, made, self.table, lasting=joint, guide=guide)
        except (OSError, UserError) as error:
            if joint:
                raise
            log.info(f"the vectors under {condition!r} are not kept for the next time: {error}")
            return [*segments, made]
