"""Check and time encoders on this machine."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from llmcond.benchmark.checks import Bench, Check, run_checks
from llmcond.benchmark.machine import describe_machine
from llmcond.benchmark.markdown import page
from llmcond.benchmark.shapes import Shape, random_encoder
from llmcond.benchmark.speeds import Profile, Scale, Skipped, Speed, run_encoder
from llmcond.display import Displayed
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.loading.memory import release
from llmcond.encoders.loading.quantization import require
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import Quantize
from llmcond.errors import LlmcondError, first_line
from llmcond.files import check_output, write_text
from llmcond.system import choose_device
from llmcond.workflows.options.encoding import BenchOptions

_log = logging.getLogger(__name__)
#: Tokens of an input at most, in what is timed.
_LONGEST = 512
#: From a quantisation to the encoder, not loaded.
_Resolve = Callable[[Quantize], ResolvedEncoder]


@dataclass(frozen=True)
class Benchmark(Displayed):
    """What a machine does with encoders.

    Attributes:
        machine: what figures were read on: device, driver, versions.
        checks: whether vectors are right.
        speeds: each way through each encoder.
        skipped: what did not go here, and why.
        profiles: where the time goes, if that was asked for.
    """

    machine: dict[str, Any]
    checks: list[Check]
    speeds: list[Speed]
    skipped: list[Skipped]
    profiles: list[Profile] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Return the names of the checks that failed."""
        return [check.name for check in self.checks if check.passed is False]

    def to_markdown(self) -> str:
        """Return a page with all of it."""
        return page(self.machine, self.checks, self.speeds, self.skipped, self.profiles)


def bench(asked: BenchOptions) -> Benchmark:
    """Run the checks, then time each encoder in each precision.

    The page is written after the checks and after each encoder: a rented machine may be taken back.

    Raises:
        UserError: an unknown model, or a device, library or place that is not there.
        LlmcondError: the hub cannot be reached.
    """
    device, quantize, quick = choose_device(asked.device), asked.quantize, asked.quick
    out = None if asked.out is None else Path(asked.out)
    check_output(out, [".md"])
    if set(quantize) - {"none"}:
        require("--quantize 8bit and 4bit", "bitsandbytes", "accelerate")
    result = Benchmark(describe_machine(device), [], [], [], [])
    places: dict[type, list[Any]] = {
        Check: result.checks,
        Speed: result.speeds,
        Skipped: result.skipped,
        Profile: result.profiles,
    }

    def write() -> None:
        if out is not None:
            write_text(out, result.to_markdown())

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subjects = dict(_subjects(asked.model, asked.shape, device, folder, quick))
        for check in run_checks(Bench(device, folder)) if asked.checks == "all" else ():
            _log.info("%s: %s", check.name, _said(check))
            result.checks.append(check)
        write()
        scale = Scale.of(device, quick=quick)
        for name, kind in product(subjects, quantize or get_args(Quantize)):
            _log.info("timing %s, quantize %s", name, kind)
            release(device)  # what the one before had
            try:
                own, check_it = subjects[name](kind), asked.checks != "none"
                drawn = own.checkpoint.drawn_on is not None
                for found in run_encoder(
                    own, scale, check=check_it, must_pack=drawn, profile=asked.profile
                ):
                    places[type(found)].append(found)
            except (LlmcondError, RuntimeError, MemoryError) as error:  # of the device's too
                result.skipped.append(Skipped(f"{name}, quantize {kind}", first_line(error)))
            write()
    return result


def _subjects(
    models: Sequence[str], shapes: Sequence[Shape], device: str, folder: Path, quick: bool
) -> Iterator[tuple[str, _Resolve]]:
    """Yield what is timed; a model that cannot be found is told before anything is run."""
    whole = EncoderOptions(device=device, fold_latents=False)
    for name in models:
        own = resolve(name, whole, identify=False).identity.max_length

        def named(
            kind: Quantize, name: str = name, length: int = min(own, _LONGEST)
        ) -> ResolvedEncoder:
            # What is checked and timed are PyTorch's kernels.
            options = replace(whole, quantize=kind, max_length=length, runtime="torch")
            return resolve(name, options, identify=False)

        yield name, named
    for shape in shapes or (() if models else ("minilm",)):

        def random(kind: Quantize, shape: Shape = shape) -> ResolvedEncoder:
            options = EncoderOptions(quantize=kind, max_length=_LONGEST, fold_latents=False)
            return random_encoder(shape, folder, options, device, small=quick)

        yield shape, random


def _said(check: Check) -> str:
    if check.passed is None:
        return f"not run: {check.note}"
    return "passed" if check.passed else f"FAILED ({check.note or check.difference})"
