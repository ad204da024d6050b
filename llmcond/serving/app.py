"""The endpoints, the metrics, the OpenAPI document, and the page to try the endpoints by hand."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmcond.base.errors import LlmcondError, UserError, did_you_mean, format_count, shortened_repr
from llmcond.base.package import __version__
from llmcond.base.text import as_condition, condition_text, ignored_by, ignoring, write_values
from llmcond.encoders.spec import Encoded, InputError, NotFiniteError
from llmcond.heads.guide import check_ignored
from llmcond.report import page as report
from llmcond.report.page import csp_source, page_templates
from llmcond.runs.embedder import Embedder
from llmcond.runs.similarity import pair_with_conditions
from llmcond.search import FilterError, UnpreparedConditionError
from llmcond.serving.model import Batcher, Row, ServedModel
from llmcond.serving.requests import (
    Counts,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    ErrorResponse,
    HealthResponse,
    JsonResponse,
    ModelEntry,
    ModelList,
    RequestError,
    RerankRequest,
    RerankResponse,
    RerankResult,
    SearchRequest,
    SearchResponse,
    SimilarityRequest,
    SimilarityResponse,
    TextOrTexts,
    invalid_value_error,
    read_request,
)
from llmcond.serving.settings import ServerSettings

if TYPE_CHECKING:
    from llmcond.encoders.spec import Encoded
    from llmcond.search import Hits

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, model: ServedModel) -> None:
        """Register the metrics."""
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
        self._requests = counter("llmcond_requests", "Requests answered.", ["route", "status"])
        self._seconds = histogram(
            "llmcond_request_seconds", "Seconds until a request is answered.", ["route"]
        )
        self.in_progress = gauge("llmcond_requests_in_progress", "Requests in progress.")
        self._texts = counter(
            "llmcond_texts",
            "Texts encoded, also those of /readyz, but no queries of searches.",
        )
        self._tokens = counter(
            "llmcond_tokens", "Tokens of these texts, before long texts are cut."
        )
        self._truncated = counter("llmcond_truncated_texts", "Truncated texts.")
        self._batch = histogram("llmcond_batch_texts", "Rows per batch.", buckets=_TEXTS)
        self._batch_seconds = histogram("llmcond_batch_seconds", "Seconds to encode a batch.")
        self._waiting = gauge("llmcond_waiting_texts", "Rows waiting for a batch.")
        labels = {name: str(value) for name, value in model.describe().items() if name != "guides"}
        gauge("llmcond_model_info", "The served model.", [*labels]).labels(**labels).set(1)

    def watch(self, batcher: Batcher) -> None:
        """Report the length of a batcher's queue."""
        self._waiting.set_function(lambda: batcher.waiting)

    def on_batch(self, encoded: Encoded, seconds: float) -> None:
        """Count an encoded batch."""
        self._batch.observe(len(encoded.vectors))
        self._batch_seconds.observe(seconds)
        self._texts.inc(len(encoded.vectors))
        self._tokens.inc(int(encoded.n_tokens.sum()))
        self._truncated.inc(int(encoded.truncated.sum()))

    def on_request(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request."""
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def response(self) -> Response:
        """Return the metrics in Prometheus's text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


#: A function that answers a request.
Handler = Callable[[Request], Awaitable[Response]]

_KEY = "bearerKey"


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint.

    Attributes:
        method: the HTTP method.
        path: the path; ``{id}`` at its end is a parameter.
        handler: the function that answers. If it is annotated with ``JsonResponse[T]``, T is the
            type of the response's body.
        body: the type of the request's body; None: it has none.
        public: whether no key is needed, because the endpoint neither reads nor returns texts.
        media_type: content type of a response that is not JSON.
    """

    method: str
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    public: bool = False
    media_type: str = "application/json"

    @property
    def methods(self) -> Sequence[str]:
        """The methods that the path accepts. The server leaves the body of HEAD out."""
        return (self.method, *(["HEAD"] if self.method == "GET" else []), "OPTIONS")

    @property
    def content(self) -> Any:
        """The type of the response's body; str for a response that is not JSON."""
        (content,) = get_args(get_type_hints(self.handler)["return"]) or (str,)
        return content


def describe_api(
    routes: Collection[Route], *, needs_key: bool, needs_condition: bool
) -> dict[str, Any]:
    """Return the OpenAPI document of the routes.

    Args:
        routes: the routes.
        needs_key: whether the routes that are not public need an API key.
        needs_condition: whether bodies need a condition, because there is no default.
    """
    from pydantic import TypeAdapter  # only the document needs it

    bodies = [route.body for route in routes if route.body is not None]
    types = [ErrorResponse, *(route.content for route in routes)]
    types += bodies
    schemas, definitions = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(name)) for name in dict.fromkeys(types)],
        ref_template="#/components/schemas/{model}",
    )
    for body in bodies if needs_condition else ():
        schema = definitions["$defs"][body.__name__]
        schema["required"].append("condition")
        condition = schema["properties"]["condition"]
        condition["anyOf"].remove({"type": "null"})
        del condition["default"]
    by_type = {name: schema for (name, _), schema in schemas.items()}

    def describe_content(media_type: str, content: Any) -> dict[str, Any]:
        return {"content": {media_type: {"schema": by_type[content]}}}

    def describe_route(route: Route) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "operationId": route.handler.__name__,
            "summary": (route.handler.__doc__ or "").partition("\n")[0],
            "responses": {
                "200": {
                    "description": "Success",
                    **describe_content(route.media_type, route.content),
                },
                "default": {
                    "description": "Error",
                    **describe_content("application/json", ErrorResponse),
                },
            },
        }
        if route.body is not None:
            body = describe_content("application/json", route.body)
            operation["requestBody"] = {"required": True, **body}
        if "{id}" in route.path:
            parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [parameter]
        if needs_key and route.public:
            operation["security"] = []
        return operation

    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "llmcond", "version": __version__},
        "paths": {route.path: {route.method.lower(): describe_route(route)} for route in routes},
        "components": {"schemas": definitions["$defs"]},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
        document["security"] = [{_KEY: []}]
    return document


