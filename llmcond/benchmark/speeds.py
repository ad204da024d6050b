"""How fast an encoder is here, one way and another, against its peers: in one run, in turn."""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from llmcond.benchmark.checks import (
    BOUNDS,
    Check,
    SkippedError,
    Vectors,
    alone_difference,
    distance,
    packing_difference,
    run_check,
    sharing_difference,
    ways,
)
from llmcond.benchmark.peers import Encode, PlainLoop, sentence_transformers
from llmcond.benchmark.shapes import branching_inputs, csts_inputs, long_inputs, shortened
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.engine import torch_engine
from llmcond.encoders.loading.architecture import build_on_meta, load_config
from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.encoders.loading.memory import POOLS
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import first_line

PLAIN = "plain transformers loop"
CONDITIONS = 8
#: Tokens of an input of C-STS length, about, and the share of the peak that is expected of a turn.
_TOKENS, _SHARE = 45, 0.4


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run.

    Attributes:
        seconds: that a turn takes, about; inputs are as many as that allows.
        rounds: turns of each way.
        product: rows of the square matrices whose product is measured.
        most: inputs at most.
    """

    seconds: float
    rounds: int
    product: int
    most: int

    @classmethod
    def of(cls, device: str, *, quick: bool) -> Scale:
        """Return what suits a device."""
        if quick:
            return cls(0.02, 1, 512, 64)
        return cls(1.0, 3, 8_192, 4_096) if device != "cpu" else cls(2.0, 3, 2_048, 1_024)


@dataclass(frozen=True, slots=True)
class Speed:
    """One way through an encoder on some inputs; medians over rounds.

    Attributes:
        precision: type of the weights: a dtype, or ``8bit`` or ``4bit``.
        inputs, way: what was encoded, and how.
        n, tokens: inputs, and tokens of them that count: without padding, each prefix as often as
            it occurs.
        peak_share: operations of the linear layers on all computed tokens, a second, as a share of
            the device's measured product of large matrices in the computing type.
        memory_gib: peak of the device's allocated memory; on a CPU of the process so far.
        difference: largest distance of a vector from that of the first way; None for peers.
        ratios: tokens/s against each other way on the same inputs, by its name.
    """

    model: str
    precision: str
    inputs: str
    way: str
    n: int
    tokens: int
    tokens_per_second: float
    inputs_per_second: float
    peak_share: float
    memory_gib: float
    load_seconds: float
    kernel: str
    difference: float | None
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not measured, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of the first way goes.

    Attributes:
        kernels: the ten that take longest (on a CPU: operators), each with its share of the
            time of all and how often it is called.
    """

    model: str
    precision: str
    inputs: str
    kernels: Sequence[tuple[str, float, int]]


@dataclass(frozen=True, slots=True)
class _Way:
    """A way through an encoder.

    Attributes:
        computed: tokens that go through the network for some inputs, padding included.
        within: what makes the encoder go this way.
        ours: whether vectors are those of the encoder, and can be compared.
    """

    name: str
    encode: Encode
    computed: Callable[[Sequence[EncoderInput]], int]
    within: Callable[[], AbstractContextManager[Any]]
    ours: bool = True


@dataclass(slots=True)
class _Loaded:
    """An encoder on its device; ``whole`` is its latent block before folding, on the CPU."""

    encoder: Encoder
    seconds: float
    whole: nn.Module | None

    @property
    def precision(self) -> str:
        identity = self.encoder.identity
        return identity.dtype if identity.quantize == "none" else identity.quantize

    @property
    def title(self) -> str:
        return f"{self.encoder.name}, {self.precision}"

    @contextmanager
    def unfolded(self) -> Iterator[None]:
        """Have the latent block as the original has it for a block."""
        network: Any = torch_engine(self.encoder).model.network
        folded = network.latent_attention_model
        network.latent_attention_model = self.whole.to(folded.scores.weight.device)  # type: ignore[union-attr]
        try:
            yield
        finally:
            network.latent_attention_model = folded
            self.whole.to("cpu")  # type: ignore[union-attr]


