"""Explain heads: how their embeddings lie, what conditions do to them, and what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import as_matrix
from llmcond.data.rows import Rows
from llmcond.display import DisplayedDict
from llmcond.errors import UserError, install_command
from llmcond.evaluation.clusters import impurity, project_2d
from llmcond.evaluation.conditions import (
    Change,
    change_table,
    frobenius_variance,
    most_changed,
    seen_unseen,
)
from llmcond.evaluation.isotropy import MOST_VECTORS, measure_isotropy
from llmcond.files import check_writable, write_json
from llmcond.heads import PairArrays
from llmcond.log import log
from llmcond.metrics import finite
from llmcond.report.figures import has_matplotlib, plot_clusters
from llmcond.runs import Run, SavedEmbeddingHead, SavedHead, open_run
from llmcond.runs.features import RowFeatures
from llmcond.runs.predictors import fitted_heads, predict, zeroshots
from llmcond.system import provenance
from llmcond.workflows.options.scoring import AnalyseOptions, Analysis

ANALYSES: Sequence[Analysis] = get_args(Analysis)


class AnalysisResult(DisplayedDict):
    """Rows of each analysis by its name, the split, and the number of rated rows ``n``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Split:
    """Rated rows of a split, and how each predictor sees them."""

    rows: Rows
    features: RowFeatures
    rated: NDArray[np.int64]

    def pairs(self, predictor: SavedEmbeddingHead) -> PairArrays:
        return self.features.pairs(predictor.view).take(self.rated)

    def embeddings(self, predictor: SavedEmbeddingHead, side: str) -> NDArray[np.float32]:
        pairs = self.pairs(predictor)
        vectors = pairs.first if side == "first" else pairs.second
        return predictor.head.transform(vectors, pairs.condition)

    def texts(self, column: Sequence[str]) -> list[str]:
        return [column[i] for i in self.rated]


def analyse(asked: AnalyseOptions) -> AnalysisResult:
    """Analyse a run's heads, and zero-shot.

    Isotropy (CASE, appendix B), impurity of condition clusters (Hyper-CL, section 5.2), seen and
    unseen conditions (5.3), variance of the norm of generated matrices (5.4.1), and the rows whose
    similarity changed most (CASE, tables 3 and 8).

    Returns:
        For each analysis its rows; also written to ``analyses.json`` in the run.

    Raises:
        UserError: no run, no such head, or a split with no rated rows.
    """
    what, top, seed = asked.what or ANALYSES, asked.top, asked.seed
    run = open_run(Path(asked.run))
    split = run.scored_split(asked.split)
    rows = run.rows(split)
    rated = np.flatnonzero(rows.rated)[:MOST_VECTORS]
    if not len(rated):
        raise UserError(f"none of the {len(rows):,} rows of {split} is rated; nothing to analyse.")
    fitted = fitted_heads(run, asked.head, split)
    prompts = {p.name: p for head in fitted for p in head.view.prompts} or run.prompts()
    plain = [zeroshot for prompt in prompts.values() for zeroshot in zeroshots(run, prompt)]
    predictors: list[SavedEmbeddingHead] = [*plain, *fitted]
    if not predictors:
        raise UserError(f"{run.folder} has no extracted features yet. Run `llmcond extract` first.")
    data = _Split(rows, RowFeatures(rows, run.store()), rated)
    kept, sizes = _writable(run.folder), (asked.conditions, asked.sentences)
    out = Path(asked.out) if asked.out else run.folder / "analyses" if kept else None
    if "clusters" in what and fitted and out is not None and not has_matplotlib():
        log.info(f"no pictures are drawn: they need matplotlib ({install_command('plots')})")
        out = None
    done: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "isotropy": lambda: [_isotropy(one, data, seed) for one in predictors],
        "clusters": lambda: _clusters(predictors, fitted, run, data, sizes, seed, out),
        "conditions": lambda: _conditions(predictors, data, run),
        "norms": lambda: [_norms(head, data) for head in fitted if head.head.generates_matrices],
        "examples": lambda: [_examples(head, run, data, top) for head in fitted],
    }
    report = {name: done[name]() for name in ANALYSES if name in what}
    result = AnalysisResult(split=split, n=len(rated), **report)
    if kept:
        write_json(run.folder / "analyses.json", {**result, "seed": seed, **provenance()})
    return result


def _writable(folder: Path) -> bool:
    try:
        check_writable(folder / "analyses.json")
    except UserError as error:
        log.info(f"neither analyses.json nor pictures without --out are kept: {error}")
        return False
    return True


