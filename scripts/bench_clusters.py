"""How well clusters under a condition agree with known classes, with and without a guide.

    python scripts/bench_clusters.py                              # $LLMCOND_DATA/syngoalex
    python scripts/bench_clusters.py --data FOLDER --seeds 3 --json

The data is GoalEx's (EMNLP 2023): 1,024 texts in four classes of topic, of writing style and of
language. V-measures are means over seeds, of K-means (the best of ten starts each) and of which
texts guide; a guide's own texts are not scored. Plain sentence embeddings are those of the base
encoder without its adapter. The adapter's own vectors without a condition are measured too, but
it was never trained for those.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import v_measure_score

from llmcond import Embedder, load_embedder, load_encoder
from llmcond.bundled import pretrained_names
from llmcond.clustering.methods import NOISE, choose_k, hdbscan, kmeans, sample_indices
from llmcond.clustering.result import without_condition
from llmcond.encoders import EncoderInput
from llmcond.features.view import FeatureView
from llmcond.heads.guide import fit_guide
from llmcond.prompts import load_prompt
from llmcond.runs.embedder import base_encoder, normalise_vectors

#: What is known of each text -> the condition that asks for it.
CONDITIONS = {"topic": "the topic", "style": "the writing style", "language": "the language"}

Vectors = Any


def read(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the texts, and their classes by what is known."""
    values = {key: json.loads((folder / f"{key}-labels.json").read_text()) for key in CONDITIONS}
    texts = json.loads((folder / "topic-data.json").read_text())["texts"]
    return texts, {key: np.array(value["labels"]) for key, value in values.items()}


def systems(model: str, texts: list[str]) -> dict[str, Callable[[str], Vectors]]:
    """Return what makes vectors of the texts under a condition, by name."""
    encoder = load_encoder(model)
    routed = Embedder(encoder, FeatureView((load_prompt("routed"),)))

    def alone(encoder: Any) -> Callable[[str], Vectors]:
        vectors = normalise_vectors(encoder.encode([EncoderInput("", text) for text in texts]))
        return lambda _: vectors

    makers: dict[str, Callable[[str], Vectors]] = {
        without_condition(encoder.name): alone(encoder),
        f"{encoder.name}, routed": partial(routed.encode, texts),
    }
    for name in pretrained_names():
        bundled = load_embedder(name)
        base = base_encoder(bundled.encoder) or encoder
        if without_condition(base.name) not in makers:
            makers[without_condition(base.name)] = alone(base)
        makers |= {
            without_condition(name): alone(bundled.encoder),
            name: partial(bundled.encode, texts),
        }
    return makers


def measure(vectors: Vectors, truth: Any, sizes: Sequence[int], seeds: int) -> dict[str, Any]:
    """Return the V-measure of K-means, of guides of each size and of HDBSCAN, and the K chosen."""
    k, every = len(np.unique(truth)), np.arange(len(truth))
    scores: dict[str, list[float]] = {}
    for seed in range(seeds):
        found = {"0": v_measure_score(truth, kmeans(vectors, k, seed))}
        for size in sizes:
            told = sample_indices(len(truth), size, seed)
            rest = np.setdiff1d(every, told)
            guide = fit_guide(vectors[told], truth[told].astype(str).tolist())
            space = guide.transform(vectors)
            found[str(size)] = v_measure_score(truth[rest], kmeans(space, k, seed)[rest])
        for name, value in found.items():
            scores.setdefault(name, []).append(float(value))
    by_density = hdbscan(vectors, max(5, len(vectors) // 100))
    chosen = [choose_k(vectors[truth < few], 0)[0] for few in range(2, k + 1)]
    return {
        **{name: round(float(np.mean(own)), 3) for name, own in scores.items()},
        "k": chosen,
        "hdbscan": round(float(v_measure_score(truth, by_density)), 3),
        "hdbscan_none": round(float((by_density == NOISE).mean()), 2),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a table of every system and kind of class."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--guides", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    folder = options.data or Path(os.environ.get("LLMCOND_DATA", "."), "syngoalex")
    if not (folder / "topic-data.json").is_file():
        parser.error(f"{folder} does not hold topic-data.json; name the folder by --data")
    texts, known = read(folder)
    rows = []
    for name, make in systems(options.model, texts).items():
        for key, condition in CONDITIONS.items():
            found = measure(make(condition), known[key], options.guides, options.seeds)
            rows.append({"vectors": name, "classes": key, **found})
    if options.json:
        print(json.dumps(rows))
        return 0
    print("| vectors | classes | " + " | ".join(list(rows[0])[2:]) + " |")
    print("|---|---|" + "---|" * (len(rows[0]) - 2))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
