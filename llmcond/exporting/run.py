"""A run's encoder and one head by themselves, in a folder that embeds wherever llmcond is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from llmcond.encoders import find_model
from llmcond.encoders.checkpoints.adapter import CONFIG, ROUTER, TUNED, WEIGHTS
from llmcond.encoders.checkpoints.checkpoint import WEIGHT_FILES, check_own, settings_files
from llmcond.files import read_json, write_json
from llmcond.heads.storage import weights_of
from llmcond.log import log
from llmcond.runs.embedder import Embedder
from llmcond.runs.manifest import HERE, read_manifest

#: What :func:`read_export` reads.
SETTINGS = "llmcond.json"


def copy_run(run: Path, embedder: Embedder, out: Path) -> None:
    """Write ``out/run``, and in ``out`` which head or prompt of it is meant.

    Of a trained encoder, and of one that is a folder on this machine, its files are copied as well;
    others are found by name. Data and features stay behind, and so do paths.

    Raises:
        UserError, OSError: a file is a link out of the run, or cannot be written.
    """
    manifest, name = read_manifest(run), embedder.name
    encoder, there = manifest["encoder"], out / "run"
    local = run if encoder["model"] == HERE else Path(encoder["model"]).expanduser()
    if find_model(encoder["model"]) is None and local.is_dir():
        for path in _encoder_files(local):
            check_own(path, local)
            place = there / path.relative_to(local)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        encoder["model"] = HERE
        base = embedder.encoder.resolved.checkpoint
        if base.adapter is not None and base.known is None and base.repo is None:
            log.warning(f"the encoder's base stays where it is, in {base.folder}")
    _write_record(there / "run.json", manifest, encoder["model"])
    if name != "none":
        folder = Path("heads", name)
        record = read_json(run / folder / "head.json")
        _write_record(there / folder / "head.json", record, encoder["model"])
        shutil.copyfile(weights_of(run / folder, record), there / folder / "head.safetensors")
    prompt = embedder.view.name if name == "none" else None
    write_json(out / SETTINGS, {"head": name, "prompt": prompt})


def read_export(folder: Path) -> dict[str, Any]:
    """Return which head and prompt an export's run is used with."""
    record = read_json(folder / SETTINGS)
    return {"head": record.get("head"), "prompt": record.get("prompt")}


def _encoder_files(folder: Path) -> Iterator[Path]:
    names = {CONFIG, WEIGHTS, ROUTER, TUNED}
    yield from (path for path in folder.glob("*") if path.name in names)
    yield from (path for path in folder.glob("adapter-*/*") if path.name in names)
    if (folder / "config.json").is_file():
        yield from settings_files(folder)
        yield from (path for pattern in WEIGHT_FILES for path in folder.glob(pattern))


def _write_record(path: Path, record: dict[str, Any], model: str) -> None:
    """Write a record without the paths of this machine: where data, encoder and features were."""
    encoder = {**record["encoder"], "model": model}
    encoder["name"] = without_path(encoder["name"])
    data = {**record["data"], "source": PurePath(record["data"]["source"]).name}
    kept = {key: value for key, value in record.items() if key != "store"}
    write_json(path, {**kept, "encoder": encoder, "data": data})


def without_path(name: Any) -> Any:
    """Return the last part of what is a path on this machine, and anything else as it is."""
    own = isinstance(name, str) and PurePath(name).is_absolute()
    return PurePath(name).name if own else name
