"""The three roles of an utterance: maps of its features, and what they are trained by.

Triple-Encoders (ACL 2024, section 3) tell an encoder by special tokens whether an utterance stands
before another one as the first or second of a pair, or after. Here it is encoded once, and a map
for each role reads its features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, softplus

from llmcond.arrays import Array, MatrixLike, as_matrix
from llmcond.errors import UserError
from llmcond.heads.base import Fitted
from llmcond.heads.loading import restore_head
from llmcond.heads.module import HeadModule
from llmcond.heads.settings import GradientSettings, SizeOrNone
from llmcond.heads.storage import read_head
from llmcond.kinds.dialogue.turns import (
    DistanceWeights,
    Score,
    State,
    inverse_lengths,
    sum_of_pairs,
)

#: Utterances mapped at a time.
_BLOCK = 8_192

ROLES = ("b1", "b2", "a")

#: Steps of learned weights are so many times those of maps: their values go further.
_FASTER = 10.0
#: softplus of them: pairs weigh 1 at first, and utterances by themselves next to nothing.
_ONE, _LITTLE = 0.5413, -3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings(GradientSettings):
    """What the recipe of a head may say that maps utterances to roles.

    Attributes:
        map: of each role: ``linear``, W e + b; or ``mlp``, e + W_2 GELU(W_1 e + b_1) + b_2. Both
            are the identity at first.
        hidden: units of the MLP; 0: twice the features' size.
        objective: what is minimised. ``ccl`` (curved contrastive learning, section 2.3 and arXiv
            2211.07591): the squared error of cosines of before-2 and after, of which those at
            distance d from the target are to be 1 - d / w; ``c3l`` (equation 1): that of pairs;
            ``rank``: the cross-entropy of the target among those of the batch, by the score over
            ``temperature``; ``weighted``: the same by weights that are learned for each distance.
        score: what candidates are scored by, unless told otherwise; see
            :class:`~llmcond.kinds.dialogue.turns.Score`.
        norm: of c3l: the pair at distances d_i and d_j is to have s = 2 - (d_i + d_j) / w, brought
            to the range from 1 / w to 1 from that of the window's ``actual`` pairs (released code),
            or from 1 / w to 2 - 3 / w (``paper``).
        curved: whether c3l's pairs are to be farther the farther they are; else all are to have 1.
        hard_negatives: whether c3l has pairs with utterances of other windows, which are to have 0
            (section 3.1).
        window: turns of a window, w, the target included.
        temperature: of ``rank`` and ``weighted``.
        warmup: share of the steps in which the learning rate rises from 0.
        schedule: how it falls then: ``linear`` to 0, or ``constant``.
    """

    map: Literal["linear", "mlp"] = "linear"
    hidden: SizeOrNone = 0
    objective: Literal["ccl", "c3l", "rank", "weighted"]
    score: str
    norm: Literal["actual", "paper"] = "actual"
    curved: bool = True
    hard_negatives: bool = True
    window: Annotated[int, Ge(3), Le(1_000)] = 5
    temperature: Annotated[float, Gt(0), Le(1_000_000)] = 0.05
    warmup: Annotated[float, Ge(0), Lt(1)] = 0.1
    schedule: Literal["linear", "constant"] = "linear"

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        try:
            score = Score.parse(self.score)
        except UserError as error:
            raise ValueError(str(error)) from error
        if score.kind == "weighted" and self.objective != "weighted":
            raise ValueError(
                f"the objective {self.objective} learns no weights for the score weighted: set "
                "objective to weighted, or another score"
            )
        if self.members > 1:
            raise ValueError("scores of several heads are no sums of pairs: set members to 1")

    @property
    def trained_score(self) -> Score:
        """Return the score that ``rank`` and ``weighted`` are trained by, a sum."""
        if self.objective == "weighted":
            return Score("weighted")
        score = Score.parse(self.score)
        return Score("average") if score.kind == "maxsim" else score

    @property
    def least(self) -> int:
        """Return how many utterances a target has before it: two, where they are paired."""
        return 1 if self.objective == "ccl" or self.trained_score.kind == "bi" else 2


@dataclass(frozen=True, eq=False)
class FittedRoles(Fitted):
    """A fitted head that maps utterances to roles: an immutable value, like other heads.

    Attributes:
        scored_by: what candidates are scored by instead of what its recipe says.
    """

    refusal = "maps no utterances of dialogues"

    scored_by: Score | None = None

    module: Roles

    @property
    def dim_out(self) -> int:
        """Return the size of roles, which is that of the features."""
        return self.dim_in

    @property
    def score(self) -> Score:
        """Return what candidates are scored by."""
        return self.scored_by or Score.parse(self.settings.score)

    @property
    def weights(self) -> DistanceWeights | None:
        """Return the weights of distances that it learned, as arrays; None where it has none."""
        found = self.module.distance_weights
        return found and DistanceWeights(*(own.detach().numpy() for own in found))

    def scoring(self, score: str) -> FittedRoles:
        """Return the same head with another score.

        Raises:
            UserError: no such score, or one by weights that this head did not learn.
        """
        chosen = Score.parse(score)
        if chosen.kind == "weighted":
            chosen.coefficients(1, self.weights)
        return replace(self, scored_by=chosen)

    def before(self, vectors: MatrixLike) -> tuple[Array, Array]:
        """Return the roles before-1 and before-2 of utterances, (n, k) float32, of features (n, d).

        Raises:
            UserError: features of another size than those it was fitted on.
        """
        first, second = self._mapped(vectors, self.module.before)
        return first, second

    def after(self, vectors: MatrixLike) -> Array:
        """Return the role after of utterances, (n, k) float32, of length 1; see :meth:`before`."""
        (found,) = self._mapped(vectors, lambda x: (self.module.after(x),))
        return found

    def start(self, vectors: NDArray[Any]) -> State:
        """Return a dialogue of some utterances, in order, of features (n, d)."""
        state = State(self.before, self.score, self.weights)
        for vector in vectors:
            state = state.add(vector)
        return state

    def _mapped(
        self, vectors: MatrixLike, role: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> list[Array]:
        if vectors.shape[1] != self.dim_in:
            raise UserError(
                f"the features have {vectors.shape[1]} dimensions; this {self.kind} head was "
                f"fitted on {self.dim_in}."
            )
        matrix, blocks = as_matrix(vectors), []
        with torch.inference_mode():
            for start in range(0, max(len(matrix), 1), _BLOCK):
                part = torch.from_numpy(matrix.read(slice(start, start + _BLOCK)))
                blocks.append([own.numpy() for own in role(torch.nn.functional.normalize(part))])
        return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


def load_roles_head(folder: Path) -> tuple[FittedRoles, dict[str, Any]]:
    """Return a head that maps utterances of dialogues to roles; else as :func:`load_head`."""
    files = read_head(folder)
    return restore_head(files, FittedRoles), files.description


class Roles(HeadModule):
    """A map for each role, and weights by distance where the objective learns them.

    It reads vectors of length 1, and gives before-1 and before-2 of any length, as pairs are means
    of what an encoder gives, and after of length 1.
    """

    Settings = RoleSettings
    features = "alone"
    Fitted = FittedRoles
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

    def start_at_identity(self) -> None:
        """See :class:`HeadModule`."""
        if self.is_identity:
            return
        for role in ROLES:
            if self.settings.map == "linear":
                nn.init.eye_(self.get_parameter(role))
            else:
                nn.init.zeros_(self.get_parameter(role))
            nn.init.zeros_(self.get_parameter(f"{role}_bias"))

    def role(self, name: str, x: Tensor) -> Tensor:
        """Return one role of utterances, (n, k), of features of length 1, (n, dim)."""
        if self.is_identity:
            return x
        if self.settings.map == "linear":
            return self.affine(name, self.dropout(x))
        # Units of variance 1 are what its first weights are drawn for.
        hidden = nn.functional.gelu(self.affine(f"{name}_hidden", x * self.dim_in**0.5))
        return x + self.affine(name, self.dropout(hidden))

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the roles before-1 and before-2, (n, k) each."""
        return self.role("b1", x), self.role("b2", x)

    def after(self, x: Tensor) -> Tensor:
        """Return the role after, (n, k), of length 1."""
        return normalize(self.role("a", x))

    @property
    def distance_weights(self) -> DistanceWeights | None:
        """Return the learned weights, as tensors; None where none are learned."""
        if self.settings.objective != "weighted":
            return None
        return DistanceWeights(
            softplus(_FASTER * self.pair_weights + _ONE),
            softplus(_FASTER * self.single_weights + _LITTLE),
        )

    def loss(
        self, x: Tensor, rows: Tensor, drawn: np.random.Generator, dialogue: Tensor | None = None
    ) -> Tensor:
        """Return the objective of a batch of windows, a scalar.

        Args:
            x: (u, dim) features of length 1 of distinct utterances.
            rows: (m, w) int64 the utterances of windows among them, the target last; -1: none.
            drawn: of the utterances that negatives have.
            dialogue: (m,) the dialogue of each window, where a batch has many windows of one:
                these are no negatives of each other, or the topic would tell against a target.
        """
        objective = _OBJECTIVES[self.settings.objective]
        loss: Tensor = objective(self, x, _Windows(rows, dialogue), drawn)
        return loss


