"""Queries against one version of an index: scores of all its texts, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array
from llmcond.conditions import condition_flags
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError, brief, plural
from llmcond.log import log
from llmcond.runs.embedder import unit_length
from llmcond.search.halves import largest
from llmcond.search.hits import Hits
from llmcond.search.model import short_name
from llmcond.search.projection import ALONE
from llmcond.search.table import VECTOR, Positions, vectors_of
from llmcond.search.version import Version

#: Scores that are in memory at a time.
_SCORES = 2**25
#: Texts beside the best whose scores are computed once more.
_SPARE = 6

Scores = NDArray[np.float32]


class _Encoded(NamedTuple):
    """A few texts, and what is stored of such without a condition, (n, parts * dim)."""

    texts: Sequence[str]
    stored: NDArray[Any]


@dataclass(frozen=True)
class Searched:
    """Where is searched, and by what.

    Attributes:
        weights: of each condition.
        mask: which positions a filter lets through; None: all.
        n: how many these are.
        k: hits, no more than n.
        explain: whether hits are explained.
    """

    version: Version
    weights: Mapping[str, float]
    mask: NDArray[np.bool_] | None
    n: int
    k: int
    explain: bool

    @classmethod
    def of(
        cls,
        version: Version,
        weights: Mapping[str, float],
        k: int,
        where: str | None,
        explain: bool,
        seconds: float,
    ) -> Searched:
        """Return it for at most k hits that a filter lets through.

        Raises:
            UserError: the filter cannot be applied, or takes longer than so many seconds.
        """
        mask = None if where is None else version.table.matching(where, seconds)
        n = len(version.table) if mask is None else int(mask.sum())
        if n < k:
            which = "in the index" if mask is None else "that the filter lets through"
            few = f"fewer than the {k:,} asked for: {plural(n, 'text')} {which}"
            log.info(f"all hits are shown, {few}")
        return cls(version, weights, mask, n, min(k, n), explain)

    def exact(self, queries: Sequence[str]) -> list[Hits]:
        """Return the hits of each query among all texts.

        Raises:
            UserError: texts would have to be encoded under a condition.
        """
        n, joint = len(self.version.table), bool(self.version.model.sources.joint)
        at_once = max(1, _SCORES // max(1, n))
        found: list[Hits] = []
        for start in range(0, len(queries), at_once):
            part = self._encoded(queries[start : start + at_once])
            scores = {condition: self._scores(part, condition) for condition in self.weights}
            for i, query in enumerate(part.texts):
                own = _Encoded([query], part.stored[i : i + 1])
                under = {condition: every[i] for condition, every in scores.items()}
                # Views are in half precision: of the best the scores are computed once more.
                count = self.k if joint else min(self.n, self.k + _SPARE)
                near = self._best(self._total(under), count, self.mask)
                rows = self._rows(near)
                at = {condition: every[near] for condition, every in under.items()}
                found.append(
                    self._hits(own, near, rows, at if joint else self._compared(own, rows))
                )
        return found

    def reranked(self, queries: Sequence[str], count: int) -> list[Hits]:
        """Return the hits of each query among the ``count`` texts nearest without a condition.

        Raises:
            UserError: texts are not encoded together with conditions, or not without any.
        """
        model = self.version.model
        if not model.sources.joint:
            raise UserError(
                "--rerank is for models that encode each text together with the condition; this "
                "one compares every text under any condition. Leave it out."
            )
        if not model.sources.alone:
            raise UserError(
                f"--rerank takes the texts nearest without a condition, and the prompt "
                f"{model.view.name} encodes none without one. Leave it out."
            )
        if count < self.k:
            raise UserError(f"--rerank is {count:,}, fewer than the {self.k:,} hits asked for.")
        hits: list[Hits] = []
        for query in queries:
            own = self._encoded([query])
            near = self._best(self._scores(own, ALONE)[0], min(count, self.n), self.mask)
            rows, exact = self._rows(near), len(near) == self.n
            hits.append(self._hits(own, near, rows, self._compared(own, rows), exact=exact))
        if self.n > count:
            log.info(
                f"of {self.n:,} texts only the {count:,} nearest without a condition were encoded "
                "under it, so that others may be nearer"
            )
        return hits

    def _encoded(self, texts: Sequence[str]) -> _Encoded:
        return _Encoded(texts, self.version.model.projections.stored(texts))

    def _under(self, given: _Encoded, condition: str | None) -> Array:
        """Return the unit vectors of a few texts under a condition, (n, k)."""
        projections = self.version.model.projections
        made = projections.of(condition)(given.texts, given.stored, projections.encode)
        guide = self.version.guides.get(condition)
        return made if guide is None else guide.transform(made)

    def _scores(self, queries: _Encoded, condition: str | None) -> Scores:
        """Return the cosines of queries with all texts under a condition, (q, n)."""
        view = self.version.view(condition)
        if view is None:
            absent, n = len(self.version.absent(condition)), len(self.version.table)
            raise UserError(
                "this model encodes each text together with the condition, which is still to be "
                f"done under {brief(condition)} for {absent:,} of {plural(n, 'text')}. Encode "
                f"them: llmcond index --out {self.version.table.folder} "
                f"{condition_flags(condition or '')}"
            )
        return view.scores(self._under(queries, condition))

    def _rows(self, near: Positions) -> Any:
        """Return texts with all that is stored of them, as an Arrow table."""
        alone = [VECTOR] if self.version.model.sources.alone else []
        return self.version.table.take(near, ["id", "text", *self.version.table.columns, *alone])

    def _compared(self, query: _Encoded, rows: Any) -> dict[str, Scores]:
        """Return the cosines of a query with a few texts under each condition, (m,)."""
        given = _Encoded(rows["text"].to_pylist(), vectors_of(rows))
        return {c: self._under(given, c) @ self._under(query, c)[0] for c in self.weights}

    def _total(self, scores: Mapping[str, Scores]) -> Scores:
        weighted = [weight * scores[name] for name, weight in self.weights.items()]
        return np.asarray(np.sum(weighted, axis=0, dtype=np.float32))

    @staticmethod
    def _best(scores: Scores, k: int, mask: NDArray[np.bool_] | None = None) -> Positions:
        """Return the places of the k best scores, (n,); of equal ones the first."""
        given = scores if mask is None else np.where(mask, scores, -np.inf)
        found = largest(given, k)
        return np.asarray(found[np.lexsort((found, -scores[found]))])

    def _hits(
        self,
        query: _Encoded,
        near: Positions,
        rows: Any,
        scores: Mapping[str, Scores],
        *,
        exact: bool = True,
    ) -> Hits:
        """Return the hits of a query among some positions, (m,), by their scores, (m,)."""
        total, others = self._total(scores), self.version.table.columns
        best = self._best(total, self.k)
        texts = rows.select(["id", "text", *others]).take(best).to_pylist()
        plain = self._plain(query, near[best], texts) if self.explain else []
        found: list[dict[str, Any]] = []
        for place, text in zip(best.tolist(), texts, strict=True):
            row: dict[str, Any] = {"rank": len(found) + 1, "score": _rounded(total[place])}
            row |= {"text": text["text"], "id": text["id"]}
            row |= {name: _as_json(text[name]) for name in others}
            if self.explain:
                own = {name: _rounded(scores[name][place]) for name in self.weights}
                row["explain"] = {"under": own, **plain[len(found)]}
            found.append(row)
        base = self.version.model.base if self.explain else None
        name = None if base is None else short_name(base)
        every = self.version.guides
        guides = {condition: every[condition] for condition in self.weights if condition in every}
        return Hits(query.texts[0], dict(self.weights), found, self.n, exact, name, guides)

    def _plain(
        self, query: _Encoded, near: Positions, hits: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the scores and ranks of hits without a condition, None where there are none.

        They are those of the encoder before any adapter: an adapter changes the embeddings of texts
        without a condition, and was not trained for them.
        """
        model = self.version.model
        if model.base is None:
            return [{"without": None, "rank_without": None} for _ in hits]
        if model.sources.alone and model.base is model.encoder():
            scores = self._scores(query, ALONE)[0]
            let_through = scores if self.mask is None else scores[self.mask]
            return [
                {"without": _rounded(own), "rank_without": 1 + int((let_through > own).sum())}
                for own in scores[near]
            ]
        texts = [query.texts[0], *(hit["text"] for hit in hits)]
        vectors = unit_length(model.base.encode([EncoderInput("", text) for text in texts]))
        return [
            {"without": _rounded(score), "rank_without": None} for score in vectors[1:] @ vectors[0]
        ]


def _rounded(score: Any) -> float:
    return round(float(score), 6)


def _as_json(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinity are no numbers there."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
