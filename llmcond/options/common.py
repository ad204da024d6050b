"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from llmcond.base.errors import UserError, nearest
from llmcond.base.files import check_folder
from llmcond.base.options import Amount, AnswersAs, Options, Positive, option
from llmcond.base.package import DEFAULT_MODEL, DEFAULT_RUN, pretrained_names
from llmcond.base.run_log import Tracker, check_trackers
from llmcond.base.system import check_device
from llmcond.base.text import (
    MAX_VALUES,
    as_condition,
    check_encoding,
    combine_values,
    condition_text,
    ignoring,
)
from llmcond.data.formats import TEXT_COLUMNS, ReadOptions
from llmcond.data.readers import FILES, OBJECTS, SOURCE
from llmcond.encoders import EncoderOptions, check_encoder

if TYPE_CHECKING:
    from llmcond.data.answers import AnswerTable
    from llmcond.data.datasets import DataOptions
    from llmcond.features.pool import Workers

Split = Literal["train", "dev", "test"]

#: Description of the data that commands and their Python functions read.
DATA = (
    f"{SOURCE}, or - for standard input; in Python also a table of pandas, polars, Arrow or "
    "Hugging Face datasets, or a list of dicts"
)
#: Description of the texts that Python functions take in addition to files.
IN_PYTHON = f"in Python also {OBJECTS}"

TEXT_HELP = f"column of the texts (default: {', otherwise '.join(TEXT_COLUMNS)})"

VALUES_HELP = (
    f'up to {MAX_VALUES} example values of the condition, such as "Italian, Thai, Indian"; put '
    "double quotes around a value that contains a comma"
)


@dataclass(frozen=True, kw_only=True)
class FigureOption(Options):
    """Options of commands that write figures into a folder."""

    figure_format: Literal["png", "svg", "pdf"] = option(
        "png",
        metavar="FORMAT",
        needs="--figures",
        help="format of figures: png, svg or pdf; the numbers of each figure are written next to "
        "it as CSV",
    )


def _check_run(run: str | Path) -> None:
    from llmcond.runs.open import check_run_exists  # help texts do not need it

    check_run_exists(Path(run))


@dataclass(frozen=True, kw_only=True)
class RunOption(Options):
    """Options of commands that work on a run."""

    run: str | Path = option(
        DEFAULT_RUN,
        metavar="DIR",
        check=_check_run,
        help="folder of the run, with its features, heads and results",
    )


def _parse_number(text: str) -> float | str:
    """Convert a text to a number if it is one; the dataset checks any other text."""
    try:
        return float(text)
    except ValueError:
        return text


def _parse_delimiter(text: str) -> str:
    """Return a delimiter from its name, and check that it is one character."""
    delimiter = "\t" if text.lower() in ("tab", r"\t") else text
    if len(delimiter) != 1 or delimiter in '\r\n"':
        raise UserError(
            f"--delimiter is {delimiter!r}; expected one character, such as ';', or tab."
        )
    return delimiter


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(Options):
    """Options that say how files of texts are read."""

    option_group: ClassVar[str] = "how texts are read"

    encoding: str | None = option(
        None,
        check=check_encoding,
        help="encoding of text files, such as cp1252 for files of Windows (default: UTF-8, or "
        "UTF-16 or UTF-32 with a byte order mark)",
    )
    delimiter: str | None = option(
        None,
        metavar="CHAR",
        parse=_parse_delimiter,
        help="character that separates columns, or tab (default: a tab in .tsv, and detected in "
        ".csv)",
    )
    skip_empty: bool = option(
        False,
        help="leave out rows with an empty text, and report how many (default: an error)",
    )

    def read_options(self) -> ReadOptions:
        """Return the options as readers take them."""
        return ReadOptions(self.encoding, self.delimiter, self.skip_empty)


@dataclass(frozen=True, kw_only=True)
class TextInputOptions(ReadingOptions):
    """Options of commands that read texts."""

    option_group: ClassVar[str] = "how texts are read"

    strip_html: bool = option(
        False,
        help="remove HTML tags, comments, scripts and entities from texts",
    )

    @override
    def read_options(self) -> ReadOptions:
        return replace(super().read_options(), strip_html=self.strip_html)


