"""What an encoder reads: its inputs, and the types of what it is computed in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from llmcond.errors import UserError
from llmcond.files import digest_bytes

Attention = Literal["bidirectional", "causal"]
Dtype = Literal["float32", "bfloat16", "float16"]
Quantize = Literal["none", "8bit", "4bit"]
#: The library that computes: PyTorch, or on a CPU OpenVINO.
Runtime = Literal["torch", "openvino"]
#: In which orders a cross-encoder reads two sentences: the mean of both, or as they are given.
Orders = Literal["both", "given"]
#: What is said of inputs that were longer than the encoder takes, unless it reads windows.
CUT = (
    "their sentences were cut, conditions and instructions are whole (--long-texts windows reads "
    "all of them)"
)
#: A part of an input's texts: the field, its first character, and the one behind its last.
Span = tuple[Literal["instruction", "text", "context"], int, int]


@dataclass(frozen=True, slots=True)
class Router:
    """Another text that chooses which tokens of an input count: routed pooling.

    The token states h_i of the input are pooled to sum_i w_i h_i, with w the softmax over i of
    cos(h_i - m, q) / (temperature * s). q is the router's own vector; m the mean of the h_i, or 0;
    s the standard deviation of these cosines over i, or 1. An encoder with a router inside has
    another formula, and no use for the settings.

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
