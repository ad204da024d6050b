"""Say whether conditions are expected to work on texts, without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmcond.bundled import PRETRAINED
from llmcond.conditions import condition_titles
from llmcond.data.candidates import has_column, read_collection, text_column
from llmcond.display import Displayed
from llmcond.errors import UserError, brief
from llmcond.evaluation.condition_checks import (
    CALIBRATION,
    Calibration,
    ConditionCheck,
    find_calibration,
    sample_texts,
)
from llmcond.log import log
from llmcond.workflows.embed import Embeddings
from llmcond.workflows.options.texts import CheckConditionOptions


@dataclass(frozen=True)
class ConditionChecks(Displayed):
    """What is expected of conditions on some texts.

    Attributes:
        file: where the texts are from.
        texts: how many there are.
        calibration: what turns indicators into an expected accuracy.
        checks: one for each condition.
    """

    file: str
    texts: int
    encoder: str
    prompt: str
    head: str
    seed: int
    calibration: Calibration
    checks: Sequence[ConditionCheck]

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        calibration = {**self.calibration.to_json(), "of_this_model": self.calibration.is_own}
        return {**super().to_json(), "calibration": calibration}

    def _displayed(self) -> Mapping[str, Any]:
        """Return the texts, the model and a row for each condition."""
        facts = {name: getattr(self, name) for name in ("file", "texts", "encoder", "head")}
        titles = condition_titles([one.condition for one in self.checks])
        rows = [
            {"condition": title, "verdict": one.verdict, **one.to_json()["indicators"]}
            for title, one in zip(titles, self.checks, strict=True)
        ]
        return {**facts, "checks": rows}


def check_condition(asked: CheckConditionOptions) -> ConditionChecks:
    """Say whether conditions are expected to work on texts.

    Raises:
        UserError: texts, a column or conditions that are wrong, or no calibration.
        LlmcondError: the encoder fails.
    """
    run_folder, condition, seed = asked.folder(), asked.conditions(), asked.seed
    if any(not one.strip() for one in condition):
        raise UserError("--condition is empty; give a text.")
    twice = [one for i, one in enumerate(condition) if one in condition[:i]]
    if twice:
        raise UserError(f"--condition {brief(str(twice[0]))} is given twice; give it once.")
    calibration = find_calibration(run_folder)
    if calibration is None:
        raise UserError(
            f"neither {run_folder} nor the bundled model has a file {CALIBRATION}, which says what "
            "accuracy to expect. Make one: python scripts/calibrate_conditions.py"
        )
    column = text_column(partial(has_column, asked.texts), asked.text)
    found = read_collection(asked.texts, column)
    given = Embeddings(run_folder, asked.head, asked.prompt, asked.device)
    sample = [found.texts[position] for position in sample_texts(found.texts, seed)]
    vectors = given.of([(text, one) for one in condition for text in sample], found.file)
    checks = [
        ConditionCheck.of(one, own, calibration)
        for one, own in zip(condition, np.split(vectors, len(condition)), strict=True)
    ]
    if not calibration.is_own:
        log.info(
            f"the expected accuracy was calibrated on {PRETRAINED}, not on this run: take it as a "
            "rough guide"
        )
    if not calibration.tells_apart:
        log.warning(
            "the calibration does not rank conditions of other texts better than chance, so do not "
            "rely on the verdicts. Fit it on more conditions: python "
            "scripts/calibrate_conditions.py"
        )
    return ConditionChecks(
        file=found.file,
        texts=len(found.texts),
        encoder=given.encoder.name,
        prompt=given.view.name,
        head=given.head_name,
        seed=seed,
        calibration=calibration,
        checks=checks,
    )
