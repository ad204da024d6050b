"""The training loop: steps, dev evaluations, checkpoints, and exact resuming from a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Generic

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from llmcond.arrays import Positions
from llmcond.encoders.engine.engine import is_out_of_memory
from llmcond.encoders.engine.interface import OutOfMemoryError
from llmcond.errors import LlmcondError, UserError
from llmcond.finetune.base import DistributedCompute, R, TrainedModel
from llmcond.finetune.settings import TuneSettings, default_learning_rate
from llmcond.finetune.state import STATE, TrainingProgress, TrainingState
from llmcond.heads.batches import GroupSampler
from llmcond.heads.fit import entries_since_best

#: Called after each step and its evaluation, if there is one. The arguments are the progress, the
#: total number of steps, and the figures of the step: its number and epoch, the loss, the learning
#: rate of the encoder, and the norm of the gradients before clipping.
OnStep = Callable[[TrainingProgress, int, Mapping[str, Any]], None]
#: State of AdamW for each weight.
_MOMENTS = "exp_avg", "exp_avg_sq"


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
        order = generator.permutation(len(self._sampler))
        return self._sampler.even_batches(order, self.steps, self._parts)


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
        learning_rate_scale: float = 1.0,
    ) -> None:
        """Prepare training, and resume an earlier one if it was stopped.

        Rows of ``dev`` select the weights; without them the last weights are kept. All learning
        rates are multiplied by ``learning_rate_scale``.

        Raises:
            UserError: training was begun with other settings, or there are too few rows.
            LlmcondError: the checkpoint is damaged.
        """
        self.model, self._train, self._dev, self._settings = model, train, dev, settings
        self._accelerator, self._state, self._seed = accelerator, state, model.seed
        self._schedule = BatchSchedule(
            model.groups(train), settings, self._seed, accelerator.num_processes
        )
        self.steps = self._schedule.steps * settings.epochs
        self._weights, self._learning_rate_scale = model.trained_parameters(), learning_rate_scale
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
        # Weights that no loss has used so far, such as one of the roles under `ccl`, have no state.
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
        self._state.save(self.progress, tensors)

    def run(self, on_step: OnStep) -> None:
        """Train until the last step, or until the dev score has not improved for too long.

        Raises:
            UserError: the loss or the gradients became NaN or infinite; the message says where, and
                what was saved.
            DiskFullError: there is no room for a checkpoint; the previous one is unchanged.
            OutOfMemoryError: a step does not fit into memory.
        """
        settings = self._settings
        started = time.monotonic() - self.progress.seconds
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
            if scored or self.progress.step % settings.checkpoint_steps == 0:
                self._save()

    def _learning_rate(self, step: int) -> float:
        """Return the learning rate of the encoder in a step."""
        rate = self._settings.learning_rate * self._learning_rate_scale
        return rate * self._settings.learning_rate_factor(step, self.steps)

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
        rate = settings.learning_rate_factor(step, self.steps)
        for group in self._optimiser.param_groups:
            group["lr"] = group["base"] * rate
        self._optimiser.step()
        with torch.no_grad():
            for name, average in self._average.items():
                # The decay is smaller at first; otherwise the initial weights would dominate.
                decay = min(settings.ema_decay, (step + 1) / (step + 10))
                average.lerp_(self._weights[name], 1 - decay)
        return value, norm

    def _check_finite(self, value: float, step: int, what: str) -> None:
        if math.isfinite(value):
            return
        settings = self._settings
        saved = "nothing was saved yet"
        if (self._state.folder / STATE).is_file():
            saved = f"the last checkpoint is in {self._state.folder}"
        if self.progress.best_step:
            saved += f", and the best weights are those of step {self.progress.best_step:,}"
        raise UserError(
            f"{what} became {value} in step {step + 1:,} of {self.steps:,} (epoch "
            f"{step // self._schedule.steps + 1}); {saved}. Lower --learning-rate, to about "
            f"{min(settings.learning_rate / 4, default_learning_rate(settings.rank)):g}, in "
            "another --run."
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
                self._state.save_best(progress.step, weights)
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
