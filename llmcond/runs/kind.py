"""Kinds of task: what differs between rated pairs, rankings and dialogues, found by name.

Every command works for every kind. Where kinds differ, a command asks the run's :class:`Kind`, and
nothing else in the package knows which kinds there are. Rated pairs are the core of the package;
other kinds live in folders of their own under ``llmcond/kinds/``. They are imported by the commands
``complete`` and ``reply`` only, which are for one kind each.

A package adds a kind by an entry point of the group ``llmcond.kinds`` that names a subclass; a
file of the user's own registers one by :func:`llmcond.register`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond import plugins
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import PromptInputs
from llmcond.runs.run import AnyRun
from llmcond.tasks import AnyTask

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results

#: Where each bundled kind is: a new one is a new folder and a line here.
KINDS = {
    "rated": "llmcond.kinds.rated:Rated",
    "ranking": "llmcond.kinds.ranking:Ranking",
    "dialogue": "llmcond.kinds.dialogue:DialogueKind",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CardText:
    """What a model card says of a kind of task.

    Attributes:
        subject: what its encoders embed.
        purpose: what they are for, in a sentence.
        loader: the function of the package that loads one.
        usage: Python that uses what the loader returned, which is called ``loaded``.
        rows: the noun for what is scored.
        groups: the noun for what intervals resample.
        tags: for the hub.
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
        name: what records and :attr:`AnyTask.kind` call it.
        run: the class of its runs.
        has_conditions: whether texts are encoded under conditions, so that a router can weight
            their tokens by one.
        heads_need_data: whether a fitted head is of no use without the run's data, so that it
            cannot be pushed to the hub without them.
        card: what its model cards say; a kind without heads and training needs none.
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
            UserError: the data lack what the template names.
        """

    @abstractmethod
    def examples(self, run: Any) -> Any:
        """Return the :class:`llmcond.runs.examples.Examples` of a run.

        Features are read when they are first needed.
        """

    @abstractmethod
    def evaluate(self, run: Any, asked: Any) -> Results[Any]:
        """Score a run's heads and zero-shot, and write the files that are asked for.

        ``asked`` is an :class:`llmcond.workflows.options.scoring.EvaluateOptions`.

        Raises:
            UserError: no such head, split or data, or options that contradict each other.
        """

    @abstractmethod
    def train(self, asked: Any, task: Any) -> Any:
        """Train an encoder and a head, and return a TrainingResult.

        ``asked`` is a :class:`llmcond.workflows.options.training.TrainLoraOptions`.

        Raises:
            UserError: wrong input, or options that are for other kinds of task.
            LlmcondError: the encoder cannot be loaded or trained.
        """

    def obstacle(self, prompt: Prompt) -> str:
        """Return why a prompt cannot be used for tasks of this kind; empty if it can."""
        return ""

    def log_data(self, data: Any) -> None:  # noqa: B027 - most kinds have nothing to log
        """Log what is odd about a data set that was just read."""


def find_kind(name: str) -> Kind:
    """Return a kind of task by its name: bundled, installed, or registered by the user's code.

    Raises:
        UserError: no such kind.
    """
    if plugins.is_plugin(name):
        found = plugins.recorded(name, "a kind of task")
    else:
        found = plugins.find(name, KINDS, "kinds", "kind of task")
    kind: Kind = found()
    return kind


def inputs_of(task: AnyTask[Any], data: Any, prompt: Prompt) -> PromptInputs:
    """Return every input of a task's data under a prompt; see :meth:`Kind.inputs`."""
    return find_kind(task.kind).inputs(task, data, prompt)
