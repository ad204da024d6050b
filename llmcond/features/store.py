"""Feature store: (encoder identity, input) -> vector, on Lance.

One folder an encoder fingerprint and number type. What is in it is complete: rows are added in
chunks that commit atomically, under a lock that the operating system releases when a process
dies, so that two processes never add the same input twice.

A row's place is its position among all rows, and stays the same for ever: rows are only added
behind the others, and merging small files keeps their order.
"""

from __future__ import annotations

import json
import math
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader
from lance.fragment import FragmentMetadata
from numpy.typing import NDArray

from llmcond.arrays import Gathered
from llmcond.encoders.settings import EncoderIdentity
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import LlmcondError, UserError, disk_full_error, is_disk_full
from llmcond.features.fragments import Fragment, mergeable, row_bytes, rows_schema, rows_table
from llmcond.features.keys import KEY_BYTES, KeyIndex, StoreDtype
from llmcond.features.location import (
    SPARE_BYTES,
    array_on_disk,
    claim,
    locate,
    locked,
    remove_abandoned_claims,
)
from llmcond.files import check_format
from llmcond.lance_io import UNREADABLE, PreemptedError, Target, clean, without_panic
from llmcond.log import log

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoded

__all__ = ["FeatureStore", "Fragment", "StoreDtype"]

FORMAT = 1

_Read = TypeVar("_Read")

#: Rows read at a time: bounds the memory of a read beside its result.
_READ_ROWS = 65_536

#: Larger tables of vectors are kept on disk.
_IN_MEMORY = 2**30

#: What claims of those who write fragments begin with.
_WRITING = "writing-"


