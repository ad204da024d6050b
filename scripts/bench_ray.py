"""Measure extraction by Ray actors against one process, also while processes are killed.

    python scripts/bench_ray.py                       # processor time: an actor against a process
    python scripts/bench_ray.py kills --times 30      # of actors, drivers and Ray's raylets
    python scripts/bench_ray.py rows --sizes 10000 1000000     # memory of the driver, commits
    python scripts/bench_ray.py nodes --count 64      # simulated nodes and encoders

All nodes are on this machine. The model ``small`` has random weights, two layers and 32 dimensions.
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
from bench_process import run_in_process
from bench_scale import csts_inputs, short_inputs

from llmcond.encoders import EncoderOptions, ResolvedEncoder, resolve
from llmcond.encoders.spec import Encoded
from llmcond.features.extract import CommittedCounts, EncodingPart, extract
from llmcond.features.store import FeatureStore
from llmcond.scale.extraction import ActorEncoderSpec, WrittenFragment, make_ray_execution
from llmcond.scale.pool import RayCluster


def resolve_model(model: str, folder: Path) -> tuple[str, ResolvedEncoder]:
    """Return the name or folder of a model, and its encoder, on a CPU in float32."""
    if model == "small":
        model = str(folder / "small")
        if not Path(model).is_dir():
            make_small(Path(model))
    options = EncoderOptions(device="cpu", dtype="float32", pooling="mean", normalize=True)
    return model, resolve(model, options)


def make_small(folder: Path) -> None:
    """Create a random encoder of two layers and 32 dimensions, with the tokenizer of benchmarks."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=8_000, intermediate_size=64, **sizes)
    BertModel(config).save_pretrained(folder)
    make_tokenizer(folder)


def read_vectors(store: FeatureStore) -> dict[bytes, Any]:
    """Return the vectors of a store by key.

    Raises:
        SystemExit: a key occurs more than once.
    """
    table = lance.dataset(str(store.folder / "vectors.lance")).to_table()
    keys = table["key"].to_pylist()
    if len(keys) != len(set(keys)):
        raise SystemExit(f"{len(keys) - len(set(keys)):,} keys of the store are duplicates")
    flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return dict(zip(keys, flat.reshape(len(keys), -1), strict=True))


def equals(store: FeatureStore, expected: dict[bytes, Any]) -> bool:
    """Return whether a store has exactly the expected keys and vectors, bit by bit."""
    stored = read_vectors(store)
    return stored.keys() == expected.keys() and all(
        np.array_equal(stored[key], vector) for key, vector in expected.items()
    )


# -- processor time ------------------------------------------------------------------------------


def extract_in_one_process(model: str, folder: str, n: int) -> tuple[float, float]:
    """Extract on one thread; return processor seconds and wall seconds, without loading."""
    import torch

    from llmcond.encoders.encoder import Encoder

    torch.set_num_threads(1)
    model, resolved = resolve_model(model, Path(folder))
    store = FeatureStore(Path(folder) / "alone", resolved.identity, "float16")
    encoder = Encoder(resolved)
    cpu, wall = time.process_time(), time.monotonic()
    extract(csts_inputs(n), store, lambda: encoder)
    return time.process_time() - cpu, time.monotonic() - wall


def extract_by_actors(model: str, folder: str, n: int, actors: int, name: str) -> dict[str, float]:
    """Extract by actors.

    Returns:
        The processor seconds of the ``actors`` and of the ``driver``, and the wall seconds until
        the ``first`` and until all vectors are stored (``wall``).
    """
    model, resolved = resolve_model(model, Path(folder))
    store = FeatureStore(Path(folder) / name, resolved.identity, "float16")
    began = time.monotonic()
    first: list[float] = []

    class CommitTimes:
        """A progress that records the time of each commit."""

        def start(self, inputs: int | None, characters: int | None) -> None:
            """Do nothing."""

        def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
            """Record the time."""
            first.append(time.monotonic())

    cpu = time.process_time()
    with make_ray_execution(RayCluster(actors=actors), model, resolved, store) as execution:
        extract(csts_inputs(n), store, lambda: None, CommitTimes(), execute=execution)  # type: ignore[arg-type, return-value]
        seconds = {"actors": execution.cpu_seconds, "driver": time.process_time() - cpu}
    return seconds | {"first": first[0] - began, "wall": first[-1] - began}


