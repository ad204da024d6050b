"""Reading, writing, committing and cleaning Lance datasets without losing rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from llmcond.errors import LlmcondError, UserError, disk_full_error, shortened_repr
from llmcond.object_stores import is_remote
from llmcond.text import check_characters

if TYPE_CHECKING:
    from lance.fragment import FragmentMetadata

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
        if reason := _column_name_problem(name, previous):
            raise UserError(
                f"the column name {shortened_repr(name)} {reason}, so it cannot be stored. "
                "Rename the column."
            )
        previous.add(name)


def _column_name_problem(name: str, previous: set[str]) -> str | None:
    """Return why Lance cannot hold a column, as a predicate; None if it can."""
    try:
        check_characters(name)
    except ValueError as error:
        return str(error)
    if not name.strip():
        return "is empty"
    if name in previous:
        return "occurs twice"
    if name in _RESERVED_COLUMNS:
        return "is reserved"
    forbidden = next((c for c in ".`" if c in name), None)
    return forbidden and f"contains {forbidden!r}"


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


def commit_first(
    uri: str,
    options: dict[str, str] | None,
    schema: pa.Schema,
    fragments: Sequence[FragmentMetadata],
) -> Any:
    """Commit fragments as the first version of a dataset, and return it.

    Raises:
        PreemptedError: the dataset has a version already.
    """
    import lance

    try:
        return _commit(uri, lance.LanceOperation.Overwrite(schema, fragments), options, None)
    except OSError as error:  # Another process may have committed in the meantime.
        if any(text in str(error) for text in ("already exists", "_versions/0.manifest")):
            raise PreemptedError from error
        raise


def commit_rows(
    dataset: Any,
    options: dict[str, str] | None,
    fragments: Sequence[FragmentMetadata],
    removed: Sequence[int] = (),
) -> Any:
    """Append and remove fragments of a dataset, and return the new version.

    Lance would let two concurrent commits both succeed, and then the order of rows could change. So
    each commit also updates the first fragment without a change, and Lance rejects one of two
    concurrent commits that update the same fragment.

    Args:
        dataset: newest known version.
        options: Lance's storage options.
        fragments: fragments to append.
        removed: ids of fragments to remove.

    Raises:
        PreemptedError: ``dataset`` is not the newest version.
    """
    import lance

    first = dataset.get_fragments()[:1]
    updated = [fragment.metadata for fragment in first if fragment.fragment_id not in removed]
    operation = lance.LanceOperation.Update(
        removed_fragment_ids=list(removed), updated_fragments=updated, new_fragments=fragments
    )
    return _commit(dataset, operation, options, dataset.version)


def _commit(base: Any, operation: Any, options: dict[str, str] | None, version: int | None) -> Any:
    from lance import LanceDataset
    from lance.commit import CommitConflictError

    try:
        return LanceDataset.commit(base, operation, version, storage_options=options, max_retries=0)
    except CommitConflictError as error:
        raise PreemptedError from error


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
    return commit_rows(dataset, options, merged, [fragment.fragment_id for fragment in last])


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
