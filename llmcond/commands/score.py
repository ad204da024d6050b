"""Commands that score, compare and explain heads, complete graphs, and reply to dialogues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcond.commands.base import RESUMES, REUSES_VECTORS, Command, as_function
from llmcond.options.scoring import (
    AnalyseOptions,
    ComparePromptsOptions,
    CompareSystemsOptions,
    CompleteOptions,
    EvaluateOptions,
    ReplyOptions,
)

if TYPE_CHECKING:
    from llmcond.evaluation.results import Results
    from llmcond.kinds.dialogue.reply import Replies
    from llmcond.kinds.ranking.complete import Completions
    from llmcond.workflows.compare import Comparison, SystemComparison
    from llmcond.workflows.evaluate import AnalysisResult


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluateOptions, Command):
    """Score a run's heads, with zero-shot for comparison."""

    example = "llmcond evaluate --head mlp --split dev --json"
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> Results:
        """Score the heads.

        Returns:
            ``Results``, one ``Result`` for each head and for zero-shot: its metrics, with 95 %
            confidence intervals.

        Raises:
            UserError: there is no such run, head or split, or the data has no rated rows.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> results = llmcond.evaluate(split="train")
            >>> [(result.head, result.subtract) for result in results]
            [('none', False), ('none', True)]
        """
        from llmcond.workflows.evaluate import evaluate

        return evaluate(self)

    def show(self, result: Results, form: str) -> None:
        """Print a table."""
        from llmcond.report.tables import results_table

        results_table(result, self.run).print(form)


evaluate = as_function(Evaluate)


@dataclass(frozen=True, kw_only=True)
class Compare(CompareSystemsOptions, Command):
    """Compare heads, encoders or runs on the same rows, with paired statistics.

    The runs must have the same task and the same rows in the scored split.
    """

    example = "llmcond compare runs/default:linear runs/default:mlp --split dev --report page.html"
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> SystemComparison:
        """Compare the systems.

        Returns:
            A ``SystemComparison`` with one ``Result`` for each system: its metrics, and their
            difference to the baseline with a confidence interval.

        Raises:
            UserError: a run or head does not exist, the heads of a system differ in more than their
                seed, or the runs have different tasks or rows.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(20)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> prompts = ["concat-sent-cond", "routed"]
            >>> extracted = llmcond.extract(model="minilm", data=rows, run="pets", prompt=prompts)
            >>> comparison = llmcond.compare(
            ...     systems=["pets:none@concat-sent-cond", "pets:none@routed"], split="train"
            ... )
            >>> comparison.baseline
            'pets:none@concat-sent-cond'
        """
        from llmcond.workflows.compare import compare_systems

        return compare_systems(self)

    def show(self, result: SystemComparison, form: str) -> None:
        """Print a summary in words, then a table, and a table of all differences."""
        from llmcond.base.output import print_sentences
        from llmcond.report.tables import differences_table, results_table, summary

        print_sentences(summary(result.results, result.baseline), form)
        results_table(result.results).print(form)
        differences = differences_table(result.results)
        if differences is not None:
            differences.print(form)


compare = as_function(Compare)


@dataclass(frozen=True, kw_only=True)
class Analyse(AnalyseOptions, Command):
    """Explain heads: isotropy, condition clusters, unseen conditions, norms and changed rows.

    With --answers, also compare given sentences and answer words before and after each head.
    """

    example = "llmcond analyse --head mlp --what clusters --conditions 4 --out pictures"
    formats = True

    def execute(self) -> AnalysisResult:
        """Run the analyses.

        Returns:
            An ``AnalysisResult``, a dictionary: the rows of each analysis by its name, the
            ``split``, and ``n``, the number of rated rows.

        Raises:
            UserError: there is no such run or head, or the split has no rated rows.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> result = llmcond.extract(model="minilm", data=rows)
            >>> analysis = llmcond.analyse(what=["isotropy"], split="train")
            >>> analysis["n"]
            16
        """
        from llmcond.workflows.evaluate import analyse

        return analyse(self)

    def show(self, result: AnalysisResult, form: str) -> None:
        """Print one table per analysis."""
        from llmcond.report.analyses import analysis_tables

        for table in analysis_tables(result, self.run):
            table.print(form)


analyse = as_function(Analyse)


