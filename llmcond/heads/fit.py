"""Fitting of heads on arrays: the loop that all kinds of heads share, and heads of rated pairs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.base.arrays import as_matrix
from llmcond.base.errors import UserError
from llmcond.base.metrics import METRICS, Metric, finite_or_none
from llmcond.base.system import choose_device, computes_natively, free_memory
from llmcond.heads.fitted import (
    FittedHead,
    FittedModule,
    Loader,
    RatedRows,
    fitted_class,
    fitted_head,
)
from llmcond.heads.module import (
    Ensemble,
    HeadModule,
    Objective,
    RatedBatch,
    check_contrasts,
    contrast_groups,
    members_of,
    seeded,
)
from llmcond.heads.numpy_heads import (
    DEV_SCORE_KEY,
    MAX_VALUES,
    DevScore,
    FitReport,
    H,
    OnEpoch,
    PairArrays,
    hold_out,
    in_stage,
    score_key,
)
from llmcond.heads.recipes import Recipe

M = TypeVar("M", bound=HeadModule)

#: Heads with at least this many parameters multiply in bfloat16 if the device supports it natively.
_MIN_BFLOAT16_PARAMETERS = 2**21
#: Values in memory per parameter: the weight, its gradient, two moments of Adam, the best epoch.
_VALUES_PER_PARAMETER = 5
#: Number of training vectors compared at a time.
_BLOCK = 1_024
#: Distance between the seeds of an ensemble's heads, so large that ensembles with the seeds 0, 1,
#: 2 ... have no member seed in common.
_SEED_STEP = 2**20


class HeadTrainer(ABC, Generic[M, H]):
    """One head while it is fitted with AdamW, dropout and selection of the epoch on dev.

    A subclass for a kind of head defines how the module is created, what a batch is and the loss of
    a batch. All random numbers come from separate generators, so the same seed gives the same head
    on the same CPU. On a GPU, some sums are added up in arbitrary order.

    Args:
        recipe: family and settings of the head.
        dims: sizes of the features, as the family's constructor expects them.
        data: training data, as the subclass reads it.
        dev: score that selects the epoch; None: the last epoch is kept.
        device: device to fit on.
        seed: random seed of initialisation, dropout and row order.
        score_name: key of the dev score in the learning curve.
    """

    #: Number of rows per epoch; not needed if a subclass defines its own batches.
    n_rows: int

    def __init__(
        self,
        recipe: Recipe,
        dims: tuple[int, ...],
        data: Any,
        dev: DevScore[H] | None,
        device: torch.device,
        seed: int,
        score_name: str = DEV_SCORE_KEY,
    ) -> None:
        self.recipe, self.settings, self.dims, self.data = recipe, recipe.settings, dims, data
        self.dev, self.device, self.seed, self.score_name = dev, device, seed, score_name
        self.n_parameters = _check_memory(recipe, dims, device)
        self.module, self.generator = seeded(self.create_module, seed)

    def create_module(self) -> M:
        """Create the module; random numbers come from PyTorch's global generator."""
        family: Any = self.recipe.family
        module: M = family(self.settings, *self.dims)
        return module

    def prepare(self) -> None:
        """Prepare the data for batches; called only if there are parameters to fit."""

    @property
    def steps(self) -> int:
        """Number of batches per epoch."""
        return -(-self.n_rows // int(self.settings.batch_size))

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield the batches of an epoch, each with its size: by default shuffled row positions."""
        order = torch.randperm(self.n_rows, generator=self.generator).numpy()
        for rows in np.array_split(order, self.steps):
            yield len(rows), rows

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of a batch, a scalar."""

    def current_head(self) -> H:
        """Return a copy of the current state as a fitted head, to be scored on dev.

        The state of dropout is unchanged.
        """
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        with torch.device("meta"):
            copied = HeadTrainer.create_module(self)
        copied.load_state_dict(state, assign=True)
        head: H = fitted_head(self.recipe.kind, copied, self.seed)
        return head

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimiser's parameter groups: first the head's, then the objective's."""
        return [{"params": list(self.module.parameters())}]

    def learning_rate_factor(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate at a step; ``steps`` is the total number."""
        return 1.0

    def in_bfloat16(self) -> bool:
        """Return whether to multiply in bfloat16; ``auto``: if the device supports it natively."""
        if self.settings.precision != "auto":
            return bool(self.settings.precision == "bfloat16")
        return computes_natively("bfloat16", str(self.device))

    def record(self) -> dict[str, Any]:
        """Return additional entries of the fit's record for this kind of head."""
        return {}

    def run(self, on_epoch: OnEpoch) -> tuple[M, FitReport]:
        """Fit the module; return it on the CPU, as it was after the best epoch, and the record.

        Raises:
            UserError: the loss became NaN or infinite.
        """
        module, groups, settings = self.module, self.parameter_groups(), self.settings
        if not any(value.numel() for value in groups[0]["params"]):
            note = "the head has no parameters, so nothing is fitted"
            return module.freeze(), FitReport({"selected_on": None}, (note,))
        module.seed_dropout(self.seed)
        module.multiply_in_bfloat16(self.in_bfloat16())
        module.to(self.device)
        self.prepare()
        # `fused` runs a whole step in one kernel. AdamW without weight decay equals Adam.
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
        return module.freeze(), FitReport(record)

    def _run_epochs(
        self, optimiser: torch.optim.Optimizer, on_epoch: OnEpoch
    ) -> tuple[int, list[dict[str, float | None]]]:
        """Train until the best epoch is known; return its number and the learning curve.

        The module then has the weights of that epoch.
        """
        settings, dev, key, best, number = self.settings, self.dev, self.score_name, {}, 0
        curve: list[dict[str, float | None]] = []
        for epoch in range(1, settings.epochs + 1):
            loss = self._run_epoch(epoch, optimiser, on_epoch)
            if not math.isfinite(loss):
                raise UserError(
                    f"the loss became {loss} in epoch {epoch}. Lower learning_rate, to "
                    f"about {settings.learning_rate / 10:g}."
                )
            scores = {key: math.nan}
            if dev is not None:
                functions = {key: dev.compute, **dev.others}
                head = self.current_head()
                scores = {name: compute(head) for name, compute in functions.items()}
            defined = {name: finite_or_none(value) for name, value in scores.items()}
            progress = {"epoch": epoch, "step": epoch * self.steps}
            rate = optimiser.param_groups[0]["lr"]
            curve.append({**progress, "loss": loss, "learning_rate": rate, **defined})
            on_epoch(epoch, settings.epochs, curve[-1])
            since = 0 if dev is None else entries_since_best(curve, key, dev.metric)
            if not since:
                number = epoch
                best = {name: value.clone() for name, value in self.module.state_dict().items()}
            elif since >= settings.patience:
                break
        self.module.load_state_dict(best)
        return number, curve

    def _run_epoch(self, epoch: int, optimiser: torch.optim.Optimizer, on_epoch: OnEpoch) -> float:
        """Train on all batches; return the mean loss per row."""
        settings, steps, n_rows = self.settings, self.steps, 0
        total: Tensor | float = 0.0
        self.module.train()
        for step, (size, batch) in enumerate(self.batches()):
            rate = self.learning_rate_factor((epoch - 1) * steps + step, settings.epochs * steps)
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
    fitting: Callable[[int], HeadTrainer[Any, Any]],
    recipe: Recipe,
    seed: int,
    on_epoch: OnEpoch,
    start: FittedModule | None = None,
) -> Any:
    """Fit one head, or the heads of an ensemble with different seeds; return the fitted head.

    Args:
        fitting: function that returns the ``HeadTrainer`` of one member, given its seed.
        recipe: kind of the head, and settings with the number of members.
        seed: random seed of the first member.
        on_epoch: function that is called with the progress.
        start: fitted head with the initial parameters; None: new ones. Each member starts from the
            same member of it.

    Raises:
        UserError: the parameters of ``start`` have other names or shapes, or as ``HeadTrainer``.
    """
    count = recipe.settings.members
    starts: list[Any] = [None] * count if start is None else members_of(start.module)
    if len(starts) != count:
        raise UserError(
            f"the head to start from has {len(starts)} members, but the new head has {count}. "
            f"Set members to {len(starts)}, or start from another head."
        )
    fitted = []
    for number, start_module in enumerate(starts):
        trainer = fitting((seed + number * _SEED_STEP) % 2**32)
        if start_module is not None:
            load_start(trainer.module, start_module)
        in_member = on_epoch if count == 1 else in_stage(on_epoch, f"member-{number}")
        fitted.append(trainer.run(in_member))
    module, fit = fitted[0]
    if count > 1:
        curves = [{key: f.record.get(key) for key in ("best_epoch", "curve")} for _, f in fitted]
        module = Ensemble([member for member, _ in fitted])
        fit = FitReport({**fit.record, "members": curves}, fit.notes)
    return fitted_head(recipe.kind, module, seed, fit)


def load_start(module: HeadModule, start: HeadModule) -> None:
    """Copy the parameters of a fitted module into a new one.

    Raises:
        UserError: their names or shapes differ.
    """
    state, new_state = start.start_state(), module.state_dict()
    for name in {**state, **new_state}:
        shapes = [
            f"the shape {'x'.join(map(str, values[name].shape)) or 1}" if name in values else "none"
            for values in (state, new_state)
        ]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"the head to start from has other parameters than the new head: of {name}, it has "
                f"{shapes[0]}, and the new head has {shapes[1]}. Give both heads the same "
                "settings, such as dim, and features of the same size, or start from another head."
            )
    module.load_state_dict(state)