def _check_columns(columns: Mapping[str, str]) -> None:
    from llmcond.data.datasets import Columns

    legal = [field.name for field in fields(Columns)]
    for name in columns:
        if name not in legal:
            raise UserError(f"--columns has no {name!r}. {nearest(name, legal)}")


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(ReadingOptions):
    """Options that say how rated rows are read.

    Subclasses redeclare ``data``, ``split_seed`` and ``drop_leaks`` as flags if they have them.
    """

    data: Any = None
    split_seed: int | None = None
    drop_leaks: bool = False
    columns: Mapping[str, str] | None = option(
        None,
        metavar="NAME=COLUMN",
        check=_check_columns,
        help="names of the columns for sentence1, sentence2, condition and label (default: the "
        "run's or task's)",
    )
    rating_range: tuple[float, float] | None = option(
        None,
        metavar=("LOW", "HIGH"),
        help="lowest and highest possible rating, which are mapped to 0 and 1 (default: the run's "
        "or task's; C-STS: 1 5)",
    )
    unrated: float | Literal["empty"] | None = option(
        None,
        metavar="LABEL",
        parse=_parse_number,
        help="label of unrated rows: a number, or the word empty for labels that are empty, null "
        "or NaN (default: the run's or task's; C-STS: -1)",
    )

    def data_options(self) -> DataOptions:
        """Return the source of the rows and how they are read."""
        from llmcond.data.datasets import DataOptions

        scale: dict[str, Any] = dict(zip(("low", "high"), self.rating_range or (), strict=False))
        if self.unrated is not None:
            scale["unrated"] = self.unrated
        return DataOptions(
            self.data,
            self.columns or {},
            scale,
            self.split_seed,
            drop_leaks=self.drop_leaks,
            reading=self.read_options(),
        )


@dataclass(frozen=True, kw_only=True)
class DeviceOption(Options):
    """Options of commands that compute on a device."""

    device: str = option(
        "auto", metavar="D", check=check_device, help="device to use: auto, cpu, cuda or cuda:N"
    )


@dataclass(frozen=True, kw_only=True)
class LogOption(Options):
    """Options of commands that fit or train, whose records trackers can get too."""

    log: Sequence[Tracker] = option(
        (),
        metavar="TRACKER",
        check=check_trackers,
        help="trackers that get the loss, the learning rate and the scores: tensorboard, wandb, "
        "trackio or mlflow (default: none; the run has them as JSON lines)",
    )


@dataclass(frozen=True, kw_only=True)
class HeadOptions(DeviceOption):
    """Options that choose one of a run's heads."""

    head: str | None = option(
        None,
        help="fitted head to use; none: zero-shot (default: the run's default head, otherwise the "
        "head with the best dev score)",
    )
    prompt: str | None = option(
        None, help="prompt of zero-shot embeddings (default: the run's only prompt)"
    )


