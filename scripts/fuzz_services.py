"""Inputs of ``fuzz.py`` for servers, searches and commands that resume.

``request``: requests to a running ``llmcond serve``. ``filter``: filters of ``llmcond search``.
``output``: damaged outputs of ``llmcond embed --out FOLDER``. ``answer``: answers of a chat server
to ``llmcond annotate``. All of them use tiny models with random weights, and servers on 127.0.0.1.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import resource
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from http.client import HTTPException, HTTPResponse
from multiprocessing import parent_process
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from random import Random
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any, Final
from unittest.mock import patch

from fuzz_changes import (
    TEXTS,
    VALUES,
    Base,
    Command,
    Input,
    change_below,
    change_bytes,
    change_json,
    succeed,
)

from llmcond.base.system import process_context

#: Seconds in which a server must answer a request.
ANSWER_SECONDS: Final = 30
#: Bytes of address space of a worker or a server: about twice what it needs.
ADDRESS_SPACE: Final = 8 * 2**30
#: Bytes by which the memory of a server may grow after its start.
SERVER_GROWTH: Final = 400 * 2**20
ERROR_FIELDS: Final = {"message", "type", "param", "code"}
CONDITIONS: Final = ("the place", "the mood")
#: Numbers of repetitions of a part of a filter or an answer.
SIZES: Final = (3, 60, 2_000, 30_000, 300_000)


def make_services(base: Path) -> None:
    """Write an index, and complete and half-finished outputs of ``embed``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from llmcond.workflows import embed_stream

    pq.write_table(pa.Table.from_pylist(TEXT_ROWS), base / "texts.parquet")
    model = ("--run", str(base / "run"), "--head", "linear")
    index_options = (
        "--keep",
        *COLUMNS[2:],
        "--id",
        "id",
        *(f"--condition={condition}" for condition in CONDITIONS),
    )
    succeed("index", base / "texts.parquet", "--out", base / "texts.index", *index_options, *model)
    (base / "source").mkdir()
    for i, stop in enumerate((100, OUTPUT_ROWS)):
        part = pa.Table.from_pylist(TEXT_ROWS[100 * i : stop])
        pq.write_table(part.select(["id", "text"]), base / "source" / f"{i}.parquet")
        for out in ("half", "half.lance", "whole", "whole.lance")[2 * i :]:
            with patch.object(embed_stream, "UNIT_ROWS", 40):
                succeed(*embed_command(base / "source", base / out, base / "run"))


def read_json(text: str | bytes) -> Any:
    """Parse JSON; NaN and infinity raise a ValueError."""

    def raise_error(name: str) -> None:
        raise ValueError(f"{name} in JSON")

    return json.loads(text, parse_constant=raise_error)


# -- filters -------------------------------------------------------------------------------------

COLUMNS: Final = ("id", "text", "kind", "year", "price", "code")
KINDS_OF_TEXT: Final = ("news", "blog", "o'clock", "Ünï 100%", None)
TEXT_ROWS: Final = [
    {
        "id": f"t{i}",
        "text": f"two men play {i}",
        "kind": KINDS_OF_TEXT[i % 5],
        "year": None if i % 11 == 0 else 2000 + i % 25,
        "price": i / 4 - 10,
        "code": str(i % 30),
    }
    for i in range(300)
]
NUMBERS: Final = (-1, 0, 7, 2003, 2010.5)
STRINGS: Final = ("'news'", "'o''clock'", "'Ünï 100%'", "''", "'t10'", "'two men play 7'")
TOKENS: Final = (
    *"id text kind year price code nosuch _row _vector 'news' '%o%' 2003 -1 1e999 x'ff'".split(),
    *"= != <> < <= > >= ( ) , + - * / % || ~ :: [ ] { } ; -- /* */ ? $1 . @ ! ' \" `".split(),
    *"AND OR NOT IN LIKE ILIKE ESCAPE BETWEEN IS NULL CAST AS INT DOUBLE VARCHAR DATE TRUE".split(),
    *"SELECT FROM CASE WHEN THEN END EXISTS ANY INTERVAL".split(),
    *TEXTS,
)


