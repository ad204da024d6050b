"""From a model's name and options to everything that decides its vectors.

Nothing is loaded here but small JSON files: a second extraction of the same thing finds its
features without touching the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmcond.encoders.checkpoints.checkpoint import Checkpoint, find_checkpoint
from llmcond.encoders.checkpoints.settings import (
    Settings,
    check_code,
    check_kind,
    check_modules,
    pooling_of,
    stated_beside,
)
from llmcond.encoders.known import default_prompt, joint_prompt
from llmcond.encoders.openvino.architectures import ARCHITECTURES
from llmcond.encoders.options import EncoderOptions, check_choice
from llmcond.encoders.poolings import pooling_named
from llmcond.encoders.spec import (
    RELEASED,
    TOKENIZER_DECIDES,
    Attention,
    Dtype,
    EncoderIdentity,
    PoolOver,
    Runtime,
)
from llmcond.errors import UserError
from llmcond.system import choose_device, native_bfloat16

_FALLBACK_LENGTH = 512


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
        exact = (
            self.identity.attention == "causal"
            and pooling_named(self.identity.pooling).takes == "last"
        )
        return self.options.share_prefixes and exact

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
    if options.pooling is not None and not pooling_named(options.pooling).counts:
        stated.pop("pool_over", None)  # it went with another pooling
    options = replace(
        options, **{key: value for key, value in stated.items() if getattr(options, key) is None}
    )
    settings = Settings.read(checkpoint.folder)
    check_kind(checkpoint, settings)
    check_code(checkpoint, settings)
    check_modules(checkpoint, settings)
    assumed = settings.left_out
    router = _router(checkpoint, options, stated)
    released = router.get("router_mode") in RELEASED
    pooling = "cls" if released else pooling_of(checkpoint, settings, options.pooling)
    if pooling is None:
        pooling = "mean"
        assumed.append(
            "pooling mean: no pooling settings in the checkpoint (--pooling to change it)"
        )
    known = checkpoint.known
    template = options.instruction_format
    if template is None:
        template = known.instruction_format if known else ""
    special_tokens = options.special_tokens
    if special_tokens is None:
        own = known.special_tokens if known else TOKENIZER_DECIDES
        special_tokens = settings.special_tokens if own == TOKENIZER_DECIDES else own
    identity = EncoderIdentity(
        weights=checkpoint.weights if identify else "",
        dtype=_dtype(checkpoint, options, device),
        quantize=options.quantize or "none",
        attention=_attention(checkpoint, settings, options, assumed),
        pooling=pooling,
        pool_over=_pool_over(checkpoint, options, pooling),
        normalize=_normalize(checkpoint, settings, options, assumed),
        max_length=_max_length(checkpoint, settings, options, assumed),
        instruction_format=template,
        special_tokens=special_tokens,
        long_texts=options.long_texts,
        **router,
    )
    one = identity.routes_inside and not released and identity.router_layers == 1
    if one and pooling_named(pooling).takes in ("first", "last"):
        raise UserError(
            f"router_layers is 1, and {checkpoint.name} pools by {pooling}: all that the router "
            "could change is the weight of one token. Give --router-layers 3, or --pooling mean."
        )
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
    runtime, reason = _runtime(checkpoint, settings, identity, options, device)
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


def _router(
    checkpoint: Checkpoint, options: EncoderOptions, stated: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a router inside the encoder, by their names in an identity."""
    names = ("router", "router_mode", "router_layers", "router_strength")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    trained = stated.get("router")
    if given.get("router", "none") == "none":
        if trained == "csr":
            raise UserError(
                f"{checkpoint.name} was trained with --router csr, and without it its vectors "
                "would be others. Leave out --router none."
            )
        for name in names[1:]:
            if name in given:
                raise UserError(
                    f"{name} is {given[name]!r}, and there is no router in the encoder. Give "
                    "--router csr as well."
                )
        return {}
    if given.get("router_mode") in RELEASED and options.pooling not in (None, "cls"):
        raise UserError(
            f"router_mode is {given['router_mode']!r}, whose vector is the first token's, and "
            f"pooling is {options.pooling!r}. Leave out --pooling."
        )
    return given


