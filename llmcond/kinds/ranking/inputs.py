"""The encoder inputs of queries and candidates under a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.kinds.ranking.task import QueryTexts
from llmcond.prompts.inputs import shuffle_conditions
from llmcond.prompts.template import InputTemplate, Prompt


class QueryInputs:
    """The ``PromptInputs`` of queries and candidates.

    Each column is rendered when it is first read, and then cached.
    """

    def __init__(self, texts: QueryTexts, prompt: Prompt) -> None:
        """Check the prompt.

        Raises:
            UserError: The template names columns of the data.
        """
        if prompt.fields:
            raise UserError(
                f"the prompt {prompt.name} names the column {prompt.fields[0]!r}, but this task "
                "only has sentences and conditions. Choose another --prompt."
            )
        self.texts, self.prompt = texts, prompt

    @cached_property
    def candidates(self) -> list[EncoderInput]:
        """The inputs of the candidates."""
        plain_part = self.prompt.plain or InputTemplate("{sentence}")
        return [plain_part.render(text, "") for text in self.texts.candidates]

    @cached_property
    def joint(self) -> list[EncoderInput]:
        """The inputs of each pair of sentence and condition of the queries.

        For separate features these are the inputs of the sentences, e(s), like ``sentences``.
        """
        texts, pairs = self.texts, self.texts.query_pairs.tolist()
        rows = [(texts.sentences[s], texts.conditions[c]) for s, c in pairs]
        if self.prompt.control == "shuffled":
            shuffled_conditions = shuffle_conditions(
                [c for _, c in rows], rows, self.prompt, "queries"
            )
            rows = [
                (sentence, c) for (sentence, _), c in zip(rows, shuffled_conditions, strict=True)
            ]
        return [self.prompt.conditional.render(*row) for row in rows]

    @cached_property
    def sentences(self) -> list[EncoderInput]:
        """The inputs of the sentences without a condition."""
        part = self.prompt.sentence_part or self.prompt.conditional
        return [part.render(text, "") for text in self.texts.sentences]

    @cached_property
    def conditions(self) -> list[EncoderInput]:
        """The inputs of the conditions without a sentence."""
        return [self.prompt.unconditional.render("", text) for text in self.texts.conditions]

    @property
    def columns(self) -> dict[str, Sequence[EncoderInput]]:
        """The inputs that the prompt needs, by column name."""
        columns: dict[str, Sequence[EncoderInput]] = {"candidates": self.candidates}
        if not self.prompt.separate:
            columns["joint"] = self.joint
        if self.prompt.separate or not self.prompt.subtracts_condition:
            columns["sentences"] = self.sentences
        if self.prompt.subtracts_condition:
            columns["conditions"] = self.conditions
        return columns

    def __iter__(self) -> Iterator[EncoderInput]:
        for column in self.columns.values():
            yield from column

    def __len__(self) -> int:
        return sum(map(len, self.columns.values()))

    def locate(self, item: EncoderInput) -> str | None:
        """Return a description of the text that needs an input, such as ``the entity 'dog'``."""
        sentence, condition, candidate = self.texts.names
        tables = {
            "candidates": (candidate, self.texts.candidates),
            "sentences": (sentence, self.texts.sentences),
            "conditions": (condition, self.texts.conditions),
        }
        for column, inputs in self.columns.items():
            if item in inputs:
                position = inputs.index(item)
                if column == "joint":
                    return self._describe_query(*self.texts.query_pairs[position].tolist())
                label, texts = tables[column]
                return f"the {label} {texts[position]!r}"
        return None

    def check_distinct(self) -> None:
        """Raise a UserError if two queries with different conditions have the same input."""
        if self.prompt.control is not None or self.prompt.separate:
            return
        texts = self.texts
        seen: dict[bytes, int] = {}
        for position, item in enumerate(self.joint):
            earlier_position = seen.setdefault(item.key, position)
            (s, c), (earlier_sentence, earlier_condition) = (
                texts.query_pairs[position].tolist(),
                texts.query_pairs[earlier_position].tolist(),
            )
            if texts.conditions[c] == texts.conditions[earlier_condition]:
                continue
            raise UserError(
                f"the prompt {self.prompt.name} renders the same input for "
                f"{self._describe_query(earlier_sentence, earlier_condition)} and for "
                f"{self._describe_query(s, c)}, so the encoder cannot distinguish them. Put words "
                "or punctuation between {sentence} and {condition} in the template."
            )

    def _describe_query(self, sentence: int, condition: int) -> str:
        names, texts = self.texts.names, self.texts
        return (
            f"the {names[0]} {texts.sentences[sentence]!r} under the {names[1]} "
            f"{texts.conditions[condition]!r}"
        )
