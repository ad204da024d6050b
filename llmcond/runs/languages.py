"""Detection of texts that are not in English, for encoders that were trained on English only."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath

from llmcond.encoders.checkpoints.checkpoint import Checkpoint
from llmcond.log import log

#: Numbers of texts, and of characters at the beginning of each, that are looked at.
_MAX_TEXTS, _MAX_CHARACTERS = 1_000, 1_000
#: Share of texts in other languages from which they are reported.
_MIN_SHARE = 0.1
_LATIN = re.compile(r"[A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ]")
_LETTER = re.compile(r"[^\W\d_]")
#: Addresses, code and markup, whose words are of no language.
_NO_WORDS = re.compile(r"https?://\S+|\S+@\S+|`[^`]*`|<[^<>]*>|[#@/\\$]\S+|\b\w*[_=(){};]\S*")
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class FrequentWords:
    """Frequent words, which distinguish languages, and which say little about a text.

    Attributes:
        english: frequent English words.
        foreign: frequent words of other languages that are not English.
        greetings: words of greetings and closing formulas.
        phrases: such formulas of several words, or of scripts without spaces between words.
    """

    english: frozenset[str]
    foreign: frozenset[str]
    greetings: frozenset[str]
    phrases: tuple[str, ...]


@cache
def read_frequent_words() -> FrequentWords:
    """Read the frequent words (languages.toml)."""
    record = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    formulas = record["formulas"]
    return FrequentWords(
        frozenset(record["english"].split()),
        frozenset(" ".join(record["other"].values()).split()),
        frozenset(formulas["greetings"].split()),
        tuple(formulas["phrases"]),
    )


def seems_foreign(text: str) -> bool:
    """Return whether a text seems to be in another language than English.

    Most letters of such a text are in another script, or it has at least two words that are
    frequent in other languages or have letters that English lacks, and more of them than frequent
    English words. A capitalised word with such letters does not count, as it may be a name.
    """
    text = _NO_WORDS.sub(" ", text[:_MAX_CHARACTERS])
    latin = len(_LATIN.findall(text))
    if len(_LETTER.findall(text)) > max(2 * latin, 1):
        return True
    frequent, n_foreign, n_english = read_frequent_words(), 0, 0
    for word in _WORD.findall(text):
        is_accented = word.islower() and not word.isascii()
        n_foreign += is_accented or word.lower() in frequent.foreign
        n_english += word.lower() in frequent.english
    return n_foreign > max(1, n_english)


def count_foreign_texts(texts: Sequence[str]) -> tuple[int, int]:
    """Return how many texts seem foreign, of how many that were looked at.

    The number is 0 if fewer than a tenth of them seem to be, because single texts may be mistaken.
    """
    looked_at = texts[:: -(-len(texts) // _MAX_TEXTS) or 1]
    n = sum(map(seems_foreign, looked_at))
    return (n if n >= _MIN_SHARE * len(looked_at) else 0), len(looked_at)


def report_foreign_texts(texts: Sequence[str], checkpoint: Checkpoint) -> None:
    """Log how many texts seem not to be in English, if the encoder was trained on English only.

    Nothing is logged if the languages of the encoder are unknown.
    """
    base = checkpoint.base or checkpoint
    is_english = base.known.english_only if base.known else _has_english_card(base.folder)
    n, n_looked_at = count_foreign_texts(texts) if is_english else (0, 0)
    if not n:
        return
    texts_seem = "text seems" if n_looked_at == 1 else "texts seem"
    sampled = "sampled " if n_looked_at < len(texts) else ""
    log.info(
        f"{n:,} of {n_looked_at:,} {sampled}{texts_seem} not to be in English, which "
        f"{PurePath(base.name).name} was trained on, so expect little of their vectors. Use a "
        "multilingual encoder, such as BAAI/bge-m3"
    )


def _has_english_card(folder: Path) -> bool:
    """Return whether English is the only language that the model card of a checkpoint names."""
    try:
        card = (folder / "README.md").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    header = re.match(r"---\n(.*?\n)---", card, re.DOTALL)
    if header is None:
        return False
    listed = re.search(r"^language:\s*(\[[^\]]*\]|(?:- *\S+\s)+|\S+)", header[1], re.MULTILINE)
    return listed is not None and set(re.findall("[a-z]+", listed[1])) == {"en"}