def entries_since_best(curve: Sequence[Mapping[str, Any]], key: str, metric: Metric) -> int:
    """Return how many entries of a learning curve follow the entry with the best dev score.

    Of equal scores, the first is the best. A score of None is undefined, for example if all
    similarities are equal; it is never better than a defined one. If no score is defined, the last
    entry counts as the best.
    """
    # Entries written when another metric selected the epoch lack this score.
    scores = [entry.get(key) for entry in curve]
    best = metric.best((score for score in scores if score is not None), default=None)
    return 0 if best is None else len(scores) - 1 - scores.index(best)


def _check_memory(recipe: Recipe, dims: tuple[int, ...], device: torch.device) -> int:
    """Return the number of a head's parameters; raise an error if memory is too small to fit it."""
    with torch.device("meta"):  # counts parameters without allocating memory
        module = recipe.family(recipe.settings, *dims)
    n_parameters = sum(value.numel() for value in module.parameters())
    needed = 4 * _VALUES_PER_PARAMETER * n_parameters
    free = free_memory()
    if device.type != "cpu":
        # PyTorch caches memory that previously fitted members freed, and reuses it for this one.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    if needed > free:
        raise UserError(
            f"this head has {n_parameters:,} parameters. Fitting it needs {needed / 2**30:,.1f} "
            f"GiB, but only {free / 2**30:,.1f} GiB are free. Lower its dim, or its rank if it has "
            "one."
        )
    return n_parameters


