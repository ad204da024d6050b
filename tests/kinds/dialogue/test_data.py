"""Dialogues: what files say is what is read, splits share nothing unsaid, and errors name turns."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.paths import ROOT

from llmcond.data.datasets import DataOptions
from llmcond.errors import UserError
from llmcond.kinds.dialogue.data import Dialogues, Turns, read_dialogues
from llmcond.kinds.dialogue.queries import next_queries, rank_next
from llmcond.tasks import find_task

#: Of the sample: what a ride goes between, and what its course is told by.
RINGS = (
    ("north", "east", "south", "west"),
    ("dawn", "noon", "dusk", "night"),
    ("spring", "summer", "autumn", "winter"),
)
COURSES = (
    ("mill", "tower", "bridge", "abbey"),
    ("lamp", "bell", "drum", "horn"),
    ("red", "blue", "white", "black"),
)

TALKS = [["Hi!", "Hello.", "Bye."], ["Hello.", "Hi!"], ["Tea?", "Yes.", "Milk?", "No."]]


def lines_of(dialogues) -> str:
    return "".join(" __eou__ ".join(own) + " __eou__\n" for own in dialogues)


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def told(data: Dialogues, split: str) -> list[list[str]]:
    turns = data.splits[split]
    return [[data.texts[i] for i in turns.utterances_of(k)] for k in range(len(turns))]


def many(n: int, word: str = "talk") -> list[list[str]]:
    return [[f"{word} {i}", f"answer {i}", "So it is."] for i in range(n)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder in which train, dev and test share short utterances only."""
    for split, file in (("train", "train.txt"), ("dev", "validation.txt"), ("test", "test.txt")):
        (tmp_path / file).write_text(lines_of(many(4, split)))
    return tmp_path


# -- turns -------------------------------------------------------------------------------------


def test_a_context_is_the_first_turns_of_every_longer_dialogue():
    turns = Turns.from_lists([[0, 1, 2], [3, 4], [5, 6, 7, 8]])
    rows, contexts, answers = turns.contexts(2)

    assert (len(turns), turns.lengths.tolist()) == (3, [3, 2, 4])
    assert rows.tolist() == [0, 2]
    assert contexts.tolist() == [[0, 1], [5, 6]]
    assert answers.tolist() == [2, 7]
    assert turns.utterances_of(1).tolist() == [3, 4]
    assert turns.dialogue.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert [own.shape for own in turns.contexts(4)] == [(0,), (0, 4), (0,)]


# -- formats -----------------------------------------------------------------------------------


def long_table(dialogues) -> list[dict]:
    return [
        {"dialogue": f"d{k}", "turn": turn, "text": text}
        for k, own in enumerate(dialogues)
        for turn, text in enumerate(own)
    ]


@pytest.mark.parametrize("form", ["txt", "jsonl", "csv", "tsv", "parquet", "unturned", "memory"])
def test_every_format_tells_the_same_dialogues(tmp_path: Path, form: str):
    rows = long_table(TALKS)
    sources = {}
    for split in ("train", "dev", "test"):
        path = tmp_path / f"{split}.{'csv' if form == 'unturned' else form}"
        sources[split] = [{"utterances": own} for own in TALKS]
        if form == "txt":
            path.write_text("\n" + lines_of(TALKS))
        elif form == "jsonl":
            path.write_text(jsonl(sources[split]))
        elif form == "parquet":
            # Turns decide, not the order of rows.
            pq.write_table(pa.Table.from_pylist(rows[::-1]).sort_by("dialogue"), path)
        else:
            columns = ["dialogue", "text"] if form == "unturned" else ["dialogue", "turn", "text"]
            mark = "\t" if form == "tsv" else ","
            table = [columns, *([str(row[name]) for name in columns] for row in rows)]
            path.write_text("".join(mark.join(own) + "\n" for own in table))
    data = read_dialogues(sources if form == "memory" else tmp_path)

    assert list(data.splits) == ["train", "dev", "test"]
    assert all(told(data, split) == TALKS for split in data.splits)
    assert data.texts == ("Hi!", "Hello.", "Bye.", "Tea?", "Yes.", "Milk?", "No.")
    named = {"txt": ("2", "3", "4"), "jsonl": ("1", "2", "3"), "memory": ("1", "2", "3")}
    assert data.splits["dev"].ids == named.get(form, ("d0", "d1", "d2"))


