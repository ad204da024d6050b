"""Group the texts of a file under conditions: a table, figures and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llmcond.clustering.describe import describe
from llmcond.clustering.methods import (
    CLEAR,
    NOISE,
    Labels,
    Vectors,
    choose_k,
    hdbscan,
    kmeans,
    silhouette,
)
from llmcond.clustering.page import Drawing, write_page
from llmcond.clustering.result import Clustering, ClusterResult, without_condition
from llmcond.clustering.scores import Scores, score
from llmcond.conditions import condition_text
from llmcond.data.candidates import Collection, has_column, is_missing, read_collection, text_column
from llmcond.data.guides import LabelledTexts, read_guide
from llmcond.data.rows import column_of
from llmcond.errors import UserError, brief, plural
from llmcond.evaluation.condition_checks import ConditionCheck, find_calibration, sample_texts
from llmcond.files import check_output, replacing, write_csv
from llmcond.log import log
from llmcond.workflows.embed import Embeddings
from llmcond.workflows.options.texts import ClusterOptions

Method = Literal["kmeans", "hdbscan"]

#: A V-measure below which clusters are said to agree little with labels.
_POOR = 0.5
_GUIDE = "About 40 labelled texts often help: --guide FILE, with the columns text and label."


def cluster(options: ClusterOptions) -> ClusterResult:
    """Group texts under each condition, and write a table of them where ``out`` is given.

    Raises:
        UserError: options, texts, a guide or labels that are wrong.
        LlmcondError: the encoder fails.
    """
    run_folder, condition, guide = options.folder(), options.conditions(), options.guide
    texts, text, keep, labels = options.texts, options.text, options.keep, options.labels
    method, seed = options.method, options.seed
    out = None if options.out is None else Path(options.out)
    report = None if options.report is None else Path(options.report)
    check_output(out, (".parquet", ".csv"), [texts, guide])
    check_output(report, (".html", ".htm"))
    _check_conditions(condition, guide is not None, labels)
    find = _Finder.of(options)
    column = text_column(partial(has_column, texts), text)
    columns = _columns(condition, keep, column)
    found = read_collection(texts, column, list(dict.fromkeys([*keep, *labels])))
    distinct = find.check(found)
    guides = {} if guide is None else _read_guides(guide, text, condition, found)
    known = _known(found, labels, guides)

    given = Embeddings(run_folder, options.head, options.prompt, options.device)
    drawing = None if report is None else Drawing(found.texts, seed)
    made: list[Clustering] = []
    samples: list[Vectors] = []
    for asked in condition or (None,):
        vectors = _vectors(given, found, asked, guides.get(asked))
        guide_labels = given.guides[asked].labels if asked in guides else None
        clustering = find.guided(guide_labels).clustering(
            given.encoder.name, asked, vectors, found.texts
        )
        made.append(replace(clustering, guide=guide_labels))
        samples.append(vectors[sample_texts(found.texts)])
        if drawing is not None:
            drawing.add(made[-1], vectors)
    if labels:
        name, plain = given.base(found.texts)
        beside = [find.again(one.k)(plain)[0] for one in made]
        made = _scored(made, beside, known, labels, without_condition(name))
        if drawing is not None and condition:
            described = describe(found.texts, plain, beside[0])
            drawing.add(Clustering(name, None, beside[0], described), plain)
    result = ClusterResult(
        out=out,
        report=report,
        file=found.file,
        texts=len(found.texts),
        distinct=distinct,
        encoder=given.encoder.name,
        prompt=given.view.name,
        head=given.head_name,
        method=method,
        seed=seed,
        clusterings=made,
    )
    if out is not None:
        kept = {name: found.columns[name] for name in keep}
        _write(out, {column: found.texts, **kept}, made, columns)
    _note_quality(made, method, guide is not None)
    if options.check and guide is None:
        _note_conditions(condition, samples, run_folder)
    where = "" if out is None else f" -> {out}"
    log.info(f"{len(found.texts):,} texts in {_counted(made)}{where}")
    if drawing is not None and report is not None:
        write_page(result, drawing, report)
    return result


def _vectors(
    given: Embeddings, found: Collection, condition: str | None, labelled: LabelledTexts | None
) -> Vectors:
    """Return what is clustered of n texts, (n, d): embeddings that follow labelled texts if any."""
    if labelled is not None:
        given.guide(labelled)
    if condition is None:
        return given.alone(found.texts)
    return given.of([(one, condition) for one in found.texts], found.file)


# -- what was asked for ------------------------------------------------------------------------


def _check_conditions(condition: Sequence[str], guided: bool, labels: Sequence[str]) -> None:
    if not condition and not guided:
        raise UserError(
            "there is neither --condition nor --guide; say what texts are compared by, such as "
            "--condition 'the topic'."
        )
    if any(not one.strip() for one in condition):
        raise UserError("--condition is empty; give a text.")
    twice = [one for one, n in Counter(map(condition_text, condition)).items() if n > 1]
    if twice:
        raise UserError(f"--condition {brief(twice[0])} is given twice; give it once.")
    if len(labels) > 1 and len(labels) != len(condition):
        raise UserError(
            f"--labels names {len(labels)} columns, and there are {len(condition)} times "
            "--condition; name one column, or one for each condition."
        )


def _columns(condition: Sequence[str], keep: Sequence[str], text: str) -> list[tuple[str, str]]:
    """Return what the columns of each condition's clusters and of their names are called."""
    ends = [f" ({condition_text(one)})" for one in condition] if len(condition) > 1 else [""]
    found = [(f"cluster{end}", f"name{end}") for end in ends]
    taken = {text, *(name for pair in found for name in pair)}
    double = [name for name in keep if name in taken] or [
        name for name, n in Counter(keep).items() if n > 1
    ]
    if double:
        raise UserError(
            f"--keep {double[0]}: a column of that name is written anyway; leave it out."
        )
    if any(text in pair for pair in found):
        raise UserError(
            f"--text {text}: a column of that name is written for the clusters. Rename it."
        )
    return found


@dataclass(frozen=True)
class _Finder:
    """How clusters are found.

    Attributes:
        k: how many by K-means; None: chosen.
        least: texts that make a cluster of HDBSCAN; None: one in 100, and 5 at least.
    """

    method: Method
    k: int | None
    least: int | None
    seed: int

    @classmethod
    def of(cls, options: ClusterOptions) -> _Finder:
        """Return what options ask for; a UserError for those that do not go together."""
        k: Any = None if options.clusters == "auto" else options.clusters
        method, least = options.method, options.min_cluster_size
        if k is not None and (not isinstance(k, int) or isinstance(k, bool)):
            raise UserError(f"--clusters is {brief(k)}; give a number, or auto.")
        if k is not None and method == "hdbscan":
            raise UserError(
                "--clusters is for kmeans; hdbscan finds how many there are (--min-cluster-size "
                "says how large they are at least)."
            )
        if least is not None and method == "kmeans":
            raise UserError("--min-cluster-size is for --method hdbscan; kmeans takes --clusters.")
        if k is not None and k < 2:
            raise UserError(f"--clusters is {k}; it must be at least 2: one would hold all texts.")
        return cls(method, k, least, options.seed)

    def again(self, k: int) -> _Finder:
        """Return what finds as many clusters of other vectors, if it is told how many."""
        return replace(self, k=k) if self.method == "kmeans" else self

    def guided(self, labels: Mapping[str, int] | None) -> _Finder:
        """Return what finds as many clusters as a guide has labels, unless a number is given."""
        chooses = self.k is None and self.method == "kmeans"
        return replace(self, k=len(labels)) if labels and chooses else self

    def check(self, found: Collection) -> int:
        """Return how many texts differ; a UserError where there are too few."""
        n, distinct = len(found.texts), len(set(found.texts))
        if n > distinct:
            log.info(f"{found.file}: {n - distinct:,} of {n:,} texts repeat an earlier one; kept")
        least = max(2, self.k or self.least or 2)
        if distinct < least:
            option = "--clusters" if self.k else "--min-cluster-size" if self.least else ""
            asked = f"{option} is {least}" if option else "clusters take 2 at least"
            raise UserError(
                f"{found.file} holds {distinct} distinct text{'s' * (distinct > 1)}, and {asked}. "
                f"{'Ask for fewer, or give more texts.' if option else 'Give more texts.'}"
            )
        return distinct

    def __call__(self, vectors: Vectors) -> tuple[Labels, Mapping[int, float]]:
        """Return (n,) clusters of n vectors, and the scores of every K that was tried."""
        if self.method == "hdbscan":
            least = self.least or max(5, len(vectors) // 100)
            return hdbscan(vectors, min(least, len(vectors))), {}
        k, tried = (self.k, {}) if self.k else choose_k(vectors, self.seed)
        distinct = len(np.unique(vectors, axis=0))
        if distinct < k:
            raise UserError(
                f"the texts have {distinct} distinct vectors, and --clusters is {k}. Ask for "
                "fewer, or give more texts."
            )
        return kmeans(vectors, k, self.seed), tried

    def clustering(
        self, encoder: str, condition: str | None, vectors: Vectors, texts: Sequence[str]
    ) -> Clustering:
        """Return the clusters of n vectors, those of texts by an encoder under a condition."""
        labels, tried = self(vectors)
        return Clustering(
            encoder,
            condition,
            labels,
            describe(texts, vectors, labels),
            silhouette(vectors, labels, self.seed),
            tried,
        )


# -- what is said of the clusters --------------------------------------------------------------


def _note_quality(made: Sequence[Clustering], method: Method, guided: bool) -> None:
    """Say how far apart clusters are, where they agree little with labels, and what may help."""
    for one in made:
        what = f"{one.title}: {_clusters(one)}"
        if method == "hdbscan":
            noise = int((one.labels == NOISE).sum())
            what += f"; {noise:,} of {len(one.labels):,} texts are in none"
        if one.silhouette is not None:
            unclear = ", so not clearly apart" if one.silhouette <= CLEAR else ""
            what += f"; silhouette {one.silhouette:.2f}{unclear}"
        if one.scores is not None and _is_poor(one.scores):
            what += f"; they agree little with the labels {one.scores.column}"
        log.info(what)
    if all(one.scores is not None and not _is_poor(one.scores) for one in made):
        return
    log.info(
        "a silhouette does not tell whether clusters are those you want: read some texts of each. "
        + ("More texts in the guide may help." if guided else _GUIDE)
    )


def _note_conditions(
    conditions: Sequence[str], samples: Sequence[Vectors], run_folder: Path
) -> None:
    """Say of each condition whether it is expected to work; nothing of too few texts."""
    calibration = find_calibration(run_folder)
    if calibration is None or not calibration.tells_apart:
        return
    for condition, vectors in zip(conditions, samples, strict=True):
        check = ConditionCheck.of(condition, vectors, calibration)
        if check.expected is not None:
            log.info(f"{condition_text(condition)}: {check.sentence()}")


def _is_poor(scores: Scores) -> bool:
    return scores.own["v_measure"].value < _POOR


def _clusters(found: Clustering) -> str:
    return plural(found.k, "cluster")


def _read_guides(
    given: Any, text: str | None, conditions: Sequence[str], among: Collection
) -> dict[str | None, LabelledTexts]:
    """Return labelled texts by condition; how many are not among those to cluster is logged."""
    read = read_guide(given, text, [*conditions] or [None])
    distinct = {text for labelled in read for text in labelled.texts}
    others = len(distinct - set(among.texts))
    if others:
        log.info(
            f"{read[0].source}: {others:,} of {len(distinct):,} labelled texts are not in "
            f"{among.file}; they guide too, and are in no cluster"
        )
    return {labelled.condition: labelled for labelled in read}


def _known(
    found: Collection, names: Sequence[str], guides: Mapping[str | None, LabelledTexts]
) -> dict[str, list[str | None]]:
    """Return the known labels of each column; None where there is none, or a guide has the text.

    What a guide was told would be no test.
    """
    told = {text for labelled in guides.values() for text in labelled.texts}
    known = {}
    for name in names:
        values = [
            None if is_missing(value) or text in told else str(value)
            for text, value in zip(found.texts, found.columns[name], strict=True)
        ]
        classes = {value for value in values if value is not None}
        if len(classes) < 2:
            beside = " beside the guide's texts" if told else ""
            raise UserError(
                f"--labels {name}: {found.file} has {len(classes)} different labels{beside}; at "
                "least 2 are needed to compare with."
            )
        known[name] = values
    return known


def _scored(
    made: Sequence[Clustering],
    base: Sequence[Labels],
    known: Mapping[str, list[str | None]],
    names: Sequence[str],
    base_name: str,
) -> list[Clustering]:
    """Return clusterings with their scores, and those of clusters of the base's vectors."""
    columns = names if len(names) > 1 else [names[0]] * len(made)
    return [
        replace(one, scores=score(one.labels, other, known[name], name, base_name))
        for one, other, name in zip(made, base, columns, strict=True)
    ]


# -- what is written ---------------------------------------------------------------------------


def _counted(made: Sequence[Clustering]) -> str:
    if len(made) == 1:
        return _clusters(made[0])
    return ", ".join(f"{_clusters(one)} by {one.title}" for one in made)


def _write(
    out: Path,
    table: dict[str, Sequence[Any]],
    made: Sequence[Clustering],
    columns: Sequence[tuple[str, str]],
) -> None:
    """Write a table of texts, with columns for the clusters of each condition and their names."""
    for one, (number, name) in zip(made, columns, strict=True):
        names = {own.cluster: own.name for own in one.clusters}
        table |= {number: one.labels.tolist(), name: [names[i] for i in one.labels.tolist()]}
    if out.suffix.lower() == ".csv":
        write_csv(out, table, zip(*table.values(), strict=True))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {name: column_of(values) for name, values in table.items()}
    with replacing(out) as temporary:
        pq.write_table(pa.table(arrays), temporary.absolute())
