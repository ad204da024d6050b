"""``llmcond search``: find the texts of an index that are nearest to a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcond.commands.base import Command
from llmcond.conditions import Condition, condition_text, condition_titles
from llmcond.errors import UserError
from llmcond.log import log
from llmcond.options import Positive, option
from llmcond.workflows.options.common import CHECK_HELP, WithConditions, WithDevice

if TYPE_CHECKING:
    from llmcond.search import Hits, Index


@dataclass(frozen=True, kw_only=True)
class Search(WithConditions, WithDevice, Command):
    """Find the texts of an index that are nearest to a query under a condition."""

    position = 150
    example = "llmcond search texts.index 'Children swim in the sea.' --condition 'the place' -k 5"
    formats = True

    folder: str | Path = option(flag="", metavar="DIR", help="an index; see llmcond index")
    query: str = option(flag="", metavar="QUERY", help="a text")
    condition: Sequence[str] = option(
        metavar="C",
        repeat=True,
        help="may be repeated. Without --values it has those that llmcond index was given",
    )
    weight: Sequence[float] = option(
        (),
        metavar="W",
        repeat=True,
        help="of each condition: scores are weighted sums of cosines (default: 1 each)",
    )
    k: Positive = option(10, flag="-k", metavar="K", help="hits")
    where: str | None = option(
        None,
        metavar="FILTER",
        help='only texts for which it is true of their columns, in a small part of SQL: "kind = '
        "'news' AND year > 2020\"",
    )
    rerank: int | None = option(
        None,
        metavar="N",
        help="where the model encodes each text together with the condition: encode only the N "
        "texts nearest without it, which is not exact. The prompt has to encode texts alone as "
        "well, which the bundled model's does not",
    )
    check: bool = option(True, help=CHECK_HELP)
    explain: bool = option(
        False,
        help="show each hit's score under each condition and without one, by the encoder before "
        "any adapter; and its rank without one, if the index holds texts without a condition",
    )

    def execute(self) -> Hits:
        """Search."""
        if self.weight and len(self.weight) != len(self.condition):
            raise UserError(
                f"there are {len(self.weight)} --weight and {len(self.condition)} --condition; "
                "give one for each, in their order."
            )
        conditions = self.conditions()
        if len(set(conditions)) < len(conditions):
            raise UserError("--condition names a text twice; give it once, with a larger --weight.")
        weights = self.weight or [1.0] * len(conditions)
        from llmcond.search import Index

        index = Index.open(self.folder, device=self.device)
        hits = index.search(
            self.query,
            dict(zip(conditions, weights, strict=True)),
            self.k,
            where=self.where,
            rerank=self.rerank,
            explain=self.explain,
        )
        for one in hits.conditions:
            if isinstance(one, Condition) and one not in conditions:
                log.info(
                    f"{one.text!r} has the values that the index records: {', '.join(one.values)} "
                    "(--values '' for none)"
                )
        for guided, guide in hits.guides.items():
            log.info(
                f"{condition_text(guided)!r} follows the labels of a guide: "
                f"{', '.join(guide.labels)} ({guide.source})"
            )
        if self.explain and hits.rows:
            _report_plain(hits)
        if self.check and self.rerank is None:
            _report_checks(index, hits)
        return hits

    def show(self, result: Hits, form: str) -> None:
        """Print a table."""
        from llmcond.report.terminal import listing, show

        rows = []
        for hit in result.rows:
            kept = dict(hit)
            scores, text_id = kept.pop("explain", None), {"id": kept.pop("id")}
            row = {name: kept.pop(name) for name in ("rank", "score", "text")}
            if scores is not None:
                if len(scores["under"]) > 1:  # of one condition it is the score
                    titles = condition_titles([*scores["under"]])
                    under = zip(titles, scores["under"].values(), strict=True)
                    row |= {f"under {title}": score for title, score in under}
                others = {"without": scores["without"], "rank without": scores["rank_without"]}
                row |= {name: value for name, value in others.items() if value is not None}
            # Where a line has no room, columns are left out from the right.
            rows.append(row | kept | text_id)
        if rows:
            show(listing(rows), form)


def _report_checks(index: Index, hits: Hits) -> None:
    """Say of each condition without a guide whether it is expected to work."""
    for condition in hits.conditions:
        check = None if condition in hits.guides else index.check(condition)
        if check is not None and check.expected is not None:
            log.info(f"{condition_text(condition)}: {check.sentence()}")


def _report_plain(hits: Hits) -> None:
    """Say what the scores without a condition are, or why there are none."""
    if hits.plain is None:
        log.info(
            "there are no scores without a condition: all weights of the encoder were trained, and "
            "what they were before is not recorded"
        )
        return
    said = f"without: {hits.plain}, no condition"
    if hits.rows[0]["explain"]["rank_without"] is None:
        said += "; no ranks, for which every text would have to be encoded so"
    log.info(said)
