"""What an encoder reads, and everything that decides the numbers it gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from string import Formatter
from typing import Any, Literal

from llmcond.errors import LlmcondError, UserError
from llmcond.files import digest_bytes

#: ``after-instruction`` is NV-Embed-v2's own count; any encoder can have the others.
PoolOver = Literal["all", "text", "after-instruction"]
#: Where another text weights the tokens of an input: as they are pooled, or (``csr``) inside the
#: last layers of the network; see :mod:`llmcond.encoders.routers.csr`.
RouterPlace = Literal["none", "csr"]
#: What CSR compares, of the condition's first token (of a causal encoder its last) and of the
#: sentence's tokens. ``paper``: its query in the last layer, and their keys (section 2). ``hidden``
#: and ``heavy``: the states that these are made of, as they are or under trained matrices W_q and
#: W_k (section 3.3). ``released-tri`` and ``released-bi``: as in the authors' code, where sentences
#: also attend to the condition, in each layer.
RouterMode = Literal["paper", "hidden", "heavy", "released-tri", "released-bi"]
RELEASED: tuple[RouterMode, ...] = ("released-tri", "released-bi")
Attention = Literal["bidirectional", "causal"]
Dtype = Literal["float32", "bfloat16", "float16"]
Quantize = Literal["none", "8bit", "4bit"]
#: The library that computes: PyTorch, or on a CPU OpenVINO.
Runtime = Literal["torch", "openvino"]
#: In which orders a cross-encoder reads two sentences: the mean of both, or as they are given.
Orders = Literal["both", "given"]
#: What becomes of an input that is longer than the encoder takes: its sentence is cut, or read in
#: windows, each with the condition and instruction in full, whose vectors are averaged.
LongTexts = Literal["cut", "windows"]
#: The first of these, told to the user.
CUT = (
    "their sentences were cut, conditions and instructions are whole (--long-texts windows reads "
    "all of them)"
)
#: A part of an input's texts: the field, its first character, and the one behind its last.
Span = tuple[Literal["instruction", "text", "context"], int, int]

#: What ``EncoderIdentity.special_tokens`` says where the tokenizer decides.
TOKENIZER_DECIDES = "tokenizer"

#: Raised when the engine itself changes the vectors it gives for the same identity.
ENGINE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Router:
    """Another text that chooses which tokens of an input count: routed pooling.

    The token states h_i of the input are pooled to sum_i w_i h_i, with w the softmax over i of
    cos(h_i - m, q) / (temperature * s). q is the router's own vector; m the mean of the h_i, or 0;
    s the standard deviation of these cosines over i, or 1. An encoder whose own router is ``csr``
    has another formula, and no use for the settings.

    Attributes:
        text: is encoded by itself, as a plain input.
        temperature: above 0; a very large one gives the mean of the tokens.
        centre: whether m is subtracted.
        standardize: whether the cosines are divided by s.

    Raises:
        UserError: a temperature that is not above 0.
    """

    text: str
    temperature: float
    centre: bool
    standardize: bool

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UserError(f"temperature is {self.temperature:g}; it must be above 0.")


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One text to encode, with the task it is encoded for.

    Attributes:
        instruction: the task description only (for CASE, I(s) with the sentence in it); the
            encoder adds its own model's format around it. Empty: no instruction.
        text: the text whose tokens are encoded.
        context: a text that is read with it, as the first half of a tokenizer pair, but not
            pooled: the vector is made of the text's own tokens only, no special ones. Empty: no
            first half, but pooled alike, so that f(c; ∅) is made as f(c; s) is. None: a plain
            input, pooled as the model pools.
        sentence: where the sentence stands in these texts: what is cut, or read in windows, where
            an input is longer than the encoder takes. Empty: nothing may be cut. None: all of the
            context, and then of the text.
        router: weights the tokens that are pooled; None: they are pooled as the model pools.
    """

    instruction: str
    text: str
    context: str | None = None
    sentence: tuple[Span, ...] | None = field(default=None, repr=False, compare=False)
    router: Router | None = None
    _key: bytes | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Return its number of characters, without those of a router, which several share."""
        return len(self.instruction) + len(self.text) + len(self.context or "")

    @property
    def texts(self) -> tuple[str, str, str, bool, str]:
        """Return what it is sorted by: its texts in the order that they are read in.

        Inputs that differ by their routers only stand side by side, and are encoded once.
        """
        router = self.router.text if self.router else ""
        return self.instruction, self.context or "", self.text, self.context is not None, router

    @property
    def key(self) -> bytes:
        """Identify the input: 16 bytes over its texts, their boundaries included."""
        if self._key is None:
            # Kept: an extraction looks at it several times, and making it takes longer than that.
            object.__setattr__(self, "_key", self._digest(self._listed))
        key: Any = self._key
        return bytes(key)

    @property
    def key_when_cut(self) -> bytes:
        """Identify what is left of the input where its sentence was cut.

        Another key, as earlier versions cut whatever came last.
        """
        return self._digest({"cut": self._listed})

    @property
    def _listed(self) -> tuple[Any, ...]:
        listed = self.instruction, self.text, *(() if self.context is None else (self.context,))
        return listed if self.router is None else (*listed, {"router": asdict(self.router)})

    @staticmethod
    def _digest(texts: Any) -> bytes:
        return digest_bytes(json.dumps(texts).encode(), size=16)


class InputError(UserError):
    """An input that an encoder cannot take, or gives no vector for.

    Attributes:
        item: the input.
    """

    def __init__(self, item: EncoderInput, message: str) -> None:
        super().__init__(message)
        self.item = item


def plan_inputs(inputs: Sequence[EncoderInput], *, by_prefix: bool) -> list[int]:
    """Return the order in which inputs are best encoded, as positions.

    By prefix, what begins alike is side by side, for encoders that compute a prefix once. Otherwise
    longest first, so that inputs of like length go together and memory runs out early if it does.
    """
    if by_prefix:
        return sorted(range(len(inputs)), key=lambda i: inputs[i].texts)
    return sorted(range(len(inputs)), key=lambda i: (-inputs[i].size, inputs[i].texts))


@dataclass(frozen=True, slots=True)
class EncoderIdentity:
    """Everything but the input that changes a vector. Two encoders that differ never share one.

    Device, batch size and paths are left out on purpose: they may change rounding, not meaning.

    Attributes:
        weights: ``hub:NAME@COMMIT``, or ``sha256:DIGEST`` of a local checkpoint's files; of an
            adapter ``sha256:DIGEST on`` those of its base.
        dtype: the type the weights and activations are computed in.
        pooling: how token vectors become one vector; also a function of the user's own.
        pool_over: which tokens of an input are pooled. ``all``; ``text``: the text's own, neither
            the instruction's nor special ones; ``after-instruction``: all but as many of the
            first tokens as the instruction has by itself, which is what NV-Embed-v2 counts.
        max_length: tokens an input may have, special tokens included.
        special_tokens: ``tokenizer``: those that the checkpoint's tokenizer adds; otherwise the
            tokens that are put around every input, such as ``<s> {text} </s>``.
        normalize: whether vectors are scaled to unit L2 norm.
        instruction_format: the model's own format around ``{instruction}`` and ``{text}``, used
            for inputs that have an instruction; empty where the model takes none.
        long_texts: what becomes of inputs with more tokens than ``max_length``.
        router, router_mode, router_layers, router_strength: where the routers of inputs act; for
            ``csr`` how, in how many of the last layers, and what their weights are multiplied by.
        engine: version of the code that computes vectors.
        runtime: the library that computes in 16 bit. In float32 it is always recorded as ``torch``:
            there the vectors of OpenVINO are those of PyTorch, up to 1e-5.
    """

    weights: str
    dtype: Dtype
    quantize: Quantize
    pooling: str
    max_length: int
    normalize: bool
    instruction_format: str
    attention: Attention
    pool_over: PoolOver = "all"
    special_tokens: str = TOKENIZER_DECIDES
    engine: int = ENGINE_VERSION
    long_texts: LongTexts = "cut"
    router: RouterPlace = "none"
    router_mode: RouterMode = "paper"
    router_layers: int = 3
    router_strength: float = 1.0
    runtime: Runtime = "torch"

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
        values = asdict(self)
        # Records have had these keys not from the start.
        if self.long_texts == "cut":
            del values["long_texts"]
        if self.runtime == "torch":
            del values["runtime"]
        if self.router == "none":
            values = {key: v for key, v in values.items() if not key.startswith("router")}
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> EncoderIdentity:
        """Return the identity that :meth:`to_json` recorded in ``source``.

        Raises:
            LlmcondError: the record was damaged.
        """
        try:
            return cls(**values)
        except TypeError as error:
            raise LlmcondError(f"{source} records no encoder identity of ours: {error}.") from error

    def differences(self, other: EncoderIdentity) -> list[str]:
        """Return ``field: mine, not theirs`` for each field that differs."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{key}: {mine[key]!r}, not {theirs[key]!r}" for key in mine if mine[key] != theirs[key]
        ]


def check_instruction_format(template: str) -> None:
    """Refuse a template that does not name ``{instruction}`` and ``{text}``, each once, alone.

    Raises:
        UserError: saying so.
    """
    try:
        fields = [field for _, *field in Formatter().parse(template) if field[0] is not None]
    except ValueError as error:
        raise UserError(f"the instruction format {template!r} cannot be read: {error}.") from error
    # Neither has a format or a conversion, as in {text!r}.
    plain = [["instruction", "", None], ["text", "", None]]
    if template and fields not in (plain, plain[::-1]):
        raise UserError(
            f"the instruction format {template!r} must name {{instruction}} and {{text}}, each "
            "once, and nothing else in braces."
        )


def check_special_tokens(template: str) -> None:
    """Refuse what is neither ``tokenizer`` nor one token at most on each side of a text.

    Raises:
        UserError: saying so.
    """
    first, text, last = template.partition("{text}")
    wrong = not text or len(first.split()) > 1 or len(last.split()) > 1 or "{text}" in last
    if wrong and template != TOKENIZER_DECIDES:
        raise UserError(
            f"special_tokens is {template!r}; expected {TOKENIZER_DECIDES!r}, or {{text}} with "
            "a token before it, after it or both, such as '<s> {text} </s>'."
        )
