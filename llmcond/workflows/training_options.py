"""Checks of the settings, head, prompts, data and encoder that are to be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from llmcond.config import build
from llmcond.data.datasets import DataOptions, Dataset
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.errors import UserError
from llmcond.finetune.settings import TuneSettings, default_learning_rate, upgrade_setting_names
from llmcond.heads import Recipe, load_recipe
from llmcond.heads.fitted import FittedModule
from llmcond.log import log
from llmcond.prompts import Prompt, load_prompt, prompt_from_json
from llmcond.runs.run_heads import check_head_record
from llmcond.runs.trials import size_recipe
from llmcond.system import require_libraries
from llmcond.tasks import AnyTask, Task, find_task
from llmcond.workflows.extract import read_data
from llmcond.workflows.options.training import HeadTrainingOptions, TeacherOptions, TrainLoraOptions

F = TypeVar("F", bound=FittedModule)
#: A function that reads the data of a task, such as ``read_data``.
DataReader = Callable[[AnyTask[Any], DataOptions], Any]


def check_rated_options(options: TrainLoraOptions, task: AnyTask[Any]) -> None:
    """Raise a UserError for options that only training on rated pairs supports."""
    is_set_by_option = {
        f"--then {options.then}": options.then is not None,
        f"--aspects {options.aspects}": options.aspects is not None,
        "--ensemble": options.ensemble != 1,
        "--teacher": options.select(TeacherOptions) != TeacherOptions(),
    }
    for option, is_set in is_set_by_option.items():
        if is_set:
            raise UserError(
                f"{option} is for rated pairs, and the task {task.name} has none. Leave it out."
            )


def build_tune_settings(options: Mapping[str, Any], recipe: Recipe | None = None) -> TuneSettings:
    """Return the training settings from the options, then a recipe, and then the defaults."""
    defaults: dict[str, Any] = {}
    if recipe is not None:
        defaults = upgrade_setting_names(recipe.finetune)
        build(TuneSettings, defaults, f"{recipe.path}: [finetune]")
    values = {**defaults, **upgrade_setting_names(options)}
    if isinstance(values.get("rank"), int):
        values.setdefault("learning_rate", default_learning_rate(values["rank"]))
    return build(TuneSettings, values, "training")


def load_named_head(
    choice: HeadTrainingOptions,
    recipes: str | None,
    load: Callable[[Path], tuple[F, dict[str, Any]]],
) -> tuple[Recipe, tuple[Prompt, ...], F | None, dict[str, Any]]:
    """Return the recipe and the prompts to train with, and the head to start from.

    A head to start from gives the recipe, and the prompts unless others were named.

    Args:
        choice: the options for the head.
        recipes: the task whose recipes can be named; None: the recipes of rated pairs.
        load: a function that reads a fitted head and its record.

    Returns:
        The recipe, the prompts, the head to start from or None, and its record (empty without one).

    Raises:
        UserError: no head is named, or two.
    """
    prompts = tuple(load_prompt(name) for name in choice.prompt)
    if choice.start is None:
        if choice.head is None:
            raise UserError("no head is named. Give --head (none: the encoder without a head).")
        return load_recipe(choice.head, recipes), prompts, None, {}
    if choice.head is not None or choice.dim is not None:
        raise UserError(
            "a fitted head already has a kind and a size. With --start, leave out --head and --dim."
        )
    folder = Path(choice.start)
    start, record = load(folder)
    record_path = str(folder / "head.json")
    record = check_head_record(record, record_path)
    prompts = prompts or tuple(
        prompt_from_json(prompt_record, record_path) for prompt_record in record["prompts"]
    )
    recipe = replace(
        load_recipe("none", recipes),
        **{key: record["recipe"][key] for key in ("name", "description", "source")},
        kind=start.kind,
        family=start.family,
        settings=start.settings,
    )
    return recipe, prompts, start, record


def choose_head(
    choice: HeadTrainingOptions,
    task: AnyTask[Any],
    load: Callable[[Path], tuple[F, dict[str, Any]]],
    check: Callable[[Recipe], object],
) -> tuple[Recipe, tuple[Prompt, ...], F | None]:
    """Return the head to train for a task without rated pairs.

    Args:
        choice: the options for the head.
        task: the task whose recipes can be named.
        load: a function that reads a fitted head of the task, and its record.
        check: a function that raises a UserError for a recipe that cannot be trained with an
            encoder.

    Returns:
        The recipe, the prompts that were named or that the head to start from was fitted on, and
        the head to start from or None.

    Raises:
        UserError: no head is named, or two; the head cannot be trained; several prompts are named;
            or features are to be subtracted.
    """
    if choice.subtract:
        raise UserError(
            f"nothing can be subtracted in the task {task.name}, because its candidates have no "
            "conditions. Leave out --subtract."
        )
    recipe, prompts, start, _ = load_named_head(choice, task.recipes, load)
    if choice.set:
        recipe = recipe.with_settings(recipe.parse_changes(dict(choice.set), "--set"), "--set")
    if choice.dim is not None:
        recipe = size_recipe(recipe, choice.dim, choice.dim)
    check(recipe)
    if len(prompts) > 1:
        raise UserError(
            f"in the task {task.name}, an encoder is trained with one prompt, but {len(prompts)} "
            "are named. Give one --prompt."
        )
    return recipe, prompts, start


def has_router(prompts: Sequence[Prompt], resolved: ResolvedEncoder) -> bool:
    """Return whether a router weights tokens, inside the encoder or through a prompt."""
    return resolved.identity.routes_inside or any(prompt.has_router for prompt in prompts)


def find_rated_task(name: str | None) -> Task:
    """Return a task of rated pairs by its name.

    Raises:
        UserError: there is no such task, or it has no rated pairs.
    """
    task = find_task(name)
    if not isinstance(task, Task):
        raise UserError(
            f"the task {task.name} ranks candidates, but a cross-encoder is trained on rated pairs "
            "of sentences. Leave out --task, or train an encoder of single texts: llmcond "
            "train-lora."
        )
    return task


def read_rated_dataset(task: Task, options: DataOptions, read: DataReader | None = None) -> Dataset:
    """Read a dataset whose train split has rated rows, by ``read`` or by ``read_data``.

    Raises:
        UserError: train has fewer than two rated rows, or only equal ratings.
    """
    dataset: Dataset = (read or read_data)(task, options)
    train = dataset.splits["train"]
    if int(train.rated.sum()) < 2:
        raise UserError(
            f"{train.file} has {int(train.rated.sum())} rated rows among its {len(train):,}; "
            "training needs rated sentence pairs. Name another --data, or its label column: "
            "--columns label=COLUMN"
        )
    if len(set(train.rating[train.rated].tolist())) < 2:
        raise UserError(
            f"all rated rows of {train.file} have the same rating, so there is nothing to learn."
        )
    return dataset


def resolve_trainable(
    model: str, encoder_options: EncoderOptions, settings: TuneSettings, merge: bool
) -> ResolvedEncoder:
    """Resolve an encoder, and check that it can be trained with the settings.

    Raises:
        UserError: the encoder cannot be trained with them, or a package for training is missing.
    """
    if encoder_options.long_texts == "windows":
        raise UserError(
            "windows are only for frozen encoders, because training reads each text once. Leave "
            "out --long-texts windows, or shorten the texts."
        )
    resolved = resolve(model, replace(encoder_options, runtime="torch"))
    for assumption in resolved.assumed:
        log.info(f"assumed: {assumption}")
    require_libraries("training an encoder", "accelerate", "peft", extra="lora")
    from llmcond.finetune.encoder import check_trainable

    check_trainable(resolved, settings, merge)
    return resolved
