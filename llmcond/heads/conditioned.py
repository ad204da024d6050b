"""Families of heads: dense layers, and heads that read a condition's features separately.

These are the tri-encoder baselines of C-STS and Hyper-CL, and Hyper-CL's hypernetwork (ACL 2024,
section 3): a matrix is generated from the condition and applied to the sentence. In full form, W_c
= f(h_c) is H x H; in low rank it is the product of two generated factors, H x K and K x H. The
papers use separate features of sentences; these heads can also read joint ones, which no paper
does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from torch import Tensor
from torch.nn import init
from torch.nn.functional import normalize
from typing_extensions import override

from llmcond.base.arrays import Array, MatrixLike, as_matrix
from llmcond.base.errors import UserError
from llmcond.base.system import move_to_device
from llmcond.heads.module import ACTIVATIONS, CONDITIONS_PER_BLOCK, HeadModule
from llmcond.heads.numpy_heads import DENSE_KINDS, DenseLayer, FitReport, PairArrays
from llmcond.heads.settings import (
    Activation,
    IcaSettings,
    MlpSettings,
    NoSettings,
    ProjectionSettings,
    Size,
    SizedSettings,
    SizeOrNone,
    TrainingSettings,
)

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


#: Directions whose spread is less than this share of the largest spread are rounding errors, not
#: signal.
_RANK_TOLERANCE = 1e-6


class Identity(HeadModule):
    """The zero-shot head: z = e, the unchanged features."""

    Settings = NoSettings
    supervised = False
    is_identity = True

    @override
    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        return FitReport({"selected_on": None})

    def forward(self, x: Tensor, condition: Tensor | None = None, which: Any = None) -> Tensor:
        """Return the features."""
        return x


class _Dense(HeadModule):
    """Dense layers as ``DENSE_KINDS`` describes them."""

    kind: ClassVar[str]
    multiplies_in_bfloat16 = True

    def __init__(self, settings: Any, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.specs = DENSE_KINDS[self.kind][1](settings, dim_in)
        for spec in self.specs:
            self.add_layer(spec.name, spec.size_out, spec.size_in, bias=False)

    def dense_layers(self, condition: Tensor | None) -> list[DenseLayer[Tensor]]:
        return [spec.layer(self.state_dict()) for spec in self.specs]

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        for spec in self.specs:
            x = ACTIVATIONS[spec.activation](self.affine(spec.name, x))
            x = self.dropout(x) if spec.dropout else x
        return x


class Linear(_Dense):
    """Z = Dropout(W e) (CASE, equation 3)."""

    kind, Settings = "linear", SizedSettings

    @override
    def start_at_identity(self) -> None:
        init.eye_(self.get_parameter("weight"))


class Mlp(_Dense):
    """H = Dropout(ReLU(W1 e)), z = Dropout(ReLU(W2 h)) (CASE, equations 4 and 5)."""

    kind, Settings = "mlp", MlpSettings

    def start_at_identity(self) -> None:
        """Initialise f(x) - f(-x) = x, which holds for ReLU and GELU, if there are enough units."""
        settings = self.settings
        fits = (settings.hidden or settings.dim) >= 2 * self.dim_in
        suits = settings.last == "none" and settings.activation in {"relu", "gelu"}
        if settings.depth != 2 or not fits or not suits:
            return
        first, second = self.get_parameter("weight1"), self.get_parameter("weight2")
        n = self.dim_in
        with torch.no_grad():
            # The other units keep their random weights, but do not contribute yet.
            second.zero_()
            for start, sign in ((0, 1.0), (n, -1.0)):
                first[start : start + n] = sign * torch.eye(n)
                second[:, start : start + n] = sign * torch.eye(settings.dim, n)


class Projection(HeadModule):
    """A projection z = components (e - mean), fitted in closed form.

    If the features are rank-deficient, it has fewer components than its settings say.
    """

    Settings: ClassVar[type[Any]] = ProjectionSettings
    supervised = False

    def __init__(self, settings: ProjectionSettings, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.register_buffer("mean", torch.zeros(dim_in))
        self.register_buffer("components", torch.zeros(settings.dim, dim_in))

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        """Return embeddings, (m, components)."""
        return (x - self.get_buffer("mean")) @ self.get_buffer("components").T

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the tensors of a fitted projection, which determine its number of components."""
        self.components = torch.empty(len(state_dict["components"]), self.dim_in)
        return super().load_state_dict(state_dict, strict, assign)

    def _set_parameters(self, mean: Any, components: Any) -> None:
        self.mean = torch.from_numpy(np.ascontiguousarray(mean, dtype=np.float32))
        self.components = torch.from_numpy(np.ascontiguousarray(components, dtype=np.float32))

    def _read_training_vectors(self, pairs: PairArrays) -> Array:
        features: Array = np.concatenate(
            [as_matrix(side).read() for side in (pairs.first, pairs.second)]
        )
        dim = self.settings.dim
        if dim > len(features):
            raise UserError(
                f"{type(self).__name__.lower()} with dim {dim} needs at least {dim} training "
                f"vectors; there are {len(features)}. Lower dim to {len(features)}."
            )
        return features


