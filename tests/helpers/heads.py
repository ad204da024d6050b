"""Fit heads with changed settings of bundled recipes, and create runs with many heads."""

from functools import cache
from pathlib import Path

from helpers.commands import write_pairs
from llmcond import extract, fit_head
from llmcond.heads import fit_recipe, load_recipe

#: A template of a text with the condition, which encodes the text alone, too.
CUSTOM_TEMPLATE = """
description = "Joint, less the sentence."
source = "these tests"
[conditional]
text = "{condition} {sentence}"
[unconditional]
text = "{sentence}"
"""

bundled = cache(load_recipe)


def ignore_progress(epoch, epochs, score):
    pass


def make_recipe(kind, **changes):
    return bundled(kind).with_settings(changes, "test")


def fit(kind, pairs, dev=None, seed=0, **changes):
    return fit_recipe(make_recipe(kind, **changes), pairs, dev, seed, ignore_progress)


def tensors(head):
    """Return the bytes of each tensor of a head."""
    return {name: value.tobytes() for name, value in head.tensors.items()}


def fit_all_heads(folder: Path, encoder: Path, rows: list[tuple[str, str, str, int]]) -> Path:
    """Create a run of rated pairs with seven heads, and return its folder.

    The heads low, relu, hadamard and concat use separate features, own and linear use joint
    features, and both uses both.
    """
    data = write_pairs(folder / "rows.csv", rows)
    (folder / "own.toml").write_text(CUSTOM_TEMPLATE)
    options = {"dtype": "float32", "device": "cpu", "pooling": "mean"}
    prompts = ["separate", str(folder / "own.toml"), "concat-sent-cond"]
    run = folder / "run"
    extract(model=str(encoder), **options, run=run, data=str(data), prompt=prompts)
    once = {"epochs": "1"}
    small = {**once, "dim": "16", "rank": "4"}
    relu = {**small, "activation": "relu"}
    two = {**once, "members": "2"}
    concat = {**once, "dim": "8"}
    both = {**small, "features": "both"}
    fit_head(run=run, head="hypernet", prompt="separate", set=small, name="low")
    fit_head(run=run, head="hypernet", prompt="separate", set=relu, name="relu")
    fit_head(run=run, head="hadamard", prompt="separate", set=two, name="hadamard")
    fit_head(run=run, head="concat", prompt="separate", set=concat, name="concat")
    fit_head(run=run, head="hypernet", prompt="concat-sent-cond+separate", set=both, name="both")
    fit_head(run=run, head="linear", dim=8, prompt="own", set=once, name="own")
    fit_head(run=run, head="linear", dim=8, prompt="concat-sent-cond", set=once, name="linear")
    return run