class NoRoles(Roles):
    """All roles are the features as they are: the zero-shot setting."""

    is_identity = True

    def __init__(self, settings: RoleSettings, dim_in: int, dim_condition: int = 0) -> None:
        if settings.objective == "weighted":
            raise UserError(
                "the head none has nothing to learn, and the objective weighted learns weights. "
                "Set objective to rank, or name the head weighted."
            )
        super().__init__(settings, dim_in, dim_condition)


def curve(settings: RoleSettings) -> Tensor:
    """Return what the pair (i, j), i < j, of a full window is to have in c3l, (w - 1, w - 1).

    Equation 1 of Triple-Encoders: the sum of what both utterances have by themselves, 1 - d / w,
    normalised; for windows of 5 turns by the actual range 1, .8, .6, .6, .4 and .2.
    """
    w = settings.window
    distance = torch.arange(w - 1, 0, -1)
    closeness = 2 - (distance[:, None] + distance) / w
    # Adjacent to the target, and at the beginning of the window.
    highest, lowest = 2 - 3 / w, 2 - (2 * w - 3) / w
    if settings.norm == "paper":
        lowest = 1 / w
    if not settings.curved or highest == lowest:
        return torch.ones(w - 1, w - 1)
    return 1 / w + (1 - 1 / w) * (closeness - lowest) / (highest - lowest)


