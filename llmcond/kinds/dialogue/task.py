"""Dialogue: which utterance comes next (Triple-Encoders, ACL 2024, section 4).

After h turns, the utterance that really followed is ranked among those that followed elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from llmcond.data.datasets import DataOptions
from llmcond.kinds.dialogue.data import Dialogues, read_dialogues, with_others
from llmcond.tasks.base import AnyTask


class Dialogue(AnyTask[Dialogues]):
    """Dialogues, each a list of utterances in turns."""

    name, kind, unit = "dialogue", "dialogue", "dialogues"
    metrics = ("average_rank", "average_rank_micro", "mrr", "hits@1", "hits@5", "hits@10")
    #: An utterance is rendered by itself, as a sentence without its condition is.
    prompt: ClassVar[str | None] = "separate"
    heads = ("c3l-released", "rank")
    recipes: ClassVar[str | None] = "dialogue"

    def read(self, data: DataOptions) -> Dialogues:
        """Return dialogues; see :func:`llmcond.kinds.dialogue.data.read_dialogues`."""
        self.refuse_rated_options(data, "utterances")
        return read_dialogues(data.source, data.drop_leaks, data.split_seed or 0)

    def with_others(
        self, dataset: Dialogues, data: DataOptions, split: str | None
    ) -> tuple[Dialogues, str]:
        """Return a data set with other dialogues; see :func:`.data.with_others`.

        Raises:
            UserError: options of rated rows, or what is wrong in them.
        """
        self.refuse_rated_options(data, "utterances")
        return with_others(dataset, data.source, split)

    def load(self, folder: Path, record: Mapping[str, Any]) -> Dialogues:
        """Return the dialogues of a run."""
        return Dialogues.load(folder)

    def counted(self, dataset: Dialogues) -> str:
        """Return how many dialogues each split has, and of how many utterances they all are."""
        splits = ", ".join(f"{len(own):,} {name}" for name, own in dataset.splits.items())
        return f"{splits} dialogues of {len(dataset.texts):,} distinct utterances"