class Pca(Projection):
    """The directions of largest variance."""

    whitens: ClassVar[bool] = False

    @override
    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        from sklearn.decomposition import PCA

        features, dim = self._read_training_vectors(pairs), self.settings.dim
        if self.whitens:
            # Whitening divides by the spread of each direction. In float32 the smallest spreads
            # cannot be distinguished from zero.
            features = features.astype(np.float64)
        model = PCA(n_components=dim, svd_solver="full", random_state=seed).fit(features)
        components, notes = model.components_, []
        if self.whitens:
            spread = np.sqrt(model.explained_variance_)
            dim = int((spread > _RANK_TOLERANCE * spread[0]).sum())
            components = components[:dim] / spread[:dim, None]
        if dim < self.settings.dim:
            notes.append(
                f"whitening: {dim} directions instead of {self.settings.dim}, as the vectors span "
                "no more"
            )
        self._set_parameters(model.mean_, components)
        explained = float(model.explained_variance_ratio_[:dim].sum())
        return FitReport({"selected_on": None, "explained_variance": explained}, tuple(notes))


class Whitening(Pca):
    """The directions of largest variance, each scaled to variance 1."""

    whitens = True


class Ica(Projection):
    """Independent components, by FastICA."""

    Settings = IcaSettings

    @override
    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        from sklearn.decomposition import FastICA
        from sklearn.exceptions import ConvergenceWarning

        settings = self.settings
        # Whitening divides by the spread of each direction. In float32 the smallest spreads cannot
        # be distinguished from zero.
        features = self._read_training_vectors(pairs).astype(np.float64)
        rank = int(np.linalg.matrix_rank(features - features.mean(axis=0), rtol=_RANK_TOLERANCE))
        notes = []
        if rank < settings.dim:
            notes.append(
                f"ICA: {rank} components instead of {settings.dim}, as the training vectors span "
                "no more directions"
            )
        model = FastICA(
            n_components=min(settings.dim, rank),
            whiten="unit-variance",
            max_iter=settings.max_iterations,
            tol=settings.tolerance,
            random_state=seed,
        )
        with warnings.catch_warnings():
            # A note below reports it, with advice.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(features)
        converged = bool(model.n_iter_ < settings.max_iterations)
        if not converged:
            notes.append(
                f"ICA had not converged after {settings.max_iterations} iterations "
                f"(try max_iterations={2 * settings.max_iterations}, or a smaller dim)"
            )
        self._set_parameters(model.mean_, model.components_)
        record = {"selected_on": None, "iterations": int(model.n_iter_), "converged": converged}
        return FitReport(record, tuple(notes))


class Random(Projection):
    """A Gaussian random projection, the baseline without training."""

    @override
    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        from sklearn.random_projection import GaussianRandomProjection

        model = GaussianRandomProjection(n_components=self.settings.dim, random_state=seed)
        model.fit(np.zeros((1, self.dim_in), dtype=np.float32))
        self._set_parameters(np.zeros(self.dim_in), model.components_)
        return FitReport({"selected_on": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionSettings:
    """Settings of the head of a cross-encoder.

    Attributes:
        dropout: share of the vector's units dropped in training.
        learning_rate: learning rate of the head in AdamW.
        weight_decay: weight decay of the head in AdamW.
    """

    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    learning_rate: Annotated[float, Gt(0), Le(100)] = 1e-3
    weight_decay: Annotated[float, Ge(0), Le(1_000_000)] = 0.01


class Regression(HeadModule):
    """A linear regression y = w^T Dropout(e) + b on the vector e of two texts and a condition."""

    Settings = RegressionSettings
    no_recipe = (
        "is the head of a cross-encoder, which has no embeddings; llmcond train-cross trains it"
    )

    def __init__(self, settings: RegressionSettings, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__(settings, dim_in, dim_condition)
        self.add_layer("weight", 1, dim_in, bias=True)

    def forward(self, x: Tensor, condition: Any = None, which: Any = None) -> Tensor:
        """Return the predicted similarity, (m, 1)."""
        return self.affine("weight", self.dropout(x))
