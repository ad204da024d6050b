"""The account of a training in its folder, by which it is known again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from llmcond.display import Displayed
from llmcond.encoders import ResolvedEncoder
from llmcond.errors import UserError
from llmcond.files import read_json
from llmcond.finetune.settings import TuneSettings, renamed
from llmcond.finetune.state import differences
from llmcond.heads import Recipe
from llmcond.log import log
from llmcond.metrics import Estimate
from llmcond.prompts import Prompt
from llmcond.records import RECORD as RECORDED
from llmcond.records import read_record
from llmcond.runs import open_any_run
from llmcond.tasks import Data
from llmcond.workflows.options.training import HeadChoice

#: Of the folder's own account of the training.
FORMAT = 1
RECORD, STATE = "training.json", "training"


@dataclass(frozen=True)
class _MadeOf:
    settings: Mapping[str, Any]
    head: Mapping[str, Any]
    objective: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Summary:
    scores: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class _Account:
    """What the account of a training holds, as far as it is read."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORDED

    made_of: _MadeOf
    summary: _Summary


@dataclass(frozen=True)
class TrainingResult(Displayed):
    """An encoder that was trained, with its head: the run, the head's name, steps and scores."""

    record: Mapping[str, Any]

    @property
    def run(self) -> Path:
        """Return the folder of the run, which is the encoder's too."""
        return Path(self.record["run"])

    @property
    def metrics(self) -> dict[str, Estimate]:
        """Return the scores on test if there is one, else on dev; empty without rated rows."""
        scores = self.record.get("scores", ())[-1:]
        return {
            name: Estimate.of_json(row[name], row[f"{name}_ci"])
            for row in scores
            for name in row
            if f"{name}_ci" in row
        }

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return dict(self.record)


def made_of(
    resolved: ResolvedEncoder,
    dataset: Data,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    choice: HeadChoice,
    settings: TuneSettings,
    merge: bool,
) -> dict[str, Any]:
    """Return all that decides the weights of an encoder and its head, for the record."""
    return {
        "encoder": resolved.identity.to_json(),
        "data": dataset.digest,
        "prompts": {prompt.name: prompt.digest for prompt in prompts},
        "head": {"kind": recipe.kind, **asdict(recipe.settings)},
        "start": choice.start and read_json(Path(choice.start, "head.json"))["weights_sha256"],
        "seed": choice.seed,
        "settings": settings.to_json(),
        "merge": merge,
    }


def trained_prompts(folder: Path) -> dict[str, str]:
    """Return the digests, by their names, of the prompts that a folder's encoder was trained with.

    None where that is not recorded.

    Raises:
        UserError: the record was damaged.
    """
    if not (folder / RECORD).is_file():
        return {}
    record = read_record(folder / RECORD, _Account, "Name the prompt: --prompt NAME_OR_FILE.")
    prompts: dict[str, str] = record["made_of"].get("prompts", {})
    return prompts


def finished(folder: Path, made_of: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the summary of a training that has ended in a folder; None where there is none.

    That it is used again is logged.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder with --run.")
    if (folder / RECORD).is_file():
        record = read_record(folder / RECORD, _Account, "Train into a new --run.")
        shutil.rmtree(folder / STATE, ignore_errors=True)  # left by a kill at the very end
        kinds = ["orders" in own for own in (record["made_of"], made_of)]
        if kinds[0] != kinds[1]:
            here = "a cross-encoder" if kinds[0] else "an encoder with its head"
            raise UserError(f"{folder} holds {here}, which is another thing. Name another --run.")
        found = differences(_upgraded(record["made_of"]), made_of)
        if found:
            raise UserError(
                f"{folder} holds an encoder that was trained with other settings: "
                f"{'; '.join(found)}. Name another --run."
            )
        log.info(f"{folder} is trained already, with the same settings; nothing is done")
        summary: dict[str, Any] = record["summary"]
        return {**summary, "run": str(folder)}
    if (folder / "run.json").is_file() and not (folder / STATE).is_dir():
        name = open_any_run(folder, cross=True).encoder_name
        raise UserError(
            f"{folder} holds features of {name}, frozen. A trained encoder is another one: name "
            "another --run."
        )
    other = [path.name for path in folder.iterdir() if path.name not in {STATE, ".lock"}]
    if other and not (folder / STATE).is_dir():
        raise UserError(f"{folder} holds other files ({other[0]}). Name another --run.")
    return None


def _upgraded(made_of: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an older version recorded by the names that settings have now."""
    upgraded = {**made_of, "settings": renamed(made_of.get("settings", {}))}
    added = {"objective": "", "objective_weight": 1.0}
    for part in ("head", "objective"):
        if "mse" in made_of.get(part, {}):
            upgraded[part] = {**added, **made_of[part]}
    return upgraded
