"""Scoring heads and zero-shot against ratings, analysing heads, and checking conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.arrays import as_matrix
from llmcond.base.errors import UserError, format_count, install_command
from llmcond.base.files import (
    MISSING_LIBRARIES,
    can_draw,
    check_output,
    check_writable,
    write_csv,
    write_json,
)
from llmcond.base.metrics import finite_or_none, get_metric
from llmcond.base.output import DisplayedDict, log
from llmcond.base.system import provenance
from llmcond.data.datasets import is_missing, open_collection, read_collection
from llmcond.data.formats import ReadOptions
from llmcond.data.readers import IN_MEMORY
from llmcond.data.rows import Rows
from llmcond.evaluation.analyses import (
    MAX_VECTORS,
    change_table,
    frobenius_variance,
    impurity,
    most_changed,
    project_2d,
    seen_unseen,
)
from llmcond.evaluation.results import Results, best_first, estimate_text
from llmcond.heads import PairArrays
from llmcond.options.scoring import (
    AnalyseOptions,
    Analysis,
    DialogueOptions,
    EvaluateOptions,
    RankingOptions,
    TiesOption,
)
from llmcond.report.content import make_page, measure_predictors
from llmcond.report.figures import MapPanel, Point, plot_curve, plot_isotropy, plot_maps
from llmcond.report.page import check_page, write_page
from llmcond.report.tables import highest_or_lowest
from llmcond.runs import Run, RunEmbeddingHead, RunFittedHead, open_any_run, open_run
from llmcond.runs.embedder import Embedder, make_embedder
from llmcond.runs.examples import (
    Evaluation,
    RowFeatures,
    load_fitted_heads,
    predict,
    zero_shot_heads,
)
from llmcond.runs.open import LazyEncoder
from llmcond.runs.rated import training_rows


def evaluate(options: EvaluateOptions) -> Results:
    """Score a run's heads, and zero-shot under their prompts.

    Raises:
        UserError: there is no such run, head or split, or no rated row.
    """
    run = open_any_run(Path(options.run), cross=True)
    _check_options(run, options)
    if options.predictions is not None:
        sources = [options.data, run.manifest["data"]["source"], options.candidates, options.plan]
        check_output(Path(options.predictions), (".csv",), sources)
    if options.report is not None:
        check_page(Path(options.report))
    evaluation = run.kind.evaluate(run, options)
    results: Results = evaluation.results
    _write_files(evaluation, run, options)
    return results


def _write_files(evaluation: Evaluation, run: Run, options: EvaluateOptions) -> None:
    """Write the files that the options name: the predictions or ranks of each example, a page."""
    examples, results = evaluation.examples, evaluation.results
    if examples is None:
        return
    predictions = {
        result.name: values for result, values in zip(results, evaluation.predictions, strict=True)
    }
    is_rows = isinstance(examples, Rows)
    if options.predictions is not None:
        digits = ".6f" if is_rows else "g"
        columns: list[tuple[str, Iterable[Any]]]
        if isinstance(examples, Rows):
            rating = ["" if np.isnan(value) else f"{value:g}" for value in examples.rating]
            columns = [("row", examples.number), *examples.texts.items(), ("rating", rating)]
        else:
            columns = [("row", range(1, len(examples) + 1)), *examples.columns.items()]
        columns += [
            (name, [format(value, digits) for value in values])
            for name, values in predictions.items()
        ]
        headings, cells = zip(*columns, strict=True)
        table = list(zip(*cells, strict=True))
        write_csv(Path(options.predictions), headings, table)
        unit = "rows" if is_rows else "queries"
        log.info(f"predictions for {len(table):,} {unit} -> {options.predictions}")
    if options.report is None:
        return
    best = best_first(results)
    first = best[0]
    if not first.counts.n:
        raise UserError("there are no ratings to report on. Leave out --report.")
    settings: dict[str, Any] = {"heads": [row.name for row in results if row.seeds]}
    for option_class in _kind_options(run):
        settings |= asdict(options.select(option_class))
    if isinstance(examples, Rows):
        source = examples.file
    else:
        data = options.data if isinstance(options.data, str | Path | None) else IN_MEMORY
        source = str(run.manifest["data"]["source"] if data is None else data)
        settings["data"] = data
    summary = []
    if not np.isnan(first.main.value):
        figures = ", ".join(
            f"{get_metric(name).heading} {estimate_text(get_metric(name), estimate)}"
            for name, estimate in first.metrics.items()
            if not get_metric(name).secondary
        )
        untested = (
            " Whether systems differ by more than chance is not tested; llmcond compare tests it."
        )
        summary.append(
            f"{highest_or_lowest(first.primary)}: {first.name}, {figures}."
            f"{untested if len(best) > 1 else ''}"
        )
    systems = format_count(len(best), "system")
    summary.append(f"{systems}, on {first.counts.text} of {source}.")
    title = f"Evaluation: {run.encoder_name}"
    page = make_page(
        run,
        examples,
        best,
        predictions,
        evaluation.store,
        title=title,
        summary=summary,
        settings=settings,
    )
    write_page(page, Path(options.report))


_KIND_OPTIONS: Sequence[type[TiesOption]] = (RankingOptions, DialogueOptions)


def _kind_options(run: Run) -> list[type[TiesOption]]:
    """Return the classes of options that are for the run's kind of task only."""
    return [cls for cls in _KIND_OPTIONS if cls.task_kind[0] == run.kind.kind]


