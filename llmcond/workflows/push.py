"""Put a run's heads onto the Hugging Face hub: never the data, nor its paths.

A trained encoder goes along; of a frozen one its name and revision, by which others find it.
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
    ROUTER,
    TUNED,
    WEIGHTS,
    Tuned,
    identify,
    read_tuned,
)
from llmcond.encoders.checkpoints.checkpoint import (
    SETTINGS,
    check_own,
    find_checkpoint,
    settings_files,
    weight_files,
)
from llmcond.errors import LlmcondError, UserError, first_line
from llmcond.evaluation.condition_checks import CALIBRATION
from llmcond.files import digest_file, gib, read_json, write_json, write_text
from llmcond.heads.storage import weights_of
from llmcond.log import log
from llmcond.report.card import heads_card
from llmcond.runs import AnyRun, open_any_run
from llmcond.runs.kind import find_kind
from llmcond.runs.manifest import HERE
from llmcond.version import __version__
from llmcond.workflows.account import RECORD, STATE
from llmcond.workflows.options.training import PushOptions

MANIFEST, CARD = "run.json", "README.md"

#: A checkpoint's files that hold tokens, which may look like paths.
_VOCABULARIES = {"tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"}
#: What an earlier push may have left in a repository, which would be taken for this one's.
_PUSHED = [*SETTINGS, CONFIG, TUNED, RECORD, CALIBRATION]
_PUSHED += ["heads/*", "*/config.json", "*.safetensors"]

#: Texts and names of the user's that decide what is computed: templates, and columns.
_VERBATIM = {"text", "instruction", "context", "instruction_format", "special_tokens"}
_VERBATIM |= {field.name for field in fields(Columns)}
#: An absolute path within a text.
_PATH = re.compile(r"(?<![\w.:/~-])~?(?:/[^\s/'\"`,;()]+)+/([^\s/'\"`,;()]+)")


class PushResult(DisplayedDict):
    """The repository ``repo``, its ``url``, the ``commit``, and the names of its ``files``."""

    __slots__ = ()


def push_to_hub(asked: PushOptions) -> PushResult:
    """Upload a run's heads, and its encoder if ``train-lora`` trained it, in one commit.

    Pushed are the heads, the files of a trained encoder, and the accounts of both, in which a path
    of this machine becomes its last name. Rows and features stay here. What an earlier push put
    there and this one does not have is deleted by the same commit.

    Raises:
        UserError: neither a trained encoder nor a fitted head, an encoder that others could not
            load, or a repository that cannot be written.
        LlmcondError: the hub cannot be reached, or has failed.
    """
    repo, revision = asked.repo, asked.revision
    _check_name(repo)
    run, tuned = _pushable(Path(asked.run))
    token = _token(repo, revision)
    with tempfile.TemporaryDirectory(prefix="llmcond-push-") as temporary:
        staged = Path(temporary)
        _stage(run, tuned, staged)
        files = sorted(path.relative_to(staged).as_posix() for path in _files(staged))
        size = sum((staged / name).stat().st_size for name in files)
        log.info(f"uploading {len(files)} files ({gib(size)}) to {repo}")
        url, commit = _upload(staged, files, repo, token, asked.private, revision)
    branch, folder = f" --revision {revision}" if revision else "", repo.partition("/")[2]
    log.info(f"{run.folder} -> {url}")
    log.info(
        f"to use it: hf download {repo}{branch} --local-dir {folder}, then "
        f'llmcond.{find_kind(run.kind).card.loader}("{folder}")'
    )
    return PushResult(repo=repo, url=url, commit=commit, files=files)


# -- what is there -----------------------------------------------------------------------------


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


def _pushable(folder: Path) -> tuple[AnyRun, Tuned | None]:
    """Return a run that others can use, and what training recorded of its encoder if it is trained.

    Raises:
        UserError: others could not use it, or there is nothing to push.
    """
    if not (folder / RECORD).is_file() and (folder / STATE).is_dir():
        raise UserError(
            f"the training in {folder} has not ended. Give its llmcond train-lora command "
            "again, which goes on where it stopped."
        )
    run = open_any_run(folder)
    if find_kind(run.kind).heads_need_data:
        raise UserError(
            f"{folder} is a run of the task {run.manifest['task']}: its heads rank the candidates "
            "of its data, which is never pushed, so others could not use them. Where the data may "
            f"be shared, upload the whole folder: hf upload OWNER/NAME {folder}"
        )
    encoder = run.manifest["encoder"]["model"]
    if encoder != HERE:
        if _only_here(encoder, folder):
            raise UserError(
                f"the encoder of {folder} is {encoder}, a folder that nobody else has. Upload it "
                "(hf upload OWNER/NAME FOLDER), and extract and fit by that name: llmcond extract "
                "--model OWNER/NAME --run another one."
            )
        if not run.head_names():
            raise UserError(
                f"{folder} has no fitted head, so there is nothing to push: everybody can have "
                f"{encoder}. Fit one first: llmcond fit-head --head mlp --run {folder}"
            )
        run.find_heads(run.head_names())  # none that nobody could load
        return run, None
    tuned = read_tuned(folder)
    if tuned is None or not (folder / RECORD).is_file():
        missing = folder / (TUNED if tuned is None else RECORD)
        raise UserError(f"{missing} is missing, so others could not use it. Train it anew.")
    if tuned.members > 1:
        raise UserError(
            f"{folder} is an ensemble of {tuned.members} adapters, which is not pushed as one. "
            f"Push a member (--run {folder / 'adapter-0'}), or distil them into one encoder: "
            f"llmcond train-lora --teacher {folder} --run another one."
        )
    if tuned.base is not None and _only_here(tuned.base, folder):
        raise UserError(
            f"{folder} is an adapter of {tuned.base}, a folder that nobody else has. Train it by "
            "llmcond train-lora --merge into another --run, and push that: then the whole encoder "
            "is in it."
        )
    return run, tuned


def _only_here(model: str, folder: Path) -> bool:
    """Return whether a model that a run's folder names is on this machine only."""
    named = model.count("/") == 1 and not _is_absolute(model) and not (folder / model).is_dir()
    return find_model(model) is None and not named


