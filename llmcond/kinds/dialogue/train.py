"""Joint training of an encoder and a head for the roles of utterances, into a new run.

The objectives are those with which heads are fitted (Triple-Encoders, ACL 2024, section 3). A
training step uses all windows of some dialogues, so that each utterance is encoded once for all the
windows that contain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from llmcond.base.arrays import Positions
from llmcond.base.errors import UserError
from llmcond.base.metrics import METRICS, Metric
from llmcond.encoders.tokenizing import Tokens
from llmcond.encoders.torch.engine import Engine
from llmcond.finetune.model import DistributedCompute, TrainedModel
from llmcond.heads import Recipe
from llmcond.heads.fit import load_start
from llmcond.heads.module import seeded
from llmcond.heads.numpy_heads import DEV_SCORE_KEY
from llmcond.kinds.dialogue.data import Dialogues, Turns, UtteranceInputs
from llmcond.kinds.dialogue.examples import (
    NextQueries,
    UtteranceRoles,
    next_queries,
    rank_next,
    stack_queries,
)
from llmcond.kinds.dialogue.heads import (
    FittedRoleHead,
    RoleHead,
    RoleSettings,
    check_turns,
    distinct_utterances,
    windows,
)
from llmcond.tasks import AnyTask

if TYPE_CHECKING:
    from llmcond.finetune.encoder import TrainableEncoder


#: Number of dialogues of dev that are scored.
_DEV_DIALOGUES = 1_000


@dataclass(frozen=True)
class DialogueInputs:
    """The windows of a split's dialogues, with all utterances, each tokenised once.

    Attributes:
        turns: turns of the split.
        tokens: tokens of all distinct utterances, by the positions in ``turns``.
        settings: settings of the head, which define the windows.
    """

    turns: Turns
    tokens: Sequence[Tokens]
    settings: RoleSettings

    @cached_property
    def window_turns(self) -> Positions:
        """The turns of each window, (m, w); see ``fit.windows``."""
        return windows(self.turns.starts, self.settings.window, self.settings.min_context)

    def __len__(self) -> int:
        return len(self.window_turns)

    def windows(self, rows: Positions) -> Positions:
        """Return the utterances of k windows, (k, w), padded with -1."""
        return np.append(self.turns.utterances, -1)[self.window_turns[rows]]

    @cached_property
    def dev_queries(self) -> Sequence[NextQueries]:
        """The queries of a fixed sample of the split; empty if its dialogues are too short."""
        sample = np.sort(np.random.default_rng(0).permutation(len(self.turns))[:_DEV_DIALOGUES])
        turns = Turns.from_lists([self.turns.utterances_of(i) for i in sample])
        try:
            return next_queries(Dialogues("", (), {"dev": turns}), "dev")
        except UserError:
            return ()


class TurnModel(TrainedModel[DialogueInputs, FittedRoleHead]):
    """Computes the objective of a head that maps utterances to roles, on windows of dialogues."""

    dev_score_name = DEV_SCORE_KEY
    head: RoleHead

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        seed: int,
        start: FittedRoleHead | None = None,
        metric: Metric = METRICS["average_rank"],
    ) -> None:
        """Add a head to an engine, with the weights of ``start`` or initialised with the seed.

        Raises:
            UserError: The recipe is for another task, or ``start`` was fitted on features of
                another size.
        """
        check_turns(recipe)
        family: Any = recipe.family
        head, _ = seeded(lambda: family(recipe.settings, engine.dim), seed)
        head.start_at_identity()
        if start is not None:
            load_start(head, start.module)
        super().__init__(engine, head, recipe.kind, seed, metric)

    def forward(self, inputs: DialogueInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of windows, a scalar."""
        self.seed_dropout(seed)
        utterances, window_rows = distinct_utterances(inputs.windows(rows))
        vectors = self.engine.embed([inputs.tokens[i] for i in utterances])
        with torch.autocast(vectors.device.type, enabled=False):
            rng = np.random.Generator(np.random.SFC64(seed))
            batch, dialogue = (
                torch.from_numpy(array).to(vectors.device)
                for array in (window_rows, self.groups(inputs)[rows])
            )
            return self.head.loss(normalize(vectors.float()), batch, rng, dialogue)

    @override
    def score(self, inputs: DialogueInputs, shared: DistributedCompute) -> float | None:
        # Answers are ranked among the answers of the sampled dialogues, as ``evaluate`` ranks them.
        queries = inputs.dev_queries
        if not queries:
            return None
        used = np.unique(
            np.concatenate([a.ravel() for q in queries for a in (q.contexts, q.candidates)])
        )
        vectors = shared(
            len(used), lambda which: self.vectors([inputs.tokens[used[i]] for i in which])
        )
        if not np.isfinite(vectors).all():
            return None
        roles = UtteranceRoles(self.fitted_head(), vectors, used)
        scored = stack_queries(queries)
        ranks = rank_next(queries, roles.scores).resolve_ties()
        return self.metric(ranks, scored.rating, np.arange(len(ranks)))

    @override
    def groups(self, inputs: DialogueInputs) -> NDArray[np.int64]:
        # Windows of a dialogue share their utterances.
        return inputs.turns.dialogue[inputs.window_turns[:, -1]]


def build_training_parts(
    task: AnyTask[Dialogues], job: Any, trainable: TrainableEncoder
) -> tuple[TurnModel, DialogueInputs, DialogueInputs | None]:
    """Return the model and the windows of train and dev; see ``AnyTask.training_parts``."""
    data: Dialogues = job.dataset
    model = TurnModel(trainable.engine, job.recipe, job.seed, job.start, task.main_metric)
    tokens = trainable.tokenizer(UtteranceInputs(data.texts, job.view.prompts[0]))
    train = DialogueInputs(data.splits["train"], tokens, job.recipe.settings)
    if not len(train):
        raise UserError(
            f"no dialogue of {data.source} has enough turns for training. Give longer dialogues."
        )
    dev = replace(train, turns=data.splits["dev"]) if "dev" in data.splits else None
    return model, train, dev
