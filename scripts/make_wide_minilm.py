"""Write all-MiniLM-L6-v2 widened fourfold: 217 M dense weights that compute the same vectors.

A checkpoint of a size where 8 and 4 bit matter, with activations of a trained encoder, for machines
that reach no model hub. Every vector is repeated four times, x' = [x, x, x, x]; each block of a
weight becomes four that sum to it, a quarter of it each plus noise that cancels (after Net2Net,
arXiv 1511.05641). Quantised weights differ per copy, so their errors average out a little.

    python scripts/make_wide_minilm.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmcond.encoders import EncoderOptions, resolve


def widen(weight: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """Return (k out, k in) for (out, in) and k copies: the same output for a repeated input."""
    rows = []
    for _ in range(copies):
        noise = torch.randn(copies, *weight.shape, generator=generator) * weight.std() / 2
        noise -= noise.mean(dim=0)
        rows.append(torch.cat([weight / copies + part for part in noise], dim=1))
    return torch.cat(rows)


def main() -> None:
    """Write the checkpoint into the folder named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "out", type=Path, metavar="FOLDER", help="that the checkpoint is written to"
    )
    parser.add_argument("--copies", type=int, default=4, help="of every vector (%(default)s)")
    options = parser.parse_args()
    out, copies = options.out, options.copies
    folder = resolve("minilm", EncoderOptions(), identify=False).checkpoint.folder
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        shutil.copy(path, out)
    for path in folder.glob("vocab.txt"):
        shutil.copy(path, out)
    shutil.copytree(folder / "1_Pooling", out / "1_Pooling", dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    for key in ("hidden_size", "intermediate_size", "num_attention_heads"):
        config[key] *= copies
    (out / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    wide = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not weight.is_floating_point():
            continue
        if "embeddings" in name and weight.dim() == 2:
            wide[name] = weight.repeat(1, copies)
        elif weight.dim() == 2:
            wide[name] = widen(weight, copies, generator)
        else:
            wide[name] = weight.repeat(copies)
    save_file(wide, out / "model.safetensors", {"format": "pt"})
    print(f"{sum(weight.numel() for weight in wide.values()):,} weights -> {out}")


if __name__ == "__main__":
    main()