def run_encoder(
    resolved: ResolvedEncoder,
    scale: Scale,
    *,
    must_pack: bool,
    check: bool = True,
    profile: bool = False,
) -> Iterator[Check | Speed | Skipped | Profile]:
    """Load an encoder, ``check`` it, and yield its speeds; with ``profile`` where the time goes.

    An NV-Embed's ``resolved`` is not to be folded: that is done here, to compare both.

    Raises:
        LlmcondError: it cannot be loaded here.
    """
    loaded = _load(resolved)
    if check:
        yield from _checks(loaded, must_pack)
    every = list(_ways(loaded))
    for label, inputs, names in _inputs(loaded, scale):
        chosen = [way for way in every if names is None or way.name in names]
        yield from _measure(loaded, label, inputs, chosen, scale)
        if profile:
            try:
                yield _profile(loaded, label, inputs)
            except RuntimeError as error:  # as where a machine does not let kernels be seen
                yield Skipped(f"{loaded.title}, {label}: profile", first_line(error))


def _load(resolved: ResolvedEncoder) -> _Loaded:
    began = time.perf_counter()
    encoder = Encoder(resolved)
    network: Any = torch_engine(encoder).model.network
    whole: nn.Module | None = getattr(network, "latent_attention_model", None)
    if whole is not None:
        folded: Any = copy.deepcopy(whole)
        folded.fold()
        network.latent_attention_model = folded
        whole.to("cpu")
    synchronize(resolved.device)
    return _Loaded(encoder, time.perf_counter() - began, whole)


def _checks(loaded: _Loaded, must_pack: bool) -> Iterator[Check]:
    encoder, bound = loaded.encoder, BOUNDS[loaded.precision]
    inputs = csts_inputs(16, bool(encoder.identity.instruction_format))

    def packed() -> tuple[float, str]:
        if not (torch_engine(encoder).packs or must_pack):
            raise SkippedError("its rows are padded: packing does not give the same vectors")
        return packing_difference(encoder, inputs)

    def folded() -> tuple[float, str]:
        vectors = encoder.encode_counted(inputs).vectors
        with loaded.unfolded():
            return distance(vectors, encoder.encode_counted(inputs).vectors), ""

    yield run_check(f"{loaded.title}: packed = padded", bound, packed)
    alone = partial(alone_difference, encoder, inputs)
    yield run_check(f"{loaded.title}: alone = in a batch", bound, alone)
    if encoder.resolved.shares_prefixes:
        name = f"{loaded.title}: shared prefixes = not shared"
        yield run_check(name, bound, partial(sharing_difference, encoder, inputs))
    if loaded.whole is not None:
        yield run_check(f"{loaded.title}: folded = not folded", bound, folded)


# -- ways --------------------------------------------------------------------------------------


def _ways(loaded: _Loaded) -> Iterator[_Way]:
    encoder = loaded.encoder
    engine = torch_engine(encoder)

    def computed(inputs: Sequence[EncoderInput]) -> int:
        return encoder.encode_counted(inputs).n_computed

    def own(name: str, within: Callable[[], AbstractContextManager[Any]]) -> _Way:
        return _Way(name, encoder.encode, computed, within)

    yield own("packed" if engine.packs else "padded", partial(ways, engine))
    if engine.shares:
        yield own("packed, shared prefixes", partial(ways, engine, shares=True))
    if engine.packs:
        yield own("padded", partial(ways, engine, packs=False))
    if loaded.whole is not None:
        yield own("packed, not folded", loaded.unfolded)
    plain = loaded.unfolded if loaded.whole is not None else nullcontext
    loop = PlainLoop(encoder, engine.model.network)
    yield _Way(PLAIN, loop.encode, loop.computed, plain, ours=False)
    try:
        peer = sentence_transformers(loop, encoder)
    except ImportError:
        return
    sorted_computed = partial(loop.computed, by_length=True)
    yield _Way("sentence-transformers", peer, sorted_computed, plain, ours=False)


def _inputs(
    loaded: _Loaded, scale: Scale
) -> Iterator[tuple[str, list[EncoderInput], tuple[str, ...] | None]]:
    """Yield what is encoded, and by which ways; None: all."""
    encoder = loaded.encoder
    instruct, length = bool(encoder.identity.instruction_format), encoder.identity.max_length
    dtype = TORCH_DTYPES[encoder.identity.dtype]
    flops = linear_flops(encoder.resolved)
    rate = _SHARE * product_peak(encoder.resolved.device, dtype, scale.product) / flops

    def count(tokens: int, least: int) -> int:
        return int(min(max(scale.seconds * rate / tokens, least), scale.most))

    n = count(_TOKENS, 16) // CONDITIONS * CONDITIONS
    yield "C-STS", csts_inputs(n, instruct), None
    whole = long_inputs(count(length, 4), instruct)
    long = [
        shortened(one, length, lambda item: encoder._tokenizer([item])[0].n_tokens) for one in whole
    ]
    yield f"{length} tokens", long, ("packed", "padded", PLAIN)
    if torch_engine(encoder).shares:
        inputs = branching_inputs(n, CONDITIONS, instruct)
        yield f"{CONDITIONS} conditions a sentence", inputs, ("packed", "packed, shared prefixes")


