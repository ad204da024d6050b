"""Measure extraction by actors of Ray against extraction in one process, and kill what there is.

    python scripts/bench_ray.py                       # processor time: an actor against one process
    python scripts/bench_ray.py kills --times 30      # actors, drivers, Ray's own programs
    python scripts/bench_ray.py rows --sizes 10000 1000000     # memory of the driver, commits
    python scripts/bench_ray.py nodes --count 64      # nodes on this machine, encoders that sleep

The model ``small`` has random weights, two layers and 32 dimensions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import lance
import numpy as np
from bench_inputs import make_tokenizer
from bench_process import alone
from bench_scale import csts_inputs, short_inputs

from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.encoder import Encoded
from llmcond.features.extract import CommittedCounts, EncodingPart, extract
from llmcond.features.store import FeatureStore
from llmcond.scale.extraction import ActorEncoderSpec, WrittenFragment, make_ray_execution
from llmcond.scale.pool import RayCluster


def settle(model: str, folder: Path) -> tuple[str, ResolvedEncoder]:
    """Return a model's name and its encoder, on a CPU in float32."""
    if model == "small":
        model = str(folder / "small")
        if not Path(model).is_dir():
            make_small(Path(model))
    options = EncoderOptions(device="cpu", dtype="float32", pooling="mean", normalize=True)
    return model, resolve(model, options)


def make_small(folder: Path) -> None:
    """Make a random encoder of two layers and 32 dimensions; a tokenizer as the other benches."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=8_000, intermediate_size=64, **sizes)
    BertModel(config).save_pretrained(folder)
    make_tokenizer(folder)


def table_of(store: FeatureStore) -> dict[bytes, Any]:
    """Return what a store holds, by key; a key that is there twice is an error."""
    found = lance.dataset(str(store.folder / "vectors.lance")).to_table()
    keys = found["key"].to_pylist()
    if len(keys) != len(set(keys)):
        raise SystemExit(f"{len(keys) - len(set(keys)):,} keys are there twice")
    flat = found["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return dict(zip(keys, flat.reshape(len(keys), -1), strict=True))


def same(store: FeatureStore, wanted: dict[bytes, Any]) -> bool:
    """Return whether a store holds the same keys and vectors, to the bit."""
    found = table_of(store)
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[key], vector) for key, vector in wanted.items()
    )


# -- processor time ------------------------------------------------------------------------------


def in_one_process(model: str, folder: str, n: int) -> tuple[float, float]:
    """Extract on one thread; return the processor's and the wall clock's seconds, loading aside."""
    import torch

    from llmcond.encoders.encoder import Encoder

    torch.set_num_threads(1)
    model, resolved = settle(model, Path(folder))
    store = FeatureStore(Path(folder) / "alone", resolved.identity, "float16")
    encoder = Encoder(resolved)
    cpu, wall = time.process_time(), time.monotonic()
    extract(csts_inputs(n), store, lambda: encoder)
    return time.process_time() - cpu, time.monotonic() - wall


def by_actors(model: str, folder: str, n: int, actors: int, name: str) -> dict[str, float]:
    """Extract by actors; return seconds of actors and driver, and of the start."""
    model, resolved = settle(model, Path(folder))
    store = FeatureStore(Path(folder) / name, resolved.identity, "float16")
    began = time.monotonic()
    first: list[float] = []

    class Noting:
        """Notes when the first vectors are there."""

        def start(self, inputs: int | None, characters: int | None) -> None:
            """Show nothing."""

        def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
            """Note the time."""
            first.append(time.monotonic())

    cpu = time.process_time()
    with make_ray_execution(RayCluster(actors=actors), model, resolved, store) as execution:
        extract(csts_inputs(n), store, lambda: None, Noting(), execute=execution)  # type: ignore[arg-type, return-value]
        found = {"actors": execution.cpu_seconds, "driver": time.process_time() - cpu}
    return found | {"first": first[0] - began, "wall": first[-1] - began}


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what actors take beyond one process, in turn."""
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            n, model = options.inputs, options.model
            cpu, wall = alone(in_one_process, model, folder, n)
            found = alone(by_actors, model, folder, n, options.actors, "ray")
            identity = settle(model, Path(folder))[1].identity
            stores = [
                FeatureStore(Path(folder) / name, identity, "float16") for name in ("alone", "ray")
            ]
            rounds.append(
                {
                    "cpu": cpu,
                    "wall_alone": wall,
                    **found,
                    "same": same(stores[1], table_of(stores[0])),
                }
            )
            print(
                f"{n:,} inputs: one process {cpu:.1f} s of processor time, {options.actors} actors "
                f"{found['actors']:.1f} s ({found['actors'] / cpu - 1:+.1%}), driver "
                f"{found['driver']:.1f} s; first vectors after {found['first']:.1f} s, all after "
                f"{found['wall']:.1f} s (one process {wall:.1f} s); same vectors: "
                f"{rounds[-1]['same']}"
            )
    return {"rounds": rounds}


