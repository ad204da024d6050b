"""The settings of an encoder, each declared once, as a field of :class:`EncoderSettings`.

A field has the setting's type, default, flag and help, and the function that settles it where that
takes more than asking who states it. What a user may choose (:class:`EncoderOptions`) and what
decides an encoder's vectors (:class:`EncoderIdentity`, the key of its features) have these fields,
and some of their own.

Imports neither torch nor transformers, so that the command line can be built from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from string import Formatter
from typing import Any, Generic, Literal, Never, TypeVar, get_args, get_origin, get_type_hints

from llmcond import plugins
from llmcond.encoders.openvino.architectures import ARCHITECTURES
from llmcond.encoders.poolings import POOLINGS, identify_pooling, pooling_named
from llmcond.encoders.routers.settings import (
    RELEASED,
    RouterMode,
    RouterPlace,
    check_layers,
    check_router,
)
from llmcond.encoders.spec import Attention, Dtype, Quantize, Runtime
from llmcond.errors import LlmcondError, UserError, nearest
from llmcond.files import digest_bytes
from llmcond.options import Option, option, option_of
from llmcond.system import native_bfloat16

#: ``after-instruction`` is NV-Embed-v2's own count; any encoder can have the others.
PoolOver = Literal["all", "text", "after-instruction"]
#: What becomes of an input that is longer than the encoder takes: its sentence is cut, or read in
#: windows, each with the condition and instruction in full, whose vectors are averaged.
LongTexts = Literal["cut", "windows"]

#: The value of ``special_tokens`` where the tokenizer decides.
TOKENIZER_DECIDES = "tokenizer"
#: Raised when the engine itself changes the vectors it gives for the same identity.
ENGINE_VERSION = 1
_FALLBACK_LENGTH = 512

#: The type of a setting that the user left open: None in options, never in an identity.
Open = TypeVar("Open")
#: The type of a setting that depends on the machine: "auto" in options, never in an identity.
Auto = TypeVar("Auto")
_T = TypeVar("_T")


@dataclass
class Sources:
    """All that decides the settings of one encoder.

    Attributes:
        name: the encoder, as messages call it.
        device: where it will run.
        options: what the user chose; what was left open is as training recorded it.
        known: what is known of it by its name; None: it is not known.
        files: what its own files state.
        poolings: those that it may be pooled by.
        model_type: its architecture.
        positions: the tokens that it has positions for; None: its files do not say.
        no_float16: why it may not be computed in float16; empty where it may.
        trained_router: the router that it was trained with, if any.
        assumed: what no source said, in sentences for the user.
        settled: the settings that are settled so far, in their order.
    """

    name: str
    device: str
    options: EncoderOptions
    known: Mapping[str, Any] | None
    files: Mapping[str, Any]
    poolings: Sequence[str]
    model_type: str
    positions: int | None
    no_float16: str
    trained_router: str | None
    assumed: list[str]
    settled: dict[str, Any] = field(default_factory=dict)

    def find(self, name: str) -> Any:
        """Return a setting as the first source states it that does; None where none does."""
        states = (getattr(self.options, name), (self.known or {}).get(name), self.files.get(name))
        return next((value for value in states if value is not None), None)

    def settle(self, weights: str) -> EncoderIdentity:
        """Return the identity of the encoder, which has these weights.

        Raises:
            UserError: an option that it cannot have.
        """
        chosen = {name: getattr(self.options, name) for name in ROUTER_SETTINGS}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        check_router(self.name, chosen, self.trained_router, self.options.pooling)
        for name, setting in SETTINGS.items():
            if setting.settle is not None:
                self.settled[name] = setting.settle(self)
            elif (value := self.find(name)) is not None:
                self.settled[name] = value
        identity = EncoderIdentity(weights=weights, **self.settled)
        if identity.routes_inside:
            check_layers(self.name, identity.router_mode, identity.router_layers, identity.pooling)
        return identity


# -- how settings are settled ------------------------------------------------------------------


def _settle_dtype(sources: Sources) -> Dtype:
    """Return the chosen type, or for ``auto`` the fastest one that the device computes natively."""
    chosen = sources.options.dtype
    if sources.no_float16 and chosen == "float16":
        raise UserError(f"{sources.name} may not be computed in float16: {sources.no_float16}.")
    if chosen != "auto":
        return chosen
    if sources.no_float16:
        return "bfloat16"
    if sources.device.startswith("cuda"):
        import torch

        # Before compute capability 8.0 bfloat16 is emulated, and float16 is the fast type.
        major, _ = torch.cuda.get_device_capability(sources.device)
        return "bfloat16" if major >= 8 else "float16"
    return "bfloat16" if native_bfloat16() else "float32"


def _settle_pooling(sources: Sources) -> str:
    """Return the pooling that was chosen, or the model's own, or with a note the mean."""
    given, legal, name = sources.options.pooling, sources.poolings, sources.name
    if sources.options.router_mode in RELEASED:
        return "cls"
    if given is not None and plugins.is_plugin(given) and "latent" not in legal:
        return identify_pooling(given, name)
    if given is not None and given not in legal:
        raise UserError(
            f"pooling is {given!r}, but {name} may be pooled by {' or '.join(legal)} only."
        )
    pooling: str | None = sources.find("pooling")
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


