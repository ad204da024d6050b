"""The PyTorch engine: batches inputs, runs the network, and pools token vectors.

If a batch runs out of memory, the engine tries again with half the token budget. It packs several
inputs into one row without padding if that gives the same vectors as computing each input alone,
which it tries out when it is created.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.base.errors import LlmcondError, first_line
from llmcond.base.system import move_to_device
from llmcond.encoders.loading import (
    TORCH_DTYPES,
    LoadedModel,
    check_direction,
    copy_to_cpu,
    default_token_budget,
    load_config,
    load_model,
    load_tokenizer,
    token_embeddings,
    tokens_that_fit,
)
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput, get_pooling
from llmcond.encoders.tokenizing import (
    BatchVectors,
    InputTokenizer,
    OutOfMemoryError,
    Tokens,
    check_token_ids,
    group_routed_inputs,
    list_routers,
    make_routes,
    n_routes,
    router_inputs,
)
from llmcond.encoders.torch import attention
from llmcond.encoders.torch.batching import STEP, pack, pack_shared, plan_batches
from llmcond.encoders.torch.csr import CsrPasses
from llmcond.encoders.torch.forward import (
    Forward,
    ForwardSettings,
    PackedForward,
    PaddedForward,
    Passes,
    find_pooling,
    skipped_id,
)

_log = logging.getLogger(__name__)

#: Largest difference between the token vectors of packed and of padded inputs, as a share of their
#: norms: the root mean square over the tokens of an input.
#: Rounding stays well below it; texts that see each other, or wrong positions, go well above it.
_PACKING_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}


class Engine:
    """A loaded PyTorch network that is run in batches.

    Attributes:
        model: The network and its dense layers.
        identity: The settings that decide the encoder's vectors.
        dim: Size of the vectors.
        shares_prefixes: Whether inputs share the computation of common prefixes.
        budget: Most tokens of one batch. It is halved when memory runs out, and never raised again.
        packs: Whether inputs are packed; False if the architecture does not support it.
        device: Where token ids are put.
        output_device: Where vectors are returned.
        batches_ahead: Number of batches that are started before the engine waits for the vectors of
            the first. A GPU computes a batch while the previous one's vectors are copied back and
            the next one is prepared.
        passes: Creates the forward passes of batches.
        routes_inside: See ``Passes``.
        reads_routers: See ``Passes``.
    """

    def __init__(
        self,
        model: LoadedModel,
        resolved: ResolvedEncoder,
        pad_id: int,
        concurrency: int = 1,
        *,
        frozen: bool = True,
    ) -> None:
        """Find the fastest way to compute the right vectors.

        Args:
            model: The loaded network.
            resolved: The encoder's settings.
            pad_id: Token id for padding.
            concurrency: Number of threads that run the engine at a time.
            frozen: False if the network is going to be trained.
        """
        self.model, self.identity, self.dim = model, resolved.identity, model.dim
        self.shares_prefixes = resolved.shares_prefixes
        config = model.network.config
        # A GPU gets one batch at a time, however many threads there are.
        count = concurrency if resolved.device == "cpu" else 1
        self.budget = resolved.options.max_tokens_per_batch or min(
            default_token_budget(resolved.device),
            tokens_that_fit(config, self.identity.dtype, resolved.device, count),
        )
        table = token_embeddings(model.network)
        self.device, self._n_ids, self._name = table.device, len(table), resolved.checkpoint.name
        self.output_device = torch.device(resolved.device)
        self.batches_ahead = 1 if self.output_device.type == "cuda" else 0
        self._runtime = ForwardSettings(
            network=model.network,
            pooling=get_pooling(self.identity.pooling),
            pool=find_pooling(self.identity.pooling),
            attention=self.identity.attention,
            # A token that was added for padding often has no embedding. Padding is masked, so any
            # other id will do.
            pad_id=pad_id if pad_id < self._n_ids else 0,
            device=self.device,
            dtype=TORCH_DTYPES[self.identity.dtype],
            max_length=self.identity.max_length,
            skipped_id=skipped_id(model.network),
            typed=(getattr(config, "type_vocab_size", None) or 0) > 1,
            on_several_devices=len(set(getattr(model.network, "hf_device_map", {}).values())) > 1,
        )
        self._longest = _max_packed_length(config)
        # Only one thread at a time queues work on a GPU, because the activations of two batches
        # would need twice the memory.
        self._device_lock = nullcontext() if self.output_device.type == "cpu" else threading.Lock()
        self._can_pack = getattr(config, "_attn_implementation", None) == "sdpa" and bool(
            getattr(model.network, "_supports_attention_backend", False)
        )
        self._tolerance = (
            0.2 if self.identity.quantize == "8bit" else _PACKING_TOLERANCE[self.identity.dtype]
        )
        passes = CsrPasses if self.identity.routes_inside else Passes
        self.passes = passes(model.network, self.identity, self._name)
        self.routes_inside = self.passes.routes_inside
        self.reads_routers = self.passes.reads_routers
        self.packs = self._choose_packing()
        # The length above which only inputs of equal lengths can share a batch.
        self._longest_mixed = _longest_mixed(config) if self.packs or self._can_pad() else 0
        # oneDNN prepares 16-bit products for each number of rows, so the lengths of packed rows are
        # rounded up. In training, a float32 network may compute in 16 bit as well (autocast).
        in_16_bit = self.identity.dtype != "float32" or not frozen
        if self.packs and in_16_bit and self.output_device.type == "cpu":
            self._runtime = replace(self._runtime, step=STEP)

    # -- batches -------------------------------------------------------------------------------

    def run(
        self,
        rows: Sequence[Tokens],
        before_batch: Callable[[], None] = lambda: None,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Iterator[BatchVectors]:
        """Yield the vectors of inputs, batch by batch; arguments are as in ``AnyEngine.run``.

        A batch that runs out of memory is computed again in halves, and all batches after it are
        as small.
        """
        check_token_ids(rows, self._n_ids, self._name)
        waiting = list(range(len(rows)))
        while waiting:
            budget, done = self.budget, set()
            planned = self._plan_batches(rows, waiting, budget, routes=routes, queries=queries)
            pending: deque[Callable[[], BatchVectors]] = deque()
            too_large: tuple[int, Sequence[int]] | None = None
            for inputs, forward in planned:
                before_batch()
                finish = self._start_batch(inputs, forward, queries=queries)
                if finish is None:
                    too_large = forward.n_tokens, inputs
                    break
                pending.append(finish)
                done.update(inputs)
                if len(pending) > self.batches_ahead:
                    yield pending.popleft()()
            yield from (finish() for finish in pending)
            if too_large is not None:
                self._shrink_budget(budget, too_large[0], [rows[i] for i in too_large[1]])
            waiting = [index for index in waiting if index not in done]

    def embed(
        self,
        rows: Sequence[Tokens],
        *,
        routes: Sequence[Any] = (),
        queries: bool = False,
    ) -> Tensor:
        """Return the vectors of inputs with their gradients, (n, dim) in float32.

        The batches are those of ``run``, but the activations of all of them are kept until the
        backward pass, so memory grows with the number of inputs.

        Args:
            rows: The inputs' tokens.
            routes: As in ``run``. A routed input has one vector per route, in the order of routes.
            queries: As in ``run``.

        Raises:
            UserError: If the network has no embedding of a token.
            OutOfMemoryError: If the inputs do not fit into memory.
        """
        check_token_ids(rows, self._n_ids, self._name)
        counts = [n_routes(route) for route in routes] or [1] * len(rows)
        starts = [0, *accumulate(counts)]
        order: list[int] = []
        parts: list[Tensor] = []
        indices = range(len(rows))
        planned = self._plan_batches(rows, indices, self.budget, routes=routes, queries=queries)
        try:
            for inputs, forward in planned:
                forward.prepare()
                parts.append(self._compute_vectors(forward, queries=queries))
                order += [position for i in inputs for position in range(starts[i], starts[i + 1])]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"ran out of memory on {self.output_device} with "
                f"{sum(len(row.ids) for row in rows):,} tokens in one step."
            ) from error
        # Indexing with [] would add up gradients in any order on several threads.
        return torch.cat(parts).index_select(
            0, move_to_device(torch.tensor(order).argsort(), self.output_device)
        )

    def _plan_batches(
        self,
        rows: Sequence[Tokens],
        waiting: Sequence[int],
        budget: int,
        *,
        routes: Sequence[Any] = (),
        queries: bool = False,
    ) -> Iterator[tuple[list[int], Forward]]:
        """Yield the positions of the inputs and the forward pass of each batch, padded ones first.

        ``waiting`` has the positions of the inputs that are to be computed.
        """
        forward = partial(self.passes.forward, self._runtime, queries=queries)
        packs = self.packs and not (routes and self.reads_routers)
        longest = min(self._longest, self._longest_mixed)
        unpacked = [i for i in waiting if not packs or len(rows[i].ids) > longest]
        by_length: dict[int, list[int]] = {}
        for i in unpacked:
            n_tokens = len(rows[i].ids)
            by_length.setdefault(n_tokens if n_tokens > self._longest_mixed else 0, []).append(i)
        for group in by_length.values():
            for batch in plan_batches([len(rows[i].ids) for i in group], budget):
                inputs = [group[index] for index in batch]
                batch_routes = [routes[i] for i in inputs] if routes else []
                yield inputs, forward([rows[i] for i in inputs], routes=batch_routes)
        rest = sorted(set(waiting) - set(unpacked))
        rest_rows = [rows[i] for i in rest]
        batch_routes = [routes[i] for i in rest] if routes else []
        # A routed input pools several tokens, some of which may be in a shared prefix.
        if self.shares_prefixes and not routes:
            batches = pack_shared([row.ids for row in rest_rows], budget)
        else:
            batches = pack([len(row.ids) for row in rest_rows], budget) if rest_rows else []
        for packed in batches:
            inputs = [rest[index] for index in packed.inputs]
            yield inputs, forward(rest_rows, packed, batch_routes)

    @property
    def kernel_name(self) -> str:
        """Readable name of the attention kernel."""
        if not self.packs:
            return "scaled_dot_product_attention, padded"
        kernel = self._runtime.kernel
        return "scaled_dot_product_attention" if kernel is None else kernel.__name__

    def _start_batch(
        self, inputs: Sequence[int], forward: Forward, *, queries: bool
    ) -> Callable[[], BatchVectors] | None:
        """Start to compute a batch; return None if there is not enough memory for it.

        The result waits for the vectors, without the engine's lock: other threads can queue work.
        """
        try:
            n_tokens = forward.n_tokens
            with torch.inference_mode():
                forward.prepare()
                with self._device_lock:
                    vectors, copied = copy_to_cpu(self._compute_vectors(forward, queries=queries))

            def finish() -> BatchVectors:
                if copied is not None:
                    copied.synchronize()
                return BatchVectors(inputs, vectors.numpy(), n_tokens)

            return finish
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # This is outside the handler, because the error keeps references to the activations.
        if self.output_device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _compute_vectors(self, forward: Forward, *, queries: bool) -> Tensor:
        """Run a prepared pass; apply the dense layers unless the vectors are router queries."""
        pooled = forward.pooled()
        return pooled.to(self.output_device) if queries else self.finish(pooled)

    def finish(self, pooled: Tensor) -> Tensor:
        """Apply the dense layers and normalisation to pooled vectors, (n, width) to (n, dim)."""
        pooled = pooled.to(self.output_device)
        # In training, autocast would compute the dense layers in 16 bit. Inference never does.
        with torch.autocast(self.output_device.type, enabled=False):
            pooled = self.model.dense(pooled)
        return torch.nn.functional.normalize(pooled, dim=1) if self.identity.normalize else pooled

    def finish_states(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Apply ``finish`` to an array; return an array."""
        with torch.inference_mode():
            vectors: NDArray[np.float32] = self.finish(torch.from_numpy(states)).cpu().numpy()
        return vectors

    def _shrink_budget(self, budget: int, n_tokens: int, rows: Sequence[Tokens]) -> None:
        """Halve the token budget after a batch of ``n_tokens`` tokens ran out of memory.

        Raises:
            OutOfMemoryError: If the batch cannot be split any further.
        """
        # If prefixes are shared, identical inputs always end up in the same batch.
        if len(rows) == 1 or budget == 1:
            longest = max(len(row.ids) for row in rows)
            raise OutOfMemoryError(
                f"ran out of memory on {self.output_device} with a single input of {longest} "
                "tokens."
            )
        self.budget = max(1, min(self.budget, min(budget, n_tokens) // 2))

    # -- choosing how to run -------------------------------------------------------------------

    @torch.inference_mode()
    def _can_pad(self) -> bool:
        """Return whether padding leaves the token vectors of an input as they are without it.

        It does not if the network mixes tokens in another way than by attention, as FNet does by
        Fourier transforms and ConvBERT by convolutions.
        """
        rows = sorted(self._sample_rows(), key=lambda row: len(row.ids))
        hidden = []
        for batch in (rows, rows[:1]):
            forward = PaddedForward(self._runtime, batch)
            forward.prepare()
            hidden.append(forward.hidden()[0, : len(rows[0].ids)].float())
        padded, alone = hidden
        difference = (padded - alone).norm(dim=1) / alone.norm(dim=1)
        return bool(difference.square().mean() <= self._tolerance**2)

    def _sample_rows(self) -> list[Tokens]:
        """Return five short texts of different lengths, three of which share a prefix."""
        # They begin as the network was trained to read texts: in 16 bit, EmbeddingGemma rounds
        # texts without a first token ten times as coarsely.
        ids = [(self._n_ids // 2 + offset) % self._n_ids for offset in range(24)]
        texts = [ids[:9], ids[:6] + ids[9:12], ids[:6] + ids[12:14], ids[14:15], ids[15:24]]
        bos_id = getattr(self._runtime.network.config, "bos_token_id", None)
        if isinstance(bos_id, int) and bos_id < self._n_ids:
            texts = [[bos_id, *text] for text in texts]
        return [Tokens(text, 0, len(text), len(text), len(text)) for text in texts]

    @torch.inference_mode()
    def _choose_packing(self) -> bool:
        """Try out the attention kernels for packed rows; return whether inputs can be packed."""
        if not self._can_pack:
            return False
        network = self._runtime.network
        rows = self._sample_rows()
        padded = PaddedForward(self._runtime, rows)
        padded.prepare()
        expected = padded.hidden()
        network.set_attn_implementation(attention.NAME)
        for kernel in [*attention.varlen_kernels(self.device, self._runtime.dtype), None]:
            self._runtime = replace(self._runtime, kernel=kernel)
            if self._packing_agrees(expected, rows):
                return True
        if not self.routes_inside:
            network.set_attn_implementation("sdpa")
        return False

    def _packing_agrees(self, expected: Tensor, rows: Sequence[Tokens]) -> bool:
        """Return whether packed inputs get the same token vectors as padded ones (``expected``).

        This covers shared prefixes if the engine shares them, and routed inputs if routers act
        inside the network.
        """
        texts = [row.ids for row in rows]
        batches = pack([len(text) for text in texts], 1_000)
        batches += pack_shared(texts, 1_000) if self.shares_prefixes else []
        try:
            for batch in batches:
                packed = PackedForward(self._runtime, batch, rows)
                packed.prepare()
                hidden = packed.hidden().float()
                for index, leaf in zip(batch.inputs, batch.leaves, strict=True):
                    positions = [batch.position(leaf, token) for token in range(len(texts[index]))]
                    padded = expected[index, : len(positions)].float()
                    # Each token counts alike. Language models have single tokens with several times
                    # the norm of others, which would stand for the whole text.
                    difference = (hidden[positions] - padded).norm(dim=1) / padded.norm(dim=1)
                    # Written so that NaN counts as a difference.
                    if not difference.square().mean() <= self._tolerance**2:
                        return False
            if self.routes_inside and not self.reads_routers:
                return self._routed_packing_agrees(rows)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            # Neither error says anything about the architecture, and after an AcceleratorError
            # nothing more runs on the GPU.
            if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
                raise
            # The architecture does not support packing, so its inputs are padded.
            kernel = self._runtime.kernel or torch.nn.functional.scaled_dot_product_attention
            _log.debug("%s cannot pack inputs with %s: %s", self._name, kernel.__name__, error)
            return False
        return True

    def _routed_packing_agrees(self, rows: Sequence[Tokens]) -> bool:
        """Return whether packed inputs under routers get the same vectors as padded ones."""
        rows = [row for row in rows for _ in range(2)]
        runtime, passes = self._runtime, self.passes
        captured = passes.forward(runtime, [*rows[1:], rows[0]], queries=True)
        captured.prepare()
        queries = list(captured.pooled())
        padded = passes.forward(runtime, rows, routes=queries)
        (batch,) = pack([len(row.ids) for row in rows], 1_000)
        packed = passes.forward(runtime, rows, batch, queries)
        padded.prepare()
        packed.prepare()
        expected = padded.pooled()[list(batch.inputs)]
        distances = (packed.pooled() - expected).norm(dim=1)
        return bool((distances <= self._tolerance * expected.norm(dim=1)).all())


def create_engine(
    model: LoadedModel,
    resolved: ResolvedEncoder,
    pad_id: int,
    concurrency: int = 1,
    *,
    frozen: bool = True,
) -> Engine:
    """Create an engine, and check that its network runs and attends the way it was trained to.

    The arguments are those of ``Engine``.

    Raises:
        LlmcondError: If the network fails, or attends in the other direction.
    """
    identity, name = resolved.identity, resolved.checkpoint.name
    try:
        # Both lines run the network, so one that cannot be run fails in one of them.
        engine = Engine(model, resolved, pad_id, concurrency, frozen=frozen)
        check_direction(model.network, identity.attention, name, engine.device)
    except LlmcondError:
        raise
    except Exception as error:  # networks raise any kind of error, by settings and device
        raise LlmcondError(
            f"{name} cannot be run as {identity.dtype}, quantize {identity.quantize}, on "
            f"{resolved.device}: {first_line(error)}. Try another dtype (llmcond extract --dtype) "
            "or quantisation (llmcond extract --quantize), and check that its config.json is the "
            "published one."
        ) from error
    return engine


def load_torch_engines(
    resolved: ResolvedEncoder, threads: int
) -> tuple[InputTokenizer, list[Engine]]:
    """Load an encoder's tokenizer and its engines, one for each member of an ensemble.

    ``threads`` is the number of threads that run each engine at a time.

    Raises:
        UserError: If the checkpoint cannot be loaded with stock transformers classes.
        LlmcondError: If its weights are broken or do not fit into memory.
    """
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    tokenizer = load_tokenizer(resolved.checkpoint, config)
    inputs = InputTokenizer(tokenizer, resolved.identity, resolved.checkpoint.name)
    engines = [
        create_engine(load_model(member, config), member, inputs.pad_id, threads)
        for member in resolved.list_members()
    ]
    return inputs, engines


def torch_engine(encoder: Any) -> Engine:
    """Return the engine of an encoder that PyTorch computes.

    Raises:
        TypeError: If another library computes it.
    """
    engine = encoder.engine
    if not isinstance(engine, Engine):
        raise TypeError(f"{encoder.name} is computed by {encoder.resolved.runtime}, not by PyTorch")
    return engine


def _max_packed_length(config: Any) -> int:
    """Return the most tokens of a packed input: all must be in each other's attention window."""
    if getattr(config, "use_sliding_window", True) is False:
        return sys.maxsize
    windows = [getattr(config, name, None) for name in ("sliding_window", "local_attention")]
    # Some architectures have the whole window on each side of a token, others half of it.
    return min((int(window) // 2 for window in windows if window), default=sys.maxsize)


def _longest_mixed(config: Any) -> int:
    """Return the most tokens of an input that can share a batch with shorter ones.

    With LongRoPE, the longest input of a batch decides how all of them are rotated.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return min(
        (
            int(part["original_max_position_embeddings"])
            for part in by_layer_type
            if part.get("rope_type") == "longrope"
        ),
        default=sys.maxsize,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a GPU or a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    signs = ["can't allocate memory", "not enough memory", "CUDA error: out of memory"]
    # cuBLAS allocates memory separately, also when it starts, and reports it with other errors.
    signs += ["CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED"]
    return any(sign in text for sign in signs)


def embed_routed(
    engine: Engine,
    items: Sequence[EncoderInput],
    tokens: Sequence[Tokens],
    queries: Mapping[str, Tokens],
) -> Tensor:
    """Return the vectors of inputs, (n, dim) in float32, with gradients, also through the routers.

    Args:
        engine: The engine to run.
        items: The inputs, with or without a router.
        tokens: The tokens of each input.
        queries: The tokens of each router by its text.

    Raises:
        UserError: As in ``Engine.embed``.
        OutOfMemoryError: As in ``Engine.embed``.
    """
    parts, order = [], [position for position, item in enumerate(items) if item.router is None]
    if order:
        parts.append(engine.embed([tokens[position] for position in order]))
    groups = group_routed_inputs(items)
    if groups:
        texts = list(router_inputs(items))
        router_tokens = [queries[text] for text in texts]
        states = None if engine.reads_routers else engine.embed(router_tokens, queries=True)
        row_of = {text: row for row, text in enumerate(texts)}
        rows: list[Tokens] = []
        routes: list[Any] = []
        for group in groups:
            routers = list_routers([items[position] for position in group])
            row_indices = [row_of[router.text] for router in routers]
            if states is None:
                group_queries: Any = [router_tokens[index] for index in row_indices]
            else:
                # The backward pass of states[...] would add up gradients in any order.
                group_queries = states.index_select(
                    0, move_to_device(torch.tensor(row_indices), states.device)
                )
            group_routes = make_routes(engine, group_queries, routers[0])
            routes += group_routes
            rows += [tokens[group[0]]] * len(group_routes)
        parts.append(engine.embed(rows, routes=routes))
        order += [position for group in groups for position in group]
    return torch.cat(parts).index_select(
        0, move_to_device(torch.tensor(order).argsort(), engine.output_device)
    )
