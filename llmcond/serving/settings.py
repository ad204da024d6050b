"""The settings of a server, and what it serves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from llmcond.base.errors import UserError, shortened_repr
from llmcond.base.options import Options, Positive, option

_LIMITS = "limits"


def _check_origins(origins: Sequence[str]) -> None:
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+", origin):
            raise UserError(
                f"--cors-origin is {shortened_repr(origin)}; expected scheme and host in lower "
                "case, without a path: https://example.org, http://localhost:3000, or *."
            )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Options):
    """Address, API keys and limits of a server."""

    host: str = option(
        "127.0.0.1", metavar="ADDRESS", help="address to listen on; 0.0.0.0: all interfaces"
    )
    port: Annotated[int, Ge(0), Le(65_535)] = option(
        8000, help="port to listen on; 0: any free port, which is logged"
    )
    api_key_file: str | Path | None = option(
        None,
        help="file of API keys, one per line; requests then need one (Authorization: Bearer KEY)",
    )
    cors_origin: Sequence[str] = option(
        (),
        metavar="ORIGIN",
        repeat=True,
        check=_check_origins,
        help="origin of web pages that may send requests from a browser, such as "
        "https://example.org; may be repeated; *: every origin (default: none)",
    )
    max_batch_tokens: Positive | None = option(
        None,
        group=_LIMITS,
        help="approximate number of tokens per batch (default: depends on the device)",
    )
    max_concurrent_requests: Positive = option(
        512,
        group=_LIMITS,
        help="maximal number of concurrent requests; further ones get status 429",
    )
    max_client_batch_size: Positive = option(
        2_048,
        group=_LIMITS,
        help="maximal number of texts, conditions and explained results per request; above it, "
        "status 413",
    )
    payload_limit: Positive = option(
        2_000_000,
        metavar="BYTES",
        group=_LIMITS,
        help="maximal size of a request in bytes; above it, status 413",
    )
    timeout: Annotated[float, Gt(0), Lt(1_000_000)] = option(
        60.0, metavar="S", group=_LIMITS, help="seconds after which a request gets status 504"
    )


@dataclass(frozen=True, kw_only=True)
class ServedSource:
    """The model to serve, or the index whose model is served.

    Attributes:
        run: folder of a run.
        model: name of a bundled model, or OWNER/NAME of a model on the hub.
        revision: branch, tag or commit of the model on the hub.
        head: name of a fitted head.
        prompt: prompt of zero-shot embeddings.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        index: folder of an index to search.
        condition: default condition of requests; None: every request must name one.
        guide: labelled texts that embeddings follow.
        truncate_dim: number of leading dimensions that embeddings keep; None: all.
        ranges: .npy file of the ranges of int8 and uint8; None: neither is offered.
    """

    run: Path | None = None
    model: str | None = None
    revision: str | None = None
    head: str | None = None
    prompt: str | None = None
    device: str = "auto"
    index: Path | None = None
    condition: str | None = None
    guide: Any = None
    truncate_dim: int | None = None
    ranges: Path | None = None
