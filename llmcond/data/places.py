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


def open_place(name: str, *, patient: bool = False) -> tuple[Any, str]:
    """Return the file system of Arrow that a name lies in, and its path there.

    ``patient``: it was reached before, so that what it refuses for a while is asked for again.

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
            return _s3(parts.netloc, patient), (parts.netloc + parts.path).rstrip("/")
        if parts.scheme == "az":
            given = {name: os.environ.get(f"AZURE_STORAGE_{name}".upper()) for name in _AZURE}
            return fs.AzureFileSystem(**given), (parts.netloc + parts.path).rstrip("/")
        filesystem, path = fs.FileSystem.from_uri(name)
    except (OSError, ValueError, TypeError, ImportError) as error:  # Arrow's own errors are such
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


def lance_options(name: str, *, patient: bool = False) -> dict[str, str] | None:
    """Return what Lance is told to read and write there; never credentials."""
    if not is_remote(name):
        return None
    plain = {"allow_http": "true"} if _endpoint().startswith("http://") else {}
    return {**plain, **(_PATIENCE if patient else {})}


#: How often Lance repeats a request that was refused for a while: half a minute to two.
_PATIENCE = {"client_max_retries": "12", "client_retry_timeout": "180"}
_ATTEMPTS = 12
_AZURE = ("account_name", "account_key")


def _endpoint() -> str:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((value for name in names if (value := os.environ.get(name))), "")


def _s3(bucket: str, patient: bool) -> Any:
    """Return S3 by the names in the environment that Arrow does not read itself."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    retries = fs.AwsStandardS3RetryStrategy(_ATTEMPTS if patient else 3)
    place, endpoint = {"retry_strategy": retries}, _endpoint()
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        place |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
    elif not region:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(region=region or "us-east-1", **place)
