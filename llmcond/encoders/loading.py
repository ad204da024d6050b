"""Loading a checkpoint's weights and tokenizer with stock transformers classes only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, AutoTokenizer, MistralConfig
from transformers.utils import logging

from llmcond.encoders.checkpoint import Checkpoint, fetch_weights, read_settings, weight_files
from llmcond.encoders.device import TORCH_DTYPES
from llmcond.encoders.memory import Footprint, available, footprint
from llmcond.encoders.nv_embed import LatentConfig, NVEmbedModel, read_config
from llmcond.encoders.quantization import installed, quantization, require
from llmcond.encoders.resolve import QUANTIZE, ResolvedEncoder, encoder_types
from llmcond.encoders.spec import Attention
from llmcond.errors import LlmcondError, UserError
from llmcond.files import gib

_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
#: Said each time: left out, transformers asks on the terminal, and a "y" runs a checkpoint's code.
_NO_REMOTE_CODE = {"trust_remote_code": False}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and the dense layers that follow its pooling.

    Attributes:
        network: from token ids to token vectors.
        dense: from pooled vectors to embeddings, in float32; often empty.
        dim: size of the embeddings.
    """

    network: Any
    dense: nn.Sequential
    dim: int


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers for a block: what is wrong is checked, and told in our own words."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@_quiet()
def load_config(checkpoint: Checkpoint, attention: Attention | None = None) -> Any:
    """Load a checkpoint's config, with the direction of its attention set.

    Raises:
        UserError: an architecture that transformers does not have itself.
    """
    values = read_settings(checkpoint.folder / "config.json", {})
    try:
        if values.get("model_type") == "nvembed":
            return read_config(values)
        config = AutoConfig.from_pretrained(str(checkpoint.folder), **_NO_REMOTE_CODE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{checkpoint.name} has an architecture that transformers does not have itself. It "
            "may need code from its own repository, which llmcond never runs. "
            f"{_first_line(error)}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{checkpoint.name} is an encoder-decoder ({config.model_type}), which is not "
            "supported; use an encoder or a decoder."
        )
    if config.model_type not in encoder_types():
        config.use_cache = False
        # Gemma's own way of being bidirectional has narrower windows than is_causal gives it.
        if attention is not None and not getattr(config, "use_bidirectional_attention", False):
            # On the config: set on the layers, it would hold for unpadded batches only.
            config.is_causal = attention == "causal"
    return config


def build_on_meta(config: Any) -> Any:
    """Build the architecture without memory for its weights.

    Raises:
        UserError: transformers has no encoder of this architecture.
    """
    network = _network_class(config)
    with torch.device("meta"):
        return network(config)


def _network_class(config: Any) -> Any:
    if isinstance(config, LatentConfig):
        return NVEmbedModel
    try:
        found = MODEL_MAPPING[type(config)]
    except KeyError as error:
        raise UserError(
            f"transformers has no text encoder of the architecture {config.model_type!r}."
        ) from error
    return found[0] if isinstance(found, tuple) else found


@_quiet()
def load_tokenizer(checkpoint: Checkpoint, config: Any) -> Any:
    """Load the checkpoint's tokenizer.

    Raises:
        UserError: the checkpoint has none that transformers knows.
    """
    folder = checkpoint.folder
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        # transformers would make one that knows no word, and every text would look alike.
        raise UserError(
            f"{checkpoint.name} has no tokenizer ({', '.join(_VOCABULARIES)}). Save it "
            "beside the weights: tokenizer.save_pretrained(FOLDER)"
        )
    if isinstance(config, LatentConfig):
        # For a config that it does not know, transformers builds the tokenizer by its class's
        # defaults, which are not those of tokenizer.json.
        config = MistralConfig()
    try:
        # With the config at hand, it does not look for one that needs code.
        return AutoTokenizer.from_pretrained(str(folder), config=config, **_NO_REMOTE_CODE)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the tokenizer of {checkpoint.name} cannot be loaded: {_first_line(error)}"
        ) from error


