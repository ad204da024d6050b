"""Feature store: (encoder identity, input) -> vector, on Lance.

One folder an encoder fingerprint and number type. What is in it is complete: rows are added in
chunks that commit atomically, under a lock that the operating system releases when a process
dies, so that two processes never add the same input twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from llmcond.encoders.spec import EncoderIdentity, EncoderInput
from llmcond.errors import DiskFullError, UserError, is_disk_full
from llmcond.files import check_format, read_json, write_json

StoreDtype = Literal["float16", "float32"]
FORMAT = 1

_KEY = pa.binary(16)
_ARROW = {"float16": pa.float16(), "float32": pa.float32()}
#: Rows read at a time: bounds the memory of a read beside its result.
_READ_ROWS = 65_536


class FeatureStore:
    """The vectors of one encoder identity, in a folder.

    Attributes:
        folder: where it lies.
        identity: the encoder whose vectors it holds.
        dtype: the type vectors are stored in.
    """

    def __init__(self, root: Path, identity: EncoderIdentity, dtype: StoreDtype) -> None:
        """Open the store below ``root``, or start an empty one; nothing is written yet.

        Raises:
            UserError: it was written by a newer version.
        """
        self.folder = root / f"{identity.fingerprint}-{dtype}"
        self.identity = identity
        self.dtype = dtype
        # Absolute: in a relative one with a colon Lance sees the name of a storage service.
        self._uri = str(self.folder.absolute() / "vectors.lance")
        self._dataset: Any = None
        self._keys = pa.array([], _KEY)
        description = self.folder / "store.json"
        if description.exists():
            check_format(read_json(description), FORMAT, str(self.folder))
        self.refresh()

    def __len__(self) -> int:
        return len(self._keys)

    def refresh(self) -> None:
        """See what other processes have added since."""
        if self._dataset is None:
            # A folder without a manifest is what a kill before the first commit leaves.
            if not (self.folder / "vectors.lance" / "_versions").is_dir():
                return
            self._dataset = lance.dataset(self._uri)
        else:
            self._dataset.checkout_latest()
        # Rows are only ever appended, so what is new stands behind what is known.
        fresh = self._dataset.to_table(columns=["key"], offset=len(self._keys))["key"]
        self._keys = pa.concat_arrays([self._keys, *fresh.chunks])

    def missing(self, inputs: Sequence[EncoderInput]) -> list[int]:
        """Return the positions of the inputs that the store does not hold."""
        places = self._places(inputs)
        return [int(i) for i in np.flatnonzero(places < 0)]

    def _places(self, inputs: Sequence[EncoderInput]) -> NDArray[np.int64]:
        wanted = pa.array([item.key for item in inputs], _KEY)
        places = pc.index_in(wanted, value_set=self._keys)
        found: NDArray[np.int64] = pc.fill_null(places, -1).to_numpy().astype(np.int64)
        return found

    def append(
        self,
        inputs: Sequence[EncoderInput],
        vectors: NDArray[np.float32],
        n_tokens: NDArray[np.int32],
        truncated: NDArray[np.bool_],
    ) -> int:
        """Add inputs in one commit, leaving out those that are there by now.

        Args:
            inputs: n distinct inputs.
            vectors: (n, dim), finite in the store's type.
            n_tokens: (n,) before truncation.
            truncated: (n,)

        Returns:
            How many were added.

        Raises:
            DiskFullError: no room; what was stored before is kept.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / "commit.lock"):
                self.refresh()
                fresh = self.missing(inputs)
                if fresh:
                    keys = [inputs[i].key for i in fresh]
                    table = _table(
                        keys, self.cast(vectors[fresh]), n_tokens[fresh], truncated[fresh]
                    )
                    self._commit(table)
        except Exception as error:
            if is_disk_full(error):
                raise DiskFullError(
                    f"the disk is full: {self.folder} cannot grow. Free some space and run the "
                    f"same command again; the {len(self):,} features already stored are kept."
                ) from error
            if isinstance(error, PermissionError):
                raise UserError(f"{self.folder} cannot be written: {error.strerror}.") from error
            raise
        return len(fresh)

    def _commit(self, table: pa.Table) -> None:
        description = self.folder / "store.json"
        if not description.exists():
            identity = self.identity.to_json()
            write_json(description, {"format": FORMAT, "dtype": self.dtype, "encoder": identity})
        mode = "create" if self._dataset is None else "append"
        self._dataset = lance.write_dataset(table, self._uri, mode=mode)
        self._keys = pa.concat_arrays([self._keys, table["key"].combine_chunks()])

    def cast(self, vectors: NDArray[np.float32]) -> NDArray[Any]:
        """Return vectors in the store's type; what does not fit becomes infinite."""
        with np.errstate(over="ignore"):
            return vectors.astype(self.dtype)

    def read(self, inputs: Sequence[EncoderInput]) -> NDArray[np.float32]:
        """Return the vectors of inputs, (n, dim) in float32, in their order.

        Raises:
            UserError: some are not there.
        """
        places = self._found(inputs)
        blocks = [
            self._vectors(places[start : start + _READ_ROWS])
            for start in range(0, len(places), _READ_ROWS)
        ]
        return np.concatenate(blocks) if blocks else np.zeros((0, 0), dtype=np.float32)

    def _vectors(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        # Ascending places read the files front to back; the wanted order is restored after.
        distinct, inverse = np.unique(places, return_inverse=True)
        column = self._dataset.take(distinct, columns=["vector"])["vector"].combine_chunks()
        flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
        vectors: NDArray[np.float32] = flat.reshape(len(distinct), -1)[inverse]
        return vectors

    def count_truncated(self, inputs: Sequence[EncoderInput]) -> int:
        """Count the inputs that were longer than the encoder takes.

        Raises:
            UserError: some are not there.
        """
        if not inputs:
            return 0
        truncated = self._dataset.to_table(columns=["truncated"])["truncated"].to_numpy()
        return int(truncated[self._found(inputs)].sum())

    def _found(self, inputs: Sequence[EncoderInput]) -> NDArray[np.int64]:
        places = self._places(inputs)
        absent = int((places < 0).sum())
        if absent:
            raise UserError(
                f"{absent:,} of {len(places):,} features are not there: the extraction did not "
                "finish. Run the same `llmcond extract` again; it resumes where it stopped."
            )
        return places

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Try to become the one process that works on a part; yield whether it succeeded.

        A part that another process works on is better left to it. The claim ends with the block
        or with the process, however it ends.
        """
        claims = self.folder / "claims"
        claims.mkdir(parents=True, exist_ok=True)
        lock = FileLock(claims / f"{name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def _table(
    keys: list[bytes],
    vectors: NDArray[Any],
    n_tokens: NDArray[np.int32],
    truncated: NDArray[np.bool_],
) -> pa.Table:
    flat = pa.array(vectors.reshape(-1), _ARROW[str(vectors.dtype)])
    columns = {
        "key": pa.array(keys, _KEY),
        "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
        "n_tokens": pa.array(n_tokens, pa.int32()),
        "truncated": pa.array(truncated, pa.bool_()),
    }
    return pa.table(columns)
