"""A run's features as arrays, the input of heads."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, ConcatenatedMatrix, Matrix
from llmcond.bundled import DEFAULT_RUN
from llmcond.data.rows import Rows
from llmcond.features.view import FeaturePart, FeatureView, ReadFeatures, recipe_view
from llmcond.heads.pairs import PairArrays
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import render_rows
from llmcond.runs import open_run

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore

Side = Literal["first", "second"]


class RowFeatures:
    """The features of rows, in the stored type. Each kind is read once; equal inputs share it."""

    def __init__(self, rows: Rows, store: FeatureStore) -> None:
        self.rows = rows
        inputs = cache(partial(render_rows, rows))

        @cache
        def column(prompt: Prompt, name: str) -> Matrix:
            return store.lookup(getattr(inputs(prompt), name))

        self._column = column

    def pairs(self, view: FeatureView) -> PairArrays:
        """Return the features of all rows under a view, including unrated rows (NaN)."""
        view.check_sides(self.rows.conditioned)
        first, second = self.rows.conditioned
        return PairArrays(
            first=view.sentence_features(self._reader("first"), conditioned=first),
            second=view.sentence_features(self._reader("second"), conditioned=second),
            rating=self.rows.rating,
            condition=view.condition_features(self._reader("first")),
            pair=self.rows.pair,
        )

    def _reader(self, side: Side) -> ReadFeatures:
        def read(prompt: Prompt, part: FeaturePart) -> Matrix:
            column = side if part == "conditional" else f"{side}_{part}"
            if (
                prompt.subtracts_condition
                and part == "unconditional"
                and all(self.rows.conditioned)
            ):
                # The input is the same for both sentences.
                column = "first_unconditional"
            return self._column(prompt, column)

        return read


class PairFeatures(NamedTuple):
    """The training data of ``llmcond.Head``: ``fit(X, y, pair=pair)``.

    Attributes:
        X: (n, 2 d + n_condition) float32, in the layout that ``Head`` expects.
        y: (n,) ratings from 0 to 1.
        pair: (n,) the number of each row's sentence pair. It can be used as ``groups`` in
            scikit-learn.
        n_condition: The number of last columns that hold the features of conditions; 0 for heads
            without them.

    Examples:
        >>> import llmcond
        >>> data = [
        ...     {"sentence1": f"{n} dogs run.", "sentence2": f"{n} cats run.",
        ...      "condition": condition, "label": label}
        ...     for n in range(20)
        ...     for condition, label in (("the animal", 1), ("the action", 5))
        ... ]
        >>> result = llmcond.extract(model="minilm", data=data, run="pets")
        >>> features = llmcond.load_features("pets")
        >>> features.X.shape, features.y.shape, features.n_condition
        ((28, 768), (28,), 0)
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
    """Load the features of a run's rated rows as training data for ``llmcond.Head``.

    ``llmcond fit-head`` fits on the same features; it also lets dev choose the epoch.

    Args:
        run: The run's folder.
        head: The recipe of the head. It determines whether features are e(s|c) or e(s), and
            whether the features of conditions are appended.
        split: ``train``, ``dev`` or ``test``.
        prompt: The name of the prompt. The features of several prompts, joined by ``+``, are
            concatenated. None: the run's only prompt.
        subtract: Whether to subtract the unconditional features.

    Returns:
        The features, ratings and sentence pairs of the n rated rows.

    Raises:
        UserError: The run, recipe, split or prompt does not exist, or features are missing.

    Examples:
        >>> import llmcond
        >>> data = [
        ...     {"sentence1": f"{n} dogs run.", "sentence2": f"{n} cats run.",
        ...      "condition": condition, "label": label}
        ...     for n in range(20)
        ...     for condition, label in (("the animal", 1), ("the action", 5))
        ... ]
        >>> result = llmcond.extract(model="minilm", data=data, run="pets")
        >>> llmcond.load_features("pets", split="dev").X.shape
        (6, 768)
    """
    from llmcond.heads import load_recipe

    opened, recipe = open_run(Path(run)), load_recipe(head)
    view = recipe_view(recipe, opened.find_prompts(prompt, recipe.features), subtract)
    rows = opened.rows(split)
    pairs = RowFeatures(rows, opened.store()).pairs(view).take(rows.rated)
    parts = [pairs.first, pairs.second, *([] if pairs.condition is None else [pairs.condition])]
    pair = np.arange(len(pairs)) if pairs.pair is None else pairs.pair
    return PairFeatures(ConcatenatedMatrix(parts).read(), pairs.rating, pair, pairs.dim_condition)
