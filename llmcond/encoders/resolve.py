"""Resolution of a model's name and options to everything that decides its vectors.

Only small JSON files are read, so that extracting the same features a second time finds them
without loading the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcond.base.errors import UserError
from llmcond.base.system import check_device, choose_device, may_have_gpu, require_quantization
from llmcond.encoders.checkpoint import Checkpoint, find_checkpoint, find_local_checkpoint
from llmcond.encoders.checkpoint_settings import read_adapter_settings, read_supported_settings
from llmcond.encoders.settings import (
    EncoderIdentity,
    EncoderOptions,
    SettingSources,
    default_prompt,
    explain_no_float16,
    joint_prompt,
)
from llmcond.encoders.spec import POOLINGS, Runtime, get_pooling


def cross_encoder_error(folder: object) -> UserError:
    """Return the error for a cross-encoder that is used where embeddings are needed."""
    return UserError(
        f"{folder} is a cross-encoder: it compares two texts and has no embeddings. Compare texts "
        f"with llmcond similarity or evaluate, --run {folder}; for embeddings, train an encoder "
        "with llmcond train-lora."
    )


@dataclass(frozen=True, slots=True)
class ResolvedEncoder:
    """An encoder whose settings are known but whose weights are not loaded.

    Attributes:
        checkpoint: its files.
        identity: everything that decides its vectors.
        device: device that it will run on, ``cpu`` or ``cuda:N``.
        options: the user's options, filled in with the settings that training recorded.
        assumed: what neither a file nor an option states, as phrases for the user.
        runtime: the library that computes.
        openvino_obstacle: why OpenVINO does not run it on this CPU; empty if it does, or was not
            requested.
    """

    checkpoint: Checkpoint
    identity: EncoderIdentity
    device: str
    options: EncoderOptions
    assumed: tuple[str, ...]
    runtime: Runtime = "torch"
    openvino_obstacle: str = ""

    @property
    def shares_prefixes(self) -> bool:
        """Whether prefixes are shared: if the user allows it, and only where it is exact.

        Only in a causal encoder does a token's state depend on the preceding tokens alone. The
        pooled token must also lie outside the shared prefix, as the last token does.
        """
        last = get_pooling(self.identity.pooling).states == "last"
        return self.options.share_prefixes and self.identity.attention == "causal" and last

    def list_members(self) -> list[ResolvedEncoder]:
        """Return the members of an ensemble, each with its adapter, or the encoder itself."""
        return [
            replace(self, checkpoint=replace(self.checkpoint, adapter=member, members=()))
            for member in self.checkpoint.members
        ] or [self]

    @property
    def default_prompt(self) -> str:
        """The bundled prompt that suits the model without further training."""
        if self.checkpoint.recorded_settings or self.identity.routes_inside:
            return self.joint_prompt  # it was trained to read sentence and condition together
        return default_prompt(self.identity.instruction_format, self.identity.pooling)

    @property
    def joint_prompt(self) -> str:
        """The bundled prompt for training, with which all layers see the condition.

        In an encoder with a router, only the layers of the router see it.
        """
        if self.identity.routes_inside:
            return "routed"
        return joint_prompt(self.identity.instruction_format)


def resolve(
    name_or_path: str,
    options: EncoderOptions,
    *,
    identify: bool = True,
    cross: bool = False,
    device: str | None = None,
) -> ResolvedEncoder:
    """Find a model by alias, hub name or folder, and settle every setting that decides its vectors.

    Args:
        name_or_path: alias, hub name or folder.
        options: the user's options.
        identify: identify the weights; those of a local checkpoint are read in full.
        cross: accept the encoder of a cross-encoder.
        device: the device, ``cpu`` or ``cuda:N``, of another machine; None: that of the options.

    Raises:
        UserError: the model is unknown, does not support an option on this machine, or is a
            cross-encoder.
        LlmcondError: the hub cannot be reached.
    """
    device = device or choose_device(options.device)
    checkpoint = find_checkpoint(name_or_path, options.revision, options.like)
    if checkpoint.cross and not cross:
        raise cross_encoder_error(name_or_path)
    return resolve_checkpoint(checkpoint, options, device, identify=identify)


def check_encoder(name_or_path: str, options: EncoderOptions, *, elsewhere: bool = False) -> None:
    """Check an encoder before anything heavy is imported, as far as that is possible.

    A model on the hub is not looked up, and if this machine may have a GPU, the settings of the
    model are not read.

    Args:
        name_or_path: alias, hub name or folder.
        options: the user's options.
        elsewhere: whether other machines compute, whose devices and libraries are not known.

    Raises:
        UserError: the model is unknown, does not support an option, or this machine lacks the
            device or a library.
        LlmcondError: installed weights are not the official ones.
    """
    if not elsewhere:
        check_device(options.device)
        if options.quantize not in (None, "none"):
            require_quantization(options.quantize)
    checkpoint = find_local_checkpoint(name_or_path, options.revision, options.like)
    on_cpu = options.device == "cpu" or not may_have_gpu()
    if checkpoint is not None and on_cpu and not elsewhere:
        resolve_checkpoint(checkpoint, options, "cpu", identify=False)


def resolve_checkpoint(
    checkpoint: Checkpoint, options: EncoderOptions, device: str, *, identify: bool
) -> ResolvedEncoder:
    """Settle every setting of a checkpoint; see ``resolve``.

    Options that the user left open get the values that training recorded, if any.

    Raises:
        UserError: the model does not support an option.
    """
    stated = {**read_adapter_settings(checkpoint), **checkpoint.recorded_settings}
    options = options.filled_from(stated)
    settings = read_supported_settings(checkpoint)
    known, assumed = checkpoint.known, settings.ignored_steps
    sources = SettingSources(
        name=checkpoint.name,
        device=device,
        options=options,
        known=known.settings if known else None,
        files=settings.encoder_settings,
        # Only NV-Embed-v2, a known model, has latent attention.
        poolings=known.poolings if known else [name for name in POOLINGS if name != "latent"],
        model_type=str(settings.config.get("model_type")),
        positions=settings.positions,
        no_float16=explain_no_float16(known, settings.config),
        trained_router=stated.get("router"),
        assumed=assumed,
    )
    identity = sources.settle(checkpoint.weights if identify else "")
    if settings.pooling_config.get("include_prompt") is False and identity.pool_over == "all":
        assumed.append(
            "pooling that includes the instruction, although the checkpoint's files exclude "
            "prompts (--pool-over text to exclude it)"
        )
    if identity.quantize == "8bit" and sources.no_float16:
        assumed.append(
            f"8 bit multiplies in float16, which {checkpoint.name} does not support: "
            f"{sources.no_float16}; prefer --quantize 4bit"
        )
    trained_quantize = checkpoint.recorded_settings.get("quantize")
    if trained_quantize is not None and identity.quantize == "none":
        assumed.append(
            "unquantised weights of the base, although its adapter was trained on "
            f"{trained_quantize} ones (--quantize {trained_quantize} to use those)"
        )
    runtime, reason = _choose_runtime(checkpoint, identity, settings.config, sources)
    if identity.dtype != "float32":
        identity = replace(identity, runtime=runtime)
    return ResolvedEncoder(checkpoint, identity, device, options, tuple(assumed), runtime, reason)


def resolve_base(resolved: ResolvedEncoder) -> ResolvedEncoder | None:
    """Return the encoder that an adapter was trained on, without the adapter, on the same device.

    The base keeps its original pooling, length and norm, but has the number type and quantisation
    of the adapted encoder. An encoder that was not trained is its own base. The result is None if
    all weights were trained, as the weights that training started from are not recorded.

    Raises:
        UserError: the base does not support an option.
    """
    checkpoint = resolved.checkpoint
    if checkpoint.base is None:
        return None if checkpoint.recorded_settings else resolved
    options = EncoderOptions(
        dtype=resolved.identity.dtype,
        quantize=resolved.identity.quantize,
        device=resolved.device,
        max_tokens_per_batch=resolved.options.max_tokens_per_batch,
    )
    return resolve_checkpoint(checkpoint.base, options, resolved.device, identify=True)


def _choose_runtime(
    checkpoint: Checkpoint,
    identity: EncoderIdentity,
    config: Mapping[str, Any],
    sources: SettingSources,
) -> tuple[Runtime, str]:
    """Choose the library that computes, with the reason why it is not OpenVINO, if any.

    The reason is empty if OpenVINO was not requested.
    """
    requested, on_cpu = sources.options.runtime, sources.device == "cpu"
    if requested == "torch" or (requested == "auto" and not on_cpu):
        return "torch", ""
    from llmcond.encoders.openvino.support import find_reason_against

    on_gpu = "OpenVINO computes on CPUs only (--device cpu)"
    reason = find_reason_against(checkpoint, identity, config) if on_cpu else on_gpu
    if reason is None:
        return "openvino", ""
    if requested == "openvino":
        raise UserError(
            f"runtime is 'openvino', but OpenVINO cannot run {checkpoint.name}: {reason}. Leave "
            "--runtime out to use PyTorch."
        )
    return "torch", reason
