"""The encoder inputs of utterances under a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.prompts.template import Prompt


class UtteranceInputs(list[EncoderInput]):
    """The ``PromptInputs`` of distinct texts, each encoded without a condition: e(u)."""

    def __init__(self, texts: Sequence[str], prompt: Prompt) -> None:
        """Render distinct texts.

        Raises:
            UserError: The template cannot be used for texts without a condition.
        """
        obstacle, part = obstacle_to(prompt), prompt.sentence_part
        if obstacle or part is None:
            raise UserError(
                f"the prompt {prompt.name} cannot be used for dialogues: {obstacle}. Choose "
                "another --prompt, such as separate."
            )
        super().__init__(part.render(text, "") for text in texts)
        self._texts = texts

    def locate(self, item: EncoderInput) -> str | None:
        """Return a description of the text that needs an input, such as ``the utterance 'Hi!'``."""
        return f"the utterance {self._texts[self.index(item)]!r}" if item in self else None

    def check_distinct(self) -> None:
        """Do nothing, because utterances have no conditions that inputs must distinguish."""


def obstacle_to(prompt: Prompt) -> str:
    """Return why utterances cannot be encoded by a prompt; empty if they can."""
    if prompt.fields:
        return f"it names the column {prompt.fields[0]!r}, and utterances have none"
    if prompt.control is not None:
        return "it is a control for conditions, and utterances have none"
    if prompt.sentence_part is None:
        return "it encodes no sentence without its condition"
    return ""
