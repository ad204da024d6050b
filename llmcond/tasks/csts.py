"""Conditional semantic textual similarity (C-STS, arXiv 2305.15093), the default task."""

from __future__ import annotations

from llmcond.tasks.rated import Task


class Csts(Task):
    """Two sentences, both under one condition, rated 1 to 5 for their similarity."""

    name = "csts"
