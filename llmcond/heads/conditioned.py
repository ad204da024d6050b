"""Heads that take the features of a sentence and those of its condition, each by itself.

These are the tri-encoder baselines of C-STS and Hyper-CL, and Hyper-CL's hypernetwork (ACL 2024,
section 3): a matrix generated from the condition, applied to the sentence. In full, W_c = f(h_c) is
H x H; in low rank it is the product of two generated factors, H x K and K x H. Features of
sentences are separate ones in the paper, and may be joint ones here, which no paper has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import MultipleOf
from torch import Tensor
from torch.nn import init
from torch.nn.functional import normalize

from llmcond.arrays import Array, MatrixLike, as_matrix
from llmcond.errors import UserError
from llmcond.heads.module import ACTIVATIONS, AT_ONCE, HeadModule
from llmcond.heads.settings import Activation, Size, SizeOrNone, TrainingSettings
from llmcond.system import to_device

#: From so many rows a condition on, a product for each beats one that pads them to equal numbers.
_MANY_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionedSettings(TrainingSettings):
    """What the recipe of any head that takes conditions may say.

    Attributes:
        features: of a sentence: ``separate`` e(s), ``joint`` e(s|c) - e(c), or ``both``.
        transform: whether a linear layer with bias stands before all that is made of the
            condition, as in the released code of C-STS and Hyper-CL; the paper of Hyper-CL has
            none.
        bias: whether linear layers have biases, as in the released code; the paper shows none.
        masks: ``shared``: one dropout mask for a condition; ``own``: one for each sentence, as in
            the released code, where the two of a row see the condition through different masks.
    """

    features: Literal["separate", "joint", "both"] = "separate"
    transform: bool = True
    bias: bool = True
    masks: Literal["shared", "own"] = "shared"


class ConditionedHead(HeadModule):
    """A head that takes e(c) too, behind a linear layer if its settings say so."""

    Settings: ClassVar[type[Any]] = ConditionedSettings
    features = "separate"
    conditioned = True
    multiplies_in_bfloat16 = True

    def add_transform(self, dim: int, bias: bool = True) -> None:
        """Register the layer to ``dim`` before all that is made of the condition, if it is set."""
        if self.settings.transform:
            self.add_layer("transform", dim, self.dim_condition, bias)

    def transformed(self, condition: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the conditions c' that a head goes on with, and which of them each row has.

        c' = W Dropout(h_c) + b where the settings say so, else c' = h_c. Rows are picked by
        ``index_select``: gradients of an index are added in any order on several threads.
        """
        if self.training and self.settings.masks == "own":
            condition = condition.index_select(0, which)
            which = torch.arange(len(which), device=condition.device)
        if self.settings.transform:
            condition = self.affine("transform", self.dropout(condition))
        return condition, which


