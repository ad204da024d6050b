"""Prompt templates: a sentence and a condition become what the encoder reads.

A template is one TOML file. It holds the task instruction and the encoded text, for the
conditional embedding f(c; I(s)) and for the unconditional one f(c; I(∅)) that is subtracted from
it (CASE, section 3.1, equation 1). Sentences are put in as text: braces in them mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from string import Formatter
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from llmcond.config import STRICT, build, check_name, find_toml, read_toml
from llmcond.encoders.poolings import ROUTED_POOLINGS, pooling_named
from llmcond.encoders.settings import TOKENIZER_DECIDES, EncoderIdentity
from llmcond.encoders.spec import EncoderInput, Router, Span
from llmcond.errors import UserError, nearest
from llmcond.files import digest_text

PLACEHOLDERS = ("sentence", "condition")
#: The settings of a ``Router``, which stand beside it in a template.
ROUTER_SETTINGS = tuple(each.name for each in fields(Router) if each.name != "text")
#: What a template that others are compared with does to the condition.
Control = Literal["left-out", "shuffled"]


@dataclass(frozen=True, slots=True)
class Part:
    """One input of a template: the text that is encoded, and what it is encoded under.

    Attributes:
        text: what is encoded.
        instruction: the task, for encoders that take one.
        context: what is read before the text but not pooled, for encoders that read pairs; see
            ``EncoderInput``. Empty: none, but pooled alike. None: a plain text.
        router: what weights the tokens that are pooled, by their nearness to it; see ``Router``,
            also for its settings. None: all count alike.
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
        """Return its templates by their keys, without a context or router that is not there."""
        found = {"instruction": self.instruction, "text": self.text}
        others = {"context": self.context, "router": self.router}
        return found | {key: text for key, text in others.items() if text is not None}

    @property
    def decisive(self) -> dict[Any, Any]:
        """Return all that decides an input: its templates, and the settings of a router."""
        if self.router is None:
            return self.templates
        return {**self.templates, **{key: getattr(self, key) for key in ROUTER_SETTINGS}}

    def to_json(self) -> dict[str, Any]:
        """Return what manifests record: no settings of a router that is not there."""
        values = asdict(self)
        if self.router is None:
            for key in ("router", *ROUTER_SETTINGS):
                del values[key]
        return values

    @property
    def placeholders(self) -> set[str]:
        """Return the names that its templates have in braces."""
        return self._names(self.templates)

    @property
    def read(self) -> set[str]:
        """Return those whose texts the encoder reads together with the text, not by a router."""
        return self._names({key: t for key, t in self.templates.items() if key != "router"})

    @staticmethod
    def _names(templates: Mapping[Any, str]) -> set[str]:
        pieces = (piece for template in templates.values() for piece in _pieces(template))
        return {name for _, name in pieces if name is not None}

    def render(
        self, sentence: str, condition: str, extra: Mapping[str, str] = MappingProxyType({})
    ) -> EncoderInput:
        """Return the encoder input with the texts put in; ``extra`` is for further placeholders."""
        values = {"sentence": sentence, "condition": condition, **extra}
        texts: dict[Any, str] = {}
        spans: list[Span] = []
        for key, template in self.templates.items():
            text = ""
            for literal, name in _pieces(template):
                text += literal
                if name == "sentence" and key != "router":
                    spans.append((key, len(text), len(text) + len(sentence)))
                text += values[name] if name is not None else ""
            texts[key] = text
        router = texts.pop("router", None)
        return EncoderInput(**texts, sentence=tuple(spans), router=self._router(router))

    def _router(self, text: str | None) -> Router | None:
        settings = {key: getattr(self, key) for key in ROUTER_SETTINGS}
        return None if text is None else Router(text, **settings)


