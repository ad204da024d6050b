"""Texts with several attributes, the conditions that ask for them, and paired triples of both.

A set is one JSON file: ``{"texts": [{"text", "attrs": {condition id: value}, "group"}], "conds":
{condition id: {"text", "question", "para": [...]}}, "same_group": false}``. The keys ``group``,
``question``, ``para`` and ``same_group`` are optional. Beside it, ``triples/NAME.json`` may hold a
sample of the texts with its paired triples; without that file, a sample is drawn here.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

from llmcond.errors import UserError, brief, listed, nearest
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


@dataclass(frozen=True, slots=True)
class AspectText:
    """A text with the values of its attributes by condition; only these are asked of it."""

    text: str
    attributes: Mapping[str, str]
    group: str = ""


@dataclass(frozen=True, slots=True)
class ConditionWordings:
    """Ways to say a condition: a noun phrase, a question (may be empty), other noun phrases."""

    text: str
    question: str = ""
    others: tuple[str, ...] = ()

    def say(self, wording: Wording) -> str:
        """Return the condition in a wording; its noun phrase where it has no such wording."""
        if wording == "question":
            return self.question or self.text
        if wording == "para":
            return (*self.others, self.text)[0]
        return min((self.text, *self.others), key=len) if wording == "short" else self.text


@dataclass(frozen=True, slots=True)
class Triple:
    """A paired triple, by the positions of its texts.

    Under ``condition`` the first text is the nearer one to the anchor: it has the anchor's value of
    ``condition``, and not of ``other``. Under ``other`` it is the second, which has the reverse.
    """

    anchor: int
    first: int
    second: int
    condition: str
    other: str


@dataclass(frozen=True, slots=True)
class AspectSample:
    """Texts that are measured, with conditions and paired triples (none where none exist).

    Attributes:
        values: for each condition, values that no text of the sample has, the commonest first.
    """

    name: str
    texts: Sequence[AspectText]
    conditions: Mapping[str, ConditionWordings]
    triples: Sequence[Triple] = ()
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def limited(self, most: int) -> AspectSample:
        """Return the first ``most`` triples with their texts, or texts where there are none."""
        triples = self.triples[:most]
        positions = {i for t in triples for i in (t.anchor, t.first, t.second)}
        return _sample_of(self, sorted(positions) or range(len(self.texts))[:most], triples)


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


# -- reading -----------------------------------------------------------------------------------


def read_samples(folder: Path, names: Sequence[str] = (), seed: int = 0) -> list[AspectSample]:
    """Read the sets of a folder, each as the sample that is measured.

    Args:
        folder: holds NAME.json of each set, and may hold triples/NAME.json.
        names: sets to read; empty: all, in alphabetical order.
        seed: random seed of the samples of sets without a file of triples.

    Raises:
        UserError: no such folder or set, or a file that is not in the format.
    """
    known = set_files(folder)
    for name in names:
        if name not in known:
            raise UserError(f"{folder} has no set {name!r}. {nearest(name, known)}")
    return [read_sample(known[name], seed) for name in names or known]


def set_files(folder: Path) -> dict[str, Path]:
    """Return the file of each set of a folder by its name; a UserError if there is none."""
    found = {path.stem: path for path in sorted(folder.glob("*.json"))}
    if not found:
        raise UserError(
            f"{folder} holds no data set. Name a folder that has one file NAME.json a set: "
            '{"texts": [{"text", "attrs"}], "conds": {ID: {"text"}}}'
        )
    return found


def read_sets(folder: Path) -> list[AspectSample]:
    """Read all sets of a folder with all of their texts; errors as of :func:`read_samples`."""
    files = set_files(folder).items()
    return [parse_sample(read_json(path), name, str(path)) for name, path in files]


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
    return AspectSample(
        sample.name, sample.texts, sample.conditions, sample.triples, _unseen_values(whole, sample)
    )


def parse_sample(values: Mapping[str, Any], name: str, source: str) -> AspectSample:
    """Check what a file holds, and return it; ``source`` is what messages call the file.

    Raises:
        UserError: it is not in the format, or one of its triples is not valid.
    """
    texts = [
        _parse_text(item, f"{source}: texts[{i}]")
        for i, item in enumerate(_get(values, "texts", list, source))
    ]
    conditions = {
        str(key): _parse_wordings(item, f"{source}: conds[{key!r}]")
        for key, item in _get(values, "conds", dict, source).items()
    }
    if not texts or not conditions:
        raise UserError(f"{source} has no {'conds' if texts else 'texts'}.")
    asked = {key for text in texts for key in text.attributes}
    if not asked & set(conditions):
        raise UserError(
            f"{source}: no text has an attribute that a condition asks for. Attributes: "
            f"{listed(sorted(asked), 5)}; conditions: {listed(sorted(conditions), 5)}."
        )
    triples = [
        _parse_triple(item, texts, conditions, f"{source}: triples[{i}]")
        for i, item in enumerate(values.get("triples") or [])
    ]
    return AspectSample(name, texts, conditions, triples)


_KINDS: Mapping[type, str] = {str: "a text", list: "a list", dict: "an object"}


def _get(values: Any, key: str, kind: type, source: str) -> Any:
    """Return what a JSON object holds under a key; a UserError where that is of another kind."""
    if not isinstance(values, dict):
        raise UserError(f"{source} is {brief(values)}; expected an object.")
    if not isinstance(values.get(key), kind):
        got = brief(values[key]) if key in values else "missing"
        raise UserError(f"{source}: {key!r} is {got}; expected {_KINDS[kind]}.")
    return values[key]


def _parse_text(item: Any, source: str) -> AspectText:
    text, attributes = _get(item, "text", str, source), _get(item, "attrs", dict, source)
    if not text.strip():
        raise UserError(f"{source} is empty; leave it out.")
    for key, value in attributes.items():
        if isinstance(value, list | dict):
            raise UserError(
                f"{source}: attrs[{key!r}] is {brief(value)}; expected one value: a text or number."
            )
    values = {key: str(value) for key, value in attributes.items() if value is not None}
    return AspectText(text, values, str(item.get("group") or ""))


def _parse_wordings(item: Any, source: str) -> ConditionWordings:
    if isinstance(item, str):
        item = {"text": item}
    text = _get(item, "text", str, source)
    others = item.get("para") or []
    others = [others] if isinstance(others, str) else others
    question = item.get("question") or ""
    if not text.strip():
        raise UserError(f"{source}: 'text' is empty; expected a noun phrase.")
    if not isinstance(others, list) or not all(isinstance(x, str) for x in (question, *others)):
        raise UserError(
            f"{source}: expected a text for 'question', and a list of texts for 'para'."
        )
    return ConditionWordings(text, question, tuple(filter(str.strip, others)))


def _parse_triple(
    item: Any, texts: Sequence[AspectText], conditions: Mapping[str, Any], source: str
) -> Triple:
    keys = ["a", "x", "y", "c", "d"]
    if isinstance(item, dict) and set(keys) <= set(item):
        item = [item[key] for key in keys]
    if not isinstance(item, list) or len(item) != len(keys):
        raise UserError(f"{source} is {brief(item)}; expected [a, x, y, c, d].")
    positions, asked = item[:3], [str(key) for key in item[3:]]
    for position in positions:
        if type(position) is not int or not 0 <= position < len(texts):
            raise UserError(
                f"{source} names the text {brief(position)}; expected a position from 0 to "
                f"{len(texts) - 1:,}."
            )
    for key in asked:
        if key not in conditions:
            raise UserError(f"{source} asks for {brief(key)}. {nearest(key, conditions)}")
    triple = Triple(*positions, *asked)
    if not is_valid(triple, texts):
        raise UserError(
            f"{source} is no paired triple: x must have a's value of c and not of d, and y a's "
            "value of d and not of c."
        )
    return triple


def is_valid(triple: Triple, texts: Sequence[AspectText]) -> bool:
    """Return whether each of the two other texts has just one of the anchor's two values."""
    anchor, first, second = (
        [texts[i].attributes.get(key) for key in (triple.condition, triple.other)]
        for i in (triple.anchor, triple.first, triple.second)
    )
    shared = anchor[0] == first[0] and anchor[1] == second[1]
    return None not in anchor and shared and anchor[1] != first[1] and anchor[0] != second[0]


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


# -- sampling ----------------------------------------------------------------------------------


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
    rng = random.Random(seed)  # noqa: S311  # nothing is secret here
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
