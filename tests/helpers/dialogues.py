"""A few small dialogues, in words that the tiny checkpoints know."""

import json
from pathlib import Path

PEOPLE = ("two men", "three women", "children", "two dogs")
LOCATIONS = ("park", "beach", "kitchen", "street")
ACTIVITIES = ("ride", "play", "read", "sit")


def make_dialogue(number: int) -> list[str]:
    """Return three to seven turns about people, their location, and then their activity."""
    people, location = PEOPLE[number % 4], LOCATIONS[number // 4 % 4]
    deed = ACTIVITIES[(number + number // 4) % 4]
    turns = [f"{people} ?", f"in the {location} .", f"{people} {deed} in the {location}"]
    return [*turns, f"{deed} happy", "sad", f"the {location} on red", f"{people} : blue"][
        : 3 + number % 5
    ]


def write_dialogues(folder: Path) -> Path:
    """Write 40 train, 16 dev and 16 test dialogues, in files of several formats."""
    folder.mkdir(parents=True, exist_ok=True)
    train = [{"id": f"d{i}", "utterances": make_dialogue(i)} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in train))
    for name, numbers in (("dev", range(40, 56)), ("test", range(56, 72))):
        lines = ["".join(f"{turn} __eou__ " for turn in make_dialogue(i)) for i in numbers]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder
