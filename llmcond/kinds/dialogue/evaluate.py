"""Score how predictors rank what follows in dialogues: fitted heads, and zero-shot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmcond.arrays import Positions
from llmcond.data.candidates import read_candidates
from llmcond.errors import UserError
from llmcond.evaluation.ranked import DialogueResult, PlanResult, RankedResults
from llmcond.evaluation.results import Counts
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.examples import DialogueExamples
from llmcond.kinds.dialogue.generate import generate
from llmcond.kinds.dialogue.inputs import UtteranceInputs
from llmcond.kinds.dialogue.queries import (
    PLAN_DISTANCES,
    PLAN_HISTORIES,
    PLAN_METRICS,
    Drawn,
    NextQueries,
    PlanQueries,
    Pool,
    Retrieved,
    figures,
    histories_of,
    next_queries,
    own_candidates,
    plan_queries,
    queries_of,
    query_rows,
    rank_next,
    rank_plans,
    read_samples,
)
from llmcond.kinds.dialogue.run import DialogueRun
from llmcond.kinds.dialogue.turns import Score
from llmcond.log import log
from llmcond.metrics import Floats, Metric, choose_metrics
from llmcond.options import Ties
from llmcond.runs.extraction import extract_others
from llmcond.runs.predictors import AnyPredictor, asked_for, unscored, zeroshots
from llmcond.workflows.evaluate import ranked_data
from llmcond.workflows.options.scoring import EvaluateOptions

#: What zero-shot is scored by where no score is named, besides its own.
_ZERO_SHOT = ("average", "bi", "maxsim")
#: Pools that the data itself gives, of next turns and of planning.
_RANKED, _PLANNED = ("same-depth", "all"), ("retrieved", "same-depth", "random")


def evaluate_dialogues(run: DialogueRun, asked: EvaluateOptions) -> RankedResults[DialogueResult]:
    """Rank the next turns of a split's dialogues by a run's heads, and by zero-shot.

    See :meth:`llmcond.runs.kind.Kind.evaluate`.
    """
    for name in ("distance", "samples"):
        if getattr(asked, name) is not None:
            raise UserError(f"--{name} is of planning. Name a pool, --plan retrieved, or leave it.")
    asked_scores = tuple(str(Score.parse(score)) for score in asked.score)
    histories = numbers(asked.history, "--history")
    computed = choose_metrics(run.task.metrics, asked.metric)
    scored = _Scored(run, asked)
    pool = asked.candidates or "same-depth"
    candidates: Any = pool
    further: Sequence[str] = ()
    if pool not in _RANKED:
        _check_pool("--candidates", pool, _RANKED, "a file of texts, one a line")
        candidates, further = own_candidates(scored.data, read_candidates(Path(pool)))
    queries = next_queries(scored.data, scored.place, histories, candidates)
    examples, ties = scored.examples(further), scored.ties
    used = np.unique(np.concatenate([_flat(q.contexts, q.candidates) for q in queries]))
    n = sum(len(one.dialogue) for one in queries)
    repeated = sum(int(one.repeated.sum()) for one in queries)
    log.info(f"ranking {n:,} next turns of {scored.split} (candidates: {pool})")
    if repeated:
        log.info(f"{repeated:,} right answers have the text of another candidate: ties, {ties}")
    if histories and 1 in histories:
        log.info("one turn has no pairs: after it every score is that of bi, or its weights")
    results, ranks = [], []
    for one in scored.predictors:
        roles = examples.roles(one, used)
        usual = str(roles.head.score)
        scores = asked_scores or (usual, *(() if one.is_fitted else _ZERO_SHOT))
        for score in dict.fromkeys(scores):
            if score == "weighted" and roles.head.weights is None:
                log.info(f"{one.name} has learned no weights: it is not scored by them")
                continue
            own = rank_next(queries, roles.scored_by(score).scores).of(ties)
            ranks.append(own)
            about = {"score": score, "candidates": pool, "median_rank": float(np.median(own))}
            suffix = "" if score == usual else f" {score}"
            results.append(scored.described(DialogueResult, one, suffix, **about))
    if not results:
        raise UserError(
            "nothing is left to score: the score weighted takes a head that learned weights. Fit "
            f"one: llmcond fit-head --head weighted --run {run.folder}"
        )
    return _with_figures(results, ranks, queries, scored, computed, "by_history")


def evaluate_plans(run: DialogueRun, asked: EvaluateOptions) -> RankedResults[PlanResult]:
    """Rank turns by how well they lead to a later one, with and without that goal.

    See :meth:`llmcond.runs.kind.Kind.evaluate`.
    """
    _check_planning(asked)
    histories = numbers(asked.history, "--history") or PLAN_HISTORIES
    distances = numbers(asked.distance, "--distance") or PLAN_DISTANCES
    scored = _Scored(run, asked)
    place, examples = scored.place, None
    pool: Pool
    if asked.generate is not None or asked.plan not in _PLANNED:
        source = Path(str(asked.plan))
        if asked.generate is None:
            _check_pool("--plan", str(asked.plan), _PLANNED, "a file of samples (.jsonl)")
        else:
            samples = 100 if asked.samples is None else asked.samples
            turns = histories_of(scored.data, place, histories)
            source = generate(run, asked.generate, place, turns, samples, asked.device)
        pool = read_samples(str(source), scored.data, place)
        examples = scored.examples(pool.further)
    elif asked.plan == "retrieved":
        examples = scored.examples()
        # By the encoder alone, so that all heads rank the same.
        pool = Retrieved(examples.features(run.zero_shot_views(scored.prompts[0])[0]))
    else:
        pool = Drawn(same_depth=asked.plan == "same-depth")
    examples = examples or scored.examples()
    queries = plan_queries(scored.data, place, pool, histories, distances)
    used = np.unique(np.concatenate([_flat(q.contexts, q.candidates, q.goals) for q in queries]))
    named, n = asked.generate or str(asked.plan), sum(len(one.dialogue) for one in queries)
    log.info(f"planning {n:,} turns of {scored.split} (candidates: {named})")
    results, ranks = [], []
    for one in scored.predictors:
        roles = examples.roles(one, used)
        for goal, scorer in ((False, roles.nexts), (True, roles.plans)):
            ranks.append(rank_plans(queries, scorer).of(scored.ties))
            score, suffix = ("plan", "") if goal else (str(roles.head.score), " no goal")
            about = {"score": score, "plan": named, "goal": goal}
            results.append(scored.described(PlanResult, one, suffix, **about))
    return _with_figures(results, ranks, queries, scored, PLAN_METRICS, "cells")


Q = TypeVar("Q", DialogueResult, PlanResult)


class _Scored:
    """What is scored, and by what.

    Attributes:
        data: whose dialogues are asked.
        place: their split in it.
        split: what results call them.
        ties: how an answer ranks among candidates of its score.
        prompts: those of which zero-shot is.
        predictors: zero-shot under each prompt, and then heads.
    """

    data: Dialogues

    def __init__(self, run: DialogueRun, asked: EvaluateOptions) -> None:
        """Find what options ask for; a UserError for heads or dialogues that are not there."""
        self._run, self._device = run, asked.device
        fitted, self.prompts = asked_for(run, asked.head)
        plain = [one for prompt in self.prompts for one in zeroshots(run, prompt)]
        self.predictors: list[AnyPredictor] = [*plain, *fitted]
        self.ties: Ties = asked.ties or "realistic"
        self.data, self.place, self.split = ranked_data(run, asked)

    def examples(self, further: Sequence[str] = ()) -> DialogueExamples:
        """Return examples with ``further`` texts; features that the run lacks are extracted."""
        texts, store = [*self.data.texts[len(self._run.data.texts) :], *further], None
        if texts:
            inputs = partial(UtteranceInputs, texts)
            store = extract_others(self._run, self.prompts, inputs, self._device)
        return DialogueExamples(self._run, self.data, further, store)

    def described(self, kind: type[Q], one: AnyPredictor, suffix: str, **about: Any) -> Q:
        """Return the result of a predictor, without figures; ``suffix`` is added to its name."""
        result = unscored(kind, one, self.split, self._run.task.name, ties=self.ties, **about)
        return replace(result, name=f"{result.name}{suffix}")


def _with_figures(
    results: Sequence[Q],
    ranks: Sequence[Floats],
    queries: Sequence[NextQueries] | Sequence[PlanQueries],
    scored: _Scored,
    metrics: Sequence[Metric],
    parts: str,
) -> RankedResults[Q]:
    """Return results with their figures, and those of each part in the field ``parts``."""
    counts = Counts.of(queries_of(queries))
    overall, found = figures(queries, [own[None] for own in ranks], metrics)
    told = []
    for i, result in enumerate(results):
        own: dict[str, Any] = {parts: {name: part[i] for name, part in found.items()}}
        told.append(replace(result, counts=counts, metrics=overall[i].metrics, **own))
    return RankedResults(tuple(told), ranks, query_rows(scored.data, scored.place, queries))


def _check_pool(flag: str, pool: str, named: Sequence[str], file: str) -> None:
    """Raise a UserError for what is neither a pool's name nor a file."""
    if not Path(pool).expanduser().is_file():
        raise UserError(f"{flag} is {pool!r}; expected {', '.join(named)}, or {file}.")


