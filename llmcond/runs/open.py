"""Which run, or bundled model, is meant; and opening it, whatever its task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llmcond.bundled import DEFAULT_RUN, PRETRAINED, bundled, pretrained, pretrained_names
from llmcond.data.readers import SAMPLE
from llmcond.encoders.checkpoints.checkpoint import hub_errors, looks_like_hub_name
from llmcond.encoders.known import known_names
from llmcond.encoders.resolve import no_embeddings
from llmcond.errors import LlmcondError, UserError, did_you_mean, listed, nearest
from llmcond.log import log
from llmcond.plugins import is_plugin
from llmcond.runs.kind import find_kind
from llmcond.runs.manifest import kind_of, read_manifest
from llmcond.runs.run import AnyRun
from llmcond.runs.task_runs import Run


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
            f"{folder / 'run.json'} has kind = {name!r}: {error} Either the file "
            "was damaged, a newer version wrote it, or the package of that kind is not installed."
        ) from error
    return kind.run(folder, manifest)


def open_run(folder: Path, *, cross: bool = False) -> Run:
    """Open a run of rated rows; with ``cross`` it may be a cross-encoder's, without embeddings.

    Raises:
        UserError: as :func:`open_any_run`, or a run of queries against candidates.
    """
    run = open_any_run(folder, cross=cross)
    if not isinstance(run, Run):
        taken = ["extract", "fit-head", "evaluate", "sweep", "compare-prompts", "heads"]
        taken += [run.own_command] if run.own_command else []
        raise UserError(
            f"{folder} is a run of the task {run.manifest['task']}, which has no rated pairs; this "
            f"is for rated pairs of sentences. It takes {', '.join(taken[:-1])} and {taken[-1]}."
        )
    return run


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


def usual_run(run: str | Path | None, model: str | None = None) -> Path:
    """Return the folder of a run, or of a bundled model, which is laid out as one.

    Args:
        run: its folder, or the name of a bundled model. None: ``runs/default`` where that was made
            from data of the user's own, and otherwise the default one of the bundled models.
        model: the name of a bundled model, instead.

    Raises:
        UserError: both were given, or no such model.
    """
    if model is not None:
        found = pretrained(model)
        if run is not None:
            raise UserError(f"--run is {run} and --model {model}; give one of them.")
        if found is None:
            raise UserError(
                f"--model is {model!r}, and the bundled models are {', '.join(pretrained_names())}."
                f" Another encoder is used by a run: llmcond extract --model {model} --run DIR"
            )
        return found
    if run is not None:
        return (not Path(run).exists() and pretrained(run)) or Path(run)
    if run_exists(DEFAULT_RUN, cross=True):
        if open_any_run(DEFAULT_RUN, cross=True).manifest["data"]["source"] != SAMPLE:
            return DEFAULT_RUN
        log.info(
            f"{DEFAULT_RUN} was made from the bundled sample, so the bundled model is used "
            f"(--run {DEFAULT_RUN} to use that run)"
        )
    return bundled("models") / PRETRAINED


def find_run(run: str | Path | None, revision: str | None = None) -> Path:
    """Return the folder of a run, of a bundled model, or of what the hub has, downloaded.

    Args:
        run: as of :func:`usual_run`, or ``OWNER/NAME`` of what ``llmcond push`` uploaded to the
            hub, which is looked up where no folder is called so.
        revision: a branch, tag or commit of the hub; None: the newest.

    Raises:
        UserError: no such run or model, what the hub has is no model of llmcond, or a revision of a
            folder.
        LlmcondError: the hub cannot be reached.
    """
    if isinstance(run, str) and pretrained(run) is None and not Path(run).exists():
        if looks_like_hub_name(run):
            return _download_run(run, revision)
        raise UserError(_no_such_model(run))
    if revision is not None:
        raise UserError(
            f"revision is {revision!r}, and {run or 'the default'} is not a model of the hub. "
            "Leave it out."
        )
    return usual_run(run)


def _no_such_model(name: str) -> str:
    """Return what is said of a name that is neither a run nor a bundled model."""
    models = did_you_mean(name, pretrained_names()) or (
        f"The bundled models are {', '.join(map(repr, pretrained_names()))}."
    )
    encoders = [known.rpartition("/")[2] for known in known_names()]
    if name in (*encoders, *known_names()):
        return (
            f"there is no run at {name}. {models} {name} is an encoder: load_encoder({name!r}) "
            f"loads it, and llmcond extract --model {name} --run DIR makes a run with it."
        )
    return (
        f"there is no run at {name}. {models} A model of the hub is named OWNER/NAME. Encoders for "
        f"a run of your own (llmcond extract --model NAME --run DIR): {nearest(name, encoders)}"
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
                    "--run DIR makes a run with it."
                ) from error
            return Path(snapshot_download(repo, revision=Path(record).parent.name))
    except LlmcondError as error:
        raise type(error)(
            f"there is no run at {repo} here, so it was looked up on the hub: {error}"
        ) from error
