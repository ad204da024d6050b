"""Where a store lies: in a folder of this machine, or under a prefix of an object store.

Here is what depends on that: locks, room, what is removed, and what errors are told.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from lance.file import LanceFileSession
from numpy.typing import NDArray

from llmcond.errors import DiskFullError, LlmcondError, UserError, first_line, raise_disk_error
from llmcond.files import check_writable, digest_text, read_json, write_json
from llmcond.lance_io import newest
from llmcond.object_stores import lance_options, refusal, split_uri, without_secrets

#: Left free beside what is written.
SPARE_BYTES = 2**18
#: Where the schema of a bucket's dataset keeps what describes the store.
_DESCRIPTION = b"llmcond"
#: Others hold a lock for milliseconds.
_POLL_SECONDS = 0.005


class Folder:
    """A folder of this machine, or one that several machines see as such.

    Attributes:
        name: for people.
        root: what it lies below, from any working folder.
        uri: of the Lance dataset.
        folder: on this machine, for locks and temporary files; perhaps not made yet.
        options: Lance's storage options.
        shared: whether others than those who take the locks may commit.
    """

    options = None
    shared = False

    def __init__(self, folder: Path) -> None:
        """Name a folder; nothing is made yet."""
        self.folder, self.name = folder, str(folder)
        # Absolute: in a relative one with a colon Lance sees the name of a storage service.
        self.root = str(folder.absolute().parent)
        self.uri = str(folder.absolute() / "vectors.lance")

    def prepare(self) -> None:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> Any:
        """Return the newest version of the dataset; None where nothing was committed yet."""
        return newest(self.uri)

    def description(self, dataset: Any) -> dict[str, Any] | None:
        """Return what describes the store, in store.json; None where nothing was committed yet."""
        path = self.folder / "store.json"
        return read_json(path) if path.exists() else None

    def described(self, schema: pa.Schema, description: Mapping[str, Any]) -> pa.Schema:
        """Describe a store that gets its first rows; return the schema of its dataset."""
        write_json(self.folder / "store.json", description)
        return schema

    def has_room(self, n_bytes: int) -> bool:
        """Return whether the disk has so many bytes."""
        return shutil.disk_usage(self.folder).free >= n_bytes

    def holds(self, path: str) -> bool:
        """Return whether a file of the dataset, such as data/NAME.lance, is there."""
        return Path(self.uri, path).exists()

    def check_writable(self) -> None:
        """Raise a UserError where the folder cannot be written."""
        check_writable(self.folder / "store.json")

    def raise_unreachable(self, error: BaseException) -> None:
        """Raise nothing: a disk is there."""

    def raise_unwritable(self, error: BaseException, stored: int) -> None:
        """Raise what people are told where the disk is full or the folder is not theirs."""
        raise_disk_error(error, self.folder, f"the {stored:,} features already stored are kept")

    def damaged(self, error: BaseException) -> str:
        """Return what people are told of files that cannot be read."""
        return (
            f"{self.uri} cannot be read: {first_line(error)}. If it is damaged, delete "
            f"{self.folder} and run the same `llmcond extract` again."
        )


class Bucket:
    """A prefix of an object store: a place with the attributes and methods of :class:`Folder`.

    There are no file locks there. Who commits says which version the commit is based on, and the
    storage refuses it if that is no longer the newest.
    """

    shared = True

    def __init__(self, uri: str) -> None:
        """Name a prefix by its URI; nothing is looked at yet."""
        self.name, self.uri = uri, f"{uri}/vectors.lance"
        self.root = uri.rpartition("/")[0]
        self._reached = False
        # Processes of one machine take turns by files; others are noticed when they commit.
        user = f"llmcond-{os.getuid() if hasattr(os, 'getuid') else ''}"
        self.folder = Path(tempfile.gettempdir()) / user / digest_text(uri)

    @property
    def options(self) -> dict[str, str] | None:
        """Return the storage options for Lance; never credentials."""
        return lance_options(self.uri, patient=self._reached)

    def prepare(self) -> None:
        """Make the folder of locks, which nobody else can write to.

        Raises:
            UserError: it cannot be made, or another user can.
        """
        home = self.folder.parent
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = home.lstat()
            mine = not hasattr(os, "getuid") or state.st_uid == os.getuid()
            if not (mine and stat.S_ISDIR(state.st_mode)) or state.st_mode & 0o022:
                raise UserError(
                    f"{home} is for locks and temporary files, and other users can write to it, "
                    "or it is not a folder of yours. Remove it, or set TMPDIR to a folder of your "
                    "own."
                )
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be made, for locks and temporary files: {error.strerror}. "
                "Set TMPDIR to a folder that can be written."
            ) from error

    def newest(self) -> Any:
        """Return the newest version of the dataset; None where nothing was committed yet."""
        dataset = newest(self.uri, self.options)
        if self._reached:
            return dataset
        self._reached = True
        return None if dataset is None else newest(self.uri, self.options)

    def description(self, dataset: Any) -> dict[str, Any] | None:
        """Return what the schema of the dataset keeps."""
        if dataset is None:
            return None
        try:
            return dict(json.loads((dataset.schema.metadata or {})[_DESCRIPTION]))
        except (KeyError, ValueError, TypeError):
            return {}

    def described(self, schema: pa.Schema, description: Mapping[str, Any]) -> pa.Schema:
        """Return the schema with what describes the store."""
        return schema.with_metadata({_DESCRIPTION: json.dumps(description)})

    def has_room(self, n_bytes: int) -> bool:
        """Return that a bucket has room."""
        return True

    def holds(self, path: str) -> bool:
        """Return whether a file of the dataset is there."""
        return bool(LanceFileSession(self.uri, self.options).contains(path))

    def check_writable(self) -> None:
        """Raise a UserError where nothing can be written."""
        session, name = LanceFileSession(self.root, self.options), f".{os.urandom(8).hex()}"
        try:
            with tempfile.NamedTemporaryFile() as empty:
                session.upload_file(empty.name, name)
            session.delete_file(name)
        except Exception as error:
            self.raise_unwritable(error, 0)
            raise

    def raise_unwritable(self, error: BaseException, stored: int) -> None:
        """Raise what people are told of an error while writing; return where it is another."""
        self.raise_unreachable(error)
        if isinstance(error, OSError):
            raise LlmcondError(self.damaged(error)) from None

    def raise_unreachable(self, error: BaseException) -> None:
        """Raise what people are told where the storage refused; return where it is another."""
        refused = None if isinstance(error, LlmcondError) else refusal(self.name, error)
        if refused is not None:
            # Not from the error: a server may write whose key it was, and what was signed.
            raise refused from None

    def damaged(self, error: BaseException) -> str:
        """Return what people are told of files that cannot be read."""
        return (
            f"{self.uri} cannot be read: {without_secrets(error)}. If it is damaged, delete what "
            f"is below {self.name} and run the same `llmcond extract` again."
        )


def locate(root: str | Path, name: str) -> Folder | Bucket:
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


def _gate(claims: Path) -> AbstractContextManager[None]:
    """Let one at a time make and remove files of claims.

    Otherwise one could lock a file that another one is just removing, while a third makes a new
    file of that name and locks it too.
    """
    return locked(claims / ".gate")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until nobody else of this machine holds a lock, and hold it."""
    with FileLock(path).acquire(poll_interval=_POLL_SECONDS):
        yield


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