def measure_overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Measure actors against one process, in turn."""
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            n, model = options.inputs, options.model
            cpu, wall = run_in_process(extract_in_one_process, model, folder, n)
            seconds = run_in_process(extract_by_actors, model, folder, n, options.actors, "ray")
            identity = resolve_model(model, Path(folder))[1].identity
            stores = [
                FeatureStore(Path(folder) / name, identity, "float16") for name in ("alone", "ray")
            ]
            rounds.append(
                {
                    "cpu": cpu,
                    "wall_alone": wall,
                    **seconds,
                    "same": equals(stores[1], read_vectors(stores[0])),
                }
            )
            print(
                f"{n:,} inputs: one process {cpu:.1f} s of processor time, {options.actors} actors "
                f"{seconds['actors']:.1f} s ({seconds['actors'] / cpu - 1:+.1%}), driver "
                f"{seconds['driver']:.1f} s; first vectors after {seconds['first']:.1f} s, all "
                f"after {seconds['wall']:.1f} s (one process {wall:.1f} s); same vectors: "
                f"{rounds[-1]['same']}"
            )
    return {"rounds": rounds}


# -- kills ---------------------------------------------------------------------------------------

DRIVER = """
import sys
sys.path.insert(0, {})
from bench_ray import run_driver
run_driver({}, {}, {}, {})
"""


def run_driver(model: str, folder: str, n: int, actors: int) -> None:
    """Extract by actors, in a process that the benchmark may kill."""
    name, resolved = resolve_model(model, Path(folder))
    store = FeatureStore(Path(folder) / "killed", resolved.identity, "float16")
    with make_ray_execution(RayCluster(actors=actors), name, resolved, store) as execution:
        extract(csts_inputs(n), store, lambda: None, execute=execution)  # type: ignore[arg-type, return-value]


def find_descendants(process: int) -> dict[int, str]:
    """Return the ids of all descendants of a process, with their commands."""
    command = ["ps", "-eo", "pid=,ppid=,args="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()]
    descendants: dict[int, str] = {}
    parents = {process}
    while parents:
        children = {int(line[0]): line[2] for line in lines if int(line[1]) in parents}
        parents = set(children) - set(descendants)
        descendants |= children
    return descendants


#: Kinds of processes to kill, and a part of their command that identifies them.
TARGETS = {"actor": "ray::_Actor", "raylet": "raylet/raylet ", "driver": ""}


def kill_one(driver: subprocess.Popen[bytes], kind: str, rng: random.Random) -> bool:
    """Kill a random process of a kind; return whether there was one.

    Args:
        driver: process of the driver.
        kind: a key of ``TARGETS``.
        rng: chooses the process.
    """
    started = find_descendants(driver.pid)
    of_kind = [process for process, command in started.items() if TARGETS[kind] in command]
    victims = [driver.pid] if kind == "driver" else of_kind
    if not victims:
        return False
    try:
        os.kill(rng.choice(victims), signal.SIGKILL)
    except ProcessLookupError:
        return False
    if kind == "driver":
        driver.wait()
        # Ray's agents need a minute to notice, but they do not use the store.
        wait_for_end([process for process, command in started.items() if "Agent" not in command])
    return True


def measure_kills(options: argparse.Namespace) -> dict[str, Any]:
    """Kill random processes at random moments, until the number of kills is reached.

    After each killed extraction, the next one resumes it. Each finished store is compared with that
    of one process.
    """
    rng, done = random.Random(options.seed), Counter[str]()
    wrong = finished = begun = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_in_process(extract_in_one_process, options.model, name, options.inputs)
        identity = resolve_model(options.model, folder)[1].identity
        expected = read_vectors(FeatureStore(folder / "alone", identity, "float16"))
        arguments = (
            str(Path(__file__).parent),
            options.model,
            name,
            options.inputs,
            options.actors,
        )
        while done.total() < options.times or begun:
            command = [sys.executable, "-c", DRIVER.format(*map(repr, arguments))]
            quiet: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
            driver = subprocess.Popen(command, **quiet)
            begun += 1
            while driver.poll() is None and done.total() < options.times:
                with suppress(subprocess.TimeoutExpired):
                    driver.wait(rng.uniform(2, options.seconds))
                kind = rng.choice(list(TARGETS))
                if driver.poll() is None and kill_one(driver, kind, rng):
                    done[kind] += 1
                    print(done.total(), kind, file=sys.stderr, flush=True)
            if driver.wait() != 0:
                continue
            store = FeatureStore(folder / "killed", identity, "float16")
            equal = equals(store, expected)
            finished, wrong = finished + 1, wrong + (not equal)
            print(
                f"{done.total()} kills so far ({dict(done)}); finished in {begun} runs: "
                f"{len(store):,} rows, without duplicate keys, "
                f"{'equal' if equal else 'NOT EQUAL'} to those of one process",
                flush=True,
            )
            begun = 0
            shutil.rmtree(folder / "killed")
    return {"kills": dict(done), "finished": finished, "wrong": wrong}


def wait_for_end(processes: Iterable[int]) -> None:
    """Wait until the processes of a killed driver have ended, for at most a minute."""
    until = time.monotonic() + 60
    while any(map(is_running, processes)) and time.monotonic() < until:
        time.sleep(0.1)


def is_running(process: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# -- many rows -----------------------------------------------------------------------------------


def measure_driver(model: str, folder: str, n: int, actors: int) -> dict[str, Any]:
    """Extract short inputs by actors; return the figures of the driver and of the store."""
    name, resolved = resolve_model(model, Path(folder))
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


def measure_rows(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the driver at several numbers of inputs."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for n in options.sizes:
            results.append(run_in_process(measure_driver, options.small, folder, n, options.actors))
            print(", ".join(f"{key} {value:,.0f}" for key, value in results[-1].items()))
    return {"sizes": results}


# -- many nodes ----------------------------------------------------------------------------------


class SleepingWorker:
    """A stand-in for the encoder of an actor: it sleeps, and returns random vectors by key."""

    def __init__(self, encoder: ActorEncoderSpec, seconds: float, dim: int, identity: Any) -> None:
        self.seconds, self.dim = seconds, dim
        self.store = FeatureStore(encoder.store_root, identity, encoder.dtype, only_write=True)

    def work(self, item: Sequence[EncodingPart]) -> WrittenFragment:
        """Sleep for each part, and write random vectors."""
        began, cpu = time.monotonic(), time.process_time()
        inputs = [encoder_input for part in item for encoder_input in part.inputs]
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


def measure_nodes(options: argparse.Namespace) -> dict[str, Any]:
    """Let many actors write random vectors, on nodes that are all on this machine."""
    from ray.cluster_utils import RayCluster as LocalCluster

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name, resolved = resolve_model(options.small, Path(folder))
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
        execution.worker = lambda encoder: SleepingWorker(encoder, *sleeping)
        began, cpu, commits = time.monotonic(), time.process_time(), []

        class CommitTimes:
            """A progress that records the time of each commit."""

            def start(self, inputs: int | None, characters: int | None) -> None:
                """Do nothing."""

            def advance(self, inputs: int, characters: int, tokens: int, seconds: float) -> None:
                """Record the time and the number of rows."""
                commits.append((time.monotonic() - began, inputs))

        with execution:
            inputs, progress = short_inputs(options.inputs), CommitTimes()
            extract(inputs, store, lambda: None, progress, execute=execution)  # type: ignore[arg-type, return-value]
        dataset = lance.dataset(str(store.folder / "vectors.lance"))
        start, end = commits[0][0], commits[-1][0]
        ideal = options.inputs / 1024 * options.part / options.count
        figures = {
            "rows": dataset.count_rows(),
            "distinct": len(read_vectors(store)),
            "first_seconds": start,
            "seconds_after_first": end - start,
            "ideal_seconds": ideal,
            "driver_cpu": time.process_time() - cpu,
            "driver_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "commits": dataset.version,
        }
    print(", ".join(f"{key} {value:,.1f}" for key, value in figures.items()))
    return figures


def main() -> None:
    """Parse the command line and run a part of the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = {
        "overhead": measure_overhead,
        "kills": measure_kills,
        "rows": measure_rows,
        "nodes": measure_nodes,
    }
    parser.add_argument(
        "what", nargs="?", default="overhead", choices=ways, help="part to run (default: overhead)"
    )
    parser.add_argument(
        "--model",
        default="minilm",
        help="overhead and kills: encoder, or small for random weights (default: minilm)",
    )
    parser.add_argument("--small", default="small", help="rows and nodes: encoder (default: small)")
    parser.add_argument(
        "--inputs",
        type=int,
        default=8_192,
        help="number of inputs, except for rows (default: 8192)",
    )
    parser.add_argument(
        "--actors", type=int, default=1, help="number of actors, except for nodes (default: 1)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="overhead: number of turns (default: 3)"
    )
    parser.add_argument(
        "--times", type=int, default=30, help="kills: number of kills (default: 30)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=12,
        help="kills: maximum seconds between two kills (default: 12)",
    )
    parser.add_argument(
        "--part", type=float, default=2, help="nodes: simulated seconds per part (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="kills: random seed (default: 0)")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[10_000, 1_000_000],
        help="rows: numbers of inputs (default: 10000 1000000)",
    )
    parser.add_argument(
        "--count", type=int, default=64, help="nodes: number of actors (default: 64)"
    )
    parser.add_argument("--nodes", type=int, default=8, help="nodes: number of nodes (default: 8)")
    parser.add_argument(
        "--dim", type=int, default=384, help="nodes: dimensions of a vector (default: 384)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on the last line"
    )
    options = parser.parse_args()
    result = ways[options.what](options)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
