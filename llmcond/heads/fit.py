"""Fitting a supervised head on arrays: Adam, dropout, and the best epoch on dev."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from llmcond.errors import UserError
from llmcond.heads.batches import Loader
from llmcond.heads.ensemble import Ensemble
from llmcond.heads.module import HeadModule, seeded
from llmcond.heads.objectives import Objective, RatedBatch, check_contrasts, contrast_groups
from llmcond.heads.pairs import DevScore, Fit, H, OnEpoch, OnStep, PairArrays
from llmcond.heads.settings import GradientSettings, TrainingSettings
from llmcond.metrics import METRICS, Metric
from llmcond.system import free_memory, native_bfloat16

#: Heads of so many parameters are multiplied in bfloat16 where the device does that natively.
_LARGE = 2**21
#: Values in memory for each parameter: itself, its gradient, two moments of Adam, the best epoch.
_COPIES = 5
#: Between the seeds of an ensemble's heads: so far that seeds 0, 1, 2 ... share none.
_SEED_STEP = 2**20


def fit_by_gradient(
    family: type[HeadModule],
    settings: TrainingSettings,
    pairs: PairArrays,
    dev: PairArrays | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "cpu",
    metric: Metric = METRICS["spearman"],
) -> tuple[HeadModule, Fit]:
    """Fit a head, or each head of an ensemble; return it on the CPU, and how it went.

    The weights of the epoch that ``metric`` calls the best on dev are kept, without dev those of
    the last one; the learning curve has it as ``dev_NAME``. Every random
    number comes from generators of their own, so the same seed gives the same head on the same
    machine. Features stay as they are given; float32 copies are made of a batch only.

    Raises:
        UserError: parameters that do not fit into memory, no contrastive pairs for an objective
            that needs them, or a loss that became NaN or infinite.
    """
    fitted = [
        _fit_one(family, settings, pairs, dev, own, on_epoch, torch.device(device), metric)
        for own in spread_seeds(seed, settings.members)
    ]
    if len(fitted) == 1:
        return fitted[0]
    curves = [{key: fit.record.get(key) for key in ("best_epoch", "curve")} for _, fit in fitted]
    first = fitted[0][1]
    module = Ensemble([module for module, _ in fitted]).finished()
    return module, Fit({**first.record, "members": curves}, first.notes)


def spread_seeds(seed: int, members: int) -> list[int]:
    """Return the seed of each head of an ensemble; the first is the ensemble's own."""
    return [(seed + number * _SEED_STEP) % 2**32 for number in range(members)]


def since_best(curve: Sequence[Mapping[str, Any]], key: str, metric: Metric) -> int:
    """Return how many entries of a learning curve come after the one with the best score on dev.

    That is the first of equal ones. A score of None is undefined, as where all similarities are
    equal, and never better than one that is defined; while none is, the last entry counts.
    """
    # An entry that a training wrote when another metric chose has no such score.
    scores = [entry.get(key) for entry in curve]
    best = metric.best((score for score in scores if score is not None), default=None)
    return 0 if best is None else len(scores) - 1 - scores.index(best)


