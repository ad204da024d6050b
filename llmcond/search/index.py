"""An index: a collection of texts in a folder, searched by their similarity under any condition.

``index.json`` says what makes the vectors: a run, or a bundled model, and its head. ``texts.lance``
holds the texts with their ids, other columns, and e(s) where the prompt gives it; ``views/`` the
vectors under conditions that were asked for; ``guides/`` what a few labelled texts make of these.
``encoding/`` is there while texts are encoded, so that what was encoded is not lost when that is
interrupted.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, Unpack, overload

import numpy as np
from filelock import FileLock, Timeout

from llmcond.arrays import as_list
from llmcond.conditions import Condition
from llmcond.data.guides import LabelledTexts, check_labelled
from llmcond.errors import UserError, brief, listed, plural
from llmcond.evaluation.condition_checks import (
    MOST_TEXTS,
    ConditionCheck,
    find_calibration,
    sample_texts,
)
from llmcond.features.extract import COUNTED_FIRST, WINDOW
from llmcond.features.missing import count_missing
from llmcond.features.store import FeatureStore
from llmcond.features.view import ViewInputs
from llmcond.files import check_format, read_json, write_json
from llmcond.heads.guide import Guide, guide_file, load_guides, save_guide
from llmcond.log import log
from llmcond.prompts.template import Part
from llmcond.records import RECORD, check_record
from llmcond.runs.embedder import Embedder
from llmcond.runs.extraction import extract_inputs
from llmcond.search.hits import Hits
from llmcond.search.model import SearchModel
from llmcond.search.rows import Rows, Written, check_text
from llmcond.search.searching import Searched
from llmcond.search.table import Table
from llmcond.search.version import Version
from llmcond.search.views import Views

FORMAT = 1
#: Weights of conditions; sums of larger ones could overflow.
MAX_WEIGHT = 1_000_000

#: A condition, or several with weights.
Weighted = str | Mapping[str, float]


class SearchOptions(TypedDict, total=False):
    """The options of :meth:`Index.search`, which has their meanings and defaults."""

    where: str | None
    rerank: int | None
    explain: bool
    prepare: bool


class Index:
    """A collection of texts, searched under any condition; make one with :meth:`build`.

    Searches are exact: every text is compared. Several threads may search at once, also while texts
    are added; other processes go on with the version that they opened, until they :meth:`refresh`.

    Attributes:
        folder: where it is.
        written: what became of the texts that were added last by this object.
    """

    def __init__(self, folder: Path, model: SearchModel) -> None:
        """Open a folder whose index.json was checked; use :meth:`build` or :meth:`open`."""
        self.folder = folder
        self.written = Written(0, 0, 0)
        self._model = model
        self._views = Views(folder / "views")
        self._version = Version(Table(folder), self._views, model)
        self._writer, self._file_lock = threading.Lock(), FileLock(folder / ".lock")

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
        rows, conditions = Rows.checked(texts, ids, columns), _checked(conditions)
        folder = Path(folder)
        given: dict[str, Any] = {"run": run, "model": model, "head": head, "prompt": prompt}
        given = {name: value for name, value in given.items() if value is not None}
        made = (folder / "index.json").exists()
        if made and not (given and Table(folder).version == 0):
            index = cls._open(folder, device, given)
        else:
            if not made and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
                raise UserError(
                    f"{folder} is no index (it has no index.json). Name another folder; nothing in "
                    "it was touched."
                )
            found = SearchModel.find(**given, device=device)
            _record(folder, found)  # of one that nothing was written into, another
            shutil.rmtree(folder / "guides", ignore_errors=True)
            index = cls(folder, found)
        conditions = index._with_recorded_values(conditions)
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
        check_record(record, _Record, str(folder / "index.json"), "Make another index.")
        made_by: dict[str, Any] = dict.fromkeys(("run", "model", "head", "prompt"))
        made_by |= record["made_by"]
        if "run" in given or "model" in given:
            made_by |= {"run": None, "model": None}
        if "head" in given:
            made_by["prompt"] = None
        told = ", ".join(f"{key} {value}" for key, value in record["made_by"].items())
        try:
            model = SearchModel.find(**{**made_by, **given}, device=device)
        except UserError as error:
            if "head" in given or "prompt" in given:
                raise
            moved = f"If it was moved, say where: llmcond index --out {folder} --run DIR"
            raise UserError(f"{folder} was made with {told}: {error} {moved}") from error
        differences = model.differences(record["identity"])
        if differences:
            raise UserError(
                f"{folder} was made with {told}; what is {'named' if given else 'there'} now has "
                f"another {' and another '.join(differences)}. Name what it was made with, or make "
                "another index: llmcond index TEXTS --out DIR"
            )
        if model.made_by != record["made_by"]:  # the run was moved
            _record(folder, model, record["conditions"], record.get("values"))
        model.guides.update(load_guides(folder / "guides"))
        return cls(folder, model)

    def __len__(self) -> int:
        return len(self._version.table)

    def __repr__(self) -> str:
        made = ", ".join(f"{key} {value}" for key, value in self._model.made_by.items())
        return f"Index({str(self.folder)!r}, {plural(len(self), 'text')}, {made})"

    @property
    def embedder(self) -> Embedder:
        """Return what it encodes by, loaded when it is first needed."""
        return self._model.embedder

    @property
    def conditions(self) -> list[str]:
        """Return the conditions that it holds vectors for; values are a part of their texts."""
        return self._views.conditions()

    @property
    def guides(self) -> dict[str, Guide]:
        """Return the guides of conditions; see :meth:`guide`."""
        return dict(self._version.guides)

    @property
    def columns(self) -> list[str]:
        """Return the names of its columns besides ``id`` and ``text``."""
        return self._version.table.columns

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
        """Add texts, and encode them under the conditions that :meth:`prepare` was called with.

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
        with self._writing():
            self._record_values(conditions)
            conditions = self._remembered(conditions)
            plan = rows.against(self._version.table)
            if plan.n_new:
                self._encode(plan.new_texts, self._model.sources.alone, [""])
                self._encode(plan.new_texts, self._model.sources.joint, conditions)
            if len(plan):
                plan.write(self._store(), self._model.sources.stored)
                self._adopt()
            self._complete(conditions)
        self.written = plan.written
        log.info(f"{plan.written.told} -> {self.folder}, {plural(len(self), 'text')}")
        return plan.written

    def delete(self, ids: Sequence[object]) -> int:
        """Delete texts by their ids, and return how many of these there were."""
        named = list(dict.fromkeys(map(str, ids)))
        with self._writing():
            table = self._version.table
            absent = [named[i] for i in np.flatnonzero(table.find(named) < 0)]
            if absent:
                log.warning(f"not there, of {plural(len(named), 'id')}: {listed(absent, 5)}")
            if len(absent) < len(named):
                table.delete(named)
                self._adopt()
        count = len(named) - len(absent)
        left = plural(len(self), "text")
        log.info(f"{plural(count, 'text')} deleted; {self.folder} has {left} left")
        return count

    def prepare(self, conditions: Sequence[str]) -> None:
        """Make the vectors of all texts under conditions, where they are not there yet.

        Where each text is encoded together with the condition (:attr:`encodes_pairs`), texts that
        are added later are encoded under these as well, and what others wrote is taken up.

        Values of a :class:`llmcond.Condition` are recorded: from now on its text alone, here and in
        :meth:`search`, means the condition with these values. Without values it means the text
        alone again.

        Raises:
            UserError: an empty condition, or a folder that cannot be written.
            DiskFullError: no room; what was encoded is kept for the next time.
        """
        wanted = list(dict.fromkeys(self._with_recorded_values(_checked(conditions))))
        if any(isinstance(one, Condition) for one in wanted) or (wanted and self.encodes_pairs):
            with self._writing():
                self._record_values(wanted)
                self._remembered(wanted)
                self._complete(wanted)
        for condition in wanted:
            self._version.view(condition)

    def guide(self, texts: Iterable[str], labels: Iterable[Any], condition: str) -> None:
        """Let searches under a condition follow a few labelled texts, from now on.

        A linear map of the vectors under the condition brings texts of one label together; see
        :meth:`llmcond.Embedder.guided`. No text of the index is encoded again. The map is kept, in
        the place of a former one; an index that is open elsewhere has it when it is opened again.

        Args:
            texts: m texts, which need not be in the index; 8 to 64 often help.
            labels: m labels, two different ones at least.
            condition: a text alone has the values that the index records for it.

        Raises:
            UserError: a text that is empty or has two labels, fewer than two labels, or a folder
                that cannot be written.
            DiskFullError: no room.
        """
        self.follow(check_labelled(condition, as_list(texts), as_list(labels)))

    def follow(self, labelled: LabelledTexts) -> None:
        """Let searches follow labelled texts; see :meth:`guide`."""
        given = check_text(labelled.condition or "", "the condition")
        (condition,) = self._with_recorded_values([given])
        guide = self._model.fit_guide(replace(labelled, condition=condition))
        with self._writing():
            self._record_values([condition])
            save_guide(guide, condition, self.folder / "guides")
            self._model.guides[condition] = guide
            self._version = Version(self._version.table, self._views, self._model)

    def unguide(self, condition: str) -> None:
        """Remove the guide of a condition, if it has one."""
        (condition,) = self._with_recorded_values(_checked([condition]))
        with self._writing():
            guide_file(self.folder / "guides", condition).unlink(missing_ok=True)
            self._model.guides.pop(condition, None)
            self._version = Version(self._version.table, self._views, self._model)

    @contextmanager
    def _writing(self) -> Iterator[None]:
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
                self._adopt()
                yield
                shutil.rmtree(self.folder / "encoding", ignore_errors=True)
            finally:
                self._file_lock.release()

    def _adopt(self) -> None:
        """Go on with the newest version."""
        newest = Table(self.folder)
        if newest.version != self._version.table.version:
            self._version = Version(newest, self._views, self._model)

    def refresh(self) -> None:
        """Go on with what other processes have written since it was opened; cheap if that is none.

        Where each text is encoded together with the condition, it goes on as it was until the
        texts that were added are encoded under the conditions of :meth:`prepare`.
        """
        # A writer of this process has the newest version anyway.
        if self._version.table.is_newest or not self._writer.acquire(blocking=False):
            return
        try:
            newest = Version(Table(self.folder), self._views, self._model)
            if not any(len(newest.absent(condition)) for condition in self._remembered(())):
                self._version = newest
        finally:
            self._writer.release()

    def _remembered(self, conditions: Sequence[str]) -> list[str]:
        """Remember conditions that texts are encoded under when they are added; return all."""
        if not self.encodes_pairs:
            return []
        record = read_json(self.folder / "index.json")
        known = list(record["conditions"])
        every = list(dict.fromkeys([*known, *_checked(conditions)]))
        if every != known:
            write_json(self.folder / "index.json", {**record, "conditions": every})
        return every

    def _record_values(self, conditions: Sequence[str]) -> None:
        """Record the values of conditions that have been named with values, or with none."""
        named = {one.text: [*one.values] for one in conditions if isinstance(one, Condition)}
        record = read_json(self.folder / "index.json")
        values = {t: v for t, v in {**record.get("values", {}), **named}.items() if v}
        if values != record.get("values", {}):
            write_json(self.folder / "index.json", {**record, "values": values})

    def _with_recorded_values(self, conditions: Sequence[str]) -> list[str]:
        """Return conditions; those given as a text alone with the values recorded for the text."""
        recorded = read_json(self.folder / "index.json").get("values", {})
        return [
            Condition(one, recorded[one])
            if one in recorded and not isinstance(one, Condition)
            else one
            for one in conditions
        ]

    def _store(self) -> FeatureStore:
        """Return where vectors are until the texts that are encoded are all there."""
        run = self._model.run
        return FeatureStore(self.folder / "encoding", run.identity, run.manifest["store_dtype"])

    def _encode(
        self, texts: Sequence[str], parts: Sequence[Part], conditions: Sequence[str]
    ) -> None:
        """Encode texts under conditions, as far as that is not done yet."""
        if not (parts and conditions):
            return
        store, inputs = self._store(), ViewInputs(_Pairs(texts, conditions), parts)
        few = len(inputs) <= COUNTED_FIRST
        missing = count_missing(store, inputs, WINDOW) if few else None
        if missing is None or missing.n_missing:
            name = f"texts under {listed(conditions, 3)}" if any(conditions) else "texts"
            extract_inputs(store, self._model.encoder, name, inputs, missing)

    def _complete(self, conditions: Sequence[str]) -> None:
        """Make the vectors of all texts under conditions that each is encoded together with."""
        version = self._version
        alike: dict[bytes, list[str]] = {}
        for condition in conditions if self.encodes_pairs else ():
            absent = version.absent(condition)
            if len(absent):
                alike.setdefault(absent.tobytes(), []).append(condition)
        for places, own in alike.items():
            # In one go: what is the same of a text under several conditions is encoded once.
            rows = version.table.take(np.frombuffer(places, dtype=np.int64), ["text"])
            self._encode(rows["text"].to_pylist(), self._model.sources.joint, own)
        lookup = self._store().lookup if alike else None
        for condition in [one for own in alike.values() for one in own]:
            version.view(condition, lookup)

    # -- checking ------------------------------------------------------------------------------

    def check(self, condition: str) -> ConditionCheck | None:
        """Say whether a condition is expected to work on the texts, by a sample of 200 of them.

        None: there is no calibration that tells conditions apart, or there are no vectors of the
        texts under the condition; :meth:`prepare` or a search makes them.
        """
        calibration = find_calibration(self._model.run.folder)
        if calibration is None or not calibration.tells_apart:
            return None
        (condition,) = self._with_recorded_values([check_text(condition, "the condition")])
        view, table = self._version.view(condition), self._version.table
        if view is None or not len(table):
            return None
        # More than are compared, as texts may repeat.
        rows = np.sort(np.random.default_rng(0).permutation(len(table))[: 2 * MOST_TEXTS])
        texts = table.take(rows, ["text"])["text"].to_pylist()
        return ConditionCheck.of(condition, view.rows(rows[sample_texts(texts)]), calibration)

    # -- searching -----------------------------------------------------------------------------

    @overload
    def search(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, query: str, condition: Weighted, k: int = 10, **options: Unpack[SearchOptions]
    ) -> Hits: ...

    @overload
    def search(
        self,
        query: Sequence[str],
        condition: Weighted,
        k: int = 10,
        **options: Unpack[SearchOptions],
    ) -> list[Hits]: ...

    def search(
        self,
        query: Any,
        condition: Weighted,
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
                A text alone has the values that the index records for it (:meth:`prepare`), a
                :class:`llmcond.Condition` its own.
            k: hits; all texts if there are fewer.
            where: a filter on the columns in a small part of SQL, such as
                ``kind = 'news' AND year > 2020``; see docs/search.md.
            rerank: where the model encodes each text together with the condition, encode only so
                many texts, those nearest without a condition; then the result is not exact.
            explain: add each hit's score under each condition and under none, and its rank there.
            prepare: whether texts are encoded under a condition that the index holds no vectors of.

        Raises:
            UserError: an empty query or condition, k below 1, a filter that cannot be applied,
                ``rerank`` where there is nothing to rank by without a condition, or texts that
                would have to be encoded and ``prepare`` is False.
        """
        queries = [query] if isinstance(query, str) else list(query)
        options: SearchOptions = {
            "where": where, "rerank": rerank, "explain": explain, "prepare": prepare
        }  # fmt: skip
        found = self.plan_search(queries, condition, k, **options)()
        return found[0] if isinstance(query, str) else found

    def plan_search(
        self,
        queries: Sequence[str],
        condition: Weighted,
        k: int = 10,
        *,
        seconds: float = math.inf,
        **options: Unpack[SearchOptions],
    ) -> Callable[[], list[Hits]]:
        """Check a search and evaluate its filter; return a function that encodes and compares.

        Arguments and errors as of :meth:`search`; a filter that takes longer than ``seconds`` is
        refused. A server calls this on another thread than the model's.
        """
        unknown = options.keys() - SearchOptions.__annotations__
        if unknown:
            raise TypeError(f"search takes no argument {min(unknown)!r}")
        for text in queries:
            check_text(text, "the query")
        given = _weights(condition)
        weights = dict(zip(self._with_recorded_values([*given]), given.values(), strict=True))
        if k < 1:
            raise UserError(f"k is {k}; it must be at least 1.")
        rerank = options.get("rerank")
        if options.get("prepare", True) and rerank is None and self.encodes_pairs:
            self._make_ready(list(weights))
        where, explain = options.get("where"), options.get("explain", False)
        asked = Searched.of(self._version, weights, k, where, explain, seconds)

        def search() -> list[Hits]:
            if not asked.k:
                return [Hits(text, weights, [], asked.n) for text in queries]
            return asked.exact(queries) if rerank is None else asked.reranked(queries, rerank)

        return search

    def _make_ready(self, conditions: Sequence[str]) -> None:
        """Encode texts under conditions that a search needs, and say so."""
        counts = {condition: len(self._version.absent(condition)) for condition in conditions}
        absent = {condition: count for condition, count in counts.items() if count}
        if not absent:
            return
        for condition, count in absent.items():
            log.info(
                "this model encodes each text together with the condition: "
                f"{plural(count, 'text')} under {condition!r}, which is kept"
            )
        with self._writing():
            self._complete(list(absent))


@dataclass(frozen=True)
class _Record:
    """What index.json holds."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    made_by: Mapping[Literal["run", "model", "head", "prompt"], str]
    identity: Mapping[str, Any]
    conditions: Sequence[str]
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)


