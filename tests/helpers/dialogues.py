"""A few small dialogues, in the words that tiny checkpoints know."""

import json
from pathlib import Path

PEOPLE = ("two men", "three women", "children", "two dogs")
PLACES = ("park", "beach", "kitchen", "street")
DEEDS = ("ride", "play", "read", "sit")


def dialogue(number: int) -> list[str]:
    """Return three to seven turns: of whom, where, and then what they do there."""
    people, place = PEOPLE[number % 4], PLACES[number // 4 % 4]
    deed = DEEDS[(number + number // 4) % 4]
    turns = [f"{people} ?", f"in the {place} .", f"{people} {deed} in the {place}"]
    return [*turns, f"{deed} happy", "sad", f"the {place} on red", f"{people} : blue"][
        : 3 + number % 5
    ]


def write_dialogues(folder: Path) -> Path:
    """Write 40 train, 16 dev and 16 test dialogues, in files of several formats."""
    folder.mkdir(parents=True, exist_ok=True)
    train = [{"id": f"d{i}", "utterances": dialogue(i)} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in train))
    for name, numbers in (("dev", range(40, 56)), ("test", range(56, 72))):
        lines = ["".join(f"{turn} __eou__ " for turn in dialogue(i)) for i in numbers]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder
