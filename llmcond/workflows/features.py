"""A run's features as the arrays that heads take."""

from __future__ import annotations

from llmcond.features.pairs import PairFeatures, read_features
from llmcond.features.store import FeatureStore
from llmcond.heads import PairArrays
from llmcond.prompts import Prompt
from llmcond.runs import Run


class Features:
    """A run's features as arrays, read once for each prompt and split."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._store: FeatureStore | None = None
        self._read: dict[tuple[str, str], PairFeatures] = {}

    def pairs(self, prompt: Prompt, split: str) -> PairFeatures:
        """Return the features of all rows of a split, unrated ones included."""
        key = (prompt.digest, split)
        if key not in self._read:
            self._store = self._store or self.run.store()
            self._read[key] = read_features(self.run.rows(split), prompt, self._store)
        return self._read[key]

    def rated(self, prompt: Prompt, split: str, subtract: bool) -> PairArrays:
        """Return the rated rows of a split as heads take them.

        Raises:
            UserError: no such split, or features that were not extracted yet.
        """
        rows = self.run.rows(split)
        first, second = self.pairs(prompt, split).joint(subtract)
        return PairArrays(first[rows.rated], second[rows.rated], rows.rating[rows.rated])

    def dropped(self, split: str) -> int:
        """Count the unrated rows of a split."""
        return int((~self.run.rows(split).rated).sum())
