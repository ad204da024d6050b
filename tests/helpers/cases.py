"""Tiny checkpoints of every kind with their settings, and inputs for them."""

import random
from dataclasses import dataclass, field

from helpers import checkpoints
from llmcond.encoders import EncoderInput
from llmcond.encoders.spec import Router

WORDS = " ".join(checkpoints.CORPUS).split()
TASKS = ["", "", "classification", "given the Sentence: two dogs run over wet grass"]
MAX_LENGTH = 96


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint with its settings.

    Attributes:
        kind: key of ``checkpoints.KINDS``.
        like: known model whose defaults apply.
        checkpoint_options: options that the checkpoint is created with.
        options: options that the encoder is loaded with.
        config: changes of its config.json.
        shares_prefixes: whether inputs share the computation of a common prefix.
        window: length in tokens up to which inputs are packed; 0 if none are.
    """

    kind: str
    like: str | None = None
    checkpoint_options: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    shares_prefixes: bool = False
    window: int = MAX_LENGTH

    def build(self, folder):
        """Create the checkpoint in a folder, unless it is there."""
        path = folder / "model"
        if not path.exists():
            checkpoints.build_checkpoint(self.kind, path, **self.checkpoint_options)
            checkpoints.change_json(path / "config.json", **self.config)
        return path

    def load(self, path, **options):
        """Load the encoder of a checkpoint with PyTorch in float32."""
        options = {"max_length": MAX_LENGTH, "like": self.like, **self.options, **options}
        return checkpoints.load_on_cpu(path, **options)


CASES = {
    "sfr": Case(
        "mistral",
        "Salesforce/SFR-Embedding-Mistral",
        {"head": True, "end": False},
        shares_prefixes=True,
    ),
    "e5-mistral": Case("mistral", "intfloat/e5-mistral-7b-instruct", shares_prefixes=True),
    "gte-qwen2": Case("gte-qwen2", "Alibaba-NLP/gte-Qwen2-7B-instruct"),
    "qwen3": Case("qwen", "Qwen/Qwen3-Embedding-0.6B", shares_prefixes=True),
    # Its window of 8 tokens is too narrow for packing.
    "gemma": Case("gemma", "google/embeddinggemma-300m", config={"sliding_window": 8}, window=0),
    "gemma-wider": Case(
        "gemma", "google/embeddinggemma-300m", config={"sliding_window": 40}, window=10
    ),
    "e5-xlm-r": Case("xlm-r", "intfloat/multilingual-e5-large-instruct"),
    "bge-m3": Case("xlm-r", "BAAI/bge-m3", {"pooling": "cls"}),
    "simcse-roberta": Case("simcse-roberta", "princeton-nlp/sup-simcse-roberta-large"),
    "simcse-bert": Case("simcse-bert", "princeton-nlp/sup-simcse-bert-base-uncased"),
    "simcse-bert-cls": Case(
        "simcse-bert", "princeton-nlp/sup-simcse-bert-base-uncased", options={"pooling": "cls"}
    ),
    "nv-embed": Case("nv-embed"),
    "nv-embed-unfolded": Case("nv-embed", options={"fold_latents": False}),
    "causal-mean": Case("mistral", options={"pooling": "mean", "attention": "causal"}),
    "roberta-mean": Case("simcse-roberta", options={"pooling": "mean"}),
    "text-only": Case(
        "xlm-r",
        options={
            "pooling": "mean",
            "pool_over": "text",
            "instruction_format": "{instruction}: {text} (end)",
        },
    ),
}


def routed_input(text, condition, temperature=0.05, centre=True, standardize=False):
    return EncoderInput("", text, router=Router(condition, temperature, centre, standardize))


def routed_inputs(n, max_words, conditions, settings=((),), long=True):
    """Return sentences under several conditions, some without router, one longer than fits."""
    generator = random.Random(0)
    lengths = generator.choices(range(1, max_words), k=n)
    texts = [" ".join(generator.choices(WORDS, k=k)) for k in lengths]
    texts += ["the man " * 80] if long else []
    items = [routed_input(t, c, *row) for t in texts for c in conditions for row in settings]
    items += [EncoderInput("", text) for text in [*texts, *conditions]]
    generator.shuffle(items)
    return items


def sample_inputs(encoder, seed, n_inputs=40):
    """Return random inputs, from one token to more than fit, with instructions and duplicates."""
    chance = random.Random(seed)
    tasks = TASKS if encoder.identity.instruction_format else [""]
    items = [EncoderInput("", ""), EncoderInput("", "dogs"), EncoderInput("", "the man " * 80)]
    if encoder.identity.pool_over == "text":
        del items[0]
    for _ in range(n_inputs - len(items)):
        words = chance.choices(WORDS, k=chance.choice([1, 2, 5, 9, 25]))
        items.append(EncoderInput(chance.choice(tasks), " ".join(words)))
    items += chance.choices(items, k=3)
    chance.shuffle(items)
    return items
