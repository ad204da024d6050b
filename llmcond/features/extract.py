"""Extraction: the inputs that a store does not hold yet, encoded chunk by chunk.

A plan (:class:`Plan`) says which inputs are encoded, in which order and in which parts. Threads
encode several parts at a time. What they give is committed by :func:`commit`, under a claim, so
that other processes may work on the same plan.

Inputs may come from anywhere, and as many as one likes: they are read a window at a time. Windows
are functions of the inputs, parts and batches of these and of the number of threads that encode. So
an extraction that was interrupted computes what an undisturbed one does, to the bit on the same
machine, and otherwise up to rounding.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from llmcond.encoders.spec import EncoderInput, InputError, plan_inputs
from llmcond.features.keys import KeyIndex
from llmcond.features.missing import Missing, count_missing, counting, fresh, windows
from llmcond.files import digest_bytes

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoded, Encoder, Queries, Query
    from llmcond.encoders.threads import WorkerThreads
    from llmcond.features.store import FeatureStore

#: Inputs that a kill can lose at most; committed in parts, one for each thread that encodes.
CHUNK = 1_024
#: Inputs that are read, and ordered, together.
WINDOW = 65_536
#: Inputs, repeats included, that are counted in a second or two, before the first is encoded.
COUNTED_FIRST = 100_000
_WAIT_SECONDS = 0.2
#: Parts claimed by other processes that are kept until they are looked at again.
_MAX_CLAIMED = 32
#: Routers that are computed together, and that are kept for later windows.
_UNIT, _MAX_ROUTERS = 256, 16_384


class Progress(Protocol):
    """Something that shows how far an extraction is."""

    def start(self, inputs: int | None, characters: int | None) -> None:
        """Show a bar for so many inputs still to encode; None where nobody knows how many."""

    def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
        """Show that so many more are stored.

        ``seconds`` is how long one thread or actor encoded them, divided by how many there are.
        """


@dataclass(frozen=True, slots=True)
class Chunking:
    """The order that inputs are encoded in, and how many are committed together.

    Attributes:
        chunk: inputs that are computed before they are committed.
        window: inputs that are ordered together.
        by_prefix: whether the encoder computes once what several inputs begin with.
    """

    chunk: int = CHUNK
    window: int = WINDOW
    by_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Extraction:
    """What an extraction did.

    Attributes:
        n_inputs: distinct inputs asked for.
        n_computed: of them, encoded and stored now by this process.
        n_truncated: of all of them, how many the encoder had to cut.
        n_tokens: tokens of the inputs encoded now, before truncation.
        seconds: wall-clock time from when the first input was encoded, so without loading.
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
    progress: Progress | None = None,
    chunking: Chunking = Chunking(),
    *,
    missing: Missing | None = None,
    execute: Execute | None = None,
) -> Extraction:
    """Encode the inputs that ``store`` lacks and commit them chunk by chunk.

    Memory does not grow with the inputs, but for about 50 bytes each that are kept of their keys.
    Of a chunk that an extraction of other inputs stored in part, the rest is encoded in batches of
    its own, equal up to rounding.

    Args:
        inputs: the inputs wanted, such as a generator; repeats are encoded once.
        store: where vectors go.
        load: gives the encoder; called only if something is missing.
        progress: told of every part that is stored.
        chunking: the order that inputs are encoded in, and how many are committed together.
        missing: what of the inputs was counted as missing, for the progress; None: counted now, or
            where there are very many beside the encoding.
        execute: carries the plan out elsewhere, in place of threads that call the encoder.

    Raises:
        InputError: the encoder gave NaN or infinity; the good ones of its chunk are stored.
        DiskFullError: no room; what was stored before is kept.
    """
    # Of a generator nothing can be counted before.
    size = len(inputs) if isinstance(inputs, Sized) else 0
    if missing is None and 0 < size <= COUNTED_FIRST:
        missing = count_missing(store, inputs, chunking.window)

    def show(missing: Missing) -> None:
        if progress and missing.n_missing:
            progress.start(missing.n_missing, missing.n_characters)

    def show_begun() -> None:
        if progress and (missing is None or not missing.n_missing):
            progress.start(None, None)

    def load_shown() -> Encoder:
        show_begun()
        return load()

    work = Plan(inputs, store, chunking)
    with ExitStack() as stack:
        if missing is not None:
            show(missing)
        elif size and progress:
            stack.enter_context(counting(store, inputs, chunking.window, show))
        if execute is None:
            threads = stack.enter_context(closing(_Threads(load_shown, store)))
            done = _execute(work, threads, progress)
        else:
            done = execute(work, progress, show_begun)
        seconds = done.seconds  # before threads are closed, and rows are counted
    n_inputs, n_truncated = work.counts()
    return Extraction(n_inputs, done.n_added, n_truncated, done.n_tokens, seconds)


