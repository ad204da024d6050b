"""Heads of dense layers, and the arrays that heads are fitted on, in NumPy without torch.

PyTorch heads use the same layer descriptions and the same checks of features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import Array, EqualByValue, MatrixLike, as_matrix, cosine, gelu
from llmcond.base.errors import UserError
from llmcond.base.metrics import Floats, Metric
from llmcond.heads.settings import (
    Activation,
    IcaSettings,
    MlpSettings,
    NoSettings,
    ProjectionSettings,
    SizedSettings,
)

#: Number of vectors transformed at a time, which bounds the memory.
_BLOCK = 65_536

#: A NumPy array or a torch tensor.
T = TypeVar("T")


#: Activations of NumPy arrays; ``llmcond.heads.module.ACTIVATIONS`` has those of tensors.
ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "none": lambda values: values,
    "relu": lambda values: np.maximum(values, 0),
    "gelu": gelu,
    "tanh": np.tanh,
}


class DenseLayer(NamedTuple, Generic[T]):
    """A linear layer followed by an activation: f((x - mean) W^T + b).

    Attributes:
        weight: (out, in) W.
        bias: (out,) b; None: no bias.
        activation: f.
        mean: (in,) vector subtracted from the inputs; None: nothing is subtracted.
    """

    weight: T
    bias: T | None = None
    activation: Activation = "none"
    mean: T | None = None


class LayerSpec(NamedTuple):
    """Names and sizes of the tensors of a dense layer.

    Attributes:
        name: name of the weight.
        size_out: number of outputs; 0: determined by the weight.
        size_in: number of inputs.
        activation: activation after the linear layer.
        mean: name of the vector subtracted from the inputs; None: nothing is subtracted.
        dropout: whether dropout is applied to the outputs in training.
    """

    name: str
    size_out: int
    size_in: int
    activation: Activation = "none"
    mean: str | None = None
    dropout: bool = True

    def layer(self, tensors: Mapping[str, T]) -> DenseLayer[T]:
        """Return the layer, given its tensors by name."""
        mean = None if self.mean is None else tensors[self.mean]
        return DenseLayer(tensors[self.name], None, self.activation, mean)


def mlp_layers(settings: MlpSettings, dim_in: int) -> list[LayerSpec]:
    """Return the layers of the MLP."""
    hidden = settings.hidden or settings.dim
    sizes = pairwise([dim_in, *[hidden] * (settings.depth - 1), settings.dim])
    specs = [
        LayerSpec(f"weight{number}", size_out, size_in, settings.activation)
        for number, (size_in, size_out) in enumerate(sizes, start=1)
    ]
    if settings.last == "none":
        specs[-1] = specs[-1]._replace(activation="none", dropout=False)
    return specs


def projection_layers(settings: ProjectionSettings, dim_in: int) -> list[LayerSpec]:
    """Return the layer of an unsupervised head; its number of components depends on the data."""
    return [LayerSpec("components", 0, dim_in, mean="mean")]


#: Settings class and layers of each kind of head that consists of dense layers and does not depend
#: on the condition.
DENSE_KINDS: Mapping[str, tuple[type[Any], Callable[[Any, int], Sequence[LayerSpec]]]] = {
    "none": (NoSettings, lambda settings, dim_in: []),
    "linear": (SizedSettings, lambda settings, dim_in: [LayerSpec("weight", settings.dim, dim_in)]),
    "mlp": (MlpSettings, mlp_layers),
    "pca": (ProjectionSettings, projection_layers),
    "ica": (IcaSettings, projection_layers),
    "whitening": (ProjectionSettings, projection_layers),
    "random": (ProjectionSettings, projection_layers),
}


#: Kinds whose embeddings, truncated to k dimensions, are those of the same head with dim k: the
#: components of PCA and whitening are sorted by variance, and those of a random projection are
#: independent. Those of ICA have no order.
ORDERED_KINDS = ("pca", "whitening", "random")


def apply_layers(layers: Sequence[DenseLayer[Array]], values: Array) -> Array:
    """Apply layers to (n, in) float32 inputs; return (n, out) float32."""
    for weight, bias, activation, mean in layers:
        centred: Array = values if mean is None else values - mean
        product: Array = centred @ weight.T
        values = ACTIVATIONS[activation](product if bias is None else product + bias)
    return values


def check_features(head: Any, features: MatrixLike, condition: MatrixLike | None) -> None:
    """Check that a head can be applied to features, (n, dim), and conditions, (n or 1, dim_c).

    Its ``dim_in`` is 0 if features may have any size, its ``dim_condition`` if it reads no
    conditions.

    Raises:
        UserError: the features have another size, or conditions are missing or not expected.
    """
    kind = head.kind
    if head.dim_in and features.shape[1] != head.dim_in:
        raise UserError(
            f"the features have {features.shape[1]} dimensions; this {kind} head was fitted on "
            f"{head.dim_in}."
        )
    dim_condition = 0 if condition is None else int(condition.shape[1])
    if condition is not None and len(condition) not in (1, len(features)):
        raise UserError(
            f"there are {len(features)} sentences and {len(condition)} conditions. Give one "
            "condition per sentence, or one for all."
        )
    if dim_condition == head.dim_condition:
        return
    got, expected = (
        f"{dim} dimensions" if dim else "none" for dim in (dim_condition, head.dim_condition)
    )
    raise UserError(
        f"features of conditions: got {got}, but this {kind} head was fitted on {expected}."
    )


def transform_blocks(embed: Callable[[slice], Array], n: int) -> Array:
    """Compute embeddings of n rows, (n, k), block by block; ``embed`` returns those of a slice."""
    blocks = [embed(slice(start, start + _BLOCK)) for start in range(0, max(n, 1), _BLOCK)]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


_Layers = Sequence[DenseLayer[Array]]


@dataclass(frozen=True, eq=False)
class NumpyHead:
    """A fitted head of a kind in ``DENSE_KINDS``, with the interface of ``FittedHead``.

    Attributes:
        kind: name of the kind in recipes and in head.json.
        settings: an instance of the kind's settings.
        dim_in: size of the features; 0: any size, for a head of kind ``none`` that was not fitted.
        tensors: parameters by their names in the weights file.
    """

    kind: str
    settings: Any
    dim_in: int
    tensors: Mapping[str, NDArray[Any]]

    dim_condition: ClassVar[int] = 0
    features: ClassVar[str] = "joint"
    conditioned: ClassVar[bool] = False
    generates_matrices: ClassVar[bool] = False
    compares_by_cosine: ClassVar[bool] = True

    @cached_property
    def members(self) -> Sequence[_Layers]:
        """The layers of each head of an ensemble, or of the only head.

        Raises:
            ValueError: the tensors do not belong to a head with these settings.
        """
        specs = DENSE_KINDS[self.kind][1](self.settings, self.dim_in)
        names = [name for spec in specs for name in (spec.name, spec.mean) if name is not None]
        n = getattr(self.settings, "members", 1)
        prefixes = [f"member{number}." for number in range(n)] if n > 1 else [""]
        differences = self.tensors.keys() ^ {part + name for part in prefixes for name in names}
        if differences:
            raise ValueError(f"missing or unexpected: {', '.join(sorted(differences))}")
        tensors = {name: np.asarray(value, np.float32) for name, value in self.tensors.items()}
        return [
            [_build_layer(spec, {name: tensors[part + name] for name in names}) for spec in specs]
            for part in prefixes
        ]

    @property
    def is_identity(self) -> bool:
        """Whether embeddings are the unchanged features."""
        return self.kind == "none"

    @property
    def dim_out(self) -> int:
        """Size of the embeddings; 0: that of the features."""
        return sum(len(layers[-1].weight) if layers else self.dim_in for layers in self.members)

    def dense_layers(self, condition: Array | None = None) -> _Layers | None:
        """Return the layers, which are the same for all conditions; None for an ensemble."""
        return self.members[0] if len(self.members) == 1 else None

    def transform(self, features: MatrixLike, condition: MatrixLike | None = None) -> Array:
        """Compute embeddings, (n, k) float32, of features, (n, dim).

        Raises:
            UserError: the features have another size, or conditions were given.
        """
        check_features(self, features, condition)
        matrix = as_matrix(features)
        return transform_blocks(lambda rows: self._embed(matrix.read(rows)), len(matrix))

    def _embed(self, features: Array) -> Array:
        parts = [apply_layers(layers, features) for layers in self.members]
        if len(parts) == 1:
            return parts[0]
        norms = [np.linalg.norm(part, axis=1, keepdims=True) for part in parts]
        unit = [part / np.maximum(norm, 1e-12) for part, norm in zip(parts, norms, strict=True)]
        joined: Array = np.concatenate(unit, axis=1)
        return joined / np.float32(len(parts) ** 0.5)

    def similarity(
        self, first: MatrixLike, second: MatrixLike, condition: MatrixLike | None = None
    ) -> Array:
        """Compute the cosines of the embeddings of two sets of features, (n,) float32."""
        return self.compare(self.transform(first, condition), self.transform(second, condition))

    def compare(self, first: Array, second: Array) -> Array:
        """Compute the cosines of embeddings: (n, k) twice -> (n,)."""
        return cosine(first, second)


#: The zero-shot head, which was not fitted: embeddings are the unchanged features.
ZERO_SHOT = NumpyHead("none", NoSettings(), 0, {})


def _build_layer(spec: LayerSpec, tensors: Mapping[str, Array]) -> DenseLayer[Array]:
    """Return a layer; raise a ValueError if its tensors have other shapes."""
    layer = spec.layer(tensors)
    shape, size_in = layer.weight.shape, (spec.size_in,)
    fits = shape[1:] == size_in and spec.size_out in (0, shape[0])
    if not fits or (layer.mean is not None and layer.mean.shape != size_in):
        raise ValueError(f"{spec.name} or its mean has an unexpected shape; the weight: {shape}")
    return layer


#: The number of folds of dev, each with about the same number of sentence pairs.
FOLDS = 10
#: Predictions of all epochs are stored up to this number; with more, nothing is held out.
MAX_VALUES = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut(EqualByValue):
    """Held-out predictions of dev.

    Attributes:
        predictions: (n,) the prediction of each row by the epoch that the other folds choose.
        scores: (folds,) the score of that epoch on the other folds; NaN if it is undefined.
    """

    predictions: NDArray[np.float32]
    scores: Floats


def assign_folds(groups: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the fold of each row, (n,), from 0. All rows of a group, (n,), are in one fold."""
    distinct, group = np.unique(groups, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(distinct))
    return np.asarray(order[group] % FOLDS, dtype=np.int64)


