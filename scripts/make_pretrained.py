"""Put an encoder that was trained, with its head, into models/: the bundled model.

    python scripts/make_pretrained.py runs/csts --name minilm-csts
    python scripts/make_pretrained.py runs/conditions --note scripts/aspects/DATA.md

docs/results.md has the commands that made the runs. What is laid out is what `llmcond push`
uploads: adapter, head, the account of the training and the card, without rows, features and paths.
It computes in float32, whatever it was trained in. Its card ends with the note.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from llmcond.bundled import DEFAULT_MODEL, bundled_folder
from llmcond.files import read_json, write_json
from llmcond.runs import open_any_run
from llmcond.workflows.push import CARD, stage_run


def in_float32(folder: Path, name: str) -> None:
    """Record the encoder by its name here, and that it computes in float32.

    CPUs without instructions for bfloat16 take many times as long in it. What was trained in it
    differs by rounding then, and no features go along that would have to be the same.
    """
    identity = replace(open_any_run(folder).identity, dtype="float32")
    for path in (folder / "run.json", *folder.glob("heads/*/head.json")):
        record = read_json(path)
        record["encoder"] |= {
            "name": name,
            "fingerprint": identity.fingerprint,
            "identity": identity.to_json(),
        }
        write_json(path, record)


def main() -> None:
    """Stage the run, and put it in place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder that train-lora made")
    parser.add_argument("--name", default=DEFAULT_MODEL)
    parser.add_argument("--note", type=Path, help="Markdown, such as the licences of the data")
    parser.add_argument(
        "--out", type=Path, default=bundled_folder("models"), help="default: models/"
    )
    given = parser.parse_args()
    target = given.out / given.name
    with tempfile.TemporaryDirectory() as temporary:
        stage_run(given.run, Path(temporary))
        in_float32(Path(temporary), given.name)
        if given.note is not None:
            card = Path(temporary, CARD)
            parts = [path.read_text(encoding="utf-8").strip() for path in (card, given.note)]
            card.unlink()  # it is a link to the card of the run
            card.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(temporary, target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    sys.stdout.write(f"{target}: {size / 2**20:.1f} MiB\n")


if __name__ == "__main__":
    main()
