"""Texts that are embedded in work units, and processes that are killed meanwhile."""

import os
import signal
from pathlib import Path

import lance
import pyarrow as pa
import torch

from llmcond.features import outputs
from llmcond.workflows import embed_stream
from llmcond.workflows.embed_stream import UnitEmbedder

PEOPLE = ["two men", "three women", "children", "two dogs"]
LOCATIONS = ["in the park", "at the beach", "in the kitchen"]


def text_table(start, stop):
    rows = range(start, stop)
    return pa.table(
        {
            "id": list(rows),
            "text": [f"{PEOPLE[i % 4]} play {LOCATIONS[i % 3]} number {i % 37}" for i in rows],
            "topic": [("the place", "the number of people")[i % 2] for i in rows],
            "url": [f"https://example.org/{i}" for i in rows],
        }
    )


def embed_command(out, run_folder, *others, source="src"):
    columns = ("--text", "text", "--condition", "topic")
    return ("embed", source, "--out", out, "--run", run_folder, *columns, *others)


def kill_at(point, count, threads=1):
    """Make the process kill itself when it reaches a point for the count-th time."""
    torch.set_num_threads(threads)
    embed_stream.UNIT_ROWS = 40
    outputs._COMMIT_FRAGMENTS = 2
    visits = []

    def kill_at_count():
        visits.append(1)
        if len(visits) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def kill_before(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            kill_at_count()
            return original(*args, **kwargs)

        setattr(owner, name, call)

    if point == "half written":
        original = Path.write_bytes

        def write_half(path, content):
            if ".parquet" in path.name:
                original(path, memoryview(content)[: len(content) // 2])
                kill_at_count()
            return original(path, content)

        Path.write_bytes = write_half
    elif point == "written":
        kill_before(outputs.ParquetOutput, "add_unit")
        kill_before(outputs.LanceOutput, "add_unit")
    else:
        assert point == "not committed"
        kill_before(lance.LanceDataset, "commit")


class KilledOnce(UnitEmbedder):
    """Is killed, the first time, after it has written its third unit and before it reports it."""

    def work(self, unit):
        result = super().work(unit)
        marker = Path(self._job.out).parent / "died"
        if unit.number == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result