def _token(repo: str, revision: str | None) -> str:
    from huggingface_hub import get_token

    with _hub_errors(repo, revision):
        token = get_token()
    if token is None:
        raise UserError(
            "there is no token to write to the hub with. Log in: hf auth login, or set HF_TOKEN."
        )
    return token


# -- what is pushed ----------------------------------------------------------------------------


def stage_run(run_folder: Path, staged: Path) -> None:
    """Lay out in an empty folder what :func:`push_to_hub` uploads of a run; raises as that does."""
    _stage(*_pushable(run_folder), staged)


def _stage(run: AnyRun, tuned: Tuned | None, staged: Path) -> None:
    """Lay out what is pushed in a folder; files with paths in them are written anew."""
    folder = run.folder
    renamed = _stage_encoder(run, tuned, staged) if tuned else {}

    def account(name: str, **added: str) -> dict[str, Any]:
        check_own(folder / name, folder)
        record = {**read_json(folder / name), **added}
        write_json(staged / name, _tidy_record(record, renamed))
        return record

    for head in (f"heads/{name}" for name in run.head_names()):
        record = account(f"{head}/head.json")
        own_weights = weights_of(folder / head, record)
        _place(folder, str(own_weights.relative_to(folder)), staged, f"{head}/head.safetensors")
        if record.get("weights_sha256") != digest_file(own_weights):
            raise UserError(f"{folder / head} was damaged: its two files do not belong together.")
    usual = run.default_head()
    # Where they are downloaded, nothing says which of several was fitted last.
    account(MANIFEST, **({"default_head": usual[0]} if usual else {}))
    if tuned:
        account(RECORD)
        account(TUNED)
    if (folder / CALIBRATION).is_file():
        _place(folder, CALIBRATION, staged)
    if (folder / CARD).is_file():
        _place(folder, CARD, staged)
        path = _PATH.search((folder / CARD).read_text(encoding="utf-8"))
        if path is not None:
            log.info(f"{folder / CARD} is taken as it is, and names {path[0]}")
    elif not tuned:
        write_text(staged / CARD, heads_card(open_any_run(staged)))  # which has no paths any more
    _check_no_paths(staged, folder)