def _runtime(
    checkpoint: Checkpoint,
    settings: Settings,
    identity: EncoderIdentity,
    options: EncoderOptions,
    device: str,
) -> tuple[Runtime, str]:
    """Return the library that computes, and why it is not OpenVINO where that was not chosen."""
    if options.runtime == "torch" or (options.runtime == "auto" and device != "cpu"):
        return "torch", ""
    from llmcond.encoders.openvino.support import reason_against

    on_gpu = "OpenVINO computes on CPUs only (--device cpu)"
    reason = reason_against(checkpoint, identity, settings.config) if device == "cpu" else on_gpu
    if reason is None:
        return "openvino", ""
    if options.runtime == "openvino":
        raise UserError(
            f"runtime is 'openvino', which does not run {checkpoint.name}: {reason}. Leave out "
            "--runtime, and PyTorch does."
        )
    return "torch", reason


def _dtype(checkpoint: Checkpoint, options: EncoderOptions, device: str) -> Dtype:
    reason = checkpoint.known.no_float16 if checkpoint.known else ""
    if reason and options.dtype == "float16":
        raise UserError(f"{checkpoint.name} may not be computed in float16: {reason}.")
    if reason and options.dtype == "auto":
        return "bfloat16"
    return choose_dtype(options.dtype, device)


def choose_dtype(dtype: Literal["auto"] | Dtype, device: str) -> Dtype:
    """Return ``dtype``, or for ``auto`` the fastest one that ``device`` computes natively."""
    if dtype != "auto":
        return dtype
    if device.startswith("cuda"):
        import torch

        # Before compute capability 8.0 bfloat16 is emulated, and float16 is the fast type.
        major, _ = torch.cuda.get_device_capability(device)
        return "bfloat16" if major >= 8 else "float16"
    return "bfloat16" if native_bfloat16() else "float32"


def _attention(
    checkpoint: Checkpoint, settings: Settings, options: EncoderOptions, assumed: list[str]
) -> Attention:
    given = options.attention
    if checkpoint.known is not None:
        known = checkpoint.known.attention
        if given not in (None, known):
            raise UserError(
                f"attention is {given!r}, but {checkpoint.name} was trained with {known} "
                "attention; its vectors would be noise."
            )
        return known
    kind = str(settings.config.get("model_type"))
    if is_encoder(kind) and settings.attention != "causal":
        if given == "causal":
            raise UserError(
                f"attention is 'causal', but {checkpoint.name} is an encoder ({kind}), which is "
                "bidirectional."
            )
        return "bidirectional"
    if given is None and settings.attention is None:
        assumed.append("causal attention: a decoder whose config does not say (--attention)")
    return given or settings.attention or "causal"


def is_encoder(model_type: str) -> bool:
    """Return whether an architecture is an encoder; for common ones without transformers."""
    return model_type in ARCHITECTURES or model_type in encoder_types()


def encoder_types() -> frozenset[str]:
    """Return the ``model_type`` of every architecture that transformers has as an encoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def _pool_over(checkpoint: Checkpoint, options: EncoderOptions, pooling: str) -> PoolOver:
    own: PoolOver = checkpoint.known.pool_over if checkpoint.known else "all"
    given = options.pool_over or own
    if given == "after-instruction":
        check_choice("pool_over", given, tuple({"all", "text", own}))
    if given == "text" and not pooling_named(pooling).counts:
        raise UserError(
            f"pool_over is 'text', but {checkpoint.name} pools by {pooling}, which knows one token "
            "only or has a rule of its own. It goes with --pooling mean or last."
        )
    return given


def _normalize(
    checkpoint: Checkpoint, settings: Settings, options: EncoderOptions, assumed: list[str]
) -> bool:
    known = checkpoint.known.normalize if checkpoint.known else None
    for stated in (options.normalize, known, settings.normalize):
        if stated is not None:
            return stated
    assumed.append("unit L2 norm: the checkpoint does not say (--no-normalize to change it)")
    return True


def _max_length(
    checkpoint: Checkpoint, settings: Settings, options: EncoderOptions, assumed: list[str]
) -> int:
    limit, given = settings.positions, options.max_length
    if given is not None:
        if given < 8 or given > (limit or given):
            most = f" and at most {limit}, the positions that {checkpoint.name} has"
            least = f"it must be at least 8{most if limit else ''}"
            raise UserError(f"max_length is {given}; {least}.")
        return given
    named = (checkpoint.known and checkpoint.known.max_length) or settings.max_length
    if named is None:
        named = min(limit or _FALLBACK_LENGTH, _FALLBACK_LENGTH)
        assumed.append(
            f"at most {named} tokens an input: the checkpoint does not say (--max-length)"
        )
    return min(named, limit or named)
