"""Completes one triple of a run's knowledge graph, for ``llmcond complete``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import DenseMatrix, Matrix, MatrixLike
from llmcond.base.errors import UserError, did_you_mean
from llmcond.base.output import Displayed
from llmcond.base.package import DEFAULT_RUN
from llmcond.evaluation.results import CandidatePool, Term, rank, top_entities
from llmcond.features.view import FeaturePart
from llmcond.kinds.ranking.examples import GraphTerms, QueryExamples
from llmcond.kinds.ranking.graph import Graph, Texts, both_directions
from llmcond.kinds.ranking.heads import joint_keys
from llmcond.kinds.ranking.task import RankingTask
from llmcond.options.scoring import CompleteOptions, TripleOptions
from llmcond.prompts import Prompt
from llmcond.runs.embedder import choose_head, log_model
from llmcond.runs.examples import AnyPredictor
from llmcond.runs.open import LazyEncoder, open_any_run

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder


@dataclass(frozen=True)
class Completions(Displayed):
    """The entities that best complete a triple, with the query that they answer.

    Attributes:
        completions: the entities, best first.
        about: the head that ranked them and the query, as ``to_json`` returns them.

    Examples:
        >>> import llmcond
        >>> _ = llmcond.extract(task="kgc", model="minilm", run="graph")
        >>> result = llmcond.complete(
        ...     head_entity="Abbott cape", relation="is made of", run="graph", k=3
        ... )
        >>> [completion.rank for completion in result.completions]
        [1, 2, 3]
    """

    completions: Sequence[Completion]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Convert the result to a dictionary of JSON values, which ``--json`` prints.

        Returns:
            The query, with the completions under ``results``.
        """
        return {**self.about, "results": [completion.to_json() for completion in self.completions]}


def complete(options: CompleteOptions) -> Completions:
    """Rank entities that complete (head, relation, ?) or (?, relation, tail).

    Raises:
        UserError: The run, head, entity or relation does not exist, the run has no knowledge
            graph, or not exactly one entity is given.
    """
    if (options.head_entity is None) == (options.tail_entity is None):
        raise UserError("give either --head-entity or --tail-entity: the other one is completed.")
    completer = load_completer(
        Path(options.run),
        options.head,
        prompt=options.prompt,
        rerank=options.rerank,
        reverse=options.reverse,
        exclude_head=options.exclude_head,
        device=options.device,
    )
    completions = completer.top(
        head=options.head_entity,
        relation=options.relation,
        tail=options.tail_entity,
        k=options.k,
        filtered=options.filtered,
    )
    return Completions(
        completions, {"head": completer.name, **asdict(options.select(TripleOptions))}
    )


@dataclass(frozen=True, slots=True)
class Completion:
    """An entity that may complete a triple.

    Attributes:
        rank: rank of the entity, from 1.
        score: score by which entities are ranked: a cosine similarity, unless terms of the graph
            (``rerank``, ``reverse``) are added to it.
        id: id of the entity in the graph's files.
        name: name of the entity.
        known: whether the completed triple is in a split of the data.

    Examples:
        >>> from llmcond import Completion
        >>> Completion(rank=1, score=0.75, id="e7", name="Abbott cape", known=False).name
        'Abbott cape'
    """

    rank: int
    score: float
    id: str
    name: str
    known: bool

    def to_json(self) -> dict[str, Any]:
        """Convert the completion to a dictionary of JSON values, which ``--json`` prints.

        Returns:
            The attributes, with ``score`` rounded to 6 decimals.
        """
        return {**asdict(self), "score": round(self.score, 6)}


