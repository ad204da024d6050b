"""Reading dialogues: formats, splits, leaks, error messages and storage."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmcond.base.errors import UserError
from llmcond.data.datasets import DataOptions
from llmcond.data.formats import ReadOptions
from llmcond.kinds.dialogue.data import Dialogues, read_dialogues
from llmcond.tasks import find_task

DIALOGUES = [["Hi!", "Hello.", "Bye."], ["Hello.", "Hi!"], ["Tea?", "Yes.", "Milk?", "No."]]


def to_lines(dialogues) -> str:
    return "".join(" __eou__ ".join(turns) + " __eou__\n" for turns in dialogues)


def to_jsonl(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def list_dialogues(data: Dialogues, split: str) -> list[list[str]]:
    turns = data.splits[split]
    return [[data.texts[i] for i in turns.utterances_of(k)] for k in range(len(turns))]


def make_dialogues(n: int, word: str = "talk") -> list[list[str]]:
    return [[f"{word} {i}", f"answer {i}", "So it is."] for i in range(n)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder in which train, dev and test share short utterances only."""
    for split, file in (("train", "train.txt"), ("dev", "validation.txt"), ("test", "test.txt")):
        (tmp_path / file).write_text(to_lines(make_dialogues(4, split)))
    return tmp_path


# -- formats -----------------------------------------------------------------------------------


def test_every_format_gives_same_dialogues(tmp_path: Path):
    rows = [
        {"dialogue": f"d{k}", "turn": turn, "text": text}
        for k, turns in enumerate(DIALOGUES)
        for turn, text in enumerate(turns)
    ]
    (tmp_path / "train.txt").write_text("\n" + to_lines(DIALOGUES))
    dialogue_rows = [{"utterances": turns, "speakers": [0, 1]} for turns in DIALOGUES]
    (tmp_path / "dev.jsonl").write_text(to_jsonl(*dialogue_rows))
    # The turn numbers decide, not the order of the rows.
    table = pa.Table.from_pylist(rows[::-1]).sort_by("dialogue")
    pq.write_table(table, tmp_path / "test.parquet")
    data = read_dialogues(tmp_path)
    assert data.texts == ("Hi!", "Hello.", "Bye.", "Tea?", "Yes.", "Milk?", "No.")
    assert {split: list_dialogues(data, split) for split in data.splits} == dict.fromkeys(
        ("train", "dev", "test"), DIALOGUES
    )
    assert [turns.ids for turns in data.splits.values()] == [
        ("2", "3", "4"),
        ("1", "2", "3"),
        ("d0", "d1", "d2"),
    ]
    assert data.notes[0] == (
        "speakers are not used: roles depend on how long ago something was said"
    )


def test_invalid_dialogue_reports_file_row_and_turn(folder: Path):
    heading = "dialogue,turn,text\n"
    (folder / "train.txt").unlink()
    with pytest.raises(UserError, match=r"no train file; it has (dev, test|test, dev)"):
        read_dialogues(folder)
    for suffix, content, message in (
        ("txt", "Hi! __eou__ __eou__ Bye. __eou__\n", "line 1 of train.txt: turn 2 is empty"),
        ("txt", "Hi! Bye.\n", "line 1 of train.txt: no __eou__, which ends every turn"),
        ("txt", "Hi! __eou__\n", "train.txt has no dialogue of two utterances or more"),
        ("jsonl", to_jsonl({"utterances": ["a", 1]}), "row 1 .*: turn 2 is 1, not a text"),
        ("csv", f"{heading}d,1,a\nd,1,b\n", "turn 1 of dialogue 'd' occurs twice"),
        ("csv", f"{heading}d,one,a\n", "row 1 .*: turn is 'one', not a number"),
    ):
        path = folder / f"train.{suffix}"
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            read_dialogues(folder)
        path.unlink()


