"""Where a store lies: in a folder of this machine, or under a prefix of an object store.

Here is what depends on that: locks, room, what is removed, and what errors are told.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

import lance
import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from llmcond.errors import DiskFullError, UserError, first_line, is_disk_full
from llmcond.features.bucket import Bucket
from llmcond.files import check_writable, read_json, write_json
from llmcond.object_stores import split_uri

_Read = TypeVar("_Read")

#: Left free beside what is written.
SPARE_BYTES = 2**18
#: Others hold a lock for milliseconds.
_POLL_SECONDS = 0.005


class Location(Protocol):
    """Where a store lies.

    Attributes:
        name: for people.
        root: what it lies below, from any working folder.
        uri: of the Lance dataset.
        folder: on this machine, for locks and temporary files; perhaps not made yet.
        shared: whether others than those who take the locks may commit.
    """

    name: str
    root: str
    uri: str
    folder: Path
    shared: bool

    @property
    def options(self) -> dict[str, str] | None:
        """Return the storage options for Lance; never credentials."""

    def prepare(self) -> None:
        """Make what is needed to write."""

    def newest(self) -> Any:
        """Return the newest version of the dataset; None where nothing was committed yet."""

    def description(self, dataset: Any) -> dict[str, Any] | None:
        """Return what describes the store; None where nothing was committed yet."""

    def described(self, schema: pa.Schema, description: Mapping[str, Any]) -> pa.Schema:
        """Describe a store that gets its first rows; return the schema of its dataset."""

    def has_room(self, n_bytes: int) -> bool:
        """Return whether so many bytes can be written."""

    def holds(self, path: str) -> bool:
        """Return whether a file of the dataset, such as data/NAME.lance, is there."""

    def check_writable(self) -> None:
        """Raise a UserError where rows cannot be added."""

    def raise_unreachable(self, error: BaseException) -> None:
        """Raise what people are told of an error while reading; return where it is another."""

    def raise_unwritable(self, error: BaseException, stored: int) -> None:
        """Raise what people are told of an error while writing; return where it is another."""

    def damaged(self, error: BaseException) -> str:
        """Return what people are told of files that cannot be read."""


class Folder:
    """A folder of this machine, or one that several machines see as such."""

    options = None
    shared = False

    def __init__(self, folder: Path) -> None:
        """Name a folder; nothing is made yet."""
        self.folder, self.name = folder, str(folder)
        # Absolute: in a relative one with a colon Lance sees the name of a storage service.
        self.root, self.uri = (
            str(folder.absolute().parent),
            str(folder.absolute() / "vectors.lance"),
        )

    def prepare(self) -> None:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> Any:
        """Return the newest version of the dataset; None where nothing was committed yet."""
        # A folder without a manifest is what a kill before the first commit leaves.
        committed = any((self.folder / "vectors.lance" / "_versions").glob("*.manifest"))
        return lance.dataset(self.uri) if committed else None

    def description(self, dataset: Any) -> dict[str, Any] | None:
        """Return what store.json holds."""
        path = self.folder / "store.json"
        return read_json(path) if path.exists() else None

    def described(self, schema: pa.Schema, description: Mapping[str, Any]) -> pa.Schema:
        """Write store.json, before the first rows."""
        write_json(self.folder / "store.json", description)
        return schema

    def has_room(self, n_bytes: int) -> bool:
        """Return whether the disk has so many bytes."""
        return shutil.disk_usage(self.folder).free >= n_bytes

    def holds(self, path: str) -> bool:
        """Return whether a file of the dataset is there."""
        return Path(self.uri, path).exists()

    def check_writable(self) -> None:
        """Raise a UserError where the folder cannot be written."""
        check_writable(self.folder / "store.json")

    def raise_unreachable(self, error: BaseException) -> None:
        """Raise nothing: a disk is there."""

    def raise_unwritable(self, error: BaseException, stored: int) -> None:
        """Raise what people are told where the disk is full or the folder is not theirs."""
        if is_disk_full(error):
            raise DiskFullError(
                f"the disk is full: {self.folder} cannot grow. Free some space and run the "
                f"same command again; the {stored:,} features already stored are kept."
            ) from error
        if isinstance(error, PermissionError):
            raise UserError(f"{self.folder} cannot be written: {error.strerror}.") from error

    def damaged(self, error: BaseException) -> str:
        """Return what people are told of files that cannot be read."""
        return (
            f"{self.uri} cannot be read: {first_line(error)}. If it is damaged, delete "
            f"{self.folder} and run the same `llmcond extract` again."
        )


def locate(root: str | Path, name: str) -> Location:
    """Return where the store of a name lies below ``root``, a folder or a URI.

    Raises:
        UserError: as :func:`recorded`.
    """
    if "://" not in str(root):
        return Folder(Path(root) / name)
    place = recorded(str(root))
    return Bucket(f"{place}/{name}") if "://" in place else Folder(Path(place) / name)


def recorded(root: str) -> str:
    """Return ``root``, a folder or a URI, as it is found from any working folder.

    Raises:
        UserError: no such kind of storage, or a URI that holds more than a bucket and a path.
    """
    if not re.match(r"[\w+.-]+:/", root):
        return str(Path(root).expanduser().resolve())
    local = re.match(r"file://(?:localhost)?(?=/)", root)
    if local:
        return str(Path(unquote(root[local.end() :])).resolve())
    split_uri(root)
    return root.rstrip("/")


@contextmanager
def claim(folder: Path, name: str) -> Iterator[bool]:
    """Try to become the one process that works on a part; yield whether it succeeded.

    The claim is a file in ``folder``. It ends with the block or with the process, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.lock"
    # Not bound to a thread: another one may end the block.
    lock = FileLock(path, thread_local=False)
    try:
        with _gate(folder):
            lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        with _gate(folder):
            lock.release()
            path.unlink(missing_ok=True)


def remove_abandoned_claims(folder: Path) -> None:
    """Remove the files of claims whose processes were killed.

    This tries the lock of every claim, so a process that makes many claims calls it once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _gate(folder):
        for path in folder.glob("*.lock"):
            lock = FileLock(path)
            with suppress(Timeout), lock.acquire(blocking=False):
                path.unlink(missing_ok=True)


@contextmanager
def _gate(claims: Path) -> Iterator[None]:
    """Let one at a time make and remove files of claims.

    Otherwise one could lock a file that another one is just removing, while a third makes a new
    file of that name and locks it too.
    """
    with FileLock(claims / ".gate").acquire(poll_interval=_POLL_SECONDS):
        yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until nobody else of this machine commits."""
    with FileLock(folder / "commit.lock").acquire(poll_interval=_POLL_SECONDS):
        yield


def without_panic(attempt: Callable[[], _Read]) -> Callable[[], _Read]:
    """Return what raises a ValueError where Lance's Rust code panics over a damaged file."""

    def guarded() -> _Read:
        try:
            return attempt()
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # which cannot be imported
                raise
            raise ValueError(str(error)) from error

    return guarded


def array_on_disk(folder: Path, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """Return an array in a file of a folder that ends with it.

    Raises:
        DiskFullError: no room.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if shutil.disk_usage(folder).free < size + SPARE_BYTES:
        raise DiskFullError(
            f"the disk is full: reading {size / 2**30:.1f} GiB of features in the order that "
            f"heads take them needs as much room in {folder}."
        )
    # Without a name, so nothing is left behind whatever happens.
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
