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
from llmcond.finetune.model import BiEncoderModel, HeadConfig, RatedInputs
from llmcond.finetune.settings import AspectSettings
from llmcond.heads.objectives import average_truncations

#: Maximum length of texts in characters; longer ones are left out, as they would make steps slow.
_LONGEST_TEXT = 700
#: Possible shapes of a group: number of values of its condition, and number of texts per value.
SHAPES = ((2, 3), (3, 3), (3, 4), (4, 3), (4, 2), (6, 2))
#: Number of texts of a value from which the one that shares most attributes with another text is
#: selected.
_CANDIDATES = 12
#: Minimum and maximum number of example values in a condition.
_EXAMPLES = 2, 5


@dataclass(frozen=True, slots=True)
class AspectBatch:
    """Texts of several groups, each group under one condition.

    Attributes:
        rows: n texts, each paired with itself, under the condition of its group.
        group: (n,) group of each text.
        value: (n,) number of the condition's value that each text has.
    """

    rows: Rows
    group: NDArray[np.int64]
    value: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _AspectCondition:
    """A condition of a set: its wordings, and the texts that have each value."""

    source: AspectSample
    wordings: ConditionWordings
    texts: Mapping[str, Sequence[int]]
    repeated: Sequence[str]

    def shared(self, first: int, second: int) -> int:
        """Return the number of attributes that two texts share."""
        attributes, other_attributes = (self.source.texts[i].attributes for i in (first, second))
        return sum(other_attributes.get(key) == value for key, value in attributes.items())


class AspectSampler:
    """Samples groups of texts under one condition, in one of its wordings.

    A group is a table: texts of a row have the same value of the condition, and texts of a column
    share as many other attributes as possible. The text that is most similar in all other respects
    therefore has another value, as in paired triples. Sets are sampled in proportion to the square
    root of their number of conditions.
    """

    def __init__(self, samples: Sequence[AspectSample], settings: AspectSettings) -> None:
        """Index sets of texts.

        Raises:
            UserError: no condition has two values, one of them in two texts.
        """
        self.settings = settings
        self._sets = [conditions for sample in samples if (conditions := _find_conditions(sample))]
        if not self._sets:
            raise UserError(
                f"--aspects {settings.aspects} has no condition with two values of which one "
                "occurs in two texts, so there is nothing to learn from."
            )
        self._weights = [len(set_conditions) ** 0.5 for set_conditions in self._sets]

    def sample(self, seed: Sequence[int]) -> AspectBatch:
        """Sample the groups of a step; the same seed gives the same groups."""
        state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        rng = random.Random(int(state[0]))  # noqa: S311  # not used for cryptography
        texts: list[tuple[str, str, int, int]] = []
        group = 0
        while len(texts) < self.settings.aspects_texts:
            condition, members = self._sample_group(rng)
            texts += [(text, condition, group, value) for text, value in members]
            group += 1
        sentences, conditions, groups, values = zip(*texts, strict=True)
        number = np.arange(len(texts))
        rows = Rows(sentences, sentences, conditions, np.zeros(len(texts)), number + 1, "aspects")
        return AspectBatch(rows, np.array(groups), np.array(values))

    def _sample_group(self, rng: random.Random) -> tuple[str, list[tuple[str, int]]]:
        """Return a condition, and texts with the number of each text's value."""
        aspect = rng.choice(rng.choices(self._sets, self._weights)[0])
        n_values, n_texts = rng.choice(SHAPES)
        values = rng.sample(aspect.repeated, min(n_values, len(aspect.repeated)))
        others = [value for value in aspect.texts if value not in values]
        values += rng.sample(others, min(len(others), n_values - len(values)))
        texts = aspect.texts[values[0]]
        first = rng.sample(texts, min(n_texts, len(texts)))
        numbered = [(i, 0) for i in first]
        for number, value in enumerate(values[1:], 1):
            texts, selected = aspect.texts[value], set[int]()
            for base in first:
                candidates = rng.sample(texts, min(len(texts), _CANDIDATES))
                unused = [i for i in candidates if i not in selected]
                if unused:
                    selected.add(max(unused, key=partial(aspect.shared, base)))
            numbered += [(i, number) for i in sorted(selected)]
        condition = self._word_condition(aspect, set(values), rng)
        return condition, [(aspect.source.texts[i].text, number) for i, number in numbered]

    def _word_condition(self, aspect: _AspectCondition, shown: set[str], rng: random.Random) -> str:
        """Return the condition in some wording; for a share of the groups, with example values.

        In half of these cases no text of the group has any of the examples, if there are enough
        others.
        """
        wordings = aspect.wordings
        condition = rng.choice(
            [wordings.text, wordings.text, wordings.question or wordings.text, *wordings.others]
        )
        if rng.random() >= self.settings.aspects_values:
            return condition
        values = sorted(aspect.texts)
        absent = [value for value in values if value not in shown]
        if rng.random() < 0.5 and len(absent) >= _EXAMPLES[0]:
            values = absent
        examples = rng.sample(values, min(len(values), rng.randint(*_EXAMPLES)))
        return Condition(condition, [value.replace("_", " ") for value in examples])


