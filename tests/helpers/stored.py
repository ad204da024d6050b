"""Twenty inputs with their vectors, which tests append to a store."""

import numpy as np

from llmcond.encoders import EncoderInput
from llmcond.encoders.spec import Encoded

INPUTS = [EncoderInput("", f"text {i}") for i in range(20)]
VECTORS = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
N_TOKENS, TRUNCATED = np.arange(20, dtype=np.int32), np.arange(20) % 3 == 0


def append(store, indices=range(20), vectors=VECTORS):
    indices = list(indices)
    encoded = Encoded(vectors[indices], N_TOKENS[indices], TRUNCATED[indices])
    return store.append([INPUTS[i] for i in indices], encoded)
