"""Checks that a device computes correct vectors, on small encoders with random weights.

Each check measures the largest difference of two computations, and compares it with a bound. The
difference of two vectors is the distance of the vectors at unit length.
"""

from __future__ import annotations

import json
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

from llmcond.base.errors import first_line
from llmcond.base.files import digest_bytes
from llmcond.base.system import is_installed, process_context
from llmcond.benchmark.shapes import Shape, csts_inputs, long_inputs, random_encoder
from llmcond.encoders import EncoderOptions
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.loading import load_config, load_model, load_tokenizer
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import Dtype, EncoderInput, Quantize
from llmcond.encoders.tokenizing import InputTokenizer, Tokens
from llmcond.encoders.torch.engine import Engine, create_engine, torch_engine

STORED = Path(__file__).with_name("nv_embed.json")


def golden_differences(device: str, folder: Path) -> tuple[float, str]:
    """Return the largest distance of a device's vectors to the stored ones, and a note.

    The stored inputs are token ids, with the index of the first pooled token.
    """
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    options = EncoderOptions(dtype="float32", max_tokens_per_batch=64)
    encoder = Encoder(
        random_encoder("nv-embed-v2", folder, options, device, small=True, init_device="cpu")
    )
    rows = [
        Tokens(row["ids"], row["first"], len(row["ids"]), len(row["ids"]), len(row["ids"]))
        for row in stored["inputs"]
    ]
    vectors = _run_engine(torch_engine(encoder), rows)
    return distance(vectors, np.array(stored["vectors"], dtype=np.float32)), f"{len(rows)} inputs"


Vectors = NDArray[np.float32]
DtypeOrAuto = Dtype | Literal["auto"]

