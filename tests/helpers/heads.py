"""Heads fitted with a bundled recipe and some of its settings changed, and runs of many heads."""

from functools import cache
from pathlib import Path

from llmcond.data.datasets import DataOptions
from llmcond.encoders import EncoderOptions
from llmcond.heads import fit_recipe, load_recipe
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

bundled = cache(load_recipe)


def quiet(epoch, epochs, score):
    pass


def recipe(kind, **changes):
    return bundled(kind).with_settings(changes, "test")


def fit(kind, pairs, dev=None, seed=0, **changes):
    return fit_recipe(recipe(kind, **changes), pairs, dev, seed, quiet)


def tensors(head):
    """Return the bytes of each of a head's tensors."""
    return {name: value.tobytes() for name, value in head.tensors.items()}


def fit_all(folder: Path, encoder: Path, rows: list[tuple[str, str, str, int]]) -> Path:
    """Return a run of rated pairs with seven heads.

    Heads low, relu, hadamard and concat are on separate features, own and linear on joint ones,
    and both on both.
    """
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in rows]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    (folder / "own.toml").write_text(OWN)
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean")
    prompts = ["separate", str(folder / "own.toml"), "concat-sent-cond"]
    run = folder / "run"
    extract(str(encoder), options, run, DataOptions(str(folder / "rows.csv")), prompts)
    once = {"epochs": "1"}
    small = {**once, "dim": "16", "rank": "4"}
    relu = {**small, "activation": "relu"}
    fit_head(run, "hypernet", prompt="separate", changes=small, name="low")
    fit_head(run, "hypernet", prompt="separate", changes=relu, name="relu")
    two = {**once, "members": "2"}
    fit_head(run, "hadamard", prompt="separate", changes=two, name="hadamard")
    fit_head(run, "concat", prompt="separate", changes={**once, "dim": "8"}, name="concat")
    joined = "concat-sent-cond+separate"
    fit_head(run, "hypernet", prompt=joined, changes={**small, "features": "both"}, name="both")
    fit_head(run, "linear", 8, prompt="own", changes=once, name="own")
    fit_head(run, "linear", 8, prompt="concat-sent-cond", changes=once, name="linear")
    return run
