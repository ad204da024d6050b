"""Checks on small encoders with random weights: is what this device computes right?

Each gives the largest difference it found, to be held against a bound that is told with it. Between
vectors that is the distance of two vectors of unit length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmcond.benchmark.golden import golden_differences
from llmcond.benchmark.shapes import Shape, csts_inputs, long_inputs, random_encoder
from llmcond.encoders import EncoderOptions
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.engine import Engine, torch_engine, try_engine
from llmcond.encoders.engine.tokenizing import InputTokenizer, Tokens
from llmcond.encoders.loading.architecture import load_config, load_tokenizer
from llmcond.encoders.loading.loading import load_model
from llmcond.encoders.loading.quantization import installed
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import Dtype, EncoderInput, Quantize
from llmcond.errors import first_line
from llmcond.files import digest_bytes
from llmcond.system import processes

Vectors = NDArray[np.float32]
DtypeOrAuto = Dtype | Literal["auto"]

#: Most that vectors of one text may differ by, by what its weights are in: rounding stays below,
#: a text that sees another, or one wrong position, is above.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.1, "8bit": 0.2, "4bit": 0.1}
_INPUTS = 24


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, and whether it did.

    Attributes:
        name: what was compared, and of which encoder.
        difference: the largest that was found; None where it was not run, or failed on the way.
        bound: what it may be at most.
        passed: None where it was not run.
        note: why it was not run or failed; or what more there is to say.
    """

    name: str
    difference: float | None
    bound: float | None
    passed: bool | None
    note: str = ""


class SkippedError(Exception):
    """What a check needs is not there."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where checks are run.

    Attributes:
        device: ``cpu`` or ``cuda:N``.
        folder: for the settings of small encoders.
    """

    device: str
    folder: Path

    @property
    def cuda(self) -> bool:
        """Return whether the device is a GPU."""
        return self.device != "cpu"

    def resolve(
        self,
        shape: Shape,
        dtype: DtypeOrAuto = "float32",
        quantize: Quantize = "none",
        device: str | None = None,
        **options: Any,
    ) -> ResolvedEncoder:
        """Return a small encoder, with the same weights for every device."""
        given = EncoderOptions(dtype=dtype, quantize=quantize, **options)
        device = device or self.device
        return random_encoder(shape, self.folder, given, device, small=True, drawn_on="cpu")


#: Gives the difference that was found, and a note.
Measure = Callable[[], tuple[float, str]]


def run_checks(bench: Bench) -> Iterator[Check]:
    """Yield the outcome of each check; one that fails does not stop the others."""
    return starmap(run_check, _all(bench))


def run_check(name: str, bound: float, measure: Measure) -> Check:
    """Run one check."""
    try:
        difference, note = measure()
    except SkippedError as reason:
        return Check(name, None, bound, None, str(reason))
    except ModuleNotFoundError as error:
        return Check(name, None, bound, None, f"needs {error.name}, which is not installed")
    except Exception as error:  # whatever a device can make fail
        return Check(name, None, bound, False, f"{type(error).__name__}: {first_line(error)}")
    return Check(name, difference, bound, difference <= bound, note)  # NaN does not pass


