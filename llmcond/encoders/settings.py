"""The settings of an encoder, each declared once in ``EncoderSettings``, and known models.

A field declares the setting's type, default, flag and help text. If the first source that states
the setting does not simply decide it, the field also has the function that does. Two classes repeat
these fields and add some: ``EncoderOptions`` holds what a user may choose, and ``EncoderIdentity``
holds what decides an encoder's vectors, and is the key of its stored features.

This module imports neither torch nor transformers, so that the command line can be built from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from string import Formatter
from typing import Any, Generic, Literal, Never, TypeVar, get_args, get_origin, get_type_hints

from llmcond.base import package as plugins
from llmcond.base.errors import LlmcondError, UserError, list_legal_values, shortened_repr
from llmcond.base.files import digest_bytes
from llmcond.base.options import Option, check_argument, declaration_of, option
from llmcond.base.output import log
from llmcond.base.system import check_device_name, computes_natively
from llmcond.encoders.spec import (
    ARCHITECTURES,
    POOLINGS,
    Attention,
    Dtype,
    Quantize,
    Runtime,
    get_pooling,
    identify_pooling,
)

#: Where a router weights the tokens of an input: as they are pooled (``none``), or inside the last
#: layers of the network (``csr``, see llmcond/encoders/torch/csr.py).
RouterKind = Literal["none", "csr"]
#: What CSR compares. The condition is represented by its first token, or by its last token in a
#: causal encoder. ``paper`` compares this token's query in the last layer with the keys of the
#: sentence's tokens (section 2). ``hidden`` compares the states from which queries and keys are
#: projected, and ``heavy`` projects these states with trained matrices W_q and W_k (section 3.3).
#: ``bi`` is the paper's bi-encoder, which reads sentence and condition as one text, and whose
#: weights are the attention of the condition's token to the sentence (section 3.1).
#: ``released-tri`` and ``released-bi`` are the variants in the authors' code, where sentences also
#: attend to the condition in each layer.
RouterMode = Literal["paper", "hidden", "heavy", "bi", "released-tri", "released-bi"]
RELEASED_MODES: tuple[RouterMode, ...] = ("released-tri", "released-bi")
#: Modes in which the encoder reads the condition's tokens along with each sentence.
READING_MODES: tuple[RouterMode, ...] = ("bi", *RELEASED_MODES)
#: How a weight w scales a token (table 3): ``one-plus`` by 1 + A w, ``only`` by A w, and ``random``
#: by 1 + A w with random weights instead of the router's.
RouterWeight = Literal["one-plus", "only", "random"]


def check_router(name: str, options: Mapping[str, Any], trained: Any, pooling: str | None) -> None:
    """Check that the router settings and the pooling of an encoder fit together.

    Args:
        name: The encoder's name.
        options: Router settings that the user has set, by their names.
        trained: The router that the encoder was trained with, if any.
        pooling: The pooling that the user has set, if any.

    Raises:
        UserError: If they do not fit together.
    """
    if options.get("router", "none") == "none":
        if trained not in (None, "none"):
            raise UserError(
                f"{name} was trained with --router {trained}, and its vectors would be wrong "
                "without it. Leave out --router none."
            )
        for setting in [option for option in options if option != "router"]:
            raise UserError(
                f"{setting} is {options[setting]!r}, but the encoder has no router. Add --router "
                "csr."
            )
    elif options.get("router_mode") in RELEASED_MODES and pooling not in (None, "cls"):
        raise UserError(
            f"router_mode is {options['router_mode']!r}, which always uses the vector of the first "
            f"token, but pooling is {pooling!r}. Leave out --pooling."
        )
    elif options.get("router_weight") == "random" and options.get("router_mode") in (
        "hidden",
        "heavy",
    ):
        raise UserError(
            "router_weight is 'random', which uses neither queries nor keys, so it cannot be "
            f"combined with router_mode {options['router_mode']!r}. Use --router-mode paper."
        )


def check_layers(name: str, mode: RouterMode, layers: int, pooling: str) -> None:
    """Raise a UserError for a router in so few layers that it has almost no effect."""
    if (
        layers == 1
        and mode not in RELEASED_MODES
        and get_pooling(pooling).states in ("first", "last")
    ):
        raise UserError(
            f"router_layers is 1, but {name} pools by {pooling}, so the router could only change "
            "the weight of one token. Use --router-layers 3, or --pooling mean."
        )


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
class SettingSources:
    """Everything that decides the settings of one encoder.

    Attributes:
        name: the encoder's name in messages.
        device: the device that it will run on.
        options: the user's choices. Training records fill in those that the user left open.
        known: the settings of a known encoder of this name; None if the name is not known.
        files: the settings that the checkpoint's files state.
        poolings: the poolings that the encoder supports.
        model_type: its architecture, as transformers names it.
        positions: the number of token positions; None if the files do not state it.
        no_float16: the reason why float16 must not be used; empty if it may be used.
        trained_router: the router that the encoder was trained with, if any.
        assumed: sentences for the user about settings that no source states.
        settled: the settings that are decided so far, in their order.
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
        """Return the value of the first source that states a setting, or None.

        The sources are the options, the known encoder of this name and the checkpoint's files, in
        this order.
        """
        states = (getattr(self.options, name), (self.known or {}).get(name), self.files.get(name))
        return next((value for value in states if value is not None), None)

    def settle(self, weights: str) -> EncoderIdentity:
        """Decide all settings, and return the identity of the encoder with these weights.

        Raises:
            UserError: this encoder does not support one of the options.
        """
        router_options = {name: getattr(self.options, name) for name in ROUTER_SETTINGS}
        router_options = {
            name: value for name, value in router_options.items() if value is not None
        }
        check_router(self.name, router_options, self.trained_router, self.options.pooling)
        for name, setting in SETTINGS.items():
            if setting.settle is not None:
                self.settled[name] = setting.settle(self)
            elif (value := self.find(name)) is not None:
                self.settled[name] = value
        identity = EncoderIdentity(weights=weights, **self.settled)
        if identity.routes_inside:
            check_layers(self.name, identity.router_mode, identity.router_layers, identity.pooling)
        return identity


