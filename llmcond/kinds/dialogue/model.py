"""An encoder of utterances and a head that maps them to roles, trained together on dialogues.

Objectives are those of fitting heads (Triple-Encoders, ACL 2024, section 3). A step takes all
windows of some dialogues, so that each utterance is encoded once for all the windows it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.arrays import Positions
from llmcond.encoders.engine.engine import Engine
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.errors import UserError
from llmcond.evaluation.ranking import ranks_among
from llmcond.finetune.base import Shared, TrainedModel
from llmcond.heads import Recipe
from llmcond.heads.module import seeded
from llmcond.heads.pairs import SCORE
from llmcond.kinds.dialogue.data import Turns
from llmcond.kinds.dialogue.fit import check_turns, distinct, windows
from llmcond.kinds.dialogue.roles import FittedRoles, Roles, RoleSettings
from llmcond.kinds.dialogue.turns import turn_scores
from llmcond.metrics import METRICS, Metric

#: What dev is scored on, always the same: so many dialogues, after so many turns of each.
SCORED, HISTORIES = 1_000, range(2, 11)


@dataclass(frozen=True)
class DialogueInputs:
    """The windows of a split's dialogues, with all utterances, each tokenised once.

    Attributes:
        turns: of the split.
        tokens: of all distinct utterances, by the positions that turns have.
        settings: of the head, which say what a window is.
    """

    turns: Turns
    tokens: Sequence[Tokens]
    settings: RoleSettings

    @cached_property
    def places(self) -> Positions:
        """Return the turns of each window, (m, w); see :func:`.fit.windows`."""
        return windows(self.turns.starts, self.settings.window, self.settings.least)

    def __len__(self) -> int:
        return len(self.places)

    def windows(self, rows: Positions) -> Positions:
        """Return the utterances of some windows, (k, w); -1: none."""
        return np.append(self.turns.utterances, -1)[self.places[rows]]

    @cached_property
    def scored(self) -> list[tuple[Positions, Positions]]:
        """Return what stands for a split: contexts (n, h) and what follows, (n,), for each h."""
        chosen = np.sort(np.random.default_rng(0).permutation(len(self.turns))[:SCORED])
        found = [self.turns.context(h) for h in HISTORIES]
        kept = [np.isin(dialogues, chosen) for dialogues, _, _ in found]
        asked = [(own[1][k], own[2][k]) for own, k in zip(found, kept, strict=True)]
        return [(contexts, answers) for contexts, answers in asked if len(answers) > 1]


class TurnModel(TrainedModel[DialogueInputs, FittedRoles]):
    """From windows of dialogues to the objective of a head that maps utterances to roles."""

    on_dev = SCORE
    head: Roles

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        seed: int,
        start: FittedRoles | None = None,
        metric: Metric = METRICS["average_rank"],
    ) -> None:
        """Put a head behind an engine, as ``start`` was fitted or as it is drawn by the seed.

        Raises:
            UserError: a recipe of another task, or a head for features of another size.
        """
        check_turns(recipe)
        family: Any = recipe.family
        head, _ = seeded(lambda: family(recipe.settings, engine.dim), seed)
        head.start_at_identity()
        if start is not None:
            if start.dim_in != engine.dim:
                raise UserError(
                    f"the encoder gives {engine.dim} dimensions; this {start.kind} head was fitted "
                    f"on {start.dim_in}."
                )
            head.load_state_dict(start.module.state_dict())
        super().__init__(engine, head, recipe.kind, seed, metric)

    def forward(self, inputs: DialogueInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of windows, a scalar."""
        self.seed_dropout(seed)
        used, places = distinct(inputs.windows(rows))
        vectors = self.engine.embed([inputs.tokens[i] for i in used])
        with torch.autocast(vectors.device.type, enabled=False):
            drawn = np.random.Generator(np.random.SFC64(seed))
            own, dialogue = (
                torch.from_numpy(one).to(vectors.device)
                for one in (places, self.groups(inputs)[rows])
            )
            return self.head.loss(normalize(vectors.float()), own, drawn, dialogue)

    def score(self, inputs: DialogueInputs, shared: Shared) -> float | None:
        """Return the metric of ranks on dev, whose strata are the history lengths.

        Of dialogues that are scored, what follows is ranked as ``evaluate`` does.
        """
        asked = inputs.scored
        if not asked:
            return None
        used = np.unique(np.concatenate([own.ravel() for pair in asked for own in pair]))
        vectors = shared(
            len(used), lambda which: self.vectors([inputs.tokens[used[i]] for i in which])
        )
        if not np.isfinite(vectors).all():
            return None
        head = self.fitted()
        (b1, b2), after = head.before(vectors), head.after(vectors)
        ranks = []
        for contexts, answers in asked:
            at, own = np.searchsorted(used, contexts), np.searchsorted(used, answers)
            # Of equal texts, products may differ in the last bit: each is scored once.
            texts, which = np.unique(own, return_inverse=True)
            scores = turn_scores(b1[at], b2[at], after[texts], head.score, head.weights)
            ranks.append(ranks_among(scores[:, which], np.arange(len(own))).of())
        stratum = np.repeat(np.arange(len(ranks)), [len(own) for own in ranks])
        return self.metric(
            np.concatenate(ranks), stratum.astype(np.float64), np.arange(len(stratum))
        )

    def groups(self, inputs: DialogueInputs) -> NDArray[np.int64]:
        """See :class:`TrainedModel`: windows of a dialogue share their utterances."""
        return inputs.turns.dialogue[inputs.places[:, -1]]
