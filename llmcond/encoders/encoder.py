"""A frozen encoder, which maps each text, with its instruction, to a float32 vector."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import (
    EncodeOptions,
    as_list,
    check_encode_options,
    check_truncate_dim,
    convert_embeddings,
    scale_to_unit_norm,
)
from llmcond.base.errors import LlmcondError, UserError, shortened_repr
from llmcond.base.files import digest_bytes
from llmcond.base.options import Precision, check_argument, declaration_of, public_function
from llmcond.base.output import ExtractionBar, log
from llmcond.base.system import computes_natively, cpu_threads
from llmcond.encoders.resolve import ResolvedEncoder, resolve
from llmcond.encoders.settings import EncoderOptions
from llmcond.encoders.spec import (
    ROUTED_POOLINGS,
    TRUNCATION_NOTE,
    Encoded,
    EncoderInput,
    NotFiniteError,
    check_finite,
    plan_inputs,
)
from llmcond.encoders.tokenizing import (
    AnyEngine,
    InputTokenizer,
    OutOfMemoryError,
    Token,
    Tokens,
    check_inputs,
    group_routed_inputs,
    list_routers,
    make_routes,
    n_routes,
    recording_weights,
    strip_router,
)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MAX_THREADS = 8
_worker = threading.local()


class CancelledError(LlmcondError):
    """Raised in a worker thread whose results are no longer needed."""


def check_cancelled() -> None:
    """Raise a ``CancelledError`` if the work of the calling worker thread was cancelled."""
    cancelled: threading.Event | None = getattr(_worker, "cancelled", None)
    if cancelled is not None and cancelled.is_set():
        raise CancelledError("the extraction was stopped.")


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Number of threads that run an encoder, and of cores for each of them.

    Attributes:
        threads: worker threads.
        cores: PyTorch threads of each worker thread.
    """

    threads: int
    cores: int

    @classmethod
    def for_encoder(cls, resolved: ResolvedEncoder) -> Concurrency:
        """Choose the numbers for an encoder."""
        cores = cpu_threads()
        if resolved.runtime == "server":
            return cls(_MAX_THREADS, 1)  # they wait, and store what is answered
        if resolved.device != "cpu" or resolved.runtime == "openvino":
            # One thread prepares and stores what the other computes. More are not needed: a GPU
            # runs one batch at a time, and OpenVINO shares the cores among all batches.
            return cls(min(2, cores) if resolved.device == "cpu" else 2, cores)
        # bitsandbytes stores its current state in the layers, so they are not thread-safe.
        threads = 1 if resolved.identity.quantize != "none" else min(cores, _MAX_THREADS)
        return cls(threads, cores // threads)


class WorkerThreads:
    """A fixed number of threads that share the cores; they start at their first use."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self._executor: ThreadPoolExecutor | None = None
        self._start_lock = threading.Lock()

    def map(
        self, function: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Generator[_Result]:
        """Yield ``function(item)`` for each item, in order.

        Only a few calls run ahead of the results. If a call raises, the calls that have begun are
        finished first. If the caller stops iterating, they are cancelled; see ``check_cancelled``.
        """
        executor = self._get_executor()
        cancelled = threading.Event()

        def work(item: _Item) -> _Result:
            _worker.cancelled = cancelled
            return function(item)

        pending: deque[Future[_Result]] = deque()
        try:
            for item in items:
                pending.append(executor.submit(work, item))
                if len(pending) > self.concurrency.threads:
                    yield _pop_first(pending)
            while pending:
                yield _pop_first(pending)
        except BaseException as error:
            if not isinstance(error, Exception):
                cancelled.set()
            # Cancel all futures before waiting for any: otherwise a free thread would begin the
            # next one meanwhile.
            for future in [future for future in pending if not future.cancel()]:
                future.exception()
            raise

    def close(self) -> None:
        """Stop the threads after their current calls."""
        if self._executor is not None:
            self._executor.shutdown()

    def _get_executor(self) -> ThreadPoolExecutor:
        count = self.concurrency.threads
        with self._start_lock:
            if self._executor is None:
                torch: Any = sys.modules.get("torch")
                if torch is None:  # another library computes, and manages its threads itself
                    self._executor = ThreadPoolExecutor(count, "llmcond-encode")
                    return self._executor
                cores = torch.get_num_threads()
                self._executor = ThreadPoolExecutor(count, "llmcond-encode", self._init_worker)
                # The number that a worker sets also becomes PyTorch's number for threads that
                # start later. Wait until all workers have set theirs, then restore it.
                ready = threading.Barrier(count + 1)
                for _ in range(count):
                    self._executor.submit(ready.wait)
                ready.wait()
                torch.set_num_threads(cores)
            return self._executor

    def _init_worker(self) -> None:
        import torch

        # A thread adopts PyTorch's global number when it first computes, unless it has read it
        # before.
        torch.get_num_threads()
        torch.set_num_threads(self.concurrency.cores)


def _pop_first(pending: deque[Future[_Result]]) -> _Result:
    # Remove the future only after its result has arrived: if an interrupt comes meanwhile, it must
    # still be among the pending ones.
    result = pending[0].result()
    pending.popleft()
    return result


_P = ParamSpec("_P")

#: Inputs that one thread tokenises and encodes at a time: on a CPU, and on a GPU, where batches of
#: fewer short texts would stay far below the token budget.
UNIT, UNIT_ON_GPU = 256, 2_048
#: The most vectors of one work unit whose inputs have several routers each.
_MAX_ROUTED = 4_096
#: Size of a digest of an input's tokens, large enough that different inputs do not collide.
_DIGEST_BYTES = 16


class RouterQuery(NamedTuple):
    """A router in the form in which it weights the tokens of inputs.

    Attributes:
        state: (width,) pooled state, in the space of the token states. For a router inside the
            encoder: its query, or its tokens if they are read together with each input.
        n_tokens: number of tokens before truncation.
    """

    state: NDArray[np.float32] | Tokens
    n_tokens: int


#: Routers, keyed by their texts.
RouterQueries = Mapping[str, RouterQuery]


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The weights of the tokens of an input under its router, from the pass of its vector.

    Attributes:
        tokens: the n tokens that are weighted.
        weights: (m, n) float32 weights: one row for each routed layer of the network, or a single
            row with routed pooling.
        layers: the m numbers of these layers, counted from 1; empty with routed pooling.
        states: with routed pooling, the (n, width) states that it weights; None inside the network.
        vector: (dim,) the input's vector.
    """

    tokens: Sequence[Token]
    weights: NDArray[np.float32]
    layers: Sequence[int]
    states: NDArray[np.float32] | None
    vector: NDArray[np.float32]


_Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


class _Results:
    """Arrays that the results of work units are written into; see ``_UnitResult``."""

    def __init__(self, count: int, dim: int) -> None:
        self.vectors = np.empty((count, dim), dtype=np.float32)
        self.n_tokens = np.empty(count, dtype=np.int32)
        self.cut = np.zeros(count, dtype=np.bool_)


class _UnitResult(NamedTuple):
    """The result of a work unit.

    Attributes:
        vectors: (n, dim) vectors.
        n_tokens: (n,) numbers of tokens.
        cut: (n,) whether the encoder read a part of the input only.
        computed: number of tokens that were computed.
        digests: for each vector, a digest of everything that it is computed from.
    """

    vectors: NDArray[np.float32]
    n_tokens: NDArray[np.int32]
    cut: NDArray[np.bool_]
    computed: int
    digests: list[bytes]


@dataclass(frozen=True)
class _LoadedEncoder:
    """What one process holds of an encoder.

    Attributes:
        tokenizer: the tokenizer.
        engines: the engines; those of an ensemble's members, otherwise one.
        threads: the worker threads, which start at their first use.
        tokenizer_lock: a fast tokenizer is a single Rust object, which raises when two threads
            borrow it.
    """

    tokenizer: InputTokenizer
    engines: Sequence[AnyEngine]
    threads: WorkerThreads
    tokenizer_lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def load(cls, resolved: ResolvedEncoder, concurrency: Concurrency) -> _LoadedEncoder:
        """Load tokenizer and weights; errors are those of ``Encoder``."""
        dtype, device, name = resolved.identity.dtype, resolved.device, resolved.checkpoint.name
        if not computes_natively(dtype, device):  # it was resolved on another machine of a cluster
            raise LlmcondError(
                f"{name} is to be computed in {dtype}, which {device} of this machine would "
                "emulate. Use machines with the same processors, or --dtype float32."
            )
        if resolved.runtime == "server":
            from llmcond.encoders.server import ServerEngine, ServerTokenizer

            tokenizer: Any = ServerTokenizer(resolved.identity, name)
            return cls(
                tokenizer, [ServerEngine(name, resolved.identity)], WorkerThreads(concurrency)
            )
        why = resolved.openvino_obstacle
        if resolved.runtime == "openvino":
            from llmcond.encoders.openvino.engine import load_engines
            from llmcond.encoders.openvino.support import CannotRunError

            try:
                return cls(*load_engines(resolved), WorkerThreads(concurrency))
            except CannotRunError as error:
                why = str(error)
        from llmcond.encoders.torch.engine import load_torch_engines

        # PyTorch reports broken weights, so it loads them even if an error about OpenVINO follows.
        loaded = load_torch_engines(resolved, concurrency.threads)
        if resolved.identity.runtime == "openvino":
            raise LlmcondError(
                f"{name} cannot be run by OpenVINO: {why}. Use PyTorch instead (llmcond extract "
                "--runtime torch)."
            )
        if why:
            log.info(f"{name} runs in PyTorch on this CPU: {why}")
        return cls(*loaded, WorkerThreads(concurrency))


#: The encoders of this process.
_ENCODERS: weakref.WeakSet[Encoder] = weakref.WeakSet()


def _restart_encoders() -> None:
    for encoder in list(_ENCODERS):
        encoder._restart_after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_restart_encoders)


