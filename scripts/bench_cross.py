"""Measure the training and the speed of cross-encoders against sentence-transformers.

Both libraries train all weights of the same encoder on the same rows, with the same batch size,
epochs, learning rate, schedule, weight decay and loss, in float32. The CrossEncoder of
sentence-transformers reads (s1, "s2 [SEP] c") in the order of the data and has a classifier on the
first token. llmcond chooses the order of the sentences at random and has a linear layer on the
encoder's pooled vector. Each library runs in a separate process. They train one after the other.
Then they take turns to score the dev rows, and so does the cosine of a bi-encoder's joint vectors.
Ratios are medians over rounds.

    python scripts/bench_cross.py
    python scripts/bench_cross.py --data CSTS_FOLDER --rows 11342 --epochs 4 --batch-size 64

The script needs sentence-transformers and datasets (pip install --group dev).
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

#: Of both libraries: share of the steps in which the learning rate rises, and weight decay of
#: matrices.
WARMUP, DECAY = 0.06, 0.01
PROMPT = "concat-cond-sent"

#: Functions that score rows, by their name in the table.
Scorers = dict[str, Callable[[Rows], Any]]


# -- systems -----------------------------------------------------------------------------------


def train_peer(task: dict[str, Any], train: Rows, scratch: Path) -> tuple[float, Scorers]:
    """Train the CrossEncoder of sentence-transformers; return the seconds and the scorer."""
    from datasets import Dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from sentence_transformers import CrossEncoder as Peer
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import MSELoss

    torch.manual_seed(task["seed"])
    resolved = resolve(task["model"], EncoderOptions(device=task["device"]), identify=False)
    length, identity = resolved.identity.max_length, torch.nn.Identity()
    model = Peer(
        str(resolved.checkpoint.folder),
        num_labels=1,
        max_length=length,
        activation_fn=identity,
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
        loss=MSELoss(model, activation_fn=identity),
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    return seconds, {task["name"]: lambda rows: model.predict(pairs(rows))}


def train_llmcond(task: dict[str, Any], train: Rows, scratch: Path) -> tuple[float, Scorers]:
    """Train llmcond's cross-encoder; return the seconds, and scorers by both orders and by one."""
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
    # The same rate as the encoder, as in the peer.
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
    encoder, fitted_head = Encoder(resolve(str(scratch), options, cross=True)), model.fitted_head()

    def make_scorer(orders: Any) -> Callable[[Rows], Any]:
        cross = CrossEncoder(encoder, fitted_head, orders)
        return lambda rows: cross.similarity(rows.sentence1, rows.sentence2, rows.condition)

    one_order = f"{task['name']}, one order"
    return trainer.progress.seconds, {
        task["name"]: make_scorer("both"),
        one_order: make_scorer("given"),
    }


def load_bi_encoder(task: dict[str, Any], train: Rows, scratch: Path) -> tuple[float, Scorers]:
    """Load a bi-encoder; it is not trained, and only shows the cost of scoring a pair."""
    encoder, prompt = load_encoder(task["model"], dtype="float32", device=task["device"]), PROMPT

    def score(rows: Rows) -> Any:
        inputs = render_rows(rows, load_prompt(prompt))
        sides = list(dict.fromkeys([*inputs.first, *inputs.second]))
        position = {item: i for i, item in enumerate(sides)}
        vectors = encoder.encode(sides)
        first, second = (
            vectors[[position[item] for item in side]] for side in (inputs.first, inputs.second)
        )
        return cosine(first, second)

    return 0.0, {task["name"]: score}


SYSTEMS = {
    "sentence-transformers CrossEncoder": train_peer,
    "llmcond": train_llmcond,
    "bi-encoder, joint (not trained)": load_bi_encoder,
}


def work(connection: Connection, task: dict[str, Any]) -> None:
    """Train in the first turn, and score the dev rows in every turn."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    train, dev = read_rows(task)
    connection.send("ready")
    device, seconds, scorers = choose_device(task["device"]), 0.0, Scorers()
    with tempfile.TemporaryDirectory() as scratch:
        while connection.recv() == "go":
            if not scorers:
                seconds, scorers = SYSTEMS[task["name"]](task, train, Path(scratch))
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


def read_rows(task: dict[str, Any]) -> tuple[Rows, Rows]:
    """Return a random sample of the rated train rows, and the first rated dev rows."""
    splits = read_dataset(task["data"]).splits
    train, dev = (splits[name].take(splits[name].rated) for name in ("train", "dev"))
    sampled = np.random.default_rng(0).permutation(len(train))[: task["rows"]]
    return train.take(sampled), dev.take(np.arange(len(dev)) < (task["dev_rows"] or len(dev)))


# -- the table ---------------------------------------------------------------------------------


def make_table(results: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each scorer; ratios compare with the first system, turn by turn."""
    (first, *_) = results
    for way, turns in results.items():
        for name in turns[0]["scored"]:
            pairs = zip(results[first], turns, strict=True)
            ratios = [a["scored"][first] / b["scored"][name] for a, b in pairs]
            trained = turns[0]["trained"] if name == way else 0.0
            yield {
                "way": name,
                "spearman": turns[0]["spearman"][name] if turns[0]["trained"] else None,
                "trained": trained or None,
                "trained_ratio": results[first][0]["trained"] / trained if trained else None,
                "scored": statistics.median(turn["scored"][name] for turn in turns),
                "scored_ratio": statistics.median(ratios),
            }


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="minilm", help="alias or folder of the encoder (default: minilm)"
    )
    parser.add_argument("--data", help="dataset with train and dev (default: the bundled sample)")
    parser.add_argument(
        "--rows", type=int, default=1024, help="number of train rows (default: 1024)"
    )
    parser.add_argument("--dev-rows", type=int, help="number of dev rows (default: all)")
    parser.add_argument("--epochs", type=int, default=1, help="epochs of training (default: 1)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows per step (default: 32)")
    parser.add_argument(
        "--learning-rate", type=float, default=1e-4, help="peak learning rate (default: 1e-4)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of training (default: 0)")
    parser.add_argument(
        "--device", default="auto", help="device, such as cpu or cuda (default: auto)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of scoring (default: 3)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on the last line"
    )
    options = parser.parse_args()
    tasks = {name: {**vars(options), "name": name} for name in SYSTEMS}
    try:
        train, dev = read_rows(vars(options))
    except LlmcondError as error:
        parser.error(str(error))
    rows = list(make_table(measure(tasks, options.rounds, work)))
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
