"""Batch inputs, run a network by OpenVINO, and pool the states of their tokens with numpy.

The states of tokens do not depend on what an input is in a batch with, nor on the number of
threads: each row of OpenVINO's products is computed alike, however many rows there are, and
:func:`pack_inputs` has the lengths of attention chosen so that the same holds for it.
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
from llmcond.encoders.engine.interface import OutOfMemoryError, Pooled, Routes, check_ids
from llmcond.encoders.engine.tokenizing import InputTokenizer, Tokens
from llmcond.encoders.openvino.architectures import bytes_needed
from llmcond.encoders.openvino.graph import STEP, PackedInputs, Tensors, make_graph, pack_inputs
from llmcond.encoders.openvino.library import import_openvino
from llmcond.encoders.openvino.tokenizer import JsonTokenizer, can_read
from llmcond.encoders.openvino.weights import CannotRunError, read_dense, read_tensors
from llmcond.encoders.poolings import pooling_named
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.files import gib
from llmcond.system import cpu_threads, free_memory

Vectors = NDArray[np.float32]
#: What OpenVINO calls the types that products are computed in.
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
#: Tokens of a batch: measured fastest for MiniLM, whose activations then fit into a core's cache.
_BUDGET = 1_536
#: A batch of fewer is not split for the sake of another stream.
_LEAST = 128
_MAX_STREAMS = 8


def load_engines(resolved: ResolvedEncoder) -> tuple[InputTokenizer, list[OpenVinoEngine]]:
    """Load an encoder's tokenizer and its engines, one for each member of an ensemble.

    Raises:
        UserError: a tokenizer that lacks a token which the model needs, or cannot be read.
        LlmcondError: the hub cannot be reached.
        CannotRunError: as :class:`OpenVinoEngine`.
    """
    checkpoint = resolved.checkpoint
    config = read_settings(checkpoint.folder / "config.json", {})
    pooling = pooling_named(resolved.identity.pooling)
    needed = bytes_needed(config, pooler=pooling.part == "pooler")
    if needed > free_memory():
        raise CannotRunError(f"it needs {gib(needed)} of memory")
    fetch_weights(checkpoint)
    if can_read(checkpoint.folder):
        tokenizer: Any = JsonTokenizer(checkpoint.folder, checkpoint.name)
    else:  # by transformers, which takes seconds to import
        from llmcond.encoders.loading.architecture import load_config, load_tokenizer

        tokenizer = load_tokenizer(checkpoint, load_config(checkpoint, resolved.identity.attention))
    inputs = InputTokenizer(tokenizer, resolved.identity, checkpoint.name)
    return inputs, [OpenVinoEngine(member) for member in resolved.each_member()]


def compile_network(
    tensors: Tensors, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> Any:
    """Return an ``openvino.CompiledModel`` that computes the states of tokens on the CPU."""
    graph = make_graph(tensors, config)
    return import_openvino().Core().compile_model(graph, "CPU", settings)


class OpenVinoEngine:
    """A network on a CPU by OpenVINO.

    The cores are shared among streams, each of which computes one batch at a time.

    Attributes:
        dim: size of its vectors.
        budget: the most tokens that one batch has.
        streams: how many batches are computed at a time.
    """

    inside = reads_routers = False

    def __init__(self, resolved: ResolvedEncoder) -> None:
        """Read a checkpoint's weights and compile its network.

        Raises:
            CannotRunError: OpenVINO does not run it; PyTorch may, or says what is wrong.
        """
        self._identity, self._name = resolved.identity, resolved.checkpoint.name
        config = read_settings(resolved.checkpoint.folder / "config.json", {})
        self._pooling = pooling_named(self._identity.pooling)
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
            # Several processes on one machine would pin their threads to the same cores.
            "ENABLE_CPU_PINNING": False,
            # What is prepared for a shape is kept, and batches have ever new ones. OpenVINO's own
            # limit, 5,000, takes a gigabyte; this one is as fast.
            "CPU_RUNTIME_CACHE_CAPACITY": 128,
            "NUM_STREAMS": self.streams,
            "INFERENCE_NUM_THREADS": cores,
        }
        self._threads = threading.local()
        self.budget = resolved.options.max_tokens_per_batch or _BUDGET
        self.dim = len(self._dense[-1].weight) if self._dense else width
        try:
            self._network = compile_network(tensors, config, settings)
            # On CPUs without AVX it compiles, and fails when it is first run.
            list(self.run([Tokens([0, 0], 0, 2, 2, 2)]))
        except (RuntimeError, TypeError, ValueError) as error:
            # Before the last line of its message OpenVINO names places in its code.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise CannotRunError(f"OpenVINO cannot run it: {reason}") from error

    def run(
        self,
        rows: Sequence[Tokens],
        before_batch: Callable[[], None] = lambda: None,
        routes: Sequence[Routes] = (),
        *,
        queries: bool = False,
    ) -> Iterator[Pooled]:
        """Yield the vectors of inputs, batch by batch; see :class:`AnyEngine`."""
        check_ids(rows, self._n_ids, self._name)
        lengths = [len(row.ids) for row in rows]
        waiting = deque(plan_packed(lengths, self.budget, self.streams))
        idle, begun = self._idle_requests(), deque[_Begun]()
        try:
            while waiting or begun:
                if waiting and idle:
                    before_batch()
                    batch = waiting.popleft()
                    inputs = pack_inputs([rows[index] for index in batch], self._config)
                    begun.append(_Begun(batch, inputs, idle.pop()))
                    begun[-1].request.start_async(inputs.given, share_inputs=True)
                    continue
                done = begun.popleft()
                try:
                    states = done.finish()
                except (MemoryError, RuntimeError) as error:
                    waiting.extendleft(_halves(done.batch, lengths, error))
                    continue
                finally:
                    idle.append(done.request)
                own = [routes[index] for index in done.batch] if routes else []
                pooled = self._pooled(states, [rows[index] for index in done.batch], own)
                vectors = pooled if queries else self.finish_states(pooled)
                yield Pooled(done.batch, vectors, len(states))
        finally:
            for left in begun:
                with suppress(RuntimeError):  # the first error is the one that is raised
                    left.request.wait()

    def finish_states(self, states: Vectors) -> Vectors:
        """Return vectors as inputs have them, (n, dim), of what left the pooling, (n, width)."""
        for layer in self._dense:
            states = states @ layer.weight.T
            if layer.bias is not None:
                states = states + layer.bias
            states = _ACTIVATIONS[layer.activation](states)
        return _unit(states) if self._identity.normalize else states

    def _idle_requests(self) -> list[Any]:
        """Return requests of the calling thread, one for each stream."""
        if not hasattr(self._threads, "requests"):
            requests = [self._network.create_infer_request() for _ in range(self.streams)]
            self._threads.requests = requests
        return list(self._threads.requests)

    def _pooled(self, states: Vectors, rows: Sequence[Tokens], routes: Sequence[Routes]) -> Vectors:
        """Return one vector of each input, or one of each of its routes, (vectors, width)."""
        starts = np.cumsum([0, *(len(row.ids) for row in rows[:-1])])
        spans = zip(starts, rows, strict=True)
        counted = (states[start + row.first : start + row.last] for start, row in spans)
        if routes:
            return _routed(counted, routes)
        if self._pooling.takes == "mean":
            return np.stack([tokens.mean(axis=0) for tokens in counted])
        last = self._pooling.takes == "last"
        pooled: Vectors = states[starts + [row.last - 1 if last else 0 for row in rows]]
        if not self._pooler:
            return pooled
        weight, bias = self._pooler
        return _ACTIVATIONS["Tanh"](pooled @ weight.T + bias)


class _Begun(NamedTuple):
    """A batch that a stream computes, with its inputs, which are not copied."""

    batch: list[int]
    inputs: PackedInputs
    request: Any

    def finish(self) -> Vectors:
        """Wait for the states of its tokens, (n, width), which the next batch replaces."""
        self.request.wait()
        states: Vectors = self.request.get_output_tensor().data
        return states


def plan_packed(lengths: Sequence[int], max_tokens: int, streams: int) -> list[list[int]]:
    """Group inputs of like length into batches of about ``max_tokens`` tokens at most.

    All streams have about as much to do, unless there is little. Where an input is less than half
    as long as the longest of a batch, another one begins, as attention fills it up to that.

    Returns:
        Positions in ``lengths``, longest first; every position once. An input that is longer by
        itself has a batch of its own.
    """
    total = sum(lengths)
    count = -(-total // max_tokens)
    count = min(-(-count // streams) * streams, max(count, total // _LEAST))
    most, batches = -(-total // max(1, count)), list[list[int]]()
    used = 0
    for index in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        length = lengths[index]
        # Up to half of an input more than there should be, so that no small rest is left.
        full = used + length // 2 > most or used + length > max_tokens
        if not batches or full or 2 * length < lengths[batches[-1][0]] - STEP:
            batches.append([])
            used = 0
        batches[-1].append(index)
        used += length
    return batches


def _halves(batch: list[int], lengths: Sequence[int], error: Exception) -> list[list[int]]:
    """Return both halves of a batch that memory was too short for, the first one last.

    Raises:
        OutOfMemoryError: it is a single input.
        Exception: the ``error``, which says something else.
    """
    signs = ("allocate", "bad_alloc", "out of memory")
    if not isinstance(error, MemoryError) and not any(sign in str(error).lower() for sign in signs):
        raise error
    if len(batch) == 1:
        raise OutOfMemoryError(
            f"ran out of memory with a single input of {lengths[batch[0]]} tokens."
        ) from error
    half = len(batch) // 2
    return [batch[half:], batch[:half]]


def _routed(counted: Iterable[Vectors], routes: Sequence[Routes]) -> Vectors:
    """Return the vectors of inputs under each of their routers, one behind the other.

    Of each input, ``counted`` has the states of the tokens that are pooled, (tokens, width). The
    formula is that of :class:`llmcond.encoders.spec.Router`.
    """
    found = []
    for own, route in zip(counted, routes, strict=True):
        router = route.router
        centred = own - own.mean(axis=0) if router.centre else own
        near = _unit(route.queries) @ _unit(centred).T
        if router.standardize:
            near = near / np.sqrt(near.var(axis=1, keepdims=True) + 1e-12)
        near = near / router.temperature
        weights = np.exp(near - near.max(axis=1, keepdims=True))
        found.append(weights / weights.sum(axis=1, keepdims=True) @ own)
    return np.concatenate(found)


def _unit(vectors: Vectors) -> Vectors:
    """Return vectors of length 1; those of length 0 stay so."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Vectors = vectors / np.maximum(norms, 1e-12)
    return unit


#: By their names in torch.nn.
_ACTIVATIONS: dict[str, Callable[[Vectors], Vectors]] = {
    "Identity": lambda values: values,
    "Tanh": np.tanh,
    "ReLU": lambda values: np.maximum(values, 0),
    "GELU": gelu,
}
