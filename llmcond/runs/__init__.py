"""A run's folder: its manifest, data, features, heads, and what predicts from them."""

from llmcond.runs.run import (
    AnyRun,
    RankingRun,
    Run,
    RunExistsError,
    Saved,
    SavedHead,
    SavedQueryHead,
    complete_run,
    create_run,
    dev_score,
    head_name,
    head_record,
    open_any_run,
    open_run,
    run_exists,
    where_model,
)

__all__ = [
    "AnyRun",
    "RankingRun",
    "Run",
    "RunExistsError",
    "Saved",
    "SavedHead",
    "SavedQueryHead",
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
