"""Checking and timing encoders on this machine."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast, get_args

from llmcond.base.errors import LlmcondError, UserError, first_line
from llmcond.base.files import write_text
from llmcond.base.output import Displayed
from llmcond.base.system import choose_device, describe_machine
from llmcond.benchmark.checks import Check, CheckEnvironment, run_checks
from llmcond.benchmark.shapes import Shape, random_encoder
from llmcond.benchmark.speeds import Scale, Speed, page, run_encoder
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.loading import release_memory
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import Quantize
from llmcond.options.encoding import BenchOptions

_log = logging.getLogger(__name__)
#: The most tokens of an input that is timed.
_MAX_LENGTH = 512


@dataclass(frozen=True)
class Benchmark(Displayed):
    """The checks and speeds of encoders on one machine.

    Attributes:
        machine: the machine that was measured: its device, driver and versions.
        checks: the checks of the vectors, with their outcomes. What could not be run on this
            machine is a check without an outcome, whose note has the reason.
        speeds: the speeds of each encoder, one for each way of encoding.

    Examples:
        >>> import llmcond
        >>> machine = {"device": "cpu"}
        >>> result = llmcond.Benchmark(machine, checks=[], speeds=[])
        >>> result.failed
        []
    """

    machine: dict[str, Any]
    checks: list[Check]
    speeds: list[Speed]

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [check.name for check in self.checks if check.passed is False]

    def to_markdown(self) -> str:
        """Render the checks and the speeds.

        Returns:
            A page in Markdown.
        """
        return page(self.machine, self.checks, self.speeds)


def bench(options: BenchOptions) -> Benchmark:
    """Run the checks, then time each encoder in each precision.

    The page is written after the checks and again after each encoder, because a rented machine may
    be taken back at any time.

    Raises:
        UserError: a model is unknown, a device or a library is missing, or the page cannot be
            written.
        LlmcondError: the hub cannot be reached.
    """
    device = choose_device(options.device)
    names = [*options.model, *(options.shape or (() if options.model else ("minilm",)))]
    out = None if options.out is None else Path(options.out)
    wrong_length = next((n for n in options.lengths if not 16 <= n <= _MAX_LENGTH), None)
    if wrong_length is not None:
        raise UserError(f"--lengths has {wrong_length}; expected numbers from 16 to {_MAX_LENGTH}.")
    result = Benchmark(describe_machine(device), [], [])

    def write() -> None:
        if out is not None:
            write_text(out, result.to_markdown())

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in options.model:  # a missing model is reported before anything is run
            _resolve(name, "none", options, device, folder)
        for check in (
            run_checks(CheckEnvironment(device, folder)) if options.checks == "all" else ()
        ):
            _log.info("%s: %s", check.name, _describe_outcome(check))
            result.checks.append(check)
        write()
        scale = Scale.of(device, options.lengths, quick=options.quick)
        for name, kind in product(names, options.quantize or get_args(Quantize)):
            _log.info("timing %s, quantize %s", name, kind)
            release_memory(device)  # frees the memory of the previous encoder
            try:
                resolved = _resolve(name, kind, options, device, folder)
                is_random = resolved.checkpoint.random_device is not None
                for outcome in run_encoder(
                    resolved, scale, check=options.checks != "none", must_pack=is_random
                ):
                    if isinstance(outcome, Speed):
                        result.speeds.append(outcome)
                    else:
                        result.checks.append(outcome)
            except (LlmcondError, RuntimeError, MemoryError) as error:  # the device's errors too
                what = f"{name}, quantize {kind}"
                result.checks.append(Check(what, None, None, None, first_line(error)))
            write()
    return result


def _resolve(
    name: str, kind: Quantize, options: BenchOptions, device: str, folder: Path
) -> ResolvedEncoder:
    """Resolve a model, or a shape with random weights, in a quantisation."""
    # The checks and timings are those of PyTorch's kernels.
    settings = EncoderOptions(device=device, quantize=kind, fold_latents=False, runtime="torch")
    if name in options.model:
        length = resolve(name, settings, identify=False).identity.max_length
        settings = replace(settings, max_length=min(length, _MAX_LENGTH))
        return resolve(name, settings, identify=False)
    shape, settings = cast("Shape", name), replace(settings, max_length=_MAX_LENGTH)
    return random_encoder(shape, folder, settings, device, small=options.quick)


def _describe_outcome(check: Check) -> str:
    if check.passed is None:
        return f"not run: {check.note}"
    return "passed" if check.passed else f"FAILED ({check.note or check.difference})"
