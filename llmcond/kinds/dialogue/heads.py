"""Heads that map utterances to three roles: the objectives that train them, and their fitting.

In Triple-Encoders (ACL 2024, section 3), special tokens tell the encoder the role of an utterance:
before another utterance as the first or second of a pair, or after. In llmcond, an utterance is
encoded once, and a separate map for each role reads its features.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, softplus
from typing_extensions import override

from llmcond.base.arrays import Array, MatrixLike, Positions, as_matrix
from llmcond.base.errors import UserError
from llmcond.base.system import choose_device
from llmcond.heads.fit import HeadTrainer, fit_members
from llmcond.heads.fitted import FittedModule, UnitRows
from llmcond.heads.module import HeadModule
from llmcond.heads.numpy_heads import DevScore, OnEpoch
from llmcond.heads.recipes import Recipe
from llmcond.heads.settings import GradientSettings, SizeOrNone, learning_rate_factor

#: Number of utterances that are mapped at once.
_BLOCK = 8_192

ROLES = ("b1", "b2", "a")

#: Factor of the steps of learned distance weights, relative to those of maps: the weights have a
#: larger range of values.
_WEIGHT_SCALE = 10.0
#: Offsets before softplus: initially pairs have a weight of 1, and single utterances nearly 0.
_PAIR_OFFSET, _SINGLE_OFFSET = 0.5413, -3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings(GradientSettings):
    """Recipe settings of heads that map utterances to roles.

    Attributes:
        map: map of each role: ``linear``, W e + b; or ``mlp``, e + W_2 GELU(W_1 e + b_1) + b_2.
            Both are initialised to the identity.
        hidden: hidden units of the MLP; 0 for twice the size of the features.
        objective: loss. ``ccl`` (curved contrastive learning, section 2.3 and arXiv 2211.07591) is
            the squared error of the cosines of before-2 and after, whose target value at distance
            d from the target is 1 - d / w. ``c3l`` (equation 1) is the same for pairs. ``rank`` is
            the cross-entropy of the target among the targets of the batch, with the score divided
            by ``temperature``. ``weighted`` is the same with weights that are learned for each
            distance.
        score: default score of candidates; see ``turns.ContextScore``.
        norm: normalisation of the target values of c3l. The pair at distances d_i and d_j has
            s = 2 - (d_i + d_j) / w. It is mapped to the range from 1 / w to 1, either from the
            range of the window's ``actual`` pairs (released code), or from the range 1 / w to
            2 - 3 / w (``paper``).
        positives: positive examples of c3l: ``pairs``; or ``singles``, single utterances in both
            roles before, with the target values of ccl (table 4: bi pos).
        curved: whether the target values of ccl and c3l decrease with the distance from the target;
            otherwise all of them are 1.
        hard_negatives: whether c3l has pairs with utterances of other windows, with the target
            value 0 (section 3.1).
        directional_negatives: whether c3l has reversed pairs, with the target value 0: the pair of
            an utterance and the target is compared with each earlier utterance (table 4).
        window: turns of a window, w, including the target.
        temperature: temperature of ``rank`` and ``weighted``.
        warmup: share of the steps in which the learning rate rises from 0.
        schedule: schedule of the learning rate after warm-up: ``linear`` to 0, or ``constant``.
    """

    map: Literal["linear", "mlp"] = "linear"
    hidden: SizeOrNone = 0
    objective: Literal["ccl", "c3l", "rank", "weighted"]
    score: str
    norm: Literal["actual", "paper"] = "actual"
    positives: Literal["pairs", "singles"] = "pairs"
    curved: bool = True
    hard_negatives: bool = True
    directional_negatives: bool = False
    window: Annotated[int, Ge(3), Le(1_000)] = 5
    temperature: Annotated[float, Gt(0), Le(1_000_000)] = 0.05
    warmup: Annotated[float, Ge(0), Lt(1)] = 0.1
    schedule: Literal["linear", "constant"] = "linear"

    def __post_init__(self) -> None:
        """Raise a ValueError for settings that exclude each other."""
        try:
            score = ContextScore.parse(self.score)
        except UserError as error:
            raise ValueError(str(error)) from error
        if score.kind == "weighted" and self.objective != "weighted":
            raise ValueError(
                f"the objective {self.objective} learns no weights for the score weighted: set "
                "objective to weighted, or another score"
            )
        if self.members > 1:
            raise ValueError(
                "the scores of several heads cannot be combined, as they are not sums over pairs: "
                "set members to 1"
            )

    @property
    def trained_score(self) -> ContextScore:
        """The score with which ``rank`` and ``weighted`` are trained; always a sum over pairs."""
        if self.objective == "weighted":
            return ContextScore("weighted")
        score = ContextScore.parse(self.score)
        return ContextScore("average") if score.kind == "maxsim" else score

    @property
    def untrained_role(self) -> str:
        """The role before that the objective does not read, ``b1`` or ``b2``; empty: none."""
        if self.objective == "ccl":
            return "b1"
        role = self.trained_score.role if self.objective == "rank" else ""
        return {"b1": "b2", "b2": "b1"}.get(role, "")

    @property
    def min_context(self) -> int:
        """The minimum number of utterances before a target: two if they are paired, else one."""
        return 1 if self.objective == "ccl" or self.trained_score.kind in ("bi", "bi:both") else 2


@dataclass(frozen=True, eq=False)
class FittedRoleHead(FittedModule):
    """A fitted head that maps utterances to roles; immutable, like other fitted heads.

    Attributes:
        scored_by: score that replaces the one of the recipe; None to use the recipe's.
    """

    mismatch_reason = "does not map utterances of dialogues"

    scored_by: ContextScore | None = None

    module: RoleHead

    @property
    def dim_out(self) -> int:
        """The dimension of roles, which is that of the features."""
        return self.dim_in

    @property
    def score(self) -> ContextScore:
        """The score of candidates."""
        return self.scored_by or ContextScore.parse(self.settings.score)

    @property
    def weights(self) -> DistanceWeights | None:
        """The learned weights of distances, as arrays; None if the head has none."""
        weights = self.module.distance_weights
        return weights and DistanceWeights(*(tensor.detach().numpy() for tensor in weights))

    def with_score(self, score: str) -> FittedRoleHead:
        """Return a copy of the head with another score.

        Raises:
            UserError: The score does not exist, or needs weights that this head did not learn.
        """
        new_score = ContextScore.parse(score)
        if new_score.kind == "weighted":
            new_score.coefficients(1, self.weights)
        return replace(self, scored_by=new_score)

    def before(self, vectors: MatrixLike) -> tuple[Array, Array]:
        """Return the roles before-1 and before-2 of utterances with features (n, d).

        Returns:
            Two arrays of shape (n, k), float32.

        Raises:
            UserError: The head was fitted on features of another size.
        """
        first, second = self._map(vectors, self.module.before)
        return first, second

    def after(self, vectors: MatrixLike) -> Array:
        """Return the role after of utterances, (n, k) float32, of unit length; see ``before``."""
        (vectors_after,) = self._map(vectors, lambda x: (self.module.after(x),))
        return vectors_after

    def _map(
        self, vectors: MatrixLike, role: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> list[Array]:
        if vectors.shape[1] != self.dim_in:
            raise UserError(
                f"the features have {vectors.shape[1]} dimensions, but this {self.kind} head was "
                f"fitted on {self.dim_in}."
            )
        matrix, blocks = as_matrix(vectors), []
        with torch.inference_mode():
            for start in range(0, max(len(matrix), 1), _BLOCK):
                block = torch.from_numpy(matrix.read(slice(start, start + _BLOCK)))
                blocks.append([output.numpy() for output in role(normalize(block))])
        return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


class RoleHead(HeadModule):
    """A map for each role, with weights by distance if the objective learns them.

    The input has unit length. The roles before-1 and before-2 are not normalised, because pairs are
    means of vectors as the encoder returns them. The role after has unit length.
    """

    Settings = RoleSettings
    features = "alone"
    Fitted = FittedRoleHead
    multiplies_in_bfloat16 = True

    def __init__(self, settings: RoleSettings, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        if not self.is_identity:
            width = dim_in
            for role in ROLES:
                if settings.map == "mlp":
                    width = settings.hidden or 2 * dim_in
                    self.add_layer(f"{role}_hidden", width, dim_in, bias=True)
                self.add_layer(role, dim_in, width, bias=True)
        if settings.objective == "weighted":
            n = settings.window - 1
            self.pair_weights = nn.Parameter(torch.zeros(n, n))
            self.single_weights = nn.Parameter(torch.zeros(n))
        for name, parameter in self.named_parameters():
            # Distributed training waits for the gradients of all parameters that require one.
            if settings.untrained_role and name.startswith(settings.untrained_role):
                parameter.requires_grad_(False)

    @override
    def start_at_identity(self) -> None:
        if self.is_identity:
            return
        for role in ROLES:
            if self.settings.map == "linear":
                nn.init.eye_(self.get_parameter(role))
            else:
                nn.init.zeros_(self.get_parameter(role))
            nn.init.zeros_(self.get_parameter(f"{role}_bias"))

    @override
    def start_state(self) -> dict[str, Tensor]:
        state = super().start_state()
        if self.settings.objective != "ccl":
            return state
        # A bi-encoder has a single role before, which is b2: b1 was not trained.
        return {
            name: state[name.replace("b1", "b2", 1)] if name.startswith("b1") else value
            for name, value in state.items()
        }

    def role(self, name: str, x: Tensor) -> Tensor:
        """Return one role (n, k) of utterances with features (n, dim) of unit length."""
        if self.is_identity:
            return x
        if self.settings.map == "linear":
            return self.affine(name, self.dropout(x))
        # The initial weights of the hidden layer assume inputs of variance 1.
        hidden = nn.functional.gelu(self.affine(f"{name}_hidden", x * self.dim_in**0.5))
        return x + self.affine(name, self.dropout(hidden))

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the roles before-1 and before-2, (n, k) each."""
        return self.role("b1", x), self.role("b2", x)

    def after(self, x: Tensor) -> Tensor:
        """Return the role after, (n, k), of unit length."""
        return normalize(self.role("a", x))

    @property
    def distance_weights(self) -> DistanceWeights | None:
        """The learned weights, as tensors; None if none are learned."""
        if self.settings.objective != "weighted":
            return None
        return DistanceWeights(
            softplus(_WEIGHT_SCALE * self.pair_weights + _PAIR_OFFSET),
            softplus(_WEIGHT_SCALE * self.single_weights + _SINGLE_OFFSET),
        )

    def loss(
        self, x: Tensor, rows: Tensor, rng: np.random.Generator, dialogue: Tensor | None = None
    ) -> Tensor:
        """Return the loss of a batch of windows, a scalar.

        Args:
            x: features of distinct utterances, (u, dim), of unit length.
            rows: indices of the utterances of each window, with the target last, (m, w) int64,
                padded with -1.
            rng: random number generator that samples the utterances of negatives.
            dialogue: dialogue of each window, (m,), if a batch has several windows of a dialogue.
                Windows of the same dialogue are not negatives of each other: otherwise the topic
                would count against a target.
        """
        objective = _OBJECTIVES[self.settings.objective]
        loss: Tensor = objective(self, x, _Windows(rows, dialogue), rng)
        return loss