class Completer:
    """Ranks the entities of a run's knowledge graph as completions of triples.

    Create one with ``load_completer``.

    Attributes:
        graph: the run's knowledge graph.
        name: name of the head in the run, or ``none@PROMPT`` for zero-shot.

    Examples:
        >>> import llmcond
        >>> _ = llmcond.extract(task="kgc", model="minilm", run="graph")
        >>> completer = llmcond.load_completer("graph")
        >>> completer
        Completer(minilm, head none@separate, 270 entities)
        >>> ranks = completer.rank([("Abbott cape", "is made of", "cotton")])
        >>> ranks.shape
        (1, 2)
    """

    def __init__(
        self, examples: QueryExamples, predictor: AnyPredictor, terms: GraphTerms, device: str
    ) -> None:
        self._examples, self._predictor, self._device = examples, predictor, device
        self._terms = terms
        self.graph: Graph = examples.data
        self.name = predictor.name

    def __repr__(self) -> str:
        """Return the encoder, the head and the number of entities, in one line."""
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
        """Find the entities that best complete (head, relation, ?) or (?, relation, tail).

        Args:
            head: id or name of the head entity, to complete the tail.
            relation: id or name of the relation.
            tail: id or name of the tail entity, to complete the head. Give either ``head`` or
                ``tail``.
            k: number of entities to return.
            filtered: whether to leave out entities that complete the triple in a split of the data.

        Returns:
            At most ``k`` completions, best first.

        Raises:
            UserError: An entity or relation does not exist, its name is ambiguous, ``k`` is below
                1, or not exactly one of ``head`` and ``tail`` is given.
        """
        if (head is None) == (tail is None):
            raise UserError("give either head or tail: the other one is completed.")
        if k < 1:
            raise UserError(f"k is {k}; it must be at least 1.")
        entity = _find_index(self.graph.entities, head if tail is None else tail, "entity")
        relation_index = _find_index(self.graph.relations, relation, "relation")
        query = np.array([[entity, relation_index + (tail is not None) * self.graph.n_relations]])
        known = self._examples.known
        answers = set(known.gather(query[:, 0], query[:, 1])[1].tolist())
        excluded, exclude_head = known if filtered else None, self._terms.exclude_head
        pool = CandidatePool(self._candidates, excluded, self._added, exclude_head)
        k = min(k, self.graph.n_entities)
        candidates, scores = top_entities(self._vectors(query), pool, query[:, 0], query[:, 1], k)
        entities = self.graph.entities
        ordered = zip(candidates[0].tolist(), scores[0].tolist(), strict=True)
        return [
            Completion(position, score, entities.ids[i], entities.names[i], i in answers)
            for position, (i, score) in enumerate(ordered, start=1)
            if np.isfinite(score)
        ]

    def rank(self, triples: Sequence[tuple[str, str, str]]) -> NDArray[np.float64]:
        """Rank triples among all entities, in both directions.

        Other known answers of a query are left out.

        Args:
            triples: head, relation and tail of each triple, by id or name.

        Returns:
            Ranks of shape (n, 2), from 1: of each tail given the head and the relation, and of each
            head given the tail and the relation. Ties get their mean rank.

        Raises:
            UserError: An entity or relation does not exist, or its name is ambiguous.
        """
        entity = partial(_find_index, self.graph.entities, what="entity")
        relation = partial(_find_index, self.graph.relations, what="relation")
        rows = [(entity(head), relation(name), entity(tail)) for head, name, tail in triples]
        triple_indices = np.array(rows, dtype=np.int64).reshape(-1, 3)
        queries = both_directions(triple_indices, self.graph.n_relations)
        ranks = rank(
            self._vectors(queries[:, :2]),
            self._candidates,
            queries,
            self._examples.known,
            self._added,
            self._terms.exclude_head,
        )
        return ranks.resolve_ties().reshape(2, -1).T

    @cached_property
    def _candidates(self) -> Matrix:
        candidates = self._examples.head(self._predictor).candidates()
        return DenseMatrix(candidates.read())  # Every call reads all of them.

    @cached_property
    def _added(self) -> list[Term]:
        return self._terms.for_predictor(self._predictor)

    def _vectors(self, queries: NDArray[Any]) -> MatrixLike:
        """Return the vectors of queries (m, 2); joint inputs that no split has are encoded."""
        arrays = self._examples.arrays(self._predictor.view)
        if arrays.joint is not None and arrays.joint_input_keys is not None:
            keys = joint_keys(queries[:, 0], queries[:, 1], arrays.n_relations)
            if not np.isin(keys, arrays.joint_input_keys).all():
                order = np.unique(keys, return_index=True)[1]
                arrays = arrays.with_joint(self._encode_joint(queries[order]), keys[order])
        return self._examples.head(self._predictor, arrays).queries(queries[:, 0], queries[:, 1])

    def _encode_joint(self, queries: NDArray[Any]) -> Matrix:
        texts, view = self._examples.texts, self._predictor.view
        view.check_texts()
        rows = [(texts.sentences[s], texts.conditions[c]) for s, c in queries.tolist()]

        def read(prompt: Prompt, part: FeaturePart) -> Matrix:
            return DenseMatrix(
                self._encoder.encode([getattr(prompt, part).render(*row) for row in rows])
            )

        return view.sentence_features(read)

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
        run: folder of the run.
        head: name of a fitted head, or of its recipe if only one head was fitted by it; ``none``
            for zero-shot. By default the run's default head, else the best head on dev, or
            zero-shot if the run has no head.
        prompt: name of the prompt for zero-shot. A fitted head has its own prompt.
        rerank: ``HOPS:ALPHA[:no-head]`` adds ALPHA to the scores of entities within HOPS links of
            the head in the training graph.
        reverse: whether to add a weight to entities that have the same relation to the head in
            train. The weight is fitted on dev, separately for each relation.
        exclude_head: whether to leave out the entity of the query itself.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Returns:
        The completer.

    Raises:
        UserError: The run or head does not exist, or the run is of another task.

    Examples:
        >>> import llmcond
        >>> _ = llmcond.extract(task="kgc", model="minilm", run="graph")
        >>> completer = llmcond.load_completer("graph", exclude_head=True)
        >>> completions = completer.top(head="Abbott cape", relation="is made of", k=2)
        >>> [completion.rank for completion in completions]
        [1, 2]
    """
    opened = open_any_run(Path(run))
    if not isinstance(opened.kind, RankingTask) or not isinstance(opened.data, Graph):
        raise UserError(
            f"{run} is a run of the task {opened.task.name}, which has no knowledge graph. Extract "
            "the features of a graph into a new run: llmcond extract --task kgc --model MODEL "
            "--run FOLDER"
        )
    predictor = choose_head(opened, head, prompt)
    log_model(opened, predictor, head)
    examples = QueryExamples(opened)
    terms = GraphTerms(examples, rerank, reverse, exclude_head)
    return Completer(examples, predictor, terms, device)


def _find_index(texts: Texts, name_or_id: str | None, what: str) -> int:
    """Return the index of an entity or relation with this id or, failing that, this name.

    Raises:
        UserError: No entity or relation matches, or several have this name.
    """
    name_or_id = str(name_or_id)
    if name_or_id in texts.ids:
        return texts.ids.index(name_or_id)
    matches = [index for index, name in enumerate(texts.names) if name == name_or_id]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(texts.ids[index] for index in matches[:10])
        raise UserError(
            f"the name {name_or_id!r} is ambiguous: it has {len(matches)} matches in the graph. "
            f"Give the id of one of them: {ids}."
        )
    near = did_you_mean(name_or_id, {*texts.ids, *texts.names})
    raise UserError(f"the graph has no {what} {name_or_id!r}. {near}".rstrip())
