"""Creation of a run's folder, which is complete as soon as it exists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcond.encoders import ResolvedEncoder
from llmcond.encoders.spec import Orders
from llmcond.errors import UserError
from llmcond.files import create_folder_atomically, write_json
from llmcond.runs.manifest import IN_RUN_FOLDER, create_manifest, portable_model_name
from llmcond.runs.open import run_from_manifest
from llmcond.runs.run import AnyRun
from llmcond.tasks import AnyTask, Data

if TYPE_CHECKING:
    from llmcond.features.keys import StoreDtype


class RunExistsError(UserError):
    """Another process created the run in the meantime."""


def create_run(
    folder: Path,
    model: str,
    resolved: ResolvedEncoder,
    data: Data,
    store_dtype: StoreDtype,
    task: AnyTask[Any],
    store: str | None = None,
) -> AnyRun:
    """Create a run folder, which is complete as soon as it exists.

    ``store`` is the store URI of its features, or an absolute path; None: in the folder.

    Raises:
        RunExistsError: Another process created the run first.
        UserError: The folder cannot be written, or the disk is full.
    """
    name = portable_model_name(model, resolved)
    manifest = create_manifest(name, resolved, data, store_dtype, task)
    if store is not None:
        manifest["store"] = store
    try:
        with create_folder_atomically(folder) as temporary:
            data.save(temporary)
            write_json(temporary / "run.json", manifest)
    except UserError as error:
        if isinstance(error.__cause__, OSError) and (folder / "run.json").is_file():
            raise RunExistsError(
                f"{folder} was created by another process in the meantime."
            ) from error
        raise
    return run_from_manifest(folder, manifest)


def complete_run(
    folder: Path,
    resolved: ResolvedEncoder,
    data: Data,
    task: AnyTask[Any],
    cross: Orders | None = None,
    trained_on: Sequence[str] = ("train",),
) -> AnyRun:
    """Turn the folder of a trained encoder into a run. ``run.json`` is written last.

    ``cross`` is the sentence order of a cross-encoder; None: the encoder is not a cross-encoder.
    ``trained_on`` names the splits whose rows the encoder was trained on.
    """
    manifest = create_manifest(IN_RUN_FOLDER, resolved, data, "float16", task)
    if cross is not None:
        manifest["cross_encoder"] = {"orders": cross}
    manifest["trained_on"] = list(dict.fromkeys([*trained_on, *manifest.get("trained_on", ())]))
    data.save(folder)
    write_json(folder / "run.json", manifest)
    return run_from_manifest(folder, manifest)
