"""Options of commands that fit heads, or train or upload an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from llmcond.base.errors import UserError
from llmcond.base.files import check_figure
from llmcond.base.options import Options, Positive, Seed, all_optional, option
from llmcond.encoders.spec import Orders
from llmcond.finetune.settings import AspectSettings, StageSettings, TuneSettings, check_folds
from llmcond.options.common import (
    DeviceOption,
    LogOption,
    MetricOption,
    RunOption,
    RunOptions,
    SplitOption,
)


@dataclass(frozen=True, kw_only=True)
class DevOptions(Options):
    """Options for fitting heads on dev in addition to train."""

    option_group: ClassVar[str] = "fitting on dev as well"
    option_needs: ClassVar[str] = "--with dev"

    with_split: Literal["dev"] | None = option(
        None,
        flag="--with",
        help="also fit on dev, for all epochs of the recipe; the head then has no dev score",
    )
    weight: Positive = option(
        3,
        metavar="W",
        help="number of times that each dev row is used per epoch",
    )
    folds: Annotated[int, Ge(0)] = option(
        0,
        metavar="K",
        check=check_folds,
        help="number of folds of a cross-validation over the sentence pairs of dev, which measures "
        "the gain from training on dev (default: 0, no cross-validation)",
    )


@dataclass(frozen=True, kw_only=True)
class FitHeadOptions(RunOption, DeviceOption, LogOption, DevOptions):
    """Options of ``llmcond fit-head``: the recipe, and the features to fit it on."""

    head: str = option(
        metavar="NAME_OR_FILE", help="recipe of the head (`llmcond heads` lists the bundled ones)"
    )
    dim: int | None = option(
        None,
        metavar="K",
        help="dimension of the embeddings (default: the recipe's, but at most the features')",
    )
    start: str | Path | None = option(
        None,
        metavar="NAME_OR_DIR",
        help="fitted head whose parameters the fit starts from, with the objective and settings of "
        "--head: a head of the run, or the folder of a head; it also decides --dim, --prompt and "
        "--subtract",
    )
    prompt: str | None = option(
        None,
        help="prompt whose features the head reads; a+b concatenates the features of a and b "
        "(default: the run's only prompt)",
    )
    subtract: bool | None = option(
        None,
        help="subtract the unconditional embedding (default: yes, except in tasks that rank "
        "candidates)",
    )
    seed: Seed = option(0, metavar="S", help="random seed")
    set: Mapping[str, str] | None = option(None, help="settings that override those of the recipe")
    name: str | None = option(None, help="name of the head in the run (default: RECIPE@PROMPT)")


@dataclass(frozen=True, kw_only=True)
class TrialOptions(Options):
    """Options of commands that fit every head with several seeds."""

    seeds: Annotated[int, Ge(1), Le(2**32)] = option(
        3, help="number of seeds: each combination is fitted with seeds 0 to N-1"
    )
    set: Mapping[str, str] | None = option(
        None, help="settings that override those of every recipe that has them"
    )
    keep: bool = option(False, help="save the fit with the best dev score as a head of the run")
    workers: Positive | None = option(
        None, help="number of parallel fits (default: one per core, at most 8)"
    )


@dataclass(frozen=True, kw_only=True)
class GridOptions(Options):
    """Options of commands that compare every combination of settings."""

    vary: Mapping[str, str | Sequence[str]] | None = option(
        None,
        metavar="KEY=V,V",
        help="recipe settings to vary (dim, rank, learning_rate, temperature, ...), each with its "
        "values",
    )
    plot: str | Path | None = option(
        None,
        writes=check_figure,
        help="figure (.png, .svg, .pdf) of the main metric against the first setting that has "
        "several numeric values; the numbers are written next to it as CSV",
    )

    def varied(self) -> dict[str, list[str]]:
        """Return each varied setting with its values as text.

        Raises:
            UserError: a setting has no value.
        """
        varied = {
            key: values.split(",") if isinstance(values, str) else list(values)
            for key, values in (self.vary or {}).items()
        }
        for key, values in varied.items():
            if not values:
                raise UserError(f"{key} is varied without a value. Give some: --vary {key}=A,B")
        return varied


@dataclass(frozen=True, kw_only=True)
class SweepOptions(
    GridOptions, RunOption, SplitOption, MetricOption, TrialOptions, DeviceOption, LogOption
):
    """Options of ``llmcond sweep``: the heads and settings to fit."""

    head: Sequence[str] = option(
        metavar="NAME_OR_FILE", help="recipes to fit (`llmcond heads` lists the bundled ones)"
    )
    prompt: Sequence[str] = option(
        (),
        help="prompts whose features the heads read; a+b concatenates the features of a and b "
        "(default: the run's only prompt)",
    )
    subtract: bool | None = option(
        None,
        help="subtract the unconditional embedding (default: yes, except in tasks that rank "
        "candidates)",
    )
    plot_steps: str | Path | None = option(
        None,
        writes=check_figure,
        help="figure (.png, .svg, .pdf) of the score against training steps, on dev or on the "
        "split that --split names; the numbers are written next to it as CSV",
    )

    def curve_split(self) -> str | None:
        """Return the split to score after each epoch in addition to dev; None if there is none."""
        return None if self.plot_steps is None or self.split == "dev" else self.split


if TYPE_CHECKING:
    _TuneOptions = TuneSettings
else:
    # Options that are None may be set in the recipe's [finetune] table.
    _TuneOptions = all_optional(TuneSettings)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(RunOptions, _TuneOptions, LogOption):
    """Options of every command that trains an encoder."""

    weights_for: ClassVar[str] = "training"

    merge: bool = option(
        False, help="save the full encoder, with the adapters merged into its weights"
    )

    def tune_settings(self) -> dict[str, Any]:
        """Return the training settings that the user has set."""
        settings = {item.name: getattr(self, item.name) for item in fields(_TuneOptions)}
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Options of distillation from another run, which labels additional training rows."""

    option_group: ClassVar[str] = "distillation"
    option_needs: ClassVar[str] = "--teacher RUN"

    teacher: str | Path | None = option(
        None,
        metavar="RUN",
        help="run or bundled model whose head labels additional training rows: train's sentence "
        "pairs under the conditions of other rows",
    )
    teacher_rows: Positive | None = option(
        None,
        help="number of additional rows (default: as many as train has)",
    )


