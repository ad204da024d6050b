"""A copy of a run with its encoder and one head, for use on any machine with llmcond."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from llmcond.base.files import read_json, write_json
from llmcond.base.output import log
from llmcond.encoders import find_model
from llmcond.encoders.adapter import CONFIG, CREDITS, ENCODER_RECORD, ROUTER, WEIGHTS
from llmcond.encoders.checkpoint import WEIGHT_FILES, check_inside_folder, settings_files
from llmcond.heads.storage import weights_path
from llmcond.runs.embedder import Embedder
from llmcond.runs.run import IN_RUN_FOLDER, read_manifest

#: Name of the file that ``read_export`` reads.
EXPORT_SETTINGS = "llmcond.json"


def copy_run(run: Path, embedder: Embedder, out: Path) -> None:
    """Write a copy of a run to ``out/run``, and the selected head or prompt to ``out``.

    The files of a trained encoder, and of one that is a local folder, are copied too; others are
    found by name. Data and features are not copied, and records contain no local paths.

    Raises:
        UserError, OSError: a file is a link to outside the run, or cannot be written.
    """
    manifest, name = read_manifest(run), embedder.name
    encoder, target = manifest["encoder"], out / "run"
    local = run if encoder["model"] == IN_RUN_FOLDER else Path(encoder["model"]).expanduser()
    if find_model(encoder["model"]) is None and local.is_dir():
        for path in _list_encoder_files(local):
            check_inside_folder(path, local)
            path_copy = target / path.relative_to(local)
            path_copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, path_copy)
        encoder["model"] = IN_RUN_FOLDER
        base = embedder.encoder.resolved.checkpoint
        if base.adapter is not None and base.known is None and base.repo is None:
            log.warning(f"the encoder's base is not copied; it stays in {base.folder}")
    _write_record(target / "run.json", manifest, encoder["model"])
    if name != "none":
        folder = Path("heads", name)
        record = read_json(run / folder / "head.json")
        _write_record(target / folder / "head.json", record, encoder["model"])
        shutil.copyfile(weights_path(run / folder, record), target / folder / "head.safetensors")
    prompt = embedder.view.name if name == "none" else None
    write_json(out / EXPORT_SETTINGS, {"head": name, "prompt": prompt})


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


def _write_record(path: Path, record: dict[str, Any], model: str) -> None:
    """Write a record without local paths of data, encoder and features."""
    encoder = {**record["encoder"], "model": model}
    encoder["name"] = strip_path(encoder["name"])
    data = {**record["data"], "source": PurePath(record["data"]["source"]).name}
    portable = {key: value for key, value in record.items() if key != "store"}
    write_json(path, {**portable, "encoder": encoder, "data": data})


def strip_path(name: Any) -> Any:
    """Return the last part of an absolute path, and any other value unchanged."""
    is_path = isinstance(name, str) and PurePath(name).is_absolute()
    return PurePath(name).name if is_path else name
