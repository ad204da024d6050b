"""Object stores: Amazon S3 and servers that speak its protocol, Google's, and Azure's.

Both libraries that read and write there, Arrow and Lance, are set up here. A URI names a bucket
and a path. Credentials and endpoints come from the environment alone, and stand in no message and
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

#: How often a request is repeated that was refused for a while, as under load: by Lance for half a
#: minute to two, as waits grow to 15 seconds. The usual 3 times, a few seconds in all, suffice to
#: find out that a server is not there.
_PATIENCE = {"client_max_retries": "12", "client_retry_timeout": "180"}
_ATTEMPTS, _PATIENT_ATTEMPTS = 3, 12


def is_remote(name: str) -> bool:
    """Return whether a name is a URI of something else than this machine's files."""
    return "://" in name and not name.startswith("file://")


def split_uri(uri: str) -> SplitResult:
    """Return the parts of an object store's URI.

    Raises:
        UserError: no such kind of storage, or a URI that is not a bucket and a path alone.
    """
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise UserError(f"{uri.partition('://')[0]}://... is no URI: {error}.") from None
    if parts.scheme not in STORES:
        expected = ", ".join(f"{scheme}://" for scheme in STORES)
        near = did_you_mean(parts.scheme, STORES)
        raise UserError(
            f"{parts.scheme}:// is not a kind of storage that llmcond can use; expected "
            f"{expected}, file:/// or a folder. {near}".strip()
        )
    form = f"{parts.scheme}://BUCKET/PATH"
    if parts.username is not None or parts.query or parts.fragment:
        raise UserError(
            f"{parts.scheme}://... names credentials or options. Give {form} alone: credentials "
            "are read from the environment, and recorded nowhere. "
            f"Set {STORES[parts.scheme].settings}."
        )
    if "://" not in uri or not parts.netloc:
        raise UserError(f"{uri} names no bucket; expected {form}.")
    return parts


def open_filesystem(name: str, *, patient: bool = False) -> tuple[Any, str]:
    """Return Arrow's file system for a path or URI, and the path in it.

    ``patient``: it was reached before, so requests that it refuses for a while are repeated.

    Raises:
        UserError: as of :func:`split_uri`, or the environment lacks what the storage needs.
    """
    if not is_remote(name):
        return fs.LocalFileSystem(), str(Path(name.removeprefix("file://")).expanduser().absolute())
    parts = split_uri(name)
    try:
        filesystem = STORES[parts.scheme].filesystem(parts.netloc, patient)
    except (OSError, ValueError, TypeError, ImportError) as error:  # Arrow's own errors are such
        raise UserError(f"{name} cannot be opened: {failure(name, error)}") from error
    return filesystem, (parts.netloc + parts.path).rstrip("/")


def lance_options(name: str, *, patient: bool = False) -> dict[str, str] | None:
    """Return the storage options for Lance, never credentials; None for a local path.

    ``patient``: see :func:`open_filesystem`.
    """
    if not is_remote(name):
        return None
    http = STORES[urlsplit(name).scheme].endpoint.startswith("http://")
    return {**({"allow_http": "true"} if http else {}), **(_PATIENCE if patient else {})}


def failure(name: str, error: BaseException) -> str:
    """Return what an error says of a path or URI, without secrets, and what to check."""
    advice = (
        " See that the bucket is there, and that the environment has its credentials and endpoint "
        "(docs/scale.md)."
    )
    return f"{without_secrets(error)}.{advice if is_remote(name) else ''}"


#: Addresses, which may be signed, answers of servers, numbers of requests, and Rust's source lines.
_HIDDEN = re.compile(
    r"(<\?xml|<Error).*|\w+://\S+|\?\S*|\(Request ID: [^)]*\)|, /\S+:\d+:\d+|LanceError\(IO\): "
)


def without_secrets(error: BaseException) -> str:
    """Return the first line of an error without what a server may write of keys and signatures."""
    return _HIDDEN.sub("", first_line(error)).strip(" .:")


def refusal(uri: str, error: BaseException) -> LlmcondError | None:
    """Return the error for people where Lance could not reach a storage, or was refused.

    None where ``error`` is of another kind. The message repeats nothing of the server's answer but
    its code.
    """
    text, parts = str(error), urlsplit(uri)
    settings = STORES[parts.scheme].settings
    code, status = _match(r"<Code>(\w+)</Code>", text), _match(r"status code: (\d{3})", text)
    if code in _NO_BUCKET:
        return UserError(
            f"there is no bucket {parts.scheme}://{parts.netloc}. Make it, or check {settings}: it "
            "may be on another server."
        )
    wrong = ""
    if re.search(r"credential|token request|account name", text, re.IGNORECASE):
        wrong = "no credentials were found."
    elif "resolve region" in text:
        wrong = "nobody knows the region of the bucket."
    elif status in ("401", "403") or code in _DENIED:
        wrong = f"access was denied ({code or status})."
    if wrong:
        return UserError(f"{uri}: {wrong} Set {settings}.")
    again = "Run the same command again later; what was stored is kept."
    if "HTTP error" in text:
        return LlmcondError(f"{uri} cannot be reached. {again} Check {settings}.")
    if status not in (None, "404"):
        return LlmcondError(f"{uri}: the storage answers {code or status}. {again}")
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
    """Return S3's file system by the names in the environment that Arrow does not read itself."""
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
        settings: the environment variables that a user sets, for messages.
        filesystem: makes Arrow's file system for a bucket, patient or not.
        endpoints: environment variables that name another server; the first that is set counts.
    """

    settings: str
    filesystem: Callable[[str, bool], Any]
    endpoints: tuple[str, ...] = ()

    @property
    def endpoint(self) -> str:
        """Return the address of another server; empty if none is set."""
        return next((value for name in self.endpoints if (value := os.environ.get(name))), "")


#: Every kind of object store by the scheme of its URIs.
STORES: Mapping[str, ObjectStore] = {
    "s3": ObjectStore(
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, and for a server other than "
        "Amazon's AWS_ENDPOINT_URL",
        _s3,
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    ),
    "gs": ObjectStore(
        "GOOGLE_APPLICATION_CREDENTIALS, to the file of a service account",
        lambda bucket, _: fs.FileSystem.from_uri(f"gs://{bucket}")[0],
    ),
    "az": ObjectStore("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", _azure),
}
