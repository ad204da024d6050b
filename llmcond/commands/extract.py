"""``llmcond extract``: encode a data set's texts under prompts, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from llmcond.commands.base import verb
from llmcond.commands.shared import InRun, WithEncoder, WithScale, WithTask, data_options
from llmcond.errors import UserError
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.extract import Extracted


@dataclass(frozen=True, kw_only=True)
class Extract(InRun, WithTask, WithEncoder, WithScale):
    """Encode a data set's texts under prompts, once, into a run.

    What the run holds already is not encoded again; an interrupted call goes on where it stopped.
    """

    example: ClassVar[str] = (
        "llmcond extract --model minilm --data my.csv --prompt concat-sent-cond"
    )

    prompt: Sequence[str] = option(
        (), metavar="NAME_OR_FILE", help="templates (default: the one that suits the model)"
    )
    store_dtype: Literal["float16", "float32"] | None = option(
        None, help="type that vectors are stored in (default: float16)"
    )
    workers: int = option(
        1,
        metavar="N",
        help="processes that share the work, one a GPU (on a CPU: a share of its cores each)",
    )

    def execute(self) -> Extracted:
        """Extract."""
        data = data_options(self)
        cluster = self.cluster()
        if cluster is not None and self.workers != 1:
            raise UserError("--workers and --scale are two ways to share the work. Choose one.")
        from llmcond.workflows.extract import extract

        return self.call(
            extract,
            options=self.encoder_options(),
            run_folder=self.run,
            data=data,
            prompts=self.prompt,
            cluster=cluster,
        )


extract = verb(Extract)
