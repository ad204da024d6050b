"""Stores in object stores: Amazon S3 and servers that speak its protocol, Google's, and Azure's.

There are no file locks there. Who commits says which version the commit is based on, and the
storage refuses it if that is no longer the newest. Credentials and addresses are read from the
environment by Lance; they stand in no message.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import lance
import pyarrow as pa
from lance.file import LanceFileSession

from llmcond.errors import LlmcondError, UserError, first_line
from llmcond.files import digest_text

#: How often a request is repeated that was refused for a while, as under load: half a minute to
#: two, as waits grow to 15 seconds. Lance's own 3 times, a few seconds in all, suffice to find out
#: that a server is not there.
_PATIENCE = {"client_max_retries": "12", "client_retry_timeout": "180"}
#: Where the schema of the dataset keeps what describes the store.
_DESCRIPTION = b"llmcond"


class _Scheme(NamedTuple):
    """A kind of storage: what is set for it, and what names another server."""

    settings: str
    endpoints: tuple[str, ...] = ()


SCHEMES: Mapping[str, _Scheme] = {
    "s3": _Scheme(
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, and for a server other than "
        "Amazon's AWS_ENDPOINT_URL",
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    ),
    "gs": _Scheme("GOOGLE_APPLICATION_CREDENTIALS, to the file of a service account"),
    "az": _Scheme("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"),
}


class Bucket:
    """A prefix of an object store."""

    shared = True

    def __init__(self, uri: str) -> None:
        """Name a prefix by its URI; nothing is looked at yet."""
        self.name, self.uri = uri, f"{uri}/vectors.lance"
        self.root = uri.rpartition("/")[0]
        parts = urlsplit(uri)
        self._scheme, self._bucket = SCHEMES[parts.scheme], f"{parts.scheme}://{parts.netloc}"
        self._reached = False
        # Processes of one machine take turns by files; others are noticed when they commit.
        user = f"llmcond-{os.getuid() if hasattr(os, 'getuid') else ''}"
        self.folder = Path(tempfile.gettempdir()) / user / digest_text(uri)

    @property
    def options(self) -> Mapping[str, str]:
        """Return what Lance is told; never credentials."""
        endpoint = next((v for k in self._scheme.endpoints if (v := os.environ.get(k))), "")
        plain = {"allow_http": "true"} if endpoint.startswith("http://") else {}
        return {**plain, **(_PATIENCE if self._reached else {})}

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
            return lance.dataset(self.uri, storage_options=dict(self.options))
        except ValueError as error:
            # A bucket that is not there is "404 Not Found", with a code of its own.
            if "was not found: Not found" in str(error) and _code(str(error)) is None:
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
        return bool(LanceFileSession(self.uri, dict(self.options)).contains(path))

    def check_writable(self) -> None:
        """Raise a UserError where nothing can be written."""
        session, name = LanceFileSession(self.root, dict(self.options)), f".{os.urandom(8).hex()}"
        try:
            with tempfile.NamedTemporaryFile() as empty:
                session.upload_file(empty.name, name)
            session.delete_file(name)
        except Exception as error:
            self.tell_refused(error, 0)
            raise

    def tell_refused(self, error: BaseException, stored: int) -> None:
        """Raise what people are told of an error while writing; return where it is another."""
        self.tell_unreachable(error)
        if isinstance(error, OSError):
            raise LlmcondError(self.damaged(error)) from None

    def tell_unreachable(self, error: BaseException) -> None:
        """Raise what people are told where the storage refused; return where it is another."""
        told = self._told(str(error))
        if told is not None and not isinstance(error, LlmcondError):
            # Not from the error: a server may write whose key it was, and what was signed.
            raise told from None

    def _told(self, text: str) -> LlmcondError | None:
        settings, code, status = self._scheme.settings, _code(text), _status(text)
        wrong = ""
        if code in _NO_BUCKET:
            return UserError(
                f"there is no bucket {self._bucket}. Make it, or check {settings}: it may be on "
                "another server."
            )
        if re.search(r"credential|token request|account name", text, re.IGNORECASE):
            wrong = f"{self.name}: no credentials were found."
        elif "resolve region" in text:
            wrong = f"{self.name}: nobody knows the region of the bucket."
        elif status in (401, 403) or code in _DENIED:
            wrong = f"{self.name}: access was denied ({code or status})."
        if wrong:
            return UserError(f"{wrong} Set {settings}.")
        again = "Run the same command again later; what was stored is kept."
        if "HTTP error" in text:
            return LlmcondError(f"{self.name} cannot be reached. {again} Check {settings}.")
        if status is not None and status != 404:
            return LlmcondError(f"{self.name}: the storage answers {code or status}. {again}")
        return None

    def damaged(self, error: BaseException) -> str:
        """Return what people are told of files that cannot be read."""
        said = re.sub(r"(<\?xml|<Error).*|, /\S+:\d+:\d+|\?\S*", "", first_line(error)).strip()
        return (
            f"{self.uri} cannot be read: {said}. If it is damaged, delete what is below "
            f"{self.name} and run the same `llmcond extract` again."
        )


_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName")
_DENIED = (
    "AccessDenied",
    "AuthenticationFailed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
)


def _code(text: str) -> str | None:
    found = re.search(r"<Code>(\w+)</Code>", text)
    return found and found[1]


def _status(text: str) -> int | None:
    found = re.search(r"status code: (\d{3})", text)
    return int(found[1]) if found else None
