"""Datasets of dialogues, whose turns are positions in a list of distinct utterances."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np
from typing_extensions import override

from llmcond.base.arrays import Positions
from llmcond.base.errors import UserError, shortened_repr
from llmcond.base.files import digest_bytes, digest_text
from llmcond.base.output import ProgressBar, log
from llmcond.data.datasets import SPLITS, Problems, find_split, list_numbers, read_splits
from llmcond.data.formats import MissingColumnError, ReadOptions
from llmcond.data.readers import (
    SUFFIXES,
    Source,
    open_source,
    read_lines,
    read_records,
    source_name,
)
from llmcond.data.rows import split_keys
from llmcond.encoders.spec import EncoderInput
from llmcond.prompts.template import Prompt
from llmcond.tasks import OTHER_SPLIT, SplitData

#: Separator of the turns of a line in DailyDialog's .txt files.
END_OF_UTTERANCE = "__eou__"
_TEXT_SUFFIX = ".txt"
_EXPECTED = (
    f"Expected lines of turns separated by {END_OF_UTTERANCE} (.txt), a row per dialogue with a "
    "column utterances (a list of texts), or a row per utterance with columns dialogue, text and "
    "optionally turn."
)
#: A dialogue leaks if more than this share of its long utterances occurs in a split that must not
#: be known. An utterance is long if it has more than this number of letters: short ones ("Yes,
#: please.") occur in many dialogues.
LEAK_SHARE, LONG_UTTERANCE = 0.3, 25


@dataclass(frozen=True)
class Turns:
    """The dialogues of a split.

    Attributes:
        utterances: position of the text of each turn, dialogue by dialogue, (t,) int64.
        starts: first turn of each dialogue, and the number of turns, (m + 1,) int64.
        ids: id of each dialogue in the file, or the number of its row, from 1.
    """

    utterances: Positions
    starts: Positions
    ids: Sequence[str] = ()

    @classmethod
    def from_lists(
        cls, dialogues: Sequence[Sequence[int] | Positions], ids: Sequence[str] = ()
    ) -> Turns:
        """Create the turns of dialogues that are lists of positions."""
        starts = np.cumsum([0, *map(len, dialogues)], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(dialogues), dtype=np.int64, count=int(starts[-1]))
        return cls(flat, starts, tuple(ids))

    def __len__(self) -> int:
        """Return the number of dialogues."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> Positions:
        """The number of utterances of each dialogue, (m,)."""
        return np.diff(self.starts)

    @cached_property
    def dialogue(self) -> Positions:
        """The dialogue of each utterance, (t,)."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def utterances_of(self, i: int) -> Positions:
        """Return the utterances of dialogue ``i``."""
        return self.utterances[self.starts[i] : self.starts[i + 1]]

    def contexts(self, h: int) -> tuple[Positions, Positions, Positions]:
        """Return the contexts of h turns, and the next turns, of all dialogues longer than that.

        Returns:
            The dialogues (n,), their first h utterances (n, h), and the utterances that follow
            (n,).
        """
        rows = np.flatnonzero(self.lengths > h)
        first = self.starts[rows]
        contexts = self.utterances[first[:, None] + np.arange(h)]
        return rows, contexts, self.utterances[first + h]


@dataclass(frozen=True)
class Dialogues(SplitData):
    """A dataset of dialogues.

    Attributes:
        source: path that the user gave, or ``sample``.
        texts: all distinct utterances, in the order of their first appearance.
        splits: turns of ``train``, ``dev`` and ``test``; ``test`` may be missing.
        notes: remarks on the data and on how it was read, for the user, each a sentence.
        split_seed: option with which it was read; see ``read_dialogues``.
        drop_leaks: option with which it was read; see ``read_dialogues``.
    """

    tables = ("dialogues",)
    options = ("split_seed", "drop_leaks")
    unit = "dialogues"

    source: str
    texts: Sequence[str]
    splits: Mapping[str, Turns]
    notes: tuple[str, ...] = ()
    split_seed: int = 0
    drop_leaks: bool = False

    @cached_property
    def digest(self) -> str:
        """A digest of texts, dialogues and splits, independent of the format of the files."""
        splits = [
            f"{name}:{digest_bytes(values.astype('<i8').tobytes(), size=16).hex()}"
            for name, turns in self.splits.items()
            for values in (turns.utterances, turns.starts)
        ]
        return digest_text(json.dumps(list(self.texts)), *splits)

    def turns_of(self, split: str) -> Turns:
        """Return the dialogues of a split; a UserError if there is no such split."""
        turns: Turns = self.part(split)
        return turns

    @override
    def to_json(self) -> dict[str, Any]:
        utterances = {name: len(turns.utterances) for name, turns in self.splits.items()}
        return {**super().to_json(), "utterances": utterances, "texts": len(self.texts)}

    @override
    def to_tables(self) -> Mapping[str, Mapping[str, Any]]:
        splits = self.splits.values()
        positions = [i for turns in splits for i in turns.utterances.tolist()]
        columns = {
            "split": [name for name, turns in self.splits.items() for _ in turns.utterances],
            "dialogue": np.concatenate([turns.dialogue for turns in splits]),
            "id": [turns.ids[i] for turns in splits for i in turns.dialogue.tolist()],
            "text": [self.texts[i] for i in positions],
        }
        return {"dialogues": columns}

    @override
    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], about: Mapping[str, Any]) -> Self:
        splits: dict[str, list[_Dialogue]] = {}
        last = None
        names = ("split", "dialogue", "id", "text")
        columns = (tables["dialogues"][name].to_pylist() for name in names)
        for split, dialogue, key, text in zip(*columns, strict=True):
            dialogues = splits.setdefault(split, [])
            if (split, dialogue) != last:
                dialogues.append(_Dialogue(key, []))
                last = split, dialogue
            dialogues[-1].texts.append(text)
        texts, turns = _index_dialogues(splits)
        options = {key: about[key] for key in cls.options}
        return cls(about["source"], texts, turns, tuple(about["notes"]), **options)


# -- reading -----------------------------------------------------------------------------------


def sample_folder() -> Path:
    """Return the folder of the bundled sample dialogues, which were written for llmcond."""
    return Path(__file__).resolve().parents[2] / "data" / "sample_dialogues"


def read_dialogues(
    source: Any = None,
    drop_leaks: bool = False,
    split_seed: int = 0,
    reading: ReadOptions | None = None,
) -> Dialogues:
    """Read dialogues from a file or a folder of splits; None reads the bundled sample.

    A ``.txt`` file has a dialogue per line, with turns separated by ``__eou__``, like DailyDialog.
    A table (CSV, TSV, JSON, JSONL, Parquet, Excel, or in memory) has either a row per dialogue or a
    row per utterance. A row per dialogue has a column ``utterances`` with a list of texts and,
    optionally, an ``id``. A row per utterance has the columns ``dialogue``, ``text`` and,
    optionally, ``turn``, by which the utterances are ordered. White space around utterances is
    removed. Speakers are not used.

    A single file is split by dialogue (70 % train, 15 % dev, 15 % test), by a hash of the seed and
    the texts; dialogues with the same words are in the same split. In a folder without a dev file,
    10 % of the training dialogues become dev. Dialogues of a single utterance are left out, and a
    note gives their number.

    Notes also count what dev and test share with earlier splits. They count dialogues that are the
    same word by word, and dialogues of which more than ``LEAK_SHARE`` of the utterances with more
    than ``LONG_UTTERANCE`` letters occur in the other split. Case, white space and punctuation are
    ignored.

    Args:
        source: file; folder with train, dev (or validation) and test files; either of these as
            ``hf://datasets/...``; or rows in memory.
        drop_leaks: whether to leave out dialogues of train that leak from dev or test, and
            dialogues of dev that leak from test.
        split_seed: seed with which a single file is split.
        reading: how text files are read; None: the caller has no such options.

    Raises:
        UserError: The source does not exist, a file is empty, a column is missing, an utterance is
            empty or not a text, a split has no dialogue of two utterances, or ``drop_leaks`` leaves
            no dialogue in a split.
    """
    opened = open_source(
        str(sample_folder()) if source is None else source, (_TEXT_SUFFIX, *SUFFIXES), reading
    )
    notes: list[str] = []
    splits, split_notes = read_splits(
        opened,
        lambda files, split: _read_files(opened, files, split, notes),
        partial(_split_dialogues, opened.name),
        split_seed,
        ("dialogue", "dialogues"),
    )
    notes += [*split_notes, *_count_repeated(splits)]
    if drop_leaks:
        splits = _remove_leaks(splits, notes)
    else:
        notes += _count_leaks(splits)
    name = source_name(source, opened.name)
    return Dialogues(name, *_index_dialogues(splits), tuple(notes), split_seed, drop_leaks)


def add_external_split(
    data: Dialogues, source: Any, split: str | None = None, reading: ReadOptions | None = None
) -> tuple[Dialogues, str]:
    """Return a dataset with an additional split, ``OTHER_SPLIT``, of dialogues from another source.

    New utterances are appended to the texts of the dataset. A warning gives the number of dialogues
    that leak from the dataset's train split; see ``read_dialogues``.

    Args:
        data: the dataset.
        source: file of which all dialogues are read, folder, or rows in memory.
        split: split of a folder; by default test, or dev if there is no test file.
        reading: how text files are read; None: the caller has no such options.

    Returns:
        The dataset, and the split's name in results: the split that was read, or test for a file.

    Raises:
        UserError: As for ``read_dialogues``, or the folder has no such split.
    """
    opened = open_source(source, (_TEXT_SUFFIX, *SUFFIXES), reading)
    files, split = find_split(opened, split)
    notes: list[str] = []
    dialogues = _read_files(opened, files, "", notes)
    for note in notes:
        log.info(f"{opened.name}: {note}")
    train = data.turns_of("train")
    texts = ([data.texts[k] for k in train.utterances_of(i)] for i in range(len(train)))
    train_dialogues = _KnownDialogues(_Dialogue("", utterances) for utterances in texts)
    n_leaked = sum(train_dialogues.overlap_with(dialogue) for dialogue in dialogues)
    if n_leaked:
        log.warning(
            f"{n_leaked:,} of {len(dialogues):,} dialogues of {opened.name} are in the run's train "
            f"split, or share more than {LEAK_SHARE:.0%} of their long utterances with it"
        )
    index = TextIndex(data.texts)
    turns = _index_turns(dialogues, index)
    log.info(f"scoring all {len(turns):,} dialogues of {opened.name}, as {split}")
    return replace(
        data, texts=tuple(index.texts), splits={**data.splits, OTHER_SPLIT: turns}
    ), split


@dataclass(frozen=True)
class _Dialogue:
    """A dialogue before its utterances are replaced by positions."""

    id: str
    texts: list[str]

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The utterances in the form that is compared: letters and digits, in lower case."""
        return tuple(re.sub(r"\W+", "", text.lower()) for text in self.texts)