class Encoder:
    """A frozen encoder on one device, as returned by ``load_encoder``.

    Attributes:
        resolved: checkpoint, identity, device and token budget.
        identity: everything that decides the vectors.
        name: name of the encoder in messages.
        dim: size of the vectors.
        concurrency: number of worker threads, and of CPU cores for each of them.

    Examples:
        >>> import llmcond
        >>> encoder = llmcond.load_encoder("minilm", device="cpu")
        >>> vectors = encoder.encode(["A girl plays chess.", "Two men sing."])
        >>> vectors.shape
        (2, 384)
    """

    def __init__(self, resolved: ResolvedEncoder) -> None:
        """Load tokenizer and weights.

        Args:
            resolved: the encoder to load, as returned by ``resolve``.

        Raises:
            UserError: the checkpoint cannot be loaded with stock transformers classes.
            LlmcondError: the weights are broken or do not fit into memory.
        """
        self.resolved, self.identity = resolved, resolved.identity
        self.name = resolved.checkpoint.name
        self.concurrency = Concurrency.for_encoder(resolved)
        self._unit = UNIT if resolved.device == "cpu" else UNIT_ON_GPU
        self._loading = threading.Lock()
        self._loaded: _LoadedEncoder | None = _LoadedEncoder.load(resolved, self.concurrency)
        self.dim = sum(engine.dim for engine in self._state.engines)
        _ENCODERS.add(self)

    @property
    def _state(self) -> _LoadedEncoder:
        """What this process has loaded; a forked process loads it at its first use."""
        if self._loaded is None:
            if self.resolved.device != "cpu":
                raise LlmcondError(
                    f"{self.name} was loaded on {self.resolved.device} before this process was "
                    "forked, and a forked process cannot use a GPU. Start processes with "
                    "multiprocessing.get_context('spawn'), or load the encoder after the fork."
                )
            with self._loading:
                self._loaded = self._loaded or _LoadedEncoder.load(self.resolved, self.concurrency)
        return self._loaded

    @property
    def engine(self) -> AnyEngine:
        """The engine that runs the network; of an ensemble, that of the first member."""
        return self._state.engines[0]

    @property
    def _tokenizer(self) -> InputTokenizer:
        return self._state.tokenizer

    def _restart_after_fork(self) -> None:
        """Forget what does not work in a forked process, which has only the thread that forked."""
        self._loading = threading.Lock()
        if self._loaded is None:
            return
        if self.resolved.runtime == "torch" and self.resolved.device == "cpu":
            loaded, threads = self._loaded, WorkerThreads(self.concurrency)
            self._loaded = _LoadedEncoder(loaded.tokenizer, loaded.engines, threads)
            return
        # Deleting what OpenVINO has created would wait for threads that do not exist.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._loaded))
        self._loaded = None

    def __reduce__(self) -> tuple[type[Encoder], tuple[ResolvedEncoder]]:
        """Pickle only the resolved encoder, so that another process loads the weights itself."""
        return type(self), (self.resolved,)

    @overload
    def encode(
        self,
        inputs: Iterable[EncoderInput | str],
        *,
        normalize: bool = False,
        show_progress: bool = False,
        truncate_dim: int | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool | None = None,
    ) -> NDArray[np.float32]: ...

    @overload
    def encode(
        self, inputs: Iterable[EncoderInput | str], **options: Unpack[EncodeOptions]
    ) -> Any: ...

    def encode(
        self,
        inputs: Iterable[EncoderInput | str],
        *,
        normalize: bool = False,
        show_progress: bool = False,
        truncate_dim: int | None = None,
        precision: Precision = "float32",
        batch_size: int | None = None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool | None = None,
    ) -> Any:
        """Encode texts.

        If an input exceeds ``max_length``, its sentence is cut, and a warning counts such inputs.
        With ``long_texts="windows"`` it is read in windows, whose vectors are averaged.

        Args:
            inputs: n inputs: a list, an iterator, a column of a data frame or an Arrow array. A
                plain string is a text without an instruction.
            normalize: whether to scale vectors to unit L2 norm, also if the encoder does not. If
                the encoder does, truncated vectors are scaled again.
            show_progress: whether to show a progress bar on standard error.
            truncate_dim: number of leading dimensions to keep, for encoders that were trained for
                it (Matryoshka representation learning); None: all.
            precision: ``float32``, ``int8``, ``uint8``, ``binary`` or ``ubinary``; see
                ``llmcond.quantize_embeddings``. The ranges of ``int8`` and ``uint8`` are those of
                these vectors.
            batch_size: largest number of inputs in a forward pass; None: only the number of tokens
                is limited (``max_tokens_per_batch``).
            convert_to_numpy: whether the result is an array. If this and ``convert_to_tensor`` are
                False, it is a list of tensors.
            convert_to_tensor: whether the result is a PyTorch tensor on the CPU.
            show_progress_bar: sentence-transformers' name of ``show_progress``.
            normalize_embeddings: sentence-transformers' name of ``normalize``.

        Returns:
            (n, dim) float32 vectors, in the order of ``inputs``.

        Raises:
            UserError: the inputs are not a list of texts, an option is invalid, an input has an
                instruction, a context or a router that the encoder does not take, or its vector
                contains NaN or infinity.
            LlmcondError: out of memory.
        """
        normalize, show_progress = check_encode_options(
            normalize=normalize,
            show_progress=show_progress,
            precision=precision,
            batch_size=batch_size,
            convert_to_numpy=convert_to_numpy,
            convert_to_tensor=convert_to_tensor,
            show_progress_bar=show_progress_bar,
            normalize_embeddings=normalize_embeddings,
        )
        dim = check_truncate_dim(truncate_dim, self.dim)
        if isinstance(inputs, EncoderInput):
            raise UserError("inputs is a single EncoderInput; expected a list of inputs.")
        items = [
            EncoderInput("", item) if isinstance(item, str) else item
            for item in as_list(inputs, "inputs")
        ]
        map_units = self._state.threads.map if self.concurrency.threads > 1 else map
        with ExtractionBar() if show_progress else nullcontext() as bar:
            encoded = self._encode(items, map_units, bar, unit_size=batch_size)
        check_finite(encoded.vectors, items)
        if encoded.truncated.any():
            warnings.warn(
                f"{int(encoded.truncated.sum())} of {len(items)} inputs are longer than "
                f"{self.identity.limit}; {TRUNCATION_NOTE}.",
                stacklevel=2,
            )
        vectors = encoded.vectors[:, :dim]
        if normalize or (dim < self.dim and self.identity.normalize):
            vectors = scale_to_unit_norm(vectors)
        return convert_embeddings(
            vectors,
            precision,
            convert_to_numpy=convert_to_numpy,
            convert_to_tensor=convert_to_tensor,
        )

    def encode_joined(
        self, rows: Sequence[tuple[str, str, str]], *, show_progress: bool = False
    ) -> NDArray[np.float32]:
        """Encode two sentences and their condition as a single text, as cross-encoders do.

        If a row exceeds ``max_length``, its sentences are cut, and a warning counts such rows.

        Args:
            rows: n tuples of first sentence, second sentence and condition.
            show_progress: whether to show a progress bar on standard error.

        Returns:
            (n, dim) float32 vectors, in the order of ``rows``.

        Raises:
            UserError: a value is not a text, a condition leaves no room for the sentences, or a
                vector contains NaN or infinity.
            LlmcondError: out of memory.
        """
        rows = as_list(rows, "rows")
        for number, row in enumerate(rows):
            if not isinstance(row, tuple | list) or len(row) != 3:
                raise UserError(
                    f"row {number} is {shortened_repr(row)}; expected two texts and a condition."
                )
        for column in zip(*rows, strict=True):
            check_inputs([EncoderInput("", text) for text in column])
        sizes = [sum(map(len, row)) for row in rows]
        order = sorted(range(len(rows)), key=sizes.__getitem__, reverse=True)

        def encode(unit: Sequence[int]) -> _UnitResult:
            with self._state.tokenizer_lock:
                tokens = self._tokenizer.join_rows([rows[index] for index in unit])
            n_tokens = np.array([row.n_tokens for row in tokens], dtype=np.int32)
            results, computed = self._run(tokens)
            keys = [digest_bytes(repr(row.ids).encode(), size=_DIGEST_BYTES) for row in tokens]
            cut = np.array([row.cut for row in tokens])
            return _UnitResult(np.concatenate(results), n_tokens, cut, computed, keys)

        into = _Results(len(rows), self.dim)
        units = _split_chunks(order, self._unit)
        map_units = self._state.threads.map if self.concurrency.threads > 1 else map
        with ExtractionBar() if show_progress else nullcontext() as bar:
            if bar is not None:
                bar.start(len(rows), sum(sizes))
            self._encode_units(units, encode, into, map_units, sizes, bar)
        check_finite(into.vectors, rows)
        if n_cut := int(into.cut.sum()):
            warnings.warn(
                f"{n_cut} of {len(rows)} rows are longer than {self.identity.limit}; their "
                "sentences were cut, their conditions were not.",
                stacklevel=2,
            )
        return into.vectors

    def encode_with_counts(
        self,
        inputs: Sequence[EncoderInput],
        queries: RouterQueries | None = None,
        *,
        threads: bool = False,
    ) -> Encoded:
        """Encode inputs, and count the tokens of each.

        The result depends on the arguments only: unless memory runs out, nothing else influences
        how inputs are batched. Several threads may call this method at once.

        Args:
            inputs: n inputs.
            queries: the routers of the inputs, and any others, as returned by ``queries``. A plain
                input that is among them is not encoded again. None: compute them.
            threads: encode on the encoder's worker threads. By default, everything runs on the
                calling thread. The vectors are the same.

        Returns:
            Vectors with the token count and the truncation of each input.

        Raises:
            UserError: an input has an instruction, a context or a router that the encoder does not
                take.
            NotFiniteError: a vector contains NaN or infinity. The error has all vectors.
            LlmcondError: out of memory.
        """
        inputs = as_list(inputs, "inputs")
        concurrent = threads and self.concurrency.threads > 1
        encoded = self._encode(
            inputs, self._state.threads.map if concurrent else map, queries=queries
        )
        try:
            check_finite(encoded.vectors, inputs)
        except NotFiniteError as error:
            error.encoded = encoded  # so that the other vectors are not lost
            raise
        return encoded

    def token_weights(self, item: EncoderInput) -> TokenWeights:
        """Encode an input, and return the weights with which its router weighted the tokens.

        Args:
            item: an input with a router.

        Returns:
            The weights, in the order of the tokens.

        Raises:
            UserError: the input has no router, is read in several windows, or its vector is not
                finite, or as ``encode_with_counts``.
            LlmcondError: out of memory.
        """
        check_inputs([item])
        if item.router is None:
            raise UserError("the input has no router, so its tokens have no weights.")
        (windows,) = self._tokenize([item])
        if len(windows) > 1:
            raise UserError(
                f"the text has {windows[0].n_tokens} tokens, more than the "
                f"{self.identity.max_length} that {self.name} reads at a time, and the vectors of "
                "its windows are averaged. Shorten the text."
            )
        with recording_weights() as recording:
            encoded = self.encode_with_counts([item])
        if encoded.truncated.any():
            warnings.warn(
                f"the text is longer than the {self.identity.max_length} tokens that {self.name} "
                "accepts; its end has no weights.",
                stacklevel=2,
            )
        row, weights = recording.row or windows[0], recording.weights
        tokens, layers = self._describe(item, row), list[int]()
        if recording.states is not None:
            tokens = tokens[row.first : row.last]
        else:
            # A router inside the network needs PyTorch, so it has been imported.
            from llmcond.encoders.torch.engine import torch_engine

            passes: Any = torch_engine(self).passes
            layers = [passes.first_layer + number for number in range(1, len(weights) + 1)]
        # Behind the tokens, there may be padding.
        matrix = np.stack(weights)[:, : len(tokens)]
        if self.engine.reads_routers:
            # Nor are there weights of a condition that follows the sentence.
            matrix = matrix[:, : np.flatnonzero(matrix.sum(axis=0))[-1] + 1]
        tokens = tokens[: matrix.shape[1]]
        return TokenWeights(tokens, matrix, layers, recording.states, encoded.vectors[0])

    def tokenize(self, text: str) -> list[Token]:
        """Tokenise a text.

        Args:
            text: a text without an instruction.

        Returns:
            The tokens that the encoder reads, special tokens included.
        """
        item = EncoderInput("", text)
        check_inputs([item])
        return self._describe(item, self._tokenize([item])[0][0])

    def _describe(self, item: EncoderInput, row: Tokens) -> list[Token]:
        with self._state.tokenizer_lock:
            return self._tokenizer.describe(item, row)

    def queries(
        self, texts: Iterable[str], map_units: _Map = map, unit_size: int | None = None
    ) -> RouterQueries:
        """Compute the queries of routers, each distinct text once.

        Args:
            texts: texts of routers; repeats are allowed.
            map_units: applies a function to each work unit, in order. The default runs on the
                calling thread.
            unit_size: number of texts of a work unit; None: as many as ``encode`` takes.

        Returns:
            The query of each distinct text, keyed by the text.

        Raises:
            UserError: the encoder's pooling leaves the space of the token states.
            LlmcondError: out of memory.
        """
        plain = [EncoderInput("", text) for text in as_list(texts, "texts")]
        check_inputs(plain)
        plain = sorted(set(plain), key=lambda item: item.text)
        routable = self.engine.routes_inside or self.identity.pooling in ROUTED_POOLINGS
        if plain and not routable:
            raise UserError(
                f"{self.name} uses the pooling {self.identity.pooling}, but routers and scores of "
                "mentions weight the states of tokens. Use another model, or encode with llmcond "
                f"extract --pooling {' or '.join(ROUTED_POOLINGS)}."
            )
        ordered = [plain[index] for index in plan_inputs(plain, by_prefix=False)]
        units = _split_chunks(ordered, unit_size or self._unit)
        computed = (query for unit in map_units(self._compute_queries, units) for query in unit)
        return {item.text: query for item, query in zip(ordered, computed, strict=True)}

    def _encode(
        self,
        inputs: Sequence[EncoderInput],
        map_units: _Map,
        bar: ExtractionBar | None = None,
        queries: RouterQueries | None = None,
        unit_size: int | None = None,
    ) -> Encoded:
        check_inputs(inputs)
        sizes = [item.size for item in inputs]
        if bar is not None:
            bar.start(len(inputs), sum(sizes))
        if queries is None:
            texts = (router.text for router in list_routers(inputs))
            queries = self.queries(texts, map_units, unit_size)
        order = plan_inputs(inputs, by_prefix=self.resolved.shares_prefixes)
        into = _Results(len(inputs), self.dim)
        router_indices = [row for row in order if self._is_query(inputs[row], queries)]
        if router_indices:
            known_queries = [queries[inputs[row].text] for row in router_indices]
            states: list[Any] = [query.state for query in known_queries]
            into.vectors[router_indices] = self.engine.finish_states(np.stack(states))
            into.n_tokens[router_indices] = [query.n_tokens for query in known_queries]
            if bar is not None:
                bar.advance(len(router_indices), sum(sizes[row] for row in router_indices), 0, 0.0)
        encoded = set(router_indices)
        remaining = [row for row in order if row not in encoded]
        units = list(_group_units(remaining, inputs, unit_size or self._unit))
        work = partial(self._encode_unit, inputs, queries)
        computed = self._encode_units(units, work, into, map_units, sizes, bar)
        return Encoded(into.vectors, into.n_tokens, into.cut, computed)

    def _encode_units(
        self,
        units: Sequence[list[int]],
        work: Callable[[list[int]], _UnitResult],
        into: _Results,
        map_units: _Map,
        sizes: Sequence[int],
        bar: ExtractionBar | None,
    ) -> int:
        """Write the results of units into arrays, and advance the progress bar.

        Returns:
            The number of tokens that were computed.
        """
        map_units = map_units if len(units) > 1 else map
        n_threads = 1 if map_units is map else self.concurrency.threads
        first_index: dict[bytes, int] = {}
        total = 0

        def timed(unit: list[int]) -> tuple[_UnitResult, float]:
            began = time.monotonic()
            return work(unit), time.monotonic() - began

        for unit, (result, seconds) in zip(units, map_units(timed, units), strict=True):
            into.vectors[unit], into.n_tokens[unit] = result.vectors, result.n_tokens
            into.cut[unit] = result.cut
            # Rounding depends on the batch, so equal inputs in two batches would get slightly
            # different vectors. Subtracting one from the other would leave nothing but that noise.
            sources = [
                first_index.setdefault(key, index)
                for key, index in zip(result.digests, unit, strict=True)
            ]
            if sources != unit:
                into.vectors[unit] = into.vectors[sources]
            total += result.computed
            if bar is not None:
                size = sum(sizes[index] for index in unit)
                bar.advance(len(unit), size, int(result.n_tokens.sum()), seconds / n_threads)
        return total

    def _encode_unit(
        self, every: Sequence[EncoderInput], queries: RouterQueries, unit: Sequence[int]
    ) -> _UnitResult:
        """Encode the inputs of one work unit, given by their positions in ``every``."""
        inputs = [every[index] for index in unit]
        # Either all inputs of a unit have a router, or none has.
        groups = group_routed_inputs(inputs) or [[position] for position in range(len(inputs))]
        windows = self._tokenize([inputs[group[0]] for group in groups])
        rows: list[Tokens] = []
        routes: list[Any] = []
        for group, item_windows in zip(groups, windows, strict=True):
            routers = list_routers([inputs[position] for position in group])
            router_states: Any = [queries[router.text].state for router in routers]
            if routers and not self.engine.routes_inside:
                router_states = np.stack(router_states)
            for window in item_windows:
                new_routes = make_routes(self.engine, router_states, routers[0]) if routers else []
                routes += new_routes
                rows += [window] * (len(new_routes) or 1)
        results, computed = self._run(rows, routes)
        into = _Results(len(inputs), self.dim)
        digests = [b""] * len(inputs)
        row_vectors = iter(np.concatenate(results))
        for group, item_windows in zip(groups, windows, strict=True):
            token_ids = [(row.ids, row.first, row.last, row.second) for row in item_windows]
            for position in group:
                computed_from = repr((token_ids, inputs[position].router)).encode()
                digests[position] = digest_bytes(computed_from, size=_DIGEST_BYTES)
            by_window = [[next(row_vectors) for _ in group] for _ in item_windows]
            into.vectors[group] = self._average_windows([np.stack(part) for part in by_window])
            into.n_tokens[group] = item_windows[0].n_tokens
            into.cut[group] = item_windows[0].cut and self.identity.long_texts == "cut"
        return _UnitResult(into.vectors, into.n_tokens, into.cut, computed, digests)

    def _compute_queries(self, inputs: Sequence[EncoderInput]) -> list[RouterQuery]:
        """Compute the queries of plain inputs, each the mean over the windows of its text."""
        windows = self._tokenize(inputs)
        if self.engine.reads_routers:
            return [
                RouterQuery(item_windows[0], item_windows[0].n_tokens) for item_windows in windows
            ]
        rows = iter(
            self._run([row for item_windows in windows for row in item_windows], queries=True)[0]
        )
        return [
            RouterQuery(
                np.mean([next(rows) for _ in item_windows], axis=0)[0], item_windows[0].n_tokens
            )
            for item_windows in windows
        ]

    def _is_query(self, item: EncoderInput, queries: RouterQueries) -> bool:
        """Return whether an untruncated router with this text is known, pooled like the input."""
        if item.router is not None or item.context is not None or item.instruction:
            return False
        query = None if self.engine.routes_inside else queries.get(item.text)
        return query is not None and query.n_tokens <= self.identity.max_length

    def _tokenize(self, inputs: Sequence[EncoderInput]) -> list[list[Tokens]]:
        with self._state.tokenizer_lock:
            return self._tokenizer.windows(inputs)

    def _run(
        self, rows: Sequence[Tokens], routes: Sequence[Any] = (), *, queries: bool = False
    ) -> tuple[list[NDArray[np.float32]], int]:
        """Run the engines, and count the computed tokens.

        Each row gives (1, dim), or (routes, dim) with routers. The vectors of an ensemble are
        those of its N members, concatenated and divided by sqrt(N). The members' vectors have unit
        norm, so the result has too, and its cosine is the mean of the members' cosines.
        """
        if len(self._state.engines) > 1 and (routes or queries):
            raise UserError(
                f"{self.name} is an ensemble, and ensembles do not support routers. Use another "
                "prompt or encoder."
            )
        results = [
            self._run_engine(engine, rows, routes, queries) for engine in self._state.engines
        ]
        if len(results) == 1:
            return results[0]
        parts = zip(*(vectors for vectors, _ in results), strict=True)
        scale = np.float32(1 / np.sqrt(len(results)))
        return [np.hstack(member_vectors) * scale for member_vectors in parts], sum(
            computed for _, computed in results
        )

    def _run_engine(
        self, engine: AnyEngine, rows: Sequence[Tokens], routes: Sequence[Any], queries: bool
    ) -> tuple[list[NDArray[np.float32]], int]:
        vectors_of: list[Any] = [None] * len(rows)
        computed = 0
        try:
            for batch in engine.run(rows, check_cancelled, routes, queries=queries):
                counts = [n_routes(routes[row]) if routes else 1 for row in batch.inputs]
                parts = np.split(batch.vectors, np.cumsum(counts)[:-1])
                for row, vectors in zip(batch.inputs, parts, strict=True):
                    vectors_of[row] = vectors
                computed += batch.n_computed
        except OutOfMemoryError as error:
            raise LlmcondError(
                f"{self.name} {error} Reduce max_length (llmcond extract --max-length), or see "
                f"what fits: llmcond models --check {self.name}"
            ) from error
        return vectors_of, computed

    def _average_windows(self, windows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Average vectors over windows, and normalise them if the encoder does."""
        if len(windows) == 1:
            return windows[0]
        means: NDArray[np.float32] = np.mean(windows, axis=0, dtype=np.float32)
        if self.identity.normalize:
            means /= np.linalg.norm(means, axis=1, keepdims=True)
        return means

    def format(self, item: EncoderInput) -> str:
        """Format an input as the tokenizer reads it, with the model's instruction format.

        Args:
            item: the input.

        Returns:
            The string that is tokenised, without special tokens.

        Raises:
            UserError: the input has an instruction, but the encoder takes none.
        """
        check_inputs([item])
        return self._tokenizer.format(item)


def _split_chunks(items: list[_Item], size: int) -> list[list[_Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _group_units(
    order: Sequence[int], inputs: Sequence[EncoderInput], size: int
) -> Iterator[list[int]]:
    """Yield the positions of inputs that are encoded together, those with a router separately.

    A unit has ``size`` inputs that go through the network, with up to ``_MAX_ROUTED`` routers.
    """
    plain = [index for index in order if inputs[index].router is None]
    yield from _split_chunks(plain, size)
    unit: list[int] = []
    bases: set[object] = set()
    for index in order:
        if inputs[index].router is None:
            continue
        base = strip_router(inputs[index])
        if (base not in bases and len(bases) == size) or len(unit) == _MAX_ROUTED:
            yield unit
            unit, bases = [], set()
        unit.append(index)
        bases.add(base)
    if unit:
        yield unit


def _make_loader(
    options: Callable[_P, EncoderOptions],
) -> Callable[Concatenate[str | os.PathLike[str], _P], Encoder]:
    """Build ``load_encoder``, whose keyword arguments are the fields of ``EncoderOptions``."""

    def load_encoder(model: str | os.PathLike[str], *args: _P.args, **kwargs: _P.kwargs) -> Encoder:
        check_argument("model", model, (str, os.PathLike), "a name or a folder")
        return Encoder(resolve(os.fspath(model), options(*args, **kwargs)))

    descriptions = [
        f"    {field.name}: {declared.help}"
        for field in fields(EncoderOptions)
        if (declared := declaration_of(field)) is not None
    ]
    signature = inspect.signature(options)
    model = inspect.Parameter(
        "model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str | os.PathLike[str]"
    )
    return public_function(  # type: ignore[return-value]  # model may also be passed by keyword
        load_encoder,
        "load_encoder",
        __name__,
        _LOADER_DOC.format(options="\n".join(descriptions)),
        signature.replace(
            parameters=[model, *signature.parameters.values()], return_annotation=Encoder
        ),
    )


_LOADER_DOC = """Load an encoder by alias (``minilm``), hub name or folder.

Args:
    model: alias, ``OWNER/NAME`` on the Hugging Face hub, folder of a checkpoint, or address of a
        server.
{options}

Returns:
    The encoder, on the chosen device.

Raises:
    UserError: the model is unknown, or does not support an option on this machine.
    LlmcondError: the hub cannot be reached, or the weights are broken or too large.

Examples:
    >>> import llmcond
    >>> encoder = llmcond.load_encoder("minilm", device="cpu", max_length=64)
    >>> encoder.dim
    384
    >>> encoder.encode(["A girl plays chess."]).shape
    (1, 384)
"""

load_encoder = _make_loader(EncoderOptions)
