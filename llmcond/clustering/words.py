"""Words of texts in any script, for the names of clusters.

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
from functools import cache

from llmcond.metrics import Floats
from llmcond.runs.languages import read_frequent_words

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
