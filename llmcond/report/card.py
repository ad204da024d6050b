"""The model card of a trained encoder, as the Hugging Face hub shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from llmcond.metrics import DEFAULT, Estimate
from llmcond.prompts import Prompt
from llmcond.report.format import factors_text, range_text


def model_card(account: Mapping[str, Any], prompts: Sequence[Prompt], recipe: Any) -> str:
    """Return the card as Markdown with the hub's metadata before it.

    Texts of the user stand in fenced blocks, as JSON: nothing in them is Markdown or HTML. The
    ``account`` of the training is as ``training.json`` holds it, the ``recipe`` of the head JSON.
    """
    import jinja2
    from huggingface_hub import ModelCardData

    summary, made_of, base = account["summary"], account["made_of"], account["base"]
    data, settings = account["data"], made_of["settings"]
    full, merged = settings["rank"] == 0, bool(made_of["merge"])
    metadata = ModelCardData(
        base_model=base["repo"],
        library_name="llmcond" if full or merged else "peft",
        pipeline_tag="sentence-similarity",
        tags=["llmcond", "conditional-semantic-textual-similarity", "sentence-similarity"]
        + ([] if full else ["lora"]),
    )
    how = "all of its weights" if full else f"LoRA of rank {settings['rank']}"
    headings = ["split", "rows"]
    for metric in DEFAULT:
        headings += [metric.heading] if metric.secondary else [metric.heading, "95 % interval"]
    # Autoescape is for HTML; what is the user's is fenced, or quoted as code.
    environment = jinja2.Environment(  # noqa: S701
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"code": _code, "fenced": _fenced}
    card = environment.get_template("card.md.j2").render(
        metadata=metadata.to_yaml(),
        # Where it lies on this machine is nobody's business.
        encoder=summary["encoder"] if base["repo"] else PurePath(summary["encoder"]).name,
        how=f"{how}, merged into its weights" if merged and not full else how,
        summary=summary,
        headings=headings,
        scores=[_scores(own) for own in summary["scores"]],
        factors=factors_text(DEFAULT),
        inputs=[
            {
                "name": prompt.name,
                "conditional": prompt.conditional.templates,
                "unconditional": prompt.unconditional.templates,
            }
            for prompt in prompts
        ],
        training={
            "data": {
                "name": PurePath(data["source"]).name,
                **{key: data[key] for key in ("digest", "rows", "unrated")},
            },
            "settings": settings,
            "objective": made_of["objective"],
            "head": recipe,
            "subtract": made_of["subtract"],
            "seed": summary["seed"],
            "base": base["weights"],
            "versions": account["versions"],
        },
    )
    return card.lstrip()


def _scores(own: Mapping[str, Any]) -> list[str]:
    cells = [own["split"], f"{own['n']:,}"]
    for metric in DEFAULT:
        cells.append(metric.show(own[metric.name]))
        if not metric.secondary:
            found = Estimate.of_json(own[metric.name], own[f"{metric.name}_ci"])
            cells.append(range_text(metric, found.low, found.high) or "–")
    return cells


def _code(text: str) -> str:
    """Return text that cannot end a code span."""
    return text.replace("`", "'").replace("\n", " ")


def _fenced(value: object) -> str:
    """Return JSON in a block that nothing in it ends."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}json\n{text}\n{fence}"
