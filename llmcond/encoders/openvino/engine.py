"""The OpenVINO engine: tokenises and batches inputs, runs the network, and pools with NumPy.

The states of an input's tokens depend neither on the other inputs of its batch nor on the number of
threads. OpenVINO computes each row of a product in the same way, however many rows there are, and
``pack_inputs`` chooses the lengths of attention so that the same holds for attention.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import gelu, scale_to_unit_norm
from llmcond.base.errors import UserError, first_line
from llmcond.base.files import format_bytes
from llmcond.base.system import cpu_threads, free_memory
from llmcond.encoders.checkpoint import fetch_weights, read_settings
from llmcond.encoders.openvino.support import (
    WINDOWS,
    CannotRunError,
    open_tensors,
    read_dense,
    rotary_frequencies,
)
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import ARCHITECTURES, GELU, bytes_needed, get_pooling, import_openvino
from llmcond.encoders.tokenizing import (
    BatchVectors,
    InputTokenizer,
    OutOfMemoryError,
    Routes,
    Tokens,
    check_token_ids,
    record_weights,
)

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
    rows of a rectangle, (b, t). The graph has the inputs of ``pack_inputs``, in their order. Its
    output is (n, width) float32.
    """
    if ARCHITECTURES[config["model_type"]].rotary:
        return make_rotary_graph(tensors, config)
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


