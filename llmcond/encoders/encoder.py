"""A frozen encoder: texts with instructions in, one float32 vector each out."""

from __future__ import annotations

import inspect
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import as_list
from llmcond.encoders.engine.interface import AnyEngine, OutOfMemoryError, n_routes
from llmcond.encoders.engine.routing import grouped, routers_of, routes_of, unrouted
from llmcond.encoders.engine.tokenizing import InputTokenizer, Tokens, check_inputs
from llmcond.encoders.poolings import ROUTED_POOLINGS
from llmcond.encoders.resolve import ResolvedEncoder, resolve
from llmcond.encoders.settings import EncoderOptions
from llmcond.encoders.spec import CUT, EncoderInput, plan_inputs
from llmcond.encoders.threads import Concurrency, WorkerThreads, check_cancelled
from llmcond.errors import LlmcondError, UserError
from llmcond.files import digest_bytes
from llmcond.log import log
from llmcond.options import option_of, public_function
from llmcond.progress import ExtractionBar

_P = ParamSpec("_P")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: Inputs that one thread tokenises and encodes at a time, on a CPU and on a GPU, whose batches of
#: short texts would otherwise stay far below its token budget.
UNIT, UNIT_ON_GPU = 256, 2_048
#: Vectors that they may have, where each has several routers.
_ROUTED = 4_096
#: Size of a digest of an input's tokens: no two inputs that differ have the same.
_DIGEST_BYTES = 16


class Query(NamedTuple):
    """A router, as it weights the tokens of others.

    Attributes:
        state: (width,) as it leaves the pooling, in the space of the tokens' states; of a router
            inside the encoder its query, or its tokens where those are read with each input.
        n_tokens: tokens it has, before truncation.
    """

    state: NDArray[np.float32] | Tokens
    n_tokens: int


#: Routers by their texts.
Queries = Mapping[str, Query]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Vectors and what it took to make them, in the order of the inputs.

    Attributes:
        vectors: (n, dim).
        n_tokens: (n,) tokens each input has, special tokens included, before truncation.
        truncated: (n,) whether an input was longer than the encoder takes, and its sentence cut.
        n_computed: tokens that went through the network, padding included; fewer than there are
            where prefixes are shared.
    """

    vectors: NDArray[np.float32]
    n_tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    n_computed: int = 0

    def take(self, rows: Sequence[int] | NDArray[Any]) -> Encoded:
        """Return what belongs to some inputs, by positions, or a mask."""
        return Encoded(self.vectors[rows], self.n_tokens[rows], self.truncated[rows])


_Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def _load(resolved: ResolvedEncoder, threads: int) -> tuple[InputTokenizer, Sequence[AnyEngine]]:
    """Load an encoder's tokenizer and its engines, one for each member of an ensemble."""
    why = resolved.not_openvino
    if resolved.runtime == "openvino":
        from llmcond.encoders.openvino.engine import load_engines
        from llmcond.encoders.openvino.weights import CannotRunError

        try:
            return load_engines(resolved)
        except CannotRunError as error:
            why = str(error)
    from llmcond.encoders.engine.engine import load_torch_engines

    # Where the weights are broken, PyTorch is what says so.
    loaded = load_torch_engines(resolved, threads)
    if resolved.identity.runtime == "openvino":
        raise LlmcondError(
            f"{resolved.checkpoint.name} cannot be run by OpenVINO: {why}. Compute with PyTorch "
            "(llmcond extract --runtime torch)."
        )
    if why:
        log.info(f"{resolved.checkpoint.name} is computed by PyTorch on this CPU: {why}")
    return loaded


