"""Uploading a run's heads to the Hugging Face hub, without the data and without local paths.

A trained encoder is uploaded with them. For a frozen encoder, its name and revision are enough for
others to find it.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

from llmcond.data.datasets import Columns
from llmcond.display import DisplayedDict
from llmcond.encoders import find_model
from llmcond.encoders.checkpoints.adapter import (
    CONFIG,
    ENCODER_RECORD,
    ROUTER,
    WEIGHTS,
    EncoderRecord,
    identify,
    read_encoder_record,
)
from llmcond.encoders.checkpoints.checkpoint import (
    SETTINGS,
    check_inside_folder,
    find_checkpoint,
    settings_files,
    weight_files,
)
from llmcond.errors import LlmcondError, UserError, first_line
from llmcond.evaluation.condition_checks import CALIBRATION
from llmcond.files import digest_file, format_bytes, read_json, write_json, write_text
from llmcond.heads.storage import weights_path
from llmcond.log import log
from llmcond.report.card import heads_card
from llmcond.runs import AnyRun, open_any_run
from llmcond.runs.kind import find_kind
from llmcond.runs.manifest import IN_RUN_FOLDER
from llmcond.version import __version__
from llmcond.workflows.options.training import PushOptions
from llmcond.workflows.training_record import RECORD, STATE

MANIFEST, CARD = "run.json", "README.md"

#: Files of a checkpoint that hold tokens, which may look like paths.
_VOCABULARIES = {"tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"}
#: Files of an earlier push that would be mistaken for files of this one.
_PUSHED = [*SETTINGS, CONFIG, ENCODER_RECORD, RECORD, CALIBRATION]
_PUSHED += ["heads/*", "*/config.json", "*.safetensors"]

#: Keys of the user's texts and names that decide what is computed: templates and columns.
_VERBATIM = {"text", "instruction", "context", "instruction_format", "special_tokens"}
_VERBATIM |= {field.name for field in fields(Columns)}
#: A pattern for an absolute path within a text.
_PATH = re.compile(r"(?<![\w.:/~-])~?(?:/[^\s/'\"`,;()]+)+/([^\s/'\"`,;()]+)")


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
    run, tuned = _open_pushable(Path(options.run))
    token = _read_token(repo, revision)
    with tempfile.TemporaryDirectory(prefix="llmcond-push-") as temporary:
        staged = Path(temporary)
        _stage(run, tuned, staged)
        files = sorted(path.relative_to(staged).as_posix() for path in _list_files(staged))
        size = sum((staged / name).stat().st_size for name in files)
        log.info(f"uploading {len(files)} files ({format_bytes(size)}) to {repo}")
        url, commit = _upload(staged, files, repo, token, options.private, revision)
    branch, folder = f" --revision {revision}" if revision else "", repo.partition("/")[2]
    log.info(f"{run.folder} -> {url}")
    log.info(
        f"to use it: hf download {repo}{branch} --local-dir {folder}, then "
        f'llmcond.{find_kind(run.kind).card.loader}("{folder}")'
    )
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


def _open_pushable(folder: Path) -> tuple[AnyRun, EncoderRecord | None]:
    """Open a run, and check that others could use it.

    Returns:
        The run, and the record of its encoder if that was trained, otherwise None.

    Raises:
        UserError: others could not use the run, or there is nothing to push.
    """
    if not (folder / RECORD).is_file() and (folder / STATE).is_dir():
        raise UserError(
            f"the training in {folder} is not finished. Run its llmcond train-lora command again, "
            "which continues where it stopped."
        )
    run = open_any_run(folder)
    if find_kind(run.kind).heads_need_data:
        raise UserError(
            f"{folder} is a run of the task {run.manifest['task']}. Its heads rank candidates of "
            "the data, which is never pushed, so others could not use them. If the data may be "
            f"shared, upload the whole folder: hf upload OWNER/NAME {folder}"
        )
    encoder = run.manifest["encoder"]["model"]
    if encoder != IN_RUN_FOLDER:
        if _is_local_only(encoder, folder):
            raise UserError(
                f"the encoder of {folder} is {encoder}, a folder that nobody else has. Upload it "
                "(hf upload OWNER/NAME FOLDER), and then extract and fit with that name in another "
                "run: llmcond extract --model OWNER/NAME --run OTHER"
            )
        if not run.head_names():
            raise UserError(
                f"{folder} has no fitted head, so there is nothing to push: everybody can already "
                f"load {encoder}. Fit one first: llmcond fit-head --head mlp --run {folder}"
            )
        run.find_heads(run.head_names())  # raises an error for a head that nobody could load
        return run, None
    tuned = read_encoder_record(folder)
    if tuned is None or not (folder / RECORD).is_file():
        missing = folder / (ENCODER_RECORD if tuned is None else RECORD)
        raise UserError(f"{missing} is missing, so others could not use the run. Train it again.")
    if tuned.members > 1:
        raise UserError(
            f"{folder} is an ensemble of {tuned.members} adapters, which cannot be pushed as one. "
            f"Push a member (--run {folder / 'adapter-0'}), or distil them into one encoder: "
            f"llmcond train-lora --teacher {folder} --run OTHER"
        )
    if tuned.base is not None and _is_local_only(tuned.base, folder):
        raise UserError(
            f"{folder} is an adapter of {tuned.base}, a folder that nobody else has. Train into "
            "another --run with llmcond train-lora --merge, and push that run, which contains the "
            "whole encoder."
        )
    return run, tuned


def _is_local_only(model: str, folder: Path) -> bool:
    """Return whether the model that a run names exists only on this machine."""
    is_hub_name = (
        model.count("/") == 1 and not _is_absolute(model) and not (folder / model).is_dir()
    )
    return find_model(model) is None and not is_hub_name


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


# -- staging -----------------------------------------------------------------------------------


def stage_run(run_folder: Path, staged: Path) -> None:
    """Collect the files that ``push_to_hub`` uploads in an empty folder, with the same errors."""
    _stage(*_open_pushable(run_folder), staged)


def _stage(run: AnyRun, tuned: EncoderRecord | None, staged: Path) -> None:
    """Collect the files to push in a folder; files with local paths are rewritten."""
    folder = run.folder
    new_digests = _stage_encoder(run, tuned, staged) if tuned else {}

    def stage_record(name: str, **added: str) -> dict[str, Any]:
        check_inside_folder(folder / name, folder)
        record = {**read_json(folder / name), **added}
        write_json(staged / name, _tidy_record(record, new_digests))
        return record

    for head in (f"heads/{name}" for name in run.head_names()):
        record = stage_record(f"{head}/head.json")
        weights = weights_path(folder / head, record)
        _stage_file(folder, str(weights.relative_to(folder)), staged, f"{head}/head.safetensors")
        if record.get("weights_sha256") != digest_file(weights):
            raise UserError(
                f"{folder / head} is damaged: its two files do not belong together. Fit it again."
            )
    default_head = run.default_head()
    # The default head is recorded, because a download does not show which head was fitted last.
    stage_record(MANIFEST, **({"default_head": default_head[0]} if default_head else {}))
    if tuned:
        stage_record(RECORD)
        stage_record(ENCODER_RECORD)
    if (folder / CALIBRATION).is_file():
        _stage_file(folder, CALIBRATION, staged)
    if (folder / CARD).is_file():
        _stage_file(folder, CARD, staged)
        path = _PATH.search((folder / CARD).read_text(encoding="utf-8"))
        if path is not None:
            log.info(f"{folder / CARD} is pushed unchanged, and contains the path {path[0]}")
    elif not tuned:
        # The staged run has no local paths any more.
        write_text(staged / CARD, heads_card(open_any_run(staged)))
    _check_no_paths(staged, folder)


def _stage_encoder(run: AnyRun, tuned: EncoderRecord, staged: Path) -> dict[str, str]:
    """Collect a trained encoder's files; return its old and new digests if settings changed."""
    folder, identity, merged = run.folder, run.identity, tuned.base is None
    encoder = [CONFIG, WEIGHTS]
    if merged:
        weights = weight_files(folder) or [folder / "model.safetensors"]
        paths = {*settings_files(folder), folder / "config.json", *weights}
        encoder = sorted(path.relative_to(folder).as_posix() for path in paths)
    router = [ROUTER] if (folder / ROUTER).is_file() else []
    for name in [*encoder, *router, ENCODER_RECORD]:
        _stage_file(folder, name, staged)
    weights_digest = identity.weights
    if merged:
        weights_digest = find_checkpoint(str(staged), None).weights
    elif tuned.base_weights:  # old records lack it
        weights_digest = identify(staged, "the encoder", tuned.base_weights)
    if weights_digest != identity.weights:
        raise UserError(
            f"the encoder in {folder} has changed since it was trained: it is {weights_digest}, "
            f"not {identity.weights}. Its heads would not match it. Train it again."
        )
    new_digests: dict[str, str] = {}
    if _tidy_settings(staged) and merged:
        # The encoder is the same, but its digests depend on its settings too.
        new_identity = replace(identity, weights=find_checkpoint(str(staged), None).weights)
        new_digests = {
            identity.weights: new_identity.weights,
            identity.fingerprint: new_identity.fingerprint,
        }
    return new_digests