# -- kills ---------------------------------------------------------------------------------------

DRIVER = """
import sys
sys.path.insert(0, {})
from bench_ray import drive
drive({}, {}, {}, {})
"""


def drive(model: str, folder: str, n: int, actors: int) -> None:
    """Extract by actors, in a process that may be killed."""
    name, resolved = settle(model, Path(folder))
    store = FeatureStore(Path(folder) / "killed", resolved.identity, "float16")
    with make_ray_execution(RayCluster(actors=actors), name, resolved, store) as execution:
        extract(csts_inputs(n), store, lambda: None, execute=execution)  # type: ignore[arg-type, return-value]


def below(process: int) -> dict[int, str]:
    """Return the processes that one has started, and those in turn, with their commands."""
    command = ["ps", "-eo", "pid=,ppid=,args="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()]
    found: dict[int, str] = {}
    parents = {process}
    while parents:
        own = {int(line[0]): line[2] for line in lines if int(line[1]) in parents}
        parents = set(own) - set(found)
        found |= own
    return found


#: What is killed, and what tells it among the processes that a driver has started.
TARGETS = {"actor": "ray::_Actor", "raylet": "raylet/raylet ", "driver": ""}


def kill_one(driver: subprocess.Popen[bytes], what: str, draw: random.Random) -> bool:
    """Kill something of an extraction; return whether there was such a thing."""
    started = below(driver.pid)
    own = [process for process, command in started.items() if TARGETS[what] in command]
    victims = [driver.pid] if what == "driver" else own
    if not victims:
        return False
    try:
        os.kill(draw.choice(victims), signal.SIGKILL)
    except ProcessLookupError:
        return False
    if what == "driver":
        driver.wait()
        # Ray's agents take a minute to notice, and do not touch the store.
        wait_for_end([own for own, command in started.items() if "Agent" not in command])
    return True


def kills(options: argparse.Namespace) -> dict[str, Any]:
    """Kill at random moments until so many kills are done, and the work too."""
    draw, done = random.Random(options.seed), Counter[str]()
    wrong = finished = begun = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone(in_one_process, options.model, name, options.inputs)
        identity = settle(options.model, folder)[1].identity
        wanted = table_of(FeatureStore(folder / "alone", identity, "float16"))
        given = (str(Path(__file__).parent), options.model, name, options.inputs, options.actors)
        while done.total() < options.times or begun:
            command = [sys.executable, "-c", DRIVER.format(*map(repr, given))]
            quiet: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
            driver = subprocess.Popen(command, **quiet)
            begun += 1
            while driver.poll() is None and done.total() < options.times:
                with suppress(subprocess.TimeoutExpired):
                    driver.wait(draw.uniform(2, options.seconds))
                what = draw.choice(list(TARGETS))
                if driver.poll() is None and kill_one(driver, what, draw):
                    done[what] += 1
                    print(done.total(), what, file=sys.stderr, flush=True)
            if driver.wait() != 0:
                continue
            store = FeatureStore(folder / "killed", identity, "float16")
            equal = same(store, wanted)
            finished, wrong = finished + 1, wrong + (not equal)
            print(
                f"{done.total()} kills by now ({dict(done)}); done in {begun} runs: {len(store):,} "
                f"rows, each key once, {'equal' if equal else 'NOT EQUAL'} to those of one process",
                flush=True,
            )
            begun = 0
            shutil.rmtree(folder / "killed")
    return {"kills": dict(done), "finished": finished, "wrong": wrong}


def wait_for_end(processes: Iterable[int]) -> None:
    """Wait until what a killed driver has started has noticed, for a minute at most."""
    until = time.monotonic() + 60
    while any(map(runs, processes)) and time.monotonic() < until:
        time.sleep(0.1)


