"""Measure how fast heads are fitted and applied, against plain implementations.

    python scripts/bench_fit.py fit          # linear and MLP on features as large as NV-Embed-v2's
    python scripts/bench_fit.py stream       # a million pairs from disk
    python scripts/bench_fit.py hypernet     # the low-rank hypernetwork against its per-row form
    python scripts/bench_fit.py relations    # the same on queries of a graph with many relations
    python scripts/bench_fit.py grid         # 10,000 sentences under 100 conditions

Features are random, because time and memory do not depend on their values. Every part of the
benchmark runs in a new process, whose peak memory is reported.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import BenchOptions, run_in_process, timed
from common import format_table, print_json

from llmcond.benchmark.speeds import peak_memory
from llmcond.heads import PairArrays, SharedRows, fit_recipe, load_recipe
from llmcond.heads.conditioned import Hypernet
from llmcond.heads.fit import fit_by_gradient
from llmcond.kinds.ranking.graph import KnownTriples, both_directions
from llmcond.kinds.ranking.heads import QueryArrays, create_query_family, fit_queries

#: C-STS: train rows, distinct conditions, and the paper's dimensions before and after projection.
ROWS, CONDITIONS, WIDE, NARROW = 11_342, 3_732, 4_096, 512
#: Dimensions of MiniLM, for the parts hypernet and grid.
DIM = 384
#: FB15k-237: directed relations, and queries of an epoch.
RELATIONS, QUERIES = 474, 544_230
#: Minutes on an A6000 to learn a projection of 4,096 dimensions to 512 (CASE, section 4).
PAPER = {"linear": 1.5, "mlp": 5.0}


def quiet(epoch: float, epochs: int, entry: Mapping[str, Any] | None) -> None:
    """Report no progress."""


def pairs(rows: int, dim: int, seed: int, dtype: type[Any] = np.float16) -> PairArrays:
    """Return random features and ratings."""
    rng = np.random.default_rng(seed)
    first, second = (rng.standard_normal((rows, dim), np.float32).astype(dtype) for _ in range(2))
    return PairArrays(first, second, rng.uniform(size=rows))


# -- fitting -----------------------------------------------------------------------------------


def fit(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Fit linear and MLP heads on 4,096 dimensions, and the same by a plain loop."""
    rows = []
    for kind in ("linear", "mlp"):
        recipe = load_recipe(kind).with_settings({"dim": NARROW, "epochs": options.epochs}, "")
        data = pairs(options.rows, WIDE, 0)
        head, seconds, _ = timed(fit_recipe, recipe, data, None, 0, quiet)
        few = max(options.epochs // 20, 1)
        plain = timed(plain_fit, kind, recipe.settings, data, few)[1] / few
        rows.append(
            {
                "head": kind,
                "precision": head.fit.record["precision"],
                "seconds": seconds,
                "of_paper": PAPER[kind] * 60 / seconds,
                "plain_seconds": plain * options.epochs,
                "ratio": plain * options.epochs / seconds,
            }
        )
    return rows


def plain_fit(kind: str, settings: Any, data: PairArrays, epochs: int) -> None:
    """Fit a head in the simplest way: nn.Module and Adam, all in float32."""
    from torch import nn

    first, second = (torch.from_numpy(np.asarray(x)).float() for x in (data.first, data.second))
    rating = torch.from_numpy(data.rating).float()
    layers: list[Any] = [nn.Linear(WIDE, NARROW, bias=False), nn.Dropout(settings.dropout)]
    if kind == "mlp":
        layers = [nn.Linear(WIDE, settings.hidden, bias=False), nn.ReLU()]
        layers += [nn.Dropout(settings.dropout), nn.Linear(settings.hidden, NARROW, bias=False)]
        layers += [nn.ReLU(), nn.Dropout(settings.dropout)]
    model = nn.Sequential(*layers)
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    for _ in range(epochs):
        order: Any = torch.randperm(len(rating))
        for batch in order.split(settings.batch_size):
            cosine = torch.cosine_similarity(model(first[batch]), model(second[batch]))
            loss: Any = (cosine - rating[batch]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


def stream(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Fit one epoch of a linear head on pairs whose features are on disk."""
    n = options.pairs
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sides = []
        block = np.random.default_rng(0).standard_normal((min(n, 10_000), WIDE), np.float32)
        for side in (0, 1):
            path = Path(folder, f"{side}.f16")
            with path.open("wb") as file:
                for start in range(0, n, len(block)):
                    rolled = np.roll(block, start // len(block) + side, axis=1)
                    file.write(rolled[: n - start].astype(np.float16).tobytes())
            sides.append(np.memmap(path, np.float16, "r", shape=(n, WIDE)))
        data = PairArrays(sides[0], sides[1], np.random.default_rng(1).uniform(size=n))
        recipe = load_recipe("linear").with_settings({"dim": NARROW, "epochs": 1}, "")
        _, seconds, _ = timed(fit_recipe, recipe, data, None, 0, quiet)
    return [{"pairs": n, "on_disk_gib": 4 * n * WIDE / 2**30, "seconds": seconds}]


# -- hypernetwork ------------------------------------------------------------------------------


def hypernet(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time epochs of a hypernetwork of rank 64 at 384 dimensions, and of its plain form."""
    data = pairs(options.rows, DIM, 0, np.float32)
    rng = np.random.default_rng(1)
    table = rng.standard_normal((CONDITIONS, DIM)).astype(np.float32)
    data = PairArrays(
        data.first,
        data.second,
        data.rating,
        SharedRows(table, rng.integers(CONDITIONS, size=options.rows)),
    )
    rows: list[dict[str, Any]] = []
    base = {"dim": DIM, "rank": 64, "dropout": 0.0, "epochs": 1, "precision": "float32"}
    changes: dict[str, dict[str, Any]] = {
        "plain, W_c for each row and sentence": {"batches": "conditions"},
        "llmcond, rows in any order": {"batches": "rows"},
        "llmcond, rows of a condition together": {"batches": "conditions"},
        "llmcond, the same in bfloat16": {"batches": "conditions", "precision": "bfloat16"},
    }
    for name, change in changes.items():
        recipe = load_recipe("hypernet-mse").with_settings({**base, **change}, "")
        if name.startswith("plain"):
            recipe = replace(recipe, family=PlainHypernet)
        seconds = []
        for _ in range(options.rounds):
            fitted, wall, _ = timed(fit_by_gradient, recipe, data, None, 0, quiet)
            seconds.append(wall)
        loss = last_loss(fitted[1])
        rows.append({"form": name, "seconds": float(np.median(seconds)), "loss": loss})
    for row in rows:
        row["ratio"] = rows[0]["seconds"] / row["seconds"]
    return rows


def last_loss(fit: Any) -> float:
    """Return the loss of the last epoch, which shows whether two forms compute the same."""
    return float(fit.record["curve"][-1]["loss"])


class PlainHypernet(Hypernet):
    """The hypernetwork as in the released code: with a matrix for each row."""

    def forward(self, x: torch.Tensor, condition: torch.Tensor, which: torch.Tensor) -> Any:
        """Compute W_c of each row, for the first sentences and for the second."""
        embedded = []
        for part, conditions in zip(x.chunk(2), condition[which].chunk(2), strict=True):
            factors = self.factors(conditions)
            matrix = torch.bmm(factors[0], factors[1])
            embedded.append(torch.bmm(part[:, None], matrix)[:, 0])
        return torch.cat(embedded)


class RelationLoop(Hypernet):
    """The hypernetwork as a loop over the relations of a batch, with a matrix for each."""

    def forward(self, x: torch.Tensor, condition: torch.Tensor, which: torch.Tensor) -> Any:
        """Compute W_c of each relation, and the rows of one relation after another."""
        factors = self.factors(condition)
        embedded = x.new_empty(len(x), self.settings.dim)
        for i in range(len(condition)):
            rows = torch.nonzero(which == i)[:, 0]
            values = x.index_select(0, rows)[None]
            for factor in factors:
                values = self.batched_product(values, factor[i : i + 1])
            embedded = embedded.index_copy(0, rows, values[0])
        return embedded


def relations(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time epochs of the hypernetworks on a graph with as many relations as FB15k-237.

    A relation's share of the triples falls with its rank, so that a batch of 1,024 queries has
    about as many distinct relations as in FB15k-237 (263).
    """
    rng, half = np.random.default_rng(0), RELATIONS // 2
    n_entities, n = 2_000, options.steps * 512
    shares = 1 / (np.arange(half) + 10)
    triples = rng.integers(n_entities, size=(n, 3)).astype(np.int32)
    triples[:, 1] = rng.choice(half, size=n, p=shares / shares.sum())
    arrays = QueryArrays(
        rng.standard_normal((n_entities, DIM), dtype=np.float32),
        triples,
        half,
        KnownTriples(both_directions(triples, half), n_entities),
        relations=rng.standard_normal((RELATIONS, DIM), dtype=np.float32),
    )
    rows: list[dict[str, Any]] = []
    forms: dict[str, type[Hypernet]] = {
        "plain, W_c for each row": PlainHypernet,
        "a loop over the relations of a batch": RelationLoop,
        "llmcond": Hypernet,
    }
    recipe = load_recipe("hypernet", task="kgc").with_settings({"epochs": 1, "dim": DIM}, "")
    for name, family in forms.items():
        changed = replace(recipe, family=create_query_family(family))
        seconds = []
        for _ in range(options.rounds):
            head, _, processor = timed(fit_queries, changed, arrays, None, 0, quiet, "cpu")
            seconds.append(processor)
        rows.append(
            {
                "form": name,
                "processor_seconds_per_epoch": float(np.median(seconds)) * QUERIES / (2 * n),
                "loss": last_loss(head.fit),
            }
        )
    for row in rows:
        key = "processor_seconds_per_epoch"
        row["ratio"] = rows[0][key] / row[key]
    return rows


# -- inference ---------------------------------------------------------------------------------


def grid(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Apply heads to every sentence under every condition, from existing features."""
    few = pairs(512, DIM, 0, np.float32)
    rng = np.random.default_rng(2)
    sentences = rng.standard_normal((options.sentences, DIM)).astype(np.float32)
    conditions = rng.standard_normal((options.conditions, DIM)).astype(np.float32)
    arrays = PairArrays(
        few.first,
        few.second,
        few.rating,
        SharedRows(conditions, rng.integers(len(conditions), size=512)),
    )
    changes: dict[str, dict[str, Any]] = {
        "linear": {"dim": DIM},
        "mlp": {"dim": DIM},
        "hadamard": {},
        "concat": {"dim": DIM},
        "hypernet-ablation": {},
        "hypernet-mse": {"dim": DIM},
        "hypernet-full-mse": {"dim": DIM},
    }
    rows = []
    for kind, change in changes.items():
        recipe = load_recipe(kind).with_settings({**change, "epochs": 1}, "")
        head = fit_recipe(recipe, arrays, None, 0, quiet)

        def apply(head: Any = head) -> None:
            for c in conditions:
                head.transform(sentences, c[None] if head.dim_condition else None)

        _, apply_seconds, _ = timed(apply)
        n = options.sentences * options.conditions
        rows.append({"head": kind, "seconds": apply_seconds, "embeddings_per_s": n / apply_seconds})
    seconds = options.encode or 1e6 * 26 / 33_000
    for row in rows:
        row["against_encoding"] = seconds * n / 1e6 / row["seconds"]
    return rows


PARTS = {
    "fit": fit,
    "stream": stream,
    "hypernet": hypernet,
    "relations": relations,
    "grid": grid,
}


def work(name: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Run a part; return its rows and its peak memory in GiB."""
    return PARTS[name](options), peak_memory("cpu")


def main() -> None:
    """Parse the command line, measure, and print tables."""
    parser = BenchOptions(__doc__)
    add = parser.option
    parser.names("parts", "parts to run", PARTS)
    add("--rows", ROWS, "fit and hypernet: number of pairs")
    add("--epochs", 40, "fit: number of epochs")
    add("--rounds", 3, "hypernet and relations: number of fits, whose median counts")
    add("--steps", 10, "relations: number of measured steps of an epoch's 532")
    add("--pairs", 1_000_000, "stream: number of pairs")
    add("--folder", Path, "stream: folder for files of 16 GiB", "the temporary folder")
    add("--sentences", 10_000, "grid: number of sentences")
    add("--conditions", 100, "grid: number of conditions")
    encode = "grid: seconds to encode a million inputs, as measured by bench_extract.py"
    add("--encode", float, encode, "788, for 26 million tokens at 33,000 tokens/s")
    options = parser.parse_args()
    results = {}
    for name in options.parts or PARTS:
        rows, memory = run_in_process(work, name, options)
        about = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
        print(f"\n{name}: {about}, peak {memory:.2f} GiB\n\n{format_table(rows)}", flush=True)
        results[name] = {"rows": rows, "peak_gib": memory}
    print_json(options, results)


if __name__ == "__main__":
    main()
