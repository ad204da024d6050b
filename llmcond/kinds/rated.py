"""Rated pairs as a kind of task: the similarity of two texts under a condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from llmcond.base.errors import LlmcondError
from llmcond.data.datasets import Columns, DataOptions, Dataset, RatingScale, read_rows
from llmcond.data.rows import Rows, load_rows
from llmcond.heads.storage import EmbeddingHead, load_embedding_head
from llmcond.prompts import Prompt
from llmcond.prompts.template import SplitInputs
from llmcond.tasks import AnyTask, CardText

if TYPE_CHECKING:
    from llmcond.heads import FittedHead
    from llmcond.options.scoring import EvaluateOptions
    from llmcond.runs import Run
    from llmcond.runs.examples import Evaluation
    from llmcond.runs.rated import RatedExamples


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
    analyses = ("isotropy", "clusters", "conditions", "norms", "examples", "answers")
    subtracts = True
    has_columns = True
    unit = "rated rows"
    card = CardText(
        subject="condition-aware text",
        purpose="The same two sentences get one similarity for each condition.",
        loader="load_embedder",
        usage='loaded.similarity(["A man rides a horse."], ["A girl cycles."], "the activity")',
        rows="rows",
        groups="sentence pairs",
        tags=("conditional-semantic-textual-similarity", "sentence-similarity"),
    )

    def options(self, data: DataOptions) -> DataOptions:
        """Fill in the task's columns and rating scale where the user gave none.

        Args:
            data: the options that the user gave.

        Returns:
            The complete options.

        Raises:
            UserError: an option is for another kind of task.
        """
        self.check_options(data)
        return data.with_defaults(DataOptions(None, asdict(self.columns), asdict(self.scale)))

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

    @override
    def log_data(self, dataset: Dataset) -> None:
        from llmcond.runs.rated import log_rows

        # Logs unrated rows, and the rows that dev and test share with train.
        log_rows(dataset)

    @override
    def inputs(self, dataset: Dataset, prompt: Prompt) -> SplitInputs:
        return SplitInputs(dataset.splits.values(), prompt)

    @override
    def load_head(self, folder: Path) -> tuple[FittedHead, dict[str, Any]]:
        from llmcond.heads import load_head

        return load_head(folder)

    @override
    def load_applied_head(self, folder: Path) -> tuple[EmbeddingHead, dict[str, Any]]:
        # Linear maps need no torch.
        return load_embedding_head(folder)

    @override
    def examples(self, run: Run) -> RatedExamples:
        from llmcond.runs.rated import RatedExamples

        return RatedExamples(run)

    @override
    def evaluate(self, run: Run, options: EvaluateOptions) -> Evaluation:
        from llmcond.runs.rated import evaluate_pairs

        return evaluate_pairs(run, options)

    def _with_conditioned(self, rows: Rows) -> Rows:
        return replace(rows, conditioned=self.conditioned)


class Csts(Task):
    """Conditional semantic textual similarity (C-STS, arXiv 2305.15093), the default task.

    Two sentences, both under one condition, are rated 1 to 5 for their similarity.
    """

    name = "csts"
