"""Reading of a checkpoint's weights, which must be exactly those of its architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from llmcond.encoders.checkpoints.adapter import summarize_names
from llmcond.encoders.checkpoints.checkpoint import (
    IGNORED_WEIGHTS,
    WEIGHT_FILES,
    Checkpoint,
    check_dense,
    weight_files,
)
from llmcond.encoders.loading.architecture import build_on_meta, load_config, network_class
from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.encoders.poolings import get_pooling
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.errors import LlmcondError, first_line
from llmcond.files import digest_bytes


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
        for file in weight_files(folder):
            opened: Any = safe_open(file, framework="pt", device="cpu", backend="pread")
            slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
    network, report = network_class(config).from_pretrained(
        None if slices else str(folder),
        config=config,
        state_dict=slices or None,
        output_loading_info=True,
        weights_only=True,
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
    for path in weight_files(checkpoint.folder):
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
        LlmcondError: the weights cannot be read.
    """
    layers: list[nn.Module] = []
    for name, activation in check_dense(resolved.checkpoint).items():
        folder = resolved.checkpoint.folder / name
        try:
            tensors = load_file(folder / "model.safetensors")
            linear = nn.Linear(width, len(tensors["linear.weight"]), "linear.bias" in tensors)
            linear.load_state_dict(
                {key.removeprefix("linear."): value.float() for key, value in tensors.items()}
            )
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise LlmcondError(
                f"the dense layer {name} of {resolved.checkpoint.name} cannot be loaded from its "
                f"model.safetensors, the only supported format: {first_line(error)}"
            ) from error
        layers += [linear, getattr(nn, activation)()]
        width = linear.out_features
    return nn.Sequential(*layers).to(resolved.device).requires_grad_(False), width
