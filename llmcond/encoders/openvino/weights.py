"""A checkpoint's tensors as float32 arrays, with its adapter merged into them."""

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

from llmcond.encoders.checkpoints.adapter import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    is_target,
    special_fields,
)
from llmcond.encoders.checkpoints.checkpoint import (
    IGNORED_WEIGHTS,
    Checkpoint,
    check_dense,
    has_weights,
    read_settings,
    weight_files,
)
from llmcond.encoders.openvino.architectures import ARCHITECTURES, linear_layers, tensor_shapes
from llmcond.errors import first_line


class CannotRunError(Exception):
    """OpenVINO cannot run an encoder. The message says why; PyTorch may be able to run it."""


def check_files(checkpoint: Checkpoint, config: Mapping[str, Any], *, pooler: bool) -> None:
    """Check that a checkpoint and its adapter have the expected tensors and shapes.

    If the checkpoint's weights have not been downloaded yet, only the adapter is checked.

    Args:
        checkpoint: The checkpoint.
        config: The checkpoint's config.
        pooler: Whether the encoder uses the dense layer on the first token.

    Raises:
        CannotRunError: If they have other tensors or shapes, or cannot be read.
    """
    _tensor_shapes(config, pooler=pooler)
    with ExitStack() as stack:
        if has_weights(checkpoint.folder):
            _find_tensors(checkpoint, config, stack, pooler=pooler)
        if checkpoint.adapter is not None:
            _find_factors(checkpoint.adapter, config, stack, pooler=pooler)


def read_tensors(
    checkpoint: Checkpoint, config: Mapping[str, Any], *, pooler: bool
) -> dict[str, NDArray[np.float32]]:
    """Read a network's tensors by their names, and merge an adapter into them.

    The arguments are those of ``check_files``.

    Raises:
        CannotRunError: As in ``check_files``, or if an adapter has values that are not finite.
    """
    with ExitStack() as stack:
        entries = _find_tensors(checkpoint, config, stack, pooler=pooler)
        tensors = {name: tensor.read() for name, tensor in entries.items()}
        if checkpoint.adapter is None:
            return tensors
        scale, factors = _find_factors(checkpoint.adapter, config, stack, pooler=pooler)
        for name, (down, up) in factors.items():
            added = scale * (up.read() @ down.read())
            if not np.isfinite(added).all():
                raise CannotRunError(f"its adapter is not finite at {name}")
            tensors[name] = tensors[name] + added
    return tensors


