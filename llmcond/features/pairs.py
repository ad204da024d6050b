"""From rows and a prompt to the inputs of an encoder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from llmcond.encoders.spec import EncoderInput
from llmcond.prompts import Prompt
from llmcond.rows import Rows


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs of rows, as columns: conditional and unconditional, for both sentences."""

    first: Sequence[EncoderInput]
    second: Sequence[EncoderInput]
    first_unconditional: Sequence[EncoderInput]
    second_unconditional: Sequence[EncoderInput]


class SplitInputs(Collection[EncoderInput]):
    """Every input of some rows under a prompt, repeats included; made when it is asked for."""

    def __init__(self, splits: Iterable[Rows], prompt: Prompt) -> None:
        self._splits, self._prompt = list(splits), prompt

    def __iter__(self) -> Iterator[EncoderInput]:
        # Row by row, so that inputs which begin alike stand near each other.
        for rows in self._splits:
            texts = zip(rows.sentence1, rows.sentence2, rows.condition, strict=True)
            for first, second, condition in texts:
                for sentence in (first, second):
                    yield self._prompt.conditional.render(sentence, condition)
                    yield self._prompt.unconditional.render(sentence, condition)

    def __len__(self) -> int:
        return 4 * sum(len(rows) for rows in self._splits)

    def __contains__(self, item: object) -> bool:
        return any(item == own for own in self)


def row_inputs(rows: Rows, prompt: Prompt) -> RowInputs:
    """Put every row's texts into a prompt."""
    first = list(zip(rows.sentence1, rows.condition, strict=True))
    second = list(zip(rows.sentence2, rows.condition, strict=True))
    return RowInputs(
        first=[prompt.conditional.render(*texts) for texts in first],
        second=[prompt.conditional.render(*texts) for texts in second],
        first_unconditional=[prompt.unconditional.render(*texts) for texts in first],
        second_unconditional=[prompt.unconditional.render(*texts) for texts in second],
    )


def find_row(rows: Rows, prompt: Prompt, item: EncoderInput) -> int | None:
    """Return the position of the first row that needs ``item``; None if no row does."""
    inputs = row_inputs(rows, prompt)
    columns = zip(
        inputs.first,
        inputs.second,
        inputs.first_unconditional,
        inputs.second_unconditional,
        strict=True,
    )
    return next((position for position, row in enumerate(columns) if item in row), None)
