"""Loading an encoder onto its device, or telling beforehand why it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from torch import nn

from llmcond.encoders.checkpoints.adapter import ROUTER, attach, inject
from llmcond.encoders.checkpoints.checkpoint import check_dense, fetch_weights
from llmcond.encoders.checkpoints.weights import check_size, load_dense, read_network
from llmcond.encoders.loading.architecture import build_on_meta, quiet
from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.encoders.loading.memory import Footprint, available, footprint, release
from llmcond.encoders.loading.quantization import installed, quantization, require
from llmcond.encoders.poolings import pooling_named
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.routers.inside import passes_of
from llmcond.encoders.spec import Quantize
from llmcond.errors import LlmcondError, first_line
from llmcond.files import gib


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and the dense layers that follow its pooling.

    Attributes:
        network: from token ids to token vectors.
        dense: from pooled vectors to embeddings of size ``dim``, in float32; often empty.
    """

    network: Any
    dense: nn.Sequential
    dim: int


@quiet()
def load_model(resolved: ResolvedEncoder, config: Any) -> LoadedModel:
    """Load the checkpoint's weights in the resolved type, on the resolved device.

    An adapter is added to its base's weights; where those are quantised, its layers stay.

    Raises:
        UserError: an architecture that transformers lacks, quantisation or an adapter without its
            library, or an adapter of another architecture.
        LlmcondError: weights that do not fit the architecture, or no memory for them.
    """
    if resolved.device != "cpu":
        release(resolved.device)  # the memory of an encoder that was there before
    checkpoint, identity = resolved.checkpoint, resolved.identity
    arguments: dict[str, Any] = {"dtype": TORCH_DTYPES[identity.dtype]}
    if identity.quantize != "none":
        arguments["quantization_config"] = quantization(identity.quantize, identity.dtype)
    empty = build_on_meta(config)
    size = footprint(empty)
    placement = _placement(resolved, size)
    if placement == "auto":
        require(f"{checkpoint.name} must be spread over several devices", "accelerate")
    check_parts(resolved, empty)
    if checkpoint.drawn_on is None:
        fetch_weights(checkpoint)
        check_size(checkpoint, size.n_parameters)
    # With accelerate, weights go to a GPU one by one instead of all through the host's memory.
    if (placement != "cpu" and installed("accelerate")) or identity.quantize != "none":
        arguments["device_map"] = placement
    network = _read(resolved, config, arguments, size)
    _drop_pooler(network, resolved)
    if checkpoint.adapter is not None:
        merge = identity.quantize == "none"
        network = attach(network, checkpoint.adapter, checkpoint.name, merge=merge)
    block: Any = getattr(network, "latent_attention_model", None)
    # What accelerate has put off to another place has no values to multiply out.
    here = block is not None and not any(value.is_meta for value in block.parameters())
    if resolved.options.fold_latents and here:
        block.fold()
    if "device_map" not in arguments:
        network = network.to(resolved.device)
    weights = (checkpoint.adapter or checkpoint.folder) / ROUTER
    passes_of(identity).load_weights(network, identity, weights, resolved.device)
    network = network.eval().requires_grad_(False)
    dense, dim = load_dense(resolved, int(config.hidden_size))
    return LoadedModel(network, dense, dim)


def check_parts(resolved: ResolvedEncoder, network: Any) -> None:
    """Refuse dense layers, and an adapter that is another base's, before weights are downloaded.

    The network has no memory for weights, and is used up. Raises as :func:`check_dense` and
    :func:`inject`.
    """
    checkpoint = resolved.checkpoint
    check_dense(checkpoint)
    if checkpoint.adapter is not None:
        _drop_pooler(network, resolved)
        inject(network, checkpoint.adapter, checkpoint.name)


def _read(
    resolved: ResolvedEncoder, config: Any, arguments: dict[str, Any], size: Footprint
) -> Any:
    checkpoint = resolved.checkpoint
    try:
        network = read_network(resolved, config, arguments)
    except torch.OutOfMemoryError as error:
        raise _no_memory(resolved, size) from error
    except UnpicklingError as error:
        # Its own message tells how to run what it has just refused.
        raise LlmcondError(
            f"the weights of {checkpoint.name} cannot be loaded: its .bin files hold more "
            "than tensors, which may be code. Ask for safetensors."
        ) from error
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        # For shapes that differ, transformers points at a report that it has not printed.
        shapes = "mismatch" in str(error) and "shape" in str(error)
        why = "their shapes are not those of config.json" if shapes else first_line(error)
        raise LlmcondError(f"the weights of {checkpoint.name} cannot be loaded: {why}.") from error
    on_gpus = resolved.device != "cpu" and resolved.identity.quantize != "none"
    # Where it spreads an encoder, accelerate reckons with a reserve that we do not know of.
    if on_gpus and any(value.device.type in ("cpu", "meta") for value in network.parameters()):
        raise _no_memory(resolved, size)
    return network


def _drop_pooler(network: Any, resolved: ResolvedEncoder) -> None:
    needed = pooling_named(resolved.identity.pooling).part == "pooler"
    if not needed and getattr(network, "pooler", None) is not None:
        # Where its weights are missing, quantising leaves it broken; and it is not used.
        network.pooler = None


# -- memory ------------------------------------------------------------------------------------


def _placement(resolved: ResolvedEncoder, size: Footprint) -> str:
    """Return the device to load to, or ``auto`` for several; refuse what fits nowhere."""
    identity = resolved.identity
    needed = size.loading(identity.dtype, identity.quantize)
    if needed <= available(resolved.device):
        return resolved.device
    # Quantised weights do not leave the GPU: on the CPU they would be other numbers.
    others = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    others += ["cpu"] if identity.quantize == "none" else []
    together = sum(available(device) for device in others)
    # A GPU that was named by its number is used alone.
    spreads = resolved.options.device in ("auto", "cuda") and resolved.device != "cpu"
    if spreads and needed <= together:
        return "auto"
    raise _no_memory(resolved, size)


def _no_memory(resolved: ResolvedEncoder, size: Footprint) -> LlmcondError:
    dtype, quantize = resolved.identity.dtype, resolved.identity.quantize
    kinds: tuple[str, ...] = get_args(Quantize)
    needed = {kind: gib(size.loading(dtype, kind)) for kind in kinds}
    smaller = kinds[kinds.index(quantize) + 1 :]
    advice = [f"--quantize {kind} ({needed[kind]})" for kind in smaller]
    named = resolved.options.device.startswith("cuda:")
    if named and torch.cuda.device_count() > 1:
        advice.append(f"--device auto, which takes all {torch.cuda.device_count()} GPUs")
    advice += ["--device cpu"] if resolved.device != "cpu" else []
    return LlmcondError(
        f"{resolved.checkpoint.name} does not fit into the memory of {resolved.device}: as "
        f"{dtype}, quantize {quantize}, it needs {needed[quantize]}, and "
        f"{gib(available(resolved.device))} are free. Try "
        f"{' or '.join(advice) or 'a smaller model'}."
    )
