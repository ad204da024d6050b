"""Samples of texts with several attributes, as ``bench_aspects.py`` measures them.

Beside the file of a set, ``triples/NAME.json`` may hold a sample of the texts with its paired
triples; without that file, a sample is drawn here.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Literal, get_args

from llmcond.data.aspects import (
    AspectSample,
    ConditionWordings,
    Triple,
    dataset_files,
    parse_sample,
)
from llmcond.errors import UserError, nearest
from llmcond.files import read_json

Wording = Literal["text", "question", "para", "short"]
WORDINGS: tuple[Wording, ...] = get_args(Wording)

#: Texts of a sample, and paired triples among them.
SAMPLE_TEXTS, SAMPLE_TRIPLES = 350, 600
#: Longer texts, in characters, are not sampled.
_LONGEST_TEXT = 600
#: Draws for each triple that is wanted, of which many find no valid triple.
_ATTEMPTS = 40
#: Example values are the commonest, no longer than this many characters.
_COMMONEST, _LONGEST_VALUE = 400, 40


def say(wordings: ConditionWordings, wording: Wording) -> str:
    """Return a condition in a wording; its noun phrase where it has no such wording."""
    if wording == "question":
        return wordings.question or wordings.text
    if wording == "para":
        return (*wordings.others, wordings.text)[0]
    texts = (wordings.text, *wordings.others)
    return min(texts, key=len) if wording == "short" else wordings.text


def limited(sample: AspectSample, most: int) -> AspectSample:
    """Return the first ``most`` triples with their texts, or texts where there are none."""
    triples = sample.triples[:most]
    positions = {i for t in triples for i in (t.anchor, t.first, t.second)}
    return _sample_of(sample, sorted(positions) or range(len(sample.texts))[:most], triples)


def read_samples(folder: Path, names: Sequence[str] = (), seed: int = 0) -> list[AspectSample]:
    """Read the sets of a folder, each as the sample that is measured.

    Args:
        folder: holds NAME.json of each set, and may hold triples/NAME.json.
        names: sets to read; empty: all, in alphabetical order.
        seed: random seed of the samples of sets without a file of triples.

    Raises:
        UserError: no such folder or set, or a file that is not in the format.
    """
    known = dataset_files(folder)
    for name in names:
        if name not in known:
            raise UserError(f"{folder} has no set {name!r}. {nearest(name, known)}")
    return [read_sample(known[name], seed) for name in names or known]


def read_sample(path: Path, seed: int = 0) -> AspectSample:
    """Read one set; see :func:`read_samples`."""
    values = read_json(path)
    whole = parse_sample(values, path.stem, str(path))
    drawn = path.parent / "triples" / path.name
    if drawn.is_file():
        # A file of triples alone is about the texts of the set itself.
        own = read_json(drawn)
        inherited = {key: values[key] for key in ("texts", "conds") if key not in own}
        sample = parse_sample({**own, **inherited}, path.stem, str(drawn))
    elif whole.triples:
        sample = whole
    else:
        sample = draw_sample(whole, bool(values.get("same_group")), seed=seed)
    return replace(sample, values=_unseen_values(whole, sample))


def _unseen_values(whole: AspectSample, sample: AspectSample) -> dict[str, list[str]]:
    """Return for each condition the values of the whole set that no text of the sample has."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for text in whole.texts:
        for key, value in text.attributes.items():
            counts[key][value] += 1
    found = {}
    for key in sample.conditions:
        seen = {text.attributes.get(key) for text in sample.texts}
        commonest = [value for value, _ in counts[key].most_common(_COMMONEST)]
        unseen = [v for v in commonest if v not in seen and 0 < len(v) < _LONGEST_VALUE]
        # Some data sets have values in JSON: texts in quotes are values, objects are not words.
        found[key] = [v.strip('"').replace("_", " ") for v in unseen if v[0] not in "{["]
    return found


