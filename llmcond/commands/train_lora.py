"""``llmcond train-lora``: train an encoder's adapters, or all of its weights, with a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmcond.commands.base import optional, verb
from llmcond.commands.shared import InRun, WithEncoder, WithTask, data_options
from llmcond.finetune.settings import TuneSettings
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.finetune import Trained

    _TuneOptions = TuneSettings
else:
    # What is not given may be in the recipe's [finetune] table.
    _TuneOptions = optional(TuneSettings)


@dataclass(frozen=True, kw_only=True)
class TrainLora(InRun, WithTask, WithEncoder, _TuneOptions):
    """Train an encoder's adapters and a head together; stopped, the same command goes on."""

    example: ClassVar[str] = "llmcond train-lora --model minilm --head none --run runs/tuned"

    head: str | None = option(
        None,
        metavar="NAME_OR_FILE",
        help="a recipe, its objective included (none: the encoder's own vectors are compared)",
        group="head and inputs",
    )
    start: Path | None = option(
        None,
        metavar="DIR",
        help="start from a fitted head, e.g. runs/default/heads/mlp@cond, instead of --head",
        group="head and inputs",
    )
    dim: int | None = option(
        None, metavar="K", help="size of the embeddings", group="head and inputs"
    )
    set: Mapping[str, str] | None = option(
        None,
        metavar="KEY=VALUE",
        help="other settings of the recipe or its objective; learning_rate is the head's",
        group="head and inputs",
    )
    prompt: Sequence[str] = option(
        (),
        metavar="NAME_OR_FILE",
        help="templates (default: what suits encoder and head)",
        group="head and inputs",
    )
    subtract: bool | None = option(
        None, help="subtract the unconditional embedding (default: no)", group="head and inputs"
    )
    seed: int = option(0, metavar="S", help="seed of everything random")
    merge: bool = option(False, help="write the full encoder, adapters merged into its weights")

    def execute(self) -> Trained:
        """Train."""
        from llmcond.workflows.finetune import HeadChoice, train_lora

        given = {item.name: getattr(self, item.name) for item in fields(_TuneOptions)}
        return train_lora(
            self.model,
            self.encoder_options(),
            self.run,
            data_options(self),
            HeadChoice(
                head=self.head,
                start=self.start,
                dim=self.dim,
                changes=self.set,
                prompts=self.prompt,
                subtract=self.subtract,
                seed=self.seed,
            ),
            {name: value for name, value in given.items() if value is not None},
            self.merge,
            self.task,
        )


train_lora = verb(TrainLora)
