"""Encoders behind a server with OpenAI's embeddings protocol.

llama.cpp, Ollama, vLLM, text-embeddings-inference, Infinity and hosted services have it. The server
computes one vector of each text that it is sent, so that everything that works on vectors works.
What needs token states or weights does not.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urldefrag

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import scale_to_unit_norm
from llmcond.base.errors import (
    LlmcondError,
    UserError,
    format_list,
    install_command,
    shortened_repr,
)
from llmcond.base.output import log
from llmcond.base.system import check_server_address
from llmcond.encoders.checkpoint import Checkpoint, WeightsNeededError, find_like
from llmcond.encoders.settings import (
    SETTINGS,
    EncoderIdentity,
    EncoderOptions,
    KnownModel,
    find_model,
)
from llmcond.encoders.spec import SERVER_POOLING, EncoderInput
from llmcond.encoders.tokenizing import (
    BatchVectors,
    format_text,
    sentence_spans,
)

if TYPE_CHECKING:
    from llmcond.base.server_client import EmbeddingAnswer, EmbeddingClient

_T = TypeVar("_T")
#: Texts of a request, and requests at a time. Servers that accept fewer texts reject a request, and
#: get half as many from then on.
BATCH, REQUESTS = 32, 8
#: Seconds until a request is repeated, as a large model on a CPU is slow, and the number of
#: repetitions.
_TIMEOUT, _RETRIES = 600.0, 6
#: Seconds between two checks of whether the results of requests are still needed.
_CHECK_SECONDS = 0.2
#: Recorded as ``max_length``, because a server shows its limit only by rejecting a text.
UNKNOWN_LENGTH = 1_000_000
#: Characters of a token, to estimate numbers of tokens.
CHARACTERS_PER_TOKEN = 4
#: Its vector identifies the model behind a name.
_PROBE = "Two people read a book in the park."
#: Numbers of a probe's record, and the cosine from which two records are of one model. Servers
#: round differently from call to call, by less than 1e-4; 4-bit weights differ by more than 1e-3.
_RECORDED, _SAME = 32, 0.999
#: Words in a server's message about a text that is too long.
_TOO_LONG = re.compile(r"too (long|large)|token|context|length|limit|exceed", re.IGNORECASE)
#: Options that a server leaves to the user.
_OPEN = {"server_model", "like", "instruction_format", "revision", "normalize"}


def split_name(name: str, options: EncoderOptions) -> tuple[str, str]:
    """Return the address and the model of ``ADDRESS#MODEL``, or of an address and an option.

    Raises:
        UserError: the address is invalid, or the model is not named once.
    """
    address, named = urldefrag(name)
    address = address.rstrip("/")
    check_server_address(address, "--model")
    if named and options.server_model not in (None, named):
        raise UserError(
            f"--model names the server's model {named!r}, and --server-model is "
            f"{options.server_model!r}. Give only one of them."
        )
    model = named or options.server_model or ""
    if not model.strip():
        names = list_models(address)
        listed = f" It has {format_list(names, 5)}." if names else ""
        raise UserError(
            f"{address} is a server, whose model is not named. Name it in --model {address}#NAME."
            f"{listed}"
        )
    return address, model


def check_options(name: str, options: EncoderOptions) -> None:
    """Check the options of an encoder behind a server, before anything is sent.

    Raises:
        UserError: the address is invalid, or an option needs the weights of the encoder.
    """
    address, model = urldefrag(name)
    check_server_address(address, "--model")
    if model or options.server_model:
        _settle(model, replace(options, revision=None), np.ones(1, np.float32))


def resolve_server(
    name: str, options: EncoderOptions
) -> tuple[Checkpoint, EncoderIdentity, tuple[str, ...]]:
    """Settle the settings of an encoder behind a server, which computes one short text.

    Args:
        name: address of the server, with ``#MODEL`` at its end unless the options name it.
        options: the user's options, or those of a recorded identity.

    Returns:
        The encoder, its identity, and what neither the server nor an option states.

    Raises:
        UserError: the server cannot be reached, rejects the key or the model, or an option needs
            the weights.
        LlmcondError: the server fails.
    """
    full_name = "#".join(split_name(name, options))
    vector = probe(full_name)
    identity, known = _settle(urldefrag(full_name)[1], options, vector)
    record = _record(vector)
    if options.revision is not None:
        if not _is_same(options.revision, record):
            raise UserError(
                f"{full_name} gives other vectors than before: another model, or another version "
                "of it, answers under this name. Start the former one, or use another --run."
            )
        record = options.revision
    identity = replace(identity, weights=f"server:{full_name} {record}")
    checkpoint = Checkpoint(full_name, _NO_FOLDER, known, server=full_name, probe=record)
    assumed: tuple[str, ...] = ()
    if known and identity.instruction_format and not (options.instruction_format or options.like):
        assumed = (f"the instruction format of {known.repo}, as the server's model has its name",)
    return checkpoint, identity, assumed


#: The folder of an encoder's files, of which a server shows none.
_NO_FOLDER = Path("/dev/null.llmcond-server")


def _settle(
    model: str, options: EncoderOptions, vector: NDArray[np.float32]
) -> tuple[EncoderIdentity, KnownModel | None]:
    """Return the identity of an encoder with such a vector, and its known model, if any."""
    like = options.like
    known = find_model(model) if like is None else find_like(like, f"like is {like!r}")
    formats = (options.instruction_format, known and known.settings.get("instruction_format"), "")
    is_unit = bool(abs(np.linalg.norm(vector) - 1) < 1e-3)
    if is_unit and options.normalize is False and len(vector) > 1:
        raise UserError(
            "normalize is False, but the server scales its vectors to unit norm. Leave out "
            "--no-normalize."
        )
    identity = EncoderIdentity(
        weights="",
        dtype="float32",
        pooling=SERVER_POOLING,
        attention="bidirectional",
        normalize=is_unit or bool(options.normalize),
        max_length=UNKNOWN_LENGTH,
        instruction_format=next(str(text) for text in formats if text is not None),
    )
    for option in fields(EncoderOptions):
        value = getattr(options, option.name)
        settled = getattr(identity, option.name, None)
        if option.name in {*_OPEN, "device"} or value in (option.default, settled):
            continue
        if option.name not in SETTINGS and option.name != "revision":
            continue  # it changes no vector
        raise UserError(
            f"{option.name} is {value!r}, which needs the weights of the encoder, and a server "
            f"shows only its vectors. Leave out --{option.name.replace('_', '-')}, or name a "
            "folder or an encoder on the hub with --model."
        )
    return identity, known


def list_models(name: str) -> list[str]:
    """Return the names of a server's models; empty if it lists none."""
    return _run(_connect(name).model_names())


