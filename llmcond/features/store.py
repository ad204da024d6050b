"""Feature store: (encoder identity, input) -> vector, on Lance.

One folder an encoder fingerprint and number type. What is in it is complete: rows are added in
chunks that commit atomically, under a lock that the operating system releases when a process
dies, so that two processes never add the same input twice.

A row's place is its position among all rows, and stays the same for ever: rows are only added
behind the others, and merging small files keeps their order.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import lance
import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from lance.file import LanceFileReader
from lance.fragment import FragmentMetadata, write_fragments
from lance.optimize import Compaction
from numpy.typing import NDArray

from llmcond.arrays import Gathered
from llmcond.encoders.spec import EncoderIdentity, EncoderInput
from llmcond.errors import DiskFullError, LlmcondError, UserError, first_line, is_disk_full
from llmcond.features.keys import KEY_BYTES, KeyIndex
from llmcond.files import check_format, read_json, write_json

StoreDtype = Literal["float16", "float32"]
FORMAT = 1

_Read = TypeVar("_Read")

_KEY = pa.binary(KEY_BYTES)
_ARROW = {"float16": pa.float16(), "float32": pa.float32()}
#: Rows read at a time: bounds the memory of a read beside its result.
_READ_ROWS = 65_536

#: Larger tables of vectors are kept on disk.
_IN_MEMORY = 2**30

#: Every commit adds a fragment, which slows down later ones: so many are merged into one,
_MERGED_FRAGMENTS = 32
#: where none of them holds more than a part in so many, so that a row is rewritten rarely,
_LARGEST_PART = 8
#: or already holds so many rows.
_FULL_ROWS = 131_072
#: Bounds the memory that merging takes.
_MERGE_BATCH = 1_024
#: Versions kept for those who read them. Fewer than commits between two merges: what a merge
#: replaced is removed at the next one.
_KEPT_VERSIONS = 16
#: Left free beside what is written.
_SPARE_BYTES = 2**18
#: What Lance and Arrow raise for files that are gone, or damaged.
_UNREADABLE = (OSError, ValueError, KeyError)
#: Others hold a lock for milliseconds.
_POLL_SECONDS = 0.005
#: What claims of those who write fragments begin with.
_WRITING = "writing-"


class Fragment(NamedTuple):
    """Rows in a file that no version of a store names yet.

    Attributes:
        metadata: of Lance's fragment, as JSON.
        keys: of its rows, in their order, 16 bytes each.
        dim: numbers in a vector.
    """

    metadata: str
    keys: bytes
    dim: int


class FeatureStore:
    """The vectors of one encoder identity, in a folder.

    Several threads may use one object, several objects and processes one folder.
    """

    def __init__(
        self, root: Path, identity: EncoderIdentity, dtype: StoreDtype, *, only_write: bool = False
    ) -> None:
        """Open the store below ``root``, or start an empty one; nothing is written yet.

        With ``only_write`` it serves :meth:`write_fragment` alone, and no keys are read.
        """
        self.folder = root / f"{identity.fingerprint}-{dtype}"
        self.identity = identity
        self.dtype = dtype
        # Absolute: in a relative one with a colon Lance sees the name of a storage service.
        self._uri = str(self.folder.absolute() / "vectors.lance")
        # Always taken in this order: the threads' turn to write, commit.lock, what is known.
        self._writing = threading.Lock()
        self._known = threading.RLock()
        # Replaced as a whole, never changed: other threads may be reading from it.
        self._dataset: Any = None
        self._index = KeyIndex()
        self._truncated = np.zeros(0, dtype=np.bool_)
        description = self.folder / "store.json"
        if description.exists():
            check_format(read_json(description), FORMAT, str(self.folder))
        if not only_write:
            self.refresh()
        elif self._is_written():
            self._dataset = lance.dataset(self._uri)

    def __len__(self) -> int:
        with self._known:
            return len(self._index)

    def refresh(self) -> None:
        """See what other processes have added since."""
        self._reading(self._catch_up)

    def _catch_up(self) -> None:
        with self._known:
            if self._dataset is None:
                newer = self._is_written()
            else:
                newer = self._dataset.latest_version != self._dataset.version
            if newer:
                self._adopt(lance.dataset(self._uri))

    def _is_written(self) -> bool:
        # A folder without a manifest is what a kill before the first commit leaves.
        return any((self.folder / "vectors.lance" / "_versions").glob("*.manifest"))

    def _anew(self, attempt: Callable[[], _Read]) -> _Read:
        self._catch_up()
        return attempt()

    def _adopt(self, dataset: Any) -> None:
        """Go on with a version that is not older than the one known."""
        with self._known:
            known = len(self._index)
            if dataset.count_rows() > known:
                fresh = dataset.to_table(columns=["key", "truncated"], offset=known)
                truncated = fresh["truncated"].to_numpy()
                self._truncated = np.concatenate([self._truncated, truncated])
                self._index.add(b"".join(_key_bytes(chunk) for chunk in fresh["key"].chunks))
            self._dataset = dataset

    def _reading(self, attempt: Callable[[], _Read]) -> _Read:
        """Return what ``attempt`` reads, also where the files it reads from are being merged."""
        # Merging removes old files, perhaps those of the version that is read. The newest version
        # has the same rows in the same places; under the commit lock no files are removed.
        first, again = _without_panic(attempt), _without_panic(lambda: self._anew(attempt))
        with suppress(*_UNREADABLE):
            return first()
        with suppress(*_UNREADABLE):
            return again()
        try:
            with self._committing():
                return again()
        except _UNREADABLE as error:
            if is_disk_full(error) or isinstance(error, PermissionError):
                raise
            raise LlmcondError(
                f"{self._uri} cannot be read: {first_line(error)}. If it is damaged, delete "
                f"{self.folder} and run the same `llmcond extract` again."
            ) from error

    @contextmanager
    def _committing(self) -> Iterator[None]:
        # Threads queue up at their own lock; at the file they would poll against each other.
        lock = FileLock(self.folder / "commit.lock")
        with self._writing, lock.acquire(poll_interval=_POLL_SECONDS):
            yield

    def missing(self, inputs: Sequence[EncoderInput]) -> list[int]:
        """Return the positions of the inputs that the store does not hold."""
        absent: list[int] = np.flatnonzero(self.places(inputs) < 0).tolist()
        return absent

    def places(self, inputs: Sequence[EncoderInput]) -> NDArray[np.int64]:
        """Return the place of each input, -1 where the store does not hold it.

        Places count from 0 in the order of adding, and never change.
        """
        places = np.empty(len(inputs), dtype=np.int64)
        for start in range(0, len(inputs), _READ_ROWS):
            part = inputs[start : start + _READ_ROWS]
            with self._known:
                found = self._index.find(b"".join(item.key for item in part))
                if self._truncated.any():
                    # Under their plain keys are those that earlier versions cut.
                    found[self._truncated[found] & (found >= 0)] = -1
                    absent = np.flatnonzero(found < 0)
                    keys = b"".join(part[i].key_when_cut for i in absent.tolist())
                    found[absent] = self._index.find(keys)
            places[start : start + _READ_ROWS] = found
        return places

    def append(
        self,
        inputs: Sequence[EncoderInput],
        vectors: NDArray[np.float32],
        n_tokens: NDArray[np.int32],
        truncated: NDArray[np.bool_],
    ) -> int:
        """Add n distinct inputs in one commit, but for those that are there by now; count them.

        ``vectors`` are (n, dim), finite in the store's type; ``n_tokens`` (n,) before truncation.

        Raises:
            DiskFullError: no room; what was stored before is kept.
        """
        with self._telling(), self._committing():
            self._catch_up()
            fresh = self.missing(inputs)
            if fresh:
                self._commit(
                    self._table(
                        [inputs[i] for i in fresh],
                        vectors[fresh],
                        n_tokens[fresh],
                        truncated[fresh],
                    )
                )
                self._tidy()
        return len(fresh)

    def write_fragment(
        self,
        inputs: Sequence[EncoderInput],
        vectors: NDArray[np.float32],
        n_tokens: NDArray[np.int32],
        truncated: NDArray[np.bool_],
    ) -> Fragment:
        """Write n distinct inputs, n at least 1, into a file that :meth:`add_fragments` adds.

        To be called while someone, perhaps in another process, is :meth:`writing`. Arguments and
        errors as of :meth:`append`.
        """
        with self._telling():
            table = self._table(inputs, vectors, n_tokens, truncated)
            self._check_room(table)
            known = self._dataset is not None
            written = write_fragments(table, self._uri, mode="append" if known else "overwrite")
        keys = b"".join(table["key"].to_pylist())
        return Fragment(json.dumps(written[0].to_json()), keys, vectors.shape[1])

    def add_fragments(self, fragments: Sequence[Fragment]) -> int:
        """Add the rows of fragments in one commit, but for those that are there by now; count them.

        Raises:
            DiskFullError: no room; what was stored before is kept.
        """
        with self._telling(), self._committing():
            self._catch_up()
            whole, tables, added = [], [], KeyIndex()
            for fragment in fragments:
                fresh = (self._index.find(fragment.keys) < 0) & (added.find(fragment.keys) < 0)
                if fresh.any():
                    self._check_visible(fragment)
                if fresh.all():
                    whole.append(FragmentMetadata.from_json(fragment.metadata))
                elif fresh.any():
                    tables.append(self._rows_of(fragment).filter(pa.array(fresh)))
                if fresh.any():
                    keys = np.frombuffer(fragment.keys, dtype=f"V{KEY_BYTES}")
                    added.add(keys[fresh].tobytes())
            if whole:
                if self._dataset is None:
                    self._commit(_schema(fragments[0].dim, self.dtype).empty_table())
                operation, version = lance.LanceOperation.Append(whole), self._dataset.version
                self._adopt(
                    lance.LanceDataset.commit(self._dataset, operation, read_version=version)
                )
            if tables:
                self._commit(pa.concat_tables(tables))
            if len(added):
                self._tidy()
        return len(added)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let fragments be written, here or elsewhere, until the block ends.

        Until then nobody removes files that no version names. Those that a kill left before are
        removed first, unless somebody else is writing some.
        """
        with ExitStack() as stack:
            with self._telling(), self._committing():
                self._catch_up()
                if self._dataset is not None:
                    self._clean(lance.dataset(self._uri))
                stack.enter_context(self.claim(f"{_WRITING}{uuid.uuid4().hex}"))
            yield

    def _is_being_written(self) -> bool:
        """Return whether someone writes fragments; the commit lock is held."""
        for path in (self.folder / "claims").glob(f"{_WRITING}*.lock"):
            with self.claim(path.stem) as free:  # which a kill has left, and takes it away
                if not free:
                    return True
        return False

    def _clean(self, dataset: Any) -> None:
        """Remove old versions, and what no version names if nobody else can be at it."""
        dataset.cleanup_old_versions(
            retain_versions=_KEPT_VERSIONS, delete_unverified=not self._is_being_written()
        )

    def _rows_of(self, fragment: Fragment) -> pa.Table:
        return LanceFileReader(self._file_of(fragment)).read_all().to_table()

    def _file_of(self, fragment: Fragment) -> str:
        return f"{self._uri}/data/{FragmentMetadata.from_json(fragment.metadata).files[0].path}"

    def _check_visible(self, fragment: Fragment) -> None:
        path = Path(self._file_of(fragment))
        if not path.exists():
            raise UserError(
                f"another machine wrote {path}, which this one does not see. All of them must "
                "see the same folder."
            )

    def _table(
        self,
        inputs: Sequence[EncoderInput],
        vectors: NDArray[np.float32],
        n_tokens: NDArray[np.int32],
        truncated: NDArray[np.bool_],
    ) -> pa.Table:
        schema = _schema(vectors.shape[1], self.dtype)
        flat = pa.array(self.cast(vectors).reshape(-1), _ARROW[self.dtype])
        keys = [
            item.key_when_cut if cut else item.key
            for item, cut in zip(inputs, truncated.tolist(), strict=True)
        ]
        columns = [
            pa.array(keys, _KEY),
            pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
            pa.array(n_tokens, pa.int32()),
            pa.array(truncated, pa.bool_()),
        ]
        return pa.table(columns, schema)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Make the folder, and tell what the disk says as it is told to people."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
        except Exception as error:
            if is_disk_full(error):
                raise DiskFullError(
                    f"the disk is full: {self.folder} cannot grow. Free some space and run the "
                    f"same command again; the {len(self):,} features already stored are kept."
                ) from error
            if isinstance(error, PermissionError):
                raise UserError(f"{self.folder} cannot be written: {error.strerror}.") from error
            raise

    def _check_room(self, table: pa.Table) -> None:
        # Lance commits a file whose very end could not be written: better not to begin.
        if shutil.disk_usage(self.folder).free < 2 * table.nbytes + _SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _commit(self, table: pa.Table) -> None:
        description = self.folder / "store.json"
        if not description.exists():
            identity = self.identity.to_json()
            write_json(description, {"format": FORMAT, "dtype": self.dtype, "encoder": identity})
        self._check_room(table)
        if self._dataset is None:
            self._adopt(lance.write_dataset(table, self._uri, mode="create"))
        else:
            self._adopt(lance.write_dataset(table, self._dataset, mode="append"))

    def _tidy(self) -> None:
        """Keep files few, whatever was added how; the commit lock is held."""
        fragments = self._dataset.get_fragments()
        count = _mergeable([fragment.physical_rows for fragment in fragments])
        if not count:
            return
        # A handle of its own, since merging changes it; a new one also starts with empty caches.
        dataset = lance.dataset(self._uri)
        self._clean(dataset)
        vector = dataset.schema.field("vector").type
        rows = sum(fragment.physical_rows for fragment in fragments[-count:])
        size = rows * vector.list_size * vector.value_type.bit_width // 8
        if shutil.disk_usage(self.folder).free > 2 * size:
            _merge_last(dataset, count)
            self._adopt(dataset)

    def cast(self, vectors: NDArray[np.float32]) -> NDArray[Any]:
        """Return vectors in the store's type; what does not fit becomes infinite."""
        with np.errstate(over="ignore"):
            return vectors.astype(self.dtype)

    def lookup(self, inputs: Sequence[EncoderInput]) -> Gathered:
        """Return the vectors of inputs as they are stored, each distinct one once.

        Tables above ``_IN_MEMORY`` bytes are memory maps of a file that ends with them.

        Raises:
            UserError: some are not there.
            DiskFullError: no room for a memory map.
        """
        found = self.places(inputs)
        absent = int((found < 0).sum())
        if absent:
            raise UserError(
                f"{absent:,} of {len(found):,} features are not there: the extraction did not "
                "finish. Run the same `llmcond extract` again; it resumes where it stopped."
            )
        places, index = np.unique(found, return_inverse=True)
        table: NDArray[Any] | None = None
        for start in range(0, len(places), _READ_ROWS):
            part = places[start : start + _READ_ROWS]
            block = self._stored(part)
            if table is None:
                table = self._room_for((len(places), block.shape[1]))
            table[start : start + len(part)] = block
        if table is None:
            table = np.zeros((0, 0), dtype=self.dtype)
        return Gathered(table, index.reshape(-1))

    def _room_for(self, shape: tuple[int, int]) -> NDArray[Any]:
        size = math.prod(shape) * np.dtype(self.dtype).itemsize
        if size <= _IN_MEMORY:
            return np.empty(shape, dtype=self.dtype)
        if shutil.disk_usage(self.folder).free < size + _SPARE_BYTES:
            raise DiskFullError(
                f"the disk is full: reading {size / 2**30:.1f} GiB of features in the order that "
                f"heads take them needs as much room in {self.folder}."
            )
        # Without a name, so nothing is left behind whatever happens.
        with tempfile.TemporaryFile(dir=self.folder) as file:
            return np.memmap(file, dtype=self.dtype, mode="w+", shape=shape)

    def _stored(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return the vectors at ascending places, in the store's type."""
        table = self._reading(lambda: self._dataset.take(places, columns=["vector"]))
        flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        vectors: NDArray[Any] = flat.reshape(len(places), -1)
        return vectors

    def count_truncated_at(self, places: NDArray[np.int64]) -> int:
        """Count the inputs at ``places`` that were longer than the encoder takes."""
        return int(self._truncated[places].sum())

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Try to become the one process that works on a part; yield whether it succeeded.

        A part that another process works on is better left to it. The claim ends with the block
        or with the process, however it ends.
        """
        claims = self.folder / "claims"
        claims.mkdir(parents=True, exist_ok=True)
        path = claims / f"{name}.lock"
        # Not bound to a thread: another one may end the block.
        lock = FileLock(path, thread_local=False)
        try:
            with _gate(claims):
                lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            with _gate(claims):
                lock.release()
                path.unlink(missing_ok=True)


@contextmanager
def _gate(claims: Path) -> Iterator[None]:
    """Let one at a time make and remove files of claims.

    Otherwise one could lock a file that another one is just removing, while a third makes a new
    file of that name and locks it too.
    """
    with FileLock(claims / ".gate").acquire(poll_interval=_POLL_SECONDS):
        yield


def _without_panic(attempt: Callable[[], _Read]) -> Callable[[], _Read]:
    """Return what raises a ValueError where Lance's Rust code panics over a damaged file."""

    def guarded() -> _Read:
        try:
            return attempt()
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # which cannot be imported
                raise
            raise ValueError(str(error)) from error

    return guarded


def _schema(dim: int, dtype: StoreDtype) -> pa.Schema:
    vector = pa.list_(_ARROW[dtype], dim)
    columns = {"key": _KEY, "vector": vector, "n_tokens": pa.int32(), "truncated": pa.bool_()}
    return pa.schema(columns)


def _key_bytes(keys: Any) -> Any:
    return keys.buffers()[1].slice(keys.offset * KEY_BYTES, len(keys) * KEY_BYTES)


def _mergeable(rows: Sequence[int]) -> int:
    """Return how many of the last fragments, with so many rows each, are to be merged; 0: none."""
    best = total = largest = 0
    for count, size in enumerate(reversed(rows), start=1):
        if size >= _FULL_ROWS:
            break
        total += size
        largest = max(largest, size)
        if count >= _MERGED_FRAGMENTS and largest * _LARGEST_PART <= total:
            best = count
    return best


def _merge_last(dataset: Any, count: int) -> None:
    """Merge the last fragments into one, which makes a new version.

    Lance puts what it merged behind everything else. So only the last ones, all in one task, can
    be merged without moving rows to other places.
    """
    fragments = dataset.get_fragments()
    last = fragments[-count:]
    options = {
        "target_rows_per_fragment": sum(fragment.physical_rows for fragment in last),
        "excluded_fragment_ids": [fragment.fragment_id for fragment in fragments[:-count]],
        "batch_size": _MERGE_BATCH,
    }
    tasks = Compaction.plan(dataset, options).tasks
    planned = [[fragment.id for fragment in task.fragments] for task in tasks]
    if planned == [[fragment.fragment_id for fragment in last]]:
        Compaction.commit(dataset, [tasks[0].execute(dataset)])