class IdentityRoleHead(RoleHead):
    """All roles are the unchanged features: the zero-shot setting."""

    is_identity = True

    def __init__(self, settings: RoleSettings, dim_in: int, dim_condition: int = 0) -> None:
        if settings.objective == "weighted":
            raise UserError(
                "the head none has no parameters, but the objective weighted learns weights. Set "
                "objective to rank, or use the head weighted."
            )
        super().__init__(settings, dim_in, dim_condition)


def c3l_targets(settings: RoleSettings) -> Tensor:
    """Return the target values of the pairs (i, j), i < j, of a full window in c3l, (w - 1, w - 1).

    They are equation 1 of Triple-Encoders: the sum of the two utterances' values, 1 - d / w, after
    normalisation. Windows of 5 turns have the values 1, .8, .6, .6, .4 and .2 with the
    actual range.
    """
    w = settings.window
    distance = torch.arange(w - 1, 0, -1)
    closeness = 2 - (distance[:, None] + distance) / w
    # The pair adjacent to the target, and the pair at the beginning of the window.
    highest, lowest = 2 - 3 / w, 2 - (2 * w - 3) / w
    if settings.norm == "paper":
        lowest = 1 / w
    if not settings.curved or highest == lowest:
        return torch.ones(w - 1, w - 1)
    return 1 / w + (1 - 1 / w) * (closeness - lowest) / (highest - lowest)


