"""Costs of a whole data set with a cache: cross-, bi- and tri-encoders (Hyper-CL, tables 3 and 4).

The cache is empty at first, and every row of all splits looks up its texts in it. A text that the
cache lacks is encoded and added. A cross-encoder looks up both texts with their condition, a
bi-encoder each text with the condition, and a tri-encoder each text and the condition. In a
knowledge graph, the condition is the relation and belongs to the head entity only.

Costs are those of a random sample, and all kinds of texts take turns. The plain loop encodes each
text with its condition by sentence-transformers and caches nothing. Heads are fitted for one step
only, because speed does not depend on the fit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from bench import fit_random_head, timed
from reproduce import (
    Encoder as PaperEncoder,
)
from reproduce import (
    Figures,
    Measure,
    Row,
    Section,
    Table,
    Value,
    Work,
    parse_table,
)

from llmcond.base.arrays import Array, SharedRows, cosine
from llmcond.base.files import read_json, write_json
from llmcond.base.metrics import Floats
from llmcond.base.system import provenance
from llmcond.benchmark.speeds import PlainLoop, sentence_transformers
from llmcond.data.datasets import Dataset
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.spec import EncoderInput
from llmcond.encoders.torch.engine import torch_engine
from llmcond.features.extract import extract
from llmcond.features.store import FeatureStore
from llmcond.heads import FittedHead
from llmcond.heads.fitted import ConditionCache
from llmcond.kinds.ranking.graph import Graph
from llmcond.prompts import load_prompt
from llmcond.runs import open_any_run
from llmcond.runs.open import LazyEncoder

#: Heads of the tri-encoders in the tables.
HEADS = ("hadamard", "concat", "hypernet", "hypernet-full")
#: Bytes of a number in a cache, and of an entry besides its numbers. With these, ``cache_size``
#: gives the paper's sizes.
_BYTES, _ENTRY = 4, 48
#: Number of texts of each kind, and of rows, to measure.
SAMPLE = 300
#: Budget of a cache that drops nothing.
_UNLIMITED = 2**50

#: Encoder and architecture in tables 3 and 4 of the paper: seconds, hits in percent, and MB. The
#: paper's MB are MiB, and its GB are thousands of them.
TABLE_3 = parse_table(
    """
    SimCSE_base bi-encoder 791.71 1.46 110.87
    SimCSE_large bi-encoder 1498.65 1.46 147.26
    SimCSE_base hadamard 441.17 64.11 60.57
    SimCSE_base hypernet 525.62 64.11 2170
    SimCSE_base hypernet-full 541.55 64.11 12810
    SimCSE_large hadamard 832.19 64.11 80.45
    SimCSE_large hypernet 990.94 64.11 3820
    SimCSE_large hypernet-full 960.84 64.11 22750
    """,
    3,
)
TABLE_4 = parse_table(
    """
    BERT_base bi-encoder 994.41 46.65 295.29
    BERT_large bi-encoder 1806.18 46.65 392.2
    BERT_base hadamard 435.571 85.32 121.86
    BERT_base concat 449.46 85.32 121.86
    BERT_base hypernet-full 448.955 85.32 146.57
    BERT_large hadamard 781.45 85.32 161.85
    BERT_large concat 783.228 85.32 161.86
    BERT_large hypernet-full 774.41 85.32 205.81
    """,
    3,
)
#: Names of architectures on a page.
LABELS = {
    "plain loop": "bi-encoder, plain loop of sentence-transformers",
    "hadamard": "tri-encoder, Hadamard product",
    "concat": "tri-encoder, concatenation",
    "hypernet": "tri-encoder, hyperK-cl with K = H / 12",
    "hypernet-full": "tri-encoder, hyper-cl",
}
SECONDS, HITS = Measure("single", "time, s", 1, 1), Measure("hits", "hits, %", 100, 2)
SIZE, SPEED = Measure("size", "cache, MiB", 1, 2), Measure("speed", "speed", 1, 2)
BATCHED = Measure("batched", "time in batches, s", 1, 1)
BATCHED_SPEED = Measure("batched_speed", "speed in batches", 1, 2)


# -- what is looked up -------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Rows that compare two texts under a condition.

    Attributes:
        first: first text of each row.
        condition: condition of each row.
        second: second text of each row.
        one_sided: whether the condition belongs to the first text only.
    """

    first: Sequence[str]
    condition: Sequence[str]
    second: Sequence[str]
    one_sided: bool = False

    @classmethod
    def of_dataset(cls, dataset: Dataset) -> Workload:
        """Return the rows of all splits, with and without ratings."""
        splits = list(dataset.splits.values())
        columns = ("sentence1", "condition", "sentence2")
        first, condition, second = (
            [text for rows in splits for text in getattr(rows, column)] for column in columns
        )
        return cls(first, condition, second)

    @classmethod
    def of_graph(cls, graph: Graph) -> Workload:
        """Return the triples of all splits."""
        heads, relations, tails = np.concatenate(list(graph.splits.values())).T.tolist()
        entities, conditions = graph.entities.texts, graph.relations.texts
        return cls(
            [entities[i] for i in heads],
            [conditions[i] for i in relations],
            [entities[i] for i in tails],
            one_sided=True,
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.first)

    def describe(self) -> str:
        """Return the numbers of rows and of distinct texts, in words."""
        return (
            f"{len(self):,} rows of all splits; distinct: {len(self.texts):,} texts, "
            f"{len(self.conditions):,} conditions, {len(self.joint) + len(self.answers):,} texts "
            f"with their condition, {len(self.rows):,} rows."
        )

    @cached_property
    def texts(self) -> list[str]:
        """The distinct texts without a condition, for tri-encoders."""
        return list(dict.fromkeys(chain(self.first, self.second)))

    @cached_property
    def conditions(self) -> list[str]:
        """The distinct conditions."""
        return list(dict.fromkeys(self.condition))

    @cached_property
    def joint(self) -> list[tuple[str, str]]:
        """The distinct texts with their condition, for bi-encoders."""
        pairs = zip(self.first, self.condition, strict=True)
        if not self.one_sided:
            pairs = chain(pairs, zip(self.second, self.condition, strict=True))  # type: ignore[assignment]
        return list(dict.fromkeys(pairs))

    @cached_property
    def answers(self) -> list[str]:
        """The distinct second texts that a bi-encoder encodes without a condition."""
        return list(dict.fromkeys(self.second)) if self.one_sided else []

    @cached_property
    def rows(self) -> list[tuple[str, str, str]]:
        """The distinct rows, for cross-encoders."""
        return list(dict.fromkeys(zip(self.first, self.second, self.condition, strict=True)))