def draw_predicate(chance: Random, depth: int = 0) -> str:
    """Return a random filter that must be accepted, with the same result as in SQLite."""
    if depth < 3 and chance.random() < 0.45:
        left, right = (draw_predicate(chance, depth + 1) for _ in range(2))
        return chance.choice((f"({left} AND {right})", f"({left}) or {right}", f"NOT ({left})"))
    number, text = partial(chance.choice, NUMBERS), partial(chance.choice, STRINGS)
    operator = chance.choice(("=", "!=", "<>", "<", "<=", ">", ">="))
    maybe_not = chance.choice(("", "NOT "))
    number_column = chance.choice(("year", "price", "CAST(code AS INT)", "cast(code as DOUBLE)"))
    text_column = chance.choice(("kind", "text", "id", "code", "CAST(year AS VARCHAR)"))
    like = "".join(chance.choice(("%", "_", "o", "1", "news", "''", "Ü")) for _ in range(3))
    return chance.choice(
        (
            f"{number_column} {operator} {number()}",
            f"{number()} {operator} {number_column}",
            f"{number_column} {maybe_not}BETWEEN {number()} AND {number()}",
            f"{number_column} {maybe_not}IN ({number()}, {number()}, {number()})",
            f"{text_column}\n{operator} {text()}",
            f"{text_column} {maybe_not}in ({text()},{text()})",
            f"{text_column} {maybe_not}LIKE '{like}'",
            f"{chance.choice(COLUMNS[2:5])} IS {maybe_not}NULL",
        )
    )


def draw_attack(chance: Random) -> str:
    """Return a filter that would need excessive time or memory, or is invalid."""
    n, m = chance.choice((0, 10**5, 2 * 10**8, 2 * 10**9, 10**19)), chance.choice(SIZES)
    attacks = (
        *(f"repeat('a', {n}) = text", f"lpad('a', {n}, 'b') = text", f"range(0, {n}) = [1]"),
        *(f"sha512(repeat(text, {n})) = 'a'", f"CAST(repeat('1', {n}) AS DECIMAL(38)) = 1"),
        *(f"year + {n} > 0", f"-{n} < price", f"price > 1e{m}", f"year = {'9' * m}"),
        *("(" * m + "year = 1" + ")" * m, "(" * m, "NOT " * m + "year = 1", "-" * m + "1 = year"),
        *("year = 1" + " AND year = 1" * m, "CAST(" * m + "year" + " AS INT)" * m + " = 1"),
        *(f"text LIKE '{'%a' * m}b'", f"text = '{'a' * m}'", f"year IN ({','.join(['1'] * m)})"),
        *("text ~ '(a+)+$'", "text SIMILAR TO '(a+)+$'", "CAST(text AS INT) = 1", "year / 0 = 1"),
        *("year % 0 = 1", "year IN (SELECT 1)", "year = 1; DROP TABLE texts", "year", "kind = 3"),
        *("random() < 0.5", "year = 'a'", "year LIKE 'a'", "CAST(code AS TINYINT) > 1000"),
    )
    return chance.choice(attacks)


def draw_filter(chance: Random) -> tuple[str, set[str] | None]:
    """Return a random filter, and the ids of its matches; None if it may be rejected."""
    random_number = chance.random()
    if random_number < 0.4:
        text = draw_predicate(chance)
        return text, matching_ids(text)
    if random_number < 0.55:
        changed = change_bytes(chance, draw_predicate(chance).encode())
        return changed.decode("utf-8", "replace"), None
    if random_number < 0.75:
        return " ".join(chance.choice(TOKENS) for _ in range(chance.randrange(1, 12))), None
    return draw_attack(chance), None


@cache
def _sqlite() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA case_sensitive_like = ON")
    connection.execute(
        "CREATE TABLE texts (id TEXT, text TEXT, kind TEXT, year INT, price REAL, code TEXT)"
    )
    rows = [tuple(row.values()) for row in TEXT_ROWS]
    connection.executemany("INSERT INTO texts VALUES (?, ?, ?, ?, ?, ?)", rows)
    return connection


def matching_ids(text: str) -> set[str]:
    """Return the ids of the texts that match a filter in SQLite."""
    query = f"SELECT id FROM texts WHERE {text}"  # noqa: S608 - a filter generated above
    return {row[0] for row in _sqlite().execute(query)}


