"""Tokenising inputs, and the interface of engines, which turn tokens into vectors.

This module, not the tokenizer, adds the special tokens around an input. The result is then the same
for all versions of transformers, and truncation never removes them. Truncation does not remove
tokens of a condition or an instruction either: it only cuts the sentence, wherever in the input the
sentence is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from string import Formatter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcond.base.errors import LlmcondError, UserError, first_line, shortened_repr
from llmcond.base.text import check_string
from llmcond.encoders.settings import TOKENIZER_DECIDES, EncoderIdentity
from llmcond.encoders.spec import EncoderInput, InputError, Router, Span, get_pooling


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one input, or of a window of it, as the encoder reads them.

    Attributes:
        ids: Token ids including special tokens, at most the encoder's max_length.
        first: Index of the first pooled token.
        last: Index behind the last pooled token.
        n_tokens: Number of tokens before truncation.
        second: Index of the first token of the second half of a tokenizer pair, for models that
            distinguish the halves by token type; ``len(ids)`` if there is no second half.
    """

    ids: list[int]
    first: int
    last: int
    n_tokens: int
    second: int

    @property
    def cut(self) -> bool:
        """Whether tokens are missing."""
        return self.n_tokens > len(self.ids)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an input, as a text.

    Attributes:
        text: The token as the tokenizer's vocabulary has it, such as ``##ing``.
        start: Position of its first character in the sentence. None for special tokens, for tokens
            of the prompt's other texts, and if the tokenizer does not report positions.
        end: Position after its last character in the sentence, or None like ``start``.
        special: Whether it is a special token that the model needs around its inputs.
    """

    text: str
    start: int | None
    end: int | None
    special: bool


@dataclass(frozen=True, slots=True)
class _SpecialTokens:
    """The special tokens around one text, or around the two halves of a pair.

    Attributes:
        before: Token ids before the text.
        between: Token ids between the halves of a pair.
        after: Token ids after the text.
        typed: Whether the halves of the pair differ by token type.
    """

    before: list[int]
    between: list[int]
    after: list[int]
    typed: bool = False

    @property
    def size(self) -> int:
        """Number of special tokens."""
        return len(self.before) + len(self.between) + len(self.after)


@dataclass(frozen=True, slots=True)
class FormattedText:
    """A text in its model's format.

    Attributes:
        before: What precedes the text, for example an instruction.
        text: The text.
        after: What follows the text.
        instruction: Index of the instruction's first character in the whole string.
    """

    before: str
    text: str
    after: str
    instruction: int = 0

    def __str__(self) -> str:
        return f"{self.before}{self.text}{self.after}"


def format_text(item: EncoderInput, template: str, name: str) -> FormattedText:
    """Apply a model's instruction format, ``template``, to a plain input.

    Raises:
        UserError: The input has an instruction, and the model has no format for it.
    """
    if not item.instruction:
        return FormattedText("", item.text, "")
    if not template:
        raise UserError(
            f"{name} takes no instruction, but the input has {item.instruction!r}. Use a prompt "
            "without an instruction (concat-sent-cond), or set --instruction-format."
        )
    sides, side, start = ["", ""], 0, 0
    for literal, field_name, _, _ in Formatter().parse(template):
        sides[side] += literal
        if field_name == "instruction":
            start = len(sides[0]) + side * (len(item.text) + len(sides[1]))
            sides[side] += item.instruction
        side += field_name == "text"
    return FormattedText(sides[0], item.text, sides[1], start)


def sentence_spans(item: EncoderInput, formatted: FormattedText) -> list[tuple[int, int]]:
    """Return the characters of each occurrence of the sentence in a plain input's string."""
    text, starts = len(formatted.before), {"instruction": formatted.instruction}
    spans: Sequence[Span] = item.sentence or ()
    if item.sentence is None:
        spans = [("text", 0, len(item.text))]
    firsts = [starts.get(name, text) for name, _, _ in spans]
    return [(first + span[1], first + span[2]) for first, span in zip(firsts, spans, strict=True)]


