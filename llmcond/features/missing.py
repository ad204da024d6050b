"""Counting the inputs that a store lacks, before they are encoded."""

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
    """

    n_inputs: int
    n_missing: int
    n_characters: int
    sample: Sequence[EncoderInput]
    every: int = 1


def merge_counts(parts: Sequence[MissingCount]) -> MissingCount:
    """Add several counts, which were made with the same ``seen`` index."""
    every = max((part.every for part in parts), default=1)
    return MissingCount(
        sum(part.n_inputs for part in parts),
        sum(part.n_missing for part in parts),
        sum(part.n_characters for part in parts),
        _sample_by_key(every, [item for part in parts for item in part.sample]),
        every,
    )


def _sample_by_key(every: int, items: Sequence[EncoderInput]) -> list[EncoderInput]:
    """Return about one in ``every`` items, where ``every`` is a power of two.

    The result is the same if the items were sampled with a smaller power of two before.
    """
    return [item for item in items if int.from_bytes(item.key[:4], "big") % every == 0]


def count_missing(
    store: FeatureStore, inputs: Iterable[EncoderInput], window: int, seen: KeyIndex | None = None
) -> MissingCount:
    """Count the inputs that a store lacks. Memory hardly grows with the number of inputs.

    Repeated inputs are counted once. Inputs in ``seen`` are not counted, and counted inputs are
    added to it. ``window`` inputs are looked up together.
    """
    seen, stored = KeyIndex() if seen is None else seen, len(store)
    before = len(seen)
    n_missing = n_characters = 0
    sample: list[EncoderInput] = []
    every = 1
    for chunk in iterate_windows(inputs, window):
        distinct = select_unseen(chunk, seen)
        positions = store.positions(distinct)
        # Inputs that other processes add during the count were missing when it began.
        absent = [distinct[i] for i in np.flatnonzero((positions < 0) | (positions >= stored))]
        n_missing += len(absent)
        n_characters += sum(item.size for item in absent)
        sample += _sample_by_key(every, absent)
        while len(sample) > _SAMPLE_SIZE:
            every *= 2
            sample = _sample_by_key(every, sample)
    return MissingCount(len(seen) - before, n_missing, n_characters, sample, every)


@contextmanager
def count_in_background(
    store: FeatureStore,
    inputs: Iterable[EncoderInput],
    window: int,
    on_counted: Callable[[MissingCount], None],
) -> Iterator[None]:
    """Count missing inputs in a separate thread, and pass the result to ``on_counted``.

    When the block ends, an unfinished count is abandoned and ``on_counted`` is not called.
    """
    ended = threading.Event()

    def count() -> None:
        missing = count_missing(store, takewhile(lambda _: not ended.is_set(), inputs), window)
        if not ended.is_set():
            on_counted(missing)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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
