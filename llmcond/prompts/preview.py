"""Previews of a prompt on a row: the exact texts, and the tokens that an encoder reads."""

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
from llmcond.prompts.inputs import input_conditions, render_rows

if TYPE_CHECKING:
    from llmcond.data.datasets import Dataset
    from llmcond.data.rows import Rows
    from llmcond.encoders import ResolvedEncoder


def preview_prompt(
    prompt: Prompt,
    dataset: Dataset,
    split: str | None = None,
    number: int | None = None,
    resolved: ResolvedEncoder | None = None,
) -> dict[str, Any]:
    """Return a row, and under ``inputs`` its conditional inputs and those that are subtracted.

    Args:
        prompt: the prompt.
        dataset: the rows.
        split: split of the row. Default: train, or another split of the same file that has the row.
        number: the row's number in its file; the first row by default.
        resolved: the encoder whose tokenizer is loaded. None: the inputs have no tokens.

    Raises:
        UserError: there is no such split or row, or the encoder does not accept the template or
            the texts.
    """
    obstacle = prompt.obstacle(resolved.identity) if resolved else ""
    if resolved and obstacle:
        raise UserError(
            f"the prompt {prompt.name} does not work with {resolved.checkpoint.name}: {obstacle}. "
            "Name another prompt or --model."
        )
    split, position = _find_row(dataset, split, number)
    rows = dataset.splits[split]
    condition = input_conditions(rows, prompt)[position]
    items = _list_row_inputs(prompt, rows, position)
    encoder: dict[str, Any] | None = None
    token_facts: list[dict[str, Any]] = [{}] * len(items)
    if resolved:
        settings = {name: getattr(resolved.identity, name) for name in READ}
        encoder = {"name": resolved.checkpoint.name, **settings}
        token_facts = _tokenize_items([item for _, _, item in items], resolved)
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
            for (part, sentence, item), tokens in zip(items, token_facts, strict=True)
        ],
    }


def _find_row(dataset: Dataset, split: str | None, number: int | None) -> tuple[str, int]:
    """Return the split of a row, and its position in that split."""
    if split is not None and split not in dataset.splits:
        raise UserError(
            f"{dataset.source} has no {split} split; it has {', '.join(dataset.splits)}."
        )
    rows = dataset.splits[split or "train"]
    if number is None:
        return split or "train", 0
    # If a single file was divided into splits, rows keep their numbers in the file.
    same_file = {name: part for name, part in dataset.splits.items() if part.file == rows.file}
    positions = {name: np.flatnonzero(part.number == number) for name, part in same_file.items()}
    splits_with_row = [name for name, matches in positions.items() if len(matches)]
    split_name = split or (splits_with_row[0] if splits_with_row else "train")
    if split_name not in splits_with_row:
        hint = (
            f" It is in {splits_with_row[0]}: --split {splits_with_row[0]}."
            if splits_with_row
            else ""
        )
        raise UserError(
            f"there is no row {number} in the {split_name} split of {rows.file}, whose "
            f"{len(rows):,} rows are numbered {rows.number.min()} to {rows.number.max()}.{hint}"
        )
    return split_name, int(positions[split_name][0])


def _list_row_inputs(
    prompt: Prompt, rows: Rows, position: int
) -> list[tuple[str, int | None, EncoderInput]]:
    """List the inputs of a row: the template's part, the number of the sentence, and the input.

    The number is None for the condition alone.
    """
    inputs = render_rows(rows, prompt)
    conditional = [inputs.first[position], inputs.second[position]]
    items: list[tuple[str, int | None, EncoderInput]] = [
        ("conditional" if rows.conditioned[number - 1] else "plain", number, item)
        for number, item in enumerate(conditional, 1)
    ]
    if not prompt.subtractable:
        return items
    unconditional = [inputs.first_unconditional[position], inputs.second_unconditional[position]]
    if prompt.subtracts_condition:
        return [*items, ("unconditional", None, unconditional[0])]
    conditioned = [n for n in (1, 2) if rows.conditioned[n - 1]]
    return [*items, *(("unconditional", n, unconditional[n - 1]) for n in conditioned)]


def _tokenize_items(
    items: Sequence[EncoderInput], resolved: ResolvedEncoder
) -> list[dict[str, Any]]:
    """Return the tokens of inputs, which of them are pooled, and which were cut."""
    # Importing tokenizers takes a second, and is not needed to show texts alone.
    from llmcond.encoders.inspect import tokenize_inputs

    labelled = [("", item) for item in items]
    samples_read = tokenize_inputs(resolved, labelled)
    untruncated = samples_read
    if any(len(sample.tokens) >= resolved.identity.max_length for sample in samples_read):
        unlimited = replace(resolved.identity, max_length=sys.maxsize)
        untruncated = tokenize_inputs(replace(resolved, identity=unlimited), labelled)
    return [
        {
            "tokens": sample.tokens,
            "pooled": sample.pooled,
            "n_tokens": len(uncut.tokens),
            "cut": _find_cut_tokens(uncut.tokens, sample.tokens),
        }
        for sample, uncut in zip(samples_read, untruncated, strict=True)
    ]


def _find_cut_tokens(tokens: Sequence[str], remaining: Sequence[str]) -> list[str]:
    """Return the tokens that are not among the remaining ones, which are in the same order."""
    missing: list[str] = []
    index = 0
    for token in tokens:
        if index < len(remaining) and remaining[index] == token:
            index += 1
        else:
            missing.append(token)
    return missing
