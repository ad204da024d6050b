"""What a task says; every verb asks it instead of knowing a data set.

A task of a user's own is a subclass in a Python file, named by ``--task my_task.py:Answers``.
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

#: Where each bundled task is: a new one is a new file and a line here.
TASKS = {
    "csts": "llmcond.tasks.csts:Csts",
    "kgc": "llmcond.kinds.ranking.kgc:Kgc",
    "dialogue": "llmcond.kinds.dialogue.task:Dialogue",
}
#: The split of a data set that holds examples which are not its own.
OTHERS = "other"
#: The task of runs that name none, such as those of before there were others.
DEFAULT_TASK = next(iter(TASKS))


class Data(Protocol):
    """A data set, as far as every task has it."""

    @property
    def source(self) -> str:
        """Return what the user named, or ``sample``."""

    @property
    def digest(self) -> str:
        """Identify texts, examples and splits, whatever file they came from."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was decided on the way, or is odd, in sentences for the user."""

    def to_json(self) -> dict[str, Any]:
        """Return the record that manifests keep: at least ``source`` and ``digest``."""

    def save(self, folder: Path) -> None:
        """Write what :meth:`AnyTask.load` reads again into a run's folder."""


D = TypeVar("D", bound=Data)


class AnyTask(ABC, Generic[D]):
    """What every task has.

    Attributes:
        name: what ``--task`` and records call it.
        kind: of its examples, which decides what a run of it does: ``rated``, ``ranking`` or
            ``dialogue``. Records name it, so that it is known without the task.
        metrics: what it is scored by: names of :data:`llmcond.metrics.METRICS`, or code of the
            user's own. The first one decides which epoch and which head are best on dev.
        prompt: the template that is taken where none is named; None: the one that suits the
            encoder.
        heads: recipes that are compared where none are named.
        recipes: the bundled task whose recipes it has by name; None: those of rated pairs.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    metrics: ClassVar[Sequence[str]]
    prompt: ClassVar[str | None] = None
    heads: ClassVar[Sequence[str]] = ("linear", "mlp")
    recipes: ClassVar[str | None] = None

    @property
    def main_metric(self) -> Metric:
        """The first of ``metrics``; a UserError where it names no metric."""
        return choose_metrics(self.metrics[:1])[0]

    @abstractmethod
    def read(self, data: DataOptions) -> D:
        """Return a data set, all splits of it; a UserError for what is wrong in it."""

    @abstractmethod
    def load(self, folder: Path, record: Mapping[str, Any]) -> D:
        """Return the data set that a run's folder holds, of which run.json has this record.

        Raises:
            LlmcondError: what is there is not what was recorded.
        """

    def refuse_leaks_option(self, data: DataOptions) -> None:
        """Raise a UserError for ``--drop-leaks``, which only dialogues take."""
        if data.drop_leaks:
            raise UserError(
                f"--drop-leaks is of dialogues, and {self.name} is another task. Leave it out."
            )

    def refuse_column_options(self, data: DataOptions) -> None:
        """Raise a UserError for names of columns and a range of ratings; rated pairs take them."""
        if data.columns or data.scale:
            raise UserError(
                "--columns, --rating-range and --unrated are of rated rows, and the task "
                f"{self.name} has none. Leave them out."
            )

    def refuse_rated_options(self, data: DataOptions, has: str) -> None:
        """Raise a UserError for options of rated rows; ``has`` is what a template may name."""
        self.refuse_column_options(data)
        if data.extra:
            raise UserError(
                f"the template names the column {data.extra[0]!r}, and the task {self.name} has "
                f"{has} only. Name another --prompt."
            )

    @abstractmethod
    def counted(self, dataset: D) -> str:
        """Return how many examples each split has, for messages: ``90 train, 10 dev rows``."""


def find_task(name: str | None = None, source: str | None = None) -> AnyTask[Any]:
    """Return a task by its name.

    Args:
        name: a bundled task, or code of the user's own; None: the default one.
        source: the record that names it; None: the user did.

    Raises:
        UserError: no such task; code that a record names and the user did not.
    """
    name = name or DEFAULT_TASK
    if plugins.is_plugin(name):
        found = plugins.load(name) if source is None else plugins.recorded(name, source)
        made = found() if isinstance(found, type) else found
        if not isinstance(made, AnyTask):
            raise UserError(f"{name} is no task: it must be a subclass of llmcond.tasks.Task.")
        # What records call it, so that another command finds it by --plugin.
        made.name = plugins.record_name(name)  # type: ignore[misc]
        return made
    task: AnyTask[Any] = plugins.find(name, TASKS, "tasks", "task")()
    return task
