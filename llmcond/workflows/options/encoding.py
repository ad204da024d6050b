"""Options of what encodes a data set, or times encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmcond.benchmark.shapes import Level, Shape
from llmcond.encoders.spec import Quantize
from llmcond.errors import UserError
from llmcond.options import Amount, Positive, option
from llmcond.workflows.options.common import RunOptions, WithDevice, WithScale


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(RunOptions, WithScale):
    """What is encoded, under which prompts, by which encoder, and where it is stored."""

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
    workers: Positive = option(
        1,
        metavar="N",
        help="processes that share the work, one a GPU (on a CPU: a share of its cores each)",
    )

    plan: bool = option(
        False,
        help="only tell what there is to do: inputs, tokens, bytes, hours; nothing is written",
    )
    price: Amount | None = option(
        None,
        metavar="P",
        needs="--plan",
        help="of --plan: of an hour of a GPU, or of a process on a CPU",
    )
    bench: str | Path | None = option(
        None,
        metavar="FILE.json",
        needs="--plan",
        help="of --plan: what `llmcond bench --json` printed on such a machine (default: a trial "
        "on this one)",
    )

    def __post_init__(self) -> None:
        """Check options that do not go together as well."""
        super().__post_init__()
        if self.scale is not None and self.workers != 1:
            raise UserError("--workers and --scale are two ways to share the work. Choose one.")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(WithDevice):
    """Which encoders are checked and timed."""

    model: Sequence[str] = option(
        (), metavar="NAME_OR_PATH", help="encoders with their own weights (`llmcond models`)"
    )
    shape: Sequence[Shape] = option(
        (),
        help="architectures at their true size with random weights, of which no file is made "
        "(default, without --model: minilm)",
    )
    quantize: Sequence[Quantize] = option(
        (), help="weights as they are, or in 8 or 4 bit (default: all that go here)"
    )
    checks: Level = option(
        "all",
        help="checks to run: none, quick (only those of each timed encoder) or all (also those of "
        "small random encoders of every architecture)",
    )
    quick: bool = option(False, help="small shapes and few inputs: checks rather than speeds")
    profile: bool = option(False, help="also list the kernels that take longest")
    out: str | Path | None = option(
        None, metavar="FILE.md", help="write the page to a file as well"
    )
