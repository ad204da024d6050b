"""Embeddings of texts that do not fit in memory, written unit by unit: Parquet files or Lance.

A unit is there completely or not at all, in the order of the source. What a killed call left of
others is removed by the next one.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from pyarrow import fs

from llmcond.errors import LlmcondError, UserError, raise_disk_error
from llmcond.files import check_room, replacing, write_json
from llmcond.lance_io import PreemptedError, Target, clean, newest
from llmcond.object_stores import failure, is_remote, lance_options, open_filesystem

#: What made the rows, beside them.
RECORD = "_llmcond.json"
VECTOR = "embedding"
_LOCK = "_llmcond.lock"
#: Key of a Parquet file's metadata: which rows of the source it has.
_UNIT = b"llmcond.rows"
_FILE = re.compile(r"part-\d{6}\.parquet")
#: What a kill leaves of a file that was being written.
_LEFT = re.compile(rf"\.({_FILE.pattern}|{re.escape(RECORD)})\.[0-9a-f]{{8}}")
#: Files that are opened at a time: an object store answers late, and many at once.
_AT_ONCE = 8
#: Fragments that are committed together, and how long one waits for others.
_COMMIT_FRAGMENTS, _COMMIT_SECONDS = 16, 10
#: How many commits old versions stay.
_TIDY_COMMITS = 64


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that are embedded and written together.

    Attributes:
        number: in the order of the source, from 0.
        part: of the source.
        start, stop: which rows of that part.
        first: rows of the whole source before it.
    """

    number: int
    part: str
    start: int
    stop: int
    first: int

    @property
    def rows(self) -> int:
        """Return how many there are."""
        return self.stop - self.start


