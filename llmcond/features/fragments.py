"""Fragments of a Lance dataset: files of rows, committed so that nothing is lost or doubled.

Lance lets two appends that know nothing of each other both succeed. Ours do not: a commit replaces
the first fragment by itself, and Lance refuses two that change one fragment at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from lance.commit import CommitConflictError
from lance.fragment import FragmentMetadata, LanceFragment, write_fragments
from numpy.typing import NDArray

from llmcond.encoders.spec import EncoderInput
from llmcond.features.keys import KEY_BYTES, StoreDtype

_KEY = pa.binary(KEY_BYTES)
_ARROW = {"float16": pa.float16(), "float32": pa.float32()}

#: Every commit adds a fragment, which slows down later ones: so many are merged into one,
_MERGED_FRAGMENTS = 32
#: where none of them holds more than a part in so many, so that a row is rewritten rarely,
_LARGEST_PART = 8
#: or already holds so many rows, or bytes: to rewrite large ones takes who commits longer than
#: many who encode take to write them.
_FULL_ROWS, _FULL_BYTES = 32_768, 2**25
#: What a kill leaves of a transaction or a version that Lance was writing.
_STAGED = re.compile(r"\.tmp\w+|.+\.manifest#\d+")
#: Bounds the memory that merging takes.
_MERGE_BATCH = 1_024


class Fragment(NamedTuple):
    """Rows in a file that no version of a store names yet.

    Attributes:
        metadata: of Lance's fragment, as JSON.
        keys: of its rows, in their order, 16 bytes each.
        dim: numbers in a vector.
    """

    metadata: str
    keys: bytes
    dim: int


def row_bytes(dim: int, dtype: StoreDtype) -> float:
    """Return how many bytes a row takes: its vector, key, number of tokens, and a bit."""
    return dim * np.dtype(dtype).itemsize + KEY_BYTES + 4 + 1 / 8


def rows_schema(dim: int, dtype: str) -> pa.Schema:
    """Return the columns of a dataset of vectors."""
    vector = pa.list_(_ARROW[dtype], dim)
    columns = {"key": _KEY, "vector": vector, "n_tokens": pa.int32(), "truncated": pa.bool_()}
    return pa.schema(columns)


def rows_table(
    inputs: Sequence[EncoderInput],
    vectors: NDArray[Any],
    n_tokens: NDArray[np.int32],
    truncated: NDArray[np.bool_],
) -> pa.Table:
    """Return rows of inputs with their vectors, (n, dim), in the type they are stored in."""
    keys = [
        item.key_when_cut if cut else item.key
        for item, cut in zip(inputs, truncated.tolist(), strict=True)
    ]
    schema = rows_schema(vectors.shape[1], vectors.dtype.name)
    columns = [
        pa.array(keys, _KEY),
        pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1]),
        pa.array(n_tokens, pa.int32()),
        pa.array(truncated, pa.bool_()),
    ]
    return pa.table(columns, schema)


class PreemptedError(Exception):
    """Someone else has committed since the version that a commit was based on."""


class Target(NamedTuple):
    """A dataset: where it is, what Lance is told for it, its newest known version if any."""

    uri: str
    options: dict[str, str] | None
    dataset: Any = None

    def write(self, rows: pa.Table) -> FragmentMetadata:
        """Write rows, at least one, into a file that no version names."""
        if self.dataset is None:
            return LanceFragment.create(self.uri, rows, storage_options=self.options)
        return self._append(rows)[0]

    def _append(self, rows: Any) -> list[FragmentMetadata]:
        written: list[FragmentMetadata] = write_fragments(
            rows, self.dataset, mode="append", storage_options=self.options
        )
        return written

    def create(self, schema: pa.Schema, fragments: Sequence[FragmentMetadata]) -> Any:
        """Return the first version, of these fragments.

        Raises:
            PreemptedError: there is one.
        """
        operation = lance.LanceOperation.Overwrite(schema, fragments)
        try:
            return lance.LanceDataset.commit(
                self.uri, operation, storage_options=self.options, max_retries=0
            )
        except (CommitConflictError, OSError) as error:
            # In the second case someone was first while we looked.
            if isinstance(error, CommitConflictError) or any(
                said in str(error) for said in ("already exists", "_versions/0.manifest")
            ):
                raise PreemptedError from error
            raise

    def commit(self, fragments: Sequence[FragmentMetadata], removed: Sequence[int] = ()) -> Any:
        """Return a version with fragments behind the others, some of which are removed.

        Raises:
            PreemptedError: the dataset is not the newest version.
        """
        first = self.dataset.get_fragments()[:1]
        kept = [own.metadata for own in first if own.fragment_id not in removed]
        operation = lance.LanceOperation.Update(
            removed_fragment_ids=list(removed), updated_fragments=kept, new_fragments=fragments
        )
        try:
            return lance.LanceDataset.commit(
                self.dataset,
                operation,
                read_version=self.dataset.version,
                storage_options=self.options,
                max_retries=0,
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


def remove_staged_files(folder: Path) -> None:
    """Remove what killed processes left of a dataset's metadata that they were writing.

    Lance's own clean-up passes over these files. Nobody may be committing.
    """
    for name in ("_transactions", "_versions"):
        for path in (folder / name).glob("*"):
            if _STAGED.fullmatch(path.name):
                path.unlink(missing_ok=True)


def mergeable(rows: Sequence[int], row_bytes: float) -> int:
    """Return how many of the last fragments, with so many rows each, are to be merged; 0: none."""
    best = total = largest = 0
    for count, size in enumerate(reversed(rows), start=1):
        if size >= _FULL_ROWS or size * row_bytes >= _FULL_BYTES:
            break
        total += size
        largest = max(largest, size)
        if count >= _MERGED_FRAGMENTS and largest * _LARGEST_PART <= total:
            best = count
    return best