def ccl_targets(settings: RoleSettings) -> Tensor:
    """Return the target values of single utterances in a full window, (w - 1,): 1 - d / w."""
    w = settings.window
    return 1 - torch.arange(w - 1, 0, -1) / w if settings.curved else torch.ones(w - 1)


class _Windows:
    """The utterances of windows: contexts (m, n), the mask of their padding, and targets (m,)."""

    def __init__(self, rows: Tensor, dialogue: Tensor | None) -> None:
        self.rows, self.target = rows, rows[:, -1]
        if dialogue is None:
            dialogue = torch.arange(len(rows), device=rows.device)
        self.dialogue = dialogue
        self.present = rows[:, :-1] >= 0
        self.context = rows[:, :-1].clamp(min=0)
        # The pairs i < j of utterances that are not padding, (m, n, n).
        both_present = self.present[:, :, None] & self.present[:, None, :]
        self.pairs = both_present.triu(1)

    def gather(self, vectors: Tensor) -> Tensor:
        """Return the vectors of contexts, (m, n, k)."""
        # index_select, because indexing (vectors[positions]) adds gradients in arbitrary order.
        selected = vectors.index_select(0, self.context.flatten())
        return selected.view(*self.context.shape, -1)

    def sample_others(self, rng: np.random.Generator, role: str) -> tuple[Tensor, Tensor]:
        """Sample an utterance for each position of each context, (m, n).

        Utterances are sampled for a ``role``, before or after, from those that have this role in
        the batch. If negatives had another depth in their dialogues than positives, the depth alone
        would distinguish them.

        Returns:
            The utterances, and a mask that is true where the position is not padding, the sampled
            text is not in the window, and the utterance is from another dialogue.
        """
        pool, pool_dialogue = self.target, self.dialogue
        if role == "before":
            pool = self.context[self.present]
            pool_dialogue = self.dialogue[:, None].expand_as(self.present)[self.present]
        sampled = rng.integers(len(pool), size=tuple(self.context.shape))
        positions = torch.from_numpy(sampled).to(pool.device)
        other = pool[positions]
        in_window = (other[:, :, None] == self.rows[:, None, :]).any(dim=2)
        return other, self.present & ~in_window & (
            pool_dialogue[positions] != self.dialogue[:, None]
        )


