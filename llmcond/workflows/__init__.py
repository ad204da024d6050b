"""The verbs of the command line, as functions. Each works on one run folder."""

from llmcond.data.datasets import DataOptions
from llmcond.workflows.analyse import analyse
from llmcond.workflows.check import check_model
from llmcond.workflows.compare import CompareOptions, Comparison, compare_prompts
from llmcond.workflows.embed import embed_file
from llmcond.workflows.evaluate import evaluate
from llmcond.workflows.extract import extract
from llmcond.workflows.finetune import HeadChoice, train_lora
from llmcond.workflows.fit import fit_head
from llmcond.workflows.push import push_to_hub
from llmcond.workflows.sweep import SweepResult, sweep

__all__ = [
    "CompareOptions",
    "Comparison",
    "DataOptions",
    "HeadChoice",
    "SweepResult",
    "analyse",
    "check_model",
    "compare_prompts",
    "embed_file",
    "evaluate",
    "extract",
    "fit_head",
    "push_to_hub",
    "sweep",
    "train_lora",
]
