"""Dialogues: utterances in turns, as positions into their distinct texts, in splits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.datasets import DEV_FRACTION, FRACTIONS, SPLITS, Problems
from llmcond.data.readers import (
    SUFFIXES,
    MissingColumnError,
    Source,
    open_source,
    read_lines,
    read_records,
    source_name,
    suffix_of,
)
from llmcond.data.rows import split_keys
from llmcond.errors import UserError, brief, first_line
from llmcond.files import digest_bytes, digest_text, replacing
from llmcond.log import log
from llmcond.progress import ReadBar
from llmcond.tasks.base import OTHERS

Positions = NDArray[np.int64]

#: What parts the turns of a line in DailyDialog's .txt files.
END_OF_UTTERANCE = "__eou__"
_TEXT_SUFFIX = ".txt"
_EXPECTED = (
    f"Expected lines of turns separated by {END_OF_UTTERANCE} (.txt), a column utterances with a "
    "list of texts a dialogue, or columns dialogue, text and maybe turn with a row an utterance."
)
#: A dialogue leaks if more than this share of its long utterances, of more letters than these,
#: occurs in a split that it must not know: short ones ("Yes, please.") are anybody's.
LEAK_SHARE, LONG_UTTERANCE = 0.3, 25


@dataclass(frozen=True)
class Turns:
    """The dialogues of a split.

    Attributes:
        utterances: (t,) int64 positions of texts, dialogue after dialogue.
        starts: (m + 1,) int64 where each dialogue begins, and where the last one ends.
        ids: what the file calls each dialogue, or else the number of its row, from 1.
    """

    utterances: Positions
    starts: Positions
    ids: Sequence[str] = ()

    @classmethod
    def of_lists(cls, dialogues: Sequence[Sequence[int]], ids: Sequence[str] = ()) -> Turns:
        """Return turns of dialogues that are lists of positions."""
        starts = np.cumsum([0, *map(len, dialogues)], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(dialogues), dtype=np.int64, count=int(starts[-1]))
        return cls(flat, starts, tuple(ids))

    def __len__(self) -> int:
        """Return how many dialogues there are."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> Positions:
        """Return (m,) how many utterances each dialogue has."""
        return np.diff(self.starts)

    @cached_property
    def dialogue(self) -> Positions:
        """Return (t,) which dialogue each utterance is of."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def of(self, i: int) -> Positions:
        """Return the utterances of a dialogue."""
        return self.utterances[self.starts[i] : self.starts[i + 1]]

    def context(self, h: int) -> tuple[Positions, Positions, Positions]:
        """Return what is known and asked for after h turns, of all dialogues longer than that.

        Returns:
            (n,) the dialogues, (n, h) their first h utterances, (n,) the ones that follow.
        """
        rows = np.flatnonzero(self.lengths > h)
        first = self.starts[rows]
        contexts = self.utterances[first[:, None] + np.arange(h)]
        return rows, contexts, self.utterances[first + h]


@dataclass(frozen=True)
class Dialogues:
    """A data set of dialogues.

    Attributes:
        source: what the user named, or ``sample``.
        texts: all distinct utterances, in the order of their first appearance.
        splits: turns by ``train``, ``dev`` and ``test``; ``test`` may be missing.
        notes: what was decided on the way, or is odd, in sentences for the user.
        split_seed, drop_leaks: how it was read, see :func:`read_dialogues`.
    """

    source: str
    texts: Sequence[str]
    splits: Mapping[str, Turns]
    notes: tuple[str, ...] = ()
    split_seed: int = 0
    drop_leaks: bool = False

    @cached_property
    def digest(self) -> str:
        """Identify texts, dialogues and splits, whatever files they came from."""
        splits = [
            f"{name}:{digest_bytes(own.astype('<i8').tobytes(), size=16).hex()}"
            for name, turns in self.splits.items()
            for own in (turns.utterances, turns.starts)
        ]
        return digest_text(json.dumps(list(self.texts)), *splits)

    def of(self, split: str) -> Turns:
        """Return the dialogues of a split; a UserError if there is none of that name."""
        if split not in self.splits:
            has = ", ".join(self.splits)
            raise UserError(f"{self.source} has no {split} dialogues; it has {has}.")
        return self.splits[split]

    def to_json(self) -> dict[str, Any]:
        """Return the record that manifests keep: source, digest and counts."""
        return {
            "source": self.source,
            "digest": self.digest,
            "rows": {name: len(turns) for name, turns in self.splits.items()},
            "utterances": {name: len(turns.utterances) for name, turns in self.splits.items()},
            "texts": len(self.texts),
            "split_seed": self.split_seed,
            "drop_leaks": self.drop_leaks,
            "notes": list(self.notes),
        }

    def save(self, folder: Path) -> None:
        """Write ``dialogues.parquet``, complete or absent: a row an utterance."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        kept = ("source", "digest", "split_seed", "drop_leaks", "notes")
        about = {key: self.to_json()[key] for key in kept}
        splits = self.splits.values()
        names = np.repeat(list(self.splits), [len(turns.utterances) for turns in splits])
        flat = np.concatenate([turns.utterances for turns in splits])
        table = pa.table(
            {
                "split": names.tolist(),
                "dialogue": np.concatenate([turns.dialogue for turns in splits]),
                "id": [turns.ids[i] for turns in splits for i in turns.dialogue.tolist()],
                "text": [self.texts[i] for i in flat.tolist()],
            }
        ).replace_schema_metadata({"llmcond": json.dumps(about)})
        with replacing(folder / "dialogues.parquet") as path:
            # Absolute: in a relative one with a colon Arrow sees the name of a file system.
            pq.write_table(table, path.absolute())

    @classmethod
    def load(cls, folder: Path) -> Dialogues:
        """Return the data set that :meth:`save` wrote.

        Raises:
            UserError: the file is missing or damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = folder / "dialogues.parquet"
        try:
            table = pq.read_table(path.absolute())
            about = json.loads(table.schema.metadata[b"llmcond"])
            splits: dict[str, list[_Read]] = {}
            last = None
            columns = (table[name].to_pylist() for name in ("split", "dialogue", "id", "text"))
            for split, dialogue, key, text in zip(*columns, strict=True):
                own = splits.setdefault(split, [])
                if (split, dialogue) != last:
                    own.append(_Read(key, []))
                    last = split, dialogue
                own[-1].texts.append(text)
            how = {key: about[key] for key in ("split_seed", "drop_leaks")}
            found = replace(_numbered(about["source"], splits, about["notes"]), **how)
            intact = found.digest == about["digest"]
        except (OSError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
            raise UserError(
                f"the dialogues in {path} cannot be read: {first_line(error)}. Extract into a new "
                "--run."
            ) from error
        if not intact:
            raise UserError(
                f"{path} is not as it was written: its digest is another one. Extract into a new "
                "--run."
            )
        return found


# -- reading -----------------------------------------------------------------------------------


def sample_folder() -> Path:
    """Return the folder of the bundled sample, dialogues of our own making."""
    return Path(__file__).resolve().parents[2] / "data" / "sample_dialogues"


def read_dialogues(source: Any = None, drop_leaks: bool = False, split_seed: int = 0) -> Dialogues:
    """Read a file or a folder of splits; None is the bundled sample.

    A ``.txt`` file has a dialogue a line, whose turns ``__eou__`` parts, as DailyDialog has it. A
    table (CSV, TSV, JSON, JSONL, Parquet, Excel, or one in memory) has a dialogue a row, in a
    column ``utterances`` of lists of texts, with an ``id`` if it likes; or an utterance a row, in
    columns ``dialogue``, ``text`` and maybe ``turn``, by which they are then ordered. White space
    around an utterance is no part of it, and who speaks is not used.

    A single file is split by dialogue (70 % train, 15 % dev, 15 % test), by a hash of the seed and
    its texts; dialogues of the same words stay together. In a folder without a dev file, 10 % of
    the training dialogues become dev. Dialogues of a single utterance are left out, and told of.

    What dev and test share with earlier splits is counted in ``notes``: the same dialogues, word by
    word, and those of whose utterances of more than ``LONG_UTTERANCE`` letters more than
    ``LEAK_SHARE`` occur there; case, white space and signs do not count.

    Args:
        source: a file; a folder with train, dev (or validation) and test files; either as
            ``hf://datasets/...``; or rows in memory.
        drop_leaks: whether dialogues of train that are in dev or test, and dialogues of dev that
            are in test, are left out.
        split_seed: decides how a single file is split.

    Raises:
        UserError: nothing there, an empty file, a missing column, an utterance that is empty or no
            text, no dialogue of two utterances in a split, or nothing left of one.
    """
    opened = open_source(
        str(sample_folder()) if source is None else source, (_TEXT_SUFFIX, *SUFFIXES)
    )
    notes: list[str] = []
    if opened.splits is None:
        read = _read(opened, opened.files, "", notes)
        splits = _divided(read, FRACTIONS, split_seed, opened.name)
        notes.append(f"one file, split by dialogue with seed {split_seed}")
    else:
        splits = {name: _read(opened, own, name, notes) for name, own in opened.splits.items()}
        if "train" not in splits:
            raise UserError(f"{opened.name} has no train file; it has {', '.join(splits)}.")
        if "dev" not in splits:
            shares = {"train": 1 - DEV_FRACTION, "dev": DEV_FRACTION}
            splits |= _divided(splits["train"], shares, split_seed, opened.name)
            share = f"{DEV_FRACTION:.0%} of the training dialogues"
            notes.append(f"no dev file: {share} are dev, chosen with seed {split_seed}")
    notes += _repeated(splits)
    if drop_leaks:
        splits = _without_leaks(splits, notes)
    else:
        notes += _leaks(splits)
    found = _numbered(source_name(source, opened.name), splits, notes)
    return replace(found, split_seed=split_seed, drop_leaks=drop_leaks)


def with_others(data: Dialogues, source: Any, split: str | None = None) -> tuple[Dialogues, str]:
    """Return a data set with a further split, :data:`OTHERS`, of dialogues from elsewhere.

    Their utterances that the data set lacks come after its own texts. Those that are in train, or
    share much with it, are told of; see :func:`read_dialogues`.

    Args:
        data: it.
        source: a file, of which all dialogues count, a folder, or rows in memory.
        split: of a folder; None: test, or dev where it has none.

    Returns:
        It, and what results call the split: the one asked for, or of a file test.

    Raises:
        UserError: as :func:`read_dialogues`, or a folder without that split.
    """
    opened = open_source(source, (_TEXT_SUFFIX, *SUFFIXES))
    files = opened.files
    if opened.splits is not None:
        split = split or ("test" if "test" in opened.splits else "dev")
        if split not in opened.splits:
            has = ", ".join(opened.splits)
            raise UserError(f"{opened.name} has no {split} file; it has {has}.")
        files = opened.splits[split]
    notes: list[str] = []
    read = _read(opened, files, "", notes)
    for note in notes:
        log.info(f"{opened.name}: {note}")
    train = data.of("train")
    texts = ([data.texts[k] for k in train.of(i)] for i in range(len(train)))
    held = _Held(_Read("", own) for own in texts)
    leaked = sum(held.leak(one) for one in read)
    if leaked:
        log.warning(
            f"{leaked:,} of {len(read):,} dialogues of {opened.name} are in the run's train, or "
            f"share more than {LEAK_SHARE:.0%} of their long utterances with it"
        )
    number = {text: i for i, text in enumerate(data.texts)}
    turns = _numbered_turns(read, number)
    split = split or "test"
    log.info(f"scoring all {len(turns):,} dialogues of {opened.name}, as {split}")
    return replace(data, texts=tuple(number), splits={**data.splits, OTHERS: turns}), split


@dataclass(frozen=True)
class _Read:
    """A dialogue as it was read."""

    id: str
    texts: list[str]

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Return its utterances as they are compared: letters and digits, in lower case."""
        return tuple(re.sub(r"\W+", "", text.lower()) for text in self.texts)


