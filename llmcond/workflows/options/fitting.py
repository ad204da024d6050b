"""Options of what fits heads on the features of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from llmcond.errors import UserError
from llmcond.options import Options, Positive, Seed, option
from llmcond.workflows.options.common import InRun, WithDevice, WithMetrics, WithSplit

_WITH_DEV = "fitting on dev as well"


@dataclass(frozen=True, kw_only=True)
class DevOptions(Options):
    """What heads are fitted on besides train."""

    with_split: Literal["dev"] | None = option(
        None,
        flag="--with",
        help="fit on dev too, for all epochs of the recipe; dev is no score of the head then",
        group=_WITH_DEV,
    )
    weight: Positive = option(
        3,
        metavar="W",
        help="how often dev's rows are taken in an epoch",
        group=_WITH_DEV,
        needs="--with dev",
    )
    folds: Annotated[int, Ge(0)] = option(
        0,
        metavar="K",
        help="K-fold cross-validation over the sentence pairs of dev: what training on it brings",
        group=_WITH_DEV,
        needs="--with dev",
    )

    def __post_init__(self) -> None:
        """Check that there is no single fold as well."""
        super().__post_init__()
        if self.folds == 1:
            raise UserError("--folds is 1; expected 2 or more, or 0 for none.")


@dataclass(frozen=True, kw_only=True)
class FitHeadOptions(InRun, WithDevice, DevOptions):
    """Which head is fitted, on which features."""

    head: str = option(
        metavar="NAME_OR_FILE", help="a recipe (`llmcond heads` lists the bundled ones)"
    )
    dim: int | None = option(
        None,
        metavar="K",
        help="size of the embeddings (default: the recipe's, at most the features')",
    )
    prompt: str | None = option(
        None, metavar="NAME", help="whose features; a+b takes both (default: the only one)"
    )
    subtract: bool | None = option(
        None,
        help="subtract the unconditional embedding (default: yes; where candidates are ranked, no)",
    )
    seed: Seed = option(0, metavar="S", help="seed of everything random")
    set: Mapping[str, str] | None = option(
        None, metavar="KEY=VALUE", help="other settings of the recipe"
    )
    name: str | None = option(
        None, metavar="NAME", help="of the head in the run (default: RECIPE@PROMPT)"
    )


@dataclass(frozen=True, kw_only=True)
class WithTrials(Options):
    """Options of what fits every head with several seeds."""

    seeds: Annotated[int, Ge(1), Le(2**32)] = option(
        3, metavar="N", help="fits of each, with seeds 0 to N-1"
    )
    set: Mapping[str, str] | None = option(
        None, metavar="KEY=VALUE", help="settings of the recipes, for all heads that have them"
    )
    keep: bool = option(False, help="keep the fit with the best score on dev as a head of the run")
    workers: Positive | None = option(
        None, metavar="N", help="fits at a time (default: one a core, at most 8)"
    )


@dataclass(frozen=True, kw_only=True)
class SweepOptions(InRun, WithSplit, WithMetrics, WithTrials, WithDevice):
    """Which heads and settings are fitted."""

    head: Sequence[str] = option(metavar="NAME_OR_FILE", help="recipes")
    vary: Mapping[str, str] | None = option(
        None,
        metavar="KEY=V,V",
        help="a setting of the recipe (dim, rank, learning_rate, temperature, ...) and its values",
    )
    prompt: Sequence[str] = option(
        (), metavar="NAME", help="whose features; a+b takes both (default: the only one)"
    )
    subtract: bool | None = option(
        None,
        help="subtract the unconditional embedding (default: yes; where candidates are ranked, no)",
    )
    plot: str | Path | None = option(
        None,
        metavar="FILE",
        help="picture of the main metric against the first setting of several numbers (.png, .svg)",
    )
    plot_steps: str | Path | None = option(
        None, metavar="FILE", help="picture of the score on dev against training steps (.png, .svg)"
    )

    def varied(self) -> dict[str, list[str]]:
        """Return the values of each setting that is varied, as text."""
        return {
            key: values.split(",") if isinstance(values, str) else [str(one) for one in values]
            for key, values in (self.vary or {}).items()
        }
