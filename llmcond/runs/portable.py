"""Copies of runs that work on other machines: without data, features and local paths.

A trained encoder is copied with the heads. For a frozen encoder, its name and revision are enough
for others to find it.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Annotated, Any

from annotated_types import MinLen

from llmcond.base.errors import UserError
from llmcond.base.files import (
    check_new_folder,
    create_folder_atomically,
    digest_file,
    expand_home,
    read_json,
    write_json,
)
from llmcond.base.output import log
from llmcond.base.package import pretrained_folder
from llmcond.base.records import read_record
from llmcond.data.datasets import Columns
from llmcond.data.readers import hub_dataset
from llmcond.encoders import find_model
from llmcond.encoders.adapter import (
    CARD,
    CONFIG,
    CREDITS,
    ENCODER_RECORD,
    ROUTER,
    RUN_RECORD,
    TRAINING_RECORD,
    WEIGHTS,
    EncoderRecord,
    identify,
    read_encoder_record,
)
from llmcond.encoders.checkpoint import (
    WEIGHT_FILES,
    Checkpoint,
    check_inside_folder,
    find_checkpoint,
    settings_files,
    weight_files,
)
from llmcond.encoders.resolve import is_server
from llmcond.features.view import FeatureView
from llmcond.heads.storage import weights_path
from llmcond.runs.open import open_any_run
from llmcond.runs.run import IN_RUN_FOLDER, Run, read_manifest

FORMAT = 1

#: Names and addresses of licences by SPDX identifier.
LICENCES = {
    "Apache-2.0": ("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0"),
    "CC-BY-3.0": ("CC BY 3.0", "https://creativecommons.org/licenses/by/3.0/"),
    "CC-BY-4.0": ("CC BY 4.0", "https://creativecommons.org/licenses/by/4.0/"),
    "CC0-1.0": ("CC0 1.0", "https://creativecommons.org/publicdomain/zero/1.0/"),
    "CDLA-Permissive-1.0": ("CDLA-Permissive-1.0", "https://cdla.dev/permissive-1-0/"),
    "CDLA-Sharing-1.0": ("CDLA-Sharing-1.0", "https://cdla.dev/sharing-1-0/"),
    "MIT": ("MIT", "https://opensource.org/license/mit"),
}


@dataclass(frozen=True)
class Work:
    """A model or dataset that a model derives from.

    Attributes:
        name: its name.
        use: what it was used as.
        authors: its authors.
        licence: SPDX identifier of its licence.
        url: its address.
        origin: what is known about its sources.
        dataset: its name as a dataset on the hub; empty if it is not there.
    """

    name: str
    use: str
    authors: str
    licence: str
    url: str
    origin: str = ""
    dataset: str = ""


@dataclass(frozen=True)
class Credits:
    """The credits of a model.

    Attributes:
        licence: SPDX identifier of the licence of the model's weights.
        works: the works that it derives from.
    """

    licence: str
    works: Annotated[Sequence[Work], MinLen(1)]

    @property
    def metadata(self) -> dict[str, Any]:
        """The licence and the datasets in a model card's metadata."""
        datasets = [work.dataset for work in self.works if work.dataset]
        return {"license": self.licence.lower(), **({"datasets": datasets} if datasets else {})}

    def to_markdown(self) -> str:
        """Return a section of a model card. No text of the credits is interpreted as Markdown."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "## Data and licences\n"
        yield f"The weights of this model are under the licence {_licence_link(self.licence)}."
        yield "They derive from the works in this table, and contain no text of the data."
        yield "If you share the model, or publish work with it, name these works and licences.\n"
        yield "| work | used as | authors | licence |\n|---|---|---|---|"
        for work in self.works:
            cells = (_link(work.name, work.url), _plain(work.use), _plain(work.authors))
            yield f"| {' | '.join(cells)} | {_licence_link(work.licence)} |"
        for work in self.works:
            if work.origin:
                yield f"\n{_plain(work.name)}: {_plain(work.origin)}"


def read_credits(folder: Path) -> Credits | None:
    """Read the credits of the model in a folder; None if it has none.

    Raises:
        UserError: the file cannot be read.
        LlmcondError: the file is damaged, or a newer version wrote it.
    """
    path = folder / CREDITS
    if not path.is_file():
        return None
    return read_record(path, Credits, "Copy it again.", version=FORMAT)


def _licence_link(identifier: str) -> str:
    return _link(*LICENCES.get(identifier, (identifier, "")))


def _link(text: str, url: str) -> str:
    is_address = re.fullmatch(r"https://[\w./~%+-]+", url) is not None
    return f"[{_plain(text)}]({url})" if is_address else _plain(text)


def _plain(text: str) -> str:
    """Escape a text, which may come from somebody else's model, for one line of Markdown."""
    return re.sub(r"([\\`*_{}\[\]#|!~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


#: The folder with the state of a training in progress.
_TRAINING_STATE = "training"
#: Files of a checkpoint that hold tokens, which may look like paths.
_VOCABULARIES = {"tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"}

#: Keys of the user's texts and names that decide what is computed: templates and columns.
_VERBATIM = {"text", "instruction", "context", "instruction_format", "special_tokens"}
_VERBATIM |= {field.name for field in fields(Columns)}
#: A pattern for an absolute path within a text.
_PATH = re.compile(r"(?<![\w.:/~-])~?(?:/[^\s/'\"`,;()]+)+/([^\s/'\"`,;()]+)")


def open_portable_run(folder: Path, heads: Sequence[str] = ()) -> tuple[Run, EncoderRecord | None]:
    """Open a run, and check that others could use a copy of it.

    Args:
        folder: the run's folder.
        heads: names of the heads in the copy; empty: all.

    Returns:
        The run, and the record of its encoder if that was trained, otherwise None.

    Raises:
        UserError: others could not use the run, or it has neither a trained encoder nor a head.
    """
    if not (folder / TRAINING_RECORD).is_file() and (folder / _TRAINING_STATE).is_dir():
        raise UserError(
            f"the training in {folder} is not finished. Run its llmcond train-lora command again, "
            "which continues where it stopped."
        )
    run = open_any_run(folder)
    if run.kind.heads_need_data:
        raise UserError(
            f"{folder} is a run of the task {run.manifest['task']}. Its heads rank candidates of "
            "the data, which is never pushed, so others could not use them. If the data may be "
            f"shared, upload the whole folder: hf upload OWNER/NAME {folder}"
        )
    encoder = run.manifest["encoder"]["model"]
    if encoder != IN_RUN_FOLDER:
        if is_server(encoder):
            raise UserError(
                f"the encoder of {folder} is behind a server, {encoder}, which others may not "
                "reach. Extract and fit with an encoder of the hub in another run: llmcond extract "
                "--model OWNER/NAME --run OTHER"
            )
        if _is_local_only(encoder, folder):
            raise UserError(
                f"the encoder of {folder} is {encoder}, a folder that nobody else has. Upload it "
                f"(hf upload OWNER/NAME FOLDER){_or_known(run.manifest['encoder'].get('like'))}. "
                "Then extract and fit with that name in another run: llmcond extract --model "
                "OWNER/NAME --run OTHER"
            )
        if not run.head_names():
            raise UserError(
                f"{folder} has no fitted head, so there is nothing to push: everybody can already "
                f"load {encoder}. Fit one first: llmcond fit-head --head mlp --run {folder}"
            )
        # Raises an error for a head that nobody could load.
        run.find_heads(heads or run.head_names())
        return run, None
    tuned = read_encoder_record(folder)
    if tuned is None or not (folder / TRAINING_RECORD).is_file():
        missing = folder / (ENCODER_RECORD if tuned is None else TRAINING_RECORD)
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
            f"whole encoder{_or_known(tuned.like)}."
        )
    return run, tuned


