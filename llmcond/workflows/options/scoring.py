"""Options of what scores and explains heads, and compares prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from llmcond.options import Seed, option
from llmcond.workflows.options.common import (
    DATA,
    InRun,
    RunOptions,
    WithColumns,
    WithDevice,
    WithMetrics,
    WithSplit,
)
from llmcond.workflows.options.fitting import WithTrials
from llmcond.workflows.options.ranking import DialogueOptions, RankingOptions

Analysis = Literal["isotropy", "clusters", "conditions", "norms", "examples"]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(
    InRun, WithColumns, WithSplit, WithMetrics, WithDevice, DialogueOptions, RankingOptions
):
    """Which heads are scored, on which rows, and what is written."""

    head: Sequence[str] = option(
        (), metavar="NAME", help="fitted heads (default: all; none: zero-shot only)"
    )
    data: Any = option(
        None,
        metavar="SRC",
        source=DATA,
        help=f"score other rows: {DATA}; a single file is scored whole",
    )
    predictions: str | Path | None = option(
        None,
        metavar="FILE.csv",
        help="write what is predicted of each row: its similarity, or its answer's rank",
    )
    report: str | Path | None = option(
        None, metavar="FILE.html", help="a page to read: charts, texts, settings"
    )


@dataclass(frozen=True, kw_only=True)
class AnalyseOptions(InRun, WithSplit):
    """Which heads are explained, and how."""

    head: Sequence[str] = option((), metavar="NAME", help="fitted heads (default: all)")
    what: Sequence[Analysis] = option((), help="which analyses (default: all)")
    out: str | Path | None = option(None, metavar="DIR", help="for pictures (default: in the run)")
    conditions: int = option(3, metavar="N", help="number of conditions to cluster")
    sentences: int = option(20, metavar="N", help="sentences of each condition to cluster")
    top: Annotated[int, Ge(0)] = option(
        5, metavar="N", help="number of rows to list whose similarity changed most"
    )
    seed: Seed = option(0, metavar="S", help="seed of everything random")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(WithSplit, WithMetrics, WithTrials):
    """What is compared, and how.

    Of the prompts named, those that the encoder cannot use are left out, and that is said.
    """

    prompts: Sequence[str] = option(
        (), metavar="FILE", help="names or files (default: every bundled one the model can use)"
    )
    baseline: str | None = option(
        None,
        metavar="NAME",
        help="what the others are compared with (default: the one that suits the model)",
    )
    heads: Sequence[str] = option(
        (),
        metavar="NAME",
        help="recipes to fit in addition to zero-shot; none: none (default: linear mlp; of "
        "dialogues c3l-released rank)",
    )
    plain: bool = option(False, help="fit heads without subtraction as well")


@dataclass(frozen=True, kw_only=True)
class ComparePromptsOptions(CompareOptions, RunOptions):
    """Which prompts are compared, on which data."""

    report: str | Path | None = option(
        None, metavar="FILE.html", help="a page to read: charts, texts, settings"
    )
