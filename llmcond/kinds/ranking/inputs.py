"""From queries, candidates and a prompt to the inputs of an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.kinds.ranking.task import QueryTexts
from llmcond.prompts.inputs import shuffled
from llmcond.prompts.template import Part, Prompt


class QueryInputs:
    """The :class:`llmcond.prompts.inputs.PromptInputs` of queries and candidates.

    Columns are made when they are first asked for, and kept.
    """

    def __init__(self, texts: QueryTexts, prompt: Prompt) -> None:
        """Prepare the texts.

        Raises:
            UserError: the template names columns of the data.
        """
        if prompt.fields:
            raise UserError(
                f"the prompt {prompt.name} names the column {prompt.fields[0]!r}, and this task "
                "has sentences and conditions only. Name another --prompt."
            )
        self.texts, self.prompt = texts, prompt

    @cached_property
    def candidates(self) -> list[EncoderInput]:
        """Return the candidates' inputs, (candidates,)."""
        plain = self.prompt.plain or Part("{sentence}")
        return [plain.render(text, "") for text in self.texts.candidates]

    @cached_property
    def joint(self) -> list[EncoderInput]:
        """Return the inputs of each sentence under each condition it is asked under, (asked,).

        Those of separate features are the sentences', e(s), which are :attr:`sentences` as well.
        """
        texts, asked = self.texts, self.texts.asked.tolist()
        rows = [(texts.sentences[s], texts.conditions[c]) for s, c in asked]
        if self.prompt.control == "shuffled":
            given = shuffled([c for _, c in rows], rows, self.prompt, "queries")
            rows = [(sentence, c) for (sentence, _), c in zip(rows, given, strict=True)]
        return [self.prompt.conditional.render(*row) for row in rows]

    @cached_property
    def sentences(self) -> list[EncoderInput]:
        """Return the inputs of sentences without a condition, (sentences,)."""
        part = self.prompt.alone or self.prompt.conditional
        return [part.render(text, "") for text in self.texts.sentences]

    @cached_property
    def conditions(self) -> list[EncoderInput]:
        """Return the inputs of conditions by themselves, (conditions,)."""
        return [self.prompt.unconditional.render("", text) for text in self.texts.conditions]

    @property
    def columns(self) -> dict[str, Sequence[EncoderInput]]:
        """Return all that the prompt has encoded, by what it is."""
        found: dict[str, Sequence[EncoderInput]] = {"candidates": self.candidates}
        if not self.prompt.separate:
            found["joint"] = self.joint
        if self.prompt.separate or not self.prompt.of_condition:
            found["sentences"] = self.sentences
        if self.prompt.of_condition:
            found["conditions"] = self.conditions
        return found

    def __iter__(self) -> Iterator[EncoderInput]:
        for column in self.columns.values():
            yield from column

    def __len__(self) -> int:
        return sum(map(len, self.columns.values()))

    def where(self, item: EncoderInput) -> str | None:
        """Return what needs an input: ``the entity 'dog'``."""
        sentence, condition, candidate = self.texts.names
        named = {
            "candidates": (candidate, self.texts.candidates),
            "sentences": (sentence, self.texts.sentences),
            "conditions": (condition, self.texts.conditions),
        }
        for column, inputs in self.columns.items():
            if item in inputs:
                position = inputs.index(item)
                if column == "joint":
                    return self._asked(*self.texts.asked[position].tolist())
                what, texts = named[column]
                return f"the {what} {texts[position]!r}"
        return None

    def check_differ(self) -> None:
        """Raise a UserError if two queries of different conditions get the same inputs."""
        if self.prompt.control is not None or self.prompt.separate:
            return
        texts = self.texts
        seen: dict[bytes, int] = {}
        for position, item in enumerate(self.joint):
            earlier = seen.setdefault(item.key, position)
            (s, c), (other, d) = texts.asked[position].tolist(), texts.asked[earlier].tolist()
            if texts.conditions[c] == texts.conditions[d]:
                continue
            raise UserError(
                f"the prompt {self.prompt.name} makes the same input of "
                f"{self._asked(other, d)} and of {self._asked(s, c)}, so that nothing can tell "
                "them apart. Put words or punctuation between {sentence} and {condition} in the "
                "template."
            )

    def _asked(self, sentence: int, condition: int) -> str:
        names, texts = self.texts.names, self.texts
        return (
            f"the {names[0]} {texts.sentences[sentence]!r} under the {names[1]} "
            f"{texts.conditions[condition]!r}"
        )
