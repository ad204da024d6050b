"""Model cards for the Hugging Face hub, of encoders and of heads, with their metadata.

The prose is in the ``.md.j2`` templates of this folder; this module computes the values for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from llmcond.base.errors import UserError, first_line, install_command
from llmcond.base.metrics import METRICS, Metric, get_metric
from llmcond.base.output import Column, Table
from llmcond.data.readers import hub_dataset
from llmcond.encoders import find_model
from llmcond.evaluation.results import estimate_text, interval_text
from llmcond.prompts import Prompt
from llmcond.report.tables import factors_text, recorded_estimate
from llmcond.runs import Run, dev_score
from llmcond.runs.run import is_selected_on_dev
from llmcond.tasks import find_kind

if TYPE_CHECKING:
    from huggingface_hub import EvalResult


def model_card(record: Mapping[str, Any], kind: str, prompts: Sequence[Prompt], recipe: Any) -> str:
    """Return the card of a trained encoder as Markdown with the hub's metadata.

    Args:
        record: the training record, as in ``training.json``.
        kind: the kind of the run's task.
        prompts: the prompts that the encoder was trained with.
        recipe: the recipe of the head as JSON.
    """
    text, summary, config = find_kind(kind).card, record["summary"], record["made_of"]
    scores, settings, repo = summary["scores"], config["settings"], record["base"]["repo"]
    metrics = [METRICS[name] for name in scores[0] if name in METRICS] if scores else []
    n_members = len(summary.get("members", ()))
    # The members of an ensemble differ only in their seeds.
    first = summary["members"][0] if n_members else summary
    return render_card(
        Path(__file__).with_name("trained.md.j2"),
        trained_metadata(record, kind),
        prompts,
        text=text,
        summary=summary,
        # The full path of a local encoder is private, so the card shows only its name.
        encoder=summary["encoder"] if repo else PurePath(summary["encoder"]).name,
        training_config=config,
        n_members=n_members,
        first=first,
        chosen_on_dev=is_selected_on_dev(first),
        folds=_format_folds(first["then"]["folds"]) if "folds" in first.get("then", {}) else None,
        scores=_scores_table(scores, metrics, text.rows).document("markdown") if scores else "",
        factors=factors_text(metrics),
        training={
            "data": _describe_data(record["data"]),
            "settings": settings,
            **_select_keys(config, "objective", "subtract"),
            "head": recipe,
            "seed": summary["seed"],
            **_select_keys(summary, "trained_on", "then", "members"),
            **_select_keys(config, "teacher", "aspects"),
            "base": record["base"]["weights"],
            "versions": record["versions"],
        },
    )


def heads_card(run: Run) -> str:
    """Return the card of a run whose heads were fitted on a frozen encoder.

    The run must have heads, and ``default_head`` in its manifest.
    """
    heads, text = run.find_heads(sorted(run.head_names())), run.kind.card
    encoder, metric = run.manifest["encoder"], get_metric(run.dev_metric)
    known = find_model(encoder["model"])
    repo, revision = known.repo if known else encoder["model"], encoder["revision"]
    packaged = known.packaged if known and revision is None else None
    return render_card(
        Path(__file__).with_name("heads.md.j2"),
        heads_metadata(run),
        list({prompt.name: prompt for head in heads for prompt in head.view.prompts}.values()),
        text=text,
        repo=repo,
        revision=revision,
        install=packaged and install_command(packaged.extra),
        scores=Table.of_rows(
            [
                {
                    "head": f"`{code(head.name)}`",
                    "prompt": f"`{code(head.view.name)}`",
                    "minus c": head.view.subtracts,
                    "dimensions": f"{head.head.dim_out:,}",
                    f"{metric.heading} on dev": metric.format(dev_score(head.record, metric.name)),
                }
                for head in heads
            ]
        ).document("markdown"),
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
            "data": _describe_data(run.manifest["data"]),
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
    """Render a card as Markdown with the hub's metadata before it.

    Every text of the user must pass through ``code`` (within a code span), ``fenced`` or
    ``code_block`` in the template, so that it is neither Markdown nor HTML.

    Args:
        template: the Jinja template.
        metadata: the hub's metadata of the card.
        prompts: the prompts, which the template has as ``inputs`` (JSON).
        values: further variables of the template.
    """
    from huggingface_hub import ModelCard, ModelCardData

    card = ModelCard.from_template(
        ModelCardData(pipeline_tag=PIPELINE_TAG, **metadata),
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


def _format_folds(folds: Mapping[str, Any]) -> dict[str, Any]:
    """Format the scores of a last stage, estimated by folds of dev, for the card."""
    metric = get_metric(next(iter(folds["trained"])))
    trained, without = (
        estimate_text(metric, recorded_estimate(folds[key], metric))
        for key in ("trained", "without")
    )
    return {"n": folds["folds"], "metric": metric.heading, "with_dev": trained, "without": without}


def _describe_data(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": PurePath(data["source"]).name,
        **_select_keys(data, "digest", "rows", "unrated"),
    }


def _select_keys(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the part of a record with these keys, as far as it has them."""
    return {key: record[key] for key in keys if key in record}


