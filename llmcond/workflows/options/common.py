"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcond.bundled import DEFAULT_RUN, PRETRAINED, pretrained_names
from llmcond.conditions import MAX_VALUES, with_values
from llmcond.data.readers import FILES, SOURCE, TEXT_COLUMNS
from llmcond.encoders import EncoderOptions
from llmcond.errors import UserError, nearest
from llmcond.options import Amount, Options, Positive, option

if TYPE_CHECKING:
    from llmcond.data.datasets import DataOptions
    from llmcond.scale.pool import Cluster

Split = Literal["train", "dev", "test"]

DATA = f"{SOURCE} (from Python also a pandas or Arrow table, or a list of dicts)"

TEXT_HELP = f"column of the texts (default: {', or else '.join(TEXT_COLUMNS)})"

CHECK_HELP = (
    "say whether each condition is expected to work on these texts, as llmcond check-condition does"
)

VALUES_HELP = (
    f'up to {MAX_VALUES} example values of the condition, such as "Italian, Thai, Indian"; put a '
    "value that has a comma in double quotes"
)

_RAY = "--scale ray"
_SCALE = "more than one machine (docs/scale.md)"


@dataclass(frozen=True, kw_only=True)
class InRun(Options):
    """Options of what works on a run."""

    run: str | Path = option(DEFAULT_RUN, metavar="DIR", help="folder of this piece of work")


def _number(text: str) -> float | str:
    """Return a text as a number where it is one; what the others mean is for the data to say."""
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True, kw_only=True)
class WithColumns(Options):
    """How rated rows are read.

    Subclasses make ``data``, ``split_seed`` and ``drop_leaks`` flags where they have them.
    """

    data: Any = None
    split_seed: int | None = None
    drop_leaks: bool = False
    columns: Mapping[str, str] | None = option(
        None,
        metavar="NAME=COLUMN",
        help="column names other than the run's or task's, for sentence1, sentence2, condition "
        "and label",
    )
    rating_range: tuple[float, float] | None = option(
        None,
        metavar=("LOW", "HIGH"),
        help="range of the ratings, mapped to 0 to 1 (default: the run's or task's; C-STS: 1 5)",
    )
    unrated: float | Literal["empty"] | None = option(
        None,
        metavar="LABEL",
        parse=_number,
        help="label of unrated rows: a number, or empty for labels that are empty, null or NaN "
        "(default: the run's or task's; C-STS: -1)",
    )

    def __post_init__(self) -> None:
        """Check the names of columns as well."""
        super().__post_init__()
        if self.columns:
            from llmcond.data.datasets import Columns

            legal = [field.name for field in fields(Columns)]
            for name in self.columns:
                if name not in legal:
                    raise UserError(f"--columns has no {name!r}. {nearest(name, legal)}")

    def data_options(self) -> DataOptions:
        """Return where rows come from, and how they are read."""
        from llmcond.data.datasets import DataOptions

        scale: dict[str, Any] = dict(zip(("low", "high"), self.rating_range or (), strict=False))
        if self.unrated is not None:
            scale["unrated"] = self.unrated
        return DataOptions(
            self.data, self.columns or {}, scale, self.split_seed, drop_leaks=self.drop_leaks
        )


