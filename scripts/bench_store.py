"""Time a feature store in a folder, or in a bucket.

    python scripts/bench_store.py /tmp/store
    python -m moto.server -p 5000 &
    python -c "import boto3; boto3.client('s3').create_bucket(Bucket='bench')"
    python scripts/bench_store.py s3://bench/store

All but the first with AWS_ENDPOINT_URL=http://127.0.0.1:5000, AWS_REGION=us-east-1 and any keys.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Encoded
from llmcond.features.store import FeatureStore


def main() -> None:
    """Write vectors in parts, open the store again, and read all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", help="folder or URI")
    parser.add_argument("--rows", type=int, default=102_400)
    parser.add_argument("--part", type=int, default=512, help="rows of a commit")
    parser.add_argument("--dim", type=int, default=384)
    given = parser.parse_args()
    identity = resolve("minilm", EncoderOptions(device="cpu")).identity
    began = time.time_ns()  # so that a second call writes as much
    inputs = [EncoderInput("", f"{began} text {i}") for i in range(given.rows)]
    vectors = np.random.default_rng(0).normal(size=(given.part, given.dim)).astype(np.float32)
    store = FeatureStore(given.root, identity, "float16")
    start = time.perf_counter()
    for i in range(0, given.rows, given.part):
        part = inputs[i : i + given.part]
        count = len(part)
        n_tokens, whole = np.ones(count, np.int32), np.zeros(count, np.bool_)
        store.append(part, Encoded(vectors[:count], n_tokens, whole))
    written = time.perf_counter()
    store = FeatureStore(given.root, identity, "float16")
    opened = time.perf_counter()
    store.lookup(inputs).read()
    read = time.perf_counter()
    print(
        f"{given.rows:,} vectors of {given.dim}, {given.part:,} a commit: written in "
        f"{written - start:.1f} s, opened in {opened - written:.2f} s, read in "
        f"{read - opened:.2f} s"
    )


if __name__ == "__main__":
    main()
