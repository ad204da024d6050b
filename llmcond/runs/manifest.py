"""Schemas of a run's records: run.json, and the part of head.json that describes features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from llmcond.data.datasets import Columns, RatingScale
from llmcond.encoders import EncoderIdentity
from llmcond.encoders.spec import Orders
from llmcond.features.keys import StoreDtype
from llmcond.files import check_format, read_json
from llmcond.records import RECORD, check_record

FORMAT = 1
#: The ``model`` in ``run.json`` of an encoder that lies in the run's folder, which may be moved.
IN_RUN_FOLDER = "."


@dataclass(frozen=True)
class _Encoder:
    name: str
    model: str
    revision: str | None
    fingerprint: str
    identity: EncoderIdentity


@dataclass(frozen=True)
class _RunEncoder(_Encoder):
    default_prompt: str
    like: str | None = None


@dataclass(frozen=True)
class _Data:
    source: str
    digest: str


@dataclass(frozen=True)
class _Rows(_Data):
    columns: Columns
    scale: RatingScale
    split_seed: int
    rows: Mapping[str, Annotated[int, Ge(0)]]
    unrated: Mapping[str, Annotated[int, Ge(0)]]


@dataclass(frozen=True)
class _Extracted:
    prompt: Mapping[str, Any]


@dataclass(frozen=True)
class _CrossEncoder:
    orders: Orders


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    encoder: _RunEncoder
    store_dtype: StoreDtype
    data: _Data
    prompts: Mapping[str, _Extracted]
    store: str | None = None


@dataclass(frozen=True, kw_only=True)
class TaskManifest(_Manifest):
    """The schema of ``run.json`` for tasks without rated rows."""

    task: str


@dataclass(frozen=True, kw_only=True)
class Manifest(_Manifest):
    """The schema of ``run.json`` for rated rows."""

    data: _Rows
    task: str | None = None
    cross_encoder: _CrossEncoder | None = None
    trained_on: Sequence[str] = ()


@dataclass(frozen=True)
class TrainedHeadRecord:
    """The part of ``head.json`` about the encoder that a head was trained with."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    encoder: _Encoder


@dataclass(frozen=True)
class _Recipe:
    name: str
    description: str
    source: str


@dataclass(frozen=True)
class FittedHeadRecord:
    """The part of ``head.json`` about a head's recipe and the features it was fitted on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    recipe: _Recipe
    encoder: _Encoder
    store_dtype: StoreDtype
    prompts: Sequence[Mapping[str, Any]]
    subtract: bool


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check a run's ``run.json``.

    Raises:
        UserError: A newer version wrote it.
        LlmcondError: It is damaged.
    """
    manifest = read_json(folder / "run.json")
    check_format(manifest, FORMAT, str(folder))
    schema = Manifest if kind_of(manifest) == "rated" else TaskManifest
    check_record(manifest, schema, str(folder / "run.json"), "Extract into a new --run.")
    return manifest


def kind_of(manifest: Mapping[str, Any]) -> str:
    """Return the kind of a run's task, which older versions did not record."""
    return str(manifest.get("kind", "ranking" if manifest.get("ranking") else "rated"))