class InputTokenizer:
    """Tokenises inputs for one encoder.

    Attributes:
        pad_id: Token id for padding. Padding is masked, so its value never matters.
    """

    def __init__(self, tokenizer: Any, identity: EncoderIdentity, name: str) -> None:
        """Find out which special tokens an input needs.

        Args:
            tokenizer: The model's tokenizer, from transformers or a ``JsonTokenizer``.
            identity: The encoder's settings.
            name: The encoder's name in error messages.

        Raises:
            UserError: If the tokenizer lacks a special token that the model needs, or produces no
                tokens for simple texts.
        """
        self._tokenizer, self._identity, self._name = tokenizer, identity, name
        pad = tokenizer.pad_token_id
        self.pad_id = int(pad if pad is not None else tokenizer.eos_token_id or 0)
        self._tokenizer_decides = identity.special_tokens == TOKENIZER_DECIDES
        self._single = (
            self._detect_special_tokens(1)
            if self._tokenizer_decides
            else self._parse_special_tokens()
        )
        self._left = tokenizer.truncation_side == "left"
        self._pair: _SpecialTokens | None = None

    def __call__(self, inputs: Sequence[EncoderInput]) -> list[Tokens]:
        """Return the tokens of each input, or of its first window if it is too long for one.

        Raises:
            UserError: As in ``windows``.
        """
        return [windows[0] for windows in self.windows(inputs)]

    def windows(self, inputs: Sequence[EncoderInput]) -> list[list[Tokens]]:
        """Return the tokens of each input, or of its windows if it is too long for one.

        The inputs must have passed ``check_inputs``.

        Raises:
            UserError: If the encoder does not support an instruction or a context, if an input has
                no tokens to pool, or if an input is too long even without its sentence.
        """
        pairs = self._tokenize_pairs([item for item in inputs if item.context is not None])
        plain = self._tokenize_plain([item for item in inputs if item.context is None])
        windows = [next(plain if item.context is None else pairs) for item in inputs]
        for item, item_windows in zip(inputs, windows, strict=True):
            if any(tokens.first >= tokens.last for tokens in item_windows):
                raise UserError(
                    f"the text {item.text[:80]!r} has no tokens, so there is nothing to pool."
                )
        return windows

    def join_rows(self, rows: Sequence[tuple[str, str, str]]) -> list[Tokens]:
        """Join two sentences and a condition to one sequence, with separators between the three.

        This is the input of the cross-encoder of C-STS, within the special tokens of a single text.
        If a row is too long, its condition stays whole, and the sentences share the remaining
        tokens. Each sentence gets half of them, plus those that the other does not need.

        Raises:
            UserError: If the tokenizer has no separator, or a condition leaves no room for the
                sentences.
        """
        ids = self._token_ids([text for row in rows for text in row])
        return [self._join_row(row[2], *ids[3 * i : 3 * i + 3]) for i, row in enumerate(rows)]

    def strings(self, tokens: Tokens) -> list[str]:
        """Return the tokens as strings of the tokenizer's vocabulary."""
        return [str(text) for text in self._tokenizer.convert_ids_to_tokens(tokens.ids)]

    def describe(self, item: EncoderInput, tokens: Tokens) -> list[Token]:
        """Return the tokens of an input as texts, with their positions in its sentence.

        Args:
            item: The input.
            tokens: The tokens of the input's first window, to which a router may have added others
                at both ends.
        """
        (original,), surrounding = self([item]), [self._single, *filter(None, [self._pair])]
        special = {i for part in surrounding for i in (*part.before, *part.between, *part.after)}
        # A router can repeat a special token in front of the input.
        shift = tokens.ids.index(original.ids[0])
        pairs = zip(original.ids, self._find_characters(item), strict=False)
        characters = dict(enumerate(pairs, shift))
        described = []
        for position, (token_id, text) in enumerate(
            zip(tokens.ids, self.strings(tokens), strict=True)
        ):
            original_id, span = characters.get(position, (None, None))
            start, end = span if span and original_id == token_id else (None, None)
            described.append(Token(text, start, end, start is None and token_id in special))
        return described

    def _find_characters(self, item: EncoderInput) -> list[tuple[int, int] | None]:
        """Return the positions in the sentence of the tokens of a plain input's first window.

        A token outside the sentence has None. The result is empty for pairs, and for slow
        tokenizers, which do not report positions.
        """
        if item.context is not None or not self._tokenizer.is_fast:
            return []
        formatted, special = self._format_text(item), self._single
        string, sentence = str(formatted), sentence_spans(item, formatted)
        offsets = self._call_tokenizer([string], offsets=True)["offset_mapping"][0]
        room = self._identity.max_length - special.size
        selection = self._select_tokens(
            lambda: self._find_tokens(string, sentence), len(offsets), room, item
        )[0]
        characters: list[tuple[int, int] | None] = []
        for begin, end in (offsets[position] for position in selection):
            # Some tokenizers count the space before a word as a part of its token.
            first = end - len(string[begin:end].lstrip())
            starts = [start for start, stop in sentence if start <= first < end <= stop]
            characters.append((first - starts[0], end - starts[0]) if starts else None)
        return [*[None] * len(special.before), *characters, *[None] * len(special.after)]

    def format(self, item: EncoderInput) -> str:
        """Return the string of a plain input; see ``Encoder.format``."""
        return str(self._format_text(item))

    # -- plain inputs --------------------------------------------------------------------------

    def _format_text(self, item: EncoderInput) -> FormattedText:
        return format_text(item, self._identity.instruction_format, self._name)

    def _tokenize_plain(self, inputs: Sequence[EncoderInput]) -> Iterator[list[Tokens]]:
        """Yield the windows of each input without a context."""
        texts = [self._format_text(item) for item in inputs]
        over, special = self._identity.pool_over, self._single
        if over == "text" and not self._tokenizer.is_fast:
            raise UserError(
                f"pool_over is 'text', which needs a fast tokenizer, but that of {self._name} "
                "is a slow one."
            )
        encoded = self._call_tokenizer(
            [str(formatted) for formatted in texts], offsets=over == "text"
        )
        counts = {"": 0}
        if over == "after-instruction":
            # Each prefix is tokenised separately, without special tokens.
            distinct = sorted({formatted.before for formatted in texts} - {""})
            counts |= zip(distinct, map(len, self._token_ids(distinct)), strict=True)
        room = self._identity.max_length - special.size
        for index, (item, formatted) in enumerate(zip(inputs, texts, strict=True)):
            content = encoded["input_ids"][index]
            n_tokens = special.size + len(content)
            windows = []
            find = partial(self._find_sentence, item, formatted)
            for selection in self._select_tokens(find, len(content), room, item):
                # Without special tokens, an empty text would have no token at all.
                selected_ids = [content[position] for position in selection]
                ids = [*special.before, *selected_ids, *special.after] or [self.pad_id]
                first, last = 0, len(ids)
                if over == "after-instruction":
                    count = counts[formatted.before]
                    cut = set(range(min(count, len(content)))).difference(selection)
                    first = count - len(cut)
                elif over == "text":
                    offsets = encoded["offset_mapping"][index]
                    # The pooled tokens are those that contain a character of the text.
                    begin, end = len(formatted.before), len(formatted.before) + len(formatted.text)
                    selected_offsets = enumerate(
                        (offsets[position] for position in selection), len(special.before)
                    )
                    pooled = [
                        position
                        for position, (start, stop) in selected_offsets
                        if stop > begin and start < end
                    ]
                    first, last = (pooled[0], pooled[-1] + 1) if pooled else (0, 0)
                windows.append(Tokens(ids, first, last, n_tokens, len(ids)))
            yield windows

    def _find_sentence(self, item: EncoderInput, formatted: FormattedText) -> list[list[int]]:
        """Return the token positions of each occurrence of the sentence in a plain input."""
        return self._find_tokens(str(formatted), sentence_spans(item, formatted))

    # -- pairs ---------------------------------------------------------------------------------

    def _tokenize_pairs(self, inputs: Sequence[EncoderInput]) -> Iterator[list[Tokens]]:
        """Yield the windows of each input with a context."""
        if not inputs:
            return
        self._check_pairs(inputs)
        if self._pair is None and any(item.context for item in inputs):
            self._pair = self._detect_special_tokens(2)
        pair_special = self._pair or self._single
        contexts = self._token_ids([item.context or "" for item in inputs])
        texts = self._token_ids([item.text for item in inputs])
        for item, context, text in zip(inputs, contexts, texts, strict=True):
            special = pair_special if item.context else self._single
            room = self._identity.max_length - special.size
            size, n_tokens = len(context), len(context) + len(text)
            windows = []
            find = partial(self._find_sentence_of_pair, item, size, len(text))
            for selection in self._select_tokens(find, n_tokens, room, item):
                head = [
                    *special.before,
                    *(context[position] for position in selection if position < size),
                    *special.between,
                ]
                text_ids = [text[position - size] for position in selection if position >= size]
                ids, first = [*head, *text_ids, *special.after], len(head)
                second = first if special.typed else len(ids)
                n_all = special.size + n_tokens
                windows.append(Tokens(ids, first, first + len(text_ids), n_all, second))
            yield windows

    def _find_sentence_of_pair(
        self, item: EncoderInput, n_context: int, n_text: int
    ) -> list[list[int]]:
        """Return the token positions of each occurrence of the sentence in a pair."""
        context, text = range(n_context), range(n_context, n_context + n_text)
        if item.sentence is None:
            # Truncation cuts the context first, because the vector is pooled over the text.
            return [[*context, *text] if self._left else [*text, *context]]
        texts, positions = {"context": (item.context or "", 0), "text": (item.text, n_context)}, []
        for name, start, stop in item.sentence:
            string, first = texts[name]
            positions += [
                [first + position for position in part]
                for part in self._find_tokens(string, [(start, stop)])
            ]
        return positions

    def _check_pairs(self, inputs: Sequence[EncoderInput]) -> None:
        """Raise a UserError for inputs with a context that the encoder does not support."""
        pooling = self._identity.pooling
        if not self._tokenizer_decides:
            raise UserError(
                f"{self._name} reads one text between {self._identity.special_tokens!r}, not a "
                "pair of context and text. Use a prompt with an instruction (cond), or one that "
                "joins both."
            )
        if not get_pooling(pooling).supports_pool_over:
            raise UserError(
                f"{self._name} pools by {pooling}, but an input with a context is pooled over the "
                "tokens of its text only. Choose --pooling mean, or a prompt without a context."
            )
        for item in inputs:
            if item.instruction:
                raise UserError(
                    f"an input has both an instruction ({item.instruction!r}) and a context "
                    f"({item.context!r}); give one of them."
                )

    # -- several texts in one sequence ---------------------------------------------------------

    def _join_row(
        self, text: str, first: list[int], second: list[int], condition: list[int]
    ) -> Tokens:
        """Join the tokens of two sentences and of a condition, whose string is ``text``."""
        between, special = self._separator_ids(), self._single
        fixed = special.size + 2 * len(between) + len(condition)
        room, n_tokens = self._identity.max_length - fixed, fixed + len(first) + len(second)
        if n_tokens > self._identity.max_length:
            half = room // 2
            if half < 1:
                raise UserError(
                    f"the condition {text[:80]!r} has {len(condition):,} tokens, which leave no "
                    f"room for two sentences in the {self._identity.max_length} that {self._name} "
                    "takes. Shorten it, or train with a larger max_length (llmcond train-cross "
                    "--max-length)."
                )
            # The limits do not depend on the order of the sentences.
            short = min(len(first), len(second), half)
            most = room - short if short < half else half
            limit = slice(-most, None) if self._left else slice(most)
            first, second = first[limit], second[limit]
        content = [*first, *between, *second, *between, *condition]
        ids = [*special.before, *content, *special.after]
        begin, end = 0, len(ids)
        if self._identity.pool_over == "text":
            begin, end = len(special.before), len(special.before) + len(content)
        return Tokens(ids, begin, end, n_tokens, len(ids))

    def _separator_ids(self) -> list[int]:
        """Return the id of the separator, or of the end token if there is none, as a list."""
        separator = self._tokenizer.sep_token_id
        separator = self._tokenizer.eos_token_id if separator is None else separator
        if separator is None:
            raise UserError(
                f"the tokenizer of {self._name} has neither a separator nor an end token, which a "
                "cross-encoder needs between two texts. Train another encoder."
            )
        return [int(separator)]

    # -- helpers for plain inputs and pairs ----------------------------------------------------

    def _token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._call_tokenizer(texts)["input_ids"]
        return ids

    def _call_tokenizer(self, texts: Sequence[str], *, offsets: bool = False) -> Any:
        """Call the tokenizer without special tokens and truncation."""
        if not texts:
            return {"input_ids": []}
        options = {"return_offsets_mapping": True} if offsets else {}
        try:
            return self._tokenizer(
                list(texts), add_special_tokens=False, truncation=False, verbose=False, **options
            )
        except Exception as error:
            if type(error) is not Exception:  # the only type that tokenizers itself raises
                raise
            raise UserError(
                f"the tokenizer of {self._name} cannot read a text: {first_line(error)}. Check "
                "that the tokenizer is the one that the model was trained with."
            ) from error

    def _find_tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return the positions of the tokens that are inside each span of characters of a text."""
        if self._tokenizer.is_fast:
            offsets = self._call_tokenizer([text], offsets=True)["offset_mapping"][0]
            return [
                [
                    position
                    for position, (begin, end) in enumerate(offsets)
                    if start <= begin and end <= stop
                ]
                for start, stop in spans
            ]
        size = len(self._token_ids([text])[0])
        counts = [
            list(map(len, self._token_ids([text[:start], text[stop:]]))) for start, stop in spans
        ]
        return [list(range(before, size - behind)) for before, behind in counts]

    def _select_tokens(
        self, find_sentence: Callable[[], list[list[int]]], n: int, room: int, item: EncoderInput
    ) -> Sequence[Sequence[int]]:
        """Return the positions of the tokens of each window of an input with ``n`` tokens.

        All windows include the tokens outside the sentence. ``find_sentence`` returns the token
        positions of each occurrence of the sentence, and ``room`` is the most tokens of a window.

        Raises:
            InputError: If the tokens outside the sentence leave no room for it.
        """
        if n <= room:
            return [range(n)]
        sentence = [positions for positions in find_sentence() if positions]
        fixed = set(range(n)).difference(*sentence)
        each = (room - len(fixed)) // max(1, len(sentence))
        if not sentence or each < 1:
            raise InputError(
                item,
                f"an input is too long without its sentence: {item.text[:80]!r} with its "
                f"instruction or context has {n - room + self._identity.max_length:,} tokens, of "
                f"which {sum(map(len, sentence)):,} may be cut, but {self._name} takes at most "
                f"{self._identity.max_length}. Shorten the rest of the input, or encode with a "
                "larger max_length (llmcond extract --max-length).",
            )
        windows = 1
        if self._identity.long_texts == "windows":
            windows = max(math.ceil(len(positions) / each) for positions in sentence)

        def select(positions: list[int], window: int) -> list[int]:
            if windows > 1:  # windows have equal size
                size = len(positions)
                return positions[size * window // windows : size * (window + 1) // windows]
            return positions[-each:] if self._left else positions[:each]

        return [
            sorted(fixed.union(*(select(positions, window) for positions in sentence)))
            for window in range(windows)
        ]

    # -- special tokens ------------------------------------------------------------------------

    def _parse_special_tokens(self) -> _SpecialTokens:
        """Return the special tokens that the encoder's settings state."""
        tokenizer, sides = self._tokenizer, []
        first, _, last = self._identity.special_tokens.partition("{text}")
        for token in (first.strip(), last.strip()):
            token_id: Any = tokenizer.convert_tokens_to_ids(token) if token else None
            unknown = token_id in (None, tokenizer.unk_token_id)
            if token and unknown and token != tokenizer.unk_token:
                raise UserError(
                    f"{self._name} needs the token {token} (special tokens "
                    f"{self._identity.special_tokens!r}), but its tokenizer does not have it. "
                    "Check that the tokenizer is the one that the model was trained with."
                )
            sides.append([int(token_id)] if token else [])
        return _SpecialTokens(sides[0], [], sides[1])

    def _detect_special_tokens(self, n_texts: int) -> _SpecialTokens:
        """Find the special tokens that the tokenizer adds to a short text, or to a pair of them.

        Raises:
            UserError: If it has no tokens for short texts, or changes tokens next to special ones.
        """
        probes = ("a", "1", "б", "文")
        bare_ids = zip(probes, self._token_ids(probes), strict=True)
        text, bare = next((pair for pair in bare_ids if pair[1]), ("", []))
        if not bare:
            raise UserError(
                f"the tokenizer of {self._name} produces no tokens for the simple texts {probes}. "
                "Check that the tokenizer is the one that the model was trained with."
            )
        # Some tokenizers report token types on request only.
        encoded = self._tokenizer(*[text] * n_texts, verbose=False, return_token_type_ids=True)
        parts, rest = [], encoded["input_ids"]
        for _ in range(n_texts):
            starts = range(len(rest) - len(bare) + 1)
            start = next((i for i in starts if rest[i : i + len(bare)] == bare), None)
            if start is None:
                raise UserError(
                    f"the tokenizer of {self._name} changes the tokens of a text when it adds "
                    "special tokens, which is not supported. State the special tokens with "
                    "--special-tokens."
                )
            parts.append(rest[:start])
            rest = rest[start + len(bare) :]
        typed = n_texts > 1 and any(encoded.get("token_type_ids") or ())
        return _SpecialTokens(parts[0], parts[1] if n_texts > 1 else [], rest, typed)