def _check_options(run: Run, options: EvaluateOptions) -> None:
    """Raise a UserError for options that another kind of task than the run's has."""
    data = options.data_options()
    run.task.check_options(data)
    has_reading = data.reading != ReadOptions() and options.candidates is None
    if data.source is None and (data.columns or data.scale or has_reading):
        raise UserError(
            "--columns, --rating-range, --unrated, --encoding, --delimiter and --skip-empty say "
            "how the file of --data is read, and --data was not given. Leave them out, or add it."
        )
    allowed = {f.name for option_class in _kind_options(run) for f in fields(option_class)}
    for option_class in _KIND_OPTIONS:
        for item in fields(option_class):
            if item.name not in allowed and getattr(options, item.name) != item.default:
                kind = TiesOption if item.name == "ties" else option_class
                raise UserError(
                    f"--{item.name.replace('_', '-')} is for {kind.task_kind[1]}, but {run.folder} "
                    f"is a run of the task {run.task.name}. Leave it out."
                )


#: Two texts, and the condition that they are compared under; None: without a condition.
_Comparison = tuple[str, str, str | None]
#: Columns of a table of questions that may be missing or empty.
_ANSWERS = ("answer1", "answer2")


def read_comparisons(data: Any) -> list[_Comparison]:
    """Read a table with the columns sentence1, sentence2 and condition, and perhaps answers.

    Returns:
        The comparisons of each row: both sentences without a condition, unless an earlier row has
        the same ones, both under the condition, and each with its answer (answer1 and answer2).

    Raises:
        UserError: the table cannot be read, it lacks a column, or a text is empty.
    """
    source = open_collection(data)
    answers = [name for name in _ANSWERS if source.has_column(name)]
    required = [
        read_collection(source, column).texts for column in ("sentence1", "sentence2", "condition")
    ]
    columns = read_collection(source, "sentence1", answers).columns
    comparisons: dict[_Comparison, None] = {}
    for i, (first, second, condition) in enumerate(zip(*required, strict=True)):
        comparisons |= dict.fromkeys([(first, second, None), (first, second, condition)])
        for sentence, name in zip((first, second), _ANSWERS, strict=True):
            answer = columns[name][i] if name in answers else None
            if not is_missing(answer) and str(answer):
                comparisons[sentence, str(answer), condition] = None
    return list(comparisons)


