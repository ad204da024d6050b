"""An index: a collection of texts in a folder, searched by their similarity under any condition.

``index.json`` says what makes the vectors: a run, or a bundled model, and its head. ``texts.lance``
holds the texts with their ids, other columns, and e(s) where the prompt gives it; ``views/`` the
vectors under conditions that were asked for. ``encoding/`` is there while texts are encoded, so
that what was encoded is not lost when that is interrupted.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from llmcond.arrays import Array, Dense, Matrix
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError, brief, listed
from llmcond.features.store import FeatureStore
from llmcond.features.view import ViewInputs
from llmcond.files import check_format, read_json, write_json
from llmcond.log import log
from llmcond.runs.embedder import Embedder
from llmcond.runs.extraction import extract_inputs
from llmcond.search.hits import Hits
from llmcond.search.model import Model
from llmcond.search.projection import Encode, Projection
from llmcond.search.rows import Rows, Written
from llmcond.search.table import VECTOR, Positions, Table, vectors_of
from llmcond.search.views import ALONE, Segment, View, Views, view_of

FORMAT = 1
#: Conditions whose maps, and views, are kept in memory.
_KEPT = 64
#: Scores that are in memory at a time.
_SCORES = 2**26

Scores = NDArray[np.float32]


@dataclass(eq=False)
class _Opened:
    """One version of the texts, with those of its views that were opened."""

    table: Table
    views: OrderedDict[str | None, View] = field(default_factory=OrderedDict)


class Index:
    """A collection of texts, searched under any condition; make one with :meth:`build`.

    Searches are exact: every text is compared. Several threads may search at once, also while texts
    are added; other processes go on with the version that they opened.

    Attributes:
        folder: where it is.
        written: what became of the texts that were added last by this object.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        """Open a folder whose index.json was checked; use :meth:`build` or :meth:`open`."""
        self.folder = folder
        self.written = Written(0, 0, 0)
        self._model = model
        self._views = Views(folder / "views")
        self._opened = _Opened(Table(folder))
        self._projections: OrderedDict[str | None, Projection] = OrderedDict()
        # Always taken in this order.
        self._writer, self._making = threading.RLock(), threading.RLock()
        self._file_lock = FileLock(folder / ".lock")

    # -- opening -------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        folder: str | Path,
        texts: Sequence[str] = (),
        *,
        ids: Sequence[object] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        conditions: Sequence[str] = (),
        run: str | Path | None = None,
        model: str | None = None,
        head: str | None = None,
        prompt: str | None = None,
        device: str = "auto",
    ) -> Index:
        """Make an index of texts, or add to the one that is there; see :meth:`add`.

        Args:
            folder: where it is.
            texts: n texts.
            ids: n of them, see :meth:`add`.
            columns: n values each, by name: shown with hits, and searched by ``where``.
            conditions: see :meth:`prepare`.
            run: a run's folder; None: of an index that is there its own, and else as of
                :func:`llmcond.load_embedder`. So it is with the next three.
            model: the name of a bundled model instead.
            head: a fitted head's name; ``none``: zero-shot.
            prompt: for zero-shot.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

        Raises:
            UserError: an index of another model or head, a folder of something else, or as
                :meth:`add`.
        """
        rows = Rows.checked(texts, ids, columns)
        folder = Path(folder)
        given: dict[str, Any] = {"run": run, "model": model, "head": head, "prompt": prompt}
        if (folder / "index.json").exists():
            index = cls._open(folder, device, {k: v for k, v in given.items() if v is not None})
        else:
            if folder.exists() and not (folder.is_dir() and _is_vacant(folder)):
                raise UserError(
                    f"{folder} is no index (it has no index.json). Name another folder; nothing in "
                    "it was touched."
                )
            found = Model.find(**given, device=device)
            _record(folder, found)
            index = cls(folder, found)
        if len(rows):
            index._add(rows, conditions)
        index.prepare(conditions)
        return index

    @classmethod
    def open(cls, folder: str | Path, *, device: str = "auto") -> Index:
        """Open an index.

        Raises:
            UserError: no index there, or its run is gone or has changed.
        """
        folder = Path(folder)
        if not (folder / "index.json").exists():
            what = "is no index (it has no index.json)" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {what}. Make one: llmcond index TEXTS --out {folder}")
        return cls._open(folder, device, {})

    @classmethod
    def _open(cls, folder: Path, device: str, given: Mapping[str, Any]) -> Index:
        record = read_json(folder / "index.json")
        check_format(record, FORMAT, str(folder))
        made_by: dict[str, Any] = dict.fromkeys(("run", "model", "head", "prompt"))
        made_by |= record["made_by"]
        if "run" in given or "model" in given:
            made_by |= {"run": None, "model": None}
        if "head" in given:
            made_by["prompt"] = None
        try:
            model = Model.find(**{**made_by, **given}, device=device)
        except UserError as error:
            told = ", ".join(f"{key} {value}" for key, value in record["made_by"].items())
            raise UserError(f"{folder} was made with {told}: {error}") from error
        differences = model.differences(record["identity"])
        if differences:
            told = ", ".join(f"{key} {value}" for key, value in record["made_by"].items())
            raise UserError(
                f"{folder} was made with {told}; what is named now, or what is there by now, has "
                f"another {' and another '.join(differences)}. Name that one, or make another "
                "index: llmcond index TEXTS --out DIR"
            )
        if model.made_by != record["made_by"]:  # the run was moved
            _record(folder, model)
        return cls(folder, model)

    def __len__(self) -> int:
        return len(self._opened.table)

    def __repr__(self) -> str:
        made = ", ".join(f"{key} {value}" for key, value in self._model.made_by.items())
        return f"Index({str(self.folder)!r}, {len(self):,} texts, {made})"

    @property
    def embedder(self) -> Embedder:
        """Return what it encodes by, loaded when it is first needed."""
        with self._making:
            return self._model.embedder

    @property
    def conditions(self) -> list[str]:
        """Return the conditions that it holds vectors for."""
        return self._views.conditions()

    @property
    def columns(self) -> list[str]:
        """Return the names of its columns besides ``id`` and ``text``."""
        return self._opened.table.columns

    @property
    def encodes_pairs(self) -> bool:
        """Return whether each text is encoded together with the condition.

        If not, any condition costs no more than a small product for each text.
        """
        return bool(self._model.sources.joint)

    # -- writing -------------------------------------------------------------------------------

    def add(
        self,
        texts: Sequence[str],
        *,
        ids: Sequence[object] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> Written:
        """Add texts, and encode those that are new under all conditions it was prepared for.

        A text whose id is there replaces that one; the same id with the same text costs nothing.

        Args:
            texts: n texts.
            ids: n of them; None: made of the texts.
            columns: n values each, by name; the same names as the texts that are there have.

        Raises:
            UserError: an empty text, an id that repeats, other columns than those that are there.
            DiskFullError: no room; the texts that were there are as they were, and what was
                encoded is kept for the next time.
        """
        return self._add(Rows.checked(texts, ids, columns))

    def _add(self, rows: Rows, conditions: Sequence[str] = ()) -> Written:
        with self._writing() as table:
            plan = rows.against(table)
            conditions = list(dict.fromkeys([*self._lasting(), *map(_condition, conditions)]))
            if plan.n_new:
                self._encode(plan.new_texts, conditions)
            if len(plan):
                plan.write(self._store(), self._model.sources.stored)
                self._adopt(Table(self.folder))
            for condition in conditions if self.encodes_pairs else ():
                self._view(self._opened, condition)
        self.written = plan.written
        log.info(f"{plan.written.told} -> {self.folder}, {len(self):,} texts")
        return plan.written

    def delete(self, ids: Sequence[object]) -> int:
        """Delete texts by their ids, and return how many there were."""
        named = list(dict.fromkeys(map(str, ids)))
        with self._writing() as table:
            absent = [named[i] for i in np.flatnonzero(table.find(named) < 0)]
            if absent:
                log.warning(f"{len(absent):,} ids are not there: {listed(absent, 5)}")
            if len(absent) < len(named):
                self._adopt(table.delete(named))
        count = len(named) - len(absent)
        log.info(f"{count:,} texts deleted; {len(self):,} are left in {self.folder}")
        return count

    def prepare(self, conditions: Sequence[str]) -> None:
        """Make the vectors of all texts under conditions, where they are not there yet.

        Only needed where each text is encoded together with the condition (``encodes_pairs``).

        Raises:
            UserError: an empty condition.
            DiskFullError: no room; what was encoded is kept for the next time.
        """
        wanted = list(dict.fromkeys(map(_condition, conditions)))
        absent = [c for c in wanted if self._absent(self._opened, c)]
        if self.encodes_pairs and len(absent) > 1:
            with self._writing() as table:  # all in one go: a text's are encoded together
                texts = table.take(np.arange(len(table)), ["text"])["text"].to_pylist()
                self._encode(texts, absent, alone=False)
                for condition in wanted:
                    self._view(self._opened, condition)
        for condition in wanted:
            self._view(self._opened, condition)

    @contextmanager
    def _writing(self) -> Iterator[Table]:
        """Be the one writer, with the newest version of the texts."""
        with self._writer:
            try:
                self._file_lock.acquire(timeout=0)
            except Timeout:
                log.info(f"another process writes {self.folder}; waiting for it")
                self._file_lock.acquire()
            except OSError as error:
                raise UserError(f"{self.folder} cannot be written: {error.strerror}.") from error
            try:
                self._refresh()
                yield self._opened.table
                if self._file_lock.lock_counter == 1:
                    shutil.rmtree(self.folder / "encoding", ignore_errors=True)
            finally:
                self._file_lock.release()

    def _refresh(self) -> None:
        newest = Table(self.folder)
        if not np.array_equal(newest.numbers, self._opened.table.numbers):
            self._adopt(newest)

    def _adopt(self, table: Table) -> None:
        self._opened = _Opened(table)

    def _lasting(self) -> list[str]:
        """Return the conditions whose vectors must be there for every text."""
        return self.conditions if self.encodes_pairs else []

    def _store(self) -> FeatureStore:
        """Return where vectors are until the texts that are encoded are all there."""
        run = self._model.run
        return FeatureStore(self.folder / "encoding", run.identity, run.manifest["store_dtype"])

    def _encode(
        self, texts: Sequence[str], conditions: Sequence[str], *, alone: bool = True
    ) -> FeatureStore:
        """Encode texts by themselves and under conditions, as far as that is not done yet."""
        sources, store = self._model.sources, self._store()
        if alone and sources.alone:
            inputs = ViewInputs([(text, "") for text in texts], sources.alone)
            extract_inputs(store, self._model.encoder, "texts", inputs)
        if conditions and sources.joint:
            rows = [(text, condition) for text in texts for condition in conditions]
            name = "texts under " + listed(conditions, 3)
            extract_inputs(store, self._model.encoder, name, ViewInputs(rows, sources.joint))
        return store

    # -- vectors under a condition -------------------------------------------------------------

    def _projection(self, condition: str | None) -> Projection:
        with self._making:
            found = self._projections.get(condition)
            if found is None:
                inputs = [] if condition is ALONE else self._model.sources.conditions(condition)
                vectors = self._encoded(inputs)[:]
                found = Projection(
                    self._model.sources,
                    self._model.saved.head if self._model.saved else None,
                    condition,
                    dict(zip(inputs, vectors, strict=True)),
                )
                self._projections[condition] = found
                if len(self._projections) > _KEPT:
                    self._projections.popitem(last=False)
            self._projections.move_to_end(condition)
            return found

    def _encoded(self, inputs: Sequence[EncoderInput]) -> Matrix:
        """Return the vectors of a few inputs, which are not kept."""
        if not inputs:
            return Dense(np.zeros((0, 0), dtype=np.float32))
        vectors = self.embedder.encoder.encode(inputs)
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise UserError(f"the encoder gave NaN or infinity for {brief(inputs[bad[0]].text)}.")
        return Dense(vectors)

    def _queries(self, queries: Sequence[str], condition: str | None) -> Array:
        """Return unit vectors of queries under a condition, (q, k)."""
        sources = self._model.sources
        stored = self._encoded(sources.stored(queries))[:].reshape(len(queries), -1)
        return self._projection(condition)(queries, stored, self._encoded)

    def _absent(self, opened: _Opened, condition: str | None) -> int:
        """Return how many texts have no vector under a condition yet."""
        if condition in opened.views:
            return 0
        return len(view_of(self._views.read(condition), opened.table)[1])

    def _view(self, opened: _Opened, condition: str | None, *, prepare: bool = True) -> View:
        """Return the vectors of all texts under a condition, made where they are not there yet.

        Raises:
            UserError: they would have to be encoded, and ``prepare`` is False.
        """
        found = opened.views.get(condition)
        if found is not None:
            return found
        joint = condition is not ALONE and self.encodes_pairs
        with self._making:
            found = opened.views.get(condition)
            if found is not None:
                return found
            segments = self._views.read(condition)
            found, absent = view_of(segments, opened.table)
            if len(absent) and not joint:
                found = self._projected(opened.table, condition, segments, absent)
            if not (len(absent) and joint):
                opened.views[condition] = found
                if len(opened.views) > _KEPT:
                    opened.views.popitem(last=False)
                return found
        if not prepare:
            raise UserError(
                f"the index holds no vectors of {len(absent):,} of its {len(opened.table):,} texts "
                f"under {brief(condition)}, and this model encodes each text together with the "
                f"condition. Prepare it: llmcond index --out {self.folder} --condition "
                f"{brief(condition)}. Prepared: {listed(self.conditions)}"
            )
        return self._encoded_view(opened, str(condition))

    def _encoded_view(self, opened: _Opened, condition: str) -> View:
        with self._writing():
            segments = self._views.read(condition)
            found, absent = view_of(segments, opened.table)
            if len(absent):
                log.info(
                    f"this model encodes each text together with the condition: {len(absent):,} "
                    f"texts under {condition!r}, whose vectors are kept"
                )
                texts = opened.table.take(absent, ["text"])["text"].to_pylist()
                store = self._encode(texts, [condition], alone=False)
                with self._making:
                    found = self._projected(opened.table, condition, segments, absent, store.lookup)
        opened.views[condition] = found
        return found

    def _projected(
        self,
        table: Table,
        condition: str | None,
        segments: Sequence[Segment],
        absent: Positions,
        encode: Encode | None = None,
    ) -> View:
        """Make a view of the rows that no segment has, keep it on disk, and return all."""
        projection = self._projection(condition)
        columns = [VECTOR] if self._model.sources.alone else []
        columns += ["text"] if encode else []
        vectors: NDArray[np.float16] | None = None
        done = 0
        for part, rows in table.blocks(absent, columns):
            texts = rows["text"].to_pylist() if encode else [""] * len(part)
            made = projection(texts, vectors_of(rows), encode or self._encoded)
            if vectors is None:
                vectors = np.empty((len(absent), made.shape[1]), dtype=np.float16)
            vectors[done : done + len(part)] = made
            done += len(part)
        if vectors is None:
            return view_of(segments, table)[0]
        segment = Segment(table.numbers[absent], vectors)
        try:
            segments = self._views.add(condition, segment, table, lasting=encode is not None)
        except UserError as error:
            if encode is not None:
                raise
            log.info(f"vectors under {condition!r} are not kept: {error}")
            segments = [*segments, segment]
        return view_of(segments, table)[0]

    # -- searching -----------------------------------------------------------------------------

    @overload
    def search(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        query: str,
        condition: str | Mapping[str, float],
        k: int = ...,
        *,
        where: str | None = ...,
        rerank: int | None = ...,
        explain: bool = ...,
        prepare: bool = ...,
    ) -> Hits: ...

    @overload
    def search(
        self,
        query: Sequence[str],
        condition: str | Mapping[str, float],
        k: int = ...,
        *,
        where: str | None = ...,
        rerank: int | None = ...,
        explain: bool = ...,
        prepare: bool = ...,
    ) -> list[Hits]: ...

    def search(
        self,
        query: str | Sequence[str],
        condition: str | Mapping[str, float],
        k: int = 10,
        *,
        where: str | None = None,
        rerank: int | None = None,
        explain: bool = False,
        prepare: bool = True,
    ) -> Hits | list[Hits]:
        """Return the k texts nearest to a query under a condition; of several queries, a list.

        Args:
            query: a text, or several.
            condition: a text, or several with weights: scores are then weighted sums of cosines.
            k: hits; all texts if there are fewer.
            where: a predicate on the columns, as in SQL's WHERE.
            rerank: where the model encodes each text together with the condition, encode only so
                many texts, those nearest without a condition; then the result is not exact.
            explain: add each hit's score under each condition and under none, and its rank there.
            prepare: whether texts are encoded under a condition that the index holds no vectors of.

        Raises:
            UserError: an empty query or condition, k below 1, a predicate that cannot be read,
                ``rerank`` where there is nothing to rank by without a condition, or texts that
                would have to be encoded and ``prepare`` is False.
        """
        queries = [query] if isinstance(query, str) else list(query)
        for text in queries:
            if not isinstance(text, str) or not text.strip():
                raise UserError("the query is empty; give a text.")
        weights = _weights(condition)
        if k < 1:
            raise UserError(f"k is {k}; it must be at least 1.")
        opened = self._opened
        mask = None if where is None else opened.table.matching(where)
        searched = len(opened.table) if mask is None else int(mask.sum())
        if searched < k:
            what = "texts in it" if mask is None else "texts that --where lets through"
            log.info(f"{searched:,} {what}: fewer than the {k:,} hits asked for, so all are shown")
        asked = _Search(self, opened, weights, mask, min(k, searched), explain)
        at_once = max(1, _SCORES // max(1, len(opened.table)))
        found: list[Hits] = []
        for start in range(0, len(queries), at_once):
            part = queries[start : start + at_once]
            found += asked.exact(part, prepare) if rerank is None else asked.reranked(part, rerank)
        return found[0] if isinstance(query, str) else found


@dataclass(frozen=True)
class _Search:
    """Queries under the same conditions.

    Attributes:
        mask: positions that a filter lets through; None: all.
        k: hits, no more than there are positions.
    """

    index: Index
    opened: _Opened
    weights: Mapping[str, float]
    mask: NDArray[np.bool_] | None
    k: int
    explain: bool

    @property
    def searched(self) -> int:
        return len(self.opened.table) if self.mask is None else int(self.mask.sum())

    def exact(self, queries: Sequence[str], prepare: bool) -> list[Hits]:
        """Return hits among all texts."""
        scores = {}
        for condition in self.weights:
            scores[condition] = self.scores(queries, condition, prepare)
        return self.hits(queries, scores, np.arange(len(self.opened.table)))

    def scores(self, queries: Sequence[str], condition: str | None, prepare: bool = True) -> Scores:
        """Return cosines under one condition, (q, n)."""
        view = self.index._view(self.opened, condition, prepare=prepare)
        return view.scores(self.index._queries(queries, condition))

    def reranked(self, queries: Sequence[str], count: int) -> list[Hits]:
        """Return hits among those nearest without a condition."""
        index, table = self.index, self.opened.table
        if not index.encodes_pairs:
            raise UserError(
                "--rerank is for models that encode each text together with the condition; this "
                "one compares every text anyway. Leave it out."
            )
        if not index._model.sources.alone:
            raise UserError(
                f"--rerank takes texts nearest without a condition, and the prompt "
                f"{index._model.view.name} encodes none without it. Leave it out, or prepare the "
                f"condition: llmcond index --out {index.folder} --condition C"
            )
        if count < self.k:
            raise UserError(f"--rerank is {count}, fewer than the {self.k} hits asked for.")
        hits = []
        for query in queries:
            alone = self.scores([query], ALONE)[0]
            near = self.best(alone, min(count, self.searched))
            rows = table.take(near, ["text", VECTOR])
            texts, stored = rows["text"].to_pylist(), vectors_of(rows)
            scores = {}
            for condition in self.weights:
                vectors = index._projection(condition)(texts, stored, index._encoded)
                scores[condition] = index._queries([query], condition) @ vectors.T
            hits += self.hits([query], scores, near, exact=len(near) == self.searched)
        if self.searched > count:
            log.info(
                f"of {self.searched:,} texts only the {count:,} nearest without a condition were "
                "encoded under it: others may be nearer"
            )
        return hits

    def best(self, scores: Scores, k: int) -> Positions:
        """Return the positions of the k best scores, (n,), that the filter lets through."""
        if self.mask is not None and len(scores) == len(self.mask):
            scores = np.where(self.mask, scores, -np.inf)
        found = torch.topk(torch.from_numpy(np.ascontiguousarray(scores)), k).indices.numpy()
        order: Positions = found[np.lexsort((found, -scores[found]))]
        return order

    def hits(
        self,
        queries: Sequence[str],
        scores: Mapping[str, Scores],
        among: Positions,
        *,
        exact: bool = True,
    ) -> list[Hits]:
        """Return the hits of queries, from scores (q, m) of the positions ``among`` (m,)."""
        weighted = [weight * scores[condition] for condition, weight in self.weights.items()]
        total: Scores = np.sum(weighted, axis=0)
        columns = ["id", "text", *self.opened.table.columns]
        without = self.scores(queries, ALONE) if self.explain and self._has_alone else None
        found = []
        for i, query in enumerate(queries):
            best = self.best(total[i], self.k) if self.k else np.zeros(0, dtype=np.int64)
            texts = self.opened.table.take(among[best], columns).to_pylist() if self.k else []
            rows = []
            for rank, (place, text) in enumerate(zip(best.tolist(), texts, strict=True), 1):
                others = {name: _plain(text[name]) for name in columns[2:]}
                row = {"rank": rank, "score": _rounded(total[i][place]), "text": text["text"]}
                row |= {"id": text["id"], **others}
                if self.explain:
                    own = {name: _rounded(scores[name][i][place]) for name in self.weights}
                    row["explain"] = {"conditions": own, **self._without(without, i, among[place])}
                rows.append(row)
            found.append(Hits(query, dict(self.weights), rows, self.searched, exact))
        return found

    @property
    def _has_alone(self) -> bool:
        return bool(self.index._model.sources.alone)

    def _without(self, scores: Scores | None, i: int, position: int) -> dict[str, Any]:
        """Return a hit's score and rank without a condition; None where there is no such score."""
        if scores is None:
            return {"score_without": None, "rank_without": None}
        score = scores[i][position]
        better = scores[i] > score
        rank = 1 + int((better if self.mask is None else better & self.mask).sum())
        return {"score_without": _rounded(score), "rank_without": rank}


def _record(folder: Path, model: Model) -> None:
    write_json(
        folder / "index.json",
        {"format": FORMAT, "made_by": model.made_by, "identity": model.identity},
    )


def _is_vacant(folder: Path) -> bool:
    return not any(folder.iterdir())


def _condition(text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        raise UserError("the condition is empty; give a text.")
    return text


def _weights(condition: str | Mapping[str, float]) -> dict[str, float]:
    given = {condition: 1.0} if isinstance(condition, str) else dict(condition)
    if not given:
        raise UserError("no condition was given; give one at least.")
    for text, weight in given.items():
        _condition(text)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"the weight of {brief(text)} is {brief(weight)}, not a number.")
        if not math.isfinite(weight):
            raise UserError(f"the weight of {brief(text)} is {weight}; it must be finite.")
    if not any(given.values()):
        raise UserError("all weights are 0, so that no text is nearer than another.")
    return {text: float(weight) for text, weight in given.items()}


def _rounded(score: Any) -> float:
    return round(float(score), 6)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinity are no numbers there."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
