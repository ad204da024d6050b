"""Extraction: counting and encoding the inputs that a store lacks, chunk by chunk.

A plan (``EncodingPlan``) determines which inputs are encoded, in which order and in which parts.
Threads encode several parts at a time. ``encode_and_commit`` stores each part under a claim, so
that other processes can work on the same plan.

Inputs can be any iterable of any length, which is read a window at a time. Windows depend only on
the inputs; parts and batches depend on the inputs and on the number of encoding threads. So an
extraction that was interrupted computes the same vectors as one that was not: bit-identical on the
same machine, and otherwise equal up to rounding.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcond.base.files import digest_bytes
from llmcond.base.output import ExtractionBar
from llmcond.encoders.spec import EncoderInput, NotFiniteError, check_finite, plan_inputs
from llmcond.encoders.tokenizing import network_inputs
from llmcond.features.view import KeyIndex

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder, RouterQueries, RouterQuery, WorkerThreads
    from llmcond.encoders.spec import Encoded
    from llmcond.features.store import FeatureStore

#: The number of inputs of a chunk, which is the most that a killed process loses. A chunk is
#: committed in parts, one for each encoding thread.
CHUNK = 1_024
#: The number of inputs that are read and sorted together.
WINDOW = 65_536
_WAIT_SECONDS = 0.2
#: The number of parts claimed by other processes above which the first one is tried again.
_MAX_CLAIMED = 32
#: The number of routers that are computed together, and that are kept for later windows.
_UNIT_SIZE, _MAX_ROUTERS = 256, 16_384


@dataclass(frozen=True, slots=True)
class Extraction:
    """The counts of an extraction.

    Attributes:
        n_inputs: Distinct inputs.
        n_computed: Inputs that this process encoded and stored in this call.
        n_truncated: Inputs, of all distinct ones, that the encoder truncated.
        n_tokens: Tokens of the inputs that were encoded in this call, before truncation.
        seconds: Wall-clock time since the first batch began, without loading the encoder.
    """

    n_inputs: int
    n_computed: int
    n_truncated: int
    n_tokens: int
    seconds: float


def extract(
    inputs: Iterable[EncoderInput],
    store: FeatureStore,
    load: Callable[[], Encoder],
    progress: ExtractionBar | None = None,
    *,
    chunk: int = CHUNK,
    window: int = WINDOW,
    by_prefix: bool = False,
    missing: MissingCount | None = None,
    execute: PlanExecutor | None = None,
) -> Extraction:
    """Encode the inputs that ``store`` lacks and commit them chunk by chunk.

    Memory grows by about 50 bytes per input, for its key. If an extraction of other inputs stored a
    part of a chunk, the remaining inputs are encoded in batches of their own, and are equal up to
    rounding.

    Args:
        inputs: The inputs, for example a generator. Repeats are encoded once.
        store: The store of the vectors.
        load: Returns the encoder. It is called only if an input is missing.
        progress: Updated after every part that is stored.
        chunk: The number of inputs that are computed before they are committed.
        window: The number of inputs that are sorted together.
        by_prefix: Whether the encoder computes a common prefix of several inputs only once.
        missing: Counts of missing inputs, for the progress. None: they are counted first.
        execute: Runs the plan elsewhere, instead of threads that call the encoder.

    Raises:
        InputError: The encoder returned NaN or infinity. The other inputs of its chunk are stored.
        DiskFullError: The disk is full. Rows that were already stored are kept.
    """
    if missing is None and isinstance(inputs, Sized):  # the length of a generator is not known
        missing = count_missing(store, inputs, window)
    total = (missing.n_missing, missing.n_characters) if missing and missing.n_missing else None

    def begin() -> None:
        if progress:
            progress.start(*(total or (None, None)))

    plan = EncodingPlan(inputs, store, chunk, window, by_prefix)
    tally = (execute or partial(_execute_in_threads, load))(plan, progress, begin)
    n_inputs, n_truncated = plan.counts()
    return Extraction(n_inputs, tally.n_added, n_truncated, tally.n_tokens, tally.seconds)


def order_inputs(inputs: Iterable[EncoderInput], *, by_prefix: bool = False) -> list[EncoderInput]:
    """Return the distinct inputs in the order in which they are encoded."""
    distinct = list(dict.fromkeys(inputs))
    return [distinct[index] for index in plan_inputs(distinct, by_prefix=by_prefix)]


#: The texts of the routers that are computed together.
_RoutingUnit = tuple[str, ...]


class EncodingPart(NamedTuple):
    """Inputs that are encoded and committed together, and the routing units of their window."""

    inputs: list[EncoderInput]
    units: Sequence[_RoutingUnit]

    def missing_from(self, store: FeatureStore) -> EncodingPart:
        """Return the inputs that a store lacks, with the routing units that they need."""
        inputs = [self.inputs[i] for i in store.missing(self.inputs)]
        texts = {item.router.text if item.router else item.text for item in inputs}
        return EncodingPart(inputs, [u for u in self.units if not texts.isdisjoint(u)])


class PartEncoder:
    """Encodes parts, and caches their routers. Several threads may use it."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self._lock = encoder, threading.Lock()
        self._queries: dict[_RoutingUnit, RouterQueries] = {}

    def encode(self, part: EncodingPart) -> Encoded:
        """Return the vectors of a part, which may not be finite; see ``check_storable``."""
        try:
            if not part.units:
                return self._encoder.encode_with_counts(part.inputs)
            return self._encoder.encode_with_counts(part.inputs, self._find_queries(part.units))
        except NotFiniteError as error:
            if error.encoded is None:
                raise
            return error.encoded

    def _find_queries(self, units: Sequence[_RoutingUnit]) -> RouterQueries:
        """Return the queries of routers. A unit is computed by the first thread that needs it."""
        queries: dict[str, RouterQuery] = {}
        with self._lock:
            # The limit covers at least one window, as each of its parts may need nearly all its
            # routers.
            if sum(map(len, self._queries)) > max(_MAX_ROUTERS, WINDOW):
                self._queries = {}
            for unit in units:
                if unit not in self._queries:
                    self._queries[unit] = self._encoder.queries(unit)
                queries |= self._queries[unit]
        return queries


