"""Train an encoder on a graph, with a head that maps queries, into a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from llmcond.config import build
from llmcond.data.datasets import DataOptions
from llmcond.encoders import EncoderOptions, ResolvedEncoder
from llmcond.errors import UserError
from llmcond.features.view import View, view_of
from llmcond.files import read_json
from llmcond.finetune.queries import GraphInputs, QueryModel, check_recipe
from llmcond.finetune.settings import TuneSettings, renamed
from llmcond.heads import (
    FittedQueryHead,
    Recipe,
    joint_keys,
    load_query_head,
    load_recipe,
    save_head,
)
from llmcond.heads.base import Fitted
from llmcond.metrics import finite
from llmcond.prompts import Prompt, load_prompt, prompt_from_json
from llmcond.prompts.queries import QueryInputs
from llmcond.runs import complete_run, head_name, head_record
from llmcond.runs.ranking import QueryExamples
from llmcond.runs.run import fitted_on
from llmcond.runs.trials import sized
from llmcond.tasks import RankingTask
from llmcond.tasks.graph import Graph, Known, both_directions
from llmcond.workflows.extract import check_prompts, read_data
from llmcond.workflows.options import HeadChoice, RankingOptions
from llmcond.workflows.rank import evaluate_ranking
from llmcond.workflows.training import (
    Job,
    Kept,
    Parts,
    Trained,
    extract_trained,
    resolve_trainable,
    resolve_trained,
    train,
    tune_settings,
)

if TYPE_CHECKING:
    from llmcond.finetune.build import Trainable


F = TypeVar("F", bound=Fitted)


def train_queries(
    model: str,
    options: EncoderOptions,
    run_folder: Path,
    data: DataOptions,
    choice: HeadChoice,
    settings: Mapping[str, Any],
    merge: bool,
    task: RankingTask[Any],
) -> Trained:
    """Train an encoder's adapters and a head on a graph; see :func:`train_lora`.

    Raises:
        UserError: wrong input, or a head with settings that are of cached features only.
        LlmcondError: the encoder cannot be loaded or trained.
    """
    if choice.subtract:
        raise UserError(
            f"nothing is subtracted in the task {task.name}: candidates have no condition. Leave "
            "out --subtract."
        )
    recipe, prompts, start = chosen(choice, task.name, load_query_head)
    check_recipe(recipe)
    usual = renamed(recipe.finetune)
    build(TuneSettings, usual, f"{recipe.path}: [finetune]")
    tuning = tune_settings(settings, usual)
    dataset = read_data(task, data)
    if not isinstance(dataset, Graph):
        raise UserError(f"an encoder is trained on knowledge graphs, and {task.name} has none.")
    resolved = resolve_trainable(model, options, tuning, merge)
    if not prompts:
        fitting = "separate" if recipe.features == "separate" else resolved.joint_prompt
        prompts = (load_prompt(fitting),)
    check_prompts(prompts, resolved)
    view = view_of(recipe, prompts, subtract=False)
    view.check_texts()
    check_inputs(prompts, resolved)
    made_of = {
        "encoder": resolved.identity.to_json(),
        "data": dataset.digest,
        "prompts": {prompt.name: prompt.digest for prompt in prompts},
        "head": {"kind": recipe.kind, **asdict(recipe.settings)},
        "start": choice.start and read_json(choice.start / "head.json")["weights_sha256"],
        "seed": choice.seed,
        "settings": tuning.to_json(),
        "merge": merge,
    }
    return train(
        _QueryJob(
            model=model,
            resolved=resolved,
            folder=run_folder,
            task=task,
            dataset=dataset,
            settings=tuning,
            head=recipe.name,
            seed=choice.seed,
            merge=merge,
            made_of=made_of,
            recipe=recipe,
            start=start,
            view=view,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueryJob(Job):
    """An encoder of entities and relations, and a head that maps queries and candidates."""

    unit: ClassVar[str] = "triples"
    scored: ClassVar[str] = "queries"
    score: ClassVar[str] = "MRR of a sample"
    metric: ClassVar[str] = "mrr"

    task: RankingTask[Any]
    dataset: Graph
    recipe: Recipe
    start: FittedQueryHead | None
    view: View

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
        return Parts(QueryModel(trainable.engine, recipe, train, self.seed, self.start), train, dev)

    def keep(self, head: FittedQueryHead) -> Kept:
        resolved, view = resolve_trained(self), self.view
        recipe = replace(self.recipe, settings=head.settings)  # with the size that was trained
        run = complete_run(self.folder, resolved, self.dataset, self.task)
        extract_trained(run, resolved, view.prompts)
        name = head_name(recipe.name, view)
        on_dev = finite(QueryExamples(run).on_dev(head, view))
        record = {**head_record(run, view, recipe.to_json()), f"dev_{run.dev_metric}": on_dev}
        save_head(head, run.head_folder(name), record)
        scores = [
            result
            for split in ("dev", "test")
            if len(self.dataset.splits.get(split, ()))
            for result in evaluate_ranking(run, [name], split, RankingOptions())
            if result.name == name
        ]
        return Kept(name, {"prompt": view.name}, scores)


def chosen(
    choice: HeadChoice, task: str, load: Callable[[Path], tuple[F, dict[str, Any]]]
) -> tuple[Recipe, tuple[Prompt, ...], F | None]:
    """Return the recipe, the prompts that were named or that ``start`` was fitted on, and that.

    ``load`` reads a head that was fitted, and its record.

    Raises:
        UserError: no head, or two, or several prompts.
    """
    prompts = tuple(load_prompt(name) for name in choice.prompt)
    start = None
    if choice.start is not None:
        if choice.head is not None or choice.dim is not None:
            raise UserError(
                "a head that was fitted has its kind and size already: with --start, leave out "
                "--head and --dim."
            )
        start, record = load(choice.start)
        where = str(choice.start / "head.json")
        record = fitted_on(record, where)
        prompts = prompts or tuple(prompt_from_json(own, where) for own in record["prompts"])
        recipe = replace(
            load_recipe("none", task),
            **{key: record["recipe"][key] for key in ("name", "description", "source")},
            kind=start.kind,
            family=start.family,
            settings=start.settings,
        )
    elif choice.head is not None:
        recipe = load_recipe(choice.head, task)
    else:
        raise UserError("no head was named. Give --head (none: nothing behind the encoder).")
    if choice.set:
        recipe = recipe.with_settings(recipe.parse_changes(dict(choice.set), "--set"), "--set")
    if choice.dim is not None:
        recipe = sized(recipe, choice.dim, choice.dim)
    if len(prompts) > 1:
        raise UserError(
            f"in the task {task} an encoder is trained with one prompt, and {len(prompts)} were "
            "named. Give one --prompt."
        )
    return recipe, prompts, start


def check_inputs(prompts: tuple[Prompt, ...], resolved: ResolvedEncoder) -> None:
    """Raise a UserError for routers, which weigh the tokens of rated rows only."""
    parts = [part for prompt in prompts for part in (prompt.conditional, prompt.unconditional)]
    if resolved.identity.router == "csr" or any(part.router for part in parts):
        raise UserError(
            "routers are trained on rated pairs only. Leave out --router, and name a --prompt "
            "without one, such as separate."
        )