class _Windows:
    """The utterances of windows: contexts (m, n), which of them are there, and targets (m,)."""

    def __init__(self, rows: Tensor, dialogue: Tensor | None) -> None:
        self.rows, self.target = rows, rows[:, -1]
        if dialogue is None:
            dialogue = torch.arange(len(rows), device=rows.device)
        self.dialogue = dialogue
        self.present = rows[:, :-1] >= 0
        self.context = rows[:, :-1].clamp(min=0)
        # The pairs i < j of utterances that are there, (m, n, n).
        both = self.present[:, :, None] & self.present[:, None, :]
        self.pairs = both.triu(1)

    def of(self, vectors: Tensor) -> Tensor:
        """Return the vectors of contexts, (m, n, k)."""
        # Not vectors[positions]: gradients of an index are added in any order.
        found = vectors.index_select(0, self.context.flatten())
        return found.view(*self.context.shape, -1)

    def others(self, drawn: np.random.Generator, role: str) -> tuple[Tensor, Tensor]:
        """Draw an utterance for each place of each context, (m, n).

        They are drawn for a ``role``, before or after, from those that have it in the batch: had
        negatives another depth in their dialogues than positives, that alone would tell.

        Returns:
            They, and a mask that is true where the place is taken, the window has no such text and
            the utterance is of another dialogue.
        """
        pool, of = self.target, self.dialogue
        if role == "before":
            pool = self.context[self.present]
            of = self.dialogue[:, None].expand_as(self.present)[self.present]
        drawn_places = drawn.integers(len(pool), size=tuple(self.context.shape))
        places = torch.from_numpy(drawn_places).to(pool.device)
        other = pool[places]
        within = (other[:, :, None] == self.rows[:, None, :]).any(dim=2)
        return other, self.present & ~within & (of[places] != self.dialogue[:, None])


