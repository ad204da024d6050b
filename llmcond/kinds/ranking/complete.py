"""Complete a triple of a run's knowledge graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmcond.display import Displayed
from llmcond.errors import UserError
from llmcond.kinds.ranking.completer import Completion, load_completer
from llmcond.workflows.options.ranking import CompleteOptions, TripleOptions


@dataclass(frozen=True)
class Completions(Displayed):
    """The entities that best complete a triple, and what was asked of what."""

    completions: Sequence[Completion]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {**self.about, "results": [one.to_json() for one in self.completions]}


def complete(asked: CompleteOptions) -> Completions:
    """Return the entities that best complete (head, relation, ?) or (?, relation, tail).

    Raises:
        UserError: no such run, head, entity or relation, or a run without a knowledge graph.
    """
    if (asked.head_entity is None) == (asked.tail_entity is None):
        raise UserError("give one of --head-entity and --tail-entity: the other is completed.")
    completer = load_completer(
        Path(asked.run),
        asked.head,
        prompt=asked.prompt,
        rerank=asked.rerank,
        reverse=asked.reverse,
        exclude_head=asked.exclude_head,
        device=asked.device,
    )
    found = completer.top(
        head=asked.head_entity,
        relation=asked.relation,
        tail=asked.tail_entity,
        k=asked.k,
        filtered=asked.filtered,
    )
    return Completions(found, {"head": completer.name, **asdict(asked.part(TripleOptions))})
