"""The result of an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmcond.display import Displayed
from llmcond.encoders.spec import Dtype

#: How a caller of the exported model selects the condition: it is fixed, one of several is selected
#: by an argument (``prompt_name`` or ``task``), or any condition can be given.
ConditionSelector = Literal["fixed", "prompt_name", "task", "any"]


@dataclass(frozen=True)
class ExportResult(Displayed):
    """The result of an export.

    Attributes:
        out: folder that was written.
        conditions: conditions of the export; empty: any condition.
        chosen_by: how the condition is selected. ``fixed``: there is only one. ``task`` or
            ``prompt_name``: the argument of ``encode`` that names one of several. ``any``: the
            argument ``condition``, which needs llmcond.
        modules: names of its sentence-transformers modules, in order.
        dtype: number type of its weights.
        dim: size of the embeddings.
        difference: largest difference of a component of a unit vector from the vectors that llmcond
            computes in that type; None: sentence-transformers is not installed, so the export was
            not tested.
        notes: what users of the export need to know, as sentences.
        about: description of the exported embedder.

    Examples:
        >>> import llmcond
        >>> result = llmcond.export(out="places", condition=["the place"])
        >>> result.conditions, result.dim, result.dtype
        (['the place'], 384, 'float32')
    """

    out: Path
    conditions: Sequence[str]
    chosen_by: ConditionSelector
    modules: Sequence[str]
    dtype: Dtype
    dim: int
    difference: float | None
    notes: Sequence[str]
    about: Mapping[str, Any]
