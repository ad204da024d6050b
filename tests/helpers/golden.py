"""Inputs of real encoders whose vectors are recorded, and the numbers that are kept of a vector."""

import random

import numpy as np

FORMAT = "Instruct: {instruction}\nQuery: {text}"
WORDS = (
    "dogs children women farmers sailors read carry paint repair watch a the two many old green "
    "book bridge boat guitar letter in near under behind park river kitchen harbour at night today"
).split()
LONG = " ".join(random.Random(0).choices(WORDS, k=1_500))
SENTENCES = [
    "A man plays the guitar in the park while two dogs run over wet grass near the river.",
    "Three children read a book in the kitchen.",
]
CONDITIONS = ["the place", "how many people there are, and what they do"]
TEXTS = [
    "dogs",
    "  two spaces before, one newline behind\n",
    "A café, a cafe\u0301 and 東京 🐕 {braces}",
    *SENTENCES,
    " ".join([*SENTENCES, LONG[:600]]),
]
PLAIN = [{"text": text} for text in TEXTS]
JOINT = [{"text": f"{sentence} {c}"} for sentence in SENTENCES for c in CONDITIONS]
#: Inputs with the same instruction have a prefix that decoders compute once.
INSTRUCTED = [
    {"instruction": f"Retrieve texts similar in the Condition to: {sentence}", "text": condition}
    for sentence in SENTENCES
    for condition in CONDITIONS
]
PAIRS = [{"context": sentence, "text": c} for sentence in [*SENTENCES, ""] for c in CONDITIONS]
ROUTED = [
    {"text": sentence, "router": [condition, temperature, centre, not centre]}
    for sentence in SENTENCES
    for condition, temperature, centre in zip(CONDITIONS, (0.5, 0.05), (False, True), strict=True)
]
#: The cases of each encoder: settings of llmcond, and inputs.
CASES = {
    "embeddinggemma-300m": {
        "plain": ({}, [*PLAIN, {"text": ""}]),
        "joint": ({}, JOINT),
        "instructed": ({}, INSTRUCTED),
        "routed": ({}, ROUTED),
        "long": ({}, [{"text": LONG}]),
    },
    "all-mpnet-base-v2": {
        "plain": ({}, [*PLAIN, {"text": ""}]),
        "joint": ({}, JOINT),
        "pairs": ({}, PAIRS),
        "routed": ({}, ROUTED),
        "cut": ({}, [{"text": LONG}]),
    },
    "gemma-3-270m": {
        "plain": ({"pooling": "last"}, [*PLAIN, *JOINT]),
        "instructed": ({"pooling": "last", "instruction_format": FORMAT}, INSTRUCTED),
        "long": ({"pooling": "last", "max_length": 2_048}, [{"text": LONG}]),
        "pairs": ({"pooling": "mean"}, PAIRS),
        "routed": ({"pooling": "mean"}, ROUTED),
    },
    "qwen2.5-coder-1.5b": {
        "plain": ({"pooling": "last", "instruction_format": FORMAT}, [*PLAIN, *JOINT]),
        "instructed": ({"pooling": "last", "instruction_format": FORMAT}, INSTRUCTED),
        "pairs": ({"pooling": "mean"}, PAIRS),
        "routed": ({"pooling": "mean"}, ROUTED),
    },
}


def excerpt(vectors):
    """Return the norms of (n, dim) vectors and every k-th of their numbers."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.hstack([norms, vectors[:, :: vectors.shape[1] // 16]])
