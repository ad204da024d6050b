"""Which kind of examples a run has."""

from __future__ import annotations

from llmcond.runs.dialogues import DialogueExamples
from llmcond.runs.examples import Examples
from llmcond.runs.ranking import QueryExamples
from llmcond.runs.rated import RatedExamples
from llmcond.runs.task_runs import DialogueRun, OpenedRun, RankingRun


def examples_of(run: OpenedRun) -> Examples:
    """Return the examples of a run, whose features are read when they are first asked for."""
    if isinstance(run, DialogueRun):
        return DialogueExamples(run)
    return QueryExamples(run) if isinstance(run, RankingRun) else RatedExamples(run)
