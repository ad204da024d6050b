"""Outputs for embeddings of texts that do not fit in memory: Parquet files or a Lance dataset.

Embeddings are written in work units, in the order of the source. A work unit exists either
completely or not at all. Leftovers of a killed process are removed by the next one.
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

from llmcond.base.errors import LlmcondError, UserError, raise_disk_error
from llmcond.base.files import check_free_space, replace_atomically, suffix
from llmcond.base.stores import (
    READ_ERRORS,
    PreemptedError,
    clean_up,
    commit_rows,
    convert_panics,
    describe_failure,
    is_remote,
    lance_options,
    open_filesystem,
    open_newest,
    write_rows,
)
from llmcond.data.readers import VECTOR

#: File with the settings that the embeddings were made with, in the same folder.
RECORD_NAME = "_llmcond.json"
_LOCK = "_llmcond.lock"
#: Key of a Parquet file's metadata that names the rows of the source in the file.
_ROWS_KEY = b"llmcond.rows"
_FILE = re.compile(r"part-\d{6}\.parquet")
#: Names of temporary files that a killed process leaves.
_LEFTOVER = re.compile(rf"\.({_FILE.pattern}|{re.escape(RECORD_NAME)})\.[0-9a-f]{{8}}")
#: Number of files that are opened at a time: an object store has a high latency, but serves many
#: requests at once.
_OPEN_THREADS = 8
#: Number of fragments per commit, and how many seconds a fragment waits for others.
_COMMIT_FRAGMENTS, _COMMIT_SECONDS = 16, 10
#: Old versions are removed after this number of commits.
_CLEANUP_COMMITS = 64


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A work unit: rows that are embedded and written together.

    Attributes:
        number: index of the unit in the order of the source, from 0.
        part: the part of the source, such as a file.
        start: first row of the unit in that part.
        stop: row after the last one in that part.
        first: number of rows of the whole source before the unit.
    """

    number: int
    part: str
    start: int
    stop: int
    first: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


class Output(ABC):
    """The output for work units; ``open_output`` creates one.

    Attributes:
        name: the output as the user named it.
        uri: the output as any process can find it; on this machine an absolute path.
        vector: name of a column of vectors; if there are several, these have the same dimension.
        dim: dimension of the embeddings that ``find_finished`` has found; 0 if there are none.
    """

    vector = VECTOR
    dim = 0

    def __init__(self, name: str, patient: bool) -> None:
        self.name = name
        self._remote = is_remote(name)
        self._filesystem, self._root = open_filesystem(name, patient=patient)
        # The path is absolute, also because Lance takes a relative path with a colon for a store
        # URI.
        self.uri = name if self._remote else self._root

    @property
    def _folder(self) -> Path:
        return Path(self._root)

    # -- the record ----------------------------------------------------------------------------

    def read_record(self) -> dict[str, Any] | None:
        """Read the settings of the embeddings; None if there are no embeddings yet.

        Raises:
            UserError: if the output holds something else.
        """
        record = None
        with self._convert_errors():
            try:
                with self._open(RECORD_NAME) as stream:
                    record = json.loads(stream.read())
            except (FileNotFoundError, NotADirectoryError):
                self._check_vacant()
                return None
            except (ValueError, RecursionError):
                pass
        if not isinstance(record, dict):
            raise UserError(f"{self.name}/{RECORD_NAME} is damaged; name another --out.")
        return record

    def _check_vacant(self) -> None:
        info = self._filesystem.get_file_info(self._root)
        if info.type == fs.FileType.File:
            raise UserError(f"{self.name} is a file; name a folder.")
        if any(not (name.endswith(_LOCK) or _LEFTOVER.fullmatch(name)) for name in self._names()):
            raise UserError(
                f"{self.name} holds other files, which llmcond embed has not written. Name a new "
                "or an empty folder."
            )

    def _open(self, name: str) -> Any:
        """Open a file of the folder for reading.

        Raises:
            ValueError: if it is not a regular file; reading a pipe or device might never end.
        """
        path = self._folder / name
        if not self._remote and path.exists() and not path.is_file():
            raise ValueError(f"{name} is not a regular file")
        return self._filesystem.open_input_file(f"{self._root}/{name}")

    def _names(self) -> list[str]:
        """List the file names in the folder."""
        selector = fs.FileSelector(self._root, allow_not_found=True)
        return [info.base_name for info in self._filesystem.get_file_info(selector)]

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the settings that the embeddings are made with."""
        self._write_file(RECORD_NAME, json.dumps(record, indent=2).encode())

    def _write_file(self, name: str, content: Any) -> None:
        """Write a file of the folder, completely or not at all."""
        with self._convert_errors():
            if not self._remote:
                self._check_room(len(content))
                with replace_atomically(self._folder / name) as path:
                    path.write_bytes(content)
                return
            # Closing the stream creates the object, even from partial content. So the stream is
            # only closed once everything has been written.
            stream = self._filesystem.open_output_stream(f"{self._root}/{name}")
            stream.write(content)
            stream.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the write lock during the block, after removing leftovers of killed processes.

        Raises:
            UserError: if another process is writing to the output.
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
                f"another llmcond embed is writing to {self.name}. Wait until it has finished, or "
                "name another --out."
            ) from error
        except OSError as error:
            raise UserError(f"{self.name} cannot be written: {error.strerror or error}.") from error
        try:
            with self._convert_errors():
                self._remove_leftovers()
            yield
        finally:
            lock.release()

    # -- units ---------------------------------------------------------------------------------

    @abstractmethod
    def find_finished(self, units: Sequence[WorkUnit]) -> set[int]:
        """Return the numbers of the units that have been written.

        Raises:
            UserError: if the existing output was modified by another program, or is damaged.
        """

    @abstractmethod
    def write_unit(self, unit: WorkUnit, rows: pa.Table) -> str:
        """Write a unit, in any process; return the argument ``written`` of ``add_unit``.

        Raises:
            DiskFullError: if there is not enough space; earlier units remain.
        """

    def add_unit(self, unit: WorkUnit, written: str, schema: pa.Schema) -> None:  # noqa: B027
        """Add a written unit to the output, now or soon; only one process may call this."""

    def finish(self) -> None:  # noqa: B027
        """Complete the output with all units that were added."""

    def _remove_leftovers(self) -> None:
        if not self._remote:
            for name in filter(_LEFTOVER.fullmatch, self._names()):
                (self._folder / name).unlink(missing_ok=True)

    def _check_room(self, size: int) -> None:
        if not self._remote:
            check_free_space(self._folder, size)

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert errors of files and stores to errors of this package."""
        try:
            with convert_panics():
                yield
        except (OSError, ValueError, pa.ArrowException) as error:
            raise_disk_error(error, self.name, "finished rows are kept")
            # The original error is not chained: a server's message may hold keys and signatures.
            raise LlmcondError(
                f"{self.name} cannot be written or read: {describe_failure(self.name, error)}"
            ) from None


