"""A last stage of training, on dev too, which starts from the weights selected on dev.

It uses a lower learning rate. No data is left to select among its weights, so the last ones are
kept. Cross-validation over folds of dev measures its gain: a stage without a fold predicts that
fold.
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
from llmcond.evaluation.dev_gain import CrossValidatedGain
from llmcond.finetune.base import P, RatedModel
from llmcond.finetune.loop import Trainer, copy_tensors, distribute_over_processes
from llmcond.finetune.settings import StageSettings, TuneSettings
from llmcond.finetune.state import TrainingProgress, TrainingState
from llmcond.log import log
from llmcond.progress import TrainBar
from llmcond.run_log import RunLog

#: Second number, next to the seed, of the random generator that samples the share of train. The
#: generators of steps use numbers from 0.
_SHARE_STREAM = 2**32


@dataclass(frozen=True, kw_only=True)
class LastStage(Generic[P]):
    """A trained model, and the settings and data of its last stage.

    Attributes:
        model: the model, after the training before the stage.
        to_inputs: converts rated rows to the model's input format.
        train: rated rows of train.
        dev: rated rows of dev.
        settings: settings of the training before the stage.
        stage: settings of the stage.
        start: weights with the best dev score, by name; each stage begins with them.
        accelerator: computes on one device or in several processes.
        folder: folder of the states of these trainings.
        training_config: everything that determines the result of training.
        run_log: log of the training.
    """

    model: RatedModel[P]
    to_inputs: Callable[[Rows], P]
    train: Rows
    dev: Rows
    settings: TuneSettings
    stage: StageSettings
    start: Mapping[str, Tensor]
    accelerator: Accelerator
    folder: Path
    training_config: Mapping[str, Any]
    run_log: RunLog

    def cross_validate(self) -> CrossValidatedGain:
        """Cross-validate the stage over folds of dev, and compare with the weights before it.

        The model must have those weights; afterwards it has the weights of the last fold.

        Raises:
            UserError: dev has fewer sentence pairs than folds; or as in ``run``.
        """
        count, shared = self.stage.folds, distribute_over_processes(self.accelerator)
        fold = fold_of_pair(self.dev, count, self.model.seed)
        baseline = self.model.predict(self.to_inputs(self.dev), shared)
        predictions = np.empty_like(baseline)
        for number in range(count):
            held_out = fold == number
            self._train(f"fold-{number}", self.dev.take(~held_out))
            predictions[held_out] = self.model.predict(
                self.to_inputs(self.dev.take(held_out)), shared
            )
        return CrossValidatedGain.of(
            count, baseline, predictions, self.dev, self.train, self.model.metric
        )

    def run(self) -> TrainingProgress:
        """Train on the share of train and all of dev; leave the last weights in the model.

        Raises:
            UserError: the loss became NaN, or the stage was begun with other settings.
        """
        return self._train("then", self.dev)

    def _train(self, name: str, dev: Rows) -> TrainingProgress:
        settings = replace(self.settings, epochs=self.stage.then_epochs, evaluations=1)
        copy_tensors(self.start, "", self.model.trained_parameters())
        rows = self.to_inputs(stage_rows(self.train, dev, self.stage, self.model.seed))
        state = TrainingState(self.folder / name, {**self.training_config, "stage": name})
        learning_rate_scale = self.stage.learning_rate_scale(settings)
        trainer = Trainer(
            self.model, rows, None, settings, self.accelerator, state, learning_rate_scale
        )
        first_step = trainer.progress.step
        log.info(
            f"{name}: {trainer.steps:,} steps on {len(dev):,} rows of dev, repeated "
            f"{self.stage.then_weight} times, and {100 * self.stage.then_share:g} % of train"
            + (f", from step {first_step:,}" if first_step else "")
        )
        metric = self.model.metric
        self.run_log.resume(first_step, name)
        with TrainBar(key=None, score=metric.heading, show=metric.format, name=name) as bar:
            trainer.run(self.run_log.on_step(bar.on_step, name))
        self.accelerator.wait_for_everyone()
        trainer.load_best_weights()
        # The wrapper for several processes must be removed before the model is wrapped again.
        self.accelerator.free_memory()
        return trainer.progress


def stage_rows(train: Rows, dev: Rows, stage: StageSettings, seed: int) -> Rows:
    """Return the rows of a stage: a share of train's sentence pairs, and dev's rows repeated."""
    generator = np.random.Generator(np.random.SFC64([seed, _SHARE_STREAM]))
    n_pairs = len(train.pair_keys())
    sampled_pairs = generator.permutation(n_pairs)[: round(stage.then_share * n_pairs)]
    return join_rows([train.take(np.isin(train.pair, sampled_pairs)), *[dev] * stage.then_weight])
