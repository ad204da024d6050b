"""Which inputs a store lacks, counted before they are encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import numpy as np

from llmcond.encoders.spec import EncoderInput
from llmcond.features.keys import KeyIndex

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore

#: Missing inputs that are kept as a sample.
_SAMPLE = 2_048


@dataclass(frozen=True, slots=True)
class Missing:
    """How many distinct inputs are wanted, and how many, of so many characters, are missing.

    ``sample`` are one of ``every`` missing ones, drawn by their keys, so at random: data have a
    rhythm of their own, such as two conditions a pair of sentences.
    """

    n_inputs: int
    n_missing: int
    n_characters: int
    sample: Sequence[EncoderInput]
    every: int = 1


def together(parts: Sequence[Missing]) -> Missing:
    """Return what several counts that share what they have seen come to."""
    every = max((part.every for part in parts), default=1)
    return Missing(
        sum(part.n_inputs for part in parts),
        sum(part.n_missing for part in parts),
        sum(part.n_characters for part in parts),
        _one_of(every, [item for part in parts for item in part.sample]),
        every,
    )


def _one_of(every: int, items: Sequence[EncoderInput]) -> list[EncoderInput]:
    """Return one of so many, a power of two; of those the same that any smaller one leaves."""
    return [item for item in items if int.from_bytes(item.key[:4], "big") % every == 0]


def count_missing(
    store: FeatureStore, inputs: Iterable[EncoderInput], window: int, seen: KeyIndex | None = None
) -> Missing:
    """Return what of some inputs a store lacks by now, in memory that hardly grows with them.

    Repeats are counted once, and inputs in ``seen`` not again; those counted join them. ``window``
    inputs are looked up together.
    """
    seen, stored = KeyIndex() if seen is None else seen, len(store)
    before = len(seen)
    n_missing = n_characters = 0
    sample: list[EncoderInput] = []
    every = 1
    for part in windows(inputs, window):
        distinct = fresh(part, seen)
        places = store.places(distinct)
        # What others add in the meantime was missing when counting began.
        absent = [distinct[i] for i in np.flatnonzero((places < 0) | (places >= stored))]
        n_missing += len(absent)
        n_characters += sum(item.size for item in absent)
        sample += _one_of(every, absent)
        while len(sample) > _SAMPLE:
            every *= 2
            sample = _one_of(every, sample)
    return Missing(len(seen) - before, n_missing, n_characters, sample, every)


@contextmanager
def counting(
    store: FeatureStore,
    inputs: Iterable[EncoderInput],
    window: int,
    found: Callable[[Missing], None],
) -> Iterator[None]:
    """Count what a store lacks on a thread of its own, and pass it to ``found`` if it gets there.

    Counting ends with the block at the latest.
    """
    ended = threading.Event()

    def count() -> None:
        missing = count_missing(store, takewhile(lambda _: not ended.is_set(), inputs), window)
        if not ended.is_set():
            found(missing)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def windows(inputs: Iterable[EncoderInput], size: int) -> Iterator[list[EncoderInput]]:
    """Yield inputs so many at a time."""
    stream = iter(inputs)
    while window := list(islice(stream, size)):
        yield window


def fresh(window: Iterable[EncoderInput], seen: KeyIndex) -> list[EncoderInput]:
    """Return the distinct inputs of a window that no window before it had, and note them."""
    distinct = list(dict.fromkeys(window))
    known = seen.find(b"".join(item.key for item in distinct)) >= 0
    found = [item for item, old in zip(distinct, known, strict=True) if not old]
    seen.add(b"".join(item.key for item in found))
    return found
