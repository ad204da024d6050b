"""The speed of an encoder on this machine in several ways, compared with its peers, as a page."""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmcond.base.errors import first_line
from llmcond.base.output import Table
from llmcond.benchmark.checks import (
    BOUNDS,
    Check,
    SkippedError,
    Vectors,
    alone_difference,
    distance,
    engine_settings,
    packing_difference,
    run_check,
    sharing_difference,
)
from llmcond.benchmark.shapes import branching_inputs, csts_inputs, long_inputs, shorten_input
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.loading import (
    POOLING_MODULES,
    TORCH_DTYPES,
    build_on_meta,
    load_config,
    load_tokenizer,
)
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput
from llmcond.encoders.torch.engine import torch_engine
from llmcond.encoders.torch.forward import NVEmbedModel

Encode = Callable[[Sequence[EncoderInput]], NDArray[np.float32]]
#: The usual batch size.
BATCH = 32


class PlainLoop:
    """A plain loop: batches in the given order, padded to the longest text, and pooled.

    Attributes:
        tokenizer: The checkpoint's tokenizer of transformers.
        network: The network, without an engine's changes.
    """

    def __init__(self, encoder: Encoder, network: Any) -> None:
        resolved = encoder.resolved
        self._encoder, self.network = encoder, network
        self._device, self._length = resolved.device, resolved.identity.max_length
        self._last = resolved.identity.pooling == "last"
        config = load_config(resolved.checkpoint, resolved.identity.attention)
        self.tokenizer = load_tokenizer(resolved.checkpoint, config)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = "right"

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return the token ids and the attention mask of a batch, (texts, longest) each."""
        truncation = {"truncation": True, "max_length": self._length}
        encoding = self.tokenizer(list(texts), padding=True, return_tensors="pt", **truncation)
        return {key: encoding[key] for key in ("input_ids", "attention_mask")}

    def pooled(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the vectors, (texts, dim) in float32, of a batch, on the device."""
        ids, mask = (batch[key].to(self._device) for key in ("input_ids", "attention_mask"))
        if isinstance(self.network, NVEmbedModel):
            backbone = self.network.embedding_model(input_ids=ids, attention_mask=mask)
            block = self.network.latent_attention_model
            # One text at a time, since the original computes the latents' keys and values for each
            # text.
            hidden = torch.cat([block(row[None]) for row in backbone.last_hidden_state])
        else:
            hidden = self.network(input_ids=ids, attention_mask=mask).last_hidden_state
        if self._last:
            rows = torch.arange(len(ids), device=ids.device)
            vectors = hidden[rows, mask.sum(dim=1) - 1].float()
        else:
            weights = mask.unsqueeze(-1)
            vectors = (hidden * weights).sum(dim=1).float() / weights.sum(dim=1)
        return nn.functional.normalize(vectors, dim=1)

    @torch.inference_mode()
    def encode(self, inputs: Sequence[EncoderInput]) -> NDArray[np.float32]:
        """Return the vectors, (n, dim), of inputs."""
        texts = [self._encoder.format(item) for item in inputs]
        vectors = []
        for start in range(0, len(texts), BATCH):
            vectors.append(self.pooled(self.tokenize(texts[start : start + BATCH])).cpu())
        return np.asarray(torch.cat(vectors).numpy())

    def computed(self, inputs: Sequence[EncoderInput], *, by_length: bool = False) -> int:
        """Return the number of tokens that the network computes, with padding."""
        texts = [self._encoder.format(item) for item in inputs]
        if by_length:  # the order of sentence-transformers
            texts.sort(key=len, reverse=True)
        batches = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
        return sum(self.tokenize(batch)["input_ids"].numel() for batch in batches)


class _Module(nn.Module):
    """The plain loop's network as the one module of a SentenceTransformer."""

    def __init__(self, loop: PlainLoop) -> None:
        super().__init__()
        self.loop, self.tokenizer = loop, loop.tokenizer

    def preprocess(self, inputs: Sequence[str], **kwargs: Any) -> dict[str, Tensor]:
        return self.loop.tokenize(inputs)

    tokenize = preprocess  # the name in sentence-transformers before version 6

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features["sentence_embedding"] = self.loop.pooled(features)
        return features


