"""Samples of texts with several attributes, on which ``bench_aspects.py`` measures embeddings.

Next to the file of a set, ``triples/NAME.json`` may contain a sample of the texts with its paired
triples. Without that file, this module draws a sample.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import Literal, get_args

from llmcond.base.errors import UserError, nearest
from llmcond.base.files import read_json
from llmcond.data.guides import (
    AspectSample,
    ConditionWordings,
    Triple,
    dataset_files,
    parse_sample,
    read_triples,
)

Wording = Literal["text", "question", "para", "short"]
WORDINGS: tuple[Wording, ...] = get_args(Wording)

#: Maximum numbers of texts of a sample, and of paired triples among them.
SAMPLE_TEXTS, SAMPLE_TRIPLES = 350, 600
#: Texts with this many characters or more are not sampled.
_LONGEST_TEXT = 600
#: Number of attempts per triple; many attempts find no valid triple.
_ATTEMPTS = 40
#: Maximum number of texts with the anchor's value that are tried.
_CANDIDATES = 40
#: Example values are among the 400 most frequent ones, and have fewer than 40 characters.
_COMMONEST, _LONGEST_VALUE = 400, 40


def say(wordings: ConditionWordings, wording: Wording) -> str:
    """Return a condition in a wording, or its noun phrase if it has no such wording."""
    if wording == "question":
        return wordings.question or wordings.text
    if wording == "para":
        return (*wordings.others, wordings.text)[0]
    texts = (wordings.text, *wordings.others)
    return min(texts, key=len) if wording == "short" else wordings.text


def read_samples(folder: Path, names: Sequence[str] = (), seed: int = 0) -> list[AspectSample]:
    """Read the samples of the sets in a folder.

    Args:
        folder: folder with NAME.json of each set, and optionally triples/NAME.json.
        names: sets to read; by default all, in alphabetical order.
        seed: random seed of the samples of sets without a file of triples.

    Raises:
        UserError: The folder or a set does not exist, or a file has an invalid format.
    """
    known = dataset_files(folder)
    for name in names:
        if name not in known:
            raise UserError(f"{folder} has no set {name!r}. {nearest(name, known)}")
    return [read_sample(known[name], seed) for name in names or known]


def read_sample(path: Path, seed: int = 0) -> AspectSample:
    """Read the sample of one set, as ``read_samples`` does."""
    values = read_json(path)
    whole = parse_sample(values, path.stem, str(path))
    sample = read_triples(path, values)
    if sample is None:
        sample = draw_sample(whole, bool(values.get("same_group")), seed=seed)
    return replace(sample, values=_unseen_values(whole, sample))


def _unseen_values(whole: AspectSample, sample: AspectSample) -> dict[str, list[str]]:
    """Return the values of the whole set that no text of the sample has, by condition."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for text in whole.texts:
        for key, value in text.attributes.items():
            counts[key][value] += 1
    examples = {}
    for key in sample.conditions:
        seen = {text.attributes.get(key) for text in sample.texts}
        commonest = [value for value, _ in counts[key].most_common(_COMMONEST)]
        unseen = [v for v in commonest if v not in seen and 0 < len(v) < _LONGEST_VALUE]
        # Some datasets have JSON values: quoted texts are valid examples, objects are not.
        examples[key] = [v.strip('"').replace("_", " ") for v in unseen if v[0] not in "{["]
    return examples


def draw_sample(
    whole: AspectSample,
    same_group: bool = False,
    n_triples: int = SAMPLE_TRIPLES,
    n_texts: int = SAMPLE_TEXTS,
    seed: int = 0,
) -> AspectSample:
    """Draw a sample of paired triples and texts, which depends on the seed only.

    Pairs of conditions take turns. Each turn samples an anchor that has both conditions, and two
    texts that form a valid triple with it. Once the triples have ``n_texts`` texts in total,
    further triples are sampled among these texts. If the triples need fewer texts, the sample is
    filled up with random texts. There are no triples if, for example, each value of one condition
    belongs to a single value of the other.

    Args:
        whole: the set.
        same_group: whether the texts of a triple must belong to one group.
        n_triples: maximum number of triples.
        n_texts: maximum number of texts.
        seed: random seed.
    """
    rng = random.Random(seed)
    short = [i for i, text in enumerate(whole.texts) if len(text.text) < _LONGEST_TEXT]
    triples: dict[Triple, None] = {}
    positions: set[int] = set()
    for is_full in (False, True):
        among = sorted(positions) if is_full else short
        attempts = _draw_triples(whole, among, same_group, rng)
        for triple in islice(attempts, _ATTEMPTS * n_triples):
            if triple is None or len(triples) >= n_triples:
                continue
            more = positions | {triple.anchor, triple.first, triple.second}
            if len(more) <= n_texts:
                positions = more
                triples[triple] = None
    others = [i for i in short if i not in positions]
    filling = rng.sample(others, min(len(others), n_texts - len(positions)))
    ordered = sorted([*positions, *filling])
    indices = {position: i for i, position in enumerate(ordered)}
    moved = [
        replace(t, anchor=indices[t.anchor], first=indices[t.first], second=indices[t.second])
        for t in triples
    ]
    texts = [whole.texts[position] for position in ordered]
    return AspectSample(whole.name, texts, whole.conditions, moved, whole.values)


def _draw_triples(
    whole: AspectSample, positions: Sequence[int], same_group: bool, rng: random.Random
) -> Iterator[Triple | None]:
    """Yield a triple of one pair of conditions after the other, without end.

    It is None if the sampled anchor has none. Nothing is yielded if no text has two conditions.
    """
    texts = whole.texts
    with_value: dict[tuple[str, str], list[int]] = defaultdict(list)
    anchors: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in positions:
        attributes = texts[i].attributes
        conditions = sorted(key for key in attributes if key in whole.conditions)
        for key in conditions:
            with_value[key, attributes[key]].append(i)
        for pair in combinations(conditions, 2):
            anchors[pair].append(i)

    def find(anchor: int, shared: str, different: str) -> int | None:
        """Return the position of a text that shares the anchor's value of one condition only."""
        candidates = with_value[shared, texts[anchor].attributes[shared]]
        for i in rng.sample(candidates, min(len(candidates), _CANDIDATES)):
            value = texts[i].attributes.get(different)
            if value is None or value == texts[anchor].attributes[different]:
                continue
            if not same_group or texts[i].group == texts[anchor].group:
                return i
        return None

    for pair, of_pair in cycle(anchors.items()):
        condition, other = rng.sample(pair, 2)
        anchor = rng.choice(of_pair)
        first, second = find(anchor, condition, other), find(anchor, other, condition)
        if first is None or second is None:
            yield None
        else:
            yield Triple(anchor, first, second, condition, other)
