"""Metrics of a server for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.responses import Response

from llmcond.encoders.spec import Encoded
from llmcond.serving.batching import Batcher
from llmcond.serving.model import ServedModel

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, model: ServedModel) -> None:
        """Register the metrics."""
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        by_route: dict[str, Any] = {"labelnames": ["route"], "buckets": _SECONDS}
        labels = ["route", "status"]
        self._requests = Counter(
            "llmcond_requests", "Requests answered.", labels, registry=registry
        )
        self._seconds = Histogram(
            "llmcond_request_seconds",
            "Seconds until a request is answered.",
            registry=registry,
            **by_route,
        )
        self.in_progress = Gauge(
            "llmcond_requests_in_progress", "Requests in progress.", registry=registry
        )
        self._texts = Counter(
            "llmcond_texts",
            "Texts encoded, including those of /readyz, but no queries of searches.",
            registry=registry,
        )
        self._tokens = Counter(
            "llmcond_tokens", "Tokens of these texts, before long texts are cut.", registry=registry
        )
        self._truncated = Counter("llmcond_truncated_texts", "Truncated texts.", registry=registry)
        self._batch = Histogram(
            "llmcond_batch_texts", "Rows per batch.", registry=registry, buckets=_TEXTS
        )
        self._batch_seconds = Histogram(
            "llmcond_batch_seconds",
            "Seconds to encode a batch.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._waiting = Gauge(
            "llmcond_waiting_texts", "Rows waiting for a batch.", registry=registry
        )
        model_labels = {
            name: str(value) for name, value in model.describe().items() if name != "guides"
        }
        info = Gauge("llmcond_model_info", "The served model.", [*model_labels], registry=registry)
        info.labels(**model_labels).set(1)

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
