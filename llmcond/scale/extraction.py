"""Extraction by actors of Ray: they encode and write, this process commits.

What actors write becomes part of the store when this process says so: only keys and the metadata
of files travel to it. So nothing that is lost with an actor was ever seen, and what this process
loses when it is killed is written again by the next extraction.
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
    Committed,
    Part,
    PartEncoder,
    Plan,
    Progress,
    Tally,
    not_finite,
)
from llmcond.features.store import FeatureStore, Fragment, StoreDtype
from llmcond.log import log
from llmcond.scale.pool import Cluster, Pool, actors
from llmcond.system import compute_on_one_thread

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoded

#: Committed after so many fragments, or seconds.
_FRAGMENTS, _SECONDS = 16, 10.0
#: An actor gets parts for so many seconds at a time, and no more than so many parts: a fragment
#: has up to 65,536 rows, or half of that from a GPU.
_ITEM_SECONDS, _MOST_PARTS = 10.0, 64


@dataclass(frozen=True)
class EncoderOf:
    """What actors make their encoder and their side of the store of.

    Attributes:
        model: found in the same way on every machine.
        options: all that decides vectors, and the device.
        fingerprint: that its encoder must have.
        root: the store's, without what tells encoders apart: a folder, or a URI.
    """

    model: str
    options: EncoderOptions
    fingerprint: str
    root: str
    dtype: StoreDtype


class Written(NamedTuple):
    """What an actor did with some parts.

    Attributes:
        fragment: of the rows that could be encoded; None: there were none.
        done: inputs that it is done with; nothing is added to the store yet.
        cpu_seconds: of all threads of the actor.
        failed: the first input that has no vector, and why.
    """

    fragment: Fragment | None
    done: Committed
    cpu_seconds: float
    failed: tuple[EncoderInput, str] | None


class FragmentWriter:
    """An actor's encoder, which writes what it encodes beside a store."""

    def __init__(self, made_of: EncoderOf) -> None:
        """Load the encoder.

        Raises:
            UserError: it is not there, or another one.
        """
        from llmcond.encoders.encoder import Encoder
        from llmcond.encoders.threads import WorkerThreads

        if made_of.options.device == "cpu":
            compute_on_one_thread()
        resolved = resolve(made_of.model, made_of.options)
        if resolved.identity.fingerprint != made_of.fingerprint:
            import socket

            raise UserError(
                f"{made_of.model} is another encoder on {socket.gethostname()} (fingerprint "
                f"{resolved.identity.fingerprint}, expected {made_of.fingerprint}). Let every "
                "machine have the same files and versions."
            )
        encoder = Encoder(resolved)
        self._encode = PartEncoder(encoder).encode
        self._threads = WorkerThreads(encoder.concurrency)
        self._store = FeatureStore(made_of.root, resolved.identity, made_of.dtype, only_write=True)

    def work(self, item: list[Part]) -> Written:
        """Encode parts, and write what is finite in the store's type into one fragment.

        Parts behind an input that the encoder cannot take are left out.

        Raises:
            LlmcondError: the encoder fails.
            DiskFullError: no room.
        """
        from llmcond.encoders.encoder import Encoded

        began, cpu = time.monotonic(), time.process_time()
        parts: list[Encoded] = []
        inputs: list[EncoderInput] = []
        failed: InputError | None = None
        try:
            for part, one in zip(item, self._threads.map(self._encode, item), strict=True):
                parts.append(one)
                inputs += part.inputs
        except InputError as error:
            failed = error
        fragment = None
        if parts:
            encoded = Encoded(
                np.concatenate([one.vectors for one in parts]),
                np.concatenate([one.n_tokens for one in parts]),
                np.concatenate([one.truncated for one in parts]),
            )
            finite = np.isfinite(self._store.cast(encoded.vectors)).all(axis=1)
            good = np.flatnonzero(finite).tolist()
            if good:
                own = [inputs[i] for i in good]
                fragment = self._store.write_fragment(own, encoded.take(good))
            if len(good) < len(inputs):
                failed = not_finite(inputs[int(np.argmin(finite))], self._store.dtype)
        characters = sum(one.size for one in inputs)
        n_tokens = sum(int(one.n_tokens.sum()) for one in parts)
        done = Committed(len(inputs), 0, characters, n_tokens, time.monotonic() - began)
        why = None if failed is None else (failed.item, str(failed))
        return Written(fragment, done, time.process_time() - cpu, why)


