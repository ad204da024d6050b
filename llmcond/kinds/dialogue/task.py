"""The task of ranking the next turn of dialogues (Triple-Encoders, ACL 2024, section 4).

After h turns, the utterance that actually followed is ranked among utterances that followed in
other dialogues.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from llmcond.data.datasets import DataOptions
from llmcond.kinds.dialogue.data import Dialogues, add_external_split, read_dialogues
from llmcond.tasks.base import AnyTask


class DialogueTask(AnyTask[Dialogues]):
    """Ranks the next turns of dialogues, each of which is a list of utterances."""

    name, kind, unit = "dialogue", "dialogue", "dialogues"
    metrics = ("average_rank", "average_rank_micro", "mrr", "hits@1", "hits@5", "hits@10")
    #: Utterances are rendered like sentences without a condition.
    prompt: ClassVar[str | None] = "separate"
    heads = ("c3l-released", "rank")
    recipes: ClassVar[str | None] = "dialogue"

    @override
    def read(self, data: DataOptions) -> Dialogues:
        self.reject_rated_options(data, "utterances")
        return read_dialogues(data.source, data.drop_leaks, data.split_seed or 0, data.reading)

    def add_external_data(
        self, dataset: Dialogues, data: DataOptions, split: str | None
    ) -> tuple[Dialogues, str]:
        """Return a dataset with dialogues from another source; see ``add_external_split``.

        Raises:
            UserError: An option is only for rated rows, or the dialogues are invalid.
        """
        self.reject_rated_options(data, "utterances")
        return add_external_split(dataset, data.source, split, data.reading)

    @override
    def load(self, folder: Path, record: Mapping[str, Any]) -> Dialogues:
        return Dialogues.load(folder)

    @override
    def count_examples(self, dataset: Dialogues) -> str:
        splits = ", ".join(f"{len(turns):,} {name}" for name, turns in dataset.splits.items())
        return f"{splits} dialogues of {len(dataset.texts):,} distinct utterances"
