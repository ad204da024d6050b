"""Render tables as a terminal would."""

import io

from rich.console import Console


def render_text(table, width=120):
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()
