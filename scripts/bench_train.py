r"""Measure training by LoRA: llmcond's step against a plain loop of transformers and peft.

The plain loop is that of the released code of C-STS: both sentences of every row are encoded, each
with its condition, in one batch padded to its longest text. Both have the same adapters, rows,
optimiser and precision. Each has a process of its own, and they take turns; ratios are medians of
rounds. Where the encoder has dropout, the plain loop has it on attention weights too, and packed
rows do not; with --no-dropout neither has any.

    python scripts/bench_train.py --model minilm
    python scripts/bench_train.py --model Salesforce/SFR-Embedding-Mistral --quantize 4bit \
        --device cuda --gradient-checkpointing

Models other than minilm get random weights: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_extract import find_checkpoint, machine_peak, measure

from llmcond.benchmark.speeds import linear_flops, peak_memory, synchronize
from llmcond.data.datasets import read_dataset
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.known import known_names
from llmcond.encoders.loading.device import TORCH_DTYPES
from llmcond.features.view import recipe_view
from llmcond.finetune.loading import load_trainable, prepare_accelerator
from llmcond.finetune.model import BiEncoderModel, HeadConfig, RatedInputs
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.heads.objectives import Objective
from llmcond.heads.settings import ObjectiveSettings
from llmcond.prompts import load_prompt
from llmcond.system import choose_device


class Training:
    """An encoder with adapters, and one way to train it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.kind, self.device = task["kind"], choose_device(task["device"])
        options = EncoderOptions(
            dtype=task["dtype"],
            quantize=task["quantize"],
            device=self.device,
            like=task["like"],
            max_tokens_per_batch=task["max_tokens_per_batch"],
        )
        resolved = resolve(task["checkpoint"], options, identify=False)
        self.checkpointing = bool(task["checkpointing"])
        self.flops = linear_flops(resolved)
        settings = TuneSettings(
            rank=task["rank"],
            gradient_checkpointing=self.checkpointing,
            encoder_dropout=not task["no_dropout"],
        )
        self.accelerator = prepare_accelerator(resolved)
        self.trainable = load_trainable(resolved, settings, 0)
        recipe = load_recipe("none")
        view = recipe_view(recipe, [load_prompt(resolved.joint_prompt)], False)
        rows = read_dataset(None).splits["train"]
        self.inputs = RatedInputs.from_rows(rows, view, self.trainable.tokenizer)
        self.rows, self.batch = rows, task["batch_size"]
        dim = self.trainable.engine.dim
        plan = HeadConfig(recipe, ObjectiveSettings(), 0)
        self.model = BiEncoderModel(self.trainable.engine, plan, (dim, 0)).train()
        weights = list(self.model.trained_parameters().values())
        self.optimiser = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        self.weights = weights

    def steps(self, first: int, count: int) -> tuple[float, int, int]:
        """Take steps; return their seconds, the tokens of all rows, and those computed."""
        useful = computed = 0
        # Rows as an epoch has them: in any order.
        order = np.random.default_rng(0).permutation(len(self.inputs))
        synchronize(self.device)
        began = time.perf_counter()
        for step in range(first, first + count):
            start = step * self.batch % (len(order) - self.batch)
            rows = order[start : start + self.batch]
            self.optimiser.zero_grad()
            with self.accelerator.autocast():
                loss = self._loop(rows) if self.kind == "loop" else self._ours(rows, step)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.weights, 1.0)
            self.optimiser.step()
            lengths = self._lengths(rows)
            useful += sum(lengths)
            used = self.inputs.distinct_inputs(rows)
            mine = sum(len(self.inputs.tokens[i].ids) for i in used)
            computed += max(lengths) * len(lengths) if self.kind == "loop" else mine
        synchronize(self.device)
        return time.perf_counter() - began, useful, computed

    def _columns(self, rows: Any) -> list[int]:
        columns = self.inputs.columns.values()
        return [int(i) for column in columns for i in column[rows]]

    def _lengths(self, rows: Any) -> list[int]:
        return [len(self.inputs.tokens[i].ids) for i in self._columns(rows)]

    def _ours(self, rows: Any, step: int) -> Any:
        return self.model(self.inputs, rows, [0, step])

    def _loop(self, rows: Any) -> Any:
        texts = [self.inputs.tokens[i] for i in self._columns(rows)]
        width = max(len(text.ids) for text in texts)
        ids = torch.tensor([text.ids + [0] * (width - len(text.ids)) for text in texts])
        ends = torch.tensor([len(text.ids) for text in texts])
        mask = (torch.arange(width) < ends[:, None]).long().to(self.device)
        network = self.trainable.network
        hidden = network(input_ids=ids.to(self.device), attention_mask=mask).last_hidden_state
        if self.trainable.resolved.identity.pooling == "last":
            pooled = hidden[torch.arange(len(texts)), ends.to(self.device) - 1].float()
        else:
            weights = mask.unsqueeze(-1)
            pooled = (hidden.float() * weights).sum(1) / weights.sum(1)
        half = len(texts) // 2
        rating = torch.from_numpy(self.inputs.rating[rows]).float().to(self.device)
        return Objective(ObjectiveSettings())(pooled[:half], pooled[half:], rating)


