"""Tasks: how data is read, what is encoded, and how heads are fitted and scored on it.

Every command works for every task. A task is of a kind: rated pairs, rankings, dialogues, or one of
an installed package or of the user's code. What differs between kinds are methods of ``AnyTask``,
which ``llmcond/kinds/`` implements; a kind gets data and returns values, and only the commands open
runs and write files.

A user adds a task of rated pairs as a subclass of ``llmcond.Task`` in a Python file, and names it
by ``--task my_task.py:Answers``. A new kind of task is a subclass of ``AnyTask``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from llmcond.base import package as plugins
from llmcond.base.errors import UserError, first_line
from llmcond.base.files import replace_atomically
from llmcond.base.metrics import Metric, choose_metrics
from llmcond.base.package import lazy_getattr
from llmcond.data.datasets import DataOptions

#: The class of each bundled task. A new task takes a new file and a line in this dictionary.
TASKS = {
    "csts": "llmcond.kinds.rated:Csts",
    "kgc": "llmcond.kinds.ranking.task:Kgc",
    "dialogue": "llmcond.kinds.dialogue.task:DialogueTask",
}
#: The task that stands for each bundled kind of task.
KINDS = {"rated": TASKS["csts"], "ranking": TASKS["kgc"], "dialogue": TASKS["dialogue"]}
#: The split that holds examples from outside a dataset, such as those of ``evaluate --data``.
OTHER_SPLIT = "other"
#: The task of commands that name none.
DEFAULT_TASK = next(iter(TASKS))

# The task of rated pairs belongs to a kind, and kinds are found by their names.
__getattr__ = lazy_getattr(__name__, {"Task": "llmcond.kinds.rated"})


class Data(Protocol):
    """The part of a dataset's interface that all tasks share."""

    @property
    def source(self) -> str:
        """What the user named as the data, or ``sample`` for the bundled sample."""

    @property
    def digest(self) -> str:
        """A digest of the texts, examples and splits, whatever file they were read from."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user on decisions made while reading, and on oddities of the data."""

    def to_json(self) -> dict[str, Any]:
        """Return the record for a run's manifest: at least ``source`` and ``digest``."""

    def save(self, folder: Path) -> None:
        """Write the dataset into a run's folder, where ``AnyTask.load`` reads it again."""