def choose_settings(
    settings: Sequence[Sequence[HeldOut]], metric: Metric, groups: NDArray[np.int64]
) -> tuple[list[HeldOut], list[int]]:
    """Choose the best of several settings on all folds but one, and predict this fold.

    Args:
        settings: The held-out predictions of each setting's seeds; all have as many seeds.
        metric: The metric that chooses.
        groups: (n,) the sentence pair of each row.

    Returns:
        The held-out predictions of each seed, and the position of each fold's setting.
    """
    fold = assign_folds(groups)
    scores = np.array([np.mean([seed.scores for seed in seeds], axis=0) for seeds in settings])
    scores = np.nan_to_num(scores if metric.higher_is_better else -scores, nan=-np.inf)
    selected = scores.argmax(axis=0).tolist()
    predictions = np.empty((len(settings[0]), len(groups)), dtype=np.float32)
    for number, setting in enumerate(selected):
        for seed, held_out in enumerate(settings[setting]):
            predictions[seed, fold == number] = held_out.predictions[fold == number]
    return [HeldOut(values, scores.max(axis=0)) for values in predictions], selected


def hold_out(
    members: Sequence[NDArray[np.float32]],
    metric: Metric,
    rating: Floats,
    groups: NDArray[np.int64],
) -> HeldOut | None:
    """Choose the epoch of each member on all folds but one, and predict this fold.

    Args:
        members: The predictions of each member of an ensemble after each epoch, (epochs, n); the
            ensemble predicts their mean.
        metric: The metric that chooses the epoch.
        rating: (n,) the ratings.
        groups: (n,) the sentence pair of each row.

    Returns:
        The predictions; None if there are fewer sentence pairs than folds.
    """
    if len(np.unique(groups)) < FOLDS:
        return None
    fold = assign_folds(groups)
    predictions, scores = np.empty(len(rating), dtype=np.float32), np.empty(FOLDS)
    for number in range(FOLDS):
        others = fold != number

        def score(predicted: NDArray[np.float32], rows: NDArray[np.bool_] = others) -> float:
            return metric(predicted[rows].astype(np.float64), rating[rows], groups[rows])

        selected = []
        for epochs in members:
            by_epoch = np.array([score(predicted) for predicted in epochs])
            by_epoch = by_epoch if metric.higher_is_better else -by_epoch
            # As in the fit: the first of equal scores, and the last epoch if none is defined.
            best = -1 if np.isnan(by_epoch).all() else int(np.nanargmax(by_epoch))
            selected.append(epochs[best])
        mean = np.asarray(np.stack(selected).mean(axis=0))
        predictions[~others], scores[number] = mean[~others], score(mean)
    return HeldOut(predictions, scores)


