"""From inputs to token ids, with the special tokens a model was trained with and what it pools.

Special tokens are put around an input here, not by the tokenizer: it is then the same for every
version of transformers, and truncation never cuts them off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from llmcond.encoders.spec import (
    TOKENIZER_DECIDES,
    EncoderIdentity,
    EncoderInput,
    pools_chosen_tokens,
)
from llmcond.errors import UserError


@dataclass(frozen=True, slots=True)
class Tokens:
    """One input as the encoder is given it.

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
        # Where the first tokens are counted, they must not be those that are cut.
        counted = identity.pool_over == "after-instruction"
        self._left = tokenizer.truncation_side == "left" and not counted
        self._pair: Frame | None = None

    def __call__(self, inputs: Sequence[EncoderInput]) -> list[Tokens]:
        """Return each input's tokens; :func:`check_inputs` has found the inputs right.

        Raises:
            UserError: an instruction or a context that the encoder cannot take, or one that leaves
                no token to pool.
        """
        pairs = self._pairs([item for item in inputs if item.context is not None])
        plain = self._plain([item for item in inputs if item.context is None])
        return [next(plain if item.context is None else pairs) for item in inputs]

    def strings(self, tokens: Tokens) -> list[str]:
        """Return the tokens as the tokenizer writes them."""
        return [str(text) for text in self._tokenizer.convert_ids_to_tokens(tokens.ids)]

    def format(self, item: EncoderInput) -> str:
        """Return the string of a plain input; see ``Encoder.format``."""
        return "".join(self._around(item))

    # -- plain inputs --------------------------------------------------------------------------

    def _around(self, item: EncoderInput) -> tuple[str, str, str]:
        """Return what stands before the text, the text, and what stands behind it."""
        if not item.instruction:
            return "", item.text, ""
        template = self._identity.instruction_format
        if not template:
            raise UserError(
                f"{self._name} takes no instruction, and got {item.instruction!r}. Use a prompt "
                "without one (concat-sent-cond), or give --instruction-format."
            )
        sides, side = ["", ""], 0
        for literal, name, _, _ in Formatter().parse(template):
            sides[side] += literal + (item.instruction if name == "instruction" else "")
            side += name == "text"
        return sides[0], item.text, sides[1]

    def _plain(self, inputs: Sequence[EncoderInput]) -> Iterator[Tokens]:
        parts = [self._around(item) for item in inputs]
        over, frame = self._identity.pool_over, self._single
        if over == "text" and not self._tokenizer.is_fast:
            raise UserError(
                f"pool_over is 'text', which needs a fast tokenizer, and that of {self._name} "
                "is not."
            )
        encoded = self._raw(["".join(part) for part in parts], offsets=over == "text")
        counts = {"": 0}
        if over == "after-instruction":
            # Each by itself, without special tokens.
            distinct = sorted({part[0] for part in parts} - {""})
            counts |= zip(distinct, map(len, self._ids(distinct)), strict=True)
        room = self._identity.max_length - frame.size
        for index, (item, part) in enumerate(zip(inputs, parts, strict=True)):
            content = encoded["input_ids"][index]
            kept = self._cut(content, room)
            # A tokenizer that adds no special tokens gives nothing for an empty text.
            ids = [*frame.before, *kept, *frame.after] or [self.pad_id]
            first, last = 0, len(ids)
            if over == "after-instruction":
                first = counts[part[0]]
                if len(kept) < len(content) and first >= len(ids) - len(frame.after):
                    # Nothing of the text is left; what stands behind it must not be taken for it.
                    last = first
            elif over == "text":
                offsets = self._cut(encoded["offset_mapping"][index], room)
                # Those that hold a character of the text.
                begin, end = len(part[0]), len(part[0]) + len(part[1])
                places = enumerate(offsets, len(frame.before))
                inside = [at for at, (start, stop) in places if stop > begin and start < end]
                first, last = (inside[0], inside[-1] + 1) if inside else (0, 0)
            yield self._checked(Tokens(ids, first, last, frame.size + len(content), len(ids)), item)

    # -- pairs ---------------------------------------------------------------------------------

    def _pairs(self, inputs: Sequence[EncoderInput]) -> Iterator[Tokens]:
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
            text_ids = self._cut(text, room)
            # The text is what the vector is of, so it is the context that is cut first.
            context_ids = self._cut(context, room - len(text_ids))
            head = [*around.before, *context_ids, *around.between]
            ids, first = [*head, *text_ids, *around.after], len(head)
            n_tokens = around.size + len(context) + len(text)
            second = first if around.typed else len(ids)
            yield self._checked(Tokens(ids, first, first + len(text_ids), n_tokens, second), item)

    def _check_pairs(self, inputs: Sequence[EncoderInput]) -> None:
        pooling = self._identity.pooling
        if not self._decides:
            raise UserError(
                f"{self._name} reads one text between {self._identity.special_tokens!r}, not a "
                "pair of context and text. Use a prompt with an instruction (cond), or one that "
                "joins both."
            )
        if not pools_chosen_tokens(pooling):
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

    # -- what both share -----------------------------------------------------------------------

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._raw(texts)["input_ids"]
        return ids

    def _raw(self, texts: Sequence[str], *, offsets: bool = False) -> Any:
        if not texts:
            return {"input_ids": []}
        options = {"return_offsets_mapping": True} if offsets else {}
        return self._tokenizer(
            list(texts), add_special_tokens=False, truncation=False, verbose=False, **options
        )

    def _cut(self, ids: list[Any], room: int) -> list[Any]:
        room = max(room, 0)
        if len(ids) <= room:
            return ids
        return ids[len(ids) - room :] if self._left else ids[:room]

    def _checked(self, tokens: Tokens, item: EncoderInput) -> Tokens:
        if tokens.first >= tokens.last:
            raise UserError(
                f"no token of the text {item.text[:80]!r} is left to pool: with its instruction or "
                f"context it has {tokens.n_tokens} tokens, and {self._name} takes "
                f"{self._identity.max_length}. Shorten those, or raise --max-length."
                if tokens.n_tokens > self._identity.max_length
                else f"the text {item.text[:80]!r} has no tokens, so there is nothing to pool."
            )
        return tokens

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
    """Refuse what is no input, which would fail somewhere in a tokenizer.

    Raises:
        UserError: naming what was got.
    """
    if isinstance(inputs, str | EncoderInput):
        raise UserError(f"one {type(inputs).__name__} was given; give a list of EncoderInput.")
    for position, item in enumerate(inputs):
        if not isinstance(item, EncoderInput):
            raise UserError(f"position {position} holds {item!r}, not an EncoderInput.")
        texts = {"instruction": item.instruction, "text": item.text, "context": item.context or ""}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise UserError(f"the {name} at position {position} is {text!r}, not a text.")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"the {name} at position {position} is no Unicode text: {error}."
                ) from error