def _numbered(
    source: str, splits: Mapping[str, Sequence[_Read]], notes: Iterable[str]
) -> Dialogues:
    """Return the data set of dialogues as they were read."""
    number: dict[str, int] = {}
    turns = {name: _numbered_turns(splits[name], number) for name in SPLITS if name in splits}
    return Dialogues(source, tuple(number), turns, tuple(notes))


def _numbered_turns(read: Sequence[_Read], number: dict[str, int]) -> Turns:
    """Return dialogues as positions of texts; those that ``number`` lacks are added to it."""
    return Turns.of_lists(
        [[number.setdefault(text, len(number)) for text in one.texts] for one in read],
        [one.id for one in read],
    )


def _divided(
    read: Sequence[_Read], fractions: Mapping[str, float], seed: int, source: str
) -> dict[str, list[_Read]]:
    """Divide dialogues by their words, so that those of the same words are in one split."""
    words = [one.words for one in read]
    keys = list(dict.fromkeys(words))
    if len(keys) < len(fractions):
        raise UserError(
            f"{source} has {len(keys)} distinct dialogues; {len(fractions)} at least are needed to "
            f"make {', '.join(fractions)}."
        )
    split_of = dict(zip(keys, split_keys(keys, fractions, seed).tolist(), strict=True))
    return {
        name: [one for one, own in zip(read, words, strict=True) if split_of[own] == index]
        for index, name in enumerate(fractions)
    }


