"""Where a server listens, who may use it, and how much it takes on."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from llmcond.errors import UserError
from llmcond.log import log
from llmcond.options import option

_LIMITS = "limits"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server."""

    host: str = option("127.0.0.1", metavar="ADDRESS", help="to listen on; 0.0.0.0: every one")
    port: int = option(8000, metavar="N", help="0: one that is free, which is told")
    api_key_file: str | Path | None = option(
        None,
        metavar="FILE",
        help="keys, one a line, one of which a request needs (Authorization: Bearer KEY)",
    )
    max_batch_tokens: int | None = option(
        None,
        metavar="N",
        group=_LIMITS,
        help="tokens that are encoded together, about (default: by the device)",
    )
    max_concurrent_requests: int = option(
        512, metavar="N", group=_LIMITS, help="at a time; further ones are answered 429"
    )
    max_client_batch_size: int = option(
        2_048, metavar="N", group=_LIMITS, help="texts of a request; more are answered 413"
    )
    payload_limit: int = option(
        2_000_000, metavar="BYTES", group=_LIMITS, help="of a request; more are answered 413"
    )
    timeout: float = option(
        60.0, metavar="S", group=_LIMITS, help="seconds until a request is answered 504"
    )

    def check(self) -> None:
        """Raise a UserError for a number that is no limit or no port."""
        for name in (
            "max_batch_tokens",
            "max_concurrent_requests",
            "max_client_batch_size",
            "payload_limit",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
        if not 0 < self.timeout < 1e6:
            raise UserError(
                f"--timeout is {self.timeout}; it must be a positive number of seconds."
            )
        if not 0 <= self.port < 2**16:
            raise UserError(f"--port is {self.port}; it must be between 0 and 65535.")


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
