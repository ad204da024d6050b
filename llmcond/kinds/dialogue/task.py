"""Dialogues as a kind of task: rank candidates for the next turn (Triple-Encoders, section 4).

After h turns, the utterance that actually followed is ranked among utterances that followed in
other dialogues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from llmcond.data.datasets import DataOptions
from llmcond.heads.storage import load_fitted
from llmcond.kinds.dialogue.data import (
    Dialogues,
    UtteranceInputs,
    add_external_split,
    obstacle_to,
    read_dialogues,
)
from llmcond.prompts.template import Prompt
from llmcond.tasks import AnyTask, CardText

if TYPE_CHECKING:
    from llmcond.heads import Recipe
    from llmcond.kinds.dialogue.examples import DialogueExamples
    from llmcond.kinds.dialogue.heads import FittedRoleHead
    from llmcond.options.scoring import AnalyseOptions, EvaluateOptions
    from llmcond.runs import Run
    from llmcond.runs.examples import Evaluation


class DialogueTask(AnyTask[Dialogues]):
    """Ranks the next turns of dialogues, each of which is a list of utterances."""

    name, kind, unit = "dialogue", "dialogue", "dialogues"
    metrics = ("average_rank", "average_rank_micro", "mrr", "hits@1", "hits@5", "hits@10")
    #: Utterances are rendered like sentences without a condition.
    prompt: ClassVar[str | None] = "separate"
    heads = ("c3l-released", "rank")
    recipes: ClassVar[str | None] = "dialogue"
    command = "reply"
    analyses = ("similarity", "turns")
    has_conditions = False
    can_drop_leaks = True
    fields_text = "utterances"
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
    def read(self, data: DataOptions) -> Dialogues:
        self.check_options(data)
        return read_dialogues(data.source, data.drop_leaks, data.split_seed or 0, data.reading)

    def add_external_data(
        self, dataset: Dialogues, data: DataOptions, split: str | None
    ) -> tuple[Dialogues, str]:
        """Return a dataset with dialogues from another source; see ``add_external_split``.

        Raises:
            UserError: An option is only for rated rows, or the dialogues are invalid.
        """
        self.check_options(data)
        return add_external_split(dataset, data.source, split, data.reading)

    @override
    def load(self, folder: Path, record: Mapping[str, Any]) -> Dialogues:
        return Dialogues.load(folder)

    @override
    def count_examples(self, dataset: Dialogues) -> str:
        splits = ", ".join(f"{len(turns):,} {name}" for name, turns in dataset.splits.items())
        return f"{splits} dialogues of {len(dataset.texts):,} distinct utterances"

    # -- the kind of task ----------------------------------------------------------------------

    @override
    def inputs(self, dataset: Dialogues, prompt: Prompt) -> UtteranceInputs:
        return UtteranceInputs(dataset.texts, prompt)

    @override
    def prompt_error(self, prompt: Prompt) -> str:
        return obstacle_to(prompt)

    @override
    def zero_shot_settings(self, prompt: Prompt) -> list[dict[str, Any]]:
        # Utterances have no condition, so there is a single view.
        return [{"subtract": False, "features": "alone"}]

    @override
    def load_head(self, folder: Path) -> tuple[FittedRoleHead, dict[str, Any]]:
        from llmcond.kinds.dialogue.heads import FittedRoleHead

        return load_fitted(folder, FittedRoleHead)

    @override
    def examples(self, run: Run) -> DialogueExamples:
        from llmcond.kinds.dialogue.examples import DialogueExamples

        return DialogueExamples(run)

    @override
    def evaluate(self, run: Run, options: EvaluateOptions) -> Evaluation:
        from llmcond.kinds.dialogue.evaluate import evaluate_dialogues, evaluate_plans

        return (evaluate_plans if options.plans else evaluate_dialogues)(run, options)

    @override
    def analyse(self, run: Run, options: AnalyseOptions, analyses: Sequence[str]) -> dict[str, Any]:
        from llmcond.kinds.dialogue.evaluate import analyse_dialogues

        return analyse_dialogues(run, options, analyses)

    @override
    def check_training(self, recipe: Recipe, dataset: Dialogues) -> None:
        from llmcond.kinds.dialogue.examples import resolve_histories
        from llmcond.kinds.dialogue.heads import check_turns

        check_turns(recipe)
        for split in sorted(dataset.splits.keys() - {"train"}):  # the trained head is scored on it
            resolve_histories(dataset, split, can_choose=False)

    @override
    def training_parts(self, job: Any, trainable: Any) -> tuple[Any, Any, Any]:
        from llmcond.kinds.dialogue.train import build_training_parts

        return build_training_parts(self, job, trainable)