def check_hits(answer: Any, k: int, ids: set[str] | None) -> str:
    """Return what is wrong with the hits of a search, if anything."""
    hits, searched = answer["results"], answer["searched"]
    scores = [hit["score"] for hit in hits]
    if not all(isinstance(score, float | int) and math.isfinite(score) for score in scores):
        return f"some scores are not finite numbers: {scores[:3]}"
    if scores != sorted(scores, reverse=True) or len(hits) != min(k, searched):
        return f"{len(hits)} hits of {searched} searched for k = {k}, scores {scores[:5]}"
    hit_ids = {hit["id"] for hit in hits}
    if ids is not None and (searched != len(ids) or not hit_ids <= ids):
        return f"{searched} texts pass the filter, not {len(ids)}: {sorted(hit_ids ^ ids)[:5]}"
    return ""


def filter_input(chance: Random, base: Base, work: Path) -> Command:
    """Return a search with a filter."""
    text, ids = draw_filter(chance)
    k, options = chance.choice((1, 10, 300)), []
    if chance.random() < 0.2:
        options = [f"--weight={chance.choice((1, -2.5, 1e-30, 1e38, 1e308, 'inf', 'nan'))}"]

    def check(code: int, printed: str) -> str:
        if code:
            return f"a valid filter was rejected: {text}" if ids is not None and not options else ""
        return check_hits(read_json(printed), k, ids)

    index = str(base.folder / "texts.index")
    query_options = [
        "two men",
        "--condition",
        CONDITIONS[0],
        "-k",
        str(k),
        f"--where={text}",
        *options,
    ]
    return Command(["search", index, *query_options, "--json"], check)


# -- requests ------------------------------------------------------------------------------------


def preloading_context() -> ForkServerContext | SpawnContext:
    """Return a context whose processes start with most modules of a worker or server imported."""
    bert = "transformers.models.bert.modeling_bert"
    return process_context(
        "llmcond.heads", "starlette.requests", "openai", "pyarrow.parquet", "uvicorn", bert
    )


def limit_process() -> None:
    """Limit the memory of this process, and end it when its parent process ends."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))

    def wait() -> None:
        if parent := parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def load_factor() -> float:
    """Return a factor for time limits: the load per core, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def serve(folder: Path, log: Path) -> None:
    """Run ``llmcond serve`` in this process."""
    from llmcond.cli import run

    limit_process()
    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    limits = "--port 0 --payload-limit 200000 --max-client-batch-size 256 --device cpu".split()
    sys.exit(run(["serve", "--index", str(folder / "texts.index"), *limits]))


