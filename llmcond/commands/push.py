"""``llmcond push``: upload a run's heads, and its encoder if that was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import Command, verb
from llmcond.workflows.options.training import PushOptions

if TYPE_CHECKING:
    from llmcond.workflows.push import PushResult


@dataclass(frozen=True, kw_only=True)
class Push(PushOptions, Command):
    """Upload a run's heads to the Hugging Face hub, with a trained encoder; data stays here.

    Of a frozen encoder only its name on the hub and its revision go up.
    """

    position = 60
    example = "llmcond push ada/my-heads --run runs/default --private"

    def execute(self) -> PushResult:
        """Upload."""
        from llmcond.workflows.push import push_to_hub

        return push_to_hub(self)


push = verb(Push)
