"""A run's folder: its manifest, data, features, heads, and what predicts from them."""

from llmcond.runs.create import RunExistsError, complete_run, create_run, where_model
from llmcond.runs.open import open_any_run, open_run, run_exists
from llmcond.runs.run import AnyRun, head_record
from llmcond.runs.saved import (
    Saved,
    SavedEmbeddingHead,
    SavedHead,
    SavedQueryHead,
    SavedRoles,
    dev_score,
    head_name,
)
from llmcond.runs.task_runs import DialogueRun, RankingRun, Run, as_rated

__all__ = [
    "AnyRun",
    "DialogueRun",
    "RankingRun",
    "Run",
    "RunExistsError",
    "Saved",
    "SavedEmbeddingHead",
    "SavedHead",
    "SavedQueryHead",
    "SavedRoles",
    "as_rated",
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