class Hadamard(ConditionedHead):
    """Z = h_s * c' (C-STS, released code)."""

    def __init__(self, settings: ConditionedSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_in, settings.bias)
        if not settings.transform and dim_in != dim_condition:
            raise UserError(
                f"the sentences' features have {dim_in} dimensions and the conditions' "
                f"{dim_condition}; without a transform the hadamard head needs as many. Set "
                "transform to true."
            )

    def start_at_identity(self) -> None:
        """See :class:`HeadModule`."""
        if self.settings.transform and self.settings.bias:
            init.zeros_(self.get_parameter("transform"))
            init.ones_(self.get_parameter("transform_bias"))

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim_in)."""
        condition, which = self.transformed(condition, which)
        return x * condition.index_select(0, which)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatSettings(ConditionedSettings):
    """The settings of the concatenation.

    Attributes:
        dim: size k of the embeddings.
        activation: behind the layer; GELU in the released code.
    """

    dim: Size
    activation: Activation = "gelu"


class Concat(ConditionedHead):
    """Z = f(W Dropout([h_s; c']) + b) (C-STS, released code), the two halves of W by themselves.

    The condition's half is computed once for each condition of a batch.
    """

    Settings = ConcatSettings

    def __init__(self, settings: ConcatSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_condition)
        into = dim_in + dim_condition
        self.add_weight("sentence", (settings.dim, dim_in), into)
        self.add_weight("condition", (settings.dim, dim_condition), into)
        if settings.bias:
            self.add_weight("bias", (settings.dim,), into)

    def start_at_identity(self) -> None:
        """See :class:`HeadModule`: as the sentence's, but for what the activation does."""
        init.eye_(self.get_parameter("sentence"))

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim)."""
        condition, which = self.transformed(condition, which)
        sentences = self.affine("sentence", self.dropout(x))
        total = sentences + self.affine("condition", self.dropout(condition)).index_select(0, which)
        if self.settings.bias:
            total = total + self.get_parameter("bias")
        return ACTIVATIONS[self.settings.activation](total)


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationSettings(ConditionedSettings):
    """The settings of the ablation: ``rank``, K of the hypernetwork whose parameters it matches."""

    rank: Size


class HypernetAblation(ConditionedHead):
    """Z = h_s * (W2 Dropout(W1 Dropout(c'))).

    Hyper-CL, table 6 and arXiv v1, section 5.3; released code, ``hypernet_ablation``.
    """

    Settings = AblationSettings

    def __init__(self, settings: AblationSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_condition)
        wide = dim_in * settings.rank
        self.add_layer("up", wide, dim_condition, settings.bias)
        self.add_layer("down", dim_in, wide, settings.bias)

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim_in)."""
        condition, which = self.transformed(condition, which)
        up = self.affine("up", self.dropout(condition))
        down = self.affine("down", self.dropout(up))
        return x * down.index_select(0, which)


@dataclass(frozen=True, slots=True, kw_only=True)
class HypernetSettings(ConditionedSettings):
    """The settings of a hypernetwork.

    Attributes:
        dim: size k of the embeddings; H in the paper.
        rank: K of the two factors; 0: W_c in full.
        activation: behind the product; ``none`` in the paper. With ``relu`` no embedding points
            away from another, as no rating is below 0.
    """

    dim: Size
    rank: SizeOrNone
    activation: Activation = "none"


class Hypernet(ConditionedHead):
    """Z = f(h_s^T W_c); in low rank (h_s^T W_1) W_2, W_c never formed (Hyper-CL, section 3.4)."""

    Settings: ClassVar[type[Any]] = HypernetSettings
    generates_matrices = True

    def __init__(self, settings: HypernetSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_condition)
        self._add_generator(dim_in, settings.dim)

    def _add_generator(self, dim_in: int, dim: int) -> None:
        """Register what generates (dim_in, dim) matrices."""
        rank, most = self.settings.rank, min(dim_in, dim)
        if rank > most:
            raise UserError(
                f"rank is {rank}, above the {most} dimensions that a {dim_in} x {dim} matrix has. "
                "Lower it, or set rank to 0 for the full form."
            )
        self._shape, self._factors = (dim_in, dim), {"matrix": (dim_in, dim)}
        if rank:
            self._factors = {"factor1": (dim_in, rank), "factor2": (rank, dim)}
        for name, (height, width) in self._factors.items():
            self.add_layer(name, height * width, self.dim_condition, self.settings.bias)

    def start_at_identity(self) -> None:
        """See :class:`HeadModule`: W_c = I; in low rank W_1 W_2 projects on some K directions.

        Without biases that is so of conditions whose features sum to 1, as one-hot ones do.
        """
        dim_in, dim = self._shape
        starts = {"matrix": torch.eye(dim_in, dim)}
        if self.settings.rank:
            directions = torch.linalg.qr(torch.randn(dim_in, self.settings.rank)).Q
            starts = {"factor1": directions, "factor2": directions.T[:, :dim]}
        with torch.no_grad():
            for name, start in starts.items():
                weight = self.get_parameter(name)
                if self.settings.bias:
                    weight.zero_()
                    self.get_parameter(f"{name}_bias").copy_(start.flatten())
                else:
                    weight.copy_(start.flatten()[:, None].expand_as(weight))

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim)."""
        values = self._times_matrices(x, condition, which)
        if self.settings.activation == "none":
            return values
        return self.dropout(ACTIVATIONS[self.settings.activation](values))

    def _times_matrices(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        c, which = self.transformed(condition, which)
        if torch.is_grad_enabled() or len(c) <= AT_ONCE:
            return by_condition(x, which, self.factors(c), self.batched_product)
        # Outside of training nothing is kept, so memory need not grow with the conditions.
        order = torch.argsort(which, stable=True)
        ends = torch.bincount(which, minlength=len(c)).cumsum(0).tolist()
        blocks = []
        for start in range(0, len(c), AT_ONCE):
            stop = min(start + AT_ONCE, len(c))
            rows = order[ends[start - 1] if start else 0 : ends[stop - 1]]
            factors = self.factors(c[start:stop])
            blocks.append(by_condition(x[rows], which[rows] - start, factors, self.batched_product))
        return torch.cat(blocks)[torch.argsort(order)]

    def factors(self, transformed: Tensor) -> list[Tensor]:
        """Return W_c, or the factors whose product it is, (u, a, b) each; one dropout mask each.

        Conditions are (u, dim_c), as :meth:`transformed` gives them.
        """
        return [
            self.affine(name, self.dropout(transformed)).view(-1, *shape)
            for name, shape in self._factors.items()
        ]

    def generated_matrices(self, condition: MatrixLike) -> list[Array]:
        """See :class:`HeadModule`; in low rank the factors are (u, dim, K) and (u, K, k)."""
        with torch.inference_mode():
            given = torch.from_numpy(as_matrix(condition).read())
            c, _ = self.transformed(given, torch.arange(len(given)))
            return [factor.numpy() for factor in self.factors(c)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowersSettings(HypernetSettings):
    """The settings of the two towers; those of the hypernetwork are its tower's.

    Attributes:
        dim: size of the embeddings, half for each tower.
        hidden: width of the MLP's hidden layer.
    """

    features: Literal["both"] = "both"
    dim: Annotated[Size, MultipleOf(2)]
    hidden: Size


class Towers(Hypernet):
    """An MLP on joint features and a hypernetwork on separate ones; no paper has it.

    What joint features tell of a sentence under a condition went through all layers of the encoder;
    what e(s) tells was not disturbed by the condition. Each tower's embedding has length 1 before
    both are concatenated, so that the cosine is the mean of the two cosines.
    """

    Settings = TowersSettings
    features = "both"
    generates_matrices = False

    def __init__(self, settings: TowersSettings, dim_in: int, dim_condition: int) -> None:
        if dim_in <= dim_condition:
            raise UserError(
                f"the towers head needs joint features beside separate ones of {dim_condition} "
                f"dimensions, and the features have {dim_in} in all."
            )
        joint = dim_in - dim_condition
        HeadModule.__init__(self, settings, dim_in, dim_condition)
        self.add_layer("weight1", settings.hidden, joint, bias=False)
        self.add_layer("weight2", settings.dim // 2, settings.hidden, bias=False)
        self.add_transform(dim_condition)
        self._add_generator(dim_condition, settings.dim // 2)

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim)."""
        # The sentence's own features stand last, as many as the condition's: one encoder made both.
        joint, sentence = x[:, : -self.dim_condition], x[:, -self.dim_condition :]
        activation = ACTIVATIONS[self.settings.activation]
        hidden = self.dropout(activation(self.affine("weight1", joint)))
        first = self.dropout(activation(self.affine("weight2", hidden)))
        second = super().forward(sentence, condition, which)
        return torch.cat([normalize(first), normalize(second)], dim=1)


def by_condition(
    x: Tensor,
    which: Tensor,
    factors: list[Tensor],
    batched_product: Callable[[Tensor, Tensor], Tensor] = torch.bmm,
) -> Tensor:
    """Multiply each row by the matrices of its condition, left to right: ((x F1) F2) ...

    No matrix is copied for each row, and no product of two factors is formed. Rows of a condition
    are multiplied at once, padded to a common number; where a condition has far more rows than
    others, it is cut into several. Where conditions are few, as relations are, nothing is padded.

    ``x`` is (m, dim), ``which`` (m,) the condition of each row, below u; factors are (u, a, b), the
    first with a = dim, and the result (m, b) of the last.
    """
    count = len(factors[0])
    if not len(x):
        return x.new_empty(0, factors[-1].shape[2], dtype=factors[-1].dtype)
    put = partial(to_device, device=x.device)
    which = which.cpu()  # the one time that a GPU is waited for: the layout is made on the CPU
    rows = torch.bincount(which, minlength=count)
    order = torch.argsort(which, stable=True)
    if 1 < count <= len(x) // _MANY_ROWS:
        parts = list(torch.split(x.index_select(0, put(order)), rows.tolist()))
        for factor in factors:
            parts = [
                batched_product(part[None], matrix[None])[0]
                for part, matrix in zip(parts, factor, strict=True)
            ]
        return torch.cat(parts).index_select(0, put(torch.argsort(order)))
    most = max(4, -(-2 * len(x) // max(count, 1)))
    width = int(min(int(rows.max()), most))
    pieces = (rows + width - 1) // width
    ordered = which[order]
    begins = torch.cumsum(rows, 0) - rows
    rank = torch.arange(len(x)) - begins[ordered]
    position = (torch.cumsum(pieces, 0) - pieces)[ordered] * width + rank
    total = int(pieces.sum())
    grouped = x.new_zeros(total * width, x.shape[1])
    grouped = grouped.index_copy(0, put(position), x[put(order)])
    grouped = grouped.view(total, width, -1)
    # As a rule every condition is one piece, and no matrix is copied at all.
    single = bool((pieces == 1).all())
    owner = put(torch.repeat_interleave(torch.arange(count), pieces))
    for factor in factors:
        # Not factor[owner]: gradients of an index are added in any order on several threads.
        matrices = factor if single else factor.index_select(0, owner)
        grouped = batched_product(grouped, matrices)
    back = torch.empty_like(position)
    back[order] = position
    return grouped.reshape(total * width, -1)[put(back)]
