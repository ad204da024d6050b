"""What an export is: who chooses its conditions, of what it is made, and how far it is off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmcond.display import Displayed
from llmcond.encoders.spec import Dtype

#: Who chooses the condition: nobody any more, the caller among some, or the caller any.
Chooses = Literal["fixed", "prompt_name", "task", "any"]


@dataclass(frozen=True)
class ExportResult(Displayed):
    """What was written.

    Attributes:
        conditions: that it has; empty: any.
        chosen_by: ``fixed``, the one condition; an argument of ``encode`` that names one of
            several, ``task`` or ``prompt_name``; or ``any``: ``condition``, where llmcond is.
        modules: of sentence-transformers, in their order.
        dtype: that its weights are in.
        difference: the largest of a component of a vector of length 1 to what llmcond computes
            in that type; None: sentence-transformers is not installed, so it was not tried out.
        notes: what whoever uses it must know, in sentences.
        about: the embedder that it was made of.
    """

    out: Path
    conditions: Sequence[str]
    chosen_by: Chooses
    modules: Sequence[str]
    dtype: Dtype
    dim: int
    difference: float | None
    notes: Sequence[str]
    about: Mapping[str, Any]