class SplitData(ABC):
    """A dataset in splits, stored as Parquet tables with a digest that ``load`` checks.

    Attributes:
        tables: the names of its tables in a run's folder.
        options: the attributes with the options that it was read with.
        unit: the noun for its examples.
        source: what the user named as the data, or ``sample``.
        splits: the examples of each split.
        notes: remarks on the data and on how it was read, for the user, each a sentence.
        digest: a digest of texts, examples and splits, independent of the format of the files.
    """

    tables: ClassVar[Sequence[str]]
    options: ClassVar[Sequence[str]] = ()
    unit: ClassVar[str]

    source: str
    splits: Any
    notes: tuple[str, ...]
    digest: Any

    @abstractmethod
    def to_tables(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the columns of each table."""

    @classmethod
    @abstractmethod
    def from_tables(cls, tables: Mapping[str, Any], about: Mapping[str, Any]) -> Self:
        """Return the dataset of Arrow tables; ``about`` has ``source``, ``notes`` and options."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a run's manifest: source, digest, notes, options and counts."""
        return {
            **{name: getattr(self, name) for name in ("source", "digest", *self.options)},
            "notes": list(self.notes),
            "rows": {name: len(examples) for name, examples in self.splits.items()},
        }

    def save(self, folder: Path) -> None:
        """Write the tables, each atomically."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        metadata = {"llmcond": json.dumps(SplitData.to_json(self))}
        for name, columns in self.to_tables().items():
            table = pa.table(columns).replace_schema_metadata(metadata)
            with replace_atomically(folder / f"{name}.parquet") as path:
                # The path is absolute because Arrow reads a colon in a relative path as the end of
                # a URI scheme.
                pq.write_table(table, path.absolute())

    def part(self, split: str) -> Any:
        """Return the examples of a split.

        Raises:
            UserError: The dataset has no such split.
        """
        if split not in self.splits:
            split_names = ", ".join(self.splits)
            raise UserError(f"{self.source} has no {split} {self.unit}; it has {split_names}.")
        return self.splits[split]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a dataset that ``save`` wrote.

        Raises:
            UserError: A file is missing or damaged, or the files are of different datasets.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            tables = {
                name: pq.read_table((folder / f"{name}.parquet").absolute()) for name in cls.tables
            }
            about = json.loads(tables[cls.tables[-1]].schema.metadata[b"llmcond"])
            data = cls.from_tables(tables, about)
            intact = data.digest == about["digest"]
        except (OSError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
            raise UserError(
                f"the data in {folder} cannot be read: {first_line(error)}. Extract into a new "
                "--run."
            ) from error
        if not intact:
            raise UserError(
                f"the data in {folder} have changed since they were written: their digest "
                "differs. Extract into a new --run."
            )
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class CardText:
    """The texts of a kind of task in model cards.

    Attributes:
        subject: What its encoders embed.
        purpose: What they are for, in a sentence.
        loader: The function of the package that loads a model of this kind.
        usage: Python code that uses the loader's result, which is called ``loaded``.
        rows: The noun for the examples that are scored.
        groups: The noun for the groups of examples that confidence intervals resample.
        tags: Tags on the hub.
    """

    subject: str
    purpose: str
    loader: str
    usage: str
    rows: str
    groups: str
    tags: Sequence[str]


D = TypeVar("D", bound=Data)


class AnyTask(ABC, Generic[D]):
    """Base class of all tasks, and of all kinds of tasks.

    Attributes:
        name: the task's name in ``--task`` and in records.
        kind: the name of the task's kind. Records name it, so that a run can be opened without the
            user's code of its task.
        metrics: the metrics that score it: names from ``llmcond.base.metrics.METRICS``, or the
            user's code as ``FILE.py:NAME``. The first one decides which epoch and which head are
            best on dev.
        prompt: the default prompt; None: the prompt that suits the encoder.
        heads: the recipes that ``compare-prompts`` fits by default.
        recipes: the bundled task whose recipes can be named; None: the recipes of rated pairs.
        command: the command for runs of this kind only; empty: there is none.
        analyses: the names of the analyses of ``analyse``; empty: there are none.
        subtracts: whether e(c) or e(s) is subtracted from e(s|c) by default.
        has_conditions: whether texts are encoded under conditions, so that a router can weight
            their tokens by a condition.
        has_columns: whether examples are rows of named columns with ratings.
        can_drop_leaks: whether ``--drop-leaks`` applies.
        fields_text: the fields that a template may name, if there are no columns.
        heads_need_data: whether a fitted head needs the run's data, so that it cannot be pushed to
            the hub without the data.
        unit: the noun for the examples of a split.
        dev_is_sample: whether dev scores in training are those of a sample.
        card: the texts of its model cards. A kind without heads and training needs none.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    metrics: ClassVar[Sequence[str]]
    prompt: ClassVar[str | None] = None
    heads: ClassVar[Sequence[str]] = ("linear", "mlp")
    recipes: ClassVar[str | None] = None
    command: ClassVar[str] = ""
    analyses: ClassVar[Sequence[Any]] = ()
    subtracts: ClassVar[bool] = False
    has_conditions: ClassVar[bool] = True
    has_columns: ClassVar[bool] = False
    can_drop_leaks: ClassVar[bool] = False
    fields_text: ClassVar[str] = "texts"
    heads_need_data: ClassVar[bool] = False
    unit: ClassVar[str] = "examples"
    dev_is_sample: ClassVar[bool] = False
    card: ClassVar[CardText]

    @property
    def main_metric(self) -> Metric:
        """The first of ``metrics``, which decides what is best on dev.

        Raises:
            UserError: the name is not that of a metric.
        """
        return choose_metrics(self.metrics[:1])[0]

    # -- data ----------------------------------------------------------------------------------

    @abstractmethod
    def read(self, data: DataOptions) -> D:
        """Read a dataset with all its splits.

        Args:
            data: the source of the data, and options on how to read it.

        Returns:
            The dataset.

        Raises:
            UserError: the data or the options are invalid.
        """

    @abstractmethod
    def load(self, folder: Path, record: Mapping[str, Any]) -> D:
        """Read the dataset that is stored in a run's folder.

        Args:
            folder: the run's folder.
            record: the dataset's record in run.json, as its ``to_json`` gave it.

        Returns:
            The dataset.

        Raises:
            LlmcondError: the stored dataset does not match the record.
        """

    @abstractmethod
    def count_examples(self, dataset: D) -> str:
        """Return the number of examples in each split, for messages.

        Args:
            dataset: a dataset of this task.

        Returns:
            A text such as ``90 train, 10 dev rows``.
        """

    def log_data(self, dataset: D) -> None:
        """Log what is unusual about a dataset after reading it.

        Args:
            dataset: a dataset of this task.
        """

    def check_options(self, data: DataOptions) -> None:
        """Raise an error for options on reading data that this kind of task does not have.

        Args:
            data: the options on how to read the data.

        Raises:
            UserError: such an option was given, or the template names a column.
        """
        if data.drop_leaks and not self.can_drop_leaks:
            raise UserError(
                f"--drop-leaks is for dialogues, but the task is {self.name}. Leave it out."
            )
        if self.has_columns:
            return
        if data.columns or data.scale:
            raise UserError(
                "--columns, --rating-range and --unrated are for rated rows, and the task "
                f"{self.name} has none. Leave them out."
            )
        if data.extra:
            raise UserError(
                f"the template names the column {data.extra[0]!r}, but the task {self.name} has "
                f"only {self.fields_text}. Name another --prompt."
            )

    # -- inputs --------------------------------------------------------------------------------

    @abstractmethod
    def inputs(self, dataset: D, prompt: Any) -> Any:
        """Return every input of a dataset under a prompt.

        Args:
            dataset: a dataset of this task.
            prompt: the ``llmcond.prompts.Prompt``.

        Returns:
            The inputs, repeats included: a sized iterable of ``EncoderInput``, such as a list. It
            may have methods ``locate(item)``, which describes the example that needs an input for
            messages, and ``check_distinct()``, which raises an error if examples with different
            conditions have the same input.

        Raises:
            UserError: the data lack a field that the template names.
        """

    def prompt_error(self, prompt: Any) -> str:
        """Return why a prompt cannot be used for tasks of this kind; empty if it can be used.

        Args:
            prompt: the ``llmcond.prompts.Prompt``.

        Returns:
            The reason, as a clause.
        """
        return ""

    def zero_shot_settings(self, prompt: Any) -> list[dict[str, Any]]:
        """Return the settings of the zero-shot views of a prompt, with subtraction last.

        Args:
            prompt: the ``llmcond.prompts.Prompt``.

        Returns:
            The arguments of each ``llmcond.features.view.FeatureView``, besides its prompts.
        """
        # Separate features without subtraction ignore the condition. A control without the
        # condition has nothing to subtract.
        options = (True,) if prompt.separate or not prompt.subtractable else (False, True)
        return [{"subtract": subtract} for subtract in options]

    # -- heads, scores and training -----------------------------------------------------------

    def load_head(self, folder: Path) -> tuple[Any, dict[str, Any]]:
        """Load a fitted head.

        Args:
            folder: the head's folder.

        Returns:
            The head, and the content of its head.json.

        Raises:
            UserError: the folder holds no head of this kind of task.
        """
        raise UserError(f"heads are not fitted for the task {self.name}. Leave out --head.")

    def load_applied_head(self, folder: Path) -> tuple[Any, dict[str, Any]]:
        """Load a fitted head to apply it to new texts; some heads need no torch for this.

        Args:
            folder: the head's folder.

        Returns:
            As ``load_head``.
        """
        return self.load_head(folder)

    def examples(self, run: Any) -> Any:
        """Return the examples of a run, which heads are fitted on.

        Args:
            run: a run of this kind of task.

        Returns:
            An ``llmcond.runs.examples.Examples``, which reads features when they are needed.

        Raises:
            UserError: heads are not fitted for this kind of task.
        """
        raise UserError(
            f"heads are not fitted for the task {self.name}; evaluate scores zero-shot."
        )

    @abstractmethod
    def evaluate(self, run: Any, options: Any) -> Any:
        """Score a run's heads, and zero-shot.

        Args:
            run: a run of this kind of task.
            options: an ``llmcond.options.scoring.EvaluateOptions``.

        Returns:
            An ``llmcond.runs.examples.Evaluation``.

        Raises:
            UserError: the head, split or data does not exist, or options contradict each other.
        """

    def analyse(self, run: Any, options: Any, analyses: Sequence[str]) -> dict[str, Any]:
        """Explain a run's heads.

        Args:
            run: a run of this kind of task.
            options: an ``llmcond.options.scoring.AnalyseOptions``.
            analyses: the names of the analyses, some of ``self.analyses``.

        Returns:
            ``split``, ``n``, and for each analysis its rows.

        Raises:
            UserError: the head or split does not exist.
        """
        raise NotImplementedError

    def check_training(self, recipe: Any, dataset: D) -> None:
        """Check that a head can be trained together with an encoder on a dataset.

        Args:
            recipe: the ``llmcond.heads.Recipe`` of the head.
            dataset: a dataset of this task.

        Raises:
            UserError: it cannot, or encoders cannot be trained for this kind of task.
        """
        raise UserError(
            f"train-lora and sweep-lora do not support tasks of the kind {self.kind}. Use another "
            "--task."
        )

    def training_parts(self, job: Any, trainable: Any) -> tuple[Any, Any, Any]:
        """Return what the loop of a training needs.

        Args:
            job: an ``llmcond.workflows.train_job.TrainingJob``, with the dataset, the recipe, the
                view of the head, the seed, and the head that training starts from.
            trainable: the ``llmcond.finetune.encoder.TrainableEncoder``.

        Returns:
            The ``llmcond.finetune.model.TrainedModel``, the examples of train in the form that it
            takes, and those of dev; None instead of the latter keeps the last weights.

        Raises:
            UserError: the dataset has no examples to train on.
        """
        raise NotImplementedError


def find_task(name: str | None = None, source: str | None = None) -> AnyTask[Any]:
    """Return a task by its name.

    Args:
        name: a bundled task, or the user's code as ``FILE.py:CLASS``; None: the default task.
        source: the record that names the task; None: the user named it.

    Raises:
        UserError: there is no such task, or a record names code that the user did not name.
    """
    name = name or DEFAULT_TASK
    if plugins.is_plugin(name):
        plugin = plugins.load(name) if source is None else plugins.get_registered(name, source)
        instance = plugin() if isinstance(plugin, type) else plugin
        if not isinstance(instance, AnyTask):
            raise UserError(f"{name} is not a task. It must be a subclass of llmcond.tasks.Task.")
        # Records use this name, so that another command finds the class by --plugin.
        instance.name = plugins.record_name(name)  # type: ignore[misc]
        return instance
    task: AnyTask[Any] = plugins.find_plugin(name, TASKS, "tasks", "task")()
    return task


def find_kind(name: str) -> AnyTask[Any]:
    """Return a task that stands for a kind: bundled, installed, or registered by the user's code.

    Args:
        name: the name of the kind.

    Raises:
        UserError: the kind does not exist.
    """
    if plugins.is_plugin(name):
        kind: AnyTask[Any] = plugins.get_registered(name, "a kind of task")()
    else:
        kind = plugins.find_plugin(name, KINDS, "kinds", "kind of task")()
    return kind
