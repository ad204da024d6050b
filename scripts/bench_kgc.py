"""Measure the cost of knowledge-graph queries for bi-encoders and tri-encoders, cold and warm.

    python scripts/bench_kgc.py
    python scripts/bench_kgc.py --data WN18RR_FOLDER --queries 1000

The script reproduces tables 3 and 4 of Hyper-CL for any encoder. A bi-encoder (SimKGC) encodes each
(head, relation) as one text. A tri-encoder encodes the head entity, e(h), and the relation, e(r),
and a head maps them to the query. Candidates are all entities; both kinds of encoder use the same
texts for them, which are encoded once. Heads are fitted for one step only, because speed does not
depend on the fit. All measurements take turns. Seconds are this process's processor time on a CPU,
and wall time on a GPU.

The script prints five tables. ``stages``: the seconds of each stage, medians over rounds. ``kept``:
sums of stages, by what is cached before the queries arrive. ``single``: the median time of queries
that arrive one at a time. ``caches``: sizes and hit rates of caches. ``matrices``: sizes of the
generated matrices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from llmcond.arrays import Array, DenseMatrix, MatrixLike
from llmcond.encoders.encoder import Encoder, load_encoder
from llmcond.encoders.spec import EncoderInput
from llmcond.evaluation.ranking import CandidatePool, rank, top_entities
from llmcond.features.extract import extract
from llmcond.features.store import FeatureStore
from llmcond.heads import FittedHead, load_recipe
from llmcond.heads.base import ConditionCache
from llmcond.heads.module import HeadModule
from llmcond.kinds.ranking.arrays import QueryArrays
from llmcond.kinds.ranking.fit import fit_queries
from llmcond.kinds.ranking.graph import Graph, KnownTriples, Triples, both_directions, read_graph
from llmcond.kinds.ranking.heads import FittedQueryHead, QueryHead
from llmcond.kinds.ranking.inputs import QueryInputs
from llmcond.kinds.ranking.kgc import Kgc
from llmcond.prompts import load_prompt

T = TypeVar("T")
P = ParamSpec("P")
#: A head with the features of the graph, and the mapped candidates.
Bound = tuple[FittedQueryHead, Array]
Rows = list[dict[str, Any]]

#: Names of the two kinds of encoder; the others are compared with the bi-encoder.
BI, TRI = "bi-encoder", "tri-encoder"
#: Bytes of a number in 16 bits, as in feature stores.
_BYTES = 2
#: Published figures, printed after the tables for comparison.
PUBLISHED = """
Hyper-CL on WN18RR, BERT-base, a GPU, one query at a time. Table 3 (arXiv v1): bi-encoder 113.18 s,
Hadamard 1.65, concatenation 2.17, hypernetwork 1.95: x58; BERT-large 209.98 and 1.93: x108. In the
released code, a tri-encoder is timed on its second pass over the same queries, with all vectors and
matrices cached; the bi-encoder caches nothing and encodes three texts per query. Table 4 (ACL), all
splits, with an empty cache: bi-encoder 994 s, 46.65 % hits; hypernetwork 449 s, 85.32 % hits."""


@dataclass(frozen=True)
class Way:
    """A system to measure.

    Attributes:
        name: name in the tables.
        head: the head.
        inputs: the inputs to encode in addition to the candidates.
    """

    name: str
    head: FittedQueryHead
    inputs: Sequence[EncoderInput]


class Bench:
    """The queries of a graph, and an encoder to answer them with.

    Args:
        encoder: the encoder.
        graph: the graph, whose test split (or dev split) is queried.
        n_queries: number of queries in both directions, or None for all.
        n_encoded: number of candidates to encode, or None for all.
        folder: folder of the feature store.
    """

    def __init__(
        self,
        encoder: Encoder,
        graph: Graph,
        n_queries: int | None,
        n_encoded: int | None,
        folder: Path,
    ) -> None:
        self.encoder, self.graph, task = encoder, graph, Kgc()
        on_cpu = encoder.resolved.device == "cpu"
        self.clock = time.process_time if on_cpu else time.perf_counter
        triples = graph.splits["test" if "test" in graph.splits else "dev"]
        n_triples = None if n_queries is None else max(1, n_queries // 2)
        sampled = np.random.default_rng(0).permutation(len(triples))[:n_triples]
        self.queries = both_directions(triples[sampled], graph.n_relations)
        distinct = np.unique(self.queries[:, :2].astype(np.int64), axis=0)
        texts = replace(task.texts(graph), query_pairs=distinct)
        self.joint_of = distinct[:, 0] * (2 * graph.n_relations) + distinct[:, 1]
        self.separate = QueryInputs(texts, load_prompt("separate"))
        self.joined = QueryInputs(texts, load_prompt("concat-sent-cond"))
        candidates, n = self.separate.candidates, graph.n_entities
        self.encoded = candidates
        if n_encoded is not None:
            order = np.random.default_rng(1).permutation(n)[:n_encoded]
            self.encoded = [candidates[i] for i in order]
        # The other candidates get vectors of encoded ones, so that the full number is ranked.
        self.candidates = [self.encoded[i % len(self.encoded)] for i in range(n)]
        self.known = task.known(graph)
        train = both_directions(graph.splits["train"], graph.n_relations)
        self.of_train = KnownTriples(train, graph.n_entities)
        self.store = FeatureStore(folder, encoder.identity, "float16")

    def ways(self, heads: Sequence[str]) -> list[Way]:
        """Return the bi-encoder, and a tri-encoder with each head."""
        dim, n_relations = self.encoder.dim, self.graph.n_relations
        bi = Way(BI, fit_random_head("none", dim, n_relations), self.joined.joint)
        fitted = [fit_random_head(name, dim, n_relations) for name in heads]
        return [bi, *map(Way, heads, fitted, [self.separate.conditions] * len(heads))]

    def timed(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[float, T]:
        """Call a function; return the seconds and the result."""
        start = self.clock()
        result = function(*args, **kwargs)
        return self.clock() - start, result

    def encode(self, inputs: Sequence[EncoderInput], store: FeatureStore) -> None:
        """Encode the inputs that are missing in the store."""
        extract(inputs, store, lambda: self.encoder)

    def read(self, way: Way, store: FeatureStore) -> tuple[MatrixLike, MatrixLike]:
        """Return the vectors of the candidates, and of the inputs of a system."""
        return self.store.lookup(self.candidates), store.lookup(way.inputs)

    def bind(self, way: Way, candidates: MatrixLike, features: MatrixLike) -> Bound:
        """Give the head of a system its features; ``features`` belong to ``Way.inputs``."""
        train, n_relations = self.graph.splits["train"], self.graph.n_relations
        arrays = QueryArrays(candidates, train, n_relations, self.of_train)
        if way.name == BI:
            arrays = replace(arrays, joint=features, joint_input_keys=self.joint_of)
        else:
            arrays = replace(arrays, relations=features)
        head = way.head.bind(arrays)
        return head, head.candidates().read()

    def stages(self, way: Way) -> tuple[dict[str, float], Bound]:
        """Return the seconds of each stage, and the head with its features."""
        seconds: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            store = FeatureStore(Path(folder), self.encoder.identity, "float16")
            seconds["encode own"], _ = self.timed(self.encode, way.inputs, store)
            seconds["read"], (candidates, features) = self.timed(self.read, way, store)
        seconds["map candidates"], bound = self.timed(self.bind, way, candidates, features)
        (head, mapped), queries = bound, self.queries
        seconds["map queries"], vectors = self.timed(head.queries, queries[:, 0], queries[:, 1])
        seconds["rank"], _ = self.timed(rank, vectors, mapped, queries, self.known)
        return seconds, (head, mapped)

    def single(self, bound: Mapping[str, Bound], n: int) -> Rows:
        """Measure one query at a time, with cached entities, relations and mapped candidates."""

        def encode_query(h: int, r: int) -> Array:
            position = np.searchsorted(self.joint_of, h * (2 * self.graph.n_relations) + r)
            return normalize(self.encoder.encode([self.joined.joint[position]]))

        ways: dict[str, tuple[Callable[[int, int], Array], DenseMatrix]] = {}
        for name, (head, candidates) in bound.items():
            dense = DenseMatrix(candidates)
            ways[name] = (encode_query if name == BI else partial(map_query, head)), dense
            map_cached = cache_matrices(head)
            if map_cached:
                ways[f"{name}, its matrices kept"] = map_cached, dense
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        order = np.random.default_rng(1).permutation(len(self.queries))[:n]
        for h, r in self.queries[order, :2].tolist():
            for name, (make_query, dense) in ways.items():
                query_seconds, vectors = self.timed(make_query, h, r)
                pool = CandidatePool(dense, self.known)
                top_seconds, _ = self.timed(
                    top_entities, vectors, pool, np.array([h]), np.array([r]), 10
                )
                seconds[name].append((query_seconds, query_seconds + top_seconds))
        medians = {name: np.median(times, axis=0) * 1_000 for name, times in seconds.items()}
        return [
            {
                "one query at a time": name,
                "ms": float(query),
                "bi / it": float(medians[BI][0] / query),
                "ms with the 10 best": float(whole),
                "bi / it, with them": float(medians[BI][1] / whole),
            }
            for name, (query, whole) in medians.items()
        ]


def fit_random_head(name: str, dim: int, n_relations: int) -> FittedQueryHead:
    """Fit a head for one step on random features."""
    rng, n = np.random.default_rng(0), 16
    triples = rng.integers(0, [n, n_relations, n], size=(8, 3)).astype(np.int32)
    entities, relations = (
        rng.standard_normal((count, dim), dtype=np.float32) for count in (n, 2 * n_relations)
    )
    recipe = load_recipe(name, task="kgc")
    changes: dict[str, Any] = {"epochs": 1}
    if recipe.dim is not None:
        changes["dim"] = min(recipe.dim, dim)
    arrays = QueryArrays(
        entities,
        triples,
        n_relations,
        KnownTriples(both_directions(triples, n_relations), n),
        relations=relations if recipe.family.conditioned else None,
    )
    recipe = recipe.with_settings(changes, "")
    return fit_queries(recipe, arrays, None, 0, lambda epoch, epochs, score: None, "cpu")


def map_query(head: FittedQueryHead, h: int, r: int) -> Array:
    """Map the cached vectors of a query with a head, which computes the relation's matrix anew."""
    return head.queries(np.array([h]), np.array([r]))


