"""Reference vectors of a small NV-Embed, computed with the formulas of its paper.

The vectors in ``nv_embed.json`` were computed with plain transformers in float32 on a CPU, one
input at a time, with an explicit implementation of the latent block. The tests compute them again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.benchmark.shapes import random_encoder
from llmcond.encoders import EncoderOptions
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.encoders.resolve import ResolvedEncoder

STORED = Path(__file__).with_name("nv_embed.json")


def stored_encoder(device: str, folder: Path) -> ResolvedEncoder:
    """Resolve the encoder whose vectors are stored, without loading it."""
    options = EncoderOptions(dtype="float32", max_tokens_per_batch=64)
    return random_encoder("nv-embed-v2", folder, options, device, small=True, init_device="cpu")


def stored_rows(stored: dict[str, Any]) -> list[Tokens]:
    """Return the stored inputs: token ids, and the index of the first pooled token."""
    return [
        Tokens(row["ids"], row["first"], len(row["ids"]), len(row["ids"]), len(row["ids"]))
        for row in stored["inputs"]
    ]


def golden_differences(device: str, folder: Path) -> tuple[float, str]:
    """Return the largest distance of a device's vectors to the stored ones, and a note."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    encoder = Encoder(stored_encoder(device, folder))
    rows, expected = stored_rows(stored), np.array(stored["vectors"], dtype=np.float32)
    distances = [
        float(np.linalg.norm(done.vectors - expected[list(done.inputs)], axis=1).max())
        for done in encoder.engine.run(rows)
    ]
    return max(distances), f"{len(rows)} inputs"
