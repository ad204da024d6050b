"""A server under load on loopback: its rate, malformed requests, and its memory.

    python scripts/bench_serve.py                                   # rates, beside the plain engine
    python scripts/bench_serve.py --malformed 2000 --requests 50000 # and the rest
    python scripts/bench_serve.py --data CSTS_FOLDER --json

``rates``: every text once, by clients that each wait for an answer before they ask again, against
the same model called once with all texts, in the server's process; by the clock, and by the
seconds that the server had of a CPU, which others on the machine change less. The peer is
sentence-transformers behind the same queue and endpoints. ``malformed``: requests that are wrong in
every way; none may be answered 5xx, or not at all unless it was cut short. ``memory``: the
server's, before and after so many requests. Exits 1 if one of the two fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import numpy as np
import psutil
from fuzz_services import draw_wrong_request, request_bytes

from llmcond.data.datasets import read_dataset
from llmcond.encoders.encoder import Encoded, load_encoder
from llmcond.encoders.spec import Dtype
from llmcond.features.view import FeatureView
from llmcond.prompts import load_prompt
from llmcond.runs.embedder import Embedder
from llmcond.serving.batching import Row
from llmcond.serving.model import ServedModel
from llmcond.serving.model_server import ModelServer
from llmcond.serving.server import bind_socket
from llmcond.serving.settings import ServerSettings

#: Memory may grow by so much: of buffers, and of what Python keeps for later.
GROWTH = 32 * 2**20
PEER = "sentence-transformers"


class PeerModel(ServedModel):
    """The same checkpoint by sentence-transformers: condition and sentence as one text."""

    peer: Any

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return its embeddings."""
        texts = [f"{condition} {sentence}" for sentence, condition in rows]
        vectors = self.peer.encode(texts, convert_to_numpy=True, show_progress_bar=False)
        none = np.zeros(len(rows), dtype=np.int32)
        return Encoded(vectors, none, none.astype(bool), 0)


