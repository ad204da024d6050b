"""Metadata of model cards: the YAML block at the top, which the Hugging Face hub reads.

``EvalResult`` and ``ModelCardData`` of huggingface_hub define and check its fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from llmcond.data.readers import hub_dataset
from llmcond.encoders import find_model
from llmcond.errors import UserError, first_line
from llmcond.metrics import METRICS
from llmcond.runs import Run, dev_score
from llmcond.tasks import find_kind

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

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
        **_describe_data(record["data"]),
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
        **_describe_data(data),
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


def _describe_data(data: Mapping[str, Any]) -> dict[str, Any]:
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
