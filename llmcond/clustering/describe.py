"""Descriptions of clusters: characteristic terms, in any script, and typical texts.

A word consists of letters, digits and combining marks, such as the vowel signs of Hindi and Tamil.
Chinese, Japanese, Thai, Lao, Khmer and Burmese put no spaces between words. Their words are not
known, so all short sequences of characters are candidates, and ``select_distinct`` selects among
those that overlap.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from llmcond.clustering.methods import NOISE, Labels, Vectors
from llmcond.metrics import Floats
from llmcond.runs.languages import count_foreign_texts, read_frequent_words
from llmcond.text import condition_key

#: Number of characters at the beginning of a text that words are taken from.
_MAX_TEXT = 10_000
#: Number of characters from which a sequence without a space is data or an address, and no word.
_MAX_WORD = 50

_HAN = r"\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_HIRAGANA = r"\u3041-\u309f"
_KATAKANA = r"\u30a0-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese and Khmer
_WITHOUT_SPACES = re.compile(f"[{_HAN}{_UNSPACED}]")
#: Share of the weight of a candidate that a longer one must have to replace it.
_SAME_WORD = 0.75
#: Numbers of characters in the candidates of unspaced scripts; a mark belongs to its letter.
_HAN_SIZES, _UNSPACED_SIZES = range(1, 5), range(2, 13)
#: Thai and Lao vowels that are written before or after the consonant of their syllable.
_LEADING, _FOLLOWING = (
    "\u0e40\u0e41\u0e42\u0e43\u0e44\u0ec0\u0ec1\u0ec2\u0ec3\u0ec4",
    "\u0e30\u0e32\u0e33\u0e45\u0eb0\u0eb2\u0eb3",
)
#: Chinese characters that mostly have a grammatical function, with which no word begins or ends.
_HAN_FUNCTION = (
    "的了是在我你您他她它们們和与與也都就很这這那吗嗎呢吧啊之不有没沒一个個把被让讓给給请請"
)

_MARKUP = re.compile(
    r"<(script|style)\b[^>]*>.*?</\1\s*>|<!--.*?-->|</?[a-z!][^<>]*>", re.IGNORECASE | re.DOTALL
)
_ADDRESS = re.compile(r"\b(?:https?://|www\.)\S+|\S+@\S+\.\S+", re.IGNORECASE)
_APOSTROPHES = str.maketrans("’ʼ＇", "'''")
#: Articles and pronouns of French and Italian that an apostrophe joins to the next word.
_ELIDED = frozenset("l d j qu n c m t s lorsqu jusqu dell all nell sull un".split())  # noqa: SIM905
#: Ends of English words after an apostrophe, as in "it's" and "we'll".
_CONTRACTED = frozenset("s t m re ve ll d".split())  # noqa: SIM905


def clean_text(text: str) -> str:
    """Return the beginning of a text in lower case, without markup, addresses and greetings."""
    text = html.unescape(html.unescape(text[:_MAX_TEXT]))
    text = _ADDRESS.sub(" ", _MARKUP.sub(" ", text)).translate(_APOSTROPHES)
    text = unicodedata.normalize("NFC", text).lower()
    return _formulas().sub(" ", text)


@cache
def _formulas() -> re.Pattern[str]:
    phrases = map(re.escape, read_frequent_words().phrases)
    # Letters of Latin script end a phrase only if a word ends there.
    return re.compile("|".join(rf"(?<![a-z]){phrase}(?![a-z])" for phrase in phrases))


def word_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of a word, with the combining marks that occur in the texts.

    Its groups are named ``han``, ``katakana``, ``hiragana``, ``unspaced`` and ``word``.
    """
    characters: set[str] = set().union(*texts)
    # ``\w`` contains no marks. The joiners, which choose the form of a letter, count as marks.
    marks = "".join(c for c in sorted(characters) if unicodedata.category(c)[0] == "M")
    unspaced = f"{_HAN}{_HIRAGANA}{_KATAKANA}{_UNSPACED}"
    letter, mark = rf"(?:(?![_{unspaced}])\w)", f"[\u200c\u200d{marks}]"
    return re.compile(
        f"(?P<han>[{_HAN}]+)|(?P<katakana>[{_KATAKANA}]+)|(?P<hiragana>[{_HIRAGANA}]+)"
        f"|(?P<unspaced>[{_UNSPACED}\u200c\u200d]+)"
        f"|(?P<word>{letter}(?:{mark}|['·-]?{letter})*)"
    )