def sentence_transformers(loop: PlainLoop, encoder: Encoder) -> Encode:
    """Return ``SentenceTransformer.encode`` over the plain loop's network.

    Raises:
        ModuleNotFoundError: sentence-transformers is not installed.
    """
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(modules=[_Module(loop)], device=encoder.resolved.device)

    def encode(inputs: Sequence[EncoderInput]) -> NDArray[np.float32]:
        texts = [encoder.format(item) for item in inputs]
        return np.asarray(peer.encode(texts, batch_size=BATCH, show_progress_bar=False))

    return encode


PLAIN = "plain transformers loop"
CONDITIONS = 8
#: The approximate number of tokens of an input of C-STS length, and the fraction of the peak that a
#: turn is expected to reach.
_TOKENS_PER_INPUT, _PEAK_SHARE = 45, 0.4
#: The expected speed of an encoder that is so small that the tokenizer limits it.
_MAX_TOKENS_PER_SECOND = 400_000


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a benchmark.

    Attributes:
        seconds: The approximate time of a turn, which determines the number of inputs.
        rounds: The number of turns of each way.
        product: The rows of the square matrices whose product is measured.
        max_inputs: The largest number of inputs.
        lengths: The lengths, in tokens, of the long inputs.
    """

    seconds: float
    rounds: int
    product: int
    max_inputs: int
    lengths: Sequence[int] = (512,)

    @classmethod
    def of(cls, device: str, lengths: Sequence[int], *, quick: bool) -> Scale:
        """Return the scale for a device."""
        if quick:
            return cls(0.02, 1, 512, 64, lengths)
        if device == "cpu":
            return cls(2.0, 3, 2_048, 1_024, lengths)
        return cls(1.0, 3, 8_192, 4_096, lengths)


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one way to encode inputs, as medians over rounds.

    Attributes:
        model: The name of the encoder.
        precision: The type of the weights: a dtype, ``8bit`` or ``4bit``.
        inputs: The kind of inputs.
        way: The way in which they were encoded.
        n: The number of inputs.
        tokens: The number of their tokens without padding, where each prefix counts as often as it
            occurs.
        tokens_per_second: The speed in tokens.
        inputs_per_second: The speed in inputs.
        peak_share: Operations per second of the linear layers on all computed tokens, as a fraction
            of the device's measured product of large matrices in the same type.
        memory_gib: The peak of the device's allocated memory; on a CPU, of the process so far.
        load_seconds: The time to load the encoder.
        kernel: The attention kernel.
        difference: The largest distance of a vector to that of the first way; None for peers.
        ratios: The ratio of tokens/s to each other way on the same inputs, by its name.
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
class _Way:
    """A way to encode inputs.

    Attributes:
        name: Its name.
        encode: Encodes inputs.
        computed: Returns the number of tokens that the network computes for inputs, with padding.
        within: Returns a context in which the encoder is set to this way.
        ours: Whether the vectors are those of the encoder, and can be compared.
    """

    name: str
    encode: Encode
    computed: Callable[[Sequence[EncoderInput]], int]
    within: Callable[[], AbstractContextManager[Any]]
    ours: bool = True


@dataclass(slots=True)
class _Loaded:
    """An encoder on its device. ``whole`` is its latent block before folding, on the CPU."""

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
        """Use the latent block without folding, as in the original, during the block."""
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
) -> Iterator[Check | Speed]:
    """Load an encoder, ``check`` it, and yield its speeds; a failed timing is a check not run.

    For an NV-Embed, ``resolved`` must not fold the latent block. This function folds it, to compare
    both.

    Raises:
        LlmcondError: The encoder cannot be loaded on this machine.
    """
    loaded = _load(resolved)
    if check:
        yield from _run_checks(loaded, must_pack)
    all_ways = list(_list_ways(loaded))
    for label, inputs, names in _list_inputs(loaded, scale):
        ways_of_inputs = [way for way in all_ways if names is None or way.name in names]
        yield from _measure(loaded, label, inputs, ways_of_inputs, scale)


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


def _run_checks(loaded: _Loaded, must_pack: bool) -> Iterator[Check]:
    encoder, bound = loaded.encoder, BOUNDS[loaded.precision]
    inputs = csts_inputs(16, bool(encoder.identity.instruction_format))

    def packed() -> tuple[float, str]:
        if not (torch_engine(encoder).packs or must_pack):
            raise SkippedError("its rows are padded, since packed rows have other vectors")
        return packing_difference(encoder, inputs)

    def folded() -> tuple[float, str]:
        vectors = encoder.encode_with_counts(inputs).vectors
        with loaded.unfolded():
            return distance(vectors, encoder.encode_with_counts(inputs).vectors), ""

    yield run_check(f"{loaded.title}: packed = padded", bound, packed)
    alone = partial(alone_difference, encoder, inputs)
    yield run_check(f"{loaded.title}: alone = in a batch", bound, alone)
    if encoder.resolved.shares_prefixes:
        name = f"{loaded.title}: shared prefixes = not shared"
        yield run_check(name, bound, partial(sharing_difference, encoder, inputs))
    if loaded.whole is not None:
        yield run_check(f"{loaded.title}: folded = not folded", bound, folded)


# -- ways --------------------------------------------------------------------------------------


def _list_ways(loaded: _Loaded) -> Iterator[_Way]:
    encoder = loaded.encoder
    engine = torch_engine(encoder)

    def computed(inputs: Sequence[EncoderInput]) -> int:
        return encoder.encode_with_counts(inputs).n_computed

    def engine_way(name: str, within: Callable[[], AbstractContextManager[Any]]) -> _Way:
        return _Way(name, encoder.encode, computed, within)

    yield engine_way("packed" if engine.packs else "padded", partial(engine_settings, engine))
    if engine.shares_prefixes:
        yield engine_way("packed, shared prefixes", partial(engine_settings, engine, shares=True))
    if engine.packs:
        yield engine_way("padded", partial(engine_settings, engine, packs=False))
    if loaded.whole is not None:
        yield engine_way("packed, not folded", loaded.unfolded)
    plain = loaded.unfolded if loaded.whole is not None else nullcontext
    loop = PlainLoop(encoder, engine.model.network)
    yield _Way(PLAIN, loop.encode, loop.computed, plain, ours=False)
    try:
        peer = sentence_transformers(loop, encoder)
    except ImportError:
        return
    sorted_computed = partial(loop.computed, by_length=True)
    yield _Way("sentence-transformers", peer, sorted_computed, plain, ours=False)


def _list_inputs(
    loaded: _Loaded, scale: Scale
) -> Iterator[tuple[str, list[EncoderInput], tuple[str, ...] | None]]:
    """Yield the kinds of inputs, the inputs, and the names of the ways to measure; None: all."""
    encoder = loaded.encoder
    instruct, limit = bool(encoder.identity.instruction_format), encoder.identity.max_length
    dtype = TORCH_DTYPES[encoder.identity.dtype]
    flops = linear_flops(encoder.resolved)
    peak = product_peak(encoder.resolved.device, dtype, scale.product)
    rate = min(_PEAK_SHARE * peak / flops, _MAX_TOKENS_PER_SECOND)

    def count(tokens: int, least: int) -> int:
        return int(min(max(scale.seconds * rate / tokens, least), scale.max_inputs))

    n = count(_TOKENS_PER_INPUT, 16) // CONDITIONS * CONDITIONS
    yield "C-STS", csts_inputs(n, instruct), None
    for length in dict.fromkeys(min(length, limit) for length in scale.lengths):
        long_texts = long_inputs(count(length, 4), instruct)
        shortened_texts = [
            shorten_input(text, length, lambda item: encoder._tokenizer([item])[0].n_tokens)
            for text in long_texts
        ]
        yield f"{length} tokens", shortened_texts, ("packed", "padded", PLAIN)
    if torch_engine(encoder).shares_prefixes:
        inputs = branching_inputs(n, CONDITIONS, instruct)
        yield f"{CONDITIONS} conditions a sentence", inputs, ("packed", "packed, shared prefixes")


# -- measuring ---------------------------------------------------------------------------------


def _measure(
    loaded: _Loaded,
    label: str,
    inputs: list[EncoderInput],
    candidate_ways: list[_Way],
    scale: Scale,
) -> Iterator[Speed | Check]:
    encoder = loaded.encoder
    device, dtype = encoder.resolved.device, TORCH_DTYPES[encoder.identity.dtype]
    computed: dict[str, int] = {}
    vectors: dict[str, Vectors] = {}
    turns: dict[str, list[tuple[float, float]]] = {way.name: [] for way in candidate_ways}
    memory: dict[str, float] = {}
    for way in candidate_ways:
        try:
            with way.within():
                computed[way.name] = way.computed(inputs)
                vectors[way.name] = way.encode(inputs)
        except Exception as error:  # for example out of memory, or any error of a peer
            what = f"{loaded.title}, {label}: {way.name}"
            yield Check(what, None, None, None, f"{type(error).__name__}: {first_line(error)}")
    working_ways = [way for way in candidate_ways if way.name in vectors]
    for _ in range(scale.rounds):
        for way in working_ways:
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
    if not working_ways:
        return
    tokens = int(encoder.encode_with_counts(inputs).n_tokens.sum())
    flops = linear_flops(encoder.resolved)
    for way in working_ways:
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
            difference=distance(vectors[way.name], vectors[working_ways[0].name])
            if way.ours
            else None,
            ratios={
                other.name: statistics.median(
                    its / mine
                    for (mine, _), (its, _) in zip(turns[way.name], turns[other.name], strict=True)
                )
                for other in working_ways
                if other is not way
            },
        )


def product_peak(device: str, dtype: torch.dtype, size: int) -> float:
    """Measure the product of matrices of ``size`` rows on a device, in FLOP/s: best of five."""
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
    """Return the operations of the linear layers per token, without layers that pool."""
    network = build_on_meta(load_config(resolved.checkpoint, resolved.identity.attention))
    layers = (
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not any(part in name for part in POOLING_MODULES)
    )
    return float(sum(2 * layer.in_features * layer.out_features for layer in layers))


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def peak_memory(device: str) -> float:
    """Return the peak of a device's allocated memory in GiB; on a CPU, that of the process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows has no such module
        import psutil

        memory = psutil.Process().memory_info()
        return float(getattr(memory, "peak_wset", memory.rss)) / 2**30
    # ru_maxrss is in bytes on macOS, and in KiB on other systems.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