def _all(bench: Bench) -> Iterator[tuple[str, float, Measure]]:
    exact = BOUNDS["float32"]
    dtype: DtypeOrAuto = "auto" if bench.cuda else "bfloat16"
    own, other = partial(_own, bench), partial(_other, bench)
    for shape in get_args(Shape):
        yield f"{shape}: packed = padded", exact, partial(own, packing_difference, shape)
        # The kernel for uneven lengths computes in 16 bit only.
        in_16_bit = partial(own, packing_difference, shape, dtype)
        yield f"{shape}: packed = padded, 16 bit", BOUNDS["bfloat16"], in_16_bit
        yield f"{shape}: alone = in a batch", exact, partial(own, alone_difference, shape)
        yield f"{shape}: CUDA = CPU", exact, partial(other, shape, device="cpu")
    shared = partial(own, sharing_difference, "mistral-7b")
    yield "mistral-7b: shared prefixes = not shared", exact, shared
    folded = partial(other, "nv-embed-v2", fold_latents=False)
    yield "nv-embed-v2: folded = not folded", exact, folded
    stored = partial(golden_differences, bench.device, bench.folder)
    yield "nv-embed-v2: stored vectors", exact, stored
    # LLM.int8 rounds activations too, token by token.
    yield "8bit = its weights dequantised", 0.1, partial(_dequantized, bench, "8bit")
    rounding = BOUNDS["bfloat16"] if _rounds_in_4bit(bench) else 1e-3
    yield "4bit = its weights dequantised", rounding, partial(_dequantized, bench, "4bit")
    # Adam divides by the root of a mean square, so that rounding grows over the steps.
    yield "a head fitted on CUDA = on the CPU", 1e-2, partial(_head, bench)
    yield "ten LoRA steps on 4 bit: last loss / first", 0.9, partial(_lora, bench)
    yield "out of memory: halved batches = whole ones", exact, partial(_out_of_memory, bench)
    yield "two processes on one device = one", exact, partial(_two_processes, bench)


# -- what is compared --------------------------------------------------------------------------


def distance(first: Vectors, second: Vectors) -> float:
    """Return the largest distance between vectors of a row each."""
    return float(np.linalg.norm(first - second, axis=1).max())


@contextmanager
def ways(engine: Engine, *, packs: bool | None = None, shares: bool = False) -> Iterator[None]:
    """Run an engine some other way for a block: in padded batches, or sharing prefixes."""
    before = engine.packs, engine.shares
    engine.packs, engine.shares = engine.packs if packs is None else packs, shares
    try:
        yield
    finally:
        engine.packs, engine.shares = before


def packing_difference(encoder: Encoder, inputs: Sequence[EncoderInput]) -> tuple[float, str]:
    """Return how far packed vectors are from padded ones, and what attends."""
    if not torch_engine(encoder).packs:
        raise RuntimeError("packed rows gave other vectors when it was loaded, so rows are padded")
    with ways(torch_engine(encoder)):
        packed = encoder.encode_counted(inputs).vectors
    with ways(torch_engine(encoder), packs=False):
        padded = encoder.encode_counted(inputs).vectors
    return distance(packed, padded), torch_engine(encoder).kernel_name


def sharing_difference(encoder: Encoder, inputs: Sequence[EncoderInput]) -> tuple[float, str]:
    """Return how far vectors are from those without shared prefixes, and what sharing saved."""
    with ways(torch_engine(encoder), shares=True):
        shared = encoder.encode_counted(inputs)
    with ways(torch_engine(encoder)):
        whole = encoder.encode_counted(inputs)
    if not shared.n_computed < whole.n_computed:
        raise RuntimeError("no prefix was shared")
    saved = f"{whole.n_computed / shared.n_computed:.1f} times fewer tokens"
    return distance(shared.vectors, whole.vectors), saved


def alone_difference(encoder: Encoder, inputs: Sequence[EncoderInput]) -> tuple[float, str]:
    """Return how far vectors are from those of each input by itself."""
    together = encoder.encode_counted(inputs).vectors
    alone = np.concatenate([encoder.encode_counted([one]).vectors for one in inputs])
    return distance(together, alone), ""


def _inputs(resolved: ResolvedEncoder, n: int = _INPUTS) -> list[EncoderInput]:
    return csts_inputs(n, bool(resolved.identity.instruction_format))


def _own(
    bench: Bench,
    measure: Callable[[Encoder, Sequence[EncoderInput]], tuple[float, str]],
    shape: Shape,
    dtype: DtypeOrAuto = "float32",
) -> tuple[float, str]:
    """Compare ways of one small encoder."""
    resolved = bench.resolve(shape, dtype)
    return measure(Encoder(resolved), _inputs(resolved))


