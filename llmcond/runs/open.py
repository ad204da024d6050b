"""Resolving the run or bundled model that a user named, opening it, and extracting into it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from llmcond.base.errors import LlmcondError, UserError, format_list, shortened_repr
from llmcond.base.files import check_not_current, is_vacant, path_exists, write_json
from llmcond.base.output import ExtractionBar, log
from llmcond.base.package import (
    DEFAULT_MODEL,
    DEFAULT_RUN,
    bundled_folder,
    bundled_names,
    pretrained_folder,
    pretrained_names,
)
from llmcond.data.datasets import Columns, Dataset, RatingScale
from llmcond.data.readers import SAMPLE
from llmcond.encoders import EncoderInput, EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.adapter import CARD, CONFIG, RUN_RECORD
from llmcond.encoders.checkpoint import (
    RECORDS,
    SAFETENSORS,
    SETTINGS,
    download_files,
    hub_errors,
    is_hub_name,
)
from llmcond.encoders.resolve import cross_encoder_error, is_server
from llmcond.encoders.settings import find_model, suggest_model
from llmcond.encoders.spec import InputError, truncation_note
from llmcond.features.extract import Extraction, MissingCount, PlanExecutor, extract
from llmcond.prompts import Prompt, load_prompt
from llmcond.runs.run import NO_DATA, Run, create_manifest, portable_model_name, read_manifest
from llmcond.tasks import find_task

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder
    from llmcond.features.store import FeatureStore

#: Patterns for the files of a run on the hub.
_RUN_FILES = (
    *RECORDS, CARD, "heads/*/head.json", CONFIG, *SETTINGS, "*/config.json",
    *SAFETENSORS,
)  # fmt: skip


def open_run(folder: Path, *, cross: bool = False) -> Run:
    """Open a run of rated rows. With ``cross``, a cross-encoder's run is accepted as well.

    Raises:
        UserError: As ``open_any_run``, or the run is of another kind of task.
    """
    run = open_any_run(folder, cross=cross)
    if not run.is_rated:
        commands = ["extract", "fit-head", "evaluate", "sweep", "compare-prompts", "heads"]
        commands += [run.kind.command] if run.kind.command else []
        raise UserError(
            f"this command needs rated pairs of sentences, and {folder} is a run of the task "
            f"{run.manifest['task']}, which has none. Commands for that run: "
            f"{', '.join(commands[:-1])} and {commands[-1]}."
        )
    return run


def open_any_run(folder: Path, *, cross: bool = False) -> Run:
    """Open a run of any task. With ``cross``, a cross-encoder's run is accepted as well.

    Raises:
        UserError: The folder does not exist, is not a run, was written by a newer version, or
            holds a cross-encoder.
    """
    check_run_exists(folder)
    if _is_encoder(folder):
        raise UserError(
            f"{folder} is an encoder, and this command needs a run. Extract features with it: "
            f"llmcond extract --model {folder} --run DIR"
        )
    if not (folder / "run.json").is_file():
        raise UserError(
            f"{folder} is not a run of llmcond (it has no run.json). Name another folder. This one "
            "was not changed."
        )
    run = Run(folder, read_manifest(folder))
    if run.cross is not None and not cross:
        raise cross_encoder_error(folder)
    return run


def check_run_exists(folder: Path) -> None:
    """Check that a run's folder exists and is not empty, before the slow imports of commands.

    Raises:
        UserError: It does not exist, or is empty.
    """
    if is_vacant(folder):
        others = sorted(str(path.parent) for path in folder.parent.glob("*/run.json"))
        named = f"Name an existing one ({format_list(others)}), or extract" if others else "Extract"
        raise UserError(
            f"there is no run at {folder}. {named} features first: llmcond extract --model MODEL "
            f"--run {folder}"
        )


def run_exists(folder: Path, *, cross: bool = False) -> bool:
    """Return whether ``folder`` is a run. A folder that does not exist, or is empty, is not.

    Raises:
        UserError: As ``open_any_run`` if the folder holds something else, or no run can be created
            because its path contains control characters, or it is the current folder.
    """
    if is_vacant(folder):
        path = str(folder.absolute())
        if re.search(r"[\x00-\x1f\x7f]", path):
            raise UserError(
                f"{path!r} contains control characters, so features cannot be stored in it. Name "
                "another --run."
            )
        check_not_current(folder)
        return False
    open_any_run(folder, cross=cross)
    return True


def resolve_run(
    run: str | Path | None, model: str | None = None, revision: str | None = None
) -> Path:
    """Resolve the folder of a run, a trained model or an encoder; one on the hub is downloaded.

    Bundled models and models on the hub have the layout of a run. An encoder gets a temporary run,
    in which it embeds zero-shot.

    Args:
        run: The folder of a run or of an encoder; as text, also a name as for ``model``, if there
            is no folder of that name. None: ``runs/default`` if it was created from the user's
            data, otherwise the default bundled model.
        model: The name of a bundled model or of a known encoder, or the ``OWNER/NAME`` of a model
            that ``llmcond push`` uploaded to the hub or of any encoder there, or a folder.
        revision: A branch, tag or commit of a model on the hub. None: the newest version.

    Raises:
        UserError: Both ``run`` and ``model`` were given, the run does not exist, the model does not
            exist or is no encoder, or a revision was given for anything else.
        LlmcondError: The hub cannot be reached.
    """
    if model is not None and run is not None:
        raise UserError(f"--run is {run} and --model is {model}. Give only one of them.")
    reference = run if model is None else model
    if not isinstance(reference, str | PurePath | None):
        raise UserError(
            f"the run or model is {shortened_repr(reference)}; expected a folder or a name."
        )
    if isinstance(reference, str) and is_server(reference):
        return find_encoder_run(reference, revision)
    if reference is None:
        folder: Path | None = _default_run()
    else:
        folder = _find_folder(reference, is_model=model is not None)
    if folder is None:
        return _find_on_hub(str(reference), revision)
    if revision is not None:
        raise UserError(
            f"revision is {revision!r}, but {reference or 'the default model'} is not on the hub. "
            "Leave out revision."
        )
    check_run_exists(folder)
    if not _is_encoder(folder):
        return folder
    # A folder may have the name of a known encoder.
    return find_encoder_run(str(folder if find_model(str(folder)) is None else folder.absolute()))


def local_folder(name: str | PurePath) -> Path:
    """Return a folder, or, if it does not exist, that of the bundled model of this name."""
    path = Path(name)
    return path if path_exists(path) else pretrained_folder(str(name)) or path


def _find_folder(reference: str | PurePath, *, is_model: bool) -> Path | None:
    """Return the folder of a run or model on this machine; None for a name of another one.

    Raises:
        UserError: A path that does not exist is the name of a bundled model.
    """
    name, path = str(reference), Path(reference)
    bundled = pretrained_folder(name)
    if is_model and (bundled is not None or find_model(name) is not None):
        return bundled
    if path_exists(path):
        return path
    if bundled is not None and not isinstance(reference, str):
        raise UserError(
            f"there is no run at {name}, but a bundled model has that name: use --model {name}."
        )
    return bundled if isinstance(reference, str) else path


def _is_encoder(folder: Path) -> bool:
    """Return whether a folder holds an encoder, and no run."""
    names = ("config.json", CONFIG, "modules.json")
    return not (folder / RUN_RECORD).exists() and any((folder / name).is_file() for name in names)


def _default_run() -> Path:
    if run_exists(DEFAULT_RUN, cross=True):
        if open_any_run(DEFAULT_RUN, cross=True).manifest["data"]["source"] != SAMPLE:
            return DEFAULT_RUN
        log.info(
            f"{DEFAULT_RUN} was created from the bundled sample, so the bundled model is used "
            f"(--run {DEFAULT_RUN} to use that run)"
        )
    return bundled_folder("models") / DEFAULT_MODEL


def _no_such_model(name: str) -> str:
    """Return the error message for a name that is neither a run, a model nor an encoder."""
    bundled = f"The bundled models are {', '.join(map(repr, pretrained_names()))}."
    models = suggest_model(name, pretrained_names(), default=bundled)
    return (
        f"there is no run or model {name}. {models} A model or encoder on the hub is named "
        "OWNER/NAME, and one on this machine by its folder (`llmcond models` lists known encoders)."
    )


def _find_on_hub(name: str, revision: str | None) -> Path:
    """Return the run of a known encoder, or download the run or the encoder of a hub name.

    Of a run, its records, heads and encoder are downloaded, but neither code nor pickles.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if find_model(name) is not None:
        return find_encoder_run(name, revision)
    if not is_hub_name(name):
        raise UserError(_no_such_model(name))
    try:
        with hub_errors(name, revision, None, encoder=False):
            try:
                record = hf_hub_download(name, RUN_RECORD, revision=revision)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                return find_encoder_run(name, revision)
            # The manifest is checked before large files are downloaded.
            folder = Path(record).parent
            read_manifest(folder)
            return download_files(name, folder.name, _RUN_FILES)
    except LlmcondError as error:
        raise type(error)(
            f"there is no local run at {name}, so it was looked up on the hub: {error}"
        ) from error


