"""Tasks of rated pairs: the similarity of two texts under a condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from llmcond.data.datasets import Columns, DataOptions, Dataset, RatingScale, read_rows
from llmcond.data.rows import Rows, load_rows
from llmcond.errors import LlmcondError
from llmcond.tasks.base import AnyTask


class Task(AnyTask[Dataset]):
    """A task of rated text pairs, where one or both texts are encoded under a condition.

    A user adds a task by a subclass with a ``name``, and changes what differs from C-STS.

    Attributes:
        columns: the columns of its files, unless ``--columns`` names others.
        scale: the range of its ratings, unless ``--rating-range`` names another.
        conditioned: whether the first and the second text are encoded under the condition. A text
            that is not is rendered by the template's ``[plain]`` part, and nothing is subtracted
            from its embedding.

    Examples:
        >>> import llmcond
        >>> class Answers(llmcond.Task):
        ...     name = "answers"  # rated pairs of a question and an answer
        ...     conditioned = (False, True)
        >>> Answers().main_metric.name
        'spearman'
    """

    kind: ClassVar[str] = "rated"
    columns: ClassVar[Columns] = Columns()
    scale: ClassVar[RatingScale] = RatingScale()
    conditioned: ClassVar[tuple[bool, bool]] = (True, True)
    metrics: ClassVar[Sequence[str]] = ("spearman", "pearson", "accuracy")

    def options(self, data: DataOptions) -> DataOptions:
        """Fill in the task's columns and rating scale where the user gave none.

        Args:
            data: the options that the user gave.

        Returns:
            The complete options.

        Raises:
            UserError: an option is for another kind of task.
        """
        self.reject_leaks_option(data)
        return data.with_defaults(DataOptions(None, asdict(self.columns), asdict(self.scale)))

    @override
    def reject_column_options(self, data: DataOptions) -> None:
        """Accept column names and a rating range, which rated pairs support."""

    @override
    def read(self, data: DataOptions) -> Dataset:
        dataset = self.options(data).read()
        splits = {name: self._with_conditioned(rows) for name, rows in dataset.splits.items()}
        return replace(dataset, splits=splits)

    def read_split(self, data: DataOptions, split: str | None) -> tuple[Rows, str]:
        """Read one split of the data, as ``llmcond.data.datasets.read_rows`` does.

        Args:
            data: the source of the rows, and options on how to read them.
            split: the split to read; None: test, or dev in a folder without test.

        Returns:
            The rows, and the name of their split.

        Raises:
            UserError: the data or the options are invalid.
        """
        options = self.options(data)
        columns, scale = Columns(**options.columns), RatingScale(**options.scale)
        rows, split = read_rows(
            options.source, split, columns, scale, options.extra, options.reading
        )
        return self._with_conditioned(rows), split

    @override
    def load(self, folder: Path, record: Mapping[str, Any]) -> Dataset:
        splits = load_rows(folder / "rows.parquet", self.conditioned)
        counts = {name: len(rows) for name, rows in splits.items()}
        if counts != record["rows"]:
            raise LlmcondError(
                f"{folder / 'rows.parquet'} holds {counts} rows, but run.json records "
                f"{record['rows']}. One of the files is damaged. Extract into a new --run."
            )
        return Dataset(
            splits,
            record["source"],
            Columns(**record["columns"]),
            RatingScale(**record["scale"]),
            record["split_seed"],
            tuple(record.get("notes", ())),
        )

    @override
    def count_examples(self, dataset: Dataset) -> str:
        return ", ".join(f"{len(rows):,} {n}" for n, rows in dataset.splits.items()) + " rows"

    def _with_conditioned(self, rows: Rows) -> Rows:
        return replace(rows, conditioned=self.conditioned)
