"""Measure how well clusters under a condition agree with known classes.

    python scripts/bench_clusters.py                              # $LLMCOND_DATA/syngoalex
    python scripts/bench_clusters.py --data FOLDER --seeds 3 --json

The data come from GoalEx (EMNLP 2023): 1,024 texts, each in one of four classes of topic, of
writing style and of language. V-measures are means over seeds. A seed determines the starts of
K-means (the best of ten restarts) and the sample of texts that a guide is fitted to; these texts
are not scored.

Plain sentence embeddings come from the base encoder without its adapter. Vectors of the adapter
without a condition are measured as well, although the adapter was never trained to make them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench import BenchOptions
from common import format_table, print_json
from sklearn.metrics import v_measure_score

from llmcond import Embedder, load_embedder, load_encoder
from llmcond.bundled import pretrained_names
from llmcond.clustering.methods import NOISE, choose_k, hdbscan, kmeans, sample_indices
from llmcond.clustering.page import without_condition
from llmcond.encoders import EncoderInput
from llmcond.features.view import FeatureView
from llmcond.heads.guide import fit_guide
from llmcond.prompts import load_prompt
from llmcond.runs.embedder import base_encoder, normalise_vectors

#: The condition that asks for each kind of class.
CONDITIONS = {"topic": "the topic", "style": "the writing style", "language": "the language"}

Vectors = Any


def read(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the texts, and their classes by kind of class."""
    values = {key: json.loads((folder / f"{key}-labels.json").read_text()) for key in CONDITIONS}
    texts = json.loads((folder / "topic-data.json").read_text())["texts"]
    return texts, {key: np.array(value["labels"]) for key, value in values.items()}


def systems(model: str, texts: list[str]) -> dict[str, Callable[[str], Vectors]]:
    """Return functions from a condition to the vectors of the texts, by name of the system."""
    encoder = load_encoder(model)
    routed = Embedder(encoder, FeatureView((load_prompt("routed"),)))

    def without_conditions(encoder: Any) -> Callable[[str], Vectors]:
        vectors = normalise_vectors(encoder.encode([EncoderInput("", text) for text in texts]))
        return lambda _: vectors

    encoders: dict[str, Callable[[str], Vectors]] = {
        without_condition(encoder.name): without_conditions(encoder),
        f"{encoder.name}, routed": partial(routed.encode, texts),
    }
    for name in pretrained_names():
        bundled = load_embedder(name)
        base = base_encoder(bundled.encoder) or encoder
        if without_condition(base.name) not in encoders:
            encoders[without_condition(base.name)] = without_conditions(base)
        encoders |= {
            without_condition(name): without_conditions(bundled.encoder),
            name: partial(bundled.encode, texts),
        }
    return encoders


def measure(vectors: Vectors, truth: Any, sizes: Sequence[int], seeds: int) -> dict[str, Any]:
    """Return the figures of one system on one kind of class.

    Args:
        vectors: (n, dim) vectors of the texts.
        truth: (n,) classes.
        sizes: numbers of texts that guides are fitted to.
        seeds: number of random seeds.

    Returns:
        The V-measure of K-means by the number of guiding texts, starting with ``"0"``; ``k``, the
        numbers of clusters chosen for two classes, three classes and so on; ``hdbscan``, the
        V-measure of HDBSCAN; and ``hdbscan_none``, the share of texts that HDBSCAN left out.
    """
    k, every = len(np.unique(truth)), np.arange(len(truth))
    scores: dict[str, list[float]] = {}
    for seed in range(seeds):
        agreements = {"0": v_measure_score(truth, kmeans(vectors, k, seed))}
        for size in sizes:
            guiding = sample_indices(len(truth), size, seed)
            rest = np.setdiff1d(every, guiding)
            guide = fit_guide(vectors[guiding], truth[guiding].astype(str).tolist())
            space = guide.transform(vectors)
            agreements[str(size)] = v_measure_score(truth[rest], kmeans(space, k, seed)[rest])
        for name, value in agreements.items():
            scores.setdefault(name, []).append(float(value))
    by_density = hdbscan(vectors, max(5, len(vectors) // 100))
    k_values = [choose_k(vectors[truth < few], 0)[0] for few in range(2, k + 1)]
    return {
        **{name: round(float(np.mean(values)), 3) for name, values in scores.items()},
        "k": k_values,
        "hdbscan": round(float(v_measure_score(truth, by_density)), 3),
        "hdbscan_none": round(float((by_density == NOISE).mean()), 2),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the figures of every system on every kind of class."""
    parser = BenchOptions(__doc__)
    parser.option("--data", Path, "folder of the dataset", "$LLMCOND_DATA/syngoalex")
    parser.option("--model", "minilm", "encoder")
    parser.option("--guides", [16, 64, 128], "numbers of texts that guides are fitted to")
    parser.option("--seeds", 5, "number of random seeds")
    options = parser.parse_args(arguments)
    folder = options.data or Path(os.environ.get("LLMCOND_DATA", "."), "syngoalex")
    if not (folder / "topic-data.json").is_file():
        parser.error(
            f"{folder} does not contain topic-data.json; name the folder of the dataset with --data"
        )
    texts, classes = read(folder)
    rows = []
    for name, make in systems(options.model, texts).items():
        for key, condition in CONDITIONS.items():
            figures = measure(make(condition), classes[key], options.guides, options.seeds)
            rows.append({"vectors": name, "classes": key, **figures})
    print(format_table(rows))
    print_json(options, rows)


if __name__ == "__main__":
    main()
