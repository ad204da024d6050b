"""Loading an encoder onto its device: architecture, tokenizer, weights, and needed memory."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    MistralConfig,
    dynamic_module_utils,
)
from transformers.utils import logging as hf_logging

from llmcond.base.errors import LlmcondError, UserError, first_line
from llmcond.base.files import digest_bytes, format_bytes
from llmcond.base.system import free_memory, is_installed, require_libraries, require_quantization
from llmcond.encoders.adapter import ROUTER, attach, check_adapter, summarize_names
from llmcond.encoders.checkpoint import (
    WEIGHT_FILES,
    Checkpoint,
    check_dense,
    fetch_weights,
    read_settings,
    weight_files,
)
from llmcond.encoders.openvino.support import read_dense
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.settings import encoder_types
from llmcond.encoders.spec import IGNORED_WEIGHTS, Attention, Dtype, Quantize, get_pooling
from llmcond.encoders.torch.csr import load_router
from llmcond.encoders.torch.forward import LatentConfig, NVEmbedModel, read_config

_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
#: Passed to all loading functions. Without it, transformers asks on the terminal whether to run a
#: checkpoint's code, and the answer "y" runs it.
_NO_REMOTE_CODE = {"trust_remote_code": False}


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers within a block, because llmcond reports problems in its own messages.

    transformers does not ask whether it may run code either, as it otherwise does for parts whose
    config it has downloaded.
    """
    level, bars = (
        hf_logging.get_verbosity(),
        hf_logging.is_progress_bar_enabled(),
    )
    patience = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = patience
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


@silence_transformers()
def load_config(checkpoint: Checkpoint, attention: Attention | None = None) -> Any:
    """Load a checkpoint's config, and set the direction of its attention.

    Args:
        checkpoint: The checkpoint, whose small files are downloaded.
        attention: Direction of the attention; None leaves that of the config.

    Raises:
        UserError: If transformers does not include the architecture.
    """
    checkpoint.check_weights("this command")
    known = checkpoint.known
    values = read_settings(checkpoint.folder / "config.json", {})
    if values.get("model_type") == "nvembed":
        try:
            return _use_builtin_attention(read_config(values))
        except Exception as error:
            raise UserError(
                f"config.json of {checkpoint.name} differs from that of NV-Embed, and llmcond "
                f"never runs the code that it names. {type(error).__name__}: {first_line(error)}"
            ) from error
    try:
        if known is not None and known.computed_as:
            config = config_of(values, known.computed_as)
        else:
            config = AutoConfig.from_pretrained(str(checkpoint.folder), **_NO_REMOTE_CODE)
    except Exception as error:  # a damaged config makes libraries raise any kind of error
        raise UserError(
            f"{checkpoint.name} has an architecture that transformers does not include, or "
            "settings that transformers cannot read. It may need code from its own repository, "
            f"which llmcond never runs. {first_line(error)}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{checkpoint.name} is an encoder-decoder ({config.model_type}), which is not "
            "supported; use an encoder or a decoder."
        )
    if config.get_text_config() is not config:
        raise UserError(
            f"{checkpoint.name} reads images or sounds as well ({config.model_type}), which is not "
            "supported; use an encoder of llmcond models. If it is a copy of one of these, name "
            "that with --like NAME."
        )
    if config.model_type not in encoder_types():
        config.use_cache = False
        # Gemma's use_bidirectional_attention has narrower windows than is_causal would give it.
        if attention is not None and not getattr(config, "use_bidirectional_attention", False):
            # This is set on the config. On the layers, it would affect unpadded batches only.
            config.is_causal = attention == "causal"
    return _use_builtin_attention(config)


def config_of(values: Mapping[str, Any], computed_as: str) -> Any:
    """Create the config of a known encoder from the entries of its config.json.

    Args:
        values: the entries.
        computed_as: the ``computed_as`` of the known encoder; empty if it has none.
    """
    if values["model_type"] == "nvembed":
        return read_config(values)
    entries = values.get("text_config", values)
    ignored = ("model_type", "auto_map", "architectures")
    sizes = {key: value for key, value in entries.items() if key not in ignored}
    return CONFIG_MAPPING[computed_as or entries["model_type"]].from_dict(sizes)


def vector_width(config: Any) -> int:
    """Return the size of token vectors; EmbeddingGemma 2 projects them behind its last layer."""
    projected = config.model_type == "embedding_gemma2_text"
    return int(config.embedding_dim if projected else config.hidden_size)


