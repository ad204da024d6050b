"""Fitting a head on train and dev together, and telling by folds of dev what dev brings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows, fold_of_pair, join_rows
from llmcond.errors import UserError
from llmcond.evaluation.folds import Folded, check_fold_count
from llmcond.features.view import View
from llmcond.heads import FittedHead, Recipe, fit_recipe
from llmcond.heads.pairs import OnEpoch
from llmcond.runs.features import RowFeatures
from llmcond.runs.predictors import predict
from llmcond.runs.saved import Saved
from llmcond.runs.task_runs import Run


@dataclass(frozen=True)
class WithDev:
    """How a recipe is fitted on a run's train and dev, for all epochs of its settings.

    Nothing is left to choose the epoch by, so the last one is kept.

    Attributes:
        recipe: of the size that is fitted.
        weight: how often each row of dev is taken in an epoch.
        on_epoch: is told of each epoch of every fit.
    """

    run: Run
    recipe: Recipe
    view: View
    seed: int
    device: str
    weight: int
    on_epoch: OnEpoch

    def __post_init__(self) -> None:
        """Refuse what cannot be fitted so.

        Raises:
            UserError: no ratings are learned from, there are none of dev, or a prompt whose inputs
                depend on the rows around them.
        """
        if not self.recipe.family.supervised:
            raise UserError(
                f"the head {self.recipe.name} learns nothing from ratings, so dev would bring it "
                "nothing. Leave out --with."
            )
        if not self.run.rows("dev").rated.any():
            raise UserError(f"{self.run.folder} has no rated rows of dev. Leave out --with.")
        for prompt in self.view.prompts:
            if prompt.control:
                raise UserError(f"{prompt.name} is a control of train alone. Leave out --with.")

    def fit(self) -> FittedHead:
        """Fit on all of train and dev; the record says so."""
        head = self._fit(self._dev)
        record = {**head.fit.record, "trained_on": ["train", "dev"], "weight": self.weight}
        return replace(head, fit=replace(head.fit, record=record))

    def folds(self, count: int) -> Folded:
        """Fit without each of ``count`` folds of dev, and without all of it, for as many epochs.

        Raises:
            UserError: dev has fewer sentence pairs than folds.
        """
        dev = self._dev
        check_fold_count(dev, count)
        fold = fold_of_pair(dev, count, self.seed)
        without = self._predicted(self._fit(None), dev)
        trained = np.empty_like(without)
        for number in range(count):
            held = fold == number
            head = self._fit(dev.take(~held))
            trained[held] = self._predicted(head, dev.take(held))
        metric = self.run.task.main_metric
        return Folded.of(count, without, trained, dev, self.run.rows("train"), metric)

    @property
    def _dev(self) -> Rows:
        rows = self.run.rows("dev")
        return rows.take(rows.rated)

    def _fit(self, dev: Rows | None) -> FittedHead:
        train = self.run.rows("train")
        parts = [train.take(train.rated), *([] if dev is None else [dev] * self.weight)]
        pairs = RowFeatures(join_rows(parts), self.run.store()).pairs(self.view)
        return fit_recipe(self.recipe, pairs, None, self.seed, self.on_epoch, self.device)

    def _predicted(self, head: FittedHead, rows: Rows) -> NDArray[np.float32]:
        pairs = RowFeatures(rows, self.run.store()).pairs(self.view)
        return predict(Saved("", head, self.view, {}), pairs)