def find_generator(head: FittedQueryHead) -> tuple[HeadModule, Array] | None:
    """Return the module that generates matrices, and its (2 R, width) inputs of the relations.

    Returns None if the head generates no matrices.
    """
    module, relations = head.module, head.data.relations if head.data else None
    if relations is None or not isinstance(module, QueryHead) or not module.reads_relations:
        return None
    if not module.map.generates_matrices:
        return None
    return module.map, (relations @ module.basis).numpy()


def cache_matrices(head: FittedQueryHead) -> Callable[[int, int], Array] | None:
    """Return ``map_query`` with cached matrices of all relations, or None if the head has none."""
    generated = find_generator(head)
    if generated is None or head.data is None:
        return None
    module, inputs = generated
    cache = ConditionCache(FittedHead(head.kind, type(module), module, head.seed), budget=2**34)
    cache.transform(np.zeros((len(inputs), module.dim_in)), inputs)
    entities = head.data.entities(np.arange(len(head.data.arrays.entities))).numpy()
    return lambda h, r: normalize(cache.transform(entities[h : h + 1], inputs[r : r + 1]))


def normalize(vectors: Array) -> Array:
    """Normalise vectors to length 1."""
    normalized: Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalized


def measure_stages(
    bench: Bench, ways: Sequence[Way], rounds: int
) -> tuple[dict[str, dict[str, float]], dict[str, float], dict[str, Bound]]:
    """Measure the stages of all systems in turns.

    Returns:
        The seconds of each system's stages, medians over ``rounds``; the seconds to encode one
        text, for ``entity``, ``relation`` and ``joint``; and each system's head with its features.
    """
    graph, joint = bench.graph, bench.joined.joint
    bench.encoder.encode(joint[:16])  # warm-up
    candidates, _ = bench.timed(bench.encode, bench.encoded, bench.store)
    candidates *= graph.n_entities / len(bench.encoded)
    turns: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    bound: dict[str, Bound] = {}
    for _ in range(rounds):
        for way in ways:
            seconds, bound[way.name] = bench.stages(way)
            turns[way.name].append({"encode candidates": candidates, **seconds})
    stages = {
        name: {stage: statistics.median(turn[stage] for turn in times) for stage in times[0]}
        for name, times in turns.items()
    }
    text_seconds = {
        "entity": candidates / graph.n_entities,
        "joint": stages[BI]["encode own"] / len(joint),
        "relation": stages[ways[-1].name]["encode own"] / (2 * graph.n_relations),
    }
    return stages, text_seconds, bound


