"""The feature store: (encoder identity, input) -> vector, on Lance, in a folder or a bucket.

There is one folder for each encoder fingerprint and number type. Rows are added in chunks that
commit atomically, so a store never holds half a chunk. Commits run under a lock, which the
operating system releases when a process ends in any way, so two processes of a machine never add
the same input twice. Of inputs that several machines have added, the first row counts.

The position of a row among all rows never changes: rows are only appended, and merging small files
keeps their order.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from lance.file import LanceFileSession
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import SharedRows
from llmcond.base.errors import (
    DiskFullError,
    LlmcondError,
    UserError,
    disk_full_error,
    is_disk_full,
    raise_disk_error,
)
from llmcond.base.files import check_format, check_writable, digest_text, expand_home
from llmcond.base.stores import (
    READ_ERRORS,
    PreemptedError,
    clean_up,
    commit_rows,
    convert_panics,
    lance_options,
    merge_last,
    open_newest,
    redact,
    split_uri,
    user_error_of,
    write_rows,
)
from llmcond.encoders.settings import EncoderIdentity
from llmcond.encoders.spec import EncoderInput
from llmcond.features.view import KEY_BYTES, KeyIndex, StoreDtype

if TYPE_CHECKING:
    from llmcond.encoders.spec import Encoded

#: Free space to leave on the disk in addition to the bytes that are written.
SPARE_BYTES = 2**18
#: The key of the store's description in the schema metadata of the dataset.
_DESCRIPTION = b"llmcond"
#: Short, because processes hold a lock for milliseconds only.
_POLL_SECONDS = 0.005


class LocalLocation:
    """A local folder, or a folder on a file system that several machines share.

    Attributes:
        name: The name in messages.
        root: The absolute path of its parent.
        uri: The URI of the Lance dataset.
        folder: The local folder of locks and temporary files. It may not exist yet.
        options: Lance's storage options.
        shared: Whether processes that do not use these locks may commit.
    """

    options: dict[str, str] | None = None
    shared = False

    def __init__(self, folder: Path) -> None:
        """Name a folder without creating it."""
        self.folder, self.name = folder, str(folder)
        # The path is absolute, because Lance takes a relative path with a colon for a URI.
        self.root = str(folder.absolute().parent)
        self.uri = str(folder.absolute() / "vectors.lance")

    def prepare(self) -> None:
        """Create the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> Any:
        """Return the newest version of the dataset; None if nothing was committed yet."""
        return open_newest(self.uri, self.options)

    def has_room(self, n_bytes: int) -> bool:
        """Return whether the disk has ``n_bytes`` of free space."""
        return shutil.disk_usage(self.folder).free >= n_bytes

    def check_writable(self) -> None:
        """Raise a UserError if the folder cannot be written."""
        check_writable(self.folder / "commit.lock")

    def raise_unreachable(self, error: BaseException) -> None:
        """Do nothing, because a local disk is always reachable."""

    def raise_unwritable(self, error: BaseException) -> None:
        """Raise a clear error if the disk is full or the folder is not writable."""
        raise_disk_error(error, self.folder, "the features already stored are kept")

    def damage_message(self, error: BaseException) -> str:
        """Return the message for files that cannot be read."""
        return (
            f"{self.uri} cannot be read: {redact(error)}. If it is damaged, delete {self.name} and "
            "run the same `llmcond extract` again."
        )