# -- runs of an encoder alone ------------------------------------------------------------------

#: The folders of this process's runs, which are removed when it ends, by model and fingerprint.
_FOLDERS: dict[tuple[str, str], TemporaryDirectory[str]] = {}


def find_encoder_run(model: str, revision: str | None = None) -> Path:
    """Return the folder of a run that has only an encoder, in its default settings.

    The folder is temporary. Its prompts are the bundled ones that the encoder can use; the prompt
    that suits the encoder is the default.

    Args:
        model: alias, hub name or folder of the encoder.
        revision: branch, tag or commit on the hub.

    Raises:
        UserError: the encoder does not exist, or is a cross-encoder.
        LlmcondError: the hub cannot be reached.
    """
    resolved = resolve(model, EncoderOptions(revision=revision))
    name = portable_model_name(model, resolved)
    key = name, resolved.identity.fingerprint
    if key not in _FOLDERS:
        for assumption in resolved.assumed:
            log.info(f"assumed: {assumption}")
        data = Dataset({}, NO_DATA, Columns(), RatingScale(), 0).to_json()
        manifest = create_manifest(name, resolved, data, "float16", find_task())
        for prompt in map(load_prompt, bundled_names("prompts")):
            if not prompt.obstacle(resolved.identity):
                manifest["prompts"][prompt.name] = {"prompt": prompt.to_json()}
        temporary = TemporaryDirectory(prefix="llmcond-")
        write_json(Path(temporary.name) / "run.json", manifest)
        _FOLDERS[key] = temporary
    return Path(_FOLDERS[key].name)


