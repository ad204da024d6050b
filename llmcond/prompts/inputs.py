"""Inputs of an encoder: rendering of rows with a prompt, and previews of a prompt on a row."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcond.data.rows import Rows
from llmcond.encoders.settings import READ
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.files import digest_text
from llmcond.prompts.template import InputTemplate, Prompt

if TYPE_CHECKING:
    from llmcond.data.datasets import Dataset
    from llmcond.data.rows import Rows
    from llmcond.encoders import ResolvedEncoder

#: Seed with which each row gets another row's condition. It is fixed because prompts with the same
#: digest must give the same inputs.
_SEED = "0"
#: Number of conditions whose rendered inputs are cached.
_CONDITIONS = 4_096


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs of n rows, as columns: conditional and unconditional, for both sentences."""

    first: Sequence[EncoderInput]
    second: Sequence[EncoderInput]
    first_unconditional: Sequence[EncoderInput]
    second_unconditional: Sequence[EncoderInput]


class SplitInputs:
    """The inputs of some rows; see ``AnyTask.inputs``."""

    def __init__(self, splits: Iterable[Rows], prompt: Prompt) -> None:
        """Prepare rows, each split separately.

        Raises:
            UserError: as ``input_conditions``, or a column that the template names is missing.
        """
        self._prompt = prompt
        self._splits = [(rows, _renderers(rows, prompt)) for rows in splits]

    def __iter__(self) -> Iterator[EncoderInput]:
        # Inputs come row by row, so that those with a common prefix are close to each other.
        for rows, renderers in self._splits:
            for position in range(len(rows)):
                for conditional, unconditional in renderers:
                    yield conditional(position)
                    yield unconditional(position)

    def __len__(self) -> int:
        return 4 * sum(len(rows) for rows, _ in self._splits)

    def locate(self, item: EncoderInput) -> str | None:
        """Describe the first row that needs an input: ``row 17 of train.csv``."""
        for rows, renderers in self._splits:
            renders = [render for pair in renderers for render in pair]
            for position in range(len(rows)):
                if any(render(position) == item for render in renders):
                    return rows.describe(position)
        return None

    def check_distinct(self) -> None:
        """Raise a ``UserError`` if two rows with different conditions get the same inputs."""
        for rows, _ in self._splits:
            clash = find_same_inputs(rows, self._prompt)
            if clash is None:
                continue
            first, second = clash
            raise UserError(
                f"the prompt {self._prompt.name} gives the same input for {rows.describe(first)} "
                f"and {rows.describe(second)}, although their conditions differ "
                f"({rows.condition[first]!r} and {rows.condition[second]!r}). Put words or "
                "punctuation between {sentence} and {condition} in the template."
            )


_Render = Callable[[int], EncoderInput]


def _renderers(rows: Rows, prompt: Prompt) -> list[tuple[_Render, _Render]]:
    """Return functions from a row's position to its inputs, two for each of its sentences.

    The first function of a sentence gives the conditional input, the second the unconditional one.
    """
    missing = [name for name in prompt.fields if name not in rows.extra]
    if missing:
        raise UserError(
            f"the prompt {prompt.name} names the column {missing[0]!r}, but the rows of "
            f"{rows.file} were read without it. Extract into a new --run with this prompt."
        )
    conditions = input_conditions(rows, prompt)
    plain = prompt.plain or InputTemplate("{sentence}")

    def renderer(part: InputTemplate, texts: Sequence[str]) -> _Render:
        if not prompt.fields and "sentence" not in part.placeholders:
            # There are few conditions, and every row needs one.
            render_condition = lru_cache(_CONDITIONS)(lambda condition: part.render("", condition))
            return lambda i: render_condition(conditions[i])
        if not prompt.fields:
            return lambda i: part.render(texts[i], conditions[i])
        columns = {name: rows.extra[name] for name in prompt.fields}
        return lambda i: part.render(
            texts[i], conditions[i], {name: column[i] for name, column in columns.items()}
        )

    renderers = []
    for texts, conditioned in zip((rows.sentence1, rows.sentence2), rows.conditioned, strict=True):
        # Nothing is subtracted from a sentence without a condition, so both inputs are the same.
        parts = (prompt.conditional, prompt.unconditional) if conditioned else (plain, plain)
        renderers.append((renderer(parts[0], texts), renderer(parts[1], texts)))
    return renderers