def _isotropy(predictor: SavedEmbeddingHead, data: _Split, seed: int) -> dict[str, Any]:
    vectors = np.concatenate([data.embeddings(predictor, side) for side in ("first", "second")])
    about = {"prompt": predictor.view.name, "subtract": predictor.view.subtracts}
    return {**measure_isotropy(predictor.name, vectors, seed), **about}


def _clusters(
    predictors: Sequence[SavedEmbeddingHead],
    fitted: Sequence[SavedHead],
    run: Run,
    data: _Split,
    sizes: tuple[int, int],
    seed: int,
    out: Path | None,
) -> list[dict[str, Any]]:
    """Cluster the embeddings of some sentences under the most frequent conditions."""
    n_conditions, n_sentences = sizes
    conditions = data.texts(data.rows.condition)
    names = [name for name, _ in Counter(conditions).most_common(n_conditions)]
    if len(names) < 2:
        raise UserError("clusters of conditions need at least 2 conditions; the split has 1.")
    places: list[int] = []
    for name in names:
        places += [i for i, text in enumerate(conditions) if text == name][:n_sentences]
    labels = [conditions[i] for i in places]
    vectors = {one.name: data.embeddings(one, "first")[places] for one in predictors}
    results = []
    for name, points in vectors.items():
        found = impurity(points, labels, seed=seed)
        results.append({"name": name, "impurity": found.value, **asdict(found)})
    kinds = np.array([names.index(text) for text in labels])
    if out is None:
        return results
    for head in fitted:
        before = _before(head, run)
        path = out / f"clusters-{head.name}.png"
        before_2d, after_2d = (project_2d(vectors[name]) for name in (before.name, head.name))
        plot_clusters(before_2d, after_2d, kinds, names, path, (before.name, head.name))
        log.info(f"picture -> {path}")
    return results


def _before(head: SavedHead, run: Run) -> SavedEmbeddingHead:
    """Return the features that a head was fitted on, as they are."""
    return zeroshots(run, head.view.prompts[0])[-1 if head.view.subtract else 0]


def _conditions(
    predictors: Sequence[SavedEmbeddingHead], data: _Split, run: Run
) -> list[dict[str, Any]]:
    train, metric = run.rows("train"), run.task.main_metric
    known = [text for text, rated in zip(train.condition, train.rated, strict=True) if rated]
    conditions = data.texts(data.rows.condition)
    results = []
    for predictor in predictors:
        pairs = data.pairs(predictor)
        similarity = predict(predictor, pairs)
        group = data.rows.pair[data.rated]
        found = seen_unseen(known, conditions, pairs.rating, similarity, group, metric)
        row: dict[str, Any] = {"name": predictor.name, "metric": metric.name}
        row |= {f"n_{kind}_conditions": found[kind].n_conditions for kind in ("seen", "unseen")}
        for kind, one in found.items():
            value, *interval = map(finite, astuple(one.score))
            row |= {kind: value, f"{kind}_ci": interval, f"n_{kind}": one.n}
        results.append(row)
    return results


def _norms(head: SavedHead, data: _Split) -> dict[str, Any]:
    condition = data.pairs(head).condition
    if condition is None:
        raise UserError(f"the head {head.name} takes no conditions.")
    first, _ = as_matrix(condition).unique()
    norms = head.head.matrix_norms(as_matrix(condition).take(first))
    size = head.head.dim_in * head.head.dim_out
    found = frobenius_variance(norms, size)
    return {"name": head.name, "mean_norm": float(norms.mean()), **asdict(found)}


def _examples(head: SavedHead, run: Run, data: _Split, top: int) -> dict[str, Any]:
    features = _before(head, run)
    before = predict(features, data.pairs(features))
    pairs = data.pairs(head)
    after = predict(head, pairs)
    better, worse = most_changed(pairs.rating, before, after)
    texts = [data.texts(getattr(data.rows, c)) for c in ("sentence1", "sentence2", "condition")]
    figures = [column.tolist() for column in (pairs.rating, before, after)]
    changes = [Change(*row) for row in zip(*texts, *figures, strict=True)]

    def table(chosen: Sequence[int]) -> list[dict[str, Any]]:
        return [asdict(change) for change in change_table([changes[i] for i in chosen[:top]])]

    return {
        "name": head.name,
        "before": features.name,
        "n_better": len(better),
        "n_worse": len(worse),
        "better": table(better),
        "worse": table(worse),
    }