def _scores_table(
    scores: Sequence[Mapping[str, Any]], metrics: Sequence[Metric], rows: str
) -> Table:
    """Return the scores of each split; ``rows`` is the heading of their numbers of rows."""
    columns = [
        Column("split", [score["split"] for score in scores]),
        Column(rows, [f"{score['n']:,}" for score in scores]),
    ]
    for metric in metrics:
        columns.append(Column(metric.heading, [metric.format(s[metric.name]) for s in scores]))
        if not metric.secondary:
            intervals = [interval_text(metric, recorded_estimate(s, metric)) for s in scores]
            cells = [interval or "–" for interval in intervals]
            columns.append(Column("95 % interval", cells))
    return Table(columns)


def code(text: str) -> str:
    """Escape a text so that it cannot end a code span."""
    return " ".join(text.replace("`", "'").split())


def fenced(value: object) -> str:
    """Return a value as JSON in a fenced block that its content cannot end."""
    return code_block(json.dumps(value, indent=2, ensure_ascii=False), "json")


def code_block(text: str, language: str) -> str:
    """Return a text in a fenced block that its content cannot end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


PIPELINE_TAG = "sentence-similarity"

#: The hub's names of metrics that it calls otherwise.
_HUB_METRICS = {"spearman": "spearmanr", "pearson": "pearsonr"}


def trained_metadata(record: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the metadata of a trained encoder, as arguments of ``ModelCardData``.

    Args:
        record: the training record, as in ``training.json``.
        kind: the kind of the run's task.
    """
    summary, config = record["summary"], record["made_of"]
    full, is_ensemble = config["settings"]["rank"] == 0, "members" in summary
    separate = not (full or config["merge"] or is_ensemble)
    card = find_kind(kind).card
    return {
        "base_model": record["base"]["repo"],
        "library_name": "peft" if separate else "llmcond",
        "tags": ["llmcond", *card.tags, *(() if full else ("lora",))],
        **_name_datasets(record["data"]),
        **_describe_results(
            f"{card.subject} encoder", list(_training_results(summary, record["data"]))
        ),
    }


def heads_metadata(run: Run) -> dict[str, Any]:
    """Return the metadata of a run with heads on a frozen encoder; see ``trained_metadata``.

    The score is that of the head in ``default_head`` of the run's manifest.
    """
    encoder, data = run.manifest["encoder"], run.manifest["data"]
    known, head = find_model(encoder["model"]), run.manifest["default_head"]
    card = run.kind.card
    score = dev_score(run.head_record(head), run.dev_metric)
    results = [] if score is None else [_result(data, "dev", run.dev_metric, score)]
    return {
        "base_model": known.repo if known else encoder["model"],
        "library_name": "llmcond",
        "tags": ["llmcond", *card.tags],
        **_name_datasets(data),
        **_describe_results(f"heads for {card.subject} embeddings", results),
    }


def add_metadata(text: str, metadata: Mapping[str, Any], **explicit: Any) -> str:
    """Return a card with the metadata that it lacks; its body does not change.

    Args:
        text: the card as Markdown, with or without metadata.
        metadata: the metadata, as arguments of ``ModelCardData``. Fields of the card have
            precedence.
        explicit: further metadata, which have precedence over those of the card. None: not given.

    Raises:
        UserError: the card's metadata is not valid.
    """
    from huggingface_hub import ModelCard, ModelCardData
    from yaml import YAMLError

    # Without a block of metadata, the client would log a warning.
    has_block = re.match(r"\s*---\s*\n", text) is not None
    try:
        card = ModelCard(text if has_block else f"---\n{{}}\n---\n{text}")
    except (ValueError, TypeError, YAMLError) as error:
        raise UserError(f"the metadata of README.md is not valid: {first_line(error)}.") from error
    current: dict[str, Any] = card.data.to_dict()  # type: ignore[no-untyped-call]  # untyped
    added = ModelCardData(pipeline_tag=PIPELINE_TAG, **metadata)
    overrides = {key: value for key, value in explicit.items() if value}
    # The first ``current`` keeps the order of the card's fields, the second one their values.
    complete = {**current, **added.to_dict(), **current, **overrides}  # type: ignore[no-untyped-call]
    if complete == current:
        return text
    card.data = ModelCardData(**complete)
    return str(card)


def _name_datasets(data: Mapping[str, Any]) -> dict[str, Any]:
    dataset = hub_dataset(data["source"])
    return {} if dataset is None else {"datasets": [dataset]}


def _describe_results(name: str, results: list[EvalResult]) -> dict[str, Any]:
    return {"model_name": name, "eval_results": results} if results else {}


def _training_results(summary: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[EvalResult]:
    """Yield the scores of a trained encoder on held-out rows, or those that folds estimated."""
    for row in summary["scores"]:
        for name in filter(METRICS.__contains__, row):
            if row[name] is not None:
                yield _result(data, row["split"], name, row[name])
    first = summary["members"][0] if "members" in summary else summary
    folds = first.get("then", {}).get("folds", {})
    for name in filter(METRICS.__contains__, folds.get("trained", {})):
        yield _result(data, f"dev ({folds['folds']} folds)", name, folds["trained"][name])


def _result(data: Mapping[str, Any], split: str, metric: str, value: float) -> EvalResult:
    from huggingface_hub import EvalResult

    name = PurePath(data["source"]).name
    return EvalResult(
        task_type=PIPELINE_TAG,
        dataset_type=hub_dataset(data["source"]) or name,
        dataset_name=name,
        dataset_split=split,
        metric_type=_HUB_METRICS.get(metric, metric),
        metric_name=METRICS[metric].heading,
        metric_value=value,
    )
