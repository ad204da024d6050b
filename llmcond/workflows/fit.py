"""Fit a head on a run's training features."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.errors import UserError
from llmcond.features.view import view_of
from llmcond.heads import FittedHead, PairArrays, Recipe, fit_recipe, load_recipe, save_head
from llmcond.log import log
from llmcond.metrics import METRICS, finite, spearman
from llmcond.progress import fit_bar
from llmcond.runs import head_name, head_record, open_run
from llmcond.runs.features import Features
from llmcond.runs.trials import check_seed, prompts_for, sized


def fit_head(
    run_folder: Path,
    head: str,
    dim: int | None = None,
    prompt: str | None = None,
    subtract: bool = True,
    seed: int = 0,
    changes: Mapping[str, str] | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Fit a head on a run's training features and save it in the run.

    Args:
        run_folder: a run with extracted features.
        head: a recipe's name or file.
        dim: size of the embeddings; None: the recipe's, at most that of the features.
        prompt: whose features, several joined by ``+``; None: the run's only one, or the one that
            suits its encoder.
        subtract: whether unconditional features are subtracted.
        seed: of everything random.
        changes: other settings of the recipe, as text.
        name: of the head in the run; None: ``RECIPE@PROMPT``, with ``+c`` where nothing is
            subtracted.

    Returns:
        The head's name, folder, dimension, epoch and score on dev.

    Raises:
        UserError: no run, no features, or settings that cannot be.
    """
    run = open_run(run_folder)
    check_seed(seed)
    recipe = load_recipe(head)
    if changes:
        recipe = recipe.with_settings(recipe.parse_changes(dict(changes), "--set"), "--set")
    view = view_of(recipe, prompts_for(run, recipe, prompt), subtract)
    reserved = name is not None and (name == "none" or name.startswith("none@"))
    if reserved and not recipe.is_identity:
        raise UserError(f"{name!r} would be taken for zero-shot. Give the head another --name.")
    name = name or head_name(recipe.name, view)
    folder = run.head_folder(name)
    features = Features(run)
    train = features.rated(view, "train")
    dev = features.rated(view, "dev")
    recipe = sized(recipe, dim, train.dim)
    began = time.monotonic()
    fitted = fit_with_bar(recipe, train, dev, seed)
    seconds = time.monotonic() - began
    for text in fitted.fit.notes:
        log.info(text)
    counts = {"n_train": len(train), "n_dev": len(dev), "n_dropped": features.dropped("train")}
    record = head_record(run, view, recipe.to_json())
    replaced = folder.exists()
    save_head(fitted, folder, {**record, "counts": counts})
    summary = {
        "name": name,
        "folder": str(folder),
        "head": recipe.name,
        "prompt": view.name,
        "subtract": view.subtracts,
        "seed": seed,
        "dim_in": fitted.dim_in,
        "dim": fitted.dim_out,
        **counts,
        **{key: value for key, value in fitted.fit.record.items() if key != "curve"},
        "dev_spearman": finite(_dev_spearman(fitted, dev)),
        "seconds": round(seconds, 3),
    }
    log.info(_fit_note(summary, replaced))
    return summary


def fit_with_bar(recipe: Recipe, train: PairArrays, dev: PairArrays, seed: int) -> FittedHead:
    """Fit a head with a progress bar; an empty dev chooses nothing."""
    with fit_bar() as bar:
        return fit_recipe(recipe, train, dev if len(dev) else None, seed, bar.on_epoch)


def _dev_spearman(head: FittedHead, dev: PairArrays) -> float:
    if not len(dev):
        return float("nan")
    similarity = head.similarity(dev.first, dev.second, dev.condition)
    return spearman(similarity.astype(np.float64), dev.rating)


def _fit_note(summary: Mapping[str, Any], replaced: bool) -> str:
    epoch = f", epoch {summary['best_epoch']}" if "best_epoch" in summary else ""
    chosen = " chosen on dev" if summary["selected_on"] == "dev" else ""
    shown = METRICS["spearman"].show(summary["dev_spearman"])
    again = " (replaced)" if replaced else ""
    return (
        f"{summary['name']}{again}: {summary['dim_in']} -> {summary['dim']} dimensions on "
        f"{summary['n_train']:,} rows in {summary['seconds']:.1f} s{epoch}{chosen}; dev Spearman "
        f"{shown}"
    )
