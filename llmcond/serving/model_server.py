"""Loading the model to serve, and running its queue and endpoints under uvicorn."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from llmcond.arrays import Array
from llmcond.data.guides import read_guide
from llmcond.errors import UserError
from llmcond.quantization import read_ranges
from llmcond.runs.cross import load_similarity_model
from llmcond.runs.embedder import Embedder
from llmcond.runs.open import resolve_run
from llmcond.serving.app import Endpoints
from llmcond.serving.batching import Batcher
from llmcond.serving.gate import Gate
from llmcond.serving.metrics import Metrics
from llmcond.serving.model import ServedModel
from llmcond.serving.protocol import BoundedProtocol
from llmcond.serving.settings import ServedSource, ServerSettings

if TYPE_CHECKING:
    from llmcond.search import Index

#: Forward passes per batch. Inputs are sorted by length across the passes, which saves padding.
_PASSES = 2
#: Addresses that only this machine can reach.
_LOCAL = ("127.0.0.1", "::1", "localhost")


def load_model(served: ServedSource) -> ServedModel:
    """Load the model, and the index if there is one; raises the errors of ``serve``."""
    index, condition, guide = served.index, served.condition, served.guide
    if guide is not None and index is not None:
        raise UserError(
            f"--guide cannot be combined with --index, because an index stores its guides. Add it "
            f"to the index: llmcond index --out {index} --guide FILE"
        )
    if index is not None:
        opened_index = _open_index(served, index)
        embedder = opened_index.embedder
        return ServedModel(embedder, condition, opened_index, _load_ranges(served, embedder))
    loaded = load_similarity_model(
        resolve_run(served.run, served.model, served.revision),
        served.head,
        served.prompt,
        served.device,
    )
    if isinstance(loaded, Embedder):
        loaded = replace(loaded, truncate_dim=served.truncate_dim)
    elif served.truncate_dim is not None or served.ranges is not None:
        raise UserError(
            "--truncate-dim and --ranges are for embeddings, but a cross-encoder has none. Omit "
            "them, or choose an embedder."
        )
    if guide is not None:
        if not isinstance(loaded, Embedder):
            raise UserError(
                "--guide maps embeddings, but a cross-encoder has none. Omit it, or choose an "
                "embedder."
            )
        conditions = [] if condition is None else [condition]
        for labelled in read_guide(guide, None, conditions, closed=False):
            loaded = loaded.with_guide(labelled)
    ranges = _load_ranges(served, loaded) if isinstance(loaded, Embedder) else None
    return ServedModel(loaded, condition, ranges=ranges)


def _open_index(served: ServedSource, folder: Path) -> Index:
    """Open the index of a folder, and check that its model and size are the named ones."""
    from llmcond.search import Index

    settings: dict[str, Any] = {"head": served.head, "prompt": served.prompt}
    if served.run is not None or served.model is not None:
        settings["run"] = resolve_run(served.run, served.model, served.revision)
    if any(settings.values()) and (folder / "index.json").exists():
        # Without texts, `build` only opens the index and checks that the model is the same.
        index = Index.build(folder, **settings, device=served.device)
    else:
        index = Index.open(folder, device=served.device)
    if served.truncate_dim not in (None, index.truncate_dim):
        raise UserError(
            f"--truncate-dim is {served.truncate_dim}, but {folder} was built with "
            f"{index.truncate_dim or 'all dimensions'}. Omit --truncate-dim."
        )
    return index


def _load_ranges(served: ServedSource, embedder: Embedder) -> Array | None:
    return None if served.ranges is None else read_ranges(served.ranges, embedder.dim)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's advice to install a library that this server does not use."""
    return "WebSocket library" not in record.getMessage()


class ModelServer(uvicorn.Server):
    """A server of one model.

    Attributes:
        model: the served model.
        gate: the application that checks every request.
    """

    def __init__(
        self, model: ServedModel, settings: ServerSettings, keys: Sequence[bytes] = ()
    ) -> None:
        """Encode one text to test the model, and set up the server.

        Raises:
            LlmcondError: if the model cannot encode.
        """
        self.model, metrics = model, Metrics(model)
        model.encode([model.ready_row()])
        tokens = settings.max_batch_tokens or _PASSES * model.encoder.engine.budget
        self._batcher = Batcher(model.encode, tokens, model.max_row_tokens, metrics.on_batch)
        metrics.watch(self._batcher)
        endpoints = Endpoints(model, self._batcher, metrics, settings, needs_key=bool(keys))
        self.gate = Gate(
            endpoints,
            self._batcher,
            metrics,
            keys,
            settings.max_concurrent_requests,
            settings.timeout,
            local=settings.host in _LOCAL,
        )
        app: ASGIApp = self.gate
        if settings.cors_origin:
            from starlette.middleware.cors import CORSMiddleware

            # Outside the gate, because a preflight request has no API key, and because a page can
            # only read an error that has the headers, too.
            app = CORSMiddleware(
                app,
                allow_origins=settings.cors_origin,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's client for browsers sends a dozen
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        logging.getLogger("uvicorn.error").addFilter(_is_relevant)
        # The gate logs requests, because it knows what may be disclosed.
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                # By then, every accepted request has been answered or has timed out.
                timeout_graceful_shutdown=math.ceil(settings.timeout) + 1,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests on the sockets until a signal arrives."""
        try:
            super().run(sockets)
        finally:
            self._batcher.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Reject new requests and finish accepted ones; at a second signal, stop at once."""
        # The base class also records the signal, to raise it again after the shutdown, which would
        # kill the process. This method does not.
        self.gate.closing = True
        self.force_exit = self.should_exit
        self.should_exit = True
