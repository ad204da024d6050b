"""A check of how clearly texts form groups under conditions, without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from llmcond.bundled import DEFAULT_MODEL
from llmcond.conditions import condition_titles
from llmcond.data.datasets import read_collection
from llmcond.display import Displayed
from llmcond.errors import UserError
from llmcond.evaluation.condition_checks import (
    CALIBRATION,
    Calibration,
    ConditionCheck,
    find_calibration,
    sample_texts,
)
from llmcond.log import log
from llmcond.runs.embedder import EmbeddingModel
from llmcond.runs.languages import report_foreign_texts
from llmcond.workflows.options.texts import CheckConditionOptions


@dataclass(frozen=True)
class ConditionChecks(Displayed):
    """Checks of how clearly some texts form groups under conditions.

    Attributes:
        file: the file of the texts, or ``rows in memory``.
        texts: the number of texts.
        encoder: the name of the encoder.
        prompt: the name of the prompt.
        head: the name of the head.
        seed: the random seed that sampled the texts.
        calibration: the function from indicators to an expected accuracy.
        checks: one check for each condition.

    Examples:
        >>> import llmcond
        >>> texts = ["A red car.", "A blue bicycle.", "Two dogs run.", "A cat sleeps."]
        >>> result = llmcond.check_condition(texts=texts, condition=["the colour"])
        >>> result.texts, [check.condition for check in result.checks]
        (4, ['the colour'])
    """

    file: str
    texts: int
    encoder: str
    prompt: str
    head: str
    seed: int
    calibration: Calibration
    checks: Sequence[ConditionCheck]

    @override
    def to_json(self) -> dict[str, Any]:
        calibration = {**self.calibration.to_json(), "of_this_model": self.calibration.is_of_model}
        return {**super().to_json(), "calibration": calibration}

    @override
    def _displayed(self) -> Mapping[str, Any]:
        facts = {name: getattr(self, name) for name in ("file", "texts", "encoder", "head")}
        titles = condition_titles([check.condition for check in self.checks])
        rows = [
            {"condition": title, "verdict": check.verdict, **check.to_json()["indicators"]}
            for title, check in zip(titles, self.checks, strict=True)
        ]
        return {**facts, "checks": rows}


def check_condition(options: CheckConditionOptions) -> ConditionChecks:
    """Check how clearly texts form groups under conditions, without labels.

    Raises:
        UserError: the texts, a column or a condition are invalid, or there is no calibration.
        LlmcondError: the encoder fails.
    """
    run_folder, conditions, seed = options.resolve_folder(), options.conditions(), options.seed
    calibration = find_calibration(run_folder)
    if calibration is None:
        raise UserError(
            f"neither {run_folder} nor the bundled model has a file {CALIBRATION}, which gives the "
            "accuracy to expect. Make one: python scripts/calibrate_conditions.py"
        )
    collection = read_collection(options.texts, options.text, read=options.read_options())
    embeddings = EmbeddingModel.find(
        run_folder, options.head, options.prompt, device=options.device
    )
    report_foreign_texts(collection.texts, embeddings.encoder.resolved.checkpoint)
    sample = [collection.texts[position] for position in sample_texts(collection.texts, seed)]
    vectors = embeddings.embed(
        [(text, condition) for condition in conditions for text in sample], collection.file
    )
    checks = [
        ConditionCheck.of(condition, condition_vectors, calibration)
        for condition, condition_vectors in zip(
            conditions, np.split(vectors, len(conditions)), strict=True
        )
    ]
    if not calibration.is_of_model:
        log.info(
            f"the expected accuracy was calibrated on {DEFAULT_MODEL}, not on this run, so it is "
            "only "
            "a rough guide"
        )
    if not calibration.ranks_conditions:
        log.warning(
            "the calibration does not rank conditions of other texts better than chance, so do not "
            "rely on the verdicts. Calibrate on more conditions: python "
            "scripts/calibrate_conditions.py"
        )
    return ConditionChecks(
        file=collection.file,
        texts=len(collection.texts),
        encoder=embeddings.encoder.name,
        prompt=embeddings.view.name,
        head=embeddings.head.reference,
        seed=seed,
        calibration=calibration,
        checks=checks,
    )
