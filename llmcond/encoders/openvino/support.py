"""The decision whether OpenVINO runs an encoder, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmcond.encoders.checkpoints.checkpoint import Checkpoint
from llmcond.encoders.openvino import library
from llmcond.encoders.openvino.architectures import ACTIVATIONS, ARCHITECTURES
from llmcond.encoders.openvino.weights import CannotRunError, check_files
from llmcond.encoders.poolings import get_pooling
from llmcond.encoders.settings import EncoderIdentity
from llmcond.errors import install_command

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
        f"OpenVINO is not installed ({install_command('openvino')})": not library.is_installed(),
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
    if identity.dtype == "bfloat16" and not library.computes_bfloat16():
        yield "OpenVINO does not compute bfloat16 on this CPU"
    pooler = pooling.part == "pooler"
    try:
        for adapter in checkpoint.members or (checkpoint.adapter,):
            check_files(replace(checkpoint, adapter=adapter), config, pooler=pooler)
    except CannotRunError as error:
        yield str(error)