def _check_parts(item: EncoderInput, position: int) -> None:
    """Raise a UserError if the router or the sentence of an input has another type."""
    if not isinstance(item.router, Router | None):
        raise UserError(
            f"the router at position {position} is {shortened_repr(item.router)}, not a Router."
        )
    spans = item.sentence
    if spans is not None and not (
        isinstance(spans, tuple | list)
        and all(isinstance(span, tuple | list) and len(span) == 3 for span in spans)
    ):
        raise UserError(
            f"the sentence at position {position} is {shortened_repr(spans)}; expected spans, such "
            "as ('text', 0, 12)."
        )


def check_inputs(inputs: Sequence[EncoderInput]) -> None:
    """Raise a UserError unless this is a list of inputs with valid texts.

    Without this check, invalid inputs would raise an obscure error in a tokenizer.
    """
    for position, item in enumerate(inputs):
        if not isinstance(item, EncoderInput):
            raise UserError(
                f"the input at position {position} is {shortened_repr(item)}, not a text or an "
                "EncoderInput."
            )
        _check_parts(item, position)
        texts = {"instruction": item.instruction, "text": item.text}
        texts["context"] = "" if item.context is None else item.context
        texts["router"] = item.router.text if item.router else ""
        for name, text in texts.items():
            if not isinstance(text, str):
                raise UserError(
                    f"the {name} at position {position} is {shortened_repr(text)}, not a text."
                )
            check_string(text, f"the {name} at position {position}")


