"""The training loop: steps, dev evaluations, checkpoints, exact resuming, and a last stage.

The state of training is one file that is replaced atomically, and the best weights. Checkpoints of
accelerate use pickles; these use safetensors: weights and moments are tensors, and the rest is JSON
in the header. Random states are not stored, as every random number is a function of seed and step.
"""

from __future__ import annotations

import errno
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmcond.base.arrays import Positions
from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.files import replace_atomically
from llmcond.base.output import FitBar, log
from llmcond.base.records import check_record
from llmcond.base.run_log import RunLog
from llmcond.data.datasets import Dataset
from llmcond.data.rows import Rows, fold_of_pair, join_rows
from llmcond.encoders.tokenizing import OutOfMemoryError
from llmcond.encoders.torch.engine import is_out_of_memory
from llmcond.evaluation.results import cross_validated_gain
from llmcond.finetune.model import DistributedCompute, P, R, RatedModel, TrainedModel
from llmcond.finetune.settings import (
    StageSettings,
    TuneSettings,
    default_learning_rate,
    describe_differences,
)
from llmcond.heads.fit import entries_since_best
from llmcond.heads.fitted import GroupSampler
from llmcond.heads.settings import learning_rate_factor
from llmcond.report.tables import dev_gain_text

if TYPE_CHECKING:
    from accelerate import Accelerator