def _mean_squared_error(errors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean of all squared errors where their masks are true."""
    total = torch.stack([(error.square() * mask).sum() for error, mask in errors]).sum()
    return total / torch.stack([mask.sum() for _, mask in errors]).sum().clamp(min=1)


def _ccl(head: RoleHead, x: Tensor, batch: _Windows, rng: np.random.Generator) -> Tensor:
    """Return the loss of curved contrastive learning (section 2.3).

    The negatives are reversed and random.
    """
    before, after = normalize(head.role("b2", x)), head.after(x)
    context, target = batch.gather(before), after.index_select(0, batch.target)
    targets = ccl_targets(head.settings).to(x.device)
    reversed_products = before.index_select(0, batch.target)[:, None] * batch.gather(after)
    other, is_negative = batch.sample_others(rng, "after")
    random = after.index_select(0, other.flatten()).view(*other.shape, -1)
    is_different = batch.present & (batch.context != batch.target[:, None])
    return _mean_squared_error(
        [
            ((context * target[:, None]).sum(dim=2) - targets, batch.present),
            (reversed_products.sum(dim=2), is_different),
            ((context * random).sum(dim=2), is_negative),
        ]
    )


def _c3l(head: RoleHead, x: Tensor, batch: _Windows, rng: np.random.Generator) -> Tensor:
    """Return the loss of contextualised curved contrastive learning (Triple-Encoders, equation 1).

    The hard negatives of each utterance u (section 3.1) are the pairs (B1 u, B2 r), (B1 r, B2 u)
    and (B1 r, B2 r') with random utterances r and r'.
    """
    (before1, before2), after = head.before(x), head.after(x)
    target = after.index_select(0, batch.target)[..., None]
    b1, b2 = batch.gather(before1), batch.gather(before2)
    settings, errors = head.settings, []
    if settings.positives == "pairs":
        cosines = (b1 @ target + (b2 @ target).mT) * inverse_lengths(b1, b2)
        errors.append((cosines - c3l_targets(settings).to(x.device), batch.pairs))
    else:
        targets = ccl_targets(settings).to(x.device)
        for role in (b1, b2):
            cosines = (normalize(role, dim=2) @ target)[..., 0]
            errors.append((cosines - targets, batch.present))
    if settings.directional_negatives:
        earlier, b2_of_target = batch.gather(after), before2.index_select(0, batch.target)
        pairs = normalize(b1 + b2_of_target[:, None], dim=2)
        is_different = batch.context[:, :, None] != batch.context[:, None, :]
        is_different &= (batch.context != batch.target[:, None])[:, :, None]
        errors.append((earlier @ pairs.mT, batch.pairs & is_different))
    if settings.hard_negatives:
        (first, is_negative1), (second, is_negative2) = (
            batch.sample_others(rng, "before") for _ in range(2)
        )
        r1 = before1.index_select(0, first.flatten()).view_as(b1)
        r2 = before2.index_select(0, second.flatten()).view_as(b2)
        for pair, mask in (
            (b1 + r2, is_negative2),
            (r1 + b2, is_negative1),
            (r1 + r2, is_negative1 & is_negative2),
        ):
            errors.append(((normalize(pair, dim=2) @ target)[..., 0], mask))
    return _mean_squared_error(errors)


def _rank(head: RoleHead, x: Tensor, batch: _Windows, rng: np.random.Generator) -> Tensor:
    """Return the cross-entropy of targets among those of the batch, without equal texts."""
    settings = head.settings
    weights, score = head.distance_weights, settings.trained_score
    pairs, first, second = score.coefficients(settings.window - 1, weights)
    coefficients = Coefficients(
        pairs.to(x.device) * batch.pairs,
        first.to(x.device) * batch.present,
        second.to(x.device) * batch.present,
    )
    before1, before2 = score.select_roles(*head.before(x))
    queries = sum_of_pairs(batch.gather(before1), batch.gather(before2), coefficients)
    if weights is None:
        queries = queries / coefficients.total.clamp(min=1)[:, None]
    else:
        queries = normalize(queries)
    targets = head.after(x).index_select(0, batch.target)
    logits = queries @ targets.T / settings.temperature
    rows = torch.arange(len(targets), device=x.device)
    left_out = batch.target[:, None] == batch.target
    left_out |= batch.dialogue[:, None] == batch.dialogue
    left_out &= rows[:, None] != rows
    return cross_entropy(logits.masked_fill(left_out, -torch.inf), rows)


_OBJECTIVES = {"ccl": _ccl, "c3l": _c3l, "rank": _rank, "weighted": _rank}


@dataclass(frozen=True, slots=True)
class TurnArrays:
    """The dialogues of a split, in the form on which heads are fitted.

    Attributes:
        utterances: features of distinct utterances, (n, d), in any float type.
        turns: position of the utterance of each turn, dialogue by dialogue, (t,) int64.
        starts: first turn of each dialogue, followed by t, (m + 1,) int64.
    """

    utterances: MatrixLike
    turns: Positions
    starts: Positions


def fit_turns(
    recipe: Recipe,
    arrays: TurnArrays,
    dev: DevScore[FittedRoleHead] | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "auto",
    start: FittedRoleHead | None = None,
) -> FittedRoleHead:
    """Fit a head on the windows of dialogues.

    The score on ``dev`` chooses the epoch; without ``dev`` the last epoch is kept. The parameters
    of ``start``, if it is given, are the initial ones. The same seed gives the same head on the
    same machine, bit for bit on one thread.

    Raises:
        UserError: The recipe is for another task, no dialogue has enough turns, the parameters do
            not fit into memory, those of ``start`` have other shapes, or the loss diverges.
    """
    check_turns(recipe)
    dims, torch_device = (int(arrays.utterances.shape[1]),), torch.device(choose_device(device))
    fitting = partial(_TurnFitting, recipe, dims, arrays, dev, torch_device)
    head: FittedRoleHead = fit_members(fitting, recipe, seed, on_epoch, start)
    return head


def check_turns(recipe: Recipe) -> None:
    """Raise a UserError if the family of a recipe's head does not map utterances to roles."""
    if not issubclass(recipe.family, RoleHead):
        raise UserError(
            f"the head {recipe.name} does not map utterances to roles. `llmcond heads` lists the "
            "heads for dialogues."
        )


class _TurnFitting(HeadTrainer[RoleHead, FittedRoleHead]):
    """Fits one head on the windows of dialogues."""

    data: TurnArrays

    def create_module(self) -> RoleHead:
        module = super().create_module()
        module.start_at_identity()
        return module

    def prepare(self) -> None:
        self._rng = np.random.Generator(np.random.SFC64(self.seed))
        least = self.settings.min_context
        window_turns = windows(self.data.starts, self.settings.window, least)
        if not len(window_turns):
            raise UserError(
                f"no dialogue of the training split has more than {least} "
                f"utterance{'s' * (least > 1)}, so a head cannot be fitted."
            )
        turns = np.append(self.data.turns, -1)  # position -1: no utterance
        self._windows: Positions = turns[window_turns]
        self._features = UnitRows(self.data.utterances)
        self.n_rows = len(self._windows)

    def learning_rate_factor(self, step: int, steps: int) -> float:
        return learning_rate_factor(step, steps, self.settings.warmup, self.settings.schedule)

    def loss(self, batch: Positions) -> Tensor:
        utterances, rows = distinct_utterances(self._windows[batch])
        features = self._features.read(utterances).to(self.device)
        return self.module.loss(features, torch.from_numpy(rows).to(self.device), self._rng)

    def record(self) -> dict[str, Any]:
        return {"n_windows": self.n_rows}


def windows(starts: Positions, size: int, min_context: int) -> Positions:
    """Return the windows of dialogues as positions of turns, (m, size), with the target last.

    Every turn with at least ``min_context`` turns before it is a target, including the last turn of
    a dialogue. Windows with fewer than ``size`` - 1 turns before the target are padded with -1 on
    the left.

    Args:
        starts: first turn of each dialogue, followed by the number of turns, (dialogues + 1,).
        size: turns of a window, including the target.
        min_context: minimum number of turns before a target.
    """
    n_before = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    targets = np.flatnonzero(n_before >= min_context)
    offsets = np.arange(size - 1, -1, -1)
    return np.where(n_before[targets, None] >= offsets, targets[:, None] - offsets, -1)


def distinct_utterances(utterances: Positions) -> tuple[Positions, Positions]:
    """Return the distinct utterances of windows, (u,), and the windows' indices of them, (m, w).

    Padding is -1 in both the given windows and the result.
    """
    distinct_utterances, indices = np.unique(utterances, return_inverse=True)
    n_missing = int(len(distinct_utterances) > 0 and distinct_utterances[0] < 0)
    return distinct_utterances[n_missing:], indices.reshape(utterances.shape) - n_missing


#: Minimum squared length of a sum, relative to its terms: below it, the vectors cancel each other
#: and the sum has no direction.
_MIN_SQUARED_LENGTH = 1e-6
#: Number of values that MaxSim processes at once; it needs a few times this memory.
_MAXSIM_VALUES = 2**22

#: Names of scores, except ``last:L``.
SCORES = (
    "average",
    "average+bi",
    "average:b1",
    "average:b2",
    "neighbours",
    "bi",
    "bi:b1",
    "bi:both",
    "maxsim",
    "weighted",
)

V = TypeVar("V", Array, Tensor)


class Coefficients(NamedTuple):
    """Weights of the terms of a score, a sum over pairs and single utterances, as tensors.

    Attributes:
        pairs: weights of pairs (before-1, before-2), (n, n), or (m, n, n) for m contexts.
        first: weights of single utterances in before-1, (n,) or (m, n).
        second: weights of single utterances in before-2, (n,) or (m, n).
    """

    pairs: Tensor
    first: Tensor
    second: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of all weights, by which a score is divided to become a mean of cosines."""
        pairs, first, second = self
        return pairs.sum(dim=(-2, -1)) + first.sum(dim=-1) + second.sum(dim=-1)


class DistanceWeights(NamedTuple):
    """Weights of pairs and single utterances by their distance from the next turn, 1 to w.

    Utterances at larger distances have the weight of distance w. Each field is an array or a
    tensor.

    Attributes:
        pairs: weights of pairs, by the distances of before-1 and before-2, (w, w).
        singles: weights of before-2 alone, (w,).
    """

    pairs: Any
    singles: Any


@dataclass(frozen=True, slots=True)
class ContextScore:
    """A score that compares a context with a candidate.

    ``average`` sums over all pairs (equation 3; within a query, sum and mean give the same ranks).
    ``last:L`` sums over pairs whose before-2 is one of the last L utterances (section 4.1.2).
    ``neighbours`` sums over pairs of adjacent utterances, and ``bi`` over before-2 alone (table 5).
    The other scores of table 5 are ``average+bi``, the sum of both; ``average:b1`` and
    ``average:b2``, in which both utterances of a pair have the same role; ``bi:b1``, which sums
    over before-1 alone; and ``bi:both``, which sums over both roles alone.
    ``weighted`` sums over pairs and before-2, with learned weights by distance. ``maxsim`` is
    algorithm 1 of appendix A. A single utterance has no pairs and is always compared like ``bi``.

    Attributes:
        kind: name of the score, without a number or role.
        last: L of ``last:L``; 0 for other scores.
        role: the only role before that is compared, ``b1`` or ``b2``; empty for both.
    """

    kind: str
    last: int = 0
    role: str = ""

    @classmethod
    def parse(cls, text: str) -> ContextScore:
        """Return the score with a name.

        Raises:
            UserError: The name is unknown.
        """
        match = re.fullmatch(r"last:([1-9]\d{0,5})", text)
        if match:
            return cls("last", int(match[1]))
        if text not in SCORES:
            raise UserError(
                f"unknown score {text!r}. Scores: last:L (such as last:2), {', '.join(SCORES)}."
            )
        kind, _, role = text.partition(":")
        return cls(text) if role == "both" else cls(kind, role=role)

    def __str__(self) -> str:
        return f"last:{self.last}" if self.last else f"{self.kind}{self.role and ':'}{self.role}"

    def select_roles(self, b1: V, b2: V) -> tuple[V, V]:
        """Return what the score reads as before-1 and before-2, given both roles."""
        return (b2 if self.role == "b2" else b1), (b1 if self.role == "b1" else b2)

    def coefficients(self, n: int, weights: DistanceWeights | None = None) -> Coefficients:
        """Return the weights of the score's terms for n utterances.

        Gradients flow through weights that are trained.

        Raises:
            UserError: There are no utterances, the score ``weighted`` has no weights, or the score
                is MaxSim, which is not a sum.
        """
        if n < 1:
            raise UserError("the dialogue has no utterance yet. Add one first.")
        if self.kind == "maxsim":
            raise UserError(
                "maxsim is not a sum over pairs, so no single vector represents the context."
            )
        pairs = torch.ones(n, n).triu(1)
        if self.kind == "weighted":
            if weights is None:
                raise UserError(
                    "the score weighted needs a head with learned weights. Choose such a head, or "
                    "another score, such as average."
                )
            by_pair, by_single = (torch.as_tensor(array, dtype=torch.float32) for array in weights)
            distance = torch.arange(n, 0, -1, device=by_pair.device).clamp(max=len(by_single)) - 1
            by_pair = by_pair.index_select(0, distance).index_select(1, distance)
            by_single = by_single.index_select(0, distance)
            pairs = by_pair * pairs.to(by_pair.device)
            return Coefficients(pairs, torch.zeros_like(by_single), by_single)
        no_pairs = self.kind in ("bi", "bi:both") or n == 1
        first = torch.full((n,), float(self.kind == "bi:both"))
        second = torch.full((n,), float(no_pairs or self.kind == "average+bi"))
        if no_pairs:
            pairs = torch.zeros(n, n)
        elif self.kind == "last":
            pairs[:, : -self.last] = 0
        elif self.kind == "neighbours":
            pairs = pairs - pairs.triu(2)
        return Coefficients(pairs, first, second)


def inverse_lengths(b1: Tensor, b2: Tensor) -> Tensor:
    """Return 1 / |B1_i + B2_j|, (..., n, c), for vectors (..., n, k) and (..., c, k).

    The value is 0 if the two vectors cancel each other.
    """
    squared_norms = b1.square().sum(dim=-1)[..., :, None] + b2.square().sum(dim=-1)[..., None, :]
    squared = squared_norms + 2 * b1 @ b2.mT
    is_nonzero = squared > _MIN_SQUARED_LENGTH * squared_norms
    return torch.where(is_nonzero, squared, 1.0).rsqrt() * is_nonzero


def sum_of_pairs(b1: Tensor, b2: Tensor, coefficients: Coefficients) -> Tensor:
    """Return the weighted sum of the directions of pairs and single utterances of contexts, (m, k).

    This is equation 3 without the candidate.

    Args:
        b1: role before-1, (m, n, k).
        b2: role before-2, (m, n, k).
        coefficients: weights of the terms; those of pairs are 0 for i >= j.
    """
    scaled = inverse_lengths(b1, b2) * coefficients.pairs
    of_b1 = scaled.sum(dim=-1) + coefficients.first / b1.norm(dim=-1).clamp(min=1e-12)
    of_b2 = scaled.sum(dim=-2) + coefficients.second / b2.norm(dim=-1).clamp(min=1e-12)
    total: Tensor = of_b1[..., None, :] @ b1 + of_b2[..., None, :] @ b2
    return total[..., 0, :]


def query_vectors(
    b1: Array, b2: Array, score: str | ContextScore, weights: DistanceWeights | None = None
) -> Array:
    """Return the vector of each context, (m, k) float32.

    Its inner products with candidates are their scores.

    Args:
        b1: role before-1 of each context's n utterances, in order, (m, n, k).
        b2: role before-2, (m, n, k).
        score: any score except ``maxsim``.
        weights: learned weights, for ``weighted``.

    Raises:
        UserError: As for ``ContextScore.coefficients``.
    """
    parsed = ContextScore.parse(score) if isinstance(score, str) else score
    first, second = map(_to_tensor, parsed.select_roles(b1, b2))
    return sum_of_pairs(first, second, parsed.coefficients(first.shape[1], weights)).numpy()


def maxsim(b1: Array, b2: Array, candidates: Array) -> Array:
    """Return MaxSim of contexts and candidates, (m, c) float32 (appendix A, algorithm 1).

    The cosines of a candidate with all pairs are visited in descending order. MaxSim is the mean of
    those whose pair contains an utterance that is in no pair before it.

    Args:
        b1: role before-1 of each context's n utterances, in order, (m, n, k).
        b2: role before-2, (m, n, k).
        candidates: role after of the candidates, (c, k), of unit length.
    """
    first, second, after = _to_tensor(b1), _to_tensor(b2), _to_tensor(candidates)
    m, n, _ = first.shape
    if n < 2:
        return _to_tensor(query_vectors(b1, b2, "bi")).matmul(after.mT).numpy()
    i, j = torch.triu_indices(n, n, 1)
    scores_per_context = torch.empty(m, len(after))
    block = max(1, _MAXSIM_VALUES // (len(i) * max(1, len(after))))
    for start in range(0, m, block):
        rows = slice(start, start + block)
        inverse = inverse_lengths(first[rows], second[rows])[:, i, j]
        scores = (first[rows] @ after.mT)[:, i] + (second[rows] @ after.mT)[:, j]
        scores_per_context[rows] = _mean_of_best(scores * inverse[..., None], i, j, n)
    return scores_per_context.numpy()


def _mean_of_best(scores: Tensor, i: Tensor, j: Tensor, n: int) -> Tensor:
    """Return the mean (m, c) of the scores (m, pairs, c) that algorithm 1 selects.

    In descending order, a pair contains a new utterance exactly if it is the best pair of that
    utterance. So the algorithm selects the best pair of each utterance, and each pair once.
    """
    values, best = [], []
    for utterance in range(n):
        pairs_of_utterance = torch.nonzero((i == utterance) | (j == utterance)).flatten()
        value, best_index = scores.index_select(1, pairs_of_utterance).max(dim=1)
        values.append(value)
        best.append(pairs_of_utterance[best_index])
    total, count = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for later in range(n):
        # Do not count a pair twice if it is also the best pair of an earlier utterance.
        is_counted = torch.zeros_like(count, dtype=torch.bool)
        for earlier in range(later):
            is_counted |= best[earlier] == best[later]
        total += values[later] * ~is_counted
        count += ~is_counted
    return total / count


def turn_scores(
    b1: Array,
    b2: Array,
    candidates: Array,
    score: str | ContextScore,
    weights: DistanceWeights | None = None,
) -> Array:
    """Return the scores (m, c) float32 of contexts and candidates, by any score.

    The arguments are those of ``query_vectors`` and ``maxsim``.
    """
    if str(score) == "maxsim":
        return maxsim(b1, b2, candidates)
    return np.asarray(query_vectors(b1, b2, score, weights) @ candidates.T)


def plan_scores(b1: Array, candidates: Array, goal: Array) -> Array:
    """Score how likely candidates are to lead from contexts to goals, (m, c) float32 (equation 4).

    The score is cos(B2_c, A_g) + 1/n sum over i of cos((B1_i + B2_c) / 2, A_g). Only products of
    two of the three roles are computed. Without a context, n = 0, the score is cos(B2_c, A_g), that
    of the bi-encoder (section 4.2.1).

    Args:
        b1: role before-1 of each context's utterances, (m, n, k).
        candidates: role before-2 of candidates, (c, k), or (m, c, k) if contexts have different
            candidates.
        goal: role after of the goals, (m, k), of unit length.
    """
    first, second, after = _to_tensor(b1), _to_tensor(candidates), _to_tensor(goal)[..., None]
    to_goal = second @ after  # (m, c, 1)
    alone = to_goal[..., 0] / second.norm(dim=-1).clamp(min=1e-12)
    if not first.shape[1]:
        return np.asarray(alone.numpy())
    inverse = inverse_lengths(first, second)
    return np.asarray((alone + ((first @ after + to_goal.mT) * inverse).mean(dim=-2)).numpy())


def _to_tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