def is_encoder(model_type: str) -> bool:
    """Return whether an architecture is an encoder; for common ones without transformers."""
    return model_type in ARCHITECTURES or model_type in encoder_types()


def encoder_types() -> frozenset[str]:
    """Return the ``model_type`` of every architecture that transformers has as an encoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def _settle_attention(sources: Sources) -> Attention:
    given, stated = sources.options.attention, sources.files.get("attention")
    if sources.known is not None:
        known: Attention = sources.known["attention"]
        if given not in (None, known):
            raise UserError(
                f"attention is {given!r}, but {sources.name} was trained with {known} attention; "
                "its vectors would be noise."
            )
        return known
    if stated != "causal" and is_encoder(sources.model_type):
        if given == "causal":
            raise UserError(
                f"attention is 'causal', but {sources.name} is an encoder ({sources.model_type}), "
                "which is bidirectional."
            )
        return "bidirectional"
    if given is None and stated is None:
        sources.assumed.append(
            "causal attention: a decoder whose config does not say (--attention)"
        )
    return given or stated or "causal"


def _settle_pool_over(sources: Sources) -> PoolOver:
    own: PoolOver = (sources.known or {}).get("pool_over", "all")
    given, pooling = sources.options.pool_over or own, sources.settled["pooling"]
    if given == "after-instruction":
        _check_choice("pool_over", given, tuple(dict.fromkeys(("all", "text", own))))
    if given == "text" and not pooling_named(pooling).counts:
        raise UserError(
            f"pool_over is 'text', but {sources.name} pools by {pooling}, which knows one token "
            "only or has a rule of its own. It goes with --pooling mean or last."
        )
    return given


def _settle_normalize(sources: Sources) -> bool:
    stated: bool | None = sources.find("normalize")
    if stated is None:
        sources.assumed.append(
            "unit L2 norm: the checkpoint does not say (--no-normalize to change it)"
        )
    return stated is None or stated


def _settle_max_length(sources: Sources) -> int:
    limit, given = sources.positions, sources.options.max_length
    if given is not None:
        if given < 8 or given > (limit or given):
            most = f" and at most {limit}, the positions that {sources.name} has"
            least = f"it must be at least 8{most if limit else ''}"
            raise UserError(f"max_length is {given}; {least}.")
        return given
    stated: int | None = sources.find("max_length")
    if stated is None:
        stated = min(limit or _FALLBACK_LENGTH, _FALLBACK_LENGTH)
        sources.assumed.append(
            f"at most {stated} tokens an input: the checkpoint does not say (--max-length)"
        )
    return min(stated, limit or stated)


# -- the settings ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting(Option):
    """What is declared of a setting besides its name and type: its flag, and more.

    Attributes:
        settled_default: where no source states it, and in records from before there was such a
            setting.
        settle: how it is settled; None: as the first source has it.
        absent_with: name of a setting. While that one has its default, this one is left out of
            records, as older records lack it. Empty: it is always recorded.
        unplain: why an encoder with another value than the default cannot be exported as modules
            of sentence-transformers; empty: it can.
    """

    settled_default: Any = dataclasses.MISSING
    settle: Callable[[Sources], Any] | None = None
    absent_with: str = ""
    unplain: str = ""


def _option(default: Any = None, **flag: Any) -> Any:
    return option(default, group="encoder", **flag)


def _setting(default: Any = dataclasses.MISSING, *, open_as: Any = None, **spec: Any) -> Any:
    """Declare a setting, which is ``open_as`` in options where the user has not chosen."""
    return option(open_as, Setting, group="encoder", settled_default=default, **spec)


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(Generic[Auto, Open]):
    """The settings that decide an encoder's vectors, or some of them.

    Attributes:
        pool_over: ``text`` is the text's own tokens, neither the instruction's nor special ones;
            ``after-instruction`` is all but as many of the first tokens as the instruction has by
            itself.
        instruction_format: used for inputs that have an instruction; empty where the model takes
            none.
        runtime: recorded in an identity for 16 bit only. In float32 it is always ``torch`` there:
            the vectors of OpenVINO are those of PyTorch, up to 1e-5.
    """

    dtype: Auto | Dtype = _setting(
        open_as="auto",
        settle=_settle_dtype,
        help="auto: the fastest that the device computes natively",
    )
    quantize: Quantize | Open = _setting(
        "none",
        open_as="none",
        unplain="its encoder is quantised to {}",
        help="weights in 8 or 4 bit (needs the extra quantize)",
    )
    pooling: str | Open = _setting(
        settle=_settle_pooling,
        metavar="POOLING",
        help=f"{', '.join(POOLINGS)}, or a function of your own, FILE.py:NAME or "
        "MODULE:NAME (default: the model's own)",
    )
    attention: Attention | Open = _setting(
        settle=_settle_attention, help="its direction (default: the model's own)"
    )
    pool_over: PoolOver | Open = _setting(
        "all",
        settle=_settle_pool_over,
        unplain="its encoder pools some of the tokens only",
        help="pool all tokens, or the text's without its instruction; after-instruction is "
        "NV-Embed-v2's own count (default: the model's own)",
    )
    normalize: bool | Open = _setting(
        settle=_settle_normalize, help="scale vectors to unit L2 norm (default: the model's own)"
    )
    max_length: int | Open = _setting(
        settle=_settle_max_length,
        metavar="N",
        help="tokens of an input, special tokens included (default: the model's own)",
    )
    long_texts: LongTexts = _setting(
        "cut",
        open_as="cut",
        absent_with="long_texts",
        unplain="its encoder reads long texts in windows",
        help="cut the sentence of longer inputs, or read it in windows, each with the whole "
        "condition, whose vectors are averaged",
    )
    router: RouterPlace | Open = _setting(
        "none",
        absent_with="router",
        unplain="its encoder has a router inside",
        help="csr: what a prompt gives as router weights tokens inside the encoder rather than as "
        "they are pooled (default: none, or as it was trained)",
    )
    router_mode: RouterMode | Open = _setting(
        "paper",
        absent_with="router",
        help="of --router csr: the paper's, a variant of it, or as its authors' code has it "
        "(default: paper)",
    )
    router_layers: int | Open = _setting(
        3,
        absent_with="router",
        metavar="N",
        help="of --router csr: in how many of the last layers (default: 3)",
    )
    router_strength: float | Open = _setting(
        1.0,
        absent_with="router",
        metavar="A",
        help="of --router csr: tokens are scaled by 1 + A w (default: 1)",
    )
    instruction_format: str | Open = _setting(
        "",
        metavar="TEXT",
        help=r"how an instruction is put before a text, e.g. "
        r"'Instruct: {instruction}\nQuery: {text}'",
        # A shell has no easy way to write a line break.
        parse=lambda text: text.replace("\\n", "\n"),
    )
    special_tokens: str | Open = _setting(
        TOKENIZER_DECIDES,
        metavar="TEXT",
        help="tokens around every input, e.g. '<s> {text} </s>', or: tokenizer (as it adds them)",
    )
    runtime: Auto | Runtime = _setting(
        "torch",
        open_as="auto",
        settle=lambda sources: "torch",  # until the rest of the identity is known
        absent_with="runtime",
        help="library that computes. auto: on a CPU OpenVINO, where it is installed and has the "
        "architecture (encoders of the BERT kind); otherwise PyTorch",
    )


SETTINGS: Mapping[str, Setting] = {
    own.name: declared
    for own in fields(EncoderSettings)
    if isinstance(declared := option_of(own), Setting)
}
ROUTER_SETTINGS = tuple(name for name, s in SETTINGS.items() if s.absent_with == "router")


def _redeclare(auto: str, unset: str, *, settled: bool) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that gives a class the settings as fields of its own.

    In their types, ``auto`` and ``unset`` stand for the type variables. ``settled`` fields have the
    defaults of settings, the others are open.
    """

    def redeclare(cls: type[_T]) -> type[_T]:
        for own in fields(EncoderSettings):
            hint = str(own.type).replace("Auto | ", auto).replace(" | Open", unset)
            cls.__annotations__[own.name] = hint
            default = SETTINGS[own.name].settled_default if settled else own.default
            setattr(cls, own.name, field(default=default, metadata=own.metadata))
        return cls

    return redeclare