def test_ids_are_kept_and_speakers_are_not(folder: Path):
    rows = [{"utterances": own, "id": f"a{i}", "speakers": [0, 1]} for i, own in enumerate(TALKS)]
    (folder / "train.txt").unlink()
    (folder / "train.jsonl").write_text(jsonl(rows))
    data = read_dialogues(folder)
    assert data.splits["train"].ids == ("a0", "a1", "a2")
    assert [note for note in data.notes if "speakers" in note]


def test_single_utterances_are_left_out_and_counted(folder: Path):
    (folder / "test.txt").write_text(lines_of([["Hm."], *TALKS, ["Ah."]]))
    data = read_dialogues(folder)
    assert told(data, "test") == TALKS
    assert data.splits["test"].ids == ("2", "3", "4")
    assert "test dialogues of a single utterance, left out: 2" in data.notes


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.txt", "Hi! __eou__ __eou__ Bye. __eou__\n", "row 1 of train.txt: turn 2 is empty"),
        ("train.txt", "Hi! Bye.\n", "row 1 of train.txt: no __eou__, which ends every turn"),
        ("train.txt", "", "train.txt is empty"),
        ("train.txt", "Hi! __eou__\n", "train.txt has no dialogue of two utterances or more"),
        ("train.jsonl", jsonl([{"utterances": ["a", " "]}]), "row 1 .*: turn 2 is empty"),
        ("train.jsonl", jsonl([{"utterances": ["a", "b"]}, {"utterances": [1, "b"]}]),
         "row 2 of train.jsonl: turn 1 is 1, not a text"),
        ("train.jsonl", jsonl([{"utterances": "a"}]), "utterances is 'a', not a list of texts"),
        ("train.jsonl", jsonl([{"turns": ["a"]}]), "has no column .* Expected lines of turns"),
        ("train.csv", "dialogue,turn,text\nd,1,a\nd,1,b\n", "turn 1 of dialogue 'd' occurs twice"),
        ("train.csv", "dialogue,turn,text\nd,one,a\n", "row 1 .*: turn is 'one', not a number"),
        ("train.csv", "dialogue,turn,text\n,1,a\n", "row 1 of train.csv: dialogue is empty"),
        ("train.csv", "dialogue,turn,text\nd,1,\n", "row 1 of train.csv: text is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_file_row_and_turn(folder: Path, file, content, message):
    (folder / "train.txt").unlink()
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=message):
        read_dialogues(folder)


def test_a_folder_without_train_and_a_file_of_another_kind_are_refused(folder: Path):
    (folder / "train.txt").unlink()
    with pytest.raises(UserError, match=r"no train file; it has (dev, test|test, dev)"):
        read_dialogues(folder)
    (folder / "talk.doc").write_text("Hi!")
    for source in (folder / "talk.doc", folder / "nothing"):
        with pytest.raises(UserError, match=r"\.txt, \.csv.* file"):
            read_dialogues(source)


# -- splits ------------------------------------------------------------------------------------


def test_a_single_file_is_split_by_dialogue_whatever_its_order(tmp_path: Path):
    dialogues = [*many(40), *([own.upper() for own in talk] for talk in many(10))]
    path = tmp_path / "talks.txt"
    found = []
    for order in (dialogues, dialogues[::-1]):
        path.write_text(lines_of(order))
        data = read_dialogues(path, split_seed=3)
        found.append({split: sorted(told(data, split)) for split in data.splits})
    assert found[0] == found[1]
    assert sum(len(own) for own in found[0].values()) == 50
    places = {}
    for split, own in found[0].items():
        for talk in own:
            # Those that differ in case alone are the same words.
            assert places.setdefault(talk[0].lower(), split) == split
    assert data.notes[0] == "one file, split by dialogue with seed 3"
    path.write_text(lines_of(dialogues))
    assert read_dialogues(path, split_seed=4).digest != read_dialogues(path, split_seed=3).digest