def fit_recipe(
    recipe: Recipe,
    pairs: PairArrays,
    dev: PairArrays | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "auto",
    metric: Metric = METRICS["spearman"],
    start: FittedHead | None = None,
    curve_splits: Mapping[str, PairArrays] | None = None,
) -> FittedHead:
    """Fit a head on rated pairs.

    Args:
        recipe: the head's recipe.
        pairs: training pairs.
        dev: dev pairs, which select the epoch; None: the last epoch is kept. Heads that are fitted
            in closed form ignore them.
        seed: random seed of initialisation, dropout and row order.
        on_epoch: function that is called with the progress: finished epochs (1.5: half of the
            second epoch is done), the maximum number of epochs, and after each epoch its entry in
            the learning curve, otherwise None.
        device: device to fit on: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        metric: metric on dev that selects the epoch; Spearman correlation by default.
        start: fitted head with the initial parameters; None: new ones. Heads that are fitted in
            closed form ignore it.
        curve_splits: pairs of other splits by name. If there are dev pairs, the learning curve also
            has the metric on these splits after each epoch, which does not influence the fit.

    Returns:
        The fitted head, on the CPU.

    Raises:
        UserError: the recipe ranks candidates, its dim exceeds that of the features, it needs
            features of conditions that are missing, the ratings or vectors are all equal, the
            parameters of ``start`` have other shapes, the loss diverges, or the machine lacks the
            device.

    Examples:
        >>> import numpy as np
        >>> from llmcond.heads import PairArrays, fit_recipe, load_recipe
        >>> first, second = np.random.default_rng(0).normal(size=(2, 40, 8))
        >>> pairs = PairArrays(first, second, rating=np.linspace(0, 1, 40))
        >>> recipe = load_recipe("linear").with_settings(
        ...     {"dim": 4, "epochs": 2, "batch_size": 16}, "example"
        ... )
        >>> head = fit_recipe(
        ...     recipe, pairs, None, seed=0, on_epoch=lambda *_: None, device="cpu"
        ... )
        >>> head.transform(first).shape
        (40, 4)
        >>> [epoch["epoch"] for epoch in head.fit.record["curve"]]
        [1, 2]
    """
    device, family = choose_device(device), recipe.family
    _check_pairs(recipe, pairs)
    if not family.conditioned:
        # A saved head records the size of its conditions, so drop those that it does not read.
        pairs = replace(pairs, condition=None)
        dev = None if dev is None else replace(dev, condition=None)
        curve_splits = {
            split: replace(rows, condition=None) for split, rows in (curve_splits or {}).items()
        }
    if not family.supervised:
        module = family(recipe.settings, pairs.dim, pairs.dim_condition)
        solution = module.solve(pairs, seed)
        return FittedHead(recipe.kind, module.freeze(), seed, solution)
    target_device, dev_score, settings = torch.device(device), None, recipe.settings

    def scorer(
        rows: PairArrays, by_epoch: list[NDArray[np.float32]] | None = None
    ) -> Callable[[HeadModule], float]:
        loader = Loader(rows, settings, torch.Generator(), torch.float32, target_device)
        return partial(_compute_score, metric=metric, rows=rows, loader=loader, by_epoch=by_epoch)

    by_epoch: list[NDArray[np.float32]] | None = None
    if dev is not None and len(dev):
        if len(dev) * settings.epochs * settings.members <= MAX_VALUES:
            by_epoch = []
        others = {
            score_key(split, metric.name): scorer(rows)
            for split, rows in (curve_splits or {}).items()
        }
        dev_score = DevScore(metric, scorer(dev, by_epoch), others)
    score_name = score_key("dev", metric.name)
    dims = pairs.dim, pairs.dim_condition
    fitting = partial(
        _PairFitting, recipe, dims, pairs, dev_score, target_device, score_name=score_name
    )
    head: FittedHead = fit_members(fitting, recipe, seed, on_epoch, start)
    fit, notes = head.fit, []
    if fit.notes:  # nothing was fitted
        return head
    if fit.record["selected_on"] is None and dev is not None:
        notes.append(
            "the dev score is undefined (all ratings or all predictions on dev are equal), so the "
            "last epoch is kept"
        )
    if len(pairs) < settings.batch_size:
        notes.append(
            f"the {len(pairs):,} training rows are fewer than batch_size {settings.batch_size:,}, "
            "so every epoch is one step; lower batch_size for more steps"
        )
    held_out = None
    if by_epoch and dev is not None and fit.record["selected_on"] == "dev":
        curves = [part["curve"] for part in fit.record.get("members", [fit.record])]
        ends = np.cumsum([len(curve) for curve in curves])[:-1]
        members = np.split(np.array(by_epoch), ends)
        held_out = hold_out(members, metric, dev.rating, dev.groups)
    return replace(head, fit=replace(fit, notes=tuple(notes), held_out=held_out))


