"""Write the bundled sample data: sentence pairs rated 1 to 5 under a condition.

    python scripts/make_sample.py [--out llmcond/data/sample] [--check]

Every sentence describes a small invented scene (who, how many, doing what, where, ...). Every
sentence pair is rated twice, under two conditions that ask about two different slots. The ratings
come from the tables below: 5 same value, 4 close, 3 related, 2 loosely related, 1 different.

The ratings can only be predicted from *both sentences and the condition*:

* The two ratings of a pair mirror each other around 3 (see ``BLOCKS``), so a score that does
  not depend on the condition is right on one row and wrong on the other.
* Ratings are symmetric around 3 for every slot and every wording of its condition, within
  every split, so the condition alone predicts nothing.
* Everything that no condition asks about is sampled independently of the ratings.
* A sentence is used in one pair only, so no sentence is shared between splits.

The script needs the standard library only and writes the same bytes on every Python version.
With ``--check`` it writes nothing: it compares the files with newly generated ones, and exits with
1 on a mismatch.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Final, TypeVar

from common import sample_files

T = TypeVar("T")

SEED: Final = 20240229
HEADER: Final = ("sentence1", "sentence2", "condition", "label")
# Split name -> minimum number of sentence pairs (each gives two rows).
SPLIT_PAIRS: Final = {"train": 1400, "dev": 200, "test": 300}
MIN_WORDS: Final = 12
MAX_WORDS: Final = 28


@dataclass(frozen=True)
class Value:
    """One value of a slot: its wordings, and its rating against each earlier value and itself."""

    forms: tuple[str, ...]
    ratings: str


@dataclass(frozen=True)
class Slot:
    """One aspect of a scene, with the wordings of the condition that asks about it."""

    name: str
    conditions: tuple[str, ...]
    values: tuple[Value, ...]

    def rating(self, first: int, second: int) -> int:
        """Return the similarity of two values, from 1 to 5."""
        low, high = sorted((first, second))
        return int(self.values[high].ratings[low])

    def value_pairs(self, rating: int) -> dict[int, list[int]]:
        """Map each value to its partners at this rating; values without partners are left out."""
        indices = range(len(self.values))
        partners_of = {i: [j for j in indices if self.rating(i, j) == rating] for i in indices}
        return {i: partners for i, partners in partners_of.items() if partners}


@dataclass(frozen=True)
class Question:
    """A slot that a pair's condition asks about, and the rating that the pair must have in it."""

    slot: Slot
    rating: int


#: Sentences, condition and rating: a line of the data files.
Row = tuple[str, str, str, int]

# --- Vocabulary -------------------------------------------------------------------------------
# Each slot has a line with the wordings of its condition, and a line for each value: its ratings
# against the values above it and itself (5), and its wordings. Inflected forms are separated by
# "/": nouns as singular/plural, activities as third person/plural/participle.


def _read_slot(name: str, table: str) -> Slot:
    """Return the slot of a table."""
    conditions, *lines = re.split(r"\n +(?=\d)", table.strip())
    values = []
    for line in lines:
        ratings, _, forms = " ".join(line.split()).partition(" ")
        values.append(Value(tuple(forms.split("; ")), ratings))
    return Slot(name, tuple(conditions.split("; ")), tuple(values))


