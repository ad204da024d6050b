"""Measure search under a condition: its speed, recall, memory and size on disk.

    python scripts/bench_search.py --run RUN --head HEAD --data CSTS_FOLDER
    python scripts/bench_search.py --run RUN --head HEAD --data CSTS_FOLDER --sizes 1000000 --json

RUN has a head on separate features, such as a hypernetwork. The first vectors are those of the
data's sentences. Larger sizes add mixes of two sentences with a little noise, so recall is higher
there than with real texts. Queries are sentences of the data, under conditions of the data.

``cold`` is the first query under a condition, ``hot`` a later one. Both times include the encoding
of the query, which is also listed separately. They are wall time (seconds) and the processor time
of this process (cpu), which other processes on the machine affect less. ``recall`` is the share of
the ten best texts by a comparison with every text in float32.

Commit 17f6c5ba can also measure hnswlib and faiss on plain embeddings.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from bench import BenchOptions, timed
from common import format_table, print_json
from numpy.typing import NDArray

from llmcond.data.datasets import read_dataset
from llmcond.heads import FittedHead
from llmcond.runs.embedder import normalise_vectors
from llmcond.search import Index
from llmcond.search.table import BLOCK, NUMBER, VECTOR, TextTable

#: Number of results.
K = 10

Vectors = NDArray[np.float32]


def mix_vectors(real: Vectors, n: int) -> Vectors:
    """Return n vectors: the real ones first, then noisy mixes of two of them."""
    if n <= len(real):
        return real[:n]
    rng = np.random.default_rng(0)
    out = np.empty((n, real.shape[1]), dtype=np.float32)
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        first, second = real[rng.integers(len(real), size=(2, m))]
        share = rng.uniform(0.55, 0.95, (m, 1)).astype(np.float32)
        noise = rng.normal(0, 0.01, first.shape).astype(np.float32)
        out[start : start + m] = normalise_vectors(share * first + (1 - share) * second + noise)
    out[: len(real)] = real
    return out


def write(folder: Path, vectors: Vectors, texts: Sequence[str]) -> None:
    """Write vectors to an empty index, with their texts, or with names if they are mixes."""
    table = TextTable(folder)
    flat = pa.float16()
    kinds = {"id": pa.string(), "text": pa.string(), NUMBER: pa.int64()}
    schema = pa.schema({**kinds, VECTOR: pa.list_(flat, vectors.shape[1])})

    def batches() -> Iterator[Any]:
        for start in range(0, len(vectors), BLOCK):
            part = vectors[start : start + BLOCK].astype(np.float16)
            indices = range(start, start + len(part))
            names = [texts[i] if i < len(texts) else f"mix {i}" for i in indices]
            array = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), part.shape[1])
            numbers = pa.array(table.first_number() + np.array(indices))
            columns = [pa.array(map(str, indices)), pa.array(names), numbers, array]
            yield pa.record_batch(columns, schema)

    table.write(batches(), schema, vectors.nbytes // 2, new=True)


def best(scores: Vectors, k: int = K) -> NDArray[np.int64]:
    """Return the indices of the k highest scores, best first."""
    highest = np.argpartition(-scores, k)[:k]
    return highest[np.argsort(-scores[highest])]


def size_of(folder: Path) -> float:
    """Return the size of a folder's files in MB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def memory() -> tuple[float, float]:
    """Return the private memory of this process, and the memory of mapped files, in MB."""
    info = psutil.Process().memory_info()
    return (info.rss - info.shared) / 1e6, info.shared / 1e6


