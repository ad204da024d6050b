"""Condition-aware text embeddings on frozen encoders.

The public names are imported when they are first used, so that the command line starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcond.lazy import lazy_getattr
from llmcond.version import __version__

if TYPE_CHECKING:
    from llmcond.clustering.result import Clustering, ClusterResult
    from llmcond.commands.analyse import analyse
    from llmcond.commands.annotate import annotate
    from llmcond.commands.bench import bench
    from llmcond.commands.check_condition import check_condition
    from llmcond.commands.cluster import cluster
    from llmcond.commands.compare_prompts import compare_prompts
    from llmcond.commands.complete import complete
    from llmcond.commands.embed import embed
    from llmcond.commands.evaluate import evaluate
    from llmcond.commands.export import export
    from llmcond.commands.extract import extract
    from llmcond.commands.fit_head import fit_head
    from llmcond.commands.push import push
    from llmcond.commands.reply import reply
    from llmcond.commands.serve import serve
    from llmcond.commands.sweep import sweep
    from llmcond.commands.train_cross import train_cross
    from llmcond.commands.train_lora import train_lora
    from llmcond.conditions import Condition
    from llmcond.encoders.encoder import Encoder, load_encoder
    from llmcond.encoders.spec import EncoderInput
    from llmcond.errors import LlmcondError, UserError
    from llmcond.evaluation.results import ComparedResult, Result, Results, SweptResult
    from llmcond.exporting.exported import ExportResult
    from llmcond.heads.estimator import Head
    from llmcond.integrations.sentence_transformers import load_sentence_transformer
    from llmcond.metrics import Estimate
    from llmcond.plugins import register
    from llmcond.runs.completer import Completer, Completion, load_completer
    from llmcond.runs.cross import CrossEncoder, load_cross_encoder
    from llmcond.runs.embedder import Embedder, load_embedder
    from llmcond.runs.features import PairFeatures, load_features
    from llmcond.runs.replies import Candidates, DialogueModel, Reply, Talk, load_dialogue
    from llmcond.search.hits import Hits
    from llmcond.search.index import Index
    from llmcond.serving.server import ServeResult
    from llmcond.tasks import Task
    from llmcond.workflows.account import TrainingResult
    from llmcond.workflows.analyse import AnalysisResult
    from llmcond.workflows.annotate import AnnotationResult
    from llmcond.workflows.bench import Benchmark
    from llmcond.workflows.check_condition import ConditionChecks
    from llmcond.workflows.compare import Comparison
    from llmcond.workflows.complete import Completions
    from llmcond.workflows.embed import EmbedResult
    from llmcond.workflows.extract import ExtractResult
    from llmcond.workflows.fit import FittedResult
    from llmcond.workflows.plan import ExtractionPlan
    from llmcond.workflows.push import PushResult
    from llmcond.workflows.reply import Replies
    from llmcond.workflows.sweep import SweepResult

__all__ = [
    "AnalysisResult",
    "AnnotationResult",
    "Benchmark",
    "Candidates",
    "ClusterResult",
    "Clustering",
    "ComparedResult",
    "Comparison",
    "Completer",
    "Completion",
    "Completions",
    "Condition",
    "ConditionChecks",
    "CrossEncoder",
    "DialogueModel",
    "EmbedResult",
    "Embedder",
    "Encoder",
    "EncoderInput",
    "Estimate",
    "ExportResult",
    "ExtractResult",
    "ExtractionPlan",
    "FittedResult",
    "Head",
    "Hits",
    "Index",
    "LlmcondError",
    "PairFeatures",
    "PushResult",
    "Replies",
    "Reply",
    "Result",
    "Results",
    "ServeResult",
    "SweepResult",
    "SweptResult",
    "Talk",
    "Task",
    "TrainingResult",
    "UserError",
    "__version__",
    "analyse",
    "annotate",
    "bench",
    "check_condition",
    "cluster",
    "compare_prompts",
    "complete",
    "embed",
    "evaluate",
    "export",
    "extract",
    "fit_head",
    "load_completer",
    "load_cross_encoder",
    "load_dialogue",
    "load_embedder",
    "load_encoder",
    "load_features",
    "load_sentence_transformer",
    "push",
    "register",
    "reply",
    "serve",
    "sweep",
    "train_cross",
    "train_lora",
]

#: Where names are that are no verbs; a verb is in the module of its command.
_HOMES = {
    "AnalysisResult": "llmcond.workflows.analyse",
    "AnnotationResult": "llmcond.workflows.annotate",
    "Benchmark": "llmcond.workflows.bench",
    "Candidates": "llmcond.runs.replies",
    "ClusterResult": "llmcond.clustering.result",
    "Clustering": "llmcond.clustering.result",
    "ComparedResult": "llmcond.evaluation.results",
    "Comparison": "llmcond.workflows.compare",
    "Completer": "llmcond.runs.completer",
    "Completion": "llmcond.runs.completer",
    "Completions": "llmcond.workflows.complete",
    "Condition": "llmcond.conditions",
    "ConditionChecks": "llmcond.workflows.check_condition",
    "CrossEncoder": "llmcond.runs.cross",
    "DialogueModel": "llmcond.runs.replies",
    "EmbedResult": "llmcond.workflows.embed",
    "Embedder": "llmcond.runs.embedder",
    "Encoder": "llmcond.encoders.encoder",
    "EncoderInput": "llmcond.encoders.spec",
    "Estimate": "llmcond.metrics",
    "ExportResult": "llmcond.exporting.exported",
    "ExtractResult": "llmcond.workflows.extract",
    "ExtractionPlan": "llmcond.workflows.plan",
    "FittedResult": "llmcond.workflows.fit",
    "Head": "llmcond.heads.estimator",
    "Hits": "llmcond.search.hits",
    "Index": "llmcond.search.index",
    "LlmcondError": "llmcond.errors",
    "PairFeatures": "llmcond.runs.features",
    "PushResult": "llmcond.workflows.push",
    "Replies": "llmcond.workflows.reply",
    "Reply": "llmcond.runs.replies",
    "Result": "llmcond.evaluation.results",
    "Results": "llmcond.evaluation.results",
    "ServeResult": "llmcond.serving.server",
    "SweepResult": "llmcond.workflows.sweep",
    "SweptResult": "llmcond.evaluation.results",
    "Talk": "llmcond.runs.replies",
    "Task": "llmcond.tasks",
    "TrainingResult": "llmcond.workflows.account",
    "UserError": "llmcond.errors",
    "load_completer": "llmcond.runs.completer",
    "load_cross_encoder": "llmcond.runs.cross",
    "load_dialogue": "llmcond.runs.replies",
    "load_embedder": "llmcond.runs.embedder",
    "load_encoder": "llmcond.encoders.encoder",
    "load_features": "llmcond.runs.features",
    "load_sentence_transformer": "llmcond.integrations.sentence_transformers",
    "register": "llmcond.plugins",
}


if not TYPE_CHECKING:  # type checkers would take any name for one of the package
    __getattr__ = lazy_getattr(
        __name__, {name: _HOMES.get(name, f"llmcond.commands.{name}") for name in __all__}
    )


def __dir__() -> list[str]:
    return list(__all__)