class OutOfMemoryError(LlmcondError):
    """A single input, or a single training step, does not fit into memory."""


@dataclass(frozen=True, slots=True)
class BatchVectors:
    """The vectors of a batch.

    Attributes:
        inputs: Positions of the batch's inputs.
        vectors: One vector per input, (inputs, dim). Routed inputs have one vector per route, in
            the order of the inputs.
        n_computed: Number of tokens that went through the network, including padding.
    """

    inputs: Sequence[int]
    vectors: NDArray[np.float32]
    n_computed: int


@dataclass(frozen=True, slots=True)
class Routes:
    """Several routers that weight the tokens of one input, with the settings they share.

    Attributes:
        queries: The routers' vectors as they leave the encoder's pooling, (k, dim). This is a
            tensor, with gradients in training, or an array.
        router: One of the routers, for the settings that all of them share.
    """

    queries: Any
    router: Router


class AnyEngine(Protocol):
    """A loaded network that is run in batches.

    Attributes:
        dim: Size of the vectors.
        budget: Most tokens of one batch.
        routes_inside: Whether routers act inside the network, so that each router needs its own
            pass.
        reads_routers: Whether the network reads the router's text along with each input, so that
            routers have no query vector.
    """

    dim: int
    budget: int
    routes_inside: bool
    reads_routers: bool

    def run(
        self,
        rows: Sequence[Tokens],
        before_batch: Callable[[], None] = ...,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Iterator[BatchVectors]:
        """Yield the vectors of inputs, batch by batch; each input once.

        Args:
            rows: The inputs' tokens.
            before_batch: Called before each batch. An exception that it raises ends the work.
            routes: If given, what weights the tokens of each input: a ``Routes``, or the route that
                a router inside the network expects.
            queries: Whether to compute the vectors that the inputs have as routers of other inputs.
                These vectors leave the pooling without passing the dense layers, in the space of
                the tokens' states.

        Raises:
            UserError: If the network has no embedding of a token.
            OutOfMemoryError: If a single input does not fit into memory.
        """
        ...

    def finish_states(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn states that left the pooling, (n, width), into vectors of inputs, (n, dim)."""
        ...


def n_routes(route: Any) -> int:
    """Return the number of vectors that an input with this route gets."""
    return len(route.queries) if isinstance(route, Routes) else 1


def check_token_ids(rows: Sequence[Tokens], n_ids: int, name: str) -> None:
    """Raise a UserError if the network of an encoder has no embedding of a token."""
    ids: set[int | None] = set(chain.from_iterable(row.ids for row in rows))
    for invalid in (token_id for token_id in ids if token_id is None or token_id >= n_ids):
        raise UserError(
            f"the tokenizer of {name} produces the token id {invalid}, but its network only has "
            f"embeddings for the ids 0 to {n_ids - 1:,}. Use the tokenizer that the model was "
            "trained with: put it next to the model's weights."
        )


@dataclass(slots=True)
class WeightRecording:
    """The token weights of a pass of one input under one router.

    Attributes:
        weights: The weights of the tokens, one array per routed layer, or a single one from routed
            pooling; an array may also cover padding at its end.
        states: The states that routed pooling weights, (tokens, width); None inside the network.
        row: The tokens that the network reads, if the router changed them; None otherwise.
    """

    weights: list[NDArray[np.float32]] = field(default_factory=list)
    states: NDArray[np.float32] | None = None
    row: Tokens | None = None


_ACTIVE: ContextVar[WeightRecording | None] = ContextVar("token_weights", default=None)


@contextmanager
def recording_weights() -> Iterator[WeightRecording]:
    """Record the token weights of the pass of one input that this thread runs in the block."""
    recording = WeightRecording()
    token = _ACTIVE.set(recording)
    try:
        yield recording
    finally:
        _ACTIVE.reset(token)


def record_weights(weights: Any, states: Any = None) -> None:
    """Record the weights, (1, tokens), of a pass, if a recording is active.

    Args:
        weights: The weights, as a tensor or an array.
        states: With routed pooling, the states that are weighted, (tokens, width).
    """
    recording = _ACTIVE.get()
    if recording is not None:
        recording.weights.append(_copy(weights)[0])
        recording.states = None if states is None else _copy(states)


def record_row(rows: Sequence[Tokens]) -> None:
    """Record the tokens that the network reads if a router changed them, like the weights."""
    recording = _ACTIVE.get()
    if recording is not None:
        (recording.row,) = rows


def _copy(values: Any) -> NDArray[np.float32]:
    """Copy a tensor or an array, whose memory the engine may use again."""
    if not isinstance(values, np.ndarray):
        values = values.detach().float().cpu().numpy()
    return np.array(values, dtype=np.float32)


def strip_router(item: EncoderInput) -> tuple[EncoderInput, Router | None]:
    """Return an input without its router, and the router's settings without its text.

    Inputs for which these are the same go through the network once.
    """
    settings = None if item.router is None else replace(item.router, text="")
    return replace(item, router=None), settings


def group_routed_inputs(items: Sequence[EncoderInput]) -> list[list[int]]:
    """Group the positions of inputs with a router; in a group, only the routers' texts differ."""
    groups: dict[object, list[int]] = {}
    for position, item in enumerate(items):
        if item.router is not None:
            groups.setdefault(strip_router(item), []).append(position)
    return list(groups.values())


def list_routers(items: Sequence[EncoderInput]) -> list[Router]:
    """Return the routers of the inputs that have one."""
    return [item.router for item in items if item.router is not None]


def router_inputs(items: Sequence[EncoderInput]) -> dict[str, EncoderInput]:
    """Return the distinct texts of routers, each with the input that encodes it, in text order."""
    texts = sorted({router.text for router in list_routers(items)})
    return {text: EncoderInput("", text) for text in texts}


def network_inputs(items: Sequence[EncoderInput]) -> list[EncoderInput]:
    """Return what goes through the network if routers act after it: inputs, and routers' texts."""
    return [*(strip_router(item)[0] for item in items), *router_inputs(items).values()]


def make_routes(engine: AnyEngine, queries: Any, router: Router) -> list[Any]:
    """Return the routes of one input for several routers.

    This is a single ``Routes`` with all of them, or one route per router if routers act inside the
    network.

    Args:
        engine: The engine that will run the input.
        queries: The routers' vectors, (k, width), as an array or a tensor; a list if routers act
            inside the network.
        router: One of the routers, for their common settings.
    """
    if engine.routes_inside:
        return list(queries)
    return [Routes(queries, router)]
