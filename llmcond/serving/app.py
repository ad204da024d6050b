"""The endpoints."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmcond.errors import LlmcondError, UserError, did_you_mean, plural
from llmcond.runs.comparing import checked_texts
from llmcond.runs.embedder import Embedder, unit_length
from llmcond.serving.batching import Batcher, Row
from llmcond.serving.errors import RequestError, invalid_value, json_response
from llmcond.serving.metrics import Metrics
from llmcond.serving.model import ServedModel
from llmcond.serving.page import page_response
from llmcond.serving.requests import (
    EmbeddingsRequest,
    SearchRequest,
    SimilarityRequest,
    Texts,
    read_request,
)
from llmcond.serving.settings import ServerSettings
from llmcond.version import __version__

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoded
    from llmcond.search import Hits

#: What answers a request.
_Answer = Callable[[Request], Awaitable[Response]]

#: Time limit of a search's filter.
_FILTER_SECONDS = 5.0
#: The largest answer, in vectors, that is written on the thread that reads the requests.
_FEW = 16


class Endpoints:
    """What can be asked of one model, as an application of ASGI; :class:`Gate` is in front of it.

    Attributes:
        routes: the method and what answers, by path.
    """

    def __init__(
        self, model: ServedModel, batcher: Batcher, metrics: Metrics, settings: ServerSettings
    ) -> None:
        self._model, self._batcher, self._metrics = model, batcher, metrics
        self._most, self._limit = settings.max_client_batch_size, settings.payload_limit
        self._page = page_response(model, needs_key=settings.api_key_file is not None)
        #: Filters are evaluated here, so that a slow one delays neither the model nor the others.
        self._planners = ThreadPoolExecutor(2, thread_name_prefix="llmcond-filter")
        self._probe: asyncio.Future[Any] | None = None
        self._began, self._name = int(time.time()), model.name
        read: dict[str, _Answer] = {
            "/": self.page,
            "/healthz": self.healthz,
            "/readyz": self.readyz,
            "/metrics": self.metrics,
            "/v1/models": self.models,
        }
        posted: dict[str, tuple[_Answer, type[BaseModel]]] = {
            "/v1/embeddings": (self.embeddings, EmbeddingsRequest),
            "/v1/similarity": (self.similarity, SimilarityRequest),
            "/v1/search": (self.search, SearchRequest),
        }
        self._document = json_response(_describe(read, posted))
        self.routes = {path: ("GET", answer) for path, answer in read.items()}
        self.routes |= {path: ("POST", answer) for path, (answer, _) in posted.items()}
        self.routes["/openapi.json"] = "GET", self.openapi

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an application of ASGI.

        Raises:
            RequestError: nothing answers at this path, or the request is not right.
            ClientDisconnect: the client hung up.
            ClosedError: the server is stopping.
        """
        request = Request(scope, receive)
        response = await self._answer_of(request)(request)
        await response(scope, receive, send)

    def _answer_of(self, request: Request) -> _Answer:
        """Return what answers a request; a RequestError where nothing does."""
        path = request.scope["path"]
        if path not in self.routes:
            path = path[:80]
            near = did_you_mean(path, [*self.routes]) or f"There are {', '.join(self.routes)}."
            raise RequestError(404, "not_found", f"there is no {path!r}. {near}")
        method, answer = self.routes[path]
        if request.method != method:
            text = f"{path} does not take {request.method}, but {method}."
            raise RequestError(405, "method_not_allowed", text, headers={"Allow": method})
        return answer

    # -- what tells of the server ----------------------------------------------------------------

    async def page(self, _: Request) -> Response:
        """Return a page to try the others by hand."""
        return self._page

    async def healthz(self, _: Request) -> Response:
        """Return whether the thread of the model runs."""
        if not self._batcher.alive:
            raise RequestError(503, "not_running", "the model's thread has ended.")
        return json_response({"status": "ok", "model": self._name})

    async def readyz(self, _: Request) -> Response:
        """Encode a text to see whether the server is ready; requests at the same time share it."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.wrap_future(self._batcher.submit([self._model.ready_row()]))
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), 10)
        except Exception as error:
            raise RequestError(503, "not_ready", "a text does not come through in 10 s.") from error
        return json_response({"status": "ready", "model": self._name})

    async def openapi(self, _: Request) -> Response:
        """Return the endpoints and their fields as an OpenAPI document."""
        return self._document

    async def metrics(self, _: Request) -> Response:
        """Return figures for Prometheus."""
        return self._metrics.response()

    async def models(self, _: Request) -> Response:
        """Return the one model, in the shape of OpenAI's list."""
        entry = {"id": self._name, "object": "model", "created": self._began}
        entry |= {"owned_by": "llmcond", **self._model.describe()}
        return json_response({"object": "list", "data": [entry]})

    # -- what is asked of the model --------------------------------------------------------------

    async def embeddings(self, request: Request) -> Response:
        """Return embeddings of texts under conditions, in OpenAI's shape."""
        asked = await read_request(request, EmbeddingsRequest, self._limit)
        embedder = self._model.model
        if not isinstance(embedder, Embedder):
            raise _not_served("a cross-encoder is served, which has no embeddings: /v1/similarity.")
        if asked.dimensions not in (None, embedder.dim):
            raise invalid_value(
                "dimensions",
                f"dimensions is {asked.dimensions}; embeddings of this model have {embedder.dim}, "
                "and a part of one is none.",
            )
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        rows = self._rows("input", texts, self._condition(asked))
        encoded = await self._encoded(request, rows, len(texts))

        def response() -> Response:
            vectors = unit_length(encoded.vectors, embedder.head)
            written: list[Any] = (
                vectors.tolist()
                if asked.encoding_format == "float"
                else [
                    base64.b64encode(row.tobytes()).decode() for row in np.asarray(vectors, "<f4")
                ]
            )
            data = [
                {"object": "embedding", "index": index, "embedding": embedding}
                for index, embedding in enumerate(written)
            ]
            return json_response(
                {"object": "list", "model": self._name, "data": data, **self._usage(encoded)}
            )

        # Writing many takes so long that other requests would wait for it.
        return response() if len(rows) <= _FEW else await asyncio.to_thread(response)

    async def similarity(self, request: Request) -> Response:
        """Return how similar pairs of texts are under conditions."""
        asked = await read_request(request, SimilarityRequest, self._limit)
        condition = self._condition(asked)
        given: dict[str, Texts] = {
            "sentence1": asked.sentence1,
            "sentence2": asked.sentence2,
            "condition": condition,
        }
        counts = {name: len(own) for name, own in given.items() if not isinstance(own, str)}
        count = next(iter(counts.values()), 1)
        if set(counts.values()) - {count}:
            told = ", ".join(f"{number} in {name}" for name, number in counts.items())
            raise invalid_value(
                [*counts][-1], f"there are {told}; they must be as many, or one text for all."
            )
        one, other = (
            self._rows(name, [own] * count if isinstance(own, str) else own, condition)
            for name, own in [*given.items()][:2]
        )
        model = self._model.model
        if isinstance(model, Embedder):
            encoded = await self._encoded(request, [*one, *other], 2 * count)
            values = model.compare(encoded.vectors[:count], encoded.vectors[count:])
        else:
            joined = [(a, b, c) for (a, c), (b, _) in zip(one, other, strict=True)]
            encoded = await self._encoded(request, joined, 2 * count)
            values = encoded.vectors
        answer = {"model": self._name, "similarities": values.tolist()}
        return json_response({**answer, **self._usage(encoded)})

    async def search(self, request: Request) -> Response:
        """Return the texts of the index that are nearest to a query under a condition."""
        asked = await read_request(request, SearchRequest, self._limit)
        index = self._model.index
        if index is None:
            raise _not_served("there is no index to search; start the server with --index DIR.")
        request.state.texts = 1
        condition = self._condition(asked)

        def plan() -> Callable[[], list[Hits]]:
            index.refresh()
            return index.plan_search(
                [asked.query],
                condition,
                asked.k,
                where=asked.where,
                explain=asked.explain,
                prepare=False,
                seconds=_FILTER_SECONDS,
            )

        if asked.where is None:
            calls = self._batcher.call(lambda: plan()())  # noqa: PLW0108 - all by the model's thread
        else:
            calls = self._batcher.call(await self._waited(request, self._planners.submit(plan)))
        (hits,) = await self._waited(request, calls)
        return json_response({"model": self._name, **hits.to_json()})

    def _condition(self, asked: EmbeddingsRequest | SimilarityRequest | SearchRequest) -> Any:
        """Return a request's condition, or the server's own; a RequestError where neither is."""
        try:
            given = asked.conditions()
        except UserError as error:
            raise invalid_value("values", f"values: {error}") from None
        found = self._model.condition if given is None else given
        if found is None:
            raise RequestError(
                422,
                "condition_required",
                'condition is missing: what the texts are embedded under, such as "the place". '
                "Give one for all texts, or one for each; a server may have a default "
                "(--condition).",
                param="condition",
            )
        return found

    def _rows(self, name: str, texts: list[str], conditions: Texts) -> list[Row]:
        """Return texts with their conditions; a RequestError if they are not right."""
        if not texts:
            raise invalid_value(name, f"{name} holds no texts.")
        if len(texts) > self._most:
            raise RequestError(
                413,
                "too_many_texts",
                f"{name} has {plural(len(texts), 'text')}; at most {self._most:,} are taken at a "
                "time (--max-client-batch-size).",
                param=name,
            )
        try:
            return list(checked_texts(texts, conditions))
        except UserError as error:
            raise invalid_value(name, f"{name}: {error}") from None

    async def _encoded(self, request: Request, rows: Sequence[Row], n_texts: int) -> Encoded:
        request.state.texts = n_texts
        encoded: Encoded = await self._waited(request, self._batcher.submit(rows))
        request.state.tokens = int(encoded.n_tokens.sum())
        return encoded

    def _usage(self, encoded: Encoded) -> dict[str, Any]:
        """Return the number of tokens, of texts that were cut, and of embeddings that are zero."""
        tokens = int(encoded.n_tokens.sum())
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        counts = {"usage": usage, "truncated": int(encoded.truncated.sum())}
        if isinstance(self._model.model, Embedder):
            counts["zero_vectors"] = int((~encoded.vectors.any(axis=1)).sum())
        return counts

    async def _waited(self, request: Request, future: Future[Any]) -> Any:
        """Return what will be there; give it up if the client hangs up or the time is over."""
        self._batcher.awaited += 1
        result = asyncio.wrap_future(future)
        gone = asyncio.ensure_future(_gone(request.receive))
        gone.add_done_callback(lambda _: result.cancel())
        try:
            return await result
        except asyncio.CancelledError:
            if not gone.done():  # it is this request that was cancelled
                raise
            raise ClientDisconnect from None
        except UserError as error:
            raise invalid_value(None, self._model.without_paths(error)) from None
        except LlmcondError as error:
            raise RequestError(500, "model_failed", self._model.without_paths(error)) from error
        finally:
            self._batcher.awaited -= 1
            gone.cancel()
            result.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _describe(
    read: Mapping[str, _Answer], posted: Mapping[str, tuple[_Answer, type[BaseModel]]]
) -> dict[str, Any]:
    """Return the OpenAPI document of endpoints that are read, and of those that take a body."""

    def operation(answer: _Answer, **request: Any) -> dict[str, Any]:
        said = (answer.__doc__ or "").partition("\n")[0]
        return {"summary": said, **request, "responses": {"200": {"description": "Success"}}}

    paths = {path: {"get": operation(answer)} for path, answer in read.items()}
    for path, (answer, kind) in posted.items():
        content = {"application/json": {"schema": kind.model_json_schema()}}
        body = {"required": True, "content": content}
        paths[path] = {"post": operation(answer, requestBody=body)}
    about = {"title": "llmcond", "version": __version__}
    return {"openapi": "3.1.0", "info": about, "paths": paths}


def _not_served(why: str) -> RequestError:
    return RequestError(404, "not_served", why)