def test_without_dev_some_of_train_becomes_dev(folder: Path):
    (folder / "validation.txt").unlink()
    (folder / "train.txt").write_text(lines_of(many(20)))
    data = read_dialogues(folder)
    assert [len(own) for own in data.splits.values()] == [18, 2, 4]
    assert "no dev file: 10% of the training dialogues are dev, chosen with seed 0" in data.notes


LONG = "It rained for forty days and nights, {}."


def test_leaks_are_counted_and_dropped(folder: Path):
    shared = LONG.format("in the mountains")
    alike = [shared.upper(), LONG.format("at sea"), "Yes."]
    less = [shared, *(LONG.format(f"in place {i}") for i in range(3))]
    (folder / "train.txt").write_text(lines_of([*many(3), many(1, "test")[0], alike, less]))
    (folder / "test.txt").write_text(
        lines_of([*many(2, "test"), *many(1, "test"), [shared, "No."]])
    )
    data = read_dialogues(folder)
    # One of two long utterances is more than 30 %, one of four is not.
    assert data.notes == (
        "repeated test dialogues, the same word by word: 1",
        "test dialogues that are in train too, word by word: 2",
        "train dialogues that are in dev or test, or share more than 30% of their long utterances "
        "with them: 2 (--drop-leaks leaves them out)",
    )
    dropped = find_task("dialogue").read(DataOptions(folder, drop_leaks=True))
    assert told(dropped, "train") == [*many(3), less]
    assert told(dropped, "test") == told(data, "test")
    assert dropped.notes[1] == "train dialogues left out, because they overlap with dev or test: 2"


def test_what_is_all_leaks_leaves_nothing(folder: Path):
    (folder / "train.txt").write_text((folder / "test.txt").read_text())
    with pytest.raises(UserError, match=r"all 4 train dialogues overlap with dev or test"):
        read_dialogues(folder, drop_leaks=True)


# -- the task and its run ----------------------------------------------------------------------


def test_what_is_saved_is_loaded(folder: Path, tmp_path: Path):
    task = find_task("dialogue")
    data = task.read(DataOptions(folder))
    data.save(tmp_path / "run")
    loaded = task.load(tmp_path / "run", {})

    assert loaded.to_json() == data.to_json()
    assert loaded.texts == data.texts
    for split, turns in data.splits.items():
        np.testing.assert_array_equal(loaded.splits[split].starts, turns.starts)
        assert loaded.splits[split].ids == turns.ids
    assert task.counted(loaded) == "4 train, 4 dev, 4 test dialogues of 17 distinct utterances"
    assert data.to_json()["utterances"] == {"train": 12, "dev": 12, "test": 12}


