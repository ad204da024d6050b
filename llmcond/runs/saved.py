"""A head of a run: its name, and what ``head.json`` says of it; or that of zero-shot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from llmcond.errors import UserError
from llmcond.evaluation.results import default_name
from llmcond.features.view import View
from llmcond.heads.loading import EmbeddingHead
from llmcond.heads.plain import ZERO_SHOT, PlainHead
from llmcond.metrics import metric_of
from llmcond.records import check_record
from llmcond.runs.manifest import FittedOn

if TYPE_CHECKING:
    from llmcond.heads import FittedHead
    from llmcond.heads.base import Fitted

H_co = TypeVar("H_co", bound="Fitted | PlainHead", covariant=True)


@dataclass(frozen=True)
class Saved(Generic[H_co]):
    """A head of a run, with what it was fitted on; or that of zero-shot, see :func:`zero_shot`.

    ``name`` is its folder's, unique in the run, and ``record`` everything that head.json holds.
    """

    name: str
    head: H_co
    view: View
    record: Mapping[str, Any]

    @property
    def is_fitted(self) -> bool:
        """Return whether it was fitted; if not, it is zero-shot."""
        return self.head.dim_in > 0  # also of a copy in another process

    @property
    def recipe(self) -> str:
        """Return the name of the recipe it was fitted by."""
        return str(self.record["recipe"]["name"])

    @property
    def reference(self) -> str:
        """Return what ``--head`` names it by: its name, or ``none`` of zero-shot."""
        return self.name if self.is_fitted else self.recipe

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Return the splits that it was fitted on, as recorded."""
        return fitted_splits(self.record)


SavedHead: TypeAlias = "Saved[FittedHead]"
SavedEmbeddingHead: TypeAlias = "Saved[EmbeddingHead]"


class StaleHeadError(UserError):
    """A head was fitted on features of another encoder, prompt or setting than the run's."""


def head_name(recipe: str, view: View) -> str:
    """Return the name that a head has in a run unless the user gives one."""
    plain = not view.subtract and view.features not in ("separate", "alone")
    return default_name(recipe, [prompt.name for prompt in view.prompts], plain)


def zero_shot(view: View) -> Saved[PlainHead]:
    """Return the head of zero-shot, ``none@PROMPT``: the features of a view as they are."""
    record = {"recipe": {"name": "none"}, "weights_sha256": None, "fit": {"trained_on": ()}}
    return Saved(head_name("none", view), ZERO_SHOT, view, record)


def fitted_on(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what head.json records, once what its features were is seen to be there.

    Raises:
        LlmcondError: it was damaged.
    """
    if "prompt" in record:  # as written before heads could have several
        record = {**record, "prompts": [record["prompt"]]}
    check_record(record, FittedOn, where, "Fit it again.")
    return dict(record)


def fitted_splits(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the splits that a head was fitted on, as head.json records them."""
    return tuple(record["fit"].get("trained_on", ("train",)))


def dev_score(record: Mapping[str, Any], metric: str) -> float | None:
    """Return the score on dev that a head's or a fit's record holds; None where it has none.

    What was trained on dev has none, whatever chose its weights before.
    """
    if "dev" in fitted_splits(record):
        return None
    key = f"dev_{metric}"
    if key in record:
        found = [record[key]]
    else:  # as written before it had one of its own: the best epoch's
        found = [entry.get(key) for entry in record["fit"].get("curve") or ()]
    scores = (score for score in found if isinstance(score, float))
    return cast(float | None, metric_of(metric).best(scores, default=None))


def chosen_on_dev(summary: Mapping[str, Any]) -> bool:
    """Return whether a score on dev chose the weights of a training, as its summary has it.

    It stands there as ``dev_METRIC``, or as ``dev_METRIC_before`` where a last stage came after it.
    """
    return any(name.startswith("dev_") and value is not None for name, value in summary.items())
