"""A run of a tiny random encoder with heads of every kind that an index knows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcond.data.datasets import DataOptions
from llmcond.encoders import EncoderOptions
from llmcond.workflows.extract import extract
from llmcond.workflows.fit import fit_head

#: A prompt of a text with the condition, that encodes the text alone, too.
OWN = """
description = "Joint, less the sentence."
source = "these tests"
[conditional]
text = "{condition} {sentence}"
[unconditional]
text = "{sentence}"
"""
ONCE = {"epochs": "1"}


@pytest.fixture(scope="session")
def heads_run(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Callable[..., Path],
    small_rows: list[tuple[str, str, str, int]],
) -> Path:
    """Heads low, relu, hadamard, concat on separate features; own, linear on joint ones; both."""
    folder = tmp_path_factory.mktemp("search")
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    (folder / "own.toml").write_text(OWN)
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean")
    prompts = ["separate", str(folder / "own.toml"), "concat-sent-cond"]
    run = folder / "run"
    extract(str(tiny_checkpoint()), options, run, DataOptions(str(folder / "rows.csv")), prompts)
    small = {**ONCE, "dim": "16", "rank": "4"}
    fit_head(run, "hypernet", prompt="separate", changes=small, name="low")
    fit_head(
        run, "hypernet", prompt="separate", changes={**small, "activation": "relu"}, name="relu"
    )
    two = {**ONCE, "members": "2"}
    fit_head(run, "hadamard", prompt="separate", changes=two, name="hadamard")
    fit_head(run, "concat", prompt="separate", changes={**ONCE, "dim": "8"}, name="concat")
    joined = "concat-sent-cond+separate"
    fit_head(run, "hypernet", prompt=joined, changes={**small, "features": "both"}, name="both")
    fit_head(run, "linear", 8, prompt="own", changes=ONCE, name="own")
    fit_head(run, "linear", 8, prompt="concat-sent-cond", changes=ONCE, name="linear")
    return run
