"""Clustering the texts of a file under conditions, with a table, figures and a page as output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmcond.base.errors import UserError, format_count, shortened_repr
from llmcond.base.output import log
from llmcond.base.text import condition_text, ignored_by, normalise_condition
from llmcond.clustering import (
    NOISE,
    Clustering,
    ClusterMap,
    ClusterResult,
    Labels,
    Vectors,
    choose_k,
    describe_clusters,
    distinct_vectors,
    hdbscan,
    number_by_size,
    quality_text,
    score_clusters,
    silhouette,
    without_condition,
    write_cluster_page,
)
from llmcond.data.answers import NOT_MENTIONED
from llmcond.data.datasets import (
    Collection,
    label_text,
    open_collection,
    read_collection,
    text_column,
)
from llmcond.data.formats import ReadOptions
from llmcond.data.guides import LabelledTexts, read_guide
from llmcond.data.rows import write_table
from llmcond.evaluation.analyses import kmeans, sample_texts
from llmcond.options.texts import ClusterOptions
from llmcond.runs.embedder import ALIKE, MIN_COLLECTION, EmbeddingModel, share_of_neighbours
from llmcond.runs.similarity import report_foreign_texts
from llmcond.workflows.check import report_alike

Method = Literal["kmeans", "hdbscan"]

_GUIDE_HINT = (
    "If they are not, label about 40 texts: --guide FILE, with the columns text and label."
)


def cluster(options: ClusterOptions) -> ClusterResult:
    """Group texts under each condition, and write a table of the clusters if ``out`` is given.

    Raises:
        UserError: the options, the texts, the guide or the labels are invalid.
        LlmcondError: the encoder fails.
    """
    run_folder, conditions, guide = options.resolve_folder(), options.conditions(), options.guide
    texts, text, labels, seed = options.texts, options.text, options.labels, options.seed
    _check_options(options, conditions, guide is not None, labels)
    k = None if options.clusters == "auto" else options.clusters
    finder = _ClusterFinder(options.method, k, options.min_cluster_size, seed)
    out, report, map_file = (
        None if file is None else Path(file) for file in (options.out, options.report, options.map)
    )
    source = open_collection(texts, options.read_options(), text)
    column = text_column(source, text)
    columns = _name_columns(conditions, options.keep, column)
    others = [*options.keep, *labels, *options.ignore_column]
    collection = read_collection(source, column, list(dict.fromkeys(others)))
    distinct = finder.check_texts(collection)
    guides = (
        {} if guide is None else _read_guides(guide, text, conditions, collection, source.options)
    )
    for labelled in guides.values():
        finder.with_guide(labelled.labels).check_distinct(
            distinct, f"{collection.file} has", "text"
        )
    known_labels = _read_known_labels(collection, labels, guides)
    embeddings = EmbeddingModel.find(
        run_folder, options.head, options.prompt, device=options.device
    ).with_answers(
        options.read_answers(),
        [(text, condition) for condition in conditions for text in collection.texts],
    )
    report_foreign_texts(collection.texts, embeddings.encoder.resolved.checkpoint)
    drawing = ClusterMap(collection.texts, seed) if report or map_file else None
    clusterings, samples = list[Clustering](), list[Vectors]()
    embeddings.fit_ignored(collection, conditions, options.ignore_column, options.ignore_directions)
    for condition in conditions or (None,):
        if condition in guides:
            embeddings.fit_guide(guides[condition])
        if condition is None:
            vectors = embeddings.embed_plain(collection.texts)
        else:
            rows = [(text, condition) for text in collection.texts]
            vectors = embeddings.embed(rows, collection.file)
        guide_labels = embeddings.guides[condition].labels if condition in guides else None
        clustering = finder.with_guide(guide_labels).make_clustering(
            embeddings,
            condition,
            vectors,
            collection.texts,
            _find_mentions(embeddings, collection, condition, options.not_mentioned_below),
        )
        guided = _count_guide_labels(collection.texts, clustering.labels, guides.get(condition))
        clusterings.append(replace(clustering, guide=guide_labels, guided=guided))
        samples.append(vectors[sample_texts(collection.texts)])
        if drawing is not None:
            drawing.add(clusterings[-1], vectors)
    if labels:
        name, base_vectors = embeddings.embed_with_base(collection.texts)
        base_labels = [finder.cluster_base(base_vectors, one.k) for one in clusterings]
        scored_columns = labels if len(labels) > 1 else [labels[0]] * len(clusterings)
        clusterings = [
            replace(
                one,
                scores=score_clusters(
                    one.labels, base, known_labels[column], column, without_condition(name)
                ),
            )
            for one, base, column in zip(clusterings, base_labels, scored_columns, strict=True)
        ]
        if drawing is not None and conditions:
            base = Clustering(
                name,
                None,
                base_labels[0],
                describe_clusters(collection.texts, base_vectors, base_labels[0]),
                silhouette(base_vectors, base_labels[0], seed),
            )
            drawing.add(base, base_vectors)
    result = ClusterResult(
        out=out,
        report=report,
        map=map_file,
        file=collection.file,
        texts=len(collection.texts),
        distinct=distinct,
        encoder=embeddings.encoder.name,
        prompt=embeddings.view.name,
        head=embeddings.head.reference,
        method=options.method,
        seed=seed,
        clusterings=clusterings,
        table=_make_table(collection, column, options.keep, clusterings, columns),
    )
    _log_quality(clusterings, options.method, guide is not None)
    _write_outputs(result, drawing)
    if guide is None:
        compare_conditions(clusterings, samples, embeddings, collection)
    return result


def _find_mentions(
    embeddings: EmbeddingModel, collection: Collection, condition: str | None, least: float | None
) -> NDArray[np.bool_] | None:
    """Return (n,) whether the score of each text is at least ``least``; None: do not score."""
    if least is None or condition is None:
        return None
    rows = [(text, condition) for text in collection.texts]
    mentioned = embeddings.mentions(rows, collection.file) >= least
    log.info(
        f"{condition_text(condition)}: {(~mentioned).sum():,} of {len(rows):,} texts seem to say "
        "nothing about it"
    )
    return np.asarray(mentioned)


# -- options -----------------------------------------------------------------------------------


def _check_options(
    options: ClusterOptions, conditions: Sequence[str], guided: bool, labels: Sequence[str]
) -> None:
    """Check the conditions, and the columns of labels.

    Raises:
        UserError: the options contradict each other.
    """
    if options.answers is not None and not conditions:
        raise UserError("--answers needs --condition, whose answers are read. Add it.")
    if not conditions and not guided:
        raise UserError(
            "neither --condition nor --guide is given. Name what to compare the texts by, such as "
            "--condition 'the topic'."
        )
    if options.not_mentioned_below is not None and not conditions:
        raise UserError(
            "--not-mentioned-below needs --condition, which texts mention or not. Add it."
        )
    repeated = [text for text, n in Counter(map(condition_text, conditions)).items() if n > 1]
    if repeated:
        raise UserError(
            f"--condition {shortened_repr(repeated[0])} is given more than once. Give it once."
        )
    if len(labels) > 1 and len(labels) != len(conditions):
        raise UserError(
            f"--labels names {len(labels)} columns for {len(conditions)} conditions. Name one "
            "column, or one for each --condition."
        )


def _name_columns(
    conditions: Sequence[str], keep: Sequence[str], text: str
) -> list[tuple[str, str]]:
    """Return the column names of each condition's cluster numbers and cluster names."""
    suffixes = [f" ({condition_text(condition)})" for condition in conditions]
    if len(conditions) < 2:
        suffixes = [""]
    names = [(f"cluster{suffix}", f"name{suffix}") for suffix in suffixes]
    columns = Counter([text, *keep, *(name for pair in names for name in pair)])
    repeated = [name for name, n in columns.items() if n > 1]
    if repeated:
        raise UserError(
            f"the table would have two columns {repeated[0]!r}. Leave it out of --keep, or rename "
            "the column of the texts (--text)."
        )
    return names


