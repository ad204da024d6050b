"""Which run, or bundled model, is meant where texts are embedded."""

from __future__ import annotations

from pathlib import Path

from llmcond.bundled import DEFAULT_RUN, PRETRAINED, bundled, pretrained
from llmcond.data.readers import SAMPLE
from llmcond.errors import UserError
from llmcond.log import log
from llmcond.runs.open import open_any_run, run_exists


def usual_run(run: str | Path | None, model: str | None = None) -> Path:
    """Return the folder of a run, or of a bundled model, which is laid out as one.

    Args:
        run: its folder, or the name of a bundled model. None: ``runs/default`` where that was made
            from data of the user's own, and otherwise the bundled model that was trained on C-STS.
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
    if run_exists(DEFAULT_RUN, cross=True):
        if open_any_run(DEFAULT_RUN, cross=True).manifest["data"]["source"] != SAMPLE:
            return DEFAULT_RUN
        log.info(
            f"{DEFAULT_RUN} was made from the bundled sample, so the bundled model is used "
            f"(--run {DEFAULT_RUN} to use that run)"
        )
    return bundled("models") / PRETRAINED
