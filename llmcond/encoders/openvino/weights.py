"""A checkpoint's tensors as float32 arrays, with those of its adapter added."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from llmcond.encoders.checkpoints.adapter import BEGUN, CONFIG, PREFIX, WEIGHTS
from llmcond.encoders.checkpoints.checkpoint import (
    NOT_OURS,
    Checkpoint,
    check_dense,
    has_weights,
    read_settings,
    weight_files,
)
from llmcond.encoders.openvino.architectures import ARCHITECTURES, linear_layers, tensor_shapes
from llmcond.errors import first_line

#: The fields of an adapter's config that are read here, or change nothing that is computed. Where
#: any other has a value, something else than the sum of the base and B A is computed.
_PLAIN_LORA = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_alpha",
    "lora_dropout", "peft_version", "qalora_group_size", "r", "revision", "runtime_config",
    "target_modules", "task_type", "use_rslora",
}  # fmt: skip
#: The values that these may have as well.
_FIXED = {"bias": "none", "megatron_core": "megatron.core", "peft_type": "LORA"}


class CannotRunError(Exception):
    """An encoder that OpenVINO does not run; the message says why, and PyTorch may run it."""


def check_files(checkpoint: Checkpoint, config: Mapping[str, Any], *, pooler: bool) -> None:
    """See that a checkpoint and its adapter have the tensors that are expected, in expected shapes.

    The checkpoint's own are not looked at where they are not downloaded yet.

    Raises:
        CannotRunError: they have others, or cannot be read.
    """
    _shapes(config, pooler=pooler)
    with ExitStack() as stack:
        if has_weights(checkpoint.folder):
            _find(checkpoint, config, stack, pooler=pooler)
        if checkpoint.adapter is not None:
            _find_factors(checkpoint.adapter, config, stack, pooler=pooler)


def read_tensors(
    checkpoint: Checkpoint, config: Mapping[str, Any], *, pooler: bool
) -> dict[str, NDArray[np.float32]]:
    """Return a network's tensors by their names, those of an adapter added.

    Raises:
        CannotRunError: as :func:`check_files`, or an adapter whose values are not finite.
    """
    with ExitStack() as stack:
        found = _find(checkpoint, config, stack, pooler=pooler)
        tensors = {name: tensor.read() for name, tensor in found.items()}
        if checkpoint.adapter is None:
            return tensors
        scale, factors = _find_factors(checkpoint.adapter, config, stack, pooler=pooler)
        for name, (down, up) in factors.items():
            added = scale * (up.read() @ down.read())
            if not np.isfinite(added).all():
                raise CannotRunError(f"its adapter is not finite at {name}")
            tensors[name] = tensors[name] + added
    return tensors


class DenseLayer(NamedTuple):
    """A layer of sentence-transformers behind the pooling: activation(x W^T + b)."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    activation: str


def read_dense(checkpoint: Checkpoint, width: int) -> list[DenseLayer]:
    """Return the layers behind the pooling, whose vectors have a ``width``; often none.

    Raises:
        UserError: as :func:`check_dense`.
        CannotRunError: weights that cannot be read.
    """
    layers = []
    for name, activation in check_dense(checkpoint).items():
        with ExitStack() as stack:
            path = checkpoint.folder / name / "model.safetensors"
            own = {tensor.key: tensor.read() for tensor in _opened(path, stack)}
        weight = own.get("linear.weight", np.empty((0, 0), dtype=np.float32))
        if not own.keys() <= {"linear.weight", "linear.bias"} or weight.shape[1:] != (width,):
            raise CannotRunError(f"its layer {name} has other tensors than expected")
        width = len(weight)
        layers.append(DenseLayer(weight, own.get("linear.bias"), activation))
    return layers


class _Tensor(NamedTuple):
    """A tensor that was found in a file, and how it is read."""

    key: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.float32]]


def _opened(path: Path, stack: ExitStack) -> Iterator[_Tensor]:
    """Yield the tensors of a file, by their names in order; it stays open as long as ``stack``."""
    try:
        if path.suffix == ".bin":
            import torch

            old = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
            for key, value in sorted(old.items()):
                yield _Tensor(key, tuple(value.shape), partial(_as_array, value))
            return
        file: Any = stack.enter_context(safe_open(path, "numpy"))
    except Exception as error:  # whatever a damaged file can make a library raise
        raise CannotRunError(f"{path.name} cannot be read: {first_line(error)}") from error
    for key in sorted(file.keys()):
        kept = file.get_slice(key)
        yield _Tensor(key, tuple(kept.get_shape()), partial(_read, path, file, key))


