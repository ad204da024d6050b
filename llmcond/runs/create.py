"""Making a run's folder, complete from the moment it is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcond.encoders import ResolvedEncoder, find_model
from llmcond.encoders.spec import Orders
from llmcond.errors import UserError
from llmcond.files import making, write_json
from llmcond.runs.manifest import FORMAT, HERE
from llmcond.runs.open import run_of
from llmcond.runs.run import AnyRun
from llmcond.system import provenance
from llmcond.tasks import AnyTask, Data

if TYPE_CHECKING:
    from llmcond.features.keys import StoreDtype


class RunExistsError(UserError):
    """Another process made the run in the meantime."""


def create_run(
    folder: Path,
    model: str,
    resolved: ResolvedEncoder,
    data: Data,
    store_dtype: StoreDtype,
    task: AnyTask[Any],
    store: str | None = None,
) -> AnyRun:
    """Make a run folder, complete from the moment it is there.

    ``store`` is where its features are, a URI or an absolute path; None: in the folder.

    Raises:
        RunExistsError: another process was first.
        UserError: the folder cannot be written, or the disk is full.
    """
    manifest = _manifest(where_model(model, resolved), resolved, data, store_dtype, task)
    if store is not None:
        manifest["store"] = store
    try:
        with making(folder) as temporary:
            data.save(temporary)
            write_json(temporary / "run.json", manifest)
    except UserError as error:
        if isinstance(error.__cause__, OSError) and (folder / "run.json").is_file():
            raise RunExistsError(f"{folder} was made by another process just now.") from error
        raise
    return run_of(folder, manifest)


def complete_run(
    folder: Path,
    resolved: ResolvedEncoder,
    data: Data,
    task: AnyTask[Any],
    cross: Orders | None = None,
    trained_on: Sequence[str] = ("train",),
) -> AnyRun:
    """Make a run of the folder that holds its encoder; ``run.json`` comes last.

    ``cross`` are the orders of a cross-encoder; None: the encoder is none. ``trained_on`` are the
    splits whose rows the encoder was trained on.
    """
    manifest = _manifest(HERE, resolved, data, "float16", task)
    if cross is not None:
        manifest["cross_encoder"] = {"orders": cross}
    manifest["trained_on"] = list(dict.fromkeys([*trained_on, *manifest.get("trained_on", ())]))
    data.save(folder)
    write_json(folder / "run.json", manifest)
    return run_of(folder, manifest)


def _manifest(
    model: str, resolved: ResolvedEncoder, data: Data, store_dtype: StoreDtype, task: AnyTask[Any]
) -> dict[str, Any]:
    identity = resolved.identity
    commit = identity.weights.partition("@")[2] if identity.weights.startswith("hub:") else None
    return {
        "format": FORMAT,
        "task": task.name,
        # Known without the task, which may be code of a user's own that is not named.
        "kind": task.kind,
        "encoder": {
            "name": resolved.checkpoint.name,
            "model": model,
            "revision": commit,
            "like": resolved.checkpoint.known.repo if resolved.checkpoint.known else None,
            "fingerprint": identity.fingerprint,
            "identity": identity.to_json(),
            "default_prompt": resolved.default_prompt,
            "assumed": list(resolved.assumed),
        },
        "store_dtype": store_dtype,
        # Elsewhere, by a training on the same data.
        **({"trained_on": ["train", "dev"]} if resolved.checkpoint.dev_of == data.digest else {}),
        "data": data.to_json(),
        "prompts": {},
        **provenance(),
    }


def where_model(model: str, resolved: ResolvedEncoder) -> str:
    """Return what finds a model again from any working folder: its name, or an absolute path."""
    local = Path(model).expanduser()
    return str(local.resolve()) if find_model(model) is None and local.is_dir() else model
