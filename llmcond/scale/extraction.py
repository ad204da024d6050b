"""Extraction with Ray actors: they encode and write fragments, and this process commits them.

Fragments become part of the store only when this process commits them, and only keys and metadata
of fragments are sent to it. So whatever is lost with an actor was never visible in the store, and
uncommitted work of a killed process is repeated by the next extraction.
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

from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.spec import EncoderInput, InputError
from llmcond.errors import UserError
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
from llmcond.features.store import FeatureStore, Fragment, StoreDtype
from llmcond.log import log
from llmcond.scale.pool import ActorPool, RayCluster, actor_pool
from llmcond.system import compute_on_one_thread

if TYPE_CHECKING:
    from llmcond.encoders.spec import Encoded

#: A commit takes place after this number of fragments, or of seconds.
_COMMIT_FRAGMENTS, _COMMIT_SECONDS = 16, 10.0
#: An actor gets parts for about this number of seconds at a time, and at most this number of parts:
#: a fragment has up to 65,536 rows, or half of that from a GPU.
_ITEM_SECONDS, _MAX_PARTS = 10.0, 64


@dataclass(frozen=True)
class ActorEncoderSpec:
    """Everything that an actor needs to create its encoder and its side of the store.

    Attributes:
        model: name or path that finds the model on every machine.
        options: all settings that affect vectors, and the device.
        fingerprint: expected fingerprint of the encoder.
        store_root: root of the store, without the encoder's own folder: a folder or a URI.
        dtype: data type of the stored vectors.
    """

    model: str
    options: EncoderOptions
    fingerprint: str
    store_root: str
    dtype: StoreDtype


class WrittenFragment(NamedTuple):
    """The result of an actor for some parts.

    Attributes:
        fragment: fragment of the rows that could be encoded; None: there were none.
        counts: counts of the inputs that are finished; nothing has been added to the store yet.
        cpu_seconds: CPU time of all threads of the actor.
        failure: the first input without a vector, with the reason.
    """

    fragment: Fragment | None
    counts: CommittedCounts
    cpu_seconds: float
    failure: tuple[EncoderInput, str] | None


class FragmentWriter:
    """An actor's encoder, which writes fragments that do not belong to the store yet."""

    def __init__(self, spec: ActorEncoderSpec) -> None:
        """Load the encoder.

        Raises:
            UserError: if this machine does not have the encoder, or has another version of it.
        """
        from llmcond.encoders.encoder import Encoder, WorkerThreads

        if spec.options.device == "cpu":
            compute_on_one_thread()
        resolved = resolve(spec.model, spec.options)
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

    def work(self, item: list[EncodingPart]) -> WrittenFragment:
        """Encode parts, and write vectors that are finite in the store's type to one fragment.

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
        try:
            for part, vectors in zip(item, self._threads.map(self._encode, item), strict=True):
                parts.append(vectors)
                inputs += part.inputs
        except InputError as error:
            failed = error
        fragment = None
        if parts:
            encoded = Encoded(
                np.concatenate([part.vectors for part in parts]),
                np.concatenate([part.n_tokens for part in parts]),
                np.concatenate([part.truncated for part in parts]),
            )
            stored = self._store.cast(encoded.vectors)
            good = np.flatnonzero(np.isfinite(stored).all(axis=1)).tolist()
            if good:
                good_inputs = [inputs[i] for i in good]
                fragment = self._store.write_fragment(good_inputs, encoded.take(good))
            try:
                check_storable(stored, inputs)
            except InputError as error:
                failed = error
        characters = sum(text.size for text in inputs)
        n_tokens = sum(int(part.n_tokens.sum()) for part in parts)
        done = CommittedCounts(len(inputs), 0, characters, n_tokens, time.monotonic() - start_time)
        failure = None if failed is None else (failed.item, str(failed))
        return WrittenFragment(fragment, done, time.process_time() - start_cpu, failure)


class RayExecution(ExitStack):
    """Executes extraction plans with actors, which start with the first plan that lacks vectors.

    It is passed as ``execute`` to ``llmcond.features.extract.extract``, within a ``with`` block
    that ends the actors.

    Attributes:
        cpu_seconds: CPU time in which actors have encoded and written.
    """

    #: Creates an actor's worker from an ``ActorEncoderSpec``.
    worker: Callable[[ActorEncoderSpec], Any] = FragmentWriter

    def __init__(self, cluster: RayCluster, spec: ActorEncoderSpec) -> None:
        super().__init__()
        self._cluster, self._spec = cluster, spec
        self.cpu_seconds = 0.0

    @cached_property
    def _pool(self) -> ActorPool[list[EncodingPart], WrittenFragment]:
        start_time = time.monotonic()
        manager = actor_pool(self._cluster, self.worker, self._spec)
        pool: ActorPool[list[EncodingPart], WrittenFragment] = self.enter_context(manager)
        where = "this machine" if self._cluster.address is None else "the cluster"
        seconds = time.monotonic() - start_time
        log.info(f"Ray on {where}: {pool.size} actors, connected in {seconds:.1f} s")
        return pool

    def __call__(
        self, plan: EncodingPlan, progress: ExtractionProgress | None, begun: Callable[[], None]
    ) -> ExtractionTally:
        """Encode and store everything that a plan lacks.

        Raises:
            InputError: if an input cannot be encoded, or its vector has NaN or infinity. All
                vectors that were finished before are stored.
            LlmcondError: for the reasons of ``Pool.map`` and ``FragmentWriter.work``.
        """
        parts_per_chunk = _parts_per_chunk(self._cluster)
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

        with plan.store.fragment_writer_claim(), _Committer(plan.store) as committer:
            for item, written in pool.map(items()):
                parts_per_item = _parts_per_item(written.counts.seconds, len(item))
                committer.add(written)
                self.cpu_seconds += written.cpu_seconds
                tally.add(written.counts, at_once=pool.size)
                if written.failure is not None:
                    raise InputError(*written.failure)
        tally.n_added = committer.n_added
        return tally


def estimate_commits(rows: int, seconds: float, cluster: RayCluster, count: int) -> tuple[int, int]:
    """Estimate the numbers of fragments and commits of ``count`` actors within some seconds.

    Small fragments are merged afterwards.
    """
    parts = math.ceil(rows * _parts_per_chunk(cluster) / CHUNK)
    first = min(parts, 2 * count)  # one part each, because the speed is not known yet
    later = (parts - first) / _parts_per_item(seconds * count, max(parts, 1))
    fragments = first + math.ceil(later)
    commits = max(
        math.ceil(fragments / _COMMIT_FRAGMENTS), min(fragments, int(seconds / _COMMIT_SECONDS))
    )
    return fragments, commits


def _parts_per_chunk(cluster: RayCluster) -> int:
    """Return the number of parts that a chunk is split into, as an encoder's threads would."""
    # On a GPU, one thread prepares a part while the other computes.
    return 2 if cluster.gpus_per_actor else 1