def runs(process: int) -> bool:
    """Return whether a process is at work; one that nobody has waited for is not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# -- many rows -----------------------------------------------------------------------------------


def many(model: str, folder: str, n: int, actors: int) -> dict[str, Any]:
    """Extract short inputs by actors; return what the driver took."""
    name, resolved = settle(model, Path(folder))
    store = FeatureStore(Path(folder) / str(n), resolved.identity, "float16")
    began, cpu = time.monotonic(), time.process_time()
    with make_ray_execution(RayCluster(actors=actors), name, resolved, store) as execution:
        extract(short_inputs(n), store, lambda: None, execute=execution)  # type: ignore[arg-type, return-value]
    dataset = lance.dataset(str(store.folder / "vectors.lance"))
    manifests = sorted(
        (store.folder / "vectors.lance" / "_versions").glob("*.manifest"), key=os.path.getmtime
    )
    return {
        "rows": dataset.count_rows(),
        "seconds": time.monotonic() - began,
        "driver_cpu": time.process_time() - cpu,
        "driver_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "commits": dataset.version,
        "fragments": len(dataset.get_fragments()),
        "manifest_bytes": manifests[-1].stat().st_size,
    }


def rows(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the driver at several sizes."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for n in options.sizes:
            found.append(alone(many, options.small, folder, n, options.actors))
            told = ", ".join(f"{key} {value:,.0f}" for key, value in found[-1].items())
            print(told)
    return {"sizes": found}


# -- many nodes ----------------------------------------------------------------------------------


class Sleeping:
    """In the place of an actor's encoder: as slow, without computing; vectors are drawn by key."""

    def __init__(self, made_of: ActorEncoderSpec, seconds: float, dim: int, identity: Any) -> None:
        self.seconds, self.dim = seconds, dim
        self.store = FeatureStore(made_of.store_root, identity, made_of.dtype, only_write=True)

    def work(self, item: Sequence[EncodingPart]) -> WrittenFragment:
        """Sleep for each part, and write vectors that are drawn."""
        began, cpu = time.monotonic(), time.process_time()
        inputs = [one for part in item for one in part.inputs]
        time.sleep(self.seconds * len(item))
        seed = int.from_bytes(inputs[0].key[:4], "little")
        vectors = (
            np.random.default_rng(seed).normal(size=(len(inputs), self.dim)).astype(np.float32)
        )
        n = len(inputs)
        encoded = Encoded(vectors, np.full(n, 9, np.int32), np.zeros(n, dtype=np.bool_))
        fragment = self.store.write_fragment(inputs, encoded)
        spent = time.process_time() - cpu
        return WrittenFragment(
            fragment, CommittedCounts(n, 0, 0, 9 * n, time.monotonic() - began), spent, None
        )


def nodes(options: argparse.Namespace) -> dict[str, Any]:
    """Let many actors write what they did not encode, on nodes that all are this machine."""
    from ray.cluster_utils import Cluster as LocalCluster

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name, resolved = settle(options.small, Path(folder))
        store = FeatureStore(Path(folder) / "nodes", resolved.identity, "float16")
        local = LocalCluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": 2**27,
            },
        )
        stack.callback(local.shutdown)
        per_node = -(-options.count // options.nodes)
        for _ in range(options.nodes):
            local.add_node(num_cpus=per_node, object_store_memory=2**27)
        execution = make_ray_execution(
            RayCluster(address=local.address, actors=options.count), name, resolved, store
        )
        sleeping = (options.part, options.dim, resolved.identity)
        execution.worker = lambda made_of: Sleeping(made_of, *sleeping)
        began, cpu, first = time.monotonic(), time.process_time(), []

        class Noting:
            """Notes when parts were done."""

            def start(self, inputs: int | None, characters: int | None) -> None:
                """Show nothing."""

            def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
                """Note the time and the rows."""
                first.append((time.monotonic() - began, inputs))

        with execution:
            extract(short_inputs(options.inputs), store, lambda: None, Noting(), execute=execution)  # type: ignore[arg-type, return-value]
        dataset = lance.dataset(str(store.folder / "vectors.lance"))
        start, end = first[0][0], first[-1][0]
        ideal = options.inputs / 1024 * options.part / options.count
        found = {
            "rows": dataset.count_rows(),
            "distinct": len(table_of(store)),
            "first_seconds": start,
            "seconds_after_first": end - start,
            "ideal_seconds": ideal,
            "driver_cpu": time.process_time() - cpu,
            "driver_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "commits": dataset.version,
        }
    print(", ".join(f"{key} {value:,.1f}" for key, value in found.items()))
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = {"overhead": overhead, "kills": kills, "rows": rows, "nodes": nodes}
    parser.add_argument("what", nargs="?", default="overhead", choices=ways)
    parser.add_argument("--model", default="minilm", help="of overhead and kills; small: random")
    parser.add_argument("--small", default="small", help="the model of rows and nodes")
    parser.add_argument("--inputs", type=int, default=8_192)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="of overhead")
    parser.add_argument("--times", type=int, default=30, help="kills")
    parser.add_argument("--seconds", type=float, default=12, help="between kills, at most")
    parser.add_argument("--part", type=float, default=2, help="seconds a part takes, of nodes")
    parser.add_argument("--seed", type=int, default=0, help="of kills")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 1_000_000], help="of rows")
    parser.add_argument("--count", type=int, default=64, help="actors of nodes")
    parser.add_argument("--nodes", type=int, default=8, help="of nodes")
    parser.add_argument("--dim", type=int, default=384, help="of nodes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = ways[options.what](options)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
