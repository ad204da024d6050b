"""``llmcond extract``: encode a data set's texts under prompts, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from llmcond.commands.base import RESUMES, verb
from llmcond.commands.shared import InRun, WithEncoder, WithScale, WithTask, data_options
from llmcond.errors import UserError
from llmcond.options import option

if TYPE_CHECKING:
    from llmcond.workflows.extract import ExtractResult
    from llmcond.workflows.plan import ExtractionPlan


@dataclass(frozen=True, kw_only=True)
class Extract(InRun, WithTask, WithEncoder, WithScale):
    """Encode a data set's texts under prompts, once, into a run.

    What the run holds already is not encoded again; an interrupted call goes on where it stopped.
    """

    example: ClassVar[str] = (
        "llmcond extract --model minilm --data my.csv --prompt concat-sent-cond"
    )
    if_interrupted: ClassVar[str] = RESUMES

    prompt: Sequence[str] = option(
        (), metavar="NAME_OR_FILE", help="templates (default: the one that suits the model)"
    )
    store_dtype: Literal["float16", "float32"] | None = option(
        None, help="type that vectors are stored in (default: float16)"
    )
    store: str | None = option(
        None,
        metavar="URI_OR_FOLDER",
        help="of a new run, where its features are stored: a folder, or s3://BUCKET/PATH, gs://... "
        "or az://..., with credentials from the environment (default: in the run)",
    )
    workers: int = option(
        1,
        metavar="N",
        help="processes that share the work, one a GPU (on a CPU: a share of its cores each)",
    )

    plan: bool = option(
        False,
        help="only tell what there is to do: inputs, tokens, bytes, hours; nothing is written",
    )
    price: float | None = option(
        None, metavar="P", help="of --plan: of an hour of a GPU, or of a process on a CPU"
    )
    bench: str | Path | None = option(
        None,
        metavar="FILE.json",
        help="of --plan: what `llmcond bench --json` printed on such a machine (default: a trial "
        "on this one)",
    )

    def execute(self) -> ExtractResult | ExtractionPlan:
        """Extract, or tell what would be."""
        data = data_options(self)
        cluster = self.cluster()
        if cluster is not None and self.workers != 1:
            raise UserError("--workers and --scale are two ways to share the work. Choose one.")
        given: dict[str, Any] = {
            "options": self.encoder_options(),
            "run_folder": self.run,
            "data": data,
            "prompts": self.prompt,
            "cluster": cluster,
        }
        if self.plan:
            from llmcond.workflows.plan import plan

            return self.call(plan, **given)
        for name in ("price", "bench"):
            if getattr(self, name) is not None:
                raise UserError(f"--{name} is for --plan; give that too.")
        from llmcond.workflows.extract import extract

        return self.call(extract, **given)

    def show(self, result: ExtractResult | ExtractionPlan, form: str) -> None:
        """Print a plan; what was extracted was told while it was."""
        if self.plan:
            from llmcond.report.terminal import listing, show

            show(listing(cast("ExtractionPlan", result).rows()), form)


extract = verb(Extract)
