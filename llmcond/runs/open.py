"""Opening a run, whatever its task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llmcond.encoders.resolve import no_embeddings
from llmcond.errors import LlmcondError, UserError, listed
from llmcond.plugins import is_plugin
from llmcond.runs.kind import find_kind
from llmcond.runs.manifest import kind_of, read_manifest
from llmcond.runs.run import AnyRun
from llmcond.runs.task_runs import Run, as_rated


def run_of(folder: Path, manifest: dict[str, Any]) -> AnyRun:
    """Return the run of a folder, by what its run.json holds.

    Raises:
        LlmcondError: a kind of task that there is not.
    """
    name = kind_of(manifest)
    try:
        kind = find_kind(name)
    except UserError as error:
        if is_plugin(name):
            raise
        raise LlmcondError(
            f"{folder / 'run.json'} has kind = {name!r}: {error} It was "
            "damaged, a newer version wrote it, or the package of that kind is not installed."
        ) from error
    return kind.run(folder, manifest)


def open_run(folder: Path, *, cross: bool = False) -> Run:
    """Open a run of rated rows; with ``cross`` it may be a cross-encoder's, without embeddings.

    Raises:
        UserError: as :func:`open_any_run`, or a run of queries against candidates.
    """
    run = open_any_run(folder, cross=cross)
    pairs = as_rated(run)
    if pairs is None:
        raise UserError(
            f"{folder} is a run of the task {run.manifest['task']}, which ranks candidates; this "
            "is for rated pairs of sentences. It takes extract, fit-head, evaluate, sweep, "
            f"compare-prompts, heads and {run.own_command}."
        )
    return pairs


def open_any_run(folder: Path, *, cross: bool = False) -> AnyRun:
    """Open a run, whatever its task; with ``cross`` it may be that of a cross-encoder.

    Raises:
        UserError: nothing there, a folder that is no run, one written by a newer version, or one
            of a cross-encoder.
    """
    if _is_vacant(folder):
        others = sorted(str(path.parent) for path in folder.parent.glob("*/run.json"))
        named = (
            f"There are {listed(others)}: name one by --run; or extract" if others else "Extract"
        )
        raise UserError(
            f"there is no run at {folder}. {named} features first: llmcond extract --model MODEL "
            f"--run {folder}"
        )
    if not (folder / "run.json").is_file():
        raise UserError(
            f"{folder} is not a run of llmcond (it has no run.json). Name another --run; nothing "
            "in it was touched."
        )
    run = run_of(folder, read_manifest(folder))
    if run.cross is not None and not cross:
        raise no_embeddings(folder)
    return run


def run_exists(folder: Path, *, cross: bool = False) -> bool:
    """Return whether a run is at ``folder``; errors as of :func:`open_any_run` if anything else.

    Raises:
        UserError: also where no run can be, as its path has control characters.
    """
    if _is_vacant(folder):
        path = str(folder.absolute())
        if re.search(r"[\x00-\x1f\x7f]", path):
            raise UserError(
                f"{path!r} holds control characters, and features cannot be stored there. Name "
                "another --run."
            )
        return False
    open_any_run(folder, cross=cross)
    return True


def _is_vacant(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
