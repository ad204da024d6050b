"""Scoring of dialogue runs: fitted heads and zero-shot rank next turns, or plan for a goal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.arrays import Positions
from llmcond.data.datasets import read_candidates
from llmcond.errors import UserError
from llmcond.evaluation.results import Result, Results, RowCounts
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.examples import DialogueExamples
from llmcond.kinds.dialogue.generate import generate
from llmcond.kinds.dialogue.queries import (
    PLAN_DISTANCES,
    PLAN_HISTORIES,
    PLAN_METRICS,
    CandidatePoolFunction,
    NextQueries,
    PlanQueries,
    RandomPool,
    RetrievedPool,
    index_candidates,
    join_turns,
    measure_subsets,
    next_queries,
    plan_queries,
    query_rows,
    rank_next,
    rank_plans,
    read_samples,
    resolve_histories,
    stack_queries,
)
from llmcond.kinds.dialogue.task import UtteranceInputs
from llmcond.kinds.dialogue.turns import ContextScore
from llmcond.log import log
from llmcond.metrics import Floats, Metric, choose_metrics
from llmcond.options import Ties
from llmcond.runs.examples import (
    AnyPredictor,
    Evaluation,
    read_ranked_data,
    resolve_heads_and_prompts,
    result_without_metrics,
    zero_shot_heads,
)
from llmcond.runs.extraction import extract_other_data
from llmcond.runs.run import Run
from llmcond.workflows.options.scoring import EvaluateOptions

#: Scores with which zero-shot is evaluated by default, in addition to the score of its recipe.
_ZERO_SHOT_SCORES = ("average", "bi", "maxsim")
#: The score that compares candidates with one vector of all turns, which are encoded as one text.
JOINED = "joined"
#: Scores of planning: equation 4, and the candidate alone (section 4.2.1).
_PLANNING_SCORES = ("average", "bi")
#: Names of the candidate pools that come from the data, for next turns and for planning.
_RANKING_POOLS, _PLANNING_POOLS = ("same-depth", "all"), ("retrieved", "same-depth", "random")


def evaluate_dialogues(run: Run, options: EvaluateOptions) -> Evaluation:
    """Rank the next turns of a split's dialogues by a run's heads, and by zero-shot.

    Options and errors are those of ``AnyTask.evaluate``.
    """
    for name in ("distance", "samples"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for planning. Add --plan POOL, or leave it out.")
    score_names = tuple(
        score if score == JOINED else str(ContextScore.parse(score)) for score in options.score
    )
    histories = _parse_numbers(options.history, "--history")
    computed = choose_metrics(run.task.metrics, options.metric)
    setup = _EvaluationSetup(run, options)
    pool = options.candidates or "same-depth"
    candidates: Any = pool
    extra_texts: Sequence[str] = ()
    if pool not in _RANKING_POOLS:
        _check_pool("--candidates", pool, _RANKING_POOLS, "a file of texts, one per line")
        candidates, extra_texts = index_candidates(
            setup.data, read_candidates(Path(pool), options.read_options())
        )
    queries = next_queries(setup.data, setup.split_key, histories, candidates)
    joined: list[NextQueries] = []
    if JOINED in score_names:
        joined, joined_texts = join_turns(queries, [*setup.data.texts, *extra_texts])
        extra_texts = [*extra_texts, *joined_texts]
        log.info(
            f"score joined: {len(joined_texts):,} texts of all turns before, newest first; a "
            "dialogue is encoded again at every turn"
        )
    examples, ties = setup.examples(extra_texts), setup.ties
    used_texts = np.unique(
        np.concatenate([_concatenate_flat(q.contexts, q.candidates) for q in [*queries, *joined]])
    )
    _log_queries(queries, setup, pool)
    results, ranks = [], []
    for predictor in setup.predictors:
        roles = examples.roles(predictor, used_texts)
        default_score = str(roles.head.score)
        scores = score_names or (
            default_score,
            *(() if predictor.is_fitted else _ZERO_SHOT_SCORES),
        )
        for score in dict.fromkeys(scores):
            if score == "weighted" and roles.head.weights is None:
                log.info(f"{predictor.name} has no learned weights: the score weighted is left out")
                continue
            # A joined context is a single utterance.
            scored, turn_score = (joined, "bi") if score == JOINED else (queries, score)
            scorer = roles.with_score(turn_score).scores
            predictor_ranks = rank_next(scored, scorer).resolve_ties(ties)
            ranks.append(predictor_ranks)
            about = {
                "score": score,
                "candidates": pool,
                "median_rank": float(np.median(predictor_ranks)),
            }
            suffix = "" if score == default_score else f" {score}"
            results.append(setup.create_result(predictor, suffix, ("score", score), about))
    if not results:
        raise UserError(
            "no head can be scored: the score weighted needs a head with learned weights. Fit one: "
            f"llmcond fit-head --head weighted --run {run.folder}"
        )
    return _add_figures(results, ranks, queries, setup, computed, "by_history")


def _log_queries(queries: Sequence[NextQueries], setup: _EvaluationSetup, pool: str) -> None:
    n = sum(len(subset.dialogue) for subset in queries)
    n_repeated = sum(int(subset.repeated.sum()) for subset in queries)
    log.info(f"ranking {n:,} next turns of {setup.split} (candidates: {pool})")
    if n_repeated:
        log.info(
            f"{n_repeated:,} correct answers have the text of another candidate; ties: {setup.ties}"
        )
    if any(subset.history == 1 for subset in queries):
        log.info(
            "a single turn has no pairs: after it, every score equals bi, or the learned weights"
        )


def evaluate_plans(run: Run, options: EvaluateOptions) -> Evaluation:
    """Rank turns by how well they lead to a later turn, with and without knowledge of that goal.

    Options and errors are those of ``AnyTask.evaluate``.
    """
    _check_planning(options)
    histories = _parse_numbers(options.history, "--history") or PLAN_HISTORIES
    distances = _parse_numbers(options.distance, "--distance") or PLAN_DISTANCES
    setup = _EvaluationSetup(run, options)
    split_key, examples = setup.split_key, None
    pool: CandidatePoolFunction
    if options.generate is not None or options.plan not in _PLANNING_POOLS:
        source = Path(str(options.plan))
        if options.generate is None:
            _check_pool("--plan", str(options.plan), _PLANNING_POOLS, "a file of samples (.jsonl)")
        else:
            samples = 100 if options.samples is None else options.samples
            turns = resolve_histories(setup.data, split_key, histories)
            source = generate(run, options.generate, split_key, turns, samples, options.device)
        pool = read_samples(str(source), setup.data, split_key)
        examples = setup.examples(pool.extra_texts)
    elif options.plan == "retrieved":
        examples = setup.examples()
        # Candidates are retrieved by the features alone, so that all heads rank the same ones.
        pool = RetrievedPool(examples.features(run.zero_shot_views(setup.prompts[0])[0]))
    else:
        pool = RandomPool(same_depth=options.plan == "same-depth")
    examples = examples or setup.examples()
    queries = plan_queries(setup.data, split_key, pool, histories, distances)
    used_texts = np.unique(
        np.concatenate([_concatenate_flat(q.contexts, q.candidates, q.goals) for q in queries])
    )
    pool_name, n = (
        options.generate or str(options.plan),
        sum(len(subset.dialogue) for subset in queries),
    )
    log.info(f"planning {n:,} turns of {setup.split} (candidates: {pool_name})")
    results, ranks = [], []
    for predictor in setup.predictors:
        roles = examples.roles(predictor, used_texts)
        scorers = {"average": ("plan", "", roles.score_plans)}
        scorers["bi"] = ("plan-bi", " bi", roles.score_steps)
        for score, suffix, scorer in (
            (str(roles.head.score), " no goal", roles.score_next_turns),
            *(scorers[name] for name in dict.fromkeys(options.score or ("average",))),
        ):
            ranks.append(rank_plans(queries, scorer).resolve_ties(setup.ties))
            about = {"score": score, "plan": pool_name, "goal": suffix != " no goal"}
            known = "known, without context" if score == "plan-bi" else "known"
            variant = "goal", known if about["goal"] else "context only"
            results.append(setup.create_result(predictor, suffix, variant, about))
    return _add_figures(results, ranks, queries, setup, PLAN_METRICS, "cells")


class _EvaluationSetup:
    """The data, the predictors and the options of an evaluation.

    Attributes:
        data: dataset with the dialogues that are scored.
        split_key: key of their split in ``data``.
        split: name of the split in results.
        ties: rank of an answer among candidates with the same score.
        prompts: prompts of zero-shot.
        predictors: zero-shot with each prompt, followed by heads.
    """

    data: Dialogues

    def __init__(self, run: Run, options: EvaluateOptions) -> None:
        """Resolve the options; raise a UserError if heads or dialogues do not exist."""
        self._run, self._device = run, options.device
        fitted, self.prompts = resolve_heads_and_prompts(run, options.head)
        zero_shot = [zero for prompt in self.prompts for zero in zero_shot_heads(run, prompt)]
        self.predictors: list[AnyPredictor] = [*zero_shot, *fitted]
        self.ties: Ties = options.ties or "realistic"
        self.data, self.split_key, self.split = read_ranked_data(run, options)

    def examples(self, extra_texts: Sequence[str] = ()) -> DialogueExamples:
        """Return examples with additional texts; features that the run lacks are extracted."""
        texts, store = [*self.data.texts[len(self._run.data.texts) :], *extra_texts], None
        if texts:
            inputs = partial(UtteranceInputs, texts)
            store = extract_other_data(self._run, self.prompts, inputs, self._device)
        return DialogueExamples(self._run, self.data, extra_texts, store)

    def create_result(
        self,
        predictor: AnyPredictor,
        suffix: str,
        variant: tuple[str, str],
        about: Mapping[str, Any],
    ) -> Result:
        """Create a predictor's result without metrics; ``suffix`` is appended to its name."""
        about = {"ties": self.ties, **about}
        result = result_without_metrics(
            predictor, self.split, self._run.task.name, variant=variant, about=about
        )
        return replace(result, name=f"{result.name}{suffix}")


