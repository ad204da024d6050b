"""Encoders that are trained together with a head: on rated rows, and on texts with attributes."""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, softplus
from typing_extensions import override

from llmcond.base.arrays import Positions
from llmcond.base.errors import UserError
from llmcond.base.metrics import METRICS, Metric
from llmcond.base.system import move_to_device
from llmcond.base.text import Condition
from llmcond.data.guides import AspectSample, ConditionWordings
from llmcond.data.rows import Rows
from llmcond.encoders.spec import EncoderInput, Orders
from llmcond.encoders.tokenizing import InputTokenizer, OutOfMemoryError, Tokens, router_inputs
from llmcond.encoders.torch.engine import Engine, embed_routed
from llmcond.features.view import FeaturePart, FeatureView
from llmcond.finetune.settings import AspectSettings
from llmcond.heads import FittedHead, PairArrays, Recipe, SharedRows
from llmcond.heads.conditioned import Regression, RegressionSettings
from llmcond.heads.fit import load_start
from llmcond.heads.fitted import FittedModule, fitted_head
from llmcond.heads.module import (
    Batch,
    HeadModule,
    Objective,
    RatedBatch,
    adjacent_pairs,
    average_truncations,
    contrast_groups,
    seeded,
)
from llmcond.heads.numpy_heads import FitReport
from llmcond.heads.settings import ObjectiveSettings
from llmcond.prompts import Prompt
from llmcond.prompts.template import render_rows
from llmcond.runs.cross import KIND


@dataclass(frozen=True)
class TokenizedInputs:
    """Encoder inputs, each tokenised once, and the texts of their routers.

    Attributes:
        items: the inputs.
        tokens: tokens of each input.
        queries: tokens of the router texts of the inputs, by text.
    """

    items: Sequence[EncoderInput]
    tokens: Sequence[Tokens]
    queries: Mapping[str, Tokens]

    @classmethod
    def of(cls, items: Sequence[EncoderInput], tokenizer: InputTokenizer) -> TokenizedInputs:
        """Tokenise inputs."""
        routers = router_inputs(items)
        router_tokens = tokenizer(list(routers.values()))
        return cls(items, tokenizer(items), dict(zip(routers, router_tokens, strict=True)))

    def __len__(self) -> int:
        return len(self.items)

    def embed(self, engine: Engine, which: Positions) -> Tensor:
        """Encode some inputs, (u,), with gradients; return (u, dim) vectors."""
        tokens = [self.tokens[i] for i in which]
        if not self.queries:
            return engine.embed(tokens)
        return embed_routed(engine, [self.items[i] for i in which], tokens, self.queries)


#: Computes (n, k) values of n items with a function of positions; each process computes a share.
DistributedCompute = Callable[
    [int, Callable[[Positions], NDArray[np.float32]]], NDArray[np.float32]
]


@dataclass(frozen=True, kw_only=True)
class RatedData:
    """Rated rows, (n,), in a model's input format, which subclasses add.

    Attributes:
        rating: (n,) ratings on 0 to 1.
        pair: (n,) sentence pair of each row.
    """

    rating: NDArray[np.float64]
    pair: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rating)


#: Number of inputs with routers that are encoded at a time without gradients.
_ROUTED_BATCH = 1_024

#: Training data of a model: rated rows, or triples of a graph.
R = TypeVar("R", bound=Sized)
#: Rated rows in a model's input format.
P = TypeVar("P", bound=RatedData)
#: The class of a fitted head.
F = TypeVar("F", bound=FittedModule)


