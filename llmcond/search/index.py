"""An index: a folder of texts that can be searched by similarity under any condition.

The folder holds:

- ``index.json``: the model of the vectors, which is a run or a bundled model, and its head.
- ``texts.lance``: the texts with their ids and further columns, and their embeddings e(s) if the
  prompt has an input for the text alone.
- ``views/``: the vectors under the conditions that have been prepared.
- ``guides/``: linear maps of these vectors that were fitted on a few labelled texts.
- ``encoding/``: the features of texts that are being encoded, so that an interruption loses
  nothing. It exists only during that time.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack, get_args, overload

import numpy as np
from filelock import FileLock, Timeout

from llmcond.base.arrays import CALIBRATED, MIN_CALIBRATION, Array, as_list, check_truncate_dim
from llmcond.base.errors import (
    UserError,
    format_count,
    format_list,
    list_legal_values,
    nearest,
    shortened_repr,
)
from llmcond.base.files import is_vacant
from llmcond.base.options import IndexPrecision, check_argument, check_folder, check_run
from llmcond.base.output import log
from llmcond.base.records import read_record, write_record
from llmcond.base.stores import check_not_forked
from llmcond.base.text import (
    Condition,
    as_condition,
    check_text,
    condition_key,
    condition_text,
    distinct_conditions,
    ignored_by,
    ignoring,
    without_ignored,
    wordings,
)
from llmcond.data.guides import LabelledTexts, check_labelled
from llmcond.features.extract import WINDOW, count_missing
from llmcond.features.store import FeatureStore
from llmcond.features.view import ViewInputs
from llmcond.heads.guide import Guides, guide_file, load_guides, save_guide
from llmcond.prompts.template import InputTemplate
from llmcond.runs.embedder import Embedder, fit_ignoring_map
from llmcond.runs.open import extract_inputs
from llmcond.runs.similarity import report_foreign_texts
from llmcond.search.model import SearchModel
from llmcond.search.query import Hits, IndexVersion, PreparedSearch, check_rerank
from llmcond.search.table import (
    VECTOR,
    IndexRows,
    TextTable,
    WriteCounts,
    check_ids,
    vectors_of,
)
from llmcond.search.views import ConditionViews

#: Version of the format of an index.
FORMAT = 2
#: Arguments of ``SearchModel.find`` that an index records.
_FindArgument = Literal["run", "model", "revision", "head", "prompt"]
#: Texts of an index that are read to find what to ignore.
_MAX_READ = 20_000
#: Largest weight of a condition. Sums of scores with larger weights could overflow.
MAX_WEIGHT = 1_000_000

#: A condition, or several with weights.
Weighted = str | Mapping[str, float]


class SearchOptions(TypedDict, total=False):
    """The options of ``Index.search``, which documents their meanings and defaults."""

    where: str | None
    rerank: int | None
    explain: bool
    prepare: bool
    mentions: bool


class Index:
    """A collection of texts on disk that is searched under any condition.

    Create an index with ``build``, or open an existing one with ``open``. Searches compare every
    text, in half precision unless the index stores fewer bits for each number. Several threads may
    search at once, also while texts are added. Another process keeps searching the version that it
    opened until it calls ``refresh``.

    Attributes:
        folder: the folder of the index.
        written: numbers of texts that the last call of ``add`` or ``build`` on this object added,
            replaced and left unchanged.

    Examples:
        >>> import llmcond
        >>> index = llmcond.Index.build(
        ...     "letters",
        ...     ["The parcel never arrived.", "I was charged twice.", "Thank you, it fits well."],
        ...     ids=["a", "b", "c"],
        ...     columns={"year": [2023, 2024, 2024]},
        ... )
        >>> hits = index.search("Where is my order?", "the problem", k=1, where="year < 2024")
        >>> [hit["id"] for hit in hits.rows]
        ['a']
        >>> index.delete(["c"])
        1
        >>> len(llmcond.Index.open("letters"))
        2
    """

    def __init__(
        self, folder: Path, model: SearchModel, precision: IndexPrecision = "float16"
    ) -> None:
        """Open a folder whose index.json has been checked; callers use ``build`` or ``open``."""
        self.folder = folder
        self.written = WriteCounts(0, 0, 0)
        self._model = model
        self._views = ConditionViews(folder / "views", precision)
        self._version = IndexVersion(TextTable(folder), self._views, model)
        self._writer, self._file_lock = threading.Lock(), FileLock(folder / ".lock")

    # -- opening -------------------------------------------------------------------------------

    @classmethod
    def build(  # noqa: PLR0913 - the options of the command
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
        truncate_dim: int | None = None,
        precision: IndexPrecision | None = None,
    ) -> Index:
        """Create an index of texts, or add the texts to an existing index.

        Args:
            folder: folder of the index. It must hold an index, be empty, or not exist.
            texts: n texts.
            ids: n ids; default: digests of the texts. See ``add``.
            columns: n values per column, by column name. They are returned with the hits, and can
                be used in the filter ``where`` of a search.
            conditions: conditions to prepare, as ``prepare`` does.
            run: folder of the run whose model encodes the texts. If ``run``, ``model``, ``head``
                and ``prompt`` are all None, an existing index keeps its model, and a new one
                chooses it as ``llmcond.load_embedder`` does.
            model: name of a bundled model, or ``OWNER/NAME`` of a model on the hub in its newest
                version, instead of a run.
            head: name of a fitted head, or ``none`` for zero-shot embeddings.
            prompt: name of the prompt of zero-shot embeddings.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
            truncate_dim: number of leading dimensions that vectors keep, see
                ``Embedder.matryoshka_dims``. None: all, or those of the existing index.
            precision: number type of the vectors under conditions: ``float16``, ``int8``,
                ``uint8``, ``binary`` or ``ubinary``. In 8 bits or 1 bit they take less space, and
                searches are approximate. ``int8`` and ``uint8`` need 100 texts at first, because
                the range of each dimension is measured on them. None: ``float16``, or that of the
                existing index.

        Returns:
            The open index.

        Raises:
            UserError: if the folder holds something else, or an index with another model, head,
                size or precision; also for the reasons of ``add`` and ``prepare``.
            DiskFullError: if there is not enough space.
        """
        check_folder("folder", folder)
        check_run(run)
        for name, value in (("model", model), ("head", head), ("prompt", prompt)):
            check_argument(name, value, (str, None), "a name")
        check_argument("device", device, (str,), "a device such as 'cpu'")
        rows, conditions = IndexRows.validate(texts, ids, columns), _check_conditions(conditions)
        folder = Path(folder)
        settings = _without_none(run=run, model=model, head=head, prompt=prompt)
        form = _without_none(truncate_dim=truncate_dim, precision=precision)
        if precision not in (None, *get_args(IndexPrecision)):
            legal = list_legal_values(str(precision), get_args(IndexPrecision))
            raise UserError(f"precision is {shortened_repr(precision)}. {legal}")
        index = cls._create(folder, settings, form, device)
        if index is None:
            index = cls._open(folder, device, settings)
            for name, value in form.items():
                if value != getattr(index, name):
                    raise UserError(
                        f"{folder} was built with {name} {getattr(index, name)}, not {value}. "
                        "Leave it out, or build another index: llmcond index TEXTS --out DIR"
                    )
        conditions = index._resolve_conditions(conditions)
        if len(rows):
            index._add(rows, conditions)
        index.prepare(conditions)
        return index

    @classmethod
    def _create(
        cls, folder: Path, settings: Mapping[str, Any], form: Mapping[str, Any], device: str
    ) -> Index | None:
        """Create an index without texts; None if there is one, or another process creates it."""
        path = folder / "index.json"
        before = path.read_bytes() if path.exists() else None
        # An index without any texts may still change its model.
        if before is not None and not ((settings or form) and TextTable(folder).version == 0):
            return None
        if before is None and not is_vacant(folder):
            raise UserError(
                f"{folder} is not an index (it has no index.json). Name another folder; "
                "nothing in this one was changed."
            )
        truncate_dim, precision = form.get("truncate_dim"), form.get("precision", "float16")
        model = SearchModel.find(**settings, device=device, truncate_dim=truncate_dim)
        if truncate_dim is not None:
            dim = model.head.head.dim_out or model.encoder().dim
            check_truncate_dim(truncate_dim, dim)
        arguments: Any = model.find_arguments
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / ".lock").acquire()
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}.") from error
        with lock:
            if (path.read_bytes() if path.exists() else None) != before:
                return None
            if TextTable(folder).version:  # another process has added the first texts
                return None
            _IndexRecord(arguments, model.identity, precision, truncate_dim).write(folder)
            shutil.rmtree(folder / "guides", ignore_errors=True)
        return cls(folder, model, precision)

    @classmethod
    def open(cls, folder: str | Path, *, device: str = "auto") -> Index:
        """Open an existing index.

        Args:
            folder: folder of the index.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

        Returns:
            The index, at its newest version.

        Raises:
            UserError: if the folder holds no index, or its run is missing or has changed.
            LlmcondError: if the index cannot be read.
        """
        check_folder("folder", folder)
        check_argument("device", device, (str,), "a device such as 'cpu'")
        folder = Path(folder)
        if not (folder / "index.json").exists():
            what = "is not an index (it has no index.json)" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {what}. Build one: llmcond index TEXTS --out {folder}")
        return cls._open(folder, device, {})

    @classmethod
    def _open(cls, folder: Path, device: str, settings: Mapping[str, Any]) -> Index:
        record = _IndexRecord.read(folder)
        model_args: dict[Any, Any] = dict.fromkeys(get_args(_FindArgument))
        model_args |= record.made_by
        if "run" in settings or "model" in settings:
            model_args |= {"run": None, "model": None, "revision": None}
        if "head" in settings:
            model_args["prompt"] = None
        source = ", ".join(f"{key} {value}" for key, value in record.made_by.items())
        try:
            model = SearchModel.find(**{**model_args, **settings}, device=device)
        except UserError as error:
            if "head" in settings or "prompt" in settings:
                raise
            advice = f"If the run was moved, name it: llmcond index --out {folder} --run DIR"
            raise UserError(f"{folder} was built with {source}: {error} {advice}") from error
        identity, recorded = model.identity, record.identity
        differences = [name for name in identity if identity[name] != recorded.get(name)]
        if differences:
            raise UserError(
                f"{folder} was built with {source}; the {'given' if settings else 'current'} model "
                f"has another {' and another '.join(differences)}. Name the original model, or "
                "build another index: llmcond index TEXTS --out DIR"
            )
        model = replace(model, truncate_dim=record.truncate_dim)
        if model.find_arguments != record.made_by:  # the run has been moved
            arguments: Any = model.find_arguments
            replace(record, made_by=arguments).write(folder)
        model.guides.update(load_guides(folder / "guides"))
        return cls(folder, model, record.precision)

    def __len__(self) -> int:
        return len(self._version.table)

    def __repr__(self) -> str:
        source = ", ".join(f"{key} {value}" for key, value in self._model.find_arguments.items())
        return f"Index({str(self.folder)!r}, {format_count(len(self), 'text')}, {source})"

    @property
    def embedder(self) -> Embedder:
        """The embedder of the index, loaded at first use.

        Returns:
            An ``Embedder`` that encodes as the index does, with its guides.
        """
        return self._model.embedder

    @property
    def conditions(self) -> list[str]:
        """The conditions that the index holds vectors of.

        Returns:
            The conditions, sorted. The values of a ``Condition`` are part of its text.
        """
        return self._views.conditions()

    @property
    def guides(self) -> Guides:
        """The guides of conditions, see ``guide``.

        Returns:
            A mapping from the condition to its guide, which finds conditions in any case, Unicode
            form and spacing.
        """
        return Guides(self._version.guides)

    @property
    def precision(self) -> IndexPrecision:
        """The number type of the vectors under conditions."""
        return self._views.precision

    @property
    def truncate_dim(self) -> int | None:
        """The number of leading dimensions that vectors keep; None: all."""
        return self._model.truncate_dim

    @property
    def columns(self) -> list[str]:
        """The names of the columns besides ``id`` and ``text``."""
        return self._version.table.columns

    @property
    def encodes_pairs(self) -> bool:
        """Whether each text is encoded together with the condition.

        If it is False, a new condition costs only a small matrix product per text.
        """
        return bool(self._model.joint)

    # -- writing -------------------------------------------------------------------------------

    def add(
        self,
        texts: Sequence[str],
        *,
        ids: Sequence[object] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> WriteCounts:
        """Add texts, and encode them under the conditions that ``prepare`` was called with.

        A text with an existing id replaces the previous text, and keeps its values of columns
        if ``columns`` is None. A text that the index already holds under the same id costs
        nothing.

        Args:
            texts: n texts.
            ids: n ids, texts or whole numbers, which are stored as strings; default: digests of
                the texts.
            columns: n values per column, by column name. The names must be those that the index
                has.

        Returns:
            The numbers of texts that were added, replaced and left unchanged.

        Raises:
            UserError: if a text is empty, an id repeats, the columns differ from those of the
                index, or the first texts of an index in ``int8`` or ``uint8`` are fewer than 100.
            DiskFullError: if there is not enough space. The index is unchanged then, and what has
                been encoded is stored for the next attempt.
        """
        return self._add(IndexRows.validate(texts, ids, columns))

    def _add(self, rows: IndexRows, conditions: Sequence[str] = ()) -> WriteCounts:
        with self._writing():
            conditions = self._update_record(conditions)
            plan = rows.plan_update(self._version.table)
            if self.precision in CALIBRATED and len(rows) < MIN_CALIBRATION and not len(self):
                raise UserError(
                    f"the first texts of an index in {self.precision} give the range of each "
                    f"dimension, and {format_count(len(rows), 'text')} are too few. Add at least "
                    f"{MIN_CALIBRATION} at first, or give the precision float16 (--precision)."
                )
            new_texts = [rows.texts[i] for i in plan.new]
            if new_texts:
                report_foreign_texts(new_texts, self._model.encoder.resolved.checkpoint)
                self._encode(new_texts, self._model.text_only, [""])
                self._encode(new_texts, self._model.joint, conditions)
            if len(plan.to_write):
                plan.write(self._open_store(), self._model.text_inputs)
                self._switch_to_newest()
            self._complete(conditions)
        self.written = plan.written
        log.info(f"{plan.written.summary} -> {self.folder}, {format_count(len(self), 'text')}")
        return plan.written

    def delete(self, ids: Sequence[object]) -> int:
        """Delete texts by their ids. Unknown ids are logged as a warning.

        Args:
            ids: the ids, as texts or whole numbers, which are compared as strings.

        Returns:
            The number of texts that were deleted.

        Raises:
            UserError: if an id is invalid, or the folder cannot be written.
            DiskFullError: if there is not enough space.
        """
        row_ids = list(dict.fromkeys(check_ids(ids)))
        with self._writing():
            table = self._version.table
            unknown = [row_ids[i] for i in np.flatnonzero(table.find(row_ids) < 0)]
            if unknown:
                log.warning(
                    f"of {format_count(len(row_ids), 'id')}, not found: {format_list(unknown, 5)}"
                )
            if len(unknown) < len(row_ids):
                table.delete(row_ids)
                self._switch_to_newest()
        count = len(row_ids) - len(unknown)
        remaining = format_count(len(self), "text")
        log.info(f"deleted {format_count(count, 'text')}; {self.folder} has {remaining} left")
        return count

    def prepare(self, conditions: Sequence[str]) -> None:
        """Compute the vectors of all texts under conditions, as far as they are missing.

        Where each text is encoded together with the condition (``encodes_pairs``), texts that are
        added later are encoded under these conditions too, and texts that other processes added are
        included.

        The values of a ``llmcond.Condition`` are recorded: its text alone then means the condition
        with these values, also in ``search``. A ``Condition`` without values removes recorded
        values. A text that differs from a recorded condition in case, Unicode form or spacing only
        means the recorded one.

        What a ``Condition`` ignores is found in the texts of the index, unless that has been done:
        see ``ignore``.

        Args:
            conditions: the conditions, each a text or a ``Condition``.

        Raises:
            UserError: if a condition is empty, the folder cannot be written, or for the reasons of
                ``ignore``.
            DiskFullError: if there is not enough space. What has been encoded is stored for the
                next attempt.
        """
        to_prepare = self._resolve_conditions(conditions)
        if any(isinstance(c, Condition) for c in to_prepare) or (to_prepare and self.encodes_pairs):
            with self._writing():
                self._update_record(to_prepare)
                self._complete(to_prepare)
        self._fit_missing(to_prepare)
        for condition in to_prepare:
            self._version.view(condition, save=True)

    def ignore(
        self, condition: str, columns: Sequence[str] = (), directions: int | None = None
    ) -> None:
        """Find in the texts of the index what a condition ignores, and store it with the index.

        From then on, searches under the condition ignore it. The texts are not encoded again under
        the condition itself; at most 4,000 of them are encoded under the conditions to ignore, if
        the model encodes each text together with the condition. Texts that are added later do not
        change it; another call does. A guide of the condition is removed.

        Args:
            condition: a ``Condition`` with ``ignore``, or any condition with ``columns``.
            columns: names of columns of the index whose known values are ignored too.
            directions: as in ``llmcond.Embedder.ignoring``.

        Raises:
            UserError: if the index has fewer than 50 distinct texts or vectors of 1 bit, if nothing
                is to be ignored, a column does not exist or has fewer than two values, or the
                folder cannot be written.
            DiskFullError: if there is not enough space.

        Examples:
            >>> import llmcond
            >>> texts = [f"The {part} of the {product} {problem}."
            ...          for part in ("lid", "cable", "handle") for product in ("kettle", "lamp")
            ...          for problem in ("broke", "is missing", "rattles", "is dirty", "fell off",
            ...                          "arrived late", "smells", "got hot", "is dented")]
            >>> index = llmcond.Index.build("returns", texts)
            >>> condition = llmcond.Condition("the problem", ignore=["the product"])
            >>> index.ignore(condition)
            >>> len(index.search("The kettle is dented.", condition, k=3))
            3
        """
        self._check_mappable()
        (condition,) = self._resolve_conditions(condition)
        with self._writing():
            self._update_record([condition])
            self._complete([condition])
            self._fit_ignored(condition, columns, directions)
        self._version.view(condition, save=True)

    def _check_mappable(self) -> None:
        if self._views.is_binary:
            raise UserError(
                "guides and ignored conditions need vectors of more than 1 bit for each number, "
                f"and {self.folder} is in {self.precision}. Build an index in float16 or int8."
            )

    def _fit_missing(self, conditions: Sequence[str]) -> None:
        """Find what conditions ignore, where neither this nor another process has done so."""
        missing = self._read_maps(conditions)
        if missing:
            self._check_mappable()
            with self._writing():
                for condition in self._read_maps(missing):
                    self._fit_ignored(condition)

    def _read_maps(self, conditions: Sequence[str]) -> list[str]:
        """Read the maps that other processes fitted, and return the conditions that lack one."""

        def missing() -> list[str]:
            known = self._model.guides
            return [c for c in conditions if ignored_by(c) and c not in known]

        if missing():
            stored = load_guides(self.folder / "guides")
            for condition in [c for c in missing() if c in stored]:
                self._model.guides[condition] = stored[condition]
                self._set_version(self._version.table)
        return missing()

    def _fit_ignored(
        self, condition: str, columns: Sequence[str] = (), directions: int | None = None
    ) -> None:
        table, model = self._version.table, self._model
        unknown = [name for name in columns if name not in self.columns]
        if unknown:
            raise UserError(
                f"the index has no column {unknown[0]!r}. {nearest(unknown[0], self.columns)} "
                "Store it with the texts first: llmcond index TEXTS --keep COLUMN"
            )
        if not len(table):
            raise UserError(
                f"{self.folder} has no texts yet, in which what to ignore could be found. Add "
                "texts first."
            )
        taken = np.unique(np.linspace(0, len(table) - 1, min(len(table), _MAX_READ)).astype(int))
        rows = table.take(taken, ["text", *columns])
        texts = rows["text"].to_pylist()
        positions = dict(zip(texts, taken.tolist(), strict=True))
        target = without_ignored(condition)
        version = IndexVersion(table, self._views, model)
        version.guides = Guides()  # The map is applied to vectors without a guide.

        def encode(sample: Sequence[str], under: str) -> Array:
            numbers = np.array([positions[text] for text in sample], dtype=np.int64)
            view = version.view(under) if under == target else None
            if view is not None:
                return view.rows(numbers)
            self._encode(sample, model.joint, wordings(under))
            lookup = self._open_store().lookup if model.joint else model.encode_inputs
            stored = vectors_of(table.take(numbers, [VECTOR] if model.text_only else ["id"]))
            return model.rebase(model.vectors(sample, stored, under, lookup), under, target)

        known = {name: rows[name].to_pylist() for name in columns}
        guide = fit_ignoring_map(encode, texts, condition, known, directions, model.head.head)
        save_guide(guide, condition, self.folder / "guides")
        model.guides[condition] = guide
        self._set_version(table)

    def _set_version(self, table: TextTable) -> None:
        self._version = IndexVersion(table, self._views, self._model)

    def guide(self, texts: Iterable[str], labels: Iterable[Any], condition: str) -> None:
        """Fit a guide: from now on, searches under a condition follow a few labelled texts.

        The guide is a linear map of the vectors under the condition that brings texts with the same
        label together, see ``llmcond.Embedder.guided``. No text of the index is encoded again. The
        guide is saved, and replaces a previous one of the same condition. Other open ``Index``
        objects of the folder use it once they are opened again.

        Args:
            texts: m texts, which need not be in the index; 8 to 64 often help.
            labels: m labels, of which at least two differ.
            condition: the condition. A text alone has the values that the index records for it.

        Raises:
            UserError: if a text is empty or has two labels, if there are fewer than two labels, or
                if the folder cannot be written.
            DiskFullError: if there is not enough space.
        """
        self.add_guide(check_labelled(as_condition(condition), texts, labels))

    def add_guide(self, labelled: LabelledTexts) -> None:
        """Fit a guide on labelled texts and save it, as ``guide`` does.

        Args:
            labelled: the texts with their labels and the condition.

        Raises:
            UserError: for the reasons of ``guide``.
            DiskFullError: if there is not enough space.
        """
        self._check_mappable()
        (condition,) = self._resolve_conditions(labelled.condition or "")
        self._fit_missing([condition])
        guide = self._model.fit_guide(replace(labelled, condition=condition))
        with self._writing():
            self._update_record([condition], prepare=False)
            save_guide(guide, condition, self.folder / "guides")
            self._model.guides[condition] = guide
            self._set_version(self._version.table)

    def unguide(self, condition: str) -> None:
        """Remove the guide of a condition, if it has one, or a column that it ignores.

        Args:
            condition: the condition. A text alone has the values that the index records for it.

        Raises:
            UserError: if the condition is empty, or the folder cannot be written.
        """
        (condition,) = self._resolve_conditions(condition)
        with self._writing():
            guide = self._model.guides.pop(condition, None)
            if guide is not None and guide.labels and guide.before is not None:
                save_guide(guide.before, condition, self.folder / "guides")
                self._model.guides[condition] = guide.before
            else:
                guide_file(self.folder / "guides", condition).unlink(missing_ok=True)
            self._set_version(self._version.table)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the write lock, and start from the newest version of the texts."""
        check_not_forked()
        with self._writer:
            try:
                self._file_lock.acquire(timeout=0)
            except Timeout:
                log.info(f"another process is writing to {self.folder}; waiting for it to finish")
                self._file_lock.acquire()
            except OSError as error:
                raise UserError(f"{self.folder} cannot be written: {error.strerror}.") from error
            try:
                self._switch_to_newest()
                yield
                shutil.rmtree(self.folder / "encoding", ignore_errors=True)
            finally:
                self._file_lock.release()

    def _switch_to_newest(self) -> None:
        """Switch to the newest version."""
        newest = TextTable(self.folder)
        if newest.version != self._version.table.version:
            self._set_version(newest)

    def refresh(self) -> None:
        """Switch to the newest version that other processes have written.

        This is cheap if there is no newer version. Where each text is encoded together with the
        condition, the index keeps its version until the added texts have been encoded under the
        conditions of ``prepare``.

        Raises:
            LlmcondError: if the index cannot be read.
        """
        # A thread of this process that writes switches to the newest version itself.
        if self._version.table.is_newest or not self._writer.acquire(blocking=False):
            return
        try:
            newest = IndexVersion(TextTable(self.folder), self._views, self._model)
            if not any(
                len(newest.find_missing(condition)) for condition in self._update_record(())
            ):
                self._version = newest
        finally:
            self._writer.release()

    def _update_record(self, conditions: Sequence[str], *, prepare: bool = True) -> list[str]:
        """Record conditions, and return those that added texts are encoded under.

        Args:
            conditions: the conditions. The values of each ``Condition`` are recorded; one without
                values removes recorded values. For conditions with several wordings, these are
                recorded.
            prepare: whether added texts are encoded under these conditions, if the model encodes
                each text together with the condition.
        """
        record = _IndexRecord.read(self.folder)
        new_values = {c.text: [*c.values] for c in conditions if isinstance(c, Condition)}
        replaced = set(map(condition_key, new_values))
        values = {t: v for t, v in record.values.items() if condition_key(t) not in replaced}
        values |= {text: v for text, v in new_values.items() if v}
        prepared = list(record.conditions)
        if prepare and self.encodes_pairs:
            prepared = list(dict.fromkeys([*prepared, *_wordings_of(conditions)]))
        updated = replace(record, conditions=prepared, values=values)
        if updated != record:
            updated.write(self.folder)
        return prepared if self.encodes_pairs else []

    def _resolve_conditions(self, conditions: str | Iterable[str]) -> list[str]:
        """Return distinct conditions as the index knows them, with recorded values for texts alone.

        A text that differs from a recorded condition only in case, Unicode form or spacing is
        replaced by the recorded one, whose vectors and guide it shares.
        """
        record = _IndexRecord.read(self.folder)
        values = {condition_key(text): (text, v) for text, v in record.values.items()}
        known_texts = [*record.conditions, *filter(None, self._model.guides)]
        known = {condition_key(text): text for text in known_texts}

        def resolve(condition: str) -> str:
            if isinstance(condition, Condition) and not (condition.ignore or "|" in condition):
                return condition
            key, target = condition_key(condition_text(condition)), without_ignored(condition)
            if getattr(condition, "values", ()) or key not in values:
                target = known.get(condition_key(target), target)
            else:
                target = Condition(*values[key])
            complete = ignoring(target, ignored_by(condition))
            return known.get(condition_key(complete), complete)

        return distinct_conditions(map(resolve, _check_conditions(conditions)))

    def _open_store(self) -> FeatureStore:
        """Return the store for features of texts that are being encoded."""
        run = self._model.run
        return FeatureStore(self.folder / "encoding", run.identity, run.manifest["store_dtype"])

    def _encode(
        self, texts: Sequence[str], parts: Sequence[InputTemplate], conditions: Sequence[str]
    ) -> None:
        """Encode texts under conditions, as far as their features are missing."""
        if not (parts and conditions):
            return
        store, inputs = self._open_store(), ViewInputs(_Pairs(texts, conditions), parts)
        missing = count_missing(store, inputs, WINDOW)
        if missing.n_missing:
            name = f"texts under {format_list(conditions, 3)}" if any(conditions) else "texts"
            extract_inputs(store, self._model.encoder, name, inputs, missing)

    def _complete(self, conditions: Sequence[str]) -> None:
        """Compute the vectors of all texts under conditions, if each text is encoded with them."""
        version = self._version
        # Conditions by the positions of the texts that lack vectors under them, as bytes.
        alike: dict[bytes, list[str]] = {}
        for condition in _wordings_of(conditions) if self.encodes_pairs else ():
            missing = version.find_missing(condition)
            if len(missing):
                alike.setdefault(missing.tobytes(), []).append(condition)
        for positions, group in alike.items():
            # Conditions that lack the same texts are encoded together, so that inputs that are
            # equal under several of them are encoded once.
            rows = version.table.take(np.frombuffer(positions, dtype=np.int64), ["text"])
            self._encode(rows["text"].to_pylist(), self._model.joint, group)
        lookup = self._open_store().lookup if alike else None
        for condition in [name for group in alike.values() for name in group]:
            version.view(condition, lookup)

    # -- searching -----------------------------------------------------------------------------

    @overload
    def search(  # type: ignore[overload-overlap]  # a string is also a sequence of strings
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
        mentions: bool = False,
    ) -> Hits | list[Hits]:
        """Find the k texts nearest to a query under a condition.

        Args:
            query: a text, or several texts.
            condition: a condition, or several with weights: scores are then weighted sums of
                cosines. A negative weight moves texts down that are similar to the query under the
                condition, as in ``{"the problem": 1, "the product": -0.5}``. A text alone has the
                values that the index records for it (see ``prepare``); a ``llmcond.Condition`` has
                its own values.
            k: maximal number of hits; default: 10.
            where: a filter on the columns in a small subset of SQL, such as
                ``kind = 'news' AND year > 2020``; see docs/search.md.
            rerank: where the model encodes each text together with the condition, encode only this
                many texts, those nearest without the condition. The result is then not exact.
                Default: all texts.
            explain: add to each hit its score under each condition, and its score and rank without
                a condition.
            prepare: whether to encode texts under a condition that the index has no vectors of.
            mentions: add to each hit, as ``mentions``, the scores of ``Embedder.mentions`` by
                condition: whether the hit says anything about it.

        Returns:
            The hits; for several queries, a list with the hits of each query.

        Raises:
            UserError: if the query or a condition is empty, ``k`` is below 1, the filter is
                invalid, ``rerank`` does not apply to the model, or texts would have to be encoded
                and ``prepare`` is False.
        """
        queries = [query] if isinstance(query, str) else as_list(query, "the query")
        options = {"where": where, "rerank": rerank, "explain": explain, "prepare": prepare}
        hits = self.plan_search(queries, condition, k, **options)()  # type: ignore[arg-type]
        if mentions:
            hits = [self._add_mentions(of_query) for of_query in hits]
        return hits[0] if isinstance(query, str) else hits

    def _add_mentions(self, hits: Hits) -> Hits:
        texts = [row["text"] for row in hits.rows]
        scores = {c: self.embedder.mentions(texts, c).tolist() for c in hits.conditions}
        rows = [
            {**row, "mentions": {c: round(values[i], 4) for c, values in scores.items()}}
            for i, row in enumerate(hits.rows)
        ]
        return replace(hits, rows=rows)

    def plan_search(
        self,
        queries: Sequence[str],
        condition: Weighted,
        k: int = 10,
        *,
        where: str | None = None,
        rerank: int | None = None,
        explain: bool = False,
        prepare: bool = True,
        seconds: float = math.inf,
    ) -> Callable[[], list[Hits]]:
        """Check a search and evaluate its filter, without encoding anything yet.

        A server calls this on another thread than the model's.

        Args:
            queries: the texts to search for.
            condition: as in ``search``.
            k: as in ``search``.
            where: as in ``search``.
            rerank: as in ``search``.
            explain: as in ``search``.
            prepare: as in ``search``.
            seconds: time limit for the filter; default: none.

        Returns:
            A function that encodes the queries, compares them with the texts, and returns the hits
            of each query.

        Raises:
            UserError: for the reasons of ``search``, or if the filter takes longer than
                ``seconds``.
        """
        for text in queries:
            check_text(text, "the query")
        raw_weights = _check_weights(condition)
        conditions = self._resolve_conditions([*raw_weights])
        if len(conditions) < len(raw_weights):
            raise UserError(
                f"of the conditions {format_list([*raw_weights], 5)}, two are the same up to case "
                "and spacing. Give each condition once, with one weight."
            )
        weights = dict(zip(conditions, raw_weights.values(), strict=True))
        check_argument("k", k, (Integral,), "a whole number")
        if k < 1:
            raise UserError(f"k is {k}; it must be at least 1.")
        check_argument("where", where, (str, None), "a filter as a text")
        check_argument("rerank", rerank, (Integral, None), "a whole number")
        if prepare and rerank is None and self.encodes_pairs:
            self._encode_missing(_wordings_of(conditions))
        (self._fit_missing if prepare else self._read_maps)(conditions)
        version = self._version
        mask = None if where is None else version.table.match_filter(where, seconds)
        n = len(version.table) if mask is None else int(mask.sum())
        if n < k:
            origin = "in the index" if mask is None else "that match the filter"
            log.info(
                f"only {format_count(n, 'text')} {origin}: fewer than the {k:,} hits requested"
            )
        if n and rerank is not None:
            check_rerank(rerank, min(k, n), version.model)
        search = PreparedSearch(version, weights, mask, n, min(k, n), explain, rerank)
        return partial(search, queries)

    def _encode_missing(self, conditions: Sequence[str]) -> None:
        """Encode texts under conditions that a search needs, and log how many."""
        counts = {condition: len(self._version.find_missing(condition)) for condition in conditions}
        missing = {condition: count for condition, count in counts.items() if count}
        for condition, count in missing.items():
            log.info(
                "this model encodes each text together with the condition: "
                f"encoding {format_count(count, 'text')} under {condition!r} and storing the "
                "vectors"
            )
        if missing:
            with self._writing():
                self._complete(list(missing))