@cache
def _pieces(template: str) -> list[tuple[str, str | None]]:
    """Return the texts of a checked template, each with the placeholder behind it."""
    return [(literal, name) for literal, name, _, _ in Formatter().parse(template)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A template file, checked.

    Attributes:
        source: where the wording comes from.
        conditional: the input for e(s|c); names both ``{sentence}`` and ``{condition}``, or the
            sentence only: then features are separate, e(s) here and e(c) in the other.
        unconditional: the input that is subtracted; names exactly one of them.
        control: for templates that are there to be compared with only. ``left-out``: the condition
            is in neither input, so both rows of a sentence pair get the same one. Nothing is
            subtracted then, as e(c) would bring the condition in again, and any constant would be
            one more choice; ``unconditional`` repeats ``conditional``. ``shuffled``: every row
            gets the condition of another row; see :mod:`llmcond.prompts.inputs`.
        fields: columns of the data, besides sentence and condition, that are placeholders too.
        plain: the input of a text that has no condition, in tasks where only one side has one;
            None: the text as it is.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    description: str
    source: str
    conditional: Part
    unconditional: Part
    control: Control | None = None
    fields: tuple[str, ...] = ()
    plain: Part | None = None
    name: str = field(default="", kw_only=True)

    @property
    def separate(self) -> bool:
        """Return whether sentence and condition are encoded separately, as e(s) and e(c)."""
        return "condition" not in self.conditional.placeholders and self.subtractable

    @property
    def subtractable(self) -> bool:
        """Return whether an unconditional embedding can be subtracted."""
        return self.control != "left-out"

    @property
    def routes(self) -> bool:
        """Return whether one of its inputs has a router."""
        return any(part.router is not None for part in (self.conditional, self.unconditional))

    @property
    def of_condition(self) -> bool:
        """Return whether the unconditional input is the condition alone, e(c)."""
        return "condition" in self.unconditional.placeholders

    @property
    def alone(self) -> Part | None:
        """Return what makes the input of a sentence by itself, e(s); None where nothing does."""
        if not self.of_condition:
            return self.unconditional
        return self.conditional if self.separate else None

    @property
    def digest(self) -> str:
        """Identify everything in the template that changes an encoder's input."""
        parts = [self.conditional, self.unconditional, *([self.plain] if self.plain else [])]
        later = any(part.context is not None or part.router is not None for part in parts)
        if not self.plain and not self.control and not later:
            return digest_text(*(text for part in parts for text in part.templates.values()))
        named = [self.control] if self.control and not self.plain else []
        return digest_text(*named, *(json.dumps(part.decisive) for part in parts))

    def obstacle(self, encoder: EncoderIdentity) -> str:
        """Return why an encoder cannot take the template's inputs; empty if it can."""
        parts = (self.conditional, self.unconditional)
        if any(part.instruction for part in parts) and not encoder.instruction_format:
            return (
                "it gives an instruction, and the encoder takes none (or say how to put it in: "
                r"--instruction-format 'Instruct: {instruction}\nQuery: {text}')"
            )
        if any(part.context is not None for part in parts):
            if encoder.special_tokens != TOKENIZER_DECIDES:
                return "it gives a context, and the encoder reads one text only, not a pair"
            if not pooling_named(encoder.pooling).counts:
                return (
                    "it pools over the text's own tokens, and the encoder pools by "
                    f"{encoder.pooling} (--pooling mean)"
                )
        if encoder.routes_inside and "condition" in self.conditional.read:
            return (
                "it puts the condition into the text, and the encoder has a router for it "
                "(--prompt routed)"
            )
        if encoder.routes_inside or encoder.pooling in ROUTED_POOLINGS or not self.routes:
            return ""
        return (
            "its router weights the tokens' own states, and the encoder pools by "
            f"{encoder.pooling} (--pooling {' or '.join(ROUTED_POOLINGS)})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the template with its digest, as manifests record it."""
        parts = {"conditional": self.conditional, "unconditional": self.unconditional}
        values = {**asdict(self), "digest": self.digest}
        values |= {name: part.to_json() for name, part in parts.items()}
        values["plain"] = self.plain.to_json() if self.plain else None
        later = ("control", "fields", "plain")  # records have had these keys not from the start
        return {key: value for key, value in values.items() if value or key not in later}


def fields_of(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Return the further columns of the data that prompts name, each once."""
    return tuple(dict.fromkeys(name for prompt in prompts for name in prompt.fields))


def prompt_from_json(values: dict[str, Any], source: str) -> Prompt:
    """Return the template that :meth:`Prompt.to_json` recorded; a UserError if it was changed."""
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
        UserError: no such template, an unknown or missing key, an unknown or missing placeholder.
    """
    path = find_toml(name_or_file, "prompts")
    values = read_toml(path)
    if "name" in values:
        raise UserError(f"{path}: unknown key 'name': a prompt is named by its file.")
    prompt = build(Prompt, {**values, "name": path.stem}, str(path))
    _check(prompt, str(path))
    return prompt


def _check(prompt: Prompt, source: str) -> None:
    known = (*PLACEHOLDERS, *prompt.fields)
    conditional = _placeholders(prompt.conditional, f"{source}: [conditional]", known)
    unconditional = _placeholders(prompt.unconditional, f"{source}: [unconditional]", known)
    if prompt.plain is not None and "condition" in _placeholders(
        prompt.plain, f"{source}: [plain]", known
    ):
        raise UserError(f"{source}: [plain] names {{condition}}, which such texts do not have.")
    conditional, unconditional = conditional & set(PLACEHOLDERS), unconditional & set(PLACEHOLDERS)
    if prompt.control == "left-out":
        _check_left_out(prompt, conditional | unconditional, source)
        return
    apart = conditional == {"sentence"} and unconditional == {"condition"}
    missing = [name for name in PLACEHOLDERS if name not in conditional]
    if missing and not apart:
        raise UserError(
            f"{source}: [conditional] lacks the placeholder {{{missing[0]}}}. Its text, and its "
            f"instruction or context, must name {{sentence}} and {{condition}} between them; or, "
            "for separate features, {sentence} alone where [unconditional] names {condition}."
        )
    if (prompt.conditional.context is None) != (prompt.unconditional.context is None):
        raise UserError(
            f"{source}: one of [conditional] and [unconditional] has a context, so that they would "
            'be pooled over different tokens. Give both one; context = "" reads nothing before '
            "the text."
        )
    if len(unconditional) != 1:
        got = " and ".join(f"{{{name}}}" for name in sorted(unconditional)) or "none"
        raise UserError(
            f"{source}: [unconditional] names {got}. It must name exactly one placeholder, "
            "{sentence} or {condition}: the text whose own embedding is subtracted."
        )


def _check_left_out(prompt: Prompt, placeholders: set[str], source: str) -> None:
    if placeholders != {"sentence"}:
        got = " and ".join(f"{{{name}}}" for name in sorted(placeholders)) or "none"
        raise UserError(
            f"{source}: control is 'left-out', and the template names {got}. Without the condition "
            "both [conditional] and [unconditional] must name {sentence} alone."
        )
    if prompt.conditional != prompt.unconditional:
        raise UserError(
            f"{source}: control is 'left-out', so nothing is subtracted, and [unconditional] must "
            "be the same as [conditional]. Copy it."
        )


def _placeholders(part: Part, source: str, known: Sequence[str]) -> set[str]:
    advice = ' Other columns of the data are named first: fields = ["COLUMN"].'
    found: set[str] = set()
    for key, template in part.templates.items():
        found |= placeholders(template, f"{source} {key}", known, advice)
    if part.router is not None and not part.router.strip():
        raise UserError(f"{source} router is empty: it would choose no tokens. Leave it out.")
    try:
        part._router(part.router or "")
    except UserError as error:
        raise UserError(f"{source} {error}") from error
    if part.instruction and part.context is not None:
        raise UserError(f"{source} has both an instruction and a context; give one of them.")
    if not part.text.strip():
        raise UserError(f"{source} text is empty: there is nothing to encode.")
    return found


def placeholders(template: str, source: str, known: Sequence[str], advice: str = "") -> set[str]:
    """Return the names that a text has in braces.

    Raises:
        UserError: a brace that is not closed, a name that is not ``known``, or one with a format;
            it ends in ``advice`` for an unknown one.
    """
    try:
        fields = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(
            f"{source}: {error}. Write {{{{ and }}}} for braces that are text."
        ) from error
    found: set[str] = set()
    for _, name, spec, conversion in fields:
        if name is None:
            continue
        if name in known and (spec or conversion):
            written = f"{name}{'!' if conversion else ''}{conversion or ''}"
            written += f":{spec}" if spec else ""
            raise UserError(
                f"{source} has {{{written}}}, but texts are put in as they are; write {{{name}}}."
            )
        if name not in known:
            legal = ", ".join(f"{{{one}}}" for one in known)
            raise UserError(
                f"{source} has the unknown placeholder {{{name}}}. {nearest(name, known)} "
                f"Legal: {legal}.{advice}"
            )
        found.add(name)
    return found