def _check_planning(asked: EvaluateOptions) -> None:
    """Raise a UserError for options that planning does not take, or that contradict each other."""
    if asked.plan is not None and asked.generate is not None:
        raise UserError("--plan names a pool, and --generate makes one. Leave one of them out.")
    if asked.generate is not None and asked.data is not None:
        raise UserError(
            "--generate keeps what it makes for a run's own dialogues. Leave out --data, or name a "
            "file of samples: --plan FILE.jsonl."
        )
    if asked.samples is not None and asked.generate is None:
        raise UserError("--samples is of --generate MODEL. Leave it out, or name a model.")
    given = {"--score": asked.score, "--candidates": asked.candidates, "--metric": asked.metric}
    for flag, value in given.items():
        if value:
            raise UserError(
                f"{flag} is of ranking next turns; planning has a score, pools (--plan) and "
                "metrics of its own. Leave it out."
            )


def _flat(*positions: Positions) -> Positions:
    return np.concatenate([own.reshape(-1) for own in positions])


def numbers(text: str | None, flag: str) -> list[int] | None:
    """Return what ``2-10`` or ``2,5`` stands for, rising; None for None.

    Raises:
        UserError: text of another form, a range that falls, or a number below 1.
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise UserError(f"{flag} is {text!r}; expected a range or numbers: 2-10 or 2,5.")
        low, high = int(match[1]), int(match[2] or match[1])
        if low < 1 or high < low:
            raise UserError(
                f"{flag} is {text!r}; {part.strip()} is no range of numbers that rises from 1 up."
            )
        found.update(range(low, high + 1))
    return sorted(found)
