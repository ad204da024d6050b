"""Queries against one version of an index: the scores of all its texts, and the best of them."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import Array, clip_cosines, scale_to_unit_norm
from llmcond.base.errors import UserError, format_count, shortened_repr
from llmcond.base.files import as_json
from llmcond.base.output import Displayed, log, make_frame
from llmcond.base.text import condition_flags, ignored_by, without_ignored, wordings
from llmcond.encoders.spec import EncoderInput
from llmcond.heads.guide import Guide, Guides
from llmcond.runs.embedder import guides_json, normalise_vectors
from llmcond.search import UnpreparedConditionError
from llmcond.search.model import NO_CONDITION, Encode, SearchModel, short_name
from llmcond.search.table import VECTOR, Positions, TextTable, vectors_of
from llmcond.search.views import (
    BUDGET,
    ConditionView,
    ConditionViews,
    VectorSegment,
    convert_dtype,
    make_view,
    top_k,
)

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
            save, guide = save or encode is not None, self.guide(condition)
            segments = self._unmapped(without_ignored(condition), encode, save)
            if segments is not None and guide is not None:
                map_vectors = partial(self._map_vectors, guide, segments)
                segments = self._complete(condition, map_vectors, save, guide.digest)
            if segments is None:
                return None
            view = self._open[condition] = make_view(segments, self.table)[0]
            self._close_oldest()
            return view

    def guide(self, condition: str | None) -> Guide | None:
        """Return the map of the vectors under a condition; None if there is none.

        Raises:
            UnpreparedConditionError: if no map was fitted for what the condition ignores.
        """
        guide = self.guides.get(condition)
        if guide is None and ignored_by(condition):
            raise UnpreparedConditionError(
                condition or "",
                "what to ignore has not been found in the texts of the index yet: "
                f"{shortened_repr(condition)}.",
                f"llmcond index --out {self.table.folder} {condition_flags(condition or '')}",
            )
        return guide

    def _unmapped(
        self, condition: str | None, encode: Encode | None, save: bool
    ) -> Sequence[VectorSegment] | None:
        """Return the vectors under a condition before any guide maps them; None if some lack."""
        parts = wordings(condition)
        if len(parts) == 1:
            compute = partial(self._compute_vectors, condition, encode)
            return self._complete(condition, compute, save)

        def mean(missing: Positions) -> NDArray[np.float16] | None:
            blocks = [
                slice(start, start + _BLOCK_ROWS) for start in range(0, len(missing), _BLOCK_ROWS)
            ]
            sums: list[Array] = []
            for part in parts:  # one at a time, so that only its vectors are in memory
                segments = self._unmapped(part, encode, save)
                if segments is None:
                    return None
                view = make_view(segments, self.table)[0]
                for number, block in enumerate(blocks):
                    lifted = self.model.rebase(view.rows(missing[block]), part)
                    if number == len(sums):
                        sums.append(lifted)
                    else:
                        sums[number] = sums[number] + lifted
            size = sum(block.size for block in sums)
            return np.concatenate(
                [convert_dtype(scale_to_unit_norm(one), "float16", size) for one in sums]
            )

        return self._complete(condition, mean, save)

    def _find_open(self, condition: str | None) -> ConditionView | None:
        """Return a view that is open, and mark it as used."""
        with suppress(KeyError):  # another thread may close it
            self._open.move_to_end(condition)
        return self._open.get(condition)

    def _close_oldest(self) -> None:
        """Close the least recently used views above the limits, except the last one."""
        sizes = {condition: view.n_bytes for condition, view in list(self._open.items())}
        total = sum(sizes.values())
        for condition, size in [*sizes.items()][:-1]:
            if len(self._open) > _MAX_OPEN or total > BUDGET:
                del self._open[condition]
                total -= size

    def _complete(
        self,
        condition: str | None,
        compute: Callable[[Positions], NDArray[np.float16] | None],
        save: bool,
        guide: str = "",
    ) -> Sequence[VectorSegment] | None:
        """Return the stored vectors of a view, and those that ``compute`` returns for other rows.

        It is None if ``compute`` returns None. A failure to save is only logged if no encoding is
        needed to compute the vectors again.
        """
        segments = self._views.read(condition, guide)
        missing = make_view(segments, self.table)[1]
        if not len(missing):
            return segments
        vectors = compute(missing)
        if vectors is None:
            return None
        segment = VectorSegment(self.table.numbers[missing], vectors)
        joint = not guide and len(wordings(condition)) == 1 and self.model.is_joint(condition)
        try:
            if save:
                return self._views.add(condition, segment, self.table, lasting=joint, guide=guide)
        except (OSError, UserError) as error:
            if joint:
                raise
            log.info(f"the vectors under {condition!r} cannot be saved for later use: {error}")
        return [*segments, self._views.convert(condition, segment, guide)]

    def _map_vectors(
        self, guide: Guide, unguided: Sequence[VectorSegment], missing: Positions
    ) -> NDArray[np.float16]:
        """Return the vectors of some rows, mapped by a guide."""
        view = make_view(unguided, self.table)[0]
        vectors = np.empty((len(missing), unguided[0].dim), dtype=np.float16)
        for start in range(0, len(missing), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            mapped = guide.transform(view.rows(missing[block]))
            vectors[block] = convert_dtype(mapped, "float16", vectors.size)
        return vectors

    def _compute_vectors(
        self, condition: str | None, encode: Encode | None, missing: Positions
    ) -> NDArray[np.float16] | None:
        """Return the model's vectors of some rows; None if they would have to be encoded."""
        joint = self.model.is_joint(condition)
        if joint and encode is None:
            return None
        project, columns = self.model.projection(condition), ["text"] if joint else []
        if self.model.text_only:
            columns.append(VECTOR)
        vectors: NDArray[np.float16] = np.zeros((0, 0), dtype=np.float16)
        done = 0
        for block, rows in self.table.blocks(missing, columns):
            texts = rows["text"].to_pylist() if joint else [""] * len(block)
            half = vectors_of(rows).copy()
            stored = convert_dtype(half, "float32", len(missing) * half.shape[1])
            projected = project(texts, stored, encode or self.model.encode_inputs)
            if not done:
                vectors = np.empty((len(missing), projected.shape[1]), dtype=np.float16)
            vectors[done : done + len(block)] = convert_dtype(projected, "float16", vectors.size)
            done += len(block)
        return vectors


