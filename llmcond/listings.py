"""What is known by name: models, prompts and heads, with their settings, one row each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from llmcond.config import bundled_names
from llmcond.encoders.models import MODELS, PADDING_SIDE, default_prompt
from llmcond.encoders.spec import DTYPES, EncoderInput
from llmcond.errors import UserError
from llmcond.prompts import Prompt, load_prompt

if TYPE_CHECKING:
    from llmcond.datasets import Dataset
    from llmcond.encoders import ResolvedEncoder
    from llmcond.rows import Rows


def models() -> list[dict[str, Any]]:
    """Return a row for each known encoder."""
    return [
        {
            "name": model.name,
            "repo": model.repo,
            "n_parameters": model.n_parameters,
            "dim": model.dim,
            "attention": model.attention,
            "pooling": model.poolings[0],
            "poolings": list(model.poolings),
            "pool_over": model.pool_over,
            "max_length": model.max_length,
            "normalize": model.normalize,
            "special_tokens": model.special_tokens,
            "padding_side": PADDING_SIDE,
            "instruction_format": model.instruction_format,
            "default_prompt": default_prompt(model.instruction_format),
            "dtypes": [d for d in DTYPES if d != "float16" or not model.no_float16],
            "gated": model.gated,
            "licence": model.licence,
        }
        for model in MODELS
    ]


def models_in_brief(width: int) -> list[dict[str, Any]]:
    """Return what of each known encoder goes into so many characters."""
    rows = [
        {
            "name": row["name"],
            "size": f"{row['n_parameters'] / 1e9:.2f} B",
            "dim": row["dim"],
            "attention": row["attention"],
            "pooling": ", ".join(row["poolings"]),
            "length": row["max_length"],
            "instruction": "yes" if row["instruction_format"] else "no",
            "licence": row["licence"] + (" (gated)" if row["gated"] else ""),
        }
        for row in models()
    ]
    if width >= _WIDE:
        return rows
    return [{key: row[key] for key in ("name", "size", "attention")} for row in rows]


#: Characters that all columns of the brief listing take.
_WIDE = 155


def prompts() -> list[dict[str, Any]]:
    """Return a row for each bundled prompt."""
    rows = []
    for name in bundled_names("prompts"):
        prompt = load_prompt(name)
        rows.append(
            {
                "name": name,
                "description": prompt.description,
                "control": prompt.control,
                "instruction": prompt.conditional.instruction,
                "context": prompt.conditional.context,
                "text": prompt.conditional.text,
                "unconditional_instruction": prompt.unconditional.instruction,
                "unconditional_context": prompt.unconditional.context,
                "unconditional_text": prompt.unconditional.text,
                "source": prompt.source,
            }
        )
    return rows


def prompt_on_row(
    prompt: Prompt,
    dataset: Dataset,
    split: str | None = None,
    number: int | None = None,
    resolved: ResolvedEncoder | None = None,
) -> dict[str, Any]:
    """Return what a prompt makes of a row: the exact texts, and the tokens that an encoder reads.

    Args:
        prompt: the template.
        dataset: where the row is.
        split: whose row. None: train, or another split of the same file if that has the row.
        number: the row's number in its file; None: the split's first.
        resolved: an encoder, of which the tokenizer is loaded; None: texts only.

    Returns:
        The row, and under ``inputs`` each conditional input, then what is subtracted.

    Raises:
        UserError: no such split or row, or an encoder that cannot take the template or the texts.
    """
    from llmcond.features.pairs import given_conditions

    obstacle = prompt.obstacle(resolved.identity) if resolved else ""
    if resolved and obstacle:
        raise UserError(
            f"the prompt {prompt.name} does not go with {resolved.checkpoint.name}: {obstacle}. "
            "Name another prompt or --model."
        )
    split, position = _find_row(dataset, split, number)
    rows = dataset.splits[split]
    condition = given_conditions(rows, prompt)[position]
    items = _row_items(prompt, (rows.sentence1[position], rows.sentence2[position]), condition)
    read = _as_read([item for _, _, item in items], resolved) if resolved else [{}] * len(items)
    return {
        "prompt": prompt.name,
        "description": prompt.description,
        "control": prompt.control,
        "digest": prompt.digest,
        "data": dataset.source,
        "split": split,
        "file": rows.file,
        "row": int(rows.number[position]),
        "sentence1": rows.sentence1[position],
        "sentence2": rows.sentence2[position],
        "condition": rows.condition[position],
        "given_condition": condition,
        "encoder": _encoder_facts(resolved) if resolved else None,
        "inputs": [
            {
                "part": part,
                "sentence": sentence,
                "instruction": item.instruction,
                "context": item.context,
                "text": item.text,
                **tokens,
            }
            for (part, sentence, item), tokens in zip(items, read, strict=True)
        ],
    }


def _find_row(dataset: Dataset, split: str | None, number: int | None) -> tuple[str, int]:
    """Return the split of a row, and its position there."""
    if split is not None and split not in dataset.splits:
        raise UserError(
            f"{dataset.source} has no {split} split; it has {', '.join(dataset.splits)}."
        )
    rows = dataset.splits[split or "train"]
    if number is None:
        return split or "train", 0
    # A single file is cut into splits: its rows keep their numbers, in whichever split they are.
    alike = {name: found for name, found in dataset.splits.items() if found.file == rows.file}
    places = {name: _position(found, number) for name, found in alike.items()}
    having = [name for name, position in places.items() if position is not None]
    if split is None and having:
        split = having[0]
    position = places.get(split or "train")
    if position is None:
        hint = f" It is in {having[0]}: --split {having[0]}." if having else ""
        raise UserError(
            f"there is no row {number} in the {split or 'train'} split of {rows.file}, whose "
            f"{len(rows):,} rows are numbered {rows.number.min()} to {rows.number.max()}.{hint}"
        )
    return split or "train", position


def _position(rows: Rows, number: int) -> int | None:
    found = (rows.number == number).nonzero()[0]
    return int(found[0]) if len(found) else None


def _row_items(
    prompt: Prompt, sentences: tuple[str, str], condition: str
) -> list[tuple[str, int | None, EncoderInput]]:
    """Return what of a template each input is, of which sentence, and the input."""
    items: list[tuple[str, int | None, EncoderInput]] = [
        ("conditional", number, prompt.conditional.render(sentence, condition))
        for number, sentence in enumerate(sentences, 1)
    ]
    if not prompt.subtractable:
        return items
    unconditional = [prompt.unconditional.render(sentence, condition) for sentence in sentences]
    if prompt.of_condition:
        return [*items, ("unconditional", None, unconditional[0])]
    return [*items, *(("unconditional", n, item) for n, item in enumerate(unconditional, 1))]


def _encoder_facts(resolved: ResolvedEncoder) -> dict[str, Any]:
    names = ("pooling", "pool_over", "max_length", "special_tokens", "instruction_format")
    return {
        "name": resolved.checkpoint.name,
        **{name: getattr(resolved.identity, name) for name in names},
    }


def _as_read(items: Sequence[EncoderInput], resolved: ResolvedEncoder) -> list[dict[str, Any]]:
    """Return the tokens of inputs, those that are pooled, and those that are cut."""
    from llmcond.encoders.doctor import samples

    labelled = [("", item) for item in items]
    read = samples(resolved, labelled)
    whole = read
    if any(len(sample.tokens) >= resolved.identity.max_length for sample in read):
        unlimited = replace(resolved.identity, max_length=sys.maxsize)
        whole = samples(replace(resolved, identity=unlimited), labelled)
    return [
        {
            "tokens": sample.tokens,
            "pooled": sample.pooled,
            "n_tokens": len(uncut.tokens),
            "cut": _cut(uncut.tokens, sample.tokens),
        }
        for sample, uncut in zip(read, whole, strict=True)
    ]


def _cut(whole: Sequence[str], kept: Sequence[str]) -> list[str]:
    """Return the tokens that are missing; what is kept stands in the same order."""
    missing: list[str] = []
    at = 0
    for token in whole:
        if at < len(kept) and kept[at] == token:
            at += 1
        else:
            missing.append(token)
    return missing


def heads() -> list[dict[str, Any]]:
    """Return a row for each bundled head recipe."""
    from llmcond.heads.recipes import load_recipe

    rows = []
    for name in bundled_names("heads"):
        recipe = load_recipe(name)
        settings = " ".join(f"{k}={v}" for k, v in asdict(recipe.settings).items())
        about = {"name": name, "kind": recipe.family.kind, "description": recipe.description}
        rows.append({**about, "settings": settings, "source": recipe.source})
    return rows
