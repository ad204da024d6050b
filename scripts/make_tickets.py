"""Write a table of 360 support tickets, each with a product, a problem, a sentiment and an urgency.

    python scripts/make_tickets.py docs/tickets.csv

Each combination of five products, four problems, three sentiments and two degrees of urgency occurs
three times, in wordings that are sampled with a fixed seed. The bundled model was trained on
``scripts/aspects/support_tickets.toml``, which contains the same domain, products and problems but
none of these wordings.
"""

from __future__ import annotations

import csv
import sys
from itertools import product
from pathlib import Path
from random import Random
from typing import Final

from common import Options

PRODUCTS: Final = {
    "kettle": ["kettle", "1.7 litre kettle", "glass kettle"],
    "headphones": ["headphones", "bluetooth headphones", "wireless headphones"],
    "printer": ["printer", "ink-jet printer", "laser printer"],
    "tent": ["tent", "four-person tent", "dome tent"],
    "blender": ["blender", "smoothie blender", "jug blender"],
}
PROBLEMS: Final = {
    "delivery": [
        "The {} I bought was due last Tuesday and the courier has still not shown up.",
        "Tracking says my {} is in a depot, where it has been for nine days.",
        "I paid for express shipping, yet no {} has come.",
        "Where is the {}? The parcel seems to have been lost.",
    ],
    "defect": [
        "My {} does not switch on any more.",
        "After two uses the {} is dead, and no reset helps.",
        "The {} has a fault: it cuts out within a minute.",
        "Something inside the {} is broken, and it rattles.",
    ],
    "billing": [
        "For the {} I was billed two times.",
        "The amount on the receipt for the {} is higher than the price on your site.",
        "My card was debited 40 euros too much for the {}.",
        "The invoice of the {} lists a fee that nobody told me of.",
    ],
    "return": [
        "I would like to send the {} back. Which label do I use?",
        "The {} is not what I need; how do I return it?",
        "I changed my mind about the {} and want to hand it in again.",
        "Can the {} go back within thirty days, and who pays for the post?",
    ],
}
SENTIMENTS: Final = {
    "positive": [
        "Otherwise I am delighted with your shop.",
        "Your team has been wonderful so far, thank you!",
        "I have always loved buying from you.",
        "Many thanks, you are the best.",
    ],
    "neutral": [
        "The order number is 48213.",
        "I ordered it on your website.",
        "It was bought on the third of the month.",
        "My customer number is on file.",
    ],
    "negative": [
        "I am fed up with this company.",
        "What a dreadful experience, I am really angry.",
        "This is the worst service I have ever had.",
        "I am bitterly disappointed and will tell everyone.",
    ],
}
URGENCIES: Final = {
    "urgent": [
        "I need an answer today.",
        "Please act at once, it cannot wait.",
        "This has to be settled before tomorrow morning.",
        "Get back to me immediately.",
    ],
    "not urgent": [
        "There is no hurry.",
        "Reply whenever it suits you.",
        "Any time this month is fine.",
        "It can wait until you have a quiet hour.",
    ],
}


def main() -> None:
    """Generate the tickets, and write them to a CSV file."""
    parser = Options(__doc__)
    parser.option("out", Path, "file to write", metavar="FILE.csv")
    rng, rows = Random(0), []
    kinds = (PRODUCTS, PROBLEMS, SENTIMENTS, URGENCIES)
    for values in list(product(*kinds)) * 3:
        thing, problem, *others = (
            rng.choice(kind[value]) for kind, value in zip(kinds, values, strict=True)
        )
        rng.shuffle(others)
        rows.append([" ".join([problem.format(thing), *others]), *values])
    out = parser.parse_args().out
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["text", "product", "problem", "sentiment", "urgency"])
        writer.writerows(rows)
    sys.stdout.write(f"{out}: {len(rows)} tickets\n")


if __name__ == "__main__":
    main()
