"""A last stage of training, on dev as well: from the weights that dev chose, at a lower rate.

Nothing is left that could choose among its weights, so the last ones are kept. What it brings is
told by folds of dev: the stage without a fold predicts that fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from llmcond.data.rows import Rows, fold_of_pair, join_rows
from llmcond.evaluation.folds import Folded
from llmcond.finetune.base import P, RatedModel
from llmcond.finetune.loop import Trainer, copy_tensors, over_processes
from llmcond.finetune.settings import StageSettings, TuneSettings
from llmcond.finetune.state import Progress, StateFolder
from llmcond.log import log
from llmcond.progress import TrainBar

#: What the share of train is drawn by, beside the seed; steps are drawn by numbers from 0.
_SHARE = 2**32


@dataclass(frozen=True, kw_only=True)
class LastStage(Generic[P]):
    """A model that was trained, and how, and on what, it is trained further.

    Attributes:
        inputs: takes rated rows in the form that the model has them.
        train, dev: rated rows.
        settings: of the training before.
        start: the weights that were best on dev, by their names; each stage begins with them.
        folder: where the states of these trainings are.
        made_of: all that decides what comes out, for them.
    """

    model: RatedModel[P]
    inputs: Callable[[Rows], P]
    train: Rows
    dev: Rows
    settings: TuneSettings
    stage: StageSettings
    start: Mapping[str, Tensor]
    accelerator: Accelerator
    folder: Path
    made_of: Mapping[str, Any]

    def folds(self) -> Folded:
        """Train without each fold of dev, predict that, and compare with the weights before.

        Those are in the model to begin with; afterwards it has those of the last fold.

        Raises:
            UserError: dev has fewer sentence pairs than folds; and as :meth:`run`.
        """
        count, shared = self.stage.folds, over_processes(self.accelerator)
        fold = fold_of_pair(self.dev, count, self.model.seed)
        without = self.model.predict(self.inputs(self.dev), shared)
        trained = np.empty_like(without)
        for number in range(count):
            held = fold == number
            self._train(f"fold-{number}", self.dev.take(~held))
            trained[held] = self.model.predict(self.inputs(self.dev.take(held)), shared)
        return Folded.of(count, without, trained, self.dev, self.train, self.model.metric)

    def run(self) -> Progress:
        """Train on the share of train and all of dev, and leave the last weights in the model.

        Raises:
            UserError: the loss became NaN, or a state that was begun with other settings.
        """
        return self._train("then", self.dev)

    def _train(self, name: str, dev: Rows) -> Progress:
        settings = replace(self.settings, epochs=self.stage.then_epochs, evaluations=1)
        copy_tensors(self.start, "", self.model.trained())
        rows = self.inputs(stage_rows(self.train, dev, self.stage, self.model.seed))
        state = StateFolder(self.folder / name, {**self.made_of, "stage": name})
        pace = self.stage.pace(settings)
        trainer = Trainer(self.model, rows, None, settings, self.accelerator, state, pace)
        done = trainer.progress.step
        log.info(
            f"{name}: {trainer.steps:,} steps on {len(dev):,} rows of dev, "
            f"{self.stage.then_weight} times, and {100 * self.stage.then_share:g} % of train"
            + (f", from step {done:,}" if done else "")
        )
        metric = self.model.metric
        with TrainBar(key=None, score=metric.heading, show=metric.show, name=name) as bar:
            trainer.run(bar.on_step)
        self.accelerator.wait_for_everyone()
        trainer.keep_best()
        # What wraps the model for several processes must be gone before it is wrapped again.
        self.accelerator.free_memory()
        return trainer.progress


def stage_rows(train: Rows, dev: Rows, stage: StageSettings, seed: int) -> Rows:
    """Return the rows of a stage: a share of train's sentence pairs, and dev's rows repeated."""
    drawn = np.random.Generator(np.random.SFC64([seed, _SHARE]))
    n_pairs = len(train.pair_keys())
    kept = drawn.permutation(n_pairs)[: round(stage.then_share * n_pairs)]
    return join_rows([train.take(np.isin(train.pair, kept)), *[dev] * stage.then_weight])
