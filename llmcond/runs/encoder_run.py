"""Runs of an encoder alone: without data and heads, for zero-shot embeddings by an encoder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmcond.bundled import bundled_names
from llmcond.data.datasets import Columns, RatingScale
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.files import write_json
from llmcond.log import log
from llmcond.prompts import load_prompt
from llmcond.runs.manifest import NO_DATA, create_manifest, portable_model_name
from llmcond.tasks import find_task

#: The folders of this process's runs, which are removed when it ends, by model and fingerprint.
_FOLDERS: dict[tuple[str, str], TemporaryDirectory[str]] = {}


class _NoData:
    """The data of a run that has none."""

    digest = ""

    def to_json(self) -> dict[str, Any]:
        """Return the record of the data for run.json."""
        return {
            "source": NO_DATA,
            "digest": self.digest,
            "columns": asdict(Columns()),
            "scale": asdict(RatingScale()),
            "split_seed": 0,
            "rows": {},
            "unrated": {},
        }


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
        temporary = TemporaryDirectory(prefix="llmcond-")
        write_json(Path(temporary.name) / "run.json", _manifest(name, resolved))
        _FOLDERS[key] = temporary
    return Path(_FOLDERS[key].name)


def _manifest(name: str, resolved: ResolvedEncoder) -> dict[str, Any]:
    manifest = create_manifest(name, resolved, _NoData(), "float16", find_task())
    prompts = map(load_prompt, bundled_names("prompts"))
    usable = [prompt for prompt in prompts if not prompt.obstacle(resolved.identity)]
    return {**manifest, "prompts": {prompt.name: {"prompt": prompt.to_json()} for prompt in usable}}
