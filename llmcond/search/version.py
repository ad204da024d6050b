"""One version of an index: its texts, and their vectors under conditions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.heads.guide import Guides
from llmcond.log import log
from llmcond.search.half_precision import convert_dtype
from llmcond.search.model import SearchModel
from llmcond.search.projection import Encode
from llmcond.search.table import VECTOR, Positions, TextTable, vectors_of
from llmcond.search.views import BUDGET, ConditionView, ConditionViews, VectorSegment, make_view

#: Number of views that stay open; those that are in memory are limited by ``BUDGET``, too.
_MAX_OPEN = 64
#: Number of rows that a guide maps at a time.
_BLOCK_ROWS = 4_096


class IndexVersion:
    """The texts and guides of an index at the time it was opened. Several threads may read it."""

    def __init__(self, table: TextTable, views: ConditionViews, model: SearchModel) -> None:
        self.table, self.model, self.guides = table, model, Guides(model.guides)
        self._views = views
        self._open: OrderedDict[str | None, ConditionView] = OrderedDict()
        self._compute_lock = threading.Lock()

    @property
    def is_exact(self) -> bool:
        """Whether texts are compared in half precision, not in fewer bits."""
        return self._views.precision == "float16"

    def find_missing(self, condition: str | None) -> Positions:
        """Return the positions of texts that have no vectors under a condition yet."""
        if condition in self._open:
            return np.zeros(0, dtype=np.int64)
        return make_view(self._views.read(condition), self.table)[1]

    def view(
        self, condition: str | None, encode: Encode | None = None, *, save: bool = False
    ) -> ConditionView | None:
        """Return the vectors of all texts under a condition; compute those that are missing.

        Args:
            condition: the condition; None: vectors without a condition.
            encode: computes the vectors of inputs that contain both a text and the condition.
                Without it, the result is None if such vectors are missing.
            save: whether to store the computed vectors, so that other processes need not compute
                them. Vectors that were encoded are always stored; all others stay in memory,
                because a search must not write.

        Raises:
            DiskFullError, UserError: if vectors that were encoded cannot be stored.
        """
        view = self._find_open(condition)
        if view is not None and not save:
            return view
        with self._compute_lock:
            view = self._find_open(condition)
            if view is not None and not save:
                return view
            save = save or encode is not None
            segments = self._compute_unguided(condition, encode, save)
            if segments is None:
                return None
            if condition in self.guides:
                segments = self._apply_guide(str(condition), segments, save)
            view = self._open[condition] = make_view(segments, self.table)[0]
            self._close_oldest()
            return view

    def _find_open(self, condition: str | None) -> ConditionView | None:
        """Return a view that is open, and mark it as used."""
        with suppress(KeyError):  # another thread may close it
            self._open.move_to_end(condition)
        return self._open.get(condition)

    def _close_oldest(self) -> None:
        """Close the least recently used views above the limits, except the last one."""
        sizes = {condition: view.n_bytes for condition, view in self._open.items()}
        total = sum(sizes.values())
        for condition, size in [*sizes.items()][:-1]:
            if len(self._open) > _MAX_OPEN or total > BUDGET:
                del self._open[condition]
                total -= size

    def _compute_unguided(
        self, condition: str | None, encode: Encode | None, save: bool
    ) -> Sequence[VectorSegment] | None:
        """Return the model's vectors of all texts; None if some would have to be encoded."""
        segments: Sequence[VectorSegment] = self._views.read(condition)
        missing = make_view(segments, self.table)[1]
        joint = self.model.is_joint(condition)
        if not len(missing):
            return segments
        if joint and encode is None:
            return None
        segment = self._compute_segment(condition, missing, encode if joint else None)
        if not save:
            return [*segments, self._views.convert(condition, segment)]
        return self._save_segment(condition, segments, segment, joint)

    def _apply_guide(
        self, condition: str, unguided: Sequence[VectorSegment], save: bool
    ) -> Sequence[VectorSegment]:
        """Return the vectors of all texts, mapped by the condition's guide."""
        guide = self.guides[condition]
        segments: Sequence[VectorSegment] = self._views.read(condition, guide.digest)
        missing = make_view(segments, self.table)[1]
        if not len(missing):
            return segments
        vectors = np.empty((len(missing), unguided[0].dim), dtype=np.float16)
        # Rows that are not in the table have position -1, which indexes the last element: -1 again.
        target_rows = np.full(len(self.table) + 1, -1)
        target_rows[missing] = np.arange(len(missing))
        for segment in unguided:
            targets = target_rows[self.table.positions(segment.numbers)]
            needed = np.flatnonzero(targets >= 0)
            for start in range(0, len(needed), _BLOCK_ROWS):
                rows = needed[start : start + _BLOCK_ROWS]
                mapped = guide.transform(segment.read(rows, vectors.size))
                vectors[targets[rows]] = convert_dtype(mapped, "float16", vectors.size)
        mapped_segment = VectorSegment(self.table.numbers[missing], vectors)
        if not save:
            return [*segments, self._views.convert(condition, mapped_segment, guide.digest)]
        return self._save_segment(condition, segments, mapped_segment, False, guide.digest)

    def _compute_segment(
        self, condition: str | None, missing: Positions, encode: Encode | None
    ) -> VectorSegment:
        project, columns = self.model.projections.get(condition), ["text"] if encode else []
        if self.model.templates.text_only:
            columns.append(VECTOR)
        vectors: NDArray[np.float16] = np.zeros((0, 0), dtype=np.float16)
        done = 0
        for block, rows in self.table.blocks(missing, columns):
            texts = rows["text"].to_pylist() if encode else [""] * len(block)
            half = vectors_of(rows).copy()
            stored = convert_dtype(half, "float32", len(missing) * half.shape[1])
            projected = project(texts, stored, encode or self.model.projections.encode)
            if not done:
                vectors = np.empty((len(missing), projected.shape[1]), dtype=np.float16)
            vectors[done : done + len(block)] = convert_dtype(projected, "float16", vectors.size)
            done += len(block)
        return VectorSegment(self.table.numbers[missing], vectors)

    def _save_segment(
        self,
        condition: str | None,
        segments: Sequence[VectorSegment],
        segment: VectorSegment,
        joint: bool,
        guide: str = "",
    ) -> Sequence[VectorSegment]:
        """Save a segment. A failure is only logged if no encoding is needed to recompute it."""
        try:
            return self._views.add(condition, segment, self.table, lasting=joint, guide=guide)
        except (OSError, UserError) as error:
            if joint:
                raise
            log.info(f"the vectors under {condition!r} cannot be saved for later use: {error}")
            return [*segments, self._views.convert(condition, segment, guide)]