class ServerProcess:
    """A ``llmcond serve`` in another process, which ends with this one.

    Args:
        folder: folder of the inputs, whose index the server searches.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / f"server-{os.getpid()}.log"
        self._log.touch()
        self._process = preloading_context().Process(target=serve, args=(folder, self._log))
        self._process.start()
        while not (match := re.search(r"http://127\.0\.0\.1:(\d+)", self._log.read_text())):
            time.sleep(0.1)
        self._port, self._memory = int(match[1]), peak_memory(self._process.pid)

    def send(self, content: bytes, whole: bool) -> tuple[int, bytes]:
        """Send a request over a new connection; return status and body, status 0 for no answer.

        Args:
            content: bytes of the request.
            whole: whether the request is complete, so that the server must answer.

        Raises:
            TimeoutError: The server does not answer a complete request.
        """
        with socket.create_connection(
            ("127.0.0.1", self._port), load_factor() * ANSWER_SECONDS
        ) as connection:
            # The server may close the connection after it has read the header.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(content)
                if not whole:  # otherwise the server would wait for the rest
                    with suppress(OSError):  # not connected any more
                        connection.shutdown(socket.SHUT_WR)
            response = HTTPResponse(connection, method=content[:4].decode("latin-1").strip())
            try:
                response.begin()
                return response.status, response.read()
            except (HTTPException, ConnectionError):
                return 0, b""

    def failure(self) -> str:
        """Return how the last request damaged the server; empty if it did not."""
        if not self._process.is_alive():
            return f"the server ended: {self._log.read_text()[-300:]}"
        growth = peak_memory(self._process.pid) - self._memory
        return f"the server grew by {growth / 2**20:,.0f} MiB" if growth > SERVER_GROWTH else ""


get_server: Final = cache(ServerProcess)


def peak_memory(process: int | None = None) -> int:
    """Return the peak memory of a process, by default this one, in bytes."""
    status = Path(f"/proc/{process or 'self'}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+)", status)
    return 1024 * int(match[1]) if match else 0


@dataclass(frozen=True)
class Request:
    """A request as an input.

    Attributes:
        base: folder of the inputs.
        content: bytes of the request.
        whole: whether the server must answer; False if a part that determines the length of the
            request was changed.
        check: function from the body of an answer with status 200 to what is wrong with it.
    """

    base: Base
    content: bytes
    whole: bool
    check: Callable[[bytes], str] = lambda body: ""

    def failure(self) -> str:
        """Send the request; return what is wrong with the answer, or with the server afterwards."""
        server = get_server(self.base.folder)
        try:
            wrong = self.check_answer(*server.send(self.content, self.whole))
        except (TimeoutError, ConnectionRefusedError) as error:
            wrong = f"no answer in {ANSWER_SECONDS} s: {error!r}"
        wrong = server.failure() or wrong
        return wrong and f"{self.content[:150]!r}: {wrong}"

    def check_answer(self, status: int, body: bytes) -> str:
        """Return what is wrong with an answer, if anything; status 0 means no answer."""
        if status >= 500 or (self.whole and not status):
            return f"status {status}: {body[:300]!r}"
        if str(self.base.folder).encode() in body:
            return f"the answer contains a path of the disk: {body[:300]!r}"
        try:
            if status == 200:
                return self.check(body)
            if self.whole and body and set(read_json(body)["error"]) != ERROR_FIELDS:
                return f"an error in an unexpected format: {body[:300]!r}"
        except (ValueError, KeyError, TypeError) as error:
            return f"{error!r} in the answer {body[:300]!r}"
        return ""


def request_bytes(path: str, body: bytes, kind: str = "application/json", more: str = "") -> bytes:
    """Return the bytes of a POST request; ``more`` holds further header lines."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def check_embeddings(body: bytes, count: int) -> str:
    """Return what is wrong with embeddings, if anything."""
    answer = read_json(body)
    lengths = [math.hypot(*item["embedding"]) for item in answer["data"]]
    others = [length for length in lengths if abs(length - 1) > 1e-3]
    if len(lengths) != count or others != [0] * answer["zero_vectors"]:
        return f"{len(lengths)} embeddings of {count} texts, some with lengths {others[:5]}"
    return ""


def check_similarities(body: bytes, count: int) -> str:
    """Return what is wrong with similarities, if anything."""
    values = read_json(body)["similarities"]
    if len(values) != count or not all(abs(value) <= 1.001 for value in values):
        return f"similarities of {count} pairs: {values[:5]}"
    return ""


def check_ranking(body: bytes, count: int) -> str:
    """Return what is wrong with the best half of some documents, if anything."""
    results = read_json(body)["results"]
    scores = [result["relevance_score"] for result in results]
    indices = {result["index"] for result in results}
    if scores != sorted(scores, reverse=True) or len(indices) != (count + 1) // 2:
        return f"{len(indices)} documents of {count}, with scores {scores[:5]}"
    return ""


def draw_body(chance: Random) -> tuple[str, dict[str, Any], Callable[[bytes], str]]:
    """Return a path, a valid body for it, and the check of the answer."""
    count = chance.choice((1, 1, 2, 30))
    texts = [chance.choice(("two men", "children read", "x", *TEXTS)) for _ in range(count)]
    condition = chance.choice((*CONDITIONS, "the colour"))
    match chance.randrange(5):
        case 0:
            embed: dict[str, Any] = {"input": texts, "condition": condition}
            return "/v1/embeddings", embed, partial(check_embeddings, count=count)
        case 1:
            pairs = {"sentence1": texts, "sentence2": "two men", "condition": condition}
            return "/v1/similarity", pairs, partial(check_similarities, count=count)
        case 2:
            rank: dict[str, Any] = {"query": "two men", "documents": texts, "condition": condition}
            rank["top_n"] = (count + 1) // 2
            return "/v1/rerank", rank, partial(check_ranking, count=count)
    text, ids = draw_filter(chance)
    k = chance.choice((1, 10, 300))
    search = {"query": "two men", "condition": condition, "k": k, "where": text}
    if chance.random() < 0.3:
        search["condition"] = {condition: chance.choice((1, -2.5, 1e-30, 1e38, 1e308))}
    return "/v1/search", search, lambda body: check_hits(read_json(body), k, ids)


