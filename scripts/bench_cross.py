"""Measure cross-encoders: training against sentence-transformers', and what a pair costs.

Both train all weights of the same encoder on the same rows, with the same batch size, epochs,
learning rate, schedule, decay and loss, in float32. sentence-transformers' CrossEncoder is given
(s1, "s2 [SEP] c") in the order of the data, and has its classifier on the first token; llmcond
draws the order, and has a linear layer on what the encoder pools. Each has a process of its own:
they train one after the other, and then score the rows of dev in turn, beside the cosine of a
bi-encoder's joint vectors. Ratios are medians of rounds.

    python scripts/bench_cross.py
    python scripts/bench_cross.py --data CSTS_FOLDER --rows 11342 --epochs 4 --batch-size 64

It needs sentence-transformers and datasets (pip install '.[dev]').
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_extract import measure

from llmcond.benchmark.speeds import synchronize
from llmcond.data.datasets import read_dataset
from llmcond.data.rows import Rows
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder, load_encoder
from llmcond.errors import LlmcondError
from llmcond.finetune.cross import CrossInputs, CrossModel
from llmcond.finetune.loading import load_trainable, prepare_accelerator
from llmcond.finetune.loop import Trainer
from llmcond.finetune.save import save_encoder
from llmcond.finetune.settings import TuneSettings
from llmcond.finetune.state import TrainingState
from llmcond.heads import cosine
from llmcond.heads.dense import RegressionSettings
from llmcond.metrics import METRICS, spearman
from llmcond.prompts import load_prompt
from llmcond.prompts.inputs import render_rows
from llmcond.runs import portable_model_name
from llmcond.runs.cross import CrossEncoder
from llmcond.system import choose_device

#: Of both: share of steps in which the learning rate rises, and decay of matrices.
WARMUP, DECAY = 0.06, 0.01
PROMPT = "concat-cond-sent"

#: What a way scores rows by, by the name that the table has for it.
Scorers = dict[str, Callable[[Rows], Any]]


# -- the ways ----------------------------------------------------------------------------------


def peer(task: dict[str, Any], train: Rows, scratch: Path) -> tuple[float, Scorers]:
    """Train sentence-transformers' CrossEncoder; return its seconds, and what scores."""
    from datasets import Dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from sentence_transformers import CrossEncoder as Peer
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import MSELoss

    torch.manual_seed(task["seed"])
    resolved = resolve(task["model"], EncoderOptions(device=task["device"]), identify=False)
    length, plain = resolved.identity.max_length, torch.nn.Identity()
    model = Peer(
        str(resolved.checkpoint.folder),
        num_labels=1,
        max_length=length,
        activation_fn=plain,
        device=resolved.device,
    )

    def pairs(rows: Rows) -> list[tuple[str, str]]:
        texts = zip(rows.sentence1, rows.sentence2, rows.condition, strict=True)
        return [(a, f"{b} {model.tokenizer.sep_token} {c}") for a, b, c in texts]

    first, second = zip(*pairs(train), strict=True)
    columns = {"first": first, "second": second, "label": train.rating.tolist()}
    arguments = CrossEncoderTrainingArguments(
        output_dir=str(scratch),
        num_train_epochs=task["epochs"],
        per_device_train_batch_size=task["batch_size"],
        learning_rate=task["learning_rate"],
        warmup_steps=WARMUP,
        weight_decay=DECAY,
        seed=task["seed"],
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=resolved.device == "cpu",
        dataloader_pin_memory=False,
    )
    trainer = CrossEncoderTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        loss=MSELoss(model, activation_fn=plain),
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    return seconds, {task["name"]: lambda rows: model.predict(pairs(rows))}


def ours(task: dict[str, Any], train: Rows, scratch: Path) -> tuple[float, Scorers]:
    """Train llmcond's; return its seconds, and what scores in both orders and in one."""
    options = EncoderOptions(dtype="float32", device=task["device"], normalize=False)
    resolved = resolve(task["model"], options)
    settings = TuneSettings(
        rank=0,
        epochs=task["epochs"],
        batch_size=task["batch_size"],
        learning_rate=task["learning_rate"],
        warmup=WARMUP,
        weight_decay=DECAY,
        checkpoint_steps=1_000_000,
    )
    accelerator = prepare_accelerator(resolved)
    trainable = load_trainable(resolved, settings, task["seed"])
    rows = CrossInputs.from_rows(train, "both", trainable.tokenizer)
    # As the rest, as the peer's classifier.
    head = RegressionSettings(learning_rate=task["learning_rate"])
    start, metric = float(rows.rating.mean()), METRICS["spearman"]
    model = CrossModel(trainable.engine, head, task["seed"], start, metric)
    state = TrainingState(scratch / "state", {})
    trainer = Trainer(model, rows, None, settings, accelerator, state)
    trainer.run(lambda *_: None)
    save_encoder(
        trainable, portable_model_name(task["model"], resolved), scratch, merge=False, cross=True
    )
    options = EncoderOptions(dtype="float32", device=task["device"])
    encoder, fitted = Encoder(resolve(str(scratch), options, cross=True)), model.fitted_head()

    def scores(orders: Any) -> Callable[[Rows], Any]:
        cross = CrossEncoder(encoder, fitted, orders)
        return lambda rows: cross.similarity(rows.sentence1, rows.sentence2, rows.condition)

    one = f"{task['name']}, one order"
    return trainer.progress.seconds, {task["name"]: scores("both"), one: scores("given")}


