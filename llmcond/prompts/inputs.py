"""From rows and a prompt to the inputs of an encoder."""

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
from llmcond.prompts.template import Part, Prompt

#: Of the draw that gives each row another row's condition. Another seed would give other inputs
#: under the same digest of the prompt.
_SEED = "0"
#: Whose inputs are kept, to be made once.
_CONDITIONS = 4_096


class PromptInputs(Protocol):
    """Every input of some data under a prompt, repeats included; made when it is asked for."""

    def __iter__(self) -> Iterator[EncoderInput]: ...

    def __len__(self) -> int: ...

    def where(self, item: EncoderInput) -> str | None:
        """Return what needs an input, for messages; None if nothing does."""

    def check_differ(self) -> None:
        """Raise a UserError if the prompt makes the same of different conditions."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs of rows, as columns: conditional and unconditional, for both sentences."""

    first: Sequence[EncoderInput]
    second: Sequence[EncoderInput]
    first_unconditional: Sequence[EncoderInput]
    second_unconditional: Sequence[EncoderInput]


class SplitInputs:
    """The :class:`PromptInputs` of some rows."""

    def __init__(self, splits: Iterable[Rows], prompt: Prompt) -> None:
        """Prepare rows, each split by itself.

        Raises:
            UserError: as :func:`given_conditions`, or a column that the template names is missing.
        """
        self._prompt = prompt
        self._splits = [(rows, _renderers(rows, prompt)) for rows in splits]

    def __iter__(self) -> Iterator[EncoderInput]:
        # Row by row, so that inputs which begin alike stand near each other.
        for rows, renderers in self._splits:
            for position in range(len(rows)):
                for conditional, unconditional in renderers:
                    yield conditional(position)
                    yield unconditional(position)

    def __len__(self) -> int:
        return 4 * sum(len(rows) for rows, _ in self._splits)

    def where(self, item: EncoderInput) -> str | None:
        """Return the first row that needs an input: ``row 17 of train.csv``."""
        for rows, renderers in self._splits:
            both = [render for pair in renderers for render in pair]
            for position in range(len(rows)):
                if any(render(position) == item for render in both):
                    return rows.describe(position)
        return None

    def check_differ(self) -> None:
        """Raise a UserError if two rows with different conditions get the same inputs."""
        for rows, _ in self._splits:
            found = same_inputs(rows, self._prompt)
            if found is None:
                continue
            first, second = found
            raise UserError(
                f"the prompt {self._prompt.name} makes the same input of {rows.describe(first)} "
                f"and {rows.describe(second)}, though their conditions differ "
                f"({rows.condition[first]!r} and {rows.condition[second]!r}), so that nothing can "
                "tell them apart. Put words or punctuation between {sentence} and {condition} in "
                "the template."
            )


_Render = Callable[[int], EncoderInput]


def _renderers(rows: Rows, prompt: Prompt) -> list[tuple[_Render, _Render]]:
    """Return, for each of both sentences, what renders a row's two inputs by its position."""
    missing = [name for name in prompt.fields if name not in rows.extra]
    if missing:
        raise UserError(
            f"the prompt {prompt.name} names the column {missing[0]!r}, which the rows of "
            f"{rows.file} were not read with. Extract it into a new --run."
        )
    conditions = given_conditions(rows, prompt)
    plain = prompt.plain or Part("{sentence}")

    def renderer(part: Part, texts: Sequence[str]) -> _Render:
        if not prompt.fields and "sentence" not in part.placeholders:
            # Conditions are few, and asked for by every row.
            of_condition = lru_cache(_CONDITIONS)(lambda condition: part.render("", condition))
            return lambda i: of_condition(conditions[i])
        if not prompt.fields:
            return lambda i: part.render(texts[i], conditions[i])
        columns = {name: rows.extra[name] for name in prompt.fields}
        return lambda i: part.render(
            texts[i], conditions[i], {name: column[i] for name, column in columns.items()}
        )

    found = []
    for texts, conditioned in zip((rows.sentence1, rows.sentence2), rows.conditioned, strict=True):
        # From a sentence without a condition nothing is subtracted: both inputs are the same.
        parts = (prompt.conditional, prompt.unconditional) if conditioned else (plain, plain)
        found.append((renderer(parts[0], texts), renderer(parts[1], texts)))
    return found


def given_conditions(rows: Rows, prompt: Prompt) -> Sequence[str]:
    """Return the condition that each row is given: its own, or for a shuffled control another's.

    Another's is sampled among all rows whose condition differs, so frequent ones are sampled
    often. The draw depends on the row's texts and on the conditions that the rows have between
    them, not on their order: pass all rows of a split, never a part of it.

    Raises:
        UserError: the prompt is a shuffled control, and the rows have one condition between them.
    """
    if prompt.control != "shuffled":
        return rows.condition
    texts = list(zip(rows.sentence1, rows.sentence2, rows.condition, strict=True))
    return shuffled(rows.condition, texts, prompt, f"rows of a split of {rows.file}")


def shuffled(
    conditions: Sequence[str], texts: Sequence[tuple[str, ...]], prompt: Prompt, what: str
) -> list[str]:
    """Return for each row the condition of another row, whose condition differs.

    ``texts`` are what decides the draw of each; ``what`` messages call the rows. Errors are those
    of :func:`given_conditions`.
    """
    # Most tokenizers see neither case nor further spaces: another spelling is no other condition.
    kinds = [" ".join(text.casefold().split()) for text in conditions]
    if len(set(kinds)) == 1:
        raise UserError(
            f"the prompt {prompt.name} gives each row the condition of another row, and all "
            f"{len(kinds):,} {what} have the same, {conditions[0]!r}. Leave the prompt out, or "
            "name rows under several conditions."
        )
    order = sorted(range(len(kinds)), key=lambda i: (kinds[i], conditions[i]))
    counts = Counter(kinds[position] for position in order)
    starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    given = []
    for own, kind in zip(texts, kinds, strict=True):
        sampled = int(digest_text(_SEED, *own), 16) % (len(kinds) - counts[kind])
        # Rows of its own kind are stepped over.
        place = sampled + counts[kind] if sampled >= starts[kind] else sampled
        given.append(conditions[order[place]])
    return given


def row_inputs(rows: Rows, prompt: Prompt) -> RowInputs:
    """Render every row's texts by a prompt; errors as of :class:`SplitInputs`."""
    first, second = _renderers(rows, prompt)
    renderers = (first[0], second[0], first[1], second[1])
    return RowInputs(*([render(i) for i in range(len(rows))] for render in renderers))


def same_inputs(rows: Rows, prompt: Prompt) -> tuple[int, int] | None:
    """Find two rows that a prompt makes the same though their conditions differ.

    Whatever is made of such rows, it cannot tell their conditions apart. What is subtracted does
    not count, as it need not be; separate features are e(s) and e(c) together.

    Returns:
        The positions of the first two; None where there are none, or the prompt is a control.
    """
    if prompt.control is not None:
        return None
    inputs = row_inputs(rows, prompt)
    columns = [inputs.first, inputs.second]
    if prompt.separate:
        columns.append(inputs.first_unconditional)
    seen: dict[tuple[bytes, ...], int] = {}
    for position, row in enumerate(zip(*columns, strict=True)):
        earlier = seen.setdefault(tuple(item.key for item in row), position)
        if rows.condition[earlier] != rows.condition[position]:
            return earlier, position
    return None
