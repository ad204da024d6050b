"""Small graphs: one of people, locations and activities, and random graphs."""

from pathlib import Path

import numpy as np

from helpers.dialogues import ACTIVITIES, LOCATIONS, PEOPLE
from llmcond.kinds.ranking.graph import Graph, Texts

#: Words in the vocabulary of the tiny encoders, so that no two texts have the same tokens.
COATS = ("red", "blue", "green", "rain")
#: Relations of a person: the location, the activity, and another person.
RELATIONS = {"_is_at": "the place", "_does": "the activity", "_sits_with": "people"}


def write_graph(folder: Path) -> Path:
    """Write a graph of 24 entities and three relations, with every split."""
    folder.mkdir(parents=True, exist_ok=True)
    people = {f"p{i:02}": f"{PEOPLE[i % 4]}, {COATS[i // 4]} coat" for i in range(16)}
    entities = {**people, **{f"l{i}": text for i, text in enumerate(LOCATIONS)}}
    entities |= {f"d{i}": text for i, text in enumerate(ACTIVITIES)}
    triples = []
    for i in range(16):
        triples.append((f"p{i:02}", "_is_at", f"l{i % 4}"))
        triples.append((f"p{i:02}", "_does", f"d{i // 4}"))
        triples.append((f"p{i:02}", "_sits_with", f"p{(i + 4) % 16:02}"))
        if i % 2:
            triples.append((f"p{(i + 4) % 16:02}", "_sits_with", f"p{i:02}"))
    splits = {"train": [], "valid": [], "test": []}
    for number, triple in enumerate(triples):
        name = {3: "valid", 6: "test"}.get(number % 8, "train")
        splits[name].append("\t".join(triple))
    for name, lines in splits.items():
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    for name, texts in (("entities", entities), ("relations", RELATIONS)):
        (folder / f"{name}.tsv").write_text("".join(f"{k}\t{v}\n" for k, v in texts.items()))
    return folder


def random_graph(n=30, relations=3, sizes=(90, 20, 20), seed=0) -> Graph:
    """Return a random graph whose triples are distinct and include self-loops."""
    rng = np.random.default_rng(seed)
    triples = rng.permutation(np.stack(np.mgrid[:n, :relations, :n], -1).reshape(-1, 3))
    train, dev, test = np.split(triples[: sum(sizes)].astype(np.int32), np.cumsum(sizes)[:2])
    names = [str(i) for i in range(n)]
    kinds = [f"r{i}" for i in range(relations)]
    return Graph(
        "random",
        Texts(names, names, names),
        Texts(kinds, kinds, kinds, kinds),
        {"train": train, "dev": dev, "test": test},
    )
