"""Measure how fast a feature store in a folder or in a bucket is written, opened and read.

    python scripts/bench_store.py /tmp/store
    python -m moto.server -p 5000 &
    python -c "import boto3; boto3.client('s3').create_bucket(Bucket='bench')"
    python scripts/bench_store.py s3://bench/store

The last two commands need AWS_ENDPOINT_URL=http://127.0.0.1:5000, AWS_REGION=us-east-1 and any
keys in the environment.
"""

from __future__ import annotations

import time

import numpy as np
from common import Options

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.spec import Encoded
from llmcond.features.store import FeatureStore


def main() -> None:
    """Write vectors in several commits, open the store again, and read all vectors."""
    parser = Options(__doc__)
    parser.option("root", str, "folder or URI of the store")
    parser.option("--rows", 102_400, "number of vectors")
    parser.option("--part", 512, "vectors per commit")
    parser.option("--dim", 384, "dimensions of a vector")
    options = parser.parse_args()
    identity = resolve("minilm", EncoderOptions(device="cpu")).identity
    stamp = time.time_ns()  # unique texts, so that a second call writes as many
    inputs = [EncoderInput("", f"{stamp} text {i}") for i in range(options.rows)]
    vectors = np.random.default_rng(0).normal(size=(options.part, options.dim)).astype(np.float32)
    store = FeatureStore(options.root, identity, "float16")
    start = time.perf_counter()
    for i in range(0, options.rows, options.part):
        part = inputs[i : i + options.part]
        count = len(part)
        n_tokens, truncated = np.ones(count, np.int32), np.zeros(count, np.bool_)
        store.append(part, Encoded(vectors[:count], n_tokens, truncated))
    written = time.perf_counter()
    store = FeatureStore(options.root, identity, "float16")
    opened = time.perf_counter()
    store.lookup(inputs).read()
    read = time.perf_counter()
    print(
        f"{options.rows:,} vectors of {options.dim}, {options.part:,} a commit: written in "
        f"{written - start:.1f} s, opened in {opened - written:.2f} s, read in "
        f"{read - opened:.2f} s"
    )


if __name__ == "__main__":
    main()
