"""The base class of tasks, through which every command works with a dataset.

A user adds a task as a subclass in a Python file, and names it by ``--task my_task.py:Answers``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from llmcond import plugins
from llmcond.data.datasets import DataOptions
from llmcond.errors import UserError
from llmcond.metrics import Metric, choose_metrics

#: The class of each bundled task. A new task takes a new file and a line in this dictionary.
TASKS = {
    "csts": "llmcond.tasks.csts:Csts",
    "kgc": "llmcond.kinds.ranking.kgc:Kgc",
    "dialogue": "llmcond.kinds.dialogue.task:DialogueTask",
}
#: The split that holds examples from outside a dataset, such as those of ``evaluate --data``.
OTHER_SPLIT = "other"
#: The task of runs that name none, such as those written before other tasks existed.
DEFAULT_TASK = next(iter(TASKS))


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


D = TypeVar("D", bound=Data)


class AnyTask(ABC, Generic[D]):
    """Base class of all tasks.

    Attributes:
        name: the task's name in ``--task`` and in records.
        kind: the kind of its examples, which decides how commands work on a run: ``rated``,
            ``ranking`` or ``dialogue``. Records name the kind, so that it is known without the
            task.
        metrics: the metrics that score it: names from ``llmcond.metrics.METRICS``, or the user's
            code as ``FILE.py:NAME``. The first one decides which epoch and which head are best on
            dev.
        prompt: the default prompt; None: the prompt that suits the encoder.
        heads: the recipes that ``compare-prompts`` fits by default.
        recipes: the bundled task whose recipes can be named; None: the recipes of rated pairs.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    metrics: ClassVar[Sequence[str]]
    prompt: ClassVar[str | None] = None
    heads: ClassVar[Sequence[str]] = ("linear", "mlp")
    recipes: ClassVar[str | None] = None

    @property
    def main_metric(self) -> Metric:
        """The first of ``metrics``, which decides what is best on dev.

        Raises:
            UserError: the name is not that of a metric.
        """
        return choose_metrics(self.metrics[:1])[0]

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

    def reject_leaks_option(self, data: DataOptions) -> None:
        """Raise an error for ``--drop-leaks``, which only dialogues support.

        Args:
            data: the options on how to read the data.

        Raises:
            UserError: ``--drop-leaks`` was given.
        """
        if data.drop_leaks:
            raise UserError(
                f"--drop-leaks is for dialogues, but the task is {self.name}. Leave it out."
            )

    def reject_column_options(self, data: DataOptions) -> None:
        """Raise an error for column names and a rating range, which only rated pairs support.

        Args:
            data: the options on how to read the data.

        Raises:
            UserError: columns or a rating range were given.
        """
        if data.columns or data.scale:
            raise UserError(
                "--columns, --rating-range and --unrated are for rated rows, and the task "
                f"{self.name} has none. Leave them out."
            )

    def reject_rated_options(self, data: DataOptions, fields_text: str) -> None:
        """Raise an error for options that only rated rows support.

        Args:
            data: the options on how to read the data.
            fields_text: the fields that a template of this task may name, for the message.

        Raises:
            UserError: columns or a rating range were given, or the template names a column.
        """
        self.reject_column_options(data)
        if data.extra:
            raise UserError(
                f"the template names the column {data.extra[0]!r}, but the task {self.name} has "
                f"only {fields_text}. Name another --prompt."
            )

    @abstractmethod
    def count_examples(self, dataset: D) -> str:
        """Return the number of examples in each split, for messages.

        Args:
            dataset: a dataset of this task.

        Returns:
            A text such as ``90 train, 10 dev rows``.
        """


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