class TrainedModel(nn.Module, Generic[R, F]):
    """An encoder's network, with its adapters, and a head, which are trained together.

    A subclass defines the loss of rows and the score on dev.

    Attributes:
        metric: metric of the dev score.
        encoder: network of the encoder.
        head: head behind the encoder.
        engine: engine that runs the encoder.
        kind: name of the head's family in records.
        seed: random seed of initial weights, row order and dropout.
    """

    def __init__(
        self, engine: Engine, head: HeadModule, kind: str, seed: int, metric: Metric
    ) -> None:
        super().__init__()
        self.metric = metric
        self.encoder: nn.Module = engine.model.network
        self.head: HeadModule = head.to(engine.output_device)
        self.engine, self.kind, self.seed = engine, kind, seed

    @property
    def dev_score_name(self) -> str:
        """Name of the dev score in records."""
        return f"dev_{self.metric.name}"

    def forward(self, inputs: R, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of some rows, a scalar; ``seed`` seeds everything random in it."""
        raise NotImplementedError

    def score(self, inputs: R, shared: DistributedCompute) -> float | None:
        """Return the dev score that selects the weights; None if it is undefined."""
        raise NotImplementedError

    def groups(self, inputs: R) -> NDArray[np.int64]:
        """Return (n,) group numbers; rows of the same group stay together in a step."""
        return np.arange(len(inputs))

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return the trained parameters of the encoder and the head, by name."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def fitted_head(self, record: Mapping[str, Any] | None = None) -> F:
        """Return a copy of the current head as a fitted head."""
        # Dropout is seeded again before each use, and some generators cannot be copied.
        self.head.seed_dropout(None)
        module, fit = copy.deepcopy(self.head), FitReport(record or {})
        head: F = fitted_head(self.kind, module, self.seed, fit)
        return head

    def seed_dropout(self, seed: list[int]) -> None:
        """Seed the dropout of the encoder and of the head."""
        seeds = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        torch.manual_seed(int(seeds[0] >> 1))
        self.head.seed_dropout(int(seeds[1]))

    def encode(self, inputs: TokenizedInputs, which: Positions) -> NDArray[np.float32]:
        """Compute vectors of some inputs (u,), (u, dim), without dropout and gradients."""
        if not inputs.queries:
            return self.vectors([inputs.tokens[i] for i in which])
        was_training = self.training
        self.eval()
        vectors = np.empty((len(which), self.engine.dim), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(which), _ROUTED_BATCH):
                part = self._embed_routed(inputs, which[start : start + _ROUTED_BATCH])
                vectors[start : start + _ROUTED_BATCH] = part.float().cpu().numpy()
        self.train(was_training)
        return vectors

    def _embed_routed(self, inputs: TokenizedInputs, which: Positions) -> Tensor:
        """Encode some routed inputs, with half the token budget each time memory runs out."""
        while True:
            try:
                return inputs.embed(self.engine, which)
            except OutOfMemoryError:
                if self.engine.budget == 1:
                    raise
            # This is outside the handler, because the error keeps references to the activations.
            torch.cuda.empty_cache()
            self.engine.budget //= 2

    def vectors(self, tokens: Sequence[Tokens]) -> NDArray[np.float32]:
        """Compute the encoder's vectors of inputs, (n, dim), without dropout and gradients."""
        was_training = self.training
        self.eval()
        vectors = np.empty((len(tokens), self.engine.dim), dtype=np.float32)
        for batch in self.engine.run(tokens):
            vectors[batch.inputs] = batch.vectors
        self.train(was_training)
        return vectors


class RatedModel(TrainedModel[P, FittedHead]):
    """A model that is trained on rated rows, and scored on dev by its predicted similarities."""

    def predict(self, inputs: P, shared: DistributedCompute) -> NDArray[np.float32]:
        """Predict the similarity of all rows, (n,), without dropout and gradients."""
        raise NotImplementedError

    @override
    def score(self, inputs: P, shared: DistributedCompute) -> float | None:
        similarity = self.predict(inputs, shared)
        if not np.isfinite(similarity).all():
            return None
        value = self.metric(similarity.astype(np.float64), inputs.rating, inputs.pair)
        return None if math.isnan(value) else value


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RatedInputs(RatedData):
    """Rated rows, (n,), as positions of distinct inputs.

    Attributes:
        view: features that the head reads.
        texts: the distinct inputs.
        columns: (n,) position of each row's input, by prompt, part and sentence (0 or 1).
        conditioned: whether the first and the second sentence have a condition.
    """

    view: FeatureView
    texts: TokenizedInputs
    columns: dict[tuple[str, FeaturePart, int], Positions]
    conditioned: tuple[bool, bool] = (True, True)

    @classmethod
    def from_rows(cls, rows: Rows, view: FeatureView, tokenizer: InputTokenizer) -> RatedInputs:
        """Tokenise the rated rows of a complete split."""
        view.check_sides(rows.conditioned)
        rated = rows.rated
        positions: dict[EncoderInput, int] = {}
        columns: dict[tuple[str, FeaturePart, int], Positions] = {}
        for prompt, part in view.required_parts():
            # Render the complete split, as a shuffled control samples from all its conditions.
            inputs = render_rows(rows, prompt)
            sides = (inputs.first_unconditional, inputs.second_unconditional)
            if part == "conditional":
                sides = (inputs.first, inputs.second)
            for side, texts in enumerate(sides):
                item_positions = [positions.setdefault(item, len(positions)) for item in texts]
                columns[prompt.name, part, side] = np.array(item_positions, dtype=np.int64)[rated]
        used_positions = np.unique(np.concatenate(list(columns.values())))
        all_items = list(positions)
        return cls(
            view=view,
            texts=TokenizedInputs.of([all_items[i] for i in used_positions], tokenizer),
            columns={
                key: np.searchsorted(used_positions, column) for key, column in columns.items()
            },
            rating=rows.rating[rated],
            pair=rows.pair[rated],
            conditioned=rows.conditioned,
        )

    def _make_reader(
        self, side: int, take: Callable[[Positions], T]
    ) -> Callable[[Prompt, FeaturePart], T]:
        return lambda prompt, part: take(self.columns[prompt.name, part, side])

    def arrays(self, vectors: NDArray[np.float32]) -> PairArrays:
        """Return all rows as arrays for a head, given the vectors of distinct inputs, (u, dim)."""
        reader = partial(self._make_reader, take=partial(SharedRows, vectors))
        first, second = self.conditioned
        return PairArrays(
            first=self.view.sentence_features(reader(0), conditioned=first),
            second=self.view.sentence_features(reader(1), conditioned=second),
            rating=self.rating,
            condition=self.view.condition_features(reader(0)),
            pair=self.pair,
        )

    def distinct_inputs(self, rows: Positions) -> Positions:
        """Return the positions of the distinct inputs, (u,), of some rows (m,)."""
        return np.unique(np.concatenate([column[rows] for column in self.columns.values()]))

    def batch(self, rows: Positions, used: Positions, vectors: Tensor) -> Batch:
        """Return rows as a training batch of a head: first sentences, then second ones.

        ``used``, (u,), is the result of ``distinct_inputs`` for these rows; ``vectors``, (u, dim),
        are the vectors of those inputs.
        """

        def vectors_of(column: Positions) -> Tensor:
            positions = np.searchsorted(used, column)
            # Not vectors[positions], as the gradients of indexing are summed in varying order.
            return vectors.index_select(0, torch.from_numpy(positions).to(vectors.device))

        readers = [
            self._make_reader(side, lambda column: vectors_of(column[rows])) for side in (0, 1)
        ]
        sides = zip(readers, self.conditioned, strict=True)
        x = torch.cat(
            [self.view.sentence_features(r, torch.sub, torch.hstack, has) for r, has in sides]
        )
        prompt = self.view.condition_prompt()
        if prompt is None:
            return Batch(x)
        column = self.columns[prompt.name, "unconditional", 0][rows]
        distinct, which = np.unique(column, return_inverse=True)
        number = torch.from_numpy(which.reshape(-1)).to(vectors.device)
        return Batch(x, vectors_of(distinct), number.repeat(2))


class BiEncoderModel(RatedModel[RatedInputs]):
    """An encoder and a head on rated pairs: the vectors, the embeddings and the objective."""

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        objective: ObjectiveSettings,
        dims: tuple[int, int],
        seed: int,
        *,
        start: FittedHead | None = None,
        metric: Metric = METRICS["spearman"],
        aspects: AspectSampler | None = None,
    ) -> None:
        """Add a head to an engine.

        Args:
            engine: engine of the encoder.
            recipe: kind and settings of the head; kind ``none`` compares the encoder's vectors.
            objective: objective that is minimised.
            dims: sizes of sentence and condition features.
            seed: random seed of initial weights, row order and dropout.
            start: fitted head whose weights are the initial ones; None: random initial weights.
            metric: metric of the dev score.
            aspects: sampler of groups of texts, whose weighted loss each step adds; None: there are
                no such texts.

        Raises:
            UserError: the head, or the one to start from, cannot read features of these sizes.
        """
        (head, total), _ = seeded(
            lambda: (recipe.family(recipe.settings, *dims), Objective(objective)), seed
        )
        if start is not None:
            load_start(head, start.module)
        super().__init__(engine, head, recipe.kind, seed, metric)
        self.objective, self._aspects = total.to(engine.output_device), aspects
        self.prototypes: nn.Parameter | None = None
        if aspects is not None and aspects.classes:
            shape = len(aspects.classes), self.fitted_head().dim_out
            values, _ = seeded(lambda: torch.randn(shape), seed)
            self.prototypes = nn.Parameter(values.to(engine.output_device))

    def forward(self, inputs: RatedInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean loss of some rows, a scalar; ``seed`` seeds dropout and groups."""
        self.seed_dropout(seed)
        used = inputs.distinct_inputs(rows)
        vectors = inputs.texts.embed(self.engine, used)
        with torch.autocast(vectors.device.type, enabled=False):
            batch = inputs.batch(rows, used, vectors.float())
            first, second = self.head(*batch).chunk(2)
            device, contrastive = first.device, None
            pair = move_to_device(torch.from_numpy(inputs.pair[rows]), device)
            if self.objective.settings.contrasts:
                positions = adjacent_pairs(contrast_groups(inputs.pair)[rows])
                contrastive = move_to_device(torch.from_numpy(positions), device)
            info = RatedBatch(self.head.similarity, pair, contrastive)
            rating = move_to_device(torch.from_numpy(inputs.rating[rows]), device).to(first)
            loss: Tensor = self.objective(first, second, rating, info)
        if self._aspects is not None:
            contrast = self._contrast_aspects(self._aspects, inputs.view, seed)
            loss = loss + self._aspects.settings.aspects_weight * contrast
        return loss

    def _contrast_aspects(
        self, sampler: AspectSampler, view: FeatureView, seed: list[int]
    ) -> Tensor:
        """Return the contrastive loss of sampled groups of texts, a scalar."""
        with torch.autocast(self.engine.output_device.type, enabled=False):
            sampled = sampler.sample(seed)  # a teacher computes in its own number format
        texts = RatedInputs.from_rows(sampled.rows, view, sampler.tokenizer)
        positions = np.arange(len(sampled.rows))
        used = texts.distinct_inputs(positions)
        vectors = texts.texts.embed(self.engine, used)
        with torch.autocast(vectors.device.type, enabled=False):
            embeddings, _ = self.head(*texts.batch(positions, used, vectors.float())).chunk(2)
            labels = torch.from_numpy(np.stack([sampled.group, sampled.value, sampled.twin]))
            group, value, twin = labels.to(embeddings.device)
            loss = average_truncations(
                lambda vectors: (
                    supervised_contrast(vectors, group, value, _TEMPERATURE)
                    + contrast_conditions(vectors, group, value, twin)
                ),
                self.objective.settings.matryoshka,
                embeddings,
            )
            if self.prototypes is not None:
                loss = loss + classify_values(
                    embeddings, self.prototypes, sampler.kinds, torch.from_numpy(sampled.label)
                )
            if sampled.target is not None:
                target = torch.from_numpy(sampled.target).to(embeddings)
                loss = loss + match_neighbours(embeddings, target, group, _TEMPERATURE)
            return loss

    def groups(self, inputs: RatedInputs) -> NDArray[np.int64]:
        """Return (n,) group numbers, the same for both rows of a contrastive pair."""
        contrasts = self.objective.settings.contrasts
        return contrast_groups(inputs.pair) if contrasts else super().groups(inputs)

    def predict(self, inputs: RatedInputs, shared: DistributedCompute) -> NDArray[np.float32]:
        """Predict the similarity of all rows, (n,); each distinct input is encoded once."""
        vectors = shared(len(inputs.texts), lambda which: self.encode(inputs.texts, which))
        pairs = inputs.arrays(vectors)
        head: FittedHead = self.fitted_head()
        return head.similarity(pairs.first, pairs.second, pairs.condition)


@dataclass(frozen=True, kw_only=True)
class CrossInputs(RatedData):
    """Rated rows, (n,), each as one sequence per order of its sentences.

    Attributes:
        orders: token sequences of all rows: with the sentences in the given order and, if both
            orders are read, with the second sentence first.
    """

    orders: tuple[list[Tokens], ...]

    @classmethod
    def from_rows(cls, rows: Rows, orders: Orders, tokenizer: InputTokenizer) -> CrossInputs:
        """Tokenise the rated rows of a split.

        Raises:
            UserError: as in ``InputTokenizer.joined``.
        """
        rated = rows.take(rows.rated)
        first, second = rated.sentence1, rated.sentence2
        sides = [(first, second), (second, first)][: 2 if orders == "both" else 1]
        tokens = [
            tokenizer.join_rows(list(zip(*side, rated.condition, strict=True))) for side in sides
        ]
        return cls(orders=tuple(tokens), rating=rated.rating, pair=rated.pair)

    @property
    def n_cut(self) -> int:
        """Number of rows whose sentences were cut."""
        return sum(row.n_tokens > len(row.ids) for row in self.orders[0])


class CrossModel(RatedModel[CrossInputs]):
    """A cross-encoder that is trained on the mean squared error of its predicted similarity."""

    def __init__(
        self, engine: Engine, settings: RegressionSettings, seed: int, start: float, metric: Metric
    ) -> None:
        """Add a linear layer to an engine; its bias starts at ``start``, the mean rating."""
        head, _ = seeded(lambda: Regression(settings, engine.dim), seed)
        with torch.no_grad():
            head.get_parameter("weight_bias").fill_(start)
        super().__init__(engine, head, KIND, seed, metric)

    def forward(self, inputs: CrossInputs, rows: Positions, seed: list[int]) -> Tensor:
        """Return the mean squared error of rows, a scalar; the order of sentences is random."""
        self.seed_dropout(seed)
        generator = np.random.Generator(np.random.SFC64(seed))
        order = generator.integers(len(inputs.orders), size=len(rows))
        tokens = [inputs.orders[choice][row] for choice, row in zip(order, rows, strict=True)]
        vectors = self.engine.embed(tokens)
        with torch.autocast(vectors.device.type, enabled=False):
            predicted: Tensor = self.head(vectors.float())[:, 0]
            rating = torch.from_numpy(inputs.rating[rows]).to(predicted)
            return (predicted - rating).square().mean()

    def predict(self, inputs: CrossInputs, shared: DistributedCompute) -> NDArray[np.float32]:
        """Predict the similarity of all rows, (n,): the mean over the orders of their sentences."""
        head = self.fitted_head()

        def compute(which: Positions) -> NDArray[np.float32]:
            mean = np.zeros((len(which), 1), dtype=np.float32)
            for order in inputs.orders:
                vectors = self.vectors([order[i] for i in which])
                with torch.autocast("cpu", enabled=False):
                    mean += head.transform(vectors) / len(inputs.orders)
            return mean

        return shared(len(inputs), compute)[:, 0]


#: Maximum length of texts in characters; longer ones are left out, as they would make steps slow.
_LONGEST_TEXT = 700
#: Possible shapes of a group: number of values of its condition, and number of texts per value.
SHAPES = ((2, 3), (3, 3), (3, 4), (4, 3), (4, 2), (6, 2))
#: Number of texts of a value from which the one that shares most attributes with another text is
#: selected.
_CANDIDATES = 12
#: Minimum and maximum number of example values in a condition.
_EXAMPLES = 2, 5
#: The temperature of the contrastive loss of texts with attributes, and that of prototypes.
_TEMPERATURE, _PROTOTYPE_TEMPERATURE = 0.07, 0.1
#: Maximum number of texts in a group that say nothing about its condition.
_ABSENT = 2


@dataclass(frozen=True, slots=True)
class AspectBatch:
    """Texts of several groups, each group under one condition.

    Attributes:
        rows: n texts, each paired with itself, under the condition of its group.
        group: (n,) group of each text.
        value: (n,) number of the condition's value that each text has; texts that say nothing about
            the condition have numbers that no other text has.
        label: (n,) position of the text's value in ``AspectSampler.classes``; -1: it is not there.
        twin: (n,) position of the same text under another condition; -1: there is none.
        target: (n, d) embeddings of another model, to learn from; None: there is none.
    """

    rows: Rows
    group: NDArray[np.int64]
    value: NDArray[np.int64]
    label: NDArray[np.int64]
    twin: NDArray[np.int64]
    target: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class _AspectCondition:
    """A condition of a set: its wordings, and the texts that have each value, or none of them."""

    source: AspectSample
    key: str
    wordings: ConditionWordings
    texts: Mapping[str, Sequence[int]]
    repeated: Sequence[str]
    absent: Sequence[int]

    def value(self, position: int) -> str | None:
        """Return the value that a text has; None: it says nothing about the condition."""
        return self.source.texts[position].attributes.get(self.key)

    def agree(self, first: int, second: int) -> bool:
        """Return whether two texts have the same value of the condition."""
        return self.value(first) == self.value(second) is not None

    def shared(self, first: int, second: int) -> int:
        """Return the number of attributes that two texts share."""
        attributes, other_attributes = (self.source.texts[i].attributes for i in (first, second))
        return sum(other_attributes.get(key) == value for key, value in attributes.items())


class AspectSampler:
    """Samples groups of texts under one condition, in one of its wordings.

    A group is a table: texts of a row have the same value of the condition, and texts of a column
    share as many other attributes as possible. The text that is most similar in all other respects
    therefore has another value, as in paired triples. The texts of the first row share as few other
    attributes as possible, so that they have little more than the value in common. A share of the
    groups also has texts that say nothing about the condition. The texts of another share form a
    second group, under the condition under which most pairs of them change. Sets are sampled in
    proportion to their weight times the square root of their number of conditions.

    Attributes:
        classes: the values of conditions that have a kind, as pairs of the kind and the value.
        kinds: (len(classes),) number of each value's kind.
    """

    def __init__(
        self,
        samples: Sequence[AspectSample],
        settings: AspectSettings,
        tokenizer: InputTokenizer,
        teacher: Callable[[Sequence[str], Sequence[str]], NDArray[np.float32]] | None = None,
    ) -> None:
        """Index sets of texts.

        Args:
            samples: the sets.
            settings: settings of the groups.
            tokenizer: tokenizer of the model that reads the texts.
            teacher: function from n texts and n conditions to (n, d) embeddings to learn from.

        Raises:
            UserError: no condition has two values, one of them in two texts.
        """
        self.settings, self.tokenizer, self._teacher = settings, tokenizer, teacher
        self._sets = [conditions for sample in samples if (conditions := _find_conditions(sample))]
        if not self._sets:
            raise UserError(
                f"--aspects {settings.aspects} has no condition with two values of which one "
                "occurs in two texts, so there is nothing to learn from."
            )
        self._weights = [
            set_conditions[0].source.weight * len(set_conditions) ** 0.5
            for set_conditions in self._sets
        ]
        named = [condition for conditions in self._sets for condition in conditions]
        pairs = {(item.wordings.kind, value) for item in named for value in item.texts}
        self.classes = sorted(pair for pair in pairs if pair[0])
        names = sorted({kind for kind, _ in self.classes})
        self.kinds = torch.tensor([names.index(kind) for kind, _ in self.classes])
        self._label_of = {pair: position for position, pair in enumerate(self.classes)}

    def sample(self, seed: Sequence[int]) -> AspectBatch:
        """Sample the groups of a step; the same seed gives the same groups."""
        state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        rng = random.Random(int(state[0]))  # noqa: S311  # not used for cryptography
        texts: list[tuple[str, str, int, int, int]] = []
        twin: list[int] = []
        group = 0
        while len(texts) < self.settings.aspects_texts:
            aspects = rng.choices(self._sets, self._weights)[0]
            aspect = rng.choice(aspects)
            members = self._sample_group(aspect, rng)
            position = {i: n for n, i in enumerate(members, len(texts))}
            texts += self._describe(aspect, members, group, rng)
            twin += [-1] * len(members)
            group += 1
            if rng.random() >= self.settings.aspects_twins:
                continue
            with_absent = self.settings.aspects_absent > 0
            if (twins := _find_twins(aspects, aspect, members, with_absent)) is not None:
                for n, i in enumerate(twins[1], len(texts)):
                    twin[position[i]] = n
                    twin.append(position[i])
                texts += self._describe(*twins, group, rng)
                group += 1
        sentences, conditions, groups, values, labels = zip(*texts, strict=True)
        number = np.arange(len(texts))
        rows = Rows(sentences, sentences, conditions, np.zeros(len(texts)), number + 1, "aspects")
        target = None if self._teacher is None else self._teacher(sentences, conditions)
        return AspectBatch(
            rows, np.array(groups), np.array(values), np.array(labels), np.array(twin), target
        )

    def _describe(
        self, aspect: _AspectCondition, members: Sequence[int], group: int, rng: random.Random
    ) -> list[tuple[str, str, int, int, int]]:
        """Return the text, condition, group, number of the value, and label of each member."""
        values = [aspect.value(i) for i in members]
        distinct = [value for value in dict.fromkeys(values) if value is not None]
        condition = self._word_condition(aspect, set(distinct), rng)
        source, described = aspect.source.texts, []
        for n, (i, value) in enumerate(zip(members, values, strict=True), len(distinct)):
            number = n if value is None else distinct.index(value)
            label = self._label_of.get((aspect.wordings.kind, value or ""), -1)
            described.append((source[i].text, condition, group, number, label))
        return described

    def _sample_group(self, aspect: _AspectCondition, rng: random.Random) -> list[int]:
        """Return the positions of a group's texts in the set of its condition."""
        n_values, n_texts = rng.choice(SHAPES)
        values = rng.sample(aspect.repeated, min(n_values, len(aspect.repeated)))
        others = [value for value in aspect.texts if value not in values]
        values += rng.sample(others, min(len(others), n_values - len(values)))
        texts = aspect.texts[values[0]]
        first = rng.sample(texts, 1)
        while len(first) < min(n_texts, len(texts)):
            sampled = rng.sample(texts, min(len(texts), _CANDIDATES))
            if candidates := [i for i in sampled if i not in first]:
                first.append(min(candidates, key=lambda i: sum(aspect.shared(i, j) for j in first)))
        members = list(first)
        for value in values[1:]:
            texts, selected = aspect.texts[value], set[int]()
            for base in first:
                candidates = rng.sample(texts, min(len(texts), _CANDIDATES))
                unused = [i for i in candidates if i not in selected]
                if unused:
                    selected.add(max(unused, key=partial(aspect.shared, base)))
            members += sorted(selected)
        if aspect.absent and rng.random() < self.settings.aspects_absent:
            for base in rng.sample(first, min(len(first), rng.randint(1, _ABSENT))):
                candidates = rng.sample(aspect.absent, min(len(aspect.absent), _CANDIDATES))
                members.append(max(candidates, key=partial(aspect.shared, base)))
        return list(dict.fromkeys(members))

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
    short = [i for i, text in enumerate(sample.texts) if len(text.text) < _LONGEST_TEXT]
    for key, wordings in sample.conditions.items():
        # Of equal texts only one is used, the first with a value if there is any: otherwise a text
        # would be compared with itself.
        distinct: dict[str, int] = {}
        for position in sorted(short, key=lambda i: key not in sample.texts[i].attributes):
            distinct.setdefault(sample.texts[position].text, position)
        texts, absent = defaultdict[str, list[int]](list), list[int]()
        for position in distinct.values():
            value = sample.texts[position].attributes.get(key)
            (absent if value is None else texts[value]).append(position)
        repeated = [value for value, positions in texts.items() if len(positions) > 1]
        if len(texts) > 1 and repeated:
            absent = absent if sample.complete else []
            conditions.append(_AspectCondition(sample, key, wordings, texts, repeated, absent))
    return conditions


def _find_twins(
    aspects: Sequence[_AspectCondition],
    aspect: _AspectCondition,
    members: Sequence[int],
    with_absent: bool,
) -> tuple[_AspectCondition, list[int]] | None:
    """Return the condition under which most pairs of texts change, and the texts that it has.

    A pair changes if its texts agree under one of the two conditions and differ under the other.
    The result is None if no pair changes under any condition of the set.

    Args:
        aspects: all conditions of the set.
        aspect: the condition of the group.
        members: positions of the group's texts in the set.
        with_absent: whether the second group may have texts that say nothing about its condition.
    """
    best, most = None, 0
    for other in aspects:
        may_lack = with_absent and aspect.source.complete
        part = [i for i in members if may_lack or other.value(i) is not None]
        changed = sum(aspect.agree(*pair) != other.agree(*pair) for pair in combinations(part, 2))
        if changed > most:
            most, best = changed, (other, part)
    return best


def classify_values(vectors: Tensor, prototypes: Tensor, kinds: Tensor, label: Tensor) -> Tensor:
    """Return the mean cross-entropy of the values of texts, a scalar; 0 if no text has a label.

    The logits of a text are its cosines with the prototypes of all values of the same kind, divided
    by a temperature. Each text is compared with learned vectors instead of other texts (as in
    proxy-NCA, arXiv 1703.07464). Without this loss, groups whose texts share most of their words
    teach nothing for many steps.

    Args:
        vectors: (n, k) embeddings.
        prototypes: (c, k) learned vectors of the values.
        kinds: (c,) kind of each value.
        label: (n,) position of each text's value; -1: it has none.
    """
    label, kinds = label.to(vectors.device), kinds.to(vectors.device)
    has_label = (label >= 0).nonzero()[:, 0]
    if not len(has_label):
        # The optimiser leaves out weights without a gradient, but a resumed training would not.
        return (vectors.sum() + prototypes.sum()) * 0
    label = label[has_label]
    unit = normalize(vectors.index_select(0, has_label), dim=1)
    logits = unit @ normalize(prototypes, dim=1).T / _PROTOTYPE_TEMPERATURE
    is_other = kinds[None, :] != kinds[label][:, None]
    return cross_entropy(logits.masked_fill(is_other, -torch.inf), label)


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
    log_share, compared = _compare_within_groups(vectors, group, temperature)
    positive = compared & (value[:, None] == value)
    count = positive.sum(1)
    has_positive = count > 0
    summed = log_share.masked_fill(~positive, 0).sum(1)
    return -(summed[has_positive] / count[has_positive]).mean()


def match_neighbours(vectors: Tensor, target: Tensor, group: Tensor, temperature: float) -> Tensor:
    """Return the mean divergence from a teacher's similarities within groups, a scalar.

    The softmax of a text's cosines with the other texts of its group is a distribution over them.
    The loss is the Kullback-Leibler divergence from the teacher's distribution to the model's (as
    in SEED, arXiv 2101.04731, whose texts are compared with a queue instead).

    Args:
        vectors: (n, k) embeddings.
        target: (n, d) the teacher's embeddings of the same texts.
        group: (n,) group of each text.
        temperature: temperature of the cosines.
    """
    log_share, compared = _compare_within_groups(vectors, group, temperature)
    expected, _ = _compare_within_groups(target, group, temperature)
    excess = (expected - log_share).masked_fill(~compared, 0)
    return (expected.exp() * excess).sum(1).mean()


def _compare_within_groups(
    vectors: Tensor, group: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-softmax of the cosines within groups, and which pairs have one, (n, n)."""
    unit = normalize(vectors, dim=1)
    compared = (group[:, None] == group) & ~torch.eye(len(group), dtype=torch.bool).to(group.device)
    cosine = (unit @ unit.T / temperature).masked_fill(~compared, -torch.inf)
    return cosine.log_softmax(1), compared


def contrast_conditions(vectors: Tensor, group: Tensor, value: Tensor, twin: Tensor) -> Tensor:
    """Return the loss of pairs that agree under one condition and differ under another, a scalar.

    The cosine of such a pair should be larger under the condition under which it agrees. The loss
    is 0 if there is no such pair.

    Args:
        vectors: (n, k) embeddings.
        group: (n,) group of each text; the texts of a group have the same condition.
        value: (n,) number of each text's value.
        twin: (n,) position of the same text in the other group; -1: it is in one group only.
    """
    unit = normalize(vectors, dim=1)
    first = (twin > torch.arange(len(twin)).to(twin.device)).nonzero()[:, 0]
    cosines, agree = [], []
    for positions in (first, twin[first]):
        part = unit.index_select(0, positions)
        cosines.append(part @ part.T)
        agree.append(value[positions][:, None] == value[positions])
    pairs = torch.triu(group[first][:, None] == group[first], 1) & (agree[0] != agree[1])
    margin = (cosines[0] - cosines[1]) * (agree[0].float() - agree[1].float())
    return softplus(-margin[pairs] / _TEMPERATURE).sum() / pairs.sum().clamp(min=1)