# -- the identity of the model behind a name ------------------------------------------------------


@cache  # A command resolves the same encoder several times.
def probe(name: str) -> NDArray[np.float32]:
    """Return the vector of a fixed text by ``ADDRESS#MODEL``, which shows that the server works.

    Raises:
        UserError: there is no server, or it rejects the key or the model.
        LlmcondError: the server fails.
    """
    client = _connect(name)
    _run(client.check_connection())
    vector: NDArray[np.float32] = _run(client.embed([_PROBE])).vectors[0]
    return vector


def _record(vector: NDArray[np.float32]) -> str:
    """Return projections of a vector in 8 bit, as hexadecimal digits."""
    projection = np.random.default_rng(0).standard_normal((_RECORDED, len(vector)))
    values = projection @ vector
    return bytes(np.round(values / np.abs(values).max() * 127).astype(np.int8)).hex()


def _is_same(recorded: str, record: str) -> bool:
    """Return whether two records are of one model."""
    try:
        one, other = (
            np.frombuffer(bytes.fromhex(text), np.int8).astype(float) for text in (recorded, record)
        )
        return bool(one @ other >= _SAME * np.linalg.norm(one) * np.linalg.norm(other))
    except ValueError:
        raise UserError(
            f"revision is {recorded!r}, but a server's model has none. Leave out --revision."
        ) from None


