"""A run's graph, encoder and head as one object that completes triples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Dense, Matrix, MatrixLike
from llmcond.bundled import DEFAULT_RUN
from llmcond.errors import UserError, did_you_mean
from llmcond.evaluation.ranking import CandidatePool, Term, rank, top
from llmcond.features.view import Part
from llmcond.kinds.ranking.arrays import joint_keys
from llmcond.kinds.ranking.examples import QueryExamples
from llmcond.kinds.ranking.graph import Graph, Texts, both_directions
from llmcond.kinds.ranking.run import RankingRun
from llmcond.kinds.ranking.terms import GraphTerms
from llmcond.prompts import Prompt
from llmcond.runs.embedding_model import choose_head, log_model
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.open import open_any_run
from llmcond.runs.predictors import AnyPredictor

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder


@dataclass(frozen=True, slots=True)
class Completion:
    """An entity that may complete a triple.

    Attributes:
        rank: from 1.
        score: what entities are ordered by; a cosine unless the graph adds to it.
        known: whether some split has the triple.
    """

    rank: int
    score: float
    id: str
    name: str
    known: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return {**asdict(self), "score": round(self.score, 6)}


class Completer:
    """Ranks the entities of a run's graph by what a head and a relation ask for.

    Make one with :func:`load_completer`.

    Attributes:
        graph: that the run is of.
        name: the head's in the run, or ``none@PROMPT``: zero-shot.
    """

    def __init__(
        self, examples: QueryExamples, predictor: AnyPredictor, terms: GraphTerms, device: str
    ) -> None:
        self._examples, self._predictor, self._device = examples, predictor, device
        self._terms = terms
        self.graph: Graph = examples.data  # type: ignore[assignment]  # load_completer saw to that
        self.name = predictor.name

    def __repr__(self) -> str:
        """Return what it is made of, in a line."""
        return (
            f"Completer({self._examples.run.encoder_name}, head {self.name}, "
            f"{self.graph.n_entities:,} entities)"
        )

    def top(
        self,
        *,
        head: str | None = None,
        relation: str,
        tail: str | None = None,
        k: int = 10,
        filtered: bool = True,
    ) -> list[Completion]:
        """Return the entities that best complete (head, relation, ?), or (?, relation, tail).

        Args:
            head: an entity by its id or name.
            relation: by its id or name.
            tail: an entity, in the place of ``head``.
            k: how many.
            filtered: whether those that complete it in some split are left out.

        Raises:
            UserError: no such entity or relation, a name that several have, or both ends given.
        """
        if (head is None) == (tail is None):
            raise UserError("give one of head and tail; the other one is what is completed.")
        if k < 1:
            raise UserError(f"k is {k}; it must be at least 1.")
        entity = _find(self.graph.entities, head if tail is None else tail, "entity")
        which = _find(self.graph.relations, relation, "relation")
        asked = np.array([[entity, which + (tail is not None) * self.graph.n_relations]])
        known = self._examples.known
        answers = set(known.gather(asked[:, 0], asked[:, 1])[1].tolist())
        left_out, exclude_head = known if filtered else None, self._terms.exclude_head
        pool = CandidatePool(self._candidates, left_out, self._added, exclude_head)
        k = min(k, self.graph.n_entities)
        found, scores = top(self._vectors(asked), pool, asked[:, 0], asked[:, 1], k)
        entities = self.graph.entities
        ordered = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [
            Completion(place, score, entities.ids[one], entities.names[one], one in answers)
            for place, (one, score) in enumerate(ordered, start=1)
            if np.isfinite(score)
        ]

    def rank(self, triples: Sequence[tuple[str, str, str]]) -> NDArray[np.float64]:
        """Return (n, 2) how n triples rank: their tails for their heads, and the other way.

        Ends and relations are ids or names. Other known answers are left out; of ties it is the
        mean rank.

        Raises:
            UserError: no such entity or relation, or a name that several have.
        """
        ends, relations = (self.graph.entities, "entity"), (self.graph.relations, "relation")
        columns = (ends, relations, ends)
        found = [
            [_find(own, text, what) for text, (own, what) in zip(triple, columns, strict=True)]
            for triple in triples
        ]
        numbers = np.array(found, dtype=np.int64).reshape(-1, 3)
        queries = both_directions(numbers, self.graph.n_relations)
        ranks = rank(
            self._vectors(queries[:, :2]),
            self._candidates,
            queries,
            self._examples.known,
            self._added,
            self._terms.exclude_head,
        )
        return ranks.of().reshape(2, -1).T

    @cached_property
    def _candidates(self) -> Matrix:
        features = self._examples.features(self._predictor.view)
        candidates = self._examples.head(self._predictor, features).candidates()
        return Dense(candidates.read())  # each call looks at all of them

    @cached_property
    def _added(self) -> list[Term]:
        return self._terms.of(self._predictor)

    def _vectors(self, asked: NDArray[Any]) -> MatrixLike:
        """Return the vectors of (m, 2) queries; joint inputs that no split asks are encoded."""
        features = self._examples.features(self._predictor.view)
        arrays = features.arrays
        if arrays.joint is not None and arrays.joint_of is not None:
            keys = joint_keys(asked[:, 0], asked[:, 1], arrays.n_relations)
            if not np.isin(keys, arrays.joint_of).all():
                order = np.unique(keys, return_index=True)[1]
                features = features.with_joint(self._encoded(asked[order]), keys[order])
        return self._examples.head(self._predictor, features).queries(asked[:, 0], asked[:, 1])

    def _encoded(self, asked: NDArray[Any]) -> Matrix:
        texts, view = self._examples.texts, self._predictor.view
        view.check_texts()
        rows = [(texts.sentences[s], texts.conditions[c]) for s, c in asked.tolist()]

        def read(prompt: Prompt, part: Part) -> Matrix:
            return Dense(self._encoder.encode([getattr(prompt, part).render(*row) for row in rows]))

        return view.sentence(read)

    @cached_property
    def _encoder(self) -> Encoder:
        return LazyEncoder(self._examples.run.resolve_encoder(self._device))()


def load_completer(
    run: str | Path = DEFAULT_RUN,
    head: str | None = None,
    *,
    prompt: str | None = None,
    rerank: str | None = None,
    reverse: bool = False,
    exclude_head: bool = True,
    device: str = "auto",
) -> Completer:
    """Load a run of a knowledge graph with one of its heads.

    Args:
        run: the run's folder.
        head: a fitted head's name, or its recipe's if that is fitted once; ``none``: zero-shot.
            None: the run's default, else the best on dev, or zero-shot if there is none.
        prompt: for zero-shot, the prompt; a head has its own.
        rerank: ``HOPS:ALPHA[:no-head]``: add ALPHA to entities near the head in train.
        reverse: whether what train links back to the head is added to, as dev has it.
        exclude_head: whether the entity asked of is left out itself.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: no such run or head, or a run of another task.
    """
    opened = open_any_run(Path(run))
    if not isinstance(opened, RankingRun) or not isinstance(opened.data, Graph):
        raise UserError(
            f"{run} is a run of the task {opened.task.name}, which has no knowledge graph. Extract "
            "one: llmcond extract --task kgc --model MODEL --run another one."
        )
    predictor = choose_head(opened, head, prompt)
    log_model(opened, predictor, head)
    examples = QueryExamples(opened)
    terms = GraphTerms(examples, rerank, reverse, exclude_head)
    return Completer(examples, predictor, terms, device)


def _find(texts: Texts, asked: str | None, what: str) -> int:
    """Return the number of an entity or relation, by its id or else its name.

    Raises:
        UserError: there is none, or several have the name.
    """
    asked = str(asked)
    if asked in texts.ids:
        return texts.ids.index(asked)
    named = [number for number, name in enumerate(texts.names) if name == asked]
    if len(named) == 1:
        return named[0]
    if named:
        ids = ", ".join(texts.ids[number] for number in named[:10])
        raise UserError(
            f"{len(named)} of the graph are named {asked!r}: name one by its id: {ids}."
        )
    near = did_you_mean(asked, {*texts.ids, *texts.names})
    raise UserError(f"the graph has no {what} {asked!r}. {near}".rstrip())
