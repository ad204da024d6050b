"""What a user may choose about an encoder: each field is a keyword argument and a flag.

Imports neither torch nor transformers, so that the command line can be built from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from llmcond import plugins
from llmcond.encoders.poolings import POOLINGS
from llmcond.encoders.spec import (
    Attention,
    Dtype,
    EncoderIdentity,
    LongTexts,
    PoolOver,
    Quantize,
    RouterMode,
    RouterPlace,
    Runtime,
    check_instruction_format,
    check_special_tokens,
)
from llmcond.errors import UserError, nearest
from llmcond.options import option


def _option(default: Any = None, **spec: Any) -> Any:
    return option(default, group="encoder", **spec)


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """What a user may choose about an encoder. None: as the model has it.

    Raises:
        UserError: a value that no model can have.
    """

    revision: str | None = _option(metavar="REV", help="branch, tag or commit on the hub")
    like: str | None = _option(
        metavar="NAME",
        help="a known model whose settings this one has: for copies and fine-tuned ones",
    )
    dtype: Literal["auto"] | Dtype = _option(
        "auto", help="auto: the fastest that the device computes natively"
    )
    quantize: Quantize | None = _option(
        "none", help="weights in 8 or 4 bit (needs the extra quantize)"
    )
    device: str = _option("auto", metavar="D", help="auto, cpu, cuda or cuda:N")
    runtime: Literal["auto"] | Runtime = _option(
        "auto",
        help="library that computes. auto: on a CPU OpenVINO, where it is installed and has the "
        "architecture (encoders of the BERT kind); otherwise PyTorch",
    )
    attention: Attention | None = _option(help="its direction (default: the model's own)")
    max_tokens_per_batch: int | None = _option(
        metavar="N", help="token budget of one forward pass (default: by the device and its memory)"
    )
    share_prefixes: bool = _option(
        True,
        help="compute what several inputs begin with once, where that is exact: for causal "
        "encoders that pool the last token",
    )
    pooling: str | None = _option(
        metavar="POOLING",
        help=f"{', '.join(POOLINGS)}, or a function of your own, FILE.py:NAME or "
        "MODULE:NAME (default: the model's own)",
    )
    pool_over: PoolOver | None = _option(
        help="pool all tokens, or the text's without its instruction; after-instruction is "
        "NV-Embed-v2's own count (default: the model's own)"
    )
    normalize: bool | None = _option(
        help="scale vectors to unit L2 norm (default: the model's own)"
    )
    max_length: int | None = _option(
        metavar="N", help="tokens of an input, special tokens included (default: the model's own)"
    )
    long_texts: LongTexts = _option(
        "cut",
        help="cut the sentence of longer inputs, or read it in windows, each with the whole "
        "condition, whose vectors are averaged",
    )
    router: RouterPlace | None = _option(
        help="csr: what a prompt gives as router weights tokens inside the encoder rather than as "
        "they are pooled (default: none, or as it was trained)"
    )
    router_mode: RouterMode | None = _option(
        help="of --router csr: the paper's, a variant of it, or as its authors' code has it "
        "(default: paper)"
    )
    router_layers: int | None = _option(
        metavar="N", help="of --router csr: in how many of the last layers (default: 3)"
    )
    router_strength: float | None = _option(
        metavar="A", help="of --router csr: tokens are scaled by 1 + A w (default: 1)"
    )
    instruction_format: str | None = _option(
        metavar="TEXT",
        help=r"how an instruction is put before a text, e.g. "
        r"'Instruct: {instruction}\nQuery: {text}'",
        # A shell has no easy way to write a line break.
        parse=lambda text: text.replace("\\n", "\n"),
    )
    special_tokens: str | None = _option(
        metavar="TEXT",
        help="tokens around every input, e.g. '<s> {text} </s>', or: tokenizer (as it adds them)",
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
                check_choice(name, value, legal)
        if self.instruction_format is not None:
            check_instruction_format(self.instruction_format)
        if self.special_tokens is not None:
            check_special_tokens(self.special_tokens)
        budget = self.max_tokens_per_batch
        if budget is not None and budget < 1:
            raise UserError(f"max_tokens_per_batch is {budget}; it must be at least 1.")
        layers, strength = self.router_layers, self.router_strength
        if layers is not None and layers < 1:
            raise UserError(f"router_layers is {layers}; it must be at least 1.")
        if strength is not None and not 0 < strength < math.inf:
            raise UserError(f"router_strength is {strength:g}; it must be above 0.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EncoderOptions:
        """Return the options among ``values``, such as those of an identity; others are ignored.

        What is not among them is as the model has it.
        """
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


def _literals(hint: Any) -> tuple[str, ...]:
    """Return the legal values of a type: those of all Literals in it."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for inner in get_args(hint) for value in _literals(inner))


_HINTS = get_type_hints(EncoderOptions)
#: Legal values of the options that have choices.
CHOICES = {name: legal for name, hint in _HINTS.items() if (legal := _literals(hint))}
CHOICES["pooling"] = tuple(POOLINGS)
#: The options that decide vectors and are as the model has them if left open, with their types:
#: what training records of an encoder.
MODEL_SETTINGS: dict[str, type] = {
    field.name: next((kind for kind in (bool, int, float) if kind in get_args(hint)), str)
    for field in fields(EncoderOptions)
    if (hint := _HINTS[field.name]) and field.default is None
    if field.name in get_type_hints(EncoderIdentity)
}
#: Those among them that a model has by itself; a router is put into it.
STATED = tuple(name for name in MODEL_SETTINGS if not name.startswith("router"))


def check_choice(name: str, value: str, legal: tuple[str, ...]) -> None:
    """Check an option's value.

    Raises:
        UserError: it is none of the legal ones.
    """
    if value not in legal:
        raise UserError(f"{name} is {value!r}. {nearest(value, legal)} Legal: {', '.join(legal)}.")
