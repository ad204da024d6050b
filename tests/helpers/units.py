"""Texts that are embedded unit by unit, and what dies over that."""

import os
import signal
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.parquet as pq

from llmcond.scale import outputs
from llmcond.workflows import embed_stream
from llmcond.workflows.embed_stream import UnitEmbedder

PEOPLE = ["two men", "three women", "children", "two dogs"]
PLACES = ["in the park", "at the beach", "in the kitchen"]


def texts(start, stop):
    rows = range(start, stop)
    return pa.table(
        {
            "id": list(rows),
            "text": [f"{PEOPLE[i % 4]} play {PLACES[i % 3]} number {i % 37}" for i in rows],
            "topic": [("the place", "the number of people")[i % 2] for i in rows],
            "url": [f"https://example.org/{i}" for i in rows],
        }
    )


def embed(out, run_folder, *others, source="src"):
    columns = ("--sentence", "text", "--condition", "topic")
    return ("embed", source, "--out", out, "--run", run_folder, *columns, *others)


def killed_at(point, count):
    """Let a process die at the count-th of such points."""
    embed_stream.UNIT_ROWS = 40
    outputs._COMMIT_FRAGMENTS = 2
    seen = []

    def dies():
        seen.append(1)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            dies()
            return original(*args, **kwargs)

        setattr(owner, name, call)

    if point == "half written":
        original = pq.write_table

        def half(rows, path, **kwargs):
            original(rows, path, **kwargs)
            whole = Path(path).read_bytes()
            Path(path).write_bytes(whole[: len(whole) // 2])
            dies()
            Path(path).write_bytes(whole)

        pq.write_table = half
    elif point == "written":
        before(outputs.ParquetOutput, "add_unit")
        before(outputs.LanceOutput, "add_unit")
    elif point == "not committed":
        before(lance.LanceDataset, "commit")
    else:
        before(embed_stream.UnitEmbedder, "work")


class DiesOnce(UnitEmbedder):
    """Dies with its third unit written, the first time, before anybody hears of it."""

    def work(self, unit):
        done = super().work(unit)
        died = Path(self._job.out).parent / "died"
        if unit.number == 2 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return done