@dataclass(frozen=True, kw_only=True)
@_redeclare("Literal['auto'] | ", " | None", settled=False)
class EncoderOptions(EncoderSettings[Literal["auto"], None]):
    """What a user may choose about an encoder. None: as the model has it.

    Raises:
        UserError: a value that no model can have.
    """

    revision: str | None = _option(metavar="REV", help="branch, tag or commit on the hub")
    like: str | None = _option(
        metavar="NAME",
        help="a known model whose settings this one has: for copies and fine-tuned ones",
    )
    device: str = _option("auto", metavar="D", help="auto, cpu, cuda or cuda:N")
    max_tokens_per_batch: int | None = _option(
        metavar="N", help="token budget of one forward pass (default: by the device and its memory)"
    )
    share_prefixes: bool = _option(
        True,
        help="compute what several inputs begin with once, where that is exact: for causal "
        "encoders that pool the last token",
    )
    fold_latents: bool = _option(
        True,
        help="multiply NV-Embed-v2's latent block out at load: the same vectors up to rounding, in "
        "a fraction of the time and memory",
    )

    def __post_init__(self) -> None:
        """Check the values that have choices."""
        if self.quantize is None:
            object.__setattr__(self, "quantize", "none")
        for name, legal in CHOICES.items():
            value = getattr(self, name)
            if value is not None and not (name == "pooling" and plugins.is_plugin(value)):
                _check_choice(name, value, legal)
        if self.instruction_format:
            _check_instruction_format(self.instruction_format)
        if self.special_tokens not in (None, TOKENIZER_DECIDES):
            _check_special_tokens(self.special_tokens)
        for name in ("max_tokens_per_batch", "router_layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1.")
        strength = self.router_strength
        if strength is not None and not 0 < strength < math.inf:
            raise UserError(f"router_strength is {strength:g}; it must be above 0.")

    def filled_from(self, trained: Mapping[str, Any]) -> EncoderOptions:
        """Return these options with what is open in them as training recorded it."""
        values = {name: value for name, value in trained.items() if getattr(self, name) is None}
        if self.pooling is not None and not pooling_named(self.pooling).counts:
            values.pop("pool_over", None)  # it went with another pooling
        return dataclasses.replace(self, **values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EncoderOptions:
        """Return the options among ``values``, such as those of an identity; others are ignored.

        What is not among them is as the model has it.
        """
        names = {own.name for own in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


#: The fields that every record has, in their order.
_RECORDED = (
    "weights", "dtype", "quantize", "pooling", "max_length", "normalize", "instruction_format",
    "attention", "pool_over", "special_tokens", "engine",
)  # fmt: skip
#: How many of them, from the first, even the oldest records have.
_N_REQUIRED = 8


@dataclass(frozen=True, kw_only=True)
@_redeclare("", "", settled=True)
class EncoderIdentity(EncoderSettings[Never, Never]):
    """Everything but the input that changes a vector. Two encoders that differ never share one.

    Device, batch size and paths are left out on purpose: they may change rounding, not meaning.

    Attributes:
        weights: ``hub:NAME@COMMIT``, or ``sha256:DIGEST`` of a local checkpoint's files; of an
            adapter ``sha256:DIGEST on`` those of its base.
        engine: version of the code that computes vectors.
    """

    weights: str
    engine: int = ENGINE_VERSION

    @property
    def routes_inside(self) -> bool:
        """Return whether the routers of inputs act inside the encoder, not as tokens are pooled."""
        return self.router != "none"

    @property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits over all fields; the name of a feature store's folder."""
        return digest_bytes(json.dumps(self.to_json(), sort_keys=True).encode(), size=8).hex()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        later = {name: s.absent_with for name, s in SETTINGS.items() if name not in _RECORDED}
        default = {name: SETTINGS[name].settled_default for name in later.values()}
        present = [name for name, by in later.items() if getattr(self, by) != default[by]]
        return {name: getattr(self, name) for name in (*_RECORDED, *present)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> EncoderIdentity:
        """Return the identity that :meth:`to_json` recorded in ``source``.

        Raises:
            LlmcondError: the record was damaged.
        """
        try:
            required = {name: values[name] for name in _RECORDED[:_N_REQUIRED]}
            return cls(**{**values, **required})
        except KeyError as error:
            raise LlmcondError(
                f"{source} records no encoder identity of ours: {error} is missing."
            ) from error
        except TypeError as error:
            raise LlmcondError(f"{source} records no encoder identity of ours: {error}.") from error

    def differences(self, other: EncoderIdentity) -> list[str]:
        """Return ``field: mine, not theirs`` for each field that differs."""
        mine, theirs = vars(self), vars(other)
        return [
            f"{key}: {mine[key]!r}, not {theirs[key]!r}" for key in mine if mine[key] != theirs[key]
        ]


# -- what is derived of the settings -----------------------------------------------------------


def _literals(hint: Any) -> tuple[str, ...]:
    """Return the legal values of a type: those of all Literals in it."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for inner in get_args(hint) for value in _literals(inner))


_HINTS = get_type_hints(EncoderOptions)
#: Legal values of the options that have choices.
CHOICES = {name: legal for name, hint in _HINTS.items() if (legal := _literals(hint))}
CHOICES["pooling"] = tuple(POOLINGS)
#: The settings that are as the model has them if left open, with their types: what training
#: records of an encoder.
MODEL_SETTINGS: dict[str, type] = {
    own.name: next((kind for kind in (bool, int, float) if kind in get_args(hint)), str)
    for own in fields(EncoderSettings)
    if own.default is None and (hint := _HINTS[own.name])
}
#: Those among them that a model has by itself; a router is put into it.
STATED = tuple(name for name in MODEL_SETTINGS if name not in ROUTER_SETTINGS)
#: Those that decide which tokens an encoder reads and pools.
READ = ("pooling", "pool_over", "max_length", "special_tokens", "instruction_format")
_IN_WORDS: Mapping[PoolOver, str] = {
    "all": "all tokens",
    "text": "the text's own tokens",
    "after-instruction": "what follows the instruction",
}


def pooled_tokens(settings: Mapping[str, Any]) -> str:
    """Return which tokens an encoder with these settings pools, in words."""
    return _IN_WORDS[settings["pool_over"]]


# -- checks ------------------------------------------------------------------------------------


def _check_choice(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise UserError(f"{name} is {value!r}. {nearest(value, legal)} Legal: {', '.join(legal)}.")


def _check_instruction_format(template: str) -> None:
    """Refuse a template that does not name ``{instruction}`` and ``{text}``, each once, alone."""
    try:
        fields = [field for _, *field in Formatter().parse(template) if field[0] is not None]
    except ValueError as error:
        raise UserError(f"the instruction format {template!r} cannot be read: {error}.") from error
    # Neither has a format or a conversion, as in {text!r}.
    plain = [["instruction", "", None], ["text", "", None]]
    if fields not in (plain, plain[::-1]):
        raise UserError(
            f"the instruction format {template!r} must name {{instruction}} and {{text}}, each "
            "once, and nothing else in braces."
        )


def _check_special_tokens(template: str) -> None:
    """Refuse what is not one token at most on each side of a text."""
    first, text, last = template.partition("{text}")
    if not text or len(first.split()) > 1 or len(last.split()) > 1 or "{text}" in last:
        raise UserError(
            f"special_tokens is {template!r}; expected {TOKENIZER_DECIDES!r}, or {{text}} with "
            "a token before it, after it or both, such as '<s> {text} </s>'."
        )
