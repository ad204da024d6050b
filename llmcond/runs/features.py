"""A run's features as the arrays that heads take."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from llmcond.data.rows import Rows
from llmcond.features.store import FeatureStore
from llmcond.features.view import Part, Read, View
from llmcond.heads import Matrix, PairArrays
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import RowInputs, row_inputs
from llmcond.runs import Run

Side = Literal["first", "second"]


class RowFeatures:
    """The features of some rows, each kind read once: as stored, equal inputs sharing a vector."""

    def __init__(self, rows: Rows, store: FeatureStore) -> None:
        self.rows = rows
        self._store = store
        self._inputs: dict[str, RowInputs] = {}
        self._read: dict[tuple[str, str], Matrix] = {}

    def pairs(self, view: View) -> PairArrays:
        """Return all rows as a head sees them, unrated ones (NaN) included."""
        view.check_sides(self.rows.conditioned)
        first, second = self.rows.conditioned
        return PairArrays(
            first=view.sentence(self._reader("first"), conditioned=first),
            second=view.sentence(self._reader("second"), conditioned=second),
            rating=self.rows.rating,
            condition=view.condition(self._reader("first")),
            pair=self.rows.pair,
            number=self.rows.number,
        )

    def _reader(self, side: Side) -> Read:
        def read(prompt: Prompt, part: Part) -> Matrix:
            column = side if part == "conditional" else f"{side}_{part}"
            if prompt.of_condition and part == "unconditional" and all(self.rows.conditioned):
                # The same input for both sentences.
                column = "first_unconditional"
            key = (prompt.digest, column)
            if key not in self._read:
                if prompt.digest not in self._inputs:
                    self._inputs[prompt.digest] = row_inputs(self.rows, prompt)
                inputs = getattr(self._inputs[prompt.digest], column)
                self._read[key] = self._store.lookup(inputs)
            return self._read[key]

        return read


class Features:
    """A run's features as arrays, read once for each prompt and split."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._splits: dict[str, RowFeatures] = {}

    @cached_property
    def _store(self) -> FeatureStore:
        return self.run.store()

    def pairs(self, view: View, split: str) -> PairArrays:
        """Return all rows of a split as a head sees them, unrated ones (NaN) included."""
        if split not in self._splits:
            self._splits[split] = RowFeatures(self.run.rows(split), self._store)
        return self._splits[split].pairs(view)

    def rated(self, view: View, split: str) -> PairArrays:
        """Return the rated rows of a split as heads take them."""
        return self.pairs(view, split).take(self.run.rows(split).rated)
