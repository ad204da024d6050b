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
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmcond.base.errors import UserError
from llmcond.base.output import ExtractionBar, log
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.spec import InputError
from llmcond.features.extract import (
    CHUNK,
    CommittedCounts,
    EncodingPart,
    EncodingPlan,
    ExtractionTally,
    PartEncoder,
    commit_finite,
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


class ExtractionWorker:
    """A worker's encoder, which adds vectors to a store.

    Args:
        model: name or path that finds the model on every machine; on this machine, the resolved
            encoder itself.
        options: all settings that affect vectors, and the device.
        fingerprint: expected fingerprint of the encoder.
        store_root: root of the store, without the encoder's own folder: a folder or a URI.
        dtype: data type of the stored vectors.

    Raises:
        UserError: if this machine does not have the encoder, or has another version of it, or does
            not see the store.
    """

    def __init__(
        self,
        model: str | ResolvedEncoder,
        options: EncoderOptions,
        fingerprint: str,
        store_root: str | Path,
        dtype: StoreDtype,
    ) -> None:
        """Load the encoder."""
        from llmcond.encoders.encoder import Encoder, WorkerThreads

        if isinstance(model, str):
            resolved = resolve(model, options)
        else:  # a worker on a GPU sees only its own
            resolved = replace(model, device="cpu" if model.device == "cpu" else "cuda:0")
        if resolved.identity.fingerprint != fingerprint:
            import socket

            raise UserError(
                f"{model} is a different encoder on {socket.gethostname()} (fingerprint "
                f"{resolved.identity.fingerprint}, expected {fingerprint}). Install the same files "
                "and versions on every machine."
            )
        encoder = Encoder(resolved)
        self._encode = PartEncoder(encoder).encode
        self._threads = WorkerThreads(encoder.concurrency)
        self._store = FeatureStore(store_root, resolved.identity, dtype, only_write=True)

    def work(self, item: list[EncodingPart]) -> CommittedCounts:
        """Encode parts, and store the vectors that are finite in the store's type.

        Parts after an input that cannot be encoded are skipped.

        Raises:
            LlmcondError: if the encoder fails.
            DiskFullError: if there is not enough space.
        """
        from llmcond.encoders.spec import Encoded

        began = time.monotonic()
        parts: list[Encoded] = []
        counts = CommittedCounts()
        try:
            try:
                parts.extend(self._threads.map(self._encode, item))
            finally:
                if parts:
                    inputs = [text for part in item[: len(parts)] for text in part.inputs]
                    encoded = Encoded(
                        np.concatenate([part.vectors for part in parts]),
                        np.concatenate([part.n_tokens for part in parts]),
                        np.concatenate([part.truncated for part in parts]),
                    )
                    counts = commit_finite(self._store, inputs, encoded, began)
        except InputError as error:
            return replace(counts, failure=(error.item, str(error)))
        return counts


class SharedExecution(ExitStack):
    """Executes extraction plans with workers, which start with the first plan that lacks vectors.

    It is passed as ``execute`` to ``llmcond.features.extract.extract``, within a ``with`` block
    that ends the workers.
    """

    def __init__(
        self, workers: Workers, model: str, resolved: ResolvedEncoder, store: FeatureStore
    ) -> None:
        """Prepare workers for a store of an encoder that ``model`` finds on other machines."""
        super().__init__()
        device = "cuda" if workers.gpus_each else "cpu"
        # Automatic settings are resolved in this process, so that they are equal on every machine.
        options = replace(resolved.options, dtype=resolved.identity.dtype, device=device)
        source = resolved if workers.is_local else model
        fingerprint = resolved.identity.fingerprint
        self._workers = workers
        self._arguments = (source, options, fingerprint, store.root, store.dtype)

    @cached_property
    def _pool(self) -> WorkerPool[list[EncodingPart], CommittedCounts]:
        manager = worker_pool(self._workers, ExtractionWorker, *self._arguments)
        pool: WorkerPool[list[EncodingPart], CommittedCounts] = self.enter_context(manager)
        where = "this machine" if self._workers.is_local else "the cluster"
        log.info(f"{pool.size} workers on {where}")
        return pool

    def __call__(
        self, plan: EncodingPlan, progress: ExtractionBar | None, begun: Callable[[], None]
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
            for number, (item, done) in enumerate(pool.map(items()), 1):
                parts_per_item = _parts_per_item(done.seconds, len(item), pool.size)
                tally.add(done, at_once=pool.size)
                if done.failure is not None:
                    raise InputError(*done.failure)
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
