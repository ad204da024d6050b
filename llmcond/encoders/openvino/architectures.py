"""The architectures that OpenVINO runs, with the tensors of each, and the import of OpenVINO."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmcond.encoders.spec import MAX_LAYERS

_TELEMETRY = "openvino_telemetry"


@cache
def import_openvino() -> Any:
    """Import the module ``openvino`` without its telemetry.

    openvino depends on the package openvino_telemetry. If it finds that package when it is
    imported, it reports the import to Google Analytics. So the package is hidden during the import,
    and openvino uses a stub instead.
    """
    if "openvino" not in sys.modules and _TELEMETRY not in sys.modules:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # makes its import fail
        try:
            import openvino
        finally:
            del sys.modules[_TELEMETRY]
    import openvino

    return openvino


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences between the networks of a ``model_type`` and BERT.

    Attributes:
        prefix: Prefix of the names of tensors in checkpoints for other tasks.
        attention: Name of a layer's attention.
        output: Name of the projection behind the attention.
        norm: Name of the layer norm behind the attention.
        projections: Names of the query, key and value projections.
        typed: Whether there are token type embeddings, which distinguish the halves of a pair.
        padding: Id of the padding token if positions are counted from this id + 1; the padding
            token itself has the position ``padding``. None means that positions start at 0.
        relative: Whether attention has a bias by the distance of two tokens, the same for all
            layers.
    """

    prefix: str
    attention: str = "attention.self"
    output: str = "attention.output.dense"
    norm: str = "attention.output.LayerNorm"
    projections: tuple[str, str, str] = ("query", "key", "value")
    typed: bool = True
    padding: int | None = None
    relative: bool = False


ARCHITECTURES = {
    "bert": Architecture("bert."),
    "roberta": Architecture("roberta.", padding=1),
    "xlm-roberta": Architecture("roberta.", padding=1),
    "mpnet": Architecture(
        "mpnet.",
        attention="attention.attn",
        output="attention.attn.o",
        norm="attention.LayerNorm",
        projections=("q", "k", "v"),
        typed=False,
        padding=1,
        relative=True,
    ),
}
#: GELU activations by their names in config.json, with OpenVINO's names of their approximations.
GELU = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
ACTIVATIONS = (*GELU, "relu")


def tensor_shapes(config: Mapping[str, Any], *, pooler: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a network, by its name without the prefix.

    Args:
        config: Config of a checkpoint, of one of ``ARCHITECTURES``.
        pooler: Whether to include the dense layer on the first token.

    Raises:
        KeyError: If a size is missing.
        TypeError: If a size is not a number.
        ValueError: If a size is not a number, the heads do not divide the dimensions, or the layers
            are too many to list.
    """
    architecture = ARCHITECTURES[config["model_type"]]
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads = int(config["num_attention_heads"])
    if heads < 1 or width % heads:
        raise ValueError(f"{width} dimensions and {heads} heads")
    n_layers = int(config["num_hidden_layers"])
    if n_layers > MAX_LAYERS:
        raise ValueError(f"{n_layers:,} layers")
    linear = {
        **dict.fromkeys(
            (f"{architecture.attention}.{name}" for name in architecture.projections),
            (width, width),
        ),
        architecture.output: (width, width),
        "intermediate.dense": (inner, width),
        "output.dense": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (int(config["vocab_size"]), width),
        "embeddings.position_embeddings.weight": (int(config["max_position_embeddings"]), width),
    }
    if architecture.typed:
        types = int(config.get("type_vocab_size", 2))
        shapes["embeddings.token_type_embeddings.weight"] = (types, width)
    if architecture.relative:
        buckets = int(config.get("relative_attention_num_buckets", 32))
        shapes["encoder.relative_attention_bias.weight"] = (buckets, heads)
    layers = [f"encoder.layer.{i}" for i in range(n_layers)]
    norms = ["embeddings.LayerNorm"]
    for layer in layers:
        norms += [f"{layer}.{architecture.norm}", f"{layer}.output.LayerNorm"]
        for name, shape in linear.items():
            shapes[f"{layer}.{name}.weight"] = shape
            shapes[f"{layer}.{name}.bias"] = shape[:1]
    if pooler:
        shapes |= {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    return shapes


def linear_layers(config: Mapping[str, Any], *, pooler: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of the weight of each linear layer, by the layer's name."""
    shapes = tensor_shapes(config, pooler=pooler)
    return {
        name: shapes[f"{name}.weight"]
        for name in (key.removesuffix(".bias") for key in shapes if key.endswith(".bias"))
        if len(shapes[f"{name}.weight"]) == 2
    }


def bytes_needed(config: Mapping[str, Any], *, pooler: bool) -> int:
    """Return the memory in bytes that a network needs while it is compiled.

    It holds the network's tensors in float32, and OpenVINO's copies of them.
    """
    shapes = tensor_shapes(config, pooler=pooler)
    return 2 * 4 * sum(math.prod(shape) for shape in shapes.values())