PEOPLE: Final = _read_slot(
    "people",
    """
    the age and gender of the people; what kind of people they are; who the people are
    5 woman/women; lady/ladies
    35 man/men; gentleman/gentlemen
    315 girl/girls; schoolgirl/schoolgirls
    1345 boy/boys; schoolboy/schoolboys
    42215 grandmother/grandmothers; elderly woman/elderly women
    241235 grandfather/grandfathers; elderly man/elderly men
    """,
)
NUMBER: Final = _read_slot(
    "number",
    """
    the number of people; how many people there are; the size of the group of people
    5 a; one; a lone
    45 two; a pair of
    345 three; a trio of
    2345 four; a group of four
    12345 six; half a dozen
    112235 twelve; a dozen
    1111245 a large crowd of; a huge crowd of
    """,
)
# The colours form a wheel: neighbours are close, opposites are different.
COLOUR: Final = _read_slot(
    "colour",
    """
    the colour of the clothing; what colour someone is wearing; the clothing colour
    5 red; scarlet
    45 orange; bright orange
    345 yellow; lemon yellow
    2345 green; emerald green
    12345 turquoise; teal
    212345 blue; deep blue
    3212345 purple; violet
    43212345 pink; rose pink
    """,
)
ACTIVITY: Final = _read_slot(
    "activity",
    """
    the activity; what the people are doing; how the time is being spent
    5 sings a song/sing a song/singing a song; sings/sing/singing
    45 plays the guitar/play the guitar/playing the guitar;
      strums a guitar/strum a guitar/strumming a guitar
    335 dances/dance/dancing; dances a waltz/dance a waltz/dancing a waltz
    1115 plays chess/play chess/playing chess
    11145 plays cards/play cards/playing cards
    111335 does a jigsaw puzzle/do a jigsaw puzzle/doing a jigsaw puzzle;
      solves a jigsaw/solve a jigsaw/solving a jigsaw
    1112225 reads a book/read a book/reading a book; reads a novel/read a novel/reading a novel
    11111245 writes a letter/write a letter/writing a letter;
      writes in a notebook/write in a notebook/writing in a notebook
    222112235 draws a picture/draw a picture/drawing a picture; sketches/sketch/sketching
    1111211115 eats a meal/eat a meal/eating a meal;
      eats sandwiches/eat sandwiches/eating sandwiches
    11112121145 drinks tea/drink tea/drinking tea; sips tea/sip tea/sipping tea
    """,
)
LOCATION: Final = _read_slot(
    "place",
    """
    the place; where the scene takes place; the location
    5 in the park; in a city park
    45 in a garden; in the back garden
    335 in the forest; in the woods
    2225 on the beach; at the seaside
    32345 by the lake; on the shore of a lake
    111115 in a coffee shop; in a café
    1111145 in a restaurant; in a diner
    12111335 in the kitchen; in a farmhouse kitchen
    121112245 in the living room; in the sitting room
    """,
)
TIME: Final = _read_slot(
    "time",
    """
    the time of day; what time of day it is; when in the day it happens
    5 at sunrise; at dawn
    45 in the morning; during the morning
    345 at noon; at midday
    1345 in the afternoon; during the afternoon
    21235 at sunset; at dusk
    112345 in the evening; during the evening
    2112345 at night; late at night
    """,
)
WEATHER: Final = _read_slot(
    "weather",
    """
    the weather; what the weather is like; the weather conditions
    5 on a sunny day; in bright sunny weather
    45 on a scorching hot day; during a heatwave
    325 on a partly cloudy day; on a day with a few clouds
    2145 on an overcast day; on a dull, cloudy day
    11235 on a drizzly day; on a day of light rain
    111245 on a day of heavy rain; on a day of pouring rain
    1112345 on a stormy day; during a thunderstorm
    11122335 on a snowy day; on a day of heavy snow
    """,
)
MOOD: Final = _read_slot(
    "mood",
    """
    the mood of the people; how the people feel; the emotion shown
    5 excited; thrilled
    45 happy; cheerful
    345 contented; satisfied
    2345 calm; relaxed
    12235 bored; uninterested
    111235 sad; unhappy
    2111245 worried; anxious
    11112335 angry; furious
    """,
)
ANIMAL: Final = _read_slot(
    "animal",
    """
    the animal; what kind of animal is there; which pet is present
    5 dog; big dog
    45 puppy; playful puppy
    325 cat; tabby cat
    2345 kitten; fluffy kitten
    22225 rabbit; bunny
    222235 hamster; tiny hamster
    2222345 guinea pig; little guinea pig
    11111225 parrot; talking parrot
    111112245 canary; little canary
    """,
)

SLOTS: Final = (PEOPLE, NUMBER, COLOUR, ACTIVITY, LOCATION, TIME, WEATHER, MOOD, ANIMAL)
# Every sentence shows these slots; others only if a condition asks about them, or as extras.
ALWAYS_SHOWN: Final = frozenset({"people", "number", "activity"})
# A sentence never shows both, to avoid "a sunny day at midnight".
CLASHING: Final = frozenset({"time", "weather"})

GARMENTS: Final = (
    ("jacket", "jackets"),
    ("coat", "coats"),
    ("sweater", "sweaters"),
    ("shirt", "shirts"),
    ("hat", "hats"),
    ("scarf", "scarves"),
)
OPENERS: Final = ("The picture shows", "This photo shows", "Here we see", "In this scene we see")
ANIMAL_LEADS: Final = ("With {} close by", "Next to {}", "Accompanied by {}", "As {} looks on")
ANIMAL_TAILS: Final = ("while {} looks on", "as {} watches", "with {} close by", "next to {}")
COLOUR_MODIFIERS: Final = ("in {}", "wearing {}", "dressed in {}")
COLOUR_LEADS: Final = ("Wearing {}", "Dressed in {}")
MOOD_LEADS: Final = ("Looking {}", "Feeling {}", "Clearly {}")
MOOD_TAILS: Final = ("looking {}", "clearly {}", "feeling {}")

# --- Plan: the slots of the questions, and their ratings ----------------------------------------

