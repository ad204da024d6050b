"""The settings of an encoder, each declared once in ``EncoderSettings``, and known models.

A field declares the setting's type, default, flag and help text; ``resolve`` decides its value for
one encoder. Two classes repeat these fields and add some: ``EncoderOptions`` holds what a user may
choose, and ``EncoderIdentity`` holds what decides an encoder's vectors, and is the key of its
stored features.

This module imports neither torch nor transformers, so that the command line can be built from it.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from string import Formatter
from typing import Any, Generic, Literal, Never, TypeVar

from llmcond.base.errors import (
    LlmcondError,
    UserError,
    did_you_mean,
    list_legal_values,
    shortened_repr,
)
from llmcond.base.files import digest_bytes
from llmcond.base.options import (
    Length,
    Option,
    Options,
    Positive,
    PositiveNumber,
    declaration_of,
    option,
)
from llmcond.base.package import is_plugin
from llmcond.base.system import check_device_name
from llmcond.encoders.spec import (
    POOLINGS,
    SERVER_POOLING,
    Attention,
    Dtype,
    Quantize,
    Runtime,
    get_pooling,
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
#: ``after-instruction`` is NV-Embed-v2's own count; any encoder can have the others.
PoolOver = Literal["all", "text", "after-instruction"]
#: What becomes of an input that is longer than the encoder takes: its sentence is cut, or read in
#: windows, each with the condition and instruction in full, whose vectors are averaged.
LongTexts = Literal["cut", "windows"]

#: The value of ``special_tokens`` where the tokenizer decides.
TOKENIZER_DECIDES = "tokenizer"
#: Raised when the engine itself changes the vectors it gives for the same identity.
ENGINE_VERSION = 1

#: The type of a setting that the user left open: None in options, never in an identity.
Open = TypeVar("Open")
#: The type of a setting that depends on the machine: "auto" in options, never in an identity.
Auto = TypeVar("Auto")
_T = TypeVar("_T")


# -- the settings ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting(Option):
    """The declaration of a setting, in addition to its name and type.

    Attributes:
        settled_default: value if no source states the setting.
        unplain: reason why an encoder with another value than the default cannot be exported as
            modules of sentence-transformers; empty: it can.
    """

    settled_default: Any = dataclasses.MISSING
    unplain: str = ""


def _option(default: Any = None, **flag: Any) -> Any:
    return option(default, group="encoder", **flag)


def _setting(default: Any = dataclasses.MISSING, *, open_as: Any = None, **spec: Any) -> Any:
    """Declare a setting; ``open_as`` is its value in options if the user has not set it."""
    return option(open_as, Setting, group="encoder", settled_default=default, **spec)


def _check_pooling(name: str) -> None:
    if name not in (*POOLINGS, SERVER_POOLING) and not is_plugin(name):
        legal = list_legal_values(name, POOLINGS)
        raise UserError(f"--pooling is {shortened_repr(name)}. {legal}")


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
        metavar="POOLING",
        check=_check_pooling,
        help=f"pooling of the token vectors: {', '.join(POOLINGS)}, or a custom function, "
        "FILE.py:NAME or MODULE:NAME (default: the model's setting)",
    )
    attention: Attention | Open = _setting(
        help="direction of the attention (default: the model's setting)"
    )
    pool_over: PoolOver | Open = _setting(
        "all",
        unplain="its encoder pools some of the tokens only",
        help="tokens to pool: all, those of the text without its instruction, or those "
        "after-instruction as NV-Embed-v2 counts them (default: the model's setting)",
    )
    normalize: bool | Open = _setting(
        help="scale vectors to unit L2 norm (default: the model's setting)",
    )
    max_length: Length | Open = _setting(
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
    router_layers: Positive | Open = _setting(
        3,
        metavar="N",
        help="with --router csr: number of layers, counted from the last, that have a router "
        "(default: 3)",
    )
    router_strength: PositiveNumber | Open = _setting(
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
        help="library that runs the encoder; auto: OpenVINO on a CPU if it is installed and "
        "supports the architecture (encoders like BERT, EmbeddingGemma), otherwise PyTorch",
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
class EncoderOptions(Options, EncoderSettings[Literal["auto"], None]):
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
    server_model: str | None = _option(
        metavar="NAME",
        help="with --model http://HOST:PORT/v1: the name of the server's model; the server "
        "computes with OpenAI's embeddings protocol",
    )
    device: str = _option("auto", metavar="D", help="device to use: auto, cpu, cuda or cuda:N")
    max_tokens_per_batch: Positive | None = _option(
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
        super().__post_init__()
        check_device_name(self.device)
        if self.instruction_format:
            _check_instruction_format(self.instruction_format)
        if self.special_tokens not in (None, TOKENIZER_DECIDES):
            _check_special_tokens(self.special_tokens)

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
        return cls(**{name: values[name] for name in names if values.get(name) is not None})


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

    @property
    def known_length(self) -> int | None:
        """The maximal number of tokens of an input; None if a server has the limit."""
        return None if self.pooling == SERVER_POOLING else self.max_length

    @property
    def limit(self) -> str:
        """How long an input may be, in words."""
        if self.known_length is None:
            return "the server's limit"
        return f"the {self.known_length:,} tokens that the encoder reads"

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


#: Settings that default to the model's. Training records them.
MODEL_SETTINGS = tuple(
    setting.name for setting in fields(EncoderSettings) if setting.default is None
)
#: The settings among them that a model has without a router.
STATED = tuple(name for name in MODEL_SETTINGS if name not in ROUTER_SETTINGS)
#: Settings that decide which tokens an encoder reads and pools.
READ = ("pooling", "pool_over", "max_length", "special_tokens", "instruction_format")
#: The tokens that are pooled, in words.
POOLED_TOKENS: Mapping[PoolOver, str] = {
    "all": "all tokens",
    "text": "the text's own tokens",
    "after-instruction": "the tokens after the instruction",
}


def encoder_types() -> frozenset[str]:
    """Return the ``model_type`` of every encoder architecture in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


# -- checks ------------------------------------------------------------------------------------


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
        computed_as: the ``model_type`` of transformers that computes it, if its config.json names
            another one: that of code in its repository, or that of a model that reads images too.
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
    computed_as: str = ""
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


def suggest_model(
    name: str, others: Iterable[str] = (), default: str = "llmcond models lists the known ones."
) -> str:
    """Return a sentence that suggests the known encoders whose names are nearest to ``name``.

    The owners of hub names are not compared.

    Args:
        name: the invalid name, or a folder.
        others: further names that may be suggested.
        default: the sentence if no name is near.
    """
    names = [*others, *known_names()]
    # Most names contain "embedding", so that half of two names is often the same.
    question = did_you_mean(name.rstrip("/"), names, lambda name: name.rpartition("/")[2], 0.7)
    return question or default
