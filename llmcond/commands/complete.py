"""``llmcond complete``: the entities that best complete a triple of a knowledge graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmcond.commands.base import verb
from llmcond.commands.shared import WithHead
from llmcond.errors import UserError
from llmcond.options import option
from llmcond.workflows.options import GraphOptions

if TYPE_CHECKING:
    from llmcond.runs.completer import Completion


@dataclass(frozen=True)
class Completions:
    """The entities that best complete a triple, and what was asked by what."""

    completions: Sequence[Completion]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {**self.about, "results": [one.to_json() for one in self.completions]}


@dataclass(frozen=True, kw_only=True)
class Complete(WithHead, GraphOptions):
    """Complete a triple of a run's knowledge graph: the entities that fit best."""

    example: ClassVar[str] = (
        "llmcond complete --run runs/wn18rr --head-entity 02084071 --relation _hypernym"
    )
    formats: ClassVar[bool] = True

    head_entity: str | None = option(
        None, metavar="E", help="id or name: complete (E, relation, ?)"
    )
    tail_entity: str | None = option(
        None, metavar="E", help="id or name: complete (?, relation, E)"
    )
    relation: str = option(metavar="REL", help="id or name")
    k: int = option(10, flag="-k", metavar="K", help="how many entities")
    filtered: bool = option(True, help="leave out what some split of the data has")
    exclude_head: bool = option(True, help="leave out the entity that is asked of")

    def execute(self) -> Completions:
        """Rank all entities."""
        if (self.head_entity is None) == (self.tail_entity is None):
            raise UserError("give one of --head-entity and --tail-entity: the other is completed.")
        from llmcond.runs.completer import load_completer

        completer = self.call(load_completer)
        found = completer.top(
            head=self.head_entity,
            relation=self.relation,
            tail=self.tail_entity,
            k=self.k,
            filtered=self.filtered,
        )
        asked = ("head_entity", "relation", "tail_entity", "filtered", "rerank", "reverse")
        about = {name: getattr(self, name) for name in (*asked, "exclude_head")}
        return Completions(found, {**about, "head": completer.name})

    def show(self, result: Completions, form: str) -> None:
        """Print a table."""
        from llmcond.log import log
        from llmcond.report.terminal import listing, show

        log.info(f"by {result.about['head']}")
        if not result.completions:
            log.info("no entity is left: all that there are complete it in the data already")
        show(listing([one.to_json() for one in result.completions]), form)


complete = verb(Complete)