Block = tuple[tuple[int, int], ...]


def _both_ways(*ratings: tuple[int, int]) -> Block:
    """Return rating pairs together with their swapped counterparts."""
    return ratings + tuple((second, first) for first, second in ratings)


# A block is dealt to one pair of slots as a whole. Within a block each slot sees every rating
# as often as its mirror image (6 - rating), which keeps any number of blocks balanced.
BLOCKS: Final[tuple[Block, ...]] = (
    *[_both_ways((5, 1))] * 6,
    *[_both_ways((4, 2))] * 4,
    *[_both_ways((5, 2), (4, 1))] * 2,
    *[_both_ways((4, 3), (3, 2))] * 2,
    *[((3, 3),)] * 2,
)


def _pick(rng: Random, items: Sequence[T]) -> T:
    """Choose an item; unlike with Random.choice, all Python versions choose the same."""
    return items[int(rng.random() * len(items))]


def _shuffled(rng: Random, items: Iterable[T]) -> list[T]:
    """Return the items in random order, which is the same in all Python versions."""
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        result[last], result[other] = result[other], result[last]
    return result


#: The pairs of slots that the two conditions of a sentence pair may ask about.
SLOT_PAIRS: Final = [(a, b) for a, b in combinations(SLOTS, 2) if {a.name, b.name} != CLASHING]


def _plan(rng: Random, minimum: int) -> list[tuple[Question, Question]]:
    """Assign whole blocks to slot pairs in turn until there are enough sentence pairs."""
    plan: list[tuple[Question, Question]] = []
    blocks: list[Block] = []
    slot_pairs: list[tuple[Slot, Slot]] = []
    while len(plan) < minimum:
        blocks = blocks or _shuffled(rng, BLOCKS)
        slot_pairs = slot_pairs or _shuffled(rng, SLOT_PAIRS)
        first, second = slot_pairs.pop()
        plan += [(Question(first, a), Question(second, b)) for a, b in blocks.pop()]
    return _shuffled(rng, plan)


# --- Scenes: a wording for every slot shown ---------------------------------------------------


def _draw_values(rng: Random, slot: Slot, rating: int | None) -> tuple[int, int]:
    """Sample the two values of a slot at a rating; None for any rating."""
    if rating is None:
        value = int(rng.random() * len(slot.values))
        other = value if rng.random() < 0.3 else int(rng.random() * len(slot.values))
        return value, other
    partners = slot.value_pairs(rating)
    value = _pick(rng, sorted(partners))
    other = _pick(rng, partners[value])
    return (value, other) if rng.random() < 0.5 else (other, value)


def _shown_slots(rng: Random, required: frozenset[str]) -> frozenset[str]:
    """Choose the slots that a sentence mentions: those of its conditions and up to three others."""
    n_extras = 2 if rng.random() < 0.6 else 3
    shown = set(required - ALWAYS_SHOWN)
    for slot in _shuffled(rng, SLOTS):
        clashes = slot.name in CLASHING and shown & CLASHING
        if len(shown) < n_extras and slot.name not in ALWAYS_SHOWN and not clashes:
            shown.add(slot.name)
    return frozenset(shown | ALWAYS_SHOWN)


def _draw_scenes(
    rng: Random, questions: tuple[Question, Question]
) -> tuple[dict[str, str], dict[str, str]]:
    """Sample two scenes (slot name -> wording) that have the ratings of the questions."""
    ratings = {question.slot.name: question.rating for question in questions}
    scenes: tuple[dict[str, str], dict[str, str]] = ({}, {})
    shown = [_shown_slots(rng, frozenset(ratings)) for _ in scenes]
    for slot in SLOTS:
        values = _draw_values(rng, slot, ratings.get(slot.name))
        for scene, names, value in zip(scenes, shown, values, strict=True):
            form = _pick(rng, slot.values[value].forms)
            if slot.name in names:
                scene[slot.name] = form
    return scenes


# --- Sentences --------------------------------------------------------------------------------