H = TypeVar("H")

#: Key of the dev score in learning curves of query heads and dialogue heads, for any metric.
DEV_SCORE_KEY = "dev_score"


def score_key(split: str, metric: str = "score") -> str:
    """Return the key of a split's score in learning curves, such as ``test_spearman``."""
    return f"{split}_{metric}"


@dataclass(frozen=True, slots=True, eq=False)
class PairArrays(EqualByValue):
    """The rated pairs of a split, as the arrays that heads read.

    Attributes:
        first: (n, dim) features of the first sentences, in any float type: a NumPy array, a memory
            map, or a matrix of ``llmcond.base.arrays``.
        second: (n, dim) features of the second sentences, likewise.
        rating: (n,) float64 on 0 to 1, without NaN.
        condition: (n, dim_c) features e(c) of each row's condition, for heads that read them.
        pair: (n,) sentence pair of each row, for objectives that contrast its two conditions.

    Examples:
        >>> import numpy as np
        >>> from llmcond.heads import PairArrays
        >>> first, second = np.random.default_rng(0).normal(size=(2, 6, 4))
        >>> pairs = PairArrays(first, second, rating=np.linspace(0, 1, 6))
        >>> len(pairs), pairs.dim, pairs.dim_condition
        (6, 4, 0)
        >>> len(pairs.take(pairs.rating > 0.5))
        3
    """

    first: MatrixLike
    second: MatrixLike
    rating: NDArray[np.float64]
    condition: MatrixLike | None = None
    pair: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.rating)

    @property
    def dim(self) -> int:
        """Size of the features."""
        return int(self.first.shape[1])

    @property
    def dim_condition(self) -> int:
        """Size of the conditions' features; 0 if there are none."""
        return 0 if self.condition is None else int(self.condition.shape[1])

    @property
    def groups(self) -> NDArray[np.int64]:
        """Sentence pair of each row, (n,); without ``pair``, each row is its own group."""
        return np.arange(len(self)) if self.pair is None else self.pair

    def take(self, rows: NDArray[Any]) -> PairArrays:
        """Select rows without reading their vectors.

        Args:
            rows: positions, or a boolean mask, (n,).

        Returns:
            The selected rows, (m,), as arrays that are read when needed.
        """
        condition = self.condition
        return replace(
            self,
            first=as_matrix(self.first).take(rows),
            second=as_matrix(self.second).take(rows),
            rating=self.rating[rows],
            condition=None if condition is None else as_matrix(condition).take(rows),
            pair=None if self.pair is None else self.pair[rows],
        )