def _as_array(tensor: Any) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.float().numpy()
    return values


def _read(path: Path, file: Any, key: str) -> NDArray[np.float32]:
    kind = file.get_slice(key).get_dtype()
    if kind not in ("F32", "F16", "F64", "BF16"):
        raise CannotRunError(f"its weights have the type {kind}")
    if kind != "BF16":
        read: NDArray[np.float32] = file.get_tensor(key)
        return read.astype(np.float32, copy=False)
    # numpy has no such type, so its bits are read: they are the upper half of a float32's.
    with path.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        entry = json.loads(opened.read(size))[key]
    begin, end = entry["data_offsets"]
    bits = np.fromfile(path, np.uint16, (end - begin) // 2, offset=8 + size + begin)
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def _find(
    checkpoint: Checkpoint, config: Mapping[str, Any], stack: ExitStack, *, pooler: bool
) -> dict[str, _Tensor]:
    """Return the tensors of the network by their names."""
    shapes, prefix = _shapes(config, pooler=pooler), ARCHITECTURES[config["model_type"]].prefix
    found: dict[str, _Tensor] = {}
    folder = checkpoint.folder
    for path in weight_files(folder) or weight_files(folder, "pytorch_model.bin"):
        for tensor in _opened(path, stack):
            name = tensor.key.removeprefix(prefix)
            for new, old in (("weight", "gamma"), ("bias", "beta")):  # as the oldest have them
                name = name.replace(f"LayerNorm.{old}", f"LayerNorm.{new}")
            if name in shapes:
                found[name] = tensor
            elif not NOT_OURS.search(tensor.key):
                raise CannotRunError(f"its weights have the tensor {tensor.key}")
    for name, shape in shapes.items():
        if name not in found:
            raise CannotRunError(f"its weights lack the tensor {name}")
        if found[name].shape != shape:
            raise CannotRunError(f"its weights have another shape than config.json at {name}")
    return found


def _find_factors(
    folder: Path, config: Mapping[str, Any], stack: ExitStack, *, pooler: bool
) -> tuple[float, dict[str, list[_Tensor]]]:
    """Return the scale of an adapter, and the factors of each weight that it is added to."""
    record = read_settings(folder / CONFIG, {})
    wrong = [
        key
        for key, value in record.items()
        if value and key not in _PLAIN_LORA and _FIXED.get(key) != value
    ]
    if wrong or record.get("init_lora_weights") not in BEGUN:
        raise CannotRunError(f"its adapter has {', '.join(wrong) or 'init_lora_weights'}")
    rank, alpha, targets = (record.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if not (isinstance(rank, int) and isinstance(alpha, int | float)):
        raise CannotRunError(f"its adapter has r = {rank!r} and lora_alpha = {alpha!r}")
    prefix = ARCHITECTURES[config["model_type"]].prefix
    factors: dict[str, list[_Tensor]] = {}
    for tensor in _opened(folder / WEIGHTS, stack):  # sorted, so that A is before B
        name, _, factor = tensor.key.removeprefix(PREFIX).removeprefix(prefix).partition(".lora_")
        if factor not in ("A.weight", "B.weight"):
            raise CannotRunError(f"its adapter has the tensor {tensor.key}")
        if pooler or not name.startswith("pooler."):
            factors.setdefault(name, []).append(tensor)
    layers = linear_layers(config, pooler=pooler)
    if factors.keys() != {name for name in layers if _is_target(name, targets)}:
        raise CannotRunError("its adapter has tensors of other layers than target_modules names")
    for name, pair in factors.items():
        out, into = layers[name]
        if [tensor.shape for tensor in pair] != [(rank, into), (out, rank)]:
            raise CannotRunError(f"its adapter has other shapes than expected at {name}")
    scale = float(alpha / (rank**0.5 if record.get("use_rslora") else rank))
    return scale, {f"{name}.weight": pair for name, pair in factors.items()}


def _is_target(name: str, targets: Any) -> bool:
    """Return whether an adapter is for a layer, as peft reads ``target_modules``."""
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, name) is not None
        except re.error as error:
            raise CannotRunError(f"its adapter has target_modules = {targets!r}") from error
    own = targets if isinstance(targets, list) else []
    return any(name == target or name.endswith(f".{target}") for target in own)


def _shapes(config: Mapping[str, Any], *, pooler: bool) -> dict[str, tuple[int, ...]]:
    try:
        return tensor_shapes(config, pooler=pooler)
    except (KeyError, TypeError, ValueError) as error:
        raise CannotRunError(f"its config.json lacks a size ({error})") from error