class DenseWeights(NamedTuple):
    """A dense layer of sentence-transformers behind the pooling: activation(x W^T + b).

    Attributes:
        weight: W, (output size, input size).
        bias: b, (output size,), or None.
        activation: Name of the activation in torch.nn.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    activation: str


def read_dense(checkpoint: Checkpoint, width: int) -> list[DenseWeights]:
    """Read the dense layers behind the pooling; often there are none.

    ``width`` is the size of pooled vectors.

    Raises:
        UserError: As in ``check_dense``.
        CannotRunError: If weights cannot be read, or are not those of a dense layer.
    """
    layers = []
    for name, activation in check_dense(checkpoint).items():
        with ExitStack() as stack:
            path = checkpoint.folder / name / "model.safetensors"
            tensors = {tensor.key: tensor.read() for tensor in _list_tensors(path, stack)}
        weight = tensors.get("linear.weight", np.empty((0, 0), dtype=np.float32))
        if not tensors.keys() <= {"linear.weight", "linear.bias"} or weight.shape[1:] != (width,):
            raise CannotRunError(f"its layer {name} has other tensors than expected")
        width = len(weight)
        layers.append(DenseWeights(weight, tensors.get("linear.bias"), activation))
    return layers


class _StoredTensor(NamedTuple):
    """A tensor in a file of weights.

    Attributes:
        key: Its name in the file.
        shape: Its shape.
        read: Reads its values.
    """

    key: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.float32]]


def _list_tensors(path: Path, stack: ExitStack) -> Iterator[_StoredTensor]:
    """Yield the tensors of a file, sorted by name; it stays open until ``stack`` is closed."""
    try:
        if path.suffix == ".bin":
            import torch

            tensors = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
            for key, value in sorted(tensors.items()):
                yield _StoredTensor(key, tuple(value.shape), partial(_to_array, value))
            return
        file: Any = stack.enter_context(safe_open(path, "numpy"))
    except Exception as error:  # a damaged file makes libraries raise any kind of error
        raise CannotRunError(f"{path.name} cannot be read: {first_line(error)}") from error
    for key in sorted(file.keys()):
        entry = file.get_slice(key)
        yield _StoredTensor(key, tuple(entry.get_shape()), partial(_read_tensor, path, file, key))


def _to_array(tensor: Any) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.float().numpy()
    return values


def _read_tensor(path: Path, file: Any, key: str) -> NDArray[np.float32]:
    """Read a tensor of an open safetensors file as float32."""
    dtype = file.get_slice(key).get_dtype()
    if dtype not in ("F32", "F16", "F64", "BF16"):
        raise CannotRunError(f"its weights have the type {dtype}")
    if dtype != "BF16":
        values: NDArray[np.float32] = file.get_tensor(key)
        return values.astype(np.float32, copy=False)
    # numpy has no bfloat16, so the bits are read. They are the upper half of a float32.
    with path.open("rb") as header:
        size = int.from_bytes(header.read(8), "little")
        entry = json.loads(header.read(size))[key]
    begin, end = entry["data_offsets"]
    bits = np.fromfile(path, np.uint16, (end - begin) // 2, offset=8 + size + begin)
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def _find_tensors(
    checkpoint: Checkpoint, config: Mapping[str, Any], stack: ExitStack, *, pooler: bool
) -> dict[str, _StoredTensor]:
    """Return the tensors of the network by their names without the prefix.

    Raises:
        CannotRunError: If a tensor is missing, unknown or of another shape.
    """
    shapes, prefix = (
        _tensor_shapes(config, pooler=pooler),
        ARCHITECTURES[config["model_type"]].prefix,
    )
    tensors: dict[str, _StoredTensor] = {}
    folder = checkpoint.folder
    for path in weight_files(folder) or weight_files(folder, "pytorch_model.bin"):
        for tensor in _list_tensors(path, stack):
            name = tensor.key.removeprefix(prefix)
            for new, old in (("weight", "gamma"), ("bias", "beta")):  # names in the oldest files
                name = name.replace(f"LayerNorm.{old}", f"LayerNorm.{new}")
            if name in shapes:
                tensors[name] = tensor
            elif not IGNORED_WEIGHTS.search(tensor.key):
                raise CannotRunError(f"its weights have the tensor {tensor.key}")
    for name, shape in shapes.items():
        if name not in tensors:
            raise CannotRunError(f"its weights lack the tensor {name}")
        if tensors[name].shape != shape:
            raise CannotRunError(f"its weights have another shape than config.json at {name}")
    return tensors


def _find_factors(
    folder: Path, config: Mapping[str, Any], stack: ExitStack, *, pooler: bool
) -> tuple[float, dict[str, list[_StoredTensor]]]:
    """Return the scale of an adapter, and the factors A and B for each adapted weight.

    Raises:
        CannotRunError: If it is not a plain LoRA adapter of this network.
    """
    settings = read_settings(folder / CONFIG, {})
    if special := special_fields(settings):
        raise CannotRunError(f"its adapter has {', '.join(special)}")
    rank, alpha, targets = (settings.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if not (isinstance(rank, int) and isinstance(alpha, int | float)):
        raise CannotRunError(f"its adapter has r = {rank!r} and lora_alpha = {alpha!r}")
    prefix = ARCHITECTURES[config["model_type"]].prefix
    factors: dict[str, list[_StoredTensor]] = {}
    for tensor in _list_tensors(folder / WEIGHTS, stack):  # sorted, so that A is before B
        name, _, factor = tensor.key.removeprefix(PREFIX).removeprefix(prefix).partition(".lora_")
        if factor not in ("A.weight", "B.weight"):
            raise CannotRunError(f"its adapter has the tensor {tensor.key}")
        if pooler or not name.startswith("pooler."):
            factors.setdefault(name, []).append(tensor)
    layers = linear_layers(config, pooler=pooler)
    try:
        adapted = {name for name in layers if is_target(name, targets)}
    except re.error as error:
        raise CannotRunError(f"its adapter has target_modules = {targets!r}") from error
    if factors.keys() != adapted:
        raise CannotRunError("its adapter has tensors of other layers than target_modules names")
    for name, pair in factors.items():
        out_features, in_features = layers[name]
        if [tensor.shape for tensor in pair] != [(rank, in_features), (out_features, rank)]:
            raise CannotRunError(f"its adapter has other shapes than expected at {name}")
    scale = float(alpha / (rank**0.5 if settings.get("use_rslora") else rank))
    return scale, {f"{name}.weight": pair for name, pair in factors.items()}


def _tensor_shapes(config: Mapping[str, Any], *, pooler: bool) -> dict[str, tuple[int, ...]]:
    """Call ``tensor_shapes``; raise a CannotRunError if config.json lacks a size."""
    try:
        return tensor_shapes(config, pooler=pooler)
    except (KeyError, TypeError, ValueError) as error:
        raise CannotRunError(f"its config.json lacks a size ({error})") from error
