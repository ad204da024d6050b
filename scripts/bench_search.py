"""Search under a condition: recall, time, memory, beside nearest neighbours by plain embeddings.

    python scripts/bench_search.py --run RUN --head HEAD --data CSTS_FOLDER
    python scripts/bench_search.py --run RUN --head HEAD --data CSTS_FOLDER --sizes 1000000 --json

RUN has a head on separate features, such as a hypernetwork. The first vectors are those of the
data's sentences; above as many they are mixes of two of these with a little noise, so that recalls
there are kinder than of real texts. Queries are sentences, conditions those of the data.

``cold``: the first query under a condition; ``hot``: a later one. Both with the query's own
encoding, which is told as well, and by the clock (seconds) and by this process's share of the CPU,
which others on the machine change less. ``recall`` is of the ten texts of a comparison with every
text in float32. hnswlib and faiss (pip install hnswlib faiss-cpu) search e(s) by e(q), or by q',
the query times W_c W_c^T, which gives the products under the condition though not their cosines;
beside it their first 1,000, re-ranked under the condition.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from numpy.typing import NDArray

from llmcond.data.datasets import read_dataset
from llmcond.heads import FittedHead
from llmcond.runs.embedder import normalise_vectors
from llmcond.search import Index
from llmcond.search.table import BLOCK, NUMBER, VECTOR, TextTable

K, CANDIDATES = 10, 1_000
#: More vectors take hnswlib minutes to build.
HNSW = 200_000

Vectors = NDArray[np.float32]


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what ``work`` gives, the seconds it took, and those of the CPU."""
    began, used = time.perf_counter(), time.process_time()
    found = work()
    return found, time.perf_counter() - began, time.process_time() - used


