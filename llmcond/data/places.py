"""Files by path or by URI: of this machine, S3 (and what speaks its protocol), Google, Azure.

Credentials and endpoints come from the environment alone, by the names that Lance takes them by:
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_ENDPOINT``, ``AWS_REGION`` and others.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from llmcond.errors import UserError, first_line


def is_remote(name: str) -> bool:
    """Return whether a name is a URI of something else than this machine's files."""
    return "://" in name and not name.startswith("file://")


def open_place(name: str) -> tuple[Any, str]:
    """Return the file system of Arrow that a name lies in, and its path there.

    Raises:
        UserError: a URI with credentials in it, or of a kind that is not known.
    """
    if not is_remote(name):
        return fs.LocalFileSystem(), str(Path(name.removeprefix("file://")).expanduser().absolute())
    parts = urlsplit(name)
    if parts.username or parts.password or parts.query:
        raise UserError(
            f"{parts.scheme}://... names credentials or options. Give {parts.scheme}://BUCKET/PATH "
            "alone: credentials and the endpoint are read from the environment (docs/scale.md)."
        )
    try:
        if parts.scheme == "s3":
            return _s3(parts.netloc), (parts.netloc + parts.path).rstrip("/")
        scheme = {"az": "abfs", "gs": "gs"}.get(parts.scheme, parts.scheme)
        filesystem, path = fs.FileSystem.from_uri(f"{scheme}://{parts.netloc}{parts.path}")
    except (OSError, ValueError, ImportError) as error:  # Arrow's own errors are such
        raise UserError(f"{name} cannot be opened: {why(name, error)}") from error
    return filesystem, path.rstrip("/")


def why(name: str, error: BaseException) -> str:
    """Return what an error says of a place, without addresses, which may be signed."""
    said = _HIDDEN.sub("", first_line(error)).strip(" .:")
    if not is_remote(name):
        return f"{said}."
    return (
        f"{said}. See that the bucket is there, and that the environment has its credentials and "
        "endpoint (docs/scale.md)."
    )


#: Addresses and numbers of requests.
_HIDDEN = re.compile(r"\w+://\S+|\(Request ID: [^)]*\)|LanceError\(IO\): ")


def _s3(bucket: str) -> Any:
    """Return S3 by the names in the environment that Arrow does not read itself."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        place = {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
        return fs.S3FileSystem(region=region or "us-east-1", **place)
    return fs.S3FileSystem(region=region or fs.resolve_s3_region(bucket))