def _add_figures(
    results: Sequence[Result],
    ranks: Sequence[Floats],
    queries: Sequence[NextQueries] | Sequence[PlanQueries],
    setup: _EvaluationSetup,
    metrics: Sequence[Metric],
    parts: str,
) -> Evaluation:
    """Return results with their metrics, and with those of each subset of the kind ``parts``."""
    counts = RowCounts.of(stack_queries(queries))
    overall, figures_by_query = measure_subsets(
        queries, [predictor_ranks[None] for predictor_ranks in ranks], metrics
    )
    complete_results = []
    for i, result in enumerate(results):
        subsets = {parts: {name: figures[i] for name, figures in figures_by_query.items()}}
        complete_results.append(
            replace(result, counts=counts, metrics=overall[i].metrics, subsets=subsets)
        )
    examples = query_rows(setup.data, setup.split_key, queries)
    return Evaluation(Results(tuple(complete_results)), ranks, examples)


def _check_pool(flag: str, pool: str, pool_names: Sequence[str], file: str) -> None:
    """Raise a UserError for a pool that is neither a name nor an existing file."""
    if not Path(pool).expanduser().is_file():
        raise UserError(f"{flag} is {pool!r}; expected {', '.join(pool_names)}, or {file}.")


def _check_planning(options: EvaluateOptions) -> None:
    """Raise a UserError for options that planning does not have, or that exclude each other."""
    if options.plan is not None and options.generate is not None:
        raise UserError(
            "--plan names a pool of candidates, and --generate creates one. Leave one of them out."
        )
    if options.generate is not None and options.data is not None:
        raise UserError(
            "--generate saves candidates for the dialogues of the run and cannot use --data. Leave "
            "out --data, or give a file of samples: --plan FILE.jsonl."
        )
    if options.samples is not None and options.generate is None:
        raise UserError("--samples needs --generate MODEL. Leave it out, or name a model.")
    for score in options.score:
        if score not in _PLANNING_SCORES:
            raise UserError(
                f"--score {score} is for ranking next turns. Planning has the scores average "
                "(equation 4, the default) and bi (the candidate alone). Name one, or both."
            )
    ranking_options = {
        "--candidates": options.candidates,
        "--metric": options.metric,
    }
    for flag, value in ranking_options.items():
        if value:
            raise UserError(
                f"{flag} is for ranking next turns. Planning has its own metrics and pools of "
                "candidates (--plan). Leave it out."
            )


def _concatenate_flat(*positions: Positions) -> Positions:
    return np.concatenate([array.reshape(-1) for array in positions])


def _parse_numbers(text: str | int | None, flag: str) -> list[int] | None:
    """Parse ranges and numbers such as ``2-10`` or ``2,5`` into ascending numbers; None for None.

    Raises:
        UserError: The text is invalid, a range is descending, or a number is below 1.
    """
    if text is None:
        return None
    values: set[int] = set()
    for part in str(text).split(","):  # in Python, a single number is natural
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise UserError(f"{flag} is {text!r}; expected a range or numbers: 2-10 or 2,5.")
        low, high = int(match[1]), int(match[2] or match[1])
        if low < 1 or high < low:
            raise UserError(
                f"{flag} is {text!r}; {part.strip()} is not an ascending range that starts at 1 or "
                "above."
            )
        values.update(range(low, high + 1))
    return sorted(values)
