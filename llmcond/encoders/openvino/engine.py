"""The OpenVINO engine: batches inputs, runs the network, and pools token states with numpy.

The states of an input's tokens depend neither on the other inputs of its batch nor on the number of
threads. OpenVINO computes each row of a product in the same way, however many rows there are, and
``pack_inputs`` chooses the lengths of attention so that the same holds for attention.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import gelu
from llmcond.encoders.checkpoints.checkpoint import fetch_weights, read_settings
from llmcond.encoders.engine.interface import (
    BatchVectors,
    OutOfMemoryError,
    Routes,
    check_token_ids,
)
from llmcond.encoders.engine.token_weights import record_weights
from llmcond.encoders.engine.tokenizing import InputTokenizer, Tokens
from llmcond.encoders.openvino.architectures import bytes_needed
from llmcond.encoders.openvino.graph import STEP, PackedInputs, Tensors, make_graph, pack_inputs
from llmcond.encoders.openvino.library import import_openvino
from llmcond.encoders.openvino.tokenizer import JsonTokenizer, can_read
from llmcond.encoders.openvino.weights import CannotRunError, read_dense, read_tensors
from llmcond.encoders.poolings import get_pooling
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.files import format_bytes
from llmcond.system import cpu_threads, free_memory

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
    needed = bytes_needed(config, pooler=pooling.part == "pooler")
    if needed > free_memory():
        raise CannotRunError(f"it needs {format_bytes(needed)} of memory")
    fetch_weights(checkpoint)
    if can_read(checkpoint.folder):
        tokenizer: Any = JsonTokenizer(checkpoint.folder, checkpoint.name)
    else:  # transformers takes seconds to import
        from llmcond.encoders.loading.architecture import load_config, load_tokenizer

        tokenizer = load_tokenizer(checkpoint, load_config(checkpoint, resolved.identity.attention))
    inputs = InputTokenizer(tokenizer, resolved.identity, checkpoint.name)
    return inputs, [OpenVinoEngine(member) for member in resolved.list_members()]


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
    return import_openvino().Core().compile_model(graph, "CPU", settings)


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
        tensors = read_tensors(resolved.checkpoint, config, pooler=pooler)
        self._pooler = [tensors[f"pooler.dense.{name}"] for name in ("weight", "bias") if pooler]
        width = int(config["hidden_size"])
        self._dense = read_dense(resolved.checkpoint, width)
        self._n_ids = len(tensors["embeddings.word_embeddings.weight"])
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
        self.dim = len(self._dense[-1].weight) if self._dense else width
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
        idle, running = self._idle_requests(), deque[_RunningBatch]()
        try:
            while waiting or running:
                if waiting and idle:
                    before_batch()
                    batch = waiting.popleft()
                    inputs = pack_inputs([rows[index] for index in batch], self._config)
                    running.append(_RunningBatch(batch, inputs, idle.pop()))
                    running[-1].request.start_async(inputs.arrays, share_inputs=True)
                    continue
                done = running.popleft()
                try:
                    states = done.finish()
                except (MemoryError, RuntimeError) as error:
                    waiting.extendleft(_split_batch(done.batch, lengths, error))
                    continue
                finally:
                    idle.append(done.request)
                batch_routes = [routes[index] for index in done.batch] if routes else []
                pooled = self._pool(states, [rows[index] for index in done.batch], batch_routes)
                vectors = pooled if queries else self.finish_states(pooled)
                if len(done.batch) > 1 and not np.isfinite(vectors).all():
                    # Attention multiplies other inputs of a batch by 0, which leaves NaN as it is.
                    waiting.extendleft(_halve(done.batch))
                    continue
                yield BatchVectors(done.batch, vectors, len(states))
        finally:
            for unfinished in running:
                with suppress(RuntimeError):  # only the first error is raised
                    unfinished.request.wait()

    def finish_states(self, states: Vectors) -> Vectors:
        """Turn states that left the pooling, (n, width), into vectors of inputs, (n, dim)."""
        for layer in self._dense:
            states = states @ layer.weight.T
            if layer.bias is not None:
                states = states + layer.bias
            states = _ACTIVATIONS[layer.activation](states)
        return _normalize(states) if self._identity.normalize else states

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


class _RunningBatch(NamedTuple):
    """A batch that a stream is computing.

    Attributes:
        batch: Positions of the batch's inputs.
        inputs: The network's inputs. They must stay alive, because OpenVINO does not copy them.
        request: The inference request.
    """

    batch: list[int]
    inputs: PackedInputs
    request: Any

    def finish(self) -> Vectors:
        """Wait for the states of the tokens, (n, width).

        The array is overwritten by the next batch of the same request.
        """
        self.request.wait()
        states: Vectors = self.request.get_output_tensor().data
        return states


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
        cosines = _normalize(route.queries) @ _normalize(centred).T
        if router.standardize:
            cosines = cosines / np.sqrt(cosines.var(axis=1, keepdims=True) + 1e-12)
        cosines = cosines / router.temperature
        weights = np.exp(cosines - cosines.max(axis=1, keepdims=True))
        weights = weights / weights.sum(axis=1, keepdims=True)
        record_weights(weights, states)
        vectors.append(weights @ states)
    return np.concatenate(vectors)


def _normalize(vectors: Vectors) -> Vectors:
    """Scale vectors to unit norm; zero vectors stay zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Vectors = vectors / np.maximum(norms, 1e-12)
    return unit


#: Activation functions by their names in torch.nn.
_ACTIVATIONS: dict[str, Callable[[Vectors], Vectors]] = {
    "Identity": lambda values: values,
    "Tanh": np.tanh,
    "ReLU": lambda values: np.maximum(values, 0),
    "GELU": gelu,
}