class FeatureStore:
    """The vectors of one encoder identity, in a folder or below a URI.

    Several threads may use one object, several objects and processes one store.
    """

    def __init__(
        self,
        root: str | Path,
        identity: EncoderIdentity,
        dtype: StoreDtype,
        *,
        only_write: bool = False,
    ) -> None:
        """Open the store below ``root``, or start an empty one; nothing is written yet.

        ``root`` is a folder, or a URI such as s3://bucket/path. With ``only_write`` it serves
        :meth:`write_fragment` alone, and no keys are read.

        Raises:
            UserError: no such kind of storage, no such bucket, or no access to it.
            LlmcondError: it cannot be reached, or was damaged.
        """
        self._location = locate(root, f"{identity.fingerprint}-{dtype}")
        #: Of stores of all encoders: a URI, or a folder's absolute path.
        self.root = self._location.root
        #: For locks and temporary files; a store that is a folder is it.
        self.folder = self._location.folder
        self.identity = identity
        self.dtype = dtype
        # Always taken in this order: the threads' turn to write, commit.lock, what is known.
        self._writing = threading.Lock()
        self._known = threading.RLock()
        # Replaced as a whole, never changed: other threads may be reading from it.
        self._dataset: Any = None
        self._index = KeyIndex()
        self._truncated = np.zeros(0, dtype=np.bool_)
        self._is_alone = True
        # Perhaps: those of processes that were killed before.
        self._has_abandoned_claims = True
        newest = self._reading(self._location.newest)
        description = self._location.description(newest)
        if description is not None:
            check_format(description, FORMAT, self._location.name)
        if only_write:
            self._dataset = newest
        elif newest is not None:
            self._reading(lambda: self._adopt(newest))

    def __len__(self) -> int:
        with self._known:
            return len(self._index)

    def refresh(self) -> None:
        """See what other processes have added since."""
        self._reading(self._catch_up)

    def _catch_up(self) -> None:
        with self._known:
            if self._dataset is None or self._dataset.latest_version != self._dataset.version:
                newest = self._location.newest()
                if newest is not None:
                    self._adopt(newest)

    def _anew(self, attempt: Callable[[], _Read]) -> _Read:
        self._catch_up()
        return attempt()

    def _adopt(self, dataset: Any) -> None:
        """Go on with a version that is not older than the one known."""
        with self._known:
            known = len(self._index)
            if dataset.count_rows() > known:
                fresh = dataset.to_table(columns=["key", "truncated"], offset=known)
                truncated = fresh["truncated"].to_numpy()
                self._truncated = np.concatenate([self._truncated, truncated])
                self._index.add(b"".join(_key_bytes(chunk) for chunk in fresh["key"].chunks))
            self._dataset = dataset

    def _reading(self, attempt: Callable[[], _Read]) -> _Read:
        """Return what ``attempt`` reads, also where the files it reads from are being merged."""
        # Merging removes old files, perhaps those of the version that is read. The newest version
        # has the same rows in the same places; under the commit lock no files are removed.
        for read in (attempt, lambda: self._anew(attempt)):
            try:
                with without_panic():
                    return read()
            except UNREADABLE as error:
                self._location.raise_unreachable(error)
        try:
            with self._committing(), without_panic():
                return self._anew(attempt)
        except UNREADABLE as error:
            self._location.raise_unreachable(error)
            if is_disk_full(error) or isinstance(error, PermissionError):
                raise
            raise LlmcondError(self._location.damaged(error)) from error

    @contextmanager
    def _committing(self) -> Iterator[None]:
        self._location.prepare()
        # Threads queue up at their own lock; at the file they would poll against each other.
        with self._writing, locked(self.folder / "commit.lock"):
            yield

    def missing(self, inputs: Sequence[EncoderInput]) -> list[int]:
        """Return the positions of the inputs that the store does not hold."""
        return list(np.flatnonzero(self.places(inputs) < 0).tolist())

    def places(self, inputs: Sequence[EncoderInput]) -> NDArray[np.int64]:
        """Return the place of each input, -1 where the store does not hold it.

        Places count from 0 in the order of adding, and never change.
        """
        places = np.empty(len(inputs), dtype=np.int64)
        for start in range(0, len(inputs), _READ_ROWS):
            part = inputs[start : start + _READ_ROWS]
            with self._known:
                found = self._index.find(b"".join(item.key for item in part))
                if self._truncated.any():
                    # Under their plain keys are those that earlier versions cut.
                    found[self._truncated[found] & (found >= 0)] = -1
                    absent = np.flatnonzero(found < 0)
                    keys = b"".join(part[i].key_when_cut for i in absent.tolist())
                    found[absent] = self._index.find(keys)
            places[start : start + _READ_ROWS] = found
        return places

    def append(self, inputs: Sequence[EncoderInput], encoded: Encoded) -> int:
        """Add n distinct inputs in one commit, but for those that are there by now; count them.

        Their vectors, (n, dim), are finite in the store's type.

        Raises:
            DiskFullError: no room; what was stored before is kept.
        """
        with self._telling(), self._committing():
            self._catch_up()
            fresh = self.missing(inputs)
            if not fresh:
                return 0
            return self._add([self._written([inputs[i] for i in fresh], encoded.take(fresh))])

    def write_fragment(self, inputs: Sequence[EncoderInput], encoded: Encoded) -> Fragment:
        """Write n distinct inputs, n at least 1, into a file that :meth:`add_fragments` adds.

        To be called while someone, perhaps in another process, is :meth:`writing`. Arguments and
        errors as of :meth:`append`.
        """
        with self._telling():
            return self._written(inputs, encoded)

    def _written(self, inputs: Sequence[EncoderInput], encoded: Encoded) -> Fragment:
        rows = rows_table(inputs, replace(encoded, vectors=self.cast(encoded.vectors)))
        self._check_room(rows)
        metadata = self._target().write(rows)
        keys = b"".join(rows["key"].to_pylist())
        return Fragment(json.dumps(metadata.to_json()), keys, encoded.vectors.shape[1])

    def _target(self) -> Target:
        return Target(self._location.uri, self._location.options, self._dataset)

    def add_fragments(self, fragments: Sequence[Fragment]) -> int:
        """Add the rows of fragments in one commit, but for those that are there by now; count them.

        Raises:
            DiskFullError: no room; what was stored before is kept.
        """
        with self._telling(), self._committing():
            self._catch_up()
            return self._add(fragments, by_others=True)

    def _add(self, fragments: Sequence[Fragment], *, by_others: bool = False) -> int:
        """Commit what of fragments is not there yet; the commit lock is held."""
        while True:
            whole, tables, added = [], [], KeyIndex()
            for fragment in fragments:
                fresh = (self._index.find(fragment.keys) < 0) & (added.find(fragment.keys) < 0)
                if not fresh.any():
                    continue
                metadata = FragmentMetadata.from_json(fragment.metadata)
                path = f"data/{metadata.files[0].path}"
                if by_others and not self._location.holds(path):
                    raise UserError(
                        f"another machine wrote {self._location.uri}/{path}, which this one does "
                        "not see. All of them must see the same folder, or be told the same server."
                    )
                if fresh.all():
                    whole.append(metadata)
                else:
                    options = self._location.options
                    reader = LanceFileReader(f"{self._location.uri}/{path}", options)
                    tables.append(reader.read_all().to_table().filter(pa.array(fresh)))
                keys = np.frombuffer(fragment.keys, dtype=f"V{KEY_BYTES}")
                added.add(keys[fresh].tobytes())
            if tables:
                rows = pa.concat_tables(tables)
                self._check_room(rows)
                whole.append(self._target().write(rows))
            if not whole:
                return 0
            try:
                self._commit(whole, fragments[0].dim)
            except PreemptedError:
                if not self._is_committed(whole):
                    continue
            self._tidy()
            return len(added)

    def _is_committed(self, fragments: Sequence[FragmentMetadata]) -> bool:
        """Return whether a commit that was refused is there: the answer to it was lost.

        Else someone on another machine was first, as the lock is held.
        """
        known = self._dataset and self._dataset.version
        self._catch_up()
        if (self._dataset and self._dataset.version) == known:
            raise LlmcondError(
                f"{self._location.name}: the storage refuses to write what is not there yet (a PUT "
                "with If-None-Match), which commits need. Use another one."
            ) from None
        last = self._dataset.get_fragments()[-len(fragments) :]
        if [own.metadata.files for own in last] == [own.files for own in fragments]:
            return True
        if self._is_alone:
            log.warning(
                f"others write to {self._location.name} at the same time; no vector is stored "
                "twice, but some are encoded twice"
            )
        self._is_alone = False
        return False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let fragments be written, here or elsewhere, until the block ends.

        Until then nobody removes files that no version names. Those that a kill left before are
        removed first, unless somebody else is writing some.
        """
        with ExitStack() as stack:
            with self._telling(), self._committing():
                self._catch_up()
                if self._dataset is not None:
                    self._clean(self._location.newest())
                stack.enter_context(self.claim(f"{_WRITING}{uuid.uuid4().hex}"))
            yield

    def _clean(self, dataset: Any) -> None:
        """Remove old versions, and what no version names if nobody else can be at it."""
        # Without locks that hold for everyone, only after the days that Lance leaves it.
        alone = not self._location.shared
        for path in (self.folder / "claims").glob(f"{_WRITING}*.lock") if alone else ():
            with self.claim(path.stem) as free:  # which a kill has left, and takes it away
                alone = alone and free
        clean(self._location.uri, dataset, alone=alone)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Prepare to write, and tell what the storage says as it is told to people."""
        try:
            self._location.prepare()
            yield
        except Exception as error:
            self._location.raise_unwritable(error, len(self))
            raise

    def _check_room(self, rows: pa.Table) -> None:
        # Lance commits a file whose very end could not be written: better not to begin.
        if not self._location.has_room(2 * rows.nbytes + SPARE_BYTES):
            raise disk_full_error()

    def _commit(self, fragments: Sequence[FragmentMetadata], dim: int) -> None:
        if self._dataset is None:
            identity = self.identity.to_json()
            description = {"format": FORMAT, "dtype": self.dtype, "encoder": identity}
            schema = self._location.described(rows_schema(dim, self.dtype), description)
            self._adopt(self._target().create(schema, fragments))
        else:
            self._adopt(self._target().commit(fragments))

    def _tidy(self) -> None:
        """Keep files few, whatever was added how; the commit lock is held."""
        rows = [fragment.physical_rows for fragment in self._dataset.get_fragments()]
        each = row_bytes(self._dataset.schema.field("vector").type.list_size, self.dtype)
        count = mergeable(rows, each)
        if not count:
            return
        self._clean(self._location.newest())
        if self._location.has_room(2 * math.ceil(sum(rows[-count:]) * each)):
            try:
                self._target().merge_last(count)
            except PreemptedError:
                return  # the next one merges
            # A handle of its own starts with empty caches.
            self._adopt(self._location.newest())

    def check_writable(self) -> None:
        """Raise a UserError where rows cannot be added."""
        self._location.check_writable()

    def cast(self, vectors: NDArray[np.float32]) -> NDArray[Any]:
        """Return vectors in the store's type; what does not fit becomes infinite."""
        with np.errstate(over="ignore"):
            return vectors.astype(self.dtype)

    def lookup(self, inputs: Sequence[EncoderInput]) -> Gathered:
        """Return the vectors of inputs as they are stored, each distinct one once.

        Tables above ``_IN_MEMORY`` bytes are memory maps of a file that ends with them.

        Raises:
            UserError: some are not there.
            DiskFullError: no room for a memory map.
        """
        found = self.places(inputs)
        absent = int((found < 0).sum())
        if absent:
            raise UserError(
                f"{absent:,} of {len(found):,} features are not there: the extraction did not "
                "finish. Run the same `llmcond extract` again; it resumes where it stopped."
            )
        places, index = np.unique(found, return_inverse=True)
        first = self._stored(places[:_READ_ROWS]) if len(places) else np.zeros((0, 0), self.dtype)
        shape = len(places), first.shape[1]
        if math.prod(shape) * np.dtype(self.dtype).itemsize <= _IN_MEMORY:
            table: NDArray[Any] = np.empty(shape, dtype=self.dtype)
        else:
            self._location.prepare()
            table = array_on_disk(self.folder, shape, self.dtype)
        table[: len(first)] = first
        for start in range(_READ_ROWS, len(places), _READ_ROWS):
            table[start : start + _READ_ROWS] = self._stored(places[start : start + _READ_ROWS])
        return Gathered(table, index.reshape(-1))

    def _stored(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return the vectors at ascending places, in the store's type."""
        table = self._reading(lambda: self._dataset.take(places, columns=["vector"]))
        flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat.reshape(len(places), -1))

    def count_truncated_at(self, places: NDArray[np.int64]) -> int:
        """Count the inputs at ``places`` that were longer than the encoder takes."""
        return int(self._truncated[places].sum())

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Try to become the one process that works on a part; yield whether it succeeded.

        A part that another process works on is better left to it. The claim ends with the block
        or with the process, however it ends.
        """
        self._location.prepare()
        claims = self.folder / "claims"
        if self._has_abandoned_claims:
            self._has_abandoned_claims = False
            remove_abandoned_claims(claims)
        with claim(claims, name) as mine:
            yield mine


def _key_bytes(keys: Any) -> Any:
    return keys.buffers()[1].slice(keys.offset * KEY_BYTES, len(keys) * KEY_BYTES)