def request_input(chance: Random, base: Base, work: Path) -> Request:
    """Return a request, usually one with something wrong."""
    path, values, check = draw_body(chance)
    random_number = chance.random()
    if random_number < 0.35:
        return Request(base, request_bytes(path, json.dumps(values).encode()), True, check)
    if random_number < 0.4:
        path = chance.choice(("/", "/healthz", "/readyz", "/metrics", "/v1/models", "/none"))
        return Request(base, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), True)
    return Request(base, *draw_wrong_request(chance, path, values))


def draw_wrong_request(chance: Random, path: str, values: Mapping[str, Any]) -> tuple[bytes, bool]:
    """Return a request with something wrong, and whether it must be answered."""
    name = chance.choice((*values, "encoding_format", "dimensions", "explain", "model", "x"))
    value = chance.choice((*VALUES, *TEXTS, [chance.choice(VALUES)] * chance.choice((9, 9_999))))
    content = json.dumps({**values, name: value}).encode()
    match chance.randrange(9):
        case 0:
            content = change_bytes(chance, content)
        case 8:
            content = json.dumps(value).encode()
        case 1:
            content = change_json(chance, json.dumps(values)).encode()
        case 2:
            content = chance.choice((b'{"input":', b"[", b'{"condition":{"a":')) * chance.choice(
                SIZES
            )
        case 3:
            content = json.dumps({**values, name: "a" * chance.choice(SIZES)}).encode()
    kind = chance.choice(("application/json",) * 4 + ("text/plain", "application/json; charset=x"))
    headers = (
        *("Content-Encoding: gzip", "Transfer-Encoding: chunked", "Content-Length: 3"),
        *("Content-Length: -1", "Expect: 100-continue", "Expect: x", "Host: evil"),
        *("X-Request-Id: \x1b[31m", f"X-A: {'a' * 90_000}", "Authorization: Bearer \xff"),
        "Connection: upgrade\r\nUpgrade: websocket",
    )
    header = f"{chance.choice(headers)}\r\n" if chance.random() < 0.25 else ""
    whole = request_bytes(path, content, kind, header)
    if chance.random() < 0.85:
        return whole, not header or header.startswith("Transfer-Encoding")
    return change_bytes(chance, whole), False


# -- outputs of embed ----------------------------------------------------------------------------

OUTPUT_ROWS: Final = 130
RECORD: Final = "_llmcond.json"


def embed_command(source: Path, out: Path, run: Path) -> list[str]:
    """Return the command that embeds a folder of texts."""
    model = ["--run", str(run), "--head", "linear", "--condition-text", CONDITIONS[0]]
    return ["embed", str(source), "--out", str(out), "--text", "text", *model, "--json"]


def output_input(chance: Random, base: Base, work: Path) -> Command:
    """Return a command that resumes a half-finished or damaged output."""
    name = chance.choice(("half", "half.lance", "whole", "whole.lance"))
    source, out = base.folder / "source", work / name
    base.copy(name, work)
    random_number = chance.random()
    must_resume = random_number < 0.15
    if random_number < 0.05:  # the source folder contains a link to itself
        source = base.copy("source", work)
        (source / "again").symlink_to(chance.choice((".", str(source))))
    elif random_number > 0.55:
        record = out / RECORD
        deep = chance.choice(("[", '{"a":')) * chance.choice(SIZES)
        record.write_text(chance.choice((change_json(chance, record.read_text()), deep)))
    elif not must_resume:
        change_below(chance, out)
    original = base.folder / name
    damaged = {
        path: path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != RECORD and not _is_copy(path, original, out)
    }

    def check(code: int, printed: str) -> str:
        if code:
            return "the command does not resume" if must_resume else ""
        unchanged = [p for p in damaged if p.is_file() and p.read_bytes() == damaged[p]]
        whole = base.folder / f"whole{out.suffix}"
        return check_output(out, json.loads(printed), None if unchanged else whole)

    return Command(embed_command(source, out, base.folder / "run"), check)


