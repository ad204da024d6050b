"""Runs: a run's folder with its manifest, data, features and heads, and predictions from them."""

from llmcond.runs.open import open_any_run, open_run, run_exists
from llmcond.runs.run import (
    Run,
    RunEmbeddingHead,
    RunExistsError,
    RunFittedHead,
    RunHead,
    complete_run,
    create_run,
    dev_score,
    head_name,
    head_record,
    portable_model_name,
)

__all__ = [
    "Run",
    "RunEmbeddingHead",
    "RunExistsError",
    "RunFittedHead",
    "RunHead",
    "complete_run",
    "create_run",
    "dev_score",
    "head_name",
    "head_record",
    "open_any_run",
    "open_run",
    "portable_model_name",
    "run_exists",
]
