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
from llmcond.evaluation.results import ranks_among
from llmcond.finetune.model import DistributedCompute, TrainedModel
from llmcond.heads import Recipe
from llmcond.heads.fit import load_start
from llmcond.heads.module import seeded
from llmcond.heads.numpy_heads import DEV_SCORE_KEY
from llmcond.kinds.dialogue.data import Dialogues, Turns, UtteranceInputs
from llmcond.kinds.dialogue.heads import (
    FittedRoleHead,
    RoleHead,
    RoleSettings,
    check_turns,
    distinct_utterances,
    turn_scores,
    windows,
)
from llmcond.tasks import AnyTask

if TYPE_CHECKING:
    from llmcond.finetune.encoder import TrainableEncoder


#: The fixed sample of dev that is scored: the number of dialogues, and the history lengths.
_DEV_DIALOGUES, _DEV_HISTORIES = 1_000, range(2, 11)


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
    def dev_sample(self) -> list[tuple[Positions, Positions]]:
        """The sample of the split that is scored: contexts (n, h) and answers (n,) for each h."""
        sample = np.sort(np.random.default_rng(0).permutation(len(self.turns))[:_DEV_DIALOGUES])
        contexts_by_length = [self.turns.contexts(h) for h in _DEV_HISTORIES]
        in_sample = [np.isin(dialogues, sample) for dialogues, _, _ in contexts_by_length]
        queries = [
            (context[1][mask], context[2][mask])
            for context, mask in zip(contexts_by_length, in_sample, strict=True)
        ]
        return [(contexts, answers) for contexts, answers in queries if len(answers) > 1]


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
        # The strata of the metric are the history lengths. Answers are ranked among the answers of
        # the sampled dialogues, as ``evaluate`` ranks them.
        queries = inputs.dev_sample
        if not queries:
            return None
        utterances = np.unique(
            np.concatenate([positions.ravel() for pair in queries for positions in pair])
        )
        vectors = shared(
            len(utterances),
            lambda which: self.vectors([inputs.tokens[utterances[i]] for i in which]),
        )
        if not np.isfinite(vectors).all():
            return None
        head = self.fitted_head()
        (b1, b2), after = head.before(vectors), head.after(vectors)
        ranks = []
        for contexts, answers in queries:
            context_rows, answer_rows = (
                np.searchsorted(utterances, contexts),
                np.searchsorted(utterances, answers),
            )
            # Each text is scored once, as the products of equal texts may differ in the last bit.
            texts, which = np.unique(answer_rows, return_inverse=True)
            scores = turn_scores(
                b1[context_rows], b2[context_rows], after[texts], head.score, head.weights
            )
            ranks.append(ranks_among(scores[:, which], np.arange(len(answer_rows))).resolve_ties())
        stratum = np.repeat(
            np.arange(len(ranks)), [len(ranks_of_length) for ranks_of_length in ranks]
        )
        return self.metric(
            np.concatenate(ranks), stratum.astype(np.float64), np.arange(len(stratum))
        )

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