def _stage_encoder(run: AnyRun, tuned: Tuned, staged: Path) -> dict[str, str]:
    """Lay out a trained encoder's own files; return what it is called by then instead."""
    folder, own, merged = run.folder, run.identity, tuned.base is None
    encoder = [CONFIG, WEIGHTS]
    if merged:
        weights = weight_files(folder) or [folder / "model.safetensors"]
        paths = {*settings_files(folder), folder / "config.json", *weights}
        encoder = sorted(path.relative_to(folder).as_posix() for path in paths)
    router = [ROUTER] if (folder / ROUTER).is_file() else []
    for name in [*encoder, *router, TUNED]:
        _place(folder, name, staged)
    found = own.weights
    if merged:
        found = find_checkpoint(str(staged), None).weights
    elif tuned.base_weights:  # which old records lack
        found = identify(staged, "the encoder", tuned.base_weights)
    if found != own.weights:
        raise UserError(
            f"the encoder in {folder} has changed since it was trained: it is {found}, not "
            f"{own.weights}. Its heads would not fit it; train it anew."
        )
    renamed: dict[str, str] = {}
    if _tidy_settings(staged) and merged:
        # The same encoder by another name, as its settings decide what it is called.
        now = replace(own, weights=find_checkpoint(str(staged), None).weights)
        renamed = {own.weights: now.weights, own.fingerprint: now.fingerprint}
    return renamed


def _place(folder: Path, name: str, staged: Path, there: str | None = None) -> None:
    """Link to a file of a folder, or copy it where the system allows no links.

    It has the same name there unless another is given.
    """
    source, copy = folder / name, staged / (there or name)
    check_own(source, folder)
    if not source.is_file():
        raise UserError(f"{source} is missing, so others could not use what is pushed.")
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        copy.symlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, copy)


# -- paths of this machine ---------------------------------------------------------------------