class Output(ABC):
    """Where units are written. Make one with :func:`open_output`.

    Attributes:
        name: as the user gave it.
        uri: as any process finds it, a path from the root on this machine.
        dim: of the embeddings that :meth:`done` found, 0 if there are none.
    """

    dim = 0

    def __init__(self, name: str, patient: bool) -> None:
        self.name = name
        self._remote = is_remote(name)
        self._filesystem, self._root = open_filesystem(name, patient=patient)
        # Also since Lance sees the name of a storage service in a relative one with a colon.
        self.uri = name if self._remote else self._root

    @property
    def _folder(self) -> Path:
        return Path(self._root)

    # -- what made it --------------------------------------------------------------------------

    def record(self) -> dict[str, Any] | None:
        """Return what was recorded of what makes the units; None where nothing was begun.

        Raises:
            UserError: something else is there.
        """
        found = None
        with self._failing():
            try:
                with self._open(RECORD) as stream:
                    found = json.loads(stream.read())
            except (FileNotFoundError, NotADirectoryError):
                self._check_vacant()
                return None
            except (ValueError, RecursionError):
                pass
        if not isinstance(found, dict):
            raise UserError(f"{self.name}/{RECORD} is damaged; name another --out.")
        return found

    def _check_vacant(self) -> None:
        info = self._filesystem.get_file_info(self._root)
        if info.type == fs.FileType.File:
            raise UserError(f"{self.name} is a file; name a folder.")
        if any(not (name.endswith(_LOCK) or _LEFT.fullmatch(name)) for name in self._names()):
            raise UserError(
                f"{self.name} holds other files, which are no embeddings that were begun by "
                "llmcond embed. Name a new or an empty folder."
            )

    def _open(self, name: str) -> Any:
        """Open a file of the folder to read.

        Raises:
            ValueError: a pipe, a device or a folder, of which some would never end.
        """
        path = self._folder / name
        if not self._remote and path.exists() and not path.is_file():
            raise ValueError(f"{name} is no file")
        return self._filesystem.open_input_file(f"{self._root}/{name}")

    def _names(self) -> list[str]:
        """Return what lies in the folder."""
        selector = fs.FileSelector(self._root, allow_not_found=True)
        return [info.base_name for info in self._filesystem.get_file_info(selector)]

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Record what makes the units."""
        if not self._remote:
            write_json(self._folder / RECORD, record)
            return
        with self._failing():
            self._put(RECORD, json.dumps(record).encode())

    def _put(self, name: str, content: Any) -> None:
        # Closed only after all was written: that is what makes an object, out of a part as well.
        stream = self._filesystem.open_output_stream(f"{self._root}/{name}")
        stream.write(content)
        stream.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one that writes, for the block; what killed ones left is removed.

        Raises:
            UserError: another process writes there.
        """
        if self._remote:
            self._filesystem, _ = open_filesystem(self.name, patient=True)
            yield
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._folder / _LOCK)
            lock.acquire(blocking=False)
        except Timeout as error:
            raise UserError(
                f"another llmcond embed writes into {self.name}. Wait for it, or name another "
                "--out."
            ) from error
        except OSError as error:
            raise UserError(f"{self.name} cannot be written: {error.strerror or error}.") from error
        try:
            with self._failing():
                self._remove_leftovers()
            yield
        finally:
            lock.release()

    # -- units ---------------------------------------------------------------------------------

    @abstractmethod
    def done(self, units: Sequence[Unit]) -> set[int]:
        """Return the numbers of the units that are there.

        Raises:
            UserError: what is there was changed by others, or is damaged.
        """

    @abstractmethod
    def write(self, unit: Unit, rows: pa.Table) -> str:
        """Write a unit, in whatever process; return what :meth:`add` is to be told.

        Raises:
            DiskFullError: no room; what was written before is kept.
        """

    @abstractmethod
    def add(self, unit: Unit, written: str, schema: pa.Schema) -> None:
        """Let a unit that was written belong to the rest, now or soon; in one process alone."""

    @abstractmethod
    def finish(self) -> None:
        """Let all units that were added belong to the rest."""

    def _remove_leftovers(self) -> None:
        if not self._remote:
            for name in filter(_LEFT.fullmatch, self._names()):
                (self._folder / name).unlink(missing_ok=True)

    def _check_room(self, size: int) -> None:
        if not self._remote:
            check_room(self._folder, size)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Tell what fails as our own errors."""
        try:
            yield
        except (OSError, ValueError, pa.ArrowException) as error:
            raise_disk_error(error, self.name, "what is there is kept")
            # Not from the error: what a server writes of keys and signatures is told to nobody.
            raise LlmcondError(
                f"{self.name} cannot be written or read: {failure(self.name, error)}"
            ) from None


def open_output(name: str, *, patient: bool = False) -> Output:
    """Return where units are written: a Lance dataset, or a folder of Parquet files.

    ``patient``: see :func:`open_filesystem`.

    Raises:
        UserError: a URI that cannot be opened.
    """
    made = LanceOutput if name.rstrip("/").endswith(".lance") else ParquetOutput
    return made(name, patient)


class ParquetOutput(Output):
    """A Parquet file for each unit, in a folder: in the order of their names that of the source."""

    def done(self, units: Sequence[Unit]) -> set[int]:
        """Return the numbers of the units whose files are there, with as many rows as they have."""
        with self._failing():
            there = sorted(name for name in self._names() if name.endswith(".parquet"))
        named = {_file(unit): unit for unit in units}
        others = [name for name in there if name not in named]
        if others:
            raise UserError(
                f"{self.name} holds {others[0]}, which is not of these embeddings. Remove it, or "
                "name another --out."
            )
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            units_there = [named[name] for name in there]
            schemas = set(threads.map(self._schema, there, units_there))
        if len(schemas) > 1:
            raise UserError(
                f"{self.name} holds files of several dimensions or columns; name another --out."
            )
        for schema in schemas:
            self.dim = int(schema.field(VECTOR).type.list_size)
        return {named[name].number for name in there}

    def _schema(self, name: str, unit: Unit) -> pa.Schema:
        """Return the columns of a unit's file, which has the rows of the unit."""
        try:
            with self._open(name) as stream, pq.ParquetFile(stream) as file:
                rows, schema = file.metadata.num_rows, file.schema_arrow
                known = (schema.metadata or {}).get(_UNIT, _rows_of(unit))
                damaged = (rows, known) != (unit.rows, _rows_of(unit))
                damaged = damaged or not schema.field(VECTOR).type.list_size
        except (OSError, KeyError, AttributeError, ValueError, pa.ArrowException):
            damaged = True
        if damaged:
            raise UserError(
                f"{self.name}/{name} does not hold the {unit.rows:,} embeddings that belong there: "
                "it was damaged. Remove it, and run the same command again."
            )
        return schema.remove_metadata()

    def write(self, unit: Unit, rows: pa.Table) -> str:
        """Write a unit's file: beside its place, and then there."""
        texts = [name for name in rows.column_names if name != VECTOR]
        rows = rows.replace_schema_metadata({_UNIT: _rows_of(unit)})
        with self._failing():
            if self._remote:
                sink = pa.BufferOutputStream()
                pq.write_table(rows, sink, use_dictionary=texts)
                self._put(_file(unit), sink.getvalue())
            else:
                self._check_room(rows.nbytes)
                with replacing(self._folder / _file(unit)) as path:
                    pq.write_table(rows, path.absolute(), use_dictionary=texts)
        return ""

    def add(self, unit: Unit, written: str, schema: pa.Schema) -> None:
        """Do nothing: it belongs to the rest by being there."""

    def finish(self) -> None:
        """Do nothing."""


def _file(unit: Unit) -> str:
    return f"part-{unit.number:06}.parquet"


def _rows_of(unit: Unit) -> bytes:
    """Return which rows of the source a unit's file says that it has."""
    return f"{unit.start}-{unit.stop} of {unit.part}".encode()