def compare_before_and_after(
    run: Run,
    heads: Sequence[tuple[RunEmbeddingHead, RunFittedHead]],
    comparisons: Sequence[_Comparison],
) -> list[dict[str, Any]]:
    """Compare texts by the features that heads were fitted on, and by the heads.

    All texts are encoded with the run's encoder. An answer is encoded like a sentence, under the
    same condition. Two sentences are also compared without a condition: each is encoded as the
    prompt encodes a condition alone, f(s; I(∅)), and nothing is subtracted.

    Args:
        run: the run, which names the encoder.
        heads: zero-shot on the features of each head, and the head.
        comparisons: the texts and conditions.

    Returns:
        For each head its name, the name of its features, and in ``rows`` the two texts, the
        condition (None if there is none), and the similarities ``before`` and ``after``. The
        latter is None without a condition if the head takes conditions.

    Raises:
        UserError: the encoder is missing or has changed, or a prompt is a control.
    """
    encoder = LazyEncoder(run.resolve_encoder("auto"))()
    results, by_features = [], dict[str, list[float | None]]()
    for features, head in heads:
        if features.name not in by_features:  # heads may share their features
            by_features[features.name] = _compare(make_embedder(encoder, features), comparisons)
        before = by_features[features.name]
        after = _compare(make_embedder(encoder, head), comparisons)
        rows = [
            {"text1": first, "text2": second, "condition": condition, "before": old, "after": new}
            for (first, second, condition), old, new in zip(comparisons, before, after, strict=True)
        ]
        results.append({"name": head.name, "before": features.name, "rows": rows})
    return results


def _compare(model: Embedder, comparisons: Sequence[_Comparison]) -> list[float | None]:
    """Return the similarity of each comparison; None if the model needs a condition."""
    under = [(*texts, condition) for *texts, condition in comparisons if condition is not None]
    similarities = iter(model.similarity(*zip(*under, strict=True)).tolist())
    unconditional: Iterator[float | None] = repeat(None)
    if not model.view.conditioned:
        parts = [prompt.sentence_part or prompt.unconditional for prompt in model.view.prompts]
        texts = [text for *pair, condition in comparisons if condition is None for text in pair]
        inputs = [part.render(text, text) for text in texts for part in parts]
        embedded = model.head.transform(model.encoder.encode(inputs).reshape(len(texts), -1))
        unconditional = iter(model.compare(embedded[::2], embedded[1::2]).tolist())
    return [
        next(unconditional if condition is None else similarities) for *_, condition in comparisons
    ]