def open_output(name: str, *, patient: bool = False) -> Output:
    """Open an output: a Lance dataset if the name ends with ``.lance``, else Parquet files.

    Args:
        name: a folder, a path that ends with ``.lance``, or a store URI.
        patient: as in ``open_filesystem``.

    Raises:
        UserError: if the URI cannot be opened.
    """
    output_class = LanceOutput if suffix(name) == ".lance" else ParquetOutput
    return output_class(name, patient)


class ParquetOutput(Output):
    """A folder with a Parquet file for each unit; the order of file names is that of the source."""

    def find_finished(self, units: Sequence[WorkUnit]) -> set[int]:
        """Return the numbers of the units whose files exist and have the expected rows."""
        with self._convert_errors():
            existing = sorted(name for name in self._names() if name.endswith(".parquet"))
        units_by_name = {_file_name(unit): unit for unit in units}
        others = [name for name in existing if name not in units_by_name]
        if others:
            raise UserError(
                f"{self.name} holds {others[0]}, which does not belong to these embeddings. "
                "Remove it, or name another --out."
            )
        with ThreadPoolExecutor(_OPEN_THREADS) as threads:
            existing_units = [units_by_name[name] for name in existing]
            schemas = set(threads.map(self._read_schema, existing, existing_units))
        if len(schemas) > 1:
            raise UserError(
                f"{self.name} holds files with different dimensions or columns; name another --out."
            )
        for schema in schemas:
            self.dim = int(schema.field(self.vector).type.list_size)
        return {units_by_name[name].number for name in existing}

    def _read_schema(self, name: str, unit: WorkUnit) -> pa.Schema:
        """Return the schema of a unit's file, after checking that the file has the unit's rows."""
        try:
            with self._open(name) as stream, pq.ParquetFile(stream) as file:
                rows, schema = file.metadata.num_rows, file.schema_arrow
                recorded_rows = (schema.metadata or {}).get(_ROWS_KEY, _rows_value(unit))
                damaged = (rows, recorded_rows) != (unit.rows, _rows_value(unit))
                damaged = damaged or not schema.field(self.vector).type.list_size
        except (OSError, KeyError, AttributeError, ValueError, pa.ArrowException):
            damaged = True
        if damaged:
            raise UserError(
                f"{self.name}/{name} is damaged: it does not hold the expected {unit.rows:,} "
                "embeddings. Remove it, and run the same command again."
            )
        return schema.remove_metadata()

    def write_unit(self, unit: WorkUnit, rows: pa.Table) -> str:
        """Write a unit's file."""
        is_vector = pa.types.is_fixed_size_list
        texts = [field.name for field in rows.schema if not is_vector(field.type)]
        rows = rows.replace_schema_metadata({_ROWS_KEY: _rows_value(unit)})
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink, use_dictionary=texts)
        self._write_file(_file_name(unit), sink.getvalue())
        return ""


def _file_name(unit: WorkUnit) -> str:
    return f"part-{unit.number:06}.parquet"


def _rows_value(unit: WorkUnit) -> bytes:
    """Return the value that identifies a unit's rows in the metadata of its file."""
    return f"{unit.start}-{unit.stop} of {unit.part}".encode()


