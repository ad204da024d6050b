"""What training leaves of an encoder, on disk: an adapter in peft's format, or all weights."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from llmcond.encoders.checkpoints.adapter import CONFIG, ROUTER, WEIGHTS, Tuned, write_tuned
from llmcond.encoders.checkpoints.checkpoint import settings_files
from llmcond.encoders.checkpoints.weights import all_weights
from llmcond.encoders.known import find_model
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.routers.inside import passes_of
from llmcond.encoders.settings import MODEL_SETTINGS
from llmcond.files import read_json, replacing, write_json
from llmcond.finetune.build import Trainable
from llmcond.finetune.state import write_tensors

#: What transformers and peft look for in the header.
_OURS = {"format": "pt"}


def save_encoder(
    trainable: Trainable,
    model: str,
    folder: Path,
    *,
    merge: bool,
    cross: bool = False,
    dev_of: str | None = None,
) -> None:
    """Write what was trained of an encoder, so that the folder can be named as a model.

    Its base is found by ``model``: an alias, a hub name, or an absolute path. With ``merge``
    adapters are added to the weights, and all of those are written. ``cross`` is whether it was
    trained as a cross-encoder, so that nobody takes its vectors for embeddings; ``dev_of`` the
    digest of the data whose dev rows it was trained on, so that it is not scored on them.
    """
    resolved = trainable.resolved
    whole = trainable.adapted is None or merge
    if whole:
        if trainable.adapted is not None:
            trainable.adapted.merge_and_unload()
        origin = resolved.checkpoint.folder
        for path in settings_files(origin):
            with replacing(folder / path.relative_to(origin)) as target:
                shutil.copyfile(path, target)
        write_tensors(
            folder / "model.safetensors", all_weights(trainable.network, resolved.checkpoint), _OURS
        )
    else:
        _save_adapter(trainable, model, folder)
    identity, known = resolved.identity, resolved.checkpoint.known
    router = passes_of(identity).weights(trainable.network)
    if router:
        write_tensors(folder / ROUTER, router, _OURS)
    tuned = Tuned(
        base=None if whole else model,
        revision=None if whole else _commit(resolved),
        like=known.repo if known else None,
        settings={name: v for name, v in identity.to_json().items() if name in MODEL_SETTINGS},
        quantize=identity.quantize,
        base_weights=identity.weights,
        cross=cross,
        dev_of=dev_of,
    )
    write_tuned(folder, tuned)


def hub_name(model: str, resolved: ResolvedEncoder) -> str | None:
    """Return what an encoder is called on the hub, if it is there."""
    known = find_model(model)
    return known.repo if known else resolved.checkpoint.repo


def _commit(resolved: ResolvedEncoder) -> str | None:
    weights = resolved.identity.weights
    return weights.partition("@")[2] if weights.startswith("hub:") else None


def _save_adapter(trainable: Trainable, model: str, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    # Left to itself, peft asks the hub whether the vocabulary has grown.
    tensors = get_peft_model_state_dict(trainable.adapted, save_embedding_layers=False)
    write_tensors(folder / WEIGHTS, tensors, _OURS)
    config: Any = trainable.adapted.peft_config["default"]
    config.inference_mode = True
    # peft itself looks there: a hub's name rather than our short one.
    config.base_model_name_or_path = hub_name(model, trainable.resolved) or model
    config.revision = _commit(trainable.resolved)
    with tempfile.TemporaryDirectory() as temporary:
        config.save_pretrained(temporary)
        write_json(folder / CONFIG, read_json(Path(temporary) / CONFIG))