def _fit_one(
    family: type[HeadModule],
    settings: TrainingSettings,
    pairs: PairArrays,
    dev: PairArrays | None,
    seed: int,
    on_epoch: OnEpoch,
    device: torch.device,
    metric: Metric,
) -> tuple[HeadModule, Fit]:
    dims = pairs.dim, pairs.dim_condition
    n_parameters = check_memory(family, settings, dims, device)
    (module, objective), generator = seeded(
        lambda: (family(settings, *dims), Objective(settings)), seed
    )
    if not n_parameters:
        note = "the head has no parameters, so nothing is fitted"
        return module.finished(), Fit({"selected_on": None}, (note,))
    module.seed_dropout(seed)
    module.in_bfloat16 = _in_bfloat16(module, n_parameters, device)
    module.to(device)
    objective.to(device)
    # One kernel for all of a step; decoupled decay of 0 is plain Adam.
    optimiser = torch.optim.AdamW(
        [*module.parameters(), *objective.parameters()],
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    counts = check_contrasts(pairs.pair, pairs.rating, settings)
    if counts and pairs.pair is not None:
        # The two rows of a contrastive pair are read at once.
        pairs = pairs.take(np.argsort(contrast_groups(pairs.pair), kind="stable"))
    half = torch.bfloat16 if module.in_bfloat16 else torch.float32
    loader = Loader(pairs, settings, generator, half, device)
    on_dev = None
    if dev is not None and len(dev):
        scorer = Loader(dev, settings, generator, torch.float32, device)
        on_dev = DevScore(metric, partial(_dev_score, metric=metric, dev=dev, loader=scorer))

    def train(epoch: int, on_step: OnStep) -> float:
        return _run_epoch(module, objective, loader, optimiser, on_step)

    chosen, curve = best_epoch(
        module, train, lambda: module, on_dev, on_epoch, f"dev_{metric.name}"
    )
    record = {
        **chosen,
        "n_parameters": n_parameters,
        "steps_per_epoch": loader.steps,
        "precision": "bfloat16" if module.in_bfloat16 else "float32",
        **counts,
        "curve": curve,
    }
    notes = []
    if chosen["selected_on"] is None and dev is not None:
        notes.append(
            "the dev score is undefined (all ratings or all predictions there are equal), so it "
            "chose no epoch: the last one is kept"
        )
    if len(pairs) < settings.batch_size:
        notes.append(
            f"the {len(pairs):,} training rows fill no batch of {settings.batch_size:,}, so every "
            "epoch is one step; lower batch_size for more"
        )
    return module.finished(), Fit(record, tuple(notes))


def best_epoch(
    module: HeadModule,
    train: Callable[[int, OnStep], float],
    current: Callable[[], H],
    dev: DevScore[H] | None,
    on_epoch: OnEpoch,
    key: str,
) -> tuple[dict[str, Any], list[dict[str, float | None]]]:
    """Train a head epoch by epoch, and leave it as it was after the best one.

    Args:
        module: its settings say how many epochs at most, and when to stop.
        train: trains for an epoch, whose number it takes, from 1, and calls what it takes after
            each step; returns the mean loss.
        current: returns the head as it is now, for ``dev``.
        dev: chooses the epoch; None: the last one is kept.
        on_epoch: called after each epoch, and within it.
        key: what the learning curve calls that score.

    Returns:
        Which epoch was the best and by what, and the learning curve.

    Raises:
        UserError: the loss became NaN or infinite.
    """
    settings, best, number = module.settings, {}, 0
    curve: list[dict[str, float | None]] = []
    for epoch in range(1, settings.epochs + 1):
        loss = train(epoch, partial(_report_step, on_epoch, epoch, settings.epochs))
        if not math.isfinite(loss):
            raise UserError(
                f"the loss became {loss} in epoch {epoch}. Lower learning_rate, to "
                f"{settings.learning_rate / 10:g} or so."
            )
        found = math.nan if dev is None else dev.of(current())
        curve.append({"epoch": epoch, "loss": loss, key: None if math.isnan(found) else found})
        on_epoch(epoch, settings.epochs, found)
        since = 0 if dev is None else since_best(curve, key, dev.metric)
        if not since:
            number = epoch
            best = {name: value.clone() for name, value in module.state_dict().items()}
        elif since >= settings.patience:
            break
    module.load_state_dict(best)
    selected = curve[number - 1][key] is not None
    return {"best_epoch": number, "selected_on": "dev" if selected else None}, curve


def _report_step(on_epoch: OnEpoch, epoch: int, epochs: int, done: int, steps: int) -> None:
    if done < steps:
        on_epoch(epoch - 1 + done / steps, epochs, None)


def check_memory(
    family: type[HeadModule],
    settings: GradientSettings,
    dims: tuple[int, ...],
    device: torch.device,
) -> int:
    """Return how many parameters a head has, if there is memory to fit them."""
    with torch.device("meta"):  # no memory is needed to count its parameters
        n_parameters = sum(value.numel() for value in family(settings, *dims).parameters())
    needed = 4 * _COPIES * n_parameters
    free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise UserError(
            f"this head has {n_parameters:,} parameters, which take {needed / 2**30:,.1f} GiB to "
            f"fit, and {free / 2**30:,.1f} GiB are free. Lower its dim, or its "
            "rank if it has one."
        )
    return n_parameters


def _in_bfloat16(module: HeadModule, n_parameters: int, device: torch.device) -> bool:
    precision = module.settings.precision
    if not module.multiplies_in_bfloat16:
        if precision == "bfloat16":
            raise UserError("this head multiplies in float32 only; leave out precision=bfloat16.")
        return False
    if precision == "auto" and n_parameters < _LARGE:
        return False
    return in_bfloat16(precision, device)


def in_bfloat16(precision: str, device: torch.device) -> bool:
    """Return whether to multiply in bfloat16; ``auto``: where a device does that natively."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        # Before compute capability 8.0 GPUs emulate it.
        return torch.cuda.get_device_capability(device)[0] >= 8
    return native_bfloat16()


def _run_epoch(
    module: HeadModule,
    objective: Objective,
    loader: Loader,
    optimiser: torch.optim.Optimizer,
    on_step: OnStep,
) -> float:
    """Train on all rows; return the mean loss of a row."""
    total: torch.Tensor | float = 0.0
    module.train()
    steps = loader.steps
    for done, (batch, rating, pair, contrastive) in enumerate(loader.shuffled(), 1):
        first, second = module(*batch).chunk(2)
        loss = objective(first, second, rating, RatedBatch(module.similarity, pair, contrastive))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total = total + loss.detach() * len(rating)
        on_step(done, steps)
    return float(total) / len(loader.rating)


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
