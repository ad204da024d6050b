"""Resolution of a model's name and options to everything that decides its vectors.

Only small JSON files are read, so that extracting the same features a second time finds them
without loading the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from llmcond.base import package as plugins
from llmcond.base.errors import UserError
from llmcond.base.output import log
from llmcond.base.system import (
    check_device,
    choose_device,
    computes_natively,
    may_have_gpu,
    require_quantization,
)
from llmcond.encoders.checkpoint import (
    Checkpoint,
    WeightsNeededError,
    find_checkpoint,
    find_local_checkpoint,
)
from llmcond.encoders.checkpoint_settings import (
    CheckpointSettings,
    read_adapter_settings,
    read_supported_settings,
)
from llmcond.encoders.settings import (
    RELEASED_MODES,
    ROUTER_SETTINGS,
    SETTINGS,
    EncoderIdentity,
    EncoderOptions,
    PoolOver,
    default_prompt,
    encoder_types,
    explain_no_float16,
    joint_prompt,
)
from llmcond.encoders.spec import (
    ARCHITECTURES,
    POOLINGS,
    Attention,
    Dtype,
    Runtime,
    get_pooling,
    identify_pooling,
)

#: The settings of an adapter's files that count; the base decides the others.
_ADAPTER_SETTINGS = ("pooling", "normalize", "max_length", "instruction_format")
#: The most tokens of an input if no source states a number.
_FALLBACK_LENGTH = 512


@dataclass
class _Sources:
    """Everything that decides the settings of one encoder.

    Attributes:
        checkpoint: its files.
        files: the contents of the small ones among them.
        options: the user's choices. Training records fill in those that the user left open.
        device: the device that it will run on.
        assumed: sentences for the user about settings that no source states.
        adapter: the contents of the small files next to an adapter.
        settled: the settings that are decided so far, in their order.
    """

    checkpoint: Checkpoint
    files: CheckpointSettings
    options: EncoderOptions
    device: str
    assumed: list[str]
    adapter: CheckpointSettings | None = None
    settled: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The encoder's name in messages."""
        return self.checkpoint.name

    @property
    def known(self) -> Mapping[str, Any]:
        """The settings of a known encoder of this name; empty if the name is not known."""
        return self.checkpoint.known.settings if self.checkpoint.known else {}

    @property
    def no_float16(self) -> str:
        """The reason why float16 must not be used; empty if it may be used."""
        return explain_no_float16(self.checkpoint.known, self.files.config)

    def find(self, name: str) -> Any:
        """Return the value of the first source that states a setting, or None.

        The sources are the options, the files of an adapter, the known encoder of this name and the
        checkpoint's files, in this order.
        """
        adapter = {}
        if self.adapter is not None and name in _ADAPTER_SETTINGS:
            adapter = self.adapter.encoder_settings
        stated = (getattr(self.options, name), adapter.get(name), self.known.get(name))
        values = (*stated, self.files.encoder_settings.get(name))
        return next((value for value in values if value is not None), None)


def _settle_dtype(sources: _Sources) -> Dtype:
    """Return a dtype that the device computes natively: the chosen one, otherwise float32.

    For ``auto`` it is the fastest one. On a CPU that is never float16, which overflows easily.
    """
    dtype, device = sources.options.dtype, sources.device
    if sources.no_float16 and dtype == "float16":
        raise UserError(f"{sources.name} does not work in float16: {sources.no_float16}.")
    if dtype == "auto":
        gpu_type: Dtype = "float32" if device == "cpu" or sources.no_float16 else "float16"
        return "bfloat16" if computes_natively("bfloat16", device) else gpu_type
    if computes_natively(dtype, device):
        return dtype
    _log_emulated(sources.name, dtype, device)
    return "float32"


@cache  # A command resolves the same encoder several times.
def _log_emulated(name: str, dtype: Dtype, device: str) -> None:
    log.info(
        f"{name} is computed in float32, because {'this CPU' if device == 'cpu' else device} has "
        f"no instructions for {dtype}, and emulating it would be slower and less exact"
    )


def _settle_pooling(sources: _Sources) -> str:
    """Return the chosen pooling, otherwise that of the model, otherwise the mean with a note."""
    requested, name, known = sources.options.pooling, sources.name, sources.checkpoint.known
    # Only NV-Embed-v2, a known model, has latent attention.
    legal = known.poolings if known else [name for name in POOLINGS if name != "latent"]
    router, mode = sources.options.router, sources.options.router_mode
    if router == "csr" and mode in RELEASED_MODES:
        if requested not in (None, "cls"):
            raise UserError(
                f"router_mode is {mode!r}, which always uses the vector of the first token, but "
                f"pooling is {requested!r}. Leave out --pooling."
            )
        return "cls"
    if requested is not None and plugins.is_plugin(requested) and "latent" not in legal:
        return identify_pooling(requested, name)
    pooling: str | None = sources.find("pooling")
    if requested is not None and requested not in legal:
        raise UserError(f"pooling is {requested!r}, but {name} only supports {' or '.join(legal)}.")
    if pooling is not None and pooling not in legal:
        raise UserError(
            f"{name} pools by {pooling!r}, which is not supported. Choose one with --pooling: "
            f"{', '.join(legal)}."
        )
    if pooling is None:
        sources.assumed.append(
            "pooling mean: no pooling settings in the checkpoint (--pooling to change it)"
        )
    return pooling or "mean"


