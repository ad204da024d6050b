"""Which kind of examples a run has."""

from __future__ import annotations

from llmcond.runs.examples import Examples
from llmcond.runs.ranking import QueryExamples
from llmcond.runs.rated import RatedExamples
from llmcond.runs.run import RankingRun, Run


def examples_of(run: Run | RankingRun) -> Examples:
    """Return the examples of a run, whose features are read when they are first asked for."""
    return QueryExamples(run) if isinstance(run, RankingRun) else RatedExamples(run)
