"""What is asked to be trained: settings, head, prompts, data and encoder, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from llmcond.config import build
from llmcond.data.datasets import DataOptions, Dataset
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.loading.quantization import require
from llmcond.errors import UserError
from llmcond.finetune.settings import TuneSettings, renamed, usual_rate
from llmcond.heads import Recipe, load_recipe
from llmcond.heads.base import Fitted
from llmcond.log import log
from llmcond.prompts import Prompt, load_prompt, prompt_from_json
from llmcond.runs.saved import fitted_on
from llmcond.runs.trials import sized
from llmcond.tasks import AnyTask, Task, find_task
from llmcond.workflows.extract import read_data
from llmcond.workflows.options.training import HeadChoice, TeacherOptions, TrainLoraOptions

F = TypeVar("F", bound=Fitted)


def refuse_rated_options(asked: TrainLoraOptions, task: AnyTask[Any]) -> None:
    """Raise a UserError for options that only training on rated pairs takes."""
    given = {
        f"--then {asked.then}": asked.then is not None,
        f"--aspects {asked.aspects}": asked.aspects is not None,
        "--ensemble": asked.ensemble != 1,
        "--teacher": asked.part(TeacherOptions) != TeacherOptions(),
    }
    for option, is_given in given.items():
        if is_given:
            raise UserError(
                f"{option} is for rated pairs, and the task {task.name} has none. Leave it out."
            )


def tune_settings(given: Mapping[str, Any], recipe: Recipe | None = None) -> TuneSettings:
    """Return the settings that were given, else those of a recipe, else the defaults."""
    usual: dict[str, Any] = {}
    if recipe is not None:
        usual = renamed(recipe.finetune)
        build(TuneSettings, usual, f"{recipe.path}: [finetune]")
    values = {**usual, **renamed(given)}
    if isinstance(values.get("rank"), int):
        values.setdefault("learning_rate", usual_rate(values["rank"]))
    return build(TuneSettings, values, "training")


def named_head(
    choice: HeadChoice, recipes: str | None, load: Callable[[Path], tuple[F, dict[str, Any]]]
) -> tuple[Recipe, tuple[Prompt, ...], F | None, dict[str, Any]]:
    """Return the recipe that was named, the prompts, the head to start from, and its record.

    With a head to start from they are its own, unless prompts were named. The record is empty where
    there is none.

    Args:
        choice: what the user named.
        recipes: the task whose recipes are meant; None: those of rated pairs.
        load: reads a head that was fitted, and its record.

    Raises:
        UserError: no head, or two.
    """
    prompts = tuple(load_prompt(name) for name in choice.prompt)
    if choice.start is None:
        if choice.head is None:
            raise UserError("no head was named. Give --head (none: nothing behind the encoder).")
        return load_recipe(choice.head, recipes), prompts, None, {}
    if choice.head is not None or choice.dim is not None:
        raise UserError(
            "a head that was fitted has its kind and size already: with --start, leave out "
            "--head and --dim."
        )
    folder = Path(choice.start)
    start, record = load(folder)
    where = str(folder / "head.json")
    record = fitted_on(record, where)
    prompts = prompts or tuple(prompt_from_json(own, where) for own in record["prompts"])
    recipe = replace(
        load_recipe("none", recipes),
        **{key: record["recipe"][key] for key in ("name", "description", "source")},
        kind=start.kind,
        family=start.family,
        settings=start.settings,
    )
    return recipe, prompts, start, record


def chosen_head(
    choice: HeadChoice,
    task: AnyTask[Any],
    load: Callable[[Path], tuple[F, dict[str, Any]]],
    check: Callable[[Recipe], object],
) -> tuple[Recipe, tuple[Prompt, ...], F | None]:
    """Return the recipe, the prompts that were named or that ``start`` was fitted on, and that.

    Args:
        choice: what the user named.
        task: whose recipes are meant, one without rated pairs.
        load: reads a head of that task that was fitted, and its record.
        check: raises a UserError for a recipe that cannot be trained with an encoder.

    Raises:
        UserError: no head, or two, one that cannot be trained, several prompts, or subtraction.
    """
    if choice.subtract:
        raise UserError(
            f"nothing is subtracted in the task {task.name}: what is ranked has no condition. "
            "Leave out --subtract."
        )
    recipe, prompts, start, _ = named_head(choice, task.recipes, load)
    if choice.set:
        recipe = recipe.with_settings(recipe.parse_changes(dict(choice.set), "--set"), "--set")
    if choice.dim is not None:
        recipe = sized(recipe, choice.dim, choice.dim)
    check(recipe)
    if len(prompts) > 1:
        raise UserError(
            f"in the task {task.name} an encoder is trained with one prompt, and {len(prompts)} "
            "were named. Give one --prompt."
        )
    return recipe, prompts, start


def has_router(prompts: Sequence[Prompt], resolved: ResolvedEncoder) -> bool:
    """Return whether a router weighs tokens, inside the encoder or by a prompt."""
    return resolved.identity.routes_inside or any(prompt.routes for prompt in prompts)


def check_unrouted(prompts: Sequence[Prompt], resolved: ResolvedEncoder) -> None:
    """Raise a UserError for routers, which weigh the tokens of rated rows only."""
    if has_router(prompts, resolved):
        raise UserError(
            "routers are trained on rated pairs only. Leave out --router, and name a --prompt "
            "without one, such as separate."
        )


def rated_task(name: str | None) -> Task:
    """Return a task by its name; a UserError unless it has rated pairs."""
    task = find_task(name)
    if not isinstance(task, Task):
        raise UserError(
            f"the task {task.name} ranks candidates, and this trains on rated pairs of sentences. "
            "Leave out --task, or train an encoder of each text: llmcond train-lora."
        )
    return task


def rated_dataset(task: Task, data: DataOptions) -> Dataset:
    """Read a data set whose rows of train are rated.

    Raises:
        UserError: they are not, or all alike.
    """
    dataset = read_data(task, data)
    train = dataset.splits["train"]
    if int(train.rated.sum()) < 2:
        raise UserError(
            f"{train.file} has {int(train.rated.sum())} rated rows among its {len(train):,}; "
            "training needs pairs of sentences with ratings. Name another --data, or its label "
            "column: --columns label=COLUMN"
        )
    if len(set(train.rating[train.rated].tolist())) < 2:
        raise UserError(
            f"all rated rows of {train.file} have the same rating, so there is nothing to learn."
        )
    return dataset


def resolve_trainable(
    model: str, options: EncoderOptions, settings: TuneSettings, merge: bool
) -> ResolvedEncoder:
    """Find an encoder that can be trained by some settings.

    Raises:
        UserError: it cannot, or the packages that train are not installed.
    """
    if options.long_texts == "windows":
        raise UserError(
            "windows are for frozen encoders: training reads each text once. Leave out "
            "--long-texts windows, or shorten the texts."
        )
    resolved = resolve(model, replace(options, runtime="torch"))
    for assumption in resolved.assumed:
        log.info(f"assumed: {assumption}")
    require("training an encoder", "accelerate", "peft", extra="lora")
    from llmcond.finetune.build import check_trainable

    check_trainable(resolved, settings, merge)
    return resolved
