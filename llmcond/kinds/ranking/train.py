"""Train an encoder on a graph, with a head that maps queries, into a run of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.errors import UserError
from llmcond.features.view import view_of
from llmcond.kinds.ranking.arrays import joint_keys
from llmcond.kinds.ranking.graph import Graph, Known, both_directions
from llmcond.kinds.ranking.heads import FittedQueryHead, load_query_head
from llmcond.kinds.ranking.inputs import QueryInputs
from llmcond.kinds.ranking.model import GraphInputs, QueryModel, check_recipe
from llmcond.kinds.ranking.task import RankingTask
from llmcond.prompts import load_prompt
from llmcond.runs.trials import sized
from llmcond.workflows.account import TrainingResult, made_of
from llmcond.workflows.extract import check_prompts, read_data
from llmcond.workflows.options.training import TrainLoraOptions
from llmcond.workflows.trainable import (
    check_unrouted,
    chosen_head,
    refuse_rated_options,
    resolve_trainable,
    tune_settings,
)
from llmcond.workflows.training import Parts, RankingJob, train

if TYPE_CHECKING:
    from llmcond.finetune.build import Trainable


def train_queries(asked: TrainLoraOptions, task: RankingTask[Any]) -> TrainingResult:
    """Train an encoder's adapters and a head on a graph; see :func:`train_lora`.

    Raises:
        UserError: wrong input, or a head with settings that are of cached features only.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    refuse_rated_options(asked, task)
    recipe, prompts, start = chosen_head(asked, task, load_query_head, check_recipe)
    tuning = tune_settings(asked.tune_settings(), recipe)
    dataset = read_data(task, asked.data_options())
    if not isinstance(dataset, Graph):
        raise UserError(f"an encoder is trained on knowledge graphs, and {task.name} has none.")
    model, merge = asked.model, asked.merge
    resolved = resolve_trainable(model, asked.encoder_options(), tuning, merge)
    if not prompts:
        fitting = "separate" if recipe.features == "separate" else resolved.joint_prompt
        prompts = (load_prompt(fitting),)
    check_prompts(prompts, resolved, task)
    view = view_of(recipe, prompts, subtract=False)
    view.check_texts()
    check_unrouted(prompts, resolved)
    return train(
        _QueryJob(
            model=model,
            resolved=resolved,
            folder=Path(asked.run),
            task=task,
            dataset=dataset,
            settings=tuning,
            head=recipe.name,
            seed=asked.seed,
            merge=merge,
            made_of=made_of(resolved, dataset, prompts, recipe, asked, tuning, merge),
            recipe=recipe,
            start=start,
            view=view,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueryJob(RankingJob):
    """An encoder of entities and relations, and a head that maps queries and candidates."""

    unit: ClassVar[str] = "triples"
    scored: ClassVar[str] = "queries"
    of_sample: ClassVar[bool] = True

    task: RankingTask[Any]
    dataset: Graph
    start: FittedQueryHead | None

    def parts(self, trainable: Trainable) -> Parts:
        graph, (prompt,) = self.dataset, self.view.prompts
        texts = self.task.texts(graph)
        inputs, tokenizer = QueryInputs(texts, prompt), trainable.tokenizer
        joint = self.view.features == "joint"
        if joint:
            inputs.check_differ()
        directions = both_directions(graph.splits["train"], graph.n_relations)
        train = GraphInputs(
            triples=graph.splits["train"],
            entities=tokenizer(inputs.candidates),
            relations=tokenizer(inputs.conditions) if self.view.conditioned else [],
            known=Known(directions, graph.n_entities),
            n_relations=graph.n_relations,
            joint=tokenizer(inputs.joint) if joint else (),
            joint_of=joint_keys(texts.asked[:, 0], texts.asked[:, 1], graph.n_relations),
        )
        dev = None
        if len(graph.splits.get("dev", ())):
            dev = replace(train, triples=graph.splits["dev"], known=Known(graph))
        recipe = self.recipe
        if self.start is None:
            recipe = sized(recipe, None, trainable.engine.dim)
        metric = self.task.main_metric
        model = QueryModel(trainable.engine, recipe, train, self.seed, self.start, metric)
        return Parts(model, train, dev)
