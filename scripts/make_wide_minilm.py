"""Write all-MiniLM-L6-v2 widened fourfold: 217 M dense weights that compute the same vectors.

The checkpoint is large enough that quantisation to 8 and 4 bits matters, and has the activations of
a trained encoder. It serves machines without access to a model hub. Every vector is repeated four
times, x' = [x, x, x, x]. A weight matrix becomes four rows of four blocks, and the blocks of a row
sum to the matrix: each is a quarter of it, plus noise that cancels (after Net2Net, arXiv
1511.05641). Quantised weights differ per copy, so their errors average out a little.

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
    """Widen a weight so that an input repeated k times gives the same output k times.

    Args:
        weight: (out, in) weight of a linear layer.
        copies: the number k of copies.
        generator: source of the noise.

    Returns:
        The (k out, k in) weight.
    """
    rows = []
    for _ in range(copies):
        noise = torch.randn(copies, *weight.shape, generator=generator) * weight.std() / 2
        noise -= noise.mean(dim=0)
        rows.append(torch.cat([weight / copies + part for part in noise], dim=1))
    return torch.cat(rows)


def main() -> None:
    """Write the checkpoint into the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path, metavar="FOLDER", help="folder of the new checkpoint")
    parser.add_argument(
        "--copies", type=int, default=4, help="number of copies of every vector (default: 4)"
    )
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