def _other(bench: Bench, shape: Shape, **options: Any) -> tuple[float, str]:
    """Compare a small encoder with one of other options, and the same weights."""
    if "device" in options:
        _need_cuda(bench)
    resolved = bench.resolve(shape)
    inputs = _inputs(resolved)
    other = _encode(bench.resolve(shape, **options), inputs)
    return distance(_encode(resolved, inputs), other), ""


def _need_cuda(bench: Bench) -> None:
    if not bench.cuda:
        raise SkippedError(f"needs CUDA, and this is {bench.device}")


def _need(*libraries: str) -> None:
    absent = [name for name in libraries if not installed(name)]
    if absent:
        raise SkippedError(f"needs {' and '.join(absent)}, which is not installed")


# -- quantised weights -------------------------------------------------------------------------


def _dequantized(bench: Bench, quantize: Quantize) -> tuple[float, str]:
    """Compare with a network of float32 whose weights are the quantised ones' values."""
    _need("bitsandbytes", "accelerate")
    quantized = bench.resolve("mistral-7b", "float32", quantize)
    whole = bench.resolve("mistral-7b", "float32")
    loaded, plain = (
        load_model(resolved, load_config(resolved.checkpoint, resolved.identity.attention))
        for resolved in (quantized, whole)
    )
    count = 0
    with torch.no_grad():
        # Before it is run: on a CPU bitsandbytes lays its weights out anew then.
        for name, module in plain.network.named_modules():
            values = dequantized(loaded.network.get_submodule(name))
            if values is not None:
                module.weight.copy_(values)
                count += 1
    if not count:
        raise RuntimeError("no weight was quantised")
    rows = _tokens(quantized, _inputs(quantized))
    found = [
        _run(try_engine(model, resolved, 0), rows)
        for model, resolved in ((loaded, quantized), (plain, whole))
    ]
    return distance(*found), f"{count} matrices"


def _rounds_in_4bit(bench: Bench) -> bool:
    """Return whether bitsandbytes multiplies 4-bit weights in bfloat16, whatever is asked for.

    It does so on CPUs that have AVX512-BF16.
    """
    if bench.cuda or not installed("bitsandbytes"):
        return False
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())  # type: ignore[no-untyped-call]


def dequantized(module: nn.Module) -> Tensor | None:
    """Return the values of a quantised layer's weights, (out, in); None for any other module."""
    weight: Any = getattr(module, "weight", None)
    if getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        values: Tensor = dequantize_4bit(weight.data, weight.quant_state)
        return values
    if getattr(weight, "SCB", None) is not None:
        scaled: Tensor = weight.data.float() * (weight.SCB.float() / 127)[:, None]
        return scaled
    return None


def _tokens(resolved: ResolvedEncoder, inputs: Sequence[EncoderInput]) -> list[Tokens]:
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    tokenizer = load_tokenizer(resolved.checkpoint, config)
    return InputTokenizer(tokenizer, resolved.identity, resolved.checkpoint.name)(inputs)


def _run(engine: Engine, rows: Sequence[Tokens]) -> Vectors:
    vectors = np.empty((len(rows), engine.dim), dtype=np.float32)
    for pooled in engine.run(rows):
        vectors[list(pooled.inputs)] = pooled.vectors
    return vectors


# -- training ----------------------------------------------------------------------------------


def _head(bench: Bench) -> tuple[float, str]:
    """Fit a linear head on the same features on both devices; compare its embeddings."""
    _need_cuda(bench)
    fitted = [fit_head("cpu"), fit_head(bench.device)]
    return float(np.abs(fitted[0] - fitted[1]).max() / np.abs(fitted[0]).max()), ""


