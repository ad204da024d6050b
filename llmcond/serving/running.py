"""A model, its queue and its endpoints under uvicorn."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn

from llmcond.data.guides import read_guide
from llmcond.errors import UserError
from llmcond.runs.cross import load_comparing
from llmcond.runs.embedder import Embedder
from llmcond.runs.open import usual_run
from llmcond.serving.app import Endpoints
from llmcond.serving.batching import Batcher
from llmcond.serving.gate import Gate
from llmcond.serving.metrics import Metrics
from llmcond.serving.model import ServedModel
from llmcond.serving.settings import Served, ServerSettings

#: Forward passes of a batch: inputs of several are sorted by length among each other.
_PASSES = 2
#: Where only this machine can reach a server.
_LOCAL = ("127.0.0.1", "::1", "localhost")


def load_model(served: Served) -> ServedModel:
    """Load what is to be served; errors as of ``serve``."""
    index, condition, guide = served.index, served.condition, served.guide
    if guide is not None and index is not None:
        raise UserError(
            f"an index has its own guides. Give this one to it: llmcond index --out {index} "
            "--guide FILE"
        )
    if index is not None:
        from llmcond.search import Index

        given: dict[str, Any] = {
            name: getattr(served, name) for name in ("run", "model", "head", "prompt")
        }
        if any(given.values()) and (index / "index.json").exists():
            # Without texts it is only opened, and refused where another model made it.
            found = Index.build(index, **given, device=served.device)
        else:
            found = Index.open(index, device=served.device)
        return ServedModel(found.embedder, condition, found)
    loaded = load_comparing(
        usual_run(served.run, served.model), served.head, served.prompt, served.device
    )
    if guide is not None:
        if not isinstance(loaded, Embedder):
            raise UserError("a cross-encoder has no embeddings that --guide could map; omit it.")
        conditions = [] if condition is None else [condition]
        for labelled in read_guide(guide, None, conditions, closed=False):
            loaded = loaded.with_guide(labelled)
    return ServedModel(loaded, condition)


def _is_no_hint_at_websockets(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's advice to install a library that this server does not use."""
    return "WebSocket library" not in record.getMessage()


class Running(uvicorn.Server):
    """A server of one model.

    Attributes:
        model: what is served.
        gate: what every request passes.
    """

    def __init__(
        self, model: ServedModel, settings: ServerSettings, keys: Sequence[bytes] = ()
    ) -> None:
        """Try the model by a text, and prepare the rest.

        Raises:
            LlmcondError: it encodes nothing.
        """
        self.model, metrics = model, Metrics(model)
        model.encode([model.ready_row()])
        tokens = settings.max_batch_tokens or _PASSES * model.encoder.engine.budget
        self._batcher = Batcher(model.encode, tokens, model.longest, metrics.on_batch)
        metrics.watch(self._batcher)
        endpoints = Endpoints(model, self._batcher, metrics, settings)
        self.gate = Gate(
            endpoints,
            self._batcher,
            metrics,
            keys,
            settings.max_concurrent_requests,
            settings.timeout,
            local=settings.host in _LOCAL,
        )
        logging.getLogger("uvicorn.error").addFilter(_is_no_hint_at_websockets)
        # Requests are logged by the gate, which knows what may be told of them.
        super().__init__(
            uvicorn.Config(
                self.gate,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                lifespan="off",
                # What was accepted is answered, or late, by then.
                timeout_graceful_shutdown=math.ceil(settings.timeout) + 1,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests that come to a socket until a signal."""
        try:
            super().run(sockets)
        finally:
            self._batcher.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse what comes from now on, and stop; at a second signal at once."""
        # Not kept, as the base class does: it would end the process by the signal afterwards.
        self.gate.closing = True
        self.force_exit = self.should_exit
        self.should_exit = True
