"""What a terminal shows."""

import io

from rich.console import Console


def shown(table, width=120):
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()