def plan(inputs: Iterable[EncoderInput], *, by_prefix: bool = False) -> list[EncoderInput]:
    """Return the distinct inputs in the order that they are encoded in."""
    distinct = list(dict.fromkeys(inputs))
    return [distinct[place] for place in plan_inputs(distinct, by_prefix=by_prefix)]


#: Each router's text, and the texts of those that it is computed together with.
_Units = Mapping[str, tuple[str, ...]]


class _RouterUnits:
    """Routers, each in a unit that later windows find again.

    What a unit holds is decided by the windows alone, whatever is stored: its vectors are then the
    same to the bit in an extraction that goes on. Where there would be more than ``_MAX_ROUTERS``,
    those of before are forgotten.
    """

    def __init__(self) -> None:
        self._units: dict[str, tuple[str, ...]] = {}

    def of(self, window: Sequence[EncoderInput]) -> _Units:
        """Return the units of a window's routers."""
        texts = sorted({item.router.text for item in window if item.router is not None})
        new = [text for text in texts if text not in self._units]
        if new and len(self._units) + len(new) > _MAX_ROUTERS:
            self._units, new = {}, texts
        new.sort(key=len)
        for start in range(0, len(new), _UNIT):
            unit = tuple(new[start : start + _UNIT])
            self._units |= dict.fromkeys(unit, unit)
        return {text: self._units[text] for text in texts}


class Part(NamedTuple):
    """Inputs that are encoded and committed together, and the routers of their window."""

    inputs: list[EncoderInput]
    units: _Units

    def lacking(self, store: FeatureStore) -> Part:
        """Return the inputs that a store lacks, with the routers that they need."""
        inputs = [self.inputs[i] for i in store.missing(self.inputs)]
        texts = (item.router.text if item.router else item.text for item in inputs)
        return Part(inputs, {text: self.units[text] for text in texts if text in self.units})


class PartEncoder:
    """Encodes parts, and keeps their routers; several threads may use it."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self._kept = encoder, dict[tuple[str, ...], _Unit]()

    def encode(self, part: Part) -> Encoded:
        """Return the vectors of a part."""
        if not part.units:
            return self._encoder.encode_counted(part.inputs)
        # At least those of one window, as each of its parts may need nearly all.
        if sum(map(len, self._kept)) > max(_MAX_ROUTERS, WINDOW):
            self._kept = {}
        queries: dict[str, Query] = {}
        for texts in dict.fromkeys(part.units.values()):
            queries |= self._kept.setdefault(texts, _Unit()).queries(self._encoder, texts)
        return self._encoder.encode_counted(part.inputs, queries)


class _Unit:
    """Routers that are computed together, by the thread that is the first to need one of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queries: Queries | None = None

    def queries(self, encoder: Encoder, texts: Sequence[str]) -> Queries:
        with self._lock:
            if self._queries is None:
                self._queries = encoder.queries(texts)
            return self._queries


