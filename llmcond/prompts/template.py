"""Prompt templates, and the inputs that they render from sentences and conditions.

A template is one TOML file. It contains the task instruction and the encoded text, both for the
conditional embedding f(c; I(s)) and for the unconditional one, f(c; I(∅)), which is subtracted from
it (CASE, section 3.1, equation 1). Sentences are inserted verbatim, so braces in them have no
special meaning.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from llmcond.base.errors import UserError, format_list, list_legal_values
from llmcond.base.files import digest_text, fields_as_json
from llmcond.base.records import build, check_name, read_toml, resolve_toml
from llmcond.data.rows import STORED_COLUMNS, Rows
from llmcond.encoders.settings import READ, TOKENIZER_DECIDES, EncoderIdentity
from llmcond.encoders.spec import (
    ROUTED_POOLINGS,
    SERVER_POOLING,
    EncoderInput,
    Router,
    Span,
    get_pooling,
)

if TYPE_CHECKING:
    from llmcond.data.datasets import Dataset
    from llmcond.encoders import ResolvedEncoder

T = TypeVar("T")
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
            gets the condition of another row; see ``llmcond.prompts.template``.
        fields: further columns of the data that may be used as placeholders.
        plain: the input of a text without a condition, for tasks in which only one side has one.
            None: the text itself.
        name: name of the template, which is that of its file.
    """

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
        control = [self.control] if self.control else []
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
        has_context = any(part.context is not None for part in parts)
        if encoder.pooling == SERVER_POOLING and (has_context or self.has_router):
            needed = "pairs of texts" if has_context else "a router, which weights states of tokens"
            return f"it has {needed}, and a server computes one vector of one text"
        if has_context:
            if encoder.special_tokens != TOKENIZER_DECIDES:
                return "it has a context, but the encoder reads single texts only, not pairs"
            if not get_pooling(encoder.pooling).supports_pool_over:
                return (
                    "it pools only the tokens of the text, which the encoder's pooling "
                    f"{encoder.pooling} does not support (--pooling mean)"
                )
        read_with_text = replace(self.conditional, router=None)
        if encoder.routes_inside and "condition" in read_with_text.placeholders:
            return (
                "it puts the condition into the text, but the encoder expects it in a router "
                "(--prompt routed)"
            )
        is_read = encoder.routes_inside or encoder.pooling in ROUTED_POOLINGS or not self.has_router
        obstacle = (
            "its router weights token states, which the encoder's pooling "
            f"{encoder.pooling} does not support (--pooling {' or '.join(ROUTED_POOLINGS)})"
        )
        return "" if is_read else obstacle

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
    prompt = read_template(path, Prompt)
    _check(prompt, str(path))
    return prompt


def read_template(path: Path, cls: type[T]) -> T:
    """Read a TOML file as a dataclass, whose ``name`` is that of the file.

    Raises:
        UserError: the file cannot be read, or a key is unknown or missing.
    """
    values = read_toml(path)
    if "name" in values:
        raise UserError(
            f"{path}: unknown key 'name'. A prompt has the name of its file; remove the key."
        )
    return build(cls, {**values, "name": path.stem}, str(path))


def _check(prompt: Prompt, source: str) -> None:
    if taken := [name for name in prompt.fields if name in STORED_COLUMNS]:
        raise UserError(
            f"{source}: fields names the column {taken[0]!r}, which is a name of llmcond's columns "
            f"({format_list(sorted(STORED_COLUMNS))}). Rename the column in the data."
        )
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