@dataclass(frozen=True, kw_only=True)
class EmbedderOptions(HeadOptions):
    """Options of commands that embed texts under conditions, by a run or a bundled model."""

    run: str | Path | None = option(
        None,
        metavar="DIR",
        help=f"folder of the run whose encoder and head are used (default: {DEFAULT_RUN} if it "
        f"was extracted from your data, otherwise the bundled model {DEFAULT_MODEL})",
    )
    model: str | None = option(
        None,
        metavar="NAME_OR_PATH",
        help=f"model to use instead of a run: {' or '.join(pretrained_names())} (bundled), a known "
        "encoder (`llmcond models` lists them), the folder of an encoder, OWNER/NAME on the "
        "Hugging Face hub, or ADDRESS#NAME of a server's model; an encoder embeds zero-shot",
    )
    revision: str | None = option(
        None,
        metavar="REV",
        needs="--model",
        help="branch, tag or commit of the model on the hub (default: the newest version)",
    )

    def resolve_folder(self) -> Path:
        """Return the folder of the chosen run or model; a model on the hub is downloaded.

        Raises:
            UserError: both a run and a model are named, or there is no such model.
            LlmcondError: the hub cannot be reached.
        """
        from llmcond.runs.open import resolve_run

        return resolve_run(self.run, self.model, self.revision)

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of the functions that load the model; see ``resolve_folder``."""
        run = self.resolve_folder()
        return {"run": run, "head": self.head, "prompt": self.prompt, "device": self.device}


@dataclass(frozen=True, kw_only=True)
class TruncateOption(Options):
    """Options of commands whose embeddings can be truncated."""

    truncate_dim: Positive | None = option(
        None,
        metavar="K",
        help="number of leading dimensions to keep, for heads that were fitted with the setting "
        "matryoshka, or pca (default: all)",
    )


@dataclass(frozen=True, kw_only=True)
class RangesOption(Options):
    """Options of commands that quantise embeddings to 8 bits."""

    ranges: str | Path | None = option(
        None,
        metavar="FILE.npy",
        needs="--precision int8 or --precision uint8",
        help="lowest and highest value of each dimension, for int8 and uint8, as embed writes them",
    )


def condition_option(text: str, *default: Any, metavar: str = "TEXT") -> Any:
    """Return the option of several conditions with a help text; required without a default."""
    return option(*default, metavar=metavar, repeat=True, help=text)


@dataclass(frozen=True, kw_only=True)
class ConditionOptions(Options):
    """Options of commands that take several conditions; subclasses declare ``condition``."""

    condition: Sequence[str] = ()
    values: Sequence[str] = option(
        (),
        metavar="VALUES",
        repeat=True,
        help=f"{VALUES_HELP}. With several --condition, repeat --values once for each, in the same "
        "order ('' for a condition without values)",
    )

    def conditions(self) -> list[str]:
        """Combine each condition with its example values."""
        return combine_values(self.condition, self.values)


#: The value of ``--ignore`` by which each condition ignores the other ones.
OTHERS = "others"


@dataclass(frozen=True, kw_only=True)
class IgnoreOption(ConditionOptions):
    """The option of commands whose conditions can ignore others."""

    ignore: Sequence[str] = option(
        (),
        metavar="TEXT",
        repeat=True,
        needs="--condition or --condition-text or --weight",
        help="condition to ignore, such as 'the product': what the texts differ in under it is "
        f"removed from their embeddings; may be repeated. {OTHERS}: each --condition ignores the "
        "other ones",
    )

    @override
    def conditions(self) -> list[str]:
        """Combine each condition with its example values, and with what it ignores.

        Raises:
            UserError: as ``combine_values`` and ``add_ignored``.
        """
        return self.add_ignored(super().conditions())

    def add_ignored(self, conditions: Sequence[str]) -> list[str]:
        """Return conditions that ignore what the option names.

        Raises:
            UserError: a condition ignores itself, or there are no other ones to ignore.
        """
        named = [as_condition(text, "--ignore") for text in self.ignore if text != OTHERS]
        if OTHERS not in self.ignore:
            return [ignoring(condition, named) for condition in conditions]
        if len(conditions) < 2:
            raise UserError(
                f"--ignore {OTHERS} needs several --condition. Name what to ignore: --ignore TEXT."
            )
        everything = [*map(condition_text, conditions), *named]
        return [
            ignoring(one, [text for text in everything if text != condition_text(one)])
            for one in conditions
        ]


@dataclass(frozen=True, kw_only=True)
class IgnoreOptions(IgnoreOption):
    """Options of commands that find in a collection of texts what conditions ignore."""

    ignore_column: Sequence[str] = option(
        (),
        metavar="COL",
        needs="--condition or --condition-text",
        help="columns of known labels to ignore, such as the product of each text",
    )
    ignore_directions: Positive | None = option(
        None,
        metavar="N",
        needs="--ignore",
        help="number of directions to remove for each --ignore (default: those whose variance is "
        "at least a tenth of that of the first one, at most 32)",
    )


@dataclass(frozen=True, kw_only=True)
class GuideOption(Options):
    """Options of commands whose embeddings a few labelled texts can guide."""

    guide: Any = option(
        None,
        source=FILES,
        help="table of a few labelled texts that guide the embeddings: columns text and label, and "
        "also condition if there are several conditions",
    )


@dataclass(frozen=True, kw_only=True)
class AnswersOption(Options):
    """Options of commands that embed answers in place of texts."""

    answers: Any = option(
        None,
        source=FILES,
        needs="TEXTS",
        help="table of an answer for each text and condition, as llmcond answers writes it: the "
        "encoder reads the answers in place of the texts",
    )
    answers_as: AnswersAs = option(
        "answer",
        needs="--answers",
        help="vector of a text: that of its answer, or both: the mean of text and answer",
    )

    def read_answers(self) -> AnswerTable | None:
        """Read the table of answers; None if none is given.

        Raises:
            UserError: as ``llmcond.data.answers.read_answers``.
        """
        if self.answers is None:
            return None
        from llmcond.data.answers import answer_key, read_answers
        from llmcond.data.datasets import strip_html

        table = read_answers(self.answers, self.answers_as)
        if not getattr(self, "strip_html", False):
            return table
        # The texts of the table have HTML, unless `llmcond answers` has removed it.
        answers = dict(table.answers)
        for (text, condition), answer in table.answers.items():
            key = answer_key(strip_html(text), condition)
            if answers.setdefault(key, answer) != answer and key not in table.answers:
                raise UserError(
                    f"{table.source} has several answers to {key[0]!r}, which is left of several "
                    "texts without their HTML. Keep only one of them."
                )
        return replace(table, answers=answers)


@dataclass(frozen=True, kw_only=True)
class WorkersOption(Options):
    """Option of work that processes of this machine can share."""

    workers: Positive = option(
        1,
        help="number of processes that share the work: one per GPU, or on a CPU each with an equal "
        "share of its cores",
        conflicts="--scale",
    )


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(WorkersOption):
    """Options of work that processes of this machine, or actors of a Ray cluster, can share."""

    option_group: ClassVar[str] = "work distributed with Ray (docs/scale.md)"
    option_needs: ClassVar[str] = "--scale ray"

    scale: Literal["ray"] | None = option(
        None,
        help="ray: distribute the work over actors of a Ray cluster; needs the extra ray",
    )
    address: str | None = option(
        None,
        metavar="ADDRESS",
        help="address of the Ray cluster, HOST:PORT (default: auto, the cluster that this machine "
        "belongs to)",
    )
    actors: Positive | None = option(
        None,
        help="number of actors (default: one per CPU core, or as many as the GPUs allow)",
    )
    gpus_per_actor: Amount | None = option(
        None,
        metavar="F",
        help="number of GPUs per actor, which can be a fraction (default: 0, use CPUs)",
    )

    def find_workers(self) -> Workers | None:
        """Return the workers that share the work; None if this process does it alone."""
        if self.scale is None and self.workers == 1:
            return None
        from llmcond.features.pool import Workers

        if self.scale is None:
            return Workers(self.workers)
        return Workers(self.actors, self.address or "auto", self.gpus_per_actor or 0.0)


@dataclass(frozen=True, kw_only=True)
class EncoderFlags(EncoderOptions):
    """Encoder settings as options of a command."""

    def encoder_options(self) -> EncoderOptions:
        """Return the encoder settings separately from the other options."""
        return self.select(EncoderOptions)


@dataclass(frozen=True, kw_only=True)
class TaskOptions(ColumnOptions):
    """Options of commands that create a run of a task from data."""

    data: Any = option(
        None,
        source=DATA,
        help=f"data of the run: {DATA} (default: the run's existing data, or the bundled sample)",
    )
    split_seed: int | None = option(
        None,
        metavar="S",
        help="random seed that splits a single file into train, dev and test (default: 0)",
    )
    task: str | None = option(
        None,
        help="task of a new run: csts, kgc, dialogue, or a custom one, my_task.py:NAME (default: "
        "csts)",
    )
    drop_leaks: bool = option(
        False,
        help="with --task dialogue: drop training dialogues that duplicate, or nearly duplicate, a "
        "dev or test dialogue, and dev dialogues that do so with a test dialogue (default: only "
        "count them)",
    )


@dataclass(frozen=True, kw_only=True)
class SplitOption(Options):
    """Options of commands that use one split."""

    split: Split | None = option(
        None, help="split to use (default: test if it has rated rows, otherwise dev)"
    )


@dataclass(frozen=True, kw_only=True)
class MetricOption(Options):
    """Options of commands that score predictions."""

    metric: Sequence[str] = option(
        (), metavar="FILE.py:NAME", help="custom metrics, in addition to those of the task"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(TaskOptions, EncoderFlags):
    """Options of commands that encode a dataset into a run.

    ``weights_for`` is what the command does with the weights of an encoder, if it needs them.
    """

    weights_for: ClassVar[str] = ""

    model: str = option(
        metavar="NAME_OR_PATH",
        help="alias, hub name or folder of the encoder (`llmcond models` lists the known ones), or "
        "the address of a server (--server-model)",
    )
    run: str | Path = option(
        DEFAULT_RUN,
        metavar="DIR",
        writes=check_folder,
        help="folder of the run, with its features, heads and results",
    )

    def __post_init__(self) -> None:
        """Also check the encoder, before anything heavy is imported."""
        super().__post_init__()
        is_elsewhere = bool(getattr(self, "scale", 0))
        options, needed = self.encoder_options(), self.weights_for
        check_encoder(self.model, options, elsewhere=is_elsewhere, weights_for=needed)
