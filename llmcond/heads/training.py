"""Fitting a supervised head on arrays: Adam, dropout, and the best epoch on dev."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor

from llmcond.arrays import (
    Array,
    Difference,
    Joined,
    Lookup,
    Matrix,
    distinct,
    on_disk,
    release,
    rows_of,
)
from llmcond.config import STRICT
from llmcond.errors import UserError
from llmcond.heads.base import Family, Fit, OnEpoch, PairArrays, Tensors
from llmcond.heads.networks import Batch, Network, Ops, Weights
from llmcond.heads.objectives import (
    ObjectiveSettings,
    count_ties,
    find_twos,
    neighbours,
    objective,
    stretches,
)
from llmcond.system import free_memory, native_bfloat16

_T = TypeVar("_T")

#: Beyond any use, and below what overflows.
_LARGEST, _WIDEST = 1_000_000, 65_536
#: Heads of so many parameters are multiplied in bfloat16 where the CPU does that natively.
_LARGE = 2**21
#: Values in memory for each parameter: itself, its gradient, two moments of Adam, the best epoch.
_COPIES = 5
#: Features that are not plain arrays are made such if they take no more than so many bytes.
_DENSE_BYTES = 2**29
#: From disk, so many neighbouring rows are read at a time, and so many of those are shuffled.
_RUN, _RUNS = 512, 16
#: Rows scored at a time.
_SCORED = 4_096

_MOST_MEMBERS = 100
#: Apart enough that seeds 0, 1, 2 ... share no member.
_SEED_STEP = 2**20

PRECISIONS = ("auto", "float32", "bfloat16")
BATCHES = ("rows", "conditions")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings(ObjectiveSettings):
    """What the recipe of any head trained by gradient may say.

    Attributes:
        dropout: share of units dropped in training.
        learning_rate: of Adam.
        weight_decay: decoupled, as AdamW has it.
        batch_size: rows a step.
        epochs: at most.
        patience: epochs without a better dev score before fitting stops.
        batches: ``rows`` in any order, or ``conditions``: rows of a condition next to each other,
            whose matrices are then made once. Objectives that contrast keep the two conditions of
            a sentence pair together instead.
        precision: of products in training: ``float32``, ``bfloat16`` (summed in float32), or
            ``auto``: bfloat16 for heads of 2 M parameters and more, where the CPU has it.
        members: heads that are fitted, each by a seed of its own. Their embeddings, each of
            length 1, stand side by side, so that the cosine is the mean of theirs.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dropout: float
    learning_rate: float
    batch_size: int
    epochs: int
    patience: int
    weight_decay: float = 0.0
    batches: str = "rows"
    precision: str = "auto"
    members: int = 1

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        # Not super(): a dataclass with slots is a new class, which super() does not know.
        ObjectiveSettings.__post_init__(self)
        for name in ("batch_size", "epochs", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError("dropout must be at least 0 and below 1")
        if self.batch_size > _LARGEST:
            raise ValueError(f"batch_size must be at most {_LARGEST:,}")
        if not self.learning_rate > 0:
            raise ValueError("learning_rate must be above 0")
        if not self.weight_decay >= 0:
            raise ValueError("weight_decay must be at least 0")
        one_of("batches", self.batches, BATCHES)
        one_of("precision", self.precision, PRECISIONS)
        if not 1 <= self.members <= _MOST_MEMBERS:
            raise ValueError(f"members must be at least 1 and at most {_MOST_MEMBERS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSettings(TrainingSettings):
    """The settings of a head whose embeddings have a size of their own.

    Attributes:
        dim: size k of the embeddings; at most that of the features.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    dim: int

    def __post_init__(self) -> None:
        """Refuse values that no fit can have."""
        TrainingSettings.__post_init__(self)
        check_size("dim", self.dim)


def one_of(name: str, value: str, legal: tuple[str, ...]) -> None:
    """Raise a ValueError unless a setting has one of its legal values."""
    if value not in legal:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(legal)}")


def check_size(name: str, value: int, least: int = 1) -> None:
    """Raise a ValueError unless a size is at least 1 and below what overflows."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}")
    if value > _WIDEST:
        raise ValueError(f"{name} must be at most {_WIDEST:,}")


def trained(
    kind: str,
    settings: type[Any],
    network: Network,
    features: str = "joint",
    conditioned: bool = False,
) -> Family:
    """Return the family of a network."""

    def fit(
        pairs: PairArrays, dev: PairArrays | None, settings: Any, seed: int, on_epoch: OnEpoch
    ) -> Fit:
        seeds = [(seed + member * _SEED_STEP) % 2**32 for member in range(settings.members)]
        return _together([train(network, pairs, dev, settings, own, on_epoch) for own in seeds])

    def transform(
        tensors: Tensors, settings: Any, features: Array, condition: Matrix | None
    ) -> Array:
        weights = {name: torch.from_numpy(np.asarray(value)) for name, value in tensors.items()}
        with torch.inference_mode():
            batch = _Conditions.of(condition).batch([features], slice(None), torch.float32)
            if settings.members == 1:
                embedded: Array = network.forward(weights, settings, batch, Ops()).numpy()
                return embedded
            parts = [
                torch.nn.functional.normalize(network.forward(own, settings, batch, Ops()))
                for own in (member_of(weights, i) for i in range(settings.members))
            ]
            joined: Array = (torch.cat(parts, dim=1) / len(parts) ** 0.5).numpy()
        return joined

    return Family(
        kind, settings, fit, transform, features, conditioned, supervised=True, network=network
    )


def member_of(tensors: Mapping[str, _T], number: int) -> dict[str, _T]:
    """Return the parameters of one member."""
    prefix = f"member{number}."
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _together(fits: list[Fit]) -> Fit:
    """Return several fits as one."""
    if len(fits) == 1:
        return fits[0]
    tensors = {
        f"member{number}.{name}": value
        for number, fit in enumerate(fits)
        for name, value in fit.tensors.items()
    }
    members = [{key: fit.record.get(key) for key in ("best_epoch", "curve")} for fit in fits]
    return Fit(tensors, {**fits[0].record, "members": members}, fits[0].notes)


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The state after an epoch, and how good it is on dev (NaN without dev)."""

    number: int
    score: float
    weights: Weights


def train(
    network: Network,
    pairs: PairArrays,
    dev: PairArrays | None,
    settings: TrainingSettings,
    seed: int,
    on_epoch: OnEpoch,
) -> Fit:
    """Fit a head's weights; keep those of the epoch with the best Spearman correlation on dev.

    Every random number comes from generators of our own, so the same seed gives the same head on
    the same machine. Features stay as they are given; float32 copies are made of a batch only.

    Args:
        network: what to fit.
        pairs: what to fit on.
        dev: what chooses the epoch; without it the last one is kept.
        settings: learning rate, epochs and so on.
        seed: of initialisation, dropout and order.
        on_epoch: told of each epoch.

    Raises:
        UserError: parameters that do not fit into memory, rows that do not stand in twos for an
            objective that contrasts them, or a loss that became NaN or infinite.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = network.parameters(settings, pairs.dim, pairs.dim_condition)
    n_parameters = sum(parameter.size for parameter in parameters.values())
    if not n_parameters:
        return Fit({}, {"selected_on": None}, ("the head has no parameters, so nothing is fitted",))
    _check_memory(n_parameters)
    weights = {
        name: parameter.draw(generator).requires_grad_() for name, parameter in parameters.items()
    }
    # One kernel for all of a step; decoupled decay of 0 is plain Adam.
    optimiser = torch.optim.AdamW(
        list(weights.values()),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    half = _half(settings.precision, n_parameters)
    ops = Ops(settings.dropout, np.random.Generator(np.random.SFC64(seed)), half)
    contrast = check_twos(pairs.pair, pairs.number, pairs.rating, settings)
    if pairs.pair is not None:
        # A pair that occurs again elsewhere is another two.
        pairs = replace(pairs, pair=stretches(pairs.pair))
    loader = _Loader(pairs, settings, generator, torch.bfloat16 if half else torch.float32)
    scorer = None if dev is None else _Loader(dev, settings, generator, torch.float32)

    best = _Epoch(0, math.nan, weights)
    curve: list[dict[str, float | None]] = []
    for number in range(1, settings.epochs + 1):
        loss = _run_epoch(network, weights, loader, settings, optimiser, ops)
        if not math.isfinite(loss):
            raise UserError(
                f"the loss became {loss} in epoch {number}. Lower learning_rate, to "
                f"{settings.learning_rate / 10:g} or so."
            )
        score = math.nan if scorer is None else _dev_spearman(network, weights, scorer, settings)
        defined = None if math.isnan(score) else score
        curve.append({"epoch": number, "loss": loss, "dev_spearman": defined})
        on_epoch(number, settings.epochs, score)
        # An undefined score (all embeddings alike) is never better than what there is.
        if dev is None or math.isnan(best.score) or score > best.score:
            copies = {name: weight.detach().clone() for name, weight in weights.items()}
            best = _Epoch(number, score, copies)
        elif number - best.number >= settings.patience:
            break
    chosen = dev is not None and not math.isnan(best.score)
    record = {
        "best_epoch": best.number,
        "selected_on": "dev" if chosen else None,
        "n_parameters": n_parameters,
        "steps_per_epoch": loader.steps,
        "precision": "bfloat16" if half else "float32",
        **contrast,
        "curve": curve,
    }
    notes = () if chosen or dev is None else (_UNDEFINED,)
    if len(pairs) < settings.batch_size:
        notes = (
            *notes,
            f"the {len(pairs):,} training rows fill no batch of {settings.batch_size:,}, so every "
            "epoch is one step; lower batch_size for more",
        )
    return Fit({name: weight.numpy() for name, weight in best.weights.items()}, record, notes)


_UNDEFINED = (
    "the dev score is undefined (all ratings or all predictions there are equal), so it chose no "
    "epoch: the last one is kept"
)


def _check_memory(n_parameters: int) -> None:
    needed, free = 4 * _COPIES * n_parameters, free_memory()
    if needed > free:
        raise UserError(
            f"this head has {n_parameters:,} parameters, which take {needed / 2**30:,.1f} GiB to "
            f"fit, and {free / 2**30:,.1f} GiB are free. Lower its dim, or its "
            "rank if it has one."
        )


def _half(precision: str, n_parameters: int) -> bool:
    if precision == "auto":
        return n_parameters >= _LARGE and native_bfloat16()
    return precision == "bfloat16"


def check_twos(
    pair: NDArray[np.int64] | None,
    number: NDArray[np.int64] | None,
    rating: NDArray[np.float64],
    settings: ObjectiveSettings,
) -> dict[str, int]:
    """Check that rows stand in twos where an objective contrasts them; count those and ties.

    Args:
        pair: (n,) the sentence pair of each row.
        number: (n,) what messages call a row; its position from 1 where it is None.
        rating: (n,).
        settings: what is minimised.

    Raises:
        UserError: rows that do not, or no pairs.
    """
    if not settings.contrasts:
        return {}
    if pair is None:
        raise UserError(
            "info_nce and quadruplet contrast the two conditions of a sentence pair, and no pairs "
            "were given: PairArrays(..., pair=...)."
        )
    twos = find_twos(pair, number)
    if not len(twos):
        raise UserError(
            "info_nce and quadruplet contrast the two conditions of a sentence pair, and no "
            "sentence pair has two rated rows. Use mse, cosent or ranking instead."
        )
    counted = count_ties(twos, rating)
    return {"n_twos": counted.n_twos, "n_tied_twos": counted.n_tied}


# -- batches -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Conditions:
    """Conditions of rows, told apart once.

    Attributes:
        vectors: (n, dim_c); None where the head takes none.
        first: (u,) a row of each distinct one.
        number: (n,) which of them each row has.
    """

    vectors: Matrix | None = None
    first: NDArray[np.int64] | None = None
    number: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, vectors: Matrix | None) -> _Conditions:
        return cls() if vectors is None else cls(vectors, *distinct(vectors))

    def batch(self, sides: list[Matrix], rows: Any, dtype: torch.dtype) -> Batch:
        """Return rows of several matrices, one behind the other, with their conditions."""
        parts = [_tensor(side, rows, dtype) for side in sides]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.vectors is None or self.first is None or self.number is None:
            return Batch(x)
        kinds, which = np.unique(self.number[rows], return_inverse=True)
        c = _tensor(self.vectors, self.first[kinds], torch.float32)
        return Batch(x, c, torch.from_numpy(which.reshape(-1)).repeat(len(parts)))


def _tensor(matrix: Matrix, rows: Any, dtype: torch.dtype) -> Tensor:
    found = np.asarray(matrix[rows])
    # torch takes no array that cannot be written, or stands backwards in memory.
    plain = found.flags.writeable and found.flags.c_contiguous
    return torch.from_numpy(found if plain else found.copy(order="C")).to(dtype)


class _Loader:
    """Rows in batches, read as they are needed."""

    def __init__(
        self,
        pairs: PairArrays,
        settings: TrainingSettings,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        self._settings, self._generator, self._dtype = settings, generator, dtype
        self._pairs = pairs
        self._streams = on_disk(pairs.first) or on_disk(pairs.second)
        self._sides = [pairs.first, pairs.second]
        if not self._streams:
            self._sides = [_dense(side) for side in self._sides]
        self._conditions = _Conditions.of(pairs.condition)
        self._rating = pairs.rating.astype(np.float32)
        self.steps = -(-len(pairs) // settings.batch_size)

    def shuffled(self) -> Iterator[tuple[Batch, Tensor, Tensor | None]]:
        """Yield batches of all rows in a new order: rows, ratings, and twos if wanted."""
        self.steps = 0
        for sides, rows in self._parts():
            for places in self._cut(rows):
                chosen = rows[places]
                self.steps += 1
                batch = self._conditions.batch(sides, chosen, self._dtype)
                yield batch, torch.from_numpy(self._rating[chosen]), self._twos(chosen)

    def in_order(self) -> Iterator[Batch]:
        """Yield batches of all rows as they stand."""
        for start in range(0, len(self._pairs), _SCORED):
            rows = np.arange(start, min(start + _SCORED, len(self._pairs)))
            yield self._conditions.batch(self._sides, rows, self._dtype)
            if self._streams:
                self._let_go()

    @property
    def rating(self) -> NDArray[np.float64]:
        """Return the ratings of all rows."""
        return self._pairs.rating

    def _parts(self) -> Iterator[tuple[list[Matrix], NDArray[np.int64]]]:
        """Yield matrices, and rows of them, that are shuffled among each other."""
        n = len(self._pairs)
        if not self._streams:
            yield self._sides, np.arange(n)
            return
        begins = np.arange(0, n, _RUN)
        if self._settings.contrasts and self._pairs.pair is not None:
            # A two is not parted: its second row goes with the first.
            pair = self._pairs.pair
            begins[1:] += pair[begins[1:]] == pair[begins[1:] - 1]
            # The last run may have had that row only.
            begins = begins[begins < n]
        ends = np.append(begins[1:], n)
        order = self._permutation(len(begins))
        for start in range(0, len(order), _RUNS):
            drawn = order[start : start + _RUNS]
            runs = [np.arange(begins[run], ends[run]) for run in drawn]
            rows = np.concatenate(runs)
            # Neighbours are read at once, in their order on disk.
            sides: list[Matrix] = [_Held.read(side, np.sort(rows)) for side in self._sides]
            self._let_go()
            yield sides, rows

    def _let_go(self) -> None:
        for side in self._sides:
            release(side)

    def _permutation(self, n: int) -> NDArray[np.int64]:
        drawn: NDArray[np.int64] = torch.randperm(n, generator=self._generator).numpy()
        return drawn

    def _cut(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Yield places in ``rows``, batch by batch, in a new order."""
        size = self._settings.batch_size
        unit = self._units(rows)
        if unit is None:
            order = self._permutation(len(rows))
            yield from np.split(order, range(size, len(order), size))
            return
        _, unit = np.unique(unit, return_inverse=True)
        rank = self._permutation(int(unit.max()) + 1)[unit]
        order = np.argsort(rank, kind="stable")
        if not self._settings.contrasts:
            yield from np.split(order, range(size, len(order), size))
            return
        # A two is not parted: a batch ends where the next unit would not fit whole.
        ends = np.flatnonzero(np.diff(rank[order], append=-1)) + 1
        begin = 0
        while begin < len(order):
            last = int(np.searchsorted(ends, begin + size, side="right")) - 1
            if last < 0 or ends[last] <= begin:
                last += 1
            stop = int(ends[last])
            yield order[begin:stop]
            begin = stop

    def _units(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return what keeps rows together; None where nothing does."""
        if self._settings.contrasts and self._pairs.pair is not None:
            return self._pairs.pair[rows]
        if self._settings.batches == "conditions" and self._conditions.number is not None:
            return self._conditions.number[rows]
        return None

    def _twos(self, rows: NDArray[np.int64]) -> Tensor | None:
        if not self._settings.contrasts or self._pairs.pair is None:
            return None
        return torch.from_numpy(neighbours(self._pairs.pair[rows]))


@dataclass(frozen=True, eq=False)
class _Held:
    """Some rows of a matrix, read, and found by their positions in the whole."""

    array: NDArray[Any]
    rows: NDArray[np.int64]

    @classmethod
    def read(cls, matrix: Matrix, rows: NDArray[np.int64]) -> _Held:
        return cls(np.array(matrix[rows]), rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: Any) -> Any:
        return self.array[np.searchsorted(self.rows, rows)]


def _dense(matrix: Matrix) -> Matrix:
    """Return a plain array of what is cheaper so: made of others, and small."""
    made = isinstance(matrix, Lookup | Difference | Joined)
    if made and 4 * math.prod(matrix.shape) <= _DENSE_BYTES:
        return rows_of(matrix, slice(None))
    return matrix


# -- steps -------------------------------------------------------------------------------------


def _run_epoch(
    network: Network,
    weights: Weights,
    loader: _Loader,
    settings: TrainingSettings,
    optimiser: torch.optim.Optimizer,
    ops: Ops,
) -> float:
    total, rows = torch.zeros(()), 0
    for batch, rating, twos in loader.shuffled():
        embedded = network.forward(weights, settings, batch, ops)
        first, second = embedded[: len(rating)], embedded[len(rating) :]
        loss = objective(first, second, rating, settings, twos)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        total += loss.detach() * len(rating)
        rows += len(rating)
    return float(total) / max(rows, 1)


@torch.no_grad()
def _dev_spearman(
    network: Network, weights: Weights, dev: _Loader, settings: TrainingSettings
) -> float:
    """Return the Spearman correlation of cosine and rating; NaN where it is undefined."""
    scores = []
    for batch in dev.in_order():
        embedded = network.forward(weights, settings, batch, Ops())
        half = len(embedded) // 2
        scores.append(torch.cosine_similarity(embedded[:half], embedded[half:]).numpy())
    found = np.concatenate(scores) if scores else np.zeros(0)
    if len(found) < 2 or np.ptp(found) == 0 or np.ptp(dev.rating) == 0:
        return math.nan
    return float(spearmanr(found, dev.rating).statistic)
