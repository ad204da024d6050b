"""What queries of a knowledge graph cost bi- and tri-encoders, cold and warm, in one run, in turn.

    python scripts/bench_kgc.py
    python scripts/bench_kgc.py --data WN18RR_FOLDER --queries 1000

Hyper-CL's tables 3 and 4 for any encoder. A bi-encoder (SimKGC) encodes each (head, relation) as
one text; a tri-encoder has e(h) and e(r), and a head makes the query of them. Candidates are all
entities, the same texts for both, encoded once here. Heads are freshly made: their speed is that of
any. On a CPU seconds are those that this process had of it, on a GPU the clock's.

``stages``: medians of rounds. ``kept``: their sums, by what is there before the queries come.
``single``: medians of one query at a time. ``caches``: their sizes and hit rates.
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
#: A head on the graph, and the candidates as it maps them.
Bound = tuple[FittedQueryHead, Array]
Rows = list[dict[str, Any]]

#: The first is what others are compared with.
BI, TRI = "bi-encoder", "tri-encoder"
#: Of 16 bit numbers, as stores have them.
_BYTES = 2
#: What the papers say, beside which it is to be read.
PUBLISHED = """
Hyper-CL on WN18RR, BERT-base, a GPU, one query at a time. Table 3 (arXiv v1): bi-encoder 113.18 s,
Hadamard 1.65, concatenation 2.17, hypernetwork 1.95: x58; BERT-large 209.98 and 1.93: x108. In the
released code a tri-encoder is timed on its second pass over the same queries, vectors and matrices
all kept; the bi-encoder keeps nothing and encodes three texts a query. Table 4 (ACL), all splits,
nothing kept at first: bi-encoder 994 s, 46.65 % hits; hypernetwork 449 s, 85.32 % hits."""


@dataclass(frozen=True)
class Way:
    """A head, and the inputs that are encoded for it beside the candidates."""

    name: str
    head: FittedQueryHead
    inputs: Sequence[EncoderInput]


class Bench:
    """Queries of a graph that is read, and an encoder that is loaded."""

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
        most = None if n_queries is None else max(1, n_queries // 2)
        chosen = np.random.default_rng(0).permutation(len(triples))[:most]
        self.queries = both_directions(triples[chosen], graph.n_relations)
        asked = np.unique(self.queries[:, :2].astype(np.int64), axis=0)
        texts = replace(task.texts(graph), asked=asked)
        self.joint_of = asked[:, 0] * (2 * graph.n_relations) + asked[:, 1]
        self.apart = QueryInputs(texts, load_prompt("separate"))
        self.joined = QueryInputs(texts, load_prompt("concat-sent-cond"))
        every, n = self.apart.candidates, graph.n_entities
        self.encoded = every
        if n_encoded is not None:
            self.encoded = [every[i] for i in np.random.default_rng(1).permutation(n)[:n_encoded]]
        # Those that are not encoded have the vectors of others, so that as many are ranked.
        self.candidates = [self.encoded[i % len(self.encoded)] for i in range(n)]
        self.known = task.known(graph)
        train = both_directions(graph.splits["train"], graph.n_relations)
        self.of_train = KnownTriples(train, graph.n_entities)
        self.store = FeatureStore(folder, encoder.identity, "float16")

    def ways(self, heads: Sequence[str]) -> list[Way]:
        """Return the bi-encoder, and a tri-encoder for each head."""
        dim, n_relations = self.encoder.dim, self.graph.n_relations
        bi = Way(BI, fresh_head("none", dim, n_relations), self.joined.joint)
        made = [fresh_head(name, dim, n_relations) for name in heads]
        return [bi, *map(Way, heads, made, [self.apart.conditions] * len(heads))]

    def timed(
        self, function: Callable[P, T], *given: P.args, **options: P.kwargs
    ) -> tuple[float, T]:
        """Return seconds, and the result."""
        began = self.clock()
        result = function(*given, **options)
        return self.clock() - began, result

    def encode(self, inputs: Sequence[EncoderInput], store: FeatureStore) -> None:
        """Encode what the store lacks."""
        extract(inputs, store, lambda: self.encoder)

    def read(self, way: Way, store: FeatureStore) -> tuple[MatrixLike, MatrixLike]:
        """Return the vectors of candidates, and those of a way's own inputs."""
        return self.store.lookup(self.candidates), store.lookup(way.inputs)

    def bound(self, way: Way, candidates: MatrixLike, own: MatrixLike) -> Bound:
        """Return a way's head on the graph; ``own`` is of :attr:`Way.inputs`."""
        train, n_relations = self.graph.splits["train"], self.graph.n_relations
        arrays = QueryArrays(candidates, train, n_relations, self.of_train)
        if way.name == BI:
            arrays = replace(arrays, joint=own, joint_input_keys=self.joint_of)
        else:
            arrays = replace(arrays, relations=own)
        head = way.head.bind(arrays)
        return head, head.candidates().read()

    def stages(self, way: Way) -> tuple[dict[str, float], Bound]:
        """Return seconds of each stage, and what is bound by then."""
        found: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            store = FeatureStore(Path(folder), self.encoder.identity, "float16")
            found["encode own"], _ = self.timed(self.encode, way.inputs, store)
            found["read"], (candidates, own) = self.timed(self.read, way, store)
        found["map candidates"], (head, every) = self.timed(self.bound, way, candidates, own)
        asked = self.queries
        found["map queries"], vectors = self.timed(head.queries, asked[:, 0], asked[:, 1])
        found["rank"], _ = self.timed(rank, vectors, every, asked, self.known)
        return found, (head, every)

    def single(self, bound: Mapping[str, Bound], n: int) -> Rows:
        """Ask one query at a time, of which entities, relations and mapped candidates are kept."""

        def encoded(h: int, r: int) -> Array:
            place = np.searchsorted(self.joint_of, h * (2 * self.graph.n_relations) + r)
            return unit(self.encoder.encode([self.joined.joint[place]]))

        ways: dict[str, tuple[Callable[[int, int], Array], DenseMatrix]] = {}
        for name, (head, candidates) in bound.items():
            every = DenseMatrix(candidates)
            ways[name] = (encoded if name == BI else partial(by_head, head)), every
            keeping = keep_matrices(head)
            if keeping:
                ways[f"{name}, its matrices kept"] = keeping, every
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        order = np.random.default_rng(1).permutation(len(self.queries))[:n]
        for h, r in self.queries[order, :2].tolist():
            for name, (ask, every) in ways.items():
                took, own = self.timed(ask, h, r)
                of = np.array([h]), np.array([r])
                more, _ = self.timed(top_entities, own, CandidatePool(every, self.known), *of, 10)
                seconds[name].append((took, took + more))
        medians = {name: np.median(own, axis=0) * 1_000 for name, own in seconds.items()}
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


