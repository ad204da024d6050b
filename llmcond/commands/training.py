"""Options of the commands that train an encoder."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from llmcond.commands.base import optional
from llmcond.commands.shared import InRun, WithEncoder, WithTask
from llmcond.finetune.settings import TuneSettings
from llmcond.options import option

if TYPE_CHECKING:
    _TuneOptions = TuneSettings
else:
    # What is not given may be in the recipe's [finetune] table.
    _TuneOptions = optional(TuneSettings)


@dataclass(frozen=True, kw_only=True)
class Training(InRun, WithTask, WithEncoder, _TuneOptions):
    """A command that trains an encoder."""

    merge: bool = option(False, help="write the full encoder, adapters merged into its weights")

    def tune_settings(self) -> dict[str, Any]:
        """Return the settings of training that were given."""
        given = {item.name: getattr(self, item.name) for item in fields(_TuneOptions)}
        return {name: value for name, value in given.items() if value is not None}