FORMAT = 1
STATE, BEST = "state.safetensors", "best.safetensors"


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The progress of training.

    Attributes:
        step: number of finished steps, over all epochs.
        updates: number of those that changed the weights, at the last checkpoint.
        curve: one entry per evaluation: step, epoch, mean loss since the previous one, and score.
        best_step: step of the best evaluation; 0 before the first.
        best_score: dev score of the best evaluation; None if nothing was scored or it is undefined.
        loss: sum of the losses since the last evaluation, in the order of steps.
        losses: number of those losses.
        seconds: training time in seconds, over all runs of the command.
        scaler: state of the gradient scaler of float16.
        done: whether training has ended.
    """

    step: int = 0
    updates: int = 0
    curve: tuple[Mapping[str, Any], ...] = ()
    best_step: int = 0
    best_score: float | None = None
    loss: float = 0.0
    losses: int = 0
    seconds: float = 0.0
    scaler: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True)
class _StateHeader:
    """The header of a state file; that of the best weights has no progress."""

    made_of: Mapping[str, Any]
    progress: TrainingProgress | None = None


class TrainingState:
    """The folder ``training`` of a run that is being trained; it is created on the first write.

    Reading raises a LlmcondError if a file is missing or damaged; writing raises a DiskFullError if
    the disk is full.
    """

    def __init__(self, folder: Path, training_config: Mapping[str, Any]) -> None:
        """Store the folder, and the settings that determine the result of training, as JSON."""
        self.folder, self._training_config = folder, json.loads(json.dumps(training_config))

    def load(self) -> tuple[TrainingProgress, dict[str, Tensor]] | None:
        """Return the progress and the tensors; None if training has not begun.

        Raises:
            UserError: training was begun with other settings; the message names each.
        """
        path = self.folder / STATE
        if not path.is_file():
            return None
        record, tensors = _read_state(path)
        changes = describe_differences(record["made_of"], self._training_config)
        if changes:
            raise UserError(
                f"{self.folder} holds a training that was begun with other settings: "
                f"{'; '.join(changes)}. Give the same settings to resume it, name another "
                "--run, or delete the folder to start again."
            )
        values = record["progress"]
        return TrainingProgress(**{**values, "curve": tuple(values["curve"])}), tensors

    def load_best(self) -> dict[str, Tensor]:
        """Return the weights of the best evaluation."""
        return _read_state(self.folder / BEST)[1]

    def save(self, name: str, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the file ``STATE`` or ``BEST``; after a failure it is unchanged."""
        values = {"format": FORMAT, "made_of": self._training_config, **record}
        write_tensors(self.folder / name, tensors, {"llmcond": json.dumps(values)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors as safetensors; after a failure the file is unchanged."""
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    with replace_atomically(path) as temporary:
        mode = temporary.stat().st_mode
        try:
            save_file(plain, temporary, metadata=metadata)
        except SafetensorError as error:
            # The error of the operating system is only in the text of the message.
            match = re.search(r"\(os error (\d+)\)", str(error))
            raise OSError(int(match[1]) if match else errno.EIO, str(error)) from error
        # safetensors creates files that only their owner can read.
        temporary.chmod(mode)


def _read_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu", backend="pread") as opened:
            record = dict(json.loads(opened.metadata()["llmcond"]))
            # Copy, as the file is replaced while its tensors are still in use.
            tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LlmcondError(
            f"{path} is missing or damaged: {error}. Delete {path.parent} to start again."
        ) from error
    if record.get("format") != FORMAT:
        raise UserError(f"{path} was written by another version of llmcond. Use that one.")
    check_record(record, _StateHeader, str(path), f"Delete {path.parent} to start again.")
    return record, tensors


#: Called after each step and its evaluation, if there is one. The arguments are the progress, the
#: total number of steps, and the figures of the step: its number and epoch, the loss, the learning
#: rate of the encoder, and the norm of the gradients before clipping.
OnStep = Callable[[TrainingProgress, int, Mapping[str, Any]], None]
#: State of AdamW for each weight.
_MOMENTS = "exp_avg", "exp_avg_sq"
#: Maximum time between two checkpoints in seconds; on a CPU, a step may take half a minute.
_CHECKPOINT_SECONDS = 600


class BatchSchedule:
    """The steps of every epoch, each split into parts for processes and accumulation.

    The rows of a step depend only on the seed, the epoch and the step.

    Attributes:
        steps: number of steps per epoch.
    """

    def __init__(
        self, group: NDArray[np.int64], settings: TuneSettings, seed: int, processes: int
    ) -> None:
        """Plan steps of about ``settings.batch_size`` rows, shared by several processes.

        Rows with the same number in ``group``, (n,), stay together in one part: a single row, or
        the two rows of a contrastive pair.

        Raises:
            UserError: a step has fewer groups than parts.
        """
        self._sampler, self._seed = GroupSampler(group), seed
        self.steps = -(-len(group) // settings.batch_size)
        self._parts = settings.gradient_accumulation_steps * processes
        n_groups = len(self._sampler) // self.steps
        if n_groups < self._parts:
            unit = "rows" if len(self._sampler) == len(group) else "sentence pairs"
            raise UserError(
                f"a step of batch_size {settings.batch_size} has {n_groups} {unit}, too few for "
                f"{processes} processes with gradient_accumulation_steps "
                f"{settings.gradient_accumulation_steps}. Raise --batch-size or lower "
                "--gradient-accumulation-steps."
            )

    def epoch(self, number: int) -> list[list[Positions]]:
        """Return the rows of an epoch's steps, part by part; all steps have similar sizes."""
        generator = np.random.Generator(np.random.SFC64([self._seed, number]))
        rows, bounds = self._sampler.order(generator.permutation(len(self._sampler)))
        return [
            [
                rows[bounds[part[0]] : bounds[part[-1] + 1]]
                for part in np.array_split(step, self._parts)
            ]
            for step in np.array_split(np.arange(len(self._sampler)), self.steps)
        ]


class Trainer(Generic[R]):
    """Trains a model step by step.

    Attributes:
        model: the model.
        steps: total number of steps of all epochs.
        progress: progress so far.
    """

    def __init__(
        self,
        model: TrainedModel[R, Any],
        train: R,
        dev: R | None,
        settings: TuneSettings,
        accelerator: Accelerator,
        state: TrainingState,
        learning_rate_scale: float | None = None,
    ) -> None:
        """Prepare training, and resume an earlier one if it was stopped.

        Rows of ``dev`` select the weights; without them the last weights are kept. In a last stage,
        all learning rates are multiplied by ``learning_rate_scale``.

        Raises:
            UserError: training was begun with other settings, or there are too few rows.
            LlmcondError: the checkpoint is damaged.
        """
        self.model, self._train, self._dev, self._settings = model, train, dev, settings
        self._accelerator, self._state, self._seed = accelerator, state, model.seed
        self._is_stage = learning_rate_scale is not None
        if self._is_stage:
            # Steps count from 0 again, and must not repeat the random numbers of the first steps.
            stream = np.random.SeedSequence(model.seed, spawn_key=(1,))
            self._seed = int(stream.generate_state(1)[0])
        self._schedule = BatchSchedule(
            model.groups(train), settings, self._seed, accelerator.num_processes
        )
        self.steps = self._schedule.steps * settings.epochs
        self._weights = model.trained_parameters()
        self._learning_rate_scale = 1.0 if learning_rate_scale is None else learning_rate_scale
        averaged_weights = self._weights if settings.ema_decay else {}
        self._average = {name: value.detach().clone() for name, value in averaged_weights.items()}
        self.progress = TrainingProgress()
        self._optimiser = accelerator.prepare_optimizer(
            torch.optim.AdamW(self._parameter_groups(), fused=True), device_placement=False
        )
        self._resume()
        self._wrapped = accelerator.prepare_model(model, device_placement=False)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        settings, head = self._settings, self.model.head.settings
        rates = settings.learning_rate, settings.weight_decay
        # The head `none` has neither setting.
        head_rates = getattr(head, "learning_rate", rates[0]), getattr(head, "weight_decay", 0.0)
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for name, value in self._weights.items():
            rate, decay = rates if name.startswith("encoder.") else head_rates
            rate *= self._learning_rate_scale
            # Weight decay excludes biases and gains.
            groups.setdefault((rate, decay if value.ndim > 1 else 0.0), []).append(value)
        return [
            {"params": values, "lr": rate, "weight_decay": decay, "base": rate}
            for (rate, decay), values in groups.items()
        ]

    def _resume(self) -> None:
        state = self._state.load()
        if state is None:
            return
        self.progress, tensors = state
        copy_tensors(tensors, "weights.", self._weights)
        copy_tensors(tensors, "average.", self._average)
        inner = self._optimiser.optimizer
        for name, value in self._weights.items():
            if f"exp_avg.{name}" not in tensors:
                continue
            moments = {key: tensors[f"{key}.{name}"].to(value.device) for key in _MOMENTS}
            step = torch.tensor(float(self.progress.updates), dtype=torch.float32)
            inner.state[value] = {"step": step.to(value.device), **moments}
        scaler: Any = self._accelerator.scaler
        if scaler is not None and self.progress.scaler:
            scaler.load_state_dict(dict(self.progress.scaler))

    def _save(self) -> None:
        if not self._accelerator.is_main_process:
            return
        tensors = {f"weights.{name}": value for name, value in self._weights.items()}
        tensors |= {f"average.{name}": value for name, value in self._average.items()}
        # Weights that no loss has used so far have no state.
        states = self._optimiser.optimizer.state
        used_states = {
            name: states[value] for name, value in self._weights.items() if states[value]
        }
        for name, state in used_states.items():
            tensors |= {f"{key}.{name}": state[key] for key in _MOMENTS}
        scaler: Any = self._accelerator.scaler
        if scaler is not None:
            self.progress = replace(self.progress, scaler=scaler.state_dict())
        # In float16, steps with infinite gradients update nothing.
        updates = max((int(state["step"]) for state in used_states.values()), default=0)
        self.progress = replace(self.progress, updates=updates)
        self._state.save(STATE, {"progress": asdict(self.progress)}, tensors)

    def run(self, on_step: OnStep) -> None:
        """Train until the last step, or until the dev score has not improved for too long.

        Raises:
            UserError: the loss or the gradients became NaN or infinite; the message says where, and
                what was saved.
            DiskFullError: there is no room for a checkpoint; the previous one is unchanged.
            OutOfMemoryError: a step does not fit into memory.
        """
        settings = self._settings
        saved = time.monotonic()
        started = saved - self.progress.seconds
        self.model.train()
        epoch, parts = -1, list[list[NDArray[np.int64]]]()
        while not self.progress.done:
            step = self.progress.step
            next_epoch, index = divmod(step, self._schedule.steps)
            if next_epoch != epoch:
                epoch, parts = next_epoch, self._schedule.epoch(next_epoch)
            loss, norm = self._try_step(parts[index], step)
            self.progress = replace(
                self.progress,
                step=step + 1,
                loss=self.progress.loss + loss,
                losses=self.progress.losses + 1,
                seconds=time.monotonic() - started,
            )
            count, steps = min(settings.evaluations, self._schedule.steps), self._schedule.steps
            scored = (index + 1) * count // steps > index * count // steps
            entry = {"step": step + 1, "epoch": next_epoch + 1, "loss": loss}
            entry |= {"learning_rate": self._learning_rate(step), "gradient_norm": norm}
            if scored:
                self._evaluate(next_epoch + 1)
            on_step(self.progress, self.steps, entry)
            waited = time.monotonic() - saved >= _CHECKPOINT_SECONDS
            if scored or waited or self.progress.step % settings.checkpoint_steps == 0:
                self._save()
                saved = time.monotonic()

    def _learning_rate(self, step: int) -> float:
        """Return the learning rate of the encoder in a step."""
        rate = self._settings.learning_rate * self._learning_rate_scale
        return rate * learning_rate_factor(step, self.steps, self._settings.warmup)

    def _try_step(self, parts: list[NDArray[np.int64]], step: int) -> tuple[float, float]:
        """Run a step; if memory is too small, raise an error with advice."""
        try:
            return self._run_step(parts, step)
        except (OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not (isinstance(error, OutOfMemoryError) or is_out_of_memory(error)):
                raise
            settings = self._settings
            advice = [] if settings.gradient_checkpointing else ["--gradient-checkpointing"]
            n_parts = settings.gradient_accumulation_steps
            advice.append(f"--gradient-accumulation-steps {2 * n_parts}")
            raise LlmcondError(
                f"ran out of memory in step {step + 1:,}, with {settings.batch_size} rows in "
                f"{n_parts} parts. Try {' or '.join(advice)}, or a smaller "
                "--batch-size, in another --run."
            ) from error

    def _run_step(self, parts: list[NDArray[np.int64]], step: int) -> tuple[float, float]:
        """Run a step; return its loss, and the norm of the gradients before clipping."""
        accelerator, settings = self._accelerator, self._settings
        process, count = accelerator.process_index, accelerator.num_processes
        n_parts = settings.gradient_accumulation_steps
        local_parts = parts[process * n_parts : (process + 1) * n_parts]
        total = sum(len(rows) for rows in parts)
        self._optimiser.zero_grad()
        loss = torch.zeros((), device=self.model.engine.output_device)
        for number, rows in enumerate(local_parts):
            last = number == len(local_parts) - 1
            # Gradients of several processes are synchronised only once, with the last part.
            with nullcontext() if last else accelerator.no_sync(self._wrapped):
                # Accelerate averages gradients over processes. This factor gives each row of the
                # step the same weight.
                seed = [self._seed, step, process, number]
                part = self._wrapped(self._train, rows, seed) * (len(rows) * count / total)
                accelerator.backward(part)
            loss += part.detach() / count
        value = float(accelerator.reduce(loss, "sum"))
        self._check_finite(value, step, "the loss")
        norm = float(
            accelerator.clip_grad_norm_(self._weights.values(), settings.max_grad_norm or math.inf)
        )
        if accelerator.scaler is None:  # float16 skips steps with infinite gradients
            self._check_finite(norm, step, "the norm of the gradients")
        rate = learning_rate_factor(step, self.steps, settings.warmup)
        for group in self._optimiser.param_groups:
            group["lr"] = group["base"] * rate
        self._optimiser.step()
        averages = {} if self._optimiser.step_was_skipped else self._average
        with torch.no_grad():
            for name, average in averages.items():
                # The decay is smaller at first; otherwise the initial weights would dominate.
                decay = min(settings.ema_decay, (step + 1) / (step + 10))
                average.lerp_(self._weights[name], 1 - decay)
        return value, norm

    def _check_finite(self, value: float, step: int, what: str) -> None:
        if math.isfinite(value):
            return
        settings = self._settings
        saved = f"nothing was saved in {self._state.folder} yet"
        if (self._state.folder / STATE).is_file():
            saved = f"the last checkpoint is in {self._state.folder}"
        if self.progress.best_step:
            saved += f", and the best weights are those of step {self.progress.best_step:,}"
        rate = settings.learning_rate * self._learning_rate_scale
        rate = min(rate / 4, default_learning_rate(settings.rank))
        raise UserError(
            f"{what} became {value} in step {step + 1:,} of {self.steps:,} (epoch "
            f"{step // self._schedule.steps + 1}); {saved}. "
            + (
                f"Lower --then-learning-rate, to about {rate:g}."
                if self._is_stage
                else f"Lower --learning-rate, to about {rate:g}, in another --run."
            )
        )

    def _evaluate(self, epoch: int) -> None:
        progress, shared = self.progress, distribute_over_processes(self._accelerator)
        weights = self._average or self._weights
        with _swap_weights(self._weights, self._average):
            score = None if self._dev is None else self.model.score(self._dev, shared)
        loss = progress.loss / max(1, progress.losses)
        entry = {
            "step": progress.step,
            "epoch": epoch,
            "loss": loss,
            "learning_rate": self._learning_rate(progress.step - 1),
            self.model.dev_score_name: score,
        }
        curve = (*progress.curve, entry)
        since = entries_since_best(curve, self.model.dev_score_name, self.model.metric)
        if not since:
            progress = replace(progress, best_step=progress.step, best_score=score)
            if self._accelerator.is_main_process:
                self._state.save(BEST, {"step": progress.step}, weights)
        done = progress.step >= self.steps or since >= self._settings.early_stopping_patience
        self.progress = replace(progress, curve=curve, loss=0.0, losses=0, done=done)

    def load_best_weights(self) -> None:
        """Load the weights of the best evaluation into the model."""
        copy_tensors(self._state.load_best(), "", self._weights)


def distribute_over_processes(accelerator: Accelerator) -> DistributedCompute:
    """Return a function that computes (n, k) values of n items, each process a share of them."""

    def shared(n: int, compute: Callable[[Positions], NDArray[np.float32]]) -> NDArray[np.float32]:
        count = accelerator.num_processes
        # Gathering needs equal shares, so some of the first items are computed twice.
        local_items = np.arange(accelerator.process_index, -(-n // count) * count, count) % n
        with accelerator.autocast():
            local_values = compute(local_items)
        if count == 1:
            return local_values
        gathered = accelerator.gather(torch.from_numpy(local_values).to(accelerator.device))
        parts = (
            gathered.view(count, len(local_items), -1)
            .transpose(0, 1)
            .reshape(count * len(local_items), -1)
        )
        values: NDArray[np.float32] = parts[:n].cpu().numpy()
        return values

    return shared


def copy_tensors(tensors: Mapping[str, Tensor], prefix: str, into: Mapping[str, Tensor]) -> None:
    """Copy ``tensors[prefix + name]`` into each tensor of ``into``."""
    with torch.no_grad():
        for name, value in into.items():
            value.copy_(tensors[f"{prefix}{name}"])


@contextmanager
def _swap_weights(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Temporarily replace the values of weights with those of ``others`` of the same names."""
    originals = {name: weights[name].detach().clone() for name in others}
    targets = {name: weights[name] for name in others}
    copy_tensors(others, "", targets)
    try:
        yield
    finally:
        copy_tensors(originals, "", targets)


#: Second number, next to the seed, of the random generator that samples the share of train. The
#: generators of steps use numbers from 0.
_SHARE_STREAM = 2**32


@dataclass(frozen=True)
class LastStage(Generic[P]):
    """A trained model, and the settings and data of its last stage.

    Attributes:
        model: the model, after the training before the stage.
        to_inputs: converts rated rows to the model's input format.
        dataset: the data, of which rated rows of train and dev are used.
        settings: settings of the training before the stage.
        stage: settings of the stage.
        state: state of that training. Each stage begins with its weights with the best dev score,
            and has a folder in its folder.
        accelerator: computes on one device or in several processes.
        training_config: everything that determines the result of training.
        run_log: log of the training.
    """

    model: RatedModel[P]
    to_inputs: Callable[[Rows], P]
    dataset: Dataset
    settings: TuneSettings
    stage: StageSettings
    state: TrainingState
    accelerator: Accelerator
    training_config: Mapping[str, Any]
    run_log: RunLog

    def run(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Train on the share of train and all of dev; leave the last weights in the model.

        With folds, first measure the gain by cross-validation on dev.

        Returns:
            The stage's settings, steps and seconds for the training record, and the loss of each
            epoch.

        Raises:
            UserError: the loss became NaN, or the stage was begun with other settings.
        """
        stage, fold_record = self.stage, {}
        if stage.folds:
            gain = self._cross_validate()
            log.info(dev_gain_text(gain))
            fold_record["folds"] = gain
        progress = self._train("then", self._rated("dev"))
        record = {
            "share": stage.then_share,
            "weight": stage.then_weight,
            "learning_rate": self.settings.learning_rate * stage.learning_rate_scale(self.settings),
            "epochs": stage.then_epochs,
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            **fold_record,
        }
        curve = [{key: entry[key] for key in ("step", "epoch", "loss")} for entry in progress.curve]
        return {"then": record}, curve

    def _cross_validate(self) -> dict[str, Any]:
        """Cross-validate the stage over folds of dev, and compare with the weights before it.

        The model must have those weights; afterwards it has the weights of the last fold.
        """
        count, shared = self.stage.folds, distribute_over_processes(self.accelerator)
        train, dev = self._rated("train"), self._rated("dev")
        fold = fold_of_pair(dev, count, self.model.seed)
        baseline = self.model.predict(self.to_inputs(dev), shared)
        predictions = np.empty_like(baseline)
        for number in range(count):
            held_out = fold == number
            self._train(f"fold-{number}", dev.take(~held_out))
            held_out_inputs = self.to_inputs(dev.take(held_out))
            predictions[held_out] = self.model.predict(held_out_inputs, shared)
        return cross_validated_gain(count, baseline, predictions, dev, train, self.model.metric)

    def _rated(self, split: str) -> Rows:
        rows = self.dataset.splits[split]
        return rows.take(rows.rated)

    def _train(self, name: str, dev: Rows) -> TrainingProgress:
        settings = replace(self.settings, epochs=self.stage.then_epochs, evaluations=1)
        copy_tensors(self.state.load_best(), "", self.model.trained_parameters())
        train = self._rated("train")
        rows = self.to_inputs(stage_rows(train, dev, self.stage, self.model.seed))
        state = TrainingState(self.state.folder / name, {**self.training_config, "stage": name})
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
        with FitBar(key=None, score=metric.heading, show=metric.format, name=name) as bar:
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
