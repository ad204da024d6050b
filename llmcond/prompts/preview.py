"""The inputs that a prompt gives for a row: the exact texts, and the tokens an encoder reads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcond.encoders.settings import READ
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import given_conditions, row_inputs

if TYPE_CHECKING:
    from llmcond.data.datasets import Dataset
    from llmcond.data.rows import Rows
    from llmcond.encoders import ResolvedEncoder


def prompt_on_row(
    prompt: Prompt,
    dataset: Dataset,
    split: str | None = None,
    number: int | None = None,
    resolved: ResolvedEncoder | None = None,
) -> dict[str, Any]:
    """Return a row, and under ``inputs`` each conditional input, then what is subtracted.

    Of ``split``, the row with this ``number`` in its file, by default the first. Without a split
    it is train, or another split of the same file if that has the row. Without an encoder, of which
    the tokenizer is loaded, there are no tokens.

    Raises:
        UserError: no such split or row, or an encoder that cannot take the template or the texts.
    """
    obstacle = prompt.obstacle(resolved.identity) if resolved else ""
    if resolved and obstacle:
        raise UserError(
            f"the prompt {prompt.name} does not go with {resolved.checkpoint.name}: {obstacle}. "
            "Name another prompt or --model."
        )
    split, position = _find_row(dataset, split, number)
    rows = dataset.splits[split]
    condition = given_conditions(rows, prompt)[position]
    items = _row_items(prompt, rows, position)
    encoder: dict[str, Any] | None = None
    read: list[dict[str, Any]] = [{}] * len(items)
    if resolved:
        facts = {name: getattr(resolved.identity, name) for name in READ}
        encoder = {"name": resolved.checkpoint.name, **facts}
        read = _as_read([item for _, _, item in items], resolved)
    return {
        "prompt": prompt.name,
        "description": prompt.description,
        "control": prompt.control,
        "digest": prompt.digest,
        "data": dataset.source,
        "split": split,
        "file": rows.file,
        "row": int(rows.number[position]),
        **{name: texts[position] for name, texts in rows.texts.items()},
        "given_condition": condition,
        "encoder": encoder,
        "inputs": [
            {
                "part": part,
                "sentence": sentence,
                "instruction": item.instruction,
                "context": item.context,
                "router": None if item.router is None else asdict(item.router),
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
    places = {name: np.flatnonzero(found.number == number) for name, found in alike.items()}
    having = [name for name, found in places.items() if len(found)]
    chosen = split or (having[0] if having else "train")
    if chosen not in having:
        hint = f" It is in {having[0]}: --split {having[0]}." if having else ""
        raise UserError(
            f"there is no row {number} in the {chosen} split of {rows.file}, whose "
            f"{len(rows):,} rows are numbered {rows.number.min()} to {rows.number.max()}.{hint}"
        )
    return chosen, int(places[chosen][0])


def _row_items(
    prompt: Prompt, rows: Rows, position: int
) -> list[tuple[str, int | None, EncoderInput]]:
    """Return each input of a row: the template's part, which sentence, and the input."""
    inputs = row_inputs(rows, prompt)
    conditional = [inputs.first[position], inputs.second[position]]
    items: list[tuple[str, int | None, EncoderInput]] = [
        ("conditional" if rows.conditioned[number - 1] else "plain", number, item)
        for number, item in enumerate(conditional, 1)
    ]
    if not prompt.subtractable:
        return items
    unconditional = [inputs.first_unconditional[position], inputs.second_unconditional[position]]
    if prompt.of_condition:
        return [*items, ("unconditional", None, unconditional[0])]
    given = [n for n in (1, 2) if rows.conditioned[n - 1]]
    return [*items, *(("unconditional", n, unconditional[n - 1]) for n in given)]


def _as_read(items: Sequence[EncoderInput], resolved: ResolvedEncoder) -> list[dict[str, Any]]:
    """Return the tokens of inputs, those that are pooled, and those that are cut."""
    # Tokenizers take a second to import; texts alone need none.
    from llmcond.encoders.inspect import samples

    labelled = [("", item) for item in items]
    read = samples(resolved, labelled)
    untruncated = read
    if any(len(sample.tokens) >= resolved.identity.max_length for sample in read):
        unlimited = replace(resolved.identity, max_length=sys.maxsize)
        untruncated = samples(replace(resolved, identity=unlimited), labelled)
    return [
        {
            "tokens": sample.tokens,
            "pooled": sample.pooled,
            "n_tokens": len(uncut.tokens),
            "cut": _cut(uncut.tokens, sample.tokens),
        }
        for sample, uncut in zip(read, untruncated, strict=True)
    ]


def _cut(tokens: Sequence[str], kept: Sequence[str]) -> list[str]:
    """Return the tokens that are missing; what is kept stands in the same order."""
    missing: list[str] = []
    at = 0
    for token in tokens:
        if at < len(kept) and kept[at] == token:
            at += 1
        else:
            missing.append(token)
    return missing