class TextIndex:
    """The positions of distinct texts, to which new texts are appended."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._position = {text: i for i, text in enumerate(texts)}
        self._n_known = len(texts)

    def find(self, texts: Iterable[str]) -> Positions:
        """Return the positions of n texts, (n,)."""
        positions = (self._position.setdefault(text, len(self._position)) for text in texts)
        return np.fromiter(positions, dtype=np.int64)

    @property
    def texts(self) -> list[str]:
        """All texts by their position."""
        return list(self._position)

    @property
    def new(self) -> list[str]:
        """The texts that were appended."""
        return self.texts[self._n_known :]


def _index_dialogues(
    splits: Mapping[str, Sequence[_Dialogue]],
) -> tuple[tuple[str, ...], dict[str, Turns]]:
    """Return the distinct utterances of all splits, and the turns of each split."""
    index = TextIndex()
    turns = {name: _index_turns(splits[name], index) for name in SPLITS if name in splits}
    return tuple(index.texts), turns


def _index_turns(dialogues: Sequence[_Dialogue], index: TextIndex) -> Turns:
    """Replace utterances by their positions."""
    positions = [index.find(dialogue.texts) for dialogue in dialogues]
    return Turns.from_lists(positions, [dialogue.id for dialogue in dialogues])


def _split_dialogues(
    source: str, dialogues: Sequence[_Dialogue], fractions: Mapping[str, float], seed: int
) -> dict[str, list[_Dialogue]]:
    """Split dialogues by their words, so that dialogues with the same words are in one split."""
    words = [dialogue.words for dialogue in dialogues]
    keys = list(dict.fromkeys(words))
    if len(keys) < len(fractions):
        raise UserError(
            f"{source} has {len(keys)} distinct dialogues, but at least {len(fractions)} are "
            f"needed for the splits {', '.join(fractions)}."
        )
    split_of = dict(zip(keys, split_keys(keys, fractions, seed).tolist(), strict=True))
    return {
        name: [
            dialogue
            for dialogue, dialogue_words in zip(dialogues, words, strict=True)
            if split_of[dialogue_words] == index
        ]
        for index, name in enumerate(fractions)
    }


def _read_files(
    source: Source, files: Sequence[str], split: str, notes: list[str]
) -> list[_Dialogue]:
    """Read the dialogues of a split's files, except those of a single utterance."""
    dialogues: list[_Dialogue] = []
    for file in files:
        problems = Problems.of(source, file)
        read_file = _read_text if source.suffix(file) == _TEXT_SUFFIX else _read_table
        with ProgressBar(f"reading {problems.file}", visible=False) as bar:
            dialogues += read_file(source, file, len(dialogues), problems, bar.count, notes)
        problems.raise_if_any()
        if problems.left_out:
            notes.append(
                f"empty utterances of {problems.file}, left out: {len(problems.left_out):,}, in "
                f"the rows {list_numbers(problems.left_out)}"
            )
    long_enough = [dialogue for dialogue in dialogues if len(dialogue.texts) > 1]
    name = f"{split} dialogues" if split else "dialogues"
    if not long_enough:
        raise UserError(
            f"{PurePosixPath(files[0]).name} has no dialogue of two utterances or more. {_EXPECTED}"
        )
    if len(long_enough) < len(dialogues):
        notes.append(
            f"{name} of a single utterance, left out: {len(dialogues) - len(long_enough):,}"
        )
    return long_enough


