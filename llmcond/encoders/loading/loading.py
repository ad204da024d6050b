"""Loading an encoder onto its device, and checking beforehand that it can be loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from torch import nn

from llmcond.encoders.checkpoints.adapter import ROUTER, attach, check_adapter
from llmcond.encoders.checkpoints.checkpoint import check_dense, fetch_weights
from llmcond.encoders.checkpoints.weights import check_size, load_dense, read_network
from llmcond.encoders.loading.architecture import build_on_meta, silence_transformers
from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.encoders.loading.memory import (
    Footprint,
    available_memory,
    measure_footprint,
    release_memory,
)
from llmcond.encoders.loading.quantization import quantization_config
from llmcond.encoders.poolings import get_pooling
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.routers.passes import passes_class
from llmcond.encoders.spec import Quantize
from llmcond.errors import LlmcondError, first_line
from llmcond.files import format_bytes
from llmcond.system import is_installed, require_libraries


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
    passes_class(identity).load_weights(network, identity, weights, resolved.device)
    network = network.eval().requires_grad_(False)
    dense, dim = load_dense(resolved, int(config.hidden_size))
    return LoadedModel(network, dense, dim)


def check_dense_and_adapter(resolved: ResolvedEncoder, network: Any) -> None:
    """Check the dense layers and the adapter before weights are downloaded.

    ``network`` is a network without memory for its weights. It is modified and cannot be used any
    more. Errors are those of ``check_dense`` and ``check_adapter``.
    """
    checkpoint = resolved.checkpoint
    check_dense(checkpoint)
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
