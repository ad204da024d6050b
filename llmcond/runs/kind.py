"""Kinds of task: the differences between rated pairs, rankings and dialogues.

Every command works for every kind. Where kinds differ, a command calls the run's ``Kind``; no other
part of the package depends on the list of kinds. Rated pairs are the core of the package, and each
other kind has a folder under ``llmcond/kinds/``. Only the commands ``complete`` and ``reply``,
which are for one kind each, import such a folder directly.

A package adds a kind with an entry point of the group ``llmcond.kinds`` that names a subclass. A
user's file registers one with ``llmcond.register``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond import plugins
from llmcond.errors import UserError
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import PromptInputs
from llmcond.runs.run import AnyRun
from llmcond.tasks import AnyTask

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results

#: The class of each bundled kind. To add a kind, add a folder and a line to this table.
KINDS = {
    "rated": "llmcond.kinds.rated:Rated",
    "ranking": "llmcond.kinds.ranking:Ranking",
    "dialogue": "llmcond.kinds.dialogue:DialogueKind",
}


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


class Kind(ABC):
    """A kind of task. Its module is imported when a run of that kind is opened.

    Attributes:
        name: The name in records and in ``AnyTask.kind``.
        run: The class of its runs.
        has_conditions: Whether texts are encoded under conditions, so that a router can weight
            their tokens by a condition.
        heads_need_data: Whether a fitted head needs the run's data, so that it cannot be pushed to
            the hub without the data.
        card: The texts of its model cards. A kind without heads and training needs none.
    """

    name: ClassVar[str]
    run: ClassVar[type[AnyRun]]
    has_conditions: ClassVar[bool] = True
    heads_need_data: ClassVar[bool] = False
    card: ClassVar[CardText]

    @abstractmethod
    def inputs(self, task: Any, data: Any, prompt: Prompt) -> PromptInputs:
        """Return every input of a task's data under a prompt.

        Raises:
            UserError: The data lack a field that the template names.
        """

    @abstractmethod
    def examples(self, run: Any) -> Any:
        """Return the ``llmcond.runs.examples.Examples`` of a run.

        Features are read when they are first needed.
        """

    @abstractmethod
    def evaluate(self, run: Any, options: Any) -> Results:
        """Score a run's heads and zero-shot, and write the requested files.

        ``options`` is an ``llmcond.workflows.options.scoring.EvaluateOptions``.

        Raises:
            UserError: The head, split or data does not exist, or options contradict each other.
        """

    def analyse(self, run: Any, options: Any) -> Any:
        """Explain a run's heads, and return an AnalysisResult.

        ``options`` is an ``llmcond.workflows.options.scoring.AnalyseOptions``. The result is None
        if the kind has no analyses, as by default.

        Raises:
            UserError: The head or split does not exist, or the kind has no such analysis.
        """
        return None

    def train(self, options: Any, task: Any) -> Any:
        """Train an encoder and a head, and return a TrainingResult.

        ``options`` is a ``llmcond.workflows.options.training.TrainLoraOptions``.

        Raises:
            UserError: The input is invalid, or an option is for another kind of task.
            LlmcondError: The encoder cannot be loaded or trained.
        """
        return self.plan_training(options, task).run()

    def plan_training(self, options: Any, task: Any, read: Any = None) -> Any:
        """Check everything that a training needs, and return it as a ``TrainingJob``.

        ``read`` reads the data instead of ``llmcond.workflows.extract.read_data``, so that several
        trainings can share them.

        Raises:
            UserError: The input is invalid, or an option is for another kind of task.
            LlmcondError: The encoder cannot be loaded.
        """
        raise UserError(
            f"train-lora and sweep-lora do not support tasks of the kind {self.name}. Use another "
            "--task."
        )

    def prompt_error(self, prompt: Prompt) -> str:
        """Return why a prompt cannot be used for tasks of this kind; empty if it can be used."""
        return ""

    def log_data(self, data: Any) -> None:  # noqa: B027 - most kinds have nothing to log
        """Log what is unusual about a dataset after reading it."""


def find_kind(name: str) -> Kind:
    """Return a kind of task by its name: bundled, installed, or registered by the user's code.

    Raises:
        UserError: The kind does not exist.
    """
    if plugins.is_plugin(name):
        kind_class = plugins.get_registered(name, "a kind of task")
    else:
        kind_class = plugins.find_plugin(name, KINDS, "kinds", "kind of task")
    kind: Kind = kind_class()
    return kind


def build_inputs(task: AnyTask[Any], data: Any, prompt: Prompt) -> PromptInputs:
    """Return every input of a task's data under a prompt; see ``Kind.inputs``."""
    return find_kind(task.kind).inputs(task, data, prompt)