def test_empty_utterances_can_be_left_out(folder: Path):
    for suffix, content in (
        ("txt", "Hi! __eou__ __eou__ Bye. __eou__\n"),
        ("jsonl", to_jsonl({"utterances": ["Hi!", None, "Bye."]})),
        ("csv", "dialogue,text\nd,Hi!\nd,\nd,Bye.\n"),
    ):
        (folder / "train.txt").unlink(missing_ok=True)
        path = folder / f"train.{suffix}"
        path.write_text(content)
        with pytest.raises(UserError, match="leave out rows without a text: --skip-empty"):
            read_dialogues(folder, reading=ReadOptions())
        data = read_dialogues(folder, reading=ReadOptions(skip_empty=True))
        assert list_dialogues(data, "train") == [["Hi!", "Bye."]]
        row = 2 if suffix == "csv" else 1
        note = f"empty utterances of {path.name}, left out: 1, in the rows {row}"
        assert note in data.notes
        path.unlink()


# -- splits ------------------------------------------------------------------------------------


def test_split_of_single_file_ignores_row_order(tmp_path: Path):
    dialogues = make_dialogues(40)
    dialogues += [[turn.upper() for turn in turns] for turns in make_dialogues(10)]
    path = tmp_path / "talks.txt"
    splits = []
    for order in (dialogues, dialogues[::-1]):
        path.write_text(to_lines(order))
        data = read_dialogues(path, split_seed=3)
        splits.append({split: sorted(list_dialogues(data, split)) for split in data.splits})
    assert splits[0] == splits[1]
    assert sum(map(len, splits[0].values())) == 50
    # Dialogues that differ in case only belong to the same split.
    texts_by_split = [{turns[0].lower() for turns in values} for values in splits[0].values()]
    assert len(set().union(*texts_by_split)) == sum(map(len, texts_by_split)) == 40
    assert data.notes[0] == "one file, split by dialogue with seed 3"
    assert read_dialogues(path, split_seed=4).digest != data.digest


LONG_UTTERANCE = "It rained for forty days and nights, {}."


def test_leaks_are_counted_and_dropped(folder: Path):
    shared = LONG_UTTERANCE.format("in the mountains")
    leaking = [shared.upper(), LONG_UTTERANCE.format("at sea"), "Yes."]
    tolerated = [shared, *(LONG_UTTERANCE.format(f"in place {i}") for i in range(3))]
    (folder / "train.txt").write_text(
        to_lines([*make_dialogues(3), make_dialogues(1, "test")[0], leaking, tolerated])
    )
    (folder / "test.txt").write_text(
        to_lines([*make_dialogues(2, "test"), *make_dialogues(1, "test"), [shared, "No."]])
    )
    data = read_dialogues(folder)
    # One of two long utterances is more than 30 %, but one of four is not.
    assert data.notes == (
        "repeated test dialogues, the same word by word: 1",
        "test dialogues that are in train too, word by word: 2",
        "train dialogues that are in dev or test, or share more than 30% of their long utterances "
        "with them: 2 (--drop-leaks leaves them out)",
    )
    dropped = find_task("dialogue").read(DataOptions(folder, drop_leaks=True))
    assert list_dialogues(dropped, "train") == [*make_dialogues(3), tolerated]
    assert list_dialogues(dropped, "test") == list_dialogues(data, "test")
    assert dropped.notes[1] == "train dialogues left out, because they overlap with dev or test: 2"


# -- storage and options -----------------------------------------------------------------------


def test_saved_dialogues_are_loaded_unchanged(folder: Path, tmp_path: Path):
    task = find_task("dialogue")
    data = task.read(DataOptions(folder))
    run = tmp_path / "run"
    data.save(run)
    loaded = task.load(run, {})
    assert loaded.to_json() == data.to_json()
    assert loaded.to_json()["utterances"] == {"train": 12, "dev": 12, "test": 12}
    assert loaded.texts == data.texts
    for split, turns in data.splits.items():
        np.testing.assert_array_equal(loaded.splits[split].starts, turns.starts)
        assert loaded.splits[split].ids == turns.ids
    count = "4 train, 4 dev, 4 test dialogues of 17 distinct utterances"
    assert task.count_examples(loaded) == count
