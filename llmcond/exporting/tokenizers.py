"""Conditions inside a tokenizer, which adds them to every text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.files import write_json, write_text
from llmcond.prompts.template import InputTemplate

#: Texts on which exports are tested: with various beginnings and ends, and one that is cut.
TEXTS = (
    "Two women read a book at the beach.",
    "a man rides a horse in the snow",
    "3 dogs, 2 cats (and one bird)!",
    '"Is it raining?" she asked; nobody knew',
    "Crème brûlée für zwei – 東京 in May 2024",
    "the end " * 700,
)
#: Texts with which the tokens around a text are determined. They use words that conditions are
#: unlikely to contain.
_PROBES = ("Zebras quickly juggled 17 oranges", "Three dogs walk in the park")


@dataclass(frozen=True)
class Affixes:
    """Text and tokens around every text under one condition.

    Attributes:
        text_prefix: text prefix, for templates whose beginning a tokenizer must join to the text.
        before: token ids before the text, including special ones.
        after: token ids after the text, including special ones.
    """

    text_prefix: str
    before: list[int]
    after: list[int]


def find_affixes(
    reader: InputTokenizer,
    tokenizer: Any,
    part: InputTemplate,
    condition: str,
    *,
    lead: bool = False,
) -> Affixes | None:
    """Return what a template puts around every sentence under a condition.

    The result is tokens if these reproduce what the encoder reads; otherwise, or with
    ``text_prefix``, the text in front of the sentence is kept as text. None means that neither
    works, for example because the sentence occurs twice, or its last token merges with what
    follows.
    """
    for probe in _PROBES:
        text = reader.format(part.render(probe, condition))
        prefix_text = text.partition(probe)[0]
        for prefix in dict.fromkeys([prefix_text] if lead else ["", prefix_text]):
            ids = _encode_part(reader, part, probe, condition)
            text_ids = _encode_text(tokenizer, f"{prefix}{probe}")
            for start in range(len(ids) - len(text_ids) + 1):
                affixes = Affixes(prefix, ids[:start], ids[start + len(text_ids) :])
                if ids[start : start + len(text_ids)] == text_ids and all(
                    _encode_part(reader, part, other_text, condition)
                    == [
                        *affixes.before,
                        *_encode_text(tokenizer, f"{prefix}{other_text}"),
                        *affixes.after,
                    ]
                    for other_text in (*_PROBES, *TEXTS[:-1])
                ):
                    return affixes
    return None


def _encode_part(
    reader: InputTokenizer, part: InputTemplate, text: str, condition: str
) -> list[int]:
    return reader([part.render(text, condition)])[0].ids


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def write_tokenizer(
    tokenizer: Any, before: Sequence[int], after: Sequence[int], max_length: int, folder: Path
) -> None:
    """Write a tokenizer that puts these tokens around every text, and cuts only the text.

    Its class is PreTrainedTokenizerFast, as other classes rebuild the rules for special tokens on
    loading and would lose these.
    """
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    pieces = {name: ids for name, ids in (("<before>", before), ("<after>", after)) if ids}
    single = [name for name in ("<before>", "$A", "<after>") if name == "$A" or name in pieces]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[
            {"id": name, "ids": list(ids), "tokens": tokenizer.convert_ids_to_tokens(ids)}
            for name, ids in pieces.items()
        ],
    )
    write_text(folder / "tokenizer.json", backend.to_str(pretty=True))
    special = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    special.setdefault("pad_token", tokenizer.eos_token or tokenizer.unk_token)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "model_max_length": max_length,
            "model_input_names": list(tokenizer.model_input_names),
            "padding_side": "right",
            "truncation_side": tokenizer.truncation_side,
            "clean_up_tokenization_spaces": False,
        },
    )
