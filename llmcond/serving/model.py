"""The model of a server, with an optional index, and the batching of concurrent requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import CALIBRATED, Array, quantize_embeddings
from llmcond.base.errors import format_list
from llmcond.base.options import Precision
from llmcond.base.text import wordings
from llmcond.heads.numpy_heads import ZERO_SHOT
from llmcond.runs import cross
from llmcond.runs.cross import CrossEncoder
from llmcond.runs.embedder import Embedder, describe, normalise_vectors
from llmcond.search.model import short_name

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder
    from llmcond.encoders.spec import Encoded
    from llmcond.search import Index

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
            row = job.rows[stop]
            n_tokens = min(1 + sum(map(len, row)) * self._per_character, self._longest)
            used += n_tokens * len(wordings(row[-1] if row else None))  # a call has an empty row
            stop += 1
        return job.rows[job.taken : stop], used

    def _encode_batch(self, pieces: Sequence[_Piece]) -> None:
        """Encode a batch, and settle the jobs whose last rows are in it."""
        rows = [row for _, piece in pieces for row in piece]
        began = time.perf_counter()
        encoded = self._encode(rows)
        seconds = time.perf_counter() - began
        self._observe(encoded, seconds)
        characters = sum(len(wordings(row[-1])) * sum(map(len, row)) for row in rows)
        if total := int(encoded.n_tokens.sum()):
            self._per_character += _NEWEST_WEIGHT * (total / characters - self._per_character)
        self._row_seconds += _NEWEST_WEIGHT * (seconds / len(rows) - self._row_seconds)
        start = 0
        for job, taken in pieces:
            part = slice(start, start + len(taken))
            arrays = encoded.vectors, encoded.n_tokens, encoded.truncated
            job.parts.append([array[part] for array in arrays])
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


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its index, if it has one.

    Attributes:
        model: an embedder or a cross-encoder.
        condition: default condition of requests; None: every request must name one.
        index: the index to search, or None.
        ranges: (2, k) lowest and highest value of each dimension, for ``int8`` and ``uint8``; None:
            the server does not offer them.
    """

    model: Embedder | CrossEncoder
    condition: str | None = None
    index: Index | None = None
    ranges: Array | None = None

    @property
    def name(self) -> str:
        """The model's name in responses."""
        return short_name(self.encoder)

    @property
    def encoder(self) -> Encoder:
        """The model's encoder."""
        return self.model.encoder

    @property
    def max_row_tokens(self) -> int:
        """Maximal number of tokens of a row after truncation."""
        inputs = len(self.model.view.required_parts()) if isinstance(self.model, Embedder) else 1
        return inputs * self.encoder.identity.max_length

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return embeddings of (sentence, condition) rows, or a cross-encoder's similarities.

        The rows of a cross-encoder are (sentence, sentence, condition), and their tokens are not
        counted.

        Raises:
            LlmcondError: for the reasons of ``Embedder.encode_with_counts`` or
                ``CrossEncoder.similarity``.
        """
        if isinstance(self.model, Embedder):
            return self.model.encode_with_counts([(text, condition) for text, condition in rows])
        from llmcond.encoders.spec import Encoded

        similarities = self.model.similarity(*map(list, zip(*rows, strict=True)))
        zeros = np.zeros(len(rows), dtype=np.int32)
        return Encoded(similarities, zeros, zeros.astype(bool), 0)

    def find_form_problem(
        self, dimensions: int | None, precision: Precision
    ) -> tuple[str, str] | None:
        """Return the field of a request for embeddings that cannot be satisfied, and the reason.

        As in vLLM, embeddings are truncated only to sizes that the model was trained for, because
        clients cannot know that others give poor results. The operator can choose any
        size (``--truncate-dim``).
        """
        embedder = self.model
        if not isinstance(embedder, Embedder):
            return None
        dim, sizes = embedder.dim, [] if embedder.guides else embedder.matryoshka_dims
        if dimensions not in (None, dim, *sizes):
            if embedder.guides:
                why = "its guides map all of them. Omit dimensions."
            elif sizes:
                listed = f"1 to {dim - 1}" if len(sizes) == dim - 1 else format_list(sizes)
                why = f"the other sizes that it supports are: {listed}."
            else:
                why = (
                    "no other size is known to suit it. Omit dimensions, or start the server with "
                    "--truncate-dim."
                )
            problem = f"dimensions is {dimensions}, but this model's embeddings have {dim}, and"
            return "dimensions", f"{problem} {why}"
        is_truncated = dimensions not in (None, dim)
        if precision in CALIBRATED and (self.ranges is None or is_truncated):
            return "precision", (
                f"precision is {precision}, and the server has no ranges of {dimensions or dim} "
                "dimensions. Use binary or ubinary, or start the server with --ranges."
            )
        return None

    def form_embeddings(
        self, vectors: Array, dimensions: int | None, precision: Precision
    ) -> NDArray[Any]:
        """Return embeddings, (n, k), in the size and precision of a request, with unit L2 norm."""
        head = self.model.head if isinstance(self.model, Embedder) else ZERO_SHOT
        unit = normalise_vectors(vectors[:, :dimensions], head)
        return quantize_embeddings(unit, precision, self.ranges)

    def ready_row(self) -> Row:
        """Return a row to encode before the first request and at each readiness check."""
        return ("ready",) * (2 if isinstance(self.model, Embedder) else 3)

    def describe(self) -> dict[str, Any]:
        """Return what the model consists of, without paths."""
        model = self.model
        description = describe(model) if isinstance(model, Embedder) else cross.describe(model)
        source = description["fitted_on"]
        source = source if source.startswith("hf://") else PurePath(source).name
        return {**description, "encoder": self.name, "fitted_on": source}

    def without_paths(self, error: Exception | str) -> str:
        """Return an error's message with the paths of model and index shortened to their names."""
        text, folders = str(error), [self.encoder.resolved.checkpoint.folder]
        if self.index is not None:
            folders.append(self.index.folder)
        for folder in folders:
            absolute = str(folder.resolve())
            # Lance omits the leading slash.
            for path in (absolute, absolute.lstrip("/"), str(folder)):
                if "/" in path:
                    text = text.replace(path, folder.resolve().name)
        return text
