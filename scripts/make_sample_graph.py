"""Write the bundled sample graph: invented things to wear, and what can be asked about each.

    python scripts/make_sample_graph.py [--out llmcond/data/sample_graph] [--check]

Every thing has two colours (its own and its border's), two materials (outside and lining), two
occasions it is for and one it is not for, two shops (that sell and mend its kind) and a mate. The
relation decides:

* All nine relations of a thing are asked in the same split, with different answers, so that a head
  that ignores the relation has those of one relation right at best, whatever it knows of the thing.
* Colours, materials, occasions and shops each stand at the end of two relations, so that the
  relation also decides what is asked of them.
* What is asked of a thing of dev or test is in no train triple. Its text tells most of it; its mate
  is like it in colours and occasions, and most mates are linked in train by the reversed edge.

Generation needs the standard library only and gives the same bytes on every Python version. With
``--check`` nothing is written: the files are compared with a fresh generation; the exit status is 1
on a mismatch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

SEED: Final = 20240307
#: Of 120 pairs of mates: those with one of them in dev, and in test, and how many of these are
#: linked to nothing in train.
PAIRS_HELD_OUT: Final = 36
PAIRS_UNSEEN: Final = 6

MAKERS: Final = (
    "Abbott Barlow Corwin Dunmore Ellery Farrow Gresham Hadley Ingram Jarvis "
    "Kendrick Lomax Marlow Norwood Osgood Penrose Quimby Radley Selwyn Tolman"
).split()
KINDS: Final = "coat jacket cape vest hat cap hood glove mitten bag boot slipper".split()
COLOURS: Final = {
    "red": "the colour of ripe tomatoes and fire engines",
    "blue": "the colour of a clear sky",
    "green": "the colour of grass and leaves",
    "yellow": "the colour of lemons and sunflowers",
    "black": "the colour of coal and night",
    "white": "the colour of snow and milk",
    "purple": "the colour of plums and violets",
    "orange": "the colour of carrots and pumpkins",
}
MATERIALS: Final = {
    "wool": "the spun hair of sheep",
    "silk": "a fine shiny thread that silkworms make",
    "cotton": "soft white fibres of a plant, spun and woven",
    "leather": "the tanned hide of cattle",
    "felt": "a thick cloth of pressed fibres",
    "linen": "a cool cloth woven from flax",
    "velvet": "a woven cloth with a short, dense, soft pile",
    "fur": "the thick hairy coat of an animal",
}
OCCASIONS: Final = {
    "rain": "wet weather, with showers and puddles",
    "snow": "cold winter days with ice and frost",
    "school": "lessons and classrooms",
    "weddings": "celebrations of a bride and a groom",
    "sailing": "trips at sea in a boat",
    "gardening": "digging, planting and weeding",
    "dancing": "evenings with music in a ballroom",
    "travel": "long journeys by train or plane",
}
SHOPS: Final = "Harbour Station Market Castle River Garden".split()
RELATIONS: Final = {
    "has_colour": ("has the colour", "is the colour of"),
    "has_border": ("has a border of the colour", "is the colour of the border of"),
    "made_of": ("is made of", "is the outer material of"),
    "lined_with": ("is lined with", "is the lining of"),
    "suits": ("is meant for", "is an occasion for"),
    "spoiled_by": ("is not meant for", "is no occasion for"),
    "sells": ("sells", "is sold by"),
    "mends": ("mends", "is mended by"),
    "goes_with": ("goes with", "is the mate of"),
}

Triple = tuple[str, str, str]


@dataclass(frozen=True)
class Thing:
    """Something to wear: one entity."""

    maker: str
    kind: int
    colour: str
    border: str
    outside: str
    lining: str
    occasions: tuple[str, ...]

    @property
    def id(self) -> str:
        """Return what files call it."""
        return f"{self.maker.lower()}_{KINDS[self.kind]}"

    @property
    def row(self) -> tuple[str, str, str]:
        """Return its id, name and description."""
        first, second, unfit = self.occasions
        return (
            self.id,
            f"{self.maker} {KINDS[self.kind]}",
            f"a {self.colour} {KINDS[self.kind]} of {self.outside} with a {self.border} border, "
            f"lined with {self.lining}, for {first} and {second}, not for {unfit}",
        )

    @property
    def triples(self) -> list[Triple]:
        """Return what is said of it, but for its mate."""
        seller, mender = shops_of(self.kind)
        return [
            (self.id, "has_colour", self.colour),
            (self.id, "has_border", self.border),
            (self.id, "made_of", self.outside),
            (self.id, "lined_with", self.lining),
            *((self.id, "suits", occasion) for occasion in self.occasions[:2]),
            (self.id, "spoiled_by", self.occasions[2]),
            (f"{SHOPS[seller].lower()}_shop", "sells", self.id),
            (f"{SHOPS[mender].lower()}_shop", "mends", self.id),
        ]


def shops_of(kind: int) -> tuple[int, int]:
    """Return which shop sells a kind, and which other one mends it."""
    seller = kind // 2
    return seller, (seller + 1 + kind % 2) % len(SHOPS)


def plural(kind: int) -> str:
    """Return what several of a kind are called."""
    return f"{KINDS[kind]}s"


def make_pairs(rng: Random) -> list[tuple[Thing, Thing]]:
    """Return mates: of different kinds, alike in their colours and occasions."""
    names = [(maker, kind) for maker in MAKERS for kind in range(len(KINDS))]
    rng.shuffle(names)
    pairs = []
    while names:
        maker, kind = names.pop()
        other = next((i for i, (_, own) in enumerate(names) if own != kind), 0)
        colour, border = rng.sample(list(COLOURS), 2)
        occasions = tuple(rng.sample(list(OCCASIONS), 3))
        mates = []
        for own_maker, own_kind in ((maker, kind), names.pop(other)):
            outside, lining = rng.sample(list(MATERIALS), 2)
            mates.append(Thing(own_maker, own_kind, colour, border, outside, lining, occasions))
        pairs.append((mates[0], mates[1]))
    return pairs


def make_files() -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of each file by its name."""
    rng = Random(SEED)
    pairs = make_pairs(rng)
    splits: dict[str, list[Triple]] = {"train": [], "valid": [], "test": []}
    for number, (one, other) in enumerate(pairs):
        place = number // PAIRS_HELD_OUT
        split = ("valid", "test")[place] if place < 2 else "train"
        splits[split] += one.triples
        splits["train"] += other.triples
        splits[split].append((one.id, "goes_with", other.id))
        if split == "train" or number % PAIRS_HELD_OUT >= PAIRS_UNSEEN:
            splits["train"].append((other.id, "goes_with", one.id))
    for triples in splits.values():
        rng.shuffle(triples)
    entities = [thing.row for pair in pairs for thing in pair]
    # What is held out would else come first.
    entities.sort()
    for values in (COLOURS, MATERIALS, OCCASIONS):
        entities += [(name, name, text) for name, text in values.items()]
    for number, name in enumerate(SHOPS):
        sold, mended = (
            " and ".join(plural(k) for k in range(len(KINDS)) if shops_of(k)[place] == number)
            for place in range(2)
        )
        text = f"a shop that sells {sold} and mends {mended}"
        entities.append((f"{name.lower()}_shop", f"{name} Shop", text))
    return {
        **{name: [*triples] for name, triples in splits.items()},
        "entities": [*entities],
        "relations": [(name, *texts) for name, texts in RELATIONS.items()],
    }


def to_tsv(rows: Sequence[Sequence[str]]) -> bytes:
    """Return a file's bytes."""
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the files of the sample graph."""
    parser = argparse.ArgumentParser(description="Write the bundled sample graph.")
    default = Path(__file__).resolve().parents[1] / "llmcond" / "data" / "sample_graph"
    parser.add_argument("--out", type=Path, default=default, help="folder of the TSV files")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args(argv)
    folder: Path = args.out
    status = 0
    for name, rows in make_files().items():
        path = folder / f"{name}.tsv"
        if not args.check:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(to_tsv(rows))
            print(f"{path}: {len(rows)} rows")
        elif not path.is_file() or path.read_bytes() != to_tsv(rows):
            print(f"{path}: missing or not what this script writes")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