@dataclass(frozen=True, slots=True)
class FitReport:
    """The report of a fit.

    Attributes:
        record: The record of the fit for head.json.
        notes: Notes for the user, each a sentence.
        held_out: The held-out predictions of dev; None if dev did not choose the epoch.
    """

    record: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    held_out: HeldOut | None = None


@dataclass(frozen=True, slots=True)
class DevScore(Generic[H]):
    """A metric on dev that selects the epoch, and functions that score a head after each epoch.

    A score of NaN means undefined.

    Attributes:
        metric: The metric that selects the epoch.
        compute: The function that scores a head on dev.
        others: Functions that score a head on other splits, by their keys in the learning curve.
            They do not influence the fit.
    """

    metric: Metric
    compute: Callable[[H], float]
    others: Mapping[str, Callable[[H], float]] = field(default_factory=dict)


#: Called after each epoch, and after each step within an epoch except the last. The arguments are
#: the number of finished epochs (1.5: half of the second epoch is done), the maximum number of
#: epochs, and the epoch's entry in the learning curve (None except after an epoch). If several
#: heads are fitted, the entry also has the key ``stage``, such as ``member-0``.
OnEpoch = Callable[[float, int, Mapping[str, Any] | None], None]


def in_stage(on_epoch: OnEpoch, stage: str) -> OnEpoch:
    """Return a function that adds the name of one of several fits to the entries of its epochs."""

    def report(epoch: float, epochs: int, entry: Mapping[str, Any] | None) -> None:
        if entry is not None:
            names = [stage, entry["stage"]] if "stage" in entry else [stage]
            entry = {**entry, "stage": "/".join(names)}
        on_epoch(epoch, epochs, entry)

    return report
