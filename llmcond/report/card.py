"""Model cards, as the Hugging Face hub shows them: of a trained encoder, and of heads alone.

The prose is in the templates beside this module; here are the values that they show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from llmcond.encoders import find_model
from llmcond.metrics import METRICS, Estimate, Metric, metric_of
from llmcond.prompts import Prompt
from llmcond.report.format import estimate_text, factors_text, range_text
from llmcond.runs import AnyRun, dev_score
from llmcond.runs.kind import find_kind
from llmcond.runs.saved import chosen_on_dev


def model_card(record: Mapping[str, Any], kind: str, prompts: Sequence[Prompt], recipe: Any) -> str:
    """Return the card of a trained encoder as Markdown with the hub's metadata.

    The ``record`` of the training is as ``training.json`` holds it, ``kind`` that of its task, and
    the ``recipe`` of the head JSON.
    """
    text, summary, made_of = find_kind(kind).card, record["summary"], record["made_of"]
    scores, settings, repo = summary["scores"], made_of["settings"], record["base"]["repo"]
    metrics = [METRICS[name] for name in scores[0] if name in METRICS] if scores else []
    full, n_members = settings["rank"] == 0, len(summary.get("members", ()))
    # Members of an ensemble are alike but for their seeds.
    first = summary["members"][0] if n_members else summary
    separate = not (full or made_of["merge"] or n_members)
    headings = ["split", text.rows]
    for metric in metrics:
        headings += [metric.heading] if metric.secondary else [metric.heading, "95 % interval"]
    return render_card(
        Path(__file__).with_name("trained.md.j2"),
        {
            "base_model": repo,
            "library_name": "peft" if separate else "llmcond",
            "tags": ["llmcond", *text.tags, *(() if full else ("lora",))],
        },
        prompts,
        text=text,
        summary=summary,
        # Where the encoder lies on this machine is nobody's business.
        encoder=summary["encoder"] if repo else PurePath(summary["encoder"]).name,
        made_of=made_of,
        n_members=n_members,
        first=first,
        chosen_on_dev=chosen_on_dev(first),
        folds=_folds(first["then"]["folds"]) if "folds" in first.get("then", {}) else None,
        scores=table(headings, [_scores(row, metrics) for row in scores]) if scores else "",
        factors=factors_text(metrics),
        training={
            "data": _data(record["data"]),
            "settings": settings,
            **_those_of(made_of, "objective", "subtract"),
            "head": recipe,
            "seed": summary["seed"],
            **_those_of(summary, "trained_on", "then", "members"),
            **_those_of(made_of, "teacher", "aspects"),
            "base": record["base"]["weights"],
            "versions": record["versions"],
        },
    )


def heads_card(run: AnyRun) -> str:
    """Return the card of a run whose heads were fitted on a frozen encoder.

    It has heads, and ``default_head`` in its manifest.
    """
    heads, text = run.find_heads(sorted(run.head_names())), find_kind(run.kind).card
    encoder, metric = run.manifest["encoder"], metric_of(run.dev_metric)
    known = find_model(encoder["model"])
    repo, revision = known.repo if known else encoder["model"], encoder["revision"]
    return render_card(
        Path(__file__).with_name("heads.md.j2"),
        {"base_model": repo, "library_name": "llmcond", "tags": ["llmcond", *text.tags]},
        list({prompt.name: prompt for head in heads for prompt in head.view.prompts}.values()),
        text=text,
        repo=repo,
        revision=revision,
        package=known.package if known and revision is None else None,
        scores=table(
            ["head", "prompt", "minus c", "dimensions", f"{metric.heading} on dev"],
            [
                [
                    f"`{code(head.name)}`",
                    f"`{code(head.view.name)}`",
                    "yes" if head.view.subtracts else "no",
                    f"{head.head.dim_out:,}",
                    metric.show(dev_score(head.record, metric.name)),
                ]
                for head in heads
            ],
        ),
        factors=factors_text([metric]),
        chosen_on_dev=any(head.record["fit"].get("selected_on") == "dev" for head in heads),
        fitted_on_dev=[head.name for head in heads if "dev" in head.trained_on],
        default_head=run.manifest["default_head"],
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
                head.name: {
                    **head.record["recipe"],
                    "seed": head.record["seed"],
                    "trained_on": head.trained_on,
                }
                for head in heads
            },
            "versions": run.manifest["versions"],
        },
    )


def render_card(
    template: Path, metadata: Mapping[str, Any], prompts: Sequence[Prompt], **values: Any
) -> str:
    """Return a card as Markdown with the hub's metadata before it.

    Templates have ``inputs`` (the ``prompts`` as JSON), and the functions below that make a text of
    the user's neither Markdown nor HTML: ``code`` within a code span, ``fenced`` and
    ``code_block``. Everything of the user's stands in one of these.
    """
    from huggingface_hub import ModelCard, ModelCardData

    card = ModelCard.from_template(
        ModelCardData(pipeline_tag="sentence-similarity", **metadata),
        template_path=str(template),
        inputs=[
            {
                "name": prompt.name,
                "conditional": prompt.conditional.templates,
                "unconditional": prompt.unconditional.templates,
            }
            for prompt in prompts
        ],
        code=code,
        code_block=code_block,
        fenced=fenced,
        last_part=lambda path: PurePath(path).name,
        **values,
    )
    return f"{card}\n"


def _folds(folds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a last stage by folds of dev, as the card shows them."""
    metric = metric_of(next(iter(folds["trained"])))

    def shown(scores: Mapping[str, Any]) -> str:
        interval = scores[f"{metric.name}_ci"]
        return estimate_text(metric, Estimate.of_json(scores[metric.name], interval))

    return {
        "n": folds["folds"],
        "metric": metric.heading,
        "with_dev": shown(folds["trained"]),
        "without": shown(folds["without"]),
    }


def _data(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": PurePath(data["source"]).name, **_those_of(data, "digest", "rows", "unrated")}


def _those_of(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the values of the keys that a record has."""
    return {key: record[key] for key in keys if key in record}


def _scores(row: Mapping[str, Any], metrics: Sequence[Metric]) -> list[str]:
    cells = [row["split"], f"{row['n']:,}"]
    for metric in metrics:
        cells.append(metric.show(row[metric.name]))
        if not metric.secondary:
            estimate = Estimate.of_json(row[metric.name], row[f"{metric.name}_ci"])
            cells.append(range_text(metric, estimate.low, estimate.high) or "–")
    return cells


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, of cells that are Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return "\n".join([lines[0], f"{'|---' * len(headings)}|", *lines[1:]])


def code(text: str) -> str:
    """Return text that cannot end a code span."""
    return " ".join(text.replace("`", "'").split())


def fenced(value: object) -> str:
    """Return JSON in a block that nothing in it ends."""
    return code_block(json.dumps(value, indent=2, ensure_ascii=False), "json")


def code_block(text: str, language: str) -> str:
    """Return text in a fenced block that nothing in it ends."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