def input_conditions(rows: Rows, prompt: Prompt) -> Sequence[str]:
    """Return the condition that each row's inputs contain.

    This is the row's own condition or, for a shuffled control, that of a random other row whose
    condition differs; frequent conditions are thus sampled often. The choice depends on the row's
    texts and on the conditions of all rows, but not on the order of rows. Therefore pass all rows
    of a split, never a part of it.

    Raises:
        UserError: the prompt is a shuffled control, but all rows have the same condition.
    """
    if prompt.control != "shuffled":
        return rows.condition
    texts = list(zip(rows.sentence1, rows.sentence2, rows.condition, strict=True))
    return shuffle_conditions(rows.condition, texts, prompt, f"rows of a split of {rows.file}")


def shuffle_conditions(
    conditions: Sequence[str], texts: Sequence[tuple[str, ...]], prompt: Prompt, what: str
) -> list[str]:
    """Return, for each row, the condition of a random other row whose condition differs.

    Args:
        conditions: the conditions of n rows.
        texts: for each row, the texts that decide its random choice.
        prompt: the prompt, for messages.
        what: name of the rows in messages.

    Raises:
        UserError: all rows have the same condition.
    """
    # Most tokenizers ignore case and repeated spaces, so conditions that differ only in these
    # count as the same.
    kinds = [" ".join(text.casefold().split()) for text in conditions]
    if len(set(kinds)) == 1:
        raise UserError(
            f"the prompt {prompt.name} gives each row the condition of another row, but all "
            f"{len(kinds):,} {what} have the same condition, {conditions[0]!r}. Leave the prompt "
            "out, or use rows with several conditions."
        )
    order = sorted(range(len(kinds)), key=lambda i: (kinds[i], conditions[i]))
    counts = Counter(kinds[position] for position in order)
    starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    shuffled_conditions = []
    for row_texts, kind in zip(texts, kinds, strict=True):
        offset = int(digest_text(_SEED, *row_texts), 16) % (len(kinds) - counts[kind])
        # Rows with the same condition are skipped.
        rank = offset + counts[kind] if offset >= starts[kind] else offset
        shuffled_conditions.append(conditions[order[rank]])
    return shuffled_conditions


def render_rows(rows: Rows, prompt: Prompt) -> RowInputs:
    """Render all rows with a prompt; raises the errors of ``SplitInputs``."""
    first, second = _renderers(rows, prompt)
    renderers = (first[0], second[0], first[1], second[1])
    return RowInputs(*([render(i) for i in range(len(rows))] for render in renderers))


def find_same_inputs(rows: Rows, prompt: Prompt) -> tuple[int, int] | None:
    """Find two rows with different conditions for which a prompt gives the same inputs.

    No head can distinguish the conditions of such rows. Unconditional inputs are compared only if
    features are separate, where e(s) and e(c) together represent a row; otherwise they are
    ignored, because subtracting them is optional.

    Returns:
        The positions of the first two such rows; None if there are none, or if the prompt is a
        control.
    """
    if prompt.control is not None:
        return None
    inputs = render_rows(rows, prompt)
    columns = [inputs.first, inputs.second]
    if prompt.separate:
        columns.append(inputs.first_unconditional)
    seen: dict[tuple[bytes, ...], int] = {}
    for position, row in enumerate(zip(*columns, strict=True)):
        earlier = seen.setdefault(tuple(item.key for item in row), position)
        if rows.condition[earlier] != rows.condition[position]:
            return earlier, position
    return None


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
        hints = [f" It is in {name}: --split {name}." for name in splits_with_row[:1]]
        raise UserError(
            f"there is no row {number} in the {split_name} split of {rows.file}, whose "
            f"{len(rows):,} rows are numbered {rows.number.min()} to {rows.number.max()}."
            f"{''.join(hints)}"
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