_ProgressWrapper = Callable[[Iterable[Any]], Iterable[Any]]


def _read_text(
    source: Source,
    file: str,
    offset: int,
    problems: Problems,
    count: _ProgressWrapper,
    notes: list[str],
) -> list[_Dialogue]:
    dialogues = []
    for number, line in enumerate(count(read_lines(source, file)), 1):
        if not line.strip():
            continue
        *turns, rest = line.split(END_OF_UTTERANCE)
        if not turns:
            problems.add(number, f"no {END_OF_UTTERANCE}, which ends every turn of a dialogue")
        turns += [rest] if rest.strip() else []
        dialogues.append(
            _Dialogue(str(offset + number), _check_utterances(problems, number, turns))
        )
    return dialogues


def _check_utterances(problems: Problems, number: int, turns: Iterable[Any]) -> list[str]:
    """Return the utterances of a dialogue in a row, and add invalid ones to ``problems``."""
    texts = (problems.text(number, f"turn {turn}", text) for turn, text in enumerate(turns, 1))
    return [text.strip() for text in texts if text]


def _read_table(
    source: Source,
    file: str,
    offset: int,
    problems: Problems,
    count: _ProgressWrapper,
    notes: list[str],
) -> list[_Dialogue]:
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
            missing = error
            continue
        if "speakers" in first or "speaker" in first:
            note = "speakers are not used: roles depend on how long ago something was said"
            notes += [] if note in notes else [note]
        read_rows = _read_dialogue_rows if "utterances" in columns else _read_utterance_rows
        return read_rows(count(chain([first], records)), offset, problems)
    raise UserError(f"{missing.finding} {_EXPECTED}")