def _use_builtin_attention(config: Any) -> Any:
    """Reset a config's attention implementation to eager or to transformers' default; return it.

    Other values name kernels on the hub, whose code would be loaded and run, or libraries that may
    not be installed.
    """
    eager = config._attn_implementation == "eager"
    config._attn_implementation = "eager" if eager else None
    return config


@silence_transformers()
def build_on_meta(config: Any) -> Any:
    """Build the network without allocating memory for its weights.

    Raises:
        UserError: If transformers has no encoder of this architecture, or not with these settings.
    """
    network = network_class(config)
    try:
        with torch.device("meta"):
            return network(config)
    except Exception as error:
        raise UserError(
            f"config.json describes a {config.model_type} that cannot be built: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def network_class(config: Any) -> Any:
    """Return the class of an architecture's encoder.

    Raises:
        UserError: If transformers has none.
    """
    if isinstance(config, LatentConfig):
        return NVEmbedModel
    model_class = MODEL_MAPPING.get(type(config), None)
    if model_class is None:
        raise UserError(
            f"transformers has no text encoder of the architecture {config.model_type!r}."
        )
    return model_class[0] if isinstance(model_class, tuple) else model_class


def token_embeddings(network: Any) -> torch.Tensor:
    """Return the table of a network's token embeddings, (ids, width).

    Raises:
        UserError: If the network does not read tokens.
    """
    try:
        table: torch.Tensor = network.get_input_embeddings().weight
    except (AttributeError, NotImplementedError) as error:
        raise UserError(
            f"the architecture {network.config.model_type!r} has no table of token embeddings, so "
            "it is not a supported text encoder."
        ) from error
    return table


@silence_transformers()
def load_tokenizer(checkpoint: Checkpoint, config: Any) -> Any:
    """Load the checkpoint's tokenizer, for the architecture of ``config``.

    Raises:
        UserError: If the checkpoint has no tokenizer that transformers supports.
    """
    folder = checkpoint.folder
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        # transformers would create a tokenizer without a vocabulary, and all texts would look the
        # same.
        raise UserError(
            f"{checkpoint.name} has no tokenizer ({', '.join(_VOCABULARIES)}). Save it next to "
            "the weights: tokenizer.save_pretrained(FOLDER)"
        )
    if isinstance(config, LatentConfig):
        # For a config that it does not know, transformers builds the tokenizer with the defaults of
        # the tokenizer's class, which differ from tokenizer.json.
        config = MistralConfig()
    try:
        # Because the config is passed, transformers does not look for one that needs code.
        tokenizer = AutoTokenizer.from_pretrained(str(folder), config=config, **_NO_REMOTE_CODE)
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(
            f"the tokenizer of {checkpoint.name} cannot be loaded: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    # InputTokenizer truncates texts, not the tokenizer, whose file may state any length.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def check_size(checkpoint: Checkpoint, n_parameters: int) -> None:
    """Raise a ``LlmcondError`` if a config describes far more parameters than the files hold."""
    files = (path for name in WEIGHT_FILES for path in checkpoint.folder.glob(name))
    size = sum(path.stat().st_size for path in files)
    # 2-bit weights have four parameters per byte. The check of missing tensors covers small
    # networks.
    if n_parameters > 4 * size + 10_000_000:
        raise LlmcondError(
            f"config.json of {checkpoint.name} describes {n_parameters:,} parameters, but its "
            f"weight files have {size:,} bytes, so they do not belong together. Copy both again."
        )


def read_network(resolved: ResolvedEncoder, config: Any, arguments: dict[str, Any]) -> Any:
    """Build an encoder's network and load its weights.

    Args:
        resolved: the encoder.
        config: its config, as a transformers object.
        arguments: further arguments of ``from_pretrained``.

    Raises:
        LlmcondError: weights are missing, or belong to another architecture.
    """
    folder, name = resolved.checkpoint.folder, resolved.checkpoint.name
    slices: dict[str, Any] = {}
    if (device := resolved.checkpoint.random_device) is not None:
        dtype = TORCH_DTYPES[resolved.identity.dtype]
        for key, value in build_on_meta(config).state_dict().items():
            slices[key] = _RandomWeight(key, value.shape, dtype, device)
    elif "quantization_config" in arguments:
        # The weights are read tensor by tensor. With memory mapping, which transformers uses by
        # default, the whole checkpoint would count as used memory until the last weight is
        # quantised.
        for file in weight_files(folder, ".safetensors"):
            opened: Any = safe_open(file, framework="pt", device="cpu", backend="pread")
            slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
    network, report = network_class(config).from_pretrained(
        None if slices else str(folder),
        config=config,
        state_dict=slices or None,
        output_loading_info=True,
        weights_only=True,
        # Models that read images too have their text network under this name.
        key_mapping={r"^language_model\.": ""},
        **arguments,
    )
    pooler = () if get_pooling(resolved.identity.pooling).part == "pooler" else "pooler."
    missing = [key for key in report["missing_keys"] if not key.startswith(pooler)]
    unexpected = [key for key in report["unexpected_keys"] if not IGNORED_WEIGHTS.search(key)]
    if missing:
        also = f" It also has {summarize_names(unexpected, 'weights')} of another architecture."
        raise LlmcondError(
            f"{name} lacks {summarize_names(missing, 'weights')} of its architecture; vectors "
            "from random "
            f"weights would be noise.{also if unexpected else ''}"
        )
    if unexpected:
        raise LlmcondError(
            f"{name} has {summarize_names(unexpected, 'weights')} that its architecture "
            f"({config.model_type}) does not have. Its real architecture is another one, so its "
            "vectors would be wrong."
        )
    return network


def read_all_weights(network: nn.Module, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return all weights of a loaded network, keyed by the names in its architecture.

    Weights that loading skipped or folded into others are read from the checkpoint again.
    """
    state = dict(network.state_dict())
    names = build_on_meta(load_config(checkpoint)).state_dict().keys()
    weights = {name: state[name] for name in names if name in state}
    for path in weight_files(checkpoint.folder, ".safetensors"):
        with safe_open(path, framework="pt", backend="pread") as file:
            for name in (names - weights.keys()) & set(file.keys()):
                weights[name] = file.get_tensor(name)
    return weights


@dataclass(frozen=True, slots=True)
class _RandomWeight:
    """A random weight that is generated on access, like a slice of a file that is read lazily.

    Each weight is thus quantised before the next one is generated, so that the unquantised weights
    are never in memory all at once.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: str

    def __getitem__(self, _: object) -> Tensor:
        # The seed depends on the name only, not on the order of access or on the thread.
        seed = int.from_bytes(digest_bytes(self.name.encode(), size=6))
        generator = torch.Generator(self.device).manual_seed(seed)
        weight = torch.randn(self.shape, generator=generator, dtype=self.dtype, device=self.device)
        if len(self.shape) > 1:
            return weight.mul_(self.shape[-1] ** -0.5)  # preserves the norm of inputs
        return weight.mul_(0.02).add_("norm" in self.name.lower() and self.name.endswith("weight"))


def load_dense(resolved: ResolvedEncoder, width: int) -> tuple[nn.Sequential, int]:
    """Load the dense layers of sentence-transformers after the pooling, in float32.

    Args:
        resolved: the encoder.
        width: size of the pooled vectors.

    Returns:
        The layers, often none, and the size of the output.

    Raises:
        UserError: as ``check_dense``.
        LlmcondError: as ``read_dense``.
    """
    layers: list[nn.Module] = []
    for weight, bias, activation in read_dense(resolved.checkpoint, width):
        linear = nn.Linear(width, len(weight), bias is not None)
        linear.weight = nn.Parameter(torch.from_numpy(weight))
        if bias is not None:
            linear.bias = nn.Parameter(torch.from_numpy(bias))
        layers += [linear, getattr(nn, activation)()]
        width = linear.out_features
    return nn.Sequential(*layers).to(resolved.device).requires_grad_(False), width


_LENGTH = 8
#: Smallest change of a token's vector that shows that it attends to other tokens, as a share of its
#: norm. Tokens that it does not attend to change nothing, to the last bit. Others change the vector
#: by 1.0 in MiniLM, and by at least 0.0036 in six tiny BERTs with random weights.
_MIN_CHANGE = 1e-3


def check_direction(network: Any, attention: Attention, name: str, device: Any) -> None:
    """Check that a network's attention is causal or bidirectional, as ``attention`` says.

    In transformers, the direction depends on the version, the config and padding. A decoder that
    runs causally by mistake produces vectors that look normal, but are noise. So this function
    compares the first tokens of two texts that differ in all other tokens. It does so in a batch
    without padding and in one with padding, which take different paths through the attention code.

    Raises:
        LlmcondError: If the encoder attends in the other direction.
    """
    for padding in (0, 3):
        sees = _first_token_sees_others(network, device, padding)
        direction: Attention = "bidirectional" if sees else "causal"
        if sees is not None and direction != attention:
            batch = "a padded" if padding else "an unpadded"
            raise LlmcondError(
                f"{name} should have {attention} attention, but its attention is {direction} in "
                f"{batch} batch, so its vectors would be noise. This version of transformers does "
                "not follow the model's config; install the version in constraints.txt."
            )


@torch.inference_mode()
def _first_token_sees_others(network: Any, device: Any, padding: int) -> bool | None:
    """Return whether a first token attends to later ones; None for NaN, which is reported later."""
    size = int(network.get_input_embeddings().weight.shape[0])
    ids = torch.arange(3 * (_LENGTH + padding)).view(3, -1) % (size // 2) + size // 2
    ids[:, 0] = ids[0, 0]
    mask = torch.ones_like(ids)
    mask[:2, _LENGTH:] = 0
    hidden = network(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
    first, second = hidden[:2, 0].float()
    change, norm = (first - second).norm(), first.norm()
    return bool(change > _MIN_CHANGE * norm) if change.isfinite() and norm.isfinite() else None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and the dense layers that follow its pooling.

    Attributes:
        network: Computes token vectors from token ids.
        dense: Computes embeddings from pooled vectors, in float32; often empty.
        dim: Size of the embeddings.
    """

    network: Any
    dense: nn.Sequential
    dim: int


@silence_transformers()
def load_model(resolved: ResolvedEncoder, config: Any) -> LoadedModel:
    """Load the checkpoint's weights in the resolved type, on the resolved device.

    An adapter is merged into the weights of its base. If these are quantised, it stays separate.

    Raises:
        UserError: If transformers does not include the architecture, if the library for
            quantisation or adapters is not installed, or if an adapter is for another architecture.
        LlmcondError: If the weights do not match the architecture, or do not fit into memory.
    """
    if resolved.device != "cpu":
        release_memory(resolved.device)  # the memory of a previous encoder
    checkpoint, identity = resolved.checkpoint, resolved.identity
    arguments: dict[str, Any] = {"dtype": TORCH_DTYPES[identity.dtype]}
    if identity.quantize != "none":
        arguments["quantization_config"] = quantization_config(identity.quantize, identity.dtype)
    empty = build_on_meta(config)
    size = measure_footprint(empty)
    placement = _choose_placement(resolved, size)
    if placement == "auto":
        require_libraries(f"{checkpoint.name} must be spread over several devices", "accelerate")
    check_dense_and_adapter(resolved, empty)
    if checkpoint.random_device is None:
        fetch_weights(checkpoint)
        check_size(checkpoint, size.n_parameters)
    # With accelerate, each weight goes to a GPU separately. Otherwise all of them would first have
    # to fit into the host's memory.
    if (placement != "cpu" and is_installed("accelerate")) or identity.quantize != "none":
        arguments["device_map"] = placement
    network = _read_weights(resolved, config, arguments, size)
    _drop_pooler(network, resolved)
    if checkpoint.adapter is not None:
        merge = identity.quantize == "none"
        network = attach(network, checkpoint.adapter, checkpoint.name, merge=merge)
    block: Any = getattr(network, "latent_attention_model", None)
    # Parameters that accelerate has offloaded have no values that could be multiplied out.
    is_loaded = block is not None and not any(value.is_meta for value in block.parameters())
    if resolved.options.fold_latents and is_loaded:
        block.fold()
    if "device_map" not in arguments:
        network = network.to(resolved.device)
    weights = (checkpoint.adapter or checkpoint.folder) / ROUTER
    load_router(network, identity, weights, resolved.device)
    network = network.eval().requires_grad_(False)
    dense, dim = load_dense(resolved, vector_width(config))
    return LoadedModel(network, dense, dim)


def check_dense_and_adapter(resolved: ResolvedEncoder, network: Any) -> None:
    """Check the dense layers and the adapter before weights are downloaded.

    ``network`` is a network without memory for its weights. It is modified and cannot be used any
    more. Errors are those of ``check_dense`` and ``check_adapter``, or that the pooler is missing.
    """
    checkpoint = resolved.checkpoint
    check_dense(checkpoint)
    is_pooler = get_pooling(resolved.identity.pooling).part == "pooler"
    if is_pooler and getattr(network, "pooler", None) is None:
        raise UserError(
            f"pooling is 'pooler', but the architecture of {checkpoint.name} has no pooler. Use "
            "--pooling cls or --pooling mean."
        )
    if checkpoint.adapter is not None:
        _drop_pooler(network, resolved)
        merge = resolved.identity.quantize == "none"
        check_adapter(network, checkpoint.adapter, checkpoint.name, merge=merge)


def _read_weights(
    resolved: ResolvedEncoder, config: Any, arguments: dict[str, Any], size: Footprint
) -> Any:
    """Load the network with its weights; raise an LlmcondError if that fails."""
    checkpoint = resolved.checkpoint
    try:
        network = read_network(resolved, config, arguments)
    except torch.OutOfMemoryError as error:
        raise _memory_error(resolved, size) from error
    except UnpicklingError as error:
        # The message of this error explains how to run the code that was just rejected.
        raise LlmcondError(
            f"the weights of {checkpoint.name} cannot be loaded: its .bin files hold more than "
            "tensors, which may be code. Ask the publisher for weights in safetensors."
        ) from error
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        # If shapes differ, the message of transformers refers to a report that was not printed.
        shapes = "mismatch" in str(error) and "shape" in str(error)
        reason = "their shapes differ from those in config.json" if shapes else first_line(error)
        raise LlmcondError(
            f"the weights of {checkpoint.name} cannot be loaded: {reason}."
        ) from error
    on_gpus = resolved.device != "cpu" and resolved.identity.quantize != "none"
    # When accelerate spreads an encoder, it plans with a memory reserve of unknown size.
    if on_gpus and any(value.device.type in ("cpu", "meta") for value in network.parameters()):
        raise _memory_error(resolved, size)
    return network


def _drop_pooler(network: Any, resolved: ResolvedEncoder) -> None:
    """Remove the network's pooler unless the encoder's pooling uses it."""
    needed = get_pooling(resolved.identity.pooling).part == "pooler"
    if not needed and getattr(network, "pooler", None) is not None:
        # Quantising a pooler whose weights are missing fails.
        network.pooler = None


# -- memory ------------------------------------------------------------------------------------


def _choose_placement(resolved: ResolvedEncoder, size: Footprint) -> str:
    """Return the device to load to, or ``auto`` for several devices.

    Raises:
        LlmcondError: If the encoder does not fit into memory.
    """
    identity = resolved.identity
    needed = size.loading(identity.dtype, identity.quantize)
    if needed <= available_memory(resolved.device):
        return resolved.device
    # Quantised weights are not offloaded to the CPU, where they would be other numbers.
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices += ["cpu"] if identity.quantize == "none" else []
    total = sum(available_memory(device) for device in devices)
    # If the user chose a GPU by its number, no other device is used.
    spreads = resolved.options.device in ("auto", "cuda") and resolved.device != "cpu"
    if spreads and needed <= total:
        return "auto"
    raise _memory_error(resolved, size)


def _memory_error(resolved: ResolvedEncoder, size: Footprint) -> LlmcondError:
    """Return an error that says how much memory is needed and what needs less."""
    dtype, quantize = resolved.identity.dtype, resolved.identity.quantize
    kinds: tuple[str, ...] = get_args(Quantize)
    needed = {kind: format_bytes(size.loading(dtype, kind)) for kind in kinds}
    smaller = kinds[kinds.index(quantize) + 1 :]
    advice = [f"--quantize {kind} ({needed[kind]})" for kind in smaller]
    named = resolved.options.device.startswith("cuda:")
    if named and torch.cuda.device_count() > 1:
        advice.append(f"--device auto, which uses all {torch.cuda.device_count()} GPUs")
    advice += ["--device cpu"] if resolved.device != "cpu" else []
    return LlmcondError(
        f"{resolved.checkpoint.name} does not fit into the memory of {resolved.device}: as "
        f"{dtype}, quantize {quantize}, it needs {needed[quantize]}, but only "
        f"{format_bytes(available_memory(resolved.device))} are free. Try "
        f"{' or '.join(advice) or 'a smaller model'}."
    )


TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def copy_to_cpu(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copy a tensor to the CPU.

    Returns:
        The copy, and the GPU event after which it is complete. A tensor on the CPU is returned as
        it is, with None.
    """
    if not values.is_cuda:
        return values, None
    fetched = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    fetched.copy_(values, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))
    return fetched, copied


def default_token_budget(device: str) -> int:
    """Return the default number of tokens of one forward pass, including padding.

    On a CPU, small batches keep activations in the cache: 1,536 tokens were measured to be fastest
    for MiniLM. A GPU needs more work at a time to be busy.
    """
    return 16_384 if device.startswith("cuda") else 1_536


#: Modules that pool. They are not quantised, because they are small and decide the vector.
POOLING_MODULES = ("latent_attention_model", "pooler")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of an encoder's weights, and of its work on a batch.

    Attributes:
        n_parameters: Number of parameters.
        n_quantized: Number of parameters that quantisation makes smaller.
        n_quantized_rows: Number of rows of their matrices; 8 bit stores a scale for each row.
        n_folded: Number of parameters that folding NV-Embed-v2's latents removes after loading.
        per_token: Approximate number of values that a forward pass keeps per token.
    """

    n_parameters: int
    n_quantized: int
    n_quantized_rows: int
    n_folded: int
    per_token: int

    def weights(self, dtype: Dtype, quantize: str) -> int:
        """Return the size of the loaded weights in bytes."""
        small, size = self.n_quantized, TORCH_DTYPES[dtype].itemsize
        rest = (self.n_parameters - self.n_folded - small) * size
        if quantize == "8bit":
            return small + 4 * self.n_quantized_rows + rest
        if quantize == "4bit":
            # Blocks of 64 parameters share a scale of one byte, and 256 of these scales share one
            # of four bytes (QLoRA, section 3).
            return small // 2 + small // 64 + small // (64 * 256) * 4 + rest
        return small * size + rest

    def loading(self, dtype: Dtype, quantize: str) -> int:
        """Return the peak memory of loading in bytes, when weights are loaded shard by shard."""
        return self.weights(dtype, quantize) + self.n_folded * TORCH_DTYPES[dtype].itemsize

    def batch(self, dtype: Dtype, tokens: int) -> int:
        """Estimate the memory that a forward pass over ``tokens`` tokens adds, in bytes."""
        return tokens * self.per_token * TORCH_DTYPES[dtype].itemsize


def measure_footprint(model: nn.Module) -> Footprint:
    """Return the size of a model, which may be on the ``meta`` device."""
    linear = [
        module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(part in name for part in POOLING_MODULES)
    ]
    n_folded = 0
    block: Any = getattr(model, "latent_attention_model", None)
    if block is not None:
        attention = block.cross_attend_blocks[0]
        removed = [*attention.fn.parameters(), *attention.norm_context.parameters(), block.latents]
        n_added = 2 * int(block.heads) * int(block.latents.numel())
        n_folded = sum(int(parameter.numel()) for parameter in removed) - n_added
    return Footprint(
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        n_quantized=sum(module.weight.numel() for module in linear),
        n_quantized_rows=sum(module.out_features for module in linear),
        n_folded=n_folded,
        per_token=_values_per_token(model.config),
    )


def tokens_that_fit(config: Any, dtype: Dtype, device: str, concurrency: int) -> int:
    """Estimate how many tokens a batch may have if half of the free memory is to stay free.

    The weights must have been loaded already. ``concurrency`` is the number of batches that are
    computed simultaneously.
    """
    size = _values_per_token(config) * TORCH_DTYPES[dtype].itemsize * concurrency
    return max(1, available_memory(device) // 2 // size)


def _values_per_token(config: Any) -> int:
    """Estimate the number of values that a forward pass keeps per token."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest = max(inner) if isinstance(inner, list | tuple) else inner  # Gemma 3n has one per layer
    return 8 * int(config.hidden_size) + 3 * int(widest)


def available_memory(device: str) -> int:
    """Return the free memory of a device in bytes.

    On a GPU, this includes memory that PyTorch has cached for this process but does not use.
    """
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return free_memory()


def release_memory(device: str) -> None:
    """Free unused memory, on a GPU including what PyTorch has cached for this process."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def quantization_config(quantize: str, dtype: Dtype) -> BitsAndBytesConfig:
    """Return the quantisation config: LLM.int8, or NF4 with double quantisation.

    Modules that pool stay in ``dtype``, and 4-bit layers compute in ``dtype``. LLM.int8 multiplies
    in float16, whatever ``dtype`` is. See Dettmers et al., LLM.int8 (arXiv 2208.07339) and QLoRA
    (arXiv 2305.14314, section 3).

    Raises:
        UserError: If bitsandbytes or accelerate is not installed.
    """
    require_quantization(quantize)
    # bitsandbytes warns of each product that it casts, and of faster kernels that it could
    # download.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return BitsAndBytesConfig(
        load_in_8bit=quantize == "8bit",
        load_in_4bit=quantize == "4bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=TORCH_DTYPES[dtype],
        llm_int8_skip_modules=list(POOLING_MODULES),
    )
