"""OpenVINO graphs of networks like BERT, built directly from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.encoders.openvino.architectures import ARCHITECTURES, GELU
from llmcond.encoders.openvino.library import import_openvino

Tensors = Mapping[str, NDArray[np.float32]]

#: The length of attention's rows is a multiple of this number of tokens; see ``pack_inputs``.
STEP = 16
#: Added to the attention scores of padding, so that its weights are 0.
_MASKED = -1e9
#: Distance of two tokens from which MPNet's bias no longer distinguishes distances.
_MAX_DISTANCE = 128


def make_graph(tensors: Tensors, config: Mapping[str, Any]) -> Any:
    """Build an ``openvino.Model`` that computes token states from packed inputs.

    The n tokens of all inputs are concatenated without padding. Only attention arranges them as the
    rows of a rectangle, (b, t). The graph has the inputs of ``PackedInputs``, in their order,
    without those that are None. Its output is (n, width) float32.
    """
    layers = _LayerBuilder(tensors, config)
    architecture, op = layers.architecture, layers.op

    def parameter(name: str, rank: int, kind: Any = np.int64) -> Any:
        return op.parameter([-1] * rank, kind, name=name)

    ids, positions, types = (parameter(name, 1) for name in ("ids", "positions", "types"))
    rectangle, packed = parameter("rectangle", 2), parameter("packed", 1)
    mask, buckets = parameter("mask", 2, np.float32), parameter("buckets", 2)
    x = op.add(layers.look_up("word", ids), layers.look_up("position", positions))
    bias = op.unsqueeze(mask, np.array([1, 2]))
    if architecture.typed:
        x = op.add(x, layers.look_up("token_type", types))
    if architecture.relative:
        table = layers.constant("encoder.relative_attention_bias.weight")
        distance = op.transpose(op.gather(table, buckets, np.int64(0)), np.array([2, 0, 1]))
        bias = op.add(op.unsqueeze(distance, np.array([0])), bias)
    x = layers.norm("embeddings.LayerNorm", x)
    for number in range(int(config["num_hidden_layers"])):
        x = layers.layer(f"encoder.layer.{number}", x, rectangle, packed, bias)
    inputs = [ids, positions, *[types] * architecture.typed, rectangle, packed, mask]
    return import_openvino().Model([x], [*inputs, *[buckets] * architecture.relative], "encoder")


class _LayerBuilder:
    """Builds the parts of a network from OpenVINO's operations."""

    def __init__(self, tensors: Tensors, config: Mapping[str, Any]) -> None:
        self.op, self.architecture = import_openvino().opset13, ARCHITECTURES[config["model_type"]]
        self._tensors, self._activation = tensors, config["hidden_act"]
        self._eps = float(config.get("layer_norm_eps", 1e-12))
        heads, self._width = int(config["num_attention_heads"]), int(config["hidden_size"])
        self._heads = np.array([0, 0, heads, self._width // heads])

    def constant(self, name: str) -> Any:
        return self.op.constant(self._tensors[name], shared_memory=True)

    def look_up(self, name: str, indices: Any) -> Any:
        table = self.constant(f"embeddings.{name}_embeddings.weight")
        return self.op.gather(table, indices, np.int64(0))

    def linear(self, name: str, x: Any) -> Any:
        product = self.op.matmul(x, self.constant(f"{name}.weight"), False, True)
        return self.op.add(product, self.constant(f"{name}.bias"))

    def norm(self, name: str, x: Any) -> Any:
        unit = self.op.mvn(x, np.array([-1]), True, self._eps, "INSIDE_SQRT")
        scaled = self.op.multiply(unit, self.constant(f"{name}.weight"))
        return self.op.add(scaled, self.constant(f"{name}.bias"))

    def layer(self, name: str, x: Any, rectangle: Any, packed: Any, bias: Any) -> Any:
        op, architecture = self.op, self.architecture

        def heads(part: str) -> Any:
            values = self.linear(f"{name}.{architecture.attention}.{part}", x)
            rows = op.gather(values, rectangle, np.int64(0))
            return self._swap_axes(op.reshape(rows, self._heads, True))

        attended = self._swap_axes(
            op.scaled_dot_product_attention(*map(heads, architecture.projections), bias)
        )
        tokens = op.reshape(attended, np.array([-1, self._width]), False)
        joined = op.gather(tokens, packed, np.int64(0))
        x = self.norm(
            f"{name}.{architecture.norm}",
            op.add(self.linear(f"{name}.{architecture.output}", joined), x),
        )
        inner = self.linear(f"{name}.intermediate.dense", x)
        relu = self._activation == "relu"
        inner = op.relu(inner) if relu else op.gelu(inner, GELU[self._activation])
        outer = self.linear(f"{name}.output.dense", inner)
        return self.norm(f"{name}.output.LayerNorm", op.add(outer, x))

    def _swap_axes(self, x: Any) -> Any:
        """Swap the axes of tokens and heads."""
        return self.op.transpose(x, np.array([0, 2, 1, 3]))


class PackedInputs(NamedTuple):
    """The inputs of a graph for a batch of b inputs with n tokens in total.

    Attributes:
        ids: Token ids, (n,) int64.
        positions: Position of each token in its input, (n,) int64.
        types: 1 in the second half of a pair and 0 elsewhere, (n,) int64; None if the architecture
            has no token types.
        rectangle: Index of the token at each place of the rectangle, (b, t) int64; any index for
            padding.
        packed: Index of each token in the flattened rectangle, (n,) int64.
        mask: 0 for tokens and a large negative number for padding, (b, t) float32.
        buckets: See ``relative_buckets``, (t, t) int64; None if the architecture has no such bias.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    types: NDArray[np.int64] | None
    rectangle: NDArray[np.int64]
    packed: NDArray[np.int64]
    mask: NDArray[np.float32]
    buckets: NDArray[np.int64] | None

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The inputs that are not None, in the order of the graph's parameters."""
        return [part for part in self if part is not None]


def pack_inputs(rows: Sequence[Tokens], config: Mapping[str, Any]) -> PackedInputs:
    """Create the inputs of the graph for a batch.

    The rows of attention are padded to a multiple of ``STEP`` tokens. Attention weights are then
    summed in the same order whatever the length of the rectangle, so a vector does not depend on
    the other inputs of its batch.
    """
    architecture = ARCHITECTURES[config["model_type"]]
    lengths = np.array([len(row.ids) for row in rows])
    offsets = np.arange(-(-lengths.max() // STEP) * STEP)
    real, starts = offsets < lengths[:, None], np.cumsum(lengths) - lengths
    ids = np.concatenate([row.ids for row in rows]).astype(np.int64)
    positions = np.broadcast_to(offsets, real.shape)[real]
    if architecture.padding is not None:
        counted = np.zeros(real.shape, dtype=np.int64)
        counted[real] = ids != architecture.padding
        positions = (counted.cumsum(axis=1) * counted)[real] + architecture.padding
    types = buckets = None
    if architecture.relative:
        buckets = relative_buckets(
            len(offsets), int(config.get("relative_attention_num_buckets", 32))
        )
    if architecture.typed:
        typed = int(config.get("type_vocab_size", 2)) > 1
        second = np.array([row.second for row in rows])
        types = ((offsets >= second[:, None])[real] & typed).astype(np.int64)
    rectangle, packed = np.where(real, starts[:, None] + offsets, 0), np.flatnonzero(real)
    mask = np.where(real, 0, _MASKED).astype(np.float32)
    return PackedInputs(ids, positions, types, rectangle, packed, mask, buckets)


def relative_buckets(length: int, n_buckets: int) -> NDArray[np.int64]:
    """Return the bucket of the distance of each pair of tokens, (t, t), as in MPNet and T5.

    Half of the buckets are for later tokens, and half for earlier ones. In each half, the first
    half of the buckets stands for one distance each, and the other buckets for ranges that grow by
    a constant factor.
    """
    half = n_buckets // 2
    exact = half // 2
    distance = np.arange(length) - np.arange(length)[:, None]
    size = np.abs(distance)
    with np.errstate(divide="ignore"):
        scale = np.log(size.astype(np.float32) / exact) / np.float32(np.log(_MAX_DISTANCE / exact))
    large = exact + np.where(size < exact, 0, scale * (half - exact)).astype(np.int64)
    within = np.where(size < exact, size, np.minimum(large, half - 1))
    return (np.where(distance > 0, half, 0) + within).astype(np.int64)
