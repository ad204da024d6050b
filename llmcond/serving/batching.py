"""Dynamic batching: rows of many requests are encoded together, within a token budget.

One thread owns the model. While it computes a batch, further requests queue up. After a batch of
several requests the thread waits briefly before it takes the next one: clients that have just been
answered often send another request, and one large batch takes less time than two small ones. A
batch takes rows from all waiting requests in turn, so that a short request is in the next batch
however long the others are.
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
    from llmcond.encoders.spec import Encoded

#: The texts of one vector, or of one comparison.
Row = tuple[str, ...]

#: Initial estimate of the number of tokens per character: the figure of English.
_TOKENS_PER_CHARACTER = 0.25
#: Weight of the newest batch in running means.
_NEWEST_WEIGHT = 0.1
#: Longest wait between two batches, as a fraction of the time that the first one took.
_WAIT_FRACTION = 0.2
#: Seconds without a new request after which no more are expected.
_IDLE_SECONDS = 0.001


class ClosedError(Exception):
    """The batcher is closing and accepts no more work."""


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
        # The request that waits for the result may be cancelled at any moment.
        with suppress(InvalidStateError):
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)


#: Some rows of a job that go into a batch.
_Piece = tuple[_Job, Sequence[Row]]


class Batcher:
    """A queue in front of a model, and the thread that owns the model.

    Attributes:
        waiting: number of rows that are not in a batch yet.
        awaited: number of results that the server is waiting for or has not read yet; the server
            updates this count.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[Row]], Encoded],
        max_tokens: int,
        max_row_tokens: int,
        on_batch: Callable[[Encoded, float], None] = lambda encoded, seconds: None,
    ) -> None:
        """Start the thread.

        Args:
            encode: encodes rows with the model.
            max_tokens: approximate token budget of a batch. Tokens are estimated from characters,
                at the ratio of previous batches. A batch has at least one row.
            max_row_tokens: maximal number of tokens of a row; longer texts are truncated.
            on_batch: called with each encoded batch and its seconds, on the model's thread.
        """
        self._encode, self._observe = encode, on_batch
        self._max_tokens, self._longest = max_tokens, max_row_tokens
        self._turns: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._per_character, self._row_seconds = _TOKENS_PER_CHARACTER, 0.0
        #: Time at which the wait between two batches ends.
        self._patient_until = 0.0
        self.waiting = self.awaited = 0
        self._thread = threading.Thread(target=self._run, name="llmcond-model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running and accepts work."""
        return self._thread.is_alive() and not self._closing

    @property
    def estimated_delay(self) -> float:
        """Estimated number of seconds until the waiting rows are encoded."""
        return self.waiting * self._row_seconds

    def submit(self, rows: Sequence[Row]) -> Future[Encoded]:
        """Queue rows, and return a future of their vectors, in order. Cancelling it drops the rows.

        Raises:
            ClosedError: if the batcher is closing.
        """
        return self._enqueue(_Job(rows))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a function for the model's thread, and return a future of its result.

        Raises:
            ClosedError: if the batcher is closing.
        """
        return self._enqueue(_Job([()], call=function))

    def _enqueue(self, job: _Job) -> Future[Any]:
        with self._changed:
            if self._closing:
                raise ClosedError
            self._turns.append(job)
            self.waiting += job.left
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Finish the accepted work, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # -- the model's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while pieces := self._next_batch():
            began = time.perf_counter()
            function = pieces[0][0].call
            try:
                if function is not None:
                    pieces[0][0].settle(function())
                else:
                    self._encode_batch(pieces)
            except Exception as error:
                self._encode_separately(pieces, error)
            if function is not None:
                continue
            ended = time.perf_counter()
            self._patient_until = ended + _WAIT_FRACTION * (ended - began) * (len(pieces) > 1)

    def _next_batch(self) -> list[_Piece]:
        """Return the next batch, or one call; an empty list once the batcher is closed and done."""
        with self._changed:
            while True:
                self._wait_for_more()
                pieces = list(self._fill_batch())
                if pieces or (self._closing and not self._turns):
                    return pieces
                self._changed.wait()

    def _wait_for_more(self) -> None:
        """Wait until all results are read and no new requests come, or a batch is full."""
        room, counted = float(self._max_tokens), 0
        while time.perf_counter() < self._patient_until and self._turns and not self._closing:
            for job in islice(self._turns, counted, None):
                room -= self._next_rows(job, room)[1]
            counted = len(self._turns)
            all_read = self.awaited <= counted
            if room <= 0 or (not self._changed.wait(_IDLE_SECONDS) and all_read):
                return

    def _fill_batch(self) -> Iterator[_Piece]:
        room = float(self._max_tokens)
        share = room / max(1, len(self._turns))
        empty = True
        while self._turns and room > 0:
            job = self._turns.popleft()
            if job.future.done():  # the request was cancelled, or has failed
                self.waiting -= job.left
                continue
            if job.call is not None and not empty:
                self._turns.appendleft(job)
                return
            rows, used = self._next_rows(job, min(share, room))
            job.taken += len(rows)
            self.waiting -= len(rows)
            room -= used
            empty = False
            yield job, rows
            if job.left:
                self._turns.append(job)
            if job.call is not None:
                return

    def _next_rows(self, job: _Job, budget: float) -> tuple[Sequence[Row], float]:
        """Return at least one of a job's next rows, of about ``budget`` tokens, and their tokens.

        A row that exceeds the room left in the batch makes the batch larger than its budget.
        """
        used, stop = 0.0, job.taken
        while stop < len(job.rows) and (used < budget or stop == job.taken):
            size = sum(map(len, job.rows[stop]))
            used += min(1 + size * self._per_character, self._longest)
            stop += 1
        return job.rows[job.taken : stop], used

    def _encode_batch(self, pieces: Sequence[_Piece]) -> None:
        """Encode a batch, and settle the jobs whose last rows are in it."""
        rows = [row for _, piece in pieces for row in piece]
        began = time.perf_counter()
        encoded = self._encode(rows)
        seconds = time.perf_counter() - began
        self._observe(encoded, seconds)
        characters = sum(len(text) for row in rows for text in row)
        n_tokens_total = int(encoded.n_tokens.sum())
        if n_tokens_total:
            self._per_character += _NEWEST_WEIGHT * (
                n_tokens_total / characters - self._per_character
            )
        self._row_seconds += _NEWEST_WEIGHT * (seconds / len(rows) - self._row_seconds)
        start = 0
        for job, taken in pieces:
            part = slice(start, start + len(taken))
            job.parts.append(
                (encoded.vectors[part], encoded.n_tokens[part], encoded.truncated[part])
            )
            job.done += len(taken)
            start = part.stop
            if job.done == len(job.rows):
                vectors, n_tokens, truncated = map(np.concatenate, zip(*job.parts, strict=True))
                from llmcond.encoders.spec import Encoded

                job.settle(Encoded(vectors, n_tokens, truncated, 0))

    def _encode_separately(self, pieces: Sequence[_Piece], error: Exception) -> None:
        """Encode each request of a failed batch separately: one of them may be the cause."""
        jobs: dict[_Job, list[_Piece]] = {}
        for piece in pieces:
            jobs.setdefault(piece[0], []).append(piece)
        for job, job_pieces in jobs.items():
            try:
                if len(jobs) == 1:
                    raise error
                self._encode_batch(job_pieces)
            except Exception as job_error:
                job.settle(error=job_error)