def _read(source: Source, files: Sequence[str], split: str, notes: list[str]) -> list[_Read]:
    """Return the dialogues of a split's files, those of a single utterance left out."""
    found: list[_Read] = []
    for file in files:
        problems = Problems(PurePosixPath(file).name)
        read = _read_text if suffix_of(file) == _TEXT_SUFFIX else _read_table
        with ReadBar(problems.file) as bar:
            found += read(source, file, len(found), problems, bar.count, notes)
        problems.raise_if_any()
    kept = [one for one in found if len(one.texts) > 1]
    name = f"{split} dialogues" if split else "dialogues"
    if not kept:
        raise UserError(
            f"{PurePosixPath(files[0]).name} has no dialogue of two utterances or more. {_EXPECTED}"
        )
    if len(kept) < len(found):
        notes.append(f"{name} of a single utterance, left out: {len(found) - len(kept):,}")
    return kept


_Count = Callable[[Iterable[Any]], Iterable[Any]]


def _read_text(
    source: Source, file: str, before: int, problems: Problems, count: _Count, notes: list[str]
) -> list[_Read]:
    found = []
    for number, line in enumerate(count(read_lines(source, file)), 1):
        if not line.strip():
            continue
        *turns, rest = line.split(END_OF_UTTERANCE)
        if not turns:
            problems.add(number, f"no {END_OF_UTTERANCE}, which ends every turn of a dialogue")
        turns += [rest] if rest.strip() else []
        found.append(_Read(str(before + number), _texts(problems, number, turns)))
    return found


