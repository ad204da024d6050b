"""Options of commands that score or explain heads, or compare prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge

from llmcond.data.readers import FILES
from llmcond.files import PAGE_SUFFIXES, check_folder, file_output
from llmcond.options import Options, Seed, option
from llmcond.workflows.options.common import (
    DATA,
    ColumnOptions,
    DeviceOption,
    FigureOption,
    MetricOption,
    RunOption,
    RunOptions,
    SplitOption,
)
from llmcond.workflows.options.fitting import TrialOptions
from llmcond.workflows.options.ranking import DialogueOptions, RankingOptions

#: Analyses of rated pairs, and of dialogues.
RatedAnalysis = Literal["isotropy", "clusters", "conditions", "norms", "examples", "answers"]
DialogueAnalysis = Literal["similarity", "turns"]
Analysis = Literal[RatedAnalysis, DialogueAnalysis]


@dataclass(frozen=True, kw_only=True)
class ReportOption(Options):
    """Options of commands that write a report of scores."""

    report: str | Path | None = option(
        None,
        metavar="FILE.html",
        writes=file_output(*PAGE_SUFFIXES),
        help="HTML report to write, with charts, texts and settings",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(
    ReportOption,
    RunOption,
    ColumnOptions,
    SplitOption,
    MetricOption,
    DeviceOption,
    DialogueOptions,
    RankingOptions,
):
    """Options of ``llmcond evaluate``: the heads and rows to score, and the files to write."""

    head: Sequence[str] = option(
        (),
        help="fitted heads to score, next to zero-shot with their prompts; none: only zero-shot "
        "(default: all)",
    )
    data: Any = option(
        None,
        source=DATA,
        help=f"other rows to score: {DATA}; a single file is scored as a whole (default: the data "
        "of the run)",
    )
    predictions: str | Path | None = option(
        None,
        metavar="FILE.csv",
        writes=file_output(".csv"),
        help="file to write the prediction for each row to: its similarity, or the rank of its "
        "answer",
    )


@dataclass(frozen=True, kw_only=True)
class AnalyseOptions(RunOption, SplitOption, FigureOption):
    """Options of ``llmcond analyse``: the heads to explain, and the analyses."""

    head: Sequence[str] = option((), help="fitted heads to explain (default: all)")
    what: Sequence[Analysis] = option(
        (),
        metavar="NAME",
        help=f"analyses to run: {', '.join(get_args(RatedAnalysis))}; of dialogues: "
        f"{', '.join(get_args(DialogueAnalysis))} (default: all; answers only with --answers)",
    )
    answers: Any = option(
        None,
        source=FILES,
        help="table of sentence pairs to compare before and after each head: columns sentence1, "
        "sentence2 and condition, and optionally answer1 and answer2, the words in each sentence "
        "that answer the condition",
    )
    out: str | Path | None = option(
        None,
        metavar="DIR",
        writes=check_folder,
        help="folder for the figures (default: in the run)",
    )
    conditions: int = option(3, help="number of conditions to cluster")
    sentences: int = option(20, help="number of sentences per condition to cluster")
    top: Annotated[int, Ge(0)] = option(
        5, help="number of rows to list, those whose similarity changed most"
    )
    seed: Seed = option(0, metavar="S", help="random seed")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SplitOption, MetricOption, TrialOptions):
    """Options that say which prompts are compared, and how.

    Prompts that the encoder cannot use are skipped with a message.
    """

    prompts: Sequence[str] = option(
        (),
        metavar="FILE",
        help="prompts to compare, by name or file (default: every bundled one that the model can "
        "use)",
    )
    baseline: str | None = option(
        None,
        help="prompt that the others are compared with (default: the one that suits the model)",
    )
    heads: Sequence[str] = option(
        (),
        help="recipes to fit in addition to zero-shot; none: only zero-shot (default: linear mlp, "
        "for dialogues c3l-released rank)",
    )
    plain: bool = option(
        False, help="also fit heads without subtracting the unconditional embedding"
    )


@dataclass(frozen=True, kw_only=True)
class ComparePromptsOptions(CompareOptions, ReportOption, RunOptions, FigureOption):
    """Options of ``llmcond compare-prompts``: the prompts, the encoder and the data."""

    figures: str | Path | None = option(
        None,
        metavar="DIR",
        writes=check_folder,
        help="folder to write the charts of the report to, as image files",
    )


@dataclass(frozen=True, kw_only=True)
class CompareSystemsOptions(ReportOption, SplitOption, MetricOption, DeviceOption):
    """Options of ``llmcond compare``: the systems, and the files to write."""

    systems: Sequence[str] = option(
        flag="",
        metavar="RUN[:HEAD]",
        help="systems to compare: a run with its default head, RUN:HEAD, or RUN:none for zero-shot "
        "(RUN:none@PROMPT). The name of a recipe stands for its heads of all seeds; RUN:HEAD,HEAD "
        "and RUN,RUN name the seeds of one system",
    )
    baseline: str | None = option(
        None,
        metavar="RUN[:HEAD]",
        help="system that the others are compared with, as it is named above (default: the first)",
    )
