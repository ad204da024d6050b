"""Functions for ``make_aspects.py`` that rewrite a text without changing its content."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Final

CONTRACTIONS: Final = (
    ("cannot", "can't"),
    ("will not", "won't"),
    ("it is", "it's"),
    ("that is", "that's"),
    ("there is", "there's"),
    ("I am", "I'm"),
    ("I have", "I've"),
    ("I would", "I'd"),
    ("I will", "I'll"),
    ("we are", "we're"),
    ("we have", "we've"),
    ("they are", "they're"),
    ("you are", "you're"),
    ("let us", "let's"),
    *((f"{verb} not", f"{verb}n't") for verb in ("do", "does", "did", "is", "are", "was", "were")),
    *((f"{verb} not", f"{verb}n't") for verb in ("has", "have", "had", "would", "could", "should")),
)
SLANG: Final = (
    ("because", "cos"),
    ("want to", "wanna"),
    ("going to", "gonna"),
    ("please", "pls"),
    ("thank you", "thx"),
    ("thanks", "thx"),
    ("you", "u"),
    ("your", "ur"),
    ("really", "rly"),
    ("very", "super"),
    ("about", "abt"),
    ("with", "w/"),
    ("tomorrow", "tmrw"),
    ("probably", "prob"),
    ("people", "ppl"),
)
FORMAL: Final = (
    ("thanks", "thank you"),
    ("a lot of", "a great deal of"),
    ("lots of", "a considerable number of"),
    ("really", "truly"),
    ("pretty", "rather"),
    ("buy", "purchase"),
    ("bought", "purchased"),
    ("also", "furthermore"),
    ("kids", "children"),
)
TAGS: Final = ("tbh", "lol", "ngl", "btw", "imo", "fyi", "just saying", "haha", "anyway")
HESITATIONS: Final = (
    "um,",
    "well,",
    "I mean,",
    "let's see,",
    "er,",
    "how do I put this,",
    "so, like,",
)
OPENINGS: Final = (
    "I am writing with regard to the following.",
    "Please permit me to state my case.",
    "It should be noted that this is written in good faith.",
    "Further to our previous correspondence, allow me to add these lines.",
    "With reference to the above, I wish to put on record what occurred.",
    "",
    "",
    "",
)
EXCITED: Final = ("OMG", "Wow", "Guys", "You won't believe this", "Aaah", "Whoa", "Okay so")


def _replace(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Replace whole words, and preserve a capital at their beginning."""
    replacements = {old.lower(): new for old, new in pairs}
    pattern = "|".join(sorted(replacements, key=len, reverse=True))

    def replace(match: re.Match[str]) -> str:
        new = replacements[match[0].lower()]
        return new[0].upper() + new[1:] if match[0][0].isupper() else new

    return re.sub(rf"\b(?:{pattern})\b", replace, text, flags=re.IGNORECASE)


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) ", text)


def _casual(text: str, rng: Random) -> str:
    text = _replace(_replace(text, CONTRACTIONS), SLANG).lower().rstrip(".")
    tag = rng.choice(TAGS)
    text = text if rng.random() < 0.5 else rng.choice((f"{tag} {text}", f"{text} {tag}"))
    return re.sub(r"(?<!\.)\. ", rng.choice((". ", "... ", " - ", ", ")), text)


def _formal(text: str, rng: Random) -> str:
    expanded = _replace(text, tuple((short, long) for long, short in CONTRACTIONS))
    expanded = _replace(expanded, FORMAL).replace("!", ".")
    return f"{rng.choice(OPENINGS)} {expanded}".strip()


def _shouting(text: str, rng: Random) -> str:
    return re.sub(r"[.!]+(?= |$)", lambda _: "!" * rng.randint(1, 3), text.upper())


def _terse(text: str, rng: Random) -> str:
    text = re.sub(
        r"\b(?:the|a|an|my|our|your|very|really|just|i am|i'm|it is|it's|there is|i have|i've)\b ",
        "",
        text,
        flags=re.IGNORECASE,
    )
    text = re.sub(r"(^|[.!?] )(?:I|We|It|They|He|She) ", r"\1", text).replace("!", ".")
    text = re.sub(r"(^|[.!?] )([a-z])", lambda match: match[1] + match[2].upper(), text)
    return re.sub(",? and ", rng.choice((", ", " + ", " & ")), text)


def _excited(text: str, rng: Random) -> str:
    text = re.sub(r"(?<!\.)\.(?= |$)", lambda _: rng.choice(("!", "!!", "!!!")), text)
    text = re.sub(r"\bso\b", "sooo", text)
    return rng.choice(
        (f"{rng.choice(EXCITED)}! {text}", f"{text} {rng.choice((':D', '!!1', 'xx', '<3'))}")
    )


def _hesitant(text: str, rng: Random) -> str:
    sentences = _sentences(text)
    for index, sentence in enumerate(sentences):
        if index == 0 or rng.random() < 0.5:
            opening = rng.choice(HESITATIONS)
            first = sentence if re.match(r"I\b", sentence) else sentence[:1].lower() + sentence[1:]
            sentences[index] = f"{opening[0].upper()}{opening[1:]} {first}"
    return re.sub(
        r"(?<!\.)\.$", rng.choice((".", "...", ", sort of.", ", I suppose.")), " ".join(sentences)
    )


# Each manner takes a text and a random generator, and returns the rewritten text.
MANNERS: Final[Mapping[str, Callable[[str, Random], str]]] = MappingProxyType(
    {
        "plain": lambda text, _: text,
        "casual": _casual,
        "formal": _formal,
        "shouting": _shouting,
        "terse": _terse,
        "excited": _excited,
        "hesitant": _hesitant,
    }
)
