"""A run's records: run.json, and the part of head.json that describes features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from annotated_types import Ge, MinLen

from llmcond.data.datasets import Columns, RatingScale
from llmcond.encoders import EncoderIdentity, ResolvedEncoder, find_model
from llmcond.encoders.spec import Orders
from llmcond.features.keys import StoreDtype
from llmcond.files import check_format, read_json
from llmcond.records import RECORD, check_record
from llmcond.system import provenance

if TYPE_CHECKING:
    from llmcond.tasks import AnyTask

FORMAT = 1
#: The ``model`` in ``run.json`` of an encoder that lies in the run's folder, which may be moved.
IN_RUN_FOLDER = "."
#: The ``source`` of the data in ``run.json`` of a run that has only an encoder.
NO_DATA = "none"


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
    prompts: Annotated[Sequence[Mapping[str, Any]], MinLen(1)]
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
    """Return the kind of a run's task."""
    return str(manifest.get("kind", "rated"))


class _Recorded(Protocol):
    """Data that has a record in run.json."""

    @property
    def digest(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


def create_manifest(
    model: str,
    resolved: ResolvedEncoder,
    data: _Recorded,
    store_dtype: StoreDtype,
    task: AnyTask[Any],
) -> dict[str, Any]:
    """Return the content of run.json of a new run, without prompts."""
    identity = resolved.identity
    return {
        "format": FORMAT,
        "task": task.name,
        # Recorded because the task may be the user's code, which later commands may not name.
        "kind": task.kind,
        "encoder": {
            "name": resolved.checkpoint.name,
            "model": model,
            "revision": resolved.checkpoint.commit,
            "like": resolved.checkpoint.known.repo if resolved.checkpoint.known else None,
            "fingerprint": identity.fingerprint,
            "identity": identity.to_json(),
            "default_prompt": resolved.default_prompt,
            "assumed": list(resolved.assumed),
        },
        "store_dtype": store_dtype,
        # The encoder was trained in another folder, on the same data.
        **(
            {"trained_on": ["train", "dev"]}
            if resolved.checkpoint.dev_digest == data.digest
            else {}
        ),
        "data": data.to_json(),
        "prompts": {},
        **provenance(),
    }


def portable_model_name(model: str, resolved: ResolvedEncoder) -> str:
    """Return a model's name, or an absolute path, which is valid in any working folder."""
    local = Path(model).expanduser()
    return str(local.resolve()) if find_model(model) is None and local.is_dir() else model