@dataclass(eq=False)
class Plan:
    """The distinct inputs that a store lacks, in the order and the parts they are encoded in.

    Made of the arguments of :func:`extract`; nothing is read yet.
    """

    inputs: Iterable[EncoderInput]
    store: FeatureStore
    chunking: Chunking

    def __post_init__(self) -> None:
        self._seen = KeyIndex()
        #: Which of the store's vectors were asked for, and inputs that it did not have yet.
        self._asked = np.zeros(0, dtype=np.bool_)
        self._awaited: list[EncoderInput] = []

    def parts(self, concurrency: Callable[[], int]) -> Iterator[Part]:
        """Yield the parts that the store does not hold completely; once.

        A chunk has ``concurrency()`` parts, which is asked once there is something to encode.
        """
        units = _RouterUnits()
        for window in windows(self.inputs, self.chunking.window):
            ordered = plan(fresh(window, self._seen), by_prefix=self.chunking.by_prefix)
            routers = units.of(ordered)
            self._note_asked(ordered)
            absent = np.zeros(len(ordered), dtype=np.bool_)
            absent[self.store.missing(ordered)] = True
            if not absent.any():
                continue
            size = max(1, self.chunking.chunk // concurrency())
            for start in range(0, len(ordered), size):
                if absent[start : start + size].any():
                    yield Part(ordered[start : start + size], routers)

    def counts(self) -> tuple[int, int]:
        """Return how many distinct inputs were asked for, and how many of them were truncated."""
        self._note_asked([])
        return len(self._seen), self.store.count_truncated_at(np.flatnonzero(self._asked))

    def _note_asked(self, inputs: Sequence[EncoderInput]) -> None:
        asked = [*self._awaited, *inputs]
        places = self.store.places(asked)
        self._asked.resize(len(self.store), refcheck=False)
        self._asked[places[places >= 0]] = True
        self._awaited = [asked[i] for i in np.flatnonzero(places < 0)]


@dataclass(frozen=True, slots=True)
class Committed:
    """What was committed of a part: inputs, those new in the store, characters, tokens, seconds."""

    n_inputs: int = 0
    n_added: int = 0
    n_characters: int = 0
    n_tokens: int = 0
    seconds: float = 0.0


class Tally:
    """Adds up what was encoded and stored, and shows it; the time starts with the first batch.

    Attributes:
        n_added: inputs that were added to the store.
        n_tokens: tokens of those that were encoded, before truncation.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._began = progress, 0.0
        self.n_added = self.n_tokens = 0

    def add(self, done: Committed, at_once: int) -> None:
        """Add what one of ``at_once`` threads or actors has just done."""
        self._began = self._began or time.monotonic() - done.seconds
        self.n_added += done.n_added
        self.n_tokens += done.n_tokens
        if self._progress:
            seconds = done.seconds / at_once
            self._progress.advance(done.n_inputs, done.n_characters, done.n_tokens, seconds)

    @property
    def seconds(self) -> float:
        """Return the wall-clock time since the first batch began."""
        return time.monotonic() - self._began if self._began else 0.0


#: Carries a plan out, showing how far it is; what it calls before anything is encoded shows that.
Execute = Callable[[Plan, Progress | None, Callable[[], None]], Tally]


def commit(store: FeatureStore, part: Part, encode: Callable[[Part], Encoded]) -> Committed | None:
    """Encode and store what is missing of a part; None if another process has claimed it.

    Raises:
        InputError: the encoder gave NaN or infinity; the good ones are stored.
        DiskFullError: no room.
    """
    if not store.missing(part.inputs):
        return Committed()
    name = digest_bytes(b"".join(item.key for item in part.inputs), size=8).hex()
    with store.claim(name) as mine:
        if not mine:
            return None
        store.refresh()
        lacking = part.lacking(store)
        todo = lacking.inputs
        if not todo:
            return Committed()
        began = time.monotonic()
        encoded = encode(lacking)
        finite = np.isfinite(store.cast(encoded.vectors)).all(axis=1)
        good = np.flatnonzero(finite)
        added = store.append([todo[i] for i in good], encoded.take(good))
        if not finite.all():
            raise not_finite(todo[int(np.argmin(finite))], store.dtype)
        characters = sum(item.size for item in todo)
        n_tokens, seconds = int(encoded.n_tokens.sum()), time.monotonic() - began
        return Committed(len(todo), added, characters, n_tokens, seconds)


def not_finite(item: EncoderInput, dtype: str) -> InputError:
    """Return what is said of an input whose vector cannot be stored in a type."""
    return InputError(
        item,
        f"the encoder gave NaN or infinity for {item.text[:80]!r}. Try --dtype float32 or "
        f"bfloat16, or --store-dtype float32 if vectors overflow {dtype}.",
    )


class _Threads:
    """Worker threads that commit parts; encoder and threads start when there is one to encode."""

    def __init__(self, load: Callable[[], Encoder], store: FeatureStore) -> None:
        self._load, self._store = load, store

    @cached_property
    def encoder(self) -> Encoder:
        return self._load()

    @cached_property
    def threads(self) -> WorkerThreads:
        from llmcond.encoders.threads import WorkerThreads

        return WorkerThreads(self.encoder.concurrency)

    @cached_property
    def _encode(self) -> Callable[[Part], Encoded]:
        return PartEncoder(self.encoder).encode

    def commit(self, parts: Iterable[Part]) -> Generator[tuple[Part, Committed | None]]:
        """Yield each part with what became of it, in their order; see :func:`commit`."""
        waiting = iter(parts)
        first = next(waiting, None)
        if first is None:
            return
        encode = self._encode

        def work(part: Part) -> tuple[Part, Committed | None]:
            return part, commit(self._store, part, encode)

        yield from self.threads.map(work, chain([first], waiting))

    def close(self) -> None:
        if "threads" in vars(self):
            self.threads.close()


def _execute(plan: Plan, threads: _Threads, progress: Progress | None) -> Tally:
    """Encode and store everything that a plan lacks.

    Parts that other processes have claimed come last: they are waited for, or taken over if the
    process dies.
    """
    claimed: deque[Part] = deque()
    tally = Tally(progress)

    def parts() -> Iterator[Part]:
        for part in plan.parts(lambda: threads.threads.concurrency.threads):
            yield part
            while len(claimed) > _MAX_CLAIMED:
                time.sleep(_WAIT_SECONDS / 10)
                yield claimed.popleft()

    remaining: Iterable[Part] = parts()
    while True:
        with closing(threads.commit(remaining)) as results:
            for part, done in results:
                if done is None:
                    claimed.append(part)
                elif done.n_inputs:
                    tally.add(done, at_once=threads.encoder.concurrency.threads)
        if isinstance(remaining, list) and len(claimed) == len(remaining):
            time.sleep(_WAIT_SECONDS)
            plan.store.refresh()
        if not claimed:
            return tally
        remaining = list(claimed)
        claimed.clear()