def measure_index(
    folder: Path, queries: Sequence[str], conditions: Sequence[str], gold: list[list[Any]]
) -> dict[str, Any]:
    """Measure an index: a cold search under each condition, then hot ones.

    Args:
        folder: folder of the index.
        queries: texts to search for.
        conditions: conditions to search under.
        gold: the ids of the ten best texts, by condition and query.
    """
    index = Index.open(folder, device="cpu")
    index.embedder.encode(queries[0], "anything")  # loads the encoder
    before = memory()
    cold, hot, recalls = [], [], []
    for condition, of_condition in zip(conditions, gold, strict=True):
        hits, *times = timed(index.search, queries[0], condition, K)
        cold.append(times)
        for query, relevant in zip(queries, of_condition, strict=True):
            hits, *times = timed(index.search, query, condition, K)
            hot.append(times)
            matches = {int(row["id"]) for row in hits.rows} & {*map(int, relevant)}
            recalls.append(len(matches) / len(relevant))
    encoding = [timed(index.embedder.encoder.encode, [q])[1:] for q in queries]
    private, mapped = (now - then for now, then in zip(memory(), before, strict=True))

    def medians(name: str, times: Sequence[Sequence[float]]) -> dict[str, float]:
        seconds, cpu = map(statistics.median, zip(*times, strict=True))
        return {f"{name}_seconds": seconds, f"{name}_cpu": cpu}

    views = size_of(folder / "views") / len(conditions)
    return {
        "what": "llmcond",
        **medians("cold", cold),
        **medians("hot", hot),
        **medians("encoding", encoding),
        "recall": statistics.mean(recalls),
        "memory_mb": private,
        "memory_mapped_mb": mapped,
        "disk_mb": size_of(folder / "texts.lance"),
        "disk_mb_each_condition": views,
    }


def measure_sizes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the index at every size."""
    splits = read_dataset(options.data).splits
    sentences = [*splits["train"].sentence1, *splits["train"].sentence2, *splits["dev"].sentence1]
    texts = list(dict.fromkeys([*sentences, *splits["dev"].sentence2]))
    rng = np.random.default_rng(options.seed)
    all_conditions = sorted({*splits["dev"].condition})
    conditions = rng.choice(all_conditions, size=options.conditions, replace=False).tolist()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        encoder = {"run": options.run, "head": options.head, "device": "cpu"}
        embedder = Index.build(Path(temporary) / "empty", **encoder).embedder
        head = embedder.head
        if not isinstance(head, FittedHead) or not head.generates_matrices:
            raise SystemExit(
                "bench_search: choose a --head that generates a matrix for each condition"
            )
        real = embedder.encoder.encode(texts).astype(np.float16).astype(np.float32)
        condition_vectors = embedder.encoder.encode(conditions)
        for n in options.sizes:
            vectors = mix_vectors(real, n).astype(np.float16).astype(np.float32)
            sampled = rng.choice(min(n, len(texts)), size=options.queries, replace=False).tolist()
            # Encode queries separately, as a search does: vectors vary slightly with the batch.
            query_vectors = np.concatenate([embedder.encoder.encode([texts[i]]) for i in sampled])
            gold: list[list[Any]] = []
            for condition in condition_vectors:
                mapped, mapped_queries = (
                    normalise_vectors(head.transform(unmapped, condition[None]), head)
                    for unmapped in (vectors, query_vectors)
                )
                gold.append([best(mapped @ query) for query in mapped_queries])
            folder = Path(temporary) / f"index-{n}"
            Index.build(folder, **encoder)
            _, _, write_cpu = timed(write, folder, vectors, texts)
            queries = [texts[i] for i in sampled]
            figures = measure_index(folder, queries, conditions, gold)
            about = {"vectors": n, "dim": vectors.shape[1], "head": options.head}
            results.append({**about, **figures, "write_cpu": write_cpu})
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and print the figures."""
    parser = BenchOptions(__doc__)
    add = parser.option
    add("--run", Path, "folder of the run", required=True)
    head = "name of the head, which must generate a matrix for each condition"
    add("--head", str, head, required=True)
    add("--data", str, "rated rows", "the bundled sample")
    add("--sizes", [10_000, 100_000], "numbers of vectors")
    add("--conditions", 5, "number of conditions")
    add("--queries", 10, "number of queries")
    add("--seed", 0, "random seed of queries and conditions")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = measure_sizes(options)
    print(format_table(results, {name: name for row in results for name in row}))
    print_json(options, results)


if __name__ == "__main__":
    main()