def mixed(real: Vectors, n: int) -> Vectors:
    """Return n vectors: the real ones, and mixes of two of them."""
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
    """Put vectors into an empty index, with their texts, or names where they are mixes."""
    table = TextTable(folder)
    flat = pa.float16()
    kinds = {"id": pa.string(), "text": pa.string(), NUMBER: pa.int64()}
    schema = pa.schema({**kinds, VECTOR: pa.list_(flat, vectors.shape[1])})

    def batches() -> Iterator[Any]:
        for start in range(0, len(vectors), BLOCK):
            part = vectors[start : start + BLOCK].astype(np.float16)
            places = range(start, start + len(part))
            named = [texts[i] if i < len(texts) else f"mix {i}" for i in places]
            array = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), part.shape[1])
            numbers = pa.array(table.first_number() + np.array(places))
            columns = [pa.array(map(str, places)), pa.array(named), numbers, array]
            yield pa.record_batch(columns, schema)

    table.write(batches(), schema, vectors.nbytes // 2, new=True)


def under(head: FittedHead, vectors: Vectors, condition: Vectors) -> Vectors:
    """Return unit vectors under a condition as the head itself computes them."""
    return normalise_vectors(head.transform(vectors, condition[None]), head)


def best(scores: Vectors, k: int = K) -> NDArray[np.int64]:
    """Return the places of the k best."""
    found = np.argpartition(-scores, k)[:k]
    return found[np.argsort(-scores[found])]


def share(found: Sequence[int], wanted: Sequence[int]) -> float:
    """Return which share of the wanted ones was found."""
    return len(set(map(int, found)) & set(map(int, wanted))) / len(wanted)


def size_of(folder: Path) -> float:
    """Return the MB of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def memory() -> tuple[float, float]:
    """Return the MB that this process has of its own, and of files, which others may share."""
    found = psutil.Process().memory_info()
    return (found.rss - found.shared) / 1e6, found.shared / 1e6


def searched(
    folder: Path, queries: Sequence[str], conditions: Sequence[str], gold: list[list[Any]]
) -> dict[str, Any]:
    """Return the figures of an index: each condition is opened cold, and then asked hot."""
    index = Index.open(folder, device="cpu")
    index.embedder.encode(queries[0], "anything")  # loads the encoder
    before = memory()
    cold, hot, recalls = [], [], []
    for condition, own in zip(conditions, gold, strict=True):
        hits, *took = timed(partial(index.search, queries[0], condition, K))
        cold.append(took)
        for query, wanted in zip(queries, own, strict=True):
            hits, *took = timed(partial(index.search, query, condition, K))
            hot.append(took)
            recalls.append(share([row["id"] for row in hits.rows], wanted))
    encoded = [timed(partial(index.embedder.encoder.encode, [q]))[1:] for q in queries]
    private, mapped = (now - then for now, then in zip(memory(), before, strict=True))

    def middle(times: Sequence[Sequence[float]]) -> dict[str, float]:
        seconds, cpu = zip(*times, strict=True)
        return {"seconds": statistics.median(seconds), "cpu": statistics.median(cpu)}

    views = size_of(folder / "views") / len(conditions)
    return {
        "what": "llmcond",
        "cold": middle(cold),
        "hot": middle(hot),
        "encoding a query": middle(encoded),
        "recall": statistics.mean(recalls),
        "memory_mb": private,
        "memory_mapped_mb": mapped,
        "disk_mb": size_of(folder / "texts.lance"),
        "disk_mb_each_condition": views,
    }


def peers(
    vectors: Vectors,
    queries: Vectors,
    head: FittedHead,
    conditions: Vectors,
    gold: list[list[Any]],
) -> Iterator[dict[str, Any]]:
    """Yield the figures of libraries that search e(s), by e(q) and by q'."""
    looks: list[tuple[str, float, Callable[[Vectors, int], Any]]] = []
    if find_spec("hnswlib") and len(vectors) <= HNSW:
        import hnswlib

        graph = hnswlib.Index("ip", vectors.shape[1])
        graph.init_index(len(vectors), M=16, ef_construction=100, random_seed=0)
        _, _, built = timed(lambda: graph.add_items(vectors, num_threads=1))
        graph.set_ef(CANDIDATES)
        looks.append(("hnswlib", built, lambda q, k: graph.knn_query(q, k, num_threads=1)[0][0]))
    if find_spec("faiss"):
        import faiss

        faiss.omp_set_num_threads(1)
        flat = faiss.IndexFlatIP(vectors.shape[1])
        _, _, built = timed(lambda: flat.add(vectors))
        looks.append(("faiss, flat", built, lambda q, k: flat.search(q, k)[1][0]))
    for name, built, look in looks:
        for asked in ("e(q)", "q'"):
            taken, recalls, reranked, cpu = 0, [], [], []
            for condition, own in zip(conditions, gold, strict=True):
                for query, wanted in zip(queries, own, strict=True):
                    given = query if asked == "e(q)" else transformed(head, query, condition)
                    found, _, used = timed(partial(look, given[None], CANDIDATES))
                    cpu.append(used)
                    recalls.append(share(found[:K], wanted))
                    near = under(head, vectors[found], condition)
                    order = best(near @ under(head, query[None], condition)[0])
                    reranked.append(share(found[order], wanted))
                    taken += 1
            yield {
                "what": f"{name} on e(s), by {asked}",
                "build_cpu": built,
                "hot": {"cpu": statistics.median(cpu)},
                "recall": statistics.mean(recalls),
                "recall_reranked": statistics.mean(reranked),
            }


def transformed(head: FittedHead, query: Vectors, condition: Vectors) -> Vectors:
    """Return q' = W_c W_c^T q."""
    matrix = np.eye(len(query), dtype=np.float32)
    for factor in head.module.generated_matrices(condition[None]):
        matrix = matrix @ factor[0]
    made: Vectors = matrix @ (matrix.T @ query)
    return made


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of every size."""
    splits = read_dataset(options.data).splits
    every = [*splits["train"].sentence1, *splits["train"].sentence2, *splits["dev"].sentence1]
    texts = list(dict.fromkeys([*every, *splits["dev"].sentence2]))
    rng = np.random.default_rng(options.seed)
    known = sorted({*splits["dev"].condition})
    conditions = rng.choice(known, size=options.conditions, replace=False).tolist()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        made_by = {"run": options.run, "head": options.head, "device": "cpu"}
        embedder = Index.build(Path(temporary) / "empty", **made_by).embedder
        head = embedder.head
        if not isinstance(head, FittedHead) or not head.generates_matrices:
            raise SystemExit("bench_search: name a --head that makes a matrix of each condition")
        real = embedder.encoder.encode(texts).astype(np.float16).astype(np.float32)
        of_conditions = embedder.encoder.encode(conditions)
        for n in options.sizes:
            vectors = mixed(real, n).astype(np.float16).astype(np.float32)
            asked = rng.choice(min(n, len(texts)), size=options.queries, replace=False).tolist()
            # Each by itself, as a search encodes it: vectors differ a little by their batches.
            given = np.concatenate([embedder.encoder.encode([texts[i]]) for i in asked])
            gold: list[list[Any]] = []
            for condition in of_conditions:
                own, sought = (under(head, one, condition) for one in (vectors, given))
                gold.append([best(own @ query) for query in sought])
            folder = Path(temporary) / f"index-{n}"
            Index.build(folder, **made_by)
            _, _, written = timed(partial(write, folder, vectors, texts))
            queries = [texts[i] for i in asked]
            figures = searched(folder, queries, conditions, gold)
            about = {"vectors": n, "dim": vectors.shape[1], "head": options.head}
            results.append({**about, **figures, "write_cpu": written})
            if not options.no_peers:
                found = peers(vectors, given, head, of_conditions, gold)
                results += [{**about, **row} for row in found]
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--data", default=None, help="default: the bundled sample")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--conditions", type=int, default=5)
    parser.add_argument("--queries", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = measured(options)
    if options.json:
        print(json.dumps(results))
        return
    for row in results:
        print(f"{row['vectors']:,} x {row['dim']}, {row['head']}: {row['what']}")
        for name, value in row.items():
            if name in ("vectors", "dim", "head", "what"):
                continue
            shown = str(value if isinstance(value, dict) else round(value, 3))
            if isinstance(value, dict):
                shown = ", ".join(f"{key} {1e3 * own:.1f} ms" for key, own in value.items())
            print(f"    {name}: {shown}")


if __name__ == "__main__":
    main()