def _check_pairs(recipe: Recipe, pairs: PairArrays) -> None:
    """Raise a UserError if a head cannot be fitted on training pairs."""
    family = recipe.family
    if not issubclass(fitted_class(family), FittedHead):
        raise UserError(
            f"the head {recipe.name} ranks candidates; it cannot be fitted on rated pairs."
        )
    recipe.check_dim(pairs.dim)
    distinct = len(set(pairs.rating.tolist()))
    if family.supervised and distinct < 2:
        raise UserError(
            f"the training split has {distinct} distinct ratings over {len(pairs)} rated rows; at "
            "least 2 are needed to fit a head."
        )
    if not family.is_identity and not _vectors_differ(pairs):
        raise UserError(
            f"all {2 * len(pairs):,} training vectors are equal, so there is nothing to fit. Check "
            "that the features were extracted with the right prompt."
        )
    if family.conditioned and not pairs.dim_condition:
        raise UserError(
            f"the {recipe.kind} head needs the features of each condition, and none were given. "
            "Pass them with PairArrays(..., condition=...)."
        )


def _vectors_differ(pairs: PairArrays) -> bool:
    """Return whether any two training vectors differ; usually the first block already decides."""
    first = as_matrix(pairs.first).read(slice(0, 1))
    blocks = (
        as_matrix(side).read(slice(start, start + _BLOCK))
        for side in (pairs.first, pairs.second)
        for start in range(0, len(pairs), _BLOCK)
    )
    return any(bool((block != first).any()) for block in blocks)


