"""Sentence pairs and conditions that a language model proposes for texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmcond.annotation.template import Proposal
from llmcond.data.rows import Rows
from llmcond.errors import UserError

#: Number of candidates for the second sentence in each question.
N_CANDIDATES = 8
#: Number of rows per proposal: one condition of high similarity and one of low similarity.
_ROWS = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """A text, and candidates for the second sentence of its pair.

    Attributes:
        text: the text, which becomes the first sentence.
        candidates: the candidates.
    """

    text: str
    candidates: tuple[str, ...]

    @property
    def values(self) -> dict[str, str]:
        """Values of the template's placeholders."""
        numbered = (f"{number}. {text}" for number, text in enumerate(self.candidates, 1))
        return {"sentence": self.text, "others": "\n".join(numbered)}


def build_offers(texts: Sequence[str], rows: int, seed: int) -> list[Offer]:
    """Return enough offers for ``rows`` rows: each text with the texts most similar to it.

    The similarity is the cosine of TF-IDF vectors. Each text is offered once, in a random order,
    then each text again with the next most similar texts, until every pair has been offered.

    Args:
        texts: the texts, of which duplicates are ignored.
        rows: number of rows.
        seed: random seed of the order.

    Raises:
        UserError: there are not enough texts for this number of rows.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import NearestNeighbors

    texts = list(dict.fromkeys(" ".join(text.split()) for text in texts))
    needed, n = -(-rows // _ROWS), len(texts)
    possible = n * -(-(n - 1) // N_CANDIDATES)
    if needed > possible:
        raise UserError(
            f"--propose is {rows:,}, but {n:,} distinct texts give at most {_ROWS * possible:,} "
            "rows. Ask for fewer rows, or give more texts."
        )
    # Words of one character and symbols count, because some languages have such words.
    words = r"\w+|[^\w\s]"
    vectors = TfidfVectorizer(token_pattern=words).fit_transform(texts)
    order = np.random.default_rng(seed).permutation(n)[:needed]
    n_neighbors = min(n, N_CANDIDATES * -(-needed // n) + 1)
    search = NearestNeighbors(n_neighbors=n_neighbors, metric="cosine").fit(vectors)
    neighbors = search.kneighbors(vectors[order], return_distance=False)
    result = []
    for number in range(needed):
        repetition, position = divmod(number, n)
        others = [texts[j] for j in neighbors[position].tolist() if j != order[position]]
        candidates = others[N_CANDIDATES * repetition : N_CANDIDATES * (repetition + 1)]
        result.append(Offer(texts[order[position]], tuple(candidates)))
    return result


def proposed_rows(offers: Sequence[Offer], proposals: Sequence[Proposal | None]) -> Rows:
    """Return the distinct proposed rows, without ratings.

    Args:
        offers: the offers.
        proposals: the proposal for each offer; None if its answer cannot be parsed.
    """
    unique_rows: dict[tuple[str, str, str], None] = {}
    for offer, proposal in zip(offers, proposals, strict=True):
        if proposal is None or proposal.partner is None:
            continue
        for condition in proposal.conditions:
            unique_rows[offer.text, offer.candidates[proposal.partner], condition] = None
    n = len(unique_rows)
    first, second, conditions = ([row[i] for row in unique_rows] for i in range(3))
    return Rows(first, second, conditions, np.full(n, np.nan), np.arange(1, n + 1), "proposed rows")
