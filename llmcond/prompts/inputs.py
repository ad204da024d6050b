"""Rendering of rows with a prompt to inputs of an encoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

from llmcond.data.rows import Rows
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.files import digest_text
from llmcond.prompts.template import InputTemplate, Prompt

#: Seed with which each row gets another row's condition. It is fixed because prompts with the same
#: digest must give the same inputs.
_SEED = "0"
#: Number of conditions whose rendered inputs are cached.
_CONDITIONS = 4_096


class PromptInputs(Protocol):
    """All inputs of some data under a prompt, repeats included, rendered during iteration."""

    def __iter__(self) -> Iterator[EncoderInput]: ...

    def __len__(self) -> int: ...

    def locate(self, item: EncoderInput) -> str | None:
        """Describe the first row or text that needs an input, for messages; None if none does."""

    def check_distinct(self) -> None:
        """Raise a ``UserError`` if the prompt gives the same input for different conditions."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs of n rows, as columns: conditional and unconditional, for both sentences."""

    first: Sequence[EncoderInput]
    second: Sequence[EncoderInput]
    first_unconditional: Sequence[EncoderInput]
    second_unconditional: Sequence[EncoderInput]


class SplitInputs:
    """The ``PromptInputs`` of some rows."""

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
        """Raise a ``UserError`` if two rows with different conditions get the same inputs."""
        for rows, _ in self._splits:
            clash = find_same_inputs(rows, self._prompt)
            if clash is None:
                continue
            first, second = clash
            raise UserError(
                f"the prompt {self._prompt.name} gives the same input for {rows.describe(first)} "
                f"and {rows.describe(second)}, although their conditions differ "
                f"({rows.condition[first]!r} and {rows.condition[second]!r}). Put words or "
                "punctuation between {sentence} and {condition} in the template."
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


def find_same_inputs(rows: Rows, prompt: Prompt) -> tuple[int, int] | None:
    """Find two rows with different conditions for which a prompt gives the same inputs.

    No head can distinguish the conditions of such rows. Unconditional inputs are compared only if
    features are separate, where e(s) and e(c) together represent a row; otherwise they are
    ignored, because subtracting them is optional.

    Returns:
        The positions of the first two such rows; None if there are none, or if the prompt is a
        control.
    """
    if prompt.control is not None:
        return None
    inputs = render_rows(rows, prompt)
    columns = [inputs.first, inputs.second]
    if prompt.separate:
        columns.append(inputs.first_unconditional)
    seen: dict[tuple[bytes, ...], int] = {}
    for position, row in enumerate(zip(*columns, strict=True)):
        earlier = seen.setdefault(tuple(item.key for item in row), position)
        if rows.condition[earlier] != rows.condition[position]:
            return earlier, position
    return None