def fresh_head(name: str, dim: int, n_relations: int) -> FittedQueryHead:
    """Return a head of a recipe, fitted for one step on random features."""
    rng, n = np.random.default_rng(0), 16
    triples = rng.integers(0, [n, n_relations, n], size=(8, 3)).astype(np.int32)
    entities, relations = (
        rng.standard_normal((many, dim), dtype=np.float32) for many in (n, 2 * n_relations)
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


def by_head(head: FittedQueryHead, h: int, r: int) -> Array:
    """Return what a head makes of a query's kept vectors; of a relation a matrix each time."""
    return head.queries(np.array([h]), np.array([r]))


def generator(head: FittedQueryHead) -> tuple[HeadModule, Array] | None:
    """Return what makes matrices of relations, and (2 R, width) what it takes of them."""
    module, relations = head.module, head.data.relations if head.data else None
    if relations is None or not isinstance(module, QueryHead) or not module.reads_relations:
        return None
    seen = (relations @ module.basis).numpy()
    return (module.map, seen) if module.map.generates_matrices else None


def keep_matrices(head: FittedQueryHead) -> Callable[[int, int], Array] | None:
    """Return what :func:`by_head` does with the matrices of all relations kept, if it has any."""
    found = generator(head)
    if found is None or head.data is None:
        return None
    made, seen = found
    cache = ConditionCache(FittedHead(head.kind, type(made), made, head.seed), budget=2**34)
    cache.transform(np.zeros((len(seen), made.dim_in)), seen)
    entities = head.data.entities(np.arange(len(head.data.arrays.entities))).numpy()
    return lambda h, r: unit(cache.transform(entities[h : h + 1], seen[r : r + 1]))


def unit(vectors: Array) -> Array:
    """Return vectors of length 1."""
    found: Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found


def by_kept(stages: Mapping[str, Mapping[str, float]]) -> Rows:
    """Return sums of stages: what the queries cost, by what was there before."""
    whole = ("read", "map candidates", "map queries", "rank")
    warm = "bi: mapped candidates; tri: these, e(h) and e(r)"
    # What was there, what is timed, the stages of a bi-encoder and those of tri-encoders.
    cases = [
        ("nothing", "all", *[("encode candidates", "encode own", *whole)] * 2),
        (warm, "queries and ranks", ("encode own", *whole[2:]), whole[2:]),
        (warm, "queries alone", ("encode own", "map queries"), ("map queries",)),
        ("a store; bi: all e(h; r), candidates; tri: e(h), e(r), candidates", "all", whole, whole),
    ]
    rows = []
    for kept, timed, of_bi, of_tri in cases:
        total = {
            name: sum(own[stage] for stage in (of_bi if name == BI else of_tri))
            for name, own in stages.items()
        }
        ratios = {f"bi / {name}": total[BI] / own for name, own in total.items() if name != BI}
        rows.append({"kept before": kept, "timed": timed, **total, **ratios})
    return rows


def hit_rates(bench: Bench, each: Mapping[str, float]) -> Rows:
    """Return what caches hold and how often it is there, each distinct text encoded once.

    ``each`` is the seconds of one text: ``entity``, ``relation`` or ``joint``.
    """
    graph = bench.graph
    number = np.unique(graph.entities.texts, return_inverse=True)[1].reshape(-1)

    def distinct(*parts: NDArray[Any]) -> int:
        return len(np.unique(np.concatenate(parts)))

    def joint(triples: Triples) -> int:
        return distinct(number[triples[:, 0]] * (2 * graph.n_relations) + triples[:, 1])

    every, asked = np.concatenate(list(graph.splits.values())), bench.queries
    entities = number[every[:, 0]], number[every[:, 2]]
    # Way, lookups, of them relations or joint texts encoded, entities encoded.
    cases = [
        ("these queries, entities kept", BI, len(asked), joint(asked), 0),
        ("these queries, entities kept", TRI, 2 * len(asked), distinct(asked[:, 1]), 0),
        ("all splits, forward", BI, 2 * len(every), joint(every), distinct(entities[1])),
        ("all splits, forward", TRI, 3 * len(every), distinct(every[:, 1]), distinct(*entities)),
    ]
    size = bench.encoder.dim * _BYTES / 2**20
    return [
        {
            "lookups of": what,
            "way": way,
            "lookups": lookups,
            "encoded": own + of_entities,
            "hits %": 100 * (1 - (own + of_entities) / lookups),
            "vectors MiB": (own + (of_entities or graph.n_entities)) * size,
            "seconds by the rates above": own * each["joint" if way == BI else "relation"]
            + of_entities * each["entity"],
        }
        for what, way, lookups, own, of_entities in cases
    ]


def matrices(bound: Mapping[str, Bound]) -> Rows:
    """Return how large the matrices of all relations are, in float32."""
    rows = []
    for name, (head, _) in bound.items():
        found = generator(head)
        if found is not None:
            made = found[0].generated_matrices(found[1])
            size = sum(factor.nbytes for factor in made) / 2**20
            rows.append({"matrices of": name, "relations": len(made[0]), "MiB": size})
    return rows


def show(rows: Rows, digits: int) -> None:
    """Print rows as a Markdown table, numbers with so many digits that count."""
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
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", help="a knowledge graph (default: the bundled sample)")
    parser.add_argument("--queries", type=int, help="of test, both directions (default: all)")
    parser.add_argument("--encode", type=int, help="candidates, at random, whose time is taken for "
                        "that of all; the others get their vectors (default: all)")  # fmt: skip
    parser.add_argument("--heads", nargs="+", default=["hypernet-full", "hypernet"])
    parser.add_argument("--single", type=int, default=50, help="queries one at a time, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
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
        encoder.encode(bench.joined.joint[:16])  # warm
        candidates, _ = bench.timed(bench.encode, bench.encoded, bench.store)
        candidates *= graph.n_entities / len(bench.encoded)
        rounds: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
        bound: dict[str, Bound] = {}
        for _ in range(options.rounds):
            for way in ways:
                found, bound[way.name] = bench.stages(way)
                rounds[way.name].append({"encode candidates": candidates, **found})
        stages = {
            name: {stage: statistics.median(one[stage] for one in own) for stage in own[0]}
            for name, own in rounds.items()
        }
        each = {
            "entity": candidates / graph.n_entities,
            "joint": stages[BI]["encode own"] / joint,
            "relation": stages[ways[-1].name]["encode own"] / (2 * graph.n_relations),
        }
        tables: dict[str, Rows] = {
            "stages": [{"way": name, **own} for name, own in stages.items()],
            "kept": by_kept(stages),
            "single": bench.single(bound, options.single),
            "caches": hit_rates(bench, each),
            "matrices": matrices(bound),
        }
    for name, rows in tables.items():
        show(rows, 4 if name == "caches" else 3)
    print(PUBLISHED)
    if options.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
