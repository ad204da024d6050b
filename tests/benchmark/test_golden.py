"""The stored vectors of a small NV-Embed, compared with those of explicit formulas.

PYTHONPATH=. python tests/benchmark/test_golden.py    computes and stores them again
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from llmcond.benchmark.checks import STORED, golden_differences, stored_encoder, stored_rows
from llmcond.encoders.loading.loading import load_config, load_model

HEADS = 2


def build_inputs():
    rng = random.Random(0)
    pooled = [(3, 0), (17, 0), (30, 9), (64, 21)]
    return [{"ids": [2, *rng.choices(range(10, 8000), k=n), 3], "first": f} for n, f in pooled]


@torch.no_grad()
def compute_reference(folder):
    """Encode each input separately with bidirectional Mistral and the latent block of NV-Embed."""
    from dataclasses import replace

    resolved = stored_encoder("cpu", folder)
    resolved = replace(resolved, options=replace(resolved.options, fold_latents=False))
    network = load_model(resolved, load_config(resolved.checkpoint, "bidirectional")).network
    network.set_attn_implementation("eager")
    w = network.latent_attention_model.state_dict()
    cross, feed = (f"cross_attend_blocks.{i}." for i in (0, 1))

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"])

    vectors = []
    for row in stored_rows({"inputs": build_inputs()}):
        mask = torch.zeros(1, 1, len(row.ids), len(row.ids))
        hidden = network.embedding_model(
            input_ids=torch.tensor([row.ids]), attention_mask=mask
        ).last_hidden_state[0]
        queries = norm(hidden, cross + "norm") @ w[cross + "fn.to_q.weight"].T
        context = norm(w["latents"], cross + "norm_context")
        keys, values = (context @ w[cross + "fn.to_kv.weight"].T).chunk(2, dim=-1)
        size = queries.shape[1] // HEADS
        heads = zip(*(part.split(size, dim=-1) for part in (queries, keys, values)), strict=True)
        attended = [(q @ k.T * size**-0.5).softmax(dim=-1) @ v for q, k, v in heads]
        hidden = torch.cat(attended, dim=-1) @ w[cross + "fn.to_out.weight"].T + hidden
        wide = norm(hidden, feed + "norm") @ w[feed + "fn.net.0.weight"].T
        value, gate = (wide + w[feed + "fn.net.0.bias"]).chunk(2, dim=-1)
        narrow = (value * functional.gelu(gate)) @ w[feed + "fn.net.2.weight"].T
        hidden = narrow + w[feed + "fn.net.2.bias"] + hidden
        vectors.append(functional.normalize(hidden[row.first :].mean(dim=0), dim=0))
    return torch.stack(vectors).numpy()


def test_stored_vectors_match_formulas(tmp_path):
    stored = json.loads(STORED.read_text())
    assert stored["inputs"] == build_inputs()
    np.testing.assert_allclose(compute_reference(tmp_path), stored["vectors"], rtol=0, atol=2e-6)


def test_engine_gives_stored_vectors(tmp_path):
    difference, _ = golden_differences("cpu", tmp_path)
    assert 0 < difference < 2e-5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        vectors = compute_reference(Path(scratch)).tolist()
    rounded = [[round(value, 6) for value in vector] for vector in vectors]
    json.dump({"inputs": build_inputs(), "vectors": rounded}, STORED.open("w"))
    sys.stdout.write(f"{STORED}\n")
