"""Heads that read the features of a sentence and, separately, those of its condition.

These are the tri-encoder baselines of C-STS and Hyper-CL, and Hyper-CL's hypernetwork (ACL 2024,
section 3): a matrix is generated from the condition and applied to the sentence. In full form, W_c
= f(h_c) is H x H; in low rank it is the product of two generated factors, H x K and K x H. The
papers use separate features of sentences; these heads can also read joint ones, which no paper
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import MultipleOf
from torch import Tensor
from torch.nn import init
from torch.nn.functional import normalize
from typing_extensions import override

from llmcond.arrays import Array, MatrixLike, as_matrix
from llmcond.errors import UserError
from llmcond.heads.module import ACTIVATIONS, CONDITIONS_PER_BLOCK, HeadModule
from llmcond.heads.settings import Activation, Size, SizeOrNone, TrainingSettings
from llmcond.system import move_to_device

#: With at least this many rows of a condition, a separate product is faster than a batched one
#: that pads several conditions to an equal number of rows.
_MIN_ROWS_PER_PRODUCT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionedSettings(TrainingSettings):
    """Recipe settings of heads that read conditions.

    Attributes:
        features: features of a sentence: ``separate`` e(s), ``joint`` e(s|c) - e(c), or ``both``.
        transform: whether a linear layer with bias precedes everything that is computed from the
            condition, as in the released code of C-STS and Hyper-CL; the Hyper-CL paper has none.
        bias: whether linear layers have biases, as in the released code; the paper shows none.
        masks: dropout masks of conditions. ``shared``: one mask per condition. ``own``: one per
            sentence, as in the released code, where the two sentences of a row see the condition
            through different masks.
    """

    features: Literal["separate", "joint", "both"] = "separate"
    transform: bool = True
    bias: bool = True
    masks: Literal["shared", "own"] = "shared"


class ConditionedHead(HeadModule):
    """A head that also reads e(c), through a linear layer if its settings say so."""

    Settings: ClassVar[type[Any]] = ConditionedSettings
    features = "separate"
    conditioned = True
    multiplies_in_bfloat16 = True

    def add_transform(self, dim: int, bias: bool = True) -> None:
        """Register the ``transform`` layer to ``dim`` if the settings have it."""
        if self.settings.transform:
            self.add_layer("transform", dim, self.dim_condition, bias)

    def transformed(self, condition: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transformed conditions c', and the index of each row's condition.

        c' = W Dropout(h_c) + b if the settings have ``transform``, otherwise c' = h_c. Rows are
        selected with ``index_select``, because the gradients of indexing are summed in varying
        order on several threads.
        """
        if self.training and self.settings.masks == "own":
            condition = condition.index_select(0, which)
            which = torch.arange(len(which), device=condition.device)
        if self.settings.transform:
            condition = self.affine("transform", self.dropout(condition))
        return condition, which


