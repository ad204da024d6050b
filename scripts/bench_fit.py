"""Measure how fast heads are fitted, against plain implementations.

    python scripts/bench_fit.py fit          # linear and MLP on features as large as NV-Embed-v2's
    python scripts/bench_fit.py hypernet     # the low-rank hypernetwork against its per-row form

Commit 17f6c5ba has further parts: stream and relations, for pairs on disk and for graphs, and grid,
which applies heads to 10,000 sentences under 100 conditions.

Features are random, because time and memory do not depend on their values. Every part of the
benchmark runs in a new process, whose peak memory is reported.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from bench import BenchOptions, run_in_process, timed
from common import format_table, print_json

from llmcond.benchmark.speeds import peak_memory
from llmcond.heads import PairArrays, SharedRows, fit_recipe, load_recipe
from llmcond.heads.conditioned import Hypernet

#: C-STS: train rows, distinct conditions, and the paper's dimensions before and after projection.
ROWS, CONDITIONS, WIDE, NARROW = 11_342, 3_732, 4_096, 512
#: Dimensions of MiniLM, for the part hypernet.
DIM = 384
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
            fitted, wall, _ = timed(fit_recipe, recipe, data, None, 0, quiet, "cpu")
            seconds.append(wall)
        # The loss of the last epoch shows whether two forms compute the same.
        loss = float(fitted.fit.record["curve"][-1]["loss"])
        rows.append({"form": name, "seconds": float(np.median(seconds)), "loss": loss})
    for row in rows:
        row["ratio"] = rows[0]["seconds"] / row["seconds"]
    return rows


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


PARTS = {"fit": fit, "hypernet": hypernet}


def work(name: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Run a part; return its rows and its peak memory in GiB."""
    return PARTS[name](options), peak_memory("cpu")


def main() -> None:
    """Parse the command line, measure, and print tables."""
    parser = BenchOptions(__doc__)
    add = parser.option
    parser.names("parts", "parts to run", PARTS)
    add("--rows", ROWS, "number of pairs")
    add("--epochs", 40, "fit: number of epochs")
    add("--rounds", 3, "hypernet: number of fits, whose median counts")
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
