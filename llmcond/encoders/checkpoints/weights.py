"""Reading a checkpoint's weights: all that its architecture has, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from llmcond.encoders.checkpoints.adapter import counted
from llmcond.encoders.checkpoints.checkpoint import (
    NOT_OURS,
    WEIGHT_FILES,
    Checkpoint,
    check_dense,
    weight_files,
)
from llmcond.encoders.loading.architecture import build_on_meta, load_config, network_class
from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.encoders.poolings import pooling_named
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.errors import LlmcondError, first_line
from llmcond.files import digest_bytes


def check_size(checkpoint: Checkpoint, n_parameters: int) -> None:
    """Raise an LlmcondError if a config asks for memory of another size than the weights have."""
    files = (path for name in WEIGHT_FILES for path in checkpoint.folder.glob(name))
    size = sum(path.stat().st_size for path in files)
    # Weights in 2 bit have four in a byte; what is small is told apart by its tensors.
    if n_parameters > 4 * size + 10_000_000:
        raise LlmcondError(
            f"config.json of {checkpoint.name} describes {n_parameters:,} parameters, and the "
            f"weights beside it have {size:,} bytes: they do not belong together. Copy both anew."
        )


def read_network(resolved: ResolvedEncoder, config: Any, arguments: dict[str, Any]) -> Any:
    """Read an encoder's network; ``arguments`` are those of ``from_pretrained``.

    Raises:
        LlmcondError: weights that are missing, or that belong to another architecture.
    """
    folder, name = resolved.checkpoint.folder, resolved.checkpoint.name
    slices: dict[str, Any] = {}
    if (device := resolved.checkpoint.drawn_on) is not None:
        dtype = TORCH_DTYPES[resolved.identity.dtype]
        for key, value in build_on_meta(config).state_dict().items():
            slices[key] = _Drawn(key, value.shape, dtype, device)
    elif "quantization_config" in arguments:
        # Read tensor by tensor: mapped into memory, as transformers does by itself, the whole
        # checkpoint would count as used until the last weight is quantised.
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
    pooler = () if pooling_named(resolved.identity.pooling).part == "pooler" else "pooler."
    missing = [key for key in report["missing_keys"] if not key.startswith(pooler)]
    unexpected = [key for key in report["unexpected_keys"] if not NOT_OURS.search(key)]
    if missing:
        also = f" It has {counted(unexpected, 'weights')} that belong to another one."
        raise LlmcondError(
            f"{name} lacks {counted(missing, 'weights')} of its architecture; vectors from random "
            f"weights would be noise.{also if unexpected else ''}"
        )
    if unexpected:
        raise LlmcondError(
            f"{name} has {counted(unexpected, 'weights')} that its architecture "
            f"({config.model_type}) does not have, so it is another one, and its vectors would be "
            "wrong."
        )
    return network


def all_weights(network: nn.Module, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return all weights of a loaded network, by the names of its architecture.

    What was left out or multiplied out when it was loaded is as the checkpoint has it.
    """
    state = dict(network.state_dict())
    names = build_on_meta(load_config(checkpoint)).state_dict().keys()
    found = {name: state[name] for name in names if name in state}
    for path in weight_files(checkpoint.folder):
        with safe_open(path, framework="pt", backend="pread") as file:
            for name in (names - found.keys()) & set(file.keys()):
                found[name] = file.get_tensor(name)
    return found


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A weight that is drawn when it is asked for, as a slice of a file is read then.

    So quantised ones never lie in memory whole: each is made small before the next is drawn.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: str

    def __getitem__(self, _: object) -> Tensor:
        # By its name, whatever the order and the thread.
        seed = int.from_bytes(digest_bytes(self.name.encode(), size=6))
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(self.shape, generator=generator, dtype=self.dtype, device=self.device)
        if len(self.shape) > 1:
            return drawn.mul_(self.shape[-1] ** -0.5)  # what goes in comes out as large
        return drawn.mul_(0.02).add_("norm" in self.name.lower() and self.name.endswith("weight"))


def load_dense(resolved: ResolvedEncoder, width: int) -> tuple[nn.Sequential, int]:
    """Load the layers of sentence-transformers that follow the pooling, in float32.

    Returns:
        The layers, often none, and the size of what comes out; pooled vectors have ``width``.

    Raises:
        UserError: as :func:`check_dense`.
        LlmcondError: weights that cannot be read.
    """
    layers: list[nn.Module] = []
    for name, activation in check_dense(resolved.checkpoint).items():
        folder = resolved.checkpoint.folder / name
        try:
            weights = load_file(folder / "model.safetensors")
            linear = nn.Linear(width, len(weights["linear.weight"]), "linear.bias" in weights)
            linear.load_state_dict(
                {key.removeprefix("linear."): value.float() for key, value in weights.items()}
            )
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise LlmcondError(
                f"the dense layer {name} of {resolved.checkpoint.name} cannot be loaded from its "
                f"model.safetensors, the one format that is read: {first_line(error)}"
            ) from error
        layers += [linear, getattr(nn, activation)()]
        width = linear.out_features
    return nn.Sequential(*layers).to(resolved.device).requires_grad_(False), width
