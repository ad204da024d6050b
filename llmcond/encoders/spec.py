"""What an encoder reads, and everything that decides the numbers it gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from string import Formatter
from typing import Any, Literal

from llmcond.errors import LlmcondError, UserError
from llmcond.files import digest_bytes

Pooling = Literal["cls", "mean", "last"]
Dtype = Literal["float32", "bfloat16", "float16"]

POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "last")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")

#: Raised when the engine itself changes the vectors it gives for the same identity.
ENGINE_VERSION = 1


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One text to encode, with the task it is encoded for.

    Attributes:
        instruction: the task description only (for CASE, I(s) with the sentence in it); the
            encoder adds its own model's format around it. Empty: no instruction.
        text: the text whose tokens are encoded.
    """

    instruction: str
    text: str

    @property
    def key(self) -> bytes:
        """Identify the input: 16 bytes over instruction and text, their boundary included."""
        return digest_bytes(json.dumps([self.instruction, self.text]).encode(), size=16)


@dataclass(frozen=True, slots=True)
class EncoderIdentity:
    """Everything but the input that changes a vector. Two encoders that differ never share one.

    Device, batch size and paths are left out on purpose: they may change rounding, not meaning.

    Attributes:
        weights: ``hub:NAME@COMMIT``, or ``sha256:DIGEST`` of a local checkpoint's files.
        dtype: the type the weights and activations are computed in.
        quantize: ``none``, ``8bit`` or ``4bit``.
        attention: ``native``: as the checkpoint's own architecture and config have it.
        pooling: how token vectors become one vector.
        max_length: tokens an input may have, special tokens included; longer ones are truncated.
        special_tokens: ``tokenizer``: those that the checkpoint's tokenizer adds.
        normalize: whether vectors are scaled to unit L2 norm.
        instruction_format: the model's own format around ``{instruction}`` and ``{text}``, used
            for inputs that have an instruction; empty where the model takes none.
        engine: version of the code that computes vectors.
    """

    weights: str
    dtype: Dtype
    quantize: str
    pooling: Pooling
    max_length: int
    normalize: bool
    instruction_format: str
    attention: str = "native"
    special_tokens: str = "tokenizer"
    engine: int = ENGINE_VERSION

    @property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits over all fields; the name of a feature store's folder."""
        return digest_bytes(json.dumps(self.to_json(), sort_keys=True).encode(), size=8).hex()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

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
        mine, theirs = self.to_json(), other.to_json()
        return [
            f"{key}: {mine[key]!r}, not {theirs[key]!r}" for key in mine if mine[key] != theirs[key]
        ]


def fill(template: str, values: Mapping[str, str]) -> str:
    """Put ``values`` into a checked template, as text: braces in a value mean nothing."""
    return "".join(
        literal + (values[name] if name is not None else "")
        for literal, name, _, _ in Formatter().parse(template)
    )


def check_instruction_format(template: str) -> str:
    """Return ``template`` if it names ``{instruction}`` and ``{text}``, each once and no other.

    Raises:
        UserError: it does not.
    """
    try:
        # A format or conversion belongs to the name here: {text!r} is no legal placeholder.
        names = [
            name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            for _, name, form, conversion in Formatter().parse(template)
            if name is not None
        ]
    except ValueError as error:
        raise UserError(f"the instruction format {template!r} cannot be read: {error}.") from error
    if template and sorted(names) != ["instruction", "text"]:
        raise UserError(
            f"the instruction format {template!r} must name {{instruction}} and {{text}}, each "
            "once, and nothing else in braces."
        )
    return template
