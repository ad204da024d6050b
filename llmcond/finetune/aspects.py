"""Training on texts with attributes: groups under one condition, and their contrastive loss."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.arrays import Positions
from llmcond.conditions import Condition
from llmcond.data.aspects import AspectSample, ConditionWordings
from llmcond.data.rows import Rows
from llmcond.encoders.engine.engine import Engine
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.errors import UserError
from llmcond.finetune.model import HeadPlan, RatedInputs, TunedModel
from llmcond.finetune.settings import AspectSettings

#: Longer texts, in characters, are left out: they would make steps slow.
_LONGEST_TEXT = 700
#: How many values of its condition a group has, and how many texts of each.
SHAPES = ((2, 3), (3, 3), (3, 4), (4, 3), (4, 2), (6, 2))
#: Texts of a value among which the one is chosen that shares most attributes with another text.
_CANDIDATES = 12
#: Example values in a condition, at least and at most.
_EXAMPLES = 2, 5


@dataclass(frozen=True, slots=True)
class AspectBatch:
    """Texts of several groups, each group under one condition.

    Attributes:
        rows: n texts, each beside itself, under the condition of its group.
        group: (n,) the group of each text.
        value: (n,) which texts of a group have the same value of its condition.
    """

    rows: Rows
    group: NDArray[np.int64]
    value: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Question:
    """A condition of a set: its wordings, and the texts that have each value."""

    source: AspectSample
    wordings: ConditionWordings
    texts: Mapping[str, Sequence[int]]
    repeated: Sequence[str]

    def shared(self, first: int, second: int) -> int:
        """Return how many attributes two texts share."""
        one, other = (self.source.texts[i].attributes for i in (first, second))
        return sum(other.get(key) == value for key, value in one.items())


class AspectGroups:
    """Draws groups of texts under one condition, in one of its wordings.

    A group is a table: texts of a row have the same value of the condition, and texts of a column
    share as many other attributes as possible. So the text that is nearest by everything else has
    another value, as in paired triples. Sets are drawn in proportion to the square root of their
    number of conditions.
    """

    def __init__(self, samples: Sequence[AspectSample], settings: AspectSettings) -> None:
        """Index sets of texts.

        Raises:
            UserError: no condition has two values, one of them in two texts.
        """
        self.settings = settings
        self._sets = [found for sample in samples if (found := _questions(sample))]
        if not self._sets:
            raise UserError(
                f"--aspects {settings.aspects} has no condition with two values, one of which two "
                "texts have, so there is nothing to learn from."
            )
        self._weights = [len(questions) ** 0.5 for questions in self._sets]

    def draw(self, seed: Sequence[int]) -> AspectBatch:
        """Return the groups of a step; the same seed gives the same groups."""
        state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        rng = random.Random(int(state[0]))  # noqa: S311  # nothing is secret here
        texts: list[tuple[str, str, int, int]] = []
        group = 0
        while len(texts) < self.settings.aspects_texts:
            condition, members = self._group(rng)
            texts += [(text, condition, group, value) for text, value in members]
            group += 1
        sentences, conditions, groups, values = zip(*texts, strict=True)
        number = np.arange(len(texts))
        rows = Rows(sentences, sentences, conditions, np.zeros(len(texts)), number + 1, "aspects")
        return AspectBatch(rows, np.array(groups), np.array(values))

    def _group(self, rng: random.Random) -> tuple[str, list[tuple[str, int]]]:
        """Return a condition, and texts with a number for the value of each."""
        question = rng.choice(rng.choices(self._sets, self._weights)[0])
        n_values, n_texts = rng.choice(SHAPES)
        values = rng.sample(question.repeated, min(n_values, len(question.repeated)))
        others = [value for value in question.texts if value not in values]
        values += rng.sample(others, min(len(others), n_values - len(values)))
        texts = question.texts[values[0]]
        first = rng.sample(texts, min(n_texts, len(texts)))
        chosen = [(i, 0) for i in first]
        for number, value in enumerate(values[1:], 1):
            texts, taken = question.texts[value], set[int]()
            for base in first:
                drawn = rng.sample(texts, min(len(texts), _CANDIDATES))
                left = [i for i in drawn if i not in taken]
                if left:
                    taken.add(max(left, key=partial(question.shared, base)))
            chosen += [(i, number) for i in sorted(taken)]
        condition = self._word_condition(question, set(values), rng)
        return condition, [(question.source.texts[i].text, number) for i, number in chosen]

    def _word_condition(self, question: _Question, shown: set[str], rng: random.Random) -> str:
        """Return the condition in some wording; with example values for a share of the groups.

        Half of these have examples that no text of the group has, where there are enough.
        """
        ways = question.wordings
        condition = rng.choice([ways.text, ways.text, ways.question or ways.text, *ways.others])
        if rng.random() >= self.settings.aspects_values:
            return condition
        values = sorted(question.texts)
        absent = [value for value in values if value not in shown]
        if rng.random() < 0.5 and len(absent) >= _EXAMPLES[0]:
            values = absent
        examples = rng.sample(values, min(len(values), rng.randint(*_EXAMPLES)))
        return Condition(condition, [value.replace("_", " ") for value in examples])


def _questions(sample: AspectSample) -> list[_Question]:
    """Return the conditions of a set that groups can be drawn for."""
    found = []
    for key, wordings in sample.conditions.items():
        texts: dict[str, list[int]] = defaultdict(list)
        for position, text in enumerate(sample.texts):
            if key in text.attributes and len(text.text) < _LONGEST_TEXT:
                texts[text.attributes[key]].append(position)
        repeated = [value for value, positions in texts.items() if len(positions) > 1]
        if len(texts) > 1 and repeated:
            found.append(_Question(sample, wordings, texts, repeated))
    return found


def supervised_contrast(
    vectors: Tensor, group: Tensor, value: Tensor, temperature: float
) -> Tensor:
    """Return the supervised contrastive loss within groups, a scalar.

    Supervised contrastive learning (arXiv 2004.11362, equation 2), with each text compared with
    the others of its group only. Texts whose value no other text of the group has are negatives.

    Args:
        vectors: (n, k).
        group: (n,) the group of each text.
        value: (n,) equal for texts of a group that have the same value.
        temperature: of the cosines.
    """
    unit = normalize(vectors, dim=1)
    cosine = unit @ unit.T / temperature
    compared = (group[:, None] == group) & ~torch.eye(len(group), dtype=torch.bool).to(group.device)
    positive = compared & (value[:, None] == value)
    log_share = cosine - cosine.masked_fill(~compared, -torch.inf).logsumexp(1, keepdim=True)
    count = positive.sum(1)
    has_positive = count > 0
    summed = log_share.masked_fill(~positive, 0).sum(1)
    return -(summed[has_positive] / count[has_positive]).mean()


class AspectModel(TunedModel):
    """A model that is trained on rated rows and, in each step, on groups of texts as well."""

    def __init__(
        self,
        engine: Engine,
        plan: HeadPlan,
        dims: tuple[int, int],
        groups: AspectGroups,
        tokenizer: InputTokenizer,
    ) -> None:
        """Put a head behind an engine; see :class:`TunedModel`."""
        super().__init__(engine, plan, dims)
        self._groups, self._tokenizer = groups, tokenizer

    def forward(self, inputs: RatedInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the loss of some rows and of as many groups as the settings say, a scalar."""
        loss = super().forward(inputs, rows, seed)
        drawn = self._groups.draw(seed)
        texts = RatedInputs.of(drawn.rows, inputs.view, self._tokenizer)
        every = np.arange(len(drawn.rows))
        used = texts.used(every)
        vectors = texts.embed(self.engine, used)
        with torch.autocast(vectors.device.type, enabled=False):
            embeddings, _ = self.head(*texts.batch(every, used, vectors.float())).chunk(2)
            labels = torch.from_numpy(np.stack([drawn.group, drawn.value]))
            group, value = labels.to(embeddings.device)
            temperature = self._groups.settings.aspects_temperature
            contrast = supervised_contrast(embeddings, group, value, temperature)
        return loss + self._groups.settings.aspects_weight * contrast
