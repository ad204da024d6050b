"""A user's program that the type checker accepts, except for the marked lines.

mypy reports each unneeded ``type: ignore``, so a mistake that it overlooks is an error as well.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import llmcond


def run_by_text_or_path(folder: Path) -> None:
    """Pass every path as a string and as a ``Path``."""
    for run in ("runs/x", folder):
        llmcond.extract(model="minilm", run=run, data=folder, bench="bench.json")
        fitted: llmcond.FittedResult = llmcond.fit_head(head="mlp", run=run, set={"epochs": "3"})
        estimate: llmcond.Estimate = fitted.metrics["spearman"]
        value: float = estimate.value
        results: llmcond.Results = llmcond.evaluate(
            run=run, report="page.html", predictions=folder / "p.csv"
        )
        name: str = results[0].name
        llmcond.embed(texts="texts.csv", out=run, run=run)
        llmcond.export(out=run, run=run)
        llmcond.serve(run=run, index="texts", api_key_file="keys")
        llmcond.load_embedder(run, head=f"{name} {value}")


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    """Embed texts from a list and from a generator."""
    encoder = llmcond.load_encoder("minilm", dtype="float32")
    encoder.encode(text.upper() for text in texts)
    embedder = llmcond.load_embedder("minilm-csts")
    cosine: float = embedder.similarity(texts[0], texts[1], "the place")
    cosines: NDArray[np.float32] = embedder.similarity(iter(texts), iter(texts), "the place")
    return cosine * cosines + embedder.encode((text for text in texts), "the place")


def misuse() -> None:
    """Make mistakes that the type checker reports."""
    llmcond.nothing()  # type: ignore[attr-defined]
    llmcond.fit_head(head="mlp", dimm=3)  # type: ignore[call-arg]
    llmcond.fit_head(head=3)  # type: ignore[arg-type]
    llmcond.load_encoder("minilm", dtype="float")  # type: ignore[arg-type]
