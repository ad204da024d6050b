"""Write the bundled sample graph: invented garments, and the relations of each.

    python scripts/make_sample_graph.py [--out llmcond/data/sample_graph] [--check]

Every garment has two colours (of itself and of its border), two materials (outside and lining), two
occasions that it suits and one that it does not suit, two shops (one sells and one mends its kind)
and a mate. The answer to a query depends on the relation:

* All nine relations of a garment are queries of the same split, with different answers. A head that
  ignores the relation therefore answers one relation correctly at best, whatever it knows about
  the garment.
* Colours, materials, occasions and shops each take part in two relations, so that the answers to
  queries about them depend on the relation, too.
* The triples of a garment of dev or test are not in train. Its text contains most of them; its mate
  has the same colours and occasions, and most mates are linked in train by the reversed edge.

The script needs the standard library only and writes the same bytes on every Python version. With
``--check`` it writes nothing: it compares the files with newly generated ones, and exits with 1 on
a mismatch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from common import sample_files

SEED: Final = 20240307
#: Number of pairs, out of 120 pairs of mates, with one mate in dev, and the same for test.
PAIRS_HELD_OUT: Final = 36
#: Number of these pairs whose mate in dev or test is in no train triple.
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
class Garment:
    """A garment, which is an entity of the graph."""

    maker: str
    kind: int
    colour: str
    border: str
    outside: str
    lining: str
    occasions: tuple[str, ...]

    @property
    def id(self) -> str:
        """The id in the files."""
        return f"{self.maker.lower()}_{KINDS[self.kind]}"

    @property
    def row(self) -> tuple[str, str, str]:
        """The id, the name and the description."""
        first, second, unfit = self.occasions
        return (
            self.id,
            f"{self.maker} {KINDS[self.kind]}",
            f"a {self.colour} {KINDS[self.kind]} of {self.outside} with a {self.border} border, "
            f"lined with {self.lining}, for {first} and {second}, not for {unfit}",
        )

    @property
    def triples(self) -> list[Triple]:
        """The triples of the garment, without that of its mate."""
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
    """Return the numbers of the shop that sells a kind, and of the shop that mends it."""
    seller = kind // 2
    return seller, (seller + 1 + kind % 2) % len(SHOPS)


def make_pairs(rng: Random) -> list[tuple[Garment, Garment]]:
    """Return the pairs of mates, which differ in kind and share their colours and occasions."""
    names = [(maker, kind) for maker in MAKERS for kind in range(len(KINDS))]
    rng.shuffle(names)
    pairs = []
    while names:
        maker, kind = names.pop()
        other = next((i for i, (_, other_kind) in enumerate(names) if other_kind != kind), 0)
        colour, border = rng.sample(list(COLOURS), 2)
        occasions = tuple(rng.sample(list(OCCASIONS), 3))
        mates = []
        for mate_maker, mate_kind in ((maker, kind), names.pop(other)):
            outside, lining = rng.sample(list(MATERIALS), 2)
            mates.append(Garment(mate_maker, mate_kind, colour, border, outside, lining, occasions))
        pairs.append((mates[0], mates[1]))
    return pairs


def make_files() -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of the files by file name."""
    rng = Random(SEED)
    pairs = make_pairs(rng)
    splits: dict[str, list[Triple]] = {"train": [], "valid": [], "test": []}
    for number, (first, second) in enumerate(pairs):
        index = number // PAIRS_HELD_OUT
        split = ("valid", "test")[index] if index < 2 else "train"
        splits[split] += first.triples
        splits["train"] += second.triples
        splits[split].append((first.id, "goes_with", second.id))
        if split == "train" or number % PAIRS_HELD_OUT >= PAIRS_UNSEEN:
            splits["train"].append((second.id, "goes_with", first.id))
    for triples in splits.values():
        rng.shuffle(triples)
    entities = [garment.row for pair in pairs for garment in pair]
    # Without sorting, the entities of dev and test would come first.
    entities.sort()
    for values in (COLOURS, MATERIALS, OCCASIONS):
        entities += [(name, name, text) for name, text in values.items()]
    for number, name in enumerate(SHOPS):
        sold, mended = (
            " and ".join(f"{kind}s" for k, kind in enumerate(KINDS) if shops_of(k)[index] == number)
            for index in range(2)
        )
        text = f"a shop that sells {sold} and mends {mended}"
        entities.append((f"{name.lower()}_shop", f"{name} Shop", text))
    return {
        **{name: [*triples] for name, triples in splits.items()},
        "entities": [*entities],
        "relations": [(name, *texts) for name, texts in RELATIONS.items()],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the files of the sample graph."""

    def make() -> dict[str, bytes]:
        return {
            f"{name}.tsv": "".join("\t".join(row) + "\n" for row in rows).encode()
            for name, rows in make_files().items()
        }

    return sample_files(__doc__, "sample_graph", make, argv)


if __name__ == "__main__":
    sys.exit(main())
