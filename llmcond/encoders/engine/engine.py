"""Batch inputs, run the network, pool; out of memory, try again with half the token budget.

An engine packs several inputs into one row without padding wherever that gives what each gives
alone, which it tries out when it is made.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcond.encoders.engine import attention, varlen
from llmcond.encoders.engine.batching import STEP, pack, pack_shared, plan_batches
from llmcond.encoders.engine.forward import (
    Forward,
    PackedForward,
    PaddedForward,
    Runtime,
    skipped_id,
)
from llmcond.encoders.engine.interface import OutOfMemoryError, Pooled, check_ids, n_routes
from llmcond.encoders.engine.pooling import find_pooling
from llmcond.encoders.engine.tokenizing import InputTokenizer, Tokens
from llmcond.encoders.loading.architecture import load_config, load_tokenizer, token_embeddings
from llmcond.encoders.loading.device import TORCH_DTYPES, default_token_budget, fetch
from llmcond.encoders.loading.direction import check_direction
from llmcond.encoders.loading.loading import LoadedModel, load_model
from llmcond.encoders.loading.memory import tokens_that_fit
from llmcond.encoders.poolings import pooling_named
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.routers.inside import passes_of
from llmcond.errors import LlmcondError, first_line
from llmcond.system import to_device

_log = logging.getLogger(__name__)

#: How far the vectors of packed inputs may be from those in padded rows, as a share of their norm.
#: Rounding stays well below; texts that see each other, or wrong positions, go well above.
_SAME = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}


@dataclass(frozen=True, slots=True)
class _Begun:
    """A batch whose vectors are there once what is queued on a GPU is done; on a CPU they are."""

    inputs: Sequence[int]
    n_tokens: int
    vectors: Tensor
    copied: torch.cuda.Event | None

    def finish(self) -> Pooled:
        """Wait for the vectors. The engine's lock is free: another thread queues its work."""
        if self.copied is not None:
            self.copied.synchronize()
        return Pooled(self.inputs, self.vectors.numpy(), self.n_tokens)