def _settle_attention(sources: _Sources) -> Attention:
    requested, recorded = sources.options.attention, sources.files.attention
    known: Attention | None = sources.known.get("attention")
    if known is not None:
        if requested not in (None, known):
            raise UserError(
                f"attention is {requested!r}, but {sources.name} was trained with {known} "
                "attention; its vectors would be noise."
            )
        return known
    kind = str(sources.files.config.get("model_type"))
    # Common architectures do not import transformers.
    is_common = kind in ARCHITECTURES and not ARCHITECTURES[kind].rotary
    if recorded != "causal" and (is_common or kind in encoder_types()):
        if requested == "causal":
            raise UserError(
                f"attention is 'causal', but {sources.name} is an encoder ({kind}), which is "
                "bidirectional."
            )
        return "bidirectional"
    if requested is None and recorded is None:
        sources.assumed.append(
            "causal attention: the config of this decoder does not state it (--attention)"
        )
    return requested or recorded or "causal"


def _settle_pool_over(sources: _Sources) -> PoolOver:
    default: PoolOver = sources.known.get("pool_over", "all")
    requested, pooling = sources.options.pool_over or default, sources.settled["pooling"]
    if requested == "after-instruction" != default:
        raise UserError(
            f"pool_over is 'after-instruction', which {sources.name} does not support. Use all or "
            "text."
        )
    if requested == "text" and not get_pooling(pooling).supports_pool_over:
        raise UserError(
            f"pool_over is 'text', but {sources.name} pools by {pooling}, which does not "
            "support it. Use --pooling mean or last."
        )
    return requested


def _settle_normalize(sources: _Sources) -> bool:
    recorded: bool | None = sources.find("normalize")
    if recorded is None:
        sources.assumed.append(
            "unit L2 norm: the checkpoint does not state it (--no-normalize to change it)"
        )
    return recorded is None or recorded


def _settle_max_length(sources: _Sources) -> int:
    limit, requested = sources.files.positions, sources.options.max_length
    if requested is not None:
        if requested > (limit or requested):
            raise UserError(
                f"max_length is {requested}; it must be at most {limit}, the number of positions "
                f"that {sources.name} has."
            )
        return requested
    recorded: int | None = sources.find("max_length")
    if recorded is None:
        recorded = min(limit or _FALLBACK_LENGTH, _FALLBACK_LENGTH)
        most = f", up to the {limit:,} positions that it has" if limit and limit > recorded else ""
        sources.assumed.append(
            f"at most {recorded} tokens per input: the checkpoint states no maximum length "
            f"(--max-length{most})"
        )
    return min(recorded, limit or recorded)


def _check_router(sources: _Sources, identity: EncoderIdentity, trained: str | None) -> None:
    """Raise a UserError if the router's settings fit neither each other nor the encoder."""
    options, name, mode = sources.options, sources.name, identity.router_mode
    if not identity.routes_inside:
        if trained not in (None, "none"):
            raise UserError(
                f"{name} was trained with --router {trained}, and its vectors would be wrong "
                "without it. Leave out --router none."
            )
        for setting in ROUTER_SETTINGS[1:]:
            if (value := getattr(options, setting)) is not None:
                raise UserError(
                    f"{setting} is {value!r}, but the encoder has no router. Add --router csr."
                )
    elif identity.router_weight == "random" and mode in ("hidden", "heavy"):
        raise UserError(
            "router_weight is 'random', which uses neither queries nor keys, so it cannot be "
            f"combined with router_mode {mode!r}. Use --router-mode paper."
        )
    elif (
        identity.router_layers == 1
        and mode not in RELEASED_MODES
        and get_pooling(identity.pooling).states in ("first", "last")
    ):
        raise UserError(
            f"router_layers is 1, but {name} pools by {identity.pooling}, so the router could only "
            "change the weight of one token. Use --router-layers 3, or --pooling mean."
        )


#: The functions that decide a setting. Any other is decided by the first source that states it.
_SETTLE: Mapping[str, Callable[[_Sources], Any]] = {
    "dtype": _settle_dtype,
    "pooling": _settle_pooling,
    "attention": _settle_attention,
    "pool_over": _settle_pool_over,
    "normalize": _settle_normalize,
    "max_length": _settle_max_length,
    "runtime": lambda sources: "torch",  # until the rest of the identity is known
}


