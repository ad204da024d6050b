"""An ensemble of adapters on one base: trained one after the other, used as one encoder.

Each member is trained by a seed of its own, in a folder of its own, which is a trained encoder by
itself. Together they are one whose vector is theirs side by side.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmcond.encoders import ResolvedEncoder
from llmcond.encoders.checkpoints.adapter import member_folders, read_tuned, write_tuned
from llmcond.errors import LlmcondError, UserError
from llmcond.files import check_writable
from llmcond.finetune.model import HeadPlan
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import FittedHead, load_head
from llmcond.heads.pairs import Fit
from llmcond.log import log
from llmcond.progress import duration
from llmcond.runs.saved import chosen_on_dev
from llmcond.workflows.account import STATE, TrainingResult, finished
from llmcond.workflows.trainable import has_router
from llmcond.workflows.training import RatedJob, train, write_account

#: What the account of an ensemble has of each member: keys that begin so.
_TOLD = ("seed", "steps", "best_step", "dev_", "then")


def check_ensemble(
    count: int, plan: HeadPlan, resolved: ResolvedEncoder, settings: TuneSettings, merge: bool
) -> None:
    """Refuse what cannot be an ensemble.

    Raises:
        UserError: a head behind the members, no adapters, a router, or vectors that are not of
            unit length.
    """
    if count == 1:
        return
    if not plan.recipe.is_identity:
        raise UserError(
            f"an ensemble is of encoders alone, and the head is {plan.recipe.name}. Give --head "
            "none, and fit the head afterwards: llmcond fit-head."
        )
    if has_router(plan.prompts, resolved):
        raise UserError(
            "an ensemble takes no routers. Leave out --router, and name a --prompt without one, "
            "such as concat-cond-sent."
        )
    if settings.full or merge:
        raise UserError(
            "an ensemble is of adapters on one base. Leave out --merge, and give --rank a number."
        )
    if not resolved.identity.normalize:
        raise UserError("members of an ensemble have vectors of unit length. Add --normalize.")


def train_ensemble(job: RatedJob, members: Sequence[RatedJob]) -> TrainingResult:
    """Train the members one after the other, or go on where that was stopped.

    Each goes on as :func:`llmcond.workflows.training.train` does, and is not trained again once it
    has ended.

    Args:
        job: of the ensemble: its folder, and all that made it.
        members: their own, in the order of their seeds; their folders are set here.

    Raises:
        UserError: as that function.
    """
    done = finished(job.folder, job.made_of)
    if done is not None:
        return TrainingResult(done)
    check_writable(job.folder / STATE / "state.safetensors")
    # It says that the folder is an ensemble which is being trained.
    (job.folder / STATE).mkdir(parents=True, exist_ok=True)
    folders = member_folders(job.folder, len(members))
    summaries = []
    for number, (member, folder) in enumerate(zip(members, folders, strict=True), start=1):
        log.info(f"member {number} of {len(members)}, seed {member.seed}:")
        summaries.append(train(replace(member, folder=folder)).to_json())
    from accelerate import PartialState

    if not PartialState().is_main_process:
        return TrainingResult({})
    return TrainingResult(_together(job, summaries))


def _together(job: RatedJob, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the folder one encoder, and a run with its features and scores."""
    folders = member_folders(job.folder, len(members))
    tuned = read_tuned(folders[0])
    if tuned is None:
        raise LlmcondError(f"{folders[0]} has lost its encoder.json. Train into another --run.")
    write_tuned(job.folder, replace(tuned, members=len(members)))
    selected_on = "dev" if chosen_on_dev(members[0]) else None
    record = {"selected_on": selected_on, **job.about()}
    own, _ = load_head(folders[0] / "heads" / members[0]["head"])
    module = own.family(own.settings, len(members) * own.dim_in).finished()
    head = FittedHead(own.kind, own.family, module, job.seed, Fit(record))
    log.info(f"the ensemble of {len(members)}:")
    kept, seconds = job.keep(head), sum(one["seconds"] for one in members)
    weights = members[0]["weights"]
    summary = {
        "run": str(job.folder),
        "encoder": job.resolved.checkpoint.name,
        "head": kept.name,
        **kept.takes,
        "seed": job.seed,
        "weights": {**weights, "trained": len(members) * weights["trained"]},
        "steps": sum(one["steps"] for one in members),
        "seconds": round(seconds, 1),
        **job.about(),
        "members": [
            {key: value for key, value in one.items() if key.startswith(_TOLD)} for one in members
        ],
        "scores": [result.to_json() for result in kept.scores],
    }
    write_account(job, kept, summary, {})
    for folder in folders:  # the run has what all of them give together
        shutil.rmtree(folder / "features", ignore_errors=True)
    log.info(f"{kept.name}: {len(members)} members in {duration(seconds)} -> {job.folder}")
    return summary