@dataclass(frozen=True, kw_only=True)
class WithDevice(Options):
    """Options of what computes on a device."""

    device: str = option("auto", metavar="D", help="auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class HeadOptions(WithDevice):
    """Which of a run's heads a command takes."""

    head: str | None = option(
        None,
        metavar="NAME",
        help="a fitted head (default: the run's default head, else the best on dev; none: "
        "zero-shot)",
    )
    prompt: str | None = option(
        None, metavar="NAME", help="for zero-shot (default: the run's only one)"
    )


@dataclass(frozen=True, kw_only=True)
class WithHead(InRun, HeadOptions):
    """Options of what uses a run's encoder and one of its heads."""


@dataclass(frozen=True, kw_only=True)
class WithEmbedder(HeadOptions):
    """Options of what embeds texts under conditions, also by a bundled model."""

    run: str | Path | None = option(
        None,
        metavar="DIR",
        help=f"folder of a piece of work (default: {DEFAULT_RUN} if it was made from data of your "
        f"own, else the bundled model {PRETRAINED})",
    )
    model: str | None = option(
        None,
        metavar="NAME",
        help=f"a bundled model instead of a run: {' or '.join(pretrained_names())}",
    )

    def folder(self) -> Path:
        """Return the folder of the run or of the model; see :func:`llmcond.runs.open.usual_run`."""
        from llmcond.runs.open import usual_run

        return usual_run(self.run, self.model)


@dataclass(frozen=True, kw_only=True)
class WithConditions(Options):
    """Options of several conditions; subclasses declare ``condition``."""

    condition: Sequence[str] = ()
    values: Sequence[str] = option(
        (),
        metavar="VALUES",
        repeat=True,
        help=f"{VALUES_HELP}. With several --condition, give it once for each, in their order "
        "('' for none)",
    )

    def conditions(self) -> list[str]:
        """Return the conditions with their values."""
        return with_values(self.condition, self.values)


@dataclass(frozen=True, kw_only=True)
class WithGuide(Options):
    """Options of what a few labelled texts can guide."""

    guide: Any = option(
        None,
        metavar="SRC",
        source=FILES,
        help="a few labelled texts that embeddings follow: a table with the columns text, label "
        "and, where there are several conditions, condition",
    )


@dataclass(frozen=True, kw_only=True)
class WithScale(Options):
    """Options of work that may be shared among actors of Ray."""

    scale: Literal["ray"] | None = option(
        None,
        group=_SCALE,
        help="ray: share the work among actors of Ray, which is started here unless --address "
        "names a cluster; needs the extra ray",
    )
    address: str | None = option(
        None,
        metavar="ADDRESS",
        group=_SCALE,
        needs=_RAY,
        help="of the cluster, HOST:PORT; auto: the one that this machine is part of",
    )
    actors: Positive | None = option(
        None,
        metavar="N",
        group=_SCALE,
        needs=_RAY,
        help="how many (default: one a core, or as many as share the GPUs)",
    )
    gpus_per_actor: Amount | None = option(
        None,
        metavar="F",
        group=_SCALE,
        needs=_RAY,
        help="GPUs of each actor, or a part of one (default: 0, on CPUs)",
    )

    def cluster(self) -> Cluster | None:
        """Return where the work is shared; None: it is not."""
        if self.scale is None:
            return None
        from llmcond.scale.pool import Cluster

        return Cluster(self.address, self.actors, self.gpus_per_actor or 0.0)


@dataclass(frozen=True, kw_only=True)
class WithEncoderSettings(Options, EncoderOptions):
    """The settings of an encoder as options."""

    def encoder_options(self) -> EncoderOptions:
        """Return the settings of the encoder."""
        return self.part(EncoderOptions)


@dataclass(frozen=True, kw_only=True)
class WithEncoder(WithEncoderSettings):
    """Options that name an encoder."""

    model: str = option(
        metavar="NAME_OR_PATH",
        help="alias, hub name or folder (`llmcond models` lists the known ones)",
    )


@dataclass(frozen=True, kw_only=True)
class WithTask(WithColumns):
    """Options of what makes a run of a task from data."""

    data: Any = option(
        None,
        metavar="SRC",
        source=DATA,
        help=f"{DATA} (default: the run's own data, or the bundled sample)",
    )
    split_seed: int | None = option(
        None, metavar="S", help="seed that splits a single file (default: 0)"
    )
    task: str | None = option(
        None,
        metavar="NAME",
        help="of a new run: csts (default), kgc, dialogue, or code of your own, my_task.py:NAME",
    )
    drop_leaks: bool = option(
        False,
        help="of dialogues: leave out of train those that dev or test has, the same or for a good "
        "part, and of dev those that test has (otherwise they are counted)",
    )


@dataclass(frozen=True, kw_only=True)
class WithSplit(Options):
    """Options of what looks at one split."""

    split: Split | None = option(
        None, help="split to use (default: test if it has rated rows, else dev)"
    )


@dataclass(frozen=True, kw_only=True)
class WithMetrics(Options):
    """Options of what scores predictions."""

    metric: Sequence[str] = option(
        (), metavar="FILE.py:NAME", help="metrics of your own, in addition to those of the task"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(InRun, WithTask, WithEncoder):
    """A run that is made of a data set by an encoder."""
