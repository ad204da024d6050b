"""Object stores (S3, Google Cloud Storage, Azure), and Lance's datasets in them or in folders.

This module sets up both libraries that read and write them, Arrow and Lance. A URI names a bucket
and a path. Credentials and endpoints come only from the environment, and appear in no message and
no record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import pyarrow as pa
from pyarrow import fs

from llmcond.base.errors import (
    LlmcondError,
    UserError,
    did_you_mean,
    disk_full_error,
    first_line,
    shortened_repr,
)
from llmcond.base.files import expand_home
from llmcond.base.text import check_characters

if TYPE_CHECKING:
    from lance.fragment import FragmentMetadata

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
        return fs.LocalFileSystem(), str(expand_home(name.removeprefix("file://")).absolute())
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


#: Errors that Lance and Arrow raise for missing or damaged files.
READ_ERRORS = (OSError, ValueError, KeyError)
#: Number of versions that are kept for concurrent readers. A store makes more commits between two
#: merges, so that the next merge removes what the last one replaced.
_RETAINED_VERSIONS = 16
#: Names of the files that a killed process leaves of a transaction or version being written.
_STAGED = re.compile(r"\.tmp\w+|.+\.manifest#\d+")
#: Number of rows per batch of a merge, which bounds its memory.
_MERGE_BATCH = 1_024
#: Names that have a meaning of their own in Lance: columns that it adds, and all columns.
_RESERVED_COLUMNS = (
    "_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version",
    "__action", "*",
)  # fmt: skip


def check_lance_column_names(names: Iterable[str]) -> None:
    """Check that a Lance dataset can hold columns of these names.

    Lance writes some of the other names without an error, and then cannot read the dataset.

    Raises:
        UserError: a name is empty, occurs twice, has a meaning of its own in Lance, or
            contains a full stop, a back quote, NUL or half of a surrogate pair.
    """
    previous: set[str] = set()
    for name in names:
        reason = ""
        try:
            check_characters(name)
        except ValueError as error:
            reason = str(error)
        forbidden = next((c for c in ".`" if c in name), None)
        if not name.strip():
            reason = "is empty"
        elif name in previous:
            reason = "occurs twice"
        elif name in _RESERVED_COLUMNS:
            reason = "is reserved"
        elif forbidden:
            reason = f"contains {forbidden!r}"
        if reason:
            raise UserError(
                f"the column name {shortened_repr(name)} {reason}, so it cannot be stored. "
                "Rename the column."
            )
        previous.add(name)


_user_process: int | None = None  # that has used Lance first


def check_not_forked() -> None:
    """Check that Lance can be used, which hangs or crashes in a process that lost its threads.

    Raises:
        LlmcondError: this process was forked from one that has used Lance.
    """
    global _user_process  # noqa: PLW0603 - it belongs to the process
    if _user_process is None:
        _user_process = os.getpid()
    if _user_process != os.getpid():
        raise LlmcondError(
            "this process was forked from one that has used an index or stored features, whose "
            "library (Lance) does not work after a fork. Start processes with "
            "multiprocessing.get_context('spawn') or 'forkserver', or open the index only after "
            "the fork (gunicorn without --preload)."
        )


def open_newest(uri: str, options: dict[str, str] | None = None) -> Any:
    """Return the newest version of a dataset; None if nothing has been committed yet.

    Raises:
        OSError, ValueError, KeyError: the dataset cannot be read (``READ_ERRORS``).
    """
    check_not_forked()
    import lance

    remote = is_remote(uri)
    # A process that is killed before its first commit leaves a folder without a manifest.
    if not remote and not any(Path(uri, "_versions").glob("*.manifest")):
        return None
    try:
        with convert_panics():
            return lance.dataset(uri, storage_options=options)
    except ValueError as error:
        # A missing bucket is also reported as "404 Not Found", but with a <Code>.
        if remote and "was not found: Not found" in str(error) and "<Code>" not in str(error):
            return None
        raise


@contextmanager
def convert_panics() -> Iterator[None]:
    """Raise a ValueError if Lance's Rust code panics because of a damaged file."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # This class cannot be imported.
            raise
        raise ValueError(str(error)) from error