@dataclass(frozen=True)
class _ClusterFinder:
    """The clustering algorithm with its settings.

    Attributes:
        method: the algorithm.
        k: the number of clusters of K-means; None: the best by silhouette.
        min_size: the fewest texts in a cluster of HDBSCAN; None: one in 100, and at least 5.
        seed: the random seed of K-means.
    """

    method: Method
    k: int | None
    min_size: int | None
    seed: int

    def with_guide(self, labels: Iterable[str] | None) -> _ClusterFinder:
        """Return a copy that finds as many clusters as a guide has labels, unless k was given."""
        chooses = self.k is None and self.method == "kmeans"
        return replace(self, k=len(set(labels or ())) or None) if chooses else self

    def check_texts(self, collection: Collection) -> int:
        """Return the number of distinct texts, and log how many are repeated.

        Raises:
            UserError: there are too few distinct texts.
        """
        n, distinct = len(collection.texts), len(set(collection.texts))
        if n > distinct:
            log.info(
                f"{collection.file}: {n - distinct:,} of {n:,} texts repeat an earlier one, and "
                "are kept"
            )
        self.check_distinct(distinct, f"{collection.file} has", "text")
        if self.min_size is not None and n < self.min_size:
            raise UserError(
                f"--min-cluster-size is {self.min_size}, but {collection.file} has "
                f"{format_count(n, 'text')}. Give at most {n}, or more texts."
            )
        return distinct

    def check_distinct(self, n: int, source: str, noun: str) -> None:
        """Check that there are enough distinct texts or vectors for the number of clusters.

        Args:
            n: number of distinct texts or vectors.
            source: the beginning of the message, whose object is this number.
            noun: ``text`` or ``vector``.

        Raises:
            UserError: there are fewer than 2, or fewer than clusters.
        """
        k = self.k or 2
        if n < k:
            raise UserError(
                f"{source} {format_count(n, f'distinct {noun}')}, and {k} clusters need at least "
                f"{k}. Give more texts that differ in more than case and spaces, or ask for fewer "
                "clusters (--clusters, or the labels of the guide)."
            )

    def __call__(self, vectors: Vectors, source: str) -> tuple[Labels, Mapping[int, float]]:
        """Return the (n,) cluster labels of n vectors, and the silhouette of every k tried.

        Raises:
            UserError: there are too few distinct vectors; the message begins with ``source``.
        """
        self.check_distinct(len(distinct_vectors(vectors)), source, "vector")
        if self.method == "hdbscan":
            minimum = self.min_size or max(5, len(vectors) // 100)
            return hdbscan(vectors, min(minimum, len(vectors))), {}
        k, silhouettes = (self.k, {}) if self.k else choose_k(vectors, self.seed)
        return number_by_size(kmeans(vectors, k, self.seed)), silhouettes

    def cluster_base(self, vectors: Vectors, k: int) -> Labels:
        """Return the (n,) labels of base vectors, in ``k`` clusters if the method is K-means.

        If fewer vectors are distinct, there are as many clusters.
        """
        distinct = len(distinct_vectors(vectors))
        if distinct < 2:
            return np.zeros(len(vectors), dtype=np.int64)
        if self.method == "kmeans":
            return number_by_size(kmeans(vectors, min(k, distinct), self.seed))
        return self(vectors, "")[0]

    def make_clustering(
        self,
        embeddings: EmbeddingModel,
        condition: str | None,
        vectors: Vectors,
        texts: Sequence[str],
        mentioned: NDArray[np.bool_] | None = None,
    ) -> Clustering:
        """Cluster the vectors of texts, and describe the clusters.

        Args:
            embeddings: the model of the vectors.
            condition: the condition that the vectors are under; None: none.
            vectors: (n, d) the vectors of the texts.
            texts: the n texts.
            mentioned: (n,) whether a text says anything about the condition; the others are in no
                cluster. None: all do.

        Raises:
            UserError: there are too few distinct vectors.
        """
        named = "" if condition is None else f"under {shortened_repr(condition_text(condition))}, "
        if mentioned is None:
            labels, silhouettes = self(vectors, f"{named}the texts have")
        else:
            labels = np.full(len(texts), NOISE)
            labels[mentioned], silhouettes = self(
                vectors[mentioned],
                f"{named}the texts that reach --not-mentioned-below (lower it to have more) have",
            )
        answers = embeddings.answers
        named_by = None
        if answers is not None and condition is not None:
            named_by = [answers.get(text, condition) for text in texts]

        def embed(words: Sequence[str]) -> Vectors:
            if condition is None:
                return embeddings.embed_plain(words)
            return embeddings.embed([(word, condition) for word in words], "the words")

        described = describe_clusters(texts, vectors, labels, embed, named_by)
        if mentioned is not None:
            described = [
                replace(cluster, name=NOT_MENTIONED) if cluster.cluster == NOISE else cluster
                for cluster in described
            ]
        return Clustering(
            embeddings.encoder.name,
            condition,
            labels,
            described,
            silhouette(vectors, labels, self.seed),
            silhouettes,
        )


# -- reports -----------------------------------------------------------------------------------


def _log_quality(clusterings: Sequence[Clustering], method: Method, guided: bool) -> None:
    """Log how well clusters are separated and agree with labels, and what may help."""
    for clustering in clusterings:
        log.info(f"{clustering.title}: {quality_text(clustering, method)}")
    if all(
        clustering.scores is not None and not clustering.scores.is_poor
        for clustering in clusterings
    ):
        return
    log.info(
        "a silhouette does not show whether clusters are those you want; read some texts of each. "
        + ("More texts in the guide may help." if guided else _GUIDE_HINT)
    )


#: The condition of clusters that follow no particular aspect.
_GENERAL = "what it is about"
#: The adjusted mutual information above which clusters under two conditions agree.
_AGREE = 0.3


def compare_conditions(
    clusterings: Sequence[Clustering],
    samples: Sequence[Vectors],
    embeddings: EmbeddingModel,
    collection: Collection,
) -> None:
    """Log which conditions are alike, and which one to ignore.

    Clusters under two conditions should not agree if the nearest texts differ. The conditions are
    those of the command, and a general one.
    """
    from sklearn.metrics import adjusted_mutual_info_score

    report_alike([one.condition or "" for one in clusterings], samples)
    rows = sample_texts(collection.texts)
    compared = [
        (one, one.condition, vectors)
        for one, vectors in zip(clusterings, samples, strict=True)
        if one.condition and not ignored_by(one.condition)
    ]
    if len(rows) < MIN_COLLECTION or not compared:
        return
    general = embeddings.embed([(collection.texts[row], _GENERAL) for row in rows], collection.file)
    for one, condition, vectors in compared:
        others = {
            condition_text(other.condition): (sample, other.labels[rows])
            for other, sample in zip(clusterings, samples, strict=True)
            if other.condition not in (None, condition)
        }
        k = min(len(np.unique(one.labels)), len(distinct_vectors(general)))
        others[_GENERAL] = general, kmeans(general, k, 0)
        agreement = {
            name: adjusted_mutual_info_score(one.labels[rows], labels)
            for name, (sample, labels) in others.items()
            if share_of_neighbours(vectors, sample) < ALIKE
        }
        closest = max(agreement, key=agreement.__getitem__, default="")
        if closest and agreement[closest] >= _AGREE:
            log.info(
                f"the clusters under {condition_text(condition)!r} agree with those under "
                f"{closest!r} (adjusted mutual information {agreement[closest]:.2f}), although the "
                f"nearest texts differ. If they should not, try --ignore {closest!r}"
            )


def _read_guides(
    guide: Any,
    text: str | None,
    conditions: Sequence[str],
    collection: Collection,
    read: ReadOptions,
) -> dict[str | None, LabelledTexts]:
    """Read labelled texts by condition, and log how many are not among the texts to cluster."""
    guides = read_guide(guide, text, [*conditions] or [None], read=read)
    distinct = {normalise_condition(text) for labelled in guides for text in labelled.texts}
    others = len(distinct - set(map(normalise_condition, collection.texts)))
    if others:
        log.info(
            f"{guides[0].source}: {others:,} of {len(distinct):,} labelled texts are not in "
            f"{collection.file}; they guide the clusters but are in none"
        )
    return {labelled.condition: labelled for labelled in guides}


def _count_guide_labels(
    texts: Sequence[str], labels: Labels, labelled: LabelledTexts | None
) -> dict[int, dict[str, int]] | None:
    """Return how many of the clustered texts have each label of the guide, by cluster."""
    if labelled is None:
        return None
    names = dict(zip(map(normalise_condition, labelled.texts), labelled.labels, strict=True))
    counts: dict[int, Counter[str]] = {}
    for text, cluster in zip(map(normalise_condition, texts), labels.tolist(), strict=True):
        if text in names:
            counts.setdefault(cluster, Counter())[names[text]] += 1
    return {cluster: dict(counter.most_common()) for cluster, counter in sorted(counts.items())}


def _read_known_labels(
    collection: Collection, names: Sequence[str], guides: Mapping[str | None, LabelledTexts]
) -> dict[str, list[str | None]]:
    """Return the known labels of each column, with None for missing ones.

    A text of a guide also has None: the guide knows its label, so it would be no test.
    """
    guide_texts = {
        normalise_condition(text) for labelled in guides.values() for text in labelled.texts
    }
    known_labels = {}
    for name in names:
        values = [
            None if normalise_condition(text) in guide_texts else label_text(value) or None
            for text, value in zip(collection.texts, collection.columns[name], strict=True)
        ]
        classes = {value for value in values if value is not None}
        if len(classes) < 2:
            exclusion = " (without the guide's texts)" if guide_texts else ""
            n_labels = format_count(len(classes), "different label")
            raise UserError(
                f"--labels {name}: {collection.file} has {n_labels}{exclusion}. At least 2 are "
                "needed."
            )
        known_labels[name] = values
    return known_labels


# -- output ------------------------------------------------------------------------------------


def _make_table(
    collection: Collection,
    text_column_name: str,
    keep: Sequence[str],
    clusterings: Sequence[Clustering],
    columns: Sequence[tuple[str, str]],
) -> dict[str, Sequence[Any]]:
    """Return a table of texts, with a column of clusters and one of names for each condition."""
    table: dict[str, Sequence[Any]] = {text_column_name: collection.texts}
    table |= {name: collection.columns[name] for name in keep}
    for clustering, (number, name) in zip(clusterings, columns, strict=True):
        names = {cluster.cluster: cluster.name for cluster in clustering.clusters}
        labels = clustering.labels.tolist()
        table |= {number: labels, name: [names[label] for label in labels]}
    return table


def _write_outputs(result: ClusterResult, drawing: ClusterMap | None) -> None:
    """Write the table, the picture of the map and the page that are wanted."""
    out, table = result.out, result.table
    if out is not None:
        write_table(out, table)
    counts = [format_count(clustering.k, "cluster") for clustering in result.clusterings]
    if len(counts) > 1:
        counts = [f"{n} by {c.title}" for n, c in zip(counts, result.clusterings, strict=True)]
    destination = "" if result.out is None else f" -> {result.out}"
    log.info(f"{result.texts:,} texts in {', '.join(counts)}{destination}")
    if drawing is not None and result.map is not None:
        drawing.plot(result.map)
    if drawing is not None and result.report is not None:
        write_cluster_page(result, drawing, result.report)
