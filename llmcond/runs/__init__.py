"""Runs: a run's folder with its manifest, data, features and heads, and predictions from them."""

from llmcond.runs.create import RunExistsError, complete_run, create_run
from llmcond.runs.manifest import portable_model_name
from llmcond.runs.open import open_any_run, open_run, run_exists
from llmcond.runs.run import AnyRun, head_record
from llmcond.runs.run_heads import RunEmbeddingHead, RunFittedHead, RunHead, dev_score, head_name
from llmcond.runs.task_runs import Run

__all__ = [
    "AnyRun",
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