def _texts(problems: Problems, number: int, turns: Iterable[Any]) -> list[str]:
    """Return the utterances of a dialogue in one row, noting those that are none."""
    return [
        problems.text(number, f"turn {turn}", text).strip() for turn, text in enumerate(turns, 1)
    ]


def _read_table(
    source: Source, file: str, before: int, problems: Problems, count: _Count, notes: list[str]
) -> list[_Read]:
    for columns in (
        ["utterances", "id"],
        ["utterances"],
        ["dialogue", "turn", "text"],
        ["dialogue", "text"],
    ):
        records = read_records(source, file, columns)
        try:
            first = next(records)
        except MissingColumnError as error:
            lacking = error
            continue
        if "speakers" in first or "speaker" in first:
            note = "speakers are not used: roles are by how long ago something was said"
            notes += [] if note in notes else [note]
        read = _read_lists if "utterances" in columns else _read_long
        return read(count(chain([first], records)), before, problems)
    raise UserError(f"{lacking.found} {_EXPECTED}")


def _read_lists(records: Iterable[dict[str, Any]], before: int, problems: Problems) -> list[_Read]:
    found = []
    for number, record in enumerate(records, 1):
        turns, key = record["utterances"], record.get("id")
        if not isinstance(turns, list | tuple):
            problems.add(number, f"utterances is {brief(turns)}, not a list of texts")
            turns = []
        name = str(before + number) if key is None else str(key)
        found.append(_Read(name, _texts(problems, number, turns)))
    return found


