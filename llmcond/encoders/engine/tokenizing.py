"""From inputs to token ids, with the special tokens a model was trained with and what it pools.

Special tokens are put around an input here, not by the tokenizer: it is then the same for every
version of transformers, and truncation never cuts them off. Neither does it cut a condition or an
instruction: tokens are taken out of the sentence, wherever that stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from llmcond.encoders.poolings import pooling_named
from llmcond.encoders.settings import TOKENIZER_DECIDES, EncoderIdentity
from llmcond.encoders.spec import EncoderInput, InputError, Span
from llmcond.errors import UserError, first_line


@dataclass(frozen=True, slots=True)
class Tokens:
    """One input as the encoder is given it, or a window of it.

    Attributes:
        ids: special ones included, at most as many as the encoder takes.
        first, last: the pooled tokens are ``ids[first:last]``.
        n_tokens: how many there were before truncation.
        second: where the second half of a tokenizer pair begins, for models that tell the halves
            apart by token type; ``len(ids)`` where there is none.
    """

    ids: list[int]
    first: int
    last: int
    n_tokens: int
    second: int


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens around one text, or around the two halves of a pair.

    Attributes:
        before, between, after: token ids.
        typed: whether the halves of the pair differ by token type.
    """

    before: list[int]
    between: list[int]
    after: list[int]
    typed: bool = False

    @property
    def size(self) -> int:
        """Return its number of tokens."""
        return len(self.before) + len(self.between) + len(self.after)


@dataclass(frozen=True, slots=True)
class _Around:
    """A text in its model's format: what stands before and behind it, and where the instruction."""

    before: str
    text: str
    after: str
    instruction: int = 0

    def __str__(self) -> str:
        return f"{self.before}{self.text}{self.after}"


