"""Prompt templates, which turn a sentence and a condition into the input of an encoder.

A template is one TOML file. It contains the task instruction and the encoded text, both for the
conditional embedding f(c; I(s)) and for the unconditional one, f(c; I(∅)), which is subtracted from
it (CASE, section 3.1, equation 1). Sentences are inserted verbatim, so braces in them have no
special meaning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from string import Formatter
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from llmcond.config import STRICT, build, check_name, read_toml, resolve_toml
from llmcond.encoders.settings import TOKENIZER_DECIDES, EncoderIdentity
from llmcond.encoders.spec import ROUTED_POOLINGS, EncoderInput, Router, Span, get_pooling
from llmcond.errors import UserError, list_legal_values
from llmcond.files import digest_text, fields_as_json

PLACEHOLDERS = ("sentence", "condition")
#: The settings of a ``Router``, which are keys of the same table in a template.
ROUTER_SETTINGS = tuple(each.name for each in fields(Router) if each.name != "text")
#: How a control, with which other templates are compared, treats the condition.
Control = Literal["left-out", "shuffled"]


@dataclass(frozen=True, slots=True)
class InputTemplate:
    """The templates of one encoder input.

    Attributes:
        text: template of the text that is encoded.
        instruction: template of the task instruction, for encoders that take one.
        context: template of a text that is read before ``text`` but not pooled, for encoders that
            read pairs; see ``EncoderInput``. Empty: there is no such text, but the same tokens are
            pooled. None: a plain input.
        router: template of the text that weights the pooled tokens by their similarity to it; see
            ``Router``. None: all tokens have the same weight.
        temperature: setting of the router.
        centre: setting of the router.
        standardize: setting of the router.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    text: str
    instruction: str = ""
    context: str | None = None
    router: str | None = None
    temperature: float = 0.7
    centre: bool = False
    standardize: bool = True

    @property
    def templates(self) -> dict[Any, str]:
        """The templates by their keys, without a missing context or router."""
        templates = {"instruction": self.instruction, "text": self.text}
        optional = {"context": self.context, "router": self.router}
        return templates | {key: text for key, text in optional.items() if text is not None}

    @property
    def router_settings(self) -> dict[str, Any]:
        """The settings of the router, if there is one."""
        names = () if self.router is None else ROUTER_SETTINGS
        return {name: getattr(self, name) for name in names}

    @property
    def placeholders(self) -> set[str]:
        """The names of all placeholders in the templates."""
        return {n for t in self.templates.values() for _, n in _parse_template(t) if n is not None}

    @property
    def read_placeholders(self) -> set[str]:
        """The placeholders that the encoder reads together with the text, not in a router."""
        return replace(self, router=None).placeholders

    def render(
        self, sentence: str, condition: str, extra: Mapping[str, str] = MappingProxyType({})
    ) -> EncoderInput:
        """Fill in the placeholders.

        Args:
            sentence: value of ``{sentence}``.
            condition: value of ``{condition}``.
            extra: values of further placeholders by name.

        Returns:
            The input of the encoder.
        """
        values = {"sentence": sentence, "condition": condition, **extra}
        texts: dict[Any, str] = {}
        spans: list[Span] = []
        for key, template in self.templates.items():
            text = ""
            for literal, name in _parse_template(template):
                text += literal
                if name == "sentence" and key != "router":
                    spans.append((key, len(text), len(text) + len(sentence)))
                text += values[name] if name is not None else ""
            texts[key] = text
        router = texts.pop("router", None)
        return EncoderInput(
            **texts,
            sentence=tuple(spans),
            router=None if router is None else Router(router, **self.router_settings),
        )