def _or_known(like: str | None) -> str:
    """Return the advice to use a known encoder by its name; empty if a folder resembles none."""
    return f", or use {like} if the folder is an unchanged copy of it" if like else ""


def _is_local_only(model: str, folder: Path) -> bool:
    """Return whether the model that a run names exists only on this machine."""
    is_hub_name = (
        model.count("/") == 1 and not _is_absolute(model) and not (folder / model).is_dir()
    )
    return find_model(model) is None and not is_hub_name and pretrained_folder(model) is None


def stage_run(
    run: Run, tuned: EncoderRecord | None, staged: Path, heads: Sequence[str] = ()
) -> None:
    """Collect the files of a portable run in an empty folder; files with local paths are rewritten.

    Args:
        run: the run, and
        tuned: its encoder's record, as from ``open_portable_run``.
        staged: the folder, which gets links to the files that are not rewritten.
        heads: names of the heads; empty: all.

    Raises:
        UserError: a file is missing, damaged or a link out of the run, a head does not exist, or a
            path would remain.
    """
    folder = run.folder
    names = run.full_head_names(heads) if heads else run.head_names()
    new_digests = _stage_encoder(run, tuned, staged) if tuned else {}

    def stage_record(name: str, **added: str) -> dict[str, Any]:
        check_inside_folder(folder / name, folder)
        record = {**read_json(folder / name), **added}
        write_json(staged / name, _tidy_record(record, new_digests))
        return record

    for head in (f"heads/{name}" for name in names):
        record = stage_record(f"{head}/head.json")
        weights = weights_path(folder / head, record)
        _stage_file(folder, str(weights.relative_to(folder)), staged, f"{head}/head.safetensors")
        if record.get("weights_sha256") != digest_file(weights):
            raise UserError(
                f"{folder / head} is damaged: its two files do not belong together. Fit it again."
            )
    # The default head is recorded, because a copy does not show which head was fitted last.
    default = (run.default_head() or ("",))[0]
    if names and default not in names:
        default = run.best_head({name: run.head_record(name) for name in names}) or names[-1]
        log.info(f"{folder}: the default of the copy is the head {default}")
    stage_record(RUN_RECORD, **({"default_head": default} if names else {}))
    if tuned:
        stage_record(TRAINING_RECORD)
        stage_record(ENCODER_RECORD)
    for name in (CREDITS, CARD):
        if (folder / name).is_file():
            _stage_file(folder, name, staged)
    if (folder / CARD).is_file():
        path = _PATH.search((folder / CARD).read_text(encoding="utf-8"))
        if path is not None:
            log.info(f"the text of {folder / CARD} is not changed, and contains the path {path[0]}")
    _check_no_paths(staged, folder)


