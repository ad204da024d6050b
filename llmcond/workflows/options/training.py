"""Options of what trains an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcond.encoders.spec import Orders
from llmcond.finetune.settings import AspectSettings, StageSettings, TuneSettings
from llmcond.options import Positive, Seed, option, optional
from llmcond.workflows.options.common import InRun, RunOptions

_HEAD = "head and inputs"
_TEACHER = "distilling"

if TYPE_CHECKING:
    _TuneOptions = TuneSettings
else:
    # What is not given may be in the recipe's [finetune] table.
    _TuneOptions = optional(TuneSettings)


@dataclass(frozen=True, kw_only=True)
class Training(RunOptions, _TuneOptions):
    """How any encoder is trained."""

    merge: bool = option(False, help="write the full encoder, adapters merged into its weights")

    def tune_settings(self) -> dict[str, Any]:
        """Return the settings of training that were given."""
        given = {item.name: getattr(self, item.name) for item in fields(_TuneOptions)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Which run rates further rows to train on, and how many."""

    teacher: str | Path | None = option(
        None,
        metavar="RUN",
        help="distil another run: train on further rows too, train's sentence pairs under the "
        "conditions of other rows, labelled by its head",
        group=_TEACHER,
    )
    teacher_rows: Positive | None = option(
        None,
        metavar="N",
        help="how many (default: as many as train has)",
        group=_TEACHER,
        needs="--teacher RUN",
    )


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """The head that is trained behind an encoder; what ``start`` was fitted on is taken with it."""

    head: str | None = option(
        None,
        metavar="NAME_OR_FILE",
        help="a recipe, its objective included (none: the encoder's own vectors are compared)",
        group=_HEAD,
    )
    start: str | Path | None = option(
        None,
        metavar="DIR",
        help="start from a fitted head, e.g. runs/default/heads/mlp@cond, instead of --head",
        group=_HEAD,
    )
    dim: int | None = option(None, metavar="K", help="size of the embeddings", group=_HEAD)
    set: Mapping[str, str] | None = option(
        None,
        metavar="KEY=VALUE",
        help="other settings of the recipe or its objective; learning_rate is the head's",
        group=_HEAD,
    )
    prompt: Sequence[str] = option(
        (),
        metavar="NAME_OR_FILE",
        help="templates (default: what suits encoder and head)",
        group=_HEAD,
    )
    subtract: bool | None = option(
        None, help="subtract the unconditional embedding (default: no)", group=_HEAD
    )
    seed: Seed = option(0, metavar="S", help="seed of everything random")
    ensemble: Positive = option(
        1,
        metavar="N",
        help="train N adapters with seeds S, S+1, ...; their embeddings are concatenated",
        group=_HEAD,
    )


@dataclass(frozen=True, kw_only=True)
class TrainLoraOptions(HeadChoice, StageSettings, TeacherOptions, AspectSettings, Training):
    """How an encoder and a head behind it are trained."""


@dataclass(frozen=True, kw_only=True)
class TrainCrossOptions(StageSettings, Training):
    """How an encoder of both sentences and the condition is trained."""

    orders: Orders = option(
        "both",
        help="of the two sentences. both: any in training, and the mean of both predictions; "
        "given: as the data has them, in half the time at prediction",
    )
    set: Mapping[str, str] | None = option(
        None,
        metavar="KEY=VALUE",
        help="settings of the linear layer: learning_rate, weight_decay, dropout",
    )
    seed: Seed = option(0, metavar="S", help="seed of everything random")


@dataclass(frozen=True, kw_only=True)
class PushOptions(InRun):
    """Where a run is uploaded to."""

    repo: str = option(flag="", metavar="OWNER/NAME", help="created if it does not exist")
    private: bool = option(False, help="make the repository private")
    revision: str | None = option(
        None, metavar="BRANCH", help="created if it does not exist (default: main)"
    )
