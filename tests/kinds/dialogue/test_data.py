"""Reading dialogues: formats, splits, leaks, error messages and the sample."""

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
from llmcond.kinds.dialogue.examples import next_queries, rank_next
from llmcond.tasks import find_task

#: The rings of words between which a ride of the sample goes, and the words that name its course.
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

DIALOGUES = [["Hi!", "Hello.", "Bye."], ["Hello.", "Hi!"], ["Tea?", "Yes.", "Milk?", "No."]]


def to_lines(dialogues) -> str:
    return "".join(" __eou__ ".join(turns) + " __eou__\n" for turns in dialogues)


def to_jsonl(rows) -> str:
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


# -- turns -------------------------------------------------------------------------------------


def test_contexts_are_first_turns_of_longer_dialogues():
    turns = Turns.from_lists([[0, 1, 2], [3, 4], [5, 6, 7, 8]])
    rows, contexts, answers = turns.contexts(2)

    assert (len(turns), turns.lengths.tolist()) == (3, [3, 2, 4])
    assert rows.tolist() == [0, 2]
    assert contexts.tolist() == [[0, 1], [5, 6]]
    assert answers.tolist() == [2, 7]
    assert turns.utterances_of(1).tolist() == [3, 4]
    assert turns.dialogue.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert [array.shape for array in turns.contexts(4)] == [(0,), (0, 4), (0,)]


# -- formats -----------------------------------------------------------------------------------


def make_long_rows(dialogues) -> list[dict]:
    return [
        {"dialogue": f"d{k}", "turn": turn, "text": text}
        for k, turns in enumerate(dialogues)
        for turn, text in enumerate(turns)
    ]


@pytest.mark.parametrize(
    "file_format", ["txt", "jsonl", "csv", "tsv", "parquet", "csv-without-turns", "memory"]
)
def test_every_format_gives_same_dialogues(tmp_path: Path, file_format: str):
    rows = make_long_rows(DIALOGUES)
    sources = {}
    for split in ("train", "dev", "test"):
        path = tmp_path / f"{split}.{'csv' if file_format == 'csv-without-turns' else file_format}"
        sources[split] = [{"utterances": turns} for turns in DIALOGUES]
        if file_format == "txt":
            path.write_text("\n" + to_lines(DIALOGUES))
        elif file_format == "jsonl":
            path.write_text(to_jsonl(sources[split]))
        elif file_format == "parquet":
            # The turn numbers decide, not the order of the rows.
            pq.write_table(pa.Table.from_pylist(rows[::-1]).sort_by("dialogue"), path)
        else:
            columns = (
                ["dialogue", "text"]
                if file_format == "csv-without-turns"
                else ["dialogue", "turn", "text"]
            )
            delimiter = "\t" if file_format == "tsv" else ","
            table = [columns, *([str(row[name]) for name in columns] for row in rows)]
            path.write_text("".join(delimiter.join(cells) + "\n" for cells in table))
    data = read_dialogues(sources if file_format == "memory" else tmp_path)

    assert list(data.splits) == ["train", "dev", "test"]
    assert all(list_dialogues(data, split) == DIALOGUES for split in data.splits)
    assert data.texts == ("Hi!", "Hello.", "Bye.", "Tea?", "Yes.", "Milk?", "No.")
    expected_ids = {"txt": ("2", "3", "4"), "jsonl": ("1", "2", "3"), "memory": ("1", "2", "3")}
    assert data.splits["dev"].ids == expected_ids.get(file_format, ("d0", "d1", "d2"))


def test_ids_are_read_and_speakers_ignored(folder: Path):
    rows = [
        {"utterances": turns, "id": f"a{i}", "speakers": [0, 1]}
        for i, turns in enumerate(DIALOGUES)
    ]
    (folder / "train.txt").unlink()
    (folder / "train.jsonl").write_text(to_jsonl(rows))
    data = read_dialogues(folder)
    assert data.splits["train"].ids == ("a0", "a1", "a2")
    assert [note for note in data.notes if "speakers" in note]


