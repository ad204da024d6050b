"""What verbs are asked for by several settings: each is a flag, and what the workflow takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from llmcond.errors import UserError
from llmcond.options import Ties, option

Split = Literal["train", "dev", "test"]
_HEAD = "head and inputs"
_TEACHER = "distilling"
_WITH_DEV = "fitting on dev as well"
_RANKING = "ranking, of tasks that rank candidates"
_GRAPH = "ranking, of knowledge graphs (task kgc)"
_DIALOGUE = "ranking, of dialogues (task dialogue)"
_PLANNING = "planning, of dialogues (task dialogue)"


@dataclass(frozen=True, kw_only=True)
class WithSplit:
    """Options of what looks at one split."""

    split: Split | None = option(
        None, help="split to use (default: test if it has rated rows, else dev)"
    )


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """What a knowledge graph itself adds to the scores of entities."""

    rerank: str | None = option(
        None,
        metavar="HOPS:ALPHA[:no-head]",
        help="add ALPHA to entities within so many links of the head in train (SimKGC: 5:0.05); "
        "no-head: not to the head itself",
        group=_GRAPH,
    )
    reverse: bool = option(
        False,
        help="add a weight to entities that have the same relation to the head in train; it is "
        "fitted on dev, one for each relation",
        group=_GRAPH,
    )


@dataclass(frozen=True, kw_only=True)
class CompleteOptions(GraphOptions):
    """Which triple is completed, and among which entities."""

    relation: str = option(metavar="REL", help="id or name")
    head_entity: str | None = option(
        None, metavar="E", help="id or name: complete (E, relation, ?)"
    )
    tail_entity: str | None = option(
        None, metavar="E", help="id or name: complete (?, relation, E)"
    )
    k: int = option(10, flag="-k", metavar="K", help="how many entities")
    filtered: bool = option(True, help="leave out what some split of the data has")
    exclude_head: bool = option(True, help="leave out the entity that is asked of")


@dataclass(frozen=True, kw_only=True)
class TiesOption:
    """How right answers rank among equals, in every task that ranks candidates.

    Attributes:
        of: the kind of task that options are of, and how messages say it.
    """

    of: ClassVar[tuple[str, str]] = "", "tasks that rank candidates"

    ties: Ties | None = option(
        None,
        help="how an answer ranks among candidates of its score: in their middle, first or last "
        "(default: realistic)",
        group=_RANKING,
    )


@dataclass(frozen=True, kw_only=True)
class RankingOptions(GraphOptions, TiesOption):
    """How candidates are ranked, in runs of knowledge graphs."""

    of: ClassVar[tuple[str, str]] = "ranking", "knowledge graphs"

    exclude_head: bool = option(
        False,
        help="a query's own head entity is no candidate, unless it is the answer",
        group=_GRAPH,
    )
    by_relation: bool = option(
        False,
        help="figures of each relation and category of relations as well, with --json",
        group=_GRAPH,
    )


@dataclass(frozen=True, kw_only=True)
class DialogueOptions(TiesOption):
    """How the next turns of dialogues are ranked, or planned for."""

    of: ClassVar[tuple[str, str]] = "dialogue", "dialogues"

    history: str | None = option(
        None,
        metavar="FROM-TO",
        help="turns that are given, such as 2-10 or 2,5 (default: 2-10; with --plan 2,5)",
        group=_DIALOGUE,
    )
    score: Sequence[str] = option(
        (),
        metavar="NAME",
        help="average, last:L (last:2), bi, neighbours, maxsim, weighted (default: what a head was "
        "fitted for; zero-shot by several)",
        group=_DIALOGUE,
    )
    candidates: str | None = option(
        None,
        metavar="POOL",
        help="same-depth: the turns at the answer's place in all dialogues; all: every turn that "
        "answers; or a file of texts, one a line (default: same-depth)",
        group=_DIALOGUE,
    )
    plan: str | None = option(
        None,
        metavar="POOL",
        help="rank turns by how well they lead to a later one, the goal, among 100 others: "
        "retrieved, same-depth, random, or a file of samples (.jsonl)",
        group=_PLANNING,
    )
    distance: str | None = option(
        None,
        metavar="FROM-TO",
        help="turns from the answer to the goal (default: 1-4)",
        group=_PLANNING,
    )
    generate: str | None = option(
        None,
        metavar="MODEL",
        help="plan among what a causal language model says, a hub name or a folder; kept in the "
        "run, and made once",
        group=_PLANNING,
    )
    samples: int | None = option(
        None,
        metavar="N",
        help="candidates that it makes for each history (default: 100)",
        group=_PLANNING,
    )

    @property
    def plans(self) -> bool:
        """Return whether planning is asked for."""
        return self.plan is not None or self.generate is not None


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """What was said so far, and what may be said next."""

    turns: Sequence[str] = option(flag="", metavar="TURN", help="what was said so far, in order")
    candidates: str | Path = option(
        metavar="FILE",
        help="what may come next: a text file, one a line, or a table with a column text",
    )
    goal: str | None = option(
        None, metavar="TEXT", help="a later turn that the candidates are to lead to"
    )
    score: str | None = option(
        None,
        metavar="NAME",
        help="average, last:L (last:2), bi, neighbours, maxsim, weighted (default: what the head "
        "was fitted for)",
    )
    k: int = option(3, flag="-k", metavar="K", help="how many candidates are shown")


@dataclass(frozen=True, kw_only=True)
class WithMetrics:
    """Options of what scores predictions."""

    metric: Sequence[str] = option(
        (),
        metavar="FILE.py:NAME",
        help="metrics of your own, in addition to those of the task",
    )


@dataclass(frozen=True, kw_only=True)
class WithTrials:
    """Options of what fits every head with several seeds."""

    seeds: int = option(3, metavar="N", help="fits of each, with seeds 0 to N-1")
    set: Mapping[str, str] | None = option(
        None, metavar="KEY=VALUE", help="settings of the recipes, for all heads that have them"
    )
    keep: bool = option(False, help="keep the fit with the best score on dev as a head of the run")
    workers: int | None = option(
        None, metavar="N", help="fits at a time (default: one a core, at most 8)"
    )


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
class DevOptions:
    """What heads are fitted on besides train."""

    with_split: Literal["dev"] | None = option(
        None,
        flag="--with",
        help="fit on dev too, for all epochs of the recipe; dev is no score of the head then",
        group=_WITH_DEV,
    )
    weight: int = option(
        3, metavar="W", help="how often dev's rows are taken in an epoch", group=_WITH_DEV
    )
    folds: int = option(
        0,
        metavar="K",
        help="K-fold cross-validation over the sentence pairs of dev: what training on it brings",
        group=_WITH_DEV,
    )

    def check(self) -> bool:
        """Return whether dev is fitted on.

        Raises:
            UserError: a value out of its range, or an option of it without ``with_split``.
        """
        if self.with_split is None:
            for name in ("weight", "folds"):
                if getattr(self, name) != getattr(DevOptions, name):
                    raise UserError(f"--{name} is of fitting on dev. Add --with dev.")
            return False
        if self.weight < 1:
            raise UserError(f"--weight is {self.weight}; it must be at least 1.")
        if self.folds < 0 or self.folds == 1:
            raise UserError(f"--folds is {self.folds}; expected 2 or more, or 0 for none.")
        return True


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
    teacher_rows: int | None = option(
        None, metavar="N", help="how many (default: as many as train has)", group=_TEACHER
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
    seed: int = option(0, metavar="S", help="seed of everything random")
    ensemble: int = option(
        1,
        metavar="N",
        help="train N adapters with seeds S, S+1, ...; their embeddings are concatenated",
        group=_HEAD,
    )
