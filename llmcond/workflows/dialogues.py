"""Score how predictors rank what follows in dialogues: fitted heads, and zero-shot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.arrays import Positions
from llmcond.data.candidates import read_candidates
from llmcond.errors import UserError
from llmcond.evaluation.dialogues import (
    PLAN_DISTANCES,
    PLAN_HISTORIES,
    PLAN_METRICS,
    Pool,
    RandomUtterances,
    Retrieved,
    SameDepth,
    figures,
    histories_of,
    next_queries,
    own_candidates,
    plan_queries,
    queries_of,
    rank_next,
    rank_plans,
    read_samples,
)
from llmcond.evaluation.ranked import DialogueResult, PlanResult
from llmcond.evaluation.results import Counts, Results
from llmcond.heads import Score
from llmcond.log import log
from llmcond.metrics import choose_metrics
from llmcond.prompts import Prompt
from llmcond.prompts.utterances import UtteranceInputs
from llmcond.runs import DialogueRun
from llmcond.runs.dialogues import DialogueExamples
from llmcond.runs.extraction import LazyEncoder, extract_prompt
from llmcond.runs.predictors import AnyPredictor, asked_for, unscored
from llmcond.workflows.generate import generate
from llmcond.workflows.options import DialogueOptions

#: What zero-shot is scored by where no score is named, besides its own.
_ZERO_SHOT = ("average", "bi", "maxsim")
#: Pools that the data itself gives, of next turns and of planning.
_RANKED, _PLANNED = ("same-depth", "all"), ("retrieved", "same-depth", "random")


def evaluate_dialogues(
    run: DialogueRun,
    heads: Sequence[str],
    split: str | None,
    options: DialogueOptions,
    metrics: Sequence[str] = (),
    device: str = "auto",
) -> Results[DialogueResult]:
    """Rank the next turns of a split's dialogues by a run's heads, and by zero-shot.

    Arguments as in :func:`llmcond.workflows.evaluate.evaluate`.
    """
    for name in ("distance", "samples"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is of planning. Name a pool, --plan retrieved, or leave it.")
    split, ties = split or run.default_split(), options.ties or "realistic"
    asked_scores = tuple(str(Score.parse(score)) for score in options.score)
    histories = numbers(options.history, "--history")
    computed = choose_metrics(run.task.metrics, metrics)
    fitted, prompts = asked_for(run, heads)
    data, pool = run.dialogues, options.candidates or "same-depth"
    candidates: Any = pool
    further: Sequence[str] = ()
    if pool not in _RANKED:
        _check_pool("--candidates", pool, _RANKED, "a file of texts, one a line")
        candidates, further = own_candidates(data, read_candidates(Path(pool)))
    queries = next_queries(data, split, histories, candidates)
    examples = _with_texts(DialogueExamples(run), further, prompts, device)
    used = np.unique(np.concatenate([_flat(q.contexts, q.candidates) for q in queries]))
    rows = queries_of(queries)
    repeated = sum(int(one.repeated.sum()) for one in queries)
    log.info(f"ranking {len(rows.pair):,} next turns of {split} (candidates: {pool})")
    if repeated:
        log.info(f"{repeated:,} right answers have the text of another candidate: ties, {ties}")
    if histories and 1 in histories:
        log.info("one turn has no pairs: after it every score is that of bi, or its weights")
    results, ranks = [], []
    for one in _predictors(examples, prompts, fitted):
        roles = examples.roles(one, used)
        usual = str(roles.head.score)
        scores = asked_scores or (usual, *(() if one.head is not None else _ZERO_SHOT))
        for score in dict.fromkeys(scores):
            if score == "weighted" and roles.head.weights is None:
                log.info(f"{one.name} has learned no weights: it is not scored by them")
                continue
            ranked = rank_next(queries, roles.scored_by(score).scores)
            ranks.append(ranked.of(ties)[None])
            about = _described(one, split, run, "" if score == usual else f" {score}")
            results.append(DialogueResult(**about, ties=ties, score=score, candidates=pool))
    if not results:
        raise UserError(
            "nothing is left to score: the score weighted takes a head that learned weights. Fit "
            f"one: llmcond fit-head --head weighted --run {run.folder}"
        )
    overall, parts = figures(queries, ranks, computed)
    return Results(
        tuple(
            replace(
                result,
                counts=Counts.of(rows),
                metrics=overall[i].metrics,
                median_rank=float(np.median(ranks[i])),
                by_history={name: found[i] for name, found in parts.items()},
            )
            for i, result in enumerate(results)
        )
    )


def evaluate_plans(
    run: DialogueRun,
    heads: Sequence[str],
    split: str | None,
    options: DialogueOptions,
    metrics: Sequence[str] = (),
    device: str = "auto",
) -> Results[PlanResult]:
    """Rank turns by how well they lead to a later one, with and without that goal.

    Arguments as in :func:`llmcond.workflows.evaluate.evaluate`.
    """
    _check_planning(options, metrics)
    split, ties = split or run.default_split(), options.ties or "realistic"
    histories = numbers(options.history, "--history") or PLAN_HISTORIES
    distances = numbers(options.distance, "--distance") or PLAN_DISTANCES
    fitted, prompts = asked_for(run, heads)
    data, examples = run.dialogues, DialogueExamples(run)
    pool: Pool
    if options.generate is not None or options.plan not in _PLANNED:
        source = Path(str(options.plan))
        if options.generate is None:
            _check_pool("--plan", str(options.plan), _PLANNED, "a file of samples (.jsonl)")
        if options.generate is not None:
            samples = 100 if options.samples is None else options.samples
            asked = histories_of(data, split, histories)
            source = generate(run, options.generate, split, asked, samples, device=device)
        pool = read_samples(str(source), data, split)
        examples = _with_texts(examples, pool.further, prompts, device)
    elif options.plan == "retrieved":
        # By the encoder alone, so that all heads rank the same.
        pool = Retrieved(examples.features(examples.zeroshots(prompts[0])[0].view))
    else:
        pool = SameDepth() if options.plan == "same-depth" else RandomUtterances()
    queries = plan_queries(data, split, pool, histories, distances)
    used = np.unique(np.concatenate([_flat(q.contexts, q.candidates, q.goals) for q in queries]))
    rows, named = queries_of(queries), options.generate or str(options.plan)
    log.info(f"planning {len(rows.pair):,} turns of {split} (candidates: {named})")
    results, ranks = [], []
    for one in _predictors(examples, prompts, fitted):
        roles = examples.roles(one, used)
        for goal, scorer in ((False, roles.nexts), (True, roles.plans)):
            ranks.append(rank_plans(queries, scorer).of(ties)[None])
            about = _described(one, split, run, "" if goal else " no goal")
            score = "plan" if goal else str(roles.head.score)
            results.append(PlanResult(**about, ties=ties, score=score, plan=named, goal=goal))
    overall, parts = figures(queries, ranks, PLAN_METRICS)
    return Results(
        tuple(
            replace(
                result,
                counts=Counts.of(rows),
                metrics=overall[i].metrics,
                cells={name: found[i] for name, found in parts.items()},
            )
            for i, result in enumerate(results)
        )
    )


def _check_pool(flag: str, pool: str, named: Sequence[str], file: str) -> None:
    """Raise a UserError for what is neither a pool's name nor a file."""
    if not Path(pool).expanduser().is_file():
        raise UserError(f"{flag} is {pool!r}; expected {', '.join(named)}, or {file}.")