def test_dialogues_of_one_utterance_are_left_out_and_counted(folder: Path):
    (folder / "test.txt").write_text(to_lines([["Hm."], *DIALOGUES, ["Ah."]]))
    data = read_dialogues(folder)
    assert list_dialogues(data, "test") == DIALOGUES
    assert data.splits["test"].ids == ("2", "3", "4")
    assert "test dialogues of a single utterance, left out: 2" in data.notes


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.txt", "Hi! __eou__ __eou__ Bye. __eou__\n", "row 1 of train.txt: turn 2 is empty"),
        ("train.txt", "Hi! Bye.\n", "row 1 of train.txt: no __eou__, which ends every turn"),
        ("train.txt", "", "train.txt is empty"),
        ("train.txt", "Hi! __eou__\n", "train.txt has no dialogue of two utterances or more"),
        ("train.jsonl", to_jsonl([{"utterances": ["a", " "]}]), "row 1 .*: turn 2 is empty"),
        ("train.jsonl", to_jsonl([{"utterances": ["a", "b"]}, {"utterances": [1, "b"]}]),
         "row 2 of train.jsonl: turn 1 is 1, not a text"),
        ("train.jsonl", to_jsonl([{"utterances": "a"}]), "utterances is 'a', not a list of texts"),
        ("train.jsonl", to_jsonl([{"turns": ["a"]}]), "has no column .* Expected lines of turns"),
        ("train.csv", "dialogue,turn,text\nd,1,a\nd,1,b\n", "turn 1 of dialogue 'd' occurs twice"),
        ("train.csv", "dialogue,turn,text\nd,one,a\n", "row 1 .*: turn is 'one', not a number"),
        ("train.csv", "dialogue,turn,text\n,1,a\n", "row 1 of train.csv: dialogue is empty"),
        ("train.csv", "dialogue,turn,text\nd,1,\n", "row 1 of train.csv: text is empty"),
    ],
)  # fmt: skip
def test_invalid_dialogue_reports_file_row_and_turn(folder: Path, file, content, message):
    (folder / "train.txt").unlink()
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=message):
        read_dialogues(folder)


def test_missing_train_file_and_unknown_suffix_are_rejected(folder: Path):
    (folder / "train.txt").unlink()
    with pytest.raises(UserError, match=r"no train file; it has (dev, test|test, dev)"):
        read_dialogues(folder)
    (folder / "talk.doc").write_text("Hi!")
    for source in (folder / "talk.doc", folder / "nothing"):
        with pytest.raises(UserError, match=r"\.txt, \.csv.* file"):
            read_dialogues(source)


# -- splits ------------------------------------------------------------------------------------


def test_split_of_single_file_ignores_row_order(tmp_path: Path):
    dialogues = [
        *make_dialogues(40),
        *([turn.upper() for turn in dialogue] for dialogue in make_dialogues(10)),
    ]
    path = tmp_path / "talks.txt"
    splits = []
    for order in (dialogues, dialogues[::-1]):
        path.write_text(to_lines(order))
        data = read_dialogues(path, split_seed=3)
        splits.append({split: sorted(list_dialogues(data, split)) for split in data.splits})
    assert splits[0] == splits[1]
    assert sum(len(split_dialogues) for split_dialogues in splits[0].values()) == 50
    split_by_text = {}
    for split, split_dialogues in splits[0].items():
        for dialogue in split_dialogues:
            # Dialogues that differ in case only belong to the same split.
            assert split_by_text.setdefault(dialogue[0].lower(), split) == split
    assert data.notes[0] == "one file, split by dialogue with seed 3"
    path.write_text(to_lines(dialogues))
    assert read_dialogues(path, split_seed=4).digest != read_dialogues(path, split_seed=3).digest


def test_missing_dev_split_is_taken_from_train(folder: Path):
    (folder / "validation.txt").unlink()
    (folder / "train.txt").write_text(to_lines(make_dialogues(20)))
    data = read_dialogues(folder)
    assert [len(turns) for turns in data.splits.values()] == [18, 2, 4]
    assert "no dev file: 10% of the training dialogues are dev, chosen with seed 0" in data.notes


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


def test_dropping_all_train_dialogues_is_rejected(folder: Path):
    (folder / "train.txt").write_text((folder / "test.txt").read_text())
    with pytest.raises(UserError, match=r"all 4 train dialogues overlap with dev or test"):
        read_dialogues(folder, drop_leaks=True)


# -- the task and its run ----------------------------------------------------------------------


def test_saved_dialogues_are_loaded_unchanged(folder: Path, tmp_path: Path):
    task = find_task("dialogue")
    data = task.read(DataOptions(folder))
    data.save(tmp_path / "run")
    loaded = task.load(tmp_path / "run", {})

    assert loaded.to_json() == data.to_json()
    assert loaded.texts == data.texts
    for split, turns in data.splits.items():
        np.testing.assert_array_equal(loaded.splits[split].starts, turns.starts)
        assert loaded.splits[split].ids == turns.ids
    assert (
        task.count_examples(loaded) == "4 train, 4 dev, 4 test dialogues of 17 distinct utterances"
    )
    assert data.to_json()["utterances"] == {"train": 12, "dev": 12, "test": 12}