def sum_stages(stages: Mapping[str, Mapping[str, float]]) -> Rows:
    """Return the cost of the queries, as sums of stages, by what was cached before."""
    after_encoding = ("read", "map candidates", "map queries", "rank")
    warm = "bi: mapped candidates; tri: these, e(h) and e(r)"
    # What was cached, what is timed, the stages of a bi-encoder, the stages of tri-encoders.
    cases = [
        ("nothing", "all", *[("encode candidates", "encode own", *after_encoding)] * 2),
        (warm, "queries and ranks", ("encode own", *after_encoding[2:]), after_encoding[2:]),
        (warm, "queries alone", ("encode own", "map queries"), ("map queries",)),
        (
            "a store; bi: all e(h; r), candidates; tri: e(h), e(r), candidates",
            "all",
            after_encoding,
            after_encoding,
        ),
    ]
    rows = []
    for cached, timed, bi_stages, tri_stages in cases:
        total = {
            name: sum(seconds[stage] for stage in (bi_stages if name == BI else tri_stages))
            for name, seconds in stages.items()
        }
        ratios = {f"bi / {name}": total[BI] / total[name] for name in total if name != BI}
        rows.append({"kept before": cached, "timed": timed, **total, **ratios})
    return rows


def measure_caches(bench: Bench, text_seconds: Mapping[str, float]) -> Rows:
    """Return the size and hit rate of caches that encode each distinct text once.

    Args:
        bench: the queries.
        text_seconds: the seconds to encode one text, for ``entity``, ``relation`` and ``joint``.
    """
    graph = bench.graph
    text_ids = np.unique(graph.entities.texts, return_inverse=True)[1].reshape(-1)

    def count_distinct(*ids: NDArray[Any]) -> int:
        return len(np.unique(np.concatenate(ids)))

    def count_joint(triples: Triples) -> int:
        return count_distinct(text_ids[triples[:, 0]] * (2 * graph.n_relations) + triples[:, 1])

    triples, queries = np.concatenate(list(graph.splits.values())), bench.queries
    heads, tails = text_ids[triples[:, 0]], text_ids[triples[:, 2]]
    n, n_relations = len(triples), count_distinct(triples[:, 1])
    # What is looked up, encoder, lookups, relations or joint texts encoded, entities encoded.
    cases = [
        ("these queries, entities kept", BI, len(queries), count_joint(queries), 0),
        ("these queries, entities kept", TRI, 2 * len(queries), count_distinct(queries[:, 1]), 0),
        ("all splits, forward", BI, 2 * n, count_joint(triples), count_distinct(tails)),
        ("all splits, forward", TRI, 3 * n, n_relations, count_distinct(heads, tails)),
    ]
    size = bench.encoder.dim * _BYTES / 2**20
    return [
        {
            "lookups of": what,
            "way": way,
            "lookups": lookups,
            "encoded": n_texts + n_entities,
            "hits %": 100 * (1 - (n_texts + n_entities) / lookups),
            "vectors MiB": (n_texts + (n_entities or graph.n_entities)) * size,
            "seconds by the rates above": n_texts
            * text_seconds["joint" if way == BI else "relation"]
            + n_entities * text_seconds["entity"],
        }
        for what, way, lookups, n_texts, n_entities in cases
    ]


