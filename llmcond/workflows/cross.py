"""Training a cross-encoder, one model that rates two sentences under a condition together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from typing_extensions import override

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
from llmcond.runs.run import encoder_and_data_record
from llmcond.workflows.last_stage import check_folds, check_stage_settings, read_stage_splits
from llmcond.workflows.options.training import TrainCrossOptions
from llmcond.workflows.training import RatedJob, TrainedHead, TrainingParts, score_predictor, train
from llmcond.workflows.training_options import (
    build_tune_settings,
    find_rated_task,
    read_rated_dataset,
    resolve_trainable,
)
from llmcond.workflows.training_record import TrainingResult

if TYPE_CHECKING:
    from llmcond.encoders.engine.tokenizing import InputTokenizer
    from llmcond.finetune.loading import TrainableEncoder


def train_cross(options: TrainCrossOptions) -> TrainingResult:
    """Train an encoder, by adapters or fully, to rate [sentence1; sentence2; condition].

    A call that was stopped at any step continues from the last checkpoint, as ``train_lora`` does.

    Raises:
        UserError: the input is invalid, the run holds something else, or the loss became NaN.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    model, orders, seed, merge = options.model, options.orders, options.seed, options.merge
    stage = check_stage_settings(options.select(StageSettings))
    tuning = build_tune_settings(options.tune_settings())
    head_changes = parse_settings(
        RegressionSettings, dict(options.set or {}), "--set", "a cross-encoder"
    )
    head_settings = build(RegressionSettings, head_changes, "--set")
    task = find_rated_task(options.task)
    first, second = task.conditioned
    if first != second and orders == "both":
        raise UserError(
            f"the task {task.name} puts only its {'first' if first else 'second'} text under the "
            "condition, so the order of the two texts matters. Give --orders given."
        )
    dataset = read_rated_dataset(task, options.data_options())
    if stage is not None:
        read_stage_splits(dataset, stage)  # reports errors before training, not after it
    # A linear layer also reads the length of a vector, so vectors keep theirs by default.
    encoder_options = replace(options.encoder_options(), normalize=bool(options.normalize))
    resolved = resolve_trainable(model, encoder_options, tuning, merge)
    check_folds(stage, model, resolved, dataset)
    if resolved.identity.routes_inside:
        raise UserError(
            "a cross-encoder reads the condition as a part of its input, so a router would have no "
            "effect. Leave out --router, or name a --model without a router."
        )
    return train(
        _CrossJob(
            model=model,
            resolved=resolved,
            folder=Path(options.run),
            task=task,
            dataset=dataset,
            settings=tuning,
            head=NAME,
            seed=seed,
            merge=merge,
            config={
                "encoder": resolved.identity.to_json(),
                "data": dataset.digest,
                "orders": orders,
                "head": {"kind": KIND, **asdict(head_settings)},
                "seed": seed,
                "settings": tuning.to_json(),
                "merge": merge,
                **({} if stage is None else {"then": asdict(stage)}),
            },
            trackers=options.log,
            stage=stage,
            head_settings=head_settings,
            orders=orders,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CrossJob(RatedJob):
    """Training of an encoder that reads both sentences and the condition, with a linear layer."""

    cross: ClassVar[bool] = True

    head_settings: RegressionSettings
    orders: Orders

    @override
    def build_parts(self, trainable: TrainableEncoder) -> TrainingParts:
        train_rows, dev = self.dataset.splits["train"], self.rated_dev()
        rows = self.inputs(train_rows, trainable.tokenizer)
        dev_inputs = None if dev is None else self.inputs(dev, trainable.tokenizer)
        if rows.n_cut:
            log.info(
                f"{rows.n_cut:,} rows of train are longer than {self.resolved.identity.max_length} "
                "tokens: their sentences are truncated, but not their conditions"
            )
        mean = float(rows.rating.mean())
        metric = self.task.main_metric
        model = CrossModel(trainable.engine, self.head_settings, self.seed, mean, metric)
        return TrainingParts(model, rows, dev_inputs)

    @override
    def inputs(self, rows: Rows, tokenizer: InputTokenizer) -> CrossInputs:
        return CrossInputs.from_rows(rows, self.orders, tokenizer)

    @override
    def save(self, head: FittedHead) -> TrainedHead:
        completed, resolved = self.complete_run(self.orders)
        run = cast(Run, completed)
        save_head(head, run.head_folder(NAME), encoder_and_data_record(run))
        log.info(f"encoder -> {self.folder}; its scores:")
        cross = load_cross_encoder(self.folder, device=resolved.device)
        return TrainedHead(
            NAME, {"orders": self.orders}, score_predictor(run, cross, cross.predict)
        )