def _read_long(records: Iterable[dict[str, Any]], before: int, problems: Problems) -> list[_Read]:
    """Return the dialogues of a table that has an utterance a row, in the order of their turns."""
    found: dict[str, dict[float, str]] = {}
    for number, record in enumerate(records, 1):
        key = "" if record["dialogue"] is None else str(record["dialogue"]).strip()
        if not key:
            problems.add(number, "dialogue is empty")
        own = found.setdefault(key, {})
        turn = _turn(record["turn"]) if "turn" in record else float(len(own))
        if turn is None:
            problems.add(number, f"turn is {brief(record['turn'])}, not a number")
        elif turn in own:
            problems.add(number, f"turn {turn:g} of dialogue {brief(key)} is there before")
        else:
            own[turn] = problems.text(number, "text", record["text"]).strip()
    return [_Read(key, [own[turn] for turn in sorted(own)]) for key, own in found.items()]


def _turn(value: Any) -> float | None:
    """Return the number of a turn; None if it is none."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


# -- what splits share -------------------------------------------------------------------------


def _repeated(splits: Mapping[str, Sequence[_Read]]) -> Iterator[str]:
    """Yield how many dialogues of each split are there before, which stay."""
    for name, own in splits.items():
        again = len(own) - len({one.words for one in own})
        if again:
            yield f"{name} dialogues that are there before, word by word: {again:,}"


class _Held:
    """What is known of dialogues that others must not share: their words."""

    def __init__(self, read: Iterable[_Read]) -> None:
        self._dialogues = {one.words for one in read}
        self._utterances = set(chain.from_iterable(self._dialogues))

    def leak(self, one: _Read) -> bool:
        """Return whether a dialogue is one of them, or shares too much with them."""
        long = [words for words in one.words if len(words) > LONG_UTTERANCE]
        shared = sum(words in self._utterances for words in long)
        return one.words in self._dialogues or shared > LEAK_SHARE * len(long)


def _leaks(splits: Mapping[str, Sequence[_Read]]) -> Iterator[str]:
    """Yield how many dialogues of each split later ones share, wholly and for a good part."""
    for name, later in _later(splits):
        own = {one.words for one in splits[name]}
        for other in later:
            many = sum(one.words in own for one in splits[other])
            if many:
                yield f"{other} dialogues that are in {name} too, word by word: {many:,}"
        held = _Held(one for other in later for one in splits[other])
        many = sum(held.leak(one) for one in splits[name])
        if many:
            yield (
                f"{name} dialogues that are in {' or '.join(later)}, or share more than "
                f"{LEAK_SHARE:.0%} of their long utterances with them: {many:,} (--drop-leaks "
                "leaves them out)"
            )


def _without_leaks(splits: Mapping[str, list[_Read]], notes: list[str]) -> dict[str, list[_Read]]:
    """Return splits without what later ones share; the last ones first, so that train knows."""
    kept = dict(splits)
    for name, later in reversed(list(_later(splits))):
        held = _Held(one for other in later for one in kept[other])
        own = [one for one in kept[name] if not held.leak(one)]
        if not own:
            raise UserError(
                f"every one of the {len(kept[name]):,} {name} dialogues is in {' or '.join(later)} "
                "too; --drop-leaks leaves none. Name other splits."
            )
        if len(own) < len(kept[name]):
            many, others = len(kept[name]) - len(own), " or ".join(later)
            notes.append(f"{name} dialogues left out for what they share with {others}: {many:,}")
        kept[name] = own
    return kept


def _later(splits: Mapping[str, object]) -> Iterator[tuple[str, list[str]]]:
    """Yield train and dev with the splits that must not be known in them."""
    for place, name in enumerate(SPLITS):
        later = [other for other in SPLITS[place + 1 :] if other in splits]
        if name in splits and later:
            yield name, later