class LazyEncoder:
    """An encoder that is loaded at the first call.

    With ``execute``, inputs are encoded elsewhere, by encoders of the same identity.
    ``reported_truncation`` says whether the log has a line about long inputs, as one is enough for
    a command that encodes texts under several conditions.
    """

    reported_truncation = False

    def __init__(self, resolved: ResolvedEncoder, execute: PlanExecutor | None = None) -> None:
        self.resolved, self.execute = resolved, execute

    @cached_property
    def _encoder(self) -> Encoder:
        from llmcond.encoders.encoder import Encoder

        return Encoder(self.resolved)

    def __call__(self) -> Encoder:
        """Return the encoder."""
        return self._encoder

    @property
    def name(self) -> str:
        """The encoder's name in messages."""
        return self.resolved.checkpoint.name


def extract_other_data(
    run: Run, prompts: Sequence[Prompt], inputs: Callable[[Prompt], Any], device: str
) -> FeatureStore:
    """Extract ``inputs`` of data other than the run's, and return the store that holds them.

    Raises:
        UserError: The run's encoder is missing or has changed, or as ``extract_inputs``.
    """
    encoder = LazyEncoder(run.resolve_encoder(device))
    store = run.store_for_other_texts(encoder.resolved.identity)
    for prompt in prompts:
        extract_inputs(store, encoder, prompt.name, inputs(prompt))
    return store


def extract_inputs(
    store: FeatureStore,
    encoder: LazyEncoder,
    name: str,
    inputs: Iterable[EncoderInput],
    missing: MissingCount | None = None,
) -> Extraction:
    """Extract inputs with a progress bar, and log a summary that begins with ``name``.

    Raises:
        UserError: The encoder returned NaN or infinity; if the inputs can locate an input, the
            message names its row.
        LlmcondError: The encoder failed, or the disk is full.
    """
    resolved = encoder.resolved
    try:
        with ExtractionBar() as bar:
            extraction = extract(
                inputs,
                store,
                encoder,
                bar,
                by_prefix=resolved.shares_prefixes,
                missing=missing,
                execute=encoder.execute,
            )
    except InputError as error:
        where = getattr(inputs, "locate", lambda _: None)(error.item)
        if where is None:
            raise
        raise UserError(f"{where}, prompt {name}: {error}") from error
    summary = "nothing to encode, the vectors of all inputs are already stored"
    if extraction.n_computed:
        summary = (
            f"{extraction.n_computed:,} of {extraction.n_inputs:,} inputs encoded in "
            f"{extraction.seconds:.1f} s, {extraction.n_tokens / extraction.seconds:,.0f} tokens/s"
        )
    log.info(f"{name}: {summary}")
    if extraction.n_truncated and not encoder.reported_truncation:
        windows = resolved.checkpoint.server is None
        limit = resolved.identity.limit
        log.info(truncation_note(extraction.n_truncated, limit, windows=windows))
        encoder.reported_truncation = True
    return extraction


def extract_run(
    run: Run, encoder: LazyEncoder, prompt: Prompt, missing: MissingCount | None = None
) -> tuple[Extraction, dict[str, Any]]:
    """Extract a run's data under a prompt. Return the extraction and its record in run.json."""
    resolved, inputs = encoder.resolved, run.task.inputs(run.data, prompt)
    extraction = extract_inputs(run.store(), encoder, prompt.name, inputs, missing)
    record = {
        "n_inputs": extraction.n_inputs,
        "n_computed": extraction.n_computed,
        "n_truncated": extraction.n_truncated,
        "max_length": resolved.identity.max_length,
        "device": resolved.device,
        "runtime": resolved.runtime,
        "share_prefixes": resolved.shares_prefixes,
    }
    run.record_prompt(prompt, record)
    return extraction, record