@dataclass(eq=False)
class EncodingPlan:
    """The distinct inputs that a store lacks, in the order and the parts in which to encode them.

    The fields are arguments of ``extract``. Creating a plan reads no inputs.
    """

    inputs: Iterable[EncoderInput]
    store: FeatureStore
    chunk: int
    window: int
    by_prefix: bool

    def __post_init__(self) -> None:
        self._seen = KeyIndex()
        self._units: dict[str, _RoutingUnit] = {}
        #: A mask of the store's rows that were requested, and the requested inputs without a row.
        self._is_requested = np.zeros(0, dtype=np.bool_)
        self._pending: list[EncoderInput] = []

    def parts(self, concurrency: Callable[[], int]) -> Iterator[EncodingPart]:
        """Yield the parts that the store does not hold completely. This can be called only once.

        A chunk has ``concurrency()`` parts; see ``part_size``. The function is called only if an
        input is missing.
        """
        for window in iterate_windows(self.inputs, self.window):
            ordered = order_inputs(select_unseen(window, self._seen), by_prefix=self.by_prefix)
            units = self._find_units(ordered)
            self._record_requests(ordered)
            absent = np.zeros(len(ordered), dtype=np.bool_)
            absent[self.store.missing(ordered)] = True
            if not absent.any():
                continue
            size = part_size(len(ordered), concurrency(), self.chunk)
            for start in range(0, len(ordered), size):
                if absent[start : start + size].any():
                    yield EncodingPart(ordered[start : start + size], units)

    def _find_units(self, window: Sequence[EncoderInput]) -> list[_RoutingUnit]:
        """Return the routing units of a window's routers; later windows reuse them.

        Units depend on the windows only, and not on what is stored. So a resumed extraction
        computes bit-identical vectors. If there would be more than ``_MAX_ROUTERS`` routers, the
        previous ones are dropped.
        """
        texts = sorted({item.router.text for item in window if item.router is not None})
        new = [text for text in texts if text not in self._units]
        if new and len(self._units) + len(new) > _MAX_ROUTERS:
            self._units, new = {}, texts
        new.sort(key=len)
        for start in range(0, len(new), _UNIT_SIZE):
            unit = tuple(new[start : start + _UNIT_SIZE])
            self._units |= dict.fromkeys(unit, unit)
        return list(dict.fromkeys(self._units[text] for text in texts))

    def counts(self) -> tuple[int, int]:
        """Return the number of distinct inputs, and how many of them were truncated."""
        self._record_requests([])
        return len(self._seen), self.store.count_truncated_at(np.flatnonzero(self._is_requested))

    def _record_requests(self, inputs: Sequence[EncoderInput]) -> None:
        requested = [*self._pending, *inputs]
        positions = self.store.positions(requested)
        self._is_requested.resize(len(self.store), refcheck=False)
        self._is_requested[positions[positions >= 0]] = True
        self._pending = [requested[i] for i in np.flatnonzero(positions < 0)]


