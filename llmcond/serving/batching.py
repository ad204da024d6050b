"""Dynamic batching: rows of many requests are encoded together, by a token budget, in fair turns.

One thread owns the model. While it computes a batch, requests gather. After a batch of several
requests it waits for a moment before it takes the next one: the clients that have just been
answered often ask again, and one large batch takes less time than two small ones. A batch is filled
in turns, so that a short request is in the next batch however long others are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoded

#: The texts of one vector, or of one comparison.
Row = tuple[str, ...]

#: Tokens of a character, before any were counted: that of English.
_TOKENS_OF_A_CHARACTER = 0.25
#: How much the newest batch counts in running means.
_NEWEST = 0.1
#: The longest wait between two batches, as a part of the time that the first one took.
_PATIENCE = 0.2
#: Seconds without a new request after which no more are expected.
_MOMENT = 0.001


class ClosedError(Exception):
    """The batcher is closing, and takes no more."""


@dataclass(eq=False, slots=True)
class _Job:
    rows: Sequence[Row]
    future: Future[Any] = field(default_factory=Future)
    call: Callable[[], Any] | None = None
    taken: int = 0
    done: int = 0
    parts: list[Any] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.rows) - self.taken

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        # Whoever waits may give up at any moment.
        with suppress(InvalidStateError):
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)


#: Some of a job's rows, of which a batch is made.
_Piece = tuple[_Job, Sequence[Row]]


class Batcher:
    """A queue in front of a model, and the thread that owns the model.

    Attributes:
        waiting: rows that are in no batch yet.
        awaited: number of results that the server is waiting for or has not read yet; the server
            keeps this count.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[Row]], Encoded],
        max_tokens: int,
        longest: int,
        observe: Callable[[Encoded, float], None] = lambda encoded, seconds: None,
    ) -> None:
        """Start the thread.

        Args:
            encode: what is asked of the model.
            max_tokens: of a batch, about: tokens are reckoned from characters, by what those of
                earlier batches had. One row at least.
            longest: tokens that a row has at most, since longer texts are cut.
            observe: is told each batch, and its seconds, on the model's thread.
        """
        self._encode, self._observe = encode, observe
        self._max_tokens, self._longest = max_tokens, longest
        self._turns: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._per_character, self._row_seconds = _TOKENS_OF_A_CHARACTER, 0.0
        #: The time at which the wait between two batches ends.
        self._patient_until = 0.0
        self.waiting = self.awaited = 0
        self._thread = threading.Thread(target=self._run, name="llmcond-model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the thread runs and takes work."""
        return self._thread.is_alive() and not self._closing

    @property
    def delay(self) -> float:
        """Return in how many seconds about what waits now will be done."""
        return self.waiting * self._row_seconds

    def submit(self, rows: Sequence[Row]) -> Future[Encoded]:
        """Return what will be the vectors of rows, in their order. To cancel it drops its rows.

        Raises:
            ClosedError: it is closing.
        """
        return self._add(_Job(rows))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Return what a function will give that is called by the model's thread in its turn.

        Raises:
            ClosedError: it is closing.
        """
        return self._add(_Job([()], call=function))

    def _add(self, job: _Job) -> Future[Any]:
        with self._changed:
            if self._closing:
                raise ClosedError
            self._turns.append(job)
            self.waiting += job.left
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Finish what was accepted, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # -- the thread of the model -----------------------------------------------------------------

    def _run(self) -> None:
        while pieces := self._take():
            began = time.perf_counter()
            function = pieces[0][0].call
            try:
                if function is not None:
                    pieces[0][0].settle(function())
                else:
                    self._finish(pieces)
            except Exception as error:
                self._one_by_one(pieces, error)
            if function is not None:
                continue
            ended = time.perf_counter()
            self._patient_until = ended + _PATIENCE * (ended - began) * (len(pieces) > 1)

    def _take(self) -> list[_Piece]:
        """Return the next batch, or one call; nothing where all is done and it is closing."""
        with self._changed:
            while True:
                self._wait_for_more()
                pieces = list(self._fill())
                if pieces or (self._closing and not self._turns):
                    return pieces
                self._changed.wait()

    def _wait_for_more(self) -> None:
        """Wait until all results are read and no new requests come, or a batch is full."""
        room, counted = float(self._max_tokens), 0
        while time.perf_counter() < self._patient_until and self._turns and not self._closing:
            for job in islice(self._turns, counted, None):
                room -= self._share(job, room)[1]
            counted = len(self._turns)
            all_read = self.awaited <= counted
            if room <= 0 or (not self._changed.wait(_MOMENT) and all_read):
                return

    def _fill(self) -> Iterator[_Piece]:
        room = float(self._max_tokens)
        share = room / max(1, len(self._turns))
        empty = True
        while self._turns and room > 0:
            job = self._turns.popleft()
            if job.future.done():  # given up, or failed
                self.waiting -= job.left
                continue
            if job.call is not None and not empty:
                self._turns.appendleft(job)
                return
            rows, used = self._share(job, min(share, room))
            job.taken += len(rows)
            self.waiting -= len(rows)
            room -= used
            empty = False
            yield job, rows
            if job.left:
                self._turns.append(job)
            if job.call is not None:
                return

    def _share(self, job: _Job, most: float) -> tuple[Sequence[Row], float]:
        """Return a job's next rows, one at least, of about so many tokens, and how many these are.

        A row that is larger than what is left of the batch makes it larger than it should be.
        """
        used, stop = 0.0, job.taken
        while stop < len(job.rows) and (used < most or stop == job.taken):
            size = sum(map(len, job.rows[stop]))
            used += min(1 + size * self._per_character, self._longest)
            stop += 1
        return job.rows[job.taken : stop], used

    def _finish(self, pieces: Sequence[_Piece]) -> None:
        """Encode a batch, and settle the jobs whose last rows are in it."""
        rows = [row for _, own in pieces for row in own]
        began = time.perf_counter()
        encoded = self._encode(rows)
        seconds = time.perf_counter() - began
        self._observe(encoded, seconds)
        characters = sum(len(text) for row in rows for text in row)
        uncut = int(encoded.n_tokens.sum())
        if uncut:
            self._per_character += _NEWEST * (uncut / characters - self._per_character)
        self._row_seconds += _NEWEST * (seconds / len(rows) - self._row_seconds)
        start = 0
        for job, taken in pieces:
            own = slice(start, start + len(taken))
            job.parts.append((encoded.vectors[own], encoded.n_tokens[own], encoded.truncated[own]))
            job.done += len(taken)
            start = own.stop
            if job.done == len(job.rows):
                vectors, n_tokens, truncated = map(np.concatenate, zip(*job.parts, strict=True))
                from llmcond.encoders.encoder import Encoded

                job.settle(Encoded(vectors, n_tokens, truncated, 0))

    def _one_by_one(self, pieces: Sequence[_Piece], error: Exception) -> None:
        """Encode the requests of a batch each by itself: one of them may be at fault, or none."""
        jobs: dict[_Job, list[_Piece]] = {}
        for piece in pieces:
            jobs.setdefault(piece[0], []).append(piece)
        for job, own in jobs.items():
            try:
                if len(jobs) == 1:
                    raise error
                self._finish(own)
            except Exception as own_error:
                job.settle(error=own_error)
