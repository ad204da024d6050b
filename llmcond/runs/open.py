"""Resolving the run or bundled model that a user named, and opening a run of any task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llmcond.bundled import (
    DEFAULT_MODEL,
    DEFAULT_RUN,
    bundled_folder,
    pretrained_folder,
    pretrained_names,
)
from llmcond.data.readers import SAMPLE
from llmcond.encoders.checkpoints.checkpoint import hub_errors, is_hub_name
from llmcond.encoders.known import known_names
from llmcond.encoders.resolve import cross_encoder_error
from llmcond.errors import LlmcondError, UserError, did_you_mean, format_list, nearest
from llmcond.log import log
from llmcond.plugins import is_plugin
from llmcond.runs.kind import find_kind
from llmcond.runs.manifest import kind_of, read_manifest
from llmcond.runs.run import AnyRun
from llmcond.runs.task_runs import Run


def run_from_manifest(folder: Path, manifest: dict[str, Any]) -> AnyRun:
    """Return the run of a folder from the contents of its run.json.

    Raises:
        LlmcondError: The kind of task does not exist.
    """
    name = kind_of(manifest)
    try:
        kind = find_kind(name)
    except UserError as error:
        if is_plugin(name):
            raise
        raise LlmcondError(
            f"{folder / 'run.json'} has kind = {name!r}: {error} The file is damaged, a newer "
            "version wrote it, or the package of that kind is not installed."
        ) from error
    return kind.run(folder, manifest)


def open_run(folder: Path, *, cross: bool = False) -> Run:
    """Open a run of rated rows. With ``cross``, a cross-encoder's run is accepted as well.

    Raises:
        UserError: As ``open_any_run``, or the run is of another kind of task.
    """
    run = open_any_run(folder, cross=cross)
    if not isinstance(run, Run):
        commands = ["extract", "fit-head", "evaluate", "sweep", "compare-prompts", "heads"]
        commands += [run.task_command] if run.task_command else []
        raise UserError(
            f"this command needs rated pairs of sentences, and {folder} is a run of the task "
            f"{run.manifest['task']}, which has none. Commands for that run: "
            f"{', '.join(commands[:-1])} and {commands[-1]}."
        )
    return run


def open_any_run(folder: Path, *, cross: bool = False) -> AnyRun:
    """Open a run of any task. With ``cross``, a cross-encoder's run is accepted as well.

    Raises:
        UserError: The folder does not exist, is not a run, was written by a newer version, or
            holds a cross-encoder.
    """
    if _is_vacant(folder):
        others = sorted(str(path.parent) for path in folder.parent.glob("*/run.json"))
        named = (
            f"Name an existing one with --run ({format_list(others)}), or extract"
            if others
            else "Extract"
        )
        raise UserError(
            f"there is no run at {folder}. {named} features first: llmcond extract --model MODEL "
            f"--run {folder}"
        )
    if not (folder / "run.json").is_file():
        raise UserError(
            f"{folder} is not a run of llmcond (it has no run.json). Name another --run. The "
            "folder was not changed."
        )
    run = run_from_manifest(folder, read_manifest(folder))
    if run.cross is not None and not cross:
        raise cross_encoder_error(folder)
    return run


def run_exists(folder: Path, *, cross: bool = False) -> bool:
    """Return whether ``folder`` is a run. A folder that does not exist, or is empty, is not.

    Raises:
        UserError: As ``open_any_run`` if the folder holds something else, or no run can be created
            because its path contains control characters.
    """
    if _is_vacant(folder):
        path = str(folder.absolute())
        if re.search(r"[\x00-\x1f\x7f]", path):
            raise UserError(
                f"{path!r} contains control characters, so features cannot be stored in it. Name "
                "another --run."
            )
        return False
    open_any_run(folder, cross=cross)
    return True


def _is_vacant(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def resolve_run(run: str | Path | None, model: str | None = None) -> Path:
    """Resolve the folder of a run, or of a bundled model, which has the layout of a run.

    Args:
        run: The run's folder, or the name of a bundled model. None: ``runs/default`` if it was
            created from the user's data, otherwise the default bundled model.
        model: The name of a bundled model, instead of ``run``.

    Raises:
        UserError: Both were given, the model does not exist, or ``run`` is a ``Path`` that does
            not exist and has the name of a bundled model.
    """
    if model is not None:
        path = pretrained_folder(model)
        if run is not None:
            raise UserError(f"--run is {run} and --model is {model}. Give only one of them.")
        if path is None:
            raise UserError(
                f"--model is {model!r}, which is not a bundled model "
                f"({', '.join(pretrained_names())}). To use another encoder, create a run: "
                f"llmcond extract --model {model} --run DIR"
            )
        return path
    if run is not None and not Path(run).exists():
        if isinstance(run, Path) and pretrained_folder(str(run)):
            raise UserError(
                f"there is no run at {run}, but a bundled model has that name: use --model {run}."
            )
        return pretrained_folder(run) or Path(run)
    if run is not None:
        return Path(run)
    if run_exists(DEFAULT_RUN, cross=True):
        if open_any_run(DEFAULT_RUN, cross=True).manifest["data"]["source"] != SAMPLE:
            return DEFAULT_RUN
        log.info(
            f"{DEFAULT_RUN} was created from the bundled sample, so the bundled model is used "
            f"(--run {DEFAULT_RUN} to use that run)"
        )
    return bundled_folder("models") / DEFAULT_MODEL


def find_or_download_run(run: str | Path | None, revision: str | None = None) -> Path:
    """Return the folder of a run or of a bundled model, or download a model from the hub.

    Args:
        run: As for ``resolve_run``, or the ``OWNER/NAME`` of a model that ``llmcond push`` uploaded
            to the hub. The hub is used only if there is no folder of that name.
        revision: A branch, tag or commit on the hub; None: the newest version.

    Raises:
        UserError: The run or model does not exist, the hub's repository is not a model of llmcond,
            or a revision was given for a folder.
        LlmcondError: The hub cannot be reached.
    """
    if isinstance(run, str) and pretrained_folder(run) is None and not Path(run).exists():
        if is_hub_name(run):
            return _download_run(run, revision)
        raise UserError(_no_such_model(run))
    if revision is not None:
        raise UserError(
            f"revision is {revision!r}, but {run or 'the default model'} is not on the hub. "
            "Leave out revision."
        )
    return resolve_run(run)


def _no_such_model(name: str) -> str:
    """Return the error message for a name that is neither a run nor a bundled model."""
    models = did_you_mean(name, pretrained_names()) or (
        f"The bundled models are {', '.join(map(repr, pretrained_names()))}."
    )
    encoders = [known.rpartition("/")[2] for known in known_names()]
    if name in (*encoders, *known_names()):
        return (
            f"there is no run at {name}. {models} {name} is an encoder: load_encoder({name!r}) "
            f"loads it, and llmcond extract --model {name} --run DIR creates a run with it."
        )
    return (
        f"there is no run at {name}. {models} A model on the hub is named OWNER/NAME. Encoders to "
        f"create a run with (llmcond extract --model NAME --run DIR): {nearest(name, encoders)}"
    )


def _download_run(repo: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        with hub_errors(repo, revision, None, encoder=False):
            try:
                record = hf_hub_download(repo, "run.json", revision=revision)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError as error:
                raise UserError(
                    f"{repo} has no run.json, so it is not a model of llmcond. If it is an "
                    f"encoder, load_encoder({repo!r}) loads it, and llmcond extract --model {repo} "
                    "--run DIR creates a run with it."
                ) from error
            return Path(snapshot_download(repo, revision=Path(record).parent.name))
    except LlmcondError as error:
        raise type(error)(
            f"there is no local run at {repo}, so it was looked up on the hub: {error}"
        ) from error