# -- measuring ---------------------------------------------------------------------------------


def _measure(
    loaded: _Loaded, label: str, inputs: list[EncoderInput], chosen: list[_Way], scale: Scale
) -> Iterator[Speed | Skipped]:
    encoder = loaded.encoder
    device, dtype = encoder.resolved.device, TORCH_DTYPES[encoder.identity.dtype]
    computed: dict[str, int] = {}
    vectors: dict[str, Vectors] = {}
    turns: dict[str, list[tuple[float, float]]] = {way.name: [] for way in chosen}
    memory: dict[str, float] = {}
    for way in chosen:
        try:
            with way.within():
                computed[way.name] = way.computed(inputs)
                vectors[way.name] = way.encode(inputs)
        except Exception as error:  # of a peer too; as where memory runs out
            what = f"{loaded.title}, {label}: {way.name}"
            yield Skipped(what, f"{type(error).__name__}: {first_line(error)}")
    here = [way for way in chosen if way.name in vectors]
    for _ in range(scale.rounds):
        for way in here:
            with way.within():
                peak = product_peak(device, dtype, scale.product)
                synchronize(device)
                if device != "cpu":
                    torch.cuda.reset_peak_memory_stats(device)
                began = time.perf_counter()
                way.encode(inputs)
                synchronize(device)
                turns[way.name].append((time.perf_counter() - began, peak))
                memory[way.name] = peak_memory(device)
    if not here:
        return
    tokens = int(encoder.encode_counted(inputs).n_tokens.sum())
    flops = linear_flops(encoder.resolved)
    for way in here:
        seconds = statistics.median(turn for turn, _ in turns[way.name])
        shares = [flops * computed[way.name] / turn / peak for turn, peak in turns[way.name]]
        yield Speed(
            model=encoder.name,
            precision=loaded.precision,
            inputs=label,
            way=way.name,
            n=len(inputs),
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            inputs_per_second=len(inputs) / seconds,
            peak_share=statistics.median(shares),
            memory_gib=memory[way.name],
            load_seconds=loaded.seconds,
            kernel=torch_engine(encoder).kernel_name,
            difference=distance(vectors[way.name], vectors[here[0].name]) if way.ours else None,
            ratios={
                other.name: _ratio(turns[way.name], turns[other.name])
                for other in here
                if other is not way
            },
        )


def _ratio(turns: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    pairs = zip(turns, others, strict=True)
    return statistics.median(theirs / mine for (mine, _), (theirs, _) in pairs)


def _profile(loaded: _Loaded, label: str, inputs: list[EncoderInput]) -> Profile:
    encoder = loaded.encoder
    gpu = encoder.resolved.device != "cpu"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with ways(torch_engine(encoder)), torch.profiler.profile(activities=kinds) as profiler:
        encoder.encode_counted(inputs)
        synchronize(encoder.resolved.device)
    timed = [
        (one.key, one.self_device_time_total if gpu else one.self_cpu_time_total, one.count)
        for one in profiler.key_averages()
        # Of a GPU the kernels, not also the operators that they are of.
        if not gpu or one.device_type.name == "CUDA"
    ]
    every = sum(took for _, took, _ in timed) or 1.0
    longest = sorted(timed, key=lambda one: -one[1])[:10]
    kernels = [(name, took / every, count) for name, took, count in longest]
    return Profile(encoder.name, loaded.precision, label, kernels)


def product_peak(device: str, dtype: torch.dtype, size: int) -> float:
    """Return a device's product of matrices of ``size`` rows now, in FLOP/s: the best of a few."""
    first, second = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        first @ second
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def linear_flops(resolved: ResolvedEncoder) -> float:
    """Return the operations of the linear layers for a token; those that pool are left out."""
    network = build_on_meta(load_config(resolved.checkpoint, resolved.identity.attention))
    layers = (
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not any(part in name for part in POOLS)
    )
    return float(sum(2 * layer.in_features * layer.out_features for layer in layers))


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def peak_memory(device: str) -> float:
    """Return the peak of a device's allocated memory in GiB; on a CPU of the process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows has no such module
        import psutil

        memory = psutil.Process().memory_info()
        return float(getattr(memory, "peak_wset", memory.rss)) / 2**30
    # In KiB, but on macOS in bytes.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
