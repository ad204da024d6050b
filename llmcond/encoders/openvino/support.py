"""Whether OpenVINO runs an encoder, and the tensors of its checkpoint as float32 arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from llmcond.base.errors import first_line, install_command
from llmcond.base.system import is_installed, native_bfloat16
from llmcond.encoders.adapter import CONFIG, PREFIX, WEIGHTS, NotPlainError, plain_lora
from llmcond.encoders.checkpoint import (
    IGNORED_WEIGHTS,
    Checkpoint,
    check_dense,
    has_weights,
    read_settings,
    weight_files,
)
from llmcond.encoders.settings import EncoderIdentity
from llmcond.encoders.spec import (
    ACTIVATIONS,
    ARCHITECTURES,
    get_pooling,
    import_openvino,
    linear_layers,
    tensor_shapes,
)


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
    shapes = _tensor_shapes(config, pooler=pooler)
    prefix = ARCHITECTURES[config["model_type"]].prefix
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
) -> tuple[float, dict[str, tuple[_StoredTensor, _StoredTensor]]]:
    """Return the scale of an adapter, and the factors A and B for each adapted weight.

    Raises:
        CannotRunError: If it is not a plain LoRA adapter of this network.
    """
    try:
        layers = linear_layers(config, pooler=pooler)
        scale, shapes = plain_lora(read_settings(folder / CONFIG, {}), layers)
    except NotPlainError as error:
        raise CannotRunError(f"its adapter has {error}") from error
    prefix = ARCHITECTURES[config["model_type"]].prefix
    tensors = {}
    for tensor in _list_tensors(folder / WEIGHTS, stack):
        name = tensor.key.removeprefix(PREFIX).removeprefix(prefix)
        if pooler or not name.startswith("pooler."):
            tensors[name] = tensor
    for name in tensors.keys() ^ shapes.keys():
        raise CannotRunError(f"its adapter has tensors of other layers than its config: {name}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise CannotRunError(f"its adapter has other shapes than expected at {name}")
    names = {name.partition(".lora_")[0] for name in shapes}
    return scale, {
        f"{name}.weight": (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
        for name in names
    }


def _tensor_shapes(config: Mapping[str, Any], *, pooler: bool) -> dict[str, tuple[int, ...]]:
    """Call ``tensor_shapes``; raise a CannotRunError if config.json lacks a size."""
    try:
        return tensor_shapes(config, pooler=pooler)
    except (KeyError, TypeError, ValueError) as error:
        raise CannotRunError(f"its config.json lacks a size ({error})") from error


#: Settings of a config that change what a network computes, with their supported values.
_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ACTIVATIONS,
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
}


def find_reason_against(
    checkpoint: Checkpoint, identity: EncoderIdentity, config: Mapping[str, Any]
) -> str | None:
    """Return why OpenVINO does not run an encoder on a CPU; None if it does.

    If a checkpoint's weights have not been downloaded yet, they are not checked.

    Raises:
        UserError: If one of the checkpoint's small files cannot be read.
    """
    return next(_find_reasons(checkpoint, identity, config), None)


def _find_reasons(
    checkpoint: Checkpoint, identity: EncoderIdentity, config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the reasons; those after the first are meaningless, as checks build on earlier ones."""
    kind, pooling = str(config.get("model_type")), get_pooling(identity.pooling)
    has_file_weights = identity.quantize == "none" and checkpoint.random_device is None
    unsupported = {
        f"OpenVINO is not installed ({install_command('openvino')})": not is_installed("openvino"),
        f"its architecture is {kind}": kind not in ARCHITECTURES,
        "its attention is causal": identity.attention != "bidirectional",
        "a router acts inside its network": identity.routes_inside,
        f"it pools by {identity.pooling}": pooling.states == "all" or pooling.part == "latent",
        "its weights are not those of its files": not has_file_weights,
        "OpenVINO does not compute float16 on a CPU": identity.dtype == "float16",
    }
    yield from (reason for reason, applies in unsupported.items() if applies)
    for key, supported in _SETTINGS.items():
        if config.get(key) not in supported:
            yield f"its config.json has {key} = {config.get(key)!r}"
    if identity.dtype == "bfloat16" and not computes_bfloat16():
        yield "OpenVINO does not compute bfloat16 on this CPU"
    pooler = pooling.part == "pooler"
    try:
        for adapter in checkpoint.members or (checkpoint.adapter,):
            check_files(replace(checkpoint, adapter=adapter), config, pooler=pooler)
    except CannotRunError as error:
        yield str(error)


def computes_bfloat16() -> bool:
    """Return whether OpenVINO multiplies bfloat16 in hardware on this CPU.

    OpenVINO also reports bfloat16 on CPUs with AVX-512 that lack it, where it would be emulated.
    """
    return native_bfloat16() and _supports_bfloat16()


@cache
def _supports_bfloat16() -> bool:
    capabilities = import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "BF16" in capabilities
