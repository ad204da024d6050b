"""Fitting a head on arrays: the loop that all kinds of heads share, and heads of rated pairs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from llmcond.arrays import as_matrix
from llmcond.errors import UserError
from llmcond.heads.base import FittedHead, fitted_class
from llmcond.heads.batches import Loader, RatedRows
from llmcond.heads.module import Ensemble, HeadModule, seeded
from llmcond.heads.objectives import Objective, RatedBatch, check_contrasts, contrast_groups
from llmcond.heads.pairs import SCORE, DevScore, Fit, H, OnEpoch, PairArrays
from llmcond.heads.recipes import Recipe
from llmcond.metrics import METRICS, Metric
from llmcond.system import choose_device, free_memory, native_bfloat16

M = TypeVar("M", bound=HeadModule)

#: Heads of so many parameters are multiplied in bfloat16 where the device does that natively.
_LARGE = 2**21
#: Values in memory for each parameter: itself, its gradient, two moments of Adam, the best epoch.
_COPIES = 5
#: Training vectors compared at a time.
_BLOCK = 1_024
#: Between the seeds of an ensemble's heads: so far that seeds 0, 1, 2 ... share none.
_SEED_STEP = 2**20


class Fitting(ABC, Generic[M, H]):
    """One head while it is fitted: AdamW, dropout, and the best epoch on dev.

    A kind of head defines how its module is made, what its batches are and the loss of one. Every
    random number comes from generators of their own, so the same seed gives the same head on the
    same machine.

    Args:
        recipe: its family and settings.
        dims: sizes of the features, as the family is made with.
        dev: chooses the epoch; None: the last one is kept.
        seed: of the module's start, dropout and the order of rows.
        score_name: what the learning curve calls the score on dev.
    """

    #: How many rows an epoch has; not needed where a kind defines its own batches.
    n_rows: int

    def __init__(
        self,
        recipe: Recipe,
        dims: tuple[int, ...],
        data: Any,
        dev: DevScore[H] | None,
        device: torch.device,
        seed: int,
        score_name: str = SCORE,
    ) -> None:
        self.recipe, self.settings, self.dims, self.data = recipe, recipe.settings, dims, data
        self.dev, self.device, self.seed, self.score_name = dev, device, seed, score_name
        self.n_parameters = _check_memory(recipe, dims, device)
        self.module, self.generator = seeded(self.make, seed)

    def make(self) -> M:
        """Make the module; random numbers come from PyTorch's own generator."""
        family: Any = self.recipe.family
        module: M = family(self.settings, *self.dims)
        return module

    def prepare(self) -> None:
        """Prepare what batches are made of; called only where there are parameters to fit."""

    @property
    def steps(self) -> int:
        """The number of batches of an epoch."""
        return -(-self.n_rows // int(self.settings.batch_size))

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield the batches of an epoch, each with its size: by default positions, shuffled."""
        order = torch.randperm(self.n_rows, generator=self.generator).numpy()
        for rows in np.array_split(order, self.steps):
            yield len(rows), rows

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of a batch, a scalar."""

    @abstractmethod
    def current(self) -> H:
        """Return the head as it is now, for ``dev``."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimiser's groups: the head's own parameters, then the objective's."""
        return [{"params": list(self.module.parameters())}]

    def rate(self, step: int, steps: int) -> float:
        """Return what the learning rate is multiplied by at a step, of ``steps`` in all."""
        return 1.0

    def in_bfloat16(self) -> bool:
        """Return whether to multiply in bfloat16; ``auto``: where the device does that natively."""
        if self.settings.precision != "auto":
            return bool(self.settings.precision == "bfloat16")
        if self.device.type == "cuda":
            # Before compute capability 8.0 GPUs emulate it.
            return torch.cuda.get_device_capability(self.device)[0] >= 8
        return native_bfloat16()

    def record(self) -> dict[str, Any]:
        """Return what head.json records of this kind's fit besides what all kinds have."""
        return {}

    def finished_copy(self) -> M:
        """Return a copy of the module as a fitted head has it; what dropout draws goes on."""
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        with torch.device("meta"):
            copied = Fitting.make(self)
        copied.load_state_dict(state, assign=True)
        return copied.finished()

    def run(self, on_epoch: OnEpoch) -> tuple[M, Fit]:
        """Fit the module, and return it on the CPU as it was after the best epoch.

        Raises:
            UserError: the loss became NaN or infinite.
        """
        module, groups, settings = self.module, self.parameter_groups(), self.settings
        if not any(value.numel() for value in groups[0]["params"]):
            note = "the head has no parameters, so nothing is fitted"
            return module.finished(), Fit({"selected_on": None}, (note,))
        module.seed_dropout(self.seed)
        module.multiply_in_bfloat16(self.in_bfloat16())
        module.to(self.device)
        self.prepare()
        # One kernel for all of a step; decoupled decay of 0 is plain Adam.
        optimiser = torch.optim.AdamW(
            groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        best_epoch, curve = self._run_epochs(optimiser, on_epoch)
        selected = curve[best_epoch - 1][self.score_name] is not None
        record = {
            "best_epoch": best_epoch,
            "selected_on": "dev" if selected else None,
            "n_parameters": self.n_parameters,
            "steps_per_epoch": self.steps,
            "precision": "bfloat16" if module.in_bfloat16 else "float32",
            **self.record(),
            "curve": curve,
        }
        return module.finished(), Fit(record)

    def _run_epochs(
        self, optimiser: torch.optim.Optimizer, on_epoch: OnEpoch
    ) -> tuple[int, list[dict[str, float | None]]]:
        """Train until the best epoch is known; return it and the learning curve.

        The module then has the weights of that epoch.
        """
        settings, dev, key, best, number = self.settings, self.dev, self.score_name, {}, 0
        curve: list[dict[str, float | None]] = []
        for epoch in range(1, settings.epochs + 1):
            loss = self._run_epoch(epoch, optimiser, on_epoch)
            if not math.isfinite(loss):
                raise UserError(
                    f"the loss became {loss} in epoch {epoch}. Lower learning_rate, to "
                    f"{settings.learning_rate / 10:g} or so."
                )
            score = math.nan if dev is None else dev.of(self.current())
            curve.append({"epoch": epoch, "loss": loss, key: None if math.isnan(score) else score})
            on_epoch(epoch, settings.epochs, score)
            since = 0 if dev is None else since_best(curve, key, dev.metric)
            if not since:
                number = epoch
                best = {name: value.clone() for name, value in self.module.state_dict().items()}
            elif since >= settings.patience:
                break
        self.module.load_state_dict(best)
        return number, curve

    def _run_epoch(self, epoch: int, optimiser: torch.optim.Optimizer, on_epoch: OnEpoch) -> float:
        """Train on all batches; return the mean loss of a row."""
        settings, steps, n_rows = self.settings, self.steps, 0
        total: Tensor | float = 0.0
        self.module.train()
        for step, (size, batch) in enumerate(self.batches()):
            rate = self.rate((epoch - 1) * steps + step, settings.epochs * steps)
            for group in optimiser.param_groups:
                group["lr"] = settings.learning_rate * rate
            loss = self.loss(batch)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total, n_rows = total + loss.detach() * size, n_rows + size
            if step + 1 < steps:
                on_epoch(epoch - 1 + (step + 1) / steps, settings.epochs, None)
        return float(total) / n_rows


def fit_members(
    fitting: Callable[[int], Fitting[M, H]], members: int, seed: int, on_epoch: OnEpoch
) -> tuple[Any, Fit]:
    """Fit a head, or each head of an ensemble by a seed of its own; return it, and how it went.

    ``fitting`` returns the :class:`Fitting` of one member, given its seed.
    """
    seeds = ((seed + number * _SEED_STEP) % 2**32 for number in range(members))
    fitted = [fitting(member_seed).run(on_epoch) for member_seed in seeds]
    module, fit = fitted[0]
    if members == 1:
        return module, fit
    curves = [{key: fit.record.get(key) for key in ("best_epoch", "curve")} for _, fit in fitted]
    ensemble = Ensemble([module for module, _ in fitted]).finished()
    return ensemble, Fit({**fit.record, "members": curves}, fit.notes)


def since_best(curve: Sequence[Mapping[str, Any]], key: str, metric: Metric) -> int:
    """Return how many entries of a learning curve come after the one with the best score on dev.

    That is the first of equal ones. A score of None is undefined, as where all similarities are
    equal, and never better than one that is defined; while none is, the last entry counts.
    """
    # An entry that a training wrote when another metric chose has no such score.
    scores = [entry.get(key) for entry in curve]
    best = metric.best((score for score in scores if score is not None), default=None)
    return 0 if best is None else len(scores) - 1 - scores.index(best)


def _check_memory(recipe: Recipe, dims: tuple[int, ...], device: torch.device) -> int:
    """Return how many parameters a head has, if there is memory to fit them."""
    with torch.device("meta"):  # no memory is needed to count its parameters
        module = recipe.family(recipe.settings, *dims)
    n_parameters = sum(value.numel() for value in module.parameters())
    needed = 4 * _COPIES * n_parameters
    free = free_memory()
    if device.type != "cpu":
        # PyTorch keeps what the members fitted before have freed, and gives it to this one.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    if needed > free:
        raise UserError(
            f"this head has {n_parameters:,} parameters, which take {needed / 2**30:,.1f} GiB to "
            f"fit, and {free / 2**30:,.1f} GiB are free. Lower its dim, or its "
            "rank if it has one."
        )
    return n_parameters


def fit_by_gradient(
    recipe: Recipe,
    pairs: PairArrays,
    dev: PairArrays | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "cpu",
    metric: Metric = METRICS["spearman"],
) -> tuple[HeadModule, Fit]:
    """Fit a head of rated pairs, or each head of an ensemble; return it on the CPU.

    The weights of the epoch that ``metric`` calls the best on dev are kept, without dev those of
    the last one; the learning curve has it as ``dev_NAME``. Features stay as they are given;
    float32 copies are made of a batch only.

    Raises:
        UserError: parameters that do not fit into memory, no contrastive pairs for an objective
            that needs them, or a loss that became NaN or infinite.
    """
    where, scored, settings = torch.device(device), None, recipe.settings
    if dev is not None and len(dev):
        loader = Loader(dev, settings, torch.Generator(), torch.float32, where)
        scored = DevScore(metric, partial(_dev_score, metric=metric, dev=dev, loader=loader))
    name = f"dev_{metric.name}"
    dims = pairs.dim, pairs.dim_condition
    fitting = partial(_PairFitting, recipe, dims, pairs, scored, where, score_name=name)
    module, fit = fit_members(fitting, settings.members, seed, on_epoch)
    if fit.notes:  # nothing was fitted
        return module, fit
    notes = []
    if fit.record["selected_on"] is None and dev is not None:
        notes.append(
            "the dev score is undefined (all ratings or all predictions there are equal), so it "
            "chose no epoch: the last one is kept"
        )
    if len(pairs) < settings.batch_size:
        notes.append(
            f"the {len(pairs):,} training rows fill no batch of {settings.batch_size:,}, so every "
            "epoch is one step; lower batch_size for more"
        )
    return module, replace(fit, notes=tuple(notes))


def fit_recipe(
    recipe: Recipe,
    pairs: PairArrays,
    dev: PairArrays | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "auto",
    metric: Metric = METRICS["spearman"],
) -> FittedHead:
    """Fit a head on rated pairs; ``metric`` on ``dev`` chooses the epoch, where there are epochs.

    ``device`` is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; the fitted head is on the CPU.

    Raises:
        UserError: a dimension above that of the features, too few ratings, a loss that diverges,
            or a device that this machine lacks.
    """
    device, family = choose_device(device), recipe.family
    if not issubclass(fitted_class(family), FittedHead):
        raise UserError(f"the head {recipe.name} ranks candidates; it takes no rated pairs.")
    if recipe.dim is not None and recipe.dim > pairs.dim:
        raise UserError(
            f"dim is {recipe.dim}, but the features have {pairs.dim}: a head never enlarges them. "
            f"Set dim to {pairs.dim} or less."
        )
    distinct = len(set(pairs.rating.tolist()))
    if family.supervised and distinct < 2:
        raise UserError(
            f"the training split has {distinct} distinct ratings over {len(pairs)} rated rows; at "
            "least 2 are needed to fit a head."
        )
    if not family.is_identity and not _varies(pairs):
        raise UserError(
            f"all {2 * len(pairs):,} training vectors are equal, so there is nothing to fit. Were "
            "they made by the right prompt?"
        )
    if not family.conditioned:
        # So that a saved head says what it takes.
        pairs = replace(pairs, condition=None)
        dev = None if dev is None else replace(dev, condition=None)
    elif not pairs.dim_condition:
        raise UserError(
            f"the {recipe.kind} head takes the features of each condition, and none were given: "
            "PairArrays(..., condition=...)."
        )
    if family.supervised:
        module, fit = fit_by_gradient(recipe, pairs, dev, seed, on_epoch, device, metric)
    else:
        module = family(recipe.settings, pairs.dim, pairs.dim_condition)
        fit = module.solve(pairs, seed)
        module.finished()
    return FittedHead(recipe.kind, family, module, seed, fit)


def _varies(pairs: PairArrays) -> bool:
    """Return whether any two training vectors differ; as a rule the first ones do."""
    first = as_matrix(pairs.first).read(slice(0, 1))
    blocks = (
        as_matrix(side).read(slice(start, start + _BLOCK))
        for side in (pairs.first, pairs.second)
        for start in range(0, len(pairs), _BLOCK)
    )
    return any(bool((block != first).any()) for block in blocks)


class _PairFitting(Fitting[HeadModule, HeadModule]):
    """A head that is fitted on rated pairs, :class:`PairArrays`."""

    def make(self) -> HeadModule:
        module = super().make()
        self._objective = Objective(self.settings)
        return module

    def prepare(self) -> None:
        pairs, settings = self.data, self.settings
        self._objective.to(self.device)
        self._counts = check_contrasts(pairs.pair, pairs.rating, settings)
        if self._counts:
            # The two rows of a contrastive pair are read at once.
            pairs = pairs.take(np.argsort(contrast_groups(pairs.pair), kind="stable"))
        dtype = torch.bfloat16 if self.module.in_bfloat16 else torch.float32
        self._loader = Loader(pairs, settings, self.generator, dtype, self.device)

    @property
    def steps(self) -> int:
        return self._loader.steps

    def batches(self) -> Iterator[tuple[int, RatedRows]]:
        return ((len(batch[1]), batch) for batch in self._loader.shuffled())

    def loss(self, batch: RatedRows) -> Tensor:
        sentences, rating, pair, contrastive = batch
        first, second = self.module(*sentences).chunk(2)
        rows = RatedBatch(self.module.similarity, pair, contrastive)
        loss: Tensor = self._objective(first, second, rating, rows)
        return loss

    def current(self) -> HeadModule:
        return self.module

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [*super().parameter_groups(), {"params": list(self._objective.parameters())}]

    def in_bfloat16(self) -> bool:
        precision = self.settings.precision
        if not self.module.multiplies_in_bfloat16:
            if precision == "bfloat16":
                raise UserError(
                    "this head multiplies in float32 only; leave out precision=bfloat16."
                )
            return False
        if precision == "auto" and self.n_parameters < _LARGE:
            return False
        return super().in_bfloat16()

    def record(self) -> dict[str, Any]:
        return self._counts


@torch.no_grad()
def _dev_score(module: HeadModule, metric: Metric, dev: PairArrays, loader: Loader) -> float:
    """Return the score of a module's similarities on dev; NaN where it is undefined."""
    module.eval()
    in_bfloat16, module.in_bfloat16 = module.in_bfloat16, False
    parts = [
        module.similarity(*module(*batch).chunk(2)).cpu().numpy() for batch in loader.in_order()
    ]
    module.in_bfloat16 = in_bfloat16
    similarity = np.concatenate(parts).astype(np.float64)
    return metric(similarity, dev.rating, dev.groups)
