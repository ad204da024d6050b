"""Uploading a run's heads to the Hugging Face hub, without the data and without local paths.

A trained encoder is uploaded with them. For a frozen encoder, its name and revision are enough for
others to find it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from llmcond.base.errors import LlmcondError, UserError, first_line
from llmcond.base.files import format_bytes, read_json, write_text
from llmcond.base.output import DisplayedDict, log
from llmcond.base.package import __version__
from llmcond.encoders.adapter import CARD, CONFIG, RUN_RECORD
from llmcond.encoders.checkpoint import RECORDS, SETTINGS
from llmcond.options.training import PushOptions
from llmcond.report.card import add_metadata, heads_card, heads_metadata, trained_metadata
from llmcond.runs import open_any_run
from llmcond.runs.portable import list_files, open_portable_run, read_credits, stage_run
from llmcond.workflows.training_record import RECORD

#: Files of an earlier push that would be mistaken for files of this one.
_PUSHED = [*SETTINGS, *RECORDS, CONFIG]
_PUSHED += ["heads/*", "*/config.json", "*.safetensors"]


class PushResult(DisplayedDict):
    """The result of an upload: ``repo``, its ``url``, the ``commit``, and the names of ``files``.

    Examples:
        >>> import llmcond
        >>> result = llmcond.PushResult(
        ...     repo="ada/my-heads", url="https://huggingface.co/ada/my-heads", commit="1a2b3c4",
        ...     files=["README.md", "run.json"],
        ... )
        >>> result["repo"]
        'ada/my-heads'
    """

    __slots__ = ()


def push_to_hub(options: PushOptions) -> PushResult:
    """Upload a run's heads, and its encoder if ``train-lora`` trained it, in one commit.

    The commit holds the heads, the files of a trained encoder, and the records of both, in which
    each local path is shortened to its last part. Rows and features are never uploaded. The same
    commit deletes files of an earlier push that this one does not have.

    Raises:
        UserError: the run has neither a trained encoder nor a fitted head, others could not load
            its encoder, or the repository cannot be written.
        LlmcondError: the hub cannot be reached, or has failed.
    """
    repo, revision = options.repo, options.revision
    _check_name(repo)
    run, tuned = open_portable_run(Path(options.run), options.head)
    token = _read_token(repo, revision)
    with tempfile.TemporaryDirectory(prefix="llmcond-push-") as temporary:
        staged = Path(temporary)
        stage_run(run, tuned, staged, options.head)
        _complete_card(staged, options)
        files = sorted(path.relative_to(staged).as_posix() for path in list_files(staged))
        size = sum((staged / name).stat().st_size for name in files)
        log.info(f"uploading {len(files)} files ({format_bytes(size)}) to {repo}")
        url, commit = _upload(staged, files, repo, token, options.private, revision)
    arguments = f'"{repo}", revision="{revision}"' if revision else f'"{repo}"'
    log.info(f"{run.folder} -> {url}")
    log.info(f"to use it: llmcond.{run.kind.card.loader}({arguments})")
    return PushResult(repo=repo, url=url, commit=commit, files=files)


# -- checks ------------------------------------------------------------------------------------


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # by way

    expected = f"the repository is {repo!r}; expected OWNER/NAME, such as ada/tuned-encoder"
    if len(repo.split("/")) != 2:
        raise UserError(f"{expected}.")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{expected} ({first_line(error)}).") from error


def _complete_card(staged: Path, options: PushOptions) -> None:
    """Write the card of a staged run, or add the metadata that its card lacks."""
    path, run, works = staged / CARD, open_any_run(staged), read_credits(staged)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (staged / RECORD).is_file():
        metadata = trained_metadata(read_json(staged / RECORD), run.kind.kind)
    else:
        # The staged run has no local paths any more.
        metadata, text = heads_metadata(run), text or heads_card(run)
    if works is not None:
        metadata |= works.metadata
    complete = add_metadata(text, metadata, license=options.license, datasets=[*options.datasets])
    if complete != text or not path.is_file():
        write_text(path, complete)  # replaces the link, not the card that it points to
    if "\nlicense" not in complete.partition("\n---")[0]:
        log.info("the model card names no licence: add one, such as --license apache-2.0")


def _read_token(repo: str, revision: str | None) -> str:
    from huggingface_hub import get_token

    with _translate_hub_errors(repo, revision):
        token = get_token()
    if token is None:
        raise UserError(
            "there is no token with write access to the hub. Log in (hf auth login), or set "
            "HF_TOKEN."
        )
    return token


# -- the hub -----------------------------------------------------------------------------------


def _upload(
    staged: Path, files: list[str], repo: str, token: str, private: bool, revision: str | None
) -> tuple[str, str]:
    """Create the repository and one commit; return the URL and the commit's hash."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(token=token, library_name="llmcond", library_version=__version__)
    with _translate_hub_errors(repo, revision):
        # None instead of False, which would override an organisation's default.
        url = str(api.create_repo(repo, private=private or None, exist_ok=True))
        if private and not api.model_info(repo).private:
            raise UserError(
                f"{repo} exists already and is public. Make it private in its settings on the hub, "
                "name another repository, or leave out --private."
            )
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        remote_files = api.list_repo_files(repo, revision=revision)
        is_llmcond = RUN_RECORD in remote_files and any(
            fnmatch(name, "heads/*/head.json") for name in remote_files
        )
        if not is_llmcond and {CONFIG, "config.json"} & set(remote_files):
            raise UserError(
                f"{repo} holds a model that llmcond did not push. Name another OWNER/NAME."
            )
        # Files of an earlier push that this one does not have.
        pushed_before = {
            name for name in remote_files for pattern in _PUSHED if fnmatch(name, pattern)
        }
        leftovers = sorted(pushed_before - {*files}) if is_llmcond else []
        # upload_folder would split a large upload into several commits.
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationDelete(name) for name in leftovers),
                *(CommitOperationAdd(name, staged / name) for name in files),
            ],
            commit_message=f"Push a run of llmcond {__version__}",
            revision=revision,
        )
    return url if revision is None else f"{url}/tree/{revision}", str(commit.oid)


@contextmanager
def _translate_hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Translate errors of the hub into UserErrors and LlmcondErrors."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError, by way
        HfHubHTTPError,
        HTTPError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    unreachable = f"the Hugging Face hub cannot be reached, so nothing was pushed to {repo}"
    try:
        yield
    except RevisionNotFoundError as error:
        raise UserError(f"{repo} has no revision {revision!r}. Name a branch.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        message = " ".join(str(error.server_message or error.response.reason_phrase).split())
        if 400 <= status < 500:
            raise UserError(
                f"the hub does not accept the push to {repo} ({status}: {message}). If it does not "
                "let you write there, name a repository of yours, or log in with a token that has "
                "write access: hf auth login, or HF_TOKEN."
            ) from error
        raise LlmcondError(
            f"the hub failed ({status}: {message}), and nothing was pushed to {repo}. Run the same "
            "command again later."
        ) from error
    except OfflineModeIsEnabled as error:
        raise LlmcondError(f"{unreachable}: HF_HUB_OFFLINE is set. Unset it.") from error
    except HTTPError as error:
        raise LlmcondError(f"{unreachable}: {first_line(error)}. Check the connection.") from error
    except (OSError, RuntimeError, ValueError) as error:
        if str(error).startswith("Invalid metadata in README.md"):
            raise UserError(f"the hub rejected {CARD}: {error}") from error
        raise LlmcondError(
            f"pushing to {repo} failed: {first_line(error)}. Run the same command again."
        ) from error
