"""``llmcond push``: upload a run's heads, and its encoder if it was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, as_function
from llmcond.workflows.options.training import PushOptions

if TYPE_CHECKING:
    from llmcond.workflows.push import PushResult


@dataclass(frozen=True, kw_only=True)
class Push(PushOptions, Command):
    """Upload a run's heads, and its encoder if it was trained, to the Hugging Face hub.

    Data and features are not uploaded. A frozen encoder is recorded by its name and revision on the
    hub.
    """

    position = 60
    example = "llmcond push ada/my-heads --run runs/default --private"

    def execute(self) -> PushResult:
        """Upload the run.

        Returns:
            A ``PushResult``, a dictionary with the keys ``repo``, ``url``, ``commit`` and
            ``files``.

        Raises:
            UserError: the run has neither a trained encoder nor a fitted head, others could not
                load its encoder, or you may not write to the repository.
            LlmcondError: the hub cannot be reached, or has failed.

        Examples:
            >>> import llmcond
            >>> llmcond.push(repo="ada/my-heads", private=True)["url"]  # doctest: +SKIP
            'https://huggingface.co/ada/my-heads'
        """
        from llmcond.workflows.push import push_to_hub

        return push_to_hub(self)


push = as_function(Push)