def _is_copy(path: Path, original: Path, out: Path) -> bool:
    source = original / path.relative_to(out)
    return source.is_file() and source.read_bytes() == path.read_bytes()


def check_output(out: Path, summary: Any, whole: Path | None) -> str:
    """Return how an output contradicts the command's summary; empty if it does not.

    Args:
        out: folder of the output.
        summary: JSON summary that the command printed.
        whole: undamaged output to compare the rows with; None if the output has a damaged file,
            which the command does not read again.
    """
    import numpy as np

    if summary["rows"] != OUTPUT_ROWS:
        return f"{summary['rows']} rows were reported, not {OUTPUT_ROWS}"
    if whole is None:
        return ""
    try:
        actual, expected = read_rows(out), read_rows(whole)
        vectors, expected_vectors = (
            np.stack(rows["embedding"].to_numpy()) for rows in (actual, expected)
        )
        same = actual["id"] == expected["id"]
        if not same or not np.allclose(vectors, expected_vectors, atol=1e-3):
            return "the output has other rows"
    except Exception as error:
        return f"the output cannot be read: {error}"
    return ""


def read_rows(out: Path) -> Any:
    """Return the rows of an output as a table."""
    import lance
    import pyarrow.parquet as pq

    return lance.dataset(str(out)).to_table() if out.suffix == ".lance" else pq.read_table(out)


# -- answers of a chat server --------------------------------------------------------------------

#: Seconds after which an endless answer ends nevertheless.
ENDLESS_SECONDS: Final = 90
ANNOTATED_ROWS: Final = 4


def draw_text(chance: Random) -> str:
    """Return a random text of the model."""
    rating = json.dumps({"rating": chance.choice((*"12345", "ill-defined", 3, *VALUES, *TEXTS))})
    pair = {"partner": chance.choice((0, 1, *VALUES)), "alike": "a", "different": "b"}
    n = chance.choice(SIZES)
    texts = (
        *(rating, f"<think>{'hm ' * n}</think>{rating}", f"<think>{'hm ' * n}", "a" * n),
        *(f"{'</think>' * n}{rating}", '{"' * n, '{"rating": ' * n, "[" * n, "Rating: " * n),
        *(f"{rating} {'x' * n}", rating * n, f"Rating: {chance.choice(TEXTS)}", json.dumps(pair)),
    )
    return chance.choice(texts)