class InputTokenizer:
    """Tokenises inputs for one encoder.

    Attributes:
        pad_id: what batches are filled up with; masked, so its value never matters.
    """

    def __init__(self, tokenizer: Any, identity: EncoderIdentity, name: str) -> None:
        """Find out which special tokens stand around an input.

        Raises:
            UserError: the tokenizer lacks one that the model needs, or tells no text apart.
        """
        self._tokenizer, self._identity, self._name = tokenizer, identity, name
        pad = tokenizer.pad_token_id
        self.pad_id = int(pad if pad is not None else tokenizer.eos_token_id or 0)
        self._decides = identity.special_tokens == TOKENIZER_DECIDES
        self._single = self._own_frame(1) if self._decides else self._stated_frame()
        self._left = tokenizer.truncation_side == "left"
        self._pair: Frame | None = None

    def __call__(self, inputs: Sequence[EncoderInput]) -> list[Tokens]:
        """Return each input's tokens, of its first window only; raises as :meth:`windows`."""
        return [found[0] for found in self.windows(inputs)]

    def windows(self, inputs: Sequence[EncoderInput]) -> list[list[Tokens]]:
        """Return the tokens of each input, or of its windows if it is too long for one.

        :func:`check_inputs` has found the inputs right.

        Raises:
            UserError: an instruction or a context that the encoder cannot take, one that leaves no
                token to pool, or an input that is too long even without its sentence.
        """
        pairs = self._pairs([item for item in inputs if item.context is not None])
        plain = self._plain([item for item in inputs if item.context is None])
        found = [next(plain if item.context is None else pairs) for item in inputs]
        for item, own in zip(inputs, found, strict=True):
            if any(tokens.first >= tokens.last for tokens in own):
                raise UserError(
                    f"the text {item.text[:80]!r} has no tokens, so there is nothing to pool."
                )
        return found

    def joined(self, rows: Sequence[tuple[str, str, str]]) -> list[Tokens]:
        """Return two sentences and a condition as one sequence, a separator between any two.

        As the cross-encoder of C-STS has them, with the special tokens of a single text around. In
        a row that is too long the condition is whole, and the sentences share the room that is
        left: each has half of it, and what the other one does not need.

        Raises:
            UserError: no separator, or a condition that leaves no room for the sentences.
        """
        ids = self._ids([text for row in rows for text in row])
        return [self._join(row[2], *ids[3 * i : 3 * i + 3]) for i, row in enumerate(rows)]

    def strings(self, tokens: Tokens) -> list[str]:
        """Return the tokens as the tokenizer writes them."""
        return [str(text) for text in self._tokenizer.convert_ids_to_tokens(tokens.ids)]

    def format(self, item: EncoderInput) -> str:
        """Return the string of a plain input; see ``Encoder.format``."""
        return str(self._around(item))

    # -- plain inputs --------------------------------------------------------------------------

    def _around(self, item: EncoderInput) -> _Around:
        if not item.instruction:
            return _Around("", item.text, "")
        template = self._identity.instruction_format
        if not template:
            raise UserError(
                f"{self._name} takes no instruction, and got {item.instruction!r}. Use a prompt "
                "without one (concat-sent-cond), or give --instruction-format."
            )
        sides, side, at = ["", ""], 0, 0
        for literal, name, _, _ in Formatter().parse(template):
            sides[side] += literal
            if name == "instruction":
                at = len(sides[0]) + side * (len(item.text) + len(sides[1]))
                sides[side] += item.instruction
            side += name == "text"
        return _Around(sides[0], item.text, sides[1], at)

    def _plain(self, inputs: Sequence[EncoderInput]) -> Iterator[list[Tokens]]:
        parts = [self._around(item) for item in inputs]
        over, frame = self._identity.pool_over, self._single
        if over == "text" and not self._tokenizer.is_fast:
            raise UserError(
                f"pool_over is 'text', which needs a fast tokenizer, and that of {self._name} "
                "is not."
            )
        encoded = self._raw([str(part) for part in parts], offsets=over == "text")
        counts = {"": 0}
        if over == "after-instruction":
            # Each by itself, without special tokens.
            distinct = sorted({part.before for part in parts} - {""})
            counts |= zip(distinct, map(len, self._ids(distinct)), strict=True)
        room = self._identity.max_length - frame.size
        for index, (item, part) in enumerate(zip(inputs, parts, strict=True)):
            content = encoded["input_ids"][index]
            n_tokens = frame.size + len(content)
            found = []
            places: Sequence[Sequence[int]] = [range(len(content))]
            if len(content) > room:
                places = self._kept(self._sentence(item, part), len(content), room, item)
            for kept in places:
                # A tokenizer that adds no special tokens gives nothing for an empty text.
                own = [content[at] for at in kept]
                ids = [*frame.before, *own, *frame.after] or [self.pad_id]
                first, last = 0, len(ids)
                if over == "after-instruction":
                    count = counts[part.before]
                    gone = set(range(min(count, len(content)))).difference(kept)
                    first = count - len(gone)
                elif over == "text":
                    offsets = encoded["offset_mapping"][index]
                    # Those that hold a character of the text.
                    begin, end = len(part.before), len(part.before) + len(part.text)
                    held = enumerate((offsets[at] for at in kept), len(frame.before))
                    inside = [at for at, (start, stop) in held if stop > begin and start < end]
                    first, last = (inside[0], inside[-1] + 1) if inside else (0, 0)
                found.append(Tokens(ids, first, last, n_tokens, len(ids)))
            yield found

    def _sentence(self, item: EncoderInput, part: _Around) -> list[list[int]]:
        text, starts = len(part.before), {"instruction": part.instruction}
        spans: Sequence[Span] = item.sentence or ()
        if item.sentence is None:
            spans = [("text", 0, len(item.text))]
        firsts = [starts.get(name, text) for name, _, _ in spans]
        within = [(at + span[1], at + span[2]) for at, span in zip(firsts, spans, strict=True)]
        return self._inside(str(part), within)

    # -- pairs ---------------------------------------------------------------------------------

    def _pairs(self, inputs: Sequence[EncoderInput]) -> Iterator[list[Tokens]]:
        if not inputs:
            return
        self._check_pairs(inputs)
        if self._pair is None and any(item.context for item in inputs):
            self._pair = self._own_frame(2)
        frame = self._pair or self._single
        contexts = self._ids([item.context or "" for item in inputs])
        texts = self._ids([item.text for item in inputs])
        for item, context, text in zip(inputs, contexts, texts, strict=True):
            around = frame if item.context else self._single
            room = self._identity.max_length - around.size
            size, n_tokens = len(context), len(context) + len(text)
            places: Sequence[Sequence[int]] = [range(n_tokens)]
            if n_tokens > room:
                places = self._kept(
                    self._pair_sentence(item, size, len(text)), n_tokens, room, item
                )
            found = []
            for kept in places:
                head = [*around.before, *(context[at] for at in kept if at < size), *around.between]
                own = [text[at - size] for at in kept if at >= size]
                ids, first = [*head, *own, *around.after], len(head)
                second = first if around.typed else len(ids)
                n_all = around.size + n_tokens
                found.append(Tokens(ids, first, first + len(own), n_all, second))
            yield found

    def _pair_sentence(self, item: EncoderInput, n_context: int, n_text: int) -> list[list[int]]:
        context, text = range(n_context), range(n_context, n_context + n_text)
        if item.sentence is None:
            # What the vector is of goes last.
            return [[*context, *text] if self._left else [*text, *context]]
        texts, found = {"context": (item.context or "", 0), "text": (item.text, n_context)}, []
        for name, start, stop in item.sentence:
            own, first = texts[name]
            found += [[first + at for at in part] for part in self._inside(own, [(start, stop)])]
        return found

    def _check_pairs(self, inputs: Sequence[EncoderInput]) -> None:
        pooling = self._identity.pooling
        if not self._decides:
            raise UserError(
                f"{self._name} reads one text between {self._identity.special_tokens!r}, not a "
                "pair of context and text. Use a prompt with an instruction (cond), or one that "
                "joins both."
            )
        if not pooling_named(pooling).counts:
            raise UserError(
                f"{self._name} pools by {pooling}, and an input with a context is pooled over its "
                "text's own tokens. Choose --pooling mean, or a prompt without a context."
            )
        for item in inputs:
            if item.instruction:
                raise UserError(
                    f"an input has both an instruction ({item.instruction!r}) and a context "
                    f"({item.context!r}); give one of them."
                )

    # -- several texts in one sequence ---------------------------------------------------------

    def _join(self, text: str, first: list[int], second: list[int], condition: list[int]) -> Tokens:
        between, frame = self._separator(), self._single
        fixed = frame.size + 2 * len(between) + len(condition)
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
            # The same in either order of the sentences.
            short = min(len(first), len(second), half)
            most = room - short if short < half else half
            kept = slice(-most, None) if self._left else slice(most)
            first, second = first[kept], second[kept]
        own = [*first, *between, *second, *between, *condition]
        ids = [*frame.before, *own, *frame.after]
        begin, end = 0, len(ids)
        if self._identity.pool_over == "text":
            begin, end = len(frame.before), len(frame.before) + len(own)
        return Tokens(ids, begin, end, n_tokens, len(ids))

    def _separator(self) -> list[int]:
        found = self._tokenizer.sep_token_id
        found = self._tokenizer.eos_token_id if found is None else found
        if found is None:
            raise UserError(
                f"the tokenizer of {self._name} has neither a separator nor an end token, so that "
                "two texts in one sequence cannot be told apart. Train another encoder."
            )
        return [int(found)]

    # -- what both share -----------------------------------------------------------------------

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._raw(texts)["input_ids"]
        return ids

    def _raw(self, texts: Sequence[str], *, offsets: bool = False) -> Any:
        if not texts:
            return {"input_ids": []}
        options = {"return_offsets_mapping": True} if offsets else {}
        try:
            return self._tokenizer(
                list(texts), add_special_tokens=False, truncation=False, verbose=False, **options
            )
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises no other of its own
                raise
            raise UserError(
                f"the tokenizer of {self._name} cannot read a text: {first_line(error)}. Is it the "
                "model's own?"
            ) from error

    def _inside(self, text: str, spans: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return, for each part of a text, the places of the tokens that are of that part only."""
        if self._tokenizer.is_fast:
            offsets = self._raw([text], offsets=True)["offset_mapping"][0]
            return [
                [at for at, (begin, end) in enumerate(offsets) if start <= begin and end <= stop]
                for start, stop in spans
            ]
        size = len(self._ids([text])[0])
        counts = [list(map(len, self._ids([text[:start], text[stop:]]))) for start, stop in spans]
        return [list(range(before, size - behind)) for before, behind in counts]

    def _kept(
        self, sentence: Sequence[list[int]], n: int, room: int, item: EncoderInput
    ) -> list[list[int]]:
        """Return which of n tokens are kept, for each window: those around the sentence in all.

        ``sentence`` has the places of the sentence's tokens, for each time that it is there.
        """
        sentence = [places for places in sentence if places]
        fixed = set(range(n)).difference(*sentence)
        each = (room - len(fixed)) // max(1, len(sentence))
        if not sentence or each < 1:
            raise InputError(
                item,
                f"an input is too long without its sentence: {item.text[:80]!r} with its "
                f"instruction or context has {n - room + self._identity.max_length:,} tokens, of "
                f"which {sum(map(len, sentence)):,} may be cut, and {self._name} takes "
                f"{self._identity.max_length}. Shorten the rest of it, or encode with a larger "
                "max_length (llmcond extract --max-length).",
            )
        windows = 1
        if self._identity.long_texts == "windows":
            windows = max(math.ceil(len(places) / each) for places in sentence)

        def part(places: list[int], window: int) -> list[int]:
            if windows > 1:  # of equal size
                size = len(places)
                return places[size * window // windows : size * (window + 1) // windows]
            return places[-each:] if self._left else places[:each]

        return [
            sorted(fixed.union(*(part(places, window) for places in sentence)))
            for window in range(windows)
        ]

    # -- special tokens ------------------------------------------------------------------------

    def _stated_frame(self) -> Frame:
        tokenizer, sides = self._tokenizer, []
        first, _, last = self._identity.special_tokens.partition("{text}")
        for token in (first.strip(), last.strip()):
            found: Any = tokenizer.convert_tokens_to_ids(token) if token else None
            if token and found in (None, tokenizer.unk_token_id) and token != tokenizer.unk_token:
                raise UserError(
                    f"{self._name} needs the token {token} (special tokens "
                    f"{self._identity.special_tokens!r}), and its tokenizer has none. Is this its "
                    "own tokenizer?"
                )
            sides.append([int(found)] if token else [])
        return Frame(sides[0], [], sides[1])

    def _own_frame(self, n_texts: int) -> Frame:
        """Return what the tokenizer itself puts around a text or a pair, found on short ones."""
        probes = ("a", "1", "б", "文")
        bare_ids = zip(probes, self._ids(probes), strict=True)
        text, bare = next((pair for pair in bare_ids if pair[1]), ("", []))
        if not bare:
            raise UserError(
                f"the tokenizer of {self._name} gives no tokens for texts as plain as {probes}. Is "
                "it the model's own?"
            )
        encoded = self._tokenizer(*[text] * n_texts, verbose=False)
        parts, rest = [], encoded["input_ids"]
        for _ in range(n_texts):
            starts = range(len(rest) - len(bare) + 1)
            start = next((i for i in starts if rest[i : i + len(bare)] == bare), None)
            if start is None:
                raise UserError(
                    f"the tokenizer of {self._name} changes a text's tokens where it adds special "
                    "ones, which is not supported; state those with --special-tokens."
                )
            parts.append(rest[:start])
            rest = rest[start + len(bare) :]
        typed = n_texts > 1 and any(encoded.get("token_type_ids", ()))
        return Frame(parts[0], parts[1] if n_texts > 1 else [], rest, typed)


def check_inputs(inputs: Sequence[EncoderInput]) -> None:
    """Raise a UserError for what is no input, which would fail somewhere in a tokenizer."""
    if isinstance(inputs, str | EncoderInput):
        raise UserError(f"one {type(inputs).__name__} was given; give a list of EncoderInput.")
    for position, item in enumerate(inputs):
        if not isinstance(item, EncoderInput):
            raise UserError(f"position {position} holds {item!r}, not an EncoderInput.")
        texts = {"instruction": item.instruction, "text": item.text, "context": item.context or ""}
        texts["router"] = item.router.text if item.router else ""
        for name, text in texts.items():
            if not isinstance(text, str):
                raise UserError(f"the {name} at position {position} is {text!r}, not a text.")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"the {name} at position {position} is no Unicode text: {error}."
                ) from error