#: Seed with which each row gets another row's condition. It is fixed because prompts with the same
#: digest must give the same inputs.
_SEED = "0"
#: Number of conditions whose rendered inputs are cached.
_CONDITIONS = 4_096


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs of n rows, as columns: conditional and unconditional, for both sentences."""

    first: Sequence[EncoderInput]
    second: Sequence[EncoderInput]
    first_unconditional: Sequence[EncoderInput]
    second_unconditional: Sequence[EncoderInput]


class SplitInputs:
    """The inputs of some rows; see ``AnyTask.inputs``."""

    def __init__(self, splits: Iterable[Rows], prompt: Prompt) -> None:
        """Prepare rows, each split separately.

        Raises:
            UserError: as ``input_conditions``, or a column that the template names is missing.
        """
        self._prompt = prompt
        self._splits = [(rows, _renderers(rows, prompt)) for rows in splits]

    def __iter__(self) -> Iterator[EncoderInput]:
        # Inputs come row by row, so that those with a common prefix are close to each other.
        for rows, renderers in self._splits:
            for position in range(len(rows)):
                for conditional, unconditional in renderers:
                    yield conditional(position)
                    yield unconditional(position)

    def __len__(self) -> int:
        return 4 * sum(len(rows) for rows, _ in self._splits)

    def locate(self, item: EncoderInput) -> str | None:
        """Describe the first row that needs an input: ``row 17 of train.csv``."""
        for rows, renderers in self._splits:
            renders = [render for pair in renderers for render in pair]
            for position in range(len(rows)):
                if any(render(position) == item for render in renders):
                    return rows.describe(position)
        return None

    def check_distinct(self) -> None:
        """Raise a ``UserError`` if two rows with different conditions get the same inputs.

        No head can distinguish the conditions of such rows. Unconditional inputs are compared only
        if features are separate, where e(s) and e(c) together represent a row; otherwise they are
        ignored, because subtracting them is optional. Controls may have such rows.
        """
        for rows, ((first, unconditional), (second, _)) in self._splits:
            renders = (first, second, *([unconditional] if self._prompt.separate else []))
            seen: dict[tuple[bytes, ...], int] = {}
            for position in range(len(rows) if self._prompt.control is None else 0):
                key = tuple(render(position).key for render in renders)
                earlier = seen.setdefault(key, position)
                if rows.condition[earlier] != rows.condition[position]:
                    raise UserError(
                        f"the prompt {self._prompt.name} gives the same input for "
                        f"{rows.describe(earlier)} and {rows.describe(position)}, although their "
                        f"conditions differ ({rows.condition[earlier]!r} and "
                        f"{rows.condition[position]!r}). Put words or punctuation between "
                        "{sentence} and {condition} in the template."
                    )


_Render = Callable[[int], EncoderInput]


def _renderers(rows: Rows, prompt: Prompt) -> list[tuple[_Render, _Render]]:
    """Return functions from a row's position to its inputs, two for each of its sentences.

    The first function of a sentence gives the conditional input, the second the unconditional one.
    """
    missing = [name for name in prompt.fields if name not in rows.extra]
    if missing:
        raise UserError(
            f"the prompt {prompt.name} names the column {missing[0]!r}, but the rows of "
            f"{rows.file} were read without it. Extract into a new --run with this prompt."
        )
    conditions = input_conditions(rows, prompt)
    plain = prompt.plain or InputTemplate("{sentence}")

    def renderer(part: InputTemplate, texts: Sequence[str]) -> _Render:
        if not prompt.fields and "sentence" not in part.placeholders:
            # There are few conditions, and every row needs one.
            render_condition = lru_cache(_CONDITIONS)(lambda condition: part.render("", condition))
            return lambda i: render_condition(conditions[i])
        if not prompt.fields:
            return lambda i: part.render(texts[i], conditions[i])
        columns = {name: rows.extra[name] for name in prompt.fields}
        return lambda i: part.render(
            texts[i], conditions[i], {name: column[i] for name, column in columns.items()}
        )

    renderers = []
    for texts, conditioned in zip((rows.sentence1, rows.sentence2), rows.conditioned, strict=True):
        # Nothing is subtracted from a sentence without a condition, so both inputs are the same.
        parts = (prompt.conditional, prompt.unconditional) if conditioned else (plain, plain)
        renderers.append((renderer(parts[0], texts), renderer(parts[1], texts)))
    return renderers


def input_conditions(rows: Rows, prompt: Prompt) -> Sequence[str]:
    """Return the condition that each row's inputs contain.

    This is the row's own condition or, for a shuffled control, that of a random other row whose
    condition differs; frequent conditions are thus sampled often. The choice depends on the row's
    texts and on the conditions of all rows, but not on the order of rows. Therefore pass all rows
    of a split, never a part of it.

    Raises:
        UserError: the prompt is a shuffled control, but all rows have the same condition.
    """
    if prompt.control != "shuffled":
        return rows.condition
    texts = list(zip(rows.sentence1, rows.sentence2, rows.condition, strict=True))
    return shuffle_conditions(rows.condition, texts, prompt, f"rows of a split of {rows.file}")


def shuffle_conditions(
    conditions: Sequence[str], texts: Sequence[tuple[str, ...]], prompt: Prompt, what: str
) -> list[str]:
    """Return, for each row, the condition of a random other row whose condition differs.

    Args:
        conditions: the conditions of n rows.
        texts: for each row, the texts that decide its random choice.
        prompt: the prompt, for messages.
        what: name of the rows in messages.

    Raises:
        UserError: all rows have the same condition.
    """
    # Most tokenizers ignore case and repeated spaces, so conditions that differ only in these
    # count as the same.
    kinds = [" ".join(text.casefold().split()) for text in conditions]
    if len(set(kinds)) == 1:
        raise UserError(
            f"the prompt {prompt.name} gives each row the condition of another row, but all "
            f"{len(kinds):,} {what} have the same condition, {conditions[0]!r}. Leave the prompt "
            "out, or use rows with several conditions."
        )
    order = sorted(range(len(kinds)), key=lambda i: (kinds[i], conditions[i]))
    counts = Counter(kinds[position] for position in order)
    starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    shuffled_conditions = []
    for row_texts, kind in zip(texts, kinds, strict=True):
        offset = int(digest_text(_SEED, *row_texts), 16) % (len(kinds) - counts[kind])
        # Rows with the same condition are skipped.
        rank = offset + counts[kind] if offset >= starts[kind] else offset
        shuffled_conditions.append(conditions[order[rank]])
    return shuffled_conditions


def render_rows(rows: Rows, prompt: Prompt) -> RowInputs:
    """Render all rows with a prompt; raises the errors of ``SplitInputs``."""
    first, second = _renderers(rows, prompt)
    renderers = (first[0], second[0], first[1], second[1])
    return RowInputs(*([render(i) for i in range(len(rows))] for render in renderers))


def preview_prompt(
    prompt: Prompt,
    dataset: Dataset,
    split: str | None = None,
    number: int | None = None,
    resolved: ResolvedEncoder | None = None,
) -> dict[str, Any]:
    """Return a row, and under ``inputs`` its conditional inputs and those that are subtracted.

    Args:
        prompt: the prompt.
        dataset: the rows.
        split: split of the row. Default: train, or another split of the same file that has the row.
        number: the row's number in its file; the first row by default.
        resolved: the encoder whose tokenizer is loaded. None: the inputs have no tokens.

    Raises:
        UserError: there is no such split or row, or the encoder does not accept the template or
            the texts.
    """
    obstacle = prompt.obstacle(resolved.identity) if resolved else ""
    if resolved and obstacle:
        raise UserError(
            f"the prompt {prompt.name} does not work with {resolved.checkpoint.name}: {obstacle}. "
            "Name another prompt or --model."
        )
    split, position = _find_row(dataset, split, number)
    rows = dataset.splits[split]
    condition = input_conditions(rows, prompt)[position]
    items = _list_row_inputs(prompt, rows, position)
    encoder: dict[str, Any] | None = None
    token_facts: list[dict[str, Any]] = [{}] * len(items)
    if resolved:
        settings = {name: getattr(resolved.identity, name) for name in READ}
        encoder = {"name": resolved.checkpoint.name, **settings}
        token_facts = _tokenize_items([item for _, _, item in items], resolved)
    return {
        "prompt": prompt.name,
        "description": prompt.description,
        "control": prompt.control,
        "digest": prompt.digest,
        "data": dataset.source,
        "split": split,
        "file": rows.file,
        "row": int(rows.number[position]),
        **{name: texts[position] for name, texts in rows.texts.items()},
        "given_condition": condition,
        "encoder": encoder,
        "inputs": [
            {
                "part": part,
                "sentence": sentence,
                "instruction": item.instruction,
                "context": item.context,
                "router": None if item.router is None else asdict(item.router),
                "text": item.text,
                **tokens,
            }
            for (part, sentence, item), tokens in zip(items, token_facts, strict=True)
        ],
    }


def _find_row(dataset: Dataset, split: str | None, number: int | None) -> tuple[str, int]:
    """Return the split of a row, and its position in that split."""
    if split is not None and split not in dataset.splits:
        raise UserError(
            f"{dataset.source} has no {split} split; it has {', '.join(dataset.splits)}."
        )
    rows = dataset.splits[split or "train"]
    if number is None:
        return split or "train", 0
    # If a single file was divided into splits, rows keep their numbers in the file.
    same_file = {name: part for name, part in dataset.splits.items() if part.file == rows.file}
    positions = {name: np.flatnonzero(part.number == number) for name, part in same_file.items()}
    splits_with_row = [name for name, matches in positions.items() if len(matches)]
    split_name = split or (splits_with_row[0] if splits_with_row else "train")
    if split_name not in splits_with_row:
        hints = [f" It is in {name}: --split {name}." for name in splits_with_row[:1]]
        raise UserError(
            f"there is no row {number} in the {split_name} split of {rows.file}, whose "
            f"{len(rows):,} rows are numbered {rows.number.min()} to {rows.number.max()}."
            f"{''.join(hints)}"
        )
    return split_name, int(positions[split_name][0])


def _list_row_inputs(
    prompt: Prompt, rows: Rows, position: int
) -> list[tuple[str, int | None, EncoderInput]]:
    """List the inputs of a row: the template's part, the number of the sentence, and the input.

    The number is None for the condition alone.
    """
    renderers = _renderers(rows, prompt)
    items: list[tuple[str, int | None, EncoderInput]] = [
        ("conditional" if conditioned else "plain", number, conditional(position))
        for number, (conditioned, (conditional, _)) in enumerate(
            zip(rows.conditioned, renderers, strict=True), 1
        )
    ]
    if not prompt.subtractable:
        return items
    if prompt.subtracts_condition:
        return [*items, ("unconditional", None, renderers[0][1](position))]
    for number, (_, unconditional) in enumerate(renderers, 1):
        if rows.conditioned[number - 1]:
            items.append(("unconditional", number, unconditional(position)))
    return items


def _tokenize_items(
    items: Sequence[EncoderInput], resolved: ResolvedEncoder
) -> list[dict[str, Any]]:
    """Return the tokens of inputs, which of them are pooled, and which were cut."""
    # Importing tokenizers takes a second, and is not needed to show texts alone.
    from llmcond.encoders.inspect import tokenize_inputs

    labelled = [("", item) for item in items]
    samples_read = tokenize_inputs(resolved, labelled)
    unlimited = replace(resolved.identity, max_length=sys.maxsize)
    untruncated = tokenize_inputs(replace(resolved, identity=unlimited), labelled)
    return [
        {
            "tokens": sample.tokens,
            "pooled": sample.pooled,
            "n_tokens": len(uncut.tokens),
            "cut": _find_cut_tokens(uncut.tokens, sample.tokens),
        }
        for sample, uncut in zip(samples_read, untruncated, strict=True)
    ]


def _find_cut_tokens(tokens: Sequence[str], remaining: Sequence[str]) -> list[str]:
    """Return the tokens that are not among the remaining ones, which are in the same order."""
    unread = deque(remaining)
    missing = []
    for token in tokens:
        if unread and unread[0] == token:
            unread.popleft()
        else:
            missing.append(token)
    return missing