@dataclass(frozen=True, kw_only=True)
class ComparePrompts(ComparePromptsOptions, Command):
    """Compare prompts on the same rows, splits, seeds and heads, with paired statistics."""

    example = (
        "llmcond compare-prompts --model minilm --prompts my/*.toml --heads mlp --report page.html"
    )
    formats = True
    if_interrupted = RESUMES

    def execute(self) -> Comparison:
        """Compare the prompts.

        Returns:
            A ``Comparison`` with one ``Result`` for each prompt, head and subtraction: its
            metrics, and their difference to the baseline with a confidence interval.

        Raises:
            UserError: an option or the data is invalid, a prompt makes rows of different conditions
                equal, or the report cannot be written.
            LlmcondError: every fit failed.

        Examples:
            >>> import llmcond
            >>> rows = [
            ...     {"sentence1": f"{n} dogs", "sentence2": f"{n} cats", "condition": c, "label": y}
            ...     for n in range(10)
            ...     for c, y in [("the number", 5), ("the animal", 1)]
            ... ]
            >>> comparison = llmcond.compare_prompts(
            ...     model="minilm",
            ...     data=rows,
            ...     prompts=["concat-sent-cond", "pair-sent"],
            ...     heads=["none"],
            ... )
            >>> comparison.baseline
            'concat-sent-cond'
        """
        from llmcond.workflows.compare import compare_prompts

        return compare_prompts(self)

    def show(self, result: Comparison, form: str) -> None:
        """Print a summary in words, then a table."""
        from llmcond.base.output import print_sentences
        from llmcond.report.tables import results_table, summary

        print_sentences(summary(result.results, result.baseline), form)
        bars = form == "table"  # In other formats the characters of bars do not line up.
        results_table(result.results, self.run, bars=bars).print(form)


compare_prompts = as_function(ComparePrompts)


@dataclass(frozen=True, kw_only=True)
class Complete(CompleteOptions, Command):
    """Find the entities that best complete a triple of a run's knowledge graph."""

    example = "llmcond complete --run runs/wn18rr --head-entity 02084071 --relation _hypernym"
    formats = True

    def execute(self) -> Completions:
        """Rank all entities.

        Returns:
            ``Completions``: the best entities with their ranks and scores, the best first, and the
            head and query that they are ranked by.

        Raises:
            UserError: there is no such run, head, entity or relation, or the run has no knowledge
                graph.

        Examples:
            >>> import llmcond
            >>> result = llmcond.extract(model="minilm", task="kgc", run="runs/graph")
            >>> completions = llmcond.complete(
            ...     run="runs/graph", head_entity="tolman_vest", relation="suits", k=3
            ... )
            >>> len(completions.completions)
            3
        """
        from llmcond.kinds.ranking.complete import complete

        return complete(self)

    def show(self, result: Completions, form: str) -> None:
        """Print a table."""
        from llmcond.base.output import Table, log

        log.info(f"ranked by {result.about['head']}")
        if not result.completions:
            log.info("no entity is left: all of them complete the triple in the data already")
        Table.of_rows([completion.to_json() for completion in result.completions]).print(form)


complete = as_function(Complete)


@dataclass(frozen=True, kw_only=True)
class Reply(ReplyOptions, Command):
    """Rank candidates for the next turn of a dialogue, or by how well they lead to a later turn."""

    example = (
        "llmcond reply 'Hi!' 'Hey, how are you?' --candidates replies.txt --run runs/dialogues"
    )
    formats = True
    if_interrupted = REUSES_VECTORS

    def execute(self) -> Replies:
        r"""Encode the turns, and rank the candidates.

        Returns:
            ``Replies``: the best candidates with their scores, the best first, and the head and
            score that they are ranked by.

        Raises:
            UserError: there is no such run, head or file, a text is empty, or there are fewer than
                two candidates.

        Examples:
            >>> import llmcond
            >>> from pathlib import Path
            >>> result = llmcond.extract(model="minilm", task="dialogue", run="runs/dialogues")
            >>> n = Path("replies.txt").write_text("I am fine.\nThe train is late.\n")
            >>> ranked = llmcond.reply(
            ...     turns=["Hi!", "How are you?"], candidates="replies.txt", run="runs/dialogues"
            ... )
            >>> len(ranked.replies)
            2
        """
        from llmcond.kinds.dialogue.reply import reply

        return reply(self)

    def show(self, result: Replies, form: str) -> None:
        """Print a table."""
        from llmcond.base.output import Table, log

        about = result.about
        log.info(
            f"{about['n_candidates']:,} candidates ranked by {about['head']}, score "
            f"{about['score']}"
        )
        Table.of_rows([reply.to_json() for reply in result.replies]).print(form)


reply = as_function(Reply)