def cache_size(dim: int, n_vectors: int, n_matrices: int = 0, matrix: int = 0) -> float:
    """Return the MiB of a cache in float32.

    Args:
        dim: size of a vector.
        n_vectors: number of vectors.
        n_matrices: number of conditions with cached matrices.
        matrix: numbers in the matrices of one condition.
    """
    size = n_vectors * (_BYTES * dim + _ENTRY) + n_matrices * (_BYTES * matrix + _ENTRY)
    return size / 2**20


# -- costs -------------------------------------------------------------------------------------


#: Seconds of a piece of work, with one piece per call and per piece in large batches, as (2,).
Cost = Floats


class Bench:
    """Measures the costs of an encoder and of heads on a workload.

    Args:
        encoder: the encoder.
        work: the workload.
        sample: number of texts of each kind, and of rows, to measure.
    """

    def __init__(self, encoder: Encoder, work: Workload, sample: int) -> None:
        self.encoder, self.work, self.sample = encoder, work, sample

    def timed(self, function: Callable[..., Any], *args: Any) -> float:
        """Call a function and return the seconds."""
        _, wall, processor = timed(function, *args)
        return processor if self.encoder.resolved.device == "cpu" else wall

    def pick(self, items: Sequence[Any]) -> list[Any]:
        """Return a random sample of items, the same in each call."""
        order = np.random.default_rng(0).permutation(len(items))[: self.sample]
        return [items[i] for i in order]

    def encoding_costs(self) -> dict[str, Cost]:
        """Return the cost of a text of each kind, and of the plain loop's, by name."""
        separate, joint = load_prompt("separate"), load_prompt("concat-sent-cond")
        inputs: dict[str, list[Any]] = {
            "text": [separate.conditional.render(text, "") for text in self.pick(self.work.texts)],
            "condition": [
                separate.unconditional.render("", text) for text in self.pick(self.work.conditions)
            ],
            "joint": [joint.conditional.render(*pair) for pair in self.pick(self.work.joint)],
            "row": self.pick(self.work.rows),
        }
        encode: dict[str, Callable[[Any], Any]] = dict.fromkeys(inputs, self.encoder.encode)
        encode["row"] = self.encoder.encode_joined
        batches: dict[str, Callable[[Any], Any]] = dict.fromkeys(inputs, self.extract)
        batches["row"] = self.encoder.encode_joined
        if find_spec("sentence_transformers"):
            inputs["plain"] = [self.plain_input(i) for i in self.pick(range(len(self.work)))]
            encode["plain"] = batches["plain"] = load_peer(self.encoder)
        for name, items in inputs.items():
            encode[name](items[:1])  # warm-up
        single: dict[str, list[float]] = {name: [] for name in inputs}
        for i in range(self.sample):
            for name, items in inputs.items():
                if i < len(items):
                    single[name].append(self.timed(encode[name], items[i : i + 1]))
        return {
            name: np.array([np.mean(single[name]), self.timed(batches[name], items) / len(items)])
            for name, items in inputs.items()
        }

    def plain_input(self, row: int) -> EncoderInput:
        """Return an input of a bi-encoder: the first text of even rows, the second of others."""
        work, joint = self.work, load_prompt("concat-sent-cond")
        if row % 2 and work.one_sided:
            return load_prompt("separate").conditional.render(work.second[row], "")
        text = (work.second if row % 2 else work.first)[row]
        return joint.conditional.render(text, work.condition[row])

    def extract(self, inputs: Sequence[EncoderInput]) -> None:
        """Encode inputs in batches and store their vectors."""
        with tempfile.TemporaryDirectory() as folder:
            store = FeatureStore(Path(folder), self.encoder.identity, "float32")
            extract(inputs, store, lambda: self.encoder)

    def head_costs(self, head: FittedHead) -> tuple[Cost, Cost]:
        """Return the cost of a row with a head, and the additional cost of a new condition.

        Features are random, because speed does not depend on them. In batches, the cost of new
        conditions is part of the cost of a row.
        """
        rng, work = np.random.default_rng(0), self.work
        conditions = rng.standard_normal((len(work.conditions), self.encoder.dim), np.float32)
        texts = rng.standard_normal((min(len(work), 4_096), self.encoder.dim), np.float32)
        cache = ConditionCache(head, budget=_UNLIMITED) if head.generates_matrices else None
        transform = head.transform if cache is None else cache.transform

        def compare(texts: Array, condition: Array) -> Array:
            embeddings = transform(texts[:1] if work.one_sided else texts, condition)
            return head.compare(embeddings[:1], texts[1:] if work.one_sided else embeddings[1:])

        def compare_all(first: SharedRows, second: SharedRows, condition: SharedRows) -> Array:
            if work.one_sided:
                return head.compare(head.transform(first, condition), second.read())
            return head.similarity(first, second, condition)

        seconds: list[tuple[float, float]] = []
        compare(texts[:2], conditions[:1])  # warm-up
        for condition in self.pick(range(1, len(conditions))) or [0]:
            call = partial(self.timed, compare, texts[:2], conditions[condition : condition + 1])
            seconds.append((call(), call()))
        new, known = np.mean(seconds, axis=0)
        position = {text: i for i, text in enumerate(work.conditions)}
        index = np.array([position[text] for text in work.condition])
        rows = np.arange(len(work)) % len(texts)
        sides = SharedRows(texts, rows), SharedRows(texts, rows[::-1].copy())
        batched = self.timed(compare_all, *sides, SharedRows(conditions, index))
        extra = 0.0 if cache is None else max(0.0, float(new - known))
        return np.array([known, batched / len(work)]), np.array([extra, 0.0])

    def architectures(self, heads: Iterable[str]) -> list[dict[str, Any]]:
        """Return the costs of all architectures.

        Each has its ``name``, the number of ``lookups`` in the cache (0 without a cache), the share
        of ``hits``, the ``size`` of the cache in MiB, and the seconds of all rows, ``single`` and
        ``batched``. Without sentence-transformers there is no plain loop.
        """
        work, dim, n = self.work, self.encoder.dim, len(self.work)
        costs = self.encoding_costs()
        vectors = np.random.default_rng(0).standard_normal((2, n, dim), np.float32)
        single = np.mean([self.timed(cosine, *vectors[:, :1]) for _ in range(100)])
        comparison = np.array([n * single, self.timed(cosine, *vectors)])
        n_texts, n_conditions, n_rows = len(work.texts), len(work.conditions), len(work.rows)
        n_joint, n_answers = len(work.joint), len(work.answers)
        rows: list[tuple[str, int, int, float, Cost]] = []
        if "plain" in costs:
            rows.append(("plain loop", 0, 0, 0.0, costs["plain"] * (2 * n) + comparison))
        rows.append(("cross-encoder", n, n_rows, cache_size(1, n_rows), costs["row"] * n_rows))
        size = cache_size(dim, n_joint + n_answers)
        cost = costs["joint"] * n_joint + costs["text"] * n_answers + comparison
        rows.append(("bi-encoder", 2 * n, n_joint + n_answers, size, cost))
        for name in heads:
            head = fit_random_head(name, dim, max(1, dim // 12))  # the paper's rank
            row, condition = self.head_costs(head)
            cost = costs["text"] * n_texts + costs["condition"] * n_conditions
            cost = cost + row * n + condition * n_conditions
            size = cache_size(dim, n_texts + n_conditions)
            if head.generates_matrices:
                sample = np.ones((1, dim), dtype=np.float32)
                matrix = sum(part.size for part in head.module.generated_matrices(sample))
                size = cache_size(dim, n_texts, n_conditions, matrix)
            rows.append((name, 3 * n, n_texts + n_conditions, size, cost))
        return [
            {
                "name": name,
                "lookups": lookups,
                "hits": 1 - misses / lookups if lookups else 0.0,
                "size": size,
                **dict(zip(("single", "batched"), cost.tolist(), strict=True)),
            }
            for name, lookups, misses, size, cost in rows
        ]


def load_peer(encoder: Encoder) -> Callable[[Any], Any]:
    """Return the function of sentence-transformers that encodes inputs by the same checkpoint."""
    options = EncoderOptions(
        dtype=encoder.identity.dtype, device=encoder.resolved.device, runtime="torch"
    )
    folder = str(encoder.resolved.checkpoint.folder)
    peer = Encoder(resolve(folder, options, identify=False))
    return sentence_transformers(PlainLoop(peer, torch_engine(peer).model.network), peer)


# -- tables ------------------------------------------------------------------------------------


def cost_section(
    work: Work,
    table: str,
    title: str,
    printed: Table,
    workload: Workload,
    encoders: Sequence[PaperEncoder],
) -> Section:
    """Measure encoders on a workload, and return a table of the paper with our costs."""
    rows: list[Row] = []
    paper_measures = (SECONDS, HITS, SIZE)
    for encoder in encoders:
        figures: Mapping[str, Figures]
        if reason := encoder.missing_reason("separate") if encoder.reason else "":
            figures = dict.fromkeys(("cross-encoder", "bi-encoder", *HEADS), reason)
        else:
            figures = make_figures(_measure_costs(work, encoder, workload))
        for key, ours in figures.items():
            paper, others = work.printed(printed, paper_measures, encoder, key)
            notes = [] if paper else ["other encoder"] if others else ["not in the paper's table"]
            rows.append(Row(encoder.label, [LABELS.get(key, key)], ours, notes, paper, others))
    about = [
        workload.describe(),
        "The cache is empty at first. Every row of all splits looks up its texts, and texts that "
        "are missing are encoded and added.",
        "A hypernetwork caches the matrix of a condition, or its two factors, instead of the "
        "condition's vector.",
        "Hit rates and sizes are exact. A size is that of the numbers in float32 and 48 bytes per "
        "entry; with these, the paper's encoders have the paper's sizes.",
        "The paper's GB are printed as thousands of MiB.",
        "Times are costs of a random sample, multiplied by the numbers of cache misses and of "
        "rows.",
        "Our times are processor time on a CPU (wall time on a GPU), and the paper's are wall time "
        "on a GPU. Only ratios are comparable.",
        "One text at a time is the paper's set-up. In batches, distinct texts are encoded as by "
        "`llmcond extract`, and the head maps all rows in one call.",
        "Speeds are relative to a plain loop without a cache, one text at a time or in batches of "
        "32. Without sentence-transformers they are relative to the cross-encoder.",
    ]
    measures = (SECONDS, HITS, SIZE, SPEED, BATCHED, BATCHED_SPEED)
    return Section(table, title, about, ["architecture"], measures, rows)


def _measure_costs(work: Work, encoder: PaperEncoder, workload: Workload) -> list[dict[str, Any]]:
    """Return the costs of an encoder, which are stored in its run."""
    sample = 3 if work.options.quick else SAMPLE
    settings = {"sample": sample, "versions": provenance()["versions"]}
    path = encoder.run / "costs.json"
    if path.is_file():
        record = read_json(path)
        if record["settings"] == settings:
            return list(record["architectures"])
    loaded = LazyEncoder(open_any_run(encoder.run).resolve_encoder(work.options.device))()
    rows = Bench(loaded, workload, sample).architectures(HEADS)
    write_json(path, {"settings": settings, "architectures": rows})
    return rows


def make_figures(architectures: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Value]]:
    """Return the figures of each architecture by its name, with speeds relative to the first."""
    first, figures = architectures[0], {}
    for row in architectures:
        cached = (HITS, SIZE) if row["lookups"] else ()
        of_row = {m.key: Value(row[m.key]) for m in (SECONDS, *cached, BATCHED)}
        speeds = {SPEED.key: SECONDS.key, BATCHED_SPEED.key: BATCHED.key}
        of_row |= {speed: Value(first[key] / row[key]) for speed, key in speeds.items()}
        figures[row["name"]] = of_row
    return figures