def completion(text: str) -> bytes:
    """Return the JSON of an answer of the chat protocol."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "rater", "usage": usage}
    return json.dumps({**body, "choices": [choice]}).encode()


def response(body: bytes, status: int = 200, *more: str, length: int | None = None) -> bytes:
    """Return the bytes of an HTTP response."""
    size = len(body) if length is None else length
    fields = [f"HTTP/1.1 {status} x", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*fields, f"Content-Length: {size}", *more, "\r\n"]).encode() + body


def draw_response(chance: Random, elsewhere: str) -> Iterator[bytes]:
    """Yield the parts of a response, which usually has an error.

    Args:
        chance: source of random numbers.
        elsewhere: path that redirects point to.
    """
    good = completion(draw_text(chance))
    waits = ("0", "-1", "nan", "x", "0.1", "Mon, 01 Jan 1990 00:00:00 GMT", "9" * 400)
    match chance.randrange(10):
        case 0:
            yield response(change_json(chance, good.decode()).encode())
        case 1:
            yield response(change_bytes(chance, good))
        case 2:
            yield change_bytes(chance, response(good))
        case 3:
            target = chance.choice((elsewhere, elsewhere, "file:///etc/passwd", "//", ""))
            yield response(b"{}", chance.choice((301, 302, 303, 307, 308)), f"Location: {target}")
        case 4:
            error = json.dumps({"error": {"message": draw_text(chance)[:1000]}}).encode()
            status = chance.choice((400, 401, 403, 404, 408, 409, 422, 429, 500, 503, 599, 999))
            yield response(error, status, f"Retry-After: {chance.choice(waits)}")
        case 5:
            sizes = (0, 1, len(good) - 1, len(good) + 9, 10**15)
            yield response(good, length=chance.choice(sizes))
        case 6:  # a response without an end
            yield response(good[:50], length=10**12)
            until, slow = time.monotonic() + ENDLESS_SECONDS, chance.random() < 0.5
            while time.monotonic() < until:
                yield b"a" if slow else b"a" * 2**16
                time.sleep(0.1 if slow else 0.001)
        case _:
            yield response(good)


class HostileChat(ThreadingTCPServer):
    """A chat server in this process. The path of a request, ``/SEED/...``, determines its answer.

    Attributes:
        strays: seeds for which a client followed a redirect.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.strays: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Ignore clients that closed their connection."""


class _Handler(StreamRequestHandler):
    timeout = 60

    def handle(self) -> None:
        server: Any = self.server
        path = self.rfile.readline().split()[1].decode()
        seed = path.split("/")[1]
        if "elsewhere" in path:
            server.strays.add(seed)
        length, line = 0, b"x"
        while line.strip():
            line = self.rfile.readline()
            if line.lower().startswith(b"content-length:"):
                length = int(line[15:])
        body = self.rfile.read(length)
        seed_chance, chance = Random(seed), Random(f"{seed} {body.decode()}")
        share, lists_models = seed_chance.choice((0, 0.5, 1)), seed_chance.random() < 0.1
        if not body and not lists_models:
            self.wfile.write(response(b'{"object": "list", "data": [{"id": "rater"}]}'))
        elif chance.random() < share:
            self.wfile.write(response(completion(json.dumps({"rating": chance.choice("12345")}))))
        else:
            fault = Random(f"{seed} fault") if share < 1 else chance
            for piece in draw_response(fault, f"/{seed}/elsewhere"):
                self.wfile.write(piece)


hostile_chat: Final = cache(HostileChat)


def answer_input(chance: Random, base: Base, work: Path) -> Command:
    """Return a command that sends requests to a chat server whose answers are usually wrong."""
    chat, seed = hostile_chat(), str(chance.randrange(2**32))
    url = f"http://127.0.0.1:{chat.server_address[1]}/{seed}/v1"
    limits = ["--timeout", chance.choice(("0.5", "2")), "--retries", chance.choice("001")]
    data, rows = str(base.folder / "rows.csv"), ["--rows", str(ANNOTATED_ROWS)]
    if chance.random() < 0.1:
        data, rows = str(base.folder / "texts.parquet"), ["--propose", str(ANNOTATED_ROWS)]
    server = ["--endpoint", url, "--model", "rater", *limits, "--concurrency", "2"]
    arguments = ["annotate", data, "--out", "rated.csv", "--yes", *rows, *server, "--json"]
    journal, damage = work / "rated.answers", chance.random() < 0.3

    def check(code: int, printed: str, repeated: bool = False) -> str:
        if seed in chat.strays:
            return "a redirect was followed"
        if code:
            return ""
        summary = read_json(printed)
        if wrong := check_ratings(work / "rated.csv", summary):
            return wrong
        if repeated:
            return f"repeated requests: {printed}" if summary["questions"] and not damage else ""
        if damage:
            journal.write_bytes(change_bytes(chance, journal.read_bytes()))
        return Command(arguments, partial(check, repeated=True)).failure()

    return Command(arguments, check)


def check_ratings(path: Path, summary: Any) -> str:
    """Return what is wrong with a file of ratings, if anything."""
    with path.open(newline="", encoding="utf-8") as stream:
        labels = [float(row["label"]) for row in csv.DictReader(stream)]
    counts = len(labels), labels.count(-1)
    if counts != (summary["rows"], summary["ill_defined"]):
        return f"(rows, ill-defined) are {counts}: {summary}"
    if not all(label == -1 or 1 <= label <= 5 for label in labels):
        return f"ratings are {labels}"
    n_rows = summary["rows"] + summary["unanswered"]
    return f"{n_rows} rows: {summary}" if n_rows > ANNOTATED_ROWS else ""


SERVICES: Final[dict[str, Callable[[Random, Base, Path], Input]]] = {
    "request": request_input,
    "filter": filter_input,
    "output": output_input,
    "answer": answer_input,
}
