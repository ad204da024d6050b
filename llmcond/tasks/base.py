"""What a task says; every verb asks it instead of knowing a data set.

A task of a user's own is a subclass in a Python file, named by ``--task my_task.py:Answers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from typing import ClassVar

from llmcond import plugins
from llmcond.data.datasets import Columns, DataOptions, Dataset, RatingScale, read_rows
from llmcond.data.rows import Rows
from llmcond.errors import UserError, nearest

#: Where each bundled task is: a new one is a new file and a line here.
TASKS = {"csts": "llmcond.tasks.csts:Csts"}
#: The task of runs that name none, such as those of before there were others.
DEFAULT_TASK = next(iter(TASKS))


class Task:
    """Rated pairs of texts, of which one or both are encoded under a condition.

    Attributes:
        name: what ``--task`` and records call it.
        columns: the columns of its files, unless ``--columns`` names others.
        scale: the range of its ratings, unless ``--rating-range`` names another.
        conditioned: whether the first and the second text are encoded under the condition. A text
            without one is rendered by the template's ``[plain]`` part, and has nothing subtracted.
        metrics: what it is scored by: names of :data:`llmcond.metrics.METRICS`, or code of the
            user's own. The first one is the main one.
    """

    name: ClassVar[str]
    columns: ClassVar[Columns] = Columns()
    scale: ClassVar[RatingScale] = RatingScale()
    conditioned: ClassVar[tuple[bool, bool]] = (True, True)
    metrics: ClassVar[Sequence[str]] = ("spearman", "pearson", "accuracy")

    def options(self, data: DataOptions) -> DataOptions:
        """Return how rows are read: as asked for, and else as the task has it."""
        return data.like(DataOptions(None, asdict(self.columns), asdict(self.scale)))

    def read(self, data: DataOptions) -> Dataset:
        """Return all splits of a data set; see :func:`llmcond.data.datasets.read_dataset`."""
        dataset = self.options(data).read()
        splits = {name: self._sided(rows) for name, rows in dataset.splits.items()}
        return replace(dataset, splits=splits)

    def read_split(self, data: DataOptions, split: str | None) -> tuple[Rows, str]:
        """Return the rows and the split that :func:`llmcond.data.datasets.read_rows` gives."""
        asked = self.options(data)
        columns, scale = Columns(**asked.columns), RatingScale(**asked.scale)
        rows, split = read_rows(asked.source, split, columns, scale, asked.extra)
        return self._sided(rows), split

    def _sided(self, rows: Rows) -> Rows:
        return replace(rows, conditioned=self.conditioned)


def find_task(name: str | None = None, source: str | None = None) -> Task:
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
        if not isinstance(made, Task):
            raise UserError(f"{name} is no task: it must be a subclass of llmcond.tasks.Task.")
        # What records call it, so that another command finds it by --plugin.
        made.name = plugins.record_name(name)  # type: ignore[misc]
        return made
    if name not in TASKS:
        raise UserError(f"there is no task {name!r}. {nearest(name, TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    task: Task = getattr(import_module(module), attribute)()
    return task