def find_words(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the words of a cleaned text, and the candidates of scripts without spaces."""
    for match in pattern.finditer(text):
        if match.lastgroup == "han":
            for candidate in _subsequences(list(match[0]), _HAN_SIZES):
                if candidate[0] not in _HAN_FUNCTION and candidate[-1] not in _HAN_FUNCTION:
                    yield candidate
        elif match.lastgroup == "unspaced":
            for candidate in _subsequences(_split_letters(match[0]), _UNSPACED_SIZES):
                if candidate[0] not in _FOLLOWING and candidate[-1] not in _LEADING:
                    yield candidate
        # Hiragana mostly inflects the word before it, and is left out.
        elif match.lastgroup != "hiragana":
            word = _strip_contraction(match[0])
            if 1 < len(word) <= _MAX_WORD:
                yield word


def _strip_contraction(word: str) -> str:
    """Return a word without an article before its apostrophe, or a contraction after it."""
    start, apostrophe, rest = word.partition("'")
    if not apostrophe:
        return word
    if start in _ELIDED and rest not in _CONTRACTED:
        return rest
    return "not" if rest == "t" else start if rest in _CONTRACTED else word


def _split_letters(word: str) -> list[str]:
    """Split a word into letters, each with the marks that follow it."""
    letters: list[str] = []
    for character in word:
        if letters and (unicodedata.category(character)[0] == "M" or character in "\u200c\u200d"):
            letters[-1] += character
        else:
            letters.append(character)
    return letters


def _subsequences(letters: list[str], sizes: range) -> Iterator[str]:
    for size in sizes:
        for start in range(len(letters) - size + 1):
            yield "".join(letters[start : start + size])


def is_unspaced(word: str) -> bool:
    """Return whether a word is a candidate of a script without spaces."""
    return _WITHOUT_SPACES.match(word) is not None


def is_number(word: str) -> bool:
    """Return whether a word has no letter, such as a date or the number of an order."""
    return not any(character.isalpha() for character in word)


def select_distinct(terms: Sequence[str], weights: Floats, n_terms: int = 4) -> list[str]:
    """Return at most ``n_terms`` of the terms, none of which overlaps another one.

    Args:
        terms: (n,) words, and candidates of scripts without spaces, in descending order of weight.
        weights: (n,) their weights. A candidate is replaced by the longest one that contains it
            and has nearly the same weight, since it is then a part of a longer word.
        n_terms: largest number of terms.
    """
    selected: list[str] = []
    unspaced = [
        (term, weight) for term, weight in zip(terms, weights, strict=True) if is_unspaced(term)
    ]
    for term, weight in zip(terms, weights, strict=True):
        longest = term
        if is_unspaced(term):
            longer = [t for t, w in unspaced if term in t and w >= _SAME_WORD * weight]
            longest = max(longer, key=len)
        if not any(_overlap(longest, other) for other in selected):
            selected.append(longest)
        if len(selected) == n_terms:
            break
    return selected


def _overlap(first: str, second: str) -> bool:
    """Return whether two candidates of scripts without spaces overlap, or are equal."""
    if not (is_unspaced(first) and is_unspaced(second)):
        return first == second
    if first in second or second in first:
        return True
    sizes = range(2, min(len(first), len(second)))
    return any(first[-n:] == second[:n] or second[-n:] == first[:n] for n in sizes)


#: Numbers of typical texts, and of terms that a cluster's name is selected from.
_TYPICAL, _CANDIDATES = 3, 1_000


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """A cluster, or the texts that are in no cluster (number -1).

    Attributes:
        cluster: number of the cluster; 0 is the largest.
        size: number of texts.
        name: the characteristic terms, separated by commas; empty if there are none.
        typical: the texts nearest to the centre; empty for texts in no cluster.
    """

    cluster: int
    size: int
    name: str
    typical: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as ``--json`` prints it."""
        return {**asdict(self), "typical": list(self.typical)}


def describe_clusters(
    texts: Sequence[str], vectors: Vectors, labels: Labels
) -> list[ClusterSummary]:
    """Describe the clusters of n texts, the largest first, texts in no cluster last.

    Args:
        texts: (n,) the texts.
        vectors: (n, d) the vectors that were clustered.
        labels: (n,) the number of each text's cluster.
    """
    numbers = [*range(int(labels.max()) + 1), *([NOISE] if NOISE in labels else [])]
    frequent = read_frequent_words().greetings
    if count_foreign_texts(texts)[0]:
        frequent |= read_frequent_words().foreign
    cleaned = [clean_text(text) for text in texts]
    pattern = word_pattern(cleaned)
    words = [list(find_words(text, pattern)) for text in cleaned]
    names = _choose_names(words, labels, numbers, frequent)
    clusters = []
    for number in numbers:
        inside = np.flatnonzero(labels == number)
        typical: dict[str, str] = {}
        if number != NOISE:
            centre = vectors[inside].mean(axis=0)
            for i in inside[np.argsort(((vectors[inside] - centre) ** 2).sum(axis=1))].tolist():
                # Texts that differ in case, spaces or punctuation only are typical once.
                key = " ".join(match[0] for match in pattern.finditer(cleaned[i]))
                typical.setdefault(key or condition_key(texts[i]), texts[i])
                if len(typical) == _TYPICAL:
                    break
        summary = ClusterSummary(number, len(inside), names[number], tuple(typical.values()))
        clusters.append(summary)
    return clusters


def _choose_names(
    words: Sequence[Sequence[str]],
    labels: Labels,
    numbers: Sequence[int],
    frequent: frozenset[str],
) -> dict[int, str]:
    """Return the terms whose mean TF-IDF in a cluster exceeds that in all other texts the most.

    Numbers and ``frequent`` words are only used for a cluster without any other term, and so are
    candidates of scripts without spaces that a single text contains.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer

    def select_terms(text_words: Sequence[str]) -> list[str]:
        return [word for word in text_words if word not in ENGLISH_STOP_WORDS]

    vectorizer = TfidfVectorizer(analyzer=select_terms, sublinear_tf=True, max_features=50_000)
    try:
        weights = vectorizer.fit_transform(words)
    except ValueError:  # no text contains a word, only punctuation or single letters
        return dict.fromkeys(numbers, "")
    terms, total = vectorizer.get_feature_names_out(), np.asarray(weights.sum(axis=0))[0]
    counts = weights.getnnz(axis=0)
    is_secondary = np.array(
        [
            term in frequent or is_number(term) or (is_unspaced(term) and count == 1)
            for term, count in zip(terms, counts, strict=True)
        ]
    )
    names = {}
    for number in numbers:
        inside = labels == number
        cluster_total, n = np.asarray(weights[inside].sum(axis=0))[0], int(inside.sum())
        excess = cluster_total / n - (total - cluster_total) / max(len(words) - n, 1)
        order = np.lexsort((-excess, is_secondary))
        order = order[excess[order] > 0]
        primary = order[~is_secondary[order]]
        best = (primary if len(primary) else order)[:_CANDIDATES]
        name_terms = [] if number == NOISE else select_distinct(terms[best].tolist(), excess[best])
        names[number] = ", ".join(name_terms)
    return names
