"""Record the files and outputs of one commit, with which later code is compared.

    PYTHONPATH=<checkout of commit 100d9ab> python tests/golden/record.py FOLDER

``legacy/`` was recorded with commit 100d9ab, the last one before the redesign: a tiny encoder with
random weights, 78 rows written for this purpose, a run with six heads, an encoder fine-tuned by
LoRA with its head, and under ``outputs/`` the JSON and the predictions of each command. It is not
recorded again, because it stands for files that users have. Its files name its folder ``/legacy``.
"""

import csv
import itertools
import os
import subprocess
import sys
from pathlib import Path

WORDS = (
    "a the two three four men women children dogs ride play read sit walk cook in on at park beach "
    "kitchen street rain red blue green morning night number of people activity place what is"
).split()
PEOPLE = ("two men", "three women", "four children", "two dogs")
ACTIVITIES = ("ride", "play", "read", "cook")
LOCATIONS = ("in the park", "at the beach", "in the kitchen", "on the street")
CONDITIONS = ("the number of people", "the activity", "the place")

#: Settings of the recipe ``hypernet`` at the time of the recording.
HYPERNET = ("info_nce=0", "batches=conditions")
#: Settings with which a fit takes less than a second.
FAST = ("epochs=4", "patience=4", "batch_size=16")
FITS = {
    "linear": ("--prompt", "concat-sent-cond", "--dim", "8", "--set", *FAST),
    "mlp": ("--prompt", "concat-sent-cond", "--dim", "8", "--set", "hidden=12", *FAST),
    "pca": ("--prompt", "pair-cond", "--dim", "8", "--no-subtract"),
    "hypernet": ("--prompt", "separate", "--dim", "8", "--set", "rank=4", *HYPERNET, *FAST),
    "towers": (
        *("--prompt", "concat-sent-cond+separate", "--no-subtract", "--dim", "8"),
        *("--set", "hidden=12", "rank=4", "members=2", *FAST),
    ),
}
RUN = ("--run", "run")
ENCODER = (
    *("--model", "encoder", "--dtype", "float32", "--device", "cpu"),
    *("--pooling", "mean", "--normalize"),
)
PROMPTS = ("concat-sent-cond", "pair-cond", "separate")
PAIR = ("two men ride in the park", "three women ride at the beach")

COMMANDS: dict[str, tuple[str, ...]] = {
    "extract": ("extract", *ENCODER, *RUN, "--data", "rows.csv", "--prompt", *PROMPTS),
    **{f"fit-{head}": ("fit-head", *RUN, "--head", head, *rest) for head, rest in FITS.items()},
    "evaluate": ("evaluate", *RUN),
    "analyse": ("analyse", *RUN, "--head", "linear", "hypernet", "--conditions", "2"),
    "sweep": (
        *("sweep", *RUN, "--head", "linear", "--prompt", "concat-sent-cond", "--vary", "dim=4,8"),
        *("--seeds", "2", "--workers", "1", "--set", *FAST),
    ),
    "compare-prompts": (
        *("compare-prompts", *ENCODER, "--run", "compared", "--data", "rows.csv"),
        *("--prompts", "concat-sent-cond", "pair-cond", "--heads", "linear", "pca"),
        *("--workers", "1", "--set", "dim=8", *FAST),
    ),
    "train-lora": (
        *("train-lora", *ENCODER, "--run", "tuned", "--data", "rows.csv"),
        *("--prompt", "concat-sent-cond", "--head", "linear", "--dim", "8", "--rank", "4"),
        *("--epochs", "1", "--batch-size", "16"),
    ),
    "evaluate-tuned": ("evaluate", "--run", "tuned"),
    "similarity": (
        *("similarity", *PAIR, *RUN, "--head", "mlp"),
        *(word for condition in CONDITIONS for word in ("--condition", condition)),
    ),
    **{
        f"embed-{run}-{head}": (
            *("embed", "rows.csv", "--sentence", "sentence1", "--run", run, "--head", head),
            *("--prompt", "concat-sent-cond", "--out", f"outputs/embed-{run}-{head}.npy"),
        )
        for run, head in (("run", "none"), ("run", "mlp"), ("tuned", "linear"))
    },
}


def rows() -> list[tuple[object, ...]]:
    """Return 26 sentence pairs under three conditions, rated by what the sentences share."""
    sentences = [
        (people, activity, location)
        for people, activity, location in itertools.product(range(4), repeat=3)
        if (people + activity + location) % 2 == 0
    ]
    table: list[tuple[object, ...]] = []
    for i in range(26):
        first, second = sentences[i % 32], sentences[(5 * i + 3) % 32]
        texts = [f"{PEOPLE[p]} {ACTIVITIES[a]} {LOCATIONS[q]}" for p, a, q in (first, second)]
        for k, condition in enumerate(CONDITIONS):
            rating = 5 - abs(first[k] - second[k]) - (i + k) % 2
            table.append((*texts, condition, -1 if (i, k) == (25, 2) else max(rating, 1)))
    return table


def make_encoder(folder: Path) -> None:
    """Write a BERT of two layers and 32 dimensions with random weights."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokens = {token: i for i, token in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special_names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True)
    )
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **special_names
    ).save_pretrained(folder)


def main() -> None:
    """Record everything into the folder that the command line names."""
    folder = Path(sys.argv[1]).resolve()
    (folder / "outputs").mkdir(parents=True)
    make_encoder(folder / "encoder")
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(("sentence1", "sentence2", "condition", "label"))
        table.writerows(rows())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, command in COMMANDS.items():
        extra: tuple[str, ...] = ()
        if command[0] == "evaluate":
            extra = ("--predictions", f"outputs/{name}.csv")
        with (folder / "outputs" / f"{name}.json").open("w") as stream:
            subprocess.run(
                [sys.executable, "-m", "llmcond", *command, *extra, "--json"],
                cwd=folder,
                env=environment,
                stdout=stream,
                check=True,
            )
    for picture in folder.rglob("*.png"):
        picture.unlink()
    for path in folder.rglob("*.json"):  # the test replaces /legacy by its folder
        path.write_text(path.read_text().replace(str(folder), "/legacy"))


if __name__ == "__main__":
    main()
