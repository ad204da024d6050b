"""Compare prompts on the same rows, splits and seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmcond.config import bundled_names
from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.files import write_json
from llmcond.heads import load_recipe
from llmcond.prompts import load_prompt
from llmcond.provenance import provenance
from llmcond.report.console import note
from llmcond.runs import SavedHead, head_name, open_run
from llmcond.views import view_of
from llmcond.workflows.evaluate import check_scorable, predict, result_of, zeroshots
from llmcond.workflows.extract import DataOptions, extract
from llmcond.workflows.features import Features
from llmcond.workflows.fit import check_seed, fit_with_bar, sized


def compare_prompts(
    model: str,
    options: EncoderOptions,
    run_folder: Path,
    data: DataOptions,
    prompts: Sequence[str] = (),
    heads: Sequence[str] = ("linear", "mlp"),
    split: str | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Compare prompts on the same rows, splits and seed: zero-shot and fitted, with and without c.

    The results are kept in the run as ``compare-prompts.json``; no head of the run is touched.

    Args:
        model: as in :func:`extract`.
        options: as in :func:`extract`.
        run_folder: as in :func:`extract`.
        data: as in :func:`extract`.
        prompts: names or files; none is every bundled prompt that the encoder can use.
        heads: recipes to fit beside zero-shot.
        split: what is scored; None: test if there is one, else dev.
        seed: of every fit.

    Returns:
        A result for each prompt, head and subtraction, best Spearman first.

    Raises:
        UserError: as :func:`extract` and :func:`fit_head`.
    """
    check_seed(seed)
    recipes = [load_recipe(name) for name in dict.fromkeys(heads) if name != "none"]
    names = list(prompts) or _usable_prompts(resolve(model, options))
    for recipe in recipes:
        for name in names:
            # Before hours of encoding: a head that a prompt does not suit.
            view_of(recipe, (load_prompt(name),), subtract=True)
    extract(model, options, run_folder, data, names)
    run = open_run(run_folder)
    split = split or run.default_split()
    rows = run.rows(split)
    check_scorable(rows, run, other=False)
    results = []
    # From the run: a file that was changed meanwhile is not what was extracted.
    for prompt in [run.prompt(name) for name in names]:
        # Anew for each prompt: memory holds one prompt's features at a time.
        features = Features(run)
        for zeroshot in zeroshots(prompt):
            view = zeroshot.view
            scored = predict(zeroshot, features.pairs(view, split))
            results.append(result_of(zeroshot, scored, rows, split))
            for recipe in recipes:
                view = view_of(recipe, (prompt,), zeroshot.view.subtract)
                train, dev = (features.rated(view, s) for s in ("train", "dev"))
                head = fit_with_bar(sized(recipe, None, train.dim), train, dev, seed)
                record = {"recipe": recipe.to_json()}
                name = head_name(recipe.name, view)
                saved = SavedHead(name, head, view, record)
                scored = predict(saved, features.pairs(view, split))
                results.append(result_of(saved, scored, rows, split))
                value = results[-1]["spearman"]
                shown = "undefined" if value is None else f"{100 * value:.1f}"
                note(f"{name}: Spearman {shown} on {split}")
    results.sort(key=lambda result: -(result["spearman"] if result["spearman"] is not None else -2))
    report = {"results": results, "seed": seed, "data": run.manifest["data"], **provenance()}
    write_json(run.folder / "compare-prompts.json", report)
    return results


def _usable_prompts(resolved: ResolvedEncoder) -> list[str]:
    usable = []
    for name in bundled_names("prompts"):
        prompt = load_prompt(name)
        obstacle = prompt.obstacle(resolved.identity)
        if prompt.separate:
            obstacle = "it gives separate features, for tri-encoder heads (name it to compare it)"
        if obstacle:
            note(f"{name} is left out: {obstacle}")
        else:
            usable.append(name)
    return usable