def _read_dialogue_rows(
    records: Iterable[dict[str, Any]], offset: int, problems: Problems
) -> list[_Dialogue]:
    dialogues = []
    for number, record in enumerate(records, 1):
        turns, key = record["utterances"], record.get("id")
        if not isinstance(turns, list | tuple):
            problems.add(number, f"utterances is {shortened_repr(turns)}, not a list of texts")
            turns = []
        name = str(offset + number) if key is None else str(key)
        dialogues.append(_Dialogue(name, _check_utterances(problems, number, turns)))
    return dialogues


def _read_utterance_rows(
    records: Iterable[dict[str, Any]], offset: int, problems: Problems
) -> list[_Dialogue]:
    """Return the dialogues of a table with a row per utterance, in the order of their turns."""
    turns_by_dialogue: dict[str, dict[float, str]] = {}
    for number, record in enumerate(records, 1):
        key = "" if record["dialogue"] is None else str(record["dialogue"]).strip()
        if not key:
            problems.add(number, "dialogue is empty")
        turns = turns_by_dialogue.setdefault(key, {})
        turn = _parse_turn(record["turn"]) if "turn" in record else float(len(turns))
        if turn is None:
            problems.add(number, f"turn is {shortened_repr(record['turn'])}, not a number")
        elif turn in turns:
            problems.add(number, f"turn {turn:g} of dialogue {shortened_repr(key)} occurs twice")
        elif text := problems.text(number, "text", record["text"]).strip():
            turns[turn] = text
    return [
        _Dialogue(key, [turns[turn] for turn in sorted(turns)])
        for key, turns in turns_by_dialogue.items()
    ]


