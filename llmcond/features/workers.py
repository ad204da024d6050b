"""Extraction by workers: they encode parts of the inputs, and add the vectors to the store.

Each commit of a worker is complete, so a killed process loses only what it has not committed, and
the next extraction repeats that. Workers do not know what the others have stored: this process
gives each input to one of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llmcond.base.errors import UserError
from llmcond.base.output import log
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.spec import EncoderInput, InputError
from llmcond.features.extract import (
    CHUNK,
    CommittedCounts,
    EncodingPart,
    EncodingPlan,
    ExtractionProgress,
    ExtractionTally,
    PartEncoder,
    check_storable,
)
from llmcond.features.pool import WorkerPool, Workers, worker_pool
from llmcond.features.store import FeatureStore
from llmcond.features.view import StoreDtype

if TYPE_CHECKING:
    from llmcond.encoders.spec import Encoded

#: A worker gets parts for about this number of seconds at a time, and more if there are more than
#: this number of workers, because each item is a commit. It gets at most this number of parts: a
#: commit has up to 65,536 rows, or half of that from a GPU.
_ITEM_SECONDS, _FEW_WORKERS, _MAX_PARTS = 10.0, 16, 64
#: Small files of the store are merged after this number of items.
_ITEMS_PER_MERGE = 16


@dataclass(frozen=True)
class EncoderSpec:
    """Everything that a worker needs to create its encoder and its side of the store.

    Attributes:
        model: name or path that finds the model on every machine; on this machine, the resolved
            encoder itself.
        options: all settings that affect vectors, and the device.
        fingerprint: expected fingerprint of the encoder.
        store_root: root of the store, without the encoder's own folder: a folder or a URI.
        dtype: data type of the stored vectors.
    """

    model: str | ResolvedEncoder
    options: EncoderOptions
    fingerprint: str
    store_root: str
    dtype: StoreDtype


class StoredItem(NamedTuple):
    """The result of a worker for some parts.

    Attributes:
        counts: counts of the inputs that are finished.
        cpu_seconds: CPU time of all threads of the worker.
        failure: the first input without a vector, with the reason.
    """

    counts: CommittedCounts
    cpu_seconds: float
    failure: tuple[EncoderInput, str] | None


class ExtractionWorker:
    """A worker's encoder, which adds vectors to a store."""

    def __init__(self, spec: EncoderSpec) -> None:
        """Load the encoder.

        Raises:
            UserError: if this machine does not have the encoder, or has another version of it, or
                does not see the store.
        """
        from llmcond.encoders.encoder import Encoder, WorkerThreads

        resolved = spec.model
        if isinstance(resolved, str):
            resolved = resolve(resolved, spec.options)
        elif resolved.device != "cpu":  # the worker sees only its own GPU
            resolved = replace(resolved, device="cuda:0")
        if resolved.identity.fingerprint != spec.fingerprint:
            import socket

            raise UserError(
                f"{spec.model} is a different encoder on {socket.gethostname()} (fingerprint "
                f"{resolved.identity.fingerprint}, expected {spec.fingerprint}). Install the "
                "same files and versions on every machine."
            )
        encoder = Encoder(resolved)
        self._encode = PartEncoder(encoder).encode
        self._threads = WorkerThreads(encoder.concurrency)
        self._store = FeatureStore(spec.store_root, resolved.identity, spec.dtype, only_write=True)

    def work(self, item: list[EncodingPart]) -> StoredItem:
        """Encode parts, and store the vectors that are finite in the store's type.

        Parts after an input that cannot be encoded are skipped.

        Raises:
            LlmcondError: if the encoder fails.
            DiskFullError: if there is not enough space.
        """
        from llmcond.encoders.spec import Encoded

        start_time, start_cpu = time.monotonic(), time.process_time()
        parts: list[Encoded] = []
        inputs: list[EncoderInput] = []
        failed: InputError | None = None
        n_added = 0
        try:
            for part, vectors in zip(item, self._threads.map(self._encode, item), strict=True):
                parts.append(vectors)
                inputs += part.inputs
        except InputError as error:
            failed = error
        if parts:
            encoded = Encoded(
                np.concatenate([part.vectors for part in parts]),
                np.concatenate([part.n_tokens for part in parts]),
                np.concatenate([part.truncated for part in parts]),
            )
            stored = self._store.cast(encoded.vectors)
            good = np.flatnonzero(np.isfinite(stored).all(axis=1)).tolist()
            if good:
                n_added = self._store.append([inputs[i] for i in good], encoded.take(good))
            try:
                check_storable(stored, inputs)
            except InputError as error:
                failed = error
        characters = sum(text.size for text in inputs)
        n_tokens = sum(int(part.n_tokens.sum()) for part in parts)
        seconds = time.monotonic() - start_time
        counts = CommittedCounts(len(inputs), n_added, characters, n_tokens, seconds)
        failure = None if failed is None else (failed.item, str(failed))
        return StoredItem(counts, time.process_time() - start_cpu, failure)