class BucketLocation(LocalLocation):
    """A prefix of an object store.

    An object store has no file locks. A commit names the version that it is based on, and the
    storage rejects it if that is no longer the newest version.
    """

    shared = True

    def __init__(self, uri: str) -> None:
        """Name a prefix by its URI, without accessing it."""
        self.name, self.uri = uri, f"{uri}/vectors.lance"
        self.root = uri.rpartition("/")[0]
        self._is_reached, self.options = False, lance_options(uri)
        # Processes of one machine take turns with file locks. Other machines are noticed when a
        # commit fails.
        user = f"llmcond-{os.getuid() if hasattr(os, 'getuid') else ''}"
        self.folder = Path(tempfile.gettempdir()) / user / digest_text(uri)

    @override
    def prepare(self) -> None:
        """Create the folder of locks, which only this user can write to.

        Raises:
            UserError: It cannot be created, or other users can write to it.
        """
        parent = self.folder.parent
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = parent.lstat()
            is_owner = not hasattr(os, "getuid") or state.st_uid == os.getuid()
            if not (is_owner and stat.S_ISDIR(state.st_mode)) or state.st_mode & 0o022:
                raise UserError(
                    f"{parent} is the folder of locks and temporary files, but it is not your "
                    "folder, or other users can write to it. Remove it, or set TMPDIR to another "
                    "folder of yours."
                )
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.folder}, the folder of locks and temporary files, cannot be created: "
                f"{error.strerror}. Set TMPDIR to a writable folder."
            ) from error

    @override
    def newest(self) -> Any:
        dataset = super().newest()
        if self._is_reached:
            return dataset
        # Later requests are repeated for minutes.
        self._is_reached, self.options = True, lance_options(self.uri, patient=True)
        return None if dataset is None else super().newest()

    @override
    def has_room(self, n_bytes: int) -> bool:
        return True

    @override
    def check_writable(self) -> None:
        """Raise a UserError if the prefix cannot be written."""
        session, name = LanceFileSession(self.root, self.options), f".{os.urandom(8).hex()}"
        try:
            with tempfile.NamedTemporaryFile() as empty:
                session.upload_file(empty.name, name)
            session.delete_file(name)
        except Exception as error:
            self.raise_unwritable(error)
            raise

    @override
    def raise_unwritable(self, error: BaseException) -> None:
        self.raise_unreachable(error)
        if isinstance(error, OSError):
            raise LlmcondError(self.damage_message(error)) from None

    @override
    def raise_unreachable(self, error: BaseException) -> None:
        """Raise a clear error if the storage rejected a request; else return."""
        refusal_error = None if isinstance(error, LlmcondError) else user_error_of(self.name, error)
        if refusal_error is not None:
            # The cause is left out, since a server's message may contain the access key and the
            # signed request.
            raise refusal_error from None


def resolve_store_uri(root: str) -> str:
    """Return ``root``, a folder or a URI, in a form that is valid in any working folder.

    Raises:
        UserError: The kind of storage is unknown, or the URI has more than a bucket and a path.
    """
    if not re.match(r"[\w+.-]+:/", root):
        return str(expand_home(root).resolve())
    local = re.match(r"file://(?:localhost)?(?=/)", root)
    if local:
        return str(Path(unquote(root[local.end() :])).resolve())
    split_uri(root)
    return root.rstrip("/")