def part_size(n_inputs: int, threads: int, chunk: int = CHUNK) -> int:
    """Return the number of inputs of a part, with which every thread gets as many parts.

    It depends on what is encoded, and not on what is stored, as does everything that decides how
    inputs are batched.
    """
    largest = max(1, chunk // threads)
    n_parts = threads * math.ceil(n_inputs / (threads * largest))
    return math.ceil(n_inputs / n_parts)


@dataclass(frozen=True, slots=True)
class CommittedCounts:
    """The counts of a committed part.

    Attributes:
        n_inputs: Inputs that were encoded.
        n_added: Inputs that were new in the store.
        n_characters: Characters of the encoded inputs.
        n_tokens: Tokens of the encoded inputs, before truncation.
        seconds: The time to encode and store them.
        failure: The first input of a worker's item without a vector, with the reason.
    """

    n_inputs: int = 0
    n_added: int = 0
    n_characters: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    failure: tuple[EncoderInput, str] | None = None


class ExtractionTally:
    """Sums the counts of committed parts, and shows them.

    Attributes:
        n_added: Inputs that were added to the store.
        n_tokens: Tokens of the encoded inputs, before truncation.
        seconds: The wall-clock time from the first batch to the last commit.
    """

    def __init__(self, progress: ExtractionBar | None) -> None:
        self._progress, self._began = progress, 0.0
        self.n_added = self.n_tokens = 0
        self.seconds = 0.0

    def add(self, done: CommittedCounts, at_once: int) -> None:
        """Add the counts of a part that one of ``at_once`` threads or actors committed.

        The progress gets the time in which one of them encoded the part, divided by ``at_once``.
        """
        if not done.n_inputs:  # another process has stored it
            return
        self._began = self._began or time.monotonic() - done.seconds
        self.seconds = time.monotonic() - self._began
        self.n_added += done.n_added
        self.n_tokens += done.n_tokens
        if self._progress:
            seconds = done.seconds / at_once
            self._progress.advance(done.n_inputs, done.n_characters, done.n_tokens, seconds)


#: Runs a plan and shows its progress. It calls its third argument before it encodes the first
#: input.
PlanExecutor = Callable[[EncodingPlan, ExtractionBar | None, Callable[[], None]], ExtractionTally]


def encode_and_commit(
    store: FeatureStore, part: EncodingPart, encode: Callable[[EncodingPart], Encoded]
) -> CommittedCounts | None:
    """Encode and store the missing inputs of a part; return None if another process claimed it.

    Raises:
        InputError: The encoder returned NaN or infinity. The other inputs are stored.
        DiskFullError: The disk is full.
    """
    if not store.missing(part.inputs):
        return CommittedCounts()
    name = digest_bytes(b"".join(item.key for item in part.inputs), size=8).hex()
    with store.claim(name) as is_claimed:
        if not is_claimed:
            return None
        store.refresh()
        lacking = part.missing_from(store)
        if not lacking.inputs:
            return CommittedCounts()
        began = time.monotonic()
        return commit_finite(store, lacking.inputs, encode(lacking), began)


def commit_finite(
    store: FeatureStore, inputs: Sequence[EncoderInput], encoded: Encoded, began: float
) -> CommittedCounts:
    """Store the vectors that are finite in the store's type, and return counts of the inputs.

    ``began`` is the time, ``time.monotonic()``, at which their encoding began.

    Raises:
        InputError: The encoder returned NaN or infinity. The other inputs are stored.
        DiskFullError: The disk is full.
    """
    stored = store.cast(encoded.vectors)
    good = np.flatnonzero(np.isfinite(stored).all(axis=1))
    finite_inputs = [inputs[i] for i in good.tolist()]
    added = store.append(finite_inputs, encoded.take(good)) if finite_inputs else 0
    check_storable(stored, inputs)
    characters, n_tokens = sum(item.size for item in inputs), int(encoded.n_tokens.sum())
    return CommittedCounts(len(inputs), added, characters, n_tokens, time.monotonic() - began)


def check_storable(vectors: NDArray[Any], inputs: Sequence[EncoderInput]) -> None:
    """Check the vectors of inputs, (n, dim), in the type of their store.

    Raises:
        InputError: one of them is not finite.
    """
    advice = (
        "Compute in float32 or bfloat16, or store float32 if vectors overflow "
        f"{vectors.dtype} (dtype and store-dtype of extract)."
    )
    check_finite(vectors, inputs, advice=advice)


def _execute_in_threads(
    load: Callable[[], Encoder],
    plan: EncodingPlan,
    progress: ExtractionBar | None,
    begin: Callable[[], None],
) -> ExtractionTally:
    """Encode and store all missing inputs of a plan, with an encoder that is loaded if needed."""
    tally = ExtractionTally(progress)
    with ExitStack() as stack:

        @cache
        def start() -> tuple[WorkerThreads, PartEncoder]:
            from llmcond.encoders.encoder import WorkerThreads

            begin()
            encoder = load()
            threads = WorkerThreads(encoder.concurrency)
            return stack.enter_context(closing(threads)), PartEncoder(encoder)

        parts = plan.parts(lambda: start()[0].concurrency.threads)
        first = next(parts, None)
        if first is not None:
            _commit_parts(chain([first], parts), plan.store, *start(), tally)
    return tally


def _commit_parts(
    parts: Iterable[EncodingPart],
    store: FeatureStore,
    threads: WorkerThreads,
    encoder: PartEncoder,
    tally: ExtractionTally,
) -> None:
    """Encode and store parts.

    Parts that other processes have claimed come last. This function waits for them, or takes them
    over if the other process ends without storing them.
    """
    claimed: deque[EncodingPart] = deque()

    def commit(part: EncodingPart) -> tuple[EncodingPart, CommittedCounts | None]:
        return part, encode_and_commit(store, part, encoder.encode)

    def retry_claimed() -> Iterator[EncodingPart]:
        for part in parts:
            yield part
            if len(claimed) > _MAX_CLAIMED:
                time.sleep(_WAIT_SECONDS / 10)
                yield claimed.popleft()

    remaining: Iterable[EncodingPart] = retry_claimed()
    while True:
        with closing(threads.map(commit, remaining)) as results:
            for part, done in results:
                if done is None:
                    claimed.append(part)
                else:
                    tally.add(done, at_once=threads.concurrency.threads)
        if isinstance(remaining, list) and len(claimed) == len(remaining):
            time.sleep(_WAIT_SECONDS)
            store.refresh()
        if not claimed:
            return
        remaining = list(claimed)
        claimed.clear()


#: The largest number of missing inputs in a sample.
_SAMPLE_SIZE = 2_048


@dataclass(frozen=True, slots=True)
class MissingCount:
    """Counts of the inputs of an extraction that a store lacks.

    The sample is chosen by keys, so it is random. Taking every n-th input would be biased, since
    data are often periodic, such as two conditions for each sentence pair.

    Attributes:
        n_inputs: Distinct inputs.
        n_missing: Distinct inputs that the store lacks.
        n_characters: Characters of the missing inputs.
        sample: A random sample of the missing inputs.
        every: The number of missing inputs for each one in the sample.
        passes: The same counts of what goes through the network for the missing inputs; None: the
            missing inputs themselves.
    """

    n_inputs: int
    n_missing: int
    n_characters: int
    sample: Sequence[EncoderInput]
    every: int = 1
    passes: MissingCount | None = None


def merge_counts(parts: Sequence[MissingCount]) -> MissingCount:
    """Add several counts, which were made with the same ``seen`` index."""
    every = max((part.every for part in parts), default=1)
    passes = [part.passes for part in parts if part.passes is not None]
    return MissingCount(
        sum(part.n_inputs for part in parts),
        sum(part.n_missing for part in parts),
        sum(part.n_characters for part in parts),
        _sample_by_key(every, [item for part in parts for item in part.sample]),
        every,
        merge_counts(passes) if passes else None,
    )


def _sample_by_key(every: int, items: Sequence[EncoderInput]) -> list[EncoderInput]:
    """Return about one in ``every`` items, where ``every`` is a power of two.

    The result is the same if the items were sampled with a smaller power of two before.
    """
    return [item for item in items if int.from_bytes(item.key[:4], "big") % every == 0]


@dataclass(slots=True)
class _Sample:
    """A number of inputs, their characters, and a sample of one in ``every`` of them."""

    n: int = 0
    n_characters: int = 0
    items: list[EncoderInput] = field(default_factory=list)
    every: int = 1

    def add(self, items: Sequence[EncoderInput]) -> None:
        """Count inputs, and sample them by their keys."""
        self.n += len(items)
        self.n_characters += sum(item.size for item in items)
        self.items += _sample_by_key(self.every, items)
        while len(self.items) > _SAMPLE_SIZE:
            self.every *= 2
            self.items = _sample_by_key(self.every, self.items)

    def counted(self, n_inputs: int, passes: MissingCount | None = None) -> MissingCount:
        """Return the counts of these inputs, which are missing."""
        return MissingCount(n_inputs, self.n, self.n_characters, self.items, self.every, passes)


def count_missing(
    store: FeatureStore,
    inputs: Iterable[EncoderInput],
    window: int,
    seen: KeyIndex | None = None,
    passes: KeyIndex | None = None,
) -> MissingCount:
    """Count the inputs that a store lacks. Memory hardly grows with the number of inputs.

    Repeated inputs are counted once. Inputs in ``seen`` are not counted, and counted inputs are
    added to it. ``window`` inputs are looked up together. ``passes`` is given if inputs that differ
    by their routers only go through the network once: what goes through it is added to this index.
    """
    seen, stored = KeyIndex() if seen is None else seen, len(store)
    before, missing, through = len(seen), _Sample(), _Sample()
    for chunk in iterate_windows(inputs, window):
        distinct = select_unseen(chunk, seen)
        positions = store.positions(distinct)
        # Inputs that other processes add during the count were missing when it began.
        absent = [distinct[i] for i in np.flatnonzero((positions < 0) | (positions >= stored))]
        missing.add(absent)
        if passes is not None:
            through.add(select_unseen(network_inputs(absent), passes))
    work = None if passes is None else through.counted(through.n)
    return missing.counted(len(seen) - before, work)


def iterate_windows(inputs: Iterable[EncoderInput], size: int) -> Iterator[list[EncoderInput]]:
    """Yield inputs in lists of ``size``; the last list may be shorter."""
    stream = iter(inputs)
    while window := list(islice(stream, size)):
        yield window


def select_unseen(window: Iterable[EncoderInput], seen: KeyIndex) -> list[EncoderInput]:
    """Return the distinct inputs of a window that are not in ``seen``, and add them to it."""
    distinct = list(dict.fromkeys(window))
    known = seen.find(b"".join(item.key for item in distinct)) >= 0
    new_inputs = [item for item, is_known in zip(distinct, known, strict=True) if not is_known]
    seen.add(b"".join(item.key for item in new_inputs))
    return new_inputs