class Encoder:
    """A frozen encoder on one device. Make one with :func:`load_encoder`.

    Attributes:
        resolved: its checkpoint, identity, device and token budget.
        identity: everything that decides its vectors.
        name: the name that messages call it by.
        dim: size of its vectors.
        concurrency: how many threads it is best run by at a time.
    """

    def __init__(self, resolved: ResolvedEncoder) -> None:
        """Load tokenizer and weights.

        Raises:
            UserError: the checkpoint cannot be loaded with stock transformers classes.
            LlmcondError: its weights are broken or do not fit into memory.
        """
        self.resolved, self.identity = resolved, resolved.identity
        self.name = resolved.checkpoint.name
        self.concurrency = Concurrency.of(resolved)
        self._threads = WorkerThreads(self.concurrency)
        self._unit = UNIT if resolved.device == "cpu" else UNIT_ON_GPU
        # A fast tokenizer is one object in Rust, which refuses a second borrower.
        self._tokenizing = threading.Lock()
        self._tokenizer, self._engines = _load(resolved, self.concurrency.threads)
        self.engine = self._engines[0]
        self.dim = sum(engine.dim for engine in self._engines)

    def __reduce__(self) -> tuple[type[Encoder], tuple[ResolvedEncoder]]:
        """Pickle what it was loaded from: another process loads it anew."""
        return type(self), (self.resolved,)

    def encode(
        self, inputs: Iterable[EncoderInput | str], *, show_progress: bool = False
    ) -> NDArray[np.float32]:
        """Return one vector an input, (n, dim) in float32, in the order of ``inputs``.

        In inputs longer than the encoder takes the sentence is cut, with a warning that counts
        them; or it is read in windows, whose vectors are averaged (``long_texts``).

        Args:
            inputs: n inputs: a list, an iterator, a column of a data frame or an Arrow array. A
                plain string is a text without instruction.
            show_progress: whether to show a progress bar on standard error.

        Raises:
            UserError: an instruction or a context that the encoder cannot take.
            LlmcondError: out of memory.
        """
        if isinstance(inputs, str | EncoderInput):
            raise UserError(f"one {type(inputs).__name__} was given; give a list of inputs.")
        items = [
            EncoderInput("", item) if isinstance(item, str) else item for item in as_list(inputs)
        ]
        map_units = self._threads.map if self.concurrency.threads > 1 else map
        with ExtractionBar() if show_progress else nullcontext() as bar:
            encoded = self._encode(items, map_units, bar)
        if encoded.truncated.any():
            warnings.warn(
                f"{int(encoded.truncated.sum())} of {len(items)} inputs are longer than the "
                f"{self.identity.max_length} tokens that {self.name} takes; {CUT}.",
                stacklevel=2,
            )
        return encoded.vectors

    def encode_joined(
        self, rows: Sequence[tuple[str, str, str]], *, show_progress: bool = False
    ) -> NDArray[np.float32]:
        """Return a vector for two sentences and their condition read as one text, (n, dim).

        That is what a cross-encoder rates. Sentences that are too long are cut, with a warning.

        Raises:
            UserError: no texts, or a condition that leaves no room for sentences.
            LlmcondError: out of memory.
        """
        for column in zip(*rows, strict=True):
            check_inputs([EncoderInput("", text) for text in column])
        sizes = [sum(map(len, row)) for row in rows]
        order = sorted(range(len(rows)), key=sizes.__getitem__, reverse=True)
        vectors, n_cut = np.empty((len(rows), self.dim), dtype=np.float32), 0

        def encode(unit: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
            with self._tokenizing:
                tokens = self._tokenizer.joined([rows[index] for index in unit])
            n_tokens = np.array([row.n_tokens for row in tokens], dtype=np.int32)
            return np.concatenate(self._run(tokens)[0]), n_tokens

        map_units = self._threads.map if self.concurrency.threads > 1 else map
        with ExtractionBar() if show_progress else nullcontext() as bar:
            if bar is not None:
                bar.start(len(rows), sum(sizes))
            units = _chunks(order, self._unit)
            for unit, (found, n_tokens) in self._each(units, encode, map_units, sizes, bar):
                vectors[unit] = found
                n_cut += int((n_tokens > self.identity.max_length).sum())
        if n_cut:
            warnings.warn(
                f"{n_cut} of {len(rows)} rows have more than the {self.identity.max_length} tokens "
                f"that {self.name} takes; their sentences were cut, conditions are whole.",
                stacklevel=2,
            )
        return vectors

    def encode_counted(
        self,
        inputs: Sequence[EncoderInput],
        queries: Queries | None = None,
        *,
        threads: bool = False,
    ) -> Encoded:
        """Return vectors with the tokens and the truncation of each input, on the calling thread.

        Or by all ``threads`` that the encoder is best run by: the vectors are the same.

        A function of its arguments alone: how inputs are batched depends on nothing else, but where
        memory runs out. Safe to call from several threads. ``queries`` are the inputs' routers, and
        any others; None: they are computed as well. A plain input that is one of them is not
        encoded again.

        Raises:
            UserError: an instruction, a context or a router that the encoder cannot take.
            LlmcondError: out of memory.
        """
        several = threads and self.concurrency.threads > 1
        return self._encode(inputs, self._threads.map if several else map, queries=queries)

    def queries(self, texts: Iterable[str], map_units: _Map = map) -> Queries:
        """Return what routers of these texts are, each computed once.

        Raises:
            UserError: the encoder's pooling leaves the space of the tokens' states.
            LlmcondError: out of memory.
        """
        plain = [EncoderInput("", text) for text in sorted(set(texts))]
        pools = self.engine.inside or self.identity.pooling in ROUTED_POOLINGS
        if plain and not pools:
            raise UserError(
                f"{self.name} pools by {self.identity.pooling}, and a router weights the tokens' "
                f"own states: --pooling {' or '.join(ROUTED_POOLINGS)}."
            )
        ordered = [plain[index] for index in plan_inputs(plain, by_prefix=False)]
        units = _chunks(ordered, self._unit)
        found = (query for unit in map_units(self._queries, units) for query in unit)
        return {item.text: query for item, query in zip(ordered, found, strict=True)}

    def _encode(
        self,
        inputs: Sequence[EncoderInput],
        map_units: _Map,
        bar: ExtractionBar | None = None,
        queries: Queries | None = None,
    ) -> Encoded:
        check_inputs(inputs)
        sizes = [item.size for item in inputs]
        if bar is not None:
            bar.start(len(inputs), sum(sizes))
        if queries is None:
            queries = self.queries((router.text for router in routers_of(inputs)), map_units)
        order = plan_inputs(inputs, by_prefix=self.resolved.shares_prefixes)
        vectors = np.empty((len(inputs), self.dim), dtype=np.float32)
        n_tokens = np.empty(len(inputs), dtype=np.int32)
        computed = 0
        found = [place for place in order if self._is_query(inputs[place], queries)]
        if found:
            own = [queries[inputs[place].text] for place in found]
            states: list[Any] = [query.state for query in own]
            vectors[found] = self.engine.finish_states(np.stack(states))
            n_tokens[found] = [query.n_tokens for query in own]
            if bar is not None:
                bar.advance(len(found), sum(sizes[place] for place in found), 0, 0.0)
        left = set(found)
        units = list(_units([place for place in order if place not in left], inputs, self._unit))
        work = partial(self._encode_unit, inputs, queries)
        first: dict[bytes, int] = {}
        for unit, result in self._each(units, work, map_units, sizes, bar):
            vectors[unit], n_tokens[unit], n_computed, digests = result
            # Rounding depends on the batch, so equal inputs of two batches would differ by noise,
            # which is all that is left where one is subtracted from the other.
            same = [first.setdefault(key, index) for key, index in zip(digests, unit, strict=True)]
            if same != unit:
                vectors[unit] = vectors[same]
            computed += n_computed
        cut = (n_tokens > self.identity.max_length) & (self.identity.long_texts == "cut")
        return Encoded(vectors, n_tokens, cut, computed)

    def _each(
        self,
        units: Sequence[list[int]],
        work: Callable[[list[int]], _Result],
        map_units: _Map,
        sizes: Sequence[int],
        bar: ExtractionBar | None,
    ) -> Iterator[tuple[list[int], _Result]]:
        """Yield units with what ``work`` gives for them: vectors, numbers of tokens, and more."""
        map_units = map_units if len(units) > 1 else map
        at_once = 1 if map_units is map else self.concurrency.threads

        def timed(unit: list[int]) -> tuple[Any, float]:
            began = time.monotonic()
            return work(unit), time.monotonic() - began

        for unit, (result, seconds) in zip(units, map_units(timed, units), strict=True):
            yield unit, result
            if bar is not None:
                size = sum(sizes[index] for index in unit)
                bar.advance(len(unit), size, int(result[1].sum()), seconds / at_once)

    def _encode_unit(
        self, every: Sequence[EncoderInput], queries: Queries, unit: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], int, list[bytes]]:
        """Encode some of all inputs.

        Returns:
            Their vectors, their numbers of tokens, how many tokens were computed, and a digest of
            all that each vector is computed from.
        """
        inputs = [every[index] for index in unit]
        # All of a unit have a router, or none has.
        groups = grouped(inputs) or [[place] for place in range(len(inputs))]
        windows = self._windows([inputs[places[0]] for places in groups])
        rows: list[Tokens] = []
        routes: list[Any] = []
        for places, own in zip(groups, windows, strict=True):
            routers = routers_of([inputs[place] for place in places])
            read: Any = [queries[router.text].state for router in routers]
            if routers and not self.engine.inside:
                read = np.stack(read)
            for window in own:
                added = routes_of(self.engine, read, routers[0]) if routers else []
                routes += added
                rows += [window] * (len(added) or 1)
        found, computed = self._run(rows, routes)
        vectors = np.empty((len(inputs), self.dim), dtype=np.float32)
        n_tokens = np.empty(len(inputs), dtype=np.int32)
        digests = [b""] * len(inputs)
        all_of = iter(np.concatenate(found))
        for places, own in zip(groups, windows, strict=True):
            read_tokens = [(row.ids, row.first, row.last, row.second) for row in own]
            for place in places:
                computed_from = repr((read_tokens, inputs[place].router)).encode()
                digests[place] = digest_bytes(computed_from, size=_DIGEST_BYTES)
            by_window = [[next(all_of) for _ in places] for _ in own]
            vectors[places] = self._averaged([np.stack(part) for part in by_window])
            n_tokens[places] = own[0].n_tokens
        return vectors, n_tokens, computed, digests

    def _queries(self, inputs: Sequence[EncoderInput]) -> list[Query]:
        """Return plain inputs as routers, each the mean of its windows."""
        windows = self._windows(inputs)
        if self.engine.reads_routers:
            return [Query(own[0], own[0].n_tokens) for own in windows]
        rows = iter(self._run([row for own in windows for row in own], queries=True)[0])
        means = [np.mean([next(rows) for _ in own], axis=0)[0] for own in windows]
        return [Query(mean, own[0].n_tokens) for mean, own in zip(means, windows, strict=True)]

    def _is_query(self, item: EncoderInput, queries: Queries) -> bool:
        """Return whether an input is a router that is known, as the encoder pools it, and whole."""
        if item.router is not None or item.context is not None or item.instruction:
            return False
        found = None if self.engine.inside else queries.get(item.text)
        return found is not None and found.n_tokens <= self.identity.max_length

    def _windows(self, inputs: Sequence[EncoderInput]) -> list[list[Tokens]]:
        with self._tokenizing:
            return self._tokenizer.windows(inputs)

    def _run(
        self, rows: Sequence[Tokens], routes: Sequence[Any] = (), *, queries: bool = False
    ) -> tuple[list[NDArray[np.float32]], int]:
        """Return (1, dim) for each row, or (routes, dim), and how many tokens were computed.

        Of an ensemble, members' vectors stand side by side. They are of length 1, so that over
        sqrt(N) what they make is too, and its cosine is the mean of theirs.
        """
        if len(self._engines) > 1 and (routes or queries):
            raise UserError(f"{self.name} is an ensemble, which takes no routers.")
        each = [self._run_by(engine, rows, routes, queries) for engine in self._engines]
        if len(each) == 1:
            return each[0]
        parts = zip(*(vectors for vectors, _ in each), strict=True)
        scale = np.float32(1 / np.sqrt(len(each)))
        return [np.hstack(own) * scale for own in parts], sum(computed for _, computed in each)

    def _run_by(
        self, engine: AnyEngine, rows: Sequence[Tokens], routes: Sequence[Any], queries: bool
    ) -> tuple[list[NDArray[np.float32]], int]:
        found: list[Any] = [None] * len(rows)
        computed = 0
        try:
            for done in engine.run(rows, check_cancelled, routes, queries=queries):
                counts = [n_routes(routes[row]) if routes else 1 for row in done.inputs]
                parts = np.split(done.vectors, np.cumsum(counts)[:-1])
                for row, vectors in zip(done.inputs, parts, strict=True):
                    found[row] = vectors
                computed += done.n_computed
        except OutOfMemoryError as error:
            raise LlmcondError(
                f"{self.name} {error} Encode with a smaller max_length (llmcond extract "
                f"--max-length), or see what fits: llmcond models --check {self.name}"
            ) from error
        return found, computed

    def _averaged(self, windows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the mean over windows, which are equally long; unit norm if asked."""
        if len(windows) == 1:
            return windows[0]
        means: NDArray[np.float32] = np.mean(windows, axis=0, dtype=np.float32)
        if self.identity.normalize:
            means /= np.linalg.norm(means, axis=1, keepdims=True)
        return means

    def format(self, item: EncoderInput) -> str:
        """Return the string that the tokenizer is given, with the model's own format around it.

        Raises:
            UserError: the input has an instruction, and the encoder takes none.
        """
        return self._tokenizer.format(item)


def _chunks(items: list[_Item], size: int) -> list[list[_Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _units(order: Sequence[int], inputs: Sequence[EncoderInput], size: int) -> Iterator[list[int]]:
    """Yield the inputs that are encoded together: those with a router apart from others.

    A unit has ``size`` inputs that go through the network, with up to ``_ROUTED`` routers.
    """
    plain = [index for index in order if inputs[index].router is None]
    yield from _chunks(plain, size)
    unit: list[int] = []
    bases: set[object] = set()
    for index in order:
        if inputs[index].router is None:
            continue
        base = unrouted(inputs[index])
        if (base not in bases and len(bases) == size) or len(unit) == _ROUTED:
            yield unit
            unit, bases = [], set()
        unit.append(index)
        bases.add(base)
    if unit:
        yield unit


def _loader(
    options: Callable[_P, EncoderOptions],
) -> Callable[Concatenate[str | os.PathLike[str], _P], Encoder]:
    """Return :func:`load_encoder`, whose keyword arguments are the fields of ``EncoderOptions``."""

    def load_encoder(model: str | os.PathLike[str], *args: _P.args, **kwargs: _P.kwargs) -> Encoder:
        return Encoder(resolve(os.fspath(model), options(*args, **kwargs)))

    given = [
        f"    {field.name}: {told.help}"
        for field in fields(EncoderOptions)
        if (told := option_of(field)) is not None
    ]
    signature = inspect.signature(options)
    model = inspect.Parameter(
        "model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str | os.PathLike[str]"
    )
    return public_function(  # type: ignore[return-value]  # model may be named, too
        load_encoder,
        "load_encoder",
        __name__,
        _DOC.format(options="\n".join(given)),
        signature.replace(
            parameters=[model, *signature.parameters.values()], return_annotation=Encoder
        ),
    )


_DOC = """Load an encoder by alias (``minilm``), hub name or folder.

Args:
    model: alias, ``OWNER/NAME`` on the Hugging Face hub, or a checkpoint's folder.
{options}

Raises:
    UserError: an unknown model, or an option that the model or machine cannot have.
    LlmcondError: the hub cannot be reached, or the weights are broken or too large.
"""

load_encoder = _loader(EncoderOptions)