# -- requests --------------------------------------------------------------------------------------


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all requests, in a thread because notebooks run their own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="llmcond-server", daemon=True).start()
    return loop


@cache
def _slots() -> asyncio.Semaphore:
    """Return what limits the requests of this process, all of which are in the same event loop."""
    return asyncio.Semaphore(REQUESTS)


def _run(work: Coroutine[Any, Any, _T], check: Callable[[], None] = lambda: None) -> _T:
    """Run a coroutine in the event loop of requests, and cancel it if ``check`` raises an error."""
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        while not wait([future], _CHECK_SECONDS).done:
            check()
        return future.result()
    finally:
        future.cancel()


async def _gather(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results of coroutines that run concurrently; the first error stops all."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@cache
def _connect(name: str) -> EmbeddingClient:
    try:
        from llmcond.base.server_client import EmbeddingClient
    except ImportError as error:
        raise UserError(
            f"an encoder behind a server needs the openai client: {install_command('annotate')}."
        ) from error
    address, model = urldefrag(name)
    log.info(f"using the server {address}")
    return EmbeddingClient(address, model, timeout=_TIMEOUT, retries=_RETRIES)


def _forget_connections() -> None:
    """Forget what a forked process does not have: the thread, and the connections."""
    _loop.cache_clear()
    _slots.cache_clear()
    _connect.cache_clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_connections)


@dataclass
class ServerInput:
    """A text that is sent to a server; it has the attributes of ``Tokens`` that encoders read.

    Attributes:
        text: the whole text.
        sentence: the first and last position of each part that may be cut.
        n_tokens: number of tokens; 0 before the server has answered. Of a text that was cut, an
            estimate of the number of the whole text.
        cut: whether the server accepted only a part of the sentence.
    """

    text: str
    sentence: Sequence[tuple[int, int]]
    n_tokens: int = 0
    cut: bool = False
    first: int = 0
    last: int = 1
    second: int = 1

    @property
    def ids(self) -> list[str]:
        """What decides the vector."""
        return [self.text]

    @property
    def longest(self) -> int:
        """Number of characters of the sentence."""
        return max((stop - start for start, stop in self.sentence), default=0)

    def shortened(self, length: int) -> str:
        """Return the text with the first characters of the sentence only."""
        text = self.text
        for start, stop in sorted(self.sentence, reverse=True):
            text = text[: min(stop, start + length)] + text[stop:]
        return text


class ServerTokenizer:
    """Turns inputs into the texts that a server is sent."""

    def __init__(self, identity: EncoderIdentity, name: str) -> None:
        self._identity, self._name = identity, name

    def format(self, item: EncoderInput) -> str:
        """Return the text of an input; see ``Encoder.format``."""
        return str(format_text(item, self._identity.instruction_format, self._name))

    def windows(self, inputs: Sequence[EncoderInput]) -> list[list[ServerInput]]:
        """Return what is sent for each input.

        Raises:
            UserError: an input has a context, or an instruction for which there is no format.
        """
        rows = []
        for item in inputs:
            if item.context is not None:
                raise WeightsNeededError("an input with a context", self._name)
            formatted = format_text(item, self._identity.instruction_format, self._name)
            rows.append([ServerInput(str(formatted), sentence_spans(item, formatted))])
        return rows

    def join_rows(self, _: Sequence[tuple[str, str, str]]) -> list[Any]:
        """Raise an error, because cross-encoders are not behind servers."""
        raise WeightsNeededError("comparing two texts as one", self._name)

    def describe(self, *_: object) -> list[Any]:
        """Raise an error, because a server shows no tokens."""
        raise WeightsNeededError("a look at single tokens", self._name)