def fit_head(device: str) -> Vectors:
    """Return the weights of a linear head after three epochs on drawn features, (32, 128)."""
    from llmcond.heads.dense import Linear
    from llmcond.heads.fit import fit_by_gradient
    from llmcond.heads.pairs import PairArrays
    from llmcond.heads.recipes import Recipe

    chance = np.random.default_rng(0)
    first, second = chance.standard_normal((2, 512, 128), dtype=np.float32)
    pairs = PairArrays(first, second, chance.random(512))
    settings = Linear.Settings(
        dim=32, dropout=0.0, learning_rate=1e-3, batch_size=64, epochs=3, patience=3
    )
    recipe = Recipe("linear", "", "", "linear", Linear, settings)
    module, _ = fit_by_gradient(recipe, pairs, None, 0, lambda *_: None, device)
    return np.asarray(module.get_parameter("weight").detach().cpu().numpy())


def _lora(bench: Bench) -> tuple[float, str]:
    """Train adapters on a 4 bit base; its own weights must stay as they are, to the bit."""
    _need("bitsandbytes", "accelerate", "peft")
    from llmcond.finetune.build import load_trainable
    from llmcond.finetune.settings import TuneSettings

    resolved = bench.resolve("mistral-7b", "bfloat16", "4bit")
    trainable = load_trainable(resolved, TuneSettings(rank=8), seed=0)
    before = _digests(trainable.network)
    trained = [value for value in trainable.network.parameters() if value.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=2e-3)
    rows = _tokens(resolved, _inputs(resolved))
    wanted = torch.linspace(-1, 1, len(rows) // 2, device=bench.device)
    losses = []
    for _ in range(10):
        first, second = trainable.engine.embed(rows).chunk(2)
        loss = (torch.nn.functional.cosine_similarity(first, second) - wanted).square().mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(loss.detach()))
    if _digests(trainable.network) != before:
        raise RuntimeError("weights of the 4 bit base have changed")
    return losses[-1] / losses[0], f"loss {losses[0]:.3f} to {losses[-1]:.3f}, base unchanged"


def _digests(network: nn.Module) -> dict[str, bytes]:
    own = ((name, value) for name, value in network.named_parameters() if "lora_" not in name)
    return {
        name: digest_bytes(value.detach().cpu().view(torch.uint8).numpy().tobytes(), size=16)
        for name, value in own
    }


# -- memory and processes ----------------------------------------------------------------------

#: Seconds that two processes may take, imports included.
_PATIENCE = 180
#: Bytes above what is in use that a batch has for its activations; it needs many times as many.
_LITTLE = 64 * 2**20


def _out_of_memory(bench: Bench) -> tuple[float, str]:
    _need_cuda(bench)
    encoder = Encoder(bench.resolve("mistral-7b", max_tokens_per_batch=2**16, max_length=512))
    inputs = long_inputs(64, instruct=True)
    with ways(torch_engine(encoder)):
        whole = encoder.encode_counted(inputs).vectors
        before = torch_engine(encoder).budget
        torch.cuda.empty_cache()
        most = torch.cuda.get_device_properties(bench.device).total_memory
        limit = (torch.cuda.memory_reserved(bench.device) + _LITTLE) / most
        try:
            torch.cuda.set_per_process_memory_fraction(limit, bench.device)
            halved = encoder.encode_counted(inputs).vectors
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, bench.device)
    if torch_engine(encoder).budget >= before:
        raise RuntimeError("memory did not run out, so nothing was halved")
    return distance(whole, halved), f"{before:,} to {torch_engine(encoder).budget:,} tokens a batch"


def _two_processes(bench: Bench) -> tuple[float, str]:
    resolved = bench.resolve("mistral-7b")
    inputs = _inputs(resolved)
    # As extraction starts them; one that hangs is ended.
    with processes("llmcond.encoders.encoder").Pool(2) as pool:
        begun = pool.map_async(partial(_encode, resolved), [inputs, inputs], chunksize=1)
        found = begun.get(timeout=_PATIENCE)
    own = _encode(resolved, inputs)
    return max(distance(own, theirs) for theirs in found), ""


def _encode(resolved: ResolvedEncoder, inputs: Sequence[EncoderInput]) -> Vectors:
    return Encoder(resolved).encode_counted(inputs).vectors