# -- resolving settings ------------------------------------------------------------------------


def _settle_dtype(sources: SettingSources) -> Dtype:
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


def _settle_pooling(sources: SettingSources) -> str:
    """Return the chosen pooling, otherwise that of the model, otherwise the mean with a note."""
    requested, legal, name = sources.options.pooling, sources.poolings, sources.name
    if sources.options.router_mode in RELEASED_MODES:
        return "cls"
    if requested is not None and plugins.is_plugin(requested) and "latent" not in legal:
        return identify_pooling(requested, name)
    if requested is not None and requested not in legal:
        raise UserError(f"pooling is {requested!r}, but {name} only supports {' or '.join(legal)}.")
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
    """Return whether an architecture is an encoder; common ones do not import transformers."""
    return model_type in ARCHITECTURES or model_type in encoder_types()


def encoder_types() -> frozenset[str]:
    """Return the ``model_type`` of every encoder architecture in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def _settle_attention(sources: SettingSources) -> Attention:
    requested, recorded = sources.options.attention, sources.files.get("attention")
    if sources.known is not None:
        known: Attention = sources.known["attention"]
        if requested not in (None, known):
            raise UserError(
                f"attention is {requested!r}, but {sources.name} was trained with {known} "
                "attention; its vectors would be noise."
            )
        return known
    if recorded != "causal" and is_encoder(sources.model_type):
        if requested == "causal":
            raise UserError(
                f"attention is 'causal', but {sources.name} is an encoder ({sources.model_type}), "
                "which is bidirectional."
            )
        return "bidirectional"
    if requested is None and recorded is None:
        sources.assumed.append(
            "causal attention: the config of this decoder does not state it (--attention)"
        )
    return requested or recorded or "causal"


def _settle_pool_over(sources: SettingSources) -> PoolOver:
    default: PoolOver = (sources.known or {}).get("pool_over", "all")
    requested, pooling = sources.options.pool_over or default, sources.settled["pooling"]
    if requested == "after-instruction":
        _check_choice("pool_over", requested, tuple(dict.fromkeys(("all", "text", default))))
    if requested == "text" and not get_pooling(pooling).supports_pool_over:
        raise UserError(
            f"pool_over is 'text', but {sources.name} pools by {pooling}, which does not support "
            "it. Use --pooling mean or last."
        )
    return requested


def _settle_normalize(sources: SettingSources) -> bool:
    recorded: bool | None = sources.find("normalize")
    if recorded is None:
        sources.assumed.append(
            "unit L2 norm: the checkpoint does not state it (--no-normalize to change it)"
        )
    return recorded is None or recorded


def _settle_max_length(sources: SettingSources) -> int:
    limit, requested = sources.positions, sources.options.max_length
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


# -- the settings ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting(Option):
    """The declaration of a setting, in addition to its name and type.

    Attributes:
        settled_default: value if no source states the setting.
        settle: function that decides the value; None: the first source that states it decides.
        unplain: reason why an encoder with another value than the default cannot be exported as
            modules of sentence-transformers; empty: it can.
    """

    settled_default: Any = dataclasses.MISSING
    settle: Callable[[SettingSources], Any] | None = None
    unplain: str = ""


def _option(default: Any = None, **flag: Any) -> Any:
    return option(default, group="encoder", **flag)


def _setting(default: Any = dataclasses.MISSING, *, open_as: Any = None, **spec: Any) -> Any:
    """Declare a setting; ``open_as`` is its value in options if the user has not set it."""
    return option(open_as, Setting, group="encoder", settled_default=default, **spec)


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(Generic[Auto, Open]):
    """The settings that decide some or all of an encoder's vectors.

    Attributes:
        pool_over: ``text`` pools the tokens of the text, neither the instruction's nor special
            tokens. ``after-instruction`` skips as many of the first tokens as the instruction has
            when it is tokenised separately.
        instruction_format: format of inputs that have an instruction; empty if the model takes
            none.
        runtime: recorded in an identity for 16 bit only. An identity in float32 always has
            ``torch``, because OpenVINO's vectors equal those of PyTorch up to 1e-5.
    """

    dtype: Auto | Dtype = _setting(
        open_as="auto",
        settle=_settle_dtype,
        help="number format of the computation; auto: the fastest that the device computes "
        "natively; a format that it would emulate is replaced by float32",
    )
    quantize: Quantize | Open = _setting(
        "none",
        open_as="none",
        unplain="its encoder is quantised to {}",
        help="quantisation of the weights; 8bit and 4bit need the extra quantize",
    )
    pooling: str | Open = _setting(
        settle=_settle_pooling,
        metavar="POOLING",
        help=f"pooling of the token vectors: {', '.join(POOLINGS)}, or a custom function, "
        "FILE.py:NAME or MODULE:NAME (default: the model's setting)",
    )
    attention: Attention | Open = _setting(
        settle=_settle_attention, help="direction of the attention (default: the model's setting)"
    )
    pool_over: PoolOver | Open = _setting(
        "all",
        settle=_settle_pool_over,
        unplain="its encoder pools some of the tokens only",
        help="tokens to pool: all, those of the text without its instruction, or those "
        "after-instruction as NV-Embed-v2 counts them (default: the model's setting)",
    )
    normalize: bool | Open = _setting(
        settle=_settle_normalize,
        help="scale vectors to unit L2 norm (default: the model's setting)",
    )
    max_length: int | Open = _setting(
        settle=_settle_max_length,
        metavar="N",
        help="largest number of tokens per input, special tokens included (default: the model's "
        "setting)",
    )
    long_texts: LongTexts = _setting(
        "cut",
        open_as="cut",
        unplain="its encoder reads long texts in windows",
        help="handling of inputs longer than --max-length: cut the sentence, or read it in "
        "windows, each with the whole condition, and average their vectors",
    )
    router: RouterKind | Open = _setting(
        "none",
        unplain="its encoder has a router inside",
        help="place where a prompt's router weights the tokens: none (in the pooling) or csr "
        "(inside the encoder) (default: none, or as the model was trained)",
    )
    router_mode: RouterMode | Open = _setting(
        "paper",
        help="with --router csr: the method of the paper, a variant of it (hidden, heavy, bi), or "
        "that of its authors' code (released-tri, released-bi) (default: paper)",
    )
    router_weight: RouterWeight | Open = _setting(
        "one-plus",
        help="with --router csr: how a weight w scales a token: by 1 + A w (one-plus), by A w "
        "(only), or by 1 + A w with random weights (random) (default: one-plus)",
    )
    router_layers: int | Open = _setting(
        3,
        metavar="N",
        help="with --router csr: number of layers, counted from the last, that have a router "
        "(default: 3)",
    )
    router_strength: float | Open = _setting(
        1.0,
        metavar="A",
        help="with --router csr: strength A of the router; see --router-weight (default: 1)",
    )
    instruction_format: str | Open = _setting(
        "",
        metavar="TEXT",
        help=r"format that joins an instruction and a text, such as "
        r"'Instruct: {instruction}\nQuery: {text}' (default: the model's setting)",
        # A shell has no easy way to write a line break.
        parse=lambda text: text.replace("\\n", "\n"),
    )
    special_tokens: str | Open = _setting(
        TOKENIZER_DECIDES,
        metavar="TEXT",
        help="special tokens around every input, such as '<s> {text} </s>'; tokenizer: those that "
        "the tokenizer adds (default: the model's setting)",
    )
    runtime: Auto | Runtime = _setting(
        "torch",
        open_as="auto",
        settle=lambda sources: "torch",  # until the rest of the identity is known
        help="library that runs the encoder; auto: OpenVINO on a CPU if it is installed and "
        "supports the architecture (encoders like BERT), otherwise PyTorch",
    )


SETTINGS: Mapping[str, Setting] = {
    setting.name: declared
    for setting in fields(EncoderSettings)
    if isinstance(declared := declaration_of(setting), Setting)
}
ROUTER_SETTINGS = tuple(name for name in SETTINGS if name.startswith("router"))


def _redeclare(auto: str, unset: str, *, settled: bool) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that redeclares the settings as fields of a class.

    In the types of the fields, ``auto`` and ``unset`` replace the type variables. If ``settled``,
    the fields have the settings' defaults; otherwise they are open.
    """

    def redeclare(cls: type[_T]) -> type[_T]:
        for setting in fields(EncoderSettings):
            hint = str(setting.type).replace("Auto | ", auto).replace(" | Open", unset)
            cls.__annotations__[setting.name] = hint
            default = SETTINGS[setting.name].settled_default if settled else setting.default
            setattr(cls, setting.name, field(default=default, metadata=setting.metadata))
        return cls

    return redeclare