def make_rotary_graph(tensors: Tensors, config: Mapping[str, Any]) -> Any:
    """Build what ``make_graph`` does for a bidirectional Gemma 3."""
    op = import_openvino().opset13
    heads, head, width = (
        int(config[key]) for key in ("num_attention_heads", "head_dim", "hidden_size")
    )
    scale = np.float32(float(config["query_pre_attn_scalar"]) ** -0.5)

    def linear(name: str, x: Any) -> Any:
        weight = op.constant(tensors[f"{name}_proj.weight"], shared_memory=True)
        return op.matmul(x, weight, False, True)

    def norm(name: str, x: Any) -> Any:
        mean = op.reduce_mean(op.power(x, np.float32(2)), np.array([-1]), True)
        size = op.sqrt(op.add(mean, np.float32(config["rms_norm_eps"])))
        unit = op.multiply(x, op.divide(np.float32(1), size))
        return op.multiply(unit, op.constant(1 + tensors[f"{name}.weight"]))

    def rotate(x: Any, angles: Any) -> Any:
        first, second = op.split(x, np.int64(2), 2).outputs()
        cos, sin = op.split(angles, np.int64(0), 2).outputs()
        cos, sin = (op.reshape(part, np.array([-1, 1, head // 2]), False) for part in (cos, sin))
        turned_first = op.subtract(op.multiply(first, cos), op.multiply(second, sin))
        turned_second = op.add(op.multiply(second, cos), op.multiply(first, sin))
        return op.concat([turned_first, turned_second], 2)

    def parameter(name: str, rank: int, kind: Any = np.int64) -> Any:
        return op.parameter([-1] * rank, kind, name=name)

    ids, rectangle, packed = parameter("ids", 1), parameter("rectangle", 2), parameter("packed", 1)
    mask, band = parameter("mask", 2, np.float32), parameter("band", 2, np.float32)
    turns = {kind: parameter(kind, 3, np.float32) for kind in WINDOWS}
    everywhere = op.unsqueeze(mask, np.array([1, 2]))
    in_window = op.add(everywhere, op.unsqueeze(band, np.array([0, 1])))
    bias = dict(zip(WINDOWS, (everywhere, in_window), strict=True))
    table = op.constant(tensors["embed_tokens.weight"], shared_memory=True)
    x = op.multiply(op.gather(table, ids, np.int64(0)), np.float32(width**0.5))

    def attend(layer: str, kind: str, x: Any) -> Any:
        rows = {}
        for part, count in (("q", heads), ("k", 1), ("v", 1)):
            values = op.reshape(linear(f"{layer}.{part}", x), np.array([0, count, head]), True)
            if part != "v":
                values = rotate(norm(f"{layer}.{part}_norm", values), turns[kind])
            gathered = op.gather(values, rectangle, np.int64(0))
            rows[part] = op.transpose(gathered, np.array([0, 2, 1, 3]))
        attended = op.scaled_dot_product_attention(*rows.values(), bias[kind], op.constant(scale))
        tokens = op.transpose(attended, np.array([0, 2, 1, 3]))
        tokens = op.reshape(tokens, np.array([-1, heads * head]), False)
        return linear(f"{layer}.o", op.gather(tokens, packed, np.int64(0)))

    for number, kind in enumerate(config["layer_types"]):
        layer = f"layers.{number}"
        attended = attend(f"{layer}.self_attn", kind, norm(f"{layer}.input_layernorm", x))
        x = op.add(x, norm(f"{layer}.post_attention_layernorm", attended))
        inner = norm(f"{layer}.pre_feedforward_layernorm", x)
        gate = op.gelu(linear(f"{layer}.mlp.gate", inner), GELU[config["hidden_activation"]])
        outer = linear(f"{layer}.mlp.down", op.multiply(gate, linear(f"{layer}.mlp.up", inner)))
        x = op.add(x, norm(f"{layer}.post_feedforward_layernorm", outer))
    inputs = [ids, rectangle, packed, mask, band, *turns.values()]
    return import_openvino().Model([norm("norm", x)], inputs, "encoder")


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


def pack_inputs(rows: Sequence[Tokens], config: Mapping[str, Any]) -> list[NDArray[Any]]:
    """Create the inputs of the graph for a batch of b inputs with n tokens in total.

    The rows of attention are padded to a multiple of ``STEP`` tokens. Attention weights are then
    summed in the same order whatever the length of the rectangle, so a vector does not depend on
    the other inputs of its batch.

    Returns:
        - Token ids, (n,) int64.
        - Position of each token in its input, (n,) int64.
        - 1 in the second half of a pair and 0 elsewhere, (n,) int64, if the architecture has token
          types.
        - Index of the token at each place of the rectangle, (b, t) int64; any index for padding.
        - Index of each token in the flattened rectangle, (n,) int64.
        - 0 for tokens and a large negative number for padding, (b, t) float32.
        - ``relative_buckets``, (t, t) int64, if the architecture has such a bias.

        A ``rotary`` architecture has no input for positions. Behind the mask, it has a mask of the
        tokens outside of each token's window, (t, t) float32, and the cosines and sines of the
        angles for each of ``WINDOWS``, (2, n, head_dim / 2) float32.
    """
    architecture = ARCHITECTURES[config["model_type"]]
    lengths = np.array([len(row.ids) for row in rows])
    offsets = np.arange(-(-lengths.max() // STEP) * STEP)
    real, starts = offsets < lengths[:, None], np.cumsum(lengths) - lengths
    ids = np.concatenate([row.ids for row in rows]).astype(np.int64)
    positions = np.broadcast_to(offsets, real.shape)[real]
    rectangle, packed = np.where(real, starts[:, None] + offsets, 0), np.flatnonzero(real)
    mask = np.where(real, 0, _MASKED).astype(np.float32)
    if architecture.rotary:
        # The window includes half of its tokens on each side.
        far = np.abs(offsets - offsets[:, None]) > int(config["sliding_window"]) // 2
        band = np.where(far, _MASKED, 0).astype(np.float32)
        frequencies = rotary_frequencies(config)
        angles = (positions[:, None] * frequencies[kind] for kind in WINDOWS)
        turns = (np.stack([np.cos(a), np.sin(a)]).astype(np.float32) for a in angles)
        return [ids, rectangle, packed, mask, band, *turns]
    if architecture.padding is not None:
        counted = np.zeros(real.shape, dtype=np.int64)
        counted[real] = ids != architecture.padding
        positions = (counted.cumsum(axis=1) * counted)[real] + architecture.padding
    inputs = [ids, positions, rectangle, packed, mask]
    if architecture.typed:
        typed = int(config.get("type_vocab_size", 2)) > 1
        second = np.array([row.second for row in rows])
        inputs.insert(2, ((offsets >= second[:, None])[real] & typed).astype(np.int64))
    if architecture.relative:
        n_buckets = int(config.get("relative_attention_num_buckets", 32))
        inputs.append(relative_buckets(len(offsets), n_buckets))
    return inputs


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


Vectors = NDArray[np.float32]
#: OpenVINO's names of the types that products are computed in.
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
#: Tokens of a batch. This was measured to be fastest for MiniLM, whose activations then fit into a
#: core's cache.
_BATCH_TOKENS = 1_536
#: Batches of fewer tokens are not split to give work to another stream.
_MIN_SPLIT_TOKENS = 128
_MAX_STREAMS = 8


def load_engines(resolved: ResolvedEncoder) -> tuple[InputTokenizer, list[OpenVinoEngine]]:
    """Load an encoder's tokenizer and its engines, one for each member of an ensemble.

    Raises:
        UserError: If the tokenizer cannot be read, or lacks a token that the model needs.
        LlmcondError: If the hub cannot be reached.
        CannotRunError: If there is not enough memory, or as in ``OpenVinoEngine``.
    """
    checkpoint = resolved.checkpoint
    config = read_settings(checkpoint.folder / "config.json", {})
    pooling = get_pooling(resolved.identity.pooling)
    members = resolved.list_members()
    needed = len(members) * bytes_needed(config, pooler=pooling.part == "pooler")
    if needed > free_memory():
        raise CannotRunError(f"it needs {format_bytes(needed)} of memory")
    fetch_weights(checkpoint)
    tokenizer: Any = read_tokenizer(checkpoint.folder, checkpoint.name)
    if tokenizer is None:  # transformers takes seconds to import
        from llmcond.encoders.loading import load_config, load_tokenizer

        tokenizer = load_tokenizer(checkpoint, load_config(checkpoint, resolved.identity.attention))
    inputs = InputTokenizer(tokenizer, resolved.identity, checkpoint.name)
    return inputs, [OpenVinoEngine(member) for member in members]


def compile_network(
    tensors: Tensors, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> Any:
    """Compile the network; return an ``openvino.CompiledModel`` that computes token states.

    Args:
        tensors: The network's tensors by their names.
        config: The checkpoint's config.
        settings: Settings of OpenVINO's CPU plugin.
    """
    graph = make_graph(tensors, config)
    with _restore_signal_stack():
        return import_openvino().Core().compile_model(graph, "CPU", settings)


class _SignalStack(ctypes.Structure):
    """``stack_t`` of Linux's C library."""

    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def _restore_signal_stack() -> Iterator[None]:
    """Restore the memory that this thread's signal handlers use as their stack.

    Each ``openvino.Core`` replaces it, and its deletion restores it, even if that memory belonged
    to another core that is gone. The next signal, such as Ctrl-C, would then end the process by a
    segmentation fault.
    """
    if sys.platform != "linux":
        yield
        return
    before, library = _SignalStack(), ctypes.CDLL(None)
    library.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        library.sigaltstack(ctypes.byref(before), None)


class OpenVinoEngine:
    """A network that OpenVINO runs on a CPU.

    The cores are divided among streams, each of which computes one batch at a time.

    Attributes:
        dim: Size of the vectors.
        budget: Most tokens of one batch.
        streams: Number of batches that are computed simultaneously.
        routes_inside: See ``AnyEngine``; False.
        reads_routers: See ``AnyEngine``; False.
    """

    routes_inside = reads_routers = False

    def __init__(self, resolved: ResolvedEncoder) -> None:
        """Read a checkpoint's weights and compile its network.

        Raises:
            CannotRunError: If OpenVINO cannot run it. PyTorch may be able to, or reports what is
                wrong.
        """
        self._identity, self._name = resolved.identity, resolved.checkpoint.name
        config = read_settings(resolved.checkpoint.folder / "config.json", {})
        self._pooling = get_pooling(self._identity.pooling)
        pooler = self._pooling.part == "pooler"
        with ExitStack() as stack:
            stored = open_tensors(resolved.checkpoint, config, stack, pooler=pooler)
            tensors = {name: tensor.read() for name, tensor in stored.items()}
        self._pooler = [tensors[f"pooler.dense.{name}"] for name in ("weight", "bias") if pooler]
        width = int(config["hidden_size"])
        self._dense = read_dense(resolved.checkpoint, width)
        self._n_ids = len(tensors[ARCHITECTURES[config["model_type"]].words])
        self._config = config
        cores = cpu_threads()
        self.streams = min(cores, _MAX_STREAMS)
        settings = {
            "INFERENCE_PRECISION_HINT": _PRECISIONS[self._identity.dtype],
            # With pinning, several processes on one machine would use the same cores.
            "ENABLE_CPU_PINNING": False,
            # OpenVINO caches prepared kernels for each shape, and most batches have a new shape.
            # The default limit, 5,000 entries, takes a gigabyte; this one is as fast.
            "CPU_RUNTIME_CACHE_CAPACITY": 128,
            "NUM_STREAMS": self.streams,
            "INFERENCE_NUM_THREADS": cores,
        }
        self._threads = threading.local()
        self.budget = resolved.options.max_tokens_per_batch or _BATCH_TOKENS
        self.dim = len(self._dense[-1][0]) if self._dense else width
        try:
            self._network = compile_network(tensors, config, settings)
            # On CPUs without AVX, the network can be compiled, but fails at its first run.
            list(self.run([Tokens([0, 0], 0, 2, 2, 2)]))
        except (RuntimeError, TypeError, ValueError) as error:
            # The last line of OpenVINO's message has the reason; lines before it name source files.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise CannotRunError(f"OpenVINO cannot run it: {reason}") from error

    def run(
        self,
        rows: Sequence[Tokens],
        before_batch: Callable[[], None] = lambda: None,
        routes: Sequence[Routes] = (),
        *,
        queries: bool = False,
    ) -> Iterator[BatchVectors]:
        """Yield the vectors of inputs, batch by batch; arguments are as in ``AnyEngine.run``."""
        check_token_ids(rows, self._n_ids, self._name)
        lengths = [len(row.ids) for row in rows]
        waiting = deque(plan_packed(lengths, self.budget, self.streams))
        # A running batch is kept with its inputs, because OpenVINO does not copy them.
        idle, running = self._idle_requests(), deque[tuple[list[int], list[NDArray[Any]], Any]]()
        try:
            while waiting or running:
                if waiting and idle:
                    before_batch()
                    batch = waiting.popleft()
                    inputs = pack_inputs([rows[index] for index in batch], self._config)
                    running.append((batch, inputs, idle.pop()))
                    running[-1][2].start_async(inputs, share_inputs=True)
                    continue
                batch, _, request = running.popleft()
                try:
                    request.wait()
                except (MemoryError, RuntimeError) as error:
                    waiting.extendleft(_split_batch(batch, lengths, error))
                    continue
                finally:
                    idle.append(request)
                # The states of the tokens, (n, width), until the next batch of the request begins.
                states: Vectors = request.get_output_tensor().data
                batch_routes = [routes[index] for index in batch] if routes else []
                pooled = self._pool(states, [rows[index] for index in batch], batch_routes)
                vectors = pooled if queries else self.finish_states(pooled)
                if len(batch) > 1 and not np.isfinite(vectors).all():
                    # Attention multiplies other inputs of a batch by 0, which leaves NaN as it is.
                    waiting.extendleft(_halve(batch))
                    continue
                yield BatchVectors(batch, vectors, len(states))
        finally:
            for _, _, unfinished in running:
                with suppress(RuntimeError):  # only the first error is raised
                    unfinished.wait()

    def finish_states(self, states: Vectors) -> Vectors:
        """Turn states that left the pooling, (n, width), into vectors of inputs, (n, dim)."""
        for weight, bias, activation in self._dense:
            states = states @ weight.T
            if bias is not None:
                states = states + bias
            states = _ACTIVATIONS[activation](states)
        return scale_to_unit_norm(states) if self._identity.normalize else states

    def _idle_requests(self) -> list[Any]:
        """Return the inference requests of the calling thread, one for each stream."""
        if not hasattr(self._threads, "requests"):
            requests = [self._network.create_infer_request() for _ in range(self.streams)]
            self._threads.requests = requests
        return list(self._threads.requests)

    def _pool(self, states: Vectors, rows: Sequence[Tokens], routes: Sequence[Routes]) -> Vectors:
        """Pool the states of tokens to one vector per input or per route, (vectors, width)."""
        starts = np.cumsum([0, *(len(row.ids) for row in rows[:-1])])
        spans = zip(starts, rows, strict=True)
        counted = (states[start + row.first : start + row.last] for start, row in spans)
        if routes:
            return _pool_routed(counted, routes)
        if self._pooling.states == "mean":
            return np.stack([tokens.mean(axis=0) for tokens in counted])
        last = self._pooling.states == "last"
        pooled: Vectors = states[starts + [row.last - 1 if last else 0 for row in rows]]
        if not self._pooler:
            return pooled
        weight, bias = self._pooler
        return _ACTIVATIONS["Tanh"](pooled @ weight.T + bias)


def plan_packed(lengths: Sequence[int], max_tokens: int, streams: int) -> list[list[int]]:
    """Group inputs of similar length into batches of at most about ``max_tokens`` tokens.

    All streams get about the same amount of work, unless there is little of it. If an input is less
    than half as long as the longest of a batch, a new batch begins, because attention pads inputs
    to the longest one.

    Returns:
        Positions in ``lengths``, longest first; every position once. An input longer than
        ``max_tokens`` has a batch of its own.
    """
    total = sum(lengths)
    count = -(-total // max_tokens)
    count = min(-(-count // streams) * streams, max(count, total // _MIN_SPLIT_TOKENS))
    batch_tokens, batches = -(-total // max(1, count)), list[list[int]]()
    used = 0
    for index in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        length = lengths[index]
        # A batch may be too long by half of an input, so that no small batch is left at the end.
        full = used + length // 2 > batch_tokens or used + length > max_tokens
        if not batches or full or 2 * length < lengths[batches[-1][0]] - STEP:
            batches.append([])
            used = 0
        batches[-1].append(index)
        used += length
    return batches


def _split_batch(batch: list[int], lengths: Sequence[int], error: Exception) -> list[list[int]]:
    """Split a batch that ran out of memory; return its second half, then its first half.

    Raises:
        OutOfMemoryError: If the batch is a single input.
        Exception: The given ``error``, if it is not about memory.
    """
    signs = ("allocate", "bad_alloc", "out of memory")
    if not isinstance(error, MemoryError) and not any(sign in str(error).lower() for sign in signs):
        raise error
    if len(batch) == 1:
        raise OutOfMemoryError(
            f"ran out of memory with a single input of {lengths[batch[0]]} tokens."
        ) from error
    return _halve(batch)


def _halve(batch: list[int]) -> list[list[int]]:
    """Return the second half of a batch, then its first half."""
    half = len(batch) // 2
    return [batch[half:], batch[:half]]


def _pool_routed(counted: Iterable[Vectors], routes: Sequence[Routes]) -> Vectors:
    """Pool each input under each of its routers; the formula is that of ``Router``.

    Args:
        counted: The states of each input's pooled tokens, (tokens, width).
        routes: The routers of each input.

    Returns:
        One vector per input and router, in this order, (vectors, width).
    """
    vectors = []
    for states, route in zip(counted, routes, strict=True):
        router = route.router
        centred = states - states.mean(axis=0) if router.centre else states
        cosines = scale_to_unit_norm(route.queries) @ scale_to_unit_norm(centred).T
        if router.standardize:
            cosines = cosines / np.sqrt(cosines.var(axis=1, keepdims=True) + 1e-12)
        cosines = cosines / router.temperature
        weights = np.exp(cosines - cosines.max(axis=1, keepdims=True))
        weights = weights / weights.sum(axis=1, keepdims=True)
        record_weights(weights, states)
        vectors.append(weights @ states)
    return np.concatenate(vectors)


#: Activation functions by their names in torch.nn.
_ACTIVATIONS: dict[str, Callable[[Vectors], Vectors]] = {
    "Identity": lambda values: values,
    "Tanh": np.tanh,
    "ReLU": lambda values: np.maximum(values, 0),
    "GELU": gelu,
}


_FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
#: Classes of transformers that use tokenizer.json unchanged.
_UNCHANGED = ("PreTrainedTokenizerFast", "TokenizersBackend")
#: Classes, without the end of their names, that rebuild its parts; see ``_expected_pipeline``.
_REBUILT = ("Bert", "MPNet", "XLMRoberta", "Roberta", "Gemma")
#: Special tokens. The classes that rebuild a tokenizer have defaults for the first three, but that
#: of Gemma has no separator.
_SPECIAL = ("unk_token", "sep_token", "pad_token", "eos_token")


def read_tokenizer(folder: Path, name: str) -> JsonTokenizer | None:
    """Read a checkpoint's tokenizer, unless transformers would build another one than its file has.

    Args:
        folder: The checkpoint's folder.
        name: The checkpoint's name in error messages.

    Raises:
        UserError: If one of its files cannot be read.
    """
    from tokenizers import Tokenizer

    config = read_settings(folder / _CONFIG, {})
    settings = {**read_settings(folder / "special_tokens_map.json", {}), **config}
    kind = str(config.get("tokenizer_class"))
    family = kind.removesuffix("Fast").removesuffix("Tokenizer")
    defaults = _SPECIAL[::2] if family == "Gemma" else _SPECIAL[:3]
    is_rebuilt = family in _REBUILT and all(settings.get(key) for key in defaults)
    if not (folder / _FILE).is_file() or not (is_rebuilt or kind in _UNCHANGED):
        return None
    try:
        tokenizer = Tokenizer.from_file(str(folder / _FILE))
        if is_rebuilt:
            parts = [tokenizer.normalizer, tokenizer.pre_tokenizer, type(tokenizer.model).__name__]
            expected = _expected_pipeline(family, config, tokenizer.normalizer)
            if _describe_parts(parts) != _describe_parts(expected):
                return None
            if family == "Gemma" and not _is_gemma(tokenizer, settings):
                return None
        return JsonTokenizer(tokenizer, settings)
    except Exception as error:  # the only type that tokenizers raises
        raise UserError(f"the tokenizer of {name} cannot be loaded: {first_line(error)}") from error


def _expected_pipeline(family: str, config: Mapping[str, Any], normalizer: Any) -> list[Any]:
    """Return the normalizer, the pre-tokenizer and the type of model that transformers creates.

    ``normalizer`` is that of the file, from which transformers reads the character map of XLM-R.
    """
    from tokenizers import normalizers, pre_tokenizers

    if family in ("Bert", "MPNet"):
        created = normalizers.BertNormalizer(
            handle_chinese_chars=config.get("tokenize_chinese_chars", True),
            strip_accents=config.get("strip_accents"),
            lowercase=config.get("do_lower_case", True),
        )
        return [created, pre_tokenizers.BertPreTokenizer(), "WordPiece"]
    if family == "Gemma":
        split = pre_tokenizers.Split(" ", "merged_with_previous")
        return [normalizers.Replace(" ", "▁"), split, "BPE"]
    if family == "XLMRoberta":
        prefix = config.get("add_prefix_space", True) is True
        metaspace = pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never")
        splitters = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
        has_map = isinstance(normalizer, normalizers.Precompiled)
        return [normalizer if has_map else None, splitters, "Unigram"]
    prefix = config.get("add_prefix_space", False)  # the default of RoBERTa
    return [None, pre_tokenizers.ByteLevel(add_prefix_space=prefix), "BPE"]


def _is_gemma(tokenizer: Any, settings: Mapping[str, Any]) -> bool:
    """Return whether a file has the model, and the first and last token, of transformers' class."""
    names = [name for name in ("bos", "eos") if settings.get(f"add_{name}_token")]
    stated = "add_bos_token" in settings or "add_eos_token" in settings
    added = tokenizer.encode("").tokens
    texts = [settings.get(f"{name}_token") for name in names]
    if tokenizer.token_to_id(settings.get("mask_token") or "<mask>") is None:
        return False  # transformers would add it
    model = tokenizer.model
    return model.fuse_unk and model.byte_fallback and (not stated or added == texts)


def _describe_parts(parts: Sequence[Any]) -> list[Any]:
    """Return the settings of the parts of a tokenizer, defaults included."""
    return [part if isinstance(part, str | None) else part.__getstate__() for part in parts]


class JsonTokenizer:
    """A tokenizer with the part of transformers' interface that ``InputTokenizer`` uses.

    Attributes:
        unk_token: The unknown token; None if there is none.
        unk_token_id: Its id; None if there is none, like the ids below.
        sep_token_id: Id of the separator.
        pad_token_id: Id of the padding token.
        eos_token_id: Id of the end token.
        truncation_side: ``left`` or ``right``.
    """

    is_fast = True

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        """Wrap a tokenizer of the library tokenizers; the settings name its special tokens."""
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.truncation_side = str(settings.get("truncation_side", "right"))
        tokens = {key: settings.get(key) for key in _SPECIAL}
        texts = {key: t.get("content") if isinstance(t, dict) else t for key, t in tokens.items()}
        self.unk_token = texts["unk_token"]
        self.unk_token_id, self.sep_token_id, self.pad_token_id, self.eos_token_id = (
            self._tokenizer.token_to_id(text) if text else None for text in texts.values()
        )

    def __call__(
        self, texts: Sequence[str], pair: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return the token ids of a list of texts, or of one text or one pair of texts.

        Supported ``options`` of transformers are ``add_special_tokens``, by default True, and
        ``return_offsets_mapping``, by default False. Others are ignored.
        """
        special = options.get("add_special_tokens", True)
        if isinstance(texts, str):
            encoding = self._tokenizer.encode(texts, pair, add_special_tokens=special)
            return {"input_ids": encoding.ids, "token_type_ids": encoding.type_ids}
        if not options.get("return_offsets_mapping"):  # encode_batch_fast computes no offsets
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
            return {"input_ids": [encoding.ids for encoding in encodings]}
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        offsets = [encoding.offsets for encoding in encodings]
        return {
            "input_ids": [encoding.ids for encoding in encodings],
            "offset_mapping": offsets,
        }

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return the tokens of the vocabulary with these ids."""
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token, or the id of the unknown token if the vocabulary lacks it."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return self.unk_token_id if token_id is None else token_id
