"""Dialogues as a kind of task: which turn comes next (Triple-Encoders, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcond.prompts import Prompt
from llmcond.prompts.utterances import UtteranceInputs, obstacle_to
from llmcond.runs.kind import EvaluateRequest, Kind
from llmcond.runs.task_runs import DialogueRun
from llmcond.tasks.dialogue import Dialogue

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results
    from llmcond.runs.dialogues import DialogueExamples
    from llmcond.tasks.dialogues import Dialogues
    from llmcond.workflows.account import TrainingResult
    from llmcond.workflows.trainable import TrainRequest


class DialogueKind(Kind):
    """See :class:`Kind`; utterances have no conditions."""

    name, run = "dialogue", DialogueRun
    has_conditions = False

    def inputs(self, task: Dialogue, data: Dialogues, prompt: Prompt) -> UtteranceInputs:
        """See :class:`Kind`."""
        return UtteranceInputs(data.texts, prompt)

    def examples(self, run: DialogueRun) -> DialogueExamples:
        """See :class:`Kind`."""
        from llmcond.runs.dialogues import DialogueExamples

        return DialogueExamples(run)

    def evaluate(self, run: DialogueRun, asked: EvaluateRequest) -> Results[Any]:
        """See :class:`Kind`: ranks next turns, or plans for a later one."""
        from llmcond.workflows.dialogues import evaluate_dialogues, evaluate_plans
        from llmcond.workflows.evaluate import write_ranks

        work = evaluate_plans if asked.options[self.name].plans else evaluate_dialogues
        return write_ranks(work(run, asked), run, asked)

    def train(self, asked: TrainRequest, task: Dialogue) -> TrainingResult:
        """See :class:`Kind`."""
        from llmcond.workflows.finetune_dialogues import train_dialogues

        return train_dialogues(asked, task)

    def obstacle(self, prompt: Prompt) -> str:
        """See :class:`Kind`."""
        return obstacle_to(prompt)
