"""Heads as torch modules: what every family shares, and how a module is made and restored.

A head of a user's own is a subclass of :class:`HeadModule` in a file of his, named by a recipe:
``kind = "my_heads.py:GatedHead"``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from llmcond.arrays import Array, MatrixLike
from llmcond.heads.pairs import Fit, PairArrays
from llmcond.heads.plain import DenseLayer
from llmcond.heads.settings import Activation
from llmcond.system import to_device

T = TypeVar("T")

#: Conditions whose matrices are made at a time outside of training.
AT_ONCE = 64

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
}


class Batch(NamedTuple):
    """What a head is applied to: ``module(*batch)``.

    Attributes:
        x: (m, dim) features of sentences.
        condition: (u, dim_condition) features of the distinct conditions among them.
        which: (m,) int64 the condition of each row.
    """

    x: Tensor
    condition: Tensor | None = None
    which: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        moved = [None if part is None else to_device(part, device) for part in self]
        return Batch(*moved)  # type: ignore[arg-type]


class HeadModule(nn.Module):
    """A head: features of sentences, and of conditions, to embeddings.

    A subclass names its settings, registers parameters in ``__init__`` and defines
    ``forward(x, condition, which)``: (m, dim_in) features, (u, dim_condition) features of the
    distinct conditions and (m,) int64 the condition of each row -> (m, k) embeddings; condition and
    which are None for heads that take none. ``__init__`` reads no parameter's values: to count its
    parameters before there is memory for them, a module is also made on the meta device.

    Attributes:
        Settings: a frozen dataclass; its fields are the recipe's keys. Of supervised heads a
            subclass of :class:`~llmcond.heads.settings.TrainingSettings`.
        features: of a sentence, that it takes: ``joint`` e(s|c), ``separate`` e(s), or ``both``;
            ``alone`` is e(s) where there are no conditions. A setting of that name goes before.
        conditioned: whether it takes the condition's own features e(c).
        supervised: whether it learns from ratings, by gradient; else :meth:`solve` fits it.
        is_identity: whether embeddings are the features as they are.
        Fitted: the class of a fitted head of this family, a subclass of
            :class:`~llmcond.heads.base.Fitted`; None: :class:`~llmcond.heads.base.FittedHead`,
            which embeds sentences and compares rated pairs.
        no_recipe: why recipes cannot name this family, worded to follow "a KIND head"; empty where
            they can.
        generates_matrices: whether it makes a matrix of each condition; see
            :class:`~llmcond.heads.conditioned.Hypernet`.
        multiplies_in_bfloat16: whether all products of sentences' features are made by
            :meth:`product` or :meth:`batched_product`, so that they can be made in bfloat16.
        dim_in, dim_condition: sizes of the features of sentences, and of conditions; 0: none.
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

    def solve(self, pairs: PairArrays, seed: int) -> Fit:
        """Fit an unsupervised head in closed form; ratings are not looked at."""
        raise NotImplementedError

    def start_at_identity(self) -> None:
        """Let embeddings be the features at first, as far as the form allows it.

        Random numbers come from PyTorch's own generator. A family that has no such start stays as
        it was drawn.
        """

    def similarity(self, first: Tensor, second: Tensor) -> Tensor:
        """Return how similar embeddings are, (n, k) twice -> (n,): their cosine.

        A subclass may define another; it is what objectives, the score on dev and predictions take.
        """
        return torch.cosine_similarity(first, second)

    def generated_matrices(self, condition: MatrixLike) -> list[Array]:
        """Return what a fitted head that generates matrices makes of conditions, (u, dim_c).

        That is W_c, (u, dim, k), or the factors whose product it is, (u, a, b) each, in float32.
        """
        raise NotImplementedError

    def dense_layers(self, condition: Tensor | None) -> list[DenseLayer[Tensor]] | None:
        """Return the layers that a fitted head is under one condition, (1, dim_condition).

        None where it is no such layers. Heads of one linear layer, with the activation of their
        settings behind it or none, are found out; a subclass of several layers names them.
        """
        activation: Activation = getattr(self.settings, "activation", "none")
        twin = self
        if activation != "none":
            twin = copy.copy(self)
            twin.settings = replace(self.settings, activation="none")
        given = None if condition is None else torch.zeros(self.dim_in + 2, dtype=torch.int64)
        # Nothing, each dimension by itself, and a vector to try the layer on.
        tried = torch.linspace(-1, 1, self.dim_in)
        x = torch.cat([torch.zeros(1, self.dim_in), torch.eye(self.dim_in), tried[None]])
        with torch.inference_mode():
            found = twin(x, condition, given)
            bias, weight = found[0], (found[1:-1] - found[0]).T.contiguous()
            layer = DenseLayer(weight, bias if bias.any() else None, activation)
            wanted = self(x, condition, given)[-1]
            made = ACTIVATIONS[activation](tried @ weight.T + bias)
        close = torch.allclose(made, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))
        return [layer] if close else None

    def add_weight(self, name: str, shape: tuple[int, ...], fan_in: int) -> None:
        """Register a parameter, drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), biases alike."""
        bound = 1 / math.sqrt(fan_in)
        self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))

    def add_layer(self, name: str, out: int, into: int, bias: bool) -> None:
        """Register the parameters of a linear layer: ``name``, and ``name_bias``."""
        self.add_weight(name, (out, into), into)
        if bias:
            self.add_weight(f"{name}_bias", (out,), into)

    def affine(self, name: str, values: Tensor) -> Tensor:
        """Apply a layer of :meth:`add_layer`: (n, a) W^T, and the bias if it has one."""
        product = self.product(values, self.get_parameter(name))
        bias: Tensor | None = getattr(self, f"{name}_bias", None)
        return product if bias is None else product + bias

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T, (n, b) of (n, a) and (b, a), in bfloat16 where fitting asks for it."""
        if self.in_bfloat16:
            return (x.bfloat16() @ weight.bfloat16().T).to(weight.dtype)
        return x.to(weight.dtype) @ weight.T

    def batched_product(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Return x_i M_i for each i: (n, m, a) and (n, a, b) give (n, m, b)."""
        if self.in_bfloat16:
            return torch.bmm(x.bfloat16(), matrices.bfloat16()).to(matrices.dtype)
        return torch.bmm(x.to(matrices.dtype), matrices)

    def multiply_in_bfloat16(self, wanted: bool) -> None:
        """Set whether this head and those that it consists of multiply in bfloat16."""
        for module in self.modules():
            if isinstance(module, HeadModule):
                module.in_bfloat16 = wanted

    def seed_dropout(self, seed: int | None) -> None:
        """Draw what :meth:`dropout` drops from a generator of its own; None: the global one."""
        self._masks = None if seed is None else np.random.Generator(np.random.SFC64(seed))
        self._device_masks = None

    def dropout(self, values: Tensor) -> Tensor:
        """Return values of which some are 0 in training, and the others larger by as much."""
        # Sixteen bits a unit are drawn: bits for a float of each take longer than the products.
        kept = max(1, round((1 - self.settings.dropout) * 65_536))
        if not self.training or kept == 65_536:
            return values
        if self._masks is None:
            return nn.functional.dropout(values, self.settings.dropout)
        if values.device.type == "cpu":
            drawn = self._masks.integers(65_536, size=tuple(values.shape), dtype=np.uint16)
            scale = torch.from_numpy(drawn < kept).to(values)
        else:
            if self._device_masks is None:
                self._device_masks = torch.Generator(values.device)
                self._device_masks.manual_seed(int(self._masks.integers(2**63)))
            scale = torch.empty_like(values).bernoulli_(kept / 65_536, generator=self._device_masks)
        return values * scale.mul_(65_536 / kept)

    def finished(self) -> Self:
        """Return the module as a fitted head has it: on the CPU, no dropout, no gradients."""
        self.seed_dropout(None)
        self.multiply_in_bfloat16(False)
        self.requires_grad_(False)
        return self.cpu().eval()


def seeded(make: Callable[[], T], seed: int) -> tuple[T, torch.Generator]:
    """Make something with random values by a seed, and return a generator that goes on there.

    The global generator stays as it is.
    """
    generator = torch.Generator()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = make()
        generator.set_state(torch.default_generator.get_state())
    return made, generator


class Ensemble(HeadModule):
    """Embeddings of several heads, each of length 1, side by side: the cosine is their mean.

    In files the parameters of the i-th head begin with ``member{i}.``.
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

    def similarity(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the mean of the heads' similarities, (n,)."""
        if self._has_cosine:
            return torch.cosine_similarity(first, second)
        heads: list[Any] = list(self.children())
        sides = [side.chunk(len(heads), dim=1) for side in (first, second)]
        found = [head.similarity(*own) for head, *own in zip(heads, *sides, strict=True)]
        mean: Tensor = torch.stack(found).mean(dim=0)
        return mean


def members_of(module: HeadModule) -> list[Any]:
    """Return the heads of an ensemble, or a list of the module itself if it is none."""
    return list(module.children()) if isinstance(module, Ensemble) else [module]
