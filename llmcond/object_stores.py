"""Object stores: Amazon S3 and compatible servers, Google Cloud Storage, and Azure.

This module sets up both libraries that read and write them, Arrow and Lance. A URI names a bucket
and a path. Credentials and endpoints come only from the environment, and appear in no message and
no record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from pyarrow import fs

from llmcond.errors import LlmcondError, UserError, did_you_mean, first_line

#: Number of attempts per request to a store that rejects requests for a while, as under load. Lance
#: retries for half a minute to two minutes, because its pauses grow to 15 seconds. The default of 3
#: attempts, a few seconds in all, suffices to find out that a server cannot be reached.
_PATIENCE = {"client_max_retries": "12", "client_retry_timeout": "180"}
_ATTEMPTS, _PATIENT_ATTEMPTS = 3, 12


def is_remote(name: str) -> bool:
    """Return whether a name is a URI that does not name a local file."""
    return "://" in name and not name.startswith("file://")


def split_uri(uri: str) -> SplitResult:
    """Return the parts of an object store's URI.

    Raises:
        UserError: the scheme is unknown, or the URI does not consist of a bucket and a path.
    """
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise UserError(f"{uri.partition('://')[0]}://... is not a valid URI: {error}.") from None
    if parts.scheme not in STORES:
        expected = ", ".join(f"{scheme}://" for scheme in STORES)
        near = did_you_mean(parts.scheme, STORES)
        raise UserError(
            f"llmcond does not support {parts.scheme}:// storage; expected "
            f"{expected}, file:/// or a folder. {near}".strip()
        )
    form = f"{parts.scheme}://BUCKET/PATH"
    if parts.username is not None or parts.query or parts.fragment:
        raise UserError(
            f"{parts.scheme}://... contains credentials or options; expected {form}. Credentials "
            "are read from the environment, and recorded nowhere. "
            f"Set {STORES[parts.scheme].settings}."
        )
    if "://" not in uri or not parts.netloc:
        raise UserError(f"{uri} names no bucket; expected {form}.")
    return parts


def open_filesystem(name: str, *, patient: bool = False) -> tuple[Any, str]:
    """Return Arrow's file system for a path or URI, and the path in it.

    Args:
        name: a path or URI.
        patient: whether to retry rejected requests for minutes, because the store was reached
            before.

    Raises:
        UserError: the URI is invalid, or the environment lacks settings of the store.
    """
    if not is_remote(name):
        return fs.LocalFileSystem(), str(Path(name.removeprefix("file://")).expanduser().absolute())
    parts = split_uri(name)
    try:
        filesystem = STORES[parts.scheme].filesystem(parts.netloc, patient)
    except (OSError, ValueError, TypeError, ImportError) as error:  # Arrow's errors are among them.
        raise UserError(f"{name} cannot be opened: {describe_failure(name, error)}") from error
    return filesystem, (parts.netloc + parts.path).rstrip("/")


def lance_options(name: str, *, patient: bool = False) -> dict[str, str] | None:
    """Return Lance's storage options, which never contain credentials; None for a local path.

    ``open_filesystem`` describes the arguments.
    """
    if not is_remote(name):
        return None
    http = STORES[urlsplit(name).scheme].endpoint.startswith("http://")
    return {**({"allow_http": "true"} if http else {}), **(_PATIENCE if patient else {})}


def describe_failure(name: str, error: BaseException) -> str:
    """Return the message for an error about a path or URI, without secrets, and with advice."""
    advice = (
        " Check that the bucket exists, and that the environment has its credentials and endpoint "
        "(docs/object-stores.md)."
    )
    return f"{redact(error)}.{advice if is_remote(name) else ''}"


#: Parts of messages that are hidden: URLs, which may be signed, answers of servers, request ids,
#: and source lines of Rust code.
_HIDDEN = re.compile(
    r"(<\?xml|<Error).*|\w+://\S+|\?\S*|\(Request ID: [^)]*\)|, /\S+:\d+:\d+|LanceError\(IO\): "
)


def redact(error: BaseException) -> str:
    """Return the first line of an error, without keys and signatures that a server may repeat."""
    return _HIDDEN.sub("", first_line(error)).strip(" .:")


def user_error_of(uri: str, error: BaseException) -> LlmcondError | None:
    """Return an error for users if Lance could not reach a store, or the store denied a request.

    Returns None for any other error. The message repeats only the code of the server's answer.
    """
    text, parts = str(error), urlsplit(uri)
    settings = STORES[parts.scheme].settings
    code, status = _match(r"<Code>(\w+)</Code>", text), _match(r"status code: (\d{3})", text)
    if code in _NO_BUCKET:
        return UserError(
            f"there is no bucket {parts.scheme}://{parts.netloc}. Create it, or check {settings}: "
            "it may be on another server."
        )
    problem = ""
    if re.search(r"credential|token request|account name", text, re.IGNORECASE):
        problem = "no credentials were found."
    elif "resolve region" in text:
        problem = "the region of the bucket is unknown."
    elif status in ("401", "403") or code in _DENIED:
        problem = f"access was denied ({code or status})."
    if problem:
        return UserError(f"{uri}: {problem} Set {settings}.")
    advice = "Run the same command again later; stored results are kept."
    if "HTTP error" in text:
        return LlmcondError(f"{uri} cannot be reached. {advice} Check {settings}.")
    if status not in (None, "404"):
        return LlmcondError(f"{uri}: the store answered with {code or status}. {advice}")
    return None


_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName")
_DENIED = (
    "AccessDenied",
    "AuthenticationFailed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
)


def _match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match and match[1]


def _s3(bucket: str, patient: bool) -> Any:
    """Return Arrow's file system for S3; Arrow does not read all of its environment variables."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    retries = fs.AwsStandardS3RetryStrategy(_PATIENT_ATTEMPTS if patient else _ATTEMPTS)
    options, endpoint = {"retry_strategy": retries}, STORES["s3"].endpoint
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        options |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
    elif not region:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(region=region or "us-east-1", **options)


def _azure(bucket: str, patient: bool) -> Any:
    names = ("account_name", "account_key")
    return fs.AzureFileSystem(
        **{name: os.environ.get(f"AZURE_STORAGE_{name}".upper()) for name in names}
    )


class ObjectStore(NamedTuple):
    """A kind of object store.

    Attributes:
        settings: the environment variables that a user has to set, for messages.
        filesystem: function that creates Arrow's file system from a bucket and ``patient``.
        endpoints: environment variables that can name another server; the first that is set
            applies.
    """

    settings: str
    filesystem: Callable[[str, bool], Any]
    endpoints: tuple[str, ...] = ()

    @property
    def endpoint(self) -> str:
        """Address of another server; empty if none is set."""
        return next((value for name in self.endpoints if (value := os.environ.get(name))), "")


#: The kinds of object stores by the scheme of their URIs.
STORES: Mapping[str, ObjectStore] = {
    "s3": ObjectStore(
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, and for a server other than "
        "Amazon's AWS_ENDPOINT_URL",
        _s3,
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    ),
    "gs": ObjectStore(
        "GOOGLE_APPLICATION_CREDENTIALS (the path of a service account's key file)",
        lambda bucket, _: fs.FileSystem.from_uri(f"gs://{bucket}")[0],
    ),
    "az": ObjectStore("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", _azure),
}
