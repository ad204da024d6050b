"""Commands for texts under conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcond.base.errors import UserError
from llmcond.base.files import PAGE_SUFFIXES, check_figure
from llmcond.base.options import option
from llmcond.base.text import check_text, condition_json
from llmcond.commands.base import RESUMES, REUSES_VECTORS, Command, as_function
from llmcond.options.common import ConditionOptions, EmbedderOptions, condition_option
from llmcond.options.texts import (
    AnnotateOptions,
    AnswersOptions,
    CheckConditionOptions,
    ClusterOptions,
    EmbedOptions,
)

if TYPE_CHECKING:
    from llmcond.clustering import ClusterResult
    from llmcond.runs.similarity import Explanation
    from llmcond.workflows.annotate import AnnotationResult
    from llmcond.workflows.answers import AnswersResult
    from llmcond.workflows.check import ConditionChecks
    from llmcond.workflows.embed import EmbedResult


@dataclass(frozen=True)
class Similarities:
    """The similarity of two sentences under each condition, and the model that computed it.

    Attributes:
        conditions: the conditions.
        values: the similarity under each condition.
        about: description of the run, encoder and head, for ``--json``.
    """

    conditions: Sequence[str]
    values: Sequence[float]
    about: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per condition."""
        return [
            {**condition_json(condition), "similarity": round(value, 6)}
            for condition, value in zip(self.conditions, self.values, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``--json`` prints."""
        return {"similarities": self.rows(), **self.about}


@dataclass(frozen=True, kw_only=True)
class Similarity(ConditionOptions, EmbedderOptions, Command):
    """Compare two sentences under conditions."""

    example = (
        "llmcond similarity 'A man rides a horse.' 'A girl cycles.' --condition 'the activity'"
    )
    formats = True

    sentence1: str = option(
        flag="",
        metavar="SENTENCE1",
        check=lambda text: check_text(text, "the first sentence", "Give a text."),
        help="first sentence",
    )
    sentence2: str = option(
        flag="",
        metavar="SENTENCE2",
        check=lambda text: check_text(text, "the second sentence", "Give a text."),
        help="second sentence",
    )
    condition: Sequence[str] = condition_option(
        "condition to compare the sentences under; may be repeated"
    )

    def execute(self) -> Similarities:
        """Encode both sentences under every condition, and compare them."""
        from llmcond.base.output import log
        from llmcond.runs import cross, open_run
        from llmcond.runs.embedder import describe, find_unfamiliar_conditions
        from llmcond.runs.similarity import report_foreign_texts

        conditions, arguments = self.conditions(), self.model_arguments()
        n = len(conditions)
        texts = [self.sentence1] * n, [self.sentence2] * n, conditions
        loaded = cross.load_similarity_model(**arguments)
        report_foreign_texts([self.sentence1, self.sentence2], loaded.encoder.resolved.checkpoint)
        if isinstance(loaded, cross.CrossEncoder):
            values = loaded.similarity(*texts)
            return Similarities(conditions, values.tolist(), cross.describe(loaded))
        run = open_run(arguments["run"])
        for text, nearest in find_unfamiliar_conditions(run, loaded, conditions).items():
            log.warning(
                f"the condition {text!r} is unlike those that {loaded.name} was fitted on (the "
                f"nearest is {nearest!r}), so its similarities may be unreliable. Use --head none "
                "for zero-shot"
            )
        values = loaded.similarity(*texts)
        return Similarities(conditions, values.tolist(), describe(loaded))

    def show(self, result: Similarities, form: str) -> None:
        """Print a table."""
        from llmcond.base.output import Table

        rows = result.rows()
        columns = ["condition", "values", "similarity"]
        if not any("values" in row for row in rows):
            columns.remove("values")
        rows = [{**row, "values": ", ".join(row.get("values", ()))} for row in rows]
        Table.of_rows(rows, columns).print(form)


@dataclass(frozen=True, kw_only=True)
class Explain(ConditionOptions, EmbedderOptions, Command):
    """Show which tokens of a sentence count under conditions.

    With a router, these are the weights that the embedding is computed with. With --to, they are
    contributions to the similarity: exact for routed pooling without a fitted head, otherwise the
    fall of the similarity if the sentence is encoded without the token (leave-one-out). Without a
    router and without --to, they say how far the embedding moves without the token.
    """

    example = "llmcond explain 'A man rides a horse.' --condition 'the activity' --out tokens.html"
    formats = True

    sentence: str = option(flag="", metavar="SENTENCE", help="sentence whose tokens are shown")
    condition: Sequence[str] = condition_option(
        "condition to embed the sentence under; may be repeated"
    )
    to: str | None = option(
        None,
        metavar="SENTENCE",
        help="second sentence, whose similarity to the first one is explained (default: explain "
        "the embedding)",
    )
    out: str | Path | None = option(
        None,
        metavar="FIGURE",
        writes=partial(check_figure, pages=PAGE_SUFFIXES),
        help="figure to write: .html, .svg, .png or .pdf; its numbers are written next to it, as "
        "FIGURE-data.csv",
    )

    def execute(self) -> Explanation:
        """Explain the embedding of the sentence, or its similarity to another sentence.

        Returns:
            An ``Explanation`` with the values of the tokens under each condition, and the name of
            its method.

        Raises:
            UserError: a text is empty, the sentence has only one token, the figure cannot be
                written, or the run has no embeddings of sentences.
            LlmcondError: the encoder fails.

        Examples:
            >>> import llmcond
            >>> explanation = llmcond.explain(sentence="A dog runs.", condition=["the animal"])
            >>> explanation.method
            'leave-one-out'
            >>> max(explanation.rows(), key=lambda row: row["contribution"])["token"]
            'dog'
        """
        from llmcond.report.analyses import write_explanation
        from llmcond.runs import cross

        model = cross.load_similarity_model(**self.model_arguments())
        explanation = model.explain(self.sentence, self.conditions(), to=self.to)
        if self.out is not None:
            write_explanation(explanation, Path(self.out))
        return explanation

    def show(self, result: Explanation, form: str) -> None:
        """Print a table of the tokens."""
        from llmcond.report.analyses import show_explanation

        show_explanation(result, form)


explain = as_function(Explain)


@dataclass(frozen=True, kw_only=True)
class Embed(EmbedOptions, Command):
    """Embed each row of a source, and write the embeddings.

    If --out names a file, the source is read into memory. If it names a folder or a Lance dataset,
    the embeddings are written part by part, and .parquet and .lance sources are read part by part,
    so that they may be larger than memory.
    """

    example = "llmcond embed texts.csv --out vectors.parquet --condition-text 'the activity'"
    if_interrupted = (
        "parts written to a folder or dataset are kept, and the same command resumes; "
        f"{REUSES_VECTORS}"
    )

    def execute(self) -> EmbedResult:
        """Embed the rows.

        Returns:
            An ``EmbedResult``: ``out``, the number of ``rows``, the dimension ``dim``, and the head
            and prompt.

        Raises:
            UserError: an option is invalid, the source cannot be read or has an empty text, or
                ``out`` holds something else.
            DiskFullError: the disk is full; parts written to a folder or dataset are kept.
            LlmcondError: the encoder fails.

        Examples:
            >>> import llmcond
            >>> rows = [{"text": "A man rides a horse."}, {"text": "A girl reads."}]
            >>> result = llmcond.embed(texts=rows, out="vectors.npy", condition_text="the hobby")
            >>> result.rows, result.dim
            (2, 384)
        """
        if self.is_streamed:
            from llmcond.workflows.embed_stream import embed_stream

            return embed_stream(self)
        if self.scale is not None:
            raise UserError(
                f"--scale needs --out FOLDER, and {self.out} is a file. Name a folder or a .lance "
                "dataset, or leave out --scale. --workers N shares the work on this machine."
            )
        from llmcond.workflows.embed import embed_file

        return embed_file(self)


embed = as_function(Embed)


@dataclass(frozen=True, kw_only=True)
class Cluster(ClusterOptions, Command):
    """Cluster texts under one or more conditions."""

    example = (
        "llmcond cluster texts.csv --condition 'the topic' --out clusters.csv --report map.html"
    )
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> ClusterResult:
        """Cluster the texts.

        Returns:
            A ``ClusterResult`` with one ``Clustering`` for each condition: the cluster of each
            text, and the keywords and examples of each cluster.

        Raises:
            UserError: an option is invalid, or the texts, labels or guide cannot be read.
            LlmcondError: the encoder fails.

        Examples:
            >>> import llmcond
            >>> texts = ["A dog runs.", "A dog sleeps.", "A horse runs.", "A horse sleeps."]
            >>> result = llmcond.cluster(texts=texts, condition="the animal", clusters=2)
            >>> result.clusterings[0].labels.shape
            (4,)
        """
        from llmcond.workflows.cluster import cluster

        return cluster(self)

    def show(self, result: ClusterResult, form: str) -> None:
        """Print the clusters, and their agreement with known labels."""
        from llmcond.clustering import cluster_tables

        for table in cluster_tables(result):
            table.print(form)


cluster = as_function(Cluster)


@dataclass(frozen=True, kw_only=True)
class CheckCondition(CheckConditionOptions, Command):
    """Compare conditions on texts, and measure by a few answers how well they work.

    Without answers, the command shows which conditions have nearly the same nearest texts, and
    which texts a condition brings together. With --ask, --judge or --labels, it measures
    how well the embeddings agree with answers to "same in this respect?", for each wording of the
    condition, with and without what is ignored, and for the encoder without a condition. At most
    200 texts are sampled, and answers need at least 20.
    """

    example = "llmcond check-condition texts.csv --condition 'the topic' --ask --out answers.csv"
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> ConditionChecks:
        """Check the conditions.

        Returns:
            ``ConditionChecks`` with one check for each condition: its common neighbours with the
            others, examples, and the figures of each way to compare the texts.

        Raises:
            UserError: an option, a text, a label or an answer is invalid, there is no terminal to
                ask in, or the server rejects a request.
            LlmcondError: the encoder or the server fails.

        Examples:
            >>> import llmcond
            >>> texts = [f"A {pet} has {n} toys." for pet in ("dog", "cat") for n in range(10)]
            >>> result = llmcond.check_condition(
            ...     texts=texts,
            ...     condition="the animal",
            ...     ask=lambda first, second, condition: first[2:5] == second[2:5],
            ... )
            >>> result.checks[0].same + result.checks[0].different
            20
            >>> [ranking.name for ranking in result.checks[0].rankings]
            ['the animal', 'no condition']
        """
        from llmcond.workflows.check import check_condition

        return check_condition(self)

    def show(self, result: ConditionChecks, form: str) -> None:
        """Print which conditions are alike, some examples, and the figures."""
        from llmcond.base.output import Table, print_sentences
        from llmcond.workflows.check import count_nearest, summarise

        print_sentences(summarise(result), form)
        if neighbours := result.neighbour_rows():
            n = count_nearest(min(check.n_texts for check in result.checks))
            note = f"Common neighbours: percentage of the {n} nearest texts that are the same"
            Table.of_rows(neighbours, note=note).print(form)
        if examples := result.example_rows():
            note = "Texts that are near under the condition, and far without it"
            Table.of_rows(examples, note=note).print(form)
        if scores := result.ranking_rows():
            note = (
                "Agreement with the answers, in percent, with 95 % intervals over pairs or texts; "
                "50 is chance"
            )
            Table.of_rows(scores, note=note).print(form)


check_condition = as_function(CheckCondition)


@dataclass(frozen=True, kw_only=True)
class Annotate(AnnotateOptions, Command):
    """Rate sentence pairs under conditions with a language model.

    The model runs on a server with OpenAI's chat protocol. The environment variable OPENAI_API_KEY
    holds its key, if it needs one. Each answer is stored when it arrives, so that the same command
    resumes after an interruption.
    """

    example = (
        "llmcond annotate my.csv --endpoint http://localhost:8000/v1 --model NAME --out rated.csv"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> AnnotationResult:
        """Rate the rows.

        Returns:
            An ``AnnotationResult``: the file, the numbers of rows, questions and tokens, the cost,
            and the agreement with ratings that the data already had.

        Raises:
            UserError: an option, the data or a prompt is invalid, the server rejects the requests,
                or you decline the estimated cost.
            LlmcondError: the server fails, after all retries.

        Examples:
            >>> import llmcond
            >>> result = llmcond.annotate(  # doctest: +SKIP
            ...     data="my.csv",
            ...     endpoint="http://localhost:8000/v1",
            ...     model="NAME",
            ...     out="rated.csv",
            ... )
        """
        from llmcond.workflows.annotate import annotate

        return annotate(self)

    def show(self, result: AnnotationResult, form: str) -> None:
        """Print the agreement with the ratings of the data, if it has any."""
        if result.agreement is not None:
            from llmcond.report.tables import show_agreement

            show_agreement(result.agreement, result.model, form)


annotate = as_function(Annotate)


@dataclass(frozen=True, kw_only=True)
class Answers(AnswersOptions, Command):
    """Ask a language model what texts say about conditions, in a few words.

    The table has an answer for each text and condition, which is empty if the text does not mention
    the condition. People can edit it, and embed, cluster and index read it. The model runs on
    a server with OpenAI's chat protocol. The environment variable OPENAI_API_KEY holds its key, if
    it needs one. Each answer is stored when it arrives, so that the same command resumes after an
    interruption.
    """

    example = (
        "llmcond answers texts.csv --condition 'the topic' --server http://localhost:8000/v1 "
        "--out answers.csv"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> AnswersResult:
        """Ask for the answers that the table lacks.

        Returns:
            An ``AnswersResult``: the table, the number of texts with each answer, and the numbers
            of questions and tokens.

        Raises:
            UserError: an option, the texts, the table or a prompt is invalid, the server rejects
                the requests, the budget is spent, or you decline the estimated cost.
            LlmcondError: the server fails, after all retries.

        Examples:
            >>> import llmcond
            >>> result = llmcond.answers(  # doctest: +SKIP
            ...     texts=["A dog runs.", "A cat sleeps."],
            ...     condition="the animal",
            ...     server="http://localhost:8000/v1",
            ...     out="answers.csv",
            ... )
        """
        from llmcond.workflows.answers import answers

        return answers(self)

    def show(self, result: AnswersResult, form: str) -> None:
        """Print the most frequent answers under each condition."""
        from llmcond.base.output import Table
        from llmcond.data.answers import NOT_MENTIONED

        rows = [
            {"condition": condition, "answer": answer or NOT_MENTIONED, "texts": n}
            for condition, counts in result.counts.items()
            for answer, n in list(counts.items())[:_MOST_ANSWERS]
        ]
        Table.of_rows(rows, ("condition", "answer", "texts")).print(form)


#: The most answers under a condition that are printed.
_MOST_ANSWERS = 10

answers = as_function(Answers)
