"""A page as HTML: its template, style, scripts and data in one file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcond.errors import UserError, install_command
from llmcond.files import check_output, replacing
from llmcond.log import log
from llmcond.metrics import metric_of
from llmcond.report.format import factors_text, sentences_text
from llmcond.report.page.gather import Page
from llmcond.report.page.tables import difference_table, isotropy_table, main_table, parts_table

if TYPE_CHECKING:
    import jinja2

_FOLDER = Path(__file__).parent


def check_page(path: Path) -> None:
    """Check, before hours of work, that a page can be made.

    Raises:
        UserError: another kind of file, no place to write to, or a library is not installed.
    """
    check_output(path, (".html", ".htm"))
    if any(find_spec(name) is None for name in ("altair", "jinja2", "vl_convert")):
        raise UserError(f"pages need Altair, Jinja and vl-convert: {install_command('report')}.")


def write_page(page: Page, path: Path) -> None:
    """Write a page of results, complete in itself, to a path that :func:`check_page` lets pass."""
    from llmcond.report.page.charts import libraries
    from llmcond.report.page.data import by_head, embedded, isotropy_charts

    data, heads, isotropy = embedded(page), by_head(page), isotropy_charts(page)
    if heads:
        data["charts"]["heads"] = heads[0]
    if isotropy:
        data["charts"] |= {f"isotropy-{i}": chart for i, chart in enumerate(isotropy[0])}
    counted = (f"{one.split}: {one.counts.text}. {sentences_text(one)}" for one in page.results)
    write_html(
        path,
        _FOLDER / "page.html.j2",
        [libraries(), (_FOLDER / "page.js").read_text("utf-8")],
        "",
        data,
        page=page,
        counts=dict.fromkeys(counted),
        primary=page.results[0].primary,
        factors=factors_text([metric_of(name) for name in page.results[0].metrics]),
        results=main_table(page),
        differences=difference_table(page.results if page.baselines else ()),
        parts={kind: parts_table(kind, page.results, own) for kind, own in page.parts.items()},
        heads=heads and heads[1],
        isotropy=isotropy and (isotropy_table(page.isotropy), isotropy[1], len(isotropy[0])),
    )


def write_html(
    path: Path, template: Path, scripts: Sequence[str], style: str, data: object, **values: Any
) -> None:
    """Write a page that asks for nothing: its scripts and styles, and no others, are in it.

    Args:
        path: of the page.
        template: of Jinja; what it sets in is escaped.
        scripts: beside the one of the button ``theme``.
        style: CSS beside that of all pages.
        data: what scripts read, as JSON.
        values: what the template takes beside ``data``, ``policy``, ``style`` and ``scripts``.
    """
    from markupsafe import Markup

    environment = page_templates(template.parent)
    json = {"allow_nan": False, "separators": (",", ":")}
    environment.policies["json.dumps_kwargs"] = json
    environment.tests["nested"] = _nested
    environment.filters["plain"] = _plain
    own = [_script(text) for text in (*scripts, (_FOLDER / "theme.js").read_text("utf-8"))]
    text = environment.get_template(template.name).render(
        **values,
        data=data,
        policy=_policy(own),
        style=Markup((_FOLDER / "page.css").read_text("utf-8") + style),  # noqa: S704
        scripts=[Markup(script) for script in own],  # noqa: S704
    )
    # Half of a surrogate pair is no character; it is written out instead of ending the run.
    content = f"{text.lstrip()}\n".encode("utf-8", "backslashreplace")
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    log.info(f"report -> {path}")


def page_templates(folder: Path) -> jinja2.Environment:
    """Return the templates of a folder, which escape what is set into them."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def csp_source(text: str) -> str:
    """Return the hash source of a script or style for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _policy(scripts: Sequence[str]) -> str:
    """Return a policy that allows no request, and no script but these."""
    return (
        f"default-src 'none'; script-src {' '.join(map(csp_source, scripts))}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _script(text: str) -> str:
    """Return a script that neither ends early nor changes on its way through a parser."""
    return text.replace("\r\n", "\n").replace("</script", r"<\/script").replace("<!--", r"<\!--")


def _nested(value: object) -> bool:
    """Return whether a value of what made the page takes a table of its own."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list | tuple) and any(isinstance(v, Mapping | list) for v in value)


def _plain(value: object) -> str:
    """Return a value of what made the page as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value in ({}, [], ()):
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
