"""Options of commands that fit heads on the features of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from llmcond.errors import UserError
from llmcond.files import check_figure
from llmcond.options import Options, Positive, Seed, option
from llmcond.workflows.options.common import (
    DeviceOption,
    LogOption,
    MetricOption,
    RunOption,
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
        help="number of folds of a cross-validation over the sentence pairs of dev, which measures "
        "the gain from training on dev (default: 0, no cross-validation)",
    )

    def __post_init__(self) -> None:
        """Also check that there is not just one fold."""
        super().__post_init__()
        if self.folds == 1:
            raise UserError("--folds is 1; expected 2 or more, or 0 for none.")


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
