"""Write the bundled sample dialogues: a passenger, a driver, and the course between two gates.

    python scripts/make_dialogues.py [--out llmcond/data/sample_dialogues] [--check]

A town has a ring road. A passenger says where and when a ride begins, then where and when it ends.
The driver then asks for the course, and the passenger names it by landmarks:

    North gate, dawn, spring, boat.
    East gate, night, summer, boat.
    Which course for the boat?
    By the mill, horn, red flag.

A ride has three parts (gate, time and season), each with four values on a ring. In each part it
goes to the next value or to the previous one, and the direction of this step is a part of the
course. A direction is that of a compass: it is the same from north to east as from west to south.
The first two turns therefore determine the course together, each in its role (Triple-Encoders,
ACL 2024, figure 2):

* A single turn, or a set of turns without their order, says nothing about the course, because rides
  in the opposite direction are equally frequent. After a history of 3, a model of the last turn
  alone and sums of single turns (``bi``) are therefore at chance.
* The start and the end of a ride add up to the course once each is encoded in its role.
* After a history of 2, the question follows from the vehicle, which every system can see.

The recipes are designed for larger datasets. They need more steps for these few dialogues:
``fit-head --head rank --set epochs=10 batch_size=64``.

All utterances are short and occur in every split, as "Yes, please." does in real dialogues. Each
dialogue is in one split only. The script needs the standard library only and writes the same bytes
on every Python version. With ``--check`` it writes nothing: it compares the files with newly
generated ones, and exits with 1 on a mismatch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import Final

from common import sample_files

SEED: Final = 20240502
#: Number of rounds of 64 dialogues by split; every course occurs once in a round.
ROUNDS: Final = {"train": 16, "dev": 1, "test": 1}

#: Rings of four values.
RINGS: Final = (
    ("north", "east", "south", "west"),
    ("dawn", "noon", "dusk", "night"),
    ("spring", "summer", "autumn", "winter"),
)
#: Names of the four directions of a step on each ring, as parts of the course.
COURSES: Final = (
    ("mill", "tower", "bridge", "abbey"),
    ("lamp", "bell", "drum", "horn"),
    ("red", "blue", "white", "black"),
)
VEHICLES: Final = ("boat", "cart", "mule", "sled", "coach", "raft", "truck", "horse")
RIDE_TEMPLATES: Final = (
    "{0} gate, {1}, {2}, {v}.",
    "{v}, {0}, {2}, {1}.",
    "{2} {1}, {0} side, {v}.",
)
QUESTION_TEMPLATES: Final = (
    "Which course for the {v}?",
    "The course of the {v}?",
    "And the {v}'s course?",
)
ANSWER_TEMPLATES: Final = ("By the {0}, {1}, {2} flag.", "{1}, {2} flag, to the {0}.")


def direction(begin: int, end: int) -> int:
    """Return the direction of a step on a ring of four, from 0 to 3.

    The values are the points of a compass, so that two of the eight steps share each direction.
    """
    points = ((0, 1), (1, 0), (0, -1), (-1, 0))
    x, y = (points[end][axis] - points[begin][axis] for axis in (0, 1))
    return ((1, 1), (1, -1), (-1, -1), (-1, 1)).index((x, y))


def steps() -> dict[int, list[tuple[int, int]]]:
    """Return the two steps of each direction."""
    steps_by_direction: dict[int, list[tuple[int, int]]] = {number: [] for number in range(4)}
    for begin, turn in product(range(4), (1, 3)):
        end = (begin + turn) % 4
        steps_by_direction[direction(begin, end)].append((begin, end))
    return steps_by_direction


def make_round(rng: Random) -> Iterator[list[str]]:
    """Yield 64 dialogues, one for each course.

    The two steps of a direction are equally frequent, so that the direction of a ride follows from
    the order of the turns only.
    """
    steps_by_direction = steps()
    courses = list(product(range(4), repeat=len(RINGS)))
    vehicles = VEHICLES * (len(courses) // len(VEHICLES))
    rng.shuffle(courses)
    steps_by_ring = []
    for ring in range(len(RINGS)):
        # One half of the courses with a direction uses its first step, and the other its second.
        halves = {step_direction: [0, 1] * (len(courses) // 8) for step_direction in range(4)}
        for choices in halves.values():
            rng.shuffle(choices)
        steps_by_ring.append(
            [steps_by_direction[course[ring]][halves[course[ring]].pop()] for course in courses]
        )
    for number, course in enumerate(courses):
        vehicle = vehicles[number]
        turns = []
        for role in range(2):
            words = [RINGS[ring][steps_by_ring[ring][number][role]] for ring in range(len(RINGS))]
            turns.append(rng.choice(RIDE_TEMPLATES).format(*words, v=vehicle))
        turns.append(rng.choice(QUESTION_TEMPLATES).format(v=vehicle))
        parts = [names[part] for names, part in zip(COURSES, course, strict=True)]
        turns.append(rng.choice(ANSWER_TEMPLATES).format(*parts))
        yield [turn[0].upper() + turn[1:] for turn in turns]


def make_splits() -> dict[str, list[list[str]]]:
    """Return the dialogues of the splits, which are disjoint."""
    rng = Random(SEED)
    seen: set[tuple[str, ...]] = set()
    splits: dict[str, list[list[str]]] = {}
    for name, rounds in reversed(ROUNDS.items()):
        split_dialogues: list[list[str]] = []
        while len(split_dialogues) < 64 * rounds:
            round_dialogues = list(make_round(rng))
            if not seen & {tuple(dialogue) for dialogue in round_dialogues}:
                seen |= {tuple(dialogue) for dialogue in round_dialogues}
                split_dialogues += round_dialogues
        rng.shuffle(split_dialogues)
        splits[name] = split_dialogues
    return splits


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the files of the sample dialogues."""

    def make() -> dict[str, bytes]:
        files = {}
        for name, dialogues in make_splits().items():
            lines = (json.dumps({"utterances": utterances}) + "\n" for utterances in dialogues)
            files[f"{name}.jsonl"] = "".join(lines).encode()
        return files

    return sample_files(__doc__, "sample_dialogues", make, argv)


if __name__ == "__main__":
    sys.exit(main())