@dataclass(frozen=True)
class _IndexRecord:
    """The contents of index.json."""

    made_by: Mapping[_FindArgument, str]
    identity: Mapping[str, Any]
    precision: IndexPrecision
    truncate_dim: int | None = None
    conditions: Sequence[str] = ()
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record of a folder."""
        return read_record(folder / "index.json", cls, "Build another index.", version=FORMAT)

    def write(self, folder: Path) -> None:
        """Write the record into a folder."""
        write_record(folder / "index.json", self)


class _Pairs(Sequence[tuple[str, str]]):
    """Every pair of a text and a condition, text by text; each pair is created on access."""

    def __init__(self, texts: Sequence[str], conditions: Sequence[str]) -> None:
        self._texts, self._conditions = texts, conditions

    def __len__(self) -> int:
        return len(self._texts) * len(self._conditions)

    def __getitem__(self, index: Any) -> Any:
        text, condition = divmod(index, len(self._conditions))
        return self._texts[text], self._conditions[condition]


def _wordings_of(conditions: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for condition in conditions for text in wordings(condition)))


def _without_none(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _check_conditions(conditions: str | Iterable[str]) -> list[str]:
    listed = [conditions] if isinstance(conditions, str) else as_list(conditions, "conditions")
    return list(map(as_condition, listed))


def _check_weights(condition: Weighted) -> dict[str, float]:
    weights = {condition: 1.0} if isinstance(condition, str) else condition
    if not isinstance(weights, Mapping):
        raise UserError(
            f"the condition is {shortened_repr(condition)}; expected a text, or a dictionary from "
            "conditions to weights."
        )
    if not weights:
        raise UserError("no condition was given; give at least one.")
    for text, weight in weights.items():
        as_condition(text)
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise UserError(
                f"the weight of {shortened_repr(text)} is {shortened_repr(weight)}, not a number."
            )
        if not abs(weight) <= MAX_WEIGHT:  # `not <=` also rejects NaN
            raise UserError(
                f"the weight of {shortened_repr(text)} is {shortened_repr(weight)}; it must be "
                "between "
                f"-{MAX_WEIGHT:,} and {MAX_WEIGHT:,}."
            )
    if not any(weights.values()):
        raise UserError("all weights are 0, so all texts get the same score. Give another weight.")
    return {text: float(weight) for text, weight in weights.items()}