def _sample_of(
    source: AspectSample, positions: Sequence[int], triples: Iterable[Triple]
) -> AspectSample:
    """Return a sample of the texts at some positions, which hold all those of the triples."""
    place = {position: i for i, position in enumerate(positions)}
    moved = [
        Triple(place[t.anchor], place[t.first], place[t.second], t.condition, t.other)
        for t in triples
    ]
    texts = [source.texts[position] for position in positions]
    return AspectSample(source.name, texts, source.conditions, moved, source.values)


def draw_sample(
    whole: AspectSample,
    same_group: bool = False,
    n_triples: int = SAMPLE_TRIPLES,
    n_texts: int = SAMPLE_TEXTS,
    seed: int = 0,
) -> AspectSample:
    """Draw paired triples, and the texts that are measured; the same seed draws the same.

    Pairs of conditions take turns. Each time an anchor that has both is drawn, then two texts that
    make a valid triple with it. Once the triples have ``n_texts`` texts between them, further ones
    are drawn among these. Where triples need fewer texts, or none exist, as where each value of one
    condition belongs to a single value of the other, texts drawn at random fill up the sample.

    Args:
        whole: the set.
        same_group: whether the texts of a triple must be of one group.
        n_triples: triples at most.
        n_texts: texts at most.
        seed: random seed.
    """
    rng = random.Random(seed)
    short = [i for i, text in enumerate(whole.texts) if len(text.text) < _LONGEST_TEXT]
    triples: dict[Triple, None] = {}
    positions: set[int] = set()
    for is_full in (False, True):
        draw = _TripleDraw(whole, sorted(positions) if is_full else short, same_group, rng)
        for _ in range(_ATTEMPTS * n_triples if draw.pairs else 0):
            triple = draw.next()
            if triple is None or len(triples) >= n_triples:
                continue
            more = positions | {triple.anchor, triple.first, triple.second}
            if len(more) <= n_texts:
                positions = more
                triples[triple] = None
    others = [i for i in short if i not in positions]
    filling = rng.sample(others, min(len(others), n_texts - len(positions)))
    return _sample_of(whole, sorted([*positions, *filling]), triples)


class _TripleDraw:
    """Draws triples among some texts, one pair of conditions after the other."""

    #: Texts with the anchor's value that are looked at.
    _CANDIDATES = 40

    def __init__(
        self, whole: AspectSample, positions: Sequence[int], same_group: bool, rng: random.Random
    ) -> None:
        self._texts, self._same_group, self._rng = whole.texts, same_group, rng
        self._with_value: dict[tuple[str, str], list[int]] = defaultdict(list)
        anchors: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i in positions:
            attributes = self._texts[i].attributes
            asked = sorted(key for key in attributes if key in whole.conditions)
            for key in asked:
                self._with_value[key, attributes[key]].append(i)
            for pair in combinations(asked, 2):
                anchors[pair].append(i)
        self.pairs = list(anchors.items())
        self._turn = 0

    def next(self) -> Triple | None:
        """Return a triple of the next pair of conditions; None if there is none for an anchor."""
        pair, anchors = self.pairs[self._turn % len(self.pairs)]
        self._turn += 1
        condition, other = self._rng.sample(pair, 2)
        anchor = self._rng.choice(anchors)
        first = self._find(anchor, condition, other)
        second = self._find(anchor, other, condition)
        if first is None or second is None:
            return None
        return Triple(anchor, first, second, condition, other)

    def _find(self, anchor: int, shared: str, different: str) -> int | None:
        """Return a text that has the anchor's value of one condition and not of the other."""
        mine = self._texts[anchor]
        candidates = self._with_value[shared, mine.attributes[shared]]
        for i in self._rng.sample(candidates, min(len(candidates), self._CANDIDATES)):
            text = self._texts[i]
            value = text.attributes.get(different)
            if value is None or value == mine.attributes[different]:
                continue
            if not self._same_group or text.group == mine.group:
                return i
        return None
