"""From utterances and a prompt to the inputs of an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.prompts.template import Prompt


class UtteranceInputs:
    """The :class:`llmcond.prompts.inputs.PromptInputs` of utterances.

    Attributes:
        inputs: (n,) those of n distinct texts, each by itself: e(u).
    """

    def __init__(self, texts: Sequence[str], prompt: Prompt) -> None:
        """Render distinct texts.

        Raises:
            UserError: the template is not for texts without a condition.
        """
        obstacle, part = obstacle_to(prompt), prompt.alone
        if obstacle or part is None:
            raise UserError(
                f"the prompt {prompt.name} is not for dialogues: {obstacle}. Name another "
                "--prompt, such as separate."
            )
        self._texts = texts
        self.inputs = [part.render(text, "") for text in texts]

    def __iter__(self) -> Iterator[EncoderInput]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)

    def where(self, item: EncoderInput) -> str | None:
        """Return what needs an input: ``the utterance 'Hi!'``."""
        found = (t for t, own in zip(self._texts, self.inputs, strict=True) if own == item)
        return next((f"the utterance {text!r}" for text in found), None)

    def check_differ(self) -> None:
        """Do nothing: there are no conditions that could be taken for each other."""


def obstacle_to(prompt: Prompt) -> str:
    """Return why utterances cannot be encoded by a prompt; empty if they can."""
    if prompt.fields:
        return f"it names the column {prompt.fields[0]!r}, and utterances have none"
    if prompt.control is not None:
        return "it is a control for conditions, and utterances have none"
    if prompt.alone is None:
        return "it encodes no sentence without its condition"
    return ""
