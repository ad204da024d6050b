"""Saving a trained encoder: an adapter in the format of peft, or all weights."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from llmcond.encoders.checkpoints.adapter import (
    CONFIG,
    ROUTER,
    WEIGHTS,
    EncoderRecord,
    write_encoder_record,
)
from llmcond.encoders.checkpoints.checkpoint import settings_files
from llmcond.encoders.checkpoints.weights import read_all_weights
from llmcond.encoders.known import find_model
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.routers.passes import passes_class
from llmcond.encoders.settings import MODEL_SETTINGS
from llmcond.files import read_json, replace_atomically, write_json
from llmcond.finetune.loading import TrainableEncoder
from llmcond.finetune.state import write_tensors

#: Metadata that transformers and peft expect in the header.
_METADATA = {"format": "pt"}


def save_encoder(
    trainable: TrainableEncoder,
    model: str,
    folder: Path,
    *,
    merge: bool,
    cross: bool = False,
    dev_of: str | None = None,
) -> None:
    """Write the trained weights of an encoder into a folder that can be named as a model.

    Args:
        trainable: the trained encoder.
        model: alias, hub name or absolute path of the base encoder.
        folder: folder to write to.
        merge: whether adapters are added to the weights; then all weights are written.
        cross: whether it was trained as a cross-encoder, so that its vectors are not used as
            embeddings.
        dev_of: digest of the data whose dev rows it was trained on, so that it is not scored on
            them.
    """
    resolved = trainable.resolved
    whole = trainable.peft_model is None or merge
    if whole:
        if trainable.peft_model is not None:
            trainable.peft_model.merge_and_unload()
        origin = resolved.checkpoint.folder
        for path in settings_files(origin):
            with replace_atomically(folder / path.relative_to(origin)) as target:
                shutil.copyfile(path, target)
        write_tensors(
            folder / "model.safetensors",
            read_all_weights(trainable.network, resolved.checkpoint),
            _METADATA,
        )
    else:
        _save_adapter(trainable, model, folder)
    identity, known = resolved.identity, resolved.checkpoint.known
    router = passes_class(identity).weights(trainable.network)
    if router:
        write_tensors(folder / ROUTER, router, _METADATA)
    tuned = EncoderRecord(
        base=None if whole else model,
        revision=None if whole else resolved.checkpoint.commit,
        like=known.repo if known else None,
        settings={name: v for name, v in identity.to_json().items() if name in MODEL_SETTINGS},
        quantize=identity.quantize,
        base_weights=identity.weights,
        cross=cross,
        dev_of=dev_of,
    )
    write_encoder_record(folder, tuned)


def hub_name(model: str, resolved: ResolvedEncoder) -> str | None:
    """Return the name of an encoder on the hub; None if it is not there."""
    known = find_model(model)
    return known.repo if known else resolved.checkpoint.repo


def _save_adapter(trainable: TrainableEncoder, model: str, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    # By default, peft asks the hub whether the vocabulary has grown.
    tensors = get_peft_model_state_dict(trainable.peft_model, save_embedding_layers=False)
    write_tensors(folder / WEIGHTS, tensors, _METADATA)
    config: Any = trainable.peft_model.peft_config["default"]
    config.inference_mode = True
    # peft reads this entry itself, so it must be the hub's name instead of an alias.
    config.base_model_name_or_path = hub_name(model, trainable.resolved) or model
    config.revision = trainable.resolved.checkpoint.commit
    with tempfile.TemporaryDirectory() as temporary:
        config.save_pretrained(temporary)
        write_json(folder / CONFIG, read_json(Path(temporary) / CONFIG))
