"""A page of results as one HTML file that needs no network, and its charts as figures."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcond.base.errors import UserError, install_command
from llmcond.base.files import PAGE_SUFFIXES, check_figure, check_output, replace_atomically
from llmcond.base.metrics import finite_or_none, get_metric
from llmcond.base.output import log
from llmcond.data.rows import Rows
from llmcond.report.content import (
    SUBSET_TITLES,
    Page,
    subsets_table,
)
from llmcond.report.figures import plot_intervals, plot_isotropy, plot_predictions, plot_steps
from llmcond.report.tables import (
    MINUS,
    axis_label,
    differences_table,
    factors_text,
    interval_notes,
    isotropy_table,
    results_table,
    sentences_text,
)

if TYPE_CHECKING:
    import jinja2

_FOLDER = Path(__file__).parent


def check_page(path: Path) -> None:
    """Check, before hours of work, that a page can be written.

    Raises:
        UserError: the path cannot be written or is no HTML file, or a library is not installed.
    """
    check_output(path, PAGE_SUFFIXES)
    if any(find_spec(name) is None for name in ("altair", "jinja2", "vl_convert")):
        raise UserError(
            "HTML reports need Altair, Jinja and vl-convert, which are not all installed. Install "
            f"them: {install_command('report')}."
        )


def write_page(page: Page, path: Path) -> None:
    """Write a self-contained page of results to a path that ``check_page`` accepts."""
    from llmcond.report.charts import (
        difference_chart,
        head_chart,
        javascript_bundle,
        page_data,
    )

    data, heads = page_data(page), head_chart(page)
    if heads:
        data["charts"]["heads"] = heads[0]
    forest = difference_chart(page)
    if forest:
        data["charts"]["differences"] = forest
    first = page.results[0]
    has_interval = [finite_or_none(result.main.low) is not None for result in page.results]
    write_html(
        path,
        _FOLDER / "page.html.j2",
        [javascript_bundle(), (_FOLDER / "page.js").read_text("utf-8")],
        "",
        data,
        page=page,
        counts=f"{first.split}: {first.counts.text}. {sentences_text(first)}",
        primary=first.primary,
        factors=factors_text([get_metric(name) for name in first.metrics]),
        notes=interval_notes(page.results),
        intervals="all" if all(has_interval) else "some" if any(has_interval) else "",
        results=results_table(page.results),
        differences=differences_table(page.results),
        parts={
            title: subsets_table(kind, page.results)
            for kind, title in SUBSET_TITLES.items()
            if kind in first.subsets
        },
        heads=heads and heads[1],
        forest=forest is not None,
        isotropy=isotropy_table(page.isotropy) if page.isotropy else None,
    )


def write_html(
    path: Path, template: Path, scripts: Sequence[str], style: str, data: object, **values: Any
) -> None:
    """Write a self-contained page, whose policy allows only the scripts in it and no requests.

    Args:
        path: the HTML file to write.
        template: the Jinja template; the values in it are escaped.
        scripts: the page's scripts, in addition to that of the ``theme`` button.
        style: the page's CSS, in addition to that of all pages.
        data: the data for the scripts, written as JSON.
        values: the template's variables, in addition to ``data``, ``policy``, ``style`` and
            ``scripts``.
    """
    from markupsafe import Markup

    environment = page_templates(template.parent)
    json = {"allow_nan": False, "separators": (",", ":")}
    environment.policies["json.dumps_kwargs"] = json
    environment.tests["nested"] = _is_nested
    environment.filters["plain"] = _format_value
    environment.filters["typeset"] = _typeset
    page_scripts = [
        _escape_script(text) for text in (*scripts, (_FOLDER / "theme.js").read_text("utf-8"))
    ]
    text = environment.get_template(template.name).render(
        **values,
        data=data,
        policy=_make_policy(page_scripts),
        style=Markup((_FOLDER / "page.css").read_text("utf-8") + style),  # noqa: S704
        scripts=[Markup(script) for script in page_scripts],  # noqa: S704
    )
    # A lone surrogate cannot be encoded; it is written as an escape, so that the run does not fail.
    content = f"{text.lstrip()}\n".encode("utf-8", "backslashreplace")
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content)
    log.info(f"report -> {path}")


def page_templates(folder: Path) -> jinja2.Environment:
    """Return a Jinja environment of a folder's templates, which escape their values."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def csp_source(text: str) -> str:
    """Return the hash source of a script or style for a Content Security Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _make_policy(scripts: Sequence[str]) -> str:
    """Return a Content Security Policy that allows only these scripts and no requests."""
    return (
        f"default-src 'none'; script-src {' '.join(map(csp_source, scripts))}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _escape_script(text: str) -> str:
    """Escape a script so that the HTML parser neither ends it early nor changes it."""
    return text.replace("\r\n", "\n").replace("</script", r"<\/script").replace("<!--", r"<\!--")


def _typeset(text: str) -> str:
    """Give numbers minus signs, and keep them and their units on one line."""
    signed = re.sub(r"(?<![\w-])-(?=\d)", MINUS, text)
    return re.sub(r"(?<=\d) (?=%)|(?<=\bp) (?=< \d)|(?<=p <) (?=\d)", "\u00a0", signed)


def _is_nested(value: object) -> bool:
    """Return whether a value of the page's provenance is shown as a nested table."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list | tuple) and any(isinstance(v, Mapping | list) for v in value)


