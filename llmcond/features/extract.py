"""Extraction: the inputs that a store does not hold yet, encoded chunk by chunk.

Inputs may come from anywhere, and as many as one likes: they are read a window at a time. Windows
are functions of the inputs, parts and batches of these and of the number of threads that encode. So
an extraction that was interrupted computes what an undisturbed one does, to the bit on the same
machine, and otherwise up to rounding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmcond.encoders.spec import EncoderInput, plan_inputs
from llmcond.errors import UserError
from llmcond.features.keys import KeyIndex
from llmcond.features.missing import Missing, count_missing, fresh, windows
from llmcond.features.store import FeatureStore
from llmcond.files import digest_bytes

#: Inputs that a kill can lose at most; committed in parts, one for each thread that encodes.
CHUNK = 1_024
#: Inputs that are read, and ordered, together.
WINDOW = 16_384
_WAIT_SECONDS = 0.2
#: Parts that other processes were at when they came up, kept until they are looked at again.
_MOST_BUSY = 32


class EncodedInputs(Protocol):
    """What an encoder returns: vectors, and what it took to make them."""

    @property
    def vectors(self) -> NDArray[np.float32]:
        """Return (n, dim)."""
        ...

    @property
    def n_tokens(self) -> NDArray[np.int32]:
        """Return (n,) tokens before truncation."""
        ...

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """Return (n,) whether an input was cut."""
        ...


class InputEncoder(Protocol):
    """An encoder, as far as extraction knows it."""

    def encode_counted(self, inputs: Sequence[EncoderInput]) -> EncodedInputs:
        """Return the vectors of inputs, in their order."""
        ...


class ParallelLanes(Protocol):
    """Threads that encode side by side; see :class:`llmcond.encoders.lanes.Lanes`."""

    @property
    def count(self) -> int:
        """Return how many there are."""
        ...

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Yield ``function`` of each item, in their order."""
        ...


@runtime_checkable
class LanedEncoder(Protocol):
    """An encoder that several threads may use at once, and gains by it."""

    @property
    def lanes(self) -> ParallelLanes:
        """Return its threads."""
        ...


class Progress(Protocol):
    """Something that shows how far an extraction is."""

    def start(self, inputs: int | None, characters: int | None) -> None:
        """Show a bar for so many inputs still to encode; None where nobody knows how many."""
        ...

    def advance(self, inputs: int, characters: int, tokens: int) -> None:
        """Show that so many more are stored."""
        ...


class Silent:
    """A progress that shows nothing."""

    def start(self, inputs: int | None, characters: int | None) -> None:
        """See :class:`Progress`."""

    def advance(self, inputs: int, characters: int, tokens: int) -> None:
        """See :class:`Progress`."""


@dataclass(frozen=True, slots=True)
class Extraction:
    """What an extraction did.

    Attributes:
        n_inputs: distinct inputs asked for.
        n_computed: of them, encoded and stored now.
        n_truncated: of all of them, how many the encoder had to cut.
        n_tokens: tokens of the inputs encoded now, before truncation.
        seconds: wall-clock time.
    """

    n_inputs: int
    n_computed: int
    n_truncated: int
    n_tokens: int
    seconds: float


class NonFiniteError(UserError):
    """An encoder gave NaN or infinity.

    Attributes:
        item: the input that it gave it for.
    """

    def __init__(self, item: EncoderInput, dtype: str) -> None:
        """Make the message, without the row; whoever knows the rows adds it."""
        super().__init__(
            f"the encoder gave NaN or infinity for {item.text[:80]!r}. Try --dtype float32 or "
            f"bfloat16, or --store-dtype float32 if vectors overflow {dtype}."
        )
        self.item = item


def extract(
    inputs: Iterable[EncoderInput],
    store: FeatureStore,
    load: Callable[[], InputEncoder],
    progress: Progress | None = None,
    chunk: int = CHUNK,
    *,
    by_prefix: bool = False,
    window: int = WINDOW,
    missing: Missing | None = None,
) -> Extraction:
    """Encode the inputs that ``store`` lacks and commit them chunk by chunk.

    Memory does not grow with the inputs, but for about 50 bytes each that are kept of their keys.
    An extraction that is resumed computes the same batches as before, so the same bits. (Of a chunk
    that an extraction of other inputs stored in part, the rest is encoded in batches of its own,
    equal up to rounding.) Several processes may work on one store: each takes chunks that no other
    one is at.

    Args:
        inputs: the inputs wanted, such as a generator; repeats are encoded once.
        store: where vectors go.
        load: gives the encoder; called only if something is missing.
        progress: told of every part that is stored; None: nobody is.
        chunk: inputs that are computed before they are committed.
        by_prefix: whether the encoder computes once what several inputs begin with.
        window: inputs that are ordered together.
        missing: what of the inputs was counted as missing, for the progress; None: counted now.

    Raises:
        NonFiniteError: the encoder gave NaN or infinity; the good ones of its chunk are stored.
        DiskFullError: no room; what was stored before is kept.
    """
    began = time.monotonic()
    work = _Work(store, load, progress or Silent(), chunk, by_prefix)
    if missing is None and isinstance(inputs, Collection):
        missing = count_missing(store, inputs, window)
    if missing is not None:
        work.tell(missing)
    work.run(windows(inputs, window))
    n_inputs, n_truncated = work.counts()
    seconds = time.monotonic() - began
    return Extraction(n_inputs, work.n_computed, n_truncated, work.n_tokens, seconds)


