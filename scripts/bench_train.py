r"""Measure a training step with LoRA against a plain loop of transformers and peft.

The plain loop follows the released code of C-STS: it encodes both sentences of every row, each with
its condition, in one batch padded to the longest text. Both loops have the same adapters, rows,
optimiser and precision. Each runs in a separate process, and they take turns; ratios are medians
over rounds. If the encoder has dropout, the plain loop also applies it to attention weights, which
packed rows do not; with --no-dropout, neither loop has dropout.

    python scripts/bench_train.py --model minilm
    python scripts/bench_train.py --model Salesforce/SFR-Embedding-Mistral --quantize 4bit \
        --device cuda --gradient-checkpointing

Models other than minilm get random weights, because speed does not depend on the weights.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench import BenchOptions, find_checkpoint, machine_peak, measure, summarize
from common import format_table, print_json

from llmcond.base.system import choose_device
from llmcond.benchmark.speeds import linear_flops, peak_memory, synchronize
from llmcond.data.datasets import read_dataset
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.loading import TORCH_DTYPES
from llmcond.encoders.settings import known_names
from llmcond.features.view import recipe_view
from llmcond.finetune.encoder import load_trainable, prepare_accelerator
from llmcond.finetune.model import BiEncoderModel, RatedInputs
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.heads.module import Objective
from llmcond.heads.settings import ObjectiveSettings
from llmcond.prompts import load_prompt


class Training:
    """An encoder with adapters, and one of the two loops to train it.

    Args:
        task: settings of the measurement, as built by ``main``.
    """

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
        self.checkpointing = bool(task["gradient_checkpointing"])
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
        self.model = BiEncoderModel(
            self.trainable.engine, recipe, ObjectiveSettings(), (dim, 0), seed=0
        ).train()
        weights = list(self.model.trained_parameters().values())
        self.optimiser = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        self.weights = weights

    def steps(self, first: int, count: int) -> tuple[float, int, int]:
        """Run ``count`` steps; return the seconds, the tokens of all rows, and those computed."""
        useful = computed = 0
        # The rows are in random order, as in an epoch.
        order = np.random.default_rng(0).permutation(len(self.inputs))
        synchronize(self.device)
        began = time.perf_counter()
        for step in range(first, first + count):
            start = step * self.batch % (len(order) - self.batch)
            rows = order[start : start + self.batch]
            self.optimiser.zero_grad()
            with self.accelerator.autocast():
                loss = (
                    self._loop(rows)
                    if self.kind == "loop"
                    else self.model(self.inputs, rows, [0, step])
                )
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.weights, 1.0)
            self.optimiser.step()
            lengths = [len(self.inputs.texts.tokens[i].ids) for i in self._columns(rows)]
            useful += sum(lengths)
            distinct_inputs = self.inputs.distinct_inputs(rows)
            packed = sum(len(self.inputs.texts.tokens[i].ids) for i in distinct_inputs)
            computed += max(lengths) * len(lengths) if self.kind == "loop" else packed
        synchronize(self.device)
        return time.perf_counter() - began, useful, computed

    def _columns(self, rows: Any) -> list[int]:
        columns = self.inputs.columns.values()
        return [int(i) for column in columns for i in column[rows]]

    def _loop(self, rows: Any) -> Any:
        texts = [self.inputs.texts.tokens[i] for i in self._columns(rows)]
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


def load_loop(task: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Load a training loop; return a function that runs some steps and returns the figures."""
    training = Training(task)
    if training.kind == "loop":
        # The peer uses the attention that transformers chooses by default.
        training.trainable.network.set_attn_implementation("sdpa")
    training.steps(0, 2)
    if training.device != "cpu":
        torch.cuda.reset_peak_memory_stats(training.device)
    turns, count = itertools.count(), task["steps"]
    # One forward pass, and one backward to the activations; frozen weights need no gradient.
    passes = 3 if training.checkpointing else 2

    def turn() -> dict[str, Any]:
        peak = machine_peak(training.device, TORCH_DTYPES[task["dtype"]])
        seconds, useful, computed = training.steps(2 + next(turns) * count, count)
        return {
            "seconds": seconds / count,
            "useful": useful / count,
            "computed": computed / count,
            "share": passes * training.flops * computed / seconds / peak,
            "memory": peak_memory(training.device),
        }

    return turn


WAYS = {"plain loop of transformers and peft": "loop", "llmcond": "ours"}
COLUMNS = {
    "way": "way",
    "s a step": "seconds:.2f",
    "rows/s": "rows_per_second:,.0f",
    "tokens/s": "tokens_per_second:,.0f",
    "against the first": "ratio:.2f",
    "computed / useful": "padding:.0%",
    "of peak": "share:.0%",
    "memory GiB": "memory:.2f",
}


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = BenchOptions(__doc__)
    add = parser.option
    add("--model", "minilm", "known encoder", choices=known_names())
    parser.sizes()
    parser.compute("bfloat16", choices=("float32", "bfloat16"))
    quantize = "quantisation of the frozen weights"
    add("--quantize", "none", quantize, choices=("none", "8bit", "4bit"))
    add("--rank", 16, "rank of the adapters")
    add("--batch-size", 64, "rows per step")
    add("--steps", 10, "steps per turn")
    parser.rounds()
    add("--gradient-checkpointing", False, "recompute activations in the backward pass")
    add("--no-dropout", False, "disable the dropout of the encoder")
    add("--skip-peer", False, "measure llmcond only")
    options = parser.parse_args()
    checkpoint, like = find_checkpoint(options)
    tasks = {
        name: {**vars(options), "kind": kind, "checkpoint": str(checkpoint), "like": like}
        for name, kind in WAYS.items()
        if not (options.skip_peer and kind == "loop")
    }
    results = measure(tasks, options.rounds, load_loop)
    rows = [
        {
            **row,
            "rows_per_second": options.batch_size / row["seconds"],
            "tokens_per_second": row["useful"] / row["seconds"],
            "padding": row["computed"] / row["useful"],
        }
        for row in summarize(results)
    ]
    print(format_table(rows, COLUMNS))
    print_json(options, {"model": options.model, "rows": rows, "torch": torch.__version__})


if __name__ == "__main__":
    main()
