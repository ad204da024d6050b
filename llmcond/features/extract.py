"""Extraction: the inputs that a store does not hold yet, encoded chunk by chunk."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.features.store import FeatureStore
from llmcond.files import digest_bytes

#: Inputs that are committed together; what a kill can lose.
CHUNK = 512
_WAIT_SECONDS = 0.2


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


class Progress(Protocol):
    """Something that shows how far an extraction is."""

    def start(self, inputs: int, characters: int) -> None:
        """Show a bar for so many inputs still to encode."""
        ...

    def advance(self, inputs: int, characters: int, tokens: int) -> None:
        """Show that so many more are stored."""
        ...


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
    inputs: Sequence[EncoderInput],
    store: FeatureStore,
    load: Callable[[], InputEncoder],
    progress: Progress,
    chunk: int = CHUNK,
) -> Extraction:
    """Encode the inputs that ``store`` lacks and commit them chunk by chunk.

    Chunks are a function of all ``inputs``, and batches of a chunk: an interrupted extraction that
    is resumed computes the same batches, so the same bits. (Of a chunk that an extraction of other
    inputs stored in part, the rest is encoded in batches of its own, equal up to rounding.) Several
    processes may work on one store: each takes chunks that no other one is at.

    Args:
        inputs: the inputs wanted; repeats are encoded once.
        store: where vectors go.
        load: gives the encoder; called only if something is missing.
        progress: told of every chunk.
        chunk: inputs in a commit.

    Raises:
        NonFiniteError: the encoder gave NaN or infinity; the good ones of its chunk are stored.
        DiskFullError: no room; what was stored before is kept.
    """
    began = time.monotonic()
    distinct = plan(inputs)
    chunks = deque(distinct[i : i + chunk] for i in range(0, len(distinct), chunk))
    total = Extraction(len(distinct), 0, 0, 0, 0.0)
    absent = store.missing(distinct)
    encoder: InputEncoder | None = None
    if absent:
        progress.start(len(absent), sum(_size(distinct[i]) for i in absent))
        encoder = load()
    busy = 0
    while encoder is not None and chunks:
        part = chunks.popleft()
        if not store.missing(part):
            continue
        with store.claim(_name(part)) as mine:
            if mine:
                busy = 0
                total = _extract_chunk(part, store, encoder, progress, total)
                continue
        chunks.append(part)
        busy += 1
        if busy >= len(chunks):
            # Others are at everything that is left: wait for them, or take over if they die.
            time.sleep(_WAIT_SECONDS)
            store.refresh()
            busy = 0
    truncated = store.count_truncated(distinct)
    return replace(total, n_truncated=truncated, seconds=time.monotonic() - began)


def plan(inputs: Sequence[EncoderInput]) -> list[EncoderInput]:
    """Return the distinct inputs, longest first: padding is least, and memory runs out early."""
    return sorted(
        set(inputs),
        key=lambda item: (
            -_size(item),
            item.instruction,
            item.text,
            item.context is not None,
            item.context or "",
        ),
    )


def _size(item: EncoderInput) -> int:
    return len(item.instruction) + len(item.text) + len(item.context or "")


def _name(part: Sequence[EncoderInput]) -> str:
    return digest_bytes(b"".join(item.key for item in part), size=8).hex()


def _extract_chunk(
    part: Sequence[EncoderInput],
    store: FeatureStore,
    encoder: InputEncoder,
    progress: Progress,
    total: Extraction,
) -> Extraction:
    store.refresh()
    todo = [part[i] for i in store.missing(part)]
    if not todo:
        return total
    encoded = encoder.encode_counted(todo)
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
    tokens = int(encoded.n_tokens.sum())
    progress.advance(len(todo), sum(_size(item) for item in todo), tokens)
    return replace(total, n_computed=total.n_computed + added, n_tokens=total.n_tokens + tokens)
