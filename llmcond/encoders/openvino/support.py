"""Whether OpenVINO runs an encoder, and the tensors of its checkpoint as float32 arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from llmcond.base.errors import LlmcondError, first_line, install_command
from llmcond.base.system import computes_natively, is_installed
from llmcond.encoders.adapter import CONFIG, PREFIX, WEIGHTS, NotPlainError, plain_lora
from llmcond.encoders.checkpoint import (
    Checkpoint,
    check_dense,
    read_settings,
    weight_files,
)
from llmcond.encoders.settings import EncoderIdentity
from llmcond.encoders.spec import (
    ACTIVATIONS,
    ARCHITECTURES,
    GELU,
    IGNORED_WEIGHTS,
    get_pooling,
    import_openvino,
    linear_layers,
    tensor_shapes,
)


class CannotRunError(Exception):
    """OpenVINO cannot run an encoder. The message says why; PyTorch may be able to run it."""


#: A dense layer of sentence-transformers behind the pooling, activation(x W^T + b): W, (output
#: size, input size); b, (output size,), or None; and the name of the activation in torch.nn.
DenseLayer = tuple[NDArray[np.float32], NDArray[np.float32] | None, str]


def read_dense(checkpoint: Checkpoint, width: int) -> list[DenseLayer]:
    """Read the dense layers behind the pooling; often there are none.

    ``width`` is the size of pooled vectors.

    Raises:
        UserError: As in ``check_dense``.
        LlmcondError: If weights cannot be read, or are not those of a dense layer.
    """
    layers: list[DenseLayer] = []
    for name, activation in check_dense(checkpoint).items():
        try:
            with ExitStack() as stack:
                path = checkpoint.folder / name / "model.safetensors"
                tensors = {tensor.key: tensor.read() for tensor in _list_tensors(path, stack)}
            weight, bias = tensors.pop("linear.weight"), tensors.pop("linear.bias", None)
            shapes = weight.shape[1:], weight.shape[:1] if bias is None else bias.shape
            if tensors or shapes != ((width,), weight.shape[:1]):
                raise CannotRunError(f"expected a weight of {width} columns, and a bias or none")
        except (CannotRunError, KeyError) as error:
            raise LlmcondError(
                f"the dense layer {name} of {checkpoint.name} cannot be loaded from its "
                f"model.safetensors, the only supported format: {first_line(error)}"
            ) from error
        width = len(weight)
        layers.append((weight, bias, activation))
    return layers


class StoredTensor(NamedTuple):
    """A tensor in a file of weights.

    Attributes:
        key: Its name in the file.
        shape: Its shape.
        read: Reads its values.
    """

    key: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.float32]]


def _list_tensors(path: Path, stack: ExitStack) -> Iterator[StoredTensor]:
    """Yield the tensors of a file, sorted by name; it stays open until ``stack`` is closed."""
    try:
        if path.suffix == ".bin":
            import torch

            tensors = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
            for key, value in sorted(tensors.items()):
                read = partial(lambda tensor: tensor.float().numpy(), value)
                yield StoredTensor(key, tuple(value.shape), read)
            return
        file: Any = stack.enter_context(safe_open(path, "numpy"))
    except Exception as error:  # a damaged file makes libraries raise any kind of error
        raise CannotRunError(f"{path.name} cannot be read: {first_line(error)}") from error
    for key in sorted(file.keys()):
        entry = file.get_slice(key)
        yield StoredTensor(key, tuple(entry.get_shape()), partial(_read_tensor, path, file, key))


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


def open_tensors(
    checkpoint: Checkpoint, config: Mapping[str, Any], stack: ExitStack, *, pooler: bool
) -> dict[str, StoredTensor]:
    """Return the tensors of a network by their names, to be read with its adapter merged in.

    Args:
        checkpoint: The checkpoint. If its weights have not been downloaded yet, the result is
            empty, and only the adapter is checked.
        config: The checkpoint's config.
        stack: The files stay open until it is closed.
        pooler: Whether the encoder uses the dense layer on the first token.

    Raises:
        CannotRunError: If the checkpoint or its adapter has other tensors or shapes than expected,
            or cannot be read.
    """
    try:
        shapes = tensor_shapes(config, pooler=pooler)
        if ARCHITECTURES[config["model_type"]].rotary:
            rotary_frequencies(config)
    except (KeyError, TypeError, ValueError) as error:
        raise CannotRunError(f"its config.json lacks a size ({error})") from error
    prefix, folder = ARCHITECTURES[config["model_type"]].prefix, checkpoint.folder
    tensors: dict[str, StoredTensor] = {}
    if paths := weight_files(folder):
        tensors = _match_tensors(paths, shapes, (prefix,), "its weights differ", stack)
    if checkpoint.adapter is not None:
        layers = linear_layers(config, pooler=pooler)
        try:
            scale, shapes = plain_lora(read_settings(checkpoint.adapter / CONFIG, {}), layers)
        except NotPlainError as error:
            raise CannotRunError(f"its adapter has {error}") from error
        paths = [checkpoint.adapter / WEIGHTS]
        factors = _match_tensors(paths, shapes, (PREFIX, prefix), "its adapter differs", stack)
        for layer in {name.partition(".lora_")[0] for name in shapes} if tensors else ():
            name = f"{layer}.weight"
            down, up = (factors[f"{layer}.lora_{part}.weight"] for part in "AB")
            read = partial(_add_factors, tensors[name], scale, down, up)
            tensors[name] = tensors[name]._replace(read=read)
    return tensors


def _match_tensors(
    paths: Iterable[Path],
    shapes: Mapping[str, tuple[int, ...]],
    prefixes: Iterable[str],
    owner: str,
    stack: ExitStack,
) -> dict[str, StoredTensor]:
    """Return the tensors of files by their names without prefixes, which must have these shapes."""
    tensors: dict[str, StoredTensor] = {}
    for tensor in chain.from_iterable(_list_tensors(path, stack) for path in paths):
        name = tensor.key
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        for new, old in (("weight", "gamma"), ("bias", "beta")):  # names in the oldest files
            name = name.replace(f"LayerNorm.{old}", f"LayerNorm.{new}")
        if name in shapes or not IGNORED_WEIGHTS.search(name):
            tensors[name] = tensor
    stored_shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for name in sorted(name for name, _ in stored_shapes.items() ^ shapes.items()):
        raise CannotRunError(f"{owner} from its config in the tensor {name}")
    return tensors


def _add_factors(
    base: StoredTensor, scale: float, down: StoredTensor, up: StoredTensor
) -> NDArray[np.float32]:
    added = scale * (up.read() @ down.read())
    if not np.isfinite(added).all():
        raise CannotRunError(f"its adapter is not finite at {up.key}")
    return base.read() + added


#: Settings of a config that change what a network computes, with their supported values.
_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ACTIVATIONS,
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
}


#: The same for an architecture that is ``rotary``.
_ROTARY_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": tuple(GELU),
    "use_bidirectional_attention": (True,),
    "num_key_value_heads": (1,),
    "attention_bias": (None, False),
    "attn_logit_softcapping": (None,),
    "quantization_config": (None,),
}
#: Types of layers of a rotary architecture, whose tokens attend to all tokens or to near ones.
WINDOWS = ("full_attention", "sliding_attention")


def rotary_frequencies(config: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return the angles by which a position turns the pairs of dimensions of a head, by layer type.

    Raises:
        KeyError: If the config does not state them.
        ValueError: If they are scaled, or for layers of other types.
    """
    if not set(config["layer_types"]) <= {*WINDOWS}:
        raise ValueError(f"the layers {sorted(set(config['layer_types']))}")
    settings = config.get("rope_parameters")
    if settings is None:
        names = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
        settings = {kind: {"rope_theta": config[name]} for kind, name in names.items()}
        settings["full_attention"] |= config.get("rope_scaling") or {}
    if any(settings[kind].get("rope_type", "default") != "default" for kind in WINDOWS):
        raise ValueError("scaled rotary positions")
    exponents = np.arange(0, int(config["head_dim"]), 2) / int(config["head_dim"])
    return {kind: float(settings[kind]["rope_theta"]) ** -exponents for kind in WINDOWS}


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
    rotary, padding = ARCHITECTURES[kind].rotary, ARCHITECTURES[kind].padding
    # MPNet counts positions from a constant; RoBERTa from the id of the padding token.
    pad_id = config.get("pad_token_id", padding)
    if padding is not None and kind != "mpnet" and pad_id != padding:
        yield f"its config.json has pad_token_id = {pad_id!r}"
    for key, supported in (_ROTARY_SETTINGS if rotary else _SETTINGS).items():
        if config.get(key) not in supported:
            yield f"its config.json has {key} = {config.get(key)!r}"
    if identity.dtype == "bfloat16" and not computes_bfloat16():
        yield "OpenVINO does not compute bfloat16 on this CPU"
    pooler = pooling.part == "pooler"
    try:
        for adapter in checkpoint.members or (checkpoint.adapter,):
            with ExitStack() as stack:
                open_tensors(replace(checkpoint, adapter=adapter), config, stack, pooler=pooler)
    except CannotRunError as error:
        yield str(error)


def computes_bfloat16() -> bool:
    """Return whether OpenVINO multiplies bfloat16 in hardware on this CPU.

    OpenVINO also reports bfloat16 on CPUs with AVX-512 that lack it, where it would be emulated.
    """
    return computes_natively("bfloat16") and _supports_bfloat16()


@cache
def _supports_bfloat16() -> bool:
    capabilities = import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "BF16" in capabilities