def _record(
    folder: Path,
    model: SearchModel,
    conditions: Sequence[str] = (),
    values: Mapping[str, Sequence[str]] | None = None,
) -> None:
    record = {"made_by": model.made_by, "identity": model.identity, "conditions": [*conditions]}
    write_json(folder / "index.json", {"format": FORMAT, **record, "values": dict(values or {})})


class _Pairs(Sequence[tuple[str, str]]):
    """Each text under each condition, those of a text side by side; made when asked for."""

    def __init__(self, texts: Sequence[str], conditions: Sequence[str]) -> None:
        self._texts, self._conditions = texts, conditions

    def __len__(self) -> int:
        return len(self._texts) * len(self._conditions)

    def __getitem__(self, place: Any) -> Any:
        text, condition = divmod(place, len(self._conditions))
        return self._texts[text], self._conditions[condition]


def _checked(conditions: Sequence[str]) -> list[str]:
    return [check_text(one, "the condition") for one in conditions]


def _weights(condition: Weighted) -> dict[str, float]:
    given = {condition: 1.0} if isinstance(condition, str) else dict(condition)
    if not given:
        raise UserError("no condition was given; give one at least.")
    for text, weight in given.items():
        check_text(text, "the condition")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"the weight of {brief(text)} is {brief(weight)}, not a number.")
        if not abs(weight) <= MAX_WEIGHT:  # neither is NaN
            raise UserError(
                f"the weight of {brief(text)} is {brief(weight)}; it must be between "
                f"-{MAX_WEIGHT:,} and {MAX_WEIGHT:,}."
            )
    if not any(given.values()):
        raise UserError("all weights are 0, so that no text is nearer than another.")
    return {text: float(weight) for text, weight in given.items()}
