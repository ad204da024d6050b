"""Reading a checkpoint's weights: all that its architecture has, and nothing else."""

from __future__ import annotations

import re
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from llmcond.encoders.checkpoints.checkpoint import read_settings, weight_files
from llmcond.encoders.loading.architecture import network_class
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.errors import LlmcondError, UserError, first_line


def read_network(resolved: ResolvedEncoder, config: Any, arguments: dict[str, Any]) -> Any:
    """Read an encoder's network.

    Args:
        resolved: the encoder.
        config: of its architecture.
        arguments: of ``from_pretrained``: type, quantisation and placement.

    Raises:
        LlmcondError: weights that are missing, or that belong to another architecture.
    """
    folder, network = resolved.checkpoint.folder, network_class(config)
    files = weight_files(folder)
    if "quantization_config" in arguments and files:
        # Read tensor by tensor: mapped into memory, as transformers does by itself, the whole
        # checkpoint would count as used until the last weight is quantised.
        slices: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt", device="cpu", backend="pread")
            slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
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
        also = f" It has {_named(unexpected)} that belong to another one." if unexpected else ""
        raise LlmcondError(
            f"{name} lacks {_named(missing)} of its architecture; vectors from random weights "
            f"would be noise.{also}"
        )
    if unexpected:
        raise LlmcondError(
            f"{name} has {_named(unexpected)} that its architecture ({config.model_type}) does not "
            "have, so it is another one, and its vectors would be wrong."
        )
    return network


#: What an encoder leaves out rightly: heads of other tasks, and buffers of older versions.
_NOT_OURS = re.compile(
    r"^(\w+\.)?(lm_head|embed_out|cls|classifier|score|qa_outputs|predictions|"
    r"vocab_(transform|layer_norm|projector)|(discriminator|generator)_predictions(_head)?)\.|"
    r"^(mlp|head|decoder)\.|(^|\.)pooler\.|\.(position_ids|inv_freq|masked_bias)$"
)


def _named(keys: list[str]) -> str:
    shown = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    return f"{len(keys)} weights ({shown})"


_ACTIVATIONS = {kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU)}


def load_dense(resolved: ResolvedEncoder, width: int) -> tuple[nn.Sequential, int]:
    """Load the layers of sentence-transformers that follow the pooling, in float32.

    Args:
        resolved: the encoder.
        width: of the pooled vectors.

    Returns:
        The layers, often none, and the size of what comes out.

    Raises:
        UserError: an activation that is not supported.
        LlmcondError: weights that cannot be read.
    """
    layers: list[nn.Module] = []
    for name in resolved.dense:
        folder = resolved.checkpoint.folder / name
        config = read_settings(folder / "config.json", {})
        activation = str(config.get("activation_function"))
        kind = _ACTIVATIONS.get(activation.rpartition(".")[2])
        if kind is None or not activation.startswith("torch.nn."):
            raise UserError(
                f"{resolved.checkpoint.name} has a dense layer with the activation {activation!r}. "
                f"Supported: {', '.join(_ACTIVATIONS)} of torch.nn."
            )
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
        layers += [linear, kind()]
        width = linear.out_features
    dense = nn.Sequential(*layers).to(resolved.device).requires_grad_(False)
    return dense, width
