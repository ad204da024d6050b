"""Conditions inside a tokenizer: what it puts around every text by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.files import write_json, write_text
from llmcond.prompts.template import Part

#: What an export is tried out on: beginnings and ends of several kinds, and one text that is cut.
TEXTS = (
    "Two women read a book at the beach.",
    "a man rides a horse in the snow",
    "3 dogs, 2 cats (and one bird)!",
    '"Is it raining?" she asked; nobody knew',
    "Crème brûlée für zwei – 東京 in May 2024",
    "the end " * 700,
)
#: Texts by which the tokens around one are found; words that no condition is likely to have.
_PROBES = ("Zebras quickly juggled 17 oranges", "Three dogs walk in the park")


@dataclass(frozen=True)
class Around:
    """What stands around every text under one condition.

    Attributes:
        lead: text in front of it that only a tokenizer can join to it.
        before, after: token ids, special ones included.
    """

    lead: str
    before: list[int]
    after: list[int]


def around(
    reader: InputTokenizer, tokenizer: Any, part: Part, condition: str, *, lead: bool = False
) -> Around | None:
    """Return what a template puts around every sentence under a condition.

    Tokens where that is the same as what the encoder reads; otherwise, or with ``lead``, what
    stands in front is text. None: it is neither, as where the sentence is there twice, or its
    last token is joined to what follows.
    """
    for probe in _PROBES:
        text = reader.format(part.render(probe, condition))
        front = text.partition(probe)[0]
        for own in dict.fromkeys([front] if lead else ["", front]):
            ids = _read(reader, part, probe, condition)
            bare = _bare(tokenizer, f"{own}{probe}")
            for start in range(len(ids) - len(bare) + 1):
                found = Around(own, ids[:start], ids[start + len(bare) :])
                if ids[start : start + len(bare)] == bare and all(
                    _read(reader, part, one, condition)
                    == [*found.before, *_bare(tokenizer, f"{own}{one}"), *found.after]
                    for one in (*_PROBES, *TEXTS[:-1])
                ):
                    return found
    return None


def _read(reader: InputTokenizer, part: Part, text: str, condition: str) -> list[int]:
    return reader([part.render(text, condition)])[0].ids


def _bare(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def write_tokenizer(
    tokenizer: Any, before: Sequence[int], after: Sequence[int], max_length: int, folder: Path
) -> None:
    """Write a tokenizer that puts these tokens around every text, and cuts nothing but the text.

    Its class is the plain one, as others make the rules for special tokens anew when they are
    loaded, and would forget these.
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
