"""A self-contained page for trying the server by hand; it sends requests to the server only."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

from llmcond.report import page as report
from llmcond.report.page.render import csp_source, page_templates
from llmcond.runs.embedder import Embedder
from llmcond.serving.model import ServedModel

_FOLDER = Path(__file__).parent


def page_response(model: ServedModel, *, needs_key: bool) -> Response:
    """Return the page, with a policy that only allows its script and requests to this server."""
    from markupsafe import Markup

    # The base style sheet is that of the report pages.
    base_style = (Path(report.__file__).parent / "page.css").read_text("utf-8")
    style = base_style + (_FOLDER / "page.css").read_text("utf-8")
    script = (_FOLDER / "page.js").read_text("utf-8")
    template = page_templates(_FOLDER).get_template("page.html.j2")
    text = template.render(
        model=model,
        about=model.describe(),
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
