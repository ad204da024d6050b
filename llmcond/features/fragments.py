"""The rows of a feature store: their columns, the fragments that hold them, and merging these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from llmcond.encoders.spec import EncoderInput
from llmcond.features.keys import KEY_BYTES, StoreDtype

if TYPE_CHECKING:
    from llmcond.encoders.spec import Encoded

_KEY = pa.binary(KEY_BYTES)
_ARROW = {"float16": pa.float16(), "float32": pa.float32()}

#: The number of fragments that are merged into one. Every commit adds a fragment, and many
#: fragments slow down later commits.
_MERGED_FRAGMENTS = 32
#: Fragments are merged only if the largest holds at most this fraction (1 / 8) of their rows, so
#: that a row is rewritten rarely.
_LARGEST_PART = 8
#: A fragment of this many rows or bytes is not merged again: rewriting it would take the committing
#: process longer than many encoding processes need to write such fragments.
_FULL_ROWS, _FULL_BYTES = 32_768, 2**25


class Fragment(NamedTuple):
    """Rows in a file that no version of the store refers to yet.

    Attributes:
        metadata: The metadata of Lance's fragment, as JSON.
        keys: The keys of its rows, in their order, 16 bytes each.
        dim: The size of a vector.
    """

    metadata: str
    keys: bytes
    dim: int


def row_bytes(dim: int, dtype: StoreDtype) -> float:
    """Return the bytes of a row: its vector, key, number of tokens, and a bit for truncation."""
    return dim * np.dtype(dtype).itemsize + KEY_BYTES + 4 + 1 / 8


def rows_schema(dim: int, dtype: str) -> pa.Schema:
    """Return the schema of a Lance dataset of vectors."""
    vector = pa.list_(_ARROW[dtype], dim)
    columns = {"key": _KEY, "vector": vector, "n_tokens": pa.int32(), "truncated": pa.bool_()}
    return pa.schema(columns)


def rows_table(inputs: Sequence[EncoderInput], encoded: Encoded) -> pa.Table:
    """Return the rows of inputs and their vectors, which already have the stored type."""
    vectors = encoded.vectors
    columns = [
        pa.array([item.key for item in inputs], _KEY),
        pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1]),
        pa.array(encoded.n_tokens, pa.int32()),
        pa.array(encoded.truncated, pa.bool_()),
    ]
    return pa.table(columns, rows_schema(vectors.shape[1], vectors.dtype.name))


def mergeable(rows: Sequence[int], row_bytes: float) -> int:
    """Return how many of the last fragments to merge, given the rows of each; 0: none."""
    best = total = largest = 0
    for count, size in enumerate(reversed(rows), start=1):
        if size >= _FULL_ROWS or size * row_bytes >= _FULL_BYTES:
            break
        total += size
        largest = max(largest, size)
        if count >= _MERGED_FRAGMENTS and largest * _LARGEST_PART <= total:
            best = count
    return best