class AnalysisResult(DisplayedDict):
    """The analyses of a run: for each analysis its rows, besides ``split`` and ``n``.

    It is a dictionary: ``split`` is the split's name, ``n`` the number of its rated rows (of
    dialogues, next turns), and each other key the name of an analysis, with a list of rows
    (dictionaries) as its value.

    Examples:
        >>> import llmcond
        >>> rows = [
        ...     dict(sentence1=f"{n} dogs run.", sentence2=f"{n} cats run.", condition=c, label=r)
        ...     for n in range(2, 12) for c, r in [("the action", 5), ("the animal", 1)]
        ... ]
        >>> features = llmcond.extract(model="minilm", run="demo", data=rows)
        >>> analysis = llmcond.analyse(run="demo", what=["isotropy"])
        >>> analysis["split"], analysis["n"]
        ('test', 2)
        >>> [row["name"] for row in analysis["isotropy"]]
        ['none@routed+c', 'none@routed']
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Split:
    """The rated rows of a split, with the features that each predictor takes."""

    rows: Rows
    features: RowFeatures
    rated: NDArray[np.int64]

    def pairs(self, predictor: RunEmbeddingHead) -> PairArrays:
        return self.features.pairs(predictor.view).take(self.rated)

    def texts(self, column: Sequence[str]) -> list[str]:
        return [column[i] for i in self.rated]


def analyse(options: AnalyseOptions) -> AnalysisResult:
    """Analyse a run's heads, and zero-shot.

    The analyses are isotropy (CASE, appendix B), impurity of condition clusters (Hyper-CL, section
    5.2), seen and unseen conditions (5.3), variance of the norm of generated matrices (5.4.1), the
    rows whose similarity changed most, and given sentences and answers before and after each head
    (CASE, tables 3 and 8). Those of dialogues are in ``llmcond.kinds.dialogue.evaluate``.

    Returns:
        The rows of each analysis, which are also written to ``analyses.json`` in the run.

    Raises:
        UserError: there is no such run or head, or the split has no rated rows.
    """
    run, top, seed = open_any_run(Path(options.run)), options.top, options.seed
    if not run.kind.analyses:
        open_run(run.folder)  # raises an error with the commands for such runs
    analyses = _choose_analyses(options, run)
    can_write = _check_folder_writable(run.folder)
    if not run.is_rated:
        result = AnalysisResult(run.kind.analyse(run, options, analyses))
        if can_write:
            write_json(run.folder / "analyses.json", {**result, **provenance()})
        if "turns" in result and (options.out or can_write):
            folder = Path(options.out or run.folder / "analyses")
            _draw_turns(result["turns"], folder / f"turns.{options.figure_format}")
        return result
    comparisons = read_comparisons(options.answers) if "answers" in analyses else []
    split = run.scored_split(options.split)
    rows = run.rows(split)
    rated = np.flatnonzero(rows.rated)[:MAX_VECTORS]
    if not len(rated):
        raise UserError(
            f"none of the {len(rows):,} rows of {split} has a rating, so there is nothing to "
            "analyse. Name another --split."
        )
    fitted = load_fitted_heads(run, options.head, split)
    prompts = {p.name: p for head in fitted for p in head.view.prompts} or run.prompts()
    zeroshot_heads = [
        zeroshot for prompt in prompts.values() for zeroshot in zero_shot_heads(run, prompt)
    ]
    predictors: list[RunEmbeddingHead] = [*zeroshot_heads, *fitted]
    if not predictors:
        raise UserError(f"{run.folder} has no extracted features yet. Run `llmcond extract` first.")
    data = _Split(rows, RowFeatures(rows, run.store()), rated)
    sizes = (options.conditions, options.sentences)
    out = Path(options.out) if options.out else run.folder / "analyses" if can_write else None
    if out is not None and {"isotropy", "clusters"} & set(analyses) and not can_draw():
        log.info(f"no pictures: {MISSING_LIBRARIES} ({install_command('report')})")
        out = None

    def figure(name: str) -> Path | None:
        return None if out is None else out / f"{name}.{options.figure_format}"

    functions: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "isotropy": lambda: _analyse_isotropy(predictors, data, seed, figure("isotropy")),
        "clusters": lambda: _analyse_clusters(predictors, fitted, data, sizes, seed, figure),
        "conditions": lambda: _analyse_conditions(predictors, data, run),
        "norms": lambda: [
            _analyse_norms(head, data) for head in fitted if head.head.generates_matrices
        ],
        "examples": lambda: [_list_examples(head, run, data, top) for head in fitted],
        "answers": lambda: compare_before_and_after(
            run, [(_find_input_features(head, run), head) for head in fitted], comparisons
        ),
    }
    analyses = _leave_out_impossible(analyses, data, options)
    report = {name: functions[name]() for name in analyses}
    result = AnalysisResult(split=split, n=len(rated), **report)
    if can_write:
        write_json(run.folder / "analyses.json", {**result, "seed": seed, **provenance()})
    return result


def _leave_out_impossible(
    analyses: Sequence[Analysis], data: _Split, options: AnalyseOptions
) -> Sequence[Analysis]:
    """Leave out by default what compares conditions, if the rows have only one condition."""
    if options.what or len(set(data.texts(data.rows.condition))) > 1:
        return analyses
    log.info("the rows have one condition, so the analyses clusters and norms are left out")
    return [name for name in analyses if name not in ("clusters", "norms")]


def _choose_analyses(options: AnalyseOptions, run: Run) -> Sequence[Analysis]:
    """Return the requested analyses in their order; by default all that a run's task has.

    The analysis ``answers`` needs ``--answers``, and is left out by default without it.

    Raises:
        UserError: an analysis is for another kind of task, or lacks its texts.
    """
    available: Sequence[Analysis] = run.kind.analyses
    other = [name for name in options.what if name not in available]
    if other:
        raise UserError(
            f"--what {other[0]} is not an analysis of the task {run.task.name}. Choose from "
            f"{', '.join(available)}."
        )
    selected = [name for name in available if name in (options.what or available)]
    if options.answers is not None and "answers" not in selected:
        raise UserError(
            "--answers is only for the analysis answers of rated pairs, which is not among those "
            "to run. Leave it out, or add answers to --what."
        )
    if options.answers is None and "answers" in options.what:
        raise UserError("the analysis answers needs the texts to compare. Add --answers FILE.")
    return [name for name in selected if name != "answers" or options.answers is not None]


def _check_folder_writable(folder: Path) -> bool:
    """Return whether ``analyses.json`` can be written to a run; log why it cannot."""
    try:
        check_writable(folder / "analyses.json")
    except UserError as error:
        log.info(f"no analyses.json is written, nor pictures without --out: {error}")
        return False
    return True


def _describe(predictor: RunEmbeddingHead) -> dict[str, Any]:
    """Return the recipe and the features of a predictor, for a row of results."""
    view = predictor.view
    return {"head": predictor.recipe, "prompt": view.name, "subtract": view.subtracts}


def _analyse_isotropy(
    predictors: Sequence[RunEmbeddingHead], data: _Split, seed: int, figure: Path | None
) -> list[dict[str, Any]]:
    results = measure_predictors(predictors, data.pairs, seed)
    if figure is not None:
        plot_isotropy(results, figure)
    return [{key: row[key] for key in row if key != "cosines"} for row in results]


def _analyse_clusters(
    predictors: Sequence[RunEmbeddingHead],
    fitted: Sequence[RunFittedHead],
    data: _Split,
    sizes: tuple[int, int],
    seed: int,
    figure: Callable[[str], Path | None],
) -> list[dict[str, Any]]:
    """Cluster the embeddings of some sentences under the most frequent conditions.

    Rows of fitted heads also have the impurity of the features that the head reads.
    """
    n_conditions, n_sentences = sizes
    conditions = data.texts(data.rows.condition)
    names = [name for name, _ in Counter(conditions).most_common(n_conditions)]
    if len(names) < 2:
        raise UserError("clusters of conditions need at least 2 conditions, but the split has 1.")
    positions: list[int] = []
    for name in names:
        positions += [i for i, text in enumerate(conditions) if text == name][:n_sentences]
    labels = [conditions[i] for i in positions]
    by_name = {predictor.name: predictor for predictor in predictors}
    vectors, results = {}, {}
    for name, predictor in by_name.items():
        pairs = data.pairs(predictor)
        points = vectors[name] = predictor.head.transform(pairs.first, pairs.condition)[positions]
        result = impurity(points, labels, seed=seed)
        figures = {"impurity": result["value"], **result}
        results[name] = {"name": name, **figures, **_describe(predictor)}
    kinds = np.array([names.index(text) for text in labels])
    legend = {number: f"{number}: {name}" for number, name in enumerate(names)}
    sentences = data.texts(data.rows.sentence1)
    texts = [sentences[i] for i in positions]
    for head in fitted:
        # Zero-shot on separate features is e(s) - e(c), which clusters by condition already.
        features = as_matrix(data.pairs(head).first).read(positions)
        results[head.name]["impurity_before"] = impurity(features, labels, seed=seed)["value"]
        path = figure(f"clusters-{head.name}")
        if path is None:
            continue
        maps = {f"features of {head.view.name}": features, head.name: vectors[head.name]}
        panels = [MapPanel(title, project_2d(v), kinds, legend) for title, v in maps.items()]
        plot_maps(panels, texts, path, "")
    return list(results.values())


def _find_input_features(head: RunFittedHead, run: Run) -> RunEmbeddingHead:
    """Return zero-shot on the features that a head was fitted on."""
    return zero_shot_heads(run, head.view.prompts[0])[-1 if head.view.subtract else 0]


def _analyse_conditions(
    predictors: Sequence[RunEmbeddingHead], data: _Split, run: Run
) -> list[dict[str, Any]]:
    trained_on = {name for predictor in predictors for name in predictor.trained_on}
    known = [text for part in training_rows(run, trained_on, None) for text in part.condition]
    metric = run.task.main_metric
    results = []
    for predictor in predictors:
        similarity = predict(predictor, data.pairs(predictor))
        subsets = seen_unseen(known, data.rows.take(data.rated), similarity, metric)
        row: dict[str, Any] = {"name": predictor.name, **_describe(predictor)}
        row["metric"] = metric.name
        row |= {
            f"n_{kind}_conditions": subsets[kind].about["n_conditions"]
            for kind in ("seen", "unseen")
        }
        for kind, subset in subsets.items():
            value, *interval = map(finite_or_none, astuple(subset.main))
            row |= {kind: value, f"{kind}_ci": interval, f"n_{kind}": subset.n}
        results.append(row)
    return results


def _analyse_norms(head: RunFittedHead, data: _Split) -> dict[str, Any]:
    condition = data.pairs(head).condition
    if condition is None:
        raise UserError(
            f"the head {head.name} takes no conditions, so there are no norms to analyse."
        )
    first, _ = as_matrix(condition).unique()
    norms = head.head.matrix_norms(as_matrix(condition).take(first))
    size = head.head.dim_in * head.head.dim_out
    figures = {"mean_norm": float(norms.mean()), **frobenius_variance(norms, size)}
    return {"name": head.name, **figures, **_describe(head)}


def _list_examples(head: RunFittedHead, run: Run, data: _Split, top: int) -> dict[str, Any]:
    features = _find_input_features(head, run)
    before = predict(features, data.pairs(features))
    pairs = data.pairs(head)
    after = predict(head, pairs)
    better, worse = most_changed(pairs.rating, before, after)
    names = ("sentence1", "sentence2", "condition")
    texts = [data.texts(getattr(data.rows, name)) for name in names]
    figures = [column.tolist() for column in (pairs.rating, before, after)]
    changes = [
        dict(zip((*names, "rating", "before", "after"), row, strict=True))
        for row in zip(*texts, *figures, strict=True)
    ]

    def table(order: Sequence[int]) -> list[Mapping[str, Any]]:
        return change_table([changes[i] for i in order[:top]])

    return {
        "name": head.name,
        **_describe(head),
        "before": features.name,
        "n_better": len(better),
        "n_worse": len(worse),
        "better": table(better),
        "worse": table(worse),
    }


def _draw_turns(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the differences by turn (figure 8)."""
    if not can_draw():
        log.info(f"no pictures: {MISSING_LIBRARIES} ({install_command('report')})")
        return
    series: dict[str, list[Point]] = {
        f"{row['name']}, {row['score']}": [
            (turn["turn"], turn["difference"], *turn["difference_ci"]) for turn in row["turns"]
        ]
        for row in rows
    }
    history = rows[0]["history"]
    plot_curve(
        series,
        path,
        xlabel=f"turn of the context (the candidates are turn {history + 1})",
        ylabel="cosine with the answer minus mean cosine with other candidates",
        band="with 95 % intervals over dialogues",
    )
