"""Tasks of rated pairs: how similar two texts are under a condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

from llmcond.data.datasets import Columns, DataOptions, Dataset, RatingScale, read_rows
from llmcond.data.rows import Rows, load_rows
from llmcond.errors import LlmcondError
from llmcond.tasks.base import AnyTask


class Task(AnyTask[Dataset]):
    """Rated pairs of texts, of which one or both are encoded under a condition.

    Attributes:
        columns: the columns of its files, unless ``--columns`` names others.
        scale: the range of its ratings, unless ``--rating-range`` names another.
        conditioned: whether the first and the second text are encoded under the condition. A text
            without one is rendered by the template's ``[plain]`` part, and has nothing subtracted.
    """

    kind: ClassVar[str] = "rated"
    columns: ClassVar[Columns] = Columns()
    scale: ClassVar[RatingScale] = RatingScale()
    conditioned: ClassVar[tuple[bool, bool]] = (True, True)
    metrics: ClassVar[Sequence[str]] = ("spearman", "pearson", "accuracy")

    def options(self, data: DataOptions) -> DataOptions:
        """Return how rows are read: as asked for, and else as the task has it."""
        self.refuse_leaks_option(data)
        return data.like(DataOptions(None, asdict(self.columns), asdict(self.scale)))

    def refuse_column_options(self, data: DataOptions) -> None:
        """Accept names of columns and a range of ratings; see :class:`AnyTask`."""

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

    def load(self, folder: Path, record: Mapping[str, Any]) -> Dataset:
        """Return the rows of a run; errors as of :class:`AnyTask` and :func:`load_rows`."""
        splits = load_rows(folder / "rows.parquet", self.conditioned)
        counts = {name: len(rows) for name, rows in splits.items()}
        if counts != record["rows"]:
            raise LlmcondError(
                f"{folder / 'rows.parquet'} holds {counts} rows, and run.json counts "
                f"{record['rows']}; one of them was damaged. Extract into a new --run."
            )
        return Dataset(
            splits,
            record["source"],
            Columns(**record["columns"]),
            RatingScale(**record["scale"]),
            record["split_seed"],
            tuple(record.get("notes", ())),
        )

    def counted(self, dataset: Dataset) -> str:
        """Return how many rows each split has."""
        return ", ".join(f"{len(rows):,} {n}" for n, rows in dataset.splits.items()) + " rows"

    def _sided(self, rows: Rows) -> Rows:
        return replace(rows, conditioned=self.conditioned)
