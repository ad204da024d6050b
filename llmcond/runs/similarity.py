"""The common interface of models that compare two texts under a condition."""

from __future__ import annotations

import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import overload

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import as_list
from llmcond.base.errors import UserError, shortened_repr
from llmcond.base.output import log
from llmcond.base.text import as_condition
from llmcond.encoders.checkpoint import Checkpoint

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
    record = tomllib.loads(Path(__file__).with_name("languages.toml").read_text("utf-8"))
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


Vectors = NDArray[np.float32]


class SimilarityModel(ABC):
    """A model that compares sentences under conditions."""

    __slots__ = ()

    @overload
    def similarity(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, sentences1: str, sentences2: str, conditions: str, *, show_progress: bool = False
    ) -> float: ...

    @overload
    def similarity(
        self,
        sentences1: Iterable[str],
        sentences2: Iterable[str],
        conditions: str | Iterable[str],
        *,
        show_progress: bool = False,
    ) -> Vectors: ...

    def similarity(
        self,
        sentences1: str | Iterable[str],
        sentences2: str | Iterable[str],
        conditions: str | Iterable[str],
        *,
        show_progress: bool = False,
    ) -> Vectors | float:
        """Compute the similarity of two sentences under the condition of each row.

        The similarity is the cosine of their embeddings, unless the head compares embeddings in
        another way. A cross-encoder predicts the rating, which is mostly between 0 and 1.

        Args:
            sentences1: n texts: a list, an iterator, a column of a data frame or an Arrow array.
                Or a single text.
            sentences2: n other texts, or a single text.
            conditions: n conditions, one for each row, or one condition for all rows.
            show_progress: Whether to show a progress bar on standard error.

        Returns:
            The similarities, (n,) float32. A float if the sentences are single texts.

        Raises:
            UserError: The lengths differ, a sentence or condition is empty, or one argument is a
                text and the other a list of texts.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        if isinstance(sentences1, str) != isinstance(sentences2, str):
            raise UserError(
                "one of sentences1 and sentences2 is a text and the other a list. Give two texts, "
                "or two lists."
            )
        if isinstance(sentences1, str) and isinstance(sentences2, str):
            return float(
                self.similarity([sentences1], [sentences2], as_condition_list(conditions))[0]
            )
        texts1, texts2 = as_list(sentences1, "sentences1"), as_list(sentences2, "sentences2")
        if len(texts1) != len(texts2):
            raise UserError(
                f"sentences1 has {len(texts1)} texts and sentences2 has {len(texts2)}. Give two "
                "lists of the same length."
            )
        row_conditions = (
            conditions if isinstance(conditions, str) else as_list(conditions, "conditions")
        )
        rows1, rows2 = (
            pair_with_conditions(texts1, row_conditions),
            pair_with_conditions(texts2, row_conditions),
        )
        return self._compute_similarity(rows1, rows2, show_progress)

    #: The name in sentence-transformers, whose ``similarity`` returns a matrix.
    similarity_pairwise = similarity

    def similarity_matrix(
        self,
        sentences1: Iterable[str],
        sentences2: Iterable[str],
        condition: str,
        *,
        show_progress: bool = False,
    ) -> Vectors:
        """Compute the similarity of each sentence to each other sentence under a condition.

        The similarities are those of ``similarity``. An embedder encodes n + m sentences; a
        cross-encoder reads n * m pairs.

        Args:
            sentences1: n texts: a list, an iterator, a column of a data frame or an Arrow array.
            sentences2: m other texts.
            condition: The condition.
            show_progress: Whether to show a progress bar on standard error.

        Returns:
            The similarities, (n, m) float32.

        Raises:
            UserError: A sentence or the condition is empty, or there are several conditions.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        if not isinstance(condition, str):
            raise UserError(
                "condition is not a text. All entries of the matrix have the same condition; call "
                "similarity_matrix once for each."
            )
        texts1, texts2 = (
            [texts] if isinstance(texts, str) else texts for texts in (sentences1, sentences2)
        )
        first, second = (pair_with_conditions(texts, condition) for texts in (texts1, texts2))
        return self._compute_matrix(first, second, show_progress)

    def _compute_matrix(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        """Return the similarities, (n, m), of n (sentence, condition) rows to m other ones."""
        repeated = [row for row in first for _ in second]
        values = self._compute_similarity(repeated, [*second] * len(first), show_progress)
        return values.reshape(len(first), len(second))

    @abstractmethod
    def _compute_similarity(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        """Return the similarities, (n,), of n (sentence, condition) rows and n other ones."""


def as_condition_list(conditions: str | Iterable[str]) -> Sequence[str]:
    """Return the condition of a single sentence as a list.

    Raises:
        UserError: It is not a text.
    """
    if isinstance(conditions, str) or not isinstance(conditions, Iterable):
        return [as_condition(conditions)]
    raise UserError(
        "the sentence is a text and the condition a list. Give two texts, or two lists."
    )


def as_conditions(conditions: str | Iterable[str]) -> list[str]:
    """Return one condition, or several, as a list.

    Raises:
        UserError: There are none, or one is empty or not a text.
    """
    listed = [conditions] if isinstance(conditions, str) else as_list(conditions, "conditions")
    if not listed:
        raise UserError("there are no conditions; give at least one.")
    names = [f"condition {number} of {len(listed)}" for number in range(1, len(listed) + 1)]
    return [as_condition(*pair) for pair in zip(listed, names, strict=True)]


def pair_with_conditions(
    sentences: Iterable[str], conditions: str | Iterable[str]
) -> list[tuple[str, str]]:
    """Return (sentence, condition) rows, with the conditions in their normal form.

    A single condition applies to all sentences.

    Raises:
        UserError: The lengths differ, or an item is empty or not a text.
    """
    texts = as_list(sentences, "sentences")
    row_conditions = (
        [conditions] * len(texts)
        if isinstance(conditions, str)
        else as_list(conditions, "conditions")
    )
    if len(row_conditions) != len(texts):
        raise UserError(
            f"there are {len(texts)} sentences and {len(row_conditions)} conditions. Give one "
            "condition for each sentence, or one condition for all."
        )
    rows = list(zip(texts, row_conditions, strict=True))
    for number, row in enumerate(rows):
        for noun, text in zip(("sentence", "condition"), row, strict=True):
            if not isinstance(text, str):
                raise UserError(
                    f"{noun} {number + 1} of {len(rows)} is {shortened_repr(text)}, which is not a "
                    "text. Give a text."
                )
            if not text.strip():
                which = f"{noun} {number + 1} of {len(rows)}" if number else f"the first {noun}"
                raise UserError(f"{which} is empty. Give a text.")
    normal = {condition: as_condition(condition) for _, condition in rows}
    return [(text, normal[condition]) for text, condition in rows]