_VERDICTS = {True: "yes", False: "**NO**", None: "not run"}


def page(machine: dict[str, Any], checks: Sequence[Check], speeds: Sequence[Speed]) -> str:
    """Return the machine, the checks and the speeds as a page."""
    facts = {key: value for key, value in machine.items() if key != "versions"}
    machine_text = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = ["# llmcond bench", "", f"{machine_text}.", "", f"{versions}.", ""]
    rows = [
        {
            "check": check.name,
            "difference": "" if check.difference is None else f"{check.difference:.1e}",
            "at most": "" if check.bound is None else f"{check.bound:.0e}",
            "passed": _VERDICTS[check.passed],
            "note": check.note,
        }
        for check in checks
    ]
    if rows:
        lines += ["## Checks", "", Table.of_rows(rows).document("markdown")]
    return "\n".join([*lines, *_speed_sections(speeds)]) + "\n"


def _speed_sections(speeds: Sequence[Speed]) -> Iterator[str]:
    for (model, precision), group in groupby(speeds, lambda one: (one.model, one.precision)):
        rows = list(group)
        loaded = f"Loaded in {rows[0].load_seconds:.1f} s. Attention: {rows[0].kernel}."
        yield from ("", f"## {model}, {precision}", "", loaded, "")
        yield Table.of_rows([_speed_row(speed) for speed in rows]).document("markdown")


def _speed_row(speed: Speed) -> dict[str, str]:
    ratio = speed.ratios.get(PLAIN)
    return {
        "inputs": f"{speed.n:,} of {speed.inputs}",
        "way": speed.way,
        "tokens/s": f"{speed.tokens_per_second:,.0f}",
        "inputs/s": f"{speed.inputs_per_second:,.1f}",
        "times the plain loop": "" if ratio is None else f"{ratio:.2f}",
        "share of the peak": f"{speed.peak_share:.0%}",
        "peak memory GiB": f"{speed.memory_gib:.2f}",
        "difference": "" if speed.difference is None else f"{speed.difference:.1e}",
    }