def _parts_per_item(seconds: float, count: int) -> int:
    """Return how many parts an item should have, if ``count`` parts took some seconds."""
    return max(1, min(_MAX_PARTS, int(_ITEM_SECONDS * count / max(seconds, 1e-3))))


class _Committer:
    """Adds fragments to a store, several per commit; the rest when its block ends."""

    def __init__(self, store: FeatureStore) -> None:
        self._store, self._waiting = store, list[Fragment]()
        self._since = time.monotonic()
        self.n_added = 0

    def __enter__(self) -> _Committer:
        return self

    def __exit__(self, *error: object) -> None:
        self._commit()

    def add(self, written: WrittenFragment) -> None:
        if written.fragment is not None:
            self._waiting.append(written.fragment)
        late = time.monotonic() - self._since > _COMMIT_SECONDS
        if len(self._waiting) >= _COMMIT_FRAGMENTS or (self._waiting and late):
            self._commit()

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.n_added += self._store.add_fragments(waiting)
        self._since = time.monotonic()


def make_ray_execution(
    cluster: RayCluster, model: str, resolved: ResolvedEncoder, store: FeatureStore
) -> RayExecution:
    """Return an executor that encodes with actors, into a store of the resolved encoder's vectors.

    ``model`` finds the encoder on every machine.
    """
    device = "cuda" if cluster.gpus_per_actor else "cpu"
    # Automatic settings are resolved in this process, so that they are equal on every machine.
    options = replace(resolved.options, dtype=resolved.identity.dtype, device=device)
    fingerprint = resolved.identity.fingerprint
    return RayExecution(
        cluster, ActorEncoderSpec(model, options, fingerprint, store.root, store.dtype)
    )
