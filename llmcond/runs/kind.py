"""Kinds of task: what differs between rated pairs, rankings and dialogues, found by name.

Every command works for every kind. Where kinds differ, a command asks the run's :class:`Kind`, and
nothing else in the package knows which kinds there are. Rated pairs are the core of the package;
other kinds live in folders of their own under ``llmcond/kinds/``, which no other module imports.

A package adds a kind by an entry point of the group ``llmcond.kinds`` that names a subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.errors import UserError, nearest
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


class Kind(ABC):
    """A kind of task. Its module is imported when a run of that kind is opened.

    Attributes:
        name: what records and :attr:`AnyTask.kind` call it.
        run: the class of its runs.
        has_conditions: whether texts are encoded under conditions, so that a router can weight
            their tokens by one.
        heads_need_data: whether a fitted head is of no use without the run's data, so that it
            cannot be pushed to the hub without them.
    """

    name: ClassVar[str]
    run: ClassVar[type[AnyRun]]
    has_conditions: ClassVar[bool] = True
    heads_need_data: ClassVar[bool] = False

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


def kinds() -> dict[str, str]:
    """Return where each kind of task is, by its name: the bundled ones, and installed ones."""
    installed = {point.name: point.value for point in entry_points(group="llmcond.kinds")}
    return {**KINDS, **{name: value for name, value in installed.items() if name not in KINDS}}


def find_kind(name: str) -> Kind:
    """Return a kind of task by its name.

    Raises:
        UserError: no such kind.
    """
    # Installed packages are searched only for what is not bundled, as that takes a while.
    known = KINDS if name in KINDS else kinds()
    if name not in known:
        raise UserError(
            f"there is no kind of task {name!r}. {nearest(name, known)} A kind of your own is an "
            "entry point of the group llmcond.kinds."
        )
    return _loaded(known[name])


@lru_cache
def _loaded(where: str) -> Kind:
    module, _, attribute = where.partition(":")
    kind: Kind = getattr(import_module(module), attribute)()
    return kind


def inputs_of(task: AnyTask[Any], data: Any, prompt: Prompt) -> PromptInputs:
    """Return every input of a task's data under a prompt; see :meth:`Kind.inputs`."""
    return find_kind(task.kind).inputs(task, data, prompt)
