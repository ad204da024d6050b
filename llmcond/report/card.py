"""The model card of a trained encoder, as the Hugging Face hub shows it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from llmcond.metrics import DEFAULT
from llmcond.prompts import Prompt
from llmcond.report.format import factors_text, range_text


def model_card(account: Mapping[str, Any], prompts: Sequence[Prompt], recipe: Any) -> str:
    """Return the card as Markdown with the hub's metadata before it.

    Texts of the user stand in fenced blocks, as JSON: nothing in them is Markdown or HTML.

    Args:
        account: of the training, as ``training.json`` holds it.
        prompts: what the encoder was trained under.
        recipe: of the head, as JSON.
    """
    from huggingface_hub import ModelCardData

    summary, made_of = account["summary"], account["made_of"]
    encoder = summary["encoder"]
    if not account["base"]["repo"]:
        encoder = PurePath(encoder).name  # where it lies on this machine is nobody's business
    settings = made_of["settings"]
    full = settings["rank"] == 0
    merged = bool(made_of["merge"])
    data = ModelCardData(
        base_model=account["base"]["repo"],
        library_name="llmcond" if full or merged else "peft",
        pipeline_tag="sentence-similarity",
        tags=["llmcond", "conditional-semantic-textual-similarity", "sentence-similarity"]
        + ([] if full else ["lora"]),
    )
    weights = summary["weights"]
    how = "all of its weights" if full else f"LoRA of rank {settings['rank']}"
    if merged and not full:
        how += ", merged into its weights"
    parts = [
        f"---\n{data.to_yaml()}\n---",
        "# A condition-aware text encoder",
        f"`{_code(encoder)}`, trained with {how} and the head `{_code(summary['head'])}`: "
        f"{weights['trained']:,} of the encoder's {weights['of']:,} weights "
        f"({100 * weights['trained'] / weights['of']:.1f} %), and {weights['head']:,} of the head. "
        "The same two sentences get one similarity for each condition.",
        "## Use",
        _fence(
            "import llmcond\n\n"
            'embedder = llmcond.load_embedder("FOLDER")  # where this card lies\n'
            'embedder.similarity(["A man rides a horse."], ["A girl cycles."], "the activity")',
            "python",
        ),
        "## Scores",
        _scores(summary),
        "## Inputs",
        _fence(json.dumps([_texts(prompt) for prompt in prompts], indent=2, ensure_ascii=False)),
        "## Training",
        _fence(
            json.dumps(
                {
                    "data": {
                        "name": PurePath(account["data"]["source"]).name,
                        **{key: account["data"][key] for key in ("digest", "rows", "unrated")},
                    },
                    "settings": settings,
                    "objective": made_of["objective"],
                    "head": recipe,
                    "subtract": made_of["subtract"],
                    "seed": summary["seed"],
                    "base": account["base"]["weights"],
                    "versions": account["versions"],
                },
                indent=2,
                ensure_ascii=False,
            )
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _texts(prompt: Prompt) -> dict[str, Any]:
    return {
        "name": prompt.name,
        "conditional": prompt.conditional.templates,
        "unconditional": prompt.unconditional.templates,
    }


def _code(text: str) -> str:
    """Return text that cannot end a code span."""
    return text.replace("`", "'").replace("\n", " ")


def _fence(text: str, language: str = "json") -> str:
    """Return a block that nothing in the text ends."""
    longest, run = 2, 0
    for letter in text:
        run = run + 1 if letter == "`" else 0
        longest = max(longest, run)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _scores(summary: Mapping[str, Any]) -> str:
    scores = summary["scores"]
    if not scores:
        return "No rated rows were kept apart to score it on."
    headings = ["split", "rows"]
    for metric in DEFAULT:
        headings += [metric.heading] if metric.secondary else [metric.heading, "95 % interval"]
    rows = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for own in scores:
        cells = [own["split"], f"{own['n']:,}"]
        for metric in DEFAULT:
            cells.append(metric.show(own[metric.name]))
            if not metric.secondary:
                low, high = (math.nan if end is None else end for end in own[f"{metric.name}_ci"])
                cells.append(range_text(metric, low, high) or "–")
        rows.append(f"| {' | '.join(cells)} |")
    steps = f"step {summary['best_step']:,} of {summary['steps']:,}"
    said = f"No dev rows chose the weights, those of {steps}."
    if summary["dev_spearman"] is not None:
        said = f"Dev chose the weights, those of {steps}."
    return "\n".join(rows) + f"\n\n{factors_text(DEFAULT)}Intervals are over sentence pairs. {said}"
