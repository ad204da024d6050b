"""Dialogues as a kind of task: rank candidates for the next turn (Triple-Encoders, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from llmcond.kinds.dialogue.inputs import UtteranceInputs, obstacle_to
from llmcond.kinds.dialogue.run import DialogueRun
from llmcond.kinds.dialogue.task import DialogueTask
from llmcond.prompts import Prompt
from llmcond.runs.kind import CardText, Kind

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results
    from llmcond.kinds.dialogue.data import Dialogues
    from llmcond.kinds.dialogue.examples import DialogueExamples
    from llmcond.workflows.analyse import AnalysisResult
    from llmcond.workflows.options.scoring import AnalyseOptions, EvaluateOptions
    from llmcond.workflows.options.training import TrainLoraOptions
    from llmcond.workflows.train_job import DataReader, TrainingJob


class DialogueKind(Kind):
    """Tasks that rank the next turns of dialogues; utterances have no conditions."""

    name, run = "dialogue", DialogueRun
    has_conditions = False
    card = CardText(
        subject="dialogue",
        purpose="The candidate that ranks first is the reply to a dialogue.",
        loader="load_dialogue",
        usage="""\
pool = loaded.candidates(["Yes, at noon.", "It is red."])
loaded.top(loaded.start(["Hello!", "Shall we meet?"]), pool)""",
        rows="next turns",
        groups="dialogues",
        tags=("dialogue", "response-selection"),
    )

    @override
    def inputs(self, task: DialogueTask, data: Dialogues, prompt: Prompt) -> UtteranceInputs:
        return UtteranceInputs(data.texts, prompt)

    @override
    def examples(self, run: DialogueRun) -> DialogueExamples:
        from llmcond.kinds.dialogue.examples import DialogueExamples

        return DialogueExamples(run)

    @override
    def evaluate(self, run: DialogueRun, options: EvaluateOptions) -> Results:
        from llmcond.kinds.dialogue.evaluate import evaluate_dialogues, evaluate_plans
        from llmcond.workflows.evaluate import write_ranks
        from llmcond.workflows.options.ranking import DialogueOptions

        evaluation = evaluate_plans if options.plans else evaluate_dialogues
        return write_ranks(evaluation(run, options), run, options, DialogueOptions)

    @override
    def analyse(self, run: DialogueRun, options: AnalyseOptions) -> AnalysisResult:
        from llmcond.kinds.dialogue.analyse import analyse_dialogues

        return analyse_dialogues(run, options)

    @override
    def plan_training(
        self, options: TrainLoraOptions, task: DialogueTask, read: DataReader | None = None
    ) -> TrainingJob:
        from llmcond.kinds.dialogue.train import plan_dialogues

        return plan_dialogues(options, task, read)

    @override
    def prompt_error(self, prompt: Prompt) -> str:
        return obstacle_to(prompt)