class Hadamard(ConditionedHead):
    """The elementwise product z = h_s * c' (C-STS, released code)."""

    def __init__(self, settings: ConditionedSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_in, settings.bias)
        if not settings.transform and dim_in != dim_condition:
            raise UserError(
                f"the sentences' features have {dim_in} dimensions and the conditions' "
                f"{dim_condition}; without a transform the hadamard head needs equal sizes. Set "
                "transform to true."
            )

    @override
    def start_at_identity(self) -> None:
        if self.settings.transform and self.settings.bias:
            init.zeros_(self.get_parameter("transform"))
            init.ones_(self.get_parameter("transform_bias"))

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim_in)."""
        condition, which = self.transformed(condition, which)
        return x * condition.index_select(0, which)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatSettings(ConditionedSettings):
    """Recipe settings of the concatenation head.

    Attributes:
        dim: size k of the embeddings.
        activation: activation after the layer; GELU in the released code.
    """

    dim: Size
    activation: Activation = "gelu"


class Concat(ConditionedHead):
    """The concatenation z = f(W Dropout([h_s; c']) + b) (C-STS, released code).

    The two halves of W are separate parameters, so the condition's half is computed only once per
    distinct condition of a batch.
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

    @override
    def start_at_identity(self) -> None:
        # The condition's half stays random, and the activation still changes the features.
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
    """Recipe settings of the hypernetwork ablation.

    Attributes:
        rank: rank K of the hypernetwork whose number of parameters the ablation matches.
    """

    rank: Size


class HypernetAblation(ConditionedHead):
    """The ablation of the hypernetwork: z = h_s * (W2 Dropout(W1 Dropout(c'))).

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
    """Recipe settings of a hypernetwork.

    Attributes:
        dim: size k of the embeddings; H in the paper.
        rank: rank K of the two factors; 0: W_c in full.
        activation: activation after the product; ``none`` in the paper. With ``relu`` no two
            embeddings point in opposite directions, just as no rating is below 0.
    """

    dim: Size
    rank: SizeOrNone
    activation: Activation = "none"


class Hypernet(ConditionedHead):
    """The hypernetwork z = f(h_s^T W_c) (Hyper-CL, section 3.4).

    In low rank z = f((h_s^T W_1) W_2), without forming W_c.
    """

    Settings: ClassVar[type[Any]] = HypernetSettings
    generates_matrices = True

    def __init__(self, settings: HypernetSettings, dim_in: int, dim_condition: int) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_transform(dim_condition)
        self._add_generator(dim_in, settings.dim)

    def _add_generator(self, dim_in: int, dim: int) -> None:
        """Register the layers that generate (dim_in, dim) matrices."""
        rank, max_rank = self.settings.rank, min(dim_in, dim)
        if rank > max_rank:
            raise UserError(
                f"rank is {rank}, but a {dim_in} x {dim} matrix has a rank of at most {max_rank}. "
                "Lower it, or set rank to 0 for the full form."
            )
        self._shape, self._factors = (dim_in, dim), {"matrix": (dim_in, dim)}
        if rank:
            self._factors = {"factor1": (dim_in, rank), "factor2": (rank, dim)}
        for name, (height, width) in self._factors.items():
            self.add_layer(name, height * width, self.dim_condition, self.settings.bias)

    def start_at_identity(self) -> None:
        """Initialise W_c = I; in low rank W_1 W_2 is a projection on K random directions.

        Without biases this holds for conditions whose features sum to 1, as one-hot vectors do.
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
        values = self._multiply_matrices(x, condition, which)
        if self.settings.activation == "none":
            return values
        return self.dropout(ACTIVATIONS[self.settings.activation](values))

    def _multiply_matrices(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Multiply each row by the matrix of its condition."""
        c, which = self.transformed(condition, which)
        if torch.is_grad_enabled() or len(c) <= CONDITIONS_PER_BLOCK:
            return self._multiply_block(x, c, which)
        # Without gradients, intermediate values need not be kept. Computing in blocks then keeps
        # memory from growing with the number of conditions.
        order = torch.argsort(which, stable=True)
        ends = torch.bincount(which, minlength=len(c)).cumsum(0).tolist()
        blocks = []
        for start in range(0, len(c), CONDITIONS_PER_BLOCK):
            stop = min(start + CONDITIONS_PER_BLOCK, len(c))
            rows = order[ends[start - 1] if start else 0 : ends[stop - 1]]
            blocks.append(self._multiply_block(x[rows], c[start:stop], which[rows] - start))
        return torch.cat(blocks)[torch.argsort(order)]

    def _multiply_block(self, x: Tensor, c: Tensor, which: Tensor) -> Tensor:
        """Multiply rows by generated matrices, whose conditions may be in any order."""
        groups = ConditionGroups(which, len(c))
        rows = groups.pad(x)
        for name, shape in self._factors.items():
            # Dropout comes first, so that masks do not depend on the order of the groups.
            conditions = self.dropout(c).index_select(0, groups.order)
            generated = self._generate(name, conditions).view(-1, *shape)
            rows = groups.multiply(rows, generated, self.batched_product).to(c.dtype)
        return groups.restore(rows)

    def _generate(self, name: str, conditions: Tensor) -> Tensor:
        """Generate the matrices of conditions, flattened, in the type that multiplies rows.

        They are by far the largest values of a fit, so that in bfloat16 they are not converted to
        the type of the weights and back.
        """
        if not self.in_bfloat16:
            return self.affine(name, conditions)
        weight = self.get_parameter(name).bfloat16().T
        if not self.settings.bias:
            return conditions.bfloat16() @ weight
        bias = self.get_parameter(f"{name}_bias").bfloat16()
        return torch.addmm(bias, conditions.bfloat16(), weight)

    def factors(self, transformed: Tensor) -> list[Tensor]:
        """Return W_c, or the factors whose product it is, (u, a, b) each.

        Conditions are (u, dim_c), as ``transformed`` returns them. Each factor has its own dropout
        mask.
        """
        return [
            self.affine(name, self.dropout(transformed)).view(-1, *shape)
            for name, shape in self._factors.items()
        ]

    @override
    def generated_matrices(self, condition: MatrixLike) -> list[Array]:
        # In low rank the factors are (u, dim, K) and (u, K, k).
        with torch.inference_mode():
            features = torch.from_numpy(as_matrix(condition).read())
            c, _ = self.transformed(features, torch.arange(len(features)))
            return [factor.numpy() for factor in self.factors(c)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowersSettings(HypernetSettings):
    """Recipe settings of the two towers.

    The settings of ``HypernetSettings`` belong to the hypernetwork tower.

    Attributes:
        dim: size of the embeddings, half for each tower.
        hidden: width of the MLP's hidden layer.
    """

    features: Literal["both"] = "both"
    dim: Annotated[Size, MultipleOf(2)]
    hidden: Size


class Towers(Hypernet):
    """An MLP on joint features and a hypernetwork on separate ones; no paper has it.

    What joint features say about a sentence under a condition has passed through all layers of the
    encoder; what e(s) says was not disturbed by the condition. The embedding of each tower has
    length 1 before both are concatenated, so that the cosine is the mean of the two cosines.
    """

    Settings = TowersSettings
    features = "both"
    generates_matrices = False

    def __init__(self, settings: TowersSettings, dim_in: int, dim_condition: int) -> None:
        if dim_in <= dim_condition:
            raise UserError(
                f"the towers head needs joint features in addition to separate ones of "
                f"{dim_condition} dimensions, but the features have only {dim_in} in total."
            )
        joint = dim_in - dim_condition
        HeadModule.__init__(self, settings, dim_in, dim_condition)
        self.add_layer("weight1", settings.hidden, joint, bias=False)
        self.add_layer("weight2", settings.dim // 2, settings.hidden, bias=False)
        self.add_transform(dim_condition)
        self._add_generator(dim_condition, settings.dim // 2)

    def forward(self, x: Tensor, condition: Tensor, which: Tensor) -> Tensor:
        """Return embeddings, (m, dim)."""
        # The separate features of the sentence come last. They have as many dimensions as those of
        # the condition, as the same encoder computed both.
        joint, sentence = x[:, : -self.dim_condition], x[:, -self.dim_condition :]
        activation = ACTIVATIONS[self.settings.activation]
        hidden = self.dropout(activation(self.affine("weight1", joint)))
        first = self.dropout(activation(self.affine("weight2", hidden)))
        second = super().forward(sentence, condition, which)
        return torch.cat([normalize(first), normalize(second)], dim=1)


class ConditionGroups:
    """Rows grouped by their condition, to multiply each row by the matrix of its condition.

    Matrices are not copied for each row, and no product of two factors is formed. Conditions are
    sorted by their number of rows. Those with many rows are multiplied one by one. The others are
    multiplied together with all that have a similar number of rows, padded to the largest, so that
    less than half of the padded rows are empty.

    Attributes:
        order: conditions, (u,), in the order in which ``multiply`` reads their matrices.
    """

    def __init__(self, which: Tensor, count: int) -> None:
        """Group rows.

        Args:
            which: (m,) index of each row's condition, below ``count``.
            count: number of conditions, u.
        """
        move = partial(move_to_device, device=which.device)
        which = which.cpu()  # the only wait for a GPU; the layout is computed on the CPU
        counts = torch.bincount(which, minlength=count)
        order = torch.argsort(counts, descending=True, stable=True)
        self._groups = _group_sizes(counts[order].tolist())
        sizes = torch.tensor(self._groups, dtype=torch.int64).view(-1, 2)
        widths = torch.repeat_interleave(sizes[:, 1], sizes[:, 0])
        starts = torch.empty(count, dtype=torch.int64)
        starts[order] = torch.cumsum(widths, 0) - widths
        rows = torch.argsort(which, stable=True)
        sorted_conditions = which[rows]
        rank = torch.arange(len(which)) - (torch.cumsum(counts, 0) - counts)[sorted_conditions]
        positions = torch.empty_like(which)
        positions[rows] = starts[sorted_conditions] + rank
        self.order, self._positions = move(order), move(positions)

    def pad(self, x: Tensor) -> Tensor:
        """Return the rows of ``x``, (m, a), in groups, (padded, a), with zeros in between."""
        size = sum(n * width for n, width in self._groups)
        return x.new_zeros(size, x.shape[1]).index_copy(0, self._positions, x)

    def multiply(
        self,
        rows: Tensor,
        matrices: Tensor,
        batched_product: Callable[[Tensor, Tensor], Tensor] = torch.bmm,
    ) -> Tensor:
        """Multiply grouped rows by the matrices of their conditions.

        Args:
            rows: rows as ``pad`` returns them, (padded, a).
            matrices: matrices of the conditions in ``order``, (u, a, b).
            batched_product: batched matrix product.

        Returns:
            The products, (padded, b), in the same groups.
        """
        parts = torch.split(rows, [n * width for n, width in self._groups])
        groups = torch.split(matrices, [n for n, _ in self._groups])
        products = [
            batched_product(part.view(n, width, part.shape[1]), group).flatten(0, 1)
            for part, group, (n, width) in zip(parts, groups, self._groups, strict=True)
        ]
        return torch.cat(products)

    def restore(self, rows: Tensor) -> Tensor:
        """Return grouped rows, (padded, b), in the order before ``pad``, (m, b)."""
        return rows.index_select(0, self._positions)


def _group_sizes(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the number of conditions of each group, and the number of rows that each is padded to.

    Args:
        counts: number of rows of each condition, in descending order.
    """
    sizes = [(0, 0)] if not counts else []
    for count in counts:
        n, width = sizes[-1] if sizes else (0, -1)
        if width < _MIN_ROWS_PER_PRODUCT and (count == width or 2 * count > width >= 0):
            sizes[-1] = n + 1, width
        else:
            sizes.append((1, count))
    return sizes