class SharedExecution(ExitStack):
    """Executes extraction plans with workers, which start with the first plan that lacks vectors.

    It is passed as ``execute`` to ``llmcond.features.extract.extract``, within a ``with`` block
    that ends the workers.

    Attributes:
        cpu_seconds: CPU time in which workers have encoded and written.
    """

    #: Creates a worker from an ``EncoderSpec``.
    worker: Callable[[EncoderSpec], Any] = ExtractionWorker

    def __init__(self, workers: Workers, spec: EncoderSpec) -> None:
        super().__init__()
        self._workers, self._spec = workers, spec
        self.cpu_seconds = 0.0

    @cached_property
    def _pool(self) -> WorkerPool[list[EncodingPart], StoredItem]:
        manager = worker_pool(self._workers, self.worker, self._spec)
        pool: WorkerPool[list[EncodingPart], StoredItem] = self.enter_context(manager)
        where = "this machine" if self._workers.is_local else "the cluster"
        log.info(f"{pool.size} workers on {where}")
        return pool

    def __call__(
        self, plan: EncodingPlan, progress: ExtractionProgress | None, begun: Callable[[], None]
    ) -> ExtractionTally:
        """Encode and store everything that a plan lacks.

        Raises:
            InputError: if an input cannot be encoded, or its vector has NaN or infinity. All
                vectors that were finished before are stored.
            LlmcondError: for the reasons of ``WorkerPool.map`` and ``ExtractionWorker.work``.
        """
        parts_per_chunk = _parts_per_chunk(self._workers)
        parts = (part.missing_from(plan.store) for part in plan.parts(lambda: parts_per_chunk))
        first, tally, parts_per_item = next(parts, None), ExtractionTally(progress), 1
        if first is None:
            return tally
        pool = self._pool
        begun()

        def items() -> Iterator[list[EncodingPart]]:
            remaining = chain([first], parts)
            while item := list(islice(remaining, parts_per_item)):
                yield item

        pending: list[EncodingPart] = []
        try:
            for number, (item, stored) in enumerate(pool.map(items()), 1):
                parts_per_item = _parts_per_item(stored.counts.seconds, len(item), pool.size)
                self.cpu_seconds += stored.cpu_seconds
                tally.add(stored.counts, at_once=pool.size)
                if stored.failure is not None:
                    raise InputError(*stored.failure)
                pending += item
                if number % _ITEMS_PER_MERGE == 0:
                    _merge(plan.store, pending)
        except BaseException:
            plan.store.merge()
            raise
        _merge(plan.store, pending)
        return tally


def _merge(store: FeatureStore, pending: list[EncodingPart]) -> None:
    """Merge small files, and check that the vectors of parts that workers have stored are there.

    Raises:
        UserError: a worker has another store on its machine.
    """
    store.merge()
    if any(store.missing(part.inputs) for part in pending):
        raise UserError(
            f"another machine has stored vectors in {store.root} that do not exist on this "
            "machine. All machines must mount the same folder, or use the same storage server."
        )
    pending.clear()


def estimate_commits(rows: int, seconds: float, workers: Workers, count: int) -> int:
    """Estimate the number of commits, each of one file, of ``count`` workers within some seconds.

    Small files are merged afterwards.
    """
    parts = math.ceil(rows * _parts_per_chunk(workers) / CHUNK)
    first = min(parts, 2 * count)  # one part each, because the speed is not known yet
    later = (parts - first) / _parts_per_item(seconds * count, max(parts, 1), count)
    return first + math.ceil(later)


def _parts_per_chunk(workers: Workers) -> int:
    """Return the number of parts that a chunk is split into, as an encoder's threads would."""
    # On a GPU, one thread prepares a part while the other computes.
    return 2 if workers.gpus_each else 1


def _parts_per_item(seconds: float, n_parts: int, n_workers: int) -> int:
    """Return how many parts an item should have, if ``n_parts`` parts took some seconds."""
    seconds_per_item = _ITEM_SECONDS * max(1, n_workers / _FEW_WORKERS)
    return max(1, min(_MAX_PARTS, int(seconds_per_item * n_parts / max(seconds, 1e-3))))


def share_extraction(
    workers: Workers, model: str, resolved: ResolvedEncoder, store: FeatureStore
) -> SharedExecution:
    """Return an executor that encodes with workers, into a store of the encoder's vectors.

    ``model`` finds the encoder on other machines.
    """
    device = "cuda" if workers.gpus_each else "cpu"
    # Automatic settings are resolved in this process, so that they are equal on every machine.
    options = replace(resolved.options, dtype=resolved.identity.dtype, device=device)
    fingerprint = resolved.identity.fingerprint
    source = resolved if workers.is_local else model
    return SharedExecution(
        workers, EncoderSpec(source, options, fingerprint, store.root, store.dtype)
    )