def measure_matrices(bound: Mapping[str, Bound]) -> Rows:
    """Return the sizes of the matrices of all relations, in float32."""
    rows = []
    for name, (head, _) in bound.items():
        generated = find_generator(head)
        if generated is not None:
            module, inputs = generated
            factors = module.generated_matrices(inputs)
            size = sum(factor.nbytes for factor in factors) / 2**20
            rows.append({"matrices of": name, "relations": len(factors[0]), "MiB": size})
    return rows


def show(rows: Rows, digits: int) -> None:
    """Print rows as a Markdown table, with the given number of significant digits."""
    if not rows:
        return
    print("\n| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        cells = (
            f"{float(f'{value:.{digits}g}'):,g}" if isinstance(value, float) else f"{value:,}"
            if isinstance(value, int) else value
            for value in row.values()
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Parse the command line, measure, and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm", help="encoder (default: minilm)")
    parser.add_argument(
        "--dtype", default="float32", help="data type of the encoder (default: float32)"
    )
    parser.add_argument("--data", help="knowledge graph (default: the bundled sample)")
    parser.add_argument(
        "--queries", type=int, help="number of test queries, in both directions (default: all)"
    )
    parser.add_argument(
        "--encode",
        type=int,
        help="number of random candidates to encode; the time of all is extrapolated, and the "
        "others get the vectors of encoded ones (default: all)",
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        default=["hypernet-full", "hypernet"],
        help="recipes of the heads of tri-encoders (default: hypernet-full hypernet)",
    )
    parser.add_argument(
        "--single",
        type=int,
        default=50,
        help="maximum number of queries to measure one at a time (default: 50)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of turns (default: 3)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on the last line"
    )
    options = parser.parse_args()
    graph, encoder = read_graph(options.data), load_encoder(options.model, dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(encoder, graph, options.queries, options.encode, Path(folder))
        ways = bench.ways(options.heads)
        joint = len(bench.joined.joint)
        print(f"{encoder.name}, {encoder.identity.dtype}, torch {torch.__version__}\n"
              f"{len(bench.queries):,} queries of {joint:,} distinct (h; r); "
              f"{graph.n_entities:,} candidates, of which {len(bench.encoded):,} are encoded; "
              f"{graph.n_relations} relations, both directions")  # fmt: skip
        stages, text_seconds, bound = measure_stages(bench, ways, options.rounds)
        tables: dict[str, Rows] = {
            "stages": [{"way": name, **seconds} for name, seconds in stages.items()],
            "kept": sum_stages(stages),
            "single": bench.single(bound, options.single),
            "caches": measure_caches(bench, text_seconds),
            "matrices": measure_matrices(bound),
        }
    for name, rows in tables.items():
        show(rows, 4 if name == "caches" else 3)
    print(PUBLISHED)
    if options.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
