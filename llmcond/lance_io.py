"""Lance datasets: opened, written, committed and tidied so that nothing is lost or doubled.

Lance lets two appends that know nothing of each other both succeed. Ours do not: a commit replaces
the first fragment by itself, and Lance refuses two that change one fragment at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from llmcond.errors import disk_full_error
from llmcond.object_stores import is_remote

if TYPE_CHECKING:
    from lance.fragment import FragmentMetadata

#: What Lance and Arrow raise for files that are gone, or damaged.
UNREADABLE = (OSError, ValueError, KeyError)
#: Versions kept for those who read them. Fewer than a store's commits between two merges: what a
#: merge replaced is removed at the next one.
_KEPT_VERSIONS = 16
#: What a kill leaves of a transaction or a version that Lance was writing.
_STAGED = re.compile(r"\.tmp\w+|.+\.manifest#\d+")
#: Bounds the memory that merging takes.
_MERGE_BATCH = 1_024


def newest(uri: str, options: dict[str, str] | None = None) -> Any:
    """Return the newest version of a dataset; None where nothing was committed yet."""
    import lance

    remote = is_remote(uri)
    # A folder without a manifest is what a kill before the first commit leaves.
    if not remote and not any(Path(uri, "_versions").glob("*.manifest")):
        return None
    try:
        return lance.dataset(uri, storage_options=options)
    except ValueError as error:
        # A bucket that is not there is "404 Not Found", with a code of its own.
        if remote and "was not found: Not found" in str(error) and "<Code>" not in str(error):
            return None
        raise


@contextmanager
def without_panic() -> Iterator[None]:
    """Raise a ValueError where Lance's Rust code panics over a damaged file."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which cannot be imported
            raise
        raise ValueError(str(error)) from error


class PreemptedError(Exception):
    """Someone else has committed since the version that a commit was based on."""


class Target(NamedTuple):
    """A dataset: where it is, Lance's storage options, its newest known version if any."""

    uri: str
    options: dict[str, str] | None
    dataset: Any = None

    def write(self, rows: pa.Table) -> FragmentMetadata:
        """Write rows, at least one, into a file that no version names.

        Raises:
            OSError: no room.
        """
        from lance.fragment import LanceFragment

        if self.dataset is not None:
            return self._append(rows)[0]
        fragment = LanceFragment.create(self.uri, rows, storage_options=self.options)
        return self._complete([fragment])[0]

    def _append(self, rows: Any) -> list[FragmentMetadata]:
        from lance.fragment import write_fragments

        return self._complete(
            write_fragments(rows, self.dataset, mode="append", storage_options=self.options)
        )

    def _complete(self, fragments: list[FragmentMetadata]) -> list[FragmentMetadata]:
        """Return fragments whose files are complete: Lance does not notice if the end is cut."""
        if not is_remote(self.uri):
            for file in (file for fragment in fragments for file in fragment.files):
                if Path(self.uri, "data", file.path).stat().st_size != file.file_size_bytes:
                    raise disk_full_error()
        return fragments

    def create(self, schema: pa.Schema, fragments: Sequence[FragmentMetadata]) -> Any:
        """Return the first version, of these fragments.

        Raises:
            PreemptedError: there is one.
        """
        import lance

        try:
            return self._commit(self.uri, lance.LanceOperation.Overwrite(schema, fragments), None)
        except OSError as error:  # someone was first while we looked
            if any(said in str(error) for said in ("already exists", "_versions/0.manifest")):
                raise PreemptedError from error
            raise

    def commit(self, fragments: Sequence[FragmentMetadata], removed: Sequence[int] = ()) -> Any:
        """Return a version with fragments behind the others, some of which are removed.

        Raises:
            PreemptedError: the dataset is not the newest version.
        """
        import lance

        first = self.dataset.get_fragments()[:1]
        kept = [own.metadata for own in first if own.fragment_id not in removed]
        operation = lance.LanceOperation.Update(
            removed_fragment_ids=list(removed), updated_fragments=kept, new_fragments=fragments
        )
        return self._commit(self.dataset, operation, self.dataset.version)

    def _commit(self, base: Any, operation: Any, version: int | None) -> Any:
        from lance import LanceDataset
        from lance.commit import CommitConflictError

        try:
            return LanceDataset.commit(
                base, operation, version, storage_options=self.options, max_retries=0
            )
        except CommitConflictError as error:
            raise PreemptedError from error

    def merge_last(self, count: int) -> Any:
        """Return a version in which the last fragments are one; every row keeps its place.

        Raises:
            PreemptedError: the dataset is not the newest version.
        """
        last = self.dataset.get_fragments()[-count:]
        rows = self.dataset.scanner(fragments=last, batch_size=_MERGE_BATCH, batch_readahead=4)
        merged = self._append(rows.to_reader())
        return self.commit(merged, [own.fragment_id for own in last])


def clean(uri: str, dataset: Any, *, alone: bool) -> None:
    """Remove old versions of a dataset, which is None where nothing was committed yet.

    ``alone`` says that nobody else writes: what no version names, as kills leave it, is removed
    too. Otherwise Lance removes it after some days.
    """
    if dataset is not None:
        dataset.cleanup_old_versions(retain_versions=_KEPT_VERSIONS, delete_unverified=alone)
    # Lance's own clean-up passes over files of the metadata that was being written.
    for name in ("_transactions", "_versions") if alone else ():
        for path in Path(uri, name).glob("*"):
            if _STAGED.fullmatch(path.name):
                path.unlink(missing_ok=True)