def _format_value(value: object) -> str:
    """Format a value of the page's provenance as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value in ("", {}, [], ()):
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(_format_value(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


#: The names of the figures, without suffix.
FIGURES = ("scores", "differences", "predictions", "isotropy", "steps")


def check_figures(folder: Path, form: str) -> None:
    """Check, before hours of work, that all figures can be written.

    Raises:
        UserError: a file cannot be written, or a library is not installed.
    """
    for name in FIGURES:
        check_figure(folder / f"{name}.{form}")


def write_figures(page: Page, folder: Path, form: str) -> None:
    """Write the charts of a page as figures, each with its numbers as CSV.

    Scores and differences to the baseline have their intervals. For rated pairs there are also
    predictions against ratings and isotropy, and for heads that are trained in steps their learning
    curves. A figure without content is not written.

    Args:
        page: the page.
        folder: the folder to write to.
        form: the suffix of the files, one of png, svg and pdf.
    """
    from llmcond.report.charts import interval_rows

    def path(name: str) -> Path:
        return folder / f"{name}.{form}"

    metric = page.results[0].primary
    seeds = " and seeds" if any(len(result.seeds) > 1 for result in page.results) else ""
    interval = f"95 % confidence interval over rows{seeds}"
    plot_intervals(interval_rows(page), path("scores"), axis_label(metric), interval)
    plot_intervals(
        interval_rows(page, differences=True),
        path("differences"),
        f"difference to the baseline, {axis_label(metric)}",
        "95 % confidence interval of this paired difference over rows and seeds, not corrected for "
        "several comparisons",
        reference=0.0,
    )
    if page.systems and isinstance(page.rows, Rows) and page.rows.rated.any():
        _plot_predictions(page, page.rows, path("predictions"))
    if page.isotropy:
        plot_isotropy(page.isotropy, path("isotropy"))
    if any(fit.get("curve") for result in page.results for fit in result.fits):
        plot_steps(page.results, path("steps"))


def _plot_predictions(page: Page, rows: Rows, path: Path) -> None:
    from llmcond.evaluation.analyses import calibration

    low, high = page.scale
    rating = low + (high - low) * rows.rating
    systems = {}
    for name in filter(None, page.initial_systems()):
        similarity = page.mean_prediction(name)
        scored = rows.rated & np.isfinite(similarity)
        systems[name] = calibration(similarity[scored], rating[scored])
    plot_predictions(systems, page.scale, path)