def work(connection: Connection, task: dict[str, Any]) -> None:
    """Load a way, then take a turn whenever asked to."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    way = Training(task)
    if way.kind == "loop":
        # Its own attention, as transformers chooses it.
        way.trainable.network.set_attn_implementation("sdpa")
    way.steps(0, 2)
    if way.device != "cpu":
        torch.cuda.reset_peak_memory_stats(way.device)
    connection.send("ready")
    turn = 0
    while connection.recv() == "go":
        peak = machine_peak(way.device, TORCH_DTYPES[task["dtype"]])
        seconds, useful, computed = way.steps(2 + turn * task["steps"], task["steps"])
        turn += 1
        # Forward, and backward to the activations; frozen weights need no gradient of their own.
        passes = 3 if way.checkpointing else 2
        connection.send(
            {
                "seconds": seconds / task["steps"],
                "useful": useful / task["steps"],
                "computed": computed / task["steps"],
                "share": passes * way.flops * computed / seconds / peak,
                "memory": peak_memory(way.device),
            }
        )


WAYS = {"plain loop of transformers and peft": "loop", "llmcond": "ours"}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=known_names(), default="minilm")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=N", help="other sizes")
    parser.add_argument("--folder", type=Path, help="where random checkpoints are kept")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--quantize", default="none", choices=("none", "8bit", "4bit"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--max-tokens-per-batch", type=int)
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    checkpoint, like = find_checkpoint(options)
    tasks = {
        name: {
            "kind": kind,
            "checkpoint": str(checkpoint),
            "like": like,
            "checkpointing": options.gradient_checkpointing,
            **{
                key: getattr(options, key)
                for key in (
                    "dtype",
                    "quantize",
                    "device",
                    "rank",
                    "batch_size",
                    "steps",
                    "max_tokens_per_batch",
                    "no_dropout",
                )
            },
        }
        for name, kind in WAYS.items()
        if not (options.skip_peer and kind == "loop")
    }
    found = measure(tasks, options.rounds, work)
    first = next(iter(found.values()))
    rows = []
    names = "way | s a step | rows/s | tokens/s | against the first | computed / useful | of peak"
    print(f"| {names} | memory GiB |")
    print("|---" * 8 + "|")
    for name, turns in found.items():
        middle = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        ratio = statistics.median(
            a["seconds"] / b["seconds"] for a, b in zip(first, turns, strict=True)
        )
        rows.append({"way": name, **middle, "ratio": ratio})
        print(
            f"| {name} | {middle['seconds']:.2f} | {options.batch_size / middle['seconds']:,.0f} "
            f"| {middle['useful'] / middle['seconds']:,.0f} | {ratio:.2f} "
            f"| {middle['computed'] / middle['useful']:.0%} | {middle['share']:.0%} "
            f"| {middle['memory']:.2f} |"
        )
    if options.json:
        print(json.dumps({"model": options.model, "rows": rows, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