#: The largest difference of vectors of the same text, by the type of the weights. Rounding errors
#: are below; attention to another text, or a single wrong position, is above.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.1, "8bit": 0.2, "4bit": 0.1}
_INPUTS = 24


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a check.

    Attributes:
        name: The two computations that were compared, and the encoder.
        difference: The largest difference; None if the check was not run, or raised an error.
        bound: The largest difference that passes.
        passed: Whether the check passed; None if it was not run.
        note: The reason why it was not run or failed, or further details.
    """

    name: str
    difference: float | None
    bound: float | None
    passed: bool | None
    note: str = ""


class SkippedError(Exception):
    """A requirement of a check is missing."""


@dataclass(frozen=True, slots=True)
class CheckEnvironment:
    """The device and the folder that checks use.

    Attributes:
        device: ``cpu`` or ``cuda:N``.
        folder: The folder of the configurations of small encoders.
    """

    device: str
    folder: Path

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    def resolve(
        self,
        shape: Shape,
        dtype: DtypeOrAuto = "float32",
        quantize: Quantize = "none",
        device: str | None = None,
        **options: Any,
    ) -> ResolvedEncoder:
        """Resolve a small encoder, which has the same weights on every device."""
        settings = EncoderOptions(dtype=dtype, quantize=quantize, **options)
        device = device or self.device
        return random_encoder(shape, self.folder, settings, device, small=True, init_device="cpu")


#: Returns the difference and a note.
Measure = Callable[[], tuple[float, str]]


def run_checks(bench: CheckEnvironment) -> Iterator[Check]:
    """Yield the outcome of each check. The other checks are run even if one fails."""
    return starmap(run_check, _list_checks(bench))


def run_check(name: str, bound: float, measure: Measure) -> Check:
    """Run one check."""
    try:
        difference, note = measure()
    except SkippedError as reason:
        return Check(name, None, bound, None, str(reason))
    except ModuleNotFoundError as error:
        return Check(name, None, bound, None, f"needs {error.name}, which is not installed")
    except Exception as error:  # anything can fail on an untested device
        return Check(name, None, bound, False, f"{type(error).__name__}: {first_line(error)}")
    return Check(name, difference, bound, difference <= bound, note)  # false for NaN


def _list_checks(bench: CheckEnvironment) -> Iterator[tuple[str, float, Measure]]:
    exact = BOUNDS["float32"]
    dtype: DtypeOrAuto = "auto" if bench.cuda else "bfloat16"
    measure, compare_with = partial(_measure_encoder, bench), partial(_compare_encoders, bench)
    for shape in get_args(Shape):
        yield f"{shape}: packed = padded", exact, partial(measure, packing_difference, shape)
        # The attention kernel for variable lengths supports 16 bit only.
        in_16_bit = partial(measure, packing_difference, shape, dtype)
        yield f"{shape}: packed = padded, 16 bit", BOUNDS["bfloat16"], in_16_bit
        yield f"{shape}: alone = in a batch", exact, partial(measure, alone_difference, shape)
        yield f"{shape}: CUDA = CPU", exact, partial(compare_with, shape, device="cpu")
    shared = partial(measure, sharing_difference, "mistral-7b")
    yield "mistral-7b: shared prefixes = not shared", exact, shared
    folded = partial(compare_with, "nv-embed-v2", fold_latents=False)
    yield "nv-embed-v2: folded = not folded", exact, folded
    stored = partial(golden_differences, bench.device, bench.folder)
    yield "nv-embed-v2: stored vectors", exact, stored
    # LLM.int8 also rounds activations, for each token.
    yield "8bit = its weights dequantised", 0.1, partial(_compare_dequantized, bench, "8bit")
    rounding = BOUNDS["bfloat16"] if _rounds_in_4bit(bench) else 1e-3
    yield "4bit = its weights dequantised", rounding, partial(_compare_dequantized, bench, "4bit")
    # Adam divides by the root of a mean square, so rounding errors grow over the steps.
    yield "a head fitted on CUDA = on the CPU", 1e-2, partial(_compare_head_fits, bench)
    yield "ten LoRA steps on 4 bit: last loss / first", 0.9, partial(_check_lora_steps, bench)
    yield "out of memory: halved batches = whole ones", exact, partial(_compare_halved, bench)
    yield "two processes on one device = one", exact, partial(_compare_two_processes, bench)


# -- comparisons of vectors --------------------------------------------------------------------


def distance(first: Vectors, second: Vectors) -> float:
    """Return the largest distance between corresponding rows of two arrays of vectors."""
    return float(np.linalg.norm(first - second, axis=1).max())


@contextmanager
def engine_settings(
    engine: Engine, *, packs: bool | None = None, shares: bool = False
) -> Iterator[None]:
    """Set whether an engine packs batches and shares prefixes during the block."""
    before = engine.packs, engine.shares_prefixes
    engine.packs, engine.shares_prefixes = engine.packs if packs is None else packs, shares
    try:
        yield
    finally:
        engine.packs, engine.shares_prefixes = before


def packing_difference(encoder: Encoder, inputs: Sequence[EncoderInput]) -> tuple[float, str]:
    """Return the distance of packed and padded vectors, and the attention kernel."""
    if not torch_engine(encoder).packs:
        raise RuntimeError("packed rows had wrong vectors when it was loaded, so rows are padded")
    with engine_settings(torch_engine(encoder)):
        packed = encoder.encode_with_counts(inputs).vectors
    with engine_settings(torch_engine(encoder), packs=False):
        padded = encoder.encode_with_counts(inputs).vectors
    return distance(packed, padded), torch_engine(encoder).kernel_name


def sharing_difference(encoder: Encoder, inputs: Sequence[EncoderInput]) -> tuple[float, str]:
    """Return the distance of vectors with and without shared prefixes, and the saved tokens."""
    with engine_settings(torch_engine(encoder), shares=True):
        shared = encoder.encode_with_counts(inputs)
    with engine_settings(torch_engine(encoder)):
        whole = encoder.encode_with_counts(inputs)
    if not shared.n_computed < whole.n_computed:
        raise RuntimeError("no prefix was shared")
    saved = f"{whole.n_computed / shared.n_computed:.1f} times fewer tokens"
    return distance(shared.vectors, whole.vectors), saved


def alone_difference(encoder: Encoder, inputs: Sequence[EncoderInput]) -> tuple[float, str]:
    """Return the distance of vectors of a batch and of inputs that are encoded one by one."""
    together = encoder.encode_with_counts(inputs).vectors
    alone = np.concatenate([encoder.encode_with_counts([item]).vectors for item in inputs])
    return distance(together, alone), ""


def _make_inputs(resolved: ResolvedEncoder, n: int = _INPUTS) -> list[EncoderInput]:
    return csts_inputs(n, bool(resolved.identity.instruction_format))


def _measure_encoder(
    bench: CheckEnvironment,
    measure: Callable[[Encoder, Sequence[EncoderInput]], tuple[float, str]],
    shape: Shape,
    dtype: DtypeOrAuto = "float32",
) -> tuple[float, str]:
    """Run a measurement on one small encoder."""
    resolved = bench.resolve(shape, dtype)
    return measure(Encoder(resolved), _make_inputs(resolved))


def _compare_encoders(bench: CheckEnvironment, shape: Shape, **options: Any) -> tuple[float, str]:
    """Compare a small encoder with one that has other options and the same weights."""
    if "device" in options:
        _require_cuda(bench)
    resolved = bench.resolve(shape)
    inputs = _make_inputs(resolved)
    other = _encode(bench.resolve(shape, **options), inputs)
    return distance(_encode(resolved, inputs), other), ""


def _require_cuda(bench: CheckEnvironment) -> None:
    if not bench.cuda:
        raise SkippedError(f"needs CUDA, but the device is {bench.device}")


def _require(*libraries: str) -> None:
    missing = [name for name in libraries if not is_installed(name)]
    if missing:
        raise SkippedError(f"needs {' and '.join(missing)}, which is not installed")


# -- quantised weights -------------------------------------------------------------------------


def _compare_dequantized(bench: CheckEnvironment, quantize: Quantize) -> tuple[float, str]:
    """Compare a quantised network with a float32 network of the dequantised weights."""
    _require("bitsandbytes", "accelerate")
    quantized = bench.resolve("mistral-7b", "float32", quantize)
    whole = bench.resolve("mistral-7b", "float32")
    quantized_model, reference = (
        load_model(resolved, load_config(resolved.checkpoint, resolved.identity.attention))
        for resolved in (quantized, whole)
    )
    count = 0
    with torch.no_grad():
        # This must happen before the first run, which changes the layout of bitsandbytes' weights
        # on a CPU.
        for name, module in reference.network.named_modules():
            values = dequantized(quantized_model.network.get_submodule(name))
            if values is not None:
                module.weight.copy_(values)
                count += 1
    if not count:
        raise RuntimeError("no weight was quantised")
    rows = _tokens(quantized, _make_inputs(quantized))
    vectors = [
        _run_engine(create_engine(model, resolved, 0), rows)
        for model, resolved in ((quantized_model, quantized), (reference, whole))
    ]
    return distance(*vectors), f"{count} matrices"


def _rounds_in_4bit(bench: CheckEnvironment) -> bool:
    """Return whether bitsandbytes multiplies 4-bit weights in bfloat16, whatever the dtype is.

    It does so on CPUs with AVX512-BF16.
    """
    if bench.cuda or not is_installed("bitsandbytes"):
        return False
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())  # type: ignore[no-untyped-call]


def dequantized(module: nn.Module) -> Tensor | None:
    """Return a quantised layer's weights as numbers, (out, in); None for any other module."""
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