def save_portable_run(folder: Path, out: Path, heads: Sequence[str] = ()) -> None:
    """Save a portable copy of a run in a new folder; ``heads`` are as for ``stage_run``.

    Raises:
        UserError: as ``open_portable_run`` and ``stage_run``, or the folder is not empty or cannot
            be written.
        DiskFullError: the disk is full.
    """
    check_new_folder(out)
    run, tuned = open_portable_run(folder, heads)
    with tempfile.TemporaryDirectory(prefix="llmcond-") as temporary:
        stage_run(run, tuned, Path(temporary), heads)
        with create_folder_atomically(out) as target:
            shutil.copytree(temporary, target, dirs_exist_ok=True)


def _stage_encoder(run: Run, tuned: EncoderRecord, staged: Path) -> dict[str, str]:
    """Collect a trained encoder's files; return its old and new digests if settings changed."""
    folder, identity, merged = run.folder, run.identity, tuned.base is None
    encoder = [CONFIG, WEIGHTS]
    if merged:
        weights = weight_files(folder, ".safetensors") or [folder / "model.safetensors"]
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
    for path in list_files(staged):
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
    """Return a record without local paths and the store, and with the encoder's new digests."""

    def tidy(key: str, text: str) -> str:
        if key in _VERBATIM:
            return text
        if _is_absolute(text):
            return PurePath(text).name
        return _PATH.sub(r"\1", new_digests.get(text, text))

    tidied: dict[str, Any] = _map_texts(record, tidy)
    tidied.pop("store", None)
    data = tidied.get("data")
    if isinstance(data, dict) and isinstance(data.get("source"), str):
        # Names of folders are private, even in a relative path. Names on the hub are not.
        source = data["source"] if hub_dataset(data["source"]) else PurePath(data["source"]).name
        tidied["data"] = {**data, "source": source or "data"}
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


def list_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders."""
    return [path for path in folder.rglob("*") if path.is_file()]


# -- copies --------------------------------------------------------------------------------------

#: Name of the file that ``read_export`` reads.
EXPORT_SETTINGS = "llmcond.json"


def copy_run(run: Path, head: str, view: FeatureView, checkpoint: Checkpoint, out: Path) -> None:
    """Write a copy of a run to ``out/run``, and its selected head or prompt to ``out``.

    The files of a trained encoder, and of one that is a local folder, are copied too; others are
    found by name. Data and features are not copied, and records contain no local paths.

    Args:
        run: folder of the run.
        head: name of the head; ``none``: zero-shot.
        view: the features of zero-shot embeddings.
        checkpoint: checkpoint of the run's encoder.
        out: folder of the copy.

    Raises:
        UserError, OSError: a file is a link to outside the run, or cannot be written.
    """
    manifest = read_manifest(run)
    encoder, target = manifest["encoder"], out / "run"
    local = run if encoder["model"] == IN_RUN_FOLDER else expand_home(encoder["model"])
    if find_model(encoder["model"]) is None and local.is_dir():
        for path in _list_encoder_files(local):
            check_inside_folder(path, local)
            path_copy = target / path.relative_to(local)
            path_copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, path_copy)
        encoder["model"] = IN_RUN_FOLDER
        base = checkpoint.base
        if base is not None and base.repo is None and find_model(base.name) is None:
            log.warning(f"the encoder's base is not copied; it stays in {checkpoint.folder}")
    write_json(target / "run.json", _tidy_record(manifest, {}))
    if head != "none":
        folder = Path("heads", head)
        record = read_json(run / folder / "head.json")
        head_encoder = {**record["encoder"], "model": encoder["model"]}
        record_copy = _tidy_record({**record, "encoder": head_encoder}, {})
        write_json(target / folder / "head.json", record_copy)
        shutil.copyfile(weights_path(run / folder, record), target / folder / "head.safetensors")
    selected = open_any_run(run).head_arguments(head, view)
    write_json(out / EXPORT_SETTINGS, {"prompt": None, **selected})


def read_export(folder: Path) -> dict[str, Any]:
    """Return the head and the prompt that an export's run is used with."""
    record = read_json(folder / EXPORT_SETTINGS)
    return {"head": record.get("head"), "prompt": record.get("prompt")}


def _list_encoder_files(folder: Path) -> Iterator[Path]:
    names = {CONFIG, WEIGHTS, ROUTER, ENCODER_RECORD, CREDITS}
    yield from (path for path in folder.glob("*") if path.name in names)
    yield from (path for path in folder.glob("adapter-*/*") if path.name in names)
    if (folder / "config.json").is_file():
        yield from settings_files(folder)
        yield from (path for pattern in WEIGHT_FILES for path in folder.glob(pattern))


def strip_path(name: Any) -> Any:
    """Return the last part of an absolute path, and any other value unchanged."""
    is_path = isinstance(name, str) and PurePath(name).is_absolute()
    return PurePath(name).name if is_path else name
