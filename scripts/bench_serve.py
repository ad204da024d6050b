"""Measure the rate of a server under load on loopback.

    python scripts/bench_serve.py
    python scripts/bench_serve.py --data CSTS_FOLDER --json

Clients send every text once, and each client waits for a response before its next request.
The rate is compared with one call of the same model with all texts, in the server's process. The
comparison uses wall time, and the processor time of the server, which other processes on the
machine affect less. The peer is sentence-transformers behind the same queue and endpoints.

Commit 17f6c5ba can also send malformed requests, and measure the memory after many requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import psutil
from bench import BenchOptions, timed
from common import format_table, print_json

from llmcond.data.datasets import read_dataset
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.spec import Dtype, Encoded
from llmcond.features.view import FeatureView
from llmcond.prompts import load_prompt
from llmcond.runs.embedder import Embedder
from llmcond.serving.model import Row, ServedModel
from llmcond.serving.model_server import ModelServer
from llmcond.serving.server import bind_socket
from llmcond.serving.settings import ServerSettings

PEER = "sentence-transformers"


class PeerModel(ServedModel):
    """The same checkpoint in sentence-transformers, with condition and sentence as one text."""

    peer: Any

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """Return the embeddings of rows."""
        texts = [f"{condition} {sentence}" for sentence, condition in rows]
        vectors = self.peer.encode(texts, convert_to_numpy=True, show_progress_bar=False)
        none = np.zeros(len(rows), dtype=np.int32)
        return Encoded(vectors, none, none.astype(bool), 0)


def serve(kind: str, model: str, dtype: Dtype, rows: list[Row], pipe: Connection) -> None:
    """Serve until a message arrives through the pipe.

    First sends the rates of one call, in texts per second of wall time and of processor time, and
    the port and the process id.

    Args:
        kind: ``llmcond`` or the peer.
        model: name of the encoder.
        dtype: data type of llmcond's encoder.
        rows: the texts of the one call.
        pipe: connection to the parent process.
    """
    view = FeatureView((load_prompt("concat-cond-sent"),), subtract=False)
    encoder = load_encoder(model, dtype=dtype, device="cpu")
    served = ServedModel(Embedder(encoder, view))
    if kind == PEER:
        from sentence_transformers import SentenceTransformer

        served = PeerModel(Embedder(encoder, view))
        folder = str(encoder.resolved.checkpoint.folder)
        object.__setattr__(served, "peer", SentenceTransformer(folder, device="cpu"))
    served.encode(rows[: len(rows) // 4 + 1])  # warm-up
    _, seconds, processor = timed(served.encode, rows)
    rate, rate_of_cpu = len(rows) / seconds, len(rows) / processor
    with bind_socket("127.0.0.1", 0) as listening:
        running = ModelServer(served, ServerSettings())

        def stop() -> None:
            pipe.recv()
            running.handle_exit(0, None)

        threading.Thread(target=stop, daemon=True).start()
        listening.listen(1_024)
        pipe.send((rate, rate_of_cpu, listening.getsockname()[1], psutil.Process().pid))
        running.run([listening])


class Server(NamedTuple):
    """A server that listens: texts per second of one call by wall and processor time, and more."""

    rate: float
    rate_of_cpu: float
    port: int
    process: psutil.Process


@contextmanager
def start_server(kind: str, model: str, dtype: Dtype, rows: list[Row]) -> Iterator[Server]:
    """Run ``serve`` in a separate process, and yield the server once it listens."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(kind, model, dtype, rows, other))
    process.start()
    rate, rate_of_cpu, port, pid = pipe.recv()
    try:
        yield Server(rate, rate_of_cpu, port, psutil.Process(pid))
    finally:
        pipe.send("stop")
        process.join()


# -- a client with little overhead ---------------------------------------------------------------