def memory_mapped_array(folder: Path, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """Return an array in a temporary file in a folder. The file is removed with the array.

    Raises:
        DiskFullError: The disk has not enough free space.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if shutil.disk_usage(folder).free < size + SPARE_BYTES:
        raise DiskFullError(
            f"the disk is full: reading {size / 2**30:.1f} GiB of features in the order that heads "
            f"need takes the same free space in {folder}."
        )
    # The file has no name, so it cannot be left behind.
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)


FORMAT = 1

_Read = TypeVar("_Read")

#: The number of rows read at a time, which bounds the memory of a read in addition to its result.
_READ_ROWS = 65_536

#: The size of a table of vectors above which it is a memory map instead of an array.
_MAX_TABLE_BYTES = 2**30


#: The number of fragments that are merged into one. Every commit adds a fragment, and many
#: fragments slow down later commits.
_MERGED_FRAGMENTS = 32
#: Fragments are merged only if the largest holds at most this fraction (1 / 8) of their rows, so
#: that a row is rewritten rarely.
_LARGEST_PART = 8
#: A fragment of this many rows or bytes is not merged again: rewriting it would take the committing
#: process longer than many encoding processes need to write such fragments.
_FULL_ROWS, _FULL_BYTES = 32_768, 2**25


class FeatureStore:
    """The vectors of one encoder identity, in a folder or under a store URI.

    Several threads may use one object, and several objects and processes may use one store.
    """

    def __init__(
        self,
        root: str | Path,
        identity: EncoderIdentity,
        dtype: StoreDtype,
        *,
        only_write: bool = False,
    ) -> None:
        """Open the store below ``root``, or start an empty one. Nothing is written yet.

        ``root`` is a folder, or a URI such as s3://bucket/path. With ``only_write`` no keys are
        read: only ``append`` can be used, with inputs that the store lacks.

        Raises:
            UserError: The kind of storage is unknown, or the bucket does not exist or cannot be
                accessed.
            LlmcondError: The storage cannot be reached, or the store is damaged.
        """
        name, store_uri = f"{identity.fingerprint}-{dtype}", str(root)
        if "://" in store_uri:
            store_uri = resolve_store_uri(store_uri)
        self._location = (
            BucketLocation(f"{store_uri}/{name}")
            if "://" in store_uri
            else LocalLocation(Path(store_uri) / name)
        )
        #: The parent of the stores of all encoders: a URI, or the absolute path of a folder.
        self.root = self._location.root
        #: The folder of locks and temporary files. For a local store it is the store's folder.
        self.folder = self._location.folder
        self.identity = identity
        self.dtype = dtype
        # Locks are always acquired in this order: _write_lock, commit.lock, _state_lock.
        self._write_lock = threading.Lock()
        self._state_lock = threading.RLock()
        # Replaced as a whole and never modified, because other threads may be reading from it.
        self._dataset: Any = None
        self._index = KeyIndex()
        self._truncated = np.zeros(0, dtype=np.bool_)
        self._only_write = only_write
        newest = self._read_safely(self._location.newest)
        metadata = None if newest is None else newest.schema.metadata  # the length reads files
        if metadata and _DESCRIPTION in metadata:
            check_format(json.loads(metadata[_DESCRIPTION]), FORMAT, self._location.name)
        if only_write:
            self._dataset = newest
        elif newest is not None:
            self._read_safely(lambda: self._switch_to(newest))

    def __len__(self) -> int:
        with self._state_lock:
            return len(self._index)

    def refresh(self) -> None:
        """Read the rows that other processes have added."""
        self._read_safely(self._catch_up)

    def _catch_up(self) -> None:
        with self._state_lock:
            if self._dataset is None or self._dataset.latest_version != self._dataset.version:
                newest = self._location.newest()
                if newest is not None:
                    self._switch_to(newest)

    def _switch_to(self, dataset: Any) -> None:
        """Switch to a version of the dataset that is at least as new as the current one."""
        with self._state_lock:
            n_known = len(self._index)
            if dataset.count_rows() > n_known:
                fresh = dataset.to_table(columns=["key", "truncated"], offset=n_known)
                truncated = fresh["truncated"].to_numpy()
                self._truncated = np.concatenate([self._truncated, truncated])
                self._index.add(b"".join(_key_bytes(chunk) for chunk in fresh["key"].chunks))
            self._dataset = dataset

    def _read_safely(self, attempt: Callable[[], _Read]) -> _Read:
        """Return the result of ``attempt``, which is repeated if files were merged meanwhile."""
        # Merging removes old files, which may belong to the version being read. The newest version
        # has the same rows in the same positions. Under the commit lock no files are removed.
        number = 0
        while True:
            number += 1
            try:
                with self._committing() if number == 3 else nullcontext(), convert_panics():
                    if number > 1:
                        self._catch_up()
                    return attempt()
            except READ_ERRORS as error:
                self._location.raise_unreachable(error)
                if number == 3:
                    if is_disk_full(error) or isinstance(error, PermissionError):
                        raise
                    raise LlmcondError(self._location.damage_message(error)) from error

    @contextmanager
    def _committing(self) -> Iterator[None]:
        self._location.prepare()
        # Threads wait at a thread lock first, since they would poll at the file lock.
        lock = FileLock(self.folder / "commit.lock")
        with self._write_lock, lock.acquire(poll_interval=_POLL_SECONDS):
            yield

    def missing(self, inputs: Sequence[EncoderInput]) -> list[int]:
        """Return the indices of the inputs that the store does not hold."""
        return list(np.flatnonzero(self.positions(inputs) < 0).tolist())

    def positions(self, inputs: Sequence[EncoderInput]) -> NDArray[np.int64]:
        """Return the row position of each input; -1 if the store does not hold it.

        Positions count from 0 in the order of adding, and never change.
        """
        positions = np.empty(len(inputs), dtype=np.int64)
        for start in range(0, len(inputs), _READ_ROWS):
            chunk = inputs[start : start + _READ_ROWS]
            with self._state_lock:
                keys = b"".join(item.key for item in chunk)
                positions[start : start + _READ_ROWS] = self._index.find(keys)
        return positions

    def append(self, inputs: Sequence[EncoderInput], encoded: Encoded) -> int:
        """Add n distinct inputs, at least one, in one commit, and return how many were new.

        Inputs that the store already holds are skipped. If another machine adds an input at the
        same time, it is stored twice, and the first vector is read. The vectors, (n, dim), must be
        finite in the store's type.

        Raises:
            DiskFullError: The disk is full. Rows that were already stored are kept.
        """
        with self._raising_storage_errors(), self._committing():
            if not self._only_write:
                self._catch_up()
                fresh = self.missing(inputs)
                if not fresh:
                    return 0
                inputs, encoded = [inputs[i] for i in fresh], encoded.take(fresh)
            rows = rows_table(inputs, replace(encoded, vectors=self.cast(encoded.vectors)))
            # Lance commits a file even if its last bytes could not be written, so check before.
            if not self._location.has_room(2 * rows.nbytes + SPARE_BYTES):
                raise disk_full_error()
            dataset = self._commit(rows)
            if self._only_write:
                self._dataset = dataset
            else:
                self._switch_to(dataset)
                self._merge_small_fragments(alone=not self._location.shared)
        return len(inputs)

    def _commit(self, rows: pa.Table) -> Any:
        """Commit rows, and return the new version. The caller holds the commit lock."""
        uri, options, dataset = self._location.uri, self._location.options, self._dataset
        identity = self.identity.to_json()
        description = {"format": FORMAT, "dtype": self.dtype, "encoder": identity}
        schema = rows.schema.with_metadata({_DESCRIPTION: json.dumps(description)})
        fragments = write_rows(uri, options, dataset, rows)
        while True:
            with suppress(PreemptedError):
                return commit_rows(uri, options, dataset, fragments, schema)
            # Another machine has committed, because this process holds the lock of this machine.
            newest = self._location.newest()
            if newest is None or (dataset is not None and newest.version == dataset.version):
                raise LlmcondError(
                    f"{self._location.name}: the storage rejects conditional writes (a PUT with "
                    "If-None-Match), which commits need. Use another storage."
                ) from None
            dataset = newest

    def merge(self) -> None:
        """Read the rows that workers have added, and merge their small files."""
        with self._raising_storage_errors(), self._committing():
            self._catch_up()
            if self._dataset is not None:
                self._merge_small_fragments(alone=False)

    @contextmanager
    def _raising_storage_errors(self) -> Iterator[None]:
        """Prepare the location for writing, and raise its errors with a clear message."""
        try:
            self._location.prepare()
            yield
        except Exception as error:
            self._location.raise_unwritable(error)
            raise

    def _merge_small_fragments(self, *, alone: bool) -> None:
        """Merge small fragments, if there are many. The caller holds the commit lock.

        ``alone`` is as in ``clean_up``: files of killed processes can be removed because all others
        write under the lock.
        """
        rows = [fragment.physical_rows for fragment in self._dataset.get_fragments()]
        bytes_per_row = row_bytes(self._dim, self.dtype)
        count = mergeable(rows, bytes_per_row)
        if not count:
            return
        uri, options = self._location.uri, self._location.options
        clean_up(uri, self._location.newest(), alone=alone)
        if self._location.has_room(2 * math.ceil(sum(rows[-count:]) * bytes_per_row)):
            with suppress(PreemptedError):  # the next commit will merge
                merge_last(uri, options, self._dataset, count)
                # A new handle starts with empty caches.
                self._switch_to(self._location.newest())

    def check_writable(self) -> None:
        """Raise a UserError if rows cannot be added."""
        self._location.check_writable()

    def cast(self, vectors: NDArray[np.float32]) -> NDArray[Any]:
        """Return vectors in the store's type. Numbers that are too large become infinite."""
        with np.errstate(over="ignore"):
            return vectors.astype(self.dtype)

    def lookup(self, inputs: Sequence[EncoderInput]) -> SharedRows:
        """Return the vectors of inputs in the stored type, each distinct vector once.

        Tables above ``_MAX_TABLE_BYTES`` bytes are memory maps of a temporary file.

        Raises:
            UserError: Some inputs are not stored.
            DiskFullError: The disk has no space for a memory map.
        """
        positions = self.positions(inputs)
        absent = int((positions < 0).sum())
        if absent:
            raise UserError(
                f"{absent:,} of {len(positions):,} features are missing: the extraction did not "
                "finish. Run the same `llmcond extract` again; it resumes where it stopped."
            )
        distinct_positions, index = np.unique(positions, return_inverse=True)
        shape = len(distinct_positions), self._dim if len(distinct_positions) else 0
        if math.prod(shape) * np.dtype(self.dtype).itemsize <= _MAX_TABLE_BYTES:
            table: NDArray[Any] = np.empty(shape, dtype=self.dtype)
        else:
            self._location.prepare()
            table = memory_mapped_array(self.folder, shape, self.dtype)
        for start in range(0, len(distinct_positions), _READ_ROWS):
            table[start : start + _READ_ROWS] = self._read_vectors(
                distinct_positions[start : start + _READ_ROWS]
            )
        return SharedRows(table, index.reshape(-1))

    @property
    def _dim(self) -> int:
        return int(self._dataset.schema.field("vector").type.list_size)

    def _read_vectors(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return the vectors at ascending positions, in the store's type."""
        table = self._read_safely(lambda: self._dataset.take(positions, columns=["vector"]))
        flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat.reshape(len(positions), -1))

    def count_truncated_at(self, positions: NDArray[np.int64]) -> int:
        """Count the truncated inputs among the rows at ``positions``."""
        return int(self._truncated[positions].sum())

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Try to claim a chunk for this process; yield whether this succeeded.

        A chunk that another process has claimed should be left to that process. The claim ends with
        the block, or with the process even if that is killed.
        """
        self._location.prepare()
        # A few chunks share a file. Only one of them can be claimed at a time, so that the files
        # need not be removed, which would race with processes that lock them.
        path = self.folder / "claims" / f"{name[:2]}.lock"
        path.parent.mkdir(exist_ok=True)
        # Not bound to a thread, because another thread may end the block.
        lock = FileLock(path, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def _key_bytes(keys: Any) -> Any:
    return keys.buffers()[1].slice(keys.offset * KEY_BYTES, len(keys) * KEY_BYTES)


def row_bytes(dim: int, dtype: StoreDtype) -> float:
    """Return the bytes of a row: its vector, key, number of tokens, and a bit for truncation."""
    return dim * np.dtype(dtype).itemsize + KEY_BYTES + 4 + 1 / 8


def rows_table(inputs: Sequence[EncoderInput], encoded: Encoded) -> pa.Table:
    """Return the rows of inputs and their vectors, which already have the stored type."""
    vectors = pa.array(encoded.vectors.reshape(-1))
    return pa.table(
        {
            "key": pa.array([item.key for item in inputs], pa.binary(KEY_BYTES)),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, encoded.vectors.shape[1]),
            "n_tokens": pa.array(encoded.n_tokens, pa.int32()),
            "truncated": pa.array(encoded.truncated, pa.bool_()),
        }
    )


def mergeable(rows: Sequence[int], row_bytes: float) -> int:
    """Return how many of the last fragments to merge, given the rows of each; 0: none."""
    best = total = largest = 0
    for count, size in enumerate(reversed(rows), start=1):
        if size >= _FULL_ROWS or size * row_bytes >= _FULL_BYTES:
            break
        total += size
        largest = max(largest, size)
        if count >= _MERGED_FRAGMENTS and largest * _LARGEST_PART <= total:
            best = count
    return best
