"""Where a server listens, who may use it, and how much it takes on."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from llmcond.errors import UserError
from llmcond.log import log
from llmcond.options import Options, Positive, option

_LIMITS = "limits"


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Options):
    """Settings of a server."""

    host: str = option("127.0.0.1", metavar="ADDRESS", help="to listen on; 0.0.0.0: every one")
    port: Annotated[int, Ge(0), Le(65_535)] = option(
        8000, metavar="N", help="0: one that is free, which is told"
    )
    api_key_file: str | Path | None = option(
        None,
        metavar="FILE",
        help="keys, one a line, one of which a request needs (Authorization: Bearer KEY)",
    )
    max_batch_tokens: Positive | None = option(
        None,
        metavar="N",
        group=_LIMITS,
        help="tokens that are encoded together, about (default: by the device)",
    )
    max_concurrent_requests: Positive = option(
        512, metavar="N", group=_LIMITS, help="at a time; further ones are answered 429"
    )
    max_client_batch_size: Positive = option(
        2_048, metavar="N", group=_LIMITS, help="texts of a request; more are answered 413"
    )
    payload_limit: Positive = option(
        2_000_000, metavar="BYTES", group=_LIMITS, help="of a request; more are answered 413"
    )
    timeout: Annotated[float, Gt(0), Lt(1_000_000)] = option(
        60.0, metavar="S", group=_LIMITS, help="seconds until a request is answered 504"
    )


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: an embedder, or the index that an embedder made.

    Attributes:
        condition: of requests that name none; None: such are refused.
        guide: labelled texts that embeddings follow.
    """

    run: Path | None = None
    model: str | None = None
    head: str | None = None
    prompt: str | None = None
    device: str = "auto"
    index: Path | None = None
    condition: str | None = None
    guide: Any = None


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Return the keys of a file, one a line; a message says if others can read it.

    Raises:
        UserError: it cannot be read, holds no key, or one that no header can carry.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"--api-key-file {path} cannot be read: {told}.") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise UserError(f"--api-key-file {path} holds no key. Write one a line.")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UserError(
            f"--api-key-file {path} holds a key with characters that no header can carry. Use "
            "letters, digits and punctuation, without spaces."
        )
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning(f"{path} can be read by others than its owner: chmod 600 {path}")
    return tuple(key.encode() for key in keys)