def _stage_file(folder: Path, name: str, staged: Path, staged_name: str | None = None) -> None:
    """Link to a file of a folder, or copy it if the system does not allow links.

    The staged file has the same name unless ``staged_name`` is given.
    """
    source, target = folder / name, staged / (staged_name or name)
    check_inside_folder(source, folder)
    if not source.is_file():
        raise UserError(f"{source} is missing, so others could not use the upload.")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)


# -- local paths -------------------------------------------------------------------------------


def _read_settings(staged: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the content of each JSON file, except for vocabularies."""
    for path in _list_files(staged):
        if path.suffix == ".json" and path.name not in _VOCABULARIES:
            name = path.relative_to(staged).as_posix()
            try:
                yield name, json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(
                    f"{name} of the encoder is not a readable JSON file: {error}."
                ) from error


def _tidy_settings(staged: Path) -> bool:
    """Remove local paths from the encoder's settings; return whether there were any."""

    def tidy(key: str, text: str) -> str:
        is_named_path = key.endswith("name_or_path") and _is_absolute(text)
        return PurePath(text).name if is_named_path or _is_path(text) else text

    changed = False
    for name, content in list(_read_settings(staged)):
        tidied = _map_texts(content, tidy)
        if name != ENCODER_RECORD and tidied != content:
            write_json(staged / name, tidied)  # replaces the link, not the file it points to
            changed = True
    return changed


def _tidy_record(record: dict[str, Any], new_digests: dict[str, str]) -> dict[str, Any]:
    """Return a record without local paths, and with the encoder's new digests."""

    def tidy(key: str, text: str) -> str:
        if key in _VERBATIM:
            return text
        if _is_absolute(text):
            return PurePath(text).name
        return _PATH.sub(r"\1", new_digests.get(text, text))

    tidied: dict[str, Any] = _map_texts(record, tidy)
    data = tidied.get("data")
    if isinstance(data, dict) and isinstance(data.get("source"), str):
        # Names of folders are private, even in a relative path.
        tidied["data"] = {**data, "source": PurePath(data["source"]).name or "data"}
    return tidied


def _is_path(text: str) -> bool:
    """Return whether a text is an absolute path, and not a token that begins with a slash."""
    return _is_absolute(text) and len(PurePath(text).parts) > 2 and "\n" not in text


def _is_absolute(text: str) -> bool:
    return PurePath(text).is_absolute() or text.startswith("~/")


def _map_texts(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Apply ``change``, which takes a key and its text, to every text of a JSON value."""
    if isinstance(value, dict):
        return {name: _map_texts(item, change, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, change, key) for item in value]
    return change(key, value) if isinstance(value, str) else value


def _check_no_paths(staged: Path, run_folder: Path) -> None:
    """Raise a UserError if a staged file contains a path of this machine."""
    paths = [path for path in (Path.home(), run_folder.resolve()) if len(path.parts) > 1]
    pattern = re.compile("|".join(rf"{re.escape(str(path))}(?![\w.-])" for path in paths) or "(?!)")
    for name, content in _read_settings(staged):

        def check(key: str, text: str, name: str = name) -> str:
            if pattern.search(text) or (key not in _VERBATIM and _is_path(text)):
                raise UserError(
                    f"{name} would publish a path of this machine: {key} is {text!r}. Remove it "
                    f"from {run_folder / name}, or train with another text."
                )
            return text

        _map_texts(content, check)


def _list_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


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
        is_llmcond = MANIFEST in remote_files and any(
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
        if status in (401, 403, 404):
            raise UserError(
                f"the hub does not let you write to {repo} ({status}: {message}). Name a "
                "repository of yours, or log in with a token that has write access: hf auth login, "
                "or HF_TOKEN."
            ) from error
        if status == 400:
            raise UserError(f"the hub rejected the upload to {repo}: {message}") from error
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
