"""The training loop: steps, the score on dev, checkpoints, and an exact way to go on from one."""

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
from llmcond.finetune.base import R, Shared, TrainedModel
from llmcond.finetune.settings import TuneSettings, usual_rate
from llmcond.finetune.state import STATE, Progress, StateFolder
from llmcond.heads.batches import GroupSampler
from llmcond.heads.fit import since_best

#: Called after each step and each evaluation.
OnStep = Callable[[Progress, int, float], None]
#: What AdamW keeps of each weight.
_MOMENTS = "exp_avg", "exp_avg_sq"


class Order:
    """The ``steps`` of every epoch, each cut into parts for processes and accumulation.

    Rows are a function of the seed, the epoch and the step, and of nothing else.
    """

    def __init__(
        self, group: NDArray[np.int64], settings: TuneSettings, seed: int, processes: int
    ) -> None:
        """Plan steps of about ``settings.batch_size`` rows, shared by so many processes.

        Rows of a ``group``, (n,), stay together in one part: a row by itself, or the two of a
        contrastive pair.

        Raises:
            UserError: a step has fewer groups than parts.
        """
        self._sampler, self._seed = GroupSampler(group), seed
        self.steps = -(-len(group) // settings.batch_size)
        self._parts = settings.gradient_accumulation_steps * processes
        least = len(self._sampler) // self.steps
        if least < self._parts:
            kind = "rows" if len(self._sampler) == len(group) else "sentence pairs"
            raise UserError(
                f"a step of batch_size {settings.batch_size} has {least} {kind}, too few for "
                f"{processes} processes with gradient_accumulation_steps "
                f"{settings.gradient_accumulation_steps}. Raise --batch-size or lower "
                "--gradient-accumulation-steps."
            )

    def epoch(self, number: int) -> list[list[Positions]]:
        """Return the rows of an epoch's steps, part by part; steps are of like size."""
        drawn = np.random.Generator(np.random.SFC64([self._seed, number]))
        order = drawn.permutation(len(self._sampler))
        return self._sampler.even_batches(order, self.steps, self._parts)


class Trainer(Generic[R]):
    """Trains a model, step by step; ``steps`` are those of all epochs."""

    def __init__(
        self,
        model: TrainedModel[R, Any],
        train: R,
        dev: R | None,
        settings: TuneSettings,
        accelerator: Accelerator,
        state: StateFolder,
        pace: float = 1.0,
    ) -> None:
        """Prepare a training, and go on where an earlier one was stopped.

        Rows of ``dev`` choose the weights; without them the last ones are kept. All learning
        rates are multiplied by ``pace``.

        Raises:
            UserError: it was begun with other settings, or has too few rows.
            LlmcondError: its checkpoint was damaged.
        """
        self.model, self._train, self._dev, self._settings = model, train, dev, settings
        self._accelerator, self._state, self._seed = accelerator, state, model.seed
        self._order = Order(model.groups(train), settings, self._seed, accelerator.num_processes)
        self.steps = self._order.steps * settings.epochs
        self._weights, self._pace = model.trained(), pace
        averaged = self._weights if settings.ema_decay else {}
        self._average = {name: value.detach().clone() for name, value in averaged.items()}
        self.progress = Progress()
        self._optimiser = accelerator.prepare_optimizer(
            torch.optim.AdamW(self._groups(), fused=True), device_placement=False
        )
        self._resume()
        self._wrapped = accelerator.prepare_model(model, device_placement=False)

    def _groups(self) -> list[dict[str, Any]]:
        settings, head = self._settings, self.model.head.settings
        rates = settings.learning_rate, settings.weight_decay
        # No head at all has neither.
        of_head = getattr(head, "learning_rate", rates[0]), getattr(head, "weight_decay", 0.0)
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for name, value in self._weights.items():
            rate, decay = rates if name.startswith("encoder.") else of_head
            rate *= self._pace
            # Biases and gains do not decay.
            groups.setdefault((rate, decay if value.ndim > 1 else 0.0), []).append(value)
        return [
            {"params": values, "lr": rate, "weight_decay": decay, "base": rate}
            for (rate, decay), values in groups.items()
        ]

    def _resume(self) -> None:
        found = self._state.load()
        if found is None:
            return
        self.progress, tensors = found
        copy_tensors(tensors, "weights.", self._weights)
        copy_tensors(tensors, "average.", self._average)
        inner = self._optimiser.optimizer
        for name, value in self._weights.items():
            if f"exp_avg.{name}" not in tensors:
                continue
            own = {key: tensors[f"{key}.{name}"].to(value.device) for key in _MOMENTS}
            step = torch.tensor(float(self.progress.updates), dtype=torch.float32)
            inner.state[value] = {"step": step.to(value.device), **own}
        scaler: Any = self._accelerator.scaler
        if scaler is not None and self.progress.scaler:
            scaler.load_state_dict(dict(self.progress.scaler))

    def _save(self) -> None:
        if not self._accelerator.is_main_process:
            return
        tensors = {f"weights.{name}": value for name, value in self._weights.items()}
        tensors |= {f"average.{name}": value for name, value in self._average.items()}
        # Weights that no loss has used yet, such as one of the roles under `ccl`, have no state.
        states = self._optimiser.optimizer.state
        used = {name: states[value] for name, value in self._weights.items() if states[value]}
        for name, own in used.items():
            tensors |= {f"{key}.{name}": own[key] for key in _MOMENTS}
        scaler: Any = self._accelerator.scaler
        if scaler is not None:
            self.progress = replace(self.progress, scaler=scaler.state_dict())
        # In float16 some steps update nothing.
        updates = max((int(own["step"]) for own in used.values()), default=0)
        self.progress = replace(self.progress, updates=updates)
        self._state.save(self.progress, tensors)

    def run(self, on_step: OnStep) -> None:
        """Train until the last step, or until dev has not got better for long enough.

        Raises:
            UserError: the loss or the gradients became NaN or infinite; where and what is kept.
            DiskFullError: no room for a checkpoint; the one before is kept.
            OutOfMemoryError: a step does not fit.
        """
        settings = self._settings
        began = time.monotonic() - self.progress.seconds
        self.model.train()
        epoch, parts = -1, list[list[NDArray[np.int64]]]()
        while not self.progress.done:
            step = self.progress.step
            number, place = divmod(step, self._order.steps)
            if number != epoch:
                epoch, parts = number, self._order.epoch(number)
            loss = self._try(parts[place], step)
            self.progress = replace(
                self.progress,
                step=step + 1,
                loss=self.progress.loss + loss,
                losses=self.progress.losses + 1,
                seconds=time.monotonic() - began,
            )
            count, steps = min(settings.evaluations, self._order.steps), self._order.steps
            scored = (place + 1) * count // steps > place * count // steps
            if scored:
                self._evaluate(number + 1)
            on_step(self.progress, self.steps, loss)
            if scored or self.progress.step % settings.checkpoint_steps == 0:
                self._save()

    def _try(self, parts: list[NDArray[np.int64]], step: int) -> float:
        """Take a step; say what to do where there is no memory for it."""
        try:
            return self._step(parts, step)
        except (OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not (isinstance(error, OutOfMemoryError) or is_out_of_memory(error)):
                raise
            settings = self._settings
            advice = [] if settings.gradient_checkpointing else ["--gradient-checkpointing"]
            split = settings.gradient_accumulation_steps
            advice.append(f"--gradient-accumulation-steps {2 * split}")
            raise LlmcondError(
                f"ran out of memory in step {step + 1:,}, with {settings.batch_size} rows in "
                f"{split} parts. Try {' or '.join(advice)}, or a smaller "
                "--batch-size, in another --run."
            ) from error

    def _step(self, parts: list[NDArray[np.int64]], step: int) -> float:
        accelerator, settings = self._accelerator, self._settings
        share, count = accelerator.process_index, accelerator.num_processes
        split = settings.gradient_accumulation_steps
        mine = parts[share * split : (share + 1) * split]
        total = sum(len(rows) for rows in parts)
        self._optimiser.zero_grad()
        loss = torch.zeros((), device=self.model.engine.out)
        for number, rows in enumerate(mine):
            last = number == len(mine) - 1
            # Gradients of several processes are added up once, with the last part.
            with nullcontext() if last else accelerator.no_sync(self._wrapped):
                # Gradients are averaged over processes, so that each row of the step weighs alike.
                seed = [self._seed, step, share, number]
                part = self._wrapped(self._train, rows, seed) * (len(rows) * count / total)
                accelerator.backward(part)
            loss += part.detach() / count
        value = float(accelerator.reduce(loss, "sum"))
        self._check(value, step, "the loss")
        norm = accelerator.clip_grad_norm_(
            self._weights.values(), settings.max_grad_norm or math.inf
        )
        if accelerator.scaler is None:  # float16 meets infinite gradients, and skips the step
            self._check(float(norm), step, "the norm of the gradients")
        rate = settings.rate(step, self.steps)
        for group in self._optimiser.param_groups:
            group["lr"] = group["base"] * rate
        self._optimiser.step()
        with torch.no_grad():
            for name, average in self._average.items():
                # At first it forgets faster, or it would be of where training began.
                decay = min(settings.ema_decay, (step + 1) / (step + 10))
                average.lerp_(self._weights[name], 1 - decay)
        return value

    def _check(self, value: float, step: int, what: str) -> None:
        if math.isfinite(value):
            return
        settings = self._settings
        kept = "nothing was kept yet"
        if (self._state.folder / STATE).is_file():
            kept = f"the last checkpoint is kept in {self._state.folder}"
        if self.progress.best_step:
            kept += f", and the best weights, of step {self.progress.best_step:,}"
        raise UserError(
            f"{what} became {value} in step {step + 1:,} of {self.steps:,} (epoch "
            f"{step // self._order.steps + 1}); {kept}. Lower --learning-rate, to "
            f"{min(settings.learning_rate / 4, usual_rate(settings.rank)):g} or so, in another "
            "--run."
        )

    def _evaluate(self, epoch: int) -> None:
        progress, shared = self.progress, over_processes(self._accelerator)
        weights = self._average or self._weights
        with _borrowed(self._weights, self._average):
            found = None if self._dev is None else self.model.score(self._dev, shared)
        loss = progress.loss / max(1, progress.losses)
        entry = {"step": progress.step, "epoch": epoch, "loss": loss, self.model.on_dev: found}
        curve = (*progress.curve, entry)
        since = since_best(curve, self.model.on_dev, self.model.metric)
        if not since:
            progress = replace(progress, best_step=progress.step, best_score=found)
            if self._accelerator.is_main_process:
                self._state.save_best(progress.step, weights)
        done = progress.step >= self.steps or since >= self._settings.early_stopping_patience
        self.progress = replace(progress, curve=curve, loss=0.0, losses=0, done=done)

    def keep_best(self) -> None:
        """Put the weights of the best evaluation into the model."""
        copy_tensors(self._state.best(), "", self._weights)


def over_processes(accelerator: Accelerator) -> Shared:
    """Return what computes (n, k) values of n things, each process those of a share."""

    def shared(n: int, compute: Callable[[Positions], NDArray[np.float32]]) -> NDArray[np.float32]:
        count = accelerator.num_processes
        # As many for each process: the last ones are computed twice.
        mine = np.arange(accelerator.process_index, -(-n // count) * count, count) % n
        with accelerator.autocast():
            own = compute(mine)
        if count == 1:
            return own
        gathered = accelerator.gather(torch.from_numpy(own).to(accelerator.device))
        parts = gathered.view(count, len(mine), -1).transpose(0, 1).reshape(count * len(mine), -1)
        values: NDArray[np.float32] = parts[:n].cpu().numpy()
        return values

    return shared


def copy_tensors(tensors: Mapping[str, Tensor], prefix: str, into: Mapping[str, Tensor]) -> None:
    """Copy ``tensors[prefix + name]`` into each tensor of ``into``."""
    with torch.no_grad():
        for name, value in into.items():
            value.copy_(tensors[f"{prefix}{name}"])


@contextmanager
def _borrowed(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Let others stand in for weights of the same names within a block."""
    kept = {name: weights[name].detach().clone() for name in others}
    own = {name: weights[name] for name in others}
    copy_tensors(others, "", own)
    try:
        yield
    finally:
        copy_tensors(kept, "", own)
