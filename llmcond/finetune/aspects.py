"""Training on texts with attributes: groups under one condition, and their contrastive loss."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from llmcond.arrays import Positions
from llmcond.data.aspects import AspectSample, ConditionWordings
from llmcond.data.rows import Rows
from llmcond.encoders.engine.engine import Engine
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.errors import UserError
from llmcond.finetune.inputs import RatedInputs
from llmcond.finetune.model import HeadPlan, TunedModel
from llmcond.finetune.settings import AspectSettings

#: Longer texts, in characters, are left out: they would make steps slow.
LONGEST_TEXT = 700
#: Other values of a group's condition that are considered, and texts of them in all.
_VALUES, _CANDIDATES = 20, 40
#: Example values in a condition, at least and at most.
_EXAMPLES = 2, 5


@dataclass(frozen=True, slots=True)
class AspectBatch:
    """Texts of several groups, each group under one condition.

    Attributes:
        rows: n pairs of texts of a group; a text occurs once in its group.
        group: (2n,) the group of each text, those of the first texts of all pairs coming first.
        value: (2n,) which texts of a group have the same value of its condition.
    """

    rows: Rows
    group: NDArray[np.int64]
    value: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Question:
    """A condition of a set: its wordings, and the texts that have each value."""

    source: AspectSample
    key: str
    wordings: ConditionWordings
    texts: Mapping[str, Sequence[int]]
    repeated: Sequence[str]


class AspectGroups:
    """Draws groups of texts under one condition, in one of its wordings.

    Two or three texts of a group share a value of the condition. The others have other values, and
    as many of the first text's other attributes as possible: those are the hardest to tell apart.
    Sets are drawn in proportion to the square root of their number of conditions.
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
        drawn = [self._group(rng) for _ in range(self.settings.aspects_groups)]
        pairs = [
            (texts[i], texts[i + 1], condition, (number, values[i]), (number, values[i + 1]))
            for number, (condition, texts, values) in enumerate(drawn)
            for i in range(0, len(texts) - 1, 2)
        ]
        first, second, conditions, *labels = zip(*pairs, strict=True)
        number = np.arange(len(pairs))
        group, value = np.array([*labels[0], *labels[1]]).T
        rows = Rows(first, second, conditions, np.zeros(len(pairs)), number + 1, "aspects")
        return AspectBatch(rows, group, value)

    def _group(self, rng: random.Random) -> tuple[str, list[str], list[int]]:
        """Return a condition, texts, and a number for the value of each."""
        question = rng.choice(rng.choices(self._sets, self._weights)[0])
        value = rng.choice(question.repeated)
        same = question.texts[value]
        positions = rng.sample(same, min(len(same), rng.choice((2, 3))))
        others = [other for other in question.texts if other != value]
        rng.shuffle(others)
        others = others[:_VALUES]
        anchor = question.source.texts[positions[0]].attributes
        candidates = []
        for number, other in enumerate(others, 1):
            texts = question.texts[other]
            for position in rng.sample(texts, min(len(texts), max(3, _CANDIDATES // len(others)))):
                attributes = question.source.texts[position].attributes
                shared = sum(attributes.get(key) == own for key, own in anchor.items())
                candidates.append((shared, rng.random(), position, number))
        candidates.sort(reverse=True)
        chosen = candidates[: self.settings.aspects_texts - len(positions)]
        numbers = [0] * len(positions) + [number for *_, number in chosen]
        positions += [position for *_, position, _ in chosen]
        shown = {value, *(others[number - 1] for *_, number in chosen)}
        condition = self._say(question, shown, rng)
        return condition, [question.source.texts[i].text for i in positions], numbers

    def _say(self, question: _Question, shown: set[str], rng: random.Random) -> str:
        """Return the condition in some wording; with example values for a share of the groups.

        Half of these have examples that no text of the group has, where there are enough.
        """
        said = question.wordings
        condition = rng.choice([said.text, said.text, said.question or said.text, *said.others])
        if rng.random() >= self.settings.aspects_values:
            return condition
        values = sorted(question.texts)
        absent = [value for value in values if value not in shown]
        if rng.random() < 0.5 and len(absent) >= _EXAMPLES[0]:
            values = absent
        examples = rng.sample(values, min(len(values), rng.randint(*_EXAMPLES)))
        return condition + ", such as " + ", ".join(own.replace("_", " ") for own in examples)


def _questions(sample: AspectSample) -> list[_Question]:
    """Return the conditions of a set that groups can be drawn for."""
    found = []
    for key, wordings in sample.conditions.items():
        texts: dict[str, list[int]] = defaultdict(list)
        for position, text in enumerate(sample.texts):
            if key in text.attributes and len(text.text) < LONGEST_TEXT:
                texts[text.attributes[key]].append(position)
        repeated = [value for value, positions in texts.items() if len(positions) > 1]
        if len(texts) > 1 and repeated:
            found.append(_Question(sample, key, wordings, texts, repeated))
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
            embeddings = self.head(*texts.batch(every, used, vectors.float()))
            group, value = (
                torch.from_numpy(own).to(embeddings.device) for own in (drawn.group, drawn.value)
            )
            temperature = self._groups.settings.aspects_temperature
            contrast = supervised_contrast(embeddings, group, value, temperature)
        return loss + self._groups.settings.aspects_weight * contrast
