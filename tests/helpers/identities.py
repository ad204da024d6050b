"""The identity of an encoder, for tests that need no encoder."""

from llmcond.encoders import EncoderIdentity

IDENTITY = EncoderIdentity(
    weights="sha256:00",
    dtype="float32",
    quantize="none",
    attention="bidirectional",
    pooling="mean",
    max_length=64,
    normalize=True,
    instruction_format="",
)
