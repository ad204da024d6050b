"""A run's folder: its manifest, rows, features, heads, and what predicts from them."""

from llmcond.runs.run import (
    Run,
    RunExistsError,
    SavedHead,
    complete_run,
    create_run,
    dev_spearman,
    head_name,
    head_record,
    open_run,
    run_exists,
    where_model,
)

__all__ = [
    "Run",
    "RunExistsError",
    "SavedHead",
    "complete_run",
    "create_run",
    "dev_spearman",
    "head_name",
    "head_record",
    "open_run",
    "run_exists",
    "where_model",
]
