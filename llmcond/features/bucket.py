"""Stores in object stores: Amazon S3 and servers that speak its protocol, Google's, and Azure's.

There are no file locks there. Who commits says which version the commit is based on, and the
storage refuses it if that is no longer the newest. Credentials and addresses are read from the
environment by Lance; they stand in no message.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileSession

from llmcond.errors import LlmcondError, UserError
from llmcond.files import digest_text
from llmcond.object_stores import lance_options, refusal, without_secrets

#: Where the schema of the dataset keeps what describes the store.
_DESCRIPTION = b"llmcond"


class Bucket:
    """A prefix of an object store."""

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
        found = self._newest()
        if self._reached:
            return found
        self._reached = True
        return None if found is None else self._newest()

    def _newest(self) -> Any:
        try:
            return lance.dataset(self.uri, storage_options=self.options)
        except ValueError as error:
            # A bucket that is not there is "404 Not Found", with a code of its own.
            if "was not found: Not found" in str(error) and "<Code>" not in str(error):
                return None
            raise

    def description(self, dataset: Any) -> dict[str, Any] | None:
        """Return what the schema of the dataset keeps."""
        if dataset is None:
            return None
        try:
            found: dict[str, Any] = json.loads((dataset.schema.metadata or {})[_DESCRIPTION])
        except (KeyError, ValueError):
            return {}
        return found

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
