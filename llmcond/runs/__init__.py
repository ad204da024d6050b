"""A run's folder: its manifest, data, features, heads, and what predicts from them."""

from llmcond.runs.create import RunExistsError, complete_run, create_run, where_model
from llmcond.runs.run import (
    AnyRun,
    DialogueRun,
    OpenedRun,
    RankingRun,
    Run,
    Saved,
    SavedHead,
    SavedQueryHead,
    SavedRoles,
    dev_score,
    head_name,
    head_record,
    open_any_run,
    open_run,
    run_exists,
)

__all__ = [
    "AnyRun",
    "DialogueRun",
    "OpenedRun",
    "RankingRun",
    "Run",
    "RunExistsError",
    "Saved",
    "SavedHead",
    "SavedQueryHead",
    "SavedRoles",
    "complete_run",
    "create_run",
    "dev_score",
    "head_name",
    "head_record",
    "open_any_run",
    "open_run",
    "run_exists",
    "where_model",
]
