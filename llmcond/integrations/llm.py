"""A plug-in of the program ``llm``: embedding models with one condition each.

``llm llmcond add places "the place"`` registers a condition. Then ``llm embed-multi tickets -m
places ...`` embeds texts under it. llm imports this module whenever it starts, so that modules that
take long to import are imported in functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import llm

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.files import read_json, write_json

if TYPE_CHECKING:
    from llmcond.integrations.conditioned import ConditionedModel

#: The model that needs no registration. A test computes its fingerprint.
_READY: dict[str, Any] = {
    "condition": "the topic",
    "values": [],
    "model": "minilm-conditions",
    "head": "none@concat-cond-sent+c",
    "truncate_dim": None,
    "fingerprint": "9b92ecadf855aff7f086bae132f14dcf",
}


class ConditionalModel(llm.EmbeddingModel):  # type: ignore[misc]  # llm is not checked
    """An embedding model of llm with one condition.

    llm stores the id with each collection. It contains the beginning of the fingerprint, so that
    two models whose vectors differ never have the same id.

    Attributes:
        name: The name that the condition was registered under.
        settings: The output of ``ConditionedModel.to_json``.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name, self.settings = name, settings
        self.model_id = f"llmcond/{name}/{settings['fingerprint'][:12]}"

    def __str__(self) -> str:
        """Return the id and the condition, as ``llm embed-models`` lists them."""
        return f"llmcond: {self.model_id} ({self.settings['condition']})"

    @cached_property
    def model(self) -> ConditionedModel:
        """The model, which is found when the first text is embedded."""
        from llmcond.integrations.conditioned import ConditionedModel

        return ConditionedModel.from_json(self.settings)

    def embed_batch(self, items: Iterable[str], *, key: str | None = None) -> Iterator[list[float]]:
        """Embed texts under the condition.

        Args:
            items: n texts.
            key: Not used, as there is no server.

        Yields:
            The vector of each text, as ``Embedder.encode`` returns it.

        Raises:
            CommandError: As ``ConditionedModel.from_json`` and ``Embedder.encode``.
        """
        try:
            yield from self.model.embed(items).tolist()
        except LlmcondError as error:
            raise CommandError(str(error)) from error


class CommandError(UserError, click.ClickException):
    """An error of llmcond that llm prints in one line."""


@llm.hookimpl  # type: ignore[untyped-decorator]  # llm is not checked
def register_embedding_models(register: Any) -> None:
    """Register all models. A name is an alias of the model that was last registered under it."""
    models = _read_models()
    latest = {model.name: model for model in models}
    for model in models:
        register(model, aliases=[model.name] if latest[model.name] is model else [])


@llm.hookimpl  # type: ignore[untyped-decorator]  # llm is not checked
def register_commands(cli: click.Group) -> None:
    """Add the commands ``llm llmcond add``, ``list`` and ``remove``."""
    cli.add_command(commands)


@click.group("llmcond")
def commands() -> None:
    """Register conditions, under which llm embeds texts."""


@commands.command("add")
@click.argument("name")
@click.argument("condition")
@click.option("--values", default="", help="example values, separated by commas")
@click.option("--model", help="run, bundled model, or OWNER/NAME on the hub")
@click.option("--head", help="head of the model")
@click.option("--truncate-dim", type=int, help="number of leading dimensions to keep")
def add_condition(name: str, condition: str, values: str, **options: Any) -> None:
    """Register CONDITION under NAME, for example: places "the place".

    CONDITION may have several wordings, separated by |. Collections that were created under an
    earlier condition of the same name keep that condition.
    """
    from llmcond.base.text import Condition
    from llmcond.integrations.conditioned import ConditionedModel

    known = llm.get_embedding_model_aliases().get(name)
    if not re.fullmatch(r"[\w.-]+", name) or (known and not isinstance(known, ConditionalModel)):
        raise CommandError(
            f"the name {name!r} is that of another model, or has other characters than letters, "
            "digits, '-', '_' and '.'. Choose another name."
        )
    try:
        model = ConditionedModel(Condition(condition, values) if values else condition, **options)
        dim = model.embedder.dim
    except LlmcondError as error:
        raise CommandError(str(error)) from error
    added = ConditionalModel(name, model.to_json())
    others = {key: value for key, value in _read_settings().items() if key != added.model_id}
    write_json(_settings_path(), {**others, added.model_id: added.settings})
    click.echo(f"{added}, with {dim} dimensions. Use it with -m {name}.")


@commands.command("list")
def list_conditions() -> None:
    """List the models; of several with the same name, llm uses the last one."""
    for model in _read_models():
        click.echo(f"{model}, {model.settings['model']}")


@commands.command("remove")
@click.argument("name")
def remove_condition(name: str) -> None:
    """Remove all models with NAME. Collections need them until they are added again."""
    registered = _read_settings()
    others = {key: value for key, value in registered.items() if key.split("/")[1] != name}
    if others == registered:
        raise CommandError(f"no condition is registered under {name!r}. See: llm llmcond list.")
    write_json(_settings_path(), others)


def _settings_path() -> Path:
    return Path(llm.user_dir(), "llmcond.json")


def _read_settings() -> dict[str, Any]:
    """Read the settings of the registered models, by their ids, in the order of registration.

    Raises:
        CommandError: the file is damaged, for example after it was edited.
    """
    path = _settings_path()
    try:
        settings = read_json(path) if path.exists() else {}
    except LlmcondError as error:
        raise CommandError(str(error)) from error
    for key, value in settings.items():
        names = ("condition", "model", "fingerprint")
        values = [value.get(name) for name in names] if isinstance(value, dict) else [None]
        if key.count("/") != 2 or not all(isinstance(each, str) for each in values):
            raise CommandError(f"{path} has an invalid entry {key!r}. Correct or remove it.")
    return settings


def _read_models() -> list[ConditionalModel]:
    """Return the registered models in the order of registration, after the ready one."""
    models = [ConditionalModel(key.split("/")[1], value) for key, value in _read_settings().items()]
    ready = ConditionalModel("topic", _READY)
    # Its condition may have been registered under its name.
    return models if ready.model_id in {model.model_id for model in models} else [ready, *models]
