"""Whether texts say anything about a condition: a score that needs neither labels nor training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import Array, scale_to_unit_norm
from llmcond.encoders import EncoderInput
from llmcond.encoders.spec import Router
from llmcond.features.view import WordingRows

#: A text that says nothing, in any language.
_NEUTRAL = "-"
#: With a temperature this low, routed pooling returns the token that is nearest to the condition.
_TEMPERATURE = 0.01
#: Logistic regression of whether a text mentions a condition, for minilm-conditions on requests of
#: SNIPS, HWU64 and NLU++: on the nearest token's cosine, and on the cosine with the neutral text.
_NEAREST, _SIMILAR, _INTERCEPT = 6.2, -6.4, 2.4
_BLOCK = 8_192

Vectors = NDArray[Any]
Rows = Sequence[tuple[str, str]]


def score_mentions(
    rows: Rows,
    embed: Callable[[Rows], Vectors],
    encode: Callable[[Sequence[EncoderInput]], Vectors],
) -> Array:
    """Score whether texts say anything about conditions.

    Two signs are combined: how near the nearest token of the text is to the condition, in the base
    encoder, and how much the embedding under the condition differs from that of an empty text.

    Args:
        rows: n (text, condition) rows. What a condition ignores makes no difference.
        embed: returns the (m, k) embeddings of (text, condition) rows, without guides.
        encode: returns the (m, d) vectors that the base encoder gives inputs.

    Returns:
        (n,) scores between 0 and 1, where 1 is certainly mentioned; the mean over the wordings of
        a condition.
    """
    blocks = [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
    return np.concatenate([np.zeros(0, np.float32), *(_score(b, embed, encode) for b in blocks)])


def _score(
    rows: Rows,
    embed: Callable[[Rows], Vectors],
    encode: Callable[[Sequence[EncoderInput]], Vectors],
) -> Array:
    worded = WordingRows.of(rows)
    conditions = list(dict.fromkeys(condition for _, condition in worded.rows))
    number = {condition: i for i, condition in enumerate(conditions)}
    numbers = np.array([number[condition] for _, condition in worded.rows])
    inputs = [EncoderInput("", f"{condition}") for condition in conditions]
    routed = [  # the vector of each is that of the text's token nearest to the condition
        EncoderInput("", text, router=Router(f"{condition}", _TEMPERATURE, False, False))
        for text, condition in worded.rows
    ]
    nearest = _cosines(encode([*routed, *inputs]), numbers)
    empty = [(_NEUTRAL, condition) for condition in conditions]
    similar = _cosines(embed([*worded.rows, *empty]), numbers)
    logits = _NEAREST * nearest + _SIMILAR * similar + _INTERCEPT
    scores = 1 / (1 + np.exp(-logits))
    return worded.mean(scores.astype(np.float32)[:, None], normalize=False)[:, 0]


def _cosines(vectors: Vectors, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the (n,) cosines of the first n vectors with those of the others at ``numbers``."""
    unit = scale_to_unit_norm(np.asarray(vectors, dtype=np.float64))
    n = len(numbers)
    return np.asarray((unit[:n] * unit[n:][numbers]).sum(axis=1))