@dataclass(frozen=True, kw_only=True)
class HeadTrainingOptions:
    """Options of the head that is trained on top of an encoder.

    ``start`` also decides the prompt and the settings that its head was fitted with.
    """

    option_group: ClassVar[str] = "head and inputs"

    head: str | None = option(
        None,
        metavar="NAME_OR_FILE",
        help="recipe of the head and its objective; none: compare the encoder's vectors without a "
        "head",
    )
    start: str | Path | None = option(
        None,
        metavar="DIR",
        help="folder of a fitted head to start from instead of --head, such as "
        "runs/default/heads/mlp@cond; its kind and size are those of this head",
        conflicts="--head or --dim",
    )
    dim: int | None = option(
        None, metavar="K", help="dimension of the embeddings (default: the recipe's)"
    )
    set: Mapping[str, str] | None = option(
        None,
        help="settings that override those of the recipe or its objective; learning_rate is the "
        "head's",
    )
    prompt: Sequence[str] = option(
        (),
        metavar="NAME_OR_FILE",
        help="prompts to encode the texts with (default: those that suit the encoder and the head)",
    )
    subtract: bool | None = option(None, help="subtract the unconditional embedding (default: no)")
    seed: Seed = option(0, metavar="S", help="random seed (default: 0)")
    ensemble: Positive = option(
        1,
        help="number of adapters to train, with seeds S, S+1, ...; their embeddings are "
        "concatenated (default: 1)",
    )


@dataclass(frozen=True, kw_only=True)
class TrainLoraOptions(
    HeadTrainingOptions, StageSettings, TeacherOptions, AspectSettings, TrainingOptions
):
    """Options of ``llmcond train-lora``: an encoder and the head on top of it."""


@dataclass(frozen=True, kw_only=True)
class SweepLoraOptions(TrainLoraOptions, GridOptions):
    """Options of ``llmcond sweep-lora``: the trainings to compare."""

    vary: Mapping[str, str | Sequence[str]] | None = option(
        None,
        metavar="KEY=V,V",
        help="settings to vary, each with its values: options of train-lora (learning_rate, rank, "
        "...) and keys of --set (temperature, ...; head.KEY where an option has the same name). "
        "KEY+KEY=V,V gives several settings the same value",
    )
    seeds: Annotated[int, Ge(1), Le(2**32)] = option(
        3, help="number of seeds: each combination is trained with seeds S to S+N-1"
    )
    seed: Seed = option(
        0, metavar="S", help="first random seed, which also samples the combinations of --trials"
    )
    trials: Positive | None = option(
        None, help="number of combinations, sampled at random from the grid (default: all)"
    )
    workers: Positive | None = option(
        None, help="number of parallel trainings (default: one per GPU, 1 on a CPU)"
    )
    keep_all: bool = option(False, help="keep every trained encoder, not only the best")
    plot_steps: str | Path | None = option(
        None,
        writes=check_figure,
        help="figure (.png, .svg, .pdf) of the dev score against training steps; the numbers are "
        "written next to it as CSV",
    )


@dataclass(frozen=True, kw_only=True)
class TrainCrossOptions(StageSettings, TrainingOptions):
    """Options of ``llmcond train-cross``, which trains a cross-encoder."""

    orders: Orders = option(
        "both",
        help="order of the two sentences. both: train on either order, and average the two "
        "predictions; given: the order in the data, which halves the time of prediction",
    )
    set: Mapping[str, str] | None = option(
        None, help="settings of the linear layer: learning_rate, weight_decay, dropout"
    )
    seed: Seed = option(0, metavar="S", help="random seed (default: 0)")


@dataclass(frozen=True, kw_only=True)
class PushOptions(RunOption):
    """Options of ``llmcond push``: the repository to upload a run to."""

    repo: str = option(
        flag="", metavar="OWNER/NAME", help="repository on the hub, created if it does not exist"
    )
    head: Sequence[str] = option((), help="fitted heads to upload (default: all)")
    private: bool = option(False, help="make the repository private")
    license: str | None = option(
        None,
        metavar="ID",
        help="licence of the upload, by the hub's identifier, such as apache-2.0 (default: that of "
        "the run's model card, if it names one)",
    )
    datasets: Sequence[str] = option(
        (),
        metavar="OWNER/NAME",
        help="datasets on the hub that the model was trained on, for its card (default: the run's "
        "data, if it is one)",
    )
    revision: str | None = option(
        None,
        metavar="BRANCH",
        help="branch of the repository, created if it does not exist (default: main)",
    )