def test_changed_file_is_rejected(folder: Path, tmp_path: Path):
    data = read_dialogues(folder)
    data.save(tmp_path)
    path = tmp_path / "dialogues.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(1).replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(UserError, match="their digest differs"):
        Dialogues.load(tmp_path)
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="cannot be read"):
        Dialogues.load(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        Dialogues.load(tmp_path / "nowhere")


def test_digest_depends_on_texts_turns_and_splits(folder: Path):
    data = read_dialogues(folder)
    train, dev, test = data.splits.values()
    variants = [
        replace(data, texts=[*data.texts[:-1], "Else."]),
        replace(data, splits={"train": dev, "dev": train, "test": test}),
        replace(data, splits={"train": train, "dev": dev}),
        replace(data, splits={**data.splits, "dev": replace(dev, starts=dev.starts[[0, 2, 4]])}),
    ]
    assert len({data.digest, *(variant.digest for variant in variants)}) == 5
    assert replace(data, source="elsewhere", notes=()).digest == data.digest


def test_options_for_rated_rows_are_rejected(folder: Path):
    task = find_task("dialogue")
    with pytest.raises(UserError, match="are for rated rows, and the task dialogue has none"):
        task.read(DataOptions(folder, columns={"sentence1": "a"}))
    with pytest.raises(UserError, match="the template names the column 'place'"):
        task.read(DataOptions(folder, extra=("place",)))
    with pytest.raises(UserError, match="has no test dialogues; it has train, dev"):
        replace(read_dialogues(folder), splits={"train": None, "dev": None}).turns_of("test")


# -- the sample --------------------------------------------------------------------------------


def test_sample_matches_output_of_script(tmp_path: Path):
    command = [sys.executable, ROOT / "scripts" / "make_dialogues.py", "--check"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    process = subprocess.run(
        [*command, "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert "train.jsonl: missing, or differs from what this script writes" in process.stdout


def extract_keywords(text: str) -> tuple[str, ...]:
    """Return the content words of an utterance in a fixed order."""
    return tuple(
        sorted(set(re.findall(r"\w+", text.lower())) - {"gate", "side", "by", "to", "the"})
    )


def test_sample_course_depends_on_order_not_on_single_turns():
    sample = read_dialogues()
    assert (sample.source, sample.notes) == ("sample", ())
    assert [len(turns) for turns in sample.splits.values()] == [1024, 64, 64]
    course_counts, orders_by_set, courses_by_order = {}, {}, {}
    for begin, end, question, course in list_dialogues(sample, "train"):
        ends = [set(extract_keywords(turn)) for turn in (begin, end)]
        (vehicle,) = {"boat", "cart", "mule", "sled", "coach", "raft", "truck", "horse"} & ends[0]
        assert vehicle in ends[1] & set(extract_keywords(question))
        endpoints = [words - {vehicle} for words in ends]
        for part in set(extract_keywords(course)) - {"flag"}:
            for words in endpoints:
                for word in words:
                    course_counts.setdefault(word, Counter())[part] += 1
        steps = tuple(frozenset(words) for words in endpoints)
        courses_by_order.setdefault(steps, set()).add(extract_keywords(course))
        orders_by_set.setdefault(frozenset(steps), set()).add(steps)
    # The two turns in their order determine the course, while a single word occurs about equally
    # often with every part of it.
    assert all(len(courses) == 1 for courses in courses_by_order.values())
    assert any(len(orders) == 2 for orders in orders_by_set.values())
    assert len(course_counts) == 12
    for counts in course_counts.values():
        assert len(counts) == 12
        expected = sum(counts.values()) / 12
        assert max(abs(count - expected) for count in counts.values()) < 0.2 * expected


@pytest.mark.parametrize("split", ["dev", "test"])
def test_each_sample_course_is_queried_once(split: str):
    courses = {
        extract_keywords(dialogue[-1]) for dialogue in list_dialogues(read_dialogues(), split)
    }
    assert len(courses) == 64


def test_sample_needs_roles_instead_of_sum_of_turns():
    """With word vectors, sums in roles rank every course first; other sums are at chance."""
    sample = read_dialogues()
    words = sorted({word for text in sample.texts for word in extract_keywords(text)})
    vectors = np.array(
        [[word in extract_keywords(text) for word in words] for text in sample.texts], float
    )
    word_index = {name: words.index(name) for name in words}
    # A step between two words of a ring has a direction; the way back has the opposite one.
    matrix = np.zeros((len(words), len(words)))
    for things, courses in zip(RINGS, COURSES, strict=True):
        for number, name in enumerate(things):
            for step, course in enumerate(courses):
                # The cosine of a point of the compass with a direction between two points.
                angle = np.pi / 2 * number - np.pi / 2 * step - np.pi / 4
                matrix[word_index[name], word_index[course]] = np.cos(angle)
    queries = next_queries(sample, "test", [3])

    def compute_average_rank(begin: float, end: float) -> float:
        def score(contexts, candidates):
            query = begin * vectors[contexts[:, 0]] + end * vectors[contexts[:, 1]]
            return query @ matrix @ vectors[candidates].T

        return float(rank_next(queries, score).resolve_ties().mean())

    assert compute_average_rank(-1, 1) == 1
    assert 25 < compute_average_rank(1, 1) < 40
    assert 25 < compute_average_rank(-1, -1) < 40