@dataclass(frozen=True, kw_only=True)
@_redeclare("Literal['auto'] | ", " | None", settled=False)
class EncoderOptions(EncoderSettings[Literal["auto"], None]):
    """The options of an encoder that a user may set; None means the default, often the model's.

    Raises:
        UserError: a value that no model can have.
    """

    revision: str | None = _option(
        metavar="REV", help="branch, tag or commit on the hub (default: main)"
    )
    like: str | None = _option(
        metavar="NAME",
        help="known model that this one is a copy or fine-tuned version of, and whose settings it "
        "takes",
    )
    device: str = _option("auto", metavar="D", help="device to use: auto, cpu, cuda or cuda:N")
    max_tokens_per_batch: int | None = _option(
        metavar="N",
        help="largest number of tokens in one forward pass (default: depends on the device and its "
        "memory)",
    )
    share_prefixes: bool = _option(
        True,
        help="compute a common beginning of several inputs only once, if that is exact, as for "
        "causal encoders that pool the last token",
    )
    fold_latents: bool = _option(
        True,
        help="multiply out NV-Embed-v2's latent block when the model is loaded, which gives the "
        "same vectors up to rounding in a fraction of the time and memory",
    )

    def __post_init__(self) -> None:
        """Check the values."""
        self._check_types()
        for name, legal in CHOICES.items():
            value = getattr(self, name)
            if value is not None and not (name == "pooling" and plugins.is_plugin(value)):
                _check_choice(name, value, legal)
        check_device_name(self.device)
        if self.instruction_format:
            _check_instruction_format(self.instruction_format)
        if self.special_tokens not in (None, TOKENIZER_DECIDES):
            _check_special_tokens(self.special_tokens)
        for name, least in (("max_tokens_per_batch", 1), ("router_layers", 1), ("max_length", 8)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it must be at least {least}.")
        strength = self.router_strength
        if strength is not None and not 0 < strength < math.inf:
            raise UserError(f"router_strength is {strength:g}; it must be above 0.")

    def _check_types(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is None:
                value = setting.default
            elif setting.name in _TYPES:
                kind, accepted, expected = _TYPES[setting.name]
                check_argument(setting.name, value, (accepted,), expected)
                value = kind(value)  # JSON cannot encode NumPy's numbers.
            object.__setattr__(self, setting.name, value)

    def filled_from(self, trained: Mapping[str, Any]) -> EncoderOptions:
        """Return these options with the open ones filled in from a training record."""
        values = {name: value for name, value in trained.items() if getattr(self, name) is None}
        if self.pooling is not None and not get_pooling(self.pooling).supports_pool_over:
            values.pop("pool_over", None)  # it belongs to another pooling
        return dataclasses.replace(self, **values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EncoderOptions:
        """Create options from ``values``, such as those of an identity, and ignore other keys.

        Options that ``values`` lacks are left open.
        """
        names = {option.name for option in fields(cls)}
        if values.get("router") == "none":
            names -= {*ROUTER_SETTINGS}  # an identity has their defaults
        return cls(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True, kw_only=True)
@_redeclare("", "", settled=True)
class EncoderIdentity(EncoderSettings[Never, Never]):
    """Everything except the input that changes a vector; no two different encoders share one.

    Device, batch size and paths are left out on purpose: they may change rounding, not meaning.

    Attributes:
        weights: ``hub:NAME@COMMIT``, or ``sha256:DIGEST`` of a local checkpoint's files. An adapter
            has ``sha256:DIGEST on`` followed by the weights of its base.
        engine: version of the code that computes vectors.
    """

    weights: str
    engine: int = ENGINE_VERSION

    @property
    def routes_inside(self) -> bool:
        """Whether routers weight tokens inside the encoder, instead of in the pooling."""
        return self.router != "none"

    @property
    def fingerprint(self) -> str:
        """Digest of all fields as 16 hexadecimal digits, which names the feature store's folder."""
        return digest_bytes(json.dumps(self.to_json(), sort_keys=True).encode(), size=8).hex()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> EncoderIdentity:
        """Read an identity that ``to_json`` recorded in ``source``.

        Raises:
            LlmcondError: the record is damaged.
        """
        expected = {setting.name for setting in fields(cls)}
        if differing := ", ".join(sorted(expected ^ values.keys())):
            raise LlmcondError(
                f"{source} has no valid encoder identity: {differing} is missing or unknown. "
                "Extract again, or copy the file again."
            )
        return cls(**values)

    def differences(self, other: EncoderIdentity) -> list[str]:
        """Return ``field: mine, not theirs`` for each field that differs."""
        mine, theirs = vars(self), vars(other)
        return [
            f"{key}: {mine[key]!r}, not {theirs[key]!r}" for key in mine if mine[key] != theirs[key]
        ]


# -- derived from the settings -----------------------------------------------------------------


def _literals(hint: Any) -> tuple[str, ...]:
    """Return the values of all Literals within a type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for inner in get_args(hint) for value in _literals(inner))


_HINTS = get_type_hints(EncoderOptions)
#: Types of options, with what callers may pass, and the words for it in messages.
_KINDS: Sequence[tuple[type, type, str]] = (
    (bool, bool, "True or False"),
    (int, Integral, "a whole number"),
    (float, Real, "a number"),
    (str, str, "a text"),
)
#: Legal values of the options that have choices.
CHOICES = {name: legal for name, hint in _HINTS.items() if (legal := _literals(hint))}
CHOICES["pooling"] = tuple(POOLINGS)
#: The types of the other options: their type in Python, what callers may pass, and its words.
_TYPES: Mapping[str, tuple[type, type, str]] = {
    name: next(types for types in _KINDS if types[0] is hint or types[0] in get_args(hint))
    for name, hint in _HINTS.items()
    if name not in CHOICES or name == "pooling"
}
#: Settings that default to the model's, with their types. Training records them.
MODEL_SETTINGS: dict[str, type] = {
    setting.name: next((kind for kind in (bool, int, float) if kind in get_args(hint)), str)
    for setting in fields(EncoderSettings)
    if setting.default is None and (hint := _HINTS[setting.name])
}
#: The settings among them that a model has without a router.
STATED = tuple(name for name in MODEL_SETTINGS if name not in ROUTER_SETTINGS)
#: Settings that decide which tokens an encoder reads and pools.
READ = ("pooling", "pool_over", "max_length", "special_tokens", "instruction_format")
_IN_WORDS: Mapping[PoolOver, str] = {
    "all": "all tokens",
    "text": "the text's own tokens",
    "after-instruction": "the tokens after the instruction",
}


def pooled_tokens(settings: Mapping[str, Any]) -> str:
    """Describe in words which tokens an encoder with these settings pools."""
    return _IN_WORDS[settings["pool_over"]]


# -- checks ------------------------------------------------------------------------------------


def _check_choice(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        advice = list_legal_values(str(value), legal)
        raise UserError(f"{name} is {shortened_repr(value)}. {advice}")


def _check_instruction_format(template: str) -> None:
    """Check that a template names ``{instruction}`` and ``{text}`` once each, and nothing else."""
    try:
        fields = [field for _, *field in Formatter().parse(template) if field[0] is not None]
    except ValueError as error:
        raise UserError(f"the instruction format {template!r} cannot be read: {error}.") from error
    # Neither has a format or a conversion, as in {text!r}.
    plain = [["instruction", "", None], ["text", "", None]]
    if fields not in (plain, plain[::-1]):
        raise UserError(
            f"the instruction format {template!r} must name {{instruction}} and {{text}}, each "
            "once, and no other name in braces."
        )


def _check_special_tokens(template: str) -> None:
    """Check that a template has at most one token on each side of the text."""
    first, text, last = template.partition("{text}")
    if not text or len(first.split()) > 1 or len(last.split()) > 1 or "{text}" in last:
        raise UserError(
            f"special_tokens is {template!r}; expected {TOKENIZER_DECIDES!r}, or {{text}} with "
            "a token before it, after it or both, such as '<s> {text} </s>'."
        )


#: Every encoder is padded on the right, whatever the model's original code does, so that positions
#: start at the first token in every architecture. With rotary positions, both sides give the same
#: vectors.
PADDING_SIDE = "right"


@dataclass(frozen=True, slots=True)
class Packaged:
    """Where Python packages contain a model's weights.

    Attributes:
        extra: extra of llmcond that installs one of the packages.
        weights_sha256: expected SHA-256 of ``model.safetensors``.
        folders: for each package, the folder of the checkpoint, relative to the folder that
            packages are installed in.
    """

    extra: str
    weights_sha256: str
    folders: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The facts about a known encoder.

    Attributes:
        repo: official name on the Hugging Face hub.
        dim: size of its vectors.
        n_parameters: number of parameters, without heads for other tasks.
        licence: licence of the weights.
        poolings: supported poolings; the first is the default, which its authors use.
        architecture: the entries of its config.json that decide its computation and its size, that
            is, ``model_type`` and sizes. The config.json of a checkpoint takes precedence.
        settings: encoder settings by name. Settings that are not in it come from the
            checkpoint's files.
        alias: short name; empty if it has none.
        packaged: the packages whose weights are used, if one is installed, instead of the hub's.
        no_float16: why it must not be computed in float16; empty if it may.
        gated: whether users must accept its terms on the hub.
        english_only: whether it was trained on English texts only, or nearly so.
    """

    repo: str
    dim: int
    n_parameters: int
    licence: str
    poolings: tuple[str, ...]
    architecture: Mapping[str, Any] = field(repr=False)
    settings: Mapping[str, Any]
    alias: str = ""
    packaged: Packaged | None = None
    no_float16: str = ""
    gated: bool = False
    english_only: bool = False

    @property
    def name(self) -> str:
        """The alias, or the hub name if there is no alias."""
        return self.alias or self.repo

    @property
    def all_settings(self) -> dict[str, Any]:
        """All settings in ``STATED``; unknown ones have their default, or None without one."""
        defaults = {name: SETTINGS[name].settled_default for name in STATED}
        return {
            name: self.settings.get(name, None if default is MISSING else default)
            for name, default in defaults.items()
        }


def read_model(path: Path) -> KnownModel:
    """Read the TOML file of one encoder.

    Raises:
        TypeError: a key is missing or unknown.
    """
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    if "packaged" in values:
        values["packaged"] = Packaged(**values["packaged"])
    settings = {name: values.pop(name) for name in STATED if name in values}
    poolings = tuple(values.pop("poolings"))
    settings["pooling"] = next(iter(poolings), None)
    return KnownModel(**values, poolings=poolings, settings=settings)


MODELS: tuple[KnownModel, ...] = tuple(
    read_model(path) for path in sorted(Path(__file__).with_name("known").glob("*.toml"))
)


def explain_no_float16(known: KnownModel | None, config: Mapping[str, Any]) -> str:
    """Return why an encoder must not be computed in float16; empty if it may.

    Activations of T5, and of Gemma from its second version on, exceed the largest float16, 65,504.
    """
    if known is not None and known.no_float16:
        return known.no_float16
    kind = str(config.get("model_type"))
    old_gemma = kind in ("gemma", "paligemma", "recurrent_gemma")
    if ("gemma" in kind and not old_gemma) or kind in ("t5", "mt5", "umt5", "longt5"):
        return f"activations of the architecture {kind} overflow; use bfloat16 or float32"
    return ""


def default_prompt(instruction_format: str, pooling: str) -> str:
    """Return the default bundled prompt of a frozen encoder.

    Routed pooling was measured only with encoders that use mean pooling (docs/results.md).
    """
    routed = pooling == "mean" and not instruction_format
    return "routed" if routed else joint_prompt(instruction_format)


def joint_prompt(instruction_format: str) -> str:
    """Return the bundled prompt with which an encoder reads sentence and condition together."""
    return "cond" if instruction_format else "concat-sent-cond"


def find_model(name: str) -> KnownModel | None:
    """Return the entry with this alias or hub name, ignoring case; None if there is none."""
    folded_name = name.lower()
    return next(
        (m for m in MODELS if folded_name and folded_name in (m.alias, m.repo.lower())), None
    )


def known_names() -> list[str]:
    """Return every alias and hub name."""
    return [name for model in MODELS for name in (model.alias, model.repo) if name]
