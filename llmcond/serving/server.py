"""Running the server, from what is loaded to the last answer."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from llmcond.display import Displayed
from llmcond.errors import UserError, install_command
from llmcond.log import log
from llmcond.progress import duration
from llmcond.serving.settings import Served, ServerSettings, read_keys


@dataclass(frozen=True)
class ServeResult(Displayed):
    """What a server has done, once it is stopped."""

    url: str
    model: str
    requests: int
    seconds: float


def serve(served: Served, settings: ServerSettings) -> ServeResult:
    """Serve a model until SIGTERM or Ctrl-C, and answer what was accepted before.

    Raises:
        UserError: the extra is not installed, an address that cannot be listened on, keys that
            cannot be read, or as ``load_embedder``, ``load_cross_encoder`` and ``Index.open``.
        LlmcondError: the model cannot be loaded, or encodes nothing.
    """
    if served.condition is not None and not served.condition.strip():
        raise UserError("--condition is empty; name one, or leave it out.")
    if any(find_spec(name) is None for name in ("prometheus_client", "starlette", "uvicorn")):
        raise UserError(
            "the server needs Starlette, uvicorn and prometheus-client: "
            f"{install_command('serve')}."
        )
    keys = () if settings.api_key_file is None else read_keys(Path(settings.api_key_file))
    with bound(settings.host, settings.port) as listening:
        from llmcond.serving.running import Running, load_model

        loaded = load_model(served)
        running = Running(loaded, settings, keys)
        host, port = listening.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if not keys and not ipaddress.ip_address(host).is_loopback:
            log.warning(f"whoever reaches {url} can use it; --api-key-file lets only some")
        began = time.monotonic()
        listening.listen()  # whoever reads the next line and comes at once waits until it serves
        log.info(f"serving {loaded.name} on {url} (a page to try it there; Ctrl-C to stop)")
        with _requests_logged():
            running.run([listening])
        seconds = time.monotonic() - began
    log.info(
        f"stopped after {duration(seconds)} and {running.server_state.total_requests:,} requests"
    )
    return ServeResult(url, loaded.name, running.server_state.total_requests, round(seconds, 1))


@contextmanager
def _requests_logged() -> Iterator[None]:
    # Not as other messages are: those are laid out for people, which takes longer than an answer.
    requests, handler = logging.getLogger("llmcond.requests"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    requests.addHandler(handler)
    requests.propagate = False
    requests.setLevel(logging.INFO)
    try:
        yield
    finally:
        requests.removeHandler(handler)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at an address, which does not listen yet: a client is refused till it does.

    Raises:
        UserError: no such address, one that is in use, or one that only others may use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except BaseException:
            found.close()
            raise
    except (OSError, UnicodeError) as error:
        told = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {host}, port {port}: {told}. Choose another --host or --port."
        ) from error
    return found
