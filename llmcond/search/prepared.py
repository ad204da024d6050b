"""Queries against one version of an index: the scores of all its texts, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, clip_cosines
from llmcond.conditions import condition_flags
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError, format_count, shortened_repr
from llmcond.heads.guide import Guides
from llmcond.log import log
from llmcond.runs.embedder import normalise_vectors
from llmcond.search.errors import UnpreparedConditionError
from llmcond.search.half_precision import top_k
from llmcond.search.hits import Hits
from llmcond.search.model import short_name
from llmcond.search.projection import NO_CONDITION
from llmcond.search.table import VECTOR, Positions, vectors_of
from llmcond.search.version import IndexVersion

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
    """

    version: IndexVersion
    weights: Mapping[str, float]
    mask: NDArray[np.bool_] | None
    n: int
    k: int
    explain: bool

    @classmethod
    def prepare(
        cls,
        version: IndexVersion,
        weights: Mapping[str, float],
        k: int,
        where: str | None,
        explain: bool,
        seconds: float,
    ) -> PreparedSearch:
        """Evaluate the filter of a search for at most k hits.

        Raises:
            FilterError: if the filter cannot be applied, or takes longer than ``seconds``.
        """
        mask = None if where is None else version.table.match_filter(where, seconds)
        n = len(version.table) if mask is None else int(mask.sum())
        if n < k:
            origin = "in the index" if mask is None else "that match the filter"
            log.info(
                f"only {format_count(n, 'text')} {origin}: fewer than the {k:,} hits requested"
            )
        return cls(version, weights, mask, n, min(k, n), explain)

    def search_all(self, queries: Sequence[str]) -> list[Hits]:
        """Return the hits of each query among all texts.

        Raises:
            UnpreparedConditionError: if texts would have to be encoded under a condition.
        """
        n, joint = len(self.version.table), bool(self.version.model.templates.joint)
        batch_size = max(1, _MAX_SCORES // max(1, n))
        hits: list[Hits] = []
        for start in range(0, len(queries), batch_size):
            batch = self._encode(queries[start : start + batch_size])
            scores = {condition: self._score_all(batch, condition) for condition in self.weights}
            for index, query in enumerate(batch.texts):
                encoded = _TextsWithVectors([query], batch.stored[index : index + 1])
                query_scores = {
                    condition: all_scores[index] for condition, all_scores in scores.items()
                }
                # Stored vectors have half precision or less, so the best scores are computed again.
                n_spare = _SPARE if self.version.is_exact else self.k * (_RESCORE_MULTIPLIER - 1)
                n_near = self.k if joint else min(self.n, self.k + n_spare)
                near = self._find_best(self._sum_scores(query_scores), n_near, self.mask)
                rows = self._read_rows(near)
                near_scores = {
                    condition: all_scores[near] for condition, all_scores in query_scores.items()
                }
                hits.append(
                    self._make_hits(
                        encoded,
                        near,
                        rows,
                        near_scores if joint else self._compare(encoded, rows),
                        exact=self.version.is_exact,
                    )
                )
        return hits

    def search_nearest(self, queries: Sequence[str], count: int) -> list[Hits]:
        """Return the hits of each query among the ``count`` texts nearest without a condition.

        Raises:
            UserError: if the model does not encode texts together with conditions, or has no
                vectors without a condition.
        """
        model = self.version.model
        if not model.templates.joint:
            raise UserError(
                "--rerank is for models that encode each text together with the condition, but "
                "this model encodes them separately and compares every text anyway. Leave it out."
            )
        if not model.templates.text_only:
            raise UserError(
                f"--rerank first searches without a condition, but the prompt {model.view.name} "
                "does not encode texts without one. Leave it out."
            )
        if count < self.k:
            raise UserError(
                f"--rerank is {count:,}, but {self.k:,} hits are requested. Give --rerank at "
                f"least {self.k:,}."
            )
        hits: list[Hits] = []
        for query in queries:
            encoded = self._encode([query])
            near = self._find_best(
                self._score_all(encoded, NO_CONDITION)[0], min(count, self.n), self.mask
            )
            rows, exact = self._read_rows(near), len(near) == self.n
            hits.append(
                self._make_hits(encoded, near, rows, self._compare(encoded, rows), exact=exact)
            )
        if self.n > count:
            log.info(
                f"of {self.n:,} texts, only the {count:,} nearest without the condition were "
                "encoded under it; others may be nearer"
            )
        return hits

    def _encode(self, texts: Sequence[str]) -> _TextsWithVectors:
        return _TextsWithVectors(texts, self.version.model.projections.encode_texts(texts))

    def _project(self, encoded: _TextsWithVectors, condition: str | None) -> Array:
        """Return the unit vectors of encoded texts under a condition, (n, k)."""
        projections = self.version.model.projections
        vectors = projections.get(condition)(encoded.texts, encoded.stored, projections.encode)
        guide = self.version.guides.get(condition)
        return vectors if guide is None else guide.transform(vectors)

    def _score_all(self, queries: _TextsWithVectors, condition: str | None) -> Scores:
        """Return the cosines of queries with all texts under a condition, (q, n)."""
        view = self.version.view(condition)
        if view is None:
            n_missing, n_texts = len(self.version.find_missing(condition)), len(self.version.table)
            raise UnpreparedConditionError(
                condition or "",
                "this model encodes each text together with the condition, but "
                f"{n_missing:,} of {format_count(n_texts, 'text')} have no vectors under "
                f"{shortened_repr(condition)}.",
                f"llmcond index --out {self.version.table.folder} "
                f"{condition_flags(condition or '')}",
            )
        return clip_cosines(view.scores(self._project(queries, condition)))

    def _read_rows(self, near: Positions) -> Any:
        """Return texts with their columns and stored vectors, as an Arrow table."""
        vector_column = [VECTOR] if self.version.model.templates.text_only else []
        return self.version.table.take(
            near, ["id", "text", *self.version.table.columns, *vector_column]
        )

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
        *,
        exact: bool = True,
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
            row |= {name: _as_json(text[name]) for name in columns}
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
        if model.templates.text_only and model.base is model.encoder():
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


def _round(score: Any) -> float:
    return round(float(score), 6)


def _as_json(value: Any) -> Any:
    """Return a JSON value: NaN and infinity, which JSON lacks, become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
