"""A run's features as the arrays that heads take."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, Concatenated, Matrix
from llmcond.bundled import DEFAULT_RUN
from llmcond.data.rows import Rows
from llmcond.features.view import Part, Read, View, view_of
from llmcond.heads.pairs import PairArrays
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import row_inputs
from llmcond.runs import open_run

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore

Side = Literal["first", "second"]


class RowFeatures:
    """The features of some rows, each kind read once: as stored, equal inputs sharing a vector."""

    def __init__(self, rows: Rows, store: FeatureStore) -> None:
        self.rows = rows
        inputs = cache(partial(row_inputs, rows))

        @cache
        def column(prompt: Prompt, name: str) -> Matrix:
            return store.lookup(getattr(inputs(prompt), name))

        self._column = column

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
        )

    def _reader(self, side: Side) -> Read:
        def read(prompt: Prompt, part: Part) -> Matrix:
            column = side if part == "conditional" else f"{side}_{part}"
            if prompt.of_condition and part == "unconditional" and all(self.rows.conditioned):
                # The same input for both sentences.
                column = "first_unconditional"
            return self._column(prompt, column)

        return read


class PairFeatures(NamedTuple):
    """What :class:`llmcond.Head` takes: ``fit(X, y, pair=pair)``.

    Attributes:
        X: (n, 2 d + n_condition) float32, as ``Head`` has it.
        y: (n,) ratings on 0 to 1.
        pair: (n,) the number of each row's sentence pair, also for scikit-learn's ``groups``.
        n_condition: how many of the last columns are the conditions' features; 0 for heads that
            take none.
    """

    X: Array
    y: NDArray[np.float64]
    pair: NDArray[np.int64]
    n_condition: int


def load_features(
    run: str | Path = DEFAULT_RUN,
    head: str = "linear",
    *,
    split: str = "train",
    prompt: str | None = None,
    subtract: bool = True,
) -> PairFeatures:
    """Load the features of a run's rated rows as a head of :class:`llmcond.Head` takes them.

    They are what ``llmcond fit-head`` fits on; it lets dev choose the epoch as well.

    Args:
        run: the run's folder.
        head: the recipe that they are for: it decides whether features are e(s|c) or e(s), and
            whether those of conditions are added.
        split: ``train``, ``dev`` or ``test``.
        prompt: its name; several, joined by ``+``, are side by side. None: the run's only one.
        subtract: whether the unconditional features are subtracted.

    Raises:
        UserError: no such run, recipe, split or prompt, or features that are not there.
    """
    from llmcond.heads import load_recipe

    opened, recipe = open_run(Path(run)), load_recipe(head)
    view = view_of(recipe, opened.find_prompts(prompt, recipe.features), subtract)
    rows = opened.rows(split)
    pairs = RowFeatures(rows, opened.store()).pairs(view).take(rows.rated)
    parts = [pairs.first, pairs.second, *([] if pairs.condition is None else [pairs.condition])]
    pair = np.arange(len(pairs)) if pairs.pair is None else pairs.pair
    return PairFeatures(Concatenated(parts).read(), pairs.rating, pair, pairs.dim_condition)
