"""Heads as torch modules: the base class of all families, ensembles, seeding and objectives.

A custom head is a subclass of ``HeadModule`` in a user's file. A recipe names it: ``kind =
"my_heads.py:GatedHead"``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from llmcond.base.arrays import Array, MatrixLike
from llmcond.base.errors import UserError
from llmcond.base.system import move_to_device
from llmcond.heads.numpy_heads import DenseLayer, FitReport, PairArrays
from llmcond.heads.settings import Activation, ObjectiveSettings

T = TypeVar("T")

#: Number of conditions whose matrices are generated at a time outside training.
CONDITIONS_PER_BLOCK = 64

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
}


class Batch(NamedTuple):
    """The arguments of a head: ``module(*batch)``.

    Attributes:
        x: (m, dim) features of sentences.
        condition: (u, dim_condition) features of the distinct conditions.
        which: (m,) int64 index of each row's condition.
    """

    x: Tensor
    condition: Tensor | None = None
    which: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Move the batch to a device."""
        moved = [None if part is None else move_to_device(part, device) for part in self]
        return Batch(*moved)  # type: ignore[arg-type]


class HeadModule(nn.Module):
    """Base class of heads, which map features of sentences, and of conditions, to embeddings.

    A subclass names its settings, registers parameters in ``__init__`` and defines ``forward(x,
    condition, which)``. Its arguments are (m, dim_in) features of sentences, (u, dim_condition)
    features of the distinct conditions, and (m,) int64 indices of each row's condition; its result
    is (m, k) embeddings. ``condition`` and ``which`` are None for heads that read no conditions.
    ``__init__`` must not read the values of parameters: a module is also created on the meta
    device, to count its parameters before memory is allocated for them.

    Args:
        settings: an instance of ``Settings``.
        dim_in: size of the sentence features.
        dim_condition: size of the condition features; 0 if there are none.

    Attributes:
        Settings: frozen dataclass whose fields are the keys of recipes. For supervised heads it is
            a subclass of ``llmcond.heads.TrainingSettings``.
        features: sentence features that the head reads: ``joint`` e(s|c), ``separate`` e(s), or
            ``both``; ``alone`` is e(s) for tasks without conditions. A setting of that name
            overrides it.
        conditioned: whether it reads the features e(c) of the condition.
        supervised: whether it learns from ratings by gradient descent; otherwise ``solve`` fits it.
        is_identity: whether embeddings are the unchanged features.
        Fitted: class of the fitted heads of this family, a subclass of
            ``llmcond.heads.fitted.FittedModule``. None means ``FittedHead``, which embeds
            sentences and compares rated pairs.
        no_recipe: reason why recipes cannot name this family, worded to follow "a KIND head"; empty
            if they can.
        generates_matrices: whether it generates a matrix from each condition, as
            ``llmcond.heads.conditioned.Hypernet`` does.
        multiplies_in_bfloat16: whether all products with sentence features are computed by
            ``product`` or ``batched_product``, so that they can be computed in bfloat16.

    Examples:
        >>> import torch
        >>> from llmcond.heads import HeadModule, SizedSettings
        >>> class Square(HeadModule):
        ...     Settings = SizedSettings
        ...     def __init__(self, settings, dim_in, dim_condition=0):
        ...         super().__init__(settings, dim_in, dim_condition)
        ...         self.add_layer("weight", settings.dim, dim_in, bias=True)
        ...     def forward(self, x, condition=None, which=None):
        ...         return self.affine("weight", x).square()
        >>> settings = SizedSettings(
        ...     dim=2, dropout=0.1, learning_rate=1e-3, batch_size=8, epochs=1, patience=1
        ... )
        >>> Square(settings, dim_in=4)(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    Settings: ClassVar[type[Any]]
    features: ClassVar[str] = "joint"
    conditioned: ClassVar[bool] = False
    supervised: ClassVar[bool] = True
    is_identity: ClassVar[bool] = False
    Fitted: ClassVar[type[Any] | None] = None
    no_recipe: ClassVar[str] = ""
    generates_matrices: ClassVar[bool] = False
    multiplies_in_bfloat16: ClassVar[bool] = False

    def __init__(self, settings: Any, dim_in: int, dim_condition: int = 0) -> None:
        super().__init__()
        self.settings, self.dim_in, self.dim_condition = settings, dim_in, dim_condition
        self.in_bfloat16 = False
        self._masks: np.random.Generator | None = None
        self._device_masks: torch.Generator | None = None

    def start_state(self) -> dict[str, Tensor]:
        """Return the parameters with which the fit of another head of this family may start."""
        return self.state_dict()

    def solve(self, pairs: PairArrays, seed: int) -> FitReport:
        """Fit an unsupervised head in closed form.

        Args:
            pairs: features of the training pairs; their ratings are not used.
            seed: random seed.

        Returns:
            The record of the fit.

        Raises:
            UserError: the features are too few for these settings.
        """
        raise NotImplementedError

    def start_at_identity(self) -> None:
        """Initialise the parameters so that embeddings equal the features, if the form allows it.

        Random numbers come from PyTorch's global generator. The base class does nothing: a family
        without such a start keeps its random initialisation.
        """

    def similarity(self, first: Tensor, second: Tensor) -> Tensor:
        """Compute the similarity of embeddings: their cosine, unless a subclass overrides it.

        Objectives, the dev score and predictions all use this similarity.

        Args:
            first: (n, k) embeddings.
            second: (n, k) embeddings.

        Returns:
            (n,) similarities.
        """
        return torch.cosine_similarity(first, second)

    def generated_matrices(self, condition: MatrixLike) -> list[Array]:
        """Generate the matrices of conditions with a fitted head.

        Args:
            condition: (u, dim_condition) features of the conditions.

        Returns:
            W_c, (u, dim, k), or the factors whose product it is, (u, a, b) each; float32.
        """
        raise NotImplementedError

    def dense_layers(self, condition: Tensor | None) -> list[DenseLayer[Tensor]] | None:
        """Express a fitted head as dense layers under one condition.

        Heads of one linear layer, with or without the activation of their settings, are recognised
        automatically. A subclass of several layers overrides this method.

        Args:
            condition: (1, dim_condition) features of the condition; None for heads that read none.

        Returns:
            The layers, or None if the head cannot be expressed that way.
        """
        activation: Activation = getattr(self.settings, "activation", "none")
        without_activation = self
        if activation != "none":
            without_activation = copy.copy(self)
            without_activation.settings = replace(self.settings, activation="none")
        which = None if condition is None else torch.zeros(self.dim_in + 2, dtype=torch.int64)
        # The zero vector gives the bias, unit vectors give the weight, and a test vector checks
        # both.
        test_vector = torch.linspace(-1, 1, self.dim_in)
        x = torch.cat([torch.zeros(1, self.dim_in), torch.eye(self.dim_in), test_vector[None]])
        with torch.inference_mode():
            outputs = without_activation(x, condition, which)
            bias, weight = outputs[0], (outputs[1:-1] - outputs[0]).T.contiguous()
            layer = DenseLayer(weight, bias if bias.any() else None, activation)
            target = self(x, condition, which)[-1]
            computed = ACTIVATIONS[activation](test_vector @ weight.T + bias)
        close = torch.allclose(computed, target, rtol=1e-3, atol=1e-5 * float(target.abs().max()))
        return [layer] if close else None

    def add_weight(self, name: str, shape: tuple[int, ...], fan_in: int) -> None:
        """Register a parameter that is initialised uniformly on ±1/sqrt(fan_in).

        Args:
            name: name of the parameter.
            shape: shape of the parameter.
            fan_in: number of inputs.
        """
        bound = 1 / math.sqrt(fan_in)
        self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))

    def add_layer(self, name: str, out: int, into: int, bias: bool) -> None:
        """Register the parameters of a linear layer, ``name`` and ``name_bias``.

        Args:
            name: name of the weight.
            out: number of outputs.
            into: number of inputs.
            bias: whether the layer has a bias.
        """
        self.add_weight(name, (out, into), into)
        if bias:
            self.add_weight(f"{name}_bias", (out,), into)

    def affine(self, name: str, values: Tensor) -> Tensor:
        """Apply a layer that ``add_layer`` registered.

        Args:
            name: name of the weight.
            values: (n, a) inputs.

        Returns:
            (n, b) values W^T, plus the bias if the layer has one.
        """
        product = self.product(values, self.get_parameter(name))
        bias: Tensor | None = getattr(self, f"{name}_bias", None)
        return product if bias is None else product + bias

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x W^T, in bfloat16 if the fit uses it.

        Args:
            x: (n, a) inputs.
            weight: (b, a) weight W.

        Returns:
            (n, b) products in the type of the weight.
        """
        if self.in_bfloat16:
            return (x.bfloat16() @ weight.bfloat16().T).to(weight.dtype)
        return x.to(weight.dtype) @ weight.T

    def batched_product(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Compute x_i M_i for each i, in bfloat16 if the fit uses it.

        Args:
            x: (n, m, a) inputs.
            matrices: (n, a, b) matrices M_i.

        Returns:
            (n, m, b) products in the type of the matrices.
        """
        if self.in_bfloat16:
            return torch.bmm(x.bfloat16(), matrices.bfloat16()).to(matrices.dtype)
        return torch.bmm(x.to(matrices.dtype), matrices)

    def multiply_in_bfloat16(self, enabled: bool) -> None:
        """Set whether this head, and the heads that it consists of, multiply in bfloat16.

        Args:
            enabled: whether to multiply in bfloat16.
        """
        for module in self.modules():
            if isinstance(module, HeadModule):
                module.in_bfloat16 = enabled

    def seed_dropout(self, seed: int | None) -> None:
        """Give dropout its own random generator.

        Args:
            seed: seed of the generator; None: use PyTorch's global generator.
        """
        self._masks = None if seed is None else np.random.Generator(np.random.SFC64(seed))
        self._device_masks = None

    def dropout(self, values: Tensor) -> Tensor:
        """Apply dropout with the rate of the settings, in training only.

        Args:
            values: any tensor.

        Returns:
            A tensor of the same shape; the remaining values are scaled up to keep the mean.
        """
        # Use 16 random bits per unit: generating a random float per unit takes longer than the
        # products.
        threshold = max(1, round((1 - self.settings.dropout) * 65_536))
        if not self.training or threshold == 65_536:
            return values
        if self._masks is None:
            return nn.functional.dropout(values, self.settings.dropout)
        if values.device.type == "cpu":
            random_bits = self._masks.integers(65_536, size=tuple(values.shape), dtype=np.uint16)
            scale = torch.from_numpy(random_bits < threshold).to(values)
        else:
            if self._device_masks is None:
                self._device_masks = torch.Generator(values.device)
                self._device_masks.manual_seed(int(self._masks.integers(2**63)))
            scale = torch.empty_like(values).bernoulli_(
                threshold / 65_536, generator=self._device_masks
            )
        return values * scale.mul_(65_536 / threshold)

    def freeze(self) -> Self:
        """Prepare the module for a fitted head: on the CPU, in eval mode, without gradients.

        Returns:
            The module itself.
        """
        self.seed_dropout(None)
        self.multiply_in_bfloat16(False)
        self.requires_grad_(False)
        return self.cpu().eval()


def seeded(create: Callable[[], T], seed: int) -> tuple[T, torch.Generator]:
    """Call ``create`` with a seeded random state.

    Return its result, and a generator that continues from that state. The global generator of
    PyTorch is unchanged afterwards.
    """
    generator = torch.Generator()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        result = create()
        generator.set_state(torch.default_generator.get_state())
    return result, generator


class Ensemble(HeadModule):
    """The concatenated unit-length embeddings of several heads, whose cosine is the mean of theirs.

    In weights files the parameters of the i-th head begin with ``member{i}.``.
    """

    def __init__(self, heads: Sequence[HeadModule]) -> None:
        first = heads[0]
        super().__init__(first.settings, first.dim_in, first.dim_condition)
        self._has_cosine = type(first).similarity is HeadModule.similarity
        for number, head in enumerate(heads):
            self.add_module(f"member{number}", head)

    def forward(
        self, x: Tensor, condition: Tensor | None = None, which: Tensor | None = None
    ) -> Tensor:
        """Return embeddings, (m, heads * k)."""
        parts = [head(x, condition, which) for head in self.children()]
        if not self._has_cosine:
            return torch.cat(parts, dim=1)
        embedded: Tensor = torch.cat([normalize(part) for part in parts], dim=1) / len(parts) ** 0.5
        return embedded

    @override
    def similarity(self, first: Tensor, second: Tensor) -> Tensor:
        if self._has_cosine:
            return torch.cosine_similarity(first, second)
        heads: list[Any] = list(self.children())
        sides = [side.chunk(len(heads), dim=1) for side in (first, second)]
        values = [head.similarity(*parts) for head, *parts in zip(heads, *sides, strict=True)]
        mean: Tensor = torch.stack(values).mean(dim=0)
        return mean


def members_of(module: HeadModule) -> list[Any]:
    """Return the heads of an ensemble, or a list that contains only the module itself."""
    return list(module.children()) if isinstance(module, Ensemble) else [module]


#: Above this threshold softplus equals the identity to the last bit of float64. At 20, PyTorch's
#: default, it does not.
_SOFTPLUS_THRESHOLD = 40.0

#: Function from two (n, k) embedding matrices to (n,) similarities.
Similarity = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RatedBatch:
    """Inputs of objectives besides the embeddings and ratings of a batch.

    Attributes:
        similarity: how the head compares embeddings: (n, k) twice -> (n,).
        pair: (n,) int64 sentence pair of each row; None if the data has none.
        contrastive: (p, 2) int64 positions in the batch of the contrastive pairs, in either order
            of rating. Both rows of a pair have its sentences in the same order. None if no
            objective needs them.
    """

    similarity: Similarity = torch.cosine_similarity
    pair: Tensor | None = None
    contrastive: Tensor | None = None


class Objective(nn.Module):
    """The weighted sum of the objectives that have a weight.

    Raises:
        UserError: the settings name an objective that has not been loaded or registered.
    """

    def __init__(self, settings: ObjectiveSettings) -> None:
        super().__init__()
        self.settings = settings
        self.custom: Any = None
        if settings.objective and settings.objective_weight:
            custom = settings.load_objective()
            self.custom = custom() if isinstance(custom, type) else custom

    def forward(
        self, first: Tensor, second: Tensor, rating: Tensor, batch: RatedBatch | None = None
    ) -> Tensor:
        """Compute the weighted sum, a scalar.

        An objective that can compare nothing in the batch, for example because all ratings are
        equal, is 0 and has gradients of 0.

        Args:
            first: (n, k) embeddings of the first sentences.
            second: (n, k) embeddings of the second sentences.
            rating: (n,) ratings on 0 to 1.
            batch: further inputs; required if the settings need contrastive pairs.

        Raises:
            ValueError: contrastive pairs are needed and missing.
            UserError: a size of ``matryoshka`` is larger than the embeddings.
        """
        settings, rows = self.settings, batch or RatedBatch()

        def weighted_sum(first: Tensor, second: Tensor) -> Tensor:
            scored = _ScoredBatch(first, second, rows.similarity(first, second), rating, rows)
            terms: list[Tensor] = [
                weight * objective(scored, settings)
                for name, objective in OBJECTIVES.items()
                if (weight := getattr(settings, name))
            ]
            if self.custom is not None:
                custom = self.custom(first, second, rating, rows, settings)
                terms.append(settings.objective_weight * custom)
            return sum(terms[1:], terms[0])

        return average_truncations(weighted_sum, settings.matryoshka, first, second)


def average_truncations(
    loss: Callable[..., Tensor], dims: Sequence[int], *embeddings: Tensor
) -> Tensor:
    """Average a loss over full embeddings and their first dimensions.

    This is Matryoshka representation learning (arXiv 2205.13147, equation 1) with equal weights.
    Without ``dims``, the result is the loss of the full embeddings.

    Args:
        loss: function of as many tensors as there are ``embeddings``.
        dims: sizes that the embeddings are truncated to.
        embeddings: (n, k) embeddings.

    Raises:
        UserError: a size is larger than k.
    """
    if not dims:
        return loss(*embeddings)
    size = embeddings[0].shape[1]
    if max(dims) > size:
        raise UserError(
            f"matryoshka names {max(dims)} dimensions, but the embeddings have {size}. Give "
            "smaller sizes."
        )
    sizes = sorted({size, *dims}, reverse=True)
    losses = [loss(*(values[:, :dim] for values in embeddings)) for dim in sizes]
    return torch.stack(losses).mean()


@dataclass(frozen=True, slots=True)
class _ScoredBatch:
    """The embeddings and ratings of a batch, and the cosines (or other similarities) of rows."""

    first: Tensor
    second: Tensor
    cosine: Tensor
    rating: Tensor
    batch: RatedBatch


def _mse(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    return (scored.cosine - scored.rating).square().mean()


def _cosent(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    """log(1 + sum over rating_i > rating_j of e^(scale (cos_j - cos_i)))."""
    excess = settings.scale * (scored.cosine[None, :] - scored.cosine[:, None])
    exponent = torch.where(scored.rating[:, None] > scored.rating[None, :], excess, -torch.inf)
    # The exponent 0 adds the 1. Without it, logsumexp of only -inf (if all ratings are equal) would
    # have no gradient.
    return torch.cat([exponent.new_zeros(1), exponent.flatten()]).logsumexp(dim=0)


def _ranking(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    """Mean over rating_i > rating_j of log(1 + e^(scale (cos_j - cos_i)))."""
    excess = settings.scale * (scored.cosine[None, :] - scored.cosine[:, None])
    gap = (scored.rating[:, None] - scored.rating[None, :]).relu()
    loss = torch.nn.functional.softplus(excess, threshold=_SOFTPLUS_THRESHOLD)
    return _weighted_mean(loss, _gap_weight(gap, settings.ties))


def _info_nce(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    high, low, weight = _split_contrastive(scored, settings)
    first, second = scored.first, scored.second
    if settings.info_nce_form == "v1":
        sides = [(first[high], second[low]), (first[low], second[high])]
    else:
        sides = [(first[high], second[high]), (first[low], second[low])]
    rivals = [scored.batch.similarity(*side) for side in sides]
    if settings.info_nce_form == "self-negatives":
        rivals += [0.5 * scored.batch.similarity(side[high], side[low]) for side in (first, second)]
    exponent = (torch.stack(rivals, dim=1) - scored.cosine[high][:, None]) / settings.temperature
    return _weighted_mean(exponent.logsumexp(dim=1), weight)


def _quadruplet(scored: _ScoredBatch, settings: ObjectiveSettings) -> Tensor:
    high, low, weight = _split_contrastive(scored, settings)
    excess = settings.margin - scored.cosine[high] + scored.cosine[low]
    return _weighted_mean(excess.relu(), weight)


#: Setting with the weight of an objective -> the objective. To add one, write a function and add a
#: line to this mapping.
OBJECTIVES: Mapping[str, Callable[[_ScoredBatch, ObjectiveSettings], Tensor]] = {
    "mse": _mse,
    "cosent": _cosent,
    "ranking": _ranking,
    "info_nce": _info_nce,
    "quadruplet": _quadruplet,
}


def _split_contrastive(
    scored: _ScoredBatch, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positives and negatives of contrastive pairs, (p,), and the pairs' weights."""
    if scored.batch.contrastive is None:
        raise ValueError("contrastive pairs are missing: (p, 2) positions in the batch")
    first, second = scored.batch.contrastive.unbind(dim=1)
    gap = scored.rating[first] - scored.rating[second]
    swapped = gap < 0
    high, low = torch.where(swapped, second, first), torch.where(swapped, first, second)
    keeps_ties = settings.ties == "keep"
    weight = torch.ones_like(gap) if keeps_ties else _gap_weight(gap.abs(), settings.ties)
    return high, low, weight


def _gap_weight(gap: Tensor, ties: str) -> Tensor:
    return gap if ties == "gap" else (gap > 0).to(gap.dtype)


def _weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean; if all weights are 0, it is 0 and its gradient too."""
    return (values * weight).sum() / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)


def contrast_groups(pair: NDArray[np.int64]) -> NDArray[np.int64]:
    """Group rows into contrastive pairs; return (n,) the position of each group's first row.

    Two consecutive rows of a sentence pair form a group, wherever they are in the data. If their
    number is odd, the last row is a group of one, which is not contrasted.

    Args:
        pair: (n,) sentence pair of each row.
    """
    order = np.argsort(pair, kind="stable")
    positions = np.arange(len(pair))
    is_first = np.diff(pair[order], prepend=pair[order[:1]] - 1) != 0
    second = (positions - np.maximum.accumulate(np.where(is_first, positions, 0))) % 2
    group = np.empty_like(positions)
    group[order] = order[positions - second]
    return group


def adjacent_pairs(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions, (p, 2), of adjacent rows of one group; groups have at most two rows."""
    first = np.flatnonzero(group[1:] == group[:-1])
    return np.stack([first, first + 1], axis=1)


def check_contrasts(
    pair: NDArray[np.int64] | None, rating: NDArray[np.float64], settings: ObjectiveSettings
) -> dict[str, int]:
    """Count contrastive pairs if an objective needs them; raise an error if there are none.

    Pairs with equal ratings, which ``settings.ties`` is about, are also counted.

    Args:
        pair: (n,) sentence pair of each row.
        rating: (n,) ratings.
        settings: the objectives and their weights.

    Returns:
        The counts for the fit's record; empty if no objective needs contrastive pairs.

    Raises:
        UserError: no sentence pairs were given, or none has two rows.
    """
    if not settings.contrasts:
        return {}
    problem = "info_nce and quadruplet contrast the two conditions of a sentence pair, and no"
    if pair is None:
        raise UserError(f"{problem} pairs were given. Pass the sentence pair of each row as pair=.")
    group = contrast_groups(pair)
    second = np.flatnonzero(group != np.arange(len(pair)))
    if not len(second):
        raise UserError(
            f"{problem} sentence pair has two rated rows. Use mse, cosent or ranking instead: "
            "--set info_nce=0 quadruplet=0."
        )
    n_tied = int((rating[group[second]] == rating[second]).sum())
    return {"n_contrastive_pairs": len(second), "n_tied_pairs": n_tied}