def serve(kind: str, model: str, dtype: Dtype, rows: list[Row], pipe: Connection) -> None:
    """Serve until something comes through the pipe; tell the rate of one call, and the port."""
    view = FeatureView((load_prompt("concat-cond-sent"),), subtract=False)
    encoder = load_encoder(model, dtype=dtype, device="cpu")
    served = ServedModel(Embedder(encoder, view))
    if kind == PEER:
        from sentence_transformers import SentenceTransformer

        served = PeerModel(Embedder(encoder, view))
        folder = str(encoder.resolved.checkpoint.folder)
        object.__setattr__(served, "peer", SentenceTransformer(folder, device="cpu"))
    served.encode(rows[: len(rows) // 4 + 1])  # for warming up
    began = time.perf_counter(), time.process_time()
    served.encode(rows)
    rate = len(rows) / (time.perf_counter() - began[0])
    rate_of_cpu = len(rows) / (time.process_time() - began[1])
    with bind_socket("127.0.0.1", 0) as listening:
        running = ModelServer(served, ServerSettings())

        def stop() -> None:
            pipe.recv()
            running.handle_exit(0, None)

        threading.Thread(target=stop, daemon=True).start()
        listening.listen(1_024)
        pipe.send((rate, rate_of_cpu, listening.getsockname()[1], psutil.Process().pid))
        running.run([listening])


class Server:
    """A server in a process of its own, as a context."""

    def __init__(self, kind: str, model: str, dtype: Dtype, rows: list[Row]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(kind, model, dtype, rows, other))

    def __enter__(self) -> Server:
        """Start it, and wait until it listens."""
        self._process.start()
        self.rate, self.rate_of_cpu, self.port, pid = self._pipe.recv()
        self.process = psutil.Process(pid)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self._pipe.send("stop")
        self._process.join()


# -- a client that costs little ------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader) -> int:
    """Return the status of the next answer; 0 if there is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line[15:]))
        return int(head[9:12])
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return 0


async def load(port: int, waiting: list[bytes], clients: int) -> list[float]:
    """Send requests by so many clients at a time, and return how long each took, in seconds."""
    took: list[float] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while waiting:
            writer.write(waiting.pop())
            began = time.perf_counter()
            status = await answer(reader)
            if status != 200:
                raise SystemExit(
                    f"bench_serve: request {len(took):,} was answered {status}, not 200"
                )
            took.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return took


def embeddings(rows: Sequence[Row]) -> bytes:
    """Return a request for the embeddings of rows."""
    sentences, conditions = zip(*rows, strict=True)
    body = {"input": sentences, "condition": conditions, "encoding_format": "base64"}
    return request_bytes("/v1/embeddings", json.dumps(body).encode())


# -- what is measured ----------------------------------------------------------------------------


def rates(server: Server, rows: list[Row], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return how fast a server is with so many clients, and so many texts a request."""
    found = []
    for size in given.sizes:
        for clients in given.clients:
            waiting = [embeddings(rows[i : i + size]) for i in range(0, len(rows), size)]
            began, used = time.perf_counter(), sum(server.process.cpu_times()[:2])
            took = asyncio.run(load(server.port, waiting, clients))
            seconds = time.perf_counter() - began
            # The system counts in hundredths of a second, so a short run may read as none.
            used = max(0.01, sum(server.process.cpu_times()[:2]) - used)
            p50, p99 = np.percentile(took, [50, 99])
            found.append(
                {
                    "texts_a_request": size,
                    "clients": clients,
                    "requests_a_second": len(took) / seconds,
                    "texts_a_second": len(rows) / seconds,
                    "of_one_call": len(rows) / seconds / server.rate,
                    "of_one_call_by_cpu": len(rows) / used / server.rate_of_cpu,
                    "p50_ms": 1e3 * float(p50),
                    "p99_ms": 1e3 * float(p99),
                }
            )
    return found


def wrong_request(chance: Random, rows: Sequence[Row]) -> tuple[bytes, bool]:
    """Return a request that something is wrong with, as a rule, and whether it must be answered."""
    path = chance.choice(("/v1/embeddings", "/v1/similarity", "/v1/search", "/v1/none", "/"))
    return draw_wrong_request(chance, path, {"input": rows[0][0], "condition": rows[0][1]})


async def statuses(port: int, requests: Sequence[tuple[bytes, bool]]) -> Counter[int]:
    """Send each over a connection of its own, and count the statuses; 0: none, as it was cut."""
    found: Counter[int] = Counter()
    for content, whole in requests:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(content)
        if not whole:  # the rest would be waited for
            writer.write_eof()
        status = await answer(reader)
        if not status and whole:
            raise SystemExit("bench_serve: a whole request was not answered")
        found[status] += 1
        writer.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="minilm", help="encoder")
    parser.add_argument("--dtype", default="float32", help="of llmcond; the peer has float32")
    parser.add_argument("--data", help="rated rows whose texts are sent (default: the sample)")
    parser.add_argument("--texts", type=int, default=2_000)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16], help="texts a request")
    parser.add_argument("--malformed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=0, help="after which memory is looked at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    data = read_dataset(given.data).splits["train"]
    own: list[Row] = [*zip(data.sentence1, data.condition, strict=True)]
    own += [*zip(data.sentence2, data.condition, strict=True)]
    rows = [own[i % len(own)] for i in range(given.texts)]
    found: dict[str, Any] = {"texts": len(rows), "one_call": {}, "rates": {}}
    for kind in ("llmcond", PEER):
        with Server(kind, given.model, given.dtype, rows) as server:
            found["one_call"][kind] = server.rate
            found["rates"][kind] = rates(server, rows, given)
            if kind == PEER:
                continue
            if given.malformed:
                chance = Random(given.seed)
                wrong = [wrong_request(chance, rows) for _ in range(given.malformed)]
                found["statuses"] = dict(sorted(asyncio.run(statuses(server.port, wrong)).items()))
            if given.requests:
                found["memory"] = []
                for count in (given.requests // 10, given.requests):
                    waiting = [embeddings([rows[i % len(rows)]]) for i in range(count)]
                    asyncio.run(load(server.port, waiting, max(given.clients)))
                    found["memory"].append(server.process.memory_info().rss)
    return show(found, given)


def show(found: dict[str, Any], given: argparse.Namespace) -> int:
    """Print what was found, and return 1 if a request broke the server or it grew."""
    if given.json:
        print(json.dumps(found))
    else:
        heads = "server", "texts a request", "clients", "requests/s", "texts/s", "of one call"
        print(f"| {' | '.join((*heads, 'by CPU', 'p50 ms', 'p99 ms'))} |\n{'|---' * 9}|")
        for kind, own in found["rates"].items():
            print(f"| {kind}, one call | | | | {found['one_call'][kind]:,.0f} | | | | |")
            for row in own:
                print(
                    f"| {kind} | {row['texts_a_request']} | {row['clients']} "
                    f"| {row['requests_a_second']:,.0f} | {row['texts_a_second']:,.0f} "
                    f"| {row['of_one_call']:.0%} | {row['of_one_call_by_cpu']:.0%} "
                    f"| {row['p50_ms']:.1f} | {row['p99_ms']:.1f} |"
                )
    failed = False
    if "statuses" in found:
        failed |= any(status >= 500 for status in found["statuses"])
        told = ", ".join(f"{status}: {count:,}" for status, count in found["statuses"].items())
        print(f"malformed requests by status (0: cut short): {told}", file=sys.stderr)
    if "memory" in found:
        before, after = found["memory"]
        failed |= after - before > GROWTH
        told = f"{before / 2**20:,.0f} MiB, then {after / 2**20:,.0f} MiB"
        print(f"memory after a tenth and all of {given.requests:,}: {told}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