class LanceOutput(Output):
    """A Lance dataset. Units are committed in the order of the source, and so are its rows."""

    def __init__(self, name: str, patient: bool) -> None:
        super().__init__(name, patient)
        # Requests are repeated, because reading the record has shown that the store exists.
        self._options = lance_options(name, patient=True)
        self._dataset: Any = None
        self._waiting: dict[int, str] = {}
        self._ready: list[dict[str, Any]] = []
        self._next = self._rows = self._new_rows = self._commits = 0
        self._committed = time.monotonic()

    def _latest(self) -> Any:
        """Return the newest version; None if there is none yet."""
        return open_newest(self.uri, self._options)

    def find_finished(self, units: Sequence[WorkUnit]) -> set[int]:
        """Return the numbers of the units whose rows exist; these are the first ones."""
        with self._convert_errors():
            self._dataset = self._latest()
            self._rows = self._dataset.count_rows() if self._dataset else 0
            damaged_file = self._find_damaged_file()
        if damaged_file:
            raise UserError(
                f"{self.name} is damaged: {damaged_file} is missing or cannot be read. Name "
                "another --out."
            )
        finished = {unit.number for unit in units if unit.first + unit.rows <= self._rows}
        if sum(unit.rows for unit in units if unit.number in finished) != self._rows:
            raise UserError(
                f"{self.name} has {self._rows:,} rows, but no work unit ends there: another "
                "program has added or deleted rows. Name another --out."
            )
        self._next = len(finished)
        if self._rows:
            try:
                self.dim = int(self._dataset.schema.field(self.vector).type.list_size)
            except (KeyError, AttributeError) as error:
                raise UserError(
                    f"{self.name} has no column {self.vector} of vectors, so another program has "
                    "written it. Name another --out."
                ) from error
        return finished

    def write_unit(self, unit: WorkUnit, rows: pa.Table) -> str:
        """Write a unit's rows into a file of the dataset that no version refers to yet."""
        with self._convert_errors():
            self._check_room(2 * rows.nbytes)
            if self._dataset is None:
                self._dataset = self._latest()
            (fragment,) = write_rows(self.uri, self._options, self._dataset, rows)
        return json.dumps(fragment.to_json())

    def add_unit(self, unit: WorkUnit, written: str, schema: pa.Schema) -> None:
        """Commit a unit, together with others, once all units before it are there."""
        self._schema = schema
        self._waiting[unit.number] = written
        while self._next in self._waiting:
            self._ready.append(json.loads(self._waiting.pop(self._next)))
            self._next += 1
        late = time.monotonic() - self._committed > _COMMIT_SECONDS
        if len(self._ready) >= _COMMIT_FRAGMENTS or (self._ready and late):
            self._commit()

    def finish(self) -> None:
        """Commit the units that were added, and remove old versions."""
        if self._ready:
            self._commit()
        with self._convert_errors():
            self._remove_leftovers()

    def _commit(self) -> None:
        from lance.fragment import FragmentMetadata

        fragments = [FragmentMetadata.from_json(json.dumps(record)) for record in self._ready]
        rows = self._rows + sum(int(record["physical_rows"]) for record in self._ready)
        with self._convert_errors():
            self._check_room(0)
            try:
                self._dataset = commit_rows(
                    self.uri, self._options, self._dataset, fragments, self._schema
                )
            except PreemptedError:
                # If the response to a commit was lost, the commit exists, and a repetition fails.
                self._dataset = self._latest()
            if not self._ends_with(fragments[-1]) or self._dataset.count_rows() != rows:
                self._ready, self._waiting = [], {}  # nothing more is committed
                raise LlmcondError(
                    f"another program has written to {self.name} in the meantime. Name another "
                    "--out, and let only one llmcond embed write to it at a time."
                )
            self._rows, self._ready, self._committed = rows, [], time.monotonic()
            self._commits += 1
            if self._commits % _CLEANUP_COMMITS == 0:
                clean_up(self.uri, self._dataset, alone=False)

    def _ends_with(self, last: Any) -> bool:
        """Return whether a committed fragment is the last one of the dataset."""
        newest_fragments = self._dataset.get_fragments()[-1:] if self._dataset else []
        names = [file.path for fragment in newest_fragments for file in fragment.data_files()]
        return names == [file.path for file in last.files]

    def _find_damaged_file(self) -> str:
        """Return the first local data file that is missing or cannot be read, or an empty text.

        Its size and its metadata are checked, not the rows.
        """
        if self._remote or self._dataset is None:
            return ""
        from lance.file import LanceFileReader

        for fragment in self._dataset.get_fragments():
            for file in fragment.data_files():
                path = self._folder / "data" / file.path
                try:
                    if path.stat().st_size != file.file_size_bytes:
                        return f"data/{file.path}"
                    with convert_panics():
                        LanceFileReader(str(path))
                except READ_ERRORS:
                    return f"data/{file.path}"
        return ""

    def _remove_leftovers(self) -> None:
        super()._remove_leftovers()
        # On this machine nothing else writes, so files without a version are leftovers of a kill.
        clean_up(self.uri, self._latest(), alone=not self._remote)