def _find_conditions(sample: AspectSample) -> list[_AspectCondition]:
    """Return the conditions of a set from which groups can be sampled."""
    conditions = []
    for key, wordings in sample.conditions.items():
        texts: dict[str, list[int]] = defaultdict(list)
        for position, text in enumerate(sample.texts):
            if key in text.attributes and len(text.text) < _LONGEST_TEXT:
                texts[text.attributes[key]].append(position)
        repeated = [value for value, positions in texts.items() if len(positions) > 1]
        if len(texts) > 1 and repeated:
            conditions.append(_AspectCondition(sample, wordings, texts, repeated))
    return conditions


def supervised_contrast(
    vectors: Tensor, group: Tensor, value: Tensor, temperature: float
) -> Tensor:
    """Return the supervised contrastive loss within groups, a scalar.

    This is supervised contrastive learning (arXiv 2004.11362, equation 2), but each text is
    compared only with the other texts of its group. Texts whose value no other text of the group
    has serve only as negatives.

    Args:
        vectors: (n, k) embeddings.
        group: (n,) group of each text.
        value: (n,) number of each text's value; texts of a group with equal numbers are positives.
        temperature: temperature of the cosines.
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


class AspectModel(BiEncoderModel):
    """A model that is trained on rated rows and, in each step, also on groups of texts."""

    def __init__(
        self,
        engine: Engine,
        plan: HeadConfig,
        dims: tuple[int, int],
        groups: AspectSampler,
        tokenizer: InputTokenizer,
    ) -> None:
        """Add a head to an engine, as ``BiEncoderModel`` does."""
        super().__init__(engine, plan, dims)
        self._groups, self._tokenizer = groups, tokenizer

    def forward(self, inputs: RatedInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the loss of some rows plus the weighted loss of sampled groups, a scalar."""
        loss = super().forward(inputs, rows, seed)
        sampled = self._groups.sample(seed)
        extra = RatedInputs.from_rows(sampled.rows, inputs.view, self._tokenizer)
        positions = np.arange(len(sampled.rows))
        used = extra.distinct_inputs(positions)
        vectors = extra.texts.embed(self.engine, used)
        with torch.autocast(vectors.device.type, enabled=False):
            embeddings, _ = self.head(*extra.batch(positions, used, vectors.float())).chunk(2)
            labels = torch.from_numpy(np.stack([sampled.group, sampled.value]))
            group, value = labels.to(embeddings.device)
            temperature = self._groups.settings.aspects_temperature
            contrast = average_truncations(
                lambda vectors: supervised_contrast(vectors, group, value, temperature),
                self.plan.objective.matryoshka,
                embeddings,
            )
        return loss + self._groups.settings.aspects_weight * contrast