def joint(task: dict[str, Any], train: Rows, scratch: Path) -> tuple[float, Scorers]:
    """Load a bi-encoder, which is not trained: it is there for what a pair costs."""
    encoder, prompt = load_encoder(task["model"], dtype="float32", device=task["device"]), PROMPT

    def score(rows: Rows) -> Any:
        inputs = render_rows(rows, load_prompt(prompt))
        sides = list(dict.fromkeys([*inputs.first, *inputs.second]))
        place = {item: at for at, item in enumerate(sides)}
        vectors = encoder.encode(sides)
        first, second = (
            vectors[[place[item] for item in side]] for side in (inputs.first, inputs.second)
        )
        return cosine(first, second)

    return 0.0, {task["name"]: score}


WAYS = {
    "sentence-transformers CrossEncoder": peer,
    "llmcond": ours,
    "bi-encoder, joint (not trained)": joint,
}


def work(connection: Connection, task: dict[str, Any]) -> None:
    """Train in the first turn; score the rows of dev in every turn."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    train, dev = split(task)
    connection.send("ready")
    device, seconds, scorers = choose_device(task["device"]), 0.0, Scorers()
    with tempfile.TemporaryDirectory() as scratch:
        while connection.recv() == "go":
            if not scorers:
                seconds, scorers = WAYS[task["name"]](task, train, Path(scratch))
                for score in scorers.values():
                    score(dev.take(np.arange(len(dev)) < 8))
            turn: dict[str, Any] = {"trained": seconds, "scored": {}, "spearman": {}}
            for name, score in scorers.items():
                synchronize(device)
                began = time.perf_counter()
                predicted = np.asarray(score(dev), dtype=np.float64)
                synchronize(device)
                turn["scored"][name] = (time.perf_counter() - began) / len(dev)
                turn["spearman"][name] = spearman(predicted, dev.rating)
            connection.send(turn)


def split(task: dict[str, Any]) -> tuple[Rows, Rows]:
    """Return rated rows of train, so many of them in any order, and those of dev."""
    splits = read_dataset(task["data"]).splits
    train, dev = (splits[name].take(splits[name].rated) for name in ("train", "dev"))
    chosen = np.random.default_rng(0).permutation(len(train))[: task["rows"]]
    return train.take(chosen), dev.take(np.arange(len(dev)) < (task["dev_rows"] or len(dev)))


# -- the table ---------------------------------------------------------------------------------


def table(found: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to score; ratios are to the first way, turn by turn."""
    (first, *_) = found
    for way, turns in found.items():
        for name in turns[0]["scored"]:
            pairs = zip(found[first], turns, strict=True)
            ratios = [a["scored"][first] / b["scored"][name] for a, b in pairs]
            trained = turns[0]["trained"] if name == way else 0.0
            yield {
                "way": name,
                "spearman": turns[0]["spearman"][name] if turns[0]["trained"] else None,
                "trained": trained or None,
                "trained_ratio": found[first][0]["trained"] / trained if trained else None,
                "scored": statistics.median(turn["scored"][name] for turn in turns),
                "scored_ratio": statistics.median(ratios),
            }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm", help="alias or folder")
    parser.add_argument("--data", help="with train and dev (default: the bundled sample)")
    parser.add_argument("--rows", type=int, default=1024, help="of train")
    parser.add_argument("--dev-rows", type=int, help="(default: all)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tasks = {name: {**vars(options), "name": name} for name in WAYS}
    try:
        train, dev = split(vars(options))
    except LlmcondError as error:
        parser.error(str(error))
    rows = list(table(measure(tasks, options.rounds, work)))
    print(
        f"{options.model}, {len(train):,} rows, {options.epochs} epochs of batches of "
        f"{options.batch_size}, learning rate {options.learning_rate:g}; {len(dev):,} rows of dev\n"
    )
    print("| way | dev Spearman | trained in s | speed | ms a pair | speed |\n" + "|---" * 6 + "|")
    for row in rows:
        shown = "–" if row["spearman"] is None else f"{100 * row['spearman']:.1f}"
        trained = "– | –"
        if row["trained"]:
            trained = f"{row['trained']:.1f} | {row['trained_ratio']:.2f}x"
        print(
            f"| {row['way']} | {shown} | {trained} | {1e3 * row['scored']:.2f} "
            f"| {row['scored_ratio']:.2f}x |"
        )
    if options.json:
        print(json.dumps({"rows": rows, "torch": torch.__version__, **vars(options)}))


if __name__ == "__main__":
    main()