@dataclass(frozen=True)
class Hits(Displayed):
    """The texts nearest to a query under a condition, best first.

    Attributes:
        query: the text that was searched for.
        conditions: weight of each condition.
        rows: a dictionary for each hit: ``rank`` (from 1), ``score``, ``text``, ``id``, and the
            index's other columns. With ``explain`` also the hit's score under each condition and
            without a condition; with ``mentions``, whether it says anything about each condition.
        searched: number of texts that were compared: all texts, or those that match the filter.
        plain: with ``explain``, name of the encoder that gave the scores without a condition, if
            there are any.
        exact: whether all of these texts were compared under the condition in half precision.
            Otherwise only the texts nearest to the query without the condition were, or the index
            has vectors of 8 bits or 1 bit for each number.
        guides: the guides of those conditions that have one in the index.

    Examples:
        >>> import llmcond
        >>> texts = ["The parcel never arrived.", "I was charged twice."]
        >>> index = llmcond.Index.build("complaints", texts)
        >>> hits = index.search("Where is my order?", "the problem", k=1)
        >>> hits.rows[0]["text"]
        'The parcel never arrived.'
        >>> len(hits), hits.searched
        (1, 2)
    """

    query: str
    conditions: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]
    searched: int
    exact: bool = True
    plain: str | None = None
    guides: Mapping[Any, Guide] = field(default_factory=Guides)

    def __len__(self) -> int:
        return len(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Convert the result to the dictionary that ``--json`` prints.

        Returns:
            A dictionary with ``results`` (the rows), ``query``, ``conditions``, ``searched``,
            ``exact``, ``plain`` if there are scores without a condition, and the guides. Dates and
            times are texts in ISO 8601, bytes are hexadecimal, and numbers that are not finite are
            None.
        """
        return {
            "results": [as_json(row) for row in self.rows],
            "query": self.query,
            "conditions": dict(self.conditions),
            "searched": self.searched,
            "exact": self.exact,
            **({} if self.plain is None else {"plain": self.plain}),
            **guides_json(self.guides),
        }

    @override
    def _displayed(self) -> Mapping[str, Any]:
        values = self.to_json()
        return {"rows": values.pop("results"), **values}

    def to_pandas(self) -> Any:
        """Convert the hits to a data frame.

        Returns:
            A ``pandas.DataFrame`` with one row per hit and the columns of ``rows``.
        """
        return make_frame([dict(row) for row in self.rows])


#: Number of scores that are in memory at a time.
_MAX_SCORES = 2**25
#: Texts besides the k best whose scores are computed again, in full precision.
_SPARE = 6
#: Texts for each hit whose scores are computed again if stored vectors have 8 bits or 1 bit; the
#: default of sentence-transformers.
_RESCORE_MULTIPLIER = 4

Scores = NDArray[np.float32]


class _TextsWithVectors(NamedTuple):
    """Queries or texts, and their vectors without a condition, (n, parts * dim)."""

    texts: Sequence[str]
    stored: NDArray[Any]


@dataclass(frozen=True)
class PreparedSearch:
    """A search whose filter has been evaluated and which is ready to run.

    Attributes:
        weights: weight of each condition.
        mask: (n,), true for the positions that match the filter; None: all match.
        n: number of texts that match the filter.
        k: number of hits, at most n.
        explain: whether hits are explained.
        rerank: number of texts nearest without a condition that are compared; None: all.
    """

    version: IndexVersion
    weights: Mapping[str, float]
    mask: NDArray[np.bool_] | None
    n: int
    k: int
    explain: bool
    rerank: int | None

    def __call__(self, queries: Sequence[str]) -> list[Hits]:
        """Return the hits of each query.

        Raises:
            UnpreparedConditionError: if texts would have to be encoded under a condition.
        """
        if not self.k:
            return [Hits(text, self.weights, [], self.n) for text in queries]
        batch_size = max(1, _MAX_SCORES // len(self.version.table))
        conditions = list(self.weights) if self.rerank is None else [NO_CONDITION]
        hits: list[Hits] = []
        for start in range(0, len(queries), batch_size):
            texts = queries[start : start + batch_size]
            batch = _TextsWithVectors(texts, self.version.model.encode_texts(texts))
            scores = {condition: self._score_all(batch, condition) for condition in conditions}
            for index, query in enumerate(batch.texts):
                encoded = _TextsWithVectors([query], batch.stored[index : index + 1])
                hits.append(self._find_hits(encoded, {c: scores[c][index] for c in conditions}))
        if self.rerank is not None and self.n > self.rerank:
            log.info(
                f"of {self.n:,} texts, only the {self.rerank:,} nearest without the condition were "
                "encoded under it; others may be nearer"
            )
        return hits

    def _find_hits(self, query: _TextsWithVectors, scores: Mapping[Any, Scores]) -> Hits:
        """Return the hits of a query by its cosines with all texts under conditions, (n,)."""
        exact, joint = self.version.is_exact, bool(self.version.model.joint)
        if self.rerank is not None:
            total, n_near = scores[NO_CONDITION], min(self.rerank, self.n)
            exact = n_near == self.n
        else:
            # Stored vectors have half precision or less, so the best scores are computed again.
            n_spare = 0 if joint else _SPARE if exact else self.k * (_RESCORE_MULTIPLIER - 1)
            total, n_near = self._sum_scores(scores), min(self.n, self.k + n_spare)
        near = self._find_best(total, n_near, self.mask)
        vector_column = [VECTOR] if self.version.model.text_only else []
        table = self.version.table
        rows = table.take(near, ["id", "text", *table.columns, *vector_column])
        if joint and self.rerank is None:
            scores = {condition: under[near] for condition, under in scores.items()}
        else:
            scores = self._compare(query, rows)
        return self._make_hits(query, near, rows, scores, exact)

    def _project(self, encoded: _TextsWithVectors, condition: str | None) -> Array:
        """Return the unit vectors of encoded texts under a condition, (n, k)."""
        model = self.version.model
        vectors = model.vectors(*encoded, condition, model.encode_inputs)
        guide = self.version.guide(condition)
        return vectors if guide is None else guide.transform(vectors)

    def _score_all(self, queries: _TextsWithVectors, condition: str | None) -> Scores:
        """Return the cosines of queries with all texts under a condition, (q, n)."""
        view = self.version.view(condition)
        if view is None:
            n_missing = max(len(self.version.find_missing(part)) for part in wordings(condition))
            n_texts = len(self.version.table)
            raise UnpreparedConditionError(
                condition or "",
                "this model encodes each text together with the condition, but "
                f"{n_missing:,} of {format_count(n_texts, 'text')} have no vectors under "
                f"{shortened_repr(condition)}.",
                f"llmcond index --out {self.version.table.folder} "
                f"{condition_flags(condition or '')}",
            )
        return clip_cosines(view.scores(self._project(queries, condition)))

    def _compare(self, query: _TextsWithVectors, rows: Any) -> dict[str, Scores]:
        """Return the cosines of a query with a few texts under each condition, (m,)."""
        texts = _TextsWithVectors(rows["text"].to_pylist(), vectors_of(rows))
        return {
            c: clip_cosines(self._project(texts, c) @ self._project(query, c)[0])
            for c in self.weights
        }

    def _sum_scores(self, scores: Mapping[str, Scores]) -> Scores:
        weighted = [weight * scores[name] for name, weight in self.weights.items()]
        return np.asarray(np.sum(weighted, axis=0, dtype=np.float32))

    @staticmethod
    def _find_best(scores: Scores, k: int, mask: NDArray[np.bool_] | None = None) -> Positions:
        """Return the indices of the k best scores, best first; ties go to the lower index."""
        allowed = scores if mask is None else np.where(mask, scores, -np.inf)
        candidates = top_k(allowed, k)
        return np.asarray(candidates[np.lexsort((candidates, -scores[candidates]))])

    def _make_hits(
        self,
        query: _TextsWithVectors,
        near: Positions,
        rows: Any,
        scores: Mapping[str, Scores],
        exact: bool,
    ) -> Hits:
        """Return the hits of a query among some positions, (m,), by their scores, (m,)."""
        total, columns = self._sum_scores(scores), self.version.table.columns
        best = self._find_best(total, self.k)
        texts = rows.select(["id", "text", *columns]).take(best).to_pylist()
        plain_scores = self._score_without(query, near[best], texts) if self.explain else []
        hit_rows: list[dict[str, Any]] = []
        for index, text in zip(best.tolist(), texts, strict=True):
            row: dict[str, Any] = {"rank": len(hit_rows) + 1, "score": _round(total[index])}
            row |= {"text": text["text"], "id": text["id"]}
            row |= {name: _finite_or_none(text[name]) for name in columns}
            if self.explain:
                under = {name: _round(scores[name][index]) for name in self.weights}
                row["explain"] = {"under": under, **plain_scores[len(hit_rows)]}
            hit_rows.append(row)
        base_encoder = self.version.model.base if self.explain else None
        name = None if base_encoder is None else short_name(base_encoder)
        all_guides = self.version.guides
        guides = Guides({c: all_guides[c] for c in self.weights if c in all_guides})
        return Hits(query.texts[0], dict(self.weights), hit_rows, self.n, exact, name, guides)

    def _score_without(
        self, query: _TextsWithVectors, near: Positions, hits: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the scores and ranks of hits without a condition; None where there are none.

        They come from the encoder without any adapter, because an adapter changes the embeddings of
        texts without a condition, although it was not trained for them.
        """
        model = self.version.model
        if model.base is None:
            return [{"without": None, "rank_without": None} for _ in hits]
        if model.text_only and model.base is model.encoder():
            scores = self._score_all(query, NO_CONDITION)[0]
            allowed = scores if self.mask is None else scores[self.mask]
            return [
                {"without": _round(hit_score), "rank_without": 1 + int((allowed > hit_score).sum())}
                for hit_score in scores[near]
            ]
        texts = [query.texts[0], *(hit["text"] for hit in hits)]
        vectors = normalise_vectors(model.base.encode([EncoderInput("", text) for text in texts]))
        scores = clip_cosines(vectors[1:] @ vectors[0])
        return [{"without": _round(score), "rank_without": None} for score in scores]


def check_rerank(count: int, k: int, model: SearchModel) -> None:
    """Raise a UserError if a search for k hits cannot compare the ``count`` nearest texts only."""
    if not model.joint:
        raise UserError(
            "--rerank is for models that encode each text together with the condition, but this "
            "model encodes them separately and compares every text anyway. Leave it out."
        )
    if not model.text_only:
        raise UserError(
            f"--rerank first searches without a condition, but the prompt {model.view.name} does "
            "not encode texts without one. Leave it out."
        )
    if count < k:
        raise UserError(
            f"--rerank is {count:,}, but {k:,} hits are requested. Give --rerank at least {k:,}."
        )


def _round(score: Any) -> float:
    return round(float(score), 6)


def _finite_or_none(value: Any) -> Any:
    """Return None instead of NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
