"""A page to try the server by hand: complete in itself, and asking nobody but the server."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from starlette.responses import Response

from llmcond.report import page as report
from llmcond.runs.embedder import Embedder
from llmcond.serving.model import ServedModel

_FOLDER = Path(__file__).parent


def page_response(model: ServedModel, *, needs_key: bool) -> Response:
    """Return the page, with a policy that allows its own script and requests to this server."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The look is that of the pages of results.
    common = (Path(report.__file__).parent / "page.css").read_text("utf-8")
    style = common + (_FOLDER / "page.css").read_text("utf-8")
    script = (_FOLDER / "page.js").read_text("utf-8")
    text = environment.get_template("page.html.j2").render(
        name=model.name,
        about=model.describe(),
        embeds=isinstance(model.model, Embedder),
        searches=model.index is not None,
        conditions=model.index.conditions if model.index else [],
        condition=model.condition,
        needs_key=needs_key,
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
    )
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