class LanceOutput(Output):
    """A Lance dataset. Units are committed in the order of the source, so that its rows are too."""

    def __init__(self, name: str, patient: bool) -> None:
        super().__init__(name, patient)
        self._dataset: Any = None
        self._waiting: dict[int, str] = {}
        self._ready: list[dict[str, Any]] = []
        self._next = self._rows = self._new_rows = self._commits = 0
        self._committed = time.monotonic()

    @property
    def _target(self) -> Target:
        # By now somebody has looked for the record.
        return Target(self.uri, lance_options(self.name, patient=True), self._dataset)

    def _latest(self) -> Any:
        """Return the newest version; None: there is none yet."""
        return newest(self.uri, self._target.options)

    def done(self, units: Sequence[Unit]) -> set[int]:
        """Return the numbers of the units whose rows are there, which are the first ones."""
        with self._failing():
            self._dataset = self._latest()
            self._rows = self._dataset.count_rows() if self._dataset else 0
            lost = self._first_lost()
        if lost:
            raise UserError(f"{self.name} lacks {lost}; it was damaged. Name another --out.")
        found = {unit.number for unit in units if unit.first + unit.rows <= self._rows}
        if sum(unit.rows for unit in units if unit.number in found) != self._rows:
            raise UserError(
                f"{self.name} has {self._rows:,} rows, which none of its units ends with: rows "
                "were added or deleted by others. Name another --out."
            )
        self._next = len(found)
        if self._rows:
            try:
                self.dim = int(self._dataset.schema.field(VECTOR).type.list_size)
            except (KeyError, AttributeError) as error:
                raise UserError(
                    f"{self.name} has no column {VECTOR} of vectors: it was written by others. "
                    "Name another --out."
                ) from error
        return found

    def write(self, unit: Unit, rows: pa.Table) -> str:
        """Write a unit's rows into a file of the dataset, which no version names yet."""
        with self._failing():
            self._check_room(2 * rows.nbytes)
            if self._dataset is None:
                self._dataset = self._latest()
            fragment = self._target.write(rows)
        return json.dumps(fragment.to_json())

    def add(self, unit: Unit, written: str, schema: pa.Schema) -> None:
        """Commit a unit with others once all before it are there."""
        self._schema = schema
        self._waiting[unit.number] = written
        while self._next in self._waiting:
            self._ready.append(json.loads(self._waiting.pop(self._next)))
            self._next += 1
        late = time.monotonic() - self._committed > _COMMIT_SECONDS
        if len(self._ready) >= _COMMIT_FRAGMENTS or (self._ready and late):
            self._commit()

    def finish(self) -> None:
        """Commit what was added, and remove old versions."""
        if self._ready:
            self._commit()
        with self._failing():
            self._remove_leftovers()

    def _commit(self) -> None:
        from lance.fragment import FragmentMetadata

        made = [FragmentMetadata.from_json(json.dumps(one)) for one in self._ready]
        rows = self._rows + sum(int(one["physical_rows"]) for one in self._ready)
        with self._failing():
            self._check_room(0)
            target = self._target
            try:
                self._dataset = (
                    target.commit(made) if self._dataset else target.create(self._schema, made)
                )
            except PreemptedError:
                # A commit whose answer was lost on the way is there, and refused when repeated.
                self._dataset = self._latest()
            if not self._holds(made[-1]) or self._dataset.count_rows() != rows:
                self._ready, self._waiting = [], {}  # nothing more is committed
                raise LlmcondError(
                    f"{self.name} was written by others meanwhile. Name another --out, and let one "
                    "llmcond embed write into it at a time."
                )
            self._rows, self._ready, self._committed = rows, [], time.monotonic()
            self._commits += 1
            if self._commits % _TIDY_COMMITS == 0:
                clean(self.uri, self._dataset, alone=False)

    def _holds(self, last: Any) -> bool:
        """Return whether a fragment that was committed is the last one of the dataset."""
        there = self._dataset.get_fragments()[-1:] if self._dataset else []
        names = [file.path for own in there for file in own.data_files()]
        return names == [file.path for file in last.files]

    def _first_lost(self) -> str:
        """Return the first of the dataset's files here that is gone or was cut; empty: none."""
        if self._remote or self._dataset is None:
            return ""
        for fragment in self._dataset.get_fragments():
            for file in fragment.data_files():
                path = self._folder / "data" / file.path
                if not path.is_file() or path.stat().st_size != file.file_size_bytes:
                    return f"data/{file.path}"
        return ""

    def _remove_leftovers(self) -> None:
        super()._remove_leftovers()
        # On this machine nobody else writes, so what no version names is what a kill left.
        clean(self.uri, self._latest(), alone=not self._remote)