class ServerEngine:
    """Sends texts to a server; see ``AnyEngine``. Several threads may use it.

    Attributes:
        dim: size of the vectors.
        budget: estimated tokens of the texts that are sent at a time.
    """

    routes_inside = reads_routers = False

    def __init__(self, name: str, identity: EncoderIdentity) -> None:
        self._name = name
        self._client, self._batch = _connect(name), BATCH
        self.dim = len(probe(name))
        self._normalize = identity.normalize
        self.budget = REQUESTS * BATCH * 512

    def run(
        self,
        rows: Sequence[Any],
        before_batch: Callable[[], None] = lambda: None,
        routes: Sequence[Any] = (),
        *,
        queries: bool = False,
    ) -> Iterator[BatchVectors]:
        """Yield the vectors of texts, which are sent in several requests at a time.

        Raises:
            UserError: the server rejects a text for another reason than its length.
            LlmcondError: the server fails, or answers with other vectors than expected.
        """
        parts = [rows[start : start + self._batch] for start in range(0, len(rows), self._batch)]
        vectors = np.concatenate(_run(_gather(map(self._embed, parts)), before_batch))
        if self._normalize:
            vectors = scale_to_unit_norm(vectors)
        yield BatchVectors(range(len(rows)), vectors, sum(row.n_tokens for row in rows))

    def finish_states(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Raise an error, because a server shows no states of tokens."""
        raise WeightsNeededError("routed pooling", self._name)

    async def _embed(self, part: Sequence[ServerInput]) -> NDArray[np.float32]:
        """Return the vectors of texts, and record their numbers of tokens.

        A request that is rejected as too large is sent again in halves; a single text, with a
        shorter sentence.
        """
        from llmcond.base.server_client import RefusedError

        try:
            answer = await self._request([row.text for row in part])
        except RefusedError as error:
            if len(part) == 1:
                return await self._embed_beginning(part[0], error)
            half = len(part) // 2
            vectors = np.concatenate(
                [await self._embed(part[:half]), await self._embed(part[half:])]
            )
            if not any(row.cut for row in part):  # the server takes fewer texts at a time
                self._batch = min(self._batch, half)
            return vectors
        size = max(1, sum(len(row.text) for row in part))
        for row in part:
            row.n_tokens = round(answer.n_tokens * len(row.text) / size)
        return answer.vectors

    async def _embed_beginning(self, row: ServerInput, error: UserError) -> NDArray[np.float32]:
        """Return the vector of a text with the longest beginning of its sentence that is accepted.

        The length is found by bisection, to one sixteenth.
        """
        from llmcond.base.server_client import RefusedError

        if not _TOO_LONG.search(str(error)):
            text = shortened_repr(row.text)
            raise UserError(f"{str(error).rstrip('.')}. The text is {text}.") from None
        accepted, rejected, vectors = 0, row.longest, None
        while rejected - accepted > max(1, rejected // 16):
            length = (accepted + rejected) // 2
            text = row.shortened(length)
            try:
                answer = await self._request([text])
            except RefusedError:
                rejected = length
                continue
            accepted, row.cut, vectors = length, True, answer.vectors
            row.n_tokens = round(answer.n_tokens * len(row.text) / len(text))
        if vectors is None:
            raise UserError(
                f"{str(error).rstrip('.')}. Of the text {shortened_repr(row.text)}, condition and "
                "instruction leave no room for the sentence. Shorten them."
            )
        return vectors

    async def _request(self, texts: Sequence[str]) -> EmbeddingAnswer:
        from llmcond.base.server_client import RefusedError

        async with _slots():
            answer = await self._client.embed(texts)
        if answer.n_truncated:  # it may have cut the condition instead of the sentence
            raise RefusedError(f"{self._name} cuts texts that are too long for it.")
        if answer.vectors.shape[1] != self.dim:
            raise LlmcondError(
                f"{self._name} returned vectors of {answer.vectors.shape[1]:,} numbers, and of "
                f"{self.dim:,} before: another model answers under this name. Start the former one."
            )
        estimate = sum(map(len, texts)) // CHARACTERS_PER_TOKEN
        return answer if answer.n_tokens else answer._replace(n_tokens=estimate)