def _mean_of_squares(errors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean of squared errors where their masks are true, over all of them together."""
    total = torch.stack([(error.square() * mask).sum() for error, mask in errors]).sum()
    return total / torch.stack([mask.sum() for _, mask in errors]).sum().clamp(min=1)


def _ccl(head: Roles, x: Tensor, batch: _Windows, drawn: np.random.Generator) -> Tensor:
    """Curved contrastive learning (section 2.3), with reversed and random negatives."""
    w = head.settings.window
    before, after = normalize(head.role("b2", x)), head.after(x)
    context, target = batch.of(before), after.index_select(0, batch.target)
    wanted = 1 - torch.arange(w - 1, 0, -1, device=x.device) / w
    reversed_ = before.index_select(0, batch.target)[:, None] * batch.of(after)
    other, apart = batch.others(drawn, "after")
    random = after.index_select(0, other.flatten()).view(*other.shape, -1)
    unequal = batch.present & (batch.context != batch.target[:, None])
    return _mean_of_squares(
        [
            ((context * target[:, None]).sum(dim=2) - wanted, batch.present),
            (reversed_.sum(dim=2), unequal),
            ((context * random).sum(dim=2), apart),
        ]
    )


def _c3l(head: Roles, x: Tensor, batch: _Windows, drawn: np.random.Generator) -> Tensor:
    """Contextualised curved contrastive learning (Triple-Encoders, equation 1).

    Its hard negatives of each utterance u (section 3.1): (B1 u, B2 r), (B1 r, B2 u), (B1 r, B2 r').
    """
    before1, before2 = head.before(x)
    target = head.after(x).index_select(0, batch.target)[..., None]
    b1, b2 = batch.of(before1), batch.of(before2)
    inverse = inverse_lengths(b1, b2)
    cosines = (b1 @ target + (b2 @ target).mT) * inverse
    errors = [(cosines - curve(head.settings).to(x.device), batch.pairs)]
    if head.settings.hard_negatives:
        (first, apart1), (second, apart2) = (batch.others(drawn, "before") for _ in range(2))
        r1 = before1.index_select(0, first.flatten()).view_as(b1)
        r2 = before2.index_select(0, second.flatten()).view_as(b2)
        for pair, mask in ((b1 + r2, apart2), (r1 + b2, apart1), (r1 + r2, apart1 & apart2)):
            errors.append(((normalize(pair, dim=2) @ target)[..., 0], mask))
    return _mean_of_squares(errors)


def _rank(head: Roles, x: Tensor, batch: _Windows, drawn: np.random.Generator) -> Tensor:
    """Cross-entropy of targets among those of the batch; of equal texts none is a negative."""
    settings = head.settings
    weights, score = head.distance_weights, settings.trained_score
    pairs, singles = score.coefficients(settings.window - 1, weights)
    pairs, singles = pairs.to(x.device) * batch.pairs, singles.to(x.device) * batch.present
    before1, before2 = head.before(x)
    queries = sum_of_pairs(batch.of(before1), batch.of(before2), pairs, singles)
    if weights is None:
        queries = queries / (pairs.sum(dim=(1, 2)) + singles.sum(dim=1)).clamp(min=1)[:, None]
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