async def read_status(reader: asyncio.StreamReader) -> int:
    """Return the status of the next response, or 0 if there is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line[15:]))
        return int(head[9:12])
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return 0


async def load(port: int, requests: list[bytes], clients: int) -> list[float]:
    """Send requests by concurrent clients, and return the seconds of each.

    Args:
        port: port of the server.
        requests: the requests, which are removed from the list.
        clients: number of clients.

    Raises:
        SystemExit: the status of a response is not 200.
    """
    latencies: list[float] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while requests:
            writer.write(requests.pop())
            began = time.perf_counter()
            status = await read_status(reader)
            if status != 200:
                raise SystemExit(
                    f"bench_serve: request {len(latencies):,} returned status {status}, not 200"
                )
            latencies.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return latencies


def make_request(rows: Sequence[Row]) -> bytes:
    """Return a request for the embeddings of rows."""
    sentences, conditions = zip(*rows, strict=True)
    values = {"input": sentences, "condition": conditions, "encoding_format": "base64"}
    body = json.dumps(values).encode()
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


# -- what is measured ----------------------------------------------------------------------------


def measure_rates(
    server: Server, rows: list[Row], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure a server for each number of texts per request and each number of clients."""
    results = []
    for size in options.sizes:
        for clients in options.clients:
            requests = [make_request(rows[i : i + size]) for i in range(0, len(rows), size)]
            start, cpu = time.perf_counter(), sum(server.process.cpu_times()[:2])
            latencies = asyncio.run(load(server.port, requests, clients))
            seconds = time.perf_counter() - start
            # The system counts hundredths of a second, so a short run may count as zero.
            cpu = max(0.01, sum(server.process.cpu_times()[:2]) - cpu)
            p50, p99 = np.percentile(latencies, [50, 99])
            results.append(
                {
                    "texts_a_request": size,
                    "clients": clients,
                    "requests_a_second": len(latencies) / seconds,
                    "texts_a_second": len(rows) / seconds,
                    "of_one_call": len(rows) / seconds / server.rate,
                    "of_one_call_by_cpu": len(rows) / cpu / server.rate_of_cpu,
                    "p50_ms": 1e3 * float(p50),
                    "p99_ms": 1e3 * float(p99),
                }
            )
    return results


COLUMNS = {
    "server": "server",
    "texts a request": "texts_a_request",
    "clients": "clients",
    "requests/s": "requests_a_second:,.0f",
    "texts/s": "texts_a_second:,.0f",
    "of one call": "of_one_call:.0%",
    "by CPU": "of_one_call_by_cpu:.0%",
    "p50 ms": "p50_ms:.1f",
    "p99 ms": "p99_ms:.1f",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and print the results."""
    parser = BenchOptions(__doc__)
    add = parser.option
    add("--model", "minilm", "encoder")
    add("--dtype", "float32", "data type of llmcond; the peer has float32")
    add("--data", str, "rated rows whose texts are sent", "the bundled sample")
    add("--texts", 2_000, "number of texts")
    add("--clients", [1, 16, 64], "numbers of concurrent clients")
    add("--sizes", [1, 16], "numbers of texts per request")
    options = parser.parse_args(arguments)
    data = read_dataset(options.data).splits["train"]
    distinct: list[Row] = [*zip(data.sentence1, data.condition, strict=True)]
    distinct += [*zip(data.sentence2, data.condition, strict=True)]
    rows = [distinct[i % len(distinct)] for i in range(options.texts)]
    results: dict[str, Any] = {"texts": len(rows), "one_call": {}, "rates": {}}
    for kind in ("llmcond", PEER):
        with start_server(kind, options.model, options.dtype, rows) as server:
            results["one_call"][kind] = server.rate
            results["rates"][kind] = measure_rates(server, rows, options)
    table: list[dict[str, Any]] = []
    for kind, rates in results["rates"].items():
        table.append({"server": f"{kind}, one call", "texts_a_second": results["one_call"][kind]})
        table += [{"server": kind, **row} for row in rates]
    print(format_table(table, COLUMNS))
    print_json(options, results)


if __name__ == "__main__":
    main()