def test_a_file_that_was_changed_is_refused(folder: Path, tmp_path: Path):
    data = read_dialogues(folder)
    data.save(tmp_path)
    path = tmp_path / "dialogues.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(1).replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(UserError, match="its digest differs"):
        Dialogues.load(tmp_path)
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="cannot be read"):
        Dialogues.load(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        Dialogues.load(tmp_path / "nowhere")


def test_the_digest_tells_texts_turns_and_splits_apart(folder: Path):
    data = read_dialogues(folder)
    train, dev, test = data.splits.values()
    others = [
        replace(data, texts=[*data.texts[:-1], "Else."]),
        replace(data, splits={"train": dev, "dev": train, "test": test}),
        replace(data, splits={"train": train, "dev": dev}),
        replace(data, splits={**data.splits, "dev": replace(dev, starts=dev.starts[[0, 2, 4]])}),
    ]
    assert len({data.digest, *(one.digest for one in others)}) == 5
    assert replace(data, source="elsewhere", notes=()).digest == data.digest


def test_options_of_rated_rows_are_refused(folder: Path):
    task = find_task("dialogue")
    with pytest.raises(UserError, match="are for rated rows, and the task dialogue has none"):
        task.read(DataOptions(folder, columns={"sentence1": "a"}))
    with pytest.raises(UserError, match="the template names the column 'place'"):
        task.read(DataOptions(folder, extra=("place",)))
    with pytest.raises(UserError, match="has no test dialogues; it has train, dev"):
        replace(read_dialogues(folder), splits={"train": None, "dev": None}).turns_of("test")


# -- the sample --------------------------------------------------------------------------------


def test_the_sample_is_what_the_script_writes(tmp_path: Path):
    script = [sys.executable, ROOT / "scripts" / "make_dialogues.py", "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([*script, "--out", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "train.jsonl: missing, or differs from what this script writes" in done.stdout


def parted(text: str) -> tuple[str, ...]:
    """Return the words of an utterance that say something, in a fixed order."""
    return tuple(
        sorted(set(re.findall(r"\w+", text.lower())) - {"gate", "side", "by", "to", "the"})
    )


def test_in_the_sample_order_decides_and_single_turns_say_nothing():
    sample = read_dialogues()
    assert (sample.source, sample.notes) == ("sample", ())
    assert [len(turns) for turns in sample.splits.values()] == [1024, 64, 64]
    by_turn, by_set, directed = {}, {}, {}
    for begin, end, asked, course in told(sample, "train"):
        places = [set(parted(turn)) for turn in (begin, end)]
        (vehicle,) = {"boat", "cart", "mule", "sled", "coach", "raft", "truck", "horse"} & places[0]
        assert vehicle in places[1] & set(parted(asked))
        said = [own - {vehicle} for own in places]
        for part in set(parted(course)) - {"flag"}:
            for own in said:
                for word in own:
                    by_turn.setdefault(word, Counter())[part] += 1
        steps = tuple(frozenset(own) for own in said)
        directed.setdefault(steps, set()).add(parted(course))
        by_set.setdefault(frozenset(steps), set()).add(steps)
    # Both turns in their order give the course, and each word stands with each part of it alike.
    assert all(len(courses) == 1 for courses in directed.values())
    assert any(len(orders) == 2 for orders in by_set.values())
    assert len(by_turn) == 12
    for counts in by_turn.values():
        assert len(counts) == 12
        expected = sum(counts.values()) / 12
        assert max(abs(count - expected) for count in counts.values()) < 0.2 * expected


@pytest.mark.parametrize("split", ["dev", "test"])
def test_each_course_of_the_sample_is_asked_for_once(split: str):
    courses = {parted(talk[-1]) for talk in told(read_dialogues(), split)}
    assert len(courses) == 64


def test_the_sample_takes_roles_and_no_sum_of_turns():
    """Words as vectors: sums in roles rank every course first, others are at chance."""
    sample = read_dialogues()
    words = sorted({word for text in sample.texts for word in parted(text)})
    vectors = np.array([[word in parted(text) for word in words] for text in sample.texts], float)
    place = {name: words.index(name) for name in words}
    # A step between two of a ring is its direction; the other way is the opposite one.
    matrix = np.zeros((len(words), len(words)))
    for things, courses in zip(RINGS, COURSES, strict=True):
        for number, name in enumerate(things):
            for step, course in enumerate(courses):
                # The vector of a point of the compass, along that of a direction between two.
                angle = np.pi / 2 * number - np.pi / 2 * step - np.pi / 4
                matrix[place[name], place[course]] = np.cos(angle)
    asked = next_queries(sample, "test", [3])

    def ranked(begin: float, end: float) -> float:
        def score(contexts, candidates):
            query = begin * vectors[contexts[:, 0]] + end * vectors[contexts[:, 1]]
            return query @ matrix @ vectors[candidates].T

        return float(rank_next(asked, score).resolve_ties().mean())

    assert ranked(-1, 1) == 1
    assert 25 < ranked(1, 1) < 40
    assert 25 < ranked(-1, -1) < 40
