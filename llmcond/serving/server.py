"""Running a server, from loading the model to the last response."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from llmcond.base.errors import UserError, format_count, install_command
from llmcond.base.output import Displayed, log
from llmcond.serving.settings import ServedSource, ServerSettings

#: The keys that RFC 6750 allows; a line with a comment is none.
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
#: Keys that are shorter give a warning.
_MIN_KEY_LENGTH = 16
#: Command that generates an API key.
_NEW_KEY = 'python -c "import secrets; print(secrets.token_urlsafe(32))"'


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Read a file of API keys, one per line, and warn if other users can read the file.

    Raises:
        UserError: if the file cannot be read, or holds no key or an invalid key.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise UserError(f"--api-key-file {path} cannot be read: {reason}.") from error
    keys = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    if not keys:
        raise UserError(
            f"--api-key-file {path} holds no key. Write one key per line. {_NEW_KEY} prints a new "
            "one."
        )
    for number, key in keys.items():
        if not _KEY.fullmatch(key):
            raise UserError(
                f"--api-key-file {path}: line {number} is no key. A key consists of letters, "
                "digits and -._~+/ and may end in =. The file cannot have comments. "
                f"{_NEW_KEY} prints a new key."
            )
        if len(key) < _MIN_KEY_LENGTH:
            log.warning(
                f"--api-key-file {path}: the key in line {number} has {len(key)} characters, and "
                f"is easy to guess. {_NEW_KEY} prints a new key."
            )
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning(f"other users can read {path}; protect it: chmod 600 {path}")
    return tuple(key.encode() for key in keys.values())


@dataclass(frozen=True)
class ServeResult(Displayed):
    """Summary of a server after it has stopped.

    Attributes:
        url: the URL that it served.
        model: name of the model.
        requests: number of requests.
        seconds: time from start to stop.

    Examples:
        >>> from llmcond import ServeResult
        >>> ServeResult("http://127.0.0.1:8000", "minilm", requests=3, seconds=4.5)
        ServeResult(url='http://127.0.0.1:8000', model='minilm', requests=3, seconds=4.5)
    """

    url: str
    model: str
    requests: int
    seconds: float


def serve(served: ServedSource, settings: ServerSettings) -> ServeResult:
    """Serve a model until SIGTERM or Ctrl-C, and finish the requests accepted by then.

    Raises:
        UserError: if the extra is not installed, the address is not available, or the keys cannot
            be read; also for the reasons of ``load_embedder``, ``load_cross_encoder`` and
            ``Index.open``.
        LlmcondError: if the model cannot be loaded or cannot encode.
    """
    if served.condition is not None and not served.condition.strip():
        raise UserError("--condition is empty; name a condition, or omit the option.")
    libraries = ("httptools", "prometheus_client", "pydantic", "starlette", "uvicorn")
    if any(find_spec(name) is None for name in libraries):
        raise UserError(
            "the server needs Starlette, uvicorn, httptools, pydantic and prometheus-client: "
            f"{install_command('serve')}."
        )
    keys = () if settings.api_key_file is None else read_keys(Path(settings.api_key_file))
    with bind_socket(settings.host, settings.port) as listening:
        from llmcond.base.output import format_duration
        from llmcond.serving.model_server import ModelServer, load_model

        loaded = load_model(served)
        host, port = listening.getsockname()[:2]
        running = ModelServer(loaded, replace(settings, host=host), keys)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if not keys and not ipaddress.ip_address(host).is_loopback:
            log.warning(
                f"anyone who can reach {url} can use the server; restrict it with --api-key-file"
            )
        if not keys and "*" in settings.cors_origin:
            log.warning(
                "any web page that a browser on this machine opens can use the server; restrict it "
                "with --api-key-file, or name the origins"
            )
        start_time = time.monotonic()
        # Listen before the URL is logged: a client that connects at once then waits for the server
        # instead of being rejected.
        listening.listen()
        log.info(f"serving {loaded.name} on {url} (open it in a browser to try it; Ctrl-C to stop)")
        with _log_requests():
            running.run([listening])
        seconds = time.monotonic() - start_time
    n_requests = running.server_state.total_requests
    log.info(f"stopped after {format_duration(seconds)} and {format_count(n_requests, 'request')}")
    return ServeResult(url, loaded.name, n_requests, round(seconds, 1))


@contextmanager
def _log_requests() -> Iterator[None]:
    # The normal handler formats messages for a terminal, which takes longer than a response.
    requests, handler = logging.getLogger("llmcond.requests"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    requests.addHandler(handler)
    requests.propagate = False
    requests.setLevel(logging.INFO)
    try:
        yield
    finally:
        requests.removeHandler(handler)


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket to an address without listening: connections are refused until it listens.

    Raises:
        UserError: if the address does not exist, is in use, or may not be used by this user.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound_socket = socket.socket(family, kind, protocol)
        try:
            bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound_socket.bind(address)
        except BaseException:
            bound_socket.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}. Choose another --host or --port."
        ) from error
    return bound_socket
