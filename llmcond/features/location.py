"""Locations of a feature store: a local folder, or a prefix of an object store.

The parts that depend on the location are locks, free space, descriptions and error messages.
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
from llmcond.lance_io import open_newest
from llmcond.object_stores import lance_options, redact, split_uri, user_error_of

#: Free space to leave on the disk in addition to the bytes that are written.
SPARE_BYTES = 2**18
#: The key of the store's description in the schema metadata of a bucket's dataset.
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

    options = None
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
        return open_newest(self.uri)

    def description(self, dataset: Any) -> dict[str, Any] | None:
        """Return the store's description from store.json; None if nothing was committed yet."""
        path = self.folder / "store.json"
        return read_json(path) if path.exists() else None

    def write_description(self, schema: pa.Schema, description: Mapping[str, Any]) -> pa.Schema:
        """Write the description of a new store, and return the schema of its dataset."""
        write_json(self.folder / "store.json", description)
        return schema

    def has_room(self, n_bytes: int) -> bool:
        """Return whether the disk has ``n_bytes`` of free space."""
        return shutil.disk_usage(self.folder).free >= n_bytes

    def check_writable(self) -> None:
        """Raise a UserError if the folder cannot be written."""
        check_writable(self.folder / "store.json")

    def raise_unreachable(self, error: BaseException) -> None:
        """Do nothing, because a local disk is always reachable."""

    def raise_unwritable(self, error: BaseException, stored: int) -> None:
        """Raise a clear error if the disk is full or the folder is not writable."""
        raise_disk_error(error, self.folder, f"the {stored:,} features already stored are kept")

    def damage_message(self, error: BaseException) -> str:
        """Return the message for files that cannot be read."""
        return (
            f"{self.uri} cannot be read: {first_line(error)}. If it is damaged, delete "
            f"{self.folder} and run the same `llmcond extract` again."
        )


class BucketLocation:
    """A prefix of an object store, with the attributes and methods of ``LocalLocation``.

    An object store has no file locks. A commit names the version that it is based on, and the
    storage rejects it if that is no longer the newest version.
    """

    shared = True

    def __init__(self, uri: str) -> None:
        """Name a prefix by its URI, without accessing it."""
        self.name, self.uri = uri, f"{uri}/vectors.lance"
        self.root = uri.rpartition("/")[0]
        self._is_reached = False
        # Processes of one machine take turns with file locks. Other machines are noticed when a
        # commit fails.
        user = f"llmcond-{os.getuid() if hasattr(os, 'getuid') else ''}"
        self.folder = Path(tempfile.gettempdir()) / user / digest_text(uri)

    @property
    def options(self) -> dict[str, str] | None:
        """The storage options for Lance; never credentials."""
        return lance_options(self.uri, patient=self._is_reached)

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

    def newest(self) -> Any:
        """Return the newest version of the dataset; None if nothing was committed yet."""
        dataset = open_newest(self.uri, self.options)
        if self._is_reached:
            return dataset
        self._is_reached = True
        return None if dataset is None else open_newest(self.uri, self.options)

    def description(self, dataset: Any) -> dict[str, Any] | None:
        """Return the store's description from the schema of the dataset."""
        if dataset is None:
            return None
        try:
            return dict(json.loads((dataset.schema.metadata or {})[_DESCRIPTION]))
        except (KeyError, ValueError, TypeError):
            return {}

    def write_description(self, schema: pa.Schema, description: Mapping[str, Any]) -> pa.Schema:
        """Return the schema with the description of a new store."""
        return schema.with_metadata({_DESCRIPTION: json.dumps(description)})

    def has_room(self, n_bytes: int) -> bool:
        """Return True, because a bucket has no limit."""
        return True

    def check_writable(self) -> None:
        """Raise a UserError if the prefix cannot be written."""
        session, name = LanceFileSession(self.root, self.options), f".{os.urandom(8).hex()}"
        try:
            with tempfile.NamedTemporaryFile() as empty:
                session.upload_file(empty.name, name)
            session.delete_file(name)
        except Exception as error:
            self.raise_unwritable(error, 0)
            raise

    def raise_unwritable(self, error: BaseException, stored: int) -> None:
        """Raise a clear error for a storage or file error while writing; else return."""
        self.raise_unreachable(error)
        if isinstance(error, OSError):
            raise LlmcondError(self.damage_message(error)) from None

    def raise_unreachable(self, error: BaseException) -> None:
        """Raise a clear error if the storage rejected a request; else return."""
        refusal_error = None if isinstance(error, LlmcondError) else user_error_of(self.name, error)
        if refusal_error is not None:
            # The cause is left out, since a server's message may contain the access key and the
            # signed request.
            raise refusal_error from None

    def damage_message(self, error: BaseException) -> str:
        """Return the message for files that cannot be read."""
        return (
            f"{self.uri} cannot be read: {redact(error)}. If it is damaged, delete what "
            f"is below {self.name} and run the same `llmcond extract` again."
        )


def locate_store(root: str | Path, name: str) -> LocalLocation | BucketLocation:
    """Return the location of the store ``name`` below ``root``, a folder or a URI.

    Raises:
        UserError: As ``resolve_store_uri``.
    """
    if "://" not in str(root):
        return LocalLocation(Path(root) / name)
    store_uri = resolve_store_uri(str(root))
    return (
        BucketLocation(f"{store_uri}/{name}")
        if "://" in store_uri
        else LocalLocation(Path(store_uri) / name)
    )


def resolve_store_uri(root: str) -> str:
    """Return ``root``, a folder or a URI, in a form that is valid in any working folder.

    Raises:
        UserError: The kind of storage is unknown, or the URI has more than a bucket and a path.
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
    """Try to claim a chunk for this process; yield whether this succeeded.

    The claim is a locked file in ``folder``. It ends with the block, or with the process even if
    that is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.lock"
    # Not bound to a thread, because another thread may end the block.
    lock = FileLock(path, thread_local=False)
    try:
        with _claims_lock(folder):
            lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        with _claims_lock(folder):
            lock.release()
            path.unlink(missing_ok=True)


def remove_abandoned_claims(folder: Path) -> None:
    """Remove the files of claims whose processes were killed.

    This tries the lock of every claim, so a process that makes many claims should call it once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _claims_lock(folder):
        for path in folder.glob("*.lock"):
            lock = FileLock(path)
            with suppress(Timeout), lock.acquire(blocking=False):
                path.unlink(missing_ok=True)


def _claims_lock(claims: Path) -> AbstractContextManager[None]:
    """Let one process at a time create and remove the files of claims.

    Otherwise a process could lock a file that another one is removing, while a third creates a new
    file of the same name and locks that too.
    """
    return locked(claims / ".gate")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock during the block, after waiting for other processes of this machine."""
    with FileLock(path).acquire(poll_interval=_POLL_SECONDS):
        yield


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