def _run_engine(engine: Engine, rows: Sequence[Tokens]) -> Vectors:
    vectors = np.empty((len(rows), engine.dim), dtype=np.float32)
    for pooled in engine.run(rows):
        vectors[list(pooled.inputs)] = pooled.vectors
    return vectors


# -- training ----------------------------------------------------------------------------------


def _compare_head_fits(bench: CheckEnvironment) -> tuple[float, str]:
    """Fit a linear head on the same features on the CPU and the GPU, and compare its weights."""
    _require_cuda(bench)
    weights = [fit_head("cpu"), fit_head(bench.device)]
    return float(np.abs(weights[0] - weights[1]).max() / np.abs(weights[0]).max()), ""


def fit_head(device: str) -> Vectors:
    """Return the weights, (32, 128), of a linear head after three epochs on random features."""
    from llmcond.heads.conditioned import Linear
    from llmcond.heads.fit import fit_recipe
    from llmcond.heads.numpy_heads import PairArrays
    from llmcond.heads.recipes import Recipe

    chance = np.random.default_rng(0)
    first, second = chance.standard_normal((2, 512, 128), dtype=np.float32)
    pairs = PairArrays(first, second, chance.random(512))
    settings = Linear.Settings(
        dim=32, dropout=0.0, learning_rate=1e-3, batch_size=64, epochs=3, patience=3
    )
    recipe = Recipe("linear", "", "", "linear", Linear, settings)
    head = fit_recipe(recipe, pairs, None, 0, lambda *_: None, device)
    return np.asarray(head.tensors["weight"])


