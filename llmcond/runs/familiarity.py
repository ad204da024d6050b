"""Conditions that are unlike those a head was fitted on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmcond.runs.embedder import Embedder, unit_length
from llmcond.runs.task_runs import Run

#: A condition is unfamiliar if its nearest one of training is further away than that of this share
#: of the conditions of training, each compared with the others.
_SHARE = 0.95


def unfamiliar(run: Run, embedder: Embedder, conditions: Sequence[str]) -> dict[str, str]:
    """Return conditions unlike those of training, each with the nearest of these.

    Near is the cosine of e(c), the encoder's own vectors. The run must hold them and its rows, as
    one that was pushed does not: without them, or where the head's prompts do not encode
    conditions alone, none is called unfamiliar.
    """
    prompt = next((one for one in embedder.view.prompts if one.of_condition), None)
    has_rows = (run.folder / "rows.parquet").is_file()
    if not embedder.head.dim_in or prompt is None or not has_rows:
        return {}
    rows = run.rows("train")
    own = {rows.condition[i]: None for i in np.flatnonzero(rows.rated).tolist()}
    known, asked = list(own), [text for text in dict.fromkeys(conditions) if text not in own]
    if not asked or len(known) < 2:
        return {}
    inputs = [prompt.unconditional.render("", text) for text in known]
    store = run.store()
    if store.missing(inputs):
        return {}
    trained = unit_length(store.lookup(inputs).read())
    among = trained @ trained.T
    np.fill_diagonal(among, -1)
    least = np.quantile(among.max(axis=1), 1 - _SHARE)
    new = embedder.encoder.encode([prompt.unconditional.render("", text) for text in asked])
    near = unit_length(new) @ trained.T
    return {
        text: known[int(row.argmax())]
        for text, row in zip(asked, near, strict=True)
        if row.max() < least
    }