class Engine:
    """A loaded network, run in batches.

    Attributes:
        budget: tokens of a batch at most. Halved where memory runs out, and never raised again.
        packs: whether inputs are packed; False where the architecture does not stand it.
        device, out: where token ids are put, and where vectors are given.
        ahead: batches that are begun before the vectors of one are waited for. A GPU computes one
            while those of the batch before are copied back, and the next is prepared.
        passes: the forward passes of batches.
        inside, reads_routers: as :class:`llmcond.encoders.engine.forward.Passes` has them.
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
        """Find the fastest way that gives the right vectors.

        So many threads as ``concurrency`` run it at a time. One that is not ``frozen`` is trained.
        """
        self.model, self.identity, self.dim = model, resolved.identity, model.dim
        self.shares = resolved.shares_prefixes
        config = model.network.config
        # A GPU is given one batch at a time, however many threads there are.
        count = concurrency if resolved.device == "cpu" else 1
        self.budget = resolved.options.max_tokens_per_batch or min(
            default_token_budget(resolved.device),
            tokens_that_fit(config, self.identity.dtype, resolved.device, count),
        )
        table = token_embeddings(model.network)
        self.device, self._n_ids, self._name = table.device, len(table), resolved.checkpoint.name
        self.out = torch.device(resolved.device)
        self.ahead = 1 if self.out.type == "cuda" else 0
        self._runtime = Runtime(
            network=model.network,
            pooling=pooling_named(self.identity.pooling),
            pool=find_pooling(self.identity.pooling),
            attention=self.identity.attention,
            # A token that was added for padding often has no embedding; padding is masked, so any
            # other does.
            pad_id=pad_id if pad_id < self._n_ids else 0,
            device=self.device,
            dtype=TORCH_DTYPES[self.identity.dtype],
            max_length=self.identity.max_length,
            skipped_id=skipped_id(model.network),
            spread=len(set(getattr(model.network, "hf_device_map", {}).values())) > 1,
        )
        self._longest = _longest_packed(config)
        # Work is queued on a GPU by one thread at a time: activations of two would need twice
        # the memory.
        self._device_lock = nullcontext() if self.out.type == "cpu" else threading.Lock()
        self._can_pack = getattr(config, "_attn_implementation", None) == "sdpa" and bool(
            getattr(model.network, "_supports_attention_backend", False)
        )
        self.passes = passes_of(self.identity)(model.network, self.identity, self._name)
        self.inside, self.reads_routers = self.passes.inside, self.passes.reads_routers
        self.packs = self._choose_packing()
        # Products in 16 bit are prepared for each number of rows; in training all may be in 16 bit.
        in_16_bit = self.identity.dtype != "float32" or not frozen
        if self.packs and in_16_bit and self.out.type == "cpu":
            self._runtime = replace(self._runtime, step=STEP)

    # -- batches -------------------------------------------------------------------------------

    def run(
        self,
        rows: Sequence[Tokens],
        before_batch: Callable[[], None] = lambda: None,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Iterator[Pooled]:
        """Yield the vectors of inputs, batch by batch; see :class:`AnyEngine`.

        A batch that memory is too short for is computed again in halves, and all that come after it
        are as small.
        """
        check_ids(rows, self._n_ids, self._name)
        waiting = list(range(len(rows)))
        while waiting:
            budget, done = self.budget, set()
            planned = self._plan(rows, waiting, budget, routes=routes, queries=queries)
            begun: deque[_Begun] = deque()
            too_large: tuple[int, Sequence[int]] | None = None
            for inputs, forward in planned:
                before_batch()
                batch = self._begin(inputs, forward, queries=queries)
                if batch is None:
                    too_large = forward.n_tokens, inputs
                    break
                begun.append(batch)
                done.update(inputs)
                if len(begun) > self.ahead:
                    yield begun.popleft().finish()
            yield from (batch.finish() for batch in begun)
            if too_large is not None:
                self._shrink(budget, too_large[0], [rows[i] for i in too_large[1]])
            waiting = [index for index in waiting if index not in done]

    def embed(
        self,
        rows: Sequence[Tokens],
        *,
        padded: bool = False,
        routes: Sequence[Any] = (),
        queries: bool = False,
    ) -> Tensor:
        """Return the vectors of inputs, (n, dim) in float32, with their gradients.

        In the batches that :meth:`run` computes, or ``padded`` to compare with; but all of them are
        kept until gradients are taken, so that memory grows with the number of inputs. Of routed
        ones there is a vector for each route, one behind the other; ``queries`` as in :meth:`run`.

        Raises:
            UserError: a token that the network has no embedding of.
            OutOfMemoryError: they do not fit.
        """
        check_ids(rows, self._n_ids, self._name)
        counts = [n_routes(route) for route in routes] or [1] * len(rows)
        starts = [0, *accumulate(counts)]
        order: list[int] = []
        parts: list[Tensor] = []
        planned = self._plan(
            rows, range(len(rows)), self.budget, padded=padded, routes=routes, queries=queries
        )
        try:
            for inputs, forward in planned:
                forward.prepare()
                parts.append(self._vectors(forward, queries=queries))
                order += [at for i in inputs for at in range(starts[i], starts[i + 1])]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"ran out of memory on {self.out} with {sum(len(row.ids) for row in rows):,} "
                "tokens in one step."
            ) from error
        # Not parts[back]: gradients of an index are added in any order on several threads.
        return torch.cat(parts).index_select(0, to_device(torch.tensor(order).argsort(), self.out))

    def _plan(
        self,
        rows: Sequence[Tokens],
        waiting: Sequence[int],
        budget: int,
        *,
        padded: bool = False,
        routes: Sequence[Any] = (),
        queries: bool = False,
    ) -> Iterator[tuple[list[int], Forward]]:
        """Yield batches, those that are padded first."""
        forward = partial(self.passes.forward, self._runtime, queries=queries)
        packs = self.packs and not padded and not (routes and self.reads_routers)
        apart = [i for i in waiting if not packs or len(rows[i].ids) > self._longest]
        for batch in plan_batches([len(rows[i].ids) for i in apart], budget):
            inputs = [apart[index] for index in batch]
            own = [routes[i] for i in inputs] if routes else []
            yield inputs, forward([rows[i] for i in inputs], routes=own)
        rest = sorted(set(waiting) - set(apart))
        chosen, own = [rows[i] for i in rest], [routes[i] for i in rest] if routes else []
        # Several tokens of a routed input are pooled, which may be those of a prefix.
        if self.shares and not routes:
            batches = pack_shared([row.ids for row in chosen], budget)
        else:
            batches = pack([len(row.ids) for row in chosen], budget) if chosen else []
        for packed in batches:
            inputs = [rest[place] for place in packed.inputs]
            yield inputs, forward(chosen, packed, own)

    @property
    def kernel_name(self) -> str:
        """Return what attends within rows, for people."""
        if not self.packs:
            return "scaled_dot_product_attention, padded"
        kernel = self._runtime.kernel
        return "scaled_dot_product_attention" if kernel is None else kernel.__name__

    def _begin(self, inputs: Sequence[int], forward: Forward, *, queries: bool) -> _Begun | None:
        """Return a batch that is being computed, None if there is not enough memory for it."""
        try:
            with torch.inference_mode():
                forward.prepare()
                with self._device_lock:
                    vectors, copied = fetch(self._vectors(forward, queries=queries))
                return _Begun(inputs, forward.n_tokens, vectors, copied)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler: the error holds on to what filled the memory.
        if self.out.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _vectors(self, forward: Forward, *, queries: bool) -> Tensor:
        pooled = forward.pooled()
        return pooled.to(self.out) if queries else self.finish(pooled)

    def finish(self, pooled: Tensor) -> Tensor:
        """Return vectors as inputs have them, (n, dim), of what left the pooling, (n, width)."""
        pooled = pooled.to(self.out)
        # In training, autocast would compute dense layers in 16 bit, which nothing else does.
        with torch.autocast(self.out.type, enabled=False):
            pooled = self.model.dense(pooled)
        return torch.nn.functional.normalize(pooled, dim=1) if self.identity.normalize else pooled

    def finish_states(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return :meth:`finish` of an array, as an array."""
        with torch.inference_mode():
            vectors: NDArray[np.float32] = self.finish(torch.from_numpy(states)).cpu().numpy()
        return vectors

    def _shrink(self, budget: int, n_tokens: int, rows: Sequence[Tokens]) -> None:
        # Where prefixes are shared, inputs that are the same cannot be parted.
        if len(rows) == 1 or budget == 1:
            longest = max(len(row.ids) for row in rows)
            raise OutOfMemoryError(
                f"ran out of memory on {self.out} with a single input of {longest} tokens."
            )
        self.budget = max(1, min(self.budget, min(budget, n_tokens) // 2))

    # -- choosing how to run -------------------------------------------------------------------

    @torch.inference_mode()
    def _choose_packing(self) -> bool:
        """Choose the attention of packed rows by trying it; return whether inputs are packed."""
        if not self._can_pack:
            return False
        network = self._runtime.network
        # Five short texts, of which three begin alike.
        ids = [(self._n_ids // 2 + at) % self._n_ids for at in range(24)]
        texts = [ids[:9], ids[:6] + ids[9:12], ids[:6] + ids[12:14], ids[14:15], ids[15:24]]
        rows = [Tokens(text, 0, len(text), len(text), len(text)) for text in texts]
        padded = PaddedForward(self._runtime, rows)
        padded.prepare()
        expected = padded.hidden()
        network.set_attn_implementation(attention.NAME)
        for choice in [*varlen.varlen_kernels(self.device, self._runtime.dtype), None]:
            self._runtime = replace(self._runtime, kernel=choice)
            if self._packs_as(expected, rows):
                return True
        if not self.inside:
            network.set_attn_implementation("sdpa")
        return False

    def _packs_as(self, expected: Tensor, rows: Sequence[Tokens]) -> bool:
        """Return whether packed inputs, prefixes shared or not, get the vectors of padded ones.

        Routed ones too, where routers act inside the network.
        """
        most = 0.2 if self.identity.quantize == "8bit" else _SAME[self.identity.dtype]
        texts = [row.ids for row in rows]
        batches = pack([len(text) for text in texts], 1_000)
        batches += pack_shared(texts, 1_000) if self.shares else []
        try:
            for batch in batches:
                packed = PackedForward(self._runtime, batch, rows)
                packed.prepare()
                hidden = packed.hidden().float()
                for index, leaf in zip(batch.inputs, batch.leaves, strict=True):
                    own = [batch.position(leaf, at) for at in range(len(texts[index]))]
                    wanted = expected[index, : len(own)].float()
                    if not (hidden[own] - wanted).norm() <= most * wanted.norm():  # NaN neither
                        return False
            if self.inside and not self.reads_routers:
                return self._routes_as(rows, most)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            # Neither says anything of the architecture, and after the latter nothing more runs.
            if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
                raise
            # Whatever an architecture does not take: it is padded then, as it always was.
            kernel = self._runtime.kernel or torch.nn.functional.scaled_dot_product_attention
            _log.debug("%s does not pack with %s: %s", self._name, kernel.__name__, error)
            return False
        return True

    def _routes_as(self, rows: Sequence[Tokens], most: float) -> bool:
        """Return whether packed inputs under routers get the vectors of padded ones."""
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
        wanted = padded.pooled()[list(batch.inputs)]
        apart = (packed.pooled() - wanted).norm(dim=1)
        return bool((apart <= most * wanted.norm(dim=1)).all())


def try_engine(
    model: LoadedModel,
    resolved: ResolvedEncoder,
    pad_id: int,
    concurrency: int = 1,
    *,
    frozen: bool = True,
) -> Engine:
    """Make an engine; an LlmcondError unless its network runs, and attends as it was trained to."""
    identity, name = resolved.identity, resolved.checkpoint.name
    try:
        # Both run the network, which fails at once if it fails at all.
        engine = Engine(model, resolved, pad_id, concurrency, frozen=frozen)
        check_direction(model.network, identity.attention, name, engine.device)
    except LlmcondError:
        raise
    except Exception as error:  # whatever settings and devices can make a network raise
        raise LlmcondError(
            f"{name} cannot be run as {identity.dtype}, quantize {identity.quantize}, on "
            f"{resolved.device}: {first_line(error)}. Extract with another dtype (llmcond "
            "extract --dtype) or quantize (llmcond extract --quantize), and see that its "
            "config.json is as it was published."
        ) from error
    return engine


def load_torch_engines(
    resolved: ResolvedEncoder, threads: int
) -> tuple[InputTokenizer, list[Engine]]:
    """Load an encoder's tokenizer and its engines, one for each member of an ensemble.

    Raises:
        UserError: the checkpoint cannot be loaded with stock transformers classes.
        LlmcondError: its weights are broken or do not fit into memory.
    """
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    tokenizer = load_tokenizer(resolved.checkpoint, config)
    inputs = InputTokenizer(tokenizer, resolved.identity, resolved.checkpoint.name)
    engines = [
        try_engine(load_model(member, config), member, inputs.pad_id, threads)
        for member in resolved.each_member()
    ]
    return inputs, engines


def torch_engine(encoder: Any) -> Engine:
    """Return the engine of an encoder that PyTorch computes.

    Raises:
        TypeError: another library does.
    """
    engine = encoder.engine
    if not isinstance(engine, Engine):
        raise TypeError(f"{encoder.name} is computed by {encoder.resolved.runtime}, not by PyTorch")
    return engine


def _longest_packed(config: Any) -> int:
    """Return the tokens up to which an input may be packed: all must be in each other's window."""
    if getattr(config, "use_sliding_window", True) is False:
        return sys.maxsize
    windows = [getattr(config, name, None) for name in ("sliding_window", "local_attention")]
    # Some count a window to both sides, others half of it to each.
    return min((int(window) // 2 for window in windows if window), default=sys.maxsize)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a GPU or a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    # cuBLAS has memory of its own, and an error of its own where there is none.
    signs = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return any(sign in text for sign in signs)