def _parse_turn(value: Any) -> float | None:
    """Return the number of a turn; None if the value is not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


# -- overlaps of splits ------------------------------------------------------------------------


def _count_repeated(splits: Mapping[str, Sequence[_Dialogue]]) -> Iterator[str]:
    """Yield the number of repeated dialogues of each split, which are kept."""
    for name, dialogues in splits.items():
        n_repeated = len(dialogues) - len({dialogue.words for dialogue in dialogues})
        if n_repeated:
            yield f"repeated {name} dialogues, the same word by word: {n_repeated:,}"


class _KnownDialogues:
    """The words of dialogues that must not occur in another split."""

    def __init__(self, dialogues: Iterable[_Dialogue]) -> None:
        self._dialogues = {dialogue.words for dialogue in dialogues}
        self._utterances = set(chain.from_iterable(self._dialogues))

    def overlap_with(self, dialogue: _Dialogue) -> bool:
        """Return whether a dialogue is one of them, or shares too many utterances with them."""
        long_utterances = [words for words in dialogue.words if len(words) > LONG_UTTERANCE]
        n_shared = sum(words in self._utterances for words in long_utterances)
        return dialogue.words in self._dialogues or n_shared > LEAK_SHARE * len(long_utterances)


def _count_leaks(splits: Mapping[str, Sequence[_Dialogue]]) -> Iterator[str]:
    """Yield how many dialogues of each split are, wholly or largely, in later splits."""
    for name, later in _later_splits(splits):
        dialogue_words = {dialogue.words for dialogue in splits[name]}
        for other in later:
            n_dialogues = sum(dialogue.words in dialogue_words for dialogue in splits[other])
            if n_dialogues:
                yield f"{other} dialogues that are in {name} too, word by word: {n_dialogues:,}"
        known = _KnownDialogues(dialogue for other in later for dialogue in splits[other])
        n_dialogues = sum(known.overlap_with(dialogue) for dialogue in splits[name])
        if n_dialogues:
            yield (
                f"{name} dialogues that are in {' or '.join(later)}, or share more than "
                f"{LEAK_SHARE:.0%} of their long utterances with them: {n_dialogues:,} "
                "(--drop-leaks leaves them out)"
            )


def _remove_leaks(
    splits: Mapping[str, list[_Dialogue]], notes: list[str]
) -> dict[str, list[_Dialogue]]:
    """Return splits without dialogues that later splits share.

    The last splits come first, so that train is compared with what remains of dev.
    """
    remaining = dict(splits)
    for name, later in reversed(list(_later_splits(splits))):
        known = _KnownDialogues(dialogue for other in later for dialogue in remaining[other])
        dialogues = [dialogue for dialogue in remaining[name] if not known.overlap_with(dialogue)]
        if not dialogues:
            raise UserError(
                f"all {len(remaining[name]):,} {name} dialogues overlap with {' or '.join(later)}, "
                "so --drop-leaks leaves none. Choose other splits."
            )
        if len(dialogues) < len(remaining[name]):
            n_removed, later_names = len(remaining[name]) - len(dialogues), " or ".join(later)
            notes.append(
                f"{name} dialogues left out, because they overlap with {later_names}: {n_removed:,}"
            )
        remaining[name] = dialogues
    return remaining


def _later_splits(splits: Mapping[str, object]) -> Iterator[tuple[str, list[str]]]:
    """Yield train and dev, each with the later splits, which it must not contain."""
    for position, name in enumerate(SPLITS):
        later = [other for other in SPLITS[position + 1 :] if other in splits]
        if name in splits and later:
            yield name, later


class UtteranceInputs(list[EncoderInput]):
    """The inputs of distinct texts, each encoded without a condition: e(u)."""

    def __init__(self, texts: Sequence[str], prompt: Prompt) -> None:
        """Render distinct texts.

        Raises:
            UserError: The template cannot be used for texts without a condition.
        """
        obstacle, part = obstacle_to(prompt), prompt.sentence_part
        if obstacle or part is None:
            raise UserError(
                f"the prompt {prompt.name} cannot be used for dialogues: {obstacle}. Choose "
                "another --prompt, such as separate."
            )
        super().__init__(part.render(text, "") for text in texts)
        self._texts = texts

    def locate(self, item: EncoderInput) -> str | None:
        """Return a description of the text that needs an input, such as ``the utterance 'Hi!'``."""
        return f"the utterance {self._texts[self.index(item)]!r}" if item in self else None


def obstacle_to(prompt: Prompt) -> str:
    """Return why utterances cannot be encoded by a prompt; empty if they can."""
    if prompt.fields:
        return f"it names the column {prompt.fields[0]!r}, and utterances have none"
    if prompt.control is not None:
        return "it is a control for conditions, and utterances have none"
    if prompt.sentence_part is None:
        return "it encodes no sentence without its condition"
    return ""
