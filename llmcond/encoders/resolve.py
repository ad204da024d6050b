"""From a model's name and options to everything that decides its vectors.

Nothing is loaded here but small JSON files: a second extraction of the same thing finds its
features without touching the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcond.encoders.checkpoints.checkpoint import Checkpoint, find_checkpoint
from llmcond.encoders.checkpoints.settings import read_checked, stated_beside
from llmcond.encoders.known import default_prompt, joint_prompt
from llmcond.encoders.poolings import POOLINGS, pooling_named
from llmcond.encoders.settings import EncoderIdentity, EncoderOptions, Sources
from llmcond.encoders.spec import Runtime
from llmcond.errors import UserError
from llmcond.system import choose_device


def no_embeddings(folder: object) -> UserError:
    """Return what is said of a cross-encoder where embeddings are needed."""
    return UserError(
        f"{folder} is a cross-encoder: it compares two texts and has no embeddings. Compare texts "
        f"by llmcond similarity or evaluate, --run {folder}; for embeddings, train an encoder by "
        "llmcond train-lora."
    )


@dataclass(frozen=True, slots=True)
class ResolvedEncoder:
    """An encoder that is found but not loaded.

    Attributes:
        checkpoint: its files.
        identity: everything that decides its vectors.
        device: where it will run: ``cpu`` or ``cuda:N``.
        options: what the user chose; what was left open is as training recorded it, if it did.
        assumed: what no file and no option said, in sentences for the user.
        runtime: the library that computes.
        not_openvino: why OpenVINO does not compute, on a CPU; "" where it does, or was not wanted.
    """

    checkpoint: Checkpoint
    identity: EncoderIdentity
    device: str
    options: EncoderOptions
    assumed: tuple[str, ...]
    runtime: Runtime = "torch"
    not_openvino: str = ""

    @property
    def shares_prefixes(self) -> bool:
        """Return whether prefixes are shared: as was chosen, and where it is exact.

        A token's vector is decided by what stands before it in a causal encoder only. And what is
        pooled must be computed for each input by itself, as the last token is.
        """
        last = pooling_named(self.identity.pooling).takes == "last"
        return self.options.share_prefixes and self.identity.attention == "causal" and last

    def each_member(self) -> list[ResolvedEncoder]:
        """Return the encoders of an ensemble, each with its adapter; of others the encoder."""
        return [
            replace(self, checkpoint=replace(self.checkpoint, adapter=member, members=()))
            for member in self.checkpoint.members
        ] or [self]

    @property
    def default_prompt(self) -> str:
        """Return the bundled prompt that suits the model as it is."""
        if self.checkpoint.stated or self.identity.routes_inside:
            return self.joint_prompt  # it was trained to read sentence and condition together
        return default_prompt(self.identity.instruction_format, self.identity.pooling)

    @property
    def joint_prompt(self) -> str:
        """Return the one that suits it while it is trained: all of its layers see the condition.

        Or those that have a router.
        """
        if self.identity.routes_inside:
            return "routed"
        return joint_prompt(self.identity.instruction_format)


def resolve(
    name_or_path: str, options: EncoderOptions, *, identify: bool = True, cross: bool = False
) -> ResolvedEncoder:
    """Find a model by alias, hub name or folder, and settle every setting that decides its vectors.

    To identify which weights they are, a local checkpoint is read whole. With ``cross`` it may be
    the encoder of a cross-encoder.

    Raises:
        UserError: an unknown model, an option that the model or machine cannot have, or a
            cross-encoder.
        LlmcondError: the hub cannot be reached.
    """
    device = choose_device(options.device)
    checkpoint = find_checkpoint(name_or_path, options.revision, options.like)
    if checkpoint.cross and not cross:
        raise no_embeddings(name_or_path)
    return settle(checkpoint, options, device, identify=identify)


def settle(
    checkpoint: Checkpoint, options: EncoderOptions, device: str, *, identify: bool
) -> ResolvedEncoder:
    """Settle every setting of a checkpoint that was found; see :func:`resolve`.

    What the user left open is as the checkpoint was trained, where that is recorded.

    Raises:
        UserError: an option that the model cannot have.
    """
    stated = {**stated_beside(checkpoint), **checkpoint.stated}
    options = options.filled_from(stated)
    settings = read_checked(checkpoint)
    known, assumed = checkpoint.known, settings.left_out
    sources = Sources(
        name=checkpoint.name,
        device=device,
        options=options,
        known=known.settings if known else None,
        files=settings.stated,
        # Only NV-Embed-v2 has latent attention, and it is known.
        poolings=known.poolings if known else [name for name in POOLINGS if name != "latent"],
        model_type=str(settings.config.get("model_type")),
        positions=settings.positions,
        no_float16=known.no_float16 if known else "",
        trained_router=stated.get("router"),
        assumed=assumed,
    )
    identity = sources.settle(checkpoint.weights if identify else "")
    if settings.pooling_config.get("include_prompt") is False and identity.pool_over == "all":
        assumed.append(
            "an instruction is pooled along, though the checkpoint's files leave prompts out "
            "(--pool-over text)"
        )
    if identity.quantize == "8bit" and known and known.no_float16:
        assumed.append(
            f"8 bit multiplies in float16, which {checkpoint.name} does not stand: "
            f"{known.no_float16}; prefer --quantize 4bit"
        )
    trained = checkpoint.stated.get("quantize")
    if trained is not None and identity.quantize == "none":
        assumed.append(
            f"whole weights of the base, though its adapter was trained on {trained} ones "
            f"(--quantize {trained})"
        )
    runtime, reason = _runtime(checkpoint, identity, settings.config, sources)
    if identity.dtype != "float32":
        identity = replace(identity, runtime=runtime)
    return ResolvedEncoder(checkpoint, identity, device, options, tuple(assumed), runtime, reason)


def resolve_base(resolved: ResolvedEncoder) -> ResolvedEncoder | None:
    """Return the encoder that an adapter was trained on, as it was before, on the same device.

    It has its own pooling, length and norm, in the number type and quantisation of the adapted one.
    An encoder that was not trained is its own base. None: all weights were trained, and what they
    began from is not recorded.

    Raises:
        UserError: an option that the base cannot have.
    """
    checkpoint = resolved.checkpoint
    if checkpoint.base is None:
        return None if checkpoint.stated else resolved
    options = EncoderOptions(
        dtype=resolved.identity.dtype,
        quantize=resolved.identity.quantize,
        device=resolved.device,
        max_tokens_per_batch=resolved.options.max_tokens_per_batch,
    )
    return settle(checkpoint.base, options, resolved.device, identify=True)


def _runtime(
    checkpoint: Checkpoint, identity: EncoderIdentity, config: Mapping[str, Any], sources: Sources
) -> tuple[Runtime, str]:
    """Return the library that computes, and why it is not OpenVINO where that was not chosen."""
    chosen, on_cpu = sources.options.runtime, sources.device == "cpu"
    if chosen == "torch" or (chosen == "auto" and not on_cpu):
        return "torch", ""
    from llmcond.encoders.openvino.support import reason_against

    on_gpu = "OpenVINO computes on CPUs only (--device cpu)"
    reason = reason_against(checkpoint, identity, config) if on_cpu else on_gpu
    if reason is None:
        return "openvino", ""
    if chosen == "openvino":
        raise UserError(
            f"runtime is 'openvino', which does not run {checkpoint.name}: {reason}. Leave out "
            "--runtime, and PyTorch does."
        )
    return "torch", reason
