"""Generate reviews with opinions about several aspects, for ``make_aspects.py``.

A domain file with a table ``[aspects]`` has, for each aspect, its ``names`` (noun phrases), the
adjectives ``good`` and ``bad`` that suit it, and the clauses ``praise``, ``blame`` and ``neutral``,
about half of which do not name the aspect. A table ``[facts]`` has attributes that are not
opinions, and ``texts`` are reviews that were written as a whole, with ``+``, ``-`` or ``0`` for
each aspect. ``left_out = true`` keeps a domain for measurements.

A review judges one to five aspects independently of each other. Next to each review there are
others with the opposite opinion of one aspect, and otherwise the same words. A hidden attribute
without a condition, ``frame``, marks them, so that groups of training texts combine them. The
attribute ``sentiment`` sums up the opinions of a review; its condition is that of other texts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

#: The values of an opinion, and the sign of each in the texts of a domain file.
SIGNS: Final = {"+": "positive", "-": "negative", "0": "neutral"}
#: The values of the sentiment of a whole text.
SENTIMENTS: Final = frozenset({*SIGNS.values(), "mixed"})
OPPOSITE: Final = {"positive": "negative", "negative": "positive"}
CLAUSES: Final = {"positive": "praise", "negative": "blame", "neutral": "neutral"}
WORDS: Final = tomllib.loads(
    (Path(__file__).parent / "aspects" / "opinion_words.toml").read_text(encoding="utf-8")
)
#: Names in the plural, up to their first preposition.
PLURAL: Final = re.compile(r".*[^siu]s\Z|.*(?:people|children|staff)\Z")
#: Shares of texts with one to five aspects, of opinions, and of clauses (against predicates).
COUNTS: Final = ((1, 2, 3, 4, 5), (8, 48, 30, 9, 5))
OPINIONS: Final = (("positive", "negative", "neutral"), (44, 44, 12))
CLAUSE_SHARE: Final = 0.6
FACT_SHARE: Final = 0.3


@dataclass(frozen=True)
class Opinion:
    """The opinion about one aspect, and its words."""

    aspect: str
    value: str
    words: str


def generate_opinions(
    content: Mapping[str, Any], number: int, rng: Random
) -> list[tuple[str, dict[str, str]]]:
    """Return texts with their attributes: the written ones, and generated ones.

    Args:
        content: content of a domain file with the tables ``aspects`` and ``facts``.
        number: number of texts.
        rng: random generator.
    """
    texts: dict[str, dict[str, str]] = {}
    for written in content.get("texts", []):
        values = {aspect: SIGNS[sign] for aspect, sign in written.items() if aspect != "text"}
        texts[written["text"]] = values | {"sentiment": _sum_up(values.values())}
    frame = 0
    while len(texts) < number:
        count = rng.choices(*COUNTS)[0]
        aspects = rng.sample(list(content["aspects"]), min(count, len(content["aspects"])))
        opinions = [_opinion(content, aspect, rng.choices(*OPINIONS)[0], rng) for aspect in aspects]
        fact = rng.choice(list(content["facts"])) if content.get("facts") else None
        attrs, sentence = {"frame": str(frame)}, ""
        if fact is not None and rng.random() < FACT_SHARE:
            values = content["facts"][fact]["values"]
            attrs[fact] = rng.choice(list(values))
            sentence = rng.choice(values[attrs[fact]])
        seed = rng.random()
        variants = [opinions]
        for position, opinion in enumerate(opinions):
            if opinion.value in OPPOSITE and rng.random() < 0.6:
                other = _opinion(content, opinion.aspect, OPPOSITE[opinion.value], rng)
                variants.append([*opinions[:position], other, *opinions[position + 1 :]])
        for variant in variants:
            text = _join(variant, sentence, Random(seed))
            values = {opinion.aspect: opinion.value for opinion in variant}
            texts[text] = attrs | values | {"sentiment": _sum_up(values.values())}
        frame += 1
    return list(texts.items())[:number]


def _sum_up(opinions: Collection[str]) -> str:
    """Return the sentiment of a text with some opinions."""
    signs = set(opinions) - {"neutral"}
    return "mixed" if len(signs) > 1 else next(iter(signs), "neutral")


def opinion_wordings(content: Mapping[str, Any], rng: Random) -> dict[str, dict[str, Any]]:
    """Return the wordings of the conditions of a domain, in the format of ``to_wordings``."""
    conditions = {}
    for aspect, entry in content["aspects"].items():
        names = entry["names"]
        para = [
            template.format(name=name, bare=_bare(name))
            for template in WORDS["wordings"]
            for name in [names[0] if rng.random() < 0.4 else rng.choice(names)]
        ]
        question = rng.choice(WORDS["questions"]).format(name=names[0])
        text = f"the opinion about {names[0]}"
        conditions[aspect] = {"text": text, "question": question, "para": para}
    for fact, entry in content.get("facts", {}).items():
        conditions[fact] = {
            "text": entry["text"], "question": entry["question"], "para": entry["other"]
        }  # fmt: skip
    return conditions


def _bare(name: str) -> str:
    return re.sub(r"^(?:the|their|its) ", "", name)


def _opinion(content: Mapping[str, Any], aspect: str, value: str, rng: Random) -> Opinion:
    entry = content["aspects"][aspect]
    clauses = entry[CLAUSES[value]]
    if clauses and rng.random() < CLAUSE_SHARE:
        return Opinion(aspect, value, rng.choice(clauses))
    name = rng.choice(entry["names"])
    template = rng.choice(WORDS["predicates"][value])
    while "{bare}" in template and not name.startswith("the "):
        template = rng.choice(WORDS["predicates"][value])
    is_plural = PLURAL.match(re.split(r" (?:of|for|to|in|with|on|at|from|that|after) ", name)[0])
    for verb, plural in (("is", "are"), ("was", "were")):
        template = template.replace(f"[{verb}]", plural if is_plural else verb)
    choose = {"good": entry["good"], "bad": entry["bad"], "very": WORDS["very"]}
    words = re.sub(r"\{(good|bad|very)\}", lambda match: rng.choice(choose[match[1]]), template)
    words = words.format(name=name, bare=_bare(name))
    return Opinion(aspect, value, re.sub(r" +", " ", words).strip(" ,"))


def _join(opinions: Sequence[Opinion], fact: str, rng: Random) -> str:
    """Return the text of opinions, joined as their values suggest; a seed gives the same frame."""
    opening, fact_first = rng.choice(WORDS["openings"]), rng.random() < 0.6
    text, last, is_joined = opinions[0].words, opinions[0].value, False
    for opinion in opinions[1:]:
        choice = rng.random()
        joints: list[str] = WORDS["alike" if opinion.value == last else "unlike"]
        if is_joined:  # a sentence has one joint only
            joints = [joint for joint in joints if joint.startswith("{a}. ")]
        joint = joints[int(choice * len(joints))]
        head, stop, tail = text.rpartition(". ")  # a joint may begin the last sentence
        joined = joint.replace("{a}", tail).replace("{b}", opinion.words)
        text, last = head + stop + joined, opinion.value
        is_joined = not joint.startswith("{a}. ")
    sentences = [opening, f"{fact}." if fact and fact_first else "", f"{text}."]
    sentences.append(f"{fact}." if fact and not fact_first else "")
    joined = " ".join(filter(None, sentences))
    joined = re.sub(r"([?!])\.", r"\1", joined)
    return re.sub(r"(^|[.!?] )([a-z])", lambda match: match[1] + match[2].upper(), joined)
