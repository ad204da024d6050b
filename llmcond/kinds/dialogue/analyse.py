"""Analyses of dialogue runs: how much closer contexts are to the answer than to other candidates.

They are those of Triple-Encoders (ACL 2024), appendix D. Similarities are cosines in the roles of
utterances. The other candidates of a query are the answers with the same history length and another
text; their mean similarity is that of their mean vector, so no candidate is compared individually.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcond.arrays import Array
from llmcond.errors import UserError
from llmcond.evaluation.ranking import score_rankings
from llmcond.kinds.dialogue.examples import DialogueExamples, UtteranceRoles
from llmcond.kinds.dialogue.queries import NextQueries, next_queries
from llmcond.kinds.dialogue.turns import ContextScore, inverse_lengths, query_vectors
from llmcond.metrics import Floats, Metric, estimates_json
from llmcond.runs.examples import AnyPredictor, resolve_heads_and_prompts, zero_shot_heads
from llmcond.runs.run import Run
from llmcond.workflows.options.scoring import AnalyseOptions

#: The history length of the paper's figure 8, in which the answer is turn 9.
TURNS_HISTORY = 8
#: The mean over queries.
_MEAN = Metric(
    "difference", lambda values, *_: float(values.mean()), by_row=lambda values: values, factor=1
)


def analyse_dialogues(run: Run, options: AnalyseOptions, analyses: Sequence[str]) -> dict[str, Any]:
    """Compare the similarity of contexts to the answer and to other candidates.

    ``similarity`` has the mean similarities of contexts (table 6), and ``turns`` the difference for
    each turn of contexts of 8 turns (figure 8), also as a figure. Heads that were fitted on single
    utterances are analysed as bi-encoders, and others also with pairs.

    Raises:
        UserError: There is no such head or split, the split has no dialogues of three turns, or an
            analysis is for other tasks.
    """
    split = run.scored_split(options.split)
    fitted, prompts = resolve_heads_and_prompts(run, options.head)
    predictors: list[AnyPredictor] = [
        *(zero for prompt in prompts for zero in zero_shot_heads(run, prompt)),
        *fitted,
    ]
    # Without a second text, a query has no other candidates.
    queries = [
        subset for subset in next_queries(run.data, split) if len(np.unique(subset.candidates)) > 1
    ]
    if not queries:
        raise UserError(
            f"all candidates of {split} have the same text, so there is nothing to compare. Name "
            "another --split, or extract more dialogues."
        )
    examples = DialogueExamples(run)
    used = np.unique(run.data.turns_of(split).utterances)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in analyses}
    for predictor in predictors:
        roles = examples.roles(predictor, used)
        is_bi = not roles.head.is_identity and roles.head.settings.min_context == 1
        for score in ("bi",) if is_bi else ("bi", "average"):
            about = {"name": predictor.name, "score": score}
            if "similarity" in analyses:
                rows["similarity"].append(about | _measure_similarity(roles, queries, score))
            if "turns" in analyses:
                rows["turns"].append(about | _measure_turns(roles, queries, score))
    n = sum(len(subset.dialogue) for subset in queries)
    return {"split": split, "n": n, **rows}


def _answers_and_others(roles: UtteranceRoles, subset: NextQueries) -> tuple[Array, Array]:
    """Return the answers' vectors and the mean vectors of the other candidates, (n, k) each."""
    _, text, count = np.unique(subset.candidates, return_inverse=True, return_counts=True)
    after = roles.after(subset.candidates)
    answers, equal = after[subset.answer], count[text[subset.answer]][:, None]
    others = (after.sum(axis=0) - equal * answers) / (len(after) - equal)
    return answers, others.astype(np.float32)


def _measure_similarity(
    roles: UtteranceRoles, queries: Sequence[NextQueries], score: str
) -> dict[str, Any]:
    """Return the mean similarity of all contexts to their answers and to the other candidates."""
    correct, random = [], []
    for subset in queries:
        answers, others = _answers_and_others(roles, subset)
        vectors = query_vectors(*roles.before(subset.contexts), score)
        vectors /= float(ContextScore.parse(score).coefficients(subset.history).total)
        correct.append((vectors * answers).sum(axis=1))
        random.append((vectors * others).sum(axis=1))
    first, second = (np.concatenate(parts).astype(np.float64) for parts in (correct, random))
    dialogue = np.concatenate([subset.dialogue for subset in queries])
    return {
        "random": float(second.mean()),
        "correct": float(first.mean()),
        **_mean(first - second, dialogue),
    }


def _mean(values: Floats, dialogue: NDArray[np.int64]) -> dict[str, Any]:
    """Return the mean over queries as JSON, with its interval over dialogues."""
    (subset,) = score_rankings([values[None]], dialogue, [_MEAN])
    return estimates_json(subset.metrics)


def _measure_turns(
    roles: UtteranceRoles, queries: Sequence[NextQueries], score: str
) -> dict[str, Any]:
    """Return how much closer each turn of a context is to the answer than to other candidates.

    In pairs, the similarity of a turn is the mean over all pairs that contain it. The contexts have
    8 turns, or as many as the split has if its dialogues are shorter.
    """
    subset = [item for item in queries if item.history <= TURNS_HISTORY][-1]
    answers, others = _answers_and_others(roles, subset)
    direction = torch.from_numpy(answers - others)[..., None]
    b1, b2 = map(torch.from_numpy, roles.before(subset.contexts))
    h = subset.history
    if score == "bi":
        differences = (b2 @ direction)[..., 0] / b2.norm(dim=-1).clamp(min=1e-12)
    else:
        pairs = (b1 @ direction + (b2 @ direction).mT) * inverse_lengths(b1, b2)
        pairs = pairs.triu(1)
        differences = (pairs.sum(dim=2) + pairs.sum(dim=1)) / (h - 1)
    columns = differences.double().numpy().T
    turns = [
        {"turn": turn, **_mean(values, subset.dialogue)} for turn, values in enumerate(columns, 1)
    ]
    return {"history": h, "n": len(subset.dialogue), "turns": turns}