@cache
def _parse_template(template: str) -> list[tuple[str, str | None]]:
    """Return the literal texts of a valid template, each with the placeholder after it, if any."""
    return [(literal, name) for literal, name, _, _ in Formatter().parse(template)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A valid template file.

    Attributes:
        description: what the template does, in a sentence.
        source: where the wording comes from.
        conditional: the input for e(s|c). It names both ``{sentence}`` and ``{condition}``, or only
            the sentence. In that case features are separate: ``conditional`` gives e(s), and
            ``unconditional`` gives e(c).
        unconditional: the input that is subtracted. It names exactly one of the two placeholders.
        control: set for templates that only serve as a comparison. ``left-out``: neither input
            contains the condition, so both rows of a sentence pair get the same input. Nothing is
            subtracted then, because e(c) would bring the condition back, and any constant would be
            an arbitrary choice; ``unconditional`` repeats ``conditional``. ``shuffled``: every row
            gets the condition of another row; see ``llmcond.prompts.inputs``.
        fields: further columns of the data that may be used as placeholders.
        plain: the input of a text without a condition, for tasks in which only one side has one.
            None: the text itself.
        name: name of the template, which is that of its file.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    description: str
    source: str
    conditional: InputTemplate
    unconditional: InputTemplate
    control: Control | None = None
    fields: tuple[str, ...] = ()
    plain: InputTemplate | None = None
    name: str = field(default="", kw_only=True)

    @property
    def separate(self) -> bool:
        """Whether sentence and condition are encoded separately, as e(s) and e(c)."""
        return "condition" not in self.conditional.placeholders and self.subtractable

    @property
    def subtractable(self) -> bool:
        """Whether an unconditional embedding can be subtracted."""
        return self.control != "left-out"

    @property
    def has_router(self) -> bool:
        """Whether one of the two inputs has a router."""
        return any(part.router is not None for part in (self.conditional, self.unconditional))

    @property
    def subtracts_condition(self) -> bool:
        """Whether the unconditional input is the condition alone, e(c)."""
        return "condition" in self.unconditional.placeholders

    @property
    def sentence_part(self) -> InputTemplate | None:
        """The part that gives the input of a sentence alone, e(s); None if there is none."""
        if not self.subtracts_condition:
            return self.unconditional
        return self.conditional if self.separate else None

    @property
    def digest(self) -> str:
        """A digest of everything in the template that affects an encoder's input."""
        parts = [self.conditional, self.unconditional, *([self.plain] if self.plain else [])]
        has_later_keys = any(part.context is not None or part.router is not None for part in parts)
        if not self.plain and not self.control and not has_later_keys:
            return digest_text(*(text for part in parts for text in part.templates.values()))
        control = [self.control] if self.control and not self.plain else []
        contents = ({**part.templates, **part.router_settings} for part in parts)
        return digest_text(*control, *map(json.dumps, contents))

    def obstacle(self, encoder: EncoderIdentity) -> str:
        """Return why an encoder does not support the template's inputs; empty if it does."""
        parts = (self.conditional, self.unconditional)
        if any(part.instruction for part in parts) and not encoder.instruction_format:
            return (
                "it has an instruction, but the encoder takes none (or define a format for it: "
                r"--instruction-format 'Instruct: {instruction}\nQuery: {text}')"
            )
        if any(part.context is not None for part in parts):
            if encoder.special_tokens != TOKENIZER_DECIDES:
                return "it has a context, but the encoder reads single texts only, not pairs"
            if not get_pooling(encoder.pooling).supports_pool_over:
                return (
                    "it pools only the tokens of the text, which the encoder's pooling "
                    f"{encoder.pooling} does not support (--pooling mean)"
                )
        if encoder.routes_inside and "condition" in self.conditional.read_placeholders:
            return (
                "it puts the condition into the text, but the encoder expects it in a router "
                "(--prompt routed)"
            )
        if encoder.routes_inside or encoder.pooling in ROUTED_POOLINGS or not self.has_router:
            return ""
        return (
            "its router weights token states, which the encoder's pooling "
            f"{encoder.pooling} does not support (--pooling {' or '.join(ROUTED_POOLINGS)})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the template with its digest, as manifests record it."""
        return {**fields_as_json(self), "digest": self.digest}


def list_fields(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Return the further columns of the data that prompts use, each once."""
    return tuple(dict.fromkeys(name for prompt in prompts for name in prompt.fields))


def prompt_from_json(values: dict[str, Any], source: str) -> Prompt:
    """Return the template that ``Prompt.to_json`` recorded; a ``UserError`` if it was changed."""
    prompt = build(Prompt, {key: values[key] for key in values if key != "digest"}, source)
    if prompt.name:
        check_name(prompt.name, f"{source}: a prompt")
    _check(prompt, source)
    if prompt.digest != values.get("digest"):
        raise UserError(f"{source}: the prompt's text does not match its recorded digest.")
    return prompt


def load_prompt(name_or_file: str) -> Prompt:
    """Read a template by its bundled name or by the path of a ``.toml`` file.

    Raises:
        UserError: there is no such template, or a key or a placeholder is unknown or missing.
    """
    path = resolve_toml(name_or_file, "prompts")
    values = read_toml(path)
    if "name" in values:
        raise UserError(
            f"{path}: unknown key 'name'. A prompt has the name of its file; remove the key."
        )
    prompt = build(Prompt, {**values, "name": path.stem}, str(path))
    _check(prompt, str(path))
    return prompt


def _check(prompt: Prompt, source: str) -> None:
    known = (*PLACEHOLDERS, *prompt.fields)
    conditional = _check_part(prompt.conditional, f"{source}: [conditional]", known)
    unconditional = _check_part(prompt.unconditional, f"{source}: [unconditional]", known)
    if prompt.plain is not None and "condition" in _check_part(
        prompt.plain, f"{source}: [plain]", known
    ):
        raise UserError(
            f"{source}: [plain] names {{condition}}, but it is for texts without a condition."
        )
    conditional, unconditional = conditional & set(PLACEHOLDERS), unconditional & set(PLACEHOLDERS)
    if prompt.control == "left-out":
        if conditional | unconditional != {"sentence"}:
            raise UserError(
                f"{source}: control is 'left-out', but the template names "
                f"{_list_names(conditional | unconditional)}. Both [conditional] and "
                "[unconditional] must name only {sentence}."
            )
        if prompt.conditional != prompt.unconditional:
            raise UserError(
                f"{source}: control is 'left-out', so nothing is subtracted, and [unconditional] "
                "must be the same as [conditional]. Copy it."
            )
        return
    separate = conditional == {"sentence"} and unconditional == {"condition"}
    missing = [name for name in PLACEHOLDERS if name not in conditional]
    if missing and not separate:
        raise UserError(
            f"{source}: [conditional] lacks the placeholder {{{missing[0]}}}. Its text and its "
            f"instruction or context together must name {{sentence}} and {{condition}}. For "
            "separate features, it must name only {sentence}, and [unconditional] {condition}."
        )
    if (prompt.conditional.context is None) != (prompt.unconditional.context is None):
        raise UserError(
            f"{source}: only one of [conditional] and [unconditional] has a context, so different "
            'tokens would be pooled. Add a context to the other one as well; context = "" reads '
            "nothing before the text."
        )
    if len(unconditional) != 1:
        raise UserError(
            f"{source}: [unconditional] names {_list_names(unconditional)}. It must name exactly "
            "one placeholder, {sentence} or {condition}: the text whose embedding is subtracted."
        )


def _list_names(placeholders: set[str]) -> str:
    return " and ".join(f"{{{name}}}" for name in sorted(placeholders)) or "none"


def _check_part(part: InputTemplate, source: str, known: Sequence[str]) -> set[str]:
    advice = ' To use another column of the data, declare it: fields = ["COLUMN"].'
    names: set[str] = set()
    for key, template in part.templates.items():
        names |= placeholders(template, f"{source} {key}", known, advice)
    if part.router is not None and not part.router.strip():
        raise UserError(f"{source} router is empty, so it could not weight tokens. Leave it out.")
    try:
        Router("", **{name: getattr(part, name) for name in ROUTER_SETTINGS})
    except UserError as error:
        raise UserError(f"{source} {error}") from error
    if part.instruction and part.context is not None:
        raise UserError(f"{source} has both an instruction and a context; use only one of them.")
    if not part.text.strip():
        raise UserError(f"{source} text is empty: there is nothing to encode.")
    return names


def placeholders(template: str, source: str, known: Sequence[str], advice: str = "") -> set[str]:
    """Return the names of a template's placeholders.

    Args:
        template: a text with names in braces.
        source: name of the template in messages.
        known: valid names.
        advice: the end of the message about an unknown name.

    Raises:
        UserError: a brace is not closed, a name is unknown, or a placeholder has a format or a
            conversion.
    """
    try:
        fields = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"{source}: {error}. Write {{{{ and }}}} for literal braces.") from error
    names: set[str] = set()
    for _, name, spec, conversion in fields:
        if name is None:
            continue
        if name in known and (spec or conversion):
            full_field = f"{name}{'!' if conversion else ''}{conversion or ''}"
            full_field += f":{spec}" if spec else ""
            raise UserError(
                f"{source} has {{{full_field}}}, but texts are inserted verbatim; write {{{name}}}."
            )
        if name not in known:
            legal = [f"{{{known_name}}}" for known_name in known]
            raise UserError(
                f"{source} has the unknown placeholder {{{name}}}. "
                f"{list_legal_values(name, known, legal)}{advice}"
            )
        names.add(name)
    return names
