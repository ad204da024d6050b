"""A head of a run, fitted or zero-shot, with its name and its record in ``head.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from llmcond.evaluation.results import default_name
from llmcond.features.view import FeatureView
from llmcond.heads.numpy_heads import ZERO_SHOT, NumpyHead
from llmcond.heads.storage import EmbeddingHead
from llmcond.records import check_record
from llmcond.runs.manifest import FittedHeadRecord

if TYPE_CHECKING:
    from llmcond.heads import FittedHead
    from llmcond.heads.fitted import FittedModule

H_co = TypeVar("H_co", bound="FittedModule | NumpyHead", covariant=True)


@dataclass(frozen=True)
class RunHead(Generic[H_co]):
    """A head of a run with its view and record; for zero-shot see ``zero_shot_head``.

    Attributes:
        name: The name of its folder, unique in the run.
        head: The head.
        view: The features that it was fitted on.
        record: The content of head.json.
    """

    name: str
    head: H_co
    view: FeatureView
    record: Mapping[str, Any]

    @property
    def is_fitted(self) -> bool:
        """Whether it was fitted; if not, it is zero-shot."""
        return self.head.dim_in > 0  # not an identity check: the head may be a pickled copy

    @property
    def recipe(self) -> str:
        """The name of the recipe that it was fitted with."""
        return str(self.record["recipe"]["name"])

    @property
    def reference(self) -> str:
        """The value of ``--head`` that selects it: its name, or ``none`` for zero-shot."""
        return self.name if self.is_fitted else self.recipe

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The splits that it was fitted on, as recorded."""
        return training_splits(self.record)


RunFittedHead: TypeAlias = "RunHead[FittedHead]"
RunEmbeddingHead: TypeAlias = "RunHead[EmbeddingHead]"


def head_name(recipe: str, view: FeatureView) -> str:
    """Return the default name of a head in a run."""
    plain = not view.subtract and view.features not in ("separate", "alone")
    return default_name(recipe, [prompt.name for prompt in view.prompts], plain)


def zero_shot_head(view: FeatureView) -> RunHead[NumpyHead]:
    """Return the zero-shot head ``none@PROMPT``, whose embeddings are the features of a view."""
    record = {"recipe": {"name": "none"}, "weights_sha256": None, "fit": {"trained_on": ()}}
    return RunHead(head_name("none", view), ZERO_SHOT, view, record)


def check_head_record(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check that head.json describes the features of a head, and return its content.

    Raises:
        LlmcondError: It is damaged.
    """
    check_record(record, FittedHeadRecord, where, "Fit it again.")
    return dict(record)


def training_splits(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the splits that a head was fitted on, as head.json records them."""
    return tuple(record["fit"].get("trained_on", ("train",)))


def dev_score(record: Mapping[str, Any], metric: str) -> float | None:
    """Return the dev score in the record of a head or a fit; None if it has none.

    A head that was trained on dev has no dev score, even if dev chose its weights before that.
    """
    if "dev" in training_splits(record):
        return None
    score = record.get(f"dev_{metric}")
    return score if isinstance(score, float) else None


def is_selected_on_dev(summary: Mapping[str, Any]) -> bool:
    """Return whether a dev score chose the weights of a training, by its summary.

    The summary has the score as ``dev_METRIC``, or as ``dev_METRIC_before`` if a final stage
    followed.
    """
    return any(name.startswith("dev_") and value is not None for name, value in summary.items())
