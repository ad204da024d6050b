"""Fitting a head on train and dev together, and measuring the gain from dev by cross-validation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows, fold_of_pair, join_rows
from llmcond.errors import UserError
from llmcond.evaluation.results import CrossValidatedGain, check_fold_count
from llmcond.features.view import FeatureView
from llmcond.heads import FittedHead, Recipe, fit_recipe
from llmcond.heads.pairs import OnEpoch, in_stage
from llmcond.runs.features import RowFeatures
from llmcond.runs.predictors import predict
from llmcond.runs.run_heads import RunHead
from llmcond.runs.task_runs import Run


@dataclass(frozen=True)
class DevFit:
    """The fit of a recipe on train and dev of a run, for all epochs of its settings.

    No split is left to choose the epoch, so the last epoch is used.

    Attributes:
        run: The run.
        recipe: The recipe, sized to the features.
        view: The features that the head is fitted on.
        seed: The random seed.
        device: The device to fit on.
        weight: How often an epoch contains each row of dev.
        on_epoch: Called after each epoch of every fit.
    """

    run: Run
    recipe: Recipe
    view: FeatureView
    seed: int
    device: str
    weight: int
    on_epoch: OnEpoch

    def __post_init__(self) -> None:
        """Check that the recipe can be fitted on dev.

        Raises:
            UserError: The head does not learn from ratings, dev has no rated rows, or the inputs of
                a prompt depend on the other rows of the split.
        """
        if not self.recipe.family.supervised:
            raise UserError(
                f"the head {self.recipe.name} does not learn from ratings, so dev has no effect on "
                "it. Leave out --with."
            )
        if not self.run.rows("dev").rated.any():
            raise UserError(f"{self.run.folder} has no rated dev rows. Leave out --with.")
        for prompt in self.view.prompts:
            if prompt.control:
                raise UserError(
                    f"the prompt {prompt.name} is a control, and controls are fitted on train "
                    "only. Leave out --with."
                )

    def fit(self) -> FittedHead:
        """Fit on all rated rows of train and dev, and record this in ``trained_on``."""
        head = self._fit(self._dev, self.on_epoch)
        record = {**head.fit.record, "trained_on": ["train", "dev"], "weight": self.weight}
        return replace(head, fit=replace(head.fit, record=record))

    def folds(self, count: int) -> CrossValidatedGain:
        """Fit ``count`` times, each time without one fold of dev, and once without dev.

        All fits run for the same number of epochs.

        Raises:
            UserError: Dev has fewer sentence pairs than folds.
        """
        dev = self._dev
        check_fold_count(dev, count)
        fold = fold_of_pair(dev, count, self.seed)
        without = self._predict(self._fit(None, in_stage(self.on_epoch, "without-dev")), dev)
        trained = np.empty_like(without)
        for number in range(count):
            is_held_out = fold == number
            on_epoch = in_stage(self.on_epoch, f"fold-{number}")
            head = self._fit(dev.take(~is_held_out), on_epoch)
            trained[is_held_out] = self._predict(head, dev.take(is_held_out))
        metric = self.run.task.main_metric
        return CrossValidatedGain.of(count, without, trained, dev, self.run.rows("train"), metric)

    @property
    def _dev(self) -> Rows:
        rows = self.run.rows("dev")
        return rows.take(rows.rated)

    def _fit(self, dev: Rows | None, on_epoch: OnEpoch) -> FittedHead:
        train = self.run.rows("train")
        parts = [train.take(train.rated), *([] if dev is None else [dev] * self.weight)]
        pairs = RowFeatures(join_rows(parts), self.run.store()).pairs(self.view)
        return fit_recipe(self.recipe, pairs, None, self.seed, on_epoch, self.device)

    def _predict(self, head: FittedHead, rows: Rows) -> NDArray[np.float32]:
        pairs = RowFeatures(rows, self.run.store()).pairs(self.view)
        return predict(RunHead("", head, self.view, {}), pairs)
