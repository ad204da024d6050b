"""Write the bundled sample dialogues: a passenger, a driver, and the course between two gates.

    python scripts/make_dialogues.py [--out llmcond/data/sample_dialogues] [--check]

A town has a ring road; a passenger says where and when a ride begins, then where and when it ends,
the driver asks for the course, and the passenger names it by landmarks:

    North gate, dawn, spring, boat.
    East gate, night, summer, boat.
    Which course for the boat?
    By the mill, horn, red flag.

A ride goes from each of three things (gate, time, season, each of four on a ring) to the next one
or the one before, and each part of the course is the direction of such a step: the same from north
to east as from west to south. So the first two turns decide together, each in its role (Triple-
Encoders, ACL 2024, figure 2):

* A single turn, or turns whose order does not count, say nothing of the course: what rides one way
  as often rides back. After a history of 3 the last turn by itself, and sums of single turns
  (``bi``), are at chance.
* Where a ride begins and where it ends add up to the course once each is known in its role.
* After a history of 2 the vehicle tells what is asked, which every system sees.

The dialogues are few, so that the recipes, made for larger sets, need more steps than their own:
``fit-head --head rank --set epochs=10 batch_size=64``.

All utterances are short: they occur in every split, as "Yes, please." does. Dialogues are in one
split only. Generation needs the standard library only and gives the same bytes on every Python
version. With ``--check`` nothing is written: the files are compared with a fresh generation; the
exit status is 1 on a mismatch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Final

SEED: Final = 20240502
#: Rounds of 64 dialogues, in each of which every course occurs once.
ROUNDS: Final = {"train": 16, "dev": 1, "test": 1}

#: Rings of four, and what the four directions of a step are called in the course.
RINGS: Final = (
    ("north", "east", "south", "west"),
    ("dawn", "noon", "dusk", "night"),
    ("spring", "summer", "autumn", "winter"),
)
COURSES: Final = (
    ("mill", "tower", "bridge", "abbey"),
    ("lamp", "bell", "drum", "horn"),
    ("red", "blue", "white", "black"),
)
VEHICLES: Final = ("boat", "cart", "mule", "sled", "coach", "raft", "truck", "horse")
PLACES: Final = (
    "{0} gate, {1}, {2}, {v}.",
    "{v}, {0}, {2}, {1}.",
    "{2} {1}, {0} side, {v}.",
)
QUESTIONS: Final = ("Which course for the {v}?", "The course of the {v}?", "And the {v}'s course?")
ANSWERS: Final = ("By the {0}, {1}, {2} flag.", "{1}, {2} flag, to the {0}.")


def direction(begin: int, end: int) -> int:
    """Return the direction of a step on a ring of four, 0 to 3.

    As of points of a compass: each is the direction of two of the eight steps.
    """
    points = ((0, 1), (1, 0), (0, -1), (-1, 0))
    x, y = (points[end][axis] - points[begin][axis] for axis in (0, 1))
    return ((1, 1), (1, -1), (-1, -1), (-1, 1)).index((x, y))


def steps() -> dict[int, list[tuple[int, int]]]:
    """Return the two steps of each direction."""
    found: dict[int, list[tuple[int, int]]] = {one: [] for one in range(4)}
    for begin, turn in product(range(4), (1, 3)):
        end = (begin + turn) % 4
        found[direction(begin, end)].append((begin, end))
    return found


def make_round(rng: Random) -> Iterator[list[str]]:
    """Yield 64 dialogues, one of each course.

    Both steps of a direction are taken as often, so that nothing but the order of turns tells which
    way a ride goes.
    """
    ways = steps()
    courses = list(product(range(4), repeat=len(RINGS)))
    vehicles = VEHICLES * (len(courses) // len(VEHICLES))
    rng.shuffle(courses)
    taken = []
    for ring in range(len(RINGS)):
        # Of each direction, which of its two steps: one half of its courses, and the other.
        halves = {one: [0, 1] * (len(courses) // 8) for one in range(4)}
        for own in halves.values():
            rng.shuffle(own)
        taken.append([ways[course[ring]][halves[course[ring]].pop()] for course in courses])
    for number, course in enumerate(courses):
        vehicle = vehicles[number]
        turns = []
        for role in range(2):
            words = [RINGS[ring][taken[ring][number][role]] for ring in range(len(RINGS))]
            turns.append(rng.choice(PLACES).format(*words, v=vehicle))
        turns.append(rng.choice(QUESTIONS).format(v=vehicle))
        parts = [names[way] for names, way in zip(COURSES, course, strict=True)]
        turns.append(rng.choice(ANSWERS).format(*parts))
        yield [turn[0].upper() + turn[1:] for turn in turns]


def make_splits() -> dict[str, list[list[str]]]:
    """Return the dialogues of each split; none is in two."""
    rng = Random(SEED)
    seen: set[tuple[str, ...]] = set()
    splits: dict[str, list[list[str]]] = {}
    for name, rounds in reversed(ROUNDS.items()):
        own: list[list[str]] = []
        while len(own) < 64 * rounds:
            made = list(make_round(rng))
            if not seen & {tuple(one) for one in made}:
                seen |= {tuple(one) for one in made}
                own += made
        rng.shuffle(own)
        splits[name] = own
    return splits


def to_jsonl(dialogues: Sequence[Sequence[str]]) -> bytes:
    """Return a file's bytes."""
    return "".join(json.dumps({"utterances": own}) + "\n" for own in dialogues).encode()


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the files of the sample dialogues."""
    parser = argparse.ArgumentParser(description="Write the bundled sample dialogues.")
    default = Path(__file__).resolve().parents[1] / "llmcond" / "data" / "sample_dialogues"
    parser.add_argument("--out", type=Path, default=default, help="folder of the JSONL files")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args(argv)
    folder: Path = args.out
    status = 0
    for name, dialogues in make_splits().items():
        path = folder / f"{name}.jsonl"
        if not args.check:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(to_jsonl(dialogues))
            print(f"{path}: {len(dialogues)} dialogues")
        elif not path.is_file() or path.read_bytes() != to_jsonl(dialogues):
            print(f"{path}: missing or not what this script writes")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
