"""Sentence pairs and conditions from texts alone, as a language model proposes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmcond.annotation.template import Proposal
from llmcond.data.rows import Rows
from llmcond.errors import UserError

#: Other texts that each question offers.
OFFERED = 8
#: Rows that a proposal gives: a condition of high and one of low similarity.
_ROWS = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """A text, and others of which one may become its second sentence."""

    text: str
    others: tuple[str, ...]

    @property
    def values(self) -> dict[str, str]:
        """Return what a template's placeholders stand for."""
        numbered = (f"{number}. {text}" for number, text in enumerate(self.others, 1))
        return {"sentence": self.text, "others": "\n".join(numbered)}


def offers(texts: Sequence[str], rows: int, seed: int) -> list[Offer]:
    """Return as many offers as give so many rows: each text with those most like it.

    Most like are those with most words in common, rare ones counting more (cosine of TF-IDF). Texts
    come in an order that the seed decides, each once; then each with the next ones like it, and so
    on, until all have met.

    Raises:
        UserError: more rows asked for than the texts give.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import NearestNeighbors

    texts = list(dict.fromkeys(" ".join(text.split()) for text in texts))
    needed, n = -(-rows // _ROWS), len(texts)
    possible = n * -(-(n - 1) // OFFERED)
    if needed > possible:
        raise UserError(
            f"--propose is {rows:,}, and {n:,} distinct texts give {_ROWS * possible:,} rows at "
            "most. Ask for fewer, or give more texts."
        )
    # Words of one letter and signs too: some languages write words so.
    words = r"\w+|[^\w\s]"
    vectors = TfidfVectorizer(token_pattern=words).fit_transform(texts)
    order = np.random.default_rng(seed).permutation(n)[:needed]
    most = min(n, OFFERED * -(-needed // n) + 1)
    search = NearestNeighbors(n_neighbors=most, metric="cosine").fit(vectors)
    near = search.kneighbors(vectors[order], return_distance=False)
    found = []
    for number in range(needed):
        again, at = divmod(number, n)
        others = [texts[j] for j in near[at].tolist() if j != order[at]]
        part = others[OFFERED * again : OFFERED * (again + 1)]
        found.append(Offer(texts[order[at]], tuple(part)))
    return found


def proposed_rows(offered: Sequence[Offer], proposals: Sequence[Proposal | None]) -> Rows:
    """Return the rows that were proposed, unrated; each pair under a condition once.

    ``proposals`` are those of each offer; None: its answer cannot be read.
    """
    found: dict[tuple[str, str, str], None] = {}
    for offer, proposal in zip(offered, proposals, strict=True):
        if proposal is None or proposal.partner is None:
            continue
        for condition in proposal.conditions:
            found[offer.text, offer.others[proposal.partner], condition] = None
    n, (first, second, conditions) = len(found), ([row[i] for row in found] for i in range(3))
    return Rows(first, second, conditions, np.full(n, np.nan), np.arange(1, n + 1), "proposed rows")
