"""Measure what truncated and quantised embeddings cost.

    python scripts/bench_outputs.py --run RUN --head NAME [NAME ...] --sizes 256 128 64 32
    python scripts/bench_outputs.py --run RUN --head NAME --index-texts 5000 --json

The first table has the Spearman correlation of each head on the dev split, times 100: of its
embeddings, of their first dimensions, and of quantised embeddings of full size. Both embeddings of
a row are quantised, with ranges that are measured on the embeddings of train; ``binary`` compares
the signs. Heads whose names differ only in their last part, such as ``mlp-0`` and ``mlp-1``, are
seeds, and the table has their mean and standard deviation.

With ``--index-texts``, indexes of that many different sentences of the data are built with the
first head. ``recall@10`` is the share of the ten best texts in float16 that an index in another
precision finds, and ``MB`` is the size of its vectors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import cosine
from llmcond.heads import FittedHead, PairArrays
from llmcond.metrics import spearman
from llmcond.options import IndexPrecision
from llmcond.quantization import Quantizer, StoredCodes, measure_ranges
from llmcond.runs import Run, open_run
from llmcond.runs.embedder import normalise_vectors
from llmcond.runs.features import RowFeatures
from llmcond.search import Index

#: Number of hits, and of queries per condition.
K, QUERIES = 10, 100
PRECISIONS: Sequence[IndexPrecision] = ("float16", "int8", "binary")

Vectors = NDArray[np.float32]


def embed_split(run: Run, name: str, split: str) -> tuple[Vectors, Vectors, PairArrays]:
    """Return the unit embeddings of both sentences of a split's rated rows, and the rows."""
    saved, rows = run.load_head(name), run.rows(split)
    pairs = RowFeatures(rows, run.store()).pairs(saved.view).take(rows.rated)
    head: FittedHead = saved.head
    first, second = (
        normalise_vectors(head.transform(side, pairs.condition))
        for side in (pairs.first, pairs.second)
    )
    return first, second, pairs


def score_forms(run: Run, name: str, sizes: Sequence[int]) -> dict[str, float]:
    """Return the correlation on dev for each form of a head's embeddings, times 100."""
    first, second, pairs = embed_split(run, name, "dev")
    dim = first.shape[1]
    ranges = measure_ranges(np.concatenate(embed_split(run, name, "train")[:2]))
    forms: dict[str, Callable[[Vectors], Vectors]] = {f"{dim}": lambda vectors: vectors}
    for size in sizes:
        forms[f"{size}"] = lambda vectors, size=size: vectors[:, :size]  # type: ignore[misc]
    for quantizer in (Quantizer("int8", ranges), Quantizer("binary")):
        codes = StoredCodes(quantizer, dim)
        forms[quantizer.precision] = lambda vectors, quantizer=quantizer, codes=codes: (  # type: ignore[misc]
            codes.decode(quantizer(vectors))
        )
    return {
        form: 100 * spearman(cosine(change(first), change(second)).astype(float), pairs.rating)
        for form, change in forms.items()
    }


def measure_indexes(run: Run, name: str, n: int, conditions: Sequence[str]) -> list[dict[str, Any]]:
    """Return the recall and the size of an index in each precision."""
    rows = run.rows("train")
    texts = list(dict.fromkeys([*rows.sentence1, *rows.sentence2]))
    texts, queries = texts[:n], texts[n : n + QUERIES]
    results: list[dict[str, Any]] = []
    best: dict[tuple[str, str], set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            path = Path(folder) / precision
            index = Index.build(
                path, texts, run=run.folder, head=name, conditions=conditions, precision=precision
            )
            hit_ids = {
                (condition, query): {hit["id"] for hit in hits.rows}
                for condition in conditions
                for query, hits in zip(queries, index.search(queries, condition, K), strict=True)
            }
            best = best or hit_ids
            recall = np.mean([len(hit_ids[key] & best[key]) / K for key in best])
            paths = (path / "views").glob("*/*.npy")
            size = sum(file.stat().st_size for file in paths if ".rows" not in file.name)
            result = {"precision": precision, "recall@10": float(recall), "MB": size / 1e6}
            results.append({**result, "texts": len(texts), "queries": len(best)})
    return results


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--head", nargs="+", required=True)
    parser.add_argument("--sizes", nargs="*", type=int, default=[256, 128, 64, 32])
    parser.add_argument("--index-texts", type=int, default=0)
    parser.add_argument(
        "--conditions", nargs="+", default=["the number of people", "the place", "the activity"]
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run = open_run(options.run)
    groups: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name in options.head:
        groups[name.rpartition("-")[0] or name].append(score_forms(run, name, options.sizes))
    scores = []
    for group, seeds in groups.items():
        row: dict[str, Any] = {"head": group, "seeds": len(seeds)}
        for form in seeds[0]:
            values = [seed[form] for seed in seeds]
            spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
            row[form] = f"{np.mean(values):.1f}{spread}"
        scores.append(row)
    indexes: list[dict[str, Any]] = []
    if options.index_texts:
        indexes = measure_indexes(run, options.head[0], options.index_texts, options.conditions)
    for table in (scores, indexes):
        if table:
            print("| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
        for row in table:
            cells = [
                f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()
            ]
            print("| " + " | ".join(cells) + " |")
    if options.json:
        print(json.dumps({"scores": scores, "indexes": indexes}))


if __name__ == "__main__":
    main()
