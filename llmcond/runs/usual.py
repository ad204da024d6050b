"""Which run, or bundled model, is meant where texts are embedded."""

from __future__ import annotations

from pathlib import Path

from llmcond.bundled import DEFAULT_RUN, PRETRAINED, pretrained
from llmcond.errors import UserError
from llmcond.log import log
from llmcond.runs.open import run_exists


def usual_run(run: str | Path | None, model: str | None = None) -> Path:
    """Return the folder of a run, or of a bundled model, which is laid out as one.

    Args:
        run: its folder, or the name of a bundled model. None: ``runs/default``, and where there is
            no run, the bundled model that was trained on C-STS; a line says so.
        model: the name of a bundled model, instead.

    Raises:
        UserError: both were given, or no such model.
    """
    if model is not None:
        found = pretrained(model)
        if run is not None:
            raise UserError(f"--run is {run} and --model {model}; give one of them.")
        if found is None:
            raise UserError(
                f"--model is {model!r}, and the bundled model is {PRETRAINED}. Another encoder is "
                f"used by a run: llmcond extract --model {model} --run DIR"
            )
        return found
    if run is not None:
        return (not Path(run).exists() and pretrained(run)) or Path(run)
    bundled = pretrained(PRETRAINED)
    if bundled is None or run_exists(DEFAULT_RUN):
        return DEFAULT_RUN
    log.info(
        f"there is no run, so this is by the bundled model {PRETRAINED} (--run or --model to take "
        "another)"
    )
    return bundled