class _PairFitting(HeadTrainer[HeadModule, HeadModule]):
    """The fit of a head on rated pairs, ``PairArrays``."""

    def create_module(self) -> HeadModule:
        module = super().create_module()
        self._objective = Objective(self.settings)
        return module

    def prepare(self) -> None:
        pairs, settings = self.data, self.settings
        self._objective.to(self.device)
        self._counts = check_contrasts(pairs.pair, pairs.rating, settings)
        if self._counts:
            # Put the two rows of a contrastive pair next to each other, so that they are read
            # together.
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

    def current_head(self) -> HeadModule:
        return self.module

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [*super().parameter_groups(), {"params": list(self._objective.parameters())}]

    def in_bfloat16(self) -> bool:
        precision = self.settings.precision
        if not self.module.multiplies_in_bfloat16:
            if precision == "bfloat16":
                raise UserError(
                    "this head multiplies in float32 only. Leave out precision=bfloat16."
                )
            return False
        if precision == "auto" and self.n_parameters < _MIN_BFLOAT16_PARAMETERS:
            return False
        return super().in_bfloat16()

    def record(self) -> dict[str, Any]:
        return self._counts


@torch.no_grad()
def _compute_score(
    module: HeadModule,
    metric: Metric,
    rows: PairArrays,
    loader: Loader,
    by_epoch: list[NDArray[np.float32]] | None,
) -> float:
    """Return the score of a module's similarities of rows; NaN if it is undefined.

    The similarities are added to ``by_epoch``, unless it is None.
    """
    module.eval()
    in_bfloat16, module.in_bfloat16 = module.in_bfloat16, False
    parts = [
        module.similarity(*module(*batch).chunk(2)).cpu().numpy() for batch in loader.in_order()
    ]
    module.in_bfloat16 = in_bfloat16
    similarity = np.concatenate(parts).astype(np.float32)
    if by_epoch is not None:
        by_epoch.append(similarity)
    return metric(similarity.astype(np.float64), rows.rating, rows.groups)
