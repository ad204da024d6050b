"""Which run, or bundled model, is meant where texts are embedded."""

from __future__ import annotations

from pathlib import Path

from llmcond.bundled import DEFAULT_RUN, PRETRAINED, bundled, pretrained, pretrained_names
from llmcond.data.readers import SAMPLE
from llmcond.encoders.checkpoints.checkpoint import hub_errors, looks_like_hub_name
from llmcond.encoders.known import known_names
from llmcond.errors import LlmcondError, UserError, did_you_mean, nearest
from llmcond.log import log
from llmcond.runs.open import open_any_run, run_exists


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
