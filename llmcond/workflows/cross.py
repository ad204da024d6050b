"""Train a cross-encoder: one model that reads both sentences and the condition, and rates them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from llmcond.config import build
from llmcond.data.rows import Rows
from llmcond.encoders.spec import Orders
from llmcond.errors import UserError
from llmcond.finetune.cross import CrossInputs, CrossModel
from llmcond.finetune.settings import StageSettings
from llmcond.heads import FittedHead, save_head
from llmcond.heads.dense import RegressionSettings
from llmcond.heads.recipes import parse_settings
from llmcond.log import log
from llmcond.runs import Run
from llmcond.runs.cross import KIND, NAME, load_cross_encoder
from llmcond.runs.run import origin_record
from llmcond.workflows.account import TrainingResult
from llmcond.workflows.last_stage import check_folds, stage_settings, stage_splits
from llmcond.workflows.options.training import TrainCrossOptions
from llmcond.workflows.trainable import rated_dataset, rated_task, resolve_trainable, tune_settings
from llmcond.workflows.training import Kept, Parts, RatedJob, scores_of, train

if TYPE_CHECKING:
    from llmcond.encoders.engine.tokenizing import InputTokenizer
    from llmcond.finetune.build import Trainable


def train_cross(asked: TrainCrossOptions) -> TrainingResult:
    """Train an encoder, by adapters or whole, to rate [sentence1; sentence2; condition].

    Stopped at any step, the same call goes on from the last checkpoint, as ``train_lora`` does.

    Raises:
        UserError: wrong input, a run of something else, or a loss that became NaN.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    model, orders, seed, merge = asked.model, asked.orders, asked.seed, asked.merge
    stage = stage_settings(asked.part(StageSettings))
    tuning = tune_settings(asked.tune_settings())
    given = parse_settings(RegressionSettings, dict(asked.set or {}), "--set", "a cross-encoder")
    head = build(RegressionSettings, given, "--set")
    chosen = rated_task(asked.task)
    first, second = chosen.conditioned
    if first != second and orders == "both":
        raise UserError(
            f"the task {chosen.name} has the condition on its {'first' if first else 'second'} "
            "text only, so that the order of the two means something. Give --orders given."
        )
    dataset = rated_dataset(chosen, asked.data_options())
    if stage is not None:
        stage_splits(dataset, stage)  # told before training rather than after it
    # A linear layer reads the length of a vector too, unless the user asks for unit length.
    options = replace(asked.encoder_options(), normalize=bool(asked.normalize))
    resolved = resolve_trainable(model, options, tuning, merge)
    check_folds(stage, model, resolved, dataset)
    if resolved.identity.routes_inside:
        raise UserError(
            "a cross-encoder reads the condition in its sequence, so that a router would have "
            "nothing to do. Leave out --router, or train an encoder that is without one."
        )
    return train(
        _CrossJob(
            model=model,
            resolved=resolved,
            folder=Path(asked.run),
            task=chosen,
            dataset=dataset,
            settings=tuning,
            head=NAME,
            seed=seed,
            merge=merge,
            made_of={
                "encoder": resolved.identity.to_json(),
                "data": dataset.digest,
                "orders": orders,
                "head": {"kind": KIND, **asdict(head)},
                "seed": seed,
                "settings": tuning.to_json(),
                "merge": merge,
                **({} if stage is None else {"then": asdict(stage)}),
            },
            stage=stage,
            head_settings=head,
            orders=orders,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CrossJob(RatedJob):
    """An encoder of both sentences and the condition, and a linear layer behind it."""

    cross: ClassVar[bool] = True

    head_settings: RegressionSettings
    orders: Orders

    def parts(self, trainable: Trainable) -> Parts:
        rated, dev = self.dataset.splits["train"], self.rated_dev()
        rows = self.inputs(rated, trainable.tokenizer)
        scored = None if dev is None else self.inputs(dev, trainable.tokenizer)
        if rows.n_cut:
            log.info(
                f"{rows.n_cut:,} rows of train are longer than {self.resolved.identity.max_length} "
                "tokens: their sentences were cut, conditions are whole"
            )
        mean = float(rows.rating.mean())
        metric = self.task.main_metric
        model = CrossModel(trainable.engine, self.head_settings, self.seed, mean, metric)
        return Parts(model, rows, scored)

    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> CrossInputs:
        """See :class:`RatedJob`."""
        return CrossInputs.of(rows, self.orders, tokenizer)

    def keep(self, head: FittedHead) -> Kept:
        made, resolved = self.complete(self.orders)
        run = cast(Run, made)
        save_head(head, run.head_folder(NAME), origin_record(run))
        log.info(f"encoder -> {self.folder}; its scores:")
        cross = load_cross_encoder(self.folder, device=resolved.device)
        return Kept(NAME, {"orders": self.orders}, scores_of(run, cross, cross.predict))