def _with_article(noun: str) -> str:
    """Put "a" or "an" before a noun phrase (the vocabulary has no silent h or long u)."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _clothes(rng: Random, colour: str, *, plural: bool) -> str:
    """Return a garment of the colour, or several garments."""
    singular_noun, plural_noun = _pick(rng, GARMENTS)
    return f"{colour} {plural_noun}" if plural else _with_article(f"{colour} {singular_noun}")


def _lead(rng: Random, parts: dict[str, str]) -> str:
    """Move one optional part to the front of the sentence, or none; return the opening."""
    movable = ["", *sorted(parts)]
    name = _pick(rng, movable)
    if not name:
        return ""
    part = parts.pop(name)
    templates = {"animal": ANIMAL_LEADS, "colour": COLOUR_LEADS, "mood": MOOD_LEADS}
    opening = _pick(rng, templates.get(name, ("{}",))).format(part)
    return opening[0].upper() + opening[1:] + ", "


def _subject(rng: Random, scene: Mapping[str, str], parts: dict[str, str]) -> str:
    """Return the people as a noun phrase, with the colour and perhaps the mood or the place."""
    noun = scene["people"].split("/")[_is_plural(scene)]
    if "mood" in parts and rng.random() < 0.5:
        noun = f"{parts.pop('mood')} {noun}"
    count = scene["number"]
    phrase = _with_article(noun) if count == "a" else f"{count} {noun}"
    if "colour" in parts:
        phrase += " " + _pick(rng, COLOUR_MODIFIERS).format(parts.pop("colour"))
    elif "place" in parts and rng.random() < 0.3:
        phrase += " " + parts.pop("place")
    return phrase


def _tail(rng: Random, parts: Mapping[str, str]) -> str:
    """Return what follows the activity."""
    settings = [parts[name] for name in ("place", "time", "weather") if name in parts]
    tail = "".join(f" {setting}" for setting in _shuffled(rng, settings))
    comma = ""
    if "mood" in parts:
        tail += ", " + _pick(rng, MOOD_TAILS).format(parts["mood"])
        comma = ","
    if "animal" in parts:
        tail += f"{comma} " + _pick(rng, ANIMAL_TAILS).format(parts["animal"])
    return tail


def _is_plural(scene: Mapping[str, str]) -> bool:
    """Return whether the scene shows more than one person."""
    return scene["number"] not in NUMBER.values[0].forms


def _sentence(rng: Random, scene: Mapping[str, str]) -> str:
    """Word a scene as a sentence."""
    plural = _is_plural(scene)
    parts = {name: form for name, form in scene.items() if name not in ALWAYS_SHOWN}
    if "colour" in parts:
        parts["colour"] = _clothes(rng, parts["colour"], plural=plural)
    if "animal" in parts:
        parts["animal"] = _with_article(parts["animal"])
    third_person, base, participle = scene["activity"].split("/")
    lead = _lead(rng, parts)
    subject = _subject(rng, scene, parts)
    style = rng.random()
    if not lead and style < 0.5:
        core = f"{_pick(rng, OPENERS)} {subject} {participle}"
    elif style < 0.75:
        core = f"{subject} {'are' if plural else 'is'} {participle}"
    else:
        core = f"{subject} {base if plural else third_person}"
    text = lead + core + _tail(rng, parts) + "."
    return text[0].upper() + text[1:]


def _new_sentences(
    rng: Random, questions: tuple[Question, Question], used: AbstractSet[str]
) -> tuple[str, str]:
    """Generate two new sentences of suitable length for the questions."""
    while True:
        scene1, scene2 = _draw_scenes(rng, questions)
        sentences = _sentence(rng, scene1), _sentence(rng, scene2)
        lengths_fit = all(MIN_WORDS <= len(s.split()) <= MAX_WORDS for s in sentences)
        if lengths_fit and len(set(sentences)) == 2 and used.isdisjoint(sentences):
            return sentences


# --- Data -------------------------------------------------------------------------------------


def _make_split(rng: Random, minimum: int, used: set[str]) -> list[Row]:
    """Return the rows of one split and add its sentences to those used."""
    rows: list[Row] = []
    # The rows of a slot and rating use the wordings of the condition in turn, so that every wording
    # has the same symmetric ratings as its slot.
    turns: Counter[tuple[str, int]] = Counter()
    for questions in _plan(rng, minimum):
        sentence1, sentence2 = _new_sentences(rng, questions, used)
        used.update((sentence1, sentence2))
        for question in _shuffled(rng, questions):
            slot, rating = question.slot, question.rating
            condition = slot.conditions[turns[slot.name, rating] % len(slot.conditions)]
            turns[slot.name, rating] += 1
            rows.append((sentence1, sentence2, condition, rating))
    return rows


def make_splits(seed: int = SEED) -> dict[str, list[Row]]:
    """Return the rows of every split."""
    rng = Random(seed)
    used: set[str] = set()
    return {name: _make_split(rng, pairs, used) for name, pairs in SPLIT_PAIRS.items()}


def to_csv(rows: Iterable[Row]) -> bytes:
    """Return rows as the bytes of a CSV file."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(rows)
    return buffer.getvalue().encode("utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the sample files."""

    def make() -> dict[str, bytes]:
        return {f"{name}.csv": to_csv(rows) for name, rows in make_splits().items()}

    return sample_files(__doc__, "sample", make, argv)


if __name__ == "__main__":
    sys.exit(main())
