"""The public names of the package, one per line, for type checkers and editors.

``__init__.py`` reads this file too, and imports a name when it is first used. The names include the
Python functions of commands, such as ``embed = as_function(Embed)`` in ``commands/texts.py``.
"""

from llmcond.base.arrays import quantize_embeddings as quantize_embeddings
from llmcond.base.errors import LlmcondError as LlmcondError
from llmcond.base.errors import UserError as UserError
from llmcond.base.metrics import Estimate as Estimate
from llmcond.base.package import __version__ as __version__
from llmcond.base.package import register as register
from llmcond.base.text import Condition as Condition
from llmcond.clustering import Clustering as Clustering
from llmcond.clustering import ClusterResult as ClusterResult
from llmcond.commands.encode import bench as bench
from llmcond.commands.encode import extract as extract
from llmcond.commands.score import analyse as analyse
from llmcond.commands.score import compare as compare
from llmcond.commands.score import compare_prompts as compare_prompts
from llmcond.commands.score import complete as complete
from llmcond.commands.score import evaluate as evaluate
from llmcond.commands.score import reply as reply
from llmcond.commands.search import serve as serve
from llmcond.commands.texts import annotate as annotate
from llmcond.commands.texts import answers as answers
from llmcond.commands.texts import check_condition as check_condition
from llmcond.commands.texts import cluster as cluster
from llmcond.commands.texts import embed as embed
from llmcond.commands.texts import explain as explain
from llmcond.commands.train import export as export
from llmcond.commands.train import fit_head as fit_head
from llmcond.commands.train import push as push
from llmcond.commands.train import sweep as sweep
from llmcond.commands.train import sweep_lora as sweep_lora
from llmcond.commands.train import train_cross as train_cross
from llmcond.commands.train import train_lora as train_lora
from llmcond.encoders.encoder import Encoder as Encoder
from llmcond.encoders.encoder import load_encoder as load_encoder
from llmcond.encoders.spec import EncoderInput as EncoderInput
from llmcond.evaluation.results import Result as Result
from llmcond.evaluation.results import Results as Results
from llmcond.evaluation.results import Subset as Subset
from llmcond.heads.estimator import Head as Head
from llmcond.integrations.export import ExportResult as ExportResult
from llmcond.integrations.sentence_transformers import (
    load_sentence_transformer as load_sentence_transformer,
)
from llmcond.kinds.dialogue.reply import Candidates as Candidates
from llmcond.kinds.dialogue.reply import DialogueModel as DialogueModel
from llmcond.kinds.dialogue.reply import DialogueState as DialogueState
from llmcond.kinds.dialogue.reply import Replies as Replies
from llmcond.kinds.dialogue.reply import Reply as Reply
from llmcond.kinds.dialogue.reply import load_dialogue as load_dialogue
from llmcond.kinds.ranking.complete import Completer as Completer
from llmcond.kinds.ranking.complete import Completion as Completion
from llmcond.kinds.ranking.complete import Completions as Completions
from llmcond.kinds.ranking.complete import load_completer as load_completer
from llmcond.kinds.rated import Task as Task
from llmcond.runs.cross import CrossEncoder as CrossEncoder
from llmcond.runs.cross import load_cross_encoder as load_cross_encoder
from llmcond.runs.embedder import Embedder as Embedder
from llmcond.runs.embedder import load_embedder as load_embedder
from llmcond.runs.examples import PairFeatures as PairFeatures
from llmcond.runs.examples import load_features as load_features
from llmcond.runs.similarity import ConditionExplanation as ConditionExplanation
from llmcond.runs.similarity import Explanation as Explanation
from llmcond.search.index import Index as Index
from llmcond.search.query import Hits as Hits
from llmcond.serving.server import ServeResult as ServeResult
from llmcond.workflows.annotate import AnnotationResult as AnnotationResult
from llmcond.workflows.answers import AnswersResult as AnswersResult
from llmcond.workflows.bench import Benchmark as Benchmark
from llmcond.workflows.check import ConditionChecks as ConditionChecks
from llmcond.workflows.compare import Comparison as Comparison
from llmcond.workflows.compare import SystemComparison as SystemComparison
from llmcond.workflows.embed import EmbedResult as EmbedResult
from llmcond.workflows.evaluate import AnalysisResult as AnalysisResult
from llmcond.workflows.extract import ExtractionPlan as ExtractionPlan
from llmcond.workflows.extract import ExtractResult as ExtractResult
from llmcond.workflows.fit import FittedResult as FittedResult
from llmcond.workflows.fit import SweepResult as SweepResult
from llmcond.workflows.push import PushResult as PushResult
from llmcond.workflows.sweep_lora import LoraSweepResult as LoraSweepResult
from llmcond.workflows.training_record import TrainingResult as TrainingResult