class PreemptedError(Exception):
    """Another process has committed since the version that a commit was based on."""


def write_rows(
    uri: str, options: dict[str, str] | None, dataset: Any, rows: Any
) -> list[FragmentMetadata]:
    """Write rows, a table or batches, into files that belong to no version yet.

    Args:
        uri: folder or URI of the dataset.
        options: Lance's storage options.
        dataset: newest known version; None if there is none.
        rows: one or more rows.

    Raises:
        OSError: the disk is full.
    """
    from lance.fragment import LanceFragment, write_fragments

    if dataset is None:
        fragments = [LanceFragment.create(uri, rows, storage_options=options)]
    else:
        fragments = write_fragments(rows, dataset, mode="append", storage_options=options)
    if not is_remote(uri):
        # Lance does not notice that the end of a file could not be written.
        for file in (file for fragment in fragments for file in fragment.files):
            if Path(uri, "data", file.path).stat().st_size != file.file_size_bytes:
                raise disk_full_error()
    return fragments


def commit_rows(
    uri: str,
    options: dict[str, str] | None,
    dataset: Any,
    fragments: Sequence[FragmentMetadata],
    schema: pa.Schema,
    removed: Sequence[int] = (),
) -> Any:
    """Append and remove fragments of a dataset, and return the new version.

    Lance would let two concurrent commits both succeed, and then the order of rows could change. So
    each commit also updates the first fragment without a change, and Lance rejects one of two
    concurrent commits that update the same fragment.

    Args:
        uri: folder or URI of the dataset.
        options: Lance's storage options.
        dataset: newest known version; None if there is none.
        fragments: fragments to append.
        schema: schema of a dataset without a version.
        removed: ids of fragments to remove.

    Raises:
        PreemptedError: ``dataset`` is not the newest version.
    """
    from lance import LanceDataset, LanceOperation
    from lance.commit import CommitConflictError

    operation: Any = LanceOperation.Overwrite(schema, fragments)
    if dataset is not None:
        first = dataset.get_fragments()[:1]
        updated = [fragment.metadata for fragment in first if fragment.fragment_id not in removed]
        operation = LanceOperation.Update(
            removed_fragment_ids=list(removed), updated_fragments=updated, new_fragments=fragments
        )
    base, version = (uri, None) if dataset is None else (dataset, dataset.version)
    try:
        return LanceDataset.commit(base, operation, version, storage_options=options, max_retries=0)
    except CommitConflictError as error:
        raise PreemptedError from error
    except OSError as error:  # another process may have committed the first version meanwhile
        texts = ("already exists", "_versions/0.manifest")
        if dataset is None and any(text in str(error) for text in texts):
            raise PreemptedError from error
        raise


def merge_last(uri: str, options: dict[str, str] | None, dataset: Any, count: int) -> Any:
    """Merge the last ``count`` fragments into one, and return the new version.

    The order of the rows does not change, unlike with Lance's own compaction if another process
    appends meanwhile.

    Raises:
        PreemptedError: ``dataset`` is not the newest version.
    """
    last = dataset.get_fragments()[-count:]
    rows = dataset.scanner(fragments=last, batch_size=_MERGE_BATCH, batch_readahead=4)
    merged = write_rows(uri, options, dataset, rows.to_reader())
    removed = [fragment.fragment_id for fragment in last]
    return commit_rows(uri, options, dataset, merged, dataset.schema, removed)


def clean_up(uri: str, dataset: Any, *, alone: bool) -> None:
    """Remove old versions of a dataset.

    Args:
        uri: folder or URI of the dataset.
        dataset: its newest version; None if nothing has been committed yet.
        alone: whether no other process writes. If so, files that belong to no version, which
            killed processes leave, are removed too. Otherwise Lance removes them after some days.
    """
    if dataset is not None:
        dataset.cleanup_old_versions(retain_versions=_RETAINED_VERSIONS, delete_unverified=alone)
    # Lance's clean-up skips metadata files whose writing was interrupted.
    for name in ("_transactions", "_versions") if alone else ():
        for path in Path(uri, name).glob("*"):
            if _STAGED.fullmatch(path.name):
                path.unlink(missing_ok=True)
