"""Completes one triple of a run's knowledge graph, for ``llmcond complete``."""

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
    """The entities that best complete a triple, with the query that they answer.

    Attributes:
        completions: the entities, best first.
        about: the head that ranked them and the query, as ``to_json`` returns them.

    Examples:
        >>> import llmcond
        >>> _ = llmcond.extract(task="kgc", model="minilm", run="graph")
        >>> result = llmcond.complete(
        ...     head_entity="Abbott cape", relation="is made of", run="graph", k=3
        ... )
        >>> [completion.rank for completion in result.completions]
        [1, 2, 3]
    """

    completions: Sequence[Completion]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Convert the result to a dictionary of JSON values, which ``--json`` prints.

        Returns:
            The query, with the completions under ``results``.
        """
        return {**self.about, "results": [completion.to_json() for completion in self.completions]}


def complete(options: CompleteOptions) -> Completions:
    """Rank entities that complete (head, relation, ?) or (?, relation, tail).

    Raises:
        UserError: The run, head, entity or relation does not exist, the run has no knowledge
            graph, or not exactly one entity is given.
    """
    if (options.head_entity is None) == (options.tail_entity is None):
        raise UserError("give either --head-entity or --tail-entity: the other one is completed.")
    completer = load_completer(
        Path(options.run),
        options.head,
        prompt=options.prompt,
        rerank=options.rerank,
        reverse=options.reverse,
        exclude_head=options.exclude_head,
        device=options.device,
    )
    completions = completer.top(
        head=options.head_entity,
        relation=options.relation,
        tail=options.tail_entity,
        k=options.k,
        filtered=options.filtered,
    )
    return Completions(
        completions, {"head": completer.name, **asdict(options.select(TripleOptions))}
    )