@_quiet()
def load_model(resolved: ResolvedEncoder, config: Any) -> LoadedModel:
    """Load the checkpoint's weights in the resolved type, on the resolved device.

    Raises:
        UserError: an architecture that transformers lacks, or quantisation without its library.
        LlmcondError: weights that do not fit the architecture, or no memory for them.
    """
    checkpoint, identity = resolved.checkpoint, resolved.identity
    arguments: dict[str, Any] = {"dtype": TORCH_DTYPES[identity.dtype]}
    if identity.quantize != "none":
        arguments["quantization_config"] = quantization(identity.quantize, identity.dtype)
    size = footprint(build_on_meta(config))
    placement = _placement(resolved, size)
    if placement == "auto":
        require(f"{checkpoint.name} must be spread over several devices", "accelerate")
    fetch_weights(checkpoint)
    # With accelerate, weights go to a GPU one by one instead of all through the host's memory.
    if (placement != "cpu" and installed("accelerate")) or identity.quantize != "none":
        arguments["device_map"] = placement
    try:
        network = _read_network(resolved, config, arguments)
    except torch.OutOfMemoryError as error:
        raise _no_memory(resolved, size) from error
    except UnpicklingError as error:
        # Its own message tells how to run what it has just refused.
        raise LlmcondError(
            f"the weights of {checkpoint.name} cannot be loaded: its .bin files hold more "
            "than tensors, which may be code. Ask for safetensors."
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise LlmcondError(
            f"the weights of {checkpoint.name} cannot be loaded: {_first_line(error)}"
        ) from error
    if isinstance(network, NVEmbedModel) and resolved.fold_latents:
        network.latent_attention_model.fold()
    if identity.pooling != "pooler" and getattr(network, "pooler", None) is not None:
        # Where its weights are missing, quantising leaves it broken; and it is not used.
        network.pooler = None
    if "device_map" not in arguments:
        network = network.to(resolved.device)
    network = network.eval().requires_grad_(False)
    dense, dim = _load_dense(resolved, int(config.hidden_size))
    return LoadedModel(network, dense, dim)


# -- weights -----------------------------------------------------------------------------------


def _read_network(resolved: ResolvedEncoder, config: Any, arguments: dict[str, Any]) -> Any:
    folder, network = resolved.checkpoint.folder, _network_class(config)
    files = weight_files(folder)
    if "quantization_config" in arguments and files:
        # Read tensor by tensor: mapped into memory, as transformers does by itself, the whole
        # checkpoint would count as used until the last weight is quantised.
        slices = _open(files)
        network, report = network.from_pretrained(
            None, config=config, state_dict=slices, output_loading_info=True, **arguments
        )
    else:
        network, report = network.from_pretrained(
            str(folder), config=config, output_loading_info=True, weights_only=True, **arguments
        )
    needs_pooler = resolved.identity.pooling == "pooler"
    missing = sorted(
        key for key in report["missing_keys"] if needs_pooler or not key.startswith("pooler.")
    )
    unexpected = sorted(key for key in report["unexpected_keys"] if not _NOT_OURS.search(key))
    name = resolved.checkpoint.name
    if missing:
        raise LlmcondError(
            f"{name} lacks {_named(missing)} of its architecture; vectors from random weights "
            f"would be noise.{_also(unexpected)}"
        )
    if unexpected:
        raise LlmcondError(
            f"{name} has {_named(unexpected)} that its architecture ({config.model_type}) does not "
            "have, so it is another one, and its vectors would be wrong."
        )
    return network


def _open(files: list[Any]) -> dict[str, Any]:
    slices: dict[str, Any] = {}
    for file in files:
        opened: Any = safe_open(file, framework="pt", device="cpu", backend="pread")
        slices.update({key: opened.get_slice(key) for key in opened.keys()})  # noqa: SIM118
    return slices


#: What an encoder leaves out rightly: heads of other tasks, and buffers of older versions.
_NOT_OURS = re.compile(
    r"^(\w+\.)?(lm_head|embed_out|cls|classifier|score|qa_outputs|predictions|vocab_(transform|layer_norm|"
    r"projector)|(discriminator|generator)_predictions(_head)?)\.|^(mlp|head|decoder)\.|"
    r"(^|\.)pooler\.|\.(position_ids|inv_freq|masked_bias)$"
)


def _named(keys: list[str]) -> str:
    shown = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    return f"{len(keys)} weights ({shown})"


def _also(unexpected: list[str]) -> str:
    return f" It has {_named(unexpected)} that belong to another one." if unexpected else ""


def _load_dense(resolved: ResolvedEncoder, width: int) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    for name in resolved.dense:
        folder = resolved.checkpoint.folder / name
        config = read_settings(folder / "config.json", {})
        activation = _activation(str(config.get("activation_function")), resolved.checkpoint)
        try:
            weights = load_file(folder / "model.safetensors")
            linear = nn.Linear(width, len(weights["linear.weight"]), "linear.bias" in weights)
            linear.load_state_dict(
                {key.removeprefix("linear."): value.float() for key, value in weights.items()}
            )
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise LlmcondError(
                f"the dense layer {name} of {resolved.checkpoint.name} cannot be loaded from its "
                f"model.safetensors, the one format that is read: {_first_line(error)}"
            ) from error
        layers += [linear, activation()]
        width = linear.out_features
    dense = nn.Sequential(*layers).to(resolved.device).requires_grad_(False)
    return dense, width


def _activation(name: str, checkpoint: Checkpoint) -> Callable[[], nn.Module]:
    legal = (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU)
    found = {kind.__name__: kind for kind in legal}.get(name.rpartition(".")[2])
    if found is None or not name.startswith("torch.nn."):
        raise UserError(
            f"{checkpoint.name} has a dense layer with the activation {name!r}. Supported: "
            f"{', '.join(kind.__name__ for kind in legal)} of torch.nn."
        )
    return found


# -- memory ------------------------------------------------------------------------------------


def _placement(resolved: ResolvedEncoder, size: Footprint) -> str:
    """Return the device to load to, or ``auto`` to spread over several; refuse what fits nowhere.

    Raises:
        LlmcondError: too little memory, told before weights are downloaded or read.
    """
    identity = resolved.identity
    needed = size.loading(identity.dtype, identity.quantize)
    if needed <= available(resolved.device):
        return resolved.device
    # Quantised weights do not leave the GPU: on the CPU they would be other numbers.
    others = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    others += ["cpu"] if identity.quantize == "none" else []
    together = sum(available(device) for device in others)
    if resolved.may_spread and resolved.device != "cpu" and needed <= together:
        return "auto"
    raise _no_memory(resolved, size)


def _no_memory(resolved: ResolvedEncoder, size: Footprint) -> LlmcondError:
    identity = resolved.identity
    free = available(resolved.device)
    kinds: tuple[str, ...] = QUANTIZE
    needed = {kind: size.loading(identity.dtype, kind) for kind in kinds}
    smaller = kinds[kinds.index(identity.quantize) + 1 :]
    advice = [f"--quantize {kind} ({gib(needed[kind])})" for kind in smaller]
    if resolved.device != "cpu":
        advice.append("--device cpu")
    return LlmcondError(
        f"{resolved.checkpoint.name} does not fit into the memory of {resolved.device}: as "
        f"{identity.dtype}, quantize {identity.quantize}, it needs {gib(needed[identity.quantize])}"
        f", and {gib(free)} are free. Try {' or '.join(advice) or 'a smaller model'}."
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