def is_server(name: str) -> bool:
    """Return whether a model's name is the address of a server."""
    return name.lower().startswith(("http://", "https://"))


def _check_no_server(name: str, options: EncoderOptions) -> None:
    """Check that no server's model is named for an encoder on this machine."""
    if options.server_model is not None:
        raise UserError(
            f"--server-model is {options.server_model!r}, but {name} is no address of a server. "
            "Name one with --model http://HOST:PORT/v1, or leave out --server-model."
        )


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
        runtime: the library that computes, or the server.
        openvino_obstacle: why OpenVINO does not run it on this CPU; empty if it does, or was not
            requested.
    """

    checkpoint: Checkpoint
    identity: EncoderIdentity
    device: str
    options: EncoderOptions
    assumed: tuple[str, ...]
    runtime: Runtime | Literal["server"] = "torch"
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
    if is_server(name_or_path):
        from llmcond.encoders.server import resolve_server

        checkpoint, identity, assumed = resolve_server(name_or_path, options)
        return ResolvedEncoder(checkpoint, identity, "cpu", options, assumed, "server")
    _check_no_server(name_or_path, options)
    device = device or choose_device(options.device)
    checkpoint = find_checkpoint(name_or_path, options.revision, options.like)
    if checkpoint.cross and not cross:
        raise cross_encoder_error(name_or_path)
    return resolve_checkpoint(checkpoint, options, device, identify=identify)


def check_encoder(
    name_or_path: str, options: EncoderOptions, *, elsewhere: bool = False, weights_for: str = ""
) -> None:
    """Check an encoder before anything heavy is imported, as far as that is possible.

    A model on the hub is not looked up, and if this machine may have a GPU, the settings of the
    model are not read.

    Args:
        name_or_path: alias, hub name or folder.
        options: the user's options.
        elsewhere: whether other machines compute, whose devices and libraries are not known.
        weights_for: what needs the weights, which a server does not show; empty if nothing does.

    Raises:
        UserError: the model is unknown, does not support an option, or this machine lacks the
            device or a library.
        LlmcondError: installed weights are not the official ones.
    """
    if is_server(name_or_path):
        from llmcond.encoders.server import check_options

        if weights_for:
            raise WeightsNeededError(weights_for, name_or_path)
        return check_options(name_or_path, options)
    _check_no_server(name_or_path, options)
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
    adapter, stated = read_adapter_settings(checkpoint), checkpoint.recorded_settings
    options = options.filled_from(stated)
    checkpoint, settings = read_supported_settings(checkpoint)
    ignored = [*settings.ignored_steps, *(adapter.ignored_steps if adapter else [])]
    assumed = list(dict.fromkeys(ignored))
    sources = _Sources(checkpoint, settings, options, device, assumed, adapter)
    for name in SETTINGS:
        value = _SETTLE[name](sources) if name in _SETTLE else sources.find(name)
        if value is not None:
            sources.settled[name] = value
    identity = EncoderIdentity(weights=checkpoint.weights if identify else "", **sources.settled)
    _check_router(sources, identity, stated.get("router"))
    if settings.pooling_config.get("include_prompt") is False and identity.pool_over == "all":
        assumed.append(
            "pooling that includes the instruction, although the checkpoint's files exclude "
            "prompts (--pool-over text to exclude it)"
        )
    if identity.quantize == "8bit" and device != "cpu" and sources.no_float16:
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
    runtime, reason = _choose_runtime(sources, identity)
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
        device=resolved.options.device,
        max_tokens_per_batch=resolved.options.max_tokens_per_batch,
    )
    return resolve_checkpoint(checkpoint.base, options, resolved.device, identify=True)


def _choose_runtime(sources: _Sources, identity: EncoderIdentity) -> tuple[Runtime, str]:
    """Choose the library that computes, with the reason why it is not OpenVINO, if any.

    The reason is empty if OpenVINO was not requested.
    """
    requested, on_cpu = sources.options.runtime, sources.device == "cpu"
    if requested == "torch" or (requested == "auto" and not on_cpu):
        return "torch", ""
    from llmcond.encoders.openvino.support import find_reason_against

    on_gpu = "OpenVINO computes on CPUs only (--device cpu)"
    checkpoint, config = sources.checkpoint, sources.files.config
    reason = find_reason_against(checkpoint, identity, config) if on_cpu else on_gpu
    if reason is None:
        return "openvino", ""
    if requested == "openvino":
        raise UserError(
            f"runtime is 'openvino', but OpenVINO cannot run {sources.name}: {reason}. Leave "
            "--runtime out to use PyTorch."
        )
    return "torch", reason