def _settings(staged: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the content of each JSON file, but for vocabularies."""
    for path in _files(staged):
        if path.suffix == ".json" and path.name not in _VOCABULARIES:
            name = path.relative_to(staged).as_posix()
            try:
                yield name, json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(
                    f"{name} of the encoder is not a readable JSON file: {error}."
                ) from error


def _tidy_settings(staged: Path) -> bool:
    """Take paths out of the encoder's own settings; return whether there were any."""

    def tidy(key: str, text: str) -> str:
        named = key.endswith("name_or_path") and _is_absolute(text)
        return PurePath(text).name if named or _leads_somewhere(text) else text

    changed = False
    for name, before in list(_settings(staged)):
        after = _mapped(before, tidy)
        if name != TUNED and after != before:
            write_json(staged / name, after)  # in the place of the link, not through it
            changed = True
    return changed


def _tidy_record(record: dict[str, Any], renamed: dict[str, str]) -> dict[str, Any]:
    """Return a record of ours without paths, and with the encoder's other name if it has one."""

    def tidy(key: str, text: str) -> str:
        if key in _VERBATIM:
            return text
        if _is_absolute(text):
            return PurePath(text).name
        return _PATH.sub(r"\1", renamed.get(text, text))

    tidied: dict[str, Any] = _mapped(record, tidy)
    data = tidied.get("data")
    if isinstance(data, dict) and isinstance(data.get("source"), str):
        # Folders are the user's own matter also where they are relative.
        tidied["data"] = {**data, "source": PurePath(data["source"]).name or "data"}
    return tidied


def _leads_somewhere(text: str) -> bool:
    """Return whether a text is a path, and not a token that begins with a slash."""
    return _is_absolute(text) and len(PurePath(text).parts) > 2 and "\n" not in text


def _is_absolute(text: str) -> bool:
    return PurePath(text).is_absolute() or text.startswith("~/")


def _mapped(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return JSON with every text as ``change`` makes it, which is given its key too."""
    if isinstance(value, dict):
        return {name: _mapped(item, change, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change, key) for item in value]
    return change(key, value) if isinstance(value, str) else value


def _check_no_paths(staged: Path, run_folder: Path) -> None:
    """Refuse to publish where things lie on this machine."""
    places = [place for place in (Path.home(), run_folder.resolve()) if len(place.parts) > 1]
    own = re.compile("|".join(rf"{re.escape(str(place))}(?![\w.-])" for place in places) or "(?!)")
    for name, content in _settings(staged):

        def check(key: str, text: str, name: str = name) -> str:
            if own.search(text) or (key not in _VERBATIM and _leads_somewhere(text)):
                raise UserError(
                    f"{name} would publish a path of this machine: {key} is {text!r}. Take it out "
                    f"of {run_folder / name}, or train with another text."
                )
            return text

        _mapped(content, check)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# -- the hub -----------------------------------------------------------------------------------


def _upload(
    staged: Path, files: list[str], repo: str, token: str, private: bool, revision: str | None
) -> tuple[str, str]:
    """Make the repository and the one commit; return the address and the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(token=token, library_name="llmcond", library_version=__version__)
    with _hub_errors(repo, revision):
        # Not False, which overrules what an organisation has chosen for its own.
        url = str(api.create_repo(repo, private=private or None, exist_ok=True))
        if private and not api.model_info(repo).private:
            raise UserError(
                f"{repo} is there already, and public. Make it private in its settings on the hub, "
                "name another one, or leave out --private."
            )
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo, revision=revision)
        ours = MANIFEST in there and any(fnmatch(name, "heads/*/head.json") for name in there)
        if not ours and {CONFIG, "config.json"} & set(there):
            raise UserError(
                f"{repo} holds another model, which llmcond did not push. Name another OWNER/NAME."
            )
        # What an earlier push left there and this one does not have.
        before = {name for name in there for pattern in _PUSHED if fnmatch(name, pattern)}
        left = sorted(before - {*files}) if ours else []
        # Not upload_folder, which cuts what is large into several commits.
        done = api.create_commit(
            repo,
            [
                *(CommitOperationDelete(name) for name in left),
                *(CommitOperationAdd(name, staged / name) for name in files),
            ],
            commit_message=f"Push a run of llmcond {__version__}",
            revision=revision,
        )
    return url if revision is None else f"{url}/tree/{revision}", str(done.oid)


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Say what went wrong on the hub in our own words."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError, by way
        HfHubHTTPError,
        HTTPError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    away = f"the Hugging Face hub cannot be reached, so nothing was pushed to {repo}"
    try:
        yield
    except RevisionNotFoundError as error:
        raise UserError(f"{repo} has no revision {revision!r}. Name a branch.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = " ".join(str(error.server_message or error.response.reason_phrase).split())
        if status in (401, 403, 404):
            raise UserError(
                f"the hub does not let you write to {repo} ({status}: {said}). Name a repository "
                "of yours, or log in with a token that may write: hf auth login, or HF_TOKEN."
            ) from error
        if status == 400:
            raise UserError(
                f"the hub does not take what was to be pushed to {repo}: {said}"
            ) from error
        raise LlmcondError(
            f"the hub failed ({status}: {said}), and nothing was pushed to {repo}. Give the same "
            "command again later."
        ) from error
    except OfflineModeIsEnabled as error:
        raise LlmcondError(f"{away}: HF_HUB_OFFLINE is set. Unset it.") from error
    except HTTPError as error:
        raise LlmcondError(f"{away}: {first_line(error)}. Check the connection.") from error
    except (OSError, RuntimeError, ValueError) as error:
        if str(error).startswith("Invalid metadata in README.md"):
            raise UserError(f"the hub does not take {CARD}: {error}") from error
        raise LlmcondError(
            f"pushing to {repo} failed: {first_line(error)}. Give the same command again."
        ) from error
