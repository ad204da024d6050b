"""Conditions that differ from those a head was fitted on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmcond.runs import Run
from llmcond.runs.embedder import Embedder, normalise_vectors

#: A condition is unfamiliar if it is further from its nearest training condition than this share
#: of the training conditions are from theirs.
_SHARE = 0.95


def find_unfamiliar_conditions(
    run: Run, embedder: Embedder, conditions: Sequence[str]
) -> dict[str, str]:
    """Return conditions that differ from the training conditions, each with the nearest of these.

    Distances are cosines of e(c), the encoder's vectors. The result is empty if the run does not
    hold these vectors and its rows (a run that was pushed does not), or if no prompt of the head
    encodes the condition alone.
    """
    prompt = next(
        (candidate for candidate in embedder.view.prompts if candidate.subtracts_condition), None
    )
    has_rows = (run.folder / "rows.parquet").is_file()
    if not embedder.head.dim_in or prompt is None or not has_rows:
        return {}
    rows = run.rows("train")
    rated_conditions = {rows.condition[i]: None for i in np.flatnonzero(rows.rated).tolist()}
    known, new_texts = (
        list(rated_conditions),
        [text for text in dict.fromkeys(conditions) if text not in rated_conditions],
    )
    if not new_texts or len(known) < 2:
        return {}
    inputs = [prompt.unconditional.render("", text) for text in known]
    store = run.store()
    if store.missing(inputs):
        return {}
    known_vectors = normalise_vectors(store.lookup(inputs).read())
    cosines = known_vectors @ known_vectors.T
    np.fill_diagonal(cosines, -1)
    threshold = np.quantile(cosines.max(axis=1), 1 - _SHARE)
    vectors = embedder.encoder.encode([prompt.unconditional.render("", text) for text in new_texts])
    similarities = normalise_vectors(vectors) @ known_vectors.T
    return {
        text: known[int(row.argmax())]
        for text, row in zip(new_texts, similarities, strict=True)
        if row.max() < threshold
    }