def plan(inputs: Iterable[EncoderInput], *, by_prefix: bool = False) -> list[EncoderInput]:
    """Return the distinct inputs in the order that they are encoded in."""
    distinct = list(dict.fromkeys(inputs))
    return [distinct[place] for place in plan_inputs(distinct, by_prefix=by_prefix)]


class _Work:
    """One extraction under way."""

    def __init__(
        self,
        store: FeatureStore,
        load: Callable[[], InputEncoder],
        progress: Progress,
        chunk: int,
        by_prefix: bool,
    ) -> None:
        self.n_computed = self.n_tokens = 0
        self._store, self._load, self._progress = store, load, progress
        self._chunk, self._by_prefix = chunk, by_prefix
        self._encoder: InputEncoder | None = None
        self._started = False
        self._seen = KeyIndex()
        #: Which of the store's vectors were asked for, and inputs that it did not have yet.
        self._asked = np.zeros(0, dtype=np.bool_)
        self._awaited: list[EncoderInput] = []
        #: Parts that other processes are at.
        self._busy: deque[list[EncoderInput]] = deque()

    def tell(self, missing: Missing) -> None:
        """Tell the progress how much there is to do."""
        if missing.n_missing:
            self._progress.start(missing.n_missing, missing.n_characters)
            self._started = True

    def run(self, inputs: Iterable[list[EncoderInput]]) -> None:
        """Encode and store everything, read in windows."""
        self._encode(self._parts(inputs))
        while self._busy:
            # Others are at everything that is left: wait for them, or take over if they die.
            waiting = list(self._busy)
            self._busy.clear()
            self._encode(iter(waiting))
            if len(self._busy) == len(waiting):
                time.sleep(_WAIT_SECONDS)
                self._store.refresh()

    def counts(self) -> tuple[int, int]:
        """Return how many distinct inputs were asked for, and how many of them were cut."""
        self._note_asked([])
        return len(self._seen), self._store.count_truncated_at(np.flatnonzero(self._asked))

    # -- parts ---------------------------------------------------------------------------------

    def _parts(self, inputs: Iterable[list[EncoderInput]]) -> Iterator[list[EncoderInput]]:
        """Yield the parts of windows that the store does not hold whole."""
        for window in inputs:
            ordered = plan(fresh(window, self._seen), by_prefix=self._by_prefix)
            self._note_asked(ordered)
            absent = np.zeros(len(ordered), dtype=np.bool_)
            absent[self._store.missing(ordered)] = True
            if not absent.any():
                continue
            size = max(1, self._chunk // self._lanes())
            for start in range(0, len(ordered), size):
                if absent[start : start + size].any():
                    yield ordered[start : start + size]
                while len(self._busy) > _MOST_BUSY:
                    time.sleep(_WAIT_SECONDS / 10)
                    yield self._busy.popleft()

    def _lanes(self) -> int:
        encoder = self._loaded()
        return encoder.lanes.count if isinstance(encoder, LanedEncoder) else 1

    def _loaded(self) -> InputEncoder:
        if self._encoder is None:
            if not self._started:
                self._progress.start(None, None)
            self._encoder = self._load()
        return self._encoder

    def _note_asked(self, inputs: Sequence[EncoderInput]) -> None:
        asked = [*self._awaited, *inputs]
        places = self._store.places(asked)
        self._asked.resize(len(self._store), refcheck=False)
        self._asked[places[places >= 0]] = True
        self._awaited = [asked[i] for i in np.flatnonzero(places < 0)]

    # -- encoding ------------------------------------------------------------------------------

    def _encode(self, parts: Iterator[list[EncoderInput]]) -> None:
        first = next(parts, None)
        if first is None:
            return
        encoder = self._loaded()
        together = encoder.lanes.map if isinstance(encoder, LanedEncoder) else map
        for part, done in together(self._encode_part, chain([first], parts)):
            if done is None:
                self._busy.append(part)
            elif done.n_inputs:
                self.n_computed += done.n_added
                self.n_tokens += done.n_tokens
                self._progress.advance(done.n_inputs, done.n_characters, done.n_tokens)

    def _encode_part(self, part: list[EncoderInput]) -> tuple[list[EncoderInput], _Done | None]:
        """Encode and commit what is missing of a part; None if another process is at it."""
        if not self._store.missing(part):
            return part, _Done(0, 0, 0, 0)
        with self._store.claim(_name(part)) as mine:
            return part, self._encode_claimed(part) if mine else None

    def _encode_claimed(self, part: list[EncoderInput]) -> _Done:
        store = self._store
        store.refresh()
        todo = [part[i] for i in store.missing(part)]
        if not todo:
            return _Done(0, 0, 0, 0)
        encoded = self._loaded().encode_counted(todo)
        finite = np.isfinite(store.cast(encoded.vectors)).all(axis=1)
        good = np.flatnonzero(finite)
        added = store.append(
            [todo[i] for i in good],
            encoded.vectors[good],
            encoded.n_tokens[good],
            encoded.truncated[good],
        )
        if not finite.all():
            raise NonFiniteError(todo[int(np.flatnonzero(~finite)[0])], store.dtype)
        characters = sum(item.size for item in todo)
        return _Done(len(todo), added, characters, int(encoded.n_tokens.sum()))


@dataclass(frozen=True, slots=True)
class _Done:
    """What became of a part: inputs encoded, of them added, their characters and tokens."""

    n_inputs: int
    n_added: int
    n_characters: int
    n_tokens: int


def _name(part: Sequence[EncoderInput]) -> str:
    return digest_bytes(b"".join(item.key for item in part), size=8).hex()
