"""``llmcond push``: upload a run's heads, and its encoder if that was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import verb
from llmcond.commands.shared import InRun
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.push import PushResult


@dataclass(frozen=True, kw_only=True)
class Push(InRun):
    """Upload a run's heads to the Hugging Face hub, with a trained encoder; data stays here.

    Of a frozen encoder only its name on the hub and its revision go up.
    """

    example: ClassVar[str] = "llmcond push ada/my-heads --run runs/default --private"

    repo: str = option(flag="", metavar="OWNER/NAME", help="created if it does not exist")
    private: bool = option(False, help="make the repository private")
    revision: str | None = option(
        None, metavar="BRANCH", help="created if it does not exist (default: main)"
    )

    def execute(self) -> PushResult:
        """Upload."""
        from llmcond.workflows.push import push_to_hub

        return self.call(push_to_hub, run_folder=self.run)


push = verb(Push)
