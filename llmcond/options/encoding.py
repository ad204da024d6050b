"""Options of commands that encode a dataset or time encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from llmcond.base.files import file_output
from llmcond.base.options import Amount, option
from llmcond.base.system import require_libraries
from llmcond.benchmark.shapes import Level, Shape
from llmcond.encoders import EncoderOptions, check_encoder
from llmcond.encoders.spec import Quantize
from llmcond.options.common import DeviceOption, RunOptions, ScaleOptions


def _check_prompts(names: Sequence[str]) -> None:
    from llmcond.prompts import load_prompt  # help texts do not need it

    for name in names:
        load_prompt(name)


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(RunOptions, ScaleOptions):
    """Options of ``llmcond extract``: data, prompts, encoder, and where features are stored."""

    prompt: Sequence[str] = option(
        (),
        metavar="NAME_OR_FILE",
        check=_check_prompts,
        help="prompts to encode the texts with (default: the one that suits the model)",
    )
    store_dtype: Literal["float16", "float32"] | None = option(
        None, help="number format of the stored vectors (default: float16)"
    )
    store: str | None = option(
        None,
        metavar="URI_OR_FOLDER",
        help="folder or URI that a new run stores its features in: s3://BUCKET/PATH, gs://... or "
        "az://..., with credentials from the environment (default: in the run's folder)",
    )
    plan: bool = option(
        False,
        help="only report how much work there is (inputs, tokens, bytes and hours); nothing is "
        "written",
    )
    price: Amount | None = option(
        None,
        metavar="P",
        needs="--plan",
        help="with --plan: price of one GPU-hour, of one CPU-process-hour, or of a million tokens "
        "of a server",
    )
    bench: str | Path | None = option(
        None,
        metavar="FILE.json",
        needs="--plan",
        help="with --plan: file with the output of `llmcond bench --json` on the machine to plan "
        "for (default: a short trial on this machine)",
    )


@dataclass(frozen=True, kw_only=True)
class BenchOptions(DeviceOption):
    """Options of ``llmcond bench``: the encoders to check and time."""

    model: Sequence[str] = option(
        (),
        metavar="NAME_OR_PATH",
        help="encoders to time with their real weights (`llmcond models` lists the known ones)",
    )
    shape: Sequence[Shape] = option(
        (),
        metavar="NAME",
        help="architectures to time at full size with random weights, without a checkpoint on "
        f"disk: {', '.join(get_args(Shape))} (default: minilm, unless --model is given)",
    )
    quantize: Sequence[Quantize] = option(
        (),
        help="number formats of the weights: none (as they are), 8bit or 4bit (default: all that "
        "this machine supports)",
    )
    checks: Level = option(
        "all",
        help="checks to run: none, quick (those of each timed encoder) or all (also those of small "
        "random encoders of every architecture)",
    )
    quick: bool = option(
        False, help="use small shapes and few inputs, to run the checks without measuring speed"
    )
    lengths: Sequence[int] = option(
        (512,), help="lengths, in tokens, of the long inputs to time, from 16 to 512 (default: 512)"
    )
    out: str | Path | None = option(
        None,
        metavar="FILE.md",
        writes=file_output(".md"),
        help="Markdown file to write the report to",
    )

    def __post_init__(self) -> None:
        """Also check the encoders, before anything heavy is imported."""
        super().__post_init__()
        if set(self.quantize) - {"none"}:
            require_libraries("--quantize 8bit and 4bit", "bitsandbytes", "accelerate")
        for name in self.model:
            check_encoder(name, EncoderOptions(device=self.device), weights_for="timing")
