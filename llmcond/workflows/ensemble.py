"""Training an ensemble of adapters on one base encoder, which is used as one encoder.

Each member is trained with its own seed in its own folder, and is a complete trained encoder. The
ensemble's vector is the concatenation of the members' vectors.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmcond.encoders import ResolvedEncoder
from llmcond.encoders.checkpoints.adapter import (
    member_folders,
    read_encoder_record,
    write_encoder_record,
)
from llmcond.errors import LlmcondError, UserError
from llmcond.files import check_writable
from llmcond.finetune.model import HeadConfig
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import FittedHead, load_head
from llmcond.heads.pairs import FitReport
from llmcond.log import log
from llmcond.progress import format_duration
from llmcond.runs.run_heads import is_selected_on_dev
from llmcond.workflows.training import RatedJob, train, write_training_record
from llmcond.workflows.training_options import has_router
from llmcond.workflows.training_record import STATE, TrainingResult, load_finished_training

#: Prefixes of the keys in a member's summary that the ensemble's training record repeats.
_REPEATED_KEYS = ("seed", "steps", "best_step", "dev_", "then")


def check_ensemble(
    count: int, plan: HeadConfig, resolved: ResolvedEncoder, settings: TuneSettings, merge: bool
) -> None:
    """Check that the options allow an ensemble, if there is more than one member.

    Raises:
        UserError: there is a head behind the encoder, no adapter, a router, or vectors without
            unit length.
    """
    if count == 1:
        return
    if not plan.recipe.is_identity:
        raise UserError(
            f"an ensemble has no head while it is trained, but the head is {plan.recipe.name}. "
            "Give --head none, and fit the head afterwards: llmcond fit-head."
        )
    if has_router(plan.prompts, resolved):
        raise UserError(
            "an ensemble does not support routers. Leave out --router, and name a --prompt without "
            "one, such as concat-cond-sent."
        )
    if settings.full or merge:
        raise UserError(
            "an ensemble consists of adapters on one base. Leave out --merge, and give --rank a "
            "number."
        )
    if not resolved.identity.normalize:
        raise UserError("members of an ensemble need vectors of unit length. Add --normalize.")


def train_ensemble(job: RatedJob, members: Sequence[RatedJob]) -> TrainingResult:
    """Train the members one after the other, or continue where the training was stopped.

    Each member continues as in ``llmcond.workflows.training.train``, and a finished member is not
    trained again.

    Args:
        job: the ensemble's job, with its folder and its training configuration.
        members: the members' jobs, in the order of their seeds; this function sets their folders.

    Raises:
        UserError: as ``train``.
    """
    summary = load_finished_training(job.folder, job.config)
    if summary is not None:
        return TrainingResult(summary)
    check_writable(job.folder / STATE / "state.safetensors")
    # This folder marks an ensemble whose training is not finished.
    (job.folder / STATE).mkdir(parents=True, exist_ok=True)
    folders = member_folders(job.folder, len(members))
    summaries = []
    for number, (member, folder) in enumerate(zip(members, folders, strict=True), start=1):
        log.info(f"member {number} of {len(members)}, seed {member.seed}:")
        summaries.append(train(replace(member, folder=folder)).to_json())
    from accelerate import PartialState

    if not PartialState().is_main_process:
        return TrainingResult({})
    return TrainingResult(_combine_members(job, summaries))


def _combine_members(job: RatedJob, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the ensemble's folder one encoder, and a run with its features and scores."""
    folders = member_folders(job.folder, len(members))
    tuned = read_encoder_record(folders[0])
    if tuned is None:
        raise LlmcondError(f"{folders[0]} lacks encoder.json. Train into another --run.")
    write_encoder_record(job.folder, replace(tuned, members=len(members)))
    selected_on = "dev" if is_selected_on_dev(members[0]) else None
    record = {"selected_on": selected_on, **job.record_fields()}
    member_head, _ = load_head(folders[0] / "heads" / members[0]["head"])
    module = member_head.family(member_head.settings, len(members) * member_head.dim_in).freeze()
    head = FittedHead(member_head.kind, member_head.family, module, job.seed, FitReport(record))
    log.info(f"the ensemble of {len(members)}:")
    trained_head, seconds = job.save(head), sum(member["seconds"] for member in members)
    weights = members[0]["weights"]
    summary = {
        "run": str(job.folder),
        "encoder": job.resolved.checkpoint.name,
        "head": trained_head.name,
        **trained_head.takes,
        "seed": job.seed,
        "weights": {**weights, "trained": len(members) * weights["trained"]},
        "steps": sum(member["steps"] for member in members),
        "seconds": round(seconds, 1),
        **job.record_fields(),
        "members": [
            {key: value for key, value in member.items() if key.startswith(_REPEATED_KEYS)}
            for member in members
        ],
        "scores": [result.to_json() for result in trained_head.scores],
    }
    write_training_record(job, trained_head, summary, {})
    for folder in folders:  # the run has the features of the whole ensemble
        shutil.rmtree(folder / "features", ignore_errors=True)
    log.info(
        f"{trained_head.name}: {len(members)} members in {format_duration(seconds)} -> {job.folder}"
    )
    return summary
