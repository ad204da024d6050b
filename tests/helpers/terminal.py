"""Render tables as a terminal would."""

import io

from rich.console import Console

from llmcond.base.output import Table


def render_text(table, width=120):
    """Return a ``Table``, or a renderable of rich, as lines of this width."""
    out = io.StringIO()
    if isinstance(table, Table):
        table, _ = table.terminal()
    Console(file=out, width=width).print(table)
    return out.getvalue()