def _check_lora_steps(bench: CheckEnvironment) -> tuple[float, str]:
    """Train adapters on a 4-bit base, whose weights must stay bit-identical."""
    _require("bitsandbytes", "accelerate", "peft")
    from llmcond.finetune.encoder import load_trainable
    from llmcond.finetune.settings import TuneSettings

    resolved = bench.resolve("mistral-7b", "bfloat16", "4bit")
    trainable = load_trainable(resolved, TuneSettings(rank=8), seed=0)
    before = _digest_base(trainable.network)
    parameters = [value for value in trainable.network.parameters() if value.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=2e-3)
    rows = _tokens(resolved, _make_inputs(resolved))
    targets = torch.linspace(-1, 1, len(rows) // 2, device=bench.device)
    losses = []
    for _ in range(10):
        first, second = trainable.engine.embed(rows).chunk(2)
        loss = (torch.nn.functional.cosine_similarity(first, second) - targets).square().mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(loss.detach()))
    if _digest_base(trainable.network) != before:
        raise RuntimeError("weights of the 4 bit base have changed")
    return losses[-1] / losses[0], f"loss {losses[0]:.3f} to {losses[-1]:.3f}, base unchanged"


def _digest_base(network: nn.Module) -> dict[str, bytes]:
    base_parameters = (
        (name, value) for name, value in network.named_parameters() if "lora_" not in name
    )
    return {
        name: digest_bytes(value.detach().cpu().view(torch.uint8).numpy().tobytes(), size=16)
        for name, value in base_parameters
    }


# -- memory and processes ----------------------------------------------------------------------

#: The time limit of two processes, with imports.
_TIMEOUT_SECONDS = 180
#: The memory for activations, in addition to what is in use. A batch needs many times as much.
_SPARE_BYTES = 64 * 2**20


def _compare_halved(bench: CheckEnvironment) -> tuple[float, str]:
    _require_cuda(bench)
    encoder = Encoder(bench.resolve("mistral-7b", max_tokens_per_batch=2**16, max_length=512))
    inputs = long_inputs(64, instruct=True)
    with engine_settings(torch_engine(encoder)):
        whole = encoder.encode_with_counts(inputs).vectors
        before = torch_engine(encoder).budget
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(bench.device).total_memory
        limit = (torch.cuda.memory_reserved(bench.device) + _SPARE_BYTES) / total
        try:
            torch.cuda.set_per_process_memory_fraction(limit, bench.device)
            halved = encoder.encode_with_counts(inputs).vectors
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, bench.device)
    if torch_engine(encoder).budget >= before:
        raise RuntimeError("memory did not run out, so nothing was halved")
    return distance(whole, halved), f"{before:,} to {torch_engine(encoder).budget:,} tokens a batch"


def _compare_two_processes(bench: CheckEnvironment) -> tuple[float, str]:
    resolved = bench.resolve("mistral-7b")
    inputs = _make_inputs(resolved)
    # Processes are started as in extraction. A process that hangs is ended with the pool.
    with process_context("llmcond.encoders.encoder").Pool(2) as pool:
        pending = pool.map_async(partial(_encode, resolved), [inputs, inputs], chunksize=1)
        parallel = pending.get(timeout=_TIMEOUT_SECONDS)
    single = _encode(resolved, inputs)
    return max(distance(single, vectors) for vectors in parallel), ""


def _encode(resolved: ResolvedEncoder, inputs: Sequence[EncoderInput]) -> Vectors:
    return Encoder(resolved).encode_with_counts(inputs).vectors