class RayExecution(ExitStack):
    """Carries plans out by actors, which start with the first one that lacks something.

    To be called as ``execute`` of :func:`llmcond.features.extract.extract`, within a ``with`` block
    that ends the actors.

    Attributes:
        cpu_seconds: that actors have encoded and written for.
    """

    #: What actors hold, made of an :class:`EncoderOf`.
    worker: Callable[[EncoderOf], Any] = FragmentWriter

    def __init__(self, cluster: Cluster, made_of: EncoderOf) -> None:
        super().__init__()
        self._cluster, self._made_of = cluster, made_of
        self.cpu_seconds = 0.0

    @cached_property
    def _pool(self) -> Pool[list[Part], Written]:
        began = time.monotonic()
        made = actors(self._cluster, self.worker, self._made_of)
        pool: Pool[list[Part], Written] = self.enter_context(made)
        where = "this machine" if self._cluster.address is None else "the cluster"
        took = time.monotonic() - began
        log.info(f"Ray on {where}: {pool.size} actors, connected in {took:.1f} s")
        return pool

    def __call__(self, plan: Plan, progress: Progress | None, begun: Callable[[], None]) -> Tally:
        """Encode and store everything that a plan lacks.

        Raises:
            InputError: the encoder cannot take one, or gave NaN or infinity for it; all good ones
                that were done are stored.
            LlmcondError: as of :meth:`Pool.map` and :meth:`FragmentWriter.work`.
        """
        parts_of = _parts_of_a_chunk(self._cluster)
        parts = (part.lacking(plan.store) for part in plan.parts(lambda: parts_of))
        first, tally, count = next(parts, None), Tally(progress), 1
        if first is None:
            return tally
        pool = self._pool
        begun()

        def items() -> Iterator[list[Part]]:
            left = chain([first], parts)
            while item := list(islice(left, count)):
                yield item

        with plan.store.writing(), _Committer(plan.store) as committer:
            for item, written in pool.map(items()):
                count = _parts_in(written.done.seconds, len(item))
                committer.add(written)
                self.cpu_seconds += written.cpu_seconds
                tally.add(written.done, at_once=pool.size)
                if written.failed is not None:
                    raise InputError(*written.failed)
        tally.n_added = committer.n_added
        return tally


def fragments_and_commits(
    rows: int, seconds: float, cluster: Cluster, count: int
) -> tuple[int, int]:
    """Return how many fragments and commits there are about, by so many actors in so many seconds.

    Small fragments are merged afterwards.
    """
    parts = math.ceil(rows * _parts_of_a_chunk(cluster) / CHUNK)
    first = min(parts, 2 * count)  # of a part each, as nobody knows yet how long they take
    later = (parts - first) / _parts_in(seconds * count, max(parts, 1))
    fragments = first + math.ceil(later)
    commits = max(math.ceil(fragments / _FRAGMENTS), min(fragments, int(seconds / _SECONDS)))
    return fragments, commits


def _parts_of_a_chunk(cluster: Cluster) -> int:
    """Return into how many parts a chunk is cut, as an encoder's threads would."""
    return 2 if cluster.gpus_per_actor else 1  # on a GPU one prepares what the other computes


def _parts_in(seconds: float, count: int) -> int:
    """Return how many parts an item has, where so many took so long."""
    return max(1, min(_MOST_PARTS, int(_ITEM_SECONDS * count / max(seconds, 1e-3))))


class _Committer:
    """Adds fragments to a store, several in one commit; all that came when its block ends."""

    def __init__(self, store: FeatureStore) -> None:
        self._store, self._waiting = store, list[Fragment]()
        self._since = time.monotonic()
        self.n_added = 0

    def __enter__(self) -> _Committer:
        return self

    def __exit__(self, *error: object) -> None:
        self._commit()

    def add(self, written: Written) -> None:
        if written.fragment is not None:
            self._waiting.append(written.fragment)
        late = time.monotonic() - self._since > _SECONDS
        if len(self._waiting) >= _FRAGMENTS or (self._waiting and late):
            self._commit()

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.n_added += self._store.add_fragments(waiting)
        self._since = time.monotonic()


def ray_execution(
    cluster: Cluster, model: str, resolved: ResolvedEncoder, store: FeatureStore
) -> RayExecution:
    """Return what encodes by actors with a resolved encoder, into a store of its vectors.

    ``model`` finds the encoder on every machine.
    """
    device = "cuda" if cluster.gpus_per_actor else "cpu"
    # What is left open is decided here, not by each machine.
    options = replace(resolved.options, dtype=resolved.identity.dtype, device=device)
    fingerprint = resolved.identity.fingerprint
    return RayExecution(cluster, EncoderOf(model, options, fingerprint, store.root, store.dtype))