_FOLDER = Path(__file__).parent


def page_response(model: ServedModel, *, needs_key: bool) -> Response:
    """Return the page, with a policy that only allows its script and requests to this server."""
    from markupsafe import Markup

    # The base style sheet is that of the report pages.
    base_style = (Path(report.__file__).parent / "page.css").read_text("utf-8")
    style = base_style + (_FOLDER / "page.css").read_text("utf-8")
    script = (_FOLDER / "page.js").read_text("utf-8")
    template = page_templates(_FOLDER).get_template("page.html.j2")
    # Anybody may read the page, so that it shows nothing that needs the key.
    condition = None if needs_key else model.condition
    conditions = [] if needs_key or model.index is None else model.index.conditions
    about = model.describe()
    text = template.render(
        model=model,
        condition=condition_text(condition or ""),
        conditions=conditions,
        values=write_values(getattr(condition, "values", ())),
        ignored=ignored_by(condition),
        about={**about, "fitted_on": ""} if needs_key else about,
        embeds=isinstance(model.model, Embedder),
        has_head=model.model.head.kind != "none",
        needs_key=needs_key,
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
    )
    policy = (
        f"default-src 'none'; script-src {csp_source(script)}; style-src {csp_source(style)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


#: Path of the description of one model, without the model's name.
_MODELS = "/v1/models/"
#: Time limit of a search's filter in seconds.
_FILTER_SECONDS = 5.0
#: Largest number of vectors that is serialised on the thread that reads the requests.
_MAX_INLINE_VECTORS = 16
#: Largest number of conditions that an error message lists.
_MAX_LISTED = 10


class Endpoints:
    """The endpoints of one model as an ASGI application, which ``Gate`` wraps."""

    def __init__(
        self,
        model: ServedModel,
        batcher: Batcher,
        metrics: Metrics,
        settings: ServerSettings,
        *,
        needs_key: bool,
    ) -> None:
        self._model, self._batcher, self._metrics = model, batcher, metrics
        self._max_texts, self._max_bytes = settings.max_client_batch_size, settings.payload_limit
        self._needs_key = needs_key
        self._page = page_response(model, needs_key=needs_key)
        #: Threads that evaluate filters, so that a slow one delays neither the model nor other
        #: requests.
        self._planners = ThreadPoolExecutor(2, thread_name_prefix="llmcond-filter")
        self._probe: asyncio.Future[Any] | None = None
        self._start_time, self._name = int(time.time()), model.name
        routes = (
            Route("GET", "/", self.page, public=True, media_type="text/html"),
            Route("GET", "/healthz", self.healthz, public=True),
            Route("GET", "/readyz", self.readyz, public=True),
            Route("GET", "/metrics", self.metrics, media_type="text/plain"),
            Route("GET", "/openapi.json", self.openapi),
            Route("GET", "/v1/models", self.models),
            Route("GET", f"{_MODELS}{{id}}", self.model),
            Route("POST", "/v1/embeddings", self.embeddings, EmbeddingsRequest),
            Route("POST", "/v1/similarity", self.similarity, SimilarityRequest),
            Route("POST", "/v1/rerank", self.rerank, RerankRequest),
            Route("POST", "/v1/search", self.search, SearchRequest),
        )
        self._routes = {route.path: route for route in routes}

    @cached_property
    def document(self) -> dict[str, Any]:
        """The OpenAPI document, which takes longer to create than most responses."""
        return describe_api(
            self._routes.values(),
            needs_key=self._needs_key,
            needs_condition=self._model.condition is None,
        )

    def find_route(self, path: str) -> Route | None:
        """Return the route of a path, or None if there is none."""
        return self._routes.get(f"{_MODELS}{{id}}" if path.startswith(_MODELS) else path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application.

        Raises:
            RequestError: if there is no such path, or the request is invalid.
            ClientDisconnect: if the client has closed the connection.
            ClosedError: if the server is stopping.
        """
        request = Request(scope, receive)
        response = await self._find_handler(request)(request)
        await response(scope, receive, send)

    def _find_handler(self, request: Request) -> Handler:
        """Return the handler of a request; raise a RequestError if there is none."""
        path = request.scope["path"]
        route = self.find_route(path)
        if route is None:
            path, paths = path[:80], [*self._routes]
            suggestion = did_you_mean(path, paths) or f"Use one of {', '.join(paths)}."
            raise RequestError(404, "not_found", f"there is no path {path!r}. {suggestion}")
        headers = {"Allow": ", ".join(route.methods)}
        if request.method == "OPTIONS":
            return partial(_describe_methods, headers)
        if request.method not in route.methods:
            message = f"{route.path} does not accept {request.method}; use {route.method}."
            raise RequestError(405, "method_not_allowed", message, headers=headers)
        return route.handler

    # -- information about the server ------------------------------------------------------------

    async def page(self, _: Request) -> Response:
        """Return a page on which the endpoints can be tried by hand."""
        return self._page

    async def healthz(self, _: Request) -> JsonResponse[HealthResponse]:
        """Report whether the model's thread is running."""
        if not self._batcher.alive:
            raise RequestError(503, "not_running", "the model's thread has stopped.")
        return JsonResponse({"status": "ok", "model": self._name})

    async def readyz(self, _: Request) -> JsonResponse[HealthResponse]:
        """Encode a text to check that the server is ready; concurrent requests share one check."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.wrap_future(self._batcher.submit([self._model.ready_row()]))
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), 10)
        except Exception as error:
            raise RequestError(
                503, "not_ready", "the model did not encode a text within 10 s."
            ) from error
        return JsonResponse({"status": "ready", "model": self._name})

    async def openapi(self, _: Request) -> JsonResponse[dict[str, Any]]:
        """Return the OpenAPI document of the endpoints and their fields."""
        return JsonResponse(self.document)

    async def metrics(self, _: Request) -> Response:
        """Return metrics in Prometheus's text format."""
        return self._metrics.response()

    async def models(self, _: Request) -> JsonResponse[ModelList]:
        """Return the served model as a list of one, in OpenAI's format."""
        return JsonResponse({"object": "list", "data": [self._describe_model()]})

    async def model(self, request: Request) -> JsonResponse[ModelEntry]:
        """Return the served model by its name, in OpenAI's format."""
        name = request.scope["path"].removeprefix(_MODELS)
        if name != self._name:
            message = f"there is no model {name[:80]!r}; this server has {self._name!r}."
            raise RequestError(404, "model_not_found", message, param="model")
        return JsonResponse(self._describe_model())

    def _describe_model(self) -> ModelEntry:
        entry: ModelEntry = {
            "id": self._name,
            "object": "model",
            "created": self._start_time,
            "owned_by": "llmcond",
            **self._model.describe(),  # type: ignore[typeddict-item]
            "max_length": self._model.encoder.identity.known_length,
        }
        index = self._model.index
        if index is not None and index.encodes_pairs:
            entry["conditions"] = index.conditions
        return entry

    # -- work for the model ----------------------------------------------------------------------

    async def embeddings(self, request: Request) -> JsonResponse[EmbeddingsResponse]:
        """Return embeddings of texts under conditions, in OpenAI's format."""
        body = await read_request(request, EmbeddingsRequest, self._max_bytes)
        embedder = self._model.model
        if not isinstance(embedder, Embedder):
            message = "this server has a cross-encoder, which has no embeddings. Use "
            raise RequestError(404, "not_served", f"{message}/v1/similarity or /v1/rerank.")
        problem = self._model.find_form_problem(body.dimensions, body.precision)
        if problem is not None:
            raise invalid_value_error(*problem)
        texts = [body.input] if isinstance(body.input, str) else body.input
        rows = self._make_rows("input", texts, self._choose_condition(body))
        encoded = await self._encode(request, rows, len(texts))

        def response() -> JsonResponse[EmbeddingsResponse]:
            vectors = self._model.form_embeddings(encoded.vectors, body.dimensions, body.precision)
            # OpenAI's client requests base64 by default, and decodes it as float32.
            embeddings: list[Any] = (
                vectors.tolist()
                if body.encoding_format == "float" or body.precision != "float32"
                else [
                    base64.b64encode(row.tobytes()).decode() for row in np.asarray(vectors, "<f4")
                ]
            )
            data: list[Embedding] = [
                {"object": "embedding", "index": index, "embedding": embedding}
                for index, embedding in enumerate(embeddings)
            ]
            return JsonResponse(
                {"object": "list", "model": self._name, "data": data, **self._count_usage(encoded)}
            )

        # Serialising many vectors takes so long that it would block other requests.
        return response() if len(rows) <= _MAX_INLINE_VECTORS else await asyncio.to_thread(response)

    async def similarity(self, request: Request) -> JsonResponse[SimilarityResponse]:
        """Return the similarities of pairs of texts under conditions."""
        body = await read_request(request, SimilarityRequest, self._max_bytes)
        condition = self._choose_condition(body)
        fields: dict[str, TextOrTexts] = {
            "sentence1": body.sentence1,
            "sentence2": body.sentence2,
            "condition": condition,
        }
        lengths = {name: len(value) for name, value in fields.items() if not isinstance(value, str)}
        for name in (name for name, number in lengths.items() if not number):
            raise invalid_value_error(name, f"{name} is empty; give at least one text.")
        count = next(iter(lengths.values()), 1)
        if set(lengths.values()) - {count}:
            listing = ", ".join(f"{number} in {name}" for name, number in lengths.items())
            raise invalid_value_error(
                [*lengths][-1],
                f"the numbers of texts differ: {listing}. Give equally many, or one text for all.",
            )
        rows1, rows2 = (
            self._make_rows(name, [value] * count if isinstance(value, str) else value, condition)
            for name, value in [*fields.items()][:2]
        )
        values, counts = await self._compare(request, rows1, rows2)
        return JsonResponse({"model": self._name, "similarities": values.tolist(), **counts})

    async def rerank(self, request: Request) -> JsonResponse[RerankResponse]:
        """Order documents by their similarity to a query under a condition, best first."""
        body = await read_request(request, RerankRequest, self._max_bytes)
        condition, texts = self._choose_condition(body), body.documents
        query = self._make_rows("query", [body.query], condition)
        rows = self._make_rows("documents", texts, condition)
        scores, counts = await self._compare(request, query, rows)
        results: list[RerankResult] = []
        for index in np.argsort(-scores, kind="stable")[: body.top_n].tolist():
            results.append({"index": index, "relevance_score": float(scores[index])})
            if body.return_documents:
                results[-1]["document"] = {"text": texts[index]}
        return JsonResponse({"model": self._name, "results": results, **counts})

    async def search(self, request: Request) -> JsonResponse[SearchResponse]:
        """Search the index for the texts nearest to a query under a condition."""
        body = await read_request(request, SearchRequest, self._max_bytes)
        index = self._model.index
        if index is None:
            message = "this server has no index to search. Start it with --index DIR."
            raise RequestError(404, "not_served", message)
        if not body.query.strip():
            raise invalid_value_error("query", "query is empty; give a text.")
        request.state.texts = 1
        if body.explain:  # which may encode the hits again
            self._check_number("k", body.k, f"k is {body.k:,} with explain")
        condition = self._choose_condition(body)

        def plan() -> Callable[[], list[Hits]]:
            index.refresh()
            return index.plan_search(
                [body.query],
                condition,
                body.k,
                where=body.where,
                explain=body.explain,
                prepare=False,
                seconds=_FILTER_SECONDS,
            )

        if body.where is None:
            calls = self._batcher.call(lambda: plan()())  # noqa: PLW0108 - the model's thread runs both
        else:
            calls = self._batcher.call(
                await self._await_result(request, self._planners.submit(plan), "condition")
            )
        (hits,) = await self._await_result(request, calls, "condition")
        response: SearchResponse = {"model": self._name, **hits.to_json()}  # type: ignore[typeddict-item]
        return JsonResponse(response)

    def _choose_condition(
        self, body: EmbeddingsRequest | SimilarityRequest | RerankRequest | SearchRequest
    ) -> Any:
        """Return a request's condition or the server's default; without either, raise an error."""
        conditions = () if body.condition is None else body.condition
        texts = [conditions] if isinstance(conditions, str) else [*conditions]
        self._check_number("condition", len(texts))
        for number, text in enumerate(texts, 1):
            if not text.strip():
                which = f"condition {number} of {len(texts)}" if len(texts) > 1 else "the condition"
                raise invalid_value_error("condition", f"{which} is empty. Give a text.")
            try:
                as_condition(text)
            except UserError as error:
                raise invalid_value_error("condition", f"condition: {error}") from None
        try:
            requested = body.conditions()
        except UserError as error:
            raise invalid_value_error("values", f"values: {error}") from None
        condition = self._model.condition if requested is None else requested
        if condition is None:
            raise RequestError(
                422,
                "condition_required",
                'condition is missing: the aspect to embed the texts under, such as "the place". '
                "Give one for all texts, or one for each; or start the server with a default "
                "(--condition).",
                param="condition",
            )
        try:
            return _add_ignored(condition, body.ignore or ())
        except UserError as error:
            raise invalid_value_error("ignore", f"ignore: {error}") from None

    def _check_number(self, name: str, count: int, subject: str = "") -> None:
        if count > self._max_texts:
            subject = subject or f"{name} has {format_count(count, 'text')}"
            raise RequestError(
                413,
                "too_many_texts",
                f"{subject}; a request may have at most {self._max_texts:,} "
                "(--max-client-batch-size).",
                param=name,
            )

    def _make_rows(self, name: str, texts: list[str], conditions: TextOrTexts) -> list[Row]:
        """Pair texts with their conditions; raise a RequestError if they are invalid."""
        if not texts:
            raise invalid_value_error(name, f"{name} is empty; give at least one text.")
        self._check_number(name, len(texts))
        if not isinstance(conditions, str) and len(conditions) != len(texts):
            raise invalid_value_error(
                "condition",
                f"{name} has {format_count(len(texts), 'text')}, but condition has "
                f"{len(conditions)}. Give one condition for all texts, or one for each.",
            )
        try:
            rows = pair_with_conditions(texts, conditions)
        except UserError as error:
            raise invalid_value_error(name, f"{name}: {error}") from None
        try:
            for condition in {row[-1] for row in rows}:
                check_ignored(condition, getattr(self._model.model, "guides", {}))
        except UserError as error:
            raise invalid_value_error("ignore", str(error)) from None
        return list(rows)

    async def _compare(
        self, request: Request, first: Sequence[Row], second: Sequence[Row]
    ) -> tuple[NDArray[np.float32], Counts]:
        """Compare one (text, condition) row, or as many as in ``second``, with those of it."""
        model, n = self._model.model, len(first) + len(second)
        if isinstance(model, Embedder):
            encoded = await self._encode(request, [*first, *second], n)
            vectors = encoded.vectors[len(first) :]
            others = np.broadcast_to(encoded.vectors[: len(first)], vectors.shape)
            return model.compare(others, vectors), self._count_usage(encoded)
        pairs = zip([*first] * (len(second) // len(first)), second, strict=True)
        encoded = await self._encode(request, [(a, b, c) for (a, _), (b, c) in pairs], n)
        return encoded.vectors, self._count_usage(encoded)

    async def _encode(self, request: Request, rows: Sequence[Row], n_texts: int) -> Encoded:
        request.state.texts = n_texts
        encoded: Encoded = await self._await_result(request, self._batcher.submit(rows))
        request.state.tokens = int(encoded.n_tokens.sum())
        return encoded

    def _count_usage(self, encoded: Encoded) -> Counts:
        """Count the tokens, the truncated texts, and the embeddings that are zero vectors."""
        tokens = int(encoded.n_tokens.sum())
        counts: Counts = {
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "truncated": int(encoded.truncated.sum()),
        }
        if isinstance(self._model.model, Embedder):
            counts["zero_vectors"] = int((~encoded.vectors.any(axis=1)).sum())
        return counts

    async def _await_result(
        self, request: Request, future: Future[Any], param: str | None = None
    ) -> Any:
        """Wait for a result; cancel it if the client disconnects or the request times out.

        ``param`` is the field that other invalid values are attributed to.
        """
        self._batcher.awaited += 1
        result = asyncio.wrap_future(future)
        disconnect = asyncio.ensure_future(_wait_for_disconnect(request.receive))
        disconnect.add_done_callback(lambda _: result.cancel())
        try:
            return await result
        except asyncio.CancelledError:
            if not disconnect.done():  # the request itself was cancelled, by its time limit
                raise
            raise ClientDisconnect from None
        except NotFiniteError as error:
            raise RequestError(500, "model_failed", self._model.without_paths(error)) from error
        except InputError:
            message = (
                "condition, with its values, is too long: within "
                f"{self._model.encoder.identity.limit}, it leaves no room for the text. Shorten it."
            )
            raise invalid_value_error("condition", message) from None
        except UnpreparedConditionError as error:
            message = self._describe_unprepared(error)
            raise invalid_value_error("condition", self._model.without_paths(message)) from None
        except FilterError as error:
            raise invalid_value_error("where", self._model.without_paths(error)) from None
        except UserError as error:
            raise invalid_value_error(param, self._model.without_paths(error)) from None
        except LlmcondError as error:
            raise RequestError(500, "model_failed", self._model.without_paths(error)) from error
        finally:
            self._batcher.awaited -= 1
            disconnect.cancel()
            result.cancel()

    def _describe_unprepared(self, error: UnpreparedConditionError) -> str:
        prepared = [] if self._model.index is None else self._model.index.conditions
        sentences = [error.problem]
        if error.condition not in prepared:
            listed = ", ".join(map(shortened_repr, prepared[:_MAX_LISTED]))
            n_others = len(prepared) - _MAX_LISTED
            others = f" and {n_others:,} others (GET /v1/models)" if n_others > 0 else ""
            sentences.append(did_you_mean(error.condition, prepared))
            sentences.append(f"Prepared conditions: {listed or 'none'}{others}.")
        sentences.append(f"Whoever runs the server can prepare it: {error.command}")
        return " ".join(filter(None, sentences))


def _add_ignored(condition: Any, ignore: Sequence[str]) -> Any:
    """Return a condition, or each of several with or without weights, that ignores others."""
    if not ignore or isinstance(condition, str):
        return ignoring(condition, ignore) if ignore else condition
    if isinstance(condition, Mapping):
        return {ignoring(one, ignore): weight for one, weight in condition.items()}
    distinct = {one: ignoring(one, ignore) for one in condition}
    return [distinct[one] for one in condition]


async def _describe_methods(headers: Mapping[str, str], _: Request) -> Response:
    return Response(status_code=204, headers=headers)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