def _check_planning(options: DialogueOptions, metrics: Sequence[str]) -> None:
    """Raise a UserError for options that planning does not take, or that contradict each other."""
    if options.plan is not None and options.generate is not None:
        raise UserError("--plan names a pool, and --generate makes one. Leave one of them out.")
    if options.samples is not None and options.generate is None:
        raise UserError("--samples is of --generate MODEL. Leave it out, or name a model.")
    given = {"--score": options.score, "--candidates": options.candidates, "--metric": metrics}
    for flag, value in given.items():
        if value:
            raise UserError(
                f"{flag} is of ranking next turns; planning has a score, pools (--plan) and "
                "metrics of its own. Leave it out."
            )


def _predictors(
    examples: DialogueExamples, prompts: Sequence[Prompt], fitted: Sequence[AnyPredictor]
) -> list[AnyPredictor]:
    return [*(one for prompt in prompts for one in examples.zeroshots(prompt)), *fitted]


def _described(
    predictor: AnyPredictor, split: str, run: DialogueRun, suffix: str
) -> dict[str, Any]:
    """Return the fields of a predictor's result that are no figures."""
    result = unscored(predictor, split, run.task.name)
    found = {item.name: getattr(result, item.name) for item in fields(result)}
    return found | {"name": f"{result.name}{suffix}"}


def _flat(*positions: Positions) -> Positions:
    return np.concatenate([own.reshape(-1) for own in positions])


def _with_texts(
    examples: DialogueExamples, further: Sequence[str], prompts: Sequence[Prompt], device: str
) -> DialogueExamples:
    """Return examples with texts of a user's own, whose features are extracted if missing."""
    if not further:
        return examples
    run = examples.run
    store, encoder = run.store_for_others(), LazyEncoder(run.resolve_encoder(device))
    for prompt in prompts:
        extract_prompt(store, encoder, prompt, UtteranceInputs(further, prompt))
    return DialogueExamples(run, further, store)


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
