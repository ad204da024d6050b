"""Commands that build, search and serve an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from llmcond.base.errors import UserError, format_list, shortened_repr
from llmcond.base.options import Positive, check_source, option
from llmcond.base.output import log
from llmcond.base.text import (
    Condition,
    as_condition,
    combine_values,
    condition_key,
    condition_text,
    condition_titles,
    ignored_by,
    ignoring,
)
from llmcond.commands.base import RESUMES, Command, as_function
from llmcond.data.readers import FILES
from llmcond.options.common import (
    VALUES_HELP,
    DeviceOption,
    EmbedderOptions,
    GuideOption,
    IgnoreOption,
    RangesOption,
    TruncateOption,
    condition_option,
)
from llmcond.options.texts import MENTIONS_HELP, IndexOptions
from llmcond.serving.settings import ServedSource, ServerSettings

if TYPE_CHECKING:
    from llmcond.search import Hits
    from llmcond.serving.server import ServeResult
    from llmcond.workflows.index import IndexResult


@dataclass(frozen=True, kw_only=True)
class IndexTexts(IndexOptions, Command):
    """Create an index of texts for searching, or update an existing index.

    A text replaces the text that has the same id. If both are equal, nothing is computed, so that
    the same command resumes after an interruption.
    """

    example = "llmcond index texts.csv --out texts.index --condition 'the place'"
    if_interrupted = RESUMES

    def execute(self) -> IndexResult:
        """Create or update the index.

        Raises:
            UserError: there is no index and no text, or an option is invalid.
        """
        if self.texts is None and not Path(self.out, "index.json").exists():
            raise UserError(f"there is no index at {self.out}. Name TEXTS to create one.")
        if self.texts is None and not (
            self.condition or self.delete or self.run or self.guide is not None
        ):
            raise UserError("there is nothing to do. Name TEXTS, --condition or --delete.")
        if not (isinstance(self.guide, str) and self.guide == "none"):
            check_source(self.guide, FILES)
        from llmcond.workflows.index import index_texts

        return index_texts(self)


@dataclass(frozen=True, kw_only=True)
class Search(IgnoreOption, DeviceOption, Command):
    """Find the texts of an index that are nearest to a query under a condition."""

    example = "llmcond search texts.index 'Children swim in the sea.' --condition 'the place' -k 5"
    formats = True

    folder: str | Path = option(
        flag="", metavar="DIR", help="folder of an index, written by `llmcond index`"
    )
    query: str = option(flag="", metavar="QUERY", help="text to search for")
    condition: Sequence[str] = condition_option(
        "condition to search under; may be repeated. Without --values it has the values that the "
        "index records",
        (),
    )
    weight: Sequence[str] = option(
        (),
        metavar="CONDITION=W",
        repeat=True,
        help="condition to search under with its weight in the score, a weighted sum of cosines, "
        "such as 'the place=0.5'; may be repeated, and each --condition without it has the weight "
        "1. A negative weight moves down the texts that are similar under that condition",
    )
    k: Positive = option(10, flag="-k", metavar="K", help="number of hits")
    where: str | None = option(
        None,
        metavar="FILTER",
        help="filter on the columns of the texts, in a subset of SQL, such as "
        "\"kind = 'news' AND year > 2020\"",
    )
    rerank: int | None = option(
        None,
        help="number of texts to encode with the condition: those nearest to the query without "
        "it, which is approximate. This is for models that encode each text together with the "
        "condition, and whose prompt also encodes texts alone, unlike the bundled model's "
        "(default: all texts)",
    )
    explain: bool = option(
        False,
        help="show each hit's score under each condition and without one (by the encoder without "
        "adapters), and its rank without one if the index holds texts without a condition",
    )
    mentions: bool = option(False, help=f"show for each hit the {MENTIONS_HELP}")

    def execute(self) -> Hits:
        """Search the index.

        Raises:
            UserError: an option is invalid, or there is no such index.
        """
        conditions = self.conditions()
        if not conditions:
            raise UserError("there is no condition. Give --condition or --weight.")
        weights = {key: weight for key, (_, weight) in self._weighted().items()}
        from llmcond.runs.similarity import report_foreign_texts
        from llmcond.search import Index

        index = Index.open(self.folder, device=self.device)
        hits = index.search(
            self.query,
            {one: weights.get(condition_key(condition_text(one)), 1.0) for one in conditions},
            self.k,
            where=self.where,
            rerank=self.rerank,
            explain=self.explain,
            mentions=self.mentions,
        )
        report_foreign_texts([self.query], index.embedder.encoder.resolved.checkpoint)
        _report_conditions(hits, conditions)
        if self.explain and hits.rows:
            _report_unconditional_scores(hits)
        return hits

    @override
    def conditions(self) -> list[str]:
        """Return the conditions of ``--condition``, then those that only ``--weight`` names.

        Raises:
            UserError: as ``IgnoreOption.conditions``, or a weight has another form.
        """
        combined = combine_values(self.condition, self.values)
        known = {condition_key(condition_text(one)) for one in combined}
        added = [one for key, (one, _) in self._weighted().items() if key not in known]
        return self.add_ignored([*combined, *added])

    def _weighted(self) -> dict[str, tuple[str, float]]:
        """Return the conditions of ``--weight`` and their weights, by ``condition_key``."""
        weighted: dict[str, tuple[str, float]] = {}
        for text in self.weight:
            name, equals, number = text.rpartition("=")
            try:
                weight = float(equals and number)
            except ValueError:
                raise UserError(
                    f"--weight is {shortened_repr(text)}; expected CONDITION=NUMBER, such as "
                    "'the place=0.5'."
                ) from None
            condition = as_condition(name, "the condition of --weight")
            key = condition_key(condition)
            if key in weighted:
                raise UserError(f"--weight names {condition!r} twice. Give it one weight.")
            weighted[key] = condition, weight
        return weighted

    def show(self, result: Hits, form: str) -> None:
        """Print a table."""
        from llmcond.base.output import Table

        rows = []
        for hit in result.rows:
            columns = dict(hit)
            scores, text_id = columns.pop("explain", None), {"id": columns.pop("id")}
            row = {name: columns.pop(name) for name in ("rank", "score", "text")}
            mentions = columns.pop("mentions", {}) if self.mentions else {}
            for title, score in zip(condition_titles([*mentions]), mentions.values(), strict=True):
                row["mentions" if len(mentions) == 1 else f"mentions {title}"] = score
            if scores is not None:
                if len(scores["under"]) > 1:  # With one condition, this is the hit's score.
                    titles = condition_titles([*scores["under"]])
                    under = zip(titles, scores["under"].values(), strict=True)
                    row |= {f"under {title}": score for title, score in under}
                unconditional = {
                    "without": scores["without"],
                    "rank without": scores["rank_without"],
                }
                row |= {name: value for name, value in unconditional.items() if value is not None}
            # A table that is too wide loses its last columns.
            rows.append(row | columns | text_id)
        if rows:
            Table.of_rows(rows).print(form)


def _report_conditions(hits: Hits, conditions: Sequence[str]) -> None:
    """Log what the index adds to the conditions of the command."""
    for condition in hits.conditions:
        if isinstance(condition, Condition) and condition.values and condition not in conditions:
            log.info(
                f"{condition.text!r} has the values that the index records: "
                f"{', '.join(condition.values)} (--values '' for none)"
            )
    for guided, guide in hits.guides.items():
        if guide.labels:
            log.info(
                f"{condition_text(guided)!r} is guided by labelled texts: "
                f"{', '.join([*guide.labels][:20])}{', …' * (len(guide.labels) > 20)} "
                f"({guide.source})"
            )
        columns = [name for name in guide.all_ignored if name not in ignored_by(guided)]
        if columns:
            log.info(f"{condition_text(guided)!r} ignores the column {format_list(columns)}")


def _report_unconditional_scores(hits: Hits) -> None:
    """Log how the scores without a condition are computed, or why there are none."""
    if hits.plain is None:
        log.info(
            "there are no scores without a condition: all weights of the encoder were trained, and "
            "the original ones are not recorded"
        )
        return
    explanation = f"without: {hits.plain}, no condition"
    if hits.rows[0]["explain"]["rank_without"] is None:
        explanation += "; no ranks, because they need every text encoded without a condition"
    log.info(explanation)


@dataclass(frozen=True, kw_only=True)
class Serve(GuideOption, EmbedderOptions, TruncateOption, RangesOption, ServerSettings, Command):
    """Serve embeddings, similarity, reranking and search over HTTP.

    The protocol is OpenAI's embeddings API with a condition added. The server does not encrypt: to
    serve other machines, put it behind a proxy that does.
    """

    example = "llmcond serve --port 8000 --condition 'the activity'"

    index: str | Path | None = option(
        None,
        metavar="DIR",
        conflicts="--guide",
        help="index to search, written by `llmcond index`; the server uses its model and guides",
    )
    condition: str | None = option(
        None,
        metavar="C",
        help="condition of requests that do not name one (default: reject such requests)",
    )
    values: str | None = option(None, metavar="VALUES", needs="--condition", help=VALUES_HELP)
    ignore: Sequence[str] = option(
        (),
        metavar="TEXT",
        repeat=True,
        needs="--index",
        help="condition that --condition ignores, in the texts of the index; may be repeated",
    )

    def execute(self) -> ServeResult:
        """Serve until the process gets SIGTERM or Ctrl-C.

        Returns:
            A ``ServeResult``: the server's URL, the model, the number of requests, and how many
            seconds it ran.

        Raises:
            UserError: the extra ``serve`` is not installed, the port is in use, or the model, index
                or keys cannot be read.
            LlmcondError: the model cannot be loaded, or fails to encode a text.

        Examples:
            >>> import llmcond
            >>> llmcond.serve(port=8000, condition="the activity")  # doctest: +SKIP
        """
        condition = self.condition
        if condition is None and self.ignore:
            raise UserError("--ignore needs --condition: name what requests ask for by default.")
        if condition is not None and condition.strip():
            condition = as_condition(condition)
            if self.values is not None:
                condition = Condition(str(condition), self.values)
            condition = ignoring(condition, (as_condition(one, "--ignore") for one in self.ignore))
        from llmcond.serving.server import serve

        return serve(replace(self.select(ServedSource), condition=condition), self)


serve = as_function(Serve)
